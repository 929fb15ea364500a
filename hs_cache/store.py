"""Which chunks lie where in a pool, who holds them, and which go first: the heart of a node, without any I/O.

Memory is always in one of four states, and `HiddenStateStore.check` proves it:

* *free*: in a hole of the allocator;
* *reserved*: being written; invisible until its reservation is committed;
* *resident*: rows of a chunk in the index, readable, evictable unless held;
* *stranded*: dropped from the index while still held; freed when the last hold ends.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice, pairwise

from hs_cache.errors import InvalidInputError, StaleIncarnationError
from hs_cache.eviction import PrefixLRU
from hs_cache.extents import Extent, ExtentAllocator
from hs_cache.kv_presence import Presence
from hs_cache.messages import LayerSpec, Run, StoreStatistics

HoldId = tuple[bytes, int]
"""Who holds, and the id that the holder chose: of a lease or of a reservation."""

_Wanted = list[tuple[int, list[LayerSpec]]]  # positions in a prefix, and the layers to be written there

_MAX_TOMBSTONES = 65536


@dataclass(slots=True, eq=False)
class _Chunk:
    key: bytes
    space: bytes
    num_tokens: int
    kv_local: bool
    layers: dict[int, tuple[LayerSpec, Extent]] = field(default_factory=dict)
    nbytes: int = 0  # with alignment, all layers
    pins: int = 0  # leases and reservations
    leases: int = 0
    linked: bool = True


@dataclass(slots=True, eq=False)
class _Lease:
    chunks: list[_Chunk]
    layers: tuple[int, ...]
    asked_chunks: int


@dataclass(slots=True, eq=False)
class _Reservation:
    space: bytes
    keys: Sequence[bytes]
    num_tokens: int
    first_chunk: int
    specs: tuple[LayerSpec, ...]
    kv_local: bool
    pinned: dict[int, _Chunk] = field(default_factory=dict)  # by position in the prefix
    writes: dict[int, dict[int, Extent]] = field(default_factory=dict)  # position -> layer_idx -> extent


@dataclass(frozen=True, slots=True)
class Reserved:
    """Where to write, and how many chunks at the tail got no room."""

    runs: tuple[Run, ...]
    refused: int


@dataclass(frozen=True, slots=True)
class Committed:
    """Chunks by outcome, and how many tokens from the first on now have every layer of the store."""

    stored: int
    present: int
    failed: int
    prefix_tokens: int


@dataclass(frozen=True, slots=True)
class Found:
    """The longest run of chunks with every layer, already leased. `kv_local`: which ones this node's KV side knows."""

    keys: tuple[bytes, ...]
    kv_local: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Granted:
    """What a lease covers after the KV side was asked; see `hs_cache.messages.LeaseReply`."""

    num_tokens: int
    specs: tuple[LayerSpec, ...]
    runs: tuple[Run, ...]
    must_copy: bool
    ended_by: str


