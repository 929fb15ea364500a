"""The source that listens to engines, over real sockets: whatever happens to engines, networks and messages."""

import itertools
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import zmq

from hs_cache.config import CacheConfig
from hs_cache.errors import ConfigError
from hs_cache.integrations import vllm_events
from hs_cache.integrations.vllm_events import VLLMEventsSource
from hs_cache.keys import KeySpace, normalise_token_ids
from hs_cache.kv_presence import Presence
from hs_cache.vllm_names import VLLMNaming
from tests.processes import free_port, run_python, stopped, wait_until
from tests.vllm_engine import (
    BLOCK,
    CHUNK,
    CLEARED,
    Extras,
    Form,
    PrefixCache,
    encode,
    publishing,
    publishing_process,
    remove,
    store,
    tokens_of,
)

ABSENT, PRESENT, UNKNOWN = Presence.ABSENT, Presence.PRESENT, Presence.UNKNOWN
AT_ONCE_S = 0.5
"""More than asking may take on a busy machine, and far less than anything that is waited for here."""


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is done every few seconds is done several times a second."""
    monkeypatch.setattr(vllm_events, "_RETRY_S", 0.2)
    monkeypatch.setattr(vllm_events, "_SETTLE_S", 0.2)
    monkeypatch.setattr(vllm_events, "_CHECK_S", 0.2)


@contextmanager
def listening(*engines: dict[str, Any], **settings: Any) -> Iterator[VLLMEventsSource]:
    """A source that listens to these, each an entry for ``kv_events``."""
    entries = [{"model": "m", "block_size": BLOCK} | engine for engine in engines]
    source = VLLMEventsSource(CacheConfig(kv_source="vllm_events", kv_events=entries, chunk_size=CHUNK, **settings))
    try:
        yield source
    finally:
        source.close()


def names(tokens: Any, spans: Any = (), **space: Any) -> bytes:
    naming = VLLMNaming(KeySpace(**{"model": "m", "chunk_size": CHUNK} | space), BLOCK)
    return naming.names(b"", normalise_token_ids(list(tokens)), spans, CHUNK)


def ask(source: VLLMEventsSource, prompt: str) -> list[int]:
    began = time.monotonic()
    answer = list(source.presence(names(tokens_of(prompt)), (), 1.0))
    assert time.monotonic() - began < AT_ONCE_S
    return answer


def until(source: VLLMEventsSource, prompt: str, *expected: Presence) -> None:
    wait_until(lambda: ask(source, prompt) == list(expected), f"{prompt} is {expected}, not {ask(source, prompt)}")


def until_connected(source: VLLMEventsSource, *, count: int = 1) -> None:
    wait_until(lambda: sum(each.connected for each in source.listeners()) == count, "engines are heard")


def until_complete(source: VLLMEventsSource) -> None:
    """Its first batch is heard. Without a replay what is published while a subscription takes effect is lost."""
    wait_until(lambda: source.listeners()[0].stream.batches_total, "the first batch is heard")


@pytest.mark.parametrize("form", ["arrays", "maps", "mixed"])
@pytest.mark.parametrize("replay", [True, False])
def test_events_in_every_form_are_heard(form: Form, replay: bool) -> None:
    with publishing(form=form, replay=replay) as engine, listening(engine.source) as source:
        until_connected(source)
        wait_until(lambda: engine.publish(store("ab")) and ask(source, "ab") == [PRESENT], "ab is heard of")
        engine.publish(store("abcd", 2), CLEARED, store("xy"))
        until(source, "abcd", ABSENT, ABSENT)
        until(source, "xy", PRESENT)
        assert source.stats().engines == (engine.source["endpoint"],)


@pytest.mark.parametrize("extras", ["offsets", "identifiers", "old"])
def test_lora_media_and_salt_tell_prompts_apart(extras: Extras) -> None:
    cache = PrefixCache(BLOCK, extras=extras)
    tokens, spans = list(range(8)), [(3, 2, "image"), (5, 3, "audio")]
    with publishing() as engine, listening(engine.source) as source:
        until_connected(source)
        engine.publish(*cache.store(tokens, spans, lora="l"))
        wanted = names(tokens, spans, lora_id="l")
        wait_until(lambda: list(source.presence(wanted, (), 1.0)) == [PRESENT] * 2, "the prompt is heard of")
        for other in (
            names(tokens, lora_id="l")[16:],
            names(tokens, [(3, 2, "other"), (5, 3, "audio")], lora_id="l"),
            names(tokens, [(3, 2, "image"), (6, 2, "audio")], lora_id="l")[16:],
            names(tokens, spans, lora_id="k"),
            names(tokens, spans),
            names(tokens, spans, lora_id="l", cache_salt="s"),
            names(tokens, spans, lora_id="l", model="n"),
        ):
            if extras == "offsets" or other != names(tokens, [(3, 2, "image"), (6, 2, "audio")], lora_id="l")[16:]:
                assert PRESENT not in source.presence(other, (), 1.0)
        if extras == "offsets":
            engine.publish(*cache.store(tokens, spans, lora="l", salt="s"))
            wanted = names(tokens, spans, lora_id="l", cache_salt="s")
            wait_until(lambda: list(source.presence(wanted, (), 1.0)) == [PRESENT] * 2, "the salted prompt too")


def test_what_is_lost_is_replayed() -> None:
    with publishing() as engine, listening(engine.source) as source:
        until_connected(source)
        engine.publish(store("ab"))
        until(source, "ab", PRESENT)
        engine.publish(remove("ab"), lost=True)
        engine.publish(store("cd"), lost=True)
        engine.publish(store("ef"))
        until(source, "ef", PRESENT)
        assert (ask(source, "ab"), ask(source, "cd")) == ([ABSENT], [PRESENT])
        assert source.stats().gaps_total == 0


def test_what_is_lost_without_replay_is_unknown_with_all_before_it() -> None:
    with publishing(replay=False) as engine, listening(engine.source) as source:
        until_connected(source)
        wait_until(lambda: engine.publish(store("ab")) and ask(source, "ab") == [PRESENT], "ab is heard of")
        engine.publish(remove("ab"), lost=True)
        engine.publish(store("cd"))
        until(source, "cd", PRESENT)
        assert ask(source, "ab") == [UNKNOWN]
        assert source.stats().gaps_total >= 1


def test_what_is_lost_and_too_old_for_replay_is_unknown() -> None:
    with publishing(buffer=2) as engine, listening(engine.source) as source:
        until_connected(source)
        engine.publish(store("ab"))
        until(source, "ab", PRESENT)
        for _ in range(4):
            engine.publish(remove("ab"), lost=True)
        engine.publish(store("cd"))
        until(source, "cd", PRESENT)
        assert ask(source, "ab") == [UNKNOWN]


def test_a_loss_that_nothing_follows_is_found_by_asking() -> None:
    with publishing() as engine, listening(engine.source) as source:
        until_connected(source)
        engine.publish(store("ab"))
        until(source, "ab", PRESENT)
        engine.publish(remove("ab"), lost=True)
        until(source, "ab", ABSENT)


def test_reordered_and_repeated_messages() -> None:
    with publishing() as engine, listening(engine.source) as source:
        until_connected(source)
        sent = [engine.publish(event, lost=True) for event in (store("ab"), remove("ab"), store("ab"), store("cd"))]
        for at in (0, 2, 1, 1, 0, 3, 2, 3, 0):
            engine.send(*sent[at])
        engine.publish(store("ef"))
        until(source, "ef", PRESENT)
        assert (ask(source, "ab"), ask(source, "cd")) == ([PRESENT], [PRESENT])
        assert source.listeners()[0].stream.restarts_total == 0


def test_what_was_published_before_is_read() -> None:
    with publishing() as engine:
        engine.publish(store("abcd"))
        engine.publish(remove("abcd"))
        with listening(engine.source) as source:
            until(source, "abcd", PRESENT, ABSENT)
            engine.publish(store("abcd", 3))
            until(source, "abcd", PRESENT, PRESENT)


def test_an_engine_that_is_killed_and_one_on_the_same_port_after_it() -> None:
    with publishing_process() as engine, listening(engine.source) as source:
        until_connected(source)
        engine.publish(store("ab"), ts=1.0)
        engine.publish(store("cd"), ts=1.0)
        until(source, "cd", PRESENT)
        engine.kill()
        until(source, "ab", UNKNOWN)
        with publishing_process(port=engine.port, replay_port=engine.replay_port) as successor:
            successor.publish(store("cd"), ts=2.0)
            until(source, "cd", PRESENT)
            until(source, "ab", ABSENT)
            assert source.listeners()[0].stream.restarts_total == 1


def test_without_replay_a_successor_is_known_by_its_first_batch() -> None:
    with publishing(replay=False) as engine, listening(engine.source) as source:
        until_connected(source)
        wait_until(lambda: engine.publish(store("ab")) and ask(source, "ab") == [PRESENT], "ab is heard of")
        port = engine.port
        engine.close()
        until(source, "ab", UNKNOWN)
        with publishing(port=port, replay=False) as successor:
            until_connected(source)
            payload = successor.publish(store("cd"), ts=99.0, lost=True)[1]
            wait_until(lambda: successor.send(0, payload) or ask(source, "cd") == [PRESENT], "cd is heard of")
            assert ask(source, "ab") == [ABSENT]


def test_an_engine_that_stops_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_events, "_HEARTBEAT_MS", 100)
    monkeypatch.setattr(vllm_events, "_SILENCE_MS", 500)
    with publishing_process() as engine, listening(engine.source) as source:
        until_connected(source)
        engine.publish(store("ab"))
        until(source, "ab", PRESENT)
        with stopped(engine.pid):
            until(source, "ab", UNKNOWN)
        until(source, "ab", PRESENT)


def test_a_subscriber_that_is_too_slow_loses_nothing_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_events, "_QUEUED_BATCHES", 5)
    monkeypatch.setattr(vllm_events, "_SETTLE_S", 1000.0)
    monkeypatch.setattr(vllm_events, "_CHECK_S", 1000.0)
    batches, long = 400, {"type": "Unheard", "padding": "x" * 50_000}  # far more than queues and TCP's buffers take
    with publishing(queue=5) as engine, listening(engine.source) as source:
        until_connected(source)
        engine.publish(store("ab"))
        until(source, "ab", PRESENT)
        table = source._listeners[0].table
        with table._lock:  # its thread can't go on
            engine.publish(remove("ab"))
            for _ in range(batches):
                engine.publish(long)
            done = threading.Event()
            engine._jobs.put(lambda publisher: done.set())
            assert done.wait(60)
        engine.publish(store("cd"))
        until(source, "cd", PRESENT)
        stream = source.listeners()[0].stream
        assert ask(source, "ab") == [ABSENT]
        assert stream.batches_total == batches + 3
        assert (stream.gaps_total > 0, stream.lost_total) == (True, 0)


def ports_in_a_row() -> int:
    """Two free ones."""
    while True:
        port = free_port()
        with socket.socket() as following:
            try:
                following.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port


def test_each_data_parallel_rank_is_listened_to() -> None:
    port, replay = ports_in_a_row(), ports_in_a_row()
    with (
        publishing(port=port, replay_port=replay) as one,
        publishing(port=port + 1, replay_port=replay + 1) as two,
        listening(one.source | {"dp_ranks": 2}) as source,
    ):
        until_connected(source, count=2)
        one.publish(store("ab"), store("cd"))
        two.publish(store("ab"), store("ef"))
        until(source, "cd", PRESENT)
        until(source, "ef", PRESENT)
        one.publish(remove("ab"), remove("cd"))
        until(source, "cd", ABSENT)  # the other rank never had it
        assert ask(source, "ab") == [PRESENT]
        two.publish(remove("ab"))
        until(source, "ab", ABSENT)


def test_what_one_engine_gave_up_is_unknown_while_another_may_have_it() -> None:
    with publishing() as one, publishing(replay=False) as two, listening(one.source, two.source) as source:
        until_connected(source, count=2)
        one.publish(store("ab"))
        until(source, "ab", PRESENT)
        one.publish(remove("ab"))
        until(source, "ab", UNKNOWN)
        wait_until(lambda: two.publish(CLEARED) and ask(source, "ab") == [ABSENT], "the other says that it has nothing")


def test_engines_of_another_model_dont_answer() -> None:
    with publishing() as engine, listening(engine.source | {"model": "n"}) as source:
        until_connected(source)
        engine.publish(store("ab"))
        until_complete(source)
        assert ask(source, "ab") == [UNKNOWN]


def test_a_store_of_rows_is_newer_than_an_absence() -> None:
    with publishing() as engine, listening(engine.source) as source:
        until_connected(source)
        engine.publish(store("ab"), remove("ab"))
        until(source, "ab", ABSENT)
        source.note_stored(names(tokens_of("ab")), "any")
        assert ask(source, "ab") == [UNKNOWN]


JUNK: list[list[bytes]] = [
    [b""],
    [b"", b"", b""],
    [b"", bytes(7), b""],
    [b"", bytes(8), b"", b""],
    [b"", (1).to_bytes(8, "big"), b"\xc1"],
    [b"", (1).to_bytes(8, "big"), b"\x91" * 5000],
    [b"", (1).to_bytes(8, "big"), b"\x93\x00\x91\x92\xabBlockStored\x01\xc0"],
]


@pytest.mark.parametrize("frames", JUNK)
def test_junk_costs_what_the_engine_has_no_better_replay_for(frames: list[bytes]) -> None:
    with publishing() as engine, listening(engine.source) as source:
        until_connected(source)
        engine.publish(store("ab"))
        until(source, "ab", PRESENT)
        published = frames[1:2] == [(1).to_bytes(8, "big")]
        if published:
            engine._number += 1
            engine._buffer.append((1, frames[2]))
        engine.send_frames(frames)
        engine.publish(store("cd"))
        until(source, "cd", PRESENT)
        assert ask(source, "ab") == [UNKNOWN if published else PRESENT]
        assert source.listeners()[0].stream.malformed_total == 1
        assert source.stats().gaps_total == published
        assert source.listeners()[0].connected


@pytest.mark.parametrize("replay", [True, False])
def test_a_message_that_is_too_large_makes_all_unknown_and_what_follows_counts(
    monkeypatch: pytest.MonkeyPatch, replay: bool
) -> None:
    monkeypatch.setattr(vllm_events, "_MAX_MESSAGE_BYTES", 10_000)
    monkeypatch.setattr(vllm_events, "_REPLAY_S", 0.3)
    with publishing(replay=replay) as engine, listening(engine.source) as source:
        until_connected(source)
        wait_until(lambda: engine.publish(store("ab")) and ask(source, "ab") == [PRESENT], "ab is heard of")
        engine.publish({"type": "Unheard", "padding": "x" * 20_000})
        until(source, "ab", UNKNOWN)
        wait_until(lambda: engine.publish(store("cd")) and ask(source, "cd") == [PRESENT], "cd is heard of")
        assert ask(source, "ab") == [UNKNOWN]


def test_an_engine_of_another_node_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    with listening({"endpoint": "tcp://192.0.2.1:5557"}, {"endpoint": f"tcp://127.0.0.1:{free_port()}"}):
        pass
    assert [record.getMessage() for record in caplog.records] == [
        "KV events: tcp://192.0.2.1:5557 is no loopback address, so on each node the KV of that one engine counts as "
        "the node's own"
    ]


def test_messages_of_another_topic_are_another_engines() -> None:
    with publishing(topic=b"kv") as engine, listening(engine.source | {"topic": "kv"}) as source:
        until_connected(source)
        engine.publish(store("ab"))
        until(source, "ab", PRESENT)
        engine.send_frames([b"kv2", (1).to_bytes(8, "big"), engine.publish(remove("ab"), lost=True)[1]])
        engine.publish(store("cd"))
        until(source, "cd", PRESENT)
    with publishing(topic=b"kv") as engine, listening(engine.source) as source:
        until_connected(source)
        engine.publish(store("ab"))
        until(source, "ab", PRESENT)


def test_a_replay_that_hangs_costs_no_more_than_presence(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(vllm_events, "_REPLAY_S", 0.3)
    with publishing() as engine, listening(engine.source) as source:
        until_connected(source)
        engine.publish(store("ab"))
        until(source, "ab", PRESENT)
        engine.answer(False)
        engine.publish(remove("ab"), lost=True)
        engine.publish(store("cd"))
        until(source, "cd", PRESENT)
        assert ask(source, "ab") == [UNKNOWN]
        wait_until(lambda: "doesn't replay" in caplog.text, "it is said")
        engine.answer(True)
        until(source, "ab", ABSENT)
        assert ask(source, "cd") == [PRESENT]
    assert caplog.text.count("doesn't replay") == 1


@pytest.mark.parametrize("why", ["hangs", "isn't there"])
def test_events_are_heard_while_a_replay_is_waited_for(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_events, "_REPLAY_S", 1000.0)
    nowhere = {"replay_endpoint": f"tcp://127.0.0.1:{free_port()}"} if why == "isn't there" else {}
    with publishing() as engine:
        engine.answer(False)
        with listening(engine.source | nowhere) as source:
            first = engine.publish(store("ab"), lost=True)
            wait_until(lambda: engine.send(*first) or ask(source, "ab") == [PRESENT], "ab is heard of")
            waited_for = source._listeners[0]._replay
            assert waited_for is not None
            engine.publish(remove("ab"))
            until(source, "ab", ABSENT)
            assert source._listeners[0]._replay is waited_for


def endless(first: int, step: int) -> Iterator[tuple[int, bytes]]:
    """Answers of a replay that never ends."""
    for number in itertools.count(first, step):
        yield number, encode([store("xy")], ts=-1.0)


@pytest.mark.parametrize(("step", "said"), [(0, "batch 0 where 1 or a later one was due"), (1, "no end within 0.5 s")])
def test_a_replay_that_never_ends_is_given_up(
    step: int, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(vllm_events, "_REPLAY_S", 0.2)
    monkeypatch.setattr(vllm_events, "_CATCH_UP_S", 0.5)
    answers: dict[bytes, Iterator[tuple[int, bytes]]] = {}
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router, publishing(replay=False) as engine:
        router.set(zmq.LINGER, 0)
        port = router.bind_to_random_port("tcp://127.0.0.1")

        def answer(payload: bytes) -> bool:
            if router.poll(1):
                client, _, start = router.recv_multipart()
                begun = [(0, payload)] if int.from_bytes(start, "big") == 0 else []
                answers.clear()
                answers[client] = itertools.chain(begun, endless(step and int.from_bytes(start, "big") + 1, step))
            for client, batches in answers.items():
                number, content = next(batches)
                router.send_multipart([client, b"", number.to_bytes(8, "big"), content])
            return True

        with listening(engine.source | {"replay_endpoint": f"tcp://127.0.0.1:{port}"}) as source:
            number, payload = engine.publish(store("ab"), lost=True)
            wait_until(
                lambda: answer(payload) and (engine.send(number, payload) or said in caplog.text), "it is given up"
            )
            engine.send(100_000_000, encode([store("cd")]))
            wait_until(lambda: answer(payload) and ask(source, "cd") == [PRESENT], "what follows counts")
            engine.send(100_000_001, encode([remove("cd")]))
            wait_until(lambda: answer(payload) and ask(source, "cd") == [ABSENT], "it is heard")


def test_an_engine_that_isnt_there() -> None:
    endpoint, replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    with listening({"endpoint": endpoint, "replay_endpoint": replay}) as source:
        assert ask(source, "ab") == [UNKNOWN]
        source.note_stored(names(tokens_of("ab")), "")
        stats = source.stats()
        assert (stats.present, stats.absent, stats.unlisted, stats.engines) == (0, 0, "unknown", ())
        began = time.monotonic()
    assert time.monotonic() - began < 2


def test_something_else_at_its_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with listening({"endpoint": f"tcp://127.0.0.1:{port}"}) as source:
            for _ in range(3):
                connection, _ = server.accept()
                with connection:
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 10)
                assert ask(source, "ab") == [UNKNOWN]
            assert all(listener.is_alive() for listener in source._listeners)


def test_an_error_of_our_own_costs_what_was_known_and_no_thread(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with publishing() as engine, listening(engine.source) as source:
        until_connected(source)
        engine.publish(store("ab"))
        until(source, "ab", PRESENT)
        with monkeypatch.context() as patch:
            patch.setattr(source._listeners[0].table, "apply", lambda batch: 1 // 0)
            engine.publish(remove("ab"))
            until(source, "ab", UNKNOWN)
            wait_until(lambda: "ZeroDivisionError" in caplog.text, "it is said")
        until(source, "ab", ABSENT)


def test_a_long_replay_that_overflows_on_its_way_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_events, "_QUEUED_BATCHES", 5)
    monkeypatch.setattr(vllm_events, "_PAUSE_S", 0.1)
    monkeypatch.setattr(vllm_events, "_SETTLE_S", 1000.0)
    long = {"type": "Unheard", "padding": "x" * 500_000}
    with publishing(replay_queue=5) as engine:
        engine.publish(store("ab"))
        for _ in range(40):
            engine.publish(long, lost=True)
        engine.publish(store("cd"), lost=True)
        with listening(engine.source) as source:
            until(source, "cd", PRESENT)
            assert ask(source, "ab") == [PRESENT]
            stream = source.listeners()[0].stream
            assert (stream.batches_total, stream.lost_total) == (42, 0)
            assert engine.replays > 1


def test_many_batches_in_a_row() -> None:
    with publishing() as engine:
        for i in range(3000):
            engine.publish(store(chr(300 + i) + "b"), lost=True)
        with listening(engine.source) as source:
            until(source, chr(300 + 2999) + "b", PRESENT)
            assert ask(source, chr(300) + "b") == [PRESENT]
            assert source.stats().present == 3000


def test_close_ends_threads_and_sockets_and_may_be_called_again() -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    with publishing() as engine:
        with listening(engine.source) as source:  # what pyzmq and the machine open once
            until_connected(source)
        before, threads = descriptors(), set(threading.enumerate())
        for _ in range(5):
            with listening(engine.source, {"endpoint": f"tcp://127.0.0.1:{free_port()}"}) as source:
                until_connected(source)
                source.close()
        assert set(threading.enumerate()) == threads
        wait_until(lambda: descriptors() <= before, "all sockets are closed")


def test_a_process_that_forgets_to_close_ends_all_the_same() -> None:
    code = (
        "from hs_cache.config import CacheConfig\n"
        "from hs_cache.integrations.vllm_events import VLLMEventsSource\n"
        f"events = [{{'endpoint': 'tcp://127.0.0.1:{free_port()}'}}]\n"
        "source = VLLMEventsSource(CacheConfig(kv_source='vllm_events', kv_events=events))\n"
        "print(list(source.presence(bytes(16), (), 1.0)))\n"
    )
    done = run_python(["-W", "error", "-c", code])
    assert (done.returncode, done.stdout.strip()) == (0, "[2]"), done.stderr
    assert done.stderr == ""


@pytest.mark.parametrize("missing", ["zmq", "msgspec"])
def test_without_its_packages_it_says_what_to_install(missing: str) -> None:
    code = (
        f"import sys; sys.modules[{missing!r}] = None\n"
        "from hs_cache.errors import ConfigError\n"
        "try:\n    import hs_cache.integrations.vllm_events\n"
        "except ConfigError as error:\n    print(error)\n"
    )
    done = run_python(["-c", code])
    assert "kv_source: got 'vllm_events'" in done.stdout, done.stderr
    assert "pip install 'hs-cache[vllm-events]'" in done.stdout


def test_it_needs_engines() -> None:
    with pytest.raises(ConfigError, match="kv_events"):
        VLLMEventsSource(CacheConfig())
