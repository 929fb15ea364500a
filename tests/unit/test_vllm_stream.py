"""The order of batches: gaps, duplicates, restarts, and what a replay makes of them."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hs_cache.integrations.vllm_events import decode
from hs_cache.kv_presence import Presence
from hs_cache.vllm_blocks import BlockTable
from hs_cache.vllm_stream import EventStream
from tests.vllm_engine import CLEARED, ask, encode, remove, store

ABSENT, PRESENT, UNKNOWN = Presence.ABSENT, Presence.PRESENT, Presence.UNKNOWN


class Engine:
    """One life of an engine: what it published. `life` tells its messages from another's."""

    def __init__(self, life: int = 0, *, buffer: int = 1000) -> None:
        self.batches: list[tuple[int, bytes]] = []
        self._life = life
        self._buffer = buffer

    def publish(self, *events: dict[str, Any]) -> tuple[int, bytes]:
        number = len(self.batches)
        self.batches.append((number, encode(events, ts=1000.0 * self._life + number)))
        return self.batches[-1]

    def replay(self, start: int) -> Iterator[tuple[int, bytes]]:
        kept = self.batches[-self._buffer :] if self._buffer else []
        return iter([batch for batch in kept if batch[0] >= start])


def make_stream() -> tuple[EventStream, BlockTable]:
    table = BlockTable("test", model="m", chunk_size=4, block_size=2, capacity=100)
    return EventStream(table, decode), table


def catch_up(stream: EventStream, replay: Callable[[int], Iterator[tuple[int, bytes]]]) -> None:
    """As a listener does it: ask until nothing is missing, or the engine doesn't answer."""
    start: int | None = stream.ask()
    while start is not None:
        came: list[tuple[int, bytes]] = []
        ended = True
        try:
            for batch in replay(start):
                came.append(batch)
        except TimeoutError:
            ended = False
        try:
            start = stream.replayed(came, ended=ended)
        except TimeoutError:
            stream.give_up()
            return


def hear(stream: EventStream, batch: tuple[int, bytes], engine: Engine | None = None) -> None:
    """As a listener does it: what is missing is asked of the engine, if it can be asked."""
    if stream.receive(*batch):
        return
    if engine is not None:
        catch_up(stream, engine.replay)
    else:
        stream.give_up()


def test_batches_in_order_are_taken() -> None:
    engine, (stream, table) = Engine(), make_stream()
    for batch in (engine.publish(store("ab")), engine.publish(store("abcd", 2)), engine.publish(remove("ab"))):
        assert stream.receive(*batch)
    assert ask(table, "abcd") == [ABSENT, PRESENT]


def test_a_gap_makes_all_unknown_until_it_is_filled() -> None:
    engine, (stream, table) = Engine(), make_stream()
    hear(stream, engine.publish(store("abcd")))
    engine.publish(remove("ab"))
    later = engine.publish(store("xy"))
    assert not stream.receive(*later)
    assert ask(table, "abcd") == [UNKNOWN, UNKNOWN]
    catch_up(stream, engine.replay)
    assert ask(table, "abcd") + ask(table, "xy") == [ABSENT, PRESENT, PRESENT]
    stats = stream.stats()
    assert (stats.gaps_total, stats.filled_total, stats.lost_total, stats.duplicates_total) == (1, 1, 0, 1)


def test_a_gap_that_nobody_fills_leaves_unknown_what_was_before_and_new_events_count() -> None:
    engine, (stream, table) = Engine(), make_stream()
    hear(stream, engine.publish(store("abcd")))
    engine.publish(remove("ab"))
    hear(stream, engine.publish(store("xy")))
    hear(stream, engine.publish(store("abcdef", 4)))
    hear(stream, engine.publish(remove("abcd")))
    assert ask(table, "abcdef") + ask(table, "xy") == [UNKNOWN, UNKNOWN, UNKNOWN, PRESENT]


def test_a_gap_that_the_engine_has_forgotten_stays() -> None:
    engine, (stream, table) = Engine(buffer=2), make_stream()
    hear(stream, engine.publish(store("ab")))
    for _ in range(3):
        engine.publish(remove("ab"))
    hear(stream, engine.publish(store("xy")), engine)
    assert ask(table, "ab") + ask(table, "xy") == [UNKNOWN, PRESENT]
    assert stream.stats().lost_total == 1


