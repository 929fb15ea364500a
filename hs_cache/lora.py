"""What a LoRA adapter is called in a key space: its name, and its weights."""

import hashlib
import os
import re
from pathlib import Path

from hs_cache.errors import InvalidInputError

_CONFIG = "adapter_config.json"
_WEIGHTS = (".safetensors", ".bin", ".pt")
_READ_BYTES = 1 << 20
_IDENTITY = re.compile(r"(.*)@sha256:[0-9a-f]{64}", re.DOTALL)


def lora_identity(name: str, path: str | os.PathLike[str]) -> str:
    """A ``lora_id`` for `hs_cache.connect` that differs when an adapter's weights do, although its name is the same.

    Blocks for reading all of the adapter's files: call it once, when the adapter is loaded.

    Args:
        name: the adapter's name.
        path: its directory, as PEFT and vLLM have it: ``adapter_config.json``, and weights in ``*.safetensors``,
            ``*.bin`` or ``*.pt``. Other files in it, and those in directories below, don't count.

    Returns:
        ``<name>@sha256:<digest>``, the digest being over these files' names and contents. Where the files lie plays no
        part, so every node gets the same.

    Raises:
        InvalidInputError: `path` is no directory with weights in it, or a file in it can't be read.
    """
    if not isinstance(name, str):
        raise InvalidInputError(f"name: got {type(name).__name__}, expected str")
    if not isinstance(path, str | os.PathLike):
        raise InvalidInputError(f"path: got {type(path).__name__}, expected the path of a directory")
    try:
        files = sorted(
            (file for file in Path(path).iterdir() if file.name == _CONFIG or file.suffix in _WEIGHTS),
            key=lambda file: os.fsencode(file.name),
        )
        if not any(file.suffix in _WEIGHTS for file in files):
            wanted = ", ".join(f"*{suffix}" for suffix in _WEIGHTS)
            raise InvalidInputError(f"path: got {str(path)!r}, expected a directory with one of {wanted} in it")
        digest = hashlib.sha256()
        for file in files:
            # Of fixed length, so that the end of one file can't pass for the beginning of another.
            digest.update(hashlib.sha256(os.fsencode(file.name)).digest() + _digest(file))
    except (OSError, ValueError) as error:
        if isinstance(error, InvalidInputError):
            raise
        raise InvalidInputError(f"path: got {str(path)!r}, expected a directory that can be read: {error}") from error
    return f"{name}@sha256:{digest.hexdigest()}"


def adapter_name(lora_id: str) -> str:
    """The adapter's name in a ``lora_id``, which may be a `lora_identity`: what an engine knows it by."""
    identity = _IDENTITY.fullmatch(lora_id)
    return identity[1] if identity else lora_id


def _digest(file: Path) -> bytes:
    digest = hashlib.sha256()
    with file.open("rb") as content:
        while block := content.read(_READ_BYTES):
            digest.update(block)
    return digest.digest()
