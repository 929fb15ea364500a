"""The parts of the batch job that need no Ray: prompts, who answers them, and what is kept of a run that is killed."""

import dataclasses
import errno
import importlib.util
import io
import json
import random
import re
import resource
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pq = pytest.importorskip("pyarrow.parquet")

EXAMPLE = Path(__file__).parents[2] / "examples" / "batch_inference"


@pytest.fixture(scope="module")
def batch() -> Iterator[SimpleNamespace]:
    """The example's modules, imported as the script imports them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLE))
        from batch import crew, model, output, progress, prompts, schedule

        yield SimpleNamespace(
            crew=crew, model=model, output=output, progress=progress, prompts=prompts, schedule=schedule
        )


@pytest.fixture(scope="module")
def main(batch: SimpleNamespace) -> Iterator[ModuleType]:
    """The script. Not under its own name, which other scripts have too."""
    pytest.importorskip("transformers")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLE))
        spec = importlib.util.spec_from_file_location("batch_inference_main", EXAMPLE / "main.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, spec.name, module)  # where dataclasses look for their own
        spec.loader.exec_module(module)
        yield module


def make_file(tmp_path: Path, *lines: Any) -> Path:
    """A JSONL file; what isn't bytes becomes JSON."""
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(
        b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines)
    )
    return path


def make_prompts(batch: SimpleNamespace, *texts: str) -> list[Any]:
    return [batch.prompts.Prompt(f"p{n}", (batch.prompts.Message("user", text),)) for n, text in enumerate(texts)]


# Prompts


def test_prompts_and_conversations_are_read(batch: SimpleNamespace, tmp_path: Path) -> None:
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    path = make_file(tmp_path, b'\xef\xbb\xbf{"id": 7, "prompt": "x", "more": 1}', b"", {"id": "b", "messages": turns})
    file = batch.prompts.read_prompts(path)
    message = batch.prompts.Message
    assert [(prompt.id, prompt.messages) for prompt in file.prompts] == [
        ("7", (message("user", "x"),)),
        ("b", (message("system", "s"), message("user", "u"))),
    ]
    assert file.bad_lines == ()


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (b'{"id": "a"', "not JSON: Expecting ',' delimiter at column 11"),
        (b'{"id": "\xff"}', "not UTF-8: invalid start byte at byte 8"),
        (b"[" * 100_000, "nested too deeply"),
        ([1], "got a list, expected an object with 'id' and 'prompt' or 'messages'"),
        ({"prompt": "x"}, "id: got none, expected a string that is not empty, or an integer"),
        ({"id": True, "prompt": "x"}, "id: got True"),
        ({"id": "", "prompt": "x"}, "id: got ''"),
        ({"id": "a"}, "expected either 'prompt' or 'messages'"),
        ({"id": "a", "prompt": "x", "messages": []}, "expected either 'prompt' or 'messages'"),
        ({"id": "a", "prompt": ""}, "prompt: got '', expected a string that is not empty"),
        ({"id": "a", "prompt": ["x"]}, "prompt: got list"),
        (b'{"id": "a", "prompt": "\\ud800"}', "a lone surrogate"),
        ({"id": "a", "messages": "x"}, "messages: got string, expected a list that is not empty"),
        ({"id": "a", "messages": ["x"]}, "messages[0]: got string, expected an object with 'role' and 'content'"),
        ({"id": "a", "messages": [{"role": "tool", "content": "x"}]}, "messages[0].role: got 'tool', expected one of"),
        ({"id": "a", "messages": [{"role": "user", "content": None}]}, "messages[0].content: got null"),
        (
            {"id": "a", "messages": [{"role": "user", "content": "x"}, {"role": "system", "content": "x"}]},
            "messages[1].role: got 'system'",
        ),
        (
            {"id": "a", "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}]},
            "messages: the last is of role 'assistant', expected a user's turn at the end",
        ),
    ],
)
def test_a_bad_line_is_named_or_skipped(batch: SimpleNamespace, tmp_path: Path, line: Any, complaint: str) -> None:
    path = make_file(tmp_path, {"id": "good", "prompt": "x"}, line)
    with pytest.raises(batch.prompts.PromptsError) as caught:
        batch.prompts.read_prompts(path)
    assert f"line 2: {complaint}" in str(caught.value) or f"line 2: not usable JSON: {complaint}" in str(caught.value)
    assert "--skip-bad-lines" in str(caught.value)
    file = batch.prompts.read_prompts(path, skip_bad_lines=True)
    assert [prompt.id for prompt in file.prompts] == ["good"]
    assert len(file.bad_lines) == 1


