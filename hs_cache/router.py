"""From a client to the actors of a Ray cluster: which node serves it, how calls reach it, where Ray's errors end."""

import asyncio
import hashlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar, cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from hs_cache.effects import Begin, Call, Effect, Fetch, Find, Locate, Located, Pause, Steps, Work
from hs_cache.errors import HiddenStateCacheError, ServiceError, ServiceNotRunningError, ServiceTimeoutError
from hs_cache.wire import REPLIES, message, plain

T = TypeVar("T")

_LEAST_S = 0.01
"""What has arrived already is taken also where no time is left, and the event loop takes a moment for that."""

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


def controller_name(service: str) -> str:
    """The name of a service's controller in `NAMESPACE`."""
    return f"{service}/controller"


def actors_of(service: str) -> dict[str, set[str]]:
    """For each kind of actor, the hex ids of the nodes that have one. One call to the cluster's control store; blocks
    for it.

    Raises:
        ServiceError: Ray isn't initialised, or the cluster can't be reached.
    """
    require_ray()
    try:
        actors = ray.util.list_named_actors(all_namespaces=True)
    except Exception as error:
        raise translated(error, "listing actors") from error
    names = [actor["name"] for actor in actors if actor["namespace"] == NAMESPACE]
    prefixes = {kind: actor_name(service, kind, "") for kind in (HIDDEN_STATES, KV)}
    return {
        kind: {name.removeprefix(prefix) for name in names if name.startswith(prefix)}
        for kind, prefix in prefixes.items()
    }


def nodes_of(service: str) -> list[str]:
    """Hex ids of the nodes that have a hidden-state actor, sorted; see `actors_of`."""
    return sorted(actors_of(service)[HIDDEN_STATES])


def find_actor(service: str, kind: str, node_id: str) -> ActorHandle[Any]:
    """The handle of a node's actor, for calls of one's own.

    Raises:
        ServiceNotRunningError: there is none, or Ray isn't initialised.
    """
    return _find(actor_name(service, kind, node_id), f"service {service!r} has no {kind} actor on node {node_id}")


def find_controller(service: str) -> ActorHandle[Any]:
    """The handle of a service's controller.

    Raises:
        ServiceNotRunningError: there is none, or Ray isn't initialised.
    """
    return _find(controller_name(service), f"service {service!r} has no controller")


def is_running(service: str) -> bool:
    """Whether a service of that name was started, and not stopped; it may have no node yet.

    Raises:
        ServiceError: Ray isn't initialised, or the cluster can't be reached.
    """
    try:
        find_controller(service)
    except ServiceNotRunningError:
        require_ray()
        return False
    return True


def _find(name: str, otherwise: str) -> ActorHandle[Any]:
    require_ray()
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError as error:
        raise ServiceNotRunningError(otherwise) from error
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
        with _sending(method):
            getattr(self.handle, method).remote(*args)


