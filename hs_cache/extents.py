"""Where in a pool things lie: an allocator of offsets that never touches the memory itself.

A pool is a number of bytes, an `Extent` a piece of it. `ExtentAllocator` keeps the free pieces (*holes*) in two sorted
lists, by offset and by size, so that finding, splitting and merging a hole is a binary search: O(log n).
Insertion into a Python list also moves the pointers behind it, a memmove that a caller begins to see (tens of
microseconds a call) at 10^5 holes, far beyond what chunks of some hundred KiB can make of a pool.

Placement serves one purpose: chunks that follow each other in a prompt should follow each other in the pool, because
neighbours come back to a reader as one view without a copy. Hence `ExtentAllocator.allocate_run`, and its ``after``.
Where that would leave holes unused, `ExtentAllocator.allocate_cut` fills them.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

ALIGNMENT = 64
"""Every extent starts at a multiple of this many bytes: a cache line, and enough for any dtype and vector load."""


class Extent(NamedTuple):
    """A piece of a pool.

    Attributes:
        offset: Where it starts, in bytes from the start of the pool's data; a multiple of `ALIGNMENT`.
        nbytes: The size that was asked for, in bytes. The room it takes is `ExtentAllocator.aligned` of this.
    """

    offset: int
    nbytes: int


class CutRules(NamedTuple):
    """How a size may be cut into pieces that lie in different holes.

    Attributes:
        unit: All pieces but the last are multiples of this many bytes, itself a multiple of `ALIGNMENT`: so the pieces
            take no more room than the whole.
        least: No piece is smaller, in bytes.
        most: There are no more pieces.
    """

    unit: int
    least: int
    most: int


class ExtentAllocator:
    """Best-fit allocator with coalescing over ``[0, capacity)``.

    Deterministic: the same calls give the same offsets. Not thread-safe: its owner holds a lock. Nothing blocks. A call
    that raises or returns ``None`` has changed nothing.

    Args:
        capacity: Bytes to manage; what exceeds a multiple of `ALIGNMENT` is left unused.

    Raises:
        ValueError: ``capacity`` is below `ALIGNMENT`.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < ALIGNMENT:
            raise ValueError(f"capacity is {capacity} bytes, expected at least {ALIGNMENT}")
        self._capacity = capacity - capacity % ALIGNMENT
        self._free_bytes = 0
        self._extents: dict[int, int] = {}  # offset -> nbytes as asked for
        self._hole_sizes: dict[int, int] = {}  # offset -> size
        self._hole_offsets: list[int] = []
        self._holes_by_size: list[tuple[int, int]] = []  # (size, offset)
        self._add_hole(0, self._capacity)

    @property
    def capacity(self) -> int:
        """Bytes managed, a multiple of `ALIGNMENT`."""
        return self._capacity

    @property
    def free_bytes(self) -> int:
        """Bytes in holes. A request of this size fits only if they are one hole: see `largest_free`."""
        return self._free_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes taken, each extent counted with the room it takes after alignment."""
        return self._capacity - self._free_bytes

    @property
    def largest_free(self) -> int:
        """Size of the largest hole in bytes: the largest request that `allocate` can serve now."""
        return self._holes_by_size[-1][0] if self._holes_by_size else 0

    @staticmethod
    def aligned(nbytes: int) -> int:
        """The room that an extent of ``nbytes`` takes: rounded up to a multiple of `ALIGNMENT`."""
        return -(-nbytes // ALIGNMENT) * ALIGNMENT

    def holes(self) -> Iterator[Extent]:
        """The free pieces by ascending offset, each as large as it can be. Don't allocate or free while iterating."""
        return (Extent(offset, self._hole_sizes[offset]) for offset in self._hole_offsets)

    def allocate(self, nbytes: int, *, after: int | None = None) -> Extent | None:
        """Take ``nbytes`` bytes.

        Args:
            nbytes: Size in bytes, above 0.
            after: Where it should start if that very place is free, usually the end of another extent; rounded up to
                `ALIGNMENT`. Otherwise the smallest hole that is large enough is used, among equals the first.

        Returns:
            The extent, or ``None`` if no hole is large enough.

        Raises:
            ValueError: ``nbytes`` is not above 0.
        """
        placed = self.allocate_run((nbytes,), after=after)
        return placed[0] if placed is not None else None

    def allocate_run(self, sizes: Sequence[int], *, after: int | None = None) -> list[Extent] | None:
        """Take one extent for each size, all of them or none, as contiguous as the holes allow.

        One contiguous piece is tried first, at ``after`` and then wherever it fits best. Failing that, the run is cut:
        the largest hole takes as many as fit in order, and so on until the rest fits into one. Should large and small
        sizes mixed defeat that, each extent is placed by itself, the largest first. Finding a placement whenever one
        exists is bin packing, so with unequal sizes ``None`` can come although one exists; with equal sizes it can't.

        Args:
            sizes: Sizes in bytes, each above 0. Neighbours in one piece touch to the byte only where sizes are
                multiples of `ALIGNMENT`.
            after: As for `allocate`, for the first extent.

        Returns:
            The extents in the order of ``sizes``, which is the order of offsets only within a piece; ``None`` if they
            don't fit.

        Raises:
            ValueError: A size is not above 0.
        """
        if (placed := self.allocate_together(sizes, after=after)) is not None:
            return placed
        if len(sizes) == 1 or sum(map(self.aligned, sizes)) > self._free_bytes:
            return None
        return self._allocate_in_pieces(sizes) or self._allocate_each(sizes)

    def allocate_together(self, sizes: Sequence[int], *, after: int | None = None) -> list[Extent] | None:
        """As `allocate_run`, but one contiguous piece or nothing."""
        self._check_sizes(sizes)
        total = sum(map(self.aligned, sizes))
        if not total:
            return []
        if after is not None and self._hole_around(start := self.aligned(after), total) is not None:
            return self._take(start, sizes)
        best = self._best_fit(total)
        return self._take(best, sizes) if best is not None else None

    def allocate_cut(
        self, sizes: Sequence[int], cut: CutRules, *, after: int | None = None
    ) -> list[tuple[Extent, ...]] | None:
        """As `allocate_run`, but a size that meets the end of a hole may be served by several extents.

        Where all of it can't be one contiguous piece, the largest hole is filled, then the next, until the rest fits
        into one. So it takes as few holes as it can, hardly anything of them is left, and small ones are left to grow.

        Returns:
            The extents of each size, in order, which add up to it; ``None`` if they don't fit as `cut` wants them.

        Raises:
            ValueError: A size is not above 0.
        """
        if (together := self.allocate_together(sizes, after=after)) is not None:
            return [(extent,) for extent in together]
        rest = sum(map(self.aligned, sizes))
        if rest > self._free_bytes:
            return None
        placed: list[list[Extent]] = [[] for _ in sizes]
        at = done = 0  # the size to be served next, and how much of it is
        while rest:
            best = self._best_fit(rest)
            hole = self._largest_hole() if best is None else Extent(best, self._hole_sizes[best])
            parts, done = self._parts(sizes, at, done, len(placed[at]), hole.nbytes, cut)
            if not parts:
                self._undo(chain.from_iterable(placed))
                return None
            for number, extent in enumerate(self._take(hole.offset, parts), start=at):
                placed[number].append(extent)
            at += len(parts) - (done > 0)
            rest -= sum(map(self.aligned, parts))
        return [tuple(extents) for extents in placed]

    def allocate_at(self, extent: Extent) -> None:
        """Take exactly this place, for instance to undo a `free`.

        Raises:
            ValueError: The place is not free as a whole, not aligned, or outside the pool.
        """
        offset, nbytes = extent
        if nbytes <= 0 or offset % ALIGNMENT:
            raise ValueError(f"extent is {extent}, expected nbytes above 0 and an offset in multiples of {ALIGNMENT}")
        if self._hole_around(offset, self.aligned(nbytes)) is None:
            raise ValueError(f"extent is {extent}, expected a place that is free")
        self._take(offset, (nbytes,))

    def free(self, extent: Extent) -> None:
        """Give an extent back; it merges with the holes on both sides.

        Raises:
            ValueError: The extent is not allocated, or was allocated with another size: a double free, or someone
                else's extent.
        """
        offset, nbytes = extent
        allocated = self._extents.get(offset)
        if allocated != nbytes:
            found = "nothing allocated there" if allocated is None else f"{allocated} bytes allocated there"
            raise ValueError(f"extent is {extent}, expected one that is allocated; found {found}")
        del self._extents[offset]
        end = offset + self.aligned(nbytes)
        at = bisect_left(self._hole_offsets, offset)
        if at < len(self._hole_offsets) and self._hole_offsets[at] == end:
            end += self._remove_hole(end)
        if at > 0:
            before = self._hole_offsets[at - 1]
            if before + self._hole_sizes[before] == offset:
                self._remove_hole(before)
                offset = before
        self._add_hole(offset, end - offset)

    def check(self) -> None:
        """Audit every invariant in O(n log n).

        Raises:
            AssertionError: One is broken; the message says which.
        """
        if self._hole_offsets != sorted(self._hole_sizes):
            raise AssertionError("the holes by offset are not the holes, sorted")
        if self._holes_by_size != sorted((size, offset) for offset, size in self._hole_sizes.items()):
            raise AssertionError("the holes by size are not the holes, sorted")
        if self._free_bytes != sum(self._hole_sizes.values()):
            raise AssertionError(f"free_bytes is {self._free_bytes}, the holes sum to {sum(self._hole_sizes.values())}")
        pieces = [(offset, size, True) for offset, size in self._hole_sizes.items()]
        pieces += [(offset, self.aligned(nbytes), False) for offset, nbytes in self._extents.items()]
        end, previous_is_hole = 0, False
        for offset, size, is_hole in sorted(pieces):
            if offset != end or size <= 0 or size % ALIGNMENT:
                raise AssertionError(f"piece ({offset}, {size}) follows the end {end}: gap, overlap or misalignment")
            if is_hole and previous_is_hole:
                raise AssertionError(f"the hole at {offset} is not merged with the one before it")
            end, previous_is_hole = offset + size, is_hole
        if end != self._capacity:
            raise AssertionError(f"the pieces end at {end}, capacity is {self._capacity}")

    def _check_sizes(self, sizes: Sequence[int]) -> None:
        for nbytes in sizes:
            if nbytes <= 0:
                raise ValueError(f"nbytes is {nbytes}, expected a size above 0")

    def _allocate_in_pieces(self, sizes: Sequence[int]) -> list[Extent] | None:
        placed: list[Extent] = []
        room = [self.aligned(nbytes) for nbytes in sizes]
        rest = sum(room)
        while rest:
            best = self._best_fit(rest)
            if best is not None:
                return placed + self._take(best, sizes[len(placed) :])
            first = last = len(placed)
            offset, left = self._largest_hole()
            while room[last] <= left:
                left -= room[last]
                rest -= room[last]
                last += 1
            if first == last:
                self._undo(placed)
                return None
            placed += self._take(offset, sizes[first:last])
        return placed

    def _allocate_each(self, sizes: Sequence[int]) -> list[Extent] | None:
        placed: dict[int, Extent] = {}
        for index in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True):
            best = self._best_fit(self.aligned(sizes[index]))
            if best is None:
                self._undo(placed.values())
                return None
            placed[index] = self._take(best, (sizes[index],))[0]
        return [placed[index] for index in range(len(sizes))]

    def _parts(
        self, sizes: Sequence[int], at: int, done: int, pieces: int, room: int, cut: CutRules
    ) -> tuple[list[int], int]:
        """What fits into `room` bytes of ``sizes[at:]``, of whose first `done` bytes are served, in so many pieces.

        Returns:
            Sizes of extents, none if nothing fits, and how much of the last one's size is served then, 0 if all is.
        """
        parts: list[int] = []
        for number in range(at, len(sizes)):
            whole = sizes[number] - done
            if self.aligned(whole) > room:
                part = min(room, whole - cut.least) // cut.unit * cut.unit
                if part >= cut.least and pieces + 1 < cut.most:
                    parts.append(part)
                    done += part
                return parts, done
            parts.append(whole)
            room -= self.aligned(whole)
            done = pieces = 0
        return parts, 0

    def _undo(self, placed: Iterable[Extent]) -> None:
        # Holes are always merged as far as they go, so freeing restores exactly what was there.
        for extent in placed:
            self.free(extent)

    def _best_fit(self, size: int) -> int | None:
        at = bisect_left(self._holes_by_size, (size, 0))
        return self._holes_by_size[at][1] if at < len(self._holes_by_size) else None

    def _largest_hole(self) -> Extent:
        if not self._holes_by_size:
            return Extent(0, 0)
        size = self.largest_free
        return Extent(self._holes_by_size[bisect_left(self._holes_by_size, (size, 0))][1], size)  # the first of several

    def _hole_around(self, offset: int, size: int) -> int | None:
        at = bisect_right(self._hole_offsets, offset) - 1
        if at < 0:
            return None
        hole = self._hole_offsets[at]
        return hole if offset + size <= hole + self._hole_sizes[hole] else None

    def _take(self, offset: int, sizes: Sequence[int]) -> list[Extent]:
        hole = self._hole_around(offset, sum(map(self.aligned, sizes)))
        if hole is None:
            raise AssertionError(f"no hole at {offset} for {sizes}")
        hole_end = hole + self._remove_hole(hole)
        if hole < offset:
            self._add_hole(hole, offset - hole)
        placed = []
        for nbytes in sizes:
            placed.append(Extent(offset, nbytes))
            self._extents[offset] = nbytes
            offset += self.aligned(nbytes)
        if offset < hole_end:
            self._add_hole(offset, hole_end - offset)
        return placed

    def _add_hole(self, offset: int, size: int) -> None:
        self._hole_sizes[offset] = size
        insort(self._hole_offsets, offset)
        insort(self._holes_by_size, (size, offset))
        self._free_bytes += size

    def _remove_hole(self, offset: int) -> int:
        size = self._hole_sizes.pop(offset)
        del self._hole_offsets[bisect_left(self._hole_offsets, offset)]
        del self._holes_by_size[bisect_left(self._holes_by_size, (size, offset))]
        self._free_bytes -= size
        return size
