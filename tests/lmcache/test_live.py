"""A live LMCache engine in this process, its node's KV actor, and what is served because of what it says."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
import torch

import hs_cache
from hs_cache.integrations.lmcache import AttachedStore, answer_for, attach
from hs_cache.kv_presence import KVStatistics
from hs_cache.router import KV, find_actor
from tests.cluster.children import make_rows
from tests.cluster.conftest import StartService
from tests.cluster.remotes import this_node
from tests.lmcache.conftest import MakeEngine
from tests.lmcache.engines import MODEL, kv_keys, put_kv
from tests.lmcache.workers import EngineWorker
from tests.processes import kill, stopped, wait_until

PROMPT = list(range(100, 120))  # five chunks
ROWS = make_rows(len(PROMPT), 3)

OK, ABSENT, UNKNOWN = "ok", "kv_absent", "kv_unknown"

Attach = Callable[..., AttachedStore]


@pytest.fixture(scope="module")
def lmcache_service(start_service: StartService) -> str:
    return start_service(kv_source="lmcache")


@pytest.fixture
def attached(lmcache_service: str, request: pytest.FixtureRequest) -> Iterator[Attach]:
    """``attached(engine) -> AttachedStore``, with a key space of the test's own; closed after it."""
    made = []

    def one(engine: Any, **options: Any) -> AttachedStore:
        store = attach(engine, service=lmcache_service, **{"cache_salt": request.node.nodeid, **options})
        assert store is not None
        made.append(store)
        return store

    yield one
    for store in made:
        store.close()


def reasons(cache: Any, prompt: Any = PROMPT) -> list[str]:
    return [report.reason for report in cache.explain(prompt, 0)]


def kv_statistics(service: str) -> KVStatistics:
    return ray.get(find_actor(service, KV, this_node()).stats.remote())  # type: ignore[no-any-return]


def wait_for(cache: Any, expected: list[str], prompt: Any = PROMPT) -> None:
    """Wait until each chunk can be had, or can't, for the reason given."""
    seen: list[list[str]] = [[]]

    def agree() -> bool:
        seen[0] = reasons(cache, prompt)
        return seen[0] == expected

    try:
        wait_until(agree, f"{expected}")
    except AssertionError as error:
        raise AssertionError(f"{error}; last: {seen[0]}") from None


def test_kv_that_is_there_is_served_and_kv_that_is_gone_takes_its_hidden_states_along(
    make_engine: MakeEngine, attached: Attach
) -> None:
    engine = make_engine()
    store = attached(engine)
    assert engine.hidden_state_store is store
    assert store.store_hidden_states(PROMPT, ROWS) == 5
    keys = put_kv(engine, PROMPT)
    wait_for(store.cache, [OK] * 5)
    rows = store.retrieve_hidden_states(PROMPT)
    assert rows is not None
    assert torch.equal(rows, ROWS)
    assert [store.has_chunk(key) for key in keys] == [True] * 5

    engine.storage_manager.remove(keys[2])
    wait_for(store.cache, [OK, OK, ABSENT, UNKNOWN, UNKNOWN])
    rows = store.retrieve_hidden_states(PROMPT)
    assert rows is not None
    assert torch.equal(rows, ROWS[:8])
    # LMCache's own semantics: the chunk goes, what is behind it stays, and comes back with it.
    assert [store.has_chunk(key) for key in keys] == [True, True, False, True, True]
    put_kv(engine, PROMPT[:12])
    assert store.store_hidden_states(PROMPT, ROWS) == 1
    rows = store.retrieve_hidden_states(PROMPT)
    assert rows is not None
    assert torch.equal(rows, ROWS)


def test_what_lmcache_evicts_by_itself_is_gone(make_engine: MakeEngine, attached: Attach) -> None:
    engine = make_engine(max_local_cpu_size=0.001)
    store = attached(engine)
    store.store_hidden_states(PROMPT, ROWS)
    put_kv(engine, PROMPT)
    wait_for(store.cache, [OK] * 5)
    others = iter(range(1_000, 1_000_000, 400))
    wait_until(lambda: put_kv(engine, range(start := next(others), start + 400)) and reasons(store.cache)[0] != OK, "")
    wait_until(lambda: reasons(store.cache)[0] == ABSENT, "LMCache has evicted the first chunk")
    assert store.retrieve_hidden_states(PROMPT) is None
    assert not store.has_chunk(kv_keys(engine, PROMPT)[0])


