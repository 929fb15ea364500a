"""Whether a service is whole: every node stores, and hits what every other node has stored."""

import gc
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from hs_cache.errors import ServiceError, StaleRevisionError
from tests.chaos.rows import LAYERS, MAX_TOKENS, WEIGHTS, find_wrong, make_prompt, make_rows, revision_number

_SPACE = 9
_PATIENCE_S = 20.0


def probe(cache: Any, number: int, nodes: int) -> list[str]:
    """A task, on every node at once: store prompt `number`, and hit those of all `nodes`. Returns what is wrong."""
    prompt = make_prompt(4 * number, MAX_TOKENS)
    rows = {layer: make_rows(prompt, layer, _SPACE, number) for layer in LAYERS}
    until = time.monotonic() + _PATIENCE_S
    found: list[str] = []
    stored = None
    while stored is None:
        try:
            stored = cache.store(prompt, rows)
        except ServiceError as error:
            if time.monotonic() > until:
                return [f"node {number} can't store: {error}"]
    if stored.prefix_tokens != MAX_TOKENS:
        found.append(f"node {number} stored {stored}")
    for other in range(nodes):
        prompt = make_prompt(4 * other, MAX_TOKENS)
        hit = cache.retrieve(prompt, list(LAYERS), wait_s=_PATIENCE_S)
        if hit.num_tokens != MAX_TOKENS:
            found.append(f"node {number} hit {hit.num_tokens} tokens of what node {other} stored: {hit.ended_by}")
        found += [wrong for layer in hit if (wrong := find_wrong(hit[layer], prompt, layer, _SPACE))]
    return found


def probe_old_weights(old: Any, current: Any) -> list[str]:
    """A task: what `old` has computed is not taken, what `current` has is. Returns what is wrong."""
    prompt, found = make_prompt(0, MAX_TOKENS), []
    revision = revision_number(current.key_space.model_revision)
    rows = {layer: make_rows(prompt, layer, WEIGHTS, 0) for layer in LAYERS}
    with suppress(StaleRevisionError):
        found.append(f"rows of old weights were stored: {_patiently(old.store, prompt, rows)}")
    if hit := _patiently(old.retrieve, prompt, list(LAYERS)):
        found.append(f"rows of old weights were got: {hit}")
    rows = {layer: make_rows(prompt, layer, WEIGHTS, 0, revision=revision) for layer in LAYERS}
    stored = _patiently(current.store, prompt, rows)
    if stored.prefix_tokens != MAX_TOKENS:
        found.append(f"rows of current weights were not stored: {stored}")
    hit = _patiently(current.retrieve, prompt, list(LAYERS))
    wrong = [find_wrong(hit[layer], prompt, layer, WEIGHTS, revision=revision) for layer in hit]
    del hit
    gc.collect()  # Ray's error and its cause refer to each other, and to this frame
    return found + [each for each in wrong if each]


def _patiently(call: Callable[..., Any], *args: Any) -> Any:
    """The result of a call, where trouble with the service should soon be over."""
    until = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return call(*args)
        except StaleRevisionError:
            raise
        except ServiceError:
            if time.monotonic() > until:
                raise
