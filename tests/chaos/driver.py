"""A run of the chaos test: three nodes, clients on all of them, blows on everything, and audits at the end."""

import asyncio
import logging
import os
import random
import shutil
import signal
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import hs_cache
from actors import deploy
from hs_cache.config import CacheConfig, NodeRequirements
from hs_cache.errors import ServiceError
from hs_cache.router import HIDDEN_STATES, actors_of, controller_name, find_actor, find_controller
from tests.chaos.clients import AsyncClient, Client, Doubt, Given, Late, Of, Report, Setting
from tests.chaos.payloads import Envelope
from tests.chaos.plan import Blow, Bump, Operation, blows, bumps
from tests.chaos.probe import probe, probe_old_weights
from tests.chaos.rows import CHUNK_SIZE, ENGINES, SPACES, WEIGHTS_MODEL, revision_number
from tests.processes import MARK, ROOT, marked_processes, open_pools, shared_memory_files, wait_until

NODES = 3
"""That have a pool. The head node has none: clients there get and send all rows through the object store."""

_POOL = "hs_cache_pool"
"""The resource of the nodes that have one."""
RPC_TIMEOUT_S = 2.0
POOL_BYTES = 6 << 20
"""Room for some 240 chunks of all layers per node; the prompts have about 1,300."""

SLACK_S = 2.0
"""Beyond a call's limit. Some dozen processes share two cores, and each one that is started anew, after a kill or for a
node, computes for some two seconds before it answers; a client gets its turn that much later."""

_STUCK_S = 40.0
"""A slice of a client's work takes less, or it hangs."""

_WHOLE_AGAIN_S = 90.0
"""How long all that was killed may take to come back: a raylet starts its processes one or two at a time."""

_MID_PUT_S = 5.0
"""How long a blow waits for somebody who is just putting a payload."""

_WATCH_S = 0.002

_UNTOLD_S = 10.0
"""What fell so long before may still show: an actor that begins anew has to be told what it has missed."""

_OBJECT_STORE_BYTES = 128 << 20
_SHMEM_TOLERANCE_BYTES = 4 << 20

_ENVIRON = {
    "PYTHONPATH": str(ROOT),
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # A lost node counts as alive for some 13 s by default.
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}


@dataclass
class Summary:
    """What a run came to; `failures` is what must be empty."""

    seed: int
    seconds: float
    counts: Counter[str] = field(default_factory=Counter)
    blows: Counter[str] = field(default_factory=Counter)
    slowest: tuple[float, str] = (0.0, "")
    joined: int = 0
    wrong: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    history: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        counts = self.counts
        fell = ", ".join(f"{kind} {number}" for kind, number in sorted(self.blows.items()))
        return (
            f"seed {self.seed}: {self.seconds:.0f} s, {counts['store']} stores ({counts['chunks stored']} chunks), "
            f"{counts['append']} steps of requests, {counts['plan']} plans, "
            f"{counts['retrieve']} retrieves, {counts['hits']} hits ({counts['whole hits']} whole), "
            f"{counts['misses']} misses, {counts['refs hit']} refs hit, {counts['refs missed']} missed, "
            f"{counts['payloads put']} payloads put ({counts['puts failed']} failed), "
            f"{counts['payloads got']} got ({counts['payloads missed']} missed), {counts['payloads cleaned']} cleaned, "
            f"{counts['bumps']} bumps, {counts['connected']} connects since, {counts['stale']} stores of old weights "
            f"refused ({counts['untold']} taken where that wasn't known yet), "
            f"{counts['engines asked']} retrieves between engines, "
            f"{counts['rows checked']} rows and {counts['payloads checked']} payloads checked, "
            f"{len(self.wrong)} wrong; {fell}; {self.joined} nodes joined; "
            f"slowest call {self.slowest[0]:.2f} s ({self.slowest[1]})"
        )


