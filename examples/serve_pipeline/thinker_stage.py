"""The thinker's deployment: restores KV from its node's holder, or another's, prefills the rest, streams tokens."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import ray
import torch
from qwen3_omni.conversation import Prompt
from qwen3_omni.kv_chunks import cut, fill
from qwen3_omni.messages import Rows
from qwen3_omni.thinker_model import ASSISTANT_HEADER_TOKENS, ThinkerModel, concatenate
from qwen3_omni.tiny_model import STORED_LAYERS, build_model
from transformers import DynamicCache

import hs_cache

from .kv_holder import ENGINE, Chunk, find_holder, start_holder
from .messages import ThinkRequest, Thought, Whereabouts
from .settings import PipelineSettings

logger = logging.getLogger(__name__)

T = TypeVar("T")

_HANDED_ON_S = 30.0
_HOLDER_TIMEOUT_S = 5.0
"""A holder that doesn't answer in time costs a prefill, not a request."""


@dataclass(frozen=True)
class _Restored:
    """What of a prompt needs no prefill.

    Attributes:
        chunks: KV.
        num_local: how many of these came from this node's holder.
        prefix: the rows.
    """

    chunks: tuple[Chunk, ...] = ()
    num_local: int = 0
    prefix: hs_cache.HiddenStateRef | None = None


