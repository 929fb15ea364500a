"""The cache in the place of LMCache's ``HiddenStateStore``, inside an LMCache engine's process. Needs Ray.

``attach(engine)`` puts an `AttachedStore` where the engine had its own store, so that code written for LMCache's store
runs unchanged, and answers its node's `KVActor` which KV the engine has. Facts of LMCache are as of lmcache 0.5.6
(Apache-2.0), ``lmcache/v1/hidden_state_store.py`` and ``cache_engine.py``. Nothing here imports lmcache.
"""

import logging
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from functools import partial
from types import CodeType, FrameType
from typing import Any

import numpy as np
import ray
import torch
from ray.actor import ActorHandle

from hs_cache.client import HiddenStateCache, connect
from hs_cache.config import CacheConfig
from hs_cache.errors import CacheClosedError, ConfigMismatchError, InvalidInputError
from hs_cache.integrations.lmcache_engine import EngineAnswers, chunk_hashes, engine_name, engine_naming
from hs_cache.integrations.lmcache_wire import Registration
from hs_cache.keys import KEY_BYTES, TokenIds, normalise_token_ids
from hs_cache.launch import join
from hs_cache.planning import check_key
from hs_cache.router import KV, find_actor, require_ray

__all__ = ["AttachedStore", "EngineAnswers", "answer_for", "attach"]

logger = logging.getLogger(__name__)

_TELL_TIMEOUT_S = 2.0
_MAX_KEYS = 65_536
_MAX_PROMPT_BYTES = 32 << 20
"""Token ids remembered until someone asks by one of LMCache's keys: few do, and hashing takes longer than copying."""

_ID_BYTES = 8

_LEAVE_S = 5.0
_POLL_S = 0.001
"""How long to wait for threads to leave LMCache's store, in which they are for one call; and between two looks."""

_METHODS = (
    "bind_storage_manager",
    "store_hidden_states",
    "retrieve_hidden_states",
    "num_cached_chunks",
    "has_chunk",
    "drop_key",
    "close",
)
"""What LMCache's store has, and its users call."""


def attach(
    engine: Any,
    cache: HiddenStateCache | None = None,
    *,
    tags: Mapping[str, str] | None = None,
    name: str | None = None,
    even_if_disabled: bool = False,
    **connect_args: Any,
) -> "AttachedStore | None":
    """Replace ``engine.hidden_state_store``, and answer which KV chunks the engine has from then on.

    To be called in the engine's worker process, before or after its ``post_init``. Blocks as `hs_cache.connect` does.
    LMCache's own store is closed, which frees its pool, once no thread is inside it; references to it that someone
    holds reach the new one. A store that threads don't leave in five seconds keeps its pool.

    Args:
        engine: an ``LMCacheEngine``.
        cache: a client of the service; one is connected when it is None, and closed with the store.
        tags: LMCache's request tags, without ``lmcache.tag.``, under which the engine keeps the KV, in that order.
        name: what the engine is called, the same for all its ranks and for no other engine of the node. By default its
            metadata's ``engine_id``; an engine of a single rank may do without either.
        even_if_disabled: do so where the engine has no store, since its ``enable_hidden_state_cache`` is false.
        connect_args: for `hs_cache.connect`; ``model`` is the engine's model name unless given.

    Returns:
        The store; None when the engine has none, or the service's configuration says
        ``enable_hidden_state_cache: false``, and nothing was changed.

    Raises:
        InvalidInputError: `cache` comes with `tags` or arguments for `hs_cache.connect`; `name` is missing.
        ConfigMismatchError: engine and service differ in ``chunk_size``, ``save_unfull_chunk``, or in how they name
            chunks.
        ConfigError, ServiceError: see `hs_cache.connect`.
    """
    if cache is not None and (tags is not None or connect_args):
        given = ", ".join([*(["tags"] if tags is not None else []), *connect_args])
        raise InvalidInputError(f"cache: got a client together with {given}, which are for connecting one")
    if engine.hidden_state_store is None and not even_if_disabled:
        logger.info("the LMCache engine has enable_hidden_state_cache: false, and keeps no hidden states")
        return None
    connected = cache
    if connected is None:
        connected = connect(**{"model": engine.metadata.model_name, "kv_tags": tags, **connect_args})
    if connected is None:
        return None
    try:
        check_engine(engine, connected.config)
        store = AttachedStore(engine, connected, name=name, owns_cache=cache is None)
    except BaseException:
        if cache is None:
            connected.close()
        raise
    _replace(engine, store)
    if engine.storage_manager is not None:
        store.bind_storage_manager(engine.storage_manager)
    return store


