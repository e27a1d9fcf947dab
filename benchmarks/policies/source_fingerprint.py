"""What a row of `vlora bench policies` was measured with: another one is no part of its file."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.baseline_policies import dlora, merge_only
from benchmarks.policies.own_operators import RULE_OF
from vlora.engine import calibration, corrections, cost, scheduler
from vlora.engine.policies import credit, predictive, unmerge_only

EVERYONES = (scheduler, cost, corrections, calibration)
OWN_MODULE = {
    "predictive": predictive,
    "credit": credit,
    "paper": credit,
    "unmerge_only": unmerge_only,
    "merge_only": merge_only,
    "dlora": dlora,
}


@cache
def source_fingerprint(name: str) -> str:
    """Of the modules that decide what a policy does and what is predicted; not of the model and its
    kernels, which are as fast for all."""
    modules = (*EVERYONES, OWN_MODULE[RULE_OF.get(name, name)])
    sources = b"".join(Path(str(module.__file__)).read_bytes() for module in modules)
    return hashlib.sha256(sources).hexdigest()[:12]


def current(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those that the present code would measure again just so; what has no policy is among them."""
    return [
        row
        for row in rows
        if "policy" not in row or row.get("code") == source_fingerprint(row["policy"])
    ]
