"""Those who ask: conversations of several turns that share beginnings, two of which differ in what is heard only."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from qwen3_omni.audio import AudioClip, encode_clip, synthesise_speech
from qwen3_omni.conversation import Conversation

from .scheduler import Request

SYSTEM_PROMPT = "You are a librarian. Answer in a few words, and only from what you have been told."
NUM_TURNS = 3
REPLY_TOKENS = 32
_CLIP_S = 3.0
_PASSAGE_CHARACTERS = 180


class Client:
    """One conversation. The next turn is asked some steps after the last one was answered.

    Args:
        name: of the conversation.
        texts: what the user says, turn by turn.
        clip: what is heard in the first turn.
        first_step: when the first turn is asked.
        pause: steps between an answer and the next question.
        hangs_up: asked of every turn but the first at each step; whether the client gives it up, and goes.
    """

    def __init__(
        self,
        name: str,
        texts: Sequence[str],
        clip: AudioClip | None,
        *,
        first_step: int,
        pause: int,
        hangs_up: Callable[[Request], bool] | None = None,
    ) -> None:
        self._name = name
        self._texts = texts
        self._clip = clip
        self._next_step = first_step
        self._pause = pause
        self._hangs_up = hangs_up
        self._turn = 0
        self._conversation = Conversation()
        self._conversation.add_system(SYSTEM_PROMPT)
        self.request: Request | None = None

    @property
    def is_done(self) -> bool:
        """Whether this client will ask nothing more, and waits for nothing."""
        return self.request is None and self._turn == len(self._texts)

    def ask(self, step: int) -> Request | None:
        """The next turn, if it is time for it."""
        if self.request is not None or self.is_done or step < self._next_step:
            return None
        self._conversation.add_user(self._texts[self._turn], self._clip if self._turn == 0 else None)
        self._turn += 1
        self.request = Request(f"{self._name}, turn {self._turn}", self._conversation.prompt(), REPLY_TOKENS)
        return self.request

    def hang_up(self) -> Request | None:
        """The request that this client gives up now, if any; nothing more comes from it then."""
        if self.request is None or self._hangs_up is None or self._turn == 1 or not self._hangs_up(self.request):
            return None
        request, self.request = self.request, None
        self._turn = len(self._texts)
        return request

    def hear(self, reply: tuple[int, ...], step: int) -> None:
        """Take the answer to the turn that was asked last."""
        self._conversation.add_assistant(reply)
        self._next_step = step + self._pause
        self.request = None


def make_clients(count: int, passages: Sequence[str], seed: int) -> list[Client]:
    """Clients 0 and 1 say the same, but one hears another clip; 2 and 3 ask the same first; two hang up in turn 2: 4
    while its prompt is computed, 5 while it is answered.

    Args:
        count: at least 6.
        passages: what they talk about.
        seed: of what they say, and of when.
    """
    rng = random.Random(seed)
    said = [[_some_text(rng, passages) for _ in range(NUM_TURNS)] for _ in range(count)]
    said[1] = said[0]
    said[3][0] = said[2][0]
    clips = {number: encode_clip(synthesise_speech(seconds=_CLIP_S, seed=seed + number)) for number in (0, 1)}
    hangs_up = {
        4: lambda request: 0 < request.num_computed < len(request.prompt),
        5: lambda request: len(request.reply) == REPLY_TOKENS // 2,
    }
    return [
        Client(
            f"client {number}",
            texts,
            clips.get(number),
            first_step=rng.randrange(count),
            pause=rng.randrange(1, 10),
            hangs_up=hangs_up.get(number),
        )
        for number, texts in enumerate(said)
    ]


def _some_text(rng: random.Random, passages: Sequence[str]) -> str:
    return rng.choice(passages)[: rng.randrange(_PASSAGE_CHARACTERS // 2, _PASSAGE_CHARACTERS)]
