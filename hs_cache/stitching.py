"""From steps of any size to whole chunks: rows of a chunk are held here until all of them have come.

A prefill computes a prompt in steps that care nothing for chunks. What a step gives of a chunk that isn't complete yet
is copied into an `OpenChunk`; the chunk is stored once its last row has come, in whatever order. Rows belong to all
tokens before them, so they are only ever joined where every token and every multimodal span up to there is the same.
"""

import logging
import threading
import time
import weakref
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from queue import SimpleQueue
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from hs_cache.devices import NO_DEVICES, Cut, Moment
from hs_cache.errors import CacheClosedError
from hs_cache.keys import ChunkKeys, MMSpan, TokenDatabase
from hs_cache.messages import LayerSpec, Run
from hs_cache.planning import Step, Tokens
from hs_cache.rows import Flat, copy_in, flatten, spec_of, view_rows

logger = logging.getLogger(__name__)

MAX_HELD_BYTES = 1 << 30
"""Most bytes of rows that one client holds for chunks that aren't complete."""

_MAX_COMPLETE_BYTES = 64 << 20
_STALE_S = 60.0
_MAX_SIBLINGS = 128
_MAX_DEAD = 1024


@dataclass(frozen=True, slots=True)
class Source:
    """Rows of some layers, from token `first` on."""

    first: int
    rows: dict[int, torch.Tensor]


@dataclass(frozen=True, slots=True)
class StorePlan:
    """Chunks ``first_chunk ..`` of `keys`, complete in every layer of `specs`; `sources` have their rows, in order.

    `aside`: this is a chunk of another prompt than the step's.
    """

    keys: ChunkKeys
    first_chunk: int
    specs: tuple[LayerSpec, ...]
    sources: tuple[Source, ...]
    aside: bool = False

    @property
    def num_chunks(self) -> int:
        """Chunks that are stored."""
        return len(self.keys) - self.first_chunk

    @property
    def first_token(self) -> int:
        """The first token of the first chunk."""
        return self.first_chunk * self.keys.chunk_size

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return sum(spec.row_bytes for spec in self.specs) * (self.keys.num_tokens - self.first_token)

    def copy_into(
        self, memory: memoryview, runs: Sequence[Run], moment: Moment = NO_DEVICES, cut: Cut | None = None
    ) -> None:
        """Write the rows to where they were given room, as `hs_cache.rows.copy_in` does it. Blocks until the last byte
        is written."""
        for source in self.sources:
            copy_in(memory, runs, self.specs, source.rows, source.first, moment, cut)

    def flat(self) -> Flat:
        """All rows, as `hs_cache.rows.flatten` lays them out."""
        layers = (spec.layer_idx for spec in self.specs)
        parts = ([source.rows[layer] for source in self.sources] for layer in layers)
        return flatten(part[0] if len(part) == 1 else torch.cat([rows.cpu() for rows in part]) for part in parts)


