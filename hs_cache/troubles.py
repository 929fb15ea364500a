"""What a client makes of trouble with the service: it is counted, logged once, and raised only for strict callers; and
who didn't answer is left alone for a while."""

import logging
import threading
import time
from typing import TypeVar

from hs_cache.effects import Steps
from hs_cache.errors import ServiceError, ServiceTimeoutError, StaleRevisionError

logger = logging.getLogger(__name__)

T = TypeVar("T")

_SUSPICION_S = 5.0


def without_frames(error: ServiceError) -> ServiceError:
    """The error, and what caused it, without their tracebacks: an error that is kept keeps the rows of every frame."""
    cause: BaseException | None = error
    while cause is not None:
        cause.__traceback__ = None
        cause = cause.__cause__ or cause.__context__
    return error


class Reported(Exception):
    """Takes an error that was counted already past everything else to the caller, who is strict.

    Attributes:
        error: what the caller is to see.
    """

    def __init__(self, error: ServiceError) -> None:
        super().__init__(error)
        self.error = error


def surfaced(steps: Steps[T]) -> Steps[T]:
    """The steps; to a client that is strict, what they report of trouble is raised."""
    try:
        return (yield from steps)
    except Reported as reported:
        failure = reported.error
    # Not while the other is being handled: each would refer to the other, and both to the caller's rows.
    try:
        raise failure
    finally:
        del failure


class Troubles:
    """One client's. Thread-safe.

    Args:
        strict: `report` raises.

    Attributes:
        timeouts_total, unreachable_total: calls that missed their deadline, and calls that failed otherwise.
        stale_stores_total: calls that were refused since the client's rows are of weights that are not current.
    """

    def __init__(self, *, strict: bool) -> None:
        self._strict = strict
        self._lock = threading.Lock()
        self._known: set[str] = set()
        self._told_stale = False
        self.timeouts_total = self.unreachable_total = self.stale_stores_total = 0

    def report(self, error: ServiceError, what: str) -> None:
        """Count an error, and log it if `what` was well before.

        Raises:
            Reported: the client is strict; nothing was logged.
        """
        with self._lock:
            if isinstance(error, ServiceTimeoutError):
                self.timeouts_total += 1
            else:
                self.unreachable_total += 1
            if self._strict:
                raise Reported(error)
            is_news = what not in self._known
            self._known.add(what)
        if is_news:
            # As text: whoever keeps the record would keep the error's frames, and with them the pool.
            logger.warning("hs_cache: %s can't be reached, and counts as empty until it can: %s", what, str(error))

    def refused(self, error: StaleRevisionError) -> None:
        """Count a store that was refused, and log the first one. The service is well.

        Raises:
            Reported: the client is strict; nothing was logged.
        """
        with self._lock:
            self.stale_stores_total += 1
            if self._strict:
                raise Reported(error)
            is_news, self._told_stale = not self._told_stale, True
        if is_news:
            logger.warning("hs_cache: stores of this client fail from now on: %s", str(error))

    def recovered(self, what: str) -> None:
        """`what` is well, so that its next trouble is news."""
        if what in self._known:
            self._known.discard(what)
            logger.warning("hs_cache: %s can be reached again", what)


class Suspects:
    """Who did not answer a moment ago: asking them again would cost every operation its deadline. Thread-safe."""

    def __init__(self) -> None:
        self._until: dict[str, float] = {}

    def add(self, name: str) -> None:
        """Suspect a node, or whatever else has a name, for five seconds from now on."""
        self._until[name] = time.monotonic() + _SUSPICION_S

    def names(self) -> frozenset[str]:
        """Who is under suspicion now."""
        now = time.monotonic()
        for name, until in list(self._until.items()):
            if until <= now:
                self._until.pop(name, None)
        return frozenset(self._until)
