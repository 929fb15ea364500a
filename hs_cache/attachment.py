"""How a client is attached to the node that serves it: to one incarnation of its actor, and to its pool."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from hs_cache.config import CacheConfig
from hs_cache.control import StoreControl
from hs_cache.effects import Budget, Call, Locate, Located, Steps
from hs_cache.errors import CacheClosedError, PoolError, ServiceError, ServiceTimeoutError
from hs_cache.leases import ClientProcess
from hs_cache.machine import process_alive
from hs_cache.messages import AttachReply, ClientInfo
from hs_cache.shared_pool import PoolMapping
from hs_cache.troubles import Suspects

logger = logging.getLogger(__name__)

_LOOK_AGAIN_S = 5.0


@dataclass(frozen=True)
class Link:
    """An attachment to one incarnation of one node's actor.

    Attributes:
        control: what is asked of its store.
        mapping: of its pool; None where that can't be opened, for the reason `not_shared`.
        look_again_at: when, in seconds of the monotonic clock, a link without a mapping is to be made anew: a better
            one may be possible then.
    """

    located: Located
    incarnation: bytes
    control: StoreControl
    mapping: PoolMapping | None
    look_again_at: float
    not_shared: str = ""

    @property
    def is_final(self) -> bool:
        """Whether there is no better one."""
        return self.mapping is not None

    @property
    def local(self) -> bool:
        """Whether the client is on that node."""
        return self.located.peer.node_id == self.located.client_node_id


class Attachment:
    """One client's link, made when it is needed and there is none. Thread-safe.

    Args:
        suspects: nodes to be served by only where there is no other; those that don't let the client attach are added.

    Attributes:
        link: the link, None where there is none now.
        closed: whether there will be none any more.
    """

    def __init__(self, suspects: Suspects) -> None:
        self._suspects = suspects
        self._lock = threading.Lock()
        self.link: Link | None = None
        self.closed = False

    def attach(self, process: ClientProcess, budget: Budget, take: Callable[[CacheConfig], None]) -> Steps[Link]:
        """Decide for a node and attach to it; `take` gets the service's settings, and may refuse them.

        Raises:
            CacheClosedError: it was closed meanwhile.
            ServiceError: no node can be reached.
        """
        located: Located = yield Locate(budget.left_s, self._suspects.names())
        info = ClientInfo(process.client_id, process.pid, process.start_time, located.client_node_id)
        try:
            reply: AttachReply = yield Call(located.peer, "attach", (info,), budget.left_s)
        except ServiceError:
            self._suspects.add(located.peer.node_id)
            raise
        with self._lock:
            if self.closed:
                raise CacheClosedError("the cache was closed meanwhile")
            take(CacheConfig(**reply.config))
            if self.link is None or self.link.incarnation != reply.incarnation or not self.link.is_final:
                self.link = self._link(process, located, reply)
            return self.link

    def fail(self, link: Link, error: ServiceError) -> None:
        """Take in that a call over `link` failed: attach anew, where that may help.

        A node that is only late keeps its own clients: nobody else can share rows with them. Others are served
        elsewhere.
        """
        if not link.local:
            self._suspects.add(link.located.peer.node_id)
        if not (link.local and isinstance(error, ServiceTimeoutError)):
            self.drop(link.incarnation)

    def drop(self, incarnation: bytes) -> None:
        """Forget the link to a pool. Its mapping ends with the last operation that uses it; results have their own."""
        with self._lock:
            if self.link is not None and self.link.incarnation == incarnation:
                self.link = None

    def close(self) -> None:
        """No more links; idempotent."""
        with self._lock:
            self.closed, self.link = True, None

    def _link(self, process: ClientProcess, located: Located, reply: AttachReply) -> Link:
        mapping, reason, look_again_at = None, reply.reason, time.monotonic() + _LOOK_AGAIN_S
        if reply.address is not None:
            try:
                mapping = PoolMapping.open(reply.address)
            except PoolError as error:
                reason = str(error)
                if not process_alive(reply.address.pid, reply.address.start_time):  # it has ended since it answered
                    look_again_at = 0.0
        control = StoreControl(located.peer, reply.incarnation, process.releaser)
        link = Link(located, reply.incarnation, control, mapping, look_again_at, reason)
        process.releaser.start()
        if mapping is not None:
            assert reply.address is not None
            send = partial(located.peer.post, "release", reply.incarnation, process.client_id)
            process.releaser.connect(reply.incarnation, send, reply.address, self)
        elif self.link is None or self.link.incarnation != reply.incarnation:
            level = logging.WARNING if link.local else logging.INFO
            logger.log(level, "rows go through the object store, the pool is not shared: %s", reason)
        return link
