"""The client's operations against servers in this process, by plain calls: no Ray, and any fault at any effect.

What would cross processes is pickled, arrays arrive read-only as Ray hands them out, and the pool is opened through
``/proc`` as from elsewhere. A `Node` is collected like any other object; a peer that addresses it doesn't keep it.
"""

import gc
import itertools
import pickle
import subprocess
import sys
import textwrap
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from hs_cache.config import CacheConfig
from hs_cache.effects import Call, Effect, Fetch, Locate, Located, Steps, Work
from hs_cache.errors import HiddenStateCacheError, ServiceError, ServiceTimeoutError
from hs_cache.keys import MMSpan
from hs_cache.kv_presence import KVIndex, KVPresence
from hs_cache.leases import this_process
from hs_cache.messages import StoreStatistics
from hs_cache.results import PrefixHit, StoreResult
from hs_cache.server import CacheServer
from hs_cache.session import Session
from hs_cache.shared_pool import SharedPool
from tests.builders import CHUNK_SIZE, SLOT_BYTES

T = TypeVar("T")

REPOSITORY = Path(__file__).parents[1]
HIDDEN_DIM = 8
"""With `torch.bfloat16`, one chunk of one layer takes one slot of the pool."""

Fault = Callable[[Callable[[], Any]], Any]
"""Stands in for one effect. It gets what performs it, and results in what the effect is to result in, or raises."""


def make_rows(
    token_ids: Sequence[int],
    layer_idx: int = 0,
    *,
    hidden_dim: int = HIDDEN_DIM,
    dtype: torch.dtype = torch.bfloat16,
    variant: int = 0,
) -> torch.Tensor:
    """Rows that tell token, layer and column, and are exact in every dtype of 16 bits or more."""
    token = torch.tensor(list(token_ids), dtype=torch.int64).reshape(-1, 1)
    return ((token * 7 + layer_idx * 31 + torch.arange(hidden_dim) + variant * 101) % 251).to(dtype)


def poll(condition: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.002)


