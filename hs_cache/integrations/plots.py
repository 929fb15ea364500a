"""Plots of what `hs_cache.integrations.notebook` finds. They need matplotlib: ``pip install 'hs-cache[notebook]'``.

Figures show themselves in any Jupyter front end, with nothing else to be set up; elsewhere, ``figure.savefig(path)``
writes them.
"""

import io
import math
from collections.abc import Sequence
from typing import Any

from hs_cache import html
from hs_cache.client import AsyncHiddenStateCache, HiddenStateCache
from hs_cache.errors import InvalidInputError
from hs_cache.installation import require_extra
from hs_cache.integrations.notebook import PoolHistory, PoolSample, map_prefix, nodes_in, restarts_in
from hs_cache.keys import MMSpan, TokenIds
from hs_cache.messages import OK
from hs_cache.tables import REASONS, pool_parts

with require_extra("notebook"):
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MIB = 1 << 20
_MOST_NODES = 16
"""Nodes in one figure."""

_MOST_LINES = 64
"""Chunks whose ends are drawn."""

_COLOURS = {
    html.Tone.GOOD: "#2a9d55",
    html.Tone.FAIR: "#4c8ed9",
    html.Tone.POOR: "#e0a526",
    html.Tone.BAD: "#d1495b",
    html.Tone.NONE: "#e3e3e3",
}
_HATCHES = {"kv_unknown": "..", "retired": "xx", "unreachable": "//"}
"""Of reasons that share a colour with others."""


class NotebookFigure(Figure):
    """A figure of which pyplot knows nothing: nobody has to close it, any thread may draw it, and it is shown once."""

    def _repr_png_(self) -> bytes:
        picture = io.BytesIO()
        self.savefig(picture, format="png", dpi=120)
        return picture.getvalue()


def plot_pool(history: PoolHistory) -> Figure:
    """What each pool of a service holds over time, of the nodes seen first. Gaps are where a node didn't answer.

    Raises:
        InvalidInputError: `history` is none.
    """
    if not isinstance(history, PoolHistory):
        raise InvalidInputError(f"history: got {type(history).__name__}, expected PoolHistory")
    samples = history.samples
    nodes = nodes_in(samples)
    shown = nodes[:_MOST_NODES]
    figure = NotebookFigure(figsize=(8.0, 0.8 + 1.7 * max(len(shown), 1)), layout="constrained")
    title = f"Pools of service {history.service!r}"
    figure.suptitle(title if shown == nodes else f"{title}: {len(shown)} of {len(nodes)} nodes", fontsize="medium")
    panels = figure.subplots(max(len(shown), 1), 1, sharex=True, squeeze=False)[:, 0]
    for axes, node_id in zip(panels, shown, strict=False):
        _draw_pool(axes, samples, node_id)
    if not shown:
        panels[0].text(0.5, 0.5, "no node has answered yet", ha="center", va="center", transform=panels[0].transAxes)
    panels[-1].set_xlabel("seconds since the first sample")
    return figure


def _draw_pool(axes: Axes, samples: Sequence[PoolSample], node_id: str) -> None:
    times = [sample.at_s - samples[0].at_s for sample in samples]
    said = [sample.nodes.get(node_id) for sample in samples]
    top = [0.0] * len(said)
    for position, (name, _, tone) in enumerate(pool_parts(next(stats.store for stats in said if stats is not None))):
        part = [math.nan if stats is None else pool_parts(stats.store)[position][1] / _MIB for stats in said]
        bottom, top = top, [below + more for below, more in zip(top, part, strict=True)]
        axes.fill_between(times, bottom, top, color=_COLOURS[tone], linewidth=0, label=name)
    leased = [math.nan if stats is None else stats.store.leased_bytes / _MIB for stats in said]
    capacity = [math.nan if stats is None else stats.store.capacity_bytes / _MIB for stats in said]
    axes.plot(times, top, color="black", linewidth=0.8, marker=".", markersize=3)
    axes.plot(times, leased, color="#7b2cbf", linestyle="--", linewidth=1.2, label="leased to readers")
    axes.plot(times, capacity, color="grey", linestyle=":", linewidth=1.2, label="capacity")
    for at_s in restarts_in(samples, node_id):
        axes.axvline(at_s - samples[0].at_s, color=_COLOURS[html.Tone.BAD], linewidth=1)
        axes.annotate("restarted", (at_s - samples[0].at_s, 1), xycoords=("data", "axes fraction"), fontsize="x-small")
    axes.set_ylim(bottom=0)
    axes.set_ylabel("MiB")
    axes.set_title(f"node {html.short_id(node_id)}", fontsize="small", loc="left")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize="x-small", frameon=False)


def plot_prefix(
    cache: HiddenStateCache | AsyncHiddenStateCache,
    token_ids: TokenIds,
    layers: int | Sequence[int],
    *,
    mm_spans: Sequence[MMSpan] = (),
) -> Figure:
    """Where a prefix lives: node by node, which chunks are there with KV and all of `layers`, and why others aren't;
    and how far it can be had here, from all nodes together.

    Args:
        cache, token_ids, layers, mm_spans: as for `map_prefix`, which this asks.

    Raises:
        InvalidInputError: an argument is wrong.
    """
    found = map_prefix(cache, token_ids, layers, mm_spans=mm_spans)
    # Those that have the most of it, where not all can be shown.
    nodes = sorted(found.reasons, key=lambda node_id: -found.reasons[node_id].count(OK))[:_MOST_NODES]
    figure = NotebookFigure(figsize=(8.0, 1.5 + 0.4 * max(len(nodes), 1)), layout="constrained")
    axes = figure.subplots()
    total = found.ends[-1] if found.ends else 0
    hidden = len(found.reasons) - len(nodes)
    axes.set_title(
        f"{found.coverage.num_tokens:,} of {total:,} tokens can be had here"
        + (f"; {hidden} more nodes are not shown" if hidden else ""),
        fontsize="medium",
        loc="left",
    )
    shown: dict[str, Any] = {}
    for row, node_id in enumerate(nodes):
        for first, end, reason in found.runs(node_id):
            colour, hatch = _COLOURS[REASONS[reason][0]], _HATCHES.get(reason)
            bar = axes.barh(row, end - first, left=first, height=0.75, color=colour, hatch=hatch, edgecolor="white")
            (shown[reason],) = bar
    for end in found.ends if len(found.ends) <= _MOST_LINES else ():
        axes.axvline(end, color="white", linewidth=0.6)
    usable = axes.axvline(found.coverage.num_tokens, color="black", linestyle="--", linewidth=1.2)
    names = [html.short_id(node_id) for node_id in nodes]
    axes.set_yticks(range(len(nodes)), names, family="monospace", fontsize="small")
    axes.set_xlim(0, max(total, 1) * 1.01)
    axes.set_ylim(max(len(nodes), 1) - 0.4, -0.6)
    axes.set_xlabel("tokens")
    in_order = [reason for reason in REASONS if reason in shown]
    axes.legend(
        [*(shown[reason] for reason in in_order), usable],
        [*(reason.replace("_", " ") for reason in in_order), "can be had here"],
        loc="center left",
        bbox_to_anchor=(1.0, 0.5),
        fontsize="x-small",
        frameon=False,
    )
    return figure
