"""Starts and stops a service: one `HiddenStateActor` and one `KVActor` on every node that is to carry it."""

import time
from typing import Any

import ray
from ray import cloudpickle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors import hidden_state_actor, kv_actor
from actors.hidden_state_actor import HiddenStateActor
from actors.kv_actor import KVActor
from hs_cache.config import CacheConfig, NodeRequirements
from hs_cache.errors import ConfigMismatchError, PoolError, ServiceError, ServiceTimeoutError
from hs_cache.machine import require_headroom
from hs_cache.router import HIDDEN_STATES, KV, NAMESPACE, actor_name, find_actor, nodes_of, translated

_READY_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 30.0
_CONCURRENT_CALLS = 32

# The classes travel by value. Ray loads them in every worker and in every process that looks up a handle, where an
# ``actors`` module in the working directory would be found instead of ours.
for _module in (hidden_state_actor, kv_actor):
    cloudpickle.register_pickle_by_value(_module)  # type: ignore[no-untyped-call]


def select_nodes(config: CacheConfig, nodes: list[dict[str, Any]]) -> list[str]:
    """Hex ids of the nodes (as ``ray.nodes()`` lists them) that carry a service of this configuration.

    Raises:
        ServiceError: no node matches ``node_selector``.
    """
    selector = config.node_selector
    alive = [node for node in nodes if node["Alive"]]
    gpu = [node for node in alive if node["Resources"].get("GPU", 0) > 0]
    if isinstance(selector, NodeRequirements):
        chosen = [node for node in alive if _meets(selector, node)]
    else:
        chosen = {"all": alive, "gpu": gpu, "auto": gpu or alive}[selector]
    if not chosen:
        raise ServiceError(f"node_selector: none of the {len(alive)} nodes alive matches {selector!r}")
    return sorted(node["NodeID"] for node in chosen)


def _meets(required: NodeRequirements, node: dict[str, Any]) -> bool:
    labels, resources = node.get("Labels", {}), node["Resources"]
    return all(labels.get(name) == value for name, value in required.labels.items()) and all(
        resources.get(name, 0) >= amount for name, amount in required.resources.items()
    )


def start(config: CacheConfig, *, service: str = "default") -> list[str]:
    """Start a service, or complete one that runs already, and wait until it answers. Returns its nodes' hex ids.

    A service that runs keeps its settings, also on the nodes it is completed with; those that `config` sets must agree.

    Raises:
        ConfigMismatchError: it runs already, with other settings.
        ServiceError: no node matches, or an actor doesn't come up.
        PoolError: a node can't have the pool; nothing was started.
    """
    there = nodes_of(service)
    if there:
        running = running_config(service, there[0])
        _check_agrees(config, running)
        config = running
    nodes = select_nodes(config, ray.nodes())  # type: ignore[no-untyped-call]
    missing = sorted(set(nodes) - set(there))
    _check_memory(config, missing)
    for node_id in missing:
        _start_pair(config, service, node_id)
    for node_id in nodes:
        _check_agrees(config, running_config(service, node_id))  # another starter may have been faster
    return nodes


def _check_memory(config: CacheConfig, nodes: list[str]) -> None:
    """Check every node for room before an actor is created anywhere: there the error would arrive as text only."""
    task = ray.remote(require_headroom)
    checks = [
        task.options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)).remote(
            config.max_hidden_state_cpu_bytes
        )
        for node_id in nodes
    ]
    for node_id, check in zip(nodes, checks, strict=True):
        try:
            ray.get(check, timeout=_READY_TIMEOUT_S)
        except Exception as error:
            cause = translated(error, f"checking the memory of node {node_id}")
            raise type(cause)(f"node {node_id}: {cause}") if isinstance(cause, PoolError) else cause from error


def _start_pair(config: CacheConfig, service: str, node_id: str) -> None:
    options = {
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "get_if_exists": True,
        "num_cpus": 0,
        "max_restarts": -1,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False),
    }
    ray.remote(KVActor).options(name=actor_name(service, KV, node_id), **options).remote(config)
    hidden_states = ray.remote(HiddenStateActor)
    name = actor_name(service, HIDDEN_STATES, node_id)
    hidden_states.options(name=name, max_concurrency=_CONCURRENT_CALLS, **options).remote(service, config)


def running_config(service: str, node_id: str) -> CacheConfig:
    """What the actor of a node runs with. Blocks until it answers.

    Raises:
        ServiceError: there is none, or it doesn't come up.
    """
    try:
        config: CacheConfig = ray.get(
            find_actor(service, HIDDEN_STATES, node_id).config.remote(), timeout=_READY_TIMEOUT_S
        )
    except Exception as error:
        raise translated(error, f"starting the actor on node {node_id}") from error
    return config


def _check_agrees(config: CacheConfig, running: CacheConfig) -> None:
    # Whether a client wants the cache says nothing of how the service runs.
    asked = {name: getattr(config, name) for name in sorted(config.model_fields_set - {"enable_hidden_state_cache"})}
    differing = [
        f"{name} is {getattr(running, name)!r}, asked for {value!r}"
        for name, value in asked.items()
        if getattr(running, name) != value
    ]
    if differing:
        raise ConfigMismatchError(f"the service runs with other settings: {'; '.join(differing)}")


def stop(*, service: str = "default") -> int:
    """End a service on all nodes, and wait until its names are free again. Returns on how many nodes it ran.

    Raises:
        ServiceTimeoutError: an actor doesn't end.
    """
    nodes = nodes_of(service)
    for kind in (HIDDEN_STATES, KV):
        for node_id in nodes_of(service, kind):
            ray.kill(find_actor(service, kind, node_id), no_restart=True)
    deadline = time.monotonic() + _STOP_TIMEOUT_S
    while nodes_of(service) or nodes_of(service, KV):
        if time.monotonic() > deadline:
            raise ServiceTimeoutError(f"service {service!r} did not end in {_STOP_TIMEOUT_S:.0f} s")
        time.sleep(0.02)
    return len(nodes)
