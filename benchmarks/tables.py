"""Tables of text: for a terminal, for Markdown, and as the JSON that benchmarks hand to each other."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table as RichTable

_WIDTH = 140


@dataclass(frozen=True)
class Table:
    """Rows of text, and the numbers behind it that others use.

    Attributes:
        left: how many columns, from the first, hold words and not figures.
        facts: name → number.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: int = 1
    facts: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> "Table":
        """From JSON; ``left`` and ``facts`` may be absent, and cells numbers."""
        rows = [[f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row] for row in found["rows"]]
        return cls(found["title"], found["columns"], rows, found.get("left", 1), found.get("facts", {}))

    def write(self, path: Path) -> None:
        """As JSON."""
        path.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")

    def markdown(self) -> str:
        """Without the title."""
        lines = [self.columns, ["---" if number < self.left else "---:" for number in range(len(self.columns))]]
        return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in [*lines, *self.rows])

    def print(self) -> None:
        """To the terminal."""
        table = RichTable(title=self.title, title_justify="left", box=box.SIMPLE_HEAD)
        for number, column in enumerate(self.columns):
            table.add_column(column, justify="left" if number < self.left else "right")
        for row in self.rows:
            table.add_row(*row)
        Console(width=_WIDTH).print(table)
