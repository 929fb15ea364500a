"""Which chunks of a reservation get room, where, and what is evicted for them.

A reservation is served from its head: the longest head of what it lacks that can be made to fit is placed, the tail is
refused. First the room is counted, so that nothing is vacated for chunks that could not be placed anyway; then chunks
are vacated, coldest first, until the allocator finds places; then every vacated chunk whose place was not used after
all takes it back. Only what is left without its place is evicted.

Rows that lie together are handed out without a copy. Sizes that are unlike each other would leave ever more of a pool
in holes too small for that, so it is insisted on only up to a point: beyond it rows go wherever there is room.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

from hs_cache.chunks import Chunk, ChunkTable, Extents
from hs_cache.extents import Extent, ExtentAllocator
from hs_cache.messages import LayerSpec

_MAX_HOLES = 0.02
"""This part of the pool may be in holes, beside the room that is needed, before rows of a store may lie apart.

Under churn (``benchmarks/churn.py``) this is what stays unused, and it buys contiguity: with 0.5, 1, 2, 3 and 5 % a
layer of a prefix of 28 chunks lies in 10.6, 6.2, 3.4, 3.0 and 1.8 runs.
"""


@dataclass(slots=True, eq=False)
class Reservation:
    """A write under way: chunks ``first_chunk ..`` of a prefix, with the layers of `specs`.

    Attributes:
        keys: of the whole prefix, from chunk 0; a *position* is an index into it.
        num_tokens: of the whole prefix.
        present: by position, the chunks of the prefix that were there, and are held.
        writes: by position and layer_idx, the extents to be written.
        headless: whether the head of the prefix may be on another node.
        replace: whether what is written replaces what is there.
        keep: whether what is written stays held when it is committed.
        evict: whether chunks may go for it.
        caller: under which id a client asked for it, where it isn't the one who holds it.
        retired: whether its key space was retired meanwhile, so that nothing of it becomes visible.
    """

    space: bytes
    keys: Sequence[bytes]
    num_tokens: int
    chunk_size: int
    first_chunk: int
    specs: tuple[LayerSpec, ...]
    kv_local: bool
    headless: bool
    replace: bool = False
    keep: bool = False
    evict: bool = True
    caller: tuple[bytes, int] | None = None
    present: dict[int, Chunk] = field(default_factory=dict)
    writes: dict[int, dict[int, Extents]] = field(default_factory=dict)
    retired: bool = False

    def tokens_in(self, position: int) -> int:
        """Tokens of the chunk; only the last of a prefix may be short."""
        return min(self.chunk_size, self.num_tokens - position * self.chunk_size)

    def missing(self, position: int) -> dict[int, LayerSpec]:
        """The layers that the chunk lacks, by layer_idx, as far as it is held; all of them where it isn't there."""
        chunk = self.present.get(position)
        there = chunk.layers if chunk is not None else {}
        return {spec.layer_idx: spec for spec in self.specs if spec.layer_idx not in there}

    def extents(self) -> list[Extent]:
        """All extents to be written."""
        return [extent for write in self.writes.values() for extents in write.values() for extent in extents]


def place(table: ChunkTable, reservation: Reservation) -> tuple[int, int]:
    """Fill `writes` for the longest head of the missing chunks that fits, evicting as little as that takes.

    Chunks of the reservation's own prefix that get evicted, all behind the last one placed, leave its `present`.

    Returns:
        How many chunks were refused, and how many were evicted.
    """
    return _Placement(table, reservation).run()


