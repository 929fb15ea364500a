"""HiddenStateStore: what is found, what goes first, what is never taken, and whose memory comes back when."""

import random
import sys
import threading
from collections.abc import Callable, Sequence

import pytest

from hs_cache.errors import InvalidInputError, StaleIncarnationError, StaleRevisionError
from hs_cache.extents import Extent
from hs_cache.kv_presence import Presence
from hs_cache.messages import NEVER_STORED, RETIRED, Freed, LayerSpec, Run, split_keys
from hs_cache.store import Committed, Granted, HiddenStateStore, HoldId, Reserved
from tests.builders import (
    CHUNK_SIZE,
    OWNER,
    SLOT_BYTES,
    PoolMemory,
    coverage,
    lease,
    make_keys,
    make_space,
    make_spec,
    make_store,
    make_tokens,
    put,
    reserve,
    retire,
)

ABSENT, PRESENT, UNKNOWN = Presence.ABSENT, Presence.PRESENT, Presence.UNKNOWN
NOTHING = Granted(0, (), (), False, "hidden_state")
BOTH = (make_spec(0), make_spec(1))


def evict_one_by_one(store: HiddenStateStore, prompts: list[str], count: int) -> str:
    """The last letters of the chunks that go, in order, as `count` strangers of one slot come into a full pool."""
    watched = {key: letter for prompt in prompts for key, letter in zip(make_keys(prompt), prompt, strict=True)}
    gone = ""
    for i in range(count):
        before = {key for key in watched if store.contains(key, 0)}
        assert put(store, chr(0x391 + i)).stored == 1
        gone += "".join(watched[key] for key in before if not store.contains(key, 0))
        store.check()
    return gone


def slots(store: HiddenStateStore, state: str) -> int:
    return int(getattr(store.stats(), f"{state}_bytes")) // SLOT_BYTES


def test_a_store_is_invisible_until_its_commit_and_then_found_whole() -> None:
    store = make_store(8)
    assert reserve(store, (OWNER, 1), "abc") == Reserved((Run(0, 0, 12, 0),), 0)
    assert coverage(store, "abc") == "..."
    assert lease(store, (OWNER, 2), "abc") == NOTHING
    assert (slots(store, "reserved"), slots(store, "resident"), slots(store, "free")) == (3, 0, 5)
    assert store.commit((OWNER, 1)) == Committed(stored=3, present=0, failed=0, prefix_tokens=12)
    assert coverage(store, "abc") == "abc"
    assert (slots(store, "reserved"), slots(store, "resident"), slots(store, "free")) == (0, 3, 5)
    assert lease(store, (OWNER, 3), "abcd") == Granted(12, (make_spec(),), (Run(0, 0, 12, 0),), False, "hidden_state")
    assert lease(store, (OWNER, 4), "ab") == Granted(8, (make_spec(),), (Run(0, 0, 8, 0),), False, "")
    store.check()


def test_storing_again_keeps_what_is_there() -> None:
    store = make_store(8)
    put(store, "abc")
    assert reserve(store, (OWNER, 1), "abcd") == Reserved((Run(0, 12, 4, 3 * SLOT_BYTES),), 0)
    assert store.commit((OWNER, 1)) == Committed(stored=1, present=3, failed=0, prefix_tokens=16)
    assert store.stats().stored_chunks_total == 4


@pytest.mark.parametrize("state", [ABSENT, UNKNOWN])
def test_the_prefix_ends_where_kv_is_not_present(state: Presence) -> None:
    store = make_store(8)
    put(store, "abc", *BOTH)
    granted = lease(store, (OWNER, 1), "abc", presence=[PRESENT, state, PRESENT])
    assert (granted.num_tokens, granted.runs) == (4, (Run(0, 0, 4, 0),))
    store.check()
    if state is ABSENT:
        assert granted.ended_by == "kv_absent"
        assert coverage(store, "abc", 0) == coverage(store, "abc", 1) == "a.c"
        assert store.stats().kv_dropped_chunks_total == 1
    else:
        assert granted.ended_by == "kv_unknown"
        assert coverage(store, "abc", 0) == coverage(store, "abc", 1) == "abc"
        assert store.stats().kv_dropped_chunks_total == 0


def test_every_absent_chunk_is_dropped_also_behind_the_end() -> None:
    store = make_store(8)
    put(store, "abcd")
    granted = lease(store, (OWNER, 1), "abcd", presence=[UNKNOWN, ABSENT, PRESENT, ABSENT])
    assert granted == Granted(0, (), (), False, "kv_unknown")
    assert coverage(store, "abcd") == "a.c."
    assert store.stats().num_leases == 0
    store.check()


def test_a_missing_hidden_state_ends_the_prefix() -> None:
    store = make_store(8)
    put(store, "abc")
    assert store.drop(make_keys("abc")[1])
    assert not store.drop(make_keys("abc")[1])
    granted = lease(store, (OWNER, 1), "abc")
    assert (granted.num_tokens, granted.ended_by) == (4, "hidden_state")
    store.check()


def test_wrong_number_of_presences_is_refused_and_the_lease_stays() -> None:
    store = make_store(8)
    put(store, "ab")
    store.lease((OWNER, 1), make_keys("ab"), (0,))
    for presence in ([ABSENT], [ABSENT] * 3):
        with pytest.raises(InvalidInputError, match=f"presence: got {len(presence)} values, expected 2"):
            store.settle((OWNER, 1), presence)
    assert coverage(store, "ab") == "ab"
    assert store.settle((OWNER, 1), [PRESENT] * 2).num_tokens == 8


def test_kv_absent_while_another_reader_holds_the_chunk_strands_it_until_the_last_release() -> None:
    store = make_store(4)
    put(store, "ab", *BOTH)
    lease(store, (b"first", 1), "ab", (0,))
    lease(store, (b"second", 1), "ab", (0, 1))
    lease(store, (OWNER, 1), "ab", presence=[PRESENT, ABSENT])
    store.check()
    assert coverage(store, "ab", 0) == coverage(store, "ab", 1) == "a."
    assert (slots(store, "resident"), slots(store, "stranded"), slots(store, "free")) == (2, 2, 0)
    store.release(b"first", [1])
    assert (slots(store, "stranded"), slots(store, "free")) == (2, 0)
    assert put(store, "x") == Committed(0, 0, 1, 0), "what is held must not be reused"
    store.release(b"second", [1])
    assert (slots(store, "stranded"), slots(store, "free")) == (0, 2)
    store.check()


def test_a_chunk_dropped_between_lease_and_settle_ends_the_prefix() -> None:
    store = make_store(4)
    put(store, "abc")
    store.lease((OWNER, 1), make_keys("abc"), (0,))
    store.drop(make_keys("abc")[1])
    granted = store.settle((OWNER, 1), [PRESENT] * 3)
    assert (granted.num_tokens, granted.ended_by) == (4, "hidden_state")
    store.check()
    assert (slots(store, "stranded"), slots(store, "free")) == (0, 2)


@pytest.mark.parametrize("stored_again", ["abc", "ab", "abx"])
def test_an_absence_from_before_a_store_ends_the_prefix_and_drops_nothing(stored_again: str) -> None:
    store = make_store(8)
    put(store, "abc")
    store.lease((OWNER, 1), make_keys("abc"), (0,))
    assert put(store, stored_again).present >= 2, "the KV of b has been written anew while it was being asked for"
    granted = store.settle((OWNER, 1), [PRESENT, ABSENT, PRESENT])
    assert (granted.num_tokens, granted.ended_by) == (4, "kv_absent")
    assert coverage(store, "abc") == "abc"
    assert store.stats().kv_dropped_chunks_total == 0
    store.check()
    store.release(OWNER, [1])
    assert lease(store, (OWNER, 2), "abc", presence=[PRESENT, ABSENT, PRESENT]).ended_by == "kv_absent"
    assert coverage(store, "abc") == "a.c", "what is said of the chunk now counts"
    assert store.stats().kv_dropped_chunks_total == 1
    store.check()


