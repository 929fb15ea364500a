"""Actors and tasks that tests run inside the cluster, undecorated; `ray.remote` is applied where they are used."""

import os
import threading
from collections.abc import Sequence
from typing import Any

import ray
import torch

from hs_cache import stitching
from tests.cluster.children import make_rows


def spawn(actor_class: Any, cache: Any) -> Any:
    """A handle of an actor that runs one of the classes below."""
    return ray.remote(actor_class).remote(cache)


def type_of_rows(actor: Any, token_ids: Any, model: str) -> str:
    """For ``handle.__ray_call__``: how an actor's rows set out on their way back."""
    return type(actor.retrieve_hidden_states(token_ids, model=model)).__name__


def this_node() -> str:
    """The node on which this runs."""
    return str(ray.get_runtime_context().get_node_id())


def read(cache: Any, token_ids: Any, layer_idx: int) -> tuple[str, bytes, int, int]:
    """A task: node it ran on, the rows' bytes, and how many layers came without and with a copy."""
    hit = cache.retrieve(token_ids, layer_idx)
    stats = cache.stats()
    return this_node(), _bytes(hit), stats.zero_copy_total, stats.copied_total


def write(cache: Any, token_ids: Any, rows: Any) -> tuple[str, str | None, int]:
    """A task: node it ran on, node that served it, and chunks stored. `rows` is a NumPy array for layer 0."""
    stored = cache.store(token_ids, {0: rows}).stored
    node = cache.stats().node
    return this_node(), node.node_id if node else None, stored


def store(cache: Any, token_ids: Any, layers: Any, offset: int) -> int:
    """A task: number of chunks stored, of rows from token `offset` on."""
    return int(cache.store(token_ids, layers, token_offset=offset).stored)


def resync(cache: Any, keys: bytes) -> bool:
    """A task: tells the KV actor of its node that it has these chunks and no others."""
    return bool(cache.kv.resync(keys))


def _bytes(hit: Any) -> bytes:
    return b"".join(bytes(rows.contiguous().view(torch.uint8).numpy()) for rows in hit.layers.values())


class Reader:
    """Holds rows, until it is told to let go of them or is killed."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self._held: list[Any] = []

    def hold(self, token_ids: Any) -> tuple[int, int, bytes]:
        """Process id, number of tokens, and bytes of the rows."""
        hit = self._cache.retrieve(token_ids, 0)
        self._held.append(hit)
        return os.getpid(), hit.num_tokens, _bytes(hit)


class AsyncReader:
    """The same with the asyncio client."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    async def read(self, token_ids: Any) -> tuple[int, bytes]:
        """Number of tokens, and bytes of the rows."""
        hit = await self._cache.retrieve(token_ids, 0)
        return hit.num_tokens, _bytes(hit)


def resolve(refs: Sequence[Any], layer_idx: int) -> tuple[str, list[bytes]]:
    """A task: node it ran on, and the bytes behind refs."""
    return this_node(), [_bytes_of(ref.get(), layer_idx) for ref in refs]


def _bytes_of(hit: Any, layer_idx: int) -> bytes:
    return bytes(hit[layer_idx].contiguous().view(torch.uint8).numpy()) if hit else b""


class Resolver:
    """Makes refs, and gets the rows behind refs that it is handed."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    def pid(self) -> int:
        """Its process id."""
        return os.getpid()

    def make(self, token_ids: Any, layers: Any) -> list[Any]:
        """A ref in a list."""
        return [self._cache.retrieve_ref(token_ids, layers)]

    def resolve(self, refs: dict[str, Any], layer_idx: int) -> bytes:
        """The bytes behind ``refs["rows"]``."""
        return _bytes_of(refs["rows"].get(), layer_idx)


class AsyncResolver:
    """The same on an event loop."""

    async def resolve(self, refs: dict[str, Any], layer_idx: int) -> bytes:
        """The bytes behind ``refs["rows"]``."""
        return _bytes_of(await refs["rows"], layer_idx)


class StuckWriter:
    """A writer that never gets further than between reserve and commit."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    def pid(self) -> int:
        """Its process id."""
        return os.getpid()

    def store(self, token_ids: Any, rows: Any) -> None:
        """Reserves, then blocks in the copy for ever."""
        vars(stitching)["copy_in"] = lambda *_: threading.Event().wait()
        self._cache.store(token_ids, {0: rows})


class Traffic:
    """Stores prompts of its own and reads them and others' until told to stop; remembers every row that is wrong.

    Args:
        cache: a client.
        mine, others: seeds of prompts.
    """

    def __init__(self, cache: Any, mine: Sequence[int], others: Sequence[int]) -> None:
        self._cache = cache
        self._mine, self._others = mine, others
        self._stop = threading.Event()
        self._done = {"stored": 0, "own": 0, "far": 0}
        self._wrong: list[str] = []

    def run(self) -> list[str]:
        """Blocks until `stop`; what was wrong."""
        while not self._stop.is_set():
            for seed in self._mine:
                stored = self._cache.store(traffic_prompt(seed), traffic_layers(seed))
                self._done["stored"] += stored.stored + stored.present
                self._done["own"] += self._read(seed)
            for seed in self._others:
                self._done["far"] += self._read(seed)
        return self._wrong

    def done(self) -> dict[str, int]:
        """So far: chunks ``stored`` or found to be, tokens read of its ``own`` prompts and of others' (``far``)."""
        return dict(self._done)

    def _read(self, seed: int) -> int:
        hit = self._cache.retrieve(traffic_prompt(seed), [0, 5])
        for layer, rows in traffic_layers(seed).items():
            if hit and not torch.equal(hit[layer], rows[: hit.num_tokens]):
                self._wrong.append(f"prompt {seed}, layer {layer}, {hit.num_tokens} tokens")
        return int(hit.num_tokens)

    def stop(self) -> None:
        """Make `run` return."""
        self._stop.set()


def traffic_prompt(seed: int) -> range:
    """64 tokens."""
    return range(1000 * seed, 1000 * seed + 64)


def traffic_layers(seed: int) -> dict[int, torch.Tensor]:
    """Rows of a prompt: more than what Ray sends inline, and no value of them is zero."""
    return {0: 1 + make_rows(64, seed, 256).abs(), 5: 1 + make_rows(64, seed + 500, 512).abs().to(torch.bfloat16)}
