"""What a notebook shows of the values that users get: which facts, in which words, and how they are to be taken.

Importing this is what makes `hs_cache.shown.Shown` values of these types show tables; whoever has a client has.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby

from hs_cache import html
from hs_cache.messages import (
    EVICTED,
    KV_ABSENT,
    KV_UNKNOWN,
    LAYER_MISSING,
    NEVER_STORED,
    OK,
    RETIRED,
    UNREACHABLE,
    NodeStatistics,
    StoreStatistics,
)
from hs_cache.results import CacheStatistics, Coverage, Explanation, PrefixHit, StoreResult, dtype_of
from hs_cache.shown import as_html

REASONS: Mapping[str, tuple[html.Tone, str]] = {
    OK: (html.Tone.GOOD, "its rows can be had"),
    NEVER_STORED: (html.Tone.NONE, "nobody stored it, or so long ago that nobody remembers"),
    EVICTED: (html.Tone.POOR, "it made room for others, or was dropped"),
    RETIRED: (html.Tone.POOR, "the model's weights have changed since"),
    LAYER_MISSING: (html.Tone.FAIR, "it has not all of the layers asked for"),
    KV_ABSENT: (html.Tone.BAD, "its KV is gone; the next retrieve drops it"),
    KV_UNKNOWN: (html.Tone.POOR, "nobody vouches for its KV"),
    UNREACHABLE: (html.Tone.BAD, "nobody who should know answers"),
}
"""What is said of chunks, how it is to be taken, and what it means."""

_ENDED_BY = {
    "": "",
    "hidden_state": "There, hidden states are missing.",
    KV_ABSENT: "There, KV is gone.",
    KV_UNKNOWN: "There, nobody vouches for the KV.",
    UNREACHABLE: "Who would know of more can't be reached.",
}


def pool_parts(store: StoreStatistics) -> tuple[tuple[str, int, html.Tone], ...]:
    """The states in which a pool's memory is not free: (name, bytes, tone)."""
    return (
        ("resident", store.resident_bytes, html.Tone.GOOD),
        ("reserved", store.reserved_bytes, html.Tone.FAIR),
        ("stranded", store.stranded_bytes, html.Tone.POOR),
    )


@as_html.register
def store_result(result: StoreResult) -> str:
    """What became of the chunks given."""
    return html.facts(
        f"{result.num_chunks:,} chunks given",
        [
            ("stored", result.stored),
            ("present already", result.present),
            ("in no layer that is accepted", result.filtered),
            ("failed", result.failed),
            ("tokens of the prefix that can be had now", result.prefix_tokens),
        ],
    )


@as_html.register
def prefix_hit(hit: PrefixHit) -> str:
    """Layer by layer, what rows there are, and what ended the prefix."""
    rows: list[Sequence[html.Cell]] = [
        (layer, *given.shape, dtype_of(given), str(given.device), html.size(given.nbytes))
        for layer, given in hit.layers.items()
    ]
    caption = f"{'Hit' if hit else 'Miss'}: {hit.num_tokens:,} tokens of the prefix"
    if hit.start:
        caption += f", rows of those from {hit.start:,} on"
    columns = ("layer_idx", "rows", "hidden_dim", "dtype", "device", "size") if rows else ()
    return html.table(caption, columns, rows, note=_ended(hit.ended_by))


@as_html.register
def coverage(plan: Coverage) -> str:
    """How far the prefix can be had, and what ends it."""
    pairs: list[tuple[str, html.Cell]] = [
        ("usable in every layer", plan.num_tokens),
        ("KV here", plan.kv_tokens),
        *((f"layer {layer} here", tokens) for layer, tokens in plan.layer_tokens.items()),
        ("size", html.size(plan.nbytes)),
        ("on nodes", ", ".join(map(html.short_id, plan.nodes)) or "none"),
        ("held", "yes" if plan.holds else "no"),
    ]
    return html.facts("Tokens of the prefix", pairs, note=_ended(plan.ended_by))


