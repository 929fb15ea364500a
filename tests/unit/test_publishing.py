"""Publisher: what a node says of its chunks arrives in order, or all of it again; whoever is restarted, and however
many change the store meanwhile.
"""

import logging
import random
import sys
import threading
from collections.abc import Callable

import pytest

from hs_cache import publishing
from hs_cache.directory import Directory
from hs_cache.errors import ServiceError, ServiceTimeoutError
from hs_cache.kv_presence import Presence
from hs_cache.messages import LocationBatch, PublishReply, split_keys
from hs_cache.publishing import Publisher
from hs_cache.store import HiddenStateStore
from tests.builders import OWNER, lease, make_keys, make_store, put, reserve
from tests.direct import poll

Send = Callable[[LocationBatch], PublishReply]


class Station:
    """The controller's end: a directory, and all batches that arrived.

    Attributes:
        fault: stands in for the next `send` only.
    """

    def __init__(self) -> None:
        self.directory = Directory()
        self.batches: list[LocationBatch] = []
        self.fault: Callable[[Send, LocationBatch], PublishReply] | None = None
        self.heard: list[PublishReply] = []

    def send(self, batch: LocationBatch) -> PublishReply:
        fault, self.fault = self.fault, None
        return self.take(batch) if fault is None else fault(self.take, batch)

    def take(self, batch: LocationBatch) -> PublishReply:
        self.batches.append(batch)
        applied = True
        if batch.whole:
            self.directory.replace(batch.node_id, batch.incarnation, batch.number, batch.added)
        else:
            applied = self.directory.apply(batch.node_id, batch.incarnation, batch.number, batch.added, batch.removed)
        self.directory.check()
        return PublishReply(applied, 3)

    def knows(self) -> set[bytes]:
        return set(self.directory._bits)


def make_publisher(
    store: HiddenStateStore, station: Station, *, node_id: str = "n", incarnation: bytes = b"i"
) -> Publisher:
    return Publisher(
        store,
        node_id=node_id,
        incarnation=incarnation,
        send=station.send,
        heard=station.heard.append,
    )


def keys_of(store: HiddenStateStore) -> set[bytes]:
    return set(split_keys(store._table.keys()))


def lost_before(take: Send, batch: LocationBatch) -> PublishReply:
    raise ServiceTimeoutError("lost on the way there")


def lost_after(take: Send, batch: LocationBatch) -> PublishReply:
    take(batch)
    raise ServiceTimeoutError("lost on the way back")


def test_all_first_then_changes_in_order_then_signs_of_life() -> None:
    store, station = make_store(4), Station()
    put(store, "ab")
    publisher = make_publisher(store, station)
    assert publisher.step()
    put(store, "xyz")  # takes b
    assert store.changed.is_set()
    assert publisher.step()
    assert not store.changed.is_set()
    assert publisher.step()
    first, second, third = station.batches
    assert (first.number, first.whole, set(split_keys(first.added))) == (1, True, set(make_keys("ab")))
    assert (second.number, second.whole, set(split_keys(second.added))) == (2, False, set(make_keys("xyz")))
    assert split_keys(second.removed) == make_keys("ab")[1:]
    assert third == LocationBatch("n", b"i", 3, b"", b"", whole=False)
    assert station.knows() == keys_of(store)
    assert station.heard == [PublishReply(True, 3)] * 3


def test_what_came_and_went_between_two_batches_is_named_once_by_how_it_ended() -> None:
    store, station = make_store(8), Station()
    put(store, "ab")
    publisher = make_publisher(store, station)
    publisher.step()
    for _ in range(3):
        store.drop(make_keys("ab")[1])
        put(store, "ab")
    put(store, "x")
    store.drop(make_keys("x")[0])
    publisher.step()
    batch = station.batches[-1]
    assert split_keys(batch.added) == make_keys("ab")[1:]
    assert split_keys(batch.removed) == make_keys("x")


@pytest.mark.parametrize("change", ["evict", "drop", "kv absent", "store", "denied"])
def test_every_kind_of_change_is_published(change: str) -> None:
    store, station = make_store(2), Station()
    put(store, "ab")
    publisher = make_publisher(store, station)
    publisher.step()
    assert not store.changed.is_set()
    if change == "evict":
        put(store, "x")
    elif change == "drop":
        store.drop(make_keys("a")[0])
    elif change == "kv absent":
        lease(store, (OWNER, 1), "ab", presence=[Presence.PRESENT, Presence.ABSENT])
    elif change == "store":
        store.drop(make_keys("ab")[1])
        publisher.step()
        put(store, "ab")
    else:  # the directory believed what isn't so
        station.directory.apply("n", b"i", 2, b"".join(make_keys("xy")), b"")
        publisher._number = 2
        store.lease((OWNER, 1), make_keys("xy"), (0,), hinted=True)
        assert store.changed.is_set()
        publisher.step()
        assert station.knows() - keys_of(store) == {make_keys("xy")[1]}, "of the first that isn't there it is told"
        return
    assert store.changed.is_set()
    publisher.step()
    assert station.knows() == keys_of(store)
    assert not station.batches[-1].whole