def answer_for(engine: Any, *, service: str = "default", name: str | None = None) -> EngineAnswers:
    """Answer which KV chunks `engine` has, for a service with ``kv_source: lmcache``, and nothing else.

    For an engine whose hidden states are stored by clients of their own; `attach` does this by itself. Joins the Ray
    cluster if this process hasn't, and blocks for that. An engine which doesn't name chunks as the service does is not
    believed: its `KVActor` says so in its log.

    Args:
        engine: an ``LMCacheEngine``.
        service: the name of the service.
        name: see `attach`.

    Returns:
        Something to close.

    Raises:
        InvalidInputError: `name` is missing.
    """
    if not ray.is_initialized():
        join()
    return EngineAnswers(engine, partial(_tell, _KVActorHandle(service)), name=name)


def check_engine(engine: Any, config: CacheConfig) -> None:
    """Refuse an engine whose chunks aren't the service's.

    Raises:
        ConfigMismatchError: they differ in ``chunk_size``, ``save_unfull_chunk``, or in how they name chunks.
    """
    if config.kv_source == "lmcache":
        if difference := engine_naming(engine).difference(config):
            raise ConfigMismatchError(difference)
        return
    if engine.config.chunk_size != config.chunk_size:
        raise ConfigMismatchError(
            f"chunk_size: the LMCache engine has {engine.config.chunk_size}, the service {config.chunk_size}"
        )
    logger.warning(
        "hs_cache: the service has kv_source: %s, so it doesn't ask the LMCache engine which KV it has",
        config.kv_source,
    )


class AttachedStore:
    """LMCache's ``HiddenStateStore`` over the cache service: same methods, same signatures.

    What it holds is shared with all clients of the service, survives the engine's process, and is kept in the dtype in
    which it came. Where LMCache's store loses rows this one doesn't, see ``docs/lmcache.md``. Thread-safe.

    Attributes:
        cache: the client behind it, which can more: several layers at once, zero-copy reads, multimodal spans.
    """

    def __init__(self, engine: Any, cache: HiddenStateCache, *, name: str | None, owns_cache: bool) -> None:
        self.cache = cache
        self._engine = engine
        self._name = engine_name(engine, name) if cache.config.kv_source == "lmcache" else name
        self._owns_cache = owns_cache
        self._answers: EngineAnswers | None = None
        self._keys = _KeysByHash(engine, cache)
        self._lock = threading.Lock()
        self._closed = False

    def bind_storage_manager(self, storage_manager: Any) -> None:
        """The engine calls this when it can tell which KV it has. Starts the answers; again is harmless."""
        with self._lock:
            self._check_open()
            if self._answers is None and self.cache.config.kv_source == "lmcache":
                self._answers = answer_for(self._engine, service=self.cache.service, name=self._name)

    def store_hidden_states(
        self, token_ids: TokenIds, hidden_states: torch.Tensor, *, layer_idx: int = 0, token_offset: int = 0
    ) -> int:
        """See `hs_cache.HiddenStateCache.store_hidden_states`."""
        self._check_open()
        stored = self.cache.store_hidden_states(
            token_ids, hidden_states, layer_idx=layer_idx, token_offset=token_offset
        )
        self._keys.remember(token_ids)
        return stored

    def retrieve_hidden_states(self, token_ids: TokenIds, *, layer_idx: int = 0) -> torch.Tensor | None:
        """See `hs_cache.HiddenStateCache.retrieve_hidden_states`."""
        self._check_open()
        rows = self.cache.retrieve_hidden_states(token_ids, layer_idx=layer_idx)
        self._keys.remember(token_ids)
        return rows

    def num_cached_chunks(self) -> int:
        """Chunks that the node has, of all clients; 0 when it can't be reached."""
        self._check_open()
        return self.cache.num_cached_chunks()

    def has_chunk(self, key: Any, layer_idx: int = 0) -> bool:
        """Whether the node has a chunk with that layer.

        Args:
            key: one of the service, 16 bytes, or a ``CacheEngineKey``. The latter is known only of prompts that this
                process lately stored or retrieved; of others the answer is False.
            layer_idx: the storage layer.
        """
        self._check_open()
        known = self._keys.of(key)
        return known is not None and self.cache.has_chunk(known, layer_idx)

    def drop_key(self, key: Any) -> bool:
        """Drop a chunk with all its layers, for everyone; False when there was none. `key` as for `has_chunk`."""
        self._check_open()
        known = self._keys.of(key)
        return known is not None and self.cache.drop_key(known)

    def close(self) -> None:
        """Answer no more, and close a client that `attach` connected. Idempotent; rows handed out stay valid.

        The service keeps the hidden states: without an engine that vouches for their KV they are not served.
        """
        with self._lock:
            self._closed = True
            answers, self._answers = self._answers, None
        if answers is not None:
            answers.close()
        if self._owns_cache:
            self.cache.close()

    def _check_open(self) -> None:
        if self._closed:
            raise CacheClosedError("the store of this LMCache engine has been closed")


