"""The thinker-talker example: the whole of it on Ray, its stages against the stock model, and that it can fail."""

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

pytest.importorskip("transformers")

EXAMPLES = Path(__file__).parents[2] / "examples"


class Example(NamedTuple):
    """The example's modules, imported as the script imports them."""

    audio: ModuleType
    conversation: ModuleType
    messages: ModuleType
    report: ModuleType
    talker: ModuleType
    thinker: ModuleType
    tiny_model: ModuleType


@pytest.fixture(scope="module")
def example() -> Iterator[Example]:
    sys.path.insert(0, str(EXAMPLES))
    from qwen3_omni import audio, conversation, messages, report, talker, thinker, tiny_model

    yield Example(audio, conversation, messages, report, talker, thinker, tiny_model)
    sys.path.remove(str(EXAMPLES))


def make_turn(example: Example, cached_code: int = 7, kv_only_code: int = 8) -> Any:
    import numpy as np

    def make_run(code: int) -> Any:
        thought = example.messages.Thought((1, 2), 300, 256, False, 0.1)
        codes = np.full((3, 4), code, dtype=np.int64)
        return example.report.Run(thought, example.messages.Speech(codes, np.zeros(5, np.float32), {0: "digest"}, 0.1))

    wrong = {example.messages.Mode.KV_ONLY: make_run(kv_only_code)}
    return example.report.Turn("2", 256, make_run(7), make_run(cached_code), wrong)


@pytest.mark.cluster
def test_demo_passes_and_leaves_no_process_behind() -> None:
    command = [sys.executable, str(EXAMPLES / "qwen3_omni_thinker_talker.py"), "--turns", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = re.search(r"PASS +3 turns · ([\d,]+) of ([\d,]+) prompt tokens restored .* in 1/1 turns", done.stdout)
    assert summary is not None, done.stdout
    # two chunks of the first turn in the second, and one of them when the second is repeated after the eviction
    assert summary[1] == "768"


def test_problems_when_all_is_well_is_empty(example: Example) -> None:
    assert make_turn(example).problems() == []


@pytest.mark.parametrize(
    ("codes", "problem"),
    [
        ({"cached_code": 9}, "turn 2: the output differs from the one without a cache"),
        ({"kv_only_code": 7}, "turn 2: the output with KV only is right, so this turn shows nothing"),
    ],
)
def test_problems_when_codes_are_not_as_they_should_be_names_them(
    example: Example, codes: dict[str, int], problem: str
) -> None:
    assert make_turn(example, **codes).problems() == [problem]


def test_problems_when_rows_differ_or_too_little_is_restored_names_both(example: Example) -> None:
    turn = make_turn(example)
    speech = replace(turn.cached.speech, row_digests={0: "other"})
    thought = replace(turn.cached.thought, restored_tokens=0)
    broken = replace(turn, cached=replace(turn.cached, speech=speech, thought=thought))
    assert broken.problems() == [
        "turn 2: 0 tokens restored, expected 256",
        "turn 2: the talker's rows differ from those without a cache",
    ]
