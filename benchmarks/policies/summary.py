"""Summary of the policies benchmark: the latency of a policy divided by that of another one.

Both latencies of a ratio are from the same trace, and both were measured or both simulated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.policies.closed_loop import throughput_ratio
from benchmarks.policies.grid import MEASURED, SIMULATED_AGAIN, SUMMARY_SETTING
from benchmarks.policies.published_operators import OPERATORS
from benchmarks.timing import rounded_mean

OURS, FCFS = "predictive", "unmerge_only"
"""The evaluated policy, and the baseline: first come, first served, without merging."""
BASELINES = (FCFS, "merge_only", "dlora")

ResultRow = Mapping[str, Any]
Setting = dict[str, Any]
"""Application, load and skew of a trace."""


def summarize(rows: Sequence[ResultRow]) -> dict[str, Any]:
    """Return the summary's figures by key.

    Most figures are the latency of OURS divided by that of another policy. Below 1, OURS is faster.
    "worst" in a key means the largest such ratio of all settings. "level" means that the latencies
    are those that `_on_one_machine` returns. Other figures are errors of predictions, and upper
    bounds of what merging can gain. A figure that was not measured is None.
    """
    measured, again = (
        [row for row in rows if row["kind"] == kind] for kind in (MEASURED, SIMULATED_AGAIN)
    )
    level = _on_one_machine(measured, again)
    settings = _settings(measured)
    summary: dict[str, Any] = {}
    for name in BASELINES:
        summary[f"vs_{name}"] = _mean(_ratios(measured, name, **SUMMARY_SETTING))
    summary["vs_own_operators"] = _largest(
        _mean(_ratios(measured, name, **SUMMARY_SETTING)) for name in OPERATORS
    )
    summary["worst_vs_best_baseline"] = _worst_vs_best(measured, settings)
    summary["level_worst_vs_best_baseline"] = _worst_vs_best(level, settings)
    for name in BASELINES:
        summary[f"level_vs_{name}"] = _mean(_ratios(level, name, **SUMMARY_SETTING))
    summary["simulated_worst_vs_best_baseline"] = _worst_vs_best(again, _settings(again))
    high_skew = [setting for setting in settings if setting["skew"] >= SUMMARY_SETTING["skew"]]
    for name in BASELINES:
        ratios = (_mean(_ratios(measured, name, **setting)) for setting in high_skew)
        summary[f"worst_vs_{name}_at_high_skew"] = _largest(ratios)
    for name in ("credit", "paper"):
        summary[f"{name}_vs_{FCFS}"] = _mean(_ratios(measured, FCFS, name, **SUMMARY_SETTING))
    summary[f"closed_loop_vs_{FCFS}"] = throughput_ratio(rows, OURS, FCFS)
    return summary | _summary_of_predictions(measured, again)


def gains_by_setting(rows: Sequence[ResultRow]) -> list[dict[str, Any]]:
    """Return one row per setting. It has the setting and these figures.

    adapter_share: share of the steps' time that adapters cost.
    most: latency of FCFS if adapters cost nothing, divided by its latency with their cost.
    name of a policy: latency of the policy divided by that of FCFS.
    """
    measured, again = (
        [row for row in rows if row["kind"] == kind] for kind in (MEASURED, SIMULATED_AGAIN)
    )
    policies = dict.fromkeys(row["policy"] for row in measured)
    names = sorted(name for name in policies if name not in OPERATORS)
    return [
        setting
        | {
            "adapter_share": _mean(_adapter_shares(again, **setting)),
            "most": _mean(_free_adapter_ratios(again, FCFS, **setting)),
        }
        | {name: _mean(_ratios(measured, FCFS, name, **setting)) for name in names}
        | {f"{OURS}, simulated": _mean(_ratios(again, FCFS, **setting))}
        for setting in sorted(_settings(measured), key=lambda setting: tuple(setting.values()))
    ]


def _summary_of_predictions(
    measured: Sequence[ResultRow], again: Sequence[ResultRow]
) -> dict[str, Any]:
    """Return errors of the cost model and the simulation, and upper bounds of merging's gain."""
    step_errors = [row["prediction_error"] for row in measured if row["policy"] not in OPERATORS]
    latencies = [
        (row["token_latency_ms"], row["simulated_ms"]) for row in measured if row["simulated_ms"]
    ]
    errors = [abs(simulated / real - 1) for real, simulated in latencies]
    return {
        "step_prediction_median_error": round(median(step_errors), 4) if step_errors else None,
        "simulation_median_error": round(median(errors), 4) if errors else None,
        "adapter_share": _mean(_adapter_shares(again)),
        "most_to_win": _mean(_free_adapter_ratios(again, FCFS)),
        "most_to_win_of_ours": _mean(_free_adapter_ratios(again, OURS)),
        "seeds": len({row["seed"] for row in measured}),
    }


