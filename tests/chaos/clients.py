"""The clients of a chaos run, as Ray actors: they do what their plan says, and judge all that comes back."""

import asyncio
import gc
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import hs_cache
from hs_cache.errors import ServiceError
from hs_cache.integrations.vllm_omni import HiddenStateCacheConnector
from tests.chaos.payloads import FROM_STAGE, ROUTES, Envelope, find_wrong_payload, is_scribbled, make_payload, scribble
from tests.chaos.plan import Operation, chunks, operations
from tests.chaos.rows import (
    CHUNK_SIZE,
    CLIENT_SHIFT,
    ENGINES,
    FAMILY,
    FAMILY_TOKENS,
    LAYERS,
    PRIVATE_TOKENS,
    RESUMED,
    ROW_BYTES,
    WEIGHTS,
    WEIGHTS_MODEL,
    call_ids,
    find_mixture,
    find_wrong,
    make_prompt,
    make_rows,
    private_prompt,
    revision_number,
)

STREAMS = 2
"""Streams of calls per client: threads of a blocking one, tasks of an asyncio one, over the same clients."""

SLICE_S = 0.4
_FLOOR_BYTES_PER_S = 64 << 20
_SCRIBBLE = 3.0
_MOST_REFS = _MOST_ENVELOPES = 4

_PRIVATE_PROMPTS = 1 << 14


@dataclass(frozen=True)
class Setting:
    """What a client needs to know of the run.

    Attributes:
        name: ``client-<number>``, of which no two are alike in a run.
        caches: for each engine a client per key space.
        weights: for each engine a client of the model whose weights change, of old ones perhaps.
        mid_put: a directory where there is a file for everybody who is just putting a payload.
    """

    seed: int
    name: str
    service: str
    caches: Sequence[Sequence[Any]]
    weights: Sequence[Any]
    rpc_timeout_s: float
    mid_put: str

    @property
    def number(self) -> int:
        """Of this client."""
        return int(self.name.split("-")[1])


@dataclass
class Given:
    """What others have passed on: refs of rows, and where payloads are."""

    refs: list[tuple[Operation, Any]] = field(default_factory=list)
    envelopes: list[Envelope] = field(default_factory=list)

    def part(self, number: int) -> "Given":
        """That of one of the streams."""
        return Given(self.refs[number::STREAMS], self.envelopes[number::STREAMS])


@dataclass
class Of:
    """Something that was done with a revision of the weights, and when: a client connected, or its rows were stored."""

    what: str
    revision: int
    begin: float
    end: float


@dataclass
class Doubt:
    """Something that is wrong unless one of some blows has fallen meanwhile."""

    what: str
    begin: float
    end: float
    excuses: tuple[str, ...]


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
    envelopes: list[Envelope] = field(default_factory=list)
    connected: list[Of] = field(default_factory=list)
    stored: list[Of] = field(default_factory=list)
    doubts: list[Doubt] = field(default_factory=list)


@dataclass
class _HeldPayload:
    """A payload that was got, and how to tell whether it is still what it was."""

    data: Any
    to_stage: str
    key: str
    written: bool
    until: int


class _Connecting:
    """Something that connects to the service in the background: that may take long, and fail, and meanwhile there is
    enough to do."""

    def __init__(self, connect: Callable[[], Any]) -> None:
        self._connect = connect
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._made: list[Any] = []
        self.raised: list[BaseException] = []

    def begin(self) -> None:
        """Unless it is under way, or what it came to hasn't been taken yet."""
        with self._lock:
            if self._thread is None and not self._made:
                self._thread = threading.Thread(target=self._run, daemon=True)
                self._thread.start()

    def take(self) -> Any:
        """What has been made, once; None if there is nothing."""
        with self._lock:
            return self._made.pop() if self._made else None

    def join(self) -> None:
        """Wait for what is under way."""
        thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        made = None
        try:
            made = self._connect()
        except ServiceError:
            pass  # it can be begun again
        except Exception as error:
            self.raised.append(error)
        with self._lock:
            self._made += [made] if made is not None else []
            self._thread = None


