"""RetractionLog and who follows it: what was taken back never counts as present, whoever ends, stops or is slow."""

import contextlib
import gc
import mmap
import os
import pickle
import random
import select
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hs_cache.errors import PoolError
from hs_cache.keys import KEY_BYTES
from hs_cache.kv_log import CAPACITY, ConfirmedKV, Mark, RetractionLog, RetractionView
from hs_cache.kv_presence import KVIndex, Presence
from hs_cache.kv_reports import Report, ReportedKV
from hs_cache.messages import PoolAddress, ReportNumber, split_keys
from tests.processes import ROOT, kill, stopped
from tests.unit.test_kv_presence import blob
from tests.unit.test_shared_pool import make_pool, open_fds

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfd and /proc are Linux")


def names(letters: str) -> list[bytes]:
    return split_keys(blob(letters))


def numbered(first: int, count: int) -> list[bytes]:
    return [number.to_bytes(KEY_BYTES, "big") for number in range(first, first + count)]


def make_confirmed(log: RetractionLog, *, capacity: int = 100) -> ConfirmedKV:
    confirmed = ConfirmedKV(capacity)
    confirmed.follow(RetractionView(log.address))
    return confirmed


def confirm(confirmed: ConfirmedKV, letters: str) -> None:
    mark = confirmed.mark()
    assert mark is not None
    confirmed.confirm(names(letters), mark)


class Owner:
    """A process with a log, which does what it is told: a method's name and a blob of names in hex."""

    _SCRIPT = """
        import pickle, sys
        from hs_cache.kv_log import RetractionLog
        from hs_cache.messages import split_keys
        log = RetractionLog()
        print(pickle.dumps(log.address).hex(), flush=True)
        for line in sys.stdin:
            method, *names = line.split()
            getattr(log, method)(*(split_keys(bytes.fromhex(name)) for name in names))
            print("done", flush=True)
    """

    def __init__(self, script: str = _SCRIPT, *arguments: str) -> None:
        line = [sys.executable, "-c", textwrap.dedent(script), *arguments]
        self.process = subprocess.Popen(line, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.address: PoolAddress = pickle.loads(bytes.fromhex(self.answer()))

    @property
    def pid(self) -> int:
        return self.process.pid

    def answer(self) -> str:
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], 60)[0], "the owner does not answer"
        return self.process.stdout.readline()

    def tell(self, method: str, letters: str = "") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{method} {blob(letters).hex()}\n")
        self.process.stdin.flush()
        assert self.answer() == "done\n"


@contextlib.contextmanager
def run_owner(*arguments: str) -> Iterator[Owner]:
    owner = Owner(*arguments)
    try:
        yield owner
    finally:
        owner.process.kill()
        owner.process.communicate()


# The log


def since(log: RetractionLog, mark: Mark) -> set[bytes] | None:
    view = RetractionView(log.address)
    return view.since(mark.position) if mark.token == view.token else None


def test_what_was_taken_back_since_a_mark() -> None:
    log = RetractionLog()
    view = RetractionView(log.address)
    first = log.mark()
    assert since(log, first) == view.since(first.position) == set()
    log.retract(names("ab"))
    second = log.mark()
    log.retract(names("ca"))
    log.retract([])
    assert since(log, first) == view.since(first.position) == set(names("abc"))
    assert since(log, second) == view.since(second.position) == set(names("ac"))
    assert view.position == log.mark().position == second.position + 2


def test_a_mark_of_another_log_says_nothing() -> None:
    log, other = RetractionLog(), RetractionLog()
    assert log.token != other.token
    assert since(log, other.mark()) is None


def test_a_position_that_was_never_reached_says_nothing() -> None:
    log = RetractionLog()
    log.retract(names("ab"))
    ahead = log.mark().position + 1
    assert since(log, Mark(log.token, ahead)) is RetractionView(log.address).since(ahead) is None
    assert since(log, Mark(log.token, -CAPACITY)) is None


@pytest.mark.parametrize("behind", [CAPACITY - 1, CAPACITY, CAPACITY + 1, 2 * CAPACITY, 5 * CAPACITY])
def test_who_is_too_far_behind_takes_all_as_taken_back(behind: int) -> None:
    log = RetractionLog()
    view = RetractionView(log.address)
    log.retract(names("xyz"))
    mark = log.mark()
    for first in range(0, behind, 1000):
        log.retract(numbered(first, min(1000, behind - first)))
    expected = set(numbered(0, behind)) if behind <= CAPACITY else None
    assert since(log, mark) == view.since(mark.position) == expected
    assert view.since(log.mark().position - 5) == set(numbered(behind - 5, 5))


