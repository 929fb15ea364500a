"""What is made of facts about a cluster, with facts that are made up; and how a report is shown."""

import io
import json
import platform
import threading
from dataclasses import asdict, replace
from typing import Any

import pytest
import ray
from ray import cloudpickle
from rich.console import Console

from hs_cache import doctor_run
from hs_cache.config import CacheConfig
from hs_cache.doctor_checks import check
from hs_cache.doctor_facts import (
    FAILED,
    HERE,
    OK,
    SKIPPED,
    WARNING,
    CanaryState,
    ChunkNames,
    ClientSettings,
    ClusterFacts,
    DoctorReport,
    Finding,
    NodeFacts,
    PathFacts,
    at_fault,
)
from hs_cache.doctor_look import Look
from hs_cache.doctor_probe import Canary, Probe
from hs_cache.doctor_report import print_report
from hs_cache.doctor_software import majority
from hs_cache.errors import InvalidInputError, ServiceError
from hs_cache.kv_presence import KVStatistics
from hs_cache.messages import ControllerStatistics, NodeStatistics, StartProgress, StoreStatistics
from tests.builders import CHUNK_SIZE, SLOT_BYTES, make_tokens
from tests.direct import Controller, DirectCache, Node, make_rows
from tests.processes import run_python

A, B, C = "a" * 56, "b" * 56, "c" * 56
CONFIG = CacheConfig(chunk_size=4)
LOOK = {
    "python": "3.11.7",
    "ray": "2.60.0",
    "torch": "2.13.0",
    "numpy": "2.4.6",
    "missing": "",
    "hs_cache": "0.1.0",
    "protocol": 2,
    "files": {"hs_cache/store.py": "1", "hs_cache/server.py": "2"},
}
KEYS = ChunkNames({"tokens": "00", "spans": "01"})
CLIENT = ClientSettings()
KV = KVStatistics(present=1, absent=0, unknown=0, unlisted="unknown", reports_total=1, engines=("",))
GIB = 1 << 30


