"""A retrieve from another node, against a bare Ray transfer of the same bytes in the same run.

Two raylets on this machine. Every round stores fresh prompts on the other node and runs each measurement once, on a
prompt (or an array) of its own that has never crossed before, in an order that rotates from round to round; the table
shows medians. What to look at are the ratios: absolute times depend on what else the machine does.

The bare transfer: an actor on the other node returns a uint8 NumPy array that it holds, and ``ray.get`` gives a view of
this node's object store. Nothing is copied out of that, while a retrieve hands out rows of the caller's own; the bare
transfer with such a copy is shown too.

    python -m benchmarks.cross_node [--rounds 12] [--tokens 8192 32768] [--hidden 2048] [--json FILE]
"""

import argparse
import json
import logging
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import hs_cache
from benchmarks import machine
from benchmarks.measure import ROUNDS_OF_WARMUP, turned
from benchmarks.prompts import make_prompt
from benchmarks.transfers import BARE_TRANSFER, CROSS_NODE_RETRIEVE, table
from hs_cache.router import find_controller

_SERVICE = "bench"
_PATIENCE_S = 60.0


class Far:
    """On the other node: stores, and holds an array to be fetched as it is."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self._held: Any = None

    def hold(self, nbytes: int) -> None:
        """Make the array."""
        self._held = np.random.default_rng(0).integers(0, 256, nbytes, dtype=np.uint8)

    def fetch(self) -> Any:
        """The array; Ray puts it into the object store anew with every call."""
        return self._held

    def store(self, prompt: list[int], tokens: int, hidden: int) -> int:
        """Store rows of a prompt; chunks stored."""
        rows = torch.from_numpy(self._held).view(torch.bfloat16).view(tokens, hidden)
        return int(self._cache.store(prompt, {0: rows}).stored)

    def pid_of_pool(self) -> int:
        """The process of this node's hidden-state actor."""
        return int(self._cache.stats().node.pid)

    def get(self, refs: list[Any]) -> float:
        """Seconds that the rows behind a `HiddenStateRef` take to get here."""
        started = time.perf_counter()
        hit = refs[0].get(timeout=30)
        assert hit
        return time.perf_counter() - started


def measure(near: Any, far: Any, tokens: int, hidden: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of every round of every measurement, bf16, one layer. `near` is a client here, `far` a `Far`."""
    nbytes = tokens * hidden * 2
    ray.get(far.hold.remote(nbytes))
    warm = torch.zeros(tokens, hidden, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(tokens)

    def bare() -> float:
        started = time.perf_counter()
        array = ray.get(far.fetch.remote())
        took = time.perf_counter() - started
        assert array.nbytes == nbytes
        return took

    def bare_copied() -> float:
        started = time.perf_counter()
        warm.view(torch.uint8).numpy().reshape(-1)[:] = ray.get(far.fetch.remote())
        return time.perf_counter() - started

    def retrieve(**options: Any) -> float:
        prompt = make_prompt(tokens, generator)
        assert ray.get(far.store.remote(prompt, tokens, hidden)) == tokens // near.chunk_size
        wait_until_known(near, prompt)
        started = time.perf_counter()
        hit = near.retrieve(prompt, 0, **options)
        took = time.perf_counter() - started
        assert hit.num_tokens == tokens, hit.ended_by
        return took

    def get_far() -> float:
        prompt = make_prompt(tokens, generator)
        assert near.store(prompt, {0: warm}).stored == tokens // near.chunk_size
        return float(ray.get(far.get.remote([near.retrieve_ref(prompt, 0)])))

    steps: dict[str, Callable[[], float]] = {
        BARE_TRANSFER: bare,
        "bare transfer, copied to warm memory": bare_copied,
        CROSS_NODE_RETRIEVE: retrieve,
        "retrieve, out= reused": lambda: retrieve(out={0: warm}),
        "HiddenStateRef.get() over there": get_far,
    }
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + ROUNDS_OF_WARMUP):
        for name in turned(list(steps), number):
            seconds = steps[name]()
            if number >= ROUNDS_OF_WARMUP:
                taken[name].append(seconds)
    return taken


def wait_until_known(cache: Any, prompt: list[int]) -> None:
    """Wait until the controller knows where all of a prompt is; no rows move for that."""
    keys = cache.chunk_keys(prompt)
    controller = find_controller(_SERVICE)
    until = time.monotonic() + _PATIENCE_S
    while sum(segment.num_chunks for segment in ray.get(controller.locate.remote(keys.blob))) < len(keys):
        assert time.monotonic() < until, "the controller doesn't learn where the chunks are"
        time.sleep(0.005)


def recover(near: Any, far: Any, number: int) -> float:
    """Seconds from the SIGKILL of the other node's hidden-state actor until a prompt stored there is hit here."""
    tokens, hidden = near.chunk_size, 8
    ray.get(far.hold.remote(tokens * hidden * 2))
    prompt = [number] * tokens
    pid = ray.get(far.pid_of_pool.remote())
    started = time.perf_counter()
    os.kill(pid, signal.SIGKILL)
    while True:
        stored = ray.get(far.store.remote(prompt, tokens, hidden))
        if stored and near.retrieve(prompt, 0, wait_s=1):
            return time.perf_counter() - started
        assert time.perf_counter() < started + _PATIENCE_S, "the actor doesn't come back"


def main() -> None:
    """Start two nodes, measure, show."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--pool-gib", type=float, default=1.0)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    directory = tempfile.mkdtemp(prefix="hs", dir="/tmp")  # short: the paths of Ray's sockets may have 107 characters
    os.environ["RAY_TMPDIR"] = directory
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # nodes that join don't turn it on as a local Ray does
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(Path(hs_cache.__file__).parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    node: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 1 << 30, "include_dashboard": False}
    head = {**node, "temp_dir": f"{directory}/ray"}
    cluster = Cluster(initialize_head=True, head_node_args=head, shutdown_at_exit=False)
    try:
        other = cluster.add_node(**node)
        ray.init(address=cluster.address, logging_level=logging.ERROR, log_to_driver=False)
        settings = {"max_hidden_state_cpu_size": options.pool_gib, "node_selector": "all"}
        near: Any = hs_cache.connect(settings, service=_SERVICE)
        place = NodeAffinitySchedulingStrategy(other.node_id, soft=False)
        far: Any = ray.remote(Far).options(num_cpus=0, scheduling_strategy=place).remote(near)
        results = [
            {
                "tokens": tokens,
                "hidden": options.hidden,
                "seconds": measure(near, far, tokens, options.hidden, options.rounds),
            }
            for tokens in options.tokens
        ]
        kills = [recover(near, far, number) for number in range(options.kills)]
        print(machine.in_a_line(options.rounds))
        table(results, kills).print()
        if options.json:
            options.json.write_text(json.dumps({"results": results, "recovery_seconds": kills}, indent=1))
        hs_cache.stop(service=_SERVICE)
    finally:
        ray.shutdown()
        cluster.shutdown()  # type: ignore[no-untyped-call]
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
