"""What is finished: Parquet parts, and a journal of what is in none yet. A run that was killed goes on from there.

A directory belongs to one run (`RunIdentity`), and to one process at a time. A row is in the journal as soon as its
prompt is finished, which survives ``kill -9``. Parts are written under another name, flushed to disk and then renamed;
only then the journal is emptied. So whenever this ends, a row is in a part, in the journal, or in both: then the part
counts.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import re
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from .model import AnswerError

METADATA_KEY = b"hs_cache.batch_inference"
RUN_FILE = "run.json"
_JOURNAL = "journal.jsonl"
_LOCK = ".lock"
_PART = re.compile(r"part-(\d{5,})\.parquet")
_TEMPORARY = ".tmp"

_FIELDS = [
    ("id", pa.string()),
    ("reply", pa.string()),
    ("reply_token_ids", pa.list_(pa.int32())),
    ("prompt_tokens", pa.int32()),
    ("skipped_tokens", pa.int32()),
    ("embedding", pa.list_(pa.float32())),
    ("error", pa.string()),
]


class OutputError(Exception):
    """The directory can't be used for this run; the message says why."""


@dataclass(frozen=True)
class RunIdentity:
    """What must be the same for results to belong together.

    Attributes:
        model, revision: of the weights.
        reply_tokens: how many are generated.
        prompts_sha256: of all prompts, whichever of them were asked for.
    """

    model: str
    revision: str
    reply_tokens: int
    prompts_sha256: str


@dataclass(frozen=True)
class Row:
    """What became of one prompt: an answer, or an error and nothing else. `batch.model.Answer` says what is what."""

    id: str
    reply: str | None = None
    reply_token_ids: tuple[int, ...] | None = None
    prompt_tokens: int | None = None
    skipped_tokens: int | None = None
    embedding: NDArray[np.float32] | None = None
    error: str | None = None


