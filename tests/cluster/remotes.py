"""Actors and tasks that tests run inside the cluster, undecorated; `ray.remote` is applied where they are used."""

import os
import threading
from typing import Any

import ray
import torch

from hs_cache import session


def spawn(actor_class: Any, cache: Any) -> Any:
    """A handle of an actor that runs one of the classes below."""
    return ray.remote(actor_class).remote(cache)


def node_of(_actor: Any) -> str:
    """For ``handle.__ray_call__``: the node on which an actor runs."""
    return str(ray.get_runtime_context().get_node_id())


def pid_of(_actor: Any) -> int:
    """For ``handle.__ray_call__``: an actor's process."""
    return os.getpid()


def type_of_rows(actor: Any, token_ids: Any, model: str) -> str:
    """For ``handle.__ray_call__``: how an actor's rows set out on their way back."""
    return type(actor.retrieve_hidden_states(token_ids, model=model)).__name__


def read(cache: Any, token_ids: Any, layer_idx: int) -> tuple[str, bytes, int, int]:
    """A task: node it ran on, the rows' bytes, and how many layers came without and with a copy."""
    hit = cache.retrieve(token_ids, layer_idx)
    stats = cache.stats()
    return node_of(None), _bytes(hit), stats.zero_copy_total, stats.copied_total


def write(cache: Any, token_ids: Any, rows: Any) -> tuple[str, str | None, int]:
    """A task: node it ran on, node that served it, and chunks stored. `rows` is a NumPy array for layer 0."""
    stored = cache.store(token_ids, {0: rows}).stored
    node = cache.stats().node
    return node_of(None), node.node_id if node else None, stored


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


class StuckWriter:
    """A writer that never gets further than between reserve and commit."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    def pid(self) -> int:
        """Its process id."""
        return os.getpid()

    def store(self, token_ids: Any, rows: Any) -> None:
        """Reserves, then blocks in the copy for ever."""
        vars(session)["copy_in"] = lambda *_: threading.Event().wait()
        self._cache.store(token_ids, {0: rows})
