"""What a client does when things go wrong at any point: nothing leaks, nothing torn is ever seen, the rest goes on."""

import gc
import itertools
import logging
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch

from hs_cache import connection
from hs_cache.errors import HiddenStateCacheError, ServiceError, ServiceTimeoutError
from hs_cache.leases import this_process
from hs_cache.results import PrefixHit, StoreResult
from hs_cache.session import Session
from tests.builders import CHUNK_SIZE, make_tokens
from tests.direct import (
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
    poll,
    refused,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfd and /proc are Linux")

TOKENS = make_tokens("abc")
EVERYWHERE = pytest.mark.parametrize("far", [False, True], ids=["with the pool", "without the pool"])


# A fault at every effect of every operation


def store(cache: DirectCache) -> None:
    cache.put(TOKENS, 0, 1)


def retrieve(cache: DirectCache) -> None:
    hit = cache.retrieve(TOKENS, [0, 1])
    assert not hit or torch.equal(hit[1], make_rows(TOKENS[: hit.num_tokens], 1))


def retrieve_a_copy(cache: DirectCache) -> None:
    hit = cache.retrieve(TOKENS, [0, 1], dtype=torch.float32)
    assert not hit or torch.equal(hit[1], make_rows(TOKENS[: hit.num_tokens], 1).float())


def retrieve_both_ways(cache: DirectCache) -> None:
    hit = cache.retrieve(TOKENS, [0, 1], out={0: torch.empty(12, 8)})
    assert not hit or torch.equal(hit[1], make_rows(TOKENS[: hit.num_tokens], 1))


def restarted(node: Node, perform: Callable[[], Any]) -> Any:
    node.restart()
    return perform()


def restarted_and_lost(node: Node, perform: Callable[[], Any]) -> Any:
    result = perform()
    node.restart()
    return lost_reply(lambda: result)


FAULTS: dict[str, Callable[[Node], Fault]] = {
    "lost call": lambda node: lost_call,
    "lost reply": lambda node: lost_reply,
    "dead actor": lambda node: refused,
    "cancelled before": lambda node: cancelled_before,
    "cancelled after": lambda node: cancelled_after,
    "broken": lambda node: broken,
    "restart before": lambda node: lambda perform: restarted(node, perform),
    "restart after": lambda node: lambda perform: restarted_and_lost(node, perform),
}


@EVERYWHERE
@pytest.mark.parametrize("attached", [True, False], ids=["attached", "not yet attached"])
@pytest.mark.parametrize("operation", [store, retrieve, retrieve_a_copy, retrieve_both_ways])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_at_any_effect_leaks_nothing(
    operation: Callable[[DirectCache], None], fault: str, attached: bool, far: bool
) -> None:
    for number in itertools.count():
        node = Node(slots=16)
        cache = DirectCache(node, far=far)
        cache.put(TOKENS if operation is not store else TOKENS[:4], 0, 1)
        if not attached:
            cache.faults[0] = refused
            cache.retrieve(TOKENS)
        cache.faults[number] = FAULTS[fault](node)
        try:
            operation(cache)
        except (Cancelled, MemoryError):
            assert fault in ("cancelled before", "cancelled after", "broken")
        effects = len(cache.effects)
        stats = node.settled()
        assert stats.resident_bytes in [chunks * 2 * 64 for chunks in (0, 1, 3)], "all of a store, or nothing"
        cache.put(TOKENS, 0, 1)
        hit = cache.retrieve(TOKENS, [0, 1])
        for layer in (0, 1):
            assert torch.equal(hit[layer], make_rows(TOKENS, layer))
        del hit
        node.settled()
        if effects <= number:  # the operation was over before the fault
            assert effects == number > 0
            break


@EVERYWHERE
@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("fault", [lost_call, lost_reply, refused])
def test_an_error_that_was_raised_keeps_nothing_once_its_caller_has_let_go_of_it(
    fault: Fault, number: int, far: bool
) -> None:
    cache = DirectCache(Node(), far=far, strict=True)

    def put(rows: torch.Tensor) -> None:
        cache.store(TOKENS, {0: rows})

    def get(rows: torch.Tensor) -> None:
        cache.retrieve(TOKENS, out={0: rows})

    gc.collect()
    gc.disable()  # there must be nothing for it to find
    try:
        for operation in (put, get):
            rows = torch.zeros(12, 8)
            kept = weakref.ref(rows)
            cache.faults[number] = fault
            with suppress(ServiceError):
                operation(rows)
            cache.faults.clear()
            del rows
            assert kept() is None, operation
    finally:
        gc.enable()


@EVERYWHERE
@pytest.mark.parametrize("operation", [store, retrieve, retrieve_a_copy])
def test_calls_that_arrive_after_they_were_given_up_leave_nothing(
    operation: Callable[[DirectCache], None], far: bool
) -> None:
    """A threaded actor may carry out a call after the release that followed it."""
    node = Node(slots=16)
    cache = DirectCache(node, far=far)
    if operation is not store:
        store(cache)
    operation(cache)
    for number, effect in enumerate(cache.effects):
        if effect in ("Work", "Fetch"):
            continue
        late: list[Callable[[], Any]] = []

        def delayed(perform: Callable[[], Any], late: list[Callable[[], Any]] = late) -> Any:
            late.append(perform)
            raise ServiceTimeoutError("still on the way")

        if operation is store:
            for key in cache.session.chunk_keys(TOKENS, ()):
                node.server.drop_key(key)
        cache.faults[number] = delayed
        operation(cache)
        this_process().releaser.flush()
        (arrives,) = late
        try:
            arrives()
        except HiddenStateCacheError as refusal:
            assert effect in ("commit", "store_rows"), refusal
        node.settled()


def test_an_operation_that_nobody_drives_to_its_end_holds_nothing() -> None:
    node = Node()
    cache = DirectCache(node)
    store(cache)
    before = node.settled()
    for effects in range(3):
        for steps in (
            cache.session.store(make_tokens("xyz"), {0: make_rows(TOKENS)}, 0, ()),
            cache.session.retrieve(TOKENS, 0, 0, None, torch.float32, None, None, (), 0),
        ):
            try:
                effect = next(steps)
                for _ in range(effects):
                    effect = steps.send(cache.result(effect))
            except StopIteration:
                continue
            assert effects == 0 or node.server.store.stats() != before
            del steps, effect
        assert node.settled() == before


@EVERYWHERE
def test_a_thousand_retrieves_that_time_out_leave_the_pool_at_its_base_line(far: bool) -> None:
    node = Node()
    cache = DirectCache(node, far=far)
    store(cache)
    before = node.settled()
    for i in range(1000):
        cache.faults[0] = (lost_call, lost_reply)[i % 2]
        assert not cache.retrieve(TOKENS)
    assert node.settled() == before
    assert cache.run(cache.session.stats()).timeouts_total == 1000
    assert torch.equal(cache.retrieve(TOKENS)[0], make_rows(TOKENS))


def test_a_chunk_dropped_while_its_prefix_is_being_stored_fails_and_is_stored_next_time() -> None:
    node = Node()
    cache = DirectCache(node)
    cache.put(TOKENS[:8], 0)
    keys = list(cache.session.chunk_keys(TOKENS, ()))

    def dropped(perform: Callable[[], Any]) -> Any:
        assert node.server.drop_key(keys[1])
        return perform()

    cache.faults[1] = dropped
    assert cache.put(TOKENS, 0, 1) == StoreResult(stored=2, failed=1, prefix_tokens=4)
    node.settled()
    assert cache.put(TOKENS, 0, 1) == StoreResult(stored=1, present=2, prefix_tokens=12)
    assert torch.equal(cache.retrieve(TOKENS, [0, 1])[0], make_rows(TOKENS))


def test_copying_that_runs_on_while_its_operation_is_cancelled_keeps_its_memory() -> None:
    """As in asyncio: the copy is on a thread, and the coroutine that awaits it is cancelled."""
    node = Node()
    cache = DirectCache(node)
    store(cache)
    started, go_on = threading.Event(), threading.Event()

    def cancelled_meanwhile(perform: Callable[[], Any]) -> Any:
        threads.append(threading.Thread(target=perform))
        threads[-1].start()
        assert started.wait(20)
        raise Cancelled

    class Slow(torch.Tensor):
        """Rows that take their time."""

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.Tensor.copy_:
                started.set()
                assert go_on.wait(20)
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]

    threads: list[threading.Thread] = []
    for operate, state in (
        (lambda: cache.store(make_tokens("xyz"), {0: make_rows(TOKENS).as_subclass(Slow)}), "num_reservations"),
        (lambda: cache.retrieve(TOKENS, out={0: torch.empty(12, 8).as_subclass(Slow)}), "num_leases"),
    ):
        started.clear()
        go_on.clear()
        cache.faults[1] = cancelled_meanwhile
        with pytest.raises(Cancelled):
            operate()
        this_process().releaser.flush()
        assert getattr(node.server.store.stats(), state) == 1, "the copy still runs"
        go_on.set()
        threads[-1].join(20)
        node.settled()


