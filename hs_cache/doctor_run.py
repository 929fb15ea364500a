"""Examining a cluster and a service on it: from every node, of every node. Changes nothing that stays."""

import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import ray
from ray import cloudpickle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hs_cache import doctor_probe
from hs_cache.config import CacheConfig
from hs_cache.doctor_checks import check
from hs_cache.doctor_facts import ClusterFacts, DoctorReport, NodeFacts, PathFacts
from hs_cache.doctor_probe import Probe
from hs_cache.errors import ConfigError, HiddenStateCacheError, InvalidInputError, ServiceError, ServiceNotRunningError
from hs_cache.launch import check_service, join
from hs_cache.router import HIDDEN_STATES, KV, actors_of, bounded, find_actor, find_controller, is_running, translated

T = TypeVar("T")

# A node whose Python lacks this package must be able to load it, and to say so.
cloudpickle.register_pickle_by_value(doctor_probe)  # type: ignore[no-untyped-call]

_CANARY_BYTES, _LEAST_CANARY_BYTES = 8 << 20, 64 << 10
_SHARE_OF_FREE = 4
"""A canary takes at most one part in so many of what is free, so that nothing has to be evicted for it."""

_HOLD_ID = 1
_CALL_SHARE = 1 / 3
"""Of the time that a step may take, for one call that a probe makes on the way."""

_DROP_S = 5.0
_HERE = "here"
_ALIGNED = 64
_DAY_S = 86_400


