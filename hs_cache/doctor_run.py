"""Examining a cluster and a service on it: from every node, of every node. Changes nothing that stays."""

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Any, TypeVar

import ray
from ray import cloudpickle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hs_cache import doctor_look
from hs_cache.config import CacheConfig, check_service
from hs_cache.doctor_checks import check
from hs_cache.doctor_facts import HERE, CanaryState, ClusterFacts, DoctorReport, NodeFacts, PathFacts, at_fault
from hs_cache.doctor_look import Look
from hs_cache.doctor_probe import SHARE_OF_FREE, Attached, Canary, Probe
from hs_cache.errors import ConfigError, HiddenStateCacheError, ServiceError, ServiceNotRunningError
from hs_cache.keys import KEY_BYTES
from hs_cache.launch import join
from hs_cache.planning import check_seconds
from hs_cache.router import HIDDEN_STATES, KV, actors_of, bounded, find_actor, find_controller, is_running, translated

T = TypeVar("T")

# A node whose Python lacks this package must be able to load it, and to say so.
cloudpickle.register_pickle_by_value(doctor_look)  # type: ignore[no-untyped-call]

_CANARY_BYTES, _LEAST_CANARY_BYTES = 8 << 20, 64 << 10
_CALL_SHARE = 1 / 3
"""Of the time that a step may take, for one call that a probe makes on the way."""

_DROP_S = 5.0
_ALIGNED = 64
_DAY_S = 86_400.0


def doctor(*, service: str = "default", address: str | None = None, timeout_s: float = 30.0) -> DoctorReport:
    """Check a cluster and a service on it, from every node: what is installed, what it runs with, who answers whom.

    On each node that is alive short-lived workers look around. Where four times as much is free in the pool, a few MiB
    are stored in a key space of their own, read from every node, compared and dropped; nothing is evicted for them.
    Blocks for some seconds, and for a few times `timeout_s` where much doesn't answer.

    Args:
        service: the service's name. One that doesn't run is a failed check; the nodes are looked at all the same.
        address: of the Ray cluster to join, if this process hasn't joined one; None for the one that is named in
            ``RAY_ADDRESS`` or runs on this machine. None is started.
        timeout_s: how long all nodes together may take for any one step, a day at most.

    Returns:
        What was found: `DoctorReport.ok`, and one finding per check.

    Raises:
        InvalidInputError: an argument is wrong.
        ServiceError: the Ray cluster can't be joined, or its control store doesn't answer.
    """
    check_service(service)
    timeout_s = min(check_seconds("timeout_s", timeout_s), _DAY_S)
    if not ray.is_initialized():
        join(address or "auto", logging_level=logging.ERROR, log_to_driver=False)
    with _Examination(service, timeout_s) as examination:
        facts = examination.facts()
    return _report(facts)


def _report(facts: ClusterFacts) -> DoctorReport:
    trips: dict[str, dict[str, float]] = {}
    speeds: dict[str, dict[str, float]] = {}
    for path in facts.paths:
        if path.round_trip_s is not None:
            trips.setdefault(path.reader, {})[path.owner] = path.round_trip_s * 1e3
        if path.read_s:
            speeds.setdefault(path.reader, {})[path.owner] = facts.canary_bytes / path.read_s / 2**20
    nodes = {node.node_id: node.address for node in facts.nodes}
    return DoctorReport(facts.service, facts.address, nodes, check(facts), trips, speeds, facts.canary_bytes)