@pytest.mark.parametrize("count", [CAPACITY - 1, CAPACITY, CAPACITY + 1, 3 * CAPACITY])
def test_very_many_names_at_once_are_all_names(count: int) -> None:
    log = RetractionLog()
    before = log.mark()
    log.retract(numbered(0, count))
    assert since(log, before) == (set(numbered(0, count)) if count <= CAPACITY else None)
    after = log.mark()
    log.retract(names("a"))
    assert since(log, after) == set(names("a"))


def test_all_can_be_taken_back() -> None:
    log = RetractionLog()
    log.retract(names("a"))
    before = log.mark()
    log.retract_all()
    assert since(log, before) is None
    after = log.mark()
    assert since(log, after) == set()
    log.retract(names("b"))
    assert since(log, after) == set(names("b"))
    assert since(log, before) is None


def test_writers_do_not_overwrite_each_other() -> None:
    log = RetractionLog()
    mark = log.mark()

    def write(first: int) -> None:
        for number in range(first, first + 500):
            log.retract(numbered(number, 1))

    run_threads(lambda: write(0), lambda: write(1000), lambda: write(2000))
    assert since(log, mark) == {*numbered(0, 500), *numbered(1000, 500), *numbered(2000, 500)}


# Opening it


def test_what_is_not_that_log_is_refused(tmp_path: Path) -> None:
    log = RetractionLog()
    good = log.address
    pool = make_pool()
    with (tmp_path / "plain").open("w+b") as plain, run_owner() as owner:
        plain.truncate(1 << 20)
        elsewhere = [
            replace(good, fd=plain.fileno()),
            replace(good, fd=pool.address.fd),
            replace(good, fd=RetractionLog().address.fd),
            replace(good, pid=owner.pid),
            replace(good, pid=owner.pid, fd=owner.address.fd),
            replace(owner.address, pid=os.getpid()),
            replace(good, incarnation=pool.incarnation),
            replace(good, incarnation=b"short"),
            replace(good, fd=1 << 30),
            replace(good, pid=1 << 30),
        ]
        gc.collect()
        before = open_fds()
        for address in elsewhere:
            with pytest.raises(PoolError, match=r"memfd|cannot open|header|bytes"):
                RetractionView(address)
        gc.collect()
        assert open_fds() == before
        gone = owner.address
    with pytest.raises(PoolError, match=f"cannot open the pool of process {gone.pid}"):
        RetractionView(gone)
    assert RetractionView(good).position == 0
    pool.close()


def test_no_file_descriptor_is_left_open() -> None:
    kept = RetractionLog()

    def use_another() -> None:
        log = RetractionLog()
        view = RetractionView(log.address)
        view.since(view.position)

    gc.collect()
    before = open_fds()
    for _ in range(200):
        RetractionView(kept.address)
        use_another()
    gc.collect()
    assert open_fds() == before


def test_a_view_outlives_the_log() -> None:
    log = RetractionLog()
    view = RetractionView(log.address)
    log.retract(names("a"))
    del log
    gc.collect()
    assert view.since(0) == set(names("a"))


# Who remembers what is present


def test_nothing_is_confirmed_without_a_log() -> None:
    confirmed = ConfirmedKV(10)
    log = RetractionLog()
    assert confirmed.mark() is None
    assert not confirmed.follows()
    confirmed.confirm(names("a"), log.mark())
    assert not confirmed.has(names("a"))
    assert not confirmed.has([])


def test_what_was_confirmed_holds_until_it_is_taken_back() -> None:
    log = RetractionLog()
    confirmed = make_confirmed(log)
    assert confirmed.follows()
    assert confirmed.mark() == log.mark()
    confirm(confirmed, "abc")
    assert confirmed.has(names("abc"))
    assert confirmed.has([])
    assert not confirmed.has(names("abcd"))
    log.retract(names("bx"))
    assert not confirmed.has(names("abc"))
    assert not confirmed.has(names("b"))
    assert confirmed.has(names("ac"))
    confirm(confirmed, "b")
    assert confirmed.has(names("abc"))
    log.retract_all()
    assert not any(confirmed.has([name]) for name in names("abc"))
    confirm(confirmed, "a")
    assert confirmed.has(names("a"))


