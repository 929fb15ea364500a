"""The clients of a chaos run, as Ray actors: they do what their plan says, and judge all that comes back."""

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from tests.chaos.plan import Operation, chunks, operations
from tests.chaos.rows import (
    CHUNK_SIZE,
    CLIENT_SHIFT,
    FAMILY,
    FAMILY_TOKENS,
    LAYERS,
    RESUMED,
    ROW_BYTES,
    call_ids,
    find_mixture,
    find_wrong,
    make_prompt,
    make_rows,
)

STREAMS = 2
"""Streams of calls per client: threads of a blocking one, tasks of an asyncio one, over the same clients."""

SLICE_S = 0.4
_FLOOR_BYTES_PER_S = 64 << 20
_SCRIBBLE = 3.0
_MOST_REFS = 4


@dataclass
class Late:
    """A call that took longer than its limit; begin and end on this machine's monotonic clock."""

    what: str
    begin: float
    end: float
    limit_s: float
    pid: int


@dataclass
class Report:
    """What a client did since the last one."""

    pid: int
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    raised: list[str] = field(default_factory=list)
    late: list[Late] = field(default_factory=list)
    slowest: tuple[float, str] = (0.0, "")
    refs: list[tuple[Operation, Any]] = field(default_factory=list)


@dataclass
class _Held:
    """Rows that came back, and how to tell whether they are still what they were."""

    rows: torch.Tensor
    layer: int
    operation: Operation
    start: int
    written: bool
    until: int


