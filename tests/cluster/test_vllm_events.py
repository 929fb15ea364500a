"""A service that listens to vLLM's KV events: its `KVActor`s hear engines that publish over real sockets."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch

from hs_cache.router import KV, find_actor
from tests.cluster.children import make_rows
from tests.cluster.conftest import Connect, StartService
from tests.cluster.nodes import pid_of, this_node
from tests.processes import kill, wait_until
from tests.vllm_engine import PrefixCache, PublisherProcess, Span, publishing_process

pytestmark = pytest.mark.long

BLOCK, MODEL = 2, "engine's"
TOKENS = list(range(12))

_seeds = itertools.count()


@pytest.fixture(scope="module")
def engine() -> Iterator[PublisherProcess]:
    with publishing_process() as engine:
        yield engine


@pytest.fixture(scope="module")
def events(engine: PublisherProcess, start_service: StartService) -> str:
    source = engine.source | {"model": MODEL, "block_size": BLOCK}
    return start_service(kv_source="vllm_events", kv_events=[source])


@pytest.fixture
def blocks() -> PrefixCache:
    """An engine's prefix cache, with hashes of its own in each test."""
    return PrefixCache(BLOCK, seed=next(_seeds))


@pytest.fixture
def own() -> str:
    """A salt or an adapter that no other test has."""
    return f"own {next(_seeds)}"


def ended_by(cache: Any, tokens: Any = TOKENS, **options: Any) -> tuple[int, str]:
    hit = cache.retrieve(tokens, 0, **options)
    return hit.num_tokens, hit.ended_by


def until(cache: Any, expected: tuple[int, str], **options: Any) -> None:
    wait_until(lambda: ended_by(cache, **options) == expected, f"a retrieve gives {expected}")


def test_rows_are_served_while_the_engine_has_their_kv(
    connect: Connect, events: str, engine: PublisherProcess, blocks: PrefixCache, own: str
) -> None:
    cache = connect(service=events, model=MODEL, cache_salt=own)
    rows = make_rows(12, 1)
    cache.store(TOKENS, {0: rows})
    assert ended_by(cache) == (0, "kv_unknown"), "rows may come before the event"
    # An item with an offset, so that a text by itself is known to be a salt.
    engine.publish(*blocks.store(TOKENS, [(5, 2, "image")]), *blocks.store(TOKENS, salt=own))
    until(cache, (12, ""))
    assert torch.equal(cache.retrieve(TOKENS, 0)[0].float(), rows.float())

    hashes = blocks.hashes(TOKENS, salt=own)
    engine.publish(*blocks.evict(hashes[3]))
    until(cache, (4, "kv_absent"))
    first, second, third = cache.chunk_keys(TOKENS)
    assert [cache.has_chunk(key) for key in (first, second, third)] == [True, False, True]

    engine.publish(*blocks.store(TOKENS, salt=own))
    cache.store(TOKENS, {0: rows})
    until(cache, (12, ""))
    engine.publish(*blocks.clear())
    until(cache, (0, "kv_absent"))


def test_images_are_told_apart_and_other_clients_are_not_answered_by_this_engine(
    connect: Connect, events: str, engine: PublisherProcess, blocks: PrefixCache, own: str
) -> None:
    spans: list[Span] = [(1, 6, "image")]
    cache = connect(service=events, model=MODEL, lora_id=own)
    for other in ("image", "other"):
        cache.store(TOKENS, {0: make_rows(12, 1)}, mm_spans=[(1, 6, other)])
    engine.publish(*blocks.store(TOKENS, spans, lora=own))
    until(cache, (12, ""), mm_spans=spans)
    assert ended_by(cache, mm_spans=[(1, 6, "other")]) == (0, "kv_unknown")
    for space in ({"model": "another"}, {"lora_id": ""}, {"cache_salt": "s"}):
        stranger = connect(**{"service": events, "model": MODEL, "lora_id": own} | space)
        stranger.store(TOKENS, {0: make_rows(12, 2)}, mm_spans=spans)
        assert ended_by(stranger, mm_spans=spans) == (0, "kv_unknown")


def test_a_kv_actor_that_restarts_reads_what_was_published(
    connect: Connect, events: str, engine: PublisherProcess, blocks: PrefixCache, own: str
) -> None:
    cache = connect(service=events, model=MODEL, lora_id=own)
    cache.store(TOKENS, {0: make_rows(12, 1)})
    engine.publish(*blocks.store(TOKENS, lora=own))
    until(cache, (12, ""))
    pid = pid_of(events, KV, this_node())
    kill(pid)
    wait_until(lambda: pid_of(events, KV, this_node()) != pid, "another process has its place")
    until(cache, (12, ""))
    statistics = ray.get(find_actor(events, KV, this_node()).stats.remote(), timeout=10)
    assert statistics.engines == (engine.source["endpoint"],)


def test_an_engine_that_is_killed_and_its_successor(
    connect: Connect, start_service: StartService, blocks: PrefixCache
) -> None:
    with publishing_process() as engine:
        source = engine.source | {"model": MODEL, "block_size": BLOCK}
        service = start_service(kv_source="vllm_events", kv_events=[source])
        cache = connect(service=service, model=MODEL)
        cache.store(TOKENS, {0: make_rows(12, 1)})
        engine.publish(*blocks.store(TOKENS))
        until(cache, (12, ""))
        engine.kill()
        until(cache, (0, "kv_unknown"))
        assert all(cache.has_chunk(key) for key in cache.chunk_keys(TOKENS))
        with publishing_process(port=engine.port, replay_port=engine.replay_port) as successor:
            successor.publish(*PrefixCache(BLOCK, seed=-1).store(TOKENS), ts=1.0)
            until(cache, (12, ""))
