"""Rows as tensors, as bytes and over pool memory: every dtype bit by bit, any cut, and nothing that warns."""

import mmap
import pickle
import threading
import warnings
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hs_cache.errors import InvalidInputError
from hs_cache.messages import DTYPE_BYTES, LayerSpec, Run
from hs_cache.rows import (
    PickledRows,
    check_dtype,
    check_rows,
    copy_flat_in,
    copy_in,
    copy_out,
    flat_runs,
    flatten,
    flatten_runs,
    spec_of,
    torch_dtype,
    view_rows,
)
from tests.direct import make_rows

DTYPES = [name for name in DTYPE_BYTES if hasattr(torch, name)]


def bits(rows: torch.Tensor) -> bytes:
    return rows.contiguous().view(torch.uint8).numpy().tobytes()


def random_rows(num_tokens: int, hidden_dim: int, dtype: str, seed: int = 0) -> torch.Tensor:
    """Every bit pattern may occur: NaNs, infinities, subnormals."""
    raw = torch.randint(0, 256, (num_tokens, hidden_dim * DTYPE_BYTES[dtype]), generator=torch.manual_seed(seed))
    return raw.to(torch.uint8).view(torch_dtype(dtype))


def test_the_bytes_per_element_known_without_torch_are_those_of_torch() -> None:
    assert {name: getattr(torch, name).itemsize for name in DTYPES} == {name: DTYPE_BYTES[name] for name in DTYPES}


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_survives_bit_by_bit_by_every_way(dtype: str) -> None:
    rows = random_rows(5, 3, dtype)
    spec = spec_of(7, rows)
    assert spec == LayerSpec(7, 3, dtype)
    memory, run = bytearray(4096), Run(7, 8, 5, 64)
    copy_in(memory, [run], [spec], {7: rows}, 8)
    assert bits(view_rows(memory, 64, 5, spec)) == bits(rows)
    out = torch.empty(5, 3, dtype=torch_dtype(dtype))
    copy_out(memory, [run], spec, out, 8, 13)
    assert bits(out) == bits(rows)
    flat = flatten([rows])
    assert flat.tobytes() == flatten_runs(memory, [run], (spec,)).tobytes() == bits(rows)
    other = bytearray(4096)
    copy_flat_in(other, [run], (spec,), flat, 8)
    assert other == memory
    buffers: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(PickledRows(rows), protocol=5, buffer_callback=buffers.append)
    assert bits(pickle.loads(pickled, buffers=[bytes(buffer.raw()) for buffer in buffers])) == bits(rows)


def test_pickled_rows_are_out_of_band_and_ones_own_on_arrival() -> None:
    rows = make_rows(range(1000))
    buffers: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(PickledRows(rows), protocol=5, buffer_callback=buffers.append)
    assert len(pickled) < 300
    shared = bytearray(buffers[0].raw())
    arrived = pickle.loads(pickled, buffers=[memoryview(shared).toreadonly()])
    before = bytes(shared)
    arrived += 1
    assert shared == before
    assert torch.equal(arrived, rows + 1)


SHAPES_OF_INPUT = {
    "transposed": lambda rows: rows.t().contiguous().t(),
    "every second column": lambda rows: torch.stack([rows, rows], 2).reshape(len(rows), -1)[:, ::2],
    "expanded": lambda rows: rows[:1].expand(len(rows), -1),
    "requires grad": lambda rows: rows.clone().requires_grad_(),
    "parameter": lambda rows: torch.nn.Parameter(rows.clone()),
    "behind others": lambda rows: torch.cat([rows, rows])[len(rows) :],
    "negated lazily": lambda rows: torch._neg_view(-rows),
    "made in inference mode": torch.inference_mode()(lambda rows: rows.clone()),
    "NumPy": lambda rows: rows.float().numpy(),
    "NumPy, Fortran order": lambda rows: np.asfortranarray(rows.float().numpy()),
    "NumPy, backwards": lambda rows: rows.float().flip(0).numpy()[::-1],
    "NumPy, read-only": lambda rows: np.frombuffer(bits(rows.float()), np.float32).reshape(len(rows), -1),
    "NumPy, field of records": lambda rows: _field(rows.float().numpy()),
    "NumPy, broadcast": lambda rows: np.broadcast_to(rows[:1].float().numpy(), rows.shape),
}


