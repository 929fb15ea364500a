"""Golden vectors of LMCache's chunk hashes, made by LMCache itself: ``python -m tests.lmcache.golden`` rewrites them.

LMCache takes its hash functions, and what the first chunk is chained to, from vLLM, and falls back to Python's ``hash``
and 0 without saying much where vLLM isn't installed. It isn't here; so its database is given ``sha256_cbor`` as vLLM
defines it (``vllm/utils/hashing.py``: SHA-256 over cbor2's canonical encoding), and a seed's ``NONE_HASH`` as vLLM's
``init_none_hash`` makes it (``vllm/v1/core/kv_cache_utils.py``: the hash function of the text of PYTHONHASHSEED).
"""

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

PATH = Path(__file__).with_name("golden.json")

_CASES: list[dict[str, Any]] = [
    {"tokens": [1, 2, 3, 4, 5, 6, 7, 8, 9], "chunk_size": 4},
    {"tokens": [0, 23, 24, 255, 256, 65_535, 65_536, 2**32 - 1, 2**32, 2**63 - 1], "chunk_size": 3},
    {"tokens": [-1, -2, -24, -25, -256, -257, -65_536, -65_537, -(2**32), -(2**32) - 1, -(2**63)], "chunk_size": 4},
    {"tokens": [7] * 30, "chunk_size": 24},
    {"tokens": [151_643 - i for i in range(300)], "chunk_size": 256},
    {"tokens": [1, 2] + [9] * 21 + [3, 4, 5], "chunk_size": 8, "items": [[2, 21, "3f2a-image"]]},
    {"tokens": list(range(12)), "chunk_size": 4, "items": [[0, 3, "a"], [3, 1, "b"], [9, 40, "é"]]},
]
_SEEDS = (None, "0", "42", "4294967295")


def vectors() -> list[dict[str, Any]]:
    """Every case with every algorithm and seed, and LMCache's hashes of it. Needs lmcache and cbor2."""
    return [
        {"algorithm": algorithm, "seed": seed, "siphash": sys.hash_info.algorithm, **case, "hashes": found}
        for algorithm in ("builtin", "sha256_cbor")
        for seed in _SEEDS
        for case in _CASES
        for found in [hashes(algorithm, seed, **case)]
    ]


def sha256_cbor(value: Any) -> bytes:
    """The hash function of that name in vLLM."""
    import cbor2

    return hashlib.sha256(cbor2.dumps(value, canonical=True)).digest()


def hashes(algorithm: str, seed: str | None, tokens: list[int], chunk_size: int, items: Any = ()) -> list[int]:
    """LMCache's hashes of a prompt with multimodal items ``(start, length, identifier)``."""
    import torch
    from lmcache.integration.vllm.utils import apply_mm_hashes_to_token_ids
    from lmcache.v1 import token_database
    from lmcache.v1.config import LMCacheEngineConfig

    config = LMCacheEngineConfig.from_defaults(chunk_size=chunk_size, save_unfull_chunk=True)
    database = token_database.ChunkedTokenDatabase(config)
    database.hash_func = hash if algorithm == "builtin" else sha256_cbor
    if seed is not None:
        first = _hash_in_a_python_with(seed) if algorithm == "builtin" else sha256_cbor(seed)
        token_database.NONE_HASH = token_database._normalize_hash_to_int(first)
    try:
        positions = [SimpleNamespace(offset=start, length=length) for start, length, _ in items]
        ids = torch.tensor(tokens, dtype=torch.int64)
        apply_mm_hashes_to_token_ids(ids, [identifier for _, _, identifier in items], positions)
        return [hashed for _, _, hashed in database.process_tokens(tokens=ids.tolist(), make_key=False)]
    finally:
        token_database.NONE_HASH = 0


def _hash_in_a_python_with(seed: str) -> int:
    command = [sys.executable, "-c", f"print(hash({seed!r}))"]
    done = subprocess.run(command, env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True)
    return int(done.stdout)


if __name__ == "__main__":
    lines = ",\n".join(json.dumps(vector) for vector in vectors())
    PATH.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
