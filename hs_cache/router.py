"""From a client to the actors of a Ray cluster: which node serves it, how calls reach it, where Ray's errors end."""

import asyncio
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from hs_cache.effects import Call, Effect, Fetch, Locate, Located, Steps, Work
from hs_cache.errors import HiddenStateCacheError, ServiceError, ServiceNotRunningError, ServiceTimeoutError

T = TypeVar("T")

NAMESPACE = "hs_cache"
"""The Ray namespace of every actor of every service."""

HIDDEN_STATES, KV = "hidden_states", "kv"
"""The two kinds of actors that a node has."""


def require_ray() -> None:
    """Refuse before Ray would initialise itself: it does so at any call, and would join, or even start, some cluster.

    Raises:
        ServiceNotRunningError: this process has not joined a cluster, or has left it.
    """
    if not ray.is_initialized():
        raise ServiceNotRunningError("Ray is not initialised in this process: ray.init() joins or starts a cluster")


def actor_name(service: str, kind: str, node_id: str) -> str:
    """The name of a node's actor in `NAMESPACE`."""
    return f"{service}/{kind}/{node_id}"


def nodes_of(service: str, kind: str = HIDDEN_STATES) -> list[str]:
    """Hex ids of the nodes that have an actor of this kind, sorted. One call to the cluster's control store; blocks for
    it.

    Raises:
        ServiceError: Ray isn't initialised, or the cluster can't be reached.
    """
    prefix = actor_name(service, kind, "")
    require_ray()
    try:
        actors = ray.util.list_named_actors(all_namespaces=True)
    except Exception as error:
        raise translated(error, "listing actors") from error
    names = (actor["name"] for actor in actors if actor["namespace"] == NAMESPACE)
    return sorted(name.removeprefix(prefix) for name in names if name.startswith(prefix))


def find_actor(service: str, kind: str, node_id: str) -> ActorHandle[Any]:
    """The handle of a node's actor, for calls of one's own.

    Raises:
        ServiceNotRunningError: there is none, or Ray isn't initialised.
    """
    require_ray()
    try:
        return ray.get_actor(actor_name(service, kind, node_id), namespace=NAMESPACE)
    except ValueError as error:
        raise ServiceNotRunningError(f"service {service!r} has no {kind} actor on node {node_id}") from error
    except Exception as error:
        raise translated(error, "finding an actor") from error


def rendezvous(key: str, nodes: Iterable[str]) -> str:
    """The node with the highest hash of (key, node): the same for everyone, and stable when other nodes come and go.

    Rendezvous hashing, Thaler and Ravishankar 1998.
    """
    return max(nodes, key=lambda node: (hashlib.sha256(f"{key}\0{node}".encode()).digest(), node))


@dataclass(frozen=True)
class RayPeer:
    """An actor, as an address for calls."""

    handle: ActorHandle[Any]
    node_id: str

    def post(self, method: str, *args: Any) -> None:
        """Call without waiting, and without learning of any error but that the call could not be sent."""
        require_ray()
        try:
            getattr(self.handle, method).remote(*args)
        except Exception as error:
            raise translated(error, method) from error


class Router:
    """Decides which node serves this process, and drives operations; pickles, and decides anew where it is unpickled.

    The node's own actor serves it, since only there are rows shared without a copy. A process on a node without one
    gets a node by rendezvous hashing of its own node's id, so that writers and readers on the same node meet.
    """

    def __init__(self, service: str) -> None:
        self._service = service

    @property
    def service(self) -> str:
        """The service's name."""
        return self._service

    def locate(self) -> Located:
        """Blocks for two or three calls to the cluster's control store.

        Raises:
            ServiceNotRunningError: no node has an actor of this service.
            ServiceError: Ray isn't initialised, or the cluster can't be reached.
        """
        require_ray()
        here = ray.get_runtime_context().get_node_id()
        nodes = nodes_of(self._service)
        if not nodes:
            raise ServiceNotRunningError(
                f"no service named {self._service!r} runs in this Ray cluster: "
                "`hs-cache start` or hs_cache.connect() start one"
            )
        node_id = here if here in nodes else rendezvous(here, nodes)
        peer = RayPeer(find_actor(self._service, HIDDEN_STATES, node_id), node_id)
        return Located(peer, RayPeer(find_actor(self._service, KV, node_id), node_id), here)

    def run(self, steps: Steps[T]) -> T:
        """Drive an operation, blocking."""
        try:
            effect = next(steps)
            while True:
                try:
                    result = self._perform(effect)
                # Whatever ends an effect, also KeyboardInterrupt, goes through the operation, which gives up what it
                # holds.
                except BaseException as error:
                    effect = steps.throw(error)
                else:
                    effect = steps.send(result)
        except StopIteration as done:
            value: T = done.value
            return value

    async def arun(self, steps: Steps[T]) -> T:
        """Drive an operation from an event loop, which is never blocked for longer than a few microseconds."""
        try:
            effect = next(steps)
            while True:
                try:
                    result = await self._aperform(effect)
                except BaseException as error:
                    effect = steps.throw(error)
                else:
                    effect = steps.send(result)
        except StopIteration as done:
            value: T = done.value
            return value

    def _perform(self, effect: Effect) -> Any:
        if isinstance(effect, Locate):
            return self.locate()
        if isinstance(effect, Work):
            return effect.run()
        try:
            return ray.get(_sent(effect), timeout=effect.timeout_s)
        except Exception as error:
            raise translated(error, _described(effect)) from error

    async def _aperform(self, effect: Effect) -> Any:
        if isinstance(effect, Locate):
            return await asyncio.to_thread(self.locate)
        if isinstance(effect, Work):
            return await asyncio.to_thread(effect.run)
        try:
            return await asyncio.wait_for(_result(_sent(effect)), effect.timeout_s)
        except Exception as error:
            raise translated(error, _described(effect)) from error


async def _result(ref: Any) -> Any:
    return await ref


def _sent(effect: Call | Fetch) -> Any:
    require_ray()
    if isinstance(effect, Fetch):
        return effect.ref
    assert isinstance(effect.peer, RayPeer)
    return getattr(effect.peer.handle, effect.method).remote(*effect.args)


def _described(effect: Call | Fetch) -> str:
    return "fetching rows" if isinstance(effect, Fetch) else effect.method


def translated(error: Exception, what: str) -> Exception:
    """Ray's errors as ours. An error of ours that an actor raised comes back as itself; a bug stays what it is."""
    if isinstance(error, RayTaskError) and isinstance(error.cause, HiddenStateCacheError):
        return error.cause
    if isinstance(error, GetTimeoutError | asyncio.TimeoutError):
        return ServiceTimeoutError(f"{what} did not return in time")
    if isinstance(error, RayTaskError) or not isinstance(error, RayError | ConnectionError | RuntimeError):
        return error
    return ServiceError(f"{what}: {type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}")
