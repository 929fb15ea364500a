"""What a client asks of the store of its node: the one place where it is decided that this takes an actor call.

An index of the store in shared memory could answer a `lease` here without yielding a `Call`; nobody else would notice.
"""

from dataclasses import replace
from typing import Any

from hs_cache.effects import Call, Peer, Steps
from hs_cache.leases import Releaser
from hs_cache.messages import CommitReply, LeaseReply, LeaseRequest, PlanReply, ReserveReply, ReserveRequest
from hs_cache.rows import Flat


class StoreControl:
    """The operations of one node's store, for one incarnation of its pool, as calls of its `HiddenStateActor`. Each
    raises what the node refuses it with, and `ServiceError` when there is no answer within `timeout_s`.

    Args:
        peer: the actor.
        incarnation: of its pool.
        releaser: has the ids that have ended. They go along with each request, so that memory is free again before more
            is asked for.
    """

    def __init__(self, peer: Peer, incarnation: bytes, releaser: Releaser) -> None:
        self._peer = peer
        self._incarnation = incarnation
        self._releaser = releaser

    def lease(self, request: LeaseRequest, timeout_s: float) -> Steps[LeaseReply]:
        """See `hs_cache.server.CacheServer.lease`."""
        return self._call("lease", request, timeout_s)

    def plan(self, request: LeaseRequest, keep: bool, timeout_s: float) -> Steps[PlanReply]:
        """See `hs_cache.server.CacheServer.plan`."""
        return self._call("plan", request, timeout_s, keep)

    def reserve(self, request: ReserveRequest, timeout_s: float) -> Steps[ReserveReply]:
        """See `hs_cache.server.CacheServer.reserve`."""
        return self._call("reserve", request, timeout_s)

    def commit(self, request: ReserveRequest, timeout_s: float) -> Steps[CommitReply]:
        """Make visible what was written into the place that this request was given."""
        ids = (self._incarnation, request.client_id, request.hold_id)
        done: CommitReply = yield Call(self._peer, "commit", ids, timeout_s)
        return done

    def store_rows(self, request: ReserveRequest, flat: Flat, timeout_s: float) -> Steps[CommitReply]:
        """See `hs_cache.server.CacheServer.store_rows`."""
        return self._call("store_rows", request, timeout_s, flat, carries_rows=True)

    def _call(self, method: str, request: Any, timeout_s: float, *more: Any, carries_rows: bool = False) -> Steps[Any]:
        releases: tuple[int, ...] = ()
        try:
            releases = self._releaser.take(self._incarnation)
            if releases:
                request = replace(request, releases=releases)
            reply = yield Call(self._peer, method, (request, *more), timeout_s, carries_rows)
        except BaseException:
            self._releaser.end(self._incarnation, releases)
            raise
        if releases:
            self._releaser.taken(self._incarnation, releases)
        return reply
