"""Current revisions of models: who knows of them, what goes with a change, and who may store and find what after it."""

import logging
import pickle
import re
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hs_cache import connection, effects, revisions
from hs_cache.errors import (
    InvalidInputError,
    ServiceError,
    ServiceNotRunningError,
    ServiceTimeoutError,
    StaleRevisionError,
)
from hs_cache.messages import (
    RETIRED,
    Freed,
    ModelRevision,
    Retired,
    RevisionChange,
    RevisionTable,
)
from hs_cache.revisions import NodeRevisions, Revisions
from hs_cache.session import Session
from tests.builders import OWNER, SLOT_BYTES, make_keys, make_space, make_store, make_tokens, reserve
from tests.direct import Clock, Controller, DirectCache, Node, make_nodes, make_rows

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="memfd and /proc are Linux")

TOKENS = make_tokens("abc")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (connection, effects):
        monkeypatch.setattr(module, "time", clock)
    return clock


def make_table(*revisions: tuple[str, int, str]) -> RevisionTable:
    return tuple(ModelRevision(*each) for each in revisions)


class TestTable:
    def test_a_model_has_no_revision_until_its_first_change(self) -> None:
        known = Revisions()
        assert known.get("m") == ModelRevision("m", 0, "")
        assert known.table() == ()
        change = known.change("m", None)
        assert change == RevisionChange(ModelRevision("m", 0, ""), ModelRevision("m", 1, change.now.name), changed=True)
        assert known.get("m") == change.now
        assert known.get("n").name == ""

    def test_the_current_revision_named_again_changes_nothing(self) -> None:
        known = Revisions()
        known.change("m", "v1")
        now = ModelRevision("m", 1, "v1")
        assert known.change("m", "v1") == RevisionChange(now, now, changed=False)
        assert known.change("m", "v2").now.number == 2
        assert known.change("m", "v1").now == ModelRevision("m", 3, "v1"), "an older one may come back"

    def test_a_name_that_is_made_up_was_given_to_nothing_before(self) -> None:
        names = {Revisions().change("m", None).now.name for _ in range(100)}
        assert len(names) == 100
        known = Revisions()
        known.change("m", "v")
        assert re.fullmatch("r2-[0-9a-f]{8}", known.change("m", None).now.name)

    @pytest.mark.parametrize(
        ("theirs", "wins"),
        [((2, "v2"), True), ((1, "v1"), False), ((0, "v9"), False)],
    )
    def test_the_higher_number_wins(self, theirs: tuple[int, str], wins: bool) -> None:
        mine, given = ModelRevision("m", 1, "v1"), ModelRevision("m", *theirs)
        known = Revisions((mine,))
        assert known.merge((given, ModelRevision("n", 5, "x"))) == [
            *([RevisionChange(mine, given, changed=True)] if wins else []),
            RevisionChange(ModelRevision("n", 0, ""), ModelRevision("n", 5, "x"), changed=True),
        ]
        assert known.table() == (given if wins else mine, ModelRevision("n", 5, "x"))
        backwards = Revisions((given,))
        backwards.merge((mine, ModelRevision("n", 5, "x")))
        assert backwards.table() == known.table()


