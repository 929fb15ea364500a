"""Arguments of a retrieve: which buffers rows may be copied into, and which not, because rows would be lost there."""

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from hs_cache import retrieval
from hs_cache.errors import InvalidInputError
from hs_cache.keys import ChunkKeys
from hs_cache.messages import LayerSpec, Run
from hs_cache.retrieval import Ask, Copies, Piece, check_ask, view_arrived
from hs_cache.rows import copy_in, empty_rows, flat_runs
from tests.builders import CHUNK_SIZE, make_keys
from tests.direct import make_rows

NUM_TOKENS, HIDDEN_DIM = 8, 6
LAYERS = (0, 1, 2)
SPECS = tuple(LayerSpec(layer, HIDDEN_DIM, "bfloat16") for layer in LAYERS)

Buffers = dict[int, torch.Tensor]


def make_ask(out: Any, *, start: int = 0, dtype: torch.dtype | None = None) -> Ask:
    keys = ChunkKeys(b"".join(make_keys(range(NUM_TOKENS))), NUM_TOKENS, CHUNK_SIZE)
    return check_ask(keys, NUM_TOKENS, LAYERS, start, None, dtype, None, out)


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(*(shape or (NUM_TOKENS, HIDDEN_DIM)), dtype=dtype)


def parts_of_one(base: torch.Tensor, *starts: int) -> Buffers:
    return {layer: base[start : start + NUM_TOKENS] for layer, start in enumerate(starts)}


def inside_the_last_element() -> Buffers:
    """Of the second buffer only the last element of the first one, an eighth of a row of it, is in the first."""
    whole = empty(NUM_TOKENS + 1, HIDDEN_DIM, dtype=torch.float64)
    floats = whole.view(-1).view(torch.float32)
    first = NUM_TOKENS * HIDDEN_DIM * 2 - 1
    return {0: whole[:NUM_TOKENS], 1: floats[first : first + NUM_TOKENS].view(NUM_TOKENS, 1)}


def over_one_array() -> Buffers:
    """Two tensors whose storages PyTorch doesn't know to be one."""
    array = np.zeros((NUM_TOKENS + 4, HIDDEN_DIM), np.float32)
    return {0: torch.from_numpy(array), 1: torch.from_numpy(array[4:])}


def crossing() -> Buffers:
    base = empty(2 * NUM_TOKENS, 2 * NUM_TOKENS)
    return {0: base[:NUM_TOKENS, :HIDDEN_DIM], 1: base.t()[HIDDEN_DIM - 1 : HIDDEN_DIM - 1 + NUM_TOKENS, :HIDDEN_DIM]}


def one_twice() -> Buffers:
    rows = empty()
    return {0: rows, 2: rows}


SHARING: dict[str, Callable[[], Buffers]] = {
    "the same": one_twice,
    "the same in another view": lambda: {0: (rows := empty()), 1: rows.view(-1).view(NUM_TOKENS, HIDDEN_DIM)},
    "by their last and first row": lambda: parts_of_one(empty(40, HIDDEN_DIM), 0, NUM_TOKENS - 1),
    "the first and the last of three": lambda: parts_of_one(empty(40, HIDDEN_DIM), 20, 0, NUM_TOKENS - 1),
    "one within the other": lambda: {0: (base := empty(40, HIDDEN_DIM)), 1: base[16:24]},
    "one within a longer one before others": lambda: {
        0: (base := empty(40, HIDDEN_DIM)),
        1: base[:NUM_TOKENS],
        2: base[30:38],
    },
    "with another one in the gaps": lambda: {
        0: (base := empty(2 * NUM_TOKENS, 2 * HIDDEN_DIM))[:, :HIDDEN_DIM],
        1: base[:NUM_TOKENS, HIDDEN_DIM:],
        2: base[NUM_TOKENS:, :HIDDEN_DIM],
    },
    "by a column": lambda: {0: (base := empty(NUM_TOKENS, 11))[:, :HIDDEN_DIM], 1: base[:, HIDDEN_DIM - 1 :]},
    "by half of an element": inside_the_last_element,
    "in another dtype": lambda: {0: (base := empty()), 1: base.view(torch.bfloat16)},
    "over one NumPy array": over_one_array,
    "transposed, in a column": crossing,
}


