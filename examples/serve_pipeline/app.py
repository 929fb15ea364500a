"""The pipeline's HTTP side, and how all of it is put together: ``serve run serve_pipeline.app:build``.

``POST /chat`` takes the whole conversation, as OpenAI's chat API does, and answers in lines of JSON (NDJSON) as tokens
and codes come. Nothing is kept from one request to the next but the cache, so any ingress can serve any turn.
"""

import asyncio
import base64
import binascii
import hashlib
import json
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import FastAPI, HTTPException
from fastapi.responses import StreamingResponse
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field
from qwen3_omni.audio import encode_clip, from_wav
from qwen3_omni.conversation import Conversation, Prompt
from qwen3_omni.tiny_model import STORED_LAYERS
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from hs_cache.integrations.serve import router_config

from .messages import SpeakRequest, Speech, ThinkRequest, Thought
from .settings import PipelineSettings
from .talker_stage import TalkerStage
from .thinker_stage import ThinkerStage

logger = logging.getLogger("ray.serve")

_ATTEMPTS = 3
_FIRST_LINE_S = 60.0
"""For the first line, and so for a stage that is still starting."""

_UNAVAILABLE = "the turn could not be answered, try again later"
_MAX_PROMPT_TOKENS = 16_384

api = FastAPI(title="Qwen3-Omni, thinker and talker")


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid")


class TextPart(_Part):
    """Text of a message."""

    type: Literal["text"]
    text: str


class AudioPart(_Part):
    """A clip of a message: a WAV file, 16 bit, mono, 16 kHz, in base64."""

    type: Literal["audio"]
    wav: str


class Message(_Part):
    """One turn. An assistant's content is what it answered, as it came: one character per byte (Latin-1), since a model
    with random weights knows no UTF-8."""

    role: Literal["user", "assistant"]
    content: str | list[Annotated[TextPart | AudioPart, Field(discriminator="type")]]


class ChatRequest(_Part):
    """The body of ``POST /chat``.

    Attributes:
        messages: the conversation, beginning and ending with the user.
        max_tokens: exactly as many are generated.
        max_codes: exactly as many steps are spoken, and sent, 0 for none.
        audio: send the waveform too.
        use_cache: False restores and stores nothing, for comparison.
    """

    messages: list[Message] = Field(min_length=1)
    max_tokens: int = Field(16, ge=1, le=1024)
    max_codes: int = Field(16, ge=0, le=1024)
    audio: bool = False
    use_cache: bool = True


def make_prompt(system_prompt: str, messages: list[Message]) -> Prompt:
    """The conversation as token ids.

    Raises:
        HTTPException: 422, it can't be one.
    """
    conversation = Conversation()
    conversation.add_system(system_prompt)
    for number, message in enumerate(messages):
        if message.role != ("user", "assistant")[number % 2]:
            raise HTTPException(422, f"messages[{number}].role: got {message.role!r}, expected them to take turns")
        text, clip = _content(number, message)
        if message.role == "assistant":
            try:
                conversation.add_assistant(tuple(text.encode("latin-1")))
            except UnicodeEncodeError as error:
                raise HTTPException(422, f"messages[{number}].content: not what an assistant answered") from error
            continue
        try:
            conversation.add_user(text, None if clip is None else encode_clip(clip))
        except ValueError as error:
            raise HTTPException(422, f"messages[{number}].content: {error}") from error
    if len(messages) % 2 == 0:
        raise HTTPException(422, "messages: the last is the assistant's, expected the user's")
    prompt = conversation.prompt()
    if len(prompt) > _MAX_PROMPT_TOKENS:
        raise HTTPException(422, f"messages: got {len(prompt)} tokens, expected at most {_MAX_PROMPT_TOKENS}")
    return prompt


def _content(number: int, message: Message) -> tuple[str, NDArray[np.int16] | None]:
    if isinstance(message.content, str):
        return message.content, None
    clips = [_samples(number, part.wav) for part in message.content if isinstance(part, AudioPart)]
    if len(clips) > 1 or (clips and message.role == "assistant"):
        raise HTTPException(422, f"messages[{number}].content: got {len(clips)} clips, expected one, and the user's")
    text = "".join(part.text for part in message.content if isinstance(part, TextPart))
    return text, clips[0] if clips else None


def _samples(number: int, encoded: str) -> NDArray[np.int16]:
    try:
        return from_wav(base64.b64decode(encoded, validate=True))
    except binascii.Error as error:
        raise HTTPException(422, f"messages[{number}].content: not base64: {error}") from error
    except ValueError as error:
        raise HTTPException(422, f"messages[{number}].content: {error}") from error


def _unavailable() -> HTTPException:
    return HTTPException(503, _UNAVAILABLE, {"Retry-After": "5"})


def _line(name: str, value: Any) -> str:
    return json.dumps({name: value}) + "\n"


