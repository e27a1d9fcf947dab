"""Tables for people, JSON for programs, a plot for the docs."""

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
from rich.console import Console
from rich.table import Table

from benchmarks.kernels.measurement import Result
from benchmarks.kernels.operators import BASELINES
from benchmarks.switch.merges import ADDMM, ATMM, COPY, IN_PLACE, SwitchResult


def meta(command: str, quick: bool) -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "command": command,
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
    path: Path, described: Mapping[str, Any], rows: Sequence[Any], summary: Mapping[str, Any]
) -> None:
    """One line a row: committed figures are then read, and compared, line by line. Whoever is
    stopped here leaves the file as it was."""
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    head = json.dumps(described, indent=1).replace("\n", "\n ")
    tail = json.dumps(summary, indent=1).replace("\n", "\n ")
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    part.write_text(f'{{\n "meta": {head},\n "rows": [\n{lines}\n ],\n "summary": {tail}\n}}\n')
    part.replace(path)


def kernel_table() -> Table:
    table = Table(
        "cell",
        "thr",
        "ATMM µs",
        "limit",
        *(baseline.name.replace("_", " ") for baseline in BASELINES),
        "fastest",
        "noise",
        title="speed-ups of ATMM (above 1: faster); limit: 1 = at the roofline",
    )
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def kernel_cells(result: Result) -> list[str]:
    ups = [result.speed_up(baseline.name) for baseline in BASELINES]
    fastest = f"{result.against_fastest:.2f} {result.fastest.replace('_', ' ')}"
    if result.slower:
        fastest = f"[red]{fastest}[/]"
    return [
        result.cell.name,
        str(result.threads),
        f"{result.atmm.median * 1e6:.1f}",
        f"{result.roofline:.2f}",
        *("–" if up is None else f"{up:.2f}" for up in ups),
        fastest,
        f"±{result.noise:.0%}",
    ]


def left_out(results: Sequence[Result]) -> dict[str, str]:
    """One line for each operator and reason."""
    found: dict[str, str] = {}
    for result in results:
        for name, reason in result.left_out.items():
            found.setdefault(f"{name}, {result.cell.name}", reason)
    return found


def summary_table(summary: Mapping[str, Any], title: str) -> Table:
    table = Table("key", "value", title=title)
    for key, value in summary.items():
        table.add_row(key, "–" if value is None else str(value))
    return table


def stability_table(rows: Sequence[Mapping[str, Any]], rounds: int) -> Table:
    names = ("atmm", *(baseline.name for baseline in BASELINES))
    table = Table(
        "cell",
        *(name.replace("_", " ") for name in names),
        title=f"coefficient of variation, {rounds} rounds after warm-ups",
    )
    for row in rows:
        found = row["variation"]
        table.add_row(
            row["cell"], *(f"{found[name]:.3f}" if name in found else "–" for name in names)
        )
    return table


def switch_table(results: Sequence[SwitchResult]) -> Table:
    names = (ATMM, IN_PLACE, ADDMM, COPY)
    table = Table(
        "model",
        "rank",
        "type",
        "thr",
        "MB",
        *(f"{name.replace('_', ' ')} ms" for name in names),
        "limit ms",
        "limit/time",
        "addmm/time",
        title="M = W + B·A of all layers in one call",
    )
    for column in table.columns[1:]:
        column.justify = "right"
    for result in results:
        model = result.model
        table.add_row(
            f"{model.name}, {model.layers} layers",
            str(model.rank),
            model.dtype,
            str(result.threads),
            str(model.as_row()["mbytes"]),
            *(
                f"{found.median * 1e3:.2f} ±{found.noise:.0%}"
                if (found := result.timings.get(name))
                else "–"
                for name in names
            ),
            f"{result.limit * 1e3:.2f}",
            f"{result.roofline:.2f}",
            "–" if result.vs_addmm is None else f"{result.vs_addmm:.2f}",
        )
    return table


def plot_speed_ups(results: Sequence[Result], path: Path) -> None:
    """Speed-ups over each baseline, one dot a cell, by regime and type. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = [
        (
            f"{regime}, {'cold' if cold else 'hot'}, {dtype}",
            [
                result
                for result in results
                if (result.cell.dtype, result.cell.regime) == (dtype, regime)
                and (result.cell.cold == cold)
            ],
        )
        for dtype in ("fp32", "bf16")
        for regime, cold in (("decode", False), ("decode", True), ("prefill", False))
    ]
    figure, axes = pyplot.subplots(2, 3, figsize=(12, 7), sharey="row", layout="constrained")
    for axis, (title, chosen) in zip(axes.flat, panels, strict=True):
        for at, baseline in enumerate(BASELINES):
            for threads, colour, shift in ((1, "tab:blue", -0.15), (2, "tab:orange", 0.15)):
                of_count = [r for r in chosen if r.threads == threads]
                ups = [u for r in of_count if (u := r.speed_up(baseline.name)) is not None]
                axis.plot([at + shift] * len(ups), ups, ".", color=colour, alpha=0.5)
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set_yscale("log")
        axis.set_title(title)
        axis.set_xticks(range(len(BASELINES)), [b.name.replace("_", " ") for b in BASELINES])
        axis.grid(axis="y", alpha=0.3)
    axes[0][0].set_ylabel("time of the baseline / time of ATMM")
    axes[1][0].set_ylabel("time of the baseline / time of ATMM")
    figure.suptitle("ATMM against its baselines (blue: 1 thread, orange: 2)")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def show_left_out(console: Console, results: Sequence[Result]) -> None:
    reasons: dict[str, int] = {}
    for where, reason in left_out(results).items():
        operator = where.split(",")[0]
        if not operator.endswith("_in_fp32"):
            reasons[f"{operator}: {reason}"] = reasons.get(f"{operator}: {reason}", 0) + 1
    for reason, count in reasons.items():
        console.print(f"left out in {count} cells — {reason}")


def _commit() -> str | None:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or None


def _cpu() -> dict[str, str]:
    """Family and model and name, as the kernel tells (virtual machines may hide the name)."""
    keys = {"vendor_id", "cpu family", "model", "model name", "cache size"}
    found: dict[str, str] = {}
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() in keys:
            found.setdefault(key.strip(), value.strip())
    return found
