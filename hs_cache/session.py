"""One client's operations, as steps: all that the blocking and the asyncio client have in common. No Ray in here."""

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeVar
from weakref import WeakSet, WeakValueDictionary

import torch

from hs_cache.attachment import Attachment, Link
from hs_cache.config import CacheConfig
from hs_cache.devices import NO_DEVICES, Cut, Moment
from hs_cache.effects import Budget, Call, Find, Pause, Peer, Steps, Work, transfer_s
from hs_cache.errors import (
    CacheClosedError,
    ConfigMismatchError,
    InvalidInputError,
    ServiceError,
    ServiceNotRunningError,
    ServiceTimeoutError,
    StaleIncarnationError,
    StaleRevisionError,
)
from hs_cache.gathering import DIRECTORY, Gathered, Gatherer, HeldPieces, Share
from hs_cache.keys import ChunkKeys, KeySpace, MMSpan, TokenDatabase, normalise_token_ids
from hs_cache.kv_names import kv_naming
from hs_cache.leases import this_process
from hs_cache.messages import (
    UNREACHABLE,
    CommitReply,
    ExplainReply,
    ExplainRequest,
    LeaseReply,
    LeaseRequest,
    ModelRevision,
    NodeStatistics,
    PlanReply,
    ReportNumber,
    ReserveRequest,
    Run,
)
from hs_cache.planning import Step, check_index, check_keys, check_layer_rows, check_seconds, check_spans, check_store
from hs_cache.results import CacheStatistics, ChunkReport, Coverage, Explanation, PrefixHit, StoreResult
from hs_cache.retrieval import Ask, Copies, Piece, check_ask, make_hit, map_rows, view_arrived
from hs_cache.revisions import Revisions
from hs_cache.rows import Flat
from hs_cache.shared_pool import PoolMapping
from hs_cache.stitching import HeldRows, Lost, RequestRows, Stitcher, StorePlan
from hs_cache.troubles import Reported, Suspects, Troubles

logger = logging.getLogger(__name__)

T = TypeVar("T")

_ATTACH_TIMEOUT_S = 60.0
"""A service that is being started has names before it can answer."""

_RESTART_S = 30.0
"""How long a client that connects waits for a node whose actor doesn't let it attach: it may be restarting."""

_PIN_TIMEOUT_S = 10.0
"""How long a client that connects waits for the controller, which may be restarting, to say what is current."""

_INLINE_BYTES = 1 << 20
"""Copying less takes less time than handing it to a thread, which is where the asyncio client does it."""

_SENDER_BYTES = 16
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 0.2
_COUNTERS = (
    "retrieves_total",
    "hits_total",
    "tokens_asked_total",
    "tokens_served_total",
    "zero_copy_total",
    "copied_total",
    "stored_chunks_total",
    "failed_chunks_total",
)


class Writable(Protocol):
    """Rows that are to be written into a pool."""

    @property
    def nbytes(self) -> int:
        """Of all rows."""
        ...

    def copy_into(self, memory: memoryview, runs: Sequence[Run], moment: Moment, cut: Cut | None) -> None:
        """See `hs_cache.stitching.StorePlan.copy_into`."""
        ...

    def flat(self) -> Flat:
        """See `hs_cache.stitching.StorePlan.flat`."""
        ...


