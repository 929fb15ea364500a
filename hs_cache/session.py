"""One client's operations, as steps: all that the blocking and the asyncio client have in common. No Ray in here."""

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch

from hs_cache.attachment import Attachment, Link
from hs_cache.config import CacheConfig
from hs_cache.effects import Budget, Call, Pause, Steps, Work, transfer_s
from hs_cache.errors import (
    CacheClosedError,
    ConfigMismatchError,
    InvalidInputError,
    ServiceError,
    ServiceNotRunningError,
    StaleIncarnationError,
)
from hs_cache.gathering import Gathered, Gatherer, Share
from hs_cache.keys import ChunkKeys, KeySpace, MMSpan, TokenDatabase
from hs_cache.leases import this_process
from hs_cache.messages import (
    CommitReply,
    LeaseReply,
    LeaseRequest,
    NodeStatistics,
    ReserveRequest,
)
from hs_cache.planning import StorePlan, check_keys, check_seconds, plan_store
from hs_cache.results import CacheStatistics, PrefixHit, StoreResult
from hs_cache.retrieval import Ask, Copies, Piece, check_ask, make_hit, map_rows, view_arrived
from hs_cache.rows import Flat, copy_in, flatten
from hs_cache.troubles import Reported, Suspects, Troubles

logger = logging.getLogger(__name__)

T = TypeVar("T")

_ATTACH_TIMEOUT_S = 60.0
"""A service that is being started has names before it can answer."""

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