@pytest.mark.parametrize("caught_up", [False, True])
def test_a_mark_from_before_it_was_taken_back_confirms_nothing(caught_up: bool) -> None:
    log = RetractionLog()
    confirmed = make_confirmed(log)
    mark = log.mark()
    log.retract(names("a"))
    assert not caught_up or not confirmed.has(names("a"))
    confirmed.confirm(names("ab"), mark)
    assert not confirmed.has(names("a"))
    assert confirmed.has(names("b"))
    log.retract_all()
    assert not caught_up or not confirmed.has(names("a"))
    confirmed.confirm(names("ab"), mark)
    assert not confirmed.has(names("a")) and not confirmed.has(names("b"))


def test_a_mark_of_another_log_confirms_nothing() -> None:
    log, other = RetractionLog(), RetractionLog()
    confirmed = make_confirmed(log)
    confirmed.confirm(names("a"), other.mark())
    confirmed.confirm(names("a"), Mark(log.token, log.mark().position + 1))
    assert not confirmed.has(names("a"))
    confirm(confirmed, "b")
    late = confirmed.mark()
    assert late is not None
    confirmed.follow(RetractionView(other.address))
    confirmed.confirm(names("a"), late)
    assert not confirmed.has(names("a")) and not confirmed.has(names("b"))
    assert confirmed.mark() == other.mark()


@pytest.mark.parametrize("count", [CAPACITY, CAPACITY + 1])
def test_who_lags_behind_the_ring_has_nothing_confirmed(count: int) -> None:
    log = RetractionLog()
    confirmed = make_confirmed(log)
    confirm(confirmed, "ab")
    for first in range(0, count, 100):
        log.retract(numbered(first, min(100, count - first)))
    assert confirmed.has(names("ab")) is (count <= CAPACITY)
    confirm(confirmed, "a")
    assert confirmed.has(names("a"))


def test_beyond_the_capacity_those_confirmed_first_are_asked_for_again() -> None:
    confirmed = make_confirmed(RetractionLog(), capacity=4)
    confirm(confirmed, "abcd")
    assert confirmed.has(names("abcd"))
    confirm(confirmed, "e")
    assert [confirmed.has([name]) for name in names("abcde")] == [False, True, True, True, True]
    confirm(confirmed, "pqrstu")
    assert [confirmed.has([name]) for name in names("epqrstu")] == [False, False, False, True, True, True, True]


def test_an_owner_that_is_stopped_counts_for_nothing_until_it_goes_on() -> None:
    with run_owner() as owner:
        confirmed = ConfirmedKV(10)
        confirmed.follow(RetractionView(owner.address))
        confirm(confirmed, "ab")
        mark = confirmed.mark()
        assert mark is not None
        with stopped(owner.pid):
            assert confirmed.mark() is None
            assert not confirmed.has(names("a"))
            assert confirmed.follows(), "it is still there"
            confirmed.confirm(names("c"), mark)
        assert confirmed.has(names("ab"))
        assert not confirmed.has(names("c"))
        assert confirmed.mark() == mark
        owner.tell("retract", "a")
        assert not confirmed.has(names("a"))
        assert confirmed.has(names("b"))
        owner.tell("retract_all")
        assert not confirmed.has(names("b"))


def test_an_owner_that_is_killed_counts_for_nothing() -> None:
    with run_owner() as first, run_owner() as second:
        confirmed = ConfirmedKV(10)
        view = RetractionView(first.address)
        confirmed.follow(view)
        confirm(confirmed, "ab")
        mark = confirmed.mark()
        assert mark is not None and confirmed.has(names("ab"))
        assert view.runs() and not view.ended()
        kill(first.pid)
        assert view.ended() and not view.runs()
        assert not confirmed.follows()
        assert confirmed.mark() is None
        assert not confirmed.has(names("a"))
        confirmed.confirm(names("a"), mark)
        assert not confirmed.has(names("a"))

        confirmed.follow(RetractionView(second.address))
        assert confirmed.follows()
        confirmed.confirm(names("a"), mark)
        assert not confirmed.has(names("a"))
        confirm(confirmed, "a")
        assert confirmed.has(names("a"))
        second.tell("retract", "a")
        assert not confirmed.has(names("a"))


# Both at the same time


def run_threads(*functions: Callable[[], Any]) -> None:
    """Run them at the same time; raises what any of them raised."""
    errors: list[BaseException] = []

    def run(function: Callable[[], Any]) -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


