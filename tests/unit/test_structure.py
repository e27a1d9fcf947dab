"""Rules about the source itself."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "backend_src" / "vlora"
MODELS = sorted((ROOT / "model_repository").glob("*/1/model.py"))

LAYERS = (
    {"cli"},
    {"serving", "bench"},
    {"engine", "generation", "vision"},
    {"model"},
    {"lora"},
    {"memory", "request", "config", "sampling", "premerge", "capacity"},
    {"atmm", "metrics", "errors"},
)
"""Top first: what stands in one imports from its own and from lower ones only."""


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def layer(part: str) -> int:
    return next(index for index, parts in enumerate(LAYERS) if part in parts)


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE))
)
def test_imports_point_downward_only(path: Path) -> None:
    part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if part == "__init__":
        return
    for name in imported(path):
        if name.startswith("vlora."):
            assert layer(name.split(".")[1]) >= layer(part), f"{path} imports {name}"


def test_only_the_glue_knows_triton() -> None:
    users = {
        path.name
        for folder in (PACKAGE, ROOT / "model_repository")
        for path in folder.rglob("*.py")
        if "triton_python_backend_utils" in set(imported(path))
    }
    assert users == {"glue.py"}


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.parent.parent.name)
def test_model_files_stay_thin(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 120


def test_every_model_has_a_config_of_its_own_name() -> None:
    configs = list((ROOT / "model_repository").glob("*/config.pbtxt"))
    assert len(configs) == 6
    for config in configs:
        assert f'name: "{config.parent.name}"' in config.read_text()
