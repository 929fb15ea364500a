"""How an engine drives hs_cache: continuous batching, chunked prefill, preemption and abort, with Qwen3-Omni's thinker.

    python examples/vllm_style_runner.py

Several clients talk at once. The scheduler fills every step with tokens of whoever is there, so prefill chunks end
anywhere, and takes KV away when it gets scarce. The engine restores KV of known prefixes from its own blocks, but only
as far as the hidden states are known too, and gives the rows of every step to the cache. `Runner` is the part to copy;
docs/engine_integration.md goes through it.

At the end every request is run again, alone and without any cache: the rows and the talker's inputs that are made of
them must be the same, to the bit. Exits with 1 otherwise, and when a lease or a row was left behind.

How a kernel rounds depends on the shape it is given, and no two steps here have the same. So the model computes in
float64, one call per sequence, and hands rows on in bfloat16: what differs is some 1e-15, and all but never shows in
a bfloat16.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import ray
import torch
from qwen3_omni.conversation import Prompt, read_passages
from qwen3_omni.talker import Talker
from qwen3_omni.thinker_model import ThinkerModel
from qwen3_omni.tiny_model import STORED_LAYERS, build_model
from rich.console import Console
from transformers import DynamicCache
from vllm_style.clients import REPLY_TOKENS, Client, make_clients
from vllm_style.kv_blocks import BLOCK_TOKENS, KVBlocks
from vllm_style.scheduler import Request, Scheduler

import hs_cache

BOOK: Final = Path(__file__).parent / "data" / "alice_in_wonderland.txt"
CHUNK_TOKENS: Final = 32
"""Chunks of the hidden-state cache: two KV blocks each. Both are small because the prompts are."""

STEP_TOKENS: Final = 64
MAX_RUNNING: Final = 8
RUNNING_KV_TOKENS: Final = 1200
KV_BLOCKS: Final = 160
RELEASE_S: Final = 10.0

Rows = dict[int, torch.Tensor]


@dataclass
class _State:
    """What the runner has of a request that was started, and not finished or aborted yet.

    Attributes:
        writer: takes the rows of every step to the cache.
        audio: the encoded clip.
        kv: of the tokens that are computed.
        rows: of the same tokens, part by part.
    """

    writer: hs_cache.PrefixWriter
    audio: torch.Tensor | None
    kv: DynamicCache
    rows: list[Rows] = field(default_factory=list)


class Runner:
    """Runs what the scheduler says, and keeps the cache informed.

    Args:
        model: the thinker.
        cache: for the rows that the talker reads.
        kv: the engine's own prefix cache.
    """

    def __init__(self, model: ThinkerModel, cache: hs_cache.HiddenStateCache, kv: KVBlocks) -> None:
        self._model = model
        self._cache = cache
        self._kv = kv
        # an engine has block hashes of its own; these stand for them
        self._block_hashes = hs_cache.TokenDatabase(hs_cache.KeySpace(chunk_size=BLOCK_TOKENS))
        self._requests: dict[Request, _State] = {}

    def restore(self, request: Request) -> int:
        """Start a request, or resume one that was preempted. Returns how many tokens need no computing."""
        state = self._requests.get(request) or self._open(request)
        token_ids, spans = request.token_ids, request.prompt.mm_spans
        blocks = self._block_keys(token_ids, spans)
        # The last token is always computed: the next one needs a row to come from.
        kv_tokens = min(self._kv.match(blocks), len(token_ids) - 1)
        # KV of which the rows are gone is worth nothing: those tokens are computed again.
        with self._cache.plan(token_ids, STORED_LAYERS, mm_spans=spans, hold=True) as coverage:
            usable = min(kv_tokens, coverage.num_tokens) // BLOCK_TOKENS * BLOCK_TOKENS
            hit = self._cache.retrieve(token_ids, STORED_LAYERS, stop=usable, mm_spans=spans)
        # What was promised is there, unless the node was lost within this millisecond.
        restored = hit.num_tokens // BLOCK_TOKENS * BLOCK_TOKENS
        if restored:
            self._kv.load(blocks[: restored // BLOCK_TOKENS], into=state.kv)
            state.rows.append({layer: hit[layer][:restored] for layer in STORED_LAYERS})
            state.writer.append(token_ids[:restored], state.rows[0], at=0)
        if request.num_restored is None:
            request.num_restored = min(restored, len(request.prompt))
        return restored

    def compute(self, request: Request, count: int) -> None:
        """Compute the next tokens of a request, and generate one when there is none left to compute."""
        state, begin = self._requests[request], request.num_computed
        new = request.token_ids[begin : begin + count]
        embeddings = self._model.embed(request.token_ids[:begin], new, state.audio)
        output, rows = self._model.forward(embeddings, begin, state.kv)
        request.num_computed += count
        state.rows.append(to_bfloat16(rows))
        state.writer.append(new, state.rows[-1], at=begin)
        self._keep_kv(request, begin)
        if not request.num_left:
            request.token_ids.append(self._model.next_token(output))

    def preempt(self, request: Request) -> None:
        """The scheduler takes all KV of a request away; `restore` will be called again."""
        state = self._requests[request]
        self._kv.touch(self._block_keys(request.token_ids, request.prompt.mm_spans))
        state.writer.preempt(0)
        state.kv = self._model.new_kv()
        state.rows.clear()

    def abort(self, request: Request) -> None:
        """Nobody waits for a request any more. It may never have been started."""
        state = self._requests.pop(request, None)
        if state is not None:
            state.writer.abort()

    def finish(self, request: Request) -> Rows:
        """End a request; returns the rows of all tokens but the last, for the talker."""
        state = self._requests.pop(request)
        state.writer.finish()
        self._kv.touch(self._block_keys(request.token_ids, request.prompt.mm_spans))
        return concatenate(state.rows)

    def _open(self, request: Request) -> _State:
        prompt = request.prompt
        state = _State(
            writer=self._cache.writer(request.request_id, mm_spans=prompt.mm_spans),
            audio=None if prompt.mel is None else self._model.encode_audio(prompt.mel),
            kv=self._model.new_kv(),
        )
        self._requests[request] = state
        return state

    def _keep_kv(self, request: Request, begin: int) -> None:
        """Keep the KV of a step for others. Chunks whose KV made room for it are reported: their rows are of no use."""
        token_ids, spans = request.token_ids[: request.num_computed], request.prompt.mm_spans
        chunks = list(self._cache.chunk_keys(token_ids, mm_spans=spans))
        evicted = self._kv.save(self._block_keys(token_ids, spans), chunks, begin, self._requests[request].kv)
        if evicted:
            self._cache.kv.report_evicted(evicted)

    def _block_keys(self, token_ids: Sequence[int], spans: Sequence[tuple[int, int, str]]) -> list[bytes]:
        return [bytes(key) for key in self._block_hashes.chunk_keys(token_ids, mm_spans=spans)]


@dataclass
class Served:
    """What became of all requests.

    Attributes:
        finished: each with its rows, layer index to ``[tokens, hidden]``.
        aborted: those whose client hung up.
        step_sizes: tokens that each step computed.
    """

    finished: dict[Request, Rows] = field(default_factory=dict)
    aborted: list[Request] = field(default_factory=list)
    step_sizes: list[int] = field(default_factory=list)


def serve(clients: Sequence[Client], scheduler: Scheduler, runner: Runner) -> Served:
    """The engine's loop, until no client wants anything."""
    served = Served()
    by_request: dict[Request, Client] = {}
    now = 0
    while not all(client.is_done for client in clients):
        for client in clients:
            if given_up := client.hang_up():
                scheduler.remove(given_up)
                runner.abort(given_up)
                served.aborted.append(given_up)
            if asked := client.ask(now):
                scheduler.add(asked)
                by_request[asked] = client
        step = scheduler.schedule()
        for request, count in step.items():
            runner.compute(request, count)
            if request.is_done:
                scheduler.remove(request)
                served.finished[request] = runner.finish(request)
                by_request[request].hear(request.reply, now)
        served.step_sizes.append(sum(step.values()))
        now += 1
    return served


