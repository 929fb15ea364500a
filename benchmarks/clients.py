"""Several client processes at once, that start at a common moment."""

import contextlib
import time
from collections.abc import Sequence
from dataclasses import asdict

from benchmarks.measure import turned
from benchmarks.peers import Worker
from benchmarks.quiet import wait_until_quiet
from benchmarks.results import ClientsResult
from benchmarks.subject import Size

_AHEAD_S = 0.3
"""How long before the common moment the processes are told of it."""


def measure_clients(
    address: str, service: str, size: Size, counts: Sequence[int], *, seconds: float, rounds: int, patience_s: float
) -> list[ClientsResult]:
    """Calls per second of all together, for each number of processes, reading rows and not."""
    with contextlib.ExitStack() as stack:
        clients = []
        for _ in range(max(counts)):
            client = Worker("benchmarks.client", [address, service], environ={})
            stack.callback(client.close)
            clients.append(client)
        for number, client in enumerate(clients):
            client.ask("prepare", size=asdict(size), number=number)
        runs = [(count, reading) for reading in (True, False) for count in counts]
        taken: dict[tuple[int, bool], list[float]] = {run: [] for run in runs}
        wait_until_quiet(patience_s)
        for number in range(rounds):
            for count, reading in turned(runs, number):
                at = time.monotonic() + _AHEAD_S
                for client in clients[:count]:
                    client.send("loop", at=at, seconds=seconds, reading=reading)
                taken[count, reading].append(sum(int(client.receive()) for client in clients[:count]) / seconds)
    return [ClientsResult(count, reading, calls) for (count, reading), calls in taken.items()]
