"""What a `KVActor` and an LMCache engine of its node say to each other, over a Unix socket of the abstract namespace.

Such a socket is no file: it is gone with the process that listens, also after ``kill -9``. Both sides look at the
other's user id (``SO_PEERCRED``), and the asking side shows a token that the engine made up and told the `KVActor`
through Ray.

Numbers are big-endian. No length is taken on trust::

    asking side   "hsLM" ‖ version (1 byte) ‖ token (16 bytes)
    engine        "hsLM" ‖ version (1 byte)                        or the connection is closed
    as often as it likes, without waiting for that greeting:
    asking side   u32 nbytes of what follows ‖ u32 milliseconds that it waits ‖ u16 number of tags
                  ‖ per tag: u16 nbytes ‖ name ‖ u16 nbytes ‖ value        (UTF-8)
                  ‖ 16 bytes per chunk: its name
    engine        u32 number of chunks ‖ 1 byte per chunk: its `hs_cache.kv_presence.Presence`
"""

import os
import socket
import struct
import time
from dataclasses import dataclass

from hs_cache.keys import KEY_BYTES
from hs_cache.lmcache_names import EngineNaming

TOKEN_BYTES = 16
MAX_CHUNKS = 65_536
"""Of one question. What comes behind is unknown."""

HELLO = b"hsLM\x01"

_MAX_TAGS = 64
_MAX_TAG_BYTES = 4096
_HEAD = struct.Struct(">IH")
_LENGTH = struct.Struct(">I")
_SHORT = struct.Struct(">H")
_MAX_BODY = _HEAD.size + _MAX_TAGS * 2 * (_SHORT.size + _MAX_TAG_BYTES) + MAX_CHUNKS * KEY_BYTES
_CREDENTIALS = struct.Struct("3i")


class WireError(Exception):
    """What came is not what the protocol says, or the other side is not who it should be."""


@dataclass(frozen=True, slots=True)
class Registration:
    """What one rank of an engine tells the `KVActor` of its node, through Ray, so that it is asked.

    Attributes:
        engine: the same for all ranks of the engine, and for no other engine of the node.
        rank: its number.
        num_ranks: how many ranks of the engine have to answer on this node.
        address: where it listens, in the abstract namespace; no two registrations share one.
        token: for whoever connects.
        naming: how it names chunks.
    """

    engine: str
    rank: int
    num_ranks: int
    address: str
    token: bytes
    naming: EngineNaming


@dataclass(frozen=True, slots=True)
class Question:
    """Which of the chunks of `names` (16 bytes each) there are, with these tags; asked for `timeout_s` seconds."""

    names: bytes
    tags: tuple[tuple[str, str], ...]
    timeout_s: float

    def encoded(self) -> bytes:
        """As it is sent.

        Raises:
            WireError: tags are too many or too long.
        """
        texts = [text.encode() for tag in self.tags for text in tag]
        if len(self.tags) > _MAX_TAGS or any(len(text) > _MAX_TAG_BYTES for text in texts):
            raise WireError(f"more than {_MAX_TAGS} tags, or one of more than {_MAX_TAG_BYTES} bytes")
        names = self.names[: MAX_CHUNKS * KEY_BYTES]
        parts = [_HEAD.pack(min(max(int(self.timeout_s * 1000), 0), 2**32 - 1), len(self.tags))]
        for text in texts:
            parts += (_SHORT.pack(len(text)), text)
        body = b"".join([*parts, names])
        return _LENGTH.pack(len(body)) + body


def read_question(connection: socket.socket, body_timeout_s: float) -> Question | None:
    """The next question; None when the other side has gone. Waits for as long as none comes, for the rest of one that
    has begun `body_timeout_s`.

    Raises:
        WireError, OSError: what came is no question, or did not come in time.
    """
    connection.settimeout(None)
    first = connection.recv(1)
    if not first:
        return None
    deadline = time.monotonic() + body_timeout_s
    (nbytes,) = _LENGTH.unpack(first + receive(connection, _LENGTH.size - 1, deadline))
    if not _HEAD.size <= nbytes <= _MAX_BODY:
        raise WireError(f"a question of {nbytes} bytes")
    return _decoded(receive(connection, nbytes, deadline))


def _decoded(body: bytes) -> Question:
    milliseconds, num_tags = _HEAD.unpack_from(body)
    if num_tags > _MAX_TAGS:
        raise WireError(f"{num_tags} tags")
    texts, at = [], _HEAD.size
    try:
        for _ in range(2 * num_tags):
            (size,) = _SHORT.unpack_from(body, at)
            at += _SHORT.size + size
            if size > _MAX_TAG_BYTES or at > len(body):
                raise WireError(f"a tag of {size} bytes")
            texts.append(body[at - size : at].decode())
    except (struct.error, UnicodeDecodeError) as error:
        raise WireError(f"tags that can't be read: {error}") from error
    names = body[at:]
    if len(names) % KEY_BYTES or len(names) > MAX_CHUNKS * KEY_BYTES:
        raise WireError(f"{len(names)} bytes of names")
    return Question(names, tuple(zip(texts[::2], texts[1::2], strict=True)), milliseconds / 1000)


def encode_answer(presence: bytes) -> bytes:
    """As it is sent."""
    return _LENGTH.pack(len(presence)) + presence


def read_answer(connection: socket.socket, count: int, deadline: float) -> bytes:
    """The answer to a question about `count` chunks.

    Raises:
        WireError, OSError: it is about another number, or did not come in time.
    """
    (answered,) = _LENGTH.unpack(receive(connection, _LENGTH.size, deadline))
    if answered != count:
        raise WireError(f"an answer of {answered} chunks to a question of {count}")
    return receive(connection, count, deadline)


def receive(connection: socket.socket, nbytes: int, deadline: float) -> bytes:
    """Exactly `nbytes`, by that time of the monotonic clock.

    Raises:
        WireError: the other side has gone.
        OSError: they did not come in time (TimeoutError among these), or the connection broke.
    """
    parts = bytearray()
    while len(parts) < nbytes:
        _limit(connection, deadline)
        part = connection.recv(nbytes - len(parts))
        if not part:
            raise WireError("the other side has gone")
        parts += part
    return bytes(parts)


def send(connection: socket.socket, data: bytes, deadline: float) -> None:
    """All of `data`, by that time of the monotonic clock; raises OSError where that can't be."""
    _limit(connection, deadline)
    connection.sendall(data)


def require_same_user(connection: socket.socket) -> None:
    """Raises `WireError` where the process at the other end runs as another user."""
    _, user, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if user != os.geteuid():
        raise WireError(f"the other side is user {user}, not {os.geteuid()}")


def _limit(connection: socket.socket, deadline: float) -> None:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("no time left")
    connection.settimeout(left)
