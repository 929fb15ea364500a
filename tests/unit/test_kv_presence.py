"""KVIndex: what is present, absent or unknown after which reports, and what is forgotten."""

import pickle
import threading

import pytest

from hs_cache.errors import InvalidInputError
from hs_cache.kv_presence import KVIndex, KVStatistics, Presence

ABSENT, PRESENT, UNKNOWN = Presence.ABSENT, Presence.PRESENT, Presence.UNKNOWN


def blob(names: str) -> bytes:
    """One 16-byte key per letter."""
    return b"".join(name.encode() * 16 for name in names)


def make_index(*, capacity: int = 100, store_implies_present: bool = True) -> KVIndex:
    return KVIndex(capacity, store_implies_present=store_implies_present)


def test_a_source_not_heard_of_is_unknown() -> None:
    index = make_index()
    assert list(index.presence(blob("ab"))) == [UNKNOWN, UNKNOWN]
    assert index.presence(b"") == b""
    assert index.stats() == KVStatistics(present=0, absent=0, unknown=0, unlisted="unknown", reports_total=0)


def test_the_last_report_counts_and_answers_are_in_order() -> None:
    index = make_index()
    index.report_stored(blob("abc"))
    index.report_evicted(blob("bd"))
    index.report_evicted(blob("c"))
    index.report_stored(blob("c"))
    assert list(index.presence(blob("dcbae"))) == [ABSENT, PRESENT, ABSENT, PRESENT, UNKNOWN]
    assert index.stats() == KVStatistics(present=2, absent=2, unknown=0, unlisted="unknown", reports_total=4)


def test_an_answer_is_one_byte_per_key() -> None:
    index = make_index()
    index.report_stored(blob("a"))
    assert index.presence(blob("ab")) == bytes([1, 2])
    assert [pickle.loads(pickle.dumps(state)) for state in Presence] == [ABSENT, PRESENT, UNKNOWN]


@pytest.mark.parametrize(
    ("before", "implied", "else_unknown"),
    [("nothing", PRESENT, UNKNOWN), ("evicted", PRESENT, UNKNOWN), ("stored", PRESENT, PRESENT)],
)
def test_storing_rows_overrides_an_older_absence(before: str, implied: Presence, else_unknown: Presence) -> None:
    for store_implies_present, expected in ((True, implied), (False, else_unknown)):
        index = make_index(store_implies_present=store_implies_present)
        if before != "nothing":
            getattr(index, f"report_{before}")(blob("a"))
        index.note_stored(blob("a"))
        assert list(index.presence(blob("a"))) == [expected]


def test_an_eviction_after_the_store_counts() -> None:
    index = make_index()
    index.note_stored(blob("ab"))
    index.report_evicted(blob("b"))
    assert list(index.presence(blob("ab"))) == [PRESENT, ABSENT]
    assert index.stats().reports_total == 1, "a store is no report of the source"


def test_resync_makes_everything_else_absent_until_it_is_heard_of_again() -> None:
    index = make_index(store_implies_present=False)
    index.report_stored(blob("ab"))
    index.resync(blob("bc"))
    assert list(index.presence(blob("abcd"))) == [ABSENT, PRESENT, PRESENT, ABSENT]
    index.note_stored(blob("d"))
    index.report_stored(blob("a"))
    assert list(index.presence(blob("abcd"))) == [PRESENT, PRESENT, PRESENT, UNKNOWN]
    assert index.stats().unlisted == "absent"


def test_a_resync_to_nothing_says_that_all_is_gone() -> None:
    index = make_index()
    index.report_stored(blob("ab"))
    index.resync(b"")
    assert list(index.presence(blob("ab"))) == [ABSENT, ABSENT]
    assert index.stats() == KVStatistics(present=0, absent=0, unknown=0, unlisted="absent", reports_total=2)


def test_the_longest_unreported_are_forgotten_first_and_become_unknown() -> None:
    index = make_index(capacity=3)
    index.report_stored(blob("abc"))
    index.report_evicted(blob("a"))
    index.report_stored(blob("d"))
    assert list(index.presence(blob("abcd"))) == [ABSENT, UNKNOWN, PRESENT, PRESENT]


def test_what_is_asked_for_again_and_again_is_never_forgotten() -> None:
    capacity = 40
    index = make_index(capacity=capacity)
    hot = blob("abcd")
    index.note_stored(hot)
    for first in range(0, 10 * capacity, 8):
        index.note_stored(b"".join((first + i).to_bytes(16, "big") for i in range(8)))
        assert list(index.presence(hot)) == [PRESENT] * 4, f"after {first + 8} other chunks"
    assert index.stats().present == capacity


@pytest.mark.parametrize("forgotten", range(5))
def test_of_what_was_asked_for_the_tail_is_forgotten_first(forgotten: int) -> None:
    index = make_index(capacity=6)
    index.note_stored(blob("abcd"))
    index.note_stored(blob("xy"))
    assert index.presence(blob("abcd")) == bytes([PRESENT] * 4)
    index.note_stored(blob("123456"[: 2 + forgotten]))  # two of these take the places of x and y
    assert list(index.presence(blob("abcd"))) == [PRESENT] * (4 - forgotten) + [UNKNOWN] * forgotten


def test_asking_lists_nothing() -> None:
    index = make_index(capacity=2)
    index.report_stored(blob("ab"))
    assert list(index.presence(blob("cdab"))) == [UNKNOWN, UNKNOWN, PRESENT, PRESENT]
    assert (index.stats().present, index.stats().unknown) == (2, 0)


def test_after_forgetting_nothing_unlisted_is_called_absent() -> None:
    index = make_index(capacity=2)
    index.resync(b"")
    assert list(index.presence(blob("z"))) == [ABSENT]
    index.report_stored(blob("abc"))
    assert list(index.presence(blob("zabc"))) == [UNKNOWN, UNKNOWN, PRESENT, PRESENT]
    index.resync(blob("abc"))
    assert list(index.presence(blob("zabc"))) == [UNKNOWN, UNKNOWN, PRESENT, PRESENT]
    index.resync(blob("a"))
    assert list(index.presence(blob("za"))) == [ABSENT, PRESENT]


@pytest.mark.parametrize("method", ["report_stored", "report_evicted", "note_stored", "resync", "presence"])
@pytest.mark.parametrize("keys", [b"x" * 17, b"x", ["x" * 16], None])
def test_malformed_keys_are_refused_and_change_nothing(method: str, keys: object) -> None:
    index = make_index()
    index.report_stored(blob("a"))
    before = index.stats()
    with pytest.raises(InvalidInputError, match="keys: got"):
        getattr(index, method)(keys)
    assert index.stats() == before
    assert list(index.presence(blob("ab"))) == [PRESENT, UNKNOWN]


def test_capacity_below_one_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="capacity: got 0"):
        make_index(capacity=0)


def test_reports_from_many_threads_are_all_counted_and_bounded() -> None:
    index = make_index(capacity=50)

    def report(first: int) -> None:
        for i in range(first, first + 200):
            index.report_stored(i.to_bytes(16, "big"))
            index.report_evicted(i.to_bytes(16, "big"))
            assert len(index.presence(bytes(16 * 4))) == 4

    threads = [threading.Thread(target=report, args=(1000 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stats = index.stats()
    assert stats.reports_total == 4 * 200 * 2
    assert stats.present + stats.absent == 50
