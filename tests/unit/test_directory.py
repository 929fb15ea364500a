"""Membership and Directory: against a plain dict, in exact order, and with a million keys."""

import random
import time
import tracemalloc
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hs_cache import directory as module
from hs_cache.directory import Directory, Member, Membership, Segment
from hs_cache.errors import InvalidInputError
from hs_cache.keys import KEY_BYTES


def key(number: int) -> bytes:
    return number.to_bytes(KEY_BYTES, "little")


def blob(*numbers: int) -> bytes:
    return b"".join(map(key, numbers))


def make_directory(**held: tuple[int, ...]) -> Directory:
    """Nodes that have sent all they hold, as batch 1 of incarnation ``b"i"``."""
    directory = Directory()
    for node_id, numbers in held.items():
        directory.replace(node_id, b"i", 1, blob(*numbers))
    return directory


# Membership


def test_membership_counts_what_is_news() -> None:
    membership = Membership()
    assert (membership.version, membership.members(), membership.get("a")) == (0, (), None)
    assert membership.join("b", b"1")
    assert membership.join("a", b"2")
    assert not membership.join("a", b"2")
    assert (membership.version, membership.members()) == (2, (Member("a", b"2"), Member("b", b"1")))
    assert membership.join("a", b"3"), "a restarted actor has another pool"
    assert membership.get("a") == Member("a", b"3")
    assert membership.leave("b")
    assert not membership.leave("b")
    assert (membership.version, membership.members()) == (4, (Member("a", b"3"),))


# Batches


def test_a_batch_out_of_its_turn_changes_nothing() -> None:
    directory = make_directory(a=(1, 2))
    for incarnation, number in ((b"i", 1), (b"i", 3), (b"i", 0), (b"j", 2)):
        assert not directory.apply("a", incarnation, number, blob(3), blob(1))
    assert not directory.apply("b", b"i", 1, blob(3), b""), "nobody knows what it had before"
    assert directory.locate(blob(1, 2, 3)) == (Segment("a", 0, 2),)
    assert directory.nodes == {"a"}
    assert directory.apply("a", b"i", 2, blob(3), blob(1))
    assert directory.locate(blob(2, 3)) == (Segment("a", 0, 2),)
    assert directory.locate(blob(1)) == ()
    directory.check()


def test_all_of_a_node_that_arrives_late_does_not_undo_what_came_after_it() -> None:
    directory = Directory()
    directory.replace("a", b"i", 7, blob(1))
    assert directory.apply("a", b"i", 8, blob(2), b"")
    for number in (6, 7, 8):
        directory.replace("a", b"i", number, blob(9))
    assert directory.locate(blob(1, 2, 9)) == (Segment("a", 0, 2),)
    assert directory.apply("a", b"i", 9, blob(3), b"")
    directory.replace("a", b"j", 1, blob(9))  # a restarted actor starts from 1
    assert directory.locate(blob(1)) == ()
    assert directory.locate(blob(9)) == (Segment("a", 0, 1),)
    directory.check()


@pytest.mark.parametrize("bad", [b"x", "text", bytearray(16), None], ids=str)
def test_keys_that_are_none_are_refused_before_anything_changes(bad: object) -> None:
    directory = make_directory(a=(1,))
    for call in (
        lambda: directory.apply("a", b"i", 2, bad, blob(1)),  # type: ignore[arg-type]
        lambda: directory.apply("a", b"i", 2, blob(2), bad),  # type: ignore[arg-type]
        lambda: directory.replace("a", b"i", 2, bad),  # type: ignore[arg-type]
        lambda: directory.locate(bad),  # type: ignore[arg-type]
    ):
        with pytest.raises(InvalidInputError, match="keys: got"):
            call()
    assert directory.locate(blob(1)) == (Segment("a", 0, 1),)
    assert directory.apply("a", b"i", 2, b"", b""), "the number was not used up"


# Where a prefix is


def test_a_prefix_over_several_nodes_is_named_in_as_few_segments_as_a_greedy_choice_makes() -> None:
    directory = make_directory(a=(1, 2, 3), b=(3, 4, 5, 6), c=(1, 2), d=(6, 7))
    assert directory.locate(blob(1, 2, 3, 4, 5, 6, 7)) == (
        Segment("a", 0, 3),
        Segment("b", 3, 3),
        Segment("d", 6, 1),
    )
    assert directory.locate(blob(4, 5, 9, 6)) == (Segment("b", 0, 2),), "it ends at the first hole"
    assert directory.locate(blob(9, 1)) == ()
    assert directory.locate(b"") == ()