def test_an_id_that_comes_twice_is_always_refused(batch: SimpleNamespace, tmp_path: Path) -> None:
    path = make_file(tmp_path, {"id": "1", "prompt": "x"}, b"{", {"id": 1, "prompt": "y"})
    with pytest.raises(batch.prompts.PromptsError, match=r"2 of its lines(.|\n)*line 2: (.|\n)*line 3: id '1' is that"):
        batch.prompts.read_prompts(path)
    with pytest.raises(batch.prompts.PromptsError, match=r"1 of its lines(.|\n)*line 3: id '1' is that of line 1 too"):
        batch.prompts.read_prompts(path, skip_bad_lines=True)


def test_only_the_first_bad_lines_are_shown(batch: SimpleNamespace, tmp_path: Path) -> None:
    with pytest.raises(batch.prompts.PromptsError) as caught:
        batch.prompts.read_prompts(make_file(tmp_path, *[b"{"] * 50))
    assert "50 of its lines" in str(caught.value)
    assert "... and 30 more" in str(caught.value)


def test_files_without_prompts_are_refused(batch: SimpleNamespace, tmp_path: Path) -> None:
    with pytest.raises(batch.prompts.PromptsError, match="no prompt in it"):
        batch.prompts.read_prompts(make_file(tmp_path))
    with pytest.raises(batch.prompts.PromptsError, match=r"nowhere\.jsonl can't be read: No such file"):
        batch.prompts.read_prompts(tmp_path / "nowhere.jsonl")


def test_the_digest_is_that_of_what_is_asked(batch: SimpleNamespace, tmp_path: Path) -> None:
    def digest(*lines: Any) -> str:
        return str(batch.prompts.read_prompts(make_file(tmp_path, *lines)).digest)

    one, two = {"id": "1", "prompt": "x"}, {"id": "2", "prompt": "y"}
    same = {"more": 1, "messages": [{"role": "user", "content": "x"}], "id": 1}
    assert digest(one, two) == digest(same, two)
    assert len({digest(*lines) for lines in ([one], [two], [one, two], [two, one], [{"id": "1", "prompt": "y"}])}) == 5


def test_the_sample_is_what_its_script_makes(batch: SimpleNamespace) -> None:
    file = batch.prompts.read_prompts(EXAMPLE / "prompts.jsonl")
    assert len(file.prompts) == 160
    groups = batch.schedule.group_prompts(file.prompts, shared_characters=256, most=1000)
    assert sorted(len({prompt.id.rsplit("-", 2)[0] for prompt in group}) for group in groups)[0] == 1


# Who answers what


def test_prompts_that_begin_alike_are_neighbours_and_others_are_cut_apart(batch: SimpleNamespace) -> None:
    texts = [f"{document * 20} question {question}" for question in range(3) for document in "abc"]
    groups = batch.schedule.group_prompts(make_prompts(batch, *texts), shared_characters=20, most=10)
    assert [[prompt.messages[0].content[0] for prompt in group] for group in groups] == [
        ["a"] * 3,
        ["b"] * 3,
        ["c"] * 3,
    ]


def test_a_group_that_is_too_large_is_cut_where_least_is_shared(batch: SimpleNamespace) -> None:
    texts = [f"{'s' * 20}{document * count}{n}" for document, count in (("a", 9), ("b", 9)) for n in range(3)]
    groups = batch.schedule.group_prompts(make_prompts(batch, *texts), shared_characters=10, most=4)
    assert [[prompt.messages[0].content[20] for prompt in group] for group in groups] == [["a"] * 3, ["b"] * 3]


@given(st.lists(st.text("ab", max_size=8), max_size=40), st.integers(1, 5), st.integers(1, 6), st.randoms())
def test_every_prompt_is_in_one_group_and_answered_once(
    batch: SimpleNamespace, texts: list[str], most: int, shared: int, rng: random.Random
) -> None:
    prompts = make_prompts(batch, *texts)
    groups = batch.schedule.group_prompts(prompts, shared_characters=shared, most=most)
    assert all(1 <= len(group) <= most for group in groups)
    assert sorted(prompt.id for group in groups for prompt in group) == sorted(prompt.id for prompt in prompts)
    schedule = batch.schedule.Schedule(groups, 3, 2)
    running: list[list[Any]] = [[], [], []]
    became: list[str] = []
    while schedule.num_left:
        worker = rng.randrange(3)
        while (prompt := schedule.next(worker)) is not None:
            running[worker].append(prompt)
        assert len(running[worker]) <= batch.schedule.IN_FLIGHT
        what = rng.choice(["answered", "answered", "failed", "lost"])
        if what == "lost":
            running[worker].clear()
            became += [prompt.id for prompt, attempts in schedule.lost(worker) if attempts == 2]
        elif running[worker]:
            prompt = running[worker].pop(0)
            if what == "answered":
                schedule.answered(worker, prompt)
                became.append(prompt.id)
            elif schedule.failed(worker, prompt) is not None:
                became.append(prompt.id)
    assert sorted(became) == sorted(prompt.id for prompt in prompts)


