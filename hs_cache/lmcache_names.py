"""LMCache's chunk hashes, computed without LMCache: the KV names of ``kv_source: lmcache``.

Formulas, as of lmcache 0.5.6 (Apache-2.0), ``lmcache/v1/token_database.py``::

    h_i = H((h_{i-1}, tokens_i, ()))     h_{-1} = NONE_HASH
    H   = Python's hash()                                              "builtin"
    H   = the first 8 bytes, big-endian, of SHA-256 over canonical CBOR (RFC 8949)     "sha256_cbor"

``NONE_HASH`` is 0 where vLLM isn't installed beside LMCache; where it is, vLLM's ``init_none_hash``
(``vllm/v1/core/kv_cache_utils.py``, Apache-2.0) makes it H of the text of ``PYTHONHASHSEED``. Without that variable it
is random, and nobody else can compute these hashes.

LMCache's vLLM adapter (``lmcache/integration/vllm/utils.py``) puts values in the place of a multimodal item's tokens,
which come from its identifier::

    seed = SHA-256(str(identifier))     values_{8j} … values_{8j+7} = SHA-256(seed ‖ u64 big-endian j), as eight
                                                                       big-endian uint32, less their highest bit

A KV name is the hash as 8 bytes, big-endian (two's complement, since Python's is signed), then 8 zero bytes.
"""

import hashlib
import struct
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hs_cache.config import LMCACHE_HASHES, CacheConfig, is_hash_seed
from hs_cache.errors import InvalidInputError
from hs_cache.keys import KEY_BYTES, MMSpan, hash_in_steps

__all__ = ["EngineNaming", "LMCacheNaming", "chunk_hash", "name_of", "probe_tokens"]

_PADDING = bytes(KEY_BYTES - 8)
_PROBE_STEP = 7
_MASK64 = 2**64 - 1
_VALUES_PER_DIGEST = 8
_NO_EXTRAS = b"\x80"  # the empty tuple, in CBOR
# In CBOR an integer is one byte alone, or one byte and then 1, 2, 4 or 8.
_SIZES = np.array([1, 2, 3, 5, 9], dtype=np.int64)
_LIMITS = ((24, 2), (1 << 8, 3), (1 << 16, 5), (1 << 32, 9))  # from that value on it takes so many


def name_of(chunk_hash: int) -> bytes:
    """The KV name of a chunk with this hash, signed or not."""
    return (chunk_hash & _MASK64).to_bytes(8, "big") + _PADDING


def chunk_hash(name: bytes, *, signed: bool) -> int:
    """The hash that `name` was made of; ``builtin`` hashes are signed, the others aren't."""
    return int.from_bytes(name[:8], "big", signed=signed)


