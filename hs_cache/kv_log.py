"""What a KV actor takes back, where the `HiddenStateActor` of its node sees it without a call.

A KV actor that says of a chunk that its KV is present says so up to a *position* in its `RetractionLog`. As long as the
chunk is not in the log behind that position, and the actor's process runs, this is what it would say again. So nobody
has to ask it again, which would cost a second actor call in every retrieve.

The log is a ring of names in an anonymous file, opened through ``/proc/<pid>/fd/<n>`` as a pool is. A reader that is so
far behind that entries were overwritten takes everything as taken back; the same is how a writer takes back everything.

Layout behind the `hs_cache.pool_file.PoolHeader`: a uint64, the number of names ever taken back, in the byte order of
the machine; 56 bytes unused; then ``2 * CAPACITY`` names of 16 bytes, number n at index ``n % (2 * CAPACITY)``. What a
reader may be behind is half of the ring, and what is written at a time no more than the other half, so that nothing is
read while it is overwritten.
"""

import mmap
import os
import secrets
import threading
import weakref
from collections.abc import Sequence
from typing import NamedTuple

from hs_cache.errors import PoolError
from hs_cache.keys import KEY_BYTES
from hs_cache.machine import process_alive, process_running, process_start_time
from hs_cache.messages import PoolAddress
from hs_cache.pool_file import HEADER_BYTES, INCARNATION_BYTES, PoolHeader, create_memfd, map_file, open_memfd

CAPACITY = 8192
"""Names that a reader may be behind."""

_POSITION_BYTES = 64
_SLOTS = 2 * CAPACITY
_DATA_BYTES = _POSITION_BYTES + _SLOTS * KEY_BYTES
_MAGIC = b"HSKVLOG\0"


class Mark(NamedTuple):
    """A position in the log of one KV actor, which `token` names: 16 random bytes."""

    token: bytes
    position: int


class _Ring:
    """The mapped file, of the writer and of readers alike."""

    def __init__(self, fd: int) -> None:
        mapped = map_file(fd, HEADER_BYTES + _DATA_BYTES, mmap.MAP_SHARED)
        view = memoryview(mapped)[HEADER_BYTES:]
        self._position = view[:8].cast("@Q")  # read and written in one piece
        self._names = view[_POSITION_BYTES:]
        self._fence = threading.Lock()

    @property
    def position(self) -> int:
        """How many names have been taken back."""
        position = self._position[0]
        self._order()
        return position

    def since(self, position: int) -> set[bytes] | None:
        """The names taken back from there on; None where some of them are overwritten, or were never named."""
        end = self.position
        if not 0 <= end - position <= CAPACITY:
            return None
        names = {self._name(number) for number in range(position, end)}
        self._order()
        return names if self.position - position <= CAPACITY else None

    def append(self, names: Sequence[bytes]) -> None:
        """By the one writer: first the names, then the position that says so."""
        position = self._position[0]
        for number, name in enumerate(names, position):
            start = number % _SLOTS * KEY_BYTES
            self._names[start : start + KEY_BYTES] = name
        self.advance(len(names))

    def advance(self, count: int) -> None:
        """Only the position."""
        self._order()
        self._position[0] += count
        self._order()

    def _name(self, number: int) -> bytes:
        start = number % _SLOTS * KEY_BYTES
        return bytes(self._names[start : start + KEY_BYTES])

    def _order(self) -> None:
        """Reads and writes before this come before those behind it also for other processors: a lock's do."""
        with self._fence:
            pass


class RetractionLog:
    """The KV actor's side. Thread-safe. Linux only; the kernel frees the file with the process.

    Raises:
        OSError: there is no file descriptor or memory left.
    """

    def __init__(self) -> None:
        self.token = secrets.token_bytes(INCARNATION_BYTES)
        fd = create_memfd("hs_cache-kv", PoolHeader(self.token, _DATA_BYTES, magic=_MAGIC))
        weakref.finalize(self, os.close, fd).atexit = False
        self._ring = _Ring(fd)
        self._lock = threading.Lock()
        self.address = PoolAddress(os.getpid(), process_start_time(os.getpid()) or 0, fd, self.token, _DATA_BYTES)

    def mark(self) -> Mark:
        """Where it is now: to be taken down before presence is looked up that is to hold from here on."""
        return Mark(self.token, self._ring.position)

    def retract(self, names: Sequence[bytes]) -> None:
        """These may not be present any more. Call it after they are recorded as such, and before anyone is told so."""
        with self._lock:
            if len(names) <= CAPACITY:
                self._ring.append(names)
            else:
                self._ring.advance(CAPACITY + 1)

    def retract_all(self) -> None:
        """Nothing may be present any more."""
        with self._lock:
            self._ring.advance(CAPACITY + 1)

    def since(self, mark: Mark) -> set[bytes] | None:
        """The names taken back since a mark of this log; None if these may be any."""
        return self._ring.since(mark.position) if mark.token == self.token else None


class RetractionView:
    """A log of another process of this node.

    Raises:
        PoolError: it can't be opened from here, or what is there is something else.
    """

    def __init__(self, address: PoolAddress) -> None:
        fd = open_memfd(address, PoolHeader(address.incarnation, _DATA_BYTES, magic=_MAGIC))
        try:
            self._ring = _Ring(fd)
        except OSError as error:
            raise PoolError(f"cannot map the log of process {address.pid}: {error}") from error
        finally:
            os.close(fd)
        self._address = address
        self.token = address.incarnation

    @property
    def position(self) -> int:
        """How many names have been taken back."""
        return self._ring.position

    def ended(self) -> bool:
        """Whether its owner is gone."""
        return not process_alive(self._address.pid, self._address.start_time)

    def runs(self) -> bool:
        """Whether its owner runs: one that has ended or is stopped takes nothing back. Costs some 20 µs."""
        return process_running(self._address.pid, self._address.start_time)

    def since(self, position: int) -> set[bytes] | None:
        """The names taken back from a position on; None if these may be any."""
        return self._ring.since(position)


class ConfirmedKV:
    """The chunks of which it is known without asking that their KV is present. Thread-safe; nothing blocks.

    Args:
        capacity: most names remembered; beyond, all are forgotten and asked for again.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._lock = threading.Lock()
        self._view: RetractionView | None = None
        self._position = 0
        self._names: set[bytes] = set()

    @property
    def followed(self) -> bool:
        """Whether there is a log, and its owner has not ended."""
        view = self._view
        return view is not None and not view.ended()

    def follow(self, view: RetractionView) -> None:
        """Follow the log of another KV actor. What the one before said is of no account any more."""
        with self._lock:
            self._view, self._position = view, view.position
            self._names.clear()

    def mark(self) -> Mark | None:
        """Where the log is now; None where none can be relied on."""
        with self._lock:
            return Mark(self._view.token, self._position) if self._view is not None and self._caught_up() else None

    def has(self, names: Sequence[bytes]) -> bool:
        """Whether all of them are present, at a moment within this call."""
        with self._lock:
            return self._caught_up() and self._names.issuperset(names)

    def confirm(self, names: Sequence[bytes], mark: Mark) -> None:
        """These were present when their log was at `mark`."""
        with self._lock:
            if self._view is None or self._view.token != mark.token or not self._caught_up():
                return
            gone = self._view.since(mark.position)
            if gone is None:
                return
            if len(self._names) + len(names) > self._capacity:
                self._names.clear()
            self._names.update(name for name in names if name not in gone)

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
                self._names -= gone
            self._position = position
        return True