@dataclass(frozen=True)
class _Bumped:
    """A change of the weights: the number of the revision, when it was made, and whether all nodes were told."""

    revision: int
    begin: float
    end: float
    told_all: bool


@dataclass
class _Player:
    """A client, and what it is doing. `struck`: it may fail from now on."""

    name: str
    node_id: str
    handle: Any
    pid: int | None = None
    struck: bool = False
    since: float = field(default_factory=time.monotonic)


class _Run:
    """The loop of one run. Everything here happens on one thread, but for the replacement of a node, and bumps."""

    def __init__(self, summary: Summary, cluster: Cluster, service: str, run_id: str, mid_put: str) -> None:
        self._summary = summary
        self._cluster = cluster
        self._service = service
        self._run_id = run_id
        self._rng = random.Random(f"{summary.seed}/driver")
        self._caches = _make_clients(service, SPACES)
        weights = _make_clients(service, [{"model": WEIGHTS_MODEL}])
        self._weights = {kind: [each for (each,) in of_engines] for kind, of_engines in weights.items()}
        self._players: list[_Player] = []
        self._slices: dict[Any, _Player] = {}
        self._refs: list[tuple[Operation, Any]] = []
        self._envelopes: list[Envelope] = []
        self._mid_put = mid_put
        self._awaited: list[tuple[float, Blow]] = []
        self._bumped: list[_Bumped] = []
        self._bumping: Future[_Bumped] | None = None
        self._fallen: list[tuple[str, float, float]] = []  # kind, from when, until when
        self._connected: list[Of] = []
        self._stored: list[Of] = []
        self._doubts: list[Doubt] = []
        self._stopped: list[tuple[float, int]] = []  # until when, and whom
        self._stops: list[tuple[int, float, float]] = []  # whom, from when, until when
        self._late: list[Late] = []
        self._threads = ThreadPoolExecutor(2)
        self._replacement: Future[Any] | None = None
        self._lost: set[str] = set()
        self._struck_node_at = 0.0
        self._start = time.monotonic()
        self._ending = False

    def play(self) -> None:
        for node_id in _alive_nodes():
            self._populate(node_id)
        wait_until(self._all_know_their_pid, "all clients have begun", timeout_s=_WHOLE_AGAIN_S)
        self._start = time.monotonic()
        due = blows(self._summary.seed, self._summary.seconds)
        changes = bumps(self._summary.seed, self._summary.seconds)
        while (now := time.monotonic() - self._start) < self._summary.seconds:
            while due and due[0].at_s <= now:
                self._strike(due.pop(0))
            if changes and changes[0].at_s <= now and self._bumping is None:
                self._begin_bump(changes.pop(0))
            self._turn()
        self._end_of_play()

    def _all_know_their_pid(self) -> bool:
        self._turn()
        return all(player.pid for player in self._players)

    def _turn(self) -> None:
        self._continue_stopped()
        if self._replacement is not None and self._replacement.done():
            node_id = self._replacement.result()
            self._replacement = None
            self._summary.joined += 1
            self._fallen.append(("kill node", self._struck_node_at, time.monotonic() + _UNTOLD_S))
            self._note(f"node {node_id[:6]} has joined")
            self._populate(node_id)
        if self._bumping is not None and self._bumping.done():
            self._bumped.append(bumped := self._bumping.result())
            self._bumping = None
            self._summary.counts["bumps"] += 1
            how = f"in {bumped.end - bumped.begin:.1f} s" + ("" if bumped.told_all else ", not told to all nodes")
            self._note(f"weights r{bumped.revision}, {how}")
        self._strike_producers()
        timeout_s = _WATCH_S if self._awaited else 0.05
        done, _ = ray.wait(list(self._slices), num_returns=1, timeout=timeout_s, fetch_local=False)
        for ref in done:
            self._end_slice(self._slices.pop(ref), ref)
        for player in self._slices.values():
            took = time.monotonic() - player.since - self._stopped_for(player.pid, player.since, time.monotonic())
            if took > _STUCK_S and player.pid and not player.struck:
                player.struck = True
                self._fail(f"{player.name} is stuck for {took:.0f} s")

    def _populate(self, node_id: str) -> None:
        for kind in (Client, AsyncClient):
            self._add_player(kind, node_id)

    def _add_player(self, kind: type, node_id: str) -> None:
        if self._ending:
            return
        name = f"client-{len(self._players)}"
        place = NodeAffinitySchedulingStrategy(node_id, soft=False)
        caches = self._caches[kind is AsyncClient]
        weights = self._weights[kind is AsyncClient]
        setting = Setting(self._summary.seed, name, self._service, caches, weights, RPC_TIMEOUT_S, self._mid_put)
        actor: Any = ray.remote(kind).options(num_cpus=0, max_restarts=0, scheduling_strategy=place)
        handle = actor.remote(setting)
        player = _Player(f"{name} ({kind.__name__} on {node_id[:6]})", node_id, handle)
        self._players.append(player)
        self._begin_slice(player)

    def _begin_slice(self, player: _Player) -> None:
        if self._ending:
            return
        given = Given(self._some(self._refs), self._some(self._envelopes))
        player.since = time.monotonic()
        self._slices[player.handle.work.remote(given)] = player

    def _some(self, passed_on: list[Any]) -> list[Any]:
        return [passed_on.pop(self._rng.randrange(len(passed_on))) for _ in range(min(3, len(passed_on)))]

    def _end_slice(self, player: _Player, ref: Any) -> None:
        try:
            reports: list[Report] = ray.get(ref, timeout=10)
        except RayTaskError:
            raise
        except RayError as error:
            if not player.struck:
                self._fail(f"{player.name} ended, and nobody killed it: {type(error).__name__}: {error}")
            player.handle = None
            if player.node_id not in self._lost:
                self._add_player(Client if "(Client" in player.name else AsyncClient, player.node_id)
            return
        self._take(reports)
        player.pid = reports[0].pid
        self._begin_slice(player)

    def _take(self, reports: Sequence[Report]) -> None:
        for report in reports:
            self._summary.counts += report.counts
            self._summary.wrong += report.wrong
            self._summary.failures += report.raised
            self._summary.slowest = max(self._summary.slowest, report.slowest)
            self._late += report.late
            self._refs += report.refs
            self._envelopes += report.envelopes
            self._connected += report.connected
            self._stored += report.stored
            self._doubts += report.doubts
        del self._refs[:-12]
        del self._envelopes[:-24]

    # The weights.

    def _begin_bump(self, bump: Bump) -> None:
        last = max((bumped.revision for bumped in self._bumped), default=0)
        self._bumping = self._threads.submit(_bump, self._service, last, bump.named, _WHOLE_AGAIN_S)

    # Blows.

    def _strike(self, blow: Blow) -> None:
        _, what = blow.kind.split()
        if what == "node":
            self._kill_node(blow)
            return
        if what == "producer":
            self._awaited.append((time.monotonic() + _MID_PUT_S, blow))
            return
        self._strike_one(blow, self._client_pids() if what == "client" else self._actor_pids(what))

    def _strike_one(self, blow: Blow, candidates: Sequence[tuple[str, int]]) -> None:
        verb, what = blow.kind.split()
        if not candidates:
            self._note(f"{blow.kind}: nobody there")
            return
        who, pid = candidates[int(blow.which * len(candidates))]
        if pid not in marked_processes(self._run_id):  # gone since, or never ours
            self._note(f"{blow.kind}: {who} is gone already")
            return
        os.kill(pid, signal.SIGKILL if verb == "kill" else signal.SIGSTOP)
        self._summary.blows[blow.kind] += 1
        now = time.monotonic()
        self._fallen.append((blow.kind, now, now + blow.stop_s if verb == "stop" else now))
        if verb == "stop":
            self._stopped.append((now + blow.stop_s, pid))
            self._stops.append((pid, now, now + blow.stop_s))
        elif what in ("client", "producer"):
            next(player for player in self._players if player.pid == pid).struck = True
        self._note(f"{blow.kind}: {who}, process {pid}" + (f" for {blow.stop_s:.1f} s" if verb == "stop" else ""))

    def _client_pids(self) -> list[tuple[str, int]]:
        return [(player.name, player.pid) for player in self._players if player.pid and not player.struck]

    def _strike_producers(self) -> None:
        """Let blows fall that are waiting for a client to put a payload."""
        for until, blow in list(self._awaited):
            putting = {int(name.split("-")[0]) for name in os.listdir(self._mid_put)}
            candidates = [(name, pid) for name, pid in self._client_pids() if pid in putting]
            if candidates or time.monotonic() > until:
                self._awaited.remove((until, blow))
                self._strike_one(blow, candidates)

    def _actor_pids(self, what: str) -> list[tuple[str, int]]:
        """Of the service's own actors, from Ray's table: they need not answer for that."""
        prefix = controller_name(self._service) if what == "controller" else f"{self._service}/{what}/"
        actors = ray._private.state.actors().values()
        return sorted(
            (f"{what} on {actor['Address']['NodeID'][:6]}", actor["Pid"])
            for actor in actors
            if actor["Name"].startswith(prefix)
            and actor["State"] == "ALIVE"
            and actor["Address"]["NodeID"] not in self._lost
        )

    def _kill_node(self, blow: Blow) -> None:
        nodes = sorted(self._cluster.worker_nodes, key=lambda node: str(node.node_id))
        if self._replacement is not None:
            self._note("kill node: one is being replaced already")
            return
        node = nodes[int(blow.which * len(nodes))]
        self._lost.add(node.node_id)
        for player in self._players:
            player.struck = player.struck or player.node_id == node.node_id
        self._summary.blows[blow.kind] += 1
        self._struck_node_at = time.monotonic()
        self._note(f"kill node: {node.node_id[:6]}")
        self._replacement = self._threads.submit(_replace, self._cluster, node)

    def _continue_stopped(self, *, all_of_them: bool = False) -> None:
        for until, pid in list(self._stopped):
            if all_of_them or time.monotonic() >= until:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
                self._stopped.remove((until, pid))
                # Until now, and not until when it was due: the loop may have been busy.
                self._stops = [
                    (who, begin, time.monotonic() if who == pid and end == until else end)
                    for who, begin, end in self._stops
                ]

    def _stopped_for(self, pid: int | None, begin: float, end: float) -> float:
        return sum(max(min(end, until) - max(begin, since), 0.0) for who, since, until in self._stops if who == pid)

    # The end.

    def _end_of_play(self) -> None:
        self._continue_stopped(all_of_them=True)
        self._awaited.clear()
        self._ending = True
        for player in self._players:
            if player.handle is not None and player.pid is None:
                player.struck = True  # it has not even begun
                ray.kill(player.handle)
        wait_until(
            self._all_at_rest, "all clients are at rest, and all nodes replaced", timeout_s=_STUCK_S + _WHOLE_AGAIN_S
        )
        self._refs.clear()
        for player in self._players:
            if player.handle is not None and not player.struck:
                # What some have put goes since they let go of it, that of others since they are gone.
                close = self._rng.random() < 0.5
                self._take(ray.get(player.handle.finish.remote(close=close), timeout=20))
                if not close:
                    ray.kill(player.handle)
                    player.handle = None
        self._judge_deadlines()
        self._judge_revisions()
        for doubt in self._doubts:
            if not self._fell(doubt.begin - _UNTOLD_S, doubt.end, doubt.excuses):
                self._fail(f"{doubt.what}, begun at {doubt.begin - self._start:.1f} s")
        nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"] and _POOL in node["Resources"]]
        nodes.sort()
        wait_until(lambda: self._members() == nodes, "every node is in the service again", timeout_s=_WHOLE_AGAIN_S)
        self._probe(nodes)
        self._audit_revisions(nodes)
        for node_id in nodes:
            self._audit(node_id)
        if not (self._summary.counts["hits"] and self._summary.counts["chunks stored"]):
            self._fail("nothing was hit")

    def _all_at_rest(self) -> bool:
        self._turn()
        return not self._slices and self._replacement is None and self._bumping is None

    def _fell(self, begin: float, end: float, kinds: Sequence[str]) -> bool:
        return any(kind in kinds and since <= end and until >= begin for kind, since, until in self._fallen)

    def _judge_revisions(self) -> None:
        """Whoever connects after a change has its revision, or a later one; what is older is not taken any more."""
        for client in self._connected:
            before = [bumped.revision for bumped in self._bumped if bumped.end < client.begin]
            self._summary.counts["connected"] += bool(before)
            if client.revision < max(before, default=0):
                at = client.begin - self._start
                self._fail(f"{client.what} connected at {at:.1f} s, and got r{client.revision}, not r{max(before)}")
        for stored in self._stored:
            later = [b for b in self._bumped if b.end < stored.begin and b.revision > stored.revision]
            self._summary.counts["untold"] += bool(later)
            # A node that is new, or begins anew, takes them until it is told.
            known = [
                bumped
                for bumped in later
                if bumped.told_all
                and not self._fell(bumped.begin - _UNTOLD_S, stored.end, ("kill hidden_states", "kill node"))
            ]
            if known:
                at, old, new = stored.begin - self._start, stored.revision, known[0].revision
                self._fail(f"{stored.what} of r{old} stored at {at:.1f} s, when all nodes knew of r{new}")

    def _judge_deadlines(self) -> None:
        for late in self._late:
            took = late.end - late.begin - self._stopped_for(late.pid, late.begin, late.end)
            if took > late.limit_s + SLACK_S:
                at = late.begin - self._start
                self._fail(
                    f"{late.what}, begun at {at:.1f} s, took {took:.2f} s, expected {late.limit_s:.2f} s at most"
                )

    def _members(self) -> list[str]:
        with suppress(RayError):
            nodes = ray.get(find_controller(self._service).stats.remote(), timeout=2).nodes
            return sorted(nodes)
        return []

    def _probe(self, nodes: Sequence[str]) -> None:
        """What any node stores is hit on every other: the service is whole again."""
        cache = self._connect(model="probe")
        begun = [
            ray.remote(probe).options(**_on(node_id)).remote(cache, number, len(nodes))
            for number, node_id in enumerate(nodes)
        ]
        for wrong in ray.get(begun, timeout=_WHOLE_AGAIN_S):
            self._summary.failures += wrong

    def _connect(self, **space: str) -> Any:
        def connected() -> Any:
            with suppress(ServiceError):  # a node's actor may still be on its way
                return hs_cache.connect(service=self._service, strict=True, **space)

        return wait_until(connected, "the service can be reached", timeout_s=_WHOLE_AGAIN_S)

    def _audit_revisions(self, nodes: Sequence[str]) -> None:
        """Every node knows the current revision, and takes no rows of others."""
        if not self._bumped:
            return
        current = self._connect(model=WEIGHTS_MODEL)
        name = current.key_space.model_revision
        last = self._bumped[-1]
        if revision_number(name) < last.revision:
            self._fail(f"in the end the weights are {name!r}, not r{last.revision}")

        def known(node_id: str) -> bool:
            actor = find_actor(self._service, HIDDEN_STATES, node_id)
            table = ray.get(actor.stats.remote(), timeout=20).revisions
            return {revision.name for revision in table if revision.model == WEIGHTS_MODEL} == {name}

        for node_id in nodes:
            what = f"node {node_id[:6]} knows that the weights are {name}"
            try:
                wait_until(partial(known, node_id), what, timeout_s=20)
            except AssertionError as error:
                self._fail(str(error))
        old = self._connect(model=WEIGHTS_MODEL, model_revision="old")
        begun = [ray.remote(probe_old_weights).options(**_on(node_id)).remote(old, current) for node_id in nodes]
        for node_id, wrong in zip(nodes, ray.get(begun, timeout=_WHOLE_AGAIN_S), strict=True):
            self._summary.failures += [f"node {node_id[:6]}: {each}" for each in wrong]

    def _audit(self, node_id: str) -> None:
        actor = find_actor(self._service, HIDDEN_STATES, node_id)
        ray.get(actor.check.remote(), timeout=10)

        def stats() -> Any:
            return ray.get(actor.stats.remote(), timeout=10).store

        def nothing_held() -> bool:
            store = stats()
            held = store.num_leases or store.num_reservations or store.leased_bytes
            return not (held or store.num_kept or store.stranded_bytes)

        try:
            wait_until(nothing_held, f"nothing is held on node {node_id[:6]}", timeout_s=20)
        except AssertionError as error:
            self._fail(f"{error}: {stats()}")
        store = stats()
        if store.free_bytes + store.resident_bytes != store.capacity_bytes:
            self._fail(f"the pool's bytes don't add up on node {node_id[:6]}: {store}")
        self._summary.counts["evicted"] += store.evicted_chunks_total
        self._summary.counts["stale"] += ray.get(actor.stats.remote(), timeout=10).stale_stores_total

    def _note(self, text: str) -> None:
        self._summary.history.append(f"{time.monotonic() - self._start:5.1f} s: {text}")

    def _fail(self, text: str) -> None:
        self._summary.failures.append(text)
        self._note(f"FAILED: {text}")

    def close(self) -> None:
        self._continue_stopped(all_of_them=True)
        for player in self._players:
            if player.handle is not None:
                ray.kill(player.handle)
        self._threads.shutdown()


