"""cluster.yaml and examples/kuberay.yaml, as far as that can be told without a cloud: keys, options, names, versions.

Not checked: that the instance types and images exist, that setup succeeds on them, and KubeRay's own schema.
"""

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
import ray
import yaml
from jsonschema import ValidationError
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.scripts import scripts as ray_commands

import actors.commands  # adds its commands to the others
from hs_cache.cli import cli
from hs_cache.config import CacheConfig

ROOT = Path(__file__).parents[2]
GIB = 1 << 30
UNITS = {"Gi": GIB, "g": GIB}


def load(path: str) -> dict[str, Any]:
    document = yaml.safe_load((ROOT / path).read_text())
    assert isinstance(document, dict)
    return document


def parse(line: str) -> dict[str, str]:
    """Check every hs-cache and ray command of a shell line against its real options; what the line sets for them."""
    environ: dict[str, str] = {}
    checked = 0
    for command in re.split(r"&&|\|\||;|\bdo\b", line):
        words = shlex.split(command)
        while words and (setting := re.fullmatch(r"([A-Z][A-Z0-9_]*)=(.*)", words[0])):
            environ[setting[1]] = setting[2]
            words.pop(0)
        while words and words[0] in ("until", "while", "nohup"):
            words.pop(0)
        if words and words[0] in ("hs-cache", "ray"):
            group: Any = cli if words[0] == "hs-cache" else ray_commands.cli
            subcommand: click.Command = group.commands[words[1]]
            subcommand.make_context(words[1], words[2:])  # a UsageError for what it doesn't know
            checked += 1
    assert checked or "hs-cache" not in line, line
    return environ


def settings(environ: dict[str, str]) -> CacheConfig:
    return CacheConfig.load({}, environ=environ)


def quantity(text: str) -> int:
    number, unit = re.fullmatch(r"([0-9]+)([A-Za-z]*)", text).groups()  # type: ignore[union-attr]
    return int(number) * UNITS[unit]


def assert_is_the_tested_ray(image: str) -> None:
    version, python, _ = re.fullmatch(r"rayproject/ray:([0-9.]+)-py3([0-9]+)-(cu[0-9]+)", image).groups()  # type: ignore[union-attr]
    assert version == ray.__version__
    assert f"ray=={version}\n" in (ROOT / "constraints.txt").read_text()
    assert 10 <= int(python) <= 13


@pytest.fixture
def cluster() -> dict[str, Any]:
    return load("cluster.yaml")


def start_of_service(commands: list[str]) -> dict[str, str]:
    """The environment of the one command that starts the service."""
    (line,) = (line for line in commands if "hs-cache" in line)
    return parse(line)


def test_the_cluster_file_is_valid(cluster: dict[str, Any]) -> None:
    validate_config(prepare_config(cluster))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda file: file.update(max_worker=8),
        lambda file: file.update(head_node_type="haed"),
        lambda file: file["docker"].update(run_option=[]),
        lambda file: file["docker"].update(run_options="--shm-size=32g"),
        lambda file: file["available_node_types"]["gpu"].update(min_worker=1),
        lambda file: file["available_node_types"]["gpu"].update(min_workers=9),
    ],
)
def test_a_mistake_in_the_cluster_file_is_found(cluster: dict[str, Any], spoil: Callable[[Any], None]) -> None:
    spoil(cluster)
    with pytest.raises((ValidationError, ValueError)):
        validate_config(prepare_config(cluster))


@pytest.mark.parametrize(
    "line",
    ["hs-cache strat", "A=1 hs-cache start --sevice x", "ray start --haed"],
)
def test_a_mistake_in_a_command_is_found(line: str) -> None:
    with pytest.raises((click.UsageError, KeyError)):
        parse(line)


def test_the_commands_of_the_cluster_file(cluster: dict[str, Any]) -> None:
    lines = [line for name, value in cluster.items() if name.endswith("_commands") for line in value]
    assert sum("hs-cache start" in line for line in lines) == 1
    for line in lines:
        parse(line)
    assert actors.commands.start is cli.commands["start"]
    config = settings(start_of_service(cluster["head_start_ray_commands"]))
    assert config.node_selector == "gpu"  # no GPU node is there when it starts
    (installed,) = cluster["setup_commands"]
    assert installed.removeprefix("pip install ") in cluster["file_mounts"]