class HiddenStateStore:
    """Chunk key → layers → extents, with prefix-aware LRU, leases, reservations. Thread-safe; nothing blocks for long.

    The unit of eviction is the chunk with all its layers. All layers that one `reserve` names appear at its `commit`
    together. What is held by a lease or a reservation is never reused. Keys, ids and specs are trusted to be
    well-formed; `hs_cache.server.CacheServer` checks what comes from outside.

    Args:
        capacity_bytes: size of the pool's data region.
        chunk_size: tokens per chunk.
        max_leased_fraction: above this part of the pool, a grant says ``must_copy``.
    """

    def __init__(self, capacity_bytes: int, *, chunk_size: int, max_leased_fraction: float = 0.5) -> None:
        self._lock = threading.Lock()
        self._allocator = ExtentAllocator(capacity_bytes)
        self._chunk_size = chunk_size
        self._max_leased_bytes = max_leased_fraction * self._allocator.capacity
        self._chunks: dict[bytes, _Chunk] = {}
        self._order = PrefixLRU()
        self._holds: dict[HoldId, _Lease | _Reservation] = {}
        self._tombstones: OrderedDict[HoldId, None] = OrderedDict()
        self._specs: dict[tuple[bytes, int], list[LayerSpec]] = {}  # one entry per chunk or reservation that uses it
        self._resident = self._reserved = self._stranded = self._pinned = self._leased = 0  # bytes, with alignment
        self._stored_total = self._evicted_total = self._kv_dropped_total = self._refused_total = 0

    def reserve(
        self,
        hold: HoldId,
        *,
        space: bytes,
        keys: Sequence[bytes],
        num_tokens: int,
        first_chunk: int,
        specs: tuple[LayerSpec, ...],
        kv_local: bool,
    ) -> Reserved:
        """Find room for the layers of chunks ``first_chunk ..`` that aren't there yet, and hold the chunks that are.

        Evicts as little as makes room, the coldest first, never a chunk of this prefix that the store keeps; what
        doesn't fit is refused from the tail, and nothing is evicted for it. When the head before `first_chunk` has a
        hole in every layer of `specs`, the rows could not be served yet, so only free room is used.

        Raises:
            InvalidInputError: a layer has another hidden_dim or dtype in this key space, or the id is in use.
        """
        with self._lock:
            if self._given_up(hold):
                return Reserved((), len(keys) - first_chunk)
            self._check_specs(space, specs)
            held = _Reservation(space, keys, num_tokens, first_chunk, specs, kv_local)
            for position, key in enumerate(keys):
                if (chunk := self._chunks.get(key)) is not None:
                    self._pin(chunk)
                    held.pinned[position] = chunk
            refused = self._place(held)
            self._holds[hold] = held
            for spec in specs:
                self._specs.setdefault((space, spec.layer_idx), []).append(spec)
            self._refused_total += refused
            pieces = (
                (spec, position * self._chunk_size, self._tokens_in(held, position), write[spec.layer_idx])
                for spec in specs
                for position, write in held.writes.items()
                if spec.layer_idx in write
            )
            return Reserved(_merge(pieces), refused)

    def commit(self, hold: HoldId) -> Committed:
        """Make the chunks of a reservation visible, and end it. First come, first kept: rows already there stay.

        Raises:
            StaleIncarnationError: there is no such reservation (it was given up, or its client counted as gone).
        """
        with self._lock:
            held = self._holds.get(hold)
            if not isinstance(held, _Reservation):
                raise StaleIncarnationError("this reservation is no longer held here")
            stored = present = 0
            for position in range(held.first_chunk, len(held.keys)):
                if position in held.writes:
                    linked, new = self._link(held, position)
                    stored += new
                    present += linked and not new
                else:
                    present += self._complete(held, position)
            held.writes.clear()
            self._end(hold)
            self._stored_total += stored
            prefix = self._order_prefix(held.keys)
            covered = 0
            while covered < prefix and self._complete(held, covered):
                covered += 1
            prefix_tokens = held.num_tokens if covered == len(held.keys) else covered * self._chunk_size
            failed = len(held.keys) - held.first_chunk - stored - present
            return Committed(stored, present, failed, prefix_tokens)

    def lease(self, hold: HoldId, keys: Sequence[bytes], layers: tuple[int, ...]) -> Found:
        """Hold the longest run of chunks, from the first, that has every layer; `settle` completes it.

        Nothing is held when the run is empty. The order is not touched yet.
        """
        with self._lock:
            if self._given_up(hold):
                return Found((), ())
            chunks: list[_Chunk] = []
            for key in keys:
                chunk = self._chunks.get(key)
                if chunk is None or not all(layer in chunk.layers for layer in layers):
                    break
                chunks.append(chunk)
            for chunk in chunks:
                self._pin(chunk, lease=True)
            if chunks:
                self._holds[hold] = _Lease(chunks, layers, len(keys))
            return Found(tuple(chunk.key for chunk in chunks), tuple(chunk.kv_local for chunk in chunks))

    def settle(self, hold: HoldId, presence: Sequence[int]) -> Granted:
        """Trim a lease to what the KV side says, one `Presence` per chunk found: absent ones are dropped, all layers.

        Raises:
            InvalidInputError: `presence` has another length than what was found; the lease stays as it was.
        """
        with self._lock:
            held = self._holds.get(hold)
            if not isinstance(held, _Lease):  # an empty run, or released while the KV side was being asked
                return Granted(0, (), (), False, "hidden_state")
            found = held.chunks
            if len(presence) != len(found):
                raise InvalidInputError(f"presence: got {len(presence)} values, expected {len(found)}, one per chunk")
            kept = next(
                (i for i, chunk in enumerate(found) if presence[i] != Presence.PRESENT or not chunk.linked), len(found)
            )
            ended_by = "" if kept == held.asked_chunks else "hidden_state"
            if kept < len(found) and presence[kept] != Presence.PRESENT:
                ended_by = "kv_absent" if presence[kept] == Presence.ABSENT else "kv_unknown"
            held.chunks = found[:kept]
            for chunk, state in zip(found, presence, strict=True):
                if state == Presence.ABSENT and chunk.linked:
                    self._unlink(chunk)
                    self._kv_dropped_total += 1
            for chunk in found[kept:]:
                self._unpin(chunk, lease=True)
            self._order_prefix([chunk.key for chunk in held.chunks])
            if not held.chunks:
                self._end(hold)
                return Granted(0, (), (), False, ended_by)
            specs = tuple(held.chunks[0].layers[layer][0] for layer in held.layers)
            num_tokens = sum(chunk.num_tokens for chunk in held.chunks)
            must_copy = self._leased > self._max_leased_bytes
            return Granted(num_tokens, specs, self._lease_runs(held, specs), must_copy, ended_by)

    def release(self, owner: bytes, ids: Iterable[int]) -> None:
        """End leases and give up reservations; idempotent. An id not known yet is refused when it arrives."""
        with self._lock:
            for number in ids:
                if (owner, number) in self._holds:
                    self._end((owner, number))
                else:
                    self._tombstones[owner, number] = None
            while len(self._tombstones) > _MAX_TOMBSTONES:
                self._tombstones.popitem(last=False)

    def end(self, hold: HoldId) -> None:
        """End one lease or reservation where it is still held; for holders whose calls can't overtake each other."""
        with self._lock:
            if hold in self._holds:
                self._end(hold)

    def release_owner(self, owner: bytes) -> int:
        """End everything that a client holds which is gone; returns how many holds that were."""
        with self._lock:
            gone = [hold for hold in self._holds if hold[0] == owner]
            for hold in gone:
                self._end(hold)
            for hold in [hold for hold in self._tombstones if hold[0] == owner]:
                del self._tombstones[hold]
            return len(gone)

    def contains(self, key: bytes, layer_idx: int) -> bool:
        """Whether the chunk is there with that layer; no effect on the order."""
        with self._lock:
            chunk = self._chunks.get(key)
            return chunk is not None and layer_idx in chunk.layers

    def drop(self, key: bytes) -> bool:
        """Drop a chunk with all its layers; False when it isn't there. Whoever holds it keeps its memory."""
        with self._lock:
            chunk = self._chunks.get(key)
            if chunk is not None:
                self._unlink(chunk)
            return chunk is not None

    def stats(self) -> StoreStatistics:
        """A consistent snapshot; O(holds)."""
        with self._lock:
            leases = sum(isinstance(held, _Lease) for held in self._holds.values())
            return StoreStatistics(
                capacity_bytes=self._allocator.capacity,
                free_bytes=self._allocator.free_bytes,
                resident_bytes=self._resident,
                reserved_bytes=self._reserved,
                stranded_bytes=self._stranded,
                leased_bytes=self._leased,
                num_chunks=len(self._chunks),
                num_leases=leases,
                num_reservations=len(self._holds) - leases,
                stored_chunks_total=self._stored_total,
                evicted_chunks_total=self._evicted_total,
                kv_dropped_chunks_total=self._kv_dropped_total,
                refused_chunks_total=self._refused_total,
            )

    def check(self) -> None:
        """Audit every invariant from the ground up; raises AssertionError. Takes the lock; O(everything).

        No two extents overlap; every byte is free, reserved, resident or stranded; nothing held is free; pins equal
        holds; a lease has all its layers; heads are warmer than tails; a layer has one spec per key space.
        """
        with self._lock:
            self._allocator.check()
            self._order.check()
            pins: dict[_Chunk, list[int]] = {chunk: [0, 0] for chunk in self._chunks.values()}
            extents: list[Extent] = []
            reserved = 0
            specs: dict[tuple[bytes, int], list[LayerSpec]] = {}
            for held in self._holds.values():
                if isinstance(held, _Lease):
                    assert all(layer in chunk.layers for chunk in held.chunks for layer in held.layers)
                else:
                    assert all(held.keys[position] == chunk.key for position, chunk in held.pinned.items())
                for chunk in held.chunks if isinstance(held, _Lease) else held.pinned.values():
                    count = pins.setdefault(chunk, [0, 0])
                    count[0] += 1
                    count[1] += isinstance(held, _Lease)
                if isinstance(held, _Reservation):
                    mine = [extent for write in held.writes.values() for extent in write.values()]
                    extents += mine
                    reserved += sum(self._allocator.aligned(extent.nbytes) for extent in mine)
                    for spec in held.specs:
                        specs.setdefault((held.space, spec.layer_idx), []).append(spec)
            for chunk, count in pins.items():
                assert [chunk.pins, chunk.leases] == count, f"{chunk.key.hex()}: pins {chunk.pins}, holds {count}"
                assert chunk.linked or chunk.pins, "a chunk that nobody holds is stranded"
                assert chunk.layers, "a chunk has no layer"
                mine = [extent for _, extent in chunk.layers.values()]
                assert chunk.nbytes == sum(self._allocator.aligned(extent.nbytes) for extent in mine)
                for spec, extent in chunk.layers.values():
                    assert extent.nbytes == spec.row_bytes * chunk.num_tokens, "an extent doesn't match its layer"
                    if chunk.linked:
                        specs.setdefault((chunk.space, spec.layer_idx), []).append(spec)
                extents += mine
            extents.sort()
            for left, right in pairwise(extents):
                assert left.offset + left.nbytes <= right.offset, f"extents overlap: {left}, {right}"
            aligned = sum(self._allocator.aligned(extent.nbytes) for extent in extents)
            assert aligned == self._allocator.used_bytes, "the allocator holds bytes that nobody owns, or the reverse"
            assert reserved == self._reserved
            linked = [chunk for chunk in pins if chunk.linked]
            assert self._resident == sum(chunk.nbytes for chunk in linked)
            assert self._stranded == sum(chunk.nbytes for chunk in pins if not chunk.linked)
            assert self._pinned == sum(chunk.nbytes for chunk in linked if chunk.pins)
            assert self._leased == sum(chunk.nbytes for chunk in pins if chunk.leases)
            taken = self._reserved + self._resident + self._stranded
            assert self._allocator.free_bytes + taken == self._allocator.capacity
            assert {chunk.key for chunk in linked} == set(self._chunks) == set(self._order.coldest_first())
            assert specs.keys() == self._specs.keys()
            for name, uses in specs.items():
                assert len(set(uses)) == 1, f"a layer has two specs in one key space: {set(uses)}"
                assert uses == self._specs[name], "a spec is counted too often, or too rarely"

    # Everything below is called with the lock held.

    def _tokens_in(self, held: _Reservation, position: int) -> int:
        return min(self._chunk_size, held.num_tokens - position * self._chunk_size)

    def _given_up(self, hold: HoldId) -> bool:
        """Whether the client released this id before the call that uses it arrived."""
        if hold in self._tombstones:
            del self._tombstones[hold]
            return True
        if hold in self._holds:
            raise InvalidInputError(f"hold_id: {hold[1]} is already in use by this client, expected a new one")
        return False

    def _check_specs(self, space: bytes, specs: tuple[LayerSpec, ...]) -> None:
        for spec in specs:
            uses = self._specs.get((space, spec.layer_idx))
            if uses and uses[0] != spec:
                raise InvalidInputError(
                    f"hidden_states: layer {spec.layer_idx} came with hidden_dim {spec.hidden_dim} and dtype "
                    f"{spec.dtype}, expected hidden_dim {uses[0].hidden_dim} and dtype {uses[0].dtype} as stored "
                    "before in this key space"
                )

    def _complete(self, held: _Reservation, position: int) -> bool:
        chunk = self._chunks.get(held.keys[position])
        return chunk is not None and all(spec.layer_idx in chunk.layers for spec in held.specs)

    def _place(self, held: _Reservation) -> int:
        """Give extents to the longest head of the wanted chunks that fits; returns how many chunks were refused."""
        wanted = [
            (position, missing)
            for position in range(held.first_chunk, len(held.keys))
            if (missing := self._missing(held, position))
        ]
        sizes = [
            sum(self._allocator.aligned(spec.row_bytes * self._tokens_in(held, position)) for spec in missing)
            for position, missing in wanted
        ]
        reachable = self._reachable(held)
        # Chunks of this prefix behind the last one placed are no use to these layers: they go when nothing else is
        # left.
        tail = [(position, chunk) for position, chunk in reversed(held.pinned.items()) if reachable and chunk.pins == 1]
        tail_bytes, behind = 0, iter(tail)
        following = next(behind, None)
        count, need = len(wanted), sum(sizes)
        evictable = self._allocator.free_bytes + (self._resident - self._pinned if reachable else 0)
        while count:
            while following is not None and following[0] > wanted[count - 1][0]:
                tail_bytes += following[1].nbytes
                following = next(behind, None)
            if need <= evictable + tail_bytes:
                break
            count -= 1
            need -= sizes[count]
        if not count:
            return len(wanted)
        own = (chunk for position, chunk in tail if position > wanted[count - 1][0])
        spare = chain(self._evictable() if reachable else (), own)
        victims: list[_Chunk] = []  # their extents are free for now, their places in the index are not lost yet
        if not self._make_room(held, wanted[:count], need, spare, victims):
            count = self._place_in_pieces(held, wanted[:count], tail, victims)
        self._settle_victims(held, victims)
        return len(wanted) - count

    def _reachable(self, held: _Reservation) -> bool:
        """Whether some layer could be served up to `first_chunk`, so that what follows there is worth an eviction."""
        head = [held.pinned.get(position) for position in range(held.first_chunk)]
        return any(all(chunk is not None and spec.layer_idx in chunk.layers for chunk in head) for spec in held.specs)

    def _make_room(
        self, held: _Reservation, wanted: _Wanted, need: int, spare: Iterator[_Chunk], victims: list[_Chunk]
    ) -> bool:
        """Free the extents of `spare` chunks, in order, until `wanted` has been placed or there are no more."""
        step = 1
        while need > self._allocator.free_bytes or not self._allocate(held, wanted):
            if need <= self._allocator.free_bytes:
                step *= 2  # enough bytes, in pieces too small: a try costs O(wanted), so there must be few of them
            more = list(islice(spare, step))
            if not more:
                return False
            for victim in more:
                self._free(victim)
            victims += more
        return True

    def _place_in_pieces(
        self, held: _Reservation, wanted: _Wanted, tail: list[tuple[int, _Chunk]], victims: list[_Chunk]
    ) -> int:
        """Place the longest head of `wanted`, which as a whole does not fit into the holes, in O(log wanted) tries.

        Everything evictable is free already, and of `tail` what is behind `wanted`.
        """
        end = wanted[-1][0]
        fits, too_many = 0, len(wanted)
        while count := (fits + too_many) // 2:  # ends with a try of the most that fits, which stays placed
            own = [chunk for position, chunk in tail if wanted[count - 1][0] < position <= end]
            for chunk in own:
                self._free(chunk)
            placed = self._allocate(held, wanted[:count])
            if placed and count + 1 == too_many:
                victims += own
                return count
            if placed:
                fits = count
                self._free_writes(held)
            else:
                too_many = count
            for chunk in own:
                self._take_back(chunk)
        return 0

    def _missing(self, held: _Reservation, position: int) -> list[LayerSpec]:
        chunk = held.pinned.get(position)
        return [spec for spec in held.specs if chunk is None or spec.layer_idx not in chunk.layers]

    def _evictable(self) -> Iterator[_Chunk]:
        return (chunk for key in self._order.coldest_first() if not (chunk := self._chunks[key]).pins)

    def _allocate(self, held: _Reservation, wanted: _Wanted) -> bool:
        """Take extents for all of `wanted`, layer by layer so that a layer's chunks are neighbours; all or nothing."""
        writes: dict[int, dict[int, Extent]] = {position: {} for position, _ in wanted}
        for spec in held.specs:
            positions = [position for position, missing in wanted if spec in missing]
            if not positions:
                continue
            sizes = [spec.row_bytes * self._tokens_in(held, position) for position in positions]
            before = held.pinned.get(positions[0] - 1)
            behind = before.layers.get(spec.layer_idx) if before is not None else None
            after = behind[1].offset + behind[1].nbytes if behind is not None else None
            extents = self._allocator.allocate_run(sizes, after=after)
            if extents is None:
                for write in writes.values():
                    self._allocator_free(write.values())
                return False
            for position, extent in zip(positions, extents, strict=True):
                writes[position][spec.layer_idx] = extent
        held.writes = writes
        self._reserved += sum(self._allocator.aligned(e.nbytes) for write in writes.values() for e in write.values())
        return True

    def _allocator_free(self, extents: Iterable[Extent]) -> None:
        for extent in extents:
            self._allocator.free(extent)

    def _free_writes(self, held: _Reservation) -> None:
        for write in held.writes.values():
            self._reserved -= sum(self._allocator.aligned(extent.nbytes) for extent in write.values())
            self._allocator_free(write.values())
        held.writes = {}

    def _free(self, chunk: _Chunk) -> None:
        self._allocator_free(extent for _, extent in chunk.layers.values())

    def _take_back(self, victim: _Chunk) -> bool:
        """Undo `_free` where the place is still unused: nothing is evicted that need not be."""
        taken: list[Extent] = []
        for _, extent in victim.layers.values():
            try:
                self._allocator.allocate_at(extent)
            except ValueError:
                self._allocator_free(taken)
                return False
            taken.append(extent)
        return True

    def _settle_victims(self, held: _Reservation, victims: list[_Chunk]) -> None:
        """Give back to the victims, coldest first, what was not needed of them; evict the others."""
        lost: dict[bytes, _Chunk] = {}
        for victim in reversed(victims):  # heads before tails
            # What continues a lost chunk can't be served: it goes too, so that what stays is a usable prefix.
            if self._order.parent(victim.key) in lost or not self._take_back(victim):
                lost[victim.key] = victim
        if not lost:
            return
        for position in [position for position, chunk in held.pinned.items() if chunk.key in lost]:
            self._unpin(held.pinned.pop(position))  # of this prefix's own tail
        for victim in reversed(lost.values()):
            self._remove(victim)  # its extents are free already
        self._evicted_total += len(lost)

    def _link(self, held: _Reservation, position: int) -> tuple[bool, bool]:
        """Make one written chunk visible; returns whether it is complete now, and whether that took these rows."""
        key, writes = held.keys[position], held.writes[position]
        self._reserved -= sum(self._allocator.aligned(extent.nbytes) for extent in writes.values())
        chunk = self._chunks.get(key)
        there = chunk.layers if chunk is not None else {}
        if not all(spec.layer_idx in there or spec.layer_idx in writes for spec in held.specs):
            # What was present at the reservation has been dropped since: all layers together, or none.
            self._allocator_free(writes.values())
            return False, False
        if chunk is None:
            chunk = _Chunk(key, held.space, self._tokens_in(held, position), held.kv_local)
            self._chunks[key] = chunk
            self._order.add(key, held.keys[position - 1] if position else None)
        chunk.kv_local = chunk.kv_local or held.kv_local
        new = False
        for spec in held.specs:
            extent = writes.get(spec.layer_idx)
            if extent is None:
                continue
            if spec.layer_idx in chunk.layers:  # another writer was first
                self._allocator.free(extent)
                continue
            new = True
            chunk.layers[spec.layer_idx] = (spec, extent)
            self._specs[held.space, spec.layer_idx].append(spec)
            self._count_bytes(chunk, self._allocator.aligned(extent.nbytes))
        return True, new

    def _count_bytes(self, chunk: _Chunk, nbytes: int) -> None:
        chunk.nbytes += nbytes
        self._resident += nbytes
        self._pinned += nbytes if chunk.pins else 0
        self._leased += nbytes if chunk.leases else 0

    def _order_prefix(self, keys: Sequence[bytes]) -> int:
        """Warm the part of a prefix that is there without a hole, cool what is behind; returns its length in chunks."""
        end = next((i for i, key in enumerate(keys) if key not in self._chunks), len(keys))
        self._order.touch(keys[:end])
        for position in range(end + 1, len(keys)):
            if keys[position] in self._chunks and keys[position - 1] not in self._chunks:
                self._order.demote(keys[position])
        return end

    def _lease_runs(self, held: _Lease, specs: tuple[LayerSpec, ...]) -> tuple[Run, ...]:
        pieces = (
            (spec, position * self._chunk_size, chunk.num_tokens, chunk.layers[spec.layer_idx][1])
            for spec in specs
            for position, chunk in enumerate(held.chunks)
        )
        return _merge(pieces)

    def _pin(self, chunk: _Chunk, *, lease: bool = False) -> None:
        if not chunk.pins:
            self._pinned += chunk.nbytes
        chunk.pins += 1
        if lease:
            if not chunk.leases:
                self._leased += chunk.nbytes
            chunk.leases += 1

    def _unpin(self, chunk: _Chunk, *, lease: bool = False) -> None:
        chunk.pins -= 1
        if lease:
            chunk.leases -= 1
            if not chunk.leases:
                self._leased -= chunk.nbytes
        if chunk.pins:
            return
        if chunk.linked:
            self._pinned -= chunk.nbytes
        else:
            self._stranded -= chunk.nbytes
            self._free(chunk)

    def _end(self, hold: HoldId) -> None:
        held = self._holds.pop(hold)
        if isinstance(held, _Lease):
            for chunk in held.chunks:
                self._unpin(chunk, lease=True)
            return
        self._free_writes(held)
        for chunk in held.pinned.values():
            self._unpin(chunk)
        for spec in held.specs:
            self._unuse_spec(held.space, spec)

    def _unuse_spec(self, space: bytes, spec: LayerSpec) -> None:
        uses = self._specs[space, spec.layer_idx]
        uses.pop()
        if not uses:
            del self._specs[space, spec.layer_idx]

    def _unlink(self, chunk: _Chunk) -> None:
        """Drop a chunk from the index; its memory is freed now, or with its last hold."""
        if chunk.pins:
            self._pinned -= chunk.nbytes
            self._stranded += chunk.nbytes
        else:
            self._free(chunk)
        self._remove(chunk)

    def _remove(self, chunk: _Chunk) -> None:
        """The index's part of dropping a chunk."""
        chunk.linked = False
        del self._chunks[chunk.key]
        self._order.remove(chunk.key)
        self._resident -= chunk.nbytes
        for spec, _ in chunk.layers.values():
            self._unuse_spec(chunk.space, spec)


def _merge(pieces: Iterable[tuple[LayerSpec, int, int, Extent]]) -> tuple[Run, ...]:
    """Join pieces (spec, first token, tokens, extent) that follow each other in the prefix and touch in the pool."""
    runs: list[Run] = []
    for spec, start, tokens, extent in pieces:
        last = runs[-1] if runs else None
        if (
            last is not None
            and last.layer_idx == spec.layer_idx
            and last.start_token + last.num_tokens == start
            and last.offset + last.num_tokens * spec.row_bytes == extent.offset
        ):
            runs[-1] = last._replace(num_tokens=last.num_tokens + tokens)
        else:
            runs.append(Run(spec.layer_idx, start, tokens, extent.offset))
    return tuple(runs)
