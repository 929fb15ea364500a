"""Which names the chunks of a prefix have at the service's KV source, where it doesn't know our keys."""

from hs_cache.config import CacheConfig
from hs_cache.keys import KeySpace, KVNaming
from hs_cache.lmcache_names import LMCacheNaming
from hs_cache.vllm_names import vllm_naming

NAMING_SOURCES = frozenset({"lmcache", "vllm_events"})
"""Values of ``kv_source`` that come with names of their own."""


def kv_naming(config: CacheConfig, space: KeySpace) -> KVNaming | None:
    """The naming of a service with these settings, for prefixes of `space`; None where chunks go by their keys."""
    if config.kv_source == "lmcache":
        return LMCacheNaming(config.pre_caching_hash_algorithm, config.kv_hash_seed)
    if config.kv_source == "vllm_events":
        return vllm_naming(config, space)
    return None
