"""Orders of eviction alone, over the blocks of a trace: what a pool of so many blocks serves by each.

Every function takes the requests in order of arrival and how many blocks the pool holds, and returns how many blocks of
each request were served: those of its longest prefix that was there. Then the request's other blocks are stored.
"""

import heapq
from collections import OrderedDict
from collections.abc import Collection, Sequence
from itertools import takewhile

Requests = Sequence[Sequence[int]]


def lru(requests: Requests, capacity: int) -> list[int]:
    """Least recently used; a request makes its whole prompt the most recent, the head more so than the tail.

    A prompt that is longer than the pool keeps its head.
    """
    pool: OrderedDict[int, None] = OrderedDict()  # coldest first
    served = []
    for request in requests:
        served.append(_prefix(request, pool))
        for block in reversed(request[:capacity]):
            pool[block] = None
            pool.move_to_end(block)
        while len(pool) > capacity:
            pool.popitem(last=False)
    return served


def lmcache(requests: Requests, capacity: int) -> list[int]:
    """The order of LMCache 0.5.6's ``HiddenStateStore``: a retrieve leaves the head the most recent, a store the tail.

    It makes room block by block, and gives up on one after eight evictions. Blocks are of one size here, so that the
    first eviction makes room and nothing is ever given up. tests/lmcache/test_replay.py holds this against that class.
    """
    pool: OrderedDict[int, None] = OrderedDict()
    served = []
    for request in requests:
        hit = _prefix(request, pool)
        served.append(hit)
        for block in reversed(request[:hit]):
            pool.move_to_end(block)
        for block in request[hit:] if capacity else ():
            if block in pool:
                pool.move_to_end(block)
                continue
            if len(pool) == capacity:
                pool.popitem(last=False)
            pool[block] = None
    return served


def belady(requests: Requests, capacity: int) -> list[int]:
    """The most that any order can serve: it knows the future, and need not store a block at all.

    After each request it keeps, of what it has and what it was just given, the blocks that are asked for again the
    soonest (Belady's MIN with bypass; blocks are of one size and worth the same). Whoever asks for a block asks for
    everything before it too, so a head is never asked for later than its tail. With ties broken for the head, what is
    kept is a usable prefix at all times, and the optimum over blocks is the optimum over usable prefixes.
    """
    again = _next_uses(requests)
    pool: dict[int, int] = {}  # block → the request that asks for it next
    latest: list[tuple[int, int, int]] = []  # a heap of (-that request, -position, block), with entries out of date
    served = []
    for request, uses in zip(requests, again, strict=True):
        served.append(_prefix(request, pool))
        for position, (block, use) in enumerate(zip(request, uses, strict=True)):
            pool.pop(block, None)
            if use is not None:
                pool[block] = use
                heapq.heappush(latest, (-use, -position, block))
        while len(pool) > capacity:
            use, _, block = heapq.heappop(latest)
            if pool.get(block) == -use:
                del pool[block]
    return served


def _prefix(request: Sequence[int], pool: Collection[int]) -> int:
    return sum(1 for _ in takewhile(pool.__contains__, request))


def _next_uses(requests: Requests) -> list[list[int | None]]:
    """For each block of each request, the number of the next request that asks for it."""
    coming: dict[int, int] = {}
    uses: list[list[int | None]] = []
    for number in range(len(requests) - 1, -1, -1):
        uses.append([coming.get(block) for block in requests[number]])
        coming.update(dict.fromkeys(requests[number], number))
    return uses[::-1]
