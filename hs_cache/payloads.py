"""Python objects as one piece of memory, and back: tensors and arrays as they lie, everything else pickled.

Layout, all numbers little-endian::

    u64 nbytes(table) ‖ u64 nbytes(rest) ‖ table ‖ rest ‖ padding to a multiple of 64 ‖ blocks

*rest* is the object, pickled by Ray's cloudpickle with an index in the place of every tensor and array. *table* is a
pickle of tuples: where the blocks lie, and which block, dtype, shape and strides each tensor has. A block is the memory
of one tensor, at a multiple of 64 bytes, or that of several which overlap: so what shares memory goes once, and shares
memory where it arrives.

Who can write such memory can run code where it is unpickled: the same trust as any object that goes through Ray.
"""

import io
import math
import pickle
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from ray.cloudpickle import CloudPickler

from hs_cache.errors import InvalidInputError
from hs_cache.extents import ALIGNMENT
from hs_cache.rows import Flat, check_dense

_SIZES = struct.Struct("<QQ")
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter, getattr(torch.nn, "Buffer", torch.Tensor))  # Buffer is of 2.5


@dataclass(slots=True, eq=False)
class _Array:
    """A tensor or array to be sent: `start` is the address of its first element, `low .. high` what it spans."""

    value: Any
    kind: Literal["torch", "numpy"]
    dtype: Any
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # of PyTorch in elements, of NumPy in bytes
    itemsize: int
    nbytes: int
    start: int
    low: int
    high: int
    block: int = -1
    offset: int = 0

    @property
    def is_dense(self) -> bool:
        """Whether its memory, as it lies, is what a copy would be."""
        return self.high - self.low == self.nbytes and self.start % self.itemsize == 0

    def make_contiguous(self) -> None:
        """It will be copied element by element, into row-major order."""
        unit = 1 if self.kind == "torch" else self.itemsize
        sizes = [max(size, 1) for size in self.shape]
        self.strides = tuple(unit * math.prod(sizes[axis + 1 :]) for axis in range(len(sizes)))


