"""vLLM-Omni's connector over a real service: between processes, between nodes, and through failures."""

import gc
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import ray
import torch
from ray.cluster_utils import Cluster

import hs_cache
from hs_cache.errors import InvalidInputError
from hs_cache.integrations.vllm_omni import HiddenStateCacheConnector
from hs_cache.messages import StoreStatistics
from hs_cache.router import HIDDEN_STATES, KV, find_actor
from tests.cluster import stages
from tests.cluster.conftest import StartService
from tests.cluster.nodes import SLACK_S, add_node, on_node, pid_of, removed_at_the_end, this_node, within
from tests.processes import Child, kill, wait_until

pytestmark = pytest.mark.long

LARGE = {"num_tokens": 1024, "hidden_dim": 512}


def connector(service: str, **config: Any) -> HiddenStateCacheConnector:
    return HiddenStateCacheConnector({"service": service, "stage_id": 0, "role": "dual", **config})


class Processes:
    """Stages in processes of their own, which take seconds to start: the tests share them until one kills one."""

    def __init__(self) -> None:
        self._running: dict[tuple[str, str, str], Any] = {}

    def stage(self, name: str, service: str, node_id: str) -> Any:
        """The actor of that name, of a service and on a node; started if there is none."""
        if (name, service, node_id) not in self._running:
            made = ray.remote(stages.Stage).options(**on_node(node_id)).remote({"service": service})
            self._running[name, service, node_id] = made
        return self._running[name, service, node_id]

    def kill(self, stage: Any) -> None:
        """And start another one when it is asked for."""
        (asked_for,) = [what for what, running in self._running.items() if running is stage]
        del self._running[asked_for]
        kill(ray.get(stage.where.remote())[1])


@pytest.fixture(scope="module")
def processes(cluster: Cluster) -> Processes:
    return Processes()


def store_on(service: str, node_id: str) -> StoreStatistics:
    actor = find_actor(service, HIDDEN_STATES, node_id)
    ray.get(actor.check.remote())
    stats: StoreStatistics = ray.get(actor.stats.remote()).store
    return stats


def wait_until_empty(service: str, node_id: str) -> None:
    def empty() -> bool:
        gc.collect()
        stats = store_on(service, node_id)
        return stats.free_bytes == stats.capacity_bytes and not stats.num_kept and not stats.num_leases

    wait_until(empty, "the pool is back at its base line")


@pytest.fixture(scope="module")
def other_node(cluster: Cluster, service: str) -> Iterator[str]:
    """A node besides this one, on which the service has a pool too."""
    with removed_at_the_end(cluster) as added:
        added.append(add_node(cluster))
        node_id = str(added[0].node_id)
        pid_of(service, HIDDEN_STATES, node_id)
        yield node_id


@pytest.fixture(scope="module")
def here_only(start_service: StartService) -> str:
    """A service with a pool on this node and no other; its actors may be killed."""
    return start_service(node_selector={"labels": {"ray.io/node-id": this_node()}})


@pytest.fixture
def here(service: str) -> Iterator[HiddenStateCacheConnector]:
    with connector(service) as made:
        yield made
    wait_until_empty(service, this_node())


def test_what_is_put_is_got_once(here: HiddenStateCacheConnector) -> None:
    assert here.get("0", "1", "a") is None
    ok, size, metadata = here.put("0", "1", "a", stages.make_payload(1))
    assert ok
    assert metadata is not None
    json.dumps(metadata)
    for other in (("0", "2", "a"), ("1", "0", "a"), ("0", "1", "a_"), ("0", "1", "")):
        assert here.get(*other) is None
    taken = here.get("0", "1", "a")
    assert taken is not None
    data, nbytes = taken
    assert nbytes == size > 512 * 256 * 4
    assert stages.is_payload(data, 1)
    assert here.get("0", "1", "a") is None
    assert here.get("0", "1", "a", metadata) is None
    assert here.cleanup("a") is False


