"""What a service holds, to be looked at in a notebook: its pools over time, and which nodes have a prefix.

`hs_cache.integrations.plots` draws both.
"""

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from types import TracebackType
from typing import Any

from hs_cache import html
from hs_cache.client import AsyncHiddenStateCache, HiddenStateCache
from hs_cache.effects import Budget, Call, Find, Locate, Located, Steps
from hs_cache.errors import InvalidInputError, ServiceError
from hs_cache.gathering import ask_each
from hs_cache.keys import MMSpan, TokenIds
from hs_cache.messages import OK, UNREACHABLE, ControllerStatistics, ExplainReply, ExplainRequest, NodeStatistics
from hs_cache.planning import check_index, check_layers, check_seconds
from hs_cache.results import Coverage
from hs_cache.router import Router
from hs_cache.session import Session
from hs_cache.tables import REASONS, pool_parts

logger = logging.getLogger(__name__)

_SLACK_S = 1.0


@dataclass(frozen=True, slots=True)
class PoolSample:
    """The statistics of a service's nodes at one moment.

    Attributes:
        at_s: seconds since the epoch.
        nodes: hex id of the node to what it said, None where it didn't answer.
    """

    at_s: float
    nodes: Mapping[str, NodeStatistics | None]


class PoolHistory:
    """The statistics of a service's nodes over time, sampled by a thread of its own until `stop`, or the end of its
    ``with`` block, or its own end.

    A node that doesn't answer, and one that is gone, is a gap; so is a whole sample that failed otherwise, of which the
    first in a row is logged. A sample waits for no node longer than the service's ``rpc_timeout_s``, and the next one
    begins `interval_s` after it. Thread-safe.

    Args:
        cache: a client of the service.
        interval_s: between samples.
        max_samples: the latest so many are kept, about a kilobyte per node each.

    Raises:
        InvalidInputError: an argument is wrong.
    """

    def __init__(
        self, cache: HiddenStateCache | AsyncHiddenStateCache, *, interval_s: float = 1.0, max_samples: int = 3600
    ) -> None:
        router, session = _parts(cache)
        if not check_seconds("interval_s", interval_s):
            raise InvalidInputError(f"interval_s: got {interval_s!r}, expected more than 0")
        if check_index("max_samples", max_samples) < 1:
            raise InvalidInputError(f"max_samples: got {max_samples!r}, expected 1 or more")
        self._router = Router(router.service)  # not the client's: what fails here must cost it no look-ups
        self._timeout_s = session.config.rpc_timeout_s
        self._lock = threading.Lock()
        self._samples: deque[PoolSample] = deque(maxlen=max_samples)
        self._failure = ""
        self._stopped = threading.Event()
        self._thread = threading.Thread(
            target=_record, args=(weakref.ref(self), self._stopped, interval_s), name="hs_cache-history", daemon=True
        )
        self._thread.start()

    @property
    def service(self) -> str:
        """The service's name."""
        return self._router.service

    @property
    def samples(self) -> tuple[PoolSample, ...]:
        """Those that are kept, the oldest first."""
        with self._lock:
            return tuple(self._samples)

    def sample(self) -> PoolSample:
        """Take a sample now, besides those of the thread. Blocks for it."""
        at_s, known, failure = time.time(), nodes_in(self.samples), ""
        said: dict[str, NodeStatistics | None]
        try:
            said = self._router.run(_statistics(known, self._timeout_s))
        except Exception as error:  # whatever it was, the thread goes on: the next sample may be well
            said, failure = dict.fromkeys(known), f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        taken = PoolSample(at_s, said)
        with self._lock:
            self._samples.append(taken)
            is_news, self._failure = bool(failure) and not self._failure, failure
        if is_news:
            logger.warning("hs_cache: service %r can't be sampled, which counts as a gap: %s", self.service, failure)
        return taken

    def stop(self) -> None:
        """End the sampling; idempotent. Samples stay. Blocks for the sample that is being taken."""
        self._stopped.set()
        if self._thread is not threading.current_thread():
            self._thread.join(2 * self._timeout_s + _SLACK_S)

    def __enter__(self) -> "PoolHistory":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def __repr__(self) -> str:
        samples = self.samples
        return (
            f"<PoolHistory of service {self.service!r}, {self._state()}: {len(samples)} samples in "
            f"{_lasted_s(samples):.1f} s, of nodes {nodes_in(samples)}>"
        )

    def _repr_html_(self) -> str:
        samples = self.samples
        rows: list[Sequence[html.Cell]] = []
        for node_id in nodes_in(samples):
            said = [sample.nodes[node_id] for sample in samples if node_id in sample.nodes]
            pools = [stats.store for stats in said if stats is not None]
            bar = html.Bar(pool_parts(pools[-1]), pools[-1].capacity_bytes)
            size, full = html.size(pools[-1].capacity_bytes), html.size(max(pool.resident_bytes for pool in pools))
            gaps, restarts = len(said) - len(pools), len(restarts_in(samples, node_id))
            rows.append((html.short_id(node_id), len(said), gaps, restarts, size, bar, full))
        columns = ("node", "samples", "without an answer", "restarts", "pool", "at the end", "most resident")
        caption = f"Pools of service {self.service!r} in {_lasted_s(samples):,.1f} s"
        return html.table(caption, columns, rows, note=f"The sampling is {self._state()}.")

    def _state(self) -> str:
        # The thread itself is asked: a forked child, for one, has none.
        state = ("stopping" if self._stopped.is_set() else "running") if self._thread.is_alive() else "stopped"
        return f"{state}, and the latest sample failed ({self._failure})" if self._failure else state