# Restarts and outages


def test_a_client_finds_the_next_incarnation_and_lets_go_of_the_last() -> None:
    node = Node()
    cache = DirectCache(node)
    cache.put(TOKENS)
    hit = cache.retrieve(TOKENS)
    node.restart()
    miss = cache.retrieve(TOKENS)
    assert (bool(miss), miss.ended_by) == (False, "hidden_state")
    assert cache.effects == ["lease", "Locate", "attach", "lease"]
    cache.put(TOKENS)
    assert torch.equal(cache.retrieve(TOKENS)[0], make_rows(TOKENS))
    assert torch.equal(hit[0], make_rows(TOKENS)), "rows over the last incarnation stay"
    del hit
    node.settled()
    poll(lambda: node.num_mappings() == 2, "the new pool's owner and its client")


def restarting(node: Node) -> Callable[[Callable[[], Any]], Any]:
    def fault(perform: Callable[[], Any]) -> Any:
        node.restart()
        return perform()

    return fault


@pytest.mark.parametrize("strict", [False, True])
def test_a_node_that_keeps_being_restarted_counts_as_unreachable(strict: bool) -> None:
    node = Node()
    cache = DirectCache(node, strict=strict)
    cache.faults = dict.fromkeys((0, 3), restarting(node))  # both times at the lease
    if strict:
        with pytest.raises(ServiceError, match="refuses what it has just granted"):
            cache.retrieve(TOKENS)
    else:
        assert cache.retrieve(TOKENS).ended_by == "unreachable"
    assert cache.effects[:4] == ["lease", "Locate", "attach", "lease"]
    assert cache.run(cache.session.stats()).unreachable_total == 1


