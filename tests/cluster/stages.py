"""Stages of a pipeline, each in a process of its own: actors around a connector, undecorated."""

import os
import time
from typing import Any

import ray
import torch

from hs_cache.integrations.vllm_omni import HiddenStateCacheConnector


def make_payload(seed: int, num_tokens: int = 512, hidden_dim: int = 256) -> dict[str, Any]:
    """What a thinker hands to a talker; the same in every process."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_tokens, hidden_dim, generator=generator)
    return {
        "embed": {"prefill": hidden, "decode": hidden[-1:], "half": hidden.to(torch.bfloat16)},
        "codes": {"audio": torch.arange(seed, seed + 40).view(4, 10).t()},
        "ids": {"prompt": hidden[:, 0].numpy().copy(), "output": list(range(seed))},
        "meta": {"finished": torch.tensor(True), "text": f"request {seed}", "nothing": None},
    }


def is_payload(data: Any, seed: int, **shape: int) -> bool:
    """Whether `data` is that payload, to the last bit."""
    expected = make_payload(seed, **shape)
    return (
        all(torch.equal(data["embed"][name], rows) for name, rows in expected["embed"].items())
        and torch.equal(data["codes"]["audio"], expected["codes"]["audio"])
        and data["ids"]["prompt"].tobytes() == expected["ids"]["prompt"].tobytes()
        and data["ids"]["output"] == expected["ids"]["output"]
        and bool(data["meta"]["finished"])
        and (data["meta"]["text"], data["meta"]["nothing"]) == (f"request {seed}", None)
    )


class Stage:
    """A connector in a process of its own."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._connector = HiddenStateCacheConnector(config)
        self._held: list[Any] = []

    def where(self) -> tuple[str, int]:
        """Its node and its process id."""
        return str(ray.get_runtime_context().get_node_id()), os.getpid()

    def put(self, key: str, seed: int, **shape: int) -> tuple[bool, int, dict[str, Any] | None]:
        """Put `make_payload`."""
        return self._connector.put("0", "1", key, make_payload(seed, **shape))

    def put_all(self, keys: list[str]) -> int:
        """Put something small under each; how many it took."""
        return sum(self._connector.put("0", "1", key, torch.full((100,), i))[0] for i, key in enumerate(keys))

    def put_data(self, key: str, data: Any) -> tuple[bool, int, dict[str, Any] | None]:
        """Put `data`."""
        return self._connector.put("0", "1", key, data)

    def get(self, key: str, seed: int, metadata: Any = None, wait_s: float = 10.0, **shape: int) -> str:
        """``"right"``, ``"wrong"`` or ``"nothing"``."""
        deadline = time.monotonic() + wait_s
        taken = self._connector.get_with_deadline("0", "1", key, metadata, deadline=deadline)
        if taken is None:
            return "nothing"
        self._held.append(taken[0])
        return "right" if is_payload(taken[0], seed, **shape) else "wrong"

    def get_now(self, key: str) -> Any:
        """What `get` gives, once."""
        return self._connector.get("0", "1", key)

    def holds(self, seed: int, **shape: int) -> bool:
        """Whether the last payload is still right."""
        return is_payload(self._held[-1], seed, **shape)

    def let_go(self) -> None:
        """Of all payloads."""
        self._held.clear()

    def cleanup(self, keys: list[str]) -> int:
        """How many were reclaimed."""
        return sum(bool(self._connector.cleanup(key)) for key in keys)

    def health(self) -> dict[str, Any]:
        """Of its connector."""
        return self._connector.health()

    def close(self) -> None:
        """Its connector."""
        self._connector.close()
