"""The GPU of the benchmarks that compare operators on it: what it is and what it reaches."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_timing import GpuLimits, measure_limits

SIDE, COPY_BYTES = 8192, 2 << 30
"""Side of the products and size of the copy with which the device's rates are measured."""


def device_limits() -> GpuLimits:
    """Return the rates that the current GPU reaches at present."""
    device = torch.device("cuda", torch.cuda.current_device())
    memory = torch.cuda.get_device_properties(device).total_memory
    size = min(COPY_BYTES, memory // 8 // 4 * 4)
    return measure_limits(device, side=SIDE, copy_bytes=size)


def write_json(path: Path | None, value: dict[str, Any]) -> None:
    """Replace a file of results, so that it is complete even if this process is ended."""
    if path is not None:
        draft = path.with_suffix(".draft")
        draft.write_text(json.dumps(value, indent=1) + "\n")
        draft.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_device", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="file of the results")
    given = parser.parse_args()
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
