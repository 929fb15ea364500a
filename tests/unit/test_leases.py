"""Leases end when the last of what stands on the pool is gone, not before, and the node hears of it."""

import errno
import gc
import os
import random
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from hs_cache import leases
from hs_cache.errors import ServiceError
from hs_cache.leases import ClientProcess, Releaser, this_process
from hs_cache.machine import own_start_time
from hs_cache.messages import PoolAddress
from tests.builders import make_tokens
from tests.direct import DirectCache, DirectPeer, Node, make_rows, poll, run_script

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfd and /proc are Linux")

TOKENS = make_tokens("abc")
OLD, NEW = b"o" * 16, b"n" * 16


def churn(cache: DirectCache) -> None:
    """Store other prompts until every byte that isn't held has been overwritten."""
    for i in range(40):
        cache.put(make_tokens(chr(0x391 + i) + "xy"))


def objects_over(rows: torch.Tensor) -> list[Any]:
    """All sorts of objects that stand on the memory of some rows."""
    array: Any = rows.view(torch.int16).numpy()
    return [rows, rows[2:4], rows.detach(), rows.t(), rows.untyped_storage(), array, array[1:], memoryview(array)]


@pytest.mark.parametrize("seed", range(8))
def test_a_lease_ends_with_the_last_object_over_any_of_its_layers(seed: int) -> None:
    node = Node()
    cache = DirectCache(node)
    cache.put(TOKENS, 0, 1, 2)
    hit = cache.retrieve(TOKENS, [0, 1, 2])
    held = [each for layer in hit for each in objects_over(hit[layer])]
    cache.session.close()
    del hit
    random.Random(seed).shuffle(held)
    while held:
        assert node.num_leases() == 1, f"{len(held)} objects still stand on it"
        held.pop()
    assert node.settled().num_leases == 0


def test_an_array_over_a_part_of_a_result_stays_right_while_writers_churn() -> None:
    node = Node(slots=8)
    cache = DirectCache(node)
    cache.put(TOKENS)
    hit = cache.retrieve(TOKENS)
    array = hit[0][2:4].detach().view(torch.int16).numpy()
    del hit
    churn(cache)
    assert (array == make_rows(TOKENS[2:4]).view(torch.int16).numpy()).all()
    assert node.num_leases() == 1
    del array
    assert node.settled().num_leases == 0


def test_two_results_over_the_same_rows_are_two_leases() -> None:
    node = Node()
    cache = DirectCache(node)
    cache.put(TOKENS)
    first, second = cache.retrieve(TOKENS), cache.retrieve(TOKENS)
    assert node.num_leases() == 2
    del first
    assert node.num_leases() == 1
    assert torch.equal(second[0], make_rows(TOKENS))


def test_what_has_ended_is_handed_over_without_another_request() -> None:
    node = Node()
    cache = DirectCache(node)
    cache.put(TOKENS)
    hit = cache.retrieve(TOKENS)
    assert node.server.store.stats().num_leases == 1
    del hit
    poll(lambda: node.server.store.stats().num_leases == 0, "the thread has told the node")


def test_what_has_ended_travels_with_the_next_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def unsent(self: DirectPeer, method: str, *args: Any) -> None:
        raise ServiceError("can't be sent")

    monkeypatch.setattr(DirectPeer, "post", unsent)
    node = Node(slots=4, max_leased_fraction=1)
    cache = DirectCache(node)
    cache.put(TOKENS)
    hit = cache.retrieve(TOKENS)
    assert cache.put(make_tokens("xyz")).failed == 2, "only one slot isn't held"
    del hit
    poll(lambda: cache.put(make_tokens("uvw")).failed == 0, "room again, since the request itself ends the lease")
    monkeypatch.undo()
    node.settled()


def test_collecting_results_and_operations_inside_our_own_locks_blocks_nobody() -> None:
    node = Node()
    cache = DirectCache(node)
    cache.put(TOKENS)

    def abandoned_halfway() -> Any:
        steps = cache.session.retrieve(TOKENS, 0, 0, None, torch.float32, None, None, (), 0)
        steps.send(cache.result(next(steps)))  # leased, and about to copy
        return steps

    done = threading.Event()
    locks = [this_process().releaser._lock, cache.session._lock, node.server.store._lock]

    def run() -> None:
        for lock in locks:
            garbage: list[Any] = [cache.retrieve(TOKENS), abandoned_halfway()]
            garbage.append(garbage)
            alive = weakref.ref(garbage[0][0])
            with lock:
                del garbage
                gc.collect()
                assert alive() is None, "nothing was collected here"
        done.set()

    threading.Thread(target=run, daemon=True).start()
    assert done.wait(30), "a finalizer waits for a lock that its own thread holds"
    node.settled()


