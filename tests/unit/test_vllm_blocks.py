"""The table of blocks: what is present, absent or unknown after which events."""

import logging
import threading
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hs_cache.errors import InvalidInputError
from hs_cache.keys import KeySpace, normalise_token_ids
from hs_cache.kv_presence import Presence
from hs_cache.messages import split_keys
from hs_cache.vllm_blocks import BlockTable
from hs_cache.vllm_names import VLLMNaming
from hs_cache.vllm_wire import read_batch
from tests.vllm_engine import BLOCK, CHUNK, CLEARED, ask, block_of, names_of, remove, store, stored, tokens_of

ABSENT, PRESENT, UNKNOWN, NEVER = Presence.ABSENT, Presence.PRESENT, Presence.UNKNOWN, None


def make_table(*, capacity: int = 100, block_size: int = BLOCK, extra_keys: str = "auto") -> BlockTable:
    table = BlockTable(
        "test", model="m", chunk_size=CHUNK, block_size=block_size, capacity=capacity, extra_keys=extra_keys
    )
    table.begin()
    return table


def tell(table: BlockTable, *events: dict[str, Any]) -> None:
    table.apply(read_batch([0.0, events]))


def test_a_chunk_is_present_once_all_of_its_blocks_are_there() -> None:
    table = make_table()
    tell(table, store("abc"))
    assert ask(table, "abcd") == [PRESENT, NEVER]
    tell(table, store("abcd", 3))
    assert ask(table, "abcd") == [PRESENT, PRESENT]


def test_a_chunk_is_absent_once_any_of_its_blocks_is_gone() -> None:
    table = make_table()
    tell(table, store("abcd"), store("abef", 2), remove("abc"))
    assert ask(table, "abcd") == [PRESENT, ABSENT]
    assert ask(table, "abef") == [PRESENT, PRESENT]
    tell(table, remove("a"))
    assert ask(table, "abef") == [ABSENT, PRESENT]
    tell(table, store("a"), store("abc", 2))
    assert ask(table, "abcd") == [PRESENT, PRESENT]


def test_prompts_that_part_inside_a_chunk_share_its_first_blocks() -> None:
    table = make_table()
    tell(table, store("ab"), store("ac", 1))
    assert ask(table, "ab") + ask(table, "ac") == [PRESENT, PRESENT]
    tell(table, remove("a"))
    assert ask(table, "ab") + ask(table, "ac") == [ABSENT, ABSENT]


def test_what_was_never_heard_of_is_no_absence() -> None:
    table = make_table()
    assert ask(table, "ab") == [NEVER]
    table.forget()
    assert ask(table, "ab") == [UNKNOWN]
    tell(table, remove("ab"))
    assert ask(table, "ab") == [UNKNOWN]


def test_a_store_of_rows_makes_an_older_absence_unknown_until_events_say_more() -> None:
    table = make_table()
    tell(table, store("abcd"), remove("ab"))
    table.note_stored(names_of("abcd"))
    assert ask(table, "abcd") == [UNKNOWN, PRESENT]
    tell(table, remove("abcd"))
    assert ask(table, "abcd") == [UNKNOWN, ABSENT]
    tell(table, store("ab", 1))
    assert ask(table, "ab") == [PRESENT]
    tell(table, remove("a"))
    assert ask(table, "ab") == [ABSENT]
    table.note_stored(names_of("ab"))
    assert ask(table, "ab") == [UNKNOWN]
    tell(table, CLEARED)
    assert ask(table, "abcd") == [ABSENT, ABSENT]
    table.note_stored(names_of("ab"))
    assert ask(table, "abcd") == [UNKNOWN, ABSENT]


def test_a_block_is_there_while_any_medium_has_it() -> None:
    table = make_table()
    offloaded = stored([block_of("a"), block_of("ab")], [], block_size=0, medium="CPU", extra_keys=None)
    tell(table, store("ab"), offloaded, remove("a", "ab"))
    assert ask(table, "ab") == [PRESENT]
    tell(table, remove("a", medium="CPU"))
    assert ask(table, "ab") == [ABSENT]
    tell(table, store("a"), remove("ab", medium="CPU"))
    assert ask(table, "ab") == [ABSENT]


