"""Keys and values by chunk: what stands for an engine's prefix cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache


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

    def save(self, keys: Sequence[bytes], chunk_size: int, source: DynamicCache, *, first: int = 0) -> None:
        """Keep chunks ``first .. len(keys)`` of what was prefilled, except those that are here."""
        for index, key in enumerate(keys[first:], start=first):
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
