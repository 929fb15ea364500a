"""From a checked retrieve, and the pieces of rows found for it, to what the caller gets: views where possible."""

import itertools
import logging
import mmap
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch

from hs_cache.devices import NO_DEVICES, Flight, Moment, check_device
from hs_cache.errors import InvalidInputError
from hs_cache.keys import ChunkKeys
from hs_cache.messages import LayerSpec, LeaseReply, Run
from hs_cache.planning import check_index, check_layers
from hs_cache.results import PrefixHit
from hs_cache.rows import (
    Flat,
    begin_copy_out,
    check_dense,
    check_dtype,
    copy_out,
    empty_rows,
    torch_dtype,
    view_rows,
)
from hs_cache.shared_pool import PoolMapping

logger = logging.getLogger(__name__)

_ROW_AXES = 2
_MAX_ARRIVED_BYTES = 256 << 20


@dataclass(frozen=True)
class Ask:
    """A checked retrieve: rows ``start .. stop`` of `layers`, where `keys` covers all tokens before `stop`.

    `device` is None for the CPU; `moment` is when it was asked, on the devices where rows go. Unless it is `counted`,
    nodes take it for no retrieve in their statistics.
    """

    keys: ChunkKeys
    layers: tuple[int, ...]
    start: int
    stop: int
    dtype: torch.dtype | None = None
    device: torch.device | None = None
    out: Mapping[int, torch.Tensor] = field(default_factory=dict)
    moment: Moment = NO_DEVICES
    counted: bool = True


@dataclass(frozen=True)
class Piece:
    """Rows ``first .. first + num_tokens`` of all layers: in `memory` at `runs`, or still behind `ref`.

    Behind a ref there are only the rows that were asked for: one run per layer.

    Attributes:
        pool: the mapping whose memory it is, and which is leased; None for memory of any other kind.
        node_id: the node that has the rows.
        shared: whether others may get the same object by its ref, and so must not see a write into it.
    """

    specs: tuple[LayerSpec, ...]
    first: int
    num_tokens: int
    runs: tuple[Run, ...]
    memory: Any = None
    ref: Any = None
    pool: PoolMapping | None = None
    node_id: str = ""
    shared: bool = False

    @property
    def end(self) -> int:
        """The token behind the last row."""
        return self.first + self.num_tokens

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return sum(spec.row_bytes for spec in self.specs) * self.num_tokens

    @property
    def nbytes_sent(self) -> int:
        """Bytes behind `ref`."""
        if self.ref is None:
            return 0
        return sum(spec.row_bytes * run.num_tokens for spec, run in zip(self.specs, self.runs, strict=True))


