"""What keeps prefixes apart, through clients of both kinds, on one node and from another, and by handle."""

import uuid
from pathlib import Path
from typing import Any

import ray
import torch

import hs_cache
from hs_cache.router import HIDDEN_STATES, find_actor
from tests.cluster.children import make_rows
from tests.cluster.conftest import Connect, StartService
from tests.cluster.nodes import Nodes, client, read_on

IMAGE = 151655
TOKENS = [*range(8), *[IMAGE] * 8, *range(8)]
HEAD = make_rows(8, 0)
CAT, DOG = [(8, 8, "c" * 64)], [(8, 8, "d" * 64)]


def rows_of(number: int) -> torch.Tensor:
    """Rows of a prompt: its head is that of all others, what follows is its own."""
    return torch.cat([HEAD, make_rows(16, number)])


def test_the_same_text_with_other_images(connect: Connect, service: str) -> None:
    cache = connect(service=service)
    spans = [CAT, DOG, [(8, 4, "c" * 64)], [(6, 4, "c" * 64)], [(6, 4, "d" * 64)]]
    before = [8, 8, 8, 4, 4]  # tokens of whole chunks before the image: those are shared
    for number, (image, shared) in enumerate(zip(spans, before, strict=True)):
        rows = torch.cat([HEAD[:shared], make_rows(24, number)[shared:]])
        assert cache.retrieve(TOKENS, 0, mm_spans=image).num_tokens == (shared if number else 0)
        assert cache.store(TOKENS, {0: rows}, mm_spans=image).stored == 6 - (shared // 4 if number else 0)
    for number, (image, shared) in enumerate(zip(spans, before, strict=True)):
        hit = cache.retrieve(TOKENS, 0, mm_spans=image)
        assert torch.equal(hit[0], torch.cat([HEAD[:shared], make_rows(24, number)[shared:]]))
    assert cache.retrieve(TOKENS, 0).num_tokens == 8
    assert [report.reason for report in cache.explain(TOKENS, 0, mm_spans=[(8, 8, "x")])][2:] == ["never_stored"] * 4


def test_from_another_node_and_by_handle(nodes: Nodes, start_service: StartService) -> None:
    service, model = start_service(node_selector="all"), uuid.uuid4().hex
    cache, salted = client(service, model), client(service, model, cache_salt="s")
    cache.store(TOKENS, {0: rows_of(1)}, mm_spans=CAT)
    salted.store(TOKENS, {0: make_rows(24, 2)}, mm_spans=CAT)
    actor: Any = find_actor(service, HIDDEN_STATES, nodes.head)
    handle = actor.retrieve_hidden_states
    assert torch.equal(ray.get(handle.remote(TOKENS, model=model, mm_spans=CAT)), rows_of(1))
    assert torch.equal(ray.get(handle.remote(TOKENS, model=model, mm_spans=DOG)), HEAD)
    assert torch.equal(ray.get(handle.remote(TOKENS, model=model, mm_spans=CAT, cache_salt="s")), make_rows(24, 2))
    assert ray.get(handle.remote(TOKENS, model=model, mm_spans=CAT, cache_salt="t")) is None
    assert cache.retrieve(TOKENS[:8], 0, wait_s=20).num_tokens == 8
    assert read_on(nodes.one, client(service, model, cache_salt="t"), TOKENS[:8])[0] == b""
    # Nor does a ref get there what its key is not of.
    assert client(service, model, cache_salt="t").retrieve_ref(TOKENS, 0, mm_spans=CAT).num_tokens == 0


def test_an_adapter_with_new_weights(connect: Connect, service: str, tmp_path: Path) -> None:
    for number, weights in enumerate((b"old", b"new")):
        (tmp_path / "adapter_model.safetensors").write_bytes(weights)
        cache = connect(service=service, lora_id=hs_cache.lora_identity("poet", tmp_path))
        assert not cache.retrieve(TOKENS, 0)
        cache.store(TOKENS, {0: rows_of(number)})
        assert torch.equal(cache.retrieve(TOKENS, 0)[0], rows_of(number))
