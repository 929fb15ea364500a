"""Starting, joining, leaving and restarting a service."""

import contextlib
import logging
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

import hs_cache
from actors import deploy
from hs_cache import client as client_module
from hs_cache.config import CacheConfig
from hs_cache.errors import (
    ConfigError,
    ConfigMismatchError,
    InvalidInputError,
    PoolTooLargeError,
    ServiceError,
    ServiceNotRunningError,
    StaleIncarnationError,
)
from hs_cache.machine import process_start_time
from hs_cache.router import HIDDEN_STATES, KV, actors_of, find_actor, find_controller, is_running, nodes_of
from tests.builders import CHUNK_SIZE
from tests.cluster.children import make_rows
from tests.cluster.conftest import POOL_GIB, Connect, StartService
from tests.cluster.nodes import client, pid_of
from tests.processes import Child, free_port, kill, listens, run_python, wait_until

pytestmark = pytest.mark.long

SETTINGS = {"chunk_size": CHUNK_SIZE, "max_hidden_state_cpu_size": POOL_GIB}
USERS_SCRIPT = """
import json, logging, sys
import ray, torch, hs_cache
import actors
assert actors.USERS_OWN
ray.init(address=sys.argv[1], logging_level=logging.ERROR, log_to_driver=False)
cache = hs_cache.connect({"chunk_size": 4, "max_hidden_state_cpu_size": 0.015625}, service=sys.argv[2])
rows = torch.randn(8, 4)
stored = cache.store(range(8), {0: rows}).stored
print(json.dumps([stored, torch.equal(cache.retrieve(range(8), 0)[0], rows)]))
"""


def test_connect_starts_a_service_and_joins_it(connect: Connect, name: str, tmp_path: Path) -> None:
    path = tmp_path / "cache.yaml"
    path.write_text("chunk_size: 4\nenable_hidden_state_cache: true\nmax_hidden_state_cpu_size: 0.015625\n")
    first = connect(str(path), service=name)
    first.store(range(8), {0: make_rows(8, 1)})

    second = connect(service=name)
    assert second.chunk_size == CHUNK_SIZE
    assert torch.equal(second.retrieve(range(8), 0)[0], make_rows(8, 1))
    assert second.stats().node == first.stats().node
    assert connect({"chunk_size": CHUNK_SIZE, "max_hidden_state_cpu_size": 1.0}, service=name).chunk_size == CHUNK_SIZE
    with pytest.raises(ConfigMismatchError, match=rf"chunk_size: the running service '{name}' has 4, config says 8"):
        connect({"chunk_size": 8}, service=name)
    with pytest.raises(ConfigMismatchError, match=r"max_hidden_state_cpu_size is 0\.015625, asked for 0\.5"):
        deploy.start(CacheConfig(max_hidden_state_cpu_size=0.5), service=name)


def test_disabled_gives_none(connect: Connect, name: str) -> None:
    assert connect({"enable_hidden_state_cache": False}, service=name) is None
    assert nodes_of(name) == []


def test_wrong_settings_are_refused_before_anything_starts(connect: Connect, name: str, tmp_path: Path) -> None:
    path = tmp_path / "cache.yaml"
    path.write_text("chunk_sise: 4\n")
    with pytest.raises(ConfigError, match=r"unknown key 'chunk_sise' in .*cache.yaml; did you mean 'chunk_size'\?"):
        connect(path, service=name)
    with pytest.raises(InvalidInputError, match="service: got 'a b', expected up to 64 letters"):
        connect(service="a b")
    with pytest.raises(InvalidInputError, match="model: got"):
        connect(service=name, model=7)
    assert nodes_of(name) == []


def test_a_pool_that_is_too_large_leaves_nothing_behind(name: str) -> None:  # case 24
    with pytest.raises(PoolTooLargeError) as caught:
        hs_cache.connect({"max_hidden_state_cpu_size": 1_000_000}, service=name)
    message = str(caught.value)
    assert ray.get_runtime_context().get_node_id() in message
    assert "max_hidden_state_cpu_size" in message
    assert "MemAvailable" in message or "cgroup" in message
    assert (nodes_of(name), sorted(actors_of(name)[KV])) == ([], [])


def test_two_processes_that_connect_at_once_share_one_service(address: str, name: str) -> None:
    asked = {"address": address, "service": name, "model": "", "config": SETTINGS}
    with Child("roundtrip", asked) as one, Child("roundtrip", {**asked, "model": "m"}) as two:
        first, second = one.result(), two.result()
    assert (first["right"], second["right"]) == (True, True)
    assert first["incarnation"] == second["incarnation"]
    assert len(nodes_of(name)) == len(sorted(actors_of(name)[KV])) == 1


