"""Merging all layers on a GPU, compared with the roofline and with addmm."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.gpu_device import GpuLimits, device_limits, discard, parser_of, write_json
from benchmarks.machine import DTYPES
from benchmarks.merges import MergeModel, addmm_calls
from vlora.atmm.cuda.operator import MergedParts, Operator, current
from vlora.atmm.search.gpu_timing import GpuWork, interleaved
from vlora.atmm.types import MergeUpdate

ROUNDS = 5
SMALL = ((896, 896), (128, 896), (128, 896), (896, 896))
MODELS = tuple(
    MergeModel(name, layers, targets, rank, "bf16")
    for name, layers, targets in (
        ("7B, attention", 32, ((4096, 4096),) * 4),
        ("0.5B, attention", 24, SMALL),
    )
    for rank in (64, 16)
)


def measure(model: MergeModel, operator: Operator, limits: GpuLimits) -> dict[str, Any]:
    """Measure merging all layers, and torch.addmm for each matrix.

    Raises AssertionError if the merged weights are wrong by more than one rounding.
    """
    dtype = DTYPES[model.dtype]
    base = torch.randn(model.elements, device=operator.device).to(dtype)
    out = torch.empty_like(base)
    updates, _ = model.draw(torch.Generator().manual_seed(0), operator.device)
    merge = MergedParts(operator, updates)
    merge(out, base)
    error = _error(out, base, updates)
    if not error <= 1.01 * torch.finfo(dtype).eps:
        raise AssertionError(f"{model.name}: the relative error {error:.1e} exceeds one rounding")
    calls = addmm_calls(updates, base, out)
    work = {
        "atmm": GpuWork([lambda: merge(out, base)], graph=True),
        "addmm": GpuWork([lambda: discard([call() for call in calls])], graph=True),
    }
    timed = interleaved(work, ROUNDS)
    # W is read once and M = W + B A is written once. The peak is that of fp32 without tensor cores,
    # since the result must be rounded only once.
    limit = limits.seconds(model.moved_bytes, model.flops, "fp32")
    return {
        "model": model.name,
        "layers": model.layers,
        "rank": model.rank,
        "dtype": model.dtype,
        "gbytes": round(model.elements * dtype.itemsize / 1e9, 3),
        "limit_ms": round(limit * 1e3, 4),
        "roofline": round(limit / timed["atmm"].median, 3),
        "vs_addmm": round(timed["addmm"].median / timed["atmm"].median, 3),
        "ms": {name: round(one.median * 1e3, 4) for name, one in timed.items()},
        "noise": {name: round(one.noise, 3) for name, one in timed.items()},
    }


def _error(out: torch.Tensor, base: torch.Tensor, updates: Sequence[MergeUpdate]) -> float:
    """Return the largest relative error of the first and the last matrix against float64."""
    worst = 0.0
    for offset, (a, b) in (updates[0], updates[-1]):
        place = slice(offset, offset + b.shape[0] * a.shape[1])
        want = base[place].double() + (b.double() @ a.double()).flatten()
        # Near zero, rounding the fp32 sum loses more than rounding to the storage type.
        error = (out[place].double() - want).abs() / (want.abs() + 1e-4)
        worst = max(worst, float(error.max()))
    return worst


def main() -> None:
    given = parser_of("gpu_switch", __doc__).parse_args()
    operator, limits, rows, summary = current(), device_limits(), [], {}
    for model in MODELS:
        rows.append(measure(model, operator, limits))
        print(json.dumps(rows[-1]), flush=True)
        name = f"{model.name}, rank {model.rank}"
        times = "".join(f", {name} {ms} ms" for name, ms in rows[-1]["ms"].items())
        summary[name] = f"limit {rows[-1]['limit_ms']} ms{times}"
        write_json(given.json, {"rows": rows, "summary": summary})


if __name__ == "__main__":
    main()