class ThinkerStage:
    """One replica. The event loop answers Serve and the cache while the model computes on a thread of its own."""

    async def __init__(self, settings: PipelineSettings) -> None:
        self._settings = settings
        self._dtype = getattr(torch, settings.dtype)
        self._who = Whereabouts.here()
        self._thread = ThreadPoolExecutor(1, initializer=prepare_torch)
        cache = await join_cache(settings)
        if cache is None:
            raise RuntimeError("the configuration in the environment says enable_hidden_state_cache: false")
        self._cache = cache
        self._holder = await asyncio.to_thread(start_holder, self._who.node, settings.kv_bytes, **settings.key_space)
        self._model = await self._compute(self._build)
        self._saving: set[asyncio.Task[None]] = set()
        self._handed_on: deque[tuple[float, Thought]] = deque()

    async def think(self, request: ThinkRequest) -> AsyncIterator[int | Thought]:
        """Answer a prompt: its tokens one by one, and then the `Thought`."""
        prompt = Prompt(request.token_ids, request.mm_spans, request.mel)
        keys = [bytes(key) for key in self._cache.chunk_keys(prompt.token_ids, mm_spans=prompt.mm_spans)]
        restored = await self._restore(prompt, keys) if request.use_cache else _Restored()
        start = len(restored.chunks) * self._cache.chunk_size
        kv, last, rows = await self._compute(self._prefill, prompt, restored.chunks)
        saving = None
        if request.use_cache:
            saved = self._compute(cut, kv, self._cache.chunk_size, restored.num_local, len(keys))
            saving = asyncio.create_task(self._save(prompt, keys, restored, await saved, rows))
            self._saving.add(saving)  # goes on when the client doesn't
            saving.add_done_callback(self._saving.discard)
        reply = [self._model.next_token(last)]
        steps = [rows]
        yield reply[0]
        while len(reply) < request.max_new_tokens:
            last, step = await self._compute(self._step, reply[-1], len(prompt) + len(reply) - 1, kv)
            steps.append(step)
            reply.append(self._model.next_token(last))
            yield reply[-1]
        if saving is not None:
            await saving
        suffix = await asyncio.to_thread(ray.put, Rows.pack(start, concatenate(steps)))
        moved = start - restored.num_local * self._cache.chunk_size
        thought = Thought(tuple(reply), start, moved, restored.prefix, suffix, self._who)
        self._hand_on(thought)
        yield thought

    async def _restore(self, prompt: Prompt, keys: Sequence[bytes]) -> _Restored:
        """As far as there are rows *and* KV: what has KV but no rows must be prefilled again, for the talker."""
        size = self._cache.chunk_size
        most = min(len(keys), (len(prompt) - ASSISTANT_HEADER_TOKENS) // size)
        if most <= 0:
            return _Restored()
        token_ids = prompt.token_ids[: most * size]
        prefix = await self._cache.retrieve_ref(token_ids, STORED_LAYERS, mm_spans=prompt.mm_spans)
        wanted = keys[: prefix.num_tokens // size]
        if not wanted:
            return _Restored()
        local = await answer_of(self._holder.load.remote(wanted)) or []
        chunks = [*local, *(await self._load_elsewhere(prompt, wanted, len(local)))]
        return _Restored(tuple(chunks), len(local), prefix if chunks else None)

    async def _load_elsewhere(self, prompt: Prompt, wanted: Sequence[bytes], first: int) -> list[Chunk]:
        """KV of chunks `first` and on from the node that has the most of them: one whose replica is gone, perhaps."""
        if first == len(wanted) or not self._settings.fetch_kv:
            return []
        size = self._cache.chunk_size
        token_ids = prompt.token_ids[: len(wanted) * size]
        nodes = await self._cache.locate(token_ids, STORED_LAYERS, mm_spans=prompt.mm_spans)
        others = [node for node, tokens in nodes.items() if tokens > first * size and node != self._who.node]
        holder = await asyncio.to_thread(find_holder, self._settings.service, others[0]) if others else None
        return (await answer_of(holder.load.remote(wanted[first:])) if holder is not None else None) or []

    async def _save(
        self,
        prompt: Prompt,
        keys: Sequence[bytes],
        restored: _Restored,
        chunks: Sequence[torch.Tensor],
        rows: dict[int, torch.Tensor],
    ) -> None:
        """Keep KV and rows of the prompt's whole chunks on this node, also of those that came from another.

        KV goes first, since a store says that there is KV. Generated tokens wait until the next turn prefills them:
        decoding steps have another shape and other last bits.
        """
        size, spans = self._cache.chunk_size, prompt.mm_spans
        held = restored.num_local
        if chunks:
            packed = [chunk.contiguous().view(torch.uint8).numpy() for chunk in chunks]
            held += await answer_of(self._holder.save.remote(keys[held:], packed)) or 0
        start, whole = len(restored.chunks) * size, held * size
        if restored.prefix is not None:
            there = await self._cache.locate(
                prompt.token_ids[:start], STORED_LAYERS, mm_spans=spans, nodes=[self._who.node]
            )
            first, end = there.get(self._who.node, 0), min(start, whole)
            hit = await restored.prefix if first < end else hs_cache.PrefixHit()
            if first < end <= hit.num_tokens:  # they came from another node
                moved = {layer: hit[layer][first:end] for layer in STORED_LAYERS}
                await self._cache.store(prompt.token_ids[:end], moved, token_offset=first, mm_spans=spans)
        if whole > start:
            new_rows = {layer: layer_rows[: whole - start] for layer, layer_rows in rows.items()}
            await self._cache.store(prompt.token_ids[:whole], new_rows, token_offset=start, mm_spans=spans)

    def _hand_on(self, thought: Thought) -> None:
        """Keep what a thought refers to until others have references: Serve drops this one when it has sent it."""
        now = time.monotonic()
        while self._handed_on and self._handed_on[0][0] < now:
            self._handed_on.popleft()
        self._handed_on.append((now + _HANDED_ON_S, thought))

    async def _compute(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    def _build(self) -> ThinkerModel:
        model = ThinkerModel(build_model(dtype=self._dtype, small=self._settings.small).thinker)
        # the first pass through the kernels is slow; it should not count for the first request
        model.prefill(Prompt(tuple(range(256)), (), None), 0, model.new_kv(), self._cache.chunk_size)
        return model

    def _prefill(
        self, prompt: Prompt, chunks: Sequence[Chunk]
    ) -> tuple[DynamicCache, torch.Tensor, dict[int, torch.Tensor]]:
        kv = self._model.new_kv()
        size = self._cache.chunk_size
        fill([torch.from_numpy(chunk.copy()).view(self._dtype) for chunk in chunks], kv)
        return kv, *self._model.prefill(prompt, len(chunks) * size, kv, size)

    def _step(self, token: int, position: int, kv: DynamicCache) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        return self._model.forward(self._model.embed((), (token,)), position, kv)


async def join_cache(settings: PipelineSettings) -> hs_cache.AsyncHiddenStateCache | None:
    """A client of the service; one that has to be started gets the pipeline's settings, one that runs keeps its own."""
    try:
        return await hs_cache.aconnect(settings.cache, **settings.key_space, engine=ENGINE)
    except hs_cache.ConfigMismatchError:
        return await hs_cache.aconnect(**settings.key_space, engine=ENGINE)


def prepare_torch() -> None:
    """What the thread that computes begins with."""
    torch.set_num_threads(1)  # another number gives other last bits
    torch.set_grad_enabled(False)


async def answer_of(ref: Any) -> Any:
    """What a holder answers; None when it doesn't in time."""
    try:
        return await asyncio.wait_for(ref, _HOLDER_TIMEOUT_S)
    except (ray.exceptions.RayError, asyncio.TimeoutError) as error:
        logger.warning("the node's KV holder doesn't answer: %s", str(error).splitlines()[:1])
        return None
