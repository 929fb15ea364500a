"""Names that a client computes of its prompts, and that the table of blocks computes of what engines tell."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hs_cache.config import CacheConfig
from hs_cache.keys import KEY_BYTES, KeySpace, TokenDatabase
from hs_cache.kv_names import kv_naming
from hs_cache.kv_presence import Presence
from hs_cache.vllm_blocks import BlockTable
from hs_cache.vllm_names import HEAD_BYTES, VLLMNaming, vllm_naming
from hs_cache.vllm_wire import read_batch
from tests.vllm_engine import BLOCK, CHUNK, Extras, PrefixCache, Span


def ids(tokens: Any) -> npt.NDArray[np.int64]:
    return np.asarray(list(tokens), dtype="<i8")


def names(
    tokens: Any = range(12), spans: Any = (), *, known: bytes = b"", block_size: int = BLOCK, **space: Any
) -> list[bytes]:
    """The names of a prompt's chunks behind `known`."""
    naming = VLLMNaming(KeySpace(chunk_size=CHUNK, **space), block_size)
    blob = naming.names(known, ids(tokens), spans, CHUNK)
    return [blob[i : i + KEY_BYTES] for i in range(0, len(blob), KEY_BYTES)]


# Computed from the formula in the module's docstring, with hashlib alone.
GOLDEN = [
    "04580fa4c8a765474924d897f1e23230",
    "78ec49c4cbad734d8f072387e3f8da01",
    "1da452ae2b670337595de40f6b7043c4",
]


def test_golden_vectors() -> None:
    found = names(range(10), [(3, 4, "image"), (8, 1, b"\x00")], model="m", lora_id="l", cache_salt="s")
    assert [name.hex() for name in found] == GOLDEN


def test_one_name_per_chunk_and_none_for_no_tokens() -> None:
    assert [len(name) for name in names(range(9))] == [16, 16, 16]
    assert names([]) == []


def test_a_chain_goes_on_from_known_names() -> None:
    spans = [(1, 6, "a"), (9, 3, "b")]
    whole = names(range(16), spans)
    for known in (1, 2, 3):
        assert names(range(known * CHUNK, 16), spans, known=b"".join(whole[:known])) == whole[known:]


def test_a_short_chunk_has_a_name_of_its_own() -> None:
    assert names(range(8))[:1] == names(range(7))[:1]
    assert names(range(8))[1] != names(range(7))[1]


@pytest.mark.parametrize(
    ("change", "from_chunk"),
    [
        ({"model": "other"}, 0),
        ({"lora_id": "other"}, 0),
        ({"cache_salt": "other"}, 0),
        ({"block_size": 4}, 0),
        ({"tokens": [0, 1, 2, 3, 4, 5, 6, 9, 8, 9, 10, 11]}, 1),
        ({"spans": [(5, 2, "other")]}, 1),
        ({"spans": [(5, 2, b"image")]}, 1),
        ({"spans": [(5, 2, 7)]}, 1),
        ({"spans": []}, 1),
        ({"spans": [(4, 2, "image")]}, 1),  # begins elsewhere in the same block
        ({"spans": [(3, 4, "image")]}, 0),
        ({"spans": [(5, 4, "image")]}, 2),
    ],
)
def test_each_fact_makes_another_name_from_its_chunk_on(change: dict[str, Any], from_chunk: int) -> None:
    facts: dict[str, Any] = {"spans": [(5, 2, "image")], "model": "m", "lora_id": "l", "cache_salt": "s"}
    before, after = names(**facts), names(**facts | change)
    assert [one == other for one, other in zip(before, after, strict=True)] == [i < from_chunk for i in range(3)]


def test_an_adapter_goes_by_its_name() -> None:
    identity = "poet@sha256:" + "0" * 64
    assert names(lora_id=identity) == names(lora_id="poet") != names(lora_id="other")


def test_lora_and_salt_are_not_mixed_up() -> None:
    assert names(lora_id="x") != names(cache_salt="x")


def test_revision_and_shard_are_the_sources_own() -> None:
    assert names(model_revision="r", shard="0/2") == names()


