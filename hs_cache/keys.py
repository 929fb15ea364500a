"""Chunk keys: names for a chunk of a prompt and everything before it.

A key is 16 bytes of a SHA-256 hash chain::

    k_i = SHA-256( k_{i-1} ‖ u64 nbytes(tokens_i) ‖ tokens_i ‖ u64 nbytes(extras_i) ‖ extras_i )[:16]
    k_{-1} = KeySpace.fingerprint
    tokens_i = the token ids of chunk i as little-endian int64
    extras_i = one item per multimodal span that overlaps chunk i, by start, then one item per entry of extra_keys[i]
    item     = one tag byte ‖ u64 nbytes(payload) ‖ payload
               "s" str as UTF-8   "b" bytes   "i" int, shortest little-endian two's complement
               "m" multimodal span: item("i", start) ‖ item("i", length) ‖ item of the content hash

u64 is an unsigned little-endian 64-bit integer. As every variable part carries its length and its type, two different
inputs never feed the hash the same bytes. Nothing depends on the process, the host, ``PYTHONHASHSEED``, pickle or the
versions of the packages in use, so that keys computed anywhere in a cluster agree. Keys are persistent names: a change
of the formula needs another ``_FORMAT``, and the golden vectors in the tests will say so.
"""

import hashlib
import struct
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import index
from typing import Any, NamedTuple, NewType, Protocol, TypeAlias, overload

import numpy as np
import numpy.typing as npt

from hs_cache.errors import InvalidInputError

__all__ = [
    "KEY_BYTES",
    "ChunkKey",
    "ChunkKeys",
    "ExtraKeys",
    "IntTensor",
    "KVNames",
    "KVNaming",
    "KeySpace",
    "MMSpan",
    "TokenDatabase",
    "TokenIds",
    "hash_in_steps",
    "normalise_token_ids",
]

ChunkKey = NewType("ChunkKey", bytes)
"""16 bytes that name one chunk and everything before it."""

KEY_BYTES = 16
"""Size of a `ChunkKey` in bytes."""

MMSpan: TypeAlias = tuple[int, int, str | bytes | int]
"""``(start, length, content_hash)`` of placeholder tokens: start is a position in the whole prompt."""


class IntTensor(Protocol):
    """What `normalise_token_ids` uses of a ``torch.Tensor``; this module must import where torch is not installed."""

    @property
    def ndim(self) -> int: ...
    def detach(self) -> Any: ...
    def cpu(self) -> Any: ...


TokenIds: TypeAlias = Sequence[int] | npt.NDArray[np.integer[Any]] | IntTensor
"""Token ids: a sequence of ints, a 1-D NumPy integer array or a 1-D integer ``torch.Tensor`` on any device."""

ExtraKeys: TypeAlias = Sequence[Sequence[str | bytes | int] | None]
"""Per chunk: whatever else must match, as vLLM has it in its block hashes; None is the same as no entries."""

