"""Where a request is sent: the policy's cost in tokens, its settings, and how a prompt is found in a request."""

import json
import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hs_cache.errors import InvalidInputError
from hs_cache.integrations import serve
from hs_cache.integrations.affinity import AffinityPolicy, AffinitySettings, Candidate, Demand, Prompt
from hs_cache.keys import KeySpace, TokenDatabase

CHUNK = 16
SYSTEM = list(range(1000, 1000 + 20 * CHUNK))


def make_policy(**settings: Any) -> AffinityPolicy:
    return AffinityPolicy(AffinitySettings(**settings), random.Random(0))


def make_demand(token_ids: list[int], prefixes: dict[str, int] | None = None) -> Demand:
    keys = TokenDatabase(KeySpace(chunk_size=CHUNK)).chunk_keys(token_ids)
    return Demand(len(token_ids), keys, prefixes or {})


def make_candidates(*queues: int | None) -> list[Candidate]:
    """Replica r0 on node n0, and so on."""
    return [Candidate(f"r{i}", f"n{i}", queue) for i, queue in enumerate(queues)]


def best(policy: AffinityPolicy, demand: Demand, candidates: list[Candidate], now: float = 0.0) -> str:
    return str(policy.rank(demand, candidates, now)[0].replica)


def test_the_longest_prefix_wins_among_equal_queues() -> None:
    demand = make_demand(list(range(320)), {"n0": 64, "n1": 256})
    assert [found.replica for found in make_policy().rank(demand, make_candidates(1, 1, 1), 0.0)] == ["r1", "r0", "r2"]


def test_a_prefix_is_worth_no_longer_queue_than_its_length() -> None:
    policy = make_policy(reply_tokens=100, spread=0)
    policy.sent(make_demand(list(range(100))), "gone", "elsewhere", 0.0)  # a request costs 200 tokens from now on
    demand = make_demand(list(range(960)), {"n0": 800})
    assert best(policy, demand, make_candidates(3, 0)) == "r0"
    assert best(policy, demand, make_candidates(5, 0)) == "r1"


def test_the_shorter_queue_wins_among_equal_costs() -> None:
    policy = make_policy(reply_tokens=0, spread=0)
    policy.sent(make_demand(list(range(160))), "gone", "elsewhere", 0.0)
    demand = make_demand(list(range(320)), {"n0": 160})
    assert all(best(policy, demand, make_candidates(1, 0)) == "r1" for _ in range(20))


def test_cold_prompts_go_to_everyone_in_turn() -> None:
    policy, sent = make_policy(), Counter[str]()
    for number in range(30):
        demand = make_demand([number] * 100)
        where = policy.rank(demand, make_candidates(0, 0, 0), 0.0)[0]
        policy.sent(demand, where.replica, where.node_id, 0.0)
        sent[str(where.replica)] += 1
    assert set(sent.values()) == {10}


def test_a_system_prompt_that_all_share_makes_no_hot_spot_even_without_a_queue() -> None:
    policy, sent, nodes_with_it = make_policy(), Counter[str](), set[str]()
    for number in range(60):
        demand = make_demand(SYSTEM + [number] * 200, {node: len(SYSTEM) for node in nodes_with_it})
        where = policy.rank(demand, make_candidates(0, 0, 0), 0.0)[0]
        policy.sent(demand, where.replica, where.node_id, 0.0)
        nodes_with_it.add(where.node_id)
        sent[str(where.replica)] += 1
    assert min(sent[f"r{i}"] for i in range(3)) >= 15


def test_a_system_prompt_that_all_share_makes_no_hot_spot_in_a_burst() -> None:
    policy, queues = make_policy(spread=0), [0, 0, 0]
    for number in range(30):
        demand = make_demand(SYSTEM + [number] * 200, {"n0": len(SYSTEM)})
        where = policy.rank(demand, make_candidates(*queues), 0.0)[0]
        policy.sent(demand, where.replica, where.node_id, 0.0)
        queues[int(where.node_id[1:])] += 1
    assert max(queues) - min(queues) <= 2


def test_conversations_stay_where_their_prefix_is_under_even_load() -> None:
    policy, homes = make_policy(), dict[int, str]()
    for turn in range(1, 6):
        for number in range(12):
            demand = make_demand(SYSTEM + [number] * 300 * turn)
            held = len(SYSTEM) + 300 * (turn - 1) if number in homes else 0
            demand = Demand(demand.num_tokens, demand.keys, {homes[number]: held} if held else {})
            where = policy.rank(demand, make_candidates(1, 1, 1), float(turn))[0]
            assert homes.setdefault(number, where.node_id) == where.node_id
            policy.sent(demand, where.replica, where.node_id, float(turn))


