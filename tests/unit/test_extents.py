"""ExtentAllocator: where things are placed, what is refused, and a byte map that it must agree with."""

import math
import random
from itertools import groupby

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hs_cache.extents import ALIGNMENT, CutRules, Extent, ExtentAllocator

UNIT = ALIGNMENT


def make_allocator(layout: str) -> ExtentAllocator:
    """An allocator of ``len(layout)`` units where each ``#`` is taken and each ``.`` is free."""
    allocator = ExtentAllocator(len(layout) * UNIT)
    for index, unit in enumerate(layout):
        if unit == "#":
            allocator.allocate_at(Extent(index * UNIT, UNIT))
    allocator.check()
    return allocator


def layout_of(allocator: ExtentAllocator) -> str:
    units = ["#"] * (allocator.capacity // UNIT)
    for hole in allocator.holes():
        for index in range(hole.offset // UNIT, (hole.offset + hole.nbytes) // UNIT):
            units[index] = "."
    return "".join(units)


def offsets_in_units(extents: list[Extent] | None) -> list[float] | None:
    return None if extents is None else [extent.offset / UNIT for extent in extents]


def test_sizes_are_kept_and_rounded_up_only_for_placement() -> None:
    allocator = ExtentAllocator(10 * UNIT)
    assert allocator.allocate(1) == Extent(0, 1)
    assert allocator.allocate(UNIT + 1) == Extent(UNIT, UNIT + 1)
    assert allocator.allocate(UNIT) == Extent(3 * UNIT, UNIT)
    assert allocator.used_bytes == 4 * UNIT
    assert allocator.free_bytes == 6 * UNIT
    assert [ExtentAllocator.aligned(n) for n in (1, UNIT, UNIT + 1)] == [UNIT, UNIT, 2 * UNIT]


def test_capacity_is_cut_to_whole_units() -> None:
    allocator = ExtentAllocator(3 * UNIT + UNIT - 1)
    assert allocator.capacity == allocator.free_bytes == allocator.largest_free == 3 * UNIT
    assert allocator.allocate(3 * UNIT + 1) is None
    assert allocator.allocate(3 * UNIT) == Extent(0, 3 * UNIT)
    assert allocator.largest_free == 0
    assert list(allocator.holes()) == []
    assert allocator.allocate(1) is None


@pytest.mark.parametrize("capacity", [-1, 0, UNIT - 1])
def test_capacity_below_one_unit_is_refused(capacity: int) -> None:
    with pytest.raises(ValueError, match=f"capacity is {capacity} "):
        ExtentAllocator(capacity)


def test_best_fit_takes_the_smallest_hole_then_the_first() -> None:
    assert make_allocator("...#..#..#").allocate(2 * UNIT) == Extent(4 * UNIT, 2 * UNIT)
    assert make_allocator("..#...#").allocate(3 * UNIT) == Extent(3 * UNIT, 3 * UNIT)
    assert make_allocator("..#...#").allocate(4 * UNIT) is None


@pytest.mark.parametrize(
    ("layout", "after", "expected"),
    [
        ("##....#.", 2, 2),  # free: taken although the hole at 7 fits better
        ("......#.", 3, 3),  # in the middle of a hole
        ("###...#.", 2, 7),  # taken: best fit
        ("......#.", 8, 7),  # the end of the pool
        ("......#.", 99, 7),  # beyond it
    ],
)
def test_after_is_taken_when_free(layout: str, after: int, expected: int) -> None:
    allocator = make_allocator(layout)
    assert allocator.allocate(UNIT, after=after * UNIT) == Extent(expected * UNIT, UNIT)
    allocator.check()


def test_after_is_rounded_up_so_the_end_of_an_odd_sized_extent_will_do() -> None:
    allocator = ExtentAllocator(8 * UNIT)
    allocator.allocate_at(Extent(2 * UNIT, 10))
    assert allocator.allocate(UNIT, after=2 * UNIT + 10) == Extent(3 * UNIT, UNIT)


@pytest.mark.parametrize(
    ("layout", "sizes", "after", "expected"),
    [
        ("........", (1, 2, 1), None, [0, 1, 3]),
        ("#.......", (2, 2), 3, [3, 5]),  # at `after`
        ("#...#...", (2, 2), 1, [1, 5]),  # no hole for both
        ("##..#.....#...", (1, 1, 1), 2, [11, 12, 13]),  # no room at `after`: best fit
        ("...#.....#..", (1,) * 8, None, [4, 5, 6, 7, 8, 0, 1, 2]),  # largest hole first, order kept
        ("....#..#.....", (1,) * 7, None, [8, 9, 10, 11, 12, 5, 6]),  # the rest where it fits best
        ("..........#....", (4, 10), None, [11, 0]),  # only the larger one first works
        ("..#..#..", (3,), None, None),
        ("..#..#..", (3, 1), None, None),
        (".#.#.#", (1, 1, 1, 1), None, None),
        ("......", (), None, []),
    ],
)
def test_run_placement(layout: str, sizes: tuple[int, ...], after: int | None, expected: list[int] | None) -> None:
    allocator = make_allocator(layout)
    run = allocator.allocate_run([size * UNIT for size in sizes], after=None if after is None else after * UNIT)
    assert offsets_in_units(run) == expected
    allocator.check()
    if expected is None:
        assert layout_of(allocator) == layout
    else:
        assert run is not None
        for extent in run:
            allocator.free(extent)
        assert layout_of(allocator) == layout


def test_run_with_odd_sizes_keeps_every_extent_aligned() -> None:
    allocator = ExtentAllocator(8 * UNIT)
    assert allocator.allocate_run([100, 1, 64]) == [Extent(0, 100), Extent(2 * UNIT, 1), Extent(3 * UNIT, 64)]


@pytest.mark.parametrize(
    ("layout", "sizes", "after", "expected"),
    [
        ("........", (1, 2, 1), None, ["0+1", "1+2", "3+1"]),  # together
        ("..#.....", (2,), 4, ["4+2"]),  # at `after`
        ("..#...#", (5,), None, ["3+3 0+2"]),  # the largest hole first
        ("..#...#.", (3, 3), None, ["3+3", "0+2 7+1"]),
        ("..#...#.", (2, 3), None, ["3+2", "5+1 0+2"]),  # what is left of a hole belongs to the next
        (".#..#...#....", (9,), None, ["9+4 5+3 2+2"]),  # a small hole stays
        (".#.#.#.#", (4,), None, ["0+1 2+1 4+1 6+1"]),
        (".#.#.#.#.", (5,), None, None),  # in too many pieces
        ("..#..#", (5,), None, None),
        ("......", (), None, []),
    ],
)
def test_cut_placement(layout: str, sizes: tuple[int, ...], after: int | None, expected: list[str] | None) -> None:
    allocator = make_allocator(layout)
    bytes_after = None if after is None else after * UNIT
    placed = allocator.allocate_cut([size * UNIT for size in sizes], CutRules(UNIT, 1, 4), after=bytes_after)
    allocator.check()
    if placed is None or expected is None:
        assert (placed, expected) == (None, None)
    else:
        said = [" ".join(f"{at // UNIT}+{nbytes // UNIT}" for at, nbytes in extents) for extents in placed]
        assert said == expected
        for extent in (extent for extents in placed for extent in extents):
            allocator.free(extent)
    assert layout_of(allocator) == layout


@pytest.mark.parametrize(
    ("cut", "size", "expected"),
    [
        (CutRules(UNIT, 1, 8), 6 * UNIT - 1, [5 * UNIT, UNIT - 1]),  # only the last may be no multiple
        (CutRules(2 * UNIT, 1, 8), 6 * UNIT - 1, [4 * UNIT, 2 * UNIT - 1]),
        (CutRules(UNIT, 2 * UNIT, 8), 6 * UNIT, [4 * UNIT, 2 * UNIT]),  # the rest isn't too small, either
        (CutRules(UNIT, 2 * UNIT, 8), 6 * UNIT - 1, [3 * UNIT, 3 * UNIT - 1]),
        (CutRules(UNIT, 3 * UNIT, 8), 6 * UNIT, [3 * UNIT, 3 * UNIT]),
        (CutRules(UNIT, 3 * UNIT, 8), 6 * UNIT - 1, None),
        (CutRules(6 * UNIT, 1, 8), 6 * UNIT, None),
        (CutRules(UNIT, 1, 1), 6 * UNIT, None),
    ],
)
def test_pieces_are_cut_where_they_may_be(cut: CutRules, size: int, expected: list[int] | None) -> None:
    layout = "....." + "#" + "...."
    allocator = make_allocator(layout)
    placed = allocator.allocate_cut([size], cut)
    allocator.check()
    assert expected == (None if placed is None else [nbytes for _, nbytes in placed[0]])
    assert allocator.free_bytes == 9 * UNIT - (0 if placed is None else allocator.aligned(size))


def test_what_may_be_cut_is_cut_only_where_it_is_not_together_and_otherwise_placed_as_a_run() -> None:
    allocator = make_allocator("...#....#")
    assert allocator.allocate_together([2 * UNIT, 2 * UNIT]) == [Extent(4 * UNIT, 2 * UNIT), Extent(6 * UNIT, 2 * UNIT)]
    allocator = make_allocator("...#....#")
    assert allocator.allocate_together([2 * UNIT, 3 * UNIT]) is None
    assert layout_of(allocator) == "...#....#"
    uncut = allocator.allocate_cut([2 * UNIT, 2 * UNIT, 2 * UNIT], CutRules(UNIT, 2 * UNIT, 8))
    assert uncut is not None
    assert offsets_in_units([extent for extents in uncut for extent in extents]) == [4, 6, 0]


@pytest.mark.parametrize("sizes", [(0,), (-1,), (UNIT, 0), (UNIT, -UNIT)])
def test_sizes_must_be_above_zero(sizes: tuple[int, ...]) -> None:
    allocator = ExtentAllocator(4 * UNIT)
    with pytest.raises(ValueError, match="expected a size above 0"):
        allocator.allocate_run(sizes)
    with pytest.raises(ValueError, match="expected a size above 0"):
        allocator.allocate_cut(sizes, CutRules(UNIT, UNIT, 8))
    with pytest.raises(ValueError, match="expected a size above 0"):
        allocator.allocate(sizes[-1])
    assert allocator.used_bytes == 0


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2)])
def test_free_merges_with_both_sides(order: tuple[int, ...]) -> None:
    allocator = ExtentAllocator(3 * UNIT)
    run = allocator.allocate_run([UNIT] * 3)
    assert run is not None
    for index in order:
        allocator.free(run[index])
        allocator.check()
    assert list(allocator.holes()) == [Extent(0, 3 * UNIT)]


