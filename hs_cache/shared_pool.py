"""The memory of a node's cache: one anonymous shared-memory file, mapped by its owner and by every client on the node.

`SharedPool` is the owner's side, `PoolMapping` the client's. The file is a memfd: it has no name under /dev/shm, other
processes open it through ``/proc/<owner>/fd/<n>``, and the kernel frees it with its last holder, also after SIGKILL.
It starts with a `hs_cache.pool_file.PoolHeader`; offset 0 of an `hs_cache.extents.Extent` is the first byte behind it.
"""

import errno
import logging
import mmap
import os
import secrets
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress

from hs_cache.errors import CacheClosedError, InvalidInputError, PoolError
from hs_cache.machine import (
    DEFAULT_MARGIN_BYTES,
    MemoryHeadroom,
    memory_headroom,
    process_alive,
    process_start_time,
    require_headroom,
)
from hs_cache.messages import PoolAddress
from hs_cache.pinning import HostRegister, HostUnregister, PageLock, cuda_host_register
from hs_cache.pool_file import (
    HEADER_BYTES,
    INCARNATION_BYTES,
    PoolHeader,
    address_of,
    closed_unless_kept,
    create_memfd,
    map_file,
    open_memfd,
    opening,
    populate,
    spare_maps,
)

logger = logging.getLogger(__name__)

_GIB = 1 << 30
_PREFAULT_PIECE_BYTES = 32 << 20
_POPULATE_PIECE_BYTES = 4 << 20
_POPULATE_PAUSE_S = 0.002
_POPULATE_POLL_S, _LONGEST_POLL_S = 0.1, 10.0
_PER_TABLE_BYTE = 512  # eight bytes for a page of 4 KiB
_SPARED_HEADROOM = 16
_BLOCK_BYTES = 512  # stat(2): always


class _MappedPool:
    """What owner and client have in common: the file, one shared mapping of all of it, and its page-lock."""

    _no_cuda_level = logging.DEBUG

    def __init__(
        self,
        fd: int,
        incarnation: bytes,
        data_bytes: int,
        margin_bytes: int = DEFAULT_MARGIN_BYTES,
        headroom: Callable[[], MemoryHeadroom] = memory_headroom,
    ) -> None:
        self.incarnation = incarnation
        self.data_bytes = data_bytes
        self._margin_bytes = margin_bytes
        self._headroom = headroom
        self._page_lock = PageLock()
        self._without_cuda = False
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._pin_lock = threading.Lock()  # taken before _lock, and held while the driver works
        self._fd = fd
        self._map: mmap.mmap | None = map_file(fd, HEADER_BYTES + data_bytes, mmap.MAP_SHARED)
        self._close_fd = weakref.finalize(self, os.close, fd)
        self._close_fd.atexit = False

    @property
    def pinned(self) -> bool:
        """Whether the mapping is page-locked, so that a GPU copies from and to it directly; see ``pin_reason``."""
        return self._page_lock.locked

    @property
    def pin_reason(self) -> str:
        """Why the mapping is page-locked or isn't, in words."""
        return self._page_lock.reason

    @property
    def without_cuda(self) -> bool:
        """Whether it isn't page-locked since this process has no CUDA that could make use of it."""
        return self._without_cuda

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._map is None

    def _usable_map(self) -> mmap.mmap:
        if os.getpid() != self._pid:
            raise CacheClosedError(
                f"the pool was mapped by process {self._pid} and isn't mapped in its forked child {os.getpid()}: "
                "open it again there"
            )
        if self._map is None:
            raise CacheClosedError("the pool is closed")
        return self._map

    def _data_view(self) -> memoryview:
        self._usable_map()
        with self._lock:
            return memoryview(self._usable_map())[HEADER_BYTES:]

    def pin(self, register: HostRegister | None = None, unregister: HostUnregister | None = None) -> bool:
        """Page-lock the whole mapping for CUDA. Idempotent. Blocks for the prefault's end, then for the driver.

        Where CUDA is not available it does nothing, and the owner logs one INFO line. What the driver refuses in one
        piece is tried in several, see `copy_pieces`. Any failure leaves the pool pageable and logs one warning.

        Args:
            register: Replaces ``cudaHostRegister`` with the portable flag, as torch gives it.
            unregister: Replaces ``cudaHostUnregister``.

        Returns:
            `pinned`.

        Raises:
            CacheClosedError: After `close`, or in a forked child.
        """
        self._usable_map()
        if register is None or unregister is None:
            cuda = cuda_host_register()
            if cuda is None:
                self._note_no_cuda()
                return False
            register, unregister = cuda
        self._await_memory()
        with self._pin_lock:
            mapped = self._usable_map()
            if not self.pinned:
                if reason := self._memory_missing():
                    self._page_lock.reason = reason
                else:
                    self._page_lock.lock(address_of(mapped), len(mapped), register, unregister)
                if not self.pinned:
                    logger.warning("The pool stays pageable, GPU copies will be slower: %s", self.pin_reason)
            return self.pinned

    def copy_pieces(self, offset: int, nbytes: int) -> Iterator[tuple[int, int]]:
        """Cut a piece of the data where one GPU copy must not go on: at the borders of page-locked pieces.

        Yields:
            ``(offset, nbytes)`` in bytes of the data, in order; usually one.
        """
        for start, piece in self._page_lock.pieces(HEADER_BYTES + offset, nbytes):
            yield start - HEADER_BYTES, piece

    def _note_no_cuda(self) -> None:
        with self._pin_lock:
            if not self._without_cuda:
                self._without_cuda, self._page_lock.reason = True, "CUDA is not available"
                logger.log(self._no_cuda_level, "The pool stays pageable: %s", self.pin_reason)

    def _await_memory(self) -> None:
        """Block until nobody else is busy allocating the pool."""

    def _memory_missing(self, within_bytes: int | None = None) -> str | None:
        """Why there isn't the memory for what the file lacks, or for ``within_bytes`` of that; ``None`` if there is."""
        missing = HEADER_BYTES + self.data_bytes - os.fstat(self._fd).st_blocks * _BLOCK_BYTES
        needed = missing if within_bytes is None else min(missing, within_bytes)
        headroom = self._headroom()
        if needed <= 0 or headroom.nbytes - self._margin_bytes >= needed:
            return None
        return f"{headroom.limit} leaves only {headroom.nbytes / _GIB:.3f} GiB"

    def close(self) -> None:
        """Let go of the mapping and the file. Idempotent; in a forked child it does nothing.

        Views of it that are still held stay valid, and keep the memory until they are gone.
        """
        if os.getpid() != self._pid:
            return
        with self._pin_lock, self._lock:
            mapped, self._map = self._map, None
            if mapped is None:
                return
            self._page_lock.unlock()
            try:
                mapped.close()
            except BufferError:
                logger.debug("Views of the pool are alive; the mapping ends with the last of them")
            self._close_fd()


