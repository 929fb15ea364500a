"""SharedPool and PoolMapping, between real processes."""

import contextlib
import gc
import logging
import os
import pickle
import resource
import select
import stat
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hs_cache.errors import CacheClosedError, InvalidInputError, PoolError, PoolTooLargeError
from hs_cache.machine import MemoryHeadroom, process_alive
from hs_cache.messages import PoolAddress
from hs_cache.pool_file import HEADER_BYTES, PoolHeader
from hs_cache.shared_pool import PoolMapping, SharedPool

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfd and /proc are Linux")

REPOSITORY = Path(__file__).parents[2]
OLD, NEW = 42, 43
MIB = 1 << 20
GIB = 1 << 30
PAGE = resource.getpagesize()


def make_pool(data_bytes: int = MIB, *, prefault: bool = False, available_bytes: int = 64 * GIB) -> SharedPool:
    return SharedPool(
        data_bytes, prefault=prefault, margin_bytes=0, headroom=lambda: MemoryHeadroom(available_bytes, "MemAvailable")
    )


def poll(condition: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.01)


def run_script(script: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@contextlib.contextmanager
def run_owner(script: str) -> Iterator["tuple[subprocess.Popen[bytes], PoolAddress]"]:
    """A process that runs ``script``, prints the address it called ``address``, and lives until it is told to end."""
    program = textwrap.dedent(script) + textwrap.dedent("""
        import pickle, sys
        print(pickle.dumps(address).hex(), flush=True)
        sys.stdin.read()
    """)
    owner = subprocess.Popen(
        [sys.executable, "-c", program], cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert owner.stdin is not None and owner.stdout is not None
        ready, _, _ = select.select([owner.stdout], [], [], 60)
        assert ready, "the owner did not start"
        yield owner, pickle.loads(bytes.fromhex(owner.stdout.readline().decode()))
    finally:
        owner.kill()
        owner.communicate()


def pool_owner(data_bytes: int, first_bytes: bytes = b"") -> str:
    return f"""
        from hs_cache.shared_pool import SharedPool
        pool = SharedPool({data_bytes}, margin_bytes=0)
        assert pool.wait_prefaulted(60)
        pool.view()[: {len(first_bytes)}] = {first_bytes!r}
        address = pool.address
    """


def open_fds() -> list[str]:
    """Those of files that stay.

    Other tests leave threads in this process, of clients and of Ray, which open sockets and files of /proc at any time.
    """
    found = []
    for name in sorted(os.listdir("/proc/self/fd")):
        with contextlib.suppress(FileNotFoundError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith(("/proc/", "socket:", "pipe:", "anon_inode:")):
                found.append(name)
    return found


# The pool and its mapping


def test_owner_and_client_share_the_data() -> None:
    with run_owner(pool_owner(3 * MIB + 5, b"from the owner")) as (_, address):
        assert address.data_bytes == 3 * MIB + 5
        first, second = PoolMapping.open(address), PoolMapping.open(address)
        assert first.incarnation == address.incarnation
        view = first.write_view()
        assert (view.nbytes, view.readonly, view.format) == (3 * MIB + 5, False, "B")
        assert bytes(view[:14]) == b"from the owner"
        view[-3:] = b"end"
        assert bytes(second.write_view()[-3:]) == b"end"
        del view
        first.close()
        second.close()


def test_the_header_precedes_the_data() -> None:
    pool = make_pool(MIB)
    packed = os.pread(pool.address.fd, 40, 0)
    assert packed == PoolHeader(pool.incarnation, MIB).pack()
    assert packed == b"HSCACHE\0" + b"\1\0\0\0" + b"\0\x10\0\0" + pool.incarnation + MIB.to_bytes(8, "little")
    pool.view()[:4] = b"data"
    assert os.pread(pool.address.fd, 4, HEADER_BYTES) == b"data"
    assert make_pool().incarnation != pool.incarnation
    pool.close()


def test_the_file_is_private_to_the_user_and_cannot_change_size() -> None:
    pool = make_pool(MIB)
    fd = pool.address.fd
    assert stat.S_IMODE(os.fstat(fd).st_mode) == stat.S_IRUSR | stat.S_IWUSR
    assert not os.get_inheritable(fd)
    for size in (0, 2 * MIB):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    pool.close()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_cannot_open_it() -> None:
    pool = make_pool(MIB)
    done = run_script(
        """
        import os, pickle, sys
        from hs_cache.errors import PoolError
        from hs_cache.shared_pool import PoolMapping
        address = pickle.loads(bytes.fromhex(sys.argv[1]))
        PoolMapping.open(address).close()
        os.setuid(65534)
        try:
            PoolMapping.open(address)
        except PoolError as error:
            print(error)
        """,
        pickle.dumps(pool.address).hex(),
    )
    assert "Permission denied" in done.stdout, done
    pool.close()


def test_addresses_travel_between_processes() -> None:
    pool = make_pool()
    assert pickle.loads(pickle.dumps(pool.address)) == pool.address
    assert pool.address.pid == os.getpid()
    assert process_alive(pool.address.pid, pool.address.start_time)
    pool.close()


def test_close_twice_and_use_afterwards() -> None:
    pool = make_pool()
    mapping = PoolMapping.open(pool.address)
    for each in (mapping, pool):
        assert not each.closed
        each.close()
        each.close()
        assert each.closed
        with pytest.raises(CacheClosedError, match="the pool is closed"):
            each.pin(lambda address, nbytes: 0, lambda address: 0)
    with pytest.raises(CacheClosedError, match="the pool is closed"):
        pool.view()
    with pytest.raises(CacheClosedError, match="the pool is closed"):
        mapping.write_view()
    with pytest.raises(CacheClosedError, match="the pool is closed"):
        mapping.private_mapping(0, 1)


def test_views_outlive_close() -> None:
    pool = make_pool()
    mapping = PoolMapping.open(pool.address)
    theirs, mine = pool.view(), mapping.write_view()
    mapping.close()
    pool.close()
    mine[0] = 7
    assert theirs[0] == mine[0]


@pytest.mark.parametrize(("data_bytes", "margin_bytes"), [(0, 0), (-1, 0), (1, -1)])
def test_sizes_out_of_range_are_refused(data_bytes: int, margin_bytes: int) -> None:
    with pytest.raises(InvalidInputError, match="data_bytes"):
        SharedPool(data_bytes, margin_bytes=margin_bytes)


def test_other_systems_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(PoolError, match="needs Linux"):
        SharedPool(MIB)
    with pytest.raises(PoolError, match="needs Linux"):
        PoolMapping.open(PoolAddress(1, 1, 3, bytes(16), MIB))


def test_a_name_the_kernel_refuses_is_a_pool_error_and_leaks_nothing() -> None:
    before = open_fds()
    with pytest.raises(PoolError, match="cannot create a shared memory file"):
        SharedPool(MIB, margin_bytes=0, name="x" * 300)
    assert open_fds() == before


# What open() refuses


def refused(address: PoolAddress, reason: str) -> None:
    before = open_fds()
    with pytest.raises(PoolError, match=reason):
        PoolMapping.open(address)
    assert open_fds() == before


def test_open_refuses_another_pool() -> None:
    pool, other = make_pool(), make_pool()
    address = pool.address
    refused(replace(address, incarnation=bytes(16)), "its header is another's")
    refused(replace(address, incarnation=b""), "its header is another's")
    refused(replace(address, fd=other.address.fd), "its header is another's")
    refused(replace(address, data_bytes=MIB - 1), f"expected a pool's memfd of {HEADER_BYTES + MIB - 1}")
    refused(replace(address, data_bytes=MIB + PAGE), "expected a pool's memfd")
    pool.close()
    refused(address, "No such file")
    other.close()


def test_open_refuses_a_reused_pid_and_a_dead_owner() -> None:
    with run_owner(pool_owner(MIB)) as (owner, address):
        PoolMapping.open(address).close()
        refused(replace(address, start_time=address.start_time - 1), "is gone")
        owner.kill()
        owner.wait()
        refused(address, "is gone")
    refused(replace(address, pid=2**31 - 2), "is gone")


@pytest.mark.parametrize(
    "make_fd",
    [
        "os.mkfifo(path); fd = os.open(path, os.O_RDWR)",
        "os.mkfifo(path); fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)",
        "fd = os.open(path, os.O_RDWR | os.O_CREAT); os.ftruncate(fd, 8192)",
        "fd = os.pipe()[0]",
        "fd = socket.socket().detach()",
        "fd = os.open('/dev/zero', os.O_RDWR)",
        "fd = os.open('/', os.O_RDONLY)",
    ],
)
def test_open_refuses_what_is_not_a_memfd_and_does_not_hang(tmp_path: Path, make_fd: str) -> None:
    script = f"""
        import os, socket
        from hs_cache.machine import process_start_time
        from hs_cache.messages import PoolAddress
        path = {str(tmp_path / "file")!r}
        {make_fd}
        address = PoolAddress(os.getpid(), process_start_time(os.getpid()), fd, bytes(16), 4096)
    """
    with run_owner(script) as (_, address):
        refused(address, "expected a pool's memfd")


def test_open_refuses_a_memfd_that_can_shrink() -> None:
    pool = make_pool(4096)
    fd = os.memfd_create("hs_cache")
    os.ftruncate(fd, HEADER_BYTES + 4096)
    os.pwrite(fd, PoolHeader(pool.incarnation, 4096).pack(), 0)
    refused(replace(pool.address, fd=fd), "can shrink")
    os.close(fd)
    pool.close()


# Copy-on-write mappings


def test_private_mapping_is_isolated_in_both_directions() -> None:
    pool = make_pool()
    view = pool.view()
    view[:] = bytes([1]) * MIB
    mapping = PoolMapping.open(pool.address)
    mapped, position = mapping.private_mapping(5, 2 * PAGE)
    assert mapped[position : position + 3] == b"\1\1\1"
    mapped[position] = 9
    assert view[5] == 1
    assert mapping.write_view()[5] == 1
    view[6] = 3
    assert (mapped[position], mapped[position + 1]) == (9, 1)
    assert mapped[position + PAGE] == 1
    view[5 + PAGE] = NEW
    assert mapped[position + PAGE] == NEW, (
        "a page not written to shows the pool: why a lease lasts as long as the mapping"
    )
    del view
    mapping.close()
    pool.close()


@pytest.mark.parametrize("offset", [0, 1, PAGE - 1, PAGE, 3 * PAGE + 64, MIB - 1])
def test_private_mapping_starts_at_the_page_of_the_offset(offset: int) -> None:
    pool = make_pool()
    pool.view()[offset] = OLD
    mapping = PoolMapping.open(pool.address)
    mapped, position = mapping.private_mapping(offset, 1)
    assert mapped[position] == OLD
    assert position == (HEADER_BYTES + offset) % PAGE
    assert len(mapped) == position + 1
    mapping.close()
    pool.close()


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 1), (0, 0), (0, MIB + 1), (MIB, 1), (MIB - 1, 2), (0, -1)])
def test_private_mapping_outside_the_data_is_refused(offset: int, nbytes: int) -> None:
    pool = make_pool()
    mapping = PoolMapping.open(pool.address)
    with pytest.raises(InvalidInputError, match=f"offset is {offset} and nbytes {nbytes},"):
        mapping.private_mapping(offset, nbytes)
    mapping.close()
    pool.close()


