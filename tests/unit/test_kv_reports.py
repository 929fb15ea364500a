"""ReportedKV: several engines of a node, each with its own word, and reports that got lost."""

import pytest

from hs_cache.errors import InvalidInputError
from hs_cache.kv_presence import KVStatistics, Presence, united
from hs_cache.kv_reports import Report, ReportedKV
from hs_cache.messages import ReportNumber
from tests.unit.test_kv_presence import blob

ABSENT, PRESENT, UNKNOWN = Presence.ABSENT, Presence.PRESENT, Presence.UNKNOWN


def presence(reported: ReportedKV, names: str) -> list[int]:
    return list(reported.presence(blob(names)))


def test_before_anything_was_said_all_is_unknown() -> None:
    reported = ReportedKV(10)
    assert presence(reported, "ab") == [UNKNOWN] * 2
    assert reported.stats() == KVStatistics(0, 0, 0, "unknown", 0)


def test_what_one_engine_evicts_another_still_has() -> None:
    reported = ReportedKV(10)
    for engine in ("one", "two"):
        reported.note_stored(blob("ab"), engine)
    reported.note_stored(blob("c"), "one")
    reported.report(Report.EVICTED, blob("abc"), "one")
    assert presence(reported, "abc") == [PRESENT, PRESENT, ABSENT], "c is a chunk that the other never had"
    reported.report(Report.EVICTED, blob("a"), "two")
    assert presence(reported, "ab") == [ABSENT, PRESENT]
    reported.report(Report.RESYNC, b"", "two")
    assert presence(reported, "abc") == [ABSENT] * 3
    assert reported.stats().engines == ("one", "two")


def test_an_engine_that_has_forgotten_may_have_anything() -> None:
    reported = ReportedKV(2)
    reported.note_stored(blob("ab"), "one")
    reported.note_stored(blob("xyz"), "two")  # one more than is remembered
    reported.report(Report.EVICTED, blob("a"), "one")
    assert presence(reported, "ab") == [UNKNOWN, PRESENT]


def test_reports_in_order_are_taken_as_they_come() -> None:
    reported = ReportedKV(10)
    for number, (what, names) in enumerate(
        [(Report.STORED, "abc"), (Report.EVICTED, "b"), (Report.STORED, "b"), (Report.EVICTED, "c")]
    ):
        reported.report(what, blob(names), "engine", ReportNumber(b"sender", number))
        reported.report(Report.STORED, blob("d"), "other engine", ReportNumber(b"sender", number))
    assert presence(reported, "abcd") == [PRESENT, PRESENT, ABSENT, PRESENT]
    assert reported.stats().gaps_total == 0


def test_what_comes_late_is_not_taken_for_news() -> None:
    reported = ReportedKV(10)
    for number, what in ((0, Report.STORED), (2, Report.EVICTED), (1, Report.STORED)):
        reported.report(what, blob("a"), "", ReportNumber(b"sender", number))
    assert presence(reported, "a") == [UNKNOWN]
    reported.report(Report.EVICTED, blob("a"), "", ReportNumber(b"sender", 3))
    assert presence(reported, "a") == [ABSENT]
    assert reported.stats().gaps_total == 2


@pytest.mark.parametrize("number", [1, 3])
def test_behind_a_gap_all_that_the_engine_said_is_unknown(number: int) -> None:
    reported = ReportedKV(10)
    reported.report(Report.STORED, blob("ab"), "one", ReportNumber(b"sender", 0))
    reported.report(Report.STORED, blob("x"), "two", ReportNumber(b"sender", 0))
    reported.report(Report.EVICTED, blob("b"), "one", ReportNumber(b"sender", number))
    lost = number != 1
    assert presence(reported, "abx") == [UNKNOWN if lost else PRESENT, ABSENT, PRESENT]
    assert reported.stats().gaps_total == lost
    reported.report(Report.RESYNC, blob("a"), "one", ReportNumber(b"sender", number + 1))
    assert presence(reported, "abx") == [PRESENT, ABSENT, PRESENT], "a resync tells everything"


def test_a_sender_whose_first_report_is_missing_left_a_gap() -> None:
    reported = ReportedKV(10)
    reported.note_stored(blob("ab"), "")
    reported.report(Report.STORED, blob("c"), "", ReportNumber(b"sender", 1))
    assert presence(reported, "abc") == [UNKNOWN, UNKNOWN, PRESENT]


def test_bad_reports_change_nothing() -> None:
    reported = ReportedKV(10)
    reported.report(Report.STORED, blob("a"), "engine", ReportNumber(b"sender", 0))
    with pytest.raises(InvalidInputError, match="keys: got 3 bytes"):
        reported.report(Report.EVICTED, b"abc", "engine", ReportNumber(b"sender", 1))
    assert presence(reported, "a") == [PRESENT]


def test_of_too_many_engines_the_one_that_is_silent_is_forgotten(caplog: pytest.LogCaptureFixture) -> None:
    reported = ReportedKV(10)
    reported.note_stored(blob("ab"), "gone")
    for number in range(63):
        reported.note_stored(blob("a"), str(number))
    assert presence(reported, "ab") == [PRESENT, PRESENT]
    reported.note_stored(blob("a"), "one too many")
    assert presence(reported, "ab") == [PRESENT, UNKNOWN]
    assert len(reported.stats().engines) == 64
    assert "more than 64 engines on one node: 'gone' is forgotten" in caplog.text


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([], UNKNOWN),
        ([[None]], UNKNOWN),
        ([[ABSENT]], ABSENT),
        ([[ABSENT], [None]], ABSENT),
        ([[ABSENT], [UNKNOWN]], UNKNOWN),
        ([[UNKNOWN], [PRESENT]], PRESENT),
        ([[ABSENT], [PRESENT], [None]], PRESENT),
    ],
)
def test_several_answers_are_united(answers: list[list[int | None]], expected: Presence) -> None:
    assert united(answers, 1) == bytes([expected])
