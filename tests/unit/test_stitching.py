"""Steps of any size: every row given is found again, in the prompt that it belongs to and in no other."""

import gc
import hashlib
import random
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from hs_cache import stitching
from hs_cache.errors import CacheClosedError, HiddenStateCacheError, InvalidInputError
from hs_cache.keys import MMSpan
from hs_cache.results import StoreResult
from hs_cache.stitching import HeldRows, RequestRows
from tests.builders import CHUNK_SIZE, SLOT_BYTES
from tests.direct import HIDDEN_DIM, Clock, DirectCache, Node, lost_call, make_rows

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfd and /proc are Linux")

ROW_BYTES = 2 * HIDDEN_DIM


def prefix_rows(
    tokens: Sequence[int], layer: int = 0, spans: Sequence[MMSpan] = (), *, hidden_dim: int = HIDDEN_DIM
) -> torch.Tensor:
    """Rows of which each tells its whole prefix: every token and every span that begins before it, and the layer."""
    digest, rows = hashlib.sha256(str(layer).encode()), []
    for position, token in enumerate(tokens):
        digest.update(f"{token},{[span for span in spans if span[0] == position]}".encode())
        rows.append(list(digest.digest()[:hidden_dim]))
    return torch.tensor(rows, dtype=torch.float32).reshape(len(tokens), hidden_dim).to(torch.bfloat16)


class Writer:
    """A `PrefixWriter` of a `DirectCache`, which gives the right rows by itself.

    Attributes:
        tokens: the prompt so far.
    """

    def __init__(self, cache: DirectCache, layers: Sequence[int] = (0,), *, spans: Sequence[MMSpan] = ()) -> None:
        self._cache, self._layers, self._spans = cache, layers, spans
        self.request = cache.session.open_request(f"request {id(self)}", spans)
        self.tokens: list[int] = []

    def append(self, new: Sequence[int], *, rows: Mapping[int, int] | None = None) -> StoreResult:
        """`rows`: how many of each layer; all of them unless said."""
        first = len(self.tokens)
        self.tokens += new
        given = {layer: prefix_rows(self.tokens, layer, self._spans)[first:] for layer in self._layers}
        if rows is not None:
            given = {layer: given[layer][:count] for layer, count in rows.items()}
        return self._cache.run(self._cache.session.append(self.request, list(new), given))

    def preempt(self, num_tokens: int) -> None:
        del self.tokens[num_tokens:]
        self._cache.run(self._cache.session.preempt(self.request, num_tokens))

    def finish(self, save_tail: bool = False) -> StoreResult:
        return self._cache.run(self._cache.session.finish(self.request, save_tail))


def give(
    cache: DirectCache, tokens: Sequence[int], first: int, *layers: int, spans: Sequence[MMSpan] = ()
) -> StoreResult:
    """One step by the drop-in way: the whole prefix, and the rows from `first` on."""
    rows = {layer: prefix_rows(tokens, layer, spans)[first:] for layer in layers or (0,)}
    return cache.store(list(tokens), rows, token_offset=first, mm_spans=spans)


def found(cache: DirectCache, tokens: Sequence[int], *layers: int, spans: Sequence[MMSpan] = ()) -> int:
    """How many rows there are, all of which are right."""
    layers = layers or (0,)
    hit = cache.run(cache.session.retrieve(list(tokens), layers, 0, None, None, None, None, spans, 0.0))
    for layer in hit:
        assert torch.equal(hit[layer], prefix_rows(tokens, layer, spans)[: hit.num_tokens])
    return hit.num_tokens


def held(cache: DirectCache) -> int:
    return cache.session._held.nbytes


def steps(length: int, size: int) -> Iterator[tuple[int, int]]:
    return ((first, min(first + size, length)) for first in range(0, length, size))


@pytest.fixture
def node() -> Node:
    return Node(256)


@pytest.fixture
def cache(node: Node) -> DirectCache:
    return DirectCache(node)


# Case 6, and the table of step sizes


def test_a_second_call_continues_the_chunk_that_the_first_began(cache: DirectCache) -> None:  # case 6
    tokens = range(16)
    assert give(cache, tokens[:6], 0).stored == 1
    assert give(cache, tokens, 6) == StoreResult(stored=3, prefix_tokens=16)
    assert found(cache, tokens) == 16


