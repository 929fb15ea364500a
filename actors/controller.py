"""The actor that keeps a service complete while nodes come and go, and knows where chunks are. Needs no torch.

It holds nothing that it could not learn anew: Ray restarts it with its settings, and every node sends all of its keys
when it finds out. While it is away, nodes serve what they have; only what is on other nodes isn't found.
"""

import logging
import threading
import time
from collections.abc import Sequence, Set
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.nodes import select_nodes
from actors.pair import create_pair
from hs_cache.config import CacheConfig
from hs_cache.directory import Directory, Membership, Segment
from hs_cache.errors import HiddenStateCacheError, ServiceError
from hs_cache.messages import (
    ControllerStatistics,
    LocationBatch,
    PublishReply,
    RevisionChange,
    RevisionTable,
    StartProgress,
)
from hs_cache.revisions import Revisions
from hs_cache.router import HIDDEN_STATES, KV, actors_of, find_actor, translated
from hs_cache.weights import load_revisions, save_revisions

logger = logging.getLogger(__name__)

_PERIOD_S, _BUSY_PERIOD_S = 0.5, 0.05

_NOT_ALONE = 2
"""Nodes that a controller takes for granted before its first look: with one, a node would ask no other."""

_SILENCE_S = 5.0
"""A node that hasn't published for so long (it does every second) is not named to readers until it does again."""

_RETRY_S = 10.0
"""How long after a failure a node is tried again."""

_INSTALL = (
    " (install hs-cache on that node too, in the environment in which its `ray start` ran, or leave it out with "
    "node_selector)"
)


