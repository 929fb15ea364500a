"""The plot of a run: store and retrieve by size, hidden 2048, one layer."""

from pathlib import Path

import matplotlib

matplotlib.use("agg")

from matplotlib import pyplot as plt
from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

from benchmarks.peers import BASELINE, HS_CACHE, LMCACHE, LMCACHE_TUNED, MOONCAKE, RAY_BYTES, RAY_TENSOR, REDIS
from benchmarks.results import NotMeasuredError, Run
from benchmarks.subject import COPY, READ, RETRIEVE, STORE

_HIDDEN = 2048
_LINES = {
    HS_CACHE: ("tab:blue", "o", "-"),
    LMCACHE_TUNED: ("tab:orange", "s", "-"),
    LMCACHE: ("tab:orange", "s", ":"),
    MOONCAKE: ("tab:green", "^", "-"),
    REDIS: ("tab:red", "v", "-"),
    RAY_BYTES: ("tab:purple", "D", "-"),
    RAY_TENSOR: ("tab:purple", "D", ":"),
}


def draw(run: Run, path: Path) -> None:
    """Write a PNG."""
    figure, axes = plt.subplots(1, 3, figsize=(13, 5), sharey=True, layout="constrained")
    results = sorted(
        (result for result in run.sizes if (result.size.hidden, result.size.layers) == (_HIDDEN, 1)),
        key=lambda result: result.size,
    )
    tokens = [result.size.tokens for result in results]
    for plot, step in zip(axes, (STORE, RETRIEVE, READ), strict=True):
        for subject, (color, marker, style) in {BASELINE: ("black", "", "--"), **_LINES}.items():
            points = []
            for result in results:
                try:
                    seconds = result.median(subject, COPY if subject == BASELINE else step)
                except NotMeasuredError:
                    continue
                points.append((result.size.tokens, seconds * 1e3))
            if points:
                label = "memcpy of the rows" if subject == BASELINE else subject
                plot.plot(*zip(*points, strict=True), color=color, marker=marker, linestyle=style, label=label)
        plot.set(title=step, xlabel="tokens", xscale="log", yscale="log")
        plot.xaxis.set_major_locator(FixedLocator(tokens))
        plot.xaxis.set_minor_locator(NullLocator())
        plot.xaxis.set_major_formatter(StrMethodFormatter("{x:.0f}"))
        plot.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        plot.grid(which="major", alpha=0.3)
    axes[0].set_ylabel("milliseconds, median")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle(f"bf16, hidden {_HIDDEN}, one layer, one node")
    figure.savefig(path, dpi=120)
    plt.close(figure)
