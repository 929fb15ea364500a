import inspect
import pickle
import re
from collections.abc import Callable

import pytest
from ray import cloudpickle

from hs_cache import errors


def all_exceptions() -> list[type[Exception]]:
    return [value for value in vars(errors).values() if inspect.isclass(value) and issubclass(value, Exception)]


def drawn_tree() -> dict[str, tuple[str, str | None]]:
    """Exception -> (parent, built-in base or None), as the module's docstring draws it."""
    assert errors.__doc__ is not None
    drawing = errors.__doc__.split("::", 1)[1].split("\n\n", 2)[1]
    tree: dict[str, tuple[str, str | None]] = {}
    open_branches: list[tuple[int, str]] = []
    for line in drawing.splitlines():
        found = re.fullmatch(r"( *)(?:x  )?(\w+)(?: \((\w+)\))?", line)
        assert found, f"unreadable line in the drawing: {line!r}"
        depth, name, builtin = len(found[1]), found[2], found[3]
        while open_branches and open_branches[-1][0] >= depth:
            open_branches.pop()
        tree[name] = (open_branches[-1][1] if open_branches else "Exception", builtin)
        open_branches.append((depth, name))
    return tree


def test_the_drawn_tree_is_the_real_one() -> None:
    real = {}
    for exception in all_exceptions():
        parent, *builtins = exception.__bases__
        assert all(base.__module__ == "builtins" for base in builtins)
        real[exception.__name__] = (parent.__name__, builtins[0].__name__ if builtins else None)
    assert drawn_tree() == real


def test_the_module_holds_only_its_own_exceptions() -> None:
    assert all(exception.__module__ == errors.__name__ for exception in all_exceptions())
    assert all(issubclass(exception, errors.HiddenStateCacheError) for exception in all_exceptions())


@pytest.mark.parametrize("dumps", [pickle.dumps, cloudpickle.dumps], ids=["pickle", "cloudpickle"])
@pytest.mark.parametrize("exception", all_exceptions(), ids=lambda exception: exception.__name__)
def test_survives_pickling(exception: type[Exception], dumps: Callable[[object], bytes]) -> None:
    original = exception("the argument: got 1, expected 2", 3)
    copy = pickle.loads(dumps(original))
    assert type(copy) is exception
    assert copy.args == original.args
    assert str(copy) == str(original)


@pytest.mark.parametrize("exception", all_exceptions(), ids=lambda exception: exception.__name__)
def test_has_a_docstring_of_its_own(exception: type[Exception]) -> None:
    assert "__doc__" in vars(exception)
    assert exception.__doc__


def test_can_be_caught_as_the_built_in_it_is() -> None:
    assert issubclass(errors.ConfigError, ValueError)
    assert issubclass(errors.PoolTooLargeError, MemoryError)
    assert issubclass(errors.ServiceTimeoutError, TimeoutError)
    assert not issubclass(errors.ServiceError, ValueError)
