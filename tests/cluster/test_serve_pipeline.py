"""The pipeline of examples/serve_pipeline over HTTP: run from its config file on one node, then deployed on three."""

import base64
import copy
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
import yaml

from tests.cluster.conftest import RUN_ID
from tests.processes import MARK, ROOT, free_port, is_running, kill, listens, marked_processes, stopped, wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]

pytest.importorskip("transformers")

EXAMPLES = ROOT / "examples"
CONFIG = EXAMPLES / "serve_pipeline" / "serve_config.yaml"
LOAD = EXAMPLES / "serve_pipeline" / "load.py"
TURN_S = 300.0
DEPLOYED_S = 400.0
BIN = Path(sys.executable).parent
TWO_OF_EACH = {"Chat": 2, "Thinker": 2, "Talker": 2}


class Pipeline:
    """The application, as a client and an operator see it.

    Args:
        ray, dashboard: addresses.
        config: of the config file.
        directory: for what is written.
    """

    def __init__(self, ray: str, dashboard: str, config: dict[str, Any], directory: Path) -> None:
        self._ray = ray
        self._dashboard = dashboard
        self._config = config
        self._file = directory / "serve_config.yaml"
        self.chunk_size: int = config["applications"][0]["args"]["cache"]["chunk_size"]
        self.url = f"http://127.0.0.1:{config['http_options']['port']}"

    @contextmanager
    def run(self) -> Iterator[None]:
        """``serve run`` with the file as it is, ended by Ctrl-C."""
        self._write(self._config)
        line = [str(BIN / "serve"), "run", "--address", self._ray, str(self._file)]
        with self._file.with_suffix(".log").open("wb") as log:
            process = subprocess.Popen(line, stdout=log, stderr=subprocess.STDOUT, cwd=self._file.parent)
        try:
            wait_until(
                lambda: process.poll() is not None or self._counts() == TWO_OF_EACH,
                "all run",
                timeout_s=DEPLOYED_S,
                poll_s=1.0,
            )
            assert process.poll() is None, self._file.with_suffix(".log").read_text()
            yield
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(timeout=120)
        wait_until(lambda: not self._counts(), "nothing runs", timeout_s=120)

    def deploy(self, **autoscaling: Any) -> None:
        """``serve deploy`` with thinkers and talkers on nodes of their own; blocks until what was asked for runs."""
        config = copy.deepcopy(self._config)
        for deployment in config["applications"][0]["deployments"]:
            if deployment["name"] != "Chat":
                deployment["max_replicas_per_node"] = 1
            if deployment["name"] == "Thinker":
                deployment["autoscaling_config"] |= autoscaling
        self._write(config)
        line = [str(BIN / "serve"), "deploy", "--address", self._dashboard, str(self._file)]
        done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        self.wait_for(Thinker=autoscaling.get("min_replicas", 2))

    def wait_for(self, **counts: int) -> None:
        """Until so many replicas run, two of what isn't named."""
        wanted = TWO_OF_EACH | counts
        wait_until(lambda: self._counts() == wanted, f"{wanted} run", timeout_s=DEPLOYED_S, poll_s=1.0)

    def pids(self, deployment: str) -> list[int]:
        """Of the replicas that run."""
        replicas = self._deployments()[deployment]["replicas"]
        return [replica["pid"] for replica in replicas if replica["state"] == "RUNNING"]

    def nodes(self, deployment: str) -> set[str]:
        """Where its replicas are."""
        return {replica["node_id"] for replica in self._deployments()[deployment]["replicas"]}

    def _counts(self) -> dict[str, int]:
        """Replicas, all of which run; empty where the application isn't ready."""
        deployments = self._deployments()
        replicas = {name: details["replicas"] for name, details in deployments.items()}
        if any(replica["state"] != "RUNNING" for found in replicas.values() for replica in found):
            return dict.fromkeys(replicas, 0)
        return {name: len(found) for name, found in replicas.items()}

    def _deployments(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self._dashboard}/api/serve/applications/", timeout=60) as response:
            found = json.loads(response.read())["applications"].get("qwen3-omni", {})
        assert found.get("status") != "DEPLOY_FAILED", found
        return found.get("deployments", {})

    def _write(self, config: dict[str, Any]) -> None:
        self._file.write_text(yaml.safe_dump(config), encoding="utf-8")

    def lines(self, messages: list[dict[str, Any]], **more: Any) -> Iterator[dict[str, Any]]:
        """The answer's lines as they come."""
        body = json.dumps({"messages": messages, "max_tokens": 6, "max_codes": 4, **more}).encode()
        request = urllib.request.Request(f"{self.url}/chat", data=body, headers={"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=TURN_S) as response:
            yield from map(json.loads, response)

    def ask(self, messages: list[dict[str, Any]], **more: Any) -> tuple[str, list[Any], dict[str, Any]]:
        """The text, the codes, and the last line."""
        lines = list(self.lines(messages, **more))
        assert "done" in lines[-1], lines[-1]
        text = "".join(line["text"] for line in lines if "text" in line)
        return text, [line["codes"] for line in lines if "codes" in line], lines[-1]["done"]


def start_ray(directory: Path, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    line = [str(BIN / "ray"), "start", "--block", f"--temp-dir={directory}", "--num-cpus=2", *arguments]
    log = (directory.parent / f"{directory.name}.log").open("wb")
    with log:
        return subprocess.Popen(line, stdout=log, stderr=subprocess.STDOUT, cwd=directory.parent)


def config_of(http: int) -> dict[str, Any]:
    """The config file, with a port and a service of this run, and time for a busy machine."""
    config: dict[str, Any] = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    config["http_options"]["port"] = http
    config["proxy_location"] = "HeadOnly"  # the nodes share one machine, and so its ports
    config["applications"][0]["args"] |= {"service": f"t-{RUN_ID}-pipeline", "router": {"timeout_s": 2.0}}
    return config


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """The last line of a turn that was asked for on one node, for the test of that."""
    return {}


@pytest.fixture(scope="module")
def pipeline(encode: Callable[[int], str], alone: dict[str, Any]) -> Iterator[Pipeline]:
    directory = Path(tempfile.mkdtemp(prefix="hs", dir="/tmp"))  # short: Ray's sockets are in there
    port, dashboard, http = free_port(), free_port(), free_port()
    started: list[subprocess.Popen[bytes]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{EXAMPLES}")
        patch.setenv("RAY_SERVE_QUEUE_LENGTH_RESPONSE_DEADLINE_S", "5")
        try:
            head = ["--head", f"--port={port}", f"--dashboard-port={dashboard}", "--include-dashboard=true"]
            started.append(start_ray(directory / "head", [*head, f"--ray-client-server-port={free_port()}"]))
            wait_until(lambda: listens(port) and listens(dashboard), "the head listens", timeout_s=120)
            addresses = (f"127.0.0.1:{port}", f"http://127.0.0.1:{dashboard}")
            running = Pipeline(*addresses, config_of(http), directory)
            with running.run():
                alone |= running.ask(opening(encode, 0))[2]
            for number in (1, 2):
                started.append(start_ray(directory / f"node{number}", [f"--address=127.0.0.1:{port}"]))
            running.deploy()
            yield running
        finally:
            for process in reversed(started):
                process.send_signal(signal.SIGTERM)
            for process in started:
                process.wait(timeout=60)
            shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="module")
def encode() -> Iterator[Callable[[int], str]]:
    """A clip of noise with a seed, as a WAV file in base64."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        from qwen3_omni.audio import to_wav

        def noise(seed: int) -> str:
            samples = np.random.default_rng(seed).integers(-8000, 8000, size=32_000).astype(np.int16)
            return base64.b64encode(to_wav(samples)).decode()

        yield noise


def opening(encode: Callable[[int], str], seed: int) -> list[dict[str, Any]]:
    """A conversation that begins with a clip; only that tells it from others."""
    parts = [{"type": "audio", "wav": encode(seed)}, {"type": "text", "text": "What do you hear? " * 8}]
    return [{"role": "user", "content": parts}]


def converse(pipeline: Pipeline, messages: list[dict[str, Any]], turns: int = 1) -> list[dict[str, Any]]:
    """The last lines of so many turns; `messages` grows."""
    found = []
    for _ in range(turns):
        text, _, done = pipeline.ask(messages)
        found.append(done)
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "And what else? " * 10}]
    return found


@contextmanager
def under_load(pipeline: Pipeline, messages: list[dict[str, Any]], clients: int) -> Iterator[None]:
    """Clients that ask without a pause."""
    over = Event()

    def client() -> None:
        while not over.is_set():
            pipeline.ask(messages, max_tokens=48, max_codes=0)

    with ThreadPoolExecutor(clients) as threads:
        busy = [threads.submit(client) for _ in range(clients)]
        try:
            yield
        finally:
            over.set()
        for one in busy:
            one.result()


def test_what_the_readme_says_comes_up_on_one_node_and_its_cache_outlives_it(
    pipeline: Pipeline, encode: Callable[[int], str], alone: dict[str, Any]
) -> None:
    assert alone["attempts"] == 1
    again = pipeline.ask(opening(encode, 0))[2]
    assert again["rows_sha256"] == alone["rows_sha256"]
    assert again["restored_tokens"] >= alone["prompt_tokens"] // pipeline.chunk_size * pipeline.chunk_size > 0
    assert len(pipeline.nodes("Thinker")) == len(pipeline.nodes("Talker")) == 2


def test_later_turns_restore_what_was_said_and_give_what_they_give_without_a_cache(
    pipeline: Pipeline, encode: Callable[[int], str]
) -> None:
    messages = opening(encode, 1)
    before = 0
    for _ in range(3):
        text, codes, done = pipeline.ask(messages)
        expected_text, expected_codes, expected = pipeline.ask(messages, use_cache=False)
        assert (text, codes) == (expected_text, expected_codes)
        assert done["rows_sha256"] == expected["rows_sha256"]
        assert done["waveform_sha256"] == expected["waveform_sha256"]
        assert expected["restored_tokens"] == 0
        assert done["restored_tokens"] >= before // pipeline.chunk_size * pipeline.chunk_size
        before = done["prompt_tokens"]
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "And what else? " * 10}]


def test_text_and_codes_come_as_they_are_made(pipeline: Pipeline, encode: Callable[[int], str]) -> None:
    answer = pipeline.lines(opening(encode, 2))
    with ExitStack() as held_back:
        for pid in pipeline.pids("Talker"):
            held_back.enter_context(stopped(pid))
        assert [list(line) for line in islice(answer, 6)] == [["text"]] * 6
    assert [list(line) for line in answer] == [["codes"]] * 4 + [["done"]]


@pytest.mark.parametrize("count", [0, 1])
def test_as_many_codes_come_as_were_asked_for(pipeline: Pipeline, encode: Callable[[int], str], count: int) -> None:
    assert len(pipeline.ask(opening(encode, 3), max_codes=count)[1]) == count


def test_turns_go_to_the_thinker_that_has_the_conversation(pipeline: Pipeline, encode: Callable[[int], str]) -> None:
    for seed in range(10, 14):
        turns = converse(pipeline, opening(encode, seed), 3)
        assert len({turn["thinker"]["node"] for turn in turns}) == 1
        assert all(turn["moved_tokens"] == 0 for turn in turns)


def test_equal_placeholders_of_different_clips_are_told_apart(pipeline: Pipeline, encode: Callable[[int], str]) -> None:
    one, other = (pipeline.ask(opening(encode, seed))[2] for seed in (20, 21))
    assert one["prompt_tokens"] == other["prompt_tokens"]
    assert one["rows_sha256"] != other["rows_sha256"]


@pytest.mark.parametrize(("name", "kind"), [("Thinker", "text"), ("Talker", "codes")])
def test_replicas_that_are_killed_on_the_way_are_not_noticed(
    pipeline: Pipeline, encode: Callable[[int], str], name: str, kind: str
) -> None:
    messages = opening(encode, 30 + len(name))
    long = {"max_tokens": 192, "max_codes": 64}
    text, codes, done = pipeline.ask(messages, **long)
    answer = pipeline.lines(messages, **long)
    lines: list[dict[str, Any]] = []
    while not lines or kind not in lines[-1]:
        lines.append(next(answer))
    killed = pipeline.pids(name)
    for pid in killed:  # whichever of them it is
        os.kill(pid, signal.SIGKILL)
    lines += answer
    assert "".join(line["text"] for line in lines if "text" in line) == text
    assert [line["codes"] for line in lines if "codes" in line] == codes
    again = lines[-1]["done"]
    assert again["attempts"] > 1  # or there was nothing left to do for it when the first line came
    assert again["rows_sha256"] == done["rows_sha256"]
    assert not any(map(is_running, killed))
    pipeline.wait_for()
    assert not set(pipeline.pids(name)) & set(killed)


def test_hits_are_kept_while_thinkers_come_and_go_with_the_load(
    pipeline: Pipeline, encode: Callable[[int], str]
) -> None:
    conversations = [opening(encode, seed) for seed in range(40, 44)]
    lengths = [converse(pipeline, messages)[0]["prompt_tokens"] for messages in conversations]

    def go_on() -> None:
        for number, messages in enumerate(conversations):
            asked = list(messages)
            (done,) = converse(pipeline, messages)
            assert done["restored_tokens"] >= lengths[number] // pipeline.chunk_size * pipeline.chunk_size
            lengths[number] = done["prompt_tokens"]
        assert done["rows_sha256"] == pipeline.ask(asked, use_cache=False)[2]["rows_sha256"]

    quick = {"upscale_delay_s": 1, "downscale_delay_s": 3, "metrics_interval_s": 1, "look_back_period_s": 3}
    pipeline.deploy(min_replicas=1, max_replicas=3, target_ongoing_requests=1, **quick)
    go_on()
    with under_load(pipeline, opening(encode, 50), clients=6):
        pipeline.wait_for(Thinker=3)
        go_on()
    pipeline.wait_for(Thinker=1)
    go_on()
    pipeline.deploy()


def test_the_load_generator_measures_what_runs(pipeline: Pipeline) -> None:
    few = ["--rounds", "1", "--conversations", "2", "--turns", "2", "--concurrency", "2"]
    line = [sys.executable, str(LOAD), "--url", f"mine={pipeline.url}", *few]
    done = subprocess.run(
        line, capture_output=True, text=True, check=False, timeout=600, env={**os.environ, "COLUMNS": "200"}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^ *mine +4 +0 +\d", done.stdout, re.MULTILINE), done.stdout


def test_the_load_generator_ends_what_it_started(nothing_left_over: None) -> None:
    mark = f"{RUN_ID}-load"
    process = subprocess.Popen(
        [sys.executable, str(LOAD), "--port", str(free_port())],
        env={**os.environ, MARK: mark, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def raylets() -> int:
        return sum("raylet/raylet" in line for line in marked_processes(mark).values())

    try:
        wait_until(lambda: process.poll() is not None or raylets() > 1, "raylets run", timeout_s=DEPLOYED_S)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=120) not in (0, -signal.SIGTERM)
        wait_until(lambda: not marked_processes(mark), "all of it has ended", timeout_s=60)
    finally:
        for pid in marked_processes(mark):
            kill(pid)
        process.wait()


@pytest.mark.parametrize(
    ("messages", "what"),
    [
        ([{"role": "assistant", "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}], "the last is the assistant's"),
        ([{"role": "user", "content": [{"type": "audio", "wav": "AAAA"}]}], "no WAV file"),
        ([], "at least 1 item"),
    ],
)
def test_wrong_requests_are_refused(pipeline: Pipeline, messages: list[dict[str, Any]], what: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        pipeline.ask(messages)
    assert refused.value.code == 422
    assert what in refused.value.read().decode()
