"""Batch inference as a Ray job: a JSONL file of prompts in, Parquet parts with replies and embeddings out.

    ray job submit --address http://HEAD:8265 --working-dir examples/batch_inference -- \\
        python main.py --prompts prompts.jsonl --output /data/answers

Prompts that begin alike go to one worker, one after the other, so that most of each prompt is restored instead of
computed: its KV by the worker, its hidden states, of which the embedding is made, from hs_cache. To go on after
whatever has ended the job, submit it again. ``docs/batch.md`` says more.

Exit codes: 0 all prompts are answered; 2 an argument, the prompts or the output directory can't be used, and nothing
was changed; 3 the job could not go on, and what was finished is kept; 4 some prompts have an error in the place of an
answer.
"""

from __future__ import annotations

import argparse
import io
import math
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from batch.crew import Crew, CrewError, Limits, Worker
from batch.model import Answer, Model, load_model
from batch.output import Output, OutputError, Row, RunIdentity
from batch.progress import Counts, Progress
from batch.prompts import Prompt, PromptsError, read_prompts
from batch.schedule import Schedule, group_prompts
from rich.console import Console

import hs_cache

ALL_ANSWERED, UNUSABLE, STOPPED, SOME_FAILED = 0, 2, 3, 4  # Python itself ends with 1 after a traceback
GROUPS_PER_WORKER = 8
"""At least; fewer would leave workers idle at the end, and many more would part what begins alike."""