class _Memory:
    """Memory of somebody who is kept alive, as NumPy takes it."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__array_interface__ = {"version": 3, "shape": (nbytes,), "typestr": "|u1", "data": (address, False)}


@dataclass(frozen=True, slots=True)
class _Block:
    """Memory to be sent at `position`: the bytes at `address` as they lie, or the elements of `array` one by one."""

    position: int
    nbytes: int
    address: int
    array: _Array | None

    def write(self, memory: Flat) -> None:
        target = memory[self.position : self.position + self.nbytes]
        if self.array is None:
            source = np.asarray(_Memory(self.address, self.nbytes))
            torch.from_numpy(target).copy_(torch.from_numpy(source))  # large ones by several threads
        elif self.array.kind == "numpy":
            np.ndarray(self.array.shape, self.array.dtype, buffer=target)[...] = self.array.value
        else:
            rows = self.array.value
            bits = _BITS.get(rows.itemsize, rows.dtype)  # so that any dtype can be copied, and a NaN stays as it is
            torch.from_numpy(target).view(bits).view(rows.shape).copy_(rows.view(bits))


class Payload:
    """An object that is ready to be written; made by `pack`. It refers to the tensors of the object.

    Attributes:
        nbytes: how much memory it takes.
    """

    def __init__(self, table: bytes, rest: bytes, blocks: Sequence[_Block], arrays: Sequence[_Array]) -> None:
        self._table = table
        self._rest = rest
        self._blocks = blocks
        self._arrays = arrays  # keeps the memory that the blocks name
        self._first = _first_block(len(table), len(rest))
        self.nbytes = self._first + max((block.position + block.nbytes for block in blocks), default=0)

    def write(self, memory: Flat) -> None:
        """Write it to the first `nbytes` bytes of `memory`, which starts at a multiple of 64 bytes. Blocks."""
        head = b"".join((_SIZES.pack(len(self._table), len(self._rest)), self._table, self._rest))
        memory[: len(head)] = np.frombuffer(head, np.uint8)
        for block in self._blocks:
            block.write(memory[self._first :])


def pack(data: Any) -> Payload:
    """Prepare an object for writing. Of its tensors only those on a GPU are copied here, so don't write to the others.

    A tensor arrives detached, on the CPU, and as a plain ``torch.Tensor``. Arrays of Python objects are pickled.

    Raises:
        InvalidInputError: something in `data` can't be pickled, or is a sparse, nested, quantized or meta tensor, or
            of a class of tensors of its own.
    """
    arrays = _Arrays()
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, arrays).dump(data)  # type: ignore[no-untyped-call]
    except InvalidInputError:
        raise
    except Exception as error:  # whatever a class of the caller's raises here
        raise InvalidInputError(
            f"data: got an object that can't be pickled, {type(error).__name__}: {error}; expected tensors, arrays, "
            "and whatever pickle takes"
        ) from error
    blocks = _lay_out(arrays.found)
    table = pickle.dumps(
        (
            [(block.position, block.nbytes) for block in blocks],
            [(a.kind, _dtype_name(a), a.shape, a.strides, a.block, a.offset) for a in arrays.found],
        ),
        protocol=pickle.HIGHEST_PROTOCOL,
    )
    return Payload(table, buffer.getvalue(), blocks, arrays.found)


def unpack(memory: Flat) -> Any:
    """The object. Its tensors and arrays are views of `memory`, which is writable, and keep it.

    Raises whatever unpickling raises, and ValueError where this is no payload.
    """
    if memory.nbytes < _SIZES.size:
        raise ValueError(f"{memory.nbytes} bytes are no payload")
    table_bytes, rest_bytes = _SIZES.unpack(memory[: _SIZES.size].tobytes())
    rest_at, first = _SIZES.size + table_bytes, _first_block(table_bytes, rest_bytes)
    if first > memory.nbytes:
        raise ValueError(f"{memory.nbytes} bytes are no payload with {table_bytes + rest_bytes} bytes of pickles")
    blocks, arrays = pickle.loads(memory[_SIZES.size : rest_at].data)
    if any(first + position + nbytes > memory.nbytes for position, nbytes in blocks):
        raise ValueError("a payload's blocks reach beyond its end")
    opened = _Opened(memory[first:], blocks)
    return _Unpickler(io.BytesIO(memory[rest_at : rest_at + rest_bytes].tobytes()), opened, arrays).load()


class _Pickler(CloudPickler):
    def __init__(self, file: io.BytesIO, arrays: "_Arrays") -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)  # type: ignore[no-untyped-call]
        self._arrays = arrays

    def persistent_id(self, value: Any) -> int | None:
        return self._arrays.index_of(value)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, opened: "_Opened", arrays: Sequence[tuple[Any, ...]]) -> None:
        super().__init__(file)
        self._opened = opened
        self._arrays = arrays
        self._made: dict[int, Any] = {}

    def persistent_load(self, index: int) -> Any:
        if index not in self._made:
            self._made[index] = self._opened.make(*self._arrays[index])
        return self._made[index]


class _Arrays:
    """The tensors and arrays of one object, each once.

    Attributes:
        found: in the order of their indices.
    """

    def __init__(self) -> None:
        self.found: list[_Array] = []
        self._known: dict[int, tuple[int, Any]] = {}  # keeps what it knows, so that no id is used again

    def index_of(self, value: Any) -> int | None:
        """The index of a tensor or array, None for everything else."""
        make: Callable[[Any], _Array]
        if isinstance(value, torch.Tensor):
            make = _of_tensor
        elif type(value) in (np.ndarray, np.memmap) and not value.dtype.hasobject:
            make = _of_array
        else:
            return None
        if id(value) not in self._known:
            self._known[id(value)] = len(self.found), value
            self.found.append(make(value))
        return self._known[id(value)][0]


def _of_tensor(given: torch.Tensor) -> _Array:
    if type(given) not in _PLAIN_TENSORS:
        raise InvalidInputError(
            f"data: got a tensor of class {type(given).__qualname__}, expected a plain torch.Tensor"
        )
    check_dense("data", given)
    rows = given.detach().cpu().resolve_conj().resolve_neg()
    start, size, span = rows.data_ptr(), rows.itemsize, 0
    if rows.numel():
        span = size + size * sum((n - 1) * step for n, step in zip(rows.shape, rows.stride(), strict=True))
    shape, strides = tuple(rows.shape), tuple(rows.stride())
    return _Array(rows, "torch", rows.dtype, shape, strides, size, rows.numel() * size, start, start, start + span)


def _of_array(rows: npt.NDArray[Any]) -> _Array:
    start = low = high = rows.__array_interface__["data"][0]
    if rows.nbytes:
        steps = [(n - 1) * step for n, step in zip(rows.shape, rows.strides, strict=True)]
        low, high = (
            low + sum(min(step, 0) for step in steps),
            high + sum(max(step, 0) for step in steps) + rows.itemsize,
        )
    size = max(rows.itemsize, 1)
    return _Array(rows, "numpy", rows.dtype, rows.shape, rows.strides, size, rows.nbytes, start, low, high)


def _lay_out(arrays: Sequence[_Array]) -> list[_Block]:
    """Give every array its place in a block."""
    with_memory = [array for array in arrays if array.nbytes]
    pieces = list(_overlapping(array for array in with_memory if array.is_dense))
    lows = [low for low, _ in pieces]
    blocks: list[_Block] = []
    alone = [array for array in with_memory if array.is_dense]
    shared: dict[int, list[_Array]] = {}
    copied: list[_Array] = []
    for array in alone:
        shared.setdefault(bisect_right(lows, array.low) - 1, []).append(array)
    for array in with_memory:
        if array.is_dense:
            continue
        piece = bisect_right(lows, array.low) - 1
        is_within = piece >= 0 and array.high <= pieces[piece][1] and array.high - array.low > array.nbytes
        if is_within and array.start % array.itemsize == 0:
            shared[piece].append(array)  # what lies between its elements is sent anyway
        else:
            copied.append(array)
    end = 0
    for piece, members in shared.items():
        low, high = pieces[piece]
        # Of several, each keeps its alignment.
        position = _aligned(end) + (low % ALIGNMENT if len(members) > 1 else 0)
        for array in members:
            array.block, array.offset = len(blocks), array.start - low
        blocks.append(_Block(position, high - low, low, None))
        end = position + high - low
    for array in copied:
        array.make_contiguous()
        array.block = len(blocks)
        blocks.append(_Block(_aligned(end), array.nbytes, 0, array))
        end = _aligned(end) + array.nbytes
    return blocks


def _overlapping(arrays: Iterable[_Array]) -> Iterator[tuple[int, int]]:
    """The pieces of memory that arrays span, those that overlap as one; by address."""
    spans = sorted((array.low, array.high) for array in arrays)
    if not spans:
        return
    low, high = spans[0]
    for next_low, next_high in spans[1:]:
        if next_low < high:
            high = max(high, next_high)
        else:
            yield low, high
            low, high = next_low, next_high
    yield low, high


class _Opened:
    """The blocks of an arrived payload. Each is a storage of its own, so that pickling one tensor doesn't take all."""

    def __init__(self, memory: Flat, blocks: Sequence[tuple[int, int]]) -> None:
        self._memory = memory
        self._blocks = blocks
        self._storages: dict[int, torch.Tensor] = {}

    def make(
        self, kind: str, dtype: Any, shape: tuple[int, ...], strides: tuple[int, ...], block: int, offset: int
    ) -> Any:
        """A tensor or an array."""
        if kind == "numpy":
            if block < 0:
                return np.empty(shape, dtype)
            position, nbytes = self._blocks[block]
            return np.ndarray(shape, dtype, self._memory[position : position + nbytes], offset, strides)
        of_torch: torch.dtype = getattr(torch, dtype)
        if block < 0:
            return torch.empty_strided(shape, strides, dtype=of_torch, device="cpu")
        size = of_torch.itemsize
        nbytes = size + size * sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
        memory = self._storage(block)[offset : offset + nbytes]
        if offset % size:  # it overlaps one of another dtype, in a way in which PyTorch can't share a storage
            position, _ = self._blocks[block]
            memory = torch.frombuffer(self._memory, dtype=torch.uint8, count=nbytes, offset=position + offset)
        return memory.view(of_torch).as_strided(shape, strides)

    def _storage(self, block: int) -> torch.Tensor:
        if block not in self._storages:
            position, nbytes = self._blocks[block]
            self._storages[block] = torch.frombuffer(self._memory, dtype=torch.uint8, count=nbytes, offset=position)
        return self._storages[block]


def _dtype_name(array: _Array) -> Any:
    return str(array.dtype).removeprefix("torch.") if array.kind == "torch" else array.dtype


def _first_block(table_bytes: int, rest_bytes: int) -> int:
    return _aligned(_SIZES.size + table_bytes + rest_bytes)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
