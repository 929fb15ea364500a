"""Three nodes: who gets actors, and who is served by whom."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import ray
import torch
from ray.cluster_utils import Cluster

from actors import deploy
from actors.nodes import select_nodes
from hs_cache.config import CacheConfig
from hs_cache.router import HIDDEN_STATES, KV, actors_of, find_actor, nodes_of, rendezvous
from tests.builders import CHUNK_SIZE
from tests.cluster import probes
from tests.cluster.children import make_rows
from tests.cluster.conftest import POOL_GIB, StartService
from tests.cluster.nodes import (
    SLACK_S,
    add_node,
    alive_nodes,
    all_nodes,
    client,
    read_on,
    removed_at_the_end,
    this_node,
    within,
    write_on,
)
from tests.processes import wait_until

SETTINGS = {"chunk_size": CHUNK_SIZE, "max_hidden_state_cpu_size": POOL_GIB, "rpc_timeout_s": 5}


@dataclass(frozen=True)
class Nodes:
    """Node ids in hex. This process is on `head`."""

    head: str
    gpu: str
    labelled: str

    @property
    def all(self) -> list[str]:
        return sorted([self.head, self.gpu, self.labelled])


@pytest.fixture(scope="module")
def nodes(cluster: Cluster) -> Iterator[Nodes]:
    """The cluster's node, one with a GPU (by its own account), and one with labels and a resource of its own."""
    with removed_at_the_end(cluster) as added:
        gpu = add_node(cluster, num_gpus=1, resources={"cache": 1})
        labelled = add_node(cluster, labels={"role": "talker", "zone": "b"}, resources={"cache": 2})
        added += [gpu, labelled]
        yield Nodes(this_node(), gpu.node_id, labelled.node_id)


@pytest.fixture(scope="module")
def everywhere(nodes: Nodes, start_service: StartService) -> str:
    """A service on all three nodes."""
    return start_service(node_selector="all", rpc_timeout_s=5)


@pytest.fixture(scope="module")
def gpu_only(nodes: Nodes, start_service: StartService) -> str:
    """A service on the node with the GPU."""
    return start_service(node_selector="gpu", rpc_timeout_s=5)


def test_every_node_has_its_pair(nodes: Nodes, everywhere: str) -> None:
    assert nodes_of(everywhere) == sorted(actors_of(everywhere)[KV]) == nodes.all
    for node_id in nodes.all:
        for kind in (HIDDEN_STATES, KV):
            where = find_actor(everywhere, kind, node_id).__ray_call__.remote(probes.node_of)
            assert ray.get(where) == node_id
        assert ray.get(find_actor(everywhere, HIDDEN_STATES, node_id).stats.remote()).node_id == node_id


def test_clients_use_the_actor_of_their_own_node(nodes: Nodes, everywhere: str) -> None:
    cache = client(everywhere)
    for seed, node_id in enumerate(nodes.all):
        rows = make_rows(8, seed)
        assert write_on(node_id, cache, range(8), rows.numpy()) == (node_id, 2)
        assert read_on(node_id, cache, range(8)) == (rows.numpy().tobytes(), 1, 0)
    assert torch.equal(cache.retrieve(range(8), 0)[0], make_rows(8, nodes.all.index(nodes.head)))


def test_kv_reports_concern_one_node(nodes: Nodes, everywhere: str) -> None:
    cache = client(everywhere, "kv")
    rows = make_rows(8, 0)
    cache.store(range(8), {0: rows})
    write_on(nodes.gpu, cache, range(8), rows.numpy())
    cache.kv.report_evicted(range(8))
    hit = cache.retrieve(range(8), 0, wait_s=10)  # the other node's rows take their place
    assert torch.equal(hit[0], rows)
    assert not any(cache.has_chunk(key) for key in cache.chunk_keys(range(8)))
    assert read_on(nodes.gpu, cache, range(8)) == (rows.numpy().tobytes(), 1, 0)


@pytest.mark.parametrize(
    ("selector", "chosen"),
    [
        ("auto", ["gpu"]),
        ("gpu", ["gpu"]),
        ({"labels": {"role": "talker", "zone": "b"}}, ["labelled"]),
        ({"resources": {"cache": 2}}, ["labelled"]),
        ({"resources": {"CPU": 1}}, ["gpu", "head", "labelled"]),
    ],
)
def test_the_selector_decides(nodes: Nodes, selector: Any, chosen: list[str]) -> None:
    config = CacheConfig(node_selector=selector)
    assert select_nodes(config, all_nodes()) == sorted(getattr(nodes, node) for node in chosen)