def test_duplicates_are_ignored_however_late() -> None:
    engine, (stream, table) = Engine(), make_stream()
    batches = [engine.publish(store("ab")), engine.publish(remove("ab")), engine.publish(store("xy"))]
    for batch in (*batches, *batches, batches[1]):
        assert stream.receive(*batch)
    assert ask(table, "ab") + ask(table, "xy") == [ABSENT, PRESENT]
    assert stream.stats().duplicates_total == 4


def test_what_is_too_old_to_be_recognised_ends_what_was_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hs_cache.vllm_stream._REMEMBERED", 2)
    engine, (stream, table) = Engine(), make_stream()
    for prompt in ("ab", "cd", "ef", "gh"):
        hear(stream, engine.publish(store(prompt)))
    hear(stream, engine.batches[1])
    assert ask(table, "ab") + ask(table, "gh") + ask(table, "cd") == [UNKNOWN, UNKNOWN, PRESENT]
    hear(stream, engine.publish(store("ij")), engine)
    assert [ask(table, prompt)[0] for prompt in ("ab", "cd", "ef", "gh", "ij")] == [UNKNOWN] + [PRESENT] * 4
    hear(stream, engine.batches[1], engine)
    assert [ask(table, prompt)[0] for prompt in ("ab", "cd", "ef", "gh", "ij")] == [PRESENT] * 5


def test_a_reordered_batch_is_filled_in_and_then_a_duplicate() -> None:
    engine, (stream, table) = Engine(), make_stream()
    first, second, third = (engine.publish(event) for event in (store("ab"), remove("ab"), store("xy")))
    for batch in (first, third, second):
        hear(stream, batch, engine)
    assert ask(table, "ab") + ask(table, "xy") == [ABSENT, PRESENT]
    assert stream.stats().lost_total == 0


def test_without_a_replay_a_reordered_batch_is_lost_but_nothing_is_called_present() -> None:
    engine, (stream, table) = Engine(), make_stream()
    first, second, third = (engine.publish(event) for event in (store("ab"), remove("ab"), store("xy")))
    for batch in (first, third, second):
        hear(stream, batch)
    assert ask(table, "ab") == [UNKNOWN]


def test_a_new_life_from_its_first_batch_on_makes_the_old_ones_chunks_absent() -> None:
    old, new, (stream, table) = Engine(1), Engine(2), make_stream()
    for prompt in ("ab", "cd"):
        hear(stream, old.publish(store(prompt)))
    stream.disconnected()
    hear(stream, new.publish(store("ef")))
    assert [ask(table, prompt)[0] for prompt in ("ab", "cd", "ef")] == [ABSENT, ABSENT, PRESENT]
    assert stream.stats().restarts_total == 1
    hear(stream, new.publish(store("ab")))
    assert ask(table, "ab") == [PRESENT]


@pytest.mark.parametrize("missed", [0, 1, 2, 3, 5])
def test_a_new_life_of_which_the_beginning_was_missed(missed: int) -> None:
    old, new, (stream, table) = Engine(1), Engine(2), make_stream()
    for prompt in ("ab", "cd", "ef"):
        hear(stream, old.publish(store(prompt)))
    stream.disconnected()
    for i in range(missed):
        new.publish(store("xyz"[i % 3] + "q"))
    new.publish(store("ab"))
    hear(stream, new.publish(store("gh")), new)
    assert [ask(table, prompt)[0] for prompt in ("ab", "cd", "ef", "gh")] == [PRESENT, ABSENT, ABSENT, PRESENT]
    assert stream.stats().restarts_total == 1


@pytest.mark.parametrize("missed", [1, 2, 3, 5])
def test_without_a_replay_the_missed_beginning_may_have_been_anything(missed: int) -> None:
    old, new, (stream, table) = Engine(1), Engine(2), make_stream()
    for prompt in ("ab", "cd", "ef"):
        hear(stream, old.publish(store(prompt)))
    stream.disconnected()
    for _ in range(missed):
        new.publish(store("ab"))
    hear(stream, new.publish(store("gh")))
    assert [ask(table, prompt)[0] for prompt in ("ab", "cd", "ef", "gh")] == [UNKNOWN, UNKNOWN, UNKNOWN, PRESENT]