def test_where_in_a_block_an_item_begins_is_in_the_tail_only() -> None:
    one, other = names(spans=[(4, 2, "image")]), names(spans=[(5, 1, "image")])
    assert [name[:HEAD_BYTES] for name in one] == [name[:HEAD_BYTES] for name in other]
    assert one[1:] != other[1:]


def test_the_naming_of_a_service_is_that_of_the_clients_model() -> None:
    sources = [
        {"endpoint": "tcp://127.0.0.1:5557", "model": "a", "block_size": 4},
        {"endpoint": "tcp://127.0.0.1:5559", "model": "b", "block_size": 8},
    ]
    config = CacheConfig(kv_source="vllm_events", kv_events=sources)
    for model, block_size in (("a", 4), ("b", 8), ("c", 16)):
        space = KeySpace(model=model)
        expected = VLLMNaming(space, block_size).names(b"", ids(range(512)), [(3, 9, "x")], 256)
        for naming in (vllm_naming(config, space), kv_naming(config, space)):
            assert naming is not None
            assert naming.names(b"", ids(range(512)), [(3, 9, "x")], 256) == expected
    assert kv_naming(CacheConfig(), KeySpace()) is None


def test_keys_come_with_names() -> None:
    naming = VLLMNaming(KeySpace(chunk_size=CHUNK), BLOCK)
    database = TokenDatabase(KeySpace(chunk_size=CHUNK), kv_naming=naming)
    spans = [(9, 2, "b"), (1, 6, "a")]
    keys = database.chunk_keys(range(8), mm_spans=spans)
    longer = database.extend_keys(keys, range(8, 13), mm_spans=spans)
    assert longer.kv is not None
    assert longer.kv.blob == b"".join(names(range(12), sorted(spans)))


# What the table of blocks makes of it


@st.composite
def prompts(draw: st.DrawFn) -> tuple[list[int], list[Span], str, str]:
    """Tokens, which are often alike, with items that often lie back to back and are alike."""
    tokens = draw(st.lists(st.integers(0, 1), min_size=4, max_size=20))
    spans: list[Span] = []
    position = 0
    while draw(st.booleans()):
        start = position + draw(st.sampled_from([0, 0, 1, 2, 5]))
        length = draw(st.sampled_from([1, 2, 3, 4, 6]))
        spans.append((start, length, draw(st.sampled_from(["a", "b"]))))
        position = start + length
    return tokens, spans, draw(st.sampled_from(["", "a", "b"])), draw(st.sampled_from(["", "a"]))


Prompt = tuple[list[int], list[Span], str, str]


def told(prompt: Prompt, extras: Extras, **options: Any) -> BlockTable:
    """A table that was told of one prompt."""
    table = BlockTable("test", model="m", chunk_size=CHUNK, block_size=BLOCK, capacity=100, **options)
    table.begin()
    tokens, spans, lora, salt = prompt
    for event in PrefixCache(BLOCK, extras=extras).store(tokens, spans, lora=lora, salt=salt):
        table.apply(read_batch([0.0, [event]]))
    return table


