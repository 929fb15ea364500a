"""Checks of `hs_cache.doctor`: what is installed on the nodes, and what it makes of settings and prompts there."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from hs_cache.doctor_facts import FAILED, HERE, OK, WARNING, ClusterFacts, Finding, count, some

T = TypeVar("T")

_EVERYWHERE = "install the same hs-cache, Ray and PyTorch on every node, then stop and start the service"


def majority(values: Mapping[str, T], favourite: str = "") -> tuple[T, dict[str, T]]:
    """The value that most have, of equally many the one that `favourite` has; and those who have another."""
    counts = Counter(values.values())
    most = max(counts.values())
    common = [value for value, count in counts.items() if count == most]
    usual = values[favourite] if favourite in values and values[favourite] in common else common[0]
    return usual, {name: value for name, value in values.items() if value != usual}


def check_nodes(facts: ClusterFacts) -> Iterator[Finding]:
    """Every node alive runs what it is given."""
    alive = count(len(facts.nodes), "node")
    dead = f"; {count(len(facts.dead), 'other')} known to be dead" if facts.dead else ""
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
        yield Finding("nodes", OK, f"{alive} alive in Ray at {facts.address}, and each runs what it is given{dead}")


def check_package(facts: ClusterFacts) -> Iterator[Finding]:
    """The same package is everywhere."""
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
    (version, protocol), others = majority(versions, HERE)
    sources, changed = majority(files, HERE)
    for name, (other, speaks) in others.items():
        yield Finding(
            "package",
            FAILED,
            f"{facts.title(name)} has hs_cache {other}, protocol {speaks}; most have {version}, protocol {protocol}",
            _EVERYWHERE,
            _of(name),
        )
    for name in changed.keys() - others.keys():
        theirs, ours = dict(files[name]), dict(sources)
        different = sorted(path for path in theirs.keys() | ours.keys() if theirs.get(path) != ours.get(path))
        yield Finding(
            "package",
            FAILED,
            f"{facts.title(name)} has other source files of hs_cache {version} than most: {some(different)}",
            _EVERYWHERE,
            _of(name),
        )
    if not (lacking or others or changed):
        yield Finding("package", OK, f"hs_cache {version}, protocol {protocol}, with the same source files everywhere")


def check_versions(facts: ClusterFacts) -> Iterator[Finding]:
    """So are Ray, Python and what computes."""
    bad = False
    looked = _looked_at(facts)
    usual = {}
    for package, level in (("ray", FAILED), ("python", WARNING), ("torch", WARNING), ("numpy", WARNING)):
        usual[package], others = majority({name: look[package] for name, look in looked.items()}, HERE)
        for name, version in others.items():
            bad = True
            yield Finding(
                "versions",
                level,
                f"{facts.title(name)} has {package} {version or '(none)'}, most have {usual[package] or 'none'}",
                f"install the same {package} everywhere",
                _of(name),
            )
    if not bad:
        yield Finding(
            "versions", OK, "the same everywhere: " + ", ".join(f"{name} {text}" for name, text in usual.items())
        )


def check_clients(facts: ClusterFacts) -> Iterator[Finding]:
    """No environment or file makes clients ask for what the service doesn't do."""
    if facts.config is None:
        return
    bad = False
    for node in (facts.here, *facts.nodes):
        client, title = node.client, facts.title(node.node_id)
        if client is None:
            continue
        nodes = _of(node.node_id)
        advice = "change or unset HS_CACHE_* and LMCACHE_* in that environment, or the file that they name"
        if client.error:
            bad = True
            yield Finding("clients", FAILED, f"on {title} no client can connect: {client.error}", advice, nodes)
        elif client.refused:
            bad = True
            yield Finding(
                "clients",
                FAILED,
                f"on {title} no client can connect: {'; '.join(client.differences)}",
                advice,
                nodes,
            )
        elif client.disabled:
            bad = True
            yield Finding(
                "clients",
                WARNING,
                f"on {title} connect() gives None: enable_hidden_state_cache is false there",
                advice,
                nodes,
            )
        elif client.differences:
            bad = True
            yield Finding(
                "clients",
                WARNING,
                f"on {title} clients ask for what the service doesn't do, and get a warning: "
                f"{'; '.join(client.differences)}",
                advice,
                nodes,
            )
    if not bad:
        yield Finding("clients", OK, "no environment or file asks a client for other settings than the service's")


def check_keys(facts: ClusterFacts) -> Iterator[Finding]:
    """Every node names chunks alike."""
    bad = False
    for node in (facts.here, *facts.nodes):
        if node.keys_trouble:
            bad = True
            yield Finding(
                "keys",
                FAILED,
                f"{facts.title(node.node_id)} can't compute keys: {node.keys_trouble}",
                _EVERYWHERE,
                _of(node.node_id),
            )
    everyone = (facts.here, *facts.nodes)
    having = {node.node_id: tuple(sorted(node.keys.by_prompt().items())) for node in everyone if node.keys}
    if not having:
        return
    usual, others = majority(having, HERE)
    expected = dict(usual)
    for name, pairs in others.items():
        found = dict(pairs)
        differing = sorted(
            prompt for prompt in found.keys() | expected.keys() if found.get(prompt) != expected.get(prompt)
        )
        yield Finding(
            "keys",
            FAILED,
            f"{facts.title(name)} names chunks otherwise than the rest ({some(differing)}), so it shares no rows",
            "make its package, Python and platform those of the others; keys depend on nothing else",
            _of(name),
        )
    if not (bad or others):
        kv = " and what the KV source calls them" if any(node.keys and node.keys.kv for node in everyone) else ""
        yield Finding("keys", OK, f"the same names of chunks{kv} everywhere, for {count(len(expected), 'prompt')}")


def _looked_at(
    facts: ClusterFacts, only: Callable[[Mapping[str, Any]], bool] = lambda _: True
) -> dict[str, Mapping[str, Any]]:
    """By node, and for this process under its own name, what was found there."""
    return {node.node_id: node.look for node in (facts.here, *facts.nodes) if node.look is not None and only(node.look)}


def _of(node_id: str) -> tuple[str, ...]:
    return () if node_id == HERE else (node_id,)
