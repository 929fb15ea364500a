"""A connector for vLLM-Omni: stages hand each other their payloads through the cache service.

Written to the interface that vLLM-Omni publishes in ``vllm_omni/distributed/omni_connectors/connectors/base.py`` and
``factory.py`` (Apache-2.0). Where ``vllm_omni`` can be imported the connector is a subclass of its base class and
registers itself; everywhere else it works by itself, with the same methods. See docs/vllm_omni.md.
"""

import difflib
import inspect
import logging
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
_COUNTERS = ("puts", "gets", "bytes_put", "bytes_got", "put_failures", "get_failures", "reclaimed", "expired")

_DEFAULTS = {
    "service": "default",
    "address": None,
    "namespace": "",
    "timeout_s": None,
    "ttl_s": 600.0,
    "config": None,
}
_NEAR_MISS = 0.8
"""From what `difflib` ratio on an unknown key is one of ours, misspelt. Those that vLLM-Omni's own connectors know
are all below 0.7."""


class HiddenStateCacheConnector(OmniConnectorBase):
    """Moves payloads between stages. Thread-safe.

    A payload is known by (from_stage, to_stage, key). It lies in the pool of the node that serves the producer, is not
    evicted there, and goes when it is got or cleaned up, when it has lain there for ``ttl_s``, when this connector is
    closed, or when its process is gone. A `put` under a key that is still there replaces it. Where the producer's node
    can't share its pool with it, a payload counts as any chunk of the cache, and may be evicted.

    Tensors and arrays anywhere in a payload go as raw bytes, see `hs_cache.payloads.pack`; those of a GPU are copied to
    the CPU, where they arrive. Between processes of a node they arrive without a copy where they are large, as memory
    of the taker's own that holds the payload's part of the pool until the last of them is gone. Everything else in a
    payload is pickled: who can write to the service can run code in the stages that read from it.

    Args:
        config: what vLLM-Omni has under ``extra``. Of its own this knows ``service`` (default ``"default"``),
            ``address`` (of a Ray cluster to join, if this process hasn't joined one), ``config`` (settings for a
            service that has to be started, as `hs_cache.connect` takes them), ``namespace`` (one per pipeline: payloads
            of two that have the same get mixed up), ``timeout_s`` (per round trip; default the service's
            ``rpc_timeout_s``) and ``ttl_s`` (payloads put longer ago than that and not taken are dropped with the next
            `put`; default 600, None for never). Others are vLLM-Omni's, and are ignored.

    Raises:
        InvalidInputError: a setting is wrong; `ConfigError` for one that looks like a setting's name misspelt.
        ServiceError: the service can't be reached or started.
    """

    supports_raw_data = True

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        self._lock = threading.Lock()
        self._closed = False
        self._releaser = this_process().releaser
        self._outbox = _Outbox()
        self._reap_at = _FIRST_REAP
        self._routes: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._undropped: OrderedDict[ParcelName, bytes] = OrderedDict()
        self._counts = dict.fromkeys(_COUNTERS, 0)
        self._in_trouble = False
        settings = _settings(config)
        self._namespace: str = settings["namespace"]
        self._service: str = settings["service"]
        self._ttl_s: float = float("inf") if settings["ttl_s"] is None else settings["ttl_s"]
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
            self._let_go(self._outbox)

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
        self._expire()  # before it: there may be no room but theirs
        try:
            sent = self._router.run(self._parcels.put(name, payload))
        except InvalidInputError:
            raise
        except HiddenStateCacheError as error:
            sent, reason = None, f"{type(error).__name__}: {error}"
        else:
            reason = "there is no room for it in the pool, or the service can't be reached"
        if sent is None:
            self._forget(name)
            self._failed("put_failures", f"put of {self._make_key(put_key, *route)} ({payload.nbytes} bytes): {reason}")
            return False, 0, None
        with self._lock:
            self._in_trouble = False
            self._counts["puts"] += 1
            self._counts["bytes_put"] += sent.nbytes
            replaced = self._outbox.add(put_key, sent)
            reap = len(self._outbox) >= self._reap_at
            closed = self._closed
        if replaced is not None and replaced.node_id != sent.node_id:
            self._let_go([replaced])
        if closed:  # while it was on its way
            self._forget(name)
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
            sent = self._outbox.pop_key(request_id)
            routes = list(self._routes)
        if sent:
            count, asked = self._drop_all((parcel.name, parcel.generation, parcel.node_id) for parcel in sent)
        else:
            count, asked = self._drop_all((self._name(request_id, route), None, "") for route in routes)
        if not asked:
            self._let_go(sent)
        with self._lock:
            self._counts["reclaimed"] += count
        return True if count else False if asked else None

    def abandon_get(self, get_key: str) -> None:
        """Nothing to do: a `get` that has returned leaves nothing behind."""

    def reap_consumed(self) -> None:
        """Forget payloads of this connector that others have taken, and drop those that nobody took for ``ttl_s``.

        It happens by itself now and then.
        """
        self._expire()
        with self._lock:
            known = list(self._outbox)
        gone = self._gone(known)
        with self._lock:
            for sent in gone:
                self._outbox.pop(sent.name, sent)
            self._reap_at = max(_FIRST_REAP, 2 * len(self._outbox))

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
                "outstanding": len(self._outbox),
                **self._counts,
            }

    def close(self) -> None:
        """Drop what is left of what this connector put, and end it; idempotent. Payloads got stay valid."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            left, self._outbox = list(self._outbox), _Outbox()
        self._discard(left)
        self._releaser.flush()
        self._cache.close()

    def _expire(self) -> None:
        """Drop what was put longer than ``ttl_s`` ago and is still there."""
        with self._lock:
            expired = self._outbox.pop_older(self._ttl_s)
        if not expired:
            return
        taken = set(self._gone(expired))
        left = [sent for sent in expired if sent not in taken]
        self._discard(left)
        with self._lock:
            is_news = left and not self._counts["expired"]
            self._counts["expired"] += len(left)
        if is_news:
            logger.warning(
                "nobody took %d payloads within %g s: they are dropped; further ones are counted, not logged",
                len(left),
                self._ttl_s,
            )

    def _gone(self, sent: Sequence[Sent]) -> list[Sent]:
        """Which of them are surely not there any more."""
        gone: list[Sent] = []
        for begin in range(0, len(sent), _REAPED_AT_ONCE):
            by_node: dict[str, list[Sent]] = {}
            for parcel in sent[begin : begin + _REAPED_AT_ONCE]:
                by_node.setdefault(parcel.node_id, []).append(parcel)
            try:
                gone += self._router.run(self._parcels.gone(by_node))
            except HiddenStateCacheError as error:
                logger.debug("what was put can't be looked after: %s", error)
                break
        return gone

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

    def _forget(self, name: ParcelName) -> None:
        with self._lock:
            sent = self._outbox.pop(name)
        if sent is not None:
            self._let_go([sent])

    def _discard(self, sent: Sequence[Sent]) -> None:
        """Have parcels dropped; those that are kept take no round trip."""
        self._let_go(sent)
        self._drop_all((parcel.name, parcel.generation, parcel.node_id) for parcel in sent if parcel.hold is None)

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


@dataclass(frozen=True, slots=True)
class _Put:
    key: str
    sent: Sent
    at_s: float


class _Outbox:
    """What a connector has put and doesn't know to be gone: one parcel per name, oldest first. Not thread-safe."""

    def __init__(self) -> None:
        self._puts: OrderedDict[ParcelName, _Put] = OrderedDict()
        self._of_key: dict[str, set[ParcelName]] = {}

    def __len__(self) -> int:
        return len(self._puts)

    def __iter__(self) -> Iterator[Sent]:
        return (put.sent for put in self._puts.values())

    def add(self, key: str, sent: Sent) -> Sent | None:
        """Add what was put now; what it replaces."""
        replaced = self.pop(sent.name)
        self._puts[sent.name] = _Put(key, sent, time.monotonic())
        self._of_key.setdefault(key, set()).add(sent.name)
        return replaced

    def pop(self, name: ParcelName, only: Sent | None = None) -> Sent | None:
        """Take one out; if `only` is given, that one and not its successor."""
        put = self._puts.get(name)
        if put is None or (only is not None and only != put.sent):
            return None
        del self._puts[name]
        of_key = self._of_key[put.key]
        of_key.remove(name)
        if not of_key:
            del self._of_key[put.key]
        return put.sent

    def pop_key(self, key: str) -> list[Sent]:
        """Take out those of a key, of whatever route."""
        return [sent for name in list(self._of_key.get(key, ())) if (sent := self.pop(name))]

    def pop_older(self, age_s: float) -> list[Sent]:
        """Take out those that were put longer ago than that."""
        before, older = time.monotonic() - age_s, []
        while (put := next(iter(self._puts.values()), None)) and put.at_s < before:
            older.append(put.sent)
            self.pop(put.sent.name)
        return older


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
    given |= nested if isinstance(nested, Mapping) else {}
    for key in given.keys() - _DEFAULTS.keys():
        near = difflib.get_close_matches(str(key).lower(), _DEFAULTS, n=1, cutoff=_NEAR_MISS)
        if near:
            raise ConfigError(
                f"unknown key {key!r} in the connector's settings; did you mean {near[0]!r}? "
                f"(known keys: {', '.join(sorted(_DEFAULTS))})"
            )
    settings = {**_DEFAULTS, **given}
    for name, optional in (("service", False), ("namespace", False), ("address", True)):
        if not isinstance(settings[name], str) and not (optional and settings[name] is None):
            raise InvalidInputError(f"{name}: got {settings[name]!r}, expected str")
    for name in ("timeout_s", "ttl_s"):
        seconds = settings[name]
        if seconds is not None and (isinstance(seconds, bool) or not isinstance(seconds, int | float)):
            raise InvalidInputError(f"{name}: got {seconds!r}, expected seconds")
        if seconds is not None and not 0 < seconds < float("inf"):
            raise InvalidInputError(f"{name}: got {seconds}, expected above 0")
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
