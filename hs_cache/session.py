"""One client's operations, as steps: all that the blocking and the asyncio client have in common. No Ray in here."""

import itertools
import logging
import mmap
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch

from hs_cache.config import CacheConfig
from hs_cache.effects import Call, Fetch, Locate, Located, Steps, Work
from hs_cache.errors import (
    CacheClosedError,
    ConfigMismatchError,
    InvalidInputError,
    PoolError,
    ServiceError,
    ServiceTimeoutError,
    StaleIncarnationError,
)
from hs_cache.keys import ChunkKeys, KeySpace, MMSpan, TokenDatabase
from hs_cache.leases import this_process
from hs_cache.messages import (
    AttachReply,
    ClientInfo,
    CommitReply,
    LayerSpec,
    LeaseReply,
    LeaseRequest,
    NodeStatistics,
    ReserveRequest,
    Run,
)
from hs_cache.planning import StorePlan, check_index, check_keys, check_layers, plan_store
from hs_cache.results import CacheStatistics, PrefixHit, StoreResult
from hs_cache.rows import check_dtype, copy_in, copy_out, empty_rows, flat_runs, flatten, torch_dtype, view_rows
from hs_cache.shared_pool import PoolMapping

logger = logging.getLogger(__name__)

T = TypeVar("T")

_ATTACH_TIMEOUT_S = 10.0
_FLOOR_BYTES_PER_S = 64 << 20
"""Slowest transfer that still counts as working; added to the deadline of calls that carry rows."""

_ROW_AXES = 2
_COUNTERS = tuple(name for name in CacheStatistics.__dataclass_fields__ if name != "node")


@dataclass(frozen=True)
class _Link:
    """An attachment to one incarnation of one node's actor. `mapping` is None where its pool can't be opened."""

    located: Located
    incarnation: bytes
    mapping: PoolMapping | None

    @property
    def local(self) -> bool:
        return self.located.peer.node_id == self.located.client_node_id


@dataclass(frozen=True)
class _Ask:
    """A checked retrieve."""

    keys: ChunkKeys
    layers: tuple[int, ...]
    start: int
    stop: int
    dtype: torch.dtype | None
    out: Mapping[int, torch.Tensor]


