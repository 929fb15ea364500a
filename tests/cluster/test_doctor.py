"""`hs_cache.doctor` on three real nodes, and what it says of such as are stopped, killed, or differ."""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray.cluster_utils import Cluster

import hs_cache
from actors import deploy, pair
from hs_cache.config import CacheConfig
from hs_cache.doctor_facts import FAILED, OK, SKIPPED, WARNING, DoctorReport
from hs_cache.html import short_id
from hs_cache.messages import NodeStatistics
from hs_cache.router import HIDDEN_STATES, KV, actors_of, find_actor, find_controller, nodes_of
from tests.builders import CHUNK_SIZE
from tests.cluster import probes
from tests.cluster.bare import bare_python, raylet
from tests.cluster.children import make_rows
from tests.cluster.conftest import POOL_GIB, StartService
from tests.cluster.nodes import Nodes, add_node, client, pid_of, removed_at_the_end
from tests.processes import ROOT, kill, run_python, stopped, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(400)]

SETTINGS: dict[str, Any] = {"chunk_size": CHUNK_SIZE, "max_hidden_state_cpu_size": POOL_GIB, "node_selector": "all"}
PATIENCE_S = 20.0
"""How long a node gets for a step where one is known not to answer."""

LIMIT_S = 180.0
"""What a whole run may take then: a handful of steps that wait for nothing."""


@pytest.fixture(scope="module")
def everywhere(nodes: Nodes, start_service: StartService) -> str:
    """A service on three nodes that tests leave as it is."""
    return start_service(node_selector="all")


def levels(report: DoctorReport, check: str) -> set[str]:
    return {finding.level for finding in report.findings if finding.check == check}


def failures(report: DoctorReport) -> dict[str, str]:
    """By check, what failed; each says what to do."""
    assert all(finding.advice for finding in report.failures)
    found: dict[str, list[str]] = {}
    for finding in report.failures:
        found.setdefault(finding.check, []).append(finding.message)
    return {name: "; ".join(messages) for name, messages in found.items()}


def stats(service: str) -> list[NodeStatistics]:
    return [ray.get(find_actor(service, HIDDEN_STATES, node_id).stats.remote()) for node_id in nodes_of(service)]


def nothing_is_left(service: str) -> bool:
    return all(node.num_clients == node.store.num_chunks == node.store.num_kept == 0 for node in stats(service))


def command(service: str, address: str, *options: str, **run: Any) -> "subprocess.CompletedProcess[str]":
    return run_python(["-m", "actors", "doctor", "--address", address, "--service", service, *options], **run)


def test_all_is_well_and_nothing_stays(everywhere: str, nodes: Nodes) -> None:
    report = hs_cache.doctor(service=everywhere)
    assert report.ok, str(report)
    assert {finding.level for finding in report.findings} == {OK, "info"}
    ids = set(nodes)
    assert report.nodes.keys() == ids
    for matrix in (report.round_trip_ms, report.mib_per_s):
        assert {reader: set(row) for reader, row in matrix.items()} == dict.fromkeys(ids, ids)
        assert all(value > 0 for row in matrix.values() for value in row.values())
    assert report.canary_bytes >= 1 << 20
    wait_until(lambda: nothing_is_left(everywhere), "the probes' rows and clients are gone")
    for node in stats(everywhere):
        assert (node.store.evicted_chunks_total, node.store.stored_chunks_total, node.retrieves_total) == (0, 1, 0)


def test_rows_of_users_stay_where_there_is_room_and_where_there_is_none(name: str, nodes: Nodes) -> None:
    deploy.start(CacheConfig(**{**SETTINGS, "max_hidden_state_cpu_size": 1 / 1024}), service=name)
    cache = client(name)
    rows = make_rows(1024, 1, hidden_dim=64)
    assert cache.store(range(1024), {0: rows}).stored == 256
    report = hs_cache.doctor(service=name)
    assert report.ok, str(report)
    assert levels(report, "rows") == {OK}
    assert torch.equal(cache.retrieve(range(1024), 0)[0], rows)

    filling = make_rows(3072, 2, hidden_dim=64)
    assert cache.store(range(5000, 8072), {0: filling}).stored > 0
    kept = cache.retrieve(range(1024), 0).num_tokens
    report = hs_cache.doctor(service=name)
    assert report.ok, str(report)
    assert levels(report, "rows") == {OK, SKIPPED}
    (skipped,) = [finding for finding in report.findings if finding.level == SKIPPED]
    assert skipped.nodes == (nodes.head,)
    assert "no room in its pool without evicting" in skipped.message
    assert cache.retrieve(range(1024), 0).num_tokens == kept


