"""Copies between a pool and a CUDA device: the real lane, on real streams. Neither Ray nor pydantic is needed."""

import gc
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import pytest
import torch

from hs_cache import shared_pool
from hs_cache.devices import CudaLane, Flight, Moment, Transfer, check_device, lane_of
from hs_cache.errors import InvalidInputError
from hs_cache.keys import KeySpace, TokenDatabase
from hs_cache.leases import Releaser
from hs_cache.messages import DTYPE_BYTES, LayerSpec, Run
from hs_cache.retrieval import Copies, Piece, check_ask
from hs_cache.rows import spec_of, torch_dtype
from hs_cache.shared_pool import PoolMapping, SharedPool
from hs_cache.stitching import OpenChunk, Source, StorePlan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(sys.platform != "linux", reason="memfd and /proc are Linux"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

CHUNK_SIZE = 16
NUM_TOKENS = 20 * CHUNK_SIZE
TOKENS = list(range(NUM_TOKENS))
DATABASE = TokenDatabase(KeySpace(model="test", chunk_size=CHUNK_SIZE))
KEYS = DATABASE.chunk_keys(TOKENS)
LONG = 500_000_000
"""Clock cycles of a kernel that takes some tenths of a second."""
DTYPES = [name for name in DTYPE_BYTES if hasattr(torch, name)]


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def make_rows(dtype: str = "bfloat16", *, hidden_dim: int = 48, seed: int = 0) -> torch.Tensor:
    """Rows of any bit pattern, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    row_bytes = hidden_dim * DTYPE_BYTES[dtype]
    return torch.randint(0, 256, (NUM_TOKENS, row_bytes), dtype=torch.uint8, generator=generator).view(
        torch_dtype(dtype)
    )


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Bit by bit, NaN included."""
    return torch.equal(left.cpu().contiguous().view(torch.uint8), right.cpu().contiguous().view(torch.uint8))


class Pool:
    """A node's pool and a client's mapping of it, in one process; rows lie in extents of four chunks with gaps between.

    Attributes:
        mapping: The client's side.
    """

    def __init__(self, nbytes: int = 64 << 20) -> None:
        self.owner = SharedPool(nbytes, name="gpu-test", margin_bytes=0)
        self.mapping = PoolMapping.open(self.owner.address)

    def runs(self, specs: tuple[LayerSpec, ...]) -> tuple[Run, ...]:
        runs, offset = [], 4096
        for first in range(0, NUM_TOKENS, 4 * CHUNK_SIZE):
            for spec in specs:
                runs.append(Run(spec.layer_idx, first, 4 * CHUNK_SIZE, offset))
                offset += 4 * CHUNK_SIZE * spec.row_bytes + 192
        return tuple(runs)

    def store(self, layers: Mapping[int, torch.Tensor], moment: Moment | None = None) -> Piece:
        """As a client does it, between reserve and commit."""
        specs = tuple(spec_of(layer, rows) for layer, rows in layers.items())
        runs = self.runs(specs)
        if moment is None:
            moment = Moment(rows.device for rows in layers.values())
        if moment.pins:
            self.mapping.pin_once()
        plan = StorePlan(KEYS, 0, specs, (Source(0, dict(layers)),))
        plan.copy_into(self.mapping.write_view(), runs, moment, self.mapping.copy_pieces)
        return Piece(specs, 0, NUM_TOKENS, runs, self.mapping.write_view(), pool=self.mapping)

    def load(self, piece: Piece, **options: Any) -> Copies:
        """As a client does it, between lease and release: copies are begun."""
        options = {"start": 0, "stop": None, "device": "cuda", **options}
        layers = [spec.layer_idx for spec in piece.specs]
        copies = Copies(check_ask(KEYS, NUM_TOKENS, layers, **options), piece.specs, piece.end, without={})
        copies.run([piece])
        return copies

    def stored(self, piece: Piece, layer: int = 0) -> torch.Tensor:
        """What the owner's side shows."""
        copies = self.load(piece, device=None)
        assert not copies.flight
        return copies.targets[layer]


@pytest.fixture
def pool() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    torch.cuda.synchronize()
    pool.mapping.close()
    pool.owner.close()


def poll(condition: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.002)


def busy() -> torch.cuda.Event:
    """Give the current stream a kernel that takes long; the event is at its end."""
    torch.cuda._sleep(LONG)
    event = torch.cuda.Event()
    event.record()
    assert not event.query(), "the kernel is too short for this device"
    return event


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden_dim", [1, 48, 4096])
def test_every_dtype_goes_there_and_back(pool: Pool, dtype: str, hidden_dim: int) -> None:
    rows, others = (make_rows(dtype, hidden_dim=hidden_dim, seed=seed) for seed in (0, 1))
    piece = pool.store({0: rows.cuda(), 3: others.cuda()})
    assert same(pool.stored(piece, 0), rows)
    assert same(pool.stored(piece, 3), others)
    targets = pool.load(piece).targets
    assert targets[0].device == device()
    assert targets[0].dtype == rows.dtype
    assert same(targets[0], rows)
    assert same(targets[3], others)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_any_stride(pool: Pool, dtype: str) -> None:
    rows = make_rows(dtype)
    wide = torch.empty(2 * NUM_TOKENS, 3 * rows.shape[1], dtype=rows.dtype, device=device())
    wide.view(torch.uint8).fill_(7)
    part = wide[::2, : rows.shape[1]]
    part.view(torch.uint8).copy_(rows.cuda().view(torch.uint8))
    by_columns = rows.cuda().view(_integer(rows)).t().contiguous().t().view(rows.dtype)
    one = rows[:1].cuda().expand(NUM_TOKENS, -1)
    piece = pool.store({0: part, 1: by_columns, 2: one})
    assert same(pool.stored(piece, 0), rows)
    assert same(pool.stored(piece, 1), rows)
    assert same(pool.stored(piece, 2), rows[:1].expand(NUM_TOKENS, -1))
    out = {layer: torch.empty_like(wide)[::2, : rows.shape[1]] for layer in range(3)}
    assert pool.load(piece, out=out).targets[0].data_ptr() == out[0].data_ptr()
    assert same(out[0], rows)
    assert same(out[1], rows)


def _integer(rows: torch.Tensor) -> torch.dtype:
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[rows.itemsize]


@pytest.mark.parametrize("stored", ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
def test_rows_are_converted_as_on_the_cpu(pool: Pool, stored: str, wanted: torch.dtype) -> None:
    rows = (torch.arange(NUM_TOKENS * 48).view(NUM_TOKENS, 48) % 251 / 16).to(torch_dtype(stored))
    piece = pool.store({0: rows.cuda()})
    with torch.inference_mode():
        buffer = torch.empty(NUM_TOKENS + 3, 48, dtype=wanted, device=device())
    assert same(pool.load(piece, dtype=wanted).targets[0], rows.to(wanted))
    pool.load(piece, out={0: buffer})
    assert same(buffer[:NUM_TOKENS], rows.to(wanted))


def test_a_part_of_the_rows_into_buffers(pool: Pool) -> None:
    rows = make_rows()
    piece = pool.store({0: rows.cuda()})
    assert same(pool.load(piece, start=5, stop=151).targets[0], rows[5:151])
    on_cpu = torch.empty(146, 48, dtype=torch.bfloat16)
    pool.load(piece, start=5, stop=151, device=None, out={0: on_cpu})
    assert same(on_cpu, rows[5:151])


def test_a_store_waits_for_the_kernels_before_it(pool: Pool) -> None:
    rows = make_rows()
    source, kernel = torch.zeros_like(rows, device=device()), rows.cuda()
    pool.mapping.pin_once()
    busy()
    source.copy_(kernel)
    piece = pool.store({0: source})
    assert same(pool.stored(piece), rows)


def test_a_store_does_not_wait_for_the_kernels_after_it(pool: Pool) -> None:
    rows = make_rows()
    source = rows.cuda()
    pool.mapping.pin_once()
    pool.store({0: source})
    moment = Moment([source.device])
    event = busy()
    piece = pool.store({0: source}, moment)
    assert not event.query()
    assert same(pool.stored(piece), rows)


def test_the_stream_is_that_of_the_call_on_whatever_thread(pool: Pool) -> None:
    rows = make_rows()
    source, kernel, stream = torch.zeros_like(rows, device=device()), rows.cuda(), torch.cuda.Stream()
    pool.mapping.pin_once()
    torch.cuda.synchronize()
    done: list[Any] = []
    with torch.cuda.stream(stream):
        busy()
        source.copy_(kernel)
        moment = Moment([source.device])
    thread = threading.Thread(target=lambda: done.append(pool.store({0: source}, moment)))
    thread.start()
    thread.join(60)
    assert same(pool.stored(done[0]), rows)
    with torch.cuda.stream(stream):
        ask = check_ask(KEYS, NUM_TOKENS, 0, 0, None, device="cuda")
        copies = Copies(ask, done[0].specs, NUM_TOKENS, without={})
        event = busy()
        thread = threading.Thread(target=copies.run, args=([done[0]],))
        thread.start()
        thread.join(60)
        assert not event.query(), "the copy was begun, and waits for its stream"
        twice = copies.targets[0].view(torch.int16) + 0
    stream.synchronize()
    assert same(twice.view(torch.bfloat16), rows)


def test_rows_freed_at_once_are_not_overwritten_by_whoever_gets_their_memory(pool: Pool) -> None:
    rows = make_rows(hidden_dim=4096)
    view = torch.frombuffer(pool.mapping.write_view(), dtype=torch.uint8, count=rows.nbytes, offset=4096)
    pool.mapping.pin_once()
    lane = lane_of(device())
    assert isinstance(lane, CudaLane)
    full = partial(torch.full, rows.shape, 3.0, dtype=rows.dtype, device=device())
    others = [full() for _ in range(8)]
    del others  # now the allocator has memory for eight
    source = rows.cuda()
    torch.cuda.synchronize()
    with torch.cuda.stream(lane._side):
        torch.cuda._sleep(LONG)  # the copy comes late
    address = source.data_ptr()
    fence = lane.copy_in([Transfer(source, rows.dtype, (view,))], lane.mark())
    del source
    assert not fence.ended()
    others = [full() for _ in range(8)]
    assert address not in {other.data_ptr() for other in others}
    fence.wait()
    assert fence.ended()
    assert same(view.view(torch.bfloat16).view(NUM_TOKENS, -1), rows)


def test_a_retrieve_blocks_nobody_and_its_lease_ends_with_the_copy(pool: Pool) -> None:
    rows = make_rows()
    piece = pool.store({0: rows.cuda()})
    releaser, sent = Releaser(), list[int]()
    incarnation = pool.owner.incarnation
    releaser.connect(incarnation, sent.extend, pool.owner.address, _Nobody())
    event = busy()
    copies = pool.load(piece)
    assert not event.query(), "the copy was begun only"
    assert not copies.flight.ended()
    releaser.end_after(copies.flight, incarnation, 7, pool.mapping)
    releaser.flush()
    if not event.query():
        assert not sent
    poll(lambda: sent == [7], "the releaser's thread ends the lease")
    assert event.query()
    pool.owner.view()[:] = bytes(pool.owner.data_bytes)  # the memory is free
    assert same(copies.targets[0], rows)


class _Nobody:
    def drop(self, incarnation: bytes) -> None:
        raise AssertionError("the owner is alive")


def test_the_mapping_is_page_locked_and_let_go_before_it_is_unmapped(pool: Pool) -> None:
    view = torch.frombuffer(pool.mapping.write_view(), dtype=torch.uint8)
    assert not view.is_pinned()
    pool.mapping.pin_once()
    assert pool.mapping.pinned, pool.mapping.pin_reason
    assert view.is_pinned()
    del view
    for _ in range(3):  # addresses come again, and can be page-locked again
        mapping = PoolMapping.open(pool.owner.address)
        mapping.pin_once()
        assert mapping.pinned, mapping.pin_reason
        del mapping
        gc.collect()


def test_pageable_memory_is_slower_and_as_right(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shared_pool, "cuda_host_register", lambda: (lambda address, nbytes: 2, lambda address: 0))
    rows = make_rows()
    source, kernel = torch.zeros_like(rows, device=device()), rows.cuda()
    busy()
    source.copy_(kernel)
    with caplog.at_level(logging.WARNING):
        piece = pool.store({0: source})
        targets = [pool.load(piece).targets[0] for _ in range(2)]
    assert not pool.mapping.pinned
    assert len(caplog.records) == 1
    assert "ulimit -l" in caplog.records[0].getMessage()
    assert same(pool.stored(piece), rows)
    assert all(same(target, rows) for target in targets)


def test_copies_stop_at_the_borders_of_what_was_page_locked_in_pieces(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hs_cache.pinning._PIECE_BYTES", 1 << 16)
    real = shared_pool.cuda_host_register()
    assert real is not None
    register, unregister = real
    monkeypatch.setattr(
        shared_pool,
        "cuda_host_register",
        lambda: (lambda address, nbytes: register(address, nbytes) if nbytes <= 1 << 16 else 2, unregister),
    )
    rows = make_rows(hidden_dim=4001)
    piece = pool.store({0: rows.cuda()})
    assert pool.mapping.pinned, pool.mapping.pin_reason
    assert same(pool.stored(piece), rows)
    assert same(pool.load(piece).targets[0], rows)


def test_rows_that_wait_for_their_chunk_come_behind_the_stream() -> None:
    rows = make_rows()
    source, kernel, stream = torch.zeros_like(rows, device=device()), rows.cuda(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        busy()
        source.copy_(kernel)
        moment = Moment([source.device])
    chunk = OpenChunk(CHUNK_SIZE)

    def put() -> None:
        with moment.reading():
            chunk.put(0, {0: source[:CHUNK_SIZE]})

    thread = threading.Thread(target=put)
    thread.start()
    thread.join(60)
    assert same(chunk.complete(CHUNK_SIZE)[0], rows[:CHUNK_SIZE])


def test_rows_of_another_node_are_there_at_once(pool: Pool) -> None:
    rows = make_rows()
    piece = Piece(
        (spec_of(0, rows),), 0, NUM_TOKENS, (Run(0, 0, NUM_TOKENS, 0),), rows.view(torch.uint8).numpy().ravel()
    )
    copies = pool.load(piece)
    assert not copies.flight
    assert same(copies.targets[0], rows)


def test_where_rows_may_be_wanted() -> None:
    assert check_device("cuda") == check_device(torch.cuda.current_device()) == device()
    assert check_device("cpu") is None
    with pytest.raises(InvalidInputError, match="device: got 'cuda:99', expected an index below"):
        check_device("cuda:99")
    with pytest.raises(InvalidInputError, match="device: got 'meta'"):
        check_device("meta")
    with pytest.raises(InvalidInputError, match="out: got a buffer on cpu for layer 0, expected one on cuda:"):
        check_ask(KEYS, NUM_TOKENS, 0, 0, None, device="cuda", out={0: torch.empty(NUM_TOKENS, 48)})


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
def test_another_device_than_the_current_one(pool: Pool) -> None:
    rows = make_rows()
    piece = pool.store({0: rows.to("cuda:1"), 1: rows.flip(0).to("cuda:0")})
    assert same(pool.stored(piece, 0), rows)
    targets = pool.load(piece, device="cuda:1").targets
    assert targets[1].device == torch.device("cuda:1")
    assert same(targets[1], rows.flip(0))


def test_an_empty_flight_has_ended() -> None:
    assert Flight().ended()
