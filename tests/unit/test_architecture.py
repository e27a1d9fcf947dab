"""Tests of the architecture: imports have levels and no cycles, and one package imports Triton."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

TOP = Path(__file__).parents[2]
ROOT = TOP / "backend_src" / "vlora"
REPOSITORY = TOP / "model_repository"
MODELS = sorted(REPOSITORY.glob("*/1/model.py"))

LAYERS = [
    {
        "atomic_file",
        "errors",
        "fork_server",
        "ids",
        "metrics",
        "native",
        "openmp_env",
        "paths",
        "strict_json",
    },
    {"config", "cores", "live_requests", "net", "request", "sampling", "structured"},
    {"atmm", "backends", "device", "kernels"},
    {"memory", "weights"},
    {"adapters"},
    {"model"},
    {"engine", "vision", "offline"},
    {"generation", "launcher"},
    {"gateway", "serving"},
    {"cli"},
]
"""Lowest first; a module may import from its own layer and those below."""

LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}

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


def runtime_imports(body: list[ast.stmt]) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield the imports that are executed when the module is imported."""
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.unparse(node.test):
            yield from runtime_imports([*node.body, *node.orelse])
        elif isinstance(node, ast.Try):
            yield from runtime_imports([*node.body, *node.orelse, *node.finalbody])
        elif isinstance(node, ast.ClassDef | ast.With):
            yield from runtime_imports(node.body)


def module_graph() -> dict[str, set[str]]:
    """Return the modules of the package that each module imports at its import."""
    paths = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    graph: dict[str, set[str]] = {}
    for module, path in paths.items():
        names: set[str] = set()
        for node in runtime_imports(ast.parse(path.read_text()).body):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif node.module:
                members = {f"{node.module}.{alias.name}" for alias in node.names}
                names |= (members & paths.keys()) or {node.module}
        graph[module] = names & paths.keys() - {module}
    return graph


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of modules that import each other, directly or indirectly."""

    def reachable(start: str) -> set[str]:
        seen: set[str] = set()
        todo = [start]
        while todo:
            new = graph[todo.pop()] - seen
            seen |= new
            todo += new
        return seen

    reach = {module: reachable(module) for module in graph}
    groups = {
        frozenset(other for other in reach[module] if module in reach[other])
        for module in graph
        if module in reach[module]
    }
    return sorted(sorted(group) for group in groups)


def test_imports_point_downward_only() -> None:
    upward = []
    for path in ROOT.rglob("*.py"):
        here = path.relative_to(ROOT).with_suffix("").parts[0]
        if here == "__init__":
            continue
        for name in imports_of(path):
            if name.startswith("vlora.") and LEVEL[name.split(".")[1]] > LEVEL[here]:
                upward.append(f"{path.relative_to(ROOT)} imports {name}")
    assert upward == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == [["b", "c"]]
    assert circles(module_graph()) == []


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
    for module in ("engine/scheduler", "engine/plan", "engine/sequence", "model/chunk"):
        body = ast.parse((ROOT / f"{module}.py").read_text()).body
        names = {ast.unparse(node).split()[1] for node in runtime_imports(body)}
        assert not {"torch", "time", "numpy"} & names, module


def test_importing_the_scheduler_does_not_load_torch() -> None:
    code = "import sys, vlora.engine.scheduler; print('torch' in sys.modules)"
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