class _Connectors:
    """The connector of a process, which all of its streams use."""

    def __init__(self, setting: Setting) -> None:
        config = {"service": setting.service, "namespace": "chaos", "timeout_s": setting.rpc_timeout_s}
        self._lock = threading.Lock()
        self._connecting = _Connecting(lambda: HiddenStateCacheConnector(config))
        self._made: HiddenStateCacheConnector | None = None
        self._connecting.begin()

    def get(self) -> HiddenStateCacheConnector | None:
        """None while there is none."""
        with self._lock:
            self._made = self._made or self._connecting.take()
            if self._made is None:
                self._connecting.begin()
            return self._made

    def close(self) -> list[BaseException]:
        """Returns what making it has raised, but for trouble with the service."""
        self._connecting.join()
        with self._lock:
            self._made = self._made or self._connecting.take()
            if self._made is not None:
                self._made.close()
        return self._connecting.raised


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
    """One stream of calls to an engine's clients, one per key space, blocking ones or such for asyncio."""

    def __init__(self, setting: Setting, number: int, connectors: _Connectors, *, asynchronous: bool) -> None:
        self._name = f"{setting.name}/{number}"
        self._setting = setting
        self._operations: Iterator[Operation] = operations(setting.seed, self._name)
        self._engine = number % len(ENGINES)
        self._caches = setting.caches[self._engine]
        self._weights = setting.weights[self._engine]
        self._connecting = _Connecting(self._connected)
        self._connectors = connectors
        self._rpc_timeout_s = setting.rpc_timeout_s
        self._asynchronous = asynchronous
        first_id = (setting.number << CLIENT_SHIFT) + (number << CLIENT_SHIFT - 2)
        self._call_ids = iter(range(first_id, 1 << 32))
        first_prompt = (setting.number * STREAMS + number) * _PRIVATE_PROMPTS
        self._private = iter(range(first_prompt, first_prompt + _PRIVATE_PROMPTS))
        self._number = 0
        self._held: list[_Held] = []
        self._payloads: list[_HeldPayload] = []
        self._num_put = 0
        self._put: dict[tuple[str, str], list[int]] = {}  # numbers of the payloads that were put there
        self.report = Report(os.getpid())

    def take_report(self) -> Report:
        """What was done since the last time."""
        report, self.report = self.report, Report(os.getpid())
        return report

    async def go_on(self, seconds: float, given: Given) -> None:
        until = time.monotonic() + seconds
        for operation, ref in given.refs:
            await self._get(operation, ref)
        for envelope in given.envelopes:
            how = next(operations(self._setting.seed, f"{envelope.producer}/{envelope.number}"))
            await self._get_payload(envelope.to_stage, envelope.key, how, envelope)
        while time.monotonic() < until:
            await self._do(next(self._operations))

    async def _do(self, operation: Operation) -> None:
        self._number += 1
        if (connected := self._connecting.take()) is not None:
            await self._call(self._weights.close, limit_s=self._rpc_timeout_s)
            self._weights, of = connected
            self.report.connected.append(of)
        if operation.space == WEIGHTS:
            revision = revision_number(self._weights.key_space.model_revision)
            operation = replace(operation, revision=revision)
        await getattr(self, f"do_{operation.kind}")(operation)
        self._let_go(lambda held: held.until <= self._number)

    def _cache(self, operation: Operation) -> Any:
        return self._weights if operation.space == WEIGHTS else self._caches[operation.space]

    def _connected(self) -> tuple[Any, Of]:
        """A client of the model whose weights change: of an engine that has loaded those which are current now."""
        begin = time.monotonic()
        options = {"service": self._setting.service, "model": WEIGHTS_MODEL, "engine": ENGINES[self._engine]}
        made = asyncio.run(hs_cache.aconnect(**options)) if self._asynchronous else hs_cache.connect(**options)
        revision = revision_number(made.key_space.model_revision)
        return made, Of(self._name, revision, begin, time.monotonic())

    async def do_reconnect(self, _: Operation) -> None:
        """Until that has come to something, the client of old weights goes on."""
        self._connecting.begin()

    def finish(self) -> None:
        """Look at everything held once more, and let go of it; tell what else has been raised."""
        self._connecting.join()
        self.drop_all()
        self.report.raised += [f"{self._name}: connecting raised {error!r}" for error in self._connecting.raised]

    def drop_all(self) -> None:
        """Look at everything held once more, and let go of it."""
        self._let_go(lambda _: True)

    async def _call(
        self,
        function: Callable[..., Any],
        *args: Any,
        limit_s: float,
        cancel_s: float | None = None,
        blocks: bool = False,
        **options: Any,
    ) -> Any:
        """The result of one call; None when it was cancelled, or raised what it must not.

        Args:
            blocks: it is no coroutine, also where this stream is one for asyncio.
        """
        what = function.__name__
        self.report.counts[what] += 1
        begin = time.monotonic()
        try:
            if self._asynchronous and blocks:
                result = await asyncio.to_thread(function, *args, **options)
            else:
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
        writer = self._cache(operation).writer(f"{self._name}-{call_id}")
        preempted = False
        while (first := writer.num_tokens) < len(prompt):
            end = min(first + chance.choice((1, 7, CHUNK_SIZE, 5 * CHUNK_SIZE + 3)), len(prompt))
            rows = {
                layer: make_rows(
                    prompt[:end], layer, operation.space, call_id, first=first, revision=operation.revision
                )
                for layer in operation.layers
            }
            limit, begin = self._store_limit(operation), time.monotonic()
            result = await self._call(
                writer.append, prompt[first:end], rows, limit_s=limit, cancel_s=operation.cancel_s
            )
            for given in rows.values():
                given.fill_(_SCRIBBLE)
            if result is not None:
                self._count_stored(operation, result, begin)
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
        cache, limit = self._cache(operation), self._retrieve_limit(operation)
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
            layer: make_rows(
                prompt, layer, operation.space, call_id, first=operation.start, revision=operation.revision
            )
            for layer in operation.layers
        }
        limit, begin = self._store_limit(operation), time.monotonic()
        result = await self._call(
            self._cache(operation).store,
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
            self._count_stored(operation, result, begin)

    def _count_stored(self, operation: Operation, result: Any, begin: float) -> None:
        self.report.counts["chunks stored"] += result.stored
        self.report.counts["chunks failed"] += result.failed
        if operation.space == WEIGHTS and result.stored:
            what = f"{self._name}: {result.stored} chunks"
            self.report.stored.append(Of(what, operation.revision, begin, time.monotonic()))

    async def do_retrieve(self, operation: Operation) -> None:
        prompt = make_prompt(operation.branch, operation.num_tokens)
        wanted = operation.stop - operation.start
        dtypes = {layer: torch.float32 if operation.convert else dtype for layer, (_, dtype) in LAYERS.items()}
        out = {
            layer: torch.full((wanted, LAYERS[layer][0]), _SCRIBBLE, dtype=dtypes[layer]) for layer in operation.layers
        }
        hit = await self._call(
            self._cache(operation).retrieve,
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
            self._cache(operation).retrieve_hidden_states,
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
            self._cache(operation).retrieve_ref,
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
        cache = self._cache(operation)
        keys = cache.chunk_keys(make_prompt(operation.branch, operation.num_tokens))
        blob = keys.blob[chunks(operation.start, operation.stop)]
        await self._call(getattr(cache.kv, method), blob, limit_s=self._rpc_timeout_s, cancel_s=operation.cancel_s)

    async def do_drop_key(self, operation: Operation) -> None:
        cache = self._cache(operation)
        keys = list(cache.chunk_keys(make_prompt(operation.branch, operation.num_tokens)))
        if keys:
            await self._call(cache.drop_key, keys[-1], limit_s=self._rpc_timeout_s, cancel_s=operation.cancel_s)

    async def do_engines(self, _: Operation) -> None:
        """One engine evicts KV that both have: it is still there. Then the other does: it is gone."""
        other = self._setting.caches[1 - self._engine][0]
        cache, limit = self._caches[0], self._rpc_timeout_s
        prompt, begin = private_prompt(next(self._private)), time.monotonic()
        rows = {layer: make_rows(prompt, layer, 0, next(self._call_ids)) for layer in LAYERS}
        long = 4 * limit + PRIVATE_TOKENS * ROW_BYTES / _FLOOR_BYTES_PER_S
        for engine in (cache, other):
            if not await self._call(engine.kv.report_stored, prompt, limit_s=limit):
                return  # of a node that has none, or whose KV actor can't be reached
        await self._call(cache.store, prompt, rows, limit_s=long)
        for engine, gone in ((cache, False), (other, True)):
            if not await self._call(engine.kv.report_evicted, prompt, limit_s=limit):
                return
            hit = await self._call(cache.retrieve, prompt, list(LAYERS), limit_s=long)
            if hit is None:
                return
            self.report.counts["engines asked"] += 1
            wrong = [wrong for layer in hit if (wrong := find_wrong(hit[layer], prompt, layer, 0))]
            self.report.wrong += [f"{self._name}: {each}, of a private prompt" for each in wrong]
            end = time.monotonic()
            if gone and hit:
                # What the store noted may arrive late at a KV actor that was stopped.
                what = f"{self._name}: got {hit}, whose KV both engines have evicted"
                self.report.doubts.append(Doubt(what, begin, end, ("stop kv", "kill kv", "kill node")))
            if not gone and hit.ended_by == "kv_absent":
                what = f"{self._name}: no KV for {hit}, which one of two engines still has"
                self.report.doubts.append(Doubt(what, begin, end, ("kill kv", "kill node")))

    async def do_put(self, operation: Operation) -> None:
        connector = self._connectors.get()
        if connector is None:
            return
        to_stage, key = operation.to_stage, operation.key
        self._num_put += 1
        payload = make_payload(to_stage, key, self._name, self._num_put, operation.nbytes)
        with self._announced():
            result = await self._call(
                connector.put,
                FROM_STAGE,
                to_stage,
                key,
                payload,
                limit_s=4 * self._rpc_timeout_s + operation.nbytes / _FLOOR_BYTES_PER_S,
                blocks=True,
            )
        scribble(payload)  # from here on it is the caller's
        there, _, metadata = result or (False, 0, None)
        if not there:
            self.report.counts["puts failed"] += 1
            return
        self.report.counts["payloads put"] += 1
        replaced = self._put.setdefault((to_stage, key), [])
        if len(self.report.envelopes) < _MOST_ENVELOPES:
            envelope = Envelope(to_stage, key, metadata, self._name, self._num_put, frozenset(replaced))
            self.report.envelopes.append(envelope)
        replaced.append(self._num_put)

    async def do_get(self, operation: Operation) -> None:
        await self._get_payload(operation.to_stage, operation.key, operation)

    async def _get_payload(
        self, to_stage: str, key: str, operation: Operation, envelope: Envelope | None = None
    ) -> None:
        """Without an envelope, or by chance, by its name alone."""
        connector = self._connectors.get()
        if connector is None:
            return
        named = envelope if envelope is not None and not operation.into else None
        metadata = named.metadata if named else None
        limit = 3 * self._rpc_timeout_s + (1 << 20) / _FLOOR_BYTES_PER_S
        if operation.wait_s:
            deadline = time.monotonic() + operation.wait_s
            result = await self._call(
                connector.get_with_deadline,
                FROM_STAGE,
                to_stage,
                key,
                metadata,
                deadline=deadline,
                limit_s=limit + operation.wait_s,
                blocks=True,
            )
        else:
            result = await self._call(connector.get, FROM_STAGE, to_stage, key, metadata, limit_s=limit, blocks=True)
        if result is None:
            self.report.counts["payloads missed"] += 1
            return
        self.report.counts["payloads got"] += 1
        data, _ = result
        held = _HeldPayload(data, to_stage, key, False, self._number + operation.hold)
        if self._look_at_payload(held) and named and named.is_out_of_date(data):
            self.report.wrong.append(f"{self._name}: got payload {data['number']}, replaced before {named}")
        if operation.write:
            scribble(data)
            held.written = True
        self._payloads.append(held)

    async def do_cleanup(self, operation: Operation) -> None:
        connector = self._connectors.get()
        if connector is not None:
            limit = len(ROUTES) * self._rpc_timeout_s
            cleaned = await self._call(connector.cleanup, operation.key, limit_s=limit, blocks=True)
            self.report.counts["payloads cleaned"] += bool(cleaned)

    @contextmanager
    def _announced(self) -> Iterator[None]:
        """So that blows can fall in the middle of a put."""
        path = Path(self._setting.mid_put, f"{os.getpid()}-{threading.get_ident()}-{id(self)}")
        path.touch()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)

    async def do_look(self, _: Operation) -> None:
        self._look_at(self._held)
        for held in self._payloads:
            self._look_at_payload(held)

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

    def _let_go(self, due: Callable[[Any], bool]) -> None:
        now = [held for held in self._held if due(held)]
        self._held = [held for held in self._held if not due(held)]
        self._look_at(now)
        for held in [held for held in self._payloads if due(held)]:
            self._look_at_payload(held)
        self._payloads = [held for held in self._payloads if not due(held)]

    def _look_at(self, some: Sequence[_Held]) -> None:
        for held in some:
            self.report.counts["rows checked"] += len(held.rows)
            if held.written:
                wrong = "" if bool((held.rows == _SCRIBBLE).all()) else "the reader's own writing has changed"
            else:
                operation = held.operation
                prompt = make_prompt(operation.branch, operation.num_tokens)
                wrong = find_wrong(
                    held.rows, prompt, held.layer, operation.space, start=held.start, revision=operation.revision
                )
            if wrong:
                age = self._number + held.operation.hold - held.until
                self.report.wrong.append(f"{self._name}: {wrong}, {age} operations after they came; {held.operation}")

    def _look_at_payload(self, held: _HeldPayload) -> bool:
        self.report.counts["payloads checked"] += 1
        if held.written:
            wrong = "" if is_scribbled(held.data) else "the reader's own writing has changed"
        else:
            wrong = find_wrong_payload(held.data, held.to_stage, held.key)
        if wrong:
            self.report.wrong.append(f"{self._name}: payload: {wrong}")
        return not wrong


class _Streams:
    """All streams of a process."""

    def __init__(self, setting: Setting, *, asynchronous: bool) -> None:
        torch.set_num_threads(1)
        self._connectors = _Connectors(setting)
        self._streams = [
            _Stream(setting, number, self._connectors, asynchronous=asynchronous) for number in range(STREAMS)
        ]

    def __iter__(self) -> Iterator[_Stream]:
        return iter(self._streams)

    def take_reports(self) -> list[Report]:
        return [stream.take_report() for stream in self._streams]

    def finish(self, *, close: bool) -> list[Report]:
        for stream in self._streams:
            stream.finish()
        gc.collect()
        if close:
            raised = self._connectors.close()
            self._streams[0].report.raised += [f"making a connector raised {error!r}" for error in raised]
        return self.take_reports()


class Client:
    """A process that uses blocking clients, each from two threads."""

    def __init__(self, setting: Setting) -> None:
        self._streams = _Streams(setting, asynchronous=False)

    def pid(self) -> int:
        """This process."""
        return os.getpid()

    def work(self, given: Given) -> list[Report]:
        """Go on for a while; first get what others passed on."""
        with ThreadPoolExecutor(STREAMS) as threads:
            going = [
                threads.submit(asyncio.run, stream.go_on(SLICE_S, given.part(number)))
                for number, stream in enumerate(self._streams)
            ]
            for one in going:
                one.result()
        return self._streams.take_reports()

    def finish(self, *, close: bool) -> list[Report]:
        """Let go of everything that was got; with `close` of everything that was put, too."""
        return self._streams.finish(close=close)


class AsyncClient:
    """A process that uses clients for asyncio, each from two tasks; some calls are cancelled. See `Client`."""

    def __init__(self, setting: Setting) -> None:
        self._streams = _Streams(setting, asynchronous=True)

    async def pid(self) -> int:
        """See `Client.pid`."""
        return os.getpid()

    async def work(self, given: Given) -> list[Report]:
        """See `Client.work`."""
        going = (stream.go_on(SLICE_S, given.part(number)) for number, stream in enumerate(self._streams))
        await asyncio.gather(*going)
        return self._streams.take_reports()

    async def finish(self, *, close: bool) -> list[Report]:
        """See `Client.finish`."""
        return await asyncio.to_thread(self._streams.finish, close=close)