def test_an_absence_counts_for_chunks_that_the_store_meanwhile_did_not_name() -> None:
    store = make_store(8)
    put(store, "abc")
    store.lease((OWNER, 1), make_keys("abc"), (0,))
    put(store, "ab")
    put(store, "xyz")
    assert store.settle((OWNER, 1), [PRESENT, PRESENT, ABSENT]).ended_by == "kv_absent"
    assert coverage(store, "abc") == "ab."
    store.check()


def test_a_reservation_under_way_does_not_outlive_an_absence_but_its_commit_does() -> None:
    store = make_store(8)
    put(store, "ab")
    reserve(store, (b"writer", 1), "ab", BOTH[1])
    lease(store, (OWNER, 1), "ab", presence=[PRESENT, ABSENT])
    assert coverage(store, "ab") == "a.", "only a commit says that the KV is there"
    store.check()
    assert store.commit((b"writer", 1)).stored == 2
    assert (coverage(store, "ab", 0), coverage(store, "ab", 1)) == ("a.", "ab")
    store.check()


def test_pressure_takes_tails_in_exact_order() -> None:
    store = make_store(6)
    put(store, "abc")
    put(store, "xyz")
    assert evict_one_by_one(store, ["abc", "xyz"], 6) == "cbazyx"


def test_a_retrieve_warms_the_prefix_that_it_got() -> None:
    store = make_store(6)
    put(store, "abc")
    put(store, "xyz")
    lease(store, (OWNER, 1), "ab")
    store.release(OWNER, [1])
    assert evict_one_by_one(store, ["abc", "xyz"], 6) == "czyxba"


def test_looking_does_not_warm() -> None:
    store = make_store(6)
    put(store, "abc")
    put(store, "xyz")
    assert coverage(store, "abc") == "abc"
    assert evict_one_by_one(store, ["abc", "xyz"], 2) == "cb"


def test_a_shared_head_goes_after_both_tails() -> None:
    store = make_store(5)
    put(store, "abc")
    put(store, "abde")
    assert evict_one_by_one(store, ["abc", "abde"], 5) == "cedba"


def test_what_is_behind_a_hole_goes_first() -> None:
    store = make_store(6)
    put(store, "xyz")
    put(store, "abcd")  # takes the tail of xyz
    store.drop(make_keys("ab")[1])
    assert put(store, "1").stored == 1
    assert evict_one_by_one(store, ["xyz", "abcd"], 4) == "dcyx"


def test_six_chunks_into_a_pool_of_four() -> None:
    store = make_store(4)
    assert put(store, "abcdef") == Committed(stored=4, present=0, failed=2, prefix_tokens=16)
    assert coverage(store, "abcdef") == "abcd.."
    assert store.stats().refused_chunks_total == 2
    store.check()


def test_a_second_prompt_takes_tails_of_the_first() -> None:
    store = make_store(10)
    assert put(store, "abcdefghijkl").prefix_tokens == 10 * CHUNK_SIZE
    assert put(store, "xyz").prefix_tokens == 3 * CHUNK_SIZE
    assert coverage(store, "abcdefghijkl") == "abcdefg....."
    assert store.stats().evicted_chunks_total == 3


def test_storing_the_rest_of_a_prompt_never_evicts_its_head() -> None:
    store = make_store(4)
    put(store, "abc")
    assert put(store, "abcdef") == Committed(stored=1, present=3, failed=2, prefix_tokens=16)
    assert coverage(store, "abcdef") == "abcd.."
    assert store.stats().evicted_chunks_total == 0


def test_nothing_is_evicted_for_a_chunk_larger_than_the_pool() -> None:
    store = make_store(20)
    put(store, "abcdefghijklmnopqrst")
    assert put(store, "X", make_spec(slots=1)).stored == 1
    assert put(store, "Y", make_spec(1, slots=21)) == Committed(0, 0, 1, 0)
    assert store.stats().evicted_chunks_total == 1
    assert put(store, "Y", make_spec(1, slots=12)).stored == 1
    assert store.stats().evicted_chunks_total == 13
    store.check()


def test_nothing_is_evicted_for_the_refused_tail() -> None:
    store = make_store(10)
    put(store, "abcd")
    lease(store, (OWNER, 1), "abcd")
    put(store, "uvwxyz")
    assert put(store, "12", make_spec(1, slots=4)) == Committed(stored=1, present=0, failed=1, prefix_tokens=4)
    assert coverage(store, "uvwxyz") == "uv....", "one chunk of four slots fits, so four go and not six"
    assert coverage(store, "abcd") == "abcd"


def test_nothing_is_evicted_for_what_fits_by_bytes_but_in_no_hole() -> None:
    store = make_store(8)
    for prompt in "abcdefgh":
        put(store, prompt)
    for number, prompt in enumerate("aceg"):
        lease(store, (OWNER, number), prompt)
    assert put(store, "xy", make_spec(1, slots=2)) == Committed(0, 0, 2, 0)
    assert store.stats().evicted_chunks_total == 0
    store.check()


@pytest.mark.parametrize("evict", [False, True])
def test_who_asks_for_free_room_only_gets_no_more_than_the_holes_have(evict: bool) -> None:
    store = make_store(8)
    prompts = "abcdefgh"
    for prompt in prompts:
        put(store, prompt)
    for prompt in prompts[::2]:
        store.drop(make_keys(prompt)[0])
    assert reserve(store, (OWNER, 1), "x", make_spec(1, slots=2), evict=evict).refused == (not evict)
    assert store.stats().num_chunks == (3 if evict else 4)
    assert reserve(store, (OWNER, 2), "y", evict=False).refused == 0
    assert store.stats().evicted_chunks_total == int(evict)
    store.check()


def make_cutting_store(held: str, *, slots: int = 8) -> HiddenStateStore:
    """Full of chunks a, b, c … of one slot, of which some are held; rows of others may be cut into pieces of a slot."""
    store = make_store(slots, least_piece_bytes=SLOT_BYTES)
    letters = [chr(ord("a") + i) for i in range(slots)]
    for letter in letters:
        put(store, letter)
    for letter in held:
        lease(store, (b"wall", ord(letter)), letter)
    return store


def test_rows_of_a_chunk_are_cut_where_no_hole_takes_all_of_them() -> None:
    store, memory, spec = make_cutting_store("aceg"), PoolMemory(8), make_spec(1, slots=2)
    memory.write(reserve(store, (OWNER, 1), "xy", spec).runs, (spec,), 7)
    store.check()
    assert store.commit((OWNER, 1)) == Committed(stored=2, present=0, failed=0, prefix_tokens=8)
    granted = lease(store, (OWNER, 2), "xy", (1,))
    assert granted.runs == tuple(Run(1, 2 * i, 2, (2 * i + 1) * SLOT_BYTES) for i in range(4))
    assert memory.read(granted.runs, granted.specs) == {(0, 1): 7, (1, 1): 7}
    store.check()
    for key in make_keys("xy"):
        store.drop(key)
    assert slots(store, "stranded") == 4
    store.release(OWNER, [2])
    assert (slots(store, "stranded"), slots(store, "free")) == (0, 4)
    store.check()


