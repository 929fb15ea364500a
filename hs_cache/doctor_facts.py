"""What `hs_cache.doctor` finds out about a cluster, and what it makes of that: plain frozen values."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from hs_cache.config import CacheConfig
from hs_cache.html import short_id
from hs_cache.kv_presence import KVStatistics
from hs_cache.messages import ControllerStatistics, NodeStatistics, StartProgress

OK, WARNING, FAILED, SKIPPED, INFO = "ok", "warning", "FAILED", "skipped", "info"
"""What a check came to. Only a failed one makes a report not ok."""

_MOST_NAMED = 3

HERE = "here"
"""What stands for the process that runs it where a node's id stands for others."""


class CanaryState(Enum):
    """Whether rows were stored on a node to be read from all."""

    NOT_TRIED = "not tried"
    STORED = "stored"
    NO_ROOM = "no room"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check came to.

    Attributes:
        check: its name.
        level: ``ok``, ``warning``, ``FAILED``, ``skipped`` or ``info``.
        message: what was found.
        advice: what to do about it; ``""`` where nothing is to be done.
        nodes: hex ids of the nodes that it is about; none where it is about all of them, or about no node.
    """

    check: str
    level: str
    message: str
    advice: str = ""
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DoctorReport:
    """What `hs_cache.doctor` found.

    Attributes:
        service: the service's name.
        address: of the Ray cluster.
        nodes: hex ids of the nodes alive, in the order of the matrices' rows, and their addresses.
        findings: one per check and outcome, in the order of the checks.
        round_trip_ms: reader → owner → median round trip of a call that does next to nothing, from one node to the
            actor of another. Pairs that could not be measured are left out.
        mib_per_s: reader → owner → bandwidth of a read of `canary_bytes`; on the same node from the shared pool.
        canary_bytes: what was stored on each node for that, and dropped again.
    """

    service: str
    address: str
    nodes: Mapping[str, str]
    findings: tuple[Finding, ...]
    round_trip_ms: Mapping[str, Mapping[str, float]]
    mib_per_s: Mapping[str, Mapping[str, float]]
    canary_bytes: int

    @property
    def ok(self) -> bool:
        """Whether no check failed; there may be warnings."""
        return not self.failures

    @property
    def failures(self) -> tuple[Finding, ...]:
        """The checks that failed."""
        return tuple(finding for finding in self.findings if finding.level == FAILED)

    def __str__(self) -> str:
        lines = []
        for finding in self.findings:
            lines.append(f"{finding.level:<8} {finding.check}: {finding.message}")
            if finding.advice:
                lines.append(f"{'':<8} -> {finding.advice}")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """What the environment of a node says to clients there, compared with what the service runs with.

    Attributes:
        error: why these settings are none at all.
        differences: what they ask for that the service doesn't do.
        refused: whether a client can't connect with them.
        disabled: whether they turn the cache off.
    """

    error: str = ""
    differences: tuple[str, ...] = ()
    refused: bool = False
    disabled: bool = False


@dataclass(frozen=True, slots=True)
class ChunkNames:
    """What a node calls the chunks of some prompts, in hex: its keys, and the names that the KV source knows."""

    keys: Mapping[str, str] = field(default_factory=dict)
    kv: Mapping[str, str] = field(default_factory=dict)

    def by_prompt(self) -> dict[str, str]:
        """Both, each under a name of its own."""
        return {**self.keys, **{f"{prompt}, for KV": name for prompt, name in self.kv.items()}}


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """One node that is alive, as its probe and its actors tell of it.

    Attributes:
        trouble: why no probe ran there, or why it could not tell all; ``""`` if it did.
        look: what `hs_cache.doctor_look.Look.look` found, None if it could not.
        skew_s: how far its clock is ahead of the one of who asks, roughly; None if it wasn't asked.
        client: what `hs_cache.doctor_probe.Probe.client_settings` found.
        keys: what `Probe.keys` found, and why it found none.
        headroom: bytes that a process there can have more, and what limits that.
        has_actors: the kinds of the service's actors that are listed for it.
        config, stats, kv: what its actors answer, and why they don't.
        not_shared: why a client there can't map the pool; None where none was tried.
        canary: whether rows were stored there, and why that failed.
    """

    node_id: str
    address: str
    trouble: str = ""
    look: Mapping[str, Any] | None = None
    skew_s: float | None = None
    client: ClientSettings | None = None
    keys: ChunkNames | None = None
    keys_trouble: str = ""
    headroom: tuple[int, str] | None = None
    has_actors: frozenset[str] = frozenset()
    config: CacheConfig | None = None
    stats: NodeStatistics | None = None
    stats_trouble: str = ""
    kv: KVStatistics | None = None
    kv_trouble: str = ""
    not_shared: str | None = None
    canary: CanaryState = CanaryState.NOT_TRIED
    canary_trouble: str = ""

    @property
    def short(self) -> str:
        """How messages call it."""
        return named(self.node_id, self.address)


@dataclass(frozen=True, slots=True)
class PathFacts:
    """What one node's probe met at another's actor: seconds of a round trip and of a read, whether its bytes were
    right, and the trouble there was; or that it wasn't tried, since one of the two is at fault, see `at_fault`."""

    reader: str
    owner: str
    round_trip_s: float | None = None
    read_s: float | None = None
    right: bool | None = None
    trouble: str = ""
    tried: bool = True


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """All of it.

    Attributes:
        here: this process, as a node is looked at: its software, its settings, its keys.
        dead: hex ids of nodes that Ray knows to be dead.
        running: whether there is a controller of that name.
        config: the controller's settings; None if it doesn't answer, for `controller_trouble`.
        listed: kind of actor → nodes for which one is listed.
        paths: one per pair of a reader and an owner.
        canary_bytes: of rows stored on each node.
        left_over: nodes on which these could not be dropped for certain.
    """

    service: str
    address: str
    here: NodeFacts
    nodes: tuple[NodeFacts, ...]
    dead: frozenset[str] = frozenset()
    running: bool = False
    config: CacheConfig | None = None
    controller: ControllerStatistics | None = None
    progress: StartProgress | None = None
    controller_trouble: str = ""
    listed: Mapping[str, frozenset[str]] = field(default_factory=dict)
    paths: tuple[PathFacts, ...] = ()
    canary_bytes: int = 0
    left_over: tuple[str, ...] = ()

    def title(self, node_id: str) -> str:
        """How messages call a node, or this process."""
        if node_id == HERE:
            return "this process"
        return next((f"node {node.short}" for node in self.nodes if node.node_id == node_id), node_id)


