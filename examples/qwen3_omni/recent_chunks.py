"""What an engine keeps of prefixes, KV above all, in bounded memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class RecentChunks(Generic[T]):
    """Chunks by chunk key; the least recently used make room, of a prefix its tail first.

    Args:
        capacity: of all chunks, in what `size_of` gives.
        size_of: a chunk's size; by default each is 1.
    """

    def __init__(self, capacity: int, size_of: Callable[[T], int] = lambda _: 1) -> None:
        self._capacity = capacity
        self._size_of = size_of
        self._chunks: OrderedDict[bytes, T] = OrderedDict()  # the coldest first
        self.size = 0

    def load(self, keys: Sequence[bytes]) -> list[T]:
        """The chunks of a prefix up to the first that isn't here."""
        found = []
        for key in keys:
            if key not in self._chunks:
                break
            found.append(self._chunks[key])
        self._touch(keys[: len(found)])
        return found

    def save(self, keys: Sequence[bytes], make: Callable[[int], T]) -> list[bytes]:
        """Keep the chunks of a prefix; returns the keys of those that made room, its own tail perhaps.

        Args:
            keys: of consecutive chunks.
            make: gives the chunk with an index in `keys`; called for those that aren't here.
        """
        for index, key in enumerate(keys):
            if key not in self._chunks:
                self._chunks[key] = make(index)
                self.size += self._size_of(self._chunks[key])
        self._touch(keys)
        evicted = []
        while self.size > self._capacity:
            key, chunk = self._chunks.popitem(last=False)
            self.size -= self._size_of(chunk)
            evicted.append(key)
        return evicted

    def _touch(self, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):  # the head is the last to go
            self._chunks.move_to_end(key)
