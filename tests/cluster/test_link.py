"""Two hosts and the link between them: network namespaces with a raylet in each; the link is cut under load and healed.

Run as a script, this file is a driver in one of the namespaces, which takes commands as JSON lines.
"""

import json
import logging
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

import hs_cache
from actors import deploy
from hs_cache.config import CacheConfig
from hs_cache.router import find_controller
from tests.processes import ROOT, wait_until

pytestmark = pytest.mark.long

PORT = 6379
CHUNK_SIZE = 16
RPC_TIMEOUT_S = 1.0
SLACK_S = 2.0
"""Beyond a call's deadline: two cores run two clusters' worth of processes."""

TOKENS = 1024
DIM = 512
"""1 MiB of bf16 per prompt: too large to travel inside a reply, so it goes through the object stores."""

SETTINGS = {
    "chunk_size": CHUNK_SIZE,
    "max_hidden_state_cpu_size": 1 / 16,
    "rpc_timeout_s": RPC_TIMEOUT_S,
    "node_selector": "all",
}


class Host:
    """A network namespace with an address, a raylet in it, and a driver; everything in it is ended by pid."""

    def __init__(self, name: str, number: int, directory: Path) -> None:
        self.name = name
        self.address = f"10.77.0.{number}"
        self._directory = directory
        self._environ = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_TMPDIR": str(directory)}
        self._raylets = 0
        self._driver: subprocess.Popen[str] | None = None
        self._replies: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._started: list[subprocess.Popen[Any]] = []

    def _start(self, *line: str, **options: Any) -> Any:
        command = ["ip", "netns", "exec", self.name, sys.executable, *line]
        process = subprocess.Popen(command, cwd=ROOT, env=self._environ, **options)
        self._started.append(process)
        return process

    def start_raylet(self, head: "Host") -> None:
        """Start it, with directories of its own. Doesn't wait."""
        self._raylets += 1
        directory = self._directory / f"{self.name}{self._raylets}"
        as_head = ["--head", f"--port={PORT}", "--include-dashboard=false"]
        role = as_head if head is self else [f"--address={head.address}:{PORT}"]
        with open(self._directory / f"{self.name}{self._raylets}.log", "w") as log:
            self._start(
                *("-m", "ray.scripts.scripts", "start", *role, f"--node-ip-address={self.address}", "--num-cpus=1"),
                *(f"--temp-dir={directory}", f"--object-store-memory={128 << 20}"),
                *("--disable-usage-stats", "--block"),
                stdout=log,
                stderr=log,
            )

    def start_driver(self, head: "Host") -> None:
        """Start a driver that joins through this host's raylet."""
        with open(self._directory / f"{self.name}.driver.log", "a") as log:
            self._driver = self._start(
                *("-m", "tests.cluster.test_link", f"{head.address}:{PORT}", self.address),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self._replies = queue.SimpleQueue()
        threading.Thread(target=self._read, args=(self._driver.stdout, self._replies), daemon=True).start()

    @staticmethod
    def _read(lines: Any, replies: "queue.SimpleQueue[str]") -> None:
        for line in lines:
            replies.put(line)
        replies.put("")

    def begin(self, command: str, **arguments: Any) -> None:
        """Have the driver run one of its commands."""
        assert self._driver is not None
        assert self._driver.stdin is not None
        self._driver.stdin.write(json.dumps([command, arguments]) + "\n")
        self._driver.stdin.flush()

    def result(self, timeout_s: float = 60.0) -> Any:
        """What the command that was begun came to."""
        try:
            line = self._replies.get(timeout=timeout_s)
        except queue.Empty:
            line = ""
        assert line, f"the driver on {self.name} has ended or doesn't answer: {self.log()}"
        reply = json.loads(line)
        assert "error" not in reply, f"on {self.name}: {reply['error']}"
        return reply["result"]

    def call(self, command: str, **arguments: Any) -> Any:
        """Both."""
        self.begin(command, **arguments)
        return self.result()

    def pids(self) -> list[int]:
        """All processes in here."""
        found = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True, check=False)
        return [int(pid) for pid in found.stdout.split()]

    def log(self) -> str:
        """What the driver and the raylets said last."""
        return "\n".join(path.read_text()[-2000:] for path in sorted(self._directory.glob(f"{self.name}*.log")))

    def end_processes(self) -> None:
        """Kill all processes in here, and wait for them."""
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self._started:
            process.kill()
            process.communicate()
        self._started.clear()
        wait_until(lambda: not self.pids(), f"namespace {self.name} is empty")