def named(node_id: str, address: str) -> str:
    """A node's id as people can read it, and its address."""
    return f"{short_id(node_id)} ({address})" if address else short_id(node_id)


def at_fault(paths: Iterable[PathFacts]) -> tuple[frozenset[str], frozenset[str]]:
    """The nodes whose probe, and those whose actor, is what the trouble of `paths` comes from: as few as explain it.

    Trouble of a single pair may come from either, or from what lies between them, and is nobody's fault yet. Who had
    trouble with two others is at fault, the one with the most first, and what it explains speaks against nobody else.
    """
    left = {(path.reader, path.owner) for path in paths if path.trouble}
    faults: tuple[set[str], set[str]] = (set(), set())
    while left:
        counts = Counter((side, pair[side]) for pair in sorted(left) for side in (1, 0))
        ((side, node_id), count) = max(counts.items(), key=lambda item: item[1])
        if count == 1:
            break
        faults[side].add(node_id)
        left = {pair for pair in left if pair[side] != node_id}
    return frozenset(faults[0]), frozenset(faults[1])


def count(number: int, what: str) -> str:
    """A number of things, ``2 nodes``."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def some(names: list[str]) -> str:
    """The first few of them, and how many more there are."""
    rest = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def names(nodes: Iterable[NodeFacts]) -> str:
    """How messages call nodes, of which there may be many."""
    return some([node.short for node in nodes])
