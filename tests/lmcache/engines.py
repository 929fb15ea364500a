"""Real LMCache engines on the CPU: builders that the tests share. Imports lmcache."""

import warnings
from collections.abc import Sequence
from typing import Any

import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # those of the packages that lmcache uses are no concern of ours
    from lmcache.v1.cache_engine import LMCacheEngineBuilder
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.gpu_connector.mock_gpu_connector import MockGPUConnector
    from lmcache.v1.metadata import LMCacheMetadata

from tests.builders import CHUNK_SIZE

NUM_LAYERS = 2
MODEL = "model-of-the-engine"


def make_engine(
    instance: str,
    *,
    post_init: bool = True,
    rank: int = 0,
    world_size: int = 1,
    use_mla: bool = False,
    chunk_size: int = CHUNK_SIZE,
    model: str = MODEL,
    **config: Any,
) -> Any:
    """An ``LMCacheEngine`` with tiny KV. `config` goes to its configuration; the instance's name is its id too."""
    kv_shape = (NUM_LAYERS, 1 if use_mla else 2, chunk_size, 1, 8)
    defaults = {
        "chunk_size": chunk_size,
        "local_cpu": True,
        "max_local_cpu_size": 0.02,
        "enable_hidden_state_cache": True,
        "max_hidden_state_cpu_size": 0.01,
        "lmcache_instance_id": instance,
    }
    metadata = LMCacheMetadata(
        model_name=model,
        world_size=world_size,
        local_world_size=world_size,
        worker_id=rank,
        local_worker_id=rank,
        kv_dtype=torch.bfloat16,
        kv_shape=kv_shape,
        use_mla=use_mla,
        role="worker",
        chunk_size=chunk_size,
    )
    engine = LMCacheEngineBuilder.get_or_create(
        instance,
        LMCacheEngineConfig.from_defaults(**{**defaults, **config}),
        metadata,
        MockGPUConnector(kv_shape),
        lambda tensor, source: None,
        lambda value, source: value,
    )
    if post_init:
        engine.post_init()
    return engine


def close(instance: str) -> None:
    """Close an engine; again is harmless."""
    LMCacheEngineBuilder.destroy(instance)


def kv_keys(engine: Any, tokens: Sequence[int], tags: dict[str, str] | None = None) -> list[Any]:
    """LMCache's keys of a prompt's chunks."""
    configs = {f"lmcache.tag.{name}": value for name, value in (tags or {}).items()} or None
    found = engine.token_database.process_tokens(tokens=list(tokens), request_configs=configs)
    return [key for _, _, key in found]


def put_kv(engine: Any, tokens: Sequence[int], tags: dict[str, str] | None = None) -> list[Any]:
    """Put KV of every chunk of a prompt into the engine's storage, as a forward pass would. Returns their keys."""
    manager = engine.storage_manager
    keys, objects = [], []
    for key in kv_keys(engine, tokens, tags):
        for one in key.split_layers(engine.num_layers) if engine.use_layerwise else [key]:
            shapes = engine.metadata.get_shapes(engine.config.chunk_size)
            allocated = manager.allocate(shapes, engine.metadata.get_dtypes(), busy_loop=False)
            assert allocated is not None, "the KV pool of the test is too small"
            keys.append(one)
            objects.append(allocated)
    manager.batched_put(keys, objects)
    return keys
