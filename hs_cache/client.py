"""The clients: `connect` gives a `HiddenStateCache`, ``await aconnect`` an `AsyncHiddenStateCache`.

Both drive the same operations (`hs_cache.session`); a method of the one differs from its twin by ``await`` alone.
"""

import asyncio
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import ray
import torch

import hs_cache.tables  # noqa: F401  (notebooks then know how to show what clients give)
from hs_cache.background import Background
from hs_cache.config import CacheConfig, check_service
from hs_cache.errors import ConfigMismatchError, ServiceNotRunningError
from hs_cache.keys import ChunkKeys, KeySpace, MMSpan, TokenIds
from hs_cache.launch import join, start
from hs_cache.planning import check_key
from hs_cache.refs import HiddenStateRef
from hs_cache.results import CacheStatistics, Coverage, Explanation, PrefixHit, StoreResult
from hs_cache.router import Router, is_running
from hs_cache.session import Session
from hs_cache.writer import AsyncPrefixWriter, PrefixWriter

logger = logging.getLogger(__name__)

_FIRST_NODE_S = 10.0
"""How long `connect` waits for the first node of a service that runs without one: its actors may be on their way."""

_POLL_S = 0.1


class _Client:
    """What needs no answer from anyone, and so is the same in both clients."""

    def __init__(self, router: Router, session: Session) -> None:
        self._router = router
        self._session = session
        self._background = Background()

    @property
    def service(self) -> str:
        """The name of the service."""
        return self._router.service

    @property
    def config(self) -> CacheConfig:
        """The service's settings."""
        return self._session.config

    @property
    def chunk_size(self) -> int:
        """Tokens per chunk, as the service is configured."""
        return self._session.config.chunk_size

    @property
    def key_space(self) -> KeySpace:
        """What must match, besides tokens and spans, for this client to find a prefix."""
        return self._session.key_space

    def chunk_keys(self, token_ids: TokenIds, *, mm_spans: Sequence[MMSpan] = ()) -> ChunkKeys:
        """The keys of a prefix's chunks, head first: whole chunks, and the short last one with ``save_unfull_chunk``.

        Raises:
            InvalidInputError: `token_ids` or `mm_spans` is wrong.
        """
        return self._session.chunk_keys(token_ids, mm_spans)

    def parts(self) -> tuple[Router, Session]:
        """What carries operations out, and the client's state; for integrations of this package."""
        return self._router, self._session

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of service {self._router.service!r}, {self._session.key_space!r}>"


