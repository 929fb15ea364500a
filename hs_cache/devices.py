"""Copies between pool memory and tensors on a device: what is asynchronous, what waits for what, when it has ended.

Rows on the CPU are copied at once, by whoever wants them copied. Rows on a device are copied by its `Lane`, in the
order of the caller's stream: a store reads what the caller's kernels will have written, and what comes back is ready
for the kernels that the caller launches next. A `Moment` remembers the stream, since a copy may be begun on another
thread.
"""

import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch

from hs_cache.errors import InvalidInputError

Cut: TypeAlias = Callable[[int, int], Iterable[tuple[int, int]]]
"""Cuts ``(offset, nbytes)`` of a pool where one copy must not go on; see `hs_cache.shared_pool`'s `copy_pieces`."""


_CAPTURE_POLL_S = 0.001


class Fence(Protocol):
    """The end of copies that were begun."""

    def ended(self) -> bool:
        """Whether they touch no memory any more, also because they failed. Never blocks, never raises."""
        ...

    def wait(self) -> None:
        """Block until they have ended. Raises what made them fail."""
        ...


@dataclass(frozen=True, slots=True)
class Transfer:
    """Rows on a device, and their place in a pool.

    Attributes:
        rows: ``[n, hidden_dim]``, of any stride and floating dtype.
        dtype: in which the pool has them.
        host: the place: flat uint8 tensors on the CPU, one behind the other, row-major; several where one copy must not
            go on.
    """

    rows: torch.Tensor
    dtype: torch.dtype
    host: tuple[torch.Tensor, ...]

    def enqueue_in(self) -> None:
        """Copy the rows into the pool, on the current stream. What isn't contiguous becomes so on the device first:
        there a copy of its own would go through pageable memory of the CPU, and block."""
        position, flat = 0, _bits(self.rows.to(self.dtype)).contiguous().view(torch.uint8).view(-1)
        for part in self.host:
            part.copy_(flat[position : position + len(part)], non_blocking=True)
            position += len(part)

    def enqueue_out(self) -> None:
        """Copy the rows out of the pool, on the current stream; converted, or spread to strides, on the device."""
        rows = self.rows
        as_stored = rows.dtype == self.dtype and rows.is_contiguous()
        target = rows if as_stored else torch.empty(rows.shape, dtype=self.dtype, device=rows.device)
        position, flat = 0, target.view(torch.uint8).view(-1)
        for part in self.host:
            flat[position : position + len(part)].copy_(part, non_blocking=True)
            position += len(part)
        if rows.dtype != self.dtype:
            rows.copy_(target)
        elif not as_stored:
            _bits(rows).copy_(_bits(target))


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(rows: torch.Tensor) -> torch.Tensor:
    """Rows as integers of the same size: not every device can copy every float8."""
    return rows.view(_INTEGERS[rows.itemsize])


class Lane(Protocol):
    """Copies to and from one device. Thread-safe. Whatever a method raises, none of its copies is under way then.

    Attributes:
        pins: whether page-locked memory makes its copies faster, as CUDA does it.
    """

    pins: bool

    def mark(self) -> Any:
        """Where the calling thread's current stream is now: behind all that it was given so far.

        Raises:
            InvalidInputError: it is capturing a graph, and runs nothing now.
        """
        ...

    def on_device(self) -> AbstractContextManager[Any]:
        """In the ``with`` block, calls to the device's driver are about this device."""
        ...

    def reading(self, mark: Any) -> AbstractContextManager[None]:
        """Blocks until the mark has passed. In the ``with`` block, the calling thread may copy from the device, beside
        what the stream of the mark is given later."""
        ...

    def writing(self, mark: Any) -> AbstractContextManager[None]:
        """In the ``with`` block, the calling thread may copy to the device, on the stream of the mark."""
        ...

    def empty(self, num_rows: int, hidden_dim: int, dtype: torch.dtype, mark: Any) -> torch.Tensor:
        """Uninitialised rows on the device, for `copy_out` with that mark. Doesn't block."""
        ...

    def copy_in(self, transfers: Sequence[Transfer], mark: Any) -> Fence:
        """Begin to copy rows into the pool, beside what the mark's stream is given later. Blocks until the mark has
        come."""
        ...

    def copy_out(self, transfers: Sequence[Transfer], mark: Any) -> Fence:
        """Begin to copy rows out of the pool, on the stream of the mark. Doesn't block."""
        ...


