"""The workers: Ray actors that answer prompts, and the loop that feeds them and replaces those that are lost."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from hs_cache import HiddenStateCache

from .model import Answer, AnswerError, load_model
from .prompts import Prompt
from .schedule import Schedule

_WAIT_S = 1.0
_TELL_S = 30.0
_CLOSE_S = 10.0
_MAX_FAILED_STARTS = 3


class CrewError(Exception):
    """There are no workers, and it doesn't look as if there will be any; the message says why."""


class Worker:
    """Runs as a Ray actor of its own, around one model."""

    def __init__(self, model: str, cache: HiddenStateCache | None, chunk_size: int, reply_tokens: int) -> None:
        self._cache = cache
        self._reply_tokens = reply_tokens
        self._model = load_model(model)(cache, chunk_size)

    def where(self) -> tuple[int, str]:
        """Pid and node id."""
        return os.getpid(), str(ray.get_runtime_context().get_node_id())

    def answer(self, prompt: Prompt) -> Answer:
        """See `batch.model.Model`.

        Raises:
            AnswerError: for whatever the model raises. Ray itself ends a worker when an exception has a lone surrogate
                in its message, and can't pass every kind on.
        """
        try:
            answer = self._model.answer(prompt, self._reply_tokens)
        except Exception as error:
            reason = "".join(traceback.format_exception_only(error)).strip()
            raise AnswerError(reason.encode(errors="replace").decode()) from None
        if not isinstance(answer, Answer):
            raise AnswerError(f"the model gave {type(answer).__name__}, expected an Answer")
        return answer

    def close(self) -> None:
        """The KV goes with this process, so nothing should count on it."""
        if self._cache is not None:
            self._cache.kv.clear()
            self._cache.close()


@dataclass
class _Member:
    """One worker as the driver knows it.

    Attributes:
        handle: of the actor.
        begun: what `Worker.where` will have given; None once it has.
        busy_since: since when it has been working on its oldest prompt, or on its start.
        told: whether it was said that its start takes long.
    """

    handle: Any
    begun: Any
    busy_since: float
    told: bool = False


@dataclass(frozen=True)
class Limits:
    """How long to wait, in seconds.

    Attributes:
        prompt_s: for one prompt; then the worker is killed, and the prompt has failed.
        start_s: for a worker, while there is none.
    """

    prompt_s: float
    start_s: float


