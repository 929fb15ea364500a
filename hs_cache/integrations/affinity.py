"""Which replica a request goes to, as pure logic: prefixes, queues, and what was decided lately, all in tokens."""

import difflib
import math
import random
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from hs_cache.config import check_service
from hs_cache.errors import InvalidInputError
from hs_cache.keys import KEY_BYTES, ChunkKeys, KeySpace, MMSpan, TokenIds
from hs_cache.planning import check_layers, check_seconds, check_spans

_LATELY_S = 60.0
"""Time constant with which what a replica was given is forgotten."""

_WEIGHT = 1 / 16
"""Of the last request, in the average of what requests cost."""

_MAX_REMEMBERED = 4096
_SPACE = ("model", "model_revision", "lora_id", "cache_salt", "shard")


@dataclass(frozen=True)
class AffinitySettings:
    """The router's keyword arguments; JSON-able.

    Attributes:
        service: name of the cache service. It is never started from here.
        model, model_revision, lora_id, cache_salt, shard: the key space, as the replicas give it to `hs_cache.connect`.
            Without a revision it is the model's current one, which is followed within a minute. A prompt may bring a
            ``lora_id`` and a ``cache_salt`` of its own.
        layers: which layers have to be there, and KV, as the nodes say; None to believe the service's directory, which
            knows of chunks only. Saves a round trip.
        prompt_of: ``module:function``, called with a request's arguments; gives what has the prompt, or None. Without
            it that is the first argument with ``token_ids``, and ``mm_spans`` if any, as attributes or as keys.
        timeout_s: how long a request waits for the cache. Who doesn't answer in time isn't asked for five seconds.
        reply_tokens: what a request costs a replica besides prefill, above all its reply, in tokens of prefill.
        spread: share of the tokens that a replica was given lately (within a minute or so) that counts as if they were
            queued. Keeps a prefix that many prompts share from filling one node's pool while others are idle.
        remember_s: for how long a node counts as having a prompt that was sent there, in seconds: until its rows are
            stored. 0 waits for the rows.

    Raises:
        InvalidInputError: one of them is wrong.
    """

    service: str = "default"
    model: str = ""
    model_revision: str = ""
    lora_id: str = ""
    cache_salt: str = ""
    shard: str = ""
    layers: tuple[int, ...] | None = None
    prompt_of: str | None = None
    timeout_s: float = 0.1
    reply_tokens: float = 64.0
    spread: float = 0.1
    remember_s: float = 30.0

    def __post_init__(self) -> None:
        check_service(self.service)
        KeySpace(**{**self.space, "chunk_size": 1})
        if self.layers is not None:
            object.__setattr__(self, "layers", check_layers(self.layers))
        if self.prompt_of is not None and not (isinstance(self.prompt_of, str) and all(_halves(self.prompt_of))):
            raise InvalidInputError(f"prompt_of: got {self.prompt_of!r}, expected 'module:function'")
        if check_seconds("timeout_s", self.timeout_s) == 0:
            raise InvalidInputError("timeout_s: got 0, expected more")
        check_seconds("remember_s", self.remember_s)
        for name in ("reply_tokens", "spread"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise InvalidInputError(f"{name}: got {value!r}, expected a number, 0 or more")

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "AffinitySettings":
        """From keyword arguments.

        Raises:
            InvalidInputError: one has an unknown name or a wrong value.
        """
        known = [field.name for field in fields(cls)]
        for name in given:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else f", expected one of {', '.join(known)}"
                raise InvalidInputError(f"request_router_kwargs: got an unknown name {name!r}{hint}")
        return cls(**given)

    @property
    def space(self) -> dict[str, Any]:
        """The key space, without its chunk size."""
        return {name: getattr(self, name) for name in _SPACE}


def _halves(path: str) -> tuple[str, str]:
    module, _, function = path.partition(":")
    return module, function


@dataclass(frozen=True)
class Prompt:
    """What a request is about.

    Attributes:
        token_ids, mm_spans: the prompt, as `hs_cache.HiddenStateCache.store` takes it.
        identity: what of the key space the prompt brings itself: names and values.
    """

    token_ids: TokenIds
    mm_spans: tuple[MMSpan, ...] = ()
    identity: tuple[tuple[str, str], ...] = ()

    @classmethod
    def within(cls, values: Iterable[Any]) -> "Prompt | None":
        """The prompt of the first value that has one.

        Raises:
            InvalidInputError: it has a salt or a LoRA that is none. Tokens and spans are not looked at yet.
        """
        for value in values:
            token_ids = _part(value, "token_ids")
            if token_ids is not None:
                spans = check_spans(_part(value, "mm_spans") or ())
                parts = ((name, _part(value, name)) for name in ("lora_id", "cache_salt"))
                identity = tuple((name, part) for name, part in parts if part is not None)
                for name, part in identity:
                    if not isinstance(part, str):
                        raise InvalidInputError(f"{name}: got {type(part).__name__}, expected str")
                return cls(token_ids, spans, identity)
        return None


def _part(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)


@dataclass(frozen=True)
class Candidate:
    """A replica.

    Attributes:
        replica: its id.
        node_id: hex id of the node that it is on.
        queue_len: requests that it has; None when it doesn't say.
    """

    replica: Hashable
    node_id: str
    queue_len: int | None


@dataclass(frozen=True)
class Demand:
    """A prompt, and how far each node has it.

    Attributes:
        num_tokens: of the prompt.
        keys: of its chunks.
        prefixes: node id to tokens that need not be computed there; nodes without any are left out.
    """

    num_tokens: int
    keys: ChunkKeys
    prefixes: Mapping[str, int]

    def to_compute(self, node_id: str) -> int:
        """Tokens that have to be computed on that node."""
        return self.num_tokens - min(self.prefixes.get(node_id, 0), self.num_tokens)


class AffinityPolicy:
    """Ranks replicas by when they would be done with the prompt, as far as that can be told, in tokens to compute::

        tokens of the prompt - its prefix on the replica's node
        + requests queued there x what a request costs on average
        + spread x tokens given to it lately

    The least wins, then the shorter queue, then chance. So a node's advantage is bounded by the length of the prefix: a
    system prompt of 500 tokens is worth a queue that is longer by 500 tokens, and then the next node computes it too.
    Prompts that nobody knows go where the least is to be done. A new replica counts as if it had been given as much as
    the one that was given the least: it takes its share from now on, and doesn't draw what has its prefix elsewhere.

    Not thread-safe; belongs to one event loop.

    Args:
        settings: see there.
        rng: what ties are broken with.
    """

    def __init__(self, settings: AffinitySettings, rng: random.Random | None = None) -> None:
        self._settings = settings
        self._rng = rng or random.Random()
        self._average: float | None = None
        self._lately: dict[Hashable, tuple[float, float]] = {}  # replica -> tokens, when
        self._sent: OrderedDict[bytes, tuple[str, float]] = OrderedDict()  # last chunk of a prompt -> node, until when

    def rank(self, demand: Demand, candidates: Sequence[Candidate], now: float) -> list[Candidate]:
        """Best first; replicas that don't say how long their queue is come last."""
        self._take_in(candidates, now)

        def order(candidate: Candidate) -> tuple[bool, float, int, float]:
            queue_len = candidate.queue_len or 0
            cost = self.cost(demand, candidate, now)
            return candidate.queue_len is None, cost, queue_len, self._rng.random()

        return sorted(candidates, key=order)

    def cost(self, demand: Demand, candidate: Candidate, now: float) -> float:
        """Tokens until that replica would be done with the prompt."""
        queued = (candidate.queue_len or 0) * self.typical_tokens(demand)
        lately = self._settings.spread * self._given_lately(candidate.replica, now)
        return demand.to_compute(candidate.node_id) + queued + lately

    def typical_tokens(self, demand: Demand) -> float:
        """What a queued request is taken to cost; before there was any, as much as this one without a prefix."""
        average = demand.num_tokens if self._average is None else self._average
        return average + self._settings.reply_tokens

    def with_remembered(self, demand: Demand, now: float) -> Demand:
        """`demand`, with the node to which this prompt, or the longest known beginning of it, was sent lately."""
        for chunk in range(len(demand.keys) - 1, -1, -1):
            node_id, until = self._sent.get(demand.keys[chunk], ("", 0.0))
            if until > now:
                num_tokens = min((chunk + 1) * demand.keys.chunk_size, demand.keys.num_tokens)
                longest = max(num_tokens, demand.prefixes.get(node_id, 0))
                return Demand(demand.num_tokens, demand.keys, {**demand.prefixes, node_id: longest})
        return demand

    def sent(self, demand: Demand, replica: Hashable, node_id: str, now: float) -> None:
        """Note where a request was sent."""
        tokens = demand.to_compute(node_id)
        self._average = tokens if self._average is None else self._average + _WEIGHT * (tokens - self._average)
        self._lately[replica] = (self._given_lately(replica, now) + tokens, now)
        if len(demand.keys) and self._settings.remember_s:
            key = demand.keys.blob[-KEY_BYTES:]
            self._sent[key] = (node_id, now + self._settings.remember_s)
            self._sent.move_to_end(key)
            if len(self._sent) > _MAX_REMEMBERED:
                self._sent.popitem(last=False)

    def keep(self, replicas: Iterable[Hashable]) -> None:
        """Forget all replicas but these."""
        alive = set(replicas)
        self._lately = {replica: given for replica, given in self._lately.items() if replica in alive}

    def _take_in(self, candidates: Sequence[Candidate], now: float) -> None:
        """Begin with new replicas where the others are, as fair queueing does."""
        new = {candidate.replica for candidate in candidates} - self._lately.keys()
        if new:
            known = [self._given_lately(replica, now) for replica in self._lately]
            self._lately |= dict.fromkeys(new, (min(known, default=0.0), now))

    def _given_lately(self, replica: Hashable, now: float) -> float:
        tokens, when = self._lately.get(replica, (0.0, now))
        return tokens * math.exp(-max(now - when, 0.0) / _LATELY_S)
