"""The same load over HTTP, with Serve's router and with ours: hits, latencies, and how the work is spread.

    python examples/serve_pipeline/load.py                                 # starts three raylets and both applications
    python examples/serve_pipeline/load.py --url mine=http://host:8000     # measures what runs already

Clients hold conversations, one turn after the other: a clip and a text, then more texts, each with everything that was
said before. All begin with the same system prompt. Every round has conversations of its own, the same for each
application, and the applications take turns at being first.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import logging
import math
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

import aiohttp
import numpy as np

EXAMPLES: Final = Path(__file__).resolve().parents[1]
if str(EXAMPLES) not in sys.path:
    sys.path.insert(0, str(EXAMPLES))

from qwen3_omni.audio import synthesise_speech, to_wav  # noqa: E402
from qwen3_omni.conversation import read_passages  # noqa: E402
from rich.box import SIMPLE  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

BOOK: Final = EXAMPLES / "data" / "alice_in_wonderland.txt"
SYSTEM_PROMPT: Final = (
    "You talk with people. Answer in the language that you are spoken to in, and be brief. Begin with what was asked, "
    "not with what you are. When a voice is heard, say what it says before you say what you make of it; when it can't "
    "be understood, say so. Don't invent names, numbers or places. Don't repeat the question."
)
NODES: Final = 3
_TURN_TIMEOUT_S: Final = 120.0


@dataclass(frozen=True)
class Reply:
    """One turn as the client saw it.

    Attributes:
        text: the assistant's content, for the next turn.
        done: the last line.
        first_s, whole_s: until the first token, and until the last line.
    """

    text: str
    done: dict[str, Any]
    first_s: float
    whole_s: float


@dataclass
class Measured:
    """What one application did under load."""

    replies: list[Reply] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def share(self, part: str) -> float:
        """Tokens of that kind among all prompt tokens."""
        asked = sum(reply.done["prompt_tokens"] for reply in self.replies)
        return sum(reply.done[part] for reply in self.replies) / asked if asked else 0.0

    def percentile(self, which: str, percent: float) -> float:
        """Of ``first_s`` or ``whole_s``; NaN where there is none."""
        times = [getattr(reply, which) for reply in self.replies]
        return float(np.percentile(times, percent)) if times else math.nan

    def spread(self) -> list[int]:
        """Turns per thinker replica, the most first."""
        return [count for _, count in Counter(reply.done["thinker"]["replica"] for reply in self.replies).most_common()]

    def add(self, other: Measured) -> None:
        """Take in another round."""
        self.replies += other.replies
        self.problems += other.problems
        self.seconds += other.seconds


@dataclass(frozen=True)
class Load:
    """What every application gets.

    Attributes:
        conversations: per round.
        turns: per conversation.
        concurrency: clients that talk at once.
        max_tokens, max_codes: of each reply.
        clip_s: seconds of the clip that a conversation begins with; 0 for none.
    """

    conversations: int = 12
    turns: int = 4
    concurrency: int = 4
    max_tokens: int = 8
    max_codes: int = 4
    clip_s: float = 4.0


async def ask(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Reply:
    """Send one turn, and read its lines as they come.

    Raises:
        RuntimeError: it was not answered.
    """
    begin = time.perf_counter()
    first_s, text = 0.0, ""
    async with session.post(f"{url}/chat", json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"HTTP {response.status}: {await response.text()}")
        async for line in response.content:
            event = json.loads(line)
            if "text" in event:
                first_s = first_s or time.perf_counter() - begin
                text += event["text"]
            elif "done" in event:
                return Reply(text, event["done"], first_s, time.perf_counter() - begin)
            elif "error" in event:
                raise RuntimeError(event["error"])
    raise RuntimeError("the stream ended early")


def first_message(text: str, clip_s: float, seed: int) -> dict[str, Any]:
    """A user's message with a clip of its own."""
    if not clip_s:
        return {"role": "user", "content": text}
    clip = base64.b64encode(to_wav(synthesise_speech(seconds=clip_s, seed=seed))).decode()
    return {"role": "user", "content": [{"type": "audio", "wav": clip}, {"type": "text", "text": text}]}


async def converse(session: aiohttp.ClientSession, url: str, load: Load, seed: int, measured: Measured) -> None:
    """One client's conversation."""
    passages = read_passages(BOOK)
    rng = np.random.default_rng(seed)
    messages: list[dict[str, Any]] = []
    for turn in range(load.turns):
        text = f"({seed}) {passages[int(rng.integers(len(passages)))]}"
        messages.append({"role": "user", "content": text} if turn else first_message(text, load.clip_s, seed))
        body = {"messages": messages, "max_tokens": load.max_tokens, "max_codes": load.max_codes}
        try:
            reply = await ask(session, url, body)
        except (RuntimeError, aiohttp.ClientError, asyncio.TimeoutError) as error:
            measured.problems.append(f"{type(error).__name__}: {error}")
            return
        measured.replies.append(reply)
        messages.append({"role": "assistant", "content": reply.text})


async def drive(url: str, load: Load, first_seed: int) -> Measured:
    """One round."""
    measured, seeds = Measured(), iter(range(first_seed, first_seed + load.conversations))
    timeout = aiohttp.ClientTimeout(total=_TURN_TIMEOUT_S)

    async def client(session: aiohttp.ClientSession) -> None:
        for seed in seeds:
            await converse(session, url, load, seed, measured)

    begin = time.perf_counter()
    async with aiohttp.ClientSession(timeout=timeout) as session:
        await asyncio.gather(*(client(session) for _ in range(load.concurrency)))
    measured.seconds = time.perf_counter() - begin
    return measured