def test_a_node_without_an_actor_uses_the_object_store(nodes: Nodes, gpu_only: str) -> None:
    assert nodes_of(gpu_only) == sorted(actors_of(gpu_only)[KV]) == [nodes.gpu]
    cache = client(gpu_only)
    rows = {0: make_rows(12, 1).to(torch.bfloat16), 3: make_rows(12, 2, hidden_dim=24)}
    stored = cache.store(range(12), rows)
    assert (stored.stored, stored.prefix_tokens) == (3, 12)
    assert cache.store(range(12), rows).present == 3
    assert cache.stats().node.node_id == nodes.gpu

    hit = cache.retrieve(range(16), [0, 3])
    assert (hit.num_tokens, hit.ended_by) == (12, "hidden_state")
    for layer, given in rows.items():
        assert torch.equal(hit[layer], given)
    hit[0].zero_()
    assert torch.equal(cache.retrieve(range(12), 0, start=3, stop=10)[0], rows[0][3:10])
    assert torch.equal(cache.retrieve(range(12), 0, dtype=torch.float32)[0], rows[0].float())
    stats = cache.stats()
    assert (stats.zero_copy_total, stats.copied_total, stats.node.num_clients) == (3, 1, 0), "as they arrived, but one"
    assert not cache.retrieve(range(100, 108), 0)


def test_rows_cross_nodes_both_ways(nodes: Nodes, gpu_only: str) -> None:
    cache = client(gpu_only, "both ways")
    here, there = make_rows(4096, 1, hidden_dim=256), make_rows(8, 2, hidden_dim=256)
    cache.store(range(4096), {0: here})  # 4 MiB: larger than what Ray sends inline
    assert read_on(nodes.gpu, cache, range(4096)) == (here.numpy().tobytes(), 1, 0)
    assert write_on(nodes.gpu, cache, range(5000, 5008), there.numpy()) == (nodes.gpu, 2)
    assert torch.equal(cache.retrieve(range(5000, 5008), 0)[0], there)
    assert read_on(nodes.labelled, cache, range(4096)) == (here.numpy().tobytes(), 1, 0)
    assert write_on(nodes.labelled, cache, range(6000, 6004), there[:4].numpy()) == (nodes.gpu, 1)
    assert read_on(nodes.gpu, cache, range(6000, 6004)) == (there[:4].numpy().tobytes(), 1, 0)


def test_kv_stored_elsewhere_counts_as_present(nodes: Nodes, gpu_only: str) -> None:
    cache = client(gpu_only, "elsewhere")
    cache.store(range(8), {0: make_rows(8, 1)})
    cache.kv.report_evicted(range(8))  # of a node that never had the KV of these chunks
    assert cache.retrieve(range(8), 0).num_tokens == 8


def test_a_node_without_an_actor_is_served_by_rendezvous(nodes: Nodes, name: str) -> None:
    config = CacheConfig(**SETTINGS, node_selector={"resources": {"cache": 1}})
    carriers = deploy.start(config, service=name)
    assert carriers == sorted([nodes.gpu, nodes.labelled])
    expected = rendezvous(nodes.head, carriers)
    assert rendezvous(nodes.head, reversed(carriers)) == expected
    assert client(name).stats().node.node_id == expected
    assert client(name, "another").stats().node.node_id == expected


def test_a_lost_node_is_a_miss_and_others_take_over(cluster: Cluster, nodes: Nodes, name: str) -> None:
    """For a client whose own node has no actor: what it stored is gone with the node that served it."""
    with removed_at_the_end(cluster) as added:
        added += [add_node(cluster, labels={"pool": "x"}) for _ in range(2)]
        config = CacheConfig(**SETTINGS, node_selector={"labels": {"pool": "x"}})
        assert deploy.start(config, service=name) == sorted(node.node_id for node in added)
        cache = client(name)
        rows = make_rows(8, 1)
        cache.store(range(8), {0: rows})
        held = cache.retrieve(range(8), 0)
        lost = next(node for node in added if node.node_id == cache.stats().node.node_id)
        added.remove(lost)
        (other,) = added
        cluster.remove_node(lost, allow_graceful=False)
        gone_at = time.monotonic() + 30
        while hit := within(5 + SLACK_S, lambda: cache.retrieve(range(8), 0)):  # its actor may outlive it a moment
            assert torch.equal(hit[0], rows)
            assert time.monotonic() < gone_at
        assert torch.equal(held[0], rows)

        wait_until(lambda: cache.store(range(8), {0: rows}).stored, "the other node serves")
        assert cache.stats().node.node_id == other.node_id
        assert torch.equal(cache.retrieve(range(8), 0)[0], rows)
        wait_until(lambda: lost.node_id not in alive_nodes(), "Ray knows that the node is gone")
        assert deploy.start(CacheConfig(), service=name) == [other.node_id]
        assert deploy.stop(service=name) == 1
