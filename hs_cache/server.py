"""One node's side of the cache: answers clients over its pool and store, and asks the KV side. Knows nothing of Ray."""

import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from hs_cache.config import CacheConfig
from hs_cache.errors import ConfigMismatchError, InvalidInputError, StaleIncarnationError
from hs_cache.keys import KEY_BYTES, ChunkKeys, KeySpace, KVNames, MMSpan, TokenDatabase
from hs_cache.kv_names import NAMING_SOURCES, kv_naming
from hs_cache.kv_presence import KVPresence, Presence
from hs_cache.kv_side import KVSide
from hs_cache.machine import process_alive, process_start_time
from hs_cache.messages import (
    DTYPE_BYTES,
    KV_ABSENT,
    KV_UNKNOWN,
    OK,
    PROTOCOL_VERSION,
    AttachReply,
    ClientInfo,
    CommitReply,
    ExplainReply,
    ExplainRequest,
    LeaseReply,
    LeaseRequest,
    ModelRevision,
    NodeStatistics,
    PlanReply,
    PublishReply,
    ReserveReply,
    ReserveRequest,
    Retired,
    RevisionTable,
    split_keys,
)
from hs_cache.planning import check_index, check_key, check_store
from hs_cache.revisions import NodeRevisions
from hs_cache.rows import Flat, copy_flat_in, copy_out, empty_rows, flatten_runs
from hs_cache.shared_pool import SharedPool
from hs_cache.stitching import HeldRows, Stitcher, StorePlan
from hs_cache.store import HiddenStateStore, HoldId

logger = logging.getLogger(__name__)

_KV_SHARE_OF_DEADLINE = 0.8
"""Part of a retrieve's time that its KV check may take: a dead KV side ends as a short prefix, not a timeout."""


