"""Hidden-state rows as tensors, as bytes, and over pool memory. The one place that knows PyTorch's dtypes.

Rows of a layer are ``[tokens, hidden_dim]``, row-major, in the dtype they were stored in.
"""

import ctypes
import mmap
import pickle
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from hs_cache.devices import NO_DEVICES, Cut, Flight, Moment, Transfer
from hs_cache.errors import InvalidInputError
from hs_cache.messages import DTYPE_BYTES, LayerSpec, Run

Flat: TypeAlias = npt.NDArray[np.uint8]
"""Rows as a flat uint8 array: what crosses nodes, because Ray moves NumPy bytes at memory speed and tensors not."""

_NAMES: dict[torch.dtype, str] = {getattr(torch, name): name for name in DTYPE_BYTES if hasattr(torch, name)}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_ROW_AXES = 2
_ROWS_EXPECTED = "(number of token_ids less token_offset)"
_HUGE_BYTES = 4 << 20
_MADVISE: Callable[[int, int, int], int] | None = None
if hasattr(mmap, "MADV_HUGEPAGE"):
    _libc_madvise = ctypes.CDLL(None).madvise
    _libc_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    _MADVISE = _libc_madvise


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of a `LayerSpec`; `InvalidInputError` when this PyTorch doesn't have it."""
    if name not in _DTYPES:
        raise InvalidInputError(f"dtype: rows were stored as {name}, which PyTorch {torch.__version__} doesn't have")
    return _DTYPES[name]


def check_dtype(name: str, dtype: object) -> torch.dtype:
    """`dtype` if it is one of the storable floating dtypes, else `InvalidInputError` that names the argument `name`."""
    if not isinstance(dtype, torch.dtype) or dtype not in _NAMES:
        raise InvalidInputError(f"{name}: got {dtype!r}, expected one of {', '.join('torch.' + n for n in _DTYPES)}")
    return dtype


def check_rows(name: str, rows: Any, num_rows: int, *, at_most: bool = False) -> torch.Tensor:
    """Rows as a detached tensor of `num_rows` rows, or `at_most` so many; `InvalidInputError` names what came and what
    was expected.

    Takes tensors on any device and of any stride, and NumPy arrays; copied is only what PyTorch has no view for. What
    comes back is not to be written to.
    """
    if isinstance(rows, np.ndarray):
        if rows.dtype not in (np.float16, np.float32, np.float64):
            raise InvalidInputError(f"{name}: got a NumPy array of {rows.dtype}, expected float16, float32 or float64")
        if not all(step >= 0 and step % rows.itemsize == 0 for step in rows.strides):
            rows = rows.copy()
        rows = torch.from_numpy(rows if rows.flags.writeable else np.asarray(_Unprotected(rows)))
    if not isinstance(rows, torch.Tensor):
        raise InvalidInputError(f"{name}: got {type(rows).__name__}, expected a torch.Tensor or a NumPy array")
    check_dense(name, rows)
    shape = list(rows.shape)
    if len(shape) != _ROW_AXES:
        raise InvalidInputError(f"{name}: got shape {shape}, expected 2 dimensions [{num_rows}, hidden_dim]")
    check_dtype(f"{name}.dtype", rows.dtype)
    if shape[0] > num_rows or (shape[0] < num_rows and not at_most):
        expected = f"at most {num_rows} (number of new tokens)" if at_most else f"{num_rows} {_ROWS_EXPECTED}"
        raise InvalidInputError(f"{name}: got {shape[0]} rows, expected {expected}")
    if shape[1] < 1:
        raise InvalidInputError(f"{name}: got hidden_dim {shape[1]}, expected at least 1")
    return rows.detach().resolve_neg()


def check_dense(name: str, rows: torch.Tensor) -> None:
    """`InvalidInputError` for a tensor without plain memory: sparse, nested, quantized or on the meta device."""
    if rows.layout is not torch.strided or rows.is_nested or rows.is_quantized or rows.is_meta:
        raise InvalidInputError(f"{name}: got a sparse, nested, quantized or meta tensor, expected a dense one")


def spec_of(layer_idx: int, rows: torch.Tensor) -> LayerSpec:
    """The spec under which `rows` are stored."""
    return LayerSpec(layer_idx, rows.shape[1], _NAMES[rows.dtype])


