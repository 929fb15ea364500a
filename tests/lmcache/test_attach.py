"""The drop-in inside a real engine: how it gets there, what is refused, how it goes."""

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import ray

import hs_cache
from hs_cache.errors import CacheClosedError, ConfigMismatchError, InvalidInputError
from hs_cache.integrations.lmcache import AttachedStore, answer_for, attach
from hs_cache.router import KV, find_actor
from tests.cluster.children import make_rows
from tests.cluster.conftest import StartService
from tests.cluster.remotes import this_node
from tests.lmcache import golden
from tests.lmcache.conftest import MakeEngine
from tests.lmcache.engines import MODEL, close, kv_keys, put_kv
from tests.processes import wait_until

PROMPT = list(range(300, 320))
ROWS = make_rows(len(PROMPT), 5)


@pytest.fixture(scope="module")
def builtin(start_service: StartService) -> str:
    return start_service(kv_source="lmcache")


@pytest.fixture(scope="module")
def cbor(start_service: StartService) -> str:
    return start_service(kv_source="lmcache", pre_caching_hash_algorithm="sha256_cbor", kv_hash_seed="7")


@pytest.fixture
def attached(make_engine: MakeEngine, builtin: str) -> Iterator[AttachedStore]:
    store = attach(make_engine(), service=builtin)
    assert store is not None
    yield store
    store.close()


def test_before_post_init_the_engine_binds_its_storage_by_itself(make_engine: MakeEngine, builtin: str) -> None:
    engine = make_engine(post_init=False)
    store = attach(engine, service=builtin, cache_salt="early")
    assert store is engine.hidden_state_store
    engine.post_init()
    store.store_hidden_states(PROMPT, ROWS)
    put_kv(engine, PROMPT)
    wait_until(lambda: store.retrieve_hidden_states(PROMPT) is not None, "the engine answers")
    store.bind_storage_manager(engine.storage_manager)  # again is harmless


def test_an_engine_closes_its_drop_in(builtin: str, make_engine: MakeEngine) -> None:
    engine = make_engine()
    store: Any = attach(engine, service=builtin)
    close(engine.config.lmcache_instance_id)
    store.close()
    for call in (
        lambda: store.store_hidden_states(PROMPT, ROWS),
        lambda: store.retrieve_hidden_states(PROMPT),
        store.num_cached_chunks,
        lambda: store.has_chunk(b"k" * 16),
        lambda: store.drop_key(b"k" * 16),
        lambda: store.bind_storage_manager(None),
        lambda: store.cache.retrieve(PROMPT, 0),
    ):
        with pytest.raises(CacheClosedError):
            call()


def test_a_client_of_the_callers_is_used_and_left_open(builtin: str, make_engine: MakeEngine) -> None:
    cache: Any = hs_cache.connect(service=builtin, model="mine")
    store: Any = attach(make_engine(), cache)
    assert store.cache is cache
    store.close()
    assert cache.store(PROMPT, {0: ROWS}).stored == 5


def test_the_engines_model_is_the_clients(attached: AttachedStore) -> None:
    assert attached.cache.key_space.model == MODEL


def test_keys_of_both_kinds(attached: AttachedStore) -> None:
    prompt = [number + 1000 for number in PROMPT]
    assert attached.store_hidden_states(prompt, ROWS) == 5
    theirs = kv_keys(attached._engine, prompt)
    ours = list(attached.cache.chunk_keys(prompt))
    assert [attached.has_chunk(key) for key in (theirs[1], ours[1])] == [True, True]
    assert not attached.has_chunk(theirs[1], 3)
    assert attached.drop_key(theirs[1])
    assert [attached.has_chunk(key) for key in (theirs[1], ours[1])] == [False, False]
    assert attached.drop_key(ours[2])
    assert not attached.has_chunk(kv_keys(attached._engine, range(40, 44))[0])  # of a prompt never seen
    for wrong in (1, "k", b"k", None):
        with pytest.raises(InvalidInputError, match="key: got"):
            attached.has_chunk(wrong)