def test_what_is_falsy_is_delivered(here: HiddenStateCacheConnector) -> None:
    falsy: list[Any] = [None, 0, False, "", b"", {}, [], ()]
    falsy += [torch.empty(0), torch.empty(3, 0), np.empty((0, 2)), torch.tensor(0)]
    for number, data in enumerate(falsy):
        assert here.put("0", "1", f"falsy {number}", data)[0]
    for number, data in enumerate(falsy):
        taken = here.get("0", "1", f"falsy {number}")
        assert taken is not None, data
        assert type(taken[0]) is type(data)
        if isinstance(data, torch.Tensor | np.ndarray):
            assert (taken[0].shape, taken[0].dtype) == (data.shape, data.dtype)
        else:
            assert taken[0] == data


def test_metadata(here: HiddenStateCacheConnector) -> None:
    ways: dict[str, Callable[[Any], Any]] = {
        "none": lambda given: None,
        "plain": lambda given: given,
        "by key": lambda given: {"k": given},
        "of another connector": lambda given: {"source_host": "10.0.0.1", "source_port": 50051},
        "nonsense": lambda given: {"hs_cache": {"node": 5}},
    }
    for way, of in ways.items():
        _, _, given = here.put("0", "1", "k", way)
        taken = here.get("0", "1", "k", of(given))
        assert taken is not None, way
        assert taken[0] == way


def test_metadata_of_another_node_is_believed(here: HiddenStateCacheConnector) -> None:
    here.put("0", "1", "k", [1])
    assert within(4 + SLACK_S, lambda: here.get("0", "1", "k", {"hs_cache": {"node": "f" * 56}})) is None
    assert here.get("0", "1", "k") is not None


def test_a_put_replaces_what_is_still_there(here: HiddenStateCacheConnector) -> None:
    _, _, first = here.put("0", "1", "k", torch.zeros(100_000))
    here.put("0", "1", "k", [2])
    taken = here.get("0", "1", "k", first)
    assert taken is not None
    assert taken[0] == [2]
    assert here.get("0", "1", "k") is None


def test_cleanup_takes_the_exact_key(here: HiddenStateCacheConnector, service: str) -> None:
    for key in ("req", "req_0", "req_0_1"):
        here.put("0", "1", key, key)
    here.put("0", "2", "req_0", "other stage")
    assert here.cleanup("re") is False
    assert here.cleanup("req_0") is True
    assert here.cleanup("req_0") is False
    assert here.get("0", "1", "req_0") is here.get("0", "2", "req_0") is None
    with connector(service) as receiver:
        assert receiver.cleanup("req") is False  # it knows no route
        assert receiver.get("0", "1", "another") is None
        assert receiver.cleanup("req") is True
    assert here.get("0", "1", "req") is None
    taken = here.get("0", "1", "req_0_1")
    assert taken is not None
    assert taken[0] == "req_0_1"


def test_namespaces_do_not_meet(here: HiddenStateCacheConnector, service: str) -> None:
    here.put("0", "1", "k", 1)
    with connector(service, namespace="other") as other:
        assert other.get("0", "1", "k") is None
        other.put("0", "1", "k", 2)
        taken = here.get("0", "1", "k")
        assert taken is not None
        assert taken[0] == 1


def test_a_large_payload_is_a_view_that_is_ones_own(here: HiddenStateCacheConnector, service: str) -> None:
    rows = torch.randn(1024, 256)
    here.put("0", "1", "k", {"rows": rows, "tail": rows[-5:]})
    taken = here.get("0", "1", "k")
    assert taken is not None
    data = taken[0]
    assert store_on(service, this_node()).stranded_bytes >= rows.nbytes  # not copied: it stays until it is let go of
    assert torch.equal(data["rows"], rows)
    data["rows"].add_(1)
    assert torch.equal(data["tail"], rows[-5:] + 1)
    for _ in range(20):
        assert here.put("0", "1", "churn", torch.zeros(1024, 1024))[0]
        here.cleanup("churn")
    assert torch.equal(data["rows"], rows + 1)


def test_more_than_there_is_room_for(here: HiddenStateCacheConnector, caplog: pytest.LogCaptureFixture) -> None:
    too_much = torch.zeros(5 << 20)
    for _ in range(3):
        assert here.put("0", "1", "k", too_much) == (False, 0, None)
    assert here.get("0", "1", "k") is None
    assert sum("no room" in record.message for record in caplog.records) == 1
    assert here.health()["put_failures"] == 3
    assert here.put("0", "1", "k", 1)[0]


