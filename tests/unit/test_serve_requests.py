"""Requests through Serve's own routing, with replicas in this process: they always arrive, and where they should.

Without Ray: what a replica is to its router is one object that says where it is and how long its queue is.
"""

import asyncio
import gc
import random
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, RequestMetadata
from ray.serve._private.request_router.common import ReplicaQueueLengthCache
from ray.serve.request_router import PendingRequest, ReplicaID

from hs_cache.integrations import serve
from hs_cache.integrations.affinity import AffinityPolicy, AffinitySettings, Demand, Prompt
from hs_cache.integrations.serve import PrefixAffinityRouter
from hs_cache.keys import KeySpace, TokenDatabase, normalise_token_ids
from tests.processes import wait_until

DEPLOYMENT = DeploymentID("engine", "app")
NODES = ("n0", "n1", "n2")
ANSWER_S = 60.0

pytestmark = pytest.mark.timeout(120)


class Replica:
    """One, as Serve's routers see it."""

    availability_zone = None
    is_cross_language = False

    def __init__(self, number: int, max_ongoing_requests: int = 100) -> None:
        self.replica_id = ReplicaID(f"r{number}", DEPLOYMENT)
        self.node_id = f"n{number}"
        self.max_ongoing_requests = max_ongoing_requests
        self.multiplexed_model_ids: set[str] = set()
        self.asked = 0
        self.queue_len: int | Exception = 0
        self.says = asyncio.Event()
        self.says.set()

    async def get_queue_len(self, *, deadline_s: float) -> int:
        self.asked += 1
        await self.says.wait()
        if isinstance(self.queue_len, Exception):
            raise self.queue_len
        return self.queue_len


class Finder:
    """What a cache would say, in no order of the questions."""

    def __init__(self, prefixes: dict[str, int] | None = None) -> None:
        self.prefixes = prefixes or {}
        self.asked: list[Collection[str]] = []
        self._database = TokenDatabase(KeySpace(chunk_size=16))

    def prepare(self) -> None:
        pass

    async def find(self, prompt: Prompt, nodes: Collection[str]) -> Demand | None:
        self.asked.append(set(nodes))
        prefixes = dict(self.prefixes)
        token_ids = normalise_token_ids(prompt.token_ids)
        await asyncio.sleep(random.random() / 1000)
        return Demand(len(token_ids), self._database.chunk_keys(token_ids), prefixes)


class Deployment:
    """A router and its replicas, and Serve's part in sending a request."""

    def __init__(self, finder: Finder | None = None, num_replicas: int = 3, **settings: Any) -> None:
        self.router = PrefixAffinityRouter(
            deployment_id=DEPLOYMENT, handle_source=DeploymentHandleSource.REPLICA, use_replica_queue_len_cache=True
        )
        self.router.initialize_state(**settings)
        self.finder = finder or Finder()
        if self.router._finder is not None:
            self.router._finder = self.finder  # type: ignore[assignment]
        self.replicas = [Replica(number) for number in range(num_replicas)]
        self.router.update_replicas(self.replicas)  # type: ignore[arg-type]
        self._number = 0

    def pending(self, *args: Any, request_id: str = "") -> PendingRequest:
        self._number += 1
        name = request_id or f"q{self._number}"
        return PendingRequest(list(args), {}, RequestMetadata(request_id=name, internal_request_id=name))

    async def send(self, pending: PendingRequest, rejected: int = 0) -> str:
        """As `ray.serve._private.router.AsyncioRouter` does, until it is answered; what is rejected is tried again."""
        for attempt in range(rejected + 1):
            chosen = self.router._choose_replica_for_request(pending, is_retry=attempt > 0)
            replica = await asyncio.wait_for(chosen, ANSWER_S)
            self.router.on_send_request(replica.replica_id)
            await asyncio.sleep(0)
            self.router.on_new_queue_len_info(replica.replica_id, 100 if attempt < rejected else 1)
        self.router.on_request_routed(pending, replica.replica_id, None)  # type: ignore[arg-type]
        self.router.decrement_queue_len_cache(replica.replica_id)
        self.router.on_request_completed(replica.replica_id, pending.metadata.internal_request_id)
        return str(replica.node_id)

    async def post(self, token_ids: Any, **more: Any) -> str:
        return await self.send(self.pending({"token_ids": token_ids, **more}))

    def routed(self) -> dict[str, int]:
        return {outcome: number for outcome, number in self.router.statistics().routed.items() if number}