def test_what_was_given_lately_is_forgotten_in_time() -> None:
    policy = make_policy(spread=1.0)
    demand = make_demand(list(range(5000, 5320)), {"n0": 320})
    policy.rank(demand, make_candidates(0, 0), 0.0)
    policy.sent(make_demand(list(range(1000))), "r0", "n0", 0.0)
    assert best(policy, demand, make_candidates(0, 0), now=1.0) == "r1"
    assert best(policy, demand, make_candidates(0, 0), now=300.0) == "r0"


def test_a_new_replica_gets_its_share_of_cold_prompts() -> None:
    policy, sent = make_policy(), Counter[str]()
    for number in range(40):
        demand = make_demand([number] * 100)
        where = policy.rank(demand, make_candidates(*[0] * (2 if number < 10 else 3)), 0.0)[0]
        policy.sent(demand, where.replica, where.node_id, 0.0)
        sent[str(where.replica)] += 1
    assert sent == {"r0": 15, "r1": 15, "r2": 10}


@pytest.mark.parametrize("per_second", [2, 40])
def test_a_new_replica_draws_no_warm_conversation_from_its_home(per_second: int) -> None:
    policy = make_policy(remember_s=0)
    homes = {number: f"n{number % 2}" for number in range(80)}
    before = 300 * per_second
    for turn in range(before + 80):
        now, number = turn / per_second, turn % 80
        demand = Demand(8500, make_demand([]).keys, {homes[number]: 8000})
        where = policy.rank(demand, make_candidates(*[1] * (2 if turn < before else 3)), now)[0]
        assert where.node_id == homes[number], (turn, now)
        policy.sent(demand, where.replica, where.node_id, now)


def test_a_replica_that_says_nothing_comes_last() -> None:
    demand = make_demand(list(range(320)), {"n0": 320})
    ranked = make_policy().rank(demand, make_candidates(None, 9), 0.0)
    assert [found.replica for found in ranked] == ["r1", "r0"]


