"""Chunks whose rows lie in several pieces of the pool: whoever reads them gets what was stored, byte for byte.

The pool is full of small chunks, every second of which is held: what is larger fits only if its rows are cut.
"""

import sys
from collections.abc import Mapping, Sequence

import pytest
import torch

from hs_cache.results import PrefixHit
from tests.builders import SLOT_BYTES
from tests.direct import Controller, DirectCache, Node

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfd and /proc are Linux")

CHUNK_SIZE = 64
SMALL_DIM, NUM_SMALL = 2048, 24
SMALL_BYTES = CHUNK_SIZE * SMALL_DIM * 2
TOKENS = list(range(1000, 1000 + 2 * CHUNK_SIZE + 40))
DIMS = {0: (3000, torch.bfloat16), 7: (2048, torch.float32)}
"""Both take more for a chunk than the small ones do; of the first, four rows together are a multiple of 64 bytes."""


def make_random_rows(num_tokens: int, dim: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(num_tokens, dim, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rows_of(layers: Sequence[int] = (0, 7)) -> dict[int, torch.Tensor]:
    return {layer: make_random_rows(len(TOKENS), *DIMS[layer], seed=layer) for layer in layers}


def crowded(controller: Controller | None = None) -> tuple[Node, list[PrefixHit]]:
    """A node full of small chunks, and results that hold every second of them."""
    node = Node(
        NUM_SMALL * SMALL_BYTES // SLOT_BYTES,
        controller=controller,
        chunk_size=CHUNK_SIZE,
        save_unfull_chunk=True,
    )
    client = DirectCache(node, model="small")
    prompts = [range(number * CHUNK_SIZE, (number + 1) * CHUNK_SIZE) for number in range(NUM_SMALL)]
    for number, prompt in enumerate(prompts):
        rows = make_random_rows(CHUNK_SIZE, SMALL_DIM, torch.bfloat16, seed=100 + number)
        assert client.store(prompt, {0: rows}).stored == 1
    return node, [client.retrieve(prompt) for prompt in prompts[::2]]


def most_pieces(node: Node) -> int:
    """In how many extents the rows of a chunk lie, at most."""
    chunks = node.server.store._table._chunks.values()
    return max(len(extents) for chunk in chunks for _, extents in chunk.layers.values())


def check_small(held: Sequence[PrefixHit]) -> None:
    for number, hit in enumerate(held):
        expected = make_random_rows(CHUNK_SIZE, SMALL_DIM, torch.bfloat16, seed=100 + 2 * number)
        assert torch.equal(hit[0], expected), "a result changed while its chunk was held"


def check_retrieves(client: DirectCache, rows: Mapping[int, torch.Tensor]) -> None:
    """All of it, parts that begin and end within pieces, other dtypes, the caller's buffers."""
    count, layers = len(TOKENS), tuple(rows)
    for start, stop in [(0, count), (1, count - 1), (61, 130), (130, count)]:
        hit = client.retrieve(TOKENS, layers, start=start, stop=stop)
        assert hit.num_tokens == stop
        for layer in layers:
            assert torch.equal(hit[layer], rows[layer][start:stop])
        hit = client.retrieve(TOKENS, layers[::-1], start=start, stop=stop, dtype=torch.float32)
        out = {layer: torch.full((stop - start + 1, DIMS[layer][0]), 7.0, dtype=torch.float64) for layer in layers}
        client.retrieve(TOKENS, layers, start=start, stop=stop, out=out)
        for layer in layers:
            assert torch.equal(hit[layer], rows[layer][start:stop].float())
            assert torch.equal(out[layer][:-1], rows[layer][start:stop].double())
            assert (out[layer][-1] == 7.0).all(), "written beyond the rows"


@pytest.mark.parametrize("layers", [(0,), (7, 0)])
@pytest.mark.parametrize("written_from", ["here", "elsewhere", "by handle"])
def test_whoever_reads_cut_rows_gets_what_was_stored(written_from: str, layers: tuple[int, ...]) -> None:
    node, held = crowded()
    rows = rows_of(layers)
    if written_from == "by handle":
        for layer in layers:
            stored = node.server.store_hidden_states(TOKENS, rows[layer], layer_idx=layer, model="large")
            assert stored == 3
    else:
        writer = DirectCache(node, far=written_from == "elsewhere", model="large")
        assert writer.store(TOKENS, rows).stored == 3
    node.server.store.check()
    assert most_pieces(node) > 1, "nothing was cut"
    check_retrieves(DirectCache(node, model="large"), rows)
    check_retrieves(DirectCache(node, far=True, model="large"), rows)
    for layer in layers:
        back = node.server.retrieve_hidden_states(TOKENS, layer_idx=layer, model="large")
        assert back is not None
        assert torch.equal(back, rows[layer].float())
    check_small(held)
    held.clear()
    node.settled()


def test_a_shorter_prompt_ends_at_a_chunk_and_the_short_last_one_is_found_by_its_own_length() -> None:
    node, held = crowded()
    rows = rows_of()
    client = DirectCache(node, model="large")
    client.store(TOKENS, rows)
    for asked, found in [(len(TOKENS), len(TOKENS)), (len(TOKENS) - 1, 2 * CHUNK_SIZE), (CHUNK_SIZE + 1, CHUNK_SIZE)]:
        hit = client.retrieve(TOKENS[:asked], (0, 7))
        assert hit.num_tokens == found
        assert all(torch.equal(hit[layer], rows[layer][:found]) for layer in rows)
    check_small(held)


def test_cut_rows_in_steps_and_a_prompt_that_goes_on_from_them() -> None:
    node, held = crowded()
    rows = rows_of()
    client = DirectCache(node, model="large")
    for start in range(0, len(TOKENS), 42):
        end = start + 42
        client.store(TOKENS[:end], {layer: given[start:end] for layer, given in rows.items()}, token_offset=start)
    assert most_pieces(node) > 1
    check_retrieves(client, rows)
    check_small(held)


def test_cut_rows_go_to_other_nodes_and_are_cut_there_too() -> None:
    controller = Controller()
    first, held = crowded(controller)
    second, more = crowded(controller)
    rows = rows_of()
    assert DirectCache(first, model="large").store(TOKENS, rows).stored == 3
    assert most_pieces(first) > 1
    controller.hear_all()
    reader = DirectCache(second, model="large")
    check_retrieves(reader, rows)
    assert DirectCache(second, model="large").store(TOKENS, rows).stored == 3
    assert most_pieces(second) > 1
    first.unreachable = True
    check_retrieves(DirectCache(second, model="large"), rows)
    check_small(held)
    check_small(more)


def test_a_result_stays_when_its_cut_chunk_is_dropped_and_the_pool_is_written_over() -> None:
    node, held = crowded()
    rows = rows_of()
    client = DirectCache(node, model="large")
    client.store(TOKENS, rows)
    # Rows within one piece are handed out without a copy: they hold all pieces of their chunks.
    hits = [client.retrieve(TOKENS, layer, start=1, stop=9) for layer in rows]
    before = node.server.store.stats().stranded_bytes
    for key in node.server._database({"model": "large"}).chunk_keys(TOKENS):
        node.server.drop_key(key)
    assert node.server.store.stats().stranded_bytes > before
    check_small(held)
    held.clear()
    small = DirectCache(node, model="small")
    for number in range(3 * NUM_SMALL):
        prompt = range(10**6 + number * CHUNK_SIZE, 10**6 + (number + 1) * CHUNK_SIZE)
        small.store(prompt, {0: make_random_rows(CHUNK_SIZE, SMALL_DIM, torch.bfloat16, seed=number)})
    for hit, layer in zip(hits, rows, strict=True):
        assert torch.equal(hit[layer], rows[layer][1:9])
    hits.clear()
    del hit
    assert node.settled().stranded_bytes == 0