@pytest.mark.parametrize("source", ["lmcache", "vllm_events", "none"])
def test_with_every_kv_source(source: str, name: str, nodes: Nodes) -> None:
    events = [{"endpoint": "tcp://127.0.0.1:1", "block_size": CHUNK_SIZE}]
    config = CacheConfig(**SETTINGS, kv_source=source, kv_events=events if source == "vllm_events" else [])
    deploy.start(config, service=name)
    report = hs_cache.doctor(service=name)
    assert report.ok, str(report)
    assert levels(report, "rows") == levels(report, "keys") == {OK}
    assert levels(report, "KV source") == ({OK} if source == "none" else {WARNING})


def test_as_a_command(everywhere: str, address: str, tmp_path: Path) -> None:
    well = command(everywhere, address, cwd=tmp_path, environ={"PYTHONPATH": str(ROOT)})
    assert (well.returncode, well.stderr) == (0, "")
    assert well.stdout.endswith("All right.\n")
    assert "round trip, ms, from the row's node to the column's:" in well.stdout

    environ = {"HS_CACHE_CHUNK_SIZE": str(2 * CHUNK_SIZE)}
    differing = command(everywhere, address, "--json", environ=environ)
    assert (differing.returncode, differing.stderr) == (1, "")
    report = json.loads(differing.stdout)
    assert not report["ok"]
    (bad,) = [finding for finding in report["findings"] if finding["level"] == FAILED]
    assert bad["check"] == "clients"
    assert bad["message"] == "on this process no client can connect: chunk_size is 4, asked for 8"
    assert len(report["mib_per_s"]) == 3

    usage = command(everywhere, address, "--timeout", "0")
    assert usage.returncode == 2
    assert "--timeout" in usage.stderr


def test_no_service(address: str, name: str, nodes: Nodes) -> None:
    none = command(name, address)
    assert (none.returncode, none.stderr) == (1, "")
    assert f"FAILED   service: no controller of a service named '{name}' is there" in none.stdout
    assert f"-> start it: hs-cache start --service {name}" in none.stdout
    assert "ok       package: " in none.stdout


@pytest.mark.parametrize("kind", [HIDDEN_STATES, KV, "controller"])
def test_an_actor_that_is_stopped(kind: str, everywhere: str, nodes: Nodes) -> None:
    if kind == "controller":
        pid = ray.get(find_controller(everywhere).__ray_call__.remote(probes.pid_of))
    else:
        pid = pid_of(everywhere, kind, nodes.one)
    begin = time.monotonic()
    with stopped(pid):
        report = hs_cache.doctor(service=everywhere, timeout_s=PATIENCE_S)
    assert time.monotonic() - begin < LIMIT_S
    found = failures(report)
    if kind == "controller":
        assert "does not answer" in found["service"]
    else:
        assert short_id(nodes.one) in found["actors"]
        assert f"does not answer: asking it took more than {PATIENCE_S:g} s" in found["actors"]
    if kind != HIDDEN_STATES:
        assert levels(report, "rows") == {OK}
    else:
        others = {nodes.head, nodes.two}
        assert {reader: set(row) for reader, row in report.mib_per_s.items()} == dict.fromkeys(others, others)
        assert set(report.round_trip_ms[nodes.one]) == others
        assert set(found) == {"actors"}, "nobody else is blamed"
    wait_until(lambda: nothing_is_left(everywhere), "nothing of the probes is left")


