"""Parcels against servers in this process: what is put is taken once, whole, from any node; nothing of it is left."""

import contextlib
import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from hs_cache.errors import CacheClosedError, HiddenStateCacheError, ServiceTimeoutError
from hs_cache.leases import this_process
from hs_cache.messages import split_keys
from hs_cache.parcels import ParcelName, Parcels, Sent, Taken
from hs_cache.payloads import pack, unpack
from hs_cache.rows import Flat
from tests.builders import make_tokens
from tests.direct import (
    Cancelled,
    DirectCache,
    DirectPeer,
    Node,
    broken,
    cancelled_after,
    cancelled_before,
    lost_call,
    lost_reply,
    make_nodes,
    poll,
    refused,
)

NAME = ParcelName.of("", "0", "1", "request")
LARGE = 200_000
"""Bytes of a payload that is not copied when it is taken."""

SLOTS = 16384
"""A pool of one megabyte."""


class Bytes:
    """A parcel's content: so many of one value."""

    def __init__(self, value: int, nbytes: int = 1000) -> None:
        self.value = value
        self.nbytes = nbytes

    def write(self, memory: Flat) -> None:
        memory[: self.nbytes] = self.value


class Client:
    """A client and its parcels."""

    def __init__(self, node: Node, **options: Any) -> None:
        self.cache = DirectCache(node, **options)
        self.parcels = Parcels(self.cache.session)

    def put(self, value: int, nbytes: int = 1000, name: ParcelName = NAME) -> Sent | None:
        return self.cache.run(self.parcels.put(name, Bytes(value, nbytes)))

    def take(self, name: ParcelName = NAME, node_id: str = "") -> Taken | None:
        return self.cache.run(self.parcels.take(name, node_id))

    def value(self, name: ParcelName = NAME, node_id: str = "") -> int | None:
        """The one value that the bytes of a parcel have."""
        taken = self.take(name, node_id)
        if taken is None:
            return None
        (value,) = set(taken.content.tolist())
        return int(value)

    def drop(self, name: ParcelName = NAME, generation: bytes | None = None, node_id: str = "") -> bool | None:
        return self.cache.run(self.parcels.drop(name, generation, node_id))

    def gone(self, *sent: Sent) -> list[Sent]:
        return self.cache.run(self.parcels.gone({sent[0].node_id: sent}))


def is_empty(node: Node) -> bool:
    stats = node.settled()
    return stats.free_bytes == stats.capacity_bytes and not stats.num_kept and not stats.num_chunks


def test_names_differ_with_every_part() -> None:
    names = [("", "0", "1", "k"), ("", "01", "", "k"), ("", "0", "1k", ""), ("x", "0", "1", "k"), ("0", "", "1", "k")]
    assert len({ParcelName.of(*parts).key for parts in names}) == len(names)
    assert ParcelName.of("", "0", "1", "request").key.hex() == NAME.key.hex()
    assert ParcelName.of("\udc80").key != ParcelName.of("\ufffd").key


def test_the_name_is_the_same_everywhere() -> None:
    assert ParcelName.of("ns", "thinker", "talker", "req-1_0_0").digest.hex() == (
        "6f7e79c3687b4e59ef075e1c64a8d00435f3b2a2ccda99f29a4cbf198ed510e5"
    )


@pytest.mark.parametrize("nbytes", [1, 1000, LARGE])
@pytest.mark.parametrize("far", [False, True])
def test_put_and_take(nbytes: int, far: bool) -> None:
    node = Node(SLOTS)
    producer, consumer = Client(node, far=far), Client(node, far=far)
    assert consumer.take() is None
    sent = producer.put(7, nbytes)
    assert sent is not None
    assert (sent.nbytes, sent.node_id, sent.hold is None) == (nbytes, node.name, far)
    assert node.server.store.stats().num_kept == (0 if far else 1)
    taken = consumer.take()
    assert taken is not None
    assert (taken.content.nbytes, set(taken.content.tolist()), taken.dropped) == (nbytes, {7}, True)
    assert taken.content.ctypes.data % 64 == 0
    taken.content[:] = 9  # its own
    assert consumer.take() is None
    assert producer.drop(NAME, sent.generation) is False
    del taken
    assert is_empty(node)


