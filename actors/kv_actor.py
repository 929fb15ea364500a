"""The actor that knows which KV chunks its node still holds. Needs no torch."""

import logging
import pkgutil
import sys
from collections.abc import Sequence
from typing import Any

from hs_cache.config import CacheConfig
from hs_cache.errors import InvalidInputError
from hs_cache.kv_log import RetractionLog
from hs_cache.kv_presence import KVSource, KVStatistics, RegistersEngines
from hs_cache.kv_reports import Report, ReportedKV
from hs_cache.messages import PoolAddress, ReportNumber

logger = logging.getLogger(__name__)

_SOURCES = {
    "lmcache": "hs_cache.integrations.lmcache_source:LMCacheSource",
    "vllm_events": "hs_cache.integrations.vllm_events:VLLMEventsSource",
}


class KVActor:
    """Answers the `HiddenStateActor` of the same node, from the service's `hs_cache.kv_presence.KVSource`.

    Not threaded: calls of one sender take effect in the order in which they were sent. That an eviction reported after
    a store comes after it here is due to the marks of late notes; until these have come, some 50 ms, the store's node
    knows of its chunks and this actor doesn't. Names of chunks are blobs of 16 bytes each: keys, or what
    `hs_cache.keys.KVNames` has where the source needs those.
    """

    def __init__(self, config: CacheConfig) -> None:
        self._source: KVSource | None = None
        self._log = _make_log() if config.kv_source == "reports" else None  # what others say holds for that moment
        self._reported = ReportedKV(config.kv_index_capacity, log=self._log)
        if config.kv_source == "reports":
            self._source = self._reported
        elif config.kv_source != "none":  # one that isn't listed must not count as none, where all KV is present
            make: Any = pkgutil.resolve_name(_SOURCES[config.kv_source])
            self._source = make(config)

    def bound(self) -> bool:
        """Whether a KV source is configured; if none is, KV counts as present."""
        return self._source is not None

    def presence(self, names: bytes, tags: tuple[tuple[str, str], ...] = (), timeout_s: float = 1.0) -> bytes | None:
        """One byte per chunk, its `hs_cache.kv_presence.Presence`; None when no KV source is bound."""
        return None if self._source is None else self._source.presence(names, tags, timeout_s)

    def marked_presence(
        self, names: bytes, tags: tuple[tuple[str, str], ...], timeout_s: float
    ) -> tuple[bytes | None, tuple[bytes, int] | None]:
        """As `presence`, and the `hs_cache.kv_log.Mark` up to which it holds; None where there is no log."""
        mark = None if self._log is None else self._log.mark()
        return self.presence(names, tags, timeout_s), None if mark is None else (mark.token, mark.position)

    def log_address(self) -> PoolAddress | None:
        """Where a process of this node opens the `hs_cache.kv_log.RetractionLog`; None where there is none."""
        return self._log.address if self._log is not None else None

    def note_stored(self, names: bytes, engine: str = "") -> None:
        """Hidden states of these chunks are being stored by a client of `engine`."""
        if self._source is not None:
            self._source.note_stored(names, engine)

    def note_stored_late(self, notes: Sequence[tuple[bytes, str, bytes, int]]) -> None:
        """What was stored a moment ago: names, engine, and the mark at which they were being stored. What this engine
        took back since stays taken back. Notes for a predecessor of this actor are of no account."""
        for names, engine, token, position in notes:
            if self._log is not None and token == self._log.token:
                self._reported.note_stored(names, engine, since=position)

    def touch(self, names: bytes) -> None:
        """These chunks were found to be present without asking: what is in use is not forgotten next."""
        self._reported.touch(names)

    def report_stored(self, keys: bytes, engine: str = "", number: ReportNumber | None = None) -> None:
        """An engine of this node wrote KV of these chunks. Reports count where ``kv_source`` is ``reports``."""
        self._reported.report(Report.STORED, keys, engine, number)

    def report_evicted(self, keys: bytes, engine: str = "", number: ReportNumber | None = None) -> None:
        """KV of these chunks is gone from an engine."""
        self._reported.report(Report.EVICTED, keys, engine, number)

    def resync(self, keys: bytes, engine: str = "", number: ReportNumber | None = None) -> None:
        """KV of these chunks is all that an engine has; with ``b""`` all of it is gone."""
        self._reported.report(Report.RESYNC, keys, engine, number)

    def register_engine(self, registration: Any) -> None:
        """See `hs_cache.integrations.lmcache_source.LMCacheSource.register_engine`."""
        if not isinstance(self._source, RegistersEngines):
            raise InvalidInputError("register_engine: this service asks no engines, which takes kv_source: lmcache")
        self._source.register_engine(registration)

    def stats(self) -> KVStatistics:
        """Counts."""
        return (self._source or self._reported).stats()


def _make_log() -> RetractionLog | None:
    if sys.platform != "linux":
        return None
    try:
        return RetractionLog()
    except OSError as error:
        logger.warning("each retrieve will ask this KV actor, there is no memory for its log: %s", error)
        return None
