"""Tables for notebooks: well-formed, escaped, and of everything that `stats`, `explain` and the rest give back."""

from html.parser import HTMLParser
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hs_cache import html, messages
from hs_cache.messages import ModelRevision, NodeStatistics
from hs_cache.results import CacheStatistics, ChunkReport, Coverage, Explanation, PrefixHit, StoreResult
from hs_cache.shown import Shown, as_html
from hs_cache.tables import REASONS
from tests.builders import make_node_statistics
from tests.processes import run_python

ALLOWED = {"table", "caption", "thead", "tbody", "tr", "th", "td", "div", "span"}
NASTY = "<script>alert('x')</script> & \"quotes\" </td></table>"


class Page(HTMLParser):
    """What a browser makes of it.

    Attributes:
        text: all text, one piece per element.
        rows: of all tables, the text of their cells.
        tags: names of the elements.
    """

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.text: list[str] = []
        self.rows: list[list[str]] = []
        self.tags: set[str] = set()
        self._open: list[str] = []
        self.feed(source)
        self.close()
        assert not self._open, f"never closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self._open.append(tag)
        assert {name for name, _ in attrs} <= {"style", "scope", "title"}, attrs
        assert not any("url" in (value or "") for name, value in attrs if name == "style"), "it loads nothing"
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data: str) -> None:
        self.text.append(data)
        if {"td", "th"} & set(self._open):
            self.rows[-1][-1] += data

    def facts(self) -> dict[str, str]:
        """Of tables with two columns."""
        return {row[0]: row[1] for row in self.rows if len(row) == 2}


def page(value: Any) -> Page:
    """As a notebook shows it."""
    parsed = Page(value._repr_html_())
    assert parsed.tags <= ALLOWED
    return parsed


def make_statistics(node: NodeStatistics | None) -> CacheStatistics:
    return CacheStatistics(
        retrieves_total=4,
        hits_total=3,
        tokens_asked_total=100,
        tokens_served_total=50,
        zero_copy_total=3,
        copied_total=1,
        stored_chunks_total=12,
        failed_chunks_total=0,
        held_bytes=1536,
        held_dropped_total=0,
        timeouts_total=1,
        unreachable_total=2,
        stale_stores_total=0,
        node=node,
    )


cells = st.one_of(
    st.text(),
    st.integers(),
    st.builds(html.Mark, st.text(), st.sampled_from(html.Tone)),
    st.builds(
        html.Bar,
        st.lists(st.tuples(st.text(), st.integers(0, 1 << 40), st.sampled_from(html.Tone))).map(tuple),
        st.integers(0, 1 << 40),
    ),
)


@given(st.text(), st.lists(st.text(), max_size=5), st.lists(st.lists(cells, max_size=5), max_size=5), st.text())
def test_whatever_comes_is_text_and_nothing_else(
    caption: str, columns: list[str], rows: list[list[html.Cell]], note: str
) -> None:
    parsed = Page(html.table(caption, columns, rows, note=note))
    assert parsed.tags <= ALLOWED
    assert len(parsed.rows) == 1 + len(rows)
    assert [len(row) for row in parsed.rows] == [len(columns), *map(len, rows)]
    shown = [[cell.text if isinstance(cell, html.Mark) else cell for cell in row] for row in rows]
    for cells_, row in zip(shown, parsed.rows[1:], strict=True):
        for cell, text in zip(cells_, row, strict=True):
            if isinstance(cell, str):
                assert text.replace("\r\n", "\n").replace("\r", "\n") == cell.replace("\r\n", "\n").replace("\r", "\n")
            if isinstance(cell, int):
                assert text == f"{cell:,}"


def test_markup_in_any_place_stays_text() -> None:
    bar = html.Bar(((NASTY, 1, html.Tone.BAD),), 2)
    for source in (
        html.table(NASTY, [NASTY], [[NASTY], [html.Mark(NASTY, html.Tone.BAD)], [bar]], note=NASTY),
        html.facts(NASTY, [(NASTY, NASTY)], note=NASTY),
    ):
        assert "<script" not in source
        parsed = Page(source)
        assert "script" not in parsed.tags
        assert NASTY in parsed.text


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1,023 B"),
        (1024, "1.0 KiB"),
        (1536 << 10, "1.5 MiB"),
        (5 << 30, "5.0 GiB"),
        (3 << 50, "3,072.0 TiB"),
    ],
)
def test_sizes(nbytes: int, text: str) -> None:
    assert html.size(nbytes) == text


def test_shares() -> None:
    assert (html.percent(1, 4), html.percent(0, 0), html.share(3, 12)) == ("25%", "-", "3 (25%)")


def test_of_very_many_rows_the_first_are_shown() -> None:
    parsed = Page(html.table("t", ["n"], ([i] for i in range(1000))))
    assert len(parsed.rows) == 201
    assert "800 more rows are not shown." in parsed.text


