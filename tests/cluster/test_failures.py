"""Processes that are killed: what was stored is right or gone, never wrong, and memory comes back."""

from collections.abc import Callable
from typing import Any

import pytest
import ray
import torch

import hs_cache
from hs_cache.messages import StoreStatistics
from hs_cache.router import HIDDEN_STATES, KV, find_actor, nodes_of
from tests.cluster import probes, remotes
from tests.cluster.children import make_rows
from tests.cluster.conftest import Connect, StartService
from tests.processes import kill, wait_until

ROWS = make_rows(12, 1)


@pytest.fixture
def own_service(start_service: StartService) -> str:
    return start_service()


def store_statistics(cache: Any) -> StoreStatistics:
    return cache.stats().node.store  # type: ignore[no-any-return]


def wait_for(cache: Any, condition: Callable[[StoreStatistics], bool], what: str) -> None:
    wait_until(lambda: condition(store_statistics(cache)), what)


def check_index(service: str) -> None:
    ray.get(find_actor(service, HIDDEN_STATES, nodes_of(service)[0]).check.remote())


def test_a_reader_killed_while_it_holds_rows(own_service: str) -> None:  # case 15
    cache: Any = hs_cache.connect(service=own_service)
    cache.store(range(12), {0: ROWS})
    base = store_statistics(cache)
    reader = remotes.spawn(remotes.Reader, cache)
    pid, num_tokens, _ = ray.get(reader.hold.remote(range(12)))
    assert num_tokens == 12
    held = store_statistics(cache)
    assert (held.num_leases, held.leased_bytes) == (1, base.resident_bytes)

    kill(pid)
    wait_for(cache, lambda stats: stats == base, "the dead reader's lease has ended")
    check_index(own_service)
    wait_until(lambda: cache.stats().node.num_clients == 1, "only this process counts as a client")


def test_a_writer_killed_between_reserve_and_commit(own_service: str) -> None:  # case 15
    cache: Any = hs_cache.connect(service=own_service)
    cache.store(range(4), {0: ROWS[:4]})
    base = store_statistics(cache)
    writer = remotes.spawn(remotes.StuckWriter, cache)
    pid: int = ray.get(writer.pid.remote())
    writer.store.remote(range(12), ROWS)
    wait_for(cache, lambda stats: stats.num_reservations == 1, "the writer has reserved")
    stats = store_statistics(cache)
    assert (stats.reserved_bytes, stats.num_leases) == (2 * base.resident_bytes, 0)
    assert cache.retrieve(range(12), 0).num_tokens == 4

    kill(pid)
    wait_for(cache, lambda stats: stats.num_reservations == 0, "the dead writer's reservation has ended")
    assert cache.retrieve(range(12), 0).num_tokens == 4
    assert cache.store(range(12), {0: ROWS}).stored == 2
    assert torch.equal(cache.retrieve(range(12), 0)[0], ROWS)
    wait_for(cache, lambda stats: stats.num_leases == 0, "nothing is held")
    check_index(own_service)


def test_the_hidden_state_actor_killed(connect: Connect, own_service: str) -> None:  # case 16
    cache = connect(service=own_service)
    cache.store(range(12), {0: ROWS})
    held = cache.retrieve(range(12), 0)
    first = cache.stats().node

    kill(first.pid)
    assert not cache.retrieve(range(12), 0)
    assert cache.store(range(12), {0: ROWS}).prefix_tokens in (0, 12)
    wait_until(lambda: cache.stats().node, "the actor answers again")
    assert cache.stats().node.incarnation != first.incarnation
    wait_until(lambda: cache.store(range(12), {0: ROWS}).prefix_tokens == 12, "a store succeeds")
    assert torch.equal(cache.retrieve(range(12), 0)[0], ROWS)
    assert torch.equal(held[0], ROWS)
    del held
    wait_for(cache, lambda stats: stats.num_leases == 0, "nothing is held")
    check_index(own_service)


def test_the_hidden_state_actor_killed_amid_stores(own_service: str) -> None:  # case 16
    cache: Any = hs_cache.connect(service=own_service)
    for round_ in range(2):
        pid = wait_until(lambda: cache.stats().node, "the actor answers").pid
        prompts = [range(1000 * i, 1000 * i + 64) for i in range(20)]
        for i, prompt in enumerate(prompts):
            if i == 10:
                kill(pid)
            cache.store(prompt, {0: make_rows(64, i)})
        wait_until(lambda: cache.stats().node, "the actor answers again")
        for i, prompt in enumerate(prompts):
            hit = cache.retrieve(prompt, 0)
            assert not hit or torch.equal(hit[0], make_rows(64, i)[: hit.num_tokens]), f"round {round_}, prompt {i}"
            del hit
    check_index(own_service)


def test_the_kv_actor_killed(connect: Connect, own_service: str) -> None:
    cache = connect(service=own_service)
    cache.store(range(12), {0: ROWS})
    assert cache.retrieve(range(12), 0).num_tokens == 12
    kv = find_actor(own_service, KV, nodes_of(own_service)[0])
    keys = cache.chunk_keys(range(12))

    kill(ray.get(kv.__ray_call__.remote(probes.pid_of)))
    assert cache.retrieve(range(12), 0).ended_by == "kv_unknown"
    assert cache.num_cached_chunks() == 3
    wait_until(lambda: cache.kv.resync(list(keys)), "the actor answers again")
    # For a moment after its silence the KV side isn't asked, lest it keep every call waiting.
    assert torch.equal(cache.retrieve(range(12), 0, wait_s=10)[0], ROWS)
    assert cache.store(range(16), {0: make_rows(16, 1)}).stored == 1
    assert cache.retrieve(range(16), 0).num_tokens == 16
    assert cache.stats().timeouts_total == cache.stats().unreachable_total == 0
