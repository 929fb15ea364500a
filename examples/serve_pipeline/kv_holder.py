"""KV that outlives replicas: one holder per node keeps it by chunk, in bounded memory, and says what it evicts.

It stands for what LMCache or another CPU pool of KV is to an engine: thinkers of a node put KV there and restore it
from there, and a thinker of another node may load it too. The cache's rows and this KV belong together: a chunk whose
KV is evicted here is reported to the cache, which gives up its rows with the next retrieve.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import ray
from numpy.typing import NDArray
from qwen3_omni.recent_chunks import RecentChunks
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import hs_cache

logger = logging.getLogger(__name__)

ENGINE: Final = "kv-holder"
"""The engine that a node's thinkers and its holder are to the cache: what one stores, the other evicts."""

NAMESPACE: Final = "serve_pipeline"

_START_TIMEOUT_S: Final = 120.0

Chunk = NDArray[np.uint8]


class KVHolder:
    """A node's holder, as an actor: one call at a time, so an eviction is reported before what came for it is stored.

    Args:
        capacity_bytes: of all KV.
        service, model: whom to tell of evictions, as the thinkers connect.
    """

    def __init__(self, capacity_bytes: int, service: str, model: str) -> None:
        self._held: RecentChunks[Chunk] = RecentChunks(capacity_bytes, lambda chunk: chunk.nbytes)
        self._cache = hs_cache.connect(service=service, model=model, engine=ENGINE)
        if self._cache is not None:
            self._cache.kv.clear()  # it may have been restarted: what was here is gone

    def load(self, keys: Sequence[bytes]) -> list[Chunk]:
        """The chunks of a prefix that are here."""
        return self._held.load(keys)

    def save(self, keys: Sequence[bytes], chunks: Sequence[Chunk]) -> int:
        """Keep consecutive chunks, and report what goes for them; returns how many of `keys` are here then."""
        # what arrives lies in the object store, which is not where it is to stay
        evicted = self._held.save(keys, lambda index: chunks[index].copy())
        if evicted and self._cache is not None:
            self._cache.kv.report_evicted(evicted)
        return len(self._held.load(keys))


def holder_name(service: str, node_id: str) -> str:
    """The name of a node's holder in `NAMESPACE`."""
    return f"{service}/{node_id}"


def start_holder(
    node_id: str, capacity_bytes: int, service: str, model: str, timeout_s: float = _START_TIMEOUT_S
) -> Any:
    """The node's holder, which is created where there is none; it stays when whoever created it is gone. Blocks.

    Raises:
        RuntimeError: it doesn't begin in time.
    """
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
    try:
        ray.get(holder.__ray_ready__.remote(), timeout=timeout_s)
    except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError) as error:
        reason = str(error) or f"no answer within {timeout_s:g} s"
        raise RuntimeError(f"the KV holder of node {node_id} can't be started: {reason}") from error
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