def test_an_actor_that_is_killed_before_and_meanwhile(name: str, nodes: Nodes) -> None:
    deploy.start(CacheConfig(**SETTINGS), service=name)
    with ThreadPoolExecutor() as pool:
        running = pool.submit(hs_cache.doctor, service=name, timeout_s=PATIENCE_S)
        wait_until(lambda: any(node.store.num_chunks for node in stats(name)) or running.done(), "rows are being tried")
        kill(pid_of(name, HIDDEN_STATES, nodes.two))
        running.result(timeout=LIMIT_S)
        report = hs_cache.doctor(service=name, timeout_s=PATIENCE_S)
    assert report.nodes.keys() == set(nodes)
    assert not any("other bytes" in finding.message for finding in report.findings)
    wait_until(lambda: hs_cache.doctor(service=name, timeout_s=PATIENCE_S).ok, "all is well again", timeout_s=60)
    wait_until(lambda: nothing_is_left(name), "nothing of the probes is left")


def test_a_node_that_stops_is_reported(cluster: Cluster, name: str) -> None:
    with removed_at_the_end(cluster) as added:
        node = add_node(cluster)
        added.append(node)
        deploy.start(CacheConfig(**SETTINGS), service=name)
        begin = time.monotonic()
        with stopped(node.all_processes["raylet"][0].process.pid):
            report = hs_cache.doctor(service=name, timeout_s=PATIENCE_S)
        assert time.monotonic() - begin < LIMIT_S
    assert short_id(node.node_id) in failures(report)["nodes"]


def test_interrupted_it_leaves_nothing(name: str, address: str, nodes: Nodes) -> None:
    deploy.start(CacheConfig(**SETTINGS), service=name)
    line = [sys.executable, "-m", "actors", "doctor", "--address", address, "--service", name]
    for sent in (signal.SIGINT, signal.SIGKILL):
        with subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            wait_until(
                lambda process=process: (
                    any(node.store.num_chunks for node in stats(name)) or process.poll() is not None
                ),
                "rows are being tried",
                timeout_s=60,
            )
            os.kill(process.pid, sent)
            _, errors = process.communicate(timeout=60)
        assert process.returncode in (1, 0, -sent)
        assert "Traceback" not in errors
        wait_until(lambda: nothing_is_left(name), "nothing of the probes is left", timeout_s=60)


def test_actors_with_other_settings(name: str, nodes: Nodes) -> None:
    deploy.start(CacheConfig(**SETTINGS), service=name)
    controller = ray.get(find_controller(name).__ray_call__.remote(probes.pid_of))
    with stopped(controller):  # it would put things right
        ray.kill(find_actor(name, HIDDEN_STATES, nodes.head), no_restart=True)
        wait_until(lambda: nodes.head not in actors_of(name)[HIDDEN_STATES], "its name is free")
        pair._create(CacheConfig(**{**SETTINGS, "kv_source": "none"}), name, nodes.head)
        wait_until(lambda: pid_of(name, HIDDEN_STATES, nodes.head), "the other one is there")
    found = failures(hs_cache.doctor(service=name))
    assert short_id(nodes.head) in found["settings"]
    assert found["settings"].endswith("kv_source 'none' instead of 'reports'")


def test_a_node_without_the_package(address: str, name: str, tmp_path: Path, cluster: Cluster) -> None:
    python = bare_python(tmp_path / "bare")
    if not python:
        pytest.skip("this package is not installed in a way that leaves a Python without it")
    outside = {
        "cwd": tmp_path,
        "environ": {"PYTHONPATH": str(ROOT)},
    }  # or workers would find it in the driver's directory
    with raylet([python], address) as node_id:
        before = command(name, address, "--json", **outside)
        assert before.returncode == 1
        (package,) = [found for found in json.loads(before.stdout)["findings"] if found["check"] == "package"]
        assert (package["level"], package["nodes"]) == (FAILED, [node_id])
        assert package["message"].endswith("can't import hs_cache: ModuleNotFoundError: No module named 'hs_cache'")
        assert "install hs-cache there" in package["advice"]

        deploy.start(CacheConfig(**{**SETTINGS, "node_selector": {"resources": {"CPU": 2}}}), service=name)
        apart = command(name, address, **outside)
        assert apart.returncode == 0, apart.stdout
        assert f"warning  package: the workers of node {short_id(node_id)}" in apart.stdout
