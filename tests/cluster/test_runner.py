"""The engine's loop: the whole of it on Ray, its scheduler, and that its own check can fail."""

import io
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import hs_cache
from tests.cluster.conftest import StartService

pytestmark = pytest.mark.long

pytest.importorskip("transformers")

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def runner() -> Iterator[ModuleType]:
    """The script, imported."""
    sys.path.insert(0, str(EXAMPLES))
    import vllm_style_runner

    yield vllm_style_runner
    sys.path.remove(str(EXAMPLES))


def test_runner_passes() -> None:
    command = [sys.executable, str(EXAMPLES / "vllm_style_runner.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = re.search(
        r"PASS +(\d+) requests \((\d+) preempted, 2 aborted\) · ([\d,]+) of ([\d,]+) prompt tokens skipped · "
        r"talker inputs identical in (\d+)/(\d+)\n",
        done.stdout,
    )
    assert summary is not None, done.stdout
    requests, preempted, skipped, asked, identical, finished = (int(n.replace(",", "")) for n in summary.groups())
    assert identical == finished == requests - 2
    assert preempted
    assert asked / 4 < skipped < asked


@pytest.fixture(scope="module")
def service(runner: ModuleType, start_service: StartService) -> str:
    """A service with the example's chunk size."""
    return start_service(chunk_size=runner.CHUNK_TOKENS)


class Faulty:
    """A cache with one thing wrong."""

    def __init__(self, cache: hs_cache.HiddenStateCache) -> None:
        self._cache = cache

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


class Careless(Faulty):
    """One value of one row is wrong, once; what was found is kept, and writers are, neither finished nor aborted."""

    def __init__(self, cache: hs_cache.HiddenStateCache) -> None:
        super().__init__(cache)
        self.corrupted = False
        self.kept: list[Any] = []

    def retrieve(self, *args: Any, **kwargs: Any) -> hs_cache.PrefixHit:
        hit = self._cache.retrieve(*args, **kwargs)
        if hit:
            if not self.corrupted:
                hit[4][-1, 7] += 1
            self.corrupted = True
            self.kept.append(hit)
        return hit

    def writer(self, request_id: str, *, mm_spans: Any) -> Any:
        writer = self._cache.writer(request_id, mm_spans=mm_spans)
        self.kept.append(writer)
        return SimpleNamespace(append=writer.append, preempt=writer.preempt, finish=lambda: None, abort=lambda: None)


class SpansLeftOut(Faulty):
    """Audio clips are taken for equal when they are equally long."""

    def plan(self, *args: Any, mm_spans: Any, **kwargs: Any) -> Any:
        return self._cache.plan(*args, **kwargs)

    def retrieve(self, *args: Any, mm_spans: Any, **kwargs: Any) -> hs_cache.PrefixHit:
        return self._cache.retrieve(*args, **kwargs)

    def writer(self, request_id: str, *, mm_spans: Any) -> hs_cache.PrefixWriter:
        return self._cache.writer(request_id)


DIFFERS = "requests differ from what they are without a cache"


@pytest.mark.parametrize(
    ("fault", "problems"),
    [
        (Careless, [DIFFERS, "bytes of rows held by writers left at the end", "leases left at the end"]),
        (SpansLeftOut, [DIFFERS]),
    ],
)
def test_runner_when_something_is_wrong_fails(
    runner: ModuleType,
    service: str,
    monkeypatch: pytest.MonkeyPatch,
    fault: type[Faulty],
    problems: list[str],
) -> None:
    monkeypatch.setattr("vllm_style.clients.NUM_TURNS", 2)
    monkeypatch.setattr(runner, "RELEASE_S", 1.0)
    threads = torch.get_num_threads()
    cache = hs_cache.connect(service=service, model=fault.__name__, strict=True)
    assert cache is not None
    output = io.StringIO()
    with cache:
        status = runner.run(fault(cache), 6, 0, runner.Console(file=output))
    torch.set_num_threads(threads)
    assert status == 1
    assert "FAIL" in output.getvalue()
    for problem in problems:
        assert problem in output.getvalue()


def test_the_guide_shows_the_code_that_runs(runner: ModuleType) -> None:
    guide = (EXAMPLES.parent / "docs" / "engine_integration.md").read_text()
    shown = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    source = unindented(Path(str(runner.__file__)).read_text())
    assert len(shown) > 4
    for code in shown:
        assert unindented(code) in source


def unindented(code: str) -> str:
    return "\n".join(line.strip() for line in code.strip().splitlines())


def make_request(runner: ModuleType, num_tokens: int, max_new_tokens: int = 8) -> Any:
    return runner.Request(f"{num_tokens} tokens", runner.Prompt(tuple(range(num_tokens)), (), None), max_new_tokens)


def make_scheduler(runner: ModuleType, *, kv_tokens: int = 1000, restored: int = 0) -> tuple[Any, list[Any]]:
    preempted: list[Any] = []
    scheduler = runner.Scheduler(
        step_tokens=64, kv_tokens=kv_tokens, max_running=8, restore=lambda _: restored, preempt=preempted.append
    )
    return scheduler, preempted


def advance(scheduler: Any) -> dict[str, int]:
    """One step, after which every request with nothing left to compute has one token more."""
    step = scheduler.schedule()
    for request, count in step.items():
        request.num_computed += count
        request.token_ids += [0] * (not request.num_left)
    return {request.request_id: count for request, count in step.items()}


def test_schedule_gives_decoding_requests_their_token_and_prefills_with_the_rest(runner: ModuleType) -> None:
    scheduler, _ = make_scheduler(runner, restored=16)
    for num_tokens in (50, 150, 40):
        scheduler.add(make_request(runner, num_tokens))
    steps = [advance(scheduler) for _ in range(4)]
    assert steps == [
        {"50 tokens": 34, "150 tokens": 30},
        {"50 tokens": 1, "150 tokens": 63},
        {"50 tokens": 1, "150 tokens": 41, "40 tokens": 22},
        {"50 tokens": 1, "150 tokens": 1, "40 tokens": 2},
    ]


def test_schedule_when_kv_memory_is_used_up_preempts_the_last_come(runner: ModuleType) -> None:
    scheduler, preempted = make_scheduler(runner, kv_tokens=64)
    first, second = make_request(runner, 32), make_request(runner, 31)
    scheduler.add(first)
    scheduler.add(second)
    assert advance(scheduler) == {"32 tokens": 32, "31 tokens": 31}
    assert advance(scheduler) == {"32 tokens": 1}
    assert preempted == [second]
    assert (second.num_computed, second.num_preemptions) == (0, 1)
    scheduler.remove(first)
    assert advance(scheduler) == {"31 tokens": 32}  # with the token that it had generated


def test_add_refuses_what_would_never_fit(runner: ModuleType) -> None:
    scheduler, _ = make_scheduler(runner, kv_tokens=64)
    with pytest.raises(ValueError, match="got 65 tokens, expected at most 64"):
        scheduler.add(make_request(runner, 57))
