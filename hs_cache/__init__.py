"""A hidden-state cache that runs on Ray.

``hs_cache.connect()`` gives a client; see `hs_cache.HiddenStateCache`. Names are imported when they are first used, so
that the parts without Ray also work where Ray is not installed.
"""

from __future__ import annotations  # an older Python is told so, and must get as far as that

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hs_cache.client import AsyncHiddenStateCache, AsyncKVReports, HiddenStateCache, KVReports, aconnect, connect
    from hs_cache.config import CacheConfig
    from hs_cache.doctor_facts import DoctorReport, Finding
    from hs_cache.doctor_run import doctor
    from hs_cache.errors import (
        CacheClosedError,
        ConfigError,
        ConfigMismatchError,
        HiddenStateCacheError,
        InstallationError,
        InvalidInputError,
        PoolError,
        PoolTooLargeError,
        ServiceError,
        ServiceNotRunningError,
        ServiceTimeoutError,
        StaleIncarnationError,
        StaleRevisionError,
    )
    from hs_cache.keys import ChunkKeys, KeySpace, TokenDatabase
    from hs_cache.launch import start, stop
    from hs_cache.lora import lora_identity
    from hs_cache.refs import HiddenStateRef
    from hs_cache.results import CacheStatistics, ChunkReport, Coverage, Explanation, PrefixHit, StoreResult
    from hs_cache.weights import RevisionBump, bump_revision
    from hs_cache.writer import AsyncPrefixWriter, PrefixWriter

__version__ = "0.1.0"

__all__ = [
    "AsyncHiddenStateCache",
    "AsyncKVReports",
    "AsyncPrefixWriter",
    "CacheClosedError",
    "CacheConfig",
    "CacheStatistics",
    "ChunkKeys",
    "ChunkReport",
    "ConfigError",
    "ConfigMismatchError",
    "Coverage",
    "DoctorReport",
    "Explanation",
    "Finding",
    "HiddenStateCache",
    "HiddenStateCacheError",
    "HiddenStateRef",
    "InstallationError",
    "InvalidInputError",
    "KVReports",
    "KeySpace",
    "PoolError",
    "PoolTooLargeError",
    "PrefixHit",
    "PrefixWriter",
    "RevisionBump",
    "ServiceError",
    "ServiceNotRunningError",
    "ServiceTimeoutError",
    "StaleIncarnationError",
    "StaleRevisionError",
    "StoreResult",
    "TokenDatabase",
    "aconnect",
    "bump_revision",
    "connect",
    "doctor",
    "lora_identity",
    "start",
    "stop",
]

_HOME = {
    "AsyncHiddenStateCache": "client",
    "AsyncKVReports": "client",
    "HiddenStateCache": "client",
    "KVReports": "client",
    "aconnect": "client",
    "connect": "client",
    "CacheConfig": "config",
    "DoctorReport": "doctor_facts",
    "Finding": "doctor_facts",
    "doctor": "doctor_run",
    "ChunkKeys": "keys",
    "KeySpace": "keys",
    "TokenDatabase": "keys",
    "lora_identity": "lora",
    "HiddenStateRef": "refs",
    "start": "launch",
    "stop": "launch",
    "CacheStatistics": "results",
    "ChunkReport": "results",
    "Coverage": "results",
    "Explanation": "results",
    "PrefixHit": "results",
    "StoreResult": "results",
    "RevisionBump": "weights",
    "bump_revision": "weights",
    "AsyncPrefixWriter": "writer",
    "PrefixWriter": "writer",
}

_NEED_RAY = frozenset({"client", "doctor_run", "launch", "refs", "weights", "writer"})


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOME.get(name, "errors")
    if home in _NEED_RAY:
        importlib.import_module(f"{__name__}.installation").require_installation()
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
