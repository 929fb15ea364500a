"""PrefixLRU: the exact order in which chunks go, and its one promise under random use."""

from collections import OrderedDict
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hs_cache.eviction import PrefixLRU


def chain(prompt: str) -> list[bytes]:
    """Readable keys that name a chunk and everything before it: ``b"a", b"ab", b"abc"``."""
    return [prompt[: i + 1].encode() for i in range(len(prompt))]


def make_order(*prompts: str) -> PrefixLRU:
    """An order in which these prompts were stored one after the other."""
    order = PrefixLRU()
    for prompt in prompts:
        store(order, prompt)
    return order


def store(order: PrefixLRU, prompt: str) -> None:
    keys = chain(prompt)
    for key in keys:
        if key not in order:
            order.add(key, key[:-1] or None)
    order.touch(keys)
    order.check()


def listed(order: PrefixLRU) -> str:
    return " ".join(key.decode() for key in order.coldest_first())


def remove_all(order: PrefixLRU, keys: Iterable[bytes]) -> None:
    for key in keys:
        order.remove(key)
        order.check()


def test_the_tail_of_a_prompt_is_colder_than_its_head() -> None:
    assert listed(make_order("abc")) == "abc ab a"


def test_an_older_prompt_goes_first_and_a_shared_head_goes_last() -> None:
    assert listed(make_order("abc", "xy", "abd")) == "abc xy x abd ab a"


def test_touch_warms_a_prefix_but_not_what_continues_it() -> None:
    order = make_order("abc", "xy")
    order.touch(chain("ab"))
    assert listed(order) == "abc xy x ab a"


def test_removing_a_chunk_makes_everything_behind_it_the_coldest() -> None:
    order = make_order("xy", "abcd", "abe")
    order.remove(b"ab")
    order.check()
    # The two branches in any order, the tail of each before its head; then what can still be served.
    assert listed(order).split()[-3:] == ["xy", "x", "a"]
    assert set(listed(order).split()[:3]) == {"abcd", "abc", "abe"}
    assert listed(order).index("abcd") < listed(order).index("abc ")


def test_removing_a_tail_leaves_the_order_of_the_rest() -> None:
    order = make_order("abc", "xyz")
    order.remove(b"xyz")
    assert listed(order) == "abc ab a xy x"


def test_demote_is_for_a_chunk_that_was_stored_behind_a_hole() -> None:
    order = make_order("abc")
    order.add(b"xy", b"x")
    order.demote(b"xy")
    order.check()
    assert listed(order) == "xy abc ab a"


def test_a_hole_that_is_filled_again_keeps_the_promise() -> None:
    order = make_order("abc", "xy")
    order.remove(b"ab")
    store(order, "ab")
    assert listed(order) == "abc xy x ab a"


def test_parent_is_known_even_when_it_is_not_listed() -> None:
    order = make_order("ab")
    assert (order.parent(b"a"), order.parent(b"ab")) == (None, b"a")
    order.remove(b"a")
    assert order.parent(b"ab") == b"a"
    assert (b"a" in order, b"ab" in order, len(order)) == (False, True, 1)


def test_nothing_is_kept_for_keys_that_are_gone() -> None:
    order = make_order("abc", "abd")
    remove_all(order, [b"ab", b"a", b"abd", b"abc"])
    assert len(order) == 0
    assert listed(order) == ""


@pytest.mark.parametrize("head_first", [True, False])
def test_dropping_a_long_prompt_is_linear(head_first: bool) -> None:
    class CountingDict(OrderedDict[bytes, bytes | None]):
        moves = 0

        def move_to_end(self, key: bytes, last: bool = True) -> None:
            self.moves += 1
            super().move_to_end(key, last=last)

    keys = [b"%d" % i for i in range(1000)]
    order = PrefixLRU()
    order._parents = counted = CountingDict()
    for i, key in enumerate(keys):
        order.add(key, keys[i - 1] if i else None)
    for key in keys if head_first else reversed(keys):
        order.remove(key)
    assert counted.moves == (999 if head_first else 0)


def test_check_finds_damage() -> None:
    order = make_order("ab")
    order._parents.move_to_end(b"ab")
    with pytest.raises(AssertionError, match="warmer than what it continues"):
        order.check()


PROMPTS = st.text(alphabet="ab", min_size=1, max_size=6)


@given(st.lists(st.tuples(st.sampled_from(["store", "remove", "behind a hole"]), PROMPTS), max_size=40))
@settings(max_examples=200)
def test_the_promise_holds_whatever_is_done(steps: list[tuple[str, str]]) -> None:
    order = PrefixLRU()
    expected: set[bytes] = set()
    for step, prompt in steps:
        keys = chain(prompt)
        if step == "store":
            store(order, prompt)
            expected |= set(keys)
            assert list(order.coldest_first())[-len(keys) :] == keys[::-1]
        elif step == "remove" and keys[-1] in order:
            order.remove(keys[-1])
            expected.discard(keys[-1])
        elif step == "behind a hole" and keys[-1] not in order and len(keys) > 1 and keys[-2] not in order:
            order.add(keys[-1], keys[-2])
            order.demote(keys[-1])
            expected.add(keys[-1])
        order.check()
        assert set(order.coldest_first()) == expected


@given(st.lists(PROMPTS, min_size=1, max_size=20), st.integers(0, 30))
def test_what_is_left_after_evicting_the_coldest_is_a_set_of_prefixes(prompts: list[str], evictions: int) -> None:
    order = make_order(*prompts)
    for _ in range(min(evictions, len(order))):
        order.remove(next(order.coldest_first()))
    left = set(order.coldest_first())
    assert all(key[:-1] in left for key in left if len(key) > 1)
