"""The thinker stage: restores KV, prefills the rest, keeps KV per chunk and puts the talker's rows into the cache."""

from __future__ import annotations

import time

import torch
from transformers import DynamicCache

from hs_cache import HiddenStateCache

from .conversation import Prompt
from .kv_chunks import KVChunks
from .messages import Mode, Rows, Thought
from .thinker_model import ASSISTANT_HEADER_TOKENS, ThinkerModel, concatenate
from .tiny_model import STORED_LAYERS, build_model


class Thinker:
    """Runs as a Ray actor of its own."""

    def __init__(self, *, cache: HiddenStateCache, dtype: torch.dtype, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        torch.set_grad_enabled(False)
        self._model = ThinkerModel(build_model(dtype=dtype).thinker)
        self._cache = cache
        self._chunk_size: int = cache.chunk_size
        self._kv = KVChunks()
        self._lease: object = None
        # the first pass through the kernels is slow; it should not count for the first turn
        self._model.prefill(Prompt(tuple(range(256)) * 2, (), None), 0, self._model.new_kv(), self._chunk_size)

    def think(self, prompt: Prompt, mode: Mode, max_new_tokens: int) -> tuple[Thought, Rows]:
        """Answer a prompt.

        Args:
            prompt: the conversation so far.
            mode: NO_CACHE restores nothing, KV_ONLY restores without asking the hidden-state cache, CACHED asks and
                stores.
            max_new_tokens: exactly as many are generated.

        Returns:
            The answer, and the rows of all tokens from the first that was not restored to the last but one that was
            generated. With ``num_returns=2`` the driver passes the rows on without ever loading them.
        """
        started = time.perf_counter()
        keys = [bytes(key) for key in self._cache.chunk_keys(prompt.token_ids, mm_spans=prompt.mm_spans)]
        restored = 0 if mode is Mode.NO_CACHE else self._restorable(prompt, keys, ask_cache=mode is Mode.CACHED)
        kv = self._model.new_kv()
        self._kv.load(keys[: restored // self._chunk_size], into=kv)
        last, rows = self._model.prefill(prompt, restored, kv, self._chunk_size)
        if mode is Mode.CACHED:
            self._save(prompt, keys, restored, kv, rows)
        reply, reply_rows = self._decode(last, len(prompt), kv, max_new_tokens)
        thought = Thought(
            reply=reply,
            prompt_tokens=len(prompt),
            restored_tokens=restored,
            seconds=time.perf_counter() - started,
        )
        return thought, Rows.pack(restored, concatenate([rows, *reply_rows]))

    def evict_kv(self, prompt: Prompt, chunk: int) -> None:
        """Drop the KV of one chunk and say so to the KV actor, as an engine does when it needs the block elsewhere.

        Args:
            prompt: a prompt that was run CACHED.
            chunk: index of the chunk in it.
        """
        key = self._cache.chunk_keys(prompt.token_ids, mm_spans=prompt.mm_spans)[chunk]
        self._kv.evict(bytes(key))
        self._cache.kv.report_evicted([key])

    def _restorable(self, prompt: Prompt, keys: list[bytes], *, ask_cache: bool) -> int:
        """How many tokens can be skipped, a multiple of the chunk size.

        The answer can only be as long as KV *and* rows: what has KV but no rows must be prefilled again, for the
        talker.
        """
        chunks = min(self._kv.match(keys), (len(prompt) - ASSISTANT_HEADER_TOKENS) // self._chunk_size)
        if not ask_cache or not chunks:
            return chunks * self._chunk_size
        hit = self._cache.retrieve(
            prompt.token_ids, STORED_LAYERS, stop=chunks * self._chunk_size, mm_spans=prompt.mm_spans
        )
        self._lease = hit  # chunks that someone holds are not evicted: the talker will find what is promised here
        return int(hit.num_tokens) // self._chunk_size * self._chunk_size

    def _decode(
        self, last: torch.Tensor, position: int, kv: DynamicCache, count: int
    ) -> tuple[tuple[int, ...], list[dict[int, torch.Tensor]]]:
        reply: list[int] = []
        rows: list[dict[int, torch.Tensor]] = []
        while True:
            reply.append(self._model.next_token(last))
            if len(reply) == count:
                return tuple(reply), rows
            last, step = self._model.forward(self._model.embed((), reply[-1:]), position + len(rows), kv)
            rows.append(step)

    def _save(
        self, prompt: Prompt, keys: list[bytes], restored: int, kv: DynamicCache, rows: dict[int, torch.Tensor]
    ) -> None:
        """Keep KV and rows of the whole chunks that were prefilled.

        Generated tokens wait until the next turn prefills them: decoding steps have another shape and other last bits.
        """
        whole = len(keys) * self._chunk_size
        if whole <= restored:
            return
        token_ids = prompt.token_ids[:whole]
        self._kv.save(keys, self._chunk_size, kv)
        new_rows = {layer: layer_rows[: whole - restored] for layer, layer_rows in rows.items()}
        self._cache.store(token_ids, new_rows, token_offset=restored, mm_spans=prompt.mm_spans)
        self._cache.kv.report_stored(token_ids, mm_spans=prompt.mm_spans)