def test_a_medium_that_isnt_told_may_be_any() -> None:
    table = make_table()
    tell(table, store("ab"), store("ab", medium="CPU"), remove("a", medium=None))
    assert ask(table, "ab") == [ABSENT]


def test_one_tier_is_cleared() -> None:
    table = make_table()
    tell(table, store("ab"), store("abcd"), store("ab", medium="CPU"))
    tell(table, {"type": "TierBlocksCleared", "medium": "GPU"})
    assert ask(table, "abcd") == [PRESENT, ABSENT]


def test_after_the_end_of_one_of_two_copies_the_other_is_in_doubt() -> None:
    table = make_table()
    tell(table, store("ab"), store("ab"))
    assert ask(table, "ab") == [PRESENT]
    tell(table, remove("a"))
    assert ask(table, "ab") == [UNKNOWN]
    tell(table, store("a"))
    assert ask(table, "ab") == [PRESENT]
    tell(table, remove("a"), remove("a"))
    assert ask(table, "ab") == [ABSENT]


@pytest.mark.parametrize("kind", ["sliding_window", "mamba", "chunked_local_attention", "something new"])
def test_groups_that_give_blocks_up_early_are_not_listened_to(kind: str) -> None:
    table = make_table()
    window = {"group_idx": 1, "kv_cache_spec_kind": kind}
    full = {"group_idx": 0, "kv_cache_spec_kind": "full_attention"}
    # A window leaves blocks out, so its events have fewer hashes than tokens.
    windowed = stored([block_of("ab")], tokens_of("ab"), None, block_size=BLOCK, **window)
    tell(table, windowed, store("ab", **full), remove("a", group_idx=1))
    assert ask(table, "ab") == [PRESENT]
    tell(table, remove("a", group_idx=0))
    assert ask(table, "ab") == [ABSENT]


def test_all_groups_of_full_attention_must_have_a_block() -> None:
    table = make_table()
    tell(table, store("ab", group_idx=0, kv_cache_spec_kind="full_attention"))
    assert ask(table, "ab") == [PRESENT]
    tell(table, store("a", group_idx=3, kv_cache_spec_kind="mla_attention"))
    assert ask(table, "ab") == [UNKNOWN]
    tell(table, store("ab", 1, group_idx=3, kv_cache_spec_kind="mla_attention"))
    assert ask(table, "ab") == [PRESENT]
    tell(table, remove("ab", group_idx=3))
    assert ask(table, "ab") == [ABSENT]


def test_all_blocks_cleared() -> None:
    table = make_table()
    tell(table, store("abcd"), CLEARED, store("abxy"))
    assert ask(table, "abcd") == [PRESENT, ABSENT]
    assert ask(table, "zz") == [NEVER]


REJECTED = {
    "fewer tokens than blocks": store("abcd", 2, token_ids=[1, 2]),
    "more tokens than blocks": store("abcd", 2, token_ids=list(range(6))),
    "an unknown parent": store("xbcd", 2) | {"block_hashes": [b"abc", b"abcd"]},
    "extra keys of another number of blocks": store("abcd", 2, extra_keys=[None]),
    "blocks of another size": store("abcd", 2, block_size=4),
    "no extra keys": store("abcd", 2, extra_keys=None),
    "a LoRA adapter without a name": store("abcd", 2, lora_id=3),
    "a LoRA adapter that is not among the extra keys": store("abcd", 2, lora_id=3, lora_name="l"),
    "another LoRA adapter than its parent": store("abcd", 2, lora_name="l", extra_keys=[["l"], ["l"]]),
    "prompt embeddings": store("abcd", 2, extra_keys=[[b"digest"], None]),
    "an item that begins behind the block": store("abcd", 2, extra_keys=[[["image", 2]], None]),
    "an item that begins before the prompt": store("abcd", 2, extra_keys=[[["image", -5]], None]),
    "something else among the extra keys": store("abcd", 2, extra_keys=[[{"image": 1}], None]),
    "a salt before an item": store("abcd", 2, extra_keys=[["salt", ["image", 0]], None]),
}


