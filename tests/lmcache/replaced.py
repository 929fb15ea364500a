"""A process in which threads use LMCache's store while another takes its place: says so if it survives that."""

import threading
from types import SimpleNamespace
from typing import Any

import torch

from hs_cache.integrations import lmcache
from tests.lmcache import engines
from tests.processes import wait_until

CALLS = 300


def main() -> None:
    """Replace the store of an engine under threads that go on using the old one."""
    engine: Any = engines.make_engine("replaced")
    old, rows = engine.hidden_state_store, torch.ones(16, 64)
    new: Any = SimpleNamespace(**{method: lambda *_, **__: None for method in lmcache._METHODS})
    calls, done = [0, 0], threading.Event()

    def use(user: int) -> None:
        store = old.store_hidden_states  # looked up once, so it never reaches the new store
        while not done.is_set():
            prompt = list(range(calls[user] * 20, calls[user] * 20 + 16))
            (store if user else old.store_hidden_states)(prompt, rows)
            calls[user] += 1

    users = [threading.Thread(target=use, args=(user,)) for user in range(2)]
    for user in users:
        user.start()
    wait_until(lambda: min(calls) > CALLS, "it is in use")
    lmcache._replace(engine, new)
    before = list(calls)
    wait_until(lambda: min(map(int.__sub__, calls, before)) > CALLS, "they go on")
    done.set()
    for user in users:
        user.join()
    print("survived, closed:", not old._chunks)
    engines.close("replaced")


if __name__ == "__main__":
    main()
