"""The thinker as what an engine drives: embeddings of some tokens, one forward pass over them, the next token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache

from .conversation import Prompt
from .tiny_model import AUDIO, NUM_BYTE_TOKENS, STORED_LAYERS

ASSISTANT_HEADER_TOKENS: Final = 3
"""At the end of a prompt. They are always prefilled: the next token needs a row to come from."""


class ThinkerModel:
    """The stock thinker, cut where an engine cuts it.

    Args:
        thinker: that of `build_model`.
    """

    def __init__(self, thinker: Any) -> None:
        self._thinker = thinker
        self._text = thinker.model.language_model

    def new_kv(self) -> DynamicCache:
        """Room for the KV of one sequence."""
        return DynamicCache(config=self._text.config)

    def encode_audio(self, mel: NDArray[np.float32]) -> torch.Tensor:
        """The audio encoder's output for a clip, ``[clip tokens, hidden]``."""
        features = torch.from_numpy(mel.copy()).to(self._thinker.dtype)
        encoded = self._thinker.model.audio_tower(features, feature_lens=torch.tensor([features.shape[1]]))
        rows: torch.Tensor = encoded.last_hidden_state
        return rows

    def embed(self, before: Sequence[int], token_ids: Sequence[int], audio: torch.Tensor | None = None) -> torch.Tensor:
        """Embeddings ``[1, tokens, hidden]`` of consecutive tokens, with the encoded clip where its placeholders are.

        Rows of the clip are counted from its own start, also when these tokens begin in its middle. To scatter the
        whole clip over the placeholders that are left, as the stock forward would, puts wrong rows there without any
        error.

        Args:
            before: the tokens before those.
            token_ids: whose embeddings are wanted.
            audio: what `encode_audio` gave for the conversation's clip.
        """
        ids = torch.tensor(token_ids)
        embeddings: torch.Tensor = self._thinker.get_input_embeddings()(ids)
        is_audio = ids == AUDIO
        if audio is not None and bool(is_audio.any()):
            first = before.count(AUDIO)
            embeddings[is_audio] = audio[first : first + int(is_audio.sum())]
        return embeddings[None]

    def forward(
        self, embeddings: torch.Tensor, begin: int, kv: DynamicCache
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Compute the tokens from position ``begin`` on.

        Args:
            embeddings: ``[1, tokens, hidden]``.
            begin: position of the first of them.
            kv: of all tokens before; theirs is added.

        Returns:
            The output ``[1, tokens, hidden]``, and what the talker reads: layer index to rows ``[tokens, hidden]``.
        """
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

    def prefill(
        self, prompt: Prompt, start: int, kv: DynamicCache, chunk_size: int
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Prefill a prompt from one multiple of the chunk size to the next, counted from its start.

        How a kernel rounds depends on the shape it is given; on this grid a chunk has the same shape whether or not
        what is before it was restored, so restored and recomputed numbers are equal to the last bit.

        Args:
            prompt: all of it.
            start: how many of its tokens `kv` has, a multiple of the chunk size.
            kv: theirs; that of the others is added.
            chunk_size: tokens.

        Returns:
            The last token's output ``[1, 1, hidden]``, and the rows of the tokens from ``start`` on.
        """
        token_ids = prompt.token_ids[start:]
        audio = self.encode_audio(prompt.mel) if prompt.mel is not None and AUDIO in token_ids else None
        embeddings = self.embed(prompt.token_ids[:start], token_ids, audio)
        output = embeddings
        steps = []
        for begin in range(start, len(prompt), chunk_size):
            end = min(begin + chunk_size, len(prompt))
            output, rows = self.forward(embeddings[:, begin - start : end - start], begin, kv)
            steps.append(rows)
        return output[:, -1:], concatenate(steps)

    def next_token(self, output: torch.Tensor) -> int:
        """Greedy; only byte tokens, so that random weights cannot emit a control token into the conversation."""
        return int(self._thinker.lm_head(output[:, -1:])[0, -1, :NUM_BYTE_TOKENS].argmax())


def concatenate(parts: Sequence[dict[int, torch.Tensor]]) -> dict[int, torch.Tensor]:
    """Rows of consecutive steps as those of one."""
    return {layer: torch.cat([part[layer] for part in parts]) for layer in STORED_LAYERS}