def test_a_client_that_counted_as_gone_attaches_again() -> None:
    node = Node()
    cache = DirectCache(node)
    cache.put(TOKENS)
    node.server._clients.clear()
    assert cache.retrieve(TOKENS).num_tokens == 12
    assert cache.effects == ["lease", "Locate", "attach", "lease"]


def test_a_service_that_came_back_with_another_chunk_size_counts_as_empty(caplog: pytest.LogCaptureFixture) -> None:
    node = Node()
    cache, strict = DirectCache(node), DirectCache(node, strict=True)
    cache.put(TOKENS)
    node.config = node.config.model_copy(update={"chunk_size": 8})
    node.restart()
    node.controller.restart()
    DirectCache(node).put(TOKENS)
    node.controller.hear_all()
    for _ in range(2):
        assert cache.put(TOKENS).failed == 3
        assert not cache.retrieve(TOKENS)
        assert not cache.plan(TOKENS)
        assert set(cache.explain(TOKENS)) == {"unreachable"}
        assert cache.locate(TOKENS) == {}
        with pytest.raises(ServiceError, match="chunk_size: the service, which was started anew, has 8, this client"):
            strict.retrieve(TOKENS)
    assert len([record for record in caplog.records if "connect again" in record.getMessage()]) == 1
    node.settled()


@EVERYWHERE
def test_an_outage_is_a_miss_that_is_logged_once_and_counted(far: bool, caplog: pytest.LogCaptureFixture) -> None:
    node = Node()
    cache = DirectCache(node, far=far)
    cache.put(TOKENS)
    for outage in (1, 2):
        node.unreachable = True
        for _ in range(2):
            assert cache.put(make_tokens("xyz")) == StoreResult(failed=3)
            miss = cache.retrieve(TOKENS, start=2)
            assert (bool(miss), miss.num_tokens, miss.start, miss.ended_by) == (False, 0, 2, "unreachable")
            assert not cache.report("report_evicted", TOKENS)
            assert cache.run(cache.session.call("num_cached_chunks", otherwise=0)) == 0
            assert cache.run(cache.session.stats()).node is None
        node.unreachable = False
        assert torch.equal(cache.retrieve(TOKENS)[0], make_rows(TOKENS))
        warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        about = [line for line in warnings if line.startswith("hs_cache: the cache can")]
        assert len(about) == 2 * outage, "one when it begins and one when it is over"
        assert warnings == about
    stats = cache.run(cache.session.stats())
    assert (stats.unreachable_total, stats.timeouts_total) == (20, 0)
    assert (stats.failed_chunks_total, stats.stored_chunks_total) == (12, 3)


def test_strict_clients_hear_of_trouble() -> None:
    node = Node()
    cache = DirectCache(node, strict=True)
    node.unreachable = True
    for use in (
        lambda: cache.put(TOKENS),
        lambda: cache.retrieve(TOKENS),
        lambda: cache.report("report_evicted", TOKENS),
        lambda: cache.run(cache.session.call("num_cached_chunks", otherwise=0)),
        lambda: cache.run(cache.session.stats()),
    ):
        with pytest.raises(ServiceError, match="can't be reached"):
            use()
    node.unreachable = False
    assert cache.put(TOKENS).stored == 3


def test_a_timeout_keeps_the_attachment_and_a_dead_actor_does_not() -> None:
    cache = DirectCache(Node())
    cache.faults[0] = lost_call
    cache.retrieve(TOKENS)
    cache.retrieve(TOKENS)
    assert cache.effects == ["lease"]
    cache.faults[0] = refused
    cache.retrieve(TOKENS)
    cache.retrieve(TOKENS)
    assert cache.effects == ["Locate", "attach", "lease"]
    stats = cache.run(cache.session.stats())
    assert (stats.timeouts_total, stats.unreachable_total) == (1, 1)


