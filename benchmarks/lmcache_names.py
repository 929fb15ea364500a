"""LMCache's chunk hashes of 32,768 tokens: ours beside LMCache's own loop, medians. Needs lmcache and cbor2:
``make test-lmcache`` once, then ``.venv-lmcache/bin/python -m benchmarks.lmcache_names``.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.subject import CHUNK_SIZE, VOCABULARY
from hs_cache.lmcache_names import LMCacheNaming, name_of
from tests.lmcache import golden

TOKENS, REPEATS = 32_768, 101


def median_ms(work: Callable[[], Any]) -> float:
    """Of `REPEATS` runs."""
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e3


def main() -> None:
    """Print a line per algorithm."""
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.token_database import ChunkedTokenDatabase

    ids = np.random.default_rng(0).integers(0, VOCABULARY, TOKENS)
    listed, tensor = ids.tolist(), torch.from_numpy(ids)
    database = ChunkedTokenDatabase(LMCacheEngineConfig.from_defaults(chunk_size=CHUNK_SIZE))
    for algorithm, function in (("builtin", hash), ("sha256_cbor", golden.sha256_cbor)):
        database.hash_func = function
        naming = LMCacheNaming(algorithm)

        def theirs(tokens: Any) -> list[Any]:
            return list(database.process_tokens(tokens=tokens, make_key=False))

        ours = naming.names(b"", ids, (), CHUNK_SIZE)
        assert ours == b"".join(name_of(hashed) for _, _, hashed in theirs(listed))
        for what, tokens, given in (("a list", listed, listed), ("a tensor", tensor, None)):
            took = median_ms(lambda: naming.names(b"", ids, (), CHUNK_SIZE, given))  # noqa: B023  (called at once)
            took_theirs = median_ms(lambda: theirs(tokens))  # noqa: B023
            print(
                f"{algorithm:12} of {what:9} ours {took:5.2f} ms, LMCache's {took_theirs:5.2f} ms: "
                f"{took / took_theirs:.2f}"
            )


if __name__ == "__main__":
    main()
