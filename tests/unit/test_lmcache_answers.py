"""The protocol between a KV actor and engines, over real sockets; the engines here are stand-ins, as LMCache isn't
installed. tests/lmcache has the real ones."""

import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hs_cache.config import CacheConfig
from hs_cache.errors import InvalidInputError
from hs_cache.integrations import lmcache_engine, lmcache_source
from hs_cache.integrations.lmcache_engine import EngineAnswers, engine_name
from hs_cache.integrations.lmcache_source import LMCacheSource
from hs_cache.integrations.lmcache_wire import HELLO, MAX_CHUNKS, Question, Registration, WireError, read_question
from hs_cache.kv_presence import KVSource, Presence, RegistersEngines
from hs_cache.lmcache_names import EngineNaming, LMCacheNaming, chunk_hash, name_of, probe_tokens
from tests.processes import wait_until

A, P, U = Presence.ABSENT, Presence.PRESENT, Presence.UNKNOWN
NAMES = b"".join(map(name_of, range(5)))
CPU = type("LocalCPUBackend", (), {"__module__": "lmcache.v1.storage_backend.local_cpu_backend"})


class StandIn:
    """What is used of an ``LMCacheEngine``, with chunks that are plain hashes."""

    def __init__(self, *chunks: int, rank: int = 0, ranks: int = 1, passive: bool = False) -> None:
        self.chunks = set(chunks)
        self.asked = threading.Event()
        self.go_on = threading.Event()
        self.go_on.set()
        self.tags: list[Any] = []
        self.use_layerwise = False
        self.num_layers = 1
        self.save_only_first_rank = passive
        self.retrieve_locations = None
        self.metadata = SimpleNamespace(
            worker_id=rank, local_world_size=ranks, engine_id=None, is_first_rank=lambda: rank == 0
        )
        self.config = SimpleNamespace(lmcache_instance_id="made up", chunk_size=256, save_unfull_chunk=False)
        self.token_database = SimpleNamespace(
            hash_func=hash, _make_key_by_hash=self._key, process_tokens=self._process_tokens
        )
        backend = CPU()
        backend.contains = lambda key: key in self.chunks
        backend.exists_in_put_tasks = lambda key: False
        self.storage_manager = SimpleNamespace(
            storage_backends={"cpu": backend},
            get_active_storage_backends=lambda search_range: [("cpu", backend)],
            batched_contains=self._count,
        )

    def is_healthy(self) -> bool:
        return True

    def _process_tokens(self, tokens: list[int], make_key: bool) -> Iterator[tuple[int, int, int]]:
        size = self.config.chunk_size
        names = LMCacheNaming().names(b"", np.array(tokens), (), size)
        for at in range(0, len(tokens), size):
            yield at, at + size, chunk_hash(names[at // size * 16 :], signed=True)

    def _key(self, chunk: int, configs: Any) -> int:
        self.tags.append(configs)
        return chunk

    def _count(self, keys: list[int], search_range: list[str]) -> tuple[int, Any]:
        self.asked.set()
        self.go_on.wait(10)
        count = next((at for at, key in enumerate(keys) if key not in self.chunks), len(keys))
        return count, {}


Answering = Callable[..., EngineAnswers]


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> Iterator[LMCacheSource]:
    """One that believes engines at once."""
    monkeypatch.setattr(lmcache_source, "_SETTLING_S", 0.0)
    made = LMCacheSource(CacheConfig(kv_source="lmcache", rpc_timeout_s=5))
    yield made
    made.close()


@pytest.fixture
def answering(source: LMCacheSource, monkeypatch: pytest.MonkeyPatch) -> Iterator[Answering]:
    """``answering(engine, name)``: an engine that the source knows."""
    monkeypatch.setattr(lmcache_engine, "_HEARTBEAT_S", 0.02)
    made = []

    def one(engine: Any, name: str = "engine", *, known: bool = True) -> EngineAnswers:
        answers = EngineAnswers(engine, source.register_engine, name=name)
        made.append(answers)
        if known:
            wait_until(lambda: name in source.stats().engines, "the engine is known")
            wait_until(lambda: answers.attempts_total, "it has said so")
        return answers

    yield one
    for answers in made:
        answers.close()


def registration(engine: str = "n", rank: int = 0, address: str = "a", **other: Any) -> Registration:
    """One that the source believes."""
    probe = LMCacheNaming().names(b"", probe_tokens(256), (), 256)
    defaults = {"num_ranks": 1, "token": b"t" * 16, "naming": EngineNaming(256, False, "hash", probe)}
    return Registration(**{"engine": engine, "rank": rank, "address": address, **defaults, **other})


def ask(source: LMCacheSource, names: bytes = NAMES, timeout_s: float = 5.0, **tags: str) -> list[int]:
    return list(source.presence(names, tuple(tags.items()), timeout_s))


def test_it_is_a_source_that_engines_register_with(source: LMCacheSource) -> None:
    checked: KVSource = source
    assert isinstance(checked, RegistersEngines)


def test_one_engine(source: LMCacheSource, answering: Answering) -> None:
    assert ask(source) == [U] * 5
    engine = StandIn(0, 1, 3)
    answering(engine)
    assert ask(source, user="a") == [P, P, A, U, U]
    assert engine.tags[-1] == {"lmcache.tag.user": "a"}
    assert ask(source, b"") == []
    assert engine.tags[-1] is not None
    engine.chunks.add(2)
    assert ask(source) == [P, P, P, P, A]
    assert engine.tags[-1] is None
    source.note_stored(NAMES, "engine")
    assert source.stats().reports_total == 1


def test_ranks_and_engines(source: LMCacheSource, answering: Answering) -> None:
    answering(StandIn(0, 1, 2, 3, 4, ranks=2), "one")
    assert ask(source) == [U] * 5
    answering(StandIn(0, 1, rank=1, ranks=2), "one")
    wait_until(lambda: source.stats().reports_total == 2, "both ranks are known")
    assert ask(source) == [P, P, A, U, U]
    answering(StandIn(0, 1, 2), "other")
    assert ask(source) == [P, P, P, U, U]
    assert source.stats().engines == ("one", "other")


def test_a_rank_that_keeps_no_kv_says_nothing(source: LMCacheSource, answering: Answering) -> None:
    answers = answering(StandIn(rank=1, passive=True), known=False)
    answering(StandIn(0, 1, 2, 3, 4))
    assert ask(source) == [P] * 5
    assert answers.attempts_total == 0


def test_an_engine_that_has_gone_is_forgotten_and_taken_back(
    source: LMCacheSource, answering: Answering, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = answering(StandIn(0))
    answering(StandIn(), "other")
    assert ask(source) == [P, U, U, U, U]
    monkeypatch.setattr(lmcache_source, "_SETTLING_S", 60.0)
    first.close()
    assert ask(source) == [U] * 5
    assert source.stats().gaps_total == 1
    assert ask(source) == [U] * 5  # it may only have lost the connection
    monkeypatch.setattr(lmcache_source, "_SETTLING_S", 0.1)
    wait_until(lambda: ask(source) == [A, U, U, U, U], "by now it would have been heard of")
    assert source.stats().engines == ("other",)
    answering(StandIn(0, 1))
    assert ask(source) == [P, P, U, U, U]


def test_a_rank_that_is_missing_or_gone_is_unknown(
    source: LMCacheSource, answering: Answering, monkeypatch: pytest.MonkeyPatch
) -> None:
    answering(StandIn(0, 1, 2, ranks=2))
    assert ask(source) == [U, U, U, A, U]  # one that says no is enough
    second = answering(StandIn(rank=1, ranks=2), known=False)
    wait_until(lambda: source.stats().reports_total == 2, "both ranks are known")
    assert ask(source) == [A, U, U, A, U]
    monkeypatch.setattr(lmcache_source, "_SETTLING_S", 0.1)
    second.close()
    wait_until(lambda: ask(source) == [U, U, U, A, U] and not source._engines["engine"].ranks.get(1), "it is gone")
    assert ask(source) == [U, U, U, A, U]
    answering(StandIn(0, rank=1, ranks=2))
    wait_until(lambda: ask(source) == [P, A, U, A, U], "both are there again")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"chunk_size": 16}, "chunk_size: the LMCache engine has 256, the service 16"),
        ({"save_unfull_chunk": True}, "save_unfull_chunk: the LMCache engine has False, the service True"),
        ({"kv_hash_seed": "7"}, "pre_caching_hash_algorithm: the LMCache engine doesn't name chunks as the service's"),
        ({"pre_caching_hash_algorithm": "sha256_cbor"}, "It uses <built-in function hash>"),
    ],
)
def test_an_engine_that_names_chunks_otherwise_is_never_believed(
    answering: Answering,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    settings: dict[str, Any],
    reason: str,
) -> None:
    other = LMCacheSource(CacheConfig(kv_source="lmcache", **settings))
    engine = StandIn(0, 1)
    answers = EngineAnswers(engine, other.register_engine, name="engine")
    wait_until(lambda: answers.attempts_total > 3, "it makes itself known")
    assert ask(other) == [U] * 5
    assert not engine.asked.is_set()
    # Again where it was forgotten meanwhile, as it may be on a busy machine with times as short as here.
    assert {reason in record.getMessage() for record in caplog.records} == {True}
    answers.close()
    monkeypatch.setattr(lmcache_source, "_SETTLING_S", 0.05)
    wait_until(lambda: ask(other) == [U] * 5 and not other.stats().engines, "it is forgotten")
    other.close()


