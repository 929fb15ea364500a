"""Subjects in processes of their own: the driver's side. Each has its own Python and environment."""

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.subject import MeasurementError, Size, Subject

ROOT = Path(__file__).parent.parent
HS_CACHE, BASELINE = "hs_cache", "baseline"
RAY_TENSOR, RAY_BYTES = "Ray, torch tensor", "Ray, NumPy bytes"
LMCACHE, LMCACHE_TUNED, MOONCAKE, REDIS = "LMCache", "LMCache, tuned malloc", "Mooncake", "Redis"

TUNED_MALLOC = {
    # glibc then keeps what was freed, so that a big result doesn't fault its pages in anew each time.
    "MALLOC_MMAP_THRESHOLD_": "4294967296",
    "MALLOC_TRIM_THRESHOLD_": "8589934592",
    "MALLOC_TOP_PAD_": "1",
}
_QUIET_LMCACHE = {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "ERROR", "DO_NOT_TRACK": "1"}

_PATIENCE_S = 180.0
_END_S = 10.0


class Worker(Subject):
    """A process that runs ``python -m module``, which calls `benchmarks.worker.serve`. Ends with this process.

    Raises:
        MeasurementError: it could not be made; says why.
    """

    def __init__(
        self, module: str, arguments: Sequence[str] = (), *, python: str = sys.executable, environ: Mapping[str, str]
    ) -> None:
        self._module = module
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (closed by `close`)
        self._unread = b""
        self._process = subprocess.Popen(
            [python, "-m", module, *arguments],
            cwd=ROOT,
            env={**os.environ, **environ},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )
        try:
            self.receive()
        except BaseException:
            self.kill()
            raise

    def send(self, do: str, **arguments: Any) -> None:
        """Have it do something; `receive` gives what comes of it."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise MeasurementError(f"{self._module} has ended: {self._last_words()}") from None

    def receive(self) -> Any:
        """What came of the oldest `send` that wasn't received."""
        assert self._process.stdout is not None
        until = time.monotonic() + _PATIENCE_S
        while b"\n" not in self._unread:
            left_s = until - time.monotonic()
            if left_s <= 0 or not select.select([self._process.stdout], [], [], left_s)[0]:
                self._process.kill()  # a late answer would be taken for that to the next question
                raise MeasurementError(f"{self._module} says nothing for {_PATIENCE_S:.0f} s")
            read = os.read(self._process.stdout.fileno(), 1 << 16)
            if not read:
                raise MeasurementError(f"{self._module} has ended: {self._last_words()}")
            self._unread += read
        line, _, self._unread = self._unread.partition(b"\n")
        said = json.loads(line)
        if "error" in said:
            raise MeasurementError(said["error"])
        return said["value"]

    def ask(self, do: str, **arguments: Any) -> Any:
        """`send` and `receive`."""
        self.send(do, **arguments)
        return self.receive()

    def prepare(self, size: Size) -> list[str]:
        return list(self.ask("prepare", size=asdict(size)))

    def begin(self) -> None:
        self.ask("begin")

    def wake(self) -> None:
        self.ask("wake")

    def time(self, step: str) -> float:
        return float(self.ask("time", step=step))

    def verify(self) -> None:
        self.ask("verify")

    def finish(self) -> None:
        self.ask("finish")

    def bytes_per_token(self) -> float | None:
        kept = self.ask("bytes_per_token")
        return None if kept is None else float(kept)

    def close(self) -> None:
        """End it, at once if it doesn't by itself."""
        assert self._process.stdin is not None
        try:
            with contextlib.suppress(BrokenPipeError, subprocess.TimeoutExpired):
                self._process.stdin.close()
                self._process.wait(timeout=_END_S)
        finally:
            self.kill()

    def kill(self) -> None:
        """End it at once; again is harmless."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()

    def _last_words(self) -> str:
        self._process.kill()
        self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"exit code {self._process.returncode}"


@dataclass(frozen=True)
class Peer:
    """How a peer's worker is started.

    Attributes:
        environment: the folder of its Python environment, beside the project's.
        target: what ``make`` builds that with.
        environ: variables added to this process's own.
        one_layer_of: the one hidden size at which it is measured, with one layer; None where it is at all sizes.
    """

    module: str
    environment: str
    target: str
    environ: Mapping[str, str] = field(default_factory=dict)
    one_layer_of: int | None = None

    def takes(self, size: Size) -> bool:
        """Whether it is measured at a size."""
        return self.one_layer_of is None or (size.layers == 1 and size.hidden == self.one_layer_of)

    def start(self, *arguments: str) -> Worker:
        """Start its worker.

        Raises:
            MeasurementError: it isn't installed, or doesn't start; says why.
        """
        python = ROOT / self.environment / "bin" / "python"
        if not python.exists():
            raise MeasurementError(f"{self.environment} is not there (make {self.target})")
        libraries = [str(path) for path in (ROOT / self.environment).glob("lib/python3*/site-packages/nvidia/*/lib")]
        paths = [*libraries, *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
        environ = {**self.environ, **({"LD_LIBRARY_PATH": os.pathsep.join(paths)} if libraries else {})}
        return Worker(self.module, arguments, python=str(python), environ=environ)


PEERS = {
    LMCACHE: Peer("benchmarks.peer_lmcache", ".venv-lmcache", ".venv-lmcache/.ready", _QUIET_LMCACHE),
    LMCACHE_TUNED: Peer(
        "benchmarks.peer_lmcache", ".venv-lmcache", ".venv-lmcache/.ready", {**_QUIET_LMCACHE, **TUNED_MALLOC}
    ),
    MOONCAKE: Peer("benchmarks.peer_mooncake", ".venv-peers", ".venv-peers/.ready", one_layer_of=2048),
    REDIS: Peer("benchmarks.peer_redis", ".venv-peers", ".venv-peers/.ready", one_layer_of=2048),
}