class SharedPool(_MappedPool):
    """A node's pool, on the side of the process that owns it. Linux only. Its methods may be called from any thread.

    The memory is checked for before anything is allocated, and never tried for: the kernel answers a memfd that is too
    large with the OOM killer instead of an error.

    Args:
        data_bytes: Size of the data in bytes, above 0.
        name: Shown by the kernel in ``/proc/<pid>/maps``.
        margin_bytes: Memory to leave free.
        prefault: Allocate and clear the memory on a background thread. Otherwise the first write to each page does
            that, about ten times slower than writing to memory that is there, and in the account of who writes.
        headroom: Tells how much memory there is.
        pin: Let the background thread `pin` the memory, after the prefault. ``pinned`` and ``pin_reason`` tell how
            that went; what fails is logged and not raised. Imports torch.

    Raises:
        PoolTooLargeError: There isn't enough memory; the message names what limits it and the setting to lower.
        PoolError: The system has no memfd, no ``/proc``, or refuses it.
        InvalidInputError: ``data_bytes`` or ``margin_bytes`` is out of range.

    Attributes:
        incarnation: Random token of 16 bytes: another pool never has the same.
        data_bytes: As given.
    """

    _no_cuda_level = logging.INFO

    def __init__(
        self,
        data_bytes: int,
        *,
        name: str = "hs_cache",
        margin_bytes: int = DEFAULT_MARGIN_BYTES,
        prefault: bool = True,
        headroom: Callable[[], MemoryHeadroom] = memory_headroom,
        pin: bool = False,
    ) -> None:
        _require_linux()
        if data_bytes <= 0 or margin_bytes < 0:
            raise InvalidInputError(
                f"data_bytes is {data_bytes} and margin_bytes {margin_bytes}, expected above 0 and at least 0"
            )
        if pin:
            import torch  # noqa: F401  # not on the background thread: two that import it at once may see it half made
        require_headroom(data_bytes, margin_bytes, headroom())
        start_time = process_start_time(os.getpid())
        if start_time is None:
            raise PoolError("/proc doesn't show this process, so no other could open the pool")
        incarnation = secrets.token_bytes(INCARNATION_BYTES)
        fd = -1
        try:
            fd = create_memfd(name, PoolHeader(incarnation, data_bytes))
            super().__init__(fd, incarnation, data_bytes, margin_bytes, headroom)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            raise PoolError(
                f"cannot create a shared memory file of {data_bytes} bytes: {error}. Lower max_hidden_state_cpu_size, "
                "or raise the limits under which Ray was started there (ulimit -f and -v)"
            ) from error
        self.address = PoolAddress(os.getpid(), start_time, fd, incarnation, data_bytes)
        self._prefaulted_bytes = 0
        self._stop = threading.Event()
        self._prefault_ended = threading.Event()
        self._thread: threading.Thread | None = None
        if pin:
            self._page_lock.reason = "the background thread has not come to it yet"
        if not prefault:
            self._prefault_ended.set()
        if prefault or pin:
            # Not a daemon: at exit the interpreter would end it inside the driver's C++, which may abort the process.
            self._thread = threading.Thread(target=self._prepare, args=(prefault, pin), name="hs_cache-prefault")
            self._thread.start()

    @property
    def prefaulted_bytes(self) -> int:
        """How much of the data has memory behind it already, in bytes, as far as the background thread did it."""
        return max(self._prefaulted_bytes - HEADER_BYTES, 0)

    def view(self) -> memoryview:
        """The data, writable, shared with every client: ``uint8``, ``[data_bytes]``.

        Raises:
            CacheClosedError: After `close`, or in a forked child.
        """
        return self._data_view()

    def wait_prefaulted(self, timeout: float | None = None) -> bool:
        """Block until the prefault has ended, at most ``timeout`` seconds.

        Returns:
            Whether the whole pool has memory behind it.
        """
        self._prefault_ended.wait(timeout)
        return self.prefaulted_bytes == self.data_bytes

    def _await_memory(self) -> None:
        self._prefault_ended.wait()

    def close(self) -> None:
        """Let go of the memory. Idempotent; in a forked child it does nothing.

        Blocks for one piece of the prefault, or for the driver. The kernel frees the memory when no client maps it any
        more. Views that are still held stay valid.
        """
        if os.getpid() != self._pid:
            return
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        super().close()

    def _ending(self) -> bool:
        return self._stop.is_set() or not threading.main_thread().is_alive()

    def _prepare(self, prefault: bool, pin: bool) -> None:
        if prefault:
            self._prefault()
        if pin and not self._ending():
            try:
                self.pin()
            except RuntimeError as error:  # what torch makes of CUDA's errors
                self._page_lock.reason = str(error)
                logger.warning("The pool stays pageable, GPU copies will be slower: %s", error)

    def _prefault(self) -> None:
        total = HEADER_BYTES + self.data_bytes
        try:
            for start in range(0, total, _PREFAULT_PIECE_BYTES):
                piece = min(_PREFAULT_PIECE_BYTES, total - start)
                if self._ending():
                    return
                if reason := self._memory_missing(piece):
                    raise OSError(errno.ENOMEM, reason)
                # The first gets the memory or an error, the second clears it and fills the page tables.
                os.posix_fallocate(self._fd, start, piece)
                populate(self._usable_map(), start, piece)
                self._prefaulted_bytes = start + piece
        except (OSError, PoolError) as error:
            logger.warning(
                "Stopped prefaulting the pool at %.2f of %.2f GiB, first writes to the rest are slower: %s",
                self._prefaulted_bytes / _GIB,
                total / _GIB,
                error,
            )
        finally:
            self._prefault_ended.set()


class PoolMapping(_MappedPool):
    """A pool of another process of this node. Made by `open`; its methods may be called from any thread."""

    def __init__(self, fd: int, incarnation: bytes, data_bytes: int) -> None:
        super().__init__(fd, incarnation, data_bytes)
        self._pin_once_lock = threading.Lock()
        self._pin_tried = self._populating = False
        # Before the memory is unmapped: the driver would go on taking its addresses for page-locked ones.
        weakref.finalize(self, _unlock, self._page_lock, self._pid).atexit = False

    @classmethod
    def open(cls, address: PoolAddress) -> "PoolMapping":
        """Open and map a pool, after making sure that it is the one that ``address`` names.

        Never blocks on what it finds instead, and leaves it unchanged.

        Raises:
            PoolError: It can't be opened from here, or what is there is something else. The message gives the reason.
        """
        _require_linux()
        with opening(address):
            if not process_alive(address.pid, address.start_time):
                raise PoolError(f"the process {address.pid} that owned the pool is gone")
            fd = open_memfd(address, PoolHeader(address.incarnation, address.data_bytes))
            with closed_unless_kept(fd):
                return cls(fd, address.incarnation, address.data_bytes)

    def pin_once(self) -> None:
        """`pin` at the first call; others wait for that, and do nothing. Blocks for the driver: about as long as a copy
        of the whole pool. What fails leaves the mapping pageable and logs one warning.

        Raises:
            CacheClosedError: After `close`, or in a forked child.
        """
        self._usable_map()
        with self._pin_once_lock:
            if self._pin_tried:
                return
            self._pin_tried = True
            try:
                self.pin()
            except RuntimeError as error:  # what torch makes of CUDA's errors
                self._page_lock.reason = str(error)
                logger.warning("The pool stays pageable, GPU copies will be slower: %s", error)

    def populate_once(self) -> None:
        """Have a thread fill this process's page tables for the whole pool, so that copies don't meet page faults: a
        first write to memory takes three times as long as the next ones. Idempotent, doesn't block.

        It begins when all of the pool has memory, which to provide for is the owner's part. Page tables take a 512th of
        the pool; where that is much of what memory is left, nothing is done.
        """
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._populating or self._map is None:
                return
            self._populating = True
        # The thread must not keep the mapping: it ends when nobody uses it any more.
        thread = threading.Thread(target=_populate, args=(weakref.ref(self),), name="hs_cache-populate", daemon=True)
        with suppress(RuntimeError):  # no thread is left, or the interpreter ends
            thread.start()

    def _populate_piece(self, start: int) -> int | None:
        """Fill the page tables for one more piece; where the next one starts, None when there is none."""
        with self._lock:
            if self._map is None:
                return None
            mapped, size = self._map, HEADER_BYTES + self.data_bytes
            if os.fstat(self._fd).st_blocks * _BLOCK_BYTES < size:
                return start
            view = memoryview(mapped)  # so that close() doesn't unmap it meanwhile
        with view:
            if not start and size // _PER_TABLE_BYTE > self._headroom().nbytes // _SPARED_HEADROOM:
                return None
            if not populate(mapped, start, min(_POPULATE_PIECE_BYTES, size - start)):
                return None
        return start + _POPULATE_PIECE_BYTES if start + _POPULATE_PIECE_BYTES < size else None

    def write_view(self) -> memoryview:
        """The data, shared with the owner: ``uint8``, ``[data_bytes]``. Only write to extents reserved for you.

        Raises:
            CacheClosedError: After `close`, or in a forked child.
        """
        return self._data_view()

    def private_mapping(self, offset: int, nbytes: int) -> tuple[mmap.mmap, int]:
        """Map a piece of the data copy-on-write: writes into it stay in this process.

        A page shows what the pool holds until it is written to here, so a lease on the piece must be held for as long
        as the returned object lives. It survives `close` and the owner's end. Costs microseconds and, before Python
        3.13, one file descriptor while it lives.

        Args:
            offset: Where the piece starts in the data, in bytes.
            nbytes: Its size in bytes, above 0.

        Returns:
            The mapping, which starts at the page that holds ``offset``, and the position of ``offset`` in it.

        Raises:
            InvalidInputError: The piece isn't inside the data.
            CacheClosedError: After `close`, or in a forked child.
            OSError: No memory map or file descriptor is left; nothing has changed.
        """
        if offset < 0 or nbytes <= 0 or offset + nbytes > self.data_bytes:
            raise InvalidInputError(
                f"offset is {offset} and nbytes {nbytes}, expected a piece of the pool's {self.data_bytes} bytes"
            )
        start = HEADER_BYTES + offset
        position = start % mmap.ALLOCATIONGRANULARITY
        self._usable_map()
        if not spare_maps():
            raise OSError(errno.EMFILE, "results hold half of this process's file descriptors")
        with self._lock:  # or close() could let the number of the file descriptor go to another file in between
            self._usable_map()
            return map_file(self._fd, position + nbytes, mmap.MAP_PRIVATE, start - position), position


def _populate(of: "weakref.ref[PoolMapping]") -> None:
    start: int | None = 0
    pause_s = _POPULATE_POLL_S
    while start is not None and (mapping := of()) is not None:
        try:
            following = mapping._populate_piece(start)
        except (OSError, PoolError) as error:
            logger.debug("the page tables of a pool could not be filled: %s", error)
            return
        del mapping
        if following == start:  # not all of the pool has memory yet
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_POLL_S)
        else:  # others want the processor and the locks of the address space, too
            time.sleep(_POPULATE_PAUSE_S)
        start = following


def _unlock(page_lock: PageLock, pid: int) -> None:
    if os.getpid() == pid:  # a forked child has no CUDA context
        page_lock.unlock()


def _require_linux() -> None:
    if sys.platform != "linux":
        raise PoolError(f"the shared memory pool needs Linux (memfd and /proc), this system is {sys.platform!r}")
