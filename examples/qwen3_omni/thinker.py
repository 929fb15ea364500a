"""The thinker stage: restores KV, prefills the rest, keeps KV per chunk and puts the talker's rows into the cache."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache

from hs_cache import HiddenStateCache

from .conversation import Prompt
from .messages import Mode, Rows, Thought
from .tiny_model import AUDIO, NUM_BYTE_TOKENS, STORED_LAYERS, build_model

_ASSISTANT_HEADER_TOKENS = 3


class KVChunks:
    """Keys and values of whole prefill chunks by chunk key: an engine's prefix cache without its paging."""

    def __init__(self) -> None:
        self._chunks: dict[bytes, torch.Tensor] = {}  # [model layers, 2, KV heads, chunk, head_dim]

    def match(self, keys: Sequence[bytes]) -> int:
        """How many chunks of a prefix are here without a gap."""
        for count, key in enumerate(keys):
            if key not in self._chunks:
                return count
        return len(keys)

    def load(self, keys: Sequence[bytes], into: DynamicCache) -> None:
        """Fill an empty cache with the chunks of a prefix, all of which must be here."""
        if not keys:
            return
        for layer, (k, v) in enumerate(torch.cat([self._chunks[key] for key in keys], dim=3)):
            into.update(k[None], v[None], layer)

    def save(self, keys: Sequence[bytes], chunk_size: int, source: DynamicCache) -> None:
        """Keep the first len(keys) chunks of what was prefilled, except those that are here."""
        for index, key in enumerate(keys):
            if key not in self._chunks:
                tokens = slice(index * chunk_size, (index + 1) * chunk_size)
                layers: list[Any] = source.layers
                pairs = [torch.stack((layer.keys[0, :, tokens], layer.values[0, :, tokens])) for layer in layers]
                self._chunks[key] = torch.stack(pairs)

    def evict(self, key: bytes) -> None:
        """Forget a chunk.

        Raises:
            KeyError: it is not here.
        """
        del self._chunks[key]


class Thinker:
    """Runs as a Ray actor of its own.

    Prefill always steps from one multiple of the chunk size to the next, counted from the start of the prompt. How a
    kernel rounds depends on the shape it is given; on this grid a chunk has the same shape whether or not what is
    before it was restored, so restored and recomputed numbers are equal to the last bit.
    """

    def __init__(self, *, cache: HiddenStateCache, dtype: torch.dtype, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        torch.set_grad_enabled(False)
        self._model: Any = build_model(dtype=dtype).thinker
        self._text = self._model.model.language_model
        self._cache = cache
        self._chunk_size: int = cache.chunk_size
        self._kv = KVChunks()
        self._lease: object = None
        # the first pass through the kernels is slow; it should not count for the first turn
        self._prefill(Prompt(tuple(range(256)) * 2, (), None), 0, self._new_kv())

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
        kv = self._new_kv()
        self._kv.load(keys[: restored // self._chunk_size], into=kv)
        last, rows = self._prefill(prompt, restored, kv)
        if mode is Mode.CACHED:
            self._save(prompt, keys, restored, kv, rows)
        reply, reply_rows = self._decode(last, len(prompt), kv, max_new_tokens)
        thought = Thought(
            reply=reply,
            prompt_tokens=len(prompt),
            restored_tokens=restored,
            seconds=time.perf_counter() - started,
        )
        return thought, Rows.pack(restored, _concatenate([rows, *reply_rows]))

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
        talker. The assistant's header is always prefilled: the next token needs a row to come from.
        """
        chunks = min(self._kv.match(keys), (len(prompt) - _ASSISTANT_HEADER_TOKENS) // self._chunk_size)
        if not ask_cache or not chunks:
            return chunks * self._chunk_size
        hit = self._cache.retrieve(
            prompt.token_ids, STORED_LAYERS, stop=chunks * self._chunk_size, mm_spans=prompt.mm_spans
        )
        self._lease = hit  # chunks that someone holds are not evicted: the talker will find what is promised here
        return int(hit.num_tokens) // self._chunk_size * self._chunk_size

    def _prefill(self, prompt: Prompt, start: int, kv: DynamicCache) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Prefill from ``start`` to the end; returns the last token's output [1, 1, hidden] and the rows of all."""
        embeddings = self._embed(prompt, start)
        output = embeddings
        steps = []
        for begin in range(start, len(prompt), self._chunk_size):
            end = min(begin + self._chunk_size, len(prompt))
            output, rows = self._forward(embeddings[:, begin - start : end - start], begin, kv)
            steps.append(rows)
        return output[:, -1:], _concatenate(steps)

    def _embed(self, prompt: Prompt, start: int) -> torch.Tensor:
        """Token embeddings [1, tokens, hidden], with the audio encoder's output where the audio tokens are.

        Rows of the clip are counted from its own start, also when the prefill begins in its middle. To scatter the
        whole clip over the placeholders that are left, as the stock forward would, puts wrong rows there without any
        error.
        """
        ids = torch.tensor(prompt.token_ids[start:])
        embeddings: torch.Tensor = self._model.get_input_embeddings()(ids)
        is_audio = ids == AUDIO
        if prompt.mel is not None and bool(is_audio.any()):
            mel = torch.from_numpy(prompt.mel.copy()).to(embeddings.dtype)
            encoded = self._model.model.audio_tower(mel, feature_lens=torch.tensor([mel.shape[1]])).last_hidden_state
            embeddings[is_audio] = encoded[prompt.token_ids[:start].count(AUDIO) :]
        return embeddings[None]

    def _forward(
        self, embeddings: torch.Tensor, begin: int, kv: DynamicCache
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        # with text and audio alone, all three axes of M-RoPE are the token's position
        positions = torch.arange(begin, begin + embeddings.shape[1]).expand(3, 1, -1)
        output = self._text(
            inputs_embeds=embeddings,
            position_ids=positions,
            cache=kv,
            use_cache=True,
            output_hidden_states=list(STORED_LAYERS),
        )
        return output.last_hidden_state, {layer: output.hidden_states[layer][0] for layer in STORED_LAYERS}

    def _decode(
        self, last: torch.Tensor, position: int, kv: DynamicCache, count: int
    ) -> tuple[tuple[int, ...], list[dict[int, torch.Tensor]]]:
        """Greedy; only byte tokens, so that random weights cannot emit a control token into the conversation."""
        reply: list[int] = []
        rows: list[dict[int, torch.Tensor]] = []
        while True:
            reply.append(int(self._model.lm_head(last)[0, -1, :NUM_BYTE_TOKENS].argmax()))
            if len(reply) == count:
                return tuple(reply), rows
            embedding = self._model.get_input_embeddings()(torch.tensor([reply[-1:]]))
            last, step = self._forward(embedding, position + len(rows), kv)
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

    def _new_kv(self) -> DynamicCache:
        return DynamicCache(config=self._text.config)


def _concatenate(parts: Sequence[dict[int, torch.Tensor]]) -> dict[int, torch.Tensor]:
    return {layer: torch.cat([part[layer] for part in parts]) for layer in STORED_LAYERS}