def test_the_nodes_of_the_cluster_file(cluster: dict[str, Any]) -> None:
    types = cluster["available_node_types"]
    assert "GPU" not in types[cluster["head_node_type"]]["resources"]
    workers = {name: node for name, node in types.items() if name != cluster["head_node_type"]}
    assert any(node["resources"].get("GPU", 0) for node in workers.values())
    for node in types.values():
        assert node["min_workers"] <= node["max_workers"] <= cluster["max_workers"]


def test_the_container_of_the_cluster_file(cluster: dict[str, Any]) -> None:
    docker = cluster["docker"]
    assert_is_the_tested_ray(docker["image"])
    (shm,) = (option for option in docker["run_options"] if option.startswith("--shm-size="))
    assert quantity(shm.removeprefix("--shm-size=")) >= 8 * GIB
    assert "--ulimit memlock=-1:-1" in docker["run_options"]
    assert "-e RAY_AUTH_MODE=token" in docker["run_options"]
    assert cluster["file_mounts"]["/home/ray/.ray/auth_token"] == "~/.ray/auth_token"


@pytest.fixture
def kuberay() -> dict[str, Any]:
    return load("examples/kuberay.yaml")


def pods(kuberay: dict[str, Any]) -> list[dict[str, Any]]:
    groups = [kuberay["spec"]["headGroupSpec"], *kuberay["spec"]["workerGroupSpecs"]]
    return [group["template"]["spec"] for group in groups]


def test_versions_and_images_of_kuberay(kuberay: dict[str, Any]) -> None:
    assert (kuberay["apiVersion"], kuberay["kind"]) == ("ray.io/v1", "RayCluster")
    assert kuberay["spec"]["rayVersion"] == ray.__version__
    assert kuberay["spec"]["authOptions"] == {"mode": "token"}
    images = {container["image"] for pod in pods(kuberay) for container in pod["containers"]}
    assert len(images) == 1
    comment = (ROOT / "examples/kuberay.yaml").read_text()
    (base,) = re.findall(r"^# +FROM (\S+)$", comment, re.MULTILINE)
    assert_is_the_tested_ray(base)
    assert base == load("cluster.yaml")["docker"]["image"]


def test_the_head_of_kuberay_starts_the_service(kuberay: dict[str, Any]) -> None:
    (head,) = pods(kuberay)[0]["containers"]
    shell, flags, script = head["lifecycle"]["postStart"]["exec"]["command"]
    assert (shell, flags) == ("/bin/bash", "-lc")
    inner = re.fullmatch(r"nohup sh -c '(.*)' >(\S+) 2>&1 &\n?", script)
    assert inner is not None
    assert "hs-cache start" in inner[1]
    parse(inner[1])
    config = settings({variable["name"]: variable["value"] for variable in head["env"]})
    assert config.node_selector == "gpu"


def test_the_workers_of_kuberay(kuberay: dict[str, Any]) -> None:
    (group,) = kuberay["spec"]["workerGroupSpecs"]
    assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    (head,), (worker,) = (pod["containers"] for pod in pods(kuberay))
    limits, requests = worker["resources"]["limits"], worker["resources"]["requests"]
    assert limits == requests
    assert int(limits["nvidia.com/gpu"]) >= 1
    assert "nvidia.com/gpu" not in head["resources"]["limits"]
    assert "IPC_LOCK" in worker["securityContext"]["capabilities"]["add"]

    (shm,) = pods(kuberay)[1]["volumes"]
    assert worker["volumeMounts"] == [{"name": shm["name"], "mountPath": "/dev/shm"}]
    assert shm["emptyDir"]["medium"] == "Memory"
    pool = settings({variable["name"]: variable["value"] for variable in head["env"]}).max_hidden_state_cpu_bytes
    assert pool + quantity(shm["emptyDir"]["sizeLimit"]) < quantity(limits["memory"])
