"""Fingerprints of the code that rows were measured with.

A run that continues an earlier one keeps only the rows that the present code measured.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.baseline_policies import dlora, merge_only
from benchmarks.policies.published_operators import POLICY_OF_SYSTEM
from vlora.engine import calibration, cost, scheduler
from vlora.engine.policies import credit, paper, predictive, unmerge_only

COMMON_MODULES = (scheduler, cost, calibration)
"""Modules that every policy depends on."""
POLICY_MODULES = {
    "predictive": predictive,
    "credit": credit,
    "paper": paper,
    "unmerge_only": unmerge_only,
    "merge_only": merge_only,
    "dlora": dlora,
}


@cache
def source_fingerprint(name: str) -> str:
    """Return a hash of the code on which the choices and predictions of the policy `name` depend.

    The code of the model and its kernels is left out: all policies share it.
    """
    modules = (*COMMON_MODULES, POLICY_MODULES[POLICY_OF_SYSTEM.get(name, name)])
    sources = (Path(str(module.__file__)).read_text() for module in modules)
    return code_fingerprint("\n".join(map(canonical_code, sources)))


def canonical_code(source: str) -> str:
    """Return a form of the code that does not depend on comments, docstrings and formatting."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [  # type: ignore[attr-defined]
                statement for statement in body if not _is_string(statement)
            ]
    return ast.dump(tree)


def code_fingerprint(code: str) -> str:
    """Return the first 12 hexadecimal digits of the SHA-256 of `code`."""
    return hashlib.sha256(code.encode()).hexdigest()[:12]


def current(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return those rows that were measured with the present code, or that have no policy."""
    return [
        row
        for row in rows
        if "policy" not in row or row.get("code") == source_fingerprint(row["policy"])
    ]


def _is_string(statement: ast.stmt) -> bool:
    """Return whether a statement is a docstring or another string without effect."""
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )
