"""From what a caller gives to what a node is asked: validation and arithmetic, shared by the clients and the actor."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any

import torch

from hs_cache.errors import InvalidInputError
from hs_cache.keys import KEY_BYTES, ChunkKeys, MMSpan, TokenDatabase, normalise_token_ids
from hs_cache.messages import LayerSpec
from hs_cache.rows import check_rows, spec_of


@dataclass(frozen=True, slots=True)
class StorePlan:
    """A store that passed every check: which chunks of `keys` it fills, and with what.

    `rows[layer_idx]` starts at token ``first_chunk * chunk_size``. `filtered` is the number of chunks of a store none
    of whose layers the configuration accepts; such a plan has no rows.
    """

    keys: ChunkKeys
    first_chunk: int
    specs: tuple[LayerSpec, ...]
    rows: dict[int, torch.Tensor]
    filtered: int

    @property
    def num_chunks(self) -> int:
        """Chunks that this store can fill."""
        return max(0, len(self.keys) - self.first_chunk)

    @property
    def first_token(self) -> int:
        """The token to which row 0 belongs."""
        return self.first_chunk * self.keys.chunk_size

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return sum(spec.row_bytes for spec in self.specs) * (self.keys.num_tokens - self.first_token)


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


def plan_store(
    database: TokenDatabase,
    accepted_layers: tuple[int, ...] | None,
    token_ids: Any,
    layers: Mapping[int, Any],
    token_offset: Any,
    mm_spans: Sequence[MMSpan] = (),
) -> StorePlan:
    """Check a store completely, and cut its rows to the chunks it can fill.

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
    checked = {
        check_index("layer_idx", layer): check_rows(f"hidden_states of layer {layer}", rows, len(tokens) - offset)
        for layer, rows in layers.items()
    }
    if len(checked) < len(layers):
        raise InvalidInputError(f"layers: got the same layer_idx twice in {list(layers)!r:.60}, expected each once")
    keys = database.chunk_keys(tokens, mm_spans=mm_spans)
    first_chunk = -(-offset // keys.chunk_size)
    skip = first_chunk * keys.chunk_size - offset
    end = max(skip, keys.num_tokens - offset)
    rows = {
        layer: given[skip:end]
        for layer, given in checked.items()
        if accepted_layers is None or layer in accepted_layers
    }
    specs = tuple(spec_of(layer, given) for layer, given in rows.items())
    filtered = 0 if rows else max(0, len(keys) - first_chunk)
    return StorePlan(keys, first_chunk, specs, rows, filtered)
