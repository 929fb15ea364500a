"""Messages of engines: every form that releases have had, and whatever else may come."""

from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hs_cache.errors import InvalidInputError
from hs_cache.integrations.vllm_events import decode
from hs_cache.vllm_wire import Batch, Cleared, Removed, Stored, read_batch
from tests.vllm_engine import CLEARED, Form, encode, removed, stored

FORMS: list[Form] = ["arrays", "maps", "mixed"]


def batch(*events: Any) -> dict[str, Any]:
    return {"ts": 0.0, "events": list(events)}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_says_the_same(form: Form) -> None:
    extra_keys = [("lora", ["image", -3]), None]
    events = [
        stored([1, b"h" * 32], [1, -2, 3, 4], -5, lora_id=7, lora_name="lora", extra_keys=extra_keys, group_idx=1),
        removed(b"h" * 32, group_idx=1),
        CLEARED,
    ]
    told = decode(encode(events, form=form))
    tokens = b"".join(token.to_bytes(8, "little", signed=True) for token in (1, -2, 3, 4))
    assert told.ignored == 0
    one, two, three = told.events
    assert isinstance(one, Stored)
    assert (one.hashes, one.parent, one.tokens, one.block_size) == ((1, b"h" * 32), -5, tokens, 2)
    assert (one.lora_id, one.lora_name, one.medium, one.group, one.kind) == (7, "lora", "GPU", 1, None)
    assert one.extra_keys == (["lora", ["image", -3]], None)
    assert two == Removed((b"h" * 32,), "GPU", 1)
    assert three == Cleared(None)


def test_an_old_release_tells_less() -> None:
    told = decode(msgspec.msgpack.encode([0.0, [["BlockStored", [1], None, [1, 2], 2, None], ["BlockRemoved", [1]]]]))
    assert told.events == (
        Stored(
            (1,), None, (1).to_bytes(8, "little") + (2).to_bytes(8, "little"), 2, None, None, None, None, None, None
        ),
        Removed((1,), None, None),
    )


def test_what_comes_behind_known_fields_is_left_alone() -> None:
    assert read_batch([0, [["AllBlocksCleared", None, "more"]], 3, "more"]) == Batch((Cleared(None),), 0)
    assert read_batch(batch({"type": "AllBlocksCleared", "more": 1}) | {"more": 2}) == Batch((Cleared(None),), 0)


def test_a_tier_may_be_cleared_by_itself() -> None:
    assert read_batch(batch({"type": "TierBlocksCleared", "medium": "CPU"})).events == (Cleared("CPU"),)


def test_events_of_other_types_are_counted() -> None:
    assert read_batch(batch(["BlockMoved", 1], {"type": "Heartbeat"}, CLEARED)) == Batch((Cleared(None),), 2)


@pytest.mark.parametrize(
    "message",
    [
        None,
        7,
        "text",
        b"bytes",
        [],
        [0.0],
        [0.0, None],
        [0.0, {}],
        ["now", []],
        [True, []],
        [0.0, [], "rank"],
        {},
        {"ts": 0.0},
        {"ts": 0.0, "events": 1},
        batch(1),
        batch([]),
        batch([1]),
        batch({}),
        batch({"type": 3}),
        batch(["BlockStored"]),
        batch(["BlockRemoved"]),
        batch({"type": "BlockRemoved", "block_hashes": [1], "medium": 2}),
        batch({"type": "BlockRemoved", "block_hashes": [1], "group_idx": "0"}),
        batch({"type": "TierBlocksCleared"}),
        batch(removed(1.5)),
        batch(removed("hash")),
        batch(removed(True)),
        batch(removed(None)),
        batch(removed(2**64)),
        batch(removed(b"")),
        batch(removed(b"x" * 65)),
        batch(stored([1], [1.0, 2])),
        batch(stored([1], [True, 2])),
        batch(stored([1], ["1", 2])),
        batch(stored([1], [2**63, 2])),
        batch(stored([1], [1, 2], block_size=None)),
        batch(stored([1], [1, 2], block_size=-1)),
        batch(stored([1], [1, 2], block_size=True)),
        batch(stored([1], [1, 2], block_size=2.0)),
        batch(stored([1], [1, 2], lora_id="1")),
        batch(stored([1], [1, 2], lora_name=1)),
        batch(stored([1], [1, 2], extra_keys={})),
        batch(stored([1], [1, 2], extra_keys=["image"])),
        batch(stored([1], [1, 2], kv_cache_spec_kind=1)),
        batch(stored([1], [1, 2], 1.5)),
    ],
)
def test_malformed_messages_are_refused(message: Any) -> None:
    with pytest.raises(InvalidInputError, match="got"):
        read_batch(message)


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x91" * 5000 + b"\x01", b"\xdd\xff\xff\xff\xff", b"\x01\x02"])
def test_what_is_no_msgpack_is_refused(payload: bytes) -> None:
    with pytest.raises(InvalidInputError, match="got"):
        decode(payload)


@given(st.binary(max_size=200))
def test_any_bytes_give_a_batch_or_our_error(payload: bytes) -> None:
    with suppress(InvalidInputError):
        assert isinstance(decode(payload), Batch)


VALID = encode([stored([1, 2], range(4), extra_keys=[["a", ["b", 1]], None]), removed(1, b"x"), CLEARED], form="mixed")


@given(st.integers(0, len(VALID) - 1), st.binary(min_size=1, max_size=4), st.booleans())
def test_a_damaged_message_gives_a_batch_or_our_error(at: int, junk: bytes, cut: bool) -> None:
    damaged = VALID[:at] + junk + (b"" if cut else VALID[at + len(junk) :])
    with suppress(InvalidInputError):
        assert isinstance(decode(damaged), Batch)


json_like = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=3)
    | st.binary(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["ts", "events", "type", "block_hashes", "token_ids"]), inner, max_size=5)
    ),
    max_leaves=20,
)


@given(st.lists(st.lists(st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared"]) | json_like), max_size=3))
def test_any_fields_give_a_batch_or_our_error(events: list[Any]) -> None:
    with suppress(InvalidInputError):
        assert isinstance(read_batch(batch(*events)), Batch)