class Client:
    """Keeps whose end it was told of."""

    def __init__(self) -> None:
        self.dropped: list[bytes] = []

    def drop(self, incarnation: bytes) -> None:
        self.dropped.append(incarnation)


def recorder(sent: list[tuple[str, int]], name: str) -> Callable[[Sequence[int]], None]:
    return lambda ids: sent.extend((name, number) for number in ids)


def test_ids_go_once_to_the_node_of_their_incarnation() -> None:
    releaser, sent = Releaser(), list[tuple[str, int]]()
    releaser.connect(OLD, recorder(sent, "old"), living_owner(OLD), Client())
    releaser.connect(NEW, recorder(sent, "new"), living_owner(NEW), Client())
    for number in range(50):
        releaser.end(OLD if number % 2 else NEW, [number])
    poll(lambda: len(sent) == 50, "the thread has handed all over")
    releaser.flush()
    assert sorted(sent) == sorted(("old" if number % 2 else "new", number) for number in range(50))


def test_what_a_request_took_along_is_not_sent_unless_it_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "_FLUSH_PERIOD_S", 3600)
    releaser, sent = Releaser(), list[tuple[str, int]]()
    releaser.connect(OLD, recorder(sent, "old"), living_owner(OLD), Client())
    releaser.connect(NEW, recorder(sent, "new"), living_owner(NEW), Client())
    releaser.end(NEW, [0])
    poll(releaser._ends.empty, "the thread has work")
    poll(lambda: releaser.take(NEW) == (0,), "the thread waits for more, for an hour")
    releaser.end(OLD, [1, 2])
    releaser.end(NEW, [3])
    taken = releaser.take(OLD)
    assert taken == (1, 2)
    assert releaser.take(OLD) == ()
    releaser.flush()
    assert sent == [("new", 3)]
    releaser.end(OLD, taken)
    releaser.flush()
    assert sent == [("new", 3), ("old", 1), ("old", 2)]


def test_an_id_that_is_given_up_goes_at_once_and_with_every_request_until_one_is_answered() -> None:
    releaser, sent = Releaser(), list[str]()

    def lost() -> None:
        raise ServiceError("gone")

    releaser.post(lost, (OLD, 1))
    releaser.post(lambda: sent.append("release"), (OLD, 2))
    releaser.post(lambda: sent.append("drop"))
    assert releaser.take(OLD) == releaser.take(OLD) == (1, 2)
    assert releaser.take(NEW) == ()
    releaser.flush()
    releaser.flush()
    assert sent == ["release", "drop"]
    releaser.end(OLD, releaser.take(OLD))  # that request has failed
    assert releaser.take(OLD) == (1, 2)
    releaser.taken(OLD, (1,))
    assert releaser.take(OLD) == (2,)
    for number in range(2 * leases._MAX_GIVEN_UP):
        releaser.post(lost, (NEW, number))
    assert len(releaser.take(NEW)) == leases._MAX_GIVEN_UP


def test_what_is_posted_is_sent_by_itself_also_where_a_request_has_gathered_it() -> None:
    releaser, sent = Releaser(), list[int]()
    releaser.start()
    releaser.post(lambda: sent.append(1))
    releaser.take(OLD)
    poll(lambda: sent == [1], "it is sent")


def test_a_node_that_cannot_be_told_is_told_later_and_keeps_no_other_waiting() -> None:
    releaser, sent, failures = Releaser(), list[tuple[str, int]](), [None] * 2

    def failing(ids: Sequence[int]) -> None:
        if failures:
            failures.pop()
            raise ServiceError("not now")
        recorder(sent, "old")(ids)

    releaser.connect(OLD, failing, living_owner(OLD), Client())
    releaser.connect(NEW, recorder(sent, "new"), living_owner(NEW), Client())
    releaser.end(OLD, [1])
    releaser.end(NEW, [2])
    poll(lambda: sent == [("new", 2)], "the other one is told")
    for left in (1, 0):
        poll(lambda left=left: len(failures) == left, "it was tried")  # type: ignore[misc]
        releaser.end(OLD, [3 - left])
    poll(lambda: len(sent) == 4, "all are told, with what ends next")
    assert sorted(sent[1:]) == [("old", 1), ("old", 2), ("old", 3)]
    # Or a request to that node takes them along.
    failures.append(None)
    releaser.end(OLD, [4])
    poll(lambda: not failures, "it was tried")
    poll(lambda: releaser.take(OLD) == (4,), "they go with the next request")


