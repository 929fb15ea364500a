"""What a cache operation asks of the outside world.

An operation is a generator that yields these and gets back what they result in. The same generator is driven by the
blocking client, by the asyncio client, and in tests by plain function calls; none of its logic exists twice.
"""

import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

T = TypeVar("T")


class Peer(Protocol):
    """An actor of the service, as an address for `Call`."""

    @property
    def node_id(self) -> str:
        """The node it runs on, as Ray's hex id."""
        ...

    def post(self, method: str, *args: Any) -> None:
        """Call a method without waiting for it; `ServiceError` when the call can't even be sent."""
        ...


@dataclass(frozen=True, slots=True)
class Located:
    """The node that serves this client: its hidden-state actor, its KV actor, and the node the client itself is on."""

    peer: Peer
    kv: Peer
    client_node_id: str


@dataclass(frozen=True, slots=True)
class Locate:
    """Decide which node serves this client; results in `Located`, or raises `ServiceError`."""


@dataclass(frozen=True, slots=True)
class Call:
    """Call an actor; results in what it returns, raises what it raised, or `ServiceError` within `timeout_s`."""

    peer: Peer
    method: str
    args: tuple[Any, ...]
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Fetch:
    """Get the object behind a ref that a `Call` resulted in; raises as `Call` does."""

    ref: Any
    timeout_s: float


class Work:
    """Copying that may take long; results in None. The asyncio client runs it on a thread, where it can't be
    interrupted.

    So memory that it reads or writes must not be given up while it runs: see `abandon`.
    """

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function
        self._lock = threading.Lock()
        self._state = "new"
        self._then: Callable[[], None] | None = None

    def run(self) -> None:
        """Run it in the calling thread, unless it was abandoned before."""
        with self._lock:
            if self._state == "abandoned":
                return
            self._state = "running"
        try:
            self._function()
        finally:
            with self._lock:
                self._state, then = "done", self._then
            if then is not None:
                then()

    def abandon(self, then: Callable[[], None]) -> None:
        """Call `then` as soon as this work surely touches nothing any more: now, or when the running copy ends."""
        with self._lock:
            if self._state == "running":
                self._then = then
                return
            self._state = "abandoned"
        then()


Effect: TypeAlias = Locate | Call | Fetch | Work
Steps: TypeAlias = Generator[Effect, Any, T]
"""An operation that results in a T."""
