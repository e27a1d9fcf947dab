"""Tables and the plot of the kernels benchmark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.kernels.measurement import KernelResult
from benchmarks.kernels.operators import BASELINES
from benchmarks.report import figure_table


def kernel_table(results: Sequence[KernelResult]) -> Table:
    """Return a table with one line per cell and thread count."""
    table = figure_table(
        (
            *("cell", "threads", "ATMM µs", "limit/time"),
            *(baseline.name.replace("_", " ") for baseline in BASELINES),
            *("fastest", "noise"),
        ),
        "speed-up of ATMM over each baseline; limit/time: 1 is at the roofline",
    )
    for result in results:
        speed_ups = [result.speed_up(baseline.name) for baseline in BASELINES]
        fastest = f"{result.speed_up_over_fastest:.2f} {result.fastest.replace('_', ' ')}"
        table.add_row(
            result.cell.name,
            str(result.threads),
            f"{result.atmm.median * 1e6:.1f}",
            f"{result.share_of_limit:.2f}",
            *("–" if speed_up is None else f"{speed_up:.2f}" for speed_up in speed_ups),
            f"[red]{fastest}[/]" if result.is_slower else fastest,
            f"±{result.noise:.0%}",
        )
    return table


def stability_table(rows: Sequence[Mapping[str, Any]], rounds: int) -> Table:
    """Return a table with each operator's coefficient of variation, one line per cell."""
    names = ("atmm", *(baseline.name for baseline in BASELINES))
    table = figure_table(
        ("cell", *(name.replace("_", " ") for name in names)),
        f"coefficient of variation over {rounds} calls after warm-up",
    )
    for row in rows:
        variation = row["variation"]
        figures = (f"{variation[name]:.3f}" if name in variation else "–" for name in names)
        table.add_row(row["cell"], *figures)
    return table


def draw_speed_ups(results: Sequence[KernelResult], path: Path) -> None:
    """Draw the speed-ups over each baseline, one dot per cell, by regime and type."""
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
        for x, baseline in enumerate(BASELINES):
            for threads, colour, shift in ((1, "tab:blue", -0.15), (2, "tab:orange", 0.15)):
                of_count = [r for r in chosen if r.threads == threads]
                ups = [up for r in of_count if (up := r.speed_up(baseline.name)) is not None]
                axis.plot([x + shift] * len(ups), ups, ".", color=colour, alpha=0.5)
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
