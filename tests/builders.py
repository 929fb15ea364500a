"""Builders that tests share: plain functions, no fixtures.

Sizes are chosen so that a pool can be thought of in *slots*: one slot holds one chunk of `CHUNK_SIZE` tokens of a layer
made by ``make_spec(layer_idx)``, and is one unit of the allocator's alignment.
"""

from collections.abc import Iterator, Sequence, Set
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from hs_cache.chunks import LEAST_PIECE_BYTES
from hs_cache.extents import ALIGNMENT
from hs_cache.keys import KeySpace, TokenDatabase
from hs_cache.kv_presence import Presence
from hs_cache.messages import Freed, LayerSpec, NodeStatistics, Run, StoreStatistics
from hs_cache.store import Committed, Granted, HiddenStateStore, HoldId, Reserved

CHUNK_SIZE = 4
SLOT_BYTES = ALIGNMENT
OWNER = b"owner"


def make_tokens(prompt: str, *, chunk_size: int = CHUNK_SIZE) -> list[int]:
    """Token ids of a prompt of which every letter names one chunk: prompts that begin alike share their head."""
    return [ord(letter) * chunk_size + i for letter in prompt for i in range(chunk_size)]


def make_space(*, chunk_size: int = CHUNK_SIZE, salt: str = "") -> KeySpace:
    return KeySpace(model="test", cache_salt=salt, chunk_size=chunk_size)


def make_keys(tokens: str | Sequence[int], *, chunk_size: int = CHUNK_SIZE, salt: str = "") -> list[bytes]:
    """Chunk keys of token ids, or of a prompt as `make_tokens` takes it; a short last chunk gets one too."""
    ids = make_tokens(tokens, chunk_size=chunk_size) if isinstance(tokens, str) else list(tokens)
    database = TokenDatabase(make_space(chunk_size=chunk_size, salt=salt), save_unfull_chunk=True)
    return list(database.chunk_keys(ids))


