"""What the examples' engines keep of prefixes: bounded, and a prefix loses its tail first."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def recent_chunks() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        from qwen3_omni.recent_chunks import RecentChunks

        yield RecentChunks


@pytest.fixture
def held(recent_chunks: Any) -> Any:
    return recent_chunks(4)


def keys(names: str) -> list[bytes]:
    return [name.encode() for name in names]


def of(text: str) -> Callable[[int], str]:
    return lambda index: text[index]


def test_a_prefix_comes_back_up_to_its_first_gap(held: Any) -> None:
    held.save(keys("ab"), of("AB"))
    assert held.load(keys("abc")) == ["A", "B"]
    assert held.load(keys("ca")) == []


def test_the_tail_of_the_prefix_that_was_used_longest_ago_goes_first(held: Any) -> None:
    assert held.save(keys("abc"), of("ABC")) == []
    assert held.save(keys("xy"), of("XY")) == keys("c")
    held.load(keys("ab"))
    assert held.save(keys("z"), of("Z")) == keys("y")
    assert held.save(keys("ax"), of("AX")) == []
    assert held.save(keys("q"), of("Q")) == keys("b")


def test_of_a_prefix_that_is_too_long_the_head_stays(held: Any) -> None:
    assert held.save(keys("abcde"), of("ABCDE")) == keys("e")
    assert held.load(keys("abcde")) == ["A", "B", "C", "D"]


def test_what_is_there_already_is_kept_and_not_made_again(held: Any) -> None:
    held.save(keys("a"), of("A"))
    made: list[int] = []
    held.save(keys("abc"), lambda index: made.append(index) or index)  # type: ignore[func-returns-value]
    assert made == [1, 2]
    assert held.load(keys("abc")) == ["A", 1, 2]
    assert held.size == 3


def test_chunks_count_by_their_size(recent_chunks: Any) -> None:
    held = recent_chunks(10, len)
    assert held.save(keys("abc"), ["aaaa", "bbb", "cccc"].__getitem__) == keys("c")
    assert held.size == 7
    assert held.save(keys("x"), of("xy")) == []
    assert held.save(keys("y"), ["yyy"].__getitem__) == keys("b")
    assert held.size == 8
