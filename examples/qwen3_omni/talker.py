"""The talker stage: speaks from the thinker's rows, those of the prefix from the cache, the others from the thinker."""

from __future__ import annotations

import hashlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from hs_cache import HiddenStateCache

from .conversation import Prompt
from .messages import Mode, Rows, Speech, Thought
from .tiny_model import ACCEPT_HIDDEN_LAYER, CODEC_PAD, IM_END, SPEAKER, STORED_LAYERS, build_model


class _ThinkerElsewhere(nn.Module):
    """Stands where the stock model has its thinker and answers with what the thinker actor has found.

    So all that follows, from cutting the conversation into segments to the waveform, is the stock ``generate``.
    """

    def __init__(self, embeddings: nn.Module) -> None:
        super().__init__()
        self._embeddings = embeddings  # the talker projects three control tokens of the thinker's vocabulary

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def get_input_embeddings(self) -> nn.Module:
        return self._embeddings

    def generate(self, *, sequences: torch.Tensor, rows: dict[int, torch.Tensor], **_: Any) -> SimpleNamespace:
        """Answer as the stock thinker does: one entry per step, each of which can be asked for a layer."""
        return SimpleNamespace(sequences=sequences, hidden_states=(rows,))


class Talker:
    """Runs as a Ray actor of its own."""

    def __init__(self, *, cache: HiddenStateCache, dtype: torch.dtype, num_threads: int, small: bool = False) -> None:
        torch.set_num_threads(num_threads)
        torch.set_grad_enabled(False)
        self._model: Any = build_model(dtype=dtype, small=small)
        self._model.thinker = _ThinkerElsewhere(self._model.thinker.get_input_embeddings())
        self._dtype = dtype
        self._cache = cache
        self._codes: list[torch.Tensor] = []
        self._model.code2wav.register_forward_pre_hook(lambda _, inputs: self._codes.append(inputs[0]))
        self._inputs: dict[str, torch.Tensor] = {}
        self._generate_codes = self._model.talker.generate
        self._model.talker.generate = self._listen

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
        codes, waveform = self._generate(token_ids, thought.reply, rows, max_new_codes)
        return Speech(
            codes=codes.numpy(),
            waveform=waveform.numpy(),
            row_digests={layer: _digest(layer_rows) for layer, layer_rows in rows.items()},
        )

    def inputs(
        self, token_ids: tuple[int, ...], reply: tuple[int, ...], rows: dict[int, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """What the stock model makes of the thinker's rows before the talker itself runs.

        Args:
            token_ids: the prompt.
            reply: the thinker's answer.
            rows: layer index to rows ``[len(token_ids) + len(reply) - 1, hidden]`` of the talker's dtype.

        Returns:
            ``inputs_embeds``, the talker's prompt, and ``trailing_text_hidden``, the text it is still to speak.
        """
        self._generate(token_ids, reply, rows, steps=2)  # fewer give the vocoder nothing
        return {name: self._inputs[name] for name in ("inputs_embeds", "trailing_text_hidden")}

    def _listen(self, **inputs: Any) -> Any:
        self._inputs = inputs
        return self._generate_codes(**inputs)

    def _prefix(self, prompt: Prompt, num_tokens: int) -> dict[int, torch.Tensor]:
        """Rows of the restored tokens, straight from the cache: the thinker never had them in its hands."""
        hit = self._cache.retrieve(prompt.token_ids, STORED_LAYERS, stop=num_tokens, mm_spans=prompt.mm_spans)
        if hit.num_tokens < num_tokens:
            raise RuntimeError(f"the thinker restored {num_tokens} tokens, the cache has rows of {hit.num_tokens}")
        return {layer: hit[layer] for layer in STORED_LAYERS}

    def _generate(
        self, token_ids: tuple[int, ...], reply: tuple[int, ...], rows: dict[int, torch.Tensor], steps: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._codes.clear()
        _, waveform = self._model.generate(
            input_ids=torch.tensor([token_ids]),
            speaker=SPEAKER,
            thinker_sequences=torch.tensor([token_ids + reply]),
            thinker_rows={layer: layer_rows[None] for layer, layer_rows in rows.items()},
            thinker_eos_token_id=IM_END,
            talker_do_sample=False,
            talker_temperature=None,
            talker_top_k=None,
            talker_top_p=None,
            talker_repetition_penalty=1.0,
            talker_pad_token_id=CODEC_PAD,
            talker_min_new_tokens=steps,
            talker_max_new_tokens=steps,
        )
        # the vocoder decodes [1, code groups, steps] in pieces
        codes = torch.cat(self._codes, dim=-1)[0].T.contiguous()
        return codes, waveform.flatten()


def _digest(rows: torch.Tensor) -> str:
    raw: np.ndarray[Any, Any] = rows.contiguous().view(torch.uint8).numpy()
    return hashlib.sha256(raw.tobytes()).hexdigest()
