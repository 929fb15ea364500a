"""KVSide: a KV side that hangs, raises or talks nonsense costs answers, and for a moment only; never threads."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from hs_cache import kv_side
from hs_cache.keys import KVNames
from hs_cache.kv_presence import KVPresence, Presence
from hs_cache.kv_side import KVSide
from tests.direct import Clock, poll

ABSENT, PRESENT, UNKNOWN = Presence.ABSENT, Presence.PRESENT, Presence.UNKNOWN
KEYS = [bytes([letter]) * 16 for letter in b"abc"]
NAMES = KVNames(b"".join(KEYS))
LOCAL = [True] * len(KEYS)


class ScriptedKV:
    """Answers as `answer` does; keeps what it was asked, and how long it was to wait for notes."""

    def __init__(self, answer: Callable[[bytes, float], Any]) -> None:
        self.answer = answer
        self.settle: Callable[[float], bool] = lambda timeout_s: True
        self.asked: list[bytes] = []
        self.noted: list[bytes] = []
        self.waits: list[float] = []

    def known(self, names: KVNames) -> bool:
        return False

    def presence(self, names: KVNames, timeout_s: float) -> Sequence[int]:
        self.asked.append(names.blob)
        answer: Sequence[int] = self.answer(names.blob, timeout_s)
        return answer

    def note_stored(self, names: bytes, engine: str) -> None:
        self.noted.append(names)

    def settle_notes(self, timeout_s: float) -> bool:
        self.waits.append(timeout_s)
        return self.settle(timeout_s)


def all_present(keys: bytes, timeout_s: float) -> bytes:
    return bytes([PRESENT]) * (len(keys) // 16)


def make_side(kv: KVPresence | None) -> KVSide:
    return KVSide(kv, node_id="test-node")


def ask(side: KVSide, timeout_s: float = 1.0) -> list[int]:
    return side.ask(NAMES, LOCAL, timeout_s)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(kv_side, "time", clock)
    return clock


def test_without_a_kv_side_everything_is_present() -> None:
    side = make_side(None)
    assert ask(side) == [PRESENT] * 3
    side.note_stored(b"".join(KEYS), "")
    side.settle_notes(1.0)


def test_only_chunks_whose_kv_is_here_are_asked_for_in_order() -> None:
    kv = ScriptedKV(lambda keys, timeout_s: bytes([ABSENT, UNKNOWN]))
    assert make_side(kv).ask(NAMES, [True, False, True], 1.0) == [ABSENT, PRESENT, UNKNOWN]
    assert kv.asked == [KEYS[0] + KEYS[2]]


def test_nothing_is_asked_where_no_chunk_has_its_kv_here() -> None:
    kv = ScriptedKV(all_present)
    assert make_side(kv).ask(NAMES, [False] * 3, 1.0) == [PRESENT] * 3
    assert make_side(kv).ask(KVNames(b""), [], 1.0) == []
    assert kv.asked == []


def test_without_names_it_is_unknown_and_not_asked_for() -> None:
    kv = ScriptedKV(all_present)
    assert make_side(kv).ask(None, [True, False, True], 1.0) == [UNKNOWN, PRESENT, UNKNOWN]
    assert kv.asked == []
    assert make_side(None).ask(None, [True], 1.0) == [PRESENT]


def test_notes_are_passed_on_and_waited_for() -> None:
    kv = ScriptedKV(all_present)
    side = make_side(kv)
    side.note_stored(KEYS[0], "")
    side.settle_notes(0.7)
    assert (kv.noted, kv.waits) == ([KEYS[0]], [0.7])


def test_the_rest_of_the_time_is_passed_on() -> None:
    given: list[float] = []

    def answer(keys: bytes, timeout_s: float) -> bytes:
        given.append(timeout_s)
        return all_present(keys, timeout_s)

    assert ask(make_side(ScriptedKV(answer)), 0.4) == [PRESENT] * 3
    assert given == [0.4]


@pytest.mark.parametrize(
    "answer",
    [b"", b"\1\1", b"\1\1\1\1", b"\1\1\3", [1, 1, None], None, "111", 3],
    ids=["none", "too few", "too many", "no presence", "no number", "None", "text", "an int"],
)
def test_a_wrong_answer_is_unknown_for_every_chunk(answer: Any) -> None:
    kv = ScriptedKV(lambda keys, timeout_s: answer)
    side = make_side(kv)
    assert ask(side) == [UNKNOWN] * 3
    assert side.ask(NAMES, [False, True, False], 1.0) == [PRESENT, UNKNOWN, PRESENT]
    kv.answer = all_present
    assert ask(side) == [PRESENT] * 3, "what came at once and was wrong keeps nobody from asking again"


def test_a_kv_side_that_hangs_holds_sixteen_calls_and_no_more() -> None:
    entered, go_on = threading.Semaphore(0), threading.Event()

    def hang(keys: bytes, timeout_s: float) -> bytes:
        entered.release()
        assert go_on.wait(30)
        return all_present(keys, timeout_s)

    kv = ScriptedKV(hang)
    side = make_side(kv)
    answers: list[list[int]] = []
    waiting = [threading.Thread(target=lambda: answers.append(ask(side, 60)), daemon=True) for _ in range(16)]
    for thread in waiting:
        thread.start()
    try:
        assert all(entered.acquire(timeout=20) for _ in waiting)
        others: list[list[int]] = []
        more = [threading.Thread(target=lambda: others.append(ask(side, 60)), daemon=True) for _ in range(24)]
        begin = time.monotonic()
        for thread in more:
            thread.start()
        for thread in more:
            thread.join(10)
        assert time.monotonic() - begin < 5, "they wait for their turn some 50 ms, not for the KV side"
        assert others == [[UNKNOWN] * 3] * 24
        assert answers == []
        assert len(kv.asked) == 16
    finally:
        go_on.set()
    for thread in waiting:
        thread.join(20)
    assert answers == [[PRESENT] * 3] * 16
    assert ask(side) == [PRESENT] * 3


def test_a_turn_that_becomes_free_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_side, "_TURN_S", 30)
    entered, go_on = threading.Semaphore(0), threading.Event()

    def answer(keys: bytes, timeout_s: float) -> bytes:
        entered.release()
        assert go_on.wait(30)
        return all_present(keys, timeout_s)

    side = make_side(ScriptedKV(answer))
    answers: list[list[int]] = []
    threads = [threading.Thread(target=lambda: answers.append(ask(side, 60)), daemon=True) for _ in range(17)]
    for thread in threads[:16]:
        thread.start()
    try:
        assert all(entered.acquire(timeout=20) for _ in threads[:16])
        threads[16].start()
        threads[16].join(0.2)
        assert answers == [], "the last one waits"
    finally:
        go_on.set()
    for thread in threads:
        thread.join(20)
    assert answers == [[PRESENT] * 3] * 17


@pytest.mark.parametrize("failure", [TimeoutError("no answer"), None])
def test_failures_give_their_turns_back(failure: Exception | None) -> None:
    def fail(keys: bytes, timeout_s: float) -> None:
        if failure is not None:
            raise failure

    kv = ScriptedKV(fail)
    side = make_side(kv)
    for _ in range(50):
        assert ask(side) == [UNKNOWN] * 3
    kv.answer = all_present
    assert ask(side) == [PRESENT] * 3
    assert len(kv.asked) == 51


def test_a_turn_comes_back_also_from_what_is_no_error() -> None:
    def interrupt(keys: bytes, timeout_s: float) -> None:
        raise KeyboardInterrupt

    kv = ScriptedKV(interrupt)
    side = make_side(kv)
    for _ in range(20):
        with pytest.raises(KeyboardInterrupt):
            ask(side)
    kv.answer = all_present
    assert ask(side) == [PRESENT] * 3


def test_after_a_long_failure_it_is_left_alone_for_a_second_and_then_asked_again(clock: Clock) -> None:
    def time_out(keys: bytes, timeout_s: float) -> None:
        clock.advance(timeout_s)
        raise TimeoutError("no answer")

    kv = ScriptedKV(time_out)
    side = make_side(kv)
    side.settle_notes(0.8)
    assert ask(side, 1.6) == [UNKNOWN] * 3
    assert ask(side, 1.6) == [UNKNOWN] * 3
    side.settle_notes(0.8)
    clock.advance(0.99)
    assert ask(side, 1.6) == [UNKNOWN] * 3
    side.settle_notes(0.8)
    assert len(kv.asked) == 1
    assert kv.waits == [0.8, 0.0, 0.0], "nor is it waited for at a commit"

    clock.advance(0.02)
    side.settle_notes(0.8)
    assert kv.waits[-1] == 0.8
    assert ask(side, 1.6) == [UNKNOWN] * 3
    assert len(kv.asked) == 2
    side.settle_notes(0.8)
    assert kv.waits[-1] == 0.0, "quiet again after it has failed again"

    clock.advance(1.01)
    kv.answer = all_present
    assert ask(side, 1.6) == [PRESENT] * 3
    side.settle_notes(0.8)
    assert kv.waits[-1] == 0.8


def test_commits_that_wait_in_vain_count_as_failures_too(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    def never(timeout_s: float) -> bool:
        clock.advance(timeout_s)
        return not timeout_s

    kv = ScriptedKV(all_present)
    kv.settle = never
    side = make_side(kv)
    with caplog.at_level(logging.WARNING, logger="hs_cache"):
        for _ in range(3):
            side.settle_notes(0.8)
    assert kv.waits == [0.8, 0.0, 0.0]
    assert ask(side) == [UNKNOWN] * 3
    assert len(caplog.records) == 1
    clock.advance(1.01)
    assert ask(side) == [PRESENT] * 3
    side.settle_notes(0.8)
    assert kv.waits[-1] == 0.8


def test_only_so_many_commits_wait_at_a_time() -> None:
    enough = threading.Event()
    kv = ScriptedKV(all_present)
    kv.settle = lambda timeout_s: not timeout_s or enough.wait(20)
    side = make_side(kv)
    threads = [threading.Thread(target=side.settle_notes, args=(20.0,)) for _ in range(40)]
    for thread in threads:
        thread.start()
    try:
        poll(lambda: sum(not thread.is_alive() for thread in threads) == 40 - kv_side._MAX_WAITING, "the others go on")
        assert ask(side) == [UNKNOWN] * 3
    finally:
        enough.set()
        for thread in threads:
            thread.join()
    assert ask(side) == [PRESENT] * 3


def test_after_an_immediate_failure_it_is_asked_again_at_once(clock: Clock) -> None:
    def refuse(keys: bytes, timeout_s: float) -> None:
        clock.advance(0.1)
        raise ConnectionError("the actor is dead")

    kv = ScriptedKV(refuse)
    side = make_side(kv)
    assert ask(side, 1.6) == [UNKNOWN] * 3
    side.settle_notes(0.8)
    assert kv.waits == [0.8]
    kv.answer = all_present
    assert ask(side, 1.6) == [PRESENT] * 3
    assert len(kv.asked) == 2


def test_a_slow_but_right_answer_counts(clock: Clock) -> None:
    def slowly(keys: bytes, timeout_s: float) -> bytes:
        clock.advance(0.9 * timeout_s)
        return all_present(keys, timeout_s)

    kv = ScriptedKV(slowly)
    side = make_side(kv)
    assert ask(side) == ask(side) == [PRESENT] * 3
    side.settle_notes(0.8)
    assert (len(kv.asked), kv.waits) == (2, [0.8])


def test_an_outage_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    def fail(keys: bytes, timeout_s: float) -> None:
        raise RuntimeError("out of order")

    kv = ScriptedKV(fail)
    side = make_side(kv)
    with caplog.at_level(logging.DEBUG, logger="hs_cache"):
        for outage in (1, 2):
            kv.answer = fail
            for _ in range(3):
                assert ask(side) == [UNKNOWN] * 3
            assert [record.levelname for record in caplog.records] == ["WARNING"] * outage
            kv.answer = all_present
            assert ask(side) == [PRESENT] * 3
    assert "test-node" in caplog.text
    assert "RuntimeError: out of order" in caplog.text