def test_an_engine_that_cannot_be_reached_is_told_of_once_and_left_alone_for_a_while(
    source: LMCacheSource, answering: Answering, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lmcache_source, "_SETTLING_S", 60.0)
    answering(StandIn(0, 1), "healthy")
    elsewhere = registration("elsewhere", address=f"hs_cache/test/{os.getpid()}/nobody")
    for _ in range(20):
        source.register_engine(elsewhere)
        assert ask(source) == [P, P, U, U, U]
    assert [record.getMessage() for record in caplog.records] == [
        "LMCache engine 'elsewhere', rank 0, can't be asked, so its KV counts as unknown: "
        "ConnectionRefusedError: [Errno 111] Connection refused"
    ]
    assert source.stats().engines == ("elsewhere", "healthy")
    assert (source.stats().reports_total, source.stats().gaps_total) == (2, 1)
    rank = source._engines["elsewhere"].ranks[0]
    waits = []
    for _ in range(5):
        rank._quiet_until = 0.0
        ask(source)
        waits.append(rank._quiet_until - time.monotonic())
    assert [round(wait) for wait in waits] == [2, 4, 8, 8, 8]
    assert len(caplog.records) == 1


def test_nobody_waits_for_an_engine_whose_answer_changes_nothing(source: LMCacheSource, answering: Answering) -> None:
    slow, quick = StandIn(0, 1, 2, 3, 4), StandIn(0, 1, 2, 3, 4)
    answering(slow, "slow")
    assert ask(source) == [P] * 5
    slow.go_on.clear()
    answering(quick, "quick")
    began = time.monotonic()
    for _ in range(5):
        assert ask(source) == [P] * 5
    assert time.monotonic() - began < 2.0
    # What it still owes isn't taken for the answer to the next question, which comes in the same connection.
    connection = source._engines["slow"].ranks[0]._connection
    slow.chunks, quick.chunks = {0, 1}, {0}
    threading.Timer(0.2, slow.go_on.set).start()
    assert ask(source, NAMES[:48]) == [P, P, U]
    assert ask(source) == [P, P, U, U, U]
    assert source._engines["slow"].ranks[0]._connection is connection


