"""What an engine says of its chunks, whatever state its storage is in; no Ray."""

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hs_cache.integrations import lmcache_engine
from hs_cache.integrations.lmcache_engine import Lookup
from hs_cache.integrations.lmcache_wire import Question
from hs_cache.kv_presence import Presence
from hs_cache.lmcache_names import LMCacheNaming
from tests.builders import CHUNK_SIZE
from tests.lmcache import golden
from tests.lmcache.conftest import MakeEngine
from tests.lmcache.engines import kv_keys, put_kv
from tests.processes import free_port, kill, listens, stopped, wait_until

PROMPT = list(range(100, 120))  # five chunks
CPU, DISK, REMOTE = "LocalCPUBackend", "LocalDiskBackend", "RemoteBackend"


def presence(
    engine: Any,
    prompt: Sequence[int] = PROMPT,
    *,
    naming: LMCacheNaming | None = None,
    tags: tuple[tuple[str, str], ...] = (),
    timeout_s: float = 2.0,
    lookup: Lookup | None = None,
) -> str:
    """A letter per chunk: P, A or U."""
    names = (naming or LMCacheNaming()).names(b"", np.array(prompt), (), CHUNK_SIZE)
    answer = (lookup or Lookup(engine)).presence(Question(names, tags, timeout_s))
    return "".join(Presence(state).name[0] for state in answer)


def stored(engine: Any, prompt: Sequence[int], backend: str) -> None:
    """Wait until a backend has a prompt: writes to a disk or a server are under way for a moment."""
    chosen = engine.storage_manager.storage_backends[backend]
    wait_until(lambda: all(chosen.contains(key) for key in kv_keys(engine, prompt)), f"{backend} has it")


def test_nothing_is_pinned_or_touched(make_engine: MakeEngine) -> None:
    engine = make_engine()
    keys = put_kv(engine, PROMPT)
    cpu = engine.storage_manager.storage_backends[CPU]
    order = list(cpu.hot_cache)
    assert presence(engine) == "PPPPP"
    assert list(cpu.hot_cache) == order
    assert cpu.keys_in_request == []
    assert not any(cpu.hot_cache[key].is_pinned for key in keys)


