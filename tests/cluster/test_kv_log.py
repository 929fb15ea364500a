"""KV that is taken back is not served from what was known before, whatever the KV actor's state; and it isn't asked for
what is known."""

import random
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import ray
import torch

from hs_cache.kv_presence import Presence
from hs_cache.messages import ReportNumber
from hs_cache.router import HIDDEN_STATES, KV, find_actor
from tests.builders import CHUNK_SIZE
from tests.cluster import remotes
from tests.cluster.children import make_rows
from tests.cluster.conftest import StartService
from tests.cluster.nodes import SLACK_S, client, pid_of, this_node, within
from tests.processes import kill, stopped, wait_until

ROWS = make_rows(12, 1)
PROMPT = range(12)


def new_client(service: str, **options: Any) -> Any:
    """A client whose prompts no other test has."""
    return client(service, **{"model": uuid.uuid4().hex, **options})


def asked(cache: Any) -> int:
    return int(cache.stats().node.kv_asked_total)


def wait_for_log(cache: Any) -> None:
    """Wait until stores make KV known without a question."""
    prompts = (range(first, first + CHUNK_SIZE) for first in range(10**6, 2 * 10**6, CHUNK_SIZE))

    def is_known() -> bool:
        prompt = next(prompts)
        cache.store(prompt, {0: ROWS[:CHUNK_SIZE]})
        before = asked(cache)
        return bool(cache.retrieve(prompt, 0)) and asked(cache) == before

    wait_until(is_known, "the log is followed")


def wait_for_note(service: str, keys: bytes) -> None:
    """Wait until the KV actor has heard of a store. Before, a resync or a gap of whichever engine makes it unknown."""
    kv = find_actor(service, KV, this_node())
    wait_until(lambda: set(ray.get(kv.presence.remote(keys))) == {Presence.PRESENT}, "the note has arrived")


def test_the_kv_actor_is_not_asked_for_what_is_known(service: str) -> None:
    cache = new_client(service)
    wait_for_log(cache)
    before = asked(cache)
    for first in range(0, 4000, 100):
        prompt = range(first, first + 12)
        assert cache.store(prompt, {0: ROWS}).stored == 3
        assert torch.equal(cache.retrieve(prompt, 0)[0], ROWS)
        assert cache.plan(prompt, 0).num_tokens == 12
    assert asked(cache) == before
    assert cache.kv.report_evicted(cache.chunk_keys(range(12))[2:])
    assert cache.retrieve(range(12), 0).num_tokens == 8
    assert asked(cache) == before + 1
    assert cache.retrieve(range(100, 112), 0).num_tokens == 12
    assert asked(cache) == before + 1, "the others are still known"


@pytest.mark.long
def test_evictions_and_stores_count_at_once(service: str) -> None:
    cache = new_client(service)
    wait_for_log(cache)
    for i in range(100):
        prompt, kept = range(100 * i, 100 * i + 12), i % 3
        keys = cache.chunk_keys(prompt)
        assert cache.store(prompt, {0: ROWS}).stored == 3
        assert cache.retrieve(prompt, 0).num_tokens == 12
        assert cache.kv.report_evicted(keys[kept : kept + 1])
        hit = cache.retrieve(prompt, 0)
        assert (hit.num_tokens, hit.ended_by) == (4 * kept, "kv_absent"), f"round {i}"
        assert cache.store(prompt, {0: ROWS}).prefix_tokens == 12
        assert torch.equal(cache.retrieve(prompt, 0)[0], ROWS), f"round {i}"
        assert cache.kv.report_evicted(keys) and cache.store(prompt, {0: ROWS}).present == 3
        assert torch.equal(cache.retrieve(prompt, 0)[0], ROWS), f"round {i}: nobody asked in between"


