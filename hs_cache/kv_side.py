"""A node's dealings with its KV side, whatever state that is in: trouble there costs answers, never threads."""

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from hs_cache.keys import KVNames
from hs_cache.kv_presence import KVPresence, Presence

logger = logging.getLogger(__name__)

_MAX_WAITING = 16
"""Calls that may wait for the KV side at a time: fewer than the actor has threads, so that a KV side which hangs does
not take stores and everything else with it."""

_TURN_S = 0.05
_QUIET_S = 1.0
"""How long the KV side is left alone after it has kept a call waiting for nothing."""


class KVSide:
    """Asks a `KVPresence`, and takes *unknown* for whatever it can't or won't say in time. Thread-safe.

    Args:
        kv: the node's KV side; None when no KV source is bound, and all KV counts as present.
        node_id: for the log.

    Attributes:
        asked_total: how often it had to be asked.
    """

    def __init__(self, kv: KVPresence | None, *, node_id: str) -> None:
        self._kv = kv
        self._node_id = node_id
        self._turns = threading.Semaphore(_MAX_WAITING)
        self._quiet_until = 0.0
        self._in_trouble = False
        self._counting = threading.Lock()
        self.asked_total = 0

    def ask(self, names: KVNames | None, kv_local: Sequence[bool], timeout_s: float) -> list[int]:
        """Presence per chunk: what this node's KV side says of its own chunks, *present* for all others.

        Blocks for the KV side, at most `timeout_s`, unless it is known what it would say.

        Args:
            names: what the KV source calls the chunks; None where that isn't known, and so neither is their presence.
            kv_local: which chunks are this node's.
        """
        presence: list[int] = [Presence.PRESENT] * len(kv_local)
        if self._kv is None or True not in kv_local:
            return presence
        asked: Sequence[int] = range(len(kv_local))
        if False in kv_local:
            asked = [position for position, local in enumerate(kv_local) if local]
        states = [Presence.UNKNOWN] * len(asked)
        if names is not None:
            names = names.pick(asked)
            if self._kv.known(names):
                return presence
            states = self._answers(self._kv, names, len(asked), timeout_s)
        for position, state in zip(asked, states, strict=True):
            presence[position] = state
        return presence

    def note_stored(self, names: bytes, engine: str) -> None:
        """Tell the KV side that rows of these chunks are being stored; doesn't block."""
        if self._kv is not None:
            self._kv.note_stored(names, engine)

    def settle_notes(self, timeout_s: float) -> None:
        """Wait until what was noted has arrived, unless it may come late, at most `timeout_s`; not at all while the KV
        side is left alone."""
        if self._kv is None:
            return
        if not self._take_turn():
            self._kv.settle_notes(0.0)
            return
        with self._waiting(timeout_s):
            if not self._kv.settle_notes(timeout_s):
                raise TimeoutError("it does not take in what is stored")

    def _answers(self, kv: KVPresence, names: KVNames, count: int, timeout_s: float) -> list[Presence]:
        states = [Presence.UNKNOWN] * count
        if self._take_turn():
            with self._counting:
                self.asked_total += 1
            with self._waiting(timeout_s):
                answers = [Presence(answer) for answer in kv.presence(names, timeout_s)]
                if len(answers) != count:
                    raise ValueError(f"{len(answers)} answers for {count} chunks")
                self._in_trouble = False
                states = answers
        return states

    def _take_turn(self) -> bool:
        """Whether a call may wait for the KV side now; then `_waiting` gives the turn back."""
        return time.monotonic() >= self._quiet_until and self._turns.acquire(timeout=_TURN_S)

    @contextmanager
    def _waiting(self, timeout_s: float) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        # The KV side is foreign code: whatever it raises, the rows stay and the prefix ends.
        except Exception as error:
            if time.monotonic() - started > timeout_s / 2:
                self._quiet_until = time.monotonic() + _QUIET_S
            if not self._in_trouble:
                self._in_trouble = True
                logger.warning(
                    "the KV side of node %s doesn't answer, so nothing that it must vouch for is served: %s: %s",
                    self._node_id,
                    type(error).__name__,
                    error,
                )
        finally:
            self._turns.release()
