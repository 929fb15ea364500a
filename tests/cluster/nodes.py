"""Raylets that tests add to the cluster, and clients on a certain node of it."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import numpy as np
import ray
import torch
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import hs_cache
from hs_cache.errors import ServiceNotRunningError
from hs_cache.messages import ControllerStatistics
from hs_cache.router import find_actor, find_controller
from tests.cluster import probes, remotes
from tests.processes import wait_until

T = TypeVar("T")

SLACK_S = 4.0
"""What a call may take beyond its deadline where several raylets share two loaded cores."""


def all_nodes() -> list[dict[str, Any]]:
    """As Ray lists them, the dead ones too."""
    return ray.nodes()  # type: ignore[no-untyped-call,no-any-return]


def alive_nodes() -> list[str]:
    """Hex ids, sorted."""
    return sorted(node["NodeID"] for node in all_nodes() if node["Alive"])


def this_node() -> str:
    """The node that this process is on."""
    return str(ray.get_runtime_context().get_node_id())


def add_node(cluster: Cluster, **options: Any) -> Any:
    """A handle for `remove_node`; its ``node_id`` is in hex."""
    return cluster.add_node(num_cpus=1, include_dashboard=False, **options)


@contextmanager
def removed_at_the_end(cluster: Cluster) -> Iterator[list[Any]]:
    """A list for handles of added nodes; those still in it are removed, and the cluster is then as it was before."""
    before = alive_nodes()
    added: list[Any] = []
    try:
        yield added
    finally:
        for node in added:
            cluster.remove_node(node)
        wait_until(lambda: alive_nodes() == before, "the added nodes are gone")


def on_node(node_id: str) -> dict[str, Any]:
    """Options that place a task or an actor on a node."""
    return {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False)}


def read_on(node_id: str, cache: Any, token_ids: Any) -> tuple[bytes, int, int]:
    """The bytes of layer 0 as a client on that node gets them; how many layers came without and with a copy."""
    task = ray.remote(remotes.read).options(**on_node(node_id))
    where, content, zero_copy, copied = ray.get(task.remote(cache, token_ids, 0))
    assert where == node_id
    return content, zero_copy, copied


def write_on(node_id: str, cache: Any, token_ids: Any, rows: np.ndarray) -> tuple[str | None, int]:
    """The node that served a store by a client on that node, and the number of chunks stored."""
    task = ray.remote(remotes.write).options(**on_node(node_id))
    where, served_by, stored = ray.get(task.remote(cache, token_ids, rows))
    assert where == node_id
    return served_by, stored


def store_on(node_id: str, cache: Any, token_ids: Any, layers: Mapping[int, torch.Tensor], offset: int = 0) -> int:
    """Store rows of the tokens from `offset` on, by a client on that node; the number of chunks stored."""
    task = ray.remote(remotes.store).options(**on_node(node_id))
    stored: int = ray.get(task.remote(cache, token_ids, layers, offset))
    return stored


class Nodes(NamedTuple):
    """Node ids in hex. This process is on `head`."""

    head: str
    one: str
    two: str


def client(service: str, model: str = "", **options: Any) -> Any:
    """A client in this process."""
    return hs_cache.connect(service=service, model=model, **options)


def pid_of(service: str, kind: str, node_id: str) -> int:
    """The process of a node's actor; waits for one that is being created or restarted."""

    def ask() -> int:
        try:
            return int(ray.get(find_actor(service, kind, node_id).__ray_call__.remote(probes.pid_of), timeout=5))
        except (ray.exceptions.RayError, ServiceNotRunningError):
            return 0

    return int(wait_until(ask, "the actor answers", timeout_s=90.0))


def on_controller(service: str, probe: Callable[[Any], T]) -> T:
    """What a function of `tests.cluster.probes` finds in the controller's process."""
    result: T = ray.get(find_controller(service).__ray_call__.remote(probe))
    return result


def controller_stats(service: str) -> ControllerStatistics:
    """What the controller knows."""
    stats: ControllerStatistics = ray.get(find_controller(service).stats.remote())
    return stats


def within(limit_s: float, call: Callable[[], T]) -> T:
    """The result of a call that must not take longer."""
    begin = time.monotonic()
    result = call()
    assert time.monotonic() - begin < limit_s
    return result