def test_nodes_that_have_been_asked_are_not_named() -> None:
    directory = make_directory(a=(1, 2, 3), b=(1, 2), c=(1,))
    assert directory.locate(blob(1, 2, 3), without=["a"]) == (Segment("b", 0, 2),)
    assert directory.locate(blob(1, 2, 3), without=("b", "a", "nobody")) == (Segment("c", 0, 1),)
    assert directory.locate(blob(1, 2, 3), without={"a", "b", "c"}) == ()
    directory.remove("a")
    assert directory.locate(blob(1, 2, 3), without=["a", "c"]) == (Segment("b", 0, 2),)


def test_several_nodes_that_have_a_segment_are_named_in_turn() -> None:
    directory = make_directory(a=(1, 2), b=(1, 2), c=(1, 2), d=(1,))
    named = [directory.locate(blob(1, 2))[0].node_id for _ in range(9)]
    assert Counter(named) == {"a": 3, "b": 3, "c": 3}
    assert named[:3] == named[3:6] == named[6:], "one after the other"
    again = make_directory(a=(1, 2), b=(1, 2), c=(1, 2), d=(1,))
    assert [again.locate(blob(1, 2))[0].node_id for _ in range(9)] == named, "and always in the same order"
    without_one = [directory.locate(blob(1, 2), without=[named[0]])[0].node_id for _ in range(4)]
    assert Counter(without_one) == dict.fromkeys({"a", "b", "c"} - {named[0]}, 2)


# Nodes that go


def test_each_key_is_found_by_itself() -> None:
    directory = make_directory(a=(1, 2), b=(2, 5))
    assert directory.where(blob(1, 9, 5, 1)) == ("a", "", "b", "a")
    assert directory.where(blob(2))[0] in ("a", "b")
    assert directory.where(b"") == ()
    directory.remove("b")
    assert directory.where(blob(5, 2)) == ("", "a")


def test_a_node_that_is_gone_is_not_named_and_what_only_it_had_is_forgotten_in_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_SWEEP_STEP", 2)
    directory = make_directory(a=tuple(range(7)), b=(0, 1))
    directory.remove("a")
    directory.remove("a")
    assert directory.nodes == {"b"}
    assert directory.locate(blob(2)) == ()
    assert directory.locate(blob(0, 1, 2)) == (Segment("b", 0, 2),)
    assert len(directory) == 7
    lengths = []
    for number in range(2, 7):
        assert directory.apply("b", b"i", number, b"", b"")
        directory.check()
        lengths.append(len(directory))
    assert lengths == [5, 3, 2, 2, 2], "a batch cleans two keys, besides those it names"


def test_a_node_that_comes_back_while_it_is_being_forgotten_has_only_what_it_has_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_SWEEP_STEP", 1)
    directory = make_directory(a=(1, 2, 3, 4, 5, 6), b=(1,))
    directory.remove("a")
    assert directory.apply("b", b"i", 2, blob(6), b"")
    directory.replace("a", b"j", 1, blob(2))
    for number in range(3, 20):
        assert directory.locate(blob(2, 3)) == (Segment("a", 0, 1),)
        assert directory.locate(blob(6)) == (Segment("b", 0, 1),)
        directory.check()
        assert directory.apply("b", b"i", number, b"", b"")
    assert len(directory) == 3


def test_places_are_used_again() -> None:
    directory = make_directory(a=(1, 2), b=(2, 3))
    for number in range(2, 500):
        directory.replace("a", b"i", number, blob(number))
        if number % 7 == 0:
            directory.remove("b")
            directory.replace("b", b"i", number, blob(1, number))
    directory.check()
    assert max(directory._bits.values()).bit_length() < 16, "bit sets stay small"
    assert len(directory) == 3


def test_sharing_bit_sets_takes_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_SHARED", 8)
    chance = random.Random(1)
    directory = make_directory(**{f"n{i}": tuple(chance.sample(range(50), 25)) for i in range(12)})
    for number in range(2, 200):
        for node_id in sorted(directory.nodes):
            assert directory.apply(node_id, b"i", number, blob(chance.randrange(50)), blob(50 + chance.randrange(9)))
    assert len(directory._shared) <= 9
    directory.check()


NODES = st.sampled_from(["a", "b", "c", "d"])
KEYS = st.lists(st.integers(0, 11), max_size=8, unique=True)
INCARNATIONS = st.sampled_from([b"i", b"j"])


