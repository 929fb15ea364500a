"""What this project has to reach, as data: each target is computed from the medians of one run."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median

from benchmarks.peers import BASELINE, HS_CACHE, LMCACHE, LMCACHE_TUNED, RAY_TENSOR
from benchmarks.results import NotMeasuredError, Run, SizeResult
from benchmarks.subject import CALL, COPY, KEYS, PLAN, READ, RETRIEVE, STORE, STORE_ASYNC
from benchmarks.transfers import BARE_TRANSFER, CROSS_NODE_RETRIEVE


@dataclass(frozen=True)
class Figure:
    """What was measured. `where` names the size that was worst, where there are several."""

    value: float
    where: str = ""


@dataclass(frozen=True)
class Target:
    """A figure, and the least or the most that it may be. `shown` formats it."""

    what: str
    limit: float
    measure: Callable[[Run], Figure]
    at_least: bool = True
    shown: str = "{:.2f}x"

    @property
    def goal(self) -> str:
        """In words."""
        return ("≥ " if self.at_least else "≤ ") + self.shown.format(self.limit)


@dataclass(frozen=True)
class Verdict:
    """What became of a target: ``met``, ``missed``, or ``not measured``, for the reason that `measured` gives."""

    target: Target
    measured: str
    verdict: str


def judge(run: Run) -> list[Verdict]:
    """Every target, in order."""
    return [_judge(target, run) for target in TARGETS]


def _judge(target: Target, run: Run) -> Verdict:
    try:
        figure = target.measure(run)
    except NotMeasuredError as error:
        return Verdict(target, str(error), "not measured")
    met = figure.value >= target.limit if target.at_least else figure.value <= target.limit
    shown = target.shown.format(figure.value) + (f" ({figure.where})" if figure.where else "")
    return Verdict(target, shown, "met" if met else "missed")


def _speedup(result: SizeResult, step: str, theirs: str, their_step: str | None = None) -> float:
    return result.median(theirs, their_step or step) / result.median(HS_CACHE, step)


def _against(tokens: int, step: str, theirs: str) -> Callable[[Run], Figure]:
    return lambda run: Figure(_speedup(run.at(tokens, 2048), step, theirs))


def _against_the_faster_lmcache(tokens: int, step: str, their_step: str) -> Callable[[Run], Figure]:
    def figure(run: Run) -> Figure:
        result = run.at(tokens, 2048)
        return min(
            (Figure(_speedup(result, step, name, their_step), name) for name in (LMCACHE, LMCACHE_TUNED)),
            key=lambda each: each.value,
        )

    return figure


def _in_calls(tokens: int, step: str) -> Callable[[Run], Figure]:
    return lambda run: Figure(run.at(tokens, 2048).median(HS_CACHE, step) / run.at(tokens, 2048).median(BASELINE, CALL))


def _worst(figures: Iterator[Figure], *, lowest: bool) -> Figure:
    found = list(figures)
    if not found:
        raise NotMeasuredError("no size was measured")
    return (min if lowest else max)(found, key=lambda figure: figure.value)


def _store_against_memcpy(run: Run) -> Figure:
    def figures() -> Iterator[Figure]:
        for result in run.sizes:
            if result.size.layers == 1:
                least = result.median(BASELINE, COPY) + 2 * result.median(BASELINE, CALL)
                yield Figure(result.median(HS_CACHE, STORE) / least, f"worst: {result.size}")

    return _worst(figures(), lowest=False)


def _against_ray(*steps: str) -> Callable[[Run], Figure]:
    def figures(run: Run) -> Iterator[Figure]:
        for result in run.sizes:
            theirs, ours = (sum(result.median(name, step) for step in steps) for name in (RAY_TENSOR, HS_CACHE))
            yield Figure(theirs / ours, f"worst: {result.size}")

    return lambda run: _worst(figures(run), lowest=True)


def _clients(run: Run) -> Figure:
    found = {result.processes: result.median for result in run.clients if result.reading}
    if not {1, 8} <= found.keys():
        raise NotMeasuredError(run.skipped.get("clients", "8 client processes were not measured"))
    return Figure(found[8] / found[1])


def _bytes_per_token(run: Run) -> Figure:
    if HS_CACHE not in run.bytes_per_token:
        raise NotMeasuredError("not measured")
    others = [
        f"{name}: {kept / hidden:.2f}x" for name, (kept, hidden) in run.bytes_per_token.items() if name == LMCACHE
    ]
    kept, hidden = run.bytes_per_token[HS_CACHE]
    return Figure(kept / hidden, "; ".join([f"{kept:.0f} bytes at hidden {hidden}", *others]))


def _cross_node(run: Run) -> Figure:
    if run.cross_node is None:
        raise NotMeasuredError(run.skipped.get("cross_node", "not measured"))
    return _worst(
        (
            Figure(
                median(result["seconds"][CROSS_NODE_RETRIEVE]) / median(result["seconds"][BARE_TRANSFER]),
                f"worst: {result['tokens']}x{result['hidden']}",
            )
            for result in run.cross_node["results"]
        ),
        lowest=False,
    )


def _keys_ms(run: Run) -> Figure:
    return Figure(run.at(32768, 2048).median(HS_CACHE, KEYS) * 1e3)


TARGETS = (
    Target("retrieve, 8192x2048: faster than LMCache, tuned malloc", 3, _against(8192, RETRIEVE, LMCACHE_TUNED)),
    Target("retrieve, 8192x2048: faster than LMCache", 15, _against(8192, RETRIEVE, LMCACHE)),
    Target("retrieve, 32768x2048: faster than LMCache, tuned malloc", 8, _against(32768, RETRIEVE, LMCACHE_TUNED)),
    Target("retrieve, 32768x2048: faster than LMCache", 40, _against(32768, RETRIEVE, LMCACHE)),
    Target(
        "retrieve and read every row, 8192x2048: faster than LMCache, tuned malloc",
        1,
        _against(8192, READ, LMCACHE_TUNED),
    ),
    Target(
        "retrieve and read every row, 32768x2048: faster than LMCache, tuned malloc",
        1,
        _against(32768, READ, LMCACHE_TUNED),
    ),
    Target("retrieve, 1024x2048, in no-op actor calls", 3, _in_calls(1024, RETRIEVE), at_least=False),
    Target("store, 8192x2048: faster than the faster LMCache", 1.3, _against_the_faster_lmcache(8192, STORE, STORE)),
    Target("store, 32768x2048: faster than the faster LMCache", 1.8, _against_the_faster_lmcache(32768, STORE, STORE)),
    Target(
        "store, every size with one layer, in memcpy + 2 no-op actor calls", 1.3, _store_against_memcpy, at_least=False
    ),
    Target(
        "store_async, 1024x2048, as the caller sees it: not slower than the store of the faster LMCache",
        1,
        _against_the_faster_lmcache(1024, STORE_ASYNC, STORE),
    ),
    Target("retrieve, every size: faster than ray.get of the torch tensor", 10, _against_ray(RETRIEVE)),
    Target("store, every size: faster than ray.put of the torch tensor", 10, _against_ray(STORE)),
    Target("store + retrieve, every size: faster than ray.put + ray.get of it", 10, _against_ray(STORE, RETRIEVE)),
    Target(
        "control path: plan of 128 chunks, which moves no rows, in no-op actor calls",
        2,
        _in_calls(32768, PLAN),
        at_least=False,
    ),
    Target("keys of 32768 tokens from a list", 1, _keys_ms, at_least=False, shown="{:.2f} ms"),
    Target(
        "keys of 32768 tokens from a list: faster than LMCache's sha256_cbor",
        3,
        _against_the_faster_lmcache(32768, KEYS, KEYS),
    ),
    Target("8 client processes that read every row: calls/s of all, against 1 (flat or rising)", 0.95, _clients),
    Target("bytes kept per token, bf16, in hidden sizes", 2, _bytes_per_token, at_least=False),
    Target(
        "pool that can be used under a mixed-size churn",
        0.97,
        lambda run: Figure(run.fact("churn", "usable_fraction")),
        shown="{:.1%}",
    ),
    Target(
        "retrieve from another node, in bare Ray transfers of the same NumPy bytes", 1.25, _cross_node, at_least=False
    ),
)