def test_private_mapping_outlives_close_and_the_owner() -> None:
    with run_owner(pool_owner(MIB, b"rows")) as (owner, address):
        mapping = PoolMapping.open(address)
        mapped, position = mapping.private_mapping(0, MIB)
        mapping.close()
        assert mapped[position : position + 4] == b"rows"
        owner.kill()
        owner.wait()
        assert mapped[position : position + 4] == b"rows"
        mapped[position + MIB - 1] = 1


def test_closing_while_others_map_gives_the_right_file_or_an_error() -> None:
    decoys = [os.memfd_create("decoy") for _ in range(4)]
    for fd in decoys:
        os.ftruncate(fd, HEADER_BYTES + MIB)
    pool = make_pool()
    pool.view()[:] = b"\1" * MIB
    wrong: list[object] = []

    def read(mapping: PoolMapping) -> None:
        try:
            while True:
                mapped, position = mapping.private_mapping(PAGE, 64)
                if mapped[position] != 1:
                    wrong.append(mapped[position])
        except CacheClosedError:
            return

    for _ in range(30):
        mapping = PoolMapping.open(pool.address)
        readers = [threading.Thread(target=read, args=(mapping,)) for _ in range(3)]
        for reader in readers:
            reader.start()
        mapping.close()
        reused = os.dup(decoys[0])  # usually the number that close() gave back
        for reader in readers:
            reader.join()
        os.close(reused)
    for fd in decoys:
        os.close(fd)
    pool.close()
    assert not wrong


