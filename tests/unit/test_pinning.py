"""Page-locking of a pool by either side, with a driver that is a list."""

import logging
import resource
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hs_cache import pinning, shared_pool
from hs_cache.machine import MemoryHeadroom
from hs_cache.pool_file import HEADER_BYTES
from hs_cache.shared_pool import PoolMapping, SharedPool

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfd and /proc are Linux")

REPOSITORY = Path(__file__).parents[2]
MIB = 1 << 20
GIB = 1 << 30
PAGE = resource.getpagesize()


def make_pool(data_bytes: int = MIB, *, prefault: bool = False, available_bytes: int = 64 * GIB) -> SharedPool:
    return SharedPool(
        data_bytes, prefault=prefault, margin_bytes=0, headroom=lambda: MemoryHeadroom(available_bytes, "MemAvailable")
    )


def poll(condition: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.01)


def run_script(script: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


class Driver:
    def __init__(self, *, largest: int = 1 << 60, fail_after: int = 1 << 60) -> None:
        self.largest, self.fail_after = largest, fail_after
        self.registered: dict[int, int] = {}
        self.calls = 0

    def register(self, address: int, nbytes: int) -> int:
        self.calls += 1
        if nbytes > self.largest or len(self.registered) >= self.fail_after:
            return 2
        assert address % PAGE == 0
        self.registered[address] = nbytes
        return 0

    def unregister(self, address: int) -> int:
        del self.registered[address]
        return 0


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(pinning, "_PIECE_BYTES", MIB)
    return MIB


@pytest.mark.parametrize("side", ["owner", "client"])
def test_pin_locks_the_whole_mapping_once_and_close_undoes_it(side: str) -> None:
    pool, driver = make_pool(4 * MIB), Driver()
    pinnable: SharedPool | PoolMapping = pool if side == "owner" else PoolMapping.open(pool.address)
    assert not pinnable.pinned
    assert pinnable.pin_reason == "pin() was not called"
    assert pinnable.pin(driver.register, driver.unregister)
    assert pinnable.pin(driver.register, driver.unregister)
    assert list(driver.registered.values()) == [4 * MIB + HEADER_BYTES]
    assert driver.calls == 1
    assert pinnable.pinned
    assert pinnable.pin_reason == "page-locked"
    assert list(pinnable.copy_pieces(5, 4 * MIB - 5)) == [(5, 4 * MIB - 5)]
    pinnable.close()
    assert not pinnable.pinned
    assert driver.registered == {}
    pool.close()


def test_pin_in_pieces_when_one_is_refused(small_pieces: int, caplog: pytest.LogCaptureFixture) -> None:
    pool, driver = make_pool(2 * MIB), Driver(largest=small_pieces)
    assert pool.pin(driver.register, driver.unregister)
    assert list(driver.registered.values()) == [MIB, MIB, HEADER_BYTES]
    (base, second, third) = driver.registered
    assert (second - base, third - base) == (MIB, 2 * MIB)
    first_border, second_border = MIB - HEADER_BYTES, 2 * MIB - HEADER_BYTES
    assert list(pool.copy_pieces(0, 2 * MIB)) == [
        (0, first_border),
        (first_border, MIB),
        (second_border, HEADER_BYTES),
    ]
    assert list(pool.copy_pieces(first_border, MIB)) == [(first_border, MIB)]
    assert list(pool.copy_pieces(first_border - 1, 2)) == [(first_border - 1, 1), (first_border, 1)]
    assert not caplog.records
    pool.close()
    assert driver.registered == {}


def test_pin_that_fails_midway_leaves_the_pool_pageable_with_one_warning(
    small_pieces: int, caplog: pytest.LogCaptureFixture
) -> None:
    pool, driver = make_pool(4 * MIB), Driver(largest=small_pieces, fail_after=2)
    assert not pool.pin(driver.register, driver.unregister)
    assert driver.registered == {}
    assert not pool.pinned
    assert "error 2" in pool.pin_reason
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    for part in ("ulimit -l", "--ulimit memlock"):
        assert part in record.getMessage()
    assert list(pool.copy_pieces(0, 4 * MIB)) == [(0, 4 * MIB)]
    pool.view()[0] = 1
    pool.close()


def test_pin_that_raises_undoes_what_it_did(small_pieces: int) -> None:
    pool, driver = make_pool(4 * MIB), Driver(largest=small_pieces)
    first = 1 << 64

    def register(address: int, nbytes: int) -> int:
        nonlocal first
        first = min(first, address)
        if address > first + small_pieces:
            raise RuntimeError("the driver is gone")
        return driver.register(address, nbytes)

    with pytest.raises(RuntimeError, match="the driver is gone"):
        pool.pin(register, driver.unregister)
    assert driver.calls > 1
    assert driver.registered == {}
    assert not pool.pinned
    pool.close()


def test_pin_does_not_allocate_memory_that_is_not_there(caplog: pytest.LogCaptureFixture) -> None:
    answers = iter([GIB, MIB, MIB])
    pool = SharedPool(
        64 * MIB, margin_bytes=0, prefault=False, headroom=lambda: MemoryHeadroom(next(answers), "MemAvailable")
    )
    driver = Driver()
    assert not pool.pin(driver.register, driver.unregister)
    assert driver.calls == 0
    assert "MemAvailable leaves only" in pool.pin_reason
    assert len(caplog.records) == 1
    pool.close()


def test_pin_waits_for_the_prefault() -> None:
    pool, driver = make_pool(64 * MIB, prefault=True), Driver()
    assert pool.pin(driver.register, driver.unregister)
    assert pool.prefaulted_bytes == 64 * MIB
    pool.close()


def test_pin_without_cuda_is_told_once_by_the_owner(caplog: pytest.LogCaptureFixture) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("CUDA is available")
    caplog.set_level(logging.INFO)
    pool = make_pool()
    mapping = PoolMapping.open(pool.address)
    for each in (mapping, pool, pool):
        assert not each.pin()
        assert each.pin_reason == "CUDA is not available"
        assert each.without_cuda
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert record.getMessage() == "The pool stays pageable: CUDA is not available"
    mapping.close()
    pool.close()


# On the background thread


def use_driver(monkeypatch: pytest.MonkeyPatch, driver: Driver) -> None:
    """As if CUDA were there, for a pool that finds its driver by itself."""
    monkeypatch.setattr(shared_pool, "cuda_host_register", lambda: (driver.register, driver.unregister))


class HeldDriver(Driver):
    """Works when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.reached, self.go_on = threading.Event(), threading.Event()

    def register(self, address: int, nbytes: int) -> int:
        self.reached.set()
        assert self.go_on.wait(60)
        return super().register(address, nbytes)


class HeldHeadroom:
    """Enough memory; the measurement for the first piece of the prefault ends when it is told to."""

    def __init__(self) -> None:
        self.calls = 0
        self.reached, self.go_on = threading.Event(), threading.Event()

    def __call__(self) -> MemoryHeadroom:
        self.calls += 1
        if self.calls > 1:
            self.reached.set()
            assert self.go_on.wait(60)
        return MemoryHeadroom(64 * GIB, "MemAvailable")


def test_the_background_thread_pins_after_the_prefault(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, headroom = HeldDriver(), HeldHeadroom()
    use_driver(monkeypatch, driver)
    pool = SharedPool(64 * MIB, margin_bytes=0, headroom=headroom, pin=True)
    assert headroom.reached.wait(60)
    assert not pool.pinned
    assert pool.pin_reason == "the background thread has not come to it yet"
    assert not driver.reached.is_set()
    headroom.go_on.set()
    assert driver.reached.wait(60)
    assert pool.wait_prefaulted(60)
    pool.view()[0] = 1
    driver.go_on.set()
    poll(lambda: pool.pinned, "the pool is page-locked")
    assert list(driver.registered.values()) == [64 * MIB + HEADER_BYTES]
    assert pool.pin_reason == "page-locked"
    pool.close()
    assert driver.registered == {}


def test_the_background_thread_pins_without_a_prefault_too(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    use_driver(monkeypatch, driver)
    pool = SharedPool(MIB, margin_bytes=0, prefault=False, pin=True)
    poll(lambda: pool.pinned, "the pool is page-locked")
    pool.close()


def test_close_amid_the_prefault_leaves_out_the_pin(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, headroom = Driver(), HeldHeadroom()
    use_driver(monkeypatch, driver)
    pool = SharedPool(512 * MIB, margin_bytes=0, headroom=headroom, pin=True)
    assert headroom.reached.wait(60)
    closer = threading.Thread(target=pool.close)
    closer.start()
    poll(pool._stop.is_set, "close() asked the background thread to stop")
    headroom.go_on.set()
    closer.join(60)
    assert pool.closed
    assert driver.calls == 0


def test_close_amid_the_pin_waits_for_the_driver_and_undoes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = HeldDriver()
    use_driver(monkeypatch, driver)
    pool = SharedPool(MIB, margin_bytes=0, pin=True)
    assert driver.reached.wait(60)
    closer = threading.Thread(target=pool.close)
    closer.start()
    poll(pool._stop.is_set, "close() asked the background thread to stop")
    assert not pool.closed
    driver.go_on.set()
    closer.join(60)
    assert pool.closed
    assert driver.calls == 1
    assert driver.registered == {}


def test_a_driver_that_fails_on_the_background_thread_is_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def register(address: int, nbytes: int) -> int:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(shared_pool, "cuda_host_register", lambda: (register, lambda address: 0))
    pool = SharedPool(MIB, margin_bytes=0, pin=True)
    poll(lambda: bool(caplog.records), "a warning is logged")
    assert not pool.pinned
    assert pool.pin_reason == "CUDA error: out of memory"
    pool.view()[0] = 1
    pool.close()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "CUDA error: out of memory" in record.getMessage()


def test_an_owner_that_exits_amid_its_pin_waits_for_the_driver() -> None:
    done = run_script("""
        import threading, time
        from hs_cache import shared_pool
        reached = threading.Event()

        def register(address, nbytes):
            reached.set()
            threading.main_thread().join()
            time.sleep(0.5)  # the driver's work; an interpreter that doesn't wait for it is gone by then
            print("registered", flush=True)
            return 0

        shared_pool.cuda_host_register = lambda: (register, lambda address: 0)
        pool = shared_pool.SharedPool(1 << 20, margin_bytes=0, pin=True)
        assert reached.wait(60)
    """)
    assert (done.returncode, done.stdout, done.stderr) == (0, "registered\n", "")


def test_an_owner_that_exits_amid_its_prefault_does_not_begin_to_pin() -> None:
    done = run_script("""
        from hs_cache import shared_pool
        shared_pool.cuda_host_register = lambda: (lambda address, nbytes: print("registered"), lambda address: 0)
        pool = shared_pool.SharedPool(512 << 20, margin_bytes=0, pin=True)
    """)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
