"""The chunks of a pool: what is where, who holds it, and in which order it goes.

`ChunkTable` keeps the index, the order of eviction, the allocator and the counts of bytes in step with each other. It
decides nothing: what to evict is up to `hs_cache.placement`, who may hold what to `hs_cache.store`.

Memory moves between the states that `hs_cache.store` names like this: `ChunkTable.take` makes free memory reserved,
`ChunkTable.add_layer` makes that resident; `ChunkTable.unlink` frees it, or strands it until the last
`ChunkTable.let_go`.
"""

import math
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from itertools import chain, pairwise, takewhile

from hs_cache.eviction import PrefixLRU
from hs_cache.extents import ALIGNMENT, CutRules, Extent, ExtentAllocator
from hs_cache.messages import EVICTED, LayerSpec

Extents = tuple[Extent, ...]
"""Where the rows of one layer of a chunk lie, in their order; each but the last is a multiple of the alignment."""

LEAST_PIECE_BYTES = 64 << 10
"""Rows of a chunk are cut into no smaller pieces: there, to begin a copy costs as much as the bytes do."""

_MAX_PIECES = 8
"""A layer of a chunk lies in so many extents at most: each may cost whoever reads it a copy of its own."""

_MAX_DEPARTED = 65_536


@dataclass(slots=True, eq=False)
class Chunk:
    """One chunk with all its layers, while it is in the table or still held. Only `ChunkTable` changes its counts.

    Attributes:
        layers: by layer_idx, the layer's spec and where its rows are, usually one extent.
        nbytes: room of all layers, with alignment.
        holds: how many leases and reservations hold it.
        leases: how many of these are leases.
        linked: whether it is in the table; dropped chunks live on while they are held.
        confirmed: how many stores have found it or made it. What the KV side said before the last one is out of date.
    """

    key: bytes
    space: bytes
    num_tokens: int
    kv_local: bool
    layers: dict[int, tuple[LayerSpec, Extents]] = field(default_factory=dict)
    nbytes: int = 0
    confirmed: int = 0
    holds: int = 0
    leases: int = 0
    linked: bool = True

    def extents(self) -> list[Extent]:
        """Where its rows are, layer by layer."""
        return [extent for _, extents in self.layers.values() for extent in extents]