class Crew:
    """Runs a schedule to its end.

    Args:
        start: makes the worker with a certain number; called again when that is lost.
        num_workers: how many.
        schedule: for as many workers.
        limits: how long to wait.
        answered: called with a prompt and its answer; raises `AnswerError` when that can't be kept.
        gave_up: called with a prompt that was not, and why.
        say: called with a line about what happens to workers.
    """

    def __init__(
        self,
        start: Callable[[int], Any],
        num_workers: int,
        schedule: Schedule,
        limits: Limits,
        *,
        answered: Callable[[Prompt, Answer], None],
        gave_up: Callable[[Prompt, str], None],
        say: Callable[[str], None],
    ) -> None:
        self._start = start
        self._schedule = schedule
        self._limits = limits
        self._answered = answered
        self._gave_up = gave_up
        self._say = say
        self._pending: dict[Any, tuple[int, Prompt]] = {}
        self._failed_starts = 0
        self._losses = 0  # since a prompt was finished
        self._max_losses = max(10, 4 * num_workers)
        self._members = [self._begin(number) for number in range(num_workers)]

    def run(self, tick: Callable[[], None]) -> None:
        """Return when something has become of every prompt.

        Args:
            tick: called every second or more often.

        Raises:
            CrewError: workers can't be started, get no place in time, or die without getting anything done.
        """
        while self._schedule.num_left:
            self._hand_out()
            begun = [member.begun for member in self._members if member.begun is not None]
            done, _ = ray.wait([*begun, *self._pending], num_returns=1, timeout=_WAIT_S)
            for ref in done:
                if ref in self._pending:
                    self._hear(ref)
                else:
                    self._greet(ref)
            self._check_time()
            tick()

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the workers: in good order, unless something went wrong."""
        if kind is None:
            closed = [member.handle.close.remote() for member in self._members if member.begun is None]
            with suppress(RayError, GetTimeoutError):
                ray.get(closed, timeout=_CLOSE_S)
        for member in self._members:
            ray.kill(member.handle)

    def _begin(self, number: int) -> _Member:
        handle = self._start(number)
        return _Member(handle, handle.where.remote(), time.monotonic())

    def _hand_out(self) -> None:
        for number, member in enumerate(self._members):
            while member.begun is None and (prompt := self._schedule.next(number)) is not None:
                if not any(other == number for other, _ in self._pending.values()):
                    member.busy_since = time.monotonic()
                self._pending[member.handle.answer.remote(prompt)] = (number, prompt)

    def _greet(self, ref: Any) -> None:
        number = next(number for number, member in enumerate(self._members) if member.begun == ref)
        member = self._members[number]
        try:
            pid, node_id = ray.get(ref)
        except RayError as error:
            self._failed_starts += 1
            reason = _reason(error)
            self._say(f"worker {number} could not start: {reason}")
            if self._failed_starts >= _MAX_FAILED_STARTS:
                raise CrewError(
                    f"workers can't be started, {self._failed_starts} times in a row; the last time: {reason}"
                ) from error
            self._replace(number)
            return
        self._failed_starts = 0
        member.begun = None
        self._say(f"worker {number}: process {pid} on node {node_id[:12]}")

    def _hear(self, ref: Any) -> None:
        number, prompt = self._pending[ref]
        try:
            self._answered(prompt, ray.get(ref))
        except (RayTaskError, AnswerError) as error:
            del self._pending[ref]
            self._go_on(number)
            attempts = self._schedule.failed(number, prompt)
            if attempts is not None:
                self._give_up(prompt, f"{_reason(error)} (tried {attempts} times)")
            return
        except RayError as error:
            self._lose(number, _reason(error))
            return
        del self._pending[ref]
        self._go_on(number)
        self._schedule.answered(number, prompt)
        self._losses = 0

    def _go_on(self, number: int) -> None:
        self._members[number].busy_since = time.monotonic()

    def _lose(self, number: int, reason: str) -> None:
        self._losses += 1
        self._say(f"worker {number} was lost and is replaced: {reason}")
        self._pending = {ref: given for ref, given in self._pending.items() if given[0] != number}
        for prompt, attempts in self._schedule.lost(number):
            self._give_up(prompt, f"its worker was lost {attempts} times; the last time: {reason}")
        if self._losses >= self._max_losses:
            raise CrewError(f"{self._losses} workers were lost in a row without one answer; the last: {reason}")
        self._replace(number)

    def _replace(self, number: int) -> None:
        ray.kill(self._members[number].handle)
        self._members[number] = self._begin(number)

    def _give_up(self, prompt: Prompt, reason: str) -> None:
        self._losses = 0
        self._gave_up(prompt, reason)

    def _check_time(self) -> None:
        now = time.monotonic()
        busy = {number for number, _ in self._pending.values()}
        for number in busy:
            if now - self._members[number].busy_since > self._limits.prompt_s:
                self._lose(number, f"no answer within {self._limits.prompt_s:.0f} s (--prompt-timeout-s)")
        for number, member in enumerate(self._members):
            if member.begun is not None and not member.told and now - member.busy_since > _TELL_S:
                member.told = True
                self._say(f"worker {number} has not begun yet: the cluster has {_free()} free")
        waiting = [member for member in self._members if member.begun is not None]
        if len(waiting) == len(self._members):
            waited = now - max(member.busy_since for member in waiting)
            if waited > self._limits.start_s:
                raise CrewError(
                    f"no worker has begun within {self._limits.start_s:.0f} s (--start-timeout-s): the cluster has "
                    f"{_free()} free"
                )


def _free() -> str:
    resources: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
    return f"{resources.get('CPU', 0):g} CPUs and {resources.get('GPU', 0):g} GPUs"


def _reason(error: RayError | AnswerError) -> str:
    """What Ray wraps around it is for its own log."""
    cause = getattr(error, "cause", error)
    if isinstance(cause, AnswerError):
        return str(cause)
    if isinstance(error, RayTaskError) and isinstance(cause, Exception):
        return f"{type(cause).__name__}: {cause}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if "creation task" in str(error) and lines else (lines or [type(error).__name__])[0]