def _field(rows: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    records = np.zeros(rows.shape, dtype=[("odd", np.uint8), ("value", np.float32)])
    records["value"] = rows
    return records["value"]


@pytest.mark.parametrize("shape", SHAPES_OF_INPUT.values(), ids=SHAPES_OF_INPUT)
def test_any_layout_of_the_input_is_taken(shape: Any) -> None:
    rows = make_rows(range(6))
    expected = torch.tensor(_floats(shape(rows)))
    checked = check_rows("hidden_states", shape(rows), 6)
    assert not checked.requires_grad
    spec, memory = spec_of(0, checked), bytearray(4096)
    copy_in(memory, [Run(0, 0, 6, 64)], [spec], {0: checked}, 0)
    assert torch.equal(view_rows(memory, 64, 6, spec).float(), expected)
    assert torch.equal(torch.frombuffer(flatten([checked]), dtype=checked.dtype).view(6, -1).float(), expected)


def _floats(rows: Any) -> Any:
    return rows.detach().float().tolist() if isinstance(rows, torch.Tensor) else rows.tolist()


def test_checking_copies_nothing_that_torch_can_view() -> None:
    rows = make_rows(range(6))
    assert check_rows("rows", rows, 6).data_ptr() == rows.data_ptr()
    array = rows.float().numpy()
    assert check_rows("rows", array, 6).data_ptr() == array.ctypes.data
    assert check_rows("rows", array[:, ::2], 6).data_ptr() == array.ctypes.data


def nested(layout: torch.layout) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested tensors warn that they may change
        return torch.nested.nested_tensor([torch.ones(2, 8), torch.ones(6, 8)], layout=layout)


WITHOUT_PLAIN_MEMORY = {
    "nested, of a dense layout": lambda: nested(torch.strided),
    "nested, jagged": lambda: nested(torch.jagged),
    "sparse": lambda: torch.eye(8).to_sparse(),
    "sparse by rows": lambda: torch.eye(8).to_sparse_csr(),
    "meta": lambda: torch.ones(8, 8, device="meta"),
}


@pytest.mark.parametrize("make", WITHOUT_PLAIN_MEMORY.values(), ids=WITHOUT_PLAIN_MEMORY)
@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
def test_tensors_without_plain_memory_are_refused(make: Any) -> None:
    with pytest.raises(
        InvalidInputError, match=r"hidden_states of layer 3: got a sparse, nested, .*expected a dense one"
    ):
        check_rows("hidden_states of layer 3", make(), 8)


def test_no_rows_are_rows_too() -> None:
    assert check_rows("rows", torch.empty(0, 8), 0).shape == (0, 8)
    assert check_rows("rows", np.empty((0, 8), np.float16), 0).shape == (0, 8)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, "bfloat16", None, float, np.float32])
def test_what_is_no_dtype_of_rows(dtype: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"dtype: got .*expected one of torch.float64"):
        check_dtype("dtype", dtype)


def test_a_dtype_that_this_torch_lacks_is_named() -> None:
    with pytest.raises(InvalidInputError, match=r"rows were stored as float128, which PyTorch .* doesn't have"):
        torch_dtype("float128")