def test_attaching_raises_also_when_not_strict(clock: Clock) -> None:
    node = Node()
    node.unreachable = True
    with pytest.raises(ServiceError, match="can't be reached"):
        DirectCache(node, clock=clock)


# Threads


def run_threads(*targets: Callable[[], None]) -> None:
    errors: list[BaseException] = []

    def guarded(target: Callable[[], None]) -> None:
        try:
            target()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(target,)) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not errors, errors


def test_ragged_prompts_stored_at_once_stay_apart() -> None:
    node = Node(slots=256)

    def one_prompt(number: int) -> Callable[[], None]:
        cache, tokens = DirectCache(node, far=number % 4 == 3), [number * 1000 + i for i in range(17 + 5 * number)]

        def run() -> None:
            for end in [*range(1, len(tokens), 3), len(tokens)]:
                cache.put(tokens[:end])
                hit = cache.retrieve(tokens[:end])
                assert hit.num_tokens == end - end % CHUNK_SIZE
                assert not hit or torch.equal(hit[0], make_rows(tokens[: hit.num_tokens]))

        return run

    run_threads(*(one_prompt(number) for number in range(8)))
    assert node.settled().num_chunks == sum((17 + 5 * number) // CHUNK_SIZE for number in range(8))


def test_restarts_and_closes_under_load_give_whole_rows_or_none() -> None:
    node = Node(slots=12)
    caches = [DirectCache(node, far=far) for far in (False, False, False, True)]
    stop = threading.Event()

    def load(cache: DirectCache, number: int) -> Callable[[], None]:
        def run() -> None:
            kept: list[tuple[PrefixHit, list[int]]] = []
            for i in range(120):
                tokens = make_tokens("abcdefgh"[(number + i) % 3 :][:4])
                cache.put(tokens)
                hit = cache.retrieve(tokens)
                if hit:
                    assert torch.equal(hit[0], make_rows(tokens[: hit.num_tokens]))
                    kept = [*kept[-2:], (hit, tokens)]
                for old, of in kept:
                    assert torch.equal(old[0], make_rows(of[: old.num_tokens]))

        return run

    def restarts() -> None:
        while not stop.wait(0.01):
            node.restart()

    def all_load() -> None:
        try:
            run_threads(*(load(cache, number) for number, cache in enumerate(caches)))
        finally:
            stop.set()

    run_threads(restarts, all_load)
    node.settled()
    poll(lambda: gc.collect() >= 0 and node.num_mappings() <= 4, "nothing holds an old incarnation")


# Connecting while the node's actor is away


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in ("attachment", "effects", "connection"):
        monkeypatch.setattr(f"hs_cache.{module}.time", clock)
    return clock


@EVERYWHERE
@pytest.mark.parametrize("strict", [False, True])
def test_an_actor_that_is_being_restarted_is_waited_for(
    far: bool, strict: bool, caplog: pytest.LogCaptureFixture, clock: Clock
) -> None:
    cache = DirectCache(Node(), far=far, clock=clock)
    cache.session = Session({}, strict=strict)
    cache.faults = dict.fromkeys((1, 4, 7), refused)  # the calls of `attach`, each behind a look-up and before a pause
    with caplog.at_level(logging.WARNING, logger="hs_cache"):
        cache.run(cache.session.attach())
    assert cache.effects == [*["Locate", "attach", "Pause"] * 3, "Locate", "attach", "Find", "revisions"]
    assert cache.put(TOKENS).stored == 3
    assert [record.message for record in caplog.records if "is waited for" in record.message] == [
        "hs_cache: the node doesn't answer, and is waited for, up to 30 s: the actor is dead"
    ]


def test_an_actor_that_stays_away_is_waited_for_within_bounds(clock: Clock) -> None:
    cache = DirectCache(Node(), clock=clock)
    cache.session = Session({}, strict=False)
    cache.node.unreachable = True
    begin = clock.monotonic()
    with pytest.raises(ServiceError, match="can't be reached"):
        cache.run(cache.session.attach())
    assert 0.9 * connection._RESTART_S < clock.monotonic() - begin < 1.1 * connection._RESTART_S


def test_an_actor_that_hangs_is_not_called_again_and_again(clock: Clock) -> None:
    cache = DirectCache(Node(), clock=clock)
    cache.session = Session({}, strict=False)
    cache.faults = dict.fromkeys(range(1, 40), lost_call)
    with pytest.raises(ServiceTimeoutError):
        cache.run(cache.session.attach())
    assert cache.effects == ["Locate", "attach"]