class HiddenStateCache(_Client):
    """A client of the cache service. Thread-safe; pickles, and reconnects in the process where it is unpickled.

    Token ids are always those of the full prefix. Trouble with the service counts as a miss or a failed store, is
    logged once and counted; with ``strict=True`` it raises `ServiceError`. Wrong arguments raise `InvalidInputError`
    before anything is changed, any call after `close` raises `CacheClosedError`. A call blocks for at most
    ``rpc_timeout_s`` per round trip (two for a store, one for a retrieve) and for copying rows.
    """

    def __init__(self, router: Router, session: Session) -> None:
        super().__init__(router, session)
        self._kv = KVReports(router, session)

    @property
    def kv(self) -> "KVReports":
        """To tell this node's KV actor which KV the engine wrote and which it evicted."""
        return self._kv

    def __enter__(self) -> "HiddenStateCache":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Idempotent. Rows already handed out stay valid.

        Blocks for the `store_async` that is being carried out; those that have not begun fail with `CacheClosedError`.
        """
        self._background.close()
        self._session.close()

    def store(
        self,
        token_ids: TokenIds,
        layers: Mapping[int, Any],
        *,
        token_offset: int = 0,
        mm_spans: Sequence[MMSpan] = (),
    ) -> StoreResult:
        """Store rows of several layers; all layers of a chunk appear together, or not at all.

        Args:
            token_ids: the full prefix.
            layers: layer_idx → rows ``[len(token_ids) - token_offset, hidden_dim]`` of a floating dtype, on any device
                and of any stride (NumPy arrays too). They are kept in that dtype; a layer has one hidden_dim and dtype
                per key space. Rows on a GPU are copied as they are behind the work that its current stream has now,
                straight into the pool; this blocks for that work.
            token_offset: the token to which row 0 belongs. Rows of a chunk of which only a part is given are held in
                this client until the rest comes in other calls, in any order; `writer` does the same for less.
            mm_spans: ``(start, length, content_hash)`` of the placeholder tokens of audio, images and the like.

        Returns:
            Counts of the chunks that are complete now, by outcome, and how far the prefix is retrievable. Whoever
            stored a chunk first wins.

        Raises:
            InvalidInputError: an argument is wrong.
        """
        return self._router.run(self._session.store(token_ids, layers, token_offset, mm_spans))

    def store_async(
        self,
        token_ids: TokenIds,
        layers: Mapping[int, Any],
        *,
        token_offset: int = 0,
        mm_spans: Sequence[MMSpan] = (),
    ) -> "Future[StoreResult]":
        """`store` in the background, on one thread for this client, in the order of the calls. Returns at once.

        Rows must not be written to before the future is done; for those on a GPU, work that its current stream has
        now may still write them. Clone what a CUDA graph puts into the same buffer at every replay. Rows may be deleted
        at any time: they are kept until they are stored, so don't submit faster than a node takes them. `close` fails
        what has not begun by then.

        Args:
            token_ids, layers, token_offset, mm_spans: as `store` takes them.

        Returns:
            A future of what `store` returns or raises. Cancelled before its turn it comes to nothing; afterwards the
            rows are stored all the same.

        Raises:
            InvalidInputError: an argument is wrong. That a layer has another hidden_dim or dtype in this key space is
                found in its turn, and raised by the future.
        """
        return self._background.submit(
            partial(self._router.run, self._session.store(token_ids, layers, token_offset, mm_spans))
        )

    def writer(self, request_id: str, *, mm_spans: Sequence[MMSpan] = ()) -> PrefixWriter:
        """A writer for one request, which gets rows step by step and needs no prefix again.

        Args:
            request_id: any name; one open writer has it at a time in this client.
            mm_spans: of the whole prompt, as `store` takes them.

        Raises:
            InvalidInputError: an argument is wrong, or that request's writer is still open.
        """
        request = self._session.open_request(request_id, mm_spans)
        return PrefixWriter(self._router, self._session, request_id, request)

    def retrieve(
        self,
        token_ids: TokenIds,
        layers: int | Sequence[int],
        *,
        start: int = 0,
        stop: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        out: Mapping[int, torch.Tensor] | None = None,
        mm_spans: Sequence[MMSpan] = (),
        wait_s: float = 0.0,
    ) -> PrefixHit:
        """The longest prefix where every chunk has KV and all of `layers`.

        On the service's node, and where a layer lies in one piece, rows are views of the pool: no copy is made, and
        writing into them is private to the caller.

        Args:
            token_ids: the full prefix.
            layers: one layer_idx or several.
            start, stop: return the rows of these tokens only; the prefix before them has to be there all the same.
            dtype: convert to this dtype while copying; None keeps the stored one.
            device: where the rows are wanted, "cuda" or "cuda:1" say; None and "cpu" are the CPU. A copy straight from
                the pool is begun on the device's current stream: what that is given next sees the rows, and nothing
                blocks but the first use, which page-locks this process's mapping of the pool. Rows of another node are
                copied before this returns.
            out: layer_idx → buffer ``[at least stop - start, hidden_dim]`` to copy into, on the CPU or a GPU; what
                comes back are its first rows. After an error, a miss or a cancellation a buffer has an unspecified
                content.
            mm_spans: as given to `store`.
            wait_s: wait up to this many seconds for all tokens (or those before `stop`), if another process is about to
                store them; 0 takes what is there.

        Raises:
            InvalidInputError: an argument is wrong.
        """
        return self._router.run(
            self._session.retrieve(token_ids, layers, start, stop, dtype, device, out, mm_spans, wait_s)
        )

    def plan(
        self,
        token_ids: TokenIds,
        layers: int | Sequence[int],
        *,
        mm_spans: Sequence[MMSpan] = (),
        hold: bool = False,
    ) -> Coverage:
        """How far `retrieve` would get: what an engine asks before prefill. Moves no rows to this process.

        One round trip; more only where other nodes have the rest of the prefix.

        Args:
            token_ids, layers, mm_spans: as for `retrieve`.
            hold: lease what is found, so that it is still there when it is retrieved. What other nodes have is put into
                their object store for that.

        Raises:
            InvalidInputError: an argument is wrong.
        """
        return self._router.run(self._session.plan(token_ids, layers, mm_spans, hold))

    def explain(
        self, token_ids: TokenIds, layers: int | Sequence[int], *, mm_spans: Sequence[MMSpan] = ()
    ) -> Explanation:
        """Why each chunk of a prefix can be had with all of `layers`, or not: a list of `hs_cache.ChunkReport`, head
        first. Changes nothing.

        Raises:
            InvalidInputError: an argument is wrong.
        """
        return self._router.run(self._session.explain(token_ids, layers, mm_spans))

    def locate(
        self,
        prompt: TokenIds | ChunkKeys,
        layers: int | Sequence[int],
        *,
        mm_spans: Sequence[MMSpan] = (),
        nodes: Collection[str] | None = None,
        num_asked: int | None = 4,
        timeout_s: float | None = None,
    ) -> dict[str, int]:
        """Which nodes have a prefix: what decides where to send a request. Changes nothing.

        Costs one round trip to the controller, and mostly one more to some nodes at once.

        Args:
            prompt: token ids, or the keys that `chunk_keys` made of them.
            layers, mm_spans: as for `retrieve`.
            nodes: which nodes to consider, by their ids; None for all.
            num_asked: nodes that are asked at once, those first that have the most as far as the controller knows, for
                how much all of `layers` are there and KV is present, on that very node; again, as long as one that was
                not asked may have more than the best that was. None asks all at once, 0 none. What is said of nodes
                that were not asked is what the controller knows: chunks that are there, if only in some layers, or
                without KV.
            timeout_s: in which all has to be done; None for the service's ``rpc_timeout_s``.

        Returns:
            Ray's hex id of the node to the number of tokens from the first on, the most first. Nodes without any are
            left out, and those that don't answer.

        Raises:
            InvalidInputError: an argument is wrong.
        """
        return self._router.run(self._session.locate(prompt, layers, mm_spans, nodes, num_asked, timeout_s))

    def retrieve_ref(
        self, token_ids: TokenIds, layers: int | Sequence[int], *, mm_spans: Sequence[MMSpan] = ()
    ) -> HiddenStateRef:
        """As `retrieve`, but the rows stay in the cluster's object store, for a stage on another node to get.

        Raises:
            InvalidInputError: an argument is wrong.
        """
        ask, pieces = self._router.run(self._session.retrieve_pieces(token_ids, layers, mm_spans))
        return HiddenStateRef(self._router.service, self._session.config, ask, pieces)

    def store_hidden_states(
        self, token_ids: TokenIds, hidden_states: Any, *, layer_idx: int = 0, token_offset: int = 0
    ) -> int:
        """LMCache's ``HiddenStateStore.store_hidden_states``: `store` for one layer; returns chunks newly stored."""
        return self._router.run(self._session.store(token_ids, {layer_idx: hidden_states}, token_offset, ())).stored

    def retrieve_hidden_states(self, token_ids: TokenIds, *, layer_idx: int = 0) -> torch.Tensor | None:
        """LMCache's ``HiddenStateStore.retrieve_hidden_states``: CPU float32 ``[n, hidden_dim]``, None on a miss."""
        return _rows(
            self._router.run(self._session.retrieve(token_ids, layer_idx, 0, None, torch.float32, None, None, (), 0.0)),
            layer_idx,
        )

    def has_chunk(self, key: bytes, layer_idx: int = 0) -> bool:
        """Whether the node has this chunk with that layer; no effect on what is evicted next."""
        return self._router.run(self._session.call("has_chunk", check_key(key), layer_idx, otherwise=False))

    def num_cached_chunks(self) -> int:
        """Chunks that the node has, of all key spaces; 0 when it can't be reached."""
        return self._router.run(self._session.call("num_cached_chunks", otherwise=0))

    def drop_key(self, key: bytes) -> bool:
        """Drop a chunk with all its layers; False when there was none. Rows handed out stay valid."""
        return self._router.run(self._session.call("drop_key", check_key(key), otherwise=False))

    def stats(self) -> CacheStatistics:
        """This client's counters, and its node's statistics."""
        return self._router.run(self._session.stats())


