"""Subjects in the driver's process: hs_cache, Ray's object store, and memory itself."""

import functools
import warnings
from collections.abc import Sequence
from typing import Any

import ray
import torch

import hs_cache
from benchmarks.prompts import half_of, make_prompt, tokens_found
from benchmarks.subject import (
    CALL,
    COPY,
    COPY_FRESH,
    HALF,
    KEYS,
    MISS,
    PLAN,
    READ,
    READ_ONLY,
    RETRIEVE,
    STORE,
    STORE_ASYNC,
    MeasurementError,
    Size,
    Subject,
    check,
)
from hs_cache.messages import StoreStatistics

_ASYNC_TIMEOUT_S = 60.0


@functools.lru_cache(maxsize=1)
def make_rows(size: Size) -> list[torch.Tensor]:
    """bf16 rows, a tensor per layer. All subjects here read the same."""
    return [torch.randn(size.tokens, size.hidden).to(torch.bfloat16) for _ in range(size.layers)]


class NoOp:
    """An actor call that does nothing: the least that any call to a service costs."""

    def nothing(self) -> None:
        """Do nothing."""


class Baseline(Subject):
    """A copy of the same bytes, a read of the same bytes, and an actor call that does nothing."""

    def __init__(self) -> None:
        self._noop: Any = ray.remote(NoOp).options(num_cpus=0).remote()

    def prepare(self, size: Size) -> list[str]:
        self._warm: list[torch.Tensor] = []  # before there are new ones
        self._rows = make_rows(size)
        self._warm = [torch.zeros_like(rows) for rows in self._rows]
        return [COPY, COPY_FRESH, READ_ONLY, CALL]

    def wake(self) -> None:
        self.act(CALL)

    def act(self, step: str) -> Any:
        if step == COPY:
            return [warm.copy_(rows) for warm, rows in zip(self._warm, self._rows, strict=True)]
        if step == COPY_FRESH:
            return [rows.clone() for rows in self._rows]
        if step == READ_ONLY:
            return [rows.view(torch.int64).sum() for rows in self._rows]
        return ray.get(self._noop.nothing.remote())


class RayObjects(Subject):
    """``ray.put`` and ``ray.get`` of the rows: as torch tensors, or their bytes as NumPy arrays."""

    def __init__(self, *, as_bytes: bool) -> None:
        self._as_bytes = as_bytes
        self._refs: list[Any] = []
        # What ray.get gives of an array is read-only, of which torch warns. Nothing writes here.
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")

    def prepare(self, size: Size) -> list[str]:
        self._rows: list[Any] = [rows.view(torch.uint8).numpy() if self._as_bytes else rows for rows in make_rows(size)]
        return [STORE, RETRIEVE, READ]

    def wake(self) -> None:
        ray.get(ray.put(self._rows[0][:1]))

    def act(self, step: str) -> Any:
        if step == STORE:
            self._refs = [ray.put(rows) for rows in self._rows]
            return None
        found = [ray.get(ref) for ref in self._refs]
        if step == READ:
            for rows in found:
                _as_tensor(rows).view(torch.int64).sum()
        return found

    def verify(self) -> None:
        for found, rows in zip(self.act(RETRIEVE), self._rows, strict=True):
            check(torch.equal(_as_tensor(found), _as_tensor(rows)), "other rows than were stored")

    def finish(self) -> None:
        self._refs = []


def _as_tensor(rows: Any) -> torch.Tensor:
    return rows if isinstance(rows, torch.Tensor) else torch.from_numpy(rows)


class HSCache(Subject):
    """This project, with its KV check on: storing says that KV is there, and every retrieve asks for it.

    Args:
        cache: a client on the service's node.
        full: keep the pool full, so that every store has to evict; there is nothing to measure then but stores.
    """

    def __init__(self, cache: hs_cache.HiddenStateCache, *, full: bool = False) -> None:
        self._cache = cache
        self._full = full
        self._random = torch.Generator().manual_seed(0)
        self._layers: int | Sequence[int] = 0
        self._resident_before = 0

    def prepare(self, size: Size) -> list[str]:
        self._size = size
        self._rows = dict(enumerate(make_rows(size)))
        self._layers = list(self._rows) if size.layers > 1 else 0
        if not self._full:
            return [STORE, RETRIEVE, READ, HALF, MISS, PLAN, KEYS, STORE_ASYNC]
        for _ in range(2 * self._pool().capacity_bytes // size.nbytes):
            self._prompt = self._fresh()
            self.judge(STORE, self.act(STORE))
        check(self._pool().evicted_chunks_total, "the pool isn't full")
        return [STORE]

    def begin(self) -> None:
        self._prompt, self._missing, self._later = self._fresh(), self._fresh(), self._fresh()
        self._half = half_of(self._prompt, self._missing)
        self._resident_before = self._pool().resident_bytes

    def wake(self) -> None:
        self.act(MISS)

    def act(self, step: str) -> Any:
        if step == RETRIEVE:
            return self._cache.retrieve(self._prompt, self._layers)
        if step == READ:
            hit = self._cache.retrieve(self._prompt, self._layers)
            for layer in hit:
                hit[layer].view(torch.int64).sum()
            return hit
        if step == STORE:
            return self._cache.store(self._prompt, self._rows)
        if step == STORE_ASYNC:
            return self._cache.store_async(self._later, self._rows)
        if step == PLAN:
            return self._cache.plan(self._prompt, self._layers)
        if step == KEYS:
            return self._cache.chunk_keys(self._prompt)
        return self._cache.retrieve(self._half if step == HALF else self._missing, self._layers)

    def judge(self, step: str, result: Any) -> None:
        if step == STORE_ASYNC:
            result = result.result(_ASYNC_TIMEOUT_S)
            self._drop(self._later)
        if step in (STORE, STORE_ASYNC):
            check(result.stored == self._size.chunks, f"stored {result}")
        elif step == KEYS:
            check(len(result) == self._size.chunks, f"{len(result)} keys")
        else:
            check(result.num_tokens == tokens_found(step, self._size), f"{step}: {result}")

    def verify(self) -> None:
        hit = self._cache.retrieve(self._prompt, self._layers)
        for layer, rows in self._rows.items():
            check(torch.equal(hit[layer], rows), "other rows than were stored")

    def finish(self) -> None:
        if not self._full:
            self._drop(self._prompt)

    def bytes_per_token(self) -> float | None:
        if self._full:
            return None
        return float(self._pool().resident_bytes - self._resident_before) / self._size.tokens / self._size.layers

    def close(self) -> None:
        self._cache.close()

    def _fresh(self) -> list[int]:
        return make_prompt(self._size.tokens, self._random)

    def _drop(self, prompt: list[int]) -> None:
        for key in self._cache.chunk_keys(prompt):
            check(self._cache.drop_key(key), "a chunk was evicted while it was measured")

    def _pool(self) -> StoreStatistics:
        node = self._cache.stats().node
        if node is None:
            raise MeasurementError("the node doesn't answer")
        return node.store