def test_large_ones_are_not_copied_and_hold_their_memory() -> None:
    node = Node(SLOTS)
    client = Client(node)
    client.put(7, LARGE)
    taken = client.take()
    assert taken is not None
    assert client.cache.session._counts["zero_copy_total"] == 1
    view = taken.content[1000:2000]
    del taken
    gc.collect()
    assert node.num_leases() == 1
    for value in range(20):
        assert client.put(value, LARGE)
        assert client.drop() is True
    node.server.store.check()
    assert set(view.tolist()) == {7}
    del view
    assert is_empty(node)


def test_it_is_not_evicted_and_the_prefix_cache_goes_on() -> None:
    node = Node(64)
    client = Client(node)
    client.put(7, 2000)
    for letters in ("abcdefgh", "ijklmnop", "qrstuvwx", "yzABCDEF", "GHIJKLMN"):
        assert client.cache.put(make_tokens(letters), 0, 1).failed == 0
    assert node.server.store.stats().evicted_chunks_total > 0
    assert client.value() == 7


@pytest.mark.parametrize("far", [False, True])
def test_too_large(far: bool) -> None:
    node = Node(64)
    client = Client(node, far=far)
    before = client.cache.put(make_tokens("abcd"))
    assert client.put(1, 64 * 64 + 1) is None
    assert client.take() is None
    assert client.cache.retrieve(make_tokens("abcd")).num_tokens == 16
    assert before.stored == 4


def test_a_full_pool_takes_no_more_until_one_is_taken() -> None:
    node = Node(64)
    client = Client(node)
    names = [ParcelName.of(str(i)) for i in range(5)]
    sent = [client.put(i, 900, name) for i, name in enumerate(names)]
    assert [bool(one) for one in sent] == [True] * 4 + [False]
    assert client.value(names[0]) == 0
    assert client.put(4, 900, names[4])
    assert [client.value(name) for name in names] == [None, 1, 2, 3, 4]
    assert is_empty(node)


def test_a_put_replaces_in_one_step() -> None:
    node = Node(SLOTS)
    producer, consumer = Client(node), Client(node)
    first = producer.put(1, 1000)
    assert first is not None
    seen: list[int | None] = []

    def look_first(perform: Callable[[], Any]) -> Any:
        other = Client(node)
        hit = other.cache.run(other.cache.session.operate(_peek, None))
        seen.append(hit)
        return perform()

    producer.cache.faults = {2: look_first}  # before the commit
    second = producer.put(2, 5000)
    assert second is not None
    assert seen == [1]
    assert producer.drop(NAME, first.generation) is False
    assert consumer.value() == 2
    assert consumer.take() is None
    assert is_empty(node)


def _peek(link: Any, budget: Any) -> Any:
    """The value of the parcel, which stays there."""
    yield from ()
    node_store = link.mapping.write_view()
    at = bytes(node_store).index(b"hsparcel")
    return node_store[at + 64]


def test_a_replacement_for_which_there_is_no_room_beside_the_old_one() -> None:
    node = Node(64)
    client = Client(node)
    client.put(1, 3000)
    assert client.put(2, 3000) is not None
    assert client.value() == 2
    client.put(3, 3000)
    assert client.put(4, 5000) is None
    assert client.take() is None  # the old one is out of date
    assert is_empty(node)


def test_who_reads_the_old_one_does_not_drop_the_new_one() -> None:
    node = Node(SLOTS)
    producer, consumer = Client(node), Client(node)
    producer.put(1, LARGE)

    def replaced_before(perform: Callable[[], Any]) -> Any:
        assert producer.put(2, LARGE) is not None
        return perform()

    consumer.cache.faults = {1: replaced_before}
    assert consumer.value() == 1
    assert "drop_key" in consumer.cache.effects
    assert consumer.value() == 2
    assert consumer.take() is None
    assert is_empty(node)


