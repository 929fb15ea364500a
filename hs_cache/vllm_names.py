"""KV names for vLLM: what a client and an engine's KV events can both compute of a chunk. Needs no vLLM, no ZeroMQ.

A block hash of vLLM's can't be computed by a client: it may depend on ``PYTHONHASHSEED``, and on the hash function that
the engine was started with. The events tell what goes into it, though (`generate_block_hash_extra_keys` in
vllm/v1/core/kv_cache_utils.py, vLLM, Apache-2.0), and a name is a SHA-256 chain over exactly that::

    name_i   = head_i ‖ tail_i, of 12 and 4 bytes
    head_i   = SHA-256( head_{i-1} ‖ u64 nbytes(tokens_i) ‖ tokens_i ‖ u64 nbytes(media_i) ‖ media_i )[:12]
    tail_i   = SHA-256( tail_{i-1} ‖ head_i ‖ starts_i )[:4]
    name_-1  = SHA-256( an item for each of format, model, LoRA name, cache salt, block size as text )[:16]
    tokens_i = the token ids of chunk i as little-endian int64
    media_i  = u64 block ‖ u64 count ‖ the identifiers, for each block of the chunk that overlaps any multimodal item
    starts_i = i64 start of each of those, in the same order, as positions in the prompt
    item     = one tag byte ‖ u64 nbytes(payload) ‖ payload: "s" str, "b" bytes, "i" int as text; so is an identifier

Which facts enter:

* Model, LoRA and salt once, at the start. LoRA is told as ``lora_name``, the salt as an extra key of the first block.
  The model is not told at all: it is what the configuration says of a source. So are revision and shard, and these are
  left out.
* A multimodal item by its identifier, in every *block* that it overlaps. Engines of either form tell this. Where it
  begins is told by newer ones only, so it goes into the tail: an engine that doesn't tell it is compared by heads. Two
  prompts with the same head differ at most in where inside a block the same item begins, and such an engine has one KV
  for both.
* Lengths of items aren't told, and don't enter. An older engine also lists an item in the block that begins where the
  item ends; what it tells can't be told from a longer item, and gives a name that nobody asks for.
"""

import hashlib
import struct
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from hs_cache.config import CacheConfig
from hs_cache.keys import KEY_BYTES, KeySpace, MMSpan, hash_in_steps
from hs_cache.lora import adapter_name

HEAD_BYTES = 12
"""Of a name, how much doesn't depend on where in a block an item begins."""

DEFAULT_BLOCK_SIZE = 16

Item: TypeAlias = tuple[bytes, int | None]
"""A multimodal item as a block sees it: its `identifier`, and the position of its first token, None if untold."""

_FORMAT = "hs_cache.vllm_names/1"
_TOKEN_BYTES = 8


class VLLMNaming:
    """The KV names of one client's prompts.

    Args:
        space: the client's; the adapter's name in its ``lora_id`` is compared with the engine's LoRA name, its
            ``cache_salt`` with the request's.
        block_size: tokens per block of the engine.
    """

    def __init__(self, space: KeySpace, block_size: int = DEFAULT_BLOCK_SIZE) -> None:
        self._block_size = block_size
        self._first = first_name(space.model, adapter_name(space.lora_id), space.cache_salt, block_size)

    def names(
        self,
        known: bytes,
        tokens: npt.NDArray[np.int64],
        mm_spans: Sequence[MMSpan],
        chunk_size: int,
        given: list[int] | None = None,
    ) -> bytes:
        """See `hs_cache.keys.KVNaming.names`. No event names a short chunk."""
        name = known[-KEY_BYTES:] or self._first
        data, chunk_bytes = tokens.view(np.uint8).data, chunk_size * _TOKEN_BYTES
        position = len(known) // KEY_BYTES * chunk_size
        names = []
        at = 0
        for begin in range(0, len(data), chunk_bytes):
            part = data[begin : begin + chunk_bytes]
            end = position + len(part) // _TOKEN_BYTES
            while at < len(mm_spans) and mm_spans[at][0] + mm_spans[at][1] <= position:
                at += 1
            media = self._media(mm_spans, at, position, end)
            name = chunk_name(name, part, media)
            names.append(name)
            position = end
        return b"".join(names)

    def _media(self, spans: Sequence[MMSpan], at: int, begin: int, end: int) -> dict[int, list[Item]]:
        media: dict[int, list[Item]] = {}
        while at < len(spans) and spans[at][0] < end:
            start, length, content = spans[at]
            item = (identifier(content), start)
            first, behind = max(start, begin) - begin, min(start + length, end) - begin
            for block in range(first // self._block_size, -(-behind // self._block_size)):
                media.setdefault(block, []).append(item)
            at += 1
        return media


def vllm_naming(config: CacheConfig, space: KeySpace) -> VLLMNaming:
    """The naming for a client of a service whose KV source is ``vllm_events``.

    Where no source of the client's model is configured its names are nobody's, and its chunks *unknown*.
    """
    sizes = [source.block_size for source in config.kv_events if source.model == space.model]
    return VLLMNaming(space, *sizes[:1])


def first_name(model: str, lora_name: str, cache_salt: str, block_size: int) -> bytes:
    """What the chain of names begins with; "" for no LoRA and for no salt."""
    parts = (_FORMAT, model, lora_name, cache_salt, str(block_size))
    return hashlib.sha256(b"".join(identifier(part) for part in parts)).digest()[:KEY_BYTES]


def chunk_name(previous: bytes, tokens: bytes | memoryview, media: Mapping[int, Sequence[Item]]) -> bytes:
    """The name of a chunk, or only its head where a start is untold, here or in `previous`.

    Args:
        previous: name or head of the chunk before, or a `first_name`.
        tokens: little-endian int64.
        media: by block of the chunk the items that overlap it, in the order of the prompt.
    """
    listed = b"".join(
        struct.pack("<QQ", block, len(media[block])) + b"".join(item[0] for item in media[block])
        for block in sorted(media)
        if media[block]
    )
    digest = hashlib.sha256(previous[:HEAD_BYTES] + struct.pack("<Q", len(tokens)))
    hash_in_steps(digest, tokens)
    digest.update(struct.pack("<Q", len(listed)) + listed)
    head = digest.digest()[:HEAD_BYTES]
    starts = [start for block in sorted(media) for _, start in media[block]]
    if len(previous) == HEAD_BYTES or None in starts:
        return head
    tail = hashlib.sha256(previous[HEAD_BYTES:] + head + struct.pack(f"<{len(starts)}q", *starts))
    return head + tail.digest()[: KEY_BYTES - HEAD_BYTES]


def identifier(content: str | bytes | int) -> bytes:
    """A content hash with its type and at full width. Engines have strings; others match none of theirs."""
    if isinstance(content, str):
        return _item(b"s", content.encode("utf-8", "surrogatepass"))
    if isinstance(content, bytes):
        return _item(b"b", content)
    return _item(b"i", str(int(content)).encode())


def _item(tag: bytes, payload: bytes) -> bytes:
    return tag + struct.pack("<Q", len(payload)) + payload