def doctor(*, service: str = "default", address: str | None = None, timeout_s: float = 30.0) -> DoctorReport:
    """Check a cluster and a service on it, from every node: what is installed, what it runs with, who answers whom.

    On each node that is alive a short-lived worker looks around. Where a pool has room for it, a few MiB are stored in
    a key space of their own, read from every node, compared and dropped; nothing is evicted for them. Blocks for some
    seconds, and for a few times `timeout_s` where much doesn't answer.

    Args:
        service: the service's name. One that doesn't run is a failed check; the nodes are looked at all the same.
        address: of the Ray cluster to join, if this process hasn't joined one; None for the one that is named in
            ``RAY_ADDRESS`` or runs on this machine. None is started.
        timeout_s: how long a node may take for any one step.

    Returns:
        What was found: `DoctorReport.ok`, and one finding per check.

    Raises:
        InvalidInputError: an argument is wrong.
        ServiceError: the Ray cluster can't be joined, or its control store doesn't answer.
    """
    check_service(service)
    is_number = isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool)
    if not is_number or not math.isfinite(timeout_s) or not 0 < timeout_s <= _DAY_S:
        raise InvalidInputError(f"timeout_s: got {timeout_s!r}, expected seconds greater than 0 and at most {_DAY_S}")
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
        self._probes: dict[str, Any] = {}
        self._client_ids: dict[str, bytes] = {}
        self._canaries: dict[str, dict[str, Any]] = {}
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
            for probe in self._probes.values():
                with suppress(Exception):  # it has ended, or Ray has
                    ray.kill(probe)

    def facts(self) -> ClusterFacts:
        """Look at everything, step by step."""
        listed = self._bounded(ray.nodes)
        alive = {node["NodeID"]: node for node in listed if node["Alive"]}
        actors = self._bounded(lambda: actors_of(self._service))
        for node_id, node in sorted(alive.items()):
            kinds = frozenset(kind for kind, nodes in actors.items() if node_id in nodes)
            self._nodes[node_id] = NodeFacts(node_id, node["NodeManagerAddress"], has_actors=kinds)
        self._start_probes()
        cluster = self._ask_service(
            ClusterFacts(
                service=self._service,
                address=str(ray.get_runtime_context().gcs_address),
                here=NodeFacts(_HERE, ""),
                nodes=(),
                dead=frozenset(node["NodeID"] for node in listed) - alive.keys(),
                listed={kind: frozenset(nodes) for kind, nodes in actors.items()},
            )
        )
        self._ask_actors()
        self._look()
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

    def _start_probes(self) -> None:
        for node_id in self._nodes:
            place = NodeAffinitySchedulingStrategy(node_id, soft=False)
            self._client_ids[node_id] = os.urandom(16)
            self._probes[node_id] = (
                ray.remote(Probe)
                .options(num_cpus=0, max_restarts=0, scheduling_strategy=place)
                .remote(self._client_ids[node_id])
            )

    def _look(self) -> None:
        refs = {node_id: probe.look.remote() for node_id, probe in self._probes.items()}
        answers, troubles = self._gather(refs, "starting a worker")
        for node_id, trouble in troubles.items():
            self._note(node_id, trouble=trouble)
        for node_id, look in answers.items():
            self._note(node_id, look=look)
        for node_id in answers:
            begin = time.time()
            found, _ = self._gather({node_id: self._probes[node_id].now.remote()}, "telling the time")
            if found:
                self._note(node_id, skew_s=found[node_id] - (begin + time.time()) / 2)

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
        for node_id, node in list(self._nodes.items()):
            for kind, field in ((HIDDEN_STATES, "stats_trouble"), (KV, "kv_trouble")):
                if kind not in node.has_actors:
                    continue
                try:
                    actor = self._bounded(partial(find_actor, self._service, kind, node_id))
                except ServiceError as error:
                    self._note(node_id, **{field: str(error)})
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

    def _able(self) -> dict[str, Any]:
        """The probes that can import this package."""
        return {
            node_id: self._probes[node_id]
            for node_id, node in self._nodes.items()
            if node.look is not None and not node.look["missing"]
        }

    def _compare(self, here: NodeFacts, config: CacheConfig | None) -> NodeFacts:
        """Have every node say how it would name chunks and set up a client, and this process too, which is returned."""
        try:
            settings = (config or CacheConfig.load()).model_dump()
        except ConfigError:  # a service that doesn't run has none, and this process's own are wrong
            settings = CacheConfig().model_dump()
        refs: dict[tuple[str, str], Any] = {}
        for node_id, probe in self._able().items():
            refs[node_id, "keys"] = probe.keys.remote(settings)
            refs[node_id, "headroom"] = probe.memory.remote()
            if config is not None:
                refs[node_id, "client"] = probe.client_settings.remote(settings)
        answers, troubles = self._gather(refs, "asking its probe")
        for (node_id, field), answer in answers.items():
            self._note(node_id, **{field: answer})
        for (node_id, field), trouble in troubles.items():
            self._note(node_id, **{"keys_trouble" if field == "keys" else "trouble": trouble})
        mine = Probe(b"")
        here = replace(here, look=mine.look(), client=mine.client_settings(settings) if config is not None else None)
        try:
            return replace(here, keys=mine.keys(settings))
        except HiddenStateCacheError as error:
            return replace(here, keys_trouble=str(error))

    def _attach(self) -> None:
        refs = {
            node_id: probe.attach.remote(self._service, node_id, self._call_s)
            for node_id, probe in self._able().items()
            if node_id in self._owners
        }
        answers, troubles = self._gather(refs, "attaching a client")
        for node_id, (incarnation, reason) in answers.items():
            self._note(node_id, incarnation=incarnation, not_shared=reason)
        for node_id, trouble in troubles.items():
            self._note(node_id, canary=trouble)

    def _store(self) -> int:
        """Store a canary on every node that has room for one; their size."""
        free = {
            node_id: node.stats.store.free_bytes // _SHARE_OF_FREE
            for node_id, node in self._nodes.items()
            if node.incarnation and node.stats is not None
        }
        roomy = {node_id: nbytes for node_id, nbytes in free.items() if nbytes >= _LEAST_CANARY_BYTES}
        for node_id in free.keys() - roomy.keys():
            self._note(node_id, canary="no room in its pool without evicting what is cached")
        nbytes = min(_CANARY_BYTES, *roomy.values()) // _ALIGNED * _ALIGNED if roomy else 0
        refs = {}
        for node_id in roomy:
            # Known before it is stored: whatever ends this run, what is there can be dropped.
            self._canaries[node_id] = {
                "hold_id": _HOLD_ID,
                "space": os.urandom(16),
                "key": os.urandom(16),
                "nbytes": nbytes,
            }
            refs[node_id] = self._probes[node_id].put.remote(self._service, self._canaries[node_id], self._call_s)
        answers, troubles = self._gather(refs, "storing rows")
        for node_id, outcome in {**answers, **troubles}.items():
            self._note(node_id, canary=f"no room: {outcome}" if outcome and node_id in answers else outcome)
        return nbytes

    def _measure(self) -> list[PathFacts]:
        """In rounds: in each, every node reads from one other, and is read by one, so that they don't share a link."""
        readers = list(self._able())
        owners = [node_id for node_id in self._owners if node_id in self._nodes]
        found: dict[tuple[str, str], PathFacts] = {}
        order = sorted({*readers, *owners})
        out: set[str] = set()
        for shift in range(len(order)):
            pairs = [(reader, order[(i + shift) % len(order)]) for i, reader in enumerate(order)]
            pairs = [
                (reader, owner)
                for reader, owner in pairs
                if reader in readers and owner in owners and not {reader, owner} & out
            ]
            for method in ("ping", "read"):
                pairs = [pair for pair in pairs if method == "ping" or self._nodes[pair[1]].canary == ""]
                refs = {(reader, owner): self._begin(method, reader, owner) for reader, owner in pairs}
                answers, troubles = self._gather(refs, "reading" if method == "read" else "calling its actor")
                for (reader, owner), answer in answers.items():
                    known = found.get((reader, owner), PathFacts(reader, owner))
                    if method == "ping":
                        found[reader, owner] = replace(known, round_trip_s=answer)
                    elif answer[0] is None:
                        found[reader, owner] = replace(known, trouble="the rows stored there were not found again")
                    else:
                        found[reader, owner] = replace(known, right=answer[0], read_s=answer[1])
                for (reader, owner), trouble in troubles.items():
                    known = found.get((reader, owner), PathFacts(reader, owner))
                    found[reader, owner] = replace(known, trouble=trouble)
                    out.add(owner)
                    pairs = [pair for pair in pairs if pair != (reader, owner)]
        return [found[pair] for pair in sorted(found)]

    def _begin(self, method: str, reader: str, owner: str) -> Any:
        canary = [self._canaries[owner]] if method == "read" else []
        return getattr(self._probes[reader], method).remote(self._service, owner, *canary, self._call_s)

    def _drop(self) -> None:
        """Drop the canaries, whether they were stored or still may be; ask the actors themselves, not the probes."""
        canaries, self._canaries = self._canaries, {}
        refs = {}
        for node_id, canary in canaries.items():
            with suppress(Exception):  # Ray has ended: then the probes have too, and what is held for them goes
                actor, incarnation = self._owners[node_id], self._nodes[node_id].incarnation
                actor.release.remote(incarnation, self._client_ids[node_id], (canary["hold_id"],))
                refs[node_id] = actor.drop_key.remote(canary["key"], canary["space"])
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