_WRITER = """
    import mmap, pickle, random, sys, threading
    from hs_cache.kv_log import RetractionLog
    from tests.unit.test_kv_log import Truth, evict_and_store
    with open(sys.argv[1], "r+b") as file:
        truth = Truth(mmap.mmap(file.fileno(), 0))
    log = RetractionLog()
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    print(pickle.dumps(log.address).hex(), flush=True)
    evict_and_store(log, truth, ended.is_set)
"""


class Truth:
    """Whether chunks are present, in memory that one thread or process writes and others read.

    Each chunk has a number that grows with each change, odd while it is absent; and that number once more, as far as
    others have been told.
    """

    CHUNKS = 6
    NBYTES = 2 * CHUNKS * 8

    def __init__(self, memory: Any) -> None:
        words = memoryview(memory).cast("Q")
        self.now, self.told = words[: self.CHUNKS], words[self.CHUNKS :]

    @staticmethod
    def name(chunk: int) -> bytes:
        return chunk.to_bytes(KEY_BYTES, "big")


def evict_and_store(log: RetractionLog, truth: Truth, ended: Callable[[], bool]) -> None:
    """Take chunks back and bring them again, at random, as a KV actor does; now and then all."""
    chance = random.Random(7)
    chunks: Sequence[int] = []
    everything = False

    def change() -> None:
        for chunk in chunks:
            truth.now[chunk] += 1

    def retract() -> None:
        log.retract_all() if everything else log.retract([truth.name(chunk) for chunk in chunks])

    def tell() -> None:
        for chunk in chunks:
            truth.told[chunk] = truth.now[chunk]

    while not ended():
        everything = chance.random() < 0.02
        chunks = range(truth.CHUNKS) if everything else chance.sample(range(truth.CHUNKS), chance.randint(1, 2))
        for step in (change, retract, tell, change):
            step()
            for _ in range(chance.randint(0, 3000)):  # readers have some calls in between
                pass


def read_and_confirm(confirmed: ConfirmedKV, truth: Truth, seed: int) -> None:
    """Ask for chunks and confirm them, until each kind of answer was met often.

    `AssertionError` for one that is called present while it was absent from before the call until after it.
    """
    chance = random.Random(seed)
    present = absent = 0
    deadline = iter(range(200_000))
    while present < 300 or absent < 300:
        assert next(deadline, None) is not None, f"{present} times present, {absent} times absent"
        chunk = chance.randrange(truth.CHUNKS)
        name = truth.name(chunk)
        told = truth.told[chunk]
        found = confirmed.has([name])
        if told % 2 and told == truth.now[chunk]:
            assert not found, f"chunk {chunk} is called present, and was taken back before change {told}"
            absent += 1
        present += found
        mark = confirmed.mark()
        if mark is not None and truth.now[chunk] % 2 == 0:
            confirmed.confirm([name], mark)


@pytest.fixture
def fast_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def test_what_is_absent_is_never_called_present_between_threads(fast_switches: None) -> None:
    log, truth, ended = RetractionLog(), Truth(bytearray(Truth.NBYTES)), threading.Event()
    confirmed = make_confirmed(log)

    def read() -> None:
        try:
            run_threads(*(lambda seed=seed: read_and_confirm(confirmed, truth, seed) for seed in range(3)))
        finally:
            ended.set()

    run_threads(read, lambda: evict_and_store(log, truth, ended.is_set))


def test_what_is_absent_is_never_called_present_between_processes(tmp_path: Path, fast_switches: None) -> None:
    path = tmp_path / "truth"
    path.write_bytes(bytes(Truth.NBYTES))
    with path.open("r+b") as file:
        truth = Truth(mmap.mmap(file.fileno(), 0))
    with run_owner(_WRITER, str(path)) as owner:
        confirmed = ConfirmedKV(10)
        confirmed.follow(RetractionView(owner.address))
        run_threads(*(lambda seed=seed: read_and_confirm(confirmed, truth, seed) for seed in range(3)))


def test_names_are_whole_while_the_ring_is_written_round_and_round(fast_switches: None) -> None:
    log, ended = RetractionLog(), threading.Event()
    view = RetractionView(log.address)
    rounds = 2 * CAPACITY // 64 * 3

    def write() -> None:
        number = 0
        for _ in range(rounds):
            log.retract(numbered(number, 64))
            number += 64
        ended.set()

    def read() -> None:
        position = 0
        while not ended.is_set():
            found = view.since(position)
            if found is not None:
                seen = sorted(int.from_bytes(name, "big") for name in found)
                assert seen == list(range(position, position + len(seen)))
            position = view.position - random.randrange(200) if found is None else position + len(found) // 2
            position = max(position, 0)

    run_threads(write, read)


