"""What callers get back: small immutable values, which a notebook shows as tables."""

import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType

import torch

from hs_cache.messages import NodeStatistics
from hs_cache.shown import Shown


@dataclass(frozen=True, slots=True)
class StoreResult(Shown):
    """What became of the chunks of one `store`; each chunk whose rows were given counts once.

    Attributes:
        stored: chunks that got rows of this call in at least one layer.
        present: chunks that had every layer already; their first rows are kept.
        filtered: chunks of a call none of whose layers is in ``hidden_state_layers``.
        failed: chunks for which there was no room, whose node could not be reached, or which are of a revision of the
            model's weights that is not the current one.
        prefix_tokens: how many tokens, from the first on, have every accepted layer of this call now, on the node where
            they were stored. 0 when it could not be reached.
    """

    stored: int = 0
    present: int = 0
    filtered: int = 0
    failed: int = 0
    prefix_tokens: int = 0

    @property
    def num_chunks(self) -> int:
        """Chunks of which became something."""
        return self.stored + self.present + self.filtered + self.failed


@dataclass(frozen=True, slots=True, eq=False)
class PrefixHit(Shown):
    """Rows of the longest usable prefix; falsy on a miss.

    ``hit[layer_idx]`` is ``[num_tokens - start, hidden_dim]``. Rows are the caller's own: writing into them never
    changes the cache. They may stand on the pool's memory, which they then hold until the last tensor or array over
    them is gone, and which a *forked* child does not have: there, touching them ends the child (SIGSEGV). Clone them
    for a ``DataLoader`` with forked workers, or spawn these.

    Attributes:
        num_tokens: rows of the prefix, from token 0 on, that are usable in every layer asked for (at most ``stop``).
        start: first token of the rows here.
        ended_by: what ended the prefix: ``""`` (all asked for is there), ``"hidden_state"``, ``"kv_absent"``,
            ``"kv_unknown"`` or ``"unreachable"``. What is asked for are whole chunks, and a short last one only with
            ``save_unfull_chunk``.
        layers: layer_idx → rows; empty on a miss.
    """

    num_tokens: int = 0
    start: int = 0
    ended_by: str = ""
    layers: Mapping[int, torch.Tensor] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.layers)

    def __repr__(self) -> str:
        layers = {layer: f"{list(rows.shape)} {dtype_of(rows)}" for layer, rows in self.layers.items()}
        return (
            f"PrefixHit(num_tokens={self.num_tokens}, start={self.start}, ended_by={self.ended_by!r}, layers={layers})"
        )

    def __getitem__(self, layer_idx: int) -> torch.Tensor:
        return self.layers[layer_idx]

    def __iter__(self) -> Iterator[int]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)


class Coverage(Shown):
    """How far a prefix can be had, and at what cost; falsy where nothing can.

    With ``hold=True``, the result of `HiddenStateCache.plan` is also a lease: until `release`, the end of its ``with``
    block, or its own end, what it promises is not evicted, and any `retrieve` of this client finds it.

    Attributes:
        num_tokens: rows of the prefix, from token 0 on, that are usable in every layer asked for: a scheduler caps its
            KV hit with this.
        kv_tokens: how far the KV side of this client's node has the prefix; at least `num_tokens`.
        layer_tokens: layer_idx → how far that layer reaches by itself on this client's node, KV aside; at least
            `num_tokens`.
        nbytes: of the rows of `num_tokens` in all layers, as they are stored.
        nodes: hex ids of the nodes that have them, in the order of the prefix.
        ended_by: what ended the prefix, as in `PrefixHit`.
    """

    def __init__(
        self,
        *,
        num_tokens: int = 0,
        kv_tokens: int = 0,
        layer_tokens: Mapping[int, int],
        nbytes: int = 0,
        nodes: tuple[str, ...] = (),
        ended_by: str = "",
        release: Callable[[], None] | None = None,
    ) -> None:
        self.num_tokens = num_tokens
        self.kv_tokens = kv_tokens
        self.layer_tokens = dict(layer_tokens)
        self.nbytes = nbytes
        self.nodes = nodes
        self.ended_by = ended_by
        self._finalizer = weakref.finalize(self, release) if release is not None else None
        if self._finalizer is not None:
            self._finalizer.atexit = False

    @property
    def holds(self) -> bool:
        """Whether it is a lease, and was not released. Where more than ``max_leased_fraction`` of the pool would be
        held, it never was one."""
        return self._finalizer is not None and self._finalizer.alive

    def release(self) -> None:
        """Let go of what is held; idempotent, and without effect where nothing is."""
        if self._finalizer is not None:
            self._finalizer()

    def __enter__(self) -> "Coverage":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __bool__(self) -> bool:
        return self.num_tokens > 0

    def __repr__(self) -> str:
        return (
            f"Coverage(num_tokens={self.num_tokens}, kv_tokens={self.kv_tokens}, layer_tokens={self.layer_tokens}, "
            f"nbytes={self.nbytes}, nodes={self.nodes}, ended_by={self.ended_by!r}, holds={self.holds})"
        )


@dataclass(frozen=True, slots=True)
class ChunkReport:
    """Whether one chunk of a prefix can be had with every layer asked for, and why not.

    Attributes:
        first_token, num_tokens: the chunk's place in the prefix.
        reason: ``"ok"``; ``"never_stored"`` (or so long ago that nobody remembers); ``"evicted"``, to make room or by
            `HiddenStateCache.drop_key`; ``"retired"``, since the model's weights have changed; ``"layer_missing"``;
            ``"kv_absent"``, ``"kv_unknown"``: the rows may be there, but the KV is gone, or nobody vouches for it;
            ``"unreachable"``: nobody who should know answers.
        node_id: hex id of the node that says so; ``""`` where none does.
    """

    first_token: int
    num_tokens: int
    reason: str
    node_id: str


class Explanation(Shown, list[ChunkReport]):
    """A report per chunk, head first: what `HiddenStateCache.explain` gives. A list that a notebook shows as a table,
    in which chunks of the same kind that follow each other share a row.
    """


@dataclass(frozen=True, slots=True)
class CacheStatistics(Shown):
    """One client's counters, and those of the node it talks to (None while that can't be reached).

    Attributes:
        retrieves_total, hits_total: calls of `retrieve`, and those that found at least one row; refs don't count.
        tokens_asked_total, tokens_served_total: tokens of the prompts asked for, and those whose rows were handed out.
        zero_copy_total, copied_total: layers handed out as views, of the pool or of what came from another node, and as
            copies.
        stored_chunks_total, failed_chunks_total: as `StoreResult` counts them.
        held_bytes: rows of chunks that are not complete yet, held in this client.
        held_dropped_total: chunks that lost theirs, since there were too many.
        timeouts_total, unreachable_total: calls that missed their deadline, and calls that failed otherwise.
        stale_stores_total: stores refused since this client's revision of the model is not the current one.
        node: the node's own statistics.
    """

    retrieves_total: int
    hits_total: int
    tokens_asked_total: int
    tokens_served_total: int
    zero_copy_total: int
    copied_total: int
    stored_chunks_total: int
    failed_chunks_total: int
    held_bytes: int
    held_dropped_total: int
    timeouts_total: int
    unreachable_total: int
    stale_stores_total: int
    node: NodeStatistics | None


def dtype_of(rows: torch.Tensor) -> str:
    """PyTorch's name of a tensor's dtype, as users know it: ``bfloat16``."""
    return str(rows.dtype).removeprefix("torch.")
