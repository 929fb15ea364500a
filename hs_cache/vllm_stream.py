"""The order of one engine's KV events: what is missing, what is told twice, what comes from another life of the engine.

Batches are numbered from 0 in each life of an engine, and nothing in them says which life it is, or which engine. Two
of the same number are told apart by what they say (they carry the time at which they were made), so a digest of the
last few thousand is kept:

* the expected number is taken, unless the connection was cut since the last one, as it is when an engine ends;
* a higher one shows a gap, and a message that can't be read is one. What is missing is asked of the engine's replay;
* a lower one that was seen with the same digest is a duplicate, and ignored. With another digest it is another life's
  if the connection was cut. If it wasn't, or the digest is no longer kept, nothing that was known counts any more.

A replay is asked for from the last batch that was taken *inclusively*. If that comes back as it was, it is the same
life, and what follows is taken. If another one comes, or none, after the connection was cut, the engine has been
restarted: what it had is gone, and its new life is read from 0. On a connection that wasn't cut that can't be: it is
another engine's replay, or there are two behind one address, and nothing that was known counts any more. Likewise the
batch that showed a gap must be in the replay as it was heard.

While a replay is on its way batches go on being received, so what is present is never older than what was heard. Those
that can't be taken yet are kept. Where a gap can't be filled everything known before is unknown, and what comes counts
from there.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from hs_cache.errors import InvalidInputError
from hs_cache.vllm_blocks import BlockTable
from hs_cache.vllm_wire import Batch

_REMEMBERED = 4096
_DIGEST_BYTES = 12


class _Place(Enum):
    """Where a batch belongs in what came before it."""

    NEXT = auto()
    KNOWN = auto()
    BEHIND_A_GAP = auto()


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
    """Feeds a `BlockTable` with one engine's batches, in order. For one thread; nothing here waits.

    Whoever uses it asks the engine's replay from `ask` on, hands over what comes to `replayed`, asks again as long as
    that returns a number, and says `give_up` where the engine doesn't answer.

    Args:
        table: told of everything.
        decode: makes a batch of a payload; `InvalidInputError` if that can't be done.
    """

    def __init__(self, table: BlockTable, decode: Callable[[bytes], Batch]) -> None:
        self._table = table
        self._decode = decode
        self._next: int | None = None
        self._seen: OrderedDict[int, bytes] = OrderedDict()
        self._cut = True  # nothing was heard on this connection yet
        self._waiting = False  # for what is missing
        self._partial = False  # a replay may have more than what is known
        self._unread = False  # something came since a replay was asked for that can't be read
        self._kept: list[tuple[int, bytes]] = []
        # Of the replay that was asked for:
        self._start = 0
        # Number and digest of batches that must be in it, and weren't yet: the last one taken, and the first one kept.
        self._anchor: tuple[int, bytes] | None = None
        self._witness: tuple[int, bytes] | None = None
        self._before = 0  # how many of those kept had come before
        self._nameless = False  # nothing could tell whose it is
        self._afresh = False
        self._succession = False
        self._batches = self._duplicates = self._gaps = self._filled = 0
        self._lost = self._restarts = self._malformed = 0

    @property
    def kept(self) -> int:
        """How many batches wait for a replay."""
        return len(self._kept)

    def receive(self, number: int, payload: bytes) -> bool:
        """Take a batch, unless something is missing before it: then it is kept until `replayed` or `give_up`.

        Returns:
            Whether nothing is missing.
        """
        try:
            batch = self._decode(payload)
        except InvalidInputError:
            self.malformed()
            return False
        if not self._waiting:
            place = self._place(number, payload)
            if place is _Place.NEXT:
                self._apply(number, payload, batch)
            elif place is _Place.BEHIND_A_GAP:
                self._gaps += 1
                self._wait()
        if self._waiting or self._afresh:
            self._kept.append((number, payload))
        return not self._waiting

    def malformed(self) -> None:
        """Something came that is no message: whatever it was to say is missing."""
        self._malformed += 1
        self._unread = True
        self._wait()

    def ask(self) -> int:
        """Begin to catch up; returns the number from which a replay is wanted."""
        self._before = len(self._kept)
        self._anchor = None if self._next is None else (self._next - 1, self._seen[self._next - 1])
        self._witness = (self._kept[0][0], _digest(self._kept[0][1])) if self._kept else None
        self._unread = False
        self._nameless = not (self._cut or self._anchor or self._kept)
        self._afresh = self._partial and not self._cut and not self._waiting
        self._succession = False
        return self._ask_from(0 if self._afresh or self._next is None else self._next - 1)

    def replayed(self, batches: Sequence[tuple[int, bytes]], *, ended: bool) -> int | None:
        """Take what a replay brought. It may lack some: the queue of an engine for it has room for 1000 batches.

        Args:
            batches: by ascending numbers, none below the one asked for.
            ended: the engine said that it has no more.

        Returns:
            The number from which to ask again; None if there is no need, and what is known counts.

        Raises:
            TimeoutError: the engine stopped answering, and nothing new came. It is to be given up.
        """
        if not (batches or ended):
            raise TimeoutError("it didn't answer")
        if self._nameless:
            return self._settle()
        if self._anchor is not None and self._start == self._anchor[0]:
            again = self._check_anchor(self._anchor, batches)
            if again is not None or (self._next is None and not (self._cut or self._before)):
                return self._settle() if again is None else again
        if self._succession:
            self._succession = False
            if batches:
                self._restarted()
            else:
                self.lose()
        if self._afresh and batches:
            self._afresh = self._partial = False
            self._wait()
            self._forget()
        return self._take_all(batches, ended=ended)

    def give_up(self) -> None:
        """There is no replay to be had. What is missing is lost with all before it as soon as something else comes."""
        kept, self._kept = self._kept, []
        self._afresh = False
        if self._waiting and kept:
            self._partial = True
            for number, payload in kept:
                self._take_or_skip(number, payload)
            self._resume()

    def disconnected(self) -> None:
        """What comes next may be from another life, and presence is unknown until that is clear."""
        self._cut = True
        self._waiting = self._afresh = False
        self._kept = []
        self._table.suspend()

    def lose(self) -> None:
        """Nothing that was known counts any more."""
        self._lost += 1
        self._forget()

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

    def _place(self, number: int, payload: bytes) -> _Place:
        """Where a batch that was heard belongs; what contradicts it is forgotten."""
        if self._next is not None and number < self._next:
            seen = self._seen.get(number)
            if seen == _digest(payload):
                self._duplicates += 1
                return _Place.KNOWN
            if seen is not None and self._cut:
                self._restarted()
            else:
                self.lose()
        if self._next is None and self._cut and not number:
            self._begin()
        return _Place.NEXT if number == self._next and not self._cut else _Place.BEHIND_A_GAP

    def _wait(self) -> None:
        self._waiting = True
        self._table.suspend()

    def _resume(self) -> None:
        self._waiting = False
        self._table.resume()

    def _begin(self) -> None:
        """Begin with the first batch of all, before which the engine had nothing."""
        self._next = 0
        self._cut = self._partial = False
        self._table.begin()
        if self._waiting:
            self._table.suspend()

    def _skip(self, number: int) -> None:
        """Go on at a batch although others are missing before it, which nobody has any more."""
        if self._next is not None:
            self._lost += 1
        self._forget()
        self._next = number
        self._cut = False

    def _forget(self) -> None:
        self._forget_table()
        self._seen.clear()
        self._next = None

    def _forget_table(self) -> None:
        self._table.forget()
        if self._waiting:
            self._table.suspend()

    def _restarted(self) -> None:
        """The engine has another life, in which it has told nothing yet."""
        self._restarts += 1
        self._table.clear()
        self._seen.clear()
        self._next = self._anchor = None
        self._partial = self._succession = False

    def _ask_from(self, start: int) -> int:
        self._start = start
        return start

    def _check_anchor(self, anchor: tuple[int, bytes], batches: Sequence[tuple[int, bytes]]) -> int | None:
        """Whether a replay goes on from the batch that was taken last; a number if another one must be asked for."""
        self._anchor = None
        first = (batches[0][0], _digest(batches[0][1])) if batches else None
        if first == anchor:
            self._cut = False
        elif self._cut and first is None:
            # A new life that isn't as far yet, or an engine that keeps nothing for replay.
            self._succession = True
            return self._ask_from(0)
        elif self._cut and first is not None and first[0] == anchor[0]:
            self._restarted()
            return self._ask_from(0)
        else:
            self.lose()
        return None

    def _confirm(self, number: int, digest: bytes) -> None:
        """A batch is in the replay."""
        if (number, digest) == self._anchor:
            self._anchor = None
        if (number, digest) == self._witness:
            self._witness = None

    def _reaches_kept(self) -> bool:
        """Whether a replay came as far as what showed a gap before it was asked for."""
        return not self._before or self._next is None or self._kept[0][0] < self._next

    def _take_all(self, batches: Sequence[tuple[int, bytes]], *, ended: bool) -> int | None:
        """Take what is new of a replay; as `replayed`."""
        began = self._next
        for number, payload in batches:
            if self._next is None:
                if number and self._start:
                    return self._ask_from(0)
                if number:
                    self._skip(number)
                else:
                    self._begin()
            assert self._next is not None
            digest = _digest(payload)
            self._confirm(number, digest)
            if number < self._next:
                if self._seen.get(number) != digest:
                    self.lose()
                    return self._settle()
                continue
            if number > self._next:
                if self._next != began or self._start >= self._next:
                    return self._ask_from(self._next - 1)
                self._skip(number)
            # What was true while this was published isn't true now: it counts when all has been read.
            self._wait()
            self._take(number, payload)
        more = self._next is not None and self._next != began
        if not ended and not more:
            raise TimeoutError("it stopped answering")
        if self._next is not None and more and not (ended and self._reaches_kept()):
            return self._ask_from(self._next - 1)
        self._filled += more
        return self._settle()

    def _settle(self) -> int | None:
        """A replay was read: take what was kept; as `replayed`."""
        self._afresh = False
        if self._anchor is not None:
            self._anchor = None
            self.lose()
        if self._next is not None:
            self._cut = False
        if self._unread:
            return self.ask()
        kept, self._kept = self._kept, []
        for i, (number, payload) in enumerate(kept):
            if i == 0 and self._before:
                if self._witness is None:
                    self._duplicates += 1
                else:
                    self._skip(number)
                    self._take(number, payload)
            elif i < self._before:
                self._take_or_skip(number, payload)
            else:
                place = self._place(number, payload)
                if place is _Place.NEXT:
                    self._take(number, payload)
                elif place is _Place.BEHIND_A_GAP:
                    # It came after the replay had been asked for, which so may have ended before it.
                    self._kept = kept[i:]
                    return self.ask()
        self._resume()
        return None

    def _take_or_skip(self, number: int, payload: bytes) -> None:
        place = self._place(number, payload)
        if place is _Place.BEHIND_A_GAP:
            self._skip(number)
        if place is not _Place.KNOWN:
            self._take(number, payload)

    def _take(self, number: int, payload: bytes) -> None:
        """Take a batch as it is, also where that means that what it says is lost."""
        try:
            self._apply(number, payload, self._decode(payload))
        except InvalidInputError:
            self._lost += 1
            self._forget_table()
            self._remember(number, payload)

    def _apply(self, number: int, payload: bytes, batch: Batch) -> None:
        self._remember(number, payload)
        self._table.apply(batch)

    def _remember(self, number: int, payload: bytes) -> None:
        self._batches += 1
        self._next = number + 1
        self._seen[number] = _digest(payload)
        if len(self._seen) > _REMEMBERED:
            self._seen.popitem(last=False)


def _digest(payload: bytes) -> bytes:
    return hashlib.blake2b(payload, digest_size=_DIGEST_BYTES).digest()
