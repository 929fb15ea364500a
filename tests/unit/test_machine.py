"""What /proc and the cgroups say: processes, and how much memory there is."""

import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hs_cache import machine
from hs_cache.errors import PoolError, PoolTooLargeError
from hs_cache.machine import (
    DEFAULT_MARGIN_BYTES,
    MemoryHeadroom,
    memory_headroom,
    own_start_time,
    process_alive,
    process_start_time,
    require_headroom,
)
from hs_cache.pool_file import HEADER_BYTES

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux")

MIB = 1 << 20
GIB = 1 << 30
PAGE = resource.getpagesize()


# Processes


def test_zombies_are_dead() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    start_time = process_start_time(process.pid)
    assert start_time is not None
    assert process_alive(process.pid, start_time)
    assert not process_alive(process.pid, start_time + 1)
    process.kill()
    # WNOWAIT leaves it a zombie.
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert process_start_time(process.pid) is None
    assert not process_alive(process.pid, start_time)
    process.communicate()
    assert process_start_time(process.pid) is None


def test_start_time_of_a_process_with_a_misleading_name(tmp_path: Path) -> None:
    sleep = shutil.which("sleep")
    assert sleep is not None
    plain_name, odd_name = tmp_path / "plain", tmp_path / "a) Z 1 (b"
    shutil.copy(sleep, plain_name)
    shutil.copy(sleep, odd_name)
    started = []
    for name in (plain_name, odd_name, plain_name):
        process = subprocess.Popen([str(name), "60"])
        started.append(process_start_time(process.pid))
        process.kill()
        process.wait()
    first, odd, last = started
    assert first is not None and odd is not None and last is not None
    assert first <= odd <= last


def show_process(proc: Path, pid: int, start_time: int, state: str = "S") -> None:
    (proc / str(pid)).mkdir(parents=True)
    fields = [state, *map(str, range(4, 22)), str(start_time), "23", "24"]
    (proc / str(pid) / "stat").write_text(f"{pid} (some (odd) name) {' '.join(fields)}\n")


@pytest.fixture
def fake_proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    proc = tmp_path / "proc"
    proc.mkdir()
    monkeypatch.setattr(machine, "_PROC", proc)
    return proc


def test_own_start_time_is_what_others_see() -> None:
    assert own_start_time() == process_start_time(os.getpid()) is not None


def test_own_start_time_where_proc_shows_this_process(fake_proc: Path) -> None:
    show_process(fake_proc, os.getpid(), 4711)
    (fake_proc / "self").symlink_to(str(os.getpid()))
    assert own_start_time() == 4711


@pytest.mark.parametrize("seen", [1, os.getpid() + 1])
def test_a_proc_of_another_pid_namespace_tells_no_start_time(fake_proc: Path, seen: int) -> None:
    show_process(fake_proc, os.getpid(), 4711)  # whoever has that pid there
    show_process(fake_proc, seen, 4712)
    (fake_proc / "self").symlink_to(str(seen))
    assert own_start_time() is None


def test_without_a_proc_of_ones_own_there_is_no_start_time(fake_proc: Path) -> None:
    show_process(fake_proc, os.getpid(), 4711)
    assert own_start_time() is None
    (fake_proc / "self").mkdir()
    assert own_start_time() is None


# How much memory there is


class MachineTree:
    """A /proc and cgroup mounts under a temporary directory."""

    def __init__(self, root: Path, *, available_kib: int = 8 << 20) -> None:
        self.root = root
        self.proc = root / "proc"
        (self.proc / "self").mkdir(parents=True)
        (self.proc / "meminfo").write_text(
            f"MemTotal:       99999999 kB\nMemAvailable:   {available_kib} kB\nHugePages_Total:       0\n"
        )
        self.mounts: list[str] = ["22 1 0:21 / /proc rw,relatime - proc proc rw"]
        self.own: list[str] = []

    def write(self) -> Path:
        (self.proc / "self/mountinfo").write_text("\n".join(self.mounts) + "\n")
        (self.proc / "self/cgroup").write_text("\n".join(self.own) + "\n")
        return self.proc

    def mount_v2(self, own: str, *, root: str = "/", at: str = "cgroup") -> Path:
        point = self.root / at
        point.mkdir()
        escaped = str(point).replace(" ", "\\040")
        self.mounts.append(f"30 22 0:26 {root} {escaped} rw,nosuid shared:4 master:1 - cgroup2 cgroup2 rw,nsdelegate")
        self.own.append(f"0::{own}")
        return point

    def mount_v1(self, own: str, *, root: str = "/") -> Path:
        point = self.root / "memory"
        point.mkdir()
        self.mounts += [
            f"31 22 0:27 / {self.root / 'cpu'} rw - cgroup cgroup rw,cpu",
            f"32 22 0:28 {root} {point} rw - cgroup cgroup rw,memory",
        ]
        self.own += ["9:cpu:/elsewhere", f"4:memory:{own}"]
        return point


def set_v2(directory: Path, limit: str, used: int, inactive_file: int = 0, high: str = "max") -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "memory.max").write_text(f"{limit}\n")
    (directory / "memory.high").write_text(f"{high}\n")
    (directory / "memory.current").write_text(f"{used}\n")
    (directory / "memory.stat").write_text(f"anon {used}\nactive_file 5\ninactive_file {inactive_file}\n")


def set_v1(directory: Path, limit: int, used: int, inactive_file: int = 0) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (directory / "memory.usage_in_bytes").write_text(f"{used}\n")
    (directory / "memory.stat").write_text(f"inactive_file 1\ntotal_inactive_file {inactive_file}\n")


