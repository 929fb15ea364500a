"""Notes of stores that come late to a KV actor, and of what is in use."""

import sys

import pytest

from actors.kv_actor import KVActor
from hs_cache.config import CacheConfig
from hs_cache.kv_log import CAPACITY, Mark
from hs_cache.kv_presence import Presence
from hs_cache.messages import ReportNumber
from tests.unit.test_kv_presence import blob

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the log is Linux only")

ABSENT, PRESENT, UNKNOWN = Presence.ABSENT, Presence.PRESENT, Presence.UNKNOWN


def presence(actor: KVActor, letters: str) -> list[int]:
    answer = actor.presence(blob(letters))
    assert answer is not None
    return list(answer)


def mark_of(actor: KVActor) -> Mark:
    _, mark = actor.marked_presence(b"", (), 1.0)
    assert mark is not None
    return Mark(*mark)


def note_late(actor: KVActor, notes: list[tuple[bytes, str, Mark]]) -> None:
    actor.note_stored_late([(names, engine, *mark) for names, engine, mark in notes])


def test_an_eviction_behind_the_mark_stays_and_one_before_it_is_overridden() -> None:
    actor = KVActor(CacheConfig())
    actor.report_evicted(blob("ab"))
    mark = mark_of(actor)
    actor.report_evicted(blob("bx"))
    note_late(actor, [(blob("abc"), "", mark)])
    assert presence(actor, "abcx") == [PRESENT, ABSENT, PRESENT, ABSENT]
    note_late(actor, [(blob("ab"), "", mark_of(actor))])
    assert presence(actor, "ab") == [PRESENT, PRESENT]


def test_each_note_has_a_mark_of_its_own() -> None:
    actor = KVActor(CacheConfig())
    early = mark_of(actor)
    actor.report_evicted(blob("a"), "one")
    late = mark_of(actor)
    note_late(actor, [(blob("ax"), "one", early), (blob("ay"), "two", late)])
    assert presence(actor, "axy") == [PRESENT, PRESENT, PRESENT]
    actor.report_evicted(blob("a"), "two")
    assert presence(actor, "a") == [ABSENT], "the note of one was late"


def test_a_late_note_is_not_undone_by_what_another_engine_has_said() -> None:
    actor = KVActor(CacheConfig())
    mark = mark_of(actor)
    actor.report_evicted(blob("a"), "one")
    note_late(actor, [(blob("ab"), "two", mark)])
    assert presence(actor, "ab") == [PRESENT, PRESENT]
    actor.report_evicted(blob("a"), "two")
    note_late(actor, [(blob("a"), "two", mark), (blob("a"), "three", Mark(b"of another", mark.position))])
    assert presence(actor, "a") == [ABSENT]


def test_what_the_engine_said_before_the_mark_is_of_no_account() -> None:
    actor = KVActor(CacheConfig())
    actor.report_evicted(blob("b"), "two")
    mark = mark_of(actor)
    actor.report_evicted(blob("b"), "one")
    note_late(actor, [(blob("b"), "two", mark)])
    assert presence(actor, "b") == [PRESENT]
    actor.resync(b"", "one")
    actor.resync(b"", "two")
    mark = mark_of(actor)
    actor.report_evicted(blob("a"), "one")
    note_late(actor, [(blob("a"), "two", mark)])
    assert presence(actor, "a") == [PRESENT]
    actor.resync(b"", "two")
    note_late(actor, [(blob("a"), "two", mark)])
    assert presence(actor, "a") == [ABSENT]


def test_where_an_engine_may_have_said_it_a_late_note_is_left_out() -> None:
    actor = KVActor(CacheConfig(kv_index_capacity=1024))
    mark = mark_of(actor)
    actor.report_evicted(blob("a"), "two")
    actor.report_stored(bytes(16 * 1024), "two")  # one name, 1024 times: nothing is forgotten
    note_late(actor, [(blob("a"), "two", mark)])
    assert presence(actor, "a") == [ABSENT]
    mark = mark_of(actor)
    actor.report_evicted(blob("a"), "two")
    actor.report_stored(b"".join(number.to_bytes(16, "big") for number in range(1024)), "two")  # a is forgotten
    note_late(actor, [(blob("a"), "two", mark)])
    assert presence(actor, "a") == [UNKNOWN]


@pytest.mark.parametrize("what", ["resync", "gap"])
def test_a_note_from_before_all_was_taken_back_is_left_out(what: str) -> None:
    actor = KVActor(CacheConfig())
    mark = mark_of(actor)
    if what == "resync":
        actor.resync(blob("z"))
    else:
        actor.report_stored(blob("z"), number=ReportNumber(b"sender", 1))
    note_late(actor, [(blob("ab"), "", mark)])
    assert presence(actor, "abz") == [ABSENT if what == "resync" else UNKNOWN] * 2 + [PRESENT]


def test_a_note_for_another_actor_is_left_out() -> None:
    actor, before = KVActor(CacheConfig()), KVActor(CacheConfig())
    note_late(actor, [(blob("a"), "", mark_of(before)), (blob("b"), "", mark_of(actor))])
    assert presence(actor, "ab") == [UNKNOWN, PRESENT]


def test_what_concerns_others_only_does_not_undo_a_late_note() -> None:
    actor = KVActor(CacheConfig())
    mark = mark_of(actor)
    actor.resync(blob("z"), "one")
    actor.report_evicted(b"".join(number.to_bytes(16, "big") for number in range(2 * CAPACITY)), "two")
    note_late(actor, [(blob("a"), "two", mark)])
    assert presence(actor, "a") == [PRESENT]


def test_many_late_notes_at_once_into_a_full_index_are_all_taken() -> None:
    actor = KVActor(CacheConfig(kv_index_capacity=CAPACITY))
    actor.report_stored(b"".join(number.to_bytes(16, "big") for number in range(CAPACITY)))
    mark = mark_of(actor)
    notes = [b"".join((1 << 64 | first + at).to_bytes(16, "big") for at in range(128)) for first in range(0, 6400, 128)]
    note_late(actor, [(names, "", mark) for names in notes])
    assert all(set(actor.presence(names) or b"") == {PRESENT} for names in notes)


def test_what_is_noted_as_used_is_not_forgotten_next() -> None:
    actor = KVActor(CacheConfig(kv_index_capacity=4))
    actor.note_stored(blob("abcd"))
    actor.touch(blob("ab"))
    actor.note_stored(blob("xy"))
    assert presence(actor, "abcdxy") == [PRESENT, PRESENT, UNKNOWN, UNKNOWN, PRESENT, PRESENT]


def test_what_is_used_is_not_listed_by_that() -> None:
    actor = KVActor(CacheConfig())
    actor.touch(blob("ab"))
    assert presence(actor, "ab") == [UNKNOWN, UNKNOWN]


def test_there_is_a_log_only_where_reports_count() -> None:
    assert KVActor(CacheConfig()).log_address() is not None
    for source in ("none", "lmcache"):
        actor = KVActor(CacheConfig(kv_source=source))
        assert actor.log_address() is None
        if source == "none":
            assert actor.marked_presence(blob("a"), (), 1.0) == (None, None)
