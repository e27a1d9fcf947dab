"""Tables and the figure of the switch benchmark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.report import figure_table
from benchmarks.switch.delora_work import MIXTURE, UNMERGED, DeloraResult
from benchmarks.switch.merges import ADDMM, ATMM, COPY, IN_PLACE, MergeResult
from benchmarks.switch.mode_changes import ModeChangeGaps


def merge_table(results: Sequence[MergeResult]) -> Table:
    """Return a table of merges: one line per model, rank, type and thread count."""
    names = (ATMM, IN_PLACE, ADDMM, COPY)
    table = figure_table(
        (
            *("model", "rank", "type", "threads", "MB"),
            *(f"{name.replace('_', ' ')} ms" for name in names),
            *("limit ms", "limit/time", "addmm/time"),
        ),
        "M = W + B·A of all layers in one call",
    )
    for result in results:
        model, timings = result.model, result.timings
        table.add_row(
            f"{model.name}, {model.layers} layers",
            str(model.rank),
            model.dtype,
            str(result.threads),
            str(model.as_row()["mbytes"]),
            *(
                f"{timings[name].median * 1e3:.2f} ±{timings[name].noise:.0%}"
                if name in timings
                else "–"
                for name in names
            ),
            f"{result.limit * 1e3:.2f}",
            f"{result.share_of_limit:.2f}",
            "–" if result.vs_addmm is None else f"{result.vs_addmm:.2f}",
        )
    return table


def change_table(changes: Sequence[ModeChangeGaps]) -> Table:
    """Return a table with one line per change of mode and storage type."""
    table = figure_table(
        ("change between two tokens", "type", "p50 ms", "p99 ms"),
        "time between two tokens of a decoding request",
    )
    for change in changes:
        for row in change.as_rows():
            table.add_row(
                row["change"], row["dtype"], f"{row['p50_ms']:.1f}", f"{row['p99_ms']:.1f}"
            )
    return table


def delora_table(results: Sequence[DeloraResult]) -> Table:
    """Return a table with one line per phase and number of starved requests."""
    table = figure_table(
        ("phase", "starved", "unmerged ms", "mixture ms", "ratio", "predicted", "by peak"),
        "LoRA in one step: deLoRA's time over unmerged's",
    )
    for result in results:
        table.add_row(
            result.phase,
            f"{result.starved} of {result.requests}",
            *(f"{result.timings[name].median * 1e3:.2f}" for name in (UNMERGED, MIXTURE)),
            f"{result.ratio:.2f}",
            f"{result.predicted_ratio:.2f}",
            f"{result.predicted_ratio_by_peak:.2f}",
        )
    return table


def drift_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table of the drift: one line per storage type and number of switches."""
    table = figure_table(
        ("type", "switches", "largest change", "weights changed"),
        "base weights after merging and unmerging in place (out of place they never change)",
    )
    for row in rows:
        table.add_row(
            row["in_place"], str(row["switches"]), f"{row['largest']:.1e}", f"{row['changed']:.1%}"
        )
    return table


def draw_delora(results: Sequence[DeloraResult], folder: Path) -> Path:
    """Draw the paper's figure 20, measured and predicted, and return its file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    figure, plot = pyplot.subplots(figsize=(6, 3.5))
    for phase in dict.fromkeys(result.phase for result in results):
        of_phase = [result for result in results if result.phase == phase]
        shares = [result.starved / result.requests for result in of_phase]
        (line,) = plot.plot(shares, [result.ratio for result in of_phase], "o-", label=phase)
        predicted = [result.predicted_ratio for result in of_phase]
        plot.plot(shares, predicted, "x--", color=line.get_color(), label=f"{phase}, predicted")
    plot.set_xlabel("share of starved requests")
    plot.set_ylabel("deLoRA's time over unmerged's")
    plot.set_ylim(0, 1.1)
    plot.legend(fontsize=7)
    figure.tight_layout()
    path = folder / "figure-20-delora.png"
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path