def test_what_is_put_and_got_by_many_threads(here: HiddenStateCacheConnector) -> None:
    def transfer(number: int) -> bool:
        rows = torch.full((1000 + number,), number)
        if not here.put("0", "1", f"r{number}", {"rows": rows, "number": number})[0]:
            return False
        taken = here.get_with_deadline("0", "1", f"r{number}", deadline=time.monotonic() + 20)
        return taken is not None and taken[0]["number"] == number and torch.equal(taken[0]["rows"], rows)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(transfer, range(200)))


def test_two_that_get_at_once(here: HiddenStateCacheConnector) -> None:
    for number in range(30):
        here.put("0", "1", "k", torch.full((50_000,), number))
        barrier = threading.Barrier(2)

        def take(barrier: threading.Barrier = barrier) -> Any:
            barrier.wait()
            return here.get("0", "1", "k")

        with ThreadPoolExecutor(2) as pool:
            both = [future.result() for future in [pool.submit(take), pool.submit(take)]]
        found = [taken[0] for taken in both if taken is not None]
        assert found
        assert all(bool((rows == number).all()) and len(rows) == 50_000 for rows in found)
        assert here.get("0", "1", "k") is None


def test_replaced_while_it_is_got(here: HiddenStateCacheConnector) -> None:
    stop = threading.Event()
    last = [0]

    def keep_putting() -> None:
        while not stop.is_set():
            last[0] += 1
            assert here.put("0", "1", "k", torch.full((20_000 + last[0] % 7,), last[0]))[0]

    with ThreadPoolExecutor(1) as pool:
        putting = pool.submit(keep_putting)
        seen, deadline = 0, time.monotonic() + 20
        try:
            for _ in range(100):
                taken = here.get_with_deadline("0", "1", "k", deadline=deadline)
                assert taken is not None
                value = int(taken[0][0])
                assert bool((taken[0] == value).all())
                assert len(taken[0]) == 20_000 + value % 7
                assert value > seen, "an old one came back"
                seen = value
        finally:
            stop.set()
        putting.result()
    here.cleanup("k")


def test_get_with_deadline_waits(here: HiddenStateCacheConnector) -> None:
    begin = time.monotonic()
    assert here.get_with_deadline("0", "1", "k", deadline=begin + 0.3) is None
    assert 0.3 <= time.monotonic() - begin < 0.3 + SLACK_S
    assert within(1, lambda: here.get_with_deadline("0", "1", "k", deadline=begin)) is None
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(here.get_with_deadline, "0", "1", "k", deadline=time.monotonic() + 20)
        assert here.put("0", "1", "k", "late")[0]
        taken = waiting.result()
    assert taken is not None
    assert taken[0] == "late"


def test_bad_input(here: HiddenStateCacheConnector, service: str) -> None:
    bad: list[tuple[Any, str]] = [
        (lambda: here.put("0", "1", 5, 1), "put_key: got int, expected str"),  # type: ignore[arg-type]
        (lambda: here.put(None, "1", "k", 1), "from_stage: got NoneType, expected str"),  # type: ignore[arg-type]
        (lambda: here.get("0", 1.5, "k"), "to_stage: got float"),  # type: ignore[arg-type]
        (lambda: here.get("0", "1", b"k"), "get_key: got bytes"),  # type: ignore[arg-type]
        (lambda: here.cleanup(7), "request_id: got int"),  # type: ignore[arg-type]
        (lambda: here.get_with_deadline("0", "1", "k", deadline="x"), "deadline: got 'x'"),  # type: ignore[arg-type]
        (lambda: here.put("0", "1", "k", torch.ones(2).to_sparse()), "data: got a sparse"),
        (lambda: here.put("0", "1", "k", (i for i in ())), "data: got an object that can't be pickled"),
        (lambda: connector(service, timeout_s=0), "timeout_s: got 0, expected above 0"),
        (lambda: connector(service, timeout_s="1"), "timeout_s: got '1', expected seconds"),
        (lambda: connector(service, namespace=5), "namespace: got 5, expected str"),
        (lambda: connector(5), "service: got 5, expected str"),  # type: ignore[arg-type]
        (lambda: HiddenStateCacheConnector([]), "config: got list, expected a mapping"),  # type: ignore[arg-type]
    ]
    for call, message in bad:
        with pytest.raises(InvalidInputError) as caught:
            call()
        assert message in str(caught.value)
    assert here.get("0", "1", "k") is None


