"""Listens to the KV events of vLLM engines, and answers for the KV of all of them (``kv_source: vllm_events``).

Needs the extra ``vllm-events``. vLLM itself isn't needed; how it publishes is described in
vllm/distributed/kv_events.py (vLLM, Apache-2.0): a PUB socket whose messages are topic, number (8 bytes, big-endian)
and payload, and optionally a ROUTER socket that answers a number with all batches from there on that it still has, and
with -1 at the end.
"""

import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hs_cache.config import CacheConfig, KVEventsSource
from hs_cache.errors import ConfigError, InvalidInputError
from hs_cache.kv_presence import KVStatistics, Presence, united
from hs_cache.messages import split_keys
from hs_cache.vllm_blocks import BlockTable, TableStatistics
from hs_cache.vllm_stream import EventStream, StreamStatistics, Verdict
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
"""How long an engine may take for each batch of a replay; it serves them between publishing, within 0.1 s."""

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
            gaps_total=sum(listener.stream.lost_total + listener.stream.malformed_total for listener in listeners),
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
        self._unread = False  # whether something may be had from replay that wasn't
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
            try:
                self._listen()
            except zmq.ZMQError as error:
                if error.errno == zmq.ETERM:
                    return
                self._trouble(f"can't be listened to: {error}")
                self._ended.wait(_RETRY_S)
            # A bug here must cost answers, not become a thread that is silently gone while its table goes on answering.
            except Exception:
                logger.exception("KV events: what the engine at %s told is lost", self.endpoint)
                self._stream.lose()
                self._ended.wait(_RETRY_S)
            finally:
                self._connected = False
                self._stream.disconnected()

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
            self._hear(subscriber, monitor)
        finally:
            if monitor is not None:
                subscriber.disable_monitor()
                monitor.close(0)
            subscriber.close(0)

    def _hear(self, subscriber: Any, monitor: Any) -> None:
        poller = zmq.Poller()
        poller.register(subscriber, zmq.POLLIN)
        poller.register(monitor, zmq.POLLIN)
        while not self._ended.is_set():
            ready = dict(poller.poll(_POLL_MS))
            if monitor in ready:
                event = parse_monitor_message(monitor.recv_multipart())["event"]
                if event == zmq.EVENT_DISCONNECTED:
                    self._trouble("is gone, so its KV is unknown")
                    self._ended.wait(_RECONNECT_MS / 1000)
                    return
                self._connected = True
                self._recovered()
                self._check(_SETTLE_S)
            elif subscriber in ready:
                self._message(subscriber.recv_multipart())
            if self._check_at is not None and time.monotonic() >= self._check_at:
                self._check(_CHECK_S)

    def _message(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[1]) != _NUMBER_BYTES:
            self._stream.malformed()
            return
        topic, number, payload = frames[0], int.from_bytes(frames[1], "big"), frames[2]
        if self._heard_topic is None:
            self._heard_topic = topic
        if topic != self._heard_topic:
            return  # another publisher's, which counts for itself
        if self._stream.receive(number, payload) is Verdict.TAKEN:
            return
        # While the engine doesn't answer it isn't asked for each batch: they would queue up behind the waiting.
        if not self._unread and self._catch_up():
            self._stream.settle(number, payload)
        else:
            self._stream.skip_to(number, payload)

    def _check(self, again_in_s: float) -> None:
        """Ask for what wasn't heard, if the engine can be asked."""
        if self._replay_endpoint is not None:
            self._check_at = time.monotonic() + (again_in_s if self._catch_up() else _RETRY_S)

    def _catch_up(self) -> bool:
        """Whether the engine's replay was read."""
        if self._replay_endpoint is None:
            return False
        try:
            self._stream.catch_up(self._replay, afresh=self._unread)
        except TimeoutError as error:
            self._unread = True
            self._check_at = time.monotonic() + _RETRY_S
            self._trouble(f"doesn't replay what was missed: {error}")
            return False
        self._unread = False
        self._recovered()
        return True

    def _replay(self, start: int) -> Iterator[tuple[int, bytes]]:
        # A socket for each request: an answer that comes too late finds nobody, and is not taken for another's.
        dealer = self._context.socket(zmq.DEALER)
        try:
            dealer.set(zmq.LINGER, 0)
            dealer.set(zmq.RCVHWM, _QUEUED_BATCHES)
            dealer.set(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
            dealer.set(zmq.RECONNECT_IVL, _RECONNECT_MS)
            dealer.connect(self._replay_endpoint)
            dealer.send_multipart([b"", start.to_bytes(_NUMBER_BYTES, "big")])
            while True:
                frames = self._replayed(dealer)
                number = int.from_bytes(frames[-2], "big", signed=True)
                if number == _END:
                    return
                if number >= start:
                    yield number, frames[-1]
        finally:
            dealer.close(0)

    def _replayed(self, dealer: Any) -> list[bytes]:
        deadline = time.monotonic() + _REPLAY_S
        while time.monotonic() < deadline and not self._ended.is_set():
            if dealer.poll(_POLL_MS):
                frames: list[bytes] = dealer.recv_multipart()
                # b"", number, payload; some releases have the topic before the number.
                if frames[0] == b"" and len(frames) in (3, 4) and len(frames[-2]) == _NUMBER_BYTES:
                    return frames
                raise TimeoutError("it answers with something else than batches")
        raise TimeoutError(f"no answer within {_REPLAY_S:g} s")

    def _recovered(self) -> None:
        if self._in_trouble:
            self._in_trouble = False
            logger.warning("KV events: the engine at %s is heard again", self.endpoint)

    def _trouble(self, what: str) -> None:
        if not self._in_trouble and not self._ended.is_set():
            self._in_trouble = True
            logger.warning("KV events: the engine at %s %s", self.endpoint, what)
