"""What `hs_cache.doctor` runs on every node of a cluster: an actor that looks around there and answers in plain values.

It travels by value and imports nothing of ours before it is asked to, so that it also runs where this package is
missing, and can say so. What it needs is looked up by name.
"""

import hashlib
import importlib.metadata
import os
import pathlib
import pkgutil
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import ray

_PINGS = 20
_READS = 3
_MOST_TOKENS = 1 << 20


class Probe:
    """One node's eyes, single-threaded. Every method returns what pickles without this package.

    Args:
        client_id: who it is to the node's actor, 16 random bytes.
    """

    def __init__(self, client_id: bytes) -> None:
        self._client_id = client_id
        self._mapping: Any = None
        self._node_id = ""
        self._incarnation = b""
        self._last_id = 0

    def now(self) -> float:
        """This node's clock."""
        return time.time()

    def look(self) -> dict[str, Any]:
        """Versions, and the digest of each source file; ``missing`` says why the package can't be had."""
        found: dict[str, Any] = {
            "pid": os.getpid(),
            "python": platform.python_version(),
            "platform": f"{platform.system()} {platform.machine()}",
            "ray": ray.__version__,
            "missing": "",
        }
        for package in ("torch", "numpy"):
            try:
                found[package] = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                found[package] = ""
        try:
            package = pkgutil.resolve_name("hs_cache")
            found["hs_cache"] = package.__version__
            found["protocol"] = pkgutil.resolve_name("hs_cache.messages:PROTOCOL_VERSION")
        # Whatever it is: an ImportError, but also what half an installation raises.
        except Exception as error:
            found["missing"] = f"{type(error).__name__}: {error}"
            return found
        home = pathlib.Path(package.__file__).parent
        found["location"] = str(home)
        found["files"] = {
            path.relative_to(home.parent).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()[:16]
            for directory in (home, home.parent / "actors")
            for path in sorted(directory.rglob("*.py"))
        }
        return found

    def client_settings(self, settings: dict[str, Any]) -> dict[str, Any]:
        """What a client on this node would be told otherwise, by its environment, than a service with these settings
        runs with: ``differences``, whether it would be ``disabled``, or why its settings are no ``settings`` at all."""
        config = pkgutil.resolve_name("hs_cache.config:CacheConfig")
        running = config(**settings)
        try:
            own = config.load()
        except pkgutil.resolve_name("hs_cache.errors:ConfigError") as error:
            return {"error": str(error), "differences": [], "refused": False, "disabled": False}
        enable = "enable_hidden_state_cache"
        return {
            "error": "",
            "differences": own.differences(running),
            "refused": own.is_set("chunk_size") and own.chunk_size != running.chunk_size,
            "disabled": own.is_set(enable) and not getattr(own, enable),
        }

    def keys(self, settings: dict[str, Any]) -> dict[str, str]:
        """What this node calls the chunks of a few prompts, by what is special about each; in hex."""
        np = pkgutil.resolve_name("numpy")
        key_space = pkgutil.resolve_name("hs_cache.keys:KeySpace")
        database = pkgutil.resolve_name("hs_cache.keys:TokenDatabase")
        kv_naming = pkgutil.resolve_name("hs_cache.kv_names:kv_naming")
        config = pkgutil.resolve_name("hs_cache.config:CacheConfig")(**settings)
        tokens = [-1, -2, 0, 2**62, *range(40)]
        short = np.array([7, 151_643, 151_655, 9, 2], dtype=np.int32)
        spans = [(3, 9, "audio"), (14, 5, b"\x00\xff"), (20, 2, -(2**70))]
        prompts: dict[str, tuple[dict[str, str], Any, Any]] = {
            "tokens": ({}, tokens, ()),
            "a NumPy array": ({}, short, ()),
            "spans": ({}, tokens, spans),
            "a LoRA": ({"lora_id": "adapter"}, tokens, ()),
            "a salt": ({"cache_salt": "tenant"}, tokens, ()),
            "a shard": ({"shard": "tp0/2", "model_revision": "r1"}, tokens, ()),
        }
        models = [event["model"] for event in settings.get("kv_events", ())] or ["doctor"]
        found: dict[str, str] = {}
        for name, (fields, ids, mm_spans) in prompts.items():
            for model in models:
                space = key_space(model=model, chunk_size=8, **fields)
                naming = kv_naming(config, space)
                keys = database(space, save_unfull_chunk=True, kv_naming=None).chunk_keys(ids, mm_spans=mm_spans)
                found[name] = found.get(name, "") + keys.blob.hex()
                count = max(2, -(-64 // config.chunk_size)) * config.chunk_size
                if naming is not None and not fields and count <= _MOST_TOKENS:
                    space = key_space(model=model, chunk_size=config.chunk_size, **fields)
                    names = database(space, kv_naming=naming).chunk_keys(range(count), mm_spans=mm_spans)
                    label = f"{name}, for KV"
                    found[label] = found.get(label, "") + (names.kv.blob.hex() if names.kv else "")
        return found

    def memory(self) -> tuple[int, str]:
        """How many bytes a process of this node can have more, and what limits that."""
        headroom = pkgutil.resolve_name("hs_cache.machine:memory_headroom")()
        return headroom.nbytes, headroom.limit

    def attach(self, service: str, node_id: str, timeout_s: float) -> tuple[bytes, str]:
        """Become a client of this node's actor: its incarnation, and why its pool isn't shared (``""`` if it is)."""
        info_class = pkgutil.resolve_name("hs_cache.messages:ClientInfo")
        start_time = pkgutil.resolve_name("hs_cache.machine:own_start_time")()
        self._node_id = node_id
        actor = _actor(service, node_id)
        info = info_class(self._client_id, os.getpid(), start_time, node_id)
        reply = ray.get(actor.attach.remote(info), timeout=timeout_s)
        self._incarnation = reply.incarnation
        reason: str = reply.reason
        if reply.address is not None:
            try:
                self._mapping = pkgutil.resolve_name("hs_cache.shared_pool:PoolMapping").open(reply.address)
            except pkgutil.resolve_name("hs_cache.errors:PoolError") as error:
                reason = str(error)
        return self._incarnation, reason

    def put(self, service: str, canary: dict[str, Any], timeout_s: float) -> str:
        """Store a canary on this node, as a client does here: through the pool, or as an argument. ``""``, or why it
        isn't there.

        It counts as computed elsewhere, so no KV source is told or asked of it. Through the pool it is held for this
        process: it goes when that ends.
        """
        request = pkgutil.resolve_name("hs_cache.messages:ReserveRequest")(
            incarnation=self._incarnation,
            client_id=self._client_id,
            hold_id=canary["hold_id"],
            space=canary["space"],
            keys=canary["key"],
            num_tokens=1,
            first_chunk=0,
            specs=(_spec(canary),),
            kv_local=False,
            keep=self._mapping is not None,
        )
        actor, content = _actor(service, self._node_id), _content(canary)
        if self._mapping is None:
            flat = pkgutil.resolve_name("numpy").frombuffer(content, dtype="uint8")
            done = ray.get(actor.store_rows.remote(request, flat), timeout=timeout_s)
        else:
            reserved = ray.get(actor.reserve.remote(request), timeout=timeout_s)
            if reserved.refused:
                return "there is no room for it"
            (run,) = reserved.runs
            with self._mapping.write_view() as memory:
                memory[run.offset : run.offset + len(content)] = content
            done = ray.get(
                actor.commit.remote(self._incarnation, self._client_id, canary["hold_id"]), timeout=timeout_s
            )
        return "" if done.stored else "there is no room for it"

    def ping(self, service: str, node_id: str, timeout_s: float) -> float:
        """The median round trip of a call to a node's actor that does next to nothing, in seconds."""
        actor, took = _actor(service, node_id), []
        for _ in range(_PINGS):
            begin = time.perf_counter()
            ray.get(actor.has_chunk.remote(bytes(16)), timeout=timeout_s)
            took.append(time.perf_counter() - begin)
        return statistics.median(took)

    def read(self, service: str, node_id: str, canary: dict[str, Any], timeout_s: float) -> tuple[bool | None, float]:
        """Read a node's canary: whether every byte is right, None if it wasn't found, and the median time of a read in
        seconds."""
        actor, expected = _actor(service, node_id), _content(canary)
        buffer = bytearray(b"\1" * canary["nbytes"])  # its memory is there: to fill it is a copy, and no page faults
        right, took = True, []
        for _ in range(_READS):
            begin = time.perf_counter()
            if node_id == self._node_id and self._mapping is not None:
                rows = self._read_shared(actor, canary, buffer, timeout_s)
            else:
                rows = self._read_sent(actor, canary, timeout_s)
            took.append(time.perf_counter() - begin)
            if rows is None:
                return None, 0.0
            right = right and bytes(rows) == expected
            buffer[:] = bytes(len(buffer))
        return right, statistics.median(took)

    def _read_shared(self, actor: Any, canary: dict[str, Any], buffer: bytearray, timeout_s: float) -> Any:
        request = self._lease_request(canary, timeout_s)
        try:
            reply = ray.get(actor.lease.remote(request), timeout=timeout_s)
            if not reply.num_tokens:
                return None
            (run,) = reply.runs
            mapped, start = self._mapping.private_mapping(run.offset, canary["nbytes"])
            memoryview(buffer)[:] = memoryview(mapped)[start : start + canary["nbytes"]]
        finally:
            actor.release.remote(self._incarnation, self._client_id, (request.hold_id,))
        return buffer

    def _read_sent(self, actor: Any, canary: dict[str, Any], timeout_s: float) -> Any:
        refs = actor.retrieve_rows.options(num_returns=2).remote(self._lease_request(canary, timeout_s))
        _, rows = ray.get(list(refs), timeout=timeout_s)
        return rows

    def _lease_request(self, canary: dict[str, Any], timeout_s: float) -> Any:
        self._last_id += 1
        return pkgutil.resolve_name("hs_cache.messages:LeaseRequest")(
            incarnation=self._incarnation,
            client_id=self._client_id,
            hold_id=canary["hold_id"] + self._last_id,
            keys=canary["key"],
            num_tokens=1,
            layers=(_spec(canary).layer_idx,),
            timeout_s=timeout_s,
            counted=False,
        )


def _actor(service: str, node_id: str) -> Any:
    find: Callable[..., Any] = pkgutil.resolve_name("hs_cache.router:find_actor")
    return find(service, pkgutil.resolve_name("hs_cache.router:HIDDEN_STATES"), node_id)


def _spec(canary: dict[str, Any]) -> Any:
    return pkgutil.resolve_name("hs_cache.messages:LayerSpec")(0, canary["nbytes"], "float8_e4m3fn")  # bytes


def _content(canary: dict[str, Any]) -> bytes:
    """What a canary consists of: bytes that no other has, and none of which can be foreseen from the others."""
    return hashlib.shake_128(canary["space"]).digest(canary["nbytes"])
