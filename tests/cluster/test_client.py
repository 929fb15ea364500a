"""Both clients end to end: what is stored comes back, and only that."""

import uuid
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from hs_cache.errors import CacheClosedError, InvalidInputError
from tests.builders import CHUNK_SIZE
from tests.cluster.children import make_rows
from tests.cluster.conftest import POOL_GIB, Connect, StartService
from tests.processes import Child, wait_until

POOL_BYTES = int(POOL_GIB * 2**30)


def test_drop_in_methods(cache: Any) -> None:
    tokens, rows = list(range(12)), make_rows(12, 1)
    assert cache.store_hidden_states(tokens, rows) == 3
    assert cache.store_hidden_states(tokens, make_rows(12, 2)) == 0
    back = cache.retrieve_hidden_states([*tokens, 12, 13])
    assert back.dtype == torch.float32
    assert torch.equal(back, rows)

    assert cache.store_hidden_states([*tokens, *range(4)], make_rows(4, 3), token_offset=12, layer_idx=0) == 1
    assert torch.equal(
        cache.retrieve_hidden_states([*tokens, *range(4)], layer_idx=0), torch.cat([rows, make_rows(4, 3)])
    )
    assert cache.retrieve_hidden_states(tokens, layer_idx=1) is None

    first, _, last = cache.chunk_keys(tokens)
    assert cache.has_chunk(first)
    assert not cache.has_chunk(first, 1)
    assert cache.drop_key(last)
    assert not cache.drop_key(last)
    assert len(cache.retrieve_hidden_states(tokens)) == 8
    assert cache.num_cached_chunks() >= 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_layers_come_back_bit_exact_in_the_stored_dtype(cache: Any, dtype: torch.dtype) -> None:
    layers = {-1: make_rows(12, 1).to(dtype), 0: make_rows(12, 2, hidden_dim=24).to(dtype), 20: make_rows(12, 3)}
    stored = cache.store(range(12), layers)
    assert (stored.stored, stored.failed, stored.prefix_tokens) == (3, 0, 12)
    assert cache.store(range(12), layers).present == 3

    hit = cache.retrieve(range(16), [20, -1, 0])
    assert (hit.num_tokens, hit.ended_by, list(hit)) == (12, "hidden_state", [20, -1, 0])
    for layer, rows in layers.items():
        assert hit[layer].dtype == rows.dtype
        assert torch.equal(hit[layer], rows)
    part = cache.retrieve(range(12), 0, start=3, stop=9)
    assert (part.num_tokens, part.ended_by) == (9, "")
    assert torch.equal(part[0], layers[0][3:9])
    assert torch.equal(cache.retrieve(range(12), -1, dtype=torch.float32)[-1], layers[-1].float())

    buffer = torch.zeros(16, 24, dtype=dtype)
    into = cache.retrieve(range(12), 0, out={0: buffer})
    assert into[0].data_ptr() == buffer.data_ptr()
    assert torch.equal(buffer[:12], layers[0])


def test_numpy_rows_and_token_ids(cache: Any) -> None:
    tokens, rows = np.arange(100, 108), make_rows(8, 1)
    assert cache.store(tokens, {0: rows.numpy()}).stored == 2
    assert torch.equal(cache.retrieve(torch.arange(100, 108), 0)[0], rows)


def test_spans_are_part_of_a_prefix(cache: Any) -> None:
    tokens, spans = [7] * 8, [(2, 3, b"a" * 32)]
    cache.store(tokens, {0: make_rows(8, 1)}, mm_spans=spans)
    assert cache.retrieve(tokens, 0, mm_spans=spans).num_tokens == 8
    assert not cache.retrieve(tokens, 0, mm_spans=[(2, 3, b"b" * 32)])
    assert not cache.retrieve(tokens, 0)


def test_wrong_arguments_raise_and_change_nothing(cache: Any) -> None:
    with pytest.raises(InvalidInputError, match="got 7 rows, expected 8"):
        cache.store(range(8), {0: make_rows(7, 1)})
    cache.store(range(8), {0: make_rows(8, 1)})
    with pytest.raises(InvalidInputError, match="layer 0"):
        cache.store(range(8), {0: make_rows(8, 1, hidden_dim=16)})
    with pytest.raises(InvalidInputError, match="start, stop"):
        cache.retrieve(range(8), 0, start=5, stop=4)
    assert torch.equal(cache.retrieve(range(8), 0)[0], make_rows(8, 1))


def test_a_closed_client_refuses_and_its_rows_stay(connect: Connect, service: str) -> None:
    cache = connect(service=service)
    cache.store(range(8), {0: make_rows(8, 1)})
    hit = cache.retrieve(range(8), 0)
    cache.close()
    cache.close()
    with pytest.raises(CacheClosedError):
        cache.retrieve(range(8), 0)
    assert torch.equal(hit[0], make_rows(8, 1))