class _Stream:
    """One stream of calls to `caches`, a client per key space, blocking ones or such for asyncio."""

    def __init__(
        self, seed: int, name: str, number: int, caches: Sequence[Any], rpc_timeout_s: float, *, asynchronous: bool
    ) -> None:
        self._name = f"{name}/{number}"
        self._operations: Iterator[Operation] = operations(seed, self._name)
        self._caches = caches
        self._rpc_timeout_s = rpc_timeout_s
        self._asynchronous = asynchronous
        first_id = (int(name.split("-")[1]) << CLIENT_SHIFT) + (number << CLIENT_SHIFT - 2)
        self._call_ids = iter(range(first_id, 1 << 32))
        self._number = 0
        self._held: list[_Held] = []
        self.report = Report(os.getpid())

    def take_report(self) -> Report:
        """What was done since the last time."""
        report, self.report = self.report, Report(os.getpid())
        return report

    async def go_on(self, seconds: float, refs: Sequence[tuple[Operation, Any]]) -> None:
        until = time.monotonic() + seconds
        for operation, ref in refs:
            await self._get(operation, ref)
        while time.monotonic() < until:
            operation = next(self._operations)
            self._number += 1
            await getattr(self, f"do_{operation.kind}")(operation)
            self._let_go(lambda held: held.until <= self._number)

    def drop_all(self) -> None:
        """Look at everything held once more, and let go of it."""
        self._let_go(lambda _: True)

    async def _call(
        self, function: Callable[..., Any], *args: Any, limit_s: float, cancel_s: float | None = None, **options: Any
    ) -> Any:
        """The result of one call; None when it was cancelled, or raised what it must not."""
        what = function.__name__
        self.report.counts[what] += 1
        begin = time.monotonic()
        try:
            result = function(*args, **options)
            if self._asynchronous:
                result = await asyncio.wait_for(result, cancel_s)
        # The contract: trouble is a miss. Whatever comes out but for a cancellation goes to whoever reads the report.
        except Exception as error:
            was_cancelled = self._asynchronous and cancel_s is not None and type(error) is asyncio.TimeoutError
            if was_cancelled:
                self.report.counts["cancelled"] += 1
                return None
            self.report.raised.append(f"{self._name}: {what} raised {type(error).__name__}: {error}")
            return None
        finally:
            end = time.monotonic()
            self.report.slowest = max(self.report.slowest, (end - begin, what))
            if end - begin > limit_s:
                self.report.late.append(Late(f"{self._name}: {what}", begin, end, limit_s, os.getpid()))
        return result

    def _retrieve_limit(self, operation: Operation) -> float:
        return self._rpc_timeout_s + operation.wait_s + operation.num_tokens * ROW_BYTES / _FLOOR_BYTES_PER_S

    def _store_limit(self, operation: Operation) -> float:
        # Chunks that earlier calls have completed in some layers only are stored apart from the others.
        return 4 * self._rpc_timeout_s + operation.num_tokens * ROW_BYTES / _FLOOR_BYTES_PER_S

    async def do_write(self, operation: Operation) -> None:
        """A request in steps of any size, which is preempted once, perhaps, and then finished or given up."""
        prompt = make_prompt(operation.branch, operation.num_tokens)
        call_id = next(self._call_ids)
        chance = random.Random(call_id)
        writer = self._caches[operation.space].writer(f"{self._name}-{call_id}")
        preempted = False
        while (first := writer.num_tokens) < len(prompt):
            end = min(first + chance.choice((1, 7, CHUNK_SIZE, 5 * CHUNK_SIZE + 3)), len(prompt))
            rows = {
                layer: make_rows(prompt[:end], layer, operation.space, call_id, first=first)
                for layer in operation.layers
            }
            limit = self._store_limit(operation)
            result = await self._call(
                writer.append, prompt[first:end], rows, limit_s=limit, cancel_s=operation.cancel_s
            )
            for given in rows.values():
                given.fill_(_SCRIBBLE)
            if result is not None:
                self.report.counts["chunks stored"] += result.stored
            elif writer.num_tokens == first:
                break  # cancelled before it began, or refused
            if not preempted and operation.start < writer.num_tokens // 2:
                preempted = True
                limit = self._retrieve_limit(operation)
                await self._call(writer.preempt, operation.start, limit_s=limit, cancel_s=operation.cancel_s)
                if writer.num_tokens <= FAMILY_TOKENS:  # it goes on with other tokens
                    family = operation.branch // FAMILY * FAMILY
                    prompt = make_prompt(chance.randrange(family, family + FAMILY), operation.num_tokens)
                call_id = next(self._call_ids) | RESUMED
        await self._call(writer.abort if operation.write else writer.finish, limit_s=self._rpc_timeout_s)

    async def do_plan(self, operation: Operation) -> None:
        """What is planned is held, while it is retrieved."""
        asked = make_prompt(operation.branch, operation.num_tokens), operation.layers
        cache, limit = self._caches[operation.space], self._retrieve_limit(operation)
        coverage = await self._call(
            cache.plan, *asked, hold=operation.hold > 0, limit_s=limit, cancel_s=operation.cancel_s
        )
        if coverage is not None:
            hit = await self._call(cache.retrieve, *asked, limit_s=limit)
            self.report.counts["plans kept"] += hit is not None and hit.num_tokens >= coverage.num_tokens
            if hit is not None:
                self._take(operation, hit.layers, 0)
            coverage.release()

    async def do_store(self, operation: Operation) -> None:
        prompt = make_prompt(operation.branch, operation.num_tokens)
        call_id = next(self._call_ids)
        rows = {
            layer: make_rows(prompt, layer, operation.space, call_id, first=operation.start)
            for layer in operation.layers
        }
        limit = self._store_limit(operation)
        result = await self._call(
            self._caches[operation.space].store,
            prompt,
            rows,
            token_offset=operation.start,
            limit_s=limit,
            cancel_s=operation.cancel_s,
        )
        # From here on they are the caller's, also if the call was cancelled: what is stored must be a copy.
        for given in rows.values():
            given.fill_(_SCRIBBLE)
        if result is not None:
            self.report.counts["chunks stored"] += result.stored
            self.report.counts["chunks failed"] += result.failed

    async def do_retrieve(self, operation: Operation) -> None:
        prompt = make_prompt(operation.branch, operation.num_tokens)
        wanted = operation.stop - operation.start
        dtypes = {layer: torch.float32 if operation.convert else dtype for layer, (_, dtype) in LAYERS.items()}
        out = {
            layer: torch.full((wanted, LAYERS[layer][0]), _SCRIBBLE, dtype=dtypes[layer]) for layer in operation.layers
        }
        hit = await self._call(
            self._caches[operation.space].retrieve,
            prompt,
            operation.layers,
            start=operation.start,
            stop=operation.stop,
            dtype=torch.float32 if operation.convert else None,
            out=out if operation.into else None,
            wait_s=operation.wait_s,
            limit_s=self._retrieve_limit(operation),
            cancel_s=operation.cancel_s,
        )
        if hit is not None:
            self._judge(operation, hit)

    async def do_retrieve_hidden_states(self, operation: Operation) -> None:
        layer = operation.layers[0]
        rows = await self._call(
            self._caches[operation.space].retrieve_hidden_states,
            make_prompt(operation.branch, operation.num_tokens),
            layer_idx=layer,
            limit_s=self._retrieve_limit(operation),
            cancel_s=operation.cancel_s,
        )
        if rows is not None:
            self._take(operation, {layer: rows}, 0)

    async def do_retrieve_ref(self, operation: Operation) -> None:
        prompt = make_prompt(operation.branch, operation.num_tokens)
        ref = await self._call(
            self._caches[operation.space].retrieve_ref,
            prompt,
            operation.layers,
            limit_s=self._retrieve_limit(operation),
            cancel_s=operation.cancel_s,
        )
        if ref is not None and len(self.report.refs) < _MOST_REFS:
            self.report.refs.append((operation, ref))

    async def _get(self, operation: Operation, ref: Any) -> None:
        whole = self._retrieve_limit(operation)
        # If what is behind the ref is lost, it is looked for by its keys, in as much time again.
        hit = await self._call(ref.aget if self._asynchronous else ref.get, limit_s=2 * whole)
        if hit is not None:
            self.report.counts["refs hit" if hit else "refs missed"] += 1
            self._take(operation, hit.layers, 0)

    async def do_report_evicted(self, operation: Operation) -> None:
        await self._tell("report_evicted", operation)

    async def do_report_stored(self, operation: Operation) -> None:
        await self._tell("report_stored", operation)

    async def _tell(self, method: str, operation: Operation) -> None:
        cache = self._caches[operation.space]
        keys = cache.chunk_keys(make_prompt(operation.branch, operation.num_tokens))
        blob = keys.blob[chunks(operation.start, operation.stop)]
        await self._call(getattr(cache.kv, method), blob, limit_s=self._rpc_timeout_s, cancel_s=operation.cancel_s)

    async def do_drop_key(self, operation: Operation) -> None:
        cache = self._caches[operation.space]
        keys = list(cache.chunk_keys(make_prompt(operation.branch, operation.num_tokens)))
        if keys:
            await self._call(cache.drop_key, keys[-1], limit_s=self._rpc_timeout_s, cancel_s=operation.cancel_s)

    async def do_look(self, _: Operation) -> None:
        self._look_at(self._held)

    def _judge(self, operation: Operation, hit: Any) -> None:
        expected = min(hit.num_tokens, operation.stop) - operation.start
        if not hit:
            self.report.counts["misses"] += 1
            self.report.counts[f"ended by {hit.ended_by or 'nothing'}"] += 1
            return
        self.report.counts["hits"] += 1
        self.report.counts["whole hits"] += hit.num_tokens == operation.stop
        if any(len(rows) != expected for rows in hit.layers.values()) or set(hit.layers) != set(operation.layers):
            self.report.wrong.append(f"{self._name}: {expected} rows promised, got {hit}")
        self._take(operation, hit.layers, operation.start)

    def _take(self, operation: Operation, layers: Any, start: int) -> None:
        """Judge rows, perhaps write into them, perhaps hold them."""
        if operation.space == 0:
            ids = [call_ids(rows) for rows in layers.values()]
            if ids and (mixture := find_mixture(ids)):
                self.report.wrong.append(f"{self._name}: {mixture}: {[np.unique(i).tolist() for i in ids]}")
        for layer, rows in layers.items():
            held = _Held(rows, layer, operation, start, False, self._number + operation.hold)
            self._look_at([held])
            if operation.write:
                rows.fill_(_SCRIBBLE)
                held.written = True
            if operation.hold:
                self._held.append(held)

    def _let_go(self, due: Callable[[_Held], bool]) -> None:
        now = [held for held in self._held if due(held)]
        self._held = [held for held in self._held if not due(held)]
        self._look_at(now)

    def _look_at(self, some: Sequence[_Held]) -> None:
        for held in some:
            self.report.counts["rows checked"] += len(held.rows)
            if held.written:
                wrong = "" if bool((held.rows == _SCRIBBLE).all()) else "the reader's own writing has changed"
            else:
                prompt = make_prompt(held.operation.branch, held.operation.num_tokens)
                wrong = find_wrong(held.rows, prompt, held.layer, held.operation.space, start=held.start)
            if wrong:
                age = self._number + held.operation.hold - held.until
                self.report.wrong.append(f"{self._name}: {wrong}, {age} operations after they came; {held.operation}")


