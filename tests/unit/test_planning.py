"""From a caller's arguments to a plan: what is refused, and which rows go into which chunk."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from hs_cache.errors import InvalidInputError
from hs_cache.keys import TokenDatabase
from hs_cache.messages import LayerSpec
from hs_cache.planning import check_index, check_keys, check_layers, plan_store
from tests.builders import CHUNK_SIZE, make_keys, make_space
from tests.direct import HIDDEN_DIM, make_rows


def make_database(*, save_unfull_chunk: bool = False) -> TokenDatabase:
    return TokenDatabase(make_space(), save_unfull_chunk=save_unfull_chunk)


@pytest.mark.parametrize("save_unfull_chunk", [False, True])
def test_a_plan_fills_exactly_the_chunks_of_which_every_row_is_given(save_unfull_chunk: bool) -> None:
    database = make_database(save_unfull_chunk=save_unfull_chunk)
    for num_tokens in range(3 * CHUNK_SIZE + 2):
        for offset in range(num_tokens + 1):
            tokens = list(range(100, 100 + num_tokens))
            plan = plan_store(database, None, tokens, {5: make_rows(tokens[offset:])}, offset)
            cut = num_tokens if save_unfull_chunk else num_tokens - num_tokens % CHUNK_SIZE
            starts = [start for start in range(0, cut, CHUNK_SIZE) if start >= offset]
            assert plan.num_chunks == len(starts)
            assert plan.filtered == 0
            if starts:
                assert plan.first_token == starts[0]
                assert torch.equal(plan.rows[5], make_rows(tokens[starts[0] : cut]))
                assert plan.nbytes == (cut - starts[0]) * HIDDEN_DIM * 2
                assert plan.specs == (LayerSpec(5, HIDDEN_DIM, "bfloat16"),)
                assert len(plan.keys) == -(-cut // CHUNK_SIZE)


def test_layers_that_the_configuration_does_not_accept_are_left_out() -> None:
    tokens = list(range(8))
    layers = {layer: make_rows(tokens, layer) for layer in (-1, 0, 1)}
    plan = plan_store(make_database(), (-1, 1), tokens, layers, 0)
    assert list(plan.rows) == [spec.layer_idx for spec in plan.specs] == [-1, 1]
    assert plan.filtered == 0
    nothing = plan_store(make_database(), (), tokens, layers, 0)
    assert (nothing.rows, nothing.specs, nothing.filtered) == ({}, (), 2)


def test_the_plan_takes_what_numpy_calls_an_int() -> None:
    tokens = np.arange(8)
    plan = plan_store(make_database(), None, tokens, {np.int64(2): make_rows(range(4, 8))}, np.int32(4))
    assert plan.specs == (LayerSpec(2, HIDDEN_DIM, "bfloat16"),)
    assert type(plan.specs[0].layer_idx) is int


ROWS = make_rows(range(8))
BAD_STORES: dict[str, tuple[Callable[[], tuple[Any, Any, Any]], str]] = {
    "offset below 0": (lambda: (range(8), {0: ROWS}, -1), r"token_offset: got -1, expected 0 to 8"),
    "offset beyond": (lambda: (range(8), {0: ROWS}, 9), r"token_offset: got 9, expected 0 to 8"),
    "offset of another type": (lambda: (range(8), {0: ROWS}, 1.0), r"token_offset: got 1\.0, expected an int"),
    "offset is a bool": (lambda: (range(8), {0: ROWS}, True), r"token_offset: got True, expected an int"),
    "too few rows": (lambda: (range(9), {0: ROWS}, 0), r"hidden_states: got 8 rows, expected 9"),
    "too many rows": (lambda: (range(8), {0: ROWS}, 1), r"hidden_states: got 8 rows, expected 7"),
    "rows at the end": (lambda: (range(8), {0: ROWS}, 8), r"hidden_states: got 8 rows, expected 0"),
    "one layer of two": (
        lambda: (range(8), {0: ROWS, 3: ROWS[1:]}, 0),
        r"hidden_states of layer 3: got 7 rows, expected 8",
    ),
    "one dimension": (lambda: (range(8), {0: ROWS[:, 0]}, 0), r"hidden_states: got shape \[8\], expected 2 dimensions"),
    "three dimensions": (lambda: (range(8), {0: ROWS[None]}, 0), r"got shape \[1, 8, 8\], expected 2 dimensions"),
    "integers": (lambda: (range(8), {0: ROWS.int()}, 0), r"hidden_states\.dtype: got torch\.int32, expected one of"),
    "complex": (lambda: (range(8), {0: ROWS.to(torch.complex64)}, 0), r"got torch\.complex64, expected one of"),
    "bools": (lambda: (range(8), {0: ROWS.bool()}, 0), r"got torch\.bool, expected one of"),
    "no dimension": (lambda: (range(8), {0: ROWS[:, :0]}, 0), r"got hidden_dim 0, expected at least 1"),
    "sparse": (lambda: (range(8), {0: ROWS.float().to_sparse()}, 0), r"expected a dense one"),
    "meta": (lambda: (range(8), {0: ROWS.to("meta")}, 0), r"expected a dense one"),
    "a list": (lambda: (range(8), {0: ROWS.tolist()}, 0), r"hidden_states: got list, expected a torch\.Tensor"),
    "None": (lambda: (range(8), {0: None}, 0), r"hidden_states: got NoneType, expected a torch\.Tensor"),
    "NumPy integers": (lambda: (range(8), {0: np.ones((8, 2), int)}, 0), r"got a NumPy array of int64, expected"),
    "no layers": (lambda: (range(8), {}, 0), r"layers: got dict \{\}, expected \{layer_idx: rows\}"),
    "layers is a tensor": (lambda: (range(8), ROWS, 0), r"layers: got Tensor .*expected \{layer_idx: rows\}"),
    "layer is text": (lambda: (range(8), {"0": ROWS}, 0), r"layer_idx: got '0', expected an int"),
    "layer is a bool": (lambda: (range(8), {True: ROWS}, 0), r"layer_idx: got True, expected an int"),
    "layer is a float": (lambda: (range(8), {0.0: ROWS}, 0), r"layer_idx: got 0\.0, expected an int"),
    "tokens are floats": (lambda: ([0.5] * 8, {0: ROWS}, 0), r"token_ids"),
    "tokens are bools": (lambda: ([True] * 8, {0: ROWS}, 0), r"token_ids"),
    "tokens are a float array": (lambda: (np.ones(8), {0: ROWS}, 0), r"token_ids"),
    "tokens have two dimensions": (lambda: (torch.ones(8, 1, dtype=torch.int64), {0: ROWS}, 0), r"token_ids"),
    "a token beyond int64": (lambda: ([2**63] * 8, {0: ROWS}, 0), r"token_ids"),
}
"""What no store takes, and what it says; other test modules prove that none of it changes anything."""


@pytest.mark.parametrize(("arguments", "message"), BAD_STORES.values(), ids=BAD_STORES)
@pytest.mark.parametrize("accepted", [None, ()], ids=["accepted", "filtered"])
def test_a_wrong_store_is_refused_and_says_what_came_and_what_was_expected(
    arguments: Callable[[], tuple[Any, Any, Any]], message: str, accepted: tuple[int, ...] | None
) -> None:
    token_ids, layers, token_offset = arguments()
    with pytest.raises(InvalidInputError, match=message) as refused:
        plan_store(make_database(), accepted, token_ids, layers, token_offset)
    assert isinstance(refused.value, ValueError)


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (3, (3,)),
        (np.int64(-1), (-1,)),
        ([2, 0, 2], (2, 0)),
        (range(2), (0, 1)),
        (np.array([4, 5]), (4, 5)),
        (np.array(4), (4,)),
        (torch.tensor(4), (4,)),
        ((layer for layer in (1, 1)), (1,)),
    ],
)
def test_layers_of_a_retrieve(layers: Any, expected: tuple[int, ...]) -> None:
    assert check_layers(layers) == expected


@pytest.mark.parametrize("layers", [[], (), "0", b"0", None, 1.5, True, [0, None], {0: 1}, [[0]], np.array(1.5)])
def test_wrong_layers_are_refused(layers: Any) -> None:
    with pytest.raises(InvalidInputError, match="layers: got"):
        check_layers(layers)


@pytest.mark.parametrize("value", [True, False, 1.0, "1", None, np.float64(1), np.bool_(True), [1]])
def test_what_is_no_int(value: Any) -> None:
    with pytest.raises(InvalidInputError, match="start: got .*, expected an int"):
        check_index("start", value)


def test_keys_come_as_a_blob_or_one_by_one() -> None:
    keys = make_keys("abc")
    blob = b"".join(keys)
    chunk_keys = make_database().chunk_keys(range(12))
    assert check_keys("keys", blob) == check_keys("keys", keys) == check_keys("keys", iter(keys)) == blob
    assert check_keys("keys", keys[0]) == keys[0]
    assert check_keys("keys", chunk_keys) == chunk_keys.blob
    assert check_keys("keys", []) == check_keys("keys", b"") == b""


@pytest.mark.parametrize("keys", [b"x", b"x" * 17, [b"x" * 8] * 2, [b"x" * 32], [1, 2], "x" * 16, 5, None])
def test_what_are_no_keys(keys: Any) -> None:
    with pytest.raises(InvalidInputError, match="keys: got"):
        check_keys("keys", keys)
