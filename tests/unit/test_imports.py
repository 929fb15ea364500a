"""The import graph, read from the source: dependencies point down one list; heavy imports stay where they belong."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import hs_cache

ROOT = Path(__file__).parents[2]

# A module may import those before it, and no others of ours.
ORDER = [
    "errors",
    "shown",
    "installation",
    "config",
    "keys",
    "lora",
    "lmcache_names",
    "vllm_names",
    "kv_names",
    "messages",
    "wire",
    "pool_file",
    "machine",
    "devices",
    "rows",
    "planning",
    "stitching",
    "extents",
    "pinning",
    "shared_pool",
    "kv_log",
    "kv_presence",
    "kv_reports",
    "kv_link",
    "kv_side",
    "vllm_wire",
    "vllm_blocks",
    "vllm_stream",
    "eviction",
    "chunks",
    "placement",
    "store",
    "revisions",
    "directory",
    "publishing",
    "server",
    "leases",
    "results",
    "html",
    "tables",
    "effects",
    "background",
    "troubles",
    "control",
    "attachment",
    "retrieval",
    "gathering",
    "connection",
    "reading",
    "session",
    "parcels",
    "router",
    "payloads",
    "refs",
    "writer",
    "launch",
    "weights",
    "client",
    "metrics",
    "doctor_look",
    "doctor_facts",
    "doctor_software",
    "doctor_service",
    "doctor_paths",
    "doctor_checks",
    "doctor_probe",
    "doctor_run",
    "doctor_report",
    "cli",
]
MAY_IMPORT_RAY = {
    "router",
    "payloads",
    "refs",
    "writer",
    "launch",
    "weights",
    "client",
    "metrics",
    "doctor_look",
    "doctor_probe",
    "doctor_run",
    "cli",
}
WITHOUT_TORCH = [
    "errors",
    "shown",
    "html",
    "installation",
    "config",
    "keys",
    "lmcache_names",
    "kv_names",
    "messages",
    "machine",
    "extents",
    "shared_pool",
    "vllm_names",
    "kv_presence",
    "kv_reports",
    "vllm_wire",
    "vllm_blocks",
    "vllm_stream",
    "chunks",
    "placement",
    "revisions",
    "lora",
]
ACTORS_WITHOUT_TORCH = [
    "kv_actor",
    "controller",
    "hidden_state_actor",
    "pair",
    "deploy",
    "commands",
    "__main__",
]
"""All but a process that runs a `HiddenStateActor` does without torch, and that loads it by itself."""


def source_files() -> list[Path]:
    return [path for package in ("hs_cache", "actors") for path in sorted((ROOT / package).rglob("*.py"))]


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def has_module(name: str) -> bool:
    return ROOT.joinpath(*name.split(".")).with_suffix(".py").exists()


def imports(tree: ast.Module, module: str) -> Iterator[tuple[str, bool, bool]]:
    """(imported name, whether in a function, whether for type checkers only) for every import in the file."""

    def walk(node: ast.AST, in_function: bool, typing_only: bool) -> Iterator[tuple[str, bool, bool]]:
        if isinstance(node, ast.Import):
            yield from ((alias.name, in_function, typing_only) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = module.split(".")[: -node.level] if node.level else []
            base = ".".join([*parts, node.module or ""]).strip(".")
            # `from hs_cache import keys` imports a module, `from hs_cache.keys import KeySpace` a name.
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield (full if has_module(full) else base), in_function, typing_only
        in_function |= isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for field, value in ast.iter_fields(node):
            guarded = typing_only or (isinstance(node, ast.If) and field == "body" and _is_type_checking(node.test))
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from walk(child, in_function, guarded)

    yield from walk(tree, False, False)


def _is_type_checking(test: ast.expr) -> bool:
    return ast.unparse(test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def may_import(module: str, imported: str) -> bool:
    package, _, name = module.partition(".")
    imported_package, _, imported_name = imported.partition(".")
    if package == "actors":
        return True
    if imported_package == "actors":
        return False
    if name == "__init__":
        return True
    if name.startswith("integrations."):
        allowed = ORDER[: ORDER.index("client") + 1]
        return imported_name in allowed or imported_name.startswith("integrations.")
    return imported_name in ORDER[: ORDER.index(name)]


def complaints(module: str, source: str) -> list[str]:
    """What is wrong with the imports of `module` ("hs_cache.store", "hs_cache.__init__", "actors.deploy")."""
    package, _, name = module.partition(".")
    is_ours = package == "hs_cache"
    is_integration = is_ours and name.startswith("integrations.")
    if is_ours and not is_integration and name not in (*ORDER, "__init__", "integrations"):
        return [f"{module} is not in the order of modules"]
    found = []
    tree = ast.parse(source)
    for imported, in_function, typing_only in imports(tree, module):
        top = imported.split(".")[0]
        if top in ("hs_cache", "actors"):
            if in_function and module != "hs_cache.__init__":
                found.append(f"{module} imports {imported} inside a function")
            if not may_import(module, imported):
                found.append(f"{module} imports {imported}, which is not below it")
        if top == "ray" and is_ours and not is_integration and name not in MAY_IMPORT_RAY:
            found.append(f"{module} imports {imported}")
        if top == "torch" and is_ours and name in (*WITHOUT_TORCH, "__init__") and not (in_function or typing_only):
            found.append(f"{module} imports {imported} at module level")
    if module != "hs_cache.config":
        found += [f"{module} uses {use}" for use in environment_uses(tree)]
    return found


def environment_uses(tree: ast.Module) -> list[str]:
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    uses = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in names and ast.unparse(node.value) == "os":
            uses.append(ast.unparse(node))
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            uses += [f"os.{alias.name}" for alias in node.names if alias.name in names]
    return uses


@pytest.mark.parametrize("path", source_files(), ids=dotted)
def test_imports_point_down(path: Path) -> None:
    assert complaints(dotted(path), path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("module", "source", "complaint"),
    [
        ("hs_cache.keys", "from hs_cache.store import HiddenStateStore", "not below it"),
        ("hs_cache.keys", "from hs_cache import store", "not below it"),
        ("hs_cache.keys", "from .store import HiddenStateStore", "not below it"),
        ("hs_cache.keys", "import hs_cache", "not below it"),
        ("hs_cache.keys", "from hs_cache.keys import KeySpace", "not below it"),
        ("hs_cache.keys", "if TYPE_CHECKING:\n    from hs_cache.store import X", "not below it"),
        ("hs_cache.client", "import actors.deploy", "not below it"),
        ("hs_cache.client", "from actors import deploy", "not below it"),
        ("hs_cache.client", "from hs_cache.integrations.serve import X", "not below it"),
        ("hs_cache.__init__", "from actors.deploy import start", "not below it"),
        ("hs_cache.integrations.serve", "from hs_cache.cli import main", "not below it"),
        ("hs_cache.store", "def f():\n    from hs_cache.keys import KeySpace", "inside a function"),
        ("actors.deploy", "async def f():\n    import hs_cache.keys", "inside a function"),
        ("hs_cache.store", "import ray", "imports ray"),
        ("hs_cache.store", "def f():\n    from ray.util import metrics", "imports ray.util"),
        ("hs_cache.keys", "import torch", "at module level"),
        ("hs_cache.keys", "try:\n    import torch\nexcept ImportError:\n    pass", "at module level"),
        ("hs_cache.__init__", "from torch import Tensor", "at module level"),
        ("hs_cache.helpers", "", "not in the order"),
        ("hs_cache.store", "import os\nx = os.environ['A']", "uses os.environ"),
        ("actors.deploy", "import os\nx = os.getenv('A')", "uses os.getenv"),
        ("actors.deploy", "from os import environ", "uses os.environ"),
    ],
)
def test_the_checks_find_what_they_are_for(module: str, source: str, complaint: str) -> None:
    assert complaint in "; ".join(complaints(module, source))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("hs_cache.store", "import torch\nfrom hs_cache.keys import KeySpace\nfrom hs_cache import extents, errors"),
        ("hs_cache.keys", "def f():\n    import torch"),
        ("hs_cache.keys", "if TYPE_CHECKING:\n    import torch"),
        ("hs_cache.client", "import ray\nfrom hs_cache.router import Router"),
        ("hs_cache.__init__", "def __getattr__(name):\n    from hs_cache.client import connect"),
        ("hs_cache.integrations.serve", "import ray, vllm\nfrom hs_cache.client import HiddenStateCache"),
        ("actors.deploy", "import ray, torch, hs_cache\nfrom actors.kv_actor import KVActor"),
        ("hs_cache.config", "import os\nos.environ"),
    ],
)
def test_the_checks_leave_alone_what_is_allowed(module: str, source: str) -> None:
    assert complaints(module, source) == []


def loaded_after(modules: list[str], *, blocked: tuple[str, ...] = ()) -> set[str]:
    """Top-level packages a fresh interpreter holds after importing `modules`, while `blocked` cannot be imported."""
    code = (
        f"import sys\nsys.modules.update(dict.fromkeys({blocked!r}))\n"
        + "".join(f"import {module}\n" for module in modules)
        + "print(*{name.split('.')[0] for name, module in sys.modules.items() if module is not None})"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_light_modules_load_no_torch_even_indirectly() -> None:
    modules = [f"hs_cache.{name}" for name in WITHOUT_TORCH if has_module(f"hs_cache.{name}")]
    assert not {"torch", "ray"} & loaded_after(["hs_cache", *modules])


def test_a_kv_actor_loads_no_torch_and_no_lmcache_for_its_source() -> None:
    module = "hs_cache.integrations.lmcache_source"
    assert not {"torch", "ray", "lmcache"} & loaded_after([module], blocked=("lmcache",))


def test_ray_free_modules_load_where_ray_is_not_installed() -> None:
    modules = [f"hs_cache.{name}" for name in ORDER if name not in MAY_IMPORT_RAY and has_module(f"hs_cache.{name}")]
    assert "ray" not in loaded_after(["hs_cache", *modules], blocked=("ray",))


def test_actors_load_no_torch_when_they_are_imported() -> None:
    modules = [f"actors.{name}" for name in ACTORS_WITHOUT_TORCH if has_module(f"actors.{name}")]
    assert "torch" not in loaded_after(["ray", *modules])


def test_all_is_sorted_and_equals_the_public_names() -> None:
    assert hs_cache.__all__ == sorted(set(hs_cache.__all__))
    for name in hs_cache.__all__:
        assert getattr(hs_cache, name) is not None
    tree = ast.parse((ROOT / "hs_cache" / "__init__.py").read_text(encoding="utf-8"))
    imported = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hs_cache")
        for alias in node.names
    }
    defined = {name for name, value in vars(hs_cache).items() if not isinstance(value, ModuleType)}
    public = {name for name in imported | defined if not name.startswith("_")}
    assert public - {"annotations", "TYPE_CHECKING", "Any"} == set(hs_cache.__all__) - {"__version__"}
