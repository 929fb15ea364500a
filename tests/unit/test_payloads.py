"""Objects as one piece of memory, and back: equal, of the same types, and sharing what they shared."""

import io
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from hs_cache.errors import InvalidInputError
from hs_cache.extents import ALIGNMENT
from hs_cache.payloads import pack, unpack
from hs_cache.rows import Flat

DTYPES = sorted(
    {
        value
        for value in vars(torch).values()
        if isinstance(value, torch.dtype) and not str(value).startswith(("torch.q", "torch.bits"))
    },
    key=str,
)


def aligned_memory(nbytes: int) -> Flat:
    memory = np.full(nbytes + ALIGNMENT, 0xEE, np.uint8)
    return memory[-memory.ctypes.data % ALIGNMENT :][:nbytes]


def sent(data: Any) -> Any:
    payload = pack(data)
    memory = aligned_memory(payload.nbytes)
    payload.write(memory)
    return unpack(memory)


def same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    def bits(rows: torch.Tensor) -> torch.Tensor:
        rows = rows.detach().resolve_conj().resolve_neg()
        if rows.itemsize == 16:
            return torch.view_as_real(rows).view(torch.int64)
        return rows.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[rows.itemsize])

    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(bits(left), bits(right))


@dataclass
class Stage:
    name: str
    hidden: torch.Tensor
    extra: dict[str, Any]


@pytest.mark.parametrize(
    "value",
    [None, 0, 0.0, False, "", b"", {}, [], (), set(), "text", {"a": [1, (2, None)]}],
    ids=repr,
)
def test_what_has_no_tensor(value: Any) -> None:
    arrived = sent(value)
    assert arrived == value
    assert type(arrived) is type(value)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(dtype: torch.dtype) -> None:
    size = torch.empty(0, dtype=dtype).itemsize
    for numel in (0, 1, 24):
        rows = torch.arange(numel * size, dtype=torch.uint8).view(dtype) if numel else torch.empty(0, dtype=dtype)
        assert same_bytes(sent(rows), rows)
        if numel == 24:
            assert same_bytes(sent(rows.view(4, 6)), rows.view(4, 6))
            assert same_bytes(sent([rows.view(4, 6)[:, ::2]])[0], rows.view(4, 6)[:, ::2])


