"""Which nodes a service has, and which chunks are where: the controller's knowledge, as pure logic.

Both are hints for everyone else. The actor of a node is the only one that knows what it holds; what stands here may be
late, and is corrected by that actor. No locks: the controller has one.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from hs_cache.messages import split_keys

_SWEEP_STEP = 4096
"""How many keys a batch cleans, besides as many as it names, of bits of nodes that are gone: about a millisecond."""

_MAX_SHARED = 4096


@dataclass(frozen=True, slots=True)
class Member:
    """A node of the service: Ray's hex id, and the incarnation of its pool."""

    node_id: str
    incarnation: bytes


class Membership:
    """The nodes of a service, with a version that grows with every change."""

    def __init__(self) -> None:
        self._members: dict[str, Member] = {}
        self._version = 0

    @property
    def version(self) -> int:
        """Number of changes so far."""
        return self._version

    def members(self) -> tuple[Member, ...]:
        """All members, by node id."""
        return tuple(self._members[node_id] for node_id in sorted(self._members))

    def get(self, node_id: str) -> Member | None:
        """The member on that node."""
        return self._members.get(node_id)

    def join(self, node_id: str, incarnation: bytes) -> bool:
        """Note that a node has a pool of that incarnation; whether that is news."""
        member = Member(node_id, incarnation)
        if self._members.get(node_id) == member:
            return False
        self._members[node_id] = member
        self._version += 1
        return True

    def leave(self, node_id: str) -> bool:
        """Note that a node is gone; whether that is news."""
        if self._members.pop(node_id, None) is None:
            return False
        self._version += 1
        return True


class Segment(NamedTuple):
    """Chunks ``first .. first + num_chunks`` of the keys asked for are, as far as is known, on one node."""

    node_id: str
    first: int
    num_chunks: int


