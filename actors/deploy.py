"""Starts and stops a service: its controller, which puts a pair of actors on every node that is to carry it."""

import time
from contextlib import suppress
from typing import Any

import ray
from ray import cloudpickle

from actors import controller, hidden_state_actor, kv_actor, nodes, pair
from actors.controller import CacheController
from actors.nodes import resolve_selector
from actors.pair import CONCURRENT_CALLS
from hs_cache.config import CacheConfig
from hs_cache.errors import (
    ConfigMismatchError,
    PoolError,
    ServiceError,
    ServiceNotRunningError,
    ServiceTimeoutError,
)
from hs_cache.messages import StartProgress
from hs_cache.router import (
    HIDDEN_STATES,
    KV,
    NAMESPACE,
    actors_of,
    controller_name,
    find_actor,
    find_controller,
    is_running,
    nodes_of,
    translated,
)

_READY_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 30.0
_POLL_S = 0.05
_HEAD = "node:__internal_head__"
"""A resource that Ray gives to the head node, 1.0 of it."""

# What runs elsewhere travels by value. Ray loads it in every worker and in every process that looks up a handle, where
# an ``actors`` module in the working directory would be found instead of ours.
for _module in (controller, hidden_state_actor, kv_actor, nodes, pair):
    cloudpickle.register_pickle_by_value(_module)  # type: ignore[no-untyped-call]


def start(config: CacheConfig, *, service: str = "default") -> list[str]:
    """Start a service, or join one that runs, and wait until all of its nodes answer. Returns their hex ids.

    A service that runs keeps its settings; those that `config` sets must agree. With a ``node_selector`` other than
    ``auto``, no node need match yet, and none is returned then: the service is put on those that join.

    Raises:
        ConfigMismatchError: it runs already, with other settings.
        ServiceTimeoutError: actors don't come up in time; the service is left running, and goes on trying.
        PoolError, ServiceError: a node can't have the pool, or its actors. A service that this call began is stopped
            again.
    """
    begun = not is_running(service)
    decided = resolve_selector(config, ray.nodes())  # type: ignore[no-untyped-call]
    actor: Any = (
        ray.remote(CacheController)
        .options(
            name=controller_name(service),
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            max_restarts=-1,
            max_concurrency=CONCURRENT_CALLS,
            # On the head node: without it a cluster is lost anyway, and any other node may leave.
            resources={_HEAD: 0.001},
        )
        .remote(service, decided)
    )
    try:
        if differing := config.differences(ray.get(actor.config.remote(), timeout=_READY_TIMEOUT_S)):
            raise ConfigMismatchError(f"the service runs with other settings: {'; '.join(differing)}")
        return _wait_for_nodes(actor)
    except Exception as error:
        cause = translated(error, "starting the service")
        failed = isinstance(cause, PoolError | ServiceError) and not isinstance(cause, ServiceTimeoutError)
        if begun and failed and _is_controller(actor, service):
            stop(service=service)
        raise cause from error


def _is_controller(actor: Any, service: str) -> bool:
    """Whether it still is this one: the service may have been stopped, and begun anew by someone else."""
    try:
        return bool(find_controller(service)._actor_id == actor._actor_id)
    except ServiceError:
        return False


def _wait_for_nodes(actor: Any) -> list[str]:
    """The nodes, as soon as all of them have their actors, or have failed."""
    deadline = time.monotonic() + _READY_TIMEOUT_S
    number: int = ray.get(actor.look_again.remote(), timeout=_READY_TIMEOUT_S)
    while True:
        progress: StartProgress = ray.get(actor.progress.remote(), timeout=_READY_TIMEOUT_S)
        if progress.number >= number and not progress.missing:
            break
        if time.monotonic() > deadline:
            missing = ", ".join(progress.missing) or "nodes that can't be looked at"
            raise ServiceTimeoutError(f"no actors after {_READY_TIMEOUT_S:.0f} s on: {missing}")
        time.sleep(_POLL_S)
    if progress.failure is not None:
        raise progress.failure
    return list(progress.matching)


def running_config(service: str) -> CacheConfig:
    """What a service runs with. Blocks for one call.

    Raises:
        ServiceError: there is none, or it doesn't answer.
    """
    try:
        config: CacheConfig = ray.get(find_controller(service).config.remote(), timeout=_READY_TIMEOUT_S)
    except Exception as error:
        raise translated(error, "asking the controller") from error
    return config


def stop(*, service: str = "default") -> int:
    """End a service on all nodes, and wait until its names are free again. Returns on how many nodes it ran.

    Raises:
        ServiceTimeoutError: an actor doesn't end.
    """
    count = len(nodes_of(service))
    deadline = time.monotonic() + _STOP_TIMEOUT_S
    while left := _actors_of(service):
        if time.monotonic() > deadline:
            raise ServiceTimeoutError(f"service {service!r} did not end in {_STOP_TIMEOUT_S:.0f} s")
        for actor in left:  # the controller first: it would bring the others up again
            ray.kill(actor, no_restart=True)
        time.sleep(0.02)
    return count


def _actors_of(service: str) -> list[Any]:
    found: list[Any] = []
    with suppress(ServiceNotRunningError):
        found.append(find_controller(service))
    listed = actors_of(service)
    for kind in (HIDDEN_STATES, KV):
        for node_id in listed[kind]:
            with suppress(ServiceNotRunningError):
                found.append(find_actor(service, kind, node_id))
    return found
