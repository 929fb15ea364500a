"""The table of blocks: what is present, absent or unknown after which events."""

import logging
import threading
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hs_cache.kv_presence import Presence
from hs_cache.vllm_blocks import BlockTable
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
def test_a_hash_that_was_told_of_something_else_is_unknown(contradiction: dict[str, Any]) -> None:
    table = make_table()
    tell(table, store("abcd"), contradiction)
    assert ask(table, "abcd") == [UNKNOWN, PRESENT]
    tell(table, store("ab"))
    assert ask(table, "abcd") == [UNKNOWN, PRESENT]
    tell(table, CLEARED, store("ab"))
    assert ask(table, "ab") == [PRESENT]


def test_a_chunk_size_that_is_no_multiple_is_said_once_and_all_is_unknown(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        table = make_table(block_size=3)
        tell(table, store("ab", block_size=3), store("abcd", block_size=3))
    assert [record.getMessage() for record in caplog.records] == [
        "KV events: the engine at test has blocks of 3 tokens, and chunk_size 4 is no multiple, so all KV is unknown"
    ]
    assert ask(table, "ab") == [UNKNOWN]


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
    assert len(table._copies) <= 3


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
        self.doubtful: set[str] = set()
        self.copies: dict[tuple[str, str], tuple[int, bool]] = {}  # how many at most, and whether there is one for sure
        self.changed: dict[str, int] = {}
        self.gone: dict[str, int] = {}
        self.noted: dict[str, int] = {}
        self.complete = True

    def event(self, *events: dict[str, Any]) -> None:
        tell(self.table, *events)
        self.now += len(events)

    def takes(self, prompt: str, known: int) -> bool:
        return not known or (prompt[:known] in self.told and prompt[:known] not in self.doubtful)

    @rule(prompt=prompts, known=st.integers(0, 5), medium=media)
    def store(self, prompt: str, known: int, medium: str) -> None:
        known = min(known, len(prompt) - 1)
        self.event(store(prompt, known, medium=medium))
        for at in range(known, len(prompt)):
            block = prompt[: at + 1]
            if block in self.doubtful or not (block in self.told or self.takes(prompt, at)):
                self.doubtful |= {prompt[: i + 1] for i in range(at, len(prompt))} & self.told
                self.complete = False
                return
            self.told.add(block)
            self.removed.pop(block, None)
            count, _ = self.copies.get((block, medium), (0, False))
            self.copies[block, medium] = (count + 1, True)
            self.changed[block] = self.now
            if len(block) % 2 == 0:
                self.gone.pop(block, None)

    @rule(prompt=prompts, medium=media)
    def offload(self, prompt: str, medium: str) -> None:
        self.event(stored([block_of(prompt)], [], medium=medium, extra_keys=None))
        if prompt not in self.told:
            self.complete = False
            return
        count, _ = self.copies.get((prompt, medium), (0, False))
        self.copies[prompt, medium] = (count + 1, True)
        self.changed[prompt] = self.now

    @rule(prompt=prompts, medium=media)
    def remove(self, prompt: str, medium: str) -> None:
        self.event(remove(prompt, medium=medium))
        count, _ = self.copies.get((prompt, medium), (0, False))
        if count:
            self.copies[prompt, medium] = (count - 1, False)
            self.changed[prompt] = self.now
            self.drop(prompt)

    def drop(self, block: str) -> None:
        """Of a block that no medium has only that is known, until it is told anew."""
        copies = {copy: count for copy, (count, _) in self.copies.items() if copy[0] == block}
        if block in self.told and block not in self.doubtful and copies and not any(copies.values()):
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
            self.doubtful.add(prompt)
            self.complete = False

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
        for known in (self.told, self.doubtful, self.copies, self.removed):
            known.clear()
        self.complete = True

    @rule(seldom=seldom)
    def forget(self, seldom: int) -> None:
        if seldom:
            return
        self.table.forget()
        for known in (self.told, self.doubtful, self.copies, self.removed, self.gone, self.noted):
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
        if block in self.doubtful or not copies:
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
