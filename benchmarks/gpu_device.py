"""The GPU of the benchmarks that compare operators on it: what it is and what it reaches."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vlora.atmm.search.gpu_timing import GpuWork, interleaved

SIDE, COPY_BYTES = 8192, 2 << 30
"""Side of the products and size of the copy with which the device's rates are measured."""


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


def measure_limits(device: torch.device) -> GpuLimits:
    """Return the rates of this device, measured on random data, since products of zeros run
    faster.
    """
    size = min(COPY_BYTES, torch.cuda.get_device_properties(device).total_memory // 8 // 4 * 4)
    source = torch.empty(size // 4, device=device).normal_()
    target = torch.empty_like(source)
    work = {"copy": GpuWork([lambda: discard(target.copy_(source))], graph=True)}
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        a, b = (torch.randn(SIDE, SIDE, device=device).to(dtype) for _ in range(2))
        out = torch.empty_like(a)
        work[name] = GpuWork(
            [lambda a=a, b=b, out=out: discard(torch.mm(a, b, out=out))],  # type: ignore[misc]
            graph=True,
        )
    timed = interleaved(work, rounds=5)
    product = 2 * SIDE**3
    return GpuLimits(
        2 * size / timed["copy"].median,
        product / timed["bf16"].median,
        product / timed["fp32"].median,
    )


def device_limits() -> GpuLimits:
    """Return the rates that the current GPU reaches at present."""
    return measure_limits(torch.device("cuda", torch.cuda.current_device()))


def discard(_: object) -> None:
    """Ignore the argument. A lambda can call a function inside `discard` to drop its result."""


def parser_of(module: str, description: str | None) -> argparse.ArgumentParser:
    """Return the parser of one benchmark on a GPU, which has the option --json."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{module}", description=description)
    parser.add_argument("--json", type=Path, metavar="FILE", help="file of the results")
    return parser


def write_json(path: Path | None, value: dict[str, Any]) -> None:
    """Replace a file of results, so that it is complete even if this process is ended."""
    if path is not None:
        draft = path.with_suffix(".draft")
        draft.write_text(json.dumps(value, indent=1) + "\n")
        draft.replace(path)


def main() -> None:
    given = parser_of("gpu_device", __doc__).parse_args()
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    summary: dict[str, Any] = {
        "device": properties.name,
        "sm": properties.major * 10 + properties.minor,
        "multiprocessors": properties.multi_processor_count,
        "l2_mib": properties.L2_cache_size >> 20,
        "memory_gib": properties.total_memory >> 30,
        "torch": torch.__version__,
    }
    write_json(given.json, {"summary": summary})
    limits = device_limits()
    summary |= {
        "copy_tb_per_s": round(limits.copy / 1e12, 3),
        "bf16_tflops": round(limits.bf16 / 1e12, 1),
        "fp32_tflops": round(limits.fp32 / 1e12, 1),
    }
    write_json(given.json, {"summary": summary})
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
