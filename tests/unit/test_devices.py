"""Rows on a device, which here is a thread that copies when it is told to: what waits for what, and what leaks."""

import asyncio
import gc
import logging
import pickle
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from functools import partial
from typing import Any, cast

import pytest
import torch

from hs_cache import devices, pinning, shared_pool
from hs_cache.background import Background
from hs_cache.client import AsyncHiddenStateCache, HiddenStateCache
from hs_cache.devices import LANES, Flight, Moment, check_device, lane_of
from hs_cache.errors import CacheClosedError, InvalidInputError
from hs_cache.pool_file import HEADER_BYTES
from hs_cache.retrieval import check_ask
from tests.builders import CHUNK_SIZE, SLOT_BYTES, make_tokens
from tests.direct import (
    Cancelled,
    Controller,
    DirectCache,
    Node,
    broken,
    cancelled_after,
    cancelled_before,
    lost_call,
    lost_reply,
    make_rows,
    poll,
    run_script,
)
from tests.lanes import DeferredLane, Stream

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfd and /proc are Linux")

TOKENS = make_tokens("abc")
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.fixture
def lane(monkeypatch: pytest.MonkeyPatch) -> Iterator[DeferredLane]:
    """Every tensor is on the device."""
    lane = DeferredLane()
    monkeypatch.setitem(LANES, "cpu", lambda device: lane)
    yield lane
    lane.end()


class Calling:
    """A call on a thread of its own."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._result: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._call()
        except BaseException as error:
            self._error = error

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def result(self) -> Any:
        self._thread.join(60)
        assert not self._thread.is_alive()
        if self._error is not None:
            raise self._error
        return self._result


def client_of(node: Node) -> HiddenStateCache:
    """A blocking client as users have it, with plain calls instead of Ray's."""
    direct = DirectCache(node)
    return HiddenStateCache(cast(Any, direct), direct.session)


def async_client_of(node: Node) -> AsyncHiddenStateCache:
    direct = DirectCache(node)
    return AsyncHiddenStateCache(cast(Any, direct), direct.session)


def churn(node: Node) -> None:
    """Write every byte of the pool that is free, or may be, from the CPU."""
    lane = LANES.pop("cpu")
    cache = DirectCache(node)
    for letter in "mnopqrst":
        assert cache.put(make_tokens(letter * 10)).stored
    LANES["cpu"] = lane


def background_threads() -> int:
    return sum(thread.name == "hs_cache-background" for thread in threading.enumerate())


# Where rows may be wanted.


@pytest.mark.parametrize("device", ["meta", "mps", torch.device("xpu:0"), "cuda", "cuda:7", "nonsense", 1.5, object()])
def test_a_device_without_a_lane_is_refused_by_name(device: Any) -> None:
    node = Node()
    cache = DirectCache(node)
    cache.put(TOKENS)
    before = list(node.calls)
    with pytest.raises(InvalidInputError, match=r"^device: got "):
        cache.retrieve(TOKENS, device=device)
    assert node.calls == before


@pytest.mark.parametrize("device", [None, "cpu", torch.device("cpu"), "cpu:0"])
def test_the_cpu_is_no_device(device: Any) -> None:
    node = Node()
    cache = DirectCache(node)
    cache.put(TOKENS)
    assert check_device(device) is None
    hit = cache.retrieve(TOKENS, device=device)
    assert torch.equal(hit[0], make_rows(TOKENS))
    assert node.num_leases() == 1, "a view of the pool"
    out = torch.empty(len(TOKENS), 8, dtype=torch.bfloat16)
    assert cache.retrieve(TOKENS, device=device, out={0: out})[0].data_ptr() == out.data_ptr()
    assert torch.equal(out, make_rows(TOKENS))


def test_a_buffer_elsewhere_than_device_says_is_refused(lane: DeferredLane) -> None:
    node = Node()
    cache = DirectCache(node)
    keys = cache.session.chunk_keys(TOKENS, ())
    out = {0: torch.empty(len(TOKENS), 8)}
    with pytest.raises(
        InvalidInputError, match=r"out: got a buffer on cpu for layer 0, expected one on cpu:0 as device"
    ):
        check_ask(keys, len(TOKENS), 0, 0, None, device="cpu:0", out=out)


