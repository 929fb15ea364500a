"""The judge of the chaos test: right rows pass, and each kind of wrong one is told."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.chaos.rows import (
    CHUNK_SIZE,
    CLIENT_SHIFT,
    LAYERS,
    MAX_TOKENS,
    RESUMED,
    call_ids,
    find_mixture,
    find_wrong,
    make_prompt,
    make_rows,
    revision_number,
)

START = 5
PROMPT = make_prompt(3, MAX_TOKENS)
OTHER = 5 << CLIENT_SHIFT


def rows_of(
    layer: int = 0, *, space: int = 1, call_id: int = 70_000, branch: int = 3, revision: int = 0
) -> torch.Tensor:
    return make_rows(make_prompt(branch, MAX_TOKENS), layer, space, call_id, first=START, revision=revision)


@pytest.mark.parametrize("layer", LAYERS)
def test_right_rows(layer: int) -> None:
    rows = rows_of(layer)
    assert rows.dtype == LAYERS[layer][1]
    assert find_wrong(rows, PROMPT, layer, 1, start=START) == ""
    assert find_wrong(rows.float(), PROMPT, layer, 1, start=START) == ""
    boundary = CHUNK_SIZE - START
    rows[boundary:] = rows_of(layer, call_id=OTHER)[boundary:]  # chunks may well be of different clients
    assert find_wrong(rows, PROMPT, layer, 1, start=START) == ""
    rows[20:23] = rows_of(layer, call_id=OTHER + 1)[20:23]  # and the rows of one, of different calls
    assert find_wrong(rows, PROMPT, layer, 1, start=START) == ""
    rows[25:] = rows_of(layer, call_id=70_000 | RESUMED)[25:]  # or what follows rows that were taken from the cache
    assert find_wrong(rows, PROMPT, layer, 1, start=START) == ""


WRONG: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "zeros": torch.zeros_like,
    "never written": lambda rows: torch.full_like(rows, float("nan")),
    "of another prompt": lambda _: rows_of(branch=9),
    "of another prompt, where the tokens are the same": lambda rows: torch.cat([rows[:400], rows_of(branch=9)[400:]]),
    "of another key space": lambda _: rows_of(space=0),
    "of another revision": lambda _: rows_of(revision=1),
    "at other positions": lambda rows: torch.cat([rows[1:], rows[:1]]),
    "of two clients in a chunk": lambda rows: torch.cat([rows[:20], rows_of(call_id=OTHER)[20:]]),
    "of two stores in a row": lambda rows: torch.cat([rows[:, :256], rows_of(call_id=1)[:, 256:]], dim=1),
    "written to by a reader": lambda rows: rows + 1,
}


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_rows(kind: str) -> None:
    assert find_wrong(WRONG[kind](rows_of()), PROMPT, 0, 1, start=START)


def test_rows_of_another_layer() -> None:
    assert find_wrong(rows_of(7), PROMPT, -1, 1, start=START)
    assert find_wrong(make_rows(PROMPT, 7, 1, 1)[:, : LAYERS[-1][0]], PROMPT, -1, 1)


def test_rows_of_a_revision() -> None:
    assert find_wrong(rows_of(revision=12), PROMPT, 0, 1, start=START, revision=revision_number("r12-0a")) == ""
    assert find_wrong(rows_of(revision=12), PROMPT, 0, 1, start=START, revision=13)
    assert revision_number("") == 0


def test_layers_of_different_stores() -> None:
    one, other = (call_ids(rows_of(call_id=number)) for number in (1, 2))
    assert find_mixture([one, one]) == ""
    assert find_mixture([one, np.concatenate([one[:32], other[32:]])])