class CacheController:
    """One per service, detached. Threaded: `publish` and `locate` go on while nodes are being watched.

    Args:
        service: name of the service.
        config: its settings, with ``node_selector`` decided.
    """

    def __init__(self, service: str, config: CacheConfig) -> None:
        self._service = service
        self._config = config
        self._lock = threading.Lock()
        self._membership = Membership()
        self._directory = Directory()
        self._revisions = Revisions(load_revisions(service))
        self._heard: dict[str, float] = {}
        self._dead: frozenset[str] = frozenset()
        self._num_carriers = _NOT_ALONE
        self._locates = 0
        self._wanted = threading.Event()
        self._afresh = False
        self._progress = StartProgress(0, (), (), None)
        # Below: of the watching thread only.
        self._ready: set[str] = set()
        self._creating: dict[str, Any] = {}
        self._failed: dict[str, tuple[float, HiddenStateCacheError]] = {}
        threading.Thread(target=self._watch, name="hs_cache-watch", daemon=True).start()

    def config(self) -> CacheConfig:
        """The settings of the service."""
        return self._config

    def publish(self, batch: LocationBatch) -> PublishReply:
        """Take in what a node says of its chunks; see `hs_cache.publishing`."""
        with self._lock:
            revisions = self._revisions.table()
            if batch.node_id in self._dead:  # cut off from the cluster, and about to end
                return PublishReply(True, self._num_nodes(), revisions)
            self._heard[batch.node_id] = time.monotonic()
            self._membership.join(batch.node_id, batch.incarnation)
            applied = True
            if batch.whole:
                self._directory.replace(batch.node_id, batch.incarnation, batch.number, batch.added)
            else:
                applied = self._directory.apply(
                    batch.node_id, batch.incarnation, batch.number, batch.added, batch.removed
                )
            return PublishReply(applied, self._num_nodes(), revisions)

    def locate(self, keys: bytes, without: Sequence[str] = ()) -> tuple[Segment, ...]:
        """Where the longest run of `keys` can be had, from the first on; a hint. See `hs_cache.directory.Directory`."""
        with self._lock:
            self._locates += 1
            return self._directory.locate(keys, without=without)

    def holders(self, keys: bytes) -> dict[str, int]:
        """For each node that has the first of `keys`, how many of them it has without a gap. A hint."""
        with self._lock:
            return self._directory.holders(keys)

    def where(self, keys: bytes, without: Sequence[str] = ()) -> tuple[str, ...]:
        """For each key, a node that has it, none of `without`; ``""`` where none does. A hint."""
        with self._lock:
            return self._directory.where(keys, without=without)

    def revisions(self) -> RevisionTable:
        """The current revisions."""
        with self._lock:
            return self._revisions.table()

    def change_revision(self, model: str, revision: str | None) -> RevisionChange:
        """Make a revision the current one; nodes learn it from whoever calls this, or with their next batch. See
        `hs_cache.revisions.Revisions.change`."""
        with self._lock:
            revisions = Revisions(self._revisions.table())
            change = revisions.change(model, revision)
            if change.changed:
                save_revisions(self._service, revisions.table())  # before anyone hears of it
                self._revisions = revisions
            return change

    def stats(self) -> ControllerStatistics:
        """A snapshot."""
        with self._lock:
            nodes = tuple(member.node_id for member in self._membership.members())
            revisions = self._revisions.table()
            return ControllerStatistics(self._membership.version, nodes, len(self._directory), self._locates, revisions)

    def look_again(self) -> int:
        """Have the nodes looked at now, and nodes that failed tried again. `progress` from the number returned on says
        what came of it. Doesn't block."""
        with self._lock:
            self._afresh = True
            self._wanted.set()
            return self._progress.number + 2  # a look that is going on may have begun before

    def progress(self) -> StartProgress:
        """How far the nodes were at the last look."""
        with self._lock:
            return self._progress

    def _num_nodes(self) -> int:
        # While the first nodes come, and after a restart, those that have published are too few.
        return max(self._num_carriers, len(self._membership.members()))

    def _watch(self) -> None:
        trouble = ""
        while True:
            self._wanted.clear()
            try:
                self._reconcile()
                trouble = ""
            # If this thread ended, no node that joins would be served any more, and nothing would tell.
            except Exception as error:
                if str(error) != trouble:
                    trouble = str(error)
                    logger.warning("the nodes of the cluster could not be looked at: %s", trouble, exc_info=True)
            self._wanted.wait(_BUSY_PERIOD_S if self._creating else _PERIOD_S)

    def _reconcile(self) -> None:
        """One look at the cluster: create what is missing, forget what is gone."""
        with self._lock:
            afresh, self._afresh = self._afresh, False
        if afresh:
            self._failed.clear()
        nodes = ray.nodes()  # type: ignore[no-untyped-call]
        alive = {node["NodeID"] for node in nodes if node["Alive"]}
        matching = select_nodes(self._config, nodes)
        listed = actors_of(self._service)
        self._ready &= listed[HIDDEN_STATES] & listed[KV]
        self._collect(alive)
        now = time.monotonic()
        for node_id in matching:
            waiting = node_id in self._failed and now < self._failed[node_id][0] + _RETRY_S
            # Also where actors are listed that are not known to be ours: whether they are is found out there.
            if node_id not in self._ready and node_id not in self._creating and not waiting:
                self._creating[node_id] = self._create(node_id)
        for kind, there in listed.items():
            for node_id in there - alive:
                self._end(kind, node_id)
        with self._lock:
            self._num_carriers = len(set(matching) - self._failed.keys())
            self._dead = frozenset(node["NodeID"] for node in nodes) - alive
            for member in self._membership.members():
                silent = now - self._heard[member.node_id] > _SILENCE_S
                if member.node_id not in alive or silent:
                    logger.warning("node %s is %s", member.node_id, "silent" if silent else "gone")
                    self._membership.leave(member.node_id)
                    self._directory.remove(member.node_id)
                    del self._heard[member.node_id]
            failures = [error for node_id, (_, error) in self._failed.items() if node_id in matching]
            self._progress = StartProgress(
                self._progress.number + 1,
                tuple(matching),
                tuple(node_id for node_id in matching if node_id not in self._ready and node_id not in self._failed),
                failures[0] if failures else None,
            )

    def _create(self, node_id: str) -> Any:
        place = NodeAffinitySchedulingStrategy(node_id, soft=False)
        task = ray.remote(create_pair).options(num_cpus=0, max_retries=0, scheduling_strategy=place)
        return task.remote(self._config, self._service)

    def _collect(self, alive: Set[str]) -> None:
        """Take in how the creations went that have ended; forget those on nodes that are gone."""
        for node_id in self._failed.keys() - alive:
            del self._failed[node_id]
        for node_id, creation in list(self._creating.items()):
            if not ray.wait([creation], timeout=0)[0]:
                continue
            del self._creating[node_id]
            try:
                ray.get(creation)
            # Whatever it is: a node whose Python lacks this package must not keep the others from being served.
            except Exception as error:
                if node_id not in alive:
                    continue
                cause = translated(error, "starting its actors")
                kind = type(cause) if isinstance(cause, HiddenStateCacheError) else ServiceError
                reason = str(cause).strip().splitlines()[-1]
                if reason.startswith("ModuleNotFoundError"):
                    reason += _INSTALL
                failure = kind(f"node {node_id}: {reason}")
                if node_id not in self._failed:
                    logger.warning("a node has no actors, and is tried again every %.0f s: %s", _RETRY_S, failure)
                self._failed[node_id] = (time.monotonic(), failure)
            else:
                self._failed.pop(node_id, None)
                self._ready.add(node_id)

    def _end(self, kind: str, node_id: str) -> None:
        """End an actor whose node is gone. It won't come back under this id, and its name would be listed for ever."""
        try:
            ray.kill(find_actor(self._service, kind, node_id), no_restart=True)
        except Exception as error:
            cause = translated(error, "ending an actor")
            if not isinstance(cause, ServiceError):
                raise
            logger.debug("%s", cause)  # it has ended meanwhile, or is seen again at the next look
