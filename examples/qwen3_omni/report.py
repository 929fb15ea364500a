"""What one turn showed, and how it is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rich.box import SIMPLE
from rich.table import Table
from rich.text import Text

from .messages import Mode, Speech, Thought


@dataclass(frozen=True)
class Run:
    """One prompt through both stages."""

    thought: Thought
    speech: Speech


@dataclass(frozen=True)
class Turn:
    """One turn with the cache, next to the same turn without it.

    Attributes:
        name: for people.
        expected_restored: tokens that must be restored; fewer would be right too, but would prove less.
        reference: the run without any cache.
        cached: the run with it.
        wrong: runs that must not sound like the reference, because rows are missing; empty where nothing is restored.
        unexpected: what else went wrong in this turn.
    """

    name: str
    expected_restored: int
    reference: Run
    cached: Run
    wrong: dict[Mode, Run]
    unexpected: tuple[str, ...] = ()

    @property
    def same_rows(self) -> bool:
        """Every row of every layer that the talker was given is equal to the last bit."""
        return self.cached.speech.row_digests == self.reference.speech.row_digests

    @property
    def same_output(self) -> bool:
        """The thinker's text, the talker's codes and the waveform are equal."""
        return (
            self.cached.thought.reply == self.reference.thought.reply
            and np.array_equal(self.cached.speech.codes, self.reference.speech.codes)
            and np.array_equal(self.cached.speech.waveform, self.reference.speech.waveform)
        )

    def share_of_wrong_codes(self, mode: Mode) -> float:
        """How much of what the talker says is wrong in a run that lacks rows, 0 to 1."""
        return float((self.wrong[mode].speech.codes != self.reference.speech.codes).mean())

    def problems(self) -> list[str]:
        """Everything about this turn that is not as it should be."""
        found = [f"turn {self.name}: {what}" for what in self.unexpected]
        restored = self.cached.thought.restored_tokens
        if restored != self.expected_restored:
            found.append(f"turn {self.name}: {restored:,} tokens restored, expected {self.expected_restored:,}")
        if not self.same_rows:
            found.append(f"turn {self.name}: the talker's rows differ from those without a cache")
        if not self.same_output:
            found.append(f"turn {self.name}: the output differs from the one without a cache")
        found += [
            f"turn {self.name}: the output with {mode.value} is right, so this turn shows nothing"
            for mode in self.wrong
            if not self.share_of_wrong_codes(mode)
        ]
        return found


def make_table(turns: Sequence[Turn]) -> Table:
    """One line per turn; the last two columns say how many of the talker's codes are wrong when rows are missing."""
    table = Table(title="with the cache, compared to without", title_justify="left", box=SIMPLE, padding=0)
    table.add_column("turn", no_wrap=True)
    for header in ("prompt\ntokens", "restored\ntokens", "thinker\nwithout", "thinker\nwith"):
        table.add_column(header, justify="right")
    table.add_column("talker's\nrows")
    table.add_column("output")
    for header in ("KV only\nwrong", "layer 0\nwrong"):
        table.add_column(header, justify="right")
    for turn in turns:
        table.add_row(
            turn.name,
            f"{turn.reference.thought.prompt_tokens:,}",
            f"{turn.cached.thought.restored_tokens:,}",
            f"{turn.reference.thought.seconds:.2f} s",
            f"{turn.cached.thought.seconds:.2f} s",
            _verdict(turn.same_rows, "bit-equal"),
            _verdict(turn.same_output, "equal"),
            *(
                f"{turn.share_of_wrong_codes(mode):.0%}" if mode in turn.wrong else ""
                for mode in (Mode.KV_ONLY, Mode.NO_ACCEPT_ROWS)
            ),
        )
    return table


def summarise(turns: Sequence[Turn], problems: Sequence[str]) -> Text:
    """The last line."""
    restored = sum(turn.cached.thought.restored_tokens for turn in turns)
    tokens = sum(turn.cached.thought.prompt_tokens for turn in turns)
    shown = [turn for turn in turns if turn.wrong]
    wrong = sum(turn.share_of_wrong_codes(Mode.KV_ONLY) > 0 for turn in shown)
    facts = [
        f"{len(turns)} turns",
        f"{restored:,} of {tokens:,} prompt tokens restored",
        "rows bit-equal" if all(turn.same_rows for turn in turns) else "rows DIFFER",
        "codes equal" if all(turn.same_output for turn in turns) else "output DIFFERS",
        f"KV-only output wrong in {wrong}/{len(shown)} turns",
    ]
    verdict = Text("FAIL", style="bold red") if problems else Text("PASS", style="bold green")
    return verdict.append("  " + " · ".join(facts), style="default not bold")


def _verdict(equal: bool, word: str) -> Text:
    return Text(word, style="green") if equal else Text("DIFFERS", style="bold red")