@pytest.mark.parametrize("reason", REJECTED)
def test_what_cant_be_taken_is_unknown_and_so_is_all_that_continues_it(reason: str) -> None:
    table = make_table()
    tell(table, store("ab"), REJECTED[reason], store("abcdef", 4))
    assert ask(table, "abcdef") == [PRESENT, UNKNOWN, UNKNOWN]
    assert table.stats().rejected_blocks_total >= 3
    assert ask(table, "zz") == [UNKNOWN], "it may have been this"
    tell(table, CLEARED, store("abcdef"))
    assert ask(table, "abcdef") == [PRESENT] * 3


@pytest.mark.parametrize(
    "contradiction",
    [
        store("ab", token_ids=tokens_of("xy")),
        store("ab", 1, token_ids=tokens_of("x")),
        store("ab", extra_keys=[[["image", 0]], None]),
        stored([block_of("ab")], tokens_of("b"), None, block_size=BLOCK),
    ],
)
def test_a_hash_with_two_contents_makes_all_unknown_until_it_is_told_anew(contradiction: dict[str, Any]) -> None:
    table = make_table()
    tell(table, store("abcd"), contradiction)
    assert ask(table, "abcd") == [UNKNOWN, UNKNOWN]
    tell(table, store("abcd"))
    assert ask(table, "abcd") == [PRESENT, PRESENT]


def test_a_chunk_size_that_is_no_multiple_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="chunk_size: got 4, expected a multiple of block_size 3"):
        make_table(block_size=3)


@pytest.mark.parametrize("extra_keys", ["auto", "offsets", "none"])
def test_an_offloading_tier_that_tells_no_extra_keys_has_copies_of_what_is_known(extra_keys: str) -> None:
    table = make_table(extra_keys=extra_keys)
    full = {"group_idx": 0, "kv_cache_spec_kind": "full_attention"}
    tokens, spans = normalise_token_ids(tokens_of("abcd")), [(0, 2, "image")]
    blob = VLLMNaming(KeySpace(model="m", chunk_size=CHUNK), BLOCK).names(b"", tokens, spans, CHUNK)
    on_gpu = store("abcd", extra_keys=[[["image", 0]], None, None, None], **full)
    gone = remove("abcd", "abc", "ab", "a", group_idx=0)
    for event, state in (
        (on_gpu, PRESENT),
        (store("abcd", medium="CPU", extra_keys=None, **full), PRESENT),
        (gone, PRESENT),
        (on_gpu, PRESENT),
        (gone | {"medium": "CPU"}, PRESENT),
        (gone, ABSENT),
    ):
        tell(table, event)
        assert table.presence(split_keys(blob)) == [state, state]


def test_a_copy_told_without_extra_keys_counts_behind_one_that_is_not_known() -> None:
    table = make_table()
    tell(
        table,
        store("abcd"),
        remove("b", "abc"),
        store("abcd", medium="CPU", extra_keys=None),
        remove("abcd", "ab", "a"),
    )
    assert ask(table, "ab") == [PRESENT]
    assert ask(table, "abcd") == [PRESENT, UNKNOWN], "abc may be there"


@pytest.mark.parametrize("other", [{"token_ids": tokens_of("x")}, {"parent_block_hash": b"x"}, {"lora_name": "l"}])
def test_a_copy_told_without_extra_keys_that_differs_is_none(other: dict[str, Any]) -> None:
    table = make_table()
    tell(table, store("ab"), store("ab", 1, medium="CPU", extra_keys=None) | other, remove("ab"))
    assert ask(table, "ab") == [UNKNOWN]


