"""What `hs_cache.doctor` makes of what it has found out: pure functions from facts to findings, in a fixed order."""

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from hs_cache.doctor_facts import FAILED, INFO, OK, SKIPPED, WARNING, ClusterFacts, Finding, NodeFacts, short_id
from hs_cache.machine import DEFAULT_MARGIN_BYTES

T = TypeVar("T")

_GIB, _MIB = 1 << 30, 1 << 20
_KINDS = {"hidden_states": "hidden-state actor", "kv": "KV actor"}
_SHOWN = 3
_EVERYWHERE = "install the same hs-cache, Ray and PyTorch on every node, then stop and start the service"


def check(facts: ClusterFacts) -> tuple[Finding, ...]:
    """All findings, in the order in which they help: what makes others follow comes first."""
    return tuple(finding for one in _CHECKS for finding in one(facts))


def majority(values: Mapping[str, T], favourite: str = "") -> tuple[T, dict[str, T]]:
    """The value that most have, of equally many the one that `favourite` has; and those who have another."""
    counts = Counter(values.values())
    most = max(counts.values())
    common = [value for value, count in counts.items() if count == most]
    usual = values[favourite] if favourite in values and values[favourite] in common else common[0]
    return usual, {name: value for name, value in values.items() if value != usual}


def _nodes(facts: ClusterFacts) -> Iterator[Finding]:
    count = _count(len(facts.nodes), "node")
    dead = f"; {_count(len(facts.dead), 'other')} known to be dead" if facts.dead else ""
    if not facts.nodes:
        yield Finding("nodes", FAILED, f"Ray at {facts.address} has no node alive{dead}", "start one: ray start")
        return
    silent = [node for node in facts.nodes if node.look is None]
    for node in silent:
        yield Finding(
            "nodes",
            FAILED,
            f"node {node.short} runs nothing: {node.trouble}",
            "look at the raylet's log there; if the node is gone, Ray says so within half a minute",
            (node.node_id,),
        )
    partly = [node for node in facts.nodes if node.look is not None and node.trouble]
    for node in partly:
        yield Finding(
            "nodes",
            WARNING,
            f"node {node.short} could not tell everything: {node.trouble}",
            "run this again; if it stays so, see whether its package is that of the others",
            (node.node_id,),
        )
    if not silent and not partly:
        yield Finding("nodes", OK, f"{count} alive in Ray at {facts.address}, and each runs what it is given{dead}")


def _service(facts: ClusterFacts) -> Iterator[Finding]:
    name = repr(facts.service)
    if not facts.running:
        there = any(facts.listed.values())
        yield Finding(
            "service",
            FAILED,
            f"no controller of a service named {name} is there" + (", but actors of it are" if there else ""),
            f"start it: hs-cache start --service {facts.service}",
        )
    elif facts.controller_trouble:
        yield Finding(
            "service",
            FAILED,
            f"the controller of {name} does not answer: {facts.controller_trouble}",
            "nodes go on serving what they have; if it stays so, hs-cache stop and start, which drops what is cached",
        )
    else:
        known = len(facts.controller.nodes) if facts.controller else 0
        yield Finding("service", OK, f"{name} runs, and its controller hears of {_count(known, 'node')}")


