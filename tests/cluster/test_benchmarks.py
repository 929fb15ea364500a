"""`python -m benchmarks --quick`, without the peers that need environments of their own."""

from pathlib import Path

import pytest

from benchmarks.peers import BASELINE, HS_CACHE, PEERS
from benchmarks.results import Run
from benchmarks.subject import CALL, PLAN, READ, RETRIEVE, STORE
from benchmarks.targets import TARGETS, judge
from tests.processes import run_python

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, nothing_left_over: None) -> Path:
    """What the quick form wrote."""
    folder = tmp_path_factory.mktemp("bench")
    files = ["--json", f"{folder}/run.json", "--results", f"{folder}/RESULTS.md", "--plot", f"{folder}/results.png"]
    done = run_python(["-m", "benchmarks", "--quick", "--peers", *files])
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_quick_form_writes_a_figure_or_a_reason_for_every_target(folder: Path) -> None:
    run = Run.read(folder / "run.json")
    text = (folder / "RESULTS.md").read_text(encoding="utf-8")
    verdicts = judge(run)
    assert len(verdicts) == len(TARGETS)
    for verdict in verdicts:
        assert f"| {verdict.target.what} | {verdict.target.goal} | {verdict.measured} | {verdict.verdict} |" in text
    assert (folder / "results.png").read_bytes().startswith(b"\x89PNG")


def test_quick_form_measures_all_that_needs_no_other_packages(folder: Path) -> None:
    run = Run.read(folder / "run.json")
    assert run.bytes_per_token == {HS_CACHE: (4096.0, 2048)}
    for result in run.sizes:
        assert result.missing == {}
        for subject, step in (
            (HS_CACHE, STORE),
            (HS_CACHE, RETRIEVE),
            (HS_CACHE, READ),
            (HS_CACHE, PLAN),
            (BASELINE, CALL),
        ):
            assert result.median(subject, step) > 0
    assert run.full_pool is not None and run.full_pool.median(HS_CACHE, STORE) > 0
    assert all(result.median > 0 for result in run.clients)
    assert run.cross_node is not None
    assert set(PEERS) <= set(run.skipped)


def test_report_is_made_again_from_the_seconds_alone(folder: Path, tmp_path: Path) -> None:
    line = ["-m", "benchmarks.report", f"{folder}/run.json", "--results", f"{tmp_path}/R.md", "--plot"]
    done = run_python([*line, f"{tmp_path}/results.png"])
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "R.md").read_text(encoding="utf-8") == (folder / "RESULTS.md").read_text(encoding="utf-8")