@given(st.data())
def test_any_window_comes_out_of_any_cut(data: st.DataObject) -> None:
    """Rows lie in pieces anywhere in the pool; what comes out is the window, by tensors and by bytes."""
    num_tokens = data.draw(st.integers(1, 12))
    specs = (LayerSpec(3, 2, "float32"), LayerSpec(-1, 3, "float16"))
    rows = {spec.layer_idx: random_rows(num_tokens, spec.hidden_dim, spec.dtype, 1) for spec in specs}
    memory, runs, offset = bytearray(8192), [], 0
    for spec in specs:
        cuts = sorted(data.draw(st.sets(st.integers(1, max(1, num_tokens - 1)), max_size=3)) | {0, num_tokens})
        for start, end in pairwise(cuts):
            offset += 64 * data.draw(st.integers(1, 3))
            runs.append(Run(spec.layer_idx, start, end - start, offset))
            offset += (end - start) * spec.row_bytes
            offset += -offset % 64
    copy_in(memory, runs, specs, rows, 0)
    start = data.draw(st.integers(0, num_tokens))
    stop = data.draw(st.integers(start, num_tokens))
    flat = flatten_runs(memory, runs, specs)
    assert flat.tobytes() == flatten(rows.values()).tobytes()
    for spec in specs:
        expected = bits(rows[spec.layer_idx][start:stop])
        out = torch.empty(stop - start, spec.hidden_dim, dtype=torch_dtype(spec.dtype))
        copy_out(memory, runs, spec, out, start, stop)
        assert bits(out) == expected
        copy_out(flat, flat_runs(specs, num_tokens), spec, out.zero_(), start, stop)
        assert bits(out) == expected
    again = bytearray(8192)
    copy_flat_in(again, runs, specs, flat, 0)
    assert again == memory


def test_a_layer_behind_an_odd_number_of_bytes() -> None:
    specs = (LayerSpec(0, 3, "float8_e4m3fn"), LayerSpec(1, 5, "float64"))
    rows = [random_rows(7, spec.hidden_dim, spec.dtype) for spec in specs]
    out = torch.empty(7, 5, dtype=torch.float64)
    copy_out(flatten(rows), flat_runs(specs, 7), specs[1], out, 0, 7)
    assert bits(out) == bits(rows[1])


def test_copying_out_converts_into_any_buffer() -> None:
    rows = make_rows(range(6))
    memory, run = bytearray(4096), Run(0, 0, 6, 0)
    copy_in(memory, [run], [spec_of(0, rows)], {0: rows}, 0)
    out = torch.zeros(8, 6, dtype=torch.float64).t()
    copy_out(memory, [run], spec_of(0, rows), out, 0, 6)
    assert torch.equal(out, rows.double())


def test_read_only_memory_is_read_without_a_warning_and_kept_alive() -> None:
    rows = make_rows(range(6))
    flat = np.frombuffer(bits(rows), np.uint8)
    assert not flat.flags.writeable
    # PyTorch warns once per process unless told otherwise, so an earlier test must not hide it.
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            view = view_rows(flat, 0, 6, spec_of(0, rows))
            del flat
    finally:
        torch.set_warn_always(False)
    assert torch.equal(view, rows)


def test_a_view_keeps_the_object_that_it_stands_on() -> None:
    mapped = mmap.mmap(-1, 4096)
    rows = view_rows(mapped, 64, 6, LayerSpec(0, 8, "bfloat16"))
    rows.copy_(make_rows(range(6)))
    assert mapped[64 : 64 + 96] == bits(make_rows(range(6)))
    del mapped
    assert torch.equal(rows, make_rows(range(6)))


def test_buffers_made_in_inference_mode_are_filled_by_other_threads() -> None:
    rows = make_rows(range(6))
    memory, run = bytearray(4096), Run(0, 0, 6, 0)
    copy_in(memory, [run], [spec_of(0, rows)], {0: rows}, 0)
    with torch.inference_mode():
        out = torch.empty(6, 8)
    thread = threading.Thread(target=copy_out, args=(memory, [run], spec_of(0, rows), out, 0, 6))
    thread.start()
    thread.join(20)
    assert torch.equal(out, rows.float())
