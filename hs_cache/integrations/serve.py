"""Ray Serve: a request router that sends requests to the node that has their prefix; see docs/serve.md.

Written to Ray Serve's interface for request routers, ``ray.serve.request_router`` of ray 2.60. Serve lets a request
hang whose router raises: nothing here does, whatever a prompt, the cache or another Ray come up with.
"""

import asyncio
import enum
import importlib
import logging
import random
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
from ray.util import metrics

from hs_cache.errors import HiddenStateCacheError, InvalidInputError
from hs_cache.installation import require_extra
from hs_cache.integrations.affinity import AffinityPolicy, AffinitySettings, Candidate, Demand, Prompt
from hs_cache.integrations.prefixes import PrefixFinder

with require_extra("serve"):
    from ray.serve.config import RequestRouterConfig
    from ray.serve.request_router import (
        FIFOMixin,
        LocalityMixin,
        MultiplexMixin,
        PendingRequest,
        ReplicaID,
        RequestRouter,
        RunningReplica,
    )

logger = logging.getLogger(__name__)

ROUTER: str = "hs_cache.integrations.serve:PrefixAffinityRouter"
"""``request_router_class`` of a deployment."""

OF_ROUTER = (
    "replica_queue_len_cache",
    "curr_replicas",
    "apply_locality_routing",
    "apply_multiplex_routing",
    "update_replicas",
    "on_send_request",
    "on_request_routed",
    "on_request_completed",
    "on_replica_actor_unavailable",
    "_get_pending_request_matching_metadata",
)
OF_QUEUE_LENGTHS = ("get", "update", "invalidate_key")
"""What is used of Serve beyond its documented interface; all of it is there, or prefixes play no part."""

_PATIENCE_S = 5.0
"""In which a replica has to say how long its queue is. One that computes doesn't say so at once."""


