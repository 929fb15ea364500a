"""The KV actor's side of ``kv_source: lmcache``: asks its node's LMCache engines. Needs neither LMCache nor torch."""

import logging
import selectors
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from hs_cache.config import CacheConfig
from hs_cache.errors import InvalidInputError
from hs_cache.integrations.lmcache_wire import (
    HELLO,
    MAX_CHUNKS,
    TOKEN_BYTES,
    Question,
    Registration,
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

_SEND_SHARE = 0.25
"""Of what is left of the time, for a question that the socket has no room for: others are to be asked too."""

_REST_S = 0.05
"""For an answer of which a part is there when time is up."""

_QUIET_S = 1.0
_MAX_QUIET_S = 8.0
"""How long an engine is left alone after it kept a question waiting for nothing, or can't be reached: that much first,
twice as long each time, until it answers. The KV actor has one thread."""

_SETTLING_S = 3.0
"""Three heartbeats: by then a new KV actor has heard of every engine that there is, and before that it can't say that
none has a chunk. An engine that can't be reached and hasn't been heard of for so long is gone."""


class LMCacheSource:
    """A `hs_cache.kv_presence.KVSource` that asks the engines which have made themselves known, one question each.

    Of the ranks of an engine all must have a chunk; it is absent when one says so, and unknown while one is missing. Of
    several engines one that has it is enough. An engine that names chunks otherwise than the service is never asked, so
    unknown, and so is one that can't be reached, for as long as it keeps making itself known.

    Args:
        config: the service's settings.
    """

    def __init__(self, config: CacheConfig) -> None:
        self._config = config
        self._engines: dict[str, _Engine] = {}
        self._settled_at = time.monotonic() + _SETTLING_S
        self._told = 0
        self._lost = 0

    def register_engine(self, registration: Registration) -> None:
        """A rank of an engine answers, and says so every second.

        Raises:
            InvalidInputError: something in it is wrong, or there are too many.
        """
        _check(registration)
        engine = self._engines.get(registration.engine) or _Engine()
        known = engine.ranks.get(registration.rank)
        if known is None and sum(len(one.ranks) for one in self._engines.values()) >= _MAX_RANKS:
            raise InvalidInputError(f"rank: got one more than the {_MAX_RANKS} that a node's KV actor asks")
        engine.num_ranks = registration.num_ranks
        if known is not None and known.address == registration.address:
            known.heard_at = time.monotonic()
            return
        if known is not None:  # a new process in its place
            known.close()
        engine.ranks[registration.rank] = _Rank(registration, registration.naming.difference(self._config))
        self._engines[registration.engine] = engine
        self._told += 1

    def presence(self, names: bytes, tags: tuple[tuple[str, str], ...], timeout_s: float) -> bytes:
        """See `hs_cache.kv_presence.KVSource`. Never raises for an engine's trouble: its chunks are unknown then."""
        count = len(names) // KEY_BYTES
        asked = min(count, MAX_CHUNKS)
        limit_s = min(timeout_s, self._config.rpc_timeout_s) * _SHARE_OF_TIME
        deadline = time.monotonic() + limit_s
        question = Question(names[: asked * KEY_BYTES], tags, limit_s * _SHARE_OF_TIME)
        answers = self._ask(question, asked, deadline) if asked else b""
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
        for rank in self._ranks():
            rank.close()
        self._engines.clear()

    def _ranks(self) -> "list[_Rank]":
        return [rank for engine in self._engines.values() for rank in engine.ranks.values()]

    def _ask(self, question: Question, count: int, deadline: float) -> bytes:
        """What all engines together say. All are asked before the first is waited for, and none once the others have
        every chunk."""
        self._forget_those_gone()
        encoded, ranks = question.encoded(), self._ranks()
        reachable = [rank for rank in ranks if rank.reachable]
        answers: dict[_Rank, bytes] = {}
        said = bytes([Presence.UNKNOWN]) * count
        with selectors.DefaultSelector() as selector:
            for rank in ranks:
                if rank.ask(encoded, count, deadline):
                    selector.register(rank.fileno(), selectors.EVENT_READ, rank)
            while (
                said.count(Presence.PRESENT) < count
                and selector.get_map()
                and (ready := selector.select(max(deadline - time.monotonic(), 0.0)))
            ):
                for key, _ in ready:
                    # What has begun to come is all on its way: an engine sends its answer in one piece.
                    until = max(deadline, time.monotonic() + _REST_S)
                    rank = key.data
                    if (answer := rank.take(until)) is not None:
                        answers[rank] = answer
                        said = united([engine.says(answers, count) for engine in self._engines.values()], count)
                    if not rank.waits:
                        selector.unregister(key.fd)
            for key in list(selector.get_map().values()):
                if said.count(Presence.PRESENT) < count:
                    key.data.give_up()
                else:
                    key.data.leave()
        self._lost += sum(not rank.reachable for rank in reachable)
        return said

    def _forget_those_gone(self) -> None:
        unheard = time.monotonic() - _SETTLING_S
        for rank in self._ranks():
            if not rank.reachable and rank.heard_at < unheard:
                ranks = self._engines[rank.engine].ranks
                del ranks[rank.rank]
                if not ranks:
                    del self._engines[rank.engine]
                logger.info("LMCache engine %r, rank %d, is gone", rank.engine, rank.rank)


def _check(registration: Registration) -> None:
    if not isinstance(registration, Registration):
        raise InvalidInputError(f"registration: got {type(registration).__name__}, expected a Registration")
    engine, rank, ranks = registration.engine, registration.rank, registration.num_ranks
    if not isinstance(engine, str):
        raise InvalidInputError(f"engine: got {type(engine).__name__}, expected str")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 0:
        raise InvalidInputError(f"rank: got {rank!r}, expected an int, at least 0")
    if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
        raise InvalidInputError(f"num_ranks: got {ranks!r}, expected an int, at least 1")
    address, token = registration.address, registration.token
    if not isinstance(address, str) or not 0 < len(address.encode()) < 100:
        raise InvalidInputError(f"address: got {address!r:.120}, expected the name of an abstract socket")
    if not isinstance(token, bytes) or len(token) != TOKEN_BYTES:
        raise InvalidInputError(f"token: expected {TOKEN_BYTES} bytes")


class _Engine:
    """The ranks that have made themselves known, by number."""

    def __init__(self) -> None:
        self.num_ranks = 1
        self.ranks: dict[int, _Rank] = {}

    def says(self, answers: "Mapping[_Rank, bytes]", count: int) -> bytes:
        """What it says as a whole. A rank that is missing, or hasn't answered, may have a chunk or not."""
        unknown = bytes([Presence.UNKNOWN]) * count
        said = [answers.get(rank, unknown) for rank in self.ranks.values()]
        return _of_all_ranks([*said, unknown] if len(said) < self.num_ranks else said, count)


def _of_all_ranks(answers: Sequence[bytes], count: int) -> bytes:
    if len(answers) == 1:
        return answers[0]
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

    An answer that nobody waits for any more is owed: it is taken in before the next question is sent.

    Attributes:
        heard_at: when it last made itself known.
        reachable: whether it names chunks as the service does, and the last connection to it came about and held.
    """

    def __init__(self, registration: Registration, difference: str) -> None:
        self.engine = registration.engine
        self.rank = registration.rank
        self.address = registration.address
        self.heard_at = time.monotonic()
        self.reachable = not difference
        self._never_asked = bool(difference)
        self._warned = False
        self._token = registration.token
        self._connection: socket.socket | None = None
        self._greeted = False
        self._expected: int | None = None
        self._next: tuple[bytes, int] | None = None
        self._quiet_s = _QUIET_S
        self._quiet_until = 0.0
        if difference:
            self._warn(difference)

    @property
    def waits(self) -> bool:
        """Whether an answer to the last question may still come."""
        return self._connection is not None and (self._expected is not None or self._next is not None)

    def close(self) -> None:
        self._expected = self._next = None
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def ask(self, question: bytes, count: int, deadline: float) -> bool:
        """Send a question about `count` chunks; whether an answer may come. Waits only for room in the socket."""
        if self._never_asked or time.monotonic() < self._quiet_until:
            return False
        self._next = (question, count)
        if self._expected is None:
            self._send_next(deadline)
        return self.waits

    def fileno(self) -> int:
        """Of the connection, to wait for an answer."""
        assert self._connection is not None
        return self._connection.fileno()

    def leave(self) -> None:
        """The answer isn't needed any more."""
        self._next = None

    def give_up(self) -> None:
        """No answer came in time."""
        self._fail(TimeoutError("no answer in time"))

    def take(self, deadline: float) -> bytes | None:
        """Take in one thing that has begun to come; the answer to the last question if it is that."""
        assert self._connection is not None
        try:
            if not self._greeted:
                if receive(self._connection, len(HELLO), deadline) != HELLO:
                    raise WireError("it speaks another version")
                self._greeted = True
                return None
            if self._expected is None:
                raise WireError("an answer to no question")
            answer = read_answer(self._connection, self._expected, deadline)
        except (WireError, OSError) as error:
            self._fail(error)
            return None
        self.reachable = True
        self._quiet_s = _QUIET_S
        self._expected = None
        if self._next is None:
            return answer
        self._send_next(deadline)
        return None

    def _send_next(self, deadline: float) -> None:
        assert self._next is not None
        (question, count), self._next = self._next, None
        try:
            if self._connection is None:
                self._connection = self._connected()
                # An engine that hangs would keep a greeting waiting, and with it the questions to others.
                question = HELLO + self._token + question
                self._greeted = False
            now = time.monotonic()
            send(self._connection, question, now + (deadline - now) * _SEND_SHARE)
        except (WireError, OSError) as error:
            self._fail(error)
            return
        self._expected = count

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
        self._quiet_until = time.monotonic() + self._quiet_s
        self._quiet_s = min(2 * self._quiet_s, _MAX_QUIET_S)
        if not isinstance(error, TimeoutError | BlockingIOError):
            self.reachable = False
            self._warn(f"{type(error).__name__}: {error}")

    def _warn(self, reason: str) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "LMCache engine %r, rank %d, can't be asked, so its KV counts as unknown: %s",
                self.engine,
                self.rank,
                reason,
            )