class CacheServer:
    """What a `HiddenStateActor` delegates to. Thread-safe.

    Every request names the pool's incarnation, and one of a predecessor is refused: its ids and offsets mean nothing
    here.

    Args:
        config: the service's settings.
        pool: this node's memory.
        node_id: hex id of this node.
        kv: this node's KV side; None when ``kv_source`` is ``none``, and KV counts as present.
    """

    def __init__(self, config: CacheConfig, pool: SharedPool, *, node_id: str, kv: KVPresence | None) -> None:
        self._config = config
        self._pool = pool
        self._node_id = node_id
        self._kv = KVSide(kv, node_id=node_id)
        self._memory = pool.view()
        self._store = HiddenStateStore(
            pool.data_bytes, chunk_size=config.chunk_size, max_leased_fraction=config.max_leased_fraction
        )
        self._revisions = NodeRevisions(self._store)
        self._stitcher = Stitcher(HeldRows())
        self._own_ids = itertools.count()
        self._lock = threading.Lock()
        self._clients: dict[bytes, ClientInfo] = {}
        self._warned_full = False
        self._alone = True
        self._retrieves = self._hits = self._asked = self._served = self._kv_unknown = 0

    @property
    def store(self) -> HiddenStateStore:
        """The index, for audits and tests."""
        return self._store

    def attach(self, info: ClientInfo) -> AttachReply:
        """Register a client process; idempotent. Memory is leased only to processes whose end this node can see.

        Raises:
            ConfigMismatchError: the client speaks another version of the protocol.
        """
        if info.protocol != PROTOCOL_VERSION:
            raise ConfigMismatchError(
                f"protocol: this client speaks version {info.protocol}, the service version {PROTOCOL_VERSION}; "
                "install the same hs-cache on every node"
            )
        reason = self._why_not_shared(info)
        if not reason:
            with self._lock:
                self._clients[info.client_id] = info
        return AttachReply(
            self._node_id,
            self._pool.incarnation,
            self._config.model_dump(),
            None if reason else self._pool.address,
            reason,
        )

    def _why_not_shared(self, info: ClientInfo) -> str:
        if info.node_id != self._node_id:
            return f"the client is on node {info.node_id}"
        if info.start_time is None:
            return "the client has no /proc to be recognised by"
        if process_start_time(info.pid) != info.start_time:
            return "the client lives in another pid namespace"
        return ""

    def reserve(self, request: ReserveRequest) -> ReserveReply:
        """Room in the pool for a client that will write into it; see `HiddenStateStore.reserve`.

        Raises:
            StaleIncarnationError: the request was meant for a predecessor.
            InvalidInputError: a layer's hidden_dim or dtype differs from what the key space holds.
            StaleRevisionError: the rows are of another revision than the model's current one.
        """
        with self._granting(request) as hold:
            return self._reserve(hold, request, keep=request.keep)

    def commit(self, incarnation: bytes, client_id: bytes, hold_id: int) -> CommitReply:
        """Make what a client wrote visible.

        Raises:
            StaleIncarnationError: this reservation is not, or no longer, held here.
            StaleRevisionError: the model's current revision has changed since; what was written is free again.
        """
        self._check_attached(incarnation, client_id)
        return self._commit((client_id, hold_id))

    def lease(self, request: LeaseRequest) -> LeaseReply:
        """The longest prefix with KV and every layer, held for the client; asks the KV side once.

        Blocks for the KV side, at most 0.8 of ``request.timeout_s``. Whatever fails there is *unknown*, never an error.

        Raises:
            StaleIncarnationError: the request was meant for a predecessor.
        """
        with self._granting(request) as hold:
            return self._lease(hold, request)

    def plan(self, request: LeaseRequest, keep: bool) -> PlanReply:
        """How far a prefix can be had; with `keep` it is leased until the client releases it. Moves no rows.

        Blocks for the KV side as `lease` does, which it asks once.

        Raises:
            StaleIncarnationError: the request was meant for a predecessor.
        """
        keys = self._checked_keys(request)
        names = split_keys(keys.blob)
        with self._granting(request) as hold:
            found = self._store.lease(hold, names, request.layers)
            held = False
            try:
                survey = self._store.survey(names, request.layers)
                # Dropped since the lease was taken, a chunk counts as any other that isn't there.
                kv_local = (*found.kv_local, *survey.kv_local[len(found.keys) :])
                presence = self._kv.ask(self._kv_names(keys), kv_local, request.timeout_s * _KV_SHARE_OF_DEADLINE)
                granted = self._store.settle(hold, presence[: len(found.keys)])
                held = keep and not granted.must_copy
            finally:
                if not held:
                    self._store.end(hold)
        kv_chunks = next((i for i, state in enumerate(presence) if state != Presence.PRESENT), len(keys))
        return PlanReply(
            granted.num_tokens,
            keys.tokens_before(kv_chunks),
            tuple(max(keys.tokens_before(count), granted.num_tokens) for count in survey.layer_chunks),
            granted.specs,
            granted.ended_by,
            self._alone,
            held,
        )

    def explain(self, request: ExplainRequest) -> ExplainReply:
        """Why each chunk can be had or not. Blocks for the KV side as `lease` does; drops nothing."""
        keys = self._checked_keys(request)
        survey = self._store.survey(split_keys(keys.blob), request.layers)
        there = [position for position, reason in enumerate(survey.reasons) if reason == OK]
        names = self._kv_names(keys)
        presence = self._kv.ask(
            names and names.pick(there),
            [survey.kv_local[position] for position in there],
            request.timeout_s * _KV_SHARE_OF_DEADLINE,
        )
        reasons = list(survey.reasons)
        for position, state in zip(there, presence, strict=True):
            reasons[position] = {Presence.PRESENT: OK, Presence.ABSENT: KV_ABSENT}.get(Presence(state), KV_UNKNOWN)
        return ExplainReply(tuple(reasons), self._alone)

    def release(self, incarnation: bytes, client_id: bytes, ids: Sequence[int]) -> None:
        """End leases and give up reservations; idempotent, and without effect for a predecessor's."""
        if incarnation == self._pool.incarnation:
            self._store.release(client_id, ids)

    def store_rows(self, request: ReserveRequest, flat: Flat) -> CommitReply:
        """A whole store for a client without the mapping; `flat` is what `hs_cache.rows.flatten` made. Blocks for the
        copy.

        What the client gives up by a release of the request's id, before or meanwhile, does not become visible. The
        memory is held by this process: a release can't free it under the copy. Nothing is kept, since of such a client
        it isn't known when it is gone.

        Raises:
            StaleIncarnationError: the request was meant for a predecessor, or was given up.
            InvalidInputError: as `reserve`, or `flat` has another size than the request says.
            StaleRevisionError: as `reserve` and `commit`.
        """
        self._check_incarnation(request.incarnation)
        self._store.release(request.client_id, request.releases)
        first_token = request.first_chunk * self._config.chunk_size
        expected = sum(spec.row_bytes for spec in request.specs) * (request.num_tokens - first_token)
        if flat.nbytes != expected:
            raise InvalidInputError(
                f"flat: got {flat.nbytes} bytes, expected {expected} for the tokens and layers named"
            )
        with self._own_hold() as hold:
            reply = self._reserve(hold, request, caller=(request.client_id, request.hold_id))
            copy_flat_in(self._memory, reply.runs, request.specs, flat, first_token)
            return self._commit(hold)

    @contextmanager
    def lease_rows(self, request: LeaseRequest) -> Iterator[tuple[LeaseReply, Callable[[], Flat | None]]]:
        """A retrieve for a client without the mapping: the reply, and a function that gives the rows from
        ``request.start_token`` on, None where there are none.

        Rows are laid out as `hs_cache.rows.flat_runs` says. They may be a view of the pool, leased until the context
        ends: copy them before.
        """
        with self._own_hold() as hold:
            reply = self._lease(hold, request)
            end = request.first_chunk * self._config.chunk_size + reply.num_tokens

            def rows() -> Flat | None:
                if not reply.num_tokens or end <= request.start_token:
                    return None
                return flatten_runs(self._memory, reply.runs, reply.specs, request.start_token)

            yield reply, rows

    def store_hidden_states(
        self,
        token_ids: Any,
        hidden_states: Any,
        *,
        layer_idx: int = 0,
        token_offset: int = 0,
        mm_spans: Sequence[MMSpan] = (),
        kv_local: bool = True,
        **space: Any,
    ) -> int:
        """The drop-in store, by handle: rows are copied from the arguments. Returns the number of chunks newly stored.

        Args:
            kv_local: whether the KV of these tokens was computed on this node, whose KV side then vouches for them. If
                not, it counts as present.
            space: fields of `KeySpace` except ``chunk_size``. Without a ``model_revision``, the current one that this
                node knows of: name it where weights may change under a caller who doesn't notice.

        Raises:
            InvalidInputError: an argument is wrong; nothing was changed.
            StaleRevisionError: ``model_revision`` is not the model's current one.
        """
        database = self._database(space)
        if not isinstance(kv_local, bool):
            raise InvalidInputError(f"kv_local: got {kv_local!r}, expected True or False")
        layers = {check_index("layer_idx", layer_idx): hidden_states}
        step = check_store(token_ids, layers, token_offset, mm_spans)
        accepted = self._config.hidden_state_layers
        if accepted is not None and layer_idx not in accepted:
            return 0
        return sum(self._put(database.space, plan, kv_local) for plan in self._stitcher.plan(database, step))

    def _put(self, space: KeySpace, plan: StorePlan, kv_local: bool) -> int:
        with self._own_hold() as hold:
            request = ReserveRequest(
                incarnation=self._pool.incarnation,
                client_id=hold[0],
                hold_id=hold[1],
                space=space.fingerprint,
                keys=plan.keys.blob,
                num_tokens=plan.keys.num_tokens,
                first_chunk=plan.first_chunk,
                specs=plan.specs,
                kv_local=kv_local,
                kv=plan.keys.kv,
                revision=ModelRevision(space.model, 0, space.model_revision),
            )
            reply = self._reserve(hold, request)
            plan.copy_into(self._memory, reply.runs)
            return self._commit(hold).stored

    def retrieve_hidden_states(
        self, token_ids: Any, *, layer_idx: int = 0, mm_spans: Sequence[MMSpan] = (), **space: Any
    ) -> torch.Tensor | None:
        """The drop-in retrieve, by handle: a float32 copy ``[n, hidden_dim]``, None on a miss.

        Raises:
            InvalidInputError: an argument is wrong.
        """
        layer = check_index("layer_idx", layer_idx)
        keys = self._database(space).chunk_keys(token_ids, mm_spans=mm_spans)
        with self._own_hold() as hold:
            request = LeaseRequest(
                incarnation=self._pool.incarnation,
                client_id=hold[0],
                hold_id=hold[1],
                keys=keys.blob,
                num_tokens=keys.num_tokens,
                layers=(layer,),
                timeout_s=self._config.rpc_timeout_s,
                kv=keys.kv,
            )
            reply = self._lease(hold, request)
            if not reply.num_tokens:
                return None
            (spec,) = reply.specs
            rows = empty_rows(reply.num_tokens, spec.hidden_dim, torch.float32)
            copy_out(self._memory, reply.runs, spec, rows, 0, reply.num_tokens)
            return rows

    def has_chunk(self, key: bytes, layer_idx: int = 0) -> bool:
        """Whether a chunk is there with that layer; no effect on the order."""
        return self._store.contains(check_key(key), check_index("layer_idx", layer_idx))

    def num_cached_chunks(self) -> int:
        """Chunks in the index."""
        return self._store.stats().num_chunks

    def drop_key(self, key: bytes, space: bytes | None = None) -> bool:
        """Drop a chunk with all its layers; idempotent. Rows already handed out stay valid.

        Args:
            space: fingerprint of the key space that it must be of.
        """
        return self._store.drop(check_key(key), space=space)

    def key_space(self, key: bytes) -> bytes:
        """The fingerprint of the key space that a chunk is of, ``b""`` when it isn't there: for `drop_key`."""
        return self._store.space_of(check_key(key))

    def stats(self) -> NodeStatistics:
        """A snapshot."""
        with self._lock:
            return NodeStatistics(
                node_id=self._node_id,
                incarnation=self._pool.incarnation.hex(),
                pid=self._pool.address.pid,
                pinned=self._pool.pinned,
                kv_source=self._config.kv_source,
                num_clients=len(self._clients),
                retrieves_total=self._retrieves,
                hits_total=self._hits,
                tokens_asked_total=self._asked,
                tokens_served_total=self._served,
                kv_unknown_total=self._kv_unknown,
                store=self._store.stats(),
                stale_stores_total=self._revisions.refused_total,
                revisions=self._revisions.table(),
                without_cuda=self._pool.without_cuda,
                pin_reason=self._pool.pin_reason,
                kv_asked_total=self._kv.asked_total,
            )

    def sweep(self) -> int:
        """End everything held by client processes that are gone; returns how many processes that were."""
        with self._lock:
            clients = list(self._clients.values())
        gone = [info for info in clients if info.start_time is None or not process_alive(info.pid, info.start_time)]
        for info in gone:
            # Unregistered first, so that `_granting` takes back what a call still on its way gets after this.
            with self._lock:
                self._clients.pop(info.client_id, None)
            holds = self._store.release_owner(info.client_id)
            logger.info("client process %d is gone; %d leases and reservations of its ended", info.pid, holds)
        return len(gone)

    @property
    def revisions(self) -> NodeRevisions:
        """Which revisions are current."""
        return self._revisions

    def take_revisions(self, table: RevisionTable) -> tuple[Retired, ...]:
        """Learn which revisions are current; see `hs_cache.revisions.NodeRevisions.take`."""
        return self._revisions.take(table)

    def heard(self, reply: PublishReply) -> None:
        """Take in what the controller replies to what this node publishes."""
        self._revisions.take(reply.revisions)
        self.set_alone(reply.num_nodes < 2)

    def set_alone(self, alone: bool) -> None:
        """Whether the service has no other node: then nobody need ask one for the rest of a prefix."""
        self._alone = alone
        self._store.set_alone(alone)

    def close(self) -> None:
        """Let the pool go; idempotent. Rows that clients hold stay valid until they let go of them."""
        self._memory = memoryview(b"")
        self._pool.close()

    def _check_incarnation(self, incarnation: bytes) -> None:
        if incarnation != self._pool.incarnation:
            raise StaleIncarnationError("this pool's owner has been restarted since the client attached")

    def _check_attached(self, incarnation: bytes, client_id: bytes) -> None:
        self._check_incarnation(incarnation)
        if client_id not in self._clients:
            raise StaleIncarnationError("this client is not attached here, or counted as gone")

    @contextmanager
    def _granting(self, request: ReserveRequest | LeaseRequest) -> Iterator[HoldId]:
        """The id under which a client gets what it asks for here; nothing when it turns out to be gone."""
        self._check_attached(request.incarnation, request.client_id)
        self._store.release(request.client_id, request.releases)
        hold = (request.client_id, request.hold_id)
        yield hold
        if request.client_id not in self._clients:  # `sweep` may have been through before the hold was made
            self._store.end(hold)
            raise StaleIncarnationError("this client counted as gone while its call was served")

    @contextmanager
    def _own_hold(self) -> Iterator[HoldId]:
        """An id of this process's own, whose holds end with the context."""
        hold = (b"", next(self._own_ids))
        try:
            yield hold
        finally:
            self._store.end(hold)

    def _database(self, space: dict[str, Any]) -> TokenDatabase:
        known = ("model", "model_revision", "lora_id", "cache_salt", "shard", "kv_tags")
        for name in space:
            if name not in known:
                raise InvalidInputError(f"{name}: unknown argument, expected one of {', '.join(known)}")
        key_space = KeySpace(**space, chunk_size=self._config.chunk_size)
        if not key_space.model_revision:
            key_space = replace(key_space, model_revision=self._revisions.current(key_space.model))
        return TokenDatabase(
            key_space,
            save_unfull_chunk=self._config.save_unfull_chunk,
            kv_naming=kv_naming(self._config, key_space),
        )

    def _checked_keys(self, request: ReserveRequest | LeaseRequest | ExplainRequest) -> ChunkKeys:
        return ChunkKeys(request.keys, request.num_tokens, self._config.chunk_size, request.kv)

    def _kv_names(self, keys: ChunkKeys) -> KVNames | None:
        """What the KV source calls these chunks; None where a client has not said."""
        return keys.kv if self._config.kv_source in NAMING_SOURCES else KVNames(keys.blob)

    def _check_first_chunk(self, first_chunk: int, keys: Sequence[bytes]) -> None:
        if not 0 <= first_chunk <= len(keys):
            raise InvalidInputError(f"first_chunk: got {first_chunk}, expected 0 to {len(keys)}, the chunks")

    def _check_specs(self, request: ReserveRequest) -> None:
        if len(request.space) != KEY_BYTES:
            raise InvalidInputError(f"space: got {len(request.space)} bytes, expected {KEY_BYTES}")
        layers = [spec.layer_idx for spec in request.specs]
        if not layers or len(set(layers)) != len(layers):
            raise InvalidInputError(f"specs: got layers {layers}, expected at least one, and each once")
        for spec in request.specs:
            if spec.dtype not in DTYPE_BYTES or spec.hidden_dim < 1:
                raise InvalidInputError(f"specs: got {spec}, expected a known dtype and a hidden_dim of 1 or more")

    def _reserve(
        self, hold: HoldId, request: ReserveRequest, *, keep: bool = False, caller: HoldId | None = None
    ) -> ReserveReply:
        named = self._checked_keys(request)
        keys = split_keys(named.blob)
        self._check_specs(request)
        self._check_first_chunk(request.first_chunk, keys)
        with self._revisions.admitting(request.space, request.revision):
            reserved = self._store.reserve(
                hold,
                space=request.space,
                keys=keys,
                num_tokens=request.num_tokens,
                first_chunk=request.first_chunk,
                specs=request.specs,
                kv_local=request.kv_local,
                replace=request.keep,
                keep=keep,
                evict=request.evict,
                caller=caller,
            )
        if request.kv_local and (names := self._kv_names(named)) is not None:
            # Noted now, and where that may not be late awaited at the commit: an eviction reported later still counts.
            self._kv.note_stored(names.blob[request.first_chunk * KEY_BYTES :], request.engine)
        if reserved.refused and not self._warned_full:
            self._warned_full = True
            logger.warning(
                "the pool is too small for all that is stored: %d of %d chunks were refused; raise "
                "max_hidden_state_cpu_size (%s GiB). Further refusals are counted, not logged.",
                reserved.refused,
                len(keys) - request.first_chunk,
                self._config.max_hidden_state_cpu_size,
            )
        return ReserveReply(self._pool.incarnation, reserved.runs, reserved.refused)

    def _commit(self, hold: HoldId) -> CommitReply:
        self._kv.settle_notes(self._config.rpc_timeout_s * _KV_SHARE_OF_DEADLINE)
        with self._revisions.committing():
            done = self._store.commit(hold)
        return CommitReply(
            self._pool.incarnation, done.stored, done.present, done.failed, done.prefix_tokens, self._alone
        )

    def _lease(self, hold: HoldId, request: LeaseRequest) -> LeaseReply:
        named, first = self._checked_keys(request), request.first_chunk
        keys = split_keys(named.blob)
        self._check_first_chunk(first, keys)
        found = self._store.lease(hold, keys, request.layers, first_chunk=first, hinted=request.hinted)
        names = self._kv_names(named)
        presence = self._kv.ask(
            names and names.pick(range(first, first + len(found.keys))),
            found.kv_local,
            request.timeout_s * _KV_SHARE_OF_DEADLINE,
        )
        granted = self._store.settle(hold, presence)
        if request.counted:
            with self._lock:
                self._retrieves += 1
                self._hits += granted.num_tokens > 0
                self._asked += request.num_tokens - request.first_chunk * self._config.chunk_size
                self._served += granted.num_tokens
                self._kv_unknown += granted.ended_by == "kv_unknown"
        return LeaseReply(
            self._pool.incarnation,
            granted.num_tokens,
            granted.specs,
            granted.runs,
            granted.must_copy,
            granted.ended_by,
            self._alone,
        )