def make_spec(layer_idx: int = 0, *, slots: int = 1, dtype: str = "bfloat16") -> LayerSpec:
    """A layer of which a full chunk takes `slots` slots."""
    return LayerSpec(layer_idx, slots * SLOT_BYTES // CHUNK_SIZE // LayerSpec(0, 1, dtype).row_bytes, dtype)


def make_store(
    slots: int, *, max_leased_fraction: float = 0.5, least_piece_bytes: int = LEAST_PIECE_BYTES
) -> HiddenStateStore:
    """A store whose chunks are so small that their rows are never cut, unless `least_piece_bytes` says so."""
    return HiddenStateStore(
        slots * SLOT_BYTES,
        chunk_size=CHUNK_SIZE,
        max_leased_fraction=max_leased_fraction,
        least_piece_bytes=least_piece_bytes,
    )


def reserve(
    store: HiddenStateStore,
    hold: HoldId,
    prompt: str | Sequence[int],
    *specs: LayerSpec,
    first_chunk: int = 0,
    kv_local: bool = True,
    salt: str = "",
    evict: bool = True,
) -> Reserved:
    """Reserve room for a prompt, by default of layer 0."""
    return store.reserve(
        hold,
        space=make_space(salt=salt).fingerprint,
        keys=make_keys(prompt, salt=salt),
        num_tokens=len(prompt) * (CHUNK_SIZE if isinstance(prompt, str) else 1),
        first_chunk=first_chunk,
        specs=specs or (make_spec(),),
        kv_local=kv_local,
        evict=evict,
    )


def put(store: HiddenStateStore, prompt: str | Sequence[int], *specs: LayerSpec, first_chunk: int = 0) -> Committed:
    """Reserve and commit in one go, without writing anything."""
    hold = (b"put", 0)
    reserve(store, hold, prompt, *specs, first_chunk=first_chunk)
    return store.commit(hold)


def retire(store: HiddenStateStore, spaces: Set[bytes]) -> Freed:
    """End key spaces as a node does when a model has another revision."""
    store.void(spaces)
    return store.drop_spaces(spaces)


def lease(
    store: HiddenStateStore,
    hold: HoldId,
    prompt: str | Sequence[int],
    layers: tuple[int, ...] = (0,),
    *,
    presence: Sequence[int] | None = None,
    first_chunk: int = 0,
) -> Granted:
    """Lease and settle; every chunk found has KV unless `presence` says otherwise."""
    found = store.lease(hold, make_keys(prompt), layers, first_chunk=first_chunk)
    return store.settle(hold, [Presence.PRESENT] * len(found.keys) if presence is None else presence)


def coverage(store: HiddenStateStore, prompt: str, layer_idx: int = 0) -> str:
    """The chunks of a prompt that are there with a layer, a dot for each that isn't; no effect on the order."""
    keys = make_keys(prompt)
    return "".join(c if store.contains(k, layer_idx) else "." for c, k in zip(prompt, keys, strict=True))


def make_node_statistics(**changed: Any) -> NodeStatistics:
    """Of a node that has done a little, with some fields changed."""
    store = StoreStatistics(
        capacity_bytes=64 << 20,
        free_bytes=32 << 20,
        resident_bytes=24 << 20,
        reserved_bytes=8 << 20,
        stranded_bytes=0,
        leased_bytes=1 << 20,
        num_chunks=1234,
        num_leases=2,
        num_reservations=1,
        num_kept=0,
        stored_chunks_total=2345,
        evicted_chunks_total=7,
        kv_dropped_chunks_total=3,
        refused_chunks_total=1,
    )
    node = NodeStatistics(
        node_id="ab" * 28,
        incarnation="cd" * 16,
        pid=4711,
        pinned=False,
        kv_source="reports",
        num_clients=3,
        retrieves_total=10,
        hits_total=9,
        tokens_asked_total=4096,
        tokens_served_total=1024,
        kv_unknown_total=0,
        store=store,
    )
    return replace(node, **changed)


class PoolMemory:
    """The memory that a store manages offsets of. Every 8-byte word tells its write, layer and token."""

    def __init__(self, slots: int) -> None:
        self._words = np.zeros(slots * SLOT_BYTES // 8, dtype=np.int64)

    def write(self, runs: Sequence[Run], specs: Sequence[LayerSpec], write_id: int) -> None:
        """Write all rows of `runs`; `write_id` is above 0."""
        for run, rows in self._rows(runs, specs):
            for i, row in enumerate(rows):
                row[:] = self._word(write_id, run.layer_idx, run.start_token + i)

    def read(self, runs: Sequence[Run], specs: Sequence[LayerSpec]) -> dict[tuple[int, int], int]:
        """By (chunk, layer_idx) the write that its rows are from.

        Raises:
            AssertionError: A chunk is torn: rows of two writes, of another layer, or of other tokens.
        """
        found: dict[tuple[int, int], int] = {}
        for run, rows in self._rows(runs, specs):
            for i, row in enumerate(rows):
                token = run.start_token + i
                chunk = (token // CHUNK_SIZE, run.layer_idx)
                write_id = found.setdefault(chunk, int(row[0]) >> 32)
                expected = self._word(write_id, run.layer_idx, token)
                assert (row == expected).all(), f"chunk {chunk}, token {token}: {row} is not {expected}"
        return found

    def _rows(self, runs: Sequence[Run], specs: Sequence[LayerSpec]) -> Iterator[tuple[Run, npt.NDArray[np.int64]]]:
        row_words = {spec.layer_idx: spec.row_bytes // 8 for spec in specs}
        for run in runs:
            words = run.num_tokens * row_words[run.layer_idx]
            yield run, self._words[run.offset // 8 :][:words].reshape(run.num_tokens, -1)

    @staticmethod
    def _word(write_id: int, layer_idx: int, token: int) -> int:
        return write_id << 32 | layer_idx << 24 | token
