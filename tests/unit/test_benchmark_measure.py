"""Rounds: their order, what counts, and what becomes of a subject that fails."""

import sys
from typing import Any

import pytest

from benchmarks import quiet
from benchmarks.measure import ROUNDS_OF_WARMUP, measure, turned
from benchmarks.results import SizeResult
from benchmarks.subject import RETRIEVE, STORE, MeasurementError, Size, Subject, check
from tests.processes import run_python

SIZE = Size(1024, 8)


class Recording(Subject):
    """Does nothing, and takes down what it was told."""

    def __init__(self, *, fails_in_round: int | None = None, lies: bool = False) -> None:
        self.done: list[str] = []
        self._round = 0
        self._fails_in_round = fails_in_round
        self._lies = lies

    def prepare(self, size: Size) -> list[str]:
        return [RETRIEVE, STORE, "other"]

    def begin(self) -> None:
        self.done.append("begin")
        self._round += 1

    def act(self, step: str) -> Any:
        check(self._round != self._fails_in_round, "enough")
        self.done.append(step)

    def verify(self) -> None:
        check(not self._lies, "other rows than were stored")

    def finish(self) -> None:
        self.done.append("finish")


def rounds_of(subject: Recording) -> list[list[str]]:
    """What was done in each round."""
    found: list[list[str]] = []
    for word in subject.done:
        if word == "begin":
            found.append([])
        found[-1].append(word)
    return found


def run(rounds: int = 2, **subjects: Subject) -> SizeResult:
    return measure(subjects, SIZE, rounds, 0)[0]


def test_turned_puts_each_first_and_nobody_always_behind_the_same() -> None:
    orders = [turned("abc", number) for number in range(6)]
    assert {"".join(order) for order in orders} == {"abc", "cba", "acb", "bca", "cab", "bac"}
    assert turned([], 3) == []


def test_measure_takes_every_step_once_a_round_with_the_store_first() -> None:
    subject = Recording()
    result = run(rounds=3, some=subject)
    assert {step: len(seconds) for step, seconds in result.seconds["some"].items()} == {
        RETRIEVE: 3,
        STORE: 3,
        "other": 3,
    }
    first, *rest = rounds_of(subject)
    assert first == ["begin", STORE, "finish"]
    assert len(rest) >= ROUNDS_OF_WARMUP + 3
    for done in rest:
        assert done[:2] == ["begin", STORE]
        assert sorted(done[2:-1]) == ["other", RETRIEVE]
        assert done[-1] == "finish"
    assert len({tuple(done) for done in rest}) == 2


@pytest.mark.parametrize(
    ("subject", "reason"),
    [(Recording(lies=True), "other rows than were stored"), (Recording(fails_in_round=4), "enough")],
)
def test_measure_leaves_out_who_fails_and_says_why(subject: Recording, reason: str) -> None:
    result = run(bad=subject, good=Recording())
    assert result.missing == {"bad": reason}
    assert set(result.seconds) == {"good"}
    assert len(result.seconds["good"][STORE]) == 2


def test_measure_counts_the_least_disturbed_rounds_where_there_are_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quiet.Watch, "disturbed", property(lambda self: True))
    result = run(rounds=4, some=Recording())
    assert (result.disturbed, result.kept) == (6, 4)
    assert len(result.seconds["some"][STORE]) == 4


def test_watch_counts_the_time_of_descendants_as_our_own() -> None:
    before = quiet._own_s()
    burning = "import time; until = time.process_time() + 0.5\nwhile time.process_time() < until: pass"
    assert run_python(["-c", burning]).returncode == 0
    assert quiet._own_s() - before >= 0.4


def test_watch_is_disturbed_by_time_that_is_not_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    used = iter([10.0, 10.5])
    monkeypatch.setattr(quiet, "_foreign_s", lambda: next(used))
    with quiet.Watch() as watch:
        pass
    assert watch.foreign_s == 0.5
    assert watch.disturbed


def test_check_when_it_does_not_hold_raises() -> None:
    check(1, "never said")
    with pytest.raises(MeasurementError, match="said"):
        check(None, "said")


def test_what_peers_run_needs_no_other_packages() -> None:
    """The modules that workers share are imported in environments that have neither Ray nor torch."""
    heavy = "{'ray', 'torch', 'rich', 'hs_cache'}"
    code = f"import sys, benchmarks.worker, benchmarks.blocks, benchmarks.loopback; print({heavy} & set(sys.modules))"
    done = run_python(["-c", code])
    assert done.stdout.strip() == "set()", done.stdout + done.stderr + sys.executable
