"""Continuous batching with chunked prefill: who computes how many tokens in the next step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from qwen3_omni.conversation import Prompt


@dataclass(eq=False)
class Request:
    """One prompt on its way through the engine.

    Attributes:
        request_id: unique.
        prompt: what was asked.
        max_new_tokens: exactly as many are generated.
        token_ids: the prompt, and what has been generated so far.
        num_computed: how many of these have KV in the engine; the others are computed in the next steps.
        num_restored: tokens of the prompt that were not computed but restored when the request first ran.
        num_preemptions: how often its KV was taken away.
    """

    request_id: str
    prompt: Prompt
    max_new_tokens: int
    token_ids: list[int] = field(init=False)
    num_computed: int = 0
    num_restored: int | None = None
    num_preemptions: int = 0

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt.token_ids)

    @property
    def num_left(self) -> int:
        """Tokens to compute before the next one is generated: 1 while decoding."""
        return len(self.token_ids) - self.num_computed

    @property
    def reply(self) -> tuple[int, ...]:
        """What has been generated."""
        return tuple(self.token_ids[len(self.prompt) :])

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to generate."""
        return len(self.reply) == self.max_new_tokens


class Scheduler:
    """Every step has room for `step_tokens` tokens: one for each request that decodes, and prefill in what is left.

    So prefill chunks have any size, and end at any token.

    Args:
        step_tokens: the budget of a step.
        kv_tokens: for how many tokens of running requests there is KV memory. When it is used up, the request that
            began last is preempted.
        max_running: requests that run at once.
        restore: called when a request starts to run, for the first time or again; how many tokens need no computing.
        preempt: called when a request has to give its KV up.
    """

    def __init__(
        self,
        *,
        step_tokens: int,
        kv_tokens: int,
        max_running: int,
        restore: Callable[[Request], int],
        preempt: Callable[[Request], None],
    ) -> None:
        self._step_tokens = step_tokens
        self._kv_tokens = kv_tokens
        self._max_running = max_running
        self._restore = restore
        self._preempt = preempt
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ValueError: it would never fit.
        """
        tokens = len(request.prompt) + request.max_new_tokens
        if tokens > self._kv_tokens:
            raise ValueError(f"request: got {tokens} tokens, expected at most {self._kv_tokens}")
        self._waiting.append(request)

    def remove(self, request: Request) -> None:
        """Forget a request that is done, or that nobody wants any more."""
        (self._running if request in self._running else self._waiting).remove(request)

    def schedule(self) -> dict[Request, int]:
        """The next step: how many tokens of which request."""
        step: dict[Request, int] = {}
        for request in sorted(self._running, key=lambda request: request.num_left > 1):
            count = min(request.num_left, self._step_tokens - sum(step.values()))
            if count and request in self._running and self._make_room(request, count, step):
                step[request] = count
        while self._may_admit(step):
            request = self._waiting.popleft()
            request.num_computed = self._restore(request)
            self._running.append(request)
            step[request] = min(request.num_left, self._step_tokens - sum(step.values()))
        return step

    def _may_admit(self, step: dict[Request, int]) -> bool:
        return (
            bool(self._waiting)
            and len(self._running) < self._max_running
            and sum(step.values()) < self._step_tokens
            and self._kv_in_use(step) + len(self._waiting[0].token_ids) <= self._kv_tokens
        )

    def _make_room(self, request: Request, count: int, step: dict[Request, int]) -> bool:
        """Preempt the last come, but none that is in the step already, until `count` tokens fit. False if that meant
        the request itself."""
        while self._kv_in_use(step) + count > self._kv_tokens:
            victim = next(other for other in reversed(self._running) if other not in step)
            self._running.remove(victim)
            self._waiting.appendleft(victim)
            victim.num_computed = 0
            victim.num_preemptions += 1
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _kv_in_use(self, step: dict[Request, int]) -> int:
        return sum(request.num_computed for request in self._running) + sum(step.values())
