"""The store serves of a real trace what LRU serves, request by request; and what it is compared with is right."""

import json
import sys
from collections.abc import Sequence
from functools import cache
from itertools import combinations
from pathlib import Path
from random import Random

import pytest

from benchmarks import replay, replay_orders
from benchmarks.replay_trace import Trace, load


@cache
def trace(requests: int) -> Trace:
    return load(requests)


def pool_of(blocks: int) -> int:
    return blocks * replay.BLOCK_BYTES


@pytest.mark.parametrize("blocks", [60, 500])
def test_the_store_serves_what_lru_serves(blocks: int) -> None:
    """One pool is smaller than many a prompt, and in none is there room for all 21,514 blocks."""
    ours = replay.replay(trace(1000), pool_of(blocks), check_every=200)
    assert ours.served == replay_orders.lru(trace(1000).requests, blocks)
    assert ours.stranded_bytes == 0
    assert 0 < sum(ours.served) <= sum(replay_orders.belady(trace(1000).requests, blocks))


@pytest.mark.parametrize("blocks", [2000, 5000, 9000])
def test_a_larger_pool_keeps_rows_together_and_serves_about_what_lru_serves(blocks: int) -> None:
    """Of the coldest two hundredths it gives up those that lie together."""
    ours = replay.replay(trace(1000), pool_of(blocks), check_every=200)
    assert sum(ours.served) == pytest.approx(sum(replay_orders.lru(trace(1000).requests, blocks)), rel=0.05)
    assert ours.stranded_bytes == 0


def test_with_room_for_everything_all_serve_what_was_there_before() -> None:
    requests, unique = trace(1000).requests, trace(1000).unique_blocks
    ours = replay.replay(trace(1000), pool_of(unique))
    assert sum(ours.served) == trace(1000).num_blocks - unique
    for order in (replay_orders.lru, replay_orders.lmcache, replay_orders.belady):
        assert order(requests, unique) == ours.served


def test_the_whole_trace_is_that_of_the_paper() -> None:
    assert len(load().requests) == 12_031
    assert load().num_blocks == 288_500
    assert load().unique_blocks == 182_790


def best(requests: Sequence[Sequence[int]], capacity: int) -> int:
    """By trying everything: what any order can serve that keeps some of what it has and what it was given."""
    reached: dict[frozenset[int], int] = {frozenset(): 0}
    for request in requests:
        following: dict[frozenset[int], int] = {}
        for pool, served in reached.items():
            hit = next((i for i, block in enumerate(request) if block not in pool), len(request))
            given = pool.union(request)
            for kept in map(frozenset, combinations(sorted(given), min(capacity, len(given)))):
                following[kept] = max(following.get(kept, 0), served + hit)
        reached = following
    return max(reached.values())


@pytest.mark.parametrize("seed", range(12))
def test_belady_is_the_best_that_there_is(seed: int) -> None:
    random = Random(seed)
    tree = [(1,), (1, 2), (1, 2, 3), (1, 4), (1, 4, 5), (6,), (6, 7), (6, 7, 8), (6, 9)]
    requests = [random.choice(tree) for _ in range(14)]
    for capacity in (1, 2, 3, 4):
        served = sum(replay_orders.belady(requests, capacity))
        assert served == best(requests, capacity)
        assert served >= sum(replay_orders.lru(requests, capacity))


def test_lru_keeps_heads_and_lmcache_keeps_tails() -> None:
    requests = [(1, 2, 3, 4), (1, 2, 3, 4)]
    assert replay_orders.lru(requests, 3) == [0, 3]
    assert replay_orders.lmcache(requests, 3) == [0, 0]
    assert replay_orders.lru(requests, 0) == replay_orders.lmcache(requests, 0) == [0, 0]
    assert replay_orders.belady(requests, 0) == [0, 0]


def test_the_script_writes_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "replay.json"
    arguments = ["--requests", "200", "--pools", "5", "50", "--check-every", "50", "--json", str(out)]
    monkeypatch.setattr(sys, "argv", ["replay.py", *arguments])
    replay.main()
    results = json.loads(out.read_text(encoding="utf-8"))
    assert [row[0] for row in results["rows"]] == [5, 50]
    assert all(len(row) == len(results["columns"]) for row in results["rows"])
    assert results["facts"]["stranded_bytes"] == 0
    assert 0 < results["facts"]["served_50"] <= results["facts"]["belady_50"]
    assert f"{results['facts']['served_50']:.3f}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [(["--requests", "0"], "--requests"), (["--check-every", "0"], "--check-every"), (["--pools", "0"], "--pools")],
)
def test_a_wrong_argument_is_named(
    arguments: list[str], named: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["replay.py", *arguments])
    with pytest.raises(SystemExit):
        replay.main()
    assert f"{named}: got" in capsys.readouterr().err
