"""What tests run in drivers of their own: ``python -m tests.cluster.children FUNCTION JSON``; prints a JSON line."""

import json
import logging
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import ray
import torch

import hs_cache
from hs_cache.config import CacheConfig
from hs_cache.errors import HiddenStateCacheError
from hs_cache.integrations.vllm_omni import HiddenStateCacheConnector
from hs_cache.router import Router
from tests.processes import wait_until


def make_rows(num_tokens: int, seed: int, hidden_dim: int = 8) -> torch.Tensor:
    """The same rows in every process: float32 ``[num_tokens, hidden_dim]``."""
    values = np.random.default_rng(seed).standard_normal((num_tokens, hidden_dim), dtype=np.float32)
    return torch.from_numpy(values)


def _join(address: str) -> None:
    ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)


def share(address: str, service: str, model: str, mine: int, theirs: int) -> dict[str, Any]:
    """Store the prompt `mine`, retrieve the prompt `theirs`, which another process stored."""
    _join(address)
    cache = hs_cache.connect(service=service, model=model)
    assert cache is not None
    prompt = [mine, -1, -2, *range(9)]
    stored = cache.store(prompt, {0: make_rows(len(prompt), mine)}).stored
    other = [theirs, -1, -2, *range(9)]
    hit = wait_until(lambda: cache.retrieve(other, 0), "the other process has stored")
    return {
        "stored": stored,
        "right": torch.equal(hit[0], make_rows(len(other), theirs)),
        "keys": cache.chunk_keys(prompt).blob.hex(),
        "zero_copy": cache.stats().zero_copy_total,
        "copied": cache.stats().copied_total,
    }


def roundtrip(
    address: str, service: str, model: str, config: dict[str, Any] | None = None, *, own_proc: bool = False
) -> dict[str, Any]:
    """Connect, starting the service if need be; store and retrieve. `own_proc`: with /proc of a new pid namespace."""
    _join(address)
    if own_proc:
        subprocess.run(["mount", "-t", "proc", "proc", "/proc"], check=True)
    cache = hs_cache.connect(config, service=service, model=model)
    assert cache is not None
    rows = make_rows(8, 0).to(torch.bfloat16)
    stored = cache.store(range(8), {0: rows})
    hit = cache.retrieve(range(8), 0)
    stats = cache.stats()
    return {
        "stored": stored.stored,
        "right": hit.num_tokens == len(rows) and torch.equal(hit[0], rows),
        "incarnation": stats.node.incarnation if stats.node else None,
        "zero_copy": stats.zero_copy_total,
        "copied": stats.copied_total,
        "clients": stats.node.num_clients if stats.node else None,
    }


def leave_and_return(address: str, service: str, model: str) -> dict[str, Any]:
    """Leave the cluster with a client in use and rows held, and join it again."""
    _join(address)
    cache = hs_cache.connect(service=service, model=model)
    assert cache is not None
    rows = make_rows(8, 0)
    cache.store(range(8), {0: rows})
    held = cache.retrieve(range(8), 0)
    dropped = cache.retrieve(range(4), 0)
    ray.shutdown()
    del dropped  # its lease ends while there is no way to tell
    found: dict[str, Any] = {"away": cache.retrieve(range(8), 0).ended_by, "joined_by_itself": ray.is_initialized()}
    found["held"] = torch.equal(held[0], rows)
    del held
    _join(address)
    hit = wait_until(lambda: cache.retrieve(range(8), 0), "the client is back")
    found["back"] = torch.equal(hit[0], rows)
    del hit

    def num_leases() -> int | None:
        node = cache.stats().node
        return node.store.num_leases if node else None

    wait_until(lambda: num_leases() == 0, "all leases have ended")
    return found


def without_ray(pickled: str, typo: str) -> dict[str, Any]:
    """What can be had, and how what can't is refused, in a process that never joins a Ray cluster."""
    found: dict[str, Any] = {
        "disabled": hs_cache.connect({"enable_hidden_state_cache": False}),
        "typo": _refusal(lambda: hs_cache.connect(typo)),
        "bad_service": _refusal(lambda: hs_cache.connect(service="a/b")),
        "locate": _refusal(Router("default").locate),
        "start": _refusal(lambda: hs_cache.start(CacheConfig())),
        "stop": _refusal(hs_cache.stop),
    }
    lenient, strict = pickle.loads(bytes.fromhex(pickled))
    found["lenient"] = lenient.retrieve(range(8), 0).ended_by
    found["strict"] = _refusal(lambda: strict.retrieve(range(8), 0))
    found["joined"] = ray.is_initialized()
    return found


def relay(address: str, service: str) -> float:
    """A stage that joins the cluster by itself: the sum of the tensor it gets. It leaves one that nobody gets."""
    stage = HiddenStateCacheConnector({"service": service, "address": address})
    taken = stage.get_with_deadline("0", "1", "to the child", deadline=time.monotonic() + 20)
    assert taken is not None
    assert stage.put("1", "2", "for nobody", taken[0])[0]
    return float(taken[0].sum())


def _refusal(call: Callable[[], Any]) -> list[str]:
    try:
        call()
    except HiddenStateCacheError as error:
        return [type(error).__name__, str(error)]
    return []


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](**json.loads(sys.argv[2]))))
