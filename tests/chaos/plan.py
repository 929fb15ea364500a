"""What a chaos run does, decided by its seed alone: the operations of every client, and the blows that fall meanwhile.

How they interleave is up to the machine.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.chaos.payloads import KEYS, ROUTES
from tests.chaos.rows import BRANCHES, CHUNK_SIZE, LAYERS, MAX_TOKENS, SPACES, WEIGHTS

ROUND_S = 15.0
"""Within so many seconds, every kind of blow falls once."""

BLOWS = (
    "kill hidden_states",
    "kill hidden_states",
    "kill kv",
    "kill controller",
    "kill client",
    "kill producer",
    "kill node",
    "stop hidden_states",
    "stop kv",
    "stop controller",
    "stop client",
    "stop producer",
)
"""A producer is a client that is just putting a payload."""

BUMPS = 4
"""How often the weights change in a round."""

_LONGEST_STOP_S = 3.0
_NODE_EARLIEST, _NODE_LATEST = 0.1, 0.5
"""When in a round a node is killed, as parts of it: what that leads to takes seconds."""

_OPERATIONS = {
    "store": 30,
    "write": 8,
    "plan": 4,
    "retrieve": 40,
    "retrieve_hidden_states": 4,
    "retrieve_ref": 6,
    "report_evicted": 3,
    "report_stored": 2,
    "drop_key": 2,
    "look": 12,
    "engines": 2,
    "reconnect": 4,
    "put": 12,
    "get": 10,
    "cleanup": 4,
}


@dataclass(frozen=True)
class Operation:
    """One call of a client; which fields matter depends on `kind`.

    Attributes:
        start, stop: the tokens wanted by a retrieve, the chunks meant by a report; a store begins at `start`, and a
            request that is written in steps is preempted back to it.
        hold: for how many more operations the rows are held, and looked at again.
        write: write into the rows that came back.
        cancel_s: cancel the call after that many seconds, where it can be cancelled.
        to_stage, key, nbytes: of a payload.
        revision: of the model whose weights change, the number of its client's revision; the plan doesn't know it.
    """

    kind: str
    space: int
    branch: int
    num_tokens: int
    layers: tuple[int, ...]
    start: int
    stop: int
    convert: bool
    into: bool
    wait_s: float
    hold: int
    write: bool
    cancel_s: float | None
    to_stage: str
    key: str
    nbytes: int
    revision: int = 0


def operations(seed: int, name: str) -> Iterator[Operation]:
    """The endless list of what one stream of calls does."""
    rng = random.Random(f"{seed}/{name}")
    kinds, weights = list(_OPERATIONS), list(_OPERATIONS.values())
    while True:
        (kind,) = rng.choices(kinds, weights)
        space = rng.choice((*range(len(SPACES)), WEIGHTS))
        num_tokens = rng.randint(1, MAX_TOKENS)
        subset = tuple(rng.sample(list(LAYERS), rng.randint(1, len(LAYERS))))
        stop = rng.randint(0, num_tokens) if rng.random() < 0.3 else num_tokens
        start = rng.randint(0, stop) if rng.random() < 0.3 else 0
        yield Operation(
            kind=kind,
            space=space,
            branch=rng.randrange(BRANCHES),
            num_tokens=num_tokens,
            layers=tuple(LAYERS) if kind in ("store", "write") and space == 0 else subset,
            start=start,
            stop=stop,
            convert=rng.random() < 0.2,
            into=rng.random() < 0.2,
            wait_s=rng.choice((0, 0, 0, 0, 0, 0.2)),
            hold=rng.choice((0, 0, 3, 10, 40)),
            write=rng.random() < 0.3,
            cancel_s=rng.choice((0.0, 0.001, 0.005, 0.02)) if rng.random() < 0.2 else None,
            to_stage=rng.choice(ROUTES),
            key=f"k{rng.randrange(KEYS)}",
            nbytes=2 * num_tokens**2,
        )


@dataclass(order=True, frozen=True)
class Blow:
    """Something is done to a process, `at_s` seconds after the start.

    Attributes:
        kind: ``"<kill or stop> <what>"``.
        which: 0 to 1, decides between the processes there are of that kind.
        stop_s: how long a stopped process stays stopped.
    """

    at_s: float
    kind: str
    which: float = field(compare=False)
    stop_s: float = field(compare=False)


def blows(seed: int, seconds: float) -> list[Blow]:
    """What falls during a run, by time."""
    rng = random.Random(f"{seed}/blows")
    rounds = max(round(seconds / ROUND_S), 1)
    length = seconds / rounds
    found = []
    for number in range(rounds):
        for kind in BLOWS:
            part = rng.uniform(_NODE_EARLIEST, _NODE_LATEST) if kind == "kill node" else rng.uniform(0.02, 0.95)
            found.append(Blow((number + part) * length, kind, rng.random(), rng.uniform(0.1, _LONGEST_STOP_S)))
    return sorted(found)


@dataclass(frozen=True)
class Bump:
    """The weights change, `at_s` seconds after the start. Not `named`: the service finds the name."""

    at_s: float
    named: bool


def bumps(seed: int, seconds: float) -> list[Bump]:
    """Every change of the weights during a run, by time."""
    rng = random.Random(f"{seed}/bumps")
    count = BUMPS * max(round(seconds / ROUND_S), 1)
    length = seconds / count
    return [Bump((number + rng.uniform(0.1, 0.9)) * length, rng.random() < 0.5) for number in range(count)]


def chunks(start: int, stop: int) -> slice:
    """The bytes of a blob of keys that stand for the chunks of these tokens."""
    return slice(start // CHUNK_SIZE * 16, -(-stop // CHUNK_SIZE) * 16)
