"""The order of one engine's KV events: what is missing, what is told twice, what comes from another life of the engine.

Batches are numbered from 0 in each life of an engine, and nothing in them says which life it is. Two of the same number
are told apart by what they say (they carry the time at which they were made), so a digest of the last few thousand is
kept:

* the expected number is taken, unless the connection was cut since the last one, as it is when an engine ends;
* a higher one shows a gap. What is missing is asked of the engine's replay, from the last batch that was taken
  *inclusively*: if it comes back as it was, it is the same life and the gap can be filled. If another one comes, or
  none, the engine has been restarted: what it had is gone, and its new life is read from 0;
* a lower one that was seen with the same digest is a duplicate, and ignored. With another digest it is another life's.
  One too old for its digest to be kept may be either, so nothing that was known counts any more.

Where a gap can't be filled everything known before is unknown, and what comes counts from there.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

from hs_cache.errors import InvalidInputError
from hs_cache.vllm_blocks import BlockTable
from hs_cache.vllm_wire import Batch

Replay = Callable[[int], Iterator[tuple[int, bytes]]]
"""Asks an engine for its batches from a number on; may raise `TimeoutError`. It may have forgotten the first ones."""

_REMEMBERED = 4096
_DIGEST_BYTES = 12


class Verdict(Enum):
    """What a batch is to what came before it."""

    TAKEN = "taken, or taken before"
    GAP = "not the next one"


@dataclass(frozen=True)
class StreamStatistics:
    """An `EventStream` since it was made."""

    batches_total: int
    duplicates_total: int
    gaps_total: int
    filled_total: int
    lost_total: int
    restarts_total: int
    malformed_total: int


class EventStream:
    """Feeds a `BlockTable` with one engine's batches, in order. For one thread.

    Args:
        table: told of everything.
        decode: makes a batch of a payload; `InvalidInputError` if that can't be done.
    """

    def __init__(self, table: BlockTable, decode: Callable[[bytes], Batch]) -> None:
        self._table = table
        self._decode = decode
        self._next: int | None = None
        self._seen: OrderedDict[int, bytes] = OrderedDict()
        self._same_life = True
        self._batches = self._duplicates = self._gaps = self._filled = 0
        self._lost = self._restarts = self._malformed = 0

    def receive(self, number: int, payload: bytes) -> Verdict:
        """Take a batch, unless others are missing before it: then `catch_up` and `settle` it, or `skip_to` it."""
        if self._next is None:
            if number:
                return self._gap()
            if self._seen:
                self.lose()
            self._begin()
        if number == self._next and self._same_life:
            self._take(number, payload)
            return Verdict.TAKEN
        if self._next is not None and number < self._next:
            seen = self._seen.get(number)
            if seen == _digest(payload):
                self._duplicates += 1
                return Verdict.TAKEN
            if seen is None:
                self.lose()
            else:
                self._restarted()
            return self.receive(number, payload)
        return self._gap()

    def catch_up(self, replay: Replay, *, afresh: bool = False) -> None:
        """Read what is missing, or everything if nothing is known yet; afterwards what is known counts.

        Args:
            replay: asks the engine.
            afresh: read everything, as more may be had than what is known. Until it comes that counts.

        Raises:
            TimeoutError: the engine didn't answer, or stopped answering. What it told is in order as far as it goes.
        """
        more = False
        if afresh:
            more = self._read_all(replay, same_life=True)
        elif self._next is not None:
            more = self._continue(self._next - 1, replay)
        if self._next is None:
            more = self._read_all(replay, same_life=False)
        while more and self._next is not None:
            more = self._continue(self._next - 1, replay)
        self._same_life = True
        self._table.resume()

    def settle(self, number: int, payload: bytes) -> None:
        """Take the batch that showed a gap, after `catch_up`: it may have come with that, or still not be the next."""
        if self._next is None or number > self._next:
            self.skip_to(number, payload)
        elif number == self._next:
            self._take(number, payload)
        else:
            self._duplicates += 1

    def skip_to(self, number: int, payload: bytes) -> None:
        """Take a batch although others are missing before it, which nobody has any more."""
        self.lose()
        self._next = number
        self._take(number, payload)

    def disconnected(self) -> None:
        """What comes next may be from another life, and presence is unknown until that is clear."""
        self._same_life = False
        self._table.suspend()

    def lose(self) -> None:
        """Nothing that was known counts any more."""
        self._lost += 1
        self._table.forget()
        self._seen.clear()
        self._next = None
        self._same_life = True

    def malformed(self) -> None:
        """Something came that is no message: whatever it was to say is lost."""
        self._malformed += 1
        self._table.forget()

    def stats(self) -> StreamStatistics:
        """Counts; may be called from any thread."""
        return StreamStatistics(
            batches_total=self._batches,
            duplicates_total=self._duplicates,
            gaps_total=self._gaps,
            filled_total=self._filled,
            lost_total=self._lost,
            restarts_total=self._restarts,
            malformed_total=self._malformed,
        )

    def _gap(self) -> Verdict:
        self._gaps += 1
        self._table.suspend()
        return Verdict.GAP

    def _begin(self) -> None:
        self._next = 0
        self._same_life = True
        self._table.begin()

    def _restarted(self) -> None:
        """The engine has another life, in which it has told nothing yet."""
        self._restarts += 1
        self._table.clear()
        self._seen.clear()
        self._next = None

    def _continue(self, last: int, replay: Replay) -> bool:
        """Read what follows batch `last`; whether some of it must be asked for again."""
        batches = replay(last)
        first = next(batches, None)
        if first is None:
            # Nothing from `last` on: a new life that isn't as far yet, or an engine that keeps nothing for replay.
            self._table.suspend()
            self._next = None
            return False
        if first[0] != last:
            self.skip_to(*first)
        elif _digest(first[1]) != self._seen.get(last):
            self._restarted()
            return False
        return self._take_all(batches)

    def _read_all(self, replay: Replay, *, same_life: bool) -> bool:
        """Read everything; whether some of it must be asked for again."""
        batches = replay(0)
        first = next(batches, None)
        if first is None:
            if self._seen:
                self.lose()
            self._table.forget()
            return False
        if same_life:
            self.lose()
        elif self._seen:
            self._restarted()
        if first[0] == 0:
            self._begin()
            self._take(*first)
        else:
            self.skip_to(*first)
        return self._take_all(batches)

    def _take_all(self, batches: Iterator[tuple[int, bytes]]) -> bool:
        """Take what comes; whether some was missing in between, and there is hope that it comes when asked for again.

        A long replay overflows the engine's queue (its ROUTER has ZeroMQ's 1000 messages): then it lacks some, or its
        end.
        """
        began = self._next
        try:
            for number, payload in batches:
                # What was true while this was published isn't true now: it counts when all has been read.
                self._table.suspend()
                if number != self._next:
                    if self._next != began:
                        return True
                    self.skip_to(number, payload)
                else:
                    self._take(number, payload)
        except TimeoutError:
            if self._next == began:
                raise
            return True
        if self._next != began:
            self._filled += 1
        return False

    def _take(self, number: int, payload: bytes) -> None:
        self._batches += 1
        self._next = number + 1
        self._seen[number] = _digest(payload)
        if len(self._seen) > _REMEMBERED:
            self._seen.popitem(last=False)
        try:
            batch = self._decode(payload)
        except InvalidInputError:
            self.malformed()
        else:
            self._table.apply(batch)


def _digest(payload: bytes) -> bytes:
    return hashlib.blake2b(payload, digest_size=_DIGEST_BYTES).digest()
