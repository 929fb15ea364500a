"""Prefill in steps, and plans, end to end: both clients against a real service, on one node and on three."""

import inspect
from typing import Any

import pytest
import ray
import torch

import hs_cache
from hs_cache.errors import CacheClosedError, InvalidInputError
from hs_cache.router import HIDDEN_STATES, find_actor, nodes_of
from tests.builders import CHUNK_SIZE
from tests.cluster.children import make_rows
from tests.cluster.conftest import Connect, StartService
from tests.cluster.nodes import Nodes, client, store_on
from tests.processes import wait_until

ROWS = {0: make_rows(40, 1), 7: make_rows(40, 2, hidden_dim=24).to(torch.bfloat16)}


def part(first: int, end: int) -> dict[int, torch.Tensor]:
    return {layer: rows[first:end] for layer, rows in ROWS.items()}


def check(cache: Any, token_ids: Any, num_tokens: int) -> None:
    hit = cache.retrieve(token_ids, [0, 7])
    assert hit.num_tokens == num_tokens
    for layer, rows in hit.layers.items():
        assert torch.equal(rows, ROWS[layer][:num_tokens])


@pytest.mark.parametrize("size", [1, 3, 7, 40])
def test_a_request_in_steps(cache: Any, size: int) -> None:
    writer = cache.writer("request")
    for first in range(0, 40, size):
        end = min(first + size, 40)
        writer.append(range(first, end), part(first, end))
        check(cache, range(40), end - end % CHUNK_SIZE)
    writer.finish()
    writer.finish()
    with pytest.raises(CacheClosedError):
        writer.append([1], {})
    assert cache.stats().held_bytes == 0


def test_preempted_resumed_and_given_up(cache: Any) -> None:  # cases 21 and 22
    writer = cache.writer("request")
    writer.append(range(10), part(0, 10))
    writer.preempt(2)
    assert writer.num_tokens == 2
    writer.append(range(2, 39), part(2, 39))
    check(cache, range(40), 36)
    with pytest.raises(InvalidInputError, match="still open"):
        cache.writer("request")
    for _ in range(2):
        writer.abort()
    assert cache.stats().held_bytes == 0
    check(cache, range(40), 36)
    cache.writer("request").abort()


def test_steps_by_the_drop_in_way(cache: Any) -> None:  # case 6
    assert cache.store_hidden_states(list(range(6)), ROWS[0][:6]) == 1
    assert cache.store_hidden_states(list(range(16)), ROWS[0][6:16], token_offset=6) == 3
    assert torch.equal(cache.retrieve_hidden_states(list(range(16))), ROWS[0][:16])


def test_a_plan_then_a_retrieve(cache: Any) -> None:
    cache.store(range(40), part(0, 40))
    cache.store(range(100, 108), {0: ROWS[0][:8]})
    node_id = cache.stats().node.node_id
    coverage = cache.plan(range(42), [0, 7], hold=True)
    assert (coverage.num_tokens, coverage.kv_tokens, coverage.layer_tokens) == (40, 40, {0: 40, 7: 40})
    assert (coverage.nodes, coverage.nbytes) == ((node_id,), sum(rows.nbytes for rows in ROWS.values()))
    assert cache.stats().node.store.num_leases >= 1
    check(cache, range(42), 40)
    coverage.release()
    assert cache.plan(range(100, 108), [0, 7]).layer_tokens == {0: 8, 7: 0}
    assert cache.kv.report_evicted(cache.chunk_keys(range(40))[3:])
    assert cache.plan(range(40), 0).num_tokens == 12
    reasons = [report.reason for report in cache.explain(range(44), [0, 7])]
    assert reasons == ["ok"] * 3 + ["kv_absent"] + ["kv_absent"] * 6 + ["never_stored"]
    wait_until(lambda: cache.stats().node.store.num_leases == 0, "nothing is held any more")


def test_handles_continue_what_came_before(service: str) -> None:
    actor = find_actor(service, HIDDEN_STATES, nodes_of(service)[0])
    assert ray.get(actor.store_hidden_states.remote(list(range(6)), ROWS[0][:6].numpy(), model="steps")) == 1
    stored = actor.store_hidden_states.remote(list(range(16)), ROWS[0][6:16].numpy(), token_offset=6, model="steps")
    assert ray.get(stored) == 3
    rows = ray.get(actor.retrieve_hidden_states.remote(list(range(16)), model="steps"))
    assert torch.equal(rows, ROWS[0][:16].float())


def test_plans_across_nodes(connect: Connect, nodes: Nodes, start_service: StartService) -> None:
    service = start_service(node_selector="all", rpc_timeout_s=4.0)
    cache = connect(service=service)
    plain = client(service, cache.key_space.model)
    assert store_on(nodes.head, plain, range(16), part(0, 16)) == 4
    assert store_on(nodes.one, plain, range(28), part(16, 28), 16) == 3
    assert store_on(nodes.two, plain, range(40), part(28, 40), 28) == 3
    wait_until(lambda: cache.plan(range(40), [0, 7]).num_tokens == 40, "the directory knows")
    coverage = cache.plan(range(40), [7, 0], hold=True)
    assert coverage.nodes == (nodes.head, nodes.one, nodes.two)
    assert {report.node_id for report in cache.explain(range(40), 0)} == set(coverage.nodes)
    for node_id in (nodes.one, nodes.two):
        drop_on(node_id, service, list(cache.chunk_keys(range(40))))
    check(cache, range(40), 40)
    coverage.release()
    assert cache.retrieve(range(40), [0, 7]).num_tokens == 16


def drop_on(node_id: str, service: str, keys: list[bytes]) -> None:
    ray.get([find_actor(service, HIDDEN_STATES, node_id).drop_key.remote(key) for key in keys])


def test_both_clients_have_the_same_methods() -> None:
    for blocking, other in (
        (hs_cache.HiddenStateCache, hs_cache.AsyncHiddenStateCache),
        (hs_cache.KVReports, hs_cache.AsyncKVReports),
        (hs_cache.PrefixWriter, hs_cache.AsyncPrefixWriter),
    ):
        methods = {name: value for name, value in vars(blocking).items() if not name.startswith("_")}
        for name, method in methods.items():
            twin = getattr(other, name)
            if inspect.isfunction(method):
                assert inspect.signature(method).parameters.keys() == inspect.signature(twin).parameters.keys(), name
        assert methods.keys() == {name for name in vars(other) if not name.startswith("_")}
