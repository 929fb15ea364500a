"""Deployments that tests run on Ray Serve, undecorated: an engine that stores rows where it runs, and what calls it."""

import asyncio
import json
import os
from typing import Any

import numpy as np
import ray
from ray import serve
from starlette.requests import Request

import hs_cache
from hs_cache.integrations.serve import Outcome

DIM = 8

PATIENT = {"env_vars": {"RAY_SERVE_QUEUE_LENGTH_RESPONSE_DEADLINE_S": "5"}}
"""For Serve's own router: a replica that doesn't say within 0.1 s how long its queue is counts as away there, and on a
busy machine none does."""


class Engine:
    """Stores a row per token, and says where. Takes `seconds` per request, as one with a queue does."""

    async def __init__(self, service: str, model: str, seconds: float = 0.0) -> None:
        self._connection = {"service": service, "model": model}
        self._caches: dict[str, Any] = {}
        self._seconds = seconds

    async def __call__(self, prompt: dict[str, Any]) -> dict[str, Any]:
        salt = prompt.get("cache_salt", "")
        if salt not in self._caches:
            self._caches[salt] = await hs_cache.aconnect(**self._connection, cache_salt=salt)
        await asyncio.sleep(self._seconds)
        token_ids = prompt.get("token_ids", [])
        if prompt.get("stored", True):
            await self._caches[salt].store(token_ids, {0: np.ones((len(token_ids), DIM), np.float32)})
        return {"node": ray.get_runtime_context().get_node_id(), "pid": os.getpid()}

    async def text(self, text: str) -> dict[str, Any]:
        """What has no tokens."""
        return {"node": ray.get_runtime_context().get_node_id(), "text": text}


class Front:
    """HTTP: a list of prompts, all sent at once, to a list of answers."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    async def __call__(self, request: Request) -> Any:
        if request.method == "GET":
            return self._routed()
        body = json.loads(await request.body())
        if isinstance(body, str):
            return await self._engine.text.remote(body)
        return await asyncio.gather(*(self._engine.remote(prompt) for prompt in body))

    def _routed(self) -> dict[str, int]:
        handle = self._engine._router  # there is none before the first call
        router = handle and handle._asyncio_router.request_router
        return router.statistics().routed if router else dict.fromkeys((outcome.value for outcome in Outcome), 0)


def application(service: str, model: str, seconds: float, config: Any, num_replicas: int = 3) -> serve.Application:
    """One engine per node behind one front."""
    engine = serve.deployment(Engine).options(
        num_replicas=num_replicas,
        max_replicas_per_node=1,
        max_ongoing_requests=8,
        ray_actor_options={"num_cpus": 0.1},
        health_check_period_s=1,
        request_router_config=config,
    )
    front = serve.deployment(Front).options(ray_actor_options={"num_cpus": 0.1})
    return front.bind(engine.bind(service, model, seconds))


def prompt_in_text(text: str) -> dict[str, Any]:
    """For ``prompt_of``: the tokens are the characters."""
    return {"token_ids": list(map(ord, text))}