def test_the_next_turn_follows_the_one_whose_rows_are_not_stored_yet() -> None:
    policy = make_policy()
    first = make_demand(SYSTEM + [1] * 100)
    policy.sent(first, "r2", "n2", 0.0)
    second = policy.with_remembered(make_demand(SYSTEM + [1] * 300), 1.0)
    assert second.prefixes == {"n2": (len(SYSTEM) + 100) // CHUNK * CHUNK}
    assert best(policy, second, make_candidates(0, 0, 0), now=1.0) == "r2"


def test_a_shared_beginning_is_not_taken_for_the_same_conversation() -> None:
    policy = make_policy()
    policy.sent(make_demand(SYSTEM + [1] * 100), "r2", "n2", 0.0)
    assert policy.with_remembered(make_demand(SYSTEM + [2] * 300), 1.0).prefixes == {}


def test_what_was_sent_counts_until_its_time_is_over_and_not_at_all_if_so_set() -> None:
    first, second = make_demand(SYSTEM + [1] * 100), make_demand(SYSTEM + [1] * 300)
    policy = make_policy(remember_s=5)
    policy.sent(first, "r2", "n2", 0.0)
    assert policy.with_remembered(second, 4.9).prefixes
    assert policy.with_remembered(second, 5.1).prefixes == {}
    policy = make_policy(remember_s=0)
    policy.sent(first, "r2", "n2", 0.0)
    assert policy.with_remembered(second, 0.0).prefixes == {}


def test_what_nodes_say_is_not_shortened_by_what_is_remembered() -> None:
    policy = make_policy()
    policy.sent(make_demand(SYSTEM), "r0", "n0", 0.0)
    known = make_demand(SYSTEM + [1] * 160, {"n0": len(SYSTEM) + 80, "n1": 32})
    assert policy.with_remembered(known, 1.0).prefixes == {"n0": len(SYSTEM) + 80, "n1": 32}


def test_memory_of_replicas_and_prompts_is_bounded() -> None:
    policy = make_policy()
    for number in range(5000):
        policy.sent(make_demand([number] * CHUNK), f"r{number}", "n0", 0.0)
    policy.keep(["r4999"])
    assert len(policy._sent) == 4096
    assert list(policy._lately) == ["r4999"]


queues = st.lists(st.none() | st.integers(0, 50), min_size=1, max_size=6)


@given(queues, st.integers(1, 2000), st.lists(st.integers(0, 3000), max_size=6), st.floats(0, 1000), st.floats(0, 1))
def test_ranking_is_a_permutation_by_cost(
    lengths: list[int | None], num_tokens: int, prefixes: list[int], reply_tokens: float, spread: float
) -> None:
    policy = make_policy(reply_tokens=reply_tokens, spread=spread)
    candidates = make_candidates(*lengths)
    demand = make_demand([7] * num_tokens, {f"n{i}": tokens for i, tokens in enumerate(prefixes) if tokens})
    ranked = policy.rank(demand, candidates, 0.0)
    assert sorted(ranked, key=str) == sorted(candidates, key=str)
    told = [found for found in ranked if found.queue_len is not None]
    assert ranked[: len(told)] == told
    costs = [policy.cost(demand, found, 0.0) for found in told]
    assert costs == sorted(costs)
    assert all(0 <= demand.to_compute(found.node_id) <= num_tokens for found in candidates)


@given(st.integers(1, 2000), st.integers(0, 3000), st.integers(0, 40), st.integers(0, 40))
def test_no_prefix_attracts_more_than_its_length(num_tokens: int, prefix: int, busy: int, idle: int) -> None:
    policy = make_policy(spread=0.0)
    demand = make_demand([7] * num_tokens, {"n0": prefix})
    chosen = best(policy, demand, make_candidates(busy, idle))
    extra = (busy - idle) * policy.typical_tokens(demand)
    if extra > min(prefix, num_tokens):
        assert chosen == "r1"
    elif extra < min(prefix, num_tokens):
        assert chosen == "r0"


@dataclass
class Request:
    token_ids: list[int]
    mm_spans: tuple[tuple[int, int, str], ...] = ()


def test_a_prompt_is_found_by_attribute_or_key_in_the_first_argument_that_has_it() -> None:
    request = Request([1, 2], ((0, 1, "clip"),))
    assert Prompt.within(("text", 5, request, {"token_ids": [9]})) == Prompt([1, 2], ((0, 1, "clip"),))
    given_by_key = {"token_ids": [1], "mm_spans": [[0, 1, "clip"]], "cache_salt": "tenant", "lora_id": None}
    assert Prompt.within((given_by_key,)) == Prompt([1], ((0, 1, "clip"),), (("cache_salt", "tenant"),))
    assert Prompt.within(("text", {"token_ids": None}, 5)) is None


def test_a_salt_that_is_none_is_refused_by_name() -> None:
    with pytest.raises(InvalidInputError, match="cache_salt: got int, expected str"):
        Prompt.within(({"token_ids": [1], "cache_salt": 5},))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"modell": "m"}, "unknown name 'modell'; did you mean 'model'"),
        ({"zzz": 1}, "unknown name 'zzz', expected one of service, model"),
        ({"service": "a b"}, "service: got 'a b'"),
        ({"model": 5}, "model: got int, expected str"),
        ({"layers": []}, "layers: got none"),
        ({"layers": ["a"]}, "layers: got 'a', expected an int"),
        ({"timeout_s": 0}, "timeout_s: got 0, expected more"),
        ({"timeout_s": "1"}, "timeout_s: got '1', expected a number of seconds"),
        ({"reply_tokens": -1}, "reply_tokens: got -1, expected a number, 0 or more"),
        ({"spread": float("nan")}, "spread: got nan"),
        ({"spread": True}, "spread: got True"),
        ({"remember_s": -1}, "remember_s: got -1"),
        ({"prompt_of": "module"}, "prompt_of: got 'module', expected 'module:function'"),
        ({"prompt_of": "no.such.module:f"}, "prompt_of: got 'no.such.module:f', which can't be loaded"),
        (
            {"prompt_of": "tests.unit.broken_module:f"},
            "prompt_of: got 'tests.unit.broken_module:f', which can't be loaded",
        ),
        ({"prompt_of": "json:nothing"}, "prompt_of: got 'json:nothing', which can't be loaded"),
        ({"prompt_of": "sys:path"}, "prompt_of: got 'sys:path', which is no function"),
    ],
)
def test_wrong_settings_are_refused_by_name(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message.replace("(", r"\(")):
        serve.router_config(**kwargs)


def test_settings_from_json_name_the_router() -> None:
    kwargs = json.loads('{"service": "s", "model": "m", "layers": [0, 4], "timeout_s": 0.2, "prompt_of": "json:loads"}')
    config = serve.router_config(**kwargs)
    assert config.get_request_router_class() is serve.PrefixAffinityRouter
    assert config.request_router_kwargs == kwargs
    assert AffinitySettings.of(kwargs).layers == (0, 4)