class AsyncHiddenStateCache(_Client):
    """`HiddenStateCache` for asyncio, method by method; copies run on a thread, so the event loop is never blocked.

    A coroutine takes down the current stream of a GPU when it begins to run: await it within the ``with`` block of its
    stream, or use `store_async`, which does so when it is called.
    """

    def __init__(self, router: Router, session: Session) -> None:
        super().__init__(router, session)
        self._kv = AsyncKVReports(router, session)

    @property
    def kv(self) -> "AsyncKVReports":
        """See `HiddenStateCache.kv`."""
        return self._kv

    async def __aenter__(self) -> "AsyncHiddenStateCache":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """See `HiddenStateCache.close`."""
        try:
            await asyncio.to_thread(self._background.close)
        finally:
            self._session.close()

    async def store(
        self,
        token_ids: TokenIds,
        layers: Mapping[int, Any],
        *,
        token_offset: int = 0,
        mm_spans: Sequence[MMSpan] = (),
    ) -> StoreResult:
        """See `HiddenStateCache.store`. `layers` must not be written to before this returns."""
        return await self._router.arun(self._session.store(token_ids, layers, token_offset, mm_spans))

    def store_async(
        self,
        token_ids: TokenIds,
        layers: Mapping[int, Any],
        *,
        token_offset: int = 0,
        mm_spans: Sequence[MMSpan] = (),
    ) -> "asyncio.Future[StoreResult]":
        """See `HiddenStateCache.store_async`; not a coroutine, as it waits for nobody. To be called from the event loop
        that the future belongs to."""
        loop = asyncio.get_running_loop()
        steps = self._session.store(token_ids, layers, token_offset, mm_spans)
        future = asyncio.wrap_future(self._background.submit(partial(self._router.run, steps)), loop=loop)
        future.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # it may go unread
        return future

    def writer(self, request_id: str, *, mm_spans: Sequence[MMSpan] = ()) -> AsyncPrefixWriter:
        """See `HiddenStateCache.writer`; not a coroutine, as it waits for nobody."""
        request = self._session.open_request(request_id, mm_spans)
        return AsyncPrefixWriter(self._router, self._session, request_id, request)

    async def retrieve(
        self,
        token_ids: TokenIds,
        layers: int | Sequence[int],
        *,
        start: int = 0,
        stop: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        out: Mapping[int, torch.Tensor] | None = None,
        mm_spans: Sequence[MMSpan] = (),
        wait_s: float = 0.0,
    ) -> PrefixHit:
        """See `HiddenStateCache.retrieve`."""
        return await self._router.arun(
            self._session.retrieve(token_ids, layers, start, stop, dtype, device, out, mm_spans, wait_s)
        )

    async def plan(
        self,
        token_ids: TokenIds,
        layers: int | Sequence[int],
        *,
        mm_spans: Sequence[MMSpan] = (),
        hold: bool = False,
    ) -> Coverage:
        """See `HiddenStateCache.plan`."""
        return await self._router.arun(self._session.plan(token_ids, layers, mm_spans, hold))

    async def explain(
        self, token_ids: TokenIds, layers: int | Sequence[int], *, mm_spans: Sequence[MMSpan] = ()
    ) -> Explanation:
        """See `HiddenStateCache.explain`."""
        return await self._router.arun(self._session.explain(token_ids, layers, mm_spans))

    async def locate(
        self,
        prompt: TokenIds | ChunkKeys,
        layers: int | Sequence[int],
        *,
        mm_spans: Sequence[MMSpan] = (),
        nodes: Collection[str] | None = None,
        num_asked: int | None = 4,
        timeout_s: float | None = None,
    ) -> dict[str, int]:
        """See `HiddenStateCache.locate`."""
        return await self._router.arun(self._session.locate(prompt, layers, mm_spans, nodes, num_asked, timeout_s))

    async def retrieve_ref(
        self, token_ids: TokenIds, layers: int | Sequence[int], *, mm_spans: Sequence[MMSpan] = ()
    ) -> HiddenStateRef:
        """See `HiddenStateCache.retrieve_ref`."""
        ask, pieces = await self._router.arun(self._session.retrieve_pieces(token_ids, layers, mm_spans))
        return HiddenStateRef(self._router.service, self._session.config, ask, pieces)

    async def store_hidden_states(
        self, token_ids: TokenIds, hidden_states: Any, *, layer_idx: int = 0, token_offset: int = 0
    ) -> int:
        """See `HiddenStateCache.store_hidden_states`."""
        return (
            await self._router.arun(self._session.store(token_ids, {layer_idx: hidden_states}, token_offset, ()))
        ).stored

    async def retrieve_hidden_states(self, token_ids: TokenIds, *, layer_idx: int = 0) -> torch.Tensor | None:
        """See `HiddenStateCache.retrieve_hidden_states`."""
        return _rows(
            await self._router.arun(
                self._session.retrieve(token_ids, layer_idx, 0, None, torch.float32, None, None, (), 0.0)
            ),
            layer_idx,
        )

    async def has_chunk(self, key: bytes, layer_idx: int = 0) -> bool:
        """See `HiddenStateCache.has_chunk`."""
        return await self._router.arun(self._session.call("has_chunk", check_key(key), layer_idx, otherwise=False))

    async def num_cached_chunks(self) -> int:
        """See `HiddenStateCache.num_cached_chunks`."""
        return await self._router.arun(self._session.call("num_cached_chunks", otherwise=0))

    async def drop_key(self, key: bytes) -> bool:
        """See `HiddenStateCache.drop_key`."""
        return await self._router.arun(self._session.call("drop_key", check_key(key), otherwise=False))

    async def stats(self) -> CacheStatistics:
        """See `HiddenStateCache.stats`."""
        return await self._router.arun(self._session.stats())