LARGER = stored([block_of("abcd")], tokens_of("cd"), block_of("ab"), block_size=4, medium="CPU")


def test_what_cant_be_taken_of_a_known_block_is_a_copy_that_may_be_there_until_it_is_removed() -> None:
    table = make_table()
    tell(table, store("abcd"), LARGER)
    assert ask(table, "abcd") == [PRESENT, PRESENT], "the GPU has it still"
    tell(table, remove("abcd"))
    assert ask(table, "abcd") == [PRESENT, UNKNOWN]
    tell(table, store("abcd"))
    assert ask(table, "abcd") == [PRESENT, PRESENT]
    tell(table, remove("abcd"), remove("abcd", medium="CPU"))
    assert ask(table, "abcd") == [PRESENT, ABSENT]
    tell(table, store("abcd"))
    assert ask(table, "abcd") == [PRESENT, PRESENT]
    tell(table, store("abcd", 3, token_ids=[1]))
    assert ask(table, "abcd") == [PRESENT, UNKNOWN]
    tell(table, CLEARED, store("abcd"))
    assert ask(table, "abcd") == [PRESENT, PRESENT]


def test_doubtful_blocks_leave_nothing_behind() -> None:
    table = make_table()
    for letter in map(chr, range(200, 300)):
        larger = stored([block_of("a" + letter)], tokens_of("a" + letter), None, block_size=4, medium="CPU")
        tell(table, store("a" + letter), larger, remove("a" + letter), remove("a" + letter, medium="CPU"))
    assert table.stats().blocks == 1


@pytest.mark.parametrize("reason", [*sorted(set(REJECTED) - {"an unknown parent"}), "no tokens"])
def test_a_rejected_store_ends_the_absence_of_what_it_names(reason: str) -> None:
    table = make_table()
    event = REJECTED.get(reason, stored([block_of("abc"), block_of("abcd")], [], extra_keys=None))
    tell(table, store("abcdef"), remove("abcdef", "abcde", "abcd", "abc"))
    assert ask(table, "abcdef") == [PRESENT, ABSENT, ABSENT]
    tell(table, event)
    assert ask(table, "abcdef") == [PRESENT, UNKNOWN, ABSENT]
    tell(table, store("abcd", 2), remove("abc"), event)
    assert ask(table, "abcd")[1] == UNKNOWN, "a block in the middle"
    tell(table, store("abcdef"), CLEARED, event)
    assert ask(table, "abcdef") == [ABSENT, UNKNOWN, ABSENT]


def test_a_group_or_medium_that_isnt_told_matches_any() -> None:
    full = {"group_idx": 1, "kv_cache_spec_kind": "full_attention"}
    for told, gone in (
        (full, {}),
        ({}, {"group_idx": 1}),
        ({"medium": None}, {}),
        ({}, {"medium": None}),
    ):
        table = make_table()
        tell(table, store("ab", **told), remove("ab", **gone))
        assert ask(table, "ab") == [ABSENT]


@pytest.mark.parametrize("other", [{"medium": "gpu"}, {"group_idx": 2}])
def test_the_removal_of_a_copy_that_was_never_told_of_makes_a_block_unknown(other: dict[str, Any]) -> None:
    table = make_table()
    tell(table, store("ab", group_idx=0), remove("ab", **other))
    assert ask(table, "ab") == [UNKNOWN]
    tell(table, store("ab", group_idx=0))
    assert ask(table, "ab") == [PRESENT]
    tell(table, remove("ab", **other), remove("ab", group_idx=0), remove("ab", group_idx=0))
    assert ask(table, "ab") == [ABSENT]


def test_a_medium_that_isnt_told_may_be_in_a_tier_that_is_cleared() -> None:
    table = make_table()
    tell(table, store("ab", medium=None), {"type": "TierBlocksCleared", "medium": "CPU"})
    assert ask(table, "ab") == [UNKNOWN]


