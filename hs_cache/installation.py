"""Whether this Python has what the package needs. Asked first, because what is missing or too old fails at import."""

import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from hs_cache.errors import InstallationError

PYTHON_NEEDED = ((3, 10), (3, 14))
"""The first that will do, and the first that won't any more; as in pyproject.toml."""

RAY_NEEDED = (2, 60)
TORCH_NEEDED = (2, 4)


def require_installation() -> None:
    """Check Python, Ray and PyTorch by their names and versions; imports neither of them.

    Raises:
        InstallationError: one is missing or too old; the message names what is here, what is needed, and how to get it.
    """
    require_python(sys.version_info[:2])
    _require("ray", "Ray", RAY_NEEDED, "ray[default]")
    _require("torch", "PyTorch", TORCH_NEEDED, "torch")


def require_python(version: "tuple[int, ...]") -> None:
    """Check a Python version.

    Raises:
        InstallationError: the package doesn't run there.
    """
    first, end = PYTHON_NEEDED
    if not first <= tuple(version) < end:
        raise InstallationError(
            f"hs_cache needs Python {first[0]}.{first[1]} to {end[0]}.{end[1] - 1}, but this is "
            f"{'.'.join(map(str, version))} ({sys.executable}): run it with another Python, on every node"
        )


@contextmanager
def require_extra(extra: str) -> "Iterator[None]":
    """Around imports of what only an extra of this package brings along.

    Raises:
        InstallationError: one of them fails; the message names it, and how to get it.
    """
    try:
        yield
    except ImportError as error:
        missing = str(error).strip().splitlines() or [type(error).__name__]
        raise InstallationError(
            f"this part of hs_cache needs its extra {extra!r}, and not all of it is in this Python ({missing[0]}): "
            f"{sys.executable} -m pip install 'hs-cache[{extra}]'"
        ) from error


def _require(package: str, title: str, needed: "tuple[int, int]", requirement: str) -> None:
    least = f"{needed[0]}.{needed[1]}"
    how = f"{sys.executable} -m pip install '{requirement}>={least}'"
    if importlib.util.find_spec(package) is None:
        raise InstallationError(f"hs_cache needs {title} {least} or later, and there is none in this Python: {how}")
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return  # built from source: whoever does that knows which
    found = re.match(r"(\d+)\.(\d+)", version)
    if found and (int(found[1]), int(found[2])) < needed:
        raise InstallationError(f"hs_cache needs {title} {least} or later, but this Python has {version}: {how}")
