"""LMCache's own hidden-state store in this process, in a whole engine whose storage has KV of what is stored.

    .venv-lmcache/bin/python -m benchmarks.peer_lmcache POOL_GIB [full]

With ``full`` the pool is kept full, so that every store has to evict.
"""

import sys
from typing import Any

import torch
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.token_database import ChunkedTokenDatabase

from benchmarks.prompts import half_of, make_prompt, tokens_found
from benchmarks.subject import CHUNK_SIZE, HALF, KEYS, MISS, READ, RETRIEVE, STORE, Size, Subject, check
from benchmarks.worker import serve
from tests.lmcache import golden
from tests.lmcache.engines import close, make_engine, put_kv

_INSTANCE = "benchmark"
_KV_GIB = 0.25  # of tiny KV: 32 KiB a chunk


class LMCache(Subject):
    """A real ``LMCacheEngine``. Its store copies into float32; its retrieve asks the storage for each chunk's KV."""

    def __init__(self, pool_gib: float, *, full: bool) -> None:
        self._engine = make_engine(
            _INSTANCE, chunk_size=CHUNK_SIZE, max_local_cpu_size=_KV_GIB, max_hidden_state_cpu_size=pool_gib
        )
        self._store = self._engine.hidden_state_store
        check(self._store._storage_manager is self._engine.storage_manager, "the KV check is off")
        self._full = full
        self._hashing = ChunkedTokenDatabase(LMCacheEngineConfig.from_defaults(chunk_size=CHUNK_SIZE))
        self._hashing.hash_func = golden.sha256_cbor
        self._random = torch.Generator().manual_seed(0)
        self._stored: list[Any] = []

    def prepare(self, size: Size) -> list[str]:
        self._size = size
        self._rows = []  # before there are new ones
        self._rows = [torch.randn(size.tokens, size.hidden).to(torch.bfloat16) for _ in range(size.layers)]
        if not self._full:
            return [STORE, RETRIEVE, READ, HALF, MISS, KEYS]
        prompts = 2 * self._store._allocator.size // (2 * size.nbytes)  # the whole pool twice, in float32
        for _ in range(prompts):
            self._prompt = self._fresh()
            self.judge(STORE, self.act(STORE))
        check(self._store.num_cached_chunks() < prompts * size.chunks, "the pool isn't full")
        return [STORE]

    def begin(self) -> None:
        self._prompt, self._missing = self._fresh(), self._fresh()
        self._half = half_of(self._prompt, self._missing)
        self._stored = put_kv(self._engine, self._prompt)
        check(self._engine.lookup(tokens=self._prompt) == self._size.tokens, "the KV that was put isn't there")

    def wake(self) -> None:
        self.act(MISS)

    def act(self, step: str) -> Any:
        if step == STORE:
            return [
                self._store.store_hidden_states(self._prompt, rows, layer_idx=layer)
                for layer, rows in enumerate(self._rows)
            ]
        if step == KEYS:
            return list(self._hashing.process_tokens(tokens=self._prompt, make_key=False))
        found = self._retrieve({HALF: self._half, MISS: self._missing}.get(step, self._prompt))
        if step == READ:
            for rows in found:
                rows.view(torch.int64).sum()
        return found

    def judge(self, step: str, result: Any) -> None:
        if step == STORE:
            check(result == [self._size.chunks] * self._size.layers, f"stored {result} chunks")
        elif step == KEYS:
            check(len(result) == self._size.chunks, f"{len(result)} keys")
        else:
            found = [0 if rows is None else len(rows) for rows in result]
            check(found == [tokens_found(step, self._size)] * self._size.layers, f"{step}: {found} rows")

    def verify(self) -> None:
        for found, rows in zip(self._retrieve(self._prompt), self._rows, strict=True):
            check(found.dtype == torch.float32 and torch.equal(found, rows.float()), "other rows than were stored")

    def finish(self) -> None:
        for key in self._stored:
            if not self._full:
                self._store.drop_key(key)
            self._engine.storage_manager.remove(key)
        self._stored = []

    def bytes_per_token(self) -> float | None:
        if self._full:
            return None
        held = self._store._allocator.pin_allocator.total_allocated_size
        return float(held / self._size.tokens / self._size.layers)

    def close(self) -> None:
        close(_INSTANCE)

    def _fresh(self) -> list[int]:
        return make_prompt(self._size.tokens, self._random)

    def _retrieve(self, prompt: list[int]) -> list[Any]:
        return [self._store.retrieve_hidden_states(prompt, layer_idx=layer) for layer in range(self._size.layers)]


if __name__ == "__main__":
    serve(lambda: LMCache(float(sys.argv[1]), full=sys.argv[2:] == ["full"]))