class KVReports:
    """What an engine tells its node's KV actor; ``cache.kv``.

    Each returns False when the actor did not answer in time, or the caller's node has none. Something may be missing
    then, so with the next report all that this engine has said counts as unknown; `resync` says it anew.

    `what` is token ids, whose chunks (as `HiddenStateCache.chunk_keys` has them) are meant, or keys: a blob,
    `ChunkKeys`, or a list of keys.
    """

    def __init__(self, router: Router, session: Session) -> None:
        self._router = router
        self._session = session

    def report_stored(self, what: Any, *, mm_spans: Sequence[MMSpan] = ()) -> bool:
        """KV of these chunks was written."""
        return self._router.run(self._session.report("report_stored", what, mm_spans))

    def report_evicted(self, what: Any, *, mm_spans: Sequence[MMSpan] = ()) -> bool:
        """KV of these chunks is gone: the next retrieve drops their hidden states, and ends before them.

        Token ids mean all chunks of that prompt. Engines evict tails: ``report_evicted(cache.chunk_keys(ids)[n:])``
        leaves the first n.
        """
        return self._router.run(self._session.report("report_evicted", what, mm_spans))

    def resync(self, keys: Any) -> bool:
        """These chunks are all whose KV the engine holds; everything else is gone."""
        return self._router.run(self._session.report("resync", keys))

    def clear(self) -> bool:
        """The engine dropped all of its KV."""
        return self._router.run(self._session.report("resync", b""))


