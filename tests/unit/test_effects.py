"""Work: memory is given up when its copy surely touches nothing any more, exactly once; a copy not begun never is."""

import contextlib
import random
import sys
import threading

import pytest

from hs_cache.effects import Work


def test_abandoned_before_it_runs_it_never_does() -> None:
    events: list[str] = []
    work = Work(lambda: events.append("copied"))
    work.abandon(lambda: events.append("given up"))
    work.run()
    assert events == ["given up"]


def test_abandoned_after_it_ran_it_is_given_up_at_once() -> None:
    events: list[str] = []
    work = Work(lambda: events.append("copied"))
    work.run()
    work.abandon(lambda: events.append("given up"))
    assert events == ["copied", "given up"]


@pytest.mark.parametrize("fails", [False, True])
def test_abandoned_while_it_runs_it_is_given_up_behind_its_last_byte(fails: bool) -> None:
    started, go_on = threading.Event(), threading.Event()
    events: list[str] = []

    def copy() -> None:
        started.set()
        assert go_on.wait(20)
        events.append("copied")
        if fails:
            raise MemoryError

    def run() -> None:
        try:
            work.run()
        except MemoryError:
            events.append("failed")

    work = Work(copy)
    thread = threading.Thread(target=run)
    thread.start()
    assert started.wait(20)
    work.abandon(lambda: events.append("given up"))
    assert events == [], "the copy is still running"
    go_on.set()
    thread.join(20)
    assert events == (["copied", "given up", "failed"] if fails else ["copied", "given up"])


def test_what_the_copy_raises_reaches_who_runs_it() -> None:
    def copy() -> None:
        raise MemoryError("nothing left")

    work = Work(copy)
    with pytest.raises(MemoryError, match="nothing left"):
        work.run()
    given_up: list[None] = []
    work.abandon(lambda: given_up.append(None))
    assert given_up == [None]


def test_revoked_before_it_runs_it_never_does() -> None:
    events: list[str] = []
    work = Work(lambda: events.append("copied"))
    assert work.revoke()
    work.run()
    assert work.revoke(), "as often as one asks"
    assert events == []
    work.abandon(lambda: events.append("given up"))
    assert events == ["given up"]
    work.run()
    assert events == ["given up"]


def test_what_was_abandoned_is_revoked_too() -> None:
    work = Work(lambda: None)
    work.abandon(lambda: None)
    assert work.revoke()


@pytest.mark.parametrize("fails", [False, True])
def test_while_it_runs_and_afterwards_it_cannot_be_revoked(fails: bool) -> None:
    started, go_on = threading.Event(), threading.Event()
    events: list[str] = []

    def copy() -> None:
        started.set()
        assert go_on.wait(20)
        events.append("copied")
        if fails:
            raise MemoryError

    def run() -> None:
        with contextlib.suppress(MemoryError):
            work.run()

    work = Work(copy)
    thread = threading.Thread(target=run)
    thread.start()
    assert started.wait(20)
    assert not work.revoke()
    work.abandon(lambda: events.append("given up"))
    assert not work.revoke()
    assert events == [], "revoking has not passed it off as ended"
    go_on.set()
    thread.join(20)
    assert events == ["copied", "given up"]
    assert not work.revoke()


def test_revoked_after_it_ran_it_is_given_up_at_once() -> None:
    events: list[str] = []
    work = Work(lambda: events.append("copied"))
    work.run()
    assert not work.revoke()
    work.abandon(lambda: events.append("given up"))
    assert events == ["copied", "given up"]


def test_whenever_it_is_revoked_it_either_ran_or_never_will() -> None:
    shuffled = random.Random(0)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for _ in range(400):
            copied: list[None] = []
            work = Work(lambda copied=copied: copied.append(None))  # type: ignore[misc]
            barrier = threading.Barrier(2)

            def run(
                work: Work = work, barrier: threading.Barrier = barrier, spins: int = shuffled.randrange(2)
            ) -> None:
                barrier.wait(20)
                for _ in range(spins * 2000):
                    pass
                work.run()

            thread = threading.Thread(target=run)
            thread.start()
            barrier.wait(20)
            for _ in range(shuffled.randrange(4000)):
                pass
            revoked = work.revoke()
            thread.join(20)
            assert revoked is not bool(copied)
    finally:
        sys.setswitchinterval(interval)


def test_whenever_it_is_abandoned_it_is_given_up_once_and_not_under_the_copy() -> None:
    shuffled = random.Random(0)
    for _ in range(400):
        memory = bytearray(1)
        wrong: list[str] = []
        given_up: list[None] = []

        def copy(memory: bytearray = memory, wrong: list[str] = wrong, given_up: list[None] = given_up) -> None:
            for _ in range(50):
                memory[0] = 1
                if given_up:
                    wrong.append("written to after it was given up")

        work = Work(copy)
        barrier = threading.Barrier(2)

        def run(work: Work = work, barrier: threading.Barrier = barrier) -> None:
            barrier.wait(20)
            work.run()

        thread = threading.Thread(target=run)
        thread.start()
        barrier.wait(20)
        for _ in range(shuffled.randrange(300)):
            pass
        work.abandon(lambda given_up=given_up: given_up.append(None))  # type: ignore[misc]
        thread.join(20)
        assert wrong == []
        assert given_up == [None]