def test_settings_under_extra_and_stages_as_numbers(service: str) -> None:
    with HiddenStateCacheConnector({"extra": {"service": service}, "from_stage": 0, "to_stage": 1}) as made:
        with connector(service) as producer:
            producer.put("0", "1", "k", "x")
            assert made.cleanup("k") is True  # by the route of its settings
        made.put(0, 1, "k", "y")  # type: ignore[arg-type]
        taken = made.get("0", "1", "k")
        assert taken is not None
        assert taken[0] == "y"


def test_close_takes_back_what_was_not_got(service: str) -> None:
    made = connector(service)
    rows = torch.randn(500, 500)
    made.put("0", "1", "taken", rows)
    taken = made.get("0", "1", "taken")
    for number in range(50):
        assert made.put("0", "1", f"r{number}", number)[0]
    assert made.health()["outstanding"] == 51  # it hasn't looked for what was taken yet
    made.close()
    made.close()
    assert taken is not None
    assert torch.equal(taken[0], rows)
    assert made.put("0", "1", "k", 1) == (False, 0, None)
    assert made.get("0", "1", "k") is None
    assert within(1, lambda: made.get_with_deadline("0", "1", "k", deadline=time.monotonic() + 30)) is None
    assert made.cleanup("k") in (None, False)
    assert made.health()["status"] == "unhealthy"
    made.reap_consumed()
    made.abandon_get("k")
    del taken
    wait_until_empty(service, this_node())


def test_collected_without_close(service: str) -> None:
    made = connector(service)
    assert made.put("0", "1", "k", torch.zeros(1000))[0]
    del made
    wait_until_empty(service, this_node())


def test_what_others_have_taken_is_forgotten(here: HiddenStateCacheConnector, service: str) -> None:
    with connector(service) as receiver:
        for number in range(300):
            _, size, _ = here.put("0", "1", f"r{number}", number)
            if number % 2:
                assert receiver.get("0", "1", f"r{number}") == (number, size)
        assert here.health()["outstanding"] < 300
        here.reap_consumed()
        assert here.health()["outstanding"] == 150
        for number in range(300):
            assert here.cleanup(f"r{number}") is not bool(number % 2)
    assert here.health()["outstanding"] == 0
    assert (here.health()["reclaimed"], here.health()["status"]) == (150, "healthy")


def test_what_nobody_takes_is_dropped(service: str) -> None:
    with connector(service, ttl_s=0.1) as made, connector(service) as receiver:
        assert made.put("0", "1", "aborted", torch.zeros(1000))[0]

        def expired() -> bool:
            made.put("0", "1", "alive", 1)
            return bool(made.health()["expired"])

        wait_until(expired, "it has expired")
        wait_until(lambda: store_on(service, this_node()).num_kept == 1, "it is gone")
        assert receiver.get("0", "1", "aborted") is None


def test_between_processes_of_a_node(service: str, processes: Processes) -> None:
    producer, consumer = (processes.stage(name, service, this_node()) for name in ("producer", "consumer"))
    gets = ray.get(consumer.health.remote())["gets"]
    metadata = None
    for seed in range(1, 4):
        ok, _, metadata = ray.get(producer.put.remote(f"r{seed}", seed, **LARGE))
        assert ok
        assert ray.get(consumer.get.remote(f"r{seed}", seed, metadata if seed % 2 else None, **LARGE)) == "right"
    for seed in range(6):
        assert ray.get(producer.put.remote("churn", 50 + seed, **LARGE))[0]
        assert ray.get(producer.cleanup.remote(["churn"])) == 1
    assert ray.get(consumer.holds.remote(3, **LARGE))
    assert ray.get(consumer.get_now.remote("r3")) is None
    health = ray.get(consumer.health.remote())
    assert (health["status"], health["gets"], health["node"]) == ("healthy", gets + 3, this_node())
    ray.get(consumer.let_go.remote())
    wait_until_empty(service, this_node())


def test_a_driver_of_its_own(service: str, address: str) -> None:
    with connector(service) as here:
        here.put("0", "1", "to the child", torch.arange(1000.0))
        arguments = {"address": address, "service": service}
        assert Child("relay", arguments).result() == 499500.0
        # It has ended, and what it put went with it.
    wait_until_empty(service, this_node())


