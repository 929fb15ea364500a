"""The file behind a pool: its header, how it is made and checked, and how it is mapped.

No mapping is inherited by a forked child. A copy-on-write page that was not touched yet shows the file, so the child
would go on reading it after the parent's lease has ended; a crash is better than the rows of another prompt.
"""

import ctypes
import errno
import mmap
import os
import stat
import struct
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from hs_cache.errors import PoolError
from hs_cache.messages import PoolAddress

if sys.platform == "linux":
    import fcntl
    import resource

HEADER_BYTES = 4096
INCARNATION_BYTES = 16

_MADV_POPULATE_WRITE = 23  # Linux 5.14, include/uapi/asm-generic/mman-common.h; Python's mmap module has no name for it
_libc = ctypes.CDLL(None, use_errno=True)
_HEADER = struct.Struct(f"<8sII{INCARNATION_BYTES}sQ")


class PoolHeader(NamedTuple):
    """The first bytes of a pool's file, little-endian without padding; zeros fill up to ``header_bytes``.

    Attributes:
        incarnation: The pool's random token, 16 bytes.
        data_bytes: Size of the data, uint64.
        magic: 8 bytes that say what this is.
        version: Of this layout, uint32.
        header_bytes: Where the data starts, uint32.
    """

    incarnation: bytes
    data_bytes: int
    magic: bytes = b"HSCACHE\0"
    version: int = 1
    header_bytes: int = HEADER_BYTES

    def pack(self) -> bytes:
        """The bytes as they stand in the file, in the order magic, version, header_bytes, incarnation, data_bytes."""
        return _HEADER.pack(self.magic, self.version, self.header_bytes, self.incarnation, self.data_bytes)


def create_memfd(name: str, header: PoolHeader) -> int:
    """A new file of the pool's full size, for this user only, that can't change its size; nothing is allocated yet.

    Args:
        name: Shown by the kernel in ``/proc/<pid>/maps``.
        header: What it starts with.

    Returns:
        Its file descriptor, which a program that this process executes doesn't inherit.

    Raises:
        OSError: The system refuses.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with closed_unless_kept(fd):
        os.fchmod(fd, stat.S_IRUSR | stat.S_IWUSR)
        os.ftruncate(fd, header.header_bytes + header.data_bytes)
        os.pwrite(fd, header.pack(), 0)
        # A file that cannot shrink cannot end anyone who maps it with SIGBUS.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return fd


def open_memfd(address: PoolAddress, header: PoolHeader, mode: int = os.O_RDWR) -> int:
    """Open the file that another process made with ``header``, after making sure that it is that one.

    Never blocks on what it finds instead, and leaves it unchanged.

    Args:
        address: Where it is.
        header: What it starts with.
        mode: ``os.O_RDWR`` or ``os.O_RDONLY``.

    Returns:
        A file descriptor.

    Raises:
        PoolError: It can't be opened from here, or what is there is something else. The message gives the reason.
    """
    with opening(address):
        path = f"/proc/{address.pid}/fd/{address.fd}"
        target = os.readlink(path)  # opening a device or a FIFO has effects, so look first
        if not target.startswith("/memfd:"):
            raise PoolError(f"{path} is {target!r}, expected a pool's memfd")
        fd = os.open(path, mode | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        with closed_unless_kept(fd):
            _verify_memfd(fd, path, header)
    return fd


@contextmanager
def opening(address: PoolAddress) -> Iterator[None]:
    """What the system refuses meanwhile is a `PoolError`."""
    try:
        yield
    except OSError as error:
        raise PoolError(f"cannot open the pool of process {address.pid}: {error}") from error


@contextmanager
def closed_unless_kept(fd: int) -> Iterator[None]:
    """Close a file descriptor when something is raised."""
    try:
        yield
    except BaseException:
        os.close(fd)
        raise


def _verify_memfd(fd: int, path: str, header: PoolHeader) -> None:
    status = os.fstat(fd)
    size = header.header_bytes + header.data_bytes
    if not stat.S_ISREG(status.st_mode) or status.st_size != size:
        raise PoolError(f"{path} has {status.st_size} bytes, expected a pool's memfd of {size}")
    if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise PoolError(f"{path} is a file that can shrink, expected a pool's sealed memfd")
    if len(header.incarnation) != INCARNATION_BYTES or os.pread(fd, _HEADER.size, 0) != header.pack():
        raise PoolError(f"{path} is not the pool {header.incarnation.hex()}: its header is another's")


_live_maps: "weakref.WeakSet[mmap.mmap]" = weakref.WeakSet()


def _keep_maps_in_child() -> None:
    # The child has holes where the maps were, and new allocations fill them. A map that is collected in the child would
    # unmap what lies there by then, so none ever is.
    for each in _live_maps:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))


if sys.platform == "linux":
    os.register_at_fork(after_in_child=_keep_maps_in_child)


def spare_maps() -> bool:
    """Whether results may still be mapped: each takes a file descriptor before Python 3.13, and half are the user's."""
    if sys.version_info >= (3, 13):
        return True
    return len(_live_maps) < resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2


def map_file(
    fd: int, length: int, flags: int, offset: int = 0, prot: int = mmap.PROT_READ | mmap.PROT_WRITE
) -> mmap.mmap:
    """Map a piece of a file, and not in a child that this process forks.

    Args:
        fd: The file; it may be closed afterwards.
        length: Bytes to map.
        flags: ``mmap.MAP_SHARED`` or ``mmap.MAP_PRIVATE``.
        offset: Where the piece starts, a multiple of ``mmap.ALLOCATIONGRANULARITY``.
        prot: Whether it can be read and written.

    Raises:
        OSError: No memory map or file descriptor is left.
    """
    if sys.version_info >= (3, 13):
        mapped = mmap.mmap(fd, length, flags, prot, offset=offset, trackfd=False)
    else:  # holds a duplicate of fd for as long as it lives
        mapped = mmap.mmap(fd, length, flags, prot, offset=offset)
    mapped.madvise(mmap.MADV_DONTFORK)
    _live_maps.add(mapped)
    return mapped


def address_of(mapped: mmap.mmap) -> int:
    """Where a mapping starts in this process's memory."""
    return ctypes.addressof(ctypes.c_char.from_buffer(mapped))


def populate(mapped: mmap.mmap, start: int, nbytes: int) -> bool:
    """Put memory behind a piece of a mapping and fill its page tables. Blocks, without the interpreter lock.

    Args:
        mapped: The mapping.
        start: Where the piece starts in it, in bytes; a multiple of the page size.
        nbytes: Size of the piece.

    Returns:
        False where the kernel can't do that (before Linux 5.14), and nothing was done.

    Raises:
        OSError: There isn't the memory.
    """
    # Through ctypes because mmap.madvise keeps the interpreter lock. It writes no data, so clients may write meanwhile.
    address = ctypes.c_void_p(address_of(mapped) + start)
    if not _libc.madvise(address, ctypes.c_size_t(nbytes), _MADV_POPULATE_WRITE):
        return True
    if ctypes.get_errno() != errno.EINVAL:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return False
