"""Values that a notebook shows as more than text. Who carries them needn't know how: `hs_cache.tables` does."""

from functools import singledispatch


@singledispatch
def as_html(value: object) -> str | None:
    """A value as HTML, as whoever registered for its type says; None where nobody has, and it is shown as text."""
    return None


class Shown:
    """Base of values that a notebook shows as `as_html` has them."""

    __slots__ = ()

    def _repr_html_(self) -> str | None:
        return as_html(self)
