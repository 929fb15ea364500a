"""Which KV chunks a node still holds: the protocol that retrieves ask, and the index behind the KV actor.

Presence is tri-state. *Unknown* ends a prefix and drops nothing; only *absent* lets the hidden states of a chunk go.
"""

import threading
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol, runtime_checkable

from hs_cache.errors import InvalidInputError
from hs_cache.keys import KVNames
from hs_cache.kv_log import RetractionLog
from hs_cache.messages import split_keys


class Presence(IntEnum):
    """What a KV source says of one chunk."""

    ABSENT = 0
    PRESENT = 1
    UNKNOWN = 2


class KVPresence(Protocol):
    """What a retrieve asks of the KV side of its node. Names are what the KV source calls chunks: their keys, or what
    `hs_cache.keys.KVNames` has."""

    def known(self, names: KVNames) -> bool:
        """Whether all of these are known to be present without asking. Does not block; never raises."""
        ...

    def presence(self, names: KVNames, timeout_s: float) -> Sequence[int]:
        """One `Presence` per name, in order. Blocks up to `timeout_s`; may raise, which counts as unknown."""
        ...

    def note_stored(self, names: bytes, engine: str) -> None:
        """Rows of these chunks are being stored, so `engine` has just written their KV. Does not block; never
        raises."""
        ...

    def settle_notes(self, timeout_s: float) -> bool:
        """Whether every earlier `note_stored` has arrived, but for those that may come late; blocks up to `timeout_s`
        for that. Never raises."""
        ...


@dataclass(frozen=True)
class KVStatistics:
    """A `KVSource` at one moment.

    Attributes:
        present, absent, unknown: chunks listed, by state; of a source that is asked live, none are.
        unlisted: what all others count as.
        reports_total: how often it was told something.
        engines: those it has heard of.
        gaps_total: how often something that an engine said was lost, so that all it had said became unknown.
    """

    present: int
    absent: int
    unknown: int
    unlisted: str
    reports_total: int
    engines: tuple[str, ...] = ()
    gaps_total: int = 0


class KVSource(Protocol):
    """Where a `KVActor` has its knowledge from. Called by one thread at a time."""

    def presence(self, names: bytes, tags: tuple[tuple[str, str], ...], timeout_s: float) -> bytes:
        """One `Presence` per 16-byte name, as a byte. Blocks up to `timeout_s`; may raise, which counts as unknown.

        Of several engines on the node one that has a chunk is enough; it is absent when all of them say so.
        """
        ...

    def note_stored(self, names: bytes, engine: str) -> None:
        """Hidden states of these chunks are being stored by a client of `engine`."""
        ...

    def stats(self) -> KVStatistics:
        """Counts."""
        ...

    def close(self) -> None:
        """End threads and connections; idempotent.

        For a source that ends before its process. An actor ends with its process, often killed, so a source must leave
        nothing behind without this either: its threads are daemons.
        """
        ...


@runtime_checkable
class RegistersEngines(Protocol):
    """A `KVSource` which asks engines that make themselves known."""

    def register_engine(self, registration: Any) -> None:
        """Ask from now on what `registration` describes; of which type it is, is up to the source."""
        ...


def united(answers: Sequence[Sequence[int | None]], count: int) -> bytes:
    """Presence of `count` chunks from what each engine of a node says of them; None is no word.

    One that has a chunk is enough. It is absent when one says so and no other may have it.
    """
    presence = bytearray()
    for position in range(count):
        states = {answer[position] for answer in answers} - {None}
        if Presence.PRESENT in states:
            presence.append(Presence.PRESENT)
        else:
            presence.append(Presence.ABSENT if states == {Presence.ABSENT} else Presence.UNKNOWN)
    return bytes(presence)