def test_what_takes_long_with_many_blocks_is_said_to_what_they_share() -> None:
    table = make_table(capacity=10_000)
    for letter in map(chr, range(0x1000, 0x1000 + 2000)):
        tell(table, store(letter + "b"), store(letter + "b", medium="CPU"))
    touched = CountingBlocks(table._blocks)
    table._blocks = touched
    assert table.stats().present == 2000
    tell(table, {"type": "TierBlocksCleared", "medium": "GPU"}, store("xy", group_idx=3), CLEARED)
    assert table.stats().absent == 2001
    assert touched.count < 50


class CountingBlocks(OrderedDict[Any, Any]):
    """How often it is asked for a block."""

    count = 0

    def __getitem__(self, key: Any) -> Any:
        self.count += 1
        return super().__getitem__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        self.count += 1
        return super().get(key, default)

    def __iter__(self) -> Iterator[Any]:
        for key in super().__iter__():
            self.count += 1
            yield key


def test_what_a_cleared_tier_had_goes_bit_by_bit() -> None:
    table = make_table(capacity=1000)
    for letter in map(chr, range(0x1000, 0x1000 + 300)):
        tell(table, store(letter + "b"))
    tell(table, CLEARED)
    assert (table.stats().blocks, table.stats().absent) == (0, 300)
    for letter in map(chr, range(0x2000, 0x2000 + 200)):
        tell(table, store(letter + "b"))
    assert len(table._blocks) == 400
    assert (table.stats().present, table.stats().absent) == (200, 300)


def test_each_kind_of_trouble_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    table = make_table()
    with caplog.at_level(logging.WARNING):
        for size in (3, 4):
            tell(table, store("ab", block_size=size), store("ab", lora_id=size), store("ab", extra_keys=None))
            tell(table, {"type": "Unheard"}, store("ab", extra_keys=[["secret"], None]))
    assert len(caplog.records) == 5
    assert "secret" not in caplog.text
    assert table.stats().ignored_total == 2


def test_while_suspended_everything_is_unknown() -> None:
    table = make_table()
    tell(table, store("ab"))
    table.suspend()
    tell(table, store("abcd", 2))
    assert ask(table, "abcd") == [UNKNOWN, UNKNOWN]
    table.resume()
    assert ask(table, "abcd") == [PRESENT, PRESENT]


def test_a_new_table_is_suspended() -> None:
    table = BlockTable("test", model="m", chunk_size=CHUNK, block_size=BLOCK, capacity=1)
    assert ask(table, "ab") == [UNKNOWN]


def test_what_is_forgotten_is_unknown_and_memory_is_bounded() -> None:
    table = make_table(capacity=3)
    for letter in "abcdefghij":
        tell(table, store(letter + "xyz"))
        assert ask(table, "axyz")[0] in (PRESENT, UNKNOWN)
    stats = table.stats()
    assert stats.present + stats.absent + stats.unknown <= 3
    assert stats.blocks <= 6
    assert ask(table, "jxyz") == [PRESENT, PRESENT]
    assert ask(table, "bxyz") == [UNKNOWN, UNKNOWN]
    tell(table, store("bxyzuv", 4))
    assert ask(table, "bxyzuv") == [UNKNOWN] * 3, "its parent is forgotten"


def test_an_engine_that_goes_on_for_long_leaves_no_blocks_behind() -> None:
    table = make_table(capacity=10)
    for letter in map(chr, range(200, 700)):
        tell(table, store(letter + "abcde"))
        tell(table, *(remove((letter + "abcde")[:end]) for end in range(6, 0, -1)))
    stats = table.stats()
    assert (stats.present, stats.absent, stats.blocks) == (0, 10, 0)
    assert len(table._removed) <= 10
    assert len(table._kinds) <= 3