def test_tags_tell_kv_apart(make_engine: MakeEngine, attached: Attach) -> None:
    engine = make_engine()
    tags = {"user": "a", "tier": "gold"}
    store = attached(engine, tags=tags)
    store.store_hidden_states(PROMPT, ROWS)
    put_kv(engine, PROMPT)
    wait_for(store.cache, [ABSENT] + [UNKNOWN] * 4)
    put_kv(engine, PROMPT, tags)
    wait_for(store.cache, [OK] * 5)


def test_a_chunk_stored_by_layers_needs_all_of_them(make_engine: MakeEngine, attached: Attach) -> None:
    engine = make_engine(use_layerwise=True)
    store = attached(engine)
    store.store_hidden_states(PROMPT, ROWS)
    keys = put_kv(engine, PROMPT)
    wait_for(store.cache, [OK] * 5)
    assert engine.storage_manager.remove(keys[2 * engine.num_layers + 1])
    wait_for(store.cache, [OK, OK, ABSENT, UNKNOWN, UNKNOWN])


def test_where_the_first_rank_keeps_the_kv_for_all_the_others_have_no_say(
    make_engine: MakeEngine, attached: Attach
) -> None:
    settings = {"use_mla": True, "world_size": 2, "extra_config": {"save_only_first_rank": True}}
    first, second = make_engine(rank=0, **settings), make_engine(rank=1, **settings)
    store, _ = attached(first, name="one"), attached(second, name="one")
    store.store_hidden_states(PROMPT, ROWS)
    put_kv(first, PROMPT)
    wait_for(store.cache, [OK] * 5)


def test_all_ranks_of_an_engine_must_have_a_chunk(make_engine: MakeEngine, attached: Attach) -> None:
    first, second = make_engine(rank=0, world_size=2), make_engine(rank=1, world_size=2)
    store, _ = attached(first, name="two"), attached(second, name="two")
    store.store_hidden_states(PROMPT, ROWS)
    put_kv(first, PROMPT)
    put_kv(second, PROMPT[:8])
    wait_for(store.cache, [OK, OK, ABSENT, UNKNOWN, UNKNOWN])
    put_kv(second, PROMPT)
    wait_for(store.cache, [OK] * 5)


def test_of_several_engines_one_that_has_a_chunk_is_enough(make_engine: MakeEngine, attached: Attach) -> None:
    one, other = make_engine(), make_engine()
    store = attached(one)
    attached(other)
    store.store_hidden_states(PROMPT, ROWS)
    keys = put_kv(one, PROMPT)
    wait_for(store.cache, [OK] * 5)
    one.storage_manager.remove(keys[0])
    wait_for(store.cache, [ABSENT] + [UNKNOWN] * 4)
    put_kv(other, PROMPT[:4])
    wait_for(store.cache, [OK] + [UNKNOWN] * 4)  # the one says nothing of what is behind a chunk that it lacks
    put_kv(other, PROMPT)
    wait_for(store.cache, [OK] * 5)


def test_nobody_to_ask_is_unknown_and_drops_nothing(lmcache_service: str) -> None:
    cache: Any = hs_cache.connect(service=lmcache_service, model=MODEL, cache_salt="nobody")
    cache.store(PROMPT, {0: ROWS})
    wait_until(lambda: reasons(cache) == [UNKNOWN] * 5, "engines of other tests are gone")
    assert cache.retrieve(PROMPT, 0).num_tokens == 0
    assert all(cache.has_chunk(key) for key in cache.chunk_keys(PROMPT))


def test_an_engine_without_a_cache_of_its_own_answers_for_clients(
    lmcache_service: str, make_engine: MakeEngine
) -> None:
    engine = make_engine(enable_hidden_state_cache=False)
    assert attach(engine, service=lmcache_service) is None
    assert engine.hidden_state_store is None
    answers = answer_for(engine, service=lmcache_service)
    cache: Any = hs_cache.connect(service=lmcache_service, model=MODEL, cache_salt="apart")
    put_kv(engine, PROMPT)
    cache.store(PROMPT, {0: ROWS})
    wait_for(cache, [OK] * 5)
    engine.mark_init_failed()
    wait_for(cache, [UNKNOWN] * 5)
    answers.close()
    answers.close()