class ChunkTable:
    """Chunk key → chunk, with the memory, the order and the counts that belong to it. Not thread-safe; nothing blocks.

    Operations are O(chunks or extents named), but for those of the order; see `hs_cache.eviction.PrefixLRU`.

    Args:
        capacity_bytes: size of the pool's data region.
        least_piece_bytes: a layer's rows of a chunk lie in no smaller pieces, unless they are fewer.

    Attributes:
        resident_bytes: of chunks in the table. All counts of bytes include alignment.
        reserved_bytes: taken, and not yet a chunk's.
        stranded_bytes: of chunks that are held and no longer in the table.
        held_bytes: the part of `resident_bytes` that is held.
        leased_bytes: of chunks under a lease, whether in the table or not.
    """

    def __init__(self, capacity_bytes: int, *, least_piece_bytes: int = LEAST_PIECE_BYTES) -> None:
        self._allocator = ExtentAllocator(capacity_bytes)
        self._least_piece_bytes = least_piece_bytes
        self._chunks: dict[bytes, Chunk] = {}
        self._order = PrefixLRU()
        self._specs: dict[tuple[bytes, int], list[LayerSpec]] = {}  # one entry per chunk or reservation that uses it
        self._changes: dict[bytes, bool] = {}  # keys entered (True) and dropped since `take_changes`
        self._departed: OrderedDict[bytes, str] = OrderedDict()  # why chunks that were here are not, oldest first
        self.resident_bytes = self.reserved_bytes = self.stranded_bytes = 0
        self.held_bytes = self.leased_bytes = 0

    def __contains__(self, key: bytes) -> bool:
        return key in self._chunks

    def __len__(self) -> int:
        return len(self._chunks)

    @property
    def capacity_bytes(self) -> int:
        """Bytes managed."""
        return self._allocator.capacity

    @property
    def free_bytes(self) -> int:
        """Bytes in holes."""
        return self._allocator.free_bytes

    @property
    def evictable_bytes(self) -> int:
        """Bytes of the chunks that `evictable` yields."""
        return self.resident_bytes - self.held_bytes

    def get(self, key: bytes) -> Chunk | None:
        """The chunk, if it is in the table; no effect on the order."""
        return self._chunks.get(key)

    def run(self, keys: Iterable[bytes], layers: Iterable[int]) -> list[Chunk]:
        """The chunks of `keys` up to the first that isn't there with every layer; no effect on the order."""
        wanted, chunks = set(layers), list[Chunk]()
        for chunk in map(self._chunks.get, keys):
            if chunk is None or not wanted <= chunk.layers.keys():
                break
            chunks.append(chunk)
        return chunks

    # Memory that is not a chunk's yet.

    def room(self, extents: Iterable[Extent]) -> int:
        """Bytes that extents take, with alignment."""
        return sum(self._allocator.aligned(extent.nbytes) for extent in extents)

    def take(self, spec: LayerSpec, tokens: Sequence[int], *, after: int | None, apart: bool) -> list[Extents] | None:
        """Reserve room for a layer of chunks of so many tokens each that follow each other, all or none.

        In one contiguous piece; or `apart`, if that can't be: then some chunks may lie elsewhere than others, and the
        rows of some in several extents. See `hs_cache.extents.ExtentAllocator`.
        """
        sizes = [spec.row_bytes * count for count in tokens]
        places: list[Extents] | None = None
        if apart:
            rules = CutRules(math.lcm(spec.row_bytes, ALIGNMENT), self._least_piece_bytes, _MAX_PIECES)
            places = self._allocator.allocate_cut(sizes, rules, after=after)
        if places is None:
            allocate = self._allocator.allocate_run if apart else self._allocator.allocate_together
            run = allocate(sizes, after=after)
            places = None if run is None else [(extent,) for extent in run]
        if places is not None:
            self.reserved_bytes += self.room(chain.from_iterable(places))
        return places

    def give_back(self, extents: Iterable[Extent]) -> None:
        """Free extents that were taken and did not become a chunk's."""
        for extent in extents:
            self.reserved_bytes -= self._allocator.aligned(extent.nbytes)
            self._allocator.free(extent)

    # Chunks in the table.

    def link(self, chunk: Chunk, parent: bytes | None) -> None:
        """Enter a new chunk, which continues `parent`. `add_layer` and `order_prefix` must follow."""
        self._chunks[chunk.key] = chunk
        self._order.add(chunk.key, parent)
        self._changes[chunk.key] = True
        self._departed.pop(chunk.key, None)

    def add_layer(self, chunk: Chunk, spec: LayerSpec, extents: Extents) -> None:
        """Give a chunk in the table a layer that it has not got, in extents that were taken."""
        nbytes = self.room(extents)
        chunk.layers[spec.layer_idx] = (spec, extents)
        chunk.nbytes += nbytes
        self.reserved_bytes -= nbytes
        self.resident_bytes += nbytes
        self.held_bytes += nbytes if chunk.holds else 0
        self.leased_bytes += nbytes if chunk.leases else 0
        self.use_spec(chunk.space, spec)

    def unlink(self, chunk: Chunk, why: str = EVICTED) -> None:
        """Drop a chunk from the table; its memory is freed now, or with its last hold. `why` is remembered if given."""
        if chunk.holds:
            self.held_bytes -= chunk.nbytes
            self.stranded_bytes += chunk.nbytes
        else:
            self.vacate(chunk)
        self._remove(chunk, why)

    def hold(self, chunks: Iterable[Chunk], *, lease: bool = False) -> None:
        """Hold chunks in the table: they are not evicted, and their memory is not reused, before `let_go`."""
        for chunk in chunks:
            if not chunk.holds:
                self.held_bytes += chunk.nbytes
            chunk.holds += 1
            if lease:
                if not chunk.leases:
                    self.leased_bytes += chunk.nbytes
                chunk.leases += 1

    def let_go(self, chunks: Iterable[Chunk], *, lease: bool = False) -> None:
        """End one hold of each; the last one frees a chunk that is no longer in the table."""
        for chunk in chunks:
            chunk.holds -= 1
            if lease:
                chunk.leases -= 1
                if not chunk.leases:
                    self.leased_bytes -= chunk.nbytes
            if chunk.holds:
                continue
            if chunk.linked:
                self.held_bytes -= chunk.nbytes
            else:
                self.stranded_bytes -= chunk.nbytes
                self.vacate(chunk)

    # The order, and eviction in two steps: memory first, the place in the table once that turns out to be needed.

    def order_prefix(self, keys: Sequence[bytes], *, headless: bool = False) -> int:
        """Warm the part of a prefix that is there without a hole, cool what is behind; returns its length in chunks.

        `headless`: what is behind a hole may be in use all the same, its head being on another node; warm it too.
        """
        end = next((i for i, key in enumerate(keys) if key not in self._chunks), len(keys))
        heads = [
            position
            for position in range(end + 1, len(keys))
            if keys[position] in self._chunks and keys[position - 1] not in self._chunks
        ]
        if headless:
            for position in reversed(heads):
                self._order.touch(list(takewhile(self._chunks.__contains__, keys[position:])))
        else:
            for position in heads:
                self._order.demote(keys[position])
        self._order.touch(keys[:end])
        return end

    def warm(self, run: Sequence[bytes]) -> None:
        """Warm chunks that follow each other, and before them what they continue as far as it is there."""
        if not run:
            return
        head: list[bytes] = []
        parent = self._order.parent(run[0])
        while parent is not None and parent in self._chunks:
            head.append(parent)
            parent = self._order.parent(parent)
        self._order.touch([*reversed(head), *run])

    def take_changes(self) -> dict[bytes, bool]:
        """Keys that were entered (True) or dropped (False) since the last call, by their last change."""
        changes, self._changes = self._changes, {}
        return changes

    def deny(self, key: bytes) -> None:
        """Count a key that isn't there as dropped once more: somebody believes that it is there."""
        self._changes.setdefault(key, False)

    def keys(self) -> bytes:
        """The keys of all chunks, in no order."""
        return b"".join(self._chunks)

    def of_spaces(self, spaces: Set[bytes]) -> list[Chunk]:
        """The chunks of some key spaces, in no order; O(chunks)."""
        return [chunk for chunk in self._chunks.values() if chunk.space in spaces]

    def parent(self, chunk: Chunk) -> bytes | None:
        """The key that a chunk in the table continues; None for the first chunk of a prompt."""
        return self._order.parent(chunk.key)

    def evictable(self) -> Iterator[Chunk]:
        """Chunks that nobody holds, coldest first. Vacate while iterating, but evict only afterwards."""
        return (chunk for key in self._order.coldest_first() if not (chunk := self._chunks[key]).holds)

    def vacate(self, chunk: Chunk) -> None:
        """Free a chunk's memory. While the chunk is in the table, `reoccupy` or `evict` must follow."""
        for extent in chunk.extents():
            self._allocator.free(extent)

    def reoccupy(self, chunk: Chunk) -> bool:
        """Undo `vacate` if all of the place is still free; otherwise nothing changes."""
        taken: list[Extent] = []
        for extent in chunk.extents():
            try:
                self._allocator.allocate_at(extent)
            except ValueError:
                for mine in taken:
                    self._allocator.free(mine)
                return False
            taken.append(extent)
        return True

    def evict(self, chunk: Chunk) -> None:
        """Drop a chunk that nobody holds and that has been vacated."""
        self._remove(chunk, EVICTED)

    def why_gone(self, key: bytes) -> str:
        """Why a chunk that isn't in the table has left it; ``""`` if it never was, or that was too long ago."""
        return self._departed.get(key, "")

    def _remove(self, chunk: Chunk, why: str) -> None:
        chunk.linked = False
        if why:
            self._departed[chunk.key] = why
        if len(self._departed) > _MAX_DEPARTED:
            self._departed.popitem(last=False)
        del self._chunks[chunk.key]
        self._order.remove(chunk.key)
        self._changes[chunk.key] = False
        self.resident_bytes -= chunk.nbytes
        for spec, _ in chunk.layers.values():
            self.unuse_spec(chunk.space, spec)

    # A layer has one spec per key space, for as long as a chunk or a reservation uses it.

    def spec_in_use(self, space: bytes, layer_idx: int) -> LayerSpec | None:
        """The spec of a layer in a key space, if there is a use of it."""
        uses = self._specs.get((space, layer_idx))
        return uses[0] if uses else None

    def spaces(self) -> set[bytes]:
        """The key spaces of which there are chunks or reservations."""
        return {space for space, _ in self._specs}

    def use_spec(self, space: bytes, spec: LayerSpec) -> None:
        """Add one use; it agrees with `spec_in_use`."""
        self._specs.setdefault((space, spec.layer_idx), []).append(spec)

    def unuse_spec(self, space: bytes, spec: LayerSpec) -> None:
        """End one use."""
        uses = self._specs[space, spec.layer_idx]
        uses.pop()
        if not uses:
            del self._specs[space, spec.layer_idx]

    def check(
        self,
        *,
        holds: Counter[Chunk],
        leases: Counter[Chunk],
        reserved: Sequence[Extent],
        specs: Iterable[tuple[bytes, LayerSpec]],
    ) -> None:
        """Audit everything against what the holds say; raises AssertionError. O(everything).

        Args:
            holds: how many leases and reservations hold each held chunk.
            leases: how many of these are leases.
            reserved: the extents that reservations have taken.
            specs: the uses by reservations, as key space and spec.
        """
        self._allocator.check()
        self._order.check()
        chunks = {*self._chunks.values(), *holds}
        for chunk in chunks:
            counted, held = (chunk.holds, chunk.leases), (holds[chunk], leases[chunk])
            assert counted == held, f"{chunk.key.hex()}: counts {counted} holds and leases, there are {held}"
            assert chunk.linked or chunk.holds, "a chunk that nobody holds is stranded"
            assert chunk.layers, "a chunk has no layer"
            assert chunk.nbytes == self.room(chunk.extents())
            for spec, extents in chunk.layers.values():
                self._check_layer(chunk, spec, extents)
        linked = [chunk for chunk in chunks if chunk.linked]
        assert {chunk.key for chunk in linked} == set(self._chunks) == set(self._order.coldest_first())
        self._check_memory(chunks, reserved)
        self._check_specs(chain(specs, ((chunk.space, spec) for chunk in linked for spec, _ in chunk.layers.values())))

    def _check_layer(self, chunk: Chunk, spec: LayerSpec, extents: Extents) -> None:
        nbytes = spec.row_bytes * chunk.num_tokens
        assert sum(extent.nbytes for extent in extents) == nbytes, "extents don't add up to their layer"
        assert 1 <= len(extents) <= _MAX_PIECES, f"a layer lies in {len(extents)} extents"
        assert all(extent.nbytes % spec.row_bytes == 0 for extent in extents), "a row is cut"
        assert self.room(extents) == self._allocator.aligned(nbytes), "pieces take more room than the whole"
        least = min(nbytes, self._least_piece_bytes)
        assert all(extent.nbytes >= least for extent in extents), "a piece is too small to be worth a copy"

    def _check_memory(self, chunks: Iterable[Chunk], reserved: Sequence[Extent]) -> None:
        extents = sorted(chain(reserved, *(chunk.extents() for chunk in chunks)))
        for left, right in pairwise(extents):
            assert left.offset + left.nbytes <= right.offset, f"extents overlap: {left}, {right}"
        used = self._allocator.used_bytes
        assert self.room(extents) == used, "the allocator holds bytes that nobody owns, or the reverse"
        assert self.reserved_bytes == self.room(reserved)
        assert self.resident_bytes == sum(chunk.nbytes for chunk in chunks if chunk.linked)
        assert self.stranded_bytes == sum(chunk.nbytes for chunk in chunks if not chunk.linked)
        assert self.held_bytes == sum(chunk.nbytes for chunk in chunks if chunk.linked and chunk.holds)
        assert self.leased_bytes == sum(chunk.nbytes for chunk in chunks if chunk.leases)
        taken = self.reserved_bytes + self.resident_bytes + self.stranded_bytes
        assert self.free_bytes + taken == self.capacity_bytes

    def _check_specs(self, found: Iterable[tuple[bytes, LayerSpec]]) -> None:
        expected: dict[tuple[bytes, int], list[LayerSpec]] = {}
        for space, spec in found:
            expected.setdefault((space, spec.layer_idx), []).append(spec)
        for uses in expected.values():
            assert len(set(uses)) == 1, f"a layer has two specs in one key space: {set(uses)}"
        assert expected == self._specs, "a spec is counted too often, or too rarely"