def test_an_engine_of_several_ranks_needs_a_name(source: LMCacheSource) -> None:
    engine = StandIn(ranks=2)
    with pytest.raises(InvalidInputError, match="name: got None for an LMCache engine of 2 ranks without an engine_id"):
        EngineAnswers(engine, source.register_engine)
    engine.metadata.engine_id = "vllm's"
    assert engine_name(engine) == "vllm's"
    assert engine_name(engine, "ours") == "ours"
    assert engine_name(StandIn()) == "made up"
    assert engine_name(StandIn(ranks=2, passive=True)) == "made up"  # only the first has a say


def test_nothing_is_absent_before_all_engines_can_have_been_heard_of(
    answering: Answering, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lmcache_source, "_SETTLING_S", 60.0)
    fresh = LMCacheSource(CacheConfig(kv_source="lmcache"))
    answers = EngineAnswers(StandIn(0), fresh.register_engine, name="engine")
    wait_until(lambda: fresh.stats().engines, "the engine is known")
    assert ask(fresh) == [P, U, U, U, U]
    fresh._settled_at = 0.0
    assert ask(fresh) == [P, A, U, U, U]
    answers.close()
    fresh.close()


def test_a_late_answer_is_unknown_and_is_not_taken_for_the_next_one(
    source: LMCacheSource, answering: Answering
) -> None:
    slow = StandIn(0, 1, 2, 3, 4)
    answering(slow)
    answering(StandIn(0), "quick")
    assert ask(source) == [P] * 5
    slow.go_on.clear()
    slow.asked.clear()
    began = time.monotonic()
    assert ask(source, timeout_s=1.0) == [P, U, U, U, U]
    assert 0.5 < time.monotonic() - began < 3.0
    slow.asked.clear()
    assert ask(source, timeout_s=1.0) == [P, U, U, U, U]
    assert not slow.asked.is_set()  # it is left alone for a moment
    slow.chunks = {0}
    slow.go_on.set()
    wait_until(lambda: ask(source) == [P, A, U, U, U], "it answers again, and the late answer counts for nothing")
    assert source.stats().gaps_total == 0