def think_alone(model: ThinkerModel, prompt: Prompt) -> tuple[tuple[int, ...], Rows]:
    """Answer a prompt without any cache, prefilled in one pass; returns the reply, and rows as `Runner.finish` does."""
    kv = model.new_kv()
    audio = None if prompt.mel is None else model.encode_audio(prompt.mel)
    output, rows = model.forward(model.embed((), prompt.token_ids, audio), 0, kv)
    reply, parts = [model.next_token(output)], [to_bfloat16(rows)]
    while len(reply) < REPLY_TOKENS:
        output, rows = model.forward(model.embed((), reply[-1:]), len(prompt) + len(reply) - 1, kv)
        reply.append(model.next_token(output))
        parts.append(to_bfloat16(rows))
    return tuple(reply), concatenate(parts)


def is_identical(request: Request, rows: Rows, model: ThinkerModel, talker: Talker) -> bool:
    """Whether a request that was served got the reply, the rows and the talker's inputs that it gets alone."""
    reply, expected = think_alone(model, request.prompt)
    if reply != request.reply or not all(torch.equal(rows[layer], expected[layer]) for layer in STORED_LAYERS):
        return False
    inputs, expected_inputs = (talker.inputs(request.prompt.token_ids, reply, given) for given in (rows, expected))
    return all(torch.equal(inputs[name], expected_inputs[name]) for name in expected_inputs)


