"""The code that README shows does what it says, as it stands there."""

import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import hs_cache
from tests.direct import REPOSITORY


def test_the_example(service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", Path(REPOSITORY, "README.md").read_text(), re.DOTALL)
    monkeypatch.setattr(hs_cache, "connect", functools.partial(hs_cache.connect, service=service))
    rows = {0: torch.rand(1024, 16).to(torch.bfloat16), 24: torch.rand(1024, 8)}
    ran: list[dict[str, Any]] = []
    for _ in range(2):
        n = ran[0]["cache"].chunk_size * 2 if ran else 0
        given = {
            "token_ids": range(1024),
            "audio_sha256": "0123",
            "embeddings": rows[0][n:],
            "accept_layer": rows[24][n:],
        }
        ran.append(given)
        exec(code, given)
        hit = given["ref"].get()
        assert all(torch.equal(hit[layer], rows[layer]) for layer in (0, 24))
    assert (ran[0]["n"], ran[1]["n"]) == (0, 2 * ran[0]["cache"].chunk_size), "KV of two chunks was left"