class _Placement:
    def __init__(self, table: ChunkTable, reservation: Reservation) -> None:
        self._table = table
        self._held = held = reservation
        self._wanted = [  # positions where something is to be written, and the layers
            (position, missing)
            for position in range(held.first_chunk, len(held.keys))
            if (missing := held.missing(position))
        ]
        self._evicts = self._may_evict()
        # Chunks of this prefix behind the last one placed are no use to these layers: they go when nothing else is
        # left.
        self._tail = [
            (position, chunk) for position, chunk in reversed(held.present.items()) if self._evicts and chunk.holds == 1
        ]
        self._victims: list[Chunk] = []  # vacated, their places in the table are not lost yet

    def run(self) -> tuple[int, int]:
        """See `place`."""
        count, need = self._admit()
        if not count:
            return len(self._wanted), 0
        own = (chunk for position, chunk in self._tail if position > self._wanted[count - 1][0])
        spare = chain(self._table.evictable() if self._evicts else (), own)
        short = max(need - self._table.free_bytes, 0)
        together = self._make_room(count, need, spare)
        if not together:
            count = self._place_in_pieces(count)
        lost = self._take_back()
        if together and sum([chunk.nbytes for chunk in lost.values()]) > short + need:
            lost = self._place_apart(count, need, lost)
        return len(self._wanted) - count, self._evict(lost)

    def _may_evict(self) -> bool:
        """Whether chunks may go for this: it says so, and some layer could be served up to `first_chunk`, so that what
        follows there is worth it.
        """
        held = self._held
        if not held.evict:
            return False
        if held.headless:
            return True
        head = [held.present.get(position) for position in range(held.first_chunk)]
        return any(all(chunk is not None and spec.layer_idx in chunk.layers for chunk in head) for spec in held.specs)

    def _admit(self) -> tuple[int, int]:
        """The longest head of what is wanted that fits by bytes, whatever the holes look like: its length and bytes."""
        sizes = [
            sum(ExtentAllocator.aligned(spec.row_bytes * self._held.tokens_in(position)) for spec in missing.values())
            for position, missing in self._wanted
        ]
        room = self._table.free_bytes + (self._table.evictable_bytes if self._evicts else 0)
        behind = iter(self._tail)
        following = next(behind, None)
        count, need = len(sizes), sum(sizes)
        while count:
            while following is not None and following[0] > self._wanted[count - 1][0]:
                room += following[1].nbytes
                following = next(behind, None)
            if need <= room:
                break
            count -= 1
            need -= sizes[count]
        return count, need

    def _make_room(self, count: int, need: int, spare: Iterator[Chunk], *, apart: bool = False) -> bool:
        """Vacate `spare` chunks, in order, until the first `count` wanted are placed or there are no more.

        Unless it may be `apart` from the beginning, the rows of each layer are to lie together, as long as no more than
        `_MAX_HOLES` of the pool is vacated for it.
        """
        most = need + int(_MAX_HOLES * self._table.capacity_bytes)
        step, next_try = 1, 0
        for number, victim in enumerate(spare):
            free = self._table.free_bytes
            if need <= free:
                enough = not apart and free + victim.nbytes > most
                apart = apart or enough
                if enough or number >= next_try:
                    if self._take(count, apart=apart):
                        return True
                    step *= 2  # enough bytes, in pieces too small: a try costs O(count), so there must be few of them
                    next_try = number + step
            self._table.vacate(victim)
            self._victims.append(victim)
        return self._take(count, apart=True)

    def _place_in_pieces(self, limit: int) -> int:
        """Place the longest head of the first `limit` wanted, which as a whole don't fit the holes; O(log limit) tries.

        Everything evictable is vacated already, and of the own tail what is behind the first `limit`.
        """
        end = self._wanted[limit - 1][0]
        fits, too_many = 0, limit
        while count := (fits + too_many) // 2:  # ends with a try of the most that fits, which stays placed
            own = [chunk for position, chunk in self._tail if self._wanted[count - 1][0] < position <= end]
            for chunk in own:
                self._table.vacate(chunk)
            placed = self._take(count, apart=True)
            if placed and count + 1 == too_many:
                self._victims += own
                return count
            if placed:
                fits = count
                self._table.give_back(self._held.extents())
                self._held.writes = {}
            else:
                too_many = count
            for chunk in own:
                self._table.reoccupy(chunk)
        return 0

    def _take(self, count: int, *, apart: bool) -> bool:
        """Take extents for the first `count` wanted, layer by layer so that a layer's chunks touch; all or none.

        `apart`: chunks need not touch, see `hs_cache.chunks.ChunkTable.take`.
        """
        held, wanted = self._held, self._wanted[:count]
        held.writes = {position: {} for position, _ in wanted}
        for spec in held.specs:
            positions = [position for position, missing in wanted if spec.layer_idx in missing]
            if not positions:
                continue
            tokens = [held.tokens_in(position) for position in positions]
            places = self._table.take(spec, tokens, after=self._end_before(positions[0], spec), apart=apart)
            if places is None:
                self._table.give_back(held.extents())
                held.writes = {}
                return False
            for position, extents in zip(positions, places, strict=True):
                held.writes[position][spec.layer_idx] = extents
        return True

    def _end_before(self, position: int, spec: LayerSpec) -> int | None:
        """Where in the pool a layer of the chunk before `position` ends, if it is there."""
        before = self._held.present.get(position - 1)
        layer = before.layers.get(spec.layer_idx) if before is not None else None
        return layer[1][-1].offset + layer[1][-1].nbytes if layer is not None else None

    def _place_apart(self, count: int, need: int, lost: dict[bytes, Chunk]) -> dict[bytes, Chunk]:
        """Place anew what came to lie where a head was with much behind it: apart, and where the coldest are. Returns
        the chunks lost then."""
        self._table.give_back(self._held.extents())
        for victim in lost.values():
            self._table.reoccupy(victim)
        victims, self._victims = self._victims, []
        placed = self._make_room(count, need, iter(victims), apart=True)
        assert placed, "what fitted in one piece does not fit in several"
        return self._take_back()

    def _take_back(self) -> dict[bytes, Chunk]:
        """Give back to the victims, heads before tails, what was not needed of them; those that are lost."""
        lost: dict[bytes, Chunk] = {}
        for victim in reversed(self._victims):
            # What continues a lost chunk can't be served: it goes too, so that what stays is a usable prefix.
            if self._table.parent(victim) in lost or not self._table.reoccupy(victim):
                lost[victim.key] = victim
        return lost

    def _evict(self, lost: dict[bytes, Chunk]) -> int:
        if lost:
            present = self._held.present
            for position in [position for position, chunk in present.items() if chunk.key in lost]:
                self._table.let_go((present.pop(position),))  # of this prefix's own tail
        for victim in reversed(lost.values()):
            self._table.evict(victim)
        return len(lost)