def _carriers(facts: ClusterFacts) -> Iterator[Finding]:
    if not facts.running:
        return
    alive = {node.node_id: node for node in facts.nodes}
    progress = facts.progress
    matching = set(progress.matching) if progress else set()
    bad = False
    if progress and progress.failure is not None:
        bad = True
        yield Finding(
            "carriers",
            FAILED,
            f"a node that is to have a pool has none: {progress.failure}",
            "do what it says; the controller tries again every ten seconds",
        )
    for kind, title in _KINDS.items():
        lacking = sorted(node_id for node_id in matching & alive.keys() if node_id not in facts.listed.get(kind, ()))
        if lacking and not bad:
            yield Finding(
                "carriers",
                FAILED,
                f"no {title} on {_names(alive[node_id] for node_id in lacking)}, which matches node_selector",
                "wait some seconds if the node has just joined, else look at the controller's log",
                tuple(lacking),
            )
            bad = True
    gone = sorted({node_id for nodes in facts.listed.values() for node_id in nodes} - alive.keys())
    if facts.controller:
        gone = sorted({*gone, *(set(facts.controller.nodes) - alive.keys())})
    if gone:
        bad = True
        yield Finding(
            "carriers",
            WARNING,
            f"nodes that are gone still count: {', '.join(short_id(node_id) for node_id in gone)}",
            "nothing, if it was just lost: the controller forgets it in some seconds",
            tuple(gone),
        )
    if progress and not matching:
        yield Finding(
            "carriers",
            FAILED,
            "no node matches node_selector",
            "add a node that does, or start the service with another node_selector",
        )
    elif progress and not bad:
        rest = [node for node in facts.nodes if node.node_id not in matching]
        without = f"; clients on {_names(rest)}, not chosen by node_selector, use another node's" if rest else ""
        yield Finding("carriers", OK, f"{_count(len(matching), 'node')} to have a pool, and each has{without}")


def _package(facts: ClusterFacts) -> Iterator[Finding]:
    lacking = [node for node in facts.nodes if node.look is not None and node.look["missing"]]
    for node in lacking:
        carries = bool(facts.progress and node.node_id in facts.progress.matching)
        yield Finding(
            "package",
            FAILED if carries or not facts.running else WARNING,
            f"the workers of node {node.short} can't import hs_cache: {(node.look or {})['missing']}",
            "install hs-cache there, in the environment in which its `ray start` ran, or leave it out with "
            "node_selector and hand it no cache",
            (node.node_id,),
        )
    having = _looked_at(facts, lambda look: not look["missing"])
    versions = {name: (look["hs_cache"], look["protocol"]) for name, look in having.items()}
    files = {name: tuple(sorted(look["files"].items())) for name, look in having.items()}
    (version, protocol), others = majority(versions, "here")
    sources, changed = majority(files, "here")
    for name, (other, speaks) in others.items():
        yield Finding(
            "package",
            FAILED,
            f"{_title(facts, name)} has hs_cache {other}, protocol {speaks}; most have {version}, protocol {protocol}",
            _EVERYWHERE,
            _of(name),
        )
    for name in changed.keys() - others.keys():
        theirs, ours = dict(files[name]), dict(sources)
        different = sorted(path for path in theirs.keys() | ours.keys() if theirs.get(path) != ours.get(path))
        yield Finding(
            "package",
            FAILED,
            f"{_title(facts, name)} has other source files of hs_cache {version} than most: {_some(different)}",
            _EVERYWHERE,
            _of(name),
        )
    if not (lacking or others or changed):
        yield Finding("package", OK, f"hs_cache {version}, protocol {protocol}, with the same source files everywhere")


def _versions(facts: ClusterFacts) -> Iterator[Finding]:
    bad = False
    looked = _looked_at(facts)
    usual = {}
    for package, level in (("ray", FAILED), ("python", WARNING), ("torch", WARNING), ("numpy", WARNING)):
        usual[package], others = majority({name: look[package] for name, look in looked.items()}, "here")
        for name, version in others.items():
            bad = True
            yield Finding(
                "versions",
                level,
                f"{_title(facts, name)} has {package} {version or '(none)'}, most have {usual[package] or 'none'}",
                f"install the same {package} everywhere",
                _of(name),
            )
    if not bad:
        yield Finding(
            "versions", OK, "the same everywhere: " + ", ".join(f"{name} {text}" for name, text in usual.items())
        )


def _settings(facts: ClusterFacts) -> Iterator[Finding]:
    if facts.config is None:
        return
    running, bad = facts.config.model_dump(mode="json"), False
    for node in facts.nodes:
        if node.config is None:
            continue
        own = node.config.model_dump(mode="json")
        differing = [
            f"{name} {own[name]!r} instead of {running[name]!r}" for name in running if own[name] != running[name]
        ]
        if differing:
            bad = True
            yield Finding(
                "settings",
                FAILED,
                f"the actor of node {node.short} runs with other settings than the controller: {'; '.join(differing)}",
                "hs-cache stop, then start: these actors are left over from an earlier service",
                (node.node_id,),
            )
    if not bad:
        yield Finding(
            "settings",
            OK,
            f"every actor runs with the controller's: chunk_size {facts.config.chunk_size}, "
            f"{facts.config.max_hidden_state_cpu_size:g} GiB a node, kv_source {facts.config.kv_source}",
        )


