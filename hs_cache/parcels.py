"""Parcels: objects that one process leaves in a node's pool under a name, for another to take. No Ray in here.

A parcel is a chunk of one token, in a key space of its own, with one layer whose only row is all of its bytes; so it is
stored, found and read, also from other nodes, as any chunk is. Two things differ. It is *kept* for the process that put
it (`hs_cache.store`): it isn't evicted, and goes when it is taken or dropped, or when that process is gone. And it
replaces what is there under its name, in one step.

Its chunk key comes from the name alone, so that a taker needs nothing else. The fingerprint of its key space is random,
and tells one put from another under the same name: who has read a parcel drops exactly that one, not its successor.
Every drop names the one that it means, since any call may be carried out long after its caller has given it up. Both
stand in front of the parcel's bytes too, and what doesn't match there is not delivered::

    8 bytes magic ‖ SHA-256 of the name ‖ 16 bytes generation ‖ u64 nbytes of the payload, little-endian ‖ payload
"""

import hashlib
import logging
import secrets
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch

from hs_cache.attachment import Link
from hs_cache.devices import NO_DEVICES, Cut, Moment
from hs_cache.effects import Budget, Peer, Steps
from hs_cache.extents import ALIGNMENT
from hs_cache.keys import KEY_BYTES, ChunkKeys
from hs_cache.leases import Lease, this_process
from hs_cache.messages import OK, ExplainReply, ExplainRequest, LayerSpec, ReserveRequest, Run
from hs_cache.retrieval import Ask
from hs_cache.rows import Flat
from hs_cache.session import Session

logger = logging.getLogger(__name__)

_FORMAT = b"hs_cache.parcels/1"
_MAGIC = b"hsparcel"
_HEADER = struct.Struct("<8s32s16sQ")
_LAYER, _DTYPE = 0, "float8_e4m3fn"  # any dtype of one byte
_COPIED_BYTES = 128 << 10
"""Copying less costs less than a mapping and a lease that ends later."""


class Content(Protocol):
    """What a parcel holds."""

    @property
    def nbytes(self) -> int:
        """How much memory it takes."""
        ...

    def write(self, memory: Flat) -> None:
        """Write it to the first `nbytes` bytes of memory that starts at a multiple of 64 bytes."""
        ...


@dataclass(frozen=True, slots=True)
class ParcelName:
    """What a parcel is found by: the SHA-256 of all parts of its name, in order."""

    digest: bytes

    @classmethod
    def of(cls, *parts: str) -> "ParcelName":
        """The name of those parts; ``("a", "bc")`` and ``("ab", "c")`` differ."""
        encoded = [part.encode("utf-8", "surrogatepass") for part in parts]
        lengths = [len(part).to_bytes(8, "little") for part in encoded]
        pieces = [piece for pair in zip(lengths, encoded, strict=True) for piece in pair]
        return cls(hashlib.sha256(b"".join([_FORMAT, *pieces])).digest())

    @property
    def key(self) -> bytes:
        """Its chunk key."""
        return self.digest[:KEY_BYTES]


@dataclass(frozen=True, slots=True)
class Sent:
    """A parcel that was put. `hold` keeps it: the pool's incarnation and an id; None where nothing does."""

    name: ParcelName
    generation: bytes
    node_id: str
    nbytes: int
    hold: Lease | None


@dataclass(frozen=True, slots=True)
class Taken:
    """A parcel's content, as memory that is the taker's alone. `dropped`: it is surely gone from where it was."""

    generation: bytes
    content: Flat
    dropped: bool


