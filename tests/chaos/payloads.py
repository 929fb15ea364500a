"""Payloads that say what they are: under which key, by whom, which of his; and every byte follows from that."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

KEYS = 6
ROUTES = ("1", "2")
"""Stages that payloads go to, all from stage 0. With the keys they make the names under which everybody puts."""

FROM_STAGE = "0"
_WIDTH = 64
_ALIGNED = 4 * _WIDTH
_SCRIBBLE = 3


@dataclass(frozen=True)
class Envelope:
    """What the producer of a payload passes on.

    Attributes:
        metadata: what `put` returned.
        replaced: numbers of this producer's payloads that this one has surely replaced.
    """

    to_stage: str
    key: str
    metadata: dict[str, Any] = field(compare=False)
    producer: str
    number: int
    replaced: frozenset[int]

    def is_out_of_date(self, data: dict[str, Any]) -> bool:
        """Whether this is a payload that was replaced before the envelope was written."""
        return data["producer"] == self.producer and data["number"] in self.replaced


def make_payload(to_stage: str, key: str, producer: str, number: int, nbytes: int) -> dict[str, Any]:
    """Payload `number` of `producer`, with tensors of some `nbytes` in all: of several dtypes, two that share memory,
    one that is not contiguous."""
    size = max(nbytes // 3 // _ALIGNED, 1) * _ALIGNED
    seed = [*f"{to_stage}/{key}/{producer}/{number}/{nbytes}".encode()]
    raw = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, 3 * size, dtype=np.uint8))
    rows = raw[:size].clone().view(torch.bfloat16).view(-1, _WIDTH)
    return {
        "to_stage": to_stage,
        "key": key,
        "producer": producer,
        "number": number,
        "nbytes": nbytes,
        "rows": rows,
        "more": [{"head": rows[: len(rows) // 2]}, raw[size : 2 * size].clone().view(torch.float32).view(_WIDTH, -1).T],
        "codes": raw[2 * size :].numpy().copy().view(np.int32),
    }


def find_wrong_payload(data: Any, to_stage: str, key: str) -> str:
    """What is wrong with what was got under this key, in words; "" when it is one whole payload that was put there."""
    try:
        said = {name: data[name] for name in ("to_stage", "key", "producer", "number", "nbytes")}
        given = _bits(data)
        expected = _bits(make_payload(**said))
    except (TypeError, KeyError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        return f"what was got under {key} is no payload: {type(error).__name__}: {error}"
    if (said["to_stage"], said["key"]) != (to_stage, key):
        return f"got {said} under {key} to stage {to_stage}"
    for (what, got), (_, wanted) in zip(given, expected, strict=True):
        if got.shape != wanted.shape:
            return f"{what} of {said}: got shape {got.shape}, expected {wanted.shape}"
        if len(wrong := np.flatnonzero(got != wanted)):
            return f"{what} of {said}: {len(wrong)} of {got.size} numbers are wrong, the first is at {wrong[0]}"
    return ""


def scribble(data: dict[str, Any]) -> None:
    """Write over all tensors of a payload."""
    data["rows"].fill_(_SCRIBBLE)
    data["more"][1].fill_(_SCRIBBLE)
    data["codes"].fill(_SCRIBBLE)


def is_scribbled(data: dict[str, Any]) -> bool:
    """Whether all of it is as `scribble` left it."""
    tensors = (data["rows"], data["more"][0]["head"], data["more"][1])
    return all(bool((each == _SCRIBBLE).all()) for each in tensors) and bool((data["codes"] == _SCRIBBLE).all())


def _bits(data: dict[str, Any]) -> list[tuple[str, np.ndarray]]:
    rows, (inner, turned), codes = data["rows"], data["more"], data["codes"]
    return [
        ("rows", rows.view(torch.int16).numpy()),
        ("head", inner["head"].view(torch.int16).numpy()),
        ("turned", turned.contiguous().view(torch.int32).numpy()),
        ("codes", codes),
    ]
