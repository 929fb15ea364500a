"""The talker stage: speaks from the thinker's rows, those of the prefix from the cache, the others from the thinker."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch

from hs_cache import HiddenStateCache

from .conversation import Prompt
from .messages import Mode, Rows, Speech, Thought
from .talker_model import TalkerModel
from .tiny_model import ACCEPT_HIDDEN_LAYER, STORED_LAYERS


class Talker:
    """Runs as a Ray actor of its own."""

    def __init__(self, *, cache: HiddenStateCache, dtype: torch.dtype, num_threads: int, small: bool = False) -> None:
        torch.set_num_threads(num_threads)
        torch.set_grad_enabled(False)
        self._model = TalkerModel(dtype=dtype, small=small)
        self._dtype = dtype
        self._cache = cache

    def speak(self, prompt: Prompt, thought: Thought, suffix: Rows, mode: Mode, max_new_codes: int) -> Speech:
        """Say the thinker's reply.

        Args:
            prompt: what the thinker was asked.
            thought: what it answered.
            suffix: its rows from the first token that it did not restore.
            mode: where the rows before those come from.
            max_new_codes: exactly as many steps are spoken.

        Raises:
            RuntimeError: the cache no longer has the rows of the prefix that the thinker restored.
        """
        token_ids = prompt.token_ids
        rows = suffix.unpack(self._dtype)
        if mode is Mode.KV_ONLY:
            token_ids = token_ids[suffix.start :]
        elif suffix.start:
            prefix = self._prefix(prompt, suffix.start)
            if mode is Mode.NO_ACCEPT_ROWS:
                prefix[ACCEPT_HIDDEN_LAYER] = torch.zeros_like(prefix[ACCEPT_HIDDEN_LAYER])
            rows = {layer: torch.cat((prefix[layer], rows[layer])) for layer in STORED_LAYERS}
        codes, waveform = self._model.generate(token_ids, thought.reply, rows, max_new_codes)
        return Speech(
            codes=codes.numpy(),
            waveform=waveform.numpy(),
            row_digests={layer: digest(layer_rows) for layer, layer_rows in rows.items()},
        )

    def inputs(
        self, token_ids: tuple[int, ...], reply: tuple[int, ...], rows: dict[int, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """See `TalkerModel.inputs`."""
        return self._model.inputs(token_ids, reply, rows)

    def _prefix(self, prompt: Prompt, num_tokens: int) -> dict[int, torch.Tensor]:
        """Rows of the restored tokens, straight from the cache: the thinker never had them in its hands."""
        hit = self._cache.retrieve(prompt.token_ids, STORED_LAYERS, stop=num_tokens, mm_spans=prompt.mm_spans)
        if hit.num_tokens < num_tokens:
            raise RuntimeError(f"the thinker restored {num_tokens} tokens, the cache has rows of {hit.num_tokens}")
        return {layer: hit[layer] for layer in STORED_LAYERS}


def digest(rows: torch.Tensor) -> str:
    """SHA-256 over rows of any dtype, hex."""
    raw: np.ndarray[Any, Any] = rows.contiguous().view(torch.uint8).numpy()
    return hashlib.sha256(raw.tobytes()).hexdigest()
