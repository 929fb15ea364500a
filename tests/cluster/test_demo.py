"""The thinker-talker example: the whole of it on Ray, its stages against the stock model, and that it can fail."""

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import hs_cache
from tests.cluster.conftest import StartService

pytestmark = pytest.mark.long

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
    def make_run(code: int) -> Any:
        thought = example.messages.Thought((1, 2), 300, 256, 0.1)
        codes = np.full((3, 4), code, dtype=np.int64)
        return example.report.Run(thought, example.messages.Speech(codes, np.zeros(5, np.float32), {0: "digest"}))

    wrong = {example.messages.Mode.KV_ONLY: make_run(kv_only_code)}
    return example.report.Turn("2", 256, make_run(7), make_run(cached_code), wrong)


def test_demo_passes() -> None:
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


@pytest.fixture
def stages(example: Example, start_service: StartService) -> Iterator[tuple[Any, Any]]:
    """Both stages in this process, over a service of their own."""
    threads = torch.get_num_threads()
    cache = hs_cache.connect(service=start_service(chunk_size=256))
    assert cache is not None
    with cache:
        settings = {"cache": cache, "dtype": torch.float32, "num_threads": 1}
        yield example.thinker.Thinker(**settings), example.talker.Talker(**settings)
    torch.set_num_threads(threads)
    torch.set_grad_enabled(True)


def make_prompt(example: Example) -> Any:
    clip = example.audio.encode_clip(example.audio.synthesise_speech(seconds=4))
    conversation = example.conversation.Conversation()
    conversation.add_system("Say what you hear.")
    conversation.add_user("What is that?", clip)
    return conversation.prompt(), clip


def test_stages_without_a_cache_say_what_the_stock_model_says(example: Example, stages: tuple[Any, Any]) -> None:
    prompt, clip = make_prompt(example)
    thinker, talker = stages
    thought, rows = thinker.think(prompt, example.messages.Mode.NO_CACHE, 8)
    speech = talker.speak(prompt, thought, rows, example.messages.Mode.NO_CACHE, 8)

    ids = example.tiny_model
    mel = torch.from_numpy(clip.mel)[None]
    sequences, waveform = ids.build_model(dtype=torch.float32).generate(
        input_ids=torch.tensor([prompt.token_ids]),
        input_features=mel,
        feature_attention_mask=torch.ones(1, mel.shape[2], dtype=torch.long),
        speaker=ids.SPEAKER,
        thinker_do_sample=False,
        thinker_min_new_tokens=8,
        thinker_max_new_tokens=8,
        thinker_suppress_tokens=list(range(ids.NUM_BYTE_TOKENS, 320)),
        thinker_eos_token_id=ids.IM_END,
        thinker_pad_token_id=ids.TTS_PAD,
        talker_do_sample=False,
        talker_temperature=None,
        talker_top_k=None,
        talker_top_p=None,
        talker_repetition_penalty=1.0,
        talker_pad_token_id=ids.CODEC_PAD,
        talker_min_new_tokens=8,
        talker_max_new_tokens=8,
    )
    assert tuple(sequences[0, len(prompt) :].tolist()) == thought.reply
    assert np.array_equal(waveform.flatten().numpy(), speech.waveform)