def test_two_take_at_once() -> None:
    node = Node(SLOTS)
    producer, one, two = Client(node), Client(node), Client(node)
    producer.put(5, LARGE)
    values: list[int | None] = []

    def other_first(perform: Callable[[], Any]) -> Any:
        values.append(two.value())
        return perform()

    one.cache.faults = {1: other_first}
    values.append(one.value())
    assert values == [5, 5]
    assert one.take() is two.take() is None
    assert is_empty(node)


def test_dropped_while_it_is_taken() -> None:
    node = Node(SLOTS)
    producer, consumer = Client(node), Client(node)
    sent = producer.put(5, LARGE)
    assert sent is not None

    def dropped_before(perform: Callable[[], Any]) -> Any:
        assert producer.drop(NAME, sent.generation, sent.node_id) is True
        assert producer.put(6, LARGE, ParcelName.of("other")) is not None
        return perform()

    consumer.cache.faults = {1: dropped_before}
    assert consumer.value() == 5
    assert consumer.value(ParcelName.of("other")) == 6
    assert is_empty(node)


def test_a_thousand() -> None:
    node = Node(SLOTS)
    client = Client(node)
    names = [ParcelName.of(str(i)) for i in range(1000)]
    sent = [client.put(i % 251, 100 + i % 300, name) for i, name in enumerate(names)]
    assert all(sent)
    assert client.gone(*filter(None, sent)) == []
    assert [client.value(name) for name in names[:500]] == [i % 251 for i in range(500)]
    assert client.gone(*filter(None, sent)) == sent[:500]
    assert [client.drop(name) for name in names] == [False] * 500 + [True] * 500
    assert is_empty(node)


def test_what_a_client_put_goes_with_it() -> None:
    node = Node(SLOTS)
    client = Client(node)
    for i in range(100):
        assert client.put(i, 500, ParcelName.of(str(i)))
    assert node.server.store.stats().num_kept == 100
    assert node.server.store.release_owner(this_process().client_id) == 100
    assert is_empty(node)


def test_a_hold_that_is_released_drops_its_parcel() -> None:
    node = Node(SLOTS)
    client = Client(node)
    sent = client.put(1)
    assert sent is not None
    assert sent.hold is not None
    this_process().releaser.end(sent.hold[0], (sent.hold[1],))
    poll(lambda: is_empty(node), "it is dropped")


FAULTS = [lost_call, lost_reply, refused, cancelled_before, cancelled_after, broken]


@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_put_that_fails_at_any_step_leaves_nothing(fault: Any, far: bool) -> None:
    node = Node(SLOTS)
    steps = _steps(lambda client: client.put(1, 2000), node, far)
    for step in range(steps):
        client = Client(node, far=far)
        client.cache.faults = {step: fault}
        try:
            sent = client.put(step + 1, 2000)
        except (Cancelled, MemoryError):
            sent = None
        this_process().releaser.flush()
        value = Client(node, far=far).value()
        assert value == (step + 1 if sent is not None else None), step
        assert is_empty(node)


@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_take_that_fails_at_any_step(fault: Any, far: bool) -> None:
    node = Node(SLOTS)
    producer = Client(node)

    def once(client: Client) -> None:
        producer.put(1, LARGE)
        client.take()

    for step in range(_steps(once, node, far)):
        producer.put(step + 1, LARGE)
        consumer = Client(node, far=far)
        consumer.cache.faults = {step: fault}
        taken: Taken | None = None
        with contextlib.suppress(Cancelled, MemoryError):
            taken = consumer.take()
        if taken is not None:
            assert set(taken.content.tolist()) == {step + 1}
        again = Client(node, far=far).value()
        assert again in (None, step + 1)
        if taken is None and fault in (lost_call, refused, cancelled_before):
            assert again == step + 1, f"lost at step {step}"
        if taken is not None and taken.dropped:
            assert again is None
        del taken
        producer.drop()
        assert is_empty(node)


