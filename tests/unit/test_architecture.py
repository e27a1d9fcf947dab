"""Imports point downward only, one package imports Triton, and the models' files are thin."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "backend_src" / "vlora"
REPOSITORY = Path(__file__).parents[2] / "model_repository"
MODELS = sorted(REPOSITORY.glob("*/1/model.py"))

LAYERS = [
    {
        "atmm",
        "backends",
        "kernels",
        "metrics",
        "errors",
        "ids",
        "native",
        "paths",
        "strict_json",
        "value_readers",
    },
    {"memory", "request", "sampling", "config", "cores", "openmp_env"},
    {"lora"},
    {"model"},
    {"engine", "generation", "vision", "capacity", "capacity_cli"},
    {"launcher"},
    {"serving"},
    {"cli"},
]
"""Lowest first; a module may import from its own layer and those below."""

LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def imports_of(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


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


def test_only_serving_triton_imports_triton() -> None:
    users = {
        path.relative_to(ROOT).as_posix()
        for path in ROOT.rglob("*.py")
        if any("triton_python_backend_utils" in name for name in imports_of(path))
    }
    assert users
    assert all(name.startswith("serving/triton/") for name in users), users


def test_the_scheduler_is_pure() -> None:
    for module in ("engine/scheduler", "engine/plan", "engine/sequence", "model/chunk"):
        names = imports_of(ROOT / f"{module}.py")
        assert not {"torch", "time", "numpy"} & names, module


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.parent.parent.name)
def test_model_files_are_thin_and_reach_triton_through_our_package(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 120
    assert "triton_python_backend_utils" not in text
