"""Prompts that share heads, and rows that say what they are: whoever reads one can tell that it is the right one."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

CHUNK_SIZE = 16
LAYERS: dict[int, tuple[int, torch.dtype]] = {
    0: (512, torch.bfloat16),
    7: (128, torch.float32),
    -1: (16, torch.float32),
}
"""Hidden dimension and dtype of every layer."""

SPACES: tuple[dict[str, str], ...] = (
    {"model": "chaos", "cache_salt": "a"},
    {"model": "chaos", "cache_salt": "b"},
    {"model": "chaos", "lora_id": "a"},
)
"""Key spaces with the same prompts. All stores in the first name all layers, so there a chunk is of one store."""

WEIGHTS, WEIGHTS_MODEL = len(SPACES), "weights"
"""One more, of a model whose weights change: its rows tell with which revision they were computed."""

ENGINES = ("one", "two")
"""The engines of every node."""

BRANCHES = 16
MAX_TOKENS = 32 * CHUNK_SIZE
PRIVATE_TOKENS = 3 * CHUNK_SIZE
ROW_BYTES = sum(dim * dtype.itemsize for dim, dtype in LAYERS.values())

_SYSTEM_TOKENS = 6 * CHUNK_SIZE
FAMILY_TOKENS = 12 * CHUNK_SIZE + 5  # branches part inside a chunk
FAMILY = 4
_ALIKE_AGAIN = 20 * CHUNK_SIZE + 3
_WEIGHTS = np.random.default_rng(0).integers(0, 1 << 15, MAX_TOKENS) * 2 + 1
_STRIDE = 1024
_FIRST_PRIVATE = 1000
_MAGIC = 201
_FIELDS = 16
_REVISION = 9
_CALL = slice(10, 14)

CLIENT_SHIFT = 20
"""The bits of a call's id behind these are its client's."""

RESUMED = 1 << 17
"""A bit in the ids of calls that go on where a request was preempted: the rows before them are from the cache, and so
maybe another client's."""


def make_prompt(branch: int, num_tokens: int) -> np.ndarray:
    """Token ids: all prompts share a system prompt, those of a family go on together for a while; and far back all have
    the same tokens again, whose rows are others all the same."""
    position = np.arange(num_tokens, dtype=np.int64)
    of_its_own = np.where(position < FAMILY_TOKENS, _STRIDE * (1 + branch // FAMILY), _STRIDE * (100 + branch))
    alike = (position < _SYSTEM_TOKENS) | (position >= _ALIKE_AGAIN)
    return position + np.where(alike, 0, of_its_own)


def prefix_digests(token_ids: np.ndarray) -> np.ndarray:
    """16 bits for each token, of all tokens up to it."""
    return np.cumsum(token_ids * _WEIGHTS[: len(token_ids)]) & 0xFFFF


def private_prompt(number: int) -> np.ndarray:
    """Three chunks of which no other prompt has any."""
    return np.arange(PRIVATE_TOKENS, dtype=np.int64) + _STRIDE * (_FIRST_PRIVATE + number)


def make_rows(
    token_ids: np.ndarray, layer: int, space: int, call_id: Any, *, first: int = 0, revision: int = 0
) -> torch.Tensor:
    """Rows of `token_ids` from token `first` on, as the store with `call_id` (one, or one per row) writes them.

    Every number is an integer below 256, exact in every dtype; the fields are repeated over the whole row, so that a
    row of which only a part was written is no right row of anything.
    """
    ids = token_ids[first:]
    fields = np.zeros((len(ids), _FIELDS), dtype=np.uint8)
    fields[:, 0] = _MAGIC
    fields[:, 1] = layer + 1
    fields[:, 2] = space + 1
    fields[:, 3:7] = ids.astype("<u4")[:, None].view(np.uint8)
    fields[:, 7:9] = np.arange(first, len(token_ids), dtype="<u2")[:, None].view(np.uint8)
    fields[:, _REVISION] = revision
    fields[:, 14:16] = prefix_digests(token_ids)[first:].astype("<u2")[:, None].view(np.uint8)
    fields[:, _CALL] = np.broadcast_to(np.asarray(call_id, dtype="<u4"), len(ids))[:, None].copy().view(np.uint8)
    dim, dtype = LAYERS[layer]
    return torch.from_numpy(np.tile(fields, dim // _FIELDS)).to(dtype)


def call_ids(rows: torch.Tensor) -> np.ndarray:
    """Per row the store that wrote it, as it says itself."""
    # Whatever stands there, also what no store ever wrote, must come out as some bytes.
    said = rows[:, _CALL].float().nan_to_num(0, 0, 0).clamp(0, 255).to(torch.uint8).numpy()
    return np.ascontiguousarray(said).view("<u4")[:, 0]


def find_wrong(
    rows: torch.Tensor, token_ids: np.ndarray, layer: int, space: int, *, start: int = 0, revision: int = 0
) -> str:
    """What is wrong with rows of the tokens from `start` on, in words; "" when every one of them is right."""
    ids = call_ids(rows)
    expected = make_rows(token_ids[: start + len(rows)], layer, space, ids, first=start, revision=revision)
    if rows.shape != expected.shape:
        return f"layer {layer} of space {space}: got shape {list(rows.shape)}, expected {list(expected.shape)}"
    if torch.equal(rows.float(), expected.float()):
        # One client may have given a chunk's rows in several calls; two clients share one only where one has resumed.
        position = np.arange(start, start + len(rows))
        first_of_chunk = np.maximum(position - position % CHUNK_SIZE, start) - start
        clients = ids >> CLIENT_SHIFT
        mixed = np.flatnonzero((clients != clients[first_of_chunk]) & (ids & RESUMED == 0))
        if len(mixed):
            return f"layer {layer} of space {space}: the chunk of token {start + mixed[0]} is of two clients"
        return ""
    wrong = (rows.float() != expected.float()).any(dim=1).nonzero()[:, 0].tolist()
    at = wrong[0]
    return (
        f"layer {layer} of space {space}: {len(wrong)} of {len(rows)} rows are wrong, the first is token {start + at}: "
        f"got {rows[at, :_FIELDS].tolist()}, expected {expected[at, :_FIELDS].tolist()}"
    )


def revision_number(name: str) -> int:
    """What rows tell of a revision: ``""`` before the first change, then ``r<number>``, with ``-<random>`` behind that
    where the service made it up."""
    return int(name.removeprefix("r").partition("-")[0] or 0)


def find_mixture(layers: Sequence[np.ndarray]) -> str:
    """What is wrong with the `call_ids` of several layers where every store has all of them; "" for nothing."""
    if all((ids == layers[0]).all() for ids in layers):
        return ""
    return "the layers of a chunk are of different stores"
