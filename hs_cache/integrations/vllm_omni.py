"""A connector for vLLM-Omni: stages hand each other their payloads through the cache service.

Written to the interface that vLLM-Omni publishes in ``vllm_omni/distributed/omni_connectors/connectors/base.py`` and
``factory.py`` (Apache-2.0). Where ``vllm_omni`` can be imported the connector is a subclass of its base class and
registers itself; everywhere else it works by itself, with the same methods. See docs/vllm_omni.md.
"""

import inspect
import logging
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

import ray

from hs_cache.client import connect
from hs_cache.errors import ConfigError, HiddenStateCacheError, InvalidInputError
from hs_cache.launch import join
from hs_cache.leases import this_process
from hs_cache.messages import NodeStatistics
from hs_cache.parcels import ParcelName, Parcels, Sent
from hs_cache.payloads import pack, unpack

if TYPE_CHECKING:
    OmniConnectorBase = object
else:
    try:
        from vllm_omni.distributed.omni_connectors.connectors.base import OmniConnectorBase
    except ImportError:
        OmniConnectorBase = object

logger = logging.getLogger(__name__)

CONNECTOR_NAME = "HiddenStateCacheConnector"
"""Under which vLLM-Omni's stage configuration names this connector."""

_METADATA = "hs_cache"
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.05
_LEAST_TIMEOUT_S = 0.1
"""A call near a deadline gets so long, or a service that is well would look as if it weren't."""

_FIRST_REAP = 256
_REAPED_AT_ONCE = 4096
_MAX_ROUTES = 64
_MAX_UNDROPPED = 1024
_COUNTERS = ("puts", "gets", "bytes_put", "bytes_got", "put_failures", "get_failures", "reclaimed")


