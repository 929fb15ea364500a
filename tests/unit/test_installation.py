"""What the package needs, and that pyproject.toml says the same."""

import importlib
import re
import sys
from pathlib import Path

import pytest

import hs_cache
from hs_cache import installation
from hs_cache.errors import InstallationError
from tests.messages import said
from tests.processes import run_python

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


@pytest.fixture
def old_ray(tmp_path: Path) -> Path:
    """A directory that makes the Ray of whoever has it on its path an old one."""
    old = tmp_path / "ray-2.9.3.dist-info"
    old.mkdir()
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: ray\nVersion: 2.9.3\n")
    return tmp_path


def test_a_ray_that_is_too_old_is_refused_when_a_name_that_needs_it_is_used(
    old_ray: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(old_ray))
    monkeypatch.delitem(vars(hs_cache), "connect", raising=False)
    with pytest.raises(ImportError, match=r"needs Ray 2\.60 or later, but this Python has 2\.9\.3"):
        _ = hs_cache.connect
    assert hs_cache.CacheConfig is not None


@pytest.mark.parametrize("module", ["serve", "lmcache", "notebook", "vllm_omni"])
def test_an_integration_refuses_a_ray_that_is_too_old_before_it_needs_anything_of_it(
    module: str, old_ray: Path
) -> None:
    script = f"import sys; sys.path.insert(0, {str(old_ray)!r}); import hs_cache.integrations.{module}"
    last = run_python(["-c", script]).stderr.strip().splitlines()[-1]
    assert last.startswith(
        "hs_cache.errors.InstallationError: hs_cache needs Ray 2.60 or later, but this Python has 2.9.3"
    )


def test_an_extra_that_is_missing_is_named_with_how_to_get_it() -> None:
    with pytest.raises(ImportError) as caught, installation.require_extra("notebook"):
        importlib.import_module("no_such_package")
    assert said("extra", str(caught.value))
    assert "'notebook', and not all of it is in this Python (No module named 'no_such_package')" in str(caught.value)
    assert str(caught.value).endswith("-m pip install 'hs-cache[notebook]'")
    with installation.require_extra("notebook"):
        importlib.import_module("json")