BASE = torch.arange(60, dtype=torch.float32).view(3, 4, 5)
SHAPES = {
    "whole": BASE,
    "0-dim": torch.tensor(2.5),
    "transposed": BASE.transpose(0, 2),
    "channels last": torch.arange(120.0).view(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "slice": BASE[1:],
    "columns": BASE[..., 1:3],
    "every other": BASE[:, ::2],
    "expanded": torch.tensor([[1.0], [2.0]]).expand(2, 7),
    "empty": torch.empty(0, 4),
    "empty within": torch.empty(3, 0, 4),
    "overlapping": torch.arange(8.0).as_strided((5, 4), (1, 1)),
    "complex": torch.complex(BASE, -BASE),
    "conjugated": torch.complex(BASE, -BASE).conj(),
    "negated": torch.complex(BASE, -BASE).conj().imag,
    "with grad": BASE.clone().requires_grad_(),
    "not a leaf": BASE.clone().requires_grad_() * 2,
    "parameter": torch.nn.Parameter(BASE.clone()),
    "NaN and inf": torch.tensor([float("nan"), float("inf"), -0.0]),
    "bool": BASE > 30,
}


@pytest.mark.parametrize("name", SHAPES)
def test_tensors_of_every_kind(name: str) -> None:
    rows = SHAPES[name]
    arrived = sent({"stage": [rows]})["stage"][0]
    assert type(arrived) is torch.Tensor
    assert arrived.device.type == "cpu"
    assert not arrived.requires_grad
    assert same_bytes(arrived, rows)
    if arrived.numel():
        arrived.zero_()  # writable, and nobody else's
        assert arrived.count_nonzero() == 0


ARRAYS = {
    "plain": np.arange(12.0).reshape(3, 4),
    "0-dim": np.array(3),
    "reversed": np.arange(10)[::-1],
    "every third, reversed": np.arange(10)[::-3],
    "Fortran": np.asfortranarray(np.arange(12).reshape(3, 4)),
    "columns": np.arange(12).reshape(3, 4)[:, 1:3],
    "big-endian": np.arange(5, dtype=">i4"),
    "dates": np.array(["2020-01-01", "NaT"], dtype="datetime64[s]"),
    "text": np.array(["a", "bcd"]),
    "bytes": np.array([b"a", b"bcd"]),
    "bools": np.array([True, False]),
    "records": np.array([(1, 2.5), (3, 4.5)], dtype=[("a", "i1"), ("b", "f8")]),
    "a field of records": np.array([(1, 2.5), (3, 4.5)], dtype=[("a", "i1"), ("b", "f8")])["b"],
    "half": np.arange(5, dtype=np.float16),
    "complex": np.array([1 + 2j]),
    "broadcast": np.broadcast_to(np.arange(3), (4, 3)),
    "empty": np.empty((0, 3)),
    "of nothing": np.empty(3, dtype="V0"),
    "objects": np.array([None, "x", {"a": 1}], dtype=object),
    "read-only": np.frombuffer(b"abcd", dtype=np.uint8),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_of_every_kind(name: str) -> None:
    rows = ARRAYS[name]
    arrived = sent((rows,))[0]
    assert type(arrived) is np.ndarray
    assert (arrived.dtype, arrived.shape) == (rows.dtype, rows.shape)
    assert arrived.tobytes() == rows.tobytes() or rows.dtype.hasobject
    assert arrived.dtype == object or arrived.flags.writeable
    if rows.dtype.hasobject:
        assert arrived.tolist() == rows.tolist()


@given(
    st_numpy.arrays(
        st.sampled_from([np.int8, np.float32, np.complex64]), st_numpy.array_shapes(min_dims=0, max_dims=4, min_side=0)
    ),
    st.data(),
)
def test_any_view_of_any_array(rows: np.ndarray[Any, Any], data: st.DataObject) -> None:
    view = rows[data.draw(st_numpy.basic_indices(rows.shape))] if rows.ndim else rows
    arrived = sent([view, rows, torch.from_numpy(rows.copy())])
    assert np.asarray(arrived[0]).tobytes() == np.asarray(view).tobytes()
    assert arrived[1].tobytes() == rows.tobytes() == arrived[2].numpy().tobytes()


def test_nested_in_everything() -> None:
    inner = torch.nn.Linear(2, 2).state_dict()
    stage = Stage("thinker", BASE, {"rows": (BASE[0], [np.arange(3)]), "weights": inner})
    arrived = sent(stage)
    assert isinstance(arrived, Stage)
    assert arrived.name == "thinker"
    assert torch.equal(arrived.hidden, BASE)
    assert torch.equal(arrived.extra["rows"][0], BASE[0])
    assert arrived.extra["rows"][1][0].tolist() == [0, 1, 2]
    assert torch.equal(arrived.extra["weights"]["weight"], inner["weight"])


def test_objects_within_an_array_of_objects() -> None:
    arrived = sent(np.array([{"rows": BASE}], dtype=object))
    assert torch.equal(arrived[0]["rows"], BASE)


def test_no_tensor_is_pickled(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Any, protocol: Any) -> Any:
        raise AssertionError("a tensor is pickled")

    monkeypatch.setattr(torch.Tensor, "__reduce_ex__", refuse)
    rows = torch.arange(1000.0)
    payload = pack(Stage("x", rows, {"again": [rows, rows.numpy()]}))
    assert payload.nbytes < rows.nbytes + 1500
    memory = aligned_memory(payload.nbytes)
    payload.write(memory)
    assert torch.equal(unpack(memory).hidden, rows)


def test_what_shares_memory_goes_once_and_shares_it_again() -> None:
    base = torch.arange(1024.0).view(32, 32)
    views = {
        "base": base,
        "same": base,
        "alias": base.detach(),
        "rows": base[3:9],
        "transposed": base.t(),
        "columns": base[:, 5:7],
        "array": base.numpy()[::-1],
        "bytes": base.view(torch.uint8),
    }
    assert pack(views).nbytes < base.nbytes + 2048
    arrived = sent(views)
    assert arrived["same"] is arrived["base"]
    assert arrived["rows"].untyped_storage().data_ptr() == arrived["base"].untyped_storage().data_ptr()
    arrived["base"].fill_(7.0)
    for name in ("alias", "rows", "transposed", "columns"):
        assert bool((arrived[name] == 7.0).all()), name
    assert bool((arrived["array"] == 7.0).all())
    assert bool((arrived["bytes"].view(torch.float32) == 7.0).all())
    assert bool((base == torch.arange(1024.0).view(32, 32)).all())


def test_memory_around_a_view_stays_at_home() -> None:
    large = torch.zeros(1 << 20)
    assert pack([large[:4], large[-4:], large.view(-1, 4)[:, 1][:100]]).nbytes < 4096


def test_tensors_that_share_nothing_share_nothing() -> None:
    base = torch.arange(64.0)
    arrived = sent([base[:32], base[32:]])
    arrived[0].zero_()
    assert torch.equal(arrived[1], base[32:])
    file = io.BytesIO()
    torch.save(arrived[1], file)
    assert len(file.getvalue()) < 3000


def test_blocks_are_aligned() -> None:
    parts = [torch.arange(n, dtype=torch.uint8) for n in (1, 3, 65, 7)] + [torch.arange(3.0)[1:]]
    for rows in sent(parts):
        assert rows.data_ptr() % ALIGNMENT == 0


class OwnTensor(torch.Tensor):
    pass


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "quantized": (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "quantized"),
    "sparse": (lambda: torch.ones(2, 2).to_sparse(), "sparse"),
    "meta": (lambda: torch.ones(2, device="meta"), "meta"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged), "NestedTensor"),
    "subclass": (lambda: torch.ones(2).as_subclass(OwnTensor), "class OwnTensor"),
    "generator": (lambda: (i for i in ()), "can't be pickled"),
    "lock": (threading.Lock, "can't be pickled"),
}


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(InvalidInputError, match=message) as caught:
        pack({"deep": [make()]})
    assert str(caught.value).startswith("data: ")


def test_what_is_no_payload() -> None:
    payload = pack([torch.arange(100)])
    memory = aligned_memory(payload.nbytes)
    payload.write(memory)
    for length in (0, 8, 100, payload.nbytes - 1):
        with pytest.raises(ValueError, match="payload"):
            unpack(memory[:length])