def test_free_refuses_what_is_not_allocated() -> None:
    allocator = ExtentAllocator(8 * UNIT)
    extent = allocator.allocate(2 * UNIT)
    assert extent is not None
    for offset, nbytes in [(0, UNIT), (0, 2 * UNIT - 1), (UNIT, UNIT), (4 * UNIT, UNIT), (-UNIT, UNIT)]:
        with pytest.raises(ValueError, match="expected one that is allocated"):
            allocator.free(Extent(offset, nbytes))
    allocator.free(extent)
    with pytest.raises(ValueError, match="nothing allocated there"):
        allocator.free(extent)
    allocator.check()
    assert allocator.free_bytes == 8 * UNIT


def test_allocate_at_undoes_a_free_and_refuses_what_is_taken() -> None:
    allocator = ExtentAllocator(8 * UNIT)
    run = allocator.allocate_run([100, 100, 100])
    assert run is not None
    allocator.free(run[1])
    allocator.allocate_at(run[1])
    assert layout_of(allocator) == "######.."
    refused = [
        run[1],
        Extent(0, 1),
        Extent(7 * UNIT, UNIT + 1),
        Extent(8 * UNIT, 1),
        Extent(-UNIT, UNIT),
        Extent(6 * UNIT + 1, 1),
        Extent(6 * UNIT, 0),
    ]
    for extent in refused:
        with pytest.raises(ValueError, match="expected"):
            allocator.allocate_at(extent)
    allocator.check()
    assert layout_of(allocator) == "######.."