def test_a_connection_that_is_back_is_the_same_life_if_the_last_batch_is() -> None:
    engine, (stream, table) = Engine(), make_stream()
    hear(stream, engine.publish(store("ab")))
    stream.disconnected()
    assert ask(table, "ab") == [UNKNOWN]
    engine.publish(store("cd"))
    catch_up(stream, engine.replay)
    assert ask(table, "ab") + ask(table, "cd") == [PRESENT, PRESENT]
    stats = stream.stats()
    assert (stats.restarts_total, stats.lost_total) == (0, 0)


def test_an_engine_that_has_restarted_and_told_nothing_leaves_all_unknown() -> None:
    old, new, (stream, table) = Engine(1), Engine(2), make_stream()
    hear(stream, old.publish(store("ab")))
    stream.disconnected()
    catch_up(stream, new.replay)
    assert ask(table, "ab") == [UNKNOWN]
    hear(stream, new.publish(store("cd")), new)
    assert ask(table, "ab") + ask(table, "cd") == [None, PRESENT]


def test_first_contact_reads_what_was_published_before() -> None:
    engine, (stream, table) = Engine(), make_stream()
    for prompt in ("ab", "cd"):
        engine.publish(store(prompt))
    catch_up(stream, engine.replay)
    assert ask(table, "ab") + ask(table, "cd") + ask(table, "xy") == [PRESENT, PRESENT, None]


def test_first_contact_in_the_middle_without_replay_is_unknown_until_events_tell() -> None:
    engine, (stream, table) = Engine(), make_stream()
    engine.publish(store("ab"))
    hear(stream, engine.publish(store("abcd", 2)))
    hear(stream, engine.publish(store("xy")))
    assert ask(table, "abcd") + ask(table, "xy") == [UNKNOWN, UNKNOWN, PRESENT]
    hear(stream, engine.publish(CLEARED))
    hear(stream, engine.publish(store("ab")))
    assert ask(table, "ab") + ask(table, "xy") == [PRESENT, ABSENT]


def test_a_replay_that_begins_late_counts_from_there() -> None:
    engine, (stream, table) = Engine(buffer=2), make_stream()
    for prompt in ("ab", "cd", "ef"):
        engine.publish(store(prompt))
    catch_up(stream, engine.replay)
    assert ask(table, "ab") + ask(table, "cd") + ask(table, "ef") == [UNKNOWN, PRESENT, PRESENT]


def test_an_engine_that_keeps_nothing_for_replay() -> None:
    engine, (stream, table) = Engine(buffer=0), make_stream()
    hear(stream, engine.publish(store("ab")))
    catch_up(stream, engine.replay)
    assert ask(table, "ab") == [UNKNOWN]


def test_a_replay_that_does_not_answer_changes_nothing() -> None:
    engine, (stream, table) = Engine(), make_stream()
    hear(stream, engine.publish(store("ab")))
    hear(stream, engine.publish(store("cd")))
    stream.ask()
    assert stream.receive(*engine.publish(remove("ab")))
    assert ask(table, "ab") + ask(table, "cd") == [ABSENT, PRESENT]
    with pytest.raises(TimeoutError):
        stream.replayed([], ended=False)
    stream.give_up()
    assert ask(table, "ab") + ask(table, "cd") == [ABSENT, PRESENT]
    assert stream.stats().lost_total == 0


def test_a_replay_that_stops_answering_leaves_what_came_in_order() -> None:
    engine, (stream, table) = Engine(), make_stream()
    hear(stream, engine.publish(store("ab")))
    engine.publish(remove("ab"))
    engine.publish(store("xy"))

    def stops(start: int) -> Iterator[tuple[int, bytes]]:
        yield from engine.batches[start:2]
        raise TimeoutError

    stream.disconnected()
    catch_up(stream, stops)
    assert ask(table, "ab") + ask(table, "xy") == [UNKNOWN, UNKNOWN]
    catch_up(stream, engine.replay)
    assert ask(table, "ab") + ask(table, "xy") == [ABSENT, PRESENT]


