"""Pythons that lack something, and raylets that run in them."""

import os
import shutil
import signal
import subprocess
import sysconfig
import venv
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.cluster.nodes import alive_nodes
from tests.processes import wait_until


def bare_python(directory: Path, *without: str) -> str:
    """A Python that has what this one has but for this package, and for packages whose names begin with one of
    `without`; ``""`` where it can't be made."""
    venv.create(directory, with_pip=False, symlinks=True)
    (own,) = directory.glob("lib/python*/site-packages")
    packages = Path(sysconfig.get_path("purelib"))
    if without:
        linked = directory / "linked"
        linked.mkdir()
        for entry in packages.iterdir():
            if not entry.name.startswith(without):
                (linked / entry.name).symlink_to(entry)
        packages = linked
    # A directory that is named in a .pth file is not searched for more of them, so an editable install isn't found.
    (own / "packages.pth").write_text(f"{packages}\n")
    python = str(directory / "bin" / "python")
    line = [python, "-c", "import ray, hs_cache"]
    found = subprocess.run(line, cwd=directory, env=environ_of_others(), capture_output=True, text=True, check=False)
    return python if "No module named 'hs_cache'" in found.stderr else ""


def environ_of_others(**variables: str) -> dict[str, str]:
    """This process's environment without what would lead another Python to this package."""
    return {**{name: value for name, value in os.environ.items() if name != "PYTHONPATH"}, **variables}


@contextmanager
def raylet(line: Sequence[str], address: str, *options: str, environ: Mapping[str, str] | None = None) -> Iterator[str]:
    """A node that joins a cluster of which this process is a driver, started by `line`, which runs Python; its id.

    Everything of it is ended by its pid at the end, and the cluster is then as it was before.
    """
    before = alive_nodes()
    head = ["-m", "ray.scripts.scripts", "start", "--address", address, "--block", "--num-cpus=1"]
    process = subprocess.Popen(
        [*line, *head, "--object-store-memory=80000000", "--disable-usage-stats", *options],
        env={**(environ_of_others() if environ is None else environ)},
        cwd="/",
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield wait_until(lambda: "".join(set(alive_nodes()) - set(before)), "the node has joined", timeout_s=60)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        wait_until(lambda: alive_nodes() == before, "the node is gone", timeout_s=60)


def remove(directory: Path) -> None:
    """Remove a Python that `bare_python` has made."""
    shutil.rmtree(directory, ignore_errors=True)
