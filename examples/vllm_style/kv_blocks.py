"""The engine's prefix cache: KV in small blocks, in bounded memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from qwen3_omni.kv_chunks import KVChunks
from transformers import DynamicCache

BLOCK_TOKENS = 16


class KVBlocks:
    """KV of finished and running requests by block key; the least recently used block makes room.

    A block may belong to several chunks of the hidden-state cache: those of prompts that part behind it. So it is kept
    here which, and `save` returns what is incomplete from now on.

    Args:
        capacity: in blocks.
        chunk_tokens: tokens of a chunk of the hidden-state cache, a multiple of BLOCK_TOKENS.
    """

    def __init__(self, capacity: int, chunk_tokens: int) -> None:
        if chunk_tokens % BLOCK_TOKENS:
            raise ValueError(f"chunk_tokens: got {chunk_tokens}, expected a multiple of {BLOCK_TOKENS}")
        self._capacity = capacity
        self._blocks_per_chunk = chunk_tokens // BLOCK_TOKENS
        self._kv = KVChunks()
        self._chunks: OrderedDict[bytes, set[bytes]] = OrderedDict()  # block key → chunk keys; the coldest block first
        self.evicted_total = 0

    def match(self, block_keys: Sequence[bytes]) -> int:
        """How many tokens of a prefix have KV here."""
        count = self._kv.match(block_keys)
        self.touch(block_keys[:count])
        return count * BLOCK_TOKENS

    def touch(self, block_keys: Sequence[bytes]) -> None:
        """Count blocks of a prefix as used just now, its head last: what is evicted first should be a tail."""
        for key in reversed(block_keys):
            if key in self._chunks:
                self._chunks.move_to_end(key)

    def load(self, block_keys: Sequence[bytes], into: DynamicCache) -> None:
        """Fill an empty cache with the blocks of a prefix, all of which must be here."""
        self._kv.load(block_keys, into)

    def save(
        self, block_keys: Sequence[bytes], chunk_keys: Sequence[bytes], first_token: int, source: DynamicCache
    ) -> set[bytes]:
        """Keep what a step has completed.

        Args:
            block_keys: of all whole blocks of the tokens that are computed.
            chunk_keys: of all whole chunks of these.
            first_token: the first that this step computed.
            source: the request's KV.

        Returns:
            Keys of the chunks that lost a block which made room.
        """
        # from the beginning of the chunk that the step went on with: when a chunk is complete, all its blocks are here
        first = first_token // BLOCK_TOKENS // self._blocks_per_chunk * self._blocks_per_chunk
        for index, key in enumerate(block_keys[first:], start=first):
            self._chunks.setdefault(key, set()).update(chunk_keys[index // self._blocks_per_chunk :][:1])
        self._kv.save(block_keys, BLOCK_TOKENS, source, first=first)
        self.touch(block_keys[first:])
        incomplete: set[bytes] = set()
        while len(self._chunks) > self._capacity:
            key, chunks = self._chunks.popitem(last=False)
            self._kv.evict(key)
            self.evicted_total += 1
            incomplete |= chunks
        return incomplete
