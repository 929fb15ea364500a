"""The request router on a real Serve with three nodes, over HTTP: where requests go, and that they always arrive."""

import json
import os
import signal
import time
import urllib.request
import uuid
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import ray
from ray import serve

import hs_cache
from actors import deploy
from hs_cache.config import CacheConfig
from hs_cache.errors import ServiceTimeoutError
from hs_cache.integrations.affinity import AffinitySettings
from hs_cache.integrations.serve import router_config
from hs_cache.router import find_controller
from tests.builders import CHUNK_SIZE
from tests.cluster import probes, serving
from tests.cluster.conftest import POOL_GIB, new_name
from tests.cluster.nodes import Nodes, store_on
from tests.processes import free_port, is_running, kill, stopped, wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

ANSWER_S = 60.0
"""In which a request is answered on a loaded machine; what hangs takes for ever."""


@pytest.fixture(scope="module")
def http(nodes: Nodes) -> Iterator[int]:
    """The port of a Serve of its own."""
    port = free_port()
    serve.start("HeadOnly", {"host": "127.0.0.1", "port": port})
    yield port
    serve.shutdown()


class App:
    """An application that runs, as clients see it, and its cache."""

    def __init__(self, url: str, service: str, model: str) -> None:
        self.url = url
        self.service = service
        self.cache: Any = hs_cache.connect(service=service, model=model)

    def post(self, body: Any) -> Any:
        request = urllib.request.Request(self.url, data=json.dumps(body).encode(), method="POST")
        with urllib.request.urlopen(request, timeout=ANSWER_S) as response:
            return json.loads(response.read())

    def nodes_of(self, prompts: list[dict[str, Any]]) -> list[str]:
        """Where prompts went that were sent at once."""
        return [answer["node"] for answer in self.post(prompts)]

    def routed(self) -> dict[str, int]:
        with urllib.request.urlopen(self.url, timeout=ANSWER_S) as response:
            found: dict[str, int] = json.loads(response.read())
        return found

    def store_on(self, node_id: str, token_ids: list[int]) -> None:
        """Rows on that node, which the service's directory knows of."""
        store_on(node_id, self.cache, token_ids, {0: np.ones((len(token_ids), serving.DIM), np.float32)})
        self.wait_for_rows(node_id, token_ids)

    def wait_for_rows(self, node_id: str, token_ids: list[int]) -> None:
        """Until the service's directory knows that they are there."""
        wait_until(lambda: self.cache.locate(token_ids, 0).get(node_id) == len(token_ids), "the directory knows")

    def wait_for_router(self) -> None:
        """Until it asks the cache."""

        def asked() -> bool:
            before = self.routed()
            self.post([make_prompt(stored=False)])
            return self.routed()["unavailable"] == before["unavailable"]

        wait_until(asked, "the router has connected", timeout_s=90)


@pytest.fixture(scope="module")
def service(http: int) -> Iterator[str]:
    """Of all applications here; tests that stop it start it again."""
    name = new_name()
    start(name)
    yield name
    deploy.stop(service=name)


def start(service: str) -> None:
    """A busy machine may take longer than `deploy.start` waits; what it has begun goes on."""

    def started() -> bool:
        try:
            deploy.start(CacheConfig(chunk_size=CHUNK_SIZE, max_hidden_state_cpu_size=POOL_GIB), service=service)
        except ServiceTimeoutError:
            return False
        return True

    wait_until(started, "the service runs", timeout_s=180)


def run(http: int, service: str, seconds: float = 0.0, timeout_s: float = 2.0, **settings: Any) -> App:
    """An application; 2 s are for what takes milliseconds on an idle machine."""
    name, model = f"a-{uuid.uuid4().hex[:8]}", uuid.uuid4().hex
    config = router_config(**{"service": service, "model": model, "layers": [0], "timeout_s": timeout_s, **settings})
    serve.run(serving.application(service, model, seconds, config), name=name, route_prefix=f"/{name}")
    return App(f"http://127.0.0.1:{http}/{name}", service, model)


@pytest.fixture(scope="module")
def app(http: int, service: str) -> Iterator[App]:
    """Without a memory of its own, so that only what is stored decides."""
    running = run(http, service, remember_s=0, spread=0)
    running.wait_for_router()
    yield running
    serve.delete(running.url.rsplit("/", 1)[-1])


