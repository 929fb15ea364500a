"""What `hs_cache.doctor` finds out about a cluster, and what it makes of that: plain frozen values."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hs_cache.config import CacheConfig
from hs_cache.kv_presence import KVStatistics
from hs_cache.messages import ControllerStatistics, NodeStatistics, StartProgress

OK, WARNING, FAILED, SKIPPED, INFO = "ok", "warning", "FAILED", "skipped", "info"
"""What a check came to. Only a failed one makes a report not ok."""

_ID_CHARS = 8


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
class NodeFacts:
    """One node that is alive, as its probe and its actors tell of it.

    Attributes:
        trouble: why no probe ran there, or why it could not tell all; ``""`` if it did.
        look: what `hs_cache.doctor_probe.Probe.look` found, None without a probe.
        skew_s: how far its clock is ahead of the one of who asks, roughly.
        client: what `Probe.client_settings` found.
        keys: what `Probe.keys` found, and why it found none.
        headroom: bytes that a process there can have more, and what limits that.
        has_actors: the kinds of the service's actors that are listed for it.
        config, stats, kv: what its actors answer, and why they don't.
        incarnation: of its pool, when its probe became a client; b"" if it didn't.
        not_shared: why a client there can't map the pool; None where none was tried.
        canary: ``""`` if rows were stored there, else why not; None where that wasn't tried.
    """

    node_id: str
    address: str
    trouble: str = ""
    look: Mapping[str, Any] | None = None
    skew_s: float = 0.0
    client: Mapping[str, Any] | None = None
    keys: Mapping[str, str] | None = None
    keys_trouble: str = ""
    headroom: tuple[int, str] | None = None
    has_actors: frozenset[str] = frozenset()
    config: CacheConfig | None = None
    stats: NodeStatistics | None = None
    stats_trouble: str = ""
    kv: KVStatistics | None = None
    kv_trouble: str = ""
    incarnation: bytes = b""
    not_shared: str | None = None
    canary: str | None = None

    @property
    def short(self) -> str:
        """How messages call it."""
        return short_id(self.node_id, self.address)


@dataclass(frozen=True, slots=True)
class PathFacts:
    """What one node's probe met at another's actor: seconds of a round trip and of a read, whether its bytes were
    right, and the trouble there was."""

    reader: str
    owner: str
    round_trip_s: float | None = None
    read_s: float | None = None
    right: bool | None = None
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """All of it.

    Attributes:
        here: this process, as a node is looked at: its software, its settings, its keys.
        dead: hex ids of nodes that Ray knows to be dead.
        running: whether there is a controller of that name.
        config: the controller's settings; None if it doesn't answer, for `controller_trouble`.
        listed: kind of actor → nodes for which one is listed.
        paths: one per pair of a reader and an owner that were tried.
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


def short_id(node_id: str, address: str = "") -> str:
    """A node's id as people can read it, and its address."""
    return f"{node_id[:_ID_CHARS]} ({address})" if address else node_id[:_ID_CHARS]