def test_an_engine_killed_and_another_in_its_place(lmcache_service: str) -> None:
    worker_class: Any = ray.remote(EngineWorker)
    first = worker_class.remote(lmcache_service, "killed")
    ray.get(first.put_kv.remote(PROMPT))
    ray.get(first.store.remote(PROMPT, ROWS))
    cache: Any = hs_cache.connect(service=lmcache_service, model=MODEL, cache_salt="killed")
    wait_for(cache, [OK] * 5)
    kill(ray.get(first.pid.remote()))
    wait_for(cache, [UNKNOWN] * 5)
    assert cache.retrieve(PROMPT, 0).num_tokens == 0
    assert all(cache.has_chunk(key) for key in cache.chunk_keys(PROMPT))

    second = worker_class.remote(lmcache_service, "killed")
    ray.get(second.put_kv.remote(PROMPT))
    wait_for(cache, [OK] * 5)
    assert torch.equal(cache.retrieve(PROMPT, 0)[0], ROWS)  # the hidden states outlived their engine
    ray.get(second.close.remote())
    ray.kill(second)


def test_an_engine_that_hangs_is_unknown_in_time(lmcache_service: str) -> None:
    worker_class: Any = ray.remote(EngineWorker)
    worker = worker_class.remote(lmcache_service, "hangs")
    ray.get(worker.put_kv.remote(PROMPT))
    cache: Any = hs_cache.connect(service=lmcache_service, model=MODEL, cache_salt="hangs")
    cache.store(PROMPT, {0: ROWS})
    wait_for(cache, [OK] * 5)
    pid: int = ray.get(worker.pid.remote())
    with stopped(pid):
        began = time.monotonic()
        assert cache.retrieve(PROMPT, 0).ended_by == UNKNOWN
        assert time.monotonic() - began < 2 * cache.config.rpc_timeout_s
    wait_for(cache, [OK] * 5)
    ray.get(worker.close.remote())
    ray.kill(worker)


def test_a_kv_actor_killed_hears_of_the_engines_again(
    lmcache_service: str, make_engine: MakeEngine, attached: Attach
) -> None:
    engine = make_engine()
    store = attached(engine)
    store.store_hidden_states(PROMPT, ROWS)
    put_kv(engine, PROMPT)
    wait_for(store.cache, [OK] * 5)

    def alone() -> bool:
        return bool(reasons(store.cache)) and len(kv_statistics(lmcache_service).engines) == 1

    wait_until(alone, "engines of other tests are forgotten")
    before = kv_statistics(lmcache_service)
    ray.kill(find_actor(lmcache_service, KV, this_node()), no_restart=False)
    wait_until(lambda: (rows := store.retrieve_hidden_states(PROMPT)) is None or len(rows) < 20, "it is gone")
    wait_for(store.cache, [OK] * 5)
    rows = store.retrieve_hidden_states(PROMPT)
    assert rows is not None
    assert torch.equal(rows, ROWS)
    assert kv_statistics(lmcache_service).engines == before.engines


def test_two_engines_in_processes_of_their_own_share_hidden_states(lmcache_service: str) -> None:
    worker_class: Any = ray.remote(EngineWorker)
    workers = [worker_class.remote(lmcache_service, "shared", f"worker-{i}") for i in range(2)]
    assert ray.get(workers[0].store.remote(PROMPT, ROWS)) == 5
    assert ray.get(workers[1].store.remote(PROMPT, ROWS)) == 0
    ray.get(workers[1].put_kv.remote(PROMPT))

    def rows() -> Any:
        return ray.get(workers[1].retrieve.remote(PROMPT))

    found = wait_until(lambda: (got := rows()) is not None and len(got) == len(PROMPT) and [got], "all is served")[0]
    assert torch.equal(torch.from_numpy(found.copy()), ROWS)
    for worker in workers:
        ray.get(worker.close.remote())
        ray.kill(worker)