@pytest.mark.parametrize("buffers", SHARING.values(), ids=SHARING)
def test_buffers_that_share_memory_are_refused(buffers: Callable[[], Buffers]) -> None:
    with pytest.raises(InvalidInputError, match="out: got buffers that share memory, expected one of its own"):
        make_ask(buffers())


APART: dict[str, Callable[[], Buffers]] = {
    "tensors of their own": lambda: {layer: empty() for layer in LAYERS},
    "one layer of several": lambda: {1: empty()},
    "behind each other": lambda: parts_of_one(empty(3 * NUM_TOKENS, HIDDEN_DIM), 16, 0, 8),
    "planes of one tensor": lambda: dict(enumerate(empty(3, NUM_TOKENS, HIDDEN_DIM))),
    "side by side": lambda: dict(enumerate(empty(NUM_TOKENS, 3, HIDDEN_DIM).unbind(1))),
    "column by column": lambda: dict(enumerate(empty(NUM_TOKENS, HIDDEN_DIM, 3).unbind(2))),
    "side by side and behind": lambda: {
        0: (base := empty(2 * NUM_TOKENS, 2 * HIDDEN_DIM))[:NUM_TOKENS, :HIDDEN_DIM],
        1: base[:NUM_TOKENS, HIDDEN_DIM:],
        2: base[NUM_TOKENS:, :HIDDEN_DIM],
    },
    "every other row": lambda: {0: (base := empty(2 * NUM_TOKENS, HIDDEN_DIM))[::2], 1: base[1::2]},
    "longer than needed": lambda: {layer: empty(NUM_TOKENS + 5, HIDDEN_DIM) for layer in LAYERS},
}


@pytest.mark.parametrize("buffers", APART.values(), ids=APART)
def test_buffers_that_are_apart_are_filled(buffers: Callable[[], Buffers]) -> None:
    rows = {layer: make_rows(range(NUM_TOKENS), layer, hidden_dim=HIDDEN_DIM) for layer in LAYERS}
    memory = bytearray(4096)
    runs = tuple(Run(layer, 0, NUM_TOKENS, 512 * layer) for layer in LAYERS)
    copy_in(memory, runs, SPECS, rows, 0)
    out = buffers()
    copies = Copies(make_ask(out), SPECS, NUM_TOKENS, without={})
    copies.run([Piece(SPECS, 0, NUM_TOKENS, runs, memory)])
    for layer, expected in rows.items():
        assert torch.equal(copies.targets[layer], expected.to(copies.targets[layer].dtype))
        if layer in out:
            assert copies.targets[layer].data_ptr() == out[layer].data_ptr()
            assert torch.equal(out[layer][:NUM_TOKENS], expected.float())


def test_buffers_without_a_row_share_nothing() -> None:
    base = empty(0, HIDDEN_DIM)
    assert set(make_ask({0: base, 1: base}, start=NUM_TOKENS).out) == {0, 1}


BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "expanded": (lambda: empty(1, HIDDEN_DIM).expand(NUM_TOKENS, -1), "got strides"),
    "expanded columns": (lambda: empty(NUM_TOKENS, 1).expand(-1, HIDDEN_DIM), "got strides"),
    "overlapping rows": (lambda: empty(20).as_strided((NUM_TOKENS, HIDDEN_DIM), (2, 1)), "got strides"),
    "overlapping columns": (lambda: empty(40).as_strided((NUM_TOKENS, HIDDEN_DIM), (2, 3)), "got strides"),
    "meta": (lambda: torch.empty(NUM_TOKENS, HIDDEN_DIM, device="meta"), "out of layer 1: got a .*expected a dense"),
    "sparse": (lambda: torch.eye(NUM_TOKENS).to_sparse(), "out of layer 1: got a sparse.*expected a dense"),
    "requires grad": (lambda: empty().requires_grad_(), "got a buffer that requires grad for layer 1"),
    "a parameter": (lambda: torch.nn.Parameter(empty()), "got a buffer that requires grad for layer 1"),
    "integers": (lambda: empty(dtype=torch.int64), r"out\.dtype: got torch\.int64, expected one of"),
    "too short": (
        lambda: empty(NUM_TOKENS - 1, HIDDEN_DIM),
        r"got \[7, 6\] for layer 1, expected a tensor \[at least 8",
    ),
    "one dimension": (lambda: empty(NUM_TOKENS), r"got \[8\] for layer 1, expected a tensor"),
    "an array": (lambda: np.zeros((NUM_TOKENS, HIDDEN_DIM)), "got ndarray for layer 1, expected a tensor"),
    "None": (lambda: None, "got NoneType for layer 1, expected a tensor"),
}


