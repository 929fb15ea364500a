"""One of several client processes: joins the cluster, stores a prompt of its own, and retrieves it over and over.

Started as ``python -m benchmarks.client ADDRESS SERVICE``, to talk to `benchmarks.peers.Worker`.
"""

import logging
import sys
import time

import ray
import torch

import hs_cache
from benchmarks.local import make_rows
from benchmarks.prompts import make_prompt
from benchmarks.subject import Size, check
from benchmarks.worker import serve


class Client:
    """A client of the service, as any process of the cluster has one."""

    def __init__(self, address: str, service: str) -> None:
        torch.set_num_threads(1)  # as Ray sets it in its workers
        ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
        cache = hs_cache.connect(service=service)
        assert cache is not None
        self._cache = cache

    def prepare(self, size: Size, number: int) -> None:
        """Store a prompt that no other process has."""
        self._prompt = make_prompt(size.tokens, torch.Generator().manual_seed(number))
        check(self._cache.store(self._prompt, {0: make_rows(size)[0]}).stored == size.chunks, "not all was stored")

    def loop(self, at: float, seconds: float, reading: bool) -> int:
        """Retrieve from a moment of the monotonic clock on; how many calls ended in so many seconds."""
        while (left_s := at - time.monotonic()) > 0:
            time.sleep(left_s)
        calls = 0
        until = at + seconds
        while True:
            hit = self._cache.retrieve(self._prompt, 0)
            if reading:
                hit[0].view(torch.int64).sum()
            if time.monotonic() > until:
                return calls
            check(hit.num_tokens == len(self._prompt), f"{hit}")
            del hit
            calls += 1

    def close(self) -> None:
        """Leave."""
        self._cache.close()
        ray.shutdown()


if __name__ == "__main__":
    serve(lambda: Client(*sys.argv[1:]))
