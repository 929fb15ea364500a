"""What answers prompts: the interface, and how a class of one's own is named on the command line."""

from __future__ import annotations

import importlib
import operator
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from hs_cache import HiddenStateCache

from .prompts import Prompt


class AnswerError(ValueError):
    """A model has no answer to a prompt, or none that can be kept; the message says why."""


@dataclass(frozen=True)
class Answer:
    """What a model makes of one prompt. Integers may be of any kind, such as NumPy's; they become Python's.

    Attributes:
        reply: the generated text.
        reply_token_ids: its tokens.
        prompt_tokens: length of the prompt.
        skipped_tokens: those whose KV was restored and whose hidden states came from the cache.
        embedding: float32 ``[hidden_dim]``, made from the hidden states of *all* tokens of the prompt.
    """

    reply: str
    reply_token_ids: tuple[int, ...]
    prompt_tokens: int
    skipped_tokens: int
    embedding: NDArray[np.float32]

    def __post_init__(self) -> None:
        if not isinstance(self.reply, str):
            raise AnswerError(f"reply: got {type(self.reply).__name__}, expected a string")
        for name in ("prompt_tokens", "skipped_tokens"):
            object.__setattr__(self, name, _integers(name, [getattr(self, name)])[0])
        object.__setattr__(self, "reply_token_ids", _integers("reply_token_ids", self.reply_token_ids))
        if not isinstance(self.embedding, np.ndarray) or self.embedding.dtype != np.float32 or self.embedding.ndim != 1:
            shown = getattr(self.embedding, "dtype", type(self.embedding).__name__)
            shape = list(getattr(self.embedding, "shape", []))
            raise AnswerError(f"embedding: got {shown} {shape}, expected a NumPy array, float32 [hidden_dim]")


def _integers(name: str, values: Any) -> tuple[int, ...]:
    try:
        return tuple(map(operator.index, values))
    except TypeError as error:
        raise AnswerError(f"{name}: {error}") from error


class Model(Protocol):
    """A class with these names can be given as ``--model MODULE:CLASS``. One is made per worker, in its process.

    The two attributes are read by the driver, from the class. They say which rows of the cache and which results are of
    the same weights and the same computation, so whatever changes a number must change ``revision``.
    """

    model: str
    revision: str

    def __init__(self, cache: HiddenStateCache | None, chunk_size: int) -> None:
        """Load the weights.

        Args:
            cache: a client of the service, for this model, revision and worker; None for a run without.
            chunk_size: tokens of a chunk, also without a cache.
        """

    def answer(self, prompt: Prompt, reply_tokens: int) -> Answer:
        """Answer a prompt. What this raises counts as a failed attempt at that prompt.

        Args:
            prompt: the conversation.
            reply_tokens: how many tokens to generate.
        """


def load_model(name: str) -> type[Model]:
    """The class that ``MODULE:CLASS`` names.

    Raises:
        ValueError: there is none, or it lacks something.
    """
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise ValueError(f"--model: got {name!r}, expected MODULE:CLASS, as in batch.tiny_thinker:TinyThinker")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"--model: {name!r} can't be imported: {error}") from error
    for what in ("model", "revision"):
        value = getattr(found, what, None)
        if not isinstance(value, str) or not value:
            raise ValueError(f"--model: {what} of {name} is {value!r}, expected a string that is not empty")
    if not isinstance(found, type) or not callable(getattr(found, "answer", None)):
        raise ValueError(f"--model: {name} is no class with a method 'answer'")
    return cast("type[Model]", found)