def make_schedule(batch: SimpleNamespace, sizes: list[int], num_workers: int, max_attempts: int = 3) -> Any:
    prompts = iter(make_prompts(batch, *[f"{n:03}" for n in range(sum(sizes))]))
    return batch.schedule.Schedule([[next(prompts) for _ in range(size)] for size in sizes], num_workers, max_attempts)


def drain(schedule: Any, worker: int, count: int) -> list[str]:
    """Ids of the next prompts of a worker that answers each at once."""
    found = []
    for _ in range(count):
        prompt = schedule.next(worker)
        found.append(prompt.id)
        schedule.answered(worker, prompt)
    return found


def test_a_worker_has_consecutive_groups_and_takes_the_last_of_another_when_it_is_done(batch: SimpleNamespace) -> None:
    schedule = make_schedule(batch, [2, 2, 2, 2], 2)
    assert drain(schedule, 1, 6) == ["p4", "p5", "p6", "p7", "p2", "p3"]
    assert drain(schedule, 0, 2) == ["p0", "p1"]
    assert (schedule.num_left, schedule.next(0)) == (0, None)


def test_what_was_with_a_worker_that_died_is_tried_alone(batch: SimpleNamespace) -> None:
    schedule = make_schedule(batch, [4], 2, max_attempts=2)
    first, second = schedule.next(0), schedule.next(0)
    assert schedule.next(0) is None
    assert schedule.lost(0) == []
    assert schedule.next(0) == first
    assert schedule.next(0) is None, "alone"
    other = schedule.next(1)
    assert other == second
    assert schedule.next(1) is None, "alone"
    assert schedule.lost(0) == [(first, 2)]
    schedule.answered(1, second)
    assert drain(schedule, 0, 2) == ["p2", "p3"]
    assert schedule.num_left == 0


def test_a_prompt_that_fails_is_given_up_after_so_many_attempts(batch: SimpleNamespace) -> None:
    schedule = make_schedule(batch, [1], 1)
    for expected in (None, None, 3):
        assert schedule.failed(0, schedule.next(0)) == expected
    assert schedule.num_left == 0


# What is finished


def make_row(batch: SimpleNamespace, number: int) -> Any:
    embedding = (np.arange(3) + number).astype(np.float32) / 3
    return batch.output.Row(f"p{number}", f"reply {number} \ufffd\n", (1, number), 10 * number, number, embedding)


IDS = [f"p{number}" for number in range(20)]


def open_output(batch: SimpleNamespace, directory: Path, *, part_rows: int = 4, **changes: Any) -> Any:
    retry_errors = changes.pop("retry_errors", False)
    identity = {"model": "m", "revision": "r", "reply_tokens": 8, "prompts_sha256": "ab", **changes}
    run = batch.output.RunIdentity(**identity)
    return batch.output.Output(directory, run, part_rows=part_rows, ids=IDS, retry_errors=retry_errors)


def rows_of(output: Any) -> list[dict[str, Any]]:
    return [row for path in output.parts() for row in pq.read_table(path).to_pylist()]


