"""The pipeline of examples/serve_pipeline, deployed from its config file on three nodes of its own, over HTTP."""

import base64
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
import wave
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tests.cluster.conftest import RUN_ID
from tests.cluster.serving import PATIENT
from tests.processes import ROOT, free_port, is_running, kill, listens, wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

pytest.importorskip("transformers")

EXAMPLES = ROOT / "examples"
CONFIG = EXAMPLES / "serve_pipeline" / "serve_config.yaml"
TURN_S = 120.0
DEPLOYED_S = 400.0
BIN = Path(sys.executable).parent


class Pipeline:
    """A deployed application, as a client sees it."""

    def __init__(self, dashboard: str, port: int, config: dict[str, Any], directory: Path) -> None:
        self._dashboard = dashboard
        self._config = config
        self._file = directory / "serve_config.yaml"
        self.url = f"http://127.0.0.1:{port}"

    def deploy(self, thinkers: int) -> None:
        """``serve deploy`` with so many thinkers; blocks until they run."""
        for deployment in self._config["applications"][0]["deployments"]:
            if deployment["name"] == "Thinker":
                deployment["autoscaling_config"] |= {"min_replicas": thinkers, "max_replicas": thinkers}
        self._file.write_text(yaml.safe_dump(self._config), encoding="utf-8")
        line = [str(BIN / "serve"), "deploy", "--address", self._dashboard, str(self._file)]
        done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        wait_until(lambda: self.num_thinkers() == thinkers, f"{thinkers} thinkers run", timeout_s=DEPLOYED_S)

    def num_thinkers(self) -> int:
        """How many run, where the application is ready; 0 where it isn't."""
        with urllib.request.urlopen(f"{self._dashboard}/api/serve/applications/", timeout=30) as response:
            applications = json.loads(response.read())["applications"]
        found = applications.get("qwen3-omni", {})
        assert found.get("status") != "DEPLOY_FAILED", found
        if found.get("status") != "RUNNING":
            return 0
        return sum(replica["state"] == "RUNNING" for replica in found["deployments"]["Thinker"]["replicas"])

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
    line = [str(BIN / "ray"), "start", "--block", f"--temp-dir={directory}", "--num-cpus=8", *arguments]
    log = (directory.parent / f"{directory.name}.log").open("wb")
    with log:
        return subprocess.Popen(line, stdout=log, stderr=subprocess.STDOUT, cwd=directory.parent)


@pytest.fixture(scope="module")
def pipeline() -> Iterator[Pipeline]:
    directory = Path(tempfile.mkdtemp(prefix="hs", dir="/tmp"))  # short: Ray's sockets are in there
    port, dashboard, http = free_port(), free_port(), free_port()
    started: list[subprocess.Popen[bytes]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{EXAMPLES}")
        try:
            head = ["--head", f"--port={port}", f"--dashboard-port={dashboard}", "--include-dashboard=true"]
            started.append(start_ray(directory / "head", [*head, f"--ray-client-server-port={free_port()}"]))
            wait_until(lambda: listens(port) and listens(dashboard), "the head listens", timeout_s=120)
            for number in (1, 2):
                started.append(start_ray(directory / f"node{number}", [f"--address=127.0.0.1:{port}"]))
            config = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
            config["http_options"]["port"] = http
            config["proxy_location"] = "HeadOnly"  # the nodes share one machine, and so its ports
            (application,) = config["applications"]
            application["args"]["service"] = f"t-{RUN_ID}-pipeline"
            application["args"]["talkers"] = 1
            for deployment in application["deployments"]:
                deployment["ray_actor_options"] = {"num_cpus": 0.5}
                if deployment["name"] == "Thinker":
                    deployment["request_router_config"]["request_router_kwargs"]["service"] = f"t-{RUN_ID}-pipeline"
                    deployment["request_router_config"]["request_router_kwargs"]["timeout_s"] = 2.0
                else:
                    deployment["num_replicas"] = 1
                    deployment["ray_actor_options"]["runtime_env"] = PATIENT
            running = Pipeline(f"http://127.0.0.1:{dashboard}", http, config, directory)
            running.deploy(thinkers=2)
            yield running
        finally:
            for process in reversed(started):
                process.send_signal(signal.SIGTERM)
            for process in started:
                process.wait(timeout=60)
            shutil.rmtree(directory, ignore_errors=True)


def clip(seed: int, seconds: float = 2.0) -> str:
    samples = np.random.default_rng(seed).integers(-8000, 8000, size=int(16_000 * seconds)).astype("<i2")
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(16_000)
        out.writeframes(samples.tobytes())
    return base64.b64encode(file.getvalue()).decode()


def opening(seed: int) -> list[dict[str, Any]]:
    """A conversation that begins with a clip; only that tells it from others."""
    parts = [{"type": "audio", "wav": clip(seed)}, {"type": "text", "text": "What do you hear? " * 8}]
    return [{"role": "user", "content": parts}]


def converse(pipeline: Pipeline, messages: list[dict[str, Any]], turns: int) -> list[dict[str, Any]]:
    """The last lines of so many turns; `messages` grows."""
    found = []
    for _ in range(turns):
        text, _, done = pipeline.ask(messages)
        found.append(done)
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "And what else? " * 10}]
    return found


