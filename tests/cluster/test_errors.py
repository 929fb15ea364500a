"""What a user is told where something is missing, differs or can't be reached: one sentence, and no stack trace."""

import logging
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import ray

import hs_cache
from actors import deploy
from hs_cache.config import CacheConfig
from hs_cache.errors import ConfigMismatchError, PoolError
from hs_cache.messages import ClientInfo
from hs_cache.router import HIDDEN_STATES, find_actor, is_running, nodes_of
from tests.builders import CHUNK_SIZE
from tests.cluster.bare import bare_python, raylet
from tests.cluster.conftest import POOL_GIB
from tests.messages import said
from tests.processes import ROOT, free_port, listens, run_python, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(400)]

SETTINGS = {"chunk_size": CHUNK_SIZE, "max_hidden_state_cpu_size": POOL_GIB}
CONNECT = """
import hs_cache
try: hs_cache.connect()
except hs_cache.HiddenStateCacheError as error: print(f"{type(error).__name__}: {error}")
"""
NEWER = "import ray; ray.__version__ = '99.0.0'\n"


class Said:
    """What a command, or a script that connects, came to."""

    def __init__(self, done: "subprocess.CompletedProcess[str]") -> None:
        self.code, self.output, self.errors = done.returncode, done.stdout, done.stderr

    def __repr__(self) -> str:
        return f"exit code {self.code}\n{self.output}\n{self.errors}"

    def command_said(self, name: str) -> bool:
        """Whether a command failed with that message as its last line, and without a stack trace."""
        last = (self.errors.strip().splitlines() or [""])[-1]
        return self.code == 1 and "Traceback" not in self.errors and last.startswith("Error: ") and said(name, last)

    def script_said(self, name: str) -> bool:
        """Whether `CONNECT` caught an error of ours with that message, of a single line."""
        return self.code == 0 and len(self.output.splitlines()) == 1 and said(name, self.output)


def command(*line: str, given: str = "", environ: Mapping[str, str] | None = None, cwd: Path = ROOT) -> Said:
    return Said(run_python(["-m", "actors", *line], given=given, environ=environ, cwd=cwd))


def connect(environ: Mapping[str, str], before: str = "") -> Said:
    return Said(run_python(["-c", before + CONNECT], environ=environ))


@pytest.mark.parametrize("address", ["nowhere", "127.0.0.1:refused", "http://127.0.0.1:8265", "silent"])
def test_an_address_where_there_is_no_cluster(address: str, nothing_left_over: None) -> None:
    with socket.socket() as silent:
        silent.bind(("0.0.0.0", 0))
        silent.listen()
        port = silent.getsockname()[1] if address == "silent" else free_port()
        where = address.replace("refused", str(port)).replace("silent", f"127.0.0.1:{port}")
        with ThreadPoolExecutor() as pool:
            told = pool.submit(command, "status", "--address", where)
            connected = pool.submit(connect, {"RAY_ADDRESS": where})
    assert told.result().command_said("no cluster"), told.result()
    assert connected.result().script_said("no cluster"), connected.result()