def make_stats(node_id: str, **fields: Any) -> NodeStatistics:
    store = StoreStatistics(GIB, GIB, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    counts = dict.fromkeys(
        (
            "num_clients",
            "retrieves_total",
            "hits_total",
            "tokens_asked_total",
            "tokens_served_total",
            "kv_unknown_total",
        ),
        0,
    )
    known = {"pinned": False, "pin_reason": "not needed", "without_cuda": True, "kv_source": "reports", "pid": 1}
    return NodeStatistics(node_id=node_id, incarnation="ab" * 16, store=store, **{**known, **counts, **fields})


def make_node(node_id: str, **fields: Any) -> NodeFacts:
    whole = {
        "look": LOOK,
        "client": CLIENT,
        "keys": KEYS,
        "headroom": (8 * GIB, "MemAvailable"),
        "has_actors": frozenset({"hidden_states", "kv"}),
        "config": CONFIG,
        "stats": make_stats(node_id),
        "kv": KV,
        "skew_s": 0.0,
        "not_shared": "",
        "canary": CanaryState.STORED,
    }
    return NodeFacts(node_id, f"10.0.0.{ord(node_id[0]) - 96}", **{**whole, **fields})


def make_facts(*nodes: NodeFacts, **fields: Any) -> ClusterFacts:
    """Three nodes of a service where all is well, but for `nodes`, which take the place of those with the same id."""
    given = {node.node_id: node for node in nodes}
    everyone = [given.get(node_id, make_node(node_id)) for node_id in (A, B, C)]
    ids = [node.node_id for node in everyone]
    paths = tuple(PathFacts(reader, owner, 0.001, 0.01, True) for reader in ids for owner in ids)
    whole = {
        "service": "default",
        "address": "10.0.0.1:6379",
        "here": NodeFacts(HERE, "", look=LOOK, client=CLIENT, keys=KEYS),
        "nodes": tuple(everyone),
        "running": True,
        "config": CONFIG,
        "controller": ControllerStatistics(3, (A, B, C), 0, 0),
        "progress": StartProgress(9, (A, B, C), (), None),
        "listed": {"hidden_states": frozenset(ids), "kv": frozenset(ids)},
        "paths": paths,
        "canary_bytes": 8 << 20,
    }
    return ClusterFacts(**{**whole, **fields})


def troubles(facts: ClusterFacts) -> list[tuple[str, str, str]]:
    """Check, level and message of all that is not well; each failure says what to do."""
    found = [finding for finding in check(facts) if finding.level in (WARNING, FAILED, SKIPPED)]
    assert all(finding.advice for finding in found if finding.level == FAILED)
    return [(finding.check, finding.level, finding.message) for finding in found]


def only(facts: ClusterFacts) -> tuple[str, str, str]:
    (trouble,) = troubles(facts)
    return trouble


def test_where_all_is_well_every_check_says_so() -> None:
    facts = make_facts()
    assert troubles(facts) == []
    assert [finding.check for finding in check(facts) if finding.level == OK] == [
        "nodes",
        "service",
        "carriers",
        "package",
        "versions",
        "settings",
        "clients",
        "keys",
        "actors",
        "shared pool",
        "page-locked",
        "memory",
        "KV source",
        "rows",
    ]


def test_the_majority_is_what_most_have_and_on_a_tie_the_favourite() -> None:
    assert majority({"x": 1, "y": 1, "z": 2}) == (1, {"z": 2})
    assert majority({"x": 1, "y": 2}, "y") == (2, {"x": 1})
    assert majority({"x": 1, "y": 2, "z": 2}, "x") == (2, {"x": 1})


def test_a_node_that_runs_nothing() -> None:
    silent = make_node(B, look=None, client=None, keys=None, trouble="starting a worker took more than 30 s")
    assert only(make_facts(silent)) == (
        "nodes",
        FAILED,
        "node bbbbbbbbbbbb (10.0.0.2) runs nothing: starting a worker took more than 30 s",
    )


def test_a_node_that_tells_only_a_part() -> None:
    assert only(make_facts(make_node(B, trouble="no such module", headroom=None))) == (
        "nodes",
        WARNING,
        "node bbbbbbbbbbbb (10.0.0.2) could not tell everything: no such module",
    )


def test_no_service() -> None:
    nodes = [make_node(node_id, config=None, stats=None, kv=None, has_actors=frozenset()) for node_id in (A, B, C)]
    empty = {"config": None, "controller": None, "progress": None, "paths": (), "listed": {}}
    check_name, level, message = only(make_facts(*nodes, running=False, **empty))
    assert (check_name, level) == ("service", FAILED)
    assert message == "no controller of a service named 'default' is there"


def test_a_controller_that_does_not_answer() -> None:
    gone = {"config": None, "controller": None, "progress": None, "controller_trouble": "asking it took more than 30 s"}
    name, level, message = only(make_facts(**gone))
    assert (name, level) == ("service", FAILED)
    assert message.startswith("the controller of 'default' does not answer: asking it")
    assert not [finding for finding in check(make_facts(**gone)) if finding.check == "carriers"]


def test_nodes_that_should_have_actors_and_have_none() -> None:
    listed = {"hidden_states": frozenset({A, C}), "kv": frozenset({A, B, C})}
    name, level, message = only(make_facts(listed=listed))
    assert (name, level) == ("carriers", FAILED)
    assert message == "no hidden-state actor on bbbbbbbbbbbb (10.0.0.2), which matches node_selector"
    failure = ServiceError(f"node {B}: it can't")
    failed = make_facts(listed=listed, progress=StartProgress(9, (A, B, C), (), failure))
    assert only(failed) == ("carriers", FAILED, f"a node that is to have a pool has none: node {B}: it can't")
    assert only(make_facts(progress=StartProgress(9, (), (), None)))[2] == "no node matches node_selector"


def test_nodes_that_are_not_chosen_or_gone() -> None:
    apart = make_node(C, config=None, stats=None, kv=None, has_actors=frozenset(), not_shared=None)
    facts = make_facts(
        apart,
        progress=StartProgress(9, (A, B), (), None),
        listed={"hidden_states": frozenset({A, B}), "kv": frozenset({A, B})},
    )
    assert troubles(facts) == []
    (carriers,) = [finding for finding in check(facts) if finding.check == "carriers"]
    assert "clients on cccccccccccc (10.0.0.3), not chosen by node_selector, use another node's" in carriers.message
    dead = "d" * 56
    name, level, message = only(make_facts(dead=frozenset({dead}), controller=ControllerStatistics(4, (A, dead), 0, 0)))
    assert (name, level, message) == ("carriers", WARNING, "nodes that are gone still count: dddddddddddd")


def test_a_node_without_the_package() -> None:
    look = {**LOOK, "missing": "ModuleNotFoundError: No module named 'hs_cache'"}
    without = make_node(B, look=look, client=None, keys=None, not_shared=None)
    assert only(make_facts(without)) == (
        "package",
        FAILED,
        f"the workers of node bbbbbbbbbbbb (10.0.0.2) can't import hs_cache: {look['missing']}",
    )
    apart = replace(without, has_actors=frozenset(), stats=None, kv=None, config=None)
    elsewhere = make_facts(
        apart,
        progress=StartProgress(9, (A, C), (), None),
        listed={"hidden_states": frozenset({A, C}), "kv": frozenset({A, C})},
    )
    assert only(elsewhere)[1] == WARNING


def test_another_package_says_how_it_differs() -> None:
    files = {"hs_cache/store.py": "other", "hs_cache/server.py": "2", "hs_cache/new.py": "3"}
    changed = make_node(B, look={**LOOK, "files": files})
    assert only(make_facts(changed)) == (
        "package",
        FAILED,
        "node bbbbbbbbbbbb (10.0.0.2) has other source files of hs_cache 0.1.0 than most: hs_cache/new.py, "
        "hs_cache/store.py",
    )
    older = make_node(B, look={**LOOK, "hs_cache": "0.0.9", "protocol": 1, "files": files})
    assert only(make_facts(older))[2] == (
        "node bbbbbbbbbbbb (10.0.0.2) has hs_cache 0.0.9, protocol 1; most have 0.1.0, protocol 2"
    )
    here = NodeFacts(HERE, "", look={**LOOK, "files": files}, client=CLIENT, keys=KEYS)
    assert only(make_facts(here=here))[2].startswith("this process has other source files")


@pytest.mark.parametrize(("package", "level"), [("ray", FAILED), ("torch", WARNING), ("python", WARNING)])
def test_other_versions(package: str, level: str) -> None:
    name, found, message = only(make_facts(make_node(C, look={**LOOK, package: "1.0"})))
    assert (name, found) == ("versions", level)
    assert message == f"node cccccccccccc (10.0.0.3) has {package} 1.0, most have {LOOK[package]}"


def test_actors_with_other_settings() -> None:
    other = make_node(B, config=CacheConfig(chunk_size=8, kv_source="none"))
    assert only(make_facts(other)) == (
        "settings",
        FAILED,
        "the actor of node bbbbbbbbbbbb (10.0.0.2) runs with other settings than the controller: chunk_size 8 instead "
        "of 4; kv_source 'none' instead of 'reports'",
    )


@pytest.mark.parametrize(
    ("client", "level", "said"),
    [
        ({"error": "unknown key 'chunk_sise'"}, FAILED, "no client can connect: unknown key"),
        (
            {"differences": ("chunk_size is 4, asked for 8",), "refused": True},
            FAILED,
            "no client can connect: chunk_size",
        ),
        ({"disabled": True}, WARNING, "connect() gives None"),
        ({"differences": ("kv_source is 'reports', asked for 'none'",)}, WARNING, "get a warning: kv_source"),
    ],
)
def test_clients_that_would_disagree(client: dict[str, Any], level: str, said: str) -> None:
    name, found, message = only(make_facts(make_node(B, client=replace(CLIENT, **client))))
    assert (name, found) == ("clients", level)
    assert said in message


def test_other_names_of_chunks() -> None:
    name, level, message = only(make_facts(make_node(B, keys=ChunkNames({**KEYS.keys, "spans": "ff"}))))
    assert (name, level) == ("keys", FAILED)
    assert message == "node bbbbbbbbbbbb (10.0.0.2) names chunks otherwise than the rest (spans), so it shares no rows"
    assert only(make_facts(make_node(B, keys=None, keys_trouble="no xxhash")))[2].endswith(
        "can't compute keys: no xxhash"
    )


def test_actors_that_do_not_answer() -> None:
    silent = make_node(B, stats=None, config=None, stats_trouble="asking it took more than 30 s", not_shared=None)
    assert only(make_facts(silent))[2].startswith(
        "the hidden-state actor of node bbbbbbbbbbbb (10.0.0.2) does not answer"
    )
    deaf = make_node(B, kv=None, kv_trouble="gone")
    assert only(make_facts(deaf))[2].startswith("the KV actor of node bbbbbbbbbbbb (10.0.0.2) does not answer: gone")


def test_pools_that_are_not_shared_pageable_or_tight() -> None:
    apart = make_node(B, not_shared="the client lives in another pid namespace")
    assert only(make_facts(apart))[:2] == ("shared pool", WARNING)
    pageable = make_node(B, stats=make_stats(B, pin_reason="cudaHostRegister failed with error 2", without_cuda=False))
    assert only(make_facts(pageable))[0] == "page-locked"
    tight = make_node(B, headroom=(1 << 20, "cgroup memory.max"))
    name, level, message = only(make_facts(tight))
    assert (name, level) == ("memory", WARNING)
    assert "by cgroup memory.max" in message
    pinned = [make_node(node_id, stats=make_stats(node_id, pinned=True)) for node_id in (A, B, C)]
    assert "every pool is, so GPUs copy from and to it directly" in {
        finding.message for finding in check(make_facts(*pinned))
    }


@pytest.mark.parametrize("source", ["lmcache", "vllm_events"])
def test_a_kv_source_that_nobody_feeds(source: str) -> None:
    config = CacheConfig(chunk_size=16, kv_source=source, kv_events=[{"endpoint": "tcp://127.0.0.1:5557"}])
    nodes = [make_node(node_id, config=config, kv=replace(KV, engines=())) for node_id in (A, B, C)]
    name, level, message = only(make_facts(*nodes, config=config))
    assert (name, level) == ("KV source", WARNING)
    assert message.startswith(f"{source}: no engine was heard of on any node")
    lossy = make_node(B, config=config, kv=replace(KV, gaps_total=2))
    others = [make_node(node_id, config=config) for node_id in (A, C)]
    assert "lost 2 times" in only(make_facts(lossy, *others, config=config))[2]


def test_rows_that_are_wrong_late_or_have_no_room() -> None:
    good = make_facts().paths
    wrong = tuple(replace(path, right=False) if (path.reader, path.owner) == (A, B) else path for path in good)
    assert only(make_facts(paths=wrong)) == (
        "rows",
        FAILED,
        "node aaaaaaaaaaaa (10.0.0.1) read other bytes than were stored on node bbbbbbbbbbbb (10.0.0.2)",
    )
    name, level, message = only(make_facts(paths=late((A, B), (B, B), (C, B))))
    assert (name, level) == ("rows", FAILED)
    assert message == (
        "node bbbbbbbbbbbb (10.0.0.2) can't be read from node aaaaaaaaaaaa (10.0.0.1), node bbbbbbbbbbbb (10.0.0.2), "
        "node cccccccccccc (10.0.0.3): too late"
    )
    full = only(make_facts(make_node(B, canary=CanaryState.NO_ROOM), paths=()))
    assert full[:2] == ("rows", SKIPPED)
    assert full[2].endswith("no room in its pool without evicting what is cached")
    failed = only(
        make_facts(make_node(B, canary=CanaryState.FAILED, canary_trouble="no room, said somebody"), paths=())
    )
    assert failed[1:] == (FAILED, "rows could not be stored on node bbbbbbbbbbbb (10.0.0.2): no room, said somebody")
    assert "could not be dropped" in only(make_facts(left_over=(A,)))[2]


def late(*pairs: tuple[str, str]) -> tuple[PathFacts, ...]:
    """Paths of three nodes of which these had trouble."""
    return tuple(
        replace(path, right=None, trouble="too late") if (path.reader, path.owner) in pairs else path
        for path in make_facts().paths
    )


def test_who_had_trouble_with_two_others_is_at_fault_and_nobody_else() -> None:
    nobody = frozenset[str]()
    assert at_fault(late()) == (nobody, nobody)
    assert at_fault(late((A, B), (B, A))) == (nobody, nobody), "a link that is cut"
    assert at_fault(late((A, A), (A, B))) == ({A}, nobody), "a reader that hangs, before anybody else tried B"
    assert at_fault(late((A, B), (C, B))) == (nobody, {B}), "an actor that hangs"
    gone = [(one, other) for one in (A, B, C) for other in (A, B, C) if A in (one, other)]
    assert at_fault(late(*gone)) == ({A}, {A})
    two = [(reader, owner) for reader in (A, B) for owner in (A, B, C)]
    assert at_fault(late(*two)) == ({A, B}, nobody), "C had trouble with both, and is not to blame"


def test_a_reader_that_hangs_is_blamed_and_its_partners_are_not() -> None:
    paths = tuple(
        replace(path, right=None, tried=False) if (path.reader, path.owner) == (A, C) else path
        for path in late((A, A), (A, B))
    )
    failed, skipped = troubles(make_facts(paths=paths))
    assert failed[:2] == ("rows", FAILED)
    assert failed[2].startswith("node aaaaaaaaaaaa (10.0.0.1) can't read from node aaaaaaaaaaaa (10.0.0.1), node bbbb")
    assert skipped == (
        "rows",
        SKIPPED,
        "not tried after that: node cccccccccccc (10.0.0.3) from node aaaaaaaaaaaa (10.0.0.1)",
    )
    (about,) = [finding.nodes for finding in check(make_facts(paths=paths)) if finding.level == FAILED]
    assert about[0] == A


def test_a_link_that_is_cut_is_told_as_that() -> None:
    found = troubles(make_facts(paths=late((A, B), (B, A))))
    assert [message for *_, message in found] == [
        "node bbbbbbbbbbbb (10.0.0.2) can't be read from node aaaaaaaaaaaa (10.0.0.1): too late",
        "node aaaaaaaaaaaa (10.0.0.1) can't be read from node bbbbbbbbbbbb (10.0.0.2): too late",
    ]


class Scripted(doctor_run._Examination):
    """An examination in which the pairs `bad` have trouble, and all others answer."""

    def __init__(self, bad: set[tuple[str, str]], nodes: tuple[str, ...]) -> None:
        super().__init__("default", 1.0)
        self._bad = bad
        self._probes = dict.fromkeys(nodes)
        self._owners = dict.fromkeys(nodes)
        self._attached = dict.fromkeys(nodes)  # type: ignore[arg-type]
        self._nodes = {node_id: make_node(node_id) for node_id in nodes}

    def _tried(self, method: str, pairs: Any, found: dict[tuple[str, str], PathFacts]) -> dict[tuple[str, str], Any]:
        for pair in self._bad.intersection(pairs):
            found[pair] = replace(found[pair], trouble="too late")
        return {pair: 0.1 if method == "ping" else (True, 0.1) for pair in pairs if pair not in self._bad}


def test_a_reader_that_hangs_ends_nothing_but_its_own_reads() -> None:
    nodes = (A, B, C, "d" * 56)
    paths = Scripted({(B, owner) for owner in nodes}, nodes)._measure()
    assert len(paths) == 16
    assert {(path.reader, path.tried) for path in paths if not path.right} == {(B, True), (B, False)}
    assert sum(bool(path.trouble) for path in paths) == 2
    assert at_fault(paths) == ({B}, frozenset())


def test_clients_that_their_own_node_does_not_serve_are_not_asked_to_read() -> None:
    examination = Scripted(set(), (A, B, C))
    del examination._owners[B], examination._attached[B]
    paths = examination._measure()
    assert {path.owner for path in paths} == {A, C}
    assert {path.reader for path in paths if path.round_trip_s} == {A, B, C}
    assert {path.reader for path in paths if path.right} == {A, C}


def test_a_link_that_is_cut_keeps_nobody_from_anybody_else() -> None:
    nodes = (A, B, C, "d" * 56)
    paths = Scripted({(A, B), (B, A)}, nodes)._measure()
    assert all(path.tried for path in paths)
    assert {(path.reader, path.owner) for path in paths if not path.right} == {(A, B), (B, A)}


def test_all_actors_together_are_looked_up_in_the_time_of_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    never, asked = threading.Event(), []

    def find_actor(*whom: str) -> None:
        asked.append(whom)
        never.wait(60)

    monkeypatch.setattr(doctor_run, "find_actor", find_actor)
    examination = Scripted(set(), (A, B, C))
    examination._timeout_s = 0.2
    with pytest.raises(ServiceError, match="did not answer in time"):
        examination._ask_actors()
    assert len(asked) == 1
    monkeypatch.undo()
    never.set()


def make_report(*findings: Finding) -> DoctorReport:
    return DoctorReport(
        service="default",
        address="10.0.0.1:6379",
        nodes={A: "10.0.0.1", B: "10.0.0.2"},
        findings=findings or (Finding("nodes", OK, "2 nodes"),),
        round_trip_ms={A: {A: 0.5, B: 1.25}, B: {A: 1.0}},
        mib_per_s={A: {A: 4000.0, B: 812.4}},
        canary_bytes=8 << 20,
    )


def shown(report: DoctorReport) -> list[str]:
    text = io.StringIO()
    print_report(report, Console(file=text, width=80))
    return text.getvalue().splitlines()


def test_a_report_is_printed_line_by_line() -> None:
    bad = Finding("keys", FAILED, "node [bold]x[/bold] " + "differs " * 20, "install it", (B,))
    lines = shown(make_report(Finding("nodes", OK, "2 nodes"), bad))
    assert lines[0] == "ok       nodes: 2 nodes"
    assert lines[1].startswith("FAILED   keys: node [bold]x[/bold] differs differs")
    assert lines[2] == "         -> install it"
    assert lines[-1] == "1 failed, 0 warnings."
    assert any("812" in line and "4,000" in line for line in lines)
    assert any("1  aaaaaaaaaaaa (10.0.0.1)" in line and "0.50" in line and "1.25" in line for line in lines)
    assert any("2  bbbbbbbbbbbb (10.0.0.2)" in line and "-" in line for line in lines)
    assert shown(make_report())[-1] == "All right."
    assert shown(make_report(Finding("memory", WARNING, "tight", "more")))[-1] == "All right, 1 warning."


def test_a_report_knows_whether_all_is_well_and_is_json() -> None:
    assert make_report(Finding("memory", WARNING, "tight", "more")).ok
    bad = make_report(Finding("keys", FAILED, "differ", "install it"))
    assert (bad.ok, [finding.check for finding in bad.failures]) == (False, ["keys"])
    assert str(bad) == "FAILED   keys: differ\n         -> install it"
    assert json.loads(json.dumps(asdict(bad)))["mib_per_s"][A][B] == 812.4


WITHOUT_THE_PACKAGE = """
import json, sys
from ray import cloudpickle
sys.modules["hs_cache"] = None
look = cloudpickle.loads(bytes.fromhex(sys.argv[1]))()
print(json.dumps(look.look()))
"""


def test_who_looks_travels_by_value_and_works_without_the_package() -> None:
    pickled = cloudpickle.dumps(doctor_run.Look)
    done = run_python(["-c", WITHOUT_THE_PACKAGE, pickled.hex()])
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["missing"].startswith("ModuleNotFoundError: import of hs_cache halted")
    assert (found["ray"], found["python"]) == (ray.__version__, platform.python_version())
    here = Look().look()
    assert here["missing"] == ""
    assert {"hs_cache/store.py", "actors/pair.py"} <= here["files"].keys()


def test_a_probe_names_chunks_and_settings() -> None:
    probe = Probe("default")
    for settings in ({}, {"kv_source": "lmcache", "pre_caching_hash_algorithm": "sha256_cbor"}):
        keys = probe.keys(CacheConfig(chunk_size=16, **settings).model_dump())
        assert len(set(keys.keys.values())) == len(keys.keys)
        assert bool(keys.kv) is bool(settings)
        assert len(keys.by_prompt()) == len(keys.keys) + len(keys.kv)
        assert keys == Probe("other").keys(CacheConfig(chunk_size=16, **settings).model_dump())
    assert probe.client_settings(CONFIG.model_dump()) == ClientSettings()


def test_a_probe_says_what_a_client_would_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = Probe("default")
    monkeypatch.setenv("HS_CACHE_CHUNK_SIZE", "8")
    found = probe.client_settings(CONFIG.model_dump())
    assert found == ClientSettings(differences=("chunk_size is 4, asked for 8",), refused=True)
    monkeypatch.setenv("HS_CACHE_CHUNK_SISE", "8")
    assert "HS_CACHE_CHUNK_SISE" in probe.client_settings(CONFIG.model_dump()).error


def make_probe(node: Node) -> Probe:
    """The probe of a node, which reaches servers in this process."""
    probe = Probe("default")
    probe._router = DirectCache(node)  # type: ignore[assignment]
    return probe


@pytest.mark.parametrize("source", ["reports", "none", "lmcache", "vllm_events"])
def test_a_canary_is_stored_and_read_everywhere_as_a_client_does_it(source: str) -> None:
    controller = Controller()
    events = [{"endpoint": "tcp://127.0.0.1:1", "block_size": CHUNK_SIZE}] if source == "vllm_events" else []
    one, two = (Node(controller=controller, kv_source=source, kv_events=events) for _ in range(2))
    probe, other = make_probe(one), make_probe(two)
    attached, _ = probe.attach(1.0), other.attach(1.0)
    assert (attached.incarnation, attached.not_shared) == (one.pool.incarnation, "")
    canary = Canary(b"k" * 16, b"s" * 16, 8 * SLOT_BYTES)
    controller.unreachable = True  # nobody needs it
    assert probe.put(canary, attached.hold_id, 1.0)
    assert "commit" in one.calls, "through the pool"
    for reader in (probe, other):
        right, took_s = reader.read(one.name, canary, 1.0)
        assert right
        assert took_s > 0
    assert other.read(two.name, canary, 1.0) == (None, 0.0)
    assert probe.read(one.name, replace(canary, space=b"x" * 16), 1.0)[0] is False, "other bytes are seen"
    stats = one.server.stats()
    assert (stats.retrieves_total, stats.store.num_kept) == (0, 1)
    one.server.release(attached.incarnation, attached.client_id, (attached.hold_id,))
    assert one.settled().num_chunks == 0


def test_no_canary_is_stored_where_the_pool_has_filled_since_it_was_asked() -> None:
    node = Node(slots=16)
    probe = make_probe(node)
    hold_id = probe.attach(1.0).hold_id
    tokens = make_tokens("abcdef")
    cache = DirectCache(node)
    cache.run(cache.session.store(tokens, {0: make_rows(tokens)}, 0, ()))
    before = node.server.store.stats()
    assert not probe.put(Canary(b"k" * 16, b"s" * 16, 4 * SLOT_BYTES), hold_id, 1.0)
    assert node.server.store.stats() == before


def test_a_probe_whose_node_has_lost_its_actor_stores_nothing_elsewhere() -> None:
    node = Node()
    probe = Probe("default")
    probe._router = DirectCache(node, far=True)  # type: ignore[assignment]
    with pytest.raises(ServiceError, match="the actor of its own node is gone"):
        probe.attach(1.0)


@pytest.mark.parametrize("timeout_s", [-1, "5", True, None, float("nan"), float("inf")])
def test_a_wrong_timeout_is_refused_before_anything(timeout_s: Any) -> None:
    with pytest.raises(InvalidInputError, match="timeout_s: got"):
        doctor_run.doctor(timeout_s=timeout_s)