class Late:
    """A fault: the deadline is over while the call is on its way; `arrive` carries it out."""

    def __init__(self) -> None:
        self._perform: Callable[[], Any] | None = None

    def __call__(self, perform: Callable[[], Any]) -> Any:
        self._perform = perform
        raise ServiceTimeoutError("still on its way")

    def arrive(self) -> None:
        assert self._perform is not None
        with contextlib.suppress(HiddenStateCacheError):  # which nobody waits for
            self._perform()


OPERATIONS: dict[str, Callable[[Client], Any]] = {
    "put": lambda client: client.put(1),
    "a put without room beside the old one": lambda client: client.put(1, 600_000),
    "take": lambda client: client.take(),
    "drop": lambda client: client.drop(),
}


@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("there", [None, 0, 1], ids=["nothing there", "there already", "on another node"])
def test_a_call_that_comes_late_harms_no_later_put(operation: str, far: bool, there: int | None) -> None:
    """Whichever call it is: what is put after it was given up is there, and then nothing is."""
    run, late, step = OPERATIONS[operation], Late(), 0
    while True:
        nodes = make_nodes(2, slots=SLOTS)
        nodes[0].controller.hear_all()
        if there is not None:
            assert Client(nodes[there]).put(8, 600_000) is not None
        nodes[0].controller.hear_all()
        client = Client(nodes[0], far=far)
        client.cache.faults = {step: late}
        run(client)
        if step >= len(client.cache.effects):
            break
        for where in {0, there} if there is not None else {0}:
            assert Client(nodes[where]).put(9, 300_000) is not None
        late.arrive()
        effect = client.cache.effects[min(step, len(client.cache.effects) - 1)]
        for where in {0, there} if there is not None else {0}:
            node = nodes[where]
            value = Client(node).value(node_id=node.name)
            assert value == 9, (step, effect)
        this_process().releaser.flush()
        for node in nodes:
            assert Client(node).take(node_id=node.name) is None, "it was taken"
            assert is_empty(node)
        step += 1
    assert step > 0