def _on(node_id: str) -> dict[str, Any]:
    return {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False)}


def _bump(service: str, last: int, named: bool, timeout_s: float) -> _Bumped:
    """Change the weights, as often as it takes: one whose answer was lost may have been made all the same."""
    begin = time.monotonic()
    while True:
        try:
            bump = hs_cache.bump_revision(WEIGHTS_MODEL, f"r{last + 1}" if named else None, service=service)
        except ServiceError:
            if time.monotonic() > begin + timeout_s:
                raise
            time.sleep(0.05)
            continue
        return _Bumped(revision_number(bump.revision), begin, time.monotonic(), not bump.unreached)


def _replace(cluster: Cluster, node: Any) -> str:
    cluster.remove_node(node, allow_graceful=False)  # SIGKILL, by pid
    return _add_node(cluster)


def _add_node(cluster: Cluster) -> str:
    node = cluster.add_node(
        num_cpus=2, include_dashboard=False, object_store_memory=_OBJECT_STORE_BYTES, resources={_POOL: 1}
    )
    return str(node.node_id)


def _alive_nodes() -> list[str]:
    return sorted(node["NodeID"] for node in ray.nodes() if node["Alive"])  # type: ignore[no-untyped-call]


def _make_clients(service: str, spaces: Sequence[dict[str, str]]) -> dict[bool, list[list[Any]]]:
    """For each engine a client per key space: for asyncio, and blocking ones."""

    def options(engine: str) -> list[dict[str, Any]]:
        return [{"service": service, "engine": engine, **space} for space in spaces]

    async def connect_all() -> list[list[Any]]:
        return [[await hs_cache.aconnect(**each) for each in options(engine)] for engine in ENGINES]

    blocking = [[hs_cache.connect(**each) for each in options(engine)] for engine in ENGINES]
    return {True: asyncio.run(connect_all()), False: blocking}


