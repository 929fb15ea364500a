"""A prefill in steps of any size, by `store` and by `cache.writer`, against one `store` of the whole prompt.

Every round runs each way once, in an order that rotates; the table shows how many rows are retrievable afterwards, and
medians of the time that the calls of a whole prompt take together.

    python -m benchmarks.steps [--rounds 5] [--tokens 4096] [--hidden 2048] [--steps 1 7 300 1000] [--json FILE]
"""

import argparse
import logging
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import ray
import torch

import hs_cache
from benchmarks import machine
from benchmarks.measure import turned
from benchmarks.prompts import make_prompt
from benchmarks.tables import Table


def measure(
    cache: hs_cache.HiddenStateCache, sizes: list[int], tokens: int, hidden: int, rounds: int
) -> dict[tuple[str, int], tuple[int, float]]:
    """Retrievable rows and median seconds, by way and step size."""
    rows = torch.randn(tokens, hidden).to(torch.bfloat16)

    def by_store(prompt: list[int], size: int) -> None:
        for first in range(0, tokens, size):
            end = min(first + size, tokens)
            cache.store(prompt[:end], {0: rows[first:end]}, token_offset=first)

    def by_writer(prompt: list[int], size: int) -> None:
        writer = cache.writer("prefill")
        for first in range(0, tokens, size):
            end = min(first + size, tokens)
            writer.append(prompt[first:end], {0: rows[first:end]})
        writer.finish()

    ways: dict[str, Callable[[list[int], int], None]] = {"store": by_store, "writer": by_writer}
    runs = [("store", tokens), *((way, size) for size in sizes for way in ways)]
    taken: dict[tuple[str, int], list[float]] = {run: [] for run in runs}
    found: dict[tuple[str, int], int] = {}
    for number in range(rounds + 1):
        for way, size in turned(runs, number):
            prompt = make_prompt(tokens)
            started = time.perf_counter()
            ways[way](prompt, size)
            seconds = time.perf_counter() - started
            if number:  # the first round warms up
                taken[way, size].append(seconds)
            hit = cache.retrieve(prompt, 0)
            assert torch.equal(hit[0], rows[: hit.num_tokens])
            found[way, size] = min(hit.num_tokens, found.get((way, size), tokens))
    return {run: (found[run], statistics.median(times)) for run, times in taken.items()}


def main() -> None:
    """Parse, measure, show."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 7, 300, 1000])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    ray.init(address="local", include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
    cache = hs_cache.connect({"max_hidden_state_cpu_size": 0.5}, service="bench")
    assert cache is not None
    results = measure(cache, options.steps, options.tokens, options.hidden, options.rounds)
    whole = results["store", options.tokens][1]
    title = f"Prefill in steps, {options.tokens}x{options.hidden}, bf16, one layer, chunks of {cache.chunk_size}"
    rows = []
    for (way, size), (found, seconds) in results.items():
        calls = -(-options.tokens // size)
        figures = (f"{seconds * 1e3:.1f}", f"{seconds / whole:.1f}", f"{seconds / calls * 1e6:.0f}")
        rows.append((way, f"{size}", f"{found}", *figures))
    table = Table(title, ("way", "tokens a step", "rows retrievable", "ms", "x one store", "us a step"), rows)
    print(machine.in_a_line(options.rounds))
    table.print()
    if options.json:
        table.write(options.json)
    hs_cache.stop(service="bench")
    ray.shutdown()


if __name__ == "__main__":
    main()