class Output:
    """The directory of one run; a context manager that holds it.

    Attributes:
        done: ids of the prompts that are finished, in parts or in the journal.
        num_errors: how many of them with an error.
        notes: what was found and put right when it was opened, for people.

    Args:
        directory: made if it isn't there.
        identity: of the run.
        part_rows: rows of a part.
        ids: of all prompts.
        retry_errors: forget rows with an error, so that these prompts are tried again.

    Raises:
        OutputError: it belongs to another run, another process writes to it, or it holds what isn't of any run.
    """

    def __init__(
        self,
        directory: Path,
        identity: RunIdentity,
        *,
        part_rows: int,
        ids: Collection[str],
        retry_errors: bool = False,
    ) -> None:
        self._directory = directory
        self._identity = identity
        self._part_rows = part_rows
        metadata = {METADATA_KEY: json.dumps(asdict(identity)).encode()}
        self._schema = pa.schema(_FIELDS, metadata=metadata)
        self._rows: list[pa.Table] = []  # of one row each
        self.done: set[str] = set()
        self.num_errors = 0
        self.notes: list[str] = []
        with _refusing(directory), ExitStack() as held:
            directory.mkdir(parents=True, exist_ok=True)
            _refuse_strange(directory)
            held.callback(os.close, _lock(directory))
            self._claim()
            self._next_part = 1 + max((number for number, _ in self._parts()), default=-1)
            self._read_parts(set(ids), retry_errors)
            unwritten = self._read_journal(set(ids), retry_errors)
            held.callback(self._drop_empty_journal)
            # Unbuffered: what could not be written must not be tried again when it is closed.
            self._journal = held.enter_context((directory / _JOURNAL).open("ab", buffering=0))
            for row in unwritten:
                self._take(row)
            self._held = held.pop_all()

    def __enter__(self) -> Output:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def add(self, row: Row) -> None:
        """A prompt is finished. When this returns, the row outlives this process; a part may have been written.

        Raises:
            AnswerError: the row is none that a part could have; nothing was written.
            OSError: it can't be written.
        """
        assert row.id not in self.done
        table = self._table(vars(row))
        self._append(_encode(table))
        self._take(table)

    def flush(self) -> None:
        """Write what is in no part yet as one, a shorter one.

        Raises:
            OSError: it can't be written.
        """
        if self._rows:
            table = pa.concat_tables(self._rows).combine_chunks()
            self._write(f"part-{self._next_part:05d}.parquet", table)
            self._next_part += 1
            self._rows.clear()
        os.ftruncate(self._journal.fileno(), 0)

    def parts(self) -> list[Path]:
        """In the order in which they were written."""
        return [path for _, path in self._parts()]

    def close(self) -> None:
        """Let the directory go, whatever state the disk is in. What is in the journal stays there."""
        with suppress(OSError):
            self._held.close()

    def _drop_empty_journal(self) -> None:
        path = self._directory / _JOURNAL
        if path.stat().st_size == 0:
            path.unlink()

    def _claim(self) -> None:
        """Check whose directory it is, and make it this run's if it is nobody's."""
        for path in sorted(self._directory.iterdir()):
            if path.name.startswith(".") and path.name.endswith(_TEMPORARY) and _is_ours(path.name):
                path.unlink()
                self.notes.append(f"removed {path.name}, which was being written when a run was killed")
        path = self._directory / RUN_FILE
        wanted = asdict(self._identity)
        if not path.exists():
            with _replacing(path) as temporary:
                temporary.write_text(json.dumps(wanted, indent=2) + "\n", encoding="utf-8")
            return
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise OutputError(f"--output: {path} can't be read as that of a batch run")
        self._refuse_another(found, "it")

    def _refuse_another(self, found: dict[str, Any], what: str) -> None:
        names = {"reply_tokens": "--reply-tokens", "prompts_sha256": "the digest of the prompts"}
        for name, value in asdict(self._identity).items():
            if found.get(name) != value:
                raise OutputError(
                    f"--output: {self._directory} belongs to another run: {names.get(name, name)} of {what} is "
                    f"{found.get(name)!r}, of this run {value!r}; take another directory"
                )

    def _parts(self) -> list[tuple[int, Path]]:
        found = ((_PART.fullmatch(path.name), path) for path in self._directory.iterdir())
        return sorted((int(match[1]), path) for match, path in found if match)

    def _read_parts(self, ids: set[str], retry_errors: bool) -> None:
        """Read and check all of them before any is changed."""
        damaged: dict[Path, str] = {}
        with_errors: list[Path] = []
        counts: Counter[str] = Counter()
        for path in self.parts():
            content = path.read_bytes()  # if not now, then another time: that says nothing against the part
            try:
                table = _parse_part(content)
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError, OSError) as error:  # no disk is in play any more
                damaged[path] = _first_line(error)
                continue
            self._refuse_foreign(table.schema, path.name)
            failed = len(table) - table["error"].null_count
            if failed and retry_errors:
                with_errors.append(path)
                table = table.filter(pc.is_null(table["error"]))
            else:
                self.num_errors += failed
            counts.update(table["id"].to_pylist())
        self._refuse_wrong(counts, ids)
        for path, reason in damaged.items():
            aside = path.with_name(f"{path.name}.unreadable")
            path.rename(aside)
            self.notes.append(f"{path.name} can't be read ({reason}): it is {aside.name} now")
        for path in with_errors:
            table = _parse_part(path.read_bytes())
            table = table.filter(pc.is_null(table["error"]))
            if len(table):
                self._write(path.name, table)
            else:
                path.unlink()
        self.done.update(counts)

    def _refuse_foreign(self, schema: pa.Schema, name: str) -> None:
        try:
            found = json.loads((schema.metadata or {}).get(METADATA_KEY, b"{}"))
        except ValueError:
            found = None
        self._refuse_another(found if isinstance(found, dict) else {}, name)
        if not schema.equals(self._schema):
            raise OutputError(
                f"--output: {self._directory / name} has the columns {', '.join(schema.names)}, expected "
                f"{', '.join(self._schema.names)}"
            )

    def _refuse_wrong(self, counts: Counter[str], ids: set[str]) -> None:
        wrong = [ident for ident, count in counts.items() if count > 1 or ident not in ids]
        if wrong:
            raise OutputError(
                f"--output: the parts in {self._directory} have id {wrong[0]!r} {counts[wrong[0]]} times, and it is "
                f"{'one' if wrong[0] in ids else 'none'} of the prompts'; expected each id at most once"
            )

    def _read_journal(self, ids: set[str], retry_errors: bool) -> list[pa.Table]:
        """Its rows that are in no part, and nothing else in it: its last line may be half a line."""
        path = self._directory / _JOURNAL
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        rows: dict[str, pa.Table] = {}
        for number, line in enumerate(lines, start=1):
            try:
                row = self._table(_decode(line))
            except (ValueError, KeyError, TypeError, RecursionError):
                self.notes.append(f"line {number} of {path.name} is no row: it is left out")
                continue
            ident = _value(row, "id")
            if ident in ids and ident not in self.done and not (retry_errors and _value(row, "error") is not None):
                rows.setdefault(ident, row)
        with _replacing(path) as temporary:
            temporary.write_bytes(b"".join(map(_encode, rows.values())))
        return list(rows.values())

    def _table(self, values: dict[str, Any]) -> pa.Table:
        """One row as a part has it. What becomes one can be journalled: it can be read back and written, too."""
        columns = []
        for name, kind in _FIELDS:
            value = values[name]
            if isinstance(value, str):
                value = value.encode(errors="replace").decode()  # a model may well speak in lone surrogates
            try:
                columns.append(pa.array([value], kind))
            except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
                raise AnswerError(f"{name}: {_first_line(error)}, expected {kind}") from error
        given = {name for name, column in zip(self._schema.names, columns, strict=True) if not column.null_count}
        if given not in ({"id", "error"}, {*self._schema.names} - {"error"}):
            raise AnswerError(f"got {', '.join(sorted(given))}, expected an error, or all of an answer")
        return pa.Table.from_arrays(columns, schema=self._schema)

    def _append(self, line: bytes) -> None:
        """To the journal: all of it, or nothing."""
        end = os.fstat(self._journal.fileno()).st_size
        try:
            while line:
                line = line[self._journal.write(line) :]
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._journal.fileno(), end)
            raise

    def _take(self, row: pa.Table) -> None:
        self.done.add(_value(row, "id"))
        self.num_errors += _value(row, "error") is not None
        self._rows.append(row)
        if len(self._rows) >= self._part_rows:
            self.flush()

    def _write(self, name: str, table: pa.Table) -> None:
        with _replacing(self._directory / name) as temporary, temporary.open("wb") as file:
            pq.write_table(table, file)