def test_rows_are_written_as_they_are(batch: SimpleNamespace, tmp_path: Path) -> None:
    with open_output(batch, tmp_path / "new" / "out") as output:
        for number in range(5):
            output.add(make_row(batch, number))
        output.add(batch.output.Row("p5", error="no"))
        output.flush()
        assert [path.name for path in output.parts()] == ["part-00000.parquet", "part-00001.parquet"]
        rows = rows_of(output)
        metadata = pq.read_schema(output.parts()[0]).metadata[batch.output.METADATA_KEY]
    assert json.loads(metadata) == {"model": "m", "revision": "r", "reply_tokens": 8, "prompts_sha256": "ab"}
    for number, row in enumerate(rows[:5]):
        expected = make_row(batch, number)
        assert np.array_equal(np.array(row.pop("embedding"), np.float32), expected.embedding)
        assert row == {
            "id": f"p{number}",
            "reply": expected.reply,
            "reply_token_ids": [1, number],
            "prompt_tokens": 10 * number,
            "skipped_tokens": number,
            "error": None,
        }
    assert rows[5] == {**dict.fromkeys(rows[4]), "embedding": None, "id": "p5", "error": "no"}
    assert sorted(path.name for path in (tmp_path / "new" / "out").iterdir()) == [
        ".lock",
        "part-00000.parquet",
        "part-00001.parquet",
        "run.json",
    ]


def test_a_run_that_ends_after_any_row_goes_on_there(batch: SimpleNamespace, tmp_path: Path) -> None:
    with open_output(batch, tmp_path / "run") as output:
        for number in range(10):
            output.add(make_row(batch, number))
            shutil.copytree(tmp_path / "run", tmp_path / f"killed{number}")  # as `kill -9` would leave it
    for number in range(10):
        with open_output(batch, tmp_path / f"killed{number}") as resumed:
            assert resumed.done == set(IDS[: number + 1])
            for rest in range(number + 1, 10):
                resumed.add(make_row(batch, rest))
            resumed.flush()
            rows = rows_of(resumed)
            assert sorted(row["id"] for row in rows) == IDS[:10]
            for row in rows:
                expected = make_row(batch, int(row["id"][1:]))
                assert np.array_equal(np.array(row["embedding"], np.float32), expected.embedding)
                assert row["reply"] == expected.reply


def test_a_journal_that_ends_anywhere_loses_only_what_it_lacks(batch: SimpleNamespace, tmp_path: Path) -> None:
    with open_output(batch, tmp_path / "run") as output:
        for number in range(3):
            output.add(make_row(batch, number))
    journal = (tmp_path / "run" / "journal.jsonl").read_bytes()
    for end in range(0, len(journal) + 1, 7):
        (tmp_path / "run" / "journal.jsonl").write_bytes(journal[:end])
        with open_output(batch, tmp_path / "run") as resumed:
            whole = journal[:end].count(b"\n")
            assert resumed.done == set(IDS[:whole])
        assert (tmp_path / "run" / "journal.jsonl").exists() == bool(whole)


def test_what_is_in_a_part_and_in_the_journal_counts_once(batch: SimpleNamespace, tmp_path: Path) -> None:
    with open_output(batch, tmp_path / "run") as output:
        for number in range(3):
            output.add(make_row(batch, number))
        journal = (tmp_path / "run" / "journal.jsonl").read_bytes()
        output.flush()
    (tmp_path / "run" / "journal.jsonl").write_bytes(journal)  # it was killed between the two
    (tmp_path / "run" / ".part-00001.parquet.tmp").write_bytes(b"PAR1")
    with open_output(batch, tmp_path / "run") as resumed:
        assert resumed.done == set(IDS[:3])
        assert resumed.notes == ["removed .part-00001.parquet.tmp, which was being written when a run was killed"]
        resumed.flush()
        assert len(rows_of(resumed)) == 3


def test_a_part_that_cannot_be_read_is_put_aside(batch: SimpleNamespace, tmp_path: Path) -> None:
    with open_output(batch, tmp_path / "run", part_rows=2) as output:
        for number in range(4):
            output.add(make_row(batch, number))
    part = tmp_path / "run" / "part-00000.parquet"
    part.write_bytes(part.read_bytes()[:-20])
    with open_output(batch, tmp_path / "run", part_rows=2) as resumed:
        assert resumed.done == {"p2", "p3"}
        assert "part-00000.parquet.unreadable" in resumed.notes[0]
        for number in range(2):
            resumed.add(make_row(batch, number))
        assert sorted(row["id"] for row in rows_of(resumed)) == IDS[:4]


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("model", "n", "model of it is 'm', of this run 'n'"),
        ("revision", "s", "revision of it is 'r', of this run 's'"),
        ("reply_tokens", 9, "--reply-tokens of it is 8, of this run 9"),
        ("prompts_sha256", "cd", "the digest of the prompts of it is 'ab', of this run 'cd'"),
    ],
)
def test_a_directory_of_another_run_is_refused(
    batch: SimpleNamespace, tmp_path: Path, name: str, value: Any, said: str
) -> None:
    with open_output(batch, tmp_path / "run", part_rows=1) as output:
        output.add(make_row(batch, 0))
    with pytest.raises(batch.output.OutputError, match=f"belongs to another run: {said}; take another directory"):
        open_output(batch, tmp_path / "run", **{name: value})
    with open_output(batch, tmp_path / "other", **{name: value}):
        pass
    shutil.copy(tmp_path / "run" / "part-00000.parquet", tmp_path / "other" / "part-00000.parquet")
    with pytest.raises(batch.output.OutputError, match=r"belongs to another run: .* of part-00000"):
        open_output(batch, tmp_path / "other", **{name: value})