def test_what_is_asked_for_is_not_forgotten() -> None:
    table = make_table(capacity=4)
    tell(table, store("abcd"))
    for letter in "efghijklm":
        assert ask(table, "abcd") == [PRESENT, PRESENT]
        tell(table, store(letter + "x"))
    assert ask(table, "abcd") == [PRESENT, PRESENT]


def test_statistics() -> None:
    table = make_table()
    tell(table, store("abcd"), remove("abcd"), store("xy"), {"type": "Unheard"})
    stats = table.stats()
    assert (stats.present, stats.absent, stats.unknown, stats.blocks) == (2, 1, 0, 5)
    assert (stats.complete, stats.events_total, stats.ignored_total) == (True, 3, 1)


def test_asking_from_other_threads_never_sees_half_a_batch() -> None:
    table = make_table()
    ended = threading.Event()
    torn: list[Any] = []

    def watch() -> None:
        while not ended.is_set():
            answers = ask(table, "abcdefgh")
            if len(set(answers)) > 1:
                torn.append(answers)

    watcher = threading.Thread(target=watch)
    watcher.start()
    for _ in range(300):
        tell(table, store("abcdefgh"))
        tell(table, remove(*("abcdefgh"[: i + 1] for i in range(8))))
    ended.set()
    watcher.join()
    assert not torn


