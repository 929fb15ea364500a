"""Messages as plain lists: each class comes back as it was, and the table knows all that is in it."""

import dataclasses
import typing
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hs_cache import wire
from hs_cache.errors import InvalidInputError
from hs_cache.keys import KVNames
from hs_cache.messages import LayerSpec, LeaseReply, LeaseRequest, ModelRevision, PlanReply, ReserveRequest, Run
from hs_cache.wire import REPLIES, message, plain

CLASSES = tuple(wire._SHAPES)
BUILTINS = (list, int, str, bytes, bool, float, type(None))


def is_message(kind: Any) -> bool:
    return isinstance(kind, type) and (dataclasses.is_dataclass(kind) or hasattr(kind, "_fields"))


def fields_of(cls: type[Any]) -> dict[str, Any]:
    """Every field and what it holds, also inherited ones, in the order of the constructor's arguments."""
    hints = typing.get_type_hints(cls)
    order = cls._fields if hasattr(cls, "_fields") else [each.name for each in dataclasses.fields(cls) if each.init]
    return {name: hints[name] for name in order}


def messages_in(annotation: Any) -> set[type[Any]]:
    """The classes of messages anywhere in an annotation."""
    if is_message(annotation):
        return {annotation}
    return {found for part in typing.get_args(annotation) for found in messages_in(part)}


def parts_of(value: Any) -> Iterator[Any]:
    """All that is nested in lists, and the lists."""
    yield value
    if isinstance(value, list):
        for part in value:
            yield from parts_of(part)


def built(cls: type[Any]) -> st.SearchStrategy[Any]:
    """Messages of a class with anything in each field that its annotation allows."""
    return st.builds(cls, **{name: st.from_type(kind) for name, kind in fields_of(cls).items()})


for _cls in CLASSES:
    st.register_type_strategy(_cls, built(_cls))


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_a_message_comes_back_as_it_was(cls: type[Any]) -> None:
    @given(built(cls))
    def check(original: Any) -> None:
        values = plain(original)
        assert {type(part) for part in parts_of(values)} <= set(BUILTINS)
        back = message(cls, values)
        assert type(back) is cls
        assert repr(back) == repr(original), "also types of what is nested, and NaN"
        assert plain(back) == values or "nan" in repr(values)

    check()


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_a_message_handed_over_as_itself_passes(cls: type[Any]) -> None:
    @given(built(cls))
    def check(original: Any) -> None:
        assert message(cls, original) is original

    check()


def test_what_is_no_message_is_left_as_it_is() -> None:
    for value in (None, 3, b"x", (1, b"y"), [LayerSpec(0, 1, "float32")]):
        assert plain(value) is value


def test_nested_messages_that_are_not_there() -> None:
    reserve = ReserveRequest(b"i", b"c", 1, b"s", b"k", 4, 0, (), True)
    assert (reserve.kv, reserve.revision) == (None, None)
    assert message(ReserveRequest, plain(reserve)) == reserve
    lease = LeaseRequest(b"i", b"c", 1, b"k", 4, (0,), 1.0)
    assert message(LeaseRequest, plain(lease)) == lease


def test_every_nested_message_at_once() -> None:
    specs = (LayerSpec(0, 8, "float32"), LayerSpec(5, 16, "bfloat16"))
    kv = KVNames(b"n" * 32, (("lmcache.tag.user", "u"),))
    reserve = ReserveRequest(
        b"i", b"c", 1, b"s", b"k", 8, 0, specs, True, "engine", kv, (3, 4), True, ModelRevision("m", 2, "r"), False
    )
    lease = LeaseReply(b"i", 8, specs, (Run(0, 0, 8, 0), Run(5, 0, 8, 4096)), False, "kv_unknown", True)
    plan = PlanReply(8, 8, (8, 4), specs, "", True, True)
    for original in (reserve, lease, plan):
        back = message(type(original), plain(original))
        assert back == original
        assert {type(part) for part in parts_of(plain(original))} <= set(BUILTINS)
    assert [type(run) for run in message(LeaseReply, plain(lease)).runs] == [Run, Run]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_the_table_knows_every_field_that_holds_messages(cls: type[Any]) -> None:
    shape = wire._SHAPES[cls]
    one, many = dict(shape.one), dict(shape.many)
    assert len(fields_of(cls)) > 1, "attrgetter gives a value for one name, and tuples for more"
    for position, (name, annotation) in enumerate(fields_of(cls).items()):
        held = messages_in(annotation)
        is_many = tuple in (annotation, typing.get_origin(annotation))
        known = {table[position] for table in (one, many) if position in table}
        assert known == held, f"{cls.__name__}.{name} holds {held}, and hs_cache.wire takes {known} apart"
        assert (position in many) == (bool(held) and is_many), f"{cls.__name__}.{name}"
        for part in held:
            inner = wire._SHAPES[part]
            assert not inner.one and not inner.many, f"{part.__name__} in {cls.__name__} is taken apart one level deep"


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_fields_travel_in_the_order_in_which_the_class_takes_them(cls: type[Any]) -> None:
    assert tuple(cls.__annotations__) == tuple(fields_of(cls))


def test_every_reply_is_in_the_table() -> None:
    assert set(REPLIES.values()) <= set(CLASSES)


@pytest.mark.parametrize("wrong", [None, b"", (1, 2), [], list(range(99)), LayerSpec(0, 1, "float32")])
def test_what_is_neither_a_message_nor_its_fields_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"LeaseRequest: got .*, expected 13 fields"):
        message(LeaseRequest, wrong)


def test_numbers_of_any_size_travel() -> None:
    lease = LeaseRequest(b"i", b"c", 1, b"k", 4, (1 << 80, -(1 << 80)), 1.0)
    assert message(LeaseRequest, plain(lease)) == lease
