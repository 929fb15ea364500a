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
from collections.abc import Collection
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

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
        self._rows: list[Row] = []
        self.done: set[str] = set()
        self.num_errors = 0
        self.notes: list[str] = []
        try:
            directory.mkdir(parents=True, exist_ok=True)
            _refuse_strange(directory)
            self._lock = _lock(directory)
        except OSError as error:
            raise OutputError(f"--output: {directory} can't be written to: {error.strerror}") from error
        try:
            self._claim()
            self._next_part = 1 + max((number for number, _ in self._parts()), default=-1)
            self._read_parts(set(ids), retry_errors)
            unwritten = self._read_journal(set(ids), retry_errors)
            self._journal = (directory / _JOURNAL).open("ab")
        except BaseException:
            os.close(self._lock)
            raise
        for row in unwritten:
            self._take(row)

    def __enter__(self) -> Output:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def add(self, row: Row) -> None:
        """A prompt is finished. When this returns, the row outlives this process; a part may have been written.

        Raises:
            OSError: it can't be written.
        """
        assert row.id not in self.done
        self._journal.write(_encode(row))
        self._journal.flush()
        self._take(row)

    def flush(self) -> None:
        """Write what is in no part yet as one, a shorter one.

        Raises:
            OSError: it can't be written.
        """
        if self._rows:
            columns = {name: [getattr(row, name) for row in self._rows] for name, _ in _FIELDS}
            table = pa.Table.from_pydict(columns, schema=self._schema)
            self._write(f"part-{self._next_part:05d}.parquet", table)
            self._next_part += 1
            self._rows.clear()
        os.ftruncate(self._journal.fileno(), 0)

    def parts(self) -> list[Path]:
        """In the order in which they were written."""
        return [path for _, path in self._parts()]

    def close(self) -> None:
        """Let the directory go. What is in the journal stays there."""
        if self._journal.closed:
            return
        self._journal.close()
        path = self._directory / _JOURNAL
        if path.stat().st_size == 0:
            path.unlink()
        os.close(self._lock)

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
        counts: Counter[str] = Counter()
        for path in self.parts():
            try:
                with pq.ParquetFile(path) as file:
                    metadata = file.schema_arrow.metadata or {}
                    table = file.read()
            except (pa.ArrowException, OSError) as error:
                aside = path.with_name(f"{path.name}.unreadable")
                path.rename(aside)
                self.notes.append(f"{path.name} can't be read ({_first_line(error)}): it is {aside.name} now")
                continue
            self._refuse_another(json.loads(metadata.get(METADATA_KEY, b"{}")), path.name)
            if retry_errors and table["error"].null_count < len(table):
                table = table.filter(pc.is_null(table["error"]))
                if len(table):
                    self._write(path.name, table)
                else:
                    path.unlink()
            self.num_errors += len(table) - table["error"].null_count
            counts.update(table["id"].to_pylist())
        wrong = [ident for ident, count in counts.items() if count > 1 or ident not in ids]
        if wrong:
            raise OutputError(
                f"--output: the parts in {self._directory} have id {wrong[0]!r} {counts[wrong[0]]} times, and it is "
                f"{'one' if wrong[0] in ids else 'none'} of the prompts'; expected each id at most once"
            )
        self.done.update(counts)

    def _read_journal(self, ids: set[str], retry_errors: bool) -> list[Row]:
        """Its rows that are in no part, and nothing else in it: its last line may be half a line."""
        path = self._directory / _JOURNAL
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        rows: dict[str, Row] = {}
        for line in lines:
            try:
                row = _decode(line)
            except (ValueError, KeyError, TypeError):
                break
            if row.id in ids and row.id not in self.done and not (retry_errors and row.error is not None):
                rows.setdefault(row.id, row)
        with _replacing(path) as temporary:
            temporary.write_bytes(b"".join(map(_encode, rows.values())))
        return list(rows.values())

    def _take(self, row: Row) -> None:
        self.done.add(row.id)
        self.num_errors += row.error is not None
        self._rows.append(row)
        if len(self._rows) >= self._part_rows:
            self.flush()

    def _write(self, name: str, table: pa.Table) -> None:
        with _replacing(self._directory / name) as temporary:
            pq.write_table(table, temporary)


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


def _encode(row: Row) -> bytes:
    values = asdict(row)
    if row.embedding is not None:
        values["embedding"] = base64.b64encode(row.embedding.astype("<f4").tobytes()).decode()
    return json.dumps(values).encode() + b"\n"


def _decode(line: bytes) -> Row:
    values = json.loads(line)
    if values["embedding"] is not None:
        values["embedding"] = np.frombuffer(base64.b64decode(values["embedding"]), dtype="<f4").astype(np.float32)
    if values["reply_token_ids"] is not None:
        values["reply_token_ids"] = tuple(values["reply_token_ids"])
    return Row(**values)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
