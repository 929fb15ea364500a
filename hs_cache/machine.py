"""What the machine says about processes and memory, from ``/proc`` and the cgroups."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hs_cache.errors import PoolError, PoolTooLargeError
from hs_cache.pool_file import HEADER_BYTES

DEFAULT_MARGIN_BYTES = 512 << 20
"""Memory that a pool leaves free for everything else on the node."""

_GIB = 1 << 30
_PROC = Path("/proc")
_STAT_BYTES = 4096


def process_start_time(pid: int) -> int | None:
    """When a process started, in clock ticks since boot (field 22 of ``/proc/<pid>/stat``, proc(5)).

    Returns:
        ``None`` if there is no such process, it is a zombie or dead, or ``/proc`` doesn't show it.
    """
    state, start_time = _state(pid)
    return None if state in "ZXx" else start_time


def own_start_time() -> int | None:
    """`process_start_time` of this process; ``None`` also where ``/proc`` is that of another pid namespace.

    There, other processes would take this one for whichever has its pid in theirs.
    """
    pid = os.getpid()
    try:
        seen = os.readlink(_PROC / "self")
    except OSError:
        return None
    return process_start_time(pid) if seen == str(pid) else None


def process_alive(pid: int, start_time: int) -> bool:
    """Whether the process that had this pid and start time still runs; a zombie doesn't."""
    return process_start_time(pid) == start_time


def process_running(pid: int, start_time: int) -> bool:
    """`process_alive`, and not stopped by a signal or a debugger."""
    state, started = _state(pid)
    return started == start_time and state not in "ZXxTt"


def _state(pid: int) -> tuple[str, int | None]:
    """A process's state and start time as ``/proc/<pid>/stat`` has them; ``"X"`` and None where it shows none."""
    try:
        fd = os.open(f"{_PROC}/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError, ProcessLookupError, PermissionError):
        return "X", None
    try:
        line = os.read(fd, _STAT_BYTES)
    except ProcessLookupError:
        return "X", None
    finally:
        os.close(fd)
    state, *fields = line[line.rindex(b")") + 1 :].split()  # the name in front may hold blanks and parentheses
    return state.decode(), int(fields[18])


@dataclass(frozen=True)
class MemoryHeadroom:
    """How much more memory this process can have.

    Attributes:
        nbytes: In bytes, 0 or more.
        limit: What limits it: ``MemAvailable``, or a cgroup's file.
    """

    nbytes: int
    limit: str


def memory_headroom(proc: Path = _PROC) -> MemoryHeadroom:
    """The smallest of MemAvailable and the headroom of this process's memory cgroup (v1 or v2) and its ancestors.

    Page cache on the inactive list isn't counted as used, since the kernel drops it before it kills anything.

    Args:
        proc: Where procfs is mounted. The cgroup mounts are found through it.

    Raises:
        PoolError: ``meminfo`` can't be read.
    """
    try:
        meminfo = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
        lowest = MemoryHeadroom(int(meminfo["MemAvailable"].removesuffix("kB")) * 1024, "MemAvailable")
    except (OSError, KeyError) as error:
        raise PoolError(f"cannot tell how much memory is available from {proc / 'meminfo'}: {error!r}") from error
    for directory, is_v2 in _memory_cgroups(proc):
        limits = ("memory.max", "memory.high") if is_v2 else ("memory.limit_in_bytes",)
        used = _read_int(directory / ("memory.current" if is_v2 else "memory.usage_in_bytes")) or 0
        used -= min(used, _inactive_file(directory / "memory.stat"))
        for name in limits:
            limit = _read_int(directory / name)
            if limit is not None and limit - used < lowest.nbytes:
                lowest = MemoryHeadroom(max(limit - used, 0), f"cgroup {name} of {directory}")
    return lowest


def require_headroom(
    data_bytes: int, margin_bytes: int = DEFAULT_MARGIN_BYTES, headroom: MemoryHeadroom | None = None
) -> None:
    """Check that this process can have a pool, without allocating anything.

    Args:
        data_bytes: Size of the pool's data; its header is counted on top.
        margin_bytes: Memory to leave free.
        headroom: How much memory there is; measured when None.

    Raises:
        PoolTooLargeError: There isn't enough; the message names what limits it and the setting to lower.
        PoolError: It can't be told how much there is.
    """
    if headroom is None:
        headroom = memory_headroom()
    largest = headroom.nbytes - margin_bytes - HEADER_BYTES
    if data_bytes > largest:
        raise PoolTooLargeError(
            f"max_hidden_state_cpu_size asks for a pool of {data_bytes / _GIB:.3f} GiB, but {headroom.limit} leaves "
            f"{headroom.nbytes / _GIB:.3f} GiB, of which {margin_bytes / _GIB:.3f} GiB are kept free; expected at most "
            f"{max(largest, 0) * 1000 // _GIB / 1000:.3f}. Lower the setting or raise that limit"
        )


def _memory_cgroups(proc: Path) -> Iterator[tuple[Path, bool]]:
    """This process's memory cgroup and its ancestors, as far as they are mounted: ``(directory, is v2)``."""
    try:
        own = [line.split(":", 2) for line in (proc / "self/cgroup").read_text().splitlines()]
        mounts = (proc / "self/mountinfo").read_text().splitlines()
    except OSError:
        return
    v1 = next((path for _, controllers, path in own if "memory" in controllers.split(",")), None)
    v2 = next((path for hierarchy, controllers, path in own if hierarchy == "0" and not controllers), None)
    for line in mounts:
        left, right = line.split(" - ", 1)
        root, mount_point = (re.sub(r"\\(\d{3})", lambda m: chr(int(m[1], 8)), word) for word in left.split()[3:5])
        fstype, options = right.split()[0], right.split()[-1].split(",")
        is_v2 = fstype == "cgroup2"
        path = v2 if is_v2 else v1 if fstype == "cgroup" and "memory" in options else None
        if path is None:
            continue
        # A container may see its own cgroup as the mount's root, or be outside of what is mounted.
        inside = path if root == "/" else path.removeprefix(root) if f"{path}/".startswith(f"{root}/") else ""
        parts = [part for part in inside.split("/") if part]
        if ".." in parts:
            parts = []
        for depth in range(len(parts), -1, -1):
            yield Path(mount_point, *parts[:depth]), is_v2


def _read_int(path: Path) -> int | None:
    try:
        word = path.read_text().strip()
    except OSError:
        return None
    return None if word == "max" else int(word)


def _inactive_file(path: Path) -> int:
    try:
        figures = dict(line.split() for line in path.read_text().splitlines())
    except OSError:
        return 0
    # v1 has both, the first with children
    return int(figures.get("total_inactive_file", figures.get("inactive_file", 0)))