def _clients(facts: ClusterFacts) -> Iterator[Finding]:
    if facts.config is None:
        return
    bad = False
    for node in (facts.here, *facts.nodes):
        client, title = node.client, _title(facts, node.node_id)
        if client is None:
            continue
        nodes = _of(node.node_id)
        advice = "change or unset HS_CACHE_* and LMCACHE_* in that environment, or the file that they name"
        if client["error"]:
            bad = True
            yield Finding("clients", FAILED, f"on {title} no client can connect: {client['error']}", advice, nodes)
        elif client["refused"]:
            bad = True
            yield Finding(
                "clients",
                FAILED,
                f"on {title} no client can connect: {'; '.join(client['differences'])}",
                advice,
                nodes,
            )
        elif client["disabled"]:
            bad = True
            yield Finding(
                "clients",
                WARNING,
                f"on {title} connect() gives None: enable_hidden_state_cache is false there",
                advice,
                nodes,
            )
        elif client["differences"]:
            bad = True
            yield Finding(
                "clients",
                WARNING,
                f"on {title} clients ask for what the service doesn't do, and get a warning: "
                f"{'; '.join(client['differences'])}",
                advice,
                nodes,
            )
    if not bad:
        yield Finding("clients", OK, "no environment or file asks a client for other settings than the service's")


def _keys(facts: ClusterFacts) -> Iterator[Finding]:
    bad = False
    for node in (facts.here, *facts.nodes):
        if node.keys_trouble:
            bad = True
            yield Finding(
                "keys",
                FAILED,
                f"{_title(facts, node.node_id)} can't compute keys: {node.keys_trouble}",
                _EVERYWHERE,
                _of(node.node_id),
            )
    having = {node.node_id: tuple(sorted(node.keys.items())) for node in (facts.here, *facts.nodes) if node.keys}
    if not having:
        return
    usual, others = majority(having, facts.here.node_id)
    expected = dict(usual)
    for name, pairs in others.items():
        found = dict(pairs)
        differing = sorted(
            prompt for prompt in found.keys() | expected.keys() if found.get(prompt) != expected.get(prompt)
        )
        yield Finding(
            "keys",
            FAILED,
            f"{_title(facts, name)} names chunks otherwise than the rest ({_some(differing)}), so it shares no rows",
            "make its package, Python and platform those of the others; keys depend on nothing else",
            _of(name),
        )
    if not (bad or others):
        kv = " and what the KV source calls them" if any(name.endswith(", for KV") for name in expected) else ""
        yield Finding("keys", OK, f"the same names of chunks{kv} everywhere, for {_count(len(expected), 'prompt')}")


def _actors(facts: ClusterFacts) -> Iterator[Finding]:
    silent = 0
    carriers = [node for node in facts.nodes if node.has_actors]
    for node in carriers:
        for kind, trouble, consequence in (
            ("hidden_states", node.stats_trouble, "its rows are misses, and its clients store nothing"),
            ("kv", node.kv_trouble, "what it must vouch for is a miss"),
        ):
            if trouble:
                silent += 1
                yield Finding(
                    "actors",
                    FAILED,
                    f"the {_KINDS[kind]} of node {node.short} does not answer: {trouble}; {consequence}",
                    "nothing, if it was just restarted; else end its process, and Ray starts it anew, empty",
                    (node.node_id,),
                )
    if carriers and not silent:
        incarnations = ", ".join(node.stats.incarnation[:8] for node in carriers if node.stats)
        yield Finding("actors", OK, f"both actors of {_count(len(carriers), 'node')} answer (pools {incarnations})")


