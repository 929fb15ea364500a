"""A store under churn: audited throughout, all of its bytes accounted for, nothing left held."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import churn

POOL_BYTES = 2**28  # fewer bytes than a long prompt of some key spaces has, so that stores are refused too


@pytest.mark.parametrize("models", [churn.ONE, churn.SIX], ids=["one key space", "six"])
def test_samples_account_for_the_whole_pool(models: tuple[churn.Model, ...]) -> None:
    run = churn.Churn(POOL_BYTES, models, seed=0)
    run.run(800, turns=2)
    assert len(run.samples) > 100
    for sample in run.samples:
        assert sample.in_use + sample.slivers + sample.too_small + sample.large_enough == pytest.approx(1)
        assert 0.3 < sample.in_use <= 1
    assert any(sample.refused for sample in run.samples)
    stats = run.store.stats()
    assert stats.stranded_bytes == stats.reserved_bytes == stats.leased_bytes == 0
    assert stats.num_leases == stats.num_reservations == 0


@pytest.mark.parametrize("models", [churn.ONE, churn.SIX], ids=["one key space", "six"])
def test_unlike_sizes_leave_no_more_of_a_pool_unused_than_equal_ones(models: tuple[churn.Model, ...]) -> None:
    """And rows lie apart no more than they must: the chunks of a prefix come in runs of several."""
    run = churn.Churn(2**30, models, seed=0)
    run.run(500, turns=6)
    in_use = sorted(sample.in_use for sample in run.samples)
    assert in_use[len(in_use) // 100] >= 0.95
    assert in_use[len(in_use) // 2] >= 0.97
    chunks = sum(read.num_chunks * read.num_layers for read in run.reads)
    assert chunks / sum(read.num_runs for read in run.reads) > 4


def test_a_seed_gives_the_same_samples() -> None:
    runs = [churn.Churn(POOL_BYTES, churn.SIX, seed=seed) for seed in (1, 1, 2)]
    for run in runs:
        run.run(200, turns=1)
    assert runs[0].samples == runs[1].samples != runs[2].samples


def test_the_script_writes_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "churn.json"
    arguments = ["--operations", "200", "--pool-gib", "0.25", "--json", str(out)]
    monkeypatch.setattr(sys, "argv", ["churn.py", *arguments])
    churn.main()
    results = json.loads(out.read_text(encoding="utf-8"))
    assert all(len(row) == len(results["columns"]) for row in results["rows"])
    facts = results["facts"]
    assert 1 <= facts["runs_per_layer"] <= churn.MAX_CHUNKS
    assert 0 < facts["usable_fraction_min"] <= facts["usable_fraction_p1"] <= facts["usable_fraction"] <= 1
    assert f"{facts['usable_fraction']:.3f}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "named"), [(["--operations", "5"], "--operations"), (["--pool-gib", "0"], "--pool-gib")]
)
def test_a_wrong_argument_is_named(
    arguments: list[str], named: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["churn.py", *arguments])
    with pytest.raises(SystemExit):
        churn.main()
    assert f"{named}: got" in capsys.readouterr().err