@pytest.mark.parametrize("far", [False, True], ids=["with a pool", "without a pool"])
@pytest.mark.parametrize("way", ["store", "writer"])
@pytest.mark.parametrize("size", [1, 7, 300, 1000])
def test_steps_of_any_size_leave_every_row_retrievable(size: int, way: str, far: bool) -> None:  # case 6
    length, chunk_size = 4096, 256
    node = Node(2 * length * ROW_BYTES // SLOT_BYTES, chunk_size=chunk_size)
    cache = DirectCache(node, far=far)
    tokens = np.arange(length) * 7 % 1009
    rows = {0: prefix_rows(tokens)}
    writer = cache.session.open_request("r", ()) if way == "writer" else None
    stored = 0
    for first, end in steps(length, size):
        if writer is not None:
            step = cache.session.append(writer, tokens[first:end], {0: rows[0][first:end]})
        else:
            step = cache.session.store(tokens[:end], {0: rows[0][first:end]}, first, ())
        stored += cache.run(step).stored
    assert stored == length // chunk_size
    hit = cache.retrieve(tokens)
    assert hit.num_tokens == length
    assert torch.equal(hit[0], rows[0])
    del hit
    node.settled()


@pytest.mark.parametrize("way", ["store", "writer"])
def test_decode_goes_the_same_way(way: str, cache: DirectCache) -> None:
    tokens = list(range(50))
    writer = Writer(cache)
    for first, end in [(0, 30), *((n, n + 1) for n in range(30, 50))]:
        if way == "writer":
            writer.append(tokens[first:end])
        else:
            give(cache, tokens[:end], first)
        assert found(cache, tokens[:end]) == end - end % CHUNK_SIZE


@pytest.mark.parametrize("seed", range(20))
def test_steps_in_any_order_and_more_than_once(seed: int, cache: DirectCache) -> None:
    chance = random.Random(seed)
    tokens = [chance.randrange(50) for _ in range(chance.randrange(1, 60))]
    parts = []
    for size in (chance.randrange(1, 9), chance.randrange(1, 20)):
        parts += list(steps(len(tokens), size))
    chance.shuffle(parts)
    for first, end in parts:
        give(cache, tokens[:end], first, 0, 1)
        found(cache, tokens, 0, 1)
    assert found(cache, tokens, 0, 1) == len(tokens) - len(tokens) % CHUNK_SIZE


def test_the_tail_of_a_chunk_may_come_before_its_head(cache: DirectCache) -> None:
    tokens = range(14)
    assert give(cache, tokens, 6).stored == 1, "the third chunk is whole"
    assert found(cache, tokens) == 0
    assert give(cache, tokens[:6], 0).stored == 2, "the second one's key is that of tokens this call doesn't have"
    assert found(cache, tokens) == 12


def test_a_gap_is_held_until_it_fills(cache: DirectCache) -> None:
    tokens = range(8)
    give(cache, tokens[:1], 0)
    give(cache, tokens[:4], 3)
    assert (found(cache, tokens), held(cache)) == (0, 4 * ROW_BYTES)
    assert give(cache, tokens[:3], 1) == StoreResult(stored=1, prefix_tokens=4)
    assert found(cache, tokens) == 4


def test_rows_given_twice_are_kept_as_they_came_first(cache: DirectCache) -> None:
    tokens = list(range(4))
    give(cache, tokens[:3], 0)
    other = make_rows(tokens, variant=1)
    cache.store(tokens, {0: other[1:]}, token_offset=1)
    hit = cache.retrieve(tokens)
    assert torch.equal(hit[0], torch.cat([prefix_rows(tokens)[:3], other[3:]]))


# Prompts that share a beginning never meet behind it


def test_prompts_that_part_inside_an_open_chunk_share_what_is_before(cache: DirectCache) -> None:
    shared, left, right = [1, 2, 3, 4, 5, 6], [7, 8], [9, 8]
    give(cache, shared, 0)
    give(cache, shared, 0)
    give(cache, shared + left, 6)
    assert found(cache, shared + left) == 8
    assert give(cache, shared + right, 6) == StoreResult(stored=1, prefix_tokens=8), "also behind one that is complete"
    assert found(cache, shared + right) == 8


def test_rows_behind_a_fork_stay_with_their_own(cache: DirectCache) -> None:
    give(cache, [1, 2, 3], 2)  # row 2 of the one, without its head
    give(cache, [1, 5], 0)
    give(cache, [1, 5, 3, 4], 3)
    assert found(cache, [1, 5, 3, 4]) == 0, "row 2 is missing here, although there is one of another prompt"
    give(cache, [1, 5, 3], 2)
    assert found(cache, [1, 5, 3, 4]) == 4
    assert found(cache, [1, 2, 3, 4]) == 0


@pytest.mark.parametrize("change", ["content", "length", "start", "none"])
def test_spans_count_as_tokens_do(change: str, cache: DirectCache) -> None:
    tokens = [1, 2, 0, 0, 0, 3, 4, 5]
    spans: list[MMSpan] = [(2, 3, "a")]
    others: dict[str, list[MMSpan]] = {
        "content": [(2, 3, "b")],
        "length": [(2, 2, "a")],
        "start": [(3, 2, "a")],
        "none": [],
    }
    give(cache, tokens[:3], 0, spans=spans)
    give(cache, tokens[:4], 3, spans=others[change])
    assert found(cache, tokens, spans=spans) == found(cache, tokens, spans=others[change]) == 0
    give(cache, tokens[:4], 3, spans=spans)
    assert found(cache, tokens[:4], spans=spans) == 4
    give(cache, tokens[:4], 2, spans=others[change])
    assert found(cache, tokens[:4], spans=others[change]) == 4, "tokens before the spans are the same"


def test_a_span_may_come_to_be_known_when_its_tokens_do(cache: DirectCache) -> None:
    tokens, spans = [1, 2, 0, 0], [(2, 2, b"hash")]
    give(cache, tokens[:2], 0)
    give(cache, tokens, 2, spans=spans)
    assert found(cache, tokens, spans=spans) == 4


def test_key_spaces_never_meet(node: Node) -> None:
    tokens = range(4)
    caches = [DirectCache(node, cache_salt=salt) for salt in ("", "a")]
    give(caches[0], tokens[:2], 0)
    give(caches[1], tokens, 2)
    assert [found(cache, tokens) for cache in caches] == [0, 0]


@pytest.mark.parametrize("seed", range(30))
def test_any_schedule_of_prompts_that_branch(seed: int) -> None:
    """Every step of every prompt is given once, in a random order across prompts: then all of them are there."""
    print("seed", seed)
    chance = random.Random(seed)
    node = Node(2048)
    cache = DirectCache(node)
    prompts = [[chance.randrange(3) for _ in range(chance.randrange(1, 30))]]
    while len(prompts) < 6:
        stem = chance.choice(prompts)
        prompts.append(
            stem[: chance.randrange(len(stem) + 1)] + [chance.randrange(3) for _ in range(chance.randrange(1, 12))]
        )
    pending = [list(steps(len(prompt), chance.randrange(1, 11))) for prompt in prompts]
    if seed % 2:
        for parts in pending:
            chance.shuffle(parts)
    while any(pending):
        at = chance.choice([i for i, parts in enumerate(pending) if parts])
        first, end = pending[at].pop(0)
        give(cache, prompts[at][:end], first, 0, 1)
        probe = chance.choice(prompts)
        found(cache, probe, 0, 1)
    for prompt in prompts:
        assert found(cache, prompt, 0, 1) == len(prompt) - len(prompt) % CHUNK_SIZE
    node.settled()


# Layers


def test_layers_of_other_widths_and_dtypes_appear_together(cache: DirectCache) -> None:
    tokens = list(range(10))
    rows = {
        0: make_rows(tokens),
        3: make_rows(tokens, 3, hidden_dim=24, dtype=torch.float32),
        -1: make_rows(tokens, -1, hidden_dim=2, dtype=torch.float16),
    }
    for first, end in steps(10, 3):
        cache.store(tokens[:end], {layer: given[first:end] for layer, given in rows.items()}, token_offset=first)
        assert {cache.retrieve(tokens, layer).num_tokens for layer in rows} == {end - end % 4}
    hit = cache.retrieve(tokens, list(rows))
    assert all(torch.equal(hit[layer], rows[layer][:8]) for layer in rows)


def test_a_layer_that_lacks_rows_is_left_out_of_that_chunk_only(cache: DirectCache) -> None:
    tokens = range(12)
    give(cache, tokens[:2], 0, 0)
    assert give(cache, tokens, 2, 0, 1).stored == 3
    assert (found(cache, tokens, 0), found(cache, tokens, 1)) == (12, 0)
    give(cache, tokens[:2], 0, 1)
    assert found(cache, tokens, 0, 1) == 12


@pytest.mark.parametrize("way", ["store", "writer"])
def test_only_a_node_can_tell_which_shape_is_right(way: str, cache: DirectCache) -> None:
    tokens = list(range(12))
    rows = prefix_rows(tokens)
    writer = cache.session.open_request("r", ())

    def step(first: int, end: int, given: torch.Tensor) -> StoreResult:
        if way == "store":
            return cache.store(tokens[:end], {0: given[first:end]}, token_offset=first)
        return cache.run(cache.session.append(writer, tokens[first:end], {0: given[first:end]}))

    step(0, 2, make_rows(tokens, hidden_dim=4))
    assert step(2, 8, rows).stored == 1, "the second chunk; of the first, the later rows took the place of the others"
    with pytest.raises(InvalidInputError, match="as stored before"):
        step(8, 12, rows.float())
    if way == "writer":
        assert writer.num_tokens == 8, "as if it had never been appended"
    assert step(8, 12, rows).stored == 1
    assert held(cache) <= CHUNK_SIZE * ROW_BYTES


def test_rows_of_another_shape_leave_prompts_alone_that_only_begin_alike(cache: DirectCache) -> None:
    give(cache, [1, 2, 3], 0)
    cache.store([1, 9], {0: make_rows([1, 9], dtype=torch.float32)})
    assert give(cache, [1, 2, 3, 4], 3).stored == 1
    assert found(cache, [1, 2, 3, 4]) == 4


def test_rows_that_a_node_refuses_are_not_in_the_way_of_right_ones(cache: DirectCache) -> None:
    give(cache, range(100, 104), 0)
    tokens = list(range(4))
    wrong = make_rows(tokens, dtype=torch.float32)
    cache.store(tokens[:2], {0: wrong[:2]})
    with pytest.raises(InvalidInputError, match="as stored before"):
        cache.store(tokens, {0: wrong[2:]}, token_offset=2)
    give(cache, tokens[:2], 0)
    give(cache, tokens, 2)
    assert found(cache, tokens) == 4


# Bounds

CHUNK_BYTES = CHUNK_SIZE * ROW_BYTES


def bounded(cache: DirectCache, chunks: float) -> HeldRows:
    cache.session._held._max_bytes = int(chunks * CHUNK_BYTES)
    return cache.session._held


def consistent(cache: DirectCache) -> None:
    bound, stitcher = cache.session._held, cache.session._stitcher
    assert bound.nbytes == sum(chunk.nbytes for chunk in bound._entries) <= bound._max_bytes
    assert len(stitcher._places) == sum(map(len, stitcher._open.values()))
    assert all(chunk.is_given_up for chunk in stitcher._places.keys() - bound._entries.keys())


@pytest.mark.parametrize("way", ["store", "writer"])
def test_requests_by_turns_complete_as_many_chunks_as_there_is_room_for(way: str, caplog: Any) -> None:
    """Not none at all, as with the least used going first."""
    node = Node(512)
    cache = DirectCache(node)
    bound = bounded(cache, 8)
    writers = [Writer(cache) for _ in range(12)]
    for end in range(1, 5 * CHUNK_SIZE + 1):
        for number, writer in enumerate(writers):
            if way == "writer":
                writer.append([100 * number + end])
            else:
                writer.tokens.append(100 * number + end)
                give(cache, writer.tokens, end - 1)
            consistent(cache)
    stored = [sum(node.server.has_chunk(key) for key in cache.session.chunk_keys(w.tokens, ())) for w in writers]
    assert sum(stored) >= 5 * 6
    assert bound.dropped_total
    assert len([record for record in caplog.records if "unfinished chunks exceed" in record.getMessage()]) == 1


def test_what_nobody_uses_goes_before_what_grows(cache: DirectCache, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(stitching, "time", clock)
    bounded(cache, 2)
    for number in range(4):
        give(cache, [number, 1], 0)
    clock.advance(stitching._STALE_S + 1)
    for prompt in ([50, 1, 2, 3], [60, 1, 2, 3]):
        give(cache, prompt[:2], 0)
        give(cache, prompt, 2)
        assert found(cache, prompt) == 4
    consistent(cache)


def test_complete_chunks_go_before_all_others(cache: DirectCache) -> None:
    bounded(cache, 3)
    writer = Writer(cache)
    writer.append(range(3))
    for number in range(10, 20):
        give(cache, [number, 1], 0)
        give(cache, [number, 1, 2, 3], 2)
    writer.append(range(3, 4))
    assert found(cache, range(4)) == 4
    assert cache.session._held.dropped_total == 0
    consistent(cache)


def test_a_step_whose_own_chunks_exceed_the_bound_is_stored_all_the_same(cache: DirectCache) -> None:
    bounded(cache, 1.2)
    tokens = list(range(11))
    give(cache, tokens[:1], 0)
    assert give(cache, tokens, 1).stored == 2
    assert found(cache, tokens) == 8
    consistent(cache)


def test_writers_and_stores_share_the_bound(cache: DirectCache) -> None:
    bounded(cache, 2)
    writers = [Writer(cache) for _ in range(3)]
    for number in range(20):
        give(cache, [number, 1], 0)
        writers[number % 3].append([number])
        consistent(cache)


def test_a_writer_that_is_dropped_holds_nothing(cache: DirectCache) -> None:
    writer = Writer(cache)
    writer.append(range(3))
    assert held(cache) == 4 * ROW_BYTES or held(cache) == 3 * ROW_BYTES
    del writer
    gc.collect()
    assert held(cache) == 0


def test_steps_without_rows_leave_nothing(cache: DirectCache) -> None:
    for number in range(50):
        cache.store([number, 1], {0: prefix_rows([])}, token_offset=2)
    assert not cache.session._stitcher._places


def test_prompts_that_begin_alike_are_so_many_at_most(cache: DirectCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stitching, "_MAX_SIBLINGS", 5)
    for number in range(30):
        give(cache, [1, number], 0)
        consistent(cache)
    assert len(cache.session._stitcher._places) == 5
    give(cache, [1, 29, 2, 3], 2)
    assert found(cache, [1, 29, 2, 3]) == 4


def test_closing_lets_all_rows_go(cache: DirectCache) -> None:
    writer = Writer(cache)
    writer.append(range(3))
    give(cache, range(2), 0)
    assert held(cache)
    cache.session.close()
    assert held(cache) == 0
    with pytest.raises(CacheClosedError):
        writer.append(range(3, 5))


# PrefixWriter


@pytest.mark.parametrize("seed", range(30))
def test_any_schedule_of_appends_preemptions_and_aborts(seed: int) -> None:
    """Against a dict: what is retrievable of a request is what an undisturbed run would have left."""
    print("seed", seed)
    chance = random.Random(seed)
    node = Node(4096)
    cache = DirectCache(node)
    writers: dict[int, Writer] = {}
    stored: dict[tuple[int, ...], bool] = {}
    for number in range(120):
        request = chance.randrange(4)
        writer = writers.get(request) or writers.setdefault(request, Writer(cache, (0, 1)))
        action = chance.random()
        if action < 0.75:
            writer.append([chance.randrange(4) for _ in range(chance.choice([1, 1, 2, 3, 5, 9]))])
            for end in range(CHUNK_SIZE, len(writer.tokens) + 1, CHUNK_SIZE):
                stored[tuple(writer.tokens[:end])] = True
        elif action < 0.9:
            writer.preempt(chance.randrange(len(writer.tokens) + 3))
        elif action < 0.95:
            writer.request.close()
            del writers[request]
        else:
            writer.finish()
            del writers[request]
        if number % 10 == 9:
            probe = chance.choice(list(stored) or [()])
            assert found(cache, probe, 0, 1) == len(probe)
            assert all(
                found(cache, w.tokens, 0, 1) == len(w.tokens) - len(w.tokens) % CHUNK_SIZE for w in writers.values()
            )
    for writer in writers.values():
        writer.finish()
    assert held(cache) == 0
    node.settled()


def test_preempted_inside_a_chunk_that_was_stored(cache: DirectCache) -> None:  # case 21
    for rest in ([3, 4, 5, 6, 7, 8], [13, 4, 5, 6, 7, 8]):
        writer = Writer(cache)
        writer.append([1, 2, *range(3, 9)])
        assert found(cache, writer.tokens) == 8
        writer.preempt(2)
        writer.preempt(2)
        writer.append(rest)
        assert found(cache, writer.tokens) == 8, "as if it had never been preempted"
        assert found(cache, range(1, 9)) == 8
        writer.finish()


def test_preempted_where_layers_began_late_or_have_ended(cache: DirectCache) -> None:
    for case, expected in (
        (("late", 5), (8, 0)),
        (("ended", 6), (8, 4)),
        (("ended", 5), (8, 4)),
        (("ended", 8), (8, 8)),
    ):
        kind, at = case
        writer = Writer(cache, (0, 1), spans=[(0, 1, str(case))])
        writer.append(range(at), rows={0: at} if kind == "late" else None)
        writer.append(range(at, 8), rows={0: 8 - at} if kind == "ended" else None)
        writer.preempt(6)
        writer.append([50, 51])
        spans = [(0, 1, str(case))]
        assert tuple(found(cache, writer.tokens, layer, spans=spans) for layer in (0, 1)) == expected, case
        writer.finish()


def test_a_preemption_whose_fetch_failed_is_made_good(cache: DirectCache) -> None:
    for again in (lambda writer: writer.preempt(6), lambda writer: None):
        writer = Writer(cache)
        writer.append(range(8))
        cache.faults[0] = lost_call
        writer.preempt(6)
        again(writer)
        writer.append([9, 9])
        assert found(cache, writer.tokens) == 8
        writer.finish()


def test_preempted_twice_while_the_node_is_away(cache: DirectCache) -> None:
    writer = Writer(cache)
    writer.append(range(12))
    for num_tokens in (11, 9):
        cache.faults[0] = lost_call
        writer.preempt(num_tokens)
    writer.append([50, 51, 52])
    assert found(cache, writer.tokens) == 12


def test_a_step_that_says_where_it_begins_is_stored_only_there(cache: DirectCache) -> None:
    request = cache.session.open_request("r", ())
    rows = {0: prefix_rows(range(8))}

    def append(first: int, end: int, at: Any) -> StoreResult:
        part = {layer: given[first:end] for layer, given in rows.items()}
        return cache.run(cache.session.append(request, range(first, end), part, at))

    append(0, 6, 0)
    cache.run(cache.session.preempt(request, 0))
    with pytest.raises(InvalidInputError, match="at: got 6, expected 0, the tokens that the writer has"):
        append(6, 8, 6)  # the output of a step that was under way
    with pytest.raises(InvalidInputError, match="at: got 'x', expected an int"):
        append(0, 2, "x")
    assert append(0, 8, 0).num_chunks == 2


def test_writers_that_have_ended_leave_nothing(cache: DirectCache) -> None:
    for _ in range(50):
        Writer(cache).append(range(4))
    gc.collect()
    assert cache.session._held._gone.qsize() < 50


def test_preempted_where_the_stored_chunk_is_gone_costs_that_chunk(cache: DirectCache, node: Node) -> None:
    writer = Writer(cache)
    writer.append(range(8))
    for key in cache.session.chunk_keys(range(8), ()):
        node.server.drop_key(key)
    writer.preempt(6)
    writer.append([9, 9, 9, 9])
    assert found(cache, writer.tokens) == 0
    writer.preempt(0)
    writer.append([9, 9, 9, 9])
    assert found(cache, writer.tokens) == 4


@pytest.mark.parametrize("number", [0, 1, 2])
def test_preempting_ends_well_without_the_node(number: int, cache: DirectCache, node: Node) -> None:
    writer = Writer(cache)
    writer.append(range(8))
    cache.faults[number] = lost_call
    writer.preempt(2)
    writer.append([5] * 9)
    found(cache, writer.tokens)
    node.settled()


def test_aborted_in_the_middle_of_an_append(cache: DirectCache, node: Node) -> None:  # case 22
    for _ in range(2):
        writer = Writer(cache)
        writer.append(range(3))

        def abort_then(perform: Callable[[], Any], writer: Writer = writer) -> Any:
            writer.request.close()
            return perform()

        cache.faults[1] = abort_then
        writer.append(range(3, 7))
        writer.request.close()
        assert held(cache) == 0
        with pytest.raises(CacheClosedError, match="finished or aborted"):
            writer.append(range(7, 8))
        node.settled()


def test_a_layer_with_fewer_rows_ends_there(cache: DirectCache) -> None:  # case 23
    for count in range(9):
        writer = Writer(cache, (0, 1, 2))
        writer.append([count] * 6)
        writer.append(range(8), rows={0: 8, 1: count, 2: 8})
        writer.append(range(8, 14))
        ends = {0: 20, 1: 20 if count == 8 else (6 + count) // 4 * 4, 2: 20}
        assert {layer: found(cache, writer.tokens, layer) for layer in ends} == ends
        assert found(cache, writer.tokens, 0, 1, 2) == min(ends.values())
        writer.finish()


def test_a_layer_that_is_left_out_ends_and_one_may_start_late(cache: DirectCache) -> None:
    writer = Writer(cache, (0, 1))
    writer.append(range(4), rows={0: 4})
    writer.append(range(4, 8), rows={1: 4})
    writer.append(range(8, 12))
    keys = cache.session.chunk_keys(writer.tokens, ())
    there = {layer: [cache.node.server.has_chunk(key, layer) for key in keys] for layer in (0, 1)}
    assert there == {0: [True, False, False], 1: [False, True, True]}
    writer.preempt(4)
    writer.append(range(4, 12))
    assert found(cache, writer.tokens, 0) == 12, "a preemption takes it back to before its end"


def test_tokens_without_rows_are_only_tokens(cache: DirectCache) -> None:
    writer = Writer(cache)
    assert writer.append(range(8), rows={}) == StoreResult()
    writer.append(range(8, 12))
    assert cache.node.server.has_chunk(cache.session.chunk_keys(range(12), ())[2])
    assert writer.append([]) == StoreResult()


def test_restored_rows_may_be_given_again(cache: DirectCache) -> None:
    first = Writer(cache)
    first.append(range(14))
    first.finish()
    again = Writer(cache)
    assert again.append(range(12)) == StoreResult(present=3, prefix_tokens=12)
    again.append(range(12, 16))
    assert found(cache, again.tokens) == 16


def test_the_tail_is_saved_on_demand_where_short_chunks_are_looked_for() -> None:
    node = Node(64, save_unfull_chunk=True)
    cache = DirectCache(node)
    writer = Writer(cache)
    writer.append(range(6))
    assert found(cache, range(6)) == 4
    assert writer.finish(save_tail=True) == StoreResult(stored=1, prefix_tokens=6)
    assert writer.finish(save_tail=True) == StoreResult()
    assert (found(cache, range(6)), found(cache, range(7)), found(cache, range(5))) == (6, 4, 4)
    writer = Writer(cache)
    writer.append(range(7))
    assert writer.finish() == StoreResult()
    assert (found(cache, range(7)), held(cache)) == (4, 0)


def test_short_chunks_by_the_drop_in_way() -> None:
    cache = DirectCache(Node(64, save_unfull_chunk=True))
    for end in range(1, 10):
        assert give(cache, range(end), end - 1).stored == 1
        assert found(cache, range(end)) == end
    give(cache, range(20, 27), 6)
    give(cache, range(20, 26), 0)
    assert found(cache, range(20, 27)) == 4, (
        "row 6 came before rows 4 and 5: the short chunk of 7 was never whole in one call"
    )
    give(cache, range(20, 28), 7)
    assert found(cache, range(20, 28)) == 8


def test_short_chunks_of_layers_that_come_apart() -> None:
    cache = DirectCache(Node(64, save_unfull_chunk=True))
    tokens = list(range(8))
    give(cache, tokens, 6, 1)
    give(cache, tokens[:6], 0, 0, 1)
    assert found(cache, tokens[:6], 0) == 6
    assert found(cache, tokens, 1) == 8


def test_how_far_the_prefix_reaches_is_not_overstated(cache: DirectCache) -> None:
    tokens = list(range(8))
    give(cache, tokens[:2], 0, 0)
    assert give(cache, tokens[:4], 2, 0, 1).prefix_tokens == 0, "layer 1 has no first rows"
    assert give(cache, [90, 1, 2, 3], 0).prefix_tokens == 4


def test_only_accepted_layers_are_held() -> None:
    cache = DirectCache(Node(64, hidden_state_layers=[1]))
    assert give(cache, range(6), 3, 0).filtered == 0
    assert give(cache, range(8), 4, 0).filtered == 1
    assert held(cache) == 0
    writer = Writer(cache, (0, 1))
    writer.append(range(4))
    assert (found(cache, range(4), 0), found(cache, range(4), 1)) == (0, 4)


def test_a_node_that_is_away_counts_every_chunk_as_failed(cache: DirectCache) -> None:
    cache.node.unreachable = True
    writer = Writer(cache)
    assert writer.append(range(11)).failed == 2
    cache.node.unreachable = False
    assert writer.append(range(11, 12)).stored == 1
    assert found(cache, writer.tokens) == 0


def test_failures_of_a_step_that_is_stored_in_two_parts_are_all_counted(cache: DirectCache) -> None:
    give(cache, range(2), 0, 0)
    cache.node.unreachable = True
    assert give(cache, range(12), 2, 0, 1).failed == 3


BAD: dict[str, tuple[Callable[[DirectCache, RequestRows], Any], str]] = {
    "no id": (lambda cache, _: cache.session.open_request(7, ()), "request_id: got int, expected str"),
    "open already": (
        lambda cache, _: cache.session.open_request("r", ()),
        "request_id: got 'r', whose writer is still open",
    ),
    "spans": (lambda cache, _: cache.session.open_request("s", [(0, 0, "x")]), r"mm_spans\[0\] length: got 0"),
    "no spans": (lambda cache, _: cache.session.open_request("s", 5), r"mm_spans\[0\]: got 5"),
    "no tokens": (lambda cache, r: cache.run(cache.session.append(r, "abc", {})), "token_ids: got str"),
    "no layers": (lambda cache, r: cache.run(cache.session.append(r, [1], None)), "layers: got NoneType"),
    "too many rows": (
        lambda cache, r: cache.run(cache.session.append(r, [1, 2], {0: make_rows(range(3))})),
        r"hidden_states of layer 0: got 3 rows, expected at most 2 \(number of new tokens\)",
    ),
    "one of two": (
        lambda cache, r: cache.run(cache.session.append(r, [1], {0: make_rows(range(1)), 5: make_rows(range(2))})),
        "hidden_states of layer 5: got 2 rows, expected at most 1",
    ),
    "preempt": (lambda cache, r: cache.run(cache.session.preempt(r, -1)), "num_tokens: got -1, expected 0 or more"),
    "preempt None": (
        lambda cache, r: cache.run(cache.session.preempt(r, None)),
        "num_tokens: got None, expected an int",
    ),
    "save_tail": (lambda cache, r: cache.run(cache.session.finish(r, 1)), "save_tail: got 1, expected True or False"),
    "a tail nobody looks for": (
        lambda cache, r: cache.run(cache.session.finish(r, True)),
        "save_tail: got True, expected False where the service runs with save_unfull_chunk false",
    ),
}


@pytest.mark.parametrize("call, message", BAD.values(), ids=BAD)
def test_bad_input_is_named_and_changes_nothing(
    call: Callable[[DirectCache, RequestRows], Any], message: str, cache: DirectCache
) -> None:
    request = cache.session.open_request("r", ())
    cache.run(cache.session.append(request, [1, 2], {0: prefix_rows([1, 2])}))
    with pytest.raises(InvalidInputError, match=message):
        call(cache, request)
    cache.run(cache.session.append(request, [3, 4], {0: prefix_rows([1, 2, 3, 4])[2:]}))
    assert found(cache, [1, 2, 3, 4]) == 4


def test_an_id_is_free_again_when_its_writer_has_ended_or_is_gone(cache: DirectCache) -> None:
    cache.session.open_request("r", ()).close()
    request = cache.session.open_request("r", ())
    cache.run(cache.session.append(request, [1], {0: prefix_rows([1])}))
    del request
    gc.collect()
    cache.session.open_request("r", ())


def test_many_requests_at_once(node: Node) -> None:
    cache = DirectCache(node)
    wrong: list[BaseException] = []

    def run(number: int) -> None:
        chance = random.Random(number)
        try:
            own = DirectCache(node)
            own.session = cache.session  # one client, driven by many threads
            writer = Writer(own, (0, 1))
            for _ in range(20):
                writer.append([chance.randrange(3) for _ in range(chance.randrange(1, 7))])
                give(own, writer.tokens, max(0, len(writer.tokens) - 3), 0, 1)
                if chance.random() < 0.2:
                    writer.preempt(chance.randrange(len(writer.tokens)))
                found(own, writer.tokens, 0, 1)
            writer.finish()
        except BaseException as error:  # the main thread raises it
            wrong.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    node.settled()


def test_steps_inside_inference_mode(cache: DirectCache) -> None:
    writer = Writer(cache)
    with torch.inference_mode():
        writer.append(range(3))
        give(cache, range(10, 13), 0)
    writer.append(range(3, 6))
    give(cache, range(10, 14), 3)
    with torch.inference_mode():
        writer.append(range(6, 8))
    assert (found(cache, range(8)), found(cache, range(10, 14))) == (8, 4)


def test_the_callers_rows_may_change_at_once(cache: DirectCache) -> None:  # case 13
    rows = prefix_rows(range(4))
    cache.store([0, 1, 2], {0: (given := rows[:3].clone())})
    given.zero_()
    cache.store([0, 1, 2, 3], {0: rows[3:]}, token_offset=3)
    assert found(cache, range(4)) == 4


def test_arrays_are_steps_too(cache: DirectCache) -> None:
    rows = np.arange(32, dtype=np.float32).reshape(4, 8)
    for n in range(4):
        cache.store(np.arange(n + 1), {0: rows[n : n + 1]}, token_offset=n)
    assert np.array_equal(cache.retrieve(range(4))[0].numpy(), rows)


def test_errors_are_of_the_one_tree() -> None:
    assert issubclass(CacheClosedError, HiddenStateCacheError)
