"""Rounds over all subjects at one size: what comes after what changes from round to round."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import TypeVar

from benchmarks.quiet import Watch, wait_until_quiet
from benchmarks.results import SizeResult
from benchmarks.subject import STORE, MeasurementError, Size, Subject

ROUNDS_OF_WARMUP = 2
_MOST_ROUNDS = 1.5
"""How many rounds are tried for one that counts, before disturbed ones do."""

_TIMES_WOKEN = 3
_TURNS = ((5, 64 << 20), (3, 256 << 20))

_T = TypeVar("_T")

Seconds = dict[str, dict[str, float]]


def turned(items: Sequence[_T], number: int) -> list[_T]:
    """The items in the order of a round: turned by one from round to round, and backwards once all have been first, so
    that nobody always comes after the same."""
    if not items:
        return []
    first = number % len(items)
    order = [*items[first:], *items[:first]]
    return order[::-1] if number // len(items) % 2 else order


def measure(
    subjects: Mapping[str, Subject], size: Size, rounds: int, patience_s: float
) -> tuple[SizeResult, dict[str, float]]:
    """Measure all subjects; also the bytes per token that those who know keep.

    A subject that fails is left out, and its reason is part of the result.

    Args:
        subjects: by name.
        rounds: that count.
        patience_s: how long to wait for other processes to be quiet, before the first round.
    """
    missing: dict[str, str] = {}
    steps: dict[str, list[str]] = {}
    kept: dict[str, float] = {}
    for name, subject in subjects.items():
        try:
            steps[name] = subject.prepare(size)
            kept.update(_first_round(name, subject, steps[name]))
        except MeasurementError as error:
            steps.pop(name, None)
            missing[name] = str(error)
    wait_until_quiet(patience_s)
    clean: list[Seconds] = []
    disturbed: list[tuple[float, Seconds]] = []
    for number in range(ROUNDS_OF_WARMUP + round(rounds * _MOST_ROUNDS)):
        with Watch() as watch:
            seconds: Seconds = {}
            for name in turned(list(steps), number):
                try:
                    seconds[name] = _round(subjects[name], steps[name], number, _turns(size))
                except MeasurementError as error:
                    del steps[name]
                    missing[name] = str(error)
        if number < ROUNDS_OF_WARMUP:
            continue
        if watch.disturbed:
            disturbed.append((watch.foreign_s / watch.wall_s, seconds))
        else:
            clean.append(seconds)
        if len(clean) == rounds:
            break
    least = sorted(disturbed, key=lambda each: each[0])[: rounds - len(clean)]
    counted = [*clean, *(seconds for _, seconds in least)]
    taken = {name: {step: [each[name][step] for each in counted] for step in steps[name]} for name in steps}
    return SizeResult(size, taken, len(disturbed), len(least), missing), kept


def _first_round(name: str, subject: Subject, steps: Sequence[str]) -> dict[str, float]:
    """Untimed: what comes back is right, and what is kept for it."""
    subject.begin()
    kept = {}
    if STORE in steps:
        subject.time(STORE)
        if (found := subject.bytes_per_token()) is not None:
            kept[name] = found
        subject.verify()
    subject.finish()
    return kept


def _turns(size: Size) -> int:
    """How often a subject does all its steps in a row: what is called once a second costs this machine twice as much as
    what is called again and again, as an engine does."""
    return next((turns for turns, most in _TURNS if size.nbytes <= most), 1)


def _round(subject: Subject, steps: Sequence[str], number: int, turns: int) -> dict[str, float]:
    """The median of several turns, per step."""
    taken = [_turn(subject, steps, number + turn) for turn in range(turns)]
    return {step: median(seconds[step] for seconds in taken) for step in steps}


def _turn(subject: Subject, steps: Sequence[str], number: int) -> dict[str, float]:
    subject.begin()
    first = [step for step in steps if step == STORE]
    others = [step for step in steps if step != STORE]
    for _ in range(_TIMES_WOKEN):
        subject.wake()
    seconds = {step: subject.time(step) for step in [*first, *turned(others, number)]}
    subject.finish()
    return seconds
