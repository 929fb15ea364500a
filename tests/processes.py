"""Processes that tests start, find and end: plain functions, no fixtures. Each is ended by its pid, never by a name."""

import contextlib
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).parent.parent

MARK = "TEST_RUN_ID"
"""An environment variable whose value tells the processes of one test run, and all that they start, from others."""

_PROC = Path("/proc")
_POLL_S = 0.02


def wait_until(condition: Callable[[], Any], what: str, *, timeout_s: float = 30.0, poll_s: float = _POLL_S) -> Any:
    """Poll until `condition` gives something true, and return that; `AssertionError` after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not (result := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"after {timeout_s:.0f} s still not: {what}")
        time.sleep(poll_s)
    return result


def kill(pid: int) -> None:
    """SIGKILL one process, and wait until it is gone or a zombie."""
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not is_running(pid), f"process {pid} is gone")


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A process that is there and does nothing. SIGSTOP takes a while to reach every thread: they have all stopped when
    this begins.
    """
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_until(lambda: set(_states(pid)) == {"T"}, f"process {pid} has stopped")
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def _states(pid: int) -> Iterator[str]:
    for task in (_PROC / str(pid) / "task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            yield _state(task)


def _state(process: Path) -> str:
    stat = (process / "stat").read_text(errors="replace")
    return stat[stat.rindex(")") + 2]


def is_running(pid: int) -> bool:
    """Whether there is such a process; a zombie isn't running."""
    try:
        return _state(_PROC / str(pid)) not in "ZXx"
    except (FileNotFoundError, ProcessLookupError):
        return False


def marked_processes(run_id: str) -> dict[int, str]:
    """Processes of a test run besides this one: pid and command line. Zombies are left out."""
    found = {}
    for pid in _all_pids():
        try:
            environ = (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
            command = (_PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        if f"{MARK}={run_id}".encode() in environ and pid != os.getpid() and is_running(pid):
            found[pid] = command[:200]
    return found


def open_pools(name: str) -> dict[int, list[str]]:
    """Processes, this one included, that have a memfd open whose name contains `name`: pid and the memfds' names."""
    gc.collect()
    found: dict[int, list[str]] = {}
    for pid in _all_pids():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            for fd in os.listdir(_PROC / str(pid) / "fd"):
                with contextlib.suppress(FileNotFoundError):
                    target = os.readlink(_PROC / str(pid) / "fd" / fd)
                    if target.startswith("/memfd:") and name in target:
                        found.setdefault(pid, []).append(target)
    return found


def pool_inodes(name: str) -> set[int]:
    """Pools whose memory some process still has, by a file descriptor or a mapping; the name has `name` in it."""
    gc.collect()
    found: set[int] = set()
    for pid in _all_pids():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            for line in (_PROC / str(pid) / "maps").read_text(errors="replace").splitlines():
                fields = line.split(maxsplit=5)
                if fields[-1].startswith("/memfd:") and name in fields[-1]:
                    found.add(int(fields[4]))
            for fd in os.listdir(_PROC / str(pid) / "fd"):
                with contextlib.suppress(FileNotFoundError):
                    target = os.readlink(_PROC / str(pid) / "fd" / fd)
                    if target.startswith("/memfd:") and name in target:
                        found.add(os.stat(_PROC / str(pid) / "fd" / fd).st_ino)
    return found


def shared_memory_files() -> set[str]:
    """What is in /dev/shm."""
    return set(os.listdir("/dev/shm"))


def _all_pids() -> list[int]:
    return [int(name) for name in os.listdir(_PROC) if name.isdigit()]


class Child:
    """A function of `tests.cluster.children` in a Python process of its own, with a dialogue of JSON lines.

    Args:
        function: its name; it is called with `arguments`.
        arguments: JSON-able keywords.
        environ: variables added to this process's own.
        launcher: command that runs Python, for example ``unshare``.
    """

    def __init__(
        self,
        function: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        environ: Mapping[str, str] | None = None,
        launcher: Sequence[str] = (),
    ) -> None:
        line = [*launcher, sys.executable, "-m", "tests.cluster.children", function, json.dumps(arguments or {})]
        self._process = subprocess.Popen(
            line,
            cwd=ROOT,
            env={**os.environ, **(environ or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> "Child":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def result(self) -> Any:
        """What the function returned. Blocks until the process has ended; `AssertionError` with its stderr if it
        failed.
        """
        output, errors = self._process.communicate()
        assert self._process.returncode == 0, f"exit code {self._process.returncode}: {errors}"
        return json.loads(output.splitlines()[-1])

    def end(self) -> None:
        """Kill it if it still runs, and wait for it."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate()


def run_python(
    line: Sequence[str], *, cwd: Path = ROOT, given: str = "", environ: Mapping[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run this Python with the given arguments until it ends."""
    return subprocess.run(
        [sys.executable, *line],
        cwd=cwd,
        env={**os.environ, **(environ or {})},
        input=given,
        capture_output=True,
        text=True,
        check=False,
    )


def free_port() -> int:
    """A port of the loopback address on which nobody listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def listens(port: int) -> bool:
    """Whether somebody does."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
