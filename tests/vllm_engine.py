"""What a vLLM engine tells of its KV, for tests: its prefix cache as far as events show it, and its publisher.

Written from the schema in vllm/distributed/kv_events.py, and from what vllm/v1/core/kv_cache_utils.py hashes (vLLM,
Apache-2.0).
"""

import functools
import hashlib
import json
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import Any, Literal

import msgspec
import zmq

from hs_cache.keys import KEY_BYTES, KeySpace, normalise_token_ids
from hs_cache.kv_presence import Presence
from hs_cache.vllm_blocks import BlockTable
from hs_cache.vllm_names import VLLMNaming
from tests.processes import ROOT, free_port

Form = Literal["arrays", "maps", "mixed"]
"""How releases have it, how main has it, and an array of maps, which was between them."""

Extras = Literal["offsets", "identifiers", "old", "none"]
"""Items with their offsets; without; without, and also in a block that begins where the item ends; not told at all."""

_STORED = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
)
_FIELDS = {"BlockStored": _STORED, "BlockRemoved": ("block_hashes", "medium", "group_idx"), "AllBlocksCleared": ()}

Span = tuple[int, int, str]


def stored(hashes: Sequence[Any], tokens: Sequence[int], parent: Any = None, **fields: Any) -> dict[str, Any]:
    """A ``BlockStored`` of plain text on the GPU; fields given replace what that would have."""
    size = fields.get("block_size", len(tokens) // max(1, len(hashes)))
    event = {
        "type": "BlockStored",
        "block_hashes": list(hashes),
        "parent_block_hash": parent,
        "token_ids": list(tokens),
        "block_size": size,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None] * len(hashes),
    }
    return event | fields


