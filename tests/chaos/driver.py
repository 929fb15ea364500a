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
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import hs_cache
from actors import deploy
from hs_cache.config import CacheConfig, NodeRequirements
from hs_cache.router import HIDDEN_STATES, actors_of, controller_name, find_actor, find_controller
from tests.chaos.clients import AsyncClient, Client, Late, Report
from tests.chaos.plan import Blow, Operation, blows
from tests.chaos.probe import probe
from tests.chaos.rows import CHUNK_SIZE, SPACES
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
            f"{counts['rows checked']} rows checked, {len(self.wrong)} wrong; {fell}; {self.joined} nodes joined; "
            f"slowest call {self.slowest[0]:.2f} s ({self.slowest[1]})"
        )


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
    """The loop of one run. Everything here happens on one thread, but for the replacement of a node."""

    def __init__(self, summary: Summary, cluster: Cluster, service: str, run_id: str) -> None:
        self._summary = summary
        self._cluster = cluster
        self._service = service
        self._run_id = run_id
        self._rng = random.Random(f"{summary.seed}/driver")
        self._caches = _make_clients(service)
        self._players: list[_Player] = []
        self._slices: dict[Any, _Player] = {}
        self._refs: list[tuple[Operation, Any]] = []
        self._stopped: list[tuple[float, int]] = []  # until when, and whom
        self._stops: list[tuple[int, float, float]] = []  # whom, from when, until when
        self._late: list[Late] = []
        self._threads = ThreadPoolExecutor(1)
        self._replacement: Future[Any] | None = None
        self._lost: set[str] = set()
        self._start = time.monotonic()
        self._ending = False

    def play(self) -> None:
        for node_id in _alive_nodes():
            self._populate(node_id)
        wait_until(self._all_know_their_pid, "all clients have begun", timeout_s=_WHOLE_AGAIN_S)
        self._start = time.monotonic()
        due = blows(self._summary.seed, self._summary.seconds)
        while (now := time.monotonic() - self._start) < self._summary.seconds:
            while due and due[0].at_s <= now:
                self._strike(due.pop(0))
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
            self._note(f"node {node_id[:6]} has joined")
            self._populate(node_id)
        done, _ = ray.wait(list(self._slices), num_returns=1, timeout=0.05, fetch_local=False)
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
        actor: Any = ray.remote(kind).options(num_cpus=0, max_restarts=0, scheduling_strategy=place)
        handle = actor.remote(self._summary.seed, name, caches, RPC_TIMEOUT_S)
        player = _Player(f"{name} ({kind.__name__} on {node_id[:6]})", node_id, handle)
        self._players.append(player)
        self._begin_slice(player)

    def _begin_slice(self, player: _Player) -> None:
        if self._ending:
            return
        given = [self._refs.pop(self._rng.randrange(len(self._refs))) for _ in range(min(3, len(self._refs)))]
        player.since = time.monotonic()
        self._slices[player.handle.work.remote(given)] = player

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
        del self._refs[:-12]

    # Blows.

    def _strike(self, blow: Blow) -> None:
        verb, what = blow.kind.split()
        if what == "node":
            self._kill_node(blow)
            return
        candidates = self._client_pids() if what == "client" else self._actor_pids(what)
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
        if verb == "stop":
            self._stopped.append((now + blow.stop_s, pid))
            self._stops.append((pid, now, now + blow.stop_s))
        elif what == "client":
            next(player for player in self._players if player.pid == pid).struck = True
        self._note(f"{blow.kind}: {who}, process {pid}" + (f" for {blow.stop_s:.1f} s" if verb == "stop" else ""))

    def _client_pids(self) -> list[tuple[str, int]]:
        return [(player.name, player.pid) for player in self._players if player.pid and not player.struck]

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
                self._take(ray.get(player.handle.finish.remote(), timeout=20))
        self._judge_deadlines()
        nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"] and _POOL in node["Resources"]]
        nodes.sort()
        wait_until(lambda: self._members() == nodes, "every node is in the service again", timeout_s=_WHOLE_AGAIN_S)
        self._probe(nodes)
        for node_id in nodes:
            self._audit(node_id)
        if not (self._summary.counts["hits"] and self._summary.counts["chunks stored"]):
            self._fail("nothing was hit")

    def _all_at_rest(self) -> bool:
        self._turn()
        return not self._slices and self._replacement is None

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
        cache = hs_cache.connect(service=self._service, model="probe", strict=True)
        begun = [
            ray.remote(probe)
            .options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False))
            .remote(cache, number, len(nodes))
            for number, node_id in enumerate(nodes)
        ]
        for wrong in ray.get(begun, timeout=_WHOLE_AGAIN_S):
            self._summary.failures += wrong

    def _audit(self, node_id: str) -> None:
        actor = find_actor(self._service, HIDDEN_STATES, node_id)
        ray.get(actor.check.remote(), timeout=10)

        def stats() -> Any:
            return ray.get(actor.stats.remote(), timeout=10).store

        def nothing_held() -> bool:
            store = stats()
            return not (store.num_leases or store.num_reservations or store.leased_bytes)

        try:
            wait_until(nothing_held, f"nothing is held on node {node_id[:6]}", timeout_s=20)
        except AssertionError as error:
            self._fail(f"{error}: {stats()}")
        store = stats()
        if store.free_bytes + store.resident_bytes != store.capacity_bytes:
            self._fail(f"the pool's bytes don't add up on node {node_id[:6]}: {store}")
        self._summary.counts["evicted"] += store.evicted_chunks_total

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


def _make_clients(service: str) -> dict[bool, list[Any]]:
    """A client per key space: for asyncio, and blocking ones."""

    options: list[dict[str, Any]] = [{"service": service, **space} for space in SPACES]

    async def connect_all() -> list[Any]:
        return [await hs_cache.aconnect(**each) for each in options]

    return {True: asyncio.run(connect_all()), False: [hs_cache.connect(**each) for each in options]}


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
            playing = _Run(summary, cluster, service, run_id)
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
