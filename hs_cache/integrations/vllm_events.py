"""Listens to the KV events of vLLM engines, and answers for the KV of all of them (``kv_source: vllm_events``).

Needs the extra ``vllm-events``. vLLM itself isn't needed; how it publishes is described in
vllm/distributed/kv_events.py (vLLM, Apache-2.0): a PUB socket whose messages are topic, number (8 bytes, big-endian)
and payload, and optionally a ROUTER socket that answers a number with all batches from there on that it still has, and
with -1 at the end.
"""

import logging
import threading
import time
from dataclasses import dataclass
from typing import Any

from hs_cache.config import CacheConfig, KVEventsSource
from hs_cache.errors import ConfigError, InvalidInputError
from hs_cache.kv_presence import KVStatistics, Presence, united
from hs_cache.messages import split_keys
from hs_cache.vllm_blocks import BlockTable, TableStatistics
from hs_cache.vllm_stream import EventStream, StreamStatistics
from hs_cache.vllm_wire import Batch, read_batch

try:
    import msgspec
    import zmq
    from zmq.utils.monitor import parse_monitor_message
except ImportError as error:
    raise ConfigError(
        f"kv_source: got 'vllm_events', which needs pyzmq and msgspec ({error}): pip install 'hs-cache[vllm-events]'"
    ) from error

logger = logging.getLogger(__name__)

_QUEUED_BATCHES = 10_000  # as many as vLLM keeps for replay; what comes then waits at the engine
_MAX_MESSAGE_BYTES = 16 * 2**20
"""Of a batch, which is what one step of an engine did: some 10 bytes per token. ZeroMQ cuts a connection that brings
more, as if the engine were gone."""

_NUMBER_BYTES = 8
_END = -1
_POLL_MS = 100
_RECONNECT_MS = 100
_HEARTBEAT_MS = 1000
_SILENCE_MS = 3000
_REPLAY_S = 3.0
"""How long an engine may take for an answer; it serves replays between publishing, within 0.1 s."""

_PAUSE_S = 0.5
"""How long it may pause within an answer, which it sends at a stretch: then the end was lost on its way."""

_CATCH_UP_S = 30.0
"""How long all answers may take that are needed until nothing is missing."""

_KEPT_BATCHES = 100_000
_REPLAYED_BATCHES = 20_000
_REPLAYED_BYTES = 64 * 1024**2
_AT_A_TIME = 100  # batches of a replay, before it is looked for live ones

_RETRY_S = 5.0
_SETTLE_S = 1.0
"""A subscription takes effect a little later than the connection: what was published between is asked for then."""

_CHECK_S = 10.0
_CLOSE_S = 5.0


@dataclass(frozen=True)
class ListenerStatistics:
    """What is known of one rank of an engine, and how it was heard."""

    endpoint: str
    connected: bool
    table: TableStatistics
    stream: StreamStatistics


