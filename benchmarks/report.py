"""What a run found, as tables, Markdown and a plot: ``python -m benchmarks.report [RUN.json]``. Measures nothing."""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks import transfers
from benchmarks.peers import BASELINE, HS_CACHE, LMCACHE, LMCACHE_TUNED, MOONCAKE, RAY_BYTES, RAY_TENSOR, REDIS
from benchmarks.plot import draw
from benchmarks.results import NotMeasuredError, Run, SizeResult
from benchmarks.subject import (
    CALL,
    COPY,
    COPY_FRESH,
    HALF,
    KEYS,
    MISS,
    PLAN,
    READ,
    READ_ONLY,
    RETRIEVE,
    STORE,
    STORE_ASYNC,
)
from benchmarks.tables import Table
from benchmarks.targets import judge

_HERE = Path(__file__).parent
PROFILE = _HERE / "PROFILE.md"
RESULTS, PLOT, SECONDS = _HERE / "RESULTS.md", _HERE / "results.png", _HERE / "run.json"

_SUBJECTS = (HS_CACHE, BASELINE, LMCACHE_TUNED, LMCACHE, MOONCAKE, REDIS, RAY_BYTES, RAY_TENSOR)
_STEPS = (COPY, COPY_FRESH, READ_ONLY, CALL, STORE, STORE_ASYNC, RETRIEVE, READ, HALF, MISS, PLAN, KEYS)

_NOTES = """\
* Everything is measured in the same rounds; who comes first changes from round to round, and everyone is woken by small
  calls that aren't timed. Figures are medians. What to look at are the ratios: absolute times depend on the machine.
* Rows are bf16. Each round stores a prompt that was never seen, into a pool with room for it; where the pool is full,
  that is said.
* *hs_cache*: a client on the service's node, with `kv_source: reports`: storing says that KV is there, and each
  retrieve asks for it. What it gives are views of shared memory; *retrieve and read every row* sums up all of an int64
  view of them, and of what peers give.
* *plan* is the control path: `cache.plan` leases a prefix, asks for its KV and moves no rows, in one call.
* *LMCache*: its own hidden-state store in a whole engine, in one process, with the KV of each prompt in its storage. It
  keeps and gives float32. *Tuned malloc*: glibc keeps what was freed, so that results don't fault their pages in anew.
  Keys from a list are made with `sha256_cbor`, and in its store and retrieve with its default, Python's `hash`.
* *Mooncake*: in one process, which has the memory too; `batch_put_from` and `batch_get_into` with registered buffers.
  *Redis*: over the loopback address; `SET`s in a pipeline, one `MGET`. Both keep a block of bytes per chunk, and are
  given its name: they make no keys of tokens.
* *Ray*: `ray.put` and `ray.get`; a prompt can't be looked up there."""


def tables(run: Run) -> list[Table]:
    """All that was found, targets first."""
    found = [_targets(run)]
    shapes = sorted({(result.size.hidden, result.size.layers) for result in run.sizes})
    found += [_sizes(run, hidden, layers) for hidden, layers in shapes]
    if run.full_pool is not None:
        found.append(_full_pool(run.full_pool))
    if run.clients:
        found.append(_clients(run))
    if run.bytes_per_token:
        found.append(_bytes_per_token(run))
    if run.cross_node is not None:
        found.append(transfers.table(run.cross_node["results"], run.cross_node["recovery_seconds"]))
    found += [Table.of(table) for table in run.tables.values()]
    found.append(_rounds(run))
    if rows := list(_missing(run)):
        found.append(Table("Not measured", ("what", "why"), rows, left=2))
    return found


def markdown(run: Run, plot: str) -> str:
    """The whole report."""
    verdicts = [verdict.verdict for verdict in judge(run)]
    counts = ", ".join(f"{verdicts.count(word)} {word}" for word in ("met", "missed", "not measured"))
    parts = [
        "# Results",
        f"Targets: {counts}. One run of {run.wall_s / 60:.0f} minutes; {_disturbance(run)}",
        f"![store and retrieve by size]({plot})",
        _NOTES,
    ]
    targets, *others = tables(run)
    parts += [f"## {targets.title}", targets.markdown(), PROFILE.read_text(encoding="utf-8").strip()]
    for table in others:
        parts += [f"## {table.title}", table.markdown()]
    machine = Table("Machine and versions", ("what", "which"), [list(item) for item in run.machine.items()], left=2)
    parts += [f"## {machine.title}", machine.markdown(), "## Commands", _COMMANDS]
    return "\n\n".join(parts) + "\n"


_COMMANDS = """\
    make bench                              # measures, and writes this file, the plot, and all seconds to run.json
    .venv/bin/python -m benchmarks.report   # this file and the plot again, from run.json
    make bench BENCH_OPTIONS=--quick        # small sizes, three rounds: shows that everything works"""


