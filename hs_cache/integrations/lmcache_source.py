"""The KV actor's side of ``kv_source: lmcache``: asks its node's LMCache engines. Needs neither LMCache nor torch."""

import logging
import selectors
import socket
import time
from collections.abc import Sequence
from contextlib import suppress

from hs_cache.config import CacheConfig
from hs_cache.errors import InvalidInputError
from hs_cache.integrations.lmcache_wire import (
    HELLO,
    MAX_CHUNKS,
    TOKEN_BYTES,
    Question,
    WireError,
    read_answer,
    receive,
    require_same_user,
    send,
)
from hs_cache.keys import KEY_BYTES
from hs_cache.kv_presence import KVStatistics, Presence, united

logger = logging.getLogger(__name__)

_MAX_RANKS = 256
_SHARE_OF_TIME = 0.8
"""What each side lets the next one have; the rest is for the answer's way back."""

_REST_S = 0.05
"""For an answer of which a part is there when time is up."""

_QUIET_S = 1.0
"""How long an engine is left alone after it kept a question waiting for nothing: the KV actor has one thread."""

_SETTLING_S = 3.0
"""Three heartbeats: by then a new KV actor, or one that lost an engine, has heard of every engine that there is. Before
that it can't say that none has a chunk."""


class LMCacheSource:
    """A `hs_cache.kv_presence.KVSource` that asks the engines which have made themselves known, one question each.

    Of the ranks of an engine all must have a chunk; it is absent when one says so. Of several engines one that has it
    is enough. An engine that refuses a connection or ends it is forgotten until it makes itself known again.

    Args:
        config: the service's settings.
    """

    def __init__(self, config: CacheConfig) -> None:
        self._longest_s = config.rpc_timeout_s
        self._engines: dict[str, dict[int, _Rank]] = {}
        self._settled_at = time.monotonic() + _SETTLING_S
        self._told = 0
        self._lost = 0

    def register_engine(self, name: str, rank: int, address: str, token: bytes) -> None:
        """An engine's rank answers at this address of the abstract namespace, to whoever has the token.

        Raises:
            InvalidInputError: an argument is wrong, or there are too many.
        """
        if not isinstance(name, str):
            raise InvalidInputError(f"name: got {type(name).__name__}, expected str")
        if not isinstance(rank, int) or isinstance(rank, bool) or rank < 0:
            raise InvalidInputError(f"rank: got {rank!r}, expected an int, at least 0")
        if not isinstance(address, str) or not 0 < len(address.encode()) < 100:
            raise InvalidInputError(f"address: got {address!r:.120}, expected the name of an abstract socket")
        if not isinstance(token, bytes) or len(token) != TOKEN_BYTES:
            raise InvalidInputError(f"token: expected {TOKEN_BYTES} bytes")
        ranks = self._engines.get(name, {})
        known = ranks.get(rank)
        if known is not None and known.address == address:
            return
        if known is None and sum(map(len, self._engines.values())) >= _MAX_RANKS:
            raise InvalidInputError(f"rank: got one more than the {_MAX_RANKS} that a node's KV actor asks")
        if known is not None:  # a new process in its place
            known.close()
        self._told += 1
        self._engines.setdefault(name, ranks)[rank] = _Rank(name, rank, address, token)

    def presence(self, names: bytes, tags: tuple[tuple[str, str], ...], timeout_s: float) -> bytes:
        """See `hs_cache.kv_presence.KVSource`. Never raises for an engine's trouble: its chunks are unknown then."""
        count = len(names) // KEY_BYTES
        asked = min(count, MAX_CHUNKS)
        limit_s = min(timeout_s, self._longest_s) * _SHARE_OF_TIME
        deadline = time.monotonic() + limit_s
        question = Question(names[: asked * KEY_BYTES], tags, limit_s * _SHARE_OF_TIME)
        said = self._ask(question, asked, deadline) if asked else []
        answers = united(said, asked) if said else bytes([Presence.UNKNOWN]) * asked
        if time.monotonic() < self._settled_at:
            answers = answers.replace(bytes([Presence.ABSENT]), bytes([Presence.UNKNOWN]))
        return answers + bytes([Presence.UNKNOWN]) * (count - asked)

    def note_stored(self, names: bytes, engine: str) -> None:
        """Nothing: engines are asked, not remembered."""

    def stats(self) -> KVStatistics:
        """Counts. `reports_total` is how often an engine's rank became known, `gaps_total` how often one was lost."""
        return KVStatistics(
            present=0,
            absent=0,
            unknown=0,
            unlisted=Presence.UNKNOWN.name.lower(),
            reports_total=self._told,
            engines=tuple(sorted(self._engines)),
            gaps_total=self._lost,
        )

    def close(self) -> None:
        """End all connections; idempotent."""
        for ranks in self._engines.values():
            for one in ranks.values():
                one.close()
        self._engines.clear()

    def _ask(self, question: Question, count: int, deadline: float) -> list[bytes]:
        """What each engine says; all are asked before the first is waited for."""
        encoded = question.encoded()
        ranks = [one for ranks in self._engines.values() for one in ranks.values()]
        answers = _answers([one for one in ranks if one.ask(encoded, deadline)], count, deadline)
        by_engine: dict[str, list[bytes]] = {}
        for one in ranks:
            by_engine.setdefault(one.engine, []).append(answers.get(one) or bytes([Presence.UNKNOWN]) * count)
            if one.gone:
                self._forget(one)
        return [_of_all_ranks(answers, count) for answers in by_engine.values()]

    def _forget(self, rank: "_Rank") -> None:
        ranks = self._engines.get(rank.engine, {})
        ranks.pop(rank.rank, None)
        if not ranks:
            self._engines.pop(rank.engine, None)
        self._lost += 1
        self._settled_at = time.monotonic() + _SETTLING_S
        logger.warning("LMCache engine %r, rank %d, is gone: its KV is unknown", rank.engine, rank.rank)


