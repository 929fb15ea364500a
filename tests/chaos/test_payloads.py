"""The judge of payloads: right ones pass, and each kind of wrong one is told."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hs_cache.payloads import pack, unpack
from tests.chaos.payloads import find_wrong_payload, is_scribbled, make_payload, scribble


def payload(number: int = 7, *, key: str = "k3", nbytes: int = 50_000) -> dict[str, Any]:
    return make_payload("1", key, "client-5/1", number, nbytes)


@pytest.mark.parametrize("nbytes", [0, 1000, 50_000])
def test_right_payloads(nbytes: int) -> None:
    assert find_wrong_payload(payload(nbytes=nbytes), "1", "k3") == ""
    packed = pack(payload(nbytes=nbytes))
    memory = np.zeros(packed.nbytes + 64, np.uint8)
    memory = memory[-memory.ctypes.data % 64 :][: packed.nbytes]
    packed.write(memory)
    arrived = unpack(memory)
    assert find_wrong_payload(arrived, "1", "k3") == ""
    scribble(arrived)
    assert is_scribbled(arrived)
    arrived["more"][0]["head"][0, 0] = 4
    assert not is_scribbled(arrived)


def changed(change: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    made = payload()
    change(made)
    return made


WRONG: dict[str, Callable[[], Any]] = {
    "nothing": lambda: None,
    "something else": lambda: {"key": "k3"},
    "of another key": lambda: payload(key="k4"),
    "said to be of this key": lambda: payload(key="k4") | {"key": "k3"},
    "of another route": lambda: make_payload("2", "k3", "client-5/1", 7, 50_000),
    "overwritten by its producer": lambda: changed(scribble),
    "half of another one": lambda: changed(lambda made: made["rows"][50:].copy_(payload(6)["rows"][50:])),
    "with another's codes": lambda: payload() | {"codes": payload(6)["codes"]},
    "with one byte changed": lambda: changed(lambda made: made["codes"].view(np.uint8).__setitem__(9999, 0x55)),
    "zeros at its end": lambda: changed(lambda made: made["more"][1][:, -1].fill_(0)),
    "of another size": lambda: payload() | {"rows": payload(nbytes=60_000)["rows"]},
    "its shared part is another's": lambda: payload() | {"more": [payload(6)["more"][0], payload()["more"][1]]},
}


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_payloads(kind: str) -> None:
    assert find_wrong_payload(WRONG[kind](), "1", "k3")