def test_remembered_prompts_are_bounded(attached: AttachedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hs_cache.integrations.lmcache._MAX_PROMPT_BYTES", 3 * 8 * len(PROMPT))
    monkeypatch.setattr("hs_cache.integrations.lmcache._MAX_KEYS", 7)
    prompts = [[number + 100 * i for number in PROMPT] for i in range(20, 26)]
    for prompt in prompts:
        attached.store_hidden_states(prompt, ROWS)
    known = [[attached.has_chunk(key) for key in kv_keys(attached._engine, prompt)] for prompt in prompts]
    assert known[:4] == [[False] * 5] * 4
    assert known[4:] == [[False] * 3 + [True] * 2, [True] * 5]


def test_a_store_in_use_is_replaced() -> None:
    command = [sys.executable, "-m", "tests.lmcache.replaced"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert "survived, closed: True" in done.stdout, done.stderr[-2000:]


def test_an_engine_of_several_ranks_needs_a_name(make_engine: MakeEngine, builtin: str) -> None:
    engine = make_engine(world_size=2)
    before = engine.hidden_state_store
    with pytest.raises(InvalidInputError, match="name: got None for an LMCache engine of 2 ranks"):
        attach(engine, service=builtin)
    with pytest.raises(InvalidInputError, match="name: got None"):
        answer_for(engine, service=builtin)
    assert engine.hidden_state_store is before


def test_an_engine_that_only_answers_is_not_believed_in_other_chunks(
    make_engine: MakeEngine, start_service: StartService
) -> None:
    service = start_service(kv_source="lmcache")
    cache: Any = hs_cache.connect(service=service, model=MODEL)
    cache.store(PROMPT, {0: ROWS})
    engine = make_engine(chunk_size=8)
    answers = answer_for(engine, service=service)
    put_kv(engine, PROMPT)
    wait_until(lambda: answers.attempts_total, "it is known")
    actor = find_actor(service, KV, this_node())
    wait_until(lambda: ray.get(actor.stats.remote()).engines, "it is known")
    assert {report.reason for report in cache.explain(PROMPT, 0)} == {"kv_unknown"}
    answers.close()
    cache.close()


def test_an_engine_that_keeps_shorter_chunks_too_is_refused(make_engine: MakeEngine, builtin: str) -> None:
    with pytest.raises(ConfigMismatchError, match="save_unfull_chunk: the LMCache engine has True, the service False"):
        attach(make_engine(save_unfull_chunk=True), service=builtin)


def test_chunks_of_another_size_are_refused(make_engine: MakeEngine, builtin: str) -> None:
    engine = make_engine(chunk_size=8)
    before = engine.hidden_state_store
    with pytest.raises(ConfigMismatchError, match="chunk_size: the LMCache engine has 8, the service 4"):
        attach(engine, service=builtin)
    assert engine.hidden_state_store is before
    assert before.num_cached_chunks() == 0  # and it works


def test_chunks_of_other_names_are_refused(
    make_engine: MakeEngine, cbor: str, builtin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(pre_caching_hash_algorithm="sha256_cbor")  # without vLLM this is Python's hash
    with pytest.raises(ConfigMismatchError, match=r"kv_hash_seed '7' does. It uses <built-in function hash>"):
        attach(engine, service=cbor)
    engine.token_database.hash_func = golden.sha256_cbor
    with pytest.raises(ConfigMismatchError, match="pre_caching_hash_algorithm"):  # no seed
        attach(engine, service=cbor)
    with pytest.raises(ConfigMismatchError, match="pre_caching_hash_algorithm"):
        attach(engine, service=builtin)
    first = int.from_bytes(golden.sha256_cbor("7")[:8], "big")
    monkeypatch.setattr("lmcache.v1.token_database.NONE_HASH", first)  # as vLLM's init_none_hash has it
    store: Any = attach(engine, service=cbor)
    store.store_hidden_states(PROMPT, ROWS)
    put_kv(engine, PROMPT)
    wait_until(lambda: store.retrieve_hidden_states(PROMPT) is not None, "the engine answers")


def test_disabled_stays_disabled(make_engine: MakeEngine, builtin: str) -> None:
    engine = make_engine(enable_hidden_state_cache=False)
    assert attach(engine, service=builtin) is None
    assert engine.hidden_state_store is None
    store = attach(engine, service=builtin, even_if_disabled=True)
    assert engine.hidden_state_store is store
    other = make_engine()
    before = other.hidden_state_store
    assert attach(other, service=builtin, config={"enable_hidden_state_cache": False}) is None
    assert other.hidden_state_store is before


def test_attached_anew_the_last_one_counts(make_engine: MakeEngine, builtin: str) -> None:
    engine = make_engine()
    first: Any = attach(engine, service=builtin, cache_salt="first")
    second: Any = attach(engine, service=builtin, cache_salt="second")
    assert engine.hidden_state_store is second
    assert first.store_hidden_states(PROMPT, ROWS) == 5  # as any store that was replaced
    assert second.store_hidden_states(PROMPT, ROWS) == 0
    put_kv(engine, PROMPT)
    wait_until(lambda: first.retrieve_hidden_states(PROMPT) is not None, "the engine answers")


def test_a_client_and_arguments_for_one_are_too_much(make_engine: MakeEngine, builtin: str) -> None:
    cache: Any = hs_cache.connect(service=builtin)
    with pytest.raises(InvalidInputError, match="cache: got a client together with tags, cache_salt"):
        attach(make_engine(), cache, tags={"a": "b"}, cache_salt="s")


def test_a_service_that_does_not_ask_lmcache(
    make_engine: MakeEngine, service: str, caplog: pytest.LogCaptureFixture
) -> None:
    store: Any = attach(make_engine(), service=service)
    assert "kv_source: reports, so it doesn't ask the LMCache engine" in caplog.text
    assert store.store_hidden_states(PROMPT, ROWS) == 5
    assert len(store.retrieve_hidden_states(PROMPT)) == 20  # storing implies KV there
    store.close()


def test_a_node_without_a_service_is_told_of_once(make_engine: MakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    answers = answer_for(make_engine(), service="nobody-started-this")
    wait_until(lambda: "can't make itself known" in caplog.text, "that is said")
    wait_until(lambda: answers.attempts_total > 2, "it is tried again")
    assert caplog.text.count("can't make itself known") == 1
    answers.close()