class _LayerRows:
    """Rows of one layer of a chunk, as they come. What is there is never overwritten."""

    def __init__(self, spec: LayerSpec, chunk_size: int) -> None:
        self.spec = spec
        self._chunk_size = chunk_size
        self._memory: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
        self._filled: list[tuple[int, int]] = []

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes

    def put(self, first: int, rows: torch.Tensor) -> None:
        """Take rows ``first ..`` of the chunk, but for those that are there."""
        end = first + len(rows)
        self._make_room(end)
        for begin, stop in list(self._gaps(first, end)):
            self.view(begin, stop).copy_(rows[begin - first : stop - first])
        self._mark(first, end)

    def has(self, end: int) -> bool:
        """Whether rows 0 .. `end` are all there."""
        return bool(self._filled) and self._filled[0][0] == 0 and self._filled[0][1] >= end

    def view(self, begin: int, end: int) -> torch.Tensor:
        return view_rows(self._memory, begin * self.spec.row_bytes, end - begin, self.spec)

    def head(self, end: int) -> Iterator[tuple[int, torch.Tensor]]:
        """What is there of rows 0 .. `end`: where it starts, and the rows."""
        for begin, stop in self._filled:
            if begin < end:
                yield begin, self.view(begin, min(stop, end))

    def _make_room(self, end: int) -> None:
        if end * self.spec.row_bytes > self._memory.nbytes:
            capacity = min(self._chunk_size, max(end, 2 * self._memory.nbytes // self.spec.row_bytes))
            grown = np.empty(capacity * self.spec.row_bytes, np.uint8)
            grown[: self._memory.nbytes] = self._memory
            self._memory = grown

    def _gaps(self, first: int, end: int) -> Iterator[tuple[int, int]]:
        for begin, stop in self._filled:
            if first < begin:
                yield first, min(begin, end)
            first = max(first, stop)
            if first >= end:
                return
        if first < end:
            yield first, end

    def _mark(self, first: int, end: int) -> None:
        at = bisect_left(self._filled, (first, end))
        spans = [*self._filled[:at], (first, end), *self._filled[at:]]
        merged = [spans[0]]
        for begin, stop in spans[1:]:
            if begin <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
            else:
                merged.append((begin, stop))
        self._filled = merged


class OpenChunk:
    """What is known of a chunk whose rows have not all come: its tokens, and rows by layer.

    Args:
        size: tokens of a whole chunk.

    Attributes:
        tokens: the chunk's tokens as far as they are known, ``[size]`` at most.
        spans: the multimodal spans that overlap the chunk, as far as they are known.
    """

    def __init__(self, size: int) -> None:
        self.tokens: Tokens = np.empty(0, np.int64)
        self.spans: frozenset[MMSpan] = frozenset()
        self._size = size
        self._layers: dict[int, _LayerRows] = {}
        self._given_up = False

    @property
    def is_given_up(self) -> bool:
        """Whether it takes no rows any more."""
        return self._given_up

    @property
    def is_complete(self) -> bool:
        """Whether every layer that has rows has all of them."""
        return bool(self._layers) and all(rows.has(self._size) for rows in self._layers.values())

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return sum(rows.nbytes for rows in self._layers.values())

    def learn(self, tokens: Tokens, spans: frozenset[MMSpan]) -> None:
        """Take more tokens, of which those known already are the first."""
        if len(tokens) > len(self.tokens):
            self.tokens, self.spans = tokens.copy(), spans

    def common(self, tokens: Tokens, spans: frozenset[MMSpan], first: int) -> int:
        """How far this chunk, which starts at token `first` of its prompt, goes the same way as another one."""
        known = min(len(tokens), len(self.tokens))
        differing = np.flatnonzero(tokens[:known] != self.tokens[:known])
        common = int(differing[0]) if len(differing) else known
        return min([common, *(max(start - first, 0) for start, _, _ in spans ^ self.spans)])

    def put(self, first: int, layers: Mapping[int, torch.Tensor], *, anew: bool = True) -> None:
        """Copy rows ``first ..`` of the chunk, but for those that are there.

        Args:
            anew: rows of another hidden_dim or dtype than those of the layer that are there take the place of these:
                only a node can tell which are right. Otherwise they are left out.
        """
        if self._given_up:
            return
        for layer, rows in layers.items():
            if not len(rows):
                continue
            spec, held = spec_of(layer, rows), self._layers.get(layer)
            if held is None or (held.spec != spec and anew):
                held = self._layers[layer] = _LayerRows(spec, self._size)
            if held.spec == spec:
                held.put(first, rows)

    def complete(self, end: int) -> dict[int, torch.Tensor]:
        """Rows 0 .. `end` of the layers that have them all."""
        return {layer: rows.view(0, end) for layer, rows in self._layers.items() if rows.has(end)}

    def fork(self, end: int) -> "OpenChunk":
        """A chunk of its own that has what is here before row `end`."""
        other = OpenChunk(self._size)
        other.tokens, other.spans = self.tokens[:end], self.spans
        other.take(self, end)
        return other

    def take(self, other: "OpenChunk", end: int) -> None:
        """Copy what another one has of rows 0 .. `end`, but for those that are here."""
        for layer, rows in other._layers.items():
            for first, part in rows.head(end):
                self.put(first, {layer: part}, anew=False)

    def drop(self, specs: Iterable[LayerSpec]) -> None:
        """Let the rows of some layers go, where they are as the specs say."""
        for spec in specs:
            if spec.layer_idx in self._layers and self._layers[spec.layer_idx].spec == spec:
                del self._layers[spec.layer_idx]

    def clear(self) -> None:
        """Let all rows go."""
        self._layers.clear()

    def give_up(self) -> None:
        """Let all rows go, and take no more: the chunk could not become complete."""
        self.clear()
        self._given_up = True


class HeldRows:
    """Bounds what all open chunks of a client hold together. Thread-safe.

    When there is too much, complete chunks go first, then those that nobody has used for a minute. If that isn't
    enough, the chunk that has just grown is given up: giving up others that are growing too would complete none.

    Args:
        max_bytes: the bound.

    Attributes:
        lock: to be held by whoever uses an open chunk.
        dropped_total: chunks that lost rows before they were complete.
    """

    def __init__(self, max_bytes: int = MAX_HELD_BYTES) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[OpenChunk, _Entry] = OrderedDict()  # the least used first
        self._gone: SimpleQueue[list[OpenChunk]] = SimpleQueue()  # put to by finalizers, at any moment
        self._total = self._complete = 0
        self.lock = threading.RLock()
        self.dropped_total = 0

    @property
    def nbytes(self) -> int:
        """Bytes held now."""
        with self.lock:
            self._forget_gone()
            return self._total

    def watch(self, owner: object, chunk: list[OpenChunk]) -> None:
        """Let the one chunk in a list go when its owner is collected."""
        with self.lock:
            self._forget_gone()
        weakref.finalize(owner, self._gone.put, chunk).atexit = False

    def use(self, chunk: OpenChunk, lost: Callable[[OpenChunk], None] | None = None) -> None:
        """Count a chunk, with its present size, as the latest used. It may lose its rows for that, or others theirs.

        Args:
            lost: called, with the lock held, when this one does.
        """
        self._forget_gone()
        self.forget(chunk)
        now = time.monotonic()
        self._entries[chunk] = _Entry(chunk.nbytes, chunk.is_complete, now, lost)
        self._total += chunk.nbytes
        self._complete += chunk.nbytes if chunk.is_complete else 0
        while self._complete > _MAX_COMPLETE_BYTES or (self._complete and self._total > self._max_bytes):
            self._give_up(next(one for one, entry in self._entries.items() if entry.is_complete))
        while self._total > self._max_bytes:
            coldest, entry = next(iter(self._entries.items()))
            self._give_up(coldest if now - entry.used_at > _STALE_S else chunk)

    def forget(self, chunk: OpenChunk) -> None:
        """Count a chunk no longer."""
        entry = self._entries.pop(chunk, None)
        if entry is not None:
            self._total -= entry.nbytes
            self._complete -= entry.nbytes if entry.is_complete else 0

    def clear(self) -> None:
        """Let all rows go."""
        with self.lock:
            for chunk in list(self._entries):
                self.forget(chunk)
                chunk.clear()

    def _forget_gone(self) -> None:
        while not self._gone.empty():
            self.forget(self._gone.get()[0])

    def _give_up(self, chunk: OpenChunk) -> None:
        entry = self._entries[chunk]
        self.forget(chunk)
        if entry.is_complete:
            chunk.clear()
        else:
            chunk.give_up()
        if entry.lost is not None:
            entry.lost(chunk)
        if not entry.is_complete:
            if not self.dropped_total:
                logger.warning(
                    "hs_cache: rows of unfinished chunks exceed %d MiB in this client: some are given up",
                    self._max_bytes >> 20,
                )
            self.dropped_total += 1


@dataclass(frozen=True, slots=True)
class _Entry:
    nbytes: int
    is_complete: bool
    used_at: float
    lost: Callable[[OpenChunk], None] | None


class Stitcher:
    """Holds rows of callers who name no request: each of their calls gives the whole prefix up to its last row.

    Open chunks are siblings when the chunk before them and their first token are the same. A step's rows go to every
    sibling as far as it goes the same way, and one that begins gets what its siblings have of that. Complete chunks
    stay for a while, since another prompt may yet branch off inside of them. Thread-safe.

    Args:
        held: the bound.
    """

    def __init__(self, held: HeldRows) -> None:
        self._held = held
        self._open: dict[_Place, list[OpenChunk]] = {}
        self._places: dict[OpenChunk, _Place] = {}
        self._dead: deque[OpenChunk] = deque()

    def plan(self, database: TokenDatabase, step: Step) -> list[StorePlan]:
        """What a step completes, in order, and then what it completes of other prompts; what it doesn't is held.

        Raises:
            InvalidInputError: the spans are wrong; nothing was changed.
        """
        size = database.space.chunk_size
        keys = database.chunk_keys(step.tokens, mm_spans=step.mm_spans)
        edges: dict[int, OpenChunk] = {}
        others: list[StorePlan] = []
        used: list[tuple[OpenChunk, _Place]] = []
        with self._held.lock:
            for position in step.edges(size):
                first, rows = step.rows_of(position, size)
                if not any(map(len, rows.values())):
                    continue
                tokens, spans = step.of_chunk(position, size)
                place = _parent(database, keys, position), int(tokens[0])
                common = self._siblings(place, tokens, spans, position * size)
                own = edges[position] = self._take(tokens, spans, size, common, first, rows)
                used.append((own, place))
                for chunk in common.keys() - {own}:
                    before = chunk.complete(size)
                    length = max(common[chunk] - first, 0)
                    chunk.put(first, {layer: given[:length] for layer, given in rows.items()}, anew=False)
                    used.append((chunk, place))
                    new = {layer: given for layer, given in chunk.complete(size).items() if layer not in before}
                    if new:
                        others.append(replace(_plan_alone(database, keys, position, chunk, new), aside=True))
            plans, more = cut(database, step, keys, edges)
            # Only now: what is given up may be what the step has completed, whose rows the plans have.
            for chunk, place in used:
                if chunk in edges.values():
                    self._enter(chunk, place)
                if chunk in self._places and not chunk.is_given_up:
                    self._held.use(chunk, self._lost)
            return [*plans, *more, *others]

    def refused(self, database: TokenDatabase, plan: StorePlan) -> None:
        """Let the rows go that a node has refused."""
        with self._held.lock:
            for position in range(plan.first_chunk, len(plan.keys)):
                parent = _parent(database, plan.keys, position)
                for place in [place for place in self._open if place[0] == parent]:
                    for chunk in list(self._open[place]):
                        if chunk not in self._places:  # lost meanwhile, to the bound
                            continue
                        chunk.drop(plan.specs)
                        self._held.forget(chunk)
                        if chunk.nbytes:
                            self._held.use(chunk, self._lost)
                        else:
                            self._lose(chunk)

    def _siblings(self, place: "_Place", tokens: Tokens, spans: frozenset[MMSpan], first: int) -> dict[OpenChunk, int]:
        """The open chunks that begin as the step's does, which starts at token `first`, and how far they go the same
        way."""
        common = {chunk: chunk.common(tokens, spans, first) for chunk in self._open.get(place, ())}
        return {chunk: length for chunk, length in common.items() if length}

    def _take(
        self,
        tokens: Tokens,
        spans: frozenset[MMSpan],
        size: int,
        common: Mapping[OpenChunk, int],
        first: int,
        rows: Mapping[int, torch.Tensor],
    ) -> OpenChunk:
        """The open chunk that goes the step's way, with the step's rows in it; a new one if there is none."""
        same = [chunk for chunk, length in common.items() if length == min(len(tokens), len(chunk.tokens))]
        own = max(same, key=lambda chunk: common[chunk]) if same else OpenChunk(size)
        if own.is_given_up and not first:  # the prompt is computed anew
            self._lose(own)
            own = OpenChunk(size)
        own.learn(tokens, spans)
        own.put(first, rows)
        for chunk, length in common.items():
            if chunk is not own:
                own.take(chunk, length)
        return own

    def _enter(self, chunk: OpenChunk, place: "_Place") -> None:
        if chunk in self._places:
            return
        siblings = self._open.setdefault(place, [])
        self._places[chunk] = place
        siblings.append(chunk)
        if len(siblings) > _MAX_SIBLINGS:
            oldest = next((one for one in siblings if one.is_complete or one.is_given_up), siblings[0])
            self._held.forget(oldest)
            self._lose(oldest)

    def _lost(self, chunk: OpenChunk) -> None:
        if not chunk.is_given_up:
            self._lose(chunk)
            return
        # It stays without rows, so that what follows its own isn't held as the begin of another one.
        self._dead.append(chunk)
        while len(self._dead) > _MAX_DEAD:
            oldest = self._dead.popleft()
            if oldest in self._places:
                self._lose(oldest)

    def _lose(self, chunk: OpenChunk) -> None:
        place = self._places.pop(chunk)
        self._open[place].remove(chunk)
        if not self._open[place]:
            del self._open[place]


_Place: TypeAlias = tuple[bytes, int]
"""The key of the chunk before, and a chunk's first token."""


class RequestRows:
    """One request's prompt as it grows, and the rows of its open chunk. Thread-safe.

    Args:
        database: for the keys.
        mm_spans: of the whole prompt.
        held: the bound.
    """

    def __init__(self, database: TokenDatabase, mm_spans: Sequence[MMSpan], held: HeldRows) -> None:
        self._database = database.with_short_chunks(False)
        self._size = database.space.chunk_size
        self._spans = tuple(mm_spans)
        self._held = held
        self._tokens: Tokens = np.empty(0, np.int64)
        self._num_tokens = 0
        self._keys = database.chunk_keys((), mm_spans=self._spans)  # of the whole chunks; refuses bad spans
        self._open = [OpenChunk(self._size)]  # the one open chunk
        held.watch(self, self._open)
        self._starts: dict[int, int] = {}  # by layer: the token of its first row
        self._ends: dict[int, int] = {}  # by layer: the token behind its last row
        self._lost: Lost | None = None
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether there will be no more rows."""
        return self._closed

    @property
    def _chunk(self) -> OpenChunk:
        return self._open[0]

    @property
    def num_tokens(self) -> int:
        """Tokens so far."""
        return self._num_tokens

    @property
    def tokens(self) -> Tokens:
        """The prompt so far; not to be written to."""
        return self._tokens[: self._num_tokens]

    def append(self, tokens: Tokens, rows: Mapping[int, torch.Tensor]) -> list[StorePlan]:
        """Continue the prompt. `rows` are those of the first of `tokens`; a layer with fewer of them than tokens ends
        there. Returns what has become complete, in order.

        Raises:
            CacheClosedError: it was closed.
        """
        with self._held.lock:
            if self._closed:
                raise CacheClosedError("this writer has been finished or aborted; cache.writer() gives a new one")
            first = self._num_tokens
            # What follows a gap could never be served.
            rows = {layer: given for layer, given in rows.items() if self._ends.get(layer, first) == first}
            self._grow(tokens)
            self._lost = None
            for layer, given in rows.items():
                self._starts.setdefault(layer, first)
                self._ends[layer] = first + len(given)
            step = Step(self.tokens, first, rows, self._spans)
            edges = {}
            for position in step.edges(self._size):
                if position > first // self._size:
                    self._replace(OpenChunk(self._size))
                self._chunk.learn(*step.of_chunk(position, self._size))
                self._chunk.put(*step.rows_of(position, self._size))
                edges[position] = self._chunk
            plans, _ = cut(self._database, step, self._keys, edges)
            if not self._num_tokens % self._size:
                self._replace(OpenChunk(self._size))
            elif self._chunk.nbytes:
                self._held.use(self._chunk)
            return plans

    def tail(self) -> list[StorePlan]:
        """The open chunk as a short one, in the layers that have all of its rows."""
        with self._held.lock:
            end = self._num_tokens % self._size
            rows = self._chunk.complete(end) if end else {}
            if not rows:
                return []
            short = self._database.with_short_chunks(True)
            return [_plan_alone(short, self._keys, len(self._keys), self._chunk, rows)]

    def preempt(self, num_tokens: int) -> "Lost | None":
        """Keep only that many tokens. Returns the rows that the open chunk needs for that and that were stored already;
        `restore` takes them. Again the same, as long as it hasn't, and nothing was appended."""
        with self._held.lock:
            if self._closed or num_tokens >= self._num_tokens:
                return self._lost
            position, end = divmod(num_tokens, self._size)
            first, end_of_chunk = position * self._size, (position + 1) * self._size
            keys, was_stored, pending = self._keys, position < len(self._keys), self._lost
            self._keys = keys.first(position)
            stored = tuple(
                layer for layer, stop in self._ends.items() if self._starts[layer] <= first and stop >= end_of_chunk
            )
            for layer, stop in list(self._ends.items()):
                # What has ended inside of a chunk that was cut off has no rows in it any more.
                self._ends[layer] = min(stop, first if was_stored and layer not in stored else num_tokens)
                if self._starts[layer] >= num_tokens:
                    del self._starts[layer], self._ends[layer]
            chunk = OpenChunk(self._size) if was_stored else self._chunk.fork(end)
            self._num_tokens, self._lost = num_tokens, None
            self._replace(chunk)
            if end:
                chunk.learn(*Step(self.tokens, num_tokens, {}, self._spans).of_chunk(position, self._size))
            if end and was_stored and stored:
                self._lost = Lost(chunk, keys.first(position + 1), stored, first, num_tokens)
            elif end and pending is not None and pending.start == first:  # it could not be had the last time
                self._lost = replace(pending, chunk=chunk, stop=num_tokens)
            elif chunk.nbytes:
                self._held.use(chunk)
            return self._lost

    @property
    def lost(self) -> "Lost | None":
        """What `preempt` returned last and `restore` has not taken."""
        return self._lost

    def restore(self, lost: "Lost", rows: Mapping[int, torch.Tensor]) -> None:
        """Take back the rows of what `preempt` returned, as far as they were found."""
        with self._held.lock:
            if lost is self._lost:
                self._lost = None
                lost.chunk.put(0, rows, anew=False)
                if lost.chunk.nbytes:
                    self._held.use(lost.chunk)

    def close(self) -> None:
        """Let the open chunk go; idempotent."""
        with self._held.lock:
            self._closed = True
            self._replace(OpenChunk(self._size))

    def _replace(self, chunk: OpenChunk) -> None:
        self._held.forget(self._chunk)
        self._open[0] = chunk

    def _grow(self, tokens: Tokens) -> None:
        end = self._num_tokens + len(tokens)
        if end > len(self._tokens):
            grown = np.empty(max(end, 2 * len(self._tokens)), np.int64)
            grown[: self._num_tokens] = self.tokens
            self._tokens = grown
        self._tokens[self._num_tokens : end] = tokens
        self._num_tokens = end
        new = self.tokens[self._keys.num_tokens :]
        if len(new) >= self._size:
            self._keys = self._database.extend_keys(self._keys, new, mm_spans=self._spans)


@dataclass(frozen=True, slots=True)
class Lost:
    """Rows ``start .. stop`` of `layers` in the last chunk of `keys`, which an open chunk needs again."""

    chunk: OpenChunk
    keys: ChunkKeys
    layers: tuple[int, ...]
    start: int
    stop: int


def cut(
    database: TokenDatabase, step: Step, keys: ChunkKeys, edges: Mapping[int, OpenChunk]
) -> tuple[list[StorePlan], list[StorePlan]]:
    """What is complete now of the chunks that a step touches; and the last of them, where it is as a whole although the
    step's tokens, with which it is stored too, end inside of it.

    Neighbours that are complete in the same layers are stored together.

    Args:
        keys: of the step's tokens.
        edges: by position, the chunks of which the step has only a part; that part is in there already.
    """
    size, num_tokens = database.space.chunk_size, len(step.tokens)
    done: list[_Done] = []
    more: list[StorePlan] = []
    for position in range(step.first // size, -(-num_tokens // size)):
        first, end, chunk = position * size, (position + 1) * size, edges.get(position)
        if chunk is None:
            begin = first - step.first
            own = {layer: rows[begin : begin + size] for layer, rows in step.rows.items()}
            done.append(_Done(position, end, {layer: rows for layer, rows in own.items() if len(rows) == size}, True))
            continue
        rows = _only(step, chunk.complete(size))
        if end > num_tokens:
            if rows:  # its tail came before its head
                more.append(_plan_alone(database, keys, position, chunk, rows))
            short = _only(step, chunk.complete(num_tokens - first)) if database.save_unfull_chunk else {}
            rows, end = {layer: given for layer, given in short.items() if layer not in rows}, num_tokens
        done.append(_Done(position, end, rows, False))
    groups = groupby(done, lambda one: tuple(one.rows))
    return [_plan(list(group), step, keys) for layers, group in groups if layers], more


def _only(step: Step, rows: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    return {layer: rows[layer] for layer in step.rows if layer in rows}


def _parent(database: TokenDatabase, keys: ChunkKeys, position: int) -> bytes:
    return keys[position - 1] if position else database.space.fingerprint


def _keys_to(database: TokenDatabase, keys: ChunkKeys, position: int, chunk: OpenChunk) -> ChunkKeys:
    """The keys up to an open chunk at that position, of which all tokens are known."""
    return database.extend_keys(keys.first(position), chunk.tokens, mm_spans=chunk.spans)


def _plan_alone(
    database: TokenDatabase, keys: ChunkKeys, position: int, chunk: OpenChunk, rows: dict[int, torch.Tensor]
) -> StorePlan:
    specs = tuple(spec_of(layer, given) for layer, given in rows.items())
    source = Source(position * keys.chunk_size, rows)
    return StorePlan(_keys_to(database, keys, position, chunk), position, specs, (source,))


@dataclass(frozen=True, slots=True)
class _Done:
    """A chunk, and the layers in which it is complete. `own`: the rows are a part of the step's."""

    position: int
    end: int
    rows: dict[int, torch.Tensor]
    own: bool


def _plan(group: Sequence[_Done], step: Step, keys: ChunkKeys) -> StorePlan:
    size, first = keys.chunk_size, group[0]
    sources = [Source(one.position * size, one.rows) for one in group if not one.own]
    if own := [one for one in group if one.own]:  # all of them in one piece
        begin, stop = own[0].position * size, own[-1].end
        rows = {layer: step.rows[layer][begin - step.first : stop - step.first] for layer in first.rows}
        sources.append(Source(begin, rows))
    return StorePlan(
        keys.first(group[-1].position + 1),
        first.position,
        tuple(spec_of(layer, rows) for layer, rows in first.rows.items()),
        tuple(sorted(sources, key=lambda source: source.first)),
    )
