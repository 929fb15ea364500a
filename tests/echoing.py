"""A subject for `benchmarks.worker`: ``python -m tests.echoing [fail]``."""

import os
import sys

from benchmarks.subject import RETRIEVE, STORE, MeasurementError, Size, Subject
from benchmarks.worker import serve


class Echo(Subject):
    """Keeps a size, and says what it is told to."""

    def prepare(self, size: Size) -> list[str]:
        self._size = size
        print("what libraries print is no answer")
        return [STORE, RETRIEVE]

    def act(self, step: str) -> str:
        if step not in (STORE, RETRIEVE):
            raise MeasurementError(f"{self._size}: {step}")
        return step

    def pid(self) -> int:
        """Of this process."""
        return os.getpid()

    def exit(self) -> None:
        """End without an answer."""
        print("goodbye", file=sys.stderr, flush=True)
        os._exit(3)


def make() -> Echo:
    """The subject, unless it should fail."""
    if sys.argv[1:] == ["fail"]:
        raise OSError("no memory")
    return Echo()


if __name__ == "__main__":
    serve(make)
