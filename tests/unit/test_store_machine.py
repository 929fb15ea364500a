"""A random life of one HiddenStateStore, against a dict that knows which write every chunk's rows must be from.

The store may forget (a miss), it may never give other rows: those of another chunk, of a loser of two writers, torn
ones, or ones that are overwritten while somebody holds them.
"""

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from hs_cache.chunks import LEAST_PIECE_BYTES
from hs_cache.errors import StaleIncarnationError, StaleRevisionError
from hs_cache.kv_presence import Presence
from hs_cache.messages import LayerSpec, Run, split_keys
from hs_cache.store import HoldId
from tests.builders import (
    CHUNK_SIZE,
    SLOT_BYTES,
    PoolMemory,
    make_keys,
    make_space,
    make_spec,
    make_store,
    make_tokens,
    retire,
)

POOL_SLOTS = 12
SPECS = (make_spec(0), make_spec(1, slots=2))

# Few prompts, so that they meet: one line of descent with branches and short last chunks, and a stranger.
PROMPTS = st.sampled_from(
    [
        *(tuple(make_tokens(letters)) for letters in ("abcd", "ab", "abce", "abcdfg", "axy", "a", "abc", "xyz")),
        (*make_tokens("ab"), 1),
        (*make_tokens("abc"), 1, 2, 3),
    ]
)
LAYERS = st.sampled_from([(0,), (1,), (0, 1), (1, 0)])
WAYS = st.sampled_from(["first wins"] * 4 + ["replace", "keep", "keep"])
EVICT = st.sampled_from([True, True, True, False])
SKIPPED = st.sampled_from([0, 0, 0, 1, 2])
OWNERS = st.sampled_from([b"x", b"y", b"z"])
SPACES = {letter: make_space(salt=letter).fingerprint for letter in "ax"}
"""By the first letter of a prompt: key spaces that share no chunk."""

STATES = st.lists(st.sampled_from([Presence.PRESENT] * 8 + [Presence.ABSENT, Presence.UNKNOWN]), min_size=6, max_size=6)


