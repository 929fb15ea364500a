"""How much of a pool can be in use when prompts of all sizes come and go and everybody wants room.

Drives `hs_cache.store.HiddenStateStore` at random: key spaces with other hidden dims, dtypes and numbers of layers;
prompts of 1 to 64 chunks, some with a short last chunk, some that go on from an earlier one; writers that take their
time or give up; leases that are held for a while; drops. First the pool is written over many times, for fragments
gather slowly. From then on every store that had to evict, or was refused something, is a sample: what is in use right
after it got its room (resident, reserved or stranded, leased or not), over the size of the pool. The rest are holes,
and the table says what keeps them from being used: slivers fit no layer of any full chunk, others are too small for the
largest layer of the chunks just stored, the rest are large enough. What it costs to use them shows in how a prefix
lies that is read: its chunks, and in how many runs the rows of a layer are; one run needs no copy. The store deals in
offsets, so the pool needs no memory. One run has six key spaces that are unlike each other, the other has one, with two
layers.

    python benchmarks/churn.py [--operations 20000] [--pool-gib 4] [--seed 0] [--json FILE]
"""

import argparse
import itertools
import json
import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from rich.console import Console
from rich.table import Table

from hs_cache.keys import KEY_BYTES, KeySpace
from hs_cache.kv_presence import Presence
from hs_cache.messages import LayerSpec, StoreStatistics
from hs_cache.store import HiddenStateStore, HoldId

CHUNK_SIZE = 256
MAX_CHUNKS = 64
_OWNER = b"churn"
_MAX_WRITERS, _MAX_READERS, _MAX_PROMPTS = 4, 8, 2000
_CHECK_EVERY = 1000
TURNS = 50
"""How often the pool is written over before the first sample; what is in use sinks until about then."""

MIN_OPERATIONS = 100
_COLUMNS = (
    "key spaces",
    "in use, min",
    "p1",
    "median",
    "slivers",
    "too small",
    "large enough",
    "held",
    "stores refused",
    "chunks read",
    "in runs",
)


@dataclass(frozen=True, slots=True)
class Model:
    """A key space: what its chunks look like."""

    space: bytes
    specs: tuple[LayerSpec, ...]


def _model(name: str, *layers: tuple[int, str]) -> Model:
    specs = tuple(LayerSpec(layer_idx, dim, dtype) for layer_idx, (dim, dtype) in enumerate(layers))
    return Model(KeySpace(model=name, chunk_size=CHUNK_SIZE).fingerprint, specs)


ONE = (_model("omni", (2048, "bfloat16"), (1024, "bfloat16")),)
SIX = (
    _model("a", (2048, "bfloat16")),
    _model("b", (3584, "bfloat16"), (3584, "bfloat16")),
    _model("c", (1024, "bfloat16"), (1024, "bfloat16"), (1024, "bfloat16")),
    _model("d", (5120, "bfloat16")),
    _model("e", (2048, "float32")),
    _model("f", (1024, "float32"), (2048, "bfloat16")),
)
"""A full chunk takes 1 to 3.5 MiB, in pieces of 0.5 to 2.5 MiB."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prefix of `keys`; only its last chunk may be short."""

    model: Model
    keys: tuple[bytes, ...]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Sample:
    """The pool right after a store that had to evict or was refused something; parts of the pool, but for `refused`.

    Attributes:
        in_use: resident, reserved or stranded; the next three make up the rest.
        slivers: in holes too small for a layer of any full chunk.
        too_small: in larger ones, too small for the largest layer of this store's chunks.
        large_enough: in holes that such a layer fits.
        held: leased or reserved, and so not to be evicted.
        refused: chunks that got no room.
    """

    in_use: float
    slivers: float
    too_small: float
    large_enough: float
    held: float
    refused: int


@dataclass(frozen=True, slots=True)
class Read:
    """What a lease of a prefix found: so many layers, in so many runs of rows that lie behind each other."""

    num_chunks: int
    num_layers: int
    num_runs: int