@pytest.mark.parametrize("held_slots", range(5))
def test_the_longest_head_that_cut_rows_take_is_placed(held_slots: int) -> None:
    store = make_cutting_store("aceg" + "bdfh"[:held_slots])
    done = put(store, "xyz", make_spec(1, slots=2))
    assert (done.stored, done.failed) == ((4 - held_slots) // 2, 3 - (4 - held_slots) // 2)
    assert store.stats().evicted_chunks_total == 2 * done.stored, "nothing goes for what is refused"
    store.check()


def test_a_row_is_never_cut() -> None:
    store = make_cutting_store("aceg")
    wide = make_spec(1, slots=8)  # two slots a row
    assert reserve(store, (OWNER, 1), [1], wide).refused == 1
    assert reserve(store, (OWNER, 2), [1, 2], wide).refused == 1
    assert store.stats().evicted_chunks_total == 0
    store.check()


def test_free_room_only_may_be_cut_room_too() -> None:
    store = make_cutting_store("")
    for letter in "bdfh":
        store.drop(make_keys(letter)[0])
    assert reserve(store, (OWNER, 1), "x", make_spec(1, slots=4), evict=False).refused == 0
    assert store.stats().evicted_chunks_total == 0
    store.check()
    store.release(OWNER, [1])
    assert slots(store, "free") == 4
    store.check()


def test_a_cut_chunk_goes_whole_and_comes_back_whole_when_not_all_of_it_is_needed() -> None:
    store = make_cutting_store("aceg")
    put(store, "x", make_spec(1, slots=2))  # in the places of b and d
    put(store, "y", make_spec(1, slots=2))  # in those of f and h
    assert put(store, "z", make_spec(2, slots=3)) == Committed(0, 0, 1, 0), "48 bytes of each row: one piece or none"
    assert (coverage(store, "x", 1), coverage(store, "y", 1)) == ("x", "y"), "both were vacated"
    store.check()
    assert put(store, "z").stored == 1
    assert (coverage(store, "x", 1), coverage(store, "y", 1)) == (".", "y")
    assert slots(store, "free") == 1
    store.check()


def test_two_writers_of_one_cut_chunk_leave_no_piece_behind() -> None:
    store, spec = make_cutting_store("aceg"), make_spec(1, slots=2)
    first, second = (reserve(store, (OWNER, i), "x", spec).runs for i in (1, 2))
    assert len(first) == len(second) == 2
    assert {run.offset for run in first}.isdisjoint(run.offset for run in second)
    assert [store.commit((OWNER, i)).stored for i in (2, 1)] == [1, 0]
    assert lease(store, (OWNER, 3), "x", (1,)).runs == second
    assert (slots(store, "reserved"), slots(store, "free")) == (0, 2)
    store.check()


def test_what_continues_a_cut_chunk_lies_behind_its_last_piece() -> None:
    store = make_cutting_store("aceg")
    put(store, "x", make_spec(1, slots=2))
    store.release(b"wall", [ord("e")])
    store.drop(make_keys("e")[0])
    put(store, "xy", make_spec(1, slots=2))
    assert lease(store, (OWNER, 1), "xy", (1,)).runs == (Run(1, 0, 2, SLOT_BYTES), Run(1, 2, 6, 3 * SLOT_BYTES))


@pytest.mark.parametrize("num_letters", [99, 100])
def test_room_is_made_for_rows_to_lie_together_as_long_as_little_lies_in_holes(num_letters: int) -> None:
    """Of 100 slots two may be in holes: room for one victim more than is needed, if two slots are."""
    store = make_store(100)
    for i in range(num_letters):
        put(store, chr(0x391 + i))
    for i in range(0, num_letters, 3):
        lease(store, (b"wall", i), chr(0x391 + i))
    before = store.stats().evicted_chunks_total
    put(store, "xy")
    assert len(lease(store, (OWNER, 1), "xy").runs) == 1
    assert store.stats().evicted_chunks_total - before == 2
    assert store.stats().free_bytes == (100 - num_letters) * SLOT_BYTES
    store.check()


def test_a_long_tail_that_no_hole_takes_is_refused_and_the_head_is_placed() -> None:
    store = make_store(16)
    for prompt in "abcdefghijklmnop":
        put(store, prompt)
    for number, prompt in enumerate("aceghikmo"):  # leaves b d f, and j l n p, each a hole of one
        lease(store, (OWNER, number), prompt)
    store.drop(make_keys("i")[0])
    store.release(OWNER, [5])  # i is dropped: i and j make a hole of two
    assert put(store, "xyz", make_spec(1, slots=2)) == Committed(stored=1, present=0, failed=2, prefix_tokens=4)
    assert "".join(p for p in "abcdefghijklmnop" if coverage(store, p) == ".") == "ij"
    store.check()


@pytest.mark.parametrize("holes", range(7))
def test_the_longest_head_that_the_holes_take_is_placed(holes: int) -> None:
    store = make_store(18)
    letters = "abcdefghijklmnopqr"
    for prompt in letters:
        put(store, prompt)
    for number, prompt in enumerate(letters[::3]):
        lease(store, (OWNER, number), prompt)
    for number, prompt in enumerate(letters[3 * holes + 1 :: 3]):
        lease(store, (b"more", number), prompt)
    done = put(store, "uvwxyz", make_spec(1, slots=2))
    assert (done.stored, done.failed) == (holes, 6 - holes)
    store.check()


def test_its_own_tail_goes_for_what_fits_into_no_hole_and_its_head_stays() -> None:
    store = make_store(15)
    prompt = "abcdefghi"
    put(store, "abc")
    for i, spacer in enumerate("123456"):
        put(store, spacer)
        lease(store, (OWNER, i), spacer)
        put(store, prompt[: 4 + i])
    assert coverage(store, prompt) == prompt
    # Three chunks of two slots would fit by bytes, but only b and c are neighbours.
    assert put(store, prompt, make_spec(1, slots=2)) == Committed(stored=1, present=0, failed=8, prefix_tokens=4)
    assert coverage(store, prompt, 0) == coverage(store, prompt, 1) == "a........"
    store.check()


def test_victims_that_turn_out_not_to_be_needed_stay() -> None:
    store = make_store(6)
    for prompt in "abcdef":
        put(store, prompt)
    lease(store, (OWNER, 1), "b")
    assert put(store, "x", make_spec(1, slots=2)).stored == 1
    assert "".join(p for p in "abcdef" if coverage(store, p) == ".") == "cd", "a was tried, but has no free neighbour"
    assert store.stats().evicted_chunks_total == 2
    store.check()


def test_what_continues_a_victim_goes_with_it_although_its_place_is_not_needed() -> None:
    store = make_store(3)
    put(store, "a", *BOTH)
    put(store, "ab")
    assert reserve(store, (OWNER, 1), "xy").runs == (Run(0, 0, 8, 0),)
    store.check()
    assert coverage(store, "ab") == "..", "b could never be served without a"
    assert slots(store, "free") == 1


@pytest.mark.parametrize("at_once", [True, False])
def test_two_layers_get_equal_coverage(at_once: bool) -> None:
    store = make_store(4)
    if at_once:
        assert put(store, "abc", *BOTH) == Committed(stored=2, present=0, failed=1, prefix_tokens=8)
    else:
        assert put(store, "abc", BOTH[0]) == Committed(stored=3, present=0, failed=0, prefix_tokens=12)
        assert put(store, "abc", BOTH[1]) == Committed(stored=2, present=0, failed=1, prefix_tokens=8)
    assert coverage(store, "abc", 0) == coverage(store, "abc", 1) == "ab."
    granted = lease(store, (OWNER, 1), "abc", (0, 1))
    assert (granted.num_tokens, granted.specs) == (8, BOTH)
    assert {(run.layer_idx, run.start_token) for run in granted.runs} >= {(0, 0), (1, 0)}
    store.check()


@pytest.mark.parametrize("at_once", [True, False])
def test_layers_of_different_width(at_once: bool) -> None:
    store = make_store(12)
    specs = (make_spec(-1, slots=3, dtype="float32"), make_spec(7))
    for part in [specs] if at_once else [specs[:1], specs[1:]]:
        put(store, "abcd", *part)
        store.check()
    assert coverage(store, "abcd", -1) == coverage(store, "abcd", 7) == "abc."
    granted = lease(store, (OWNER, 1), "abcd", (7, -1))
    assert granted.specs == specs[::-1]
    assert sum(run.num_tokens for run in granted.runs if run.layer_idx == 7) == granted.num_tokens == 12


def test_the_tail_of_its_own_prefix_goes_last_and_only_when_it_is_not_held() -> None:
    store = make_store(4)
    put(store, "abc")
    put(store, "x")
    assert put(store, "abc", BOTH[1]) == Committed(stored=2, present=0, failed=1, prefix_tokens=8)
    assert (coverage(store, "abc"), coverage(store, "x")) == ("ab.", ".")
    store = make_store(4)
    put(store, "abc")
    lease(store, (OWNER, 1), "abc")
    assert put(store, "abc", BOTH[1]) == Committed(stored=1, present=0, failed=2, prefix_tokens=4)
    assert coverage(store, "abc") == "abc"


def test_its_own_tail_goes_for_a_missing_head() -> None:
    store = make_store(4)
    put(store, "abcd")
    store.drop(make_keys("a")[0])
    put(store, "x")
    lease(store, (OWNER, 1), "x")
    assert put(store, "abcd") == Committed(stored=1, present=2, failed=1, prefix_tokens=12)
    assert coverage(store, "abcd") == "abc."
    store.check()


def test_another_spec_is_refused_before_anything_changes() -> None:
    store = make_store(4)
    put(store, "abcd")
    before = store.stats()
    for spec in (make_spec(0, slots=2), make_spec(0, dtype="float16")):
        with pytest.raises(ValueError, match=f"layer 0 came with hidden_dim {spec.hidden_dim} and dtype {spec.dtype}"):
            reserve(store, (OWNER, 1), "xyz", BOTH[1], spec)
        assert store.stats() == before
        assert coverage(store, "abcd") == "abcd"
        store.check()
    assert reserve(store, (OWNER, 1), "x", BOTH[0]).refused == 0, "the id was not used up"


def test_specs_are_per_key_space() -> None:
    store = make_store(8)
    put(store, "a")
    reserve(store, (OWNER, 1), "a", make_spec(0, slots=2), salt="another")
    assert store.commit((OWNER, 1)).stored == 1
    store.check()


@pytest.mark.parametrize("how", ["drop", "evict", "kv", "abort", "owner gone"])
def test_a_spec_is_forgotten_with_the_last_that_uses_it(how: str) -> None:
    store = make_store(4)
    other = make_spec(0, slots=2)
    if how in ("abort", "owner gone"):
        reserve(store, (OWNER, 1), "ab")
    else:
        put(store, "ab")
    with pytest.raises(InvalidInputError):
        reserve(store, (OWNER, 9), "x", other)
    if how == "drop":
        assert [store.drop(key) for key in make_keys("ab")] == [True, True]
    elif how == "evict":
        put(store, "xyzw", BOTH[1])
        for key in make_keys("xyzw"):
            store.drop(key)
    elif how == "kv":
        lease(store, (OWNER, 1), "ab", presence=[ABSENT, ABSENT])
    elif how == "abort":
        store.release(OWNER, [1])
    else:
        assert store.release_owner(OWNER) == 1
    store.check()
    assert put(store, "x", other).stored == 1
    store.check()


def test_two_writers_of_one_key_the_first_commit_wins() -> None:
    store, memory = make_store(8), PoolMemory(8)
    runs = {}
    for writer in (1, 2):
        runs[writer] = reserve(store, (OWNER, writer), "abc").runs
        memory.write(runs[writer], BOTH, writer)
    assert slots(store, "reserved") == 6
    assert store.commit((OWNER, 2)) == Committed(stored=3, present=0, failed=0, prefix_tokens=12)
    assert store.commit((OWNER, 1)) == Committed(stored=0, present=3, failed=0, prefix_tokens=12)
    assert (slots(store, "resident"), slots(store, "free")) == (3, 5)
    granted = lease(store, (OWNER, 3), "abc")
    assert granted.runs == runs[2]
    assert set(memory.read(granted.runs, granted.specs).values()) == {2}
    store.check()


def test_two_writers_of_different_layers_make_one_chunk() -> None:
    store = make_store(8)
    reserve(store, (OWNER, 0), "ab", BOTH[0])
    reserve(store, (OWNER, 1), "ab", BOTH[1])
    assert store.commit((OWNER, 1)).stored == 2
    assert store.commit((OWNER, 0)).stored == 2
    assert store.stats().num_chunks == 2
    assert lease(store, (OWNER, 2), "ab", (0, 1)).num_tokens == 8
    store.check()


def test_present_chunks_are_held_until_the_commit() -> None:
    store = make_store(4)
    put(store, "ab")
    reserve(store, (OWNER, 1), "abc")
    assert put(store, "xyz") == Committed(stored=1, present=0, failed=2, prefix_tokens=4)
    assert coverage(store, "ab") == "ab"
    assert store.commit((OWNER, 1)) == Committed(stored=1, present=2, failed=0, prefix_tokens=12)
    assert put(store, "wxyz").stored == 4
    assert coverage(store, "abc") == "..."
    store.check()


def test_a_layer_whose_partner_was_dropped_meanwhile_is_not_committed_alone() -> None:
    store = make_store(8)
    put(store, "ab", BOTH[0])
    reserve(store, (OWNER, 1), "ab", *BOTH)
    store.drop(make_keys("ab")[1])
    assert store.commit((OWNER, 1)) == Committed(stored=1, present=0, failed=1, prefix_tokens=4)
    assert (coverage(store, "ab", 0), coverage(store, "ab", 1)) == ("a.", "a.")
    assert (slots(store, "resident"), slots(store, "free")) == (2, 6)
    store.check()


def test_aborting_a_reservation_gives_its_memory_back() -> None:
    store = make_store(4)
    put(store, "a")
    reserve(store, (OWNER, 1), "abc")
    store.release(OWNER, [1])
    assert (slots(store, "reserved"), slots(store, "free")) == (0, 3)
    with pytest.raises(StaleIncarnationError):
        store.commit((OWNER, 1))
    assert coverage(store, "abc") == "a.."
    store.check()


@pytest.mark.parametrize("calls_that_work", [0, 1])
def test_a_reserve_that_fails_halfway_leaves_nothing_held(
    calls_that_work: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(8)
    put(store, "ab")
    before = store.stats()
    allocator = store._table._allocator
    genuine, calls = allocator.allocate_together, list[None]()

    def allocate_together(sizes: Sequence[int], *, after: int | None = None) -> list[Extent] | None:
        calls.append(None)
        if len(calls) > calls_that_work:
            raise MemoryError("no room for the index itself")
        return genuine(sizes, after=after)

    monkeypatch.setattr(allocator, "allocate_together", allocate_together)
    with pytest.raises(MemoryError):
        reserve(store, (OWNER, 1), "abcd", *BOTH)
    monkeypatch.undo()
    store.release(OWNER, [1])  # as a client does after any error
    store.check()
    assert store.stats() == before
    assert put(store, "12345678") == Committed(stored=8, present=0, failed=0, prefix_tokens=32), "a and b can go"
    assert put(store, "x", make_spec(1, slots=2)).stored == 1, "no use of layer 1 is left behind"
    store.check()


def test_a_release_that_arrives_first_refuses_the_grant_once() -> None:
    store = make_store(4)
    put(store, "ab")
    store.release(OWNER, [1, 2])
    assert store.lease((OWNER, 1), make_keys("ab"), (0,)).keys == ()
    assert store.settle((OWNER, 1), []) == NOTHING
    assert reserve(store, (OWNER, 2), "abcd") == Reserved((), 4)
    assert (store.stats().num_leases, store.stats().num_reservations) == (0, 0)
    assert lease(store, (OWNER, 1), "ab").num_tokens == 8, "a tombstone is for one grant"
    assert reserve(store, (b"other", 2), "abc").refused == 0
    store.check()


def test_a_release_while_kv_is_being_asked_ends_the_lease() -> None:
    store = make_store(4)
    put(store, "ab")
    assert len(store.lease((OWNER, 1), make_keys("ab"), (0,)).keys) == 2
    store.release(OWNER, [1])
    assert store.settle((OWNER, 1), [PRESENT, ABSENT]) == NOTHING
    assert coverage(store, "ab") == "ab"
    assert store.stats().leased_bytes == 0


def test_end_leaves_no_tombstone() -> None:
    store = make_store(4)
    put(store, "ab")
    store.end((OWNER, 1))
    assert lease(store, (OWNER, 1), "ab").num_tokens == 8
    store.end((OWNER, 1))
    assert store.stats().num_leases == 0


def test_an_id_in_use_is_refused_and_what_it_names_stays() -> None:
    store = make_store(8)
    put(store, "ab")
    lease(store, (OWNER, 1), "ab")
    reserve(store, (OWNER, 2), "xy")
    before = store.stats()
    for number in (1, 2):
        with pytest.raises(InvalidInputError, match=f"hold_id: {number} is already in use"):
            reserve(store, (OWNER, number), "pq")
        with pytest.raises(InvalidInputError, match=f"hold_id: {number} is already in use"):
            store.lease((OWNER, number), make_keys("ab"), (0,))
    assert store.stats() == before
    assert store.commit((OWNER, 2)).stored == 2


def test_ids_that_this_store_never_gave_are_refused() -> None:
    store = make_store(4)
    put(store, "ab")
    lease(store, (OWNER, 1), "ab")
    for hold in ((OWNER, 1), (OWNER, 7), (b"other", 1)):  # a lease, and two of a store that is gone
        with pytest.raises(StaleIncarnationError):
            store.commit(hold)
    assert store.settle((OWNER, 7), []) == NOTHING
    store.release(b"other", [1, 2, 3])
    assert store.stats().num_leases == 1
    store.check()


def test_a_client_that_is_gone_loses_all_its_holds_and_nothing_else() -> None:
    store = make_store(10)
    put(store, "abc")
    baseline = store.stats()
    reserve(store, (b"dead", 1), "abcde")
    lease(store, (b"dead", 2), "abc")
    store.lease((b"dead", 3), make_keys("ab"), (0,))
    store.release(b"dead", [9])
    reserve(store, (b"live", 1), "xy")
    assert store.release_owner(b"dead") == 3
    assert store.release_owner(b"dead") == 0
    store.check()
    assert store.commit((b"live", 1)).stored == 2
    assert (slots(store, "reserved"), slots(store, "leased"), slots(store, "resident")) == (0, 0, 5)
    assert lease(store, (b"dead", 9), "ab").num_tokens == 8, "its tombstones are gone too"
    store.release(b"dead", [9])
    for key in make_keys("xy"):
        store.drop(key)
    assert store.stats().free_bytes == baseline.free_bytes


def test_leased_rows_never_change_while_the_whole_pool_is_churned() -> None:
    store, memory = make_store(12), PoolMemory(12)
    memory.write(reserve(store, (OWNER, 1), "abc", *BOTH).runs, BOTH, 1)
    store.commit((OWNER, 1))
    granted = lease(store, (b"reader", 1), "abc", (0, 1))
    for write_id in range(2, 60):
        prompt = "".join(random.Random(write_id).choices("abcdefgh", k=6))
        if write_id == 20:
            store.drop(make_keys("abc")[0])
        memory.write(reserve(store, (OWNER, write_id), prompt, *BOTH).runs, BOTH, write_id)
        store.commit((OWNER, write_id))
        store.check()
        read = memory.read(granted.runs, granted.specs)
        assert len(read) == 6
        assert set(read.values()) == {1}
    assert store.stats().evicted_chunks_total > 50
    assert slots(store, "stranded") == 2
    store.release(b"reader", [1])
    assert slots(store, "stranded") == 0


def test_a_stored_run_comes_back_as_one_and_a_continuation_joins_it() -> None:
    store = make_store(16)
    put(store, "abc")
    put(store, "x")
    store.drop(make_keys("x")[0])
    put(store, "abcde")
    assert lease(store, (OWNER, 1), "abcde").runs == (Run(0, 0, 20, 0),)
    put(store, "y")
    put(store, "abcdef")
    assert lease(store, (OWNER, 2), "abcdef").runs == (Run(0, 0, 20, 0), Run(0, 20, 4, 6 * SLOT_BYTES))


def test_a_continuation_prefers_its_neighbour_to_a_hole_of_just_its_size() -> None:
    store = make_store(16)
    put(store, "w")
    put(store, "abc")
    store.drop(make_keys("w")[0])
    put(store, "abcd")
    assert lease(store, (OWNER, 1), "abcd").runs == (Run(0, 0, 16, SLOT_BYTES),)
    put(store, "v")
    assert lease(store, (OWNER, 2), "v").runs == (Run(0, 0, 4, 0),)


def test_each_of_two_layers_comes_back_as_one_run() -> None:
    store = make_store(16)
    put(store, "abc", make_spec(0), make_spec(1, slots=2))
    granted = lease(store, (OWNER, 1), "abc", (1, 0))
    assert granted.runs == (Run(1, 0, 12, 3 * SLOT_BYTES), Run(0, 0, 12, 0))


def test_a_full_pool_of_equal_prompts_still_gives_one_run() -> None:
    store = make_store(12)
    for i in range(20):
        put(store, chr(0x391 + i) + "abc")
        assert len(lease(store, (OWNER, i), chr(0x391 + i) + "abc").runs) == 1
        store.release(OWNER, [i])


def test_the_short_last_chunk_is_found_only_by_its_own_length() -> None:
    store = make_store(4)
    tokens = [*make_tokens("a"), 1, 2]
    assert reserve(store, (OWNER, 1), tokens).runs == (Run(0, 0, 6, 0),)
    assert store.commit((OWNER, 1)) == Committed(stored=2, present=0, failed=0, prefix_tokens=6)
    store.check()
    for count, expected in ((6, 6), (5, 4), (4, 4)):
        granted = lease(store, (OWNER, count), tokens[:count])
        assert (granted.num_tokens, granted.runs) == (expected, (Run(0, 0, expected, 0),))
    assert lease(store, (OWNER, 7), [*tokens, 3]).num_tokens == 4


def test_rows_behind_a_hole_use_free_room_and_evict_nothing() -> None:
    store = make_store(4)
    put(store, "xy")
    reserve(store, (OWNER, 1), "abcdef", first_chunk=2)
    assert store.commit((OWNER, 1)) == Committed(stored=2, present=0, failed=2, prefix_tokens=0)
    assert (coverage(store, "abcdef"), coverage(store, "xy")) == ("..cd..", "xy")
    store.check()
    assert put(store, "ab").stored == 2, "what is behind the hole goes before anything that can be served"
    assert (coverage(store, "abcdef"), coverage(store, "xy")) == ("ab....", "xy")


def test_a_head_without_this_layer_is_a_hole_for_it() -> None:
    store = make_store(4)
    put(store, "ab")
    put(store, "xy")
    assert put(store, "abc", BOTH[1], first_chunk=1) == Committed(stored=0, present=0, failed=2, prefix_tokens=0)
    assert coverage(store, "xy") == "xy"
    assert put(store, "abc", BOTH[0], first_chunk=2) == Committed(stored=1, present=0, failed=0, prefix_tokens=12)
    assert coverage(store, "xy") == "x."


# Where a prefix may begin on another node


def make_headless_store(slots: int) -> HiddenStateStore:
    store = make_store(slots)
    store.set_alone(False)
    return store


def test_rows_in_the_middle_of_a_prefix_get_room_like_others_where_its_head_may_be_elsewhere() -> None:
    store = make_headless_store(4)
    put(store, "xy")
    assert put(store, "abcdef", first_chunk=3) == Committed(stored=3, present=0, failed=0, prefix_tokens=0)
    assert (coverage(store, "abcdef"), coverage(store, "xy")) == ("...def", "x.")
    store.check()
    assert put(store, "abcdefgh", first_chunk=3) == Committed(stored=1, present=3, failed=1, prefix_tokens=0)
    assert (coverage(store, "abcdefgh"), coverage(store, "xy")) == ("...defg.", "..")
    store.check()


@pytest.mark.parametrize(("alone", "order"), [(True, "fedcyx"), (False, "yxfedc")])
def test_they_are_cold_only_where_nobody_could_have_the_head(alone: bool, order: str) -> None:
    store = make_store(6)
    store.set_alone(alone)
    put(store, "xy")
    put(store, "abcdef", first_chunk=2)
    store.check()
    assert evict_one_by_one(store, ["xy", "abcdef"], 6) == order


def test_several_runs_of_a_prefix_are_warmed_heads_last() -> None:
    store = make_headless_store(8)
    put(store, "abcdefgh")
    for position in (0, 3, 6):
        store.drop(make_keys("abcdefgh")[position])
    put(store, "xyz")
    store.check()
    put(store, "abcdefgh"[:1], first_chunk=1)  # touches nothing
    put(store, "abcdefgh", first_chunk=8)  # there as far as it goes, and now in use
    store.check()
    assert evict_one_by_one(store, ["abcdefgh", "xyz"], 8) == "zyxhfecb"


def test_a_read_of_the_middle_of_a_prefix_warms_it_and_what_it_continues() -> None:
    store = make_headless_store(8)
    put(store, "abcd")
    put(store, "pqrs", first_chunk=2)
    put(store, "xy")
    granted = lease(store, (OWNER, 1), "pqrstu", first_chunk=2)
    assert (granted.num_tokens, granted.runs, granted.ended_by) == (
        8,
        (Run(0, 8, 8, 4 * SLOT_BYTES),),
        "hidden_state",
    )
    granted = lease(store, (OWNER, 2), "abcd", first_chunk=2)
    assert (granted.num_tokens, granted.runs, granted.ended_by) == (8, (Run(0, 8, 8, 2 * SLOT_BYTES),), "")
    store.check()
    store.release(OWNER, [1, 2])
    assert evict_one_by_one(store, ["abcd", "pqrs", "xy"], 8) == "yxsrdcba"


def test_a_run_that_begins_at_its_own_end_or_at_a_hole_is_none() -> None:
    store = make_headless_store(8)
    put(store, "abcd", first_chunk=2)
    for first_chunk in (0, 1, 4):
        assert lease(store, (OWNER, first_chunk), "abcd", first_chunk=first_chunk) == NOTHING
    assert store.stats().num_leases == 0


def test_kv_that_is_absent_in_the_middle_of_a_run() -> None:
    store = make_headless_store(8)
    put(store, "abcdef", first_chunk=2)
    granted = lease(store, (OWNER, 1), "abcdef", first_chunk=2, presence=[PRESENT, PRESENT, ABSENT, PRESENT])
    assert (granted.num_tokens, granted.runs[0].start_token, granted.ended_by) == (8, 8, "kv_absent")
    assert coverage(store, "abcdef") == "..cd.f"
    store.check()


def test_a_node_that_is_alone_again_keeps_its_order_sound() -> None:
    store = make_headless_store(6)
    put(store, "abcdef", first_chunk=2)
    store.set_alone(True)
    store.check()
    assert put(store, "xyz").stored == 3
    store.check()
    assert coverage(store, "abcdef") == "..cde."
    assert put(store, "pqrs", first_chunk=2).stored == 0, "there is no room, and nothing is evicted for these"
    store.check()


# What has changed


def test_retiring_a_key_space_drops_its_chunks_and_no_others_and_readers_go_on() -> None:
    store = make_store(16)
    put(store, "abc", *BOTH)
    reserve(store, (OWNER, 1), "a", salt="another")
    store.commit((OWNER, 1))
    held = lease(store, (OWNER, 2), "ab")
    store.changed.clear()
    store.take_changes()
    assert store.spaces() == {make_space().fingerprint, make_space(salt="another").fingerprint}
    freed = retire(store, {make_space().fingerprint, b"never heard of"})
    assert freed == Freed(chunks=3, nbytes=6 * SLOT_BYTES, held_bytes=4 * SLOT_BYTES)
    assert coverage(store, "abc") == "..."
    assert store.contains(make_keys("a", salt="another")[0], 0)
    assert store.survey(make_keys("a"), (0,)).reasons == (RETIRED,)
    assert (slots(store, "stranded"), slots(store, "free")) == (4, 11)
    assert store.changed.is_set()
    assert store.take_changes() == dict.fromkeys(make_keys("abc"), False)
    store.check()
    assert held.num_tokens == 8
    store.release(OWNER, [2])
    assert (slots(store, "stranded"), slots(store, "free")) == (0, 15)
    assert store.spaces() == {make_space(salt="another").fingerprint}
    assert retire(store, {make_space().fingerprint}) == Freed()
    assert put(store, "abc").stored == 3, "who names it again may use it again"
    store.check()


def test_what_was_reserved_before_its_key_space_was_retired_never_becomes_visible() -> None:
    store = make_store(8)
    put(store, "a")
    reserve(store, (OWNER, 1), "abc")
    reserve(store, (OWNER, 2), "xy", salt="another")
    retire(store, {make_space().fingerprint})
    store.check()
    reserve(store, (OWNER, 3), "ab")
    assert store.commit((OWNER, 3)).stored == 2
    with pytest.raises(StaleRevisionError, match="connect again after the new weights are loaded"):
        store.commit((OWNER, 1))
    assert coverage(store, "abc") == "ab."
    assert store.commit((OWNER, 2)).stored == 2
    assert (slots(store, "reserved"), slots(store, "stranded"), slots(store, "free")) == (0, 0, 4)
    with pytest.raises(StaleIncarnationError):
        store.commit((OWNER, 1))
    store.check()


class Turns:
    """A lock that somebody else always gets first."""

    def __init__(self, first: Callable[[], object]) -> None:
        self._lock = threading.Lock()
        self._first = first
        self._is_mine = True

    def __enter__(self) -> None:
        if self._is_mine:
            self._is_mine = False
            self._first()
            self._is_mine = True
        self._lock.acquire()

    def __exit__(self, *_error: object) -> None:
        self._lock.release()


def test_others_get_their_turn_while_a_key_space_is_retired(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hs_cache.store._RETIRE_STEP", 2)
    store = make_store(8)
    put(store, "abcdefgh")
    keys = make_keys("abcdefgh")
    store._lock = Turns(lambda: store.drop(keys.pop()))  # type: ignore[assignment]
    freed = retire(store, {make_space().fingerprint})
    assert freed == Freed(4, 4 * SLOT_BYTES, 0)
    assert len(keys) == 3, "h before it began, then g, f and e, and d, which was gone"
    store.check()
    assert slots(store, "free") == 8


def test_a_lease_of_a_key_space_that_is_retired_while_kv_is_being_asked_is_a_miss() -> None:
    store = make_store(8)
    put(store, "ab")
    found = store.lease((OWNER, 1), make_keys("ab"), (0,))
    retire(store, {make_space().fingerprint})
    assert store.settle((OWNER, 1), [PRESENT] * len(found.keys)) == NOTHING
    assert slots(store, "free") == 8
    store.check()


def test_changes_over_a_snapshot_are_what_is_there() -> None:
    store = make_store(4)
    put(store, "ab")
    assert sorted(split_keys(store.snapshot())) == sorted(make_keys("ab"))
    assert store.take_changes() == {}
    put(store, "xyz")
    store.drop(make_keys("xy")[1])
    put(store, "a", BOTH[1])  # another layer of what is there is none
    a_, b = make_keys("ab")
    x, y, z = make_keys("xyz")
    assert store.take_changes() == {b: False, x: True, y: False, z: True}
    assert store.take_changes() == {}
    store.drop(z)
    assert store.snapshot() == b"".join([a_, x])
    assert store.take_changes() == {}


def test_must_copy_above_the_leased_fraction() -> None:
    store = make_store(8, max_leased_fraction=0.5)
    put(store, "abcdefgh")
    assert not lease(store, (OWNER, 1), "abcd").must_copy
    assert not lease(store, (OWNER, 2), "abcd").must_copy, "held twice is not more memory"
    assert lease(store, (OWNER, 3), "abcde").must_copy
    store.release(OWNER, [3])
    assert slots(store, "leased") == 4
    store.release(OWNER, [1, 2])
    assert slots(store, "leased") == 0


def test_found_tells_which_chunks_have_kv_on_this_node() -> None:
    store = make_store(4)
    reserve(store, (OWNER, 1), "a", kv_local=False)
    store.commit((OWNER, 1))
    reserve(store, (OWNER, 2), "ab", kv_local=True)
    store.commit((OWNER, 2))
    assert store.lease((OWNER, 3), make_keys("abc"), (0,)).kv_local == (False, True)
    reserve(store, (OWNER, 4), "a", BOTH[1], kv_local=True)
    store.commit((OWNER, 4))
    assert store.lease((OWNER, 5), make_keys("a"), (0,)).kv_local == (True,)


def test_an_empty_store_and_an_empty_prompt() -> None:
    store = make_store(4)
    assert put(store, "") == Committed(0, 0, 0, 0)
    assert lease(store, (OWNER, 1), "") == NOTHING
    store.check()


@pytest.mark.parametrize("damage", ["leak", "hold", "order", "count", "overlap", "piece"])
def test_check_finds_damage(damage: str) -> None:
    store = make_store(8)
    put(store, "abc")
    chunk = store._table._chunks[make_keys("a")[0]]
    if damage == "leak":
        store._table._allocator.allocate(SLOT_BYTES)
    elif damage == "hold":
        chunk.holds += 1
    elif damage == "order":
        store._table._order._parents.move_to_end(chunk.key, last=False)
    elif damage == "count":
        store._table.resident_bytes -= 1
    elif damage == "piece":
        spec, ((offset, nbytes),) = chunk.layers[0]
        chunk.layers[0] = (spec, (Extent(offset, nbytes // 2),))
    else:
        chunk.layers.update(store._table._chunks[make_keys("ab")[1]].layers)
    with pytest.raises(AssertionError):
        store.check()


def test_four_threads_on_one_store() -> None:
    """Writers and readers of shared prefixes in a pool too small for them; every row read is checked, twice."""
    store, memory = make_store(24), PoolMemory(24)
    specs = (make_spec(0), make_spec(1, slots=2))
    prompts = ["abcd", "abce", "abfgh", "xyz", "xyab", "q"]
    written: dict[int, str] = {}
    reads = [0] * 4

    def work(thread: int) -> None:
        chance, owner = random.Random(thread), b"thread %d" % thread
        for i in range(2000):
            prompt, write_id, layers = chance.choice(prompts), 4 * i + thread + 1, chance.choice([(0,), (1,), (0, 1)])
            mine = tuple(specs[layer] for layer in layers)
            written[write_id] = prompt
            memory.write(reserve(store, (owner, 2 * i), prompt, *mine).runs, mine, write_id)
            if chance.random() < 0.8:
                done = store.commit((owner, 2 * i))
                assert done.stored + done.present + done.failed == len(prompt)
            else:
                store.release(owner, [2 * i])
            prompt = chance.choice(prompts)
            found = store.lease((owner, 2 * i + 1), make_keys(prompt), layers)
            states = chance.choices([PRESENT, ABSENT, UNKNOWN], weights=[18, 1, 1], k=len(found.keys))
            granted = store.settle((owner, 2 * i + 1), states)
            first = memory.read(granted.runs, granted.specs)
            assert len(first) == granted.num_tokens // CHUNK_SIZE * len(granted.specs)
            for (chunk, _), origin in first.items():
                assert written[origin][: chunk + 1] == prompt[: chunk + 1]
            assert memory.read(granted.runs, granted.specs) == first
            reads[thread] += len(first)
            store.end((owner, 2 * i + 1))
            if i % 100 == 99:
                store.check()

    failures: list[BaseException] = []

    def guarded(thread: int) -> None:
        try:
            work(thread)
        except BaseException as error:
            failures.append(error)
            raise

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=guarded, args=(thread,)) for thread in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not failures
    assert min(reads) > 100
    store.check()
    stats = store.stats()
    assert stats.evicted_chunks_total > 100
    assert (stats.reserved_bytes, stats.stranded_bytes, stats.leased_bytes, stats.num_leases) == (0, 0, 0, 0)


def keep(
    store: HiddenStateStore, hold: HoldId, prompt: str, *specs: LayerSpec, replace_only: bool = False
) -> Committed:
    """Reserve what replaces and, usually, is kept; commit."""
    store.reserve(
        hold,
        space=make_space().fingerprint,
        keys=make_keys(prompt),
        num_tokens=len(prompt) * CHUNK_SIZE,
        first_chunk=0,
        specs=specs or (make_spec(),),
        kv_local=False,
        replace=replace_only,
        keep=not replace_only,
    )
    return store.commit(hold)


def test_what_is_kept_is_not_evicted_and_goes_with_its_hold() -> None:
    store = make_store(4)
    empty = store.stats()
    assert keep(store, (OWNER, 1), "a").stored == 1
    assert (store.stats().num_kept, store.stats().num_reservations) == (1, 0)
    assert put(store, "wxyz").stored == 3
    assert put(store, "uvst").stored == 3
    assert coverage(store, "a") == "a"
    store.check()
    store.release(OWNER, [1])
    assert coverage(store, "a") == "."
    store.check()
    for key in make_keys("uvst"):
        store.drop(key)
    assert store.stats().free_bytes == empty.free_bytes
    assert store.stats().num_kept == 0


@pytest.mark.parametrize("end", ["drop", "release", "release_owner", "end", "kv_absent", "replaced"])
def test_every_end_of_what_is_kept(end: str) -> None:
    store = make_store(4)
    empty = store.stats()
    hold = (OWNER, 1)
    keep(store, hold, "a")
    (key,) = make_keys("a")
    if end == "drop":
        assert store.drop(key)
        assert not store.drop(key)
    elif end == "release":
        store.release(OWNER, [1])
    elif end == "release_owner":
        assert store.release_owner(OWNER) == 1
    elif end == "end":
        store.end(hold)
    elif end == "kv_absent":
        lease(store, (OWNER, 2), "a", presence=[Presence.ABSENT])
    else:
        assert keep(store, (OWNER, 2), "a").stored == 1
        assert store.stats().num_kept == 1
        store.check()
        store.release(OWNER, [1])  # a release of what is no longer there
        assert coverage(store, "a") == "a"
        store.release(OWNER, [2])
    store.check()
    assert coverage(store, "a") == "."
    stats = store.stats()
    assert (stats.free_bytes, stats.num_kept, stats.num_chunks) == (empty.free_bytes, 0, 0)
    with pytest.raises(StaleIncarnationError):
        store.commit(hold)


def test_what_is_kept_and_dropped_stays_for_who_leases_it() -> None:
    store = make_store(4)
    keep(store, (OWNER, 1), "a")
    granted = lease(store, (b"reader", 1), "a")
    assert store.drop(make_keys("a")[0], space=make_space().fingerprint)
    store.check()
    assert store.stats().stranded_bytes == SLOT_BYTES
    memory = PoolMemory(4)
    memory.write(granted.runs, granted.specs, 5)
    assert put(store, "wxyz").stored == 3
    store.check()
    store.release(b"reader", [1])
    assert store.stats().stranded_bytes == 0
    store.check()


def test_drop_of_another_key_space_changes_nothing() -> None:
    store = make_store(4)
    keep(store, (OWNER, 1), "a")
    assert not store.drop(make_keys("a")[0], space=bytes(16))
    assert coverage(store, "a") == "a"
    store.check()


@pytest.mark.parametrize("replace_only", [True, False])
def test_a_replacement_takes_the_place_in_one_step(replace_only: bool) -> None:
    store = make_store(8)
    put(store, "ab", make_spec(0), make_spec(1))
    reader = lease(store, (b"reader", 1), "a")
    hold = (OWNER, 1)
    reserved = store.reserve(
        hold,
        space=make_space().fingerprint,
        keys=make_keys("a"),
        num_tokens=CHUNK_SIZE,
        first_chunk=0,
        specs=(make_spec(),),
        kv_local=False,
        replace=replace_only,
        keep=not replace_only,
    )
    assert len(reserved.runs) == 1
    assert reserved.runs != reader.runs
    assert coverage(store, "a", 1) == "a"
    done = store.commit(hold)
    assert (done.stored, done.present, done.failed) == (1, 0, 0)
    assert (coverage(store, "a", 0), coverage(store, "a", 1)) == ("a", ".")
    assert lease(store, (b"reader", 2), "a").runs == reserved.runs
    store.check()
    assert store.stats().num_kept == (0 if replace_only else 1)
    store.release_owner(b"reader")
    store.check()


def test_what_does_not_fit_is_not_kept() -> None:
    store = make_store(2)
    keep(store, (OWNER, 1), "ab")
    done = keep(store, (OWNER, 2), "c")
    assert (done.stored, done.failed) == (0, 1)
    assert coverage(store, "ab") == "ab"
    assert store.stats().num_kept == 2
    store.check()


@pytest.mark.parametrize("fits", [True, False])
@pytest.mark.parametrize("leased", [True, False])
def test_what_is_replaced_goes_first_where_there_is_no_room_for_both(fits: bool, leased: bool) -> None:
    store = make_store(4)
    keep(store, (OWNER, 1), "a", make_spec(slots=3))
    keep(store, (OWNER, 2), "b", make_spec(1))
    if leased:
        lease(store, (b"reader", 1), "a")
    space = make_space(salt="later").fingerprint  # a layer has one spec per key space
    options = {"num_tokens": CHUNK_SIZE, "first_chunk": 0, "kv_local": False, "keep": True}
    specs = (make_spec(slots=3 if fits else 4),)
    reserved = store.reserve((OWNER, 3), space=space, keys=make_keys("a"), specs=specs, **options)  # type: ignore[arg-type]
    store.check()
    assert bool(reserved.runs) == (fits and not leased)
    assert reserved.refused == 1 - bool(reserved.runs)
    assert coverage(store, "a") == ".", "it is out of date in any case"
    assert coverage(store, "b", 1) == "b"
    assert store.commit((OWNER, 3)).stored == 1 - reserved.refused
    store.check()
    assert store.stats().num_kept == 2 - reserved.refused
    assert store.space_of(make_keys("a")[0]) == (b"" if reserved.refused else space)


def test_what_another_writes_is_given_up_by_its_caller() -> None:
    store = make_store(4)
    empty = store.stats()
    options = {"space": make_space().fingerprint, "keys": make_keys("a"), "num_tokens": CHUNK_SIZE, "first_chunk": 0}
    options |= {"specs": (make_spec(),), "kv_local": False, "caller": (OWNER, 7)}
    store.release(OWNER, [7])
    with pytest.raises(StaleIncarnationError, match="given up"):
        store.reserve((b"node", 1), **options)  # type: ignore[arg-type]
    assert store.stats() == empty
    store.reserve((b"node", 2), **options)  # type: ignore[arg-type]
    before = store.stats()
    store.release(OWNER, [7])
    store.release_owner(OWNER)
    assert store.stats() == before, "its memory is still being written"
    store.check()
    with pytest.raises(StaleIncarnationError, match="given up"):
        store.commit((b"node", 2))
    store.check()
    assert store.stats() == empty
    store.reserve((b"node", 3), **options)  # type: ignore[arg-type]
    assert store.commit((b"node", 3)).stored == 1
    store.release(OWNER, [7])  # too late
    assert coverage(store, "a") == "a"


def test_tombstones_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hs_cache.store._MAX_TOMBSTONES", 8)
    store = make_store(4)
    put(store, "a")
    for number in range(100):
        store.release(bytes([number]), range(3))
        store.check()
    assert lease(store, (bytes([99]), 2), "a") == NOTHING
    assert lease(store, (bytes([0]), 0), "a").num_tokens == CHUNK_SIZE


def test_a_key_that_is_named_twice_is_kept_once() -> None:
    store = make_store(4)
    (key,) = make_keys("a")
    hold = (OWNER, 1)
    options = {"num_tokens": 2 * CHUNK_SIZE, "first_chunk": 0, "specs": (make_spec(),), "kv_local": False, "keep": True}
    store.reserve(hold, space=make_space().fingerprint, keys=[key, key], **options)  # type: ignore[arg-type]
    store.commit(hold)
    store.check()
    assert store.stats().num_kept == 1
    store.release(OWNER, [1])
    store.check()
    assert store.stats().free_bytes == store.stats().capacity_bytes


def test_why_it_went_is_not_remembered() -> None:
    store = make_store(4)
    keep(store, (OWNER, 1), "a")
    store.drop(make_keys("a")[0])
    assert store.survey(make_keys("a"), (0,)).reasons == (NEVER_STORED,)
