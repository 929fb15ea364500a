"""What a notebook asks of a service's nodes, and what it makes of their answers; no Ray is started."""

import contextlib
import logging
import sys
from collections.abc import Iterator
from itertools import pairwise
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hs_cache.client import HiddenStateCache
from hs_cache.effects import Budget, Steps
from hs_cache.integrations import notebook
from hs_cache.integrations.notebook import (
    PoolHistory,
    PoolSample,
    PrefixMap,
    _answers,
    _nodes,
    _statistics,
    nodes_in,
    restarts_in,
)
from hs_cache.messages import OK
from hs_cache.results import Coverage
from hs_cache.router import Router
from hs_cache.tables import REASONS
from tests.builders import make_node_statistics
from tests.direct import DirectCache, lost_call, make_nodes, refused
from tests.processes import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfd and /proc are Linux")

T = TypeVar("T")


def make_map(*reasons: str, last: int = 4) -> PrefixMap:
    ends = [4 * (position + 1) for position in range(len(reasons))]
    if ends:
        ends[-1] += last - 4
    return PrefixMap(tuple(ends), {"node": reasons}, Coverage(layer_tokens={}))


def make_samples(*incarnations: str) -> list[PoolSample]:
    """A sample a second of one node; where there is no incarnation it didn't answer."""
    return [
        PoolSample(float(second), {"node": make_node_statistics(incarnation=name) if name else None})
        for second, name in enumerate(incarnations)
    ]


class DirectRouter(Router):
    """Drives the steps of a history by plain calls.

    Attributes:
        trouble: What comes instead, while there is any.
    """

    def __init__(self, cache: DirectCache) -> None:
        super().__init__("direct")
        self._cache = cache
        self.trouble: BaseException | None = None

    def run(self, steps: Steps[T]) -> T:
        if self.trouble is not None:
            raise self.trouble
        return self._cache.run(steps)


@contextlib.contextmanager
def recorded(monkeypatch: pytest.MonkeyPatch, interval_s: float = 0.001) -> Iterator[tuple[PoolHistory, DirectRouter]]:
    """A history of one node, and what drives it."""
    (node,) = make_nodes(1)
    node.controller.hear_all()
    cache = DirectCache(node)
    router = DirectRouter(cache)
    monkeypatch.setattr(notebook, "Router", lambda _: router)
    with PoolHistory(HiddenStateCache(router, cache.session), interval_s=interval_s) as history:
        wait_until(lambda: nodes_in(history.samples), "a sample")
        yield history, router


# Who is asked


def test_all_nodes_that_the_controller_knows_are_asked_at_once() -> None:
    nodes = make_nodes(3)
    nodes[0].controller.hear_all()
    cache = DirectCache(nodes[0])
    found = cache.run(_statistics([], 2.0))
    assert {node_id: stats and stats.node_id for node_id, stats in found.items()} == {n.name: n.name for n in nodes}
    assert cache.effects == ["Find", "stats", *["Find", "stats"] * 3, *["Fetch"] * 3]


def test_a_node_that_does_not_answer_costs_the_others_nothing() -> None:
    nodes = make_nodes(3)
    nodes[0].controller.hear_all()
    cache = DirectCache(nodes[0])
    nodes[1].unreachable = True
    found = cache.run(_statistics([], 2.0))
    assert [found[node.name] is None for node in nodes] == [False, True, False]


def test_without_the_controller_those_that_are_known_are_asked() -> None:
    nodes = make_nodes(2)
    cache = DirectCache(nodes[0])
    nodes[0].controller.unreachable = True
    assert cache.run(_nodes([nodes[1].name, nodes[0].name], Budget(1.0))) == [nodes[1].name, nodes[0].name]
    assert cache.run(_nodes([], Budget(1.0))) == [nodes[0].name], "the client's own"
    cache.faults = {0: refused, 1: lost_call}
    assert cache.run(_nodes([], Budget(1.0))) == []


def test_a_node_that_is_gone_is_a_gap() -> None:
    (node,) = make_nodes(1)
    cache = DirectCache(node)
    assert cache.run(_answers(["gone", node.name], "num_cached_chunks", (), Budget(1.0))) == {
        "gone": None,
        node.name: 0,
    }


# What is made of it


@given(st.lists(st.sampled_from(sorted(REASONS))), st.integers(1, 4))
def test_runs_cover_a_prefix_without_a_gap(reasons: list[str], last: int) -> None:
    found = make_map(*reasons, last=last)
    runs = list(found.runs("node"))
    assert [first for first, _, _ in runs] == [0, *(end for _, end, _ in runs)][: len(runs)]
    assert all(one != other for (_, _, one), (_, _, other) in pairwise(runs)), "neighbours differ"
    for position, reason in enumerate(reasons):
        assert [said for first, end, said in runs if first <= 4 * position < end] == [reason]
    assert (runs[-1][1] if runs else 0) == (found.ends[-1] if found.ends else 0)
    usable = runs[0][1] if runs and runs[0][2] == OK else 0
    assert found.usable_tokens("node") == usable


def test_a_restart_is_another_pool_and_not_a_gap() -> None:
    samples = make_samples("", "a", "", "a", "b", "", "c", "c")
    assert restarts_in(samples, "node") == [4.0, 6.0]
    assert restarts_in(samples, "other") == []
    assert nodes_in(samples) == ["node"]
    assert nodes_in(make_samples("", "")) == []


# A history's thread


def test_whatever_a_sample_fails_with_is_a_gap_and_the_next_may_be_well(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="hs_cache"), recorded(monkeypatch) as (history, router):
        (node_id,) = nodes_in(history.samples)
        router.trouble = RuntimeError("of nobody's making\nand more of it")
        begin = len(history.samples)
        wait_until(lambda: len(history.samples) > begin + 3, "it samples on")
        assert history.samples[-1].nodes == {node_id: None}
        assert "running, and the latest sample failed (RuntimeError: of nobody's making): " in repr(history)
        assert "RuntimeError: of nobody&#x27;s making" in history._repr_html_()
        assert [record.getMessage() for record in caplog.records] == [
            "hs_cache: service 'direct' can't be sampled, which counts as a gap: RuntimeError: of nobody's making"
        ], "once"
        router.trouble = None
        wait_until(lambda: history.samples[-1].nodes[node_id] is not None, "it is well again")
        assert ", running: " in repr(history)
        assert restarts_in(history.samples, node_id) == []
        router.trouble = ValueError()
        wait_until(lambda: "failed (ValueError: )" in repr(history), "the next trouble")
        wait_until(lambda: len(caplog.records) == 2, "that is news")
    assert ", stopped, and the latest sample failed" in repr(history)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # pytest does tell
def test_what_is_said_of_the_thread_is_true(monkeypatch: pytest.MonkeyPatch) -> None:
    with recorded(monkeypatch) as (history, router):
        assert ", running: " in repr(history)
        assert "The sampling is running." in history._repr_html_()
        router.trouble = SystemExit()  # ends a thread, and nobody is told
        wait_until(lambda: ", stopped: " in repr(history), "it has ended, though nobody stopped it")
        assert "The sampling is stopped." in history._repr_html_()


def test_an_interval_may_be_longer_than_a_wait_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    with recorded(monkeypatch, interval_s=1e300) as (history, _):
        taken = history.samples
        history.sample()
        assert ", running: " in repr(history)
        assert len(history.samples) == len(taken) + 1
    assert ", stopped: " in repr(history)
