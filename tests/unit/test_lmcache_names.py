import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hs_cache.config import CacheConfig
from hs_cache.errors import InvalidInputError
from hs_cache.keys import KeySpace, TokenDatabase
from hs_cache.kv_names import kv_naming
from hs_cache.lmcache_names import LMCacheNaming, _cbor_head, _cbor_ints, _hash_of_seed, chunk_hash, name_of

# Made by lmcache 0.5.6: tests/lmcache/golden.py says how.
GOLDEN = json.loads((Path(__file__).parents[1] / "lmcache" / "golden.json").read_text(encoding="utf-8"))

INT64 = st.one_of(
    st.integers(-(2**63), 2**63 - 1),
    st.sampled_from([0, 23, 24, 255, 256, 65_535, 65_536, 2**32 - 1, 2**32]).flatmap(
        lambda n: st.sampled_from([n, ~n])
    ),
)


def names(naming: LMCacheNaming, tokens: Any, chunk_size: int = 4, known: bytes = b"", items: Any = ()) -> bytes:
    ids = np.asarray(tokens, dtype="<i8")
    found = naming.names(known, ids, items, chunk_size)
    for listed in (ids.tolist(), list(ids), [*ids.tolist(), 1, 2]):
        assert naming.names(known, ids, items, chunk_size, listed) == found
    return found


@pytest.mark.parametrize("vector", GOLDEN, ids=lambda v: f"{v['algorithm']}-{v['seed']}-{v['tokens'][0]}")
def test_names_are_lmcaches_hashes(vector: dict[str, Any]) -> None:
    if vector["algorithm"] == "builtin" and vector["seed"] and vector["siphash"] != sys.hash_info.algorithm:
        pytest.skip(f"made by a Python with {vector['siphash']}")
    naming = LMCacheNaming(vector["algorithm"], vector["seed"])
    items = [tuple(item) for item in vector.get("items", ())]
    assert names(naming, vector["tokens"], vector["chunk_size"], items=items) == b"".join(
        map(name_of, vector["hashes"])
    )


@pytest.mark.parametrize("algorithm", ["builtin", "sha256_cbor"])
@given(tokens=st.lists(INT64, max_size=40), size=st.integers(1, 9), cut=st.integers(0, 9))
def test_a_chain_goes_on_from_any_chunk(algorithm: str, tokens: list[int], size: int, cut: int) -> None:
    naming = LMCacheNaming(algorithm, "7")
    items = [(2, 5, "x"), (9, 3, 17), (20, 60, b"z")]
    whole = names(naming, tokens, size, items=items)
    at = min(cut * size, len(tokens) // size * size)
    head = names(naming, tokens[:at], size, items=items)
    assert head + names(naming, tokens[at:], size, head, items) == whole
    assert len(whole) == -(-len(tokens) // size) * 16


@given(values=st.lists(INT64, min_size=1, max_size=50))
def test_cbor_of_integers_one_by_one(values: list[int]) -> None:
    """RFC 8949: major type 0 holds n, major type 1 holds -1 - n, each with the shortest head."""
    body, sizes = _cbor_ints(np.array(values, dtype=np.int64))
    expected = [_cbor_head(0, value) if value >= 0 else _cbor_head(1, -1 - value) for value in values]
    assert bytes(body) == b"".join(expected)
    assert sizes.tolist() == [len(one) for one in expected]


@pytest.mark.parametrize(
    ("value", "encoded"),
    # RFC 8949, appendix A.
    [
        (0, "00"),
        (23, "17"),
        (24, "1818"),
        (1000, "1903e8"),
        (1_000_000, "1a000f4240"),
        (1_000_000_000_000, "1b000000e8d4a51000"),
        (18_446_744_073_709_551_615, "1bffffffffffffffff"),
    ],
)
def test_cbor_examples_of_the_standard(value: int, encoded: str) -> None:
    assert _cbor_head(0, value).hex() == encoded


@pytest.mark.parametrize("seed", ["0", "1", "42", "123456789", "4294967295"])
def test_the_hash_of_a_seed_is_that_of_a_python_started_with_it(seed: str) -> None:
    command = [sys.executable, "-c", f"print(hash({seed!r}))"]
    done = subprocess.run(command, env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True)
    assert _hash_of_seed(seed) == int(done.stdout)


@pytest.mark.parametrize("hashed", [0, 1, -1, -2, 2**63 - 1, -(2**63)])
def test_a_name_gives_its_hash_back(hashed: int) -> None:
    assert len(name_of(hashed)) == 16
    assert chunk_hash(name_of(hashed), signed=True) == hashed
    assert chunk_hash(name_of(hashed), signed=False) == hashed % 2**64


def test_items_count_with_what_they_are_where_they_are() -> None:
    naming = LMCacheNaming("sha256_cbor")
    plain = names(naming, [5] * 12)
    one = names(naming, [5] * 12, items=[(6, 3, "a")])
    assert one[:16] == plain[:16]
    assert one[16:32] != plain[16:32]
    assert len({one, plain, *(names(naming, [5] * 12, items=[item]) for item in [(6, 3, "b"), (6, 2, "a")])}) == 4
    # Whatever stands there instead of the item's tokens makes no difference to LMCache.
    assert names(naming, [5] * 6 + [1, 2, 3] + [5] * 3, items=[(6, 3, "a")]) == one


def test_the_old_name_of_an_algorithm_is_the_same_one() -> None:
    assert names(LMCacheNaming("sha256_cbor_64bit", "1"), range(9)) == names(
        LMCacheNaming("sha256_cbor", "1"), range(9)
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("md5",), "algorithm: got 'md5'"),
        (("sha256_cbor", 0), "seed: got int"),
        (("builtin", "random"), "seed: got 'random'"),
        (("builtin", str(2**32)), "seed: got '4294967296'"),
    ],
)
def test_wrong_arguments_are_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        LMCacheNaming(*arguments)


def test_a_service_that_asks_lmcache_has_clients_name_chunks_for_it() -> None:
    space = KeySpace(model="m", chunk_size=4, kv_tags=(("user", "u"),))
    assert kv_naming(CacheConfig(), space) is None
    config = CacheConfig(kv_source="lmcache", pre_caching_hash_algorithm="sha256_cbor", kv_hash_seed="3")
    database = TokenDatabase(space, kv_naming=kv_naming(config, space))
    keys = database.extend_keys(database.chunk_keys(range(4)), range(4, 12))
    assert keys.kv is not None
    assert keys.kv.blob == names(LMCacheNaming("sha256_cbor", "3"), range(12))
    assert keys.kv.tags == (("user", "u"),)