class _replacing:
    """Gives a temporary name; what was written under that is then on disk, and has the right name."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._temporary = path.with_name(f".{path.name}{_TEMPORARY}")

    def __enter__(self) -> Path:
        return self._temporary

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            with suppress(OSError):
                self._temporary.unlink(missing_ok=True)
            return
        _sync(self._temporary)
        self._temporary.replace(self._path)
        _sync(self._path.parent)


@contextmanager
def _refusing(directory: Path) -> Iterator[None]:
    """Whatever is wrong with a directory when it is opened is an `OutputError`."""
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        where = getattr(error, "filename", None) or directory
        reason = getattr(error, "strerror", None) or _first_line(error)
        raise OutputError(f"--output: {where} can't be read or written: {reason}") from error


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_ours(name: str) -> bool:
    name = name.removeprefix(".").removesuffix(_TEMPORARY)
    return name in (RUN_FILE, _JOURNAL, "lock") or _PART.fullmatch(name) is not None


def _refuse_strange(directory: Path) -> None:
    """Before anything in it is touched."""
    names = sorted(path.name for path in directory.iterdir())
    strange = [name for name in names if not name.startswith(".") or not _is_ours(name)]
    if strange and RUN_FILE not in names:
        raise OutputError(
            f"--output: {directory} is no directory of a batch run: no {RUN_FILE} in it, but {strange[0]}; expected "
            "one that is empty or not there"
        )


def _lock(directory: Path) -> int:
    """Held until it is closed, or this process ends in whatever way."""
    descriptor = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise OutputError(
            f"--output: another run is writing to {directory} right now; stop it first (ray job stop), or take "
            "another directory"
        ) from error
    return descriptor


def _parse_part(content: bytes) -> pa.Table:
    with pq.ParquetFile(pa.BufferReader(content)) as file:
        table = file.read()
    table.validate(full=True)
    return table


def _value(row: pa.Table, name: str) -> Any:
    return row[name][0].as_py()


def _encode(row: pa.Table) -> bytes:
    values = {name: _value(row, name) for name in row.column_names if name != "embedding"}
    embedding = row["embedding"][0].values
    values["embedding"] = None
    if embedding is not None:
        values["embedding"] = base64.b64encode(embedding.to_numpy().astype("<f4").tobytes()).decode()
    return json.dumps(values).encode() + b"\n"


def _decode(line: bytes) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(line)
    if values["embedding"] is not None:
        values["embedding"] = np.frombuffer(base64.b64decode(values["embedding"]), dtype="<f4").astype(np.float32)
    return values


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