def test_what_else_takes_kv_back_counts_at_once(service: str) -> None:
    cache, other = new_client(service), new_client(service, engine="other")
    wait_for_log(cache)
    keys = cache.chunk_keys(PROMPT)

    def store() -> None:
        assert cache.store(PROMPT, {0: ROWS}).prefix_tokens == 12
        assert cache.retrieve(PROMPT, 0).num_tokens == 12

    store()
    assert cache.kv.resync(keys[:2])
    assert cache.retrieve(PROMPT, 0).num_tokens == 8
    store()
    assert cache.kv.clear()
    assert not cache.retrieve(PROMPT, 0)
    store()
    kv = find_actor(service, KV, this_node())
    ray.get(kv.report_evicted.remote(keys[1]))
    assert cache.retrieve(PROMPT, 0).num_tokens == 4
    store()
    wait_for_note(service, keys.blob)
    ray.get(kv.resync.remote(b"", "other"))
    assert other.kv.clear()
    assert cache.retrieve(PROMPT, 0).num_tokens == 12, "it says so again"


def test_an_index_that_overflows_or_has_a_gap_forgets(start_service: StartService) -> None:
    service = start_service(kv_index_capacity=1024)
    cache, kv = client(service), find_actor(service, KV, this_node())
    wait_for_log(cache)
    cache.store(PROMPT, {0: ROWS})
    wait_for_note(service, cache.chunk_keys(PROMPT).blob)
    assert cache.retrieve(PROMPT, 0).num_tokens == 12
    assert cache.kv.report_stored(b"".join(number.to_bytes(16, "big") for number in range(2000)))
    hit = cache.retrieve(PROMPT, 0)
    assert (hit.num_tokens, hit.ended_by) == (0, "kv_unknown")
    cache.store(PROMPT, {0: ROWS})
    assert torch.equal(cache.retrieve(PROMPT, 0)[0], ROWS)
    ray.get(kv.report_stored.remote(b"", number=ReportNumber(b"somebody", 7)))
    hit = cache.retrieve(PROMPT, 0)
    assert (hit.num_tokens, hit.ended_by) == (0, "kv_unknown"), "of a gap"
    cache.store(PROMPT, {0: ROWS})
    assert torch.equal(cache.retrieve(PROMPT, 0)[0], ROWS)


def test_what_one_engine_evicts_counts_once_the_other_has_evicted_it(service: str) -> None:
    one = new_client(service, engine="one", model="m")
    two = new_client(service, engine="two", model="m")
    wait_for_log(one)
    for cache in (one, two):
        cache.store(PROMPT, {0: ROWS})
    assert one.kv.report_evicted(PROMPT)
    assert one.retrieve(PROMPT, 0).num_tokens == two.retrieve(PROMPT, 0).num_tokens == 12
    assert two.kv.report_evicted(one.chunk_keys(PROMPT)[1:])
    assert one.retrieve(PROMPT, 0).num_tokens == two.retrieve(PROMPT, 0).num_tokens == 4
    assert one.store(PROMPT, {0: ROWS}).stored == 2
    assert two.retrieve(PROMPT, 0).num_tokens == 12
    assert one.kv.report_evicted(PROMPT)
    assert two.retrieve(PROMPT, 0).num_tokens == 4


def test_evictions_count_for_handles(service: str) -> None:
    model = uuid.uuid4().hex
    cache = client(service, model=model)
    wait_for_log(cache)
    actor, kv = (find_actor(service, kind, this_node()) for kind in (HIDDEN_STATES, KV))
    keys = cache.chunk_keys(PROMPT)
    for _ in range(5):
        ray.get(actor.store_hidden_states.remote(PROMPT, ROWS, model=model))
        before = asked(cache)
        assert torch.equal(ray.get(actor.retrieve_hidden_states.remote(PROMPT, model=model)), ROWS)
        assert asked(cache) == before
        ray.get(kv.report_evicted.remote(keys[2]))
        assert len(ray.get(actor.retrieve_hidden_states.remote(PROMPT, model=model))) == 8
        ray.get(kv.report_evicted.remote(keys[0]))
        assert ray.get(actor.retrieve_hidden_states.remote(PROMPT, model=model)) is None