def test_an_engine_that_never_greets_costs_the_others_nothing(source: LMCacheSource, answering: Answering) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        address = f"hs_cache/test/{os.getpid()}"
        silent.bind("\0" + address)
        silent.listen(1)
        source.register_engine(registration("a silent one", address=address))
        answering(StandIn(0, 1))
        assert ask(source, timeout_s=1.0) == [P, P, U, U, U]
        wait_until(
            lambda: source._engines["a silent one"].ranks[0]._quiet_until < time.monotonic(), "it is asked again"
        )
        assert ask(source, timeout_s=1.0) == [P, P, U, U, U]
    wait_until(lambda: ask(source, timeout_s=1.0) == [P, P, A, U, U], "the silent one is gone")


def test_an_engine_takes_no_more_connections_than_it_can_serve(source: LMCacheSource, answering: Answering) -> None:
    engine = StandIn(0)
    answers = answering(engine)
    others = [connected(answers) for _ in range(20)]
    wait_until(lambda: sum(closed_by_peer(one) for one in others) >= 12, "the rest are refused")
    assert ask(source, timeout_s=0.5) == [U] * 5
    for one in others:
        one.close()
    wait_until(lambda: ask(source)[0] == P, "there is room again")


def connected(answers: EngineAnswers, hello: bytes | None = None) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    # One at a time where more wait than the listener has room for.
    wait_until(lambda: connection.connect_ex("\0" + answers._registration.address) == 0, "it is connected")
    connection.settimeout(5)
    if hello is not None:
        connection.sendall(hello)
    return connection


