"""The batch job on a Ray of its own, submitted as users do it; killed in every way, and submitted again."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.processes import MARK, ROOT, free_port, is_running, kill, listens, marked_processes, run_python, wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

pq = pytest.importorskip("pyarrow.parquet")
pytest.importorskip("transformers")

EXAMPLE = ROOT / "examples" / "batch_inference"
PATIENCE_S = 600.0
CHUNK_SIZE = 128
REPLY_TOKENS = 4
PART_ROWS = 8
NUM_PROMPTS = 24


@dataclass(frozen=True)
class Node:
    """What one ``ray start`` has started, which `run_id` marks."""

    run_id: str

    def processes(self, command: str) -> list[int]:
        """Pids of those whose command line matches."""
        return [pid for pid, line in marked_processes(self.run_id).items() if re.match(command, line)]

    def workers(self) -> list[int]:
        """Those of any job; one may be missing while it changes its title."""
        return self.processes(r"ray::Worker\b")

    def kill(self) -> None:
        """End all of it, and wait."""

        def left() -> dict[int, str]:
            found = marked_processes(self.run_id)
            for pid in found:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return found

        wait_until(lambda: not left(), "all that the node started has ended")


@dataclass(frozen=True)
class Head(Node):
    """A Ray cluster of one node, started with ``ray start --head``."""

    gcs: str
    dashboard: str
    environ: Mapping[str, str]

    def driver(self) -> int:
        """The job's; waits for it."""
        (pid,) = wait_until(lambda: self.processes(r"\S*python\S* main\.py"), "the driver runs", timeout_s=PATIENCE_S)
        return pid

    def ray(self, *line: str) -> "subprocess.CompletedProcess[str]":
        """A command of Ray's."""
        return run_python(["-m", "ray.scripts.scripts", *line], environ=self.environ)

    @contextmanager
    def another_node(self) -> "Iterator[Node]":
        """A second node, with two CPUs."""
        node = Node(f"{self.run_id}-2")
        settings = [f"--address={self.gcs}", "--block", "--num-cpus=2", "--node-ip-address=127.0.0.1"]
        process = subprocess.Popen(
            [sys.executable, "-m", "ray.scripts.scripts", "start", *settings, f"--object-store-memory={128 << 20}"],
            env={**os.environ, **self.environ, MARK: node.run_id},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            wait_until(lambda: node.processes(r"ray::HiddenStateActor"), "it has a pool", timeout_s=PATIENCE_S)
            yield node
        finally:
            node.kill()
            process.wait()

    def begin(self, log: Path, prompts: Path, output: Path, *options: str, example: Path = EXAMPLE) -> "Job":
        """Submit a job and follow it."""
        submission = f"job-{uuid.uuid4().hex[:8]}"
        submit = ["job", "submit", "--address", self.dashboard, "--submission-id", submission]
        command = ["python", "main.py", "--prompts", str(prompts), "--output", str(output)]
        settings = ["--part-rows", str(PART_ROWS), "--reply-tokens", str(REPLY_TOKENS), *options]
        line = [*submit, "--working-dir", str(example), "--", *command, *settings]
        with log.open("w") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "ray.scripts.scripts", *line],
                cwd=ROOT,
                env={**os.environ, **self.environ},
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        return Job(submission, process, log)

    def run(self, log: Path, prompts: Path, output: Path, *options: str, example: Path = EXAMPLE) -> tuple[int, str]:
        """Submit a job and wait for it; what ``ray job submit`` returned and printed."""
        return self.begin(log, prompts, output, *options, example=example).end()


@dataclass(frozen=True)
class Job:
    """``ray job submit``, which follows a job."""

    submission: str
    process: "subprocess.Popen[bytes]"
    log: Path

    def workers(self) -> list[int]:
        """Pids of all that it has had so far."""
        return [int(pid) for pid in re.findall(r"worker \d+: process (\d+) on node", self.log.read_text())]

    def end(self) -> tuple[int, str]:
        """Wait for it; what it returned and printed."""
        try:
            return self.process.wait(PATIENCE_S), self.log.read_text()
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()