class Router:
    """Decides which node serves this process, and drives operations; pickles, and decides anew where it is unpickled.

    The node's own actor serves it, since only there are rows shared without a copy. A process on a node without one
    gets a node by rendezvous hashing of its own node's id, so that writers and readers on the same node meet. Actors of
    other nodes are looked up once, and again after a call to them has failed.
    """

    def __init__(self, service: str) -> None:
        self._service = service
        self._peers: dict[str | None, RayPeer] = {}

    def __getstate__(self) -> dict[str, str]:
        return {"service": self._service}

    def __setstate__(self, state: dict[str, str]) -> None:
        self.__init__(state["service"])  # type: ignore[misc]

    @property
    def service(self) -> str:
        """The service's name."""
        return self._service

    def locate(self, avoid: Set[str] = frozenset()) -> Located:
        """Blocks for two to four calls to the cluster's control store.

        Args:
            avoid: nodes that are to serve a process on another node only if there are no others.

        Raises:
            ServiceNotRunningError: no node has an actor of this service.
            ServiceError: Ray isn't initialised, or the cluster can't be reached.
        """
        require_ray()
        node_id = here = ray.get_runtime_context().get_node_id()
        try:
            handle = find_actor(self._service, HIDDEN_STATES, here)
        except ServiceNotRunningError:
            nodes = nodes_of(self._service)
            if not nodes:
                raise self._no_nodes() from None
            node_id = rendezvous(here, set(nodes) - avoid or nodes)
            handle = find_actor(self._service, HIDDEN_STATES, node_id)
        return Located(RayPeer(handle, node_id), RayPeer(find_actor(self._service, KV, node_id), node_id), here)

    def _no_nodes(self) -> ServiceNotRunningError:
        if is_running(self._service):
            return ServiceNotRunningError(
                f"service {self._service!r} has no node yet: none that joined matches its node_selector, or their "
                "actors are still being created"
            )
        return ServiceNotRunningError(
            f"no service named {self._service!r} runs in this Ray cluster: "
            "`hs-cache start` or hs_cache.connect() start one"
        )

    def find(self, node_id: str | None) -> RayPeer:
        """The hidden-state actor of a node, or the controller; blocks for the control store when it isn't known yet.

        Raises:
            ServiceError: there is none, or the cluster can't be reached.
        """
        peer = self._peers.get(node_id)
        if peer is None:
            if node_id is None:
                peer = RayPeer(find_controller(self._service), "")
            else:
                peer = RayPeer(find_actor(self._service, HIDDEN_STATES, node_id), node_id)
            self._peers[node_id] = peer
        return peer

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
        """Drive an operation from an event loop, which is blocked for checking arguments and computing keys only."""
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
        if isinstance(effect, Work):
            return effect.run()
        if isinstance(effect, Pause):
            return time.sleep(effect.seconds)
        if isinstance(effect, Locate | Find):
            return self._known(effect) or bounded(partial(self._look_up, effect), effect.timeout_s)
        try:
            ref = _sent(effect)
            if isinstance(effect, Begin):
                return ref
            try:
                return _answer(effect, ray.get(ref, timeout=effect.timeout_s))
            except (GetTimeoutError, KeyboardInterrupt):
                _abandon(effect, ref)
                raise
        except Exception as error:
            failure = self._failed(effect, error)
        try:  # not while the other is being handled, see `translated`
            raise failure
        finally:
            del failure

    async def _aperform(self, effect: Effect) -> Any:
        if isinstance(effect, Work):
            return await _uninterrupted(effect.run, effect.revoke)
        if isinstance(effect, Pause):
            return await asyncio.sleep(effect.seconds)
        if isinstance(effect, Locate | Find):
            known = self._known(effect)
            return known or await asyncio.to_thread(bounded, partial(self._look_up, effect), effect.timeout_s)
        try:
            if isinstance(effect, Begin):
                return _sent(effect)
            carries_rows = isinstance(effect, Call) and effect.carries_rows
            # The thread copies the caller's rows: see `_uninterrupted`.
            ref = await _uninterrupted(partial(_sent, effect)) if carries_rows else _sent(effect)
            try:
                return _answer(effect, await asyncio.wait_for(_result(ref), max(effect.timeout_s, _LEAST_S)))
            except (asyncio.TimeoutError, asyncio.CancelledError):
                _abandon(effect, ref)
                raise
        except Exception as error:
            failure = self._failed(effect, error)
        try:
            raise failure
        finally:
            del failure

    def _known(self, effect: Locate | Find) -> RayPeer | None:
        return self._peers.get(effect.node_id) if isinstance(effect, Find) else None

    def _look_up(self, effect: Locate | Find) -> Located | RayPeer:
        return self.find(effect.node_id) if isinstance(effect, Find) else self.locate(effect.avoid)

    def _failed(self, effect: Call | Begin | Fetch, error: Exception) -> Exception:
        if isinstance(effect, Fetch):
            self._peers.clear()  # which of them it was isn't known, and looking them up costs little
            if isinstance(error, ValueError):  # of a cluster that this process has left
                return _caused(ServiceError(f"a ref can't be resolved here: {str(error).splitlines()[0]}"), error)
            return translated(error, "waiting for another node")
        for node_id, peer in list(self._peers.items()):
            if peer is effect.peer:
                self._peers.pop(node_id, None)  # another thread may have had the same trouble
        return translated(error, effect.method)