def asked(table: BlockTable, prompt: Prompt) -> list[Any]:
    tokens, spans, lora, salt = prompt
    whole = tokens[: len(tokens) // CHUNK * CHUNK]
    return table.presence(names(whole, spans, model="m", lora_id=lora, cache_salt=salt))


@given(prompts())
def test_a_client_finds_what_an_engine_with_offsets_tells_of_the_same_prompt(prompt: Prompt) -> None:
    answers = asked(told(prompt, "offsets", extra_keys="offsets"), prompt)
    assert answers == [Presence.PRESENT] * len(answers)


@given(prompts(), prompts(), st.sampled_from(["offsets", "identifiers"]), st.sampled_from(["auto", "offsets"]))
def test_nobody_is_told_of_another_prompt(one: Prompt, other: Prompt, extras: Extras, policy: str) -> None:
    if extras == "identifiers":
        policy = "auto"
    table = told(one, extras, extra_keys=policy)
    tellings = PrefixCache(BLOCK, extras=extras)
    of_one = tellings.hashes(one[0], one[1], lora=one[2], salt=one[3])
    of_other = tellings.hashes(other[0], other[1], lora=other[2], salt=other[3])
    for chunk, answer in enumerate(asked(table, other)):
        if answer is Presence.PRESENT:
            blocks = (chunk + 1) * CHUNK // BLOCK
            assert of_other[:blocks] == of_one[:blocks], "the engine itself has no KV of that"


@given(prompts(), prompts())
def test_an_old_engine_tells_nobody_of_another_prompt_either(one: Prompt, other: Prompt) -> None:
    # What it lists is what an engine without this habit lists of a longer item, so that is what is compared.
    table = told(one, "old")
    of_one = PrefixCache(BLOCK, extras="old").hashes(one[0], one[1], lora=one[2], salt=one[3])
    of_other = PrefixCache(BLOCK, extras="identifiers").hashes(other[0], other[1], lora=other[2], salt=other[3])
    for chunk, answer in enumerate(asked(table, other)):
        if answer is Presence.PRESENT:
            blocks = (chunk + 1) * CHUNK // BLOCK
            assert of_other[:blocks] == of_one[:blocks]


@pytest.mark.parametrize("extras", ["offsets", "identifiers", "old"])
def test_media_behind_the_first_block_are_found_in_every_form(extras: Extras) -> None:
    prompt: Prompt = (list(range(12)), [(3, 4, "image"), (8, 3, "audio")], "", "")
    assert asked(told(prompt, extras), prompt) == [Presence.PRESENT] * 3


def test_the_same_image_twice_back_to_back_is_not_one_image() -> None:
    twice: Prompt = ([7] * 12, [(4, 4, "image"), (8, 4, "image")], "", "")
    once: Prompt = ([7] * 12, [(4, 4, "image")], "", "")
    for extras in ("offsets", "identifiers"):
        assert Presence.PRESENT not in asked(told(twice, extras), once)[2:]
        assert Presence.PRESENT not in asked(told(once, extras), twice)[2:]


def test_without_offsets_a_text_in_the_first_block_is_a_salt_or_an_item() -> None:
    salted: Prompt = (list(range(4)), [], "", "x")
    image: Prompt = (list(range(4)), [(0, 2, "x")], "", "")
    for one in (salted, image):
        table = told(one, "identifiers")
        assert asked(table, salted) == asked(table, image) == [Presence.UNKNOWN]
    assert asked(told(salted, "offsets", extra_keys="offsets"), salted) == [Presence.PRESENT]
    assert asked(told(image, "offsets"), image) == [Presence.PRESENT]


def test_after_an_item_with_an_offset_a_bare_text_is_known_to_be_a_salt() -> None:
    engine = PrefixCache(BLOCK)
    table = BlockTable("test", model="m", chunk_size=CHUNK, block_size=BLOCK, capacity=100)
    table.begin()
    image: Prompt = (list(range(4)), [(1, 2, "x")], "", "")
    salted: Prompt = (list(range(4)), [(1, 2, "y")], "lora", "salt")
    for tokens, spans, lora, salt in (image, salted):
        table.apply(read_batch([0.0, engine.store(tokens, spans, lora=lora, salt=salt)]))
    assert asked(table, image) == asked(table, salted) == [Presence.PRESENT]
    assert asked(table, (salted[0], salted[1], "lora", "other")) == [None]


def test_what_is_told_without_extra_keys_is_unknown_unless_there_are_none() -> None:
    plain: Prompt = (list(range(8)), [], "", "")
    with_lora: Prompt = (list(range(8)), [], "l", "")
    for prompt in (plain, with_lora):
        assert asked(told(prompt, "none"), prompt) == [Presence.UNKNOWN] * 2
        assert asked(told(prompt, "none", extra_keys="none"), prompt) == [Presence.PRESENT] * 2
    assert asked(told(with_lora, "none", extra_keys="none"), plain) == [None] * 2
