"""The actor that knows which KV chunks its node still holds. Needs no torch."""

import pkgutil
from typing import Any

from hs_cache.config import CacheConfig
from hs_cache.errors import InvalidInputError
from hs_cache.kv_presence import KVSource, KVStatistics, RegistersEngines
from hs_cache.kv_reports import Report, ReportedKV
from hs_cache.messages import ReportNumber

_SOURCES = {
    "lmcache": "hs_cache.integrations.lmcache_source:LMCacheSource",
    "vllm_events": "hs_cache.integrations.vllm_events:VLLMEventsSource",
}


class KVActor:
    """Answers the `HiddenStateActor` of the same node, from the service's `hs_cache.kv_presence.KVSource`.

    Not threaded: calls of one sender take effect in the order in which they were sent, which is what makes an eviction
    that is reported after a store come after it here. Names of chunks are blobs of 16 bytes each: keys, or what
    `hs_cache.keys.KVNames` has where the source needs those.
    """

    def __init__(self, config: CacheConfig) -> None:
        self._source: KVSource | None = None
        self._reported = ReportedKV(config.kv_index_capacity)
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

    def note_stored(self, names: bytes, engine: str = "") -> None:
        """Hidden states of these chunks are being stored by a client of `engine`."""
        if self._source is not None:
            self._source.note_stored(names, engine)

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
