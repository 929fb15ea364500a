"""KV that outlives replicas: one holder per node keeps it by chunk, in bounded memory, and says what it evicts.

It stands for what LMCache or another CPU pool of KV is to an engine: thinkers of a node put KV there and restore it
from there, and a thinker of another node may load it too. The cache's rows and this KV belong together: a chunk whose
KV is evicted here is reported to the cache, which gives up its rows with the next retrieve.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import ray
from numpy.typing import NDArray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import hs_cache

logger = logging.getLogger(__name__)

ENGINE: Final = "kv-holder"
"""The engine that a node's thinkers and its holder are to the cache: what one stores, the other evicts."""

NAMESPACE: Final = "serve_pipeline"

Chunk = NDArray[np.uint8]


class HeldChunks:
    """KV chunks by key, in bounded memory; the least recently used go first, of a prefix its tail.

    Args:
        capacity_bytes: of all chunks.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._chunks: OrderedDict[bytes, Chunk] = OrderedDict()  # the coldest first
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._chunks)

    def load(self, keys: Sequence[bytes]) -> list[Chunk]:
        """The chunks of a prefix up to the first that isn't here."""
        found = []
        for key in keys:
            if key not in self._chunks:
                break
            found.append(self._chunks[key])
        self._touch(keys[: len(found)])
        return found

    def save(self, keys: Sequence[bytes], chunks: Sequence[Chunk]) -> list[bytes]:
        """Keep consecutive chunks of one prefix; returns the keys of what was evicted for them.

        What doesn't fit is left out, from the tail.
        """
        for key, chunk in zip(keys, chunks, strict=True):
            if key not in self._chunks:
                self._chunks[key] = chunk
                self.nbytes += chunk.nbytes
        self._touch(keys)
        evicted = []
        while self.nbytes > self._capacity_bytes:
            key, chunk = self._chunks.popitem(last=False)
            self.nbytes -= chunk.nbytes
            evicted.append(key)
        return evicted

    def _touch(self, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):  # the head is the last to go
            self._chunks.move_to_end(key)


class KVHolder:
    """A node's holder, as an actor: one call at a time, so an eviction is reported before what came for it is stored.

    Args:
        capacity_bytes: of all KV.
        service, model: whom to tell of evictions, as the thinkers connect.
    """

    def __init__(self, capacity_bytes: int, service: str, model: str) -> None:
        self._held = HeldChunks(capacity_bytes)
        self._cache = hs_cache.connect(service=service, model=model, engine=ENGINE)
        if self._cache is not None:
            self._cache.kv.clear()  # it may have been restarted: what was here is gone

    def match(self, keys: Sequence[bytes]) -> int:
        """How many chunks of a prefix are here."""
        return len(self._held.load(keys))

    def load(self, keys: Sequence[bytes]) -> list[Chunk]:
        """The chunks of a prefix that are here."""
        return self._held.load(keys)

    def save(self, keys: Sequence[bytes], chunks: Sequence[Chunk]) -> int:
        """Keep consecutive chunks, and report what goes for them; returns how many of `keys` are here then."""
        # what arrives lies in the object store, which is not where it is to stay
        evicted = self._held.save(keys, [chunk.copy() for chunk in chunks])
        if evicted and self._cache is not None:
            self._cache.kv.report_evicted(evicted)
        return len(self._held.load(keys))

    def statistics(self) -> dict[str, int]:
        """How much is here."""
        return {"chunks": len(self._held), "nbytes": self._held.nbytes}


def holder_name(service: str, node_id: str) -> str:
    """The name of a node's holder in `NAMESPACE`."""
    return f"{service}/{node_id}"


def start_holder(node_id: str, capacity_bytes: int, service: str, model: str) -> Any:
    """The node's holder, which is created where there is none; it stays when whoever created it is gone. Blocks."""
    holder = (
        ray.remote(KVHolder)
        .options(
            name=holder_name(service, node_id),
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            max_restarts=-1,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        )
        .remote(capacity_bytes, service, model)
    )
    ray.get(holder.__ray_ready__.remote())
    return holder


def find_holder(service: str, node_id: str) -> Any | None:
    """The holder of any node; None where there is none. Blocks."""
    try:
        return ray.get_actor(holder_name(service, node_id), namespace=NAMESPACE)
    except ValueError:
        return None


def stop_holders(service: str) -> int:
    """End the holders of a service on all nodes; returns their number. Blocks."""
    names = [
        actor["name"]
        for actor in ray.util.list_named_actors(all_namespaces=True)
        if actor["namespace"] == NAMESPACE and actor["name"].startswith(holder_name(service, ""))
    ]
    for name in names:
        ray.kill(ray.get_actor(name, namespace=NAMESPACE))
    return len(names)
