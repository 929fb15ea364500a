"""How far it is: a bar in a terminal, a line every few seconds in a job's log."""

from __future__ import annotations

import time
from dataclasses import dataclass
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

_EVERY_S = 5.0


@dataclass
class Counts:
    """What this run has done so far; rows are hidden states, one per prompt token."""

    answered: int = 0
    failed: int = 0
    hits: int = 0
    prompt_tokens: int = 0
    skipped_tokens: int = 0

    @property
    def hit_rate(self) -> float:
        """The share of the answered prompts for which something was restored."""
        return self.hits / max(1, self.answered)

    @property
    def skipped_share(self) -> float:
        """The share of prompt tokens that were restored."""
        return self.skipped_tokens / max(1, self.prompt_tokens)


class Progress:
    """Shows `counts`, which others count up.

    Args:
        counts: of this run.
        total: prompts of the whole job.
        before: those that earlier runs have finished.
        console: where to.
    """

    def __init__(self, counts: Counts, *, total: int, before: int, console: Console) -> None:
        self._counts = counts
        self._total = total
        self._before = before
        self._console = console
        self._begun = self._shown = self._first = time.monotonic()
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = Bar(*columns, console=console) if console.is_terminal else None
        self._task = (
            self._bar.add_task("waiting for the first answer", total=total, completed=before) if self._bar else None
        )

    @property
    def seconds(self) -> float:
        """Since it was made."""
        return time.monotonic() - self._begun

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self) -> None:
        """Show what there is, if it is time for that."""
        now = time.monotonic()
        finished = self._counts.answered + self._counts.failed
        if not finished:
            self._first = now  # how long workers took to begin says nothing about how fast they are
        figures = self._figures(finished, now - self._first) if finished else "waiting for the first answer"
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self._before + finished, description=figures)
        elif now - self._shown >= _EVERY_S:
            self._shown = now
            self.say(f"{self._before + finished}/{self._total} prompts, {figures}")

    def say(self, line: str) -> None:
        """Print a line, above the bar if there is one."""
        self._console.print(line, soft_wrap=True, highlight=False, markup=False)

    def _figures(self, finished: int, seconds: float) -> str:
        speed = finished / max(seconds, 0.1)
        left = (self._total - self._before - finished) / speed
        failed = f", {self._counts.failed} failed" if self._counts.failed else ""
        skipped = f"{self._counts.skipped_share:.0%} of tokens skipped"
        return f"{speed:.1f}/s, {skipped}{failed}, about {left:.0f} s left"
