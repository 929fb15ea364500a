"""Page-locking of a mapping, so that a GPU copies from and to it directly."""

import ctypes
import logging
import sys
from collections.abc import Callable, Iterator
from functools import partial

if sys.platform == "linux":
    import resource

logger = logging.getLogger(__name__)

_GIB = 1 << 30
_PIECE_BYTES = 1 << 30

HostRegister = Callable[[int, int], int]
"""``(address, nbytes) -> cudaError_t``: page-locks host memory; 0 is success."""
HostUnregister = Callable[[int], int]
"""``(address) -> cudaError_t``: undoes it."""


class PageLock:
    """The page-lock of one mapping, or why there is none. Whoever owns the mapping lets one thread in at a time.

    Attributes:
        reason: Why the mapping is page-locked or isn't, in words.
    """

    def __init__(self) -> None:
        self.reason = "pin() was not called"
        self._piece_bytes = 0
        self._undo: list[Callable[[], int]] = []

    @property
    def locked(self) -> bool:
        """Whether the driver has page-locked the whole mapping."""
        return self._piece_bytes > 0

    def lock(self, address: int, nbytes: int, register: HostRegister, unregister: HostUnregister) -> None:
        """Page-lock ``nbytes`` of memory, in several pieces when the driver refuses one. All of it or nothing.

        Blocks for the driver. Afterwards `locked` and ``reason`` tell. What ``register`` raises is raised on.

        Args:
            address: Where the memory starts.
            nbytes: Its size.
            register: As `cuda_host_register` gives it.
            unregister: As `cuda_host_register` gives it.
        """
        code = self._register(address, nbytes, nbytes, register, unregister)
        if code and nbytes > _PIECE_BYTES:
            code = self._register(address, nbytes, _PIECE_BYTES, register, unregister)
        self.reason = (
            f"cudaHostRegister failed with error {code} for {nbytes / _GIB:.2f} GiB; the limit on locked memory is "
            f"{_memlock_limit()}, raise it with `ulimit -l` or, for a container, `--ulimit memlock=-1`"
            if code
            else "page-locked"
        )

    def _register(
        self, address: int, nbytes: int, piece: int, register: HostRegister, unregister: HostUnregister
    ) -> int:
        try:
            for start in range(0, nbytes, piece):
                code = register(address + start, min(piece, nbytes - start))
                if code:
                    return code
                self._undo.append(partial(unregister, address + start))
            self._piece_bytes = piece
            return 0
        finally:
            if not self.locked:
                self.unlock()

    def unlock(self) -> None:
        """Undo `lock`; blocks for the driver. What the driver refuses is logged. Without a lock it does nothing."""
        self._piece_bytes = 0
        while self._undo:
            code = self._undo.pop()()
            if code:
                logger.warning("cudaHostUnregister failed with error %d", code)

    def pieces(self, start: int, nbytes: int) -> Iterator[tuple[int, int]]:
        """Cut a piece of the mapping at the borders of what was page-locked separately.

        Yields:
            ``(start, nbytes)`` in bytes of the mapping, in order; usually one.
        """
        end = start + nbytes
        while start < end:
            piece = end - start
            if self._piece_bytes:
                piece = min(piece, self._piece_bytes - start % self._piece_bytes)
            yield start, piece
            start += piece


def cuda_host_register() -> tuple[HostRegister, HostUnregister] | None:
    """``cudaHostRegister`` with the portable flag and ``cudaHostUnregister``, as torch has them; None without CUDA.

    Imports torch, and makes the process's CUDA context.
    """
    import torch  # here because only who pins needs torch

    if not torch.cuda.is_available():
        return None
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    portable = 1  # cudaHostRegisterPortable: pinned for every context of the process

    def register(address: int, nbytes: int) -> int:
        code = int(cudart.cudaHostRegister(address, nbytes, portable))
        clear = getattr(ctypes.CDLL(None), "cudaGetLastError", None)
        if code and clear is not None:
            clear()  # or the next kernel launch would report this error as its own
        return code

    return register, lambda address: int(cudart.cudaHostUnregister(address))


def _memlock_limit() -> str:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "unlimited" if soft == resource.RLIM_INFINITY else f"{soft / _GIB:.3f} GiB"