class HiddenStateCacheConnector(OmniConnectorBase):
    """Moves payloads between stages. Thread-safe.

    A payload is known by (from_stage, to_stage, key). It lies in the pool of the node that serves the producer, is not
    evicted there, and goes when it is got or cleaned up, when this connector is closed, or when its process is gone. A
    `put` under a key that is still there replaces it. Where the producer's node can't share its pool with it, a payload
    counts as any chunk of the cache, and may be evicted.

    Tensors and arrays anywhere in a payload go as raw bytes, see `hs_cache.payloads.pack`; those of a GPU are copied to
    the CPU, where they arrive. Between processes of a node they arrive without a copy where they are large, as memory
    of the taker's own that holds the payload's part of the pool until the last of them is gone. Everything else in a
    payload is pickled: who can write to the service can run code in the stages that read from it.

    Args:
        config: what vLLM-Omni has under ``extra``. Of its own this knows ``service`` (default ``"default"``),
            ``address`` (of a Ray cluster to join, if this process hasn't joined one), ``config`` (settings for a
            service that has to be started, as `hs_cache.connect` takes them), ``namespace`` (payloads of two pipelines
            don't meet) and ``timeout_s`` (per round trip; default the service's ``rpc_timeout_s``). Others are ignored.

    Raises:
        InvalidInputError: a setting is wrong.
        ServiceError: the service can't be reached or started.
    """

    supports_raw_data = True

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        self._lock = threading.Lock()
        self._closed = False
        self._releaser = this_process().releaser
        self._sent: OrderedDict[str, dict[tuple[str, str], Sent]] = OrderedDict()
        self._num_sent = 0
        self._reap_at = _FIRST_REAP
        self._routes: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._undropped: OrderedDict[ParcelName, bytes] = OrderedDict()
        self._counts = dict.fromkeys(_COUNTERS, 0)
        self._in_trouble = False
        settings = _settings(config)
        self._namespace: str = settings["namespace"]
        self._service: str = settings["service"]
        if {"from_stage", "to_stage"} <= settings.keys():
            self._routes[str(settings["from_stage"]), str(settings["to_stage"])] = None
        if settings["address"] is not None and not ray.is_initialized():
            join(settings["address"])
        cache = connect(settings["config"], service=self._service)
        if cache is None:
            raise ConfigError("enable_hidden_state_cache: got false, expected true where payloads are to go through it")
        self._cache = cache
        self._router, self._session = cache.parts()
        self._parcels = Parcels(self._session, settings["timeout_s"])

    def __enter__(self) -> "HiddenStateCacheConnector":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # Runs wherever Python collects, also inside of somebody's lock: so it calls nobody, and takes no lock.
        if not sys.is_finalizing() and not self.__dict__.get("_closed", True):
            self._let_go(sent for of_key in self._sent.values() for sent in of_key.values())

    @staticmethod
    def _make_key(key: str, from_stage: str, to_stage: str, separator: str = "@") -> str:
        return f"{key}{separator}{from_stage}_{to_stage}"

    def put(self, from_stage: str, to_stage: str, put_key: str, data: Any) -> tuple[bool, int, dict[str, Any] | None]:
        """Leave a payload for `get`, in the place of what is still there under this key.

        Blocks until it is copied; `data` must not be written to meanwhile.

        Returns:
            Whether it is there, its size in bytes, and metadata that `get` may be given; ``(False, 0, None)`` when
            there is no room or the service is in trouble. What was there under this key goes in either case.

        Raises:
            InvalidInputError: an argument is wrong, or `data` has something in it that can't be sent.
        """
        route, name = self._named(from_stage, to_stage, "put_key", put_key)
        payload = pack(data)
        try:
            sent = self._router.run(self._parcels.put(name, payload))
        except InvalidInputError:
            raise
        except HiddenStateCacheError as error:
            sent, reason = None, f"{type(error).__name__}: {error}"
        else:
            reason = "there is no room for it in the pool, or the service can't be reached"
        if sent is None:
            self._forget(put_key, route)
            self._failed("put_failures", f"put of {self._make_key(put_key, *route)} ({payload.nbytes} bytes): {reason}")
            return False, 0, None
        with self._lock:
            self._in_trouble = False
            self._counts["puts"] += 1
            self._counts["bytes_put"] += sent.nbytes
            of_key = self._sent.setdefault(put_key, {})
            replaced = of_key.get(route)
            of_key[route] = sent
            self._num_sent += replaced is None
            reap = self._num_sent >= self._reap_at
            closed = self._closed
        if replaced is not None and replaced.node_id != sent.node_id:
            self._let_go([replaced])
        if closed:  # while it was on its way
            self._forget(put_key, route)
            return False, 0, None
        if reap:
            self.reap_consumed()
        return True, sent.nbytes, {_METADATA: {"node": sent.node_id}, "size": sent.nbytes}

    def get(
        self, from_stage: str, to_stage: str, get_key: str, metadata: dict[str, Any] | None = None
    ) -> tuple[Any, int] | None:
        """Take a payload: it is gone from the service then. Two that take it at the same time may both get it.

        Args:
            metadata: what `put` returned, or a mapping from the key to that. Then only the node that it names is asked;
                without it, this client's node and then whatever other node the service's directory names.

        Returns:
            The payload and its size in bytes; None if it isn't there, or can't be reached.

        Raises:
            InvalidInputError: an argument is wrong.
        """
        _, name = self._named(from_stage, to_stage, "get_key", get_key)
        return self._take(name, _node_of(get_key, metadata), self._parcels.timeout_s)

    def get_with_deadline(
        self,
        from_stage: str,
        to_stage: str,
        get_key: str,
        metadata: dict[str, Any] | None = None,
        *,
        deadline: float,
    ) -> tuple[Any, int] | None:
        """As `get`, and waits for the payload until `deadline`, in seconds of ``time.monotonic()``."""
        _, name = self._named(from_stage, to_stage, "get_key", get_key)
        if isinstance(deadline, bool) or not isinstance(deadline, int | float):
            raise InvalidInputError(f"deadline: got {deadline!r}, expected seconds of time.monotonic()")
        node_id, pause_s = _node_of(get_key, metadata), _FIRST_PAUSE_S
        while not self._closed and (left_s := deadline - time.monotonic()) > 0:
            taken = self._take(name, node_id, min(max(left_s, _LEAST_TIMEOUT_S), self._parcels.timeout_s))
            if taken is not None:
                return taken
            time.sleep(max(min(pause_s, deadline - time.monotonic()), 0.0))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return None

    def cleanup(self, request_id: str) -> bool | None:
        """Drop what is still there under a key, exactly as it was given to `put`, on every route of this connector.

        Returns:
            Whether something was; None if the service could not be asked. It goes then as soon as that is back.
        """
        if not isinstance(request_id, str):
            raise InvalidInputError(f"request_id: got {type(request_id).__name__}, expected str")
        with self._lock:
            sent = list(self._sent.pop(request_id, {}).values())
            self._num_sent -= len(sent)
            routes = list(self._routes)
        if sent:
            count, asked = self._drop_all((parcel.name, parcel.generation, parcel.node_id) for parcel in sent)
        else:
            count, asked = self._drop_all((self._name(request_id, route), None, "") for route in routes)
        if not asked:
            self._let_go(sent)
        return True if count else False if asked else None

    def abandon_get(self, get_key: str) -> None:
        """Nothing to do: a `get` that has returned leaves nothing behind."""

    def reap_consumed(self) -> None:
        """Forget payloads of this connector that others have taken. It happens by itself now and then."""
        with self._lock:
            known = [(key, route, sent) for key, of_key in self._sent.items() for route, sent in of_key.items()]
        for begin in range(0, len(known), _REAPED_AT_ONCE):
            part = known[begin : begin + _REAPED_AT_ONCE]
            by_node: dict[str, list[Sent]] = {}
            for _, _, sent in part:
                by_node.setdefault(sent.node_id, []).append(sent)
            try:
                gone = set(map(id, self._router.run(self._parcels.gone(by_node))))
            except HiddenStateCacheError as error:
                logger.debug("what was put can't be looked after: %s", error)
                break
            with self._lock:
                for key, route, sent in part:
                    of_key = self._sent.get(key, {})
                    if id(sent) in gone and of_key.get(route) is sent:
                        del of_key[route]
                        self._num_sent -= 1
                        if not of_key:
                            del self._sent[key]
        with self._lock:
            self._reap_at = max(_FIRST_REAP, 2 * self._num_sent)

    def health(self) -> dict[str, Any]:
        """``status`` is ``"healthy"`` where the node answers, else ``"unhealthy"``; counters besides."""
        node: NodeStatistics | None = None
        try:
            node = self._router.run(self._session.call("stats", otherwise=node))
        except HiddenStateCacheError as error:
            logger.debug("no health: %s", error)
        with self._lock:
            return {
                "status": "healthy" if node is not None and not self._closed else "unhealthy",
                "service": self._service,
                "node": node.node_id if node is not None else None,
                "outstanding": self._num_sent,
                **self._counts,
            }

    def close(self) -> None:
        """Drop what is left of what this connector put, and end it; idempotent. Payloads got stay valid."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            sent = [sent for of_key in self._sent.values() for sent in of_key.values()]
            self._sent.clear()
            self._num_sent = 0
        self._let_go(sent)
        self._releaser.flush()
        self._drop_all((parcel.name, parcel.generation, parcel.node_id) for parcel in sent if parcel.hold is None)
        self._cache.close()

    def _drop_all(self, parcels: Iterable[tuple[ParcelName, bytes | None, str]]) -> tuple[int, bool]:
        """Drop parcels, given as to `Parcels.drop`, until one can't be asked for: how many, and whether all could."""
        count, asked = 0, True
        try:
            for parcel in parcels:
                dropped = self._router.run(self._parcels.drop(*parcel))
                if dropped is None:  # nor would it answer the next one, and each costs its deadline
                    asked = False
                    break
                count += dropped
        except HiddenStateCacheError as error:
            asked = False
            logger.debug("what was put can't be dropped: %s", error)
        with self._lock:
            self._counts["reclaimed"] += count
        return count, asked

    def _take(self, name: ParcelName, node_id: str, timeout_s: float) -> tuple[Any, int] | None:
        try:
            taken = self._router.run(self._parcels.take(name, node_id, timeout_s))
        except HiddenStateCacheError as error:
            self._failed("get_failures", f"get: {type(error).__name__}: {error}")
            return None
        if taken is None:
            return None
        with self._lock:
            again = self._undropped.pop(name, None) == taken.generation
            if not taken.dropped:
                self._undropped[name] = taken.generation
                while len(self._undropped) > _MAX_UNDROPPED:
                    self._undropped.popitem(last=False)
        if again:  # it was handed out before, and could not be dropped then
            return None
        try:
            data = unpack(taken.content)
        except Exception as error:  # whatever the classes of the payload raise, which are not ours
            logger.error("a payload can't be unpickled here, and is lost: %s: %s", type(error).__name__, error)
            with self._lock:
                self._counts["get_failures"] += 1
            return None
        with self._lock:
            self._counts["gets"] += 1
            self._counts["bytes_got"] += taken.content.nbytes
        return data, taken.content.nbytes

    def _named(self, from_stage: Any, to_stage: Any, what: str, key: Any) -> tuple[tuple[str, str], ParcelName]:
        for argument, stage in (("from_stage", from_stage), ("to_stage", to_stage)):
            if isinstance(stage, bool) or not isinstance(stage, str | int):
                raise InvalidInputError(f"{argument}: got {type(stage).__name__}, expected str")
        if not isinstance(key, str):
            raise InvalidInputError(f"{what}: got {type(key).__name__}, expected str")
        route = (str(from_stage), str(to_stage))
        with self._lock:
            self._routes[route] = None
            self._routes.move_to_end(route)
            while len(self._routes) > _MAX_ROUTES:
                self._routes.popitem(last=False)
        return route, self._name(key, route)

    def _name(self, key: str, route: tuple[str, str]) -> ParcelName:
        return ParcelName.of(self._namespace, *route, key)

    def _forget(self, key: str, route: tuple[str, str]) -> None:
        with self._lock:
            of_key = self._sent.get(key, {})
            sent = of_key.pop(route, None)
            self._num_sent -= sent is not None
            if not of_key:
                self._sent.pop(key, None)
        if sent is not None:
            self._let_go([sent])

    def _let_go(self, sent: Iterable[Sent]) -> None:
        """End the holds that keep parcels: these go. Takes no lock, and calls nobody."""
        for parcel in sent:
            if parcel.hold is not None:
                incarnation, hold_id = parcel.hold
                self._releaser.end(incarnation, (hold_id,))

    def _failed(self, counter: str, what: str) -> None:
        with self._lock:
            self._counts[counter] += 1
            is_news, self._in_trouble = not self._in_trouble, True
        if is_news:
            logger.warning("%s; further failures are counted, not logged, until a put succeeds", what)


