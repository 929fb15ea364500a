"""The actor that owns a node's pool. Every method delegates to `hs_cache.server.CacheServer`.

Its process loads torch, others don't have to: Ray loads an actor's class wherever one is created or its handle looked
up, which is the controller, a task on each node, and every ``hs-cache`` command.
"""

import gc
import logging
import pkgutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, RayError

from hs_cache.config import CacheConfig
from hs_cache.errors import PoolTooLargeError, ServiceError, ServiceNotRunningError
from hs_cache.html import short_id
from hs_cache.kv_link import KVLink
from hs_cache.machine import require_headroom
from hs_cache.messages import (
    AttachReply,
    ClientInfo,
    CommitReply,
    ExplainReply,
    ExplainRequest,
    LeaseReply,
    LeaseRequest,
    LocationBatch,
    NodeStatistics,
    PublishReply,
    ReserveRequest,
    Retired,
    RevisionTable,
)
from hs_cache.publishing import Publisher
from hs_cache.router import KV, actor_name, find_actor, find_controller
from hs_cache.shared_pool import SharedPool
from hs_cache.wire import Plain, message, plain

if TYPE_CHECKING:
    from hs_cache.rows import Flat, PickledRows
    from hs_cache.server import CacheServer

logger = logging.getLogger(__name__)

_SERVER, _PICKLED_ROWS = "hs_cache.server:CacheServer", "hs_cache.rows:PickledRows"
ROWS = "rows"
"""The concurrency group of calls that wait for the object store, so that they don't take the threads of all others."""

_SWEEP_PERIOD_S = 1.0
_HEADROOM_WAIT_S = 10.0


class RayKVCalls:
    """`hs_cache.kv_link.KVCalls` over Ray.

    Args:
        find: looks the actor up by its name.
    """

    def __init__(self, find: Callable[[], ActorHandle[Any]]) -> None:
        self._find = find
        self._actor = find()

    def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        """See `KVCalls`."""
        try:
            return ray.get(self.send(method, *args), timeout=timeout_s)
        except ActorDiedError as error:
            raise ServiceNotRunningError(f"the KV actor is gone: {_first_line(error)}") from error
        except RayError as error:
            raise ServiceError(f"the KV actor: {type(error).__name__}: {_first_line(error)}") from error

    def send(self, method: str, *args: Any) -> Any:
        """See `KVCalls`."""
        return getattr(self._actor, method).remote(*args)

    def wait(self, sent: Sequence[Any], timeout_s: float) -> bool:
        """See `KVCalls`."""
        _, late = ray.wait(list(sent), num_returns=len(sent), timeout=timeout_s, fetch_local=False)
        return not late

    def renew(self) -> None:
        """See `KVCalls`."""
        self._actor = self._find()


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "")


def _wait_for_headroom(nbytes: int) -> None:
    """Give clients time to let go of the pool of this actor's predecessor, which is their memory until they do."""
    deadline = time.monotonic() + _HEADROOM_WAIT_S
    while True:
        try:
            return require_headroom(nbytes)
        except PoolTooLargeError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.2)