def test_devices_without_a_lane_have_no_moment() -> None:
    assert lane_of(torch.device("cpu")) is None
    assert not Moment([torch.device("cpu"), torch.device("meta")])


# Into the pool.


def test_a_store_is_committed_after_its_last_byte(lane: DeferredLane) -> None:
    node = Node()
    cache = DirectCache(node)
    lane.side.close()
    storing = Calling(lambda: cache.put(TOKENS, 0, 1))
    poll(lambda: "reserve" in node.calls, "room was reserved")
    assert DirectCache(node).retrieve(TOKENS, [0, 1]).num_tokens == 0
    assert storing.running
    assert "commit" not in node.calls
    lane.side.open()
    assert storing.result().stored == 3
    assert node.calls.count("commit") == 1
    lane.stream.open()
    hit = DirectCache(node).retrieve(TOKENS, [0, 1])
    assert torch.equal(hit[1], make_rows(TOKENS, 1))


def test_rows_are_those_behind_what_the_stream_had_at_the_call(lane: DeferredLane) -> None:
    node = Node()
    cache = DirectCache(node)
    rows, kernel = torch.zeros(len(TOKENS), 8, dtype=torch.bfloat16), make_rows(TOKENS)
    lane.stream.close()
    lane.stream.give(lambda: cast(None, rows.copy_(kernel)))
    storing = Calling(lambda: cache.store(TOKENS, {0: rows}))
    poll(lambda: "reserve" in node.calls, "room was reserved")
    lane.stream.open()
    assert storing.result().stored == 3
    assert torch.equal(DirectCache(node).retrieve(TOKENS)[0], kernel)


@pytest.mark.parametrize("tokens", [TOKENS[:2], TOKENS[:6]], ids=["less than a chunk", "more than a chunk"])
def test_rows_that_wait_for_their_chunk_are_those_behind_the_stream_too(lane: DeferredLane, tokens: list[int]) -> None:
    node = Node()
    cache = DirectCache(node)
    rows, kernel = torch.zeros(len(tokens), 8, dtype=torch.bfloat16), make_rows(tokens)
    lane.stream.close()
    lane.stream.give(lambda: cast(None, rows.copy_(kernel)))
    storing = Calling(lambda: cache.store(tokens, {0: rows}))
    poll(lambda: cache.effects == ["Work"], "the rows are to be copied")
    assert storing.running
    lane.stream.open()
    storing.result()
    rest = make_rows(TOKENS)[len(tokens) :]
    cache.store(TOKENS, {0: rest}, token_offset=len(tokens))
    assert torch.equal(cache.retrieve(TOKENS)[0], make_rows(TOKENS))


def test_a_writer_takes_rows_behind_the_stream(lane: DeferredLane) -> None:
    node = Node()
    cache = DirectCache(node)
    request = cache.session.open_request("r", ())
    for first in range(0, len(TOKENS), 3):
        tokens = TOKENS[first : first + 3]
        rows = torch.zeros(len(tokens), 8, dtype=torch.bfloat16)
        lane.stream.close()
        lane.stream.give(partial(_fill, rows, make_rows(tokens)))
        appending = Calling(partial(cache.run, cache.session.append(request, tokens, {0: rows})))
        lane.stream.open()
        appending.result()
    assert torch.equal(cache.retrieve(TOKENS)[0], make_rows(TOKENS))


def _fill(target: torch.Tensor, rows: torch.Tensor) -> None:
    target.copy_(rows)


def test_a_copy_that_fails_gives_its_room_back(lane: DeferredLane) -> None:
    node = Node(slots=4)
    cache = DirectCache(node)
    lane.fail = RuntimeError("an illegal memory access was encountered")
    with pytest.raises(RuntimeError, match="illegal memory access"):
        cache.put(TOKENS)
    assert "commit" not in node.calls
    assert node.settled().resident_bytes == 0
    assert not cache.retrieve(TOKENS)
    assert cache.put(TOKENS).stored == 3
    assert torch.equal(cache.retrieve(TOKENS)[0], make_rows(TOKENS))


