"""What the deployments send each other: metadata, and references to rows."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
import ray
from numpy.typing import NDArray
from qwen3_omni.messages import Rows
from ray import serve

from hs_cache import HiddenStateRef


@dataclass(frozen=True)
class Whereabouts:
    """A replica: Ray's hex id of its node, its name, and its process."""

    node: str
    replica: str
    pid: int

    @classmethod
    def here(cls) -> Whereabouts:
        """Of the replica that calls this."""
        replica = serve.get_replica_context().replica_id.unique_id
        return cls(str(ray.get_runtime_context().get_node_id()), replica, os.getpid())


@dataclass(frozen=True)
class ThinkRequest:
    """From the ingress to a thinker. The router finds ``token_ids`` and ``mm_spans`` by their names.

    Attributes:
        token_ids, mm_spans: the conversation so far, as the cache takes it.
        mel: features of the clip, float32 [mel bins, frames].
        max_new_tokens: exactly as many are generated.
        use_cache: False restores and stores nothing, for comparison.
    """

    token_ids: tuple[int, ...]
    mm_spans: tuple[tuple[int, int, str], ...]
    mel: NDArray[np.float32] | None
    max_new_tokens: int
    use_cache: bool = True


@dataclass(frozen=True)
class Thought:
    """The thinker's last message, after its tokens.

    Attributes:
        reply: all tokens.
        restored_tokens: tokens of the prompt that were not prefilled.
        moved_tokens: those of them whose KV came from another node.
        prefix: rows of those that were restored, wherever they are; None where none were restored.
        suffix: to `Rows` of the others and of the reply but its last token.
        who: the replica that thought.
    """

    reply: tuple[int, ...]
    restored_tokens: int
    moved_tokens: int
    prefix: HiddenStateRef | None
    suffix: ray.ObjectRef[Rows]
    who: Whereabouts


@dataclass(frozen=True)
class SpeakRequest:
    """From the ingress to a talker.

    Attributes:
        token_ids: the prompt.
        thought: what the thinker made of it.
        max_new_codes: exactly as many steps are spoken, 1 or more.
    """

    token_ids: tuple[int, ...]
    thought: Thought
    max_new_codes: int


@dataclass(frozen=True)
class Speech:
    """The talker's last message, after its codes.

    Attributes:
        waveform: float32 [samples].
        row_digests: layer index to SHA-256 over every thinker row that the talker was given.
        who: the replica that spoke.
    """

    waveform: NDArray[np.float32]
    row_digests: dict[int, str]
    who: Whereabouts


class RowsLostError(Exception):
    """Rows that a thinker referred to are gone: the turn has to be thought again."""