def space_of(tokens: tuple[int, ...]) -> bytes:
    return SPACES[chr(tokens[0] // CHUNK_SIZE)]


@dataclass(frozen=True)
class Writer:
    tokens: tuple[int, ...]
    first_chunk: int
    layers: tuple[int, ...]
    replace: bool
    keep: bool
    caller: HoldId | None
    write_id: int
    runs: tuple[Run, ...]


@dataclass(frozen=True)
class Reader:
    runs: tuple[Run, ...]
    specs: tuple[LayerSpec, ...]
    content: dict[tuple[int, int], int]


class StoreMachine(RuleBasedStateMachine):
    holds = Bundle("holds")
    finding = Bundle("finding")  # leases whose KV side is still being asked
    specs = SPECS
    least_piece_bytes = LEAST_PIECE_BYTES

    def __init__(self) -> None:
        super().__init__()
        self.store = make_store(POOL_SLOTS, least_piece_bytes=self.least_piece_bytes)
        self.memory = PoolMemory(POOL_SLOTS)
        self.next_id = 0
        self.writers: dict[HoldId, Writer] = {}
        self.readers: dict[HoldId, Reader] = {}
        self.found: dict[HoldId, tuple[int, tuple[bytes, ...], tuple[int, ...], tuple[int, ...]]] = {}
        self.confirmed: Counter[bytes] = Counter()  # commits that found a chunk there or made it
        self.kept: dict[HoldId, set[bytes]] = {}  # is in `held` too
        self.held: dict[HoldId, set[bytes]] = {}  # less what was dropped: a chunk stored again later is another one
        self.content: dict[tuple[bytes, int], int] = {}  # what must be found, if anything is
        self.parents: dict[bytes, bytes | None] = {}
        self.spaces: dict[bytes, bytes] = {}
        self.retired: set[HoldId] = set()
        self.given_up: set[HoldId] = set()
        self.alone = True
        self.published: set[bytes] = set()  # what whoever was told of every change takes to be there

    def new_hold(self, owner: bytes) -> HoldId:
        self.next_id += 1
        return owner, self.next_id

    def keys_of(self, tokens: tuple[int, ...]) -> list[bytes]:
        keys = make_keys(tokens)
        self.parents.update(zip(keys, [None, *keys], strict=False))
        self.spaces.update(dict.fromkeys(keys, space_of(tokens)))
        return keys

    def there(self) -> set[tuple[bytes, int]]:
        return {(key, layer) for key in self.parents for layer in (0, 1) if self.store.contains(key, layer)}

    def held_keys(self) -> set[bytes]:
        return set().union(*self.held.values())

    @rule(
        target=holds,
        owner=OWNERS,
        tokens=PROMPTS,
        layers=LAYERS,
        skip=SKIPPED,
        way=WAYS,
        sent=st.booleans(),
        evict=EVICT,
    )
    def reserve(
        self,
        owner: bytes,
        tokens: tuple[int, ...],
        layers: tuple[int, ...],
        skip: int,
        way: str,
        sent: bool,
        evict: bool,
    ) -> HoldId:
        caller = self.new_hold(owner) if sent else None
        hold, keys = self.new_hold(b"node" if sent else owner), self.keys_of(tokens)
        first_chunk = min(skip, len(keys))
        before, held_before = self.there(), self.held_keys()
        specs = tuple(self.specs[layer] for layer in layers)
        reserved = self.store.reserve(
            hold,
            space=space_of(tokens),
            keys=keys,
            num_tokens=len(tokens),
            first_chunk=first_chunk,
            specs=specs,
            kv_local=True,
            replace=way == "replace",
            keep=way == "keep",
            evict=evict,
            caller=caller,
        )
        after = self.there()
        anew = way != "first wins"
        self.memory.write(reserved.runs, specs, self.next_id)
        written = set(self.memory.read(reserved.runs, specs))
        missing = {
            (i, layer)
            for i in range(first_chunk, len(keys))
            for layer in layers
            if anew or (keys[i], layer) not in before
        }
        wanted = sorted({chunk for chunk, _ in missing})
        placed = wanted[: len(wanted) - reserved.refused]
        assert written == {(chunk, layer) for chunk, layer in missing if chunk in placed}, "refused from the tail"

        assert after <= before, "a reservation is invisible"
        replaced = (
            set(keys[first_chunk:]) if anew and not {key for key, _ in after} & set(keys[first_chunk:]) else set()
        )
        gone = {key for key, _ in before - after}
        assert not anew or reserved.refused == 0 or replaced == set(keys[first_chunk:]), "what is out of date stays"
        assert reserved.refused or not gone & replaced & held_before, "dropped though there was room"
        self.forget_dropped(gone & replaced)
        held_before -= gone & replaced
        evicted = gone - replaced
        assert not evicted & {key for key, _ in after}, "a chunk goes with all its layers"
        assert not evicted & held_before, "what is held is not evicted"
        kept = (
            placed[-1] + 1 if placed and not anew else first_chunk if placed else 0
        )  # what is there already behind the last one placed may go for it
        assert not evicted & set(keys[:kept]), "a store does not evict the prefix that it is storing"
        servable = any(all((key, layer) in before for key in keys[:first_chunk]) for layer in layers)
        servable |= not self.alone  # the head may be on another node
        assert evict or not evicted, "nothing is evicted for who asks for free room only"
        assert not evicted or (placed and servable), "nothing is evicted for rows that are refused or behind a hole"
        used = keys[:first_chunk] if anew else keys
        self.held[hold] = {key for key in used if (key, 0) in after or (key, 1) in after}
        for key, _ in after:
            # With its head gone a chunk is of no use; only a hold may keep it.
            assert self.parents[key] not in evicted or key in self.held_keys(), "heads survive tails"
        self.writers[hold] = Writer(
            tokens, first_chunk, layers, anew, way == "keep", caller, self.next_id, reserved.runs
        )
        return hold

    @rule(target=holds, hold=consumes(holds))
    def commit(self, hold: HoldId) -> HoldId:
        writer = self.writers.get(hold)
        if writer is None:
            with pytest.raises(StaleIncarnationError):
                self.store.commit(hold)
            return hold
        keys, before = make_keys(writer.tokens), self.there()
        specs = tuple(self.specs[layer] for layer in writer.layers)
        written = self.memory.read(writer.runs, specs)
        assert set(written.values()) <= {writer.write_id}, "somebody wrote into a reservation"
        if hold in self.given_up:
            with pytest.raises(StaleIncarnationError):
                self.store.commit(hold)
            self.forget([hold])
            assert self.there() == before, "what was given up became visible"
            return hold
        if hold in self.retired:
            with pytest.raises(StaleRevisionError):
                self.store.commit(hold)
            self.forget([hold])
            assert self.there() == before, "what was reserved before its key space was retired became visible"
            return hold
        done = self.store.commit(hold)
        self.forget([hold])
        after = self.there()
        mine = {(keys[chunk], layer) for chunk, layer in written}
        replaced = {key for key, _ in mine} if writer.replace else set()
        before = {(key, layer) for key, layer in before if key not in replaced}
        self.forget_dropped(replaced)
        assert before <= after
        self.confirmed.update(key for key in keys[writer.first_chunk :] if {(key, 0), (key, 1)} & after)
        new = after - before
        assert new <= mine
        assert new == mine or not writer.replace
        if writer.keep and new:
            self.kept[hold] = self.held[hold] = {key for key, _ in new}
        for name in new:
            self.content[name] = writer.write_id
        complete = [all((key, layer) in after for layer in writer.layers) for key in keys]
        for key, layer in new:
            assert complete[keys.index(key)], f"layer {layer} became visible without the others"
        stored = len({key for key, _ in new})
        assert (done.stored, done.present) == (stored, sum(complete[writer.first_chunk :]) - stored)
        assert done.failed == len(keys) - writer.first_chunk - done.stored - done.present
        covered = complete.index(False) if False in complete else len(keys)
        assert done.prefix_tokens == min(covered * CHUNK_SIZE, len(writer.tokens))
        return hold

    @rule(tokens=PROMPTS, layers=LAYERS)
    def store_at_once(self, tokens: tuple[int, ...], layers: tuple[int, ...]) -> None:
        hold = self.reserve(b"x", tokens, layers, 0, "first wins", False, True)
        self.commit(hold)

    @rule(target=holds, owner=OWNERS, tokens=PROMPTS, layers=LAYERS, skip=SKIPPED, hinted=st.booleans())
    def lease_at_once(
        self, owner: bytes, tokens: tuple[int, ...], layers: tuple[int, ...], skip: int, hinted: bool
    ) -> object:
        hold = self.find(owner, tokens, layers, skip, hinted)
        self.settle(hold, [Presence.PRESENT] * len(tokens))
        return hold

    @rule(target=finding, owner=OWNERS, tokens=PROMPTS, layers=LAYERS, skip=SKIPPED, hinted=st.booleans())
    def find(self, owner: bytes, tokens: tuple[int, ...], layers: tuple[int, ...], skip: int, hinted: bool) -> HoldId:
        hold, keys = self.new_hold(owner), self.keys_of(tokens)
        first = min(skip, len(keys))
        there = self.there()
        run = [all((key, layer) in there for layer in layers) for key in keys[first:]]
        found = self.store.lease(hold, keys, layers, first_chunk=first, hinted=hinted)
        assert found.keys == tuple(keys[first:][: run.index(False) if False in run else len(keys)])
        if found.keys:
            self.found[hold] = (first, found.keys, layers, tuple(self.confirmed[key] for key in found.keys))
            self.held[hold] = set(found.keys)
        return hold

    @rule(target=holds, hold=consumes(finding), states=STATES)
    def settle(self, hold: HoldId, states: list[Presence]) -> HoldId:
        first, keys, layers, confirmed = self.found.pop(hold, (0, (), (), ()))
        before = self.there()
        granted = self.store.settle(hold, states[: len(keys)])
        after = self.there()
        # What was stored while the KV side was being asked has KV again, whatever it says.
        absent = {
            key
            for key, state, count in zip(keys, states, confirmed, strict=False)
            if state == Presence.ABSENT and self.confirmed[key] == count
        }
        dropped = {(key, layer) for key, layer in before if key in absent}
        assert before - after == dropped, "only what KV lacks is dropped"
        # A chunk that was dropped, or dropped and stored again, while the KV side was asked also ends the prefix.
        present = next((i for i, state in enumerate(states[: len(keys)]) if state != Presence.PRESENT), len(keys))
        chunks = -(-granted.num_tokens // CHUNK_SIZE)
        assert chunks <= present
        content = self.memory.read(granted.runs, granted.specs)
        assert content == {(first + i, layer): self.content[keys[i], layer] for i in range(chunks) for layer in layers}
        self.forget_dropped(absent)
        if chunks:
            self.held[hold] &= set(keys[:chunks])
            self.readers[hold] = Reader(granted.runs, granted.specs, content)
        else:
            self.forget([hold])
        return hold

    @rule(tokens=PROMPTS, layers=LAYERS)
    def retrieve(self, tokens: tuple[int, ...], layers: tuple[int, ...]) -> None:
        hold, keys = self.new_hold(b"passer-by"), self.keys_of(tokens)
        there = self.there()
        found = self.store.lease(hold, keys, layers)
        granted = self.store.settle(hold, [Presence.PRESENT] * len(found.keys))
        run = [all((key, layer) in there for layer in layers) for key in keys]
        covered = run.index(False) if False in run else len(keys)
        assert granted.num_tokens == min(covered * CHUNK_SIZE, len(tokens))
        read = self.memory.read(granted.runs, granted.specs)
        assert read == {(i, layer): self.content[keys[i], layer] for i in range(covered) for layer in layers}
        self.store.end(hold)

    @rule(hold=consumes(holds))
    def release(self, hold: HoldId) -> None:
        before, kept = self.there(), self.kept.get(hold, set())
        self.store.release(hold[0], [hold[1]])
        self.forget([hold])
        assert self.there() == {(key, layer) for key, layer in before if key not in kept}, "what is kept goes with it"
        self.forget_dropped(kept)

    @rule(hold=holds)
    def give_up_what_another_writes(self, hold: HoldId) -> None:
        writer = self.writers.get(hold)
        if writer is not None and writer.caller is not None:
            before = self.store.stats()
            self.store.release(writer.caller[0], [writer.caller[1]])
            self.given_up.add(hold)
            assert self.store.stats() == before, "its memory is still being written"

    @rule(hold=finding)
    def release_while_finding(self, hold: HoldId) -> None:
        self.store.release(hold[0], [hold[1]])
        self.forget([hold])

    @rule(owner=OWNERS, tokens=PROMPTS)
    def release_before_the_grant(self, owner: bytes, tokens: tuple[int, ...]) -> None:
        hold = self.new_hold(owner)
        self.store.release(owner, [hold[1]])
        before = self.store.stats()
        assert self.store.lease(hold, self.keys_of(tokens), (0,)).keys == ()
        assert self.store.stats() == before

    @rule(owner=OWNERS)
    def release_owner(self, owner: bytes) -> None:
        mine = [hold for hold in (*self.writers, *self.readers, *self.found, *self.kept) if hold[0] == owner]
        before, kept = self.there(), set().union(*(self.kept.get(hold, set()) for hold in mine))
        assert self.store.release_owner(owner) == len(mine)
        self.forget(mine)
        assert self.there() == {(key, layer) for key, layer in before if key not in kept}
        self.forget_dropped(kept)

    @rule(tokens=PROMPTS)
    def drop(self, tokens: tuple[int, ...]) -> None:
        key, there = self.keys_of(tokens)[-1], self.there()
        assert self.store.drop(key) == bool({(key, 0), (key, 1)} & there)
        assert self.there() == there - {(key, 0), (key, 1)}
        self.forget_dropped({key})

    @rule(letters=st.sampled_from(["a", "x", "ax"]))
    def retire(self, letters: str) -> None:
        spaces, before = {SPACES[letter] for letter in letters}, self.there()
        free = self.store.stats().free_bytes
        freed = retire(self.store, spaces)
        gone = {(key, layer) for key, layer in before if self.spaces[key] in spaces}
        assert self.there() == before - gone
        assert freed.chunks == len({key for key, _ in gone})
        assert self.store.stats().free_bytes == free + freed.nbytes - freed.held_bytes, "who holds a chunk keeps it"
        self.retired |= {hold for hold, writer in self.writers.items() if space_of(writer.tokens) in spaces}
        self.forget_dropped({key for key, _ in gone})

    @rule(alone=st.booleans())
    def set_alone(self, alone: bool) -> None:
        self.store.set_alone(alone)
        self.alone = alone

    @rule()
    def publish(self) -> None:
        was_told = self.store.changed.is_set()
        self.store.changed.clear()
        changes = self.store.take_changes()
        assert was_told or not changes, "a change that nobody is told of"
        self.published |= {key for key, there in changes.items() if there}
        self.published -= {key for key, there in changes.items() if not there}
        assert self.published == {key for key, _ in self.there()}

    @rule()
    def publish_all(self) -> None:
        self.published = set(split_keys(self.store.snapshot()))
        assert self.published == {key for key, _ in self.there()}

    def forget_dropped(self, keys: set[bytes]) -> None:
        for held in (*self.held.values(), *self.kept.values()):
            held.difference_update(keys)
        self.kept = {hold: kept for hold, kept in self.kept.items() if kept}

    def forget(self, holds: list[HoldId]) -> None:
        for hold in holds:
            for held in (self.writers, self.readers, self.found, self.held, self.kept):
                held.pop(hold, None)

    @invariant()
    def readers_see_what_they_were_given(self) -> None:
        for reader in self.readers.values():
            assert self.memory.read(reader.runs, reader.specs) == reader.content

    @invariant()
    def the_store_is_sound(self) -> None:
        self.store.check()
        stats = self.store.stats()
        assert stats.num_leases == len(self.readers) + len(self.found)
        assert stats.num_reservations == len(self.writers)
        assert stats.num_kept == sum(len(kept) for kept in self.kept.values())
        assert stats.capacity_bytes == POOL_SLOTS * SLOT_BYTES

    def teardown(self) -> None:
        self.publish()
        for owner in (b"x", b"y", b"z", b"node", b"wall"):
            self.store.release_owner(owner)
        stats = self.store.stats()
        assert (stats.reserved_bytes, stats.stranded_bytes, stats.leased_bytes) == (0, 0, 0)
        for key in self.parents:
            self.store.drop(key)
        self.store.check()
        assert self.store.stats().free_bytes == stats.capacity_bytes


class CuttingMachine(StoreMachine):
    """The rows of a chunk may lie in several pieces: of layer 1, which is wider here, in up to four.

    All the time some writers hold a slot each, so that most room is in holes too small for that layer.
    """

    specs = (make_spec(0), make_spec(1, slots=4))
    least_piece_bytes = SLOT_BYTES

    def __init__(self) -> None:
        super().__init__()
        walls = [
            self.reserve(b"wall", tuple(make_tokens("a")), (0,), 0, "first wins", False, True)
            for _ in range(POOL_SLOTS)
        ]
        for hold in {*walls} - {*walls[2::3]}:
            self.release(hold)


# Hypothesis shrinks a failure for up to five minutes; a timeout in the midst of that would hide it.
TestStoreMachine = pytest.mark.timeout(400)(StoreMachine.TestCase)
TestStoreMachine.settings = settings(max_examples=300, stateful_step_count=50, print_blob=True)
TestCuttingMachine = pytest.mark.timeout(400)(CuttingMachine.TestCase)
TestCuttingMachine.settings = settings(max_examples=150, stateful_step_count=50, print_blob=True)
