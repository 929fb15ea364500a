"""What LMCache's ``HiddenStateStore`` and the drop-in do with the same calls: cases, and what comes of them.

A case is a function of a `Side`; what it returns in words is its outcome. ``python -m tests.lmcache.cases`` prints them
as the table of ``docs/lmcache.md``, from the expectations alone.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

CHUNK, DIM = 4, 256
SLOT_BYTES = CHUNK * DIM * 4
POOL_SLOTS = 16
"""A chunk of float32 rows takes a slot, on either side."""

_numbers = itertools.count(1)


class Side:
    """A store to try, empty at the start of a case, and an engine whose KV can be put and removed."""

    def __init__(self, store: Any, engine: Any, put_kv: Callable[..., Any], keys: Callable[..., list[Any]]) -> None:
        self.store = store
        self.engine = engine
        self._put_kv = put_kv
        self._keys = keys
        self._prompts: list[list[int]] = []

    def prompt(self, chunks: int, *, kv: bool = True) -> list[int]:
        """Tokens that no case had before, with KV."""
        start = next(_numbers) * 1000
        return self.adopt(list(range(start, start + chunks * CHUNK)), kv=kv)

    def adopt(self, tokens: list[int], *, kv: bool = True) -> list[int]:
        """These tokens, to be cleared away after the case."""
        self._prompts.append(tokens)
        if kv:
            self._put_kv(self.engine, tokens)
        return tokens

    def keys(self, tokens: Sequence[int]) -> list[Any]:
        return self._keys(self.engine, tokens)

    def remove_kv(self, tokens: Sequence[int], chunk: int) -> None:
        assert self.engine.storage_manager.remove(self.keys(tokens)[chunk])

    def put(self, tokens: Any, rows: torch.Tensor, layer: int = 0, offset: int = 0) -> int:
        stored = self.store.store_hidden_states(tokens, rows, layer_idx=layer, token_offset=offset)
        assert isinstance(stored, int)
        return stored

    def got(self, tokens: Any, rows: torch.Tensor, layer: int = 0) -> str:
        """How many rows come back, which must be the first of `rows`."""
        found = self.store.retrieve_hidden_states(tokens, layer_idx=layer)
        if found is None:
            return "miss"
        assert (found.dtype, found.device.type, found.is_contiguous()) == (torch.float32, "cpu", True)
        right = torch.equal(found.nan_to_num(7.0), rows[: len(found)].float().nan_to_num(7.0))
        return f"{len(found)} rows" if right else f"{len(found)} wrong rows"

    def clear(self) -> None:
        for tokens in self._prompts:
            for key in self.keys(tokens):
                self.store.drop_key(key)
        self._prompts.clear()


def rows_for(tokens: Sequence[int], dim: int = DIM, seed: int = 0) -> torch.Tensor:
    """Float32 rows that tell tokens and seeds apart."""
    return torch.randn(len(tokens), dim, generator=torch.Generator().manual_seed(int(tokens[0]) * 31 + seed))


@dataclass(frozen=True)
class Case:
    """Attributes: what is done, in words; what comes of it on either side; why they differ."""

    what: str
    run: Callable[[Side], str]
    lmcache: str
    ours: str
    why: str = ""

    @property
    def name(self) -> str:
        return self.run.__name__


CASES: list[Case] = []


def case(what: str, *, both: str = "", lmcache: str = "", ours: str = "", why: str = "") -> Any:
    """Enter a function as a case; either what comes of it on both sides, or on each and why they differ."""

    def enter(run: Callable[[Side], str]) -> Callable[[Side], str]:
        CASES.append(Case(what, run, both or lmcache, both or ours, why))
        return run

    return enter


def raised(call: Callable[[], Any]) -> str:
    """What a call raises, by the base that callers of LMCache's store catch; its result otherwise."""
    try:
        return str(call())
    except Exception as error:
        known = next((kind for kind in (ValueError, AttributeError) if isinstance(error, kind)), type(error))
        return known.__name__


@case("12 tokens in chunks of 4, stored and retrieved", both="3 stored, 12 rows")
def roundtrip(side: Side) -> str:
    tokens = side.prompt(3)
    rows = rows_for(tokens)
    return f"{side.put(tokens, rows)} stored, {side.got(tokens, rows)}"


