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
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hs_cache.errors import InvalidInputError
from hs_cache.integrations.lmcache_wire import (
    HELLO,
    TOKEN_BYTES,
    Question,
    Registration,
    WireError,
    encode_answer,
    read_question,
    receive,
    require_same_user,
    send,
)
from hs_cache.keys import KEY_BYTES
from hs_cache.kv_presence import Presence
from hs_cache.lmcache_names import EngineNaming, chunk_hash, name_of, probe_tokens

logger = logging.getLogger(__name__)

_HEARTBEAT_S = 1.0
_MAX_CONNECTIONS = 8
_SEND_S = 5.0
"""How long the rest of a message, or room for an answer, may take before the connection is given up."""

_WAVE = 16
"""Keys that a remote store is asked for at a time."""

_WRITE_S = 10.0
"""How long a remote store must keep saying no of a chunk that may be on its way there."""

_MAX_DENIALS = 65_536

_BACKENDS = "lmcache.v1.storage_backend."
_LOCAL = frozenset({_BACKENDS + "local_cpu_backend.LocalCPUBackend", _BACKENDS + "local_disk_backend.LocalDiskBackend"})
"""Backends which know for certain what they have. Others may take trouble for absence, so their no is no answer."""

_REMOTE = _BACKENDS + "remote_backend.RemoteBackend"
_AUDIT = _BACKENDS + "audit_backend.AuditBackend"


Tell = Callable[[Registration], None]
"""Makes an engine known: `hs_cache.integrations.lmcache_source.LMCacheSource.register_engine`. It may block for a
moment; may raise, and is called again a second later."""


def engine_name(engine: Any, name: str | None = None) -> str:
    """What an engine is called, the same for all its ranks: `name`, or what vLLM or its configuration calls it.

    Raises:
        InvalidInputError: it has several ranks, and nothing that says which belong together.
    """
    name = name or engine.metadata.engine_id
    if name:
        return str(name)
    if (ranks := num_ranks(engine)) > 1:
        # LMCache makes an lmcache_instance_id up in each process, if the configuration has none (config_base.py).
        raise InvalidInputError(
            f"name: got None for an LMCache engine of {ranks} ranks without an engine_id, expected a name that is the "
            "same for all of them"
        )
    return str(engine.config.lmcache_instance_id)


def num_ranks(engine: Any) -> int:
    """How many ranks of an engine keep KV on this node: with ``save_only_first_rank`` the first does for all."""
    return 1 if engine.save_only_first_rank else int(engine.metadata.local_world_size)


def engine_naming(engine: Any) -> EngineNaming:
    """How an engine names chunks, as it does it."""
    config = engine.config
    return EngineNaming(
        chunk_size=int(config.chunk_size),
        save_unfull_chunk=bool(config.save_unfull_chunk),
        hash_func=repr(engine.token_database.hash_func),
        probe=b"".join(map(name_of, chunk_hashes(engine, probe_tokens(config.chunk_size)))),
    )


