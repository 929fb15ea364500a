"""Rows that other nodes have: who is asked for which chunks, what they answer, and their rows, as pieces in order."""

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from hs_cache.directory import Segment
from hs_cache.effects import Begin, Budget, Call, Fetch, Find, Peer, Steps, transfer_s
from hs_cache.errors import ServiceError, ServiceTimeoutError
from hs_cache.keys import KEY_BYTES, ChunkKeys
from hs_cache.messages import (
    EVICTED,
    NEVER_STORED,
    OK,
    UNREACHABLE,
    ExplainReply,
    ExplainRequest,
    LeaseReply,
    LeaseRequest,
)
from hs_cache.retrieval import Ask, Piece
from hs_cache.rows import flat_runs
from hs_cache.troubles import Suspects, Troubles, without_frames

_LEAST_S = 0.5
"""Rows of a call that has been answered may take this long, whatever is left of the operation's time."""

DIRECTORY = "the directory"
"""The controller, among those that are suspected or in trouble."""


@dataclass(frozen=True)
class Share:
    """Chunks ``first .. end`` of a prefix, to be asked of one node: of `peer`, or of whom the directory named."""

    node_id: str
    first: int
    end: int
    peer: Peer | None = None


@dataclass(frozen=True)
class Gathered:
    """Pieces of a prefix that follow each other, the first from token 0 on.

    Attributes:
        ended_by: what ended them, as in `hs_cache.results.PrefixHit`; ``""`` when all that was asked for is there.
        alone: the node that was asked last said that there is no other one.
        short: the node with which they ended.
        error: why that node didn't answer.
        lost: the ref of the piece behind the last, if its rows could not be had.
    """

    pieces: tuple[Piece, ...] = ()
    ended_by: str = "hidden_state"
    alone: bool = False
    short: str = ""
    error: ServiceError | None = None
    lost: Any = None


