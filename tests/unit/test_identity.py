"""What makes two prefixes the same, through the whole client: nobody ever gets rows of another's."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from hs_cache.keys import MMSpan
from hs_cache.lora import lora_identity
from hs_cache.messages import LAYER_MISSING, NEVER_STORED, OK
from tests.builders import CHUNK_SIZE
from tests.direct import DirectCache, Node, make_nodes, make_rows

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfd and /proc are Linux")

IMAGE = 151655
"""A placeholder token, the same for every image."""

TOKENS = [*range(8), *[IMAGE] * 8, *range(100, 108)]
CAT, DOG = "c" * 64, "d" * 64


@pytest.fixture(params=[False, True], ids=["with a pool", "without a pool"])
def cache(request: pytest.FixtureRequest) -> Iterator[DirectCache]:
    node = Node(256)
    yield DirectCache(node, far=request.param)
    node.settled()


def put(cache: DirectCache, variant: int, *spans: MMSpan, tokens: Sequence[int] = TOKENS) -> int:
    """Store rows that differ by `variant` from the first image on, as a model's do; the number of chunks stored."""
    head = min((start for start, _, _ in spans), default=len(tokens))
    rows = torch.cat([make_rows(tokens)[:head], make_rows(tokens, variant=variant)[head:]])
    return cache.store(tokens, {0: rows}, mm_spans=spans).stored


def get(cache: DirectCache, *spans: MMSpan, tokens: Sequence[int] = TOKENS) -> tuple[int, int | None]:
    """How many tokens of a prompt are found, and with which `variant` behind the first image; None if none are."""
    head = min((start for start, _, _ in spans), default=len(tokens))
    hit = cache.retrieve(tokens, mm_spans=spans)
    if not hit:
        return 0, None
    assert torch.equal(hit[0][:head], make_rows(tokens)[: min(head, hit.num_tokens)])
    found = [
        variant
        for variant in range(8)
        if torch.equal(hit[0][head:], make_rows(tokens, variant=variant)[head : hit.num_tokens])
    ]
    if hit.num_tokens <= head:
        return hit.num_tokens, None
    (variant,) = found
    return hit.num_tokens, variant


def test_the_same_text_with_another_image_shares_what_is_before_it_and_nothing_else(cache: DirectCache) -> None:
    cat, dog = (8, 8, CAT), (8, 8, DOG)
    assert put(cache, 1, cat) == 6
    assert get(cache, cat) == (24, 1)
    assert get(cache, dog) == (8, None)
    assert get(cache) == (8, None)
    assert cache.plan(TOKENS, mm_spans=[dog]).num_tokens == 8
    assert cache.explain(TOKENS, mm_spans=[dog]) == [OK] * 2 + [NEVER_STORED] * 4
    keys = [list(cache.session.chunk_keys(TOKENS, [span])) for span in (cat, dog)]
    assert keys[0][:2] == keys[1][:2]
    assert not set(keys[0][2:]) & set(keys[1][2:])

    assert put(cache, 2, dog) == 4
    assert put(cache, 3) == 4, "and without any image"
    assert (get(cache, cat), get(cache, dog)) == ((24, 1), (24, 2))
    _, pieces = cache.run(cache.session.retrieve_pieces(TOKENS, 0, [(8, 8, "e" * 64)]))
    assert sum(piece.num_tokens for piece in pieces) == 8, "a ref is no way around"


def test_the_same_image_at_another_position_or_of_another_length(cache: DirectCache) -> None:
    spans = [(8, 4, CAT), (12, 4, CAT), (8, 8, CAT), (9, 4, CAT)]
    for variant, span in enumerate(spans):
        assert get(cache, span) == ((8, None) if variant else (0, None))
        put(cache, variant + 1, span)
    assert [get(cache, span) for span in spans] == [(24, variant) for variant in range(1, 5)]


def test_a_span_over_a_border_of_chunks_counts_in_both(cache: DirectCache) -> None:
    tokens = [*range(6), *[IMAGE] * 4, *range(100, 106)]
    assert put(cache, 1, (6, 4, CAT), tokens=tokens) == 4
    assert get(cache, (6, 4, CAT), tokens=tokens) == (16, 1)
    assert get(cache, (6, 4, DOG), tokens=tokens) == (4, None)
    inside = tokens[:8]  # a prefix that ends inside of the image
    assert get(cache, (6, 4, CAT), tokens=inside) == (8, 1)
    assert get(cache, (6, 4, DOG), tokens=inside) == (4, None)
    assert get(cache, (6, 2, CAT), tokens=inside) == (4, None), "an image that ends there is another one"
    assert put(cache, 2, (6, 4, DOG), tokens=tokens) == 3
    assert get(cache, (6, 4, CAT), tokens=tokens) == (16, 1)
    assert get(cache, (6, 4, DOG), tokens=tokens) == (16, 2)