def test_no_fd_is_left_after_many_clients() -> None:
    pool = make_pool()
    gc.collect()
    before = open_fds()
    for _ in range(100):
        mapping = PoolMapping.open(pool.address)
        mapped, _ = mapping.private_mapping(0, PAGE)
        mapping.close()
        del mapped
    dropped = PoolMapping.open(pool.address)
    del dropped
    gc.collect()
    assert open_fds() == before
    pool.close()
    assert str(pool.address.fd) not in open_fds()


def test_running_out_of_fds_is_an_oserror_and_passes() -> None:
    done = run_script("""
        import errno, os, resource, sys
        from hs_cache.shared_pool import PoolMapping, SharedPool
        pool = SharedPool(1 << 20, margin_bytes=0, prefault=False)
        pool.view()[0] = 5
        mapping = PoolMapping.open(pool.address)
        resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
        leases = []
        try:
            for _ in range(64):
                leases.append(mapping.private_mapping(0, 64))
        except OSError as error:
            assert error.errno == errno.EMFILE, error
            assert sys.version_info < (3, 13)
            assert 10 < len(leases) < 32
        else:
            assert sys.version_info >= (3, 13)
        assert all(mapped[position] == 5 for mapped, position in leases)
        leases.clear()
        mapped, position = mapping.private_mapping(0, 64)
        assert mapped[position] == 5
        print("passed")
    """)
    assert done.stdout == "passed\n", done.stderr


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="a mapping holds no file descriptor")
def test_results_leave_half_of_the_fds_to_the_user() -> None:
    done = run_script("""
        import errno, os, resource
        from hs_cache.shared_pool import PoolMapping, SharedPool
        pool = SharedPool(1 << 20, margin_bytes=0, prefault=False)
        mapping = PoolMapping.open(pool.address)
        limit = 64
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        leases = []

        def map_all():
            try:
                for _ in range(limit):
                    leases.append(mapping.private_mapping(0, 64))
            except OSError as error:
                assert error.errno == errno.EMFILE, error
            else:
                raise AssertionError(f"{limit} results with as many file descriptors")

        map_all()
        assert len(leases) == limit // 2 - 2, len(leases)  # the pool and the client's mapping are maps too
        before = len(os.listdir("/proc/self/fd"))
        theirs = [open("/dev/null") for _ in range(limit - before)]
        assert len(theirs) > limit // 4, len(theirs)
        for _ in range(3):
            try:
                mapping.private_mapping(0, 64)
            except OSError as error:
                assert error.errno == errno.EMFILE, error
            else:
                raise AssertionError("one more")
        del leases[:5], theirs
        map_all()
        assert len(leases) == limit // 2 - 2, len(leases)
        print("passed")
    """)
    assert done.stdout == "passed\n", done.stderr