class _Examination:
    """One run: its probes, and what they have stored, which all go at the end of its ``with`` block."""

    def __init__(self, service: str, timeout_s: float) -> None:
        self._service = service
        self._timeout_s = timeout_s
        self._call_s = timeout_s * _CALL_SHARE
        self._workers: list[Any] = []
        self._probes: dict[str, Any] = {}
        self._attached: dict[str, Attached] = {}
        self._canaries: dict[str, Canary] = {}
        self._owners: dict[str, Any] = {}
        self._nodes: dict[str, NodeFacts] = {}
        self._left_over: tuple[str, ...] = ()

    def __enter__(self) -> "_Examination":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._drop()
        finally:
            for worker in self._workers:
                with suppress(Exception):  # it has ended, or Ray has
                    ray.kill(worker)

    def facts(self) -> ClusterFacts:
        """Look at everything, step by step."""
        listed = self._bounded(ray.nodes)
        alive = {node["NodeID"]: node for node in listed if node["Alive"]}
        actors = self._bounded(lambda: actors_of(self._service))
        for node_id, node in sorted(alive.items()):
            kinds = frozenset(kind for kind, nodes in actors.items() if node_id in nodes)
            self._nodes[node_id] = NodeFacts(node_id, node["NodeManagerAddress"], has_actors=kinds)
        looks = {node_id: self._start(Look, node_id) for node_id in self._nodes}
        cluster = self._ask_service(
            ClusterFacts(
                service=self._service,
                address=str(ray.get_runtime_context().gcs_address),
                here=NodeFacts(HERE, ""),
                nodes=(),
                dead=frozenset(node["NodeID"] for node in listed) - alive.keys(),
                listed={kind: frozenset(nodes) for kind, nodes in actors.items()},
            )
        )
        self._ask_actors()
        self._look(looks)
        here = self._compare(cluster.here, cluster.config)
        self._attach()
        nbytes = self._store()
        paths = self._measure()
        self._drop()
        return replace(
            cluster,
            here=here,
            nodes=tuple(self._nodes.values()),
            paths=tuple(paths),
            canary_bytes=nbytes,
            left_over=self._left_over,
        )

    def _bounded(self, call: Callable[[], T]) -> T:
        try:
            return bounded(call, self._timeout_s)
        except Exception as error:
            raise translated(error, "asking the cluster's control store") from error

    def _note(self, node_id: str, **facts: Any) -> None:
        self._nodes[node_id] = replace(self._nodes[node_id], **facts)

    def _start(self, kind: type, node_id: str, *args: Any) -> Any:
        place = NodeAffinitySchedulingStrategy(node_id, soft=False)
        worker: Any = ray.remote(kind).options(num_cpus=0, max_restarts=0, scheduling_strategy=place).remote(*args)
        self._workers.append(worker)
        return worker

    def _look(self, looks: Mapping[str, Any]) -> None:
        answers, troubles = self._gather(
            {node_id: look.look.remote() for node_id, look in looks.items()}, "starting a worker"
        )
        for node_id, trouble in troubles.items():
            self._note(node_id, trouble=trouble)
        for node_id, look in answers.items():
            self._note(node_id, look=look)
            if not look["missing"]:
                self._probes[node_id] = self._start(Probe, node_id, self._service)
        self._ask_clocks({node_id: looks[node_id] for node_id in answers})

    def _ask_clocks(self, looks: Mapping[str, Any]) -> None:
        begin, deadline = time.time(), time.monotonic() + self._timeout_s
        names = {look.now.remote(): node_id for node_id, look in looks.items()}
        left = list(names)
        while left and (left_s := deadline - time.monotonic()) > 0:
            ready, left = ray.wait(left, timeout=left_s)
            arrived = time.time()
            for ref in ready:
                with suppress(ray.exceptions.RayError):  # it has ended since it looked, and the next step says so
                    self._note(names[ref], skew_s=ray.get(ref) - (begin + arrived) / 2)
        _ignore(left)

    def _ask_service(self, cluster: ClusterFacts) -> ClusterFacts:
        try:
            if not self._bounded(lambda: is_running(self._service)):
                return cluster
            actor = self._bounded(lambda: find_controller(self._service))
        except ServiceNotRunningError:
            return cluster
        except ServiceError as error:
            return replace(cluster, running=True, controller_trouble=str(error))
        refs = {name: getattr(actor, name).remote() for name in ("config", "stats", "progress")}
        answers, troubles = self._gather(refs, "asking it")
        return replace(
            cluster,
            running=True,
            config=answers.get("config"),
            controller=answers.get("stats"),
            progress=answers.get("progress"),
            controller_trouble=next(iter(troubles.values()), ""),
        )

    def _ask_actors(self) -> None:
        refs: dict[tuple[str, str], Any] = {}
        for (node_id, kind), actor in self._bounded(self._find_actors).items():
            if isinstance(actor, ServiceError):
                self._note(node_id, **{"kv_trouble" if kind == KV else "stats_trouble": str(actor)})
                continue
            refs[node_id, kind] = actor.stats.remote()
            if kind == HIDDEN_STATES:
                self._owners[node_id] = actor
                refs[node_id, "config"] = actor.config.remote()
        answers, troubles = self._gather(refs, "asking it")
        fields = {HIDDEN_STATES: "stats", KV: "kv", "config": "config"}
        for (node_id, kind), answer in answers.items():
            self._note(node_id, **{fields[kind]: answer})
        for (node_id, kind), trouble in troubles.items():
            self._note(node_id, **{"kv_trouble" if kind == KV else "stats_trouble": trouble})
            if kind != KV:
                self._owners.pop(node_id, None)

    def _find_actors(self) -> dict[tuple[str, str], Any]:
        """Handles of all that are listed, by node and kind; where there is none any more, the error that says so."""
        found: dict[tuple[str, str], Any] = {}
        for node_id, node in self._nodes.items():
            for kind in node.has_actors:
                try:
                    found[node_id, kind] = find_actor(self._service, kind, node_id)
                except ServiceError as error:
                    found[node_id, kind] = error
        return found

    def _compare(self, here: NodeFacts, config: CacheConfig | None) -> NodeFacts:
        """Have every node say how it would name chunks and set up a client, and this process too, which is returned."""
        try:
            settings = (config or CacheConfig.load()).model_dump()
        except ConfigError:  # a service that doesn't run has none, and this process's own are wrong
            settings = CacheConfig().model_dump()
        refs: dict[tuple[str, str], Any] = {}
        for node_id, probe in self._probes.items():
            refs[node_id, "keys"] = probe.keys.remote(settings)
            refs[node_id, "headroom"] = probe.memory.remote()
            if config is not None:
                refs[node_id, "client"] = probe.client_settings.remote(settings)
        answers, troubles = self._gather(refs, "asking its probe")
        for (node_id, field), answer in answers.items():
            self._note(node_id, **{field: answer})
        for (node_id, field), trouble in troubles.items():
            self._note(node_id, **{"keys_trouble" if field == "keys" else "trouble": trouble})
            if field != "keys":  # it did not start, or hangs: nothing more is asked of it
                self._probes.pop(node_id, None)
        mine = Probe(self._service)
        here = replace(here, look=Look().look(), client=mine.client_settings(settings) if config is not None else None)
        try:
            return replace(here, keys=mine.keys(settings))
        except HiddenStateCacheError as error:
            return replace(here, keys_trouble=str(error))

    def _attach(self) -> None:
        refs = {
            node_id: probe.attach.remote(self._call_s)
            for node_id, probe in self._probes.items()
            if node_id in self._owners
        }
        self._attached, troubles = self._gather(refs, "attaching a client")
        for node_id, attached in self._attached.items():
            self._note(node_id, not_shared=attached.not_shared)
        for node_id, trouble in troubles.items():
            self._note(node_id, canary=CanaryState.FAILED, canary_trouble=trouble)

    def _store(self) -> int:
        """Store a canary on every node that has room for one; their size."""
        free = {
            node_id: node.stats.store.free_bytes // SHARE_OF_FREE
            for node_id, node in self._nodes.items()
            if node_id in self._attached and node.stats is not None
        }
        roomy = {node_id: nbytes for node_id, nbytes in free.items() if nbytes >= _LEAST_CANARY_BYTES}
        for node_id in free.keys() - roomy.keys():
            self._note(node_id, canary=CanaryState.NO_ROOM)
        nbytes = min(_CANARY_BYTES, *roomy.values()) // _ALIGNED * _ALIGNED if roomy else 0
        refs = {}
        for node_id in roomy:
            # Known before it is stored: whatever ends this run, what is there can be dropped.
            self._canaries[node_id] = canary = Canary(os.urandom(KEY_BYTES), os.urandom(KEY_BYTES), nbytes)
            refs[node_id] = self._probes[node_id].put.remote(canary, self._attached[node_id].hold_id, self._call_s)
        answers, troubles = self._gather(refs, "storing rows")
        for node_id, stored in answers.items():
            self._note(node_id, canary=CanaryState.STORED if stored else CanaryState.NO_ROOM)
        for node_id, trouble in troubles.items():
            self._note(node_id, canary=CanaryState.FAILED, canary_trouble=trouble)
        return nbytes

    def _measure(self) -> list[PathFacts]:
        """In rounds: in each, every node reads from one other, and is read by one, so that they don't share a link."""
        order = sorted({*self._probes, *self._owners})
        found: dict[tuple[str, str], PathFacts] = {}
        for shift in range(len(order)):
            readers, owners = at_fault(found.values())
            pairs = []
            for i, reader in enumerate(order):
                owner = order[(i + shift) % len(order)]
                if reader in self._probes and owner in self._owners:
                    tried = reader not in readers and owner not in owners
                    found[reader, owner] = PathFacts(reader, owner, tried=tried)
                    pairs += [(reader, owner)] if tried else []
            for (reader, owner), round_trip_s in self._tried("ping", pairs, found).items():
                found[reader, owner] = replace(found[reader, owner], round_trip_s=round_trip_s)
            pairs = [
                (reader, owner)
                for reader, owner in pairs
                if self._may_read(reader, owner) and not found[reader, owner].trouble
            ]
            for (reader, owner), (right, read_s) in self._tried("read", pairs, found).items():
                trouble = "the rows stored there were not found again" if right is None else ""
                found[reader, owner] = replace(found[reader, owner], right=right, read_s=read_s, trouble=trouble)
        return [found[pair] for pair in sorted(found)]

    def _may_read(self, reader: str, owner: str) -> bool:
        """Whether there is something to read, and the reader is not one whose own node's actor serves no clients."""
        served = reader in self._attached or not self._nodes[reader].has_actors
        return served and self._nodes[owner].canary is CanaryState.STORED

    def _tried(
        self, method: str, pairs: Iterable[tuple[str, str]], found: dict[tuple[str, str], PathFacts]
    ) -> dict[tuple[str, str], Any]:
        """Have each reader call or read its owner; what came of it, while trouble goes into `found`."""
        refs = {}
        for reader, owner in pairs:
            canary = [self._canaries[owner]] if method == "read" else []
            refs[reader, owner] = getattr(self._probes[reader], method).remote(owner, *canary, self._call_s)
        answers, troubles = self._gather(refs, "reading" if method == "read" else "calling its actor")
        for pair, trouble in troubles.items():
            found[pair] = replace(found[pair], trouble=trouble)
        return answers

    def _drop(self) -> None:
        """Drop the canaries, whether they were stored or still may be; ask the actors themselves, not the probes."""
        canaries, self._canaries = self._canaries, {}
        refs = {}
        for node_id, canary in canaries.items():
            with suppress(Exception):  # Ray has ended: then the probes have too, and what is held for them goes
                actor, attached = self._owners[node_id], self._attached[node_id]
                actor.release.remote(attached.incarnation, attached.client_id, (attached.hold_id,))
                refs[node_id] = actor.drop_key.remote(canary.key, canary.space)
        answers, _ = self._gather(refs, "dropping rows", _DROP_S)
        self._left_over = tuple(node_id for node_id in canaries if node_id not in answers)

    def _gather(
        self, refs: Mapping[Any, Any], what: str, timeout_s: float | None = None
    ) -> tuple[dict[Any, Any], dict[Any, str]]:
        """What came of calls that run at the same time: the answers, and for the others why there is none."""
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        names = {ref: name for name, ref in refs.items()}
        ready, late = ray.wait(list(names), num_returns=len(names), timeout=limit_s) if names else ([], [])
        answers: dict[Any, Any] = {}
        troubles: dict[Any, str] = {names[ref]: f"{what} took more than {limit_s:g} s" for ref in late}
        _ignore(late)
        for ref in ready:
            try:
                answers[names[ref]] = ray.get(ref, timeout=limit_s)
            # Whatever it is: what a probe meets on a broken node may be anything, and is what is looked for.
            except Exception as error:
                lines = str(translated(error, what)).strip().splitlines() or [type(error).__name__]
                troubles[names[ref]] = lines[-1 if isinstance(error, ray.exceptions.RayTaskError) else 0].strip()
        return answers, troubles


def _ignore(refs: Iterable[Any]) -> None:
    """Nobody waits for these any more. If one becomes an error, Ray would print it as one that nobody has seen."""
    for ref in refs:
        ref.future().add_done_callback(lambda ended: ended.cancelled() or ended.exception())