def _sharing(facts: ClusterFacts) -> Iterator[Finding]:
    tried = [node for node in facts.nodes if node.not_shared is not None]
    apart = [node for node in tried if node.not_shared]
    for node in apart:
        yield Finding(
            "shared pool",
            WARNING,
            f"clients on node {node.short} can't map its pool, and copy rows through Ray's object store: "
            f"{node.not_shared}",
            "run workers and actors in one container, or with one pid namespace (docker --pid, hostPID) and one user",
            (node.node_id,),
        )
    if tried and not apart:
        yield Finding(
            "shared pool", OK, f"clients on {_count(len(tried), 'node')} map their node's pool, and copy nothing"
        )


def _pinned(facts: ClusterFacts) -> Iterator[Finding]:
    pageable = [node for node in facts.nodes if node.stats and not node.stats.pinned]
    without_cuda = [node for node in pageable if node.stats and node.stats.pin_reason == "CUDA is not available"]
    for node in pageable:
        if node.stats and node not in without_cuda:
            yield Finding(
                "page-locked",
                WARNING,
                f"the pool of node {node.short} is pageable, so GPU copies are slower: {node.stats.pin_reason}",
                "wait, if it has just been started; else raise the limit on locked memory: ulimit -l, --ulimit memlock",
                (node.node_id,),
            )
    if without_cuda:
        yield Finding("page-locked", OK, f"not needed on {_where(facts, without_cuda)}: CUDA is not available there")
    if any(node.stats and node.stats.pinned for node in facts.nodes) and not pageable:
        yield Finding("page-locked", OK, "every pool is, so GPUs copy from and to it directly")


def _memory(facts: ClusterFacts) -> Iterator[Finding]:
    tight = False
    lines = []
    for node in facts.nodes:
        if node.headroom is None or node.stats is None:
            continue
        left, limit = node.headroom
        if left < DEFAULT_MARGIN_BYTES:
            tight = True
            yield Finding(
                "memory",
                WARNING,
                f"node {node.short} has {left / _GIB:.2f} GiB left by {limit}, beside a pool of "
                f"{node.stats.store.capacity_bytes / _GIB:.2f} GiB",
                "lower max_hidden_state_cpu_size, or give the node more memory, before the kernel ends processes there",
                (node.node_id,),
            )
        lines.append(f"{node.stats.store.capacity_bytes / _GIB:.2f} of {left / _GIB:.1f}")
    if lines and not tight:
        yield Finding("memory", OK, f"pools, and what is left beside them, in GiB: {', '.join(lines)}")


def _kv(facts: ClusterFacts) -> Iterator[Finding]:
    if facts.config is None:
        return
    source = facts.config.kv_source
    answering = [node for node in facts.nodes if node.kv is not None]
    if source == "none":
        yield Finding("KV source", OK, "none: all KV counts as present")
        return
    if not answering:
        return
    deaf = [node for node in answering if node.kv and not node.kv.engines]
    lossy = [node for node in answering if node.kv and node.kv.gaps_total]
    for node in lossy:
        yield Finding(
            "KV source",
            WARNING,
            f"something that engines of node {node.short} said was lost {node.kv.gaps_total if node.kv else 0:,} times",
            "nothing, if it was an engine's restart; what was lost is unknown, and so a miss, until it is said anew",
            (node.node_id,),
        )
    if deaf and source == "reports":
        yield Finding(
            "KV source",
            OK,
            f"reports: no engine has stored or reported anything yet on {_where(facts, deaf)}",
            nodes=tuple(node.node_id for node in deaf),
        )
    elif deaf:
        how = {
            "lmcache": "call hs_cache.integrations.lmcache.attach(engine) in its engines, see docs/lmcache.md",
            "vllm_events": "start its engines with --kv-events-config and the endpoints of kv_events, see "
            "docs/kv_events.md",
        }[source]
        yield Finding(
            "KV source",
            WARNING,
            f"{source}: no engine was heard of on {_where(facts, deaf)}, so what its clients store is a miss",
            how,
            tuple(node.node_id for node in deaf),
        )
    if not deaf and not lossy:
        engines = sorted({engine for node in answering if node.kv for engine in node.kv.engines})
        yield Finding(
            "KV source", OK, f"{source}, and every node has heard of engines: {', '.join(map(repr, engines))}"
        )