# Ends of processes


def shmem_bytes() -> int:
    line = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("Shmem:"))
    return int(line.split()[1]) * 1024


def test_memory_returns_when_the_owner_is_killed_and_the_last_client_is_gone() -> None:
    size, noise = 384 * MIB, 128 * MIB
    before = shmem_bytes()
    with run_owner(pool_owner(size)) as (owner, address):
        mapping = PoolMapping.open(address)
        assert shmem_bytes() > before + size - noise
        owner.kill()
        owner.wait()
        assert not process_alive(address.pid, address.start_time)
        assert shmem_bytes() > before + size - noise, "a client still maps it"
        mapping.write_view()[-1] = 1
        mapping.close()
        poll(lambda: shmem_bytes() < before + noise, "the pool's memory is free again")


def test_memory_returns_when_owner_and_client_are_killed() -> None:
    size, noise = 384 * MIB, 128 * MIB
    before = shmem_bytes()
    with run_owner(pool_owner(size)) as (owner, address):
        client_script = f"""
            import pickle
            from hs_cache.shared_pool import PoolMapping
            address = pickle.loads(bytes.fromhex({pickle.dumps(address).hex()!r}))
            mapping = PoolMapping.open(address)
            lease = mapping.private_mapping(0, address.data_bytes)
        """
        with run_owner(client_script) as (client, _):
            assert shmem_bytes() > before + size - noise
            owner.kill()
            owner.wait()
            client.kill()
            client.wait()
            poll(lambda: shmem_bytes() < before + noise, "the pool's memory is free again")