_FORMAT = b"hs_cache.keys/1"
_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1
_TOKEN_BYTES = 8
_INT_TENSOR_DTYPES = frozenset(f"torch.{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
_EXPECTED = "expected a sequence of ints, a 1-D integer array or a 1-D integer tensor, all within int64"
_NO_EXTRAS = bytes(8)
_SPAN_FIELDS = 3
_PAIR = 2
# hashlib lets go of the GIL for 2048 bytes or more in one call. Hashing those takes about 2 µs, getting the GIL back
# from a busy thread up to 5 ms: beside one, the keys of 32,768 tokens often took 60 to 120 ms instead of 0.3 ms.
_HASH_STEP_BYTES = 2040
_FIRST_STEP_BYTES = _LAST_STEP_BYTES = 1984
"""As much of a chunk's tokens as goes along with what precedes them, and with what follows them."""


@dataclass(frozen=True, slots=True)
class KeySpace:
    """What must match, besides tokens and spans, for two prefixes to share keys.

    Attributes:
        model: Name of the model whose hidden states these are.
        model_revision: Revision of its weights.
        lora_id: LoRA adapter in use, "" for none.
        cache_salt: Secret that keeps tenants apart. It is left out of ``repr`` and of every error message.
        shard: Part of the hidden dimension or of the layers that this process holds, "" when it is whole.
        chunk_size: Tokens per chunk, 1 to 2**63 - 1.
        kv_tags: What a KV source keeps KV apart by besides, such as LMCache's request tags: names and values in order,
            or a mapping. KV under other tags goes at other times, so rows with other tags are other rows.
        fingerprint: 16 bytes over all of the above, the start of every hash chain; computed, not given.

    Raises:
        InvalidInputError: A field has another type, or ``chunk_size`` is out of range.
    """

    model: str = ""
    model_revision: str = ""
    lora_id: str = ""
    cache_salt: str = field(default="", repr=False)
    shard: str = ""
    chunk_size: int = 256
    kv_tags: tuple[tuple[str, str], ...] = ()
    fingerprint: bytes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        parts = [_FORMAT]
        for name in ("model", "model_revision", "lora_id", "cache_salt", "shard"):
            value = getattr(self, name)
            if not isinstance(value, str):
                raise InvalidInputError(f"{name}: got {type(value).__name__}, expected str")
            parts += (_str_item(name), _str_item(value))
        _check_int("chunk_size", self.chunk_size, least=1)
        object.__setattr__(self, "chunk_size", int(self.chunk_size))
        parts += (_str_item("chunk_size"), _int_item(self.chunk_size))
        object.__setattr__(self, "kv_tags", _checked_tags(self.kv_tags))
        for pair in self.kv_tags:
            parts += (_str_item("kv_tags"), *map(_str_item, pair))
        object.__setattr__(self, "fingerprint", hashlib.sha256(b"".join(parts)).digest()[:KEY_BYTES])


class KVNaming(Protocol):
    """How a KV source names chunks which doesn't know our keys; see `hs_cache.kv_names`. Stateless."""

    def names(
        self,
        known: bytes,
        tokens: npt.NDArray[np.int64],
        mm_spans: Sequence[MMSpan],
        chunk_size: int,
        given: list[int] | None = None,
    ) -> bytes:
        """16 bytes per chunk of `tokens`, which begin behind the chunks that have the names `known`.

        Args:
            known: 16 bytes per chunk before, b"" at the start of a prompt.
            tokens: little-endian, in whole chunks, of which the last may be short.
            mm_spans: of the whole prompt, checked, by their start.
            chunk_size: tokens per chunk.
            given: a list that begins with the same tokens, where there is one: making ints of an array takes longer
                than some hashes do.
        """
        ...


@dataclass(frozen=True, slots=True)
class KVNames:
    """What a KV source calls the chunks of a prefix, beside their keys.

    Attributes:
        blob: 16 bytes per chunk, in order.
        tags: names and values that this source keeps beside chunks, such as LMCache's request tags.
    """

    blob: bytes
    tags: tuple[tuple[str, str], ...] = ()

    def pick(self, chunks: Iterable[int]) -> "KVNames":
        """The names of some of the chunks, in that order."""
        if isinstance(chunks, range) and chunks.step == 1:
            return KVNames(self.blob[chunks.start * KEY_BYTES : chunks.stop * KEY_BYTES], self.tags)
        starts = (chunk * KEY_BYTES for chunk in chunks)
        return KVNames(b"".join(self.blob[start : start + KEY_BYTES] for start in starts), self.tags)


@dataclass(frozen=True, slots=True)
class ChunkKeys:
    """The keys of one prefix, in order, as one ``bytes`` object: they travel through Ray as a blob, not as a list.

    Iterating and indexing (also from the end) give a `ChunkKey` each, a slice gives a list of them.

    Attributes:
        blob: ``len(self) * 16`` bytes; the key of chunk i is ``blob[16 * i : 16 * (i + 1)]``.
        num_tokens: Tokens that the keys cover. Only the last chunk may be short.
        chunk_size: Tokens per chunk.
        kv: What the service's KV source calls the chunks; None where that is by their keys.

    Raises:
        InvalidInputError: They don't fit together.
    """

    blob: bytes
    num_tokens: int
    chunk_size: int
    kv: KVNames | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.blob, bytes):
            raise InvalidInputError(f"blob: got {type(self.blob).__name__}, expected bytes")
        _check_int("chunk_size", self.chunk_size, least=1)
        _check_int("num_tokens", self.num_tokens, least=0)
        object.__setattr__(self, "chunk_size", int(self.chunk_size))
        object.__setattr__(self, "num_tokens", int(self.num_tokens))
        expected = -(-self.num_tokens // self.chunk_size) * KEY_BYTES
        if len(self.blob) != expected:
            raise InvalidInputError(
                f"blob: got {len(self.blob)} bytes, expected {expected} for num_tokens={self.num_tokens} "
                f"and chunk_size={self.chunk_size}"
            )
        if self.kv is not None and len(self.kv.blob) != expected:
            raise InvalidInputError(f"kv: got names of {len(self.kv.blob)} bytes, expected {expected} as of the keys")

    def __len__(self) -> int:
        return len(self.blob) // KEY_BYTES

    @overload
    def __getitem__(self, chunk: int) -> ChunkKey: ...

    @overload
    def __getitem__(self, chunk: slice) -> list[ChunkKey]: ...

    def __getitem__(self, chunk: int | slice) -> ChunkKey | list[ChunkKey]:
        if isinstance(chunk, slice):
            return list(self)[chunk]
        start = self._position(chunk) * KEY_BYTES
        return ChunkKey(self.blob[start : start + KEY_BYTES])

    def __iter__(self) -> Iterator[ChunkKey]:
        blob = self.blob
        return (ChunkKey(blob[start : start + KEY_BYTES]) for start in range(0, len(blob), KEY_BYTES))

    def first(self, n_chunks: int) -> "ChunkKeys":
        """The keys of the first ``n_chunks`` chunks.

        Raises:
            IndexError: ``n_chunks`` is outside ``[0, len(self)]``.
        """
        num_tokens, nbytes = self.tokens_before(n_chunks), n_chunks * KEY_BYTES
        kv = None if self.kv is None else KVNames(self.kv.blob[:nbytes], self.kv.tags)
        return ChunkKeys(self.blob[:nbytes], num_tokens, self.chunk_size, kv)

    def tokens_in(self, chunk: int) -> int:
        """Give the number of tokens of one chunk: ``chunk_size``, or less for a short last one.

        Raises:
            IndexError: There is no such chunk.
        """
        return min(self.chunk_size, self.num_tokens - self._position(chunk) * self.chunk_size)

    def tokens_before(self, n_chunks: int) -> int:
        """Give the number of tokens of the first ``n_chunks`` chunks, 0 for none and ``num_tokens`` for all.

        Raises:
            IndexError: ``n_chunks`` is outside ``[0, len(self)]``.
        """
        if not 0 <= n_chunks <= len(self):
            raise IndexError(f"n_chunks {n_chunks} is outside [0, {len(self)}]")
        return min(n_chunks * self.chunk_size, self.num_tokens)

    def _position(self, chunk: int) -> int:
        position = index(chunk)
        if position < 0:
            position += len(self)
        if not 0 <= position < len(self):
            raise IndexError(f"chunk {chunk} of {len(self)}")
        return position


class TokenDatabase:
    """Turns token ids into chunk keys. Stateless, so that it may be shared by threads, copied and pickled.

    Args:
        space: What else must match.
        save_unfull_chunk: Give a short last chunk a key too. Keys of full chunks don't depend on it.
        kv_naming: How the service's KV source names chunks; None where that is by their keys.
    """

    def __init__(
        self,
        space: KeySpace,
        *,
        save_unfull_chunk: bool = False,
        kv_naming: KVNaming | None = None,
    ) -> None:
        if not isinstance(space, KeySpace):
            raise InvalidInputError(f"space: got {type(space).__name__}, expected KeySpace")
        if not isinstance(save_unfull_chunk, bool):
            raise InvalidInputError(f"save_unfull_chunk: got {type(save_unfull_chunk).__name__}, expected bool")
        self.space = space
        self.save_unfull_chunk = save_unfull_chunk
        self._kv_naming = kv_naming

    def with_short_chunks(self, save_unfull_chunk: bool) -> "TokenDatabase":
        """The same, with or without keys for a short last chunk."""
        return TokenDatabase(self.space, save_unfull_chunk=save_unfull_chunk, kv_naming=self._kv_naming)

    def chunk_keys(
        self, token_ids: TokenIds, *, mm_spans: Iterable[MMSpan] = (), extra_keys: ExtraKeys | None = None
    ) -> ChunkKeys:
        """Compute the keys of a prefix. Keys of a shorter prefix of the same prompt are a prefix of these.

        Args:
            token_ids: The full prefix, see `normalise_token_ids`. No tokens give no keys.
            mm_spans: Where tokens stand for audio, images or video, in any order. A span counts for every chunk that it
                overlaps and may reach past the end of ``token_ids``, as its positions are those of the whole prompt.
                The content hash is compared with its type and at full width: 1, "1" and b"1" differ.
            extra_keys: Per chunk that gets a key, whatever else must match there.

        Raises:
            InvalidInputError: ``token_ids`` is not what it should be; a span is not of the form above, starts before 0,
                is empty or overlaps another; ``extra_keys`` has not one entry per chunk, or entries of other types.
        """
        nothing = ChunkKeys(b"", 0, self.space.chunk_size)
        given = token_ids if isinstance(token_ids, list) else None
        return self._keys(nothing, normalise_token_ids(token_ids), mm_spans, extra_keys, given)

    def extend_keys(self, keys: ChunkKeys, more_ids: TokenIds, *, mm_spans: Iterable[MMSpan] = ()) -> ChunkKeys:
        """Compute the keys of a longer prefix, hashing only what is new.

        Args:
            keys: Of a shorter prefix of the same prompt, in this key space; all of its chunks are full.
            more_ids: The tokens behind it.
            mm_spans: As `chunk_keys` takes them, of the whole prompt.

        Raises:
            InvalidInputError: As `chunk_keys`, or ``keys`` end with a short chunk.
        """
        if keys.num_tokens % self.space.chunk_size or keys.chunk_size != self.space.chunk_size:
            raise InvalidInputError(
                f"keys: got {keys.num_tokens} tokens in chunks of {keys.chunk_size}, expected full chunks of "
                f"{self.space.chunk_size}"
            )
        return self._keys(keys, normalise_token_ids(more_ids), mm_spans, None, None)

    def _keys(
        self,
        known: ChunkKeys,
        ids: npt.NDArray[np.int64],
        mm_spans: Iterable[MMSpan],
        extra_keys: ExtraKeys | None,
        given: list[int] | None,
    ) -> ChunkKeys:
        chunk_size = self.space.chunk_size
        num_tokens = len(ids) if self.save_unfull_chunk else len(ids) - len(ids) % chunk_size
        n_chunks = len(known) + -(-num_tokens // chunk_size)
        spans = _checked_spans(mm_spans)
        extras = _span_extras(spans, chunk_size, n_chunks)
        if extra_keys is not None:
            _add_extra_keys(extras, extra_keys, n_chunks)
        ids = ids[:num_tokens]
        blob = known.blob + _hash_chain(self.space, known.blob, ids.view(np.uint8).data, extras)
        kv = None
        if self._kv_naming is not None:
            names = known.kv.blob if known.kv is not None else b""
            names += self._kv_naming.names(names, ids, [span.given for span in spans], chunk_size, given)
            kv = KVNames(names, self.space.kv_tags)
        return ChunkKeys(blob, known.num_tokens + num_tokens, chunk_size, kv)


def normalise_token_ids(token_ids: TokenIds) -> npt.NDArray[np.int64]:
    """Bring token ids into the one form that is hashed.

    Args:
        token_ids: A list, tuple, range or other sequence of ints (of any type with ``__index__``, so NumPy ints too), a
            1-D NumPy array of any integer dtype, byte order and stride, or a 1-D integer tensor on any device. Reading
            a GPU tensor waits for the work queued before it.

    Returns:
        ``[n]``, contiguous, little-endian int64. It may share memory with the input.

    Raises:
        InvalidInputError: Anything else, such as floats, bools (one hidden in a list of ints as well), strings, other
            than one dimension, and ids outside int64.
    """
    torch = sys.modules.get("torch")
    if isinstance(token_ids, np.ndarray):
        return _from_array(token_ids)
    if torch is not None and isinstance(token_ids, getattr(torch, "Tensor", ())):
        return _from_tensor(token_ids)
    if not isinstance(token_ids, Sequence) or isinstance(token_ids, str | bytes | bytearray | memoryview):
        raise InvalidInputError(f"token_ids: got {type(token_ids).__name__}, {_EXPECTED}")
    return _from_sequence(token_ids)


def _from_array(ids: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise InvalidInputError(f"token_ids: got a {ids.ndim}-D array of {ids.dtype}, {_EXPECTED}")
    if ids.dtype.kind == "u" and ids.size and int(ids.max()) > _INT64_MAX:
        at = int(np.argmax(ids > _INT64_MAX))
        raise InvalidInputError(f"token_ids: got {ids[at]} at index {at}, {_EXPECTED}")
    return np.ascontiguousarray(ids, dtype="<i8")


def _from_tensor(tensor: Any) -> npt.NDArray[np.int64]:
    dtype, layout = str(tensor.dtype), str(tensor.layout)
    if tensor.ndim != 1 or dtype not in _INT_TENSOR_DTYPES or layout != "torch.strided" or tensor.is_meta:
        raise InvalidInputError(
            f"token_ids: got a {tensor.ndim}-D tensor of {dtype} ({layout}, on {tensor.device}), {_EXPECTED}"
        )
    return _from_array(tensor.detach().cpu().numpy())


def _from_sequence(token_ids: Sequence[Any]) -> npt.NDArray[np.int64]:
    try:
        # A one-element tensor has __index__ whatever its shape, so a list of the rows of an [n, 1] tensor would pass.
        if len(token_ids) and getattr(token_ids[0], "ndim", 0):
            raise InvalidInputError(f"token_ids: got a {token_ids[0].ndim}-D item at index 0, {_EXPECTED}")
        # A third of the time that array("q", token_ids) takes, and np.fromiter would cut floats.
        ids = np.frombuffer(bytearray(struct.pack(f"{len(token_ids)}q", *token_ids)), dtype=np.int64)
    except (TypeError, OverflowError, struct.error) as error:
        raise InvalidInputError(f"token_ids: got {_first_misfit(token_ids)}, {_EXPECTED}") from error
    # A bool can only have become 0 or 1: looking at the types of those alone costs next to nothing, of all as much as
    # the conversion.
    suspects = np.flatnonzero(ids.view(np.uint64) <= 1).tolist()
    if set(map(type, map(token_ids.__getitem__, suspects))) - {int}:
        for at in suspects:
            if _is_bool(token_ids[at]):
                raise InvalidInputError(f"token_ids: got a {type(token_ids[at]).__name__} at index {at}, {_EXPECTED}")
    return ids.astype("<i8", copy=False)


def _is_bool(value: object) -> bool:
    return isinstance(value, bool) or str(getattr(value, "dtype", "")) in ("bool", "torch.bool")


def _first_misfit(token_ids: Sequence[Any]) -> str:
    if isinstance(token_ids, range):
        return "a range that leaves int64"
    for at, value in enumerate(token_ids):
        try:
            if not _INT64_MIN <= index(value) <= _INT64_MAX:
                return f"an integer outside int64 at index {at}"
        except TypeError:
            return f"a {type(value).__name__} at index {at}"
    return f"a {type(token_ids).__name__} that changed while it was read"


def hash_in_steps(digest: "hashlib._Hash", data: bytes | memoryview) -> None:
    """Update a digest of hashlib's with `data`, in pieces for which it keeps the GIL."""
    for start in range(0, len(data), _HASH_STEP_BYTES):
        digest.update(data[start : start + _HASH_STEP_BYTES])


def _hash_chain(space: KeySpace, known: bytes, tokens: memoryview, extras: dict[int, bytearray]) -> bytes:
    chunk_bytes = space.chunk_size * _TOKEN_BYTES
    key = known[-KEY_BYTES:] or space.fingerprint
    keys, sha256, first_chunk, total = [], hashlib.sha256, len(known) // KEY_BYTES, len(tokens)
    for start in range(0, total, chunk_bytes):
        end = min(start + chunk_bytes, total)
        extra = extras.get(first_chunk + start // chunk_bytes) if extras else None
        behind = _NO_EXTRAS if extra is None else _u64(len(extra)) + extra
        step = start + _FIRST_STEP_BYTES
        digest = sha256(b"".join((key, _u64(end - start), tokens[start : min(step, end)])))
        if end - step > _LAST_STEP_BYTES:
            hash_in_steps(digest, tokens[step:end])
            digest.update(behind)
        else:  # the usual case; Python costs more here than SHA-256
            digest.update(b"".join((tokens[step:end], behind)))
        key = digest.digest()[:KEY_BYTES]
        keys.append(key)
    return b"".join(keys)


class _Span(NamedTuple):
    start: int
    length: int
    content: bytes  # the content hash as an item
    given: MMSpan


def _checked_spans(mm_spans: Iterable[MMSpan]) -> list[_Span]:
    """The spans by their start."""
    if not isinstance(mm_spans, Iterable):
        raise InvalidInputError(f"mm_spans: got {type(mm_spans).__name__}, expected an iterable of spans")
    spans = sorted((_checked_span(at, span) for at, span in enumerate(mm_spans)), key=lambda span: span[:2])
    for one, following in pairwise(spans):
        if one.start + one.length > following.start:
            raise InvalidInputError(
                f"mm_spans: got spans (start, length) {one[:2]} and {following[:2]}, expected spans that don't overlap"
            )
    return spans


def _span_extras(spans: Sequence[_Span], chunk_size: int, n_chunks: int) -> dict[int, bytearray]:
    extras: dict[int, bytearray] = {}
    for start, length, content, _ in spans:
        item = _item(b"m", _int_item(start) + _int_item(length) + content)
        for chunk in range(start // chunk_size, min(n_chunks, -(-(start + length) // chunk_size))):
            extras.setdefault(chunk, bytearray()).extend(item)
    return extras


def _checked_span(at: int, span: object) -> _Span:
    where = f"mm_spans[{at}]"
    if not isinstance(span, tuple | list) or len(span) != _SPAN_FIELDS:
        raise InvalidInputError(f"{where}: got {span!r:.100}, expected a tuple (start, length, content_hash)")
    start, length, content = span
    _check_int(where + " start", start, least=0)
    _check_int(where + " length", length, least=1)
    start, length = int(start), int(length)
    return _Span(start, length, _value_item(where + " content_hash", content), (start, length, content))


def _add_extra_keys(extras: dict[int, bytearray], extra_keys: ExtraKeys, n_chunks: int) -> None:
    if not _is_plain_sequence(extra_keys):
        raise InvalidInputError(
            f"extra_keys: got {type(extra_keys).__name__}, expected a sequence with an entry per chunk"
        )
    if len(extra_keys) != n_chunks:
        raise InvalidInputError(f"extra_keys: got {len(extra_keys)} entries, expected one per chunk, {n_chunks}")
    for chunk, entry in enumerate(extra_keys):
        if entry is None:
            continue
        if not _is_plain_sequence(entry):
            raise InvalidInputError(
                f"extra_keys[{chunk}]: got {type(entry).__name__}, expected a sequence of str, bytes or int, or None"
            )
        for at, value in enumerate(entry):
            extras.setdefault(chunk, bytearray()).extend(_value_item(f"extra_keys[{chunk}][{at}]", value))


def _is_plain_sequence(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview)


def _checked_tags(tags: Any) -> tuple[tuple[str, str], ...]:
    pairs = tuple(tags.items()) if isinstance(tags, Mapping) else tags
    if not isinstance(pairs, tuple) or not all(
        isinstance(pair, tuple) and len(pair) == _PAIR and all(isinstance(part, str) for part in pair) for pair in pairs
    ):
        raise InvalidInputError(f"kv_tags: got {tags!r:.60}, expected a mapping of str to str")
    return pairs


def _check_int(name: str, value: object, *, least: int) -> None:
    if not isinstance(value, int | np.integer) or isinstance(value, bool):
        raise InvalidInputError(f"{name}: got {type(value).__name__}, expected int")
    if not least <= value <= _INT64_MAX:
        raise InvalidInputError(f"{name}: got {value}, expected {least} to 2**63 - 1")


def _u64(value: int) -> bytes:
    return value.to_bytes(8, "little")


def _item(tag: bytes, payload: bytes) -> bytes:
    return tag + _u64(len(payload)) + payload


def _str_item(value: str) -> bytes:
    # surrogatepass: a path that is not UTF-8 comes from the operating system with lone surrogates, and stays distinct.
    return _item(b"s", value.encode("utf-8", "surrogatepass"))


def _int_item(value: int) -> bytes:
    magnitude = value if value >= 0 else ~value  # so that -128 takes one byte like 127
    return _item(b"i", value.to_bytes(magnitude.bit_length() // 8 + 1, "little", signed=True))


def _value_item(where: str, value: object) -> bytes:
    if isinstance(value, str):
        return _str_item(value)
    if isinstance(value, bytes):
        return _item(b"b", value)
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        return _int_item(int(value))
    raise InvalidInputError(f"{where}: got {type(value).__name__}, expected str, bytes or int")
