"""Summary of the kernels benchmark: speed-ups, the best static tile, shares of the roofline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.kernels.atmm_operator import StaticTile
from benchmarks.kernels.measurement import KernelResult
from benchmarks.kernels.operators import BASELINES
from benchmarks.timing import rounded_mean


def summarize(results: Sequence[KernelResult]) -> dict[str, Any]:
    """Return the figures of the summary by key. Keys of bf16 end in `_bf16`.

    Speed-ups and fractions of the roofline are geometric means over cells and thread counts.
    """
    summary: dict[str, Any] = {}
    for dtype, suffix in (("fp32", ""), ("bf16", "_bf16")):
        of_type = [result for result in results if result.cell.dtype == dtype]
        if of_type:
            summary |= {key + suffix: value for key, value in _summary_of(of_type).items()}
    return summary


def summarize_stability(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return each operator's mean coefficient of variation as `variation_<operator>`."""
    variations: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row["variation"].items():
            variations.setdefault(name, []).append(value)
    return {f"variation_{name}": round(sum(v) / len(v), 4) for name, v in variations.items()}


def left_out_counts(results: Sequence[KernelResult]) -> dict[str, int]:
    """Return the number of cells in which an operator was left out, by "operator: reason"."""
    counts: dict[str, int] = {}
    seen = set()
    for result in results:
        for name, reason in result.left_out.items():
            if (name, result.cell) not in seen and not name.endswith("_in_fp32"):
                counts[f"{name}: {reason}"] = counts.get(f"{name}: {reason}", 0) + 1
            seen.add((name, result.cell))
    return counts


def _summary_of(results: Sequence[KernelResult]) -> dict[str, Any]:
    decode = [r for r in results if r.cell.regime == "decode"]
    hot, cold = ([r for r in decode if r.cell.cold is heat] for heat in (False, True))
    prefill = [r for r in results if r.cell.regime == "prefill"]
    summary: dict[str, Any] = {}
    for regime, chosen in (("decode", hot), ("prefill", prefill), ("decode_cold", cold)):
        for baseline in BASELINES:
            summary[f"{regime}_vs_{baseline.name}"] = _mean_speed_up(chosen, baseline.name)
        others = {name for r in chosen for name in r.baselines if name.endswith("_in_fp32")}
        for name in sorted(others):
            summary[f"{regime}_vs_{name}"] = _mean_speed_up(chosen, name)
    summary["adaptive_vs_best_static"], summary["best_static"] = _over_best_static(results)
    worst = min(results, key=lambda r: r.speed_up_over_fastest)
    summary["worst_cell_vs_best_baseline"] = round(worst.speed_up_over_fastest, 3)
    summary["worst_cell"] = f"{worst.cell.name} {worst.threads}t vs {worst.fastest}"
    summary["cells"] = len(results)
    summary["cells_slower_beyond_noise"] = sum(r.is_slower for r in results)
    for name, chosen in (("decode_hot", hot), ("decode_cold", cold), ("prefill", prefill)):
        summary[f"roofline_{name}"] = rounded_mean([r.share_of_limit for r in chosen])
    return summary


def _mean_speed_up(results: Sequence[KernelResult], name: str) -> float | None:
    return rounded_mean([s for r in results if (s := r.speed_up(name)) is not None])


def _over_best_static(results: Sequence[KernelResult]) -> tuple[float | None, str | None]:
    """Return ATMM's mean speed-up over the best static tile in hot cells, and that tile's name.

    The best static tile is the tile over which ATMM's mean speed-up is smallest, not the best tile
    of each cell. Only the candidates of `static_tiles` are timed, so the speed-up is an upper bound
    of the gain of adaptive choice.
    """
    results = [result for result in results if not result.cell.cold]
    if not results:
        return None, None
    names = set.intersection(
        *({n for n in r.timings if n.startswith(StaticTile.prefix)} for r in results)
    )
    means = {name: _mean_speed_up(results, name) for name in sorted(names)}
    measured = {name: mean for name, mean in means.items() if mean is not None}
    if not measured:
        return None, None
    best = min(measured, key=measured.__getitem__)
    return measured[best], best.removeprefix(StaticTile.prefix)
