"""The protocol of a node: reserve, commit, lease, settle, release, over the chunks of a pool. No I/O.

Memory is always in one of four states, and `HiddenStateStore.check` proves it:

* *free*: in a hole of the allocator;
* *reserved*: being written; invisible until its reservation is committed;
* *resident*: rows of a chunk in the index, readable, evictable unless held;
* *stranded*: dropped from the index while still held; freed when the last hold ends.

A chunk may be *kept*: it is resident and held by its writer, so it isn't evicted, and it goes when that hold ends.
"""

import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import chain, groupby, islice

from hs_cache.chunks import LEAST_PIECE_BYTES, Chunk, ChunkTable, Extents
from hs_cache.errors import InvalidInputError, StaleIncarnationError, StaleRevisionError
from hs_cache.extents import Extent
from hs_cache.kv_presence import Presence
from hs_cache.messages import (
    EVICTED,
    KV_ABSENT,
    LAYER_MISSING,
    NEVER_STORED,
    OK,
    RETIRED,
    Freed,
    LayerSpec,
    Run,
    StoreStatistics,
)
from hs_cache.placement import Reservation, place

HoldId = tuple[bytes, int]
"""Who holds, and the id that the holder chose: of a lease or of a reservation."""

_MAX_TOMBSTONES = 65536
_RETIRE_STEP = 4096


@dataclass(slots=True, eq=False)
class _Lease:
    chunks: list[Chunk]
    layers: tuple[int, ...]
    first_chunk: int
    asked_chunks: int
    confirmed: tuple[int, ...]  # each chunk's count when the KV side was about to be asked


@dataclass(slots=True, eq=False)
class _Kept:
    """What became of a reservation that keeps: its chunks live exactly as long as this hold."""

    chunks: list[Chunk]


@dataclass(frozen=True, slots=True)
class Reserved:
    """Where to write, and how many chunks at the tail got no room."""

    runs: tuple[Run, ...]
    refused: int


@dataclass(frozen=True, slots=True)
class Committed:
    """Chunks by outcome, and how many tokens from the first on now have every layer of the store."""

    stored: int
    present: int
    failed: int
    prefix_tokens: int


@dataclass(frozen=True, slots=True)
class Found:
    """The longest run of chunks with every layer, already leased. `kv_local`: which ones this node's KV side knows."""

    keys: tuple[bytes, ...]
    kv_local: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Survey:
    """What there is of some chunks, and of what there isn't, why; nothing is held.

    Attributes:
        kv_local: per chunk, whether its KV is this node's to know of: also where the chunk isn't there.
        layer_chunks: per layer, how many chunks have it, from the first on.
        reasons: per chunk, `hs_cache.messages.OK` or why it isn't there with every layer.
    """

    kv_local: tuple[bool, ...]
    layer_chunks: tuple[int, ...]
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Granted:
    """What a lease covers after the KV side was asked; see `hs_cache.messages.LeaseReply`."""

    num_tokens: int
    specs: tuple[LayerSpec, ...]
    runs: tuple[Run, ...]
    must_copy: bool
    ended_by: str


