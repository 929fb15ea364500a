"""How a node's `HiddenStateActor` learns from its `KVActor`: by calls, and without any where a log says enough."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, RayError

from hs_cache.errors import PoolError, ServiceError
from hs_cache.keys import KVNames
from hs_cache.kv_log import ConfirmedKV, Mark, RetractionView
from hs_cache.kv_presence import Presence
from hs_cache.messages import split_keys

logger = logging.getLogger(__name__)

_SOURCE_SHARE = 0.8
"""Part of a KV check's time that its source may take: one that hangs is then an answer, *unknown*, and not silence."""

_GATHER_S = 0.05
"""How long notes of what is stored are gathered into one call."""

_LOG_TIMEOUT_S = 0.5
_MAX_CONFIRMED = 262_144


class KVLink:
    """`hs_cache.kv_presence.KVPresence` over the node's `KVActor`. Thread-safe.

    Where the actor has a `hs_cache.kv_log.RetractionLog`, what it has said once is not asked again before it is taken
    back, and notes of what is stored need not be waited for: a note says how far the log was, so that it can't undo
    what was reported later. `look_after` opens the log; until then, and where it can't be opened, each retrieve asks.

    Args:
        find: looks the actor up. `look_after` does so again when it is gone for good: another one has its name then.
    """

    def __init__(self, find: Callable[[], ActorHandle[Any]]) -> None:
        self._find = find
        self._actor = find()
        self._is_gone = False
        self._lock = threading.Lock()
        self._unmarked: list[Any] = []  # calls that brought notes, to be waited for
        self._confirmed = ConfirmedKV(_MAX_CONFIRMED)
        self._used: dict[bytes, None] = {}  # names that were found to be present without asking
        self._sending = threading.Lock()
        self._notes: SimpleQueue[tuple[bytes, str, Mark]] = SimpleQueue()
        self._noted = threading.Event()
        self._unusable = b""  # a log that can't be opened
        threading.Thread(target=self._run, name="hs_cache-kv-notes", daemon=True).start()

    def known(self, names: KVNames) -> bool:
        """Whether all of these are present, as the log shows without a call."""
        if not self._confirmed.has(split_keys(names.blob)):
            return False
        with self._lock:
            self._used[names.blob] = None
        return True

    def presence(self, names: KVNames, timeout_s: float) -> Sequence[int]:
        """Blocks for one actor call, up to `timeout_s`."""
        self._send_notes()
        asked = self._actor.marked_presence.remote(names.blob, names.tags, timeout_s * _SOURCE_SHARE)
        try:
            answer, mark = ray.get(asked, timeout=timeout_s)
        except ActorDiedError:
            self._is_gone = True
            raise
        if mark is not None and answer is not None:
            states = zip(split_keys(names.blob), answer, strict=True)
            self._confirmed.confirm([name for name, state in states if state == Presence.PRESENT], Mark(*mark))
        return answer  # type: ignore[no-any-return]

    def note_stored(self, names: bytes, engine: str) -> None:
        """Has a call sent soon; where no log can be relied on at once, and remembers it for `settle_notes`."""
        mark = self._confirmed.mark()
        if mark is not None:
            self._confirmed.confirm(split_keys(names), mark)
            self._notes.put((names, engine, mark))
            self._noted.set()
            return
        note = self._actor.note_stored.remote(names, engine)
        with self._lock:
            self._unmarked.append(note)

    def settle_notes(self, timeout_s: float) -> bool:
        """Whether the notes that must not be late have been carried out, or have failed; blocks up to `timeout_s`."""
        with self._lock:
            sent = list(self._unmarked)  # left there meanwhile: another thread may have to wait for the same
        if not sent:
            return True
        _, late = ray.wait(sent, num_returns=len(sent), timeout=timeout_s, fetch_local=False)
        with self._lock:
            self._unmarked = [note for note in self._unmarked if note not in sent]
        return not late

    def look_after(self) -> None:
        """Find the actor again if it is gone, and its log; blocks for the cluster's control store, or half a second for
        the actor, then. Tells it what is in use."""
        if self._is_gone:
            with suppress(ServiceError):  # there is none yet
                self._actor = self._find()
                self._is_gone = False
        if not self._confirmed.followed:
            self._follow()
        with self._lock:
            used, self._used = self._used, {}
        if used:
            self._actor.note_used.remote(tuple(used))

    def _follow(self) -> None:
        with suppress(RayError):  # the next retrieve, or the next look, meets it as well
            address = ray.get(self._actor.log_address.remote(), timeout=_LOG_TIMEOUT_S)
            if address is None or address.incarnation == self._unusable:
                return
            try:
                self._confirmed.follow(RetractionView(address))
            except PoolError as error:
                self._unusable = address.incarnation
                logger.warning("each retrieve will ask the KV actor, its log can't be read: %s", error)

    def _run(self) -> None:
        while True:
            self._noted.wait()
            self._noted.clear()
            time.sleep(_GATHER_S)
            try:
                self._send_notes()
            except Exception:  # this thread has to go on; what isn't noted is asked for, and unknown
                logger.exception("the KV actor could not be told what is stored")

    def _send_notes(self) -> None:
        """Send what was noted so far. Calls of one process arrive in order, so what is asked afterwards knows it."""
        with self._sending:
            notes = []
            with suppress(Empty):
                while True:
                    notes.append(self._notes.get_nowait())
            if notes:
                self._actor.note_stored_since.remote(tuple(notes))
