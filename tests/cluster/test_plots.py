"""What a service holds over time and where a prefix lives, as a notebook shows it, on one node and on several."""

import gc
import importlib
import re
import threading
import time
import uuid
import weakref
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from hs_cache.errors import InvalidInputError
from hs_cache.integrations.notebook import PoolHistory, map_prefix, nodes_in, restarts_in
from hs_cache.router import HIDDEN_STATES, nodes_of
from tests.cluster.children import make_rows
from tests.cluster.conftest import StartService
from tests.cluster.nodes import Nodes, client, pid_of, store_on
from tests.messages import said
from tests.processes import ROOT, kill, run_python, stopped, wait_until

pytest.importorskip("matplotlib")

pytestmark = pytest.mark.long

TOKENS = range(24)  # six chunks


@pytest.fixture(scope="module")
def plots(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """The module, imported here since matplotlib takes a second, and keeps what it knows of fonts where this says."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MPLCONFIGDIR", str(tmp_path_factory.mktemp("matplotlib")))
        yield importlib.import_module("hs_cache.integrations.plots")


def png(figure: Any) -> bytes:
    content: bytes = figure._repr_png_()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    return content


def text_of(figure: Any) -> list[str]:
    """All words in a figure."""
    from matplotlib.text import Text

    return [text.get_text() for text in figure.findobj(Text) if text.get_text()]


def target(cache: Any) -> Any:
    """The client itself, of either kind."""
    return getattr(cache, "target", cache)


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "hs_cache-history"]


def test_a_history_has_a_gap_where_the_actor_was_killed(start_service: StartService, plots: ModuleType) -> None:
    service = start_service()
    cache = client(service, model=uuid.uuid4().hex)
    (node_id,) = nodes_of(service)
    with PoolHistory(cache, interval_s=0.05) as history:
        wait_until(lambda: nodes_in(history.samples), "a sample")
        cache.store(TOKENS, {0: make_rows(24, 1)})
        assert history.sample().nodes[node_id].store.num_chunks == 6  # type: ignore[union-attr]
        kill(pid_of(service, HIDDEN_STATES, node_id))
        wait_until(lambda: history.samples[-1].nodes[node_id] is None, "a gap")
        wait_until(lambda: restarts_in(history.samples, node_id), "it is back")
    assert len(restarts_in(history.samples, node_id)) == 1
    said = [sample.nodes[node_id] for sample in history.samples]
    first_gap = said.index(None)
    assert any(stats is not None for stats in said[first_gap:])
    assert nodes_in(history.samples) == [node_id]
    taken = len(history.samples)
    figure = plots.plot_pool(history)
    assert len(png(figure)) > 5000
    assert {"restarted", "resident", "capacity", f"node {node_id[:12]}"} <= set(text_of(figure))
    assert node_id[:12] in history._repr_html_()
    assert "stopped" in repr(history)
    history.stop()
    assert (len(history.samples), threads()) == (taken, [])


def test_a_history_is_bounded_and_ends_with_the_last_reference(cache: Any) -> None:
    def watched() -> "weakref.ref[PoolHistory]":
        history = PoolHistory(target(cache), interval_s=0.001, max_samples=3)
        wait_until(lambda: len(history.samples) == 3, "three samples")
        first = history.samples[0]
        wait_until(lambda: first not in history.samples, "older samples make way")
        assert len(history.samples) == 3
        return weakref.ref(history)

    there = watched()
    gc.collect()
    wait_until(lambda: there() is None and not threads(), "nothing keeps it")


def test_an_actor_that_hangs_costs_a_sample_its_deadline(start_service: StartService) -> None:
    service = start_service(rpc_timeout_s=1.0)
    cache = client(service)
    (node_id,) = nodes_of(service)
    history = PoolHistory(cache, interval_s=0.01)
    wait_until(lambda: nodes_in(history.samples), "a sample")
    with stopped(pid_of(service, HIDDEN_STATES, node_id)):
        wait_until(lambda: history.samples[-1].nodes[node_id] is None, "a gap")
        begin = time.monotonic()
        history.stop()
        assert time.monotonic() - begin < 30
    assert history.sample().nodes[node_id] is not None, "it can be used on"


def test_histories_take_no_nonsense(cache: Any, plots: ModuleType) -> None:
    for wrong, message in (
        ({"interval_s": 0}, "interval_s: got 0, expected more than 0"),
        ({"interval_s": -1}, "interval_s: got -1, expected a number of seconds"),
        ({"interval_s": "1"}, "interval_s: got '1'"),
        ({"max_samples": 0}, "max_samples: got 0, expected 1 or more"),
        ({"max_samples": 1.5}, r"max_samples: got 1\.5, expected an int"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            PoolHistory(target(cache), **wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match=r"cache: got str, expected what hs_cache\.connect\(\) gives"):
        PoolHistory("default")  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="history: got list, expected PoolHistory"):
        plots.plot_pool([])  # type: ignore[arg-type]
    assert threads() == []


@pytest.mark.timeout(300)
def test_where_a_prefix_lives_on_several_nodes(start_service: StartService, nodes: Nodes, plots: ModuleType) -> None:
    service = start_service()
    wait_until(lambda: set(nodes_of(service)) == set(nodes), "every node has a pool")
    cache = client(service, model=uuid.uuid4().hex)
    cache.store(range(8), {0: make_rows(8, 1), 7: make_rows(8, 2)})
    assert store_on(nodes.one, cache, range(16), {0: make_rows(16, 1), 7: make_rows(16, 2)}) == 4
    assert store_on(nodes.two, cache, TOKENS, {0: make_rows(24, 1)}) == 6
    cache.kv.report_evicted(cache.chunk_keys(range(8))[1:])

    def known() -> bool:
        return set(map_prefix(cache, TOKENS, [0, 7]).reasons) == set(nodes)

    wait_until(known, "the controller knows all nodes")
    found = map_prefix(cache, TOKENS, [0, 7])
    assert found.ends == (4, 8, 12, 16, 20, 24)
    assert found.reasons == {
        nodes.head: ("ok", "kv_absent", *["never_stored"] * 4),
        nodes.one: (*["ok"] * 4, *["never_stored"] * 2),
        nodes.two: ("layer_missing",) * 6,
    }
    assert [found.usable_tokens(node_id) for node_id in nodes] == [4, 16, 0]
    assert list(found.runs(nodes.head)) == [(0, 4, "ok"), (4, 8, "kv_absent"), (8, 24, "never_stored")]
    assert found.coverage.num_tokens == cache.plan(TOKENS, [0, 7]).num_tokens == 16
    shown = " ".join(re.sub("<[^>]*>", " ", found._repr_html_()).split())
    assert "16 of 24 tokens can be had here" in shown
    figure = plots.plot_prefix(cache, TOKENS, [0, 7])
    assert len(png(figure)) > 5000
    words = set(text_of(figure))
    assert {"16 of 24 tokens can be had here", "ok", "kv absent", "never stored", "layer missing"} <= words
    assert {node_id[:12] for node_id in nodes} <= words

    kill(pid_of(service, HIDDEN_STATES, nodes.one))
    there = map_prefix(cache, TOKENS, [0, 7]).reasons[nodes.one]
    assert there in (("unreachable",) * 6, ("never_stored",) * 6), "it may be back already"


def test_a_prefix_of_nothing(cache: Any, plots: ModuleType) -> None:
    assert map_prefix(target(cache), [], 0).reasons == {}
    assert "0 of 0 tokens can be had here" in text_of(plots.plot_prefix(target(cache), [1, 2], 0))
    assert "0 of 0 tokens" in map_prefix(target(cache), [], 0)._repr_html_()
    with pytest.raises(InvalidInputError, match="layers: got '0', expected an int"):
        plots.plot_prefix(target(cache), TOKENS, "0")  # type: ignore[arg-type]


def test_pyplot_is_left_alone() -> None:
    script = """
import sys
import hs_cache, hs_cache.client, hs_cache.results
assert "matplotlib" not in sys.modules
import hs_cache.integrations.plots
assert "matplotlib.pyplot" not in sys.modules
"""
    done = run_python(["-c", script])
    assert done.returncode == 0, done.stderr


def test_without_matplotlib_it_says_what_to_install() -> None:
    script = """
import sys
sys.modules["matplotlib"] = None
import hs_cache.integrations.notebook
import hs_cache.integrations.plots
"""
    done = run_python(["-c", script])
    assert said("extra", done.stderr.strip().splitlines()[-1])


def test_the_code_of_the_how_to_runs(cache: Any, plots: ModuleType) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "notebook.md").read_text(), re.DOTALL)
    given = {"cache": target(cache), "token_ids": list(TOKENS)}
    exec(code, given)
    assert given["history"].service == target(cache).service
    assert threads() == []
