"""LMCache as `python -m benchmarks` measures it."""

from collections.abc import Callable, Iterator

import pytest

from benchmarks.peers import Worker
from benchmarks.subject import HALF, KEYS, MISS, READ, RETRIEVE, STORE, MeasurementError, Size

SIZE = Size(1024, 64, 2)

StartLMCache = Callable[..., Worker]


@pytest.fixture
def start() -> Iterator[StartLMCache]:
    """``start(*arguments) -> Worker``, closed after the test."""
    started: list[Worker] = []

    def start(*arguments: str) -> Worker:
        started.append(Worker("benchmarks.peer_lmcache", arguments, environ={"LMCACHE_TRACK_USAGE": "false"}))
        return started[-1]

    yield start
    for worker in started:
        worker.close()


def test_lmcache_gives_back_what_was_stored_and_keeps_float32(start: StartLMCache) -> None:
    worker = start("0.01")
    assert worker.prepare(SIZE) == [STORE, RETRIEVE, READ, HALF, MISS, KEYS]
    for _ in range(3):
        worker.begin()
        worker.wake()
        seconds = [worker.time(step) for step in (STORE, RETRIEVE, READ, HALF, MISS, KEYS)]
        assert min(seconds) > 0
        worker.verify()
        assert worker.bytes_per_token() == 4 * SIZE.hidden
        worker.finish()


def test_lmcache_before_its_store_has_nothing(start: StartLMCache) -> None:
    worker = start("0.01")
    worker.prepare(SIZE)
    worker.begin()
    with pytest.raises(MeasurementError, match=r"retrieve: \[0, 0\] rows"):
        worker.time(RETRIEVE)


def test_lmcache_with_a_full_pool_still_stores(start: StartLMCache) -> None:
    worker = start("0.003", "full")
    assert worker.prepare(SIZE) == [STORE]
    worker.begin()
    assert worker.time(STORE) > 0
    worker.verify()
    assert worker.bytes_per_token() is None
    worker.finish()
