"""What a KV actor takes back, where the `HiddenStateActor` of its node sees it without a call.

A KV actor that says of a chunk that its KV is present says so up to a *position* in its `RetractionLog`. As long as the
chunk is not in the log behind that position, and the actor's process runs, this is what it would say again. So nobody
has to ask it again, which would cost a second actor call in every retrieve.

The log is a ring of names in an anonymous file, opened through ``/proc/<pid>/fd/<n>`` as a pool is. A reader that is so
far behind that entries may be overwritten takes everything as taken back; the same is how a writer takes back more than
a reader may be behind.

Layout behind the `hs_cache.pool_file.PoolHeader`: a uint64 in the byte order of the machine, the position; 56 bytes
unused; then ``2 * CAPACITY`` names of 16 bytes, of which number n is at index ``n % (2 * CAPACITY)``. A reader may be
behind by half of the ring, and the other half is the most that is written before the position says so. So what it reads
can't be overwritten without the position showing it afterwards.
"""

import mmap
import os
import secrets
import threading
import weakref
from collections.abc import Collection, Sequence
from itertools import islice
from typing import NamedTuple

from hs_cache.errors import PoolError
from hs_cache.keys import KEY_BYTES
from hs_cache.machine import process_alive, process_running, process_start_time
from hs_cache.messages import PoolAddress, split_keys
from hs_cache.pool_file import HEADER_BYTES, INCARNATION_BYTES, PoolHeader, create_memfd, map_file, open_memfd

CAPACITY = 8192
"""Names that a reader may be behind."""

_SLOTS = 2 * CAPACITY
_POSITION_BYTES = 64
_DATA_BYTES = _POSITION_BYTES + _SLOTS * KEY_BYTES
_MAGIC = b"HSKVLOG\0"


class Mark(NamedTuple):
    """A position in the log of one KV actor, which `token` names: 16 random bytes."""

    token: bytes
    position: int


class _Ring:
    """The mapped file, of the writer and of readers alike."""

    def __init__(self, fd: int, prot: int) -> None:
        mapped = map_file(fd, HEADER_BYTES + _DATA_BYTES, mmap.MAP_SHARED, prot=prot)
        view = memoryview(mapped)[HEADER_BYTES:]
        self._position = view[:8].cast("@Q")  # read and written in one piece
        self._names = view[_POSITION_BYTES:]
        self._fence = threading.Lock()

    @property
    def position(self) -> int:
        """Where the next name goes, and nothing read afterwards is older than this."""
        position = self._position[0]
        self._order()
        return position

    def since(self, position: int) -> set[bytes] | None:
        """The names taken back from there on; None where these may be any."""
        end = self.position
        if not 0 <= end - position <= CAPACITY:
            return None
        first, last = position % _SLOTS * KEY_BYTES, end % _SLOTS * KEY_BYTES
        blob = self._names[first:last] if first <= last else b"".join((self._names[first:], self._names[:last]))
        names = set(split_keys(bytes(blob)))
        self._order()
        return names if self.position - position <= CAPACITY else None

    def append(self, names: Sequence[bytes]) -> None:
        """By the one writer: first the names, then the position that says so."""
        for number, name in enumerate(names, self._position[0]):
            start = number % _SLOTS * KEY_BYTES
            self._names[start : start + KEY_BYTES] = name
        self.advance(len(names))

    def advance(self, count: int) -> None:
        """Only the position."""
        self._order()
        self._position[0] += count
        self._order()

    def _order(self) -> None:
        """Reads and writes before this come before those behind it, also for other processors.

        Nothing moves up over the end of a critical section that began before the start of the next one.
        """
        for _ in range(2):
            self._fence.acquire()
            self._fence.release()


