"""What has gone wrong before in running clusters. Run as a module, it is the driver that changes clusters."""

import asyncio
import json
import logging
import pickle
import random
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import ray
import torch

import hs_cache
from hs_cache import retrieval
from hs_cache import rows as rows_module
from hs_cache.errors import ServiceError
from hs_cache.router import HIDDEN_STATES, KV
from tests.builders import CHUNK_SIZE
from tests.cluster.children import make_rows
from tests.cluster.conftest import POOL_GIB, Blocking, Connect, StartService
from tests.cluster.nodes import SLACK_S, client, pid_of, this_node, within
from tests.processes import kill, pool_inodes, run_python, stopped, wait_until

ROWS = make_rows(12, 1)
TOKENS, DIM = 2048, 8192  # 32 MiB of bfloat16


# Copies into a caller's buffer


@pytest.fixture(scope="module")
def large_service(start_service: StartService) -> str:
    service = start_service(chunk_size=256, max_hidden_state_cpu_size=0.125, rpc_timeout_s=10)
    rows = torch.arange(TOKENS, dtype=torch.bfloat16)[:, None].expand(TOKENS, DIM)
    assert client(service).store(range(TOKENS), {0: rows}).prefix_tokens == TOKENS
    return service


class WatchedCopy:
    """Stands in for `retrieval.copy_out`, and tells where it is. Where `waits` is set, it begins when `go_on` is."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, waits: bool = False) -> None:
        self._copy = rows_module.copy_out
        self.begun, self.go_on, self.ended = threading.Event(), threading.Event(), threading.Event()
        if not waits:
            self.go_on.set()
        monkeypatch.setattr(retrieval, "copy_out", self)

    def __call__(self, *args: Any) -> None:
        self.ended.clear()
        self.begun.set()
        assert self.go_on.wait(60)
        self._copy(*args)
        self.ended.set()

    async def reached(self) -> None:
        while not self.begun.is_set():
            await asyncio.sleep(0.0005)


def empty_buffer() -> torch.Tensor:
    return torch.empty(TOKENS, DIM, dtype=torch.bfloat16)


async def is_cancelled(task: "asyncio.Task[Any]") -> bool:
    try:
        await task
    except asyncio.CancelledError:
        return True
    return False


def test_a_cancelled_retrieve_returns_behind_the_last_byte_of_its_copy(
    large_service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, out = WatchedCopy(monkeypatch, waits=True), empty_buffer()

    async def cancel() -> None:
        async with await hs_cache.aconnect(service=large_service) as cache:  # type: ignore[union-attr]
            task = asyncio.create_task(cache.retrieve(range(TOKENS), 0, out={0: out}))
            await copy.reached()
            for _ in range(20):
                task.cancel()
                await asyncio.sleep(0)
                assert not task.done(), "the copy still writes into the buffer"
            copy.go_on.set()
            assert await is_cancelled(task)
            assert copy.ended.is_set()

    asyncio.run(cancel())


class CountingExecutor(ThreadPoolExecutor):
    """One thread, and how much it has been given to do."""

    def __init__(self) -> None:
        super().__init__(max_workers=1)
        self.num_submitted = 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        future = super().submit(fn, *args, **kwargs)
        self.num_submitted += 1
        return future


def test_a_copy_that_has_not_begun_when_its_retrieve_is_cancelled_never_does(large_service: str) -> None:
    out, others_are_done = empty_buffer(), threading.Event()

    async def cancel() -> None:
        async with await hs_cache.aconnect(service=large_service) as cache:  # type: ignore[union-attr]
            executor, loop = CountingExecutor(), asyncio.get_running_loop()
            loop.set_default_executor(executor)
            busy = loop.run_in_executor(None, others_are_done.wait, 60)
            task = asyncio.create_task(cache.retrieve(range(TOKENS), 0, out={0: out}))
            while executor.num_submitted < 2:
                await asyncio.sleep(0.0005)
            task.cancel()
            assert await is_cancelled(task)
            assert not busy.done(), "nobody waits for a thread to become free"
            out.fill_(-1)
            others_are_done.set()
            await loop.run_in_executor(None, lambda: None)  # behind everything that was to run before
            assert await busy

    asyncio.run(cancel())
    assert bool((out == -1).all())


def test_a_buffer_is_the_callers_again_after_a_cancelled_retrieve(
    large_service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, out, other = WatchedCopy(monkeypatch), empty_buffer(), empty_buffer()
    points = random.Random(0)
    cancelled_copies = 0

    async def churn() -> None:
        nonlocal cancelled_copies
        async with await hs_cache.aconnect(service=large_service) as cache:  # type: ignore[union-attr]
            for number in range(24):
                copy.begun.clear()
                task = asyncio.create_task(cache.retrieve(range(TOKENS), 0, out={0: out}))
                if number % 2:
                    await asyncio.sleep(points.uniform(0, 0.02))
                else:
                    await copy.reached()
                under_way = copy.begun.is_set() and not copy.ended.is_set()
                task.cancel()
                if not await is_cancelled(task):
                    continue
                cancelled_copies += under_way
                out.fill_(-1)
                # As long as the copy would have taken.
                hit = await cache.retrieve(range(TOKENS), 0, out={0: other})
                assert hit.num_tokens == TOKENS
                assert bool((out == -1).all()), f"written to after the call had returned, in round {number}"

    asyncio.run(churn())
    assert cancelled_copies, "none was cancelled while it was copying"


# A process that changes clusters


def change_clusters(address: str, service: str, model: str) -> dict[str, Any]:
    """Leave a cluster with clients in use and rows held, start another one, and use the cache there."""
    quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    ray.init(address=address, **quiet)
    old, strict = client(service, model), client(service, model, strict=True)
    rows = make_rows(8, 0)
    old.store(range(8), {0: rows})
    held = old.retrieve(range(8), 0)
    dropped = [old.retrieve(range(4), 0), strict.retrieve(range(4), 0)]
    ray.shutdown()
    directory = tempfile.mkdtemp(prefix="hs", dir="/tmp")
    try:
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=80 << 20,
            _temp_dir=directory,
            **quiet,
        )
        return _in_the_other_cluster(service, model, old, strict, held, dropped)
    finally:
        ray.shutdown()
        shutil.rmtree(directory)


def _in_the_other_cluster(
    service: str, model: str, old: Any, strict: Any, held: Any, dropped: list[Any]
) -> dict[str, Any]:
    rows = make_rows(8, 0)
    dropped.clear()  # their leases end where nobody can be told
    found: dict[str, Any] = {
        "ended_by": [old.retrieve(range(8), 0).ended_by for _ in range(2)],
        "failed": old.store(range(8), {0: rows}).failed,
        "has_chunk": old.has_chunk(old.chunk_keys(range(8))[0]),
        "reported": old.kv.report_stored(range(8)),
    }
    try:
        strict.retrieve(range(8), 0)
    except ServiceError:
        found["strict"] = "refused"
    config = {"chunk_size": CHUNK_SIZE, "max_hidden_state_cpu_size": POOL_GIB}
    new: Any = hs_cache.connect(config, service=f"{service}-new", model=model)
    found["stored"] = new.store(range(8), {0: rows}).stored
    hit = new.retrieve(range(8), 0)
    found["right"] = torch.equal(hit[0], rows)
    found["leases"] = new.stats().node.store.num_leases
    del hit
    # Only the thread tells: this client makes no request that would carry it along.
    wait_until(lambda: new.stats().node.store.num_leases == 0, "the new client's lease has ended")
    found["threads"] = sum(thread.name == "hs_cache-releaser" for thread in threading.enumerate())
    found["held"] = torch.equal(held[0], rows)
    found["still"] = old.retrieve(range(8), 0).ended_by
    hs_cache.stop(service=f"{service}-new")
    return found


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_process_that_changes_clusters(address: str, start_service: StartService) -> None:
    service = start_service()
    arguments = json.dumps({"address": address, "service": service, "model": "moved"})
    done = run_python(["-m", "tests.cluster.test_regressions", arguments])
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "ended_by": ["unreachable"] * 2,
        "failed": 2,
        "has_chunk": False,
        "reported": False,
        "strict": "refused",
        "stored": 2,
        "right": True,
        "leases": 1,
        "threads": 1,
        "held": True,
        "still": "unreachable",
    }
    assert "Traceback" not in done.stderr
    cache = client(service, "moved")
    wait_until(lambda: cache.stats().node.store.num_leases == 0, "the leases of the process that left have ended")
    assert torch.equal(cache.retrieve(range(8), 0)[0], make_rows(8, 0))


# Actors that are there and don't answer


def unpickled(cache: Any) -> Any:
    """A client that has its settings, and no connection yet."""
    if isinstance(cache, Blocking):
        return Blocking(pickle.loads(pickle.dumps(cache.target)), cache._loop)
    return pickle.loads(pickle.dumps(cache))


def test_a_client_that_connects_in_its_first_call_keeps_the_deadline_of_that_call(
    connect: Connect, start_service: StartService
) -> None:
    service = start_service(rpc_timeout_s=1)
    cache = connect(service=service)
    cache.store(range(12), {0: ROWS})
    reading, writing = unpickled(cache), unpickled(cache)
    pid = pid_of(service, HIDDEN_STATES, this_node())
    with stopped(pid):
        assert within(1 + SLACK_S, lambda: reading.retrieve(range(12), 0)).ended_by == "unreachable"
        assert within(1 + SLACK_S, lambda: writing.store(range(50, 62), {0: ROWS})).failed == 3
    assert reading.stats().timeouts_total == 1
    wait_until(lambda: reading.retrieve(range(12), 0), "the actor answers again")
    assert torch.equal(reading.retrieve(range(12), 0)[0], ROWS)
    assert pid_of(service, HIDDEN_STATES, this_node()) == pid


def test_a_kv_actor_that_hangs_under_many_readers_keeps_nobody_else_waiting(start_service: StartService) -> None:
    service = start_service(rpc_timeout_s=10)
    cache = client(service)
    cache.store(range(12), {0: ROWS})
    key = cache.chunk_keys(range(12))[2]
    ended: list[str] = []
    readers = [
        threading.Thread(target=lambda: ended.append(cache.retrieve(range(12), 0).ended_by), daemon=True)
        for _ in range(48)  # more than the actor has threads
    ]
    pid = pid_of(service, KV, this_node())
    with stopped(pid):
        for reader in readers:
            reader.start()
        # A reader that asks the KV actor waits for it 8 s.
        wait_until(lambda: len(ended) >= 32, "all but sixteen have been told that the KV isn't known", timeout_s=7)
        assert within(SLACK_S, lambda: cache.has_chunk(key))
        assert len(ended) < 48, "readers are waiting"
        assert cache.store(range(50, 62), {0: ROWS}).stored == 3
        for reader in readers:
            reader.join(30)
    assert ended == ["kv_unknown"] * 48
    assert cache.num_cached_chunks() == 6
    wait_until(lambda: cache.retrieve(range(12), 0).num_tokens == 12, "the KV actor is asked again")
    # What is known without a question is back at once; for a moment after its silence nothing is asked.
    assert torch.equal(cache.retrieve(range(50, 62), 0, wait_s=10)[0], ROWS)
    assert cache.stats().timeouts_total == cache.stats().unreachable_total == 0


# Pools whose actor was killed


def test_idle_clients_let_the_pool_of_a_killed_actor_go(start_service: StartService) -> None:
    service = start_service()
    cache, other = client(service), client(service, "other")
    cache.store(range(12), {0: ROWS})
    assert torch.equal(cache.retrieve(range(12), 0)[0], ROWS)
    old = pool_inodes(service)
    assert len(old) == 1
    kill(pid_of(service, HIDDEN_STATES, this_node()))
    wait_until(lambda: not old & pool_inodes(service), "the pool's memory is free, although no client does anything")
    wait_until(lambda: cache.stats().node, "the node is back")
    wait_until(lambda: cache.store(range(12), {0: ROWS}).prefix_tokens == 12, "a store succeeds")
    assert torch.equal(cache.retrieve(range(12), 0)[0], ROWS)
    assert other.num_cached_chunks() == 3
    assert not old & pool_inodes(service)


def test_rows_of_a_killed_actor_that_are_held_keep_their_memory_and_nothing_else_does(
    start_service: StartService,
) -> None:
    service = start_service()
    cache = client(service)
    cache.store(range(12), {0: ROWS})
    held = cache.retrieve(range(12), 0)
    old = pool_inodes(service)
    kill(pid_of(service, HIDDEN_STATES, this_node()))
    wait_until(lambda: cache.stats().node, "the node is back")
    assert pool_inodes(service) > old
    assert torch.equal(held[0], ROWS)
    del held
    wait_until(lambda: not old & pool_inodes(service), "the pool's memory is free")


if __name__ == "__main__":
    print(json.dumps(change_clusters(**json.loads(sys.argv[1]))))