class VLLMEventsSource:
    """All engines of a node. One thread per data-parallel rank listens; asking never waits for one.

    A chunk is *present* if any engine has all of it; *absent* if one said that it is gone, and every other said so too
    or is known never to have stored it; else unknown.

    Args:
        config: of the service; ``kv_events`` names the engines.

    Raises:
        ConfigError: there are none.
    """

    def __init__(self, config: CacheConfig) -> None:
        if not config.kv_events:
            raise ConfigError("kv_events: got none, expected at least one engine to listen to")
        for source in config.kv_events:
            if not source.is_on_this_node():
                logger.warning(
                    "KV events: %s is no loopback address, so on each node the KV of that one engine counts as the "
                    "node's own",
                    source.endpoint,
                )
        ranks = [(source, rank) for source in config.kv_events for rank in range(source.dp_ranks)]
        self._context = zmq.Context()
        share = max(1, config.kv_index_capacity // len(ranks))
        self._listeners = [
            _Listener(self._context, source, rank, chunk_size=config.chunk_size, capacity=share)
            for source, rank in ranks
        ]
        for listener in self._listeners:
            listener.start()

    def presence(self, names: bytes, tags: tuple[tuple[str, str], ...], timeout_s: float) -> bytes:
        """One `Presence` per name, at once. vLLM has nothing like `tags`, and `timeout_s` isn't needed."""
        split = split_keys(names)
        answers = [listener.table.presence(split) for listener in self._listeners]
        return united(answers, len(split))

    def note_stored(self, names: bytes, engine: str) -> None:
        """Rows of these chunks are being stored, by whichever `engine`: events say who has what."""
        split = split_keys(names)
        for listener in self._listeners:
            listener.table.note_stored(split)

    def stats(self) -> KVStatistics:
        """Chunks of all engines together, counted once for each."""
        listeners = self.listeners()
        tables = [listener.table for listener in listeners]
        return KVStatistics(
            present=sum(table.present for table in tables),
            absent=sum(table.absent for table in tables),
            unknown=sum(table.unknown for table in tables),
            unlisted=Presence.UNKNOWN.name.lower(),
            reports_total=sum(table.events_total for table in tables),
            engines=tuple(listener.endpoint for listener in listeners if listener.connected),
            gaps_total=sum(listener.stream.lost_total for listener in listeners),
        )

    def listeners(self) -> list[ListenerStatistics]:
        """Each rank of each engine, in the order of the configuration."""
        return [listener.stats() for listener in self._listeners]

    def close(self) -> None:
        """End all threads and sockets; idempotent."""
        for listener in self._listeners:
            listener.stop()
        for listener in self._listeners:
            listener.join(_CLOSE_S)
        if not any(listener.is_alive() for listener in self._listeners):
            self._context.term()


def decode(payload: bytes) -> Batch:
    """Make a batch of a message's payload.

    Raises:
        InvalidInputError: it is no msgpack, or no batch of events.
    """
    try:
        message = msgspec.msgpack.decode(payload)
    # ValueError: msgspec's own errors, and dates out of range; RecursionError: nested too deeply.
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise InvalidInputError(f"payload: got {len(payload)} bytes, expected msgpack: {error}") from None
    return read_batch(message)


class _Replay:
    """One answer of an engine's replay, as far as it has come.

    A socket for each: an answer that comes too late finds nobody, and is not taken for another's.
    """

    def __init__(self, context: Any, endpoint: str, start: int) -> None:
        self.batches: list[tuple[int, bytes]] = []
        self.ended = False
        self._expected = start
        self._bytes = 0
        self._deadline = time.monotonic() + _REPLAY_S
        self._quiet_at = self._deadline
        self.socket = context.socket(zmq.DEALER)
        self.socket.set(zmq.LINGER, 0)
        self.socket.set(zmq.RCVHWM, _QUEUED_BATCHES)
        self.socket.set(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
        self.socket.set(zmq.RECONNECT_IVL, _RECONNECT_MS)
        self.socket.connect(endpoint)
        self.socket.send_multipart([b"", start.to_bytes(_NUMBER_BYTES, "big")])

    def read(self) -> None:
        """Take what is there, without waiting.

        Raises:
            TimeoutError: it is nothing that was asked for.
        """
        for _ in range(_AT_A_TIME):
            if self._full() or not self.socket.poll(0):
                return
            frames: list[bytes] = self.socket.recv_multipart()
            # b"", number, payload; some releases have the topic before the number.
            if frames[0] != b"" or len(frames) not in (3, 4) or len(frames[-2]) != _NUMBER_BYTES:
                raise TimeoutError("it answers with something else than batches")
            number = int.from_bytes(frames[-2], "big", signed=True)
            if number == _END:
                self.ended = True
                return
            if number < self._expected:
                raise TimeoutError(f"it answers with batch {number} where {self._expected} or a later one was due")
            self.batches.append((number, frames[-1]))
            self._expected = number + 1
            self._bytes += len(frames[-1])
            self._quiet_at = time.monotonic() + _PAUSE_S

    def over(self) -> bool:
        """Whether it isn't waited for any longer."""
        return self.ended or self._full() or time.monotonic() >= min(self._deadline, self._quiet_at)

    def _full(self) -> bool:
        return len(self.batches) >= _REPLAYED_BATCHES or self._bytes >= _REPLAYED_BYTES


class _Listener(threading.Thread):
    """Hears one rank of an engine, and keeps its table."""

    def __init__(self, context: Any, source: KVEventsSource, rank: int, *, chunk_size: int, capacity: int) -> None:
        self.endpoint, self._replay_endpoint = source.endpoints(rank)
        super().__init__(name=f"kv-events {self.endpoint}", daemon=True)
        self.table = BlockTable(
            self.endpoint,
            model=source.model,
            chunk_size=chunk_size,
            block_size=source.block_size,
            capacity=capacity,
            extra_keys=source.extra_keys,
        )
        self._context = context
        self._topic = source.topic.encode()
        self._stream = EventStream(self.table, decode)
        self._ended = threading.Event()
        self._connected = False
        self._heard_topic: bytes | None = None
        self._poller = zmq.Poller()
        self._replay: _Replay | None = None  # that is on its way
        self._caught_up_by = 0.0
        self._unanswered = False  # whether the last one didn't come
        self._check_at: float | None = None
        self._in_trouble = False

    def stop(self) -> None:
        """Have the thread end soon."""
        self._ended.set()

    def stats(self) -> ListenerStatistics:
        return ListenerStatistics(
            endpoint=self.endpoint,
            connected=self._connected,
            table=self.table.stats(),
            stream=self._stream.stats(),
        )

    def run(self) -> None:
        while not self._ended.is_set():
            pause_s = _RECONNECT_MS / 1000
            try:
                self._listen()
            except zmq.ZMQError as error:
                if error.errno == zmq.ETERM:
                    return
                self._trouble(f"can't be listened to: {error}")
                pause_s = _RETRY_S
            # A bug here must cost answers, not become a thread that is silently gone while its table goes on answering.
            except Exception:
                logger.exception("KV events: what the engine at %s told is lost", self.endpoint)
                self._stream.lose()
                pause_s = _RETRY_S
            finally:
                self._connected = False
                self._stream.disconnected()
            self._ended.wait(pause_s)

    def _listen(self) -> None:
        """Hear one connection, from before it is there until it ends.

        A new socket each time: what one life of an engine published can't be mixed up with another's then.
        """
        subscriber = self._context.socket(zmq.SUB)
        monitor = None
        try:
            subscriber.set(zmq.LINGER, 0)
            subscriber.set(zmq.RCVHWM, _QUEUED_BATCHES)
            subscriber.set(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
            subscriber.set(zmq.RECONNECT_IVL, _RECONNECT_MS)
            subscriber.set(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
            subscriber.set(zmq.HEARTBEAT_TIMEOUT, _SILENCE_MS)
            subscriber.set(zmq.SUBSCRIBE, self._topic)
            monitor = subscriber.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
            subscriber.connect(self.endpoint)
            self._heard_topic, self._check_at = self._topic or None, None
            self._poller = zmq.Poller()
            self._poller.register(subscriber, zmq.POLLIN)
            self._poller.register(monitor, zmq.POLLIN)
            self._hear(subscriber, monitor)
        finally:
            self._end_replay()
            if monitor is not None:
                subscriber.disable_monitor()
                monitor.close(0)
            subscriber.close(0)

    def _hear(self, subscriber: Any, monitor: Any) -> None:
        while not self._ended.is_set():
            ready = dict(self._poller.poll(_POLL_MS))
            if monitor in ready:
                event = parse_monitor_message(monitor.recv_multipart())["event"]
                if event == zmq.EVENT_DISCONNECTED:
                    self._trouble("is gone, so its KV is unknown")
                    return
                self._connected, self._unanswered = True, False
                self._recovered()
                self._check(_SETTLE_S)
            elif subscriber in ready:
                self._message(subscriber.recv_multipart())
            if self._replay is not None:
                self._follow(self._replay)
            elif self._check_at is not None and time.monotonic() >= self._check_at:
                self._check(_CHECK_S)

    def _message(self, frames: list[bytes]) -> None:
        if len(frames) == 3 and len(frames[1]) == _NUMBER_BYTES:
            topic, number, payload = frames[0], int.from_bytes(frames[1], "big"), frames[2]
            if self._heard_topic is None:
                self._heard_topic = topic
            # Another publisher's counts for itself.
            if topic != self._heard_topic or self._stream.receive(number, payload):
                return
        else:
            self._stream.malformed()
        if self._replay is not None:
            if self._stream.kept > _KEPT_BATCHES:
                self._unreplayed("too much came meanwhile")
        # While the engine doesn't answer it isn't asked for each batch: they would queue up behind the waiting.
        elif self._replay_endpoint is None or self._unanswered:
            self._stream.give_up()
        else:
            self._catch_up()

    def _check(self, again_in_s: float) -> None:
        """Ask for what wasn't heard, if the engine can be asked."""
        if self._replay_endpoint is not None:
            self._check_at = time.monotonic() + again_in_s
            if self._replay is None:
                self._catch_up()

    def _catch_up(self) -> None:
        self._caught_up_by = time.monotonic() + _CATCH_UP_S
        self._ask(self._stream.ask())

    def _ask(self, start: int) -> None:
        assert self._replay_endpoint is not None
        self._replay = _Replay(self._context, self._replay_endpoint, start)
        self._poller.register(self._replay.socket, zmq.POLLIN)

    def _follow(self, replay: _Replay) -> None:
        """Go on with a replay; events are heard meanwhile."""
        try:
            replay.read()
            if not replay.over():
                return
            self._end_replay()
            start = self._stream.replayed(replay.batches, ended=replay.ended)
            if start is not None and time.monotonic() >= self._caught_up_by:
                raise TimeoutError(f"it has no end within {_CATCH_UP_S:g} s")
        except TimeoutError as error:
            self._unreplayed(str(error))
            return
        if start is not None:
            self._ask(start)
            return
        self._unanswered = False
        self._recovered()

    def _unreplayed(self, why: str) -> None:
        self._end_replay()
        self._stream.give_up()
        self._unanswered = True
        self._check_at = time.monotonic() + _RETRY_S
        self._trouble(f"doesn't replay what was missed: {why}")

    def _end_replay(self) -> None:
        if self._replay is not None:
            self._poller.unregister(self._replay.socket)
            self._replay.socket.close(0)
            self._replay = None

    def _recovered(self) -> None:
        if self._in_trouble:
            self._in_trouble = False
            logger.warning("KV events: the engine at %s is heard again", self.endpoint)

    def _trouble(self, what: str) -> None:
        if not self._in_trouble and not self._ended.is_set():
            self._in_trouble = True
            logger.warning("KV events: the engine at %s %s", self.endpoint, what)