def nodes_in(samples: Iterable[PoolSample]) -> list[str]:
    """Hex ids of the nodes that have answered, in the order in which they came."""
    answered = (node_id for sample in samples for node_id, stats in sample.nodes.items() if stats is not None)
    return list(dict.fromkeys(answered))


def restarts_in(samples: Iterable[PoolSample], node_id: str) -> list[float]:
    """When that node was first seen with another pool than before, in seconds since the epoch."""
    found, before = [], ""
    for sample in samples:
        stats = sample.nodes.get(node_id)
        if stats is not None:
            if before and stats.incarnation != before:
                found.append(sample.at_s)
            before = stats.incarnation
    return found


def _lasted_s(samples: Sequence[PoolSample]) -> float:
    return samples[-1].at_s - samples[0].at_s if samples else 0.0


def _record(recorded: "weakref.ref[PoolHistory]", stopped: threading.Event, interval_s: float) -> None:
    """Sample until it is stopped, or nobody has the history any more: this must not be what keeps it."""
    while (history := recorded()) is not None:
        history.sample()
        del history
        if stopped.wait(min(interval_s, threading.TIMEOUT_MAX)):
            return


def _statistics(known: Sequence[str], timeout_s: float) -> Steps[dict[str, NodeStatistics | None]]:
    nodes = yield from _nodes(known, Budget(timeout_s / 2))
    return (yield from _answers(nodes, "stats", (), Budget(timeout_s)))


def _nodes(known: Iterable[str], budget: Budget) -> Steps[list[str]]:
    """Ids of a service's nodes: those that the controller knows, and others that are known; while it is away and none
    is, the one that would serve this process."""
    names = list(known)
    try:
        controller = yield Find(None, budget.left_s)
        stats: ControllerStatistics = yield Call(controller, "stats", (), budget.left_s)
        names += sorted(stats.nodes)
    except ServiceError:
        pass  # it tells of no more nodes; those that are known are asked all the same
    if not names:
        try:
            located: Located = yield Locate(budget.left_s)
            names.append(located.peer.node_id)
        except ServiceError:
            pass  # there is nobody to ask: a sample without nodes
    return list(dict.fromkeys(names))


def _answers(nodes: Sequence[str], method: str, args: tuple[Any, ...], budget: Budget) -> Steps[dict[str, Any]]:
    """What each node answers, None where it doesn't."""
    said = yield from ask_each(nodes, method, args, budget)
    return {node_id: None if isinstance(answer, ServiceError) else answer for node_id, answer in said.items()}


