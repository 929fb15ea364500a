"""Which chunks one vLLM engine holds KV of, made of its KV events: a table of blocks, and of the chunks they add up to.

Pure logic; nothing here waits or reads. What the table can't be sure of is *unknown*:

* A chunk is *present* while all of its blocks are there, *absent* once an event said that one of them is gone, else
  unknown. Nothing is absent because it was never heard of.
* A block is there while any medium has it. Engines tell a block once for each copy, but don't all tell of each copy's
  end: where a copy of several was removed, whether the others are still there is unknown until the last one was, or a
  new one came.
* Of several KV cache groups only those of full attention decide (`FULL_ATTENTION`), and a block must be there in all of
  these. A sliding window gives blocks up while they are still of use, so its groups are not listened to.
* What can't be named, or contradicts what was told before, is rejected: nothing is known of those blocks, nor of those
  that continue them. They are never taken for something else.
* An event without tokens (an offloading tier's) counts for blocks that are known. A tier whose blocks are larger than
  the engine's tells of the last one of each only, so the others are absent as soon as the engine gives them up.
"""

import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from hs_cache.kv_presence import Presence
from hs_cache.vllm_names import HEAD_BYTES, Item, chunk_name, first_name, identifier
from hs_cache.vllm_wire import Batch, BlockHash, Cleared, Removed, Stored

logger = logging.getLogger(__name__)

FULL_ATTENTION = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})
"""``kv_cache_spec_kind`` (vllm/v1/kv_cache_interface.py) of the groups that decide; None is untold."""

_TOKEN_BYTES = 8
_PAIR = 2
_MAX_SHARED = 1024


@dataclass(frozen=True)
class TableStatistics:
    """A `BlockTable` at one moment: chunks by state, and what it was told."""

    present: int
    absent: int
    unknown: int
    blocks: int
    complete: bool
    events_total: int
    ignored_total: int
    rejected_blocks_total: int


_Copies: TypeAlias = tuple[tuple[tuple[int, str | None], int], ...]
"""Of a block by (group, medium): how many, 0 after the last was removed, negative where there may be fewer."""


@dataclass(slots=True, eq=False)
class _Block:
    """One block that some medium has, or may have."""

    parent: BlockHash | None
    index: int
    tokens: bytes
    items: tuple[Item, ...]
    lora: str
    before: bytes  # the name of the chunk before its own
    name: bytes = b""  # of the chunk that it completes
    copies: _Copies = ()
    state: Presence = Presence.UNKNOWN  # what `copies` add up to
    changed: int = 0
    in_doubt: bool = False


@dataclass(slots=True, eq=False)
class _Chunk:
    """A listed chunk: its blocks, or none since it went at `gone`; `noted` is when rows were last stored for it."""

    blocks: tuple[BlockHash, ...]
    gone: int = 0
    noted: int = 0


