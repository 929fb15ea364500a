"""What the driver, the thinker and the talker send each other."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray


class Mode(enum.Enum):
    """How a turn is run; CACHED must give what NO_CACHE gives, and the other two must not."""

    NO_CACHE = "no cache"
    """Prefill the whole prompt, hand every row to the talker."""
    KV_ONLY = "KV only"
    """Restore KV and skip its prefill; the talker gets the rows that were computed, which are those of the suffix."""
    CACHED = "cached"
    """Restore KV and skip its prefill; the talker takes the rows of the prefix from the hidden-state cache."""
    NO_ACCEPT_ROWS = "KV and layer 0 only"
    """As CACHED, but of the prefix only what the token ids give away: the embeddings. For text that would do."""


@dataclass(frozen=True)
class Rows:
    """Hidden states of consecutive tokens on their way from one stage to the other.

    Attributes:
        start: position of the first row in the prompt.
        layers: layer index to bytes of the rows, uint8 [tokens, hidden * itemsize]. Ray moves NumPy arrays without
            pickling their contents, but not torch tensors, and NumPy has no bfloat16.
    """

    start: int
    layers: dict[int, NDArray[np.uint8]]

    @classmethod
    def pack(cls, start: int, layers: dict[int, torch.Tensor]) -> Rows:
        """Take rows [tokens, hidden] of any dtype."""
        return cls(start, {layer: rows.contiguous().view(torch.uint8).numpy() for layer, rows in layers.items()})

    def unpack(self, dtype: torch.dtype) -> dict[int, torch.Tensor]:
        """The rows as fresh tensors [tokens, hidden] of the dtype they were packed from."""
        return {layer: torch.from_numpy(rows.copy()).view(dtype) for layer, rows in self.layers.items()}


@dataclass(frozen=True)
class Thought:
    """What the thinker reports of one turn.

    Attributes:
        reply: generated token ids.
        prompt_tokens: length of the prompt.
        restored_tokens: how many of them were not prefilled.
        seconds: from the request to the last token, storing included.
    """

    reply: tuple[int, ...]
    prompt_tokens: int
    restored_tokens: int
    seconds: float


@dataclass(frozen=True)
class Speech:
    """What the talker reports of one turn.

    Attributes:
        codes: int64 [steps, code groups], greedy.
        waveform: float32 [samples].
        row_digests: layer index to SHA-256 over every thinker row that the talker was given.
    """

    codes: NDArray[np.int64]
    waveform: NDArray[np.float32]
    row_digests: dict[int, str]