@dataclass(frozen=True)
class Settings:
    """The command line; `parse` says what is what."""

    prompts: Path
    output: Path
    model: str
    service: str
    cache_config: str | None
    num_workers: int | None
    worker_cpus: float
    worker_gpus: float
    limit: int | None
    reply_tokens: int
    part_rows: int
    attempts: int
    prompt_timeout_s: float
    start_timeout_s: float
    no_cache: bool
    skip_bad_lines: bool
    retry_errors: bool


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, check prompts and output, and run what isn't finished yet. Returns the exit code."""
    settings = parse(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr is: no name or reason may end the job
    console = Console(soft_wrap=True, highlight=False, markup=False)
    try:
        model = load_model(settings.model)
        hs_cache.CacheConfig.load(settings.cache_config)  # what is wrong with it is said before anything is changed
        file = read_prompts(settings.prompts, skip_bad_lines=settings.skip_bad_lines)
        wanted = file.prompts[: settings.limit]
        identity = RunIdentity(model.model, model.revision, settings.reply_tokens, file.digest)
        output = Output(
            settings.output,
            identity,
            part_rows=settings.part_rows,
            ids=[prompt.id for prompt in file.prompts],
            retry_errors=settings.retry_errors,
        )
    except (PromptsError, OutputError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return UNUSABLE
    for line in (*file.bad_lines, *output.notes):
        console.print(f"note: {line}")
    with output:
        try:
            return run(settings, model, wanted, output, console)
        except hs_cache.InvalidInputError as error:
            print(f"error: {error}", file=sys.stderr)
            return UNUSABLE
        except (hs_cache.HiddenStateCacheError, CrewError, OSError) as error:
            print(f"error: {error}\nWhat was finished is kept; submit the job again to go on.", file=sys.stderr)
            return STOPPED


def run(settings: Settings, model: type[Model], wanted: Sequence[Prompt], output: Output, console: Console) -> int:
    """Answer those of the prompts that aren't finished, and report."""
    left = [prompt for prompt in wanted if prompt.id not in output.done]
    before = len(wanted) - len(left)
    counts = Counts()
    console.print(f"{len(wanted)} prompts, of which {before} were finished before")
    progress = Progress(counts, total=len(wanted), before=before, console=console)
    if left:
        with progress:
            answer_all(settings, model, left, output, counts, progress)
    output.flush()
    report(counts, progress.seconds, output, console)
    return SOME_FAILED if output.num_errors else ALL_ANSWERED


def answer_all(
    settings: Settings,
    model: type[Model],
    prompts: Sequence[Prompt],
    output: Output,
    counts: Counts,
    progress: Progress,
) -> None:
    """Run workers until something has become of every prompt."""
    clients = [connect(settings, model)]  # joins the cluster, or starts Ray on this machine
    num_workers = min(settings.num_workers or num_nodes(settings), len(prompts))
    clients += [connect(settings, model) for _ in range(num_workers - 1)]
    source = clients[0] or hs_cache.CacheConfig.load(settings.cache_config)  # no client where it says that it is off
    chunk_size = source.chunk_size
    most = math.ceil(len(prompts) / (num_workers * GROUPS_PER_WORKER))
    groups = group_prompts(prompts, shared_characters=chunk_size, most=most)
    progress.say(f"{len(prompts)} to answer, in {len(groups)} groups that begin alike, by {num_workers} workers")

    def start(number: int) -> Any:
        cache = None if settings.no_cache else clients[number]
        return (
            ray.remote(Worker)
            .options(
                num_cpus=settings.worker_cpus,
                num_gpus=settings.worker_gpus,
                scheduling_strategy="SPREAD",
                max_restarts=0,
            )
            .remote(settings.model, cache, chunk_size, settings.reply_tokens)
        )

    def answered(prompt: Prompt, answer: Answer) -> None:
        output.add(
            Row(
                prompt.id,
                answer.reply,
                answer.reply_token_ids,
                answer.prompt_tokens,
                answer.skipped_tokens,
                answer.embedding,
            )
        )
        counts.answered += 1
        counts.hits += answer.skipped_tokens > 0
        counts.prompt_tokens += answer.prompt_tokens
        counts.skipped_tokens += answer.skipped_tokens

    def gave_up(prompt: Prompt, reason: str) -> None:
        progress.say(f"prompt {prompt.id!r} is given up: {reason}")
        output.add(Row(prompt.id, error=reason))
        counts.failed += 1

    schedule = Schedule(groups, num_workers, settings.attempts)
    limits = Limits(prompt_s=settings.prompt_timeout_s, start_s=settings.start_timeout_s)
    with Crew(start, num_workers, schedule, limits, answered=answered, gave_up=gave_up, say=progress.say) as crew:
        crew.run(progress.update)


def connect(settings: Settings, model: type[Model]) -> hs_cache.HiddenStateCache | None:
    """A client for one worker, and for whoever takes its place: an engine of its own, since its KV is its own."""
    return hs_cache.connect(
        settings.cache_config,
        service=settings.service,
        model=model.model,
        model_revision=model.revision,
        engine=f"batch-{uuid.uuid4().hex[:12]}",
    )


def num_nodes(settings: Settings) -> int:
    """Nodes that have room for a worker; at least one."""
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    totals = [node["Resources"] for node in nodes if node["Alive"]]
    needed = {"CPU": settings.worker_cpus, "GPU": settings.worker_gpus}
    return max(1, sum(all(total.get(kind, 0) >= count for kind, count in needed.items()) for total in totals))


def report(counts: Counts, seconds: float, output: Output, console: Console) -> None:
    """Say what this run has done, and where everything is."""
    if counts.answered:
        console.print(
            f"{counts.answered} prompts answered in {seconds:.1f} s: {counts.answered / seconds:.1f} prompts/s, "
            f"{counts.prompt_tokens / seconds:,.0f} rows/s\n"
            f"hit rate {counts.hit_rate:.0%}: {counts.skipped_tokens:,} of {counts.prompt_tokens:,} prompt tokens "
            f"skipped ({counts.skipped_share:.0%})"
        )
    failed = f", {output.num_errors} of them with an error (--retry-errors tries these again)" * bool(output.num_errors)
    parts = output.parts()
    kind = "part" if len(parts) == 1 else "parts"
    console.print(f"{parts[0].parent}: {len(parts)} {kind} with {len(output.done)} rows{failed}")


def parse(arguments: Sequence[str] | None) -> Settings:
    """The command line; what is wrong with it ends the process with exit code 2."""
    parser = argparse.ArgumentParser(
        description="Answers and embeds a file of prompts on a Ray cluster, and goes on where it was ended."
    )
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL: id, and prompt or messages, in each line")
    parser.add_argument(
        "--output",
        type=absolute,
        required=True,
        help="a directory for this run's parts, on the node where the job runs or shared by all; submit the same "
        "command again to go on",
    )
    parser.add_argument(
        "--model", default="batch.tiny_thinker:TinyThinker", metavar="MODULE:CLASS", help="default: %(default)s"
    )
    parser.add_argument("--service", default="default", help="of hs_cache; default: %(default)s")
    parser.add_argument("--cache-config", metavar="YAML", help="settings, should the service have to be started")
    parser.add_argument("--num-workers", type=positive, help="default: one per node with room for it")
    parser.add_argument("--worker-cpus", type=amount, default=1.0, help="of each worker; default: %(default)g")
    parser.add_argument("--worker-gpus", type=amount, default=0.0, help="of each worker; default: %(default)g")
    parser.add_argument("--limit", type=positive, help="only so many prompts, from the first on; the rest can follow")
    parser.add_argument("--reply-tokens", type=positive, default=16, help="to generate; default: %(default)s")
    parser.add_argument("--part-rows", type=positive, default=64, help="rows of a part; default: %(default)s")
    parser.add_argument(
        "--attempts", type=positive, default=3, help="at a prompt, until it gets an error row; default: %(default)s"
    )
    parser.add_argument(
        "--prompt-timeout-s", type=seconds, default=600.0, help="then its worker is killed; default: %(default)g"
    )
    parser.add_argument(
        "--start-timeout-s", type=seconds, default=600.0, help="for the first worker; default: %(default)g"
    )
    parser.add_argument("--no-cache", action="store_true", help="restore nothing; the results must be the same")
    parser.add_argument("--skip-bad-lines", action="store_true", help="go on without lines that can't be used")
    parser.add_argument("--retry-errors", action="store_true", help="try again what has an error row")
    return Settings(**vars(parser.parse_args(arguments)))


def absolute(text: str) -> Path:
    """An absolute path: a job's working directory is thrown away, and its output would go with it."""
    path = Path(text)
    if not path.is_absolute():
        raise argparse.ArgumentTypeError(
            f"got {text!r}, expected an absolute path: a job's working directory is thrown away with the job"
        )
    return path


def positive(text: str) -> int:
    """An integer of 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected an integer of 1 or more")
    return int(text)


def amount(text: str) -> float:
    """A number of 0 or more."""
    return _number(text, least=0.0, expected="a number of 0 or more")


def seconds(text: str) -> float:
    """A number of at least 1."""
    return _number(text, least=1.0, expected="at least 1 second")


def _number(text: str, *, least: float, expected: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not least <= value < math.inf:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected {expected}")
    return value


if __name__ == "__main__":
    sys.exit(main())