@pytest.mark.parametrize("ends", [True, False])
def test_what_a_replay_loses_on_its_way_is_asked_for_again(ends: bool) -> None:
    engine, (stream, table) = Engine(), make_stream()
    asked: list[int] = []
    for letter in "abcdefghij":
        engine.publish(store(letter + "x"))
    engine.publish(remove("dx"))

    def loses(start: int) -> Iterator[tuple[int, bytes]]:
        asked.append(start)
        for number, payload in engine.batches[start:]:
            if number - start in (0, 1, 2, 4):
                yield number, payload
        if not ends and start + 2 < len(engine.batches):
            raise TimeoutError

    catch_up(stream, loses)
    assert asked == [0, 2, 4, 6, 8] + ([] if ends else [10])
    assert [ask(table, letter + "x")[0] for letter in "abcdefghij"] == [PRESENT] * 3 + [ABSENT] + [PRESENT] * 6
    assert stream.stats().lost_total == 0


def test_what_a_replay_never_brings_is_lost() -> None:
    engine, (stream, table) = Engine(), make_stream()
    for prompt in ("ab", "cd", "ef"):
        engine.publish(store(prompt))
    catch_up(stream, lambda start: iter([batch for batch in engine.batches[start:] if batch[0] != 1]))
    assert ask(table, "ab") + ask(table, "cd") + ask(table, "ef") == [UNKNOWN, UNKNOWN, PRESENT]


def test_what_was_true_in_between_is_not_said_while_a_replay_is_read() -> None:
    engine, (stream, table) = Engine(), make_stream()
    for event in (store("ab"), remove("ab"), store("ab")):
        engine.publish(event)
    said: list[Any] = []

    def watched(start: int) -> Iterator[tuple[int, bytes]]:
        for batch in engine.batches[start:]:
            yield batch
            said.extend(ask(table, "ab"))

    catch_up(stream, watched)
    assert ABSENT not in said
    assert ask(table, "ab") == [PRESENT]


def test_reading_afresh_finds_what_a_silent_replay_had_cost() -> None:
    engine, (stream, table) = Engine(), make_stream()
    hear(stream, engine.publish(store("ab")))
    engine.publish(store("cd"))
    hear(stream, engine.publish(store("ef")))
    assert ask(table, "ab") + ask(table, "ef") == [UNKNOWN, PRESENT]
    catch_up(stream, engine.replay)
    assert ask(table, "ab") + ask(table, "cd") + ask(table, "ef") == [PRESENT] * 3


def test_a_malformed_batch_makes_unknown_what_was_before() -> None:
    engine, (stream, table) = Engine(), make_stream()
    hear(stream, engine.publish(store("ab")))
    engine.batches.append((1, b"\xc1"))
    hear(stream, engine.batches[1])
    assert ask(table, "ab") == [UNKNOWN]
    hear(stream, engine.publish(store("cd")))
    assert ask(table, "ab") + ask(table, "cd") == [UNKNOWN, PRESENT]
    stream.malformed()
    assert ask(table, "cd") == [UNKNOWN]
    assert stream.stats().malformed_total == 2


def test_a_message_that_is_none_costs_nothing_if_the_engine_replays() -> None:
    engine, (stream, table) = Engine(), make_stream()
    hear(stream, engine.publish(store("ab")))
    stream.malformed()
    assert ask(table, "ab") == [UNKNOWN]
    engine.publish(store("cd"))
    catch_up(stream, engine.replay)
    assert ask(table, "ab") + ask(table, "cd") + ask(table, "xy") == [PRESENT, PRESENT, None]
    stream.malformed()
    stream.give_up()
    assert ask(table, "ab") == [UNKNOWN]
    catch_up(stream, engine.replay)
    assert ask(table, "ab") + ask(table, "xy") == [PRESENT, None]


def test_a_message_that_is_none_is_asked_for_again_if_a_replay_was_on_its_way() -> None:
    engine, (stream, table) = Engine(), make_stream()
    hear(stream, engine.publish(store("ab")))
    start = stream.ask()
    came = list(engine.replay(start))
    engine.publish(remove("ab"))
    stream.malformed()
    again = stream.replayed(came, ended=True)
    assert again == start
    assert ask(table, "ab") == [UNKNOWN]
    assert stream.replayed(list(engine.replay(again)), ended=True) is None
    assert ask(table, "ab") == [ABSENT]


