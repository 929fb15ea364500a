"""The client's operations against servers in this process, by plain calls: no Ray, and any fault at any effect.

What would cross processes is pickled, arrays arrive read-only as Ray hands them out, and the pool is opened through
``/proc`` as from elsewhere. A `Node` is collected like any other object; a peer that addresses it doesn't keep it.
Nodes that are given the same `Controller` are a cluster; nothing is published but by `Controller.hear_all`.
"""

import gc
import itertools
import pickle
import subprocess
import sys
import textwrap
import time
import weakref
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from actors.kv_actor import KVActor
from hs_cache.config import CacheConfig
from hs_cache.directory import Directory, Membership, Segment
from hs_cache.effects import Begin, Call, Effect, Fetch, Find, Locate, Located, Pause, Steps, Work
from hs_cache.errors import HiddenStateCacheError, ServiceError, ServiceNotRunningError, ServiceTimeoutError
from hs_cache.keys import MMSpan
from hs_cache.kv_link import KVLink
from hs_cache.kv_presence import KVPresence
from hs_cache.kv_reports import ReportedKV
from hs_cache.leases import this_process
from hs_cache.messages import ControllerStatistics, LocationBatch, PublishReply, RevisionChange, StoreStatistics
from hs_cache.publishing import Publisher
from hs_cache.results import Coverage, PrefixHit, StoreResult
from hs_cache.revisions import Revisions
from hs_cache.server import CacheServer
from hs_cache.session import Session
from hs_cache.shared_pool import SharedPool
from tests.builders import CHUNK_SIZE, SLOT_BYTES, make_tokens

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


class DirectCalls:
    """Calls of a `KVActor` in this process."""

    def __init__(self, actor: KVActor) -> None:
        self._actor = actor

    def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        return getattr(self._actor, method)(*args)

    def send(self, method: str, *args: Any) -> Any:
        return getattr(self._actor, method)(*args)

    def wait(self, sent: Sequence[Any], timeout_s: float) -> bool:
        return True

    def renew(self) -> None: ...


def direct_kv(actor: KVActor, *, logs: bool = True) -> KVLink:
    """A `KVActor` as a server asks it; notes come as late as they can, right before it is asked the next time."""
    link = KVLink(DirectCalls(actor), logs=logs, capacity=100_000)
    link.look_after()
    return link


