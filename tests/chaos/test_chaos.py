"""A short run of the chaos test. ``make chaos`` has longer ones, with other seeds."""

import os
import signal
import subprocess
import sys

import pytest

from tests.processes import ROOT

pytestmark = pytest.mark.long

SECONDS = os.environ.get("CHAOS_SECONDS", "15")
SEED = os.environ.get("CHAOS_SEED", "1")
_STARTS_AND_AUDITS_S = 240
_CLEAN_UP_S = 60


@pytest.mark.chaos
@pytest.mark.timeout(float(SECONDS) + _STARTS_AND_AUDITS_S + _CLEAN_UP_S)
def test_chaos() -> None:
    # In a process of its own: it brings its own cluster, and this process may have joined another one.
    line = [sys.executable, "-m", "tests.chaos", "--seconds", SECONDS, "--seed", *SEED.split()]
    process = subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        output, _ = process.communicate(timeout=float(SECONDS) + _STARTS_AND_AUDITS_S)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)  # it ends what it started
            process.wait(_CLEAN_UP_S)
    print(output)
    assert process.returncode == 0, output
