"""The talker as what its stage drives: the thinker's rows in, codes and a waveform out."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from .tiny_model import CODEC_PAD, IM_END, SPEAKER, build_model


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


class TalkerModel:
    """The stock talker and vocoder, which get the thinker's rows from elsewhere.

    Args:
        dtype: of the weights.
        small: as `build_model` takes it.
    """

    def __init__(self, *, dtype: torch.dtype, small: bool = False) -> None:
        self._model: Any = build_model(dtype=dtype, small=small)
        self._model.thinker = _ThinkerElsewhere(self._model.thinker.get_input_embeddings())
        self._codes: list[torch.Tensor] = []
        self._model.code2wav.register_forward_pre_hook(lambda _, inputs: self._codes.append(inputs[0]))
        self._inputs: dict[str, torch.Tensor] = {}
        self._generate_codes = self._model.talker.generate
        self._model.talker.generate = self._listen
        self._tell: Callable[[list[int]], None] | None = None
        self._model.talker.register_forward_hook(self._step)

    def generate(
        self,
        token_ids: tuple[int, ...],
        reply: tuple[int, ...],
        rows: dict[int, torch.Tensor],
        steps: int,
        tell: Callable[[list[int]], None] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Say the thinker's reply.

        Args:
            token_ids: the prompt.
            reply: the thinker's answer.
            rows: layer index to rows ``[len(token_ids) + len(reply) - 1, hidden]`` of the talker's dtype.
            steps: of the talker, 2 or more: each completes the codes of the one before.
            tell: called with the codes of each step but the last, one per group, as soon as they are there.

        Returns:
            The codes ``[steps - 1, code groups]``, greedy, and the waveform ``[samples]``.
        """
        self._codes.clear()
        self._tell = tell
        try:
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
        finally:
            self._tell = None
        # the vocoder decodes [1, code groups, steps] in pieces
        codes = torch.cat(self._codes, dim=-1)[0].T.contiguous()
        return codes, waveform.flatten()

    def inputs(
        self, token_ids: tuple[int, ...], reply: tuple[int, ...], rows: dict[int, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """What the stock model makes of the thinker's rows before the talker itself runs.

        Args:
            token_ids, reply, rows: as for `generate`.

        Returns:
            ``inputs_embeds``, the talker's prompt, and ``trailing_text_hidden``, the text it is still to speak.
        """
        self.generate(token_ids, reply, rows, steps=2)  # fewer give the vocoder nothing
        return {name: self._inputs[name] for name in ("inputs_embeds", "trailing_text_hidden")}

    def _listen(self, **inputs: Any) -> Any:
        self._inputs = inputs
        return self._generate_codes(**inputs)

    def _step(self, _module: Any, _inputs: Any, output: Any) -> None:
        codes = output.hidden_states[1]  # of the step before, whose last code groups were predicted for this one
        if self._tell is not None and codes is not None:
            self._tell(codes[0].tolist())
