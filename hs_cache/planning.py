"""From what a caller gives to what a node is asked: validation and arithmetic, shared by the clients and the actor."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from hs_cache.errors import InvalidInputError
from hs_cache.keys import KEY_BYTES, ChunkKeys, MMSpan, normalise_token_ids
from hs_cache.messages import LayerSpec
from hs_cache.rows import check_rows, spec_of

Tokens: TypeAlias = npt.NDArray[np.int64]
"""Token ids ``[n]``, as `hs_cache.keys.normalise_token_ids` gives them."""


@dataclass(frozen=True, slots=True)
class Step:
    """Rows that passed every check, and what they belong to.

    `tokens` is the whole prefix; ``rows[layer_idx]`` starts at token `first`, and may end before the last one.
    `mm_spans` are those of the whole prompt, as far as they are known.
    """

    tokens: Tokens
    first: int
    rows: Mapping[int, torch.Tensor]
    mm_spans: tuple[MMSpan, ...] = ()

    @property
    def specs(self) -> tuple[LayerSpec, ...]:
        """Of the layers, in order."""
        return tuple(spec_of(layer, given) for layer, given in self.rows.items())

    def edges(self, size: int) -> list[int]:
        """Positions of the chunks of `size` tokens of which the step has only a part, in order."""
        return sorted({end // size for end in (self.first, len(self.tokens)) if end % size})

    def of_chunk(self, position: int, size: int) -> tuple[Tokens, frozenset[MMSpan]]:
        """The tokens of one chunk, as far as they are known, and the spans that overlap it."""
        first, end = position * size, (position + 1) * size
        spans = ((start, length, content) for start, length, content in self.mm_spans)
        return self.tokens[first:end], frozenset(span for span in spans if span[0] < end and span[0] + span[1] > first)

    def rows_of(self, position: int, size: int) -> tuple[int, dict[int, torch.Tensor]]:
        """The step's rows of one chunk, and where in the chunk they start."""
        first = max(position * size, self.first)
        begin, end = first - self.first, (position + 1) * size - self.first
        return first - position * size, {layer: given[begin:end] for layer, given in self.rows.items()}


def check_index(name: str, value: Any) -> int:
    """`value` as an int; bools and everything that is no integer are an `InvalidInputError` that names the argument."""
    if not isinstance(value, bool):
        try:
            return index(value)
        except TypeError:
            pass
    raise InvalidInputError(f"{name}: got {value!r}, expected an int")


def check_seconds(name: str, value: Any) -> float:
    """`value` as a finite number of seconds, 0 or more; anything else is an `InvalidInputError` that names it."""
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= sys.float_info.max:
        return float(value)
    raise InvalidInputError(f"{name}: got {value!r}, expected a number of seconds, 0 or more")


def check_layers(layers: Any) -> tuple[int, ...]:
    """The layers of a retrieve: one int or a non-empty sequence of ints, without the repeated ones."""
    if isinstance(layers, str | bytes | Mapping) or not isinstance(layers, Iterable) or getattr(layers, "ndim", 1) == 0:
        layers = (layers,)
    checked = tuple(dict.fromkeys(check_index("layers", layer) for layer in layers))
    if not checked:
        raise InvalidInputError("layers: got none, expected at least one layer_idx")
    return checked


def check_key(key: Any) -> bytes:
    """One chunk key; anything else than 16 bytes is an `InvalidInputError`."""
    if isinstance(key, bytes) and len(key) == KEY_BYTES:
        return key
    raise InvalidInputError(f"key: got {key!r:.60}, expected {KEY_BYTES} bytes")


def check_keys(name: str, keys: Any) -> bytes:
    """Chunk keys as one blob: from a blob (a single key is one), from `ChunkKeys`, or from an iterable of keys."""
    if isinstance(keys, ChunkKeys):
        return keys.blob
    if not isinstance(keys, bytes) and isinstance(keys, Iterable):
        parts = list(keys)
        if not all(isinstance(part, bytes) and len(part) == KEY_BYTES for part in parts):
            raise InvalidInputError(f"{name}: got {keys!r:.60}, expected chunk keys of {KEY_BYTES} bytes each")
        keys = b"".join(parts)
    if not isinstance(keys, bytes) or len(keys) % KEY_BYTES:
        raise InvalidInputError(f"{name}: got {keys!r:.60}, expected bytes in multiples of {KEY_BYTES}")
    return keys


def check_store(token_ids: Any, layers: Mapping[int, Any], token_offset: Any, mm_spans: Sequence[MMSpan] = ()) -> Step:
    """Check a store completely, but for what `hs_cache.keys.TokenDatabase.chunk_keys` checks.

    Raises:
        InvalidInputError: anything is wrong with any argument; see `hs_cache.HiddenStateCache.store`.
    """
    tokens = normalise_token_ids(token_ids)
    offset = check_index("token_offset", token_offset)
    if not 0 <= offset <= len(tokens):
        raise InvalidInputError(f"token_offset: got {offset}, expected 0 to {len(tokens)} (number of token_ids)")
    if not isinstance(layers, Mapping) or not layers:
        got = "an empty mapping" if isinstance(layers, Mapping) else type(layers).__name__
        raise InvalidInputError(f"layers: got {got}, expected {{layer_idx: rows}}")
    return Step(tokens, offset, check_layer_rows(layers, len(tokens) - offset), check_spans(mm_spans))


def check_layer_rows(layers: Mapping[int, Any], num_rows: int, *, at_most: bool = False) -> dict[int, torch.Tensor]:
    """Rows of some layers, `num_rows` each; with `at_most` they may be fewer.

    Raises:
        InvalidInputError: any of them is not what it should be.
    """
    checked = {
        check_index("layer_idx", layer): check_rows(f"hidden_states of layer {layer}", rows, num_rows, at_most=at_most)
        for layer, rows in layers.items()
    }
    if len(checked) < len(layers):
        raise InvalidInputError(f"layers: got the same layer_idx twice in {list(layers)!r:.60}, expected each once")
    return checked


def check_spans(mm_spans: Any) -> tuple[MMSpan, ...]:
    """The spans as hashable tuples; what is none is left for `hs_cache.keys.TokenDatabase.chunk_keys` to refuse."""
    spans = tuple(mm_spans) if isinstance(mm_spans, Iterable) else (mm_spans,)
    return tuple(tuple(span) if isinstance(span, list) else span for span in spans)