def test_headroom_without_cgroups_is_mem_available(tmp_path: Path) -> None:
    assert memory_headroom(MachineTree(tmp_path).proc) == MemoryHeadroom(8 * GIB, "MemAvailable")
    tree = MachineTree(tmp_path / "two")
    tree.mount_v2("/")  # the root group has no limit files
    assert memory_headroom(tree.write()) == MemoryHeadroom(8 * GIB, "MemAvailable")


def test_headroom_of_a_v2_group_counts_reclaimable_page_cache_as_free(tmp_path: Path) -> None:
    tree = MachineTree(tmp_path)
    group = tree.mount_v2("/pod/box") / "pod/box"
    set_v2(group, str(4 * GIB), 3 * GIB, inactive_file=GIB)
    assert memory_headroom(tree.write()) == MemoryHeadroom(2 * GIB, f"cgroup memory.max of {group}")
    set_v2(group, str(4 * GIB), 5 * GIB)
    assert memory_headroom(tree.proc).nbytes == 0
    set_v2(group, "max", 3 * GIB, high=str(6 * GIB))
    assert memory_headroom(tree.proc) == MemoryHeadroom(3 * GIB, f"cgroup memory.high of {group}")
    set_v2(group, "max", 3 * GIB)
    assert memory_headroom(tree.proc).limit == "MemAvailable"


def test_headroom_of_an_ancestor_limits(tmp_path: Path) -> None:
    tree = MachineTree(tmp_path)
    mount = tree.mount_v2("/pod/box", at="with a blank")
    set_v2(mount / "pod/box", str(6 * GIB), GIB)
    set_v2(mount / "pod", str(4 * GIB), 3 * GIB)
    assert memory_headroom(tree.write()) == MemoryHeadroom(GIB, f"cgroup memory.max of {mount / 'pod'}")


def test_headroom_of_a_v1_group(tmp_path: Path) -> None:
    tree = MachineTree(tmp_path)
    mount = tree.mount_v1("/pod/box")
    set_v1(mount, 2**63 - PAGE, 100 * GIB)
    set_v1(mount / "pod", 7 * GIB, 0)
    set_v1(mount / "pod/box", 4 * GIB, 3 * GIB, inactive_file=GIB // 2)
    assert memory_headroom(tree.write()) == MemoryHeadroom(
        GIB + GIB // 2, f"cgroup memory.limit_in_bytes of {mount / 'pod/box'}"
    )


def test_headroom_with_both_versions_mounted_takes_the_lower(tmp_path: Path) -> None:
    tree = MachineTree(tmp_path)
    set_v1(tree.mount_v1("/box") / "box", 5 * GIB, 0)
    v2 = tree.mount_v2("/unit") / "unit"
    v2.mkdir()
    assert memory_headroom(tree.write()).nbytes == 5 * GIB
    set_v2(v2, str(3 * GIB), 0)
    assert memory_headroom(tree.proc).nbytes == 3 * GIB


@pytest.mark.parametrize(
    ("own", "root", "inside"),
    [
        ("/docker/abc", "/docker/abc", ""),  # the container's own group is the mount
        ("/docker/abc/sub", "/docker/abc", "sub"),
        ("/docker/abcd", "/docker/abc", ""),  # not below it, though the name starts alike
        ("/../other", "/", ""),  # outside of the cgroup namespace
    ],
)
def test_headroom_in_a_container(tmp_path: Path, own: str, root: str, inside: str) -> None:
    tree = MachineTree(tmp_path)
    mount = tree.mount_v2(own, root=root)
    set_v2(mount, str(4 * GIB), 0)
    set_v2(mount / "sub", str(3 * GIB), 0)
    set_v2(mount / "d", str(2 * GIB), 0)
    set_v2(mount.parent / "other", str(GIB), 0)
    expected = mount / inside
    assert memory_headroom(tree.write()).limit == f"cgroup memory.max of {expected}"


def test_headroom_that_cannot_be_told_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(PoolError, match="meminfo"):
        memory_headroom(tmp_path)


def test_headroom_of_this_machine_is_plausible() -> None:
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < memory_headroom().nbytes < physical


def test_what_does_not_fit_is_refused_with_the_limit_and_the_setting() -> None:
    headroom = MemoryHeadroom(3 * GIB, "cgroup memory.max of /sys/fs/cgroup/box")
    with pytest.raises(PoolTooLargeError) as caught:
        require_headroom(4 * GIB, GIB // 2, headroom)
    message = str(caught.value)
    for part in (headroom.limit, "max_hidden_state_cpu_size", "4.000 GiB", "3.000 GiB", "0.500 GiB", "at most 2.499"):
        assert part in message
    assert isinstance(caught.value, MemoryError)


def test_the_check_is_exact_and_counts_the_header_and_the_margin() -> None:
    exact = MemoryHeadroom(MIB + HEADER_BYTES + DEFAULT_MARGIN_BYTES, "MemAvailable")
    require_headroom(MIB, headroom=exact)
    with pytest.raises(PoolTooLargeError):
        require_headroom(MIB + 1, headroom=exact)
    with pytest.raises(PoolTooLargeError):
        require_headroom(MIB, DEFAULT_MARGIN_BYTES + 1, exact)
    with pytest.raises(PoolTooLargeError, match=r"at most 0\.000"):
        require_headroom(1, 2 * DEFAULT_MARGIN_BYTES, exact)


def test_the_check_measures_this_machine_by_itself() -> None:
    require_headroom(1, 0)
    with pytest.raises(PoolTooLargeError, match=r"MemAvailable|cgroup"):
        require_headroom(1 << 50)
