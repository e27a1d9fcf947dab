"""Tables and figures of `vlora bench policies`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.table import Table

Row = Mapping[str, Any]


def policies_table(rows: Sequence[Row]) -> Table:
    """Means over seeds."""
    table = Table(
        *("trace", "policy", "ms/token", "p50 s", "p95 s", "p99 s", "first s", "req/s"),
        *("switches", "merged", "mixture", "unmerged", "predicted"),
        title="means over seeds; modes: share of steps' time; predicted: simulated over measured",
    )
    for column in table.columns[2:]:
        column.justify = "right"
    done = [row for row in rows if row["kind"] == "measured"]
    keys = dict.fromkeys((_place(row), row["policy"]) for row in done)
    for place, policy in sorted(keys):
        same = [row for row in done if (_place(row), row["policy"]) == (place, policy)]
        modes = {mode: fmean(row["mode_s"].get(mode, 0.0) for row in same) for mode in MODES}
        whole = sum(modes.values()) or 1.0
        simulated = [r["simulated_ms"] / r["token_latency_ms"] for r in same if r["simulated_ms"]]
        table.add_row(
            "{} {:g} {:g}".format(*place),
            policy.replace("_", " "),
            *(f"{_mean(same, key):.1f}" for key in ("token_latency_ms",)),
            *(f"{_mean(same, key):.2f}" for key in SECONDS),
            f"{_mean(same, 'switches'):.1f}",
            *(f"{100 * seconds / whole:.0f} %" for seconds in modes.values()),
            f"{fmean(simulated):.2f}" if simulated else "–",
        )
    return table


def to_win_table(places: Sequence[Row]) -> Table:
    """Over first come, first served, unmerged."""
    names = [name for name in (places[0] if places else ()) if name not in PLACE]
    table = Table(
        *("trace", *(name.replace("_", " ") for name in names)),
        title="adapters' share of a step; the latency that merging could leave at the least, and"
        " each policy's, over that of unmerge only",
    )
    for column in table.columns[1:]:
        column.justify = "right"
    for row in places:
        cells = ("–" if row[name] is None else f"{row[name]:.3f}" for name in names)
        table.add_row("{} {:g} {:g}".format(*(row[key] for key in PLACE)), *cells)
    return table


PLACE = ("application", "load", "skew")
MODES = ("merged", "mixture", "unmerged")
SECONDS = ("p50_s", "p95_s", "p99_s", "first_token_s", "requests_per_s")


def draw(rows: Sequence[Row], folder: Path) -> list[Path]:
    """As the paper's figures 19 (policies by skewness), 21 (policies with two adapters) and 22
    (systems with their own operators), and by load and number of adapters; `vlora bench switch
    --plot` draws figure 20."""
    import matplotlib

    matplotlib.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    done = [row for row in rows if row["kind"] == "measured"]
    own = {"punica", "slora", "dlora_einsum"}
    figures = {
        "figure-19-policies": ([r for r in done if r["policy"] not in own], "skew"),
        "figure-21-two-adapters": ([r for r in rows if r["kind"] == "few adapters"], "application"),
        "figure-22-systems": ([r for r in done if r["policy"] in own | {"predictive"}], "skew"),
        "by-load": ([r for r in done if r["policy"] not in own], "load"),
        "by-adapters-simulated": ([r for r in rows if r["kind"] == "simulated"], "adapters"),
    }
    written = [_bars(rows, axis, folder / f"{name}.png") for name, (rows, axis) in figures.items()]
    return [path for path in written if path is not None]


def _bars(rows: Sequence[Row], axis: str, path: Path) -> Path | None:
    """Average token latency by policy, over the values of one axis, of traces that all have run."""
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
        places = [at + (i - (len(names) - 1) / 2) * width for at in range(len(values))]
        plot.bar(places, heights, width, label=name.replace("_", " "))
    plot.set_xticks(range(len(values)), [f"{v:g}" if axis != "application" else v for v in values])
    plot.set_xlabel(axis)
    plot.set_ylabel("average token latency, ms")
    plot.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def _trace(row: Row) -> tuple[object, ...]:
    keys = ("application", "load", "skew", "seed", "adapters", "arrivals")
    return tuple(row[key] for key in keys)


def _place(row: Row) -> tuple[str, float, float]:
    return row["application"], row["load"], row["skew"]


def _mean(rows: Sequence[Row], key: str) -> float:
    return fmean(row[key] for row in rows) if rows else 0.0
