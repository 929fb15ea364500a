"""The JSONL file of prompts: read and checked as a whole, before any work begins."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROLES = ("system", "user", "assistant")
_SHOWN_LINES = 20


class PromptsError(ValueError):
    """The file can't be read, or has lines that can't be used; the message names them."""


@dataclass(frozen=True)
class Message:
    """One turn of a conversation."""

    role: str
    content: str


@dataclass(frozen=True)
class Prompt:
    """One conversation that is to be answered."""

    id: str
    messages: tuple[Message, ...]

    @property
    def text(self) -> str:
        """Everything that was said, so that prompts which begin alike have texts which begin alike."""
        return "".join(f"{message.role}\0{message.content}\0" for message in self.messages)


@dataclass(frozen=True)
class PromptFile:
    """What a file holds.

    Attributes:
        prompts: in the order of the file.
        bad_lines: what was wrong with those that were skipped.
        digest: SHA-256 over ids and messages of all prompts, hex.
    """

    prompts: tuple[Prompt, ...]
    bad_lines: tuple[str, ...]
    digest: str


def read_prompts(path: Path, *, skip_bad_lines: bool = False) -> PromptFile:
    """Read and check a file with one JSON object per line.

    ``{"id": "a", "prompt": "..."}``, or ``{"id": "a", "messages": [{"role": "user", "content": "..."}, ...]}`` with the
    roles system (first only), user and assistant, and a user's turn at the end. Other keys and empty lines are ignored.

    Args:
        path: of the file.
        skip_bad_lines: leave lines out that can't be used, instead of refusing the file. An id that comes twice is
            refused all the same: nobody could tell whose answer is whose.

    Raises:
        PromptsError: the file can't be used; names line numbers and what is wrong with them.
    """
    prompts: dict[str, Prompt] = {}
    lines: dict[str, int] = {}
    bad, twice = [], []
    for number, line in _lines(path):
        try:
            prompt = _parse(line)
        except ValueError as error:
            bad.append(f"line {number}: {error}")
            continue
        if prompt.id in prompts:
            twice.append(f"line {number}: id {prompt.id!r} is that of line {lines[prompt.id]} too")
        prompts.setdefault(prompt.id, prompt)
        lines.setdefault(prompt.id, number)
    refused = twice if skip_bad_lines else sorted(bad + twice, key=lambda line: int(line.split(":")[0].split()[1]))
    if refused:
        hint = "" if twice else "\n(--skip-bad-lines leaves them out)"
        raise PromptsError(f"{path}: {len(refused)} of its lines can't be used:\n{_some(refused)}{hint}")
    if not prompts:
        raise PromptsError(f"{path}: no prompt in it, expected one JSON object per line")
    digest = hashlib.sha256()
    for prompt in prompts.values():
        turns = [[message.role, message.content] for message in prompt.messages]
        digest.update(json.dumps([prompt.id, turns]).encode() + b"\n")
    return PromptFile(tuple(prompts.values()), tuple(bad), digest.hexdigest())


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if stripped := line.removeprefix(b"\xef\xbb\xbf").strip():
                    yield number, stripped
    except OSError as error:
        raise PromptsError(
            f"--prompts: {path.absolute()} can't be read: {error.strerror} (a job looks in its working directory, and "
            "on the node where it runs)"
        ) from error


def _some(lines: list[str]) -> str:
    shown = [f"  {line}" for line in lines[:_SHOWN_LINES]]
    if len(lines) > _SHOWN_LINES:
        shown.append(f"  ... and {len(lines) - _SHOWN_LINES} more")
    return "\n".join(shown)


def _parse(line: bytes) -> Prompt:
    try:
        value = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: {error.reason} at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from error
    except RecursionError as error:
        raise ValueError("not usable JSON: nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError(f"got a {_kind(value)}, expected an object with 'id' and 'prompt' or 'messages'")
    ident = value.get("id")
    if isinstance(ident, bool) or not isinstance(ident, str | int) or ident == "":
        raise ValueError(f"id: got {_shown(value, 'id')}, expected a string that is not empty, or an integer")
    if ("prompt" in value) == ("messages" in value):
        raise ValueError("expected either 'prompt' or 'messages'")
    messages = _messages(value["messages"]) if "messages" in value else (Message("user", _prompt(value)),)
    prompt = Prompt(str(ident), messages)
    try:
        f"{prompt.id}{prompt.text}".encode()
    except UnicodeEncodeError as error:
        raise ValueError("a lone surrogate (\\ud800 to \\udfff) in it, which is no character") from error
    return prompt


def _prompt(value: dict[str, Any]) -> str:
    prompt = value["prompt"]
    if not isinstance(prompt, str) or not prompt:
        raise ValueError(f"prompt: got {_shown(value, 'prompt')}, expected a string that is not empty")
    return prompt


def _messages(value: Any) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"messages: got {_kind(value)}, expected a list that is not empty")
    messages = []
    for index, turn in enumerate(value):
        where = f"messages[{index}]"
        if not isinstance(turn, dict):
            raise ValueError(f"{where}: got {_kind(turn)}, expected an object with 'role' and 'content'")
        role, content = turn.get("role"), turn.get("content")
        if role not in ROLES or (role == "system" and index):
            raise ValueError(
                f"{where}.role: got {_shown(turn, 'role')}, expected one of {', '.join(ROLES)}, and system first only"
            )
        if not isinstance(content, str):
            raise ValueError(f"{where}.content: got {_shown(turn, 'content')}, expected a string")
        messages.append(Message(role, content))
    if messages[-1].role != "user":
        raise ValueError(f"messages: the last is of role {messages[-1].role!r}, expected a user's turn at the end")
    return tuple(messages)


def _kind(value: Any) -> str:
    names = {dict: "object", list: "list", str: "string", bool: "boolean", int: "number", float: "number"}
    return names.get(type(value), "null")


def _shown(value: dict[str, Any], key: str) -> str:
    if key not in value:
        return "none"
    return repr(value[key]) if isinstance(value[key], str | int | float) else _kind(value[key])
