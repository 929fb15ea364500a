"""Which chunks one vLLM engine holds KV of, made of its KV events: a table of blocks, and of the chunks they add up to.

Pure logic; nothing here waits or reads. What the table can't be sure of is *unknown*:

* A chunk is *present* while all of its blocks are there, *absent* once an event said that one of them is gone, else
  unknown. Nothing is absent because it was never heard of.
* A block is there while any medium has it. Engines tell a block once for each copy, but don't all tell of each copy's
  end: where a copy of several was removed, or one that was never told of, whether the others are still there is unknown
  until the last one was removed, or a new one came.
* Of several KV cache groups only those of full attention decide (`FULL_ATTENTION`), and a block must be there in all of
  these. A sliding window gives blocks up while they are still of use, so its groups are not listened to.
* A hash stands for one content, as it does in the engine. An event without tokens, or without what else made its blocks
  (`extra_keys`; an offloading tier's), counts for blocks that are known.
* What can't be named is rejected: nothing is known of those blocks, nor of what continues them, and an older absence of
  them is out of date. Of a block that is known it may be another copy. They are never taken for something else.
* A tier whose blocks are larger than the engine's tells of the last one of each only, so the others are absent as soon
  as the engine gives them up.

Blocks share a `_Copies` with all of which the same was told. That a tier was cleared is said to a few of these, however
many blocks there are, and chunks are counted there, by their last blocks, which engines give up first.
"""

import logging
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from hs_cache.errors import InvalidInputError
from hs_cache.kv_presence import Presence
from hs_cache.vllm_names import HEAD_BYTES, Item, chunk_name, first_name, identifier
from hs_cache.vllm_wire import Batch, BlockHash, Removed, Stored

logger = logging.getLogger(__name__)

FULL_ATTENTION = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})
"""``kv_cache_spec_kind`` (vllm/v1/kv_cache_interface.py) of the groups that decide; None is untold."""

_TOKEN_BYTES = 8
_PAIR = 2
_SWEPT = 2
"""How many blocks that a cleared tier had go for each one that is stored: faster than these come."""


@dataclass(frozen=True)
class TableStatistics:
    """A `BlockTable` at one moment: chunks by the state of their last block, and what it was told."""

    present: int
    absent: int
    unknown: int
    blocks: int
    complete: bool
    events_total: int
    ignored_total: int
    rejected_blocks_total: int


_Copy: TypeAlias = tuple[int | None, str | None]
"""Group and medium; None matches any."""

_Told: TypeAlias = tuple[tuple[_Copy, int], ...]
"""Of a block by copy: how many, 0 after the last was removed, negative where there may be fewer."""


@dataclass(slots=True, eq=False)
class _Copies:
    """What was told of some blocks, the same of each."""

    told: _Told
    state: Presence = Presence.UNKNOWN  # what `told` adds up to
    gone: bool = False  # no medium has these blocks
    changed: int = 0  # for all of them at once
    blocks: int = 0
    ends: int = 0  # blocks that are the last of a chunk


@dataclass(slots=True, eq=False)
class _Block:
    """One block that some medium has, or may have."""

    parent: BlockHash | None
    index: int
    tokens: bytes
    items: tuple[Item, ...]
    lora: str
    before: bytes  # the name of the chunk before its own
    copies: _Copies
    name: bytes = b""  # of the chunk that it completes
    changed: int = 0

    def since(self) -> int:
        """When its state was told."""
        return max(self.changed, self.copies.changed)


@dataclass(slots=True, eq=False)
class _Chunk:
    """A listed chunk: its blocks, or the last one since that went at `gone`; `noted` is when rows were last stored."""

    blocks: tuple[BlockHash, ...]
    gone: int = 0
    noted: int = 0