def test_a_far_put_that_comes_late_does_not_replace_a_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where all that is sent without waiting for it comes later still."""
    node = Node(SLOTS)
    far = Client(node, far=True)
    late, posts = Late(), list[Callable[[], None]]()
    this_process().releaser.flush()
    with monkeypatch.context() as patch:
        patch.setattr(
            DirectPeer, "post", lambda peer, method, *args: posts.append(lambda: peer.call(method, args) and None)
        )
        far.cache.faults = {1: late}
        assert far.put(1) is None
        this_process().releaser.flush()
        assert len(posts) == 2, "its release, and the drop of what it may have put"
        far.cache.faults = {3: lost_call}
        assert far.put(2) is None, "the request that would have carried the release is lost"
        assert far.cache.effects[3] == "store_rows"
        assert far.put(3) is not None
        late.arrive()
        assert Client(node).value() == 3
    for post in posts:
        post()
    assert far.put(4) is not None
    assert this_process().releaser.take(node.pool.incarnation) == (), "they have arrived"
    assert Client(node).value() == 4
    assert is_empty(node)


def test_a_far_put_that_comes_late_and_alone_leaves_nothing() -> None:
    node = Node(SLOTS)
    far, late = Client(node, far=True), Late()
    far.cache.faults = {1: late}
    assert far.put(1) is None
    this_process().releaser.flush()
    late.arrive()
    assert Client(node).take() is None
    assert is_empty(node)


def _steps(operation: Callable[[Client], Any], node: Node, far: bool) -> int:
    client = Client(node, far=far)
    operation(client)
    count = len(client.cache.effects)
    client.drop()
    return count


def test_a_node_that_is_restarted() -> None:
    node = Node(SLOTS)
    producer, consumer = Client(node), Client(node)
    sent = producer.put(1)
    assert sent is not None
    node.restart()
    assert consumer.take() is None
    assert producer.drop(NAME, sent.generation, sent.node_id) is False
    assert producer.put(2) is not None
    assert consumer.value() == 2
    assert is_empty(node)


def test_a_node_that_is_away() -> None:
    node = Node(SLOTS)
    client = Client(node)
    sent = client.put(1)
    assert sent is not None
    node.unreachable = True
    assert client.put(2) is None
    assert client.take() is None
    assert client.drop() is None
    assert client.gone(sent) == []
    node.unreachable = False
    assert client.value() == 1
    assert is_empty(node)


def test_what_is_no_parcel_is_not_delivered() -> None:
    node = Node(SLOTS)
    client = Client(node)
    client.put(1)
    data = node.pool.view()
    at = bytes(data).index(b"hsparcel")
    good = bytes(data[at : at + 64])
    for place in (0, 8, 56):  # magic, name, size
        data[at + place] ^= 0xFF
        assert client.take() is None
        data[at : at + 64] = good
    assert client.value() == 1
    short = ParcelName.of("short")
    assert client.put(3, 1, short) is not None
    assert client.value(short) == 3


def test_kv_knows_nothing_of_it() -> None:
    node = Node(SLOTS)
    client = Client(node)
    client.cache.report("resync", b"")
    client.put(1)
    assert node.index.stats().present == 0
    assert client.value() == 1


def test_polling_counts_as_no_retrieve() -> None:
    node = Node(SLOTS)
    client = Client(node)
    client.take()
    client.put(1)
    client.value()
    stats = node.server.stats()
    assert (stats.retrieves_total, stats.hits_total) == (0, 0)
    assert stats.store.stored_chunks_total == 1


def test_after_close() -> None:
    node = Node(SLOTS)
    client = Client(node)
    client.cache.session.close()
    for operation in (lambda: client.put(1), client.take, client.drop):
        with pytest.raises(CacheClosedError):
            operation()


# On several nodes.


def test_from_another_node_by_the_directory() -> None:
    nodes = make_nodes(slots=SLOTS)
    producer, consumer = Client(nodes[0]), Client(nodes[1])
    nodes[0].controller.hear_all()
    assert producer.put(1, LARGE) is not None
    assert consumer.take() is None  # the directory doesn't know yet
    nodes[0].controller.hear_all()
    assert consumer.value() == 1
    assert consumer.take() is None
    assert nodes[0].bytes_sent == LARGE + 64
    assert all(map(is_empty, nodes))


def test_from_another_node_by_its_name() -> None:
    nodes = make_nodes(slots=SLOTS)
    nodes[0].controller.hear_all()
    producer, consumer = Client(nodes[0]), Client(nodes[1])
    sent = producer.put(1, LARGE)
    assert sent is not None
    nodes[0].controller.unreachable = True
    assert consumer.value(node_id=sent.node_id) == 1
    assert consumer.take(node_id=sent.node_id) is None
    assert all(map(is_empty, nodes))


def test_only_the_node_that_is_named_is_asked() -> None:
    nodes = make_nodes(slots=SLOTS)
    nodes[0].controller.hear_all()
    one, two = Client(nodes[0]), Client(nodes[1])
    assert one.put(1) is not None
    nodes[0].controller.hear_all()
    assert two.take(node_id=nodes[1].name) is None
    assert two.take(node_id=nodes[2].name) is None
    assert two.take(node_id="no such node") is None
    assert two.value(node_id=nodes[0].name) == 1


def test_a_put_on_another_node_replaces_too() -> None:
    nodes = make_nodes(slots=SLOTS)
    nodes[0].controller.hear_all()
    one, two = Client(nodes[0]), Client(nodes[1])
    assert one.put(1) is not None
    nodes[0].controller.hear_all()
    assert two.put(2) is not None
    assert one.take() is None
    nodes[0].controller.hear_all()
    assert one.value() == 2
    assert all(map(is_empty, nodes))


def test_a_cleanup_finds_it_on_another_node() -> None:
    nodes = make_nodes(slots=SLOTS)
    nodes[0].controller.hear_all()
    producer, consumer = Client(nodes[0]), Client(nodes[1])
    sent = producer.put(1)
    assert sent is not None
    nodes[0].controller.hear_all()
    assert consumer.drop() is True
    assert consumer.drop() is False
    assert producer.drop(NAME, sent.generation, sent.node_id) is False
    assert all(map(is_empty, nodes))


def test_a_far_producer_is_not_kept_for() -> None:
    nodes = make_nodes(slots=64)
    client = Client(nodes[0], far=True)
    assert client.put(1, 900) is not None
    assert client.put(2, 900) is not None
    assert nodes[0].server.store.stats().num_kept == 0
    assert client.value() == 2
    assert is_empty(nodes[0])


def test_the_controller_is_away() -> None:
    nodes = make_nodes(slots=SLOTS)
    nodes[0].controller.hear_all()
    one, two = Client(nodes[0]), Client(nodes[1])
    nodes[0].controller.unreachable = True
    assert one.put(1) is not None
    assert two.take() is None
    assert two.drop() is None
    assert one.value() == 1
    assert all(map(is_empty, nodes))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_put_that_fails_at_any_step_beside_another_node(fault: Any) -> None:
    nodes = make_nodes(2, slots=SLOTS)
    nodes[0].controller.hear_all()
    other = Client(nodes[1])
    probe = Client(nodes[0])
    assert other.put(99) is not None
    nodes[0].controller.hear_all()
    assert probe.put(99) is not None
    steps = len(probe.cache.effects)
    assert steps > 5
    probe.drop()
    for step in range(steps):
        assert other.put(99) is not None
        nodes[0].controller.hear_all()
        client = Client(nodes[0])
        client.cache.faults = {step: fault}
        sent: Sent | None = None
        with contextlib.suppress(Cancelled, MemoryError):
            sent = client.put(step)
        this_process().releaser.flush()
        here = Client(nodes[0]).value(node_id=nodes[0].name)
        assert here == (None if sent is None else step)
        other.drop(NAME, None, nodes[1].name)
        assert all(map(is_empty, nodes))
        nodes[0].controller.hear_all()


def test_a_controller_that_does_not_answer_costs_one_deadline() -> None:
    nodes = make_nodes(slots=SLOTS)
    nodes[0].controller.hear_all()
    client = Client(nodes[0])
    client.cache.faults = {4: lost_call}
    assert client.put(1) is not None
    assert client.cache.effects[4] == "where"
    assert client.put(2) is not None
    assert "where" not in client.cache.effects
    assert client.value() == 2


def test_an_object_all_the_way() -> None:
    node = Node(SLOTS)
    producer, consumer = Client(node), Client(node)
    rows = torch.randn(300, 200)
    data = {"hidden": rows, "tail": rows[-10:], "ids": np.arange(7), "meta": {"finished": False}}
    assert producer.cache.run(producer.parcels.put(NAME, pack(data))) is not None
    taken = consumer.take()
    assert taken is not None
    arrived = unpack(taken.content)
    del taken
    assert torch.equal(arrived["hidden"], rows)
    assert torch.equal(arrived["tail"], rows[-10:])
    assert arrived["ids"].tolist() == list(range(7))
    assert arrived["hidden"].data_ptr() % 64 == 0
    arrived["hidden"].zero_()
    assert node.num_leases() == 1
    del arrived
    assert is_empty(node)
    assert split_keys(node.server.store.snapshot()) == []


def test_new_weights_of_a_model_without_a_name_concern_no_parcel() -> None:
    node = Node(SLOTS)
    client = Client(node)
    assert client.put(1)
    node.controller.bump("")
    assert client.put(2, name=ParcelName.of("another"))
    assert (client.value(), client.value(ParcelName.of("another"))) == (1, 2)
    assert is_empty(node)