class AsyncKVReports:
    """See `KVReports`."""

    def __init__(self, router: Router, session: Session) -> None:
        self._router = router
        self._session = session

    async def report_stored(self, what: Any, *, mm_spans: Sequence[MMSpan] = ()) -> bool:
        """See `KVReports.report_stored`."""
        return await self._router.arun(self._session.report("report_stored", what, mm_spans))

    async def report_evicted(self, what: Any, *, mm_spans: Sequence[MMSpan] = ()) -> bool:
        """See `KVReports.report_evicted`."""
        return await self._router.arun(self._session.report("report_evicted", what, mm_spans))

    async def resync(self, keys: Any) -> bool:
        """See `KVReports.resync`."""
        return await self._router.arun(self._session.report("resync", keys))

    async def clear(self) -> bool:
        """See `KVReports.clear`."""
        return await self._router.arun(self._session.report("resync", b""))


def connect(
    config: str | Path | Mapping[str, Any] | CacheConfig | None = None,
    *,
    service: str = "default",
    model: str = "",
    model_revision: str = "",
    lora_id: str = "",
    cache_salt: str = "",
    shard: str = "",
    engine: str = "",
    kv_tags: Mapping[str, str] | None = None,
    strict: bool = False,
) -> HiddenStateCache | None:
    """Join the service of this Ray cluster, or start it on this cluster's nodes. Blocks until it answers.

    Joins a Ray cluster first, or starts one on this machine, if ``ray.init`` wasn't called yet.

    Args:
        config: settings for a service that has to be started: a YAML file, a mapping, or a `CacheConfig`; see
            `CacheConfig.load`. A running service keeps its own, and a difference is logged.
        service: its name, of letters, digits, ``-``, ``_`` and ``.``.
        model, model_revision, lora_id, cache_salt, shard: what must match, besides tokens and spans, for prefixes to be
            shared. Without a revision it is the model's current one, see `hs_cache.bump_revision`, and stays that: this
            client never moves to another by itself, and its stores fail once another is current.
            `hs_cache.lora_identity` makes a ``lora_id`` that differs when an adapter's weights do.
        engine: which engine this client belongs to, any name, where a node has several: its stores and KV reports are
            that engine's, and what one evicts counts as absent only when no other has it.
        kv_tags: with ``kv_source: lmcache``, the tags (``lmcache.tag.*``) under which the engine keeps the KV. They
            must match too: KV under one tag may go while that under another stays.
        strict: raise `ServiceError` where trouble with the service would count as a miss or a failed store.

    Returns:
        A client; None when the configuration says ``enable_hidden_state_cache: false``.

    Raises:
        ConfigError: the configuration is wrong.
        ConfigMismatchError: the service runs with another ``chunk_size`` than `config` says.
        ServiceNotRunningError: it runs, but has had no node for ten seconds.
        ServiceError: the service can't be reached or started, or nobody can say which revision is current.
        PoolTooLargeError: a node has less memory than ``max_hidden_state_cpu_size``.
    """
    space = _space(model, model_revision, lora_id, cache_salt, shard, kv_tags)
    connected = _connect(config, service, Session(space, strict=strict, engine=engine))
    return HiddenStateCache(*connected) if connected else None


