"""``python -m tests.chaos [--seconds 60] [--seed N ...]``: a run and a line per seed; exit code 1 if one fails."""

import argparse
import contextlib
import io
import random
import sys
import traceback

from tests.chaos.driver import run


def main() -> int:
    """Parse, run, tell."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="length of a run, without start and audits")
    parser.add_argument(
        "--seed", type=int, nargs="*", default=[], help="one run for each; a random one if none is given"
    )
    parser.add_argument("--verbose", action="store_true", help="also show what fell when, and what Ray says")
    options = parser.parse_args()
    failed = False
    for seed in options.seed or [random.randrange(1_000_000)]:
        print(f"chaos: seed {seed}, {options.seconds:.0f} s", flush=True)
        said = io.StringIO()  # Ray tells of every process that was killed, at length
        try:
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                summary = run(seed, options.seconds)
        except Exception:
            traceback.print_exc()
            print(f"{said.getvalue()}seed {seed}: the run broke off", flush=True)
            failed = True
            continue
        if options.verbose:
            print(said.getvalue())
        if options.verbose or summary.failures:
            print("\n".join(summary.history))
        for failure in summary.failures[:20]:
            print(f"  FAILED: {failure}")
        print(summary, flush=True)
        failed = failed or bool(summary.failures)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
