"""Rows that other nodes have: who is asked for which chunks, what they answer, and their rows, as pieces in order."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from hs_cache.directory import Segment
from hs_cache.effects import Begin, Budget, Call, Fetch, Find, Peer, Steps, transfer_s
from hs_cache.errors import ServiceError, ServiceTimeoutError
from hs_cache.keys import KEY_BYTES
from hs_cache.messages import LeaseReply, LeaseRequest
from hs_cache.retrieval import Ask, Piece
from hs_cache.rows import flat_runs
from hs_cache.troubles import Suspects, Troubles, without_frames

_LEAST_S = 0.5
"""Rows of a call that has been answered may take this long, whatever is left of the operation's time."""

_CONTROLLER = "the directory"


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
    """

    pieces: tuple[Piece, ...] = ()
    ended_by: str = "hidden_state"
    alone: bool = False
    short: str = ""
    error: ServiceError | None = None


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
                before = Piece(reply.specs, first_token, reply.num_tokens, runs, ref=rows_ref)
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

    def fetch(self, ask: Ask, found: Gathered, budget: Budget) -> Steps[Gathered]:
        """The rows that `ask` wants of what was found, up to the first that can't be had. Trouble is reported."""
        pieces, error = yield from self.fetch_pieces(found.pieces, max(budget.left_s, _LEAST_S))
        if error is not None:
            self._troubles.report(error, "rows of another node")
            return replace(found, pieces=pieces, ended_by="unreachable")
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
        suspects, fair = self._suspects.names(), budget.is_fresh
        if _CONTROLLER in suspects:
            raise _NobodyToAskError
        arguments = (ask.keys.blob[chunk * KEY_BYTES :], tuple(sorted(without | suspects)))
        try:
            controller = yield Find(None, budget.left_s)
            segments: Sequence[Segment] = yield Call(controller, "locate", arguments, budget.left_s)
        except ServiceError as error:
            if fair and isinstance(error, ServiceTimeoutError):
                self._suspects.add(_CONTROLLER)
            self._troubles.report(error, _CONTROLLER)
            raise _NobodyToAskError from None
        self._troubles.recovered(_CONTROLLER)
        return [Share(node_id, chunk + first, chunk + first + count) for node_id, first, count in segments]

    def _begin(self, ask: Ask, share: Share, budget: Budget) -> Steps[Sequence[Any] | ServiceError]:
        """Refs to the reply and to the rows, or why there are none."""
        request = LeaseRequest(
            incarnation=b"",  # nothing is held for this client, so it needs no address either
            client_id=b"",
            hold_id=0,
            keys=ask.keys.blob[: share.end * KEY_BYTES],
            num_tokens=ask.keys.tokens_before(share.end),
            layers=ask.layers,
            timeout_s=budget.left_s,
            first_chunk=share.first,
            start_token=ask.start,
            hinted=share.peer is None,
        )
        try:
            peer = share.peer or (yield Find(share.node_id, budget.left_s))
            refs: Sequence[Any] = yield Begin(peer, "retrieve_rows", (request,), 2)
        except ServiceError as error:
            return without_frames(error)
        return refs


def _node(node_id: str) -> str:
    return f"node {node_id}"