def _replace(engine: Any, store: AttachedStore) -> None:
    replaced, engine.hidden_state_store = engine.hidden_state_store, store
    if replaced is None:
        return
    close = replaced.close
    for method in _METHODS:
        setattr(replaced, method, getattr(store, method))
    if isinstance(replaced, AttachedStore) or _left(replaced):
        close()
    else:
        logger.warning(
            "hs_cache: a thread is still inside LMCache's own hidden-state store after %.0f s, so that stays open and "
            "keeps its pool until the process ends",
            _LEAVE_S,
        )


def _left(replaced: Any) -> bool:
    """Whether no thread is inside LMCache's store any more, or can get there: closing it unmaps its pool, which under a
    thread that is inside crashes the process.

    Its public methods have been redirected. A thread that looked one up before may still call it, but what
    touches the pool's memory begins with ``_chunk``, which gives it nothing to do from here on.
    """
    if not hasattr(replaced, "_chunk"):
        return False
    replaced._chunk = lambda token_ids: []
    inside = {code for one in type(replaced).__mro__ for code in map(_code_of, vars(one).values()) if code is not None}
    deadline = time.monotonic() + _LEAVE_S
    while any(map(inside.__contains__, _running())):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def _running() -> Iterator[CodeType]:
    """The code that all threads are in."""
    for top in sys._current_frames().values():
        frame: FrameType | None = top
        while frame is not None:
            yield frame.f_code
            frame = frame.f_back


def _code_of(function: Any) -> CodeType | None:
    return getattr(function, "__code__", None)


class _KVActorHandle:
    """The `KVActor` of this process's node, looked up when it is needed, and again after trouble."""

    def __init__(self, service: str) -> None:
        self._service = service
        self._handle: ActorHandle[Any] | None = None

    def call(self, method: str, *args: Any) -> None:
        """Call, and wait for the end of it."""
        require_ray()
        if self._handle is None:
            self._handle = find_actor(self._service, KV, ray.get_runtime_context().get_node_id())
        try:
            ray.get(getattr(self._handle, method).remote(*args), timeout=_TELL_TIMEOUT_S)
        except BaseException:
            self._handle = None
            raise


def _tell(actor: _KVActorHandle, registration: Registration) -> None:
    actor.call("register_engine", registration)


class _KeysByHash:
    """The service's keys by LMCache's chunk hashes, of what this process lately stored or retrieved. Thread-safe."""

    def __init__(self, engine: Any, cache: HiddenStateCache) -> None:
        self._engine = engine
        self._cache = cache
        self._lock = threading.Lock()  # held for a moment only: stores and retrieves need it
        self._prompts: deque[Any] = deque()
        self._prompt_bytes = 0
        self._hashing = threading.Lock()
        self._keys: OrderedDict[int, bytes] = OrderedDict()

    def remember(self, token_ids: TokenIds) -> None:
        """A prompt was stored or retrieved, so its ids are valid."""
        kept = _copied(token_ids)
        with self._lock:
            self._prompts.append(kept)
            self._prompt_bytes += _nbytes(kept)
            while self._prompt_bytes > _MAX_PROMPT_BYTES:
                self._prompt_bytes -= _nbytes(self._prompts.popleft())

    def of(self, key: Any) -> bytes | None:
        """The service's key for one of either kind; None where it isn't known.

        Raises:
            InvalidInputError: it is neither.
        """
        if isinstance(key, bytes):
            return check_key(key)
        hashed = getattr(key, "chunk_hash", None)
        if not isinstance(hashed, int):
            raise InvalidInputError(
                f"key: got {type(key).__name__}, expected a CacheEngineKey or the {KEY_BYTES} bytes of a chunk key"
            )
        with self._hashing:
            with self._lock:
                prompts, self._prompts, self._prompt_bytes = self._prompts, deque(), 0
            for prompt in prompts:
                self._hash(prompt)
            return self._keys.get(hashed)

    def _hash(self, prompt: TokenIds) -> None:
        tokens = normalise_token_ids(prompt)
        for known, ours in zip(chunk_hashes(self._engine, tokens), self._cache.chunk_keys(tokens), strict=False):
            self._keys[known] = ours
            self._keys.move_to_end(known)
            if len(self._keys) > _MAX_KEYS:
                self._keys.popitem(last=False)


def _copied(token_ids: Any) -> Any:
    """A copy that the caller can't change; of a list one of references, which is quick."""
    if isinstance(token_ids, torch.Tensor):
        return token_ids.detach().to("cpu", copy=True)
    return token_ids.copy() if isinstance(token_ids, np.ndarray) else tuple(token_ids)


def _nbytes(token_ids: Any) -> int:
    return _ID_BYTES * len(token_ids)
