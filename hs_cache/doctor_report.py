"""How a `hs_cache.DoctorReport` is shown in a terminal."""

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hs_cache.doctor_facts import FAILED, INFO, OK, SKIPPED, WARNING, DoctorReport, named

_STYLES = {OK: "green", WARNING: "yellow", FAILED: "bold red", SKIPPED: "yellow", INFO: "cyan"}
_LEVEL_CHARS = max(map(len, _STYLES))


def print_report(report: DoctorReport, console: Console) -> None:
    """One line per finding and one for what to do about it, then the two matrices, then what it all comes to."""
    for finding in report.findings:
        line = Text.assemble(
            (f"{finding.level:<{_LEVEL_CHARS}}", _STYLES[finding.level]), f"  {finding.check}: {finding.message}"
        )
        console.print(line, soft_wrap=True)
        if finding.advice:
            console.print(Text(f"{'':<{_LEVEL_CHARS}}  -> {finding.advice}"), soft_wrap=True)
    _print_matrix(report, report.round_trip_ms, "round trip, ms", "{:.2f}", console)
    _print_matrix(report, report.mib_per_s, f"read of {report.canary_bytes / 2**20:.3g} MiB, MiB/s", "{:,.0f}", console)
    failed = len(report.failures)
    warned = sum(finding.level == WARNING for finding in report.findings)
    warnings = f"{warned} warning{'' if warned == 1 else 's'}"
    summary = f"{failed} failed, {warnings}." if failed else f"All right, {warnings}." if warned else "All right."
    console.print(Text(summary), soft_wrap=True)


def _print_matrix(
    report: DoctorReport, values: Mapping[str, Mapping[str, float]], title: str, shown: str, console: Console
) -> None:
    """Readers are rows, owners columns, which have the numbers that stand before the rows' names."""
    if not values:
        return
    owners = [node_id for node_id in report.nodes if any(node_id in row for row in values.values())]
    numbers = {node_id: str(number) for number, node_id in enumerate(report.nodes, 1)}
    console.print(Text(f"{title}, from the row's node to the column's:"), soft_wrap=True)
    table = Table()
    table.add_column("node", no_wrap=True)
    for owner in owners:
        table.add_column(numbers[owner], justify="right", no_wrap=True)
    for reader, address in report.nodes.items():
        row = values.get(reader, {})
        cells = [shown.format(row[owner]) if owner in row else "-" for owner in owners]
        table.add_row(Text(f"{numbers[reader]}  {named(reader, address)}"), *cells)
    console.print(table)
