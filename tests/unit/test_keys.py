"""Tests of hs_cache.keys: the format of the keys, what makes them differ, and what is accepted as token ids."""

import dataclasses
import hashlib
import json
import os
import pickle
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import hs_cache.keys
from hs_cache.errors import InvalidInputError
from hs_cache.keys import KEY_BYTES, ChunkKeys, KeySpace, MMSpan, TokenDatabase, normalise_token_ids

FULL_SPACE: dict[str, Any] = {
    "model": "Qwen/Qwen3-Omni-30B-A3B-Instruct",
    "model_revision": "26291f7",
    "lora_id": "läufer",
    "cache_salt": "tenant-7",
    "shard": "tp0of2",
}
TOKENS = [0, 1, -1, -2, 2**63 - 1, -(2**63), 151643, 151644, 151645, 11]
SPANS: list[MMSpan] = [(5, 3, b"\x00\xff"), (2, 2, "clip"), (8, 40, -(2**80))]
EXTRAS: list[list[str | bytes | int] | None] = [["a", b"a", 255], None, [0, -128, 128, ""]]

GOLDEN_FINGERPRINTS = {
    "default": "6edea304a4e3d6030b3ef56015b93838",
    "full": "924ef40d508ce2688d391e3fd9b657d5",
}
GOLDEN_KEYS = {
    "default space, chunk 256": "774c934ea71840f38b315472142d4f96d4dc26fb0a8f21b9f05ee20614d6e948",
    "full space, chunk 4, partial tail": (
        "48a7bf1530e037f68f438308593f6bf2a17a8ee8cb58620072767ae039c1fe4fde1ae40a9fafe405ddbd003bb3022048"
    ),
    "full space, chunk 4, spans and extra keys": (
        "11548a99ff98acdf4b0397c502563ac04c847d8887331951ae37d474645c86322a0577f99701d778fb7f81df22bacf00"
    ),
}


def make_db(*, chunk_size: int = 4, save_unfull_chunk: bool = False, **fields: str) -> TokenDatabase:
    return TokenDatabase(KeySpace(chunk_size=chunk_size, **fields), save_unfull_chunk=save_unfull_chunk)


def make_golden() -> dict[str, ChunkKeys]:
    full = make_db(**FULL_SPACE, save_unfull_chunk=True)
    default, tail, extras = GOLDEN_KEYS
    return {
        default: make_db(chunk_size=256).chunk_keys(range(600)),
        tail: full.chunk_keys(TOKENS),
        extras: full.chunk_keys(TOKENS, mm_spans=SPANS, extra_keys=EXTRAS),
    }


# The format once more, written down as plainly as it can be and sharing nothing with the module.


def plain_item(value: str | bytes | int) -> bytes:
    if isinstance(value, str):
        tag, payload = b"s", value.encode()
    elif isinstance(value, bytes):
        tag, payload = b"b", value
    else:
        n = 1
        while not -(1 << (8 * n - 1)) <= value < 1 << (8 * n - 1):
            n += 1
        tag, payload = b"i", (value % (1 << (8 * n))).to_bytes(n, "little")
    return tag + struct.pack("<Q", len(payload)) + payload


def plain_fingerprint(fields: dict[str, str], chunk_size: int) -> bytes:
    text = b"hs_cache.keys/1"
    for name in ("model", "model_revision", "lora_id", "cache_salt", "shard"):
        text += plain_item(name) + plain_item(fields.get(name, ""))
    return hashlib.sha256(text + plain_item("chunk_size") + plain_item(chunk_size)).digest()[:16]


def plain_keys(
    fields: dict[str, str], chunk_size: int, tokens: list[int], spans: Any = (), extra_keys: Any = None
) -> bytes:
    """Give the keys of all chunks, a short last one included."""
    key, blob = plain_fingerprint(fields, chunk_size), b""
    for chunk, first in enumerate(range(0, len(tokens), chunk_size)):
        ids = tokens[first : first + chunk_size]
        extras = b""
        for start, length, content in sorted(spans, key=lambda span: span[0]):
            if set(range(start, start + length)) & set(range(first, first + chunk_size)):
                payload = plain_item(start) + plain_item(length) + plain_item(content)
                extras += b"m" + struct.pack("<Q", len(payload)) + payload
        for value in (extra_keys[chunk] or ()) if extra_keys else ():
            extras += plain_item(value)
        text = key + struct.pack("<Q", 8 * len(ids)) + struct.pack(f"<{len(ids)}q", *ids)
        key = hashlib.sha256(text + struct.pack("<Q", len(extras)) + extras).digest()[:16]
        blob += key
    return blob


