"""What the package needs, and that pyproject.toml says the same."""

import re
import sys
from pathlib import Path

import pytest

import hs_cache
from hs_cache import installation
from hs_cache.errors import InstallationError
from tests.messages import said

PROJECT = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")


def test_pyproject_asks_for_the_same_versions() -> None:
    (first, end), ray, torch = installation.PYTHON_NEEDED, installation.RAY_NEEDED, installation.TORCH_NEEDED
    assert f'requires-python = ">={first[0]}.{first[1]},<{end[0]}.{end[1]}"' in PROJECT
    assert re.search(rf'"ray\[default\]>={ray[0]}\.{ray[1]}"', PROJECT)
    assert re.search(rf'"torch>={torch[0]}\.{torch[1]}"', PROJECT)


def test_this_python_will_do() -> None:
    installation.require_installation()
    for version in ((3, 10), (3, 13), sys.version_info[:2]):
        installation.require_python(version)


@pytest.mark.parametrize("version", [(2, 7), (3, 9), (3, 14), (4, 0)])
def test_others_will_not(version: tuple[int, int]) -> None:
    with pytest.raises(InstallationError) as caught:
        installation.require_python(version)
    assert said("python", str(caught.value))
    assert "3.10 to 3.13" in str(caught.value)


def test_a_ray_that_is_too_old_is_refused_when_a_name_that_needs_it_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = tmp_path / "ray-2.9.3.dist-info"
    old.mkdir()
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: ray\nVersion: 2.9.3\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(vars(hs_cache), "connect", raising=False)
    with pytest.raises(ImportError, match=r"needs Ray 2\.60 or later, but this Python has 2\.9\.3"):
        _ = hs_cache.connect
    assert hs_cache.CacheConfig is not None
