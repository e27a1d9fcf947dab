"""Rates that a GPU reaches, to which the times of kernels are compared."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vlora.atmm.search.gpu_timing import GpuWork, interleaved


@dataclass(frozen=True)
class GpuLimits:
    """Rates that this device reaches at present.

    copy: bytes/s of a large copy, where both reads and writes count.
    bf16: flop/s of a large matrix product in bf16.
    fp32: flop/s of a large matrix product in fp32, without TF32.
    """

    copy: float
    bf16: float
    fp32: float

    def seconds(self, moved_bytes: float, flops: float, dtype: str) -> float:
        """Return the roofline of this work in seconds; no implementation is much faster."""
        return max(moved_bytes / self.copy, flops / (self.fp32 if dtype == "fp32" else self.bf16))


def measure_limits(device: torch.device, *, side: int, copy_bytes: int) -> GpuLimits:
    """Return the rates of this device, measured on random data, since products of zeros run
    faster.
    """
    source = torch.empty(copy_bytes // 4, device=device).normal_()
    target = torch.empty_like(source)
    work = {"copy": GpuWork([lambda: discard(target.copy_(source))], graph=True)}
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        out = torch.empty_like(a)
        work[name] = GpuWork(
            [lambda a=a, b=b, out=out: discard(torch.mm(a, b, out=out))],  # type: ignore[misc]
            graph=True,
        )
    timed = interleaved(work, rounds=5)
    product = 2 * side**3
    return GpuLimits(
        2 * copy_bytes / timed["copy"].median,
        product / timed["bf16"].median,
        product / timed["fp32"].median,
    )


def discard(_: object) -> None:
    """Ignore the argument. A lambda can call a function inside `discard` to drop its result."""