def test_a_working_directory_with_its_own_actors(address: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "actors").mkdir()
    for own in ("actors.py", "actors/__init__.py"):
        (tmp_path / own).write_text("USERS_OWN = True\n")
    (tmp_path / "job.py").write_text(USERS_SCRIPT)
    done = run_python(["job.py", address, name], cwd=tmp_path)
    assert done.stdout.strip() == "[2, true]", done.stderr


def test_without_ray(service: str, tmp_path: Path) -> None:
    clients = [hs_cache.connect(service=service, strict=strict) for strict in (False, True)]
    (tmp_path / "cache.yaml").write_text("chunk_sise: 4\n")
    arguments = {"pickled": pickle.dumps(clients).hex(), "typo": str(tmp_path / "cache.yaml")}
    with Child("without_ray", arguments) as child:
        found = child.result()
    assert found["disabled"] is None
    assert found["typo"][0] == "ConfigError"
    assert found["bad_service"][0] == "InvalidInputError"
    assert found["lenient"] == "unreachable"
    for refused in ("locate", "strict", "start", "stop"):
        assert found[refused][0] == "ServiceNotRunningError"
        assert "Ray is not initialised" in found[refused][1]
    assert not found["joined"]


def test_a_client_outlives_its_connection_to_ray(address: str, service: str) -> None:
    with Child("leave_and_return", {"address": address, "service": service, "model": uuid.uuid4().hex}) as child:
        found = child.result()
    assert found == {"away": "unreachable", "joined_by_itself": False, "held": True, "back": True}


def test_a_service_that_stops_and_starts_again(
    connect: Connect, name: str, caplog: pytest.LogCaptureFixture
) -> None:  # case 25
    deploy.start(CacheConfig(**SETTINGS), service=name)
    cache, strict = connect(service=name), connect(service=name, strict=True)
    cache.store(range(12), {0: make_rows(12, 1)})
    held = cache.retrieve(range(12), 0)
    old = cache.stats().node

    assert deploy.stop(service=name) == 1
    with caplog.at_level(logging.WARNING, logger="hs_cache"):
        for _ in range(3):
            assert cache.retrieve(range(12), 0).ended_by == "unreachable"
        assert cache.store(range(4), {0: make_rows(4, 1)}).failed == 1
        assert not cache.kv.report_stored(range(4))
        assert cache.stats().node is None
    troubles = [record.message.split(" can't be reached")[0].removeprefix("hs_cache: ") for record in caplog.records]
    assert len(set(troubles)) == len(troubles), "each once"
    assert {"the cache"} <= set(troubles) <= {"the cache", "the directory", "the KV actor"}
    assert cache.stats().unreachable_total >= 3
    with pytest.raises(ServiceError):
        strict.retrieve(range(12), 0)
    with pytest.raises(ServiceError):
        strict.store(range(4), {0: make_rows(4, 1)})
    assert torch.equal(held[0], make_rows(12, 1))

    deploy.start(CacheConfig(**SETTINGS), service=name)
    actor = find_actor(name, HIDDEN_STATES, nodes_of(name)[0])
    with pytest.raises(StaleIncarnationError):
        ray.get(actor.commit.remote(bytes.fromhex(old.incarnation), b"client", 0))
    assert cache.retrieve(range(12), 0).ended_by == "hidden_state"
    assert cache.store(range(12), {0: make_rows(12, 2)}).stored == 3
    assert torch.equal(cache.retrieve(range(12), 0)[0], make_rows(12, 2))
    assert strict.retrieve(range(12), 0).num_tokens == 12
    assert torch.equal(held[0], make_rows(12, 1))
    assert cache.stats().node.incarnation != old.incarnation
    del held
    wait_until(lambda: cache.stats().node.store.num_leases == 0, "no lease is left")


def test_after_a_restart_with_another_chunk_size_clients_connect_again(name: str) -> None:
    deploy.start(CacheConfig(**SETTINGS), service=name)
    cache, strict = client(name), client(name, strict=True)
    deploy.stop(service=name)
    deploy.start(CacheConfig(**{**SETTINGS, "chunk_size": 8}), service=name)
    for _ in range(2):
        assert not cache.retrieve(range(12), 0)
        assert cache.store(range(12), {0: make_rows(12, 1)}).failed == 3
    with contextlib.suppress(ServiceError):  # the first call may be the one that finds out that the actor is gone
        strict.retrieve(range(12), 0)
    with pytest.raises(ServiceError, match="connect again"):
        strict.retrieve(range(12), 0)
    assert client(name).chunk_size == 8


def test_starting_and_stopping_from_code(name: str) -> None:
    nodes = hs_cache.start(SETTINGS, service=name)
    assert nodes == nodes_of(name) == sorted(actors_of(name)[KV])
    assert deploy.start(CacheConfig(), service=name) == nodes
    assert hs_cache.stop(service=name) == 1
    assert nodes_of(name) == sorted(actors_of(name)[KV]) == []