def test_a_directory_of_something_else_is_refused_and_left_alone(batch: SimpleNamespace, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / ".other.tmp").write_text("mine too")
    with pytest.raises(batch.output.OutputError, match=r"no directory of a batch run: no run.json in it, but \.other"):
        open_output(batch, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".other.tmp", "notes.txt"]
    with pytest.raises(batch.output.OutputError, match="can't be read or written: Not a directory"):
        open_output(batch, tmp_path / "notes.txt" / "out")


def test_a_directory_that_is_in_use_is_refused(batch: SimpleNamespace, tmp_path: Path) -> None:
    with open_output(batch, tmp_path), pytest.raises(batch.output.OutputError, match="another run is writing to"):
        open_output(batch, tmp_path)
    open_output(batch, tmp_path).close()


def test_the_same_id_twice_in_parts_is_refused(batch: SimpleNamespace, tmp_path: Path) -> None:
    with open_output(batch, tmp_path, part_rows=1) as output:
        output.add(make_row(batch, 0))
    shutil.copy(tmp_path / "part-00000.parquet", tmp_path / "part-00001.parquet")
    with pytest.raises(batch.output.OutputError, match="have id 'p0' 2 times"):
        open_output(batch, tmp_path)


def test_errors_are_tried_again_when_asked_for(batch: SimpleNamespace, tmp_path: Path) -> None:
    error = batch.output.Row
    with open_output(batch, tmp_path, part_rows=2) as output:
        rows = [make_row(batch, 0), error("p1", error="no"), error("p2", error="no"), error("p3", error="no")]
        for row in [*rows, error("p4", error="no")]:
            output.add(row)
        assert output.num_errors == 4
    with open_output(batch, tmp_path) as again:
        assert (again.done, again.num_errors) == (set(IDS[:5]), 4)
    with open_output(batch, tmp_path, part_rows=2, retry_errors=True) as retried:
        assert (retried.done, retried.num_errors) == ({"p0"}, 0)
        for number in range(1, 5):
            retried.add(make_row(batch, number))
        assert sorted(row["id"] for row in rows_of(retried)) == IDS[:5]
        assert retried.num_errors == 0


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"reply_token_ids": (2**31,)}, "reply_token_ids: Value 2147483648 too large"),
        ({"reply_token_ids": (2**70,)}, "reply_token_ids: "),
        ({"prompt_tokens": "1"}, "prompt_tokens: Could not convert '1'"),
        ({"reply": None}, "got embedding, id, .*, expected an error, or all of an answer"),
        ({"error": "no"}, "expected an error, or all of an answer"),
    ],
)
def test_a_row_that_no_part_could_have_is_refused_before_it_is_kept(
    batch: SimpleNamespace, tmp_path: Path, values: dict[str, Any], complaint: str
) -> None:
    row = make_row(batch, 0)
    with open_output(batch, tmp_path) as output:
        with pytest.raises(batch.model.AnswerError, match=complaint):
            output.add(dataclasses.replace(row, **values))
        assert output.done == set()
        output.add(row)
    with open_output(batch, tmp_path) as resumed:
        assert (resumed.done, resumed.notes) == ({"p0"}, [])
        resumed.flush()
        assert [row["id"] for row in rows_of(resumed)] == ["p0"]


def test_odd_values_that_are_numbers_and_texts_all_the_same_are_kept(batch: SimpleNamespace, tmp_path: Path) -> None:
    answer = batch.model.Answer("a\ud800", np.arange(2), np.int32(3), np.uint8(1), np.zeros(0, np.float32))
    assert type(answer.prompt_tokens) is int
    with open_output(batch, tmp_path) as output:
        output.add(batch.output.Row("p0", **vars(answer)))
        output.add(batch.output.Row("p1", error="can't open '\udcff'"))
    with open_output(batch, tmp_path) as resumed:
        resumed.flush()
        first, second = rows_of(resumed)
    assert (first["reply"], first["reply_token_ids"], first["prompt_tokens"]) == ("a?", [0, 1], 3)
    assert (first["embedding"], second["error"]) == ([], "can't open '?'")