class KVIndex:
    """Presence of KV chunks as reported by the engine; thread-safe, bounded, O(1) per key.

    Args:
        capacity: most keys remembered. Those neither reported nor asked for the longest are forgotten first, and are
            *unknown* from then on.
        store_implies_present: storing hidden states says that the same forward pass wrote their KV
            (``kv_source: reports``).
        log: told of all that may have been present and is not any more.
        taken_back: the position there of what has concerned all keys before.
    """

    def __init__(
        self, capacity: int, *, store_implies_present: bool, log: RetractionLog | None = None, taken_back: int = -1
    ) -> None:
        if capacity < 1:
            raise InvalidInputError(f"capacity: got {capacity}, expected at least 1 key")
        self._capacity = capacity
        self._log = log
        self._store_implies_present = store_implies_present
        self._lock = threading.Lock()
        self._listed: OrderedDict[bytes, Presence] = OrderedDict()
        self._unlisted: Presence | None = None
        self._taken_back: dict[bytes, int] = {}  # where in the log those listed that aren't present were taken back
        self._all_taken_back = taken_back  # and where the last of those was that aren't listed
        self._reports = 0

    def report_stored(self, keys: bytes) -> None:
        """The engine wrote KV for these chunks."""
        self._report(keys, Presence.PRESENT)

    def report_evicted(self, keys: bytes) -> None:
        """The engine no longer has KV for these chunks."""
        self._report(keys, Presence.ABSENT)

    def note_stored(self, keys: bytes, since: int | None = None) -> None:
        """Hidden states of these chunks are being stored, so whatever was heard of their absence is out of date.

        They are present where a store implies it; elsewhere they are unknown until their source says more.

        Args:
            since: the position in the log at which they were being stored, if this may come late: what was taken back
                from there on stays so.
        """
        split = split_keys(keys)
        with self._lock:
            if since is not None:
                split = [key for key in split if self._last_taken_back(key) < since]
            if self._store_implies_present:
                self._list(split, Presence.PRESENT)
            else:
                self._list([key for key in split if self._listed.get(key) is not Presence.PRESENT], Presence.UNKNOWN)

    def resync(self, keys: bytes) -> None:
        """`keys` is all the engine holds: everything else is absent from now on, until reported or stored again."""
        present = split_keys(keys)
        with self._lock:
            self._reports += 1
            self._take_all_back(Presence.ABSENT)
            self._list(present, Presence.PRESENT)

    def forget(self) -> None:
        """Something was lost: nothing is known any more."""
        with self._lock:
            self._take_all_back(Presence.UNKNOWN)

    def presence(self, keys: bytes) -> bytes:
        """One byte per key, its `Presence`. What is asked for is in use, and so not forgotten next, its head last."""
        return bytes(Presence.UNKNOWN if state is None else state for state in self.says(keys))

    def says(self, keys: bytes) -> list[Presence | None]:
        """As `presence`, but None for keys of which nothing was ever said, as long as nothing was forgotten."""
        split = split_keys(keys)
        with self._lock:
            self._touch(split)
            return [self._listed.get(key, self._unlisted) for key in split]

    def touch(self, keys: Sequence[bytes]) -> None:
        """These are in use, and so not forgotten next, the first of them last."""
        with self._lock:
            self._touch(keys)

    def stats(self) -> KVStatistics:
        """Counts, under the lock; O(capacity)."""
        with self._lock:
            count = Counter(self._listed.values())
            return KVStatistics(
                present=count[Presence.PRESENT],
                absent=count[Presence.ABSENT],
                unknown=count[Presence.UNKNOWN],
                unlisted=(Presence.UNKNOWN if self._unlisted is None else self._unlisted).name.lower(),
                reports_total=self._reports,
            )

    def _report(self, keys: bytes, state: Presence) -> None:
        split = split_keys(keys)
        with self._lock:
            self._reports += 1
            self._list(split, state)

    def _touch(self, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):
            if key in self._listed:
                self._listed.move_to_end(key)

    def _list(self, keys: Sequence[bytes], state: Presence) -> None:
        for key in keys:
            self._listed[key] = state
            self._listed.move_to_end(key)
        forgotten = []
        while len(self._listed) > self._capacity:
            forgotten.append(self._listed.popitem(last=False)[0])
            # What was forgotten may have been present: an unlisted key can no longer be called absent.
            self._unlisted = Presence.UNKNOWN
        if state is Presence.PRESENT:
            for key in keys:
                self._taken_back.pop(key, None)
        elif self._log is not None:
            self._taken_back |= dict.fromkeys(keys, self._log.retract(keys))
        for key in forgotten:
            self._all_taken_back = max(self._all_taken_back, self._taken_back.pop(key, -1))
        if forgotten and self._log is not None:
            self._log.retract(forgotten)

    def _take_all_back(self, state: Presence) -> None:
        self._listed.clear()
        self._taken_back.clear()
        self._unlisted = state
        if self._log is not None:
            self._all_taken_back = self._log.retract_all()

    def _last_taken_back(self, key: bytes) -> int:
        return self._taken_back.get(key, -1) if key in self._listed else self._all_taken_back
