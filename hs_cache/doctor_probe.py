"""What `hs_cache.doctor` runs on every node that has this package: a client like any other, and what it sees there."""

import hashlib
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
import torch

from hs_cache.attachment import Link
from hs_cache.config import CacheConfig
from hs_cache.devices import NO_DEVICES, Cut, Moment
from hs_cache.doctor_facts import ChunkNames, ClientSettings
from hs_cache.effects import Budget, Call, Steps
from hs_cache.errors import ConfigError, ServiceError
from hs_cache.keys import ChunkKeys, KeySpace, TokenDatabase
from hs_cache.kv_names import kv_naming
from hs_cache.leases import this_process
from hs_cache.machine import memory_headroom
from hs_cache.messages import LayerSpec, NodeStatistics, ReserveRequest, Run
from hs_cache.results import PrefixHit
from hs_cache.retrieval import Ask
from hs_cache.router import HIDDEN_STATES, Router, find_actor
from hs_cache.rows import Flat
from hs_cache.session import Session

SHARE_OF_FREE = 4
"""A canary takes at most one part in so many of what is free, which leaves room to those who store meanwhile."""

_PINGS = 20
_READS = 3
_MOST_TOKENS = 1 << 20
_LAYER, _DTYPE = 0, "float8_e4m3fn"  # any dtype of one byte


@dataclass(frozen=True, slots=True)
class Canary:
    """Bytes to be stored on a node and read from others: one token, whose only row is all of them.

    Attributes:
        key: its chunk key, random.
        space: the fingerprint of its key space, random too: users have no keys in it. The bytes follow from it.
    """

    key: bytes
    space: bytes
    nbytes: int

    def content(self) -> bytes:
        """Bytes that no other has, and none of which can be foreseen from the others."""
        return hashlib.shake_128(self.space).digest(self.nbytes)


@dataclass(frozen=True, slots=True)
class Attached:
    """How a node's probe became a client of its actor: of which pool, as whom, with which id for its canary; and why it
    can't map the pool (``""`` if it does)."""

    incarnation: bytes
    client_id: bytes
    hold_id: int
    not_shared: str