def _on_one_machine(
    measured: Sequence[ResultRow], again: Sequence[ResultRow]
) -> list[dict[str, Any]]:
    """Return the measured rows, with latencies as if the machine's speed had not changed.

    The speed of a shared machine may change by half within a minute. The cost model follows these
    changes. So each trace is simulated twice: with the cost model from the time of the measurement,
    and with the cost model from the end of the run. The corrected latency is the measured latency ·
    the second simulated latency / the first simulated latency.
    """
    simulated_again = {(row["policy"], _trace(row)): row["token_latency_ms"] for row in again}
    keys = [(row, (row["policy"], _trace(row))) for row in measured if row["simulated_ms"]]
    return [
        {
            **row,
            "token_latency_ms": row["token_latency_ms"]
            * simulated_again[key]
            / row["simulated_ms"],
        }
        for row, key in keys
        if key in simulated_again
    ]


def _worst_vs_best(rows: Sequence[ResultRow], settings: Iterable[Setting]) -> float | None:
    """Return the largest ratio, over all settings, of the latency of OURS to that of the best
    baseline.
    """
    return _largest(
        _mean(_ratios(rows, name, **setting)) for setting in settings for name in BASELINES
    )


def _ratios(
    rows: Sequence[ResultRow], name: str, policy: str = OURS, **setting: Any
) -> list[float]:
    """Return the latency of `policy` divided by that of `name`, for each trace that both ran."""
    own = {
        _trace(row): row
        for row in rows
        if row["policy"] == policy and setting.items() <= row.items()
    }
    others = [row for row in rows if row["policy"] == name and _trace(row) in own]
    return [own[_trace(row)]["token_latency_ms"] / row["token_latency_ms"] for row in others]


def _adapter_shares(again: Sequence[ResultRow], **setting: Any) -> list[float]:
    """Return the share of the steps' time that adapters cost, for each simulated trace of FCFS."""
    rows = (row for row in again if row["policy"] == FCFS and setting.items() <= row.items())
    return [row["adapter_share"] for row in rows if row["adapter_share"]]


def _free_adapter_ratios(again: Sequence[ResultRow], name: str, **setting: Any) -> list[float]:
    """Return the latency if adapters cost nothing, divided by the latency with their cost, for each
    simulated trace of the policy `name` that matches `setting`.
    """
    rows = (row for row in again if row["policy"] == name and setting.items() <= row.items())
    return [row["free_adapters_ms"] / row["token_latency_ms"] for row in rows]


def _trace(row: ResultRow) -> tuple[Any, ...]:
    keys = ("application", "adapters", "arrivals", "skew", "load", "seed")
    return tuple(row[key] for key in keys)


def _settings(rows: Sequence[ResultRow]) -> list[Setting]:
    keys = ("application", "load", "skew")
    distinct = dict.fromkeys(tuple((key, row[key]) for key in keys) for row in rows)
    return [dict(setting) for setting in distinct]


def _largest(ratios: Iterable[float | None]) -> float | None:
    return max((ratio for ratio in ratios if ratio is not None), default=None)


def _mean(values: Sequence[float]) -> float | None:
    return rounded_mean(values, 4)