# What an index says in it


def taken_back(log: RetractionLog, change: Callable[[], Any]) -> set[bytes] | None:
    mark = log.mark()
    change()
    return since(log, mark)


@pytest.mark.parametrize("store_implies_present", [True, False])
def test_an_index_logs_whatever_may_have_been_present(store_implies_present: bool) -> None:
    log = RetractionLog()
    index = KVIndex(4, store_implies_present=store_implies_present, log=log)
    assert taken_back(log, lambda: index.report_stored(blob("abcd"))) == set()
    assert taken_back(log, lambda: index.presence(blob("qd"))) == set()
    assert taken_back(log, lambda: index.report_evicted(blob("ax"))) == set(names("axb")), "b is the fifth"
    assert taken_back(log, lambda: index.report_stored(blob("yz"))) == set(names("cd")), "forgotten"
    assert taken_back(log, lambda: index.note_stored(blob("y"))) == set()
    unsure = set() if store_implies_present else set(names("b"))
    assert taken_back(log, lambda: index.note_stored(blob("b"))) - set(names("a")) == unsure  # type: ignore[operator]
    assert taken_back(log, lambda: index.resync(blob("yz"))) is None
    assert taken_back(log, index.forget) is None


def test_an_index_that_forgets_very_many_at_once_takes_all_back() -> None:
    log = RetractionLog()
    index = KVIndex(2 * CAPACITY, store_implies_present=True, log=log)
    index.report_stored(b"".join(numbered(0, 2 * CAPACITY)))
    assert taken_back(log, lambda: index.note_stored(b"".join(numbered(10**6, CAPACITY + 1)))) is None


def test_reports_are_in_the_log_when_they_return() -> None:
    log = RetractionLog()
    reported = ReportedKV(10, log=log)

    def report(what: Report, letters: str, number: int) -> set[bytes] | None:
        return taken_back(log, lambda: reported.report(what, blob(letters), "one", ReportNumber(b"sender", number)))

    assert taken_back(log, lambda: reported.note_stored(blob("abc"), "two")) == set()
    assert report(Report.STORED, "abc", 0) == set()
    assert report(Report.EVICTED, "a", 1) == set(names("a")), "two still has it, and will say so"
    assert report(Report.RESYNC, "bc", 2) is None
    assert report(Report.STORED, "d", 4) is None, "a gap"
    assert report(Report.STORED, "d", 3) is None, "what comes late"
    assert report(Report.STORED, "e", 5) == set()


def test_an_engine_that_is_forgotten_takes_all_back() -> None:
    log = RetractionLog()
    reported = ReportedKV(10, log=log)
    reported.note_stored(blob("a"), "gone")
    for number in range(63):
        assert taken_back(log, lambda: reported.note_stored(blob("b"), str(number))) == set()  # noqa: B023
    assert taken_back(log, lambda: reported.note_stored(blob("b"), "one too many")) is None
    assert list(reported.presence(blob("a"))) == [Presence.UNKNOWN]


_LETTERS = "abcdefg"
_ENGINES = ("one", "two")
_OPERATIONS = st.tuples(
    st.sampled_from(["note", "ask", *Report]),
    st.text(_LETTERS, max_size=5),
    st.sampled_from(_ENGINES),
    st.sampled_from([None, 0, 0, 0, 1]),  # without a number; the next one; one is missing
)


@settings(deadline=None)
@given(st.lists(_OPERATIONS, max_size=40), st.integers(1, 8))
def test_what_is_confirmed_is_what_would_be_said_again(operations: Sequence[Any], capacity: int) -> None:
    log = RetractionLog()
    reported, confirmed = ReportedKV(capacity, log=log), make_confirmed(log)
    numbers = dict.fromkeys(_ENGINES, 0)
    for what, letters, engine, skipped in operations:
        mark = log.mark()
        if what == "ask":
            states = zip(names(_LETTERS), reported.presence(blob(_LETTERS)), strict=True)
            confirmed.confirm([name for name, state in states if state == Presence.PRESENT], mark)
        elif what == "note":
            reported.note_stored(blob(letters), engine)
        else:
            number = None if skipped is None else ReportNumber(b"sender", numbers[engine] + skipped)
            numbers[engine] += 0 if skipped is None else 1 + skipped
            reported.report(what, blob(letters), engine, number)
        wrong = {name for name in names(_LETTERS) if confirmed.has([name])}
        wrong -= {name for name in wrong if reported.presence(name) == bytes([Presence.PRESENT])}
        assert not wrong
