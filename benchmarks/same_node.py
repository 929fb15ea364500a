"""Store and retrieve on one node, against a memcpy of the same bytes and a no-op actor call in the same run.

Every round runs each measurement once, in an order that rotates from round to round; the table shows medians. What to
look at are the ratios: absolute times depend on what else the machine does.

    python benchmarks/same_node.py [--rounds 15] [--tokens 8192 32768] [--hidden 2048] [--json FILE]
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import torch
from rich.console import Console
from rich.table import Table

import hs_cache

_ROUNDS_OF_WARMUP = 2
_VOCABULARY = 150_000


class NoOp:
    """An actor call that does nothing: the least that any call to a service costs."""

    def nothing(self) -> None:
        """Do nothing."""


def measure(cache: hs_cache.HiddenStateCache, noop: Any, tokens: int, hidden: int, rounds: int) -> dict[str, float]:
    """Median seconds of every measurement at one size, bf16, one layer."""
    rows = torch.randn(tokens, hidden).to(torch.bfloat16)
    warm = torch.zeros_like(rows)
    generator = torch.Generator().manual_seed(tokens)
    prompts = [
        torch.randint(0, _VOCABULARY, (tokens,), generator=generator).tolist()
        for _ in range(rounds + _ROUNDS_OF_WARMUP)
    ]
    prompt: list[int] = []
    held: list[Any] = []

    def call() -> None:
        ray.get(noop.nothing.remote())

    def store() -> None:
        stored = cache.store(prompt, {0: rows}).stored
        assert stored == tokens // cache.chunk_size, stored

    def retrieve() -> None:
        held[:] = [cache.retrieve(prompt, 0)]
        assert held[0].num_tokens == tokens

    def retrieve_and_read() -> None:
        retrieve()
        held[0][0].view(torch.int64).sum()

    def retrieve_float32() -> None:
        held[:] = [cache.retrieve_hidden_states(prompt)]
        assert len(held[0]) == tokens

    steps: dict[str, Callable[[], Any]] = {
        "no-op call": call,
        "memcpy, warm": lambda: warm.copy_(rows),
        "memcpy, fresh": rows.clone,
        "read once": lambda: rows.view(torch.int64).sum(),
        "keys": lambda: cache.chunk_keys(prompt),
        "retrieve": retrieve,
        "retrieve and read once": retrieve_and_read,
        "retrieve float32": retrieve_float32,
    }
    taken: dict[str, list[float]] = {name: [] for name in ("store", *steps)}
    names = list(steps)
    for number, prompt[:] in enumerate(prompts):
        turned = names[number % len(names) :] + names[: number % len(names)]
        for name in ("store", *turned):
            started = time.perf_counter()
            (store if name == "store" else steps[name])()
            if number >= _ROUNDS_OF_WARMUP:
                taken[name].append(time.perf_counter() - started)
            held.clear()
    return {name: statistics.median(times) for name, times in taken.items()}


def show(results: list[dict[str, Any]]) -> None:
    """One row per measurement and size."""
    table = Table(title="bf16, one layer, one node; medians", title_justify="left")
    for name in ("tokens x hidden", "MB", "what", "ms", "x memcpy, warm", "x no-op call"):
        table.add_column(name, justify="left" if name == "what" else "right")
    for result in results:
        times = result["seconds"]
        for name, seconds in times.items():
            table.add_row(
                f"{result['tokens']}x{result['hidden']}",
                f"{result['tokens'] * result['hidden'] * 2 / 1e6:.0f}",
                name,
                f"{seconds * 1e3:.3f}",
                f"{seconds / times['memcpy, warm']:.2f}",
                f"{seconds / times['no-op call']:.1f}",
            )
        table.add_section()
    Console(width=120).print(table)


def main() -> None:
    """Parse, measure, show."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--pool-gib", type=float, default=1.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    ray.init(address="local", include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    cache = hs_cache.connect({"max_hidden_state_cpu_size": options.pool_gib}, service="bench")
    assert cache is not None
    noop = ray.remote(NoOp).options(num_cpus=0).remote()
    results = [
        {
            "tokens": tokens,
            "hidden": options.hidden,
            "seconds": measure(cache, noop, tokens, options.hidden, options.rounds),
        }
        for tokens in options.tokens
    ]
    print(
        f"{platform.machine()}, {torch.get_num_threads()} threads, Python {platform.python_version()}, "
        f"ray {ray.__version__}, torch {torch.__version__}; {options.rounds} rounds"
    )
    show(results)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    hs_cache.stop(service="bench")
    ray.shutdown()


if __name__ == "__main__":
    main()
