"""KV of the Serve example that outlives replicas: bounded, and a prefix loses its tail first."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from serve_pipeline.kv_holder import HeldChunks

    yield HeldChunks(capacity_bytes=4 * 16)
    for name in [name for name in sys.modules if name.split(".")[0] == "serve_pipeline"]:
        del sys.modules[name]


def keys(*names: str) -> list[bytes]:
    return [name.encode() for name in names]


def chunks(count: int) -> list[Any]:
    return [np.full(16, number, np.uint8) for number in range(count)]


def test_a_prefix_comes_back_up_to_its_first_gap(held: Any) -> None:
    held.save(keys("a", "b"), chunks(2))
    assert [int(chunk[0]) for chunk in held.load(keys("a", "b", "c"))] == [0, 1]
    assert held.load(keys("c", "a")) == []


def test_the_tail_of_the_prefix_that_was_used_longest_ago_goes_first(held: Any) -> None:
    assert held.save(keys("a", "b", "c"), chunks(3)) == []
    assert held.save(keys("x", "y"), chunks(2)) == keys("c")
    held.load(keys("a", "b"))
    assert held.save(keys("z"), chunks(1)) == keys("y")
    assert held.nbytes == 4 * 16


def test_of_a_prefix_that_is_too_long_the_head_stays(held: Any) -> None:
    assert held.save(keys("a", "b", "c", "d", "e"), chunks(5)) == keys("e")
    assert len(held.load(keys("a", "b", "c", "d", "e"))) == 4


def test_what_is_there_already_is_kept_and_not_counted_twice(held: Any) -> None:
    held.save(keys("a"), chunks(1))
    held.save(keys("a", "b"), [np.full(16, 9, np.uint8)] * 2)
    assert held.nbytes == 2 * 16
    assert int(held.load(keys("a"))[0][0]) == 0
