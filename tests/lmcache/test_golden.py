"""The golden vectors are LMCache's own still, and our names are LMCache's for whatever tokens come."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hs_cache.lmcache_names import LMCacheNaming, name_of
from tests.lmcache import engines, golden


def test_the_vectors_are_what_lmcache_computes() -> None:
    assert engines  # imported first: that keeps warnings of lmcache's imports out of the test
    assert golden.vectors() == json.loads(golden.PATH.read_text(encoding="utf-8"))


@pytest.mark.parametrize("algorithm", ["builtin", "sha256_cbor"])
@given(data=st.data())
def test_names_are_lmcaches_for_any_prompt(algorithm: str, data: Any) -> None:
    tokens = data.draw(st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 200_000), max_size=60))
    chunk_size = data.draw(st.integers(1, 30))
    items, start = [], 0
    for gap, length, identifier in data.draw(
        st.lists(st.tuples(st.integers(0, 20), st.integers(1, 30), st.text(max_size=5)), max_size=3)
    ):
        items.append((start + gap, length, identifier))
        start += gap + length
    expected = golden.hashes(algorithm, None, tokens, chunk_size, items)
    named = LMCacheNaming(algorithm).names(b"", np.array(tokens, dtype="<i8"), items, chunk_size)
    assert named == b"".join(map(name_of, expected))
