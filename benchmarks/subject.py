"""What is measured: a `Subject` prepares a size, acts on command and says how long that took.

Runs in every peer's environment, so it imports the standard library only.
"""

import time
from dataclasses import dataclass
from typing import Any

CHUNK_SIZE = 256
VOCABULARY = 152_064  # Qwen's

STORE = "store"
STORE_ASYNC = "store_async, as the caller sees it"
RETRIEVE = "retrieve"
READ = "retrieve and read every row"
HALF = "retrieve, half of it there"
MISS = "retrieve, a miss"
PLAN = "plan (no rows)"
KEYS = "keys from a list"
COPY = "memcpy"
COPY_FRESH = "memcpy into fresh memory"
READ_ONLY = "read every row"
CALL = "no-op actor call"


class MeasurementError(Exception):
    """A subject gave something else than what was stored, or can't be measured."""


def check(holds: object, what: str) -> None:
    """`MeasurementError` unless `holds`."""
    if not holds:
        raise MeasurementError(what)


@dataclass(frozen=True, order=True)
class Size:
    """One prompt and its rows, bf16."""

    tokens: int
    hidden: int
    layers: int = 1

    def __str__(self) -> str:
        return f"{self.tokens}x{self.hidden}" + (f", {self.layers} layers" if self.layers > 1 else "")

    @property
    def nbytes(self) -> int:
        """Of all rows as they are given."""
        return self.tokens * self.hidden * self.layers * 2

    @property
    def chunks(self) -> int:
        """Of the prompt."""
        return self.tokens // CHUNK_SIZE


class Subject:
    """Something to be measured. Only `act` is timed; whatever it needs is made in `begin`, and goes in `finish`.

    In every round the steps are taken in another order, but `STORE` is always the first.
    """

    def prepare(self, size: Size) -> list[str]:
        """Make rows of a size, in place of those of the last; returns the steps that can be taken."""
        raise NotImplementedError

    def begin(self) -> None:
        """A new round: a prompt that was never seen."""

    def wake(self) -> None:
        """Do something small: others had the CPUs and caches meanwhile, and what is measured is in use, not asleep."""

    def act(self, step: str) -> Any:
        """Take a step."""
        raise NotImplementedError

    def judge(self, step: str, result: Any) -> None:
        """`MeasurementError` unless the step did all it should."""

    def verify(self) -> None:
        """`MeasurementError` unless what comes back is what was stored, bit for bit. After `STORE`."""

    def finish(self) -> None:
        """The end of a round: room for the next."""

    def bytes_per_token(self) -> float | None:
        """What is kept for a token and layer, as the subject itself counts; None where it doesn't. After `STORE`."""
        return None

    def close(self) -> None:
        """The end."""

    def time(self, step: str) -> float:
        """Take a step; seconds."""
        started = time.perf_counter()
        result = self.act(step)
        took = time.perf_counter() - started
        self.judge(step, result)
        return took
