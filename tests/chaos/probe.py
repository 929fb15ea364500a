"""Whether a service is whole: every node stores, and hits what every other node has stored."""

import time
from typing import Any

from hs_cache.errors import ServiceError
from tests.chaos.rows import LAYERS, MAX_TOKENS, find_wrong, make_prompt, make_rows

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