class TestFormat:
    def test_golden_fingerprints(self) -> None:
        assert KeySpace().fingerprint.hex() == GOLDEN_FINGERPRINTS["default"]
        assert KeySpace(chunk_size=4, **FULL_SPACE).fingerprint.hex() == GOLDEN_FINGERPRINTS["full"]

    def test_golden_fingerprints_follow_the_written_format(self) -> None:
        assert plain_fingerprint({}, 256).hex() == GOLDEN_FINGERPRINTS["default"]
        assert plain_fingerprint(FULL_SPACE, 4).hex() == GOLDEN_FINGERPRINTS["full"]

    @pytest.mark.parametrize("name", GOLDEN_KEYS)
    def test_golden_keys(self, name: str) -> None:
        assert make_golden()[name].blob.hex() == GOLDEN_KEYS[name]

    def test_golden_keys_follow_the_written_format(self) -> None:
        default, tail, extras = GOLDEN_KEYS.values()
        assert plain_keys({}, 256, list(range(512))).hex() == default
        assert plain_keys(FULL_SPACE, 4, TOKENS).hex() == tail
        assert plain_keys(FULL_SPACE, 4, TOKENS, SPANS, EXTRAS).hex() == extras

    def test_long_chunks_that_are_hashed_in_steps(self) -> None:
        tokens = list(range(-300, 1300))
        assert make_db(chunk_size=700, save_unfull_chunk=True).chunk_keys(tokens).blob == plain_keys({}, 700, tokens)

    @given(
        st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20),
        st.integers(1, 7),
        st.dictionaries(st.sampled_from(list(FULL_SPACE)), st.text(max_size=5)),
        st.lists(
            st.tuples(st.integers(0, 6), st.integers(1, 9), st.text() | st.binary() | st.integers(-(2**90), 2**90)),
            max_size=4,
        ),
    )
    def test_any_input_follows_the_written_format(
        self, tokens: list[int], chunk_size: int, fields: dict[str, Any], gaps: list[tuple[int, int, Any]]
    ) -> None:
        spans, end = [], 0
        for gap, length, content in gaps:
            spans.append((end + gap, length, content))
            end += gap + length
        keys = make_db(chunk_size=chunk_size, save_unfull_chunk=True, **fields).chunk_keys(tokens, mm_spans=spans[::-1])
        assert keys.blob == plain_keys(fields, chunk_size, tokens, spans)

    def test_same_keys_in_processes_with_other_hash_seeds(self) -> None:
        code = (
            "import json, sys; sys.path.insert(0, sys.argv[1]); import test_keys as t; "
            "print(json.dumps([hash('x'), {name: keys.blob.hex() for name, keys in t.make_golden().items()}]))"
        )
        answers = []
        for seed in ("1", "2", None):
            environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
            here = Path(__file__).parent
            environment["PYTHONPATH"] = str(here.parents[1])
            command = [sys.executable, "-c", code, str(here)]
            output = subprocess.run(
                command,
                env=environment if seed is None else environment | {"PYTHONHASHSEED": seed},
                check=True,
                capture_output=True,
                timeout=60,
            )
            answers.append(json.loads(output.stdout))
        assert len({seed_hash for seed_hash, _ in answers}) > 1
        assert [keys for _, keys in answers] == [GOLDEN_KEYS] * 3

    def test_module_imports_without_torch_and_ray(self) -> None:
        code = (
            "import sys; sys.modules['torch'] = sys.modules['ray'] = None; from hs_cache.keys import *; "
            "print(TokenDatabase(KeySpace()).chunk_keys(range(512)).blob.hex())"
        )
        root = str(Path(__file__).parents[2])
        output = subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONPATH": root},
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert output.stdout.strip() == GOLDEN_KEYS["default space, chunk 256"]


