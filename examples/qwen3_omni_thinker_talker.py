"""A spoken conversation with Qwen3-Omni's two stages on Ray, where known prefixes are restored, not recomputed.

    python examples/qwen3_omni_thinker_talker.py

The thinker turns a prompt into text, the talker turns the thinker's *hidden states* into speech. From one turn to the
next the prompt only grows, so the thinker restores the KV of what it has seen and prefills the rest. But a prefill that
is skipped computes no hidden states, and the talker needs those of all that the user ever said, audio included.

Each turn runs without any cache, with KV alone, and with KV and the hidden-state cache. The last must give what the
first gives, to the bit: rows, text, codes, waveform. KV alone must not; that is why hs_cache exists. Exits with 1
otherwise.

The model is small and its weights are random (``qwen3_omni/tiny_model.py``). The conversation starts with an audio
clip, because only for audio, image and video tokens does the talker read what cannot be had from the token ids.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import ray
import torch
from qwen3_omni.audio import encode_clip, synthesise_speech
from qwen3_omni.conversation import Conversation, Prompt, read_passages
from qwen3_omni.messages import Mode
from qwen3_omni.report import Run, Turn, make_table, summarise
from qwen3_omni.talker import Talker
from qwen3_omni.thinker import Thinker
from qwen3_omni.tiny_model import STORED_LAYERS
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import hs_cache

BOOK: Final = Path(__file__).parent / "data" / "alice_in_wonderland.txt"
SYSTEM_PROMPT: Final = (
    "You narrate an audio book. First you hear the voice that you are to read with; "
    "then you are sent the book, paragraph by paragraph."
)
CLIP_S: Final = 10.0
REPLY_TOKENS: Final = 12
SPOKEN_CODES: Final = 24
THREADS_PER_STAGE: Final = 1
"""Two stages on two cores. Another number gives other last bits, so it must be the same whenever rows are compared."""

EVICTED_CHUNK: Final = 1
"""The clip lies across the beginning of this chunk."""


class Stages:
    """The two actors, and how a turn flows through them."""

    def __init__(self, cache: hs_cache.HiddenStateCache, dtype: torch.dtype) -> None:
        settings = {"cache": cache, "dtype": dtype, "num_threads": THREADS_PER_STAGE}
        self._thinker: Any = ray.remote(num_cpus=1)(Thinker).remote(**settings)
        self._talker: Any = ray.remote(num_cpus=1)(Talker).remote(**settings)

    def wait_until_ready(self) -> None:
        """Block until both have built their model."""
        ray.get([self._thinker.__ray_ready__.remote(), self._talker.__ray_ready__.remote()])

    def run(self, prompt: Prompt, modes: Sequence[Mode], advance: Callable[[str], None]) -> dict[Mode, Run]:
        """Send a prompt through both stages, once per mode and one after the other, so that none slows another down.

        The driver passes references on: rows go from the thinker to the talker, and cached rows not even that way.

        Args:
            prompt: the conversation so far.
            modes: NO_ACCEPT_ROWS needs CACHED before it, whose thoughts it shares.
            advance: called with a mode that is done.
        """
        runs = {}
        reference = ray.put(prompt)
        thought: Any = None
        rows: Any = None
        for mode in modes:
            if mode is not Mode.NO_ACCEPT_ROWS:
                thought, rows = self._thinker.think.options(num_returns=2).remote(reference, mode, REPLY_TOKENS)
            speech = self._talker.speak.remote(reference, thought, rows, mode, SPOKEN_CODES)
            runs[mode] = Run(*ray.get([thought, speech]))
            advance(mode.value)
        return runs

    def evict_kv(self, prompt: Prompt, chunk: int) -> None:
        """Make the thinker drop the KV of one chunk, and report it."""
        ray.get(self._thinker.evict_kv.remote(prompt, chunk))


def converse(
    stages: Stages, cache: hs_cache.HiddenStateCache, passages: Sequence[str], advance: Callable[[str], None]
) -> list[Turn]:
    """One turn per passage, then the last one again after an eviction."""
    conversation = Conversation()
    conversation.add_system(SYSTEM_PROMPT)
    clip = encode_clip(synthesise_speech(seconds=CLIP_S))
    prompts: list[Prompt] = []
    turns: list[Turn] = []
    for number, passage in enumerate(passages, start=1):
        conversation.add_user(passage, clip if number == 1 else None)
        expected = len(prompts[-1]) // cache.chunk_size * cache.chunk_size if prompts else 0
        prompts.append(conversation.prompt())
        turns.append(run_turn(stages, prompts[-1], str(number), expected, advance))
        conversation.add_assistant(turns[-1].cached.thought.reply)
    turns.append(run_after_eviction(stages, cache, prompts[-1], turns[-1], advance))
    return turns


def run_turn(stages: Stages, prompt: Prompt, name: str, expected: int, advance: Callable[[str], None]) -> Turn:
    """Run one prompt in every mode; while nothing is restored, those that lack rows lack none and are left out."""
    lacking = (Mode.KV_ONLY, Mode.NO_ACCEPT_ROWS) if expected else ()
    modes = [mode for mode in Mode if mode in lacking or mode in (Mode.NO_CACHE, Mode.CACHED)]
    runs = stages.run(prompt, modes, lambda mode: advance(f"turn {name}: {mode}"))
    return Turn(name, expected, runs[Mode.NO_CACHE], runs[Mode.CACHED], {mode: runs[mode] for mode in lacking})


def run_after_eviction(
    stages: Stages, cache: hs_cache.HiddenStateCache, prompt: Prompt, last: Turn, advance: Callable[[str], None]
) -> Turn:
    """Repeat the last turn after the engine gave up the KV of one chunk: a shorter prefix, the same output.

    The prefix now ends inside the audio clip, so the thinker encodes it again and needs only its end.
    """
    stages.evict_kv(prompt, EVICTED_CHUNK)
    expected = EVICTED_CHUNK * cache.chunk_size
    left = cache.retrieve(prompt.token_ids, STORED_LAYERS, mm_spans=prompt.mm_spans).num_tokens
    name = f"{last.name} again"
    runs = stages.run(prompt, [Mode.CACHED], lambda mode: advance(f"turn {name}: {mode}"))
    found = () if left == expected else (f"after the eviction the cache gave {left:,} tokens, expected {expected:,}",)
    return Turn(name, expected, last.reference, runs[Mode.CACHED], {}, found)


def run(cache: hs_cache.HiddenStateCache, dtype: torch.dtype, passages: Sequence[str], console: Console) -> int:
    """Run the conversation and report it; returns the exit status."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        # all modes in every turn, but two in the first, and one more run after the eviction
        task = progress.add_task("building the model, once per stage", total=len(Mode) * len(passages) - 1)
        stages = Stages(cache, dtype)
        stages.wait_until_ready()
        turns = converse(stages, cache, passages, lambda what: progress.update(task, advance=1, description=what))
    problems = [problem for turn in turns for problem in turn.problems()]
    console.print(make_table(turns))
    console.print(
        "wrong: share of the talker's codes, if it gets no rows of the restored tokens, or only their embeddings\n"
        f"{turns[-1].name}: after the KV of chunk {EVICTED_CHUNK}, which begins inside the clip, was evicted\n",
        style="dim",
    )
    for problem in problems:
        console.print(problem, style="red")
    console.print(summarise(turns, problems), soft_wrap=True)
    return 1 if problems else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, start or join Ray, run, and end the Ray that was started."""
    passages = read_passages(BOOK)
    parser = argparse.ArgumentParser(description="Qwen3-Omni's thinker and talker with restored prefixes.")
    parser.add_argument(
        "--turns", type=int, default=len(passages), choices=range(2, len(passages) + 1), help="default: %(default)s"
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="default: %(default)s")
    parser.add_argument(
        "--address",
        default="local",
        help="a Ray cluster to join, where the cache service then stays; default: start and end one",
    )
    options = parser.parse_args(arguments)
    console = Console()
    started = time.perf_counter()
    resources: dict[str, Any] = {"num_cpus": 2, "object_store_memory": 256 << 20, "include_dashboard": False}
    ray.init(options.address, logging_level=logging.ERROR, **(resources if options.address == "local" else {}))
    try:
        cache = hs_cache.connect(
            {"chunk_size": 256, "max_hidden_state_cpu_size": 0.25},
            model="qwen3-omni-tiny",
            model_revision=f"seed 0, {options.dtype}",
            strict=True,
        )
        if cache is None:
            parser.error("the configuration in the environment says enable_hidden_state_cache: false")
        with cache:
            status = run(cache, getattr(torch, options.dtype), passages[: options.turns], console)
    finally:
        ray.shutdown()
    console.print(f"{time.perf_counter() - started:.0f} s in all", style="dim")
    return status


if __name__ == "__main__":
    sys.exit(main())
