"""What a `HiddenStateActor` knows of its `KVActor`: by asking, and without where a log says enough. No Ray in here."""

import logging
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from hs_cache.errors import PoolError, ServiceError, ServiceNotRunningError
from hs_cache.keys import KVNames
from hs_cache.kv_log import ConfirmedKV, Mark, RetractionView
from hs_cache.kv_presence import Presence
from hs_cache.messages import PoolAddress, split_keys

logger = logging.getLogger(__name__)

_SOURCE_SHARE = 0.8
"""Part of a KV check's time that its source may take: one that hangs is then an answer, *unknown*, and not silence."""

_GATHER_S = 0.05
"""How long notes of what is stored are gathered into one call."""

_LOG_TIMEOUT_S = 0.5
_MAX_TOUCHED = 8192


class KVCalls(Protocol):
    """Calls of the node's `KVActor`, whoever that is at the time. Those of one process take effect in order."""

    def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        """What the method returns.

        Raises:
            ServiceNotRunningError: the actor is gone for good; `renew` finds the next one.
            ServiceError: it doesn't answer in time.
        """
        ...

    def send(self, method: str, *args: Any) -> Any:
        """Call without waiting: what comes back is for `wait`."""
        ...

    def wait(self, sent: Sequence[Any], timeout_s: float) -> bool:
        """Whether all of these calls have been carried out, or have failed; blocks up to `timeout_s` for that."""
        ...

    def renew(self) -> None:
        """Look the actor up again. `ServiceError` when there is none."""
        ...


class KVLink:
    """A `hs_cache.kv_presence.KVPresence` that asks a `KVActor`. Thread-safe.

    Where the actor has a `hs_cache.kv_log.RetractionLog`, what it has said once is not asked again before it is taken
    back, and notes of what is stored need not be waited for: each says how far the log was, so it can't undo what was
    reported later. `look_after` opens the log; until then, and where it can't be opened, each retrieve asks.

    Args:
        calls: of the actor.
        logs: whether it has such a log.
        capacity: most chunks of which is remembered that they are present.
    """

    def __init__(self, calls: KVCalls, *, logs: bool, capacity: int) -> None:
        self._calls = calls
        self._logs = logs
        self._lock = threading.Lock()
        self._confirmed = ConfirmedKV(capacity)
        self._is_gone = False
        self._sent: list[Any] = []  # notes without a mark, to be waited for
        self._sending = threading.Lock()
        self._notes: SimpleQueue[tuple[bytes, str, bytes, int]] = SimpleQueue()
        self._noted = threading.Event()
        self._touched: dict[bytes, None] = {}  # found to be present without asking
        self._told = b""  # the log of which was told that it can't be opened

    def known(self, names: KVNames) -> bool:
        """Whether all of these are present, as is known without a call."""
        split = split_keys(names.blob)
        if not self._confirmed.has(split):
            return False
        with self._lock:
            if len(self._touched) < _MAX_TOUCHED:
                self._touched |= dict.fromkeys(split)
        return True

    def presence(self, names: KVNames, timeout_s: float) -> Sequence[int]:
        """Blocks for one call, up to `timeout_s`."""
        self.send_notes()
        try:
            asked = (names.blob, names.tags, timeout_s * _SOURCE_SHARE)
            answer, mark = self._calls.call("marked_presence", *asked, timeout_s=timeout_s)
        except ServiceNotRunningError:
            self._lose()
            raise
        if mark is not None:
            if mark[0] != self._confirmed.token:  # another actor has taken the place of the one that is followed
                self._confirmed.follow(None)
            states = zip(split_keys(names.blob), answer, strict=True)
            self._confirmed.confirm([name for name, state in states if state == Presence.PRESENT], Mark(*mark))
        return answer  # type: ignore[no-any-return]

    def note_stored(self, names: bytes, engine: str) -> None:
        """Has it told soon; at once, and remembered for `settle_notes`, where no log can be relied on."""
        mark = self._confirmed.mark()
        if mark is not None:
            self._confirmed.confirm(split_keys(names), mark)
            self._notes.put((names, engine, *mark))
            self._noted.set()
            return
        note = self._calls.send("note_stored", names, engine)
        with self._lock:
            self._sent.append(note)

    def settle_notes(self, timeout_s: float) -> bool:
        """Whether the notes that must not be late have arrived; blocks up to `timeout_s` for that."""
        with self._lock:
            sent = list(self._sent)  # left there meanwhile: another thread may have to wait for the same
        if not sent:
            return True
        settled = self._calls.wait(sent, timeout_s)
        with self._lock:
            self._sent = [note for note in self._sent if note not in sent]
        return settled

    def send_notes(self) -> None:
        """Tell what was noted so far: what is asked afterwards is answered with that in mind."""
        with self._sending:
            notes = []
            with suppress(Empty):
                while True:
                    notes.append(self._notes.get_nowait())
            if notes:
                self._calls.send("note_stored_late", tuple(notes))

    def run(self) -> None:
        """Tell what is noted, for ever; on a thread of its own."""
        while True:
            self._noted.wait()
            self._noted.clear()
            time.sleep(_GATHER_S)
            try:
                self.send_notes()
            except Exception:  # it has to go on; chunks that aren't noted are unknown once they are asked for
                logger.exception("the KV actor could not be told what is stored")

    def look_after(self) -> None:
        """Find the actor again if it is gone, and its log; blocks for the cluster's control store, or half a second for
        the actor, then. Tell it what is in use."""
        if self._is_gone:
            with suppress(ServiceError):  # there is none yet
                self._calls.renew()
                self._is_gone = False
        if self._logs and not self._confirmed.follows():
            self._follow()
        with self._lock:
            touched, self._touched = self._touched, {}
        if touched:
            self._calls.send("touch", b"".join(touched))

    def _lose(self) -> None:
        self._is_gone = True
        self._confirmed.follow(None)

    def _follow(self) -> None:
        try:
            address: PoolAddress | None = self._calls.call("log_address", timeout_s=_LOG_TIMEOUT_S)
        except ServiceNotRunningError:
            return self._lose()
        except ServiceError as error:
            return logger.debug("the KV actor's log can't be found yet: %s", error)
        if address is None:
            return
        try:
            self._confirmed.follow(RetractionView(address))
        except PoolError as error:
            if address.incarnation != self._told:
                self._told = address.incarnation
                logger.warning("each retrieve will ask the KV actor, as its log can't be read: %s", error)