def test_a_consumer_that_is_killed(here: HiddenStateCacheConnector, service: str, processes: Processes) -> None:
    consumer = processes.stage("consumer", service, this_node())
    assert here.put("0", "1", "r", stages.make_payload(1, **LARGE))[0]
    assert ray.get(consumer.get.remote("r", 1, **LARGE)) == "right"
    assert store_on(service, this_node()).stranded_bytes > 0
    processes.kill(consumer)
    wait_until_empty(service, this_node())


def test_a_producer_that_is_killed(here: HiddenStateCacheConnector, service: str, processes: Processes) -> None:
    producer = processes.stage("producer", service, this_node())
    assert ray.get(producer.put.remote("got", 1, **LARGE))[0]
    taken = here.get("0", "1", "got")
    assert ray.get(producer.put_all.remote([f"r{i}" for i in range(300)])) == 300
    assert store_on(service, this_node()).num_kept == 300
    assert here.get("0", "1", "r7") is not None

    processes.kill(producer)
    wait_until(lambda: store_on(service, this_node()).num_kept == 0, "the dead producer's payloads are gone")
    assert here.get("0", "1", "r8") is None
    assert taken is not None
    assert stages.is_payload(taken[0], 1, **LARGE)


def test_a_thousand_puts_and_cleanups(here: HiddenStateCacheConnector, service: str) -> None:
    keys = [f"r{number}" for number in range(1000)]
    for key in keys:
        assert here.put("0", "1", key, {"rows": torch.zeros(500), "key": key})[0]
    assert store_on(service, this_node()).num_kept == 1000
    taken = [here.get("0", "1", key) for key in keys[:100]]
    assert [found[0]["key"] for found in taken if found is not None] == keys[:100]
    assert [here.cleanup(key) for key in keys] == [False] * 100 + [True] * 900
    stats = store_on(service, this_node())
    assert (stats.num_kept, stats.num_chunks) == (0, 0)


def test_beside_the_cache(service: str) -> None:
    cache: Any = hs_cache.connect(service=service)
    rows = torch.randn(64, 32)
    with connector(service) as here:
        here.put("0", "1", "k", torch.arange(100))
        for seed in range(60):
            cache.store(range(1000 * seed, 1000 * seed + 64), {0: rows, 1: rows, 2: torch.randn(64, 2000)})
        assert cache.stats().node.store.evicted_chunks_total > 0
        taken = here.get("0", "1", "k")
        assert taken is not None
        assert torch.equal(taken[0], torch.arange(100))
    for seed in range(60):
        for key in cache.chunk_keys(range(1000 * seed, 1000 * seed + 64)):
            cache.drop_key(key)
    wait_until_empty(service, this_node())


def test_the_node_actor_is_killed(here_only: str) -> None:
    with connector(here_only, timeout_s=2.0) as here:
        here.put("0", "1", "lost", 1)
        here.put("0", "1", "large", torch.zeros(100_000))
        held = here.get("0", "1", "large")
        kill(pid_of(here_only, HIDDEN_STATES, this_node()))
        begin = time.monotonic()
        assert here.get_with_deadline("0", "1", "lost", deadline=begin + 1) is None
        assert time.monotonic() - begin < 1 + SLACK_S
        wait_until(lambda: here.health()["status"] == "healthy", "the actor is back")
        wait_until(lambda: here.put("0", "1", "new", 2)[0], "it takes payloads again")
        taken = here.get_with_deadline("0", "1", "new", deadline=time.monotonic() + 10)
        assert taken is not None
        assert taken[0] == 2
        assert here.get("0", "1", "lost") is None
        assert here.cleanup("lost") is False
        assert held is not None
        assert not held[0].any()
    del held
    wait_until_empty(here_only, this_node())


def test_kv_is_not_asked(here_only: str) -> None:
    kill(pid_of(here_only, KV, this_node()))
    with connector(here_only) as here:
        assert within(SLACK_S, lambda: here.put("0", "1", "k", 1))[0]
        assert within(SLACK_S, lambda: here.get("0", "1", "k")) is not None


