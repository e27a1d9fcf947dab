"""Tables of `vlora bench switch` beside that of the merges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.switch.delora_work import MIXTURE, UNMERGED, Result
from benchmarks.switch.mode_changes import Changes


def changes_table(changes: Sequence[Changes]) -> Table:
    table = _table(
        ("from one token to the next", "type", "p50 ms", "p99 ms"),
        "what a request sees of a switch, while it decodes",
    )
    for found in changes:
        for row in found.as_rows():
            table.add_row(
                row["change"], row["dtype"], f"{row['p50_ms']:.1f}", f"{row['p99_ms']:.1f}"
            )
    return table


def mixture_table(results: Sequence[Result]) -> Table:
    table = _table(
        ("phase", "starved", "unmerged ms", "mixture ms", "ratio", "predicted", "by peak"),
        "LoRA of one step: deLoRA's extra work over unmerged's",
    )
    for result in results:
        table.add_row(
            result.phase,
            f"{result.starved} of {result.requests}",
            *(f"{result.timings[name].median * 1e3:.2f}" for name in (UNMERGED, MIXTURE)),
            f"{result.ratio:.2f}",
            f"{result.predicted_ratio:.2f}",
            f"{result.by_peak[MIXTURE] / result.by_peak[UNMERGED]:.2f}",
        )
    return table


def draw(results: Sequence[Result], folder: Path) -> Path:
    """The paper's figure 20: deLoRA's extra work over unmerged's, measured and predicted."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    figure, plot = pyplot.subplots(figsize=(6, 3.5))
    for phase in dict.fromkeys(result.phase for result in results):
        mine = [result for result in results if result.phase == phase]
        shares = [result.starved / result.requests for result in mine]
        (line,) = plot.plot(shares, [result.ratio for result in mine], "o-", label=phase)
        predicted = [result.predicted_ratio for result in mine]
        plot.plot(shares, predicted, "x--", color=line.get_color(), label=f"{phase}, predicted")
    plot.set_xlabel("starved requests, of all")
    plot.set_ylabel("deLoRA's extra work over unmerged's")
    plot.set_ylim(0, 1.1)
    plot.legend(fontsize=7)
    figure.tight_layout()
    path = folder / "figure-20-delora.png"
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def drift_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = _table(
        ("type", "switches", "largest change", "weights changed"),
        "base weights after merging in place and back (out of place: none)",
    )
    for row in rows:
        table.add_row(
            row["in_place"], str(row["switches"]), f"{row['largest']:.1e}", f"{row['changed']:.1%}"
        )
    return table


def _table(columns: Sequence[str], title: str) -> Table:
    table = Table(*columns, title=title)
    for column in table.columns[1:]:
        column.justify = "right"
    return table
