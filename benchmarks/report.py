"""Terminal tables and JSON files in the form that all benchmarks share."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from benchmarks.benchmark import Bar, Row
from vlora.atomic_file import replace_text


def machine_meta(name: str, quick: bool) -> dict[str, Any]:
    """Return the conditions that figures depend on: commit, machine, versions, load."""
    return {
        "command": f"bench {name}",
        "quick": quick,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": _commit(),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "load_before": round(os.getloadavg()[0], 2),
    }


def write_json(
    path: Path, meta: Mapping[str, Any], rows: Sequence[Row], summary: Mapping[str, Any]
) -> None:
    """Write a run to `path`, one row per line, so that committed figures can be compared by line.

    The file is replaced atomically: an interrupted write leaves the previous file intact.
    """
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    head = json.dumps(meta, indent=1).replace("\n", "\n ")
    tail = json.dumps(summary, indent=1).replace("\n", "\n ")
    path.parent.mkdir(parents=True, exist_ok=True)
    text = f'{{\n "meta": {head},\n "rows": [\n{lines}\n ],\n "summary": {tail}\n}}\n'
    replace_text(path, text)


def figure_table(columns: Sequence[str], title: str | None = None, labels: int = 1) -> Table:
    """Return an empty table whose columns after the first `labels` are right-aligned."""
    table = Table(*columns, title=title)
    for column in table.columns[labels:]:
        column.justify = "right"
    return table


def summary_table(summary: Mapping[str, Any], bars: Mapping[str, Bar], title: str) -> Table:
    """Return a table of the summary's figures, each with its limit and whether it is met."""
    table = Table("key", "value", "bar", "met", title=title)
    for key, value in summary.items():
        bar = bars.get(key)
        met = "" if bar is None or value is None else "yes" if bar.is_met(value) else "[red]no[/]"
        table.add_row(key, "–" if value is None else str(value), str(bar or ""), met)
    return table


def _commit() -> str | None:
    process = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return process.stdout.strip() or None


def _cpu() -> dict[str, str]:
    """Return vendor, family, model and name of the CPU. A virtual machine may hide the name."""
    keys = {"vendor_id", "cpu family", "model", "model name", "cache size"}
    values: dict[str, str] = {}
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return values
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() in keys:
            values.setdefault(key.strip(), value.strip())
    return values