class Churn:
    """A store under random use. Seeded: the same arguments give the same samples."""

    def __init__(self, pool_bytes: int, models: Sequence[Model], *, seed: int) -> None:
        self.store = HiddenStateStore(pool_bytes, chunk_size=CHUNK_SIZE)
        self.samples: list[Sample] = []
        self.reads: list[Read] = []
        self._models = models
        self._smallest = min(_piece_bytes(spec) for model in models for spec in model.specs)
        self._random = Random(seed)
        self._numbers = itertools.count()
        self._prompts: deque[Prompt] = deque(maxlen=_MAX_PROMPTS)
        self._writers: list[HoldId] = []
        self._readers: list[HoldId] = []
        self._written_bytes = 0

    def run(self, operations: int, *, turns: int) -> None:
        """Write the pool over `turns` times, then do so many operations and take samples.

        The store is audited in between, and at the end, when nothing is held any more.
        """
        capacity = self.store.stats().capacity_bytes
        for number in itertools.count():
            if self._written_bytes >= turns * capacity:
                break
            self._step(number)
        self.samples.clear()
        self.reads.clear()
        for number in range(operations):
            self._step(number)
        while self._writers:
            self._finish(0)
        while self._readers:
            self.store.end(self._readers.pop())
        self.store.check()

    def _step(self, number: int) -> None:
        (operation,) = self._random.choices((self._write, self._read, self._drop), (60, 37, 3))
        operation()
        if number % _CHECK_EVERY == 0:
            self.store.check()
            self.store.take_changes()  # as the sender of locations does, or they'd pile up

    def _write(self) -> None:
        """Begin a store, which ends at once or later."""
        if len(self._writers) == _MAX_WRITERS:
            self._finish(self._random.randrange(_MAX_WRITERS))
        prompt = self._next_prompt()
        hold = self._new_hold()
        before = self.store.stats()
        reserved = self.store.reserve(
            hold,
            space=prompt.model.space,
            keys=prompt.keys,
            num_tokens=prompt.num_tokens,
            first_chunk=0,
            specs=prompt.model.specs,
            kv_local=True,
        )
        after = self.store.stats()
        rows = {spec.layer_idx: spec.row_bytes for spec in prompt.model.specs}
        self._written_bytes += sum(run.num_tokens * rows[run.layer_idx] for run in reserved.runs)
        if reserved.refused or after.evicted_chunks_total > before.evicted_chunks_total:
            self.samples.append(self._sample(after, prompt.model, reserved.refused))
        self._prompts.append(prompt)
        self._writers.append(hold)
        if self._random.random() < 0.7:
            self._finish(-1)

    def _sample(self, stats: StoreStatistics, model: Model, refused: int) -> Sample:
        largest = max(map(_piece_bytes, model.specs))
        slivers = too_small = large_enough = 0
        for hole in self.store._table._allocator.holes():  # the store itself tells of free bytes only
            if hole.nbytes < self._smallest:
                slivers += hole.nbytes
            elif hole.nbytes < largest:
                too_small += hole.nbytes
            else:
                large_enough += hole.nbytes
        in_use = stats.resident_bytes + stats.reserved_bytes + stats.stranded_bytes
        held = stats.leased_bytes + stats.reserved_bytes
        assert in_use + slivers + too_small + large_enough == stats.capacity_bytes
        capacity = stats.capacity_bytes
        return Sample(
            in_use=in_use / capacity,
            slivers=slivers / capacity,
            too_small=too_small / capacity,
            large_enough=large_enough / capacity,
            held=held / capacity,
            refused=refused,
        )

    def _finish(self, index: int) -> None:
        hold = self._writers.pop(index)
        if self._random.random() < 0.05:
            self.store.end(hold)  # gives up
        else:
            self.store.commit(hold)

    def _read(self) -> None:
        """Lease a prefix of some prompt, for now or for a while."""
        if len(self._readers) == _MAX_READERS:
            self.store.end(self._readers.pop(self._random.randrange(_MAX_READERS)))
        if not self._prompts:
            return
        prompt = self._random.choice(self._prompts)
        hold = self._new_hold()
        found = self.store.lease(hold, prompt.keys, tuple(spec.layer_idx for spec in prompt.model.specs))
        if not found.keys:
            return
        granted = self.store.settle(hold, [Presence.PRESENT] * len(found.keys))
        self.reads.append(Read(len(found.keys), len(granted.specs), len(granted.runs)))
        if self._random.random() < 0.5:
            self._readers.append(hold)
        else:
            self.store.end(hold)

    def _drop(self) -> None:
        if self._prompts:
            self.store.drop(self._random.choice(self._random.choice(self._prompts).keys))

    def _next_prompt(self) -> Prompt:
        """A new prompt, or one that goes on from where an earlier one is full."""
        earlier = self._random.choice(self._prompts) if self._prompts and self._random.random() < 0.3 else None
        model = earlier.model if earlier else self._random.choice(self._models)
        head = earlier.keys[: self._random.randint(0, earlier.num_tokens // CHUNK_SIZE)] if earlier else ()
        count = self._random.randint(max(1, len(head)), MAX_CHUNKS)
        keys = (*head, *(self._random.randbytes(KEY_BYTES) for _ in range(count - len(head))))
        short = count > len(head) and self._random.random() < 0.3
        missing = self._random.randrange(1, CHUNK_SIZE) if short else 0
        return Prompt(model, keys, count * CHUNK_SIZE - missing)

    def _new_hold(self) -> HoldId:
        return (_OWNER, next(self._numbers))


def _piece_bytes(spec: LayerSpec) -> int:
    return CHUNK_SIZE * spec.row_bytes


def measure(pool_bytes: int, models: Sequence[Model], operations: int, *, seed: int, turns: int = TURNS) -> list[float]:
    """Over the samples of a run: in use at least, 1st percentile, median; means of the holes, and of what is held; and
    which part of the stores was refused something. Of the reads, the mean number of chunks, and that of runs per layer.
    """
    churn = Churn(pool_bytes, models, seed=seed)
    churn.run(operations, turns=turns)
    samples = churn.samples
    in_use = sorted(sample.in_use for sample in samples)
    return [
        in_use[0],
        in_use[len(in_use) // 100],
        statistics.median(in_use),
        statistics.fmean(sample.slivers for sample in samples),
        statistics.fmean(sample.too_small for sample in samples),
        statistics.fmean(sample.large_enough for sample in samples),
        statistics.fmean(sample.held for sample in samples),
        statistics.fmean(sample.refused > 0 for sample in samples),
        statistics.fmean(read.num_chunks for read in churn.reads),
        sum(read.num_runs for read in churn.reads) / sum(read.num_layers for read in churn.reads),
    ]


def main() -> None:
    """Parse, run, show."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operations", type=int, default=20_000, help="in the steady state")
    parser.add_argument("--pool-gib", type=float, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="also write the figures there")
    options = parser.parse_args()
    if options.operations < MIN_OPERATIONS:
        parser.error(f"--operations: got {options.operations}, expected at least {MIN_OPERATIONS}")
    if not 0.25 <= options.pool_gib <= 1024:
        parser.error(f"--pool-gib: got {options.pool_gib:g}, expected 0.25 to 1024")
    began = time.perf_counter()
    pool_bytes = int(options.pool_gib * 2**30)
    rows: list[list[str | float]] = [
        [name, *measure(pool_bytes, models, options.operations, seed=options.seed)]
        for name, models in (("six", SIX), ("one", ONE))
    ]
    facts = {
        "usable_fraction": rows[0][3],
        "usable_fraction_p1": rows[0][2],
        "usable_fraction_min": rows[0][1],
        "usable_fraction_one_space": rows[1][3],
        "usable_fraction_one_space_p1": rows[1][2],
        "runs_per_layer": rows[0][-1],
        "runs_per_layer_one_space": rows[1][-1],
    }
    title = (
        f"a pool of {options.pool_gib:g} GiB, written over {TURNS} times, then {options.operations:,} operations; "
        "parts of the pool"
    )
    table = Table(title=title, title_justify="left")
    for column in _COLUMNS:
        table.add_column(column, justify="left" if column == _COLUMNS[0] else "right")
    for name, *figures in rows:
        table.add_row(str(name), *(f"{figure:.3f}" for figure in figures))
    Console(width=120).print(table)
    print(f"the store passed its audits; {time.perf_counter() - began:.0f} s")
    if options.json is not None:
        results = {"title": title, "columns": list(_COLUMNS), "rows": rows, "facts": facts}
        options.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
