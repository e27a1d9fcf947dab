"""Tests of the page about GPU kernels: what only a GPU can show, and the calculated costs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tools.gpu import step_costs

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "backend_src" / "vlora"
PAGE = ROOT / "docs" / "kernels" / "gpu.md"

MODULES = ("torch.cuda", "torch.version.cuda", "torch.backends.cudnn", "torch._C._cuda")
"""Beginnings of the names in torch that are about GPUs."""

ERRORS = {"torch.OutOfMemoryError", "torch.AcceleratorError"}
"""Errors that torch raises only for a GPU."""

METHODS, OPTIONS = {"record_stream"}, {"pin_memory", "non_blocking"}
"""Methods of tensors, and keyword arguments, that only matter on a GPU."""

NOT_ON_THE_PAGE = ("generation",)
"""Folders that the page does not describe, because they train adapters."""


def _functions(body: list[ast.stmt]) -> Iterator[ast.FunctionDef]:
    """Yield the functions and methods of a module, without those inside a function."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from _functions(node.body)
        elif isinstance(node, ast.FunctionDef):
            yield node


def _needs_gpu(function: ast.FunctionDef) -> bool:
    """Return whether the body of a function uses a part of torch that needs a GPU."""
    for statement in function.body:
        for node in ast.walk(statement):
            if isinstance(node, ast.Attribute):
                name = ast.unparse(node)
                if name.startswith(MODULES) or name in ERRORS or node.attr in METHODS:
                    return True
            elif isinstance(node, ast.keyword) and node.arg in OPTIONS:
                return True
    return False


def _listed(heading: str) -> list[list[str]]:
    """Return the cells of the first table under a heading of the page, without its first lines."""
    _, _, section = PAGE.read_text().partition(f"# {heading}\n")
    table = re.search(r"(?:^\|.*\n)+", section, flags=re.MULTILINE)
    assert table is not None, heading
    return [
        [cell.strip() for cell in line.strip("|\n").split("|")]
        for line in table[0].splitlines()[2:]
    ]


def test_the_page_lists_all_functions_whose_effect_only_a_gpu_can_show() -> None:
    expected = {
        (path.relative_to(SOURCES).as_posix(), function.name)
        for path in SOURCES.rglob("*.py")
        if path.relative_to(SOURCES).parts[0] not in NOT_ON_THE_PAGE
        for function in _functions(ast.parse(path.read_text()).body)
        if _needs_gpu(function)
    }
    listed, file = [], ""
    for cell, functions, _ in _listed("What only a GPU can show"):
        file = cell.strip("`") or file
        listed += [(file, name) for name in re.findall(r"`(\w+)`", functions)]
    assert sorted(listed) == sorted(expected)


def test_the_page_has_the_costs_that_the_tool_prints() -> None:
    """The columns of the page are some of those of the tool, and its rows some of the tool's."""
    printed = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in step_costs.table(step_costs.Model()).splitlines()[2:]
    ]
    of_page = [
        [rows, context, adapters, needed, seconds, launches.split()[0], ratio]
        for rows, context, adapters, needed, _, _, seconds, launches, _, ratio in printed
    ]
    stated = _listed("A decoding step on paper")
    assert {row[0] for row in stated} == {"1", "16", "64"}
    for row in stated:
        assert row in of_page
    layers = [launches for *_, launches, _, _ in printed]
    assert {re.sub(r".*\((\d+)\)", r"\1", launches) for launches in layers} == {"8", "12"}