def test_check_finds_damage() -> None:
    allocator = make_allocator("..#..")
    allocator._free_bytes += UNIT
    with pytest.raises(AssertionError, match="free_bytes"):
        allocator.check()
    allocator = make_allocator("..#..")
    del allocator._extents[2 * UNIT]
    with pytest.raises(AssertionError, match="gap"):
        allocator.check()
    allocator = make_allocator("..#..")
    allocator._holes_by_size.reverse()
    allocator._holes_by_size[0] = (UNIT, 0)
    with pytest.raises(AssertionError, match="by size"):
        allocator.check()


def test_continuations_stay_contiguous_while_there_is_room() -> None:
    allocator = ExtentAllocator(64 * UNIT)
    previous = allocator.allocate(2 * UNIT)
    for _ in range(20):
        assert previous is not None
        end = previous.offset + previous.nbytes
        previous = allocator.allocate(2 * UNIT, after=end)
        assert previous == Extent(end, 2 * UNIT)


@pytest.mark.parametrize("seed", range(5))
def test_mixed_sizes_under_churn_leave_the_pool_usable(seed: int) -> None:
    """Two layers of different width with ragged tails, the oldest prompt freed from its tail."""
    least_mean_used, least_used = 0.9, 0.8
    rng = random.Random(seed)
    allocator = ExtentAllocator(256 << 20)
    prompts: list[list[Extent]] = []
    used = []
    for _ in range(1500):
        row_bytes = rng.choice([2048 * 2, 3584 * 2])
        sizes = [256 * row_bytes] * rng.randint(1, 12) + [rng.randint(1, 255) * row_bytes]
        while (run := allocator.allocate_run(sizes)) is None:
            allocator.free(prompts[0].pop())
            if not prompts[0]:
                del prompts[0]
        prompts.append(run)
        used.append(allocator.used_bytes / allocator.capacity)
    allocator.check()
    settled = used[len(used) // 2 :]
    assert sum(settled) / len(settled) > least_mean_used
    assert min(settled) > least_used
    for extent in [extent for prompt in prompts for extent in prompt]:
        allocator.free(extent)
    assert list(allocator.holes()) == [Extent(0, allocator.capacity)]


class ExtentMachine(RuleBasedStateMachine):
    """The allocator against a map with one entry for each byte."""

    UNITS = 24

    def __init__(self) -> None:
        super().__init__()
        self.allocator = ExtentAllocator(self.UNITS * UNIT + 17)
        self.owner_of_byte = [0] * (self.UNITS * UNIT)
        self.extents: list[Extent] = []

    def holes(self) -> list[Extent]:
        found, offset = [], 0
        for taken, group in groupby(self.owner_of_byte, key=bool):
            length = len(list(group))
            if not taken:
                found.append(Extent(offset, length))
            offset += length
        return found

    def is_free(self, offset: int, size: int) -> bool:
        room = self.owner_of_byte[max(offset, 0) : offset + size]
        return len(room) == size and not any(room)

    def mark(self, extent: Extent, owner: int) -> None:
        end = extent.offset + self.allocator.aligned(extent.nbytes)
        self.owner_of_byte[extent.offset : end] = [owner] * (end - extent.offset)

    def take(self, extent: Extent) -> None:
        assert extent.offset % ALIGNMENT == 0
        assert self.is_free(extent.offset, self.allocator.aligned(extent.nbytes))
        self.extents.append(extent)
        self.mark(extent, len(self.extents))

    @rule(
        sizes=st.lists(st.integers(1, 5 * UNIT), max_size=8)
        | st.tuples(st.integers(1, 4 * UNIT), st.integers(1, 10)).map(lambda t: [t[0]] * t[1]),
        after=st.none() | st.integers(0, (UNITS + 1) * UNIT),
    )
    def allocate_run(self, sizes: list[int], after: int | None) -> None:
        holes, rooms = self.holes(), [self.allocator.aligned(size) for size in sizes]
        contiguous = [hole for hole in holes if hole.nbytes >= sum(rooms)]
        run = self.allocator.allocate_run(sizes, after=after)
        if run is None:
            assert not contiguous
            if len(set(rooms)) == 1:
                assert sum(hole.nbytes // rooms[0] for hole in holes) < len(rooms)
            return
        assert [extent.nbytes for extent in run] == sizes
        start = None if after is None else self.allocator.aligned(after)
        if run and start is not None and self.is_free(start, sum(rooms)):
            assert run[0].offset == start
        elif run and contiguous:
            assert run[0].offset == min((hole.nbytes, hole.offset) for hole in contiguous)[1]
        breaks = sum(b.offset != a.offset + room for a, b, room in zip(run, run[1:], rooms, strict=False))
        if contiguous:
            assert breaks == 0
        elif len(set(rooms)) == 1:
            assert breaks + 1 == self.fewest_pieces(rooms)
        for extent in run:
            self.take(extent)

    @rule(
        rows=st.lists(st.integers(1, 40), max_size=8),
        row_bytes=st.sampled_from([16, 48, UNIT, 100]),
        least=st.sampled_from([1, UNIT, 3 * UNIT]),
        most=st.integers(1, 6),
        after=st.none() | st.integers(0, (UNITS + 1) * UNIT),
    )
    def allocate_cut(self, rows: list[int], row_bytes: int, least: int, most: int, after: int | None) -> None:
        holes, sizes = self.holes(), [count * row_bytes for count in rows]
        room = sum(map(self.allocator.aligned, sizes))
        cut = CutRules(math.lcm(row_bytes, ALIGNMENT), least, most)
        placed = self.allocator.allocate_cut(sizes, cut, after=after)
        if placed is None:
            assert all(hole.nbytes < room for hole in holes)
            fine = least <= cut.unit == UNIT and most > len(holes)  # then every hole can be filled
            assert not fine or sum(hole.nbytes for hole in holes) < room
            return
        before = self.allocator.free_bytes + room
        assert before == sum(hole.nbytes for hole in holes), "pieces take more room than the whole"
        for size, extents in zip(sizes, placed, strict=True):
            assert sum(extent.nbytes for extent in extents) == size
            assert 1 <= len(extents) <= most
            assert all(extent.nbytes % row_bytes == 0 for extent in extents), "a row is cut"
            assert len(extents) == 1 or min(extent.nbytes for extent in extents) >= least
        for extent in (extent for extents in placed for extent in extents):
            self.take(extent)

    def fewest_pieces(self, rooms: list[int]) -> int:
        left = len(rooms)
        for pieces, count in enumerate(sorted((hole.nbytes // rooms[0] for hole in self.holes()), reverse=True), 1):
            left -= count
            if left <= 0:
                return pieces
        raise AssertionError("doesn't fit")

    @rule(nbytes=st.integers(1, 6 * UNIT))
    def allocate(self, nbytes: int) -> None:
        extent = self.allocator.allocate(nbytes)
        if extent is None:
            assert all(hole.nbytes < nbytes for hole in self.holes())
        else:
            self.take(extent)

    @rule(unit=st.integers(0, UNITS - 1), nbytes=st.integers(1, 4 * UNIT))
    def allocate_at(self, unit: int, nbytes: int) -> None:
        extent = Extent(unit * UNIT, nbytes)
        if self.is_free(extent.offset, self.allocator.aligned(nbytes)):
            self.allocator.allocate_at(extent)
            self.take(extent)
        else:
            with pytest.raises(ValueError, match="expected a place that is free"):
                self.allocator.allocate_at(extent)

    @precondition(lambda self: self.extents)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        extent = self.extents.pop(data.draw(st.integers(0, len(self.extents) - 1)))
        self.allocator.free(extent)
        self.mark(extent, 0)

    @rule(offset=st.integers(-1, UNITS * UNIT), nbytes=st.integers(0, 5 * UNIT))
    def free_foreign(self, offset: int, nbytes: int) -> None:
        if Extent(offset, nbytes) not in self.extents:
            with pytest.raises(ValueError, match="expected one that is allocated"):
                self.allocator.free(Extent(offset, nbytes))

    @invariant()
    def agrees_with_the_byte_map(self) -> None:
        self.allocator.check()
        holes = self.holes()
        assert list(self.allocator.holes()) == holes
        assert self.allocator.free_bytes == self.owner_of_byte.count(0)
        assert self.allocator.used_bytes == len(self.owner_of_byte) - self.owner_of_byte.count(0)
        assert self.allocator.largest_free == max((hole.nbytes for hole in holes), default=0)


TestExtentMachine = ExtentMachine.TestCase
TestExtentMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