def test_the_second_of_two_images(cache: DirectCache) -> None:
    both, swapped = [(8, 4, CAT), (12, 4, DOG)], [(8, 4, DOG), (12, 4, CAT)]
    put(cache, 1, *both)
    assert get(cache, *swapped)[0] == 8
    assert get(cache, (8, 4, CAT), (12, 4, CAT))[0] == 12
    put(cache, 2, *swapped)
    assert (get(cache, *both), get(cache, *reversed(swapped))) == ((24, 1), (24, 2))


def test_steps_of_two_prompts_that_differ_in_their_image_never_meet(cache: DirectCache) -> None:
    """Their rows come by turns, in steps that end inside of the image, and wait in the same client for their chunks."""
    for first, end in [(0, 10), (10, 13), (13, 24)]:
        for variant, image in enumerate((CAT, DOG)):
            rows = torch.cat([make_rows(TOKENS)[:8], make_rows(TOKENS, variant=variant)[8:]])
            cache.store(TOKENS[:end], {0: rows[first:end]}, token_offset=first, mm_spans=[(8, 8, image)])
    assert [get(cache, (8, 8, image)) for image in (CAT, DOG)] == [(24, 0), (24, 1)]


def test_an_image_elsewhere_in_the_cluster() -> None:
    nodes = make_nodes(2)
    here, there = (DirectCache(node) for node in nodes)
    put(there, 1, (8, 8, CAT))
    put(here, 0)
    nodes[0].controller.hear_all()
    assert get(here, (8, 8, CAT)) == (24, 1), "the head is here, what follows is there"
    assert get(here, (8, 8, DOG)) == (8, None)


@pytest.mark.parametrize("far", [False, True], ids=["with a pool", "without a pool"])
def test_other_salts_find_nothing_and_are_told_nothing(far: bool) -> None:
    node = Node(256)
    mine, theirs, without = (DirectCache(node, far=far, cache_salt=salt) for salt in ("mine", "theirs", ""))
    assert put(mine, 1) == 6
    for stranger in (theirs, without):
        assert get(stranger) == (0, None)
        assert stranger.plan(TOKENS).num_tokens == 0
        assert stranger.plan(TOKENS).layer_tokens == {0: 0}
        assert stranger.explain(TOKENS, [0, 5]) == [NEVER_STORED] * 6
        assert not set(stranger.session.chunk_keys(TOKENS, ())) & set(mine.session.chunk_keys(TOKENS, ()))
    assert mine.explain(TOKENS, [0, 5]) == [LAYER_MISSING] * 6
    # What a chunk of one salt is, by dtype and width, restricts nobody else.
    assert theirs.store(TOKENS, {0: make_rows(TOKENS, hidden_dim=16)}).stored == 6
    if not far:
        mine.report("report_evicted", TOKENS)
        assert get(mine) == (0, None)
    assert theirs.retrieve(TOKENS).num_tokens == 24, "nor does KV that went"
    assert without.explain(TOKENS) == [NEVER_STORED] * 6
    node.settled()


def test_the_same_lora_name_with_new_weights_is_a_miss(tmp_path: Path) -> None:
    node = Node(256)
    weights = tmp_path / "adapter_model.safetensors"
    for variant, content in enumerate((b"old", b"new")):
        weights.write_bytes(content)
        cache = DirectCache(node, model="m", lora_id=lora_identity("poet", tmp_path))
        assert not cache.retrieve(TOKENS)
        assert cache.store(TOKENS, {0: make_rows(TOKENS, variant=variant)}).stored == 6
        assert torch.equal(cache.retrieve(TOKENS)[0], make_rows(TOKENS, variant=variant))
    weights.write_bytes(b"old")
    again = DirectCache(node, model="m", lora_id=lora_identity("poet", tmp_path))
    assert torch.equal(again.retrieve(TOKENS)[0], make_rows(TOKENS, variant=0))
    assert not DirectCache(node, model="m").retrieve(TOKENS), "nor has the model without it anything of this"


SPACES: list[dict[str, Any]] = [
    {},
    {"model": "S"},
    {"model_revision": "S"},
    {"lora_id": "S"},
    {"cache_salt": "S"},
    {"shard": "S"},
    {"mm_spans": [(8, 8, CAT)]},
    {"mm_spans": [(8, 8, DOG)]},
    {"mm_spans": [(10, 4, CAT)]},
]


def test_by_handle_every_part_counts_too() -> None:
    server = Node(256).server
    for variant, space in enumerate(SPACES):
        head = 8 if "mm_spans" in space else 0
        rows = torch.cat([make_rows(TOKENS)[:head], make_rows(TOKENS, variant=variant)[head:]])
        found = server.retrieve_hidden_states(TOKENS, **space)
        assert (0 if found is None else len(found)) == head
        assert server.store_hidden_states(TOKENS, rows, **space) == 6 - head // CHUNK_SIZE
    for variant, space in enumerate(SPACES):
        found = server.retrieve_hidden_states(TOKENS, **space)
        assert found is not None
        assert torch.equal(found[8:], make_rows(TOKENS, variant=variant)[8:].float())