@as_html.register
def explanation(reports: Explanation) -> str:
    """A row for chunks of the same kind that follow each other."""
    rows: list[Sequence[html.Cell]] = []
    for (reason, node_id), group in groupby(reports, lambda report: (report.reason, report.node_id)):
        same = list(group)
        tone, meaning = REASONS[reason]
        tokens = f"{same[0].first_token:,} to {same[-1].first_token + same[-1].num_tokens - 1:,}"
        rows.append((tokens, len(same), html.Mark(reason, tone), meaning, html.short_id(node_id) or "-"))
    usable = sum(report.reason == OK for report in reports)
    caption = f"{usable:,} of {len(reports):,} chunks can be had"
    return html.table(caption, ("tokens", "chunks", "reason", "meaning", "node that says so"), rows)


@as_html.register
def cache_statistics(stats: CacheStatistics) -> str:
    """The client's counters, and beside them its node's."""
    layers = stats.zero_copy_total + stats.copied_total
    client: list[tuple[str, html.Cell]] = [
        ("retrieves", stats.retrieves_total),
        ("with a hit", html.share(stats.hits_total, stats.retrieves_total)),
        ("tokens asked for", stats.tokens_asked_total),
        ("tokens served", html.share(stats.tokens_served_total, stats.tokens_asked_total)),
        ("layers without a copy", html.share(stats.zero_copy_total, layers)),
        ("chunks stored", stats.stored_chunks_total),
        ("chunks that failed", stats.failed_chunks_total),
        ("rows of chunks not complete yet", html.size(stats.held_bytes)),
        ("of these given up", stats.held_dropped_total),
        ("calls that missed their deadline", stats.timeouts_total),
        ("calls that failed otherwise", stats.unreachable_total),
        ("stores of a stale revision", stats.stale_stores_total),
    ]
    mine = html.facts("This client", client)
    if stats.node is None:
        away = html.Mark("can't be reached", html.Tone.BAD)
        return html.beside(mine, html.facts("Its node", [("statistics", away)]))
    return html.beside(mine, node_statistics(stats.node))


@as_html.register
def node_statistics(node: NodeStatistics) -> str:
    """The node's pool, and beside it what was asked of the node."""
    store = node.store
    locked = "page-locked" if node.pinned else f"pageable: {node.pin_reason}" if node.pin_reason else "pageable"
    pool: list[tuple[str, html.Cell]] = [
        ("pool", f"{html.size(store.capacity_bytes)}, {locked}"),
        ("of it", html.Bar(pool_parts(store), store.capacity_bytes)),
        ("resident", html.size(store.resident_bytes)),
        ("leased to readers", html.size(store.leased_bytes)),
        ("chunks", store.num_chunks),
        ("leases, reservations, kept", f"{store.num_leases:,}, {store.num_reservations:,}, {store.num_kept:,}"),
        ("chunks stored", store.stored_chunks_total),
        ("evicted", store.evicted_chunks_total),
        ("dropped, since their KV is gone", store.kv_dropped_chunks_total),
        ("refused for lack of room", store.refused_chunks_total),
    ]
    asked: list[tuple[str, html.Cell]] = [
        ("retrieves", node.retrieves_total),
        ("with a hit", html.share(node.hits_total, node.retrieves_total)),
        ("tokens asked for", node.tokens_asked_total),
        ("tokens hit", html.share(node.tokens_served_total, node.tokens_asked_total)),
        ("ended by unknown KV", node.kv_unknown_total),
        ("KV actor asked", node.kv_asked_total),
        ("stores of stale revisions refused", node.stale_stores_total),
        ("KV source", node.kv_source),
        ("client processes", node.num_clients),
        ("process", f"pid {node.pid}, incarnation {html.short_id(node.incarnation)}"),
        *((f"revision of {current.model!r}", repr(current.name)) for current in node.revisions),
    ]
    name = html.short_id(node.node_id)
    return html.beside(html.facts(f"Pool of node {name}", pool), html.facts(f"Asked of node {name}", asked))


def _ended(ended_by: str) -> str:
    return _ENDED_BY.get(ended_by, ended_by)