@pytest.mark.parametrize(
    "line",
    [
        b"half a li",
        b"[1]",
        b'{"id": "p1"}',
        b'{"id": ["p1"], "embedding": null, "reply": null, "reply_token_ids": null, "prompt_tokens": null, '
        b'"skipped_tokens": null, "error": "no"}',
        b'{"id": "p1", "embedding": "AAA=", "reply": "", "reply_token_ids": [], "prompt_tokens": 1, '
        b'"skipped_tokens": 0, "error": null}',
        b'{"id": "p1", "embedding": "AAAAAA==", "reply": "", "reply_token_ids": [2147483648], "prompt_tokens": 1, '
        b'"skipped_tokens": 0, "error": null}',
    ],
)
def test_a_line_of_the_journal_that_is_no_row_is_left_out(batch: SimpleNamespace, tmp_path: Path, line: bytes) -> None:
    with open_output(batch, tmp_path) as output:
        output.add(make_row(batch, 0))
        output.add(make_row(batch, 2))
    journal = tmp_path / "journal.jsonl"
    first, second = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(first + line + b"\n" + second)
    with open_output(batch, tmp_path) as resumed:
        assert resumed.done == {"p0", "p2"}
        assert resumed.notes == ["line 2 of journal.jsonl is no row: it is left out"]
        resumed.flush()
    with open_output(batch, tmp_path) as again:
        assert (again.done, again.notes) == ({"p0", "p2"}, [])


@pytest.mark.parametrize("limit", [100, 700, 1500])
def test_a_disk_that_is_full_costs_the_row_that_did_not_fit(batch: SimpleNamespace, tmp_path: Path, limit: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    output = open_output(batch, tmp_path, part_rows=20)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        with output, pytest.raises(OSError, match="File too large"):
            for number in range(20):
                output.add(make_row(batch, number))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    output.close()
    with open_output(batch, tmp_path) as resumed:
        assert resumed.notes == []
        assert resumed.done == output.done == set(IDS[: len(output.done)])
        for number in range(len(resumed.done), 20):
            resumed.add(make_row(batch, number))
        resumed.flush()
        assert sorted(row["id"] for row in rows_of(resumed)) == sorted(IDS)


@pytest.mark.parametrize("name", ["journal.jsonl", "run.json", ".part-00000.parquet.tmp", "part-00000.parquet"])
def test_what_cannot_be_read_is_refused_and_the_directory_let_go(
    batch: SimpleNamespace, tmp_path: Path, name: str
) -> None:
    open_output(batch, tmp_path).close()
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).mkdir()
    with pytest.raises(batch.output.OutputError, match="can't be read or written: Is a directory"):
        open_output(batch, tmp_path)
    (tmp_path / name).rmdir()
    open_output(batch, tmp_path).close()


@pytest.mark.parametrize(
    ("metadata", "complaint"),
    [
        (b"{bad", "belongs to another run"),
        (b"[1]", "belongs to another run"),
        (None, "has the columns id, expected id"),
    ],
)
def test_a_part_of_something_else_is_refused(
    batch: SimpleNamespace, tmp_path: Path, metadata: bytes | None, complaint: str
) -> None:
    with open_output(batch, tmp_path, part_rows=1) as output:
        output.add(make_row(batch, 0))
    part = tmp_path / "part-00000.parquet"
    table = pq.read_table(part).select(["id"])
    if metadata is not None:
        table = table.replace_schema_metadata({batch.output.METADATA_KEY: metadata})
    pq.write_table(table, part)
    with pytest.raises(batch.output.OutputError, match=complaint):
        open_output(batch, tmp_path)