class TestWhatDiffers:
    @pytest.mark.parametrize("field", FULL_SPACE)
    def test_each_field_alone_changes_every_key(self, field: str) -> None:
        plain, changed = (make_db(**dict[str, Any]({field: value})).chunk_keys(range(12)) for value in ("", "S"))
        assert len(plain) == len(changed) == 3
        assert set(plain).isdisjoint(changed)

    def test_the_same_value_in_different_fields_differs(self) -> None:
        keys = [make_db(**dict[str, Any]({field: "S"})).chunk_keys(range(4)).blob for field in FULL_SPACE]
        assert len(set(keys)) == len(FULL_SPACE)

    def test_chunk_size_alone_changes_the_fingerprint(self) -> None:
        assert KeySpace(chunk_size=4).fingerprint != KeySpace(chunk_size=5).fingerprint

    @pytest.mark.parametrize("pair", list(zip(list(FULL_SPACE)[:-1], list(FULL_SPACE)[1:], strict=True)))
    def test_characters_moved_to_the_next_field_differ(self, pair: tuple[str, str]) -> None:
        left, right = pair
        splits = [("abc", ""), ("ab", "c"), ("a", "bc"), ("", "abc")]
        assert len({KeySpace(**dict[str, Any]({left: a, right: b})).fingerprint for a, b in splits}) == len(splits)

    def test_lone_surrogates_are_taken_and_differ(self) -> None:
        models = ["\ud83d", "\udc80", "\ud83d\ude00", "\U0001f600", "?"]
        assert len({KeySpace(model=model).fingerprint for model in models}) == len(models)

    def test_tokens_minus_one_and_minus_two_differ(self) -> None:
        db = make_db()
        assert set(db.chunk_keys([-1] * 4)).isdisjoint(db.chunk_keys([-2] * 4))

    def test_a_chunk_is_named_with_everything_before_it(self) -> None:
        db = make_db()
        a, b = db.chunk_keys([1, 2, 3, 4, 9, 9, 9, 9]), db.chunk_keys([1, 2, 3, 5, 9, 9, 9, 9])
        assert a[1] != b[1]
        assert len(set(db.chunk_keys([7] * 12))) == 3

    def test_partial_chunk_differs_from_the_full_one_and_by_length(self) -> None:
        db = make_db(save_unfull_chunk=True)
        tails = [db.chunk_keys([1, 2, 3, 4, 0, 0, 0, 0][:n])[1] for n in range(5, 9)]
        assert len(set(tails)) == len(tails)

    def test_save_unfull_chunk_leaves_full_chunks_alone(self) -> None:
        without, with_tail = (make_db(save_unfull_chunk=tail).chunk_keys(range(6)) for tail in (False, True))
        assert (len(without), without.num_tokens, len(with_tail), with_tail.num_tokens) == (1, 4, 2, 6)
        assert with_tail[0] == without[0]

    @given(
        st.lists(st.lists(st.integers(-3, 3), max_size=9), min_size=2, max_size=2, unique_by=tuple), st.integers(1, 4)
    )
    def test_different_tokens_share_keys_exactly_as_far_as_they_agree(
        self, prompts: list[list[int]], chunk_size: int
    ) -> None:
        a, b = (make_db(chunk_size=chunk_size, save_unfull_chunk=True).chunk_keys(prompt) for prompt in prompts)
        cut_a, cut_b = ([p[i : i + chunk_size] for i in range(0, len(p), chunk_size)] for p in prompts)
        agree = next((i for i, (x, y) in enumerate(zip(cut_a, cut_b, strict=False)) if x != y), min(len(a), len(b)))
        assert list(a)[:agree] == list(b)[:agree]
        assert set(list(a)[agree:]).isdisjoint(list(b)[agree:])

    @given(st.lists(st.text(max_size=3), min_size=10, max_size=10))
    def test_different_key_spaces_differ(self, values: list[str]) -> None:
        assume(values[:5] != values[5:])
        a, b = (KeySpace(**dict[str, Any](zip(FULL_SPACE, part, strict=True))) for part in (values[:5], values[5:]))
        assert a.fingerprint != b.fingerprint

    def test_extras_cannot_pass_for_tokens(self) -> None:
        db = make_db(chunk_size=2, save_unfull_chunk=True)
        as_extra = db.chunk_keys([1], extra_keys=[[struct.pack("<q", 2)]])
        as_token = db.chunk_keys([1, 2], extra_keys=[[]])
        assert as_extra.blob != as_token.blob