def test_what_is_heard_while_a_replay_is_on_its_way_counts_at_once() -> None:
    engine, (stream, table) = Engine(), make_stream()
    hear(stream, engine.publish(store("ab")))
    start = stream.ask()
    came = list(engine.replay(start))
    assert stream.receive(*engine.publish(remove("ab")))
    assert ask(table, "ab") == [ABSENT]
    assert stream.replayed(came, ended=True) is None
    assert ask(table, "ab") == [ABSENT]
    assert stream.stats().lost_total == 0


def test_a_gap_that_shows_while_a_replay_is_on_its_way_is_asked_for_after_it() -> None:
    engine, (stream, table) = Engine(), make_stream()
    hear(stream, engine.publish(store("ab")))
    start = stream.ask()
    came = list(engine.replay(start))
    engine.publish(remove("ab"))
    for prompt in ("cd", "ef"):
        assert not stream.receive(*engine.publish(store(prompt)))
    assert stream.kept == 2
    again = stream.replayed(came, ended=True)
    assert again == 0
    assert ask(table, "ab") == [UNKNOWN]
    assert stream.replayed(list(engine.replay(again)), ended=True) is None
    assert [ask(table, prompt)[0] for prompt in ("ab", "cd", "ef")] == [ABSENT, PRESENT, PRESENT]
    assert stream.stats().lost_total == 0


def test_what_is_heard_while_all_is_read_afresh_is_newer() -> None:
    engine, (stream, table) = Engine(), make_stream()
    hear(stream, engine.publish(store("ab")))
    engine.publish(store("cd"))
    hear(stream, engine.publish(store("ef")))
    start = stream.ask()
    assert start == 0
    came = list(engine.replay(start))
    assert stream.receive(*engine.publish(remove("ef")))
    assert ask(table, "ef") == [ABSENT]
    assert stream.replayed(came, ended=True) is None
    assert [ask(table, prompt)[0] for prompt in ("ab", "cd", "ef")] == [PRESENT, PRESENT, ABSENT]


@pytest.mark.parametrize("begun", [0, 2, 5])
def test_a_replay_without_the_batch_that_showed_the_gap_is_another_engines(begun: int) -> None:
    engine, other, (stream, table) = Engine(1, buffer=0), Engine(2), make_stream()
    for prompt in ("gh", "ij", "kl", "mn", "op")[:begun]:
        other.publish(store(prompt))
    for prompt in ("ab", "cd"):
        engine.publish(store(prompt))
    shows = engine.publish(store("ef"))
    assert not stream.receive(*shows)
    catch_up(stream, other.replay)
    assert [ask(table, prompt)[0] for prompt in ("ab", "gh", "kl", "ef")] == [UNKNOWN] * 3 + [PRESENT]
    hear(stream, engine.publish(remove("ef")))
    assert ask(table, "ef") == [ABSENT]


@pytest.mark.parametrize("ahead", [0, 1, 3, 6])
@pytest.mark.parametrize("partial", [True, False])
def test_a_replay_without_what_was_heard_last_is_another_engines(ahead: int, partial: bool) -> None:
    engine, other, (stream, table) = Engine(1), Engine(2), make_stream()
    for prompt in ("ab", "cd", "ef"):
        batch = engine.publish(store(prompt))
        if not (partial and prompt == "cd"):
            hear(stream, batch)
    for prompt in ("gh", "ij", "kl", "mn", "op", "qr")[:ahead]:
        other.publish(store(prompt))
    catch_up(stream, other.replay)
    for prompt in ("ab", "ef", "gh", "kl", "qr"):
        assert ask(table, prompt)[0] in (UNKNOWN, PRESENT if (ahead, prompt) == (0, "ef") else UNKNOWN)
    assert stream.stats().restarts_total == 0
    hear(stream, engine.publish(store("xy")), engine)
    assert [ask(table, prompt)[0] for prompt in ("ef", "xy")] == [PRESENT] * 2


