"""What `benchmarks.cross_node` found, as a table. Starts nothing, so reports can be made of it."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.tables import Table

BARE_TRANSFER, CROSS_NODE_RETRIEVE = "bare transfer", "retrieve"


def table(results: Sequence[Mapping[str, Any]], recovery_seconds: Sequence[float]) -> Table:
    """One row per size and measurement, and one for the kills."""
    rows = []
    for result in results:
        medians = {name: statistics.median(seconds) for name, seconds in result["seconds"].items()}
        size = f"{result['tokens']}x{result['hidden']}"
        gigabytes = result["tokens"] * result["hidden"] * 2 / 1e9
        for name, seconds in medians.items():
            figures = (f"{seconds * 1e3:.1f}", f"{gigabytes / seconds:.2f}", f"{seconds / medians[BARE_TRANSFER]:.2f}")
            rows.append((size, name, *figures))
    if recovery_seconds:
        milliseconds = statistics.median(recovery_seconds) * 1e3
        rows.append(("", "from a kill of the other node's actor to the next hit there", f"{milliseconds:.0f}", "", ""))
    columns = ("size", "what", "ms", "GB/s", "x bare transfer")
    return Table("From another node of this machine, bf16, one layer", columns, rows, left=2)
