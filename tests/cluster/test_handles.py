"""Actors by their handles alone, as notebooks use them."""

import uuid
from typing import Any

import pytest
import ray
import torch

from hs_cache.errors import InvalidInputError
from hs_cache.keys import KeySpace, TokenDatabase
from hs_cache.router import HIDDEN_STATES, KV, actors_of, find_actor, nodes_of
from tests.builders import CHUNK_SIZE
from tests.cluster import remotes
from tests.cluster.children import make_rows
from tests.processes import run_python, wait_until


@pytest.fixture
def actor(service: str) -> Any:
    return find_actor(service, HIDDEN_STATES, nodes_of(service)[0])


@pytest.fixture
def model() -> str:
    return uuid.uuid4().hex


def test_store_and_retrieve_by_handle(actor: Any, model: str) -> None:
    rows = make_rows(12, 1)
    assert ray.get(actor.store_hidden_states.remote(list(range(12)), rows, model=model)) == 3
    assert ray.get(actor.store_hidden_states.remote(list(range(12)), rows.numpy(), model=model)) == 0
    half = rows.to(torch.bfloat16)
    assert ray.get(actor.store_hidden_states.remote(range(12), half, layer_idx=-1, model=model, cache_salt="s")) == 3

    back = ray.get(actor.retrieve_hidden_states.remote(range(14), model=model))
    assert torch.equal(back, rows)
    back.fill_(0)
    assert torch.equal(ray.get(actor.retrieve_hidden_states.remote(range(14), model=model)), rows)
    salted = ray.get(actor.retrieve_hidden_states.remote(range(12), layer_idx=-1, model=model, cache_salt="s"))
    assert torch.equal(salted, half.float())
    assert ray.get(actor.retrieve_hidden_states.remote(range(12), layer_idx=-1, model=model)) is None


def test_rows_travel_as_bytes(actor: Any, model: str) -> None:
    ray.get(actor.store_hidden_states.remote(range(4), make_rows(4, 1), model=model))
    assert ray.get(actor.__ray_call__.remote(remotes.type_of_rows, range(4), model)) == "PickledRows"


def test_results_of_one_object_are_apart(actor: Any, model: str) -> None:
    ray.get(actor.store_hidden_states.remote(range(1024), make_rows(1024, 1, 256), model=model))
    ref = actor.retrieve_hidden_states.remote(range(1024), model=model)  # 1 MiB: through the shared object store
    ray.get(ref).fill_(0)
    assert torch.equal(ray.get(ref), make_rows(1024, 1, 256))


def test_chunks_by_handle(actor: Any, model: str) -> None:
    ray.get(actor.store_hidden_states.remote(range(8), make_rows(8, 1), model=model))
    first, second = TokenDatabase(KeySpace(model=model, chunk_size=CHUNK_SIZE)).chunk_keys(range(8))
    before = ray.get(actor.num_cached_chunks.remote())
    assert ray.get(actor.has_chunk.remote(second))
    assert not ray.get(actor.has_chunk.remote(second, 1))
    assert ray.get(actor.drop_key.remote(second))
    assert not ray.get(actor.drop_key.remote(second))
    assert ray.get(actor.num_cached_chunks.remote()) == before - 1
    assert ray.get(actor.has_chunk.remote(first))
    assert len(ray.get(actor.retrieve_hidden_states.remote(range(8), model=model))) == 4


def test_kv_by_handle(actor: Any, service: str, model: str) -> None:
    kv = find_actor(service, KV, next(iter(actors_of(service)[KV])))
    ray.get(actor.store_hidden_states.remote(range(8), make_rows(8, 1), model=model))
    keys = TokenDatabase(KeySpace(model=model, chunk_size=CHUNK_SIZE)).chunk_keys(range(8))
    assert ray.get(kv.bound.remote())
    wait_until(lambda: list(ray.get(kv.presence.remote(keys.blob))) == [1, 1], "the KV actor is told of the store")
    ray.get(kv.report_evicted.remote(keys[1]))
    assert list(ray.get(kv.presence.remote(keys.blob))) == [1, 0]
    assert ray.get(kv.stats.remote()).absent >= 1
    assert len(ray.get(actor.retrieve_hidden_states.remote(range(8), model=model))) == 4


def test_wrong_arguments_by_handle(actor: Any, model: str) -> None:
    with pytest.raises(InvalidInputError, match="got 3 rows, expected 4"):
        ray.get(actor.store_hidden_states.remote(range(4), make_rows(3, 1), model=model))
    with pytest.raises(InvalidInputError, match="modle: unknown argument"):
        ray.get(actor.retrieve_hidden_states.remote(range(4), modle=model))


def test_nothing_is_left_held(actor: Any) -> None:
    stats = ray.get(actor.stats.remote())
    assert (stats.store.num_leases, stats.store.num_reservations, stats.num_clients) == (0, 0, 0)
    ray.get(actor.check.remote())


def test_the_kv_actor_does_without_torch() -> None:
    code = (
        "import sys; from actors.kv_actor import KVActor; from hs_cache.config import CacheConfig; "
        "actor = KVActor(CacheConfig()); actor.note_stored(b'k' * 16); print(list(actor.presence(b'k' * 16))); "
        "sys.exit('torch' in sys.modules)"
    )
    done = run_python(["-c", code])
    assert (done.returncode, done.stdout.strip()) == (0, "[1]"), done.stderr
