"""Ray Serve: a request router that sends requests to the node that has their prefix; see docs/serve.md.

Written to Ray Serve's interface for request routers, ``ray.serve.request_router`` of ray 2.60.
"""

import asyncio
import importlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from ray.serve._private.request_router.pow_2_router import PowerOfTwoChoicesRequestRouter
from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import PendingRequest, RunningReplica
from ray.util import metrics

from hs_cache.client import AsyncHiddenStateCache
from hs_cache.errors import HiddenStateCacheError, InvalidInputError
from hs_cache.integrations.affinity import AffinityPolicy, AffinitySettings, Candidate, Demand, Prompt
from hs_cache.keys import normalise_token_ids
from hs_cache.router import Router
from hs_cache.session import Session

logger = logging.getLogger(__name__)

ROUTER: str = "hs_cache.integrations.serve:PrefixAffinityRouter"
"""``request_router_class`` of a deployment."""

_GRACE_S = 0.05
"""Beyond its deadline, for a client that is late itself."""

_TROUBLE_S = 5.0
"""For how long a client leaves alone who didn't answer, see `hs_cache.troubles.Suspects`."""

_RENEWED_S, _RETRIED_S = 60.0, 1.0
"""A client is made anew that often, to follow a service that was started anew or another revision of the model; and
tried again after so long where there is no service."""

_MAX_CLIENTS = 64

PREFIX, SHORTER, COLD = "prefix", "shorter", "cold"
NO_PROMPT, UNAVAILABLE = "no_prompt", "unavailable"
OUTCOMES = (PREFIX, SHORTER, COLD, NO_PROMPT, UNAVAILABLE)


def router_config(**settings: Any) -> RequestRouterConfig:
    """The ``request_router_config`` of a deployment, checked here and not only where requests are routed.

    Args:
        settings: those of `hs_cache.integrations.affinity.AffinitySettings`.

    Raises:
        InvalidInputError: one of them is wrong.
    """
    _accessor(AffinitySettings.of(settings))
    config: dict[str, Any] = {"request_router_class": ROUTER, "request_router_kwargs": settings}
    return RequestRouterConfig(**config)


@dataclass(frozen=True)
class RouterStatistics:
    """What one router has done; there is one in each process that sends requests to the deployment.

    Attributes:
        routed: outcome to requests: ``prefix`` (sent to a node with the longest prefix), ``shorter`` (to another, since
            those were busy), ``cold`` (no node has any of it), ``no_prompt`` (no prompt that could be read),
            ``unavailable`` (the cache didn't answer). The last two are routed by Ray's power of two choices.
        prompt_tokens, prefix_tokens: of requests routed by their prompts, and those of them that the chosen nodes had.
    """

    routed: dict[str, int]
    prompt_tokens: int
    prefix_tokens: int


@dataclass(frozen=True)
class _Decision:
    outcome: str
    demand: Demand | None = None