@case("stored again with other values", both="0 stored, 12 rows")
def first_write_wins(side: Side) -> str:
    tokens = side.prompt(3)
    rows = rows_for(tokens)
    side.put(tokens, rows)
    return f"{side.put(tokens, rows_for(tokens, seed=1))} stored, {side.got(tokens, rows)}"


@case("a longer prompt asked for, and a shorter one", both="12 rows, 8 rows")
def other_lengths(side: Side) -> str:
    tokens = side.prompt(3)
    rows = rows_for(tokens)
    side.put(tokens, rows)
    longer = side.adopt([*tokens, 1, 2, 3, 4])
    return f"{side.got(longer, rows)}, {side.got(tokens[:10], rows)}"


@case("KV of the second of three chunks is evicted", both="4 rows, chunks left: 1, 3")
def kv_evicted(side: Side) -> str:
    tokens = side.prompt(3)
    rows = rows_for(tokens)
    side.put(tokens, rows)
    side.remove_kv(tokens, 1)
    return f"{side.got(tokens, rows)}, {chunks_left(side, tokens)}"


@case("KV was never stored", both="miss, chunks left: 2, 3")
def kv_never_stored(side: Side) -> str:
    tokens = side.prompt(3, kv=False)
    rows = rows_for(tokens)
    side.put(tokens, rows)
    return f"{side.got(tokens, rows)}, {chunks_left(side, tokens)}"


@case(
    "the second of three chunks is dropped by its CacheEngineKey, twice", both="True, False, 4 rows, chunks left: 1, 3"
)
def dropped_by_key(side: Side) -> str:
    tokens = side.prompt(3)
    rows = rows_for(tokens)
    side.put(tokens, rows)
    key = side.keys(tokens)[1]
    dropped = [side.store.drop_key(key) for _ in range(2)]
    return f"{dropped[0]}, {dropped[1]}, {side.got(tokens, rows)}, {chunks_left(side, tokens)}"


@case("two layers of different width; a third that nobody stored", both="12 rows, 12 rows, miss")
def layers(side: Side) -> str:
    tokens = side.prompt(3)
    wide, narrow = rows_for(tokens), rows_for(tokens, 64)
    side.put(tokens, wide)
    side.put(tokens, narrow, layer=-1)
    return f"{side.got(tokens, wide)}, {side.got(tokens, narrow, layer=-1)}, {side.got(tokens, wide, layer=5)}"


@case("num_cached_chunks counts a chunk once, whatever its layers", both="3")
def counted_once(side: Side) -> str:
    tokens = side.prompt(3)
    side.put(tokens, rows_for(tokens))
    side.put(tokens, rows_for(tokens, 64), layer=1)
    return str(side.store.num_cached_chunks())


@case("bfloat16 and float16 rows", both="12 rows, 12 rows")
def half_precision(side: Side) -> str:
    found = []
    for layer, dtype in ((2, torch.bfloat16), (3, torch.float16)):
        tokens = side.prompt(3)
        rows = rows_for(tokens).to(dtype)
        side.put(tokens, rows, layer=layer)
        found.append(side.got(tokens, rows, layer=layer))
    return ", ".join(found)


@case("rows that are transposed, require grad, or hold NaN and inf", both="12 rows, 12 rows, 12 rows")
def odd_rows(side: Side) -> str:
    found = []
    for change in (lambda r: r.T.contiguous().T, lambda r: r.requires_grad_(), _with_nan):
        tokens = side.prompt(3)
        rows = change(rows_for(tokens))
        side.put(tokens, rows)
        found.append(side.got(tokens, rows.detach()))
    return ", ".join(found)


@case("the caller overwrites what it stored, and what it got", both="12 rows")
def copies(side: Side) -> str:
    tokens = side.prompt(3)
    rows = rows_for(tokens)
    given = rows.clone()
    side.put(tokens, given)
    given.zero_()
    side.store.retrieve_hidden_states(tokens).zero_()
    return side.got(tokens, rows)


@case("token_offset at a chunk's edge: 8 tokens, then 4 more", both="2 stored, 1 stored, 12 rows")
def offset_at_an_edge(side: Side) -> str:
    tokens = side.prompt(3)
    rows = rows_for(tokens)
    first = side.put(tokens[:8], rows[:8])
    return f"{first} stored, {side.put(tokens, rows[8:], offset=8)} stored, {side.got(tokens, rows)}"


