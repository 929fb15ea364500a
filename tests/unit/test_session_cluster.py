"""What a client does where several nodes hold a prefix: pieces are stitched, hints are hints, any node may fail."""

import functools
import itertools
import logging
import pickle
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from hs_cache import attachment, connection, effects, gathering, reading, troubles
from hs_cache.errors import InvalidInputError, ServiceError, ServiceTimeoutError
from hs_cache.keys import KVNames
from hs_cache.results import PrefixHit
from hs_cache.retrieval import Ask, Piece
from hs_cache.session import Session
from tests import direct
from tests.builders import make_tokens
from tests.direct import (
    HIDDEN_DIM,
    Cancelled,
    Clock,
    DirectCache,
    Fault,
    Node,
    broken,
    cancelled_after,
    cancelled_before,
    lost_call,
    lost_reply,
    make_rows,
    put_part,
    refused,
    spread,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfd and /proc are Linux")

TOKENS = make_tokens("abcdef")
TIMEOUT_S = 2.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (attachment, effects, troubles, connection, reading):
        monkeypatch.setattr(module, "time", clock)
    return clock


make_nodes = functools.partial(direct.make_nodes, rpc_timeout_s=TIMEOUT_S)


def check(hit: PrefixHit, layers: Sequence[int] = (0,), start: int = 0, tokens: Sequence[int] = TOKENS) -> None:
    """Whatever was found is right, and not torn at the seams."""
    assert list(hit) in ([], list(layers))
    for layer in hit:
        assert hit[layer].shape == (hit.num_tokens - start, HIDDEN_DIM)
        assert torch.equal(hit[layer].double(), make_rows(tokens, layer)[start : hit.num_tokens].double())


def settled(nodes: Sequence[Node]) -> None:
    for node in nodes:
        node.settled()


# Stitching


@pytest.mark.parametrize("far", [False, True], ids=["with a pool", "without a pool"])
@pytest.mark.parametrize("at", range(3))
def test_a_prefix_spread_over_three_nodes_is_found_from_each(at: int, far: bool) -> None:
    nodes = make_nodes()
    spread(nodes, 0, 7)
    cache = DirectCache(nodes[at], far=far)
    hit = cache.retrieve(TOKENS, [7, 0])
    assert (hit.num_tokens, hit.ended_by) == (24, "")
    check(hit, (7, 0))
    for other in hit[0], hit[7]:
        other.zero_()
    check(cache.retrieve(TOKENS, [7, 0]), (7, 0))
    settled(nodes)


@pytest.mark.parametrize("far", [False, True], ids=["with a pool", "without a pool"])
def test_any_window_of_it_and_only_its_rows_travel(far: bool) -> None:
    nodes = make_nodes()
    spread(nodes)
    cache = DirectCache(nodes[0], far=far)
    for start, stop in itertools.combinations_with_replacement(range(0, 25, 3), 2):
        hit = cache.retrieve(TOKENS, 0, start=start, stop=stop)
        assert (hit.num_tokens, hit.start, hit.ended_by, bool(hit)) == (stop, start, "", start < stop)
        check(hit, start=start)
    cache.retrieve(TOKENS, 0, start=16)
    assert cache.effects.count("Fetch") == (4 if far else 3), "an answer each, and the rows of the last"
    row_bytes = 2 * HIDDEN_DIM
    for start, of_each in ((0, [8, 8, 8]), (3, [5, 8, 8]), (13, [0, 3, 8]), (24, [0, 0, 0])):
        for node in nodes:
            node.bytes_sent = 0
        check(cache.retrieve(TOKENS, 0, start=start), start=start)
        expected = of_each if far else [0, *of_each[1:]]
        assert [node.bytes_sent for node in nodes] == [rows * row_bytes for rows in expected]
    settled(nodes)


@pytest.mark.parametrize("far", [False, True], ids=["with a pool", "without a pool"])
def test_conversions_and_buffers_across_nodes(far: bool) -> None:
    nodes = make_nodes()
    spread(nodes, 0, 1)
    cache = DirectCache(nodes[1], far=far)
    buffer = torch.full((30, HIDDEN_DIM), -1.0, dtype=torch.float64)
    hit = cache.retrieve(TOKENS, [0, 1], start=3, out={0: buffer})
    check(hit, (0, 1), start=3)
    assert hit[0].data_ptr() == buffer.data_ptr()
    assert (buffer[21:] == -1).all()
    check(cache.retrieve(TOKENS, [0, 1], dtype=torch.float32), (0, 1))
    with pytest.raises(InvalidInputError, match="out: got hidden_dim 9 for layer 0, expected 8 as stored"):
        cache.retrieve(TOKENS, 0, out={0: torch.empty(24, 9)})
    settled(nodes)


def test_a_short_last_chunk_elsewhere() -> None:
    nodes = make_nodes(2, save_unfull_chunk=True)
    tokens = TOKENS[:10]
    put_part(nodes[0], "ab", 0)
    DirectCache(nodes[1]).store(tokens, {0: make_rows(tokens)[8:]}, token_offset=8)
    nodes[0].controller.hear_all()
    for far in (False, True):
        cache = DirectCache(nodes[0], far=far)
        hit = cache.retrieve(tokens)
        assert (hit.num_tokens, hit.ended_by) == (10, "")
        check(hit)
        assert cache.retrieve(TOKENS).num_tokens == 8


def test_two_nodes_by_turns() -> None:
    nodes = make_nodes(2)
    for first_chunk in range(6):
        prompt = "abcdef"[: first_chunk + 1]
        put_part(nodes[first_chunk % 2], prompt, first_chunk)
    nodes[0].controller.hear_all()
    for node in nodes:
        hit = DirectCache(node).retrieve(TOKENS)
        assert hit.num_tokens == 24
        check(hit)


# Who is asked


def test_what_is_all_here_and_what_nobody_else_can_have_costs_one_call() -> None:
    nodes = make_nodes()
    put_part(nodes[0], "abcdef", 0)
    nodes[0].controller.hear_all()
    nodes[0].controller.calls.clear()
    cache = DirectCache(nodes[0])
    assert cache.retrieve(TOKENS).num_tokens == 24
    assert cache.effects == ["lease"]
    lonely = Node()
    lonely.controller.hear_all()
    cache = DirectCache(lonely)
    cache.put(TOKENS[:8])
    for asked, found in ((TOKENS, 8), (make_tokens("x"), 0)):
        assert cache.retrieve(asked).num_tokens == found
        assert cache.effects == ["lease"]
    assert nodes[0].controller.calls == []


def test_all_nodes_are_asked_at_once_and_those_without_a_part_are_not() -> None:
    nodes = make_nodes(4)
    spread(nodes[:3])
    cache = DirectCache(nodes[0])
    for node in nodes:
        node.calls.clear()
    assert cache.retrieve(TOKENS).num_tokens == 24
    ask, answer = ["Find", "retrieve_rows"], ["Fetch"]
    assert cache.effects == ["lease", "Find", "locate", *ask, *ask, *answer, *answer, "Fetch", "Fetch", "Work"]
    assert [node.calls for node in nodes] == [["lease"], ["retrieve_rows"], ["retrieve_rows"], []]


def test_nodes_that_have_the_same_are_asked_in_turn() -> None:
    nodes = make_nodes(4)
    for node in nodes[1:]:
        put_part(node, "abcdef", 0)
    nodes[0].controller.hear_all()
    cache = DirectCache(nodes[0])
    for node in nodes:
        node.calls.clear()
    for _ in range(6):
        check(cache.retrieve(TOKENS))
    assert [node.calls.count("retrieve_rows") for node in nodes] == [0, 2, 2, 2]


# Hints that are wrong


def believe(node: Node, prompt: str, first_chunk: int = 0) -> None:
    """The directory takes a node to have these chunks, too."""
    keys = DirectCache(node).session.chunk_keys(make_tokens(prompt), ()).blob[16 * first_chunk :]
    node.publisher._number += 1
    assert node.controller.directory.apply(node.name, node.pool.incarnation, node.publisher._number, keys, b"")


@pytest.mark.parametrize("far", [False, True], ids=["with a pool", "without a pool"])
def test_a_stale_hint_is_a_miss_and_is_corrected(far: bool) -> None:
    nodes = make_nodes(2)
    put_part(nodes[0], "ab", 0)
    nodes[0].controller.hear_all()
    cache = DirectCache(nodes[0], far=far)
    for first_chunk, found in ((2, 8), (0, 8)):
        believe(nodes[1], "abcd", first_chunk)
        hit = cache.retrieve(TOKENS[:16])
        assert (hit.num_tokens, hit.ended_by) == (found, "hidden_state")
        check(hit)
        for _ in range(4):  # each time it is told of one more chunk
            nodes[0].controller.hear_all()
            cache.retrieve(TOKENS[:16])
        nodes[1].calls.clear()
        assert cache.retrieve(TOKENS[:16]).num_tokens == found
        assert "retrieve_rows" not in nodes[1].calls
    del hit
    settled(nodes)


def test_a_hint_that_all_of_a_prefix_is_elsewhere_is_corrected_too() -> None:
    nodes = make_nodes(2)
    nodes[0].controller.hear_all()
    believe(nodes[1], "a")
    nodes[1].calls.clear()
    cache = DirectCache(nodes[0])
    assert not cache.retrieve(make_tokens("a"))
    assert nodes[1].calls == ["retrieve_rows"]
    nodes[0].controller.hear_all()
    assert not cache.retrieve(make_tokens("a"))
    assert nodes[1].calls == ["retrieve_rows"]


def test_where_one_node_falls_short_the_next_is_asked_for_the_rest() -> None:
    nodes = make_nodes(4)
    spread(nodes[:3])
    put_part(nodes[3], "abcdef", 2)
    nodes[0].controller.hear_all()
    cache = DirectCache(nodes[0])
    for number, key in enumerate(cache.session.chunk_keys(TOKENS, ())):
        if number in (3, 5):
            nodes[1].server.drop_key(key)
            nodes[2].server.drop_key(key)
    for _ in range(4):  # whoever's turn it is
        hit = cache.retrieve(TOKENS)
        assert (hit.num_tokens, hit.ended_by) == (24, "")
        check(hit)
    settled(nodes)


def test_a_node_that_lacks_a_layer_falls_short() -> None:
    nodes = make_nodes(3)
    put_part(nodes[0], "ab", 0, 0, 1)
    put_part(nodes[1], "abcdef", 2, 0)
    put_part(nodes[2], "abcd", 2, 0, 1)
    nodes[0].controller.hear_all()
    cache = DirectCache(nodes[0])
    for _ in range(2):
        hit = cache.retrieve(TOKENS, [0, 1])
        assert (hit.num_tokens, hit.ended_by) == (16, "hidden_state")
        check(hit, (0, 1))
    assert cache.retrieve(TOKENS, 0).num_tokens == 24


@pytest.mark.parametrize("far", [False, True], ids=["with a pool", "without a pool"])
def test_another_spec_on_another_node_ends_the_prefix(far: bool) -> None:
    nodes = make_nodes(4)
    put_part(nodes[0], "ab", 0)
    put_part(nodes[1], "abcd", 2, dtype=torch.float16)
    put_part(nodes[2], "abcdef", 4)
    nodes[0].controller.hear_all()
    cache = DirectCache(nodes[0], far=far)
    hit = cache.retrieve(TOKENS)
    assert (hit.num_tokens, hit.ended_by) == (8, "hidden_state")
    check(hit)
    put_part(nodes[3], "abcd", 2)
    nodes[0].controller.hear_all()
    for _ in range(2):
        hit = cache.retrieve(TOKENS)
        assert (hit.num_tokens, hit.ended_by) == (24, ""), "another one has it as it should be"
        check(hit)
    settled(nodes)


# The KV side


@pytest.mark.parametrize("far", [False, True], ids=["with a pool", "without a pool"])
def test_kv_that_is_absent_here_may_be_present_elsewhere(far: bool) -> None:
    nodes = make_nodes(2)
    for node in nodes:
        put_part(node, "abcdef", 0)
    nodes[0].controller.hear_all()
    keys = DirectCache(nodes[0]).session.chunk_keys(TOKENS, ())
    nodes[0].index.report_evicted(keys[2])
    cache = DirectCache(nodes[0], far=far)
    hit = cache.retrieve(TOKENS)
    assert (hit.num_tokens, hit.ended_by) == (24, "")
    check(hit)
    assert not nodes[0].server.has_chunk(keys[2])
    nodes[1].index.report_evicted(keys[4])
    nodes[0].index.report_evicted(keys[4])
    nodes[0].index.report_evicted(keys[2])
    hit = cache.retrieve(TOKENS)
    assert (hit.num_tokens, hit.ended_by) == (16, "kv_absent")
    check(hit)


class Asleep:
    """A KV side that doesn't answer."""

    def known(self, names: KVNames) -> bool:
        return False

    def presence(self, names: KVNames, timeout_s: float) -> Sequence[int]:
        raise TimeoutError

    def note_stored(self, names: bytes, engine: str) -> None: ...

    def settle_notes(self, timeout_s: float) -> bool:
        return True


@pytest.mark.parametrize("far", [False, True], ids=["with a pool", "without a pool"])
def test_kv_that_is_unknown_here_may_be_present_elsewhere(far: bool) -> None:
    nodes = make_nodes(2)
    nodes.append(Node(controller=nodes[0].controller, kv=Asleep()))
    put_part(nodes[2], "abcd", 0)
    nodes[0].controller.hear_all()
    cache = DirectCache(nodes[2], far=far)
    nodes[2].calls.clear()
    miss = cache.retrieve(TOKENS)
    assert (bool(miss), miss.ended_by) == (False, "kv_unknown")
    assert nodes[2].calls == (["retrieve_rows"] if far else ["lease"]), "once is enough"
    put_part(nodes[1], "abcd", 0)
    nodes[0].controller.hear_all()
    hit = cache.retrieve(TOKENS)
    assert (hit.num_tokens, hit.ended_by) == (16, "hidden_state")
    check(hit)
    assert nodes[2].server.num_cached_chunks() == 4, "nothing was dropped"


# Faults


def retrieve(cache: DirectCache) -> None:
    check(cache.retrieve(TOKENS, [0, 1]), (0, 1))


def retrieve_a_window(cache: DirectCache) -> None:
    check(cache.retrieve(TOKENS, [1], start=5, stop=18, dtype=torch.float32), [1], start=5)


def ref(cache: DirectCache) -> None:
    ask, pieces = cache.run(cache.session.retrieve_pieces(TOKENS, [0, 1], ()))
    check(cache.run(cache.session.resolve(ask, pieces, None)), (0, 1))


def resolve(cache: DirectCache) -> None:
    faults, cache.faults = cache.faults, {}
    ask, pieces = cache.run(cache.session.retrieve_pieces(TOKENS, [0, 1], ()))
    cache.faults = faults
    check(cache.run(cache.session.resolve(ask, pieces, None)), (0, 1))


def store(cache: DirectCache) -> None:
    cache.put(make_tokens("xyz"), 0, 1)


def noted(cache: DirectCache, fault: Fault, met: list[int]) -> Fault:
    """The fault, where it can happen: copying doesn't time out."""

    def and_noted(perform: Callable[[], Any]) -> Any:
        met.append(1)
        return (
            perform() if cache.effects[-1] == "Work" and fault in (lost_call, lost_reply, refused) else fault(perform)
        )

    return and_noted


def dies(node: int) -> Callable[[list[Node]], Fault]:
    """A node is gone from this effect on, with all objects that lie on it."""

    def fault(nodes: list[Node]) -> Fault:
        def gone(perform: Callable[[], Any]) -> Any:
            nodes[node].unreachable = True
            return perform()

        return gone

    return fault


def restarts(node: int) -> Callable[[list[Node]], Fault]:
    def fault(nodes: list[Node]) -> Fault:
        def anew(perform: Callable[[], Any]) -> Any:
            nodes[node].restart()
            return perform()

        return anew

    return fault


def controller_dies(nodes: list[Node]) -> Fault:
    def gone(perform: Callable[[], Any]) -> Any:
        nodes[0].controller.unreachable = True
        return perform()

    return gone


FAULTS: dict[str, Callable[[list[Node]], Fault]] = {
    "lost call": lambda nodes: lost_call,
    "lost reply": lambda nodes: lost_reply,
    "dead actor": lambda nodes: refused,
    "cancelled before": lambda nodes: cancelled_before,
    "cancelled after": lambda nodes: cancelled_after,
    "broken": lambda nodes: broken,
    "own node dies": dies(0),
    "second node dies": dies(1),
    "third node dies": dies(2),
    "own node restarts": restarts(0),
    "second node restarts": restarts(1),
    "controller dies": controller_dies,
}
MOST_S = TIMEOUT_S + gathering._LEAST_S + 0.001  # and next to nothing for so few bytes


@pytest.mark.parametrize("far", [False, True], ids=["with a pool", "without a pool"])
@pytest.mark.parametrize("operation", [retrieve, retrieve_a_window, resolve, ref, store])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_at_any_effect_is_a_shorter_prefix_in_time_and_leaks_nothing(
    operation: Callable[[DirectCache], None], fault: str, far: bool, clock: Clock
) -> None:
    times = {ref: 2, resolve: 2, store: 2}.get(operation, 1)  # attempts, each with a deadline of its own
    for number in itertools.count():
        nodes = make_nodes()
        spread(nodes, 0, 1)
        cache = DirectCache(nodes[0], far=far, clock=clock)
        met: list[int] = []
        cache.faults[number] = noted(cache, FAULTS[fault](nodes), met)
        begun = clock.monotonic()
        try:
            operation(cache)
        except (Cancelled, MemoryError):
            assert fault in ("cancelled before", "cancelled after", "broken")
        assert clock.monotonic() - begun <= times * MOST_S
        for node in nodes:
            node.unreachable = False
        nodes[0].controller.unreachable = False
        nodes[0].controller.hear_all()
        clock.advance(troubles._SUSPICION_S)
        hit = cache.retrieve(TOKENS, [0, 1])
        check(hit, (0, 1))
        assert hit.num_tokens == {"own node restarts": 0, "second node restarts": 8}.get(fault, 24) or not met
        if operation is store:
            cache.put(make_tokens("xyz"), 0, 1)
            check(cache.retrieve(make_tokens("xyz"), [0, 1]), (0, 1), tokens=make_tokens("xyz"))
        del hit
        settled(nodes)
        if not met:
            assert number > 0
            break


@pytest.mark.parametrize("far", [False, True], ids=["with a pool", "without a pool"])
@pytest.mark.parametrize("operation", [retrieve, ref, resolve])
def test_where_everything_times_out_from_some_effect_on_it_ends_in_time(
    operation: Callable[[DirectCache], None], far: bool, clock: Clock
) -> None:
    nodes = make_nodes()
    spread(nodes, 0, 1)
    for number in range(14):
        cache = DirectCache(nodes[0], far=far, clock=clock)

        def lost(perform: Callable[[], Any], cache: DirectCache = cache) -> Any:
            if cache.effects[-1] == "Work":
                return perform()
            raise ServiceTimeoutError("lost")

        cache.faults = dict.fromkeys(range(number, 100), lost)
        begun = clock.monotonic()
        operation(cache)
        assert clock.monotonic() - begun <= (1 if operation is retrieve else 2) * MOST_S
        settled(nodes)


def test_a_retrieve_takes_all_of_what_can_be_had(clock: Clock) -> None:
    for gone, found in ((1, 8), (2, 16)):
        for far in (False, True):
            nodes = make_nodes()
            spread(nodes)
            cache = DirectCache(nodes[0], far=far, clock=clock)
            nodes[gone].unreachable = True
            hit = cache.retrieve(TOKENS)
            assert (hit.num_tokens, hit.ended_by) == (found, "unreachable")
            check(hit)


def test_rows_that_are_lost_after_the_answer_end_the_prefix_there(clock: Clock) -> None:
    nodes = make_nodes()
    spread(nodes)
    cache = DirectCache(nodes[0], clock=clock)
    cache.retrieve(TOKENS)
    fetches = [number for number, effect in enumerate(cache.effects) if effect == "Fetch"]
    for number, found in zip(fetches[2:], (8, 16), strict=True):
        cache.faults[number] = refused
        hit = cache.retrieve(TOKENS)
        assert (hit.num_tokens, hit.ended_by) == (found, "unreachable")
        check(hit)
    assert cache.run(cache.session.stats()).unreachable_total == 2
    assert cache.effects == ["stats"], "the attachment to the own node was kept"


def operations_of(node: Node) -> int:
    """Calls of it; when releases come is up to a thread."""
    return sum(call != "release" for call in node.calls)


def test_a_client_whose_serving_node_does_not_answer_is_served_by_another(clock: Clock) -> None:
    nodes = make_nodes()
    spread(nodes)
    put_part(nodes[1], "abcdef", 0)
    nodes[0].controller.hear_all()
    for operation in (lambda cache: cache.put(make_tokens("xy")), lambda cache: cache.retrieve(TOKENS)):
        far, near = DirectCache(nodes[0], far=True, clock=clock), DirectCache(nodes[0], clock=clock)
        for cache, its_answer in ((far, 1), (near, 0)):  # the far one copies rows, or only begins a call, before
            cache.faults[its_answer] = lost_call
            begun = clock.monotonic()
            operation(cache)
            assert clock.monotonic() - begun == pytest.approx(TIMEOUT_S)
        asked = operations_of(nodes[0])
        begun = clock.monotonic()
        assert far.retrieve(TOKENS).num_tokens == 24
        assert far.put(make_tokens("z")).failed == 0
        assert (clock.monotonic(), operations_of(nodes[0])) == (begun, asked)
        assert near.retrieve(TOKENS).num_tokens == 24
        assert operations_of(nodes[0]) > asked, "a client on the node itself stays with it"
        clock.advance(troubles._SUSPICION_S)
    settled(nodes)


def test_who_did_not_answer_is_not_asked_again_for_a_while(clock: Clock) -> None:
    nodes = make_nodes()
    spread(nodes)
    cache = DirectCache(nodes[0], clock=clock)
    assert cache.retrieve(TOKENS).num_tokens == 24
    answer = cache.effects.index("Fetch")
    cache.faults[answer] = lost_call
    begun = clock.monotonic()
    assert cache.retrieve(TOKENS).num_tokens == 8
    assert clock.monotonic() - begun == pytest.approx(TIMEOUT_S)
    nodes[1].calls.clear()
    begun = clock.monotonic()
    hit = cache.retrieve(TOKENS)
    assert (hit.num_tokens, hit.ended_by) == (8, "hidden_state")
    assert (clock.monotonic(), nodes[1].calls) == (begun, [])
    put_part(nodes[2], "abcd", 2)
    nodes[0].controller.hear_all()
    assert cache.retrieve(TOKENS).num_tokens == 24, "another one is"
    clock.advance(troubles._SUSPICION_S)
    for key in cache.session.chunk_keys(TOKENS, ()):
        nodes[2].server.drop_key(key)
    nodes[0].controller.hear_all()
    assert cache.retrieve(TOKENS).num_tokens == 16
    assert nodes[1].calls == ["retrieve_rows"]


def test_a_node_that_is_named_and_can_not_be_found_is_left_out(clock: Clock) -> None:
    nodes = make_nodes()
    spread(nodes)
    put_part(nodes[2], "abcd", 2)
    nodes[0].controller.hear_all()
    del nodes[0].controller.nodes[nodes[1].name]
    cache = DirectCache(nodes[0], clock=clock)
    for _ in range(2):
        hit = cache.retrieve(TOKENS)
        assert (hit.num_tokens, hit.ended_by) == (24, "")
        check(hit)


@pytest.mark.parametrize("slow", [False, True], ids=["gone", "hanging"])
def test_without_the_controller_what_is_here_is_served(
    slow: bool, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    nodes = make_nodes()
    spread(nodes)
    cache = DirectCache(nodes[0], clock=clock)
    nodes[0].controller.unreachable = True
    waited = []
    for _ in range(4):
        if slow:
            cache.faults[2] = lost_call
        begun = clock.monotonic()
        hit = cache.retrieve(TOKENS)
        waited.append(clock.monotonic() - begun)
        assert (hit.num_tokens, hit.ended_by) == (8, "unreachable"), "who knows what others have"
        check(hit)
    assert waited == pytest.approx([TIMEOUT_S if slow else 0.0, 0.0, 0.0, 0.0]), "one retrieve waits for it, at most"
    (record,) = caplog.records
    assert "the directory can't be reached" in record.getMessage()
    stats = cache.run(cache.session.stats())
    assert (stats.timeouts_total, stats.unreachable_total) == ((1, 0) if slow else (0, 4))
    nodes[0].controller.unreachable = False
    clock.advance(troubles._SUSPICION_S)
    assert cache.retrieve(TOKENS).num_tokens == 24
    nodes[0].controller.unreachable = True
    cache.retrieve(TOKENS)
    told = [record.getMessage().split(":")[1] for record in caplog.records]
    away = " the directory can't be reached, and counts as empty until it can"
    assert told == [away, " the directory can be reached again", away]


def test_the_reason_why_it_ended_here_stays_when_nobody_has_more() -> None:
    nodes = make_nodes(2)
    put_part(nodes[0], "abc", 0)
    nodes[0].controller.hear_all()
    cache = DirectCache(nodes[0])
    cache.report("report_evicted", [cache.session.chunk_keys(TOKENS, ())[1]])
    hit = cache.retrieve(TOKENS[:12])
    assert (hit.num_tokens, hit.ended_by) == (4, "kv_absent")
    nodes[0].controller.unreachable = True
    hit = cache.retrieve(TOKENS[:12])
    assert (hit.num_tokens, hit.ended_by) == (4, "unreachable")


@pytest.mark.parametrize("far", [False, True], ids=["with a pool", "without a pool"])
def test_a_client_whose_own_node_is_gone_finds_what_others_have(
    far: bool, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    nodes = make_nodes()
    spread(nodes)
    put_part(nodes[1], "ab", 0)
    nodes[0].controller.hear_all()
    cache = DirectCache(nodes[0], far=far, clock=clock)
    nodes[0].unreachable = True
    for _ in range(3):
        hit = cache.retrieve(TOKENS)
        assert (hit.num_tokens, hit.ended_by) == (24, "")
        check(hit)
    _, pieces = cache.run(cache.session.retrieve_pieces(TOKENS, 0, ()))
    assert [piece.num_tokens for piece in pieces] == [16, 8]
    assert "the cache can't be reached" in caplog.records[0].getMessage()
    assert len(caplog.records) <= 2
    nodes[2].unreachable = True
    assert cache.retrieve(TOKENS).num_tokens == 16
    nodes[1].unreachable = True
    assert cache.retrieve(TOKENS).ended_by == "unreachable"
    for node in nodes:
        node.unreachable = False
    clock.advance(troubles._SUSPICION_S)
    assert cache.retrieve(TOKENS).num_tokens == 24
    settled(nodes)


def test_strict_clients_hear_of_each_trouble_once(clock: Clock) -> None:
    nodes = make_nodes()
    spread(nodes)
    cache = DirectCache(nodes[0], strict=True, clock=clock)
    nodes[1].unreachable = True
    with pytest.raises(ServiceError, match=f"{nodes[1].name} can't be reached"):
        cache.retrieve(TOKENS)
    assert cache.run(cache.session.stats()).unreachable_total == 1
    assert cache.effects == ["stats"], "the attachment to the own node was kept"
    settled(nodes)
    nodes[0].controller.unreachable = True
    with pytest.raises(ServiceError, match="the controller can't be reached"):
        cache.retrieve(TOKENS)
    assert cache.retrieve(TOKENS[:8]).num_tokens == 8, "nobody else is needed for this"
    settled(nodes)
    nodes[0].controller.unreachable = nodes[1].unreachable = False
    far = DirectCache(nodes[0], far=True, strict=True, clock=clock)
    nodes[0].unreachable = True
    with pytest.raises(ServiceError, match=f"{nodes[0].name} can't be reached"):
        far.retrieve(TOKENS)
    assert far.session._troubles.unreachable_total == 1


# Waiting


@pytest.mark.parametrize("far", [False, True], ids=["with a pool", "without a pool"])
def test_waiting_for_what_others_are_about_to_store(far: bool, clock: Clock) -> None:
    nodes = make_nodes()
    put_part(nodes[0], "ab", 0)
    nodes[0].controller.hear_all()
    cache = DirectCache(nodes[0], far=far, clock=clock)
    steps = iter(
        [
            lambda: None,
            lambda: put_part(nodes[1], "abcd", 2),
            lambda: None,
            lambda: put_part(nodes[2], "abcdef", 4),
            nodes[0].controller.hear_all,
        ]
    )

    def next_step() -> None:
        next(steps)()

    cache.pausing = next_step
    hit = cache.retrieve(TOKENS, wait_s=10)
    assert (hit.num_tokens, hit.ended_by) == (24, "")
    check(hit)
    assert next(steps, None) is None
    assert cache.effects.count("Pause") == 5
    stats = cache.run(cache.session.stats())
    assert (stats.retrieves_total, stats.hits_total, stats.tokens_served_total) == (1, 1, 24), "one call is one call"
    assert stats.zero_copy_total + stats.copied_total == 2, "rows are moved at the beginning and at the end"
    del hit
    settled(nodes)


def test_waiting_ends_in_time_with_what_is_there(clock: Clock) -> None:
    nodes = make_nodes()
    spread(nodes)
    cache = DirectCache(nodes[0], clock=clock)
    for wait_s, tokens, found in ((3.0, make_tokens("abcdefg"), 24), (0.5, make_tokens("x"), 0), (0, TOKENS, 24)):
        begun = clock.monotonic()
        hit = cache.retrieve(tokens, wait_s=wait_s)
        assert hit.num_tokens == found
        check(hit)
        assert clock.monotonic() - begun == pytest.approx(wait_s)
    begun = clock.monotonic()
    assert cache.retrieve(make_tokens("abcdefg"), stop=24, wait_s=5).num_tokens == 24
    assert cache.retrieve(TOKENS[:3], wait_s=5).num_tokens == 0, "no chunk will ever be there"
    assert clock.monotonic() == begun
    for wrong in (-1, float("nan"), float("inf"), "1", None, True):
        with pytest.raises(InvalidInputError, match="wait_s: got"):
            cache.retrieve(TOKENS, wait_s=wrong)


def test_what_goes_while_one_waits_for_more_is_still_in_hand(clock: Clock) -> None:
    node = Node()
    cache = DirectCache(node, clock=clock)
    cache.put(TOKENS[:8])

    def drop_all() -> None:
        for key in cache.session.chunk_keys(TOKENS, ()):
            node.server.drop_key(key)

    cache.pausing = drop_all
    hit = cache.retrieve(TOKENS, wait_s=1)
    assert hit.num_tokens == 8
    check(hit)


def test_waiting_outlasts_an_outage(clock: Clock) -> None:
    nodes = make_nodes()
    spread(nodes)
    cache = DirectCache(nodes[0], clock=clock)
    nodes[0].unreachable = True
    pauses = itertools.count()

    def comes_back() -> None:
        nodes[0].unreachable = next(pauses) < 3

    cache.pausing = comes_back
    hit = cache.retrieve(TOKENS, wait_s=5)
    assert hit.num_tokens == 24
    check(hit)


# Refs


def make_ref(
    cache: DirectCache, layers: Sequence[int] = (0,), tokens: Sequence[int] = TOKENS
) -> tuple[Ask, list[Piece]]:
    return cache.run(cache.session.retrieve_pieces(tokens, layers, ()))


def resolve_at(
    node: Node, made: tuple[Ask, Sequence[Piece]], *, strict: bool = False, clock: Clock | None = None
) -> tuple[PrefixHit, DirectCache]:
    """As `HiddenStateRef.get` in another process, which knows neither the model nor the salt."""
    cache = DirectCache(node, clock=clock, strict=strict)
    if not strict:
        cache.session = Session.of(node.config)
    return cache.run(cache.session.resolve(*made, None)), cache


def test_rows_behind_a_ref_stay_as_they_were_whatever_becomes_of_the_chunks() -> None:
    nodes = make_nodes()
    spread(nodes, 0, 1)
    made = make_ref(DirectCache(nodes[1], cache_salt=""), [1, 0])
    assert [piece.num_tokens for piece in made[1]] == [8, 8, 8]
    for node in nodes:
        node.restart()
    for node in nodes:
        for _ in range(2):
            hit, cache = resolve_at(node, made)
            assert (hit.num_tokens, hit.ended_by) == (24, "")
            check(hit, (1, 0))
            hit[0].zero_()
            assert cache.effects == ["Fetch", "Fetch", "Fetch", "Work"]


def test_a_ref_to_a_part_gives_that_part() -> None:
    nodes = make_nodes()
    spread(nodes)
    made = make_ref(DirectCache(nodes[2]), tokens=make_tokens("abcdefg"))
    hit, _ = resolve_at(nodes[0], made)
    assert (hit.num_tokens, hit.ended_by) == (24, "hidden_state")
    check(hit)
    assert make_ref(DirectCache(nodes[0]), tokens=make_tokens("x"))[1] == []
    assert make_ref(DirectCache(nodes[0]), tokens=[1])[1] == []


def test_a_ref_whose_rows_are_lost_is_looked_for_by_its_keys(clock: Clock) -> None:
    nodes = make_nodes(4)
    spread(nodes[:3])
    made = make_ref(DirectCache(nodes[0]))
    nodes[1].unreachable = True
    hit, _ = resolve_at(nodes[3], made, clock=clock)
    assert (hit.num_tokens, hit.ended_by) == (8, "unreachable"), "what could be fetched of it is still good"
    check(hit)
    put_part(nodes[2], "abcd", 2)
    nodes[0].controller.hear_all()
    hit, _ = resolve_at(nodes[3], made, clock=clock)
    assert (hit.num_tokens, hit.ended_by) == (24, "")
    check(hit)
    for node in nodes[:3]:
        node.unreachable = True
    miss, _ = resolve_at(nodes[3], made, clock=clock)
    assert (bool(miss), miss.num_tokens) == (False, 0)


def test_what_is_pickled_of_a_ref_is_keys_and_they_are_enough() -> None:
    nodes = make_nodes()
    caches = [DirectCache(node, model="m", cache_salt="secret salt") for node in nodes]
    for cache, end in zip(caches, (8, 16, 24), strict=True):
        cache.store(TOKENS[:end], {0: make_rows(TOKENS[end - 8 : end])}, token_offset=end - 8)
    nodes[0].controller.hear_all()
    ask, _ = make_ref(caches[0])
    pickled = pickle.dumps((ask, nodes[0].config))
    assert b"secret salt" not in pickled
    hit, _ = resolve_at(nodes[1], (pickle.loads(pickled)[0], []))
    assert hit.num_tokens == 24
    check(hit)


def test_a_ref_that_strict_clients_resolve_raises_only_when_nobody_can_be_asked(clock: Clock) -> None:
    nodes = make_nodes()
    spread(nodes)
    made = make_ref(DirectCache(nodes[0]))
    nodes[2].unreachable = True
    with pytest.raises(ServiceError, match=f"{nodes[2].name} can't be reached"):
        resolve_at(nodes[0], made, strict=True, clock=clock)
    nodes[0].controller.forget(nodes[2])
    hit, _ = resolve_at(nodes[0], made, strict=True, clock=clock)
    assert hit.num_tokens == 16
    check(hit)


def test_the_time_for_a_ref_is_what_its_caller_gives(clock: Clock) -> None:
    nodes = make_nodes()
    spread(nodes)
    cache = DirectCache(nodes[0], clock=clock)
    ask, pieces = make_ref(cache)
    for timeout_s in (0.0, 0.25, 30.0):
        cache.faults[0] = lost_call
        hit = cache.run(cache.session.resolve(ask, pieces, timeout_s))
        check(hit)
        assert hit.num_tokens == 24 or not timeout_s, "found by its keys"
        assert cache.waits[0] == pytest.approx(timeout_s, abs=0.001)
        assert max(cache.waits) <= max(timeout_s, gathering._LEAST_S) + 0.001


# The log


def test_an_outage_of_one_node_is_logged_once(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    nodes = make_nodes()
    spread(nodes)
    cache = DirectCache(nodes[0], clock=clock)
    for outage in (1, 2):
        nodes[1].unreachable = True
        for _ in range(3):
            assert cache.retrieve(TOKENS).num_tokens == 8
            clock.advance(troubles._SUSPICION_S)
        nodes[1].unreachable = False
        assert cache.retrieve(TOKENS).num_tokens == 24
        warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
        told = [record.getMessage().removeprefix(f"hs_cache: node {nodes[1].name} can")[:2] for record in warnings]
        assert told == ["'t", " b"] * outage