def test_services_are_apart(connect: Connect, service: str, start_service: StartService) -> None:
    one, other = connect(service=service), connect(service=start_service())
    one.store(range(8), {0: make_rows(8, 1)})
    assert not other.retrieve(range(8), 0)


def test_a_service_without_a_node_is_waited_for_and_not_started_again(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = CacheConfig(**SETTINGS, node_selector={"resources": {"none has this": 1}})
    assert deploy.start(config, service=name) == []
    monkeypatch.setattr(client_module, "_FIRST_NODE_S", 0.5)
    monkeypatch.setattr(client_module, "start", lambda *_, **__: pytest.fail("it runs already"))
    with pytest.raises(ServiceNotRunningError, match="has no node yet"):
        client(name)


def test_what_a_lost_controller_left_behind_is_taken_on_or_replaced(name: str) -> None:
    def node() -> Any:
        (node_id,) = nodes_of(name)
        return find_actor(name, HIDDEN_STATES, node_id)

    deploy.start(CacheConfig(**SETTINGS), service=name)
    pid = ray.get(node().stats.remote()).pid
    for chunk_size in (CHUNK_SIZE, 2 * CHUNK_SIZE):
        ray.kill(find_controller(name), no_restart=True)
        wait_until(lambda: not is_running(name), "its name is free")
        deploy.start(CacheConfig(**{**SETTINGS, "chunk_size": chunk_size}), service=name)
        assert ray.get(node().config.remote()).chunk_size == chunk_size
        assert (ray.get(node().stats.remote()).pid == pid) is (chunk_size == CHUNK_SIZE)


def test_a_kv_actor_that_is_gone_for_good_is_replaced(name: str) -> None:
    (node_id,) = deploy.start(CacheConfig(**SETTINGS), service=name)
    cache = client(name)
    cache.store(range(8), {0: make_rows(8, 1)})
    pid = pid_of(name, KV, node_id)
    ray.kill(find_actor(name, KV, node_id), no_restart=True)
    wait_until(lambda: process_start_time(pid) is None, "its process has ended")
    assert cache.retrieve(range(8), 0).ended_by == "kv_unknown"
    wait_until(lambda: node_id in actors_of(name)[KV], "there is another one")

    def hit() -> bool:
        cache.store(range(8), {0: make_rows(8, 1)})
        return bool(cache.retrieve(range(8), 0))

    wait_until(hit, "it is asked")


@pytest.mark.timeout(300)
def test_connecting_while_the_actor_restarts_waits_for_it(connect: Connect, name: str) -> None:
    (node_id,) = deploy.start(CacheConfig(**SETTINGS), service=name)
    incarnations = set()
    for seed in range(4):
        kill(pid_of(name, HIDDEN_STATES, node_id))
        with contextlib.closing(connect(service=name, strict=True)) as cache:
            assert cache.store(range(8), {0: make_rows(8, seed)}).stored == 2
            assert torch.equal(cache.retrieve(range(8), 0)[0], make_rows(8, seed))
            incarnations.add(cache.stats().node.incarnation)
    assert len(incarnations) == 4


@pytest.mark.timeout(300)
def test_many_that_connect_while_both_actors_are_replaced(connect: Connect, name: str) -> None:
    (node_id,) = deploy.start(CacheConfig(**SETTINGS), service=name)
    for kind in (HIDDEN_STATES, KV):
        os.kill(pid_of(name, kind, node_id), signal.SIGKILL)
    caches = [connect(service=name) for _ in range(20)]
    assert len({cache.stats().node.incarnation for cache in caches}) == 1


def test_a_ray_cluster_that_is_gone_is_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{free_port()}")
    script = "import hs_cache\ntry: hs_cache.connect()\nexcept hs_cache.ServiceError as error: print(error)"
    done = run_python(["-c", script])
    assert re.match(r"no Ray cluster can be joined at .*Connection refused", done.stdout), done.stderr


def test_a_ray_cluster_that_wants_a_token_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="hs", dir="/tmp", ignore_cleanup_errors=True) as directory:
        line = [
            sys.executable,
            "-m",
            "ray.scripts.scripts",
            "start",
            "--head",
            f"--port={port}",
            "--num-cpus=1",
            "--block",
        ]
        line += ["--include-dashboard=false", f"--temp-dir={directory}", "--object-store-memory=80000000"]
        environ = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": uuid.uuid4().hex}
        head = subprocess.Popen(
            line, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        try:
            wait_until(lambda: listens(port), "the cluster is there")
            monkeypatch.delenv("RAY_AUTH_MODE")
            monkeypatch.setenv("HOME", str(tmp_path))
            done = run_python(["-m", "actors", "status", "--address", f"127.0.0.1:{port}"])
            assert (done.returncode, done.stdout) == (1, "")
            assert "set RAY_AUTH_MODE=token here too" in done.stderr.splitlines()[-1]
        finally:
            os.killpg(head.pid, signal.SIGKILL)
            head.wait()
