"""A multi-turn chat in Qwen3-Omni's template, as token ids."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .audio import AudioClip
from .tiny_model import ASSISTANT, AUDIO, AUDIO_END, AUDIO_START, IM_END, IM_START, SYSTEM, USER

_NEWLINE = ord("\n")


@dataclass(frozen=True)
class Prompt:
    """Everything that was said so far, up to where the assistant is to speak.

    Attributes:
        token_ids: the whole conversation.
        mm_spans: (start, length, content hash) of every audio clip, in token positions.
        mel: features of the clip, float32 [mel bins, frames].
    """

    token_ids: tuple[int, ...]
    mm_spans: tuple[tuple[int, int, str], ...]
    mel: NDArray[np.float32] | None

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass
class Conversation:
    """Grows by turns; earlier tokens never change, which is what makes each prompt a prefix of the next."""

    _ids: list[int] = field(default_factory=list)
    _spans: list[tuple[int, int, str]] = field(default_factory=list)
    _mel: NDArray[np.float32] | None = None

    def add_system(self, text: str) -> None:
        """Add the system prompt."""
        self._open(SYSTEM)
        self._ids += text.encode()
        self._close()

    def add_user(self, text: str, clip: AudioClip | None = None) -> None:
        """Add a user turn: the clip, if any, and then the text.

        Args:
            text: any string.
            clip: at most one in a conversation.

        Raises:
            ValueError: a second clip was given.
        """
        self._open(USER)
        if clip is not None:
            self._add_clip(clip)
        self._ids += text.encode()
        self._close()

    def prompt(self) -> Prompt:
        """The prompt that asks for the assistant's next turn."""
        header = (IM_START, ASSISTANT, _NEWLINE)
        return Prompt((*self._ids, *header), tuple(self._spans), self._mel)

    def add_assistant(self, reply: tuple[int, ...]) -> None:
        """Add what the assistant answered, as the token ids that the thinker generated."""
        self._open(ASSISTANT)
        self._ids += reply
        self._close()

    def _open(self, role: int) -> None:
        self._ids += (IM_START, role, _NEWLINE)

    def _close(self) -> None:
        self._ids += (IM_END, _NEWLINE)

    def _add_clip(self, clip: AudioClip) -> None:
        if self._mel is not None:
            raise ValueError("clip: this conversation holds one already, expected at most one")
        self._ids.append(AUDIO_START)
        self._spans.append((len(self._ids), clip.num_tokens, clip.content_hash))
        self._ids += [AUDIO] * clip.num_tokens
        self._ids.append(AUDIO_END)
        self._mel = clip.mel


def read_passages(path: Path) -> list[str]:
    """Paragraphs of a text file: separated by empty lines, their own line breaks turned into spaces."""
    paragraphs = path.read_text(encoding="utf-8").split("\n\n")
    return [" ".join(paragraph.split()) for paragraph in paragraphs if paragraph.strip()]