@contextmanager
def started_head(environ: Mapping[str, str]) -> Iterator[Head]:
    """``ray start --head`` with the dashboard, on free ports, and a service on it."""
    run_id = uuid.uuid4().hex[:12]
    directory = Path(tempfile.mkdtemp(prefix="hs", dir="/tmp"))  # short: paths of sockets may have 107 characters
    binaries = str(Path(sys.executable).parent)  # the job's `python` is looked up where `ray start` ran
    environ = {
        MARK: run_id,
        "PATH": os.pathsep.join([binaries, os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
        "RAY_TMPDIR": str(directory),
        **environ,
    }
    gcs, dashboard, *others = (free_port() for _ in range(5))
    names = ("dashboard-agent-listen-port", "dashboard-agent-grpc-port", "ray-client-server-port")
    head = Head(run_id, f"127.0.0.1:{gcs}", f"http://127.0.0.1:{dashboard}", environ)
    with (directory / "head.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--include-dashboard=true"]
            + [f"--port={gcs}", f"--dashboard-port={dashboard}", "--node-ip-address=127.0.0.1", "--num-cpus=3"]
            + [f"--{name}={port}" for name, port in zip(names, others, strict=True)]
            + [f"--temp-dir={directory / 'ray'}", f"--object-store-memory={128 << 20}", "--disable-usage-stats"],
            env={**os.environ, **environ},
            stdout=log,
            stderr=log,
        )
    try:
        said = directory / "head.log"
        wait_until(
            lambda: process.poll() is not None or ("Ray runtime started" in said.read_text() and listens(dashboard)),
            "the head has started",
            timeout_s=PATIENCE_S,
        )
        assert process.poll() is None, said.read_text()
        config = directory / "cache.yaml"
        config.write_text(f"chunk_size: {CHUNK_SIZE}\nmax_hidden_state_cpu_size: 0.0625\n")
        line = ["-m", "actors", "start", "--address", head.gcs, "--config", str(config)]
        done = run_python(line, environ=environ)
        assert done.returncode == 0, done.stderr + said.read_text()
        yield head
        wait_until(lambda: not head.workers(), "no worker of a job is left")
    finally:
        head.kill()
        process.wait()
        shutil.rmtree(directory)


@pytest.fixture(scope="module")
def head(nothing_left_over: None) -> Iterator[Head]:
    with started_head({"RAY_AUTH_MODE": "disabled"}) as started:
        yield started


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Questions about three documents, in turns. Each document is two chunks and a bit."""
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    lines = []
    for number in range(NUM_PROMPTS):
        document = f"{number % 3} is the number of this document. " * 8
        messages = [
            {"role": "system", "content": "Answer."},
            {"role": "user", "content": f"{document}\n\nQuestion {number}: what is its number?"},
        ]
        lines.append(json.dumps({"id": f"q{number}", "messages": messages}))
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def reference(prompts: Path) -> Iterator[dict[str, Any]]:
    """Reply and embedding of each prompt, computed in this process without a cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLE))
        from batch.prompts import read_prompts
        from batch.tiny_thinker import TinyThinker

        threads = torch.get_num_threads()
        thinker = TinyThinker(None, CHUNK_SIZE)
        answers = {prompt.id: thinker.answer(prompt, REPLY_TOKENS) for prompt in read_prompts(prompts).prompts}
        torch.set_num_threads(threads)
        torch.set_grad_enabled(True)
        yield {
            ident: (answer.reply, list(answer.reply_token_ids), answer.prompt_tokens, answer.embedding.tolist())
            for ident, answer in answers.items()
        }


def rows_of(output: Path) -> list[dict[str, Any]]:
    """All rows of all parts."""
    return [row for path in sorted(output.glob("part-*.parquet")) for row in pq.read_table(path).to_pylist()]