@contextmanager
def _ray_cluster(environ: dict[str, str]) -> Iterator[Cluster]:
    """A cluster that this process has joined; nothing of it is left afterwards."""
    directory = tempfile.mkdtemp(prefix="hs", dir="/tmp")  # short: the paths of Ray's sockets may have 107 characters
    os.environ.update(environ, RAY_TMPDIR=directory)
    os.environ.pop("RAY_ADDRESS", None)
    head = {"num_cpus": 2, "include_dashboard": False, "temp_dir": f"{directory}/ray"}
    cluster = Cluster(
        initialize_head=True,
        head_node_args={**head, "object_store_memory": _OBJECT_STORE_BYTES},
        shutdown_at_exit=False,
    )
    try:
        for _ in range(NODES):
            _add_node(cluster)
        ray.init(address=cluster.address, logging_level=logging.ERROR, log_to_driver=False)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()  # type: ignore[no-untyped-call]
        if os.environ.get("CHAOS_KEEP_LOGS"):
            print(f"logs: {directory}")
        else:
            shutil.rmtree(directory, ignore_errors=True)


def _unheld_shared_memory() -> int:
    """Bytes of shared memory that no process and no file under /dev/shm accounts for.

    Others may use this machine meanwhile, so the kernel's sum alone says little.
    """
    with open("/proc/meminfo") as lines:
        total = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Shmem:"))
    held: dict[tuple[int, int], int] = {}
    for path in [*Path("/proc").glob("[0-9]*/fd/*"), *Path("/dev/shm").iterdir()]:
        with suppress(OSError):
            target = os.readlink(path) if path.is_symlink() else str(path)
            if target.startswith(("/memfd:", "/dev/shm/")):
                status = path.stat()
                held[status.st_dev, status.st_ino] = status.st_blocks * 512
    return total - sum(held.values())