def run_script(script: str, *options: str) -> "subprocess.CompletedProcess[str]":
    """Run a script in an interpreter of its own, which starts with `options`."""
    return subprocess.run(
        [sys.executable, *options, "-c", textwrap.dedent(script)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


class IndexedKV:
    """A `KVIndex` as a server asks it."""

    def __init__(self, index: KVIndex) -> None:
        self._index = index

    def presence(self, keys: bytes, timeout_s: float) -> Sequence[int]:
        return self._index.presence(keys)

    def note_stored(self, keys: bytes) -> None:
        self._index.note_stored(keys)

    def settle_notes(self, timeout_s: float) -> None:
        pass


class Node:
    """One node: its server, its KV index, and whether calls reach it."""

    _numbers = itertools.count()

    def __init__(self, slots: int = 64, *, kv: KVPresence | None = None, **settings: Any) -> None:
        self.name = f"test-node-{next(self._numbers)}"
        self.config = CacheConfig(chunk_size=CHUNK_SIZE, **settings)
        self.index = KVIndex(1024, store_implies_present=self.config.kv_source == "reports")
        self._kv = kv or (None if self.config.kv_source == "none" else IndexedKV(self.index))
        self._slots = slots
        self.unreachable = False
        self.restart()

    def restart(self) -> None:
        """Another incarnation, empty, under the same address."""
        self.pool = SharedPool(self._slots * SLOT_BYTES, name=self.name, prefault=False, margin_bytes=0)
        self.server = CacheServer(self.config, self.pool, node_id=self.name, kv=self._kv)

    def perform(self, target: str, method: str, args: tuple[Any, ...]) -> Any:
        """One call, as it arrives."""
        if self.unreachable:
            raise ServiceError(f"{self.name} can't be reached")
        try:
            return _sent(self._dispatch(target, method, _sent(args)))
        except HiddenStateCacheError as error:
            raise _sent(error) from None

    def _dispatch(self, target: str, method: str, args: tuple[Any, ...]) -> Any:
        if target == "kv":
            return getattr(self.index, method)(*args)
        if method == "retrieve_rows":
            with self.server.lease_rows(*args) as (reply, flat):
                return reply, None if flat is None else flat.copy()
        return getattr(self.server, method)(*args)

    def settled(self) -> StoreStatistics:
        """The store's statistics as soon as nothing is held any more; everything that has ended is handed over."""

        def idle() -> bool:
            this_process().releaser.flush()
            stats = self.server.store.stats()
            return not stats.num_leases and not stats.num_reservations

        if not idle():
            gc.collect()
        poll(idle, f"all leases and reservations ended: {self.server.store.stats()}")
        self.server.store.check()
        stats = self.server.store.stats()
        assert not stats.stranded_bytes
        assert stats.free_bytes + stats.resident_bytes == stats.capacity_bytes
        return stats

    def num_leases(self) -> int:
        """Leases held, after everything that has ended was handed over."""
        this_process().releaser.flush()
        return self.server.store.stats().num_leases

    def num_mappings(self) -> int:
        """How often pools of this node are mapped in this process: by their owners, clients and results."""
        return Path("/proc/self/maps").read_text().count(f"/memfd:{self.name} ")


def _sent(message: Any) -> Any:
    arrived = pickle.loads(pickle.dumps(message))
    for part in arrived if isinstance(arrived, tuple) else ():
        if isinstance(part, np.ndarray):
            part.flags.writeable = False
    return arrived


class DirectPeer:
    """The address of one of a node's actors."""

    def __init__(self, node: Node, target: str) -> None:
        self._node = weakref.ref(node)
        self._target = target
        self.node_id = node.name

    def post(self, method: str, *args: Any) -> None:
        node = self._node()
        if node is not None:
            node.perform(self._target, method, args)

    def call(self, method: str, args: tuple[Any, ...]) -> Any:
        node = self._node()
        if node is None:
            raise ServiceError(f"{self.node_id} is gone")
        return node.perform(self._target, method, args)


class DirectCache:
    """A client of one node.

    Args:
        far: The client is on another node: no pool is shared, and its KV is not the node's.
        space: Fields of `KeySpace`.

    Attributes:
        faults: What goes wrong in the next operation, by the number of the effect in it.
        effects: What the latest operation asked for: methods of calls, and names of other effects.
    """

    def __init__(self, node: Node, *, far: bool = False, strict: bool = False, **space: Any) -> None:
        self.node = node
        self.session = Session(space, strict=strict)
        self.faults: dict[int, Fault] = {}
        self.effects: list[str] = []
        self._node_id = "elsewhere" if far else node.name
        self.run(self.session.attach())

    def run(self, steps: Steps[T]) -> T:
        """Drive an operation as the blocking client does."""
        self.effects, faults, self.faults = [], self.faults, {}
        try:
            effect = next(steps)
            while True:
                try:
                    result = self._perform(effect, faults)
                except BaseException as error:
                    effect = steps.throw(error)
                else:
                    effect = steps.send(result)
        except StopIteration as done:
            value: T = done.value
            return value

    def _perform(self, effect: Effect, faults: Mapping[int, Fault]) -> Any:
        fault = faults.get(len(self.effects))
        self.effects.append(effect.method if isinstance(effect, Call) else type(effect).__name__)
        return self.result(effect) if fault is None else fault(lambda: self.result(effect))

    def result(self, effect: Effect) -> Any:
        """What an effect results in, without any fault."""
        if isinstance(effect, Locate):
            return Located(DirectPeer(self.node, "hidden_states"), DirectPeer(self.node, "kv"), self._node_id)
        if isinstance(effect, Work):
            return effect.run()
        if isinstance(effect, Fetch):
            return effect.ref
        assert isinstance(effect.peer, DirectPeer)
        return effect.peer.call(effect.method, effect.args)

    def store(
        self, token_ids: Any, layers: Any, *, token_offset: Any = 0, mm_spans: Sequence[MMSpan] = ()
    ) -> StoreResult:
        return self.run(self.session.store(token_ids, layers, token_offset, mm_spans))

    def put(self, token_ids: Sequence[int], *layers: int) -> StoreResult:
        """Store `make_rows` of all tokens."""
        return self.store(token_ids, {layer: make_rows(token_ids, layer) for layer in layers or (0,)})

    def retrieve(
        self,
        token_ids: Any,
        layers: Any = 0,
        *,
        start: Any = 0,
        stop: Any = None,
        dtype: Any = None,
        out: Any = None,
    ) -> PrefixHit:
        return self.run(self.session.retrieve(token_ids, layers, start, stop, dtype, out, ()))

    def report(self, method: str, what: Any) -> bool:
        return self.run(self.session.report(method, what))


class Cancelled(BaseException):
    """As asyncio.CancelledError and KeyboardInterrupt: no `Exception`."""


def lost_call(perform: Callable[[], Any]) -> Any:
    """The deadline is over before the call arrives, and it never does."""
    raise ServiceTimeoutError("lost on the way there")


def lost_reply(perform: Callable[[], Any]) -> Any:
    """The call takes effect, its answer comes too late."""
    perform()
    raise ServiceTimeoutError("lost on the way back")


def refused(perform: Callable[[], Any]) -> Any:
    raise ServiceError("the actor is dead")


def cancelled_before(perform: Callable[[], Any]) -> Any:
    raise Cancelled


def cancelled_after(perform: Callable[[], Any]) -> Any:
    perform()
    raise Cancelled


def broken(perform: Callable[[], Any]) -> Any:
    """A bug, or no memory: nothing that anyone has planned for."""
    perform()
    raise MemoryError("nothing left")


_ROWS = make_rows(range(8))
BAD_STORES: dict[str, tuple[Callable[[], tuple[Any, Any, Any]], str]] = {
    "offset below 0": (lambda: (range(8), {0: _ROWS}, -1), r"token_offset: got -1, expected 0 to 8"),
    "offset beyond": (lambda: (range(8), {0: _ROWS}, 9), r"token_offset: got 9, expected 0 to 8"),
    "offset of another type": (lambda: (range(8), {0: _ROWS}, 1.0), r"token_offset: got 1\.0, expected an int"),
    "offset is a bool": (lambda: (range(8), {0: _ROWS}, True), r"token_offset: got True, expected an int"),
    "too few rows": (lambda: (range(9), {0: _ROWS}, 0), r"hidden_states: got 8 rows, expected 9"),
    "too many rows": (lambda: (range(8), {0: _ROWS}, 1), r"hidden_states: got 8 rows, expected 7"),
    "rows at the end": (lambda: (range(8), {0: _ROWS}, 8), r"hidden_states: got 8 rows, expected 0"),
    "one layer of two": (
        lambda: (range(8), {0: _ROWS, 3: _ROWS[1:]}, 0),
        r"hidden_states of layer 3: got 7 rows, expected 8",
    ),
    "one dimension": (
        lambda: (range(8), {0: _ROWS[:, 0]}, 0),
        r"hidden_states: got shape \[8\], expected 2 dimensions",
    ),
    "three dimensions": (lambda: (range(8), {0: _ROWS[None]}, 0), r"got shape \[1, 8, 8\], expected 2 dimensions"),
    "integers": (lambda: (range(8), {0: _ROWS.int()}, 0), r"hidden_states\.dtype: got torch\.int32, expected one of"),
    "complex": (lambda: (range(8), {0: _ROWS.to(torch.complex64)}, 0), r"got torch\.complex64, expected one of"),
    "bools": (lambda: (range(8), {0: _ROWS.bool()}, 0), r"got torch\.bool, expected one of"),
    "no dimension": (lambda: (range(8), {0: _ROWS[:, :0]}, 0), r"got hidden_dim 0, expected at least 1"),
    "sparse": (lambda: (range(8), {0: _ROWS.float().to_sparse()}, 0), r"expected a dense one"),
    "meta": (lambda: (range(8), {0: _ROWS.to("meta")}, 0), r"expected a dense one"),
    "a list": (lambda: (range(8), {0: _ROWS.tolist()}, 0), r"hidden_states: got list, expected a torch\.Tensor"),
    "None": (lambda: (range(8), {0: None}, 0), r"hidden_states: got NoneType, expected a torch\.Tensor"),
    "NumPy integers": (lambda: (range(8), {0: np.ones((8, 2), int)}, 0), r"got a NumPy array of int64, expected"),
    "no layers": (lambda: (range(8), {}, 0), r"layers: got dict \{\}, expected \{layer_idx: rows\}"),
    "layers is a tensor": (lambda: (range(8), _ROWS, 0), r"layers: got Tensor .*expected \{layer_idx: rows\}"),
    "layer is text": (lambda: (range(8), {"0": _ROWS}, 0), r"layer_idx: got '0', expected an int"),
    "layer is a bool": (lambda: (range(8), {True: _ROWS}, 0), r"layer_idx: got True, expected an int"),
    "layer is a float": (lambda: (range(8), {0.0: _ROWS}, 0), r"layer_idx: got 0\.0, expected an int"),
    "tokens are floats": (lambda: ([0.5] * 8, {0: _ROWS}, 0), r"token_ids"),
    "tokens are bools": (lambda: ([True] * 8, {0: _ROWS}, 0), r"token_ids"),
    "tokens are a float array": (lambda: (np.ones(8), {0: _ROWS}, 0), r"token_ids"),
    "tokens have two dimensions": (lambda: (torch.ones(8, 1, dtype=torch.int64), {0: _ROWS}, 0), r"token_ids"),
    "a token beyond int64": (lambda: ([2**63] * 8, {0: _ROWS}, 0), r"token_ids"),
}
"""What no store takes, and what it says; by name: (token_ids, layers, token_offset), and the message."""