def removed(*hashes: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU"} | fields


CLEARED = {"type": "AllBlocksCleared"}


def encode(events: Sequence[dict[str, Any]], *, form: Form = "maps", ts: float = 0.0, rank: int | None = 0) -> bytes:
    """A message's payload."""
    wire = [_as_array(event) if form == "arrays" else _as_map(event) for event in events]
    batch: Any = {"ts": ts, "events": wire, "data_parallel_rank": rank} if form == "maps" else [ts, wire, rank]
    return msgspec.msgpack.encode(batch)


def _as_array(event: dict[str, Any]) -> list[Any]:
    return [event["type"], *(event.get(name) for name in _FIELDS.get(event["type"], ()))]


def _as_map(event: dict[str, Any]) -> dict[str, Any]:
    optional = ("extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window")
    return {name: value for name, value in event.items() if value is not None or name not in optional}


CHUNK, BLOCK = 4, 2
"""Tokens. A letter of a prompt, as functions here take it, is a block; two are a chunk."""


def tokens_of(prompt: str) -> list[int]:
    return [ord(letter) * BLOCK + i for letter in prompt for i in range(BLOCK)]


def block_of(prefix: str) -> bytes:
    """The hash of the last block of a prefix."""
    return prefix.encode()


def store(prompt: str, known: int = 0, **fields: Any) -> dict[str, Any]:
    """The event of an engine that has the first `known` blocks of a prompt already."""
    hashes = [block_of(prompt[: i + 1]) for i in range(known, len(prompt))]
    parent = block_of(prompt[:known]) if known else None
    return stored(hashes, tokens_of(prompt[known:]), parent, **{"block_size": BLOCK, **fields})


def remove(*prefixes: str, **fields: Any) -> dict[str, Any]:
    return removed(*map(block_of, prefixes), **fields)


@functools.cache
def names_of(prompt: str) -> list[bytes]:
    naming = VLLMNaming(KeySpace(model="m", chunk_size=CHUNK), BLOCK)
    blob = naming.names(b"", normalise_token_ids(tokens_of(prompt)), (), CHUNK)
    return [blob[i : i + KEY_BYTES] for i in range(0, len(blob), KEY_BYTES)]


def ask(table: BlockTable, prompt: str) -> list[Presence | None]:
    return table.presence(names_of(prompt))


class PrefixCache:
    """The blocks that an engine has, and what it says when that changes.

    Args:
        block_size: tokens per block.
        extras: in which form it tells what goes into block hashes besides tokens.
        seed: of the hashes; engines differ in it.
    """

    def __init__(self, block_size: int = 2, *, extras: Extras = "offsets", seed: int = 0) -> None:
        self.block_size = block_size
        self._extras = extras
        self._seed = seed
        self.blocks: set[bytes] = set()

    def hashes(
        self, tokens: Sequence[int], spans: Sequence[Span] = (), *, lora: str = "", salt: str = ""
    ) -> list[bytes]:
        """The hashes of all full blocks of a prompt."""
        found, parent = [], b""
        for block in range(len(tokens) // self.block_size):
            begin = block * self.block_size
            extra = self._extra(block, spans, lora, salt)
            content = repr((self._seed, parent, tuple(tokens[begin : begin + self.block_size]), extra)).encode()
            parent = hashlib.sha256(content).digest()
            found.append(parent)
        return found

    def store(
        self, tokens: Sequence[int], spans: Sequence[Span] = (), *, lora: str = "", salt: str = "", **fields: Any
    ) -> list[dict[str, Any]]:
        """Compute a prompt: what is new, in one event."""
        hashes = self.hashes(tokens, spans, lora=lora, salt=salt)
        known = next((i for i, each in enumerate(hashes) if each not in self.blocks), len(hashes))
        new = hashes[known:]
        if not new:
            return []
        self.blocks |= set(new)
        extra_keys = [self._extra(block, spans, lora, salt) for block in range(known, len(hashes))]
        return [
            stored(
                new,
                tokens[known * self.block_size : len(hashes) * self.block_size],
                hashes[known - 1] if known else None,
                lora_id=1 if lora else None,
                lora_name=lora or None,
                extra_keys=None if self._extras == "none" else extra_keys,
                **fields,
            )
        ]

    def evict(self, *hashes: bytes) -> list[dict[str, Any]]:
        """Reuse these blocks for something else."""
        self.blocks -= set(hashes)
        return [removed(each) for each in hashes]

    def clear(self) -> list[dict[str, Any]]:
        self.blocks.clear()
        return [CLEARED]

    def _extra(self, block: int, spans: Sequence[Span], lora: str, salt: str) -> tuple[Any, ...] | None:
        begin, end = block * self.block_size, (block + 1) * self.block_size
        extra: list[Any] = [lora] if lora else []
        for start, length, identifier in spans:
            behind = start + length + (1 if self._extras == "old" else 0)
            if start < end and behind > begin:
                extra.append((identifier, start - begin) if self._extras == "offsets" else identifier)
        if salt and not block:
            extra.append(salt)
        return tuple(extra) or None


class Publisher:
    """vLLM's publisher: PUB and ROUTER, both bound, in a thread of its own.

    Args:
        port, replay_port: of PUB and ROUTER; chosen if 0.
        replay: whether there is a ROUTER.
        buffer: most batches kept for replay.
        form: of what it sends.
        queue, replay_queue: most messages kept for a subscriber that is slow; it loses what comes then.
    """

    def __init__(
        self,
        port: int = 0,
        *,
        replay: bool = True,
        buffer: int = 10_000,
        form: Form = "maps",
        queue: int = 100_000,
        topic: bytes = b"",
        replay_port: int = 0,
        replay_queue: int = 1000,
    ) -> None:
        self.port = port or free_port()
        self.replay_port = (replay_port or free_port()) if replay else 0
        self.form = form
        self._topic = topic
        self._number = 0
        self.replays = 0
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer)
        self._jobs: SimpleQueue[Callable[[Any], None] | None] = SimpleQueue()
        self._answering = True
        self._context = zmq.Context()
        self._publisher = self._context.socket(zmq.PUB)
        self._publisher.set(zmq.SNDHWM, queue)
        self._publisher.set(zmq.LINGER, 0)
        self._publisher.bind(f"tcp://127.0.0.1:{self.port}")
        self._router = None
        if replay:
            self._router = self._context.socket(zmq.ROUTER)
            self._router.set(zmq.LINGER, 0)
            self._router.set(zmq.SNDHWM, replay_queue)
            self._router.bind(f"tcp://127.0.0.1:{self.replay_port}")
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    @property
    def source(self) -> dict[str, Any]:
        """An entry for ``kv_events``."""
        entry: dict[str, Any] = {"endpoint": f"tcp://127.0.0.1:{self.port}"}
        if self.replay_port:
            entry["replay_endpoint"] = f"tcp://127.0.0.1:{self.replay_port}"
        return entry

    def publish(self, *events: dict[str, Any], lost: bool = False, ts: float = 0.0) -> tuple[int, bytes]:
        """Send a batch; `lost`: it doesn't arrive, but is kept for replay."""
        number, self._number = self._number, self._number + 1
        payload = encode(events, form=self.form, ts=ts or float(number))
        self._buffer.append((number, payload))
        if not lost:
            self.send(number, payload)
        return number, payload

    def send(self, number: int, payload: bytes) -> None:
        """Send anything under any number."""
        self.send_frames([self._topic, number.to_bytes(8, "big"), payload])

    def send_frames(self, frames: list[bytes]) -> None:
        self._jobs.put(lambda publisher: publisher.send_multipart(frames))

    def answer(self, answering: bool) -> None:
        """Whether replay is served."""
        self._answering = answering

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join()
        self._publisher.close()
        if self._router is not None:
            self._router.close()
        self._context.term()

    def _run(self) -> None:
        while True:
            if self._router is not None and self._answering and self._router.poll(0):
                self._replay(self._router)
            try:
                job = self._jobs.get(timeout=0.005)
            except Empty:
                continue
            if job is None:
                return
            job(self._publisher)

    def _replay(self, router: Any) -> None:
        client, empty, start = router.recv_multipart()
        self.replays += 1
        for number, payload in list(self._buffer):
            if number >= int.from_bytes(start, "big"):
                router.send_multipart([client, empty, number.to_bytes(8, "big"), payload])
        router.send_multipart([client, empty, (-1).to_bytes(8, "big", signed=True), b""])


class PublisherProcess:
    """A `Publisher` in a process of its own, to be killed."""

    def __init__(self, **options: Any) -> None:
        self.port = options.setdefault("port", 0) or free_port()
        self.replay_port = options.setdefault("replay_port", 0) or free_port()
        options |= {"port": self.port, "replay_port": self.replay_port}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.vllm_engine", json.dumps(options)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._line()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def source(self) -> dict[str, Any]:
        """An entry for ``kv_events``."""
        return {
            "endpoint": f"tcp://127.0.0.1:{self.port}",
            "replay_endpoint": f"tcp://127.0.0.1:{self.replay_port}",
        }

    def publish(self, *events: dict[str, Any], ts: float = 0.0) -> None:
        """As `Publisher.publish`; it has been sent when this returns."""
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode({"events": events, "ts": ts}) + b"\n")
        self._process.stdin.flush()
        self._line()

    def kill(self) -> None:
        """SIGKILL, and wait."""
        self._process.kill()
        self._process.communicate()

    def _line(self) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline(), "the publisher has ended"


@contextmanager
def publishing(**options: Any) -> Iterator[Publisher]:
    """A `Publisher` for the length of a block."""
    publisher = Publisher(**options)
    try:
        yield publisher
    finally:
        publisher.close()


@contextmanager
def publishing_process(**options: Any) -> Iterator[PublisherProcess]:
    """A `PublisherProcess` for the length of a block."""
    publisher = PublisherProcess(**options)
    try:
        yield publisher
    finally:
        publisher.kill()


def _main() -> None:
    publisher = Publisher(**json.loads(sys.argv[1]))
    print("ready", flush=True)
    for line in sys.stdin.buffer:
        said = json.loads(line)
        # JSON has no bytes: hashes come as text, which is turned into bytes of the same letters.
        for event in said["events"]:
            for name in ("block_hashes", "parent_block_hash"):
                if name in event:
                    event[name] = _as_hashes(event[name])
        publisher.publish(*said["events"], ts=said["ts"])
        print("sent", flush=True)
    publisher.close()


def _as_hashes(value: Any) -> Any:
    if isinstance(value, list):
        return [_as_hashes(each) for each in value]
    return value.encode() if isinstance(value, str) else value


if __name__ == "__main__":
    _main()
