"""The actor that owns a node's pool. Every method delegates to `hs_cache.server.CacheServer`."""

import threading
from collections.abc import Sequence
from typing import Any

import ray
from ray.actor import ActorHandle

from hs_cache.config import CacheConfig
from hs_cache.messages import (
    AttachReply,
    ClientInfo,
    CommitReply,
    LeaseReply,
    LeaseRequest,
    NodeStatistics,
    ReserveReply,
    ReserveRequest,
)
from hs_cache.router import KV, actor_name, find_actor
from hs_cache.rows import Flat, PickledRows
from hs_cache.server import CacheServer
from hs_cache.shared_pool import SharedPool

_SWEEP_PERIOD_S = 1.0


class RayKVPresence:
    """`hs_cache.kv_presence.KVPresence` over the node's `KVActor`."""

    def __init__(self, actor: ActorHandle[Any]) -> None:
        self._actor = actor
        self._lock = threading.Lock()
        self._notes: list[Any] = []

    def presence(self, keys: bytes, timeout_s: float) -> Sequence[int]:
        """Blocks for one actor call, up to `timeout_s`."""
        answer: bytes = ray.get(self._actor.presence.remote(keys), timeout=timeout_s)
        return answer

    def note_stored(self, keys: bytes) -> None:
        """Sends a call, and remembers it for `settle_notes`."""
        note = self._actor.note_stored.remote(keys)
        with self._lock:
            self._notes.append(note)

    def settle_notes(self, timeout_s: float) -> None:
        """Blocks until the calls sent so far have been carried out, have failed, or `timeout_s` is over."""
        with self._lock:
            sent = list(self._notes)  # left there meanwhile: another thread may have to wait for the same
        if sent:
            ray.wait(sent, num_returns=len(sent), timeout=timeout_s, fetch_local=False)
            with self._lock:
                self._notes = [note for note in self._notes if note not in sent]


class HiddenStateActor:
    """Owns the pool of its node, and answers clients and plain handles. Threaded.

    The methods down to `retrieve_rows` are the clients' protocol. The others are LMCache's store by handle, for
    notebooks and code without a client; they take the fields of `hs_cache.KeySpace` (without ``chunk_size``) as
    keywords.
    """

    def __init__(self, service: str, config: CacheConfig) -> None:
        node_id = ray.get_runtime_context().get_node_id()
        bound = config.kv_source != "none"
        kv = RayKVPresence(find_actor(service, KV, node_id)) if bound else None
        name = actor_name("hs_cache", service, node_id[:8])
        pool = SharedPool(config.max_hidden_state_cpu_bytes, name=name, pin=True)
        self._server = CacheServer(config, pool, node_id=node_id, kv=kv)
        self._config = config
        self._stop = threading.Event()
        threading.Thread(target=self._sweep, name="hs_cache-sweeper", daemon=True).start()

    def _sweep(self) -> None:
        while not self._stop.wait(_SWEEP_PERIOD_S):
            self._server.sweep()

    def config(self) -> CacheConfig:
        """The settings it runs with."""
        return self._config

    def attach(self, info: ClientInfo) -> AttachReply:
        """See `CacheServer.attach`."""
        return self._server.attach(info)

    def reserve(self, request: ReserveRequest) -> ReserveReply:
        """See `CacheServer.reserve`."""
        return self._server.reserve(request)

    def commit(self, incarnation: bytes, client_id: bytes, hold_id: int) -> CommitReply:
        """See `CacheServer.commit`."""
        return self._server.commit(incarnation, client_id, hold_id)

    def lease(self, request: LeaseRequest) -> LeaseReply:
        """See `CacheServer.lease`."""
        return self._server.lease(request)

    def release(self, incarnation: bytes, client_id: bytes, ids: Sequence[int]) -> None:
        """See `CacheServer.release`."""
        self._server.release(incarnation, client_id, ids)

    def store_rows(self, request: ReserveRequest, flat: Flat) -> CommitReply:
        """See `CacheServer.store_rows`."""
        return self._server.store_rows(request, flat)

    def retrieve_rows(self, request: LeaseRequest) -> tuple[LeaseReply, Any]:
        """See `CacheServer.lease_rows`; the second value is a ref to the rows, None on a miss."""
        with self._server.lease_rows(request) as (reply, flat):
            # Copied into the object store while leased: a returned view would be copied after this method has ended.
            return reply, None if flat is None else ray.put(flat)

    def store_hidden_states(self, token_ids: Any, hidden_states: Any, **options: Any) -> int:
        """See `CacheServer.store_hidden_states`."""
        return self._server.store_hidden_states(token_ids, hidden_states, **options)

    def retrieve_hidden_states(self, token_ids: Any, **options: Any) -> Any:
        """See `CacheServer.retrieve_hidden_states`; arrives as a ``torch.Tensor`` of one's own, or None."""
        rows = self._server.retrieve_hidden_states(token_ids, **options)
        return None if rows is None else PickledRows(rows)

    def has_chunk(self, key: bytes, layer_idx: int = 0) -> bool:
        """See `CacheServer.has_chunk`."""
        return self._server.has_chunk(key, layer_idx)

    def num_cached_chunks(self) -> int:
        """See `CacheServer.num_cached_chunks`."""
        return self._server.num_cached_chunks()

    def drop_key(self, key: bytes) -> bool:
        """See `CacheServer.drop_key`."""
        return self._server.drop_key(key)

    def stats(self) -> NodeStatistics:
        """See `CacheServer.stats`."""
        return self._server.stats()

    def check(self) -> None:
        """Audit the index; see `hs_cache.store.HiddenStateStore.check`."""
        self._server.store.check()