def find_leaks(cache: hs_cache.HiddenStateCache) -> list[str]:
    """What a run has left behind, after leases had RELEASE_S to arrive where they end."""
    deadline = time.monotonic() + RELEASE_S
    while True:
        stats = cache.stats()
        assert stats.node is not None  # strict
        held = {
            "bytes of rows held by writers": stats.held_bytes,
            "leases": stats.node.store.num_leases,
            "reservations": stats.node.store.num_reservations,
        }
        left = [f"{count} {what} left at the end" for what, count in held.items() if count]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.05)


@torch.no_grad()
def run(cache: hs_cache.HiddenStateCache, num_clients: int, seed: int, console: Console) -> int:
    """Serve all clients, check and report it; returns the exit status."""
    model = ThinkerModel(build_model(dtype=torch.float64, small=True).thinker)
    talker = Talker(cache=cache, dtype=torch.bfloat16, num_threads=1, small=True)
    kv = KVBlocks(KV_BLOCKS, cache.chunk_size)
    runner = Runner(model, cache, kv)
    scheduler = Scheduler(
        step_tokens=STEP_TOKENS,
        kv_tokens=RUNNING_KV_TOKENS,
        max_running=MAX_RUNNING,
        restore=runner.restore,
        preempt=runner.preempt,
    )
    with console.status("serving"):
        served = serve(make_clients(num_clients, read_passages(BOOK), seed), scheduler, runner)
    with console.status("comparing with runs without a cache"):
        identical = sum(is_identical(request, rows, model, talker) for request, rows in served.finished.items())
    skipped = sum(request.num_restored or 0 for request in served.finished)
    preempted = sum(request.num_preemptions > 0 for request in (*served.finished, *served.aborted))
    problems = find_leaks(cache)
    if identical < len(served.finished):
        problems.append(f"{len(served.finished) - identical} requests differ from what they are without a cache")
    shown = {"skipped": skipped, "preempted": preempted, "aborted": len(served.aborted), "evicted": kv.evicted_total}
    problems += [f"nothing was {what}, so this run shows little" for what, count in shown.items() if not count]
    sizes = served.step_sizes
    console.print(
        f"{len(sizes)} steps of up to {max(sizes)} tokens, {kv.evicted_total} KV blocks evicted, "
        f"{cache.stats().stored_chunks_total} chunks of rows stored",
        style="dim",
    )
    for problem in problems:
        console.print(problem, style="red")
    facts = [
        f"{len(served.finished) + len(served.aborted)} requests ({preempted} preempted, {len(served.aborted)} aborted)",
        f"{skipped:,} of {sum(len(request.prompt) for request in served.finished):,} prompt tokens skipped",
        f"talker inputs identical in {identical}/{len(served.finished)}",
    ]
    verdict = "[bold red]FAIL[/]" if problems else "[bold green]PASS[/]"
    console.print(f"{verdict}  {' · '.join(facts)}", soft_wrap=True, highlight=False)
    return 1 if problems else 0


def to_bfloat16(rows: Rows) -> Rows:
    """As they are stored, and as the talker reads them."""
    return {layer: layer_rows.to(torch.bfloat16) for layer, layer_rows in rows.items()}


def concatenate(parts: Sequence[Rows]) -> Rows:
    """Rows of consecutive tokens in one piece, always a copy: so it holds no lease."""
    return {layer: torch.cat([part[layer] for part in parts]) for layer in STORED_LAYERS}


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, start or join Ray, run, and end the Ray that was started."""
    parser = argparse.ArgumentParser(description="An engine's loop around Qwen3-Omni's thinker, with hs_cache.")
    parser.add_argument("--clients", type=int, default=8, help="6 or more; default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of what they say and when; default: %(default)s")
    parser.add_argument(
        "--address",
        default="local",
        help="a Ray cluster to join, where the cache service then stays; default: start and end one",
    )
    options = parser.parse_args(arguments)
    if options.clients < 6:
        parser.error(f"--clients: got {options.clients}, expected 6 or more")
    console = Console()
    started = time.perf_counter()
    resources: dict[str, Any] = {"num_cpus": 2, "object_store_memory": 256 << 20, "include_dashboard": False}
    ray.init(options.address, logging_level=logging.ERROR, **(resources if options.address == "local" else {}))
    try:
        cache = hs_cache.connect(
            {"chunk_size": CHUNK_TOKENS, "max_hidden_state_cpu_size": 0.125},
            model="qwen3-omni-tiny",
            model_revision="seed 0, small, float64 to bfloat16",
            strict=True,  # an example is to fail loudly; an engine goes on without the cache
        )
        if cache is None:
            parser.error("the configuration in the environment says enable_hidden_state_cache: false")
        with cache:
            status = run(cache, options.clients, options.seed, console)
    finally:
        ray.shutdown()
    console.print(f"{time.perf_counter() - started:.0f} s in all", style="dim")
    return status


if __name__ == "__main__":
    sys.exit(main())
