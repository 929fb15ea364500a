"""What a report makes of a run: targets, tables, the plot, and the JSON between them."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import report, targets
from benchmarks.peers import BASELINE, HS_CACHE, LMCACHE, LMCACHE_TUNED, MOONCAKE, RAY_TENSOR
from benchmarks.results import ClientsResult, NotMeasuredError, Run, SizeResult
from benchmarks.subject import CALL, COPY, KEYS, PLAN, READ, RETRIEVE, STORE, STORE_ASYNC, Size

pytest.importorskip("matplotlib")

OURS = {STORE: 1.2, STORE_ASYNC: 0.5, RETRIEVE: 0.2, READ: 1.0, PLAN: 0.15, KEYS: 0.0009}
THEIRS = {STORE: 3.0, RETRIEVE: 2.0, READ: 3.0, KEYS: 0.0036}


def make_size(size: Size, seconds: Mapping[str, Mapping[str, float]], **values: Any) -> SizeResult:
    """Three rounds, of which the middle one is `seconds`."""
    rounds = {
        subject: {step: [9 * taken, taken, taken / 9] for step, taken in steps.items()}
        for subject, steps in seconds.items()
    }
    return SizeResult(size, rounds, **values)


def make_run(**changed: Any) -> Run:
    """A run where every size took the same."""
    seconds = {
        HS_CACHE: OURS,
        BASELINE: {COPY: 1.0, CALL: 0.1},
        LMCACHE: {**THEIRS, RETRIEVE: 8.0},
        LMCACHE_TUNED: THEIRS,
        RAY_TENSOR: {STORE: 12.0, RETRIEVE: 1.0},
    }
    sizes = [make_size(Size(tokens, 2048), seconds) for tokens in (1024, 8192, 32768)]
    values: dict[str, Any] = {
        "machine": {"machine": "a box"},
        "rounds": 3,
        "wall_s": 61.0,
        "sizes": sizes,
        "full_pool": make_size(Size(8192, 2048), {BASELINE: {COPY: 1.0}, HS_CACHE: {STORE: 1.5}}),
        "clients": [ClientsResult(count, reading, [100.0 * count]) for count in (1, 8) for reading in (False, True)],
        "clients_nbytes": 1000,
        "bytes_per_token": {HS_CACHE: (4096.0, 2048), LMCACHE: (8192.0, 2048)},
        "skipped": {MOONCAKE: "no wheel for this machine"},
        "cross_node": {
            "results": [
                {"tokens": 8192, "hidden": 2048, "seconds": {"bare transfer": [1.0], "retrieve": [1.2]}},
                {"tokens": 32768, "hidden": 2048, "seconds": {"bare transfer": [1.0], "retrieve": [1.3]}},
            ],
            "recovery_seconds": [],
        },
        "tables": {
            "churn": {"title": "Churn", "columns": ["what", "n"], "rows": [["a", 1]], "facts": {"usable_fraction": 1}}
        },
    }
    return Run(**{**values, **changed})


def verdict_of(run: Run, what: str) -> targets.Verdict:
    (found,) = [verdict for verdict in targets.judge(run) if verdict.target.what == what]
    return found


def test_run_written_and_read_is_the_same(tmp_path: Path) -> None:
    run = make_run()
    run.write(tmp_path / "run.json")
    assert Run.read(tmp_path / "run.json") == run


@pytest.mark.parametrize(
    ("what", "measured", "verdict"),
    [
        ("retrieve, 8192x2048: faster than LMCache, tuned malloc", "10.00x", "met"),
        ("retrieve, 8192x2048: faster than LMCache", "40.00x", "met"),
        ("retrieve, 1024x2048, in no-op actor calls", "2.00x", "met"),
        ("store, 32768x2048: faster than the faster LMCache", "2.50x (LMCache)", "met"),
        ("store, every size with one layer, in memcpy + 2 no-op actor calls", "1.00x (worst: 1024x2048)", "met"),
        ("retrieve, every size: faster than ray.get of the torch tensor", "5.00x (worst: 1024x2048)", "missed"),
        ("store, every size: faster than ray.put of the torch tensor", "10.00x (worst: 1024x2048)", "met"),
        ("store + retrieve, every size: faster than ray.put + ray.get of it", "9.29x (worst: 1024x2048)", "missed"),
        ("keys of 32768 tokens from a list", "0.90 ms", "met"),
        ("keys of 32768 tokens from a list: faster than LMCache's sha256_cbor", "4.00x (LMCache)", "met"),
        ("8 client processes that read every row: calls/s of all, against 1 (flat or rising)", "8.00x", "met"),
        (
            "bytes kept per token, bf16, in hidden sizes",
            "2.00x (4096 bytes at hidden 2048; LMCache: 4.00x)",
            "met",
        ),
        ("pool that can be used under a mixed-size churn", "100.0%", "met"),
        (
            "retrieve from another node, in bare Ray transfers of the same NumPy bytes",
            "1.30x (worst: 32768x2048)",
            "missed",
        ),
    ],
)
def test_judge_compares_medians(what: str, measured: str, verdict: str) -> None:
    found = verdict_of(make_run(), what)
    assert (found.measured, found.verdict) == (measured, verdict)


def test_judge_where_nothing_was_measured_says_why_of_each() -> None:
    reason = "there is no such benchmark here"
    empty = make_run(
        sizes=[], full_pool=None, clients=[], bytes_per_token={}, cross_node=None, tables={}, skipped={"churn": reason}
    )
    verdicts = targets.judge(empty)
    assert {verdict.verdict for verdict in verdicts} == {"not measured"}
    assert all(verdict.measured for verdict in verdicts)
    assert verdict_of(empty, "pool that can be used under a mixed-size churn").measured == reason


def test_judge_where_a_peer_is_missing_gives_its_reason() -> None:
    run = make_run()
    without = [
        replace(
            size,
            seconds={name: steps for name, steps in size.seconds.items() if name != LMCACHE_TUNED},
            missing={LMCACHE_TUNED: "it has ended"},
        )
        for size in run.sizes
    ]
    found = verdict_of(replace(run, sizes=without), "retrieve, 8192x2048: faster than LMCache, tuned malloc")
    assert (found.verdict, found.measured) == ("not measured", "LMCache, tuned malloc: it has ended")


def test_median_of_a_step_that_a_subject_has_not_raises() -> None:
    with pytest.raises(NotMeasuredError, match="baseline: no such step: store"):
        make_run().sizes[0].median(BASELINE, STORE)


def test_markdown_has_every_table_and_target() -> None:
    run = make_run()
    text = report.markdown(run, "plot.png")
    for table in report.tables(run):
        assert f"## {table.title}\n" in text
        assert {len(row) for row in table.rows} == {len(table.columns)}
    for target in targets.TARGETS:
        assert f"| {target.what} | {target.goal} |" in text
    assert "| store | hs_cache | 1200.000 | 1.20 | 1200.000 | 1.20 | 1200.000 | 1.20 |" in text
    assert "| Mooncake | no wheel for this machine |" in text
    assert "| 8 | 800 | 8.00 | 800 | 8.00 | 0.00 |" in text


def test_write_again_gives_the_same_report_and_a_plot(tmp_path: Path) -> None:
    texts = []
    for name in ("first", "second"):
        report.write(make_run(), tmp_path / f"{name}.md", tmp_path / "plot.png")
        texts.append((tmp_path / f"{name}.md").read_text(encoding="utf-8"))
        assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert texts[0] == texts[1]