def run(seed: int, seconds: float) -> Summary:
    """One run; what went wrong stands in the summary's ``failures``, or is raised."""
    summary = Summary(seed, seconds)
    run_id = uuid.uuid4().hex[:12]
    service = f"chaos-{run_id}"
    files, memory = shared_memory_files(), _unheld_shared_memory()
    try:
        with _ray_cluster({**_ENVIRON, MARK: run_id}) as cluster:
            config = CacheConfig(
                chunk_size=CHUNK_SIZE,
                max_hidden_state_cpu_size=POOL_BYTES / 2**30,
                rpc_timeout_s=RPC_TIMEOUT_S,
                node_selector=NodeRequirements(resources={_POOL: 1}),
            )
            deploy.start(config, service=service)
            mid_put = tempfile.mkdtemp(prefix="mid_put", dir=os.environ["RAY_TMPDIR"])
            playing = _Run(summary, cluster, service, run_id, mid_put)
            try:
                playing.play()
            except BaseException:
                print("\n".join(summary.history))
                raise
            finally:
                playing.close()
            deploy.stop(service=service)
            if left := [node_id for nodes in actors_of(service).values() for node_id in nodes]:
                summary.failures.append(f"the service has stopped, and is still on {left}")
            del playing
        _check_nothing_left(summary, run_id, service, files, memory)
    finally:
        for pid in marked_processes(run_id):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    summary.failures += [f"wrong rows: {wrong}" for wrong in summary.wrong]
    return summary


def _check_nothing_left(summary: Summary, run_id: str, service: str, files: set[str], memory: int) -> None:
    def check(condition: Any, what: str) -> None:
        try:
            wait_until(condition, what, timeout_s=_WHOLE_AGAIN_S)
        except AssertionError as error:
            summary.failures.append(f"{error}: {marked_processes(run_id)}")

    check(lambda: not marked_processes(run_id), "all processes have ended")
    check(lambda: not open_pools(service), "no pool is open any more")
    check(lambda: shared_memory_files() <= files, "/dev/shm is as before")
    check(lambda: _unheld_shared_memory() < memory + _SHMEM_TOLERANCE_BYTES, "shared memory is as before")