@pytest.mark.parametrize(("buffer", "message"), BAD.values(), ids=BAD)
def test_what_rows_cannot_be_copied_into_is_refused(buffer: Callable[[], Any], message: str) -> None:
    for out in ({1: buffer()}, {0: empty(), 1: buffer()}):
        with pytest.raises(InvalidInputError, match=message):
            make_ask(out)


def test_a_stride_of_zero_over_a_single_row_or_column_is_no_expansion() -> None:
    rows = empty(NUM_TOKENS, 1).as_strided((NUM_TOKENS, 1), (1, 0))
    assert make_ask({0: rows}).out[0] is rows


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ([empty()], "out: got list, expected {layer_idx: buffer}"),
        (empty(), "out: got Tensor, expected {layer_idx: buffer}"),
        ({7: empty()}, r"out: got a buffer for layer 7, expected only layers asked for: \(0, 1, 2\)"),
    ],
)
def test_what_is_no_buffers_by_layer_is_refused(out: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        make_ask(out)


def test_buffers_have_the_dtype_that_is_asked_for() -> None:
    with pytest.raises(
        InvalidInputError, match=r"got torch\.float32 for layer 0, expected torch\.float16 as dtype says"
    ):
        make_ask({0: empty()}, dtype=torch.float16)


@pytest.mark.parametrize("num_tokens", [8, 1 << 20])  # large ones are treated differently
def test_rows_made_for_the_caller_are_on_the_cpu_whatever_the_default_device_is(num_tokens: int) -> None:
    with torch.device("meta"):
        rows = empty_rows(num_tokens, HIDDEN_DIM, torch.bfloat16)
        targets = Copies(make_ask(None), SPECS, NUM_TOKENS, without={}).targets
    assert rows.device.type == "cpu"
    assert rows.shape == (num_tokens, HIDDEN_DIM)
    assert {target.device.type for target in targets.values()} == {"cpu"}


def arrived(dtype: str = "bfloat16", width: int = 6, num_tokens: int = 8) -> tuple[Piece, torch.Tensor]:
    """One layer's rows as they come from another node: a read-only array of one's own."""
    spec = LayerSpec(0, width, dtype)
    rows = torch.randn(num_tokens, width, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    flat = rows.view(torch.uint8).numpy().reshape(-1).copy()
    flat.flags.writeable = False
    return Piece((spec,), 0, num_tokens, flat_runs((spec,), num_tokens), memory=flat), rows


def one_layer(num_tokens: int = 8, **options: Any) -> Ask:
    keys = ChunkKeys(b"".join(make_keys(range(num_tokens))), num_tokens, CHUNK_SIZE)
    return check_ask(keys, num_tokens, 0, options.pop("start", 0), None, **options)


def test_arrived_rows_are_handed_out_as_they_are() -> None:
    piece, rows = arrived()
    views = view_arrived(piece, one_layer(start=3))
    assert torch.equal(views[0], rows[3:])
    memory = np.frombuffer(piece.memory, dtype=np.uint8)
    assert views[0].data_ptr() == memory.ctypes.data + 3 * 6 * 2


@pytest.mark.parametrize(
    "options", [{"dtype": torch.float32}, {"out": {0: torch.zeros(8, 6)}}], ids=["another dtype", "a buffer"]
)
def test_what_is_wanted_otherwise_is_copied(options: dict[str, Any]) -> None:
    assert view_arrived(arrived()[0], one_layer(**options)) == {}


def test_a_process_keeps_so_many_arrived_bytes_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    nbytes = arrived()[0].memory.nbytes
    monkeypatch.setattr(retrieval, "_arrived", retrieval._Arrived())
    monkeypatch.setattr(retrieval, "_MAX_ARRIVED_BYTES", 2 * nbytes)
    first, second, third = (arrived()[0] for _ in range(3))
    held = [view_arrived(first, one_layer()), view_arrived(second, one_layer())]
    assert all(held)
    assert view_arrived(third, one_layer()) == {}
    rest = held.pop()[0][2:3].detach()
    del second
    gc.collect()
    assert view_arrived(third, one_layer()) == {}, "a slice of the second is still there"
    del rest
    gc.collect()
    assert view_arrived(third, one_layer())