def compare(urls: dict[str, str], load: Load, rounds: int, console: Console) -> dict[str, Measured]:
    """All rounds, the order of the applications reversed from one to the next."""
    totals = {name: Measured() for name in urls}
    for number in range(rounds):
        for name in list(urls)[:: -1 if number % 2 else 1]:
            measured = asyncio.run(drive(urls[name], load, first_seed=1000 * (number + 1)))
            totals[name].add(measured)
            console.print(
                f"round {number + 1}, {name}: {measured.share('restored_tokens'):.1%} of prompt tokens restored, "
                f"first token p50 {measured.percentile('first_s', 50):.2f} s, {measured.seconds:.1f} s in all",
                style="dim",
            )
    return totals


def make_table(totals: dict[str, Measured], title: str) -> Table:
    """One line per application."""
    table = Table(title=title, title_justify="left", box=SIMPLE, padding=0)
    table.add_column("router", no_wrap=True)
    headers = ("turns", "failed", "restored", "moved", "first token\np50", "p95", "whole turn\np50", "p95", "turns/s")
    for header in (*headers, "turns per replica"):
        table.add_column(header, justify="right")
    for name, measured in totals.items():
        latencies = [
            f"{measured.percentile(which, percent):.2f} s" for which in ("first_s", "whole_s") for percent in (50, 95)
        ]
        table.add_row(
            name,
            str(len(measured.replies)),
            str(len(measured.problems)),
            f"{measured.share('restored_tokens'):.1%}",
            f"{measured.share('moved_tokens'):.1%}",
            *latencies,
            f"{len(measured.replies) / measured.seconds:.2f}",
            " ".join(map(str, measured.spread())),
        )
    return table


@contextmanager
def applications(names: dict[str, dict[str, Any]], port: int) -> Iterator[dict[str, str]]:
    """Three raylets on this machine, and one application and one cache service per name; gives their URLs.

    Args:
        names: of applications, and what is special in their settings.
        port: for HTTP.
    """
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with ExitStack() as at_the_end:
        directory = tempfile.mkdtemp(prefix="hs", dir="/tmp")  # short: Ray's sockets are in there
        at_the_end.callback(shutil.rmtree, directory, ignore_errors=True)
        paths = [str(EXAMPLES), *filter(None, [os.environ.get("PYTHONPATH")])]
        os.environ.update(
            RAY_AUTH_MODE="disabled",
            RAY_USAGE_STATS_ENABLED="0",
            RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0",
            RAY_TMPDIR=directory,
            PYTHONPATH=os.pathsep.join(paths),
            TOKENIZERS_PARALLELISM="false",
        )
        import ray
        from ray import serve
        from ray.cluster_utils import Cluster

        import hs_cache
        from serve_pipeline.app import pipeline
        from serve_pipeline.settings import PipelineSettings

        head = {"num_cpus": 8, "include_dashboard": False, "temp_dir": f"{directory}/ray"}
        cluster = Cluster(initialize_head=True, head_node_args=head)  # what it starts ends with this process
        at_the_end.callback(cluster.shutdown)
        for _ in range(NODES - 1):
            cluster.add_node(num_cpus=8, include_dashboard=False)
        ray.init(address=cluster.address, logging_level=logging.ERROR, log_to_driver=False)
        at_the_end.callback(ray.shutdown)
        serve.start("HeadOnly", {"host": "127.0.0.1", "port": port})
        for name, special in names.items():
            settings = PipelineSettings(service=name, system_prompt=SYSTEM_PROMPT, **special)
            hs_cache.start(settings.cache, service=name)
            application = pipeline(settings, thinkers=NODES, ingresses=1, max_replicas_per_node=1)
            serve.run(application, name=name, route_prefix=f"/{name}")
        yield {name: f"http://127.0.0.1:{port}/{name}" for name in names}


def _named(text: str) -> tuple[str, str]:
    name, separator, url = text.partition("=")
    if not (name and separator and url.startswith(("http://", "https://"))):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected NAME=http://HOST:PORT")
    return name, url.rstrip("/")


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, measure, and print a table; exits with 1 if a turn failed."""
    default = Load()
    parser = argparse.ArgumentParser(description="The same load with Serve's router and with ours.")
    parser.add_argument("--url", action="append", type=_named, metavar="NAME=URL", help="measure what runs already")
    parser.add_argument("--port", type=int, default=8000, help="of what is started; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--fetch-kv", action="store_true", help="let thinkers take KV from other nodes")
    for name in ("conversations", "turns", "concurrency", "max_tokens", "max_codes"):
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=int, default=getattr(default, name), help="default: %(default)s")
    parser.add_argument("--clip-s", type=float, default=default.clip_s, help="default: %(default)s")
    options = parser.parse_args(arguments)
    load = Load(**{item.name: getattr(options, item.name) for item in fields(Load)})
    console = Console()
    if options.url:
        running: AbstractContextManager[dict[str, str]] = nullcontext(dict(options.url))
    else:
        console.print("starting three raylets and both applications; on two cores that takes minutes", style="dim")
        special = {"fetch_kv": options.fetch_kv}
        both = {"serve": {**special, "affine": False}, "hs_cache": {**special, "affine": True}}
        running = applications(both, options.port)
    with running as urls:
        totals = compare(urls, load, options.rounds, console)
    title = (
        f"{options.rounds} rounds of {load.conversations} conversations of {load.turns} turns, "
        f"{load.concurrency} at once"
    )
    console.print(make_table(totals, title))
    problems = [problem for measured in totals.values() for problem in measured.problems]
    for problem in sorted(set(problems)):
        console.print(problem, style="red")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