@dataclass(frozen=True, slots=True)
class PrefixMap:
    """Where a prefix lives: what each node of a service says of each of its chunks.

    Attributes:
        ends: for each chunk, the token behind its last one.
        reasons: hex id of the node to what it says of each chunk: a reason of `hs_cache.ChunkReport`.
        coverage: how far the prefix can be had here, from all nodes together: what `HiddenStateCache.plan` says.
    """

    ends: tuple[int, ...]
    reasons: Mapping[str, tuple[str, ...]]
    coverage: Coverage

    def usable_tokens(self, node_id: str) -> int:
        """How many tokens, from the first on, that node has with every layer and with KV."""
        chunks = next((i for i, said in enumerate(self.reasons[node_id]) if said != OK), len(self.ends))
        return self.ends[chunks - 1] if chunks else 0

    def runs(self, node_id: str) -> Iterator[tuple[int, int, str]]:
        """Chunks of which the node says the same, one behind the other: first token, the token behind, the reason."""
        first = 0
        for reason, group in groupby(zip(self.reasons[node_id], self.ends, strict=True), lambda pair: pair[0]):
            *_, (_, end) = group
            yield first, end, reason
            first = end

    def _repr_html_(self) -> str:
        said = [reason for reason in REASONS if any(reason in reasons for reasons in self.reasons.values())]
        rows: list[Sequence[html.Cell]] = [
            (html.short_id(node_id), self.usable_tokens(node_id), *map(reasons.count, said))
            for node_id, reasons in self.reasons.items()
        ]
        total = self.ends[-1] if self.ends else 0
        caption = f"{self.coverage.num_tokens:,} of {total:,} tokens can be had here"
        note = (
            "Chunks of which a node says so: " + "; ".join(f"{reason}, {REASONS[reason][1]}" for reason in said) + "."
        )
        return html.table(caption, ("node", "usable tokens", *said), rows, note=note if said else "")


def map_prefix(
    cache: HiddenStateCache | AsyncHiddenStateCache,
    token_ids: TokenIds,
    layers: int | Sequence[int],
    *,
    mm_spans: Sequence[MMSpan] = (),
) -> PrefixMap:
    """Ask every node of the service for each chunk of a prefix. Changes nothing; blocks for three round trips, in each
    of which nobody is waited for longer than ``rpc_timeout_s``. Who doesn't answer is ``"unreachable"``.

    Args:
        cache: a client of the service; prefixes are those of its key space.
        token_ids, layers, mm_spans: as for `HiddenStateCache.retrieve`.

    Raises:
        InvalidInputError: an argument is wrong.
    """
    router, session = _parts(cache)
    keys = cache.chunk_keys(token_ids, mm_spans=mm_spans)
    timeout_s = session.config.rpc_timeout_s
    request = ExplainRequest(keys.blob, keys.num_tokens, check_layers(layers), timeout_s, keys.kv)
    coverage = router.run(session.plan(token_ids, layers, mm_spans, False))

    def asked() -> Steps[dict[str, ExplainReply | None]]:
        nodes = yield from _nodes(coverage.nodes, Budget(timeout_s))
        return (yield from _answers(nodes, "explain", (request,), Budget(timeout_s)))

    replies = router.run(asked()) if keys else {}
    nowhere = (UNREACHABLE,) * len(keys)
    return PrefixMap(
        tuple(keys.tokens_before(position) + keys.tokens_in(position) for position in range(len(keys))),
        {node_id: nowhere if reply is None else reply.reasons for node_id, reply in sorted(replies.items())},
        coverage,
    )


def _parts(cache: Any) -> tuple[Router, Session]:
    if not isinstance(cache, HiddenStateCache | AsyncHiddenStateCache):
        raise InvalidInputError(f"cache: got {type(cache).__name__}, expected what hs_cache.connect() gives")
    return cache.parts()