@case(
    "token_offset inside a chunk: 6 tokens, then 10 more",
    lmcache="1 stored, 2 stored, 4 rows",
    ours="1 stored, 3 stored, 16 rows",
    why="LMCache skips a chunk of which it gets only a part, and never stores it: a hole that stays. The drop-in holds "
    "the part until the rest comes.",
)
def offset_inside_a_chunk(side: Side) -> str:
    tokens = side.prompt(4)
    rows = rows_for(tokens)
    first = side.put(tokens[:6], rows[:6])
    return f"{first} stored, {side.put(tokens, rows[6:], offset=6)} stored, {side.got(tokens, rows)}"


@case(
    "prefill of 40 tokens in steps of 5 (as of 4096 in steps of 300 with chunks of 256)",
    lmcache="4 rows",
    ours="40 rows",
    why="As above: engines care nothing for chunks.",
)
def steps(side: Side) -> str:
    tokens = side.prompt(10)
    rows = rows_for(tokens)
    for start in range(0, 40, 5):
        side.put(tokens[: start + 5], rows[start : start + 5], offset=start)
    return side.got(tokens, rows)


@case("decoding token by token after 6 of prefill", lmcache="4 rows", ours="16 rows", why="As above.")
def decoding(side: Side) -> str:
    tokens = side.prompt(4)
    rows = rows_for(tokens)
    side.put(tokens[:6], rows[:6])
    for at in range(6, 16):
        side.put(tokens[: at + 1], rows[at : at + 1], offset=at)
    return side.got(tokens, rows)


@case("token ids as a tensor", both="3 stored, 12 rows")
def tensor_ids(side: Side) -> str:
    tokens = side.prompt(3)
    rows = rows_for(tokens)
    return f"{side.put(torch.tensor(tokens), rows)} stored, {side.got(torch.tensor(tokens), rows)}"


@case("token ids as a tuple", lmcache="AttributeError", ours="3", why="LMCache takes lists and tensors only.")
def tuple_ids(side: Side) -> str:
    tokens = side.prompt(3)
    return raised(lambda: side.put(tuple(tokens), rows_for(tokens)))


@case("token ids as a NumPy array", lmcache="ValueError", ours="3", why="As above.")
def numpy_ids(side: Side) -> str:
    tokens = side.prompt(3)
    return raised(lambda: side.put(torch.tensor(tokens).numpy(), rows_for(tokens)))


@case("token_offset -1, or beyond the end", both="ValueError, ValueError")
def offsets_outside(side: Side) -> str:
    tokens = side.prompt(3)
    rows = rows_for(tokens)
    return ", ".join(raised(lambda at=at: side.put(tokens, rows, offset=at)) for at in (-1, 13))


@case("rows of another number, 1-D rows, 3-D rows", both="ValueError, ValueError, ValueError")
def misshapen_rows(side: Side) -> str:
    tokens = side.prompt(3)
    rows = rows_for(tokens)
    wrong = (rows[:5], rows[0], rows.unsqueeze(0))
    return ", ".join(raised(lambda given=given: side.put(tokens, given)) for given in wrong)


@case("no tokens; token_offset at the end with no rows", both="0, None, 0")
def nothing(side: Side) -> str:
    tokens = side.prompt(3)
    side.put(tokens, rows_for(tokens))
    stored = side.put([], torch.empty(0, DIM))
    at_the_end = side.put(tokens, torch.empty(0, DIM), offset=12)
    return f"{stored}, {side.store.retrieve_hidden_states([])}, {at_the_end}"


@case(
    "integer rows",
    lmcache="3",
    ours="ValueError",
    why="Hidden states are floating-point; integers are most likely token ids in the wrong place.",
)
def integer_rows(side: Side) -> str:
    tokens = side.prompt(3)
    return raised(lambda: side.put(tokens, torch.ones(12, DIM, dtype=torch.int64)))


@case(
    "rows of another width for the same layer, behind the first 8",
    lmcache="stored: 2, retrieved: RuntimeError",
    ours="stored: ValueError, retrieved: 8 rows",
    why="LMCache notices when it puts the rows together, and fails at every retrieve from then on. The drop-in refuses "
    "them.",
)
def another_width(side: Side) -> str:
    tokens = side.prompt(4)
    rows = rows_for(tokens)
    side.put(tokens[:8], rows[:8])
    stored = raised(lambda: side.put(tokens, rows_for(tokens, 128)[8:], offset=8))
    return f"stored: {stored}, retrieved: {raised(lambda: side.got(tokens, rows))}"


