"""The engine's side of ``kv_source: lmcache``: a live LMCache engine says which chunks it has. Needs no Ray.

What is used of LMCache is as of lmcache 0.5.6. Nothing here pins or touches a chunk, so that being asked changes
nothing in what the engine evicts.
"""

import asyncio
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from hs_cache.integrations.lmcache_wire import (
    HELLO,
    TOKEN_BYTES,
    Question,
    WireError,
    encode_answer,
    read_question,
    receive,
    require_same_user,
    send,
)
from hs_cache.keys import KEY_BYTES
from hs_cache.kv_presence import Presence
from hs_cache.lmcache_names import chunk_hash

logger = logging.getLogger(__name__)

_HEARTBEAT_S = 1.0
_MAX_CONNECTIONS = 8
_SEND_S = 5.0
"""How long the rest of a message, or room for an answer, may take before the connection is given up."""

_WAVE = 16
"""Keys that a remote store is asked for at a time."""

_BACKENDS = "lmcache.v1.storage_backend."
_LOCAL = frozenset({_BACKENDS + "local_cpu_backend.LocalCPUBackend", _BACKENDS + "local_disk_backend.LocalDiskBackend"})
"""Backends which know for certain what they have. Others may take trouble for absence, so their no is no answer."""

_REMOTE = _BACKENDS + "remote_backend.RemoteBackend"
_AUDIT = _BACKENDS + "audit_backend.AuditBackend"


class Told(Protocol):
    """Where an engine makes itself known: `hs_cache.integrations.lmcache_source.LMCacheSource.register_engine`."""

    def __call__(self, name: str, rank: int, address: str, token: bytes) -> None:
        """May block for a moment; may raise, and is called again a second later."""
        ...


def engine_name(engine: Any) -> str:
    """What an engine is called: the same for all its ranks, where vLLM or the configuration gives it a name."""
    return str(engine.metadata.engine_id or engine.config.lmcache_instance_id or f"process {os.getpid()}")


@dataclass(frozen=True)
class _Backend:
    name: str
    backend: Any
    kind: str


