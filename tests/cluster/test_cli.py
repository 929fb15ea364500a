"""``hs-cache`` as a process of its own, as people and scripts run it."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

import hs_cache
from hs_cache.errors import ServiceNotRunningError
from hs_cache.router import find_controller, is_running, nodes_of
from tests.builders import CHUNK_SIZE
from tests.cluster import probes
from tests.cluster.children import make_rows
from tests.processes import run_python, stopped, wait_until

pytestmark = pytest.mark.long

CONFIG = "chunk_size: 4\nmax_hidden_state_cpu_size: 0.015625\n"


def command(*line: str, given: str = "") -> "subprocess.CompletedProcess[str]":
    return run_python(["-m", "actors", *line], given=given)


def commands(*lines: tuple[str, ...]) -> "list[subprocess.CompletedProcess[str]]":
    """Several commands that don't depend on each other, at once."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda line: command(*line), lines))


def reply(done: "subprocess.CompletedProcess[str]") -> dict[str, Any]:
    """The one JSON line of a command after ``--json``."""
    (line,) = done.stdout.splitlines()
    result = json.loads(line)
    assert isinstance(result, dict)
    return result


def test_the_life_of_a_service(address: str, name: str, tmp_path: Path) -> None:
    there = ("--address", address, "--service", name)
    path = tmp_path / "cache.yaml"
    path.write_text(CONFIG)
    started = command("start", *there, "--json", "--config", str(path))
    assert started.returncode == 0, started.stderr
    (node_id,) = nodes_of(name)
    assert reply(started) == {"service": name, "nodes": [{"node_id": node_id}]}

    again = command("start", *there, "--config", "-", given="chunk_size: 4\n")
    assert again.returncode == 0, again.stderr
    assert again.stdout == f"Service '{name}' runs on 1 node, 0.015625 GiB each (node_selector \"all\").\n"
    assert again.stderr == ""

    cache = hs_cache.connect(service=name)
    assert cache is not None
    cache.store(range(8), {0: make_rows(8, 1)})
    assert cache.retrieve(range(8), 0).num_tokens == 8
    controller = find_controller(name)
    wait_until(lambda: ray.get(controller.stats.remote()).num_keys == 2, "the controller knows the chunks")
    status, table = commands(("status", *there, "--json"), ("status", *there))
    assert status.returncode == 0
    (node,) = reply(status)["nodes"]
    assert (node["node_id"], node["hits_total"], node["store"]["num_chunks"]) == (node_id, 1, 2)
    known = reply(status)["controller"]
    assert (known["nodes"], known["num_keys"], known["locates_total"]) == ([node_id], 2, 0)
    assert table.returncode == 0
    assert name in table.stdout
    assert node_id[:12] in table.stdout
    assert "100%" in table.stdout
    assert table.stdout.endswith("The controller knows 2 chunks on 1 node, and was asked 0 times.\n")

    pid = ray.get(controller.__ray_call__.remote(probes.pid_of))
    with stopped(pid):
        status, table = commands(("status", *there, "--json"), ("status", *there))
    assert (status.returncode, reply(status)["controller"]) == (1, {"error": "no answer"})
    assert [node["node_id"] for node in reply(status)["nodes"]] == [node_id]
    assert table.returncode == 1
    assert "The controller doesn't answer" in table.stdout

    ended = command("stop", *there)
    assert (ended.returncode, ended.stdout) == (0, f"Service '{name}' stopped on 1 node.\n")
    assert nodes_of(name) == []


def test_the_weights_of_a_model_change(address: str, name: str) -> None:
    there = ("--address", address, "--service", name)
    assert command("start", *there, "--config", "-", given=CONFIG).returncode == 0
    (node_id,) = nodes_of(name)
    old, other = (hs_cache.connect(service=name, model=model) for model in ("m", "another"))
    assert old is not None
    assert other is not None
    for cache in (old, other):
        assert cache.store(range(8), {0: make_rows(8, 1)}).stored == 2
    held = old.retrieve(range(8), 0)

    bumped = command("bump-revision", *there, "--model", "m", "--json")
    assert (bumped.returncode, bumped.stderr) == (0, "")
    freed = {"chunks": 2, "nbytes": 256, "held_bytes": 256}
    first = reply(bumped)["revision"]
    assert first.startswith("r1-")
    assert reply(bumped) == {
        "service": name,
        "model": "m",
        "revision": first,
        "previous": "",
        "changed": True,
        "nodes": [{"node_id": node_id, **freed}],
        "unreached": [],
    }
    assert torch.equal(held[0], make_rows(8, 1))
    assert not old.retrieve(range(8), 0)
    assert old.store(range(8), {0: make_rows(8, 1)}).failed == 2
    assert other.retrieve(range(8), 0).num_tokens == 8
    new = hs_cache.connect(service=name, model="m")
    assert new is not None
    assert new.key_space.model_revision == first
    assert new.store(range(8), {0: make_rows(8, 2)}).stored == 2

    again = command("bump-revision", *there, "--model", "m", first)
    assert (again.returncode, again.stdout) == (
        0,
        f"Revision {first!r} of model 'm' is current already; nothing has changed.\n",
    )
    assert new.retrieve(range(8), 0).num_tokens == 8
    named = command("bump-revision", *there, "--model", "m", "v2")
    assert (named.returncode, named.stdout) == (
        0,
        f"Revision 'v2' of model 'm' is current now, before it was {first!r}. Freed 2 chunks, 0.0 MiB, on 1 node.\n",
    )
    misspelt = command("bump-revision", *there, "--model", "M", "v1")
    assert misspelt.stdout.endswith("No node had rows of it: is 'M' what clients call the model?\n")
    status = command("status", *there)
    assert status.stdout.endswith("The current revision of model 'm' is 'v2'.\n")
    assert ": reports, 6 chunks present, 0 absent, 0 unknown; engines heard of: ''." in status.stdout
    assert reply(command("status", *there, "--json"))["nodes"][0]["kv"]["present"] == 6