class Machine:
    """Which processes run, for the owners' sake; `looks` counts how often it was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.running = {1, 2}
        self.error: OSError | None = None
        self.looks = 0
        monkeypatch.setattr(leases, "_OWNER_PERIOD_S", 0.01)
        monkeypatch.setattr(leases, "_FLUSH_PERIOD_S", 0.0)
        monkeypatch.setattr(leases, "process_alive", self.process_alive)

    def process_alive(self, pid: int, start_time: int) -> bool:
        self.looks += 1
        if self.error is not None:
            raise self.error
        return pid in self.running

    def wait_for_looks(self) -> None:
        """The thread has been through everything that it had to do, several times."""
        enough = self.looks + 6
        poll(lambda: self.looks >= enough, "the thread looks after the owners")


def living_owner(incarnation: bytes) -> PoolAddress:
    start_time = own_start_time()
    assert start_time is not None
    return PoolAddress(os.getpid(), start_time, 0, incarnation, 0)


def owner(pid: int, incarnation: bytes) -> PoolAddress:
    return PoolAddress(pid, 0, 0, incarnation, 0)


def test_a_pool_whose_owner_is_gone_is_let_go_of_without_any_call(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, releaser, sent = Machine(monkeypatch), Releaser(), list[tuple[str, int]]()
    first, second, other = Client(), Client(), Client()
    releaser.connect(OLD, recorder(sent, "old"), owner(1, OLD), first)
    releaser.connect(OLD, recorder(sent, "old"), owner(1, OLD), second)
    releaser.connect(NEW, recorder(sent, "new"), owner(2, NEW), other)
    machine.wait_for_looks()
    assert first.dropped == second.dropped == []
    machine.running.remove(1)
    poll(lambda: first.dropped == second.dropped == [OLD], "every client that had it is told")
    releaser.end(OLD, [1])
    releaser.end(NEW, [2])
    poll(lambda: sent == [("new", 2)], "the owner that is there is told")
    machine.wait_for_looks()
    assert first.dropped == second.dropped == [OLD], "once"
    assert other.dropped == []


def test_clients_that_are_gone_are_not_kept_for_the_end_of_their_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, releaser = Machine(monkeypatch), Releaser()
    stays, goes = Client(), Client()
    alive = weakref.ref(goes)
    for client in (stays, goes):
        releaser.connect(OLD, recorder([], "old"), owner(1, OLD), client)
    machine.wait_for_looks()
    del client, goes
    poll(lambda: alive() is None, "nothing keeps it")
    machine.running.remove(1)
    poll(lambda: stays.dropped == [OLD], "the other one is told")


def test_nothing_is_kept_for_an_owner_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, releaser, old, new = Machine(monkeypatch), Releaser(), Client(), Client()
    tried: list[Sequence[int]] = []

    def failing(ids: Sequence[int]) -> None:
        tried.append(tuple(ids))
        raise ServiceError("the actor is dead")

    releaser.connect(OLD, failing, owner(1, OLD), old)
    releaser.connect(NEW, recorder([], "new"), owner(2, NEW), new)
    releaser.end(OLD, [1])
    poll(lambda: tried == [(1,)], "it was tried")
    machine.wait_for_looks()
    machine.running.remove(1)
    poll(lambda: old.dropped == [OLD], "the owner is missed")
    assert releaser.take(OLD) == (), "what had ended there is forgotten"
    releaser.end(OLD, [2])
    machine.wait_for_looks()
    releaser.flush()
    assert tried == [(1,)], "and whom to tell"
    machine.running.remove(2)
    poll(lambda: new.dropped == [NEW], "the thread looks after the others as before")


def test_an_owner_is_missed_however_many_leases_end(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, releaser, idle = Machine(monkeypatch), Releaser(), Client()
    busy = [True]

    def send(ids: Sequence[int]) -> None:
        if busy:
            releaser.end(NEW, [ids[0] + 1])  # there is always another one

    releaser.connect(OLD, recorder([], "old"), owner(1, OLD), idle)
    releaser.connect(NEW, send, owner(2, NEW), Client())
    machine.running.remove(1)
    releaser.end(NEW, [0])
    try:
        poll(lambda: idle.dropped == [OLD], "the owner is missed")
    finally:
        busy.clear()


def test_an_owner_that_cannot_be_looked_at_is_not_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, releaser, client = Machine(monkeypatch), Releaser(), Client()
    sent: list[tuple[str, int]] = []
    machine.error = OSError(errno.EMFILE, "too many open files")
    releaser.connect(OLD, recorder(sent, "old"), owner(1, OLD), client)
    machine.wait_for_looks()
    releaser.end(OLD, [1])
    poll(lambda: sent == [("old", 1)], "the thread goes on")
    assert client.dropped == []
    machine.running.remove(1)
    machine.error = None
    poll(lambda: client.dropped == [OLD], "the owner is missed")


def test_what_ends_after_its_owner_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, releaser, sent = Machine(monkeypatch), Releaser(), list[tuple[str, int]]()
    client = Client()
    releaser.connect(OLD, recorder(sent, "old"), owner(1, OLD), client)
    releaser.connect(NEW, recorder(sent, "new"), owner(2, NEW), Client())
    machine.running.discard(1)
    poll(lambda: client.dropped == [OLD], "the owner is missed")
    releaser.end(OLD, [1])
    releaser.end(NEW, [2])
    poll(lambda: sent == [("new", 2)], "the thread goes on")
    assert not releaser._ended and OLD not in releaser._senders


def test_a_sender_that_fails_is_not_tried_again_until_more_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, releaser, sent = Machine(monkeypatch), Releaser(), list[tuple[str, int]]()
    tried: list[tuple[int, ...]] = []

    def failing(ids: Sequence[int]) -> None:
        tried.append(tuple(ids))
        raise ServiceError("not in this cluster")

    releaser.connect(OLD, failing, owner(1, OLD), Client())
    releaser.connect(NEW, recorder(sent, "new"), owner(2, NEW), Client())
    releaser.end(OLD, [1])
    poll(lambda: tried == [(1,)], "it was tried")
    machine.wait_for_looks()
    assert tried == [(1,)], "the thread doesn't spin"
    releaser.end(NEW, [7])
    poll(lambda: sent == [("new", 7)], "and has not ended")
    machine.wait_for_looks()
    assert set(tried) == {(1,)}
    assert len(tried) <= 2
    assert releaser.take(OLD) == (1,), "the next request takes them along"
    assert releaser.take(OLD) == ()


def test_ids_are_never_given_twice() -> None:
    process, ids = ClientProcess(), list[int]()
    threads = [threading.Thread(target=lambda: ids.extend(process.next_id() for _ in range(2000))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(set(ids)) == len(ids) == 8000
    assert ClientProcess().client_id != process.client_id


def test_a_forked_child_ends_no_lease_of_its_parent_and_has_an_identity_of_its_own() -> None:
    """The child lets everything go, closes the cache under a lock that was held at the fork, and exits as usual."""
    ended = run_script("""
        import gc, os, sys
        import torch
        from hs_cache.errors import CacheClosedError
        from hs_cache.leases import this_process
        from tests.direct import DirectCache, Node, make_rows
        from tests.builders import make_tokens

        tokens = make_tokens("abc")
        node = Node(slots=8)
        cache = DirectCache(node)
        cache.put(tokens)
        rows, whole = cache.retrieve(tokens)[0][2:4].detach(), cache.retrieve(tokens)
        parent = this_process().client_id
        with cache.session._lock:
            child = os.fork()
            if not child:
                cache.session.close()
        if not child:
            assert this_process().client_id != parent
            for use in (cache.put, cache.retrieve):
                try:
                    use(tokens)
                except CacheClosedError as error:
                    assert "forked child" in str(error), error
                else:
                    raise AssertionError("used in a child")
            del rows, whole
            gc.collect()
            sys.exit(7)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 7, status
        assert node.num_leases() == 2
        for i in range(40):
            cache.put(make_tokens(chr(0x391 + i) + "xy"))
        assert torch.equal(rows, make_rows(tokens)[2:4])
        assert torch.equal(whole[0], make_rows(tokens))
        del rows, whole
        node.settled()
        print("right")
    """)
    assert (ended.stdout, ended.returncode) == ("right\n", 0), ended.stderr
