"""What a reservation costs: in proportion to its layers and chunks, however they are combined."""

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