class Outcome(str, enum.Enum):
    """What decided where a request went, see `RouterStatistics`."""

    PREFIX = "prefix"
    SHORTER = "shorter"
    COLD = "cold"
    NO_PROMPT = "no_prompt"
    UNAVAILABLE = "unavailable"


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
        routed: outcome to requests that a replica has accepted: ``prefix`` (sent to a node with the longest prefix),
            ``shorter`` (to another, since those were busy), ``cold`` (no node has any of it), ``no_prompt`` (no prompt
            that could be read), ``unavailable`` (the cache didn't answer). The last two are routed by the power of two
            choices.
        prompt_tokens, prefix_tokens: of requests routed by their prompts, and those of them that the chosen nodes had.
    """

    routed: dict[str, int]
    prompt_tokens: int
    prefix_tokens: int


@dataclass
class _Request:
    """What is known of a request until a replica has accepted it, however often it is tried.

    Attributes:
        pending: Serve's own.
        demand: as it was found; None without a prompt or an answer, and before.
        outcome: why there is none; None before.
        ranked: `demand`, with what was remembered when replicas were ranked.
        assigned: where it goes, until Serve counts it there.
        tries: how often replicas were chosen for it; more than once where none had room.
    """

    pending: "weakref.ref[PendingRequest]"
    demand: Demand | None = None
    outcome: Outcome | None = None
    ranked: Demand | None = None
    assigned: ReplicaID | None = None
    tries: int = 0

    @property
    def waits(self) -> bool:
        """Whether no replica had room for it, and it is still to be sent."""
        pending = self.pending()
        return self.tries > 1 and pending is not None and not pending.future.done()


class PrefixAffinityRouter(FIFOMixin, LocalityMixin, MultiplexMixin, RequestRouter):
    """Sends a request where the least is to be done for it: `AffinityPolicy` says how that is told.

    Its keyword arguments (``request_router_kwargs``) are those of `AffinitySettings`. Requests without a prompt, and
    all of them while the cache doesn't answer, are routed by the power of two choices, as Serve does by default.
    Nothing here raises or waits longer than ``timeout_s``; clients connect in the background. Where the arguments are
    wrong, or Serve isn't as expected, an error is logged and every request is routed that way.
    """

    def initialize_state(self, **kwargs: Any) -> None:
        """Take the settings; called by Serve."""
        self._counts = dict.fromkeys(Outcome, 0)
        self._prompt_tokens = self._prefix_tokens = 0
        self._requests: dict[int, _Request] = {}  # by the id of their metadata, by which Serve names them
        self._told: set[str] = set()
        self._name = str(getattr(self, "_deployment_id", "the deployment"))
        self._finder: PrefixFinder | None = None
        try:
            settings = AffinitySettings.of(kwargs)
            self._prompt_of = _accessor(settings)
            self._check_serve()
            self._lengths = _QueueLengths(self.replica_queue_len_cache)
            self._policy = AffinityPolicy(settings)
            self._routed = _counter(self)
            self._finder = PrefixFinder(settings)
        except InvalidInputError as error:
            logger.error(
                "hs_cache: %s is routed without regard to prefixes, its request_router_kwargs are wrong: %s",
                self._name,
                str(error),
            )
        except Exception as error:
            logger.error("hs_cache: %s is routed without regard to prefixes: %s", self._name, str(error) or repr(error))

    def _check_serve(self) -> None:
        lengths = getattr(self, OF_ROUTER[0], None)
        theirs = super()  # without what is defined here
        missing = [name for name in OF_ROUTER if not hasattr(theirs, name)]
        missing += [f"{OF_ROUTER[0]}.{name}" for name in OF_QUEUE_LENGTHS if not hasattr(lengths, name)]
        if missing:
            raise HiddenStateCacheError(f"the request routers of ray {ray.__version__} have no {', '.join(missing)}")

    def statistics(self) -> RouterStatistics:
        """What was done so far."""
        routed = {outcome.value: number for outcome, number in self._counts.items()}
        return RouterStatistics(routed, self._prompt_tokens, self._prefix_tokens)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The replicas, the best first, each as a group of its own; called by Serve."""
        if self._finder is not None and pending_request is not None:
            with self._unless_it_fails("routing them"):
                request = self._known(pending_request)
                request.tries += 1
                if request.demand is None and request.outcome is None:
                    await self._find(request, pending_request, self._finder)
                if request.demand is not None:
                    return self._ranked(request, request.demand, pending_request)
        return [self._any_two(candidate_replicas, pending_request)]

    def _known(self, pending: PendingRequest) -> _Request:
        key = id(pending.metadata)
        request = self._requests.get(key)
        if request is None:
            request = self._requests[key] = _Request(weakref.ref(pending))
            weakref.finalize(pending, self._requests.pop, key, None).atexit = False  # it may be cancelled
        return request

    async def _find(self, request: _Request, pending: PendingRequest, finder: PrefixFinder) -> None:
        """Get the prompt, and where it is."""
        outcome = Outcome.NO_PROMPT
        with self._unless_it_fails("reading their prompts"):
            prompt = self._prompt_of(pending.args, pending.kwargs)
            if prompt is not None:
                request.demand = await finder.find(prompt, {replica.node_id for replica in self.curr_replicas.values()})
                outcome = Outcome.UNAVAILABLE
        request.outcome = outcome if request.demand is None else None

    def _ranked(self, request: _Request, demand: Demand, pending: PendingRequest) -> list[list[RunningReplica]]:
        replicas: dict[Any, RunningReplica] = dict(self.curr_replicas)
        if pending.metadata.multiplexed_model_id:
            allowed: Set[Any] = self.apply_multiplex_routing(pending)
            replicas = {name: replica for name, replica in replicas.items() if name in allowed}
        else:
            pending.routing_context.should_backoff = True  # all that there are are in the answer
        now = time.monotonic()
        request.assigned, request.ranked = None, self._policy.with_remembered(demand, now)
        found = self._policy.rank(request.ranked, self._candidates(replicas.values()), now)
        if found:
            request.assigned = replicas[found[0].replica].replica_id
        return [[replicas[candidate.replica]] for candidate in found]

    def _candidates(self, replicas: Any) -> list[Candidate]:
        """The replicas, with those requests in their queues that are on their way there: Serve counts them later."""
        assigned = Counter(request.assigned for request in self._requests.values())
        candidates = []
        for replica in replicas:
            length = self._lengths.of(replica)
            if length is not None:
                length += assigned[replica.replica_id]
            candidates.append(Candidate(replica.replica_id, replica.node_id, length))
        return candidates

    def _any_two(self, candidates: Sequence[RunningReplica], pending: PendingRequest | None) -> list[RunningReplica]:
        """Of which Serve takes the one with the shorter queue."""
        with self._unless_it_fails("choosing two of its replicas"):
            multiplexed = pending is not None and pending.metadata.multiplexed_model_id
            allow = self.apply_multiplex_routing if multiplexed else self.apply_locality_routing
            allowed = allow(pending)
            candidates = [replica for replica in candidates if replica.replica_id in allowed]
            return random.sample(candidates, min(2, len(candidates)))
        if pending is not None:
            pending.routing_context.should_backoff = True
        return random.sample(candidates, min(2, len(candidates)))

    def _get_pending_request_matching_metadata(self, request_metadata: Any = None) -> PendingRequest | None:
        """The very request that a replica was chosen for.

        Serve's own way is the one that waits longest, which may have its prefix elsewhere. But where replicas are full,
        and requests wait, whoever waits longest looks least often, so the next slot is for that one.
        """
        request = self._requests.get(id(request_metadata))
        if any(other.waits for other in self._requests.values()):
            request = None
        pending = None if request is None else request.pending()
        if pending is not None and pending.metadata is request_metadata and not pending.future.done():
            return pending
        found: PendingRequest | None = super()._get_pending_request_matching_metadata(request_metadata)
        return found

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take in which replicas there are; called by Serve."""
        super().update_replicas(replicas)
        if self._finder is not None:
            with self._unless_it_fails("taking in its replicas"):
                self._policy.keep(self.curr_replicas)
                self._lengths.keep(self.curr_replicas)
                self._finder.prepare()

    def on_send_request(self, replica_id: ReplicaID) -> None:
        """Serve counts one more request there; called by Serve."""
        super().on_send_request(replica_id)
        sent = next((request for request in self._requests.values() if request.assigned == replica_id), None)
        if sent is not None:
            sent.assigned = None

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """A replica has accepted the request; called by Serve."""
        with self._unless_it_fails("counting them"):
            request = self._requests.pop(id(pending_request.metadata), None)
            replica = self.curr_replicas.get(replica_id)
            if request is not None and replica is not None:
                self._count(request, replica)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """A replica is done with a request; called by Serve."""
        if self._finder is not None:
            self._lengths.completed(replica_id)

    def on_replica_actor_unavailable(self, replica_id: ReplicaID) -> None:
        """A replica can't be reached; called by Serve."""
        super().on_replica_actor_unavailable(replica_id)
        if self._finder is not None:
            self._lengths.unavailable(replica_id)

    def _count(self, request: _Request, replica: RunningReplica) -> None:
        outcome, demand = request.outcome, request.ranked
        if demand is not None:
            self._policy.sent(demand, replica.replica_id, replica.node_id, time.monotonic())
            prefix = demand.num_tokens - demand.to_compute(replica.node_id)
            longest = max((demand.prefixes.get(other.node_id, 0) for other in self.curr_replicas.values()), default=0)
            best = prefix >= min(longest, demand.num_tokens)
            outcome = Outcome.COLD if not longest else Outcome.PREFIX if best else Outcome.SHORTER
            self._prompt_tokens += demand.num_tokens
            self._prefix_tokens += prefix
        outcome = outcome or Outcome.UNAVAILABLE
        self._counts[outcome] += 1
        self._routed.inc(1, {"outcome": outcome.value})

    @contextmanager
    def _unless_it_fails(self, what: str) -> Iterator[None]:
        """Go on behind the block when it raises; logged once for each `what`."""
        try:
            yield
        except Exception as error:
            if what not in self._told:
                self._told.add(what)
                # As text: whoever keeps the record would keep the request.
                logger.warning(
                    "hs_cache: some requests to %s are routed without regard to prefixes, since %s failed: %s",
                    self._name,
                    what,
                    str(error) if isinstance(error, InvalidInputError) else repr(error),
                )


class _QueueLengths:
    """How long queues are: as Serve knows, and as it knew last while the replica is asked in the background.

    Serve forgets a length after some seconds without a request, and a request would wait for it then, and go elsewhere
    if the replica is slow to say.
    """

    def __init__(self, lengths: Any) -> None:
        self._serve = lengths
        self._last: dict[ReplicaID, int | None] = {}
        self._asking: dict[ReplicaID, asyncio.Task[None]] = {}

    def of(self, replica: RunningReplica) -> int | None:
        """Requests that a replica has; None for one that was asked for it and doesn't say."""
        name = replica.replica_id
        length: int | None = self._serve.get(name)
        if length is None:
            if name not in self._asking:
                self._asking[name] = asyncio.get_running_loop().create_task(self._ask(replica))
            length = self._last.get(name, 0)
            if length is not None:
                self._serve.update(name, length)
        self._last[name] = length
        return length

    async def _ask(self, replica: RunningReplica) -> None:
        name = replica.replica_id
        try:
            length = await asyncio.wait_for(replica.get_queue_len(deadline_s=_PATIENCE_S), _PATIENCE_S)
        except Exception as error:
            if self._last.get(name) is not None:
                logger.warning(
                    "hs_cache: %s doesn't say how long its queue is, and comes last: %s",
                    str(name),
                    str(error) or type(error).__name__,
                )
            self.unavailable(name)
            self._serve.invalidate_key(name)
        else:
            self._serve.update(name, length)
        finally:
            del self._asking[name]

    def completed(self, name: ReplicaID) -> None:
        """A request there has ended; Serve takes it in only while it knows the length."""
        last = self._last.get(name)
        if last and self._serve.get(name) is None:
            self._last[name] = last - 1

    def unavailable(self, name: ReplicaID) -> None:
        """It can't be reached until it says otherwise."""
        self._last[name] = None

    def keep(self, names: Any) -> None:
        """Forget all replicas but these."""
        self._last = {name: length for name, length in self._last.items() if name in names}


def _counter(router: Any) -> metrics.Counter:
    counter = metrics.Counter(
        "hs_cache_serve_routed_total",
        description="Requests by what decided where they went.",
        tag_keys=("deployment", "application", "outcome"),
    )
    deployment = getattr(router, "_deployment_id", None)
    counter.set_default_tags(
        {"deployment": getattr(deployment, "name", ""), "application": getattr(deployment, "app_name", "")}
    )
    return counter


def _accessor(settings: AffinitySettings) -> Callable[[Sequence[Any], dict[str, Any]], Prompt | None]:
    """What gets the prompt out of a request's arguments."""
    if settings.prompt_of is None:
        return lambda args, kwargs: Prompt.within((*args, *kwargs.values()))
    module, _, name = settings.prompt_of.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except Exception as error:  # a module may raise anything
        raise InvalidInputError(f"prompt_of: got {settings.prompt_of!r}, which can't be loaded: {error!r}") from error
    if not callable(function):
        raise InvalidInputError(f"prompt_of: got {settings.prompt_of!r}, which is no function")
    return lambda args, kwargs: Prompt.within((function(*args, **kwargs),))