class PrefixAffinityRouter(PowerOfTwoChoicesRequestRouter):
    """Sends a request where the least is to be done for it: `AffinityPolicy` says how that is told.

    Its keyword arguments (``request_router_kwargs``) are those of `AffinitySettings`. Requests without a prompt, and
    all of them while the cache doesn't answer, are routed by Ray's power of two choices. Nothing here raises or waits
    longer than ``timeout_s``; clients connect, and connect anew, in the background. Where the arguments themselves are
    wrong, an error is logged and every request is routed by Ray's choice, since Serve would let them hang otherwise.
    """

    def initialize_state(self, **kwargs: Any) -> None:
        """Take the settings; called by Serve."""
        self._counts = dict.fromkeys(OUTCOMES, 0)
        self._prompt_tokens = self._prefix_tokens = 0
        self._decisions: WeakKeyDictionary[asyncio.Future[Any], _Decision] = WeakKeyDictionary()
        self._told: set[str] = set()
        self._routed = metrics.Counter(
            "hs_cache_serve_routed_total",
            description="Requests by what decided where they went.",
            tag_keys=("deployment", "application", "outcome"),
        )
        self._routed.set_default_tags(
            {"deployment": self._deployment_id.name, "application": self._deployment_id.app_name}
        )
        self._clients: _Clients | None = None
        try:
            settings = AffinitySettings.of(kwargs)
            self._prompt_of = _accessor(settings)
        except InvalidInputError as error:
            logger.error(
                "hs_cache: %s is routed without regard to prefixes, its request_router_kwargs are wrong: %s",
                self._deployment_id,
                str(error),
            )
            return
        self._policy = AffinityPolicy(settings)
        self._clients = _Clients(settings)

    def statistics(self) -> RouterStatistics:
        """What was done so far."""
        return RouterStatistics(dict(self._counts), self._prompt_tokens, self._prefix_tokens)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The replicas, the best first, each as a group of its own; called by Serve."""
        if pending_request is None or self._clients is None:
            return await super().choose_replicas(candidate_replicas, pending_request)
        demand, _ = await asyncio.gather(self._demand(pending_request, self._clients), self._ask_lengths())
        if not isinstance(demand, Demand):
            self._decisions[pending_request.future] = _Decision(demand)
            return await super().choose_replicas(candidate_replicas, pending_request)
        allowed = self._replica_id_set
        if pending_request.metadata.multiplexed_model_id:
            allowed = self.apply_multiplex_routing(pending_request)
        else:
            pending_request.routing_context.should_backoff = True  # all that there are are in the answer
        replicas: dict[Hashable, RunningReplica] = {
            name: replica for name, replica in self._replicas.items() if name in allowed
        }
        candidates = [self._candidate(replica) for replica in replicas.values()]
        now = time.monotonic()
        demand = self._policy.with_remembered(demand, now)
        self._decisions[pending_request.future] = _Decision("", demand)
        return [[replicas[found.replica]] for found in self._policy.rank(demand, candidates, now)]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take in which replicas there are; called by Serve."""
        super().update_replicas(replicas)
        if self._clients is not None:
            self._policy.keep(self._replicas)
            self._clients.prepare()

    def _candidate(self, replica: RunningReplica) -> Candidate:
        queue_len = self._replica_queue_len_cache.get(replica.replica_id)
        return Candidate(replica.replica_id, replica.node_id, queue_len)

    async def _ask_lengths(self) -> None:
        """Those queues whose length isn't known; Serve forgets it after some seconds without a request."""
        unknown = [
            replica for name, replica in self._replicas.items() if self._replica_queue_len_cache.get(name) is None
        ]
        if unknown:
            await self._probe_queue_lens(unknown, 0)

    async def _demand(self, pending: PendingRequest, clients: "_Clients") -> Demand | str:
        """The prompt and where it is, or the outcome without."""
        try:
            prompt = self._prompt_of(pending.args, pending.kwargs)
            if prompt is None:
                return NO_PROMPT
            return await clients.ask(prompt) or UNAVAILABLE
        except InvalidInputError as error:
            self._tell_once("its prompts can't be read", error)
        except _AccessorError as error:
            self._tell_once("looking for their prompts failed", repr(error.__cause__))
        return NO_PROMPT

    def _tell_once(self, what: str, error: object) -> None:
        if what not in self._told:
            self._told.add(what)
            logger.warning(
                "hs_cache: some requests to %s are routed without regard to prefixes, since %s: %s",
                self._deployment_id,
                what,
                str(error),
            )

    def _fulfill_next_pending_request(self, replica: RunningReplica, request_metadata: Any = None) -> None:
        """Give a replica to the very request that it was chosen for.

        Serve's own way gives it to the one that waits longest, which may have its prefix elsewhere; or to the one with
        the same internal id, which two calls that serve one HTTP request share.
        """
        for pending in self._pending_requests_to_fulfill:
            if pending.metadata is request_metadata and not pending.future.done():
                self._note(self._decisions.pop(pending.future, None), replica)
                self._cancel_routing_task_for_pending_request(pending)
                self._record_queue_wait_time(pending)
                pending.future.set_result(replica)
                self._remove_pending_request_from_indices(pending)
                return

    def _note(self, decision: _Decision | None, replica: RunningReplica) -> None:
        if decision is None:
            return
        outcome, demand = decision.outcome, decision.demand
        if demand is not None:
            self._policy.sent(demand, replica.replica_id, replica.node_id, time.monotonic())
            prefix = demand.num_tokens - demand.to_compute(replica.node_id)
            longest = max((demand.prefixes.get(other.node_id, 0) for other in self._replicas.values()), default=0)
            outcome = COLD if not longest else PREFIX if prefix >= min(longest, demand.num_tokens) else SHORTER
            self._prompt_tokens += demand.num_tokens
            self._prefix_tokens += prefix
        self._counts[outcome] += 1
        self._routed.inc(1, {"outcome": outcome})


class _AccessorError(Exception):
    """A user's ``prompt_of``, or an attribute of what he sent, raised."""


_PromptOf = Callable[[Sequence[Any], dict[str, Any]], Prompt | None]


