"""The order in which chunks are given up: least recently used, tails before heads.

`PrefixLRU` knows keys and which key each continues; it knows nothing of rows, memory or holds. Its one promise: of two
listed chunks, of which one continues the other, the tail is always colder. So whoever takes the coldest chunk takes the
end of some prefix, and what stays is always a usable prefix. Chunks behind a hole can't be served: they go to the cold
end when the hole is made.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence


class PrefixLRU:
    """Recency order over chunk keys. Not thread-safe.

    Every operation is O(chunks named), but `demote`, and `remove` where it makes a hole, are O(subtree).
    """

    def __init__(self) -> None:
        self._parents: OrderedDict[bytes, bytes | None] = OrderedDict()  # coldest first
        self._children: dict[bytes, dict[bytes, None]] = {}

    def __contains__(self, key: bytes) -> bool:
        return key in self._parents

    def __len__(self) -> int:
        return len(self._parents)

    def add(self, key: bytes, parent: bytes | None) -> None:
        """List `key`, which continues `parent` (None for the first chunk of a prompt), as the warmest.

        `touch` or `demote` must follow before anything is evicted, because a chunk listed already may continue it.
        """
        self._parents[key] = parent
        if parent is not None:
            self._children.setdefault(parent, {})[key] = None

    def remove(self, key: bytes) -> None:
        """Forget `key`. What continues it is now behind a hole, and becomes the coldest."""
        parent = self._parents.pop(key)
        if parent is not None:
            siblings = self._children[parent]
            del siblings[key]
            if not siblings:
                del self._children[parent]
        if parent is not None and parent not in self._parents:
            return  # behind a hole already, so all of it has been demoted: dropping a prompt head first stays O(chunks)
        for child in list(self._children.get(key, ())):
            self.demote(child)

    def touch(self, prefix: Sequence[bytes]) -> None:
        """Make a prefix the warmest, its head warmer than its tail; `prefix` starts at chunk 0 and has no hole."""
        for key in reversed(prefix):
            self._parents.move_to_end(key)

    def demote(self, key: bytes) -> None:
        """Make `key`, which is behind a hole, and everything that continues it the coldest, tails coldest of all."""
        pending = [key]
        while pending:
            key = pending.pop()
            self._parents.move_to_end(key, last=False)
            pending.extend(self._children.get(key, ()))

    def parent(self, key: bytes) -> bytes | None:
        """The key that `key` continues, listed or not; None for the first chunk of a prompt."""
        return self._parents[key]

    def coldest_first(self) -> Iterator[bytes]:
        """All keys in the order in which to evict them. Don't change the order while iterating."""
        return iter(self._parents)

    def check(self) -> None:
        """Audits the promise and the bookkeeping; raises AssertionError."""
        rank = {key: position for position, key in enumerate(self._parents)}
        edges = {(parent, key) for key, parent in self._parents.items() if parent is not None}
        assert edges == {(p, c) for p, cs in self._children.items() for c in cs}, "children don't match parents"
        assert all(self._children.values()), "a key is kept for its children but has none"
        for parent, key in edges:
            assert parent not in rank or rank[parent] > rank[key], f"{key.hex()} is warmer than what it continues"