def test_asked_are_the_nodes_of_the_replicas_and_the_longest_prefix_wins() -> None:
    async def scenario() -> None:
        deployment = Deployment(Finder({"n1": 64}), remember_s=0)
        assert [await deployment.post([number] * 80) for number in range(4)] == ["n1"] * 4
        assert deployment.finder.asked == [set(NODES)] * 4
        assert deployment.routed() == {"prefix": 4}

    asyncio.run(scenario())


def test_where_all_are_full_the_oldest_goes_first() -> None:
    async def scenario() -> None:
        deployment = Deployment(Finder({"n0": 64}), num_replicas=1, remember_s=0)
        (replica,) = deployment.replicas
        replica.max_ongoing_requests = replica.queue_len = 1
        deployment.router.on_new_queue_len_info(replica.replica_id, 1)
        order: list[int] = []

        async def send(number: int) -> None:
            pending = deployment.pending({"token_ids": [number] * 80})
            chosen = await asyncio.wait_for(deployment.router._choose_replica_for_request(pending), ANSWER_S)
            order.append(number)
            deployment.router.on_send_request(chosen.replica_id)
            await asyncio.sleep(0.02)
            deployment.router.on_request_routed(pending, chosen.replica_id, None)  # type: ignore[arg-type]
            deployment.router.decrement_queue_len_cache(chosen.replica_id)

        waiting = [asyncio.create_task(send(number)) for number in range(3)]
        await asyncio.sleep(0.5)  # they have been refused, and look less and less often
        assert order == []
        newcomers = []
        for number in range(3, 12):
            newcomers.append(asyncio.create_task(send(number)))
            await asyncio.sleep(0.01)
            if number == 3:
                deployment.router.decrement_queue_len_cache(replica.replica_id)
        await asyncio.gather(*waiting, *newcomers)
        assert order[:3] == [0, 1, 2]

    asyncio.run(scenario())


class Broken(Sequence[int]):
    """Tokens whose store is gone."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: Any) -> Any:
        raise RuntimeError("the store of these tokens is gone")


class BrokenRequest:
    """Whose attributes raise."""

    @property
    def token_ids(self) -> list[int]:
        raise KeyError("no tokens")


@pytest.mark.parametrize("broken", [{"token_ids": Broken()}, {"token_ids": "text"}, BrokenRequest()])
def test_a_request_arrives_whatever_its_prompt_raises(broken: Any, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        deployment = Deployment()
        assert await deployment.send(deployment.pending(broken)) in NODES
        assert await deployment.send(deployment.pending(broken)) in NODES
        assert await deployment.post([1] * 32) in NODES
        assert deployment.routed() == {"no_prompt": 2, "cold": 1}

    asyncio.run(scenario())
    assert caplog.text.count("since reading their prompts failed") == 1


@pytest.mark.parametrize(
    "broken", ["with_remembered", "rank", "sent", "keep"], ids=lambda name: f"AffinityPolicy.{name}"
)
def test_a_request_arrives_whatever_the_policy_raises(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise ZeroDivisionError(broken)

    monkeypatch.setattr(AffinityPolicy, broken, fails)

    async def scenario() -> None:
        deployment = Deployment()
        assert await deployment.post([1] * 32) in NODES

    asyncio.run(scenario())


@pytest.mark.parametrize("prompt_of", ["tests.unit.broken_module:f", "no.such.module:f"])
def test_requests_arrive_though_the_function_of_the_settings_cannot_be_loaded(
    prompt_of: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        deployment = Deployment(prompt_of=prompt_of)
        assert await deployment.post([1] * 32) in NODES

    asyncio.run(scenario())
    assert "request_router_kwargs are wrong: prompt_of" in caplog.text


def test_requests_arrive_though_a_function_of_ones_own_raises() -> None:
    async def scenario() -> None:
        deployment = Deployment(prompt_of="json:loads")
        assert await deployment.send(deployment.pending("no JSON")) in NODES
        assert await deployment.send(deployment.pending('{"token_ids": [1, 2]}')) in NODES
        assert deployment.routed() == {"no_prompt": 1, "cold": 1}

    asyncio.run(scenario())


def without(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if Ray had no such thing."""
    for owner in (*PrefixAffinityRouter.__mro__[1:], ReplicaQueueLengthCache):
        if name in vars(owner):
            monkeypatch.delattr(owner, name)


