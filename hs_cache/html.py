"""Values as HTML tables, for notebooks: markup that needs no style sheet, and reads well on light and dark pages.

Nothing in here knows what the values mean; `hs_cache.tables` says that. Text is escaped, whoever it comes
from: names of models and nodes are a user's, and errors may quote anything.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from html import escape
from typing import TypeAlias

_MOST_ROWS = 200
"""A notebook keeps what it shows in its file."""

_ID_CHARS = 12

# Colours are translucent, so that a page's own background and text stay what they are.
_LINE = "1px solid rgba(128,128,128,.4)"
_TABLE = "border-collapse:collapse;margin:.4em 0;font-size:90%;color:inherit"
_CAPTION = "caption-side:top;text-align:left;font-weight:bold;padding:.2em 0;color:inherit"
_CELL = f"border-bottom:{_LINE};padding:.2em .7em;vertical-align:top;background:transparent;color:inherit"
_TEXT = f"{_CELL};text-align:left"
_NUMBER = f"{_CELL};text-align:right;font-variant-numeric:tabular-nums"
_NOTE = "font-size:85%;opacity:.75;margin:.2em 0 .6em"
_BAR = f"display:flex;width:16em;height:1em;border:{_LINE};margin:.15em 0"


class Tone(Enum):
    """How something is to be taken: a colour, which is never all that says so."""

    GOOD = "rgba(46,160,67,.45)"
    FAIR = "rgba(56,139,253,.45)"
    POOR = "rgba(210,153,34,.5)"
    BAD = "rgba(248,81,73,.5)"
    NONE = "rgba(128,128,128,.2)"


@dataclass(frozen=True, slots=True)
class Mark:
    """A word on a coloured ground."""

    text: str
    tone: Tone


@dataclass(frozen=True, slots=True)
class Bar:
    """Parts of a whole: (name, size, tone) of each, in order; what they leave of `whole` stays empty."""

    parts: tuple[tuple[str, int, Tone], ...]
    whole: int


Cell: TypeAlias = str | int | Mark | Bar
"""What a table may show; ints stand to the right, with separators."""


def short_id(node_id: str) -> str:
    """As much of a hex id as tells nodes apart."""
    return node_id[:_ID_CHARS]


def size(nbytes: int) -> str:
    """Bytes, in the largest binary unit of which there is at least one."""
    scaled = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(scaled) < 1024:
            return f"{scaled:,.0f} B" if unit == "B" else f"{scaled:,.1f} {unit}"
        scaled /= 1024
    return f"{scaled:,.1f} TiB"


def percent(part: int, whole: int) -> str:
    """A share, ``-`` of nothing."""
    return f"{part / whole:.0%}" if whole else "-"


def share(part: int, whole: int) -> str:
    """A count and its share."""
    return f"{part:,} ({percent(part, whole)})"


def table(caption: str, columns: Sequence[str], rows: Iterable[Sequence[Cell]], *, note: str = "") -> str:
    """One row per record; of very many, the first."""
    listed = list(rows)
    head = "".join(f'<th scope="col" style="{_TEXT}">{escape(column)}</th>' for column in columns)
    body = "".join(f"<tr>{''.join(_cell(cell) for cell in row)}</tr>" for row in listed[:_MOST_ROWS])
    more = f"{len(listed) - _MOST_ROWS:,} more rows are not shown." if len(listed) > _MOST_ROWS else ""
    return _framed(caption, f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>", note, more)


def facts(caption: str, pairs: Iterable[tuple[str, Cell]], *, note: str = "") -> str:
    """One row per fact: its name, and its value."""
    body = "".join(
        f'<tr><th scope="row" style="{_TEXT};font-weight:normal">{escape(name)}</th>{_cell(value)}</tr>'
        for name, value in pairs
    )
    return _framed(caption, f"<tbody>{body}</tbody>", note)


def beside(*blocks: str) -> str:
    """Blocks next to each other, as far as the page is wide enough."""
    inner = "".join(f"<div>{block}</div>" for block in blocks)
    return f'<div style="display:flex;flex-wrap:wrap;gap:0 2em;align-items:flex-start">{inner}</div>'


def _framed(caption: str, content: str, *notes: str) -> str:
    below = "".join(f'<div style="{_NOTE}">{escape(note)}</div>' for note in notes if note)
    return f'<table style="{_TABLE}"><caption style="{_CAPTION}">{escape(caption)}</caption>{content}</table>{below}'


def _cell(value: Cell) -> str:
    if isinstance(value, int):
        return f'<td style="{_NUMBER}">{value:,}</td>'
    if isinstance(value, Mark):
        mark = f"background:{value.tone.value};padding:.05em .5em;border-radius:.3em;white-space:nowrap;color:inherit"
        return f'<td style="{_TEXT}"><span style="{mark}">{escape(value.text)}</span></td>'
    if isinstance(value, Bar):
        return f'<td style="{_TEXT}">{_bar(value)}</td>'
    return f'<td style="{_TEXT}">{escape(value)}</td>'


def _bar(bar: Bar) -> str:
    parts = [(name, part, tone) for name, part, tone in bar.parts if part > 0]
    blocks = ""
    for name, part, tone in parts:
        style = f"width:{100 * part / max(bar.whole, 1):.2f}%;background:{tone.value}"
        blocks += f'<div title="{escape(name)}" style="{style}"></div>'
    words = ", ".join(f"{name} {percent(part, bar.whole)}" for name, part, _ in parts)
    return f'<div style="{_BAR}">{blocks}</div>{escape(words or "empty")}'
