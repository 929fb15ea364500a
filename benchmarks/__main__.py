"""Measure hs_cache and its peers side by side in one run, and write down what came of it.

    python -m benchmarks [--quick] [--peers LMCache Redis ...] [--json RUN.json]

Peers that aren't installed are skipped; the report says why.
"""

import argparse
from pathlib import Path

from benchmarks import report
from benchmarks.peers import HS_CACHE, PEERS
from benchmarks.plan import FULL, QUICK
from benchmarks.run import Runner


def main() -> None:
    """Measure, keep all seconds, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes and three rounds: shows that it works")
    parser.add_argument("--peers", nargs="*", choices=list(PEERS), default=list(PEERS), help="default: all")
    parser.add_argument("--json", type=Path, default=report.SECONDS, help="where all seconds of all rounds go")
    parser.add_argument("--results", type=Path, default=report.RESULTS)
    parser.add_argument("--plot", type=Path, default=report.PLOT)
    options = parser.parse_args()
    run = Runner(QUICK if options.quick else FULL, options.peers).run()
    run.write(options.json)
    report.write(run, options.results, options.plot)
    for table in report.tables(run):
        table.print()
    for result in [*run.sizes, *([run.full_pool] if run.full_pool else [])]:
        if HS_CACHE in result.missing:
            raise SystemExit(f"{HS_CACHE} failed at {result.size}: {result.missing[HS_CACHE]}")
    print(f"{run.wall_s / 60:.1f} minutes; {options.json}, {options.results}, {options.plot}")


if __name__ == "__main__":
    main()
