"""The pipeline's settings: ``args`` in serve_config.yaml."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class PipelineSettings(BaseModel):
    """What all deployments are told.

    Attributes:
        service: name of the cache service.
        cache: its settings, where a replica has to start it.
        dtype, small: of the model; see `qwen3_omni.tiny_model.build_model`.
        kv_mib: KV that each node's holder keeps at most.
        fetch_kv: take KV from other nodes' holders where they have more, instead of computing it again.
        affine: send turns to the thinker that has their prefix; False leaves the choice to Serve.
        router: settings of `hs_cache.integrations.serve.PrefixAffinityRouter` besides the key space and layers.
        system_prompt: begins every conversation.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    service: str = "default"
    cache: dict[str, Any] = {"chunk_size": 64, "max_hidden_state_cpu_size": 0.25}
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    small: bool = True
    kv_mib: int = Field(256, gt=0)
    fetch_kv: bool = True
    affine: bool = True
    router: dict[str, Any] = {"reply_tokens": 128}
    system_prompt: str = "You talk with people. Answer in the language that you are spoken to in, and be brief."

    @property
    def model(self) -> str:
        """Under which the cache knows these weights: prefixes of others are other prefixes."""
        return f"qwen3-omni-tiny{'-small' if self.small else ''}-{self.dtype}"

    @property
    def key_space(self) -> dict[str, str]:
        """Where thinkers keep rows, and where the router looks for them: for `hs_cache.connect` and `router_config`."""
        return {"service": self.service, "model": self.model}

    @property
    def kv_bytes(self) -> int:
        """KV that each node's holder keeps at most."""
        return self.kv_mib << 20