class EngineAnswers:
    """Answers its node's `KVActor` which chunks an ``LMCacheEngine`` has, and tells it every second where to ask.

    One daemon thread listens, one keeps telling, and one serves each connection. A rank that keeps no KV, since
    LMCache's ``save_only_first_rank`` leaves that to the first, has no say and does nothing.

    Args:
        engine: it may get its storage manager later; until then everything is unknown.
        tell: makes it known.
        name: what the engine is called, the same for all its ranks; see `engine_name`.

    Attributes:
        attempts_total: how often it made itself known, or tried.
    """

    def __init__(self, engine: Any, tell: Told, *, name: str | None = None) -> None:
        self.attempts_total = 0
        self._lookup = Lookup(engine)
        self._tell = tell
        self._name = engine_name(engine) if name is None else name
        self._rank = int(engine.metadata.worker_id)
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._address = f"hs_cache/lmcache/{os.getpid()}/{secrets.token_hex(8)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind("\0" + self._address)
        self._listener.listen(_MAX_CONNECTIONS)
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._closed = threading.Event()
        work = {"listens": self._accept, "tells": self._keep_telling}
        if engine.save_only_first_rank and not engine.metadata.is_first_rank():
            work = {}
        self._threads = [self._begin(one, what) for what, one in work.items()]

    def _begin(self, work: Callable[[], None], what: str) -> threading.Thread:
        thread = threading.Thread(target=work, name=f"hs_cache-lmcache-{what}", daemon=True)
        thread.start()
        return thread

    def close(self) -> None:
        """Answer no more; whoever asks finds nobody, and forgets the engine. Idempotent.

        Blocks for telling under way; an answer under way is not waited for.
        """
        self._closed.set()
        with self._lock:
            connections, self._connections = self._connections, set()
        for open_socket in (self._listener, *connections):
            with suppress(OSError):
                open_socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for it
            open_socket.close()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_SEND_S)

    def _keep_telling(self) -> None:
        trouble = ""
        while True:
            try:
                self._tell(self._name, self._rank, self._address, self._token)
                trouble = ""
            # Ray's errors, or those of leaving the cluster: the engine must not notice, and the next time may do.
            except Exception as error:
                if not trouble and not self._closed.is_set():
                    trouble = type(error).__name__
                    logger.warning(
                        "LMCache engine %r, rank %d, can't make itself known, so its KV counts as unknown: %s: %s",
                        self._name,
                        self._rank,
                        trouble,
                        error,
                    )
            self.attempts_total += 1
            if self._closed.wait(_HEARTBEAT_S):
                return

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if self._closed.is_set():
                    return
                logger.warning("an LMCache engine can't take a question: %s", error)  # out of file descriptors, say
                self._closed.wait(_HEARTBEAT_S)
                continue
            with self._lock:
                full = len(self._connections) >= _MAX_CONNECTIONS or self._closed.is_set()
                if not full:
                    self._connections.add(connection)
            if full:  # whoever has them is stuck in a storage backend
                connection.close()
            else:
                name = "hs_cache-lmcache-answers"
                threading.Thread(target=self._serve, args=(connection,), name=name, daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            self._greet(connection)
            while (question := read_question(connection, _SEND_S)) is not None:
                answer = self._lookup.presence(question)
                send(connection, encode_answer(answer), time.monotonic() + _SEND_S)
        except (WireError, OSError) as error:
            if not self._closed.is_set():
                logger.debug("a connection to an LMCache engine ends: %s", error)
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.close()

    def _greet(self, connection: socket.socket) -> None:
        require_same_user(connection)
        deadline = time.monotonic() + _SEND_S
        hello = receive(connection, len(HELLO) + TOKEN_BYTES, deadline)
        if not secrets.compare_digest(hello, HELLO + self._token):
            raise WireError("it doesn't know the token, or speaks another version")
        send(connection, HELLO, deadline)


class Lookup:
    """Which chunks an ``LMCacheEngine`` has. Thread-safe, as LMCache's backends are.

    A chunk is *absent* only when every storage backend says so that can be believed: trouble, backends that are
    bypassed or frozen out, writes under way, and backends that may take trouble for absence make it *unknown*. So is
    everything behind the first absent chunk, which no prefix reaches.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._in_trouble = False

    def presence(self, question: Question) -> bytes:
        """One `Presence` per chunk, as a byte. Blocks for at most ``question.timeout_s``, unless a local backend does.

        Never raises.
        """
        states = bytearray([Presence.UNKNOWN]) * (len(question.names) // KEY_BYTES)
        try:
            self._look(question, states, time.monotonic() + question.timeout_s)
            self._in_trouble = False
        # LMCache's, or a plugin's: whatever it is, what isn't known by now stays unknown.
        except Exception as error:
            if not self._in_trouble:
                self._in_trouble = True
                logger.warning("an LMCache engine can't say which chunks it has: %s: %s", type(error).__name__, error)
        return bytes(states)

    def _look(self, question: Question, states: bytearray, deadline: float) -> None:
        manager = self._engine.storage_manager
        if manager is None or not self._engine.is_healthy():
            return
        keys = self._keys(question)
        per_chunk = len(keys) // len(states) if states else 1
        backends = _active(manager)
        found = 0
        while found < len(keys) and time.monotonic() < deadline:
            found += _count(manager, backends, keys[found:], deadline)
            states[: found // per_chunk] = bytes([Presence.PRESENT]) * (found // per_chunk)
            if found == len(keys):
                break
            # A prefix is counted backend by backend, so what ended it may be in one whose turn was over.
            state = _state_of(manager, backends, keys[found], deadline)
            if state is not Presence.PRESENT:
                states[found // per_chunk] = state
                break
            found += 1
            states[: found // per_chunk] = bytes([Presence.PRESENT]) * (found // per_chunk)

    def _keys(self, question: Question) -> list[Any]:
        """LMCache's keys, in order: one per chunk, or with layer-wise storage one per chunk and layer."""
        database = self._engine.token_database
        configs = {f"lmcache.tag.{name}": value for name, value in question.tags} or None
        signed = database.hash_func is hash
        keys: list[Any] = []
        for at in range(0, len(question.names), KEY_BYTES):
            hashed = chunk_hash(question.names[at : at + KEY_BYTES], signed=signed)
            key = database._make_key_by_hash(hashed, configs)
            keys += key.split_layers(self._engine.num_layers) if self._engine.use_layerwise else [key]
        return keys


def _active(manager: Any) -> list[_Backend]:
    found = []
    for name, backend in manager.get_active_storage_backends():
        kind = _kind(backend)
        if kind == _AUDIT:
            kind = _kind(backend.real_backend)
            backend = backend.real_backend if kind == _REMOTE else backend  # noqa: PLW2901  (its connection is asked)
        found.append(_Backend(name, backend, kind))
    return found


def _kind(backend: Any) -> str:
    return f"{type(backend).__module__}.{type(backend).__qualname__}"


def _count(manager: Any, backends: Sequence[_Backend], keys: list[Any], deadline: float) -> int:
    """How many of `keys`, from the first on, are there, counted backend by backend."""
    found = 0
    # A remote store is asked below: `RemoteBackend` has no deadline.
    if others := [one.name for one in backends if one.kind != _REMOTE]:
        found, _ = manager.batched_contains(keys, search_range=others)
    for one in backends:
        while one.kind == _REMOTE and found < len(keys):
            asked = keys[found : found + _WAVE]
            answers = _ask_remote(one.backend, asked, deadline)
            there = next((at for at, answer in enumerate(answers) if answer is not True), len(answers))
            found += there
            if there < len(asked):
                break
    return found


def _state_of(manager: Any, backends: Sequence[_Backend], key: Any, deadline: float) -> Presence:
    """What all backends together say of one key."""
    under_way = any(backend.exists_in_put_tasks(key) for backend in manager.storage_backends.values())
    certain = not under_way and len(backends) == len(manager.storage_backends)
    for one in backends:
        if one.kind == _REMOTE:
            (there,) = _ask_remote(one.backend, [key], deadline)
        else:
            there = one.backend.contains(key) or (False if one.kind in _LOCAL else None)
        if there:
            return Presence.PRESENT
        certain = certain and there is False
    return Presence.ABSENT if certain else Presence.UNKNOWN


def _ask_remote(backend: Any, keys: Sequence[Any], deadline: float) -> list[bool | None]:
    """Whether a remote store has each of `keys`; None where it can't be told in time.

    ``RemoteBackend.contains`` takes every error for a no, so its connection is asked.
    """
    connection = backend.connection
    if connection is None:
        return [None] * len(keys)
    if backend._mla_worker_id_as0_mode:
        keys = [key.with_new_worker_id(0) for key in keys]
    sent = [asyncio.run_coroutine_threadsafe(connection.exists(key), backend.loop) for key in keys]
    answers: list[bool | None] = []
    try:
        for future in sent:
            try:
                answers.append(bool(future.result(max(deadline - time.monotonic(), 0.0))))
            # Whatever a connector raises; a timeout and a cancellation too.
            except Exception as error:
                logger.debug("a remote store of LMCache can't say: %s: %s", type(error).__name__, error)
                answers.append(None)
    finally:
        for future in sent:
            future.cancel()
    return answers