def register() -> None:
    """Make the connector known to vLLM-Omni as `CONNECTOR_NAME`; idempotent.

    Raises:
        ImportError: vLLM-Omni isn't installed.
    """
    from vllm_omni.distributed.omni_connectors.factory import OmniConnectorFactory

    if CONNECTOR_NAME in OmniConnectorFactory.list_registered_connectors():
        return
    # Releases before its connectors could both send and receive take no `supports_dual`.
    takes_dual = "supports_dual" in inspect.signature(OmniConnectorFactory.register_connector).parameters
    options = {"supports_dual": True} if takes_dual else {}
    OmniConnectorFactory.register_connector(CONNECTOR_NAME, HiddenStateCacheConnector, **options)


def _settings(config: Any) -> dict[str, Any]:
    if config is not None and not isinstance(config, Mapping):
        raise InvalidInputError(f"config: got {type(config).__name__}, expected a mapping")
    given = dict(config or {})
    nested = given.get("extra")
    settings = {
        "service": "default",
        "address": None,
        "namespace": "",
        "timeout_s": None,
        "config": None,
        **given,
        **(nested if isinstance(nested, Mapping) else {}),
    }
    for name, optional in (("service", False), ("namespace", False), ("address", True)):
        if not isinstance(settings[name], str) and not (optional and settings[name] is None):
            raise InvalidInputError(f"{name}: got {settings[name]!r}, expected str")
    timeout_s = settings["timeout_s"]
    if timeout_s is not None and (isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float)):
        raise InvalidInputError(f"timeout_s: got {timeout_s!r}, expected seconds")
    if timeout_s is not None and not 0 < timeout_s < float("inf"):
        raise InvalidInputError(f"timeout_s: got {timeout_s}, expected above 0")
    return settings


def _node_of(key: str, metadata: Any) -> str:
    """The node that a `put`'s metadata name, ``""`` for metadata of any other kind."""
    if isinstance(metadata, Mapping) and isinstance(metadata.get(key), Mapping):
        metadata = metadata[key]
    ours = metadata.get(_METADATA) if isinstance(metadata, Mapping) else None
    node_id = ours.get("node") if isinstance(ours, Mapping) else None
    return node_id if isinstance(node_id, str) else ""


if OmniConnectorBase is not object:
    register()