def make_prompt(tokens: int = 64, *, after: list[int] | None = None, **more: Any) -> dict[str, Any]:
    """Of tokens that no other prompt has, behind those given."""
    fresh = np.frombuffer(uuid.uuid4().bytes * (tokens // 16 + 1), np.uint8)[:tokens]
    return {"token_ids": [*(after or []), *map(int, fresh)], **more}


def test_requests_go_to_the_node_that_has_their_prefix(app: App, nodes: Nodes) -> None:
    for node_id in nodes:
        prompt = make_prompt()
        app.store_on(node_id, prompt["token_ids"])
        longer = make_prompt(after=prompt["token_ids"], stored=False)
        assert [app.nodes_of([longer])[0] for _ in range(4)] == [node_id] * 4


def test_of_two_nodes_the_one_with_the_longer_prefix_is_chosen(app: App, nodes: Nodes) -> None:
    prompt = make_prompt(256)
    app.store_on(nodes.one, prompt["token_ids"][:32])
    app.store_on(nodes.two, prompt["token_ids"])
    assert app.nodes_of([{**prompt, "stored": False}]) == [nodes.two]


def test_calls_that_serve_one_http_request_are_routed_one_by_one(app: App, nodes: Nodes) -> None:
    prompts = []
    for node_id in nodes:
        prompts.append(make_prompt(256, stored=False))
        app.store_on(node_id, prompts[-1]["token_ids"])
    assert app.nodes_of(prompts) == list(nodes)


def test_conversations_stay_where_they_began(app: App, nodes: Nodes) -> None:
    homes = [*nodes, *nodes]
    conversations = [make_prompt(128) for _ in homes]
    for prompt, home in zip(conversations, homes, strict=True):
        app.store_on(home, prompt["token_ids"])
    for _ in range(3):  # each turn is stored by the replica that it went to
        conversations = [make_prompt(32, after=prompt["token_ids"]) for prompt in conversations]
        assert [app.nodes_of([prompt])[0] for prompt in conversations] == homes
        for prompt, home in zip(conversations, homes, strict=True):
            app.wait_for_rows(home, prompt["token_ids"])


def test_salts_of_prompts_are_told_apart(app: App, nodes: Nodes) -> None:
    prompt = make_prompt(stored=False)
    salted = {**prompt, "cache_salt": "tenant"}
    app.store_on(nodes.one, prompt["token_ids"])
    app.post([salted])
    cache = hs_cache.connect(service=app.service, model=app.cache.key_space.model, cache_salt="tenant")
    assert cache is not None
    rows = np.ones((len(prompt["token_ids"]), serving.DIM), np.float32)
    store_on(nodes.two, cache, prompt["token_ids"], {0: rows})

    def both() -> bool:
        return app.nodes_of([prompt]) == [nodes.one] and app.nodes_of([salted]) == [nodes.two]

    wait_until(both, "each goes where its own rows are", timeout_s=60)


def test_a_system_prompt_that_all_share_makes_no_hot_spot(http: int, service: str, nodes: Nodes) -> None:
    app = run(http, service, seconds=0.02)
    app.wait_for_router()
    system = make_prompt(96)["token_ids"]
    app.store_on(nodes.one, system)
    went: Counter[str] = Counter()
    for _ in range(4):
        went.update(app.nodes_of([make_prompt(64, after=system) for _ in range(9)]))
    for _ in range(24):
        went.update(app.nodes_of([make_prompt(64, after=system)]))
    assert set(went) == set(nodes)
    assert min(went.values()) >= 10
    serve.delete(app.url.rsplit("/", 1)[-1])


def test_what_has_no_tokens_goes_anywhere(app: App) -> None:
    before = app.routed()["no_prompt"]
    assert app.post("a text")["text"] == "a text"
    assert app.routed()["no_prompt"] == before + 1


def test_prompts_can_be_found_by_a_function_of_ones_own(http: int, service: str, nodes: Nodes) -> None:
    app = run(http, service, prompt_of="tests.cluster.serving:prompt_in_text", remember_s=0)
    text = uuid.uuid4().hex * 2
    app.store_on(nodes.two, list(map(ord, text)))
    wait_until(lambda: app.post(text)["node"] == nodes.two and app.routed()["prefix"] > 2, "it has connected")
    assert [app.post(text)["node"] for _ in range(3)] == [nodes.two] * 3
    answer = app.post([make_prompt()])  # a dict is no text: the function raises, the request doesn't
    assert answer[0]["node"] in nodes
    serve.delete(app.url.rsplit("/", 1)[-1])


def test_with_the_timeout_that_is_the_default_requests_arrive_and_prefixes_are_found(
    http: int, service: str, nodes: Nodes
) -> None:
    app = run(http, service, timeout_s=AffinitySettings().timeout_s, remember_s=0)
    prompt = make_prompt(stored=False)
    app.store_on(nodes.two, prompt["token_ids"])
    wait_until(  # on a busy machine not every time
        lambda: app.nodes_of([prompt]) == [nodes.two] and app.routed()["prefix"], "a prefix is found", timeout_s=180
    )
    serve.delete(app.url.rsplit("/", 1)[-1])


def test_wrong_settings_in_a_config_file_cost_the_prefixes_and_not_the_requests(http: int, service: str) -> None:
    name = f"a-{uuid.uuid4().hex[:8]}"
    config = router_config(service=service).model_copy(update={"request_router_kwargs": {"modell": "m"}})
    serve.run(serving.application(service, "m", 0.0, config, num_replicas=1), name=name, route_prefix=f"/{name}")
    assert App(f"http://127.0.0.1:{http}/{name}", service, "m").post("still")["text"] == "still"
    serve.delete(name)


def test_requests_are_answered_when_a_replica_dies(app: App, nodes: Nodes) -> None:
    prompt = make_prompt()
    app.store_on(nodes.one, prompt["token_ids"])
    answer = app.post([{**prompt, "stored": False}])[0]
    assert answer["node"] == nodes.one
    kill(answer["pid"])
    assert app.nodes_of([{**prompt, "stored": False}])[0] in nodes
    wait_until(
        lambda: app.nodes_of([{**prompt, "stored": False}]) == [nodes.one], "the new replica is used", timeout_s=240
    )


def controller_pid(service: str) -> int:
    return int(ray.get(find_controller(service).__ray_call__.remote(probes.pid_of), timeout=30))


def test_requests_are_answered_while_the_controller_is_stopped(app: App, nodes: Nodes) -> None:
    prompt = make_prompt(stored=False)
    app.store_on(nodes.one, prompt["token_ids"])
    before = app.routed()["unavailable"]
    with stopped(controller_pid(app.service)):
        begin = time.monotonic()
        assert all(app.nodes_of([prompt])[0] in nodes for _ in range(6))
        assert time.monotonic() - begin < ANSWER_S
        assert app.routed()["unavailable"] > before
    wait_until(lambda: [app.nodes_of([prompt])[0] for _ in range(4)] == [nodes.one] * 4, "it is asked again")


def test_requests_are_answered_when_the_controller_is_killed(app: App, nodes: Nodes) -> None:
    prompt = make_prompt(stored=False)
    app.store_on(nodes.two, prompt["token_ids"])
    pid = controller_pid(app.service)
    os.kill(pid, signal.SIGKILL)
    assert all(app.nodes_of([prompt])[0] in nodes for _ in range(6))
    wait_until(lambda: not is_running(pid), "it is gone")
    wait_until(
        lambda: [app.nodes_of([prompt])[0] for _ in range(4)] == [nodes.two] * 4, "it is asked again", timeout_s=60
    )


def test_requests_are_answered_without_a_service_and_find_one_that_is_started(app: App, nodes: Nodes) -> None:
    prompt = make_prompt(stored=False)
    deploy.stop(service=app.service)
    try:
        assert all(app.post("still")["text"] == "still" for _ in range(3))
        assert app.post([{**prompt, "stored": False}])[0]["node"] in nodes
    finally:
        start(app.service)
    app.store_on(nodes.one, prompt["token_ids"])
    wait_until(
        lambda: [app.nodes_of([prompt])[0] for _ in range(4)] == [nodes.one] * 4, "it is asked again", timeout_s=90
    )