class Session:
    """The state of one client: settings, attachment, counters; and its operations. Thread-safe.

    Args:
        space: the fields of `KeySpace` except ``chunk_size``. Without a ``model_revision`` it is the service's current
            one, for good, from the first `attach` on: the weights of the client's engine don't change by themselves.
        strict: raise `ServiceError` instead of turning it into a miss or a failed store.
        engine: which of the node's engines this client belongs to.
    """

    def __init__(self, space: Mapping[str, Any], *, strict: bool, engine: str = "") -> None:
        if not isinstance(strict, bool):
            raise InvalidInputError(f"strict: got {strict!r}, expected True or False")
        if not isinstance(engine, str):
            raise InvalidInputError(f"engine: got {type(engine).__name__}, expected str")
        self._engine = engine
        self._sender = secrets.token_bytes(_SENDER_BYTES)
        self._reports: dict[int, int] = {}  # by thread: the number of its last KV report
        self._space_fields = dict(space)
        self._revision: ModelRevision | None = None
        self._key_space(1)  # refuses wrong fields before anything else happens
        if space.get("model_revision"):
            self._revision = ModelRevision(space.get("model", ""), 0, space["model_revision"])
        self._strict = strict
        self._config: CacheConfig | None = None
        self._database: TokenDatabase | None = None
        self._suspects = suspects = Suspects()
        self._attachment = Attachment(suspects)
        self._lock = threading.Lock()
        self._process = this_process()
        self._troubles = Troubles(strict=strict)
        self._gatherer = Gatherer(self._troubles, suspects)
        self._counts = dict.fromkeys(_COUNTERS, 0)
        self._held = HeldRows()
        self._stitcher = Stitcher(self._held)
        self._requests: WeakValueDictionary[str, RequestRows] = WeakValueDictionary()
        self._plans: WeakSet[HeldPieces] = WeakSet()

    @classmethod
    def of(cls, config: CacheConfig) -> "Session":
        """A session that knows the settings, and no key space: good for `resolve`."""
        session = cls({}, strict=False)
        session._revision = ModelRevision("", 0, "")
        session._take_config(config)
        return session

    def __getstate__(self) -> dict[str, Any]:
        return {
            "space": self._space_fields,
            "strict": self._strict,
            "engine": self._engine,
            "revision": self._revision,
            "config": self._config,
            "closed": self._attachment.closed,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        Session.__init__(self, state["space"], strict=state["strict"], engine=state["engine"])
        self._revision = state["revision"]
        if state["config"] is not None:
            self._take_config(state["config"])
        if state["closed"]:
            self._attachment.close()

    @property
    def config(self) -> CacheConfig:
        """The service's settings."""
        if self._config is None:
            raise CacheClosedError("the cache is not connected yet")
        return self._config

    @property
    def key_space(self) -> KeySpace:
        """What all keys of this client start from."""
        return self._keys().space

    def chunk_keys(self, token_ids: Any, mm_spans: Sequence[MMSpan]) -> ChunkKeys:
        """Keys of a prefix; no call to anyone."""
        return self._keys().chunk_keys(token_ids, mm_spans=mm_spans)

    def close(self) -> None:
        """No more operations. Rows handed out stay valid, and their leases end as ever."""
        if os.getpid() != self._process.pid:
            return  # the child has no use for it anyway, and may have inherited a locked lock
        self._attachment.close()
        self._held.clear()

    def attach(self) -> Steps[None]:
        """Reach the service, whatever `strict` is. An actor that is being restarted is waited for.

        Raises:
            ServiceError: it can't be reached, or can't say which revision of the model is current.
        """
        budget = Budget(_ATTACH_TIMEOUT_S)
        yield from self._reached(budget)
        if self._revision is None:
            yield from self._pin_revision(Budget(min(budget.left_s, _PIN_TIMEOUT_S)))

    def _reached(self, budget: Budget) -> Steps[None]:
        """Attach; again, where an actor has just been killed, say, until another has taken its place."""
        patience, pause_s, told = Budget(min(_RESTART_S, budget.left_s)), _FIRST_PAUSE_S, False
        while True:
            try:
                yield from self._connected(budget)
            except ServiceNotRunningError:
                raise
            except ServiceError as error:
                if patience.is_spent:
                    raise
                if not told:
                    logger.warning(
                        "hs_cache: the node doesn't answer, and is waited for, up to %.0f s: %s", patience.left_s, error
                    )
                    told = True
            else:
                return
            yield Pause(min(pause_s, patience.left_s))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _pin_revision(self, budget: Budget) -> Steps[None]:
        """Take the model's current revision for this client's. The controller has to say, since a node may have missed
        the latest change: with the revision before, a client of new weights would find rows of old ones."""
        model, table = self._space_fields.get("model", ""), None
        while table is None:
            try:
                controller = yield Find(None, budget.left_s)
                table = yield Call(controller, "revisions", (), budget.left_s)
            except ServiceNotRunningError:
                raise
            except ServiceError as error:
                if budget.left_s < _LONGEST_PAUSE_S:
                    raise ServiceError(
                        f"the service can't say which revision of model {model!r} is current: {error}; name it, with "
                        "model_revision, to connect all the same"
                    ) from error
                yield Pause(_LONGEST_PAUSE_S)
        with self._lock:
            if self._revision is None:
                self._revision = Revisions(table).get(model)
        self._take_config(self.config)

    def store(
        self, token_ids: Any, layers: Mapping[int, Any], token_offset: Any, mm_spans: Sequence[MMSpan]
    ) -> Steps[StoreResult]:
        """See `hs_cache.HiddenStateCache.store`. This call itself checks the arguments and takes down the caller's
        streams, not the first of the steps, so that these may be taken later, on another thread."""
        self._check_usable()
        step = check_store(token_ids, layers, token_offset, mm_spans)
        step = replace(step, tokens=step.tokens.copy())  # an array of the caller's may change before the first step
        self._keys().chunk_keys((), mm_spans=step.mm_spans)  # refuses bad spans
        return self._store_step(step, Moment(rows.device for rows in step.rows.values()))

    def _store_step(self, step: Step, moment: Moment) -> Steps[StoreResult]:
        self._check_usable()
        rows = self._accepted(step.rows)
        if not rows:
            keys = self._keys().chunk_keys(step.tokens, mm_spans=step.mm_spans)
            return StoreResult(filtered=max(0, len(keys) - -(-step.first // keys.chunk_size)))
        held, when = (rows, moment) if step.edges(self.config.chunk_size) else ({}, NO_DEVICES)
        step = replace(step, rows=rows)
        plans = yield from self._planned(lambda: self._stitcher.plan(self._keys(), step), held, when)
        return (yield from self._store_all(plans, rows, moment))

    def _planned(
        self, plan: Callable[[], list[StorePlan]], rows: Mapping[int, torch.Tensor], moment: Moment
    ) -> Steps[list[StorePlan]]:
        """What a step completes. Its rows of open chunks are copied for that, which on a device waits for kernels."""
        size = self._keys().space.chunk_size
        held = sum(min(len(given), 2 * size) * given.shape[1] * given.itemsize for given in rows.values())
        if not moment and held < _INLINE_BYTES:
            return plan()
        plans: list[StorePlan] = []

        def work() -> None:
            with moment.reading():  # before the lock of the open chunks is taken: others must not wait for kernels
                plans.extend(plan())

        yield Work(work)
        return plans

    def open_request(self, request_id: Any, mm_spans: Sequence[MMSpan]) -> RequestRows:
        """See `hs_cache.HiddenStateCache.writer`."""
        self._check_usable()
        if not isinstance(request_id, str):
            raise InvalidInputError(f"request_id: got {type(request_id).__name__}, expected str")
        with self._lock:
            known = self._requests.get(request_id)
            if known is not None and not known.closed:
                raise InvalidInputError(
                    f"request_id: got {request_id!r}, whose writer is still open; finish() or abort() it first"
                )
            request = RequestRows(self._keys(), check_spans(mm_spans), self._held)
            self._requests[request_id] = request
            return request

    def append(self, request: RequestRows, new_token_ids: Any, layers: Any, at: Any = None) -> Steps[StoreResult]:
        """See `hs_cache.PrefixWriter.append`."""
        self._check_usable()
        tokens = normalise_token_ids(new_token_ids)
        if not isinstance(layers, Mapping):
            raise InvalidInputError(f"layers: got {type(layers).__name__}, expected {{layer_idx: rows}}")
        rows = self._accepted(check_layer_rows(layers, len(tokens), at_most=True))
        if at is not None and check_index("at", at) != request.num_tokens:
            raise InvalidInputError(f"at: got {at}, expected {request.num_tokens}, the tokens that the writer has")
        moment = Moment(given.device for given in rows.values())
        if (lost := request.lost) is not None:  # it could not be had when the request was preempted
            yield from self._restore(request, lost)
        first = request.num_tokens
        plans = yield from self._planned(lambda: request.append(tokens, rows), rows, moment)
        try:
            return (yield from self._store_all(plans, rows, moment))
        except InvalidInputError:
            request.preempt(first)
            raise

    def finish(self, request: RequestRows, save_tail: Any) -> Steps[StoreResult]:
        """See `hs_cache.PrefixWriter.finish`."""
        self._check_usable()
        if not isinstance(save_tail, bool):
            raise InvalidInputError(f"save_tail: got {save_tail!r}, expected True or False")
        if save_tail and not self.config.save_unfull_chunk:
            raise InvalidInputError(
                "save_tail: got True, expected False where the service runs with save_unfull_chunk false: short chunks "
                "are never looked for there"
            )
        plans = request.tail() if save_tail else []
        request.close()
        return (yield from self._store_all(plans, [spec.layer_idx for plan in plans for spec in plan.specs]))

    def preempt(self, request: RequestRows, num_tokens: Any) -> Steps[None]:
        """See `hs_cache.PrefixWriter.preempt`."""
        self._check_usable()
        count = check_index("num_tokens", num_tokens)
        if count < 0:
            raise InvalidInputError(f"num_tokens: got {count}, expected 0 or more")
        lost = request.preempt(count)
        if lost is not None:
            yield from self._restore(request, lost)

    def _restore(self, request: RequestRows, lost: Lost) -> Steps[None]:
        found = yield from self._look_up(Ask(lost.keys, lost.layers, lost.start, lost.stop))
        if found.ended_by != "unreachable":
            request.restore(lost, found.layers if found.num_tokens == lost.stop else {})

    def _accepted(self, rows: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        accepted = self.config.hidden_state_layers
        return {layer: given for layer, given in rows.items() if accepted is None or layer in accepted}

    def _store_all(
        self, plans: Sequence[StorePlan], layers: Iterable[int], moment: Moment = NO_DEVICES
    ) -> Steps[StoreResult]:
        result, reached, whole = StoreResult(), list[int](), False
        for plan in plans:
            try:
                done = yield from self._store_chunks(plan, moment)
            except InvalidInputError:
                self._stitcher.refused(self._keys(), plan)
                raise
            if done is None:
                failed = sum(plan.num_chunks for plan in plans) - result.num_chunks
                result = replace(result, failed=result.failed + failed)
                break
            if not plan.aside:
                reached.append(done.prefix_tokens)
                whole = whole or [spec.layer_idx for spec in plan.specs] == list(layers)
            result = StoreResult(
                result.stored + done.stored,
                result.present + done.present,
                0,
                result.failed + done.failed,
                min(reached, default=0) if whole else 0,
            )
        self._count(stored_chunks_total=result.stored, failed_chunks_total=result.failed)
        return result

    def retrieve(
        self,
        token_ids: Any,
        layers: Any,
        start: Any,
        stop: Any,
        dtype: Any,
        device: Any,
        out: Mapping[int, torch.Tensor] | None,
        mm_spans: Sequence[MMSpan],
        wait_s: Any,
    ) -> Steps[PrefixHit]:
        """See `hs_cache.HiddenStateCache.retrieve`."""
        self._check_usable()
        keys = self.chunk_keys(token_ids, mm_spans)
        ask = check_ask(keys, len(token_ids), layers, start, stop, dtype, device, out)
        give_up_at = time.monotonic() + check_seconds("wait_s", wait_s)
        hit = yield from self._look_up(ask)
        num_tokens, pause_s = hit.num_tokens, _FIRST_PAUSE_S
        while num_tokens < ask.stop and (left_s := give_up_at - time.monotonic()) > 0:
            yield Pause(min(pause_s, left_s))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            num_tokens = (yield from self._look_up(replace(ask, start=ask.stop, out={}))).num_tokens  # moves no rows
        if num_tokens > hit.num_tokens:
            hit = yield from self._look_up(ask)
        self._count(
            retrieves_total=1,
            hits_total=bool(hit),
            tokens_asked_total=ask.keys.num_tokens,
            tokens_served_total=hit.num_tokens - hit.start if hit else 0,
        )
        return hit

    def _look_up(self, ask: Ask, timeout_s: float | None = None) -> Steps[PrefixHit]:
        if not ask.keys:
            return PrefixHit(start=ask.start)
        budget = self._budget(timeout_s)
        nothing: PrefixHit | None = None
        hit = yield from self._attempt(lambda link: self._retrieve_on(link, ask, budget), nothing, budget)
        if hit is not None:
            return hit
        found = yield from self._gatherer.find(ask, Gathered(ended_by="unreachable"), budget)
        return (yield from self._fetched(ask, found, budget))

    def retrieve_pieces(
        self, token_ids: Any, layers: Any, mm_spans: Sequence[MMSpan]
    ) -> Steps[tuple[Ask, list[Piece]]]:
        """As `retrieve`, but the rows stay where they are: refs to them, for `resolve` in whatever process."""
        self._check_usable()
        ask = check_ask(self.chunk_keys(token_ids, mm_spans), len(token_ids), layers, 0, None)
        if not ask.keys:
            return ask, []
        budget = self._budget()
        nothing: Gathered | None = None
        found = yield from self._attempt(lambda link: self._find_on(link, ask, budget), nothing, budget)
        if found is None:
            found = yield from self._gatherer.find(ask, Gathered(ended_by="unreachable"), budget)
        return ask, [replace(piece, shared=True) for piece in found.pieces]

    def plan(self, token_ids: Any, layers: Any, mm_spans: Sequence[MMSpan], hold: Any) -> Steps[Coverage]:
        """See `hs_cache.HiddenStateCache.plan`."""
        self._check_usable()
        ask = check_ask(self.chunk_keys(token_ids, mm_spans), len(token_ids), layers, 0, None)
        if not isinstance(hold, bool):
            raise InvalidInputError(f"hold: got {hold!r}, expected True or False")
        if not ask.keys:
            return Coverage(layer_tokens=dict.fromkeys(ask.layers, 0))
        if not hold:
            ask = replace(ask, start=ask.stop)  # asks for no rows
        budget = self._budget()
        nothing: Coverage | None = None
        coverage = yield from self._attempt(lambda link: self._plan_on(link, ask, hold, budget), nothing, budget)
        if coverage is None:
            found = yield from self._gatherer.find(ask, Gathered(ended_by="unreachable"), budget)
            coverage = self._coverage(ask, hold, found)
        return coverage

    def explain(self, token_ids: Any, layers: Any, mm_spans: Sequence[MMSpan]) -> Steps[Explanation]:
        """See `hs_cache.HiddenStateCache.explain`."""
        self._check_usable()
        ask = check_ask(self.chunk_keys(token_ids, mm_spans), len(token_ids), layers, 0, None)
        if not ask.keys:
            return Explanation()
        budget = self._budget()

        def explained(link: Link) -> Steps[tuple[str, ExplainReply] | None]:
            request = ExplainRequest(ask.keys.blob, ask.keys.num_tokens, ask.layers, budget.left_s, ask.keys.kv)
            reply: ExplainReply = yield Call(link.located.peer, "explain", (request,), budget.left_s)
            return link.located.peer.node_id, reply

        answer = yield from self._attempt(explained, None, budget)
        here, reply = answer or ("", ExplainReply((UNREACHABLE,) * len(ask.keys), False))
        reports = Explanation(
            ChunkReport(ask.keys.tokens_before(position), ask.keys.tokens_in(position), reason, here)
            for position, reason in enumerate(reply.reasons)
        )
        if not reply.alone:
            reasons = [report.reason for report in reports]
            elsewhere = yield from _surfaced(self._gatherer.explain(ask, reasons, here, budget))
            for position, (reason, node_id) in elsewhere.items():
                reports[position] = replace(reports[position], reason=reason, node_id=node_id)
        return reports

    def locate(
        self, token_ids: Any, layers: Any, mm_spans: Sequence[MMSpan], num_asked: Any, timeout_s: Any
    ) -> Steps[dict[str, int]]:
        """See `hs_cache.HiddenStateCache.locate`."""
        self._check_usable()
        ask = check_ask(self.chunk_keys(token_ids, mm_spans), len(token_ids), layers, 0, None)
        if num_asked is not None and check_index("num_asked", num_asked) < 0:
            raise InvalidInputError(f"num_asked: got {num_asked}, expected 0 or more, or None for all")
        timeout_s = None if timeout_s is None else check_seconds("timeout_s", timeout_s)
        if not ask.keys:
            return {}
        return (yield from _surfaced(self._gatherer.holders(ask, num_asked, self._budget(timeout_s))))

    def resolve(self, ask: Ask, pieces: Sequence[Piece], timeout_s: float | None) -> Steps[PrefixHit]:
        """The rows behind the refs of `retrieve_pieces`; where these are lost, whatever can be found by keys."""
        self._check_usable()
        fetched, lost = yield from self._gatherer.fetch_pieces(pieces, self._budget(timeout_s).left_s)
        if lost is not None:
            logger.info("rows behind a ref are lost, they are looked for by their keys: %s", str(lost))
        if not pieces or lost is not None:
            try:
                again = yield from self._look_up(ask, timeout_s)
            except ConfigMismatchError:  # the service has begun anew, with other keys
                again = PrefixHit()
            if not fetched or again.num_tokens > fetched[-1].end:
                short = lost is not None and again.num_tokens < min(pieces[-1].end, ask.stop)
                return replace(again, ended_by="unreachable") if short else again
        return (yield from self._copied(ask, Gathered(fetched, "hidden_state" if lost is None else "unreachable")))

    def call(self, method: str, *args: Any, otherwise: T) -> Steps[T]:
        """One plain call to the node's hidden-state actor; `otherwise` when it can't be reached."""

        budget = self._budget()

        def called(link: Link) -> Steps[T]:
            result: T = yield Call(link.located.peer, method, args, budget.left_s)
            return result

        return self._attempt(called, otherwise, budget)

    def report(self, method: str, what: Any, mm_spans: Sequence[MMSpan] = ()) -> Steps[bool]:
        """Tell the node's KV actor about `what`: keys, or token ids for their chunks. False if it wasn't reached."""
        first = what[0] if isinstance(what, list | tuple) and what else what
        if method == "resync" or isinstance(first, bytes | ChunkKeys | set | frozenset):
            blob = check_keys("keys", what)
            if mm_spans:
                raise InvalidInputError("mm_spans: got spans along with keys, expected them along with token ids only")
        else:
            blob = self.chunk_keys(what, mm_spans).blob

        budget = self._budget()

        def told(link: Link) -> Steps[bool]:
            error: ServiceError | None = None
            if link.local:
                number = self._number_report()  # of what this thread sends, the call comes next
                try:
                    yield Call(link.located.kv, method, (blob, self._engine, number), budget.left_s)
                except ServiceError as failure:
                    error = failure
            else:  # what is computed here is no concern of the node that serves this client
                error = ServiceNotRunningError("there is no KV actor on this client's node")
            if error is not None:
                self._number_report()  # whether it arrived or not, the next one shows that something is missing
                self._troubles.report(error, "the KV actor")
            else:
                self._troubles.recovered("the KV actor")
            return error is None

        return self._attempt(told, False, budget)

    def _number_report(self) -> ReportNumber:
        thread = threading.get_ident()
        number = self._reports[thread] = self._reports.get(thread, -1) + 1
        return ReportNumber(self._sender + thread.to_bytes(8, "little"), number)

    def stats(self) -> Steps[CacheStatistics]:
        """See `hs_cache.HiddenStateCache.stats`."""
        nothing: NodeStatistics | None = None
        node = yield from self.call("stats", otherwise=nothing)
        troubles = self._troubles
        with self._lock:
            return CacheStatistics(
                **self._counts,
                held_bytes=self._held.nbytes,
                held_dropped_total=self._held.dropped_total,
                timeouts_total=troubles.timeouts_total,
                unreachable_total=troubles.unreachable_total,
                stale_stores_total=troubles.stale_stores_total,
                node=node,
            )

    def operate(
        self, body: Callable[[Link, Budget], Steps[T]], otherwise: T, timeout_s: float | None = None
    ) -> Steps[T]:
        """Carry out what another module defines, on the node that serves this client; `otherwise` when it can't be
        reached.

        Args:
            body: it is called again, with another link, if the node's actor was restarted meanwhile.
            timeout_s: per round trip; None for the service's own.
        """
        budget = self._budget(timeout_s)
        return self._attempt(lambda link: body(link, budget), otherwise, budget)

    def tell(self, whom: Peer | str | None, method: str, *args: Any, budget: Budget) -> Steps[Any]:
        """One call to the peer that serves this client, to another node by its id, or with None to the controller. It
        results in None if that can't be reached, which is reported, or couldn't be a moment ago.
        """
        name = DIRECTORY if whom is None else whom if isinstance(whom, str) else whom.node_id
        what = DIRECTORY if whom is None else f"node {name}"
        fair = budget.is_fresh
        try:
            if whom is None or isinstance(whom, str):
                if name in self._suspects.names():
                    return None
                peer: Peer = yield Find(whom, budget.left_s)
            else:
                peer = whom
            reply = yield Call(peer, method, args, budget.left_s)
        except ServiceError as error:
            if fair and isinstance(error, ServiceTimeoutError) and (whom is None or isinstance(whom, str)):
                self._suspects.add(name)
            self._troubles.report(error, what)
            return None
        self._troubles.recovered(what)
        return reply

    def _budget(self, timeout_s: float | None = None) -> Budget:
        return Budget(self.config.rpc_timeout_s if timeout_s is None else timeout_s)

    def _attempt(self, body: Callable[[Link], Steps[T]], otherwise: T, budget: Budget) -> Steps[T]:
        """Run `body` on the attachment; once more on a new one if the node's actor was restarted in between."""
        self._check_usable()
        return _surfaced(self._attempts(body, otherwise, budget))

    def _attempts(self, body: Callable[[Link], Steps[T]], otherwise: T, budget: Budget) -> Steps[T]:
        for last in (False, True):
            link = None
            try:
                link = yield from self._connected(budget)
                result = yield from body(link)
            except StaleIncarnationError as stale:
                if link is not None:
                    self._attachment.drop(link.incarnation)
                if last:
                    error = ServiceError(f"the node refuses what it has just granted: {stale}")
                    self._troubles.report(error, "the cache")
            except StaleRevisionError as refusal:
                self._troubles.recovered("the cache")
                self._troubles.refused(refusal)
                break
            except ServiceError as error:
                if link is not None:
                    self._attachment.fail(link, error)
                self._troubles.report(error, "the cache")
                break
            else:
                self._troubles.recovered("the cache")
                return result
        return otherwise

    def _connected(self, budget: Budget) -> Steps[Link]:
        self._check_usable()
        link = self._attachment.link
        if link is None:
            return (yield from self._attachment.attach(self._process, budget, self._take_config))
        if link.is_final or time.monotonic() < link.look_again_at:
            return link
        try:
            # By now there may be a pool on the client's own node, or one that it can open.
            return (yield from self._attachment.attach(self._process, Budget(budget.left_s / 2), self._take_config))
        except ServiceError as error:
            logger.debug("still served by node %s: %s", link.located.peer.node_id, error)
            return link

    def _take_config(self, config: CacheConfig) -> None:
        if self._config is not None and self._config.chunk_size != config.chunk_size:
            raise ConfigMismatchError(
                f"chunk_size: the service now has {config.chunk_size}, this client has {self._config.chunk_size}; "
                "connect again"
            )
        self._config = config
        if self._revision is not None:
            space = self._key_space(config.chunk_size)
            self._database = TokenDatabase(
                space,
                save_unfull_chunk=config.save_unfull_chunk,
                kv_naming=kv_naming(config, space),
            )

    def _key_space(self, chunk_size: int) -> KeySpace:
        fields: dict[str, Any] = dict(self._space_fields)
        if self._revision is not None:
            fields["model_revision"] = self._revision.name
        return KeySpace(**fields, chunk_size=chunk_size)

    def _keys(self) -> TokenDatabase:
        if self._database is None:
            raise CacheClosedError("the cache is not connected yet")
        return self._database

    def _check_usable(self) -> None:
        if self._attachment.closed:
            raise CacheClosedError("the cache is closed; connect() gives a new one")
        if os.getpid() != self._process.pid:
            raise CacheClosedError(
                f"this cache belongs to process {self._process.pid}, and Ray doesn't work in its forked child "
                f"{os.getpid()}: start children with multiprocessing's 'spawn' and connect() there"
            )

    def _count(self, **more: int) -> None:
        with self._lock:
            for name, number in more.items():
                self._counts[name] += number

    def _store_chunks(self, plan: StorePlan, moment: Moment) -> Steps[CommitReply | None]:
        budget = self._budget()
        nothing: CommitReply | None = None
        return (yield from self._attempt(lambda link: self._store_on(link, plan, moment, budget), nothing, budget))

    # On one attachment. Whatever ends these early gives up what was held: the client chose the id before the call, so
    # that also holds where the answer never came.

    def _store_on(self, link: Link, plan: StorePlan, moment: Moment, budget: Budget) -> Steps[CommitReply]:
        request = ReserveRequest(
            incarnation=link.incarnation,
            client_id=self._process.client_id,
            hold_id=self._process.next_id(),
            space=self.key_space.fingerprint,
            keys=plan.keys.blob,
            num_tokens=plan.keys.num_tokens,
            first_chunk=plan.first_chunk,
            specs=plan.specs,
            kv_local=link.local,
            engine=self._engine,
            kv=plan.keys.kv,
            revision=self._revision,
        )
        return (yield from self.write(link, request, plan, moment, budget))

    def write(
        self, link: Link, request: ReserveRequest, rows: Writable, moment: Moment, budget: Budget
    ) -> Steps[CommitReply]:
        """Reserve, copy, commit; or all at once, where the pool isn't mapped."""
        peer = link.located.peer
        if link.mapping is None:
            return (yield from self._send(link, request, rows, moment, budget))
        give_up = partial(self._process.releaser.end, link.incarnation, (request.hold_id,))
        copying: Work | None = None
        try:
            reply = yield from self._with_releases(link, "reserve", request, budget.left_s)
            if reply.runs:
                copying = Work(partial(_copy_in, rows, link.mapping, reply.runs, moment))
                yield copying
            budget.restart()
            done: CommitReply = yield Call(
                peer, "commit", (link.incarnation, request.client_id, request.hold_id), budget.left_s
            )
        except BaseException:
            _after(copying, give_up)
            raise
        return done

    def _send(
        self, link: Link, request: ReserveRequest, rows: Writable, moment: Moment, budget: Budget
    ) -> Steps[CommitReply]:
        flat: list[Flat] = []
        yield Work(lambda: flat.append(_flat(rows, moment)))
        budget.restart()
        deadline_s = budget.left_s + transfer_s(rows.nbytes)
        try:
            done: CommitReply = yield from self._with_releases(
                link, "store_rows", request, deadline_s, flat[0], carries_rows=True
            )
        except BaseException:
            # It may still be carried out, and must not replace then what was stored in the meantime.
            release = partial(
                link.located.peer.post, "release", link.incarnation, request.client_id, (request.hold_id,)
            )
            self._process.releaser.post(release, (link.incarnation, request.hold_id))
            raise
        return done

    def read(self, link: Link, ask: Ask, budget: Budget, node_id: str = "") -> Steps[PrefixHit]:
        """Rows from wherever they are; with `node_id` only from that node."""
        if node_id in ("", link.located.peer.node_id):
            return (yield from self._retrieve_on(link, ask, budget, elsewhere=not node_id))
        found = yield from self._gatherer.ask(ask, [Share(node_id, 0, len(ask.keys))], budget)
        if found.error is not None:
            self._troubles.report(found.error, f"node {node_id}")
        return (yield from self._fetched(ask, found, budget))

    def _retrieve_on(self, link: Link, ask: Ask, budget: Budget, elsewhere: bool = True) -> Steps[PrefixHit]:
        if link.mapping is None:
            found = yield from self._find_on(link, ask, budget, elsewhere)
            return (yield from self._fetched(ask, found, budget))
        request = self._lease_request(link, ask, budget)
        copying: Work | None = None
        copied: Copies | None = None
        releaser, mapping = self._process.releaser, link.mapping

        def give_up() -> None:
            if copied is not None and copied.flight:
                releaser.end_after(copied.flight, link.incarnation, request.hold_id, mapping)
            else:
                releaser.end(link.incarnation, (request.hold_id,))

        try:
            reply: LeaseReply = yield from self._with_releases(link, "lease", request, budget.left_s)
            own = Piece(reply.specs, 0, reply.num_tokens, reply.runs, mapping.write_view(), pool=mapping)
            pieces = (own,) if reply.num_tokens else ()
            found = Gathered(pieces, reply.ended_by, reply.alone, link.located.peer.node_id)
            if found.ended_by and not found.alone and elsewhere:
                found = yield from self._found_elsewhere(ask, found, budget)
                found = yield from self._rows_of(ask, found, budget)
            if not reply.num_tokens:
                return (yield from self._copied(ask, found))
            whole = len(found.pieces) == 1 and found.pieces[0] is own and not reply.must_copy
            shared = map_rows(link.mapping, reply, ask) if whole else {}
            copied = Copies(ask, reply.specs, found.pieces[-1].end, without=shared)
            if copied.targets:
                copying = Work(partial(copied.run, found.pieces))
                yield copying
            if shared:
                more = int(bool(copied.flight))
                releaser.watch(link.incarnation, request.hold_id, [m for m, _ in shared.values()], more)
        except BaseException:
            _after(copying, give_up)
            raise
        if not shared or copied.flight:
            give_up()
        self._count(zero_copy_total=len(shared), copied_total=len(copied.targets))
        rows = {layer: rows for layer, (_, rows) in shared.items()} | copied.targets
        return make_hit(ask, found.pieces[-1].end, found.ended_by, rows)

    def _find_on(self, link: Link, ask: Ask, budget: Budget, elsewhere: bool = True) -> Steps[Gathered]:
        """Pieces from the node that serves this client, then from others; their rows are not fetched yet."""
        peer = link.located.peer
        found = yield from self._gatherer.ask(ask, [Share(peer.node_id, 0, len(ask.keys), peer)], budget)
        if found.error is not None:
            raise found.error
        if found.ended_by and not found.alone and elsewhere:
            found = yield from self._found_elsewhere(ask, found, budget)
        return found

    def _found_elsewhere(self, ask: Ask, found: Gathered, budget: Budget) -> Steps[Gathered]:
        """Continue `found` with what plans of this client hold on other nodes, and with what the directory names."""
        with self._lock:
            plans = list(self._plans)
        for held in plans:
            found = held.extend(ask, found)
        if found.ended_by:
            found = yield from self._gatherer.find(ask, found, budget)
        return found

    def _rows_of(self, ask: Ask, found: Gathered, budget: Budget) -> Steps[Gathered]:
        """The rows of what was found; where those of a plan are lost, what others have instead."""
        found = yield from self._gatherer.fetch(ask, found, budget)
        if found.lost is None:
            return found
        with self._lock:
            plans = [held for held in self._plans if any(piece.ref is found.lost for piece in held.pieces)]
        if plans:
            for held in plans:
                held.lose(found.lost)
            found = yield from self._gatherer.find(ask, replace(found, lost=None), budget)
            found = yield from self._gatherer.fetch(ask, found, budget)
        return found

    def _plan_on(self, link: Link, ask: Ask, hold: bool, budget: Budget) -> Steps[Coverage]:
        if link.mapping is None:
            found = yield from self._find_on(link, ask, budget)
            return self._coverage(ask, hold, found)
        request = self._lease_request(link, ask, budget)
        give_up = partial(self._process.releaser.end, link.incarnation, (request.hold_id,))
        try:
            reply: PlanReply = yield from self._with_releases(link, "plan", request, budget.left_s, hold)
            node_id = link.located.peer.node_id
            own = Piece(reply.specs, 0, reply.num_tokens, (), node_id=node_id)
            found = Gathered((own,) if reply.num_tokens else (), reply.ended_by, reply.alone, node_id)
            if found.ended_by and not found.alone:
                found = yield from self._found_elsewhere(ask, found, budget)
            return self._coverage(ask, hold and reply.held, found, reply, give_up)
        except BaseException:
            if hold:
                give_up()
            raise

    def _coverage(
        self,
        ask: Ask,
        hold: bool,
        found: Gathered,
        reply: PlanReply | None = None,
        end: Callable[[], None] | None = None,
    ) -> Coverage:
        num_tokens = found.pieces[-1].end if found.pieces else 0
        of_layers = reply.layer_tokens if reply is not None else (0,) * len(ask.layers)
        held: HeldPieces | None = None
        if hold:
            pieces = tuple(replace(piece, shared=True) for piece in found.pieces if piece.ref is not None)
            held = HeldPieces(ask.keys, pieces)
            if pieces:
                with self._lock:
                    self._plans.add(held)
        return Coverage(
            num_tokens=num_tokens,
            kv_tokens=max(reply.kv_tokens if reply is not None else 0, num_tokens),
            layer_tokens={layer: max(n, num_tokens) for layer, n in zip(ask.layers, of_layers, strict=True)},
            nbytes=sum(piece.nbytes for piece in found.pieces),
            nodes=tuple(dict.fromkeys(piece.node_id for piece in found.pieces)),
            ended_by=found.ended_by if num_tokens < ask.stop else "",
            release=partial(_let_go, held, end) if held is not None else None,
        )

    def _fetched(self, ask: Ask, found: Gathered, budget: Budget) -> Steps[PrefixHit]:
        found = yield from self._rows_of(ask, found, budget)
        return (yield from self._copied(ask, found))

    def _copied(self, ask: Ask, found: Gathered) -> Steps[PrefixHit]:
        """The result of pieces none of which is leased."""
        if not found.pieces:
            return PrefixHit(start=ask.start, ended_by=found.ended_by)
        shared = view_arrived(found.pieces[0], ask) if len(found.pieces) == 1 else {}
        copied = Copies(ask, found.pieces[0].specs, found.pieces[-1].end, without=shared)
        if copied.targets:
            yield Work(partial(copied.run, found.pieces))
        self._count(zero_copy_total=len(shared), copied_total=len(copied.targets))
        return make_hit(ask, found.pieces[-1].end, found.ended_by, shared | copied.targets)

    def _lease_request(self, link: Link, ask: Ask, budget: Budget) -> LeaseRequest:
        return LeaseRequest(
            incarnation=link.incarnation,
            client_id=self._process.client_id,
            hold_id=self._process.next_id(),
            keys=ask.keys.blob,
            num_tokens=ask.keys.num_tokens,
            layers=ask.layers,
            timeout_s=budget.left_s,
            kv=ask.keys.kv,
            counted=ask.counted,
        )

    def _with_releases(
        self, link: Link, method: str, request: Any, timeout_s: float, *more: Any, carries_rows: bool = False
    ) -> Steps[Any]:
        """A call that also carries what has ended, so that memory is free again before more is asked for."""
        releases: tuple[int, ...] = ()
        try:
            releases = self._process.releaser.take(link.incarnation)
            arguments = (replace(request, releases=releases), *more)
            reply = yield Call(link.located.peer, method, arguments, timeout_s, carries_rows)
        except BaseException:
            self._process.releaser.end(link.incarnation, releases)
            raise
        if releases:
            self._process.releaser.taken(link.incarnation, releases)
        return reply


def _surfaced(steps: Steps[T]) -> Steps[T]:
    """The steps; to a client that is strict, what they report of trouble is raised."""
    try:
        return (yield from steps)
    except Reported as reported:
        failure = reported.error
    # Not while the other is being handled: each would refer to the other, and both to the caller's rows.
    try:
        raise failure
    finally:
        del failure


def _let_go(held: HeldPieces, end: Callable[[], None] | None) -> None:
    """A plan's end. Takes no lock: the plan may be collected inside of one of ours."""
    held.pieces = ()
    if end is not None:
        end()


def _copy_in(rows: Writable, mapping: PoolMapping, runs: Sequence[Run], moment: Moment) -> None:
    moment.pin(mapping.pin_once)
    rows.copy_into(mapping.write_view(), runs, moment, mapping.copy_pieces)


def _flat(rows: Writable, moment: Moment) -> Flat:
    with moment.reading():
        return rows.flat()


def _after(work: Work | None, then: Callable[[], None]) -> None:
    """Call `then` when `work`, if it was begun at all, surely touches nothing any more."""
    if work is None:
        then()
    else:
        work.abandon(then)
