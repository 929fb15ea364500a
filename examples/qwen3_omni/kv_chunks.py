"""Keys and values by chunk: what stands for an engine's prefix cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache


def cut(source: DynamicCache, chunk_size: int, first: int, end: int) -> list[torch.Tensor]:
    """Chunks ``first .. end`` of what was prefilled, ``[model layers, 2, KV heads, chunk, head_dim]`` each."""
    chunks = []
    for index in range(first, end):
        tokens = slice(index * chunk_size, (index + 1) * chunk_size)
        layers: list[Any] = source.layers
        pairs = [torch.stack((layer.keys[0, :, tokens], layer.values[0, :, tokens])) for layer in layers]
        chunks.append(torch.stack(pairs))
    return chunks


def fill(chunks: Sequence[torch.Tensor], into: DynamicCache) -> None:
    """Put the chunks of a prefix into an empty cache."""
    if chunks:
        for layer, (k, v) in enumerate(torch.cat(tuple(chunks), dim=3)):
            into.update(k[None], v[None], layer)


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
        fill([self._chunks[key] for key in keys], into)

    def save(self, keys: Sequence[bytes], chunk_size: int, source: DynamicCache, *, first: int = 0) -> None:
        """Keep chunks ``first .. len(keys)`` of what was prefilled, except those that are here."""
        for index, key in enumerate(keys[first:], start=first):
            if key not in self._chunks:
                (self._chunks[key],) = cut(source, chunk_size, index, index + 1)

    def evict(self, key: bytes) -> None:
        """Forget a chunk.

        Raises:
            KeyError: it is not here.
        """
        del self._chunks[key]
