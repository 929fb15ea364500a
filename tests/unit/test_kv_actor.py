"""Which source a KV actor asks."""

import pytest

from actors.kv_actor import KVActor
from hs_cache.config import CacheConfig
from hs_cache.errors import InvalidInputError


def test_only_none_is_unbound() -> None:
    assert not KVActor(CacheConfig(kv_source="none")).bound()
    assert KVActor(CacheConfig()).bound()
    assert KVActor(CacheConfig(kv_source="lmcache")).bound()


def test_a_source_that_is_not_listed_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    # Not of the module: once Ray has loaded the class here, by value, its methods have globals of their own.
    monkeypatch.setitem(KVActor.__init__.__globals__, "_SOURCES", {})
    with pytest.raises(KeyError, match="lmcache"):  # as unbound all KV would count as present
        KVActor(CacheConfig(kv_source="lmcache"))


def test_engines_register_where_they_are_asked() -> None:
    with pytest.raises(InvalidInputError, match="register_engine: this service asks no engines"):
        KVActor(CacheConfig()).register_engine(None)
    with pytest.raises(InvalidInputError, match="registration: got NoneType"):
        KVActor(CacheConfig(kv_source="lmcache")).register_engine(None)
