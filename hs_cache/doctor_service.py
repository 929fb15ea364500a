"""Checks of `hs_cache.doctor`: a service's controller, its actors, and their pools."""

from collections.abc import Iterator

from hs_cache.doctor_facts import FAILED, OK, WARNING, ClusterFacts, Finding, NodeFacts, count, names
from hs_cache.html import short_id
from hs_cache.machine import DEFAULT_MARGIN_BYTES

_GIB = 1 << 30
_KINDS = {"hidden_states": "hidden-state actor", "kv": "KV actor"}


def check_service(facts: ClusterFacts) -> Iterator[Finding]:
    """The service runs, and its controller answers."""
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
        yield Finding("service", OK, f"{name} runs, and its controller hears of {count(known, 'node')}")


def check_carriers(facts: ClusterFacts) -> Iterator[Finding]:
    """Nodes that are to have a pool have one, and no others count."""
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
                f"no {title} on {names(alive[node_id] for node_id in lacking)}, which matches node_selector",
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
        without = f"; clients on {names(rest)}, not chosen by node_selector, use another node's" if rest else ""
        yield Finding("carriers", OK, f"{count(len(matching), 'node')} to have a pool, and each has{without}")


def check_settings(facts: ClusterFacts) -> Iterator[Finding]:
    """Every actor runs with the controller's settings."""
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


def check_actors(facts: ClusterFacts) -> Iterator[Finding]:
    """Both actors of each node answer."""
    silent = 0
    carriers = [node for node in facts.nodes if node.has_actors]
    for node in carriers:
        for kind, trouble, consequence in (
            ("hidden_states", node.stats_trouble, "its rows are misses, and its clients store and read nothing"),
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
        incarnations = ", ".join(short_id(node.stats.incarnation) for node in carriers if node.stats)
        yield Finding("actors", OK, f"both actors of {count(len(carriers), 'node')} answer (pools {incarnations})")


def check_sharing(facts: ClusterFacts) -> Iterator[Finding]:
    """Clients map their node's pool."""
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
            "shared pool", OK, f"clients on {count(len(tried), 'node')} map their node's pool, and copy nothing"
        )


def check_pinned(facts: ClusterFacts) -> Iterator[Finding]:
    """Pools are page-locked where there is CUDA."""
    pageable = [node for node in facts.nodes if node.stats and not node.stats.pinned]
    without_cuda = [node for node in pageable if node.stats and node.stats.without_cuda]
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


def check_memory(facts: ClusterFacts) -> Iterator[Finding]:
    """Enough memory is left beside the pools."""
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


def check_kv(facts: ClusterFacts) -> Iterator[Finding]:
    """Engines tell what the KV source has to know."""
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


def _where(facts: ClusterFacts, nodes: list[NodeFacts]) -> str:
    carriers = sum(node.stats is not None for node in facts.nodes)
    return "any node" if len(nodes) == carriers > 1 else names(nodes)
