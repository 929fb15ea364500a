"""One client's operations, as steps: all that the blocking and the asyncio client have in common. No Ray in here."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch

from hs_cache.attachment import Link
from hs_cache.config import CacheConfig
from hs_cache.devices import NO_DEVICES, Cut, Moment
from hs_cache.effects import Budget, Steps, Work, after, transfer_s
from hs_cache.errors import InvalidInputError
from hs_cache.keys import MMSpan, normalise_token_ids
from hs_cache.messages import CommitReply, ModelRevision, NodeStatistics, ReserveRequest, Run
from hs_cache.planning import Step, check_index, check_layer_rows, check_spans, check_store
from hs_cache.reading import Reader
from hs_cache.results import CacheStatistics, StoreResult
from hs_cache.retrieval import Ask
from hs_cache.rows import Flat
from hs_cache.shared_pool import PoolMapping
from hs_cache.stitching import HeldRows, Lost, RequestRows, Stitcher, StorePlan

_INLINE_BYTES = 1 << 20
"""Copying less takes less time than handing it to a thread, which is where the asyncio client does it."""


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


class Session(Reader):
    """One client: all that it reads, and all that it stores. Thread-safe.

    See `hs_cache.connection.Connection` for the arguments.
    """

    def __init__(self, space: Mapping[str, Any], *, strict: bool, engine: str = "") -> None:
        super().__init__(space, strict=strict, engine=engine)
        self._held = HeldRows()
        self._stitcher = Stitcher(self._held)
        self._requests: WeakValueDictionary[str, RequestRows] = WeakValueDictionary()

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

    def close(self) -> None:
        """No more operations. Rows handed out stay valid, and their leases end as ever."""
        if os.getpid() != self._process.pid:
            return  # the child has no use for it anyway, and may have inherited a locked lock
        self._attachment.close()
        self._held.clear()

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

    def _store_chunks(self, plan: StorePlan, moment: Moment) -> Steps[CommitReply | None]:
        budget = self._budget()
        nothing: CommitReply | None = None
        return (yield from self._attempt(lambda link: self._store_on(link, plan, moment, budget), nothing, budget))

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
        if link.mapping is None:
            return (yield from self._send(link, request, rows, moment, budget))
        give_up = partial(self._process.releaser.end, link.incarnation, (request.hold_id,))
        copying: Work | None = None
        try:
            reply = yield from link.control.reserve(request, budget.left_s)
            if reply.runs:
                copying = Work(partial(_copy_in, rows, link.mapping, reply.runs, moment))
                yield copying
            budget.restart()
            done = yield from link.control.commit(request, budget.left_s)
        except BaseException:
            after(copying, give_up)
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
            done = yield from link.control.store_rows(request, flat[0], deadline_s)
        except BaseException:
            # It may still be carried out, and must not replace then what was stored in the meantime.
            release = partial(
                link.located.peer.post, "release", link.incarnation, request.client_id, (request.hold_id,)
            )
            self._process.releaser.post(release, (link.incarnation, request.hold_id))
            raise
        return done


def _copy_in(rows: Writable, mapping: PoolMapping, runs: Sequence[Run], moment: Moment) -> None:
    if not moment:  # page-locking fills the page tables as well
        mapping.populate_once()
    moment.pin(mapping.pin_once)
    rows.copy_into(mapping.write_view(), runs, moment, mapping.copy_pieces)


def _flat(rows: Writable, moment: Moment) -> Flat:
    with moment.reading():
        return rows.flat()
