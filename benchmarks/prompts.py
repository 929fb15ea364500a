"""Prompts that were never seen before, and what is found of them. Needs torch, which not every peer has."""

import torch

from benchmarks.subject import HALF, MISS, VOCABULARY, Size


def make_prompt(tokens: int, generator: torch.Generator | None = None) -> list[int]:
    """Token ids at random."""
    return torch.randint(0, VOCABULARY, (tokens,), generator=generator).tolist()


def half_of(prompt: list[int], other: list[int]) -> list[int]:
    """The first half of a prompt, and another's tokens behind it."""
    half = len(prompt) // 2
    return prompt[:half] + other[half:]


def tokens_found(step: str, size: Size) -> int:
    """How many tokens a step has to find."""
    return {HALF: size.tokens // 2, MISS: 0}.get(step, size.tokens)
