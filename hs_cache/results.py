"""What callers get back: small immutable values."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from hs_cache.messages import NodeStatistics


@dataclass(frozen=True, slots=True)
class StoreResult:
    """What became of the chunks of one `store`; each chunk whose rows were given counts once.

    Attributes:
        stored: chunks that got rows of this call in at least one layer.
        present: chunks that had every layer already; their first rows are kept.
        filtered: chunks of a call none of whose layers is in ``hidden_state_layers``.
        failed: chunks for which there was no room, or whose node could not be reached.
        prefix_tokens: how many tokens, from the first on, have every accepted layer of this call now, on the node where
            they were stored. 0 when it could not be reached.
    """

    stored: int = 0
    present: int = 0
    filtered: int = 0
    failed: int = 0
    prefix_tokens: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class PrefixHit:
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
        layers = {
            layer: f"{list(rows.shape)} {str(rows.dtype).removeprefix('torch.')}" for layer, rows in self.layers.items()
        }
        return (
            f"PrefixHit(num_tokens={self.num_tokens}, start={self.start}, ended_by={self.ended_by!r}, layers={layers})"
        )

    def __getitem__(self, layer_idx: int) -> torch.Tensor:
        return self.layers[layer_idx]

    def __iter__(self) -> Iterator[int]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    """One client's counters, and those of the node it talks to (None while that can't be reached).

    Attributes:
        retrieves_total, hits_total: calls of `retrieve`, and those that found at least one row; refs don't count.
        tokens_asked_total, tokens_served_total: tokens of the prompts asked for, and those whose rows were handed out.
        zero_copy_total, copied_total: layers handed out as views, of the pool or of what came from another node, and as
            copies.
        stored_chunks_total, failed_chunks_total: as `StoreResult` counts them.
        timeouts_total, unreachable_total: calls that missed their deadline, and calls that failed otherwise.
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
    timeouts_total: int
    unreachable_total: int
    node: NodeStatistics | None