class Clock:
    """Stands in for the module `time`; it goes on where `advance` says, which calls that are lost do."""

    def __init__(self) -> None:
        self._now = 1000.0

    def monotonic(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        self._now += seconds


class Controller:
    """What `actors.controller.CacheController` answers, and the nodes of its cluster.

    Args:
        told_only: KV is present only where it was reported.

    Attributes:
        calls: methods called, in order.
    """

    node_id = ""

    def __init__(self) -> None:
        self.nodes: weakref.WeakValueDictionary[str, Node] = weakref.WeakValueDictionary()
        self.unreachable = False
        self.calls: list[str] = []
        self.revisions = Revisions()
        self.restart()

    def restart(self) -> None:
        """It knows nothing but what is kept elsewhere."""
        self.membership = Membership()
        self.directory = Directory()

    def hear_all(self) -> None:
        """Every node that can be reached publishes all that it has to say."""
        for _ in range(3):  # one that finds a gap sends all; and the first ones learn how many others there are
            for name in sorted(self.nodes):
                node = self.nodes[name]
                if not node.unreachable:
                    node.publisher.step()
        self.directory.check()

    def forget(self, node: "Node") -> None:
        """As when the node is gone from the cluster."""
        self.membership.leave(node.name)
        self.directory.remove(node.name)

    def perform(self, target: str, method: str, args: tuple[Any, ...]) -> Any:
        """One call, as it arrives."""
        if self.unreachable:
            raise ServiceError("the controller can't be reached")
        self.calls += [method] * (method != "revisions")  # which every client asks for when it connects
        methods: dict[str, Callable[..., Any]] = {
            "publish": self.publish,
            "locate": self.locate,
            "where": self.where,
            "holders": self.holders,
            "revisions": self.revisions.table,
            "stats": self.stats,
        }
        return _sent(methods[method](*_sent(args)))

    def bump(self, model: str, name: str | None = None, *, unreached: Sequence["Node"] = ()) -> RevisionChange:
        """As `hs_cache.bump_revision`; some nodes are not reached."""
        reached = [node for node in self.nodes.values() if node not in unreached]
        change = self.revisions.change(model, name)
        for node in reached:
            node.server.revisions.take(self.revisions.table())
        return change

    def stats(self) -> ControllerStatistics:
        names = tuple(member.node_id for member in self.membership.members())
        return ControllerStatistics(self.membership.version, names, len(self.directory), 0, self.revisions.table())

    def publish(self, batch: LocationBatch) -> PublishReply:
        self.membership.join(batch.node_id, batch.incarnation)
        applied = True
        if batch.whole:
            self.directory.replace(batch.node_id, batch.incarnation, batch.number, batch.added)
        else:
            applied = self.directory.apply(batch.node_id, batch.incarnation, batch.number, batch.added, batch.removed)
        return PublishReply(applied, len(self.membership.members()), self.revisions.table())

    def locate(self, keys: bytes, without: Sequence[str] = ()) -> tuple[Segment, ...]:
        return self.directory.locate(keys, without=without)

    def holders(self, keys: bytes) -> dict[str, int]:
        return self.directory.holders(keys)

    def where(self, keys: bytes, without: Sequence[str] = ()) -> tuple[str, ...]:
        return self.directory.where(keys, without=without)


class Node:
    """One node: its server, its KV index, its publisher, and whether calls reach it.

    Args:
        told_only: KV is present only where it was reported.

    Attributes:
        calls: methods called, in order.
        bytes_sent: of rows, through the object store.
    """

    _numbers = itertools.count()

    def __init__(
        self,
        slots: int = 64,
        *,
        kv: KVPresence | None = None,
        told_only: bool = False,
        controller: Controller | None = None,
        **settings: Any,
    ) -> None:
        self.name = f"test-node-{next(self._numbers)}"
        self.config = CacheConfig(**{"chunk_size": CHUNK_SIZE, **settings})
        self.index = KVActor(self.config)
        if told_only:
            self.index._source = self.index._reported = ReportedKV(1024, store_implies_present=False)
        self._kv = kv or (direct_kv(self.index, logs=not told_only) if self.index.bound() else None)
        self._slots = slots
        self.unreachable = False
        self.calls: list[str] = []
        self.bytes_sent = 0
        self.controller = controller or Controller()
        self.controller.nodes[self.name] = self
        self.restart()

    def restart(self) -> None:
        """Another incarnation, empty, under the same address."""
        self.pool = SharedPool(self._slots * SLOT_BYTES, name=self.name, prefault=False, margin_bytes=0)
        self.server = CacheServer(self.config, self.pool, node_id=self.name, kv=self._kv)
        controller = self.controller
        self.publisher = Publisher(
            self.server.store,
            node_id=self.name,
            incarnation=self.pool.incarnation,
            send=lambda batch: controller.perform("controller", "publish", (batch,)),
            heard=self.server.heard,
        )

    def perform(self, target: str, method: str, args: tuple[Any, ...]) -> Any:
        """One call, as it arrives."""
        if self.unreachable:
            raise ServiceError(f"{self.name} can't be reached")
        self.calls.append(method)
        try:
            return _sent(self._dispatch(target, method, _sent(args)))
        except HiddenStateCacheError as error:
            raise _sent(error) from None

    def _dispatch(self, target: str, method: str, args: tuple[Any, ...]) -> Any:
        if target == "kv":
            return getattr(self.index, method)(*args)
        if method == "retrieve_rows":
            with self.server.lease_rows(*args) as (reply, rows):
                flat = rows()
                self.bytes_sent += 0 if flat is None else flat.nbytes
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


class Result:
    """One result of a call, which lies on the node that made it."""

    def __init__(self, node: Node, value: Any, error: Exception | None) -> None:
        self._node = weakref.ref(node)
        self._value = value
        self._error = error

    def get(self) -> Any:
        if self._error is not None:
            raise self._error
        node = self._node()
        if node is None or node.unreachable:
            raise ServiceError("the object is lost")
        return self._value


class DirectPeer:
    """The address of one of a node's actors, or of the controller."""

    def __init__(self, node: Node | Controller, target: str) -> None:
        self._node = weakref.ref(node)
        self._target = target
        self.node_id = node.name if isinstance(node, Node) else ""

    def post(self, method: str, *args: Any) -> None:
        node = self._node()
        if node is not None:
            node.perform(self._target, method, args)

    def call(self, method: str, args: tuple[Any, ...]) -> Any:
        node = self._node()
        if node is None:
            raise ServiceError(f"{self.node_id} is gone")
        return node.perform(self._target, method, args)

    def begin(self, method: str, args: tuple[Any, ...], num_returns: int) -> "Result | list[Result]":
        node = self._node()
        if not isinstance(node, Node):
            raise ServiceError(f"{self.node_id} is gone")
        try:
            returned, error = self.call(method, args), None
        except HiddenStateCacheError as raised:
            returned, error = [None] * num_returns, raised
        if num_returns == 1:
            return Result(node, returned if error is None else None, error)
        assert len(returned) == num_returns
        return [Result(node, value, error) for value in returned]


class DirectCache:
    """A client of one node.

    Args:
        far: The client is on another node: no pool is shared, and its KV is not the node's.
        space: Fields of `KeySpace`.

    Attributes:
        faults: What goes wrong in the next operation, by the number of the effect in it.
        effects: What the latest operation asked for: methods of calls, and names of other effects.
        waits: The deadline of each of them, 0 for those that have none.
        clock: Goes on when a call is lost, by what its deadline was, and in a pause.
        pausing: What happens in the meantime of a pause.
    """

    def __init__(
        self,
        node: Node,
        *,
        far: bool = False,
        strict: bool = False,
        clock: Clock | None = None,
        engine: str = "",
        **space: Any,
    ) -> None:
        self.node = node
        self.clock = clock
        self.waits: list[float] = []
        self.pausing: Callable[[], None] = lambda: None
        self.session = Session(space, strict=strict, engine=engine)
        self.faults: dict[int, Fault] = {}
        self.effects: list[str] = []
        self._node_id = "elsewhere" if far else node.name
        self.run(self.session.attach())

    def run(self, steps: Steps[T]) -> T:
        """Drive an operation as the blocking client does."""
        self.effects, self.waits, faults, self.faults = [], [], self.faults, {}
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
        self.effects.append(effect.method if isinstance(effect, Call | Begin) else type(effect).__name__)
        self.waits.append(getattr(effect, "timeout_s", 0.0))
        try:
            return self.result(effect) if fault is None else fault(lambda: self.result(effect))
        except ServiceTimeoutError:
            if self.clock is not None:
                self.clock.advance(self.waits[-1])
            raise

    def _serving(self, avoid: Set[str]) -> Node:
        if self.node.name == self._node_id or self.node.name not in avoid:
            return self.node
        return next((node for name, node in self.node.controller.nodes.items() if name not in avoid), self.node)

    def result(self, effect: Effect) -> Any:
        """What an effect results in, without any fault."""
        controller = self.node.controller
        if isinstance(effect, Locate):
            node = self._serving(effect.avoid)
            return Located(DirectPeer(node, "hidden_states"), DirectPeer(node, "kv"), self._node_id)
        if isinstance(effect, Find):
            if effect.node_id is None:
                return DirectPeer(controller, "controller")
            node = controller.nodes.get(effect.node_id)
            if node is None:
                raise ServiceNotRunningError(f"no actor on node {effect.node_id}")
            return DirectPeer(node, "hidden_states")
        if isinstance(effect, Work):
            return effect.run()
        if isinstance(effect, Pause):
            if self.clock is not None:
                self.clock.advance(effect.seconds)
            return self.pausing()
        if isinstance(effect, Fetch):
            return effect.ref.get()
        assert isinstance(effect.peer, DirectPeer)
        if isinstance(effect, Begin):
            return effect.peer.begin(effect.method, effect.args, effect.num_returns)
        return effect.peer.call(effect.method, effect.args)

    def store(
        self, token_ids: Any, layers: Any, *, token_offset: Any = 0, mm_spans: Sequence[MMSpan] = ()
    ) -> StoreResult:
        self.effects = []
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
        device: Any = None,
        out: Any = None,
        mm_spans: Sequence[MMSpan] = (),
        wait_s: Any = 0.0,
    ) -> PrefixHit:
        return self.run(self.session.retrieve(token_ids, layers, start, stop, dtype, device, out, mm_spans, wait_s))

    def plan(self, token_ids: Any, layers: Any = 0, *, hold: Any = False, mm_spans: Sequence[MMSpan] = ()) -> Coverage:
        return self.run(self.session.plan(token_ids, layers, mm_spans, hold))

    def explain(self, token_ids: Any, layers: Any = 0, *, mm_spans: Sequence[MMSpan] = ()) -> list[str]:
        """The reasons only."""
        return [report.reason for report in self.run(self.session.explain(token_ids, layers, mm_spans))]

    def locate(
        self, prompt: Any, layers: Any = 0, *, nodes: Any = None, num_asked: Any = None, timeout_s: Any = None
    ) -> dict[str, int]:
        return self.run(self.session.locate(prompt, layers, (), nodes, num_asked, timeout_s))

    def report(self, method: str, what: Any) -> bool:
        return self.run(self.session.report(method, what))