class TestSpans:
    def test_another_clip_differs_from_its_first_chunk_on(self) -> None:
        a, b = (make_db().chunk_keys([5] * 20, mm_spans=[(9, 6, clip)]) for clip in ("clip a", "clip b"))
        assert list(a)[:2] == list(b)[:2]
        assert set(list(a)[2:]).isdisjoint(list(b)[2:])

    def test_a_span_enters_every_chunk_that_it_overlaps_and_no_other(self) -> None:
        # The chain changes all later keys too: only the written format tells which chunks the span itself entered.
        db = make_db()
        plain = plain_keys({}, 4, [5] * 20)
        spanned = db.chunk_keys([5] * 20, mm_spans=[(7, 6, "x")]).blob
        assert spanned == plain_keys({}, 4, [5] * 20, [(7, 6, "x")])
        assert spanned[:16] == plain[:16]
        assert spanned[16:32] != plain[16:32]

    @pytest.mark.parametrize("other", [(5, 3, "x"), (4, 4, "x"), (4, 2, "x"), (4, 3, "y"), (4, 3, "x\0")])
    def test_start_length_and_hash_all_count(self, other: tuple[int, int, str]) -> None:
        a, b = (make_db().chunk_keys([5] * 8, mm_spans=[span]) for span in ((4, 3, "x"), other))
        assert a[0] == b[0]
        assert a[1] != b[1]

    def test_content_hashes_are_told_apart_by_type_and_at_full_width(self) -> None:
        contents: list[str | bytes | int] = [
            1,
            "1",
            b"1",
            49,
            -1,
            255,
            -129,
            2**64 + 1,
            2**200 + 1,
            0,
            "",
            b"",
            "\x01",
            b"\x01",
            128,
            -128,
        ]
        keys = {make_db().chunk_keys([5] * 4, mm_spans=[(0, 4, content)]).blob for content in contents}
        assert len(keys) == len(contents)

    def test_order_and_numpy_integers_do_not_matter(self) -> None:
        db = make_db()
        spans: list[MMSpan] = [(0, 2, "a"), (2, 3, "b"), (9, 1, 7)]
        keys = db.chunk_keys(range(12), mm_spans=spans)
        assert db.chunk_keys(range(12), mm_spans=iter(spans[::-1])) == keys
        numpy_spans: list[Any] = [(np.int32(start), np.uint64(length), content) for start, length, content in spans[:2]]
        numpy_spans.append((9, 1, np.int64(7)))
        assert db.chunk_keys(range(12), mm_spans=numpy_spans) == keys

    def test_a_shorter_prefix_of_a_prompt_with_spans_has_the_same_keys(self) -> None:
        spans = [(2, 3, "a"), (6, 9, "b"), (17, 100, "c"), (200, 1, "d")]
        keys = make_db().chunk_keys([5] * 20, mm_spans=spans)
        for n in range(21):
            shorter = make_db().chunk_keys([5] * n, mm_spans=spans)
            assert shorter.blob == keys.blob[: n // 4 * KEY_BYTES]

    def test_a_span_beyond_the_tokens_changes_nothing(self) -> None:
        assert make_db().chunk_keys([5] * 8, mm_spans=[(8, 4, "x")]) == make_db().chunk_keys([5] * 8)

    @pytest.mark.parametrize(
        "spans",
        [
            [(0, 4, "a"), (3, 2, "b")],
            [(3, 2, "b"), (0, 9, "a")],
            [(2, 1, "a"), (2, 1, "a")],
            [(-1, 4, "a")],
            [(0, 0, "a")],
            [(0, -1, "a")],
            [(0, 2**63, "a")],
            [(0, 4)],
            [(0, 4, "a", 1)],
            (0, 4, "a"),
            ["abc"],
            [None],
            [(True, 4, "a")],
            [(0, True, "a")],
            [(0, np.True_, "a")],
            [(0.0, 4, "a")],
            [(0, 4, True)],
            [(0, 4, 1.0)],
            [(0, 4, None)],
            [(0, 4, ["a"])],
            [(0, 4, bytearray(b"a"))],
            None,
            7,
        ],
        ids=repr,
    )
    def test_wrong_spans_are_refused(self, spans: Any) -> None:
        with pytest.raises(InvalidInputError, match=r"^mm_spans"):
            make_db().chunk_keys([5] * 8, mm_spans=spans)


class TestExtraKeys:
    def test_they_count_from_their_chunk_on(self) -> None:
        db = make_db()
        a, b = (db.chunk_keys([5] * 12, extra_keys=[(), (extra,), None]) for extra in ("x", "y"))
        assert a[0] == b[0]
        assert set(list(a)[1:]).isdisjoint(list(b)[1:])

    def test_no_entries_are_the_same_as_none(self) -> None:
        assert make_db().chunk_keys([5] * 8, extra_keys=[None, ()]) == make_db().chunk_keys([5] * 8)

    def test_boundaries_order_and_types_count(self) -> None:
        entries: list[list[str | bytes | int]] = [
            ["ab", "c"],
            ["a", "bc"],
            ["abc"],
            ["c", "ab"],
            [b"ab", "c"],
            [1],
            ["1"],
        ]
        keys = {make_db().chunk_keys([5] * 4, extra_keys=[entry]).blob for entry in entries}
        assert len(keys) == len(entries)

    def test_they_cannot_pass_for_a_span(self) -> None:
        db = make_db()
        span = db.chunk_keys([5] * 4, mm_spans=[(0, 4, "x")])
        payload = plain_item(0) + plain_item(4) + plain_item("x")
        imitations: list[list[str | bytes | int]] = [
            [0, 4, "x"],
            [payload],
            [b"m" + struct.pack("<Q", len(payload)) + payload],
        ]
        for extras in imitations:
            assert db.chunk_keys([5] * 4, extra_keys=[extras]) != span

    @pytest.mark.parametrize(
        "extra_keys",
        [
            [],
            [["a"]],
            [["a"]] * 3,
            "ab",
            b"ab",
            ["a", "b"],
            [b"a", b"b"],
            [1, 2],
            [[True], []],
            [[None], []],
            7,
            [[1.0], []],
        ],
        ids=repr,
    )
    def test_wrong_ones_are_refused(self, extra_keys: Any) -> None:
        with pytest.raises(InvalidInputError, match=r"^extra_keys"):
            make_db().chunk_keys([5] * 8, extra_keys=extra_keys)


class TestPrefixProperty:
    @given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=40), st.integers(1, 9), st.data())
    def test_keys_of_a_prefix_are_a_prefix_of_the_keys(
        self, tokens: list[int], chunk_size: int, data: st.DataObject
    ) -> None:
        n = data.draw(st.integers(0, len(tokens)))
        db = make_db(chunk_size=chunk_size)
        keys, shorter = db.chunk_keys(tokens), db.chunk_keys(tokens[:n])
        assert len(shorter) == n // chunk_size
        assert shorter.blob == keys.blob[: len(shorter.blob)]

    @pytest.mark.parametrize("save_unfull_chunk", [False, True])
    def test_a_prefix_that_grows_has_the_keys_of_one_that_was_long_at_once(self, save_unfull_chunk: bool) -> None:
        spans = [(3, 9, "image"), (20, 1, 7)]
        for space in (KeySpace(chunk_size=4), KeySpace(chunk_size=4, cache_salt="x")):
            db, tokens = TokenDatabase(space, save_unfull_chunk=save_unfull_chunk), list(range(30))
            for first in range(0, 29, 4):
                known = db.chunk_keys(tokens[:first], mm_spans=spans)
                for end in range(first, 31):
                    grown = db.extend_keys(known, tokens[first:end], mm_spans=spans)
                    assert grown == db.chunk_keys(tokens[:end], mm_spans=spans)

    def test_only_full_chunks_can_be_extended(self) -> None:
        db = TokenDatabase(KeySpace(chunk_size=4), save_unfull_chunk=True)
        with pytest.raises(InvalidInputError, match="keys: got 6 tokens in chunks of 4, expected full chunks of 4"):
            db.extend_keys(db.chunk_keys(range(6)), [1])
        other = TokenDatabase(KeySpace(chunk_size=8))
        with pytest.raises(InvalidInputError, match="keys: got 8 tokens in chunks of 8, expected full chunks of 4"):
            db.extend_keys(other.chunk_keys(range(8)), [1])

    def test_a_slice_of_keys_is_a_list_of_them(self) -> None:
        keys = make_db(chunk_size=2).chunk_keys(range(9))
        assert keys[1:] == list(keys)[1:]
        assert keys[:-1] == list(keys)[:3]