async def _uninterrupted(function: Callable[[], T], revoke: Callable[[], bool] = lambda: False) -> T:
    """Run a copy on a thread. Cancelled, it returns only when the copy has ended, or never begins since `revoke` said
    so: the caller's buffers are his again after that, not before."""
    running = asyncio.ensure_future(asyncio.to_thread(function))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        while not revoke() and not running.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([running])
        running.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # nobody else will look
        raise


def _abandon(effect: Call | Fetch, ref: Any) -> None:
    """Nobody waits for this answer any more. If it is an error, Ray would print it as one that nobody has seen."""
    if isinstance(effect, Call):  # what is fetched may be rows, which would be moved for nothing
        ref.future().add_done_callback(lambda ended: ended.cancelled() or ended.exception())


async def _result(ref: Any) -> Any:
    return await ref


def _sent(effect: Call | Begin | Fetch) -> Any:
    require_ray()
    if isinstance(effect, Fetch):
        return effect.ref
    assert isinstance(effect.peer, RayPeer)
    method = getattr(effect.peer.handle, effect.method)
    if isinstance(effect, Begin):
        method = method.options(num_returns=effect.num_returns)
    args = map(plain, effect.args) if effect.method in REPLIES else effect.args
    with _sending(effect.method):
        return method.remote(*args)


def _answer(effect: Call | Fetch, value: Any) -> Any:
    if isinstance(effect, Call) and effect.method in REPLIES:
        return message(REPLIES[effect.method], value)
    return value


@contextmanager
def _sending(method: str) -> Iterator[None]:
    """What Ray raises before a call is on its way, a bare Exception for a handle of another cluster among it."""
    try:
        yield
    except Exception as error:
        raise ServiceError(f"{method} could not be sent: {type(error).__name__}: {error}") from error


def bounded(function: Callable[[], T], timeout_s: float) -> T:
    """The result of a call that has no deadline of its own; `ServiceTimeoutError` when it takes longer than that."""
    results: SimpleQueue[tuple[T | None, BaseException | None]] = SimpleQueue()

    def work() -> None:
        try:
            results.put((function(), None))
        except BaseException as error:
            results.put((None, error))

    threading.Thread(target=work, name="hs_cache-lookup", daemon=True).start()
    try:
        value, error = results.get(timeout=max(timeout_s, 0.0))
    except Empty:
        raise ServiceTimeoutError("the cluster's control store did not answer in time") from None
    if error is not None:
        raise error
    return cast(T, value)


def translated(error: Exception, what: str) -> Exception:
    """Ray's errors as ours, which they cause. Ours that an actor raised come back as such; a bug stays what it is.

    What comes back as itself, Ray's error refers to. Raised while that is handled it would refer to Ray's in turn, and
    the frames of both, with the rows that a caller stores, would wait for the garbage collector.
    """
    if isinstance(error, RayTaskError):
        # What Ray raises is of a class made for it, which is of ours too, and which can't be pickled.
        return error.cause if isinstance(error.cause, HiddenStateCacheError) else error
    if isinstance(error, HiddenStateCacheError):
        return error
    if isinstance(error, GetTimeoutError | asyncio.TimeoutError):
        return _caused(ServiceTimeoutError(f"{what} did not return in time"), error)
    if not isinstance(error, RayError | ConnectionError | RuntimeError):
        return error
    lines = str(error).strip().splitlines() or [""]
    # Ray begins with what happened, but where an actor's constructor raised, what it raised stands at the end.
    line = lines[-1 if getattr(error, "actor_init_failed", False) else 0]
    return _caused(ServiceError(f"{what}: {type(error).__name__}: {line}"), error)


def _caused(ours: ServiceError, error: Exception) -> ServiceError:
    ours.__cause__ = error
    return ours
