"""Creates a node's two actors, from a task that runs on that node."""

import logging
import time
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.hidden_state_actor import ROWS, HiddenStateActor
from actors.kv_actor import KVActor
from hs_cache.config import CacheConfig
from hs_cache.errors import PoolError, ServiceNotRunningError
from hs_cache.extents import ALIGNMENT
from hs_cache.machine import require_headroom
from hs_cache.router import HIDDEN_STATES, KV, NAMESPACE, actor_name, actors_of, find_controller, nodes_of, translated

logger = logging.getLogger(__name__)

CONCURRENT_CALLS = 32
"""Threads of an actor that serves many callers."""

_CONCURRENT_ROWS = 8
_POLL_S = 0.02


def create_pair(config: CacheConfig, service: str) -> None:
    """Create the actors of the node that this runs on, unless they are there, and wait until they answer.

    Those that run with other settings, left behind by a controller that is gone, are replaced.

    Memory is checked here and not only in the actor: an error in an actor's constructor would arrive as text.

    Raises:
        PoolTooLargeError: the node has no room for the pool; nothing was created.
        ServiceNotRunningError: the service was stopped meanwhile; nothing remains.
        ServiceError: an actor can't be created, or died.
    """
    node_id = ray.get_runtime_context().get_node_id()
    find_controller(service)
    while True:
        pair = _create(config, service, node_id)
        what = "the KV actor"
        try:
            ray.get(pair[1].bound.remote())  # first: without it the other can't begin, and wouldn't know why
            what = "the hidden-state actor"
            running: CacheConfig = ray.get(pair[0].config.remote())
        except Exception as error:
            raise translated(error, what) from error
        if running.model_dump() == config.model_dump():
            return
        logger.warning("actors with other settings are replaced: this service's controller did not create them")
        _end(pair)
        while node_id in set().union(*actors_of(service).values()):
            time.sleep(_POLL_S)


def _create(config: CacheConfig, service: str, node_id: str) -> tuple[Any, Any]:
    if node_id not in nodes_of(service):
        if config.max_hidden_state_cpu_bytes < ALIGNMENT:
            size = config.max_hidden_state_cpu_size
            raise PoolError(f"max_hidden_state_cpu_size: got {size} GiB, expected at least {ALIGNMENT} bytes")
        require_headroom(config.max_hidden_state_cpu_bytes)
    options: dict[str, Any] = {
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "get_if_exists": True,
        "num_cpus": 0,
        "max_restarts": -1,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False),
    }
    kv: Any = ray.remote(KVActor).options(name=actor_name(service, KV, node_id), **options).remote(config)
    name = actor_name(service, HIDDEN_STATES, node_id)
    actor: Any = (
        ray.remote(concurrency_groups={ROWS: _CONCURRENT_ROWS})(HiddenStateActor)  # type: ignore[call-overload]
        .options(name=name, max_concurrency=CONCURRENT_CALLS, **options)
        .remote(service, config)
    )
    try:
        find_controller(service)
    except ServiceNotRunningError:
        # It has ended after the first look, so whoever stopped the service may not have seen these.
        _end((actor, kv))
        raise
    return actor, kv


def _end(pair: tuple[Any, Any]) -> None:
    for actor in pair:
        ray.kill(actor, no_restart=True)
