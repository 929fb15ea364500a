"""The talker's deployment: gets the thinker's rows by reference, and streams codes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

import ray
import torch
from qwen3_omni.talker import digest
from qwen3_omni.talker_model import TalkerModel
from qwen3_omni.tiny_model import STORED_LAYERS

from .messages import RowsLostError, SpeakRequest, Speech, Whereabouts
from .settings import PipelineSettings
from .thinker_stage import prepare_torch

_ROWS_TIMEOUT_S = 10.0


class TalkerStage:
    """One replica."""

    async def __init__(self, settings: PipelineSettings) -> None:
        self._who = Whereabouts.here()
        self._dtype = getattr(torch, settings.dtype)
        self._thread = ThreadPoolExecutor(1, initializer=prepare_torch)
        self._small = settings.small
        self._model = await asyncio.get_running_loop().run_in_executor(self._thread, self._build)

    async def speak(self, request: SpeakRequest) -> AsyncIterator[list[int] | Speech]:
        """Say the thinker's reply: the codes of one step after the other, and then the `Speech`.

        Raises:
            RowsLostError: the rows are gone.
        """
        rows = await self._rows(request)
        loop = asyncio.get_running_loop()
        steps = request.max_new_codes + 1  # the last one's codes are never completed
        codes: asyncio.Queue[list[int] | None] = asyncio.Queue()

        def generate() -> torch.Tensor:
            try:
                return self._model.generate(
                    request.token_ids,
                    request.thought.reply,
                    rows,
                    steps,
                    tell=lambda step: loop.call_soon_threadsafe(codes.put_nowait, step),
                )[1]
            finally:
                loop.call_soon_threadsafe(codes.put_nowait, None)

        speaking = loop.run_in_executor(self._thread, generate)
        while (step := await codes.get()) is not None:
            yield step
        waveform = await speaking
        digests = {layer: digest(layer_rows) for layer, layer_rows in rows.items()}
        yield Speech(waveform.numpy(), digests, self._who)

    async def _rows(self, request: SpeakRequest) -> dict[int, torch.Tensor]:
        thought = request.thought
        try:
            suffix = (await asyncio.wait_for(thought.suffix, _ROWS_TIMEOUT_S)).unpack(self._dtype)
        except (ray.exceptions.RayError, asyncio.TimeoutError) as error:
            raise RowsLostError(f"the rows that the thinker computed are gone: {type(error).__name__}") from error
        if thought.prefix is None:
            return dict(suffix)
        hit = await thought.prefix
        if hit.num_tokens < thought.restored_tokens:
            raise RowsLostError(f"{thought.restored_tokens} tokens were restored, {hit.num_tokens} have rows")
        return {layer: torch.cat((hit[layer][: thought.restored_tokens], suffix[layer])) for layer in STORED_LAYERS}

    def _build(self) -> TalkerModel:
        return TalkerModel(dtype=self._dtype, small=self._small)