def test_no_cluster_at_all(nothing_left_over: None, tmp_path: Path) -> None:
    apart = ["unshare", "--pid", "--fork", "--mount-proc"]  # or the clusters of others would be found
    if shutil.which("unshare") is None or subprocess.run([*apart, "true"], check=False, capture_output=True).returncode:
        pytest.skip("pid namespaces can't be made here")
    for name in ("status", "doctor", "stop"):
        done = subprocess.run(
            [*apart, sys.executable, "-m", "actors", name],
            cwd=ROOT,
            env={**os.environ, "RAY_TMPDIR": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert Said(done).command_said("no cluster"), Said(done)
        assert "on this machine" in done.stderr


def test_a_directory_for_ray_that_cannot_be_made(nothing_left_over: None) -> None:
    apart = ["unshare", "--pid", "--fork", "--mount-proc"]
    if shutil.which("unshare") is None or subprocess.run([*apart, "true"], check=False, capture_output=True).returncode:
        pytest.skip("pid namespaces can't be made here")
    line = [*apart, sys.executable, "-c", CONNECT]
    environ = {**os.environ, "RAY_TMPDIR": "/dev/null/ray"}
    done = subprocess.run(line, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert Said(done).script_said("no cluster"), Said(done)
    assert "/dev/null/ray" in done.stdout


@contextmanager
def cluster_with_a_token(token: str) -> Iterator[str]:
    """A Ray cluster of its own that wants a token; its address."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="hs", dir="/tmp", ignore_cleanup_errors=True) as directory:
        head = ["-m", "ray.scripts.scripts", "start", "--head", f"--port={port}", "--num-cpus=1", "--block"]
        head += ["--include-dashboard=false", f"--temp-dir={directory}", "--object-store-memory=80000000"]
        process = subprocess.Popen(
            [sys.executable, *head],
            env={**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            wait_until(lambda: listens(port), "the cluster is there", timeout_s=120)
            yield f"127.0.0.1:{port}"
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def test_another_token_than_the_clusters(nothing_left_over: None, tmp_path: Path) -> None:
    right, wrong = uuid.uuid4().hex, uuid.uuid4().hex
    home = {"HOME": str(tmp_path)}
    environs = [
        {**home, "RAY_AUTH_MODE": "disabled"},
        {**home, "RAY_AUTH_MODE": "token"},
        {**home, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": wrong},
    ]
    with cluster_with_a_token(right) as address, ThreadPoolExecutor(max_workers=2) as pool:
        told = list(pool.map(lambda environ: command("status", "--address", address, environ=environ), environs))
        connected = list(pool.map(lambda environ: connect({**environ, "RAY_ADDRESS": address}), environs[1:]))
    for found in told:
        assert found.command_said("token"), found
    for found in connected:
        assert found.script_said("token"), found


def test_other_versions_than_the_clusters(address: str) -> None:
    found = connect({"RAY_ADDRESS": address}, before=NEWER)
    assert found.script_said("versions"), found
    assert "99.0.0" in found.output
    assert ray.__version__ in found.output


def test_ray_or_pytorch_that_is_too_old_or_missing(nothing_left_over: None, tmp_path: Path) -> None:
    old = tmp_path / "old" / "ray-2.9.3.dist-info"
    old.mkdir(parents=True)
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: ray\nVersion: 2.9.3\n")
    environ = {"PYTHONPATH": f"{old.parent}:{ROOT}"}
    found, script = command("status", environ=environ), connect(environ)
    assert found.command_said("ray"), found
    assert script.script_said("ray"), script
    assert "2.9.3" in found.errors
    assert "-m pip install 'ray[default]>=2.60'" in found.errors
    as_json = command("status", "--json", environ=environ)
    assert as_json.code == 1
    assert said("ray", as_json.output)

    python = bare_python(tmp_path / "bare", "torch")
    if python:
        line = [python, "-m", "actors", "status"]
        environ = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(line, env=environ, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert Said(done).command_said("torch"), Said(done)


def test_another_python(nothing_left_over: None) -> None:
    pythons = [*Path.home().glob(".pyenv/versions/3.[89].*/bin/python"), *Path("/usr/bin").glob("python3.[89]")]
    if not pythons:
        pytest.skip("neither Python 3.8 nor 3.9 is here")
    line = [str(pythons[0]), "-m", "actors", "status"]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    assert Said(done).command_said("python"), Said(done)
    assert platform.python_version() not in done.stderr


def test_a_service_that_was_not_started(address: str, name: str) -> None:
    there = ("--address", address, "--service", name)
    with ThreadPoolExecutor() as pool:
        lines = (("bump-revision", *there, "--model", "m"), ("status", *there), ("stop", *there), ("doctor", *there))
        bumped, status, stopped, doctor = pool.map(lambda line: command(*line), lines)
    assert bumped.command_said("no service"), bumped
    assert (status.code, status.errors) == (1, "")
    assert "start one with: hs-cache start" in status.output
    assert (stopped.code, stopped.errors) == (0, "")
    assert (doctor.code, doctor.errors) == (1, "")
    assert f"-> start it: hs-cache start --service {name}" in doctor.output
    assert hs_cache.connect({"enable_hidden_state_cache": False}, service=name) is None
    assert not is_running(name)


def test_a_process_that_has_left_its_cluster(nothing_left_over: None) -> None:
    found = Said(run_python(["-c", CONNECT.replace("connect()", "start()")]))
    assert found.script_said("left"), found


def test_a_service_that_no_node_matches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    deploy.start(CacheConfig(**SETTINGS, node_selector={"resources": {"none has this": 1}}), service=name)
    with pytest.raises(hs_cache.ServiceNotRunningError) as caught:
        hs_cache.connect(service=name)
    assert said("no node", str(caught.value))


def test_settings_that_differ_from_the_services(address: str, name: str, caplog: pytest.LogCaptureFixture) -> None:
    deploy.start(CacheConfig(**SETTINGS), service=name)
    with pytest.raises(ConfigMismatchError) as refused:
        hs_cache.connect({"chunk_size": 2 * CHUNK_SIZE}, service=name)
    assert said("chunk size", str(refused.value))
    for settings, differing in (
        ({"kv_source": "none"}, "kv_source is 'reports', asked for 'none'"),
        ({"pre_caching_hash_algorithm": "sha256_cbor"}, "pre_caching_hash_algorithm is 'builtin'"),
        ({"kv_hash_seed": 0}, "kv_hash_seed is None, asked for '0'"),
    ):
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="hs_cache"):
            cache = hs_cache.connect(settings, service=name)
        assert cache is not None
        assert cache.config.kv_source == "reports"
        (warning,) = [record.message for record in caplog.records]
        assert said("keeps", warning)
        assert differing in warning
    there = ("--address", address, "--service", name)
    other = command("start", *there, "--config", "-", given="kv_source: none\n")
    assert other.command_said("other settings"), other
    typo = command("start", *there, "--config", "-", given="")
    assert typo.command_said("no cluster") is False
    assert typo.errors == "Error: standard input: got None, expected a mapping of keys to values\n"


def test_a_key_that_there_is_not(address: str, name: str, tmp_path: Path) -> None:
    path = tmp_path / "cache.yaml"
    path.write_text("chunk_sise: 4\n")
    found = command("start", "--address", address, "--service", name, "--config", str(path))
    assert found.command_said("unknown key"), found
    assert not is_running(name)


def test_a_protocol_of_another_version(name: str) -> None:
    (node_id,) = deploy.start(CacheConfig(**SETTINGS), service=name)
    info = ClientInfo(b"client", os.getpid(), None, node_id, protocol=0)
    with pytest.raises(ConfigMismatchError) as caught:
        ray.get(find_actor(name, HIDDEN_STATES, node_id).attach.remote(info))
    assert said("protocol", str(caught.value))


def test_a_pool_that_is_too_large(address: str, name: str) -> None:
    found = command(
        "start", "--address", address, "--service", name, "--config", "-", given="max_hidden_state_cpu_size: 100000\n"
    )
    assert found.command_said("too large"), found
    assert nodes_of(name) == []


def test_a_pool_that_a_limit_forbids(address: str, name: str) -> None:
    limited = (
        "import os, resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (200_000_000, 200_000_000)); "
        "os.execv(sys.argv[1], sys.argv[1:])"
    )
    selector = {"labels": {"size": "limited"}}
    line = [sys.executable, "-c", limited, sys.executable]
    with raylet(line, address, "--labels=size=limited", environ=os.environ) as node_id:
        config = CacheConfig(**{**SETTINGS, "max_hidden_state_cpu_size": 0.25}, node_selector=selector)
        with pytest.raises((PoolError, hs_cache.ServiceError)) as caught:
            deploy.start(config, service=name)
        assert said("limit", str(caught.value))
        assert node_id in str(caught.value)
        assert "ulimit -f" in str(caught.value)
        assert nodes_of(name) == []


def test_a_node_without_the_package(address: str, name: str, tmp_path: Path) -> None:
    python = bare_python(tmp_path / "bare")
    if not python:
        pytest.skip("this package is not installed in a way that leaves a Python without it")
    outside = {"cwd": tmp_path, "environ": {"PYTHONPATH": str(ROOT)}}  # or workers find it in the driver's directory
    there = ("--address", address, "--service", name)
    with raylet([python], address, "--labels=package=none") as node_id:
        settings = "max_hidden_state_cpu_size: 0.015625\nnode_selector: all\n"
        started = command("start", *there, "--config", "-", given=settings, **outside)
        assert started.command_said("node without"), started
        assert node_id in started.errors
        assert "install hs-cache on that node too" in started.errors
        assert not is_running(name)

        (tmp_path / "job.py").write_text(JOB)
        line = ["job.py", address, name, node_id]
        done = run_python(line, **outside)
        assert done.returncode == 0, done.stderr
        task, actor = done.stdout.split("---")
        assert said("worker without", task)
        assert said("worker without", actor)


JOB = """
import logging, sys
import ray, hs_cache
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
ray.init(address=sys.argv[1], logging_level=logging.ERROR, log_to_driver=False)
selector = {"resources": {"CPU": 2}}
cache = hs_cache.connect({"max_hidden_state_cpu_size": 0.015625, "node_selector": selector}, service=sys.argv[2])

def read(cache):
    return cache.retrieve(range(8), 0).num_tokens

class Reader:
    def __init__(self, cache):
        self.cache = cache

    def ready(self):
        return True

options = {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(sys.argv[3], soft=False)}
try:
    ray.get(ray.remote(read).options(max_retries=0, **options).remote(cache), timeout=60)
except ray.exceptions.RayError as error:
    print(error)
print("---")
try:
    ray.get(ray.remote(Reader).options(**options).remote(cache).ready.remote(), timeout=60)
except ray.exceptions.RayError as error:
    print(error)
"""