def test_parts_stay_as_they_are_while_one_cannot_be_read(
    batch: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_output(batch, tmp_path, part_rows=1) as output:
        output.add(batch.output.Row("p0", error="no"))
        output.add(make_row(batch, 1))
        output.add(make_row(batch, 2))
    (tmp_path / "part-00001.parquet").write_bytes(b"PAR1")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    read = Path.read_bytes

    def stale(path: Path) -> bytes:
        if path.name == "part-00002.parquet":
            raise OSError(errno.ESTALE, "Stale file handle", str(path))
        return read(path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", stale)
        with pytest.raises(batch.output.OutputError, match=r"part-00002\.parquet can't be read or written: Stale file"):
            open_output(batch, tmp_path, retry_errors=True)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    with open_output(batch, tmp_path, retry_errors=True) as resumed:
        assert resumed.done == {"p2"}
        assert "part-00001.parquet.unreadable" in resumed.notes[0]


def test_a_part_that_does_not_fit_leaves_its_rows_in_the_journal(batch: SimpleNamespace, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    output = open_output(batch, tmp_path, part_rows=2)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # both rows in the journal fit; a part doesn't
        with output, pytest.raises(OSError, match="File too large"):
            for number in range(2):
                output.add(make_row(batch, number))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "journal.jsonl", "run.json"]
    with open_output(batch, tmp_path, part_rows=2) as resumed:
        assert sorted(row["id"] for row in rows_of(resumed)) == IDS[:2]


# The workers


class OddError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("became", "said"),
    [
        (OSError("can't open '\udcff.bin'"), "OSError: can't open '?.bin'"),
        (OddError(), "OddError: <exception str() failed>"),
        (None, "the model gave NoneType, expected an Answer"),
    ],
)
def test_a_model_that_has_no_answer_says_so_in_plain_text(
    batch: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, became: Any, said: str
) -> None:
    class Odd:
        def __init__(self, cache: Any, chunk_size: int) -> None:
            pass

        def answer(self, prompt: Any, reply_tokens: int) -> Any:
            if isinstance(became, Exception):
                raise became
            return became

    monkeypatch.setattr(batch.crew, "load_model", lambda name: Odd)
    with pytest.raises(batch.model.AnswerError) as caught:
        batch.crew.Worker("odd", None, 4, 8).answer(make_prompts(batch, "x")[0])
    assert str(caught.value).endswith(said)


def test_an_answer_that_cannot_be_kept_is_a_failed_attempt(
    batch: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Handle:
        """Answers at once; what `remote` returns is the result itself."""

        def __getattr__(self, name: str) -> SimpleNamespace:
            return SimpleNamespace(remote=lambda *prompt: (1, "node") if name == "where" else (name, *prompt))

    ray = SimpleNamespace(
        wait=lambda refs, num_returns, timeout: (refs[:1], refs[1:]), get=lambda ref, timeout=None: ref, kill=id
    )
    monkeypatch.setattr(batch.crew, "ray", ray)
    heard: list[str] = []
    given_up: list[tuple[str, str]] = []

    def answered(prompt: Any, answer: Any) -> None:
        heard.append(prompt.id)
        if prompt.id == "p0":
            raise batch.model.AnswerError("reply: no")

    with batch.crew.Crew(
        lambda number: Handle(),
        1,
        make_schedule(batch, [3], 1, max_attempts=2),
        batch.crew.Limits(60.0, 60.0),
        answered=answered,
        gave_up=lambda prompt, reason: given_up.append((prompt.id, reason)),
        say=lambda line: None,
    ) as crew:
        crew.run(lambda: None)
    assert sorted(heard) == ["p0", "p0", "p1", "p2"]
    assert given_up == [("p0", "reply: no (tried 2 times)")]


# The model and the command line


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("batch.model", "expected MODULE:CLASS"),
        ("nowhere:Model", "can't be imported: No module named 'nowhere'"),
        ("batch.model:Nothing", "can't be imported: module 'batch.model' has no attribute 'Nothing'"),
        ("batch.model:Answer", "model of batch.model:Answer is None, expected a string that is not empty"),
    ],
)
def test_a_model_that_is_none_is_refused(batch: SimpleNamespace, name: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=f"--model: .*{complaint}"):
        batch.model.load_model(name)


@pytest.mark.parametrize("embedding", [[1.0], np.zeros(3), np.zeros((1, 3), np.float32)])
def test_an_embedding_of_another_kind_is_refused(batch: SimpleNamespace, embedding: Any) -> None:
    with pytest.raises(ValueError, match=r"embedding: got .*, expected a NumPy array, float32 \[hidden_dim\]"):
        batch.model.Answer("", (), 1, 0, embedding)


