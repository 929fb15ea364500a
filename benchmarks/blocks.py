"""What stores of blocks by name have in common: a prompt's rows are one block of bytes per chunk.

Names are made before the clock starts, as these stores know nothing of tokens. Needs NumPy only.
"""

import itertools
from typing import Any

import numpy as np

from benchmarks.subject import RETRIEVE, STORE, Size, Subject, check


class Blocks(Subject):
    """Subclasses put and get `self.names` and the equal pieces of `self.given`."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self.names: list[str] = []

    def prepare(self, size: Size) -> list[str]:
        self.size = size
        self.given = np.random.default_rng(0).integers(0, 256, size.nbytes, dtype=np.uint8)
        self.block_bytes = size.nbytes // size.chunks
        return [STORE, RETRIEVE]

    def begin(self) -> None:
        number = next(self._numbers)
        self.names = [f"{number}-{chunk}" for chunk in range(self.size.chunks)]

    def put(self) -> bool:
        """Put all blocks; whether all were taken."""
        raise NotImplementedError

    def get(self) -> Any:
        """Get all blocks: arrays, None for one that isn't there."""
        raise NotImplementedError

    def act(self, step: str) -> Any:
        return self.put() if step == STORE else self.get()

    def judge(self, step: str, result: Any) -> None:
        if step == STORE:
            check(result, "not all blocks were taken")
        else:
            check(all(block is not None for block in result), "not all blocks are there")
            check(sum(block.nbytes for block in result) == self.size.nbytes, "not all bytes are there")

    def verify(self) -> None:
        found = np.concatenate(self.get())
        check(np.array_equal(found, self.given), "other bytes than were stored")