def closed_by_peer(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


@pytest.mark.parametrize(
    "hello",
    [HELLO + b"x" * 16, b"hsLM\x02" + b"x" * 16, b"GET / HTTP/1.1\r\n\r\n" + b"x" * 16],
    ids=["token", "v", "http"],
)
def test_whoever_does_not_know_the_token_is_refused(answering: Answering, hello: bytes) -> None:
    engine = StandIn(0)
    with connected(answering(engine), hello) as connection:
        wait_until(lambda: closed_by_peer(connection), "it is refused")
    assert not engine.asked.is_set()


def test_whoever_is_another_user_is_refused(
    source: LMCacheSource, answering: Answering, monkeypatch: pytest.MonkeyPatch
) -> None:
    answering(StandIn(0))
    assert ask(source)[0] == P
    source.close()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)  # to each side the other one seems to be someone else
    wait_until(lambda: source.stats().engines, "the engine is known")
    assert ask(source) == [U] * 5


def test_garbage_ends_its_own_connection_only(source: LMCacheSource, answering: Answering) -> None:
    answers = answering(StandIn(0))
    chance = random.Random(1)
    for _ in range(50):
        with connected(answers, HELLO + answers._registration.token) as connection:
            assert connection.recv(len(HELLO)) == HELLO
            garbage = chance.randbytes(chance.randrange(1, 60))
            connection.sendall(garbage)
    assert ask(source)[0] == P


@given(data=st.binary(max_size=80))
def test_what_is_no_question_is_refused(data: bytes) -> None:
    here, there = socket.socketpair()
    with here, there:
        there.sendall(data)
        there.shutdown(socket.SHUT_WR)
        try:
            question = read_question(here, 1.0)
        except WireError:
            return
    assert question is None or len(question.names) % 16 == 0


@given(
    names=st.binary(max_size=8).map(lambda data: data * 16),
    tags=st.lists(st.tuples(st.text(max_size=9), st.text(max_size=9)), max_size=5).map(tuple),
    milliseconds=st.integers(0, 2**32 - 1),
)
def test_a_question_arrives_as_it_was_sent(names: bytes, tags: Any, milliseconds: int) -> None:
    question = Question(names, tags, milliseconds / 1000)
    try:
        encoded = question.encoded()
    except UnicodeEncodeError:
        return
    here, there = socket.socketpair()
    with here, there:
        there.sendall(encoded)
        arrived = read_question(here, 1.0)
    assert arrived is not None
    assert (arrived.names, arrived.tags) == (names, tags)
    assert abs(arrived.timeout_s - question.timeout_s) < 0.002


def test_more_chunks_than_a_question_has_room_for(source: LMCacheSource, answering: Answering) -> None:
    answering(StandIn(*range(MAX_CHUNKS + 2)))
    names = b"".join(map(name_of, range(MAX_CHUNKS + 2)))
    assert ask(source, names) == [P] * MAX_CHUNKS + [U, U]


def test_tags_too_long_for_a_question_are_unknown(source: LMCacheSource, answering: Answering) -> None:
    answering(StandIn(0))
    with pytest.raises(WireError, match="tags"):  # which its caller takes for unknown
        ask(source, user="x" * 5000)
    assert ask(source)[0] == P


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"engine": 1}, "engine: got int"),
        ({"rank": -1}, "rank: got -1"),
        ({"rank": True}, "rank: got True"),
        ({"num_ranks": 0}, "num_ranks: got 0"),
        ({"address": ""}, "address: got ''"),
        ({"address": "a" * 200}, "address: got"),
        ({"token": b"t"}, "token: expected 16 bytes"),
    ],
)
def test_wrong_registrations_are_refused(source: LMCacheSource, arguments: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        source.register_engine(registration(**arguments))
    with pytest.raises(InvalidInputError, match="registration: got str, expected a Registration"):
        source.register_engine("n")  # type: ignore[arg-type]
    assert source.stats().engines == ()


def test_registrations_are_bounded(source: LMCacheSource) -> None:
    for rank in range(256):
        source.register_engine(registration(rank=rank, address=f"a{rank}"))
    with pytest.raises(InvalidInputError, match="256"):
        source.register_engine(registration(rank=256))
    source.register_engine(registration(rank=3, address="another process"))
    assert ask(source) == [U] * 5
    wait_until(lambda: ask(source) == [U] * 5 and not source.stats().engines, "they are gone")
