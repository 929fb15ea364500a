"""From a caller's arguments to a plan: what is refused, and which rows go into which chunk."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from hs_cache.errors import InvalidInputError
from hs_cache.keys import TokenDatabase
from hs_cache.messages import LayerSpec
from hs_cache.planning import check_index, check_keys, check_layers, check_store
from hs_cache.stitching import HeldRows, Stitcher
from tests.builders import CHUNK_SIZE, make_keys, make_space
from tests.direct import BAD_STORES, HIDDEN_DIM, make_rows


def make_database(*, save_unfull_chunk: bool = False) -> TokenDatabase:
    return TokenDatabase(make_space(), save_unfull_chunk=save_unfull_chunk)


@pytest.mark.parametrize("save_unfull_chunk", [False, True])
def test_a_plan_fills_exactly_the_chunks_of_which_every_row_is_given(save_unfull_chunk: bool) -> None:
    database = make_database(save_unfull_chunk=save_unfull_chunk)
    for num_tokens in range(3 * CHUNK_SIZE + 2):
        for offset in range(num_tokens + 1):
            tokens = list(range(100, 100 + num_tokens))
            step = check_store(tokens, {5: make_rows(tokens[offset:])}, offset)
            plans = Stitcher(HeldRows()).plan(database, step)
            cut = num_tokens if save_unfull_chunk else num_tokens - num_tokens % CHUNK_SIZE
            starts = [start for start in range(0, cut, CHUNK_SIZE) if start >= offset]
            assert sum(plan.num_chunks for plan in plans) == len(starts)
            if starts:
                (plan,) = plans
                assert plan.first_token == starts[0]
                flat = make_rows(tokens[starts[0] : cut]).view(torch.uint8).numpy().reshape(-1)
                assert plan.flat().tobytes() == flat.tobytes()
                assert plan.nbytes == (cut - starts[0]) * HIDDEN_DIM * 2
                assert plan.specs == (LayerSpec(5, HIDDEN_DIM, "bfloat16"),)
                assert len(plan.keys) == -(-cut // CHUNK_SIZE)


def test_the_plan_takes_what_numpy_calls_an_int() -> None:
    step = check_store(np.arange(8), {np.int64(2): make_rows(range(4, 8))}, np.int32(4))
    (plan,) = Stitcher(HeldRows()).plan(make_database(), step)
    assert plan.specs == (LayerSpec(2, HIDDEN_DIM, "bfloat16"),)
    assert type(plan.specs[0].layer_idx) is int


@pytest.mark.parametrize(("arguments", "message"), BAD_STORES.values(), ids=BAD_STORES)
def test_a_wrong_store_is_refused_and_says_what_came_and_what_was_expected(
    arguments: Callable[[], tuple[Any, Any, Any]], message: str
) -> None:
    token_ids, layers, token_offset = arguments()
    with pytest.raises(InvalidInputError, match=message) as refused:
        check_store(token_ids, layers, token_offset)
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
    with pytest.raises(InvalidInputError, match=r"start: got .*, expected an int"):
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