class Probe:
    """One node's client, single-threaded.

    Args:
        service: the service's name.
    """

    def __init__(self, service: str) -> None:
        self._service = service
        self._router = Router(service)
        # With a revision of its own, no controller has to say which is current.
        self._session = Session({"model": "hs_cache.doctor", "model_revision": "none"}, strict=True)

    def client_settings(self, settings: dict[str, Any]) -> ClientSettings:
        """What a client on this node would be told otherwise, by its environment, than a service with these settings
        runs with."""
        running = CacheConfig(**settings)
        try:
            own = CacheConfig.load()
        except ConfigError as error:
            return ClientSettings(error=str(error))
        return ClientSettings(
            differences=tuple(own.differences(running)),
            refused=own.is_set("chunk_size") and own.chunk_size != running.chunk_size,
            disabled=own.is_set("enable_hidden_state_cache") and not own.enable_hidden_state_cache,
        )

    def keys(self, settings: dict[str, Any]) -> ChunkNames:
        """What this node calls the chunks of a few prompts, by what is special about each."""
        config = CacheConfig(**settings)
        tokens = [-1, -2, 0, 2**62, *range(40)]
        short = np.array([7, 151_643, 151_655, 9, 2], dtype=np.int32)
        spans = [(3, 9, "audio"), (14, 5, b"\x00\xff"), (20, 2, -(2**70))]
        prompts: dict[str, tuple[dict[str, Any], Any, Any]] = {
            "tokens": ({}, tokens, ()),
            "a NumPy array": ({}, short, ()),
            "spans": ({}, tokens, spans),
            "a LoRA": ({"lora_id": "adapter"}, tokens, ()),
            "a salt": ({"cache_salt": "tenant"}, tokens, ()),
            "a shard": ({"shard": "tp0/2", "model_revision": "r1"}, tokens, ()),
        }
        chunks, kv = dict[str, str](), dict[str, str]()
        for name, (fields, ids, mm_spans) in prompts.items():
            for model in [event["model"] for event in settings.get("kv_events", ())] or ["doctor"]:
                space = KeySpace(model=model, chunk_size=8, **fields)
                naming = kv_naming(config, space)
                keys = TokenDatabase(space, save_unfull_chunk=True, kv_naming=None).chunk_keys(ids, mm_spans=mm_spans)
                chunks[name] = chunks.get(name, "") + keys.blob.hex()
                count = max(2, -(-64 // config.chunk_size)) * config.chunk_size
                if naming is not None and not fields and count <= _MOST_TOKENS:
                    space = KeySpace(model=model, chunk_size=config.chunk_size, **fields)
                    names = TokenDatabase(space, kv_naming=naming).chunk_keys(range(count), mm_spans=mm_spans)
                    kv[name] = kv.get(name, "") + (names.kv.blob.hex() if names.kv else "")
        return ChunkNames(chunks, kv)

    def memory(self) -> tuple[int, str]:
        """How many bytes a process of this node can have more, and what limits that."""
        headroom = memory_headroom()
        return headroom.nbytes, headroom.limit

    def attach(self, timeout_s: float) -> Attached:
        """Become a client of this node's actor."""

        def attached(link: Link, budget: Budget) -> Steps[Attached]:
            _check_local(link)
            yield Call(link.located.peer, "has_chunk", (bytes(16),), budget.left_s)
            process = this_process()
            return Attached(link.incarnation, process.client_id, process.next_id(), link.not_shared)

        nothing = Attached(b"", b"", 0, "")
        return self._router.run(self._session.operate(attached, nothing, timeout_s))

    def put(self, canary: Canary, hold_id: int, timeout_s: float) -> bool:
        """Store a canary on this node; False where there is no room for it, besides what is cached.

        It counts as computed elsewhere, so no KV source is told or asked of it. Through the pool it is held for this
        process: it goes when that ends.
        """

        def stored(link: Link, budget: Budget) -> Steps[bool]:
            _check_local(link)
            stats: NodeStatistics = yield Call(link.located.peer, "stats", (), budget.left_s)
            if stats.store.free_bytes < SHARE_OF_FREE * canary.nbytes:
                return False
            request = ReserveRequest(
                incarnation=link.incarnation,
                client_id=this_process().client_id,
                hold_id=hold_id,
                space=canary.space,
                keys=canary.key,
                num_tokens=1,
                first_chunk=0,
                specs=(LayerSpec(_LAYER, canary.nbytes, _DTYPE),),
                kv_local=False,
                keep=True,
                evict=False,
            )
            done = yield from self._session.write(link, request, _Content(canary), NO_DEVICES, budget)
            return done.stored == 1

        return self._router.run(self._session.operate(stored, False, timeout_s))

    def ping(self, node_id: str, timeout_s: float) -> float:
        """The median round trip of a call to a node's actor that does next to nothing, in seconds."""
        actor, took = find_actor(self._service, HIDDEN_STATES, node_id), []
        for _ in range(_PINGS):
            begin = time.perf_counter()
            ray.get(actor.has_chunk.remote(bytes(16)), timeout=timeout_s)
            took.append(time.perf_counter() - begin)
        return statistics.median(took)

    def read(self, node_id: str, canary: Canary, timeout_s: float) -> tuple[bool | None, float]:
        """Read a node's canary into memory of one's own: whether every byte is right, None if it wasn't found, and the
        median time of a read in seconds."""

        def rows(link: Link, budget: Budget) -> Steps[PrefixHit]:
            ask = Ask(ChunkKeys(canary.key, 1, self._session.config.chunk_size), (_LAYER,), 0, 1, counted=False)
            return (yield from self._session.read(link, ask, budget, node_id))

        expected = torch.frombuffer(bytearray(canary.content()), dtype=torch.uint8)
        buffer = torch.ones_like(expected)  # its memory is there: to fill it is a copy, and no page faults
        right, took = True, []
        for _ in range(_READS):
            begin = time.perf_counter()
            hit = self._router.run(self._session.operate(rows, PrefixHit(), timeout_s))
            if not hit:
                return None, 0.0
            buffer.copy_(hit[_LAYER].view(torch.uint8).reshape(-1))
            took.append(time.perf_counter() - begin)
            right = right and torch.equal(buffer, expected)
            buffer.zero_()
        return right, statistics.median(took)


class _Content:
    """A canary as rows to be written."""

    def __init__(self, canary: Canary) -> None:
        self._flat: Flat = np.frombuffer(canary.content(), np.uint8)
        self.nbytes = canary.nbytes

    def copy_into(self, memory: memoryview, runs: Sequence[Run], moment: Moment, cut: Cut | None) -> None:
        (run,) = runs
        np.frombuffer(memory, np.uint8, self.nbytes, run.offset)[:] = self._flat

    def flat(self) -> Flat:
        return self._flat


def _check_local(link: Link) -> None:
    """The actor of the probe's own node may have ended meanwhile; then another node's serves it."""
    if not link.local:
        raise ServiceError(f"it is served by node {link.located.peer.node_id}: the actor of its own node is gone")
