"""Tests of the architecture: imports have levels and no circles, and one package imports Triton."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

TOP = Path(__file__).parents[2]
ROOT = TOP / "backend_src" / "vlora"
REPOSITORY = TOP / "model_repository"
MODELS = sorted(REPOSITORY.glob("*/1/model.py"))

LAYERS = [
    {
        "atomic_file",
        "base64_text",
        "draining",
        "errors",
        "file_names",
        "fork_server",
        "http_connection",
        "ids",
        "interpreters",
        "metrics",
        "native",
        "openmp_env",
        "paths",
        "server_run",
        "static_pages",
        "strict_json",
        "strict_yaml",
        "tasks",
    },
    {"config", "cores", "live_requests", "net", "request", "sampling", "structured"},
    {"atmm", "backends", "device", "kernels"},
    {"memory", "weights"},
    {"adapters"},
    {"model"},
    {"engine", "vision", "offline"},
    {"gateway", "generation", "launcher", "load", "serving", "watch"},
    {"cli"},
]
"""Lowest first; a module may import from its own layer and those below."""

WINGS = ["clients", "benchmarks", "tools", "tests"]
"""Folders above the package's layers, lowest first."""

PROGRAMS = LAYERS[-2]
"""Rooms that run in processes of their own. They share modules of lower layers only."""

CPP_SUFFIXES = {".h", ".cpp", ".cu", ".cuh"}
CPP_COLUMNS = 100
"""Maximum length of a line of C++. clang-format breaks longer lines, except for some text."""