@pytest.mark.parametrize("fault", [cancelled_before, cancelled_after, broken, lost_call, lost_reply])
@pytest.mark.parametrize("at", range(3))
def test_a_store_from_a_device_that_ends_early_leaks_nothing(lane: DeferredLane, fault: Any, at: int) -> None:
    node = Node()
    cache = DirectCache(node)
    cache.faults = {at: fault}
    with suppress(Cancelled, MemoryError, TimeoutError):
        cache.put(TOKENS)
    stats = node.settled()
    assert stats.resident_bytes in (0, 3 * SLOT_BYTES)
    hit = cache.retrieve(TOKENS)
    assert not hit or torch.equal(hit[0], make_rows(TOKENS))


def test_every_copy_has_ended_before_a_flight_raises() -> None:
    first, second = Stream(), Stream()
    second.close()
    flight = Flight()
    flight.add(first.give(lambda: _raise(RuntimeError("first"))))
    flight.add(second.give(lambda: None))
    waiting = Calling(flight.wait)
    poll(first.give(lambda: None).ended, "the first has failed")
    assert waiting.running
    assert not flight.ended()
    second.open()
    with pytest.raises(RuntimeError, match="first"):
        waiting.result()
    assert flight.ended()
    first.end()
    second.end()


def _raise(error: BaseException) -> None:
    raise error


def test_an_interrupt_waits_for_the_copy() -> None:
    stream = Stream()
    stream.close()
    done = stream.give(lambda: None)

    class Interrupted:
        interrupts = 2

        def ended(self) -> bool:
            return done.ended()

        def wait(self) -> None:
            if self.interrupts:
                self.interrupts -= 1
                raise KeyboardInterrupt
            stream.open()
            done.wait()

    flight = Flight()
    flight.add(Interrupted())
    with pytest.raises(KeyboardInterrupt):
        flight.wait()
    assert done.ended()
    stream.end()


# Out of the pool.


def test_a_lease_ends_with_the_copy_and_not_before(lane: DeferredLane) -> None:
    node = Node()
    cache = DirectCache(node)
    cache.put(TOKENS)
    lane.stream.close()
    hit = cache.retrieve(TOKENS, device="cpu")
    assert hit.num_tokens == len(TOKENS)
    assert (hit[0] == 99).all(), "the caller has the rows, which are not there yet"
    assert node.num_leases() == 1
    churn(node)
    assert node.num_leases() == 1
    cache.session.close()
    del cache
    gc.collect()
    assert node.num_leases() == 1
    lane.stream.open()
    poll(lambda: node.server.store.stats().num_leases == 0, "the releaser's thread ends the lease by itself")
    assert torch.equal(hit[0], make_rows(TOKENS))
    assert node.settled().num_leases == 0


def test_rows_dropped_unread_are_leased_until_their_copy_has_ended(lane: DeferredLane) -> None:
    node = Node()
    cache = DirectCache(node)
    cache.put(TOKENS)
    lane.stream.close()
    for _ in range(50):
        cache.retrieve(TOKENS, device="cpu")
    gc.collect()
    assert node.num_leases() == 50
    lane.stream.open()
    assert node.settled().num_leases == 0


def test_a_copy_out_that_fails_ends_its_lease(lane: DeferredLane) -> None:
    node = Node()
    cache = DirectCache(node)
    cache.put(TOKENS)
    lane.fail = RuntimeError("an illegal memory access was encountered")
    assert cache.retrieve(TOKENS, device="cpu").num_tokens == len(TOKENS)
    assert node.settled().num_leases == 0


@pytest.mark.parametrize("fault", [cancelled_before, cancelled_after, broken, lost_call, lost_reply])
@pytest.mark.parametrize("at", range(2))
def test_a_retrieve_to_a_device_that_ends_early_leaks_nothing(lane: DeferredLane, fault: Any, at: int) -> None:
    node = Node()
    cache = DirectCache(node)
    cache.put(TOKENS)
    lane.stream.close()
    cache.faults = {at: fault}
    with suppress(Cancelled, MemoryError, TimeoutError):
        cache.retrieve(TOKENS, device="cpu")
    if at == 1 and fault in (cancelled_after, broken, lost_reply):
        assert node.num_leases() == 1, "the copy was begun"
    lane.stream.open()
    assert node.settled().num_leases == 0