class HiddenStateStore:
    """Chunk key → layers → extents, with prefix-aware LRU, leases, reservations. Thread-safe; nothing blocks for long.

    The unit of eviction is the chunk with all its layers. All layers that one `reserve` names appear at its `commit`
    together. What is held by a lease or a reservation is never reused. Keys, ids and specs are trusted to be
    well-formed; `hs_cache.server.CacheServer` checks what comes from outside.

    Args:
        capacity_bytes: size of the pool's data region.
        chunk_size: tokens per chunk.
        max_leased_fraction: above this part of the pool, a grant says ``must_copy``.
        least_piece_bytes: see `hs_cache.chunks.LEAST_PIECE_BYTES`.
    """

    def __init__(
        self,
        capacity_bytes: int,
        *,
        chunk_size: int,
        max_leased_fraction: float = 0.5,
        least_piece_bytes: int = LEAST_PIECE_BYTES,
    ) -> None:
        self._lock = threading.Lock()
        self._table = ChunkTable(capacity_bytes, least_piece_bytes=least_piece_bytes)
        self._chunk_size = chunk_size
        self._max_leased_bytes = max_leased_fraction * self._table.capacity_bytes
        self._holds: dict[HoldId, _Lease | Reservation | _Kept] = {}
        self._keepers: dict[Chunk, HoldId] = {}  # by whom a chunk is kept
        self._tombstones: OrderedDict[HoldId, None] = OrderedDict()
        self._alone = True
        self._changed = threading.Event()
        self._stored_total = self._evicted_total = self._kv_dropped_total = self._refused_total = 0

    @property
    def changed(self) -> threading.Event:
        """Set when `take_changes` has something to give; whoever takes it clears it before."""
        return self._changed

    def set_alone(self, alone: bool) -> None:
        """Whether this node is the service's only one. If not, a prefix may well begin on another node."""
        with self._lock:
            self._alone = alone

    def reserve(
        self,
        hold: HoldId,
        *,
        space: bytes,
        keys: Sequence[bytes],
        num_tokens: int,
        first_chunk: int,
        specs: tuple[LayerSpec, ...],
        kv_local: bool,
        replace: bool = False,
        keep: bool = False,
        evict: bool = True,
        caller: HoldId | None = None,
    ) -> Reserved:
        """Find room for the layers of chunks ``first_chunk ..`` that aren't there yet, and hold the chunks that are.

        Evicts as little as makes room, the coldest first, never a chunk of this prefix that the store keeps; what
        doesn't fit is refused from the tail, and nothing is evicted for it. When the head before `first_chunk` has a
        hole in every layer of `specs`, and no other node could have it, the rows could not be served yet, so only free
        room is used; so it is without `evict`.

        With `replace`, chunks ``first_chunk ..`` are written whatever there is of them, and the commit puts them in the
        place of that, in one step. Where there is no room for all of them beside what they replace, that is dropped at
        once, whether there is room then or not: it is out of date. With `keep`, which implies `replace`, they stay held
        under the same id once they are committed: they are not evicted, and are dropped when that hold ends. Whoever
        drops such a chunk ends its hold.

        `caller` is the id of the client for whom somebody else holds and writes this: when it has released that, before
        this call or before the commit, nothing becomes visible; but the memory is the writer's until `hold` ends.

        Raises:
            InvalidInputError: a layer has another hidden_dim or dtype in this key space, or the id is in use.
            StaleIncarnationError: the caller has given it up.
        """
        with self._lock:
            self._check_caller(caller)
            if self._given_up(hold):
                return Reserved((), len(keys) - first_chunk)
            self._check_specs(space, specs)
            held = Reservation(
                space,
                keys,
                num_tokens,
                self._chunk_size,
                first_chunk,
                specs,
                kv_local,
                headless=not self._alone,
                replace=replace or keep,
                keep=keep,
                evict=evict,
                caller=caller,
            )
            self._holds[hold] = held
            for spec in specs:
                self._table.use_spec(space, spec)
            for position, key in enumerate(keys[:first_chunk] if held.replace else keys):
                if (chunk := self._table.get(key)) is not None:
                    held.present[position] = chunk
            self._table.hold(held.present.values())
            refused, evicted = place(self._table, held)
            if refused and self._drop_replaced(held):
                refused, more = place(self._table, held)
                evicted += more
            self._note_changes(evicted > 0)
            self._refused_total += refused
            self._evicted_total += evicted
            return Reserved(self._write_runs(held), refused)

    def commit(self, hold: HoldId) -> Committed:
        """Make the chunks of a reservation visible, and end it. First come, first kept: rows already there stay, unless
        they are to be replaced.

        Raises:
            StaleIncarnationError: there is no such reservation (it was given up, or its client counted as gone), or its
                caller has given it up; then what was written is free again.
            StaleRevisionError: its key space was retired meanwhile; what was written is free again.
        """
        with self._lock:
            held = self._holds.get(hold)
            if not isinstance(held, Reservation):
                raise StaleIncarnationError("this reservation is no longer held here")
            try:
                self._check_caller(held.caller)
            except StaleIncarnationError:
                self._end(hold)
                raise
            if held.retired:
                self._end(hold)
                raise StaleRevisionError(
                    "model_revision: the model's current revision changed while these rows were being stored; connect "
                    "again after the new weights are loaded"
                )
            stored = present = 0
            kept: dict[Chunk, None] = {}
            if held.replace:
                self._drop_all(held.keys[position] for position in held.writes)
            for position in range(held.first_chunk, len(held.keys)):
                if position in held.writes:
                    linked, new = self._link(held, position)
                    stored += new
                    present += linked and not new
                else:
                    present += self._complete(held, position)
                if (chunk := self._table.get(held.keys[position])) is not None:
                    chunk.confirmed += 1
                    if held.keep and position in held.writes:
                        kept[chunk] = None
            held.writes.clear()
            self._end(hold)
            self._keep(hold, list(kept))
            self._stored_total += stored
            self._note_changes(stored > 0)
            prefix = self._table.order_prefix(held.keys, headless=not self._alone)
            covered = 0
            while covered < prefix and self._complete(held, covered):
                covered += 1
            prefix_tokens = held.num_tokens if covered == len(held.keys) else covered * self._chunk_size
            failed = len(held.keys) - held.first_chunk - stored - present
            return Committed(stored, present, failed, prefix_tokens)

    def lease(
        self,
        hold: HoldId,
        keys: Sequence[bytes],
        layers: tuple[int, ...],
        *,
        first_chunk: int = 0,
        hinted: bool = False,
    ) -> Found:
        """Hold the longest run of chunks, from `first_chunk` on, that has every layer; `settle` completes it.

        Nothing is held when the run is empty. The order is not touched yet. `hinted`: the directory said that all of
        `keys` are here; of the first one that isn't, it is told once more.
        """
        with self._lock:
            if self._given_up(hold):
                return Found((), ())
            chunks = self._table.run(islice(keys, first_chunk, None), layers)
            end = first_chunk + len(chunks)
            if hinted and end < len(keys) and keys[end] not in self._table:
                self._table.deny(keys[end])
                self._note_changes()
            self._table.hold(chunks, lease=True)
            if chunks:
                confirmed = tuple([chunk.confirmed for chunk in chunks])
                self._holds[hold] = _Lease(chunks, layers, first_chunk, len(keys) - first_chunk, confirmed)
            return Found(tuple(keys[first_chunk:end]), tuple([chunk.kv_local for chunk in chunks]))

    def settle(self, hold: HoldId, presence: Sequence[int]) -> Granted:
        """Trim a lease to what the KV side says, one `Presence` per chunk found: absent ones are dropped, all layers.

        Raises:
            InvalidInputError: `presence` has another length than what was found; the lease stays as it was.
        """
        with self._lock:
            held = self._holds.get(hold)
            if not isinstance(held, _Lease):  # an empty run, or released while the KV side was being asked
                return Granted(0, (), (), False, "hidden_state")
            found = held.chunks
            if len(presence) != len(found):
                raise InvalidInputError(f"presence: got {len(presence)} values, expected {len(found)}, one per chunk")
            kept = next(
                (i for i, chunk in enumerate(found) if presence[i] != Presence.PRESENT or not chunk.linked), len(found)
            )
            ended_by = "" if kept == held.asked_chunks else "hidden_state"
            if kept < len(found) and presence[kept] != Presence.PRESENT:
                ended_by = "kv_absent" if presence[kept] == Presence.ABSENT else "kv_unknown"
            held.chunks = found[:kept]
            for chunk, state, confirmed in zip(found[kept:], presence[kept:], held.confirmed[kept:], strict=True):
                # A store that was committed meanwhile says that the chunk's KV has been written anew.
                if state == Presence.ABSENT and chunk.linked and chunk.confirmed == confirmed:
                    self._unlink(chunk, KV_ABSENT)
                    self._kv_dropped_total += 1
            self._table.let_go(found[kept:], lease=True)
            self._table.warm([chunk.key for chunk in held.chunks])
            if not held.chunks:
                self._end(hold)
                return Granted(0, (), (), False, ended_by)
            specs = tuple(held.chunks[0].layers[layer][0] for layer in held.layers)
            num_tokens = sum([chunk.num_tokens for chunk in held.chunks])
            must_copy = self._table.leased_bytes > self._max_leased_bytes
            return Granted(num_tokens, specs, self._lease_runs(held, specs), must_copy, ended_by)

    def release(self, owner: bytes, ids: Iterable[int]) -> None:
        """End leases, give up reservations, drop what is kept; idempotent. An id not known yet is refused later."""
        with self._lock:
            for number in ids:
                if (owner, number) in self._holds:
                    self._end((owner, number))
                else:
                    self._tombstones[owner, number] = None
            while len(self._tombstones) > _MAX_TOMBSTONES:
                self._tombstones.popitem(last=False)

    def end(self, hold: HoldId) -> None:
        """End one lease or reservation where it is still held; for holders whose calls can't overtake each other."""
        with self._lock:
            if hold in self._holds:
                self._end(hold)

    def release_owner(self, owner: bytes) -> int:
        """End everything that a client holds which is gone; returns how many holds that were."""
        with self._lock:
            gone = [hold for hold in self._holds if hold[0] == owner]
            for hold in gone:
                self._end(hold)
            writing = {held.caller for held in self._holds.values() if isinstance(held, Reservation)}
            for hold in [hold for hold in self._tombstones if hold[0] == owner and hold not in writing]:
                del self._tombstones[hold]
            return len(gone)

    def space_of(self, key: bytes) -> bytes:
        """The key space that a chunk is of, ``b""`` when it isn't there; no effect on the order."""
        with self._lock:
            chunk = self._table.get(key)
            return chunk.space if chunk is not None else b""

    def survey(self, keys: Sequence[bytes], layers: tuple[int, ...]) -> Survey:
        """What there is of a prefix; no effect on the order."""
        with self._lock:
            chunks = [self._table.get(key) for key in keys]
            reasons = []
            for key, chunk in zip(keys, chunks, strict=True):
                if chunk is None:
                    reasons.append(self._table.why_gone(key) or NEVER_STORED)
                else:
                    reasons.append(OK if all(layer in chunk.layers for layer in layers) else LAYER_MISSING)
            return Survey(
                tuple(chunk is None or chunk.kv_local for chunk in chunks),
                tuple(
                    next((i for i, chunk in enumerate(chunks) if chunk is None or layer not in chunk.layers), len(keys))
                    for layer in layers
                ),
                tuple(reasons),
            )

    def contains(self, key: bytes, layer_idx: int) -> bool:
        """Whether the chunk is there with that layer; no effect on the order."""
        with self._lock:
            chunk = self._table.get(key)
            return chunk is not None and layer_idx in chunk.layers

    def drop(self, key: bytes, *, space: bytes | None = None) -> bool:
        """Drop a chunk with all its layers; False when it isn't there. Whoever leases it keeps its memory.

        `space`: the key space that it must be of; others are left alone.
        """
        with self._lock:
            chunk = self._table.get(key)
            if chunk is None or space not in (None, chunk.space):
                return False
            self._unlink(chunk, "" if chunk in self._keepers else EVICTED)
            return True

    def void(self, spaces: Set[bytes]) -> None:
        """Let nothing become visible that has been reserved in these key spaces so far."""
        with self._lock:
            for held in self._holds.values():
                if isinstance(held, Reservation) and held.space in spaces:
                    held.retired = True

    def drop_spaces(self, spaces: Set[bytes]) -> Freed:
        """Drop every chunk of some key spaces, after `void`; that nothing more is reserved in them is the caller's to
        see to. Whoever holds a chunk keeps its memory. O(chunks), but others get their turn in between.
        """
        with self._lock:
            chunks = self._table.of_spaces(spaces)
        freed = Freed()
        for first in range(0, len(chunks), _RETIRE_STEP):
            with self._lock:
                there = [chunk for chunk in chunks[first : first + _RETIRE_STEP] if chunk.linked]
                for chunk in there:
                    self._unlink(chunk, RETIRED)
                freed = Freed(
                    freed.chunks + len(there),
                    freed.nbytes + sum(chunk.nbytes for chunk in there),
                    freed.held_bytes + sum(chunk.nbytes for chunk in there if chunk.holds),
                )
        return freed

    def spaces(self) -> set[bytes]:
        """The key spaces of which there are chunks or reservations."""
        with self._lock:
            return self._table.spaces()

    def take_changes(self) -> dict[bytes, bool]:
        """Keys that were entered (True) or dropped (False) since the last call or `snapshot`."""
        with self._lock:
            return self._table.take_changes()

    def snapshot(self) -> bytes:
        """The keys of all chunks; `take_changes` goes on from here."""
        with self._lock:
            self._table.take_changes()
            return self._table.keys()

    def stats(self) -> StoreStatistics:
        """A consistent snapshot; O(holds)."""
        with self._lock:
            leases = sum(isinstance(held, _Lease) for held in self._holds.values())
            kept = sum(isinstance(held, _Kept) for held in self._holds.values())
            return StoreStatistics(
                capacity_bytes=self._table.capacity_bytes,
                free_bytes=self._table.free_bytes,
                resident_bytes=self._table.resident_bytes,
                reserved_bytes=self._table.reserved_bytes,
                stranded_bytes=self._table.stranded_bytes,
                leased_bytes=self._table.leased_bytes,
                num_chunks=len(self._table),
                num_leases=leases,
                num_reservations=len(self._holds) - leases - kept,
                num_kept=len(self._keepers),
                stored_chunks_total=self._stored_total,
                evicted_chunks_total=self._evicted_total,
                kv_dropped_chunks_total=self._kv_dropped_total,
                refused_chunks_total=self._refused_total,
            )

    def check(self) -> None:
        """Audit every invariant from the ground up; raises AssertionError. Takes the lock; O(everything).

        No two extents overlap; every byte is free, reserved, resident or stranded; nothing held is free; each
        chunk counts its holds; a lease has all its layers; what is kept is in the index, and knows by whom; nothing
        is held under an id that was given up; heads are warmer than tails; a layer has one spec per key space.
        """
        with self._lock:
            holds: Counter[Chunk] = Counter()
            leases: Counter[Chunk] = Counter()
            reserved: list[Extent] = []
            specs: list[tuple[bytes, LayerSpec]] = []
            keepers: dict[Chunk, HoldId] = {}
            for hold, held in self._holds.items():
                if isinstance(held, _Lease):
                    assert all(layer in chunk.layers for chunk in held.chunks for layer in held.layers)
                    holds.update(held.chunks)
                    leases.update(held.chunks)
                elif isinstance(held, _Kept):
                    assert held.chunks, "a hold keeps nothing"
                    assert all(chunk.linked for chunk in held.chunks), "a chunk that was dropped is kept"
                    assert keepers.keys().isdisjoint(held.chunks), "a chunk is kept twice"
                    holds.update(held.chunks)
                    keepers |= dict.fromkeys(held.chunks, hold)
                else:
                    assert all(held.keys[position] == chunk.key for position, chunk in held.present.items())
                    holds.update(held.present.values())
                    reserved += held.extents()
                    specs += ((held.space, spec) for spec in held.specs)
            assert self._tombstones.keys().isdisjoint(self._holds), "what was given up is held"
            assert len(self._tombstones) <= _MAX_TOMBSTONES
            assert keepers == self._keepers, "a chunk doesn't know by whom it is kept"
            self._table.check(holds=holds, leases=leases, reserved=reserved, specs=specs)

    # Everything below is called with the lock held.

    def _note_changes(self, some: bool = True) -> None:
        if some:
            self._changed.set()

    def _given_up(self, hold: HoldId) -> bool:
        """Whether the client released this id before the call that uses it arrived."""
        if hold in self._tombstones:
            del self._tombstones[hold]
            return True
        if hold in self._holds:
            raise InvalidInputError(f"hold_id: {hold[1]} is already in use by this client, expected a new one")
        return False

    def _check_caller(self, caller: HoldId | None) -> None:
        if caller is not None and self._given_up(caller):
            raise StaleIncarnationError("the client has given up this store")

    def _check_specs(self, space: bytes, specs: tuple[LayerSpec, ...]) -> None:
        for spec in specs:
            known = self._table.spec_in_use(space, spec.layer_idx)
            if known is not None and known != spec:
                raise InvalidInputError(
                    f"hidden_states: layer {spec.layer_idx} came with hidden_dim {spec.hidden_dim} and dtype "
                    f"{spec.dtype}, expected hidden_dim {known.hidden_dim} and dtype {known.dtype} as stored "
                    "before in this key space"
                )

    def _keep(self, hold: HoldId, chunks: list[Chunk]) -> None:
        if chunks:
            self._holds[hold] = _Kept(chunks)
            self._table.hold(chunks)
            self._keepers |= dict.fromkeys(chunks, hold)

    def _drop_replaced(self, held: Reservation) -> bool:
        """Drop what is to be replaced, to make room; whether there was any, and all is to be placed anew."""
        if not held.replace or not self._drop_all(held.keys[held.first_chunk :]):
            return False
        self._table.give_back(held.extents())
        held.writes = {}
        return True

    def _drop_all(self, keys: Iterable[bytes]) -> int:
        """Drop what something newer replaces; how many chunks were there."""
        there = [chunk for key in dict.fromkeys(keys) if (chunk := self._table.get(key)) is not None]
        for chunk in there:
            self._unlink(chunk, "")
        return len(there)

    def _unlink(self, chunk: Chunk, why: str) -> None:
        """Drop a chunk, and end the hold that kept it: nobody can take it any more."""
        self._table.unlink(chunk, why)
        self._note_changes()
        keeper = self._keepers.pop(chunk, None)
        if keeper is not None:
            kept = self._holds[keeper]
            assert isinstance(kept, _Kept)
            kept.chunks.remove(chunk)
            if not kept.chunks:
                del self._holds[keeper]
            self._table.let_go((chunk,))

    def _complete(self, held: Reservation, position: int) -> bool:
        chunk = self._table.get(held.keys[position])
        return chunk is not None and all(spec.layer_idx in chunk.layers for spec in held.specs)

    def _link(self, held: Reservation, position: int) -> tuple[bool, bool]:
        """Make one written chunk visible; returns whether it is complete now, and whether that took these rows."""
        key, write = held.keys[position], held.writes[position]
        chunk = self._table.get(key)
        there = chunk.layers if chunk is not None else {}
        if not all(spec.layer_idx in there or spec.layer_idx in write for spec in held.specs):
            # What was present at the reservation has been dropped since: all layers together, or none.
            self._table.give_back(chain.from_iterable(write.values()))
            return False, False
        if chunk is None:
            chunk = Chunk(key, held.space, held.tokens_in(position), held.kv_local)
            self._table.link(chunk, held.keys[position - 1] if position else None)
        chunk.kv_local = chunk.kv_local or held.kv_local
        new = False
        for spec in held.specs:
            extents = write.get(spec.layer_idx)
            if extents is None:
                continue
            if spec.layer_idx in chunk.layers:  # another writer was first
                self._table.give_back(extents)
                continue
            new = True
            self._table.add_layer(chunk, spec, extents)
        return True, new

    def _write_runs(self, held: Reservation) -> tuple[Run, ...]:
        runs: list[Run] = []
        for spec in held.specs:
            positions = [position for position, write in held.writes.items() if spec.layer_idx in write]
            # Chunks that were there already lie between what is to be written.
            for _, gap in groupby(enumerate(positions), lambda numbered: numbered[1] - numbered[0]):
                together = [position for _, position in gap]
                places = [held.writes[at][spec.layer_idx] for at in together]
                runs += _merge(spec, together[0] * self._chunk_size, places)
        return tuple(runs)

    def _lease_runs(self, held: _Lease, specs: tuple[LayerSpec, ...]) -> tuple[Run, ...]:
        runs: list[Run] = []
        for spec in specs:
            places = [chunk.layers[spec.layer_idx][1] for chunk in held.chunks]
            runs += _merge(spec, held.first_chunk * self._chunk_size, places)
        return tuple(runs)

    def _end(self, hold: HoldId) -> None:
        held = self._holds[hold]
        if isinstance(held, _Kept):
            for chunk in list(held.chunks):
                self._unlink(chunk, "")
            return
        del self._holds[hold]
        if isinstance(held, _Lease):
            self._table.let_go(held.chunks, lease=True)
            return
        self._table.give_back(held.extents())
        self._table.let_go(held.present.values())
        for spec in held.specs:
            self._table.unuse_spec(held.space, spec)


def _merge(spec: LayerSpec, start: int, places: Iterable[Extents]) -> Iterator[Run]:
    """Join what touches in the pool of one layer's rows, from token `start` on: chunk by chunk, where each lies."""
    layer, row_bytes = spec.layer_idx, spec.row_bytes
    first = end = 0
    for offset, nbytes in chain.from_iterable(places):
        if offset != end:
            if end > first:
                count = (end - first) // row_bytes
                yield Run(layer, start, count, first)
                start += count
            first = offset
        end = offset + nbytes
    if end > first:
        yield Run(layer, start, (end - first) // row_bytes, first)
