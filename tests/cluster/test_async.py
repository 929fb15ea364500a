"""What only the asyncio client promises: the loop goes on, and a cancelled call leaves nothing behind."""

import asyncio
import pickle
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import ray
import torch

import hs_cache
from hs_cache import retrieval, router, stitching
from hs_cache import rows as rows_module
from hs_cache.effects import Call
from hs_cache.errors import ServiceError
from hs_cache.router import HIDDEN_STATES, RayPeer, Router, find_actor, nodes_of
from tests.cluster.children import make_rows
from tests.cluster.conftest import StartService
from tests.processes import wait_until

TOKENS, DIM = 4096, 8192  # 64 MiB of bfloat16


@pytest.fixture(scope="module")
def large_service(start_service: StartService) -> str:
    return start_service(chunk_size=256, max_hidden_state_cpu_size=0.25, rpc_timeout_s=10)


async def aconnect(service: str, model: str = "") -> Any:
    return await hs_cache.aconnect(service=service, model=model)


class Meeting:
    """A copy that begins only when the event loop has shown that it goes on, after the copy was to begin."""

    def __init__(self, copy: Callable[..., None]) -> None:
        self._copy = copy
        self._reached, self._ticked = threading.Event(), threading.Event()
        self.met = False

    def __call__(self, *args: Any) -> None:
        self._reached.set()
        self.met = self._ticked.wait(30)
        self._copy(*args)

    async def tick(self) -> None:
        while not self._reached.is_set():
            await asyncio.sleep(0.001)
        self._ticked.set()


def test_copies_do_not_block_the_loop(large_service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.arange(TOKENS, dtype=torch.bfloat16)[:, None].expand(TOKENS, DIM)
    writing, reading = Meeting(rows_module.copy_in), Meeting(rows_module.copy_out)
    monkeypatch.setattr(stitching, "copy_in", writing)
    monkeypatch.setattr(retrieval, "copy_out", reading)

    async def both() -> None:
        async with await aconnect(service=large_service) as cache:
            stored, _ = await asyncio.gather(cache.store(range(TOKENS), {0: rows}), writing.tick())
            assert stored.stored == TOKENS // 256
            out = torch.empty(TOKENS, DIM, dtype=torch.bfloat16)
            hit, _ = await asyncio.gather(cache.retrieve(range(TOKENS), 0, out={0: out}), reading.tick())
            assert torch.equal(hit[0], rows)

    asyncio.run(both())
    assert writing.met
    assert reading.met


def test_cancelled_calls_leave_nothing_behind(large_service: str) -> None:  # case 27
    points = random.Random(0)
    rows = make_rows(1024, 1, 512)
    outcomes: list[Any] = []

    async def churn() -> None:
        async with await aconnect(service=large_service, model="cancelled") as cache:
            await cache.store(range(1024), {0: rows})
            for i in range(50):
                prompt = range(10_000 * i, 10_000 * i + 1024)
                calls = [
                    cache.retrieve(range(1024), 0),
                    cache.retrieve(range(1024), 0, dtype=torch.bfloat16),
                    cache.store(prompt, {0: rows}),
                ]
                tasks = [asyncio.create_task(call) for call in calls]
                await asyncio.sleep(points.uniform(0, 0.006))
                for task in tasks:
                    task.cancel()
                outcomes.extend(await asyncio.gather(*tasks, return_exceptions=True))
            assert torch.equal((await cache.retrieve(range(1024), 0))[0], rows)

    asyncio.run(churn())
    cancelled = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    assert cancelled
    assert all(isinstance(outcome, asyncio.CancelledError) for outcome in cancelled)
    outcomes.clear()
    actor = find_actor(large_service, HIDDEN_STATES, nodes_of(large_service)[0])

    def idle() -> bool:
        stats = ray.get(actor.stats.remote()).store
        return not (stats.num_leases or stats.num_reservations or stats.reserved_bytes or stats.stranded_bytes)

    wait_until(idle, "nothing is held")
    ray.get(actor.check.remote())


def test_many_at_once(large_service: str) -> None:  # case 17
    async def all_of_them() -> None:
        async with await aconnect(service=large_service, model="many") as cache:
            prompts = [range(100_000 * i, 100_000 * i + 256 * (i + 1) + 17) for i in range(8)]
            given = [torch.tensor(prompt, dtype=torch.float64)[:, None].expand(-1, 4) for prompt in prompts]
            await asyncio.gather(*(cache.store(p, {0: rows}) for p, rows in zip(prompts, given, strict=True)))
            hits = await asyncio.gather(*(cache.retrieve(prompt, 0) for prompt in prompts))
            for i, (hit, rows) in enumerate(zip(hits, given, strict=True)):
                assert hit.num_tokens == 256 * (i + 1)
                assert torch.equal(hit[0], rows[: hit.num_tokens])

    asyncio.run(all_of_them())


def test_a_cancelled_send_returns_only_when_the_rows_have_been_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows for another node are copied while they are sent: until that ends, they are not the caller's to overwrite."""
    begun, go_on, read = threading.Event(), threading.Event(), list[int]()
    rows = [1]

    def send(effect: Any) -> Any:
        begun.set()
        assert go_on.wait(30)
        read.extend(rows)
        raise ServiceError("nobody is there")

    monkeypatch.setattr(router, "_sent", send)

    def steps() -> Any:
        yield Call(RayPeer(None, ""), "store_rows", (), 30.0, carries_rows=True)  # type: ignore[arg-type]

    async def cancel() -> None:
        storing = asyncio.ensure_future(Router("none").arun(steps()))
        while not begun.is_set():
            await asyncio.sleep(0.001)
        for _ in range(3):
            storing.cancel()
            await asyncio.sleep(0.02)
        assert not storing.done()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await storing
        rows[0] = 2

    asyncio.run(cancel())
    assert read == [1]


def test_stores_in_the_background_are_carried_out_in_order(large_service: str) -> None:
    prompts = [[number] * 256 for number in range(20)]

    async def use() -> None:
        cache = await aconnect(large_service, "background")
        futures = [cache.store_async(tokens, {0: make_rows(256, tokens[0])}) for tokens in prompts]
        assert not futures[-1].done()
        assert (await futures[-1]).stored == 1
        assert all(future.done() and future.result().stored == 1 for future in futures)
        for tokens in prompts:
            assert torch.equal((await cache.retrieve(tokens, 0))[0], make_rows(256, tokens[0]))
        await cache.close()

    asyncio.run(use())
    with hs_cache.connect(service=large_service, model="background") as cache:
        tokens = [99] * 256
        assert cache.store_async(prompts[0], {0: make_rows(256, 0)}).result(30).present == 1
        copy = pickle.loads(pickle.dumps(cache))
        assert copy.store_async(tokens, {0: make_rows(256, 99)}).result(30).stored == 1
        assert cache.retrieve(tokens, 0).num_tokens == 256
