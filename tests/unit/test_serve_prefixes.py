"""How the Serve router's client finds prompts: all salts at once, other revisions, trouble. Nodes by plain calls."""

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from hs_cache.effects import Steps
from hs_cache.errors import InvalidInputError, ServiceError
from hs_cache.integrations import prefixes
from hs_cache.integrations.affinity import AffinitySettings, Demand, Prompt
from hs_cache.integrations.prefixes import PrefixFinder
from tests.builders import CHUNK_SIZE, make_tokens
from tests.direct import DirectCache, Node, make_nodes

pytestmark = pytest.mark.timeout(60)

TOKENS = make_tokens("abcd")
MODEL = "model"


class Service:
    """Nodes, and what stands in for a client's connection to them.

    Attributes:
        connected: how many clients there have been.
        error: what operations raise; None for none.
        holds: operations wait for it.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.nodes = make_nodes(2)
        self.connected = 0
        self.error: Exception | None = None
        self.holds = asyncio.Event()
        self.holds.set()
        monkeypatch.setattr(prefixes, "Router", self.connect)

    def connect(self, _: str) -> "Service":
        self.connected += 1
        return self

    @property
    def service(self) -> str:
        return "default"

    async def arun(self, steps: Steps[Any]) -> Any:
        await self.holds.wait()
        if self.error is not None:
            raise self.error
        return DirectCache(self.nodes[0]).run(steps)

    def store(self, node: Node, **space: Any) -> None:
        DirectCache(node, model=MODEL, **space).put(TOKENS)
        self.nodes[0].controller.hear_all()


def make_finder(**settings: Any) -> PrefixFinder:
    return PrefixFinder(AffinitySettings(**{"model": MODEL, "timeout_s": 20.0, **settings}))


def prompt_of(**identity: str) -> Prompt:
    return Prompt(TOKENS, (), tuple(identity.items()))


async def found(finder: PrefixFinder, service: Service, **identity: str) -> dict[str, int] | None:
    """On which of the nodes the prompt is; None if nobody can say."""
    demand = await finder.find(prompt_of(**identity), {node.name for node in service.nodes})
    return None if demand is None else dict(demand.prefixes)


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.001)


async def connected(finder: PrefixFinder) -> None:
    finder.prepare()
    await until(lambda: finder._cache is not None and finder._task is None)


def due(finder: PrefixFinder) -> None:
    """As after a minute."""
    finder._due = 0.0


def test_the_first_request_is_not_held_up_by_connecting(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        service, finder = Service(monkeypatch), make_finder()
        service.store(service.nodes[1])
        assert await found(finder, service) is None
        await connected(finder)
        assert await found(finder, service) == {service.nodes[1].name: len(TOKENS)}

    asyncio.run(scenario())


@pytest.mark.parametrize("layers", [None, (0,)])
def test_any_number_of_salts_and_loras_goes_through_one_client(
    layers: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        service, finder = Service(monkeypatch), make_finder(layers=layers)
        salted = {f"user{number}": service.nodes[number % 2] for number in range(100)}
        for salt in list(salted)[:4]:
            service.store(salted[salt], cache_salt=salt)
        service.store(service.nodes[1], lora_id="adapter", cache_salt="user0")
        await connected(finder)
        for position, (salt, node) in enumerate(salted.items()):
            expected = {node.name: len(TOKENS)} if position < 4 else {}
            assert await found(finder, service, cache_salt=salt) == expected  # at once, also of a new salt
        assert await found(finder, service, lora_id="adapter", cache_salt="user0") == {
            service.nodes[1].name: len(TOKENS)
        }
        assert await found(finder, service) == {}
        assert service.connected == 1

    asyncio.run(scenario())


def test_only_nodes_with_replicas_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        service, finder = Service(monkeypatch), make_finder(layers=(0,))
        for node in service.nodes:
            service.store(node)
        await connected(finder)
        demand = await finder.find(prompt_of(), {service.nodes[1].name})
        assert demand is not None
        assert demand.prefixes == {service.nodes[1].name: len(TOKENS)}

    asyncio.run(scenario())


def test_another_current_revision_is_followed_by_the_same_client(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        service, finder = Service(monkeypatch), make_finder()
        service.store(service.nodes[0])
        await connected(finder)
        service.nodes[0].controller.bump(MODEL, "second")
        service.store(service.nodes[1])  # by a client that has connected since
        due(finder)
        finder.prepare()
        await until(lambda: finder._task is None)
        assert await found(finder, service) == {service.nodes[1].name: len(TOKENS)}
        assert service.connected == 1

    asyncio.run(scenario())


def test_a_revision_that_is_named_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        service, finder = Service(monkeypatch), make_finder(model_revision="mine")
        service.store(service.nodes[0], model_revision="mine")
        await connected(finder)
        due(finder)
        finder.prepare()
        await until(lambda: finder._task is None)
        assert await found(finder, service) == {service.nodes[0].name: len(TOKENS)}

    asyncio.run(scenario())


@pytest.mark.parametrize("error", [ServiceError("it is gone"), RuntimeError("what nobody expects")])
def test_after_trouble_another_client_is_connected(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        service, finder = Service(monkeypatch), make_finder()
        service.store(service.nodes[0])
        await connected(finder)
        service.error = error
        assert await found(finder, service) is None
        assert await found(finder, service) is None
        service.error = None
        assert service.connected == 1
        due(finder)  # not before five seconds have passed
        finder.prepare()
        await until(lambda: finder._task is None)
        assert service.connected == 2
        assert await found(finder, service) == {service.nodes[0].name: len(TOKENS)}

    asyncio.run(scenario())
    assert caplog.text.count("routed without regard to prefixes") == 1
    assert caplog.text.count("are routed by prefixes") == 1


def test_while_there_is_no_service_it_is_looked_for_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        service, finder = Service(monkeypatch), make_finder()
        await connected(finder)
        service.error = ServiceError("it is gone")
        for _ in range(3):
            due(finder)
            before = time.monotonic()
            assert await found(finder, service) is None
            await until(lambda: finder._task is None)
            assert await found(finder, service) is None
            assert finder._due >= before + prefixes._RETRIED_S

    asyncio.run(scenario())


def test_whoever_is_late_costs_timeout_s_and_no_other_client(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        service, finder = Service(monkeypatch), make_finder(timeout_s=0.05)
        await connected(finder)
        service.holds.clear()
        assert await asyncio.wait_for(found(finder, service), 20) is None
        service.holds.set()
        due(finder)
        finder.prepare()
        await until(lambda: finder._task is None)
        assert service.connected == 1

    asyncio.run(scenario())


def test_connecting_is_tried_again_whatever_it_raised_and_leaves_no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[bool] = []
    close = prefixes.Session.close

    def noted(session: Any) -> None:
        closed.append(True)
        close(session)

    monkeypatch.setattr(prefixes.Session, "close", noted)

    async def scenario() -> None:
        service, finder = Service(monkeypatch), make_finder()
        service.error = RuntimeError("what nobody expects")
        finder.prepare()
        await until(lambda: finder._task is None)
        assert closed == [True]
        service.error = None
        due(finder)
        await connected(finder)
        service.holds.clear()
        finder._outdated = True
        due(finder)
        finder.prepare()
        await asyncio.sleep(0)
        assert finder._task is not None
        finder._task.cancel()  # as a loop does that ends
        await until(lambda: finder._task is None)
        assert closed == [True, True]

    asyncio.run(scenario())


def test_a_huge_prompt_is_named_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        Service(monkeypatch)
        finder = make_finder()
        await connected(finder)
        threads = []
        named = finder._keys

        def name(*args: Any) -> Any:
            threads.append(threading.current_thread() is threading.main_thread())
            return named(*args)

        monkeypatch.setattr(finder, "_keys", name)
        monkeypatch.setattr(prefixes, "_INLINE_TOKENS", 32)
        for size in (32, 33):
            assert await finder.find(Prompt(list(range(size))), ()) is not None
        assert threads == [True, False]

    asyncio.run(scenario())


def test_a_prompt_that_is_none_is_refused_and_one_without_a_chunk_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        service, finder = Service(monkeypatch), make_finder()
        await connected(finder)
        service.error = ServiceError("it is gone")
        assert await finder.find(Prompt(TOKENS[: CHUNK_SIZE - 1]), ()) == Demand(
            CHUNK_SIZE - 1,
            finder._keys(finder._cache, Prompt([]))[0],
            {},  # type: ignore[arg-type]
        )
        with pytest.raises(InvalidInputError, match="token_ids"):
            await finder.find(Prompt("text"), ())  # type: ignore[arg-type]

    asyncio.run(scenario())
