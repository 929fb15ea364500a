"""Operations that a client carries out in the background: one thread per client, in the order in which they came."""

import atexit
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias, TypeVar

from hs_cache.errors import CacheClosedError, HiddenStateCacheError

T = TypeVar("T")

_EXIT_S = 5.0
"""The interpreter waits so long at its exit for an operation that is being carried out."""


@dataclass(frozen=True, slots=True)
class _Job:
    future: "Future[Any]"
    run: Callable[[], Any]

    def carry_out(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self.run()
        except HiddenStateCacheError as error:
            self.future.set_exception(error.with_traceback(None))  # whose frames would keep the rows
        except BaseException as error:
            self.future.set_exception(error)
        else:
            self.future.set_result(result)


_Jobs: TypeAlias = "SimpleQueue[_Job | None]"


class Background:
    """Carries out operations one after the other. Its thread starts with the first; it ends with `close`, and with this
    object. Thread-safe; pickles without its thread, and does nothing in a forked child.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._jobs: _Jobs = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    def __reduce__(self) -> Any:
        return Background, ()

    def submit(self, run: Callable[[], T]) -> "Future[T]":
        """Have `run` called, after all that was submitted before. A future that is cancelled before that comes to
        nothing; afterwards, `run` is carried out all the same.

        Raises:
            CacheClosedError: after `close`, and in a forked child.
        """
        future: Future[T] = Future()
        if os.getpid() != self._pid:
            raise CacheClosedError(f"this cache belongs to process {self._pid}, not to its forked child {os.getpid()}")
        with self._lock:
            if self._closed:
                raise CacheClosedError("the cache is closed; connect() gives a new one")
            if self._thread is None:
                thread = threading.Thread(target=_work, args=(self._jobs,), name="hs_cache-background", daemon=True)
                thread.start()
                self._thread = thread
                weakref.finalize(self, self._jobs.put, None).atexit = False
                _running[thread] = self._jobs
            self._jobs.put(_Job(future, run))
        return future

    def close(self, timeout_s: float | None = None) -> None:
        """Take no more. Blocks until what is being carried out has ended, `timeout_s` seconds at most; what has not
        begun fails with `CacheClosedError`. Idempotent; does nothing in a forked child."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._closed = True
            thread = self._thread
        _fail_waiting(self._jobs)
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)


_running: dict[threading.Thread, _Jobs] = {}
"""Threads that have not ended, also those of objects that are gone."""


def _work(jobs: _Jobs) -> None:
    try:
        while (job := jobs.get()) is not None:
            job.carry_out()
            del job  # one that was cancelled still has its rows
    finally:
        _running.pop(threading.current_thread(), None)


def _fail_waiting(jobs: _Jobs) -> None:
    """Fail what has not begun, and have the thread end."""
    try:
        while True:
            job = jobs.get_nowait()
            if job is not None and job.future.set_running_or_notify_cancel():
                job.future.set_exception(CacheClosedError("the cache was closed before this operation began"))
    except Empty:
        jobs.put(None)


@atexit.register
def _close_all() -> None:
    """The interpreter ends daemon threads wherever they are, which inside a driver's C++ may abort the process."""
    for thread, jobs in list(_running.items()):
        _fail_waiting(jobs)
        thread.join(_EXIT_S)