def test_a_lease_ends_with_the_last_of_its_mappings_and_copies(lane: DeferredLane) -> None:
    node = Node()
    cache = DirectCache(node)
    cache.put(TOKENS, 0, 1)
    lane.stream.close()
    out = torch.empty(len(TOKENS), 8, dtype=torch.bfloat16)
    hit = cache.retrieve(TOKENS, [0, 1], out={0: out})  # layer 1 is a view of the pool
    kept = hit[1]
    lane.stream.open()
    poll(lambda: torch.equal(out, make_rows(TOKENS)), "the copy has ended")
    assert node.num_leases() == 1
    assert torch.equal(kept, make_rows(TOKENS, 1))
    lane.stream.close()
    again = cache.retrieve(TOKENS, [0, 1], out={0: out})
    del hit, kept, again
    gc.collect()
    poll(lambda: node.num_leases() == 1, "the first has ended, and the copy of the second has not")
    lane.stream.open()
    assert node.settled().num_leases == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_goes_there_and_back(lane: DeferredLane, dtype: torch.dtype) -> None:
    node = Node(slots=512)
    cache = DirectCache(node)
    rows = make_rows(TOKENS).to(dtype)
    cache.store(TOKENS, {0: rows})
    hit = cache.retrieve(TOKENS, device="cpu")
    lane.mark().wait()
    assert hit[0].dtype == dtype
    assert torch.equal(hit[0].view(torch.uint8), rows.view(torch.uint8))


def test_rows_are_converted_and_spread_on_the_device(lane: DeferredLane) -> None:
    node = Node()
    cache = DirectCache(node)
    cache.store(TOKENS, {0: make_rows(TOKENS).t().contiguous().t()})  # by columns
    buffer = torch.zeros(len(TOKENS) + 2, 16, dtype=torch.float32)
    with torch.inference_mode():
        inference = torch.zeros(len(TOKENS), 8)
    hits = [
        cache.retrieve(TOKENS, device="cpu", dtype=torch.float32),
        cache.retrieve(TOKENS, out={0: buffer[:, ::2]}),
        cache.retrieve(TOKENS, device="cpu", out={0: inference}),
        cache.retrieve(TOKENS, device="cpu", start=3, stop=9),
    ]
    lane.mark().wait()
    for hit in hits[:3]:
        assert torch.equal(hit[0], make_rows(TOKENS).float())
    assert torch.equal(hits[3][0], make_rows(TOKENS)[3:9])
    assert (buffer[:, 1::2] == 0).all()
    assert (buffer[len(TOKENS) :] == 0).all()
    assert hits[1][0].data_ptr() == buffer.data_ptr()
    assert node.settled().num_leases == 0


def test_rows_of_another_node_are_there_at_once(lane: DeferredLane) -> None:
    controller = Controller()
    here, there = Node(controller=controller), Node(controller=controller)
    writer = DirectCache(there)
    writer.put(TOKENS)
    DirectCache(here).put(TOKENS[:CHUNK_SIZE])
    controller.hear_all()
    cache = DirectCache(here)
    hit = cache.retrieve(TOKENS, device="cpu")
    assert torch.equal(hit[0][CHUNK_SIZE:], make_rows(TOKENS)[CHUNK_SIZE:])
    lane.mark().wait()
    assert torch.equal(hit[0], make_rows(TOKENS)), "its own node's rows come in the stream's order"
    far = DirectCache(there, far=True)
    assert torch.equal(far.retrieve(TOKENS, device="cpu")[0], make_rows(TOKENS))
    assert far.put(make_tokens("xy")).stored == 2
    assert here.settled().num_leases == there.settled().num_leases == 0


def test_rows_of_another_node_come_into_a_buffer_behind_the_stream(lane: DeferredLane) -> None:
    node = Node()
    cache = DirectCache(node, far=True)
    cache.put(TOKENS)
    out = torch.zeros(len(TOKENS), 8, dtype=torch.bfloat16)
    lane.stream.close()
    lane.stream.give(partial(_fill, out, make_rows(TOKENS, variant=1)))
    retrieving = Calling(lambda: cache.retrieve(TOKENS, device="cpu", out={0: out}))
    poll(lambda: cache.effects[-1:] == ["Work"], "the rows have come")
    lane.stream.open()
    assert retrieving.result().num_tokens == len(TOKENS)
    lane.mark().wait()
    assert torch.equal(out, make_rows(TOKENS))