def test_what_can_never_fit_evicts_nothing(connect: Connect, start_service: StartService) -> None:  # case 8
    cache = connect(service=start_service())
    cache.store(range(12), {0: make_rows(12, 1)})
    too_wide = torch.zeros(CHUNK_SIZE, 1).expand(CHUNK_SIZE, POOL_BYTES // CHUNK_SIZE)
    refused = cache.store(range(100, 100 + CHUNK_SIZE), {1: too_wide})
    assert (refused.stored, refused.failed) == (0, 1)
    assert cache.num_cached_chunks() == 3
    assert torch.equal(cache.retrieve(range(12), 0)[0], make_rows(12, 1))


def test_inputs_and_results_are_apart_from_the_cache(cache: Any) -> None:  # cases 13 and 20
    rows = make_rows(12, 1)
    given = rows.clone()
    cache.store(range(12), {0: given})
    given.fill_(-1)
    before = cache.stats().zero_copy_total
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hit = cache.retrieve(range(12), 0)
        hit[0].add_(1)
    assert cache.stats().zero_copy_total == before + 1
    assert torch.equal(hit[0], rows + 1)
    assert torch.equal(cache.retrieve(range(12), 0)[0], rows)


def test_held_rows_outlive_everything_else_in_the_pool(connect: Connect, start_service: StartService) -> None:  # 14, 26
    cache = connect(service=start_service())
    dim = 4096
    rows = make_rows(12, 1, hidden_dim=dim)
    cache.store(range(12), {0: rows})
    array = cache.retrieve(range(12), 0)[0][2:10].detach().numpy()
    prompts = 2 * POOL_BYTES // rows.nbytes
    for prompt in range(1, prompts):
        assert cache.store(range(1000 * prompt, 1000 * prompt + 12), {0: make_rows(12, prompt, dim)}).stored == 3
    stats = cache.stats().node.store
    assert stats.evicted_chunks_total > 3
    assert stats.num_leases == 1
    assert np.array_equal(array, rows[2:10].numpy())
    del array
    wait_until(lambda: cache.stats().node.store.num_leases == 0, "the lease has ended")


def test_processes_with_other_hash_seeds_share_rows(address: str, service: str) -> None:  # case 11
    common = {"address": address, "service": service, "model": uuid.uuid4().hex}
    with (
        Child("share", {**common, "mine": 1, "theirs": 2}, environ={"PYTHONHASHSEED": "1"}) as one,
        Child("share", {**common, "mine": 2, "theirs": 1}, environ={"PYTHONHASHSEED": "2"}) as two,
    ):
        first, second = one.result(), two.result()
    assert first["keys"] != second["keys"]
    for result in (first, second):
        assert (result["stored"], result["right"]) == (3, True)
        assert (result["zero_copy"], result["copied"]) == (1, 0)


# KV


def test_reported_evictions_end_the_prefix_and_drop(cache: Any) -> None:  # case 3
    tokens = list(range(12))
    cache.store(tokens, {0: make_rows(12, 1), 1: make_rows(12, 2)})
    keys = cache.chunk_keys(tokens)
    held = cache.retrieve(tokens, 0)
    assert cache.kv.report_evicted([keys[1]])
    hit = cache.retrieve(tokens, 0)
    assert (hit.num_tokens, hit.ended_by) == (4, "kv_absent")
    assert [cache.has_chunk(key, 1) for key in keys] == [True, False, True]
    assert torch.equal(held[0], make_rows(12, 1))

    again = cache.store(tokens, {0: make_rows(12, 1), 1: make_rows(12, 2)})
    assert (again.stored, again.present) == (1, 2)
    assert cache.retrieve(tokens, [0, 1]).num_tokens == 12
    assert cache.kv.report_evicted(tokens[:4])
    assert cache.kv.report_stored(tokens[:4])
    assert cache.retrieve(tokens, 0).num_tokens == 12
    assert cache.kv.resync(list(keys)[:2])
    assert cache.retrieve(tokens, 0).num_tokens == 8
    assert cache.kv.clear()
    assert cache.retrieve(tokens, 0).ended_by == "kv_absent"


@pytest.fixture(scope="module")
def told_nothing(start_service: StartService) -> str:
    return start_service(kv_source="none")


def test_two_engines_of_a_node_speak_for_themselves(connect: Connect, service: str) -> None:
    caches = [connect(service=service, model="two engines", engine=engine) for engine in ("one", "two")]
    for cache in caches:
        cache.store(range(8), {0: make_rows(8, 1)})
    assert caches[0].kv.report_evicted(range(8))
    assert caches[0].retrieve(range(8), 0).num_tokens == 8
    assert caches[1].kv.report_evicted(range(8))
    assert caches[0].retrieve(range(8), 0).ended_by == "kv_absent"


def test_without_a_source_kv_counts_as_present(connect: Connect, told_nothing: str) -> None:
    cache = connect(service=told_nothing)
    cache.store(range(12), {0: make_rows(12, 1)})
    assert cache.kv.report_evicted(range(12))
    assert cache.retrieve(range(12), 0).num_tokens == 12
