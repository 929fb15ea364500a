"""Three nodes and more: prefixes that lie on several of them, and nodes, actors and controllers that come and go."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray.cluster_utils import Cluster

from actors import deploy
from hs_cache.config import CacheConfig
from hs_cache.errors import PoolTooLargeError, ServiceNotRunningError
from hs_cache.router import HIDDEN_STATES, KV, Router, actors_of, find_actor, find_controller, nodes_of
from tests.builders import CHUNK_SIZE
from tests.cluster import probes, remotes
from tests.cluster.children import make_rows
from tests.cluster.conftest import POOL_GIB, Connect, StartService, new_name
from tests.cluster.nodes import (
    SLACK_S,
    Nodes,
    add_node,
    alive_nodes,
    client,
    controller_stats,
    on_controller,
    on_node,
    pid_of,
    removed_at_the_end,
    store_on,
    within,
)
from tests.processes import kill, pool_inodes, wait_until

RPC_TIMEOUT_S = 4.0
LIMIT_S = RPC_TIMEOUT_S + SLACK_S
SETTINGS: dict[str, Any] = {
    "chunk_size": CHUNK_SIZE,
    "max_hidden_state_cpu_size": POOL_GIB,
    "rpc_timeout_s": RPC_TIMEOUT_S,
}
TOKENS = range(24)
ROWS = {0: make_rows(24, 1), -1: make_rows(24, 2, hidden_dim=24).to(torch.bfloat16)}


@pytest.fixture(scope="module")
def everywhere(nodes: Nodes, start_service: StartService) -> str:
    """A service on all nodes, also those that join later."""
    return start_service(node_selector="all", rpc_timeout_s=RPC_TIMEOUT_S)


def _small_node(directory: str, address: str) -> "subprocess.Popen[bytes]":
    """A raylet that sees a machine with hardly any memory: its own mount namespace has another /proc/meminfo."""
    meminfo = Path(directory) / "meminfo"
    meminfo.write_text("MemTotal: 800000 kB\nMemFree: 600000 kB\nMemAvailable: 600000 kB\n")
    raylet = [sys.executable, "-m", "ray.scripts.scripts", "start", "--address", address, "--block", "--num-cpus=1"]
    raylet += ["--memory=100000000", "--object-store-memory=80000000", "--labels=size=small", "--disable-usage-stats"]
    mount = f'mount --bind {meminfo} /proc/meminfo && exec "$@"'
    return subprocess.Popen(
        ["unshare", "--mount", "sh", "-c", mount, "sh", *raylet],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _mounting_refused() -> str:
    line = ["unshare", "--mount", "mount", "--bind", "/proc/version", "/proc/meminfo"]
    try:
        done = subprocess.run(line, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "there is no unshare command"
    return "" if done.returncode == 0 else f"mounting is not permitted here: {done.stderr.strip()}"


def test_a_pool_too_large_for_one_of_the_nodes(cluster: Cluster, name: str) -> None:  # case 24
    # First in here: on a small node, services that others of these tests share would get actors too.
    if reason := _mounting_refused():
        pytest.skip(reason)
    before = alive_nodes()
    with tempfile.TemporaryDirectory() as directory:
        small = _small_node(directory, cluster.address)
        try:
            (node_id,) = wait_until(lambda: set(alive_nodes()) - set(before), "the small node has joined")
            config = CacheConfig(max_hidden_state_cpu_size=0.25, node_selector="all")
            with pytest.raises(PoolTooLargeError, match=f"^node {node_id}: max_hidden_state_cpu_size asks for a pool"):
                deploy.start(config, service=name)
            with pytest.raises(ServiceNotRunningError):
                find_controller(name)
            assert nodes_of(name) == sorted(actors_of(name)[KV]) == []
            wait_until(lambda: not pool_inodes(name), "no pool is left")
        finally:
            os.killpg(small.pid, signal.SIGKILL)  # its own session: the raylet and what serves it
            small.wait()
            wait_until(lambda: alive_nodes() == before, "the small node is gone")


def part(first: int, end: int) -> dict[int, torch.Tensor]:
    return {layer: rows[first:end] for layer, rows in ROWS.items()}


def spread(cache: Any, *node_ids: str) -> None:
    """Put two chunks of the prefix on each node, one behind the other, and wait until all are found."""
    for i, node_id in enumerate(node_ids):
        assert store_on(node_id, cache, TOKENS[: 8 * i + 8], part(8 * i, 8 * i + 8), 8 * i) == 2
    assert cache.retrieve(TOKENS[: 8 * len(node_ids)], [0, -1], wait_s=20).num_tokens == 8 * len(node_ids)


def is_right(hit: Any) -> bool:
    return all(torch.equal(rows, ROWS[layer][: hit.num_tokens]) for layer, rows in hit.layers.items())


def test_a_prefix_that_lies_on_three_nodes(connect: Connect, nodes: Nodes, everywhere: str) -> None:
    cache = connect(service=everywhere)
    spread(client(everywhere, cache.key_space.model), *nodes)
    hit = cache.retrieve([*TOKENS, 24, 25, 26, 27], [-1, 0])
    assert (hit.num_tokens, hit.ended_by, list(hit)) == (24, "hidden_state", [-1, 0])
    assert is_right(hit)
    hit[0].zero_()
    assert is_right(cache.retrieve(TOKENS, [0, -1]))
    across = cache.retrieve(TOKENS, [0, -1], start=6, stop=18)
    assert (across.num_tokens, across.ended_by) == (18, "")
    assert all(torch.equal(across[layer], rows[6:18]) for layer, rows in ROWS.items())
    out = torch.zeros(30, 24, dtype=torch.float32)
    assert cache.retrieve(TOKENS, -1, out={-1: out})[-1].data_ptr() == out.data_ptr()
    assert torch.equal(out[:24], ROWS[-1].float())
    assert cache.retrieve_hidden_states(TOKENS).equal(ROWS[0])
    elsewhere = ray.remote(remotes.read).options(**on_node(nodes.two))
    there = client(everywhere, cache.key_space.model)
    assert ray.get(elsewhere.remote(there, TOKENS, 0))[1] == bytes(ROWS[0].numpy())


def test_waiting_for_rows_of_another_node(nodes: Nodes, everywhere: str) -> None:
    cache = client(everywhere, "waiting")
    cache.store(TOKENS[:8], part(0, 8))
    asked = controller_stats(everywhere).locates_total
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(cache.retrieve, TOKENS[:16], [0, -1], wait_s=60)
        wait_until(lambda: controller_stats(everywhere).locates_total > asked + 1, "it has looked more than once")
        assert not waiting.done()
        store_on(nodes.one, cache, TOKENS[:16], part(8, 16), 8)
        hit = waiting.result(timeout=30)
    assert hit.num_tokens == 16
    assert is_right(hit)
    assert within(LIMIT_S, lambda: cache.retrieve(TOKENS, 0, wait_s=0.2)).num_tokens == 16


def test_a_local_hit_asks_nobody_else(nodes: Nodes, everywhere: str) -> None:
    cache = client(everywhere, "local")
    cache.store(TOKENS, ROWS)
    asked = controller_stats(everywhere).locates_total
    for _ in range(20):
        assert cache.retrieve(TOKENS, [0, -1]).num_tokens == 24
        assert cache.retrieve([*TOKENS, 99], 0).num_tokens == 24
    assert controller_stats(everywhere).locates_total == asked
    assert cache.retrieve([*TOKENS, 1, 2, 3, 4], 0).num_tokens == 24
    assert controller_stats(everywhere).locates_total > asked


def test_actors_without_torch(nodes: Nodes, everywhere: str) -> None:
    actors = [find_controller(everywhere), *(find_actor(everywhere, KV, node_id) for node_id in nodes)]
    assert not any(ray.get([actor.__ray_call__.remote(probes.has_torch) for actor in actors]))
    pool_owner = find_actor(everywhere, HIDDEN_STATES, nodes.one)
    assert ray.get(pool_owner.__ray_call__.remote(probes.has_torch))
    assert ray.get(find_controller(everywhere).__ray_call__.remote(probes.node_of)) == nodes.head


def test_the_controller_killed(nodes: Nodes, everywhere: str) -> None:
    cache = client(everywhere, "controller")
    spread(cache, *nodes)
    before = wait_until(lambda: len((known := controller_stats(everywhere)).nodes) == 3 and known, "all publish")
    pid = on_controller(everywhere, probes.pid_of)
    kill(pid)
    calm = cache.stats().timeouts_total, cache.stats().unreachable_total
    for _ in range(50):
        assert cache.retrieve(TOKENS[:8], 0).num_tokens == 8
    assert (cache.stats().timeouts_total, cache.stats().unreachable_total) == calm
    hit = within(LIMIT_S, lambda: cache.retrieve(TOKENS, [0, -1]))
    assert hit.num_tokens in (8, 24)
    assert is_right(hit)

    hit = wait_until(lambda: (hit := cache.retrieve(TOKENS, [0, -1])).num_tokens == 24 and hit, "it found out anew")
    assert is_right(hit)
    wait_until(lambda: len(controller_stats(everywhere).nodes) == 3, "all nodes publish again")
    assert controller_stats(everywhere).num_keys == before.num_keys
    assert on_controller(everywhere, probes.pid_of) != pid


def test_the_kv_actor_of_another_node_killed(nodes: Nodes, everywhere: str) -> None:
    cache = client(everywhere, "kv")
    spread(cache, nodes.head, nodes.one)
    owner = find_actor(everywhere, HIDDEN_STATES, nodes.one)
    chunks = ray.get(owner.num_cached_chunks.remote())
    kill(pid_of(everywhere, KV, nodes.one))
    hit = within(LIMIT_S, lambda: cache.retrieve(TOKENS[:16], [0, -1]))
    assert (hit.num_tokens, hit.ended_by) == (8, "kv_unknown")
    assert is_right(hit)
    assert ray.get(owner.num_cached_chunks.remote()) == chunks

    keys = cache.chunk_keys(TOKENS[:16]).blob
    resync = ray.remote(remotes.resync).options(**on_node(nodes.one))
    wait_until(lambda: ray.get(resync.remote(cache, keys)), "the KV actor answers again")
    hit = cache.retrieve(TOKENS[:16], [0, -1], wait_s=20)
    assert hit.num_tokens == 16
    assert is_right(hit)


def test_hidden_state_actors_killed_amid_traffic(nodes: Nodes, everywhere: str) -> None:  # case 16
    cache = client(everywhere, "traffic")
    wait_until(lambda: len(pool_inodes(everywhere)) == 3, "one pool per node")
    prompts = {nodes.head: [1, 2, 3], nodes.one: [4, 5, 6]}
    users = {
        node_id: ray.remote(remotes.Traffic)
        .options(**on_node(node_id), max_concurrency=3)
        .remote(cache, mine, [seed for seed in range(1, 7) if seed not in mine])
        for node_id, mine in prompts.items()
    }
    running = [user.run.remote() for user in users.values()]
    try:
        for i in range(5):
            node_id, other = (nodes.head, nodes.one)[:: 1 - 2 * (i % 2)]
            _wait_for_more(users[node_id], "stored", "own")
            _wait_for_more(users[other], "far")
            pid = pid_of(everywhere, HIDDEN_STATES, node_id)
            kill(pid)
            assert pid_of(everywhere, HIDDEN_STATES, node_id) != pid
        for user in users.values():
            _wait_for_more(user, "stored", "own")  # its rows are in the last of the pools
    finally:
        ray.get([user.stop.remote() for user in users.values()])
    assert ray.get(running) == [[], []]
    for user in users.values():
        ray.kill(user)
    for node_id in nodes:
        ray.get(find_actor(everywhere, HIDDEN_STATES, node_id).check.remote())
    wait_until(lambda: len(pool_inodes(everywhere)) == 3, "no pool of a predecessor is left in memory")
    wait_until(lambda: len(controller_stats(everywhere).nodes) == 3, "all nodes publish")
    assert cache.retrieve(remotes.traffic_prompt(4), [0, 5], wait_s=20).num_tokens == 64


def _wait_for_more(user: Any, *kinds: str) -> None:
    before = ray.get(user.done.remote())

    def has_more() -> bool:
        now = ray.get(user.done.remote())
        return all(now[kind] > before[kind] for kind in kinds)

    wait_until(has_more, f"a user of the service goes on: {', '.join(kinds)}")


@pytest.mark.long
def test_nodes_that_join_and_leave(cluster: Cluster, nodes: Nodes, everywhere: str) -> None:
    cache = client(everywhere, "come and go")
    services = gpu, labelled = new_name(), new_name()
    try:
        for service, selector in ((gpu, "gpu"), (labelled, {"labels": {"pool": "x"}})):
            assert deploy.start(CacheConfig(**SETTINGS, node_selector=selector), service=service) == []
            with pytest.raises(ServiceNotRunningError, match="has no node yet"):
                Router(service).locate()
        on_controller(everywhere, probes.break_watch)
        wait_until(lambda: on_controller(everywhere, probes.broken_looks) > 2, "looks at the cluster have failed")
        with removed_at_the_end(cluster) as added:
            orderly = add_node(cluster, num_gpus=1, labels={"pool": "x"})
            abrupt = add_node(cluster)
            added += [orderly, abrupt]
            on_controller(everywhere, probes.mend_watch)
            _check_joined(everywhere, [*nodes, orderly.node_id, abrupt.node_id])
            for service in services:
                _check_joined(service, [orderly.node_id])
                rows = make_rows(8, 7)
                far = client(service)
                assert far.store(range(8), {0: rows}).stored == 2
                assert torch.equal(far.retrieve(range(8), 0)[0], rows)

            spread(cache, nodes.head, orderly.node_id, abrupt.node_id)
            added.remove(orderly)
            cluster.remove_node(orderly)
            _check_left(cache, everywhere, orderly.node_id, 8)
            for service in services:
                wait_until(lambda service=service: not nodes_of(service), "the service has no node again")

            store_on(nodes.one, cache, TOKENS[:16], part(8, 16), 8)
            hit = cache.retrieve(TOKENS, [0, -1], wait_s=20)
            assert (hit.num_tokens, is_right(hit)) == (24, True)
            added.remove(abrupt)
            cluster.remove_node(abrupt, allow_graceful=False)
            _check_left(cache, everywhere, abrupt.node_id, 16)
    finally:
        for service in services:
            deploy.stop(service=service)
    assert not on_controller(everywhere, probes.has_torch)  # it has looked up actors that were to be ended
    _check_log(everywhere, gone=[orderly.node_id, abrupt.node_id])


def _check_joined(service: str, node_ids: list[str]) -> None:
    expected = tuple(sorted(node_ids))
    wait_until(lambda: controller_stats(service).nodes == expected, "the actors of the new nodes publish")
    assert tuple(nodes_of(service)) == tuple(sorted(actors_of(service)[KV])) == expected


def _check_left(cache: Any, service: str, node_id: str, left: int) -> None:
    """Calls return in time with right rows while the node is found to be gone, and then its actors' names are, too."""
    deadline = time.monotonic() + 40
    while node_id in controller_stats(service).nodes:
        hit = within(LIMIT_S, lambda: cache.retrieve(TOKENS, [0, -1]))
        assert hit.num_tokens >= 8
        assert is_right(hit)
        assert time.monotonic() < deadline
    wait_until(lambda: node_id not in alive_nodes(), "Ray knows that the node is gone")
    wait_until(
        lambda: not any(node_id in ids for ids in actors_of(service).values()), "the names of its actors are free"
    )
    hit = within(LIMIT_S, lambda: cache.retrieve(TOKENS, [0, -1]))
    assert (hit.num_tokens, hit.ended_by) == (left, "hidden_state")
    assert is_right(hit)


def _check_log(service: str, gone: list[str]) -> None:
    """The controller has said once what there was to say, and nothing twice."""
    pid = on_controller(service, probes.pid_of)
    session = Path(ray._private.worker.global_worker.node.get_session_dir_path())
    (log,) = (session / "logs").glob(f"worker-*-{pid}.err")
    lines = [line for line in log.read_text().splitlines() if not line.startswith((":", "  ", "Traceback"))]
    assert sum("the cluster is out of sight" in line for line in lines) <= 2  # the line, and the end of its traceback
    for node_id in gone:
        assert sum(f"node {node_id} is gone" in line for line in lines) == 1
    assert max(Counter(lines).values()) == 1, lines
