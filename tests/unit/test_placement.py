"""What a reservation costs: in proportion to its layers and chunks, however they are combined."""

import itertools
import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from hs_cache.messages import LayerSpec
from hs_cache.store import HiddenStateStore
from tests.builders import CHUNK_SIZE, OWNER, SLOT_BYTES, lease, make_spec, make_store, put, reserve

CHUNKS = "abcd"


class Steps:
    """Counts the lines that a function executes, and those of all that it calls; a loop counts with every turn."""

    def __init__(self, function: Callable[[], object]) -> None:
        self.by_name: Counter[str] = Counter()
        previous = sys.gettrace()
        sys.settrace(self._enter)
        try:
            function()
        finally:
            sys.settrace(previous)
        self.total = sum(self.by_name.values())

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._step

    def _step(self, frame: FrameType, event: str, argument: Any) -> Any:
        self.by_name[frame.f_code.co_name] += event == "line"
        return self._step


def make_specs(num_layers: int) -> tuple[LayerSpec, ...]:
    return tuple(make_spec(layer) for layer in range(num_layers))


def empty(num_layers: int) -> HiddenStateStore:
    return make_store(num_layers * len(CHUNKS))


def full_of_others(num_layers: int) -> HiddenStateStore:
    store = empty(num_layers)
    put(store, "wxyz", *make_specs(num_layers))
    return store


def with_a_head_of_half_the_layers(num_layers: int) -> HiddenStateStore:
    store = empty(num_layers)
    put(store, CHUNKS[:2], *make_specs(num_layers)[::2])
    return store


@pytest.mark.parametrize(
    "make", [empty, full_of_others, with_a_head_of_half_the_layers], ids=lambda make: make.__name__
)
def test_a_reservation_of_many_layers_costs_in_proportion_to_them(make: Callable[[int], HiddenStateStore]) -> None:
    steps = {}
    for num_layers in (500, 2000):
        store, specs = make(num_layers), make_specs(num_layers)
        steps[num_layers] = Steps(lambda store=store, specs=specs: reserve(store, (OWNER, 1), CHUNKS, *specs))  # type: ignore[misc]
        stats = store.stats()
        assert stats.reserved_bytes + stats.resident_bytes == num_layers * len(CHUNKS) * SLOT_BYTES
        store.check()
    few, many = steps[500], steps[2000]
    assert few.total > 500 * len(CHUNKS), "nothing was counted"
    assert many.total < 5 * few.total, (many.by_name - few.by_name).most_common(5)


def test_storing_and_leasing_many_layers_costs_in_proportion_to_them() -> None:
    steps = {}
    for num_layers in (500, 2000):
        store, specs = empty(num_layers), make_specs(num_layers)
        reserve(store, (OWNER, 1), CHUNKS, *specs)
        layers = tuple(range(num_layers))

        def run(store: HiddenStateStore = store, layers: tuple[int, ...] = layers) -> None:
            assert store.commit((OWNER, 1)).stored == len(CHUNKS)
            assert lease(store, (OWNER, 2), CHUNKS, layers).num_tokens == len(CHUNKS) * CHUNK_SIZE
            store.release(OWNER, [2])

        steps[num_layers] = Steps(run)
    assert steps[2000].total < 5 * steps[500].total, (steps[2000].by_name - steps[500].by_name).most_common(5)


def test_a_place_where_a_head_lies_is_not_worth_all_that_is_behind_it() -> None:
    mebi = 1 << 20
    store = HiddenStateStore(256 * mebi, chunk_size=64)
    numbers = itertools.count()

    def put_rows(hidden_dim: int, keys: list[bytes], first: int = 0) -> None:
        hold = (OWNER, next(numbers))
        store.reserve(
            hold,
            space=hidden_dim.to_bytes(16, "big"),
            keys=keys,
            num_tokens=64 * len(keys),
            first_chunk=first,
            specs=(LayerSpec(0, hidden_dim, "bfloat16"),),
            kv_local=True,
        )
        store.commit(hold)

    def pin_rows(hidden_dim: int) -> tuple[bytes, int]:
        key, number = next(numbers).to_bytes(16, "big"), next(numbers)
        put_rows(hidden_dim, [key])
        store.lease((OWNER, number), [key], (0,))
        store.settle((OWNER, number), [1])
        return key, number

    prefix = [b"prefix" + number.to_bytes(10, "big") for number in range(40)]
    put_rows(8192, prefix[:1])
    key, number = pin_rows(8192)  # one MiB next to the head, to be free
    pin_rows(768)
    for first in range(1, len(prefix)):  # what continues it lies scattered
        put_rows(8192, prefix[: first + 1], first)
        pin_rows(768)
    while store.stats().free_bytes >= 2 * mebi:
        pin_rows(8192)
    while store.stats().free_bytes >= 64 << 10:
        pin_rows(512)
    store.release(OWNER, [number])
    store.drop(key)
    put_rows(8192, [b"other" + number.to_bytes(11, "big") for number in range(2)])
    assert store.stats().evicted_chunks_total == 1
    assert [store.contains(key, 0) for key in prefix] == [True] * 39 + [False]
    store.check()