@pytest.mark.parametrize("name", [*serve.OF_ROUTER, *serve.OF_QUEUE_LENGTHS])
def test_what_a_ray_lacks_is_named_and_prefixes_play_no_part(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        deployment = Deployment()
        without(name, monkeypatch)
        deployment.router.initialize_state()
        assert deployment.router._finder is None

    asyncio.run(scenario())
    assert caplog.text.count("is routed without regard to prefixes: the request routers of ray") == 1
    assert name in caplog.text


@pytest.mark.parametrize("name", ["apply_locality_routing", "apply_multiplex_routing", "replica_queue_len_cache"])
def test_requests_arrive_with_a_ray_that_lacks_something(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    without(name, monkeypatch)

    async def scenario() -> None:
        deployment = Deployment()
        assert [await deployment.post([1] * 32) in NODES for _ in range(3)] == [True] * 3
        assert deployment.routed() == {}

    asyncio.run(scenario())


def test_in_a_burst_idle_replicas_get_equally_much_though_serve_counts_later() -> None:
    async def scenario() -> None:
        deployment = Deployment(spread=0, remember_s=0)
        await deployment.post([7] * 32)
        for trial in range(50):
            for replica in deployment.replicas:
                deployment.router.replica_queue_len_cache.update(replica.replica_id, 0)
            prompts = ([trial * 10 + number] * 32 for number in range(6))
            pending = [deployment.pending({"token_ids": prompt}) for prompt in prompts]
            chosen = await asyncio.gather(*map(deployment.router._choose_replica_for_request, pending))
            assert sorted(replica.node_id for replica in chosen) == sorted(NODES * 2)
            for request, replica in zip(pending, chosen, strict=True):
                deployment.router.on_send_request(replica.replica_id)
                deployment.router.on_request_routed(request, replica.replica_id, None)  # type: ignore[arg-type]

    asyncio.run(scenario())


def test_a_request_that_is_cancelled_counts_nowhere() -> None:
    async def scenario() -> None:
        deployment = Deployment(Finder({"n0": 32}))
        for replica in deployment.replicas:
            replica.max_ongoing_requests = 0  # it waits
        sending = asyncio.create_task(deployment.post([1] * 32))
        while not deployment.finder.asked:
            await asyncio.sleep(0)
        sending.cancel()
        await asyncio.wait([sending])
        del sending
        for replica in deployment.replicas:
            replica.max_ongoing_requests = 100
        assert await asyncio.wait_for(deployment.post([2] * 32), ANSWER_S) in NODES
        await settled(lambda: gc.collect() >= 0 and not deployment.router._requests)
        assert sum(deployment.routed().values()) == 1

    asyncio.run(scenario())


async def settled(condition: Callable[[], bool]) -> None:
    """Wait for it on a thread, while the loop goes on."""
    await asyncio.to_thread(wait_until, condition, "it has settled", timeout_s=ANSWER_S)


def test_a_rejected_request_is_asked_for_and_counted_once() -> None:
    async def scenario() -> None:
        deployment = Deployment()
        pending = deployment.pending({"token_ids": [2] * 64})
        await deployment.send(pending, rejected=2)
        assert len(deployment.finder.asked) == 1
        assert deployment.routed() == {"cold": 1}
        statistics = deployment.router.statistics()
        assert (statistics.prompt_tokens, statistics.prefix_tokens) == (64, 0)
        assert deployment.router._requests == {}

    asyncio.run(scenario())


def test_a_node_that_rejected_a_prompt_is_not_taken_to_have_it() -> None:
    async def scenario() -> None:
        deployment = Deployment(num_replicas=2)
        first = await deployment.send(deployment.pending({"token_ids": [2] * 64}), rejected=1)
        remembered = deployment.router._policy.with_remembered(
            Demand(64, TokenDatabase(KeySpace(chunk_size=16)).chunk_keys([2] * 64), {}), 0.0
        )
        assert list(remembered.prefixes) == [first]

    asyncio.run(scenario())


def test_a_request_that_waits_for_a_free_replica_asks_once() -> None:
    async def scenario() -> None:
        deployment = Deployment()
        for replica in deployment.replicas:
            replica.queue_len = replica.max_ongoing_requests = 1
        sending = asyncio.create_task(deployment.post([1] * 32))
        await settled(lambda: all(replica.asked >= 4 for replica in deployment.replicas))
        for replica in deployment.replicas:
            replica.queue_len = 0
        assert await sending in NODES
        assert len(deployment.finder.asked) == 1

    asyncio.run(scenario())


def test_two_calls_of_one_http_request_go_each_where_its_own_prefix_is() -> None:
    async def scenario() -> None:
        finder = Finder()
        deployment = Deployment(finder, remember_s=0)
        found = finder.find

        async def find(prompt: Prompt, nodes: Collection[str]) -> Demand | None:
            finder.prefixes = {f"n{next(iter(prompt.token_ids))}": 64}
            return await found(prompt, nodes)

        finder.find = find  # type: ignore[method-assign]
        for _ in range(20):
            sent: list[Coroutine[Any, Any, str]] = []
            for number in range(3):
                pending = deployment.pending({"token_ids": [number] * 80}, request_id="shared")
                sent.append(deployment.send(pending))
            assert await asyncio.gather(*sent) == list(NODES)

    asyncio.run(scenario())


def make_stale(deployment: Deployment) -> None:
    """As after some seconds without a request."""
    for replica in deployment.replicas:
        deployment.router.replica_queue_len_cache.invalidate_key(replica.replica_id)


def test_a_replica_that_is_slow_to_say_its_queue_keeps_what_it_has_and_nobody_waits_for_it() -> None:
    async def scenario() -> None:
        deployment = Deployment(Finder({"n1": 64}), remember_s=0)
        slow = deployment.replicas[1]
        await deployment.post([0] * 80)
        slow.says.clear()
        asked = slow.asked
        for number in range(20):
            make_stale(deployment)
            assert await deployment.post([number] * 80) == "n1"
        assert slow.asked == asked + 1  # one question in the background, and no other beside it
        slow.says.set()
        await settled(lambda: not deployment.router._lengths._asking)

    asyncio.run(scenario())


def test_a_new_replica_is_used_before_it_says_anything() -> None:
    async def scenario() -> None:
        deployment = Deployment(Finder({"n2": 64}), remember_s=0)
        for replica in deployment.replicas:
            replica.says.clear()
        assert await deployment.post([0] * 80) == "n2"
        for replica in deployment.replicas:
            replica.says.set()
        await settled(lambda: not deployment.router._lengths._asking)

    asyncio.run(scenario())


def test_a_replica_that_does_not_say_its_queue_in_five_seconds_comes_last_until_it_does(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(serve, "_PATIENCE_S", 0.05)

    async def scenario() -> None:
        deployment = Deployment(Finder({"n1": 64}), remember_s=0)
        hung = deployment.replicas[1]
        await deployment.post([0] * 80)
        hung.says.clear()
        make_stale(deployment)
        await deployment.post([1] * 80)
        await settled(lambda: not deployment.router._lengths._asking)
        assert await deployment.post([2] * 80) != "n1"
        hung.says.set()
        await settled(lambda: not deployment.router._lengths._asking)
        await deployment.post([3] * 80)
        await settled(lambda: deployment.router.replica_queue_len_cache.get(hung.replica_id) is not None)
        assert await deployment.post([4] * 80) == "n1"

    asyncio.run(scenario())
    assert caplog.text.count("doesn't say how long its queue is") == 1


def test_a_replica_that_cannot_be_reached_comes_last_until_it_answers() -> None:
    async def scenario() -> None:
        deployment = Deployment(Finder({"n1": 64}), remember_s=0)
        lost = deployment.replicas[1]
        await deployment.post([0] * 80)
        lost.queue_len = ActorUnavailableError("it is away", None)
        deployment.router.on_replica_actor_unavailable(lost.replica_id)
        assert await deployment.post([1] * 80) != "n1"
        lost.queue_len = 0
        await settled(lambda: not deployment.router._lengths._asking)
        await deployment.post([2] * 80)
        await settled(lambda: not deployment.router._lengths._asking)
        assert await deployment.post([3] * 80) == "n1"

    asyncio.run(scenario())


def test_what_ends_while_serve_knows_no_length_is_taken_off_the_last_one_known() -> None:
    async def scenario() -> None:
        deployment = Deployment(num_replicas=1)
        [replica] = deployment.replicas
        await deployment.post([0] * 80)
        deployment.router.on_send_request(replica.replica_id)  # type: ignore[arg-type]
        lengths = deployment.router._lengths
        replica.says.clear()
        assert lengths.of(replica) == 1  # type: ignore[arg-type]
        make_stale(deployment)
        deployment.router.on_request_completed(replica.replica_id, "q1")
        assert lengths.of(replica) == 0  # type: ignore[arg-type]
        replica.says.set()
        await settled(lambda: not lengths._asking)

    asyncio.run(scenario())


def test_settings_are_those_of_the_policy() -> None:
    async def scenario() -> None:
        assert Deployment(spread=0.5).router._policy._settings == AffinitySettings(spread=0.5)

    asyncio.run(scenario())