def test_forked_children_cannot_use_or_disturb_what_the_parent_maps() -> None:
    done = run_script("""
        import gc, mmap, os, resource, signal, warnings
        from hs_cache.errors import CacheClosedError
        from hs_cache.shared_pool import PoolMapping, SharedPool
        warnings.simplefilter("ignore")
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        pool = SharedPool(8 << 20, margin_bytes=0, prefault=False)
        pool.view()[:4] = b"rows"
        mapping = PoolMapping.open(pool.address)
        mapped, position = mapping.private_mapping(0, 8 << 20)

        def in_child(work):
            pid = os.fork()
            if pid == 0:
                work()
                os._exit(0)
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

        def is_told():
            uses = [pool.view, mapping.write_view, lambda: mapping.private_mapping(0, 64),
                    lambda: pool.pin(lambda a, n: 0, lambda a: 0), lambda: mapping.pin(lambda a, n: 0, lambda a: 0)]
            for use in uses:
                try:
                    use()
                except CacheClosedError as error:
                    assert "forked child" in str(error)
                else:
                    os._exit(1)
            mapping.close()
            pool.close()

        def reads_inherited_rows():
            mapped[position]

        def fills_the_holes_and_collects():
            global mapped, mapping, pool
            mine = [mmap.mmap(-1, 8 << 20) for _ in range(8)]
            del mapped, mapping, pool
            gc.collect()
            for each in mine:
                each[:] = b"x" * (8 << 20)

        def opens_it_again():
            again = PoolMapping.open(pool.address)
            assert bytes(again.write_view()[:4]) == b"rows"
            again.close()

        assert in_child(is_told) == 0
        assert in_child(reads_inherited_rows) == -signal.SIGSEGV
        assert in_child(fills_the_holes_and_collects) == 0
        assert in_child(opens_it_again) == 0
        assert mapped[position : position + 4] == b"rows"
        assert bytes(mapping.write_view()[:4]) == bytes(pool.view()[:4]) == b"rows"
        mapping.close()
        pool.close()
        print("passed")
    """)
    assert done.stdout == "passed\n", done.stderr