def _targets(run: Run) -> Table:
    rows = [(each.target.what, each.target.goal, each.measured, each.verdict) for each in judge(run)]
    return Table("Targets", ("what", "target", "measured", ""), rows, left=4)


def _sizes(run: Run, hidden: int, layers: int) -> Table:
    results = [result for result in run.sizes if (result.size.hidden, result.size.layers) == (hidden, layers)]
    results.sort(key=lambda result: result.size)
    rows = []
    for step in _STEPS:
        for subject in _SUBJECTS:
            cells = [cell for result in results for cell in _milliseconds(result, subject, step)]
            if any(cells):
                rows.append((step, subject, *cells))
    columns = [column for result in results for column in (f"{result.size.tokens} tokens, ms", "x memcpy")]
    title = f"Hidden {hidden}, {layers} layer{'s' if layers > 1 else ''}"
    return Table(title, ("what", "who", *columns), rows, left=2)


def _milliseconds(result: SizeResult, subject: str, step: str) -> tuple[str, str]:
    try:
        seconds = result.median(subject, step)
        return f"{seconds * 1e3:.3f}", f"{seconds / result.median(BASELINE, COPY):.2f}"
    except NotMeasuredError:
        return "", ""


def _full_pool(result: SizeResult) -> Table:
    rows = [
        (step, subject, *_milliseconds(result, subject, step)) for step in (COPY, CALL, STORE) for subject in _SUBJECTS
    ]
    title = f"A store into a full pool, {result.size}: each evicts"
    return Table(title, ("what", "who", "ms", "x memcpy"), [row for row in rows if row[2]], left=2)


def _clients(run: Run) -> Table:
    found = {(result.processes, result.reading): result.median for result in run.clients}
    rows = []
    for processes in sorted({result.processes for result in run.clients}):
        cells = []
        for reading in (False, True):
            calls = found[processes, reading]
            cells += [f"{calls:.0f}", f"{calls / found[1, reading]:.2f}"]
        rows.append((f"{processes}", *cells, f"{found[processes, True] * run.clients_nbytes / 1e9:.2f}"))
    columns = ("processes", "retrieve, calls/s", "x 1 process", "and read, calls/s", "x 1 process", "GB/s read")
    return Table("Several client processes, calls of all together, each with a prompt of its own", columns, rows)


def _bytes_per_token(run: Run) -> Table:
    rows = [
        (subject, f"{hidden}", f"{kept:.0f}", f"{kept / hidden:.2f}")
        for subject, (kept, hidden) in run.bytes_per_token.items()
    ]
    return Table("Bytes kept per token and layer, of bf16 rows", ("who", "hidden", "bytes", "x hidden"), rows)


def _rounds(run: Run) -> Table:
    rows = [
        (f"{result.size}" + (", full pool" if result is run.full_pool else ""), *_counts(result))
        for result in _results(run)
    ]
    columns = ("size", "rounds", "disturbed by other processes", "of these counted")
    return Table("Rounds", columns, rows)


def _disturbance(run: Run) -> str:
    """How far the figures can be trusted."""
    kept = sum(result.kept for result in _results(run))
    if not kept:
        return "rounds that other processes disturbed were measured again."
    counted = sum(int(_counts(result)[0]) for result in _results(run))
    return f"**other processes disturbed {kept} of {counted} rounds that count: measure again on an idle machine.**"


def _results(run: Run) -> list[SizeResult]:
    return [*run.sizes, *([run.full_pool] if run.full_pool else [])]


def _counts(result: SizeResult) -> Sequence[str]:
    counted = max((len(seconds) for steps in result.seconds.values() for seconds in steps.values()), default=0)
    return f"{counted}", f"{result.disturbed}", f"{result.kept}"


def _missing(run: Run) -> Iterator[Sequence[str]]:
    yield from run.skipped.items()
    for result in run.sizes:
        for subject, reason in result.missing.items():
            yield f"{subject}, {result.size}", reason
    if run.full_pool is not None:
        for subject, reason in run.full_pool.missing.items():
            yield f"{subject}, full pool", reason


def write(run: Run, results: Path, plot: Path) -> None:
    """Write the report and the plot."""
    draw(run, plot)
    results.write_text(markdown(run, plot.name), encoding="utf-8")


def main() -> None:
    """Read a run, write what it found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, nargs="?", default=SECONDS)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--plot", type=Path, default=PLOT)
    options = parser.parse_args()
    run = Run.read(options.run)
    write(run, options.results, options.plot)
    for table in tables(run):
        table.print()


if __name__ == "__main__":
    main()