def test_two_engines_behind_one_address_make_all_unknown() -> None:
    one, two, (stream, table) = Engine(1), Engine(2), make_stream()
    for prompt in ("ab", "cd"):
        hear(stream, one.publish(store(prompt)))
    hear(stream, two.publish(store("gh")))
    assert ask(table, "ab") + ask(table, "cd") + ask(table, "xy") == [UNKNOWN] * 3
    hear(stream, one.publish(remove("ab")))
    assert ask(table, "ab") + ask(table, "gh") == [UNKNOWN, UNKNOWN]
    assert stream.stats().restarts_total == 0


def test_a_cut_while_a_replay_is_on_its_way() -> None:
    engine, (stream, table) = Engine(), make_stream()
    hear(stream, engine.publish(store("ab")))
    engine.publish(remove("ab"))
    assert not stream.receive(*engine.publish(store("cd")))
    stream.ask()
    stream.disconnected()
    assert stream.kept == 0
    catch_up(stream, engine.replay)
    assert ask(table, "ab") + ask(table, "cd") == [ABSENT, PRESENT]
    assert stream.stats().lost_total == 0


EVENTS = ["publish", "lose", "duplicate", "old", "swap", "restart", "cut", "junk", "nonsense"]
REPLAYS = ["check", "trim", "meanwhile", "silence", "stranger"]
actions = st.lists(st.sampled_from([*EVENTS, *REPLAYS]), max_size=40)


@given(actions, st.data())
def test_whatever_happens_on_the_way_nothing_is_present_that_the_engine_has_not(actions: list[str], data: Any) -> None:
    """With a replay: present exactly what the engine has, unless the replay was too short; never what it hasn't."""
    life, engine, (stream, table) = 1, Engine(1), make_stream()
    held: set[str] = set()
    prompts = ["ab", "cd", "ef"]
    catch_up(stream, engine.replay)

    def publish() -> tuple[int, bytes]:
        prompt = data.draw(st.sampled_from(prompts))
        if prompt in held and data.draw(st.booleans()):
            held.discard(prompt)
            return engine.publish(remove(prompt[:1], prompt))
        if prompt in held:
            return engine.publish()
        held.add(prompt)
        return engine.publish(store(prompt))

    for action in actions:
        if action == "lose":
            publish()
            continue
        if action == "swap":
            first, second = publish(), publish()
            hear(stream, second, engine)
            hear(stream, first, engine)
        elif action in ("duplicate", "old") and engine.batches:
            number = data.draw(st.integers(0, len(engine.batches) - 1)) if action == "old" else -1
            hear(stream, engine.batches[number], engine)
            continue
        elif action == "restart":
            life += 1
            engine = Engine(life, buffer=data.draw(st.sampled_from([2, 1000])))
            held.clear()
            stream.disconnected()
            catch_up(stream, engine.replay)
        elif action == "cut":
            stream.disconnected()
            catch_up(stream, engine.replay)
        elif action == "check":
            catch_up(stream, engine.replay)
        elif action == "junk":
            engine.batches.append((len(engine.batches), b"\xc1"))
            hear(stream, engine.batches[-1], engine)
        elif action == "nonsense":
            stream.malformed()
            if data.draw(st.booleans()):
                catch_up(stream, engine.replay)
            else:
                stream.give_up()
        elif action == "meanwhile":
            start: int | None = stream.ask()
            while start is not None:
                came = list(engine.replay(start))
                for _ in range(data.draw(st.integers(0, 3))):
                    batch = publish()
                    if data.draw(st.booleans()):
                        stream.receive(*batch)
                start = stream.replayed(came, ended=True)
        elif action == "silence":
            stream.ask()
            for _ in range(data.draw(st.integers(0, 3))):
                batch = publish()
                if data.draw(st.booleans()):
                    stream.receive(*batch)
            stream.give_up()
        elif action == "stranger":
            hear(stream, publish(), engine)
            stranger = Engine(-1)
            for _ in range(data.draw(st.integers(0, 2 * len(engine.batches)))):
                stranger.publish(store(data.draw(st.sampled_from(prompts))))
            catch_up(stream, stranger.replay)
        elif action == "trim":
            engine._buffer = 2
        hear(stream, publish(), engine)
        for prompt in prompts:
            if prompt in held:
                assert ask(table, prompt)[0] in (PRESENT, UNKNOWN), action
            else:
                assert ask(table, prompt)[0] is not PRESENT, action