class Directory:
    """Chunk key → nodes, as a bit set per key: about 100 bytes a key, O(1) for every key named.

    Each node's chunks come in numbered batches. A batch out of its turn is not applied: something was lost, and the
    node must send everything, with `replace`. Removing a node is O(1): its bit stays in the keys, and every batch that
    comes takes such bits out of some more keys, so that nothing ever takes long.
    """

    def __init__(self) -> None:
        self._bits: dict[bytes, int] = {}
        self._shared: dict[int, int] = {}  # equal bit sets are one object
        self._place: dict[str, int] = {}  # node -> its bit's number
        self._node: dict[int, str] = {}
        self._batch: dict[str, tuple[bytes, int]] = {}  # node -> incarnation, number of its last batch
        self._free: list[int] = []
        self._retired = 0  # bits of nodes that are gone, still in some keys
        self._sweeping = 0  # those of them that are being taken out
        self._unswept: list[bytes] = []  # keys that may still have one of those
        self._turn = 0

    def __len__(self) -> int:
        """Keys; for a while also those that only nodes had which are gone."""
        return len(self._bits)

    @property
    def nodes(self) -> frozenset[str]:
        """The nodes that have published."""
        return frozenset(self._place)

    def apply(self, node_id: str, incarnation: bytes, number: int, added: bytes, removed: bytes) -> bool:
        """Take in batch `number` of a node; False when it isn't the next one, and all of the node's keys are needed.

        Raises:
            InvalidInputError: the keys aren't keys; nothing was changed.
        """
        enter, drop = split_keys(added), split_keys(removed)
        if self._batch.get(node_id) != (incarnation, number - 1):
            return False
        self._batch[node_id] = (incarnation, number)
        bit = 1 << self._place[node_id]
        for key in drop:
            self._set(key, self._bits.get(key, 0) & ~bit)
        for key in enter:
            self._set(key, self._bits.get(key, 0) | bit)
        self._sweep(len(enter) + len(drop) + _SWEEP_STEP)
        return True

    def replace(self, node_id: str, incarnation: bytes, number: int, keys: bytes) -> None:
        """`keys` is all that a node holds, as of batch `number`; without effect when a later one has been taken in.

        Raises:
            InvalidInputError: the keys aren't keys; nothing was changed.
        """
        split = split_keys(keys)
        last_incarnation, last_number = self._batch.get(node_id, (b"", 0))
        if last_incarnation == incarnation and last_number >= number:
            return
        self.remove(node_id)
        place = self._free.pop() if self._free else len(self._place) + self._retired.bit_count()
        self._place[node_id], self._node[place] = place, node_id
        self._batch[node_id] = (incarnation, number)
        for key in split:
            self._set(key, self._bits.get(key, 0) | 1 << place)
        self._sweep(len(split) + _SWEEP_STEP)

    def remove(self, node_id: str) -> None:
        """Forget a node and where it was named; idempotent, O(1)."""
        place = self._place.pop(node_id, None)
        if place is not None:
            del self._batch[node_id], self._node[place]
            self._retired |= 1 << place

    def locate(self, keys: bytes, *, without: Iterable[str] = ()) -> tuple[Segment, ...]:
        """Where the longest run of `keys`, from the first on, can be had: as few segments as a greedy choice makes
        them. Of several nodes that have all of a segment, each is named in its turn.

        Args:
            keys: chunk keys in order.
            without: nodes not to name; the caller has asked them already.
        """
        self._turn += 1
        split = split_keys(keys)
        alive = self._alive(without)
        segments: list[Segment] = []
        first = 0
        candidates = 0
        for position, key in enumerate(split):
            here = self._bits.get(key, 0) & alive
            still = candidates & here
            if not still and position > first:
                segments.append(Segment(self._choose(candidates), first, position - first))
                first = position
            if not here:
                return tuple(segments)
            candidates = still or here
        if len(split) > first:
            segments.append(Segment(self._choose(candidates), first, len(split) - first))
        return tuple(segments)

    def holders(self, keys: bytes) -> dict[str, int]:
        """For each node that has the first of `keys`, how many of them it has without a gap. O(keys + nodes)."""
        split = split_keys(keys)
        held: dict[str, int] = {}
        candidates = self._alive(())
        for position, key in enumerate((*split, b"")):
            still = self._bits.get(key, 0) & candidates
            gone = (candidates & ~still) if position else 0
            while gone > 0:
                lowest = gone & -gone
                held[self._node[lowest.bit_length() - 1]] = position
                gone ^= lowest
            candidates = still
            if not candidates:
                break
        return held

    def where(self, keys: bytes, *, without: Iterable[str] = ()) -> tuple[str, ...]:
        """For each key, a node that has it, none of `without`; ``""`` where none does."""
        alive = self._alive(without)
        return tuple(self._choose(bits) if (bits := self._bits.get(key, 0) & alive) else "" for key in split_keys(keys))

    def check(self) -> None:
        """Audit; raises AssertionError. O(everything)."""
        live = sum(1 << place for place in self._place.values())
        free = sum(1 << place for place in self._free)
        assert {place: node for node, place in self._place.items()} == self._node
        assert set(self._batch) == set(self._place)
        assert not (live & self._retired or live & free or free & self._retired), "a place is two things"
        places = live | self._retired | free
        assert not places & (places + 1), "a place is nothing"
        assert not self._sweeping & ~self._retired
        assert self._sweeping or not self._unswept
        unswept = set(self._unswept)
        for key, bits in self._bits.items():
            assert bits, "a key without nodes is kept"
            assert not bits & ~(live | self._retired), "a key names a node that was never here"
            assert key in unswept or not bits & self._sweeping, "a key was left out"

    def _alive(self, without: Iterable[str]) -> int:
        alive = ~self._retired
        for node_id in without:
            if node_id in self._place:
                alive &= ~(1 << self._place[node_id])
        return alive

    def _choose(self, bits: int) -> str:
        for _ in range(self._turn % bits.bit_count()):
            bits &= bits - 1
        return self._node[(bits & -bits).bit_length() - 1]

    def _set(self, key: bytes, bits: int) -> None:
        if not bits:
            self._bits.pop(key, None)
            return
        if len(self._shared) > _MAX_SHARED:
            self._shared.clear()
        self._bits[key] = self._shared.setdefault(bits, bits)

    def _sweep(self, count: int) -> None:
        """Take bits of nodes that are gone out of `count` more keys; behind the last key, their places are free."""
        if not self._sweeping:
            if not self._retired:
                return
            self._sweeping, self._unswept = self._retired, list(self._bits)
        for key in self._unswept[-count:]:
            bits = self._bits.get(key, 0)
            if bits & self._sweeping:
                self._set(key, bits & ~self._sweeping)
        del self._unswept[-count:]
        if not self._unswept:
            self._free += [place for place in range(self._sweeping.bit_length()) if self._sweeping >> place & 1]
            self._retired &= ~self._sweeping
            self._sweeping = 0