class Link:
    """Two hosts, the first of them the head, and the cable between them."""

    def __init__(self, directory: Path) -> None:
        unique = f"hs{os.getpid() % 100_000}"
        self.hosts = [Host(f"{unique}{letter}", number, directory) for number, letter in ((1, "a"), (2, "b"))]

    def set_up(self) -> None:
        """Make the namespaces and the cable. `subprocess.CalledProcessError` where that isn't permitted."""
        one, other = self.hosts
        for host in self.hosts:
            _ip("netns", "add", host.name)
        _ip("link", "add", one.name, "netns", one.name, "type", "veth", "peer", "name", other.name, "netns", other.name)
        for host in self.hosts:
            _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", host.name)
            _ip("-n", host.name, "link", "set", "lo", "up")
            _ip("-n", host.name, "link", "set", host.name, "up")

    def cut(self) -> None:
        """Nothing passes any more, and nobody is told."""
        _ip("-n", self.hosts[0].name, "link", "set", self.hosts[0].name, "down")

    def heal(self) -> None:
        """It works again."""
        _ip("-n", self.hosts[0].name, "link", "set", self.hosts[0].name, "up")

    def tear_down(self) -> None:
        """End what runs there, and take all of it away."""
        for host in self.hosts:
            host.end_processes()
        for host in self.hosts:
            with suppress(subprocess.CalledProcessError):
                _ip("netns", "del", host.name)  # takes the cable with it


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], capture_output=True, text=True, check=True)


@pytest.fixture
def link(nothing_left_over: None) -> Iterator[Link]:
    """Two hosts with a raylet and a driver each; skips where namespaces can't be made."""
    if sys.platform != "linux" or shutil.which("ip") is None:
        pytest.skip("needs Linux and the ip command")
    directory = Path(tempfile.mkdtemp(prefix="hs", dir="/tmp"))  # short: sockets' paths may have 107 characters
    made = Link(directory)
    try:
        try:
            made.set_up()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces can't be made here: {error.stderr.strip()}")
        head, other = made.hosts
        head.start_raylet(head)
        wait_until(lambda: _listens(head), "the head is up")
        other.start_raylet(head)
        head.start_driver(head)
        assert head.call("start")
        wait_until(lambda: head.call("num_nodes") == 2, "both hosts are in the service")
        other.start_driver(head)
        yield made
    finally:
        made.tear_down()
        shutil.rmtree(directory)


def _listens(host: Host) -> bool:
    probe = f"import socket; socket.create_connection(({host.address!r}, {PORT}), 1)"
    line = ["ip", "netns", "exec", host.name, sys.executable, "-S", "-c", probe]
    return subprocess.run(line, capture_output=True, check=False).returncode == 0


def check_load(load: dict[str, Any]) -> None:
    """Whatever happened to the link meanwhile: nothing wrong, nothing late."""
    assert load["wrong"] == []
    assert load["slowest_retrieve_s"] < RPC_TIMEOUT_S + SLACK_S, load
    assert load["slowest_store_s"] < 2 * RPC_TIMEOUT_S + SLACK_S, load