def view_rows(memory: Any, offset: int, num_tokens: int, spec: LayerSpec) -> torch.Tensor:
    """A tensor ``[num_tokens, hidden_dim]`` over a buffer, `offset` bytes into it. No copy.

    Nothing stops a write into the tensor where the buffer is read-only; there it must only be read.
    """
    if memoryview(memory).readonly:
        memory = np.asarray(_Unprotected(np.frombuffer(memory, dtype=np.uint8)))
    count = num_tokens * spec.hidden_dim
    return torch.frombuffer(memory, dtype=torch_dtype(spec.dtype), count=count, offset=offset).view(num_tokens, -1)


class _Unprotected:
    """A read-only array as a writable one: PyTorch warns of all others, also where they are only read."""

    def __init__(self, rows: npt.NDArray[Any]) -> None:
        self._rows = rows  # keeps the memory alive
        interface = rows.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


def empty_rows(num_tokens: int, hidden_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Uninitialised rows ``[num_tokens, hidden_dim]`` on the CPU, large ones in huge pages if the kernel has them.

    Filling fresh memory is mostly page faults: 128 MiB take 52 ms in 4 KiB pages, 18 ms in huge ones, 10 ms when warm.
    """
    rows = torch.empty(num_tokens, hidden_dim, dtype=dtype, device="cpu")  # whatever the default device is
    if rows.nbytes >= _HUGE_BYTES and _MADVISE is not None:
        first = -(-rows.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (rows.data_ptr() + rows.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        _MADVISE(first, last - first, mmap.MADV_HUGEPAGE)  # advice: a refusal changes nothing
    return rows


def copy_in(
    memory: Any,
    runs: Iterable[Run],
    specs: Iterable[LayerSpec],
    rows: dict[int, torch.Tensor],
    first: int,
    moment: Moment = NO_DEVICES,
    cut: Cut | None = None,
) -> None:
    """Copy those rows into the pool for which there is room in `runs`; ``rows[layer_idx]`` starts at token `first`.

    Blocks until the last byte is written; whatever it raises, nothing is written any more then.

    Args:
        moment: rows on its devices are copied as they are behind it.
        cut: where copies from a device must not go on.
    """
    by_layer = {spec.layer_idx: spec for spec in specs}
    plain: list[tuple[torch.Tensor, torch.Tensor]] = []
    transfers: list[Transfer] = []
    for run in runs:
        source, spec = rows[run.layer_idx], by_layer[run.layer_idx]
        begin, end = max(run.start_token, first), min(run.start_token + run.num_tokens, first + len(source))
        if begin < end:
            offset = run.offset + (begin - run.start_token) * spec.row_bytes
            part = source[begin - first : end - first]
            if part.device in moment:
                transfers.append(_transfer(part, memory, offset, spec, cut))
            else:
                plain.append((view_rows(memory, offset, end - begin, spec), part))
    flight = Flight()
    try:
        moment.copy_in(transfers, flight)
        for target, part in plain:
            target.copy_(part)
    finally:
        flight.wait()


def _transfer(rows: torch.Tensor, memory: Any, offset: int, spec: LayerSpec, cut: Cut | None) -> Transfer:
    nbytes = len(rows) * spec.row_bytes
    pieces = ((offset, nbytes),) if cut is None else cut(offset, nbytes)
    host = tuple(torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=start) for start, size in pieces)
    return Transfer(rows, torch_dtype(spec.dtype), host)


def copy_flat_in(memory: Any, runs: Iterable[Run], specs: tuple[LayerSpec, ...], flat: Flat, first: int) -> None:
    """As `copy_in`, from what `flatten` made of rows that start at token `first`."""
    target = np.frombuffer(memory, dtype=np.uint8)
    tokens = flat.nbytes // sum(spec.row_bytes for spec in specs)
    starts, by_layer = {}, {spec.layer_idx: spec for spec in specs}
    position = 0
    for spec in specs:
        starts[spec.layer_idx] = position
        position += tokens * spec.row_bytes
    for run in runs:
        row_bytes = by_layer[run.layer_idx].row_bytes
        begin = starts[run.layer_idx] + (run.start_token - first) * row_bytes
        target[run.offset : run.offset + run.num_tokens * row_bytes] = flat[begin : begin + run.num_tokens * row_bytes]


def copy_out(memory: Any, runs: Iterable[Run], spec: LayerSpec, out: torch.Tensor, start: int, stop: int) -> None:
    """Copy rows ``start .. stop`` of one layer into `out` ``[stop - start, hidden_dim]``, converting to its dtype.

    Blocks until the last row is there; no temporary of the size of the rows is made on the CPU.
    """
    # A caller's inference tensor takes a write only in this mode, which a thread of the asyncio client doesn't inherit.
    with torch.inference_mode():
        for offset, part in _parts(runs, spec, out, start, stop):
            part.copy_(view_rows(memory, offset, len(part), spec))


def begin_copy_out(
    memory: Any,
    runs: Iterable[Run],
    spec: LayerSpec,
    out: torch.Tensor,
    start: int,
    stop: int,
    *,
    moment: Moment,
    flight: Flight,
    cut: Cut | None = None,
) -> None:
    """As `copy_out`, into `out` on a device of `moment`, and without blocking: the copies count in `flight`.

    Until that has ended, `memory` must stay as it is.
    """
    with torch.inference_mode():
        parts = _parts(runs, spec, out, start, stop)
        moment.copy_out([_transfer(part, memory, offset, spec, cut) for offset, part in parts], flight)


def _parts(
    runs: Iterable[Run], spec: LayerSpec, out: torch.Tensor, start: int, stop: int
) -> Iterator[tuple[int, torch.Tensor]]:
    """Where in the pool parts of `out` lie, in bytes, and these parts."""
    for run in runs:
        if run.layer_idx != spec.layer_idx:
            continue
        begin, end = max(start, run.start_token), min(stop, run.start_token + run.num_tokens)
        if begin < end:
            yield run.offset + (begin - run.start_token) * spec.row_bytes, out[begin - start : end - start]


def flatten(rows: Iterable[torch.Tensor]) -> Flat:
    """Layers behind each other as one flat uint8 array, each ``[tokens, hidden_dim]`` row-major."""
    parts = [layer.contiguous().cpu().view(torch.uint8).numpy().reshape(-1) for layer in rows]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def flatten_runs(memory: Any, runs: Iterable[Run], specs: tuple[LayerSpec, ...], start: int = 0) -> Flat:
    """Leased rows of tokens `start` and on, as `flatten` lays them out: a view where one run holds all, else a copy."""
    pool, row_bytes = np.frombuffer(memory, dtype=np.uint8), {spec.layer_idx: spec.row_bytes for spec in specs}
    parts = []
    for run in runs:
        first = min(max(start - run.start_token, 0), run.num_tokens)
        size = row_bytes[run.layer_idx]
        parts.append(pool[run.offset + first * size : run.offset + run.num_tokens * size])
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def flat_runs(specs: tuple[LayerSpec, ...], num_tokens: int, first: int = 0) -> tuple[Run, ...]:
    """Where the layers lie in what `flatten` and `flatten_runs` make of rows that start at token `first`."""
    runs, offset = [], 0
    for spec in specs:
        runs.append(Run(spec.layer_idx, first, num_tokens, offset))
        offset += num_tokens * spec.row_bytes
    return tuple(runs)


class PickledRows:
    """Carries a tensor through Ray as a uint8 buffer; a ``torch.Tensor`` of one's own arrives on the other side.

    ``torch.Tensor`` itself is pickled in-band by ``torch.save``, at a fraction of memory speed.
    """

    def __init__(self, rows: torch.Tensor) -> None:
        self._rows = rows.contiguous()

    def __reduce_ex__(self, protocol: Any) -> Any:
        flat: Any = self._rows.view(torch.uint8).numpy()
        return _rebuild, (pickle.PickleBuffer(flat), _NAMES[self._rows.dtype], tuple(self._rows.shape))


def _rebuild(buffer: Any, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    # Copied: the buffer may be shared memory of the object store, which every process of the node sees.
    return torch.frombuffer(bytearray(buffer), dtype=torch_dtype(dtype)).view(shape)