def imports_of(path: Path) -> set[str]:
    """Return the modules that a file imports anywhere."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


def module_graph() -> dict[str, set[str]]:
    """Return the modules of the tree that each module imports, even for types or in a function."""
    paths = [(top, path) for top in ("backend_src", *WINGS) for path in (TOP / top).rglob("*.py")]
    parsed = {}
    for top, path in paths:
        parts = path.relative_to(TOP / top if top == "backend_src" else TOP).with_suffix("").parts
        parsed[".".join(parts).removesuffix(".__init__")] = ast.parse(path.read_text())
    graph = {}
    for name, tree in parsed.items():
        others: set[str] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                others |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                members = {f"{node.module}.{alias.name}" for alias in node.names}
                others |= (members & parsed.keys()) or {node.module}
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
                others |= {str(arg.value) for arg in node.args if isinstance(arg, ast.Constant)}
        graph[name] = (others & parsed.keys()) - {name}
    return graph


def upward_imports(graph: dict[str, set[str]]) -> list[str]:
    """Return the imports from a lower layer or wing to a higher one."""
    ranks = [*({f"vlora.{name}" for name in layer} for layer in LAYERS), *({w} for w in WINGS)]
    level = {name: number for number, names in enumerate(ranks) for name in names}
    part = {n: ".".join(n.split(".")[: 2 if n.startswith("vlora.") else 1]) for n in graph}
    # vlora/__init__ has no layer: it prepares the process, and every module imports it.
    edges = [(a, b) for a, others in graph.items() for b in others if "vlora" not in (a, b)]
    return sorted(f"{a} imports {b}" for a, b in edges if level[part[a]] < level[part[b]])


def circles(graph: dict[str, set[str]]) -> list[str]:
    """Return the groups of modules that import each other, directly or indirectly."""
    reach = {module: set(others) for module, others in graph.items()}
    for middle in graph:
        for others in reach.values():
            others |= reach[middle] if middle in others else set()
    groups = {tuple(sorted(n for n in reach[m] if m in reach[n])) for m in graph if m in reach[m]}
    return sorted(" - ".join(group) for group in groups)


def test_imports_point_downward_and_form_no_circle() -> None:
    graph = module_graph()
    assert "vlora.engine.scheduler" in graph["vlora.engine.parts"]
    assert upward_imports(graph) == []
    assert circles(graph) == []


def test_no_program_imports_another() -> None:
    leaning = [
        f"{path.relative_to(ROOT)} imports {name}"
        for program in sorted(PROGRAMS)
        for path in (ROOT / program).rglob("*.py")
        for name in imports_of(path)
        if name.split(".")[0] == "vlora" and set(name.split(".")[1:2]) & PROGRAMS - {program}
    ]
    assert leaning == []


def test_an_import_upward_and_a_circle_are_found() -> None:
    graph = {"vlora.ids": {"vlora.config"}, "vlora.config": {"vlora.ids"}, "tools.a": {"vlora.ids"}}
    assert upward_imports(graph) == ["vlora.ids imports vlora.config"]
    assert circles(graph) == ["vlora.config - vlora.ids"]


def test_no_line_of_cpp_is_longer_than_the_limit() -> None:
    sources = [path for path in (TOP / "csrc").rglob("*") if path.suffix in CPP_SUFFIXES]
    assert sources
    lines = [
        f"{path.relative_to(TOP)}:{number}"
        for path in sources
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) > CPP_COLUMNS
    ]
    assert lines == []


def test_only_serving_triton_imports_triton() -> None:
    users = {
        path.relative_to(ROOT).as_posix()
        for path in ROOT.rglob("*.py")
        if any("triton_python_backend_utils" in name for name in imports_of(path))
    }
    assert users
    assert all(name.startswith("serving/triton/") for name in users), users


def test_no_checkpoint_is_fetched_or_runs_code() -> None:
    calls = [
        (path.name, {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords})
        for path in ROOT.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".from_pretrained")
    ]
    assert calls
    for name, given in calls:
        safe = {"local_files_only": "True", "trust_remote_code": "False"}
        assert safe.items() <= given.items(), (name, given)


def test_no_simple_queue_is_read_with_a_timeout() -> None:
    """A read with a timeout may wait forever in CPython 3.11, unless the queue is a `queue.Queue`.

    If the timeout ends between two tries to take the queue's lock, the time left is negative, and
    the second try waits without a limit. With short timeouts, one call of some thousands hangs.
    """
    folders = ("backend_src", "benchmarks", "clients", "model_repository", "tests", "tools")
    readers = {
        path.relative_to(TOP).as_posix()
        for folder in folders
        for path in (TOP / folder).rglob("*.py")
        if path != Path(__file__) and "SimpleQueue" in (text := path.read_text())
        if any(map(_has_timeout, ast.walk(ast.parse(text))))
    }
    assert readers == set()


def _has_timeout(node: ast.AST) -> bool:
    """Return whether a node is a call `X.get(timeout=…)` or `X.get(True, …)`."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return False
    is_positional = len(node.args) == 2 and isinstance(node.args[0], ast.Constant)
    named = any(keyword.arg == "timeout" for keyword in node.keywords)
    return node.func.attr == "get" and (named or (is_positional and node.args[0].value is True))


def test_the_scheduler_is_pure() -> None:
    for module in ("scheduler", "plan", "sequence"):
        names = imports_of(ROOT / "engine" / f"{module}.py")
        assert not {"torch", "time", "numpy"} & names, module


@pytest.mark.parametrize(
    "module",
    ["engine.scheduler", "structured.worker", "vision.decode_worker", "serving.vision_encoder"],
)
def test_importing_the_scheduler_or_a_process_of_many_does_not_load_torch(module: str) -> None:
    code = f"import sys, vlora.{module}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.parent.parent.name)
def test_model_files_are_thin_and_reach_triton_through_our_package(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 120
    assert "triton_python_backend_utils" not in text


def test_no_test_module_imports_another_one() -> None:
    """Shared helpers are in `tests/support`, and programs in `tests/programs`."""
    importers = [
        f"{path.relative_to(TOP)} imports {name}"
        for path in (TOP / "tests").rglob("*.py")
        for name in imports_of(path)
        if name.startswith("tests.") and not name.startswith(("tests.support", "tests.programs"))
    ]
    assert importers == []