@pytest.mark.parametrize(
    ("name", "value"), [("reply", b"a"), ("reply_token_ids", (1.5,)), ("prompt_tokens", "1"), ("skipped_tokens", None)]
)
def test_an_answer_of_other_kinds_is_refused(batch: SimpleNamespace, name: str, value: Any) -> None:
    values = {"reply": "a", "reply_token_ids": (1,), "prompt_tokens": 1, "skipped_tokens": 0, name: value}
    with pytest.raises(batch.model.AnswerError, match=f"{name}: "):
        batch.model.Answer(**values, embedding=np.ones(1, np.float32))


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (["--output", "out"], "got 'out', expected an absolute path"),
        (["--num-workers", "0"], "got '0', expected an integer of 1 or more"),
        (["--limit", "x"], "got 'x', expected an integer of 1 or more"),
        (["--worker-cpus", "-1"], "got '-1', expected a number of 0 or more"),
        (["--prompt-timeout-s", "nan"], "got 'nan', expected at least 1 second"),
        (["--modell", "x"], "unrecognized arguments"),
    ],
)
def test_a_wrong_argument_is_refused(
    main: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], line: list[str], complaint: str
) -> None:
    path = make_file(tmp_path, {"id": "a", "prompt": "x"})
    with pytest.raises(SystemExit) as caught:
        main.main(["--prompts", str(path), "--output", str(tmp_path / "out"), *line])
    assert caught.value.code == 2
    assert complaint in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_guide_names_options_that_there_are(main: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main.main(["--help"])
    known = set(re.findall(r"--[a-z-]+", capsys.readouterr().out)) | {"--head", "--address", "--working-dir"}  # Ray's
    assert set(re.findall(r"(?<!-)--[a-z][a-z-]+", (EXAMPLE.parents[1] / "docs" / "batch.md").read_text())) <= known


def test_what_cannot_be_used_is_said_before_ray_is_joined(
    main: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_file(tmp_path, {"id": "a", "prompt": "x"}, b"{")
    line = ["--prompts", str(path), "--output", str(tmp_path / "out")]
    assert main.main(line) == main.UNUSABLE
    assert "line 2: not JSON" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert main.main([*line, "--model", "nowhere:Model"]) == main.UNUSABLE
    assert capsys.readouterr().err.startswith("error: --model: 'nowhere:Model' can't be imported")


def test_a_run_that_is_finished_needs_no_ray(
    batch: SimpleNamespace, main: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_file(tmp_path, {"id": "p0", "prompt": "x"}, {"id": "p1", "prompt": "x"})
    file = batch.prompts.read_prompts(path)
    thinker = batch.model.load_model("batch.tiny_thinker:TinyThinker")
    names = {"model": thinker.model, "revision": thinker.revision, "prompts_sha256": file.digest, "reply_tokens": 16}
    with open_output(batch, tmp_path / "out", **names) as output:
        output.add(make_row(batch, 0))
        output.add(batch.output.Row("p1", error="no"))
    line = ["--prompts", str(path), "--output", str(tmp_path / "out")]
    assert main.main([*line, "--limit", "1"]) == main.SOME_FAILED
    printed = capsys.readouterr().out
    assert "1 prompts, of which 1 were finished before" in printed
    assert "1 part with 2 rows, 1 of them with an error (--retry-errors tries these again)" in printed


def test_a_name_that_is_not_unicode_can_be_printed(
    batch: SimpleNamespace, main: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_file(tmp_path, {"id": "p0", "prompt": "x"})
    thinker = batch.model.load_model("batch.tiny_thinker:TinyThinker")
    digest = batch.prompts.read_prompts(path).digest
    names = {"model": thinker.model, "revision": thinker.revision, "prompts_sha256": digest, "reply_tokens": 16}
    with open_output(batch, tmp_path / "out\udcff", **names) as output:
        output.add(make_row(batch, 0))
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding="utf-8"))
    assert main.main(["--prompts", str(path), "--output", str(tmp_path / "out\udcff")]) == main.ALL_ANSWERED
    sys.stdout.flush()
    assert b"out\\udcff: 1 part with 1 rows" in printed.getvalue()


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_is_a_bar_or_lines(batch: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    from rich.console import Console

    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=120)
    monkeypatch.setattr(batch.progress, "_EVERY_S", 0.0)
    counts = batch.progress.Counts()
    with batch.progress.Progress(counts, total=10, before=2, console=console) as progress:
        progress.update()
        counts.answered, counts.failed, counts.prompt_tokens, counts.skipped_tokens = 3, 1, 200, 150
        progress.update()
        progress.say("worker 0 [lost]")
    printed = text.getvalue()
    assert "6/10" in printed
    assert "75% of tokens skipped, 1 failed, about " in printed
    assert "worker 0 [lost]" in printed
    assert ("\x1b" in printed) == terminal
    assert sys.stdout is not text
