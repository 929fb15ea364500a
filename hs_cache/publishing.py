"""Tells the controller which chunks a node has: numbered batches, soon after each change; all when one got lost."""

import logging
import threading
from collections.abc import Callable

from hs_cache.errors import HiddenStateCacheError
from hs_cache.messages import LocationBatch, PublishReply
from hs_cache.store import HiddenStateStore

logger = logging.getLogger(__name__)

_GATHER_S = 0.003
"""How long changes are gathered into one batch."""

_ALONE_GATHER_S = 0.02
"""How long where there is no other node: only `locate` asks for them then."""

_HEARTBEAT_S = 1.0
_RETRY_S = 0.5


class Publisher:
    """One node's sender, and the only one: `step` in a loop, on one thread.

    Args:
        store: whose chunks are published.
        node_id: hex id of the node.
        incarnation: of its pool.
        send: hands a batch to the controller and returns its reply; raises when it can't be reached in time.
        heard: called with every reply.
    """

    def __init__(
        self,
        store: HiddenStateStore,
        *,
        node_id: str,
        incarnation: bytes,
        send: Callable[[LocationBatch], PublishReply],
        heard: Callable[[PublishReply], None],
    ) -> None:
        self._store = store
        self._node_id = node_id
        self._incarnation = incarnation
        self._send = send
        self._heard = heard
        self._number = 0
        self._whole = True
        self._alone = False
        self._in_trouble = False

    def run(self, stop: threading.Event) -> None:
        """Publish until `stop` is set."""
        while not stop.is_set():
            if not self._whole and self._store.changed.wait(_HEARTBEAT_S):
                stop.wait(_ALONE_GATHER_S if self._alone else _GATHER_S)
            if not self.step():
                stop.wait(_RETRY_S)

    def step(self) -> bool:
        """Send one batch, an empty one as a sign of life; False when the controller couldn't be reached."""
        self._store.changed.clear()
        self._number += 1
        batch = self._next()
        try:
            reply = self._send(batch)
        except HiddenStateCacheError as error:
            # It may have been taken in, or not: only all of it, under a new number, is right in both cases.
            self._whole = True
            if not self._in_trouble:
                self._in_trouble = True
                logger.warning("the controller can't be reached; other nodes won't find what is stored here: %s", error)
            return False
        self._in_trouble = False
        self._whole = not reply.applied
        self._alone = reply.num_nodes < 2
        self._heard(reply)
        return True

    def _next(self) -> LocationBatch:
        first = (self._node_id, self._incarnation, self._number)
        if self._whole:
            return LocationBatch(*first, self._store.snapshot(), whole=True)
        changes = self._store.take_changes()
        added = b"".join(key for key, there in changes.items() if there)
        removed = b"".join(key for key, there in changes.items() if not there)
        return LocationBatch(*first, added, removed)
