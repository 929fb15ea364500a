"""Joining a cluster, as far as no cluster is needed for it."""

import importlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from hs_cache import launch

PRIVATE = {
    "ray._private.authentication.authentication_token_setup": "ensure_token_if_auth_enabled",
    "ray._private.services": "canonicalize_bootstrap_address",
    "ray._raylet": "GcsClient",
}
"""Names of Ray's own that `launch.join` uses where it finds them."""


@pytest.fixture
def reloaded() -> Iterator[None]:
    """The module may be loaded anew in a test; it is afterwards as it was."""
    before = dict(vars(launch))
    yield
    vars(launch).clear()
    vars(launch).update(before)


def test_this_ray_has_the_private_names() -> None:
    for module, name in PRIVATE.items():
        assert callable(getattr(importlib.import_module(module), name))
    assert launch.CAN_LOOK_FIRST


@pytest.mark.parametrize("module", PRIVATE)
def test_a_ray_that_has_one_elsewhere_is_joined_all_the_same(
    module: str, reloaded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # type: ignore[arg-type]
    importlib.reload(launch)
    assert not launch.CAN_LOOK_FIRST
    joined: list[dict[str, Any]] = []
    monkeypatch.setattr(ray, "init", lambda **options: joined.append(options))
    launch.join("127.0.0.1:1", namespace="x")
    assert joined == [{"address": "127.0.0.1:1", "namespace": "x"}]