class Machine(RuleBasedStateMachine):
    """Events in any order against a model that knows what each of them means for a chunk, by the definitions."""

    whole = ("abab", "abba", "aa")  # few, so that events often meet
    prompts = st.sampled_from(sorted({prompt[:end] for prompt in whole for end in range(1, len(prompt) + 1)}))
    media = st.sampled_from(["GPU", "GPU", "CPU"])
    seldom = st.integers(0, 9)

    @initialize()
    def begin(self) -> None:
        self.table = make_table()
        self.now = 0
        self.told: set[str] = set()  # blocks that are there or may be, by the prefix that they end
        self.removed: dict[str, int] = {}
        self.copies: dict[tuple[str, str], tuple[int, bool]] = {}  # how many at most, and whether there is one for sure
        self.changed: dict[str, int] = {}
        self.gone: dict[str, int] = {}
        self.noted: dict[str, int] = {}
        self.complete = True

    def event(self, *events: dict[str, Any]) -> None:
        tell(self.table, *events)
        self.now += len(events)

    def copied(self, block: str, medium: str, *, sure: bool = True) -> None:
        count, _ = self.copies.get((block, medium), (0, False))
        self.copies[block, medium] = (count + 1, sure)
        self.changed[block] = self.now

    def reject(self, block: str, medium: str) -> None:
        self.complete = False
        if block in self.told:
            self.copied(block, medium, sure=False)
        else:
            self.removed.pop(block, None)
            if self.gone.pop(block, None):
                self.noted.pop(block, None)

    @rule(prompt=prompts, known=st.integers(0, 5), medium=media)
    def store(self, prompt: str, known: int, medium: str) -> None:
        known = min(known, len(prompt) - 1)
        self.event(store(prompt, known, medium=medium))
        for at in range(known, len(prompt)):
            block = prompt[: at + 1]
            if block not in self.told and at and prompt[:at] not in self.told:
                self.reject(block, medium)
                continue
            self.told.add(block)
            self.removed.pop(block, None)
            self.copied(block, medium)
            if len(block) % 2 == 0:
                self.gone.pop(block, None)

    @rule(prompt=prompts, medium=media)
    def offload(self, prompt: str, medium: str) -> None:
        self.event(stored([block_of(prompt)], [], medium=medium, extra_keys=None))
        if prompt in self.told:
            self.copied(prompt, medium)
        else:
            self.reject(prompt, medium)

    @rule(prompt=prompts, medium=media)
    def offload_with_tokens(self, prompt: str, medium: str) -> None:
        self.event(store(prompt, medium=medium, extra_keys=None))
        for block in (prompt[: at + 1] for at in range(len(prompt))):
            if block in self.told:
                self.copied(block, medium)
            else:
                self.reject(block, medium)

    @rule(prompt=prompts, medium=media)
    def offload_larger_blocks(self, prompt: str, medium: str) -> None:
        self.event(stored([block_of(prompt)], tokens_of(prompt[-1]), block_size=2 * BLOCK, medium=medium))
        self.reject(prompt, medium)

    @rule(prompt=prompts, medium=media)
    def remove(self, prompt: str, medium: str) -> None:
        self.event(remove(prompt, medium=medium))
        if prompt in self.told and (prompt, medium) not in self.copies:
            self.copies |= {copy: (count, False) for copy, (count, _) in self.copies.items() if copy[0] == prompt}
            return
        count, _ = self.copies.get((prompt, medium), (0, False))
        if count:
            self.copies[prompt, medium] = (count - 1, False)
            self.changed[prompt] = self.now
            self.drop(prompt)

    def drop(self, block: str) -> None:
        """Of a block that no medium has only that is known, until it is told anew."""
        copies = {copy: count for copy, (count, _) in self.copies.items() if copy[0] == block}
        if block in self.told and copies and not any(copies.values()):
            for copy in copies:
                del self.copies[copy]
            self.told.discard(block)
            self.removed[block] = self.now
            if len(block) % 2 == 0:
                self.gone[block] = self.now

    @rule(prompt=prompts)
    def contradict(self, prompt: str) -> None:
        if prompt in self.told:
            self.event(store(prompt, len(prompt) - 1, token_ids=[-1, -1]))
            self.lose()

    @rule(medium=media)
    def clear_tier(self, medium: str) -> None:
        self.event({"type": "TierBlocksCleared", "medium": medium})
        for block, of in self.copies:
            if of == medium and self.copies[block, of][0]:
                self.copies[block, of] = (0, False)
                self.changed[block] = self.now
        for block in list(self.told):
            self.drop(block)

    @rule(seldom=seldom)
    def clear(self, seldom: int) -> None:
        if seldom:
            return
        self.event(CLEARED)
        self.gone |= {block: self.now for block in self.told if len(block) % 2 == 0}
        for known in (self.told, self.copies, self.removed):
            known.clear()
        self.complete = True

    @rule(seldom=seldom)
    def forget(self, seldom: int) -> None:
        if seldom:
            return
        self.table.forget()
        self.lose()

    def lose(self) -> None:
        for known in (self.told, self.copies, self.removed, self.gone, self.noted):
            known.clear()
        self.complete = False

    @rule(prompt=prompts)
    def note(self, prompt: str) -> None:
        chunks = {prompt[:end] for end in range(2, len(prompt) + 1, 2)}
        self.table.note_stored(names_of(prompt[: len(prompt) // 2 * 2]))
        self.noted |= {chunk: self.now for chunk in chunks if chunk in self.told or chunk in self.gone}

    def block_state(self, block: str, noted: int) -> Presence:
        if block in self.removed:
            return ABSENT if self.removed[block] > noted else UNKNOWN
        copies = [copy for (of, _), copy in self.copies.items() if of == block]
        if not copies:
            return UNKNOWN
        if any(sure for _, sure in copies):
            return PRESENT
        if any(count for count, _ in copies):
            return UNKNOWN
        return ABSENT if self.changed[block] > noted else UNKNOWN

    def expected(self, chunk: str) -> Presence | None:
        noted = self.noted.get(chunk, 0)
        if chunk in self.told:
            states = {self.block_state(chunk[:-1], noted), self.block_state(chunk, noted)}
            return ABSENT if ABSENT in states else UNKNOWN if UNKNOWN in states else PRESENT
        if chunk in self.gone:
            return ABSENT if self.gone[chunk] > noted else UNKNOWN
        return NEVER if self.complete else UNKNOWN

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "table"):
            return
        for prompt in self.whole:
            expected = [self.expected(prompt[:end]) for end in range(2, len(prompt) + 1, 2)]
            assert ask(self.table, prompt) == expected


TestMachine = Machine.TestCase