class DirectoryMachine(RuleBasedStateMachine):
    """Against what each node holds, as sets."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Directory()
        self.held: dict[str, set[int]] = {}
        self.last: dict[str, tuple[bytes, int]] = {}
        self.step = module._SWEEP_STEP

    @initialize(step=st.sampled_from([0, 1, 3, 100]))
    def sweep_in_steps_of(self, step: int) -> None:
        module._SWEEP_STEP = step

    def teardown(self) -> None:
        module._SWEEP_STEP = self.step

    @rule(node=NODES, incarnation=INCARNATIONS, ahead=st.integers(-2, 3), keys=KEYS)
    def replace(self, node: str, incarnation: bytes, ahead: int, keys: list[int]) -> None:
        last_incarnation, last = self.last.get(node, (incarnation, 0))
        number = last + ahead
        self.directory.replace(node, incarnation, number, blob(*keys))
        if node not in self.last or incarnation != last_incarnation or number > last:
            self.held[node], self.last[node] = set(keys), (incarnation, number)

    @rule(node=NODES, added=KEYS, removed=KEYS)
    def apply(self, node: str, added: list[int], removed: list[int]) -> None:
        if node in self.last:
            incarnation, number = self.last[node]
            assert self.directory.apply(node, incarnation, number + 1, blob(*added), blob(*removed))
            self.held[node] = self.held[node] - set(removed) | set(added)
            self.last[node] = (incarnation, number + 1)

    @rule(node=NODES, incarnation=INCARNATIONS, number=st.integers(0, 9), keys=KEYS)
    def apply_anything(self, node: str, incarnation: bytes, number: int, keys: list[int]) -> None:
        is_next = self.last.get(node) == (incarnation, number - 1)
        assert self.directory.apply(node, incarnation, number, blob(*keys), b"") == is_next
        if is_next:
            self.held[node] |= set(keys)
            self.last[node] = (incarnation, number)

    @rule(node=NODES)
    def remove(self, node: str) -> None:
        self.directory.remove(node)
        self.held.pop(node, None)
        self.last.pop(node, None)

    @rule(keys=st.lists(st.integers(0, 11), max_size=12), without=st.sets(NODES))
    def locate(self, keys: list[int], without: set[str]) -> None:
        segments = self.directory.locate(blob(*keys), without=without)
        first = 0
        for segment in segments:
            assert segment.first == first
            assert segment.num_chunks == max(self.run(node, keys, first) for node in self.held if node not in without)
            assert segment.num_chunks == self.run(segment.node_id, keys, first) > 0
            assert segment.node_id not in without
            first += segment.num_chunks
        if first < len(keys):
            assert not any(keys[first] in held for node, held in self.held.items() if node not in without)

    @rule(keys=st.lists(st.integers(0, 11), max_size=12))
    def holders(self, keys: list[int]) -> None:
        runs = {node: self.run(node, keys, 0) for node in self.held}
        assert self.directory.holders(blob(*keys)) == {node: count for node, count in runs.items() if count}

    def run(self, node: str, keys: list[int], first: int) -> int:
        there = [number in self.held[node] for number in keys[first:]]
        return there.index(False) if False in there else len(there)

    @invariant()
    def it_is_sound(self) -> None:
        self.directory.check()
        assert self.directory.nodes == set(self.held)
        assert len(self.directory) >= len(set().union(*self.held.values()))


TestDirectoryMachine = DirectoryMachine.TestCase
TestDirectoryMachine.settings = settings(max_examples=100, stateful_step_count=40)


# Size


def test_a_million_keys_take_160_bytes_each_and_their_node_goes_at_once() -> None:
    chance = random.Random(5)
    whole = chance.randbytes(1_000_000 * KEY_BYTES)
    half = whole[: len(whole) // 2]
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        directory = Directory()
        directory.replace("a", b"i", 1, whole)
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert len(directory) == 1_000_000
    assert taken <= 160 * 1_000_000, f"{taken / 1e6:.0f} bytes a key"
    begun = time.process_time()
    directory.replace("b", b"i", 1, half)
    publishing_s = time.process_time() - begun
    begun = time.process_time()
    for node_id in ("a", "b", "a"):
        directory.remove(node_id)
    assert time.process_time() - begun < publishing_s / 100
    assert directory.locate(whole[:KEY_BYTES]) == ()
    # What is left of them goes in steps that hold nobody up.
    directory.replace("c", b"i", 1, b"")
    number = 1
    while len(directory):
        number += 1
        begun = time.process_time()
        assert directory.apply("c", b"i", number, b"", b"")
        assert time.process_time() - begun < publishing_s
    assert number < 2 + 1_000_000 / module._SWEEP_STEP + 1
    directory.check()
