"""What a client does, end to end over a real pool and server: results, copies, restarts, life cycle, threads."""

import gc
import logging
import pickle
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from hs_cache import attachment, connection, server
from hs_cache.errors import (
    CacheClosedError,
    InvalidInputError,
    ServiceError,
    ServiceNotRunningError,
)
from hs_cache.results import StoreResult
from hs_cache.session import Session
from tests.builders import CHUNK_SIZE, make_tokens
from tests.direct import (
    BAD_STORES,
    HIDDEN_DIM,
    Clock,
    DirectCache,
    Fault,
    Node,
    lost_call,
    lost_reply,
    make_nodes,
    make_rows,
    poll,
    refused,
    run_script,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfd and /proc are Linux")

TOKENS = make_tokens("abc")
EVERYWHERE = pytest.mark.parametrize("far", [False, True], ids=["with the pool", "without the pool"])


def in_pieces(cache: DirectCache, layer_idx: int = 0) -> None:
    """Store `TOKENS` so that no two chunks of a layer are neighbours in the pool."""
    for end in (4, 8, 12):
        cache.put(TOKENS[:end], layer_idx)
        cache.put([1000 + end] * CHUNK_SIZE, layer_idx)


@EVERYWHERE
def test_a_store_and_its_retrieve(far: bool) -> None:
    node = Node()
    cache = DirectCache(node, far=far)
    tokens = make_tokens("abcd")[:-1]
    assert cache.put(tokens, 0, 7) == StoreResult(stored=3, prefix_tokens=12)
    assert cache.put(tokens, 0, 7) == StoreResult(present=3, prefix_tokens=12)
    hit = cache.retrieve(tokens, [7, 0])
    assert (hit.num_tokens, hit.start, hit.ended_by, list(hit)) == (12, 0, "", [7, 0])
    assert torch.equal(hit[7], make_rows(TOKENS, 7))
    assert torch.equal(hit[0], make_rows(TOKENS, 0))
    del hit
    assert node.settled().num_chunks == 3


@EVERYWHERE
def test_layers_of_any_kind_beside_each_other(far: bool) -> None:
    node = Node()
    cache = DirectCache(node, far=far)
    rows = {
        -1: make_rows(TOKENS, -1, hidden_dim=3, dtype=torch.float16),
        0: make_rows(TOKENS, 0).to(torch.float8_e4m3fn)[:, :5],
        2: make_rows(TOKENS, 2, hidden_dim=5, dtype=torch.float64),
    }
    assert cache.store(TOKENS, rows).stored == 3
    hit = cache.retrieve(TOKENS, list(rows))
    for layer, given in rows.items():
        assert hit[layer].dtype == given.dtype
        assert torch.equal(hit[layer].double(), given.double())


@EVERYWHERE
def test_the_prefix_ends_where_any_layer_does(far: bool) -> None:
    cache = DirectCache(Node(), far=far)
    cache.put(TOKENS, 0)
    cache.put(TOKENS[:8], 1)
    hit = cache.retrieve(TOKENS, [0, 1])
    assert (hit.num_tokens, hit.ended_by, len(hit[0]), len(hit[1])) == (8, "hidden_state", 8, 8)
    miss = cache.retrieve(TOKENS, [0, 2])
    assert (bool(miss), miss.num_tokens, miss.ended_by, len(miss)) == (False, 0, "hidden_state", 0)
    for nothing in ([], TOKENS[:3]):
        hit = cache.retrieve(nothing, 0)
        assert (bool(hit), hit.num_tokens, hit.ended_by) == (False, 0, "")


@EVERYWHERE
@pytest.mark.parametrize("pieces", [False, True], ids=["in one piece", "in pieces"])
def test_any_window_of_the_prefix(far: bool, pieces: bool) -> None:
    node = Node()
    cache = DirectCache(node, far=far)
    in_pieces(cache) if pieces else cache.put(TOKENS)
    rows = make_rows(TOKENS)
    for start in range(len(TOKENS) + 1):
        for stop in range(start, len(TOKENS) + 1):
            hit = cache.retrieve(TOKENS, 0, start=start, stop=stop)
            assert (hit.num_tokens, hit.start, hit.ended_by) == (stop, start, "")
            assert bool(hit) == (start < stop)
            if hit:
                assert torch.equal(hit[0], rows[start:stop])
    # Of a prefix that is shorter than asked for, the window gets what there is.
    longer = make_tokens("abcd")
    hit = cache.retrieve(longer, 0, start=10, stop=15)
    assert (hit.num_tokens, hit.ended_by) == (12, "hidden_state")
    assert torch.equal(hit[0], rows[10:12])
    hit = cache.retrieve(longer, 0, start=12, stop=16)
    assert (hit.num_tokens, bool(hit), hit.ended_by) == (12, False, "hidden_state")
    del hit
    node.settled()


@EVERYWHERE
def test_a_store_with_an_offset_continues_at_a_chunk(far: bool) -> None:
    cache = DirectCache(Node(), far=far)
    cache.put(TOKENS[:4])
    assert cache.store(TOKENS, {0: make_rows(TOKENS)[3:]}, token_offset=3) == StoreResult(stored=2, prefix_tokens=12)
    assert torch.equal(cache.retrieve(TOKENS)[0], make_rows(TOKENS))
    unreachable_rows = cache.store(make_tokens("xyz"), {0: make_rows(TOKENS)[3:]}, token_offset=3)
    assert (unreachable_rows.stored, unreachable_rows.prefix_tokens) == (2, 0)


@EVERYWHERE
def test_nothing_to_store(far: bool) -> None:
    cache = DirectCache(Node(hidden_state_layers=[0]), far=far)
    empty = torch.empty(0, HIDDEN_DIM)
    assert cache.store([], {0: empty}) == StoreResult()
    assert cache.store(TOKENS, {0: empty}, token_offset=12) == StoreResult()
    assert cache.put(TOKENS, 1) == StoreResult(filtered=3)
    assert cache.put(TOKENS[:3], 1) == StoreResult()
    assert cache.effects == []


@EVERYWHERE
def test_short_tails(far: bool) -> None:
    cache = DirectCache(Node(save_unfull_chunk=True), far=far)
    tokens = list(range(7))
    assert cache.put(tokens[:6]) == StoreResult(stored=2, prefix_tokens=6)
    for asked, found in ((6, 6), (7, 4), (5, 4)):
        assert torch.equal(cache.retrieve(tokens[:asked])[0], make_rows(tokens[:found]))
    hit = cache.retrieve(tokens[:6], 0, start=4, stop=5)
    assert (hit.num_tokens, hit.ended_by) == (5, "")
    assert torch.equal(hit[0], make_rows(tokens[4:5]))


@EVERYWHERE
@pytest.mark.parametrize(("arguments", "message"), BAD_STORES.values(), ids=BAD_STORES)
def test_a_wrong_store_changes_nothing(arguments: Callable[[], tuple[Any, Any, Any]], message: str, far: bool) -> None:
    node = Node()
    cache = DirectCache(node, far=far)
    cache.put(TOKENS)
    before = node.settled()
    token_ids, layers, token_offset = arguments()
    with pytest.raises(InvalidInputError, match=message):
        cache.store(token_ids, layers, token_offset=token_offset)
    assert cache.effects == []
    assert node.settled() == before


BAD_RETRIEVES: dict[str, tuple[dict[str, Any], str]] = {
    "start below 0": ({"start": -1}, "start, stop: got -1 and 12, expected 0 <= start <= stop <= 12"),
    "stop beyond": ({"stop": 13}, "start, stop: got 0 and 13, expected 0 <= start <= stop <= 12"),
    "stop below 0": ({"stop": -1}, "start, stop: got 0 and -1"),
    "start behind stop": ({"start": 5, "stop": 4}, "start, stop: got 5 and 4"),
    "start is a float": ({"start": 1.0}, "start: got 1.0, expected an int"),
    "stop is a bool": ({"stop": True}, "stop: got True, expected an int"),
    "dtype of integers": ({"dtype": torch.int32}, "dtype: got torch.int32, expected one of"),
    "dtype is text": ({"dtype": "float32"}, "dtype: got 'float32', expected one of"),
    "no layers": ({"layers": []}, "layers: got none"),
    "layers are text": ({"layers": "0"}, "layers: got '0'"),
    "tokens are floats": ({"token_ids": [0.5]}, "token_ids"),
    "tokens are None": ({"token_ids": None}, "token_ids"),
    "out is a tensor": ({"out": torch.empty(12, 8)}, r"out: got Tensor, expected \{layer_idx: buffer\}"),
    "out of another layer": ({"out": {1: torch.empty(12, 8)}}, "out: got a buffer for layer 1, expected only layers"),
    "out too short": ({"out": {0: torch.empty(11, 8)}}, r"out: got \[11, 8\] for layer 0, expected .*at least 12"),
    "out too short for the window": ({"out": {0: torch.empty(3, 8)}, "start": 2, "stop": 6}, "at least 4"),
    "out of one dimension": ({"out": {0: torch.empty(96)}}, r"out: got \[96\] for layer 0"),
    "out is an array": ({"out": {0: np.empty((12, 8))}}, "out: got ndarray for layer 0"),
    "out of integers": ({"out": {0: torch.empty(12, 8, dtype=torch.int32)}}, "out.dtype: got torch.int32"),
    "out of another dtype": (
        {"out": {0: torch.empty(12, 8)}, "dtype": torch.float16},
        "out: got torch.float32 for layer 0, expected torch.float16 as dtype says",
    ),
    "out requires grad": ({"out": {0: torch.empty(12, 8, requires_grad=True)}}, "out: .* requires grad for layer 0"),
}


@pytest.mark.parametrize(("arguments", "message"), BAD_RETRIEVES.values(), ids=BAD_RETRIEVES)
def test_a_wrong_retrieve_is_refused_before_anyone_is_asked(arguments: dict[str, Any], message: str) -> None:
    cache = DirectCache(Node())
    cache.put(TOKENS)
    with pytest.raises(InvalidInputError, match=message):
        cache.retrieve(**{"token_ids": TOKENS, **arguments})
    assert cache.effects == []


@EVERYWHERE
def test_a_buffer_of_another_width_than_stored_is_refused_and_nothing_stays_held(far: bool) -> None:
    node = Node()
    cache = DirectCache(node, far=far)
    cache.put(TOKENS, 0, 1)
    with pytest.raises(InvalidInputError, match="out: got hidden_dim 9 for layer 1, expected 8 as stored"):
        cache.retrieve(TOKENS, [0, 1], out={1: torch.empty(12, 9)})
    node.settled()


@EVERYWHERE
def test_a_layer_that_changes_its_spec_is_refused_at_the_store(far: bool) -> None:
    node = Node()
    cache = DirectCache(node, far=far)
    cache.put(TOKENS)
    before = node.settled()
    with pytest.raises(InvalidInputError, match="layer 0 came with hidden_dim 16"):
        cache.store(make_tokens("xyz"), {0: make_rows(TOKENS, hidden_dim=16)})
    assert node.settled() == before
    assert torch.equal(cache.retrieve(TOKENS)[0], make_rows(TOKENS))


# Zero copy, and when not


def zero_copy(cache: DirectCache) -> tuple[int, int]:
    """(layers handed out over the pool, layers copied), so far."""
    stats = cache.run(cache.session.stats())
    return stats.zero_copy_total, stats.copied_total


def test_rows_in_one_piece_are_the_pool_itself() -> None:
    node = Node()
    cache = DirectCache(node)
    cache.put(TOKENS, 0, 1)
    hit = cache.retrieve(TOKENS, [0, 1], start=3, stop=11)
    node.pool.view()[:] = bytes(len(node.pool.view()))  # nobody but a test may do this under a lease
    assert not hit[0].any()
    assert not hit[1].any()
    assert cache.effects == ["lease"]
    assert zero_copy(cache) == (2, 0)


def test_writing_into_a_result_is_private() -> None:
    node = Node()
    cache = DirectCache(node)
    cache.put(TOKENS)
    first, second = cache.retrieve(TOKENS), cache.retrieve(TOKENS)
    first[0].zero_()
    assert torch.equal(second[0], make_rows(TOKENS))
    assert torch.equal(cache.retrieve(TOKENS)[0], make_rows(TOKENS))
    assert zero_copy(cache) == (3, 0)


def test_overwriting_the_input_after_a_store_changes_nothing() -> None:
    cache = DirectCache(Node())
    rows = make_rows(TOKENS)
    cache.store(TOKENS, {0: rows})
    rows.zero_()
    assert torch.equal(cache.retrieve(TOKENS)[0], make_rows(TOKENS))


def test_an_in_place_operation_on_a_result_warns_of_nothing() -> None:
    ended = run_script(
        """
        import torch
        torch.set_warn_always(True)
        from tests.direct import DirectCache, Node, make_rows
        for far in (False, True):
            cache = DirectCache(Node(), far=far)
            cache.put(range(12))
            for options in ({}, {"dtype": torch.float32}):
                cache.retrieve(range(12), **options)[0].add_(1).mul_(2)
            assert torch.equal(cache.retrieve(range(12))[0], make_rows(range(12)))
        print("right")
        """,
        "-Werror",
        # Not ours: torch imports what warns, on some versions of Python and NumPy.
        "-Wdefault::DeprecationWarning",
    )
    assert (ended.stdout, ended.returncode) == ("right\n", 0), ended.stderr


def test_rows_in_pieces_are_gathered_and_hold_no_lease() -> None:
    node = Node()
    cache = DirectCache(node)
    in_pieces(cache)
    hit = cache.retrieve(TOKENS)
    assert cache.effects == ["lease", "Work"]
    assert zero_copy(cache) == (0, 1)
    assert node.settled().num_leases == 0
    assert torch.equal(hit[0], make_rows(TOKENS))
    # A window within one piece needs no gather.
    assert torch.equal(cache.retrieve(TOKENS, 0, start=4, stop=8)[0], make_rows(TOKENS[4:8]))
    assert zero_copy(cache) == (1, 1)


def test_one_layer_in_one_piece_and_another_in_pieces() -> None:
    node = Node()
    cache = DirectCache(node)
    in_pieces(cache, 0)
    cache.put(TOKENS, 1)
    hit = cache.retrieve(TOKENS, [0, 1])
    assert zero_copy(cache) == (1, 1)
    assert node.num_leases() == 1
    assert torch.equal(hit[0], make_rows(TOKENS, 0))
    assert torch.equal(hit[1], make_rows(TOKENS, 1))
    del hit
    node.settled()


def test_where_too_much_of_the_pool_is_leased_results_are_copies() -> None:
    node = Node(slots=8, max_leased_fraction=0.5)
    cache = DirectCache(node)
    cache.put(make_tokens("ab"))
    cache.put(make_tokens("xyz"))
    first = cache.retrieve(make_tokens("ab"))
    second = cache.retrieve(make_tokens("xyz"))
    assert zero_copy(cache) == (1, 1)
    assert node.num_leases() == 1
    assert torch.equal(second[0], make_rows(make_tokens("xyz")))
    del first
    third = cache.retrieve(make_tokens("xyz"))
    assert zero_copy(cache) == (2, 1)
    assert torch.equal(third[0], second[0])


@EVERYWHERE
def test_conversions_and_buffers(far: bool) -> None:
    node = Node()
    cache = DirectCache(node, far=far)
    cache.put(TOKENS, 0, 1)
    rows = make_rows(TOKENS)
    converted = cache.retrieve(TOKENS, dtype=torch.float32)[0]
    assert converted.dtype == torch.float32
    assert torch.equal(converted, rows.float())
    buffer = torch.full((20, HIDDEN_DIM), -1.0, dtype=torch.float64)
    hit = cache.retrieve(TOKENS, [0, 1], start=2, stop=11, out={0: buffer})
    assert hit[0].data_ptr() == buffer.data_ptr()
    assert torch.equal(hit[0], rows[2:11].double())
    assert torch.equal(hit[1], make_rows(TOKENS, 1)[2:11])
    assert (buffer[9:] == -1).all()
    strided = torch.zeros(HIDDEN_DIM, 12, dtype=torch.bfloat16).t()
    assert torch.equal(cache.retrieve(TOKENS, out={0: strided}, dtype=torch.bfloat16)[0], rows)
    assert torch.equal(strided, rows)
    short = cache.retrieve(make_tokens("abcd"), out={0: torch.zeros(16, HIDDEN_DIM)})
    assert len(short[0]) == 12
    del hit
    assert node.settled().num_leases == 0


def test_without_mappings_left_results_are_copies() -> None:
    """Out of file descriptors, which before Python 3.13 every mapping takes one of."""
    ended = run_script("""
        import os, resource, sys
        import torch
        from tests.direct import DirectCache, Node, make_rows
        node = Node()
        cache = DirectCache(node)
        cache.put(range(12), 0, 1)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        highest = os.dup(0)
        os.close(highest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 5, hard))
        hits = [cache.retrieve(range(12), [0, 1]) for _ in range(6)]
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        stats = cache.run(cache.session.stats())
        assert stats.zero_copy_total + stats.copied_total == 12
        assert (stats.copied_total > 0) == (sys.version_info < (3, 13)), stats
        for hit in hits:
            for layer in (0, 1):
                assert torch.equal(hit[layer], make_rows(range(12), layer))
        del hits, hit
        node.settled()
        print("right")
    """)
    assert (ended.stdout, ended.returncode) == ("right\n", 0), ended.stderr


def test_a_result_stays_right_while_writers_churn_the_whole_pool() -> None:
    node = Node(slots=8)
    cache = DirectCache(node)
    cache.put(TOKENS)
    hit = cache.retrieve(TOKENS)
    for i in range(40):
        cache.put(make_tokens(chr(0x391 + i) + "xy"))
        assert torch.equal(hit[0], make_rows(TOKENS))
    assert node.server.store.stats().evicted_chunks_total > 40
    cache.session.close()
    del cache
    gc.collect()
    assert torch.equal(hit[0], make_rows(TOKENS))


def test_where_the_pool_cannot_be_opened_rows_go_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node()
    monkeypatch.setattr(node.pool, "address", replace(node.pool.address, fd=10**6))
    cache = DirectCache(node)
    assert cache.put(TOKENS) == StoreResult(stored=3, prefix_tokens=12)
    assert cache.effects == ["Work", "store_rows"]
    assert torch.equal(cache.retrieve(TOKENS)[0], make_rows(TOKENS))
    assert cache.effects == ["retrieve_rows", "Fetch", "Fetch"]
    assert zero_copy(cache) == (1, 0)
    node.settled()


def test_a_client_without_a_pool_looks_for_a_better_link_now_and_then(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    monkeypatch.setattr(attachment, "time", clock)
    monkeypatch.setattr(connection, "time", clock)
    node = Node()
    address = node.pool.address
    monkeypatch.setattr(node.pool, "address", replace(address, fd=10**6))
    with caplog.at_level(logging.INFO, logger="hs_cache.attachment"):
        cache = DirectCache(node)
        for _ in range(3):
            cache.put(TOKENS)
            assert cache.effects == ["Work", "store_rows"]
            clock.advance(attachment._LOOK_AGAIN_S)
            cache.put(TOKENS)
            assert cache.effects == ["Locate", "attach", "Work", "store_rows"]
    assert [record.levelname for record in caplog.records] == ["WARNING"], "it is on the pool's own node"
    clock.advance(attachment._LOOK_AGAIN_S)
    cache.faults[1] = refused
    assert cache.put(TOKENS).present == 3, "what there was is used on"
    assert cache.effects == ["Locate", "attach", "Work", "store_rows"]
    monkeypatch.setattr(node.pool, "address", address)
    cache.put(TOKENS)
    assert cache.effects == ["Locate", "attach", "reserve", "commit"]
    clock.advance(attachment._LOOK_AGAIN_S)
    cache.put(TOKENS)
    assert cache.effects == ["reserve", "commit"], "there is no better one"


def test_an_owner_that_ends_between_its_answer_and_the_opening_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node()
    address = node.pool.address
    monkeypatch.setattr(node.pool, "address", replace(address, start_time=address.start_time + 1))
    cache = DirectCache(node)
    monkeypatch.setattr(node.pool, "address", address)
    assert cache.put(TOKENS).stored == 3
    assert cache.effects == ["Locate", "attach", "reserve", "Work", "commit"]


# KV reports


def test_the_kv_of_a_client_elsewhere_is_no_concern_of_its_node() -> None:
    node = Node()
    near, far = DirectCache(node), DirectCache(node, far=True)
    near.put(TOKENS)
    for method, what in (("report_evicted", TOKENS), ("resync", []), ("report_stored", TOKENS)):
        assert not far.report(method, what)
    assert (far.effects, far.run(far.session.stats()).unreachable_total) == ([], 3)
    assert near.retrieve(TOKENS).num_tokens == 12
    with pytest.raises(ServiceNotRunningError, match="no KV actor on this client's node"):
        DirectCache(node, far=True, strict=True).report("resync", [])


def test_trouble_with_the_kv_actor_leaves_the_link_alone(caplog: pytest.LogCaptureFixture) -> None:
    cache = DirectCache(Node())
    for _ in range(2):
        cache.faults[0] = refused
        assert not cache.report("report_evicted", TOKENS)
    assert [record.getMessage().split(" can't")[0] for record in caplog.records] == ["hs_cache: the KV actor"]
    cache.put(TOKENS)
    assert cache.effects == ["reserve", "Work", "commit"]


def test_kv_reports_reach_the_node() -> None:
    node = Node()
    cache = DirectCache(node)
    cache.put(TOKENS)
    keys = cache.session.chunk_keys(TOKENS, ())
    for what in (TOKENS, keys, keys.blob, list(keys), tuple(keys), np.array(TOKENS)):
        assert cache.report("report_evicted", what)
        assert node.index.presence(keys.blob) == b"\0\0\0"
        assert cache.report("report_stored", what)
        assert node.index.presence(keys.blob) == b"\1\1\1"
    assert cache.report("resync", [])
    assert node.index.presence(keys.blob) == b"\0\0\0"
    hit = cache.retrieve(TOKENS)
    assert (hit.num_tokens, hit.ended_by) == (0, "kv_absent")
    for wrong in ([b"x"], b"x" * 17, [keys[0], 5], [0.5], "text"):
        with pytest.raises(InvalidInputError):
            cache.report("report_evicted", wrong)


def test_two_engines_of_a_node_speak_for_themselves() -> None:
    node = Node()
    one, two = (DirectCache(node, engine=engine) for engine in ("one", "two"))
    one.put(TOKENS)
    two.put(TOKENS[:8])
    one.report("report_evicted", TOKENS)
    assert two.retrieve(TOKENS).num_tokens == 8, "what the other has is there, what neither has is gone"
    assert node.index.stats().engines == ("one", "two")
    assert node.server.num_cached_chunks() == 2
    two.report("resync", [])
    assert one.retrieve(TOKENS).ended_by == "kv_absent"


@pytest.mark.parametrize("fault", [lost_call, lost_reply])
def test_a_kv_report_that_was_lost_leaves_nothing_present(fault: Fault) -> None:
    node = Node()
    cache, other = DirectCache(node), DirectCache(node, engine="other")
    cache.put(TOKENS)
    other.put(make_tokens("x"))
    assert cache.report("report_stored", TOKENS)
    cache.faults[0] = fault
    assert not cache.report("report_evicted", TOKENS[:4])
    assert cache.report("report_stored", make_tokens("yz"))
    hit = cache.retrieve(TOKENS)
    assert (hit.num_tokens, hit.ended_by) == (0, "kv_unknown")
    assert other.retrieve(make_tokens("x"))
    cache.put(TOKENS)
    assert cache.retrieve(TOKENS).num_tokens == len(TOKENS)


@pytest.mark.parametrize(
    ("space", "engine", "message"),
    [
        ({}, 3, "engine: got int, expected str"),
        ({"kv_tags": {"user": 3}}, "", "kv_tags: got .* expected a mapping of str to str"),
        ({"kv_tags": "user"}, "", "kv_tags: got 'user', expected a mapping"),
        ({"kv_tags": ["user"]}, "", "kv_tags: got .* expected a mapping"),
    ],
)
def test_wrong_words_about_an_engine_are_refused(space: Any, engine: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        Session(space, strict=False, engine=engine)


def test_what_has_kv_under_other_tags_is_another_chunk() -> None:
    node = Node()
    plain, one, two = DirectCache(node), *(DirectCache(node, kv_tags={"user": user}) for user in "ab")
    for cache in (one, two):
        cache.put(TOKENS)
    two.report("report_evicted", TOKENS)
    assert not two.retrieve(TOKENS)
    assert not plain.retrieve(TOKENS)
    assert one.retrieve(TOKENS).num_tokens == len(TOKENS)
    assert pickle.loads(pickle.dumps(one.session)).key_space == one.session.key_space
    back = node.server.retrieve_hidden_states(TOKENS, kv_tags={"user": "a"})
    assert back is not None
    assert node.server.retrieve_hidden_states(TOKENS, kv_tags={"user": "b"}) is None


class Numbered:
    """Names chunks by their number in the prompt."""

    def names(self, known: bytes, tokens: Any, mm_spans: Any, chunk_size: int, given: Any = None) -> bytes:
        first = len(known) // 16
        return b"".join((first + i).to_bytes(16, "big") for i in range(-(-len(tokens) // chunk_size)))


def test_a_source_that_names_chunks_is_asked_by_names(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (connection, server):
        monkeypatch.setattr(module, "kv_naming", lambda config, space: Numbered())
    monkeypatch.setattr(server, "NAMING_SOURCES", {"reports"})
    nodes = make_nodes(2, told_only=True)
    cache = DirectCache(nodes[0], kv_tags={"user": "a"})
    cache.put(TOKENS[:8])
    writer = cache.session.open_request("request", ())
    cache.run(cache.session.append(writer, TOKENS[:10], {0: make_rows(TOKENS[:10])}))
    cache.run(cache.session.append(writer, TOKENS[10:], {0: make_rows(TOKENS[10:])}))
    assert cache.retrieve(TOKENS).ended_by == "kv_unknown"
    assert cache.explain(TOKENS) == ["kv_unknown"] * 3
    nodes[0].index.report_stored(b"".join(number.to_bytes(16, "big") for number in (0, 2)))
    assert cache.explain(TOKENS) == ["ok", "kv_unknown", "ok"]
    assert cache.retrieve(TOKENS).num_tokens == 4
    assert (cache.plan(TOKENS).kv_tokens, cache.plan(TOKENS[:4]).kv_tokens) == (4, 4)
    nodes[0].index.report_stored((1).to_bytes(16, "big"))
    nodes[0].controller.hear_all()
    other = DirectCache(nodes[1], kv_tags={"user": "a"})
    assert other.retrieve(TOKENS).num_tokens == 12, "the other node asks its own KV side by the names that came along"
    assert other.explain(TOKENS) == ["ok"] * 3
    back = nodes[0].server.retrieve_hidden_states(TOKENS, kv_tags={"user": "a"})
    assert back is not None
    assert len(back) == 12
    nodes[0].index.report_evicted((1).to_bytes(16, "big"))
    assert cache.retrieve(TOKENS).ended_by == "kv_absent"


# Life cycle


def test_after_close_nothing_works_but_what_was_handed_out() -> None:
    node = Node()
    cache = DirectCache(node)
    cache.put(TOKENS)
    hit = cache.retrieve(TOKENS)
    cache.session.close()
    cache.session.close()
    for use in (
        lambda: cache.put(TOKENS),
        lambda: cache.retrieve(TOKENS),
        lambda: cache.report("report_evicted", TOKENS),
        lambda: cache.run(cache.session.stats()),
        lambda: cache.run(cache.session.attach()),
        lambda: pickle.loads(pickle.dumps(cache.session)) and cache.put(TOKENS),
    ):
        with pytest.raises(CacheClosedError, match="closed"):
            use()
    assert node.num_leases() == 1
    assert torch.equal(hit[0], make_rows(TOKENS))
    del hit
    node.settled()
    poll(lambda: node.num_mappings() == 1, "the client's mapping is gone")


@EVERYWHERE
def test_a_client_that_nobody_has_any_more_lets_its_pool_go_at_once(far: bool) -> None:
    node = Node()
    cache = DirectCache(node, far=far)
    cache.put(TOKENS)
    cache.retrieve(TOKENS)
    assert node.num_mappings() == (1 if far else 2)
    gc.collect()
    gc.disable()
    try:
        del cache
        poll(lambda: node.num_mappings() == 1, "the thread that fills page tables has let go as well")
    finally:
        gc.enable()


def test_closing_while_a_client_attaches() -> None:
    node = Node()
    cache = DirectCache(node)
    cache.faults[0] = refused
    cache.retrieve(TOKENS)

    def closed_meanwhile(perform: Callable[[], Any]) -> Any:
        reply = perform()
        cache.session.close()
        return reply

    cache.faults[1] = closed_meanwhile
    with pytest.raises(CacheClosedError):
        cache.retrieve(TOKENS)
    assert cache.effects == ["Locate", "attach"]
    gc.collect()
    poll(lambda: node.num_mappings() == 1, "the client's mapping is gone")


def test_a_session_pickles_with_its_settings_and_attaches_anew() -> None:
    node = Node()
    cache = DirectCache(node, cache_salt="S", strict=True)
    cache.put(TOKENS)
    copy: Session = pickle.loads(pickle.dumps(cache.session))
    assert copy.key_space == cache.session.key_space
    assert copy.config == node.config
    original, cache.session = cache.session, copy
    assert torch.equal(cache.retrieve(TOKENS)[0], make_rows(TOKENS))
    assert cache.effects == ["Locate", "attach", "lease"]
    assert cache.run(copy.stats()).retrieves_total == 1
    node.unreachable = True
    with pytest.raises(ServiceError):
        cache.put(TOKENS)
    assert original.key_space.cache_salt == "S"


def test_a_session_that_never_reached_its_service_pickles_too() -> None:
    session: Session = pickle.loads(pickle.dumps(Session({"model": "m"}, strict=False)))
    with pytest.raises(CacheClosedError, match="not connected yet"):
        session.chunk_keys(TOKENS, ())


def test_wrong_key_spaces_are_refused_at_once() -> None:
    with pytest.raises(InvalidInputError, match="lora_id: got int, expected str"):
        Session({"lora_id": 5}, strict=False)  # type: ignore[dict-item]


def test_key_spaces_keep_clients_apart() -> None:
    node = Node(256)
    spaces: list[dict[str, Any]] = [{}, {"lora_id": "S"}, {"cache_salt": "S"}, {"model": "S"}, {"shard": "S"}]
    caches = [DirectCache(node, **space) for space in [*spaces, {"model_revision": "S"}]]
    for variant, cache in enumerate(caches):
        assert cache.store(TOKENS, {0: make_rows(TOKENS, variant=variant)}).stored == 3
    for variant, cache in enumerate(caches):
        assert torch.equal(cache.retrieve(TOKENS)[0], make_rows(TOKENS, variant=variant))


def test_counters() -> None:
    node = Node()
    cache = DirectCache(node)
    cache.put(TOKENS, 0, 1)
    cache.retrieve(make_tokens("abcd"), [0, 1], start=2)
    cache.retrieve(make_tokens("x"))
    stats = cache.run(cache.session.stats())
    assert (stats.retrieves_total, stats.hits_total) == (2, 1)
    assert (stats.tokens_asked_total, stats.tokens_served_total) == (20, 10)
    assert (stats.stored_chunks_total, stats.failed_chunks_total) == (3, 0)
    assert stats.node == node.server.stats()