class RetractionLog:
    """The KV actor's side. Thread-safe. Linux only; the kernel frees the file with the process.

    Raises:
        OSError: there is no file descriptor or memory left.
    """

    def __init__(self) -> None:
        self.token = secrets.token_bytes(INCARNATION_BYTES)
        fd = create_memfd("hs_cache-kv", PoolHeader(self.token, _DATA_BYTES, magic=_MAGIC))
        weakref.finalize(self, os.close, fd).atexit = False
        self._ring = _Ring(fd, mmap.PROT_READ | mmap.PROT_WRITE)
        self._lock = threading.Lock()
        self.address = PoolAddress(os.getpid(), process_start_time(os.getpid()) or 0, fd, self.token, _DATA_BYTES)

    def mark(self) -> Mark:
        """Where it is now: to be taken down before presence is looked up that is to hold from here on."""
        return Mark(self.token, self._ring.position)

    def retract(self, names: Collection[bytes]) -> int:
        """These may not be present any more. Call it after they are recorded as such, and before anyone is told so.

        Returns:
            The position of the first of them: they were taken back after every mark up to that, and before later ones.
        """
        if len(names) > CAPACITY:
            return self.retract_all()
        with self._lock:
            position = self._ring.position
            self._ring.append(list(names))
            return position

    def retract_all(self) -> int:
        """As `retract`, of all chunks, also those of which nobody here has heard yet."""
        with self._lock:
            position = self._ring.position
            self._ring.advance(CAPACITY + 1)
            return position


class RetractionView:
    """A log of another process of this node.

    Raises:
        PoolError: it can't be opened from here, or what is there is something else.
    """

    def __init__(self, address: PoolAddress) -> None:
        header = PoolHeader(address.incarnation, _DATA_BYTES, magic=_MAGIC)
        fd = open_memfd(address, header, os.O_RDONLY)
        try:
            self._ring = _Ring(fd, mmap.PROT_READ)
        except OSError as error:
            raise PoolError(f"cannot map the log of process {address.pid}: {error}") from error
        finally:
            os.close(fd)
        self._address = address
        self.token = address.incarnation

    @property
    def position(self) -> int:
        """Where it is now."""
        return self._ring.position

    def runs(self) -> bool:
        """Whether its owner surely runs: one that has ended or is stopped takes nothing back. Some 10 µs."""
        try:
            return process_running(self._address.pid, self._address.start_time)
        except OSError:  # out of file descriptors, say
            return False

    def ended(self) -> bool:
        """Whether its owner is surely gone."""
        try:
            return not process_alive(self._address.pid, self._address.start_time)
        except OSError:
            return False

    def since(self, position: int) -> set[bytes] | None:
        """The names taken back from a position on; None if these may be any."""
        return self._ring.since(position)


class ConfirmedKV:
    """The chunks of which it is known without asking that their KV is present. Thread-safe; nothing blocks or raises.

    Args:
        capacity: most names remembered; beyond, those confirmed first are asked for again.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._lock = threading.Lock()
        self._view: RetractionView | None = None
        self._position = 0
        self._names: dict[bytes, None] = {}

    @property
    def token(self) -> bytes:
        """Whose log is followed; ``b""`` for none."""
        view = self._view
        return view.token if view is not None else b""

    def follows(self) -> bool:
        """Whether there is a log, of a process that may go on with it."""
        view = self._view
        return view is not None and not view.ended()

    def follow(self, view: RetractionView | None) -> None:
        """Follow this log, or none. What was known by another one is of no account any more."""
        with self._lock:
            self._view, self._position = view, view.position if view is not None else 0
            self._names.clear()

    def mark(self) -> Mark | None:
        """Where the log is now; None where none can be relied on."""
        with self._lock:
            return Mark(self._view.token, self._position) if self._view is not None and self._caught_up() else None

    def has(self, names: Sequence[bytes]) -> bool:
        """Whether all of them are present, at a moment within this call."""
        with self._lock:
            return self._caught_up() and all(map(self._names.__contains__, names))

    def confirm(self, names: Sequence[bytes], mark: Mark) -> None:
        """These were present when their log was at `mark`."""
        with self._lock:
            if self._view is None or self._view.token != mark.token or not self._caught_up():
                return
            gone = self._view.since(mark.position)
            if gone is None:
                return
            self._names |= dict.fromkeys(name for name in names if name not in gone)
            if (excess := len(self._names) - self._capacity) > 0:
                for name in list(islice(self._names, excess)):
                    del self._names[name]

    def _caught_up(self) -> bool:
        """Take in what was taken back; whether there is somebody who could."""
        view = self._view
        if view is None or not view.runs():
            return False
        position = view.position
        if position != self._position:
            gone = view.since(self._position)
            if gone is None:
                self._names.clear()
            else:
                for name in gone:
                    self._names.pop(name, None)
            self._position = position
        return True
