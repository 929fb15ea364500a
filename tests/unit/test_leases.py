"""Leases end when the last of what stands on the pool is gone, not before, and the node hears of it."""

import gc
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
        steps = cache.session.retrieve(TOKENS, 0, 0, None, torch.float32, None, ())
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


def recorder(sent: list[tuple[str, int]], name: str) -> Callable[[Sequence[int]], None]:
    return lambda ids: sent.extend((name, number) for number in ids)


def test_ids_go_once_to_the_node_of_their_incarnation() -> None:
    releaser, sent = Releaser(), list[tuple[str, int]]()
    releaser.connect(OLD, recorder(sent, "old"))
    releaser.connect(NEW, recorder(sent, "new"))
    for number in range(50):
        releaser.end(OLD if number % 2 else NEW, [number])
    poll(lambda: len(sent) == 50, "the thread has handed all over")
    assert releaser.flush()
    assert sorted(sent) == sorted(("old" if number % 2 else "new", number) for number in range(50))


def test_what_a_request_took_along_is_not_sent_unless_it_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "_FLUSH_PERIOD_S", 3600)
    releaser, sent = Releaser(), list[tuple[str, int]]()
    releaser.connect(OLD, recorder(sent, "old"))
    releaser.connect(NEW, recorder(sent, "new"))
    releaser.end(NEW, [0])
    poll(releaser._ends.empty, "the thread has work")
    poll(lambda: releaser.take(NEW) == (0,), "the thread waits for more, for an hour")
    releaser.end(OLD, [1, 2])
    releaser.end(NEW, [3])
    taken = releaser.take(OLD)
    assert taken == (1, 2)
    assert releaser.take(OLD) == ()
    assert releaser.flush()
    assert sent == [("new", 3)]
    releaser.end(OLD, taken)
    assert releaser.flush()
    assert sent == [("new", 3), ("old", 1), ("old", 2)]


def test_a_node_that_cannot_be_told_is_told_later_and_keeps_no_other_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "_RETRY_PERIOD_S", 0.01)
    releaser, sent, failures = Releaser(), list[tuple[str, int]](), [None] * 5

    def failing(ids: Sequence[int]) -> None:
        if failures:
            failures.pop()
            raise ServiceError("not now")
        recorder(sent, "old")(ids)

    releaser.connect(OLD, failing)
    releaser.connect(NEW, recorder(sent, "new"))
    releaser.end(OLD, [1])
    releaser.end(NEW, [2])
    poll(lambda: len(sent) == 2, "both have been told")
    assert sent == [("new", 2), ("old", 1)]
    assert not failures


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