def test_a_change_of_weights_that_cannot_be(address: str, name: str) -> None:
    there = ("--address", address, "--service", name)
    nowhere, nameless, empty = commands(
        ("bump-revision", *there, "--model", "m"),
        ("bump-revision", *there),
        ("bump-revision", *there, "--model", "m", "", "--json"),
    )
    assert (nowhere.returncode, nowhere.stdout) == (1, "")
    assert nowhere.stderr == f"Error: no service named '{name}' runs in this Ray cluster\n"
    assert nameless.returncode == 2
    assert "--model" in nameless.stderr
    assert reply(empty)["error"] == {
        "type": "InvalidInputError",
        "message": "revision: got '', expected None or a name that is not empty",
    }


def test_without_a_service(address: str, name: str) -> None:
    there = ("--address", address, "--service", name)
    status, script, stopped = commands(("status", *there), ("status", *there, "--json"), ("stop", *there, "--json"))
    assert (status.returncode, status.stderr) == (1, "")
    assert status.stdout.startswith(f"No service named '{name}' runs in this Ray cluster")
    assert (script.returncode, reply(script)) == (1, {"service": name, "controller": None, "nodes": []})
    assert (stopped.returncode, reply(stopped)) == (0, {"service": name, "stopped": 0})


def test_a_service_that_waits_for_its_first_node(address: str, name: str) -> None:
    there = ("--address", address, "--service", name)
    started = command("start", *there, "--config", "-", given=CONFIG + "node_selector: gpu\n")
    assert (started.returncode, started.stderr) == (0, "")
    assert started.stdout == (
        f"Service '{name}' runs, but no node matches its node_selector (\"gpu\") yet; "
        "each one that joins and does gets a pool.\n"
    )
    status, script = commands(("status", *there), ("status", *there, "--json"))
    assert (status.returncode, status.stderr) == (1, "")
    assert status.stdout == (
        f"Service '{name}' runs, but no node carries it yet.\n"
        "The controller knows 0 chunks on 0 nodes, and was asked 0 times.\n"
    )
    nothing_yet = {"membership_version": 0, "nodes": [], "num_keys": 0, "locates_total": 0, "revisions": []}
    assert reply(script) == {"service": name, "controller": nothing_yet, "nodes": []}
    with pytest.raises(ServiceNotRunningError, match="has no node yet: none that joined matches its node_selector"):
        hs_cache.connect(service=name)
    ended = command("stop", *there)
    assert (ended.returncode, ended.stdout) == (0, f"Service '{name}' stopped on 0 nodes.\n")
    assert not is_running(name)


def test_errors_are_one_sentence_or_json(address: str, name: str, tmp_path: Path) -> None:
    there = ("--address", address, "--service", name)
    wrong, too_large = tmp_path / "wrong.yaml", tmp_path / "large.yaml"
    wrong.write_text("chunk_sise: 4\n")
    too_large.write_text("max_hidden_state_cpu_size: 1000000\n")
    typo, large, unknown, nowhere = commands(
        ("start", *there, "--config", str(wrong)),
        ("start", *there, "--config", str(too_large), "--json"),
        ("strat",),
        ("status", "--address", "127.0.0.1:1"),
    )
    assert (typo.returncode, typo.stdout) == (1, "")
    assert typo.stderr.startswith("Error: unknown key 'chunk_sise'")
    assert len(typo.stderr.splitlines()) == 1
    error = reply(large)["error"]
    assert large.returncode == 1
    assert error["type"] == "PoolTooLargeError"
    assert "max_hidden_state_cpu_size" in error["message"]
    assert nodes_of(name) == []
    assert unknown.returncode == 2
    assert "strat" in unknown.stderr
    assert (nowhere.returncode, nowhere.stdout) == (1, "")
    assert nowhere.stderr.startswith("Error: no Ray cluster can be joined at 127.0.0.1:1")
    assert ": [Errno 111] Connection refused (start one with" in nowhere.stderr
    assert len(nowhere.stderr.splitlines()) == 1


@pytest.mark.skipif(not (Path(sys.executable).parent / "hs-cache").exists(), reason="hs_cache is not installed here")
def test_the_console_script_in_a_directory_with_its_own_actors(address: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "actors.py").write_text("raise RuntimeError('the wrong module')\n")
    (tmp_path / "cache.yaml").write_text(CONFIG)
    script = str(Path(sys.executable).parent / "hs-cache")
    done = run_python(
        [script, "start", "--address", address, "--service", name, "--json", "--config", "cache.yaml"], cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    cache = hs_cache.connect(service=name)
    assert cache is not None
    assert cache.chunk_size == CHUNK_SIZE
    assert cache.store(range(8), {0: make_rows(8, 1)}).stored == 2
