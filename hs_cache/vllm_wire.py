"""vLLM's KV events as they come off the wire, every field checked. Knows nothing of ZeroMQ and msgpack.

The format is that of vllm/distributed/kv_events.py (vLLM, Apache-2.0), read at vLLM's main of 2026 and older. A batch
is an array ``[ts, events, data_parallel_rank]`` or a map with these keys, an event likewise an array that begins with
its type, or a map with the key ``type``; releases have had all four combinations but one. What an array lacks at its
end counts as None.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from hs_cache.errors import InvalidInputError

BlockHash: TypeAlias = int | bytes

_BATCH = ("ts", "events", "data_parallel_rank")
_STORED = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
)
_REMOVED = ("block_hashes", "medium", "group_idx")
_CLEARED = ("medium",)
_FIELDS = {
    "BlockStored": _STORED,
    "BlockRemoved": _REMOVED,
    "AllBlocksCleared": _CLEARED,
    "TierBlocksCleared": _CLEARED,
}
_MAX_HASH_BYTES = 64
_INT_MIN, _INT_MAX = -(2**63), 2**64 - 1


@dataclass(frozen=True, slots=True)
class Stored:
    """``BlockStored``: a run of blocks, each the child of the one before it, the first one that of `parent`.

    Attributes:
        tokens: little-endian int64, of all blocks; empty where an event doesn't tell them.
        extra_keys: one entry per block as it came; None where an event doesn't tell them.
        group: KV cache group; None where an event tells none.
    """

    hashes: tuple[BlockHash, ...]
    parent: BlockHash | None
    tokens: bytes
    block_size: int
    lora_id: int | None
    lora_name: str | None
    extra_keys: tuple[Sequence[Any] | None, ...] | None
    medium: str | None
    group: int | None
    kind: str | None


@dataclass(frozen=True, slots=True)
class Removed:
    """``BlockRemoved``: blocks that `medium` of `group` no longer has; None where an event tells none."""

    hashes: tuple[BlockHash, ...]
    medium: str | None
    group: int | None


@dataclass(frozen=True, slots=True)
class Cleared:
    """``AllBlocksCleared``, or ``TierBlocksCleared`` of one medium."""

    medium: str | None


Event: TypeAlias = Stored | Removed | Cleared


@dataclass(frozen=True, slots=True)
class Batch:
    """What one message says; `ignored` counts events of types that are not known here."""

    events: tuple[Event, ...]
    ignored: int


def read_batch(message: object) -> Batch:
    """Check a decoded message.

    Raises:
        InvalidInputError: it is no batch of events, or an event of a known type has a field of another type.
    """
    fields = _fields("batch", message, _BATCH, skip=0)
    _expect("ts", fields["ts"], float, int)
    _expect("data_parallel_rank", fields["data_parallel_rank"], int, type(None))
    events: list[Event] = []
    ignored = 0
    for event in _listed("events", fields["events"]):
        kind = _type_of(event)
        if kind not in _FIELDS:
            ignored += 1
            continue
        found = _fields(kind, event, _FIELDS[kind], skip=1)
        if kind == "BlockStored":
            events.append(_stored(found))
        elif kind == "BlockRemoved":
            events.append(Removed(_hashes(found["block_hashes"]), _text("medium", found), _int("group_idx", found)))
        elif kind == "TierBlocksCleared" and found["medium"] is None:
            raise InvalidInputError("TierBlocksCleared: got no medium, expected its name")
        else:
            events.append(Cleared(_text("medium", found)))
    return Batch(tuple(events), ignored)


def _stored(fields: dict[str, Any]) -> Stored:
    parent = fields["parent_block_hash"]
    extra_keys = fields["extra_keys"]
    if extra_keys is not None:
        for entry in _listed("extra_keys", extra_keys):
            if entry is not None:
                _listed("extra_keys entry", entry)
    block_size = _int("block_size", fields)
    if block_size is None or block_size < 0:
        raise InvalidInputError(f"block_size: got {block_size!r}, expected a number of tokens")
    return Stored(
        hashes=_hashes(fields["block_hashes"]),
        parent=None if parent is None else _hash(parent),
        tokens=_tokens(fields["token_ids"]),
        block_size=block_size,
        lora_id=_int("lora_id", fields),
        lora_name=_text("lora_name", fields),
        extra_keys=None if extra_keys is None else tuple(extra_keys),
        medium=_text("medium", fields),
        group=_int("group_idx", fields),
        kind=_text("kv_cache_spec_kind", fields),
    )


def _type_of(event: object) -> str:
    tag: object = None
    if isinstance(event, dict):
        tag = event.get("type")
    elif isinstance(event, list | tuple) and event:
        tag = event[0]
    if not isinstance(tag, str):
        raise InvalidInputError(f"event: got {type(event).__name__} without a type, expected one with its type")
    return tag


def _fields(name: str, value: object, names: tuple[str, ...], *, skip: int) -> dict[str, Any]:
    if isinstance(value, dict):
        return {field: value.get(field) for field in names}
    if isinstance(value, list | tuple):
        given = value[skip : skip + len(names)]
        return dict.fromkeys(names) | dict(zip(names, given, strict=False))
    raise InvalidInputError(f"{name}: got {type(value).__name__}, expected an array or a map")


def _listed(name: str, value: object) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        raise InvalidInputError(f"{name}: got {type(value).__name__}, expected a list")
    return value


def _expect(name: str, value: object, *types: type) -> None:
    if type(value) not in types:  # not isinstance: a bool is no int here
        expected = " or ".join(kind.__name__ for kind in types)
        raise InvalidInputError(f"{name}: got {type(value).__name__}, expected {expected}")


def _text(name: str, fields: dict[str, Any]) -> str | None:
    value = fields[name]
    _expect(name, value, str, type(None))
    return None if value is None else str(value)


def _int(name: str, fields: dict[str, Any]) -> int | None:
    value = fields[name]
    _expect(name, value, int, type(None))
    return None if value is None else int(value)


def _hash(value: object) -> BlockHash:
    if type(value) is int and _INT_MIN <= value <= _INT_MAX:
        return value
    if type(value) is bytes and 0 < len(value) <= _MAX_HASH_BYTES:
        return value
    raise InvalidInputError(f"block hash: got {value!r:.80}, expected an integer of 64 bits or up to 64 bytes")


def _hashes(value: object) -> tuple[BlockHash, ...]:
    return tuple(_hash(entry) for entry in _listed("block_hashes", value))


def _tokens(value: object) -> bytes:
    tokens = _listed("token_ids", value)
    if set(map(type, tokens)) - {int}:
        raise InvalidInputError("token_ids: got other things than integers, expected integers")
    try:
        ids = np.frombuffer(array("q", tokens), dtype=np.int64)
    except OverflowError:
        raise InvalidInputError("token_ids: got an integer outside int64, expected integers within it") from None
    return ids.astype("<i8", copy=False).tobytes()
