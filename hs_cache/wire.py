"""The messages of every store and retrieve as they cross Ray: lists of numbers, strings, bytes and such lists.

Ray packs these with msgpack, in C. Tuples it pickles, and each class that it meets it looks up in Python, on both
sides: a message with others in it costs about half as much again as the call that carries it.
"""

from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias, TypeVar

from hs_cache.errors import InvalidInputError
from hs_cache.keys import KVNames
from hs_cache.messages import (
    CommitReply,
    LayerSpec,
    LeaseReply,
    LeaseRequest,
    ModelRevision,
    PlanReply,
    ReserveReply,
    ReserveRequest,
    Run,
)

T = TypeVar("T")

Plain: TypeAlias = list[Any]
"""A message's fields in their order. Those that are messages are plain as well; tuples are lists."""

REPLIES: dict[str, type[Any]] = {"reserve": ReserveReply, "commit": CommitReply, "lease": LeaseReply, "plan": PlanReply}
"""What the methods reply with whose requests and replies are plain."""


class _Shape(NamedTuple):
    """How one class of messages is taken apart: all fields, and which of them are messages or tuples of messages."""

    length: int
    fields: Callable[[Any], tuple[Any, ...]]
    one: tuple[tuple[int, type[Any]], ...]
    many: tuple[tuple[int, type[Any]], ...]


def _shape(cls: type[Any], one: dict[str, type[Any]], many: dict[str, type[Any]]) -> _Shape:
    names = tuple(cls.__annotations__)
    return _Shape(
        len(names),
        attrgetter(*names),  # of two at least it gives a tuple
        tuple((names.index(name), part) for name, part in one.items()),
        tuple((names.index(name), part) for name, part in many.items()),
    )


_SHAPES: dict[type[Any], _Shape] = {
    KVNames: _shape(KVNames, {}, {}),
    ModelRevision: _shape(ModelRevision, {}, {}),
    LayerSpec: _shape(LayerSpec, {}, {}),
    Run: _shape(Run, {}, {}),
    CommitReply: _shape(CommitReply, {}, {}),
    LeaseRequest: _shape(LeaseRequest, {"kv": KVNames}, {}),
    LeaseReply: _shape(LeaseReply, {}, {"specs": LayerSpec, "runs": Run}),
    PlanReply: _shape(PlanReply, {}, {"specs": LayerSpec}),
    ReserveRequest: _shape(ReserveRequest, {"kv": KVNames, "revision": ModelRevision}, {"specs": LayerSpec}),
    ReserveReply: _shape(ReserveReply, {}, {"runs": Run}),
}


def plain(value: Any) -> Any:
    """A message taken apart; anything else as it is."""
    shape = _SHAPES.get(type(value))
    if shape is None:
        return value
    parts = list(shape.fields(value))
    for position, _ in shape.one:
        if parts[position] is not None:
            parts[position] = plain(parts[position])
    for position, part in shape.many:
        parts[position] = [list(each) for each in map(_SHAPES[part].fields, parts[position])]
    return [_listed(each) if type(each) is tuple else each for each in parts]


def message(cls: type[T], values: Any) -> T:
    """The message that `plain` took apart; one that wasn't as it is.

    Raises:
        InvalidInputError: it is neither.
    """
    if isinstance(values, cls):
        return values
    shape = _SHAPES[cls]
    if not isinstance(values, list) or len(values) != shape.length:
        got = f"{len(values)} fields" if isinstance(values, list) else type(values).__name__
        raise InvalidInputError(f"{cls.__name__}: got {got}, expected {shape.length} fields")
    parts = list(values)
    for position, part in shape.one:
        if parts[position] is not None:
            parts[position] = message(part, parts[position])
    for position, part in shape.many:
        parts[position] = tuple([part(*each) for each in parts[position]])
    return cls(*[_tupled(each) if type(each) is list else each for each in parts])


def _listed(values: Any) -> Any:
    return [_listed(each) for each in values] if type(values) is tuple else values


def _tupled(values: Any) -> Any:
    return tuple([_tupled(each) for each in values]) if type(values) is list else values
