"""Work: memory is given up when its copy surely touches nothing any more, exactly once."""

import random
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
