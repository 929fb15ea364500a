"""Subjects in processes of their own: the dialogue, and that these processes end."""

import subprocess
import sys
from collections.abc import Iterator

import pytest

from benchmarks.peers import PEERS, ROOT, Peer, Worker
from benchmarks.subject import STORE, MeasurementError, Size
from tests.processes import is_running, wait_until

MODULE = "tests.echoing"


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker(MODULE, environ={})
    yield made
    made.close()


def test_worker_does_what_a_subject_does(worker: Worker) -> None:
    assert STORE in worker.prepare(Size(1024, 8))
    worker.begin()
    assert worker.time(STORE) >= 0
    worker.verify()
    assert worker.bytes_per_token() is None
    worker.finish()


def test_worker_passes_on_what_goes_wrong_and_goes_on(worker: Worker) -> None:
    worker.prepare(Size(1024, 8))
    with pytest.raises(MeasurementError, match=r"^1024x8: dance$"):
        worker.time("dance")
    assert worker.time(STORE) >= 0


def test_worker_that_ends_is_an_error_with_its_last_words(worker: Worker) -> None:
    with pytest.raises(MeasurementError, match=r"tests\.echoing has ended: goodbye"):
        worker.ask("exit")
    with pytest.raises(MeasurementError, match="has ended"):
        worker.ask("pid")


def test_worker_that_cannot_be_made_says_why() -> None:
    with pytest.raises(MeasurementError, match="OSError: no memory"):
        Worker(MODULE, ["fail"], environ={})


def test_close_ends_the_process(worker: Worker) -> None:
    pid = worker.ask("pid")
    assert is_running(pid)
    worker.close()
    assert not is_running(pid)


def test_worker_ends_with_its_driver() -> None:
    driver = (
        "import os; from benchmarks.peers import Worker; worker = Worker('tests.echoing', environ={});"
        "print(worker.ask('pid'), flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", driver], cwd=ROOT, capture_output=True, text=True, check=False)
    pid = int(done.stdout)
    wait_until(lambda: not is_running(pid), "the worker has ended with its driver")


def test_peer_without_its_environment_says_how_to_make_it() -> None:
    with pytest.raises(MeasurementError, match=r"\.venv-absent is not there \(make \.venv-absent/\.ready\)"):
        Peer(MODULE, ".venv-absent", ".venv-absent/.ready").start()


def test_peers_take_the_sizes_they_are_meant_for() -> None:
    assert all(peer.takes(Size(1024, 2048)) for peer in PEERS.values())
    small = {name for name, peer in PEERS.items() if not peer.takes(Size(1024, 2048, 3))}
    assert small == {"Mooncake", "Redis"}
    assert small == {name for name, peer in PEERS.items() if not peer.takes(Size(1024, 3584))}
