"""A change of a model's weights in a cluster: nodes and a controller that miss it, and clients of every kind."""

import gc
import uuid
import weakref
from typing import Any

import pytest
import ray
import torch
from ray.cluster_utils import Cluster

import hs_cache
from hs_cache.errors import InvalidInputError, ServiceNotRunningError, StaleRevisionError
from hs_cache.messages import NodeStatistics
from hs_cache.router import HIDDEN_STATES, find_actor, nodes_of
from tests.cluster import probes
from tests.cluster.children import make_rows
from tests.cluster.conftest import Connect, StartService
from tests.cluster.nodes import (
    Nodes,
    add_node,
    client,
    controller_stats,
    on_controller,
    pid_of,
    read_on,
    removed_at_the_end,
    store_on,
)
from tests.processes import kill, stopped, wait_until

TOKENS = range(12)
OLD, NEW = make_rows(12, 1), make_rows(12, 2)


@pytest.fixture(scope="module")
def everywhere(nodes: Nodes, start_service: StartService) -> str:
    """A service on all nodes."""
    return start_service(node_selector="all")


@pytest.fixture
def model() -> str:
    return uuid.uuid4().hex


def node_stats(service: str, node_id: str) -> NodeStatistics:
    stats: NodeStatistics = ray.get(find_actor(service, HIDDEN_STATES, node_id).stats.remote())
    return stats


def known_on(service: str, node_id: str, model: str) -> str:
    """The current revision of a model, as far as a node knows it."""
    return next((known.name for known in node_stats(service, node_id).revisions if known.model == model), "")


def test_rows_of_old_weights_go_on_every_node(nodes: Nodes, everywhere: str, model: str) -> None:
    old = client(everywhere, model)
    for node_id in nodes:
        assert store_on(node_id, old, TOKENS, {0: OLD}) == 3
    bump = hs_cache.bump_revision(model, service=everywhere)
    assert bump.revision.startswith("r1-")
    assert (bump.previous, bump.changed, bump.unreached) == ("", True, ())
    assert (set(bump.freed), bump.chunks, bump.nbytes) == (set(nodes), 9, 9 * 4 * 32)
    new = client(everywhere, model)
    for node_id in nodes:
        assert read_on(node_id, old, TOKENS)[0] == b""
        assert read_on(node_id, new, TOKENS)[0] == b""
        assert store_on(node_id, old, TOKENS, {0: OLD}) == 0, "a client that travels stays what it was"
    assert store_on(nodes.one, new, TOKENS, {0: NEW}) == 3
    assert torch.equal(new.retrieve(TOKENS, 0, wait_s=20)[0], NEW), "found from another node"
    assert not old.retrieve(TOKENS, 0)
    again = hs_cache.bump_revision(model, bump.revision, service=everywhere)
    assert (again.changed, again.freed) == (False, {})
    assert torch.equal(new.retrieve(TOKENS, 0)[0], NEW)


def test_a_node_that_does_not_answer_learns_it_when_it_does(nodes: Nodes, everywhere: str, model: str) -> None:
    old = client(everywhere, model)
    assert store_on(nodes.two, old, TOKENS, {0: OLD}) == 3
    pid = pid_of(everywhere, HIDDEN_STATES, nodes.two)
    with stopped(pid):
        bump = hs_cache.bump_revision(model, "v1", service=everywhere)
        assert (bump.unreached, set(bump.freed)) == ((nodes.two,), {nodes.head, nodes.one})
        assert client(everywhere, model).key_space.model_revision == "v1"
    wait_until(lambda: known_on(everywhere, nodes.two, model) == "v1", "the node has been told")
    assert read_on(nodes.two, old, TOKENS)[0] == b""
    again = hs_cache.bump_revision(model, "v1", service=everywhere)
    assert (again.changed, again.unreached) == (False, ())


def test_a_controller_that_is_restarted_and_a_node_that_joins(
    cluster: Cluster, nodes: Nodes, everywhere: str, model: str
) -> None:
    first = hs_cache.bump_revision(model, service=everywhere).revision
    kill(on_controller(everywhere, probes.pid_of))
    assert client(everywhere, model).key_space.model_revision == first, "whoever connects waits until it is back"
    kill(wait_until(lambda: on_controller(everywhere, probes.pid_of), "it is there again"))
    second = hs_cache.bump_revision(model, service=everywhere)
    assert (second.previous, second.revision[:3]) == (first, "r2-"), "and whoever changes it, too"
    assert model in {known.model for known in controller_stats(everywhere).revisions}
    with removed_at_the_end(cluster) as added:
        added.append(add_node(cluster))
        node_id = added[0].node_id
        wait_until(lambda: node_id in nodes_of(everywhere), "the new node has its actors")
        wait_until(lambda: known_on(everywhere, node_id, model) == second.revision, "the new node has been told")


