"""Tables and figures of the policies benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from rich.table import Table

from benchmarks.policies.grid import MEASURED, SIMULATED, TWO_ADAPTERS
from benchmarks.policies.published_operators import OPERATORS
from benchmarks.policies.summary import OURS, ResultRow
from benchmarks.report import figure_table

SETTING = ("application", "load", "skew")
MODES = ("merged", "mixture", "unmerged")
SECONDS = ("p50_s", "p95_s", "p99_s", "first_token_s", "requests_per_s")


def policy_table(rows: Sequence[ResultRow]) -> Table:
    """Return a table with one line per setting and policy, with means over seeds."""
    table = figure_table(
        (
            *("trace", "policy", "ms/token", "p50 s", "p95 s", "p99 s", "first s", "req/s"),
            *("switches", *MODES, "predicted"),
        ),
        "means over seeds; modes: share of the steps' time; predicted: simulated over measured",
        labels=2,
    )
    measured = [row for row in rows if row["kind"] == MEASURED]
    for setting, policy in sorted(dict.fromkeys((_setting(r), r["policy"]) for r in measured)):
        same = [row for row in measured if (_setting(row), row["policy"]) == (setting, policy)]
        modes = {mode: fmean(row["mode_s"].get(mode, 0.0) for row in same) for mode in MODES}
        total = sum(modes.values()) or 1.0
        simulated = [r["simulated_ms"] / r["token_latency_ms"] for r in same if r["simulated_ms"]]
        table.add_row(
            "{} {:g} {:g}".format(*setting),
            policy.replace("_", " "),
            f"{_mean(same, 'token_latency_ms'):.1f}",
            *(f"{_mean(same, key):.2f}" for key in SECONDS),
            f"{_mean(same, 'switches'):.1f}",
            *(f"{100 * seconds / total:.0f} %" for seconds in modes.values()),
            f"{fmean(simulated):.2f}" if simulated else "–",
        )
    return table


def gain_table(gains: Sequence[ResultRow]) -> Table:
    """Return a table with one line per row of `gains_by_setting`."""
    names = [name for name in (gains[0] if gains else ()) if name not in SETTING]
    table = figure_table(
        ("trace", *(name.replace("_", " ") for name in names)),
        "adapter share: adapters' share of the steps' time; most: latency if adapters cost nothing;"
        " latencies are divided by that of unmerge only",
    )
    for row in gains:
        cells = ("–" if row[name] is None else f"{row[name]:.3f}" for name in names)
        table.add_row("{} {:g} {:g}".format(*(row[key] for key in SETTING)), *cells)
    return table


def draw_figures(rows: Sequence[ResultRow], folder: Path) -> list[Path]:
    """Draw the paper's figures 19, 21 and 22, and latencies by load and by number of adapters.

    Figure 19: policies by skew. Figure 21: policies with two adapters. Figure 22: systems with
    their own operators. The switch benchmark draws figure 20. Return the files.
    """
    import matplotlib

    matplotlib.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    measured = [row for row in rows if row["kind"] == MEASURED]
    policies = [row for row in measured if row["policy"] not in OPERATORS]
    systems = [row for row in measured if row["policy"] in {*OPERATORS, OURS}]
    figures = {
        "figure-19-policies": (policies, "skew"),
        "figure-21-two-adapters": (
            [row for row in rows if row["kind"] == TWO_ADAPTERS],
            "application",
        ),
        "figure-22-systems": (systems, "skew"),
        "by-load": (policies, "load"),
        "by-adapters-simulated": ([r for r in rows if r["kind"] == SIMULATED], "adapters"),
    }
    paths = [
        _draw_bars(figure_rows, axis, folder / f"{name}.png")
        for name, (figure_rows, axis) in figures.items()
    ]
    return [path for path in paths if path is not None]


def _draw_bars(rows: Sequence[ResultRow], axis: str, path: Path) -> Path | None:
    """Draw the average token latency by policy over the values of one key of the rows.

    Traces that some policy has not run are left out. Return the file, or None if no trace remains.
    """
    from matplotlib import pyplot

    names = sorted({row["policy"] for row in rows})
    traces = [{_trace(row) for row in rows if row["policy"] == name} for name in names]
    common = set.intersection(*traces) if traces else set()
    rows = [row for row in rows if _trace(row) in common]
    if not rows:
        return None
    values = sorted({row[axis] for row in rows})
    figure, plot = pyplot.subplots(figsize=(7, 3.5))
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        heights = [
            _mean([r for r in rows if (r["policy"], r[axis]) == (name, v)], "token_latency_ms")
            for v in values
        ]
        positions = [x + (i - (len(names) - 1) / 2) * width for x in range(len(values))]
        plot.bar(positions, heights, width, label=name.replace("_", " "))
    plot.set_xticks(range(len(values)), [f"{v:g}" if axis != "application" else v for v in values])
    plot.set_xlabel(axis)
    plot.set_ylabel("average token latency, ms")
    plot.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def _trace(row: ResultRow) -> tuple[object, ...]:
    keys = ("application", "load", "skew", "seed", "adapters", "arrivals")
    return tuple(row[key] for key in keys)


def _setting(row: ResultRow) -> tuple[str, float, float]:
    return row["application"], row["load"], row["skew"]


def _mean(rows: Sequence[ResultRow], key: str) -> float:
    return fmean(row[key] for row in rows) if rows else 0.0
