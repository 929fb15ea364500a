"""A lane for a machine without any device: tensors on the CPU, and copies on a thread, when the test lets them run.

A `Stream` does what it is given in order, as a device does. While it is closed, work and copies that were begun stay
undone, whatever the caller does meanwhile.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from queue import SimpleQueue

import torch

from hs_cache.devices import Transfer


class Done:
    """The end of one piece of work; a `hs_cache.devices.Fence`."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function: Callable[[], None] | None = function
        self._event = threading.Event()
        self._error: BaseException | None = None

    def carry_out(self) -> None:
        function, self._function = self._function, None
        assert function is not None
        try:
            with torch.inference_mode():  # a device writes wherever it is told to
                function()
        except BaseException as error:
            self._error = error.with_traceback(None)
        self._event.set()

    def ended(self) -> bool:
        return self._event.is_set()

    def wait(self) -> None:
        assert self._event.wait(60), "nobody has opened the stream"
        if self._error is not None:
            raise self._error


class Stream:
    """Does what it is given, in order, on a thread of its own, while it is open."""

    def __init__(self) -> None:
        self._work: SimpleQueue[Done | None] = SimpleQueue()
        self._open = threading.Event()
        self._open.set()
        self._thread = threading.Thread(target=self._run, name="test-stream", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (done := self._work.get()) is not None:
            self._open.wait()
            done.carry_out()
            del done

    def give(self, function: Callable[[], None]) -> Done:
        done = Done(function)
        self._work.put(done)
        return done

    def close(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    def end(self) -> None:
        self.open()
        self._work.put(None)
        self._thread.join(60)


class DeferredLane:
    """A `hs_cache.devices.Lane`.

    Args:
        pins: As the lane's.

    Attributes:
        stream: The one stream of all callers.
        side: Where copies into the pool run.
        fail: Raised by the next copies.
        copied: Address and size of every piece of pool memory that was copied from or to.
    """

    def __init__(self, *, pins: bool = False) -> None:
        self.pins = pins
        self.stream, self.side = Stream(), Stream()
        self.fail: BaseException | None = None
        self.copied: list[tuple[int, int]] = []

    def end(self) -> None:
        self.stream.end()
        self.side.end()

    def mark(self) -> Done:
        return self.stream.give(lambda: None)

    @contextmanager
    def reading(self, mark: Done) -> Iterator[None]:
        mark.wait()
        yield

    writing = reading

    def on_device(self) -> AbstractContextManager[None]:
        return nullcontext()

    def empty(self, num_rows: int, hidden_dim: int, dtype: torch.dtype, mark: Done) -> torch.Tensor:
        return torch.full((num_rows, hidden_dim), 99, dtype=torch.float32).to(dtype)

    def copy_in(self, transfers: Sequence[Transfer], mark: Done) -> Done:
        fail, self.fail = self.fail, None

        def work() -> None:
            mark.wait()
            self._copy([transfer.enqueue_in for transfer in transfers], transfers, fail)

        return self.side.give(work)

    def copy_out(self, transfers: Sequence[Transfer], mark: Done) -> Done:
        fail, self.fail = self.fail, None
        copies = [transfer.enqueue_out for transfer in transfers]
        return self.stream.give(lambda: self._copy(copies, transfers, fail))

    def _copy(
        self, copies: Sequence[Callable[[], None]], transfers: Sequence[Transfer], fail: BaseException | None
    ) -> None:
        for copy, transfer in zip(copies, transfers, strict=True):
            copy()
            self.copied += [(part.data_ptr(), len(part)) for part in transfer.host]
            if fail is not None:
                raise fail