def _accessor(settings: AffinitySettings) -> _PromptOf:
    """What gets the prompt out of a request's arguments."""
    if settings.prompt_of is None:
        return _guarded(lambda *args, **kwargs: Prompt.within((*args, *kwargs.values())))
    module, _, name = settings.prompt_of.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise InvalidInputError(f"prompt_of: got {settings.prompt_of!r}, which can't be loaded: {error}") from error
    if not callable(function):
        raise InvalidInputError(f"prompt_of: got {settings.prompt_of!r}, which is no function")

    return _guarded(lambda *args, **kwargs: Prompt.within((function(*args, **kwargs),)))


def _guarded(within: Callable[..., Prompt | None]) -> _PromptOf:
    def prompt_of(args: Sequence[Any], kwargs: dict[str, Any]) -> Prompt | None:
        try:
            return within(*args, **kwargs)
        except InvalidInputError:
            raise
        except Exception as error:
            raise _AccessorError from error

    return prompt_of


class _Clients:
    """The router's clients, one for each key space that prompts name; a bounded number. Belongs to one event loop."""

    def __init__(self, settings: AffinitySettings) -> None:
        self._settings = settings
        self._clients: OrderedDict[tuple[tuple[str, str], ...], _ConnectedClient] = OrderedDict()
        self._trouble_until = 0.0

    def prepare(self) -> None:
        """Begin to connect, so that the first request finds it done."""
        self._client(()).current()

    def _client(self, identity: tuple[tuple[str, str], ...]) -> "_ConnectedClient":
        client = self._clients.get(identity)
        if client is None:
            client = _ConnectedClient(self._settings.service, {**self._settings.space, **dict(identity)})
            self._clients[identity] = client
            if len(self._clients) > _MAX_CLIENTS:
                self._clients.popitem(last=False)[1].close()
        self._clients.move_to_end(identity)
        return client

    async def ask(self, prompt: Prompt) -> Demand | None:
        """Where the prompt is; None when nobody can say.

        Raises:
            InvalidInputError: the prompt can't be one.
        """
        client = self._client(prompt.identity)
        cache = client.current()
        if cache is None:
            return None
        token_ids = normalise_token_ids(prompt.token_ids)
        keys = cache.chunk_keys(token_ids, mm_spans=prompt.mm_spans)
        layers = self._settings.layers
        prefixes: dict[str, int] = {}
        if len(keys):
            asked = cache.locate(
                token_ids,
                (0,) if layers is None else layers,
                mm_spans=prompt.mm_spans,
                num_asked=0 if layers is None else 4,
                timeout_s=self._settings.timeout_s,
            )
            try:
                prefixes = await asyncio.wait_for(asked, self._settings.timeout_s + _GRACE_S)
            except Exception as error:  # whatever it is: a request whose router raises would hang
                client.in_trouble(error)
                self._trouble_until = time.monotonic() + _TROUBLE_S
                return None
            if not prefixes and time.monotonic() < self._trouble_until:
                return None  # it may be nowhere, or where nobody is asked now
            client.well()
        return Demand(len(token_ids), keys, prefixes)


class _ConnectedClient:
    """A client that connects, and connects anew, in the background; it never starts a service."""

    def __init__(self, service: str, space: dict[str, str]) -> None:
        self._service = service
        self._space = {**space, "kv_tags": ()}
        self._cache: AsyncHiddenStateCache | None = None
        self._task: asyncio.Task[None] | None = None
        self._due = 0.0
        self._troubled = False

    def current(self) -> AsyncHiddenStateCache | None:
        """The client; None until it has connected."""
        if self._task is None and time.monotonic() >= self._due:
            self._task = asyncio.get_running_loop().create_task(self._connect())
        return self._cache

    def close(self) -> None:
        """No more requests."""
        if self._task is not None:
            self._task.cancel()
        if self._cache is not None:
            self._cache.parts()[1].close()

    def in_trouble(self, error: Exception) -> None:
        """Log trouble if there was none before."""
        if not self._troubled:
            self._troubled = True
            logger.warning(
                "hs_cache: requests are routed without regard to prefixes while service %r does not answer: %s",
                self._service,
                str(error) or type(error).__name__,
            )

    def well(self) -> None:
        """Log that trouble is over, if there was any."""
        if self._troubled:
            self._troubled = False
            logger.warning("hs_cache: requests are routed by their prefixes, service %r answers", self._service)

    async def _connect(self) -> None:
        router, session = Router(self._service), Session(self._space, strict=True)
        self._due = time.monotonic() + _RETRIED_S
        try:
            await router.arun(session.attach())
        except HiddenStateCacheError as error:
            self.in_trouble(error)
            session.close()
        else:
            before, self._cache = self._cache, AsyncHiddenStateCache(router, session)
            self._due = time.monotonic() + _RENEWED_S
            if before is not None:  # requests may be asking it
                asyncio.get_running_loop().call_later(_TROUBLE_S, before.parts()[1].close)
        finally:
            self._task = None
