"""`HiddenStateRef`: rows that are handed on, and what remains when those who had or made them are gone."""

import asyncio
import pickle
from typing import Any

import numpy as np
import pytest
import ray
import torch
from ray.cluster_utils import Cluster

from hs_cache.router import HIDDEN_STATES
from tests.cluster import remotes
from tests.cluster.children import make_rows
from tests.cluster.conftest import Blocking, Connect, StartService
from tests.cluster.nodes import (
    SLACK_S,
    Nodes,
    add_node,
    alive_nodes,
    client,
    on_node,
    pid_of,
    removed_at_the_end,
    store_on,
    within,
)
from tests.processes import kill, wait_until

RPC_TIMEOUT_S = 4.0
LIMIT_S = 2 * RPC_TIMEOUT_S + SLACK_S
"""One attempt at what the ref names, and one by its keys."""

TOKENS = range(128)
ROWS = {0: make_rows(128, 1, 512), 9: make_rows(128, 2, 1024).to(torch.bfloat16)}
"""256 KiB a layer: more than what Ray sends inline, so the rows lie in the object store of the node that had them."""


@pytest.fixture(scope="module")
def service(nodes: Nodes, start_service: StartService) -> str:
    return start_service(node_selector="all", rpc_timeout_s=RPC_TIMEOUT_S)


def as_bytes(layer: int, num_tokens: int = 128) -> bytes:
    return bytes(ROWS[layer][:num_tokens].view(torch.uint8).numpy())


def is_right(hit: Any) -> bool:
    return all(torch.equal(rows, ROWS[layer][: hit.num_tokens]) for layer, rows in hit.layers.items())


def spread(cache: Any, *node_ids: str) -> None:
    """A part of the prefix on each node, one behind the other; all are found when this returns."""
    size = 128 // len(node_ids)
    for i, node_id in enumerate(node_ids):
        rows = {layer: rows[size * i : size * (i + 1)] for layer, rows in ROWS.items()}
        store_on(node_id, cache, TOKENS[: size * (i + 1)], rows, size * i)
    assert cache.retrieve(TOKENS, [0, 9], wait_s=20).num_tokens == 128


def drop(service: str, cache: Any, node_id: str) -> None:
    """Make a node forget the prefix."""
    actor = ray.get_actor(f"{service}/{HIDDEN_STATES}/{node_id}", namespace="hs_cache")
    ray.get([actor.drop_key.remote(key) for key in cache.chunk_keys(TOKENS)])


def test_refs_through_tasks_and_actors(connect: Connect, nodes: Nodes, service: str) -> None:
    made_by = connect(service=service)
    cache = client(service, made_by.key_space.model)
    spread(cache, nodes.one, nodes.head)
    ref = made_by.retrieve_ref([*TOKENS, 1, 2, 3, 4], [9, 0])
    assert (ref.num_tokens, ref.layers) == (128, (9, 0))
    hit = ref.get()
    assert (hit.num_tokens, list(hit)) == (128, [9, 0])
    assert is_right(hit)
    hit[0].zero_()
    assert is_right(ref.get(timeout=RPC_TIMEOUT_S))
    assert is_right(asyncio.run(_await(ref)))

    task = ray.remote(remotes.resolve).options(**on_node(nodes.two))
    assert ray.get(task.remote([ref, ref], 9)) == (nodes.two, [as_bytes(9)] * 2)
    kind = remotes.AsyncResolver if isinstance(made_by, Blocking) else remotes.Resolver
    arguments = () if kind is remotes.AsyncResolver else (cache,)
    actor = ray.remote(kind).options(**on_node(nodes.one)).remote(*arguments)
    assert ray.get(actor.resolve.remote({"rows": ref}, 0)) == as_bytes(0)
    ray.kill(actor)

    # What the ref names is as it was, whatever has become of the cache since.
    for node_id in (nodes.head, nodes.one):
        drop(service, cache, node_id)
    assert not cache.retrieve(TOKENS, 0)
    hit = ref.get()
    assert (hit.num_tokens, is_right(hit)) == (128, True)
    assert ray.get(task.remote([ref], 9)) == (nodes.two, [as_bytes(9)])


async def _await(ref: Any) -> Any:
    return await ref


