"""What `hs_cache.doctor` runs on every node first: an actor that looks whether this package is there, and which.

It travels by value and imports nothing of ours before it is asked to, so that it also runs where this package is
missing, and can say so.
"""

import hashlib
import importlib
import importlib.metadata
import os
import pathlib
import platform
import time
from typing import Any

import ray


class Look:
    """One node's eyes. Every method returns what pickles without this package."""

    def now(self) -> float:
        """This node's clock."""
        return time.time()

    def look(self) -> dict[str, Any]:
        """Versions, and the digest of each source file; ``missing`` says why the package can't be had."""
        found: dict[str, Any] = {
            "pid": os.getpid(),
            "python": platform.python_version(),
            "platform": f"{platform.system()} {platform.machine()}",
            "ray": ray.__version__,
            "missing": "",
        }
        for name in ("torch", "numpy"):
            try:
                found[name] = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                found[name] = ""
        try:
            package = importlib.import_module("hs_cache")
            found["hs_cache"] = package.__version__
            found["protocol"] = importlib.import_module("hs_cache.messages").PROTOCOL_VERSION
        # Whatever it is: an ImportError, but also what half an installation raises.
        except Exception as error:
            found["missing"] = f"{type(error).__name__}: {error}"
            return found
        home = pathlib.Path(str(package.__file__)).parent
        found["location"] = str(home)
        found["files"] = {
            path.relative_to(home.parent).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()[:16]
            for directory in (home, home.parent / "actors")
            for path in sorted(directory.rglob("*.py"))
        }
        return found