def test_a_far_client_sends_rows_behind_the_stream(lane: DeferredLane) -> None:
    node = Node()
    cache = DirectCache(node, far=True)
    rows = torch.zeros(len(TOKENS), 8, dtype=torch.bfloat16)
    lane.stream.close()
    lane.stream.give(partial(_fill, rows, make_rows(TOKENS)))
    storing = Calling(lambda: cache.store(TOKENS, {0: rows}))
    poll(lambda: cache.effects[-1:] == ["Work"], "the rows are to be gathered")
    lane.stream.open()
    assert storing.result().stored == 3
    assert torch.equal(cache.retrieve(TOKENS)[0], make_rows(TOKENS))


# Page-locking the client's own mapping.


class Driver:
    def __init__(self, *, largest: int = 1 << 60) -> None:
        self.largest = largest
        self.registered: dict[int, int] = {}
        self.calls = 0

    def register(self, address: int, nbytes: int) -> int:
        self.calls += 1
        if nbytes > self.largest:
            return 2
        self.registered[address] = nbytes
        return 0

    def unregister(self, address: int) -> int:
        del self.registered[address]
        return 0

    def use(self, monkeypatch: pytest.MonkeyPatch) -> "Driver":
        monkeypatch.setattr(shared_pool, "cuda_host_register", lambda: (self.register, self.unregister))
        return self