@pytest.mark.long
def test_a_kv_actor_that_is_stopped_vouches_for_nothing(start_service: StartService) -> None:
    service = start_service(rpc_timeout_s=1)
    cache = client(service)
    wait_for_log(cache)
    cache.store(PROMPT, {0: ROWS})
    assert cache.retrieve(PROMPT, 0).num_tokens == 12
    kv, evicted = find_actor(service, KV, this_node()), cache.chunk_keys(PROMPT)[2]
    with stopped(pid_of(service, KV, this_node())):
        for _ in range(2):
            hit = within(1 + SLACK_S, lambda: cache.retrieve(PROMPT, 0))
            assert (hit.num_tokens, hit.ended_by) == (0, "kv_unknown")
        assert within(1 + SLACK_S, lambda: cache.store(range(50, 62), {0: ROWS})).stored == 3
        assert not cache.retrieve(range(50, 62), 0)
        report = kv.report_evicted.remote(evicted)
    ray.get(report)
    assert cache.retrieve(PROMPT, 0).num_tokens in (0, 8)
    wait_until(lambda: cache.retrieve(PROMPT, 0).num_tokens == 8, "the KV actor is asked again")
    wait_until(lambda: cache.retrieve(range(50, 62), 0).num_tokens == 12, "it has heard of the store")
    assert cache.store(PROMPT, {0: ROWS}).stored == 1
    before = asked(cache)
    assert torch.equal(cache.retrieve(PROMPT, 0)[0], ROWS)
    assert asked(cache) == before, "its log is followed as before"


@pytest.mark.long
def test_what_a_killed_kv_actor_has_said_counts_for_nothing(start_service: StartService) -> None:
    service = start_service()
    cache = client(service)
    wait_for_log(cache)
    for first in (0, 100):
        cache.store(range(first, first + 12), {0: ROWS})
        assert cache.retrieve(range(first, first + 12), 0).num_tokens == 12
    keys = cache.chunk_keys(range(100, 112))
    pid = pid_of(service, KV, this_node())
    kill(pid)
    assert cache.retrieve(PROMPT, 0).ended_by == "kv_unknown"
    assert pid_of(service, KV, this_node()) != pid
    wait_for_log(cache)  # of the new one
    assert cache.retrieve(PROMPT, 0).ended_by == "kv_unknown"
    assert cache.store(PROMPT, {0: ROWS}).present == 3
    assert torch.equal(cache.retrieve(PROMPT, 0)[0], ROWS)
    assert cache.retrieve(range(100, 112), 0).ended_by == "kv_unknown"
    assert cache.kv.resync(list(keys))
    # For a moment after its silence the KV side isn't asked.
    assert torch.equal(cache.retrieve(range(100, 112), 0, wait_s=10)[0], ROWS)
    assert not cache.retrieve(PROMPT, 0), "not in the list"


# All at the same time


