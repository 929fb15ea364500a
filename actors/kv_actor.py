"""The actor that knows which KV chunks its node still holds. Needs no torch."""

from hs_cache.config import CacheConfig
from hs_cache.kv_presence import KVIndex, KVStatistics


class KVActor:
    """Answers the `HiddenStateActor` of the same node; told by engines through ``cache.kv``, or directly by handle.

    Not threaded: calls of one sender take effect in the order in which they were sent, which is what makes an eviction
        that is reported after a store come after it here. Keys are blobs of 16 bytes a key.
    """

    def __init__(self, config: CacheConfig) -> None:
        self._index = KVIndex(config.kv_index_capacity, store_implies_present=config.kv_source == "reports")
        self._bound = config.kv_source != "none"

    def bound(self) -> bool:
        """Whether a KV source is configured; if none is, KV counts as present."""
        return self._bound

    def presence(self, keys: bytes) -> bytes | None:
        """One byte per key, its `hs_cache.kv_presence.Presence`; None when no KV source is bound."""
        return self._index.presence(keys) if self._bound else None

    def note_stored(self, keys: bytes) -> None:
        """Hidden states of these chunks are being stored."""
        self._index.note_stored(keys)

    def report_stored(self, keys: bytes) -> None:
        """KV of these chunks was written."""
        self._index.report_stored(keys)

    def report_evicted(self, keys: bytes) -> None:
        """KV of these chunks is gone."""
        self._index.report_evicted(keys)

    def resync(self, keys: bytes) -> None:
        """KV of these chunks is all there is; with ``b""`` all of it is gone."""
        self._index.resync(keys)

    def stats(self) -> KVStatistics:
        """Counts."""
        return self._index.stats()