def test_later_turns_restore_what_was_said_and_give_what_they_give_without_a_cache(pipeline: Pipeline) -> None:
    messages = opening(1)
    for turn in range(3):
        text, codes, done = pipeline.ask(messages)
        expected_text, expected_codes, expected = pipeline.ask(messages, use_cache=False)
        assert (text, codes) == (expected_text, expected_codes)
        assert done["rows_sha256"] == expected["rows_sha256"]
        assert done["waveform_sha256"] == expected["waveform_sha256"]
        assert expected["restored_tokens"] == 0
        assert done["restored_tokens"] >= (before // 64 * 64 if turn else 0)  # noqa: F821
        before = done["prompt_tokens"]  # noqa: F841
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "And what else? " * 10}]


def test_text_and_codes_come_as_they_are_made(pipeline: Pipeline) -> None:
    lines = list(pipeline.lines(opening(2)))
    assert [next(iter(line)) for line in lines] == ["text"] * 6 + ["codes"] * 3 + ["done"]


def test_turns_go_to_the_thinker_that_has_the_conversation(pipeline: Pipeline) -> None:
    for seed in range(10, 14):
        turns = converse(pipeline, opening(seed), 3)
        assert len({turn["thinker"]["node"] for turn in turns}) == 1
        assert all(turn["moved_tokens"] == 0 for turn in turns)


def test_equal_placeholders_of_different_clips_are_told_apart(pipeline: Pipeline) -> None:
    one, other = (pipeline.ask(opening(seed))[2] for seed in (20, 21))
    assert one["prompt_tokens"] == other["prompt_tokens"]
    assert one["rows_sha256"] != other["rows_sha256"]


@pytest.mark.parametrize("stage", ["thinker", "talker"])
def test_a_replica_that_is_killed_on_the_way_is_not_noticed(pipeline: Pipeline, stage: str) -> None:
    messages = opening(30 if stage == "thinker" else 31)
    text, codes, done = pipeline.ask(messages, max_tokens=24, max_codes=16)
    lines = []
    for line in pipeline.lines(messages, max_tokens=24, max_codes=16):
        if len(lines) == (3 if stage == "thinker" else 28):
            kill(done[stage]["pid"])
        lines.append(line)
    assert "".join(line["text"] for line in lines if "text" in line) == text
    assert [line["codes"] for line in lines if "codes" in line] == codes
    again = lines[-1]["done"]
    assert again["rows_sha256"] == done["rows_sha256"]
    assert not is_running(done[stage]["pid"])
    wait_until(lambda: pipeline.num_thinkers() == 2, "two thinkers run again", timeout_s=DEPLOYED_S)


def test_scaling_down_and_up_keeps_what_is_cached(pipeline: Pipeline) -> None:
    conversations = [opening(seed) for seed in range(40, 44)]
    for messages in conversations:
        converse(pipeline, messages, 1)
    for thinkers in (1, 3, 1):
        pipeline.deploy(thinkers)
        for messages in conversations:
            before = len(messages)
            (done,) = converse(pipeline, messages, 1)
            assert done["restored_tokens"] > 0
            _, _, expected = pipeline.ask(messages[:before], use_cache=False)
            assert done["rows_sha256"] == expected["rows_sha256"]
            assert done["restored_tokens"] >= done["prompt_tokens"] - 64 - 10 * 16 - 64
    pipeline.deploy(2)


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