class TestNode:
    def test_without_a_change_every_revision_is_taken(self) -> None:
        node = NodeRevisions(make_store(4))
        for name in ("", "v1", "v2"):
            with node.admitting(name.encode(), ModelRevision("m", 0, name)):
                pass
        assert (node.current("m"), node.table(), node.refused_total) == ("", (), 0)

    def test_a_change_drops_the_chunks_of_all_other_revisions_of_that_model(self) -> None:
        store = make_store(8)
        node = NodeRevisions(store)
        for number, (salt, model, name) in enumerate([("", "m", ""), ("s", "m", "v1"), ("t", "n", "")]):
            with node.admitting(make_space(salt=salt).fingerprint, ModelRevision(model, 0, name)):
                reserve(store, (OWNER, number), "ab", salt=salt)
            store.commit((OWNER, number))
        (retired,) = node.take(make_table(("m", 1, "v1")))
        assert retired == Retired(ModelRevision("m", 1, "v1"), Freed(2, 2 * SLOT_BYTES, 0))
        assert [store.contains(make_keys("a", salt=salt)[0], 0) for salt in ("", "s", "t")] == [False, True, True]
        assert node.take(make_table(("m", 1, "v1"))) == (retired,), "told again, it says the same and does nothing"
        expected = "revision '' of model 'm', expected the current one, 'v1'"
        with (
            pytest.raises(StaleRevisionError, match=expected),
            node.admitting(make_space().fingerprint, ModelRevision("m", 0, "")),
        ):
            raise AssertionError
        assert node.refused_total == 1

    def test_a_name_stands_for_its_weights(self) -> None:
        store = make_store(8)
        node = NodeRevisions(store)
        node.take(make_table(("m", 1, "v1")))
        with node.admitting(make_space().fingerprint, ModelRevision("m", 0, "v1")):
            reserve(store, (OWNER, 1), "ab")
        store.commit((OWNER, 1))
        (retired,) = node.take(make_table(("m", 3, "v1")))
        assert retired.freed.chunks == 0

    def test_who_is_new_keeps_what_it_was_given_before_it_was_told(self) -> None:
        store = make_store(8)
        node = NodeRevisions(store)
        with node.admitting(make_space().fingerprint, ModelRevision("m", 0, "v1")):
            reserve(store, (OWNER, 1), "ab")
        (retired,) = node.take(make_table(("m", 3, "v1")))
        assert retired.freed.chunks == 0
        assert store.commit((OWNER, 1)).stored == 2

    def test_a_client_may_have_heard_of_it_first(self) -> None:
        store = make_store(8)
        node = NodeRevisions(store)
        node.take(make_table(("m", 1, "r1")))
        with node.admitting(make_space().fingerprint, ModelRevision("m", 1, "r1")):
            reserve(store, (OWNER, 1), "ab")
        store.commit((OWNER, 1))
        with node.admitting(make_space(salt="s").fingerprint, ModelRevision("m", 2, "r2")):
            assert store.stats().num_chunks == 0
        assert node.table() == make_table(("m", 2, "r2"))
        expected = "revision 'r1' of model 'm', expected the current one, 'r2'"
        stale = ModelRevision("m", 1, "r1")
        with pytest.raises(StaleRevisionError, match=expected), node.admitting(make_space().fingerprint, stale):
            raise AssertionError

    def test_key_spaces_without_chunks_are_forgotten(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(revisions, "_PRUNE_AT", 4)
        store = make_store(4)
        node = NodeRevisions(store)
        node._prune_at = 4
        with node.admitting(make_space().fingerprint, ModelRevision("m", 0, "v")):
            reserve(store, (OWNER, 1), "ab")
        for number in range(50):
            with node.admitting(b"%d" % number, ModelRevision("m", 0, "v")):
                pass
        assert len(node._spaces) <= 5
        node.take(make_table(("m", 1, "w")))
        with pytest.raises(StaleRevisionError):
            store.commit((OWNER, 1))

    def test_a_store_beside_a_change_is_refused_or_dropped(self) -> None:
        """Never visible behind it, whichever comes first at any of the steps."""
        for _ in range(50):
            store = make_store(8)
            node = NodeRevisions(store)
            begin = threading.Barrier(2)

            def put(store: Any = store, node: Any = node, begin: Any = begin) -> None:
                begin.wait()
                try:
                    with node.admitting(make_space().fingerprint, ModelRevision("m", 0, "")):
                        reserve(store, (OWNER, 1), "ab")
                    with node.committing():
                        store.commit((OWNER, 1))
                except StaleRevisionError:
                    assert node.refused_total == 1

            writer = threading.Thread(target=put)
            writer.start()
            begin.wait()
            node.take(make_table(("m", 1, "v1")))
            writer.join()
            store.check()
            assert store.stats().free_bytes == 8 * SLOT_BYTES


# Clients


@linux_only
@pytest.mark.parametrize("far", [False, True], ids=["with a pool", "without a pool"])
def test_a_client_stays_at_its_revision_and_its_stores_fail_after_a_change(
    far: bool, caplog: pytest.LogCaptureFixture
) -> None:
    node = Node()
    old = DirectCache(node, far=far, model="m")
    other = DirectCache(node, far=far, model="another")
    assert old.put(TOKENS).stored == other.put(TOKENS).stored == 3
    held = old.retrieve(TOKENS)
    change = node.controller.bump("m", "r1")
    assert (change.before.name, change.now.name) == ("", "r1")
    assert not old.retrieve(TOKENS)
    assert old.explain(TOKENS) == [RETIRED] * 3
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            result = old.put(TOKENS)
            assert (result.stored, result.failed, result.prefix_tokens) == (0, 3, 0)
    (record,) = caplog.records
    assert "stores of this client fail from now on" in record.getMessage()
    assert "connect again after the new weights are loaded" in record.getMessage()
    stats = old.run(old.session.stats())
    assert (stats.stale_stores_total, stats.failed_chunks_total, stats.unreachable_total) == (2, 6, 0)
    assert stats.node is not None
    assert (stats.node.stale_stores_total, stats.node.revisions) == (2, make_table(("m", 1, "r1")))
    assert stats.node.store.num_chunks == 3

    new = DirectCache(node, far=far, model="m")
    assert (old.session.key_space.model_revision, new.session.key_space.model_revision) == ("", "r1")
    assert not new.retrieve(TOKENS)
    rows = make_rows(TOKENS, variant=1)
    assert new.store(TOKENS, {0: rows}).stored == 3
    assert torch.equal(new.retrieve(TOKENS)[0], rows)
    assert not old.retrieve(TOKENS)
    assert torch.equal(other.retrieve(TOKENS)[0], make_rows(TOKENS))
    assert torch.equal(held[0], make_rows(TOKENS)), "who read them goes on reading"
    del held
    node.settled()


@linux_only
@pytest.mark.parametrize("far", [False, True], ids=["with a pool", "without a pool"])
def test_strict_clients_hear_that_their_revision_is_not_current(far: bool) -> None:
    node = Node()
    cache = DirectCache(node, far=far, strict=True, model="m", model_revision="v1")
    node.controller.bump("m", "v2")
    for _ in range(2):
        with pytest.raises(
            StaleRevisionError, match="rows of revision 'v1' of model 'm', expected the current one, 'v2'"
        ):
            cache.put(TOKENS)
        assert "attach" not in cache.effects[1:], "the service is well"
    assert not cache.retrieve(TOKENS)
    assert cache.run(cache.session.stats()).stale_stores_total == 2
    assert pickle.loads(pickle.dumps(StaleRevisionError("x"))).args == ("x",)


@linux_only
def test_rows_reserved_before_a_change_and_committed_after_it_are_freed() -> None:
    node = Node()
    cache = DirectCache(node, model="m", strict=True)

    def changed_meanwhile(perform: Callable[[], Any]) -> Any:
        node.controller.bump("m")
        return perform()

    cache.put(make_tokens("ab"))
    for at in (1, 2):  # the copy, the commit
        cache = DirectCache(node, model="m", strict=True)
        cache.faults[at] = changed_meanwhile
        with pytest.raises(StaleRevisionError, match="changed while these rows were being stored"):
            cache.put(TOKENS)
        assert cache.effects == ["reserve", "Work", "commit"]
        assert not cache.retrieve(TOKENS)
        assert node.settled().resident_bytes == 0
    assert node.server.stats().stale_stores_total == 2


@linux_only
def test_steps_of_a_writer_fail_after_a_change_and_begin_no_chunk_of_the_next_revision() -> None:
    node = Node()
    caches = [DirectCache(node, model="m")]
    request = caches[0].session.open_request("r", ())
    caches[0].run(caches[0].session.append(request, TOKENS[:6], {0: make_rows(TOKENS[:6])}))
    node.controller.bump("m", "r1")
    done = caches[0].run(caches[0].session.append(request, TOKENS[6:], {0: make_rows(TOKENS)[6:]}))
    assert (done.stored, done.failed) == (0, 2)
    caches.append(DirectCache(node, model="m"))
    assert caches[1].store(TOKENS, {0: make_rows(TOKENS)[6:]}, token_offset=6).stored == 1, "the chunk it has all of"
    assert not caches[1].retrieve(TOKENS)


@linux_only
def test_a_revision_that_a_client_names_is_its_own() -> None:
    node = Node()
    named = DirectCache(node, model="m", model_revision="v1")
    assert named.put(TOKENS).stored == 3
    early = DirectCache(node, model="m", model_revision="v2")
    assert early.put(TOKENS).stored == 3, "as long as there was no change, any is as good"
    node.controller.bump("m", "v2")
    assert named.session.key_space.model_revision == "v1"
    assert named.put(TOKENS).failed == 3
    assert early.retrieve(TOKENS).num_tokens == 12, "what is current now stays"
    assert DirectCache(node, model="m").retrieve(TOKENS).num_tokens == 12
    node.controller.bump("m", "v1")
    assert not named.retrieve(TOKENS), "it comes back without its rows"
    assert named.put(TOKENS).stored == 3
    assert early.put(TOKENS).failed == 3


@linux_only
def test_a_pickled_client_keeps_the_revision_that_it_had() -> None:
    node = Node()
    cache = DirectCache(node, model="m")
    pickled = pickle.dumps(cache.session)
    node.controller.bump("m", "r1")
    copy: Session = pickle.loads(pickled)
    assert copy.key_space == cache.session.key_space
    again = DirectCache(node, model="m")
    again.session = copy
    assert again.put(TOKENS).failed == 3
    assert again.effects == ["Locate", "attach", "reserve"], "nobody is asked for the revision again"
    again.run(copy.attach())
    assert copy.key_space.model_revision == ""


@linux_only
def test_a_client_stays_at_its_revision_when_it_attaches_anew() -> None:
    node = Node()
    cache = DirectCache(node, model="m")
    cache.put(TOKENS)
    node.controller.bump("m", "r1")
    node.restart()
    node.controller.hear_all()
    assert cache.put(TOKENS).failed == 3
    assert cache.session.key_space.model_revision == ""


@linux_only
def test_nodes_that_were_not_reached_and_those_that_join_learn_it_when_they_publish() -> None:
    nodes = make_nodes()
    caches = [DirectCache(node, model="m") for node in nodes]
    for cache in caches:
        assert cache.put(TOKENS).stored == 3
    controller = nodes[0].controller
    controller.hear_all()
    controller.bump("m", "r1", unreached=nodes[2:])
    assert [bool(cache.retrieve(TOKENS)) for cache in caches] == [True] * 3, "the last node has its rows still"
    new = DirectCache(nodes[2], model="m")
    assert new.session.key_space.model_revision == "r1", "a client hears of it although the node does not know"
    assert not new.retrieve(TOKENS)
    assert new.put(TOKENS).stored == 3, "nor does it matter to its stores"
    assert nodes[2].server.revisions.current("m") == "r1"
    joined = Node(controller=controller)
    controller.hear_all()
    assert [bool(cache.retrieve(TOKENS)) for cache in caches] == [False] * 3
    assert caches[2].put(TOKENS).failed == 3
    assert DirectCache(joined, model="m", model_revision="").put(TOKENS).stored == 3
    assert DirectCache(joined, model="m", model_revision="v0").put(TOKENS).failed == 3
    controller.hear_all()
    assert new.retrieve(TOKENS).num_tokens == 12


@linux_only
@pytest.mark.parametrize("strict", [False, True])
def test_who_cannot_be_told_the_revision_does_not_connect_unless_he_names_it(strict: bool, clock: Clock) -> None:
    node = Node()
    DirectCache(node, model="m").put(TOKENS)
    node.controller.unreachable = True
    begin = clock.monotonic()
    with pytest.raises(
        ServiceError, match=r"can't say which revision of model 'm' is current: .*; name it, with model_"
    ):
        DirectCache(node, model="m", strict=strict, clock=clock)
    assert clock.monotonic() - begin <= connection._PIN_TIMEOUT_S
    assert DirectCache(node, model="m", model_revision="v1").put(TOKENS).stored == 3


@linux_only
def test_a_controller_that_hangs_costs_a_client_its_deadline_once(clock: Clock) -> None:
    node = Node()
    cache = DirectCache(node, clock=clock, model="m")
    cache.session = Session({"model": "m"}, strict=False)

    def hangs(perform: Callable[[], Any]) -> Any:
        raise ServiceTimeoutError("it hangs")

    cache.faults = dict.fromkeys(range(3, 40), hangs)
    begin = clock.monotonic()
    with pytest.raises(ServiceError, match="it hangs"):
        cache.run(cache.session.attach())
    assert clock.monotonic() - begin <= connection._PIN_TIMEOUT_S + 0.01
    assert cache.effects == ["Locate", "attach", "Find", "revisions"]


@linux_only
def test_where_there_is_no_controller_connecting_says_so_at_once() -> None:
    cache = DirectCache(Node())
    cache.session = Session({}, strict=False)

    def none(perform: Callable[[], Any]) -> Any:
        raise ServiceNotRunningError("no controller")

    cache.faults[2] = none
    with pytest.raises(ServiceNotRunningError, match="no controller"):
        cache.run(cache.session.attach())


def test_the_revision_has_to_be_a_string() -> None:
    with pytest.raises(InvalidInputError, match="model_revision: got int, expected str"):
        Session({"model_revision": 0}, strict=False)  # type: ignore[dict-item]


# By handle


@linux_only
def test_by_handle_the_current_revision_is_the_default_and_others_are_refused() -> None:
    server = (node := Node(controller=Controller())).server
    rows = make_rows(TOKENS)
    assert server.store_hidden_states(TOKENS, rows, model="m") == 3
    assert server.store_hidden_states(TOKENS, rows, model="m", model_revision="v0") == 3
    node.controller.bump("m", "v1")
    assert server.num_cached_chunks() == 0
    assert server.retrieve_hidden_states(TOKENS, model="m") is None
    newer = make_rows(TOKENS, variant=1)
    assert server.store_hidden_states(TOKENS, newer, model="m") == 3
    for named in ({}, {"model_revision": "v1"}):
        found = server.retrieve_hidden_states(TOKENS, model="m", **named)
        assert found is not None
        assert torch.equal(found, newer.float())
    with pytest.raises(StaleRevisionError, match="'v0' of model 'm', expected the current one, 'v1'"):
        server.store_hidden_states(TOKENS, rows, model="m", model_revision="v0")
    assert server.retrieve_hidden_states(TOKENS, model="m", model_revision="v0") is None
    assert server.num_cached_chunks() == 3
    assert node.settled().num_reservations == 0