class Ledger:
    """Which chunks nobody may be served: their eviction is acknowledged, and no store of them has begun since."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begun: dict[bytes, int] = {}
        self._storing: dict[bytes, int] = {}
        self._absent: dict[bytes, int] = {}

    def begin_store(self, keys: Sequence[bytes]) -> None:
        with self._lock:
            for key in keys:
                self._begun[key] = self._begun.get(key, 0) + 1
                self._storing[key] = self._storing.get(key, 0) + 1

    def end_store(self, keys: Sequence[bytes]) -> None:
        with self._lock:
            for key in keys:
                self._storing[key] -= 1

    def quiet(self, keys: Sequence[bytes]) -> dict[bytes, int]:
        """Those that nobody is storing now, and how often somebody has."""
        with self._lock:
            return {key: self._begun.get(key, 0) for key in keys if not self._storing.get(key)}

    def evicted(self, before: dict[bytes, int]) -> None:
        """After an eviction before which they were quiet."""
        with self._lock:
            self._absent.update({key: begun for key, begun in before.items() if self._begun.get(key, 0) == begun})

    def absent(self, keys: Sequence[bytes]) -> set[bytes]:
        with self._lock:
            return {key for key in keys if self._absent.get(key) == self._begun.get(key, 0)}


@pytest.mark.long
def test_no_retrieve_serves_what_was_evicted_amid_stores(start_service: StartService) -> None:
    service = start_service(rpc_timeout_s=20)
    model = uuid.uuid4().hex
    watch = client(service, model=model)
    wait_for_log(watch)
    actor, kv = (find_actor(service, kind, this_node()) for kind in (HIDDEN_STATES, KV))
    # Pairs of prompts have a head in common, all have a first chunk in common.
    prompts = [(*range(4), *range(100 + i // 2, 108 + i // 2), *range(1000 * i, 1000 * i + 8)) for i in range(8)]
    keys = [list(watch.chunk_keys(prompt)) for prompt in prompts]
    rows = torch.tensor(prompts, dtype=torch.float32)[:, :, None].expand(-1, -1, 8)
    ledger, until = Ledger(), time.monotonic() + 5
    wrong: list[str] = []
    counts = {"served": 0, "withheld": 0}

    def store(cache: Any, i: int) -> None:
        cache.store(prompts[i], {0: rows[i]})

    def store_by_handle(_cache: Any, i: int) -> None:
        ray.get(actor.store_hidden_states.remote(prompts[i], rows[i], model=model))

    def store_elsewhere(cache: Any, i: int) -> None:
        ray.get(ray.remote(remotes.store).options(num_cpus=0).remote(cache, prompts[i], {0: rows[i].clone()}, 0))

    def retrieve(cache: Any, i: int) -> torch.Tensor:
        hit = cache.retrieve(prompts[i], 0)
        return hit[0].clone() if hit else rows[i][:0]

    def retrieve_by_handle(_cache: Any, i: int) -> torch.Tensor:
        found = ray.get(actor.retrieve_hidden_states.remote(prompts[i], model=model))
        return rows[i][:0] if found is None else found

    def report(cache: Any, gone: Sequence[bytes]) -> None:
        assert cache.kv.report_evicted(list(gone))

    def report_by_handle(_cache: Any, gone: Sequence[bytes]) -> None:
        ray.get(kv.report_evicted.remote(b"".join(gone)))

    def writing(put: Callable[[Any, int], None]) -> Callable[[Any, random.Random], None]:
        def step(cache: Any, chance: random.Random) -> None:
            i = chance.randrange(len(prompts))
            ledger.begin_store(keys[i])
            put(cache, i)
            ledger.end_store(keys[i])

        return step

    def reading(get: Callable[[Any, int], torch.Tensor]) -> Callable[[Any, random.Random], None]:
        def step(cache: Any, chance: random.Random) -> None:
            i = chance.randrange(len(prompts))
            before = ledger.absent(keys[i])
            found = get(cache, i)
            absent = before & ledger.absent(keys[i])
            if not torch.equal(found, rows[i][: len(found)]):
                wrong.append(f"prompt {i}: other rows")
            if absent & set(keys[i][: len(found) // CHUNK_SIZE]):
                wrong.append(f"prompt {i}: {len(found)} tokens, and a chunk of them is gone")
            counts["served"] += len(found) > 0
            counts["withheld"] += bool(absent)

        return step

    def evicting(tell: Callable[[Any, Sequence[bytes]], None]) -> Callable[[Any, random.Random], None]:
        def step(cache: Any, chance: random.Random) -> None:
            of = chance.choice(keys)
            gone = of[chance.randrange(len(of)) :]
            before = ledger.quiet(gone)
            tell(cache, gone)
            ledger.evicted(before)

        return step

    def run(step: Callable[[Any, random.Random], None], seed: int) -> None:
        cache, chance = client(service, model=model), random.Random(seed)
        try:
            while time.monotonic() < until and not wrong:
                step(cache, chance)
        except BaseException as error:
            wrong.append(repr(error))

    steps = [
        *(writing(put) for put in (store, store_by_handle, store_elsewhere)),
        *(reading(get) for get in (retrieve, retrieve, retrieve_by_handle)),
        *(evicting(tell) for tell in (report, report_by_handle)),
    ]
    threads = [threading.Thread(target=run, args=(step, seed)) for seed, step in enumerate(steps)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert min(counts.values()) > 0, counts
    ray.get(actor.check.remote())
    for i, prompt in enumerate(prompts):
        assert watch.store(prompt, {0: rows[i]}).prefix_tokens == len(prompt)
        assert torch.equal(watch.retrieve(prompt, 0)[0], rows[i])