class TestTokenIds:
    @pytest.mark.parametrize(
        "dtype", ["i1", "u1", "<i2", ">i2", "<u2", "<i4", ">i4", ">u4", "<i8", ">i8", "<u8", ">u8"]
    )
    def test_every_numpy_integer_dtype(self, dtype: str) -> None:
        ids = normalise_token_ids(np.arange(100).astype(dtype))
        assert ids.dtype.str == "<i8"
        assert ids.tolist() == list(range(100))

    @pytest.mark.parametrize(
        "token_ids",
        [
            [3, 1, 0],
            (3, 1, 0),
            [np.int64(3), np.uint8(1), 0],
            [np.array(3), 1, 0],
            np.array([3, 9, 1, 9, 0])[::2],
            np.array([0, 1, 3])[::-1],
            np.array([[3, 9], [1, 9], [0, 9]])[:, 0],
        ],
        ids=repr,
    )
    def test_every_form_gives_the_same(self, token_ids: Any) -> None:
        ids = normalise_token_ids(token_ids)
        assert ids.dtype.str == "<i8"
        assert ids.flags.c_contiguous
        assert ids.tolist() == [3, 1, 0]

    def test_ranges_and_other_sequences(self) -> None:
        class Constant(list[int]):
            pass

        assert normalise_token_ids(range(5, -5, -3)).tolist() == [5, 2, -1, -4]
        assert normalise_token_ids(Constant([1, 2])).tolist() == [1, 2]

    def test_the_ends_of_int64(self) -> None:
        ends = [-(2**63), 2**63 - 1]
        assert normalise_token_ids(ends).tolist() == ends
        assert normalise_token_ids(np.array([2**63 - 1], dtype=np.uint64)).tolist() == [2**63 - 1]

    @pytest.mark.parametrize("token_ids", [[], (), range(0), np.array([], dtype=np.int32)], ids=repr)
    @pytest.mark.parametrize("save_unfull_chunk", [False, True])
    def test_no_tokens_give_no_keys(self, token_ids: Any, save_unfull_chunk: bool) -> None:
        keys = make_db(save_unfull_chunk=save_unfull_chunk).chunk_keys(token_ids, mm_spans=[(0, 4, "x")])
        assert (len(keys), keys.blob, keys.num_tokens, list(keys)) == (0, b"", 0, [])

    @pytest.mark.parametrize(
        ("token_ids", "came"),
        [
            (None, "NoneType"),
            (7, "int"),
            ("1234", "str"),
            (b"1234", "bytes"),
            (bytearray(b"1234"), "bytearray"),
            ({1: 2}, "dict"),
            ({1, 2}, "set"),
            (iter([1, 2]), "list_iterator"),
            ([1, 2.0], "float at index 1"),
            ([1, np.float32(2)], "float32 at index 1"),
            ([1, None], "NoneType at index 1"),
            ([1, "2"], "str at index 1"),
            ([[1, 2], [3, 4]], "list at index 0"),
            ([np.array([1]), np.array([2])], "1-D item at index 0"),
            ([2, 3, True], "bool at index 2"),
            ([0, 1, 5, False], "bool at index 3"),
            ([2, np.True_], "bool"),
            ([2, np.array(True)], "index 1"),
            ([2**63], "outside int64 at index 0"),
            ([5, -(2**63) - 1], "outside int64 at index 1"),
            (range(2**63 - 2, 2**63 + 2), "range"),
            (range(2**70), "range"),
            (np.array([1.0]), "float64"),
            (np.array([True]), "bool"),
            (np.array([1], dtype=object), "object"),
            (np.array(["1"]), "<U1"),
            (np.array([1], dtype="m8[s]"), "timedelta64"),
            (np.array(5), "0-D"),
            (np.int64(5), "int64"),
            (np.zeros((2, 2), dtype=np.int64), "2-D"),
            (np.array([1, 2**63], dtype=np.uint64), "9223372036854775808 at index 1"),
        ],
        ids=repr,
    )
    def test_anything_else_is_refused_with_what_came_and_what_was_expected(self, token_ids: Any, came: str) -> None:
        with pytest.raises(InvalidInputError, match=r"^token_ids: got .*expected a sequence of ints") as caught:
            make_db().chunk_keys(token_ids)
        assert came in str(caught.value)
        assert isinstance(caught.value, ValueError)

    @pytest.mark.parametrize("dtype", ["<i8", ">i4", "<u8"])
    def test_read_only_arrays_are_taken_and_left_alone(self, dtype: str) -> None:
        tokens = np.arange(8).astype(dtype)
        tokens.setflags(write=False)
        assert make_db().chunk_keys(tokens) == make_db().chunk_keys(range(8))
        assert tokens.tolist() == list(range(8))