def test_a_hint_that_was_right_and_a_lease_without_a_hint_change_nothing() -> None:
    store = make_store(4)
    put(store, "ab")
    store.take_changes()
    store.changed.clear()
    store.lease((OWNER, 1), make_keys("ab"), (0,), hinted=True)
    store.lease((OWNER, 2), make_keys("abcd"), (0,))
    store.lease((OWNER, 3), make_keys("ab"), (7,), hinted=True)  # the chunk is there, the layer isn't
    assert not store.changed.is_set()
    assert store.take_changes() == {}


@pytest.mark.parametrize("whole", [True, False])
def test_a_change_right_after_the_changes_were_taken_does_not_wait_for_a_sign_of_life(
    whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, station = make_store(8), Station()
    publisher = make_publisher(store, station)
    if not whole:
        publisher.step()
    method = "snapshot" if whole else "take_changes"
    take = getattr(store, method)

    def taken_and_changed() -> object:
        taken = take()
        put(store, "late")
        return taken

    with monkeypatch.context() as patch:
        patch.setattr(store, method, taken_and_changed)
        publisher.step()
    assert not station.knows()
    assert store.changed.is_set()
    publisher.step()
    assert station.knows() == keys_of(store)


@pytest.mark.parametrize("lost", [lost_before, lost_after])
@pytest.mark.parametrize("times", [1, 3])
def test_after_a_batch_whose_fate_is_unknown_all_is_sent(
    lost: Callable[[Send, LocationBatch], PublishReply], times: int, caplog: pytest.LogCaptureFixture
) -> None:
    store, station = make_store(4), Station()
    put(store, "ab")
    publisher = make_publisher(store, station)
    publisher.step()
    for prompt in "xyz"[:times]:
        put(store, prompt)
        store.drop(make_keys("ab")[1])
        station.fault = lost
        assert not publisher.step()
    assert publisher.step()
    assert station.batches[-1].whole
    assert station.batches[-1].number == times + 2
    assert station.knows() == keys_of(store)
    put(store, "w")
    assert publisher.step()
    assert not station.batches[-1].whole
    assert station.knows() == keys_of(store)
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1, "logged once"
    station.fault = lost
    publisher.step()
    publisher.step()
    assert len(caplog.records) == 2, "and again after it had been well"


def test_a_lost_batch_that_arrives_after_all_of_it_changes_nothing() -> None:
    store, station = make_store(8), Station()
    put(store, "ab")
    publisher = make_publisher(store, station)
    late: list[LocationBatch] = []

    def delayed(take: Send, batch: LocationBatch) -> PublishReply:
        late.append(batch)
        raise ServiceTimeoutError("still on the way")

    station.fault = delayed  # all of it
    publisher.step()
    station.fault = delayed  # all of it, again
    publisher.step()
    publisher.step()
    put(store, "x")
    station.fault = delayed  # a change
    publisher.step()
    store.drop(make_keys("x")[0])
    publisher.step()
    for batch in late:
        station.take(batch)
    assert station.knows() == keys_of(store)
    put(store, "y")
    publisher.step()
    assert not station.batches[-1].whole, "nothing was out of turn"
    assert station.knows() == keys_of(store)


def test_a_controller_that_starts_anew_is_sent_all() -> None:
    store, station = make_store(8), Station()
    put(store, "ab")
    publisher = make_publisher(store, station)
    publisher.step()
    station.directory = Directory()
    put(store, "abc")
    assert publisher.step()
    assert station.knows() == set(), "a change alone is of no use to it"
    assert publisher.step()
    assert station.batches[-1].whole
    assert station.knows() == keys_of(store)
    station.directory = Directory()
    assert publisher.step(), "also when nothing has changed"
    assert publisher.step()
    assert station.knows() == keys_of(store)


def test_a_node_that_starts_anew_replaces_what_it_had() -> None:
    old, station = make_store(8), Station()
    put(old, "abc")
    before = make_publisher(old, station)
    before.step()
    put(old, "x")
    before.step()
    new = make_store(8)
    put(new, "q")
    after = make_publisher(new, station, incarnation=b"j")
    after.step()
    assert station.knows() == set(make_keys("q"))
    before.step()  # the predecessor's last words
    put(new, "r")
    after.step()
    assert station.knows() == keys_of(new)


def test_nodes_publish_beside_each_other() -> None:
    station = Station()
    stores = [make_store(8) for _ in range(3)]
    publishers = [make_publisher(store, station, node_id=str(i)) for i, store in enumerate(stores)]
    for round_ in range(10):
        for i, store in enumerate(stores):
            put(store, "ab" + chr(0x391 + (round_ * (i + 1)) % 7))
            publishers[i].step()
    assert station.knows() == set().union(*map(keys_of, stores))
    assert [batch.whole for batch in station.batches] == [True] * 3 + [False] * 27


def test_changes_are_bounded_while_the_controller_is_away() -> None:
    store, station = make_store(4), Station()
    publisher = make_publisher(store, station)
    publisher.step()
    for i in range(500):
        put(store, chr(0x391 + i))
        if i % 10 == 9:
            station.fault = lost_before
            assert not publisher.step()
            assert len(store._table._changes) <= 20
    publisher.step()
    assert station.knows() == keys_of(store)


# The thread


def run_while(publisher: Publisher, body: Callable[[], None]) -> None:
    stop = threading.Event()
    thread = threading.Thread(target=publisher.run, args=(stop,))
    thread.start()
    try:
        body()
    finally:
        stop.set()
        thread.join(20)
    assert not thread.is_alive()


def test_signs_of_life_come_by_themselves_and_changes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishing, "_HEARTBEAT_S", 0.01)
    store, station = make_store(4), Station()
    publisher = make_publisher(store, station)

    def body() -> None:
        poll(lambda: len(station.batches) >= 4, "signs of life")
        monkeypatch.setattr(publishing, "_HEARTBEAT_S", 3600.0)
        put(store, "ab")
        poll(lambda: station.knows() == set(make_keys("ab")), "a change does not wait for a sign of life")
        put(store, "abc")
        poll(lambda: station.knows() == set(make_keys("abc")), "nor does the next")
        monkeypatch.setattr(publishing, "_HEARTBEAT_S", 0.01)
        store.changed.set()

    run_while(publisher, body)