def _answers(waiting: list["_Rank"], count: int, deadline: float) -> "dict[_Rank, bytes | None]":
    """Answers as they come: that of a quick engine counts also where a slow one takes all the time."""
    answers: dict[_Rank, bytes | None] = {}
    with selectors.DefaultSelector() as selector:
        for one in waiting:
            selector.register(one.fileno(), selectors.EVENT_READ, one)
        while selector.get_map() and (ready := selector.select(max(deadline - time.monotonic(), 0.0))):
            for key, _ in ready:
                # What has begun to come is all on its way: an engine sends its answer in one piece.
                until = max(deadline, time.monotonic() + _REST_S)
                rank: _Rank = key.data
                if rank.greeted(until):
                    selector.unregister(key.fd)
                    answers[rank] = rank.answer(count, until)
        for key in selector.get_map().values():
            key.data.give_up()
    return answers


def _of_all_ranks(answers: Sequence[bytes], count: int) -> bytes:
    presence = bytearray()
    for position in range(count):
        states = {answer[position] for answer in answers}
        if Presence.ABSENT in states:
            presence.append(Presence.ABSENT)
        else:
            presence.append(Presence.PRESENT if states == {Presence.PRESENT} else Presence.UNKNOWN)
    return bytes(presence)


class _Rank:
    """The connection to one rank of an engine, made when it is asked first.

    Attributes:
        gone: it refused or ended a connection, so it isn't there any more.
    """

    def __init__(self, engine: str, rank: int, address: str, token: bytes) -> None:
        self.engine = engine
        self.rank = rank
        self.address = address
        self.gone = False
        self._token = token
        self._connection: socket.socket | None = None
        self._greeted = False
        self._quiet_until = 0.0

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def ask(self, question: bytes, deadline: float) -> bool:
        """Send a question; whether an answer may come. Waits for nothing but room in the socket."""
        if time.monotonic() < self._quiet_until:
            return False
        try:
            if self._connection is None:
                self._connection = self._connected()
                # An engine that hangs would keep a greeting waiting, and with it the questions to others.
                question = HELLO + self._token + question
                self._greeted = False
            send(self._connection, question, deadline)
        except (WireError, OSError) as error:
            self._fail(error)
            return False
        return True

    def fileno(self) -> int:
        """Of the connection, to wait for an answer."""
        assert self._connection is not None
        return self._connection.fileno()

    def give_up(self) -> None:
        """No answer came in time."""
        self._fail(TimeoutError("no answer in time"))

    def greeted(self, deadline: float) -> bool:
        """Take in what has come; whether that is not only a greeting."""
        if self._greeted:
            return True
        assert self._connection is not None
        try:
            if receive(self._connection, len(HELLO), deadline) != HELLO:
                raise WireError("it speaks another version")
            self._greeted = True
        except (WireError, OSError) as error:
            self._fail(error)
            return True
        return False

    def answer(self, count: int, deadline: float) -> bytes | None:
        """The answer that has begun to come; None when that breaks off."""
        if self._connection is None:
            return None
        try:
            return read_answer(self._connection, count, deadline)
        except (WireError, OSError) as error:
            self._fail(error)
            return None

    def _connected(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.setblocking(False)
            connection.connect(
                "\0" + self.address
            )  # refused, accepted or, where too many wait already, put off: at once
            require_same_user(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _fail(self, error: Exception) -> None:
        # An answer that comes late must not be taken for that to the next question.
        with suppress(OSError):
            self.close()
        if isinstance(error, TimeoutError | BlockingIOError):
            self._quiet_until = time.monotonic() + _QUIET_S
        else:
            self.gone = True
