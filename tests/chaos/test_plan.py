"""What a seed decides: the same every time, and every kind of operation and blow is in it."""

from itertools import islice

from tests.chaos.plan import BLOWS, BUMPS, ROUND_S, blows, bumps, operations


def test_a_seed_decides_everything() -> None:
    for name in ("client-0/0", "client-7/1"):
        assert list(islice(operations(5, name), 300)) == list(islice(operations(5, name), 300))
    assert (blows(5, 40), bumps(5, 40)) == (blows(5, 40), bumps(5, 40))
    assert next(operations(5, "client-0/0")) != next(operations(5, "client-0/1"))
    assert bumps(5, 40) != bumps(6, 40)


def test_every_round_has_all_blows_and_bumps() -> None:
    seconds = 3 * ROUND_S
    for number in range(3):
        in_round = [blow.kind for blow in blows(1, seconds) if int(blow.at_s / ROUND_S) == number]
        assert sorted(in_round) == sorted(BLOWS)
        assert len([bump for bump in bumps(1, seconds) if int(bump.at_s / ROUND_S) == number]) == BUMPS
