"""Clients as arguments of tasks and actors, and processes without a mapping of the pool."""

import pickle
import shutil
import subprocess
import uuid
from typing import Any

import pytest
import ray
import torch

import hs_cache
from hs_cache.router import Router, nodes_of
from tests.cluster import remotes
from tests.cluster.children import make_rows
from tests.cluster.conftest import Blocking, Connect, StartService
from tests.processes import Child

# The shell is process 1 of the new namespace, Python another one. Its /proc comes later: Ray finds its node through it.
NEW_NAMESPACE = ("unshare", "--pid", "--fork", "--mount", "sh", "-c", '"$@"; exit $?', "sh")


def unshare_refused() -> str:
    """Why no process in another pid namespace can be started; empty if it can."""
    if not shutil.which("unshare"):
        return "there is no unshare command"
    mount = ("mount", "-t", "proc", "proc", "/proc")
    done = subprocess.run([*NEW_NAMESPACE, *mount], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else f"a pid namespace is not permitted here: {done.stderr.strip()}"


def as_bytes(rows: torch.Tensor) -> bytes:
    return bytes(rows.contiguous().view(torch.uint8).numpy())


def test_a_client_reconnects_in_tasks(connect: Connect, service: str) -> None:
    cache = connect(service=service)
    rows = make_rows(12, 1).to(torch.bfloat16)
    cache.store(range(12), {-1: rows})
    blocking = hs_cache.connect(service=service, model=cache.key_space.model)
    node_id, content, zero_copy, copied = ray.get(ray.remote(remotes.read).remote(blocking, range(12), -1))
    assert (node_id, content) == (nodes_of(service)[0], as_bytes(rows))
    assert (zero_copy, copied) == (1, 0)
    _, _, stored = ray.get(ray.remote(remotes.write).remote(blocking, range(50, 58), make_rows(8, 2).numpy()))
    assert stored == 2
    assert torch.equal(cache.retrieve(range(50, 58), 0)[0], make_rows(8, 2))


def test_clients_reconnect_in_actors(connect: Connect, service: str) -> None:
    cache = connect(service=service)
    rows = make_rows(8, 1)
    cache.store(range(8), {0: rows})
    if isinstance(cache, Blocking):
        actor = remotes.spawn(remotes.AsyncReader, cache.target)
        num_tokens, content = ray.get(actor.read.remote(range(8)))
    else:
        actor = remotes.spawn(remotes.Reader, cache)
        _, num_tokens, content = ray.get(actor.hold.remote(range(8)))
    assert (num_tokens, content) == (8, as_bytes(rows))
    ray.kill(actor)


def test_a_pickled_client_starts_with_settings_only(service: str) -> None:
    cache = hs_cache.connect({"enable_hidden_state_cache": True}, service=service, model=uuid.uuid4().hex, strict=True)
    assert cache is not None
    cache.store(range(8), {0: make_rows(8, 1)})
    held = cache.retrieve(range(8), 0)
    copy: Any = pickle.loads(pickle.dumps(cache))
    assert (copy.key_space, copy.chunk_size) == (cache.key_space, cache.chunk_size)
    assert copy.chunk_keys(range(8)) == cache.chunk_keys(range(8))
    assert torch.equal(copy.retrieve(range(8), 0)[0], held[0])
    cache.close()
    assert copy.retrieve(range(8), 0).num_tokens == 8


def test_a_router_pickles(service: str) -> None:
    router = pickle.loads(pickle.dumps(Router(service)))
    assert router.service == service
    located = router.locate()
    assert located.peer.node_id == located.kv.node_id == located.client_node_id == nodes_of(service)[0]


def test_another_pid_namespace_uses_the_object_store(address: str, start_service: StartService) -> None:
    if reason := unshare_refused():
        pytest.skip(reason)
    asked = {"address": address, "service": start_service(), "model": "", "own_proc": True}
    with Child("roundtrip", asked, launcher=NEW_NAMESPACE) as child:
        found = child.result()
    assert (found["stored"], found["right"]) == (2, True)
    assert (found["zero_copy"], found["copied"]) == (1, 0), "as they arrived"
    assert found["clients"] == 0
