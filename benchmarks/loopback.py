"""Servers on the loopback address that a peer's worker needs. They end with the worker, however that ends."""

import contextlib
import ctypes
import signal
import socket
import subprocess
import time
from collections.abc import Sequence

from benchmarks.subject import check

_PR_SET_PDEATHSIG = 1
_PATIENCE_S = 20.0
_POLL_S = 0.02


def free_ports(count: int) -> list[int]:
    """Ports on which nobody listens now."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


def start_server(command: Sequence[str], ports: Sequence[int]) -> "subprocess.Popen[bytes]":
    """Start a server; returns when it listens on all of `ports`.

    Raises:
        MeasurementError: it doesn't.
    """
    libc = ctypes.CDLL(None)  # not in the child: between fork and exec only what is loaded may be used

    def end_with_parent() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=end_with_parent,  # noqa: PLW1509
    )
    until = time.monotonic() + _PATIENCE_S
    while not all(map(_listens, ports)):
        check(process.poll() is None and time.monotonic() < until, f"{command[0]} doesn't start")
        time.sleep(_POLL_S)
    return process


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