def chunk_hashes(engine: Any, tokens: npt.NDArray[np.int64]) -> list[int]:
    """LMCache's own chunk hashes of a prompt, in order."""
    found = engine.token_database.process_tokens(tokens=tokens.tolist(), make_key=False)
    return [hashed for _, _, hashed in found]


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

    Raises:
        InvalidInputError: see `engine_name`.
    """

    def __init__(self, engine: Any, tell: Tell, *, name: str | None = None) -> None:
        self.attempts_total = 0
        self._lookup = Lookup(engine)
        self._tell = tell
        self._registration = Registration(
            engine=engine_name(engine, name),
            rank=int(engine.metadata.worker_id),
            num_ranks=num_ranks(engine),
            address=f"hs_cache/lmcache/{os.getpid()}/{secrets.token_hex(8)}",
            token=secrets.token_bytes(TOKEN_BYTES),
            naming=engine_naming(engine),
        )
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind("\0" + self._registration.address)
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
                self._tell(self._registration)
                trouble = ""
            # Ray's errors, or those of leaving the cluster: the engine must not notice, and the next time may do.
            except Exception as error:
                if not trouble and not self._closed.is_set():
                    trouble = type(error).__name__
                    logger.warning(
                        "LMCache engine %r, rank %d, can't make itself known, so its KV counts as unknown: %s: %s",
                        self._registration.engine,
                        self._registration.rank,
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
        if not secrets.compare_digest(hello, HELLO + self._registration.token):
            raise WireError("it doesn't know the token, or speaks another version")
        send(connection, HELLO, deadline)


class Lookup:
    """Which chunks an ``LMCacheEngine`` has. Thread-safe, as LMCache's backends are.

    What counts is what LMCache's own lookup would find: in the backends that its ``retrieve_locations`` names, with all
    layers in one of them where they are stored one by one. A chunk is *absent* only when each of those says so, and can
    be believed: trouble, backends that are bypassed or frozen out, writes under way, and backends that may take trouble
    for absence make it *unknown*. So is everything behind the first absent chunk, which no prefix reaches.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._in_trouble = False
        self._denials = _Denials()

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
        chunks = self._chunks(question)
        locations = self._engine.retrieve_locations or list(manager.storage_backends)
        backends = _active(manager, locations)
        all_of_them = len(backends) == sum(name in locations for name in manager.storage_backends)
        found = 0
        while found < len(chunks) and time.monotonic() < deadline:
            # LMCache counts whole prefixes only where a chunk is one key.
            if not self._engine.use_layerwise:
                found += _count(manager, backends, [key for (key,) in chunks[found:]], deadline)
                states[:found] = bytes([Presence.PRESENT]) * found
            if found == len(chunks):
                break
            # A prefix is counted backend by backend, so what ended it may be in one whose turn was over.
            under_way = _under_way(manager, chunks[found])
            state = self._state_of(backends, chunks[found], deadline)
            if state is Presence.ABSENT and (under_way or not all_of_them):
                state = Presence.UNKNOWN
            states[found] = state
            if state is not Presence.PRESENT:
                break
            found += 1

    def _chunks(self, question: Question) -> list[list[Any]]:
        """LMCache's keys of each chunk: one, or with layer-wise storage one per layer."""
        database = self._engine.token_database
        configs = {f"lmcache.tag.{name}": value for name, value in question.tags} or None
        signed = database.hash_func is hash
        chunks = []
        for at in range(0, len(question.names), KEY_BYTES):
            hashed = chunk_hash(question.names[at : at + KEY_BYTES], signed=signed)
            key = database._make_key_by_hash(hashed, configs)
            chunks.append(key.split_layers(self._engine.num_layers) if self._engine.use_layerwise else [key])
        return chunks

    def _state_of(self, backends: Sequence[_Backend], keys: Sequence[Any], deadline: float) -> Presence:
        """What `backends` together say of the chunk that consists of `keys`."""
        certain, in_parts = True, False
        for one in backends:
            if one.kind == _REMOTE:
                answers = _ask_remote(one.backend, keys, deadline)
                if not _knows_its_writes(one.backend):
                    answers = [self._denials.judge(key, answer) for key, answer in zip(keys, answers, strict=True)]
            else:
                no = False if one.kind in _LOCAL else None
                answers = [one.backend.contains(key) or no for key in keys]
            if all(answers):
                # Had an earlier one the first layers, LMCache would look there, and miss the rest.
                return Presence.UNKNOWN if in_parts else Presence.PRESENT
            in_parts = in_parts or bool(answers[0])
            certain = certain and False in answers
        return Presence.ABSENT if certain else Presence.UNKNOWN


class _Denials:
    """For remote stores of which nobody knows whether a write is under way: their no counts after a while. Thread-safe,
    bounded."""

    def __init__(self) -> None:
        self._since: OrderedDict[Any, float] = OrderedDict()
        self._lock = threading.Lock()

    def judge(self, key: Any, answer: bool | None) -> bool | None:
        """`answer`, but None for a no as long as it is younger than a write may take."""
        now = time.monotonic()
        with self._lock:
            if answer is not False:
                self._since.pop(key, None)
                return answer
            since = self._since.setdefault(key, now)
            self._since.move_to_end(key)
            if len(self._since) > _MAX_DENIALS:
                self._since.popitem(last=False)
        return False if now - since > _WRITE_S else None


def _active(manager: Any, locations: Sequence[str]) -> list[_Backend]:
    found = []
    for name, backend in manager.get_active_storage_backends(search_range=locations):
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


def _under_way(manager: Any, keys: Sequence[Any]) -> bool:
    return any(backend.exists_in_put_tasks(key) for backend in manager.storage_backends.values() for key in keys)


def _knows_its_writes(backend: Any) -> bool:
    """Whether a ``RemoteBackend`` lists what it is writing: not what it writes in batches (`batched_submit_put_task`),
    nor, where the first rank writes for all, on the others."""
    connection = backend.connection
    return not (backend._mla_worker_id_as0_mode or (connection is not None and connection.support_batched_put()))


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
