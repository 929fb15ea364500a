"""CacheServer: plain calls by handle, clients with and without the pool, the KV side, clients that die, restarts."""

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from hs_cache import server as server_module
from hs_cache.errors import ConfigMismatchError, InvalidInputError, StaleIncarnationError
from hs_cache.keys import KVNames
from hs_cache.machine import process_start_time
from hs_cache.messages import (
    PROTOCOL_VERSION,
    ClientInfo,
    LayerSpec,
    LeaseRequest,
    ReserveReply,
    ReserveRequest,
)
from hs_cache.rows import copy_in, flatten
from hs_cache.server import CacheServer
from tests.builders import CHUNK_SIZE, make_tokens
from tests.direct import BAD_STORES, HIDDEN_DIM, Node, make_rows

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfd and /proc are Linux")

TOKENS = make_tokens("abc")
SPEC = LayerSpec(0, HIDDEN_DIM, "bfloat16")
CLIENT = b"c" * 16


def attach(node: Node, client_id: bytes = CLIENT, pid: int | None = None) -> None:
    pid = os.getpid() if pid is None else pid
    reply = node.server.attach(ClientInfo(client_id, pid, process_start_time(pid), node.name))
    assert reply.address == node.pool.address, reply.reason


def reserve_request(node: Node, hold_id: int = 0, tokens: Sequence[int] = TOKENS, **changes: Any) -> ReserveRequest:
    keys = node.server._database({}).chunk_keys(tokens)
    request = ReserveRequest(
        incarnation=node.pool.incarnation,
        client_id=CLIENT,
        hold_id=hold_id,
        space=node.server._database({}).space.fingerprint,
        keys=keys.blob,
        num_tokens=keys.num_tokens,
        first_chunk=0,
        specs=(SPEC,),
        kv_local=True,
    )
    return replace(request, **changes)


def lease_request(node: Node, hold_id: int = 0, tokens: Sequence[int] = TOKENS, **changes: Any) -> LeaseRequest:
    keys = node.server._database({}).chunk_keys(tokens)
    request = LeaseRequest(
        incarnation=node.pool.incarnation,
        client_id=CLIENT,
        hold_id=hold_id,
        keys=keys.blob,
        num_tokens=keys.num_tokens,
        layers=(0,),
        timeout_s=1.0,
    )
    return replace(request, **changes)


def write(node: Node, reply: ReserveReply, tokens: Sequence[int] = TOKENS) -> None:
    copy_in(node.pool.view(), reply.runs, (SPEC,), {0: make_rows(tokens)}, 0)


def put(server: CacheServer, tokens: Sequence[int] = TOKENS, layer_idx: int = 0, **space: Any) -> int:
    return server.store_hidden_states(tokens, make_rows(tokens, layer_idx), layer_idx=layer_idx, **space)


@contextmanager
def another_process() -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