def test_an_actor_that_is_restarted_takes_nothing_of_old_weights_for_long(
    nodes: Nodes, everywhere: str, model: str
) -> None:
    old = client(everywhere, model)
    now = hs_cache.bump_revision(model, service=everywhere).revision
    kill(pid_of(everywhere, HIDDEN_STATES, nodes.head))
    wait_until(lambda: old.stats().node, "the node is back")
    wait_until(lambda: known_on(everywhere, nodes.head, model) == now, "it has been told again")
    assert old.store(TOKENS, {0: OLD}).failed == 3
    assert not old.retrieve(TOKENS, 0)


def test_strict_clients_hear_of_it(connect: Connect, everywhere: str, model: str) -> None:
    cache = connect(service=everywhere, model=model, strict=True)
    hs_cache.bump_revision(model, service=everywhere)
    with pytest.raises(StaleRevisionError, match="connect again after the new weights are loaded"):
        cache.store(TOKENS, {0: OLD})
    assert not cache.retrieve(TOKENS, 0)
    assert cache.stats().stale_stores_total == 1
    again = connect(service=everywhere, model=model, strict=True)
    assert again.store(TOKENS, {0: NEW}).stored == 3


def test_by_handle(nodes: Nodes, everywhere: str, model: str) -> None:
    actor: Any = find_actor(everywhere, HIDDEN_STATES, nodes.head)
    assert ray.get(actor.store_hidden_states.remote(TOKENS, OLD, model=model)) == 3
    hs_cache.bump_revision(model, "v1", service=everywhere)
    assert ray.get(actor.retrieve_hidden_states.remote(TOKENS, model=model)) is None
    assert ray.get(actor.store_hidden_states.remote(TOKENS, NEW, model=model)) == 3
    assert torch.equal(client(everywhere, model).retrieve(TOKENS, 0)[0], NEW)
    with pytest.raises(StaleRevisionError, match="'v0' of model"):
        ray.get(actor.store_hidden_states.remote(TOKENS, OLD, model=model, model_revision="v0"))
    ray.get(actor.check.remote())


@pytest.mark.parametrize(
    ("model", "revision", "message"),
    [
        (5, None, "model: got int, expected str"),
        ("m", 5, "revision: got 5, expected None or a name that is not empty"),
        ("m", "", "revision: got '', expected None or a name"),
    ],
)
def test_what_is_no_revision_is_refused(everywhere: str, model: Any, revision: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        hs_cache.bump_revision(model, revision, service=everywhere)


@pytest.mark.parametrize("strict", [False, True])
def test_rows_of_a_store_that_is_refused_are_let_go_at_once(everywhere: str, model: str, strict: bool) -> None:
    old = client(everywhere, model, strict=strict)
    hs_cache.bump_revision(model, "v1", service=everywhere)
    rows = OLD.clone()
    rows_gone = weakref.ref(rows)
    gc.collect()
    gc.disable()
    try:
        failed = 0
        try:
            failed = old.store(TOKENS, {0: rows}).failed
        except StaleRevisionError:  # pytest.raises would keep it
            failed = 3 if strict else 0
        del rows
        assert failed == 3
        assert rows_gone() is None
    finally:
        gc.enable()


def test_a_service_that_does_not_run_has_none(name: str) -> None:
    with pytest.raises(ServiceNotRunningError, match=f"no service named '{name}' runs"):
        hs_cache.bump_revision("m", service=name)


def test_a_change_outlives_the_actors_that_know_of_it(nodes: Nodes, start_service: StartService, model: str) -> None:
    service = start_service(node_selector="all")
    old = client(service, model)
    pid = pid_of(service, HIDDEN_STATES, nodes.two)
    assert store_on(nodes.two, old, TOKENS, {0: OLD}) == 3
    hs_cache.bump_revision(model, "v1", service=service)
    with stopped(pid):
        kill(on_controller(service, probes.pid_of))
        for node_id in (nodes.head, nodes.one):
            kill(pid_of(service, HIDDEN_STATES, node_id))
        wait_until(lambda: old.stats().node, "this node is back")
        new = client(service, model)
    assert new.key_space.model_revision == "v1"
    assert not new.retrieve(TOKENS, 0)
    bump = hs_cache.bump_revision(model, service=service)
    assert (bump.previous, bump.revision[:3]) == ("v1", "r2-")
