"""`lora_identity`: the same for the same adapter wherever it lies, another one for other weights."""

import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from hs_cache.errors import InvalidInputError
from hs_cache.lora import adapter_name, lora_identity


def make_adapter(path: Path, **files: bytes) -> Path:
    path.mkdir()
    path.joinpath("adapter_config.json").write_bytes(b'{"r": 8}')
    path.joinpath("adapter_model.safetensors").write_bytes(b"weights" * 300_000)  # more than is read at once
    for name, content in files.items():
        path.joinpath(name.replace("__", ".")).write_bytes(content)
    return path


def test_the_same_adapter_is_the_same_wherever_it_lies(tmp_path: Path) -> None:
    first = make_adapter(tmp_path / "a")
    elsewhere = tmp_path / "b"
    shutil.copytree(first, elsewhere)
    linked = tmp_path / "c"
    linked.mkdir()
    for file in first.iterdir():
        linked.joinpath(file.name).symlink_to(file)  # as a hub's cache has it
    identity = lora_identity("poet", first)
    assert identity == lora_identity("poet", str(elsewhere)) == lora_identity("poet", linked)
    expected = hashlib.sha256()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        for part in (name.encode(), first.joinpath(name).read_bytes()):
            expected.update(hashlib.sha256(part).digest())
    assert identity == f"poet@sha256:{expected.hexdigest()}"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("adapter_model.safetensors", b"weights" * 299_999 + b"weightz"),
        ("adapter_config.json", b'{"r": 9}'),
        ("more.safetensors", b""),
        ("adapter_model.bin", b"x"),
        ("new_embeddings.pt", b"x"),
    ],
)
def test_other_weights_under_the_same_name_are_another_adapter(tmp_path: Path, name: str, content: bytes) -> None:
    adapter = make_adapter(tmp_path / "a")
    before = lora_identity("poet", adapter)
    adapter.joinpath(name).write_bytes(content)
    assert lora_identity("poet", adapter) != before


def test_names_and_ends_of_files_count(tmp_path: Path) -> None:
    identities = {
        lora_identity(name, make_adapter(tmp_path / f"{number}", **files))
        for number, (name, files) in enumerate(
            [
                ("poet", {"a__bin": b"xy", "b__bin": b"z"}),
                ("poet", {"a__bin": b"x", "b__bin": b"yz"}),
                ("poet", {"a__bin": b"xy", "c__bin": b"z"}),
                ("poet", {"a__bin": b"z", "b__bin": b"xy"}),
                ("clerk", {"a__bin": b"xy", "b__bin": b"z"}),
            ]
        )
    }
    assert len(identities) == 5


def test_other_files_do_not_count(tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "a")
    before = lora_identity("poet", adapter)
    adapter.joinpath("README.md").write_text("x")
    adapter.joinpath("checkpoint-5").mkdir()
    adapter.joinpath("checkpoint-5", "adapter_model.safetensors").write_text("x")
    assert lora_identity("poet", adapter) == before


def test_weights_alone_are_enough(tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "a")
    adapter.joinpath("adapter_config.json").unlink()
    assert lora_identity("", adapter).startswith("@sha256:")


@pytest.mark.parametrize(
    ("name", "path", "message"),
    [
        ("poet", "nowhere", r"path: got '.*nowhere', expected a directory that can be read: .*No such file"),
        ("poet", "empty", r"path: got '.*empty', expected a directory with one of \*.safetensors, \*.bin, \*.pt in it"),
        ("poet", "file", r"path: got '.*file', expected a directory that can be read: .*Not a directory"),
        ("poet", "folder", r"path: got '.*folder', expected a directory that can be read: .*Is a directory"),
        ("poet", "nul\0", r"path: got .*, expected a directory that can be read"),
        ("poet", None, r"path: got NoneType, expected the path of a directory"),
        (5, "empty", r"name: got int, expected str"),
    ],
)
def test_what_is_no_adapter_is_refused(tmp_path: Path, name: Any, path: str | None, message: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "adapter_model.bin").mkdir()
    with pytest.raises(InvalidInputError, match=message):
        lora_identity(name, tmp_path / path if path is not None else path)  # type: ignore[arg-type]


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_weights_that_may_not_be_read_are_refused(tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "a")
    adapter.joinpath("adapter_model.safetensors").chmod(0)
    with pytest.raises(InvalidInputError, match="Permission denied"):
        lora_identity("poet", adapter)


@pytest.mark.parametrize("name", ["poet", "", "a@sha256:b", "two\nlines"])
def test_an_engine_knows_the_adapter_by_its_name(tmp_path: Path, name: str) -> None:
    assert adapter_name(lora_identity(name, make_adapter(tmp_path / "a"))) == name
    assert adapter_name(name) == name