def test_statistics_have_units() -> None:
    parsed = page(make_statistics(make_node_statistics(revisions=(ModelRevision("m", 1, "r1"),))))
    facts = parsed.facts()
    assert facts["with a hit"] == "9 (90%)", "the node's, which come last"
    assert facts["tokens served"] == "50 (50%)"
    assert facts["layers without a copy"] == "3 (75%)"
    assert facts["rows of chunks not complete yet"] == "1.5 KiB"
    assert facts["pool"] == "64.0 MiB, pageable"
    assert facts["of it"] == "resident 38%, reserved 12%"
    assert facts["chunks"] == "1,234"
    assert facts["revision of 'm'"] == "'r1'"
    assert "Pool of node abababababab" in parsed.text


def test_statistics_of_a_node_that_is_away_say_so() -> None:
    assert page(make_statistics(None)).facts()["statistics"] == "can't be reached"


def test_names_in_statistics_are_escaped() -> None:
    node = make_node_statistics(kv_source=NASTY, node_id=NASTY, revisions=(ModelRevision(NASTY, 1, NASTY),))
    assert page(make_statistics(node)).facts()["KV source"] == NASTY


def test_an_explanation_is_a_list_whose_table_joins_what_is_alike() -> None:
    reports = [
        ChunkReport(0, 256, "ok", "a" * 56),
        ChunkReport(256, 256, "ok", "a" * 56),
        ChunkReport(512, 256, "kv_absent", "a" * 56),
        ChunkReport(768, 100, "unreachable", ""),
    ]
    explanation = Explanation(reports)
    assert explanation == reports
    assert repr(explanation) == repr(reports)
    parsed = page(explanation)
    assert "2 of 4 chunks can be had" in parsed.text
    assert [row[:3] + row[4:] for row in parsed.rows[1:]] == [
        ["0 to 511", "2", "ok", "a" * 12],
        ["512 to 767", "1", "kv_absent", "a" * 12],
        ["768 to 867", "1", "unreachable", "-"],
    ]
    assert "0 of 0 chunks can be had" in page(Explanation()).text


def test_every_reason_has_a_meaning() -> None:
    names = ("OK", "NEVER_STORED", "EVICTED", "RETIRED", "LAYER_MISSING", "KV_ABSENT", "KV_UNKNOWN", "UNREACHABLE")
    assert set(REASONS) == {getattr(messages, name) for name in names}


def test_a_hit_shows_its_layers_and_what_ended_it() -> None:
    hit = PrefixHit(512, 256, "kv_absent", {-1: torch.zeros(256, 64, dtype=torch.bfloat16), 24: torch.zeros(256, 8)})
    parsed = page(hit)
    assert "Hit: 512 tokens of the prefix, rows of those from 256 on" in parsed.text
    assert parsed.rows[1:] == [
        ["-1", "256", "64", "bfloat16", "cpu", "32.0 KiB"],
        ["24", "256", "8", "float32", "cpu", "8.0 KiB"],
    ]
    assert "There, KV is gone." in parsed.text


@pytest.mark.parametrize(
    ("miss", "note"),
    [
        (PrefixHit(ended_by="unreachable"), "Who would know of more can't be reached."),
        (PrefixHit(ended_by="hidden_state"), "There, hidden states are missing."),
        (PrefixHit(ended_by="kv_unknown"), "There, nobody vouches for the KV."),
    ],
)
def test_a_miss_says_why(miss: PrefixHit, note: str) -> None:
    parsed = page(miss)
    assert "Miss: 0 tokens of the prefix" in parsed.text
    assert note in parsed.text


def test_a_plan_and_a_store() -> None:
    plan = Coverage(num_tokens=256, kv_tokens=512, layer_tokens={0: 512, 24: 256}, nbytes=1 << 20, nodes=("a" * 56,))
    facts = page(plan).facts()
    assert facts["usable in every layer"] == "256"
    assert (facts["layer 24 here"], facts["size"], facts["on nodes"]) == ("256", "1.0 MiB", "a" * 12)
    assert page(StoreResult(stored=3, failed=1)).facts()["failed"] == "1"


@pytest.mark.parametrize(
    "value",
    [
        PrefixHit(),
        PrefixHit(4, 4),
        Coverage(layer_tokens={}),
        StoreResult(),
        make_node_statistics(retrieves_total=0, tokens_asked_total=0),
    ],
)
def test_nothing_is_shown_as_nothing(value: Any) -> None:
    assert page(value).text


def test_what_crosses_processes_knows_nothing_of_tables_and_a_client_brings_them() -> None:
    script = """
import sys
import hs_cache.messages, hs_cache.results
assert not {"html", "hs_cache.html", "hs_cache.tables"} & set(sys.modules)
hit = hs_cache.results.PrefixHit()
assert hit._repr_html_() is None, "shown as text"
import hs_cache.client
assert "Miss: 0 tokens" in hit._repr_html_()
"""
    done = run_python(["-c", script])
    assert done.returncode == 0, done.stderr


def test_every_value_of_a_client_has_a_table() -> None:
    for kind in (CacheStatistics, Coverage, Explanation, NodeStatistics, PrefixHit, StoreResult):
        assert issubclass(kind, Shown)
        assert as_html.dispatch(kind) is not as_html.dispatch(object), kind
