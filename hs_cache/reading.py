"""One client's reads, as steps, and what is asked about what could be read."""

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakSet

import torch

from hs_cache.attachment import Link
from hs_cache.connection import FIRST_PAUSE_S, LONGEST_PAUSE_S, Connection
from hs_cache.effects import Budget, Call, Pause, Steps, Work, after
from hs_cache.errors import InvalidInputError
from hs_cache.gathering import Gathered, HeldPieces, Share
from hs_cache.keys import ChunkKeys, MMSpan
from hs_cache.messages import UNREACHABLE, ExplainReply, ExplainRequest, LeaseRequest, PlanReply
from hs_cache.planning import check_index, check_seconds
from hs_cache.results import ChunkReport, Coverage, Explanation, PrefixHit
from hs_cache.retrieval import Ask, Copies, Piece, check_ask, make_hit, map_rows, view_arrived
from hs_cache.troubles import surfaced

logger = logging.getLogger(__name__)


class Reader(Connection):
    """A client that finds rows, and gets them: from the pool of its own node, and from other nodes. Thread-safe.

    See `hs_cache.connection.Connection` for the arguments.
    """

    def __init__(self, space: Mapping[str, Any], *, strict: bool, engine: str = "") -> None:
        super().__init__(space, strict=strict, engine=engine)
        self._plans: WeakSet[HeldPieces] = WeakSet()

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
        num_tokens, pause_s = hit.num_tokens, FIRST_PAUSE_S
        while num_tokens < ask.stop and (left_s := give_up_at - time.monotonic()) > 0:
            yield Pause(min(pause_s, left_s))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
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
            elsewhere = yield from surfaced(self._gatherer.explain(ask, reasons, here, budget))
            for position, (reason, node_id) in elsewhere.items():
                reports[position] = replace(reports[position], reason=reason, node_id=node_id)
        return reports

    def locate(
        self, prompt: Any, layers: Any, mm_spans: Sequence[MMSpan], nodes: Any, num_asked: Any, timeout_s: Any
    ) -> Steps[dict[str, int]]:
        """See `hs_cache.HiddenStateCache.locate`."""
        self._check_usable()
        if isinstance(prompt, ChunkKeys):
            if mm_spans:
                raise InvalidInputError("mm_spans: got spans along with keys, expected them along with token ids only")
            if prompt.chunk_size != (size := self.config.chunk_size):
                raise InvalidInputError(
                    f"prompt: got keys of chunks of {prompt.chunk_size}, expected the service's {size}"
                )
            keys = prompt
        else:
            keys = self.chunk_keys(prompt, mm_spans)
        ask = check_ask(keys, keys.num_tokens, layers, 0, None)
        if nodes is not None and (isinstance(nodes, str) or not isinstance(nodes, Collection)):
            raise InvalidInputError(f"nodes: got {type(nodes).__name__}, expected a collection of node ids, or None")
        if num_asked is not None and check_index("num_asked", num_asked) < 0:
            raise InvalidInputError(f"num_asked: got {num_asked}, expected 0 or more, or None for all")
        timeout_s = None if timeout_s is None else check_seconds("timeout_s", timeout_s)
        if not ask.keys:
            return {}
        return (yield from surfaced(self._gatherer.holders(ask, nodes, num_asked, self._budget(timeout_s))))

    def resolve(self, ask: Ask, pieces: Sequence[Piece], timeout_s: float | None) -> Steps[PrefixHit]:
        """The rows behind the refs of `retrieve_pieces`; where these are lost, whatever can be found by keys."""
        self._check_usable()
        fetched, lost = yield from self._gatherer.fetch_pieces(pieces, self._budget(timeout_s).left_s)
        if lost is not None:
            logger.info("rows behind a ref are lost, they are looked for by their keys: %s", str(lost))
        if not pieces or lost is not None:
            again = yield from self._look_up(ask, timeout_s)
            if not fetched or again.num_tokens > fetched[-1].end:
                short = lost is not None and again.num_tokens < min(pieces[-1].end, ask.stop)
                return replace(again, ended_by="unreachable") if short else again
        return (yield from self._copied(ask, Gathered(fetched, "hidden_state" if lost is None else "unreachable")))

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
            reply = yield from link.control.lease(request, budget.left_s)
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
            after(copying, give_up)
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
            reply = yield from link.control.plan(request, hold, budget.left_s)
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


def _let_go(held: HeldPieces, end: Callable[[], None] | None) -> None:
    """A plan's end. Takes no lock: the plan may be collected inside of one of ours."""
    held.pieces = ()
    if end is not None:
        end()