def results(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What must not depend on what was cached; every id must be there once."""
    assert set(Counter(row["id"] for row in rows).values()) == {1}
    assert all(row["error"] is None for row in rows)
    return {row["id"]: (row["reply"], row["reply_token_ids"], row["prompt_tokens"], row["embedding"]) for row in rows}


def finished(output: Path) -> set[str]:
    """Ids of what a run has finished, in parts or in the journal."""
    ids = {row["id"] for row in rows_of(output)}
    with suppress(FileNotFoundError):
        ids |= {json.loads(line)["id"] for line in (output / "journal.jsonl").read_bytes().split(b"\n")[:-1]}
    return ids


def skipped(log: str) -> int:
    """Tokens that were skipped, as the job says at its end."""
    found = re.search(r"hit rate \d+%: ([\d,]+) of [\d,]+ prompt tokens skipped", log)
    assert found is not None, log
    return int(found[1].replace(",", ""))


def test_a_driver_that_is_killed(head: Head, prompts: Path, reference: dict[str, Any], tmp_path: Path) -> None:
    output = tmp_path / "answers"
    job = head.begin(tmp_path / "killed", prompts, output, "--num-workers", "2")
    wait_until(lambda: len(finished(output)) > PART_ROWS, "a part and more is finished", timeout_s=PATIENCE_S)
    kill(head.driver())
    code, log = job.end()
    assert code == 1, log
    wait_until(lambda: not any(map(is_running, job.workers())), "the workers have gone with their driver")
    before = finished(output)
    assert PART_ROWS < len(before) < len(reference)
    parts = {path.name: path.read_bytes() for path in output.glob("part-*.parquet")}
    (output / ".part-00007.parquet.tmp").write_bytes(b"PAR1 half of a part")

    code, log = head.run(tmp_path / "again", prompts, output, "--num-workers", "2")
    assert code == 0, log
    assert f"{NUM_PROMPTS} prompts, of which {len(before)} were finished before" in log
    assert f"{NUM_PROMPTS - len(before)} prompts answered in " in log
    assert "removed .part-00007.parquet.tmp" in log
    assert skipped(log)
    assert parts.items() <= {path.name: path.read_bytes() for path in output.glob("part-*.parquet")}.items()
    assert results(rows_of(output)) == reference
    assert {path.name for path in output.iterdir() if path.suffix != ".parquet"} == {".lock", "run.json"}

    code, log = head.run(tmp_path / "third", prompts, output)
    assert code == 0, log
    assert f"{NUM_PROMPTS} prompts, of which {NUM_PROMPTS} were finished before" in log
    assert results(rows_of(output)) == reference


def test_a_worker_that_is_killed_and_a_job_that_is_stopped(
    head: Head, prompts: Path, reference: dict[str, Any], tmp_path: Path
) -> None:
    output = tmp_path / "answers"
    job = head.begin(tmp_path / "stopped", prompts, output, "--num-workers", "1")
    wait_until(lambda: len(finished(output)) > 2, "something is finished", timeout_s=PATIENCE_S)
    (worker,) = wait_until(head.workers, "there is its worker")
    kill(worker)
    before = len(finished(output))
    wait_until(lambda: len(finished(output)) > before, "another worker goes on", timeout_s=PATIENCE_S)
    (worker,) = wait_until(head.workers, "there is the other")
    os.kill(worker, signal.SIGSTOP)  # it would be done before the job is stopped
    stopped = head.ray("job", "stop", "--address", head.dashboard, job.submission)
    assert stopped.returncode == 0, stopped.stderr
    _, log = job.end()
    assert "worker 0 was lost and is replaced: " in log
    wait_until(lambda: not any(map(is_running, job.workers())), "the workers have gone with the job")
    before = len(finished(output))
    assert before < len(reference)

    code, log = head.run(tmp_path / "again", prompts, output, "--num-workers", "2")
    assert code == 0, log
    assert f"{NUM_PROMPTS - before} prompts answered in " in log
    assert skipped(log)
    assert results(rows_of(output)) == reference


def test_a_node_that_is_lost(head: Head, prompts: Path, reference: dict[str, Any], tmp_path: Path) -> None:
    output = tmp_path / "answers"
    with head.another_node() as node:
        # too large for both to be on one node
        job = head.begin(tmp_path / "log", prompts, output, "--worker-cpus", "2", "--num-workers", "2")
        wait_until(lambda: len(finished(output)) > 2, "something is finished", timeout_s=PATIENCE_S)
        wait_until(node.workers, "one of the workers is there", timeout_s=PATIENCE_S)
        node.kill()
        code, log = job.end()
    assert code == 0, log
    assert len(re.findall(r"worker \d was lost and is replaced: ", log)) == 1
    assert skipped(log)
    assert results(rows_of(output)) == reference


OWN_MODEL = """
import os, signal, threading
import numpy as np
from batch.model import Answer

class OwnModel:
    model, revision = "own", "1"

    def __init__(self, cache, chunk_size):
        self._cache = cache

    def answer(self, prompt, reply_tokens):
        if "POISON" in prompt.text:
            os.kill(os.getpid(), signal.SIGKILL)
        if "HANGS" in prompt.text:
            threading.Event().wait()
        if "REFUSED" in prompt.text:
            raise LookupError("nothing is known about that")
        return Answer("yes", (1,), len(prompt.text), 0, np.ones(2, np.float32))

class Broken(OwnModel):
    def __init__(self, cache, chunk_size):
        raise FileNotFoundError("no weights here")
"""


def test_ones_own_model_and_prompts_that_cannot_be_answered(head: Head, tmp_path: Path) -> None:
    copied = tmp_path / "mine"
    shutil.copytree(EXAMPLE, copied)
    (copied / "own_model.py").write_text(OWN_MODEL)
    texts = {"good": "a", "poison": "a POISON", "better": "a b", "hangs": "a HANGS", "refused": "REFUSED"}
    given = [{"id": ident, "prompt": text} for ident, text in texts.items()]
    (copied / "few.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in given))
    line = ("--attempts", "2", "--num-workers", "1", "--prompt-timeout-s", "20", "--model")
    output = tmp_path / "answers"
    code, log = head.run(tmp_path / "log", Path("few.jsonl"), output, *line, "own_model:OwnModel", example=copied)
    assert code == 1
    assert "failed with exit code 4" in log
    errors = {row["id"]: row["error"] for row in rows_of(output)}
    assert set(errors) == set(texts)
    assert errors["good"] is errors["better"] is None
    assert errors["refused"] == "LookupError: nothing is known about that (tried 2 times)"
    lost = "its worker was lost 2 times; the last time: "
    assert errors["hangs"] == f"{lost}no answer within 20 s (--prompt-timeout-s)"
    assert errors["poison"].startswith(lost)
    assert "1 part with 5 rows, 3 of them with an error" in log

    code, log = head.run(
        tmp_path / "broken", Path("few.jsonl"), tmp_path / "none", *line, "own_model:Broken", example=copied
    )
    assert code == 1
    assert "failed with exit code 3" in log
    assert "workers can't be started, 3 times in a row; the last time: FileNotFoundError: no weights here" in log


def test_what_is_refused(head: Head, prompts: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"id": "a", "prompt": "x"}\n{"id": "b"\n{"id": "a", "prompt": "y"}\n')
    code, log = head.run(tmp_path / "log", bad, tmp_path / "answers")
    assert code == 1
    assert "failed with exit code 2" in log
    assert "bad.jsonl: 2 of its lines can't be used:\n  line 2: not JSON: " in log
    assert "  line 3: id 'a' is that of line 1 too\n" in log
    assert not (tmp_path / "answers").exists()


def test_a_cluster_that_wants_a_token(
    nothing_left_over: None, prompts: Path, reference: dict[str, Any], tmp_path: Path
) -> None:
    environ = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": uuid.uuid4().hex}
    with started_head(environ) as head:
        without = replace(head, environ={**head.environ, "RAY_AUTH_MODE": "disabled"})
        refused = without.ray("job", "list", "--address", head.dashboard)
        assert refused.returncode == 1
        assert "authentication is enabled" in refused.stderr
        output = tmp_path / "answers"
        code, log = head.run(tmp_path / "log", prompts, output, "--limit", "4")
        assert code == 0, log
        code, log = head.run(tmp_path / "more", prompts, output, "--limit", "6", "--no-cache")
        assert code == 0, log
    assert "6 prompts, of which 4 were finished before" in log
    assert skipped(log) == 0
    assert results(rows_of(output)).items() <= reference.items()
    assert len(rows_of(output)) == 6