class BlockTable:
    """The blocks of one engine, or of one of its data-parallel ranks. Thread-safe.

    Args:
        source: for the log.
        model: the engine's, as clients call it.
        chunk_size: tokens per chunk, a multiple of `block_size`.
        block_size: tokens per block.
        capacity: chunks remembered. Those longest not told of nor asked for are forgotten, and unknown from then on.
        extra_keys: ``auto``, ``offsets`` or ``none``, see `hs_cache.config.KVEventsSource`.
    """

    def __init__(
        self, source: str, *, model: str, chunk_size: int, block_size: int, capacity: int, extra_keys: str = "auto"
    ) -> None:
        if chunk_size % block_size:
            raise InvalidInputError(f"chunk_size: got {chunk_size}, expected a multiple of block_size {block_size}")
        self._source, self._model = source, model
        self._block_size = block_size
        self._blocks_per_chunk = chunk_size // block_size
        self._capacity = capacity
        self._extra_keys = extra_keys
        self._tells_offsets = extra_keys == "offsets"
        self._lock = threading.Lock()
        self._groups: set[int | None] = set()
        self._other_groups: set[int | None] = set()
        self._suspended = True
        self._now = 0
        self._events = self._ignored = self._rejected = 0
        self._warned: set[str] = set()
        self._forget()

    def begin(self) -> None:
        """An engine that has stored nothing yet: from here on everything it has is known."""
        with self._lock:
            self._complete, self._suspended = True, False
            self._tells_offsets = self._extra_keys == "offsets"
            self._groups.clear()
            self._other_groups.clear()

    def resume(self) -> None:
        """What is known counts (again)."""
        with self._lock:
            self._suspended = False

    def suspend(self) -> None:
        """Everything is unknown, until `resume`, `begin` or `forget`."""
        with self._lock:
            self._suspended = True

    def forget(self) -> None:
        """Everything that was known is unknown; new events count."""
        with self._lock:
            self._forget()
            self._suspended = False

    def clear(self) -> None:
        """The engine has nothing any more: all that is listed is absent."""
        with self._lock:
            self._now += 1
            self._clear(None)

    def apply(self, batch: Batch) -> None:
        """Take in what happened, in order; atomic for those who ask."""
        with self._lock:
            self._ignored += batch.ignored
            if batch.ignored:
                self._warn("types", "sends events of types that are not known here; they are ignored")
            for event in batch.events:
                self._now += 1
                self._events += 1
                if isinstance(event, Stored):
                    self._store(event)
                elif isinstance(event, Removed):
                    self._remove(event)
                else:
                    self._clear(event.medium)

    def note_stored(self, names: Iterable[bytes]) -> None:
        """Rows of these chunks are being stored: what was heard of their absence so far is out of date."""
        with self._lock:
            for name in names:
                chunk = self._find(name)
                if chunk is not None:
                    chunk.noted = self._now

    def presence(self, names: Sequence[bytes]) -> list[Presence | None]:
        """One answer per name; None for what this engine never stored, where all that it ever stored is known.

        What is asked for is in use, and so not forgotten next, its head last.
        """
        with self._lock:
            if self._suspended:
                return [Presence.UNKNOWN] * len(names)
            for name in reversed(names):
                self._touch(name)
            return [self._answer(name) for name in names]

    def stats(self) -> TableStatistics:
        """Counts, under the lock for a moment, however many there are."""
        with self._lock:
            present = sum(copies.ends for copies in self._kinds if copies.state is Presence.PRESENT)
            absent = sum(copies.ends for copies in self._kinds if copies.state is Presence.ABSENT) + len(self._gone)
            if self._suspended:
                present = absent = 0
            return TableStatistics(
                present=present,
                absent=absent,
                unknown=len(self._chunks) - present - absent,
                blocks=sum(copies.blocks for copies in self._kinds if not copies.gone),
                complete=self._complete,
                events_total=self._events,
                ignored_total=self._ignored,
                rejected_blocks_total=self._rejected,
            )

    def _forget(self) -> None:
        self._blocks: OrderedDict[BlockHash, _Block] = OrderedDict()
        self._removed: OrderedDict[BlockHash, int] = OrderedDict()  # other than last blocks, and when they went
        self._chunks: OrderedDict[bytes, _Chunk] = OrderedDict()
        self._gone: dict[BlockHash, bytes] = {}  # last blocks that went, and the names of their chunks
        self._kinds: set[_Copies] = set()
        self._by_told: dict[_Told, _Copies] = {}
        self._complete = False

    def _find(self, name: bytes) -> _Chunk | None:
        # A chunk with items whose starts weren't told is listed by its head.
        return self._chunks.get(name) or self._chunks.get(name[:HEAD_BYTES])

    def _touch(self, name: bytes) -> None:
        key = name if name in self._chunks else name[:HEAD_BYTES]
        chunk = self._chunks.get(key)
        if chunk is not None:
            self._chunks.move_to_end(key)
            for block in reversed(chunk.blocks):
                if block in self._blocks:
                    self._blocks.move_to_end(block)

    def _answer(self, name: bytes) -> Presence | None:
        chunk = self._find(name)
        if chunk is None:
            return None if self._complete else Presence.UNKNOWN
        return self._state(chunk)

    def _state(self, chunk: _Chunk) -> Presence:
        if chunk.gone:
            return Presence.ABSENT if chunk.gone > chunk.noted else Presence.UNKNOWN
        answer = Presence.PRESENT
        for block_hash in chunk.blocks:
            block = self._blocks.get(block_hash)
            if block is not None:
                state, since = block.copies.state, block.since()
            else:
                since = self._removed.get(block_hash, 0)
                state = Presence.ABSENT if since else Presence.UNKNOWN
            if state is Presence.ABSENT:
                # Older than the last store of rows, it tells of KV that has been written anew since.
                if since > chunk.noted:
                    return Presence.ABSENT
                answer = Presence.UNKNOWN
            elif state is Presence.UNKNOWN:
                answer = Presence.UNKNOWN
        return answer

    def _store(self, event: Stored) -> None:
        if event.kind not in FULL_ATTENTION:
            self._other_groups.add(event.group)
            return
        if not event.tokens:
            for block_hash in event.hashes:
                self._take(block_hash, self._live(block_hash), event)
            return
        if event.group not in self._groups:
            self._groups.add(event.group)
            for copies in self._kinds:
                copies.state = self._added_up(copies.told)
        block_bytes = self._block_size * _TOKEN_BYTES
        if event.block_size != self._block_size:
            self._warn("size", f"has blocks of {event.block_size} tokens, not of {self._block_size} as configured")
        whole = event.block_size == self._block_size and len(event.tokens) == len(event.hashes) * block_bytes
        extra_keys = self._told_extra_keys(event)
        parent = event.parent
        for i, block_hash in enumerate(event.hashes):
            block = None
            if whole:
                tokens = event.tokens[i * block_bytes : (i + 1) * block_bytes]
                if event.extra_keys is None:
                    block = self._same_block(block_hash, parent, tokens, event)
                if block is None and extra_keys is not None:
                    block = self._named_block(block_hash, parent, tokens, extra_keys[i], event.lora_name or "")
            self._take(block_hash, block, event)
            parent = block_hash

    def _told_extra_keys(self, event: Stored) -> Sequence[Sequence[Any] | None] | None:
        """One entry per block; None where it can't be known what else made these blocks."""
        if event.lora_id is not None and not event.lora_name:
            self._warn("lora", "doesn't tell the names of its LoRA adapters, so KV of their requests is unknown")
            return None
        if event.extra_keys is not None:
            return event.extra_keys if len(event.extra_keys) == len(event.hashes) else None
        if self._extra_keys != "none":
            return None
        return [None if event.lora_name is None else (event.lora_name,)] * len(event.hashes)

    def _same_block(
        self, block_hash: BlockHash, parent: BlockHash | None, tokens: bytes, event: Stored
    ) -> _Block | None:
        """A known block that is told of once more, without its extra keys."""
        known = self._live(block_hash)
        if known is None:
            if self._extra_keys != "none":
                self._warn(
                    "extra keys",
                    "tells of blocks without what prompts differ in besides tokens (extra_keys), so their KV is "
                    "unknown. If it serves neither salts nor multimodal prompts, say extra_keys: none for it in "
                    "kv_events",
                )
            return None
        agrees = (known.parent, known.tokens) == (parent, tokens) and event.lora_name in (None, known.lora)
        return known if agrees else None

    def _named_block(
        self, block_hash: BlockHash, parent: BlockHash | None, tokens: bytes, extra: Sequence[Any] | None, lora: str
    ) -> _Block | None:
        """The known block, or a new one; None if it can't be named."""
        known, above = self._live(block_hash), None if parent is None else self._live(parent)
        if known is not None:
            index = known.index
        elif parent is None:
            index = 0
        elif above is not None and above.lora == lora:
            index = above.index + 1
        else:
            return None
        read = self._read_extra(extra, lora, index)
        if read is None:
            return None
        items, salt = read
        before = self._before(above, lora, salt) if known is None or parent is None else known.before
        if known is None:
            block = _Block(parent, index, tokens, items, lora, before, self._copies(()))
            if (index + 1) % self._blocks_per_chunk == 0 and not self._list_chunk(block_hash, block):
                return None
            self._blocks[block_hash] = block
            self._removed.pop(block_hash, None)
            self._count(block, 1)
            return block
        told_before = (known.parent, known.tokens, known.items, known.lora, known.before)
        if told_before == (parent, tokens, items, lora, before):
            return known
        self._warn("contents", "tells of one block hash with two contents, so nothing that it told counts any more")
        self._forget()
        return None

    def _before(self, above: _Block | None, lora: str, salt: str) -> bytes:
        """The name of the chunk before that of a block."""
        if above is None:
            return first_name(self._model, lora, salt, self._block_size)
        return above.name or above.before

    def _read_extra(self, extra: Sequence[Any] | None, lora: str, index: int) -> tuple[tuple[Item, ...], str] | None:
        """The multimodal items of a block and the salt; None for what can't be told.

        The order is that of `generate_block_hash_extra_keys`: LoRA name, items, salt (of the first block only), and a
        hash of prompt embeddings, which have no tokens that a client could name them by.
        """
        entries = list(extra or ())
        if lora:
            if entries[:1] != [lora]:
                return None
            entries = entries[1:]
        items: list[Item] = []
        texts: list[str] = []
        first = index * self._block_size
        for entry in entries:
            if isinstance(entry, str):
                texts.append(entry)
            elif _is_pair(entry) and not texts and 0 <= first + entry[1] < first + self._block_size:
                items.append((identifier(entry[0]), first + entry[1]))
            else:
                return None
        self._tells_offsets |= bool(items)
        if not texts:
            return tuple(items), ""
        if self._tells_offsets:
            return (tuple(items), texts[0]) if index == 0 and len(texts) == 1 else None
        if index == 0:
            self._warn(
                "first block",
                "has a prompt with a salt, or with an item in its first block, and doesn't tell which, so its KV is "
                "unknown. If its events tell offsets of items, say extra_keys: offsets for it in kv_events",
            )
            return None
        return tuple((identifier(text), None) for text in texts), ""

    def _list_chunk(self, block_hash: BlockHash, last: _Block) -> bool:
        """List the chunk that ends with `last`; whether all of it is known."""
        hashes, blocks = [block_hash], [last]
        while len(blocks) < self._blocks_per_chunk:
            parent = blocks[-1].parent
            above = None if parent is None else self._live(parent)
            if parent is None or above is None:
                return False
            hashes.append(parent)
            blocks.append(above)
        hashes.reverse()
        blocks.reverse()
        media = {at: block.items for at, block in enumerate(blocks) if block.items}
        last.name = chunk_name(last.before, b"".join(block.tokens for block in blocks), media)
        older = self._chunks.get(last.name)
        if older is not None:
            self._unlist(last.name)
        self._chunks[last.name] = _Chunk(tuple(hashes), noted=0 if older is None else older.noted)
        return True

    def _unlist(self, name: bytes) -> None:
        """Forget a chunk, and its last block with it."""
        last = self._chunks.pop(name).blocks[-1]
        self._gone.pop(last, None)
        block = self._blocks.pop(last, None)
        if block is not None:
            self._count(block, -1)

    def _live(self, block_hash: BlockHash) -> _Block | None:
        """A block that some medium has, or may have."""
        block = self._blocks.get(block_hash)
        if block is not None and block.copies.gone:
            self._bury(block_hash, block)
            return None
        return block

    def _bury(self, block_hash: BlockHash, block: _Block) -> None:
        """Of a block that no medium has only that is known, until it is told anew."""
        del self._blocks[block_hash]
        self._count(block, -1)
        if block.name:
            # Engines give up tails first. When the last block is stored again, the chunk is listed with all of them.
            chunk = self._chunks[block.name]
            chunk.blocks, chunk.gone = (block_hash,), block.since()
            self._gone[block_hash] = block.name
            return
        self._removed[block_hash] = block.since()
        if len(self._removed) > self._capacity:
            self._removed.popitem(last=False)  # of a chunk that is still listed with it nothing is known then

    def _take(self, block_hash: BlockHash, block: _Block | None, event: Stored) -> None:
        """One more copy, for certain if it is told of `block`; otherwise it is rejected."""
        sure = block is not None
        if block is None:
            self._rejected += 1
            self._complete = False
            block = self._live(block_hash)
        if block is None:
            self._removed.pop(block_hash, None)
            if block_hash in self._gone:
                self._unlist(self._gone[block_hash])
            return
        copy, told = (event.group, event.medium), dict(block.copies.told)
        count = abs(told.get(copy, 0)) + 1
        self._tell(block, told | {copy: count if sure else -count})
        self._blocks.move_to_end(block_hash)
        if block.name:
            self._chunks.move_to_end(block.name)
        self._limit()

    def _remove(self, event: Removed) -> None:
        if event.group is not None and event.group in self._other_groups - self._groups:
            return
        for block_hash in event.hashes:
            block = self._live(block_hash)
            if block is None:
                continue
            told = dict(block.copies.told)
            meant = [copy for copy in told if _same(copy[0], event.group) and _same(copy[1], event.medium)]
            left = {copy: 1 - abs(told[copy]) if told[copy] else 0 for copy in meant}
            # A copy that was never told of: there may be more, or it was one of these by another name.
            self._tell(block, told | left if meant else {copy: -abs(count) for copy, count in told.items()})
            if block.copies.gone:
                self._bury(block_hash, block)
            else:
                self._blocks.move_to_end(block_hash)

    def _clear(self, medium: str | None) -> None:
        """One tier was cleared, or None: all of them."""
        for copies in self._kinds:
            told = tuple((copy, _after_clear(copy, count, medium)) for copy, count in copies.told)
            if told != copies.told:
                if self._by_told.get(copies.told) is copies:
                    del self._by_told[copies.told]
                self._set(copies, told)
                copies.changed = self._now
        if medium is None:
            self._complete = True

    def _copies(self, told: _Told) -> _Copies:
        copies = self._by_told.get(told)
        if copies is None:
            copies = self._by_told[told] = _Copies(told)
            self._kinds.add(copies)
            self._set(copies, told)
        return copies

    def _set(self, copies: _Copies, told: _Told) -> None:
        copies.told = told
        copies.gone = not any(count for _, count in told)
        copies.state = self._added_up(told)

    def _added_up(self, told: _Told) -> Presence:
        if not any(count for _, count in told):
            return Presence.ABSENT
        answer = Presence.PRESENT
        for group in self._groups:
            counts = [count for (of, _), count in told if _same(of, group)]
            if counts and not any(counts):
                return Presence.ABSENT
            if not any(count > 0 for count in counts):
                answer = Presence.UNKNOWN
        return answer

    def _tell(self, block: _Block, told: dict[_Copy, int]) -> None:
        copies = self._copies(tuple(told.items()))
        self._count(block, -1)
        block.copies, block.changed = copies, self._now
        self._count(block, 1)

    def _count(self, block: _Block, by: int) -> None:
        """A block comes to what it shares with others, or goes."""
        copies = block.copies
        copies.blocks += by
        if block.name:
            copies.ends += by
        if not copies.blocks:
            self._kinds.discard(copies)
            if self._by_told.get(copies.told) is copies:
                del self._by_told[copies.told]

    def _limit(self) -> None:
        while len(self._chunks) > self._capacity:
            self._unlist(next(iter(self._chunks)))
            self._complete = False
        while len(self._blocks) > self._capacity * self._blocks_per_chunk:
            _, block = self._blocks.popitem(last=False)
            self._count(block, -1)
            if block.name:
                del self._chunks[block.name]
            self._complete = False
        for _ in range(_SWEPT):
            oldest = next(iter(self._blocks), None)
            if oldest is None or self._live(oldest) is not None:
                break

    def _warn(self, about: str, text: str) -> None:
        if about not in self._warned:
            self._warned.add(about)
            logger.warning("KV events: the engine at %s %s", self._source, text)


def _same(one: int | str | None, other: int | str | None) -> bool:
    return one is None or other is None or one == other


def _after_clear(copy: _Copy, count: int, medium: str | None) -> int:
    if medium is None or copy[1] == medium:
        return 0
    return -abs(count) if copy[1] is None else count


def _is_pair(entry: object) -> bool:
    return (
        isinstance(entry, list | tuple) and len(entry) == _PAIR and isinstance(entry[0], str) and type(entry[1]) is int
    )