async def aconnect(
    config: str | Path | Mapping[str, Any] | CacheConfig | None = None,
    *,
    service: str = "default",
    model: str = "",
    model_revision: str = "",
    lora_id: str = "",
    cache_salt: str = "",
    shard: str = "",
    engine: str = "",
    kv_tags: Mapping[str, str] | None = None,
    strict: bool = False,
) -> AsyncHiddenStateCache | None:
    """See `connect`. Where Ray isn't initialised yet this happens on a thread, and Ray leaves SIGTERM alone then."""
    space = _space(model, model_revision, lora_id, cache_salt, shard, kv_tags)
    session = Session(space, strict=strict, engine=engine)
    connected = await asyncio.to_thread(_connect, config, service, session)
    return AsyncHiddenStateCache(*connected) if connected else None


def _space(
    model: str, model_revision: str, lora_id: str, cache_salt: str, shard: str, kv_tags: Mapping[str, str] | None
) -> dict[str, Any]:
    return {
        "model": model,
        "model_revision": model_revision,
        "lora_id": lora_id,
        "cache_salt": cache_salt,
        "shard": shard,
        "kv_tags": () if kv_tags is None else kv_tags,
    }


def _connect(config: Any, service: str, session: Session) -> tuple[Router, Session] | None:
    wanted = CacheConfig.load(config)
    check_service(service)
    if wanted.is_set("enable_hidden_state_cache") and not wanted.enable_hidden_state_cache:
        return None
    if not ray.is_initialized():
        join()
    router = Router(service)
    deadline: float | None = None
    while True:
        try:
            router.run(session.attach())
            break
        except ServiceNotRunningError:
            if deadline is None:  # not before: an actor that is being restarted may have been waited for until now
                deadline = time.monotonic() + _FIRST_NODE_S
            if not is_running(service):
                start(wanted, service=service)
            elif time.monotonic() > deadline:
                raise
            else:
                time.sleep(_POLL_S)
    if wanted.is_set("chunk_size") and wanted.chunk_size != session.config.chunk_size:
        raise ConfigMismatchError(
            f"chunk_size: the running service {service!r} has {session.config.chunk_size}, "
            f"config says {wanted.chunk_size}"
        )
    models = {source.model for source in session.config.kv_events}
    if session.config.kv_source == "vllm_events" and session.key_space.model not in models:
        logger.warning(
            "hs_cache: service %r listens to engines of the models %s (kv_events), not of %r, whose KV is unknown",
            service,
            ", ".join(map(repr, sorted(models))),
            session.key_space.model,
        )
    if differing := wanted.differences(session.config):
        logger.warning("hs_cache: service %r runs already, and keeps its settings: %s", service, "; ".join(differing))
    return router, session


def _rows(hit: PrefixHit, layer_idx: int) -> torch.Tensor | None:
    return hit[layer_idx] if hit else None