class Client:
    """A process that uses blocking clients, each from two threads.

    Args:
        name: ``client-<number>``, of which no two are alike in a run.
        caches: a client per key space.
    """

    def __init__(self, seed: int, name: str, caches: Sequence[Any], rpc_timeout_s: float) -> None:
        torch.set_num_threads(1)
        self._streams = [
            _Stream(seed, name, number, caches, rpc_timeout_s, asynchronous=False) for number in range(STREAMS)
        ]

    def pid(self) -> int:
        """This process."""
        return os.getpid()

    def work(self, refs: Sequence[tuple[Operation, Any]]) -> list[Report]:
        """Go on for a while; first get the rows behind what others passed on."""
        with ThreadPoolExecutor(STREAMS) as threads:
            going = [
                threads.submit(asyncio.run, stream.go_on(SLICE_S, refs[number::STREAMS]))
                for number, stream in enumerate(self._streams)
            ]
            for one in going:
                one.result()
        return [stream.take_report() for stream in self._streams]

    def finish(self) -> list[Report]:
        """Let go of everything."""
        for stream in self._streams:
            stream.drop_all()
        return [stream.take_report() for stream in self._streams]


class AsyncClient:
    """A process that uses clients for asyncio, each from two tasks; some calls are cancelled. See `Client`."""

    def __init__(self, seed: int, name: str, caches: Sequence[Any], rpc_timeout_s: float) -> None:
        torch.set_num_threads(1)
        self._streams = [
            _Stream(seed, name, number, caches, rpc_timeout_s, asynchronous=True) for number in range(STREAMS)
        ]

    async def pid(self) -> int:
        """See `Client.pid`."""
        return os.getpid()

    async def work(self, refs: Sequence[tuple[Operation, Any]]) -> list[Report]:
        """See `Client.work`."""
        going = (stream.go_on(SLICE_S, refs[number::STREAMS]) for number, stream in enumerate(self._streams))
        await asyncio.gather(*going)
        return [stream.take_report() for stream in self._streams]

    async def finish(self) -> list[Report]:
        """See `Client.finish`."""
        for stream in self._streams:
            stream.drop_all()
        return [stream.take_report() for stream in self._streams]