def test_a_prefix_may_change_backends_as_often_as_it_likes(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine(local_disk=str(tmp_path), max_local_disk_size=0.1)
    keys = put_kv(engine, PROMPT)
    stored(engine, PROMPT, DISK)
    manager = engine.storage_manager
    for chunk in (0, 2):
        manager.remove(keys[chunk], [CPU])
    for chunk in (1, 3):
        manager.remove(keys[chunk], [DISK])
    found, _ = manager.batched_contains(keys)
    assert found < 5  # a prefix is counted backend by backend
    assert presence(engine) == "PPPPP"
    manager.remove(keys[3], [CPU])
    assert presence(engine) == "PPPAU"


def test_storage_that_is_frozen_out_or_bypassed_may_have_what_the_rest_lacks(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    engine = make_engine(local_disk=str(tmp_path), max_local_disk_size=0.1)
    keys = put_kv(engine, PROMPT)
    stored(engine, PROMPT, DISK)
    manager = engine.storage_manager
    manager.remove(keys[1], [CPU])
    assert presence(engine) == "PPPPP"
    engine.freeze(True)
    assert presence(engine) == "PUUUU"
    engine.freeze(False)
    manager.set_backend_bypass(DISK, True)
    assert presence(engine) == "PUUUU"
    manager.set_backend_bypass(DISK, False)
    manager.remove(keys[1])
    assert presence(engine) == "PAUUU"


def test_only_the_locations_that_the_engine_retrieves_from_count(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine(local_disk=str(tmp_path), max_local_disk_size=0.1, retrieve_locations=[CPU])
    keys = put_kv(engine, PROMPT)
    stored(engine, PROMPT, DISK)
    engine.storage_manager.remove(keys[1], [CPU])
    assert engine.lookup(PROMPT) == 4
    assert presence(engine) == "PAUUU"
    engine.retrieve_locations = [CPU, DISK]
    assert engine.lookup(PROMPT) == 20
    assert presence(engine) == "PPPPP"


def test_layers_of_a_chunk_count_only_where_all_are_in_one_place(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine(local_disk=str(tmp_path), max_local_disk_size=0.1, use_layerwise=True)
    manager = engine.storage_manager
    keys = put_kv(engine, PROMPT)  # two layers
    disk = manager.storage_backends[DISK]
    wait_until(lambda: all(map(disk.contains, keys)), "the disk has it")
    assert (presence(engine), engine.lookup(PROMPT)) == ("PPPPP", 20)
    for layer in (0, 1):
        manager.remove(keys[2 + layer], [CPU])
    assert (presence(engine), engine.lookup(PROMPT)) == ("PPPPP", 20)
    manager.remove(keys[5], [CPU])  # the disk has the third chunk, but LMCache looks where its first layer is
    assert (presence(engine), engine.lookup(PROMPT)) == ("PPUUU", 8)
    manager.remove(keys[4], [DISK])
    assert (presence(engine), engine.lookup(PROMPT)) == ("PPAUU", 8)


def test_a_write_under_way_is_no_absence(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine(local_disk=str(tmp_path), max_local_disk_size=0.1)
    assert presence(engine) == "AUUUU"
    (key,) = kv_keys(engine, PROMPT[:4])
    worker = engine.storage_manager.storage_backends[DISK].disk_worker
    worker.insert_put_task(key)
    assert presence(engine) == "UUUUU"
    worker.remove_put_task(key)
    assert presence(engine) == "AUUUU"


def test_an_engine_that_is_not_ready_or_not_healthy_knows_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine(post_init=False)
    assert presence(engine) == "UUUUU"
    engine.post_init()
    assert presence(engine) == "AUUUU"
    engine.mark_init_failed("of the test")
    assert presence(engine) == "UUUUU"


def test_a_storage_backend_that_raises(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine()
    put_kv(engine, PROMPT)

    def broken(*_: Any, **__: Any) -> Any:
        raise OSError("no such disk")

    monkeypatch.setattr(engine.storage_manager.storage_backends[CPU], "batched_contains", broken)
    lookup = Lookup(engine)
    names = LMCacheNaming().names(b"", np.array(PROMPT), (), CHUNK_SIZE)
    for _ in range(3):
        assert lookup.presence(Question(names, (), 1.0)) == bytes([Presence.UNKNOWN]) * 5
    assert [record.getMessage() for record in caplog.records] == [
        "an LMCache engine can't say which chunks it has: OSError: no such disk"
    ]


def test_hashes_of_vllm_are_unsigned(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.token_database.hash_func = golden.sha256_cbor
    put_kv(engine, PROMPT)
    assert presence(engine, naming=LMCacheNaming("sha256_cbor")) == "PPPPP"
    assert presence(engine, naming=LMCacheNaming("builtin")) == "AUUUU"
    prompts = [range(start, start + 4) for start in range(0, 64, 4)]  # half of their hashes have the highest bit
    for prompt in prompts:
        put_kv(engine, prompt)
    assert {presence(engine, prompt, naming=LMCacheNaming("sha256_cbor")) for prompt in prompts} == {"P"}


@pytest.fixture
def server() -> Iterator[tuple[int, int]]:
    """LMCache's own remote store in a process of its own: its pid and its port."""
    port = free_port()
    command = [sys.executable, "-m", "lmcache.v1.server", "127.0.0.1", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            wait_until(lambda: listens(port), "the store listens")
            yield process.pid, port
        finally:
            process.kill()


def with_remote(make_engine: MakeEngine, port: int) -> tuple[Any, list[Any]]:
    """An engine that has the prompt in its remote store alone, with its first chunk in its memory too."""
    engine = make_engine(remote_url=f"lm://127.0.0.1:{port}", remote_serde="naive")
    keys = put_kv(engine, PROMPT)
    stored(engine, PROMPT, REMOTE)
    for key in keys[1:]:
        engine.storage_manager.remove(key, [CPU])
    return engine, keys


def test_a_remote_store_is_asked_and_believed(make_engine: MakeEngine, server: tuple[int, int]) -> None:
    engine, keys = with_remote(make_engine, server[1])
    assert presence(engine) == "PPPPP"
    assert presence(engine, [*PROMPT, 1, 2, 3, 4, 5, 6, 7, 8]) == "PPPPPAU"
    del keys


def test_a_remote_store_that_is_written_to_in_batches_is_believed_after_a_while(
    make_engine: MakeEngine, server: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(remote_url=f"lm://127.0.0.1:{server[1]}", remote_serde="naive")
    backend = engine.storage_manager.storage_backends[REMOTE]
    connection, go_on = backend.connection, threading.Event()

    async def batched_put(keys: Sequence[Any], objects: Sequence[Any]) -> None:
        while not go_on.is_set():
            await asyncio.sleep(0.01)
        for key, one in zip(keys, objects, strict=True):
            await connection.put(key, one)

    monkeypatch.setattr(connection, "support_batched_put", lambda: True)
    monkeypatch.setattr(connection, "batched_put", batched_put)
    keys = put_kv(engine, PROMPT)
    for key in keys:
        engine.storage_manager.remove(key, [CPU])
    lookup = Lookup(engine)
    assert not any(map(backend.exists_in_put_tasks, keys))
    assert presence(engine, lookup=lookup) == "UUUUU"
    go_on.set()
    wait_until(lambda: presence(engine, lookup=lookup) == "PPPPP", "it is there")
    monkeypatch.setattr(lmcache_engine, "_WRITE_S", 0.3)
    never = range(500, 520)
    assert presence(engine, never, lookup=lookup) == "UUUUU"
    wait_until(lambda: presence(engine, never, lookup=lookup) == "AUUUU", "nobody is writing it")


def test_a_remote_store_that_is_gone_is_no_absence(make_engine: MakeEngine, server: tuple[int, int]) -> None:
    engine, keys = with_remote(make_engine, server[1])
    kill(server[0])
    assert engine.storage_manager.contains(keys[1]) is None  # LMCache takes the error for absence
    assert presence(engine) == "PUUUU"
    engine.storage_manager.storage_backends[REMOTE].connection = None
    assert presence(engine) == "PUUUU"


def test_a_remote_store_that_hangs_is_no_absence_and_costs_no_more_than_the_deadline(
    make_engine: MakeEngine, server: tuple[int, int]
) -> None:
    engine, _ = with_remote(make_engine, server[1])
    with stopped(server[0]):
        began = time.monotonic()
        assert presence(engine, timeout_s=0.3) == "PUUUU"
        assert time.monotonic() - began < 2.0
    wait_until(lambda: presence(engine) == "PPPPP", "the store answers again")


def test_a_remote_store_that_was_never_there(make_engine: MakeEngine) -> None:
    engine = make_engine(remote_url=f"lm://127.0.0.1:{free_port()}", remote_serde="naive")
    put_kv(engine, PROMPT[:4])
    assert presence(engine) == "PUUUU"
