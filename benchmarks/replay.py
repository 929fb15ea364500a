"""How much of a real request trace a pool serves: hs_cache's own store, beside orders of eviction by themselves.

Replays the trace in benchmarks/data through `hs_cache.store.HiddenStateStore`, at pools of some parts of the working
set (every different block once, bf16). Each request leases the prefix that is there, as a retrieve does, and then
stores the rest. The store deals in offsets, so the pools need no memory, and the whole takes about a minute.

Beside it, in pools of the same bytes: LRU alone, which should be what the store does; LMCache's order, which keeps
float32 and so has room for half as many blocks, and that order with room for as many; and Belady's optimum, which knows
the future.

    python benchmarks/replay.py [--pools 1 5 10 20 50] [--requests N] [--check-every 1000] [--json FILE]
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import replay_orders
from benchmarks.replay_trace import BLOCK_TOKENS, Trace, load
from hs_cache.keys import KEY_BYTES, KeySpace
from hs_cache.kv_presence import Presence
from hs_cache.messages import LayerSpec
from hs_cache.store import HiddenStateStore

SPEC = LayerSpec(0, 2048, "bfloat16")
BLOCK_BYTES = BLOCK_TOKENS * SPEC.row_bytes
_FLOAT32_BYTES = 4
_OWNER = b"replay"
_COLUMNS = (
    "pool %",
    "pool GiB",
    "blocks",
    "hs_cache",
    "LRU",
    "LMCache",
    "LMCache, as many blocks",
    "Belady",
    "blocks served",
    "stranded bytes",
)


@dataclass(frozen=True, slots=True)
class Replayed:
    """What the store served: blocks, by request; and the bytes stranded at the end, when nobody holds anything."""

    served: list[int]
    stranded_bytes: int


def replay(trace: Trace, pool_bytes: int, *, check_every: int = 1000) -> Replayed:
    """Run a trace through a store; it is audited at the end and after every `check_every` requests."""
    store = HiddenStateStore(pool_bytes, chunk_size=BLOCK_TOKENS)
    space = KeySpace(model="replay", chunk_size=BLOCK_TOKENS).fingerprint
    served = []
    for number, request in enumerate(trace.requests):
        keys = [block.to_bytes(KEY_BYTES, "big") for block in request]
        hold = (_OWNER, number)
        found = store.lease(hold, keys, (SPEC.layer_idx,))
        granted = store.settle(hold, [Presence.PRESENT] * len(found.keys))
        store.end(hold)
        hit, rest = divmod(granted.num_tokens, BLOCK_TOKENS)
        assert not rest, "part of a block was served"
        served.append(hit)
        store.reserve(
            hold,
            space=space,
            keys=keys,
            num_tokens=len(keys) * BLOCK_TOKENS,
            first_chunk=hit,
            specs=(SPEC,),
            kv_local=True,
        )
        store.commit(hold)
        if number % check_every == 0:
            store.check()
            store.take_changes()  # as the sender of locations does, or they'd pile up
    store.check()
    return Replayed(served, store.stats().stranded_bytes)


def compare(trace: Trace, percents: Sequence[float], *, check_every: int = 1000) -> dict[str, Any]:
    """A row of figures per pool, and by name those that others quote."""
    rows = []
    facts: dict[str, float] = {"stranded_bytes": 0, "requests": len(trace.requests)}
    asked = trace.num_blocks
    for percent in percents:
        pool_bytes = int(trace.unique_blocks * BLOCK_BYTES * percent / 100)
        capacity, in_float32 = (pool_bytes // (BLOCK_TOKENS * SPEC.hidden_dim * size) for size in (2, _FLOAT32_BYTES))
        ours = replay(trace, pool_bytes, check_every=check_every)
        parts = {
            "served": sum(ours.served) / asked,
            "lru": sum(replay_orders.lru(trace.requests, capacity)) / asked,
            "lmcache": sum(replay_orders.lmcache(trace.requests, in_float32)) / asked,
            "lmcache_as_many": sum(replay_orders.lmcache(trace.requests, capacity)) / asked,
            "belady": sum(replay_orders.belady(trace.requests, capacity)) / asked,
        }
        facts |= {f"{name}_{percent:g}": part for name, part in parts.items()}
        facts["stranded_bytes"] += ours.stranded_bytes
        gib = pool_bytes / 2**30
        rows.append([percent, gib, capacity, *parts.values(), sum(ours.served), ours.stranded_bytes])
    title = (
        f"{len(trace.requests):,} requests, {asked * BLOCK_TOKENS:,} tokens asked for, in {asked:,} blocks, "
        f"{trace.unique_blocks:,} of them different; which part of the tokens was served"
    )
    return {"title": title, "columns": list(_COLUMNS), "rows": rows, "facts": facts}


def main() -> None:
    """Parse, replay, show."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pools", type=float, nargs="+", default=[1, 5, 10, 20, 50], help="percent of the working set")
    parser.add_argument("--requests", type=int, help="only so many, from the first on")
    parser.add_argument("--check-every", type=int, default=1000, help="requests between audits of the store")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    options = parser.parse_args()
    for name, values in (("--requests", [options.requests]), ("--check-every", [options.check_every])):
        if any(value is not None and value < 1 for value in values):
            parser.error(f"{name}: got {values[0]}, expected a number above 0")
    if not all(0 < percent <= 100 for percent in options.pools):
        parser.error(f"--pools: got {options.pools}, expected percentages above 0 and up to 100")
    began = time.perf_counter()
    results = compare(load(options.requests), options.pools, check_every=options.check_every)
    table = Table(title=results["title"], title_justify="left")
    for column in results["columns"]:
        table.add_column(column, justify="right")
    for percent, gib, blocks, *parts, served, stranded in results["rows"]:
        figures = [f"{part:.3f}" for part in parts]
        table.add_row(f"{percent:g}", f"{gib:.1f}", f"{blocks:,}", *figures, f"{served:,}", f"{stranded}")
    Console(width=120).print(table)
    print(f"the store passed its audits; {time.perf_counter() - began:.0f} s")
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
