"""Merging all layers on a GPU, compared with the roofline, with addmm and with a copy."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_device import device_limits, write_json
from benchmarks.gpu_timing import GpuLimits, discard
from vlora.atmm.cuda.operator import DTYPES, MergedParts, Operator, current
from vlora.atmm.search.gpu_timing import GpuWork, interleaved
from vlora.atmm.types import LoraPair, MergeUpdate

ROUNDS = 5


@dataclass(frozen=True)
class Model:
    """A model whose layers have targets (d_out, d_in), and an adapter that changes all of them."""

    name: str
    layers: int
    targets: tuple[tuple[int, int], ...]
    rank: int

    @property
    def elements(self) -> int:
        return self.layers * sum(d_out * d_in for d_out, d_in in self.targets)


SMALL = ((896, 896), (128, 896), (128, 896), (896, 896))
MODELS = tuple(
    Model(name, layers, targets, rank)
    for name, layers, targets in (
        ("7B, attention", 32, ((4096, 4096),) * 4),
        ("0.5B, attention", 24, SMALL),
    )
    for rank in (64, 16)
)


def measure(
    model: Model, operator: Operator, limits: GpuLimits, dtype: torch.dtype = torch.bfloat16
) -> dict[str, Any]:
    """Measure merging out of place and in place, torch.addmm for each matrix, and a plain copy.

    Raises AssertionError if the merged weights are wrong by more than one rounding.
    """
    base = torch.randn(model.elements, device=operator.device).to(dtype)
    out = torch.empty_like(base)
    updates = _updates(model, operator.device)
    merge = MergedParts(operator, updates)
    merge(out, base)
    error = _error(out, base, updates)
    if not error <= 1.01 * torch.finfo(dtype).eps:
        raise AssertionError(f"{model.name}: the relative error {error:.1e} exceeds one rounding")
    in_place = base.clone()
    timed = interleaved(
        {
            "atmm": GpuWork([lambda: merge(out, base)], graph=True),
            "atmm_in_place": GpuWork([lambda: merge(in_place, in_place)], graph=True),
            "addmm": GpuWork([_addmm(updates, base, out)], graph=True),
            "copy": GpuWork([lambda: discard(out.copy_(base))], graph=True),
        },
        ROUNDS,
    )
    factors = sum(4 * model.rank * (d_out + d_in) for d_out, d_in in model.targets)
    moved = 2 * dtype.itemsize * model.elements + model.layers * factors
    # W is read once and M = W + B A is written once. The peak is that of fp32 without tensor cores,
    # since the result must be rounded only once.
    limit = limits.seconds(moved, 2 * model.rank * model.elements, "fp32")
    ms = {name: round(one.median * 1e3, 4) for name, one in timed.items()}
    return {
        "model": model.name,
        "layers": model.layers,
        "rank": model.rank,
        "dtype": DTYPES[dtype],
        "gbytes": round(model.elements * dtype.itemsize / 1e9, 3),
        "limit_ms": round(limit * 1e3, 4),
        "roofline": round(limit / timed["atmm"].median, 3),
        "vs_addmm": round(timed["addmm"].median / timed["atmm"].median, 3),
        "ms": ms,
        "noise": {name: round(one.noise, 3) for name, one in timed.items()},
    }


def _updates(model: Model, device: torch.device) -> list[MergeUpdate]:
    updates, offset = [], 0
    for d_out, d_in in model.targets * model.layers:
        a = torch.randn(model.rank, d_in, device=device) / d_in**0.5
        b = torch.randn(d_out, model.rank, device=device) * 1e-3
        updates.append(MergeUpdate(offset, LoraPair(a, b)))
        offset += d_out * d_in
    return updates


def _addmm(
    updates: Sequence[MergeUpdate], base: torch.Tensor, out: torch.Tensor
) -> Callable[[], None]:
    """Return a function that merges each matrix with torch.addmm."""
    parts = []
    for offset, (a, b) in updates:
        shape = (b.shape[0], a.shape[1])
        place = slice(offset, offset + shape[0] * shape[1])
        pair = (base[place].view(shape), out[place].view(shape))
        parts.append((*pair, a.to(base.dtype), b.to(base.dtype)))

    def merge_all() -> None:
        for source, target, a, b in parts:
            torch.addmm(source, b, a, out=target)

    return merge_all


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
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_switch", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="file of the results")
    given = parser.parse_args()
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