class LMCacheNaming:
    """Names chunks as an LMCache engine does; see `hs_cache.keys.KVNaming`. Stateless, and needs no LMCache.

    Args:
        algorithm: the engines' ``pre_caching_hash_algorithm``, one of `hs_cache.config.LMCACHE_HASHES`. ``builtin`` is
            that of the Python this runs in, so engines and clients have to run the same version.
        seed: their ``PYTHONHASHSEED`` where vLLM is installed, else None.

    Raises:
        InvalidInputError: there is no such algorithm, or no such seed.
    """

    def __init__(self, algorithm: str = "builtin", seed: str | None = None) -> None:
        if algorithm not in LMCACHE_HASHES:
            raise InvalidInputError(f"algorithm: got {algorithm!r}, expected one of {', '.join(LMCACHE_HASHES)}")
        if seed is not None and not isinstance(seed, str):
            raise InvalidInputError(f"seed: got {type(seed).__name__}, expected str or None")
        self.signed = algorithm == "builtin"
        if seed is None:
            self._none_hash = 0
        elif self.signed:
            self._none_hash = _hash_of_seed(seed)
        else:
            self._none_hash = _fold(hashlib.sha256(_cbor_text(seed)).digest())

    def names(
        self,
        known: bytes,
        tokens: npt.NDArray[np.int64],
        mm_spans: Sequence[MMSpan],
        chunk_size: int,
        given: list[int] | None = None,
    ) -> bytes:
        """See `hs_cache.keys.KVNaming.names`. An item's content hash counts as ``str(content_hash)``, as in LMCache."""
        if not len(tokens):
            return b""
        hashed = _with_items(tokens, mm_spans, len(known) // KEY_BYTES * chunk_size)
        parent = chunk_hash(known[-KEY_BYTES:], signed=self.signed) if known else self._none_hash
        if self.signed:
            hashes = _builtin_chain(parent, hashed, chunk_size, given if hashed is tokens else None)
        else:
            hashes = _sha256_chain(parent, hashed, chunk_size)
        return b"".join(map(name_of, hashes))


def probe_tokens(chunk_size: int) -> npt.NDArray[np.int64]:
    """Two chunks, whose names show how an engine hashes tokens, and what its first hash is."""
    return np.arange(2 * chunk_size, dtype=np.int64) * _PROBE_STEP


@dataclass(frozen=True)
class EngineNaming:
    """How a live engine names its chunks.

    Attributes:
        chunk_size, save_unfull_chunk: its settings.
        hash_func: its hash function, as text.
        probe: its names of `probe_tokens(chunk_size)`.
    """

    chunk_size: int
    save_unfull_chunk: bool
    hash_func: str
    probe: bytes

    def difference(self, config: CacheConfig) -> str:
        """In which setting engine and service differ, so that a no of the engine is no absence; "" in none."""
        for setting in ("chunk_size", "save_unfull_chunk"):
            theirs, ours = getattr(self, setting), getattr(config, setting)
            if theirs != ours:
                return f"{setting}: the LMCache engine has {theirs}, the service {ours}"
        naming = LMCacheNaming(config.pre_caching_hash_algorithm, config.kv_hash_seed)
        if self.probe == naming.names(b"", probe_tokens(config.chunk_size), (), config.chunk_size):
            return ""
        return (
            "pre_caching_hash_algorithm: the LMCache engine doesn't name chunks as the service's "
            f"{config.pre_caching_hash_algorithm!r} with kv_hash_seed {config.kv_hash_seed!r} does. It uses "
            f"{self.hash_func}; kv_hash_seed has to be the engine's PYTHONHASHSEED where vLLM is installed, and null "
            "elsewhere"
        )


def _builtin_chain(parent: int, tokens: npt.NDArray[np.int64], chunk_size: int, given: list[int] | None) -> list[int]:
    hashes, buffer = [], tokens.data
    for start in range(0, len(tokens), chunk_size):
        end = min(start + chunk_size, len(tokens))
        # From an array straight to a tuple: a list in between costs a fifth of the whole.
        ids = struct.unpack_from(f"<{end - start}q", buffer, start * 8) if given is None else tuple(given[start:end])
        parent = hash((parent, ids, ()))
        hashes.append(parent)
    return hashes


def _sha256_chain(parent: int, tokens: npt.NDArray[np.int64], chunk_size: int) -> list[int]:
    starts = range(0, len(tokens), chunk_size)
    body, sizes = _cbor_ints(tokens)
    ends = np.cumsum(np.add.reduceat(sizes, starts)).tolist()
    begin, hashes = 0, []
    for start, end in zip(starts, ends, strict=True):
        count = min(chunk_size, len(tokens) - start)
        digest = hashlib.sha256(b"\x83" + _cbor_head(0, parent) + _cbor_head(4, count))
        hash_in_steps(digest, body[begin:end])
        digest.update(_NO_EXTRAS)
        parent, begin = _fold(digest.digest()), end
        hashes.append(parent)
    return hashes


def _fold(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "big")


def _cbor_head(major: int, value: int) -> bytes:
    """The shortest head of a CBOR item: its major type, and its value or length."""
    if value < _LIMITS[0][0]:
        return bytes([major << 5 | value])
    kind, size = [(kind, size) for kind, (limit, size) in enumerate(_LIMITS) if value >= limit][-1]
    return bytes([major << 5 | 24 + kind]) + value.to_bytes(size - 1, "big")


def _cbor_text(text: str) -> bytes:
    encoded = text.encode()
    return _cbor_head(3, len(encoded)) + encoded


def _cbor_ints(values: npt.NDArray[np.int64]) -> tuple[memoryview, npt.NDArray[np.int64]]:
    """`values` in canonical CBOR, one behind the other, and the bytes that each takes."""
    negative = values < 0
    magnitudes = (values ^ (values >> 63)).view(np.uint64)  # -1 - n of a negative n, as CBOR has it
    width = len(_cbor_head(0, int(magnitudes.max())))
    kinds = np.zeros(len(values), dtype=np.uint8)
    for limit, size in _LIMITS:
        if size <= width:
            kinds += (magnitudes >= limit).view(np.uint8)
    # Each row is a head and then the lowest bytes; those that the head leaves no room for are cut out at the end.
    rows = np.empty((len(values), width), dtype=np.uint8)
    rows[:, 0] = np.where(kinds == 0, magnitudes.astype(np.uint8), kinds + 23) | negative.view(np.uint8) << 5
    if width > 1:
        rows[:, 1:] = magnitudes.astype(f">u{width - 1}").view(np.uint8).reshape(-1, width - 1)
    kept = np.arange(width) > width - _SIZES[:, np.newaxis]
    kept[:, 0] = True
    return rows.ravel().take(np.flatnonzero(kept.take(kinds, axis=0))).data, _SIZES.take(kinds)


def _with_items(tokens: npt.NDArray[np.int64], mm_spans: Sequence[MMSpan], position: int) -> npt.NDArray[np.int64]:
    """`tokens`, the first of which is at `position` of the prompt, with values in the place of multimodal items."""
    stop = position + len(tokens)
    spans = [span for span in mm_spans if span[0] < stop and span[0] + span[1] > position]
    if not spans:
        return tokens
    tokens = tokens.copy()
    for start, length, content in spans:
        begin, end = max(start, position), min(start + length, stop)
        tokens[begin - position : end - position] = _item_values(str(content), begin - start, end - start)
    return tokens


def _item_values(identifier: str, begin: int, end: int) -> npt.NDArray[np.int64]:
    """Values ``begin .. end`` of an item."""
    seed = hashlib.sha256(identifier.encode()).digest()
    first = begin // _VALUES_PER_DIGEST
    blocks = range(first, -(-end // _VALUES_PER_DIGEST))
    digests = b"".join(hashlib.sha256(seed + block.to_bytes(8, "big")).digest() for block in blocks)
    skipped = first * _VALUES_PER_DIGEST
    return np.frombuffer(digests, dtype=">u4")[begin - skipped : end - skipped].astype(np.int64) & 0x7FFF_FFFF


def _hash_of_seed(seed: str) -> int:
    """``hash(seed)`` in a Python that was started with ``PYTHONHASHSEED=seed``.

    SipHash of J.-P. Aumasson and D. J. Bernstein, keyed as CPython does it (``Python/bootstrap_hash.c``,
    ``Python/pyhash.c``).
    """
    rounds: dict[str, tuple[int, int]] = {"siphash13": (1, 3), "siphash24": (2, 4)}
    if sys.hash_info.algorithm not in rounds:
        raise InvalidInputError(f"seed: got one for this Python's {sys.hash_info.algorithm}, expected SipHash")
    if not is_hash_seed(seed):
        raise InvalidInputError(f"seed: got {seed!r}, expected PYTHONHASHSEED as digits, less than 2**32")
    key = _seed_key(int(seed))
    unsigned = _siphash(key, seed.encode(), *rounds[sys.hash_info.algorithm])
    signed = unsigned - 2**64 if unsigned >> 63 else unsigned
    return -2 if signed == -1 else signed


def _seed_key(seed: int) -> bytes:
    key, state = bytearray(), seed
    for _ in range(16):
        state = (state * 214013 + 2531011) & 0xFFFF_FFFF
        key.append(state >> 16 & 0xFF)
    return bytes(key) if seed else bytes(16)


def _siphash(key: bytes, data: bytes, per_word: int, at_the_end: int) -> int:
    k0, k1 = int.from_bytes(key[:8], "little"), int.from_bytes(key[8:], "little")
    state = [k0 ^ 0x736F6D6570736575, k1 ^ 0x646F72616E646F6D, k0 ^ 0x6C7967656E657261, k1 ^ 0x7465646279746573]
    padded = data + bytes(7 - len(data) % 8) + bytes([len(data) & 0xFF])
    for at in range(0, len(padded), 8):
        word = int.from_bytes(padded[at : at + 8], "little")
        state[3] ^= word
        _repeat(_sip_round, per_word, state)
        state[0] ^= word
    state[2] ^= 0xFF
    _repeat(_sip_round, at_the_end, state)
    return state[0] ^ state[1] ^ state[2] ^ state[3]


def _repeat(step: Callable[[list[int]], None], times: int, state: list[int]) -> None:
    for _ in range(times):
        step(state)


def _sip_round(v: list[int]) -> None:
    for a, b, rotation, half in ((0, 1, 13, True), (2, 3, 16, False), (0, 3, 21, False), (2, 1, 17, True)):
        v[a] = (v[a] + v[b]) & _MASK64
        v[b] = _rotated(v[b], rotation) ^ v[a]
        if half:
            v[a] = _rotated(v[a], 32)


def _rotated(word: int, by: int) -> int:
    return (word << by | word >> (64 - by)) & _MASK64
