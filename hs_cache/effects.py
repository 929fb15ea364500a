"""What a cache operation asks of the outside world.

An operation is a generator that yields these and gets back what they result in. The same generator is driven by the
blocking client, by the asyncio client, and in tests by plain function calls; none of its logic exists twice.
"""

import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

T = TypeVar("T")

_FLOOR_BYTES_PER_S = 64 << 20
_MOMENT_S = 0.05


class Peer(Protocol):
    """An actor of the service, as an address for `Call`."""

    @property
    def node_id(self) -> str:
        """The node it runs on, as Ray's hex id."""
        ...

    def post(self, method: str, *args: Any) -> None:
        """Call a method without waiting for it; `ServiceError` when the call can't even be sent."""
        ...


@dataclass(frozen=True, slots=True)
class Located:
    """The node that serves this client: its hidden-state actor, its KV actor, and the node the client itself is on."""

    peer: Peer
    kv: Peer
    client_node_id: str


@dataclass(frozen=True, slots=True)
class Locate:
    """Decide which node serves this client; results in `Located`, or raises `ServiceError` within `timeout_s`.

    Of the nodes that this client is not on, those in `avoid` are taken last.
    """

    timeout_s: float
    avoid: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Call:
    """Call an actor; results in what it returns, raises what it raised, or `ServiceError` within `timeout_s`."""

    peer: Peer
    method: str
    args: tuple[Any, ...]
    timeout_s: float
    carries_rows: bool = False  # sending it takes as long as copying them


@dataclass(frozen=True, slots=True)
class Find:
    """An actor of another node, or with `node_id` None the service's controller; results in a `Peer`."""

    node_id: str | None
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Begin:
    """Call an actor without waiting; results in `num_returns` refs for `Fetch`, or in one by itself, whatever becomes
    of the call.
    """

    peer: Peer
    method: str
    args: tuple[Any, ...]
    num_returns: int


@dataclass(frozen=True, slots=True)
class Pause:
    """Let time pass; results in None."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Fetch:
    """Get the object behind a ref; raises as `Call` does."""

    ref: Any
    timeout_s: float


class Work:
    """Copying that may take long; results in None. The asyncio client runs it on a thread, where it can't be
    interrupted.

    So memory that it reads or writes must not be given up while it runs: see `abandon`.
    """

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function
        self._lock = threading.Lock()
        self._state = "new"
        self._then: Callable[[], None] | None = None

    def run(self) -> None:
        """Run it in the calling thread, unless it was abandoned before."""
        with self._lock:
            if self._state == "abandoned":
                return
            self._state = "running"
        try:
            self._function()
        finally:
            with self._lock:
                self._state, then = "done", self._then
            if then is not None:
                then()

    def revoke(self) -> bool:
        """Whether this work has not begun, and then never will."""
        with self._lock:
            if self._state == "new":
                self._state = "abandoned"
            return self._state == "abandoned"

    def abandon(self, then: Callable[[], None]) -> None:
        """Call `then` as soon as this work surely touches nothing any more: now, or when the running copy ends."""
        with self._lock:
            if self._state == "running":
                self._then = then
                return
            self._state = "abandoned"
        then()


def after(work: Work | None, then: Callable[[], None]) -> None:
    """Call `then` when `work`, if it was begun at all, surely touches nothing any more."""
    if work is None:
        then()
    else:
        work.abandon(then)


class Budget:
    """What is left of an operation's time for calls; copying rows has time of its own.

    Args:
        seconds: from now on.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.restart()

    @property
    def is_fresh(self) -> bool:
        """Whether at least half of it is left: who doesn't answer in that time has had its chance."""
        return self.left_s >= self._seconds / 2

    @property
    def left_s(self) -> float:
        """Seconds, not below 0."""
        return max(self._until - time.monotonic(), 0.0)

    @property
    def is_spent(self) -> bool:
        """Whether what is left is too little to ask anyone anything."""
        return self.left_s < min(_MOMENT_S, self._seconds / 4)

    def restart(self) -> None:
        """All of the time again; for what comes after a copy."""
        self._until = time.monotonic() + self._seconds


def transfer_s(nbytes: int) -> float:
    """Seconds that moving rows may take, at the slowest that still counts as working; on top of a call's time."""
    return nbytes / _FLOOR_BYTES_PER_S


Effect: TypeAlias = Locate | Find | Call | Begin | Fetch | Pause | Work
Steps: TypeAlias = Generator[Effect, Any, T]
"""An operation that results in a T."""
