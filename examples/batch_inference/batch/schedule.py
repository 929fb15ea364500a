"""Who answers which prompt: prompts that begin alike go to one worker, one after the other. No Ray in here."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import pairwise

from .prompts import Prompt

IN_FLIGHT = 2
"""Prompts that a worker has been given: one that it works on, and one so that it need not wait for the driver."""


def group_prompts(prompts: Sequence[Prompt], *, shared_characters: int, most: int) -> list[list[Prompt]]:
    """Put prompts that begin alike next to each other, and cut where they part.

    Args:
        prompts: in any order.
        shared_characters: neighbours that share fewer are cut apart: nothing of one could be restored for the other.
        most: prompts in a group. A larger one is cut where its neighbours share least, in the second half of what it
            may have.
    """
    ordered = sorted(prompts, key=lambda prompt: (prompt.text, prompt.id))
    shared = [0, *(_shared(one.text, other.text) for one, other in pairwise(ordered))]
    groups = []
    begin = 0
    while begin < len(ordered):
        end = begin + 1
        while end < len(ordered) and end - begin <= most and shared[end] >= shared_characters:
            end += 1
        if end - begin > most:
            end = min(range(begin + (most + 1) // 2, begin + most + 1), key=lambda place: (shared[place], -place))
        groups.append(ordered[begin:end])
        begin = end
    return groups


def _shared(one: str, other: str) -> int:
    """How many characters two texts have in common at their beginning."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


class Schedule:
    """Hands out prompts, and hears what became of them.

    Each worker has a share, which is consecutive groups; one that is done with its own takes the last group of whoever
    has most left. A prompt that was with a worker when that died may be what killed it, so it is tried again alone:
    then another death is its own doing, and no other prompt's.

    Attributes:
        num_left: prompts of which nothing has become yet.

    Args:
        groups: of `group_prompts`.
        num_workers: they are numbered from 0.
        max_attempts: how often a prompt is tried.
    """

    def __init__(self, groups: Sequence[Sequence[Prompt]], num_workers: int, max_attempts: int) -> None:
        self.num_left = sum(map(len, groups))
        self._shares = _divide(groups, num_workers)
        self._max_attempts = max_attempts
        self._attempts: dict[str, int] = {}
        self._again: deque[Prompt] = deque()
        self._running: list[list[Prompt]] = [[] for _ in range(num_workers)]

    def next(self, worker: int) -> Prompt | None:
        """What this worker is to answer next; None when it has enough, or there is nothing for it now."""
        running = self._running[worker]
        if len(running) >= IN_FLIGHT or any(prompt.id in self._attempts for prompt in running):
            return None
        prompt = None
        if self._again and not running:
            prompt = self._again.popleft()
        elif share := self._share_of(worker):
            prompt = share[0].popleft()
            if not share[0]:
                share.popleft()
        if prompt is not None:
            running.append(prompt)
        return prompt

    def answered(self, worker: int, prompt: Prompt) -> None:
        """It is done."""
        self._running[worker].remove(prompt)
        self._end(prompt)

    def failed(self, worker: int, prompt: Prompt) -> int | None:
        """The worker could not answer it, and goes on. Returns after how many attempts it is given up, if it is."""
        self._running[worker].remove(prompt)
        return self._try_again(prompt)

    def lost(self, worker: int) -> list[tuple[Prompt, int]]:
        """The worker has died; another gets its number. Returns prompts that are given up, and after how many
        attempts."""
        running, self._running[worker] = self._running[worker], []
        given_up = []
        for prompt in running:
            attempts = self._try_again(prompt)
            if attempts is not None:
                given_up.append((prompt, attempts))
        return given_up

    def _try_again(self, prompt: Prompt) -> int | None:
        attempts = self._attempts.get(prompt.id, 0) + 1
        if attempts >= self._max_attempts:
            self._end(prompt)
            return attempts
        self._attempts[prompt.id] = attempts
        self._again.append(prompt)
        return None

    def _end(self, prompt: Prompt) -> None:
        self._attempts.pop(prompt.id, None)
        self.num_left -= 1

    def _share_of(self, worker: int) -> deque[deque[Prompt]]:
        share = self._shares[worker]
        if not share:
            richest = max(self._shares, key=lambda other: sum(map(len, other)))
            if richest:
                share.append(richest.pop())
        return share


def _divide(groups: Sequence[Sequence[Prompt]], num_workers: int) -> list[deque[deque[Prompt]]]:
    """Consecutive groups, of about as much text for each worker."""
    shares: list[deque[deque[Prompt]]] = [deque() for _ in range(num_workers)]
    sizes = [sum(len(prompt.text) for prompt in group) for group in groups]
    total, before = sum(sizes), 0
    for group, size in zip(groups, sizes, strict=True):
        shares[min(num_workers - 1, (before + size // 2) * num_workers // max(1, total))].append(deque(group))
        before += size
    return shares