class _CudaMark(NamedTuple):
    stream: torch.cuda.Stream
    event: torch.cuda.Event


def _recorded(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # who waits for it sleeps, without the GIL
    event.record(stream)
    return event


class _CudaFence:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._device = stream.device
        self._event = _recorded(stream)

    def ended(self) -> bool:
        try:
            with torch.cuda.device(self._device):  # a thread of ours would make a context on the first one
                return bool(self._event.query())  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            return not is_capture_error(error)  # a context that has failed runs nothing any more

    def wait(self) -> None:
        while True:
            try:
                with torch.cuda.device(self._device):
                    return self._event.synchronize()
            except RuntimeError as error:
                if not is_capture_error(error):
                    raise
            time.sleep(_CAPTURE_POLL_S)


def is_capture_error(error: RuntimeError) -> bool:
    """Whether CUDA refused a call because some thread is capturing a graph: that says nothing about copies under way.

    The texts of the errors ``cudaErrorStreamCapture*`` (900 to 908) all name the capture.
    """
    return "captur" in str(error).lower()


class CudaLane:
    """The lane of one CUDA device, with a stream of its own for what is stored."""

    pins = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def mark(self) -> _CudaMark:
        stream = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(stream):
            if torch.cuda.is_current_stream_capturing():
                raise InvalidInputError(
                    f"device: got {self._device}, whose current stream is capturing a CUDA graph; call outside of that"
                )
        return _CudaMark(stream, _recorded(stream))

    def on_device(self) -> AbstractContextManager[Any]:
        return torch.cuda.device(self._device)

    @contextmanager
    def reading(self, mark: _CudaMark) -> Iterator[None]:
        mark.event.synchronize()
        with torch.cuda.stream(self._side):
            yield

    def writing(self, mark: _CudaMark) -> AbstractContextManager[None]:
        return torch.cuda.stream(mark.stream)

    def empty(self, num_rows: int, hidden_dim: int, dtype: torch.dtype, mark: _CudaMark) -> torch.Tensor:
        with torch.cuda.stream(mark.stream):  # or its memory would be used again before that stream is through with it
            return torch.empty(num_rows, hidden_dim, dtype=dtype, device=self._device)

    def copy_in(self, transfers: Sequence[Transfer], mark: _CudaMark) -> Fence:
        # Waited for here and not by the stream, which others use as well: they would wait for the caller's kernels.
        mark.event.synchronize()
        with _ended_if_it_raises(self._side), torch.cuda.stream(self._side):
            for transfer in transfers:
                transfer.rows.record_stream(self._side)  # its memory may be freed at any time, and is used again later
                transfer.enqueue_in()
            return _CudaFence(self._side)

    def copy_out(self, transfers: Sequence[Transfer], mark: _CudaMark) -> Fence:
        with _ended_if_it_raises(mark.stream), torch.cuda.stream(mark.stream):
            for transfer in transfers:
                transfer.enqueue_out()
            return _CudaFence(mark.stream)


@contextmanager
def _ended_if_it_raises(stream: torch.cuda.Stream) -> Iterator[None]:
    try:
        yield
    except BaseException:
        with suppress(RuntimeError):
            stream.synchronize()
        raise


@functools.cache
def _cuda_lane(device: torch.device) -> CudaLane:
    return CudaLane(device)


def _resolved_cuda_lane(device: torch.device) -> CudaLane:
    if not torch.cuda.is_available():
        raise InvalidInputError(f"device: got {str(device)!r}, but PyTorch finds no CUDA device in this process")
    index, count = device.index, torch.cuda.device_count()
    if index is None:
        index = torch.cuda.current_device()
    if not 0 <= index < count:
        raise InvalidInputError(f"device: got {str(device)!r}, expected an index below {count}, the number of devices")
    return _cuda_lane(torch.device(device.type, index))


LANES: dict[str, Callable[[torch.device], Lane]] = {"cuda": _resolved_cuda_lane}
"""By device type, what makes, or finds, the lane of a device; it raises `InvalidInputError` for a device that isn't
there. ROCm's devices are called cuda, too."""


def lane_of(device: torch.device) -> Lane | None:
    """The lane of a device; None where copies are plain and synchronous, as on the CPU.

    Raises:
        InvalidInputError: there is no such device.
    """
    make = LANES.get(device.type)
    return None if make is None else make(device)


def check_device(device: Any) -> torch.device | None:
    """Where rows are wanted: a device with a lane, with its index; None for the CPU, or where nothing was said.

    Raises:
        InvalidInputError: it is no device, there is no such one, or there is no lane for its type.
    """
    if device is None:
        return None
    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise InvalidInputError(f"device: got {device!r:.60}, expected a torch.device or its name, or None") from error
    if lane_of(wanted) is not None:
        index = torch.cuda.current_device() if wanted.type == "cuda" and wanted.index is None else wanted.index
        return torch.device(wanted.type) if index is None else torch.device(wanted.type, index)
    if wanted.type == "cpu":
        return None
    raise InvalidInputError(f"device: got {str(wanted)!r}, expected {' or '.join(sorted({'cpu', *LANES}))}")


class Flight:
    """Copies under way; a `Fence` for all of them together."""

    def __init__(self) -> None:
        self._fences: list[Fence] = []

    def __bool__(self) -> bool:
        return bool(self._fences)

    def add(self, fence: Fence) -> None:
        """Count more copies in."""
        self._fences.append(fence)

    def ended(self) -> bool:
        """See `Fence.ended`."""
        return all(fence.ended() for fence in self._fences)

    def wait(self) -> None:
        """See `Fence.wait`. Whatever it raises, also KeyboardInterrupt, all of them have ended by then."""
        failure: BaseException | None = None
        for fence in self._fences:
            while True:
                try:
                    fence.wait()
                except BaseException as error:
                    failure = failure or error
                    if not fence.ended():
                        continue
                break
        if failure is not None:
            raise failure


class Moment:
    """Where the current streams of some devices are, for the thread that makes it: when an operation was called.

    Args:
        devices: those of the tensors of the operation; those without a lane don't count.
    """

    def __init__(self, devices: Iterable[torch.device] = ()) -> None:
        lanes = {device: lane_of(device) for device in set(devices)}
        self._lanes: Mapping[torch.device, tuple[Lane, Any]] = {
            device: (lane, lane.mark()) for device, lane in lanes.items() if lane is not None
        }

    def __bool__(self) -> bool:
        return bool(self._lanes)

    def __contains__(self, device: torch.device) -> bool:
        return device in self._lanes

    def empty(self, num_rows: int, hidden_dim: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Uninitialised rows on one of the devices, for `copy_out`."""
        lane, mark = self._lanes[device]
        return lane.empty(num_rows, hidden_dim, dtype, mark)

    def pin(self, pin: Callable[[], None]) -> None:
        """Call `pin`, which page-locks the pool, if that makes copies to or from these devices faster."""
        for lane, _ in self._lanes.values():
            if lane.pins:
                with lane.on_device():
                    return pin()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Blocks until this moment has come on all devices. In the ``with`` block, the calling thread may copy from
        them; what their streams were given since doesn't delay it."""
        with ExitStack() as stack:
            for lane, mark in self._lanes.values():
                stack.enter_context(lane.reading(mark))
            yield

    @contextmanager
    def writing(self) -> Iterator[None]:
        """In the ``with`` block, the calling thread may copy to the devices, on the streams of this moment."""
        with ExitStack() as stack:
            for lane, mark in self._lanes.values():
                stack.enter_context(lane.writing(mark))
            yield

    def copy_in(self, transfers: Sequence[Transfer], flight: Flight) -> None:
        """Begin to copy rows into the pool; the copies count in `flight`, also where this raises midway."""
        for device, (lane, mark) in self._lanes.items():
            if own := [transfer for transfer in transfers if transfer.rows.device == device]:
                flight.add(lane.copy_in(own, mark))

    def copy_out(self, transfers: Sequence[Transfer], flight: Flight) -> None:
        """Begin to copy rows out of the pool; as `copy_in`."""
        for device, (lane, mark) in self._lanes.items():
            if own := [transfer for transfer in transfers if transfer.rows.device == device]:
                flight.add(lane.copy_out(own, mark))


NO_DEVICES = Moment()
"""For operations that touch the CPU only."""
