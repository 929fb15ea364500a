"""Checks of `hs_cache.doctor`: rows that were stored on each node and read from each, and how long that took."""

import statistics
from collections.abc import Iterable, Iterator

from hs_cache.doctor_facts import (
    FAILED,
    INFO,
    OK,
    SKIPPED,
    WARNING,
    CanaryState,
    ClusterFacts,
    Finding,
    at_fault,
    count,
    some,
)

_MIB = 1 << 20


def check_rows(facts: ClusterFacts) -> Iterator[Finding]:
    """What is stored on a node is read from all, and right."""
    for node in facts.nodes:
        if node.canary is CanaryState.NO_ROOM:
            yield Finding(
                "rows",
                SKIPPED,
                f"nothing is stored on node {node.short} to try: no room in its pool without evicting what is cached",
                nodes=(node.node_id,),
            )
        elif node.canary is CanaryState.FAILED:
            yield Finding(
                "rows",
                FAILED,
                f"rows could not be stored on node {node.short}: {node.canary_trouble}",
                "see what is said of its actors above, and run this again",
                (node.node_id,),
            )
    wrong = [path for path in facts.paths if path.right is False]
    for path in wrong:
        yield Finding(
            "rows",
            FAILED,
            f"{facts.title(path.reader)} read other bytes than were stored on {facts.title(path.owner)}",
            "stop the service and tell its developers: wrong rows must never be handed out",
            (path.reader, path.owner),
        )
    yield from _troubles(facts)
    right = [path for path in facts.paths if path.right]
    if right and not wrong and not any(path.trouble for path in facts.paths):
        owners = {path.owner for path in right}
        yield Finding(
            "rows",
            OK,
            f"{facts.canary_bytes / _MIB:.3g} MiB stored on {count(len(owners), 'node')}, read from each of "
            f"{count(len({path.reader for path in right}), 'node')}, every byte right, and dropped",
        )
    if facts.left_over:
        yield Finding(
            "rows",
            WARNING,
            f"the rows stored to try could not be dropped for certain on "
            f"{some([facts.title(node_id) for node_id in facts.left_over])}",
            "nothing: they go when that node sees that this process is gone, or as any others do",
            facts.left_over,
        )


def _troubles(facts: ClusterFacts) -> Iterator[Finding]:
    """Of whom is at fault once, and of each pair that nobody's fault explains; then what was not tried for that."""
    readers, owners = at_fault(facts.paths)
    late = [path for path in facts.paths if path.trouble]
    for owner in sorted(owners):
        met = [path for path in late if path.owner == owner and path.reader not in readers]
        yield Finding(
            "rows",
            FAILED,
            f"{facts.title(owner)} can't be read from {_named(facts, [path.reader for path in met])}: {met[0].trouble}",
            "see whether its actor runs, and whether other nodes reach it on all ports that Ray uses",
            (owner, *(path.reader for path in met)),
        )
    for reader in sorted(readers):
        met = [path for path in late if path.reader == reader and path.owner not in owners]
        yield Finding(
            "rows",
            FAILED,
            f"{facts.title(reader)} can't read from {_named(facts, [path.owner for path in met])}: {met[0].trouble}",
            "see whether workers there still run, and whether it reaches other nodes on all ports that Ray uses",
            (reader, *(path.owner for path in met)),
        )
    for path in late:
        if path.reader not in readers and path.owner not in owners:
            yield Finding(
                "rows",
                FAILED,
                f"{facts.title(path.owner)} can't be read from {facts.title(path.reader)}: {path.trouble}",
                "see whether these two reach each other on all ports that Ray uses",
                (path.owner, path.reader),
            )
    untried = [path for path in facts.paths if not path.tried]
    if untried:
        yield Finding(
            "rows",
            SKIPPED,
            f"not tried after that: {some([f'{facts.title(p.owner)} from {facts.title(p.reader)}' for p in untried])}",
            nodes=tuple(sorted({node_id for path in untried for node_id in (path.reader, path.owner)})),
        )


def _named(facts: ClusterFacts, nodes: Iterable[str]) -> str:
    return some([facts.title(node_id) for node_id in nodes])


def check_speed(facts: ClusterFacts) -> Iterator[Finding]:
    """How long calls and reads take."""
    trips = [path.round_trip_s for path in facts.paths if path.round_trip_s is not None]
    if not trips:
        return
    yield Finding(
        "round trip", INFO, f"{statistics.median(trips) * 1e3:.2f} ms (median of pairs), {max(trips) * 1e3:.2f} at most"
    )
    for title, local in (("on a node", True), ("between nodes", False)):
        reads = [
            facts.canary_bytes / path.read_s / _MIB
            for path in facts.paths
            if path.read_s and (path.reader == path.owner) is local
        ]
        if reads:
            yield Finding(
                "bandwidth",
                INFO,
                f"{title} {statistics.median(reads):,.0f} MiB/s (median of pairs), {min(reads):,.0f} at least",
            )


def check_clocks(facts: ClusterFacts) -> Iterator[Finding]:
    """How far clocks are apart."""
    skews = [abs(node.skew_s) for node in facts.nodes if node.skew_s is not None]
    if skews:
        yield Finding(
            "clocks",
            INFO,
            f"within about {max(skews):.2f} s of this machine's; harmless, nothing compares clocks of nodes",
        )
