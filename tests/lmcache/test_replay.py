"""The order that benchmarks/replay.py takes for LMCache's is that of its ``HiddenStateStore``, request by request."""

from typing import Any

import pytest
import torch

from benchmarks import replay_orders
from benchmarks.replay_trace import load
from tests.lmcache.conftest import MakeEngine

REQUESTS = 1500
CHUNK_SIZE, HIDDEN = 4, 256
CHUNK_BYTES = CHUNK_SIZE * HIDDEN * 4
"""As little as LMCache's allocator deals in, in the float32 that it keeps."""


def real(store: Any, requests: tuple[tuple[int, ...], ...]) -> list[int]:
    """What LMCache's own store serves of each request, in chunks."""
    served = []
    for request in requests:
        tokens = [block * CHUNK_SIZE + i for block in request for i in range(CHUNK_SIZE)]
        rows = torch.tensor(tokens, dtype=torch.float32)[:, None].expand(-1, HIDDEN)
        found = store.retrieve_hidden_states(tokens)
        hit = 0 if found is None else len(found)
        if found is not None:
            assert torch.equal(found, rows[:hit])
        served.append(hit // CHUNK_SIZE)
        store.store_hidden_states(tokens, rows[hit:], token_offset=hit)
    return served


@pytest.mark.parametrize("capacity", [20, 150, 1500])  # chunks: fewer than many a prompt has, and more
def test_the_order_is_that_of_the_real_store(make_engine: MakeEngine, capacity: int) -> None:
    trace = load(REQUESTS)
    engine = make_engine(
        post_init=False,  # no storage manager is bound: KV counts as present
        chunk_size=CHUNK_SIZE,
        max_hidden_state_cpu_size=capacity * CHUNK_BYTES / 2**30,
    )
    served = real(engine.hidden_state_store, trace.requests)
    assert served == replay_orders.lmcache(trace.requests, capacity)
    assert engine.hidden_state_store.num_cached_chunks() == capacity
    if capacity < 1000:  # where it makes a difference
        assert served != replay_orders.lru(trace.requests, capacity)
