"""`HiddenStateRef`: rows of a prefix as a small handle, for another stage on any node."""

from collections.abc import Generator, Sequence
from typing import Any

import ray

from hs_cache.config import CacheConfig
from hs_cache.planning import check_seconds
from hs_cache.results import PrefixHit
from hs_cache.retrieval import Ask, Piece
from hs_cache.router import Router
from hs_cache.session import Session


class HiddenStateRef:
    """Refs to the rows of a prefix, as they were when it was made, and the keys under which to look if those are lost.

    Hand it to a task, an actor or a Serve replica on any node; ``ref.get()`` or ``await ref`` gives the rows there.
    They survive the actor that had them. They do not survive the process that made the ref: then, and where it was
    pickled outside of Ray, the prefix is looked up by its keys; what isn't found is a miss. It holds no tokens and no
    salt.

    Attributes:
        num_tokens: how many tokens its rows covered when it was made; 0 for a miss.
        layers: the layers asked for.
    """

    def __init__(self, service: str, config: CacheConfig, ask: Ask, pieces: Sequence[Piece]) -> None:
        self._service = service
        self._config = config
        self._ask = ask
        self._pieces = tuple(pieces)
        self.num_tokens = min(pieces[-1].end, ask.stop) if pieces else 0
        self.layers = ask.layers

    def __reduce__(self) -> Any:
        pieces = self._pieces if _inside_ray() else ()
        return _rebuild, (self._service, self._config, self._ask, pieces, self.num_tokens)

    def __repr__(self) -> str:
        return f"<HiddenStateRef to {self.num_tokens} tokens, layers {self.layers}>"

    def get(self, timeout: float | None = None) -> PrefixHit:
        """The rows. Blocks for them, `timeout` seconds at most per attempt besides the time for copying.

        Args:
            timeout: in seconds; None for the service's ``rpc_timeout_s``.

        Raises:
            InvalidInputError: `timeout` is no number of seconds.
        """
        router, session = self._here()
        return router.run(session.resolve(self._ask, self._pieces, _checked(timeout)))

    async def aget(self, timeout: float | None = None) -> PrefixHit:
        """See `get`."""
        router, session = self._here()
        return await router.arun(session.resolve(self._ask, self._pieces, _checked(timeout)))

    def __await__(self) -> Generator[Any, None, PrefixHit]:
        return self.aget().__await__()

    def _here(self) -> tuple[Router, Session]:
        return Router(self._service), Session.of(self._config)


def _checked(timeout: float | None) -> float | None:
    return None if timeout is None else check_seconds("timeout", timeout)


def _rebuild(service: str, config: CacheConfig, ask: Ask, pieces: tuple[Piece, ...], num_tokens: int) -> HiddenStateRef:
    ref = HiddenStateRef(service, config, ask, pieces)
    ref.num_tokens = num_tokens
    return ref


def _inside_ray() -> bool:
    """Whether Ray itself is pickling, and so keeps track of the refs; elsewhere they would keep nothing alive."""
    if not ray.is_initialized():
        return False
    context = ray._private.worker.global_worker.get_serialization_context()  # type: ignore[no-untyped-call]
    return bool(context.is_in_band_serialization())
