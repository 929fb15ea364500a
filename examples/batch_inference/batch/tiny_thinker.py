"""The model that comes with the job: a small Qwen3-Omni thinker, and an engine's prefix cache in front of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from qwen3_omni.conversation import Conversation
from qwen3_omni.kv_chunks import cut, fill
from qwen3_omni.recent_chunks import RecentChunks
from qwen3_omni.thinker_model import ThinkerModel
from qwen3_omni.tiny_model import ACCEPT_HIDDEN_LAYER, build_model
from transformers import DynamicCache

from hs_cache import HiddenStateCache

from .model import Answer
from .prompts import Prompt

KV_TOKENS = 16_384
CONTEXT_TOKENS = 32_768


class TinyThinker:
    """Answers greedily, and embeds a prompt as the mean of the accept layer over all of its tokens.

    Prefill steps from one multiple of the chunk size to the next, counted from the start of the prompt, on one thread.
    How a kernel rounds depends on the shape it is given and on the number of threads; so restored and computed numbers
    are equal to the last bit.
    """

    model = "qwen3-omni-tiny"
    revision = "seed 0, small, float32, 1 thread"

    def __init__(self, cache: HiddenStateCache | None, chunk_size: int) -> None:
        torch.set_num_threads(1)
        torch.set_grad_enabled(False)
        self._thinker = ThinkerModel(build_model(dtype=torch.float32, small=True).thinker)
        self._cache = cache
        self._chunk_size = chunk_size
        self._kv: RecentChunks[torch.Tensor] = RecentChunks(max(1, KV_TOKENS // chunk_size))
        if cache is not None:
            cache.kv.clear()  # whoever had this worker's name before has taken its KV along

    def answer(self, prompt: Prompt, reply_tokens: int) -> Answer:
        """See `batch.model.Model`.

        Raises:
            ValueError: the prompt is too long for the model.
        """
        token_ids = tokenize(prompt)
        if len(token_ids) + reply_tokens > CONTEXT_TOKENS:
            raise ValueError(
                f"{len(token_ids):,} prompt tokens and {reply_tokens:,} of the reply, expected at most "
                f"{CONTEXT_TOKENS:,} together"
            )
        kv = self._thinker.new_kv()
        restored = self._restore(token_ids, kv)
        last, computed = self._prefill(token_ids, len(restored), kv)
        rows = torch.cat((restored, computed)) if len(restored) else computed
        self._keep(token_ids, len(restored), computed, kv)
        reply = self._decode(last, len(token_ids), kv, reply_tokens)
        return Answer(
            reply=bytes(reply).decode(errors="replace"),
            reply_token_ids=tuple(reply),
            prompt_tokens=len(token_ids),
            skipped_tokens=len(restored),
            embedding=rows.double().mean(dim=0).float().numpy(),
        )

    def _restore(self, token_ids: Sequence[int], kv: DynamicCache) -> torch.Tensor:
        """Fill an empty `kv` with what has KV here *and* rows in the cache; returns these rows, ``[tokens, hidden]``.

        The last token is always computed: the first of the reply needs a row to come from.
        """
        nothing = torch.empty(0, 0)
        if self._cache is None:
            return nothing
        keys = self._keys(token_ids)[: (len(token_ids) - 1) // self._chunk_size]
        chunks = self._kv.load(keys)
        if not chunks:
            return nothing
        hit = self._cache.retrieve(token_ids, ACCEPT_HIDDEN_LAYER, stop=len(chunks) * self._chunk_size)
        usable = hit.num_tokens // self._chunk_size
        if not usable:
            return nothing
        fill(chunks[:usable], kv)
        return hit[ACCEPT_HIDDEN_LAYER][: usable * self._chunk_size]

    def _prefill(self, token_ids: Sequence[int], start: int, kv: DynamicCache) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute from `start` to the end; returns the last token's output ``[1, 1, hidden]`` and the rows of all."""
        steps = []
        output = torch.empty(0)
        for begin in range(start, len(token_ids), self._chunk_size):
            embeddings = self._thinker.embed((), token_ids[begin : begin + self._chunk_size])
            output, rows = self._thinker.forward(embeddings, begin, kv)
            steps.append(rows[ACCEPT_HIDDEN_LAYER])
        return output[:, -1:], torch.cat(steps)

    def _keep(self, token_ids: Sequence[int], restored: int, rows: torch.Tensor, kv: DynamicCache) -> None:
        """Keep KV and rows of the whole chunks that were computed, and say which KV had to make room."""
        whole = len(token_ids) // self._chunk_size * self._chunk_size
        if self._cache is None or whole <= restored:
            return
        evicted = self._kv.save(self._keys(token_ids), lambda index: cut(kv, self._chunk_size, index, index + 1)[0])
        new = {ACCEPT_HIDDEN_LAYER: rows[: whole - restored]}
        self._cache.store(token_ids[:whole], new, token_offset=restored)
        if evicted:
            self._cache.kv.report_evicted(evicted)

    def _keys(self, token_ids: Sequence[int]) -> list[bytes]:
        """Of whole chunks, also where the service keeps short ones."""
        assert self._cache is not None
        whole = len(token_ids) // self._chunk_size * self._chunk_size
        return [bytes(key) for key in self._cache.chunk_keys(token_ids[:whole])]

    def _decode(self, last: torch.Tensor, position: int, kv: DynamicCache, count: int) -> list[int]:
        reply: list[int] = []
        while len(reply) < count:
            if reply:
                embeddings = self._thinker.embed((), reply[-1:])
                last, _ = self._thinker.forward(embeddings, position + len(reply) - 1, kv)
            reply.append(self._thinker.next_token(last))
        return reply


def tokenize(prompt: Prompt) -> tuple[int, ...]:
    """In Qwen3-Omni's template; text is tokenised as UTF-8 bytes."""
    conversation = Conversation()
    for message in prompt.messages:
        if message.role == "system":
            conversation.add_system(message.content)
        elif message.role == "user":
            conversation.add_user(message.content)
        else:
            conversation.add_assistant(tuple(message.content.encode()))
    return conversation.prompt().token_ids