class TestTensors:
    @pytest.fixture
    def torch(self) -> Any:
        return pytest.importorskip("torch")

    @pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"])
    def test_every_integer_dtype(self, torch: Any, dtype: str) -> None:
        tensor = torch.arange(8).to(getattr(torch, dtype))
        assert make_db().chunk_keys(tensor) == make_db().chunk_keys(range(8))

    def test_views_parameters_and_scalars_in_a_list(self, torch: Any) -> None:
        expected = make_db().chunk_keys(range(8))
        assert make_db().chunk_keys(torch.arange(16).reshape(8, 2)[:, 0] // 2) == expected
        assert make_db().chunk_keys(torch.arange(24)[::3] // 3) == expected
        assert make_db().chunk_keys(torch.nn.Parameter(torch.arange(8), requires_grad=False)) == expected
        assert make_db().chunk_keys(list(torch.arange(8))) == expected
        assert len(make_db().chunk_keys(torch.tensor([], dtype=torch.int64))) == 0

    @pytest.mark.parametrize(
        ("expression", "came"),
        [
            ("torch.tensor(5)", "0-D"),
            ("torch.zeros(2, 2, dtype=torch.int64)", "2-D"),
            ("torch.zeros(4)", "float32"),
            ("torch.zeros(4, dtype=torch.bfloat16, requires_grad=True)", "bfloat16"),
            ("torch.zeros(4, dtype=torch.bool)", "bool"),
            ("torch.zeros(4, dtype=torch.complex64)", "complex64"),
            ("torch.zeros(4, dtype=torch.int64, device='meta')", "meta"),
            ("torch.zeros(4, dtype=torch.int64).to_sparse()", "sparse"),
            ("torch.tensor([1, 2**63], dtype=torch.uint64)", "9223372036854775808 at index 1"),
            ("[2, torch.tensor(True)]", "Tensor at index 1"),
            ("list(torch.zeros(4, 1, dtype=torch.int64))", "1-D item"),
            ("[torch.tensor(1.5)]", "Tensor at index 0"),
        ],
    )
    def test_other_tensors_are_refused(self, torch: Any, expression: str, came: str) -> None:
        token_ids = eval(expression, {"torch": torch})
        with pytest.raises(InvalidInputError, match=r"^token_ids: got ") as caught:
            make_db().chunk_keys(token_ids)
        assert came in str(caught.value)


class TestKeySpace:
    @pytest.mark.parametrize("field", FULL_SPACE)
    @pytest.mark.parametrize("value", [None, b"x", 7])
    def test_wrong_types_are_refused(self, field: str, value: Any) -> None:
        with pytest.raises(InvalidInputError, match=f"^{field}: got {type(value).__name__}, expected str$"):
            KeySpace(**{field: value})

    @pytest.mark.parametrize("value", [0, -1, 2**63, True, 256.0, "256", None])
    def test_wrong_chunk_sizes_are_refused(self, value: Any) -> None:
        with pytest.raises(InvalidInputError, match=r"^chunk_size: got "):
            KeySpace(chunk_size=value)

    def test_the_salt_is_not_shown(self) -> None:
        space = KeySpace(model="m", cache_salt="very-secret")
        assert "very-secret" not in repr(space) + str(space)
        assert "model='m'" in repr(space)

    def test_numpy_integers_become_plain_ones(self) -> None:
        size: Any = np.int16(4)
        space = KeySpace(chunk_size=size)
        assert type(space.chunk_size) is int
        assert space == KeySpace(chunk_size=4)

    def test_it_is_frozen_compared_by_value_and_replaceable(self) -> None:
        space = KeySpace(**FULL_SPACE)
        assert space == KeySpace(**FULL_SPACE)
        assert hash(space) == hash(KeySpace(**FULL_SPACE))
        with pytest.raises(dataclasses.FrozenInstanceError):
            space.model = "other"  # type: ignore[misc]
        assert (
            dataclasses.replace(space, lora_id="").fingerprint == KeySpace(**FULL_SPACE | {"lora_id": ""}).fingerprint
        )

    @pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
    def test_pickling(self, protocol: int) -> None:
        db = make_db(**FULL_SPACE, save_unfull_chunk=True)
        keys = db.chunk_keys(TOKENS)
        space, copy, keys_copy = pickle.loads(pickle.dumps((db.space, db, keys), protocol))
        assert (space, space.fingerprint) == (db.space, db.space.fingerprint)
        assert (copy.chunk_keys(TOKENS), keys_copy) == (keys, keys)


class TestTokenDatabase:
    def test_wrong_arguments_are_refused(self) -> None:
        space: Any = {"model": "m"}
        with pytest.raises(InvalidInputError, match=r"^space: got dict"):
            TokenDatabase(space)
        flag: Any = 1
        with pytest.raises(InvalidInputError, match=r"^save_unfull_chunk: got int"):
            TokenDatabase(KeySpace(), save_unfull_chunk=flag)


class TestChunkKeys:
    def test_it_is_a_sequence_of_16_byte_keys(self) -> None:
        keys = make_db(save_unfull_chunk=True).chunk_keys(range(10))
        assert len(keys) == 3
        assert list(keys) == [keys[0], keys[1], keys[2]] == [keys.blob[i : i + 16] for i in (0, 16, 32)]
        assert keys[-1] == keys[2]
        for outside in (3, -4):
            with pytest.raises(IndexError):
                keys[outside]

    def test_token_counts(self) -> None:
        keys = make_db(save_unfull_chunk=True).chunk_keys(range(10))
        assert [keys.tokens_in(chunk) for chunk in (0, 1, 2, -1)] == [4, 4, 2, 2]
        assert [keys.tokens_before(n) for n in range(4)] == [0, 4, 8, 10]
        for outside in (-1, 4):
            with pytest.raises(IndexError):
                keys.tokens_before(outside)
        with pytest.raises(IndexError):
            keys.tokens_in(3)

    @pytest.mark.parametrize(
        ("blob", "num_tokens", "chunk_size", "named"),
        [
            (bytes(16), 5, 4, "blob"),
            (bytes(32), 4, 4, "blob"),
            (bytes(15), 4, 4, "blob"),
            (bytearray(16), 4, 4, "blob"),
            (bytes(16), -1, 4, "num_tokens"),
            (bytes(16), True, 4, "num_tokens"),
            (bytes(16), 4.0, 4, "num_tokens"),
            (bytes(16), 4, 0, "chunk_size"),
        ],
    )
    def test_parts_that_do_not_fit_are_refused(self, blob: Any, num_tokens: Any, chunk_size: int, named: str) -> None:
        with pytest.raises(InvalidInputError, match=f"^{named}: got "):
            ChunkKeys(blob, num_tokens, chunk_size)


def test_all_names_the_public_names() -> None:
    own = {
        name
        for name, value in vars(hs_cache.keys).items()
        if getattr(value, "__module__", None) == "hs_cache.keys" and not name.startswith("_")
    }
    assert own | {"KEY_BYTES", "ExtraKeys", "MMSpan", "TokenIds"} == set(hs_cache.keys.__all__)