def test_where_a_prefix_is(connect: Connect, nodes: Nodes, service: str) -> None:
    cache = connect(service=service, model="where")
    for node_id, num_tokens in ((nodes.head, 32), (nodes.one, 128), (nodes.two, 64)):
        store_on(node_id, client(service, "where"), TOKENS[:num_tokens], {9: ROWS[9][:num_tokens]})
    found = {nodes.one: 128, nodes.two: 64, nodes.head: 32}
    wait_until(lambda: cache.locate(TOKENS, 9) == found, "the controller has heard of it")
    assert list(cache.locate(TOKENS, 9)) == list(found), "the most first"
    assert list(cache.locate(TOKENS, 9, num_asked=1).items()) == list(found.items())
    assert cache.locate(TOKENS, [0, 9]) == {}
    assert cache.locate(range(1, 128), 9) == {}


def test_a_ref_to_nothing(connect: Connect, nodes: Nodes, service: str) -> None:
    ref = connect(service=service).retrieve_ref(TOKENS, 0)
    assert ref.num_tokens == 0
    assert not ref.get()


def test_pickled_outside_of_ray_it_carries_keys_only(nodes: Nodes, service: str) -> None:
    tokens = np.random.default_rng(3).integers(1 << 40, 1 << 41, 128)
    salt = "a-salt-that-nobody-may-see"
    cache = client(service, "secret-model", cache_salt=salt)
    cache.store(tokens, ROWS)
    ref = cache.retrieve_ref(tokens, [0, 9])
    pickled = pickle.dumps(ref)
    for token in tokens.tolist():
        assert int(token).to_bytes(8, "little") not in pickled
        assert int(token).to_bytes(6, "big") not in pickled
        assert str(token).encode() not in pickled
    assert salt.encode() not in pickled
    assert b"ObjectRef" not in pickled
    assert len(pickled) < len(cache.chunk_keys(tokens).blob) + 2048

    again = pickle.loads(pickled)
    assert (again.num_tokens, again.layers) == (128, (0, 9))
    hit = again.get()
    assert (hit.num_tokens, is_right(hit)) == (128, True)
    for key in cache.chunk_keys(tokens):
        cache.drop_key(key)
    assert is_right(ref.get())
    assert not within(LIMIT_S, again.get)


def test_the_maker_of_a_ref_killed(nodes: Nodes, service: str) -> None:
    cache = client(service, "maker")
    spread(cache, nodes.one)
    maker = ray.remote(remotes.Resolver).options(**on_node(nodes.two)).remote(cache)
    (ref,), (other,) = ray.get([maker.make.remote(TOKENS, [0, 9]), maker.make.remote(TOKENS, 0)])
    kill(ray.get(maker.pid.remote()))
    hit = within(LIMIT_S, ref.get)  # by its keys
    assert hit.num_tokens == 128
    assert is_right(hit)
    drop(service, cache, nodes.one)
    assert not within(LIMIT_S, other.get)
    assert not within(LIMIT_S, lambda: asyncio.run(_await(other)))


def test_the_actor_that_had_the_rows_killed(nodes: Nodes, service: str) -> None:
    cache = client(service, "actor")
    spread(cache, nodes.one)
    ref = cache.retrieve_ref(TOKENS, [0, 9])
    kill(pid_of(service, HIDDEN_STATES, nodes.one))
    hit = within(LIMIT_S, ref.get)
    assert hit.num_tokens == 128
    assert is_right(hit)
    assert pid_of(service, HIDDEN_STATES, nodes.one)
    assert not within(LIMIT_S, lambda: cache.retrieve(TOKENS, 0))
    assert is_right(ref.get())


def test_the_node_that_had_the_rows_killed(cluster: Cluster, nodes: Nodes, service: str) -> None:
    cache = client(service, "node")
    with removed_at_the_end(cluster) as added:
        added.append(lost := add_node(cluster))
        assert pid_of(service, HIDDEN_STATES, lost.node_id)
        spread(cache, nodes.head, lost.node_id)
        ref, other, third = (cache.retrieve_ref(TOKENS, [0, 9]) for _ in range(3))
        assert [r.num_tokens for r in (ref, other, third)] == [128] * 3
        added.remove(lost)
        cluster.remove_node(lost, allow_graceful=False)
        hit = within(LIMIT_S, ref.get)
        assert hit.num_tokens in (64, 128)
        assert is_right(hit)
        wait_until(lambda: lost.node_id not in alive_nodes(), "Ray knows that the node is gone")
        hit = within(LIMIT_S, other.get)
        assert (hit.num_tokens, is_right(hit)) == (64, True)
        rows = {layer: rows[64:] for layer, rows in ROWS.items()}
        store_on(nodes.two, cache, TOKENS, rows, 64)
        assert cache.retrieve(TOKENS, [0, 9], wait_s=20).num_tokens == 128
        hit = within(LIMIT_S, third.get)  # what is lost was stored elsewhere meanwhile
        assert (hit.num_tokens, is_right(hit)) == (128, True)
