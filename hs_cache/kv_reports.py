"""KV presence from what engines report by themselves, through ``cache.kv`` or by the `KVActor`'s handle."""

import logging
from collections import OrderedDict
from enum import Enum

from hs_cache.keys import KEY_BYTES
from hs_cache.kv_log import RetractionLog
from hs_cache.kv_presence import KVIndex, KVStatistics, united
from hs_cache.messages import ReportNumber, split_keys

logger = logging.getLogger(__name__)

_MAX_ENGINES = 64
_MAX_SENDERS = 4096


class Report(Enum):
    """What an engine says of chunks; the values are names of `KVIndex`'s methods."""

    STORED = "report_stored"
    EVICTED = "report_evicted"
    RESYNC = "resync"


class ReportedKV:
    """A `hs_cache.kv_presence.KVSource`: one index per engine of the node, each fed by that engine's own reports.

    Of more than 64 engines the one that has been silent for the longest is forgotten, as if it had gone. Reports of one
    sender about one engine are numbered. When one is missing, what this engine had said is unknown, until it says so
    anew, or resyncs.

    Args:
        capacity: most chunks remembered per engine.
        store_implies_present, log: see `KVIndex`.
    """

    def __init__(self, capacity: int, *, store_implies_present: bool = True, log: RetractionLog | None = None) -> None:
        self._capacity = capacity
        self._store_implies_present = store_implies_present
        self._log = log
        self._indexes: dict[str, KVIndex] = {}
        self._numbers: OrderedDict[tuple[str, bytes], int] = OrderedDict()
        self._gaps = 0
        self._forgotten = -1  # where in the log an engine was

    def presence(self, names: bytes, tags: tuple[tuple[str, str], ...] = (), timeout_s: float = 0.0) -> bytes:
        """See `KVSource`; doesn't block. Before any engine has said anything, all is unknown."""
        count = len(names) // KEY_BYTES
        return united([index.says(names) for index in self._indexes.values()], count)

    def note_stored(self, names: bytes, engine: str = "", since: int | None = None) -> None:
        """See `KVSource`, and `KVIndex.note_stored` for `since`."""
        self._index(engine).note_stored(names, since)

    def touch(self, names: bytes) -> None:
        """These chunks are in use; see `KVIndex.touch`."""
        split = split_keys(names)
        for index in self._indexes.values():
            index.touch(split)

    def report(self, what: Report, keys: bytes, engine: str = "", number: ReportNumber | None = None) -> None:
        """Take in what an engine says; without a number it is taken as it comes.

        Raises:
            InvalidInputError: these aren't keys; nothing was changed.
        """
        split_keys(keys)  # refuses what are none
        index = self._index(engine)
        if number is not None:
            expected = self._expected(engine, number)
            if number.number != expected:
                index.forget()
                self._gaps += 1
            if number.number < expected:  # it tells of a time before what is known
                return
        getattr(index, what.value)(keys)

    def stats(self) -> KVStatistics:
        """Counts over all engines."""
        of_each = [index.stats() for index in self._indexes.values()]
        unlisted = {stats.unlisted for stats in of_each} or {"unknown"}
        return KVStatistics(
            present=sum(stats.present for stats in of_each),
            absent=sum(stats.absent for stats in of_each),
            unknown=sum(stats.unknown for stats in of_each),
            unlisted=unlisted.pop() if len(unlisted) == 1 else "unknown",
            reports_total=sum(stats.reports_total for stats in of_each),
            engines=tuple(sorted(self._indexes)),
            gaps_total=self._gaps,
        )

    def close(self) -> None:
        """Nothing to end."""

    def _index(self, engine: str) -> KVIndex:
        index = self._indexes.pop(engine, None)
        if index is None:
            index = KVIndex(
                self._capacity,
                store_implies_present=self._store_implies_present,
                log=self._log,
                taken_back=self._forgotten,
            )
        self._indexes[engine] = index  # the last to have said something
        if len(self._indexes) > _MAX_ENGINES:
            silent = next(iter(self._indexes))
            del self._indexes[silent]
            if self._log is not None:
                self._forgotten = self._log.retract_all()
            logger.warning("more than %d engines on one node: %r is forgotten", _MAX_ENGINES, silent)
        return index

    def _expected(self, engine: str, number: ReportNumber) -> int:
        sender = (engine, number.sender)
        expected = self._numbers.pop(sender, 0)
        self._numbers[sender] = max(expected, number.number + 1)
        while len(self._numbers) > _MAX_SENDERS:
            self._numbers.popitem(last=False)
        return expected
