"""What a run measured: every second of every round, as it goes to the JSON file and comes from it."""

import json
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.subject import Size


class NotMeasuredError(Exception):
    """A figure isn't there; says why."""


@dataclass(frozen=True)
class SizeResult:
    """All subjects at one size, in the same rounds.

    Attributes:
        seconds: subject → step → seconds, one per round.
        disturbed: rounds that were measured again, since other processes used the CPUs.
        kept: of these, rounds that count all the same, because there weren't enough without.
        missing: subject → why it has no seconds.
    """

    size: Size
    seconds: Mapping[str, Mapping[str, list[float]]]
    disturbed: int = 0
    kept: int = 0
    missing: Mapping[str, str] = field(default_factory=dict)

    def median(self, subject: str, step: str) -> float:
        """Seconds.

        Raises:
            NotMeasuredError: there are none.
        """
        if subject not in self.seconds:
            raise NotMeasuredError(f"{subject}: {self.missing.get(subject, f'not measured at {self.size}')}")
        if step not in self.seconds[subject]:
            raise NotMeasuredError(f"{subject}: no such step: {step}")
        return statistics.median(self.seconds[subject][step])


@dataclass(frozen=True)
class ClientsResult:
    """So many client processes at once; one figure per round."""

    processes: int
    reading: bool
    calls_per_s: list[float]

    @property
    def median(self) -> float:
        """Calls per second, of all together."""
        return statistics.median(self.calls_per_s)


@dataclass(frozen=True)
class Run:
    """Everything of one run.

    Attributes:
        machine: what it ran on, and versions.
        sizes: what was measured at each size.
        full_pool: stores into a pool that is full; None where that wasn't measured.
        clients: several client processes.
        clients_nbytes: of the rows that each of their calls gets.
        bytes_per_token: subject → bytes kept for a token of one layer, and the hidden size.
        skipped: what wasn't measured at all → why.
        cross_node: as `benchmarks.cross_node` writes it.
        tables: name → what another benchmark wrote: ``title``, ``columns``, ``rows`` and ``facts``.
    """

    machine: Mapping[str, str]
    rounds: int
    wall_s: float
    sizes: list[SizeResult]
    full_pool: SizeResult | None = None
    clients: list[ClientsResult] = field(default_factory=list)
    clients_nbytes: int = 0
    bytes_per_token: Mapping[str, tuple[float, int]] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)
    cross_node: Mapping[str, Any] | None = None
    tables: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def at(self, tokens: int, hidden: int, layers: int = 1) -> SizeResult:
        """What was measured at a size.

        Raises:
            NotMeasuredError: nothing was.
        """
        size = Size(tokens, hidden, layers)
        for result in self.sizes:
            if result.size == size:
                return result
        raise NotMeasuredError(f"not measured at {size}")

    def fact(self, table: str, name: str) -> float:
        """A number that another benchmark found.

        Raises:
            NotMeasuredError: it wasn't run.
        """
        try:
            return float(self.tables[table]["facts"][name])
        except KeyError:
            raise NotMeasuredError(self.skipped.get(table, f"{table} was not run")) from None

    def write(self, path: Path) -> None:
        """Write the JSON file."""
        path.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> "Run":
        """Read what `write` wrote."""
        found = json.loads(path.read_text(encoding="utf-8"))
        full = found["full_pool"]
        pairs = {name: (float(kept), int(hidden)) for name, (kept, hidden) in found["bytes_per_token"].items()}
        return cls(
            **{
                **found,
                "sizes": [_size_result(result) for result in found["sizes"]],
                "full_pool": None if full is None else _size_result(full),
                "clients": [ClientsResult(**result) for result in found["clients"]],
                "bytes_per_token": pairs,
            }
        )


def _size_result(found: Mapping[str, Any]) -> SizeResult:
    return SizeResult(**{**found, "size": Size(**found["size"])})
