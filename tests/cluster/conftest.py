"""One Ray cluster for all tests in here; services of their own names in it; and a check that nothing is left over."""

import asyncio
import functools
import inspect
import itertools
import logging
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

import hs_cache
from actors import deploy
from hs_cache.config import CacheConfig
from tests.builders import CHUNK_SIZE
from tests.cluster.nodes import Nodes, add_node, removed_at_the_end, this_node
from tests.processes import MARK, marked_processes, open_pools, shared_memory_files, wait_until

RUN_ID = uuid.uuid4().hex[:12]
POOL_GIB = 1 / 64

_HERE = Path(__file__).parent
_numbers = itertools.count()

_ENVIRON = {
    MARK: RUN_ID,
    # A local Ray turns token authentication on and writes a token file; a joined one doesn't. Pinned, or one test would
    # change the next.
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # A lost node counts as alive for some 13 s by default.
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.cluster)


@pytest.fixture(scope="session", autouse=True)
def nothing_left_over(request: pytest.FixtureRequest) -> Iterator[None]:
    """After everything else has ended: no process, pool or file of this run remains."""
    before = shared_memory_files()
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        for name, value in _ENVIRON.items():
            patch.setenv(name, value)
        yield
    wait_until(lambda: not marked_processes(RUN_ID), "processes of this run have ended", timeout_s=15)
    pools = open_pools(RUN_ID)
    if request.session.testsfailed:
        pools.pop(os.getpid(), None)  # the frames of a failed test, which pytest keeps for its report, hold its clients
    assert pools == {}
    wait_until(lambda: shared_memory_files() <= before, "/dev/shm is as before", timeout_s=15)


@pytest.fixture(scope="session")
def cluster(nothing_left_over: None) -> Iterator[Cluster]:
    """A Ray cluster of one node, which this process has joined."""
    directory = tempfile.mkdtemp(prefix="hs", dir="/tmp")  # short: the paths of Ray's sockets may have 107 characters
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", directory)
        node = {"num_cpus": 4, "include_dashboard": False, "temp_dir": f"{directory}/ray"}
        nodes = Cluster(initialize_head=True, head_node_args=node, shutdown_at_exit=False)
        try:
            ray.init(address=nodes.address, logging_level=logging.ERROR, log_to_driver=False)
            yield nodes
        finally:
            ray.shutdown()
            nodes.shutdown()  # type: ignore[no-untyped-call]
            shutil.rmtree(directory)


@pytest.fixture(scope="session")
def address(cluster: Cluster) -> str:
    """Address of the Ray cluster, for processes that are to join it."""
    return str(cluster.address)


def new_name() -> str:
    """A name that no service had before."""
    return f"t-{RUN_ID}-{next(_numbers)}"


@pytest.fixture
def name(cluster: Cluster) -> Iterator[str]:
    """A name for a service that the test itself starts; what runs under it afterwards is stopped."""
    service = new_name()
    yield service
    deploy.stop(service=service)


StartService = Callable[..., str]


@pytest.fixture(scope="module")
def start_service(cluster: Cluster) -> Iterator[StartService]:
    """``start_service(**settings) -> name``; services last until the end of the module."""
    started = []

    def start(**settings: Any) -> str:
        service = new_name()
        started.append(service)
        defaults = {"chunk_size": CHUNK_SIZE, "max_hidden_state_cpu_size": POOL_GIB}
        deploy.start(CacheConfig(**{**defaults, **settings}), service=service)
        return service

    yield start
    for service in started:
        deploy.stop(service=service)


@pytest.fixture(scope="module")
def service(start_service: StartService) -> str:
    """A service that the tests of a module share; each has a key space of its own."""
    return start_service()


@pytest.fixture(scope="module")
def nodes(cluster: Cluster) -> Iterator[Nodes]:
    """The cluster's node and two more."""
    with removed_at_the_end(cluster) as added:
        added += [add_node(cluster) for _ in range(2)]
        yield Nodes(this_node(), *(node.node_id for node in added))


class Blocking:
    """An `AsyncHiddenStateCache` with the methods of its blocking twin, so that one test body serves both."""

    def __init__(self, target: Any, loop: asyncio.AbstractEventLoop) -> None:
        self.target = target
        self._loop = loop

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.target, name)
        if name == "kv":
            return Blocking(value, self._loop)
        if name == "writer":
            return lambda *args, **kwargs: Blocking(value(*args, **kwargs), self._loop)
        if not inspect.iscoroutinefunction(value):
            return value

        @functools.wraps(value)
        def call(*args: Any, **kwargs: Any) -> Any:
            return self._loop.run_until_complete(value(*args, **kwargs))

        return call


Connect = Callable[..., Any]


@pytest.fixture(params=["sync", "async"])
def connect(request: pytest.FixtureRequest, cluster: Cluster) -> Iterator[Connect]:
    """`hs_cache.connect`, then `hs_cache.aconnect` behind the same methods; ``model`` is new with every test."""
    model = uuid.uuid4().hex
    loop = asyncio.new_event_loop()

    def sync(*args: Any, **options: Any) -> Any:
        return hs_cache.connect(*args, **{"model": model, **options})

    def with_loop(*args: Any, **options: Any) -> Any:
        client = loop.run_until_complete(hs_cache.aconnect(*args, **{"model": model, **options}))
        return client and Blocking(client, loop)

    yield sync if request.param == "sync" else with_loop
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()


@pytest.fixture
def cache(connect: Connect, service: str) -> Any:
    """A client of the module's service, of either kind."""
    return connect(service=service)