class _Parcel:
    """A parcel as rows to be written."""

    def __init__(self, name: ParcelName, generation: bytes, content: Content) -> None:
        self._head = _HEADER.pack(_MAGIC, name.digest, generation, content.nbytes)
        self._content = content
        self.nbytes = len(self._head) + content.nbytes

    def copy_into(self, memory: memoryview, runs: Sequence[Run], moment: Moment, cut: Cut | None) -> None:
        (run,) = runs
        self._write(np.frombuffer(memory, np.uint8, self.nbytes, run.offset))

    def flat(self) -> Flat:
        flat = np.empty(self.nbytes, np.uint8)
        self._write(flat)
        return flat

    def _write(self, memory: Flat) -> None:
        memory[: len(self._head)] = np.frombuffer(self._head, np.uint8)
        self._content.write(memory[len(self._head) :])


class Parcels:
    """One client's operations on parcels. Thread-safe; keeps nothing but what the session knows.

    Args:
        session: of the client.
        timeout_s: per round trip; None for the service's ``rpc_timeout_s``.
    """

    def __init__(self, session: Session, timeout_s: float | None = None) -> None:
        self._session = session
        self._timeout_s = timeout_s

    @property
    def timeout_s(self) -> float:
        """What a round trip may take."""
        return self._session.config.rpc_timeout_s if self._timeout_s is None else self._timeout_s

    def put(self, name: ParcelName, content: Content) -> Steps[Sent | None]:
        """Leave a parcel on the node that serves this client, in the place of any other of that name.

        None when there is no room, or the node can't be reached. Then this one won't appear later, either; one that was
        there before is gone, unless the node didn't hear of this.
        """
        sent: Sent | None = None
        return (
            yield from self._session.operate(
                lambda link, b: self._put_on(link, name, content, b), sent, self._timeout_s
            )
        )

    def take(self, name: ParcelName, node_id: str = "", timeout_s: float | None = None) -> Steps[Taken | None]:
        """Read a parcel, and drop it where it was; None if there is none, or none can be reached.

        Two that take at the same time may both get it.

        Args:
            node_id: where it was put. Without it, the client's own node is asked first, then the directory.
        """
        if timeout_s is None:
            timeout_s = self._timeout_s
        taken: Taken | None = None
        return (
            yield from self._session.operate(lambda link, b: self._take_on(link, name, node_id, b), taken, timeout_s)
        )

    def drop(self, name: ParcelName, generation: bytes | None = None, node_id: str = "") -> Steps[bool | None]:
        """Drop a parcel; whether there was one, None if that isn't known.

        Args:
            generation: that one and no other of its name; None for the one that is there when the node is asked.
            node_id: as for `take`.
        """
        dropped: bool | None = None
        return (
            yield from self._session.operate(
                lambda link, b: self._drop_on(link, name, generation, node_id, b), dropped, self._timeout_s
            )
        )

    def gone(self, sent: Mapping[str, Sequence[Sent]]) -> Steps[list[Sent]]:
        """Which parcels, given by their node, are surely not there any more. One call per node."""
        nothing: list[Sent] = []
        return (yield from self._session.operate(lambda _, b: self._gone(sent, b), nothing, self._timeout_s))

    def _put_on(self, link: Link, name: ParcelName, content: Content, budget: Budget) -> Steps[Sent | None]:
        process, peer = this_process(), link.located.peer
        generation = secrets.token_bytes(KEY_BYTES)
        parcel = _Parcel(name, generation, content)
        request = ReserveRequest(
            incarnation=link.incarnation,
            client_id=process.client_id,
            hold_id=process.next_id(),
            space=generation,
            keys=name.key,
            num_tokens=1,
            first_chunk=0,
            specs=(LayerSpec(_LAYER, parcel.nbytes, _DTYPE),),
            kv_local=False,
            keep=True,
        )
        kept, done = link.mapping is not None, None
        try:
            done = yield from self._session.write(link, request, parcel, NO_DEVICES, budget)
            if not done.stored:
                return None
            if not done.alone:
                yield from self._drop_elsewhere(name, None, peer.node_id, budget)
        except BaseException:
            if not kept:
                process.releaser.post(partial(peer.post, "drop_key", name.key, generation))
            elif done is not None:  # if not, it has been given up already
                process.releaser.end(link.incarnation, (request.hold_id,))
            raise
        return Sent(
            name, generation, peer.node_id, content.nbytes, (link.incarnation, request.hold_id) if kept else None
        )

    def _take_on(self, link: Link, name: ParcelName, node_id: str, budget: Budget) -> Steps[Taken | None]:
        keys = ChunkKeys(name.key, 1, self._session.config.chunk_size)
        hit = yield from self._session.read(link, Ask(keys, (_LAYER,), 0, 1, counted=False), budget, node_id)
        if not hit:
            return None
        rows = hit[_LAYER]
        if rows.nbytes < _COPIED_BYTES or rows.data_ptr() % ALIGNMENT:
            rows = rows.clone()
        del hit
        memory: Flat = rows.view(torch.uint8).numpy().reshape(-1)
        generation = _generation_of(name, memory)
        if generation is None:
            logger.error("what is stored under the name of a parcel is none, and is left alone")
            return None
        budget.restart()  # what was read is delivered in any case; to drop it late is better than to keep it
        dropped = yield from self._drop_on(link, name, generation, node_id, budget)
        return Taken(generation, memory[_HEADER.size :], dropped is not None)

    def _drop_on(
        self, link: Link, name: ParcelName, generation: bytes | None, node_id: str, budget: Budget
    ) -> Steps[bool | None]:
        here = link.located.peer
        if node_id not in ("", here.node_id):
            return (yield from self._drop_there(node_id, name, generation, budget))
        there = yield from self._drop_there(here, name, generation, budget)
        if there or there is None or node_id:
            return there
        return (yield from self._drop_elsewhere(name, generation, here.node_id, budget))

    def _drop_there(
        self, whom: Peer | str, name: ParcelName, generation: bytes | None, budget: Budget
    ) -> Steps[bool | None]:
        """Drop it on one node, where it is asked first for a generation that isn't known: to drop whatever is there
        when the call arrives might hit a later put."""
        if generation is None:
            generation = yield from self._session.tell(whom, "key_space", name.key, budget=budget)
        if not generation:
            return None if generation is None else False
        dropped: bool | None = yield from self._session.tell(whom, "drop_key", name.key, generation, budget=budget)
        return dropped

    def _drop_elsewhere(
        self, name: ParcelName, generation: bytes | None, here: str, budget: Budget
    ) -> Steps[bool | None]:
        asked, dropped = [here], False
        while True:
            where = yield from self._session.tell(None, "where", name.key, tuple(asked), budget=budget)
            if where is None:
                return None
            (node_id,) = where
            if not node_id:
                return dropped
            there = yield from self._drop_there(node_id, name, generation, budget)
            if there is None:
                return None
            dropped = dropped or there
            asked.append(node_id)

    def _gone(self, sent: Mapping[str, Sequence[Sent]], budget: Budget) -> Steps[list[Sent]]:
        gone: list[Sent] = []
        size = self._session.config.chunk_size
        for node_id, parcels in sent.items():
            keys = b"".join(parcel.name.key for parcel in parcels)
            request = ExplainRequest(keys, len(parcels) * size, (_LAYER,), budget.left_s)
            reply: ExplainReply | None = yield from self._session.tell(node_id, "explain", request, budget=budget)
            if reply is not None:
                gone += [parcel for parcel, why in zip(parcels, reply.reasons, strict=True) if why != OK]
        return gone


def _generation_of(name: ParcelName, memory: Flat) -> bytes | None:
    """The generation of a parcel, None if that isn't one of this name, whole."""
    if memory.nbytes < _HEADER.size:
        return None
    magic, digest, generation, nbytes = _HEADER.unpack(memory[: _HEADER.size].tobytes())
    whole = _HEADER.size + nbytes == memory.nbytes
    return generation if (magic, digest) == (_MAGIC, name.digest) and whole else None