def _canaries(facts: ClusterFacts) -> Iterator[Finding]:
    for node in facts.nodes:
        if node.canary and node.canary.startswith("no room"):
            yield Finding(
                "rows", SKIPPED, f"nothing is stored on node {node.short} to try: {node.canary}", nodes=(node.node_id,)
            )
        elif node.canary:
            yield Finding(
                "rows",
                FAILED,
                f"rows could not be stored on node {node.short}: {node.canary}",
                "see what is said of its actors above, and run this again",
                (node.node_id,),
            )
    titles = {node.node_id: node.short for node in facts.nodes}
    wrong = [path for path in facts.paths if path.right is False]
    late = [path for path in facts.paths if path.trouble]
    for path in wrong:
        yield Finding(
            "rows",
            FAILED,
            f"node {titles[path.reader]} read other bytes than were stored on node {titles[path.owner]}",
            "stop the service and tell its developers: wrong rows must never be handed out",
            (path.reader, path.owner),
        )
    for owner in dict.fromkeys(path.owner for path in late):
        readers = [path for path in late if path.owner == owner]
        yield Finding(
            "rows",
            FAILED,
            f"node {titles[owner]} can't be read from "
            f"{', '.join(titles[path.reader] for path in readers[:_SHOWN])}: {readers[0].trouble}",
            "see whether its actor runs, and whether these nodes reach each other on all ports that Ray uses",
            (owner, *(path.reader for path in readers)),
        )
    right = [path for path in facts.paths if path.right]
    if right and not wrong and not late:
        owners = {path.owner for path in right}
        yield Finding(
            "rows",
            OK,
            f"{facts.canary_bytes / _MIB:.3g} MiB stored on {_count(len(owners), 'node')}, read from each of "
            f"{_count(len({path.reader for path in right}), 'node')}, every byte right, and dropped",
        )
    if facts.left_over:
        yield Finding(
            "rows",
            WARNING,
            f"the rows stored to try could not be dropped for certain on "
            f"{', '.join(titles[node_id] for node_id in facts.left_over)}",
            "nothing: they go when that node sees that this process is gone, or as any others do",
            facts.left_over,
        )


def _speed(facts: ClusterFacts) -> Iterator[Finding]:
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


def _clocks(facts: ClusterFacts) -> Iterator[Finding]:
    skews = [abs(node.skew_s) for node in facts.nodes if node.look is not None]
    if skews:
        yield Finding(
            "clocks",
            INFO,
            f"within about {max(skews):.2f} s of this machine's; harmless, nothing compares clocks of nodes",
        )


_CHECKS: tuple[Callable[[ClusterFacts], Iterator[Finding]], ...] = (
    _nodes,
    _service,
    _carriers,
    _package,
    _versions,
    _settings,
    _clients,
    _keys,
    _actors,
    _sharing,
    _pinned,
    _memory,
    _kv,
    _canaries,
    _speed,
    _clocks,
)


def _looked_at(
    facts: ClusterFacts, only: Callable[[Mapping[str, Any]], bool] = lambda _: True
) -> dict[str, Mapping[str, Any]]:
    """By node, and for this process under its own name, what was found there."""
    return {node.node_id: node.look for node in (facts.here, *facts.nodes) if node.look is not None and only(node.look)}


def _title(facts: ClusterFacts, node_id: str) -> str:
    if node_id == facts.here.node_id:
        return "this process"
    return next((f"node {node.short}" for node in facts.nodes if node.node_id == node_id), node_id)


def _of(node_id: str) -> tuple[str, ...]:
    return () if node_id == "here" else (node_id,)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _names(nodes: Iterable[NodeFacts]) -> str:
    return _some([node.short for node in nodes])


def _where(facts: ClusterFacts, nodes: list[NodeFacts]) -> str:
    carriers = sum(node.stats is not None for node in facts.nodes)
    return "any node" if len(nodes) == carriers > 1 else _names(nodes)


def _some(names: list[str]) -> str:
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
