"""Tests with the real LMCache; they run where it is installed, which `make test-lmcache` sees to.

One Ray cluster and its checks are those of tests/cluster.
"""

import gc
import importlib.util
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import address, cluster, name, nothing_left_over, service, start_service
from tests.processes import wait_until

collect_ignore_glob = ["test_*.py"] if importlib.util.find_spec("lmcache") is None else []

# Before the first import of lmcache, and for the processes that tests start.
os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")

__all__ = ["address", "cluster", "make_engine", "name", "no_sockets", "nothing_left_over", "service", "start_service"]

_HERE = Path(__file__).parent
_numbers = itertools.count()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.lmcache)
            # Of lmcache and what it uses: an engine leaves its event loop open. `no_sockets` looks after ours.
            item.add_marker(pytest.mark.filterwarnings("ignore::DeprecationWarning"))
            item.add_marker(pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"))


@pytest.fixture(scope="module", autouse=True)
def no_sockets() -> Iterator[None]:
    """No engine of this process is left answering after a module."""
    yield
    gc.collect()
    mine = f"@hs_cache/lmcache/{os.getpid()}/"
    wait_until(lambda: mine not in Path("/proc/net/unix").read_text(), "all answers have been closed", timeout_s=5)


MakeEngine = Callable[..., Any]


@pytest.fixture
def make_engine() -> Iterator[MakeEngine]:
    """``make_engine(**settings) -> LMCacheEngine`` on the CPU, closed after the test; see `tests.lmcache.engines`."""
    from tests.lmcache import engines

    made: list[str] = []

    def make(**settings: Any) -> Any:
        made.append(f"engine-{next(_numbers)}")
        return engines.make_engine(made[-1], **settings)

    yield make
    for instance in made:
        engines.close(instance)
    gc.collect()  # here, where what an engine leaves open is no failure
