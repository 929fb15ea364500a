"""The notebook: as it is committed, and as it runs, on a Ray of its own and on a cluster of several nodes."""

import ast
import base64
import json
import os
import re
import signal
import struct
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from actors import deploy
from hs_cache.router import is_running
from tests.cluster.nodes import Nodes
from tests.processes import MARK, ROOT, marked_processes, wait_until

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
pytest.importorskip("matplotlib")

pytestmark = pytest.mark.long

NOTEBOOK = ROOT / "examples" / "notebook.ipynb"
CELL_TIMEOUT_S = 240
busy = pytest.mark.timeout(600)
"""Ray, its actors and torch start anew, which takes minutes where others want the machine too."""


def test_the_notebook_is_committed_without_what_running_it_adds() -> None:
    source = NOTEBOOK.read_text(encoding="utf-8")
    notebook = json.loads(source)
    nbformat.validate(notebook)
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5), "cells have ids"
    assert source == json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n", "as nbformat writes it"
    assert notebook["metadata"] == {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids)
    for cell in notebook["cells"]:
        assert re.fullmatch(r"[a-z]+(-[a-z]+)*", cell["id"]), "a name, which stays when the notebook is saved again"
        assert cell["metadata"] == {}
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None)
    assert not re.search(r"/(home|Users|root|tmp|work|mnt)/|[A-Z]:\\\\", source), "paths of somebody's machine"


def test_the_notebook_needs_no_more_than_the_extra_installs() -> None:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    imported = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(str(node.module).split(".")[0])
    assert imported - sys.stdlib_module_names == {"hs_cache", "ray", "torch"}


class Executed:
    """What the cells of the notebook gave, by their ids."""

    def __init__(self, notebook: Any) -> None:
        self._outputs = {cell["id"]: cell["outputs"] for cell in notebook["cells"] if cell["cell_type"] == "code"}

    def streams(self) -> str:
        return "".join(
            output["text"]
            for outputs in self._outputs.values()
            for output in outputs
            if output["output_type"] == "stream"
        )

    def printed(self, cell: str) -> str:
        return "".join(output["text"] for output in self._outputs[cell] if output.get("name") == "stdout")

    def _data(self, cell: str, kind: str) -> str:
        found = [output["data"][kind] for output in self._outputs[cell] if kind in output.get("data", {})]
        assert len(found) == 1, f"cell {cell!r} shows {len(found)} of {kind}"
        return str(found[0])

    def html(self, cell: str) -> str:
        """The text of the table that the cell shows."""
        return " ".join(unescape(re.sub(r"<[^>]*>", " ", self._data(cell, "text/html"))).split())

    def picture(self, cell: str) -> tuple[int, int]:
        """Width and height of the PNG that the cell shows."""
        content = base64.b64decode(self._data(cell, "image/png"))
        assert content[:8] == b"\x89PNG\r\n\x1a\n"
        width, height = struct.unpack(">II", content[16:24])
        return width, height


def execute(directory: Path, environ: Mapping[str, str]) -> Executed:
    """Run all cells in a kernel of this interpreter. It, and all that it started, must have ended by itself; where it
    failed, they are ended here.
    """
    run_id = f"notebook-{os.urandom(6).hex()}"
    try:
        done = _execute(directory, {**environ, MARK: run_id})
        wait_until(lambda: not marked_processes(run_id), "the kernel and what it started have ended", timeout_s=60)
    finally:
        for pid in marked_processes(run_id):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    return done


def _execute(directory: Path, environ: Mapping[str, str]) -> Executed:
    kernel = directory / "kernels" / "python3" / "kernel.json"
    kernel.parent.mkdir(parents=True)
    line = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    kernel.write_text(json.dumps({"argv": line, "display_name": "Python 3", "language": "python"}))
    own = {
        "JUPYTER_PATH": str(directory),
        "JUPYTER_CONFIG_DIR": str(directory / "config"),
        "JUPYTER_DATA_DIR": str(directory / "data"),
        "JUPYTER_RUNTIME_DIR": str(directory / "runtime"),
        "IPYTHONDIR": str(directory / "ipython"),
        "MPLCONFIGDIR": str(directory / "matplotlib"),
        "HS_CACHE_RPC_TIMEOUT_S": "10",  # the machine may be busy
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = nbclient.NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT_S,
        startup_timeout=CELL_TIMEOUT_S,
        kernel_name="python3",
        resources={"metadata": {"path": str(directory)}},
    )
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**own, **environ}.items():
            patch.setenv(name, value)
        client.execute()
    return Executed(notebook)


def check(done: Executed) -> None:
    """What must be shown wherever it runs."""
    assert "640 tokens of the prefix" in done.html("retrieve")
    assert "24 640 256 bfloat16 cpu" in done.html("retrieve")
    assert "stored 10" in done.html("store")
    assert "usable in every layer 384" in done.html("plan")
    assert "tokens served 640 (100%)" in done.html("stats")
    assert "pool 4.0 MiB" in done.html("stats")
    assert "6 of 10 chunks can be had" in done.html("explain")
    assert "384 to 639 4 kv_absent its KV is gone" in done.html("explain")
    assert "Hit: 384 tokens of the prefix" in done.html("short")
    assert "There, KV is gone." in done.html("short")
    assert done.printed("handle") == "2 chunks stored, [128, 256] torch.float32 back\n"
    assert re.match(r"[1-9] of 10 chunks can be had .* ok its .* evicted it made room", done.html("pressure"))
    assert "resident 9" in done.html("full"), "percent"
    assert "Hit: 640 tokens of the prefix" in done.html("again")
    for cell in ("plot-prefix", "plot-pool"):
        width, height = done.picture(cell)
        assert width > 600 and height > 150
    assert "Traceback" not in done.streams()


@busy
def test_the_notebook_runs_on_a_ray_of_its_own(nothing_left_over: None, tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="hs", dir="/tmp", ignore_cleanup_errors=True) as short:
        environ = {"RAY_ADDRESS": "local", "RAY_TMPDIR": short}
        try:
            done = execute(tmp_path / "first", environ)
        except nbclient.exceptions.CellExecutionError as error:
            if "timed out during startup" not in str(error):
                raise
            done = execute(tmp_path / "second", environ)  # Ray gives its processes 30 s, however busy the machine is
    check(done)
    assert done.html("kill") == "Miss: 0 tokens of the prefix Who would know of more can't be reached."
    assert "0 of 10 chunks can be had" in done.html("restart")
    assert "0 to 639 10 never_stored" in done.html("restart")
    assert re.search(r"[0-9a-f]{12} \d+ \d+ 1 4.0 MiB", done.html("history-table")), "one node, restarted once"


@busy
def test_the_notebook_runs_on_a_cluster_of_several_nodes(address: str, nodes: Nodes, tmp_path: Path) -> None:
    try:
        done = execute(tmp_path, {"RAY_ADDRESS": address})
        assert not is_running("notebook"), "its last cell has stopped it"
    finally:
        deploy.stop(service="notebook")
    check(done)
    one, two = sorted(nodes[1:])
    assert done.printed("spread") == f"{one[:12]} 256 tokens\n{two[:12]} 128 tokens\n"
    for node_id, usable in ((nodes.head, 384), (one, 256), (two, 128)):
        assert f"{node_id[:12]} {usable} " in done.html("map-prefix")
    assert re.search(r"Hit: (256|128) tokens of the prefix|Miss: 0 tokens", done.html("kill"))
