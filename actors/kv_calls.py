"""Calls of a node's `KVActor` by its `HiddenStateActor`."""

from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, RayError

from hs_cache.errors import ServiceError, ServiceNotRunningError


class RayKVCalls:
    """`hs_cache.kv_link.KVCalls` over Ray.

    Args:
        find: looks the actor up by its name.
    """

    def __init__(self, find: Callable[[], ActorHandle[Any]]) -> None:
        self._find = find
        self._actor = find()

    def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        """See `KVCalls`."""
        try:
            return ray.get(self.send(method, *args), timeout=timeout_s)
        except ActorDiedError as error:
            raise ServiceNotRunningError(f"the KV actor is gone: {_first_line(error)}") from error
        except RayError as error:
            raise ServiceError(f"the KV actor: {type(error).__name__}: {_first_line(error)}") from error

    def send(self, method: str, *args: Any) -> Any:
        """See `KVCalls`."""
        return getattr(self._actor, method).remote(*args)

    def wait(self, sent: Sequence[Any], timeout_s: float) -> bool:
        """See `KVCalls`."""
        _, late = ray.wait(list(sent), num_returns=len(sent), timeout=timeout_s, fetch_local=False)
        return not late

    def renew(self) -> None:
        """See `KVCalls`."""
        self._actor = self._find()


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "")