def test_a_mapping_is_page_locked_once_and_until_it_is_unmapped(
    lane: DeferredLane, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, lane.pins = Driver().use(monkeypatch), True
    node = Node()
    cache = DirectCache(node)
    assert driver.calls == 0
    cache.put(TOKENS)
    cache.retrieve(TOKENS, device="cpu")
    assert driver.calls == 1
    assert list(driver.registered.values()) == [HEADER_BYTES + node.pool.data_bytes]
    lane.mark().wait()
    node.settled()
    lane.stream.close()
    hit = cache.retrieve(TOKENS, device="cpu")
    cache.session.close()
    del cache
    gc.collect()
    assert driver.registered, "a copy from it is under way"
    lane.stream.open()
    node.settled()
    poll(lambda: not driver.registered, "the mapping ends with the copy")
    assert torch.equal(hit[0], make_rows(TOKENS))


def test_no_copy_crosses_a_border_of_what_was_page_locked_in_pieces(
    lane: DeferredLane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinning, "_PIECE_BYTES", 4096)
    driver, lane.pins = Driver(largest=4096).use(monkeypatch), True
    node = Node(slots=512)
    cache = DirectCache(node)
    tokens = make_tokens("a" * 60)
    rows = make_rows(tokens, hidden_dim=40)  # in one piece, and a border lies inside a row
    cache.store(tokens, {0: rows})
    hit = cache.retrieve(tokens, device="cpu")
    lane.mark().wait()
    assert torch.equal(hit[0], rows)
    assert len(driver.registered) > 1
    assert len(lane.copied) > 2
    for address, nbytes in lane.copied:
        first = max(start for start in driver.registered if start <= address)
        assert address + nbytes <= first + driver.registered[first]


@pytest.mark.parametrize("raises", [False, True])
def test_what_cannot_be_page_locked_is_one_warning(
    lane: DeferredLane, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, raises: bool
) -> None:
    driver, lane.pins = Driver(largest=0).use(monkeypatch), True
    if raises:
        monkeypatch.setattr(driver, "register", lambda address, nbytes: _raise(RuntimeError("CUDA error: unknown")))
        driver.use(monkeypatch)
    cache = DirectCache(Node())
    with caplog.at_level(logging.WARNING):
        cache.put(TOKENS)
        cache.put(make_tokens("xyz"))
        hit = cache.retrieve(TOKENS, device="cpu")
    lane.mark().wait()
    assert torch.equal(hit[0], make_rows(TOKENS))
    (record,) = caplog.records
    assert ("CUDA error" if raises else "ulimit -l") in record.getMessage()


# Stores in the background.


def test_stores_in_the_background_are_carried_out_in_order(lane: DeferredLane) -> None:
    node = Node()
    cache = client_of(node)
    rows, kernel = torch.zeros(len(TOKENS), 8, dtype=torch.bfloat16), make_rows(TOKENS)
    lane.stream.close()
    lane.stream.give(partial(_fill, rows, kernel))
    first = cache.store_async(TOKENS, {0: rows})
    second = cache.store_async(TOKENS, {0: make_rows(TOKENS, variant=1)})
    assert not first.done()
    del rows
    poll(lambda: "reserve" in node.calls, "room was reserved")
    assert not first.done()
    lane.stream.open()
    assert first.result(60).stored == 3
    assert second.result(60).present == 3
    assert torch.equal(cache.retrieve(TOKENS, 0)[0], kernel)
    cache.close()
    assert background_threads() == 0


def test_the_stream_of_the_caller_is_taken_down_at_the_call(lane: DeferredLane) -> None:
    node = Node()
    cache = client_of(node)
    lane.side.close()
    before = cache.store_async(make_tokens("xyz"), {0: make_rows(make_tokens("xyz"))})
    poll(lambda: "reserve" in node.calls, "the first one has begun")
    waiting = cache.store_async(TOKENS, {0: make_rows(TOKENS)})
    lane.mark().wait()
    lane.stream.close()
    later = lane.stream.give(lambda: None)  # given after the call, so nothing waits for it
    lane.side.open()
    assert before.result(60).stored == waiting.result(60).stored == 3
    assert not later.ended()
    lane.stream.open()
    cache.close()


def test_arguments_are_checked_at_once() -> None:
    node = Node()
    cache = client_of(node)
    wrong: list[tuple[Any, Any, dict[str, Any]]] = [
        (TOKENS, {0: make_rows(TOKENS)[1:]}, {}),
        (TOKENS, {}, {}),
        ([0.5], {0: make_rows([1])}, {}),
        (TOKENS, {0: make_rows(TOKENS)}, {"token_offset": -1}),
        (TOKENS, {0: make_rows(TOKENS)}, {"mm_spans": [(-1, 2, "a")]}),
    ]
    for tokens, layers, options in wrong:
        with pytest.raises(InvalidInputError):
            cache.store_async(tokens, layers, **options)
    assert background_threads() == 0
    cache.close()
    with pytest.raises(CacheClosedError):
        cache.store_async(TOKENS, {0: make_rows(TOKENS)})


def test_what_a_node_refuses_is_an_error_of_the_future() -> None:
    cache = client_of(Node())
    assert cache.store_async(TOKENS[:4], {0: make_rows(TOKENS[:4])}).result(60).stored == 1
    future = cache.store_async(TOKENS[:8], {0: make_rows(TOKENS[4:8], hidden_dim=4)}, token_offset=4)
    error = future.exception(60)
    assert isinstance(error, InvalidInputError)
    assert error.__traceback__ is None, "its frames would keep the rows"
    cache.close()


def test_token_ids_may_change_after_the_call(lane: DeferredLane) -> None:
    import numpy as np

    cache = client_of(Node())
    ids = np.array(TOKENS)
    lane.stream.close()
    future = cache.store_async(ids, {0: make_rows(TOKENS)})
    ids[:] = 7
    lane.stream.open()
    future.result(60)
    assert cache.retrieve(TOKENS, 0).num_tokens == len(TOKENS)
    assert not cache.retrieve([7] * len(TOKENS), 0)
    cache.close()


def test_cancelled_before_its_turn_it_comes_to_nothing_and_afterwards_it_is_carried_out(lane: DeferredLane) -> None:
    node = Node()
    cache = client_of(node)
    lane.side.close()
    under_way = cache.store_async(TOKENS, {0: make_rows(TOKENS)})
    other = make_tokens("xyz")
    rows = make_rows(other, dtype=torch.float16).numpy()
    gone = weakref.ref(rows)
    never = cache.store_async(other, {0: rows})
    del rows
    poll(lambda: "reserve" in node.calls, "the first one has begun")
    assert not under_way.cancel()
    assert never.cancel()
    lane.side.open()
    assert under_way.result(60).stored == 3
    with pytest.raises(CancelledError):
        never.result(60)
    poll(lambda: gone() is None, "its rows are not kept")
    assert cache.store_async([], {0: make_rows([])}).result(60).num_chunks == 0  # what came before has ended
    assert node.settled().resident_bytes == 3 * SLOT_BYTES
    cache.close()


def test_two_hundred_futures_dropped_unread_leave_nothing(lane: DeferredLane) -> None:
    node, threads = Node(slots=1024), threading.active_count()
    cache = client_of(node)
    gone = []
    for number in range(200):
        tokens = [number] * CHUNK_SIZE
        rows = make_rows(tokens, dtype=torch.float16).numpy()  # an object that lives as long as its memory is used
        gone.append(weakref.ref(rows))
        cache.store_async(tokens, {0: rows})
    del rows
    poll(lambda: not any(ref() is not None for ref in gone), "no rows are kept")
    assert node.settled().resident_bytes == 200 * SLOT_BYTES
    assert background_threads() == 1
    cache.close()
    assert background_threads() == 0
    assert threading.active_count() <= threads + 1, "the releaser's thread is this process's"
    last = client_of(node).retrieve([199] * CHUNK_SIZE, 0)[0]
    assert torch.equal(last, make_rows([199] * CHUNK_SIZE, dtype=torch.float16))


def test_close_waits_for_what_was_begun_and_fails_the_rest(lane: DeferredLane) -> None:
    node = Node()
    cache = client_of(node)
    lane.side.close()
    futures = [cache.store_async(make_tokens(name), {0: make_rows(make_tokens(name))}) for name in "abcd"]
    poll(lambda: "reserve" in node.calls, "the first one has begun")
    closing = Calling(cache.close)
    poll(lambda: all(future.done() for future in futures[1:]), "the rest has failed")
    assert closing.running
    assert not futures[0].done()
    lane.side.open()
    closing.result()
    assert futures[0].result(0).stored == 1
    for future in futures[1:]:
        with pytest.raises(CacheClosedError, match="before this operation began"):
            future.result(0)
    assert background_threads() == 0
    assert node.settled().resident_bytes == SLOT_BYTES
    cache.close()


def test_a_client_that_is_dropped_takes_its_thread_along() -> None:
    cache = client_of(Node())
    cache.store_async(TOKENS, {0: make_rows(TOKENS)}).result(60)
    assert background_threads() == 1
    del cache
    gc.collect()
    poll(lambda: background_threads() == 0, "the thread has ended")


def test_a_future_may_close_the_client() -> None:
    cache, closed = client_of(Node()), threading.Event()
    future = cache.store_async(TOKENS, {0: make_rows(TOKENS)})

    def close(done: "Future[Any]") -> None:
        cache.close()
        closed.set()

    future.add_done_callback(close)
    assert closed.wait(60)
    poll(lambda: background_threads() == 0, "the thread has ended")


def test_a_background_pickles_without_its_thread() -> None:
    background = Background()
    background.submit(lambda: None).result(60)
    copy = pickle.loads(pickle.dumps(background))
    assert background_threads() == 1
    assert copy.submit(lambda: 3).result(60) == 3
    assert background_threads() == 2
    background.close()
    copy.close()
    assert background_threads() == 0


def test_a_forked_child_has_no_background_and_its_end_is_as_usual() -> None:
    done = run_script("""
        import os, threading, time
        from hs_cache.background import Background
        from hs_cache.errors import CacheClosedError

        background, going, go_on = Background(), threading.Event(), threading.Event()

        def work():
            going.set()
            assert go_on.wait(60)
            return 3

        future = background.submit(work)
        assert going.wait(60)
        background._lock.acquire()  # held at the fork
        child = os.fork()
        if child == 0:
            try:
                background.submit(work)
            except CacheClosedError as error:
                assert "forked child" in str(error), error
                background.close()
                os._exit(7)
            os._exit(1)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 7, status
        background._lock.release()
        go_on.set()
        assert future.result(60) == 3
        print("fine")
    """)
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr


def test_an_interpreter_waits_for_the_operation_under_way_and_drops_the_rest() -> None:
    done = run_script("""
        import threading, time
        from hs_cache.background import Background
        background, going = Background(), threading.Event()

        def work():
            going.set()
            time.sleep(0.5)  # an interpreter that doesn't wait for it is gone by then
            print("carried out", flush=True)

        futures = [background.submit(work) for _ in range(2)]
        assert going.wait(60)
    """)
    assert (done.returncode, done.stdout, done.stderr) == (0, "carried out\n", "")


def test_an_interpreter_ends_amid_copies_and_stores() -> None:
    """Its node sees that it is gone; nothing is waited for but an operation under way, and that not for ever."""
    done = run_script("""
        import torch
        from hs_cache import background
        from hs_cache.devices import LANES
        from tests.direct import DirectCache, Node, make_rows
        from tests.lanes import DeferredLane
        from tests.unit.test_devices import TOKENS, client_of
        background._EXIT_S = 0.1
        node = Node()
        cache = client_of(node)
        cache.store(TOKENS, {0: make_rows(TOKENS)})
        lane = DeferredLane()
        LANES["cpu"] = lambda device: lane
        lane.stream.close()
        hit = cache.retrieve(TOKENS, 0, device="cpu")
        futures = [cache.store_async([9] * 4, {0: make_rows([9] * 4)}) for _ in range(3)]
        print("end")
    """)
    assert (done.returncode, done.stdout) == (0, "end\n"), done.stderr


def test_the_asyncio_client_stores_in_the_background_too(lane: DeferredLane) -> None:
    node = Node()

    async def use() -> None:
        cache = async_client_of(node)
        lane.side.close()
        first = cache.store_async(TOKENS, {0: make_rows(TOKENS)})
        other = make_tokens("xyz")
        never = cache.store_async(other, {0: make_rows(other)})
        unread = cache.store_async(other, {0: make_rows(other)})
        with pytest.raises(InvalidInputError):
            cache.store_async(TOKENS, {})
        while "reserve" not in node.calls:
            await asyncio.sleep(0.002)
        first.cancel()  # it has begun, and is carried out
        never.cancel()
        closing = asyncio.ensure_future(cache.close())
        while not unread.done():
            await asyncio.sleep(0.002)
        assert not closing.done()
        lane.side.open()
        await closing
        assert first.cancelled()
        assert never.cancelled()

    asyncio.run(use())
    gc.collect()
    assert background_threads() == 0
    assert node.settled().resident_bytes == 3 * SLOT_BYTES


def test_collecting_the_tests_for_a_gpu_needs_neither_ray_nor_pydantic() -> None:
    done = run_script("""
        import sys
        sys.modules.update(dict.fromkeys(("ray", "pydantic")))
        import pytest
        code = pytest.main(["tests/gpu", "--collect-only", "-q", "-p", "no:cacheprovider"])
        assert code == 0, code
    """)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_thread_that_can_not_be_started_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    background, start = Background(), threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start"):
        background.submit(lambda: 1)
    monkeypatch.setattr(threading.Thread, "start", start)
    assert background.submit(lambda: 2).result(20) == 2
    background.close()


@pytest.mark.parametrize("kept", [True, False])
def test_the_interpreter_waits_for_what_is_under_way(kept: bool) -> None:
    script = """
        import threading
        from hs_cache.background import Background
        background, begun = Background(), threading.Event()
        def work():
            begun.set()
            threading.Event().wait(0.5)
            print("done", flush=True)
        background.submit(work)
        begun.wait(20)
    """
    done = run_script(script if kept else script.rstrip() + "\n        del background\n")
    assert (done.stdout, done.returncode) == ("done\n", 0), done.stderr


def test_a_call_that_a_graph_capture_refuses_says_nothing_about_copies() -> None:
    for text, is_one in (
        ("CUDA error: operation not permitted when stream is capturing", True),
        ("CUDA error: operation would make the legacy stream depend on a capturing blocking stream", True),
        ("CUDA error: an illegal memory access was encountered", False),
    ):
        assert devices.is_capture_error(RuntimeError(text)) is is_one