def test_the_link_is_cut_and_healed(link: Link) -> None:
    head, other = hosts = link.hosts
    for number, host in enumerate(hosts):
        assert host.call("store", prompt=number) == TOKENS // CHUNK_SIZE
    for number, host in enumerate(reversed(hosts)):
        assert host.call("wait_for", prompt=number) == TOKENS
    assert head.call("store", prompt=2, stop=TOKENS // 2) == TOKENS // CHUNK_SIZE // 2
    assert other.call("store", prompt=2, start=TOKENS // 2) == TOKENS // CHUNK_SIZE // 2
    assert head.call("wait_for", prompt=2) == TOKENS  # half of it from each host

    # A short cut: nobody is declared dead, and all goes on when it ends.
    for host in hosts:
        host.begin("load", seconds=4.0, prompts=[0, 1, 2])
    time.sleep(1.0)  # amid the load
    link.cut()
    time.sleep(1.0)  # less than it takes to be declared dead
    link.heal()
    for host in hosts:
        check_load(host.result())
    for number, host in enumerate(reversed(hosts)):
        assert host.call("wait_for", prompt=number) == TOKENS

    # A long cut: the other host is declared dead.
    for host in hosts:
        host.begin("load", seconds=8.0, prompts=[0, 1, 2])
    time.sleep(1.0)
    link.cut()
    loads = [host.result() for host in hosts]
    for number, load in enumerate(loads):
        check_load(load)
        assert load["tokens"][number][-1] == TOKENS, "what is on this host is hit all the time"
        assert load["tokens"][1 - number][-1] == 0
    assert loads[0]["tokens"][2][-1] == TOKENS // 2
    wait_until(lambda: head.call("num_nodes") == 1, "the other host is declared dead")
    assert head.call("store", prompt=3) == TOKENS // CHUNK_SIZE

    link.heal()
    other.end_processes()
    other.start_raylet(head)
    wait_until(lambda: head.call("num_nodes") == 2, "the other host is back")
    other.start_driver(head)
    assert other.call("wait_for", prompt=0) == TOKENS
    assert other.call("store", prompt=1) == TOKENS // CHUNK_SIZE
    assert head.call("wait_for", prompt=1) == TOKENS
    head.call("stop")


class Driver:
    """The commands, in a process in a namespace. Every number of a row says prompt and token."""

    def __init__(self, address: str, own_address: str) -> None:
        ray.init(address=address, _node_ip_address=own_address, logging_level=logging.ERROR, log_to_driver=False)
        self._cache: Any = None

    def _connected(self) -> Any:
        self._cache = self._cache or hs_cache.connect()
        return self._cache

    def start(self) -> list[str]:
        """Start the service."""
        return deploy.start(CacheConfig(**SETTINGS))

    def stop(self) -> int:
        """Stop it."""
        return deploy.stop()

    def num_nodes(self) -> int:
        """Nodes of the service, as its controller knows them."""
        nodes = ray.get(find_controller("default").stats.remote(), timeout=5).nodes
        return len(nodes)

    def store(self, prompt: int, start: int = 0, stop: int = TOKENS) -> int:
        """Store a part of a prompt; chunks stored."""
        ids, rows = _prompt(prompt)
        return int(self._connected().store(ids[:stop], {0: rows[start:stop]}, token_offset=start).stored)

    def wait_for(self, prompt: int) -> int:
        """Wait until a whole prompt is hit; its tokens."""
        ids, rows = _prompt(prompt)
        hit = self._connected().retrieve(ids, 0, wait_s=15)
        if hit and not torch.equal(hit[0], rows[: hit.num_tokens]):
            raise AssertionError("wrong rows")
        return int(hit.num_tokens)

    def load(self, seconds: float, prompts: list[int]) -> dict[str, Any]:
        """Retrieve and store all the time; `tokens` is what every retrieve of each prompt found."""
        found: dict[str, Any] = {"tokens": [[] for _ in prompts], "wrong": []}
        slowest = {"retrieve": 0.0, "store": 0.0}
        until = time.monotonic() + seconds
        fresh = 1000
        while time.monotonic() < until:
            for prompt in prompts:
                ids, rows = _prompt(prompt)
                begin = time.monotonic()
                hit = self._connected().retrieve(ids, 0)
                slowest["retrieve"] = max(slowest["retrieve"], time.monotonic() - begin)
                found["tokens"][prompt].append(hit.num_tokens)
                if hit and not torch.equal(hit[0], rows[: hit.num_tokens]):
                    found["wrong"].append(f"{hit.num_tokens} tokens of prompt {prompt}")
            fresh += 1
            begin = time.monotonic()
            self.store(fresh, stop=CHUNK_SIZE)
            slowest["store"] = max(slowest["store"], time.monotonic() - begin)
        return {**found, "slowest_retrieve_s": slowest["retrieve"], "slowest_store_s": slowest["store"]}


def _prompt(number: int) -> tuple[range, torch.Tensor]:
    ids = range(number * TOKENS, (number + 1) * TOKENS)
    position = torch.arange(TOKENS)[:, None] + torch.arange(DIM)
    return ids, ((position * 7 + number * 13) % 251).to(torch.bfloat16)


def main() -> None:
    """Obey until standard input ends."""
    replies, sys.stdout = sys.stdout, sys.stderr  # Ray prints what it has to say
    driver = Driver(*sys.argv[1:])
    for line in sys.stdin:
        command, arguments = json.loads(line)
        try:
            reply = {"result": getattr(driver, command)(**arguments)}
        # Told to whoever gave the command.
        except Exception as error:
            reply = {"error": f"{command}: {type(error).__name__}: {error}"}
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main()