class Session:
    """The state of one client: settings, attachment, counters; and its operations. Thread-safe.

    Args:
        space: the fields of `KeySpace` except ``chunk_size``.
        strict: raise `ServiceError` instead of turning it into a miss or a failed store.
    """

    def __init__(self, space: Mapping[str, str], *, strict: bool) -> None:
        self._space_fields = dict(space)
        self._key_space(1)  # refuses wrong fields before anything else happens
        self._strict = strict
        self._config: CacheConfig | None = None
        self._database: TokenDatabase | None = None
        self._link: _Link | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._process = this_process()
        self._in_trouble = False
        self._counts = dict.fromkeys(_COUNTERS, 0)

    def __getstate__(self) -> dict[str, Any]:
        return {"space": self._space_fields, "strict": self._strict, "config": self._config, "closed": self._closed}

    def __setstate__(self, state: dict[str, Any]) -> None:
        Session.__init__(self, state["space"], strict=state["strict"])
        if state["config"] is not None:
            self._take_config(state["config"])
        self._closed = state["closed"]

    @property
    def config(self) -> CacheConfig:
        """The service's settings."""
        if self._config is None:
            raise CacheClosedError("the cache is not connected yet")
        return self._config

    @property
    def key_space(self) -> KeySpace:
        """What all keys of this client start from."""
        return self._keys().space

    def chunk_keys(self, token_ids: Any, mm_spans: Sequence[MMSpan]) -> ChunkKeys:
        """Keys of a prefix; no call to anyone."""
        return self._keys().chunk_keys(token_ids, mm_spans=mm_spans)

    def close(self) -> None:
        """No more operations. Rows handed out stay valid, and their leases end as ever."""
        if os.getpid() != self._process.pid:
            return  # the child has no use for it anyway, and may have inherited a locked lock
        with self._lock:
            self._closed, self._link = True, None

    def attach(self) -> Steps[None]:
        """Reach the service, whatever `strict` is.

        Raises:
            ServiceError: it can't be reached.
        """
        yield from self._connected()

    def store(
        self, token_ids: Any, layers: Mapping[int, Any], token_offset: Any, mm_spans: Sequence[MMSpan]
    ) -> Steps[StoreResult]:
        """See `hs_cache.HiddenStateCache.store`."""
        self._check_usable()
        accepted = self.config.hidden_state_layers
        plan = plan_store(self._keys(), accepted, token_ids, layers, token_offset, mm_spans)
        if not plan.num_chunks:
            return StoreResult()
        if not plan.specs:
            return StoreResult(filtered=plan.filtered)
        done = yield from self._attempt(lambda link: self._store_on(link, plan), None)
        if done is None:
            self._count(failed_chunks_total=plan.num_chunks)
            return StoreResult(failed=plan.num_chunks)
        self._count(stored_chunks_total=done.stored, failed_chunks_total=done.failed)
        return StoreResult(done.stored, done.present, 0, done.failed, done.prefix_tokens)

    def retrieve(
        self,
        token_ids: Any,
        layers: Any,
        start: Any,
        stop: Any,
        dtype: Any,
        out: Mapping[int, torch.Tensor] | None,
        mm_spans: Sequence[MMSpan],
    ) -> Steps[PrefixHit]:
        """See `hs_cache.HiddenStateCache.retrieve`."""
        self._check_usable()
        ask = self._check_ask(token_ids, layers, start, stop, dtype, out, mm_spans)
        if not ask.keys:
            return PrefixHit(start=ask.start)
        unreachable = PrefixHit(start=ask.start, ended_by="unreachable")
        hit = yield from self._attempt(lambda link: self._retrieve_on(link, ask), unreachable)
        self._count(
            retrieves_total=1,
            hits_total=bool(hit),
            tokens_asked_total=ask.keys.num_tokens,
            tokens_served_total=sum(len(rows) for rows in hit.layers.values()),
        )
        return hit

    def call(self, method: str, *args: Any, otherwise: T) -> Steps[T]:
        """One plain call to the node's hidden-state actor; `otherwise` when it can't be reached."""
        return self._simple(lambda link: Call(link.located.peer, method, args, self.config.rpc_timeout_s), otherwise)

    def report(self, method: str, what: Any, mm_spans: Sequence[MMSpan] = ()) -> Steps[bool]:
        """Tell the node's KV actor about `what`: keys, or token ids for their chunks. False if it wasn't reached."""
        if isinstance(what, bytes | ChunkKeys) or (
            isinstance(what, list | tuple) and what and isinstance(what[0], bytes)
        ):
            blob = check_keys("keys", what)
        else:
            blob = self.chunk_keys(what, mm_spans).blob

        def told(link: _Link) -> Steps[bool]:
            yield Call(link.located.kv, method, (blob,), self.config.rpc_timeout_s)
            return True

        return self._attempt(told, False)

    def stats(self) -> Steps[CacheStatistics]:
        """See `hs_cache.HiddenStateCache.stats`."""
        nothing: NodeStatistics | None = None
        node = yield from self.call("stats", otherwise=nothing)
        with self._lock:
            return CacheStatistics(**self._counts, node=node)

    def _simple(self, call: Callable[[_Link], Call], otherwise: T) -> Steps[T]:
        def once(link: _Link) -> Steps[T]:
            result: T = yield call(link)
            return result

        return self._attempt(once, otherwise)

    def _attempt(self, body: Callable[[_Link], Steps[T]], otherwise: T) -> Steps[T]:
        """Run `body` on the attachment; once more on a new one if the node's actor was restarted in between."""
        self._check_usable()
        for last in (False, True):
            link = None
            try:
                link = yield from self._connected()
                result = yield from body(link)
            except StaleIncarnationError as stale:
                self._drop(link)
                if last:
                    self._report(ServiceError(f"the node refuses what it has just granted: {stale}"))
            except ServiceError as error:
                if not isinstance(error, ServiceTimeoutError):
                    self._drop(link)
                self._report(error)
                break
            else:
                self._in_trouble = False
                return result
        return otherwise

    def _report(self, error: ServiceError) -> None:
        """Raise it if the caller is strict, else count it, and log it if all was well before."""
        self._count(**{"timeouts_total" if isinstance(error, ServiceTimeoutError) else "unreachable_total": 1})
        if self._strict:
            raise error
        if not self._in_trouble:
            self._in_trouble = True
            # As text: whoever keeps the record would keep the error's frames, and with them the pool.
            logger.warning("the cache can't be reached and counts as empty until it can: %s", str(error))

    def _connected(self) -> Steps[_Link]:
        self._check_usable()
        link = self._link
        if link is None:
            located: Located = yield Locate()
            process = self._process
            info = ClientInfo(process.client_id, process.pid, process.start_time, located.client_node_id)
            reply: AttachReply = yield Call(located.peer, "attach", (info,), _ATTACH_TIMEOUT_S)
            link = self._adopt(located, reply)
        return link

    def _adopt(self, located: Located, reply: AttachReply) -> _Link:
        with self._lock:
            if self._closed:
                raise CacheClosedError("the cache was closed meanwhile")
            self._take_config(CacheConfig(**reply.config))
            if self._link is not None and self._link.incarnation == reply.incarnation:
                return self._link
            mapping, reason = None, reply.reason
            if reply.address is not None:
                try:
                    mapping = PoolMapping.open(reply.address)
                except PoolError as error:
                    reason = str(error)
            if mapping is None:
                logger.info("rows go through the object store, the pool is not shared: %s", reason)
            peer, client_id = located.peer, self._process.client_id
            send = partial(peer.post, "release", reply.incarnation, client_id)
            self._process.releaser.connect(reply.incarnation, send)
            self._link = _Link(located, reply.incarnation, mapping)
            return self._link

    def _drop(self, link: _Link | None) -> None:
        """Forget an attachment. Its mapping ends with the last operation that uses it; results have their own."""
        with self._lock:
            if link is not None and self._link is link:
                self._link = None

    def _take_config(self, config: CacheConfig) -> None:
        if self._config is not None and self._config.chunk_size != config.chunk_size:
            raise ConfigMismatchError(
                f"chunk_size: the service now has {config.chunk_size}, this client has {self._config.chunk_size}; "
                "connect again"
            )
        self._config = config
        space = self._key_space(config.chunk_size)
        self._database = TokenDatabase(space, save_unfull_chunk=config.save_unfull_chunk)

    def _key_space(self, chunk_size: int) -> KeySpace:
        fields: dict[str, Any] = self._space_fields
        return KeySpace(**fields, chunk_size=chunk_size)

    def _keys(self) -> TokenDatabase:
        if self._database is None:
            raise CacheClosedError("the cache is not connected yet")
        return self._database

    def _check_usable(self) -> None:
        if self._closed:
            raise CacheClosedError("the cache is closed; connect() gives a new one")
        if os.getpid() != self._process.pid:
            raise CacheClosedError(
                f"this cache belongs to process {self._process.pid}, and Ray doesn't work in its forked child "
                f"{os.getpid()}: start children with multiprocessing's 'spawn' and connect() there"
            )

    def _count(self, **more: int) -> None:
        with self._lock:
            for name, number in more.items():
                self._counts[name] += number

    def _check_ask(
        self, token_ids: Any, layers: Any, start: Any, stop: Any, dtype: Any, out: Any, mm_spans: Sequence[MMSpan]
    ) -> _Ask:
        keys = self.chunk_keys(token_ids, mm_spans)
        wanted = check_layers(layers)
        num_tokens = len(token_ids)
        first = check_index("start", start)
        last = num_tokens if stop is None else check_index("stop", stop)
        if not 0 <= first <= last <= num_tokens:
            raise InvalidInputError(
                f"start, stop: got {first} and {last}, expected 0 <= start <= stop <= {num_tokens} (the token_ids)"
            )
        if dtype is not None:
            check_dtype("dtype", dtype)
        buffers = {} if out is None else _check_out(out, wanted, last - first, dtype)
        chunks = min(len(keys), -(-last // keys.chunk_size))
        keys = ChunkKeys(b"".join(itertools.islice(keys, chunks)), keys.tokens_before(chunks), keys.chunk_size)
        return _Ask(keys, wanted, first, min(last, keys.num_tokens), dtype, buffers)

    # On one attachment. Whatever ends these early gives up what was held: the client chose the id before the call, so
    # that also holds where the answer never came.

    def _store_on(self, link: _Link, plan: StorePlan) -> Steps[CommitReply]:
        request = ReserveRequest(
            incarnation=link.incarnation,
            client_id=self._process.client_id,
            hold_id=self._process.next_id(),
            space=self.key_space.fingerprint,
            keys=plan.keys.blob,
            num_tokens=plan.keys.num_tokens,
            first_chunk=plan.first_chunk,
            specs=plan.specs,
            kv_local=link.local,
        )
        peer, timeout_s = link.located.peer, self.config.rpc_timeout_s
        if link.mapping is None:
            flat = flatten(plan.rows.values())
            deadline_s = timeout_s + plan.nbytes / _FLOOR_BYTES_PER_S
            far: CommitReply = yield Call(peer, "store_rows", (request, flat), deadline_s)
            return far
        give_up = partial(self._process.releaser.end, link.incarnation, (request.hold_id,))
        copying: Work | None = None
        try:
            reply = yield from self._with_releases(link, "reserve", request)
            if reply.runs:
                memory = link.mapping.write_view()
                copying = Work(partial(copy_in, memory, reply.runs, plan.specs, plan.rows, plan.first_token))
                yield copying
            done: CommitReply = yield Call(
                peer, "commit", (link.incarnation, request.client_id, request.hold_id), timeout_s
            )
        except BaseException:
            _after(copying, give_up)
            raise
        return done

    def _retrieve_on(self, link: _Link, ask: _Ask) -> Steps[PrefixHit]:
        timeout_s = self.config.rpc_timeout_s
        request = LeaseRequest(
            incarnation=link.incarnation,
            client_id=self._process.client_id,
            hold_id=self._process.next_id(),
            keys=ask.keys.blob,
            num_tokens=ask.keys.num_tokens,
            layers=ask.layers,
            timeout_s=timeout_s,
        )
        if link.mapping is None:
            return (yield from self._retrieve_far(link, ask, request))
        give_up = partial(self._process.releaser.end, link.incarnation, (request.hold_id,))
        copying: Work | None = None
        try:
            reply = yield from self._with_releases(link, "lease", request)
            if not reply.num_tokens:
                return PrefixHit(start=ask.start, ended_by=reply.ended_by)
            end = min(reply.num_tokens, ask.stop)
            shared = {} if reply.must_copy else _map_rows(link.mapping, reply, ask, end)
            copied = _Copies(reply, ask, end, without=shared)
            if copied.targets:
                copying = Work(partial(copied.run, link.mapping.write_view(), reply.runs))
                yield copying
        except BaseException:
            _after(copying, give_up)
            raise
        if shared:
            self._process.releaser.watch(link.incarnation, request.hold_id, [m for m, _ in shared.values()])
        else:
            give_up()
        return self._hit(ask, reply, {layer: rows for layer, (_, rows) in shared.items()}, copied.targets)

    def _retrieve_far(self, link: _Link, ask: _Ask, request: LeaseRequest) -> Steps[PrefixHit]:
        reply: LeaseReply
        reply, ref = yield Call(link.located.peer, "retrieve_rows", (request,), request.timeout_s)
        if not reply.num_tokens:
            return PrefixHit(start=ask.start, ended_by=reply.ended_by)
        nbytes = sum(spec.row_bytes for spec in reply.specs) * reply.num_tokens
        flat = yield Fetch(ref, request.timeout_s + nbytes / _FLOOR_BYTES_PER_S)
        copied = _Copies(reply, ask, min(reply.num_tokens, ask.stop), without={})
        if copied.targets:
            yield Work(partial(copied.run, flat, flat_runs(reply.specs, reply.num_tokens)))
        return self._hit(ask, reply, {}, copied.targets)

    def _with_releases(self, link: _Link, method: str, request: Any) -> Steps[Any]:
        """A call that also carries what has ended, so that memory is free again before more is asked for."""
        releases = self._process.releaser.take(link.incarnation)
        try:
            reply = yield Call(
                link.located.peer, method, (replace(request, releases=releases),), self.config.rpc_timeout_s
            )
        except BaseException:
            self._process.releaser.end(link.incarnation, releases)
            raise
        return reply

    def _hit(
        self, ask: _Ask, reply: LeaseReply, shared: dict[int, torch.Tensor], copied: dict[int, torch.Tensor]
    ) -> PrefixHit:
        self._count(zero_copy_total=len(shared), copied_total=len(copied))
        num_tokens = min(reply.num_tokens, ask.stop)
        rows = {layer: shared[layer] if layer in shared else copied[layer] for layer in ask.layers if shared or copied}
        return PrefixHit(num_tokens, ask.start, reply.ended_by if num_tokens < ask.stop else "", rows)


class _Copies:
    """The layers of a reply that are copied: each into the caller's buffer, or into a tensor made for it."""

    def __init__(self, reply: LeaseReply, ask: _Ask, end: int, without: Mapping[int, Any]) -> None:
        self._start, self._end = ask.start, end
        self._specs = [spec for spec in reply.specs if spec.layer_idx not in without and end > ask.start]
        self.targets = {spec.layer_idx: self._target(spec, ask) for spec in self._specs}

    def _target(self, spec: LayerSpec, ask: _Ask) -> torch.Tensor:
        count = self._end - self._start
        given = ask.out.get(spec.layer_idx)
        if given is None:
            return empty_rows(count, spec.hidden_dim, ask.dtype or torch_dtype(spec.dtype))
        if given.shape[1] != spec.hidden_dim:
            raise InvalidInputError(
                f"out: got hidden_dim {given.shape[1]} for layer {spec.layer_idx}, expected {spec.hidden_dim} as stored"
            )
        return given[:count]

    def run(self, memory: Any, runs: Sequence[Run]) -> None:
        for spec in self._specs:
            copy_out(memory, runs, spec, self.targets[spec.layer_idx], self._start, self._end)


def _after(work: Work | None, then: Callable[[], None]) -> None:
    """Call `then` when `work`, if it was begun at all, surely touches nothing any more."""
    if work is None:
        then()
    else:
        work.abandon(then)


def _map_rows(
    mapping: PoolMapping, reply: LeaseReply, ask: _Ask, end: int
) -> dict[int, tuple[mmap.mmap, torch.Tensor]]:
    """Layers that can be handed out without a copy: wanted as they are stored, and in one piece."""
    mapped: dict[int, tuple[mmap.mmap, torch.Tensor]] = {}
    for spec in reply.specs:
        runs = [run for run in reply.runs if run.layer_idx == spec.layer_idx]
        whole = next((r for r in runs if r.start_token <= ask.start < end <= r.start_token + r.num_tokens), None)
        as_stored = spec.layer_idx not in ask.out and ask.dtype in (None, torch_dtype(spec.dtype))
        if whole is None or not as_stored:
            continue
        offset = whole.offset + (ask.start - whole.start_token) * spec.row_bytes
        try:
            private, position = mapping.private_mapping(offset, (end - ask.start) * spec.row_bytes)
        except OSError as error:  # out of file descriptors or mappings: this process's limit, not the cache's
            logger.debug("no mapping for a result, its rows are copied: %s", error)
            break
        mapped[spec.layer_idx] = (private, view_rows(private, position, end - ask.start, spec))
    return mapped


def _check_out(out: Any, layers: tuple[int, ...], num_rows: int, dtype: torch.dtype | None) -> dict[int, torch.Tensor]:
    if not isinstance(out, Mapping):
        raise InvalidInputError(f"out: got {type(out).__name__}, expected {{layer_idx: buffer}}")
    for layer, buffer in out.items():
        if layer not in layers:
            raise InvalidInputError(f"out: got a buffer for layer {layer!r}, expected only layers asked for: {layers}")
        if not isinstance(buffer, torch.Tensor) or buffer.dim() != _ROW_AXES or len(buffer) < num_rows:
            shape = list(buffer.shape) if isinstance(buffer, torch.Tensor) else type(buffer).__name__
            raise InvalidInputError(
                f"out: got {shape} for layer {layer}, expected a tensor [at least {num_rows}, hidden_dim]"
            )
        check_dtype("out.dtype", buffer.dtype)
        if dtype is not None and buffer.dtype != dtype:
            raise InvalidInputError(f"out: got {buffer.dtype} for layer {layer}, expected {dtype} as dtype says")
        if buffer.requires_grad:
            raise InvalidInputError(
                f"out: got a buffer that requires grad for layer {layer}, expected one that doesn't"
            )
    return dict(out)