def test_a_pool_that_does_not_fit_is_refused_by_the_check_alone() -> None:
    headroom = MemoryHeadroom(3 * GIB, "cgroup memory.max of /sys/fs/cgroup/box")
    before, shmem = open_fds(), shmem_bytes()
    with pytest.raises(PoolTooLargeError, match=r"expected at most 2\.499"):
        SharedPool(4 * GIB, margin_bytes=GIB // 2, headroom=lambda: headroom)
    with pytest.raises(PoolTooLargeError, match="max_hidden_state_cpu_size"):
        SharedPool(1 << 50)
    assert open_fds() == before
    assert shmem_bytes() < shmem + GIB
    exact = MemoryHeadroom(MIB + HEADER_BYTES + 5, "MemAvailable")
    SharedPool(MIB, margin_bytes=5, headroom=lambda: exact).close()
    with pytest.raises(PoolTooLargeError):
        SharedPool(MIB, margin_bytes=6, headroom=lambda: exact)


# Prefault


def allocated_bytes(pool: SharedPool) -> int:
    return os.fstat(pool.address.fd).st_blocks * 512


def test_prefault_puts_memory_behind_all_of_it() -> None:
    pool = make_pool(80 * MIB + 5, prefault=True)
    assert pool.wait_prefaulted(60)
    assert pool.prefaulted_bytes == 80 * MIB + 5
    assert allocated_bytes(pool) >= 80 * MIB + 5 + HEADER_BYTES
    assert not any(pool.view()[-PAGE:])
    pool.close()


def test_prefault_leaves_the_owner_no_page_to_fault_in() -> None:
    pool = make_pool(80 * MIB, prefault=True)
    assert pool.wait_prefaulted(60)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    view = pool.view()
    for offset in range(0, 80 * MIB, PAGE):
        view[offset] = OLD
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert faults < 80 * MIB // PAGE // 10, "needs Linux 5.14 or newer"
    del view
    pool.close()


def test_prefault_keeps_what_is_written_meanwhile() -> None:
    pool = make_pool(128 * MIB, prefault=True)
    view = pool.view()
    for offset in range(0, 128 * MIB, MIB):
        view[offset] = OLD
    assert pool.wait_prefaulted(60)
    assert all(view[offset] == OLD for offset in range(0, 128 * MIB, MIB))
    del view
    pool.close()


def test_without_prefault_nothing_is_allocated() -> None:
    pool = make_pool(64 * MIB)
    assert not pool.wait_prefaulted(60)
    assert pool.prefaulted_bytes == 0
    assert allocated_bytes(pool) <= MIB
    pool.close()


def test_prefault_stops_with_one_warning_when_memory_has_gone(caplog: pytest.LogCaptureFixture) -> None:
    answers = iter([GIB, GIB, 8 * MIB])
    pool = SharedPool(100 * MIB, margin_bytes=MIB, headroom=lambda: MemoryHeadroom(next(answers), "MemAvailable"))
    assert not pool.wait_prefaulted(60)
    assert pool.prefaulted_bytes == 32 * MIB - HEADER_BYTES
    assert allocated_bytes(pool) < 40 * MIB
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "MemAvailable leaves only 0.008 GiB" in record.getMessage()
    pool.view()[-1] = 1
    pool.close()


def test_close_ends_a_prefault_that_is_under_way() -> None:
    reached, go_on = threading.Event(), threading.Event()
    calls, last_call = 0, 3

    def headroom() -> MemoryHeadroom:
        nonlocal calls
        calls += 1
        if calls == last_call:
            reached.set()
            assert go_on.wait(60)
        return MemoryHeadroom(GIB, "MemAvailable")

    def close() -> None:
        pool.close()
        ended_at_close.append(pool._prefault_ended.is_set())

    ended_at_close: list[bool] = []
    pool = SharedPool(512 * MIB, margin_bytes=0, headroom=headroom)
    assert reached.wait(60)
    closer = threading.Thread(target=close)
    closer.start()
    poll(pool._stop.is_set, "close() asked the prefault to stop")
    go_on.set()
    closer.join(60)
    assert ended_at_close == [True]
    assert calls == last_call
    assert pool.prefaulted_bytes < 512 * MIB


def test_no_torch_is_imported_before_pin() -> None:
    done = run_script("""
        import sys
        from hs_cache.shared_pool import PoolMapping, SharedPool
        pool = SharedPool(1 << 20, margin_bytes=0)
        PoolMapping.open(pool.address).private_mapping(0, 64)
        pool.close()
        print(sorted({"torch", "ray"} & set(sys.modules)))
    """)
    assert done.stdout == "[]\n", done.stderr


def test_an_owner_that_exits_amid_its_prefault_ends_cleanly() -> None:
    done = run_script("""
        from hs_cache.shared_pool import SharedPool
        pool = SharedPool(512 << 20, margin_bytes=0)
    """)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
