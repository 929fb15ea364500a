"""The request trace that benchmarks/replay.py replays: which blocks each prompt consists of."""

import json
import lzma
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

TRACE = Path(__file__).with_name("data") / "conversation_trace.jsonl.xz"
"""Where it comes from: see the README beside it."""

BLOCK_TOKENS = 512
"""Tokens per block. A prompt's last block, most often a shorter one, counts as a whole block everywhere here."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Prompts in order of arrival, each as its blocks; a block's id names it and everything before it."""

    requests: tuple[tuple[int, ...], ...]

    @property
    def num_blocks(self) -> int:
        """Blocks asked for by all requests together."""
        return sum(map(len, self.requests))

    @property
    def unique_blocks(self) -> int:
        """The working set: how many different blocks there are."""
        return len({block for request in self.requests for block in request})


def load(limit: int | None = None) -> Trace:
    """The trace, or its first `limit` requests.

    Raises:
        ValueError: an id follows different ids in two requests, so that it can't name a whole prefix.
    """
    with lzma.open(TRACE, "rt", encoding="ascii") as lines:
        requests = tuple(tuple(json.loads(line)["hash_ids"]) for line in islice(lines, limit))
    before: dict[int, int | None] = {}
    for request in requests:
        for parent, block in zip((None, *request), request, strict=False):
            if before.setdefault(block, parent) != parent:
                raise ValueError(f"hash_ids: {block} follows {parent} and {before[block]}, expected one of them only")
    return Trace(requests)