class Session:
    """The state of one client: settings, attachment, counters; and its operations. Thread-safe.

    Args:
        space: the fields of `KeySpace` except ``chunk_size``.
        strict: raise `ServiceError` instead of turning it into a miss or a failed store.
    """

    def __init__(self, space: Mapping[str, str], *, strict: bool) -> None:
        if not isinstance(strict, bool):
            raise InvalidInputError(f"strict: got {strict!r}, expected True or False")
        self._space_fields = dict(space)
        self._key_space(1)  # refuses wrong fields before anything else happens
        self._strict = strict
        self._config: CacheConfig | None = None
        self._database: TokenDatabase | None = None
        suspects = Suspects()
        self._attachment = Attachment(suspects)
        self._lock = threading.Lock()
        self._process = this_process()
        self._troubles = Troubles(strict=strict)
        self._gatherer = Gatherer(self._troubles, suspects)
        self._counts = dict.fromkeys(_COUNTERS, 0)

    @classmethod
    def of(cls, config: CacheConfig) -> "Session":
        """A session that knows the settings, and no key space: good for `resolve`."""
        session = cls({}, strict=False)
        session._take_config(config)
        return session

    def __getstate__(self) -> dict[str, Any]:
        return {
            "space": self._space_fields,
            "strict": self._strict,
            "config": self._config,
            "closed": self._attachment.closed,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        Session.__init__(self, state["space"], strict=state["strict"])
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

    def attach(self) -> Steps[None]:
        """Reach the service, whatever `strict` is.

        Raises:
            ServiceError: it can't be reached.
        """
        yield from self._connected(Budget(_ATTACH_TIMEOUT_S))

    def store(
        self, token_ids: Any, layers: Mapping[int, Any], token_offset: Any, mm_spans: Sequence[MMSpan]
    ) -> Steps[StoreResult]:
        """See `hs_cache.HiddenStateCache.store`."""
        self._check_usable()
        accepted = self.config.hidden_state_layers
        plan = plan_store(self._keys(), accepted, token_ids, layers, token_offset, mm_spans)
        if not plan.num_chunks:
            return StoreResult()
        if not plan.specs:
            return StoreResult(filtered=plan.filtered)
        budget = self._budget()
        done = yield from self._attempt(lambda link: self._store_on(link, plan, budget), None, budget)
        if done is None:
            self._count(failed_chunks_total=plan.num_chunks)
            return StoreResult(failed=plan.num_chunks)
        self._count(stored_chunks_total=done.stored, failed_chunks_total=done.failed)
        return StoreResult(done.stored, done.present, 0, done.failed, done.prefix_tokens)

    def retrieve(
        self,
        token_ids: Any,
        layers: Any,
        start: Any,
        stop: Any,
        dtype: Any,
        out: Mapping[int, torch.Tensor] | None,
        mm_spans: Sequence[MMSpan],
        wait_s: Any,
    ) -> Steps[PrefixHit]:
        """See `hs_cache.HiddenStateCache.retrieve`."""
        self._check_usable()
        keys = self.chunk_keys(token_ids, mm_spans)
        ask = check_ask(keys, len(token_ids), layers, start, stop, dtype, out)
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
        return ask, list(found.pieces)

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
                try:
                    yield Call(link.located.kv, method, (blob,), budget.left_s)
                except ServiceError as failure:
                    error = failure
            else:  # what is computed here is no concern of the node that serves this client
                error = ServiceNotRunningError("there is no KV actor on this client's node")
            if error is not None:
                self._troubles.report(error, "the KV actor")
            else:
                self._troubles.recovered("the KV actor")
            return error is None

        return self._attempt(told, False, budget)

    def stats(self) -> Steps[CacheStatistics]:
        """See `hs_cache.HiddenStateCache.stats`."""
        nothing: NodeStatistics | None = None
        node = yield from self.call("stats", otherwise=nothing)
        troubles = self._troubles
        with self._lock:
            return CacheStatistics(
                **self._counts,
                timeouts_total=troubles.timeouts_total,
                unreachable_total=troubles.unreachable_total,
                node=node,
            )

    def _budget(self, timeout_s: float | None = None) -> Budget:
        return Budget(self.config.rpc_timeout_s if timeout_s is None else timeout_s)

    def _attempt(self, body: Callable[[Link], Steps[T]], otherwise: T, budget: Budget) -> Steps[T]:
        """Run `body` on the attachment; once more on a new one if the node's actor was restarted in between."""
        self._check_usable()
        try:
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
                except ServiceError as error:
                    if link is not None:
                        self._attachment.fail(link, error)
                    self._troubles.report(error, "the cache")
                    break
                else:
                    self._troubles.recovered("the cache")
                    return result
        except Reported as reported:
            raise reported.error from None
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
        space = self._key_space(config.chunk_size)
        self._database = TokenDatabase(space, save_unfull_chunk=config.save_unfull_chunk)

    def _key_space(self, chunk_size: int) -> KeySpace:
        fields: dict[str, Any] = self._space_fields
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

    # On one attachment. Whatever ends these early gives up what was held: the client chose the id before the call, so
    # that also holds where the answer never came.

    def _store_on(self, link: Link, plan: StorePlan, budget: Budget) -> Steps[CommitReply]:
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
        )
        peer = link.located.peer
        if link.mapping is None:
            flat: list[Flat] = []
            yield Work(lambda: flat.append(flatten(plan.rows.values())))
            budget.restart()
            deadline_s = budget.left_s + transfer_s(plan.nbytes)
            far: CommitReply = yield Call(peer, "store_rows", (request, flat[0]), deadline_s, carries_rows=True)
            return far
        give_up = partial(self._process.releaser.end, link.incarnation, (request.hold_id,))
        copying: Work | None = None
        try:
            reply = yield from self._with_releases(link, "reserve", request, budget)
            if reply.runs:
                memory = link.mapping.write_view()
                copying = Work(partial(copy_in, memory, reply.runs, plan.specs, plan.rows, plan.first_token))
                yield copying
            budget.restart()
            done: CommitReply = yield Call(
                peer, "commit", (link.incarnation, request.client_id, request.hold_id), budget.left_s
            )
        except BaseException:
            _after(copying, give_up)
            raise
        return done

    def _retrieve_on(self, link: Link, ask: Ask, budget: Budget) -> Steps[PrefixHit]:
        if link.mapping is None:
            found = yield from self._find_on(link, ask, budget)
            return (yield from self._fetched(ask, found, budget))
        request = LeaseRequest(
            incarnation=link.incarnation,
            client_id=self._process.client_id,
            hold_id=self._process.next_id(),
            keys=ask.keys.blob,
            num_tokens=ask.keys.num_tokens,
            layers=ask.layers,
            timeout_s=budget.left_s,
        )
        give_up = partial(self._process.releaser.end, link.incarnation, (request.hold_id,))
        copying: Work | None = None
        try:
            reply: LeaseReply = yield from self._with_releases(link, "lease", request, budget)
            own = Piece(reply.specs, 0, reply.num_tokens, reply.runs, link.mapping.write_view())
            pieces = (own,) if reply.num_tokens else ()
            found = Gathered(pieces, reply.ended_by, reply.alone, link.located.peer.node_id)
            if found.ended_by and not found.alone:
                found = yield from self._gatherer.find(ask, found, budget)
                found = yield from self._gatherer.fetch(ask, found, budget)
            if not reply.num_tokens:
                return (yield from self._copied(ask, found, own=True))
            whole = len(found.pieces) == 1 and not reply.must_copy
            shared = map_rows(link.mapping, reply, ask) if whole else {}
            copied = Copies(ask, reply.specs, found.pieces[-1].end, without=shared)
            if copied.targets:
                copying = Work(partial(copied.run, found.pieces))
                yield copying
            if shared:
                self._process.releaser.watch(link.incarnation, request.hold_id, [m for m, _ in shared.values()])
        except BaseException:
            _after(copying, give_up)
            raise
        if not shared:
            give_up()
        self._count(zero_copy_total=len(shared), copied_total=len(copied.targets))
        rows = {layer: rows for layer, (_, rows) in shared.items()} | copied.targets
        return make_hit(ask, found.pieces[-1].end, found.ended_by, rows)

    def _find_on(self, link: Link, ask: Ask, budget: Budget) -> Steps[Gathered]:
        """Pieces from the node that serves this client, then from others; their rows are not fetched yet."""
        peer = link.located.peer
        found = yield from self._gatherer.ask(ask, [Share(peer.node_id, 0, len(ask.keys), peer)], budget)
        if found.error is not None:
            raise found.error
        if found.ended_by and not found.alone:
            found = yield from self._gatherer.find(ask, found, budget)
        return found

    def _fetched(self, ask: Ask, found: Gathered, budget: Budget) -> Steps[PrefixHit]:
        found = yield from self._gatherer.fetch(ask, found, budget)
        return (yield from self._copied(ask, found, own=True))

    def _copied(self, ask: Ask, found: Gathered, own: bool = False) -> Steps[PrefixHit]:
        """The result of pieces none of which is leased. `own`: nobody else has the refs of their rows."""
        if not found.pieces:
            return PrefixHit(start=ask.start, ended_by=found.ended_by)
        shared = view_arrived(found.pieces[0], ask) if own and len(found.pieces) == 1 else {}
        copied = Copies(ask, found.pieces[0].specs, found.pieces[-1].end, without=shared)
        if copied.targets:
            yield Work(partial(copied.run, found.pieces))
        self._count(zero_copy_total=len(shared), copied_total=len(copied.targets))
        return make_hit(ask, found.pieces[-1].end, found.ended_by, shared | copied.targets)

    def _with_releases(self, link: Link, method: str, request: Any, budget: Budget) -> Steps[Any]:
        """A call that also carries what has ended, so that memory is free again before more is asked for."""
        releases: tuple[int, ...] = ()
        try:
            releases = self._process.releaser.take(link.incarnation)
            reply = yield Call(link.located.peer, method, (replace(request, releases=releases),), budget.left_s)
        except BaseException:
            self._process.releaser.end(link.incarnation, releases)
            raise
        return reply


def _after(work: Work | None, then: Callable[[], None]) -> None:
    """Call `then` when `work`, if it was begun at all, surely touches nothing any more."""
    if work is None:
        then()
    else:
        work.abandon(then)
