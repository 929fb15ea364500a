"""The client's end of leases: who this process is, and how ended leases find their way back to the node.

A lease over pool memory lives exactly as long as the mappings made for it, and the copies to a device that read it.
Python may collect a mapping at any moment, also inside this package's own locks, so its finalizer only puts the lease
on a `queue.SimpleQueue`, which is made for that; a thread, and every request to the node, carry what is in there to the
node. The same thread looks after copies.
"""

import itertools
import logging
import mmap
import os
import secrets
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeAlias

from hs_cache.devices import Fence
from hs_cache.errors import ServiceError
from hs_cache.machine import own_start_time, process_alive
from hs_cache.messages import PoolAddress

logger = logging.getLogger(__name__)

_FLUSH_PERIOD_S = 0.05
_OWNER_PERIOD_S = 1.0
_COPY_PERIOD_S = 0.002
_MAX_GIVEN_UP = 1024

Lease: TypeAlias = tuple[bytes, int]
"""The incarnation of a pool, and the id of a hold on it."""

Sender = Callable[[Sequence[int]], None]
"""Hands ended ids to a node without waiting; `ServiceError` when that can't be done now."""


class Attached(Protocol):
    """A client of this process that maps a pool."""

    def drop(self, incarnation: bytes) -> None:
        """The owner of that pool is gone: let go of it."""
        ...


@dataclass(frozen=True, slots=True)
class _Copying:
    """Copies that read leased memory, and what must stay for as long as they do."""

    lease: Lease
    fence: Fence
    keep: Any


@dataclass(frozen=True, slots=True)
class _Post:
    """Something to be sent, and the id that is given up with it."""

    send: Callable[[], None]
    given_up: Lease | None


class ClientProcess:
    """This process as nodes know it, and its ids; `this_process` gives the one, a forked child another."""

    def __init__(self) -> None:
        self.client_id = secrets.token_bytes(16)
        self.pid = os.getpid()
        self.start_time = own_start_time()
        self.releaser = Releaser()
        self._ids = itertools.count()

    def next_id(self) -> int:
        """A hold id that was never used before by this process."""
        return next(self._ids)