def test_between_nodes(service: str, other_node: str, processes: Processes) -> None:
    producer = processes.stage("producer", service, other_node)
    with connector(service) as here:
        for seed in (1, 2, 3, 4):
            ok, _, metadata = ray.get(producer.put.remote(f"r{seed}", seed, **LARGE))
            assert ok
            given = metadata if seed > 2 else None
            deadline = time.monotonic() + 10
            taken = here.get_with_deadline("0", "1", f"r{seed}", given, deadline=deadline)
            assert taken is not None
            assert stages.is_payload(taken[0], seed, **LARGE)
            assert here.get_with_deadline("0", "1", f"r{seed}", given, deadline=time.monotonic() + 0.2) is None
        assert store_on(service, other_node).num_kept == 0
        wait_until_empty(service, other_node)
        # And the other way: what the driver puts arrives there.
        assert here.put("0", "1", "back", stages.make_payload(5, **LARGE))[0]
        assert ray.get(producer.get.remote("back", 5, **LARGE)) == "right"

        assert ray.get(producer.put_all.remote([f"s{i}" for i in range(100)])) == 100
        assert ray.get(producer.holds.remote(5, **LARGE))
        assert stages.is_payload(taken[0], 4, **LARGE)
        # The consumer's cleanup finds them there, and so does the producer's.
        wait_until(lambda: here.cleanup("s0"), "the directory knows")
        assert ray.get(producer.cleanup.remote([f"s{i}" for i in range(100)])) == 99
        ray.get(producer.let_go.remote())
        wait_until_empty(service, other_node)


def test_the_same_key_on_two_nodes(
    here: HiddenStateCacheConnector, service: str, other_node: str, processes: Processes
) -> None:
    there = processes.stage("producer", service, other_node)
    assert ray.get(there.put_data.remote("r", 1))[0]
    taken = here.get_with_deadline("0", "1", "r", deadline=time.monotonic() + 10)
    assert taken is not None
    assert taken[0] == 1
    _, _, metadata_there = ray.get(there.put_data.remote("r", 2))
    metadata = None

    def replaced() -> bool:
        nonlocal metadata
        _, _, metadata = here.put("0", "1", "r", stages.make_payload(3))
        return store_on(service, other_node).num_kept == 0

    wait_until(replaced, "the other node's payload is replaced")
    assert ray.get(there.get.remote("r", 3, metadata)) == "right"
    assert ray.get(there.get_now.remote("r")) is None
    assert here.get("0", "1", "r", metadata_there) is None


def test_a_producer_on_another_node_is_killed(
    here: HiddenStateCacheConnector, service: str, other_node: str, processes: Processes
) -> None:
    producer = processes.stage("producer", service, other_node)
    assert ray.get(producer.put.remote("r", 1))[0]
    assert ray.get(producer.put.remote("s", 2))[0]
    processes.kill(producer)
    wait_until_empty(service, other_node)
    assert here.get_with_deadline("0", "1", "r", deadline=time.monotonic() + 0.5) is None
    with connector(service) as again:
        assert again.put("0", "1", "r", 3)[0]
        taken = here.get("0", "1", "r")
        assert taken is not None
        assert taken[0] == 3


def test_a_producer_without_a_pool(here_only: str, other_node: str, processes: Processes) -> None:
    """Its node has none: another one's actor stores for it, and its payloads are kept by nobody."""
    producer = processes.stage("producer", here_only, other_node)
    with connector(here_only) as here:
        for seed in (1, 2):
            assert ray.get(producer.put.remote(f"r{seed}", seed, **LARGE))[0]
            taken = here.get_with_deadline("0", "1", f"r{seed}", deadline=time.monotonic() + 10)
            assert taken is not None
            assert stages.is_payload(taken[0], seed, **LARGE)
        assert ray.get(producer.put.remote("r3", 3, **LARGE))[0]
        assert ray.get(producer.get.remote("r3", 3, **LARGE)) == "right"
        del taken
    assert store_on(here_only, this_node()).num_kept == 0
    assert ray.get(producer.put_all.remote([f"s{i}" for i in range(20)])) == 20
    assert ray.get(producer.cleanup.remote(["s3", "s4"])) == 2
    ray.get([producer.let_go.remote(), producer.close.remote()])
    wait_until_empty(here_only, this_node())