def test_a_controller_that_is_away_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishing, "_RETRY_S", 0.005)
    monkeypatch.setattr(publishing, "_HEARTBEAT_S", 0.005)
    store, station = make_store(4), Station()
    publisher = make_publisher(store, station)
    away, tries = threading.Event(), list[int]()
    away.set()

    def send(batch: LocationBatch) -> PublishReply:
        if away.is_set():
            tries.append(batch.number)
            raise ServiceError("away")
        return station.take(batch)

    publisher._send = send

    def body() -> None:
        put(store, "ab")
        poll(lambda: len(tries) > 5, "it is tried again and again")
        away.clear()
        poll(lambda: station.knows() == set(make_keys("ab")), "and then told all")

    run_while(publisher, body)


def test_no_change_is_lost_whoever_makes_it_and_whatever_gets_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four threads change the store while it is published over a bad line; in the end the directory is right."""
    monkeypatch.setattr(publishing, "_GATHER_S", 0.0)
    monkeypatch.setattr(publishing, "_RETRY_S", 0.0)
    monkeypatch.setattr(publishing, "_HEARTBEAT_S", 0.002)
    store, station = make_store(16), Station()
    publisher = make_publisher(store, station)
    chance, lossy = random.Random(3), threading.Event()
    lossy.set()

    def send(batch: LocationBatch) -> PublishReply:
        if lossy.is_set():
            luck = chance.random()
            if luck < 0.1:
                lost_before(station.take, batch)
            if luck < 0.2:
                lost_after(station.take, batch)
            if luck < 0.23:
                station.directory = Directory()
        return station.take(batch)

    publisher._send = send
    failures: list[BaseException] = []

    def change(number: int) -> None:
        mine = random.Random(number)
        try:
            for i in range(1500):
                prompt = "".join(mine.choices("abcdef", k=3))
                hold = (b"%d" % number, i)
                reserve(store, hold, prompt)
                store.commit(hold)
                if i % 5 == 0:
                    store.drop(make_keys(prompt)[mine.randrange(3)])
        except BaseException as error:
            failures.append(error)
            raise

    def body() -> None:
        threads = [threading.Thread(target=change, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not failures
        lossy.clear()
        poll(lambda: station.knows() == keys_of(store), "the directory is right")

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        run_while(publisher, body)
    finally:
        sys.setswitchinterval(interval)
    assert any(batch.whole for batch in station.batches[1:])
    assert sum(not batch.whole for batch in station.batches) > 20
    assert station.knows() == keys_of(store)
    store.check()
