"""The KV holder of examples/serve_pipeline: what it evicts is a miss, and a start that takes too long is an error."""

import uuid
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import ray
import torch

import hs_cache
from tests.builders import CHUNK_SIZE
from tests.cluster.nodes import this_node

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def kv_holder(service: str) -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        from qwen3_omni import recent_chunks
        from serve_pipeline import kv_holder

        for module in (recent_chunks, kv_holder):
            ray.cloudpickle.register_pickle_by_value(module)  # the cluster's nodes don't have the examples
        yield kv_holder
        for module in (recent_chunks, kv_holder):
            ray.cloudpickle.unregister_pickle_by_value(module)
        kv_holder.stop_holders(service)


def test_what_a_holder_evicts_is_a_miss(kv_holder: ModuleType, service: str) -> None:
    model = uuid.uuid4().hex
    cache = hs_cache.connect(service=service, model=model, engine=kv_holder.ENGINE)
    assert cache is not None
    holder = kv_holder.start_holder(this_node(), 2 * 16, service, model)
    token_ids = list(range(2 * CHUNK_SIZE))
    keys = [bytes(key) for key in cache.chunk_keys(token_ids)]
    chunks = [np.full(16, number, np.uint8) for number in range(2)]
    assert ray.get(holder.save.remote(keys, chunks)) == 2
    cache.store(token_ids, {0: torch.ones(len(token_ids), 4)})
    assert cache.retrieve(token_ids, 0).num_tokens == 2 * CHUNK_SIZE
    assert ray.get(holder.save.remote([b"another prefix's"], chunks[:1])) == 1
    assert cache.retrieve(token_ids, 0).num_tokens == CHUNK_SIZE
    assert [chunk[0] for chunk in ray.get(holder.load.remote(keys))] == [0]


def test_a_holder_that_does_not_start_in_time_is_an_error(kv_holder: ModuleType, service: str) -> None:
    kv_holder.stop_holders(service)
    with pytest.raises(RuntimeError, match=rf"the KV holder of node {this_node()} can't be started: "):
        kv_holder.start_holder(this_node(), 16, service, "m", timeout_s=0.001)
