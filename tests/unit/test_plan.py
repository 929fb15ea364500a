"""`plan`, `explain` and `locate`: what an engine asks before prefill, a person when a hit is short, and whoever decides
where a request goes.
"""

import gc
import itertools
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from hs_cache.errors import InvalidInputError, ServiceError
from hs_cache.keys import ChunkKeys
from hs_cache.results import ChunkReport, Coverage
from tests.builders import CHUNK_SIZE, SLOT_BYTES, make_tokens
from tests.direct import (
    DirectCache,
    Node,
    cancelled_after,
    cancelled_before,
    lost_call,
    lost_reply,
    make_nodes,
    make_rows,
    put_part,
    refused,
    spread,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfd and /proc are Linux")

TOKENS = make_tokens("abcdef")


@pytest.fixture
def node() -> Node:
    return Node()


@pytest.fixture
def cache(node: Node) -> DirectCache:
    return DirectCache(node)


def put(cache: DirectCache, prompt: str, *layers: int) -> None:
    assert cache.put(make_tokens(prompt), *layers).failed == 0


def counts(coverage: Coverage) -> tuple[int, int, dict[int, int]]:
    return coverage.num_tokens, coverage.kv_tokens, coverage.layer_tokens


def check(hit: Any, layers: Sequence[int] = (0,)) -> None:
    for layer in layers:
        assert torch.equal(hit[layer], make_rows(TOKENS, layer)[: hit.num_tokens])


# plan


def test_what_is_usable_is_the_least_of_kv_and_every_layer(cache: DirectCache, node: Node) -> None:
    put(cache, "abcdef", 0)
    put(cache, "abcd", 1)
    assert counts(cache.plan(TOKENS, [0, 1])) == (16, 24, {0: 24, 1: 16})
    assert cache.effects == ["plan"], "one round trip"
    coverage = cache.plan(TOKENS, [1, 0])
    assert (coverage.nbytes, coverage.nodes, coverage.ended_by) == (4 * 2 * SLOT_BYTES, (node.name,), "hidden_state")
    assert list(coverage.layer_tokens) == [1, 0]
    whole = cache.plan(TOKENS, 0)
    assert (counts(whole), whole.ended_by, bool(whole)) == ((24, 24, {0: 24}), "", True)
    nothing = cache.plan(make_tokens("xyz"), 0)
    assert (counts(nothing), nothing.nbytes, nothing.nodes, bool(nothing)) == ((0, 0, {0: 0}), 0, (), False)
    assert counts(cache.plan(TOKENS[:2], 0)) == (0, 0, {0: 0})
    node.settled()


@pytest.mark.parametrize("source", ["reports", "told only", "none"])
def test_kv_is_counted_by_itself(source: str) -> None:
    node = Node(told_only=True) if source == "told only" else Node(kv_source=source)
    cache = DirectCache(node)
    put(cache, "abcd")
    keys = cache.session.chunk_keys(TOKENS, ())
    if source == "told only":
        assert counts(cache.plan(TOKENS)) == (0, 0, {0: 16})
        cache.report("report_stored", keys)
    assert counts(cache.plan(TOKENS))[1] == {"reports": 16, "told only": 24, "none": 24}[source]
    cache.report("report_evicted", keys[2:3])
    coverage = cache.plan(TOKENS)
    if source == "none":
        assert (counts(coverage), coverage.ended_by) == ((16, 24, {0: 16}), "hidden_state")
    else:
        assert (counts(coverage), coverage.ended_by) == ((8, 8, {0: 16}), "kv_absent")


def test_what_was_stored_elsewhere_has_kv() -> None:
    node = Node()
    put(DirectCache(node, far=True), "ab")
    assert counts(DirectCache(node).plan(TOKENS)) == (8, 8, {0: 8})


def test_a_plan_says_what_a_retrieve_then_gets() -> None:
    node = Node(2048)
    cache = DirectCache(node)
    chance = random.Random(7)
    for _ in range(60):
        prompt = "".join(chance.choice("abc") for _ in range(chance.randrange(1, 8)))
        layers = chance.sample([0, 1, 2], chance.randrange(1, 4))
        if chance.random() < 0.6:
            put(cache, prompt, *layers)
        elif chance.random() < 0.3:
            cache.report("report_evicted", [chance.choice(list(cache.session.chunk_keys(make_tokens(prompt), ())))])
        coverage = cache.plan(make_tokens(prompt), layers)
        hit = cache.retrieve(make_tokens(prompt), layers)
        assert coverage.num_tokens == hit.num_tokens
        assert coverage.nbytes == sum(hit[layer].nbytes for layer in hit)
    del hit
    node.settled()


# plan(hold=True)


def churn(cache: DirectCache, slots: int) -> None:
    """Store so much that everything goes that nobody holds."""
    for number in range(slots):
        cache.store([number] * CHUNK_SIZE, {0: make_rows([number] * CHUNK_SIZE)})


@pytest.mark.parametrize("by", ["release", "with", "end"])
def test_what_a_plan_holds_stays_until_it_is_let_go(by: str) -> None:
    node = Node(8)
    cache = DirectCache(node)
    put(cache, "abcd")
    coverage = cache.plan(TOKENS, hold=True)
    assert (coverage.num_tokens, coverage.holds) == (16, True)
    churn(cache, 30)
    hit = cache.retrieve(TOKENS)
    assert hit.num_tokens == 16
    check(hit)
    del hit
    if by == "release":
        coverage.release()
        coverage.release()
        assert not coverage.holds
    elif by == "with":
        with coverage:
            pass
    else:
        del coverage
    gc.collect()
    node.settled()
    churn(cache, 30)
    assert cache.retrieve(TOKENS).num_tokens == 0


def test_without_hold_nothing_is_held(cache: DirectCache, node: Node) -> None:
    put(cache, "abcd")
    coverage = cache.plan(TOKENS)
    assert not coverage.holds
    coverage.release()
    assert node.server.store.stats().num_leases == 0


@pytest.mark.parametrize("fault", [lost_call, lost_reply, refused, cancelled_before, cancelled_after])
def test_a_plan_that_failed_holds_nothing(fault: Any, cache: DirectCache, node: Node) -> None:  # case 27
    put(cache, "abcd")
    for _ in range(20):
        cache.faults[0] = fault
        try:
            coverage = cache.plan(TOKENS, hold=True)
        except BaseException as error:
            assert "Cancelled" in type(error).__name__
        else:
            assert (coverage.num_tokens, coverage.ended_by) == (0, "unreachable")
            coverage.release()
    node.settled()


def test_strict_clients_hear_of_it(node: Node) -> None:
    cache = DirectCache(node, strict=True)
    node.unreachable = True
    for ask in (cache.plan, cache.explain):
        with pytest.raises(ServiceError):
            ask(TOKENS)


def test_a_plan_is_refused_by_a_restarted_actor_and_made_anew(cache: DirectCache, node: Node) -> None:  # case 25
    put(cache, "abcd")
    coverage = cache.plan(TOKENS, hold=True)
    node.restart()
    put(cache, "ab")
    coverage.release()
    assert cache.plan(TOKENS, hold=True).num_tokens == 8
    gc.collect()
    node.settled()


@pytest.mark.parametrize("far", [False, True], ids=["with a pool", "without a pool"])
@pytest.mark.parametrize("at", range(3))
def test_what_other_nodes_have_counts(at: int, far: bool) -> None:
    nodes = make_nodes()
    spread(nodes, 0, 1)
    cache = DirectCache(nodes[at], far=far)
    coverage = cache.plan(TOKENS, [0, 1])
    assert counts(coverage) == (24, 24, {0: 24, 1: 24})
    assert (coverage.nbytes, coverage.nodes) == (12 * SLOT_BYTES, tuple(node.name for node in nodes))
    assert [node.bytes_sent for node in nodes] == [0, 0, 0], "rows stay where they are"
    for node in nodes:
        node.settled()


@pytest.mark.parametrize("far", [False, True], ids=["with a pool", "without a pool"])
def test_what_a_plan_holds_on_other_nodes_stays_too(far: bool) -> None:
    for layers, more in itertools.product(([0, 1], [1], [0]), (False, True)):
        nodes = make_nodes()
        spread(nodes, 0, 1)
        cache = DirectCache(nodes[0], far=far)
        coverage = cache.plan(TOKENS, [0, 1], hold=True)
        keys = cache.session.chunk_keys(TOKENS, ())
        for node in nodes[1:]:
            for key in keys:
                node.server.drop_key(key)
        nodes[0].controller.hear_all()
        if more:  # meanwhile there is more here
            put_part(nodes[0], "abc", 2, 0, 1)
        for stop in (24, 18, 9):
            hit = cache.retrieve(TOKENS, layers, stop=stop)
            assert (hit.num_tokens, hit.ended_by) == (stop, "")
            check(hit, layers)
            for layer in layers:
                hit[layer].zero_()
        assert cache.retrieve(make_tokens("abcdeX"), 0).num_tokens == 16, "what is held in one piece is of one prompt"
        coverage.release()
        assert cache.retrieve(TOKENS, layers).num_tokens == (12 if more else 8)
        for node in nodes:
            node.settled()


# explain


def test_each_reason_is_told_apart(cache: DirectCache, node: Node) -> None:
    put(cache, "abcdef", 0)
    put(cache, "abcde", 1)
    keys = cache.session.chunk_keys(TOKENS, ())
    node.server.drop_key(keys[1])
    cache.report("report_evicted", keys[2:3])
    assert cache.explain(make_tokens("abcdefg"), [0, 1]) == [
        "ok",
        "evicted",
        "kv_absent",
        "ok",
        "ok",
        "layer_missing",
        "never_stored",
    ]
    assert cache.effects == ["explain"]
    assert cache.retrieve(TOKENS).num_tokens == 4
    assert cache.explain(TOKENS[:12]) == ["ok", "evicted", "kv_absent"]
    put(cache, "abc", 0)
    assert cache.explain(TOKENS[:12]) == ["ok", "ok", "ok"]
    node.restart()
    assert cache.explain(TOKENS[:4]) == ["never_stored"]
    node.settled()


def test_reports_say_where(cache: DirectCache, node: Node) -> None:
    put(cache, "ab")
    reports = cache.run(cache.session.explain([*make_tokens("ab"), 1, 2], 0, ()))
    assert reports == [ChunkReport(0, 4, "ok", node.name), ChunkReport(4, 4, "ok", node.name)]
    assert cache.run(cache.session.explain([], 0, ())) == []


def test_unknown_kv_and_pressure() -> None:
    node = Node(4, told_only=True)
    cache = DirectCache(node)
    put(cache, "ab")
    assert cache.explain(TOKENS[:8]) == ["kv_unknown", "kv_unknown"]
    cache.report("report_stored", TOKENS[:8])
    churn(cache, 3)
    assert cache.explain(TOKENS[:8]) == ["ok", "evicted"], "tails go first"


def test_other_salts_are_never_told_of(node: Node) -> None:
    put(DirectCache(node, cache_salt="a"), "ab")
    assert DirectCache(node, cache_salt="b").explain(TOKENS[:8]) == ["never_stored", "never_stored"]


def test_what_was_evicted_is_remembered_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hs_cache.chunks._MAX_DEPARTED", 3)
    node = Node(2)
    cache = DirectCache(node)
    put(cache, "a")
    churn(cache, 2)
    assert cache.explain(TOKENS[:4]) == ["evicted"]
    churn(cache, 8)
    assert cache.explain(TOKENS[:4]) == ["never_stored"]


def test_other_nodes_are_asked_for_what_is_missing_here() -> None:
    nodes = make_nodes()
    spread(nodes, 0)
    put_part(nodes[2], "abcdefg", 6, 1)
    nodes[0].controller.hear_all()
    cache = DirectCache(nodes[0])
    asked = make_tokens("abcdefgh")
    reports = cache.run(cache.session.explain(asked, 0, ()))
    assert [(report.reason, report.node_id) for report in reports] == [
        ("ok", nodes[0].name),
        ("ok", nodes[0].name),
        ("ok", nodes[1].name),
        ("ok", nodes[1].name),
        ("ok", nodes[2].name),
        ("ok", nodes[2].name),
        ("layer_missing", nodes[2].name),
        ("never_stored", nodes[0].name),
    ]
    nodes[1].unreachable = True
    assert cache.explain(asked)[2:4] == ["unreachable"] * 2
    nodes[0].controller.unreachable = True
    assert cache.explain(asked) == ["ok", "ok", *["unreachable"] * 6]
    nodes[0].controller.unreachable, nodes[1].unreachable, nodes[0].unreachable = False, False, True
    assert cache.explain(asked)[:3] == ["unreachable", "unreachable", "ok"]


def test_explaining_to_who_is_strict_raises_what_is_wrong_elsewhere() -> None:
    nodes = make_nodes()
    spread(nodes, 0)
    cache = DirectCache(nodes[0], strict=True)
    nodes[1].unreachable = True
    with pytest.raises(ServiceError, match="node"):
        cache.explain(TOKENS)
    nodes[0].controller.unreachable = True
    with pytest.raises(ServiceError, match="controller"):
        cache.explain(TOKENS)


# locate


def overlapping() -> list[Node]:
    """Of layer 0, the first has chunk a, the second a to d, the third a to f; of layer 1, the third has less."""
    nodes = make_nodes()
    for node, of_zero, of_one in zip(nodes, ("a", "abcd", "abcdef"), ("a", "abcd", "ab"), strict=True):
        put_part(node, of_zero, 0, 0)
        put_part(node, of_one, 0, 1)
    nodes[0].controller.hear_all()
    return nodes


def test_the_node_with_most_of_a_prefix_comes_first() -> None:
    nodes = overlapping()
    one, two, three = (node.name for node in nodes)
    for far in (False, True):
        cache = DirectCache(nodes[0], far=far)
        assert list(cache.locate(TOKENS).items()) == [(three, 24), (two, 16), (one, 4)]
        assert cache.effects == ["Find", "holders", *["Find", "explain"] * 3, *["Fetch"] * 3]
        assert list(cache.locate(TOKENS, [0, 1]).items()) == [(two, 16), (three, 8), (one, 4)]
        assert list(cache.locate(TOKENS[:10]).items()) == [(two, 8), (three, 8), (one, 4)]
        assert cache.locate(make_tokens("xabc")) == {}
        assert cache.locate([]) == cache.locate(TOKENS[:3]) == {}
    assert [node.bytes_sent for node in nodes] == [0, 0, 0]
    for node in nodes:
        node.settled()


def test_only_the_best_are_asked() -> None:
    nodes = overlapping()
    one, two, three = (node.name for node in nodes)
    cache = DirectCache(nodes[0])
    assert list(cache.locate(TOKENS, [0, 1], num_asked=0).items()) == [(three, 24), (two, 16), (one, 4)]
    assert cache.effects == ["Find", "holders"]
    assert list(cache.locate(TOKENS, [0, 1], num_asked=1).items()) == [(two, 16), (three, 8), (one, 4)]
    assert cache.effects.count("explain") == 2, "the third had less than it seemed, and the second may have more"
    assert list(cache.locate(TOKENS, num_asked=1).items()) == [(three, 24), (two, 16), (one, 4)]
    assert cache.effects.count("explain") == 1
    assert list(cache.locate(TOKENS, [0, 1], nodes={three, one, "gone"}, num_asked=1)) == [three, one]
    assert cache.effects.count("explain") == 1
    assert cache.locate(TOKENS, nodes=[]) == {}


def test_keys_stand_for_the_prompt() -> None:
    nodes = overlapping()
    cache = DirectCache(nodes[0])
    keys = cache.session.chunk_keys(TOKENS, ())
    assert cache.locate(keys) == cache.locate(TOKENS) != {}
    assert cache.locate(DirectCache(nodes[0], cache_salt="another").session.chunk_keys(TOKENS, ())) == {}
    with pytest.raises(InvalidInputError, match="prompt: got keys of chunks of 8, expected the service's 4"):
        cache.locate(ChunkKeys(keys.blob, 48, 8))
    with pytest.raises(InvalidInputError, match="mm_spans: got spans along with keys"):
        cache.run(cache.session.locate(keys, 0, [(0, 1, b"x")], None, None, None))


def test_rows_without_kv_on_that_node_do_not_count() -> None:
    nodes = overlapping()
    one, two, three = (node.name for node in nodes)
    cache = DirectCache(nodes[0])
    DirectCache(nodes[2]).report("report_evicted", cache.session.chunk_keys(TOKENS, ())[1:2])
    assert cache.locate(TOKENS) == {two: 16, three: 4, one: 4}
    DirectCache(nodes[0]).report("report_evicted", cache.session.chunk_keys(TOKENS, ())[0:1])
    assert cache.locate(TOKENS) == {two: 16, three: 4}


def test_who_does_not_answer_is_left_out() -> None:
    nodes = overlapping()
    one, two, _ = (node.name for node in nodes)
    nodes[2].unreachable = True
    cache = DirectCache(nodes[0])
    assert cache.locate(TOKENS) == {two: 16, one: 4}
    assert cache.locate(TOKENS) == {two: 16, one: 4}
    assert cache.effects.count("explain") == 2, "it is not asked again at once"
    nodes[2].unreachable = False
    cache = DirectCache(nodes[0])
    cache.faults = {3: lost_call}
    assert cache.locate(TOKENS) == {two: 16, one: 4}
    nodes[0].controller.unreachable = True
    assert cache.locate(TOKENS) == {}
    nodes[2].unreachable = True
    for node_is_it in (True, False):
        nodes[0].controller.unreachable = not node_is_it
        with pytest.raises(ServiceError, match="node" if node_is_it else "controller"):
            DirectCache(nodes[0], strict=True).locate(TOKENS)


def test_little_patience_here_costs_nothing_elsewhere() -> None:
    nodes = make_nodes()
    spread(nodes, 0)
    cache = DirectCache(nodes[0])
    cache.faults = {1: lost_call}
    assert cache.locate(TOKENS, timeout_s=0) == {}
    assert cache.locate(TOKENS) == {}, "who didn't answer is left alone for a while"
    assert cache.effects == []
    assert cache.retrieve(TOKENS).num_tokens == 24
    cache = DirectCache(nodes[0])
    cache.faults = {3: lost_call}
    assert cache.locate(TOKENS, timeout_s=0.001) == {}
    assert cache.retrieve(TOKENS).num_tokens == 24


BAD: dict[str, tuple[Callable[[DirectCache], Any], str]] = {
    "hold": (lambda cache: cache.plan(TOKENS, hold=1), "hold: got 1, expected True or False"),
    "layers": (lambda cache: cache.plan(TOKENS, []), "layers: got none"),
    "tokens": (lambda cache: cache.plan("ab"), "token_ids: got str"),
    "explained layers": (lambda cache: cache.explain(TOKENS, "0"), "layers: got '0'"),
    "located layers": (lambda cache: cache.locate(TOKENS, []), "layers: got none"),
    "located tokens": (lambda cache: cache.locate("ab"), "token_ids: got str"),
    "num_asked": (lambda cache: cache.locate(TOKENS, num_asked=-1), "num_asked: got -1, expected 0 or more"),
    "num_asked, no int": (lambda cache: cache.locate(TOKENS, num_asked=1.0), "num_asked: got 1.0, expected an int"),
    "nodes": (lambda cache: cache.locate(TOKENS, nodes="abc"), "nodes: got str, expected a collection"),
    "timeout_s": (lambda cache: cache.locate(TOKENS, timeout_s=-1), "timeout_s: got -1"),
    "explained tokens": (lambda cache: cache.explain(5.0), "token_ids: got float"),
}


@pytest.mark.parametrize("call, message", BAD.values(), ids=BAD)
def test_bad_input_is_named(call: Callable[[DirectCache], Any], message: str, cache: DirectCache) -> None:
    with pytest.raises(InvalidInputError, match=message):
        call(cache)
    assert cache.effects in ([], ["Locate", "attach"])