def check_ask(
    keys: ChunkKeys,
    num_tokens: int,
    layers: Any,
    start: Any,
    stop: Any,
    dtype: Any = None,
    device: Any = None,
    out: Any = None,
) -> Ask:
    """Check the arguments of a retrieve of a prefix of `num_tokens`, whose chunks have `keys`.

    Raises:
        InvalidInputError: one of them is wrong.
    """
    wanted = check_layers(layers)
    first = check_index("start", start)
    last = num_tokens if stop is None else check_index("stop", stop)
    if not 0 <= first <= last <= num_tokens:
        raise InvalidInputError(
            f"start, stop: got {first} and {last}, expected 0 <= start <= stop <= {num_tokens} (the token_ids)"
        )
    if dtype is not None:
        check_dtype("dtype", dtype)
    place = check_device(device)
    buffers = {} if out is None else _check_out(out, wanted, last - first, dtype)
    said = place or torch.device("cpu")
    for layer, buffer in buffers.items():
        if device is not None and buffer.device != said:
            raise InvalidInputError(
                f"out: got a buffer on {buffer.device} for layer {layer}, expected one on {said} as device says"
            )
    moment = Moment([*([] if place is None else [place]), *(buffer.device for buffer in buffers.values())])
    chunks = min(len(keys), -(-last // keys.chunk_size))
    keys = keys.first(chunks)
    return Ask(keys, wanted, first, min(last, keys.num_tokens), dtype, place, buffers, moment)


class Copies:
    """The layers that are copied: each into the caller's buffer, or into a tensor made for it.

    Args:
        ask: what was asked for.
        specs: of the layers, as they are stored.
        end: the token behind the last row that was found.
        without: layers that need no copy.

    Attributes:
        targets: by layer, where the rows go; on a device they are there for what its stream is given next.
        flight: copies to a device that `run` has begun, and that still read the pool.
    """

    def __init__(self, ask: Ask, specs: Sequence[LayerSpec], end: int, without: Mapping[int, Any]) -> None:
        self._moment, self.flight = ask.moment, Flight()
        self._start, self._end = ask.start, min(end, ask.stop)
        self._specs = [spec for spec in specs if spec.layer_idx not in without and self._end > ask.start]
        self.targets = {spec.layer_idx: self._target(spec, ask) for spec in self._specs}

    def _target(self, spec: LayerSpec, ask: Ask) -> torch.Tensor:
        count = self._end - self._start
        given = ask.out.get(spec.layer_idx)
        if given is None:
            dtype = ask.dtype or torch_dtype(spec.dtype)
            if ask.device is None:
                return empty_rows(count, spec.hidden_dim, dtype)
            return ask.moment.empty(count, spec.hidden_dim, dtype, ask.device)
        if given.shape[1] != spec.hidden_dim:
            raise InvalidInputError(
                f"out: got hidden_dim {given.shape[1]} for layer {spec.layer_idx}, expected {spec.hidden_dim} as stored"
            )
        return given[:count]

    def run(self, pieces: Sequence[Piece]) -> None:
        """Copy; blocks until the last row is there, but for copies from a pool to a device: those are begun."""
        for piece in pieces:
            if piece.pool is not None:
                if not self._moment:  # page-locking fills the page tables as well
                    piece.pool.populate_once()
                self._moment.pin(piece.pool.pin_once)
        for spec in self._specs:
            for piece in pieces:
                self._copy(piece, spec, self.targets[spec.layer_idx])

    def _copy(self, piece: Piece, spec: LayerSpec, target: torch.Tensor) -> None:
        if piece.pool is not None and target.device in self._moment:
            begin_copy_out(
                piece.memory,
                piece.runs,
                spec,
                target,
                self._start,
                self._end,
                moment=self._moment,
                flight=self.flight,
                cut=piece.pool.copy_pieces,
            )
        else:
            with self._moment.writing() if target.device in self._moment else nullcontext():
                copy_out(piece.memory, piece.runs, spec, target, self._start, self._end)


def map_rows(mapping: PoolMapping, reply: LeaseReply, ask: Ask) -> dict[int, tuple[mmap.mmap, torch.Tensor]]:
    """Layers that can be handed out without a copy: wanted as they are stored, and in one piece."""
    mapped: dict[int, tuple[mmap.mmap, torch.Tensor]] = {}
    end = min(reply.num_tokens, ask.stop)
    for spec in reply.specs:
        runs = [run for run in reply.runs if run.layer_idx == spec.layer_idx]
        whole = next((r for r in runs if r.start_token <= ask.start < end <= r.start_token + r.num_tokens), None)
        as_stored = _as_stored(spec, ask)
        if whole is None or not as_stored:
            continue
        offset = whole.offset + (ask.start - whole.start_token) * spec.row_bytes
        try:
            private, position = mapping.private_mapping(offset, (end - ask.start) * spec.row_bytes)
        except OSError as error:  # out of file descriptors or mappings: this process's limit, not the cache's
            logger.debug("no mapping for a result, its rows are copied: %s", error)
            break
        mapped[spec.layer_idx] = (private, view_rows(private, position, end - ask.start, spec))
    return mapped


def _as_stored(spec: LayerSpec, ask: Ask) -> bool:
    """Whether a layer is wanted on the CPU, in no buffer, in the dtype in which it is stored."""
    return spec.layer_idx not in ask.out and ask.device is None and ask.dtype in (None, torch_dtype(spec.dtype))


def view_arrived(piece: Piece, ask: Ask) -> dict[int, torch.Tensor]:
    """Layers of an arrived piece that can be handed out without a copy: wanted as they are stored, if there is room.

    Only of an object whose ref nobody else has: a write into its rows can't show anywhere then. It occupies the object
    store until the last of them is gone, so a process keeps `_MAX_ARRIVED_BYTES` of them at most.
    """
    if piece.shared or piece.memory is None:
        return {}
    end = min(piece.end, ask.stop)
    rows: dict[int, torch.Tensor] = {}
    for spec in piece.specs:
        run = next(run for run in piece.runs if run.layer_idx == spec.layer_idx)
        as_stored = _as_stored(spec, ask)
        if as_stored and run.start_token <= ask.start < end:
            offset = run.offset + (ask.start - run.start_token) * spec.row_bytes
            rows[spec.layer_idx] = view_rows(piece.memory, offset, end - ask.start, spec)
    return rows if rows and _arrived.admit(piece.memory) else {}


class _Arrived:
    """Counts the bytes of arrived objects that results stand on."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._gone: SimpleQueue[int] = SimpleQueue()  # put to by finalizers, at any moment
        self._bytes = 0

    def admit(self, flat: Flat) -> bool:
        """Whether `flat` may stay; then it counts until it is collected."""
        with self._lock:
            while not self._gone.empty():
                self._bytes -= self._gone.get()
            if self._bytes + flat.nbytes > _MAX_ARRIVED_BYTES:
                return False
            self._bytes += flat.nbytes
        weakref.finalize(flat, self._gone.put, flat.nbytes).atexit = False
        return True


_arrived = _Arrived()


def make_hit(ask: Ask, end: int, ended_by: str, rows: Mapping[int, torch.Tensor]) -> PrefixHit:
    """The result for rows up to `end`; layers in the order in which they were asked for."""
    num_tokens = min(end, ask.stop)
    layers = {layer: rows[layer] for layer in ask.layers if layer in rows}
    return PrefixHit(num_tokens, ask.start, ended_by if num_tokens < ask.stop else "", layers)


def _check_out(out: Any, layers: tuple[int, ...], num_rows: int, dtype: torch.dtype | None) -> dict[int, torch.Tensor]:
    if not isinstance(out, Mapping):
        raise InvalidInputError(f"out: got {type(out).__name__}, expected {{layer_idx: buffer}}")
    for layer, buffer in out.items():
        if check_index("out", layer) not in layers:
            raise InvalidInputError(f"out: got a buffer for layer {layer!r}, expected only layers asked for: {layers}")
        if not isinstance(buffer, torch.Tensor) or buffer.dim() != _ROW_AXES or len(buffer) < num_rows:
            shape = list(buffer.shape) if isinstance(buffer, torch.Tensor) else type(buffer).__name__
            raise InvalidInputError(
                f"out: got {shape} for layer {layer}, expected a tensor [at least {num_rows}, hidden_dim]"
            )
        check_dense(f"out of layer {layer}", buffer)
        check_dtype("out.dtype", buffer.dtype)
        if _overlaps_itself(buffer):
            raise InvalidInputError(
                f"out: got strides {buffer.stride()} for layer {layer}, expected elements with memory of their own"
            )
        if dtype is not None and buffer.dtype != dtype:
            raise InvalidInputError(f"out: got {buffer.dtype} for layer {layer}, expected {dtype} as dtype says")
        if buffer.requires_grad:
            raise InvalidInputError(
                f"out: got a buffer that requires grad for layer {layer}, expected one that doesn't"
            )
    if _overlap(out.values()):
        raise InvalidInputError("out: got buffers that share memory, expected one of its own for each layer")
    return dict(out)


class _Layout:
    """Where a tensor lies, for NumPy, in any dtype and on any device; nothing is read."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.start = rows.data_ptr()
        strides = tuple(step * rows.itemsize for step in rows.stride())
        self.end = self.start + sum((n - 1) * step for n, step in zip(rows.shape, strides, strict=True)) + rows.itemsize
        self.__array_interface__ = {
            "version": 3,
            "shape": tuple(rows.shape),
            "strides": strides,
            "typestr": f"|V{rows.itemsize}",
            "data": (self.start, False),
        }


def _overlaps_itself(rows: torch.Tensor) -> bool:
    """Whether elements may share memory; also True for some that interleave without doing so."""
    free_from = 1
    for stride, size in sorted((step, n) for step, n in zip(rows.stride(), rows.shape, strict=True) if n > 1):
        if stride < free_from:
            return True
        free_from += stride * (size - 1)
    return False


def _overlap(buffers: Iterable[torch.Tensor]) -> bool:
    """Whether two of these have a byte in common. They may lie in each other's gaps, as columns of one tensor do."""
    layouts = sorted((_Layout(rows) for rows in buffers if rows.numel()), key=lambda layout: layout.start)
    if all(left.end <= right.start for left, right in itertools.pairwise(layouts)):
        return False
    return any(np.shares_memory(*pair) for pair in itertools.combinations(map(np.asarray, layouts), 2))