class ScriptedKV:
    """A KV side that answers whatever a test wants."""

    def __init__(self, answer: Callable[[bytes], Any]) -> None:
        self.answer = answer
        self.asked: list[tuple[int, float]] = []

    def known(self, names: KVNames) -> bool:
        return False

    def presence(self, names: KVNames, timeout_s: float) -> Any:
        self.asked.append((len(names.blob) // 16, timeout_s))
        return self.answer(names.blob)

    def note_stored(self, names: bytes, engine: str) -> None: ...

    def settle_notes(self, timeout_s: float) -> bool:
        return True


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_what_is_stored_comes_back_as_float32(dtype: torch.dtype) -> None:
    server = Node().server
    rows = make_rows(TOKENS, dtype=dtype)
    assert server.store_hidden_states(TOKENS, rows) == 3
    back = server.retrieve_hidden_states(TOKENS)
    assert back is not None
    assert back.dtype == torch.float32
    assert back.is_contiguous()
    assert torch.equal(back, rows.float())
    assert torch.equal(back.to(dtype), rows)
    assert server.num_cached_chunks() == 3


def test_nan_and_infinity_are_kept() -> None:
    server = Node().server
    rows = make_rows(TOKENS)
    rows[1, 2], rows[3, 4], rows[5, 6] = float("nan"), float("inf"), float("-inf")
    server.store_hidden_states(TOKENS, rows)
    back = server.retrieve_hidden_states(TOKENS)
    assert back is not None
    torch.testing.assert_close(back, rows.float(), rtol=0, atol=0, equal_nan=True)


def test_the_first_rows_are_kept() -> None:
    server = Node().server
    assert put(server) == 3
    assert server.store_hidden_states(TOKENS, make_rows(TOKENS, variant=1)) == 0
    back = server.retrieve_hidden_states(TOKENS)
    assert back is not None
    assert torch.equal(back, make_rows(TOKENS).float())


def test_input_and_result_are_copies() -> None:
    server = Node().server
    rows = make_rows(TOKENS)
    server.store_hidden_states(TOKENS, rows)
    rows.zero_()
    for _ in range(2):
        back = server.retrieve_hidden_states(TOKENS)
        assert back is not None
        assert torch.equal(back, make_rows(TOKENS).float())
        back.zero_()


def test_nothing_to_store_and_nothing_there() -> None:
    node = Node()
    server, empty = node.server, torch.empty(0, HIDDEN_DIM)
    assert server.store_hidden_states([], empty) == 0
    assert server.store_hidden_states(TOKENS, empty, token_offset=len(TOKENS)) == 0
    assert server.store_hidden_states(TOKENS[:3], make_rows(TOKENS[:3])) == 0
    assert server.retrieve_hidden_states([]) is None
    assert server.retrieve_hidden_states(TOKENS) is None
    assert node.settled().num_chunks == 0


def test_a_short_tail_is_found_by_exactly_its_tokens() -> None:
    server = Node(save_unfull_chunk=True).server
    tokens = list(range(7))
    assert put(server, tokens[:6]) == 2
    for asked, found in ((6, 6), (7, 4), (5, 4)):
        back = server.retrieve_hidden_states(tokens[:asked])
        assert back is not None
        assert torch.equal(back, make_rows(tokens[:found]).float())


def test_layers_may_differ_in_hidden_dim_and_a_layer_may_not_change_it() -> None:
    node = Node()
    put(node.server)
    wide = make_rows(TOKENS, 1, hidden_dim=24, dtype=torch.float32)
    assert node.server.store_hidden_states(TOKENS, wide, layer_idx=1) == 3
    before = node.settled()
    for wrong in (make_rows(TOKENS, hidden_dim=16), make_rows(TOKENS, dtype=torch.float16)):
        with pytest.raises(InvalidInputError, match=r"layer 0 came with .*, expected hidden_dim 8 and dtype bf"):
            node.server.store_hidden_states(make_tokens("xyz"), wrong)
    assert node.settled() == before
    assert node.server.store_hidden_states(TOKENS, make_rows(TOKENS, hidden_dim=16), cache_salt="another") == 3
    back = node.server.retrieve_hidden_states(TOKENS, layer_idx=1)
    assert back is not None
    assert torch.equal(back, wide)


BAD_CALLS = {name: bad for name, bad in BAD_STORES.items() if isinstance(bad[0]()[1], dict) and len(bad[0]()[1]) == 1}


@pytest.mark.parametrize(("arguments", "message"), BAD_CALLS.values(), ids=BAD_CALLS)
def test_a_wrong_store_changes_nothing(arguments: Callable[[], tuple[Any, Any, Any]], message: str) -> None:
    node = Node()
    put(node.server)
    before = node.server.store.stats()
    token_ids, layers, token_offset = arguments()
    ((layer_idx, rows),) = layers.items()
    with pytest.raises(InvalidInputError, match=message):
        node.server.store_hidden_states(token_ids, rows, layer_idx=layer_idx, token_offset=token_offset)
    assert node.server.store.stats() == before


def test_other_wrong_arguments_by_handle() -> None:
    server = Node().server
    for call in (
        lambda: put(server, lora="x"),
        lambda: put(server, lora_id=5),
        lambda: server.store_hidden_states(TOKENS, make_rows(TOKENS), layer_idx=[0]),  # type: ignore[arg-type]
        lambda: server.retrieve_hidden_states(TOKENS, layer_idx=0.0),  # type: ignore[arg-type]
        lambda: server.retrieve_hidden_states([0.5]),
        lambda: server.retrieve_hidden_states(TOKENS, chunk_size="4"),
        lambda: server.retrieve_hidden_states(TOKENS, mm_spans=[(0, 0, "x")]),
    ):
        with pytest.raises(InvalidInputError, match=r"got|expected"):
            call()
    assert server.store.stats().num_chunks == server.store.stats().num_leases == 0


def test_keys_by_handle() -> None:
    server = Node().server
    put(server)
    put(server, TOKENS[:4], 5)
    first, *_ = keys = list(server._database({}).chunk_keys(TOKENS))
    assert [server.has_chunk(key) for key in keys] == [True] * 3
    assert [server.has_chunk(key, 5) for key in keys] == [True, False, False]
    assert server.drop_key(first)
    assert not server.drop_key(first)
    assert not server.has_chunk(first, 5)
    assert server.retrieve_hidden_states(TOKENS) is None
    assert server.num_cached_chunks() == 2


def test_every_part_of_the_key_space_keeps_prompts_apart() -> None:
    server = Node(256).server
    spaces: list[dict[str, Any]] = [
        {},
        *({name: "S"} for name in ("model", "model_revision", "lora_id", "cache_salt", "shard")),
    ]
    for variant, space in enumerate(spaces):
        assert server.store_hidden_states(TOKENS, make_rows(TOKENS, variant=variant), **space) == 3
    for variant, space in enumerate(spaces):
        back = server.retrieve_hidden_states(TOKENS, **space)
        assert back is not None
        assert torch.equal(back, make_rows(TOKENS, variant=variant).float())


def test_layers_that_are_not_accepted_are_not_stored() -> None:
    node = Node(hidden_state_layers=[1])
    assert put(node.server) == 0
    assert put(node.server, layer_idx=1) == 3


def test_a_pool_that_is_too_small_keeps_the_head_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    node = Node(slots=2)
    assert put(node.server) == 2
    assert put(node.server, make_tokens("xyz")) == 2
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "1 of 3 chunks were refused; raise max_hidden_state_cpu_size" in record.getMessage()
    assert node.server.stats().store.refused_chunks_total == 2


# The KV side


def test_an_evicted_chunk_ends_the_prefix_and_goes_with_all_its_layers() -> None:
    node = Node()
    for layer in (0, 1):
        put(node.server, layer_idx=layer)
    keys = node.server._database({}).chunk_keys(TOKENS)
    node.index.report_evicted(keys[1])
    back = node.server.retrieve_hidden_states(TOKENS)
    assert back is not None
    assert len(back) == 4
    assert [node.server.has_chunk(key, layer) for layer in (0, 1) for key in keys] == [True, False, True] * 2
    assert node.server.store.stats().kv_dropped_chunks_total == 1


def test_a_missing_hidden_state_leaves_kv_alone() -> None:
    node = Node()
    put(node.server)
    keys = node.server._database({}).chunk_keys(TOKENS)
    before = node.index.stats()
    node.server.drop_key(keys[1])
    back = node.server.retrieve_hidden_states(TOKENS)
    assert back is not None
    assert len(back) == 4
    assert node.index.stats() == before


def test_stored_rows_count_as_present_until_their_kv_is_reported_evicted_and_again_when_stored_again() -> None:
    node = Node(kv_source="reports")
    keys = node.server._database({}).chunk_keys(TOKENS)
    node.index.report_evicted(keys.blob)
    assert put(node.server) == 3
    assert node.server.retrieve_hidden_states(TOKENS) is not None
    node.index.report_evicted(keys.blob)
    assert node.server.retrieve_hidden_states(TOKENS) is None
    assert node.server.num_cached_chunks() == 0
    assert put(node.server) == 3
    assert node.server.retrieve_hidden_states(TOKENS) is not None


def test_an_eviction_reported_while_rows_are_being_written_counts() -> None:
    node = Node()
    attach(node)
    request = reserve_request(node)
    write(node, node.server.reserve(request))
    node.index.report_evicted(request.keys[16:])
    assert node.server.commit(node.pool.incarnation, CLIENT, 0).stored == 3
    assert node.server.lease(lease_request(node)).num_tokens == 4


def test_kv_that_storing_does_not_imply_has_to_be_heard_of() -> None:
    node = Node(told_only=True)
    put(node.server)
    keys = node.server._database({}).chunk_keys(TOKENS)
    assert node.server.retrieve_hidden_states(TOKENS) is None
    assert node.server.num_cached_chunks() == 3
    assert node.server.stats().kv_unknown_total == 1
    node.index.report_stored(keys[0] + keys[1])
    back = node.server.retrieve_hidden_states(TOKENS)
    assert back is not None
    assert len(back) == 8
    node.index.report_evicted(keys[0])
    assert node.server.retrieve_hidden_states(TOKENS) is None
    assert node.server.num_cached_chunks() == 2


def test_without_a_kv_source_kv_counts_as_present() -> None:
    node = Node(kv_source="none")
    put(node.server)
    node.index.report_evicted(node.server._database({}).chunk_keys(TOKENS).blob)
    assert node.server.retrieve_hidden_states(TOKENS) is not None


def test_the_kv_side_is_asked_once_for_the_whole_run_and_only_about_its_own_chunks() -> None:
    kv = ScriptedKV(lambda keys: bytes(len(keys) // 16))  # all absent
    node = Node(kv=kv)
    attach(node)
    node.server.reserve(reserve_request(node, 1, kv_local=False))
    node.server.commit(node.pool.incarnation, CLIENT, 1)
    assert node.server.lease(lease_request(node, 2)).num_tokens == 12
    assert kv.asked == []
    longer = make_tokens("abcde")
    node.server.reserve(reserve_request(node, 3, longer))
    node.server.commit(node.pool.incarnation, CLIENT, 3)
    kv.answer = lambda keys: b"\1" * (len(keys) // 16)
    assert node.server.lease(lease_request(node, 4, longer)).num_tokens == 20
    assert len(kv.asked) == 1
    assert kv.asked[0][1] < 1.0, "the KV check must end within the retrieve's own deadline"


def _raise(error: Exception) -> Any:
    raise error


@pytest.mark.parametrize(
    "answer",
    [
        lambda keys: _raise(RuntimeError("no KV today")),
        lambda keys: _raise(TimeoutError()),
        lambda keys: None,
        lambda keys: b"",
        lambda keys: b"\1",
        lambda keys: b"\1" * (len(keys) // 16 + 1),
        lambda keys: b"\0\0\x09",
        lambda keys: [1, 1, "present"],
        lambda keys: 7,
    ],
    ids=["raises", "times out", "None", "nothing", "too few", "too many", "no presence", "text", "no sequence"],
)
def test_whatever_the_kv_side_does_wrong_the_rows_stay_and_the_call_is_a_miss(
    answer: Callable[[bytes], Any], caplog: pytest.LogCaptureFixture
) -> None:
    kv = ScriptedKV(answer)
    node = Node(kv=kv)
    put(node.server)
    for _ in range(2):
        assert node.server.retrieve_hidden_states(TOKENS) is None
    assert len(caplog.records) == 1, "logged once"
    assert node.server.stats().kv_unknown_total == 2
    assert node.settled().num_chunks == 3
    kv.answer = lambda keys: b"\1" * (len(keys) // 16)
    back = node.server.retrieve_hidden_states(TOKENS)
    assert back is not None
    assert torch.equal(back, make_rows(TOKENS).float())
    kv.answer = answer
    assert node.server.retrieve_hidden_states(TOKENS) is None
    assert len(caplog.records) == 2, "logged again, after it had been well"


# Clients


def test_the_pool_is_shared_only_with_a_process_whose_end_can_be_seen() -> None:
    node = Node()
    start_time = process_start_time(os.getpid())
    assert start_time is not None
    me = ClientInfo(CLIENT, os.getpid(), start_time, node.name)
    assert node.server.attach(me) == node.server.attach(me)
    assert node.server.stats().num_clients == 1
    for other, reason in (
        (replace(me, node_id="far"), "the client is on node far"),
        (replace(me, start_time=None), "no /proc"),
        (replace(me, start_time=start_time + 1), "another pid namespace"),
        (replace(me, pid=2**22 + 1), "another pid namespace"),
    ):
        refused = node.server.attach(replace(other, client_id=b"x" * 16))
        assert refused.address is None
        assert reason in refused.reason
        assert (refused.incarnation, refused.config) == (node.pool.incarnation, node.config.model_dump())
    assert node.server.stats().num_clients == 1
    with pytest.raises(ConfigMismatchError, match=f"version {PROTOCOL_VERSION + 1}, the service version"):
        node.server.attach(replace(me, protocol=PROTOCOL_VERSION + 1))


def test_who_is_not_attached_gets_nothing() -> None:
    node = Node()
    for call in (
        lambda: node.server.reserve(reserve_request(node)),
        lambda: node.server.commit(node.pool.incarnation, CLIENT, 0),
        lambda: node.server.lease(lease_request(node)),
    ):
        with pytest.raises(StaleIncarnationError, match="not attached"):
            call()


def test_an_incarnation_honours_nothing_of_its_predecessor() -> None:
    node = Node()
    attach(node)
    old = node.pool.incarnation
    node.server.reserve(reserve_request(node, 1))
    node.restart()
    attach(node)
    put(node.server)
    assert node.server.lease(lease_request(node, 2)).num_tokens == 12
    held = node.server.store.stats()
    for call in (
        lambda: node.server.commit(old, CLIENT, 1),
        lambda: node.server.reserve(reserve_request(node, 3, incarnation=old)),
        lambda: node.server.lease(lease_request(node, 3, incarnation=old, releases=(2,))),
    ):
        with pytest.raises(StaleIncarnationError):
            call()
    node.server.release(old, CLIENT, [2])
    assert node.server.store.stats() == held, "the predecessor's lease 2 is not this one's"
    node.server.release(node.pool.incarnation, CLIENT, [2])
    assert node.settled() == replace(held, leased_bytes=0, num_leases=0)


@pytest.mark.parametrize(
    "changes",
    [{"num_tokens": 13}, {"num_tokens": -1}, {"keys": b"x"}, {"keys": b""}, {"first_chunk": 4}, {"first_chunk": -1}],
    ids=str,
)
def test_a_request_that_contradicts_itself_is_refused(changes: dict[str, Any]) -> None:
    node = Node()
    attach(node)
    calls: list[Callable[[], Any]] = [lambda: node.server.reserve(reserve_request(node, **changes))]
    if "first_chunk" not in changes:
        calls.append(lambda: node.server.lease(lease_request(node, **changes)))
    for call in calls:
        with pytest.raises(InvalidInputError, match="got"):
            call()
    node.settled()


@pytest.mark.parametrize("layers", [(0,), (0, 1)])
def test_rows_come_and_go_without_the_pool_as_they_do_with_it(layers: tuple[int, ...]) -> None:
    node = Node()
    given = {layer: make_rows(TOKENS, layer, hidden_dim=HIDDEN_DIM * (layer + 1)) for layer in layers}
    specs = tuple(LayerSpec(layer, given[layer].shape[1], "bfloat16") for layer in layers)
    flat = flatten(given.values())
    reply = node.server.store_rows(reserve_request(node, specs=specs), flat)
    assert (reply.stored, reply.present, reply.failed, reply.prefix_tokens) == (3, 0, 0, 12)
    with node.server.lease_rows(lease_request(node, layers=layers)) as (found, rows):
        back = rows()
        assert (found.num_tokens, found.specs) == (12, specs)
        assert back is not None
        assert back.tobytes() == flat.tobytes()
        assert node.server.store.stats().num_leases == 1
    assert node.settled().num_chunks == 3
    # The first chunk is there: only the others are sent and written.
    node.server.drop_key(reserve_request(node).keys[32:])
    rest = flatten([part[4:] for part in given.values()])
    reply = node.server.store_rows(reserve_request(node, specs=specs, first_chunk=1), rest)
    assert (reply.stored, reply.present, reply.prefix_tokens) == (1, 1, 12)
    with node.server.lease_rows(lease_request(node, layers=layers)) as (_, rows):
        back = rows()
        assert back is not None
        assert back.tobytes() == flat.tobytes()


def test_a_miss_without_the_pool_has_no_rows() -> None:
    node = Node()
    with node.server.lease_rows(lease_request(node)) as (reply, rows):
        flat = rows()
        assert (reply.num_tokens, reply.ended_by, flat) == (0, "hidden_state", None)
    node.settled()


@pytest.mark.parametrize("size", [0, 1, 191, 193, 384])
def test_rows_of_another_size_than_announced_are_refused(size: int) -> None:
    node = Node()
    with pytest.raises(InvalidInputError, match=f"flat: got {size} bytes, expected 192"):
        node.server.store_rows(reserve_request(node), np.zeros(size, np.uint8))
    assert node.settled().num_chunks == 0


def test_rows_that_are_given_up_while_they_are_copied_are_not_overwritten_and_do_not_appear(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = Node(slots=3)
    copy = server_module.copy_flat_in

    def copy_flat_in(*arguments: Any) -> None:
        node.server.release(node.pool.incarnation, CLIENT, [7])
        node.server.store.check()
        assert node.server.store.stats().reserved_bytes == node.server.store.stats().capacity_bytes
        copy(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(server_module, "copy_flat_in", copy_flat_in)
        with pytest.raises(StaleIncarnationError, match="given up"):
            node.server.store_rows(reserve_request(node, 7), np.zeros(192, np.uint8))
    assert node.settled().num_chunks == 0
    for request in (reserve_request(node, 8), reserve_request(node, 9, releases=(9,))):
        node.server.release(node.pool.incarnation, CLIENT, [8])
        with pytest.raises(StaleIncarnationError, match="given up"):
            node.server.store_rows(request, np.zeros(192, np.uint8))
    assert node.server.store_rows(reserve_request(node, 10), np.zeros(192, np.uint8)).stored == 3
    node.settled()


def test_rows_for_a_predecessor_are_refused() -> None:
    node = Node()
    request = reserve_request(node)
    node.restart()
    with pytest.raises(StaleIncarnationError):
        node.server.store_rows(request, np.zeros(192, np.uint8))
    assert node.settled().num_chunks == 0


@pytest.mark.parametrize("reaped", [False, True], ids=["zombie", "reaped"])
def test_what_a_killed_client_held_comes_back(reaped: bool) -> None:
    node = Node(slots=8)
    put(node.server, make_tokens("ab"))
    before = node.settled()
    with another_process() as process:
        attach(node, pid=process.pid)
        assert node.server.lease(lease_request(node, 1, make_tokens("ab"))).num_tokens == 8
        assert len(node.server.reserve(reserve_request(node, 2, make_tokens("xyz"))).runs) == 1
        assert node.server.sweep() == 0
        stats = node.server.store.stats()
        assert (stats.num_leases, stats.num_reservations) == (1, 1)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        if reaped:
            process.communicate()
        assert node.server.sweep() == 1
        assert replace(node.settled(), refused_chunks_total=0) == before
        with pytest.raises(StaleIncarnationError, match="counted as gone"):
            node.server.commit(node.pool.incarnation, CLIENT, 2)
        assert node.server.sweep() == node.server.stats().num_clients == 0


@pytest.mark.parametrize("method", ["lease", "reserve"])
def test_a_call_that_is_served_while_its_client_is_swept_leaves_nothing_behind(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call has passed its checks, the client dies and is swept, and only then the lease is made."""
    node = Node()
    put(node.server)
    before = node.settled()
    call = getattr(node.server.store, method)

    def late(*args: Any, **options: Any) -> Any:
        process.kill()
        process.communicate()
        assert node.server.sweep() == 1
        return call(*args, **options)

    monkeypatch.setattr(node.server.store, method, late)
    with another_process() as process:
        attach(node, pid=process.pid)
        with pytest.raises(StaleIncarnationError, match="counted as gone"):
            node.server.lease(lease_request(node)) if method == "lease" else node.server.reserve(
                reserve_request(node, 0, make_tokens("xyz"))
            )
    assert node.settled() == before


def test_plain_calls_that_fail_halfway_hold_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> None:
        raise MemoryError("nothing left")

    node = Node()
    put(node.server)
    before = node.settled()
    for name in ("stitching.copy_in", "server.copy_out", "server.copy_flat_in", "server.flatten_runs"):
        monkeypatch.setattr(f"hs_cache.{name}", broken)
    with pytest.raises(MemoryError):
        put(node.server, make_tokens("xyz"))
    with pytest.raises(MemoryError):
        node.server.retrieve_hidden_states(TOKENS)
    with pytest.raises(MemoryError):
        node.server.store_rows(reserve_request(node, 0, make_tokens("xyz")), np.zeros(192, np.uint8))
    with pytest.raises(MemoryError), node.server.lease_rows(lease_request(node)) as (_, rows):
        rows()
    assert node.settled() == before


def test_two_writers_of_the_same_prompt_give_one_content() -> None:
    for _ in range(10):
        node = Node()
        barrier = threading.Barrier(2)
        stored: list[int] = []

        def write_variant(variant: int, node: Node = node, barrier: Any = barrier, stored: Any = stored) -> None:
            rows = make_rows(TOKENS, variant=variant)
            barrier.wait(20)
            stored.append(node.server.store_hidden_states(TOKENS, rows))

        threads = [threading.Thread(target=write_variant, args=(variant,)) for variant in (1, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert sum(stored) == 3
        back = node.server.retrieve_hidden_states(TOKENS)
        assert back is not None
        for chunk in range(3):  # a chunk is of one writer, as a whole
            rows = slice(chunk * CHUNK_SIZE, (chunk + 1) * CHUNK_SIZE)
            assert any(torch.equal(back[rows], make_rows(TOKENS, variant=v).float()[rows]) for v in (1, 2))
        stats = node.settled()
        assert stats.resident_bytes == stats.capacity_bytes - stats.free_bytes == 3 * 64


def test_closing_ends_the_pool_and_not_what_is_held_of_it() -> None:
    node = Node()
    put(node.server)
    with node.server.lease_rows(lease_request(node)) as (_, rows):
        flat = rows()
        assert flat is not None
        node.server.close()
        node.server.close()
        assert flat.tobytes() == flatten([make_rows(TOKENS)]).tobytes()
    del flat
    assert node.num_mappings() == 0


def test_statistics() -> None:
    node = Node()
    put(node.server)
    node.server.retrieve_hidden_states(make_tokens("abcd"))
    node.server.retrieve_hidden_states(make_tokens("x"))
    stats = node.server.stats()
    assert (stats.retrieves_total, stats.hits_total) == (2, 1)
    assert (stats.tokens_asked_total, stats.tokens_served_total) == (20, 12)
    assert (stats.node_id, stats.pid, stats.kv_source) == (node.name, os.getpid(), "reports")
    assert stats.incarnation == node.pool.incarnation.hex()


def test_statistics_of_a_lease_from_the_middle_on_count_what_was_asked_for() -> None:
    node = Node()
    put(node.server)
    with node.server.lease_rows(lease_request(node, tokens=make_tokens("abcd"), first_chunk=1)) as (reply, _):
        assert (reply.num_tokens, reply.ended_by, reply.alone) == (8, "hidden_state", True)
    stats = node.server.stats()
    assert (stats.tokens_asked_total, stats.tokens_served_total) == (12, 8)