class BlockTable:
    """The blocks of one engine, or of one of its data-parallel ranks. Thread-safe.

    Args:
        source: for the log.
        model: the engine's, as clients call it.
        chunk_size: tokens per chunk; unless it is a multiple of `block_size`, everything stays unknown.
        block_size: tokens per block.
        capacity: chunks remembered. Those longest not told of nor asked for are forgotten, and unknown from then on.
        extra_keys: ``auto``, ``offsets`` or ``none``, see `hs_cache.config.KVEventsSource`.
    """

    def __init__(
        self, source: str, *, model: str, chunk_size: int, block_size: int, capacity: int, extra_keys: str = "auto"
    ) -> None:
        self._source, self._model = source, model
        self._block_size = block_size
        self._blocks_per_chunk = chunk_size // block_size
        self._usable = chunk_size % block_size == 0
        self._capacity = capacity
        self._extra_keys = extra_keys
        self._tells_offsets = extra_keys == "offsets"
        self._lock = threading.Lock()
        self._blocks: OrderedDict[BlockHash, _Block] = OrderedDict()
        self._chunks: OrderedDict[bytes, _Chunk] = OrderedDict()
        self._removed: OrderedDict[BlockHash, int] = OrderedDict()  # blocks that no medium has, and since when
        self._copies: dict[_Copies, _Copies] = {}  # blocks share what is the same for most of them
        self._groups: set[int] = set()
        self._suspended = True
        self._complete = False
        self._now = 0
        self._events = self._ignored = self._rejected = 0
        self._warned: set[str] = set()
        if not self._usable:
            self._warn(
                "size",
                f"has blocks of {block_size} tokens, and chunk_size {chunk_size} is no multiple, so all KV is unknown",
            )

    def begin(self) -> None:
        """An engine that has stored nothing yet: from here on everything it has is known."""
        with self._lock:
            self._complete, self._suspended = True, False
            self._tells_offsets = self._extra_keys == "offsets"

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
            self._blocks.clear()
            self._removed.clear()
            self._chunks.clear()
            self._groups.clear()
            self._complete, self._suspended = False, False

    def clear(self) -> None:
        """The engine has nothing any more: all that is listed is absent."""
        with self._lock:
            self._now += 1
            self._clear()

    def apply(self, batch: Batch) -> None:
        """Take in what happened, in order; atomic for those who ask."""
        with self._lock:
            self._ignored += batch.ignored
            if batch.ignored:
                self._warn("types", "sends events of types that are not known here; they are ignored")
            for event in batch.events:
                self._now += 1
                self._events += 1
                if not self._usable:
                    continue
                if isinstance(event, Stored):
                    self._store(event)
                elif isinstance(event, Removed):
                    self._remove(event)
                else:
                    self._cleared(event)

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
            if self._suspended or not self._usable:
                return [Presence.UNKNOWN] * len(names)
            for name in reversed(names):
                self._touch(name)
            return [self._answer(name) for name in names]

    def stats(self) -> TableStatistics:
        """Counts, under the lock; O(blocks)."""
        with self._lock:
            known = self._usable and not self._suspended
            count = Counter(self._state(chunk) if known else Presence.UNKNOWN for chunk in self._chunks.values())
            return TableStatistics(
                present=count[Presence.PRESENT],
                absent=count[Presence.ABSENT],
                unknown=count[Presence.UNKNOWN],
                blocks=len(self._blocks),
                complete=self._complete,
                events_total=self._events,
                ignored_total=self._ignored,
                rejected_blocks_total=self._rejected,
            )

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
        if not chunk.blocks:
            return Presence.ABSENT if chunk.gone > chunk.noted else Presence.UNKNOWN
        answer = Presence.PRESENT
        for block_hash in chunk.blocks:
            block = self._blocks.get(block_hash)
            if block is not None:
                state, changed = block.state, block.changed
            else:
                changed = self._removed.get(block_hash, 0)
                state = Presence.ABSENT if changed else Presence.UNKNOWN
            if state is Presence.ABSENT:
                # Older than the last store of rows, it tells of KV that has been written anew since.
                if changed > chunk.noted:
                    return Presence.ABSENT
                answer = Presence.UNKNOWN
            elif state is Presence.UNKNOWN:
                answer = Presence.UNKNOWN
        return answer

    def _added_up(self, block: _Block) -> Presence:
        if block.in_doubt:
            return Presence.UNKNOWN
        answer = Presence.PRESENT
        for group in self._groups:
            counts = [count for (of, _), count in block.copies if of == group]
            if counts and not any(counts):
                return Presence.ABSENT
            if not any(count > 0 for count in counts):
                answer = Presence.UNKNOWN
        return answer

    def _store(self, event: Stored) -> None:
        if event.kind not in FULL_ATTENTION:
            return
        count = len(event.hashes)
        if not event.tokens:
            self._store_more(event)
            return
        if event.group not in self._groups:
            self._groups.add(event.group)
            for block in self._blocks.values():
                block.state = self._added_up(block)
        if event.block_size != self._block_size:
            self._warn("size", f"has blocks of {event.block_size} tokens, not of {self._block_size} as configured")
            self._reject(event.hashes)
            return
        extra_keys = self._told_extra_keys(event, count)
        block_bytes = self._block_size * _TOKEN_BYTES
        if extra_keys is None or len(event.tokens) != count * block_bytes:
            self._reject(event.hashes)
            return
        parent = event.parent
        for i, block_hash in enumerate(event.hashes):
            tokens = event.tokens[i * block_bytes : (i + 1) * block_bytes]
            if not self._store_block(block_hash, parent, tokens, extra_keys[i], event):
                self._reject(event.hashes[i:])
                return
            parent = block_hash

    def _store_more(self, event: Stored) -> None:
        for block_hash in event.hashes:
            block = self._blocks.get(block_hash)
            if block is None:
                self._complete = False
            else:
                self._add_copy(block_hash, block, event)

    def _told_extra_keys(self, event: Stored, count: int) -> Sequence[Sequence[Any] | None] | None:
        """One entry per block; None where it can't be known what else made these blocks."""
        if event.lora_id is not None and not event.lora_name:
            self._warn("lora", "doesn't tell the names of its LoRA adapters, so KV of their requests is unknown")
            return None
        if event.extra_keys is not None:
            return event.extra_keys if len(event.extra_keys) == count else None
        if self._extra_keys != "none":
            self._warn(
                "extra keys",
                "doesn't tell what prompts differ in besides tokens (extra_keys), so its KV is unknown. If it serves "
                "neither salts nor multimodal prompts, say extra_keys: none for it in kv_events",
            )
            return None
        return [None if event.lora_name is None else (event.lora_name,)] * count

    def _store_block(
        self, block_hash: BlockHash, parent: BlockHash | None, tokens: bytes, extra: Sequence[Any] | None, event: Stored
    ) -> bool:
        """Whether it could be named, and agrees with what was told before."""
        known, above = self._blocks.get(block_hash), None if parent is None else self._blocks.get(parent)
        lora = event.lora_name or ""
        if parent is None:
            index = 0
        elif known is not None:
            index = known.index
        elif above is not None:
            index = above.index + 1
        else:
            return False
        read = self._read_extra(extra, lora, index)
        if read is None:
            return False
        items, salt = read
        before = self._before(above, lora, salt) if known is None or parent is None else known.before
        if known is None:
            if not before or (above is not None and (above.in_doubt or above.lora != lora)):
                return False
            known = _Block(parent, index, tokens, items, lora, before)
            if (index + 1) % self._blocks_per_chunk == 0 and not self._complete_chunk(block_hash, known):
                return False
            self._blocks[block_hash] = known
            self._removed.pop(block_hash, None)
        elif known.in_doubt or (known.parent, known.tokens, known.items, known.lora, known.before) != (
            parent,
            tokens,
            items,
            lora,
            before,
        ):
            return False
        elif known.name and known.name not in self._chunks:
            self._complete_chunk(block_hash, known)
        self._add_copy(block_hash, known, event)
        self._limit()
        return True

    def _before(self, above: _Block | None, lora: str, salt: str) -> bytes:
        """The name of the chunk before that of a block, b"" if that has none."""
        if above is None:
            return first_name(self._model, lora, salt, self._block_size)
        ends_chunk = (above.index + 1) % self._blocks_per_chunk == 0
        return above.name if ends_chunk else above.before

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

    def _complete_chunk(self, block_hash: BlockHash, last: _Block) -> bool:
        """List the chunk that ends with `last`; whether all of it is known."""
        hashes, blocks = [block_hash], [last]
        while len(blocks) < self._blocks_per_chunk:
            parent = blocks[-1].parent
            above = None if parent is None else self._blocks.get(parent)
            if parent is None or above is None:
                return False
            hashes.append(parent)
            blocks.append(above)
        hashes.reverse()
        blocks.reverse()
        media = {at: block.items for at, block in enumerate(blocks) if block.items}
        last.name = chunk_name(last.before, b"".join(block.tokens for block in blocks), media)
        noted = self._chunks[last.name].noted if last.name in self._chunks else 0
        self._chunks[last.name] = _Chunk(tuple(hashes), noted=noted)
        self._chunks.move_to_end(last.name)
        return True

    def _add_copy(self, block_hash: BlockHash, block: _Block, event: Stored) -> None:
        copy = (event.group, event.medium)
        copies = dict(block.copies)
        self._changed(block, {**copies, copy: abs(copies.get(copy, 0)) + 1})
        self._blocks.move_to_end(block_hash)

    def _remove(self, event: Removed) -> None:
        for block_hash in event.hashes:
            block = self._blocks.get(block_hash)
            if block is not None:
                # Where the medium is untold, it isn't known that another one still has it.
                gone = {
                    copy: 1 - abs(count)
                    for copy, count in block.copies
                    if copy[0] == event.group and event.medium in (None, copy[1]) and count
                }
                self._take_copies(block_hash, block, gone)

    def _cleared(self, event: Cleared) -> None:
        if event.medium is None:
            self._clear()
            return
        for block_hash, block in list(self._blocks.items()):
            gone = {copy: 0 for copy, count in block.copies if copy[1] == event.medium and count}
            self._take_copies(block_hash, block, gone)

    def _take_copies(self, block_hash: BlockHash, block: _Block, gone: dict[tuple[int, str | None], int]) -> None:
        if not gone:
            return
        copies = dict(block.copies) | gone
        self._changed(block, copies)
        if any(copies.values()) or block.in_doubt:
            self._blocks.move_to_end(block_hash)
            return
        del self._blocks[block_hash]
        self._removed[block_hash] = self._now
        if len(self._removed) > self._capacity:
            self._removed.popitem(last=False)  # of a chunk that is still listed with it nothing is known then
        chunk = self._chunks.get(block.name)
        if chunk is not None:
            # Engines give up tails first. When the last block is stored again, the chunk is listed with all of them.
            chunk.blocks, chunk.gone = (), self._now

    def _changed(self, block: _Block, copies: dict[tuple[int, str | None], int]) -> None:
        if len(self._copies) > _MAX_SHARED:
            self._copies.clear()
        told = tuple(copies.items())
        block.copies = self._copies.setdefault(told, told)
        block.state = self._added_up(block)
        block.changed = self._now

    def _clear(self) -> None:
        self._blocks.clear()
        self._removed.clear()
        self._groups.clear()
        for chunk in self._chunks.values():
            if chunk.blocks:
                chunk.blocks, chunk.gone = (), self._now
        self._complete = True

    def _reject(self, hashes: Iterable[BlockHash]) -> None:
        for block_hash in hashes:
            self._rejected += 1
            block = self._blocks.get(block_hash)
            if block is not None:
                block.in_doubt, block.state = True, Presence.UNKNOWN
        self._complete = False

    def _limit(self) -> None:
        while len(self._chunks) > self._capacity:
            self._chunks.popitem(last=False)
            self._complete = False
        while len(self._blocks) > self._capacity * self._blocks_per_chunk:
            self._blocks.popitem(last=False)
            self._complete = False

    def _warn(self, about: str, text: str) -> None:
        if about not in self._warned:
            self._warned.add(about)
            logger.warning("KV events: the engine at %s %s", self._source, text)


def _is_pair(entry: object) -> bool:
    return (
        isinstance(entry, list | tuple) and len(entry) == _PAIR and isinstance(entry[0], str) and type(entry[1]) is int
    )
