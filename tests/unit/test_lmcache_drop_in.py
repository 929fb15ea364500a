"""How the drop-in takes the place of LMCache's store, with stand-ins, as LMCache isn't installed; tests/lmcache has the
real ones."""

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hs_cache.integrations import lmcache
from hs_cache.integrations.lmcache import _KeysByHash, _replace
from hs_cache.keys import KeySpace, TokenDatabase
from tests.processes import wait_until

CHUNK = 4


class Store:
    """What is used of LMCache's store; a thread can be kept inside."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.go_on = threading.Event()
        self.inside = 0
        self.closed = False

    def store_hidden_states(self, token_ids: Any) -> int:
        stored = 0
        for _ in self._chunk(token_ids):
            assert not self.closed
            self.inside += 1
            self.entered.set()
            self.go_on.wait(30)
            assert not self.closed  # where the real one crashes
            self.inside -= 1
            stored += 1
        return stored

    def close(self) -> None:
        assert not self.inside
        self.closed = True

    def _chunk(self, token_ids: Any) -> list[Any]:
        return list(token_ids)


@pytest.fixture
def old() -> Iterator[Store]:
    """With a thread inside."""
    store = Store()
    said: list[int] = []
    thread = threading.Thread(target=lambda: said.append(store.store_hidden_states([1])))
    thread.start()
    store.entered.wait(10)
    yield store
    store.go_on.set()
    thread.join(10)
    assert said == [1]


def new_store() -> Any:
    return SimpleNamespace(**{method: lambda *_, method=method: f"new {method}" for method in lmcache._METHODS})


def test_a_store_is_closed_when_the_last_thread_has_left(old: Store) -> None:
    engine: Any = SimpleNamespace(hidden_state_store=old)
    store, looked_up = new_store(), old.store_hidden_states
    replacing = threading.Thread(target=_replace, args=(engine, store))
    replacing.start()
    wait_until(lambda: old.close() == "new close", "calls reach the new store")  # type: ignore[func-returns-value]
    wait_until(lambda: "_chunk" in vars(old), "late ones find nothing to do")
    assert looked_up([1, 2]) == 0
    assert (engine.hidden_state_store, old.closed, replacing.is_alive()) == (store, False, True)
    old.go_on.set()
    replacing.join(10)
    assert old.closed
    assert looked_up([1, 2]) == 0


def test_a_store_in_which_a_thread_stays_is_left_open(
    old: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lmcache, "_LEAVE_S", 0.05)
    _replace(SimpleNamespace(hidden_state_store=old), new_store())
    assert not old.closed
    assert old.store_hidden_states([1]) == "new store_hidden_states"  # type: ignore[comparison-overlap]
    assert "a thread is still inside LMCache's own hidden-state store" in caplog.text


class Engine:
    """What is used of an engine to hash tokens; it can be kept waiting."""

    def __init__(self) -> None:
        self.hashing = threading.Event()
        self.go_on = threading.Event()
        self.go_on.set()
        self.token_database = SimpleNamespace(process_tokens=self._hashes)

    def _hashes(self, tokens: list[int], make_key: bool) -> Iterator[tuple[int, int, int]]:
        self.hashing.set()
        self.go_on.wait(30)
        for at in range(0, len(tokens), CHUNK):
            yield at, at + CHUNK, sum(tokens[: at + CHUNK])


@pytest.fixture
def keys() -> _KeysByHash:
    database = TokenDatabase(KeySpace(chunk_size=CHUNK))
    cache: Any = SimpleNamespace(chunk_keys=database.chunk_keys)
    return _KeysByHash(Engine(), cache)


def of(keys: _KeysByHash, chunk_hash: int) -> bytes | None:
    return keys.of(SimpleNamespace(chunk_hash=chunk_hash))


def test_prompts_are_read_only_when_someone_asks(keys: _KeysByHash, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Any] = []
    normalise = lmcache.normalise_token_ids
    monkeypatch.setattr(lmcache, "normalise_token_ids", lambda ids: read.append(ids) or normalise(ids))
    ids, tensor = [1, 1, 1, 1], torch.tensor([2, 2, 2, 2])
    array = tensor.numpy().copy() + 1
    for one in (ids, tensor, array):
        keys.remember(one)
        one[0] = 100
    assert not read
    assert None not in [of(keys, 4), of(keys, 8), of(keys, 12)]
    assert len(read) == 3
    assert of(keys, 103) is None


def test_a_prompt_that_is_being_hashed_delays_no_store(keys: _KeysByHash) -> None:
    engine: Engine = keys._engine
    engine.go_on.clear()
    keys.remember([1, 1, 1, 1])
    found: list[bytes | None] = []
    askers = [threading.Thread(target=lambda: found.append(of(keys, 4))) for _ in range(2)]
    for asker in askers:
        asker.start()
    assert engine.hashing.wait(10)
    keys.remember([2, 2, 2, 2])  # returns while someone hashes
    assert not found
    engine.go_on.set()
    for asker in askers:
        asker.join(10)
    assert found[0] == found[1] != None  # noqa: E711
    assert of(keys, 8) is not None
