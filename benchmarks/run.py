"""One run: starts what is measured, measures it, and ends it."""

import contextlib
import gc
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import ray

import hs_cache
from benchmarks import machine
from benchmarks.clients import measure_clients
from benchmarks.local import Baseline, HSCache, RayObjects
from benchmarks.measure import measure
from benchmarks.peers import BASELINE, HS_CACHE, LMCACHE, LMCACHE_TUNED, PEERS, RAY_BYTES, RAY_TENSOR, ROOT
from benchmarks.plan import Plan
from benchmarks.results import ClientsResult, Run, SizeResult
from benchmarks.subject import MeasurementError, Subject

_SERVICE, _FULL_SERVICE = "bench", "bench-full"
_LEAST_BYTES = 256 << 20
_COMMAND_TIMEOUT_S = 600


class Runner:
    """Takes down what comes of each part, and why a part isn't there."""

    def __init__(self, plan: Plan, peers: Collection[str]) -> None:
        self._plan = plan
        self._peers = peers
        self._skipped: dict[str, str] = {
            name: "not asked for" for name in PEERS if name not in peers
        }  # those that were asked for and don't start come on top

    def run(self) -> Run:
        """Measure everything. Takes minutes."""
        started = time.monotonic()
        with _ray(self._room_bytes()) as address:
            with self._service(_SERVICE, self._room_bytes()):
                sizes, kept = self._sizes()
                clients = self._clients(address)
            full_pool = self._full_pool()
        cross_node = self._command("cross_node")
        found = {name: self._command(name) for name in ("steps", "replay", "churn")}
        return Run(
            machine={**machine.machine(), **machine.peers()},
            rounds=self._plan.rounds,
            wall_s=time.monotonic() - started,
            sizes=sizes,
            full_pool=full_pool,
            clients=clients,
            clients_nbytes=self._plan.clients_size.nbytes,
            bytes_per_token=kept,
            skipped=self._skipped,
            cross_node=cross_node,
            tables={name: table for name, table in found.items() if table is not None},
        )

    def _room_bytes(self) -> int:
        """Of our pool, and of Ray's object store."""
        # Two prompts at once at most; results of more than half of the pool would be copies.
        return max(_LEAST_BYTES, 4 * max(size.nbytes for size in self._plan.sizes))

    @contextlib.contextmanager
    def _service(self, service: str, pool_bytes: int) -> Iterator[None]:
        hs_cache.start(
            {"kv_source": "reports", "max_hidden_state_cpu_size": pool_bytes / 2**30, "node_selector": "all"},
            service=service,
        )
        try:
            yield
        finally:
            hs_cache.stop(service=service)

    def _sizes(self) -> tuple[list[SizeResult], dict[str, tuple[float, int]]]:
        results: list[SizeResult] = []
        kept: dict[str, tuple[float, int]] = {}
        with contextlib.ExitStack() as stack:
            subjects: dict[str, Subject] = {
                HS_CACHE: HSCache(_connected(_SERVICE)),
                BASELINE: Baseline(),
                RAY_BYTES: RayObjects(as_bytes=True),
                RAY_TENSOR: RayObjects(as_bytes=False),
            }
            for name in self._peers:
                taken = [size.nbytes for size in self._plan.sizes if PEERS[name].takes(size)]
                self._add(stack, subjects, name, str(max(_LEAST_BYTES, 3 * max(taken, default=0)) / 2**30))
            stack.callback(subjects[HS_CACHE].close)
            gc.collect()
            gc.freeze()
            for size in self._plan.sizes:
                taking = {name: each for name, each in subjects.items() if name not in PEERS or PEERS[name].takes(size)}
                began = time.monotonic()
                result, found = measure(taking, size, self._plan.rounds, self._plan.patience_s)
                results.append(result)
                for name, bytes_per_token in found.items():
                    kept.setdefault(name, (bytes_per_token, size.hidden))
                _say(f"{size}: {time.monotonic() - began:.0f} s, {result.disturbed} rounds disturbed", result.missing)
        return results, kept

    def _add(self, stack: contextlib.ExitStack, subjects: dict[str, Subject], name: str, *arguments: str) -> None:
        try:
            subjects[name] = PEERS[name].start(*arguments)
            stack.callback(subjects[name].close)
        except MeasurementError as error:
            self._skip(name, str(error))

    def _full_pool(self) -> SizeResult:
        size = self._plan.full_size
        pool_bytes = self._plan.full_prompts * size.nbytes
        with self._service(_FULL_SERVICE, pool_bytes), contextlib.ExitStack() as stack:
            ours = HSCache(_connected(_FULL_SERVICE), full=True)
            stack.callback(ours.close)
            subjects: dict[str, Subject] = {HS_CACHE: ours, BASELINE: Baseline()}
            for name in (LMCACHE, LMCACHE_TUNED):
                if name in self._peers and name not in self._skipped:
                    self._add(stack, subjects, name, str(2 * pool_bytes / 2**30), "full")
            result, _ = measure(subjects, size, self._plan.rounds, self._plan.patience_s)
            _say(f"{size}, full pool: {result.disturbed} rounds disturbed", result.missing)
        return result

    def _clients(self, address: str) -> list[ClientsResult]:
        plan = self._plan
        try:
            found = measure_clients(
                address,
                _SERVICE,
                plan.clients_size,
                plan.clients,
                seconds=plan.clients_seconds,
                rounds=plan.clients_rounds,
                patience_s=plan.patience_s,
            )
        except MeasurementError as error:
            self._skip("clients", str(error))
            return []
        _say(f"{', '.join(map(str, plan.clients))} client processes")
        return found

    def _command(self, name: str) -> Any:
        """What another benchmark writes as JSON; None where there is nothing."""
        if name not in self._plan.commands:
            self._skip(name, "not part of the quick form")
            return None
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "found.json")
            line = [sys.executable, "-m", f"benchmarks.{name}", *self._plan.commands[name], "--json", str(file)]
            try:
                done = subprocess.run(
                    line, cwd=ROOT, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, check=False
                )
            except subprocess.TimeoutExpired:
                self._skip(name, f"not done after {_COMMAND_TIMEOUT_S} s")
                return None
            if done.returncode:
                self._skip(name, (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1])
                return None
            _say(f"{name}: done")
            return json.loads(file.read_text(encoding="utf-8"))

    def _skip(self, name: str, reason: str) -> None:
        self._skipped[name] = reason
        _say(f"{name} is skipped: {reason}")


@contextlib.contextmanager
def _ray(object_store_bytes: int) -> Iterator[str]:
    """A Ray of its own on this machine; its address. Nothing of it is left afterwards."""
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # or clients in other processes would need a token
    folder = tempfile.mkdtemp(prefix="hs", dir="/tmp")  # short: the paths of Ray's sockets may have 107 characters
    try:
        ray.init(
            address="local",
            include_dashboard=False,
            logging_level=logging.ERROR,
            log_to_driver=False,
            object_store_memory=object_store_bytes,
            _temp_dir=folder,
        )
        yield str(ray.get_runtime_context().gcs_address)
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def _connected(service: str) -> hs_cache.HiddenStateCache:
    cache = hs_cache.connect(service=service)
    assert cache is not None
    return cache


def _say(text: str, missing: Mapping[str, str] | None = None) -> None:
    print(text, flush=True)
    for name, reason in (missing or {}).items():
        print(f"  {name}: {reason}", flush=True)