@case(
    "20 chunks into a pool of 16",
    lmcache="20 stored, miss",
    ours="16 stored, 64 rows",
    why="LMCache evicts the prompt's own head to store its tail. The drop-in stores the head that fits.",
)
def longer_than_the_pool(side: Side) -> str:
    tokens = side.prompt(20)
    rows = rows_for(tokens)
    return f"{side.put(tokens, rows)} stored, {side.got(tokens, rows)}"


@case(
    "12 chunks, then another prompt's 8 into a pool of 16",
    lmcache="first: miss, second: 32 rows",
    ours="first: 32 rows, second: 32 rows",
    why="Where nothing was retrieved yet LMCache evicts heads, without which tails are useless.",
)
def pressure_after_a_store(side: Side) -> str:
    one, other = side.prompt(12), side.prompt(8)
    side.put(one, rows_for(one))
    side.put(other, rows_for(other))
    return f"first: {side.got(one, rows_for(one))}, second: {side.got(other, rows_for(other))}"


@case("the same, and the first was retrieved before", both="first: 32 rows, second: 32 rows")
def pressure_after_a_retrieve(side: Side) -> str:
    one, other = side.prompt(12), side.prompt(8)
    side.put(one, rows_for(one))
    side.got(one, rows_for(one))
    side.put(other, rows_for(other))
    return f"first: {side.got(one, rows_for(one))}, second: {side.got(other, rows_for(other))}"


@case(
    "a chunk of 12 slots into a pool full of chunks of one",
    lmcache="0 stored, miss, left of the others: 8",
    ours="1 stored, 4 rows, left of the others: 4",
    why="LMCache gives up after eight evictions, which it doesn't take back.",
)
def many_evictions(side: Side) -> str:
    small, wide = side.prompt(16), side.prompt(1)
    side.put(small, rows_for(small))
    rows = rows_for(wide, 12 * DIM)
    stored = side.put(wide, rows, layer=12)
    left = sum(side.store.has_chunk(key) for key in side.keys(small))
    return f"{stored} stored, {side.got(wide, rows, layer=12)}, left of the others: {left}"


@case(
    "three layers of 7 chunks into a pool of 16",
    lmcache="8 rows, 8 rows, 28 rows",
    ours="20 rows, 20 rows, 20 rows",
    why="LMCache evicts chunks of the prompt that it is storing, with their other layers. The drop-in evicts its tail, "
    "so that all layers reach equally far.",
)
def layers_beyond_the_pool(side: Side) -> str:
    tokens = side.prompt(7)
    for layer in range(3):
        side.put(tokens, rows_for(tokens, seed=layer), layer=layer)
    return ", ".join(side.got(tokens, rows_for(tokens, seed=layer), layer=layer) for layer in range(3))


@case(
    "tokens -1 stored, tokens -2 asked for",
    lmcache="4 wrong rows",
    ours="miss",
    why="LMCache's default hash, Python's, is the same for -1 and -2. Keys of the drop-in are SHA-256.",
)
def colliding_tokens(side: Side) -> str:
    stored, asked = side.adopt([-1] * CHUNK), side.adopt([-2] * CHUNK)
    side.put(stored, rows_for(stored))
    return side.got(asked, rows_for(asked))


def chunks_left(side: Side, tokens: Sequence[int]) -> str:
    """Which chunks there are, counted from 1."""
    left = [number for number, key in enumerate(side.keys(tokens), 1) if side.store.has_chunk(key)]
    return f"chunks left: {', '.join(map(str, left)) or 'none'}"


def _with_nan(rows: torch.Tensor) -> torch.Tensor:
    rows[3, 5], rows[4, 6] = float("nan"), float("inf")
    return rows


CLOSED = Case(
    "a store after close()",
    nothing,
    "the process crashes (SIGSEGV)",
    "CacheClosedError",
    "LMCache's pool is unmapped by then. `attach` closes that store too; references to it reach the drop-in.",
)


def table() -> str:
    """The table of docs/lmcache.md."""
    lines = ["| What is done | LMCache 0.5.6 | Drop-in | Why |", "|---|---|---|---|"]
    lines += [f"| {one.what} | {one.lmcache} | {one.ours} | {one.why} |" for one in [*CASES, CLOSED]]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