def make_nodes(count: int = 3, **settings: Any) -> list[Node]:
    """Nodes of one service."""
    controller = Controller()
    return [Node(controller=controller, **settings) for _ in range(count)]


def put_part(node: Node, prompt: str, first_chunk: int, *layers: int, dtype: torch.dtype = torch.bfloat16) -> None:
    """Store a prompt from `first_chunk` on, by a writer on that node."""
    tokens, offset = make_tokens(prompt), first_chunk * CHUNK_SIZE
    rows = {layer: make_rows(tokens, layer, dtype=dtype)[offset:] for layer in layers or (0,)}
    assert DirectCache(node).store(tokens, rows, token_offset=offset).failed == 0


def spread(nodes: Sequence[Node], *layers: int) -> None:
    """Chunks a and b on the first node, c and d on the second, e and f on the third; the directory knows."""
    for node, prompt in zip(nodes, ("ab", "abcd", "abcdef"), strict=True):
        put_part(node, prompt, len(prompt) - 2, *layers)
    nodes[0].controller.hear_all()


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
    "too few rows": (lambda: (range(9), {0: _ROWS}, 0), r"hidden_states of layer 0: got 8 rows, expected 9"),
    "too many rows": (lambda: (range(8), {0: _ROWS}, 1), r"hidden_states of layer 0: got 8 rows, expected 7"),
    "rows at the end": (lambda: (range(8), {0: _ROWS}, 8), r"hidden_states of layer 0: got 8 rows, expected 0"),
    "one layer of two": (
        lambda: (range(8), {0: _ROWS, 3: _ROWS[1:]}, 0),
        r"hidden_states of layer 3: got 7 rows, expected 8",
    ),
    "one dimension": (
        lambda: (range(8), {0: _ROWS[:, 0]}, 0),
        r"hidden_states of layer 0: got shape \[8\], expected 2 dimensions",
    ),
    "three dimensions": (lambda: (range(8), {0: _ROWS[None]}, 0), r"got shape \[1, 8, 8\], expected 2 dimensions"),
    "integers": (
        lambda: (range(8), {0: _ROWS.int()}, 0),
        r"of layer 0\.dtype: got torch\.int32, expected one of",
    ),
    "complex": (lambda: (range(8), {0: _ROWS.to(torch.complex64)}, 0), r"got torch\.complex64, expected one of"),
    "bools": (lambda: (range(8), {0: _ROWS.bool()}, 0), r"got torch\.bool, expected one of"),
    "no dimension": (lambda: (range(8), {0: _ROWS[:, :0]}, 0), r"got hidden_dim 0, expected at least 1"),
    "sparse": (lambda: (range(8), {0: _ROWS.float().to_sparse()}, 0), r"expected a dense one"),
    "meta": (lambda: (range(8), {0: _ROWS.to("meta")}, 0), r"expected a dense one"),
    "a list": (
        lambda: (range(8), {0: _ROWS.tolist()}, 0),
        r"hidden_states of layer 0: got list, expected a torch\.Tensor",
    ),
    "None": (lambda: (range(8), {0: None}, 0), r"hidden_states of layer 0: got NoneType, expected a torch\.Tensor"),
    "NumPy integers": (lambda: (range(8), {0: np.ones((8, 2), int)}, 0), r"got a NumPy array of int64, expected"),
    "no layers": (lambda: (range(8), {}, 0), r"layers: got an empty mapping, expected \{layer_idx: rows\}"),
    "layers is a tensor": (lambda: (range(8), _ROWS, 0), r"layers: got Tensor, expected \{layer_idx: rows\}"),
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