class HiddenStateActor:
    """Owns the pool of its node, and answers clients and plain handles. Threaded.

    The methods down to `retrieve_rows` are the clients' protocol, whose most frequent messages are lists
    (`hs_cache.wire`). The others are LMCache's store by handle, for notebooks and code without a client; they take the
    fields of `hs_cache.KeySpace` (without ``chunk_size``) as keywords.
    """

    def __init__(self, service: str, config: CacheConfig) -> None:
        node_id = ray.get_runtime_context().get_node_id()
        self._kv: KVLink | None = None
        if config.kv_source != "none":
            calls = RayKVCalls(partial(find_actor, service, KV, node_id))
            self._kv = KVLink(calls, logs=config.kv_source == "reports", capacity=config.kv_index_capacity)
            threading.Thread(target=self._kv.run, name="hs_cache-kv-notes", daemon=True).start()
        name = actor_name("hs_cache", service, short_id(node_id))
        if ray.get_runtime_context().was_current_actor_reconstructed:
            _wait_for_headroom(config.max_hidden_state_cpu_bytes)
        pool = SharedPool(config.max_hidden_state_cpu_bytes, name=name, pin=True)
        server_class: type[CacheServer] = pkgutil.resolve_name(_SERVER)
        self._server = server_class(config, pool, node_id=node_id, kv=self._kv)
        self._pickled: type[PickledRows] = pkgutil.resolve_name(_PICKLED_ROWS)
        self._config = config
        self._service = service
        self._controller: Any = None
        self._stop = threading.Event()
        publisher = Publisher(
            self._server.store,
            node_id=node_id,
            incarnation=pool.incarnation,
            send=self._publish,
            heard=self._server.heard,
        )
        threading.Thread(target=publisher.run, args=(self._stop,), name="hs_cache-publisher", daemon=True).start()
        threading.Thread(target=self._sweep, name="hs_cache-sweeper", daemon=True).start()
        gc.collect()
        gc.freeze()  # what PyTorch and Ray have made is here to stay: a collection need not look at it each time

    def _publish(self, batch: LocationBatch) -> PublishReply:
        try:
            if self._controller is None:
                self._controller = find_controller(self._service)
            reply: PublishReply = ray.get(self._controller.publish.remote(batch), timeout=self._config.rpc_timeout_s)
        except Exception as error:
            self._controller = None
            # Whatever it is, also a bug of the controller's: the publisher has to go on.
            raise ServiceError(f"publishing to the controller: {type(error).__name__}: {error}") from error
        return reply

    def _sweep(self) -> None:
        while True:
            self._look_after_kv()
            if self._stop.wait(_SWEEP_PERIOD_S):
                return
            try:
                self._server.sweep()
            except OSError as error:  # out of file descriptors, say: nobody counts as gone because of that
                logger.warning("clients could not be looked after: %s", error)

    def _look_after_kv(self) -> None:
        try:
            if self._kv is not None:
                self._kv.look_after()
        except Exception:  # whatever Ray raises: this thread also frees what dead clients held
            logger.exception("the KV actor could not be looked after")

    def config(self) -> CacheConfig:
        """The settings it runs with."""
        return self._config

    def attach(self, info: ClientInfo) -> AttachReply:
        """See `CacheServer.attach`."""
        return self._server.attach(info)

    def reserve(self, request: Plain) -> Plain:
        """See `CacheServer.reserve`."""
        return plain(self._server.reserve(message(ReserveRequest, request)))  # type: ignore[no-any-return]

    def commit(self, incarnation: bytes, client_id: bytes, hold_id: int) -> Plain:
        """See `CacheServer.commit`."""
        return plain(self._server.commit(incarnation, client_id, hold_id))  # type: ignore[no-any-return]

    def lease(self, request: Plain) -> Plain:
        """See `CacheServer.lease`."""
        return plain(self._server.lease(message(LeaseRequest, request)))  # type: ignore[no-any-return]

    def plan(self, request: Plain, keep: bool) -> Plain:
        """See `CacheServer.plan`."""
        return plain(self._server.plan(message(LeaseRequest, request), keep))  # type: ignore[no-any-return]

    def explain(self, request: ExplainRequest) -> ExplainReply:
        """See `CacheServer.explain`."""
        return self._server.explain(request)

    def release(self, incarnation: bytes, client_id: bytes, ids: Sequence[int]) -> None:
        """See `CacheServer.release`."""
        self._server.release(incarnation, client_id, ids)

    @ray.method(concurrency_group=ROWS)
    def store_rows(self, request: ReserveRequest, flat: "Flat") -> CommitReply:
        """See `CacheServer.store_rows`."""
        return self._server.store_rows(request, flat)

    @ray.method(concurrency_group=ROWS)
    def retrieve_rows(self, request: LeaseRequest) -> "Iterator[LeaseReply | Flat | None]":
        """See `CacheServer.lease_rows`; to be called with ``num_returns=2``: the reply, and the rows, None on a miss.

        Ray copies what is yielded into the object store before it goes on here, so the rows are leased for exactly that
        long; and the caller owns them, so they outlive this actor.
        """
        with self._server.lease_rows(request) as (reply, rows):
            yield reply
            yield rows()

    def store_hidden_states(self, token_ids: Any, hidden_states: Any, **options: Any) -> int:
        """See `CacheServer.store_hidden_states`."""
        return self._server.store_hidden_states(token_ids, hidden_states, **options)

    def retrieve_hidden_states(self, token_ids: Any, **options: Any) -> Any:
        """See `CacheServer.retrieve_hidden_states`; arrives as a ``torch.Tensor`` of one's own, or None."""
        rows = self._server.retrieve_hidden_states(token_ids, **options)
        return None if rows is None else self._pickled(rows)

    def has_chunk(self, key: bytes, layer_idx: int = 0) -> bool:
        """See `CacheServer.has_chunk`."""
        return self._server.has_chunk(key, layer_idx)

    def num_cached_chunks(self) -> int:
        """See `CacheServer.num_cached_chunks`."""
        return self._server.num_cached_chunks()

    def drop_key(self, key: bytes, space: bytes | None = None) -> bool:
        """See `CacheServer.drop_key`."""
        return self._server.drop_key(key, space)

    def key_space(self, key: bytes) -> bytes:
        """See `CacheServer.key_space`."""
        return self._server.key_space(key)

    def take_revisions(self, table: RevisionTable) -> tuple[Retired, ...]:
        """See `CacheServer.take_revisions`."""
        return self._server.take_revisions(table)

    def stats(self) -> NodeStatistics:
        """See `CacheServer.stats`."""
        return self._server.stats()

    def check(self) -> None:
        """Audit the index; see `hs_cache.store.HiddenStateStore.check`."""
        self._server.store.check()
