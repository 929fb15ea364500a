"""An engine in a process of its own: an actor, as vLLM's workers are on Ray, undecorated."""

import os
from typing import Any

from hs_cache.integrations.lmcache import attach
from tests.lmcache import engines


class EngineWorker:
    """A real LMCache engine with the cache attached."""

    def __init__(self, service: str, salt: str, instance: str = "worker", **settings: Any) -> None:
        self._instance = instance
        self._engine = engines.make_engine(instance, **settings)
        self._store: Any = attach(self._engine, service=service, cache_salt=salt)

    def pid(self) -> int:
        return os.getpid()

    def put_kv(self, tokens: Any) -> None:
        engines.put_kv(self._engine, tokens)

    def remove_kv(self, tokens: Any, chunk: int) -> None:
        self._engine.storage_manager.remove(engines.kv_keys(self._engine, tokens)[chunk])

    def store(self, tokens: Any, rows: Any) -> int:
        return int(self._store.store_hidden_states(tokens, rows))

    def retrieve(self, tokens: Any) -> Any:
        """Rows as a NumPy array, None on a miss."""
        rows = self._store.retrieve_hidden_states(tokens)
        return None if rows is None else rows.numpy()

    def close(self) -> None:
        engines.close(self._instance)