class HeldPieces:
    """What a plan holds of a prefix on other nodes: rows that are in the object store for as long as this has the refs.

    Attributes:
        pieces: they follow each other; emptied at the plan's end.
    """

    def __init__(self, keys: ChunkKeys, pieces: tuple[Piece, ...]) -> None:
        self._keys = keys
        self.pieces = pieces

    def extend(self, ask: Ask, found: Gathered) -> Gathered:
        """Continue `found` with what is held of the same prefix in all layers that are asked for."""
        for piece in self.pieces:
            end = found.pieces[-1].end if found.pieces else 0
            if piece.first <= end < piece.end and self._is_of(ask, piece):
                wanted = _in_layers(piece, ask)
                if found.pieces and found.pieces[-1].specs != wanted.specs:
                    break
                # Where more is there by now than when it was planned, the end of that makes way.
                before = tuple(
                    replace(other, num_tokens=min(other.end, piece.first) - other.first)
                    for other in found.pieces
                    if other.first < piece.first
                )
                whole = piece.end >= ask.keys.num_tokens
                found = replace(found, pieces=(*before, wanted), ended_by="" if whole else "hidden_state", short="")
        return found

    def lose(self, ref: Any) -> None:
        """What is behind that ref can't be had: neither can what follows it."""
        kept = next((i for i, piece in enumerate(self.pieces) if piece.ref is ref), len(self.pieces))
        self.pieces = self.pieces[:kept]

    def _is_of(self, ask: Ask, piece: Piece) -> bool:
        nbytes = min(-(-piece.end // ask.keys.chunk_size), len(ask.keys)) * KEY_BYTES
        return self._keys.blob[:nbytes] == ask.keys.blob[:nbytes] and set(ask.layers) <= {
            spec.layer_idx for spec in piece.specs
        }


def _in_layers(piece: Piece, ask: Ask) -> Piece:
    """Of a piece, what a retrieve wants: its layers in its order, and no rows if they all lie before its start."""
    both = {spec.layer_idx: (spec, run) for spec, run in zip(piece.specs, piece.runs, strict=True)}
    specs, runs = zip(*(both[layer] for layer in ask.layers), strict=True)
    if piece.end <= ask.start:
        return replace(piece, specs=specs, runs=(), ref=None)
    return replace(piece, specs=specs, runs=runs)


class _NobodyToAskError(Exception):
    """The controller doesn't answer, or didn't a moment ago."""


class Gatherer:
    """What one client knows of the nodes of its service, and how it gets rows from them. Thread-safe.

    Args:
        troubles: where trouble is reported; it raises `hs_cache.troubles.Reported` when the client is strict.
        suspects: who isn't asked; who doesn't answer is added.
    """

    def __init__(self, troubles: Troubles, suspects: Suspects) -> None:
        self._troubles = troubles
        self._suspects = suspects
        self._unheard = Suspects()  # who didn't answer `holders`, whose callers may have little patience

    def ask(self, ask: Ask, shares: Sequence[Share], budget: Budget, before: Piece | None = None) -> Steps[Gathered]:
        """Ask all nodes at once for their shares; what they have, up to the first that falls short.

        Rows are not fetched yet. The error of a node that doesn't answer is in the result, and not reported.

        Args:
            ask: the retrieve; only its keys, layers and start matter here.
            shares: one behind the other.
            budget: time for the answers.
            before: what the first share continues.
        """
        fair = budget.is_fresh
        begun: list[Sequence[Any] | ServiceError] = []
        for share in shares:
            begun.append((yield from self._begin(ask, share, budget)))
        pieces: list[Piece] = []
        ended_by, alone, error = "", False, None
        node_id = ""
        for share, refs in zip(shares, begun, strict=True):
            node_id = share.node_id
            if isinstance(refs, ServiceError):
                ended_by, error = "unreachable", refs
                break
            reply_ref, rows_ref = refs
            try:
                reply: LeaseReply = yield Fetch(reply_ref, budget.left_s)
            except ServiceError as failure:
                ended_by, error = "unreachable", without_frames(failure)
                break
            self._troubles.recovered(_node(node_id))
            alone, ended_by = reply.alone, reply.ended_by
            if reply.num_tokens and before is not None and reply.specs != before.specs:
                ended_by = "hidden_state"  # the layers are there, but not as those before them
                break
            if reply.num_tokens:
                first_token = share.first * ask.keys.chunk_size
                sent_from = min(max(first_token, ask.start), first_token + reply.num_tokens)
                runs = flat_runs(reply.specs, first_token + reply.num_tokens - sent_from, sent_from)
                before = Piece(reply.specs, first_token, reply.num_tokens, runs, ref=rows_ref, node_id=node_id)
                pieces.append(before)
            if ended_by:
                break
        if error is not None and (fair or not isinstance(error, ServiceTimeoutError)):
            self._suspects.add(node_id)
        return Gathered(tuple(pieces), ended_by, alone, node_id, error)

    def find(self, ask: Ask, found: Gathered, budget: Budget) -> Steps[Gathered]:
        """Continue `found` with what the directory names, and where that falls short, with what it names instead.

        Rows are not fetched yet. Trouble is reported.
        """
        # A node without KV for a chunk still has its rows, and would be named again; one without the rows may have
        # others farther on.
        without = {found.short} if found.ended_by.startswith("kv") else set()
        while found.ended_by and not budget.is_spent:
            end = found.pieces[-1].end if found.pieces else 0
            try:
                shares = yield from self._locate(ask, -(-end // ask.keys.chunk_size), without, budget)
            except _NobodyToAskError:
                return replace(found, ended_by="unreachable")
            if not shares:
                break
            more = yield from self.ask(ask, shares, budget, found.pieces[-1] if found.pieces else None)
            found = replace(more, pieces=found.pieces + more.pieces)
            if more.error is not None:
                self._troubles.report(more.error, _node(more.short))
            if not more.ended_by:  # all that was named is there
                return found if shares[-1].end == len(ask.keys) else replace(found, ended_by="hidden_state")
            without.add(more.short)
        return found

    def explain(self, ask: Ask, reasons: Sequence[str], here: str, budget: Budget) -> Steps[dict[int, tuple[str, str]]]:
        """What other nodes say of the chunks that the node `here` hasn't got: by position, the reason and the node.

        Trouble is reported.
        """
        explained: dict[int, tuple[str, str]] = {}
        wanted = [position for position, reason in enumerate(reasons) if reason != OK]
        asked = {here}
        while wanted:
            keys = b"".join(ask.keys[position] for position in wanted)
            try:
                controller = yield Find(None, budget.left_s)
                nodes: Sequence[str] = yield Call(controller, "where", (keys, tuple(sorted(asked))), budget.left_s)
            except ServiceError as error:
                self._troubles.report(error, DIRECTORY)
                unknown = {position for position in wanted if reasons[position] == NEVER_STORED}
                return explained | {position: (UNREACHABLE, "") for position in unknown - explained.keys()}
            self._troubles.recovered(DIRECTORY)
            for node_id in sorted(set(nodes) - {""}):
                positions = [position for position, node in zip(wanted, nodes, strict=True) if node == node_id]
                said = yield from self._explained_by(node_id, ask, positions, budget)
                explained |= {
                    position: (reason, node_id)
                    for position, reason in said.items()
                    if reason not in (NEVER_STORED, EVICTED)
                }
            named = {position for position, node in zip(wanted, nodes, strict=True) if node}
            wanted = [
                position for position in wanted if position in named and explained.get(position, "")[0:1] != (OK,)
            ]
            asked |= set(nodes)
        return explained

    def holders(
        self, ask: Ask, nodes: Collection[str] | None, num_asked: int | None, budget: Budget
    ) -> Steps[dict[str, int]]:
        """How many tokens of a prefix each node has, those with the most first.

        Trouble is reported, and whoever is in it left out.

        Args:
            nodes: of which nodes; None for all.
            num_asked: so many nodes at once, of those with the most, are asked what of it is usable; None for all. Of
                the others it is what the directory knows, which is not more than the best of those who were asked has.
        """
        suspects = self._suspects.names() | self._unheard.names()
        try:
            named: Mapping[str, int] = yield from self._ask_directory(
                "holders", (ask.keys.blob,), suspects, self._unheard, budget
            )
        except _NobodyToAskError:
            return {}
        claimed = {
            node_id: count
            for node_id, count in sorted(named.items(), key=lambda item: -item[1])
            if node_id not in suspects and (nodes is None or node_id in nodes)
        }
        usable: dict[str, int] = {}
        while num_asked != 0 and not (usable and budget.is_spent):
            best = max(usable.values(), default=0)
            asked = [node_id for node_id, count in claimed.items() if count > best and node_id not in usable]
            if not asked:
                break
            usable |= yield from self._usable_on(asked[:num_asked], ask, budget)
        found = {node_id: ask.keys.tokens_before(count) for node_id, count in (claimed | usable).items() if count}
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def _usable_on(self, nodes: Sequence[str], ask: Ask, budget: Budget) -> Steps[dict[str, int]]:
        """How many chunks of a prefix each of the nodes has with all layers and with KV; all are asked at once."""
        request = ExplainRequest(ask.keys.blob, ask.keys.num_tokens, ask.layers, budget.left_s, ask.keys.kv)
        fair = budget.is_fresh
        replies = yield from ask_each(nodes, "explain", (request,), budget)
        return {node_id: self._usable_by(node_id, reply, fair) for node_id, reply in replies.items()}

    def _usable_by(self, node_id: str, reply: ExplainReply | ServiceError, fair: bool) -> int:
        """As many as that node says; none, if it says nothing."""
        if not isinstance(reply, ServiceError):
            self._troubles.recovered(_node(node_id))
            return next((i for i, reason in enumerate(reply.reasons) if reason != OK), len(reply.reasons))
        if fair or not isinstance(reply, ServiceTimeoutError):
            self._unheard.add(node_id)
        self._troubles.report(reply, _node(node_id))
        return 0

    def _explained_by(self, node_id: str, ask: Ask, positions: Sequence[int], budget: Budget) -> Steps[dict[int, str]]:
        keys, kv = b"".join(ask.keys[position] for position in positions), ask.keys.kv
        request = ExplainRequest(
            keys, len(positions) * ask.keys.chunk_size, ask.layers, budget.left_s, kv.pick(positions) if kv else None
        )
        try:
            peer = yield Find(node_id, budget.left_s)
            reply: ExplainReply = yield Call(peer, "explain", (request,), budget.left_s)
        except ServiceError as error:
            self._troubles.report(error, _node(node_id))
            return dict.fromkeys(positions, UNREACHABLE)
        self._troubles.recovered(_node(node_id))
        return dict(zip(positions, reply.reasons, strict=True))

    def fetch(self, ask: Ask, found: Gathered, budget: Budget) -> Steps[Gathered]:
        """The rows that `ask` wants of what was found, up to the first that can't be had. Trouble is reported."""
        pieces, error = yield from self.fetch_pieces(found.pieces, max(budget.left_s, _LEAST_S))
        if error is not None:
            self._troubles.report(error, "rows of another node")
            return replace(found, pieces=pieces, ended_by="unreachable", lost=found.pieces[len(pieces)].ref)
        if any(piece.ref is not None for piece in found.pieces):
            self._troubles.recovered("rows of another node")
        return replace(found, pieces=pieces)

    def fetch_pieces(
        self, pieces: Sequence[Piece], timeout_s: float
    ) -> Steps[tuple[tuple[Piece, ...], ServiceError | None]]:
        """The rows of `pieces`, up to the first that can't be had, and the reason. Takes `timeout_s`, and the time that
        so many bytes may take.
        """
        budget = Budget(timeout_s + transfer_s(sum(piece.nbytes_sent for piece in pieces)))
        fetched: list[Piece] = []
        for piece in pieces:
            if not piece.nbytes_sent:
                fetched.append(piece)
                continue
            try:
                memory = yield Fetch(piece.ref, budget.left_s)
            except ServiceError as error:
                return tuple(fetched), without_frames(error)
            fetched.append(replace(piece, memory=memory, ref=None))
        return tuple(fetched), None

    def _locate(self, ask: Ask, chunk: int, without: set[str], budget: Budget) -> Steps[list[Share]]:
        """Who has chunks `chunk` and on, as far as the directory knows.

        Raises:
            _NobodyToAskError: the controller is away.
        """
        suspects = self._suspects.names()
        arguments = (ask.keys.blob[chunk * KEY_BYTES :], tuple(sorted(without | suspects)))
        segments: Sequence[Segment] = yield from self._ask_directory(
            "locate", arguments, suspects, self._suspects, budget
        )
        return [Share(node_id, chunk + first, chunk + first + count) for node_id, first, count in segments]

    def _ask_directory(
        self, method: str, args: tuple[Any, ...], suspects: Set[str], late: Suspects, budget: Budget
    ) -> Steps[Any]:
        """What the controller says. Trouble is reported; if it is late, it is added to `late`.

        Raises:
            _NobodyToAskError: it is away, or among the `suspects`.
        """
        fair = budget.is_fresh
        if DIRECTORY in suspects:
            raise _NobodyToAskError
        try:
            controller = yield Find(None, budget.left_s)
            reply = yield Call(controller, method, args, budget.left_s)
        except ServiceError as error:
            if fair and isinstance(error, ServiceTimeoutError):
                late.add(DIRECTORY)
            self._troubles.report(error, DIRECTORY)
            raise _NobodyToAskError from None
        self._troubles.recovered(DIRECTORY)
        return reply

    def _begin(self, ask: Ask, share: Share, budget: Budget) -> Steps[Sequence[Any] | ServiceError]:
        """Refs to the reply and to the rows, or why there are none."""
        keys = ask.keys.first(share.end)
        request = LeaseRequest(
            incarnation=b"",  # nothing is held for this client, so it needs no address either
            client_id=b"",
            hold_id=0,
            keys=keys.blob,
            num_tokens=keys.num_tokens,
            kv=keys.kv,
            layers=ask.layers,
            timeout_s=budget.left_s,
            first_chunk=share.first,
            start_token=ask.start,
            hinted=share.peer is None and ask.counted,
            counted=ask.counted,
        )
        try:
            peer = share.peer or (yield Find(share.node_id, budget.left_s))
            refs: Sequence[Any] = yield Begin(peer, "retrieve_rows", (request,), 2)
        except ServiceError as error:
            return without_frames(error)
        return refs


def ask_each(nodes: Iterable[str], method: str, args: tuple[Any, ...], budget: Budget) -> Steps[dict[str, Any]]:
    """What each node's hidden-state actor answers, or the `ServiceError` why it doesn't; all are asked at once."""
    begun: dict[str, Any] = {}
    for node_id in nodes:
        try:
            peer = yield Find(node_id, budget.left_s)
            begun[node_id] = yield Begin(peer, method, args, 1)
        except ServiceError as error:
            begun[node_id] = without_frames(error)
    answers: dict[str, Any] = {}
    for node_id, ref in begun.items():
        try:
            answers[node_id] = ref if isinstance(ref, ServiceError) else (yield Fetch(ref, budget.left_s))
        except ServiceError as error:
            answers[node_id] = without_frames(error)
    return answers


def _node(node_id: str) -> str:
    return f"node {node_id}"