class Releaser:
    """Collects ended ids per pool incarnation and hands them over, soon or with the next request; thread-safe."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._ends: SimpleQueue[Lease | _Copying | _Post] = SimpleQueue()
        self._lock = threading.Lock()
        self._parts: dict[Lease, int] = {}  # per lease: mappings alive, and copies under way
        self._copying: list[_Copying] = []
        self._posts: list[Callable[[], None]] = []
        self._given_up: OrderedDict[Lease, None] = OrderedDict()
        self._ended: dict[bytes, list[int]] = {}
        self._senders: dict[bytes, Sender] = {}
        self._owners: dict[bytes, tuple[PoolAddress, weakref.WeakSet[Attached]]] = {}
        self._thread: threading.Thread | None = None

    def connect(self, incarnation: bytes, sender: Sender, address: PoolAddress, client: Attached) -> None:
        """From now on, ids of this incarnation go to `sender`; those of others are of no interest to anyone.

        When the owner at `address` is gone, each client that was connected and still exists is told; none is kept
        alive.
        """
        with self._lock:
            self._senders[incarnation] = sender
            _, clients = self._owners.setdefault(incarnation, (address, weakref.WeakSet()))
            clients.add(client)
        self.start()

    def start(self) -> None:
        """Have what has ended handed over by a thread; idempotent."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="hs_cache-releaser", daemon=True)
                self._thread.start()

    def watch(self, incarnation: bytes, hold_id: int, mappings: Sequence[mmap.mmap], more: int = 0) -> None:
        """End the lease when the last of its mappings is collected, and was ended `more` times besides; not at exit,
        and not in a forked child."""
        with self._lock:
            self._parts[incarnation, hold_id] = len(mappings) + more
        for mapping in mappings:
            finalizer = weakref.finalize(mapping, _collect, self._pid, self._ends, (incarnation, hold_id))
            finalizer.atexit = False

    def end(self, incarnation: bytes, ids: Iterable[int]) -> None:
        """End ids over which no mapping stands. Takes no lock: an operation may be collected inside of one of ours."""
        for hold_id in ids:
            self._ends.put((incarnation, hold_id))

    def end_after(self, fence: Fence, incarnation: bytes, hold_id: int, keep: Any) -> None:
        """`end` a lease once the copies behind `fence` have ended; keeps `keep` until then. Takes no lock, either."""
        self._ends.put(_Copying((incarnation, hold_id), fence, keep))

    def post(self, send: Callable[[], None], given_up: Lease | None = None) -> None:
        """Have something sent, without waiting for it, after what was posted before; `send` may raise `ServiceError`,
        and nobody is told. Takes no lock, either.

        Args:
            given_up: an id that `send` releases. It also goes with every request until one has been answered: calls
                that carry rows overtake others on their way and in the actor.
        """
        self._ends.put(_Post(send, given_up))

    def take(self, incarnation: bytes) -> tuple[int, ...]:
        """What has ended so far, for a request that carries it along; `end` it again if the request fails, else it is
        `taken`."""
        with self._lock:
            self._gather()
            given_up = [hold_id for of, hold_id in self._given_up if of == incarnation]
            return (*self._ended.pop(incarnation, ()), *given_up)

    def taken(self, incarnation: bytes, ids: Iterable[int]) -> None:
        """A request that carried these along has been answered."""
        with self._lock:
            for hold_id in ids:
                self._given_up.pop((incarnation, hold_id), None)

    def flush(self) -> None:
        """Hand over what has ended. What can't be handed over now goes with the next request to that pool's owner."""
        with self._lock:
            self._gather()
            posts, self._posts = self._posts, []
            batches = [
                (key, self._senders[key], self._ended.pop(key)) for key in list(self._ended) if key in self._senders
            ]
        for send in posts:
            try:
                send()
            except ServiceError as error:
                logger.debug("what was given up could not be told: %s", error)
        for incarnation, sender, ids in batches:
            try:
                sender(ids)
            except ServiceError as error:
                logger.debug("ended leases could not be handed over yet: %s", error)
                with self._lock:
                    self._ended.setdefault(incarnation, []).extend(ids)

    def _gather(self) -> None:
        with suppress(Empty):
            while True:
                self._note(self._ends.get_nowait())
        copying, self._copying = self._copying, []
        for copy in copying:
            self._note(copy.lease if copy.fence.ended() else copy)

    def _note(self, lease: Lease | _Copying | _Post) -> None:
        if isinstance(lease, _Copying):
            self._copying.append(lease)
            return
        if isinstance(lease, _Post):
            self._posts.append(lease.send)
            if lease.given_up is not None:
                self._given_up[lease.given_up] = None
            if len(self._given_up) > _MAX_GIVEN_UP:
                self._given_up.popitem(last=False)
            return
        parts = self._parts.pop(lease, 1) - 1
        if parts:
            self._parts[lease] = parts
        elif lease[0] in self._senders:
            self._ended.setdefault(lease[0], []).append(lease[1])

    def _run(self) -> None:
        look_at = time.monotonic() + _OWNER_PERIOD_S
        while True:
            period_s = _COPY_PERIOD_S if self._copying else _OWNER_PERIOD_S
            with suppress(Empty):
                lease = self._ends.get(timeout=min(max(look_at - time.monotonic(), 0.0), period_s))
                with self._lock:
                    self._note(lease)
                del lease  # or what it keeps would stay until the next one comes
                time.sleep(_FLUSH_PERIOD_S)  # what ends at about the same time goes in one call
                self.flush()
            if self._copying or self._posts:  # a request may have gathered what it doesn't carry
                self.flush()
            if time.monotonic() >= look_at:
                self._look_after_owners()
                look_at = time.monotonic() + _OWNER_PERIOD_S

    def _look_after_owners(self) -> None:
        """Let go of the pools whose owners are gone: until every process has, their memory is not free."""
        with self._lock:
            owners = list(self._owners.items())
        for incarnation, (address, clients) in owners:
            try:
                if process_alive(address.pid, address.start_time):
                    continue
            except OSError as error:  # out of file descriptors, say: nobody counts as gone because of that
                logger.debug("the owner of a pool could not be looked after: %s", error)
                continue
            with self._lock:
                del self._owners[incarnation]
                self._senders.pop(incarnation, None)
                self._ended.pop(incarnation, None)
            for client in clients:
                client.drop(incarnation)


def _collect(pid: int, ends: "SimpleQueue[Lease | _Copying | _Post]", lease: Lease) -> None:
    if os.getpid() == pid:
        ends.put(lease)


_this_process: ClientProcess | None = None
_inherited: list[ClientProcess | None] = []
_this_process_lock = threading.Lock()


def this_process() -> ClientProcess:
    """The identity of the calling process; made at the first call, and anew in a forked child."""
    global _this_process  # noqa: PLW0603
    with _this_process_lock:
        if _this_process is None:
            _this_process = ClientProcess()
        return _this_process


def _forget_parent() -> None:
    global _this_process, _this_process_lock
    _inherited.append(_this_process)  # it may hold events of a CUDA context, which a child must not even destroy
    _this_process, _this_process_lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget_parent)