# Serve pickles the API when it sees this class, and with it what is above.
@serve.ingress(api)
class Chat:
    """Tokenises, passes a turn through both stages, and streams what comes of it."""

    def __init__(self, settings: PipelineSettings, thinker: DeploymentHandle, talker: DeploymentHandle) -> None:
        self._system_prompt = settings.system_prompt
        self._think = thinker.options(method_name="think", stream=True)
        self._speak = talker.options(method_name="speak", stream=True)

    @api.get("/healthz")
    async def healthz(self) -> dict[str, str]:
        """For load balancers."""
        return {"status": "ok"}

    @api.post("/chat")
    async def chat(self, request: ChatRequest) -> StreamingResponse:
        """Answer a turn; lines of JSON with ``text``, ``codes``, and at the end ``done`` or ``error``. 503 if there is
        not even a first one.
        """
        lines = self._lines(make_prompt(self._system_prompt, request.messages), request)
        try:
            first = await asyncio.wait_for(anext(lines), _FIRST_LINE_S)
        except asyncio.TimeoutError as error:
            raise _unavailable() from error

        async def stream() -> AsyncIterator[str]:
            yield first
            async for line in lines:
                yield line

        return StreamingResponse(stream(), media_type="application/x-ndjson")

    async def _lines(self, prompt: Prompt, request: ChatRequest) -> AsyncIterator[str]:
        started = time.perf_counter()
        sent = {"text": 0, "codes": 0}
        use_cache = request.use_cache
        for attempt in range(1, _ATTEMPTS + 1):
            seen = dict.fromkeys(sent, 0)
            try:
                async for name, value in self._events(prompt, request, use_cache):
                    if name == "done":
                        seconds = time.perf_counter() - started
                        yield _line(name, {**value, "attempts": attempt, "seconds": seconds})
                        return
                    seen[name] += 1
                    if seen[name] > sent[name]:  # each attempt gives the same; what the client has is left out
                        sent[name] = seen[name]
                        yield _line(name, value)
            except (RayError, RayServeException) as error:
                logger.warning("attempt %d at a turn failed: %s", attempt, error)
                use_cache = use_cache and attempt < _ATTEMPTS - 1
        if not any(sent.values()):
            raise _unavailable()
        yield _line("error", _UNAVAILABLE)

    async def _events(self, prompt: Prompt, request: ChatRequest, use_cache: bool) -> AsyncIterator[tuple[str, Any]]:
        thought: Thought | None = None
        asked = ThinkRequest(prompt.token_ids, prompt.mm_spans, prompt.mel, request.max_tokens, use_cache)
        async for item in self._think.remote(asked):
            if isinstance(item, Thought):
                thought = item
            else:
                yield "text", chr(item)
        if thought is None:
            raise RayServeException("the thinker's stream ended early")
        done = {
            "prompt_tokens": len(prompt),
            "restored_tokens": thought.restored_tokens,
            "moved_tokens": thought.moved_tokens,
            "thinker": asdict(thought.who),
        }
        if request.max_codes:
            speech: Speech | None = None
            async for item in self._speak.remote(SpeakRequest(prompt.token_ids, thought, request.max_codes)):
                if isinstance(item, Speech):
                    speech = item
                else:
                    yield "codes", item
            if speech is None:
                raise RayServeException("the talker's stream ended early")
            samples = speech.waveform.astype("<f4").tobytes()
            done |= {
                "talker": asdict(speech.who),
                "rows_sha256": speech.row_digests,
                "waveform_sha256": hashlib.sha256(samples).hexdigest(),
            }
            if request.audio:
                done["waveform_f32"] = base64.b64encode(samples).decode()
        yield "done", done


def build(settings: PipelineSettings) -> serve.Application:
    """The application, for ``serve run`` and config files, which change numbers of its deployments by name.

    What must fit together, the thinkers' key space and the router's, is settled here.
    """
    return pipeline(settings)


def pipeline(
    settings: PipelineSettings,
    *,
    thinkers: int = 2,
    talkers: int = 2,
    ingresses: int = 2,
    max_replicas_per_node: int | None = None,
) -> serve.Application:
    """The application.

    Args:
        settings: for all deployments.
        thinkers, talkers, ingresses: replicas.
        max_replicas_per_node: of thinkers, and of talkers; by default Serve spreads them, but some may share a node.
    """
    affinity = router_config(**settings.router, **settings.key_space, layers=list(STORED_LAYERS))
    stage: dict[str, Any] = {
        "max_ongoing_requests": 4,
        "max_replicas_per_node": max_replicas_per_node,
        "ray_actor_options": {"num_cpus": 0.25},  # the model is tiny; a real one has num_gpus here
    }
    routed = {"request_router_config": affinity} if settings.affine else {}
    thinker = serve.deployment(ThinkerStage).options(name="Thinker", num_replicas=thinkers, **stage, **routed)
    talker = serve.deployment(TalkerStage).options(name="Talker", num_replicas=talkers, **stage)
    chat = serve.deployment(Chat).options(
        name="Chat", num_replicas=ingresses, max_ongoing_requests=100, ray_actor_options={"num_cpus": 0.1}
    )
    return chat.bind(settings, thinker.bind(settings), talker.bind(settings))
