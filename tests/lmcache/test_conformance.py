"""Code written for LMCache's ``HiddenStateStore`` against the real one and against the drop-in; see cases.py."""

import signal
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from hs_cache.errors import CacheClosedError
from hs_cache.integrations.lmcache import attach
from hs_cache.kv_presence import Presence
from hs_cache.lmcache_names import name_of
from hs_cache.router import KV, find_actor
from tests.cluster.conftest import StartService
from tests.cluster.remotes import this_node
from tests.lmcache import engines
from tests.lmcache.cases import CASES, CLOSED, POOL_SLOTS, SLOT_BYTES, Case, Side, rows_for, table
from tests.lmcache.conftest import MakeEngine
from tests.processes import ROOT, run_python, wait_until

POOL_GIB = POOL_SLOTS * SLOT_BYTES / 2**30


@pytest.fixture(scope="module")
def pool_service(start_service: StartService) -> str:
    return start_service(kv_source="lmcache", max_hidden_state_cpu_size=POOL_GIB)


@pytest.fixture(scope="module")
def attached_engine(pool_service: str) -> Iterator[Any]:
    """One for all cases: a KV actor waits for a moment before it believes that what an engine lacked is gone."""
    instance = "conformance"
    engine = engines.make_engine(instance)
    attach(engine, service=pool_service)
    wait_for_answers(pool_service)
    yield engine
    engines.close(instance)


@pytest.fixture
def side(request: pytest.FixtureRequest, make_engine: MakeEngine) -> Iterator[Side]:
    """One of the two, empty."""
    if request.param == "ours":
        engine = request.getfixturevalue("attached_engine")
    else:
        engine = make_engine(max_hidden_state_cpu_size=POOL_GIB)
    opened = Side(engine.hidden_state_store, engine, engines.put_kv, engines.kv_keys)
    yield opened
    opened.clear()


def wait_for_answers(service: str) -> None:
    """Wait until the engine is asked, and believed when it says that it lacks a chunk."""
    actor: Any = find_actor(service, KV, this_node())
    absent = bytes([Presence.ABSENT])
    wait_until(lambda: ray.get(actor.presence.remote(name_of(1), (), 1.0)) == absent, "the engine is asked")


@pytest.mark.parametrize("side", ["lmcache", "ours"], indirect=True)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(case: Case, side: Side, request: pytest.FixtureRequest) -> None:
    ours = request.node.callspec.params["side"] == "ours"
    assert case.run(side) == (case.ours if ours else case.lmcache)


def test_lmcaches_store_crashes_after_close() -> None:
    code = (
        "import torch\nfrom tests.lmcache import engines\nengine = engines.make_engine('closed')\n"
        "store = engine.hidden_state_store\nstore.close()\n"
        "store.store_hidden_states(list(range(400)), torch.ones(400, 64))\n"
    )
    assert CLOSED.lmcache == "the process crashes (SIGSEGV)"
    assert run_python(["-c", code]).returncode == -signal.SIGSEGV


def test_the_drop_in_refuses_after_close_and_so_does_the_store_that_it_replaced(
    pool_service: str, make_engine: MakeEngine
) -> None:
    engine = make_engine()
    replaced = engine.hidden_state_store
    store: Any = attach(engine, service=pool_service, cache_salt="closed")
    tokens = list(range(8))
    assert replaced.store_hidden_states(tokens, rows_for([7] * 8)) == 2  # reaches the drop-in
    assert store.has_chunk(engines.kv_keys(engine, tokens)[0])
    for key in engines.kv_keys(engine, tokens):
        store.drop_key(key)
    store.close()
    for one in (store, replaced):
        with pytest.raises(CacheClosedError):
            one.store_hidden_states(tokens, rows_for([7] * 8))
    assert CLOSED.ours == CacheClosedError.__name__


def test_differences_have_reasons() -> None:
    assert [one.name for one in CASES if (one.lmcache != one.ours) != bool(one.why)] == []


def test_the_table_in_the_documentation_is_that_of_the_cases() -> None:
    assert table() in (ROOT / "docs" / "lmcache.md").read_text(encoding="utf-8")
