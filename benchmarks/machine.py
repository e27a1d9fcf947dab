"""Properties of the machine for the benchmarks: threads, instruction set, microbenchmarks.

Without the compiled kernels, benchmarks measure the reference implementation, and torch measures
the roofline.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from benchmarks import gpu_timing
from benchmarks.dtypes import DTYPES
from benchmarks.roofline import Roofline
from vlora import backends, native
from vlora.atmm.cpu import Cpu
from vlora.atmm.search.timing import Timing
from vlora.device import host_memory

READ, MULTIPLY = "read", "multiply"
"""Names of the microbenchmarks of `ConcurrentRates` among the timings of a cell."""
GPU_SIDE, GPU_BYTES = 8192, 1 << 30
"""Side of the products and size of the copy that measure the limits of a GPU."""


def is_compiled() -> bool:
    """Return whether the compiled kernels are available."""
    return backends.backend_of("atmm") == "cpu"


def set_threads(count: int) -> None:
    """Set torch's number of threads, which the kernels use as well."""
    torch.set_num_threads(count)


def use_isa(name: str) -> None:
    """Use one instruction set for the rest of the process.

    Raises ValueError if this CPU does not have it.
    """
    native.kernels().runtime.request_isa(name)


def has_bf16_instructions() -> bool:
    """Return whether the instruction set in use multiplies bf16."""
    if is_compiled():
        return native.kernels().runtime.isa("bf16") in ("amx", "avx512_bf16")
    return "avx512_bf16" in Path("/proc/cpuinfo").read_text().split()


def operator_meta() -> dict[str, Any]:
    """Return metadata: the measured implementation, and its number of tile configurations."""
    if not is_compiled():
        return {"atmm": "reference"}
    from vlora.atmm import tiles

    return {
        "atmm": "cpu",
        "isa": {dtype: tiles.current_isa(dtype) for dtype in DTYPES},
        "configs": {dtype: len(tiles.configs("apply", dtype)) for dtype in DTYPES},
    }


@dataclass(frozen=True)
class ConcurrentRates:
    """Microbenchmarks that run in the same rounds as the work, with torch's number of threads.

    They show the rates of the memory and the cores during the measurement. Without the compiled
    kernels, no microbenchmark is available.

    dtype: type of the multiplications.
    rounds: iterations of the multiply loop per call.
    read_bytes: bytes read per call, from memory that should no longer be in the caches. A call
        reads at most half of `_cold_memory()`. With 0, nothing is read.
    """

    dtype: str
    rounds: int
    read_bytes: int

    @property
    def _bytes(self) -> int:
        return min(self.read_bytes, _cold_bytes() // 2)

    def calls(self) -> dict[str, Callable[[], None]]:
        """Return the microbenchmarks to interleave with the work, by name."""
        if not is_compiled():
            return {}
        runtime = native.kernels().runtime

        def multiply() -> None:
            runtime.multiply(self.dtype, self.rounds, torch.get_num_threads())

        calls: dict[str, Callable[[], None]] = {}
        if self.read_bytes:
            values, size = _cold_memory(), self._bytes
            addresses = itertools.cycle(
                range(values.data_ptr(), values.data_ptr() + _cold_bytes() - size + 1, size)
            )

            def read() -> None:
                runtime.read(next(addresses), size, torch.get_num_threads())

            calls[READ] = read
        return calls | {MULTIPLY: multiply}

    def rates(self, timings: Mapping[str, Timing]) -> tuple[float | None, float | None]:
        """Return the medians of bytes/s and flop/s, with None for a rate that was not measured."""
        if MULTIPLY not in timings:
            return None, None
        runtime = native.kernels().runtime
        flops = float(runtime.multiply(self.dtype, self.rounds, torch.get_num_threads()))
        read = self._bytes / timings[READ].median if READ in timings else None
        return read, flops / timings[MULTIPLY].median


def without_rates(timings: Mapping[str, Timing]) -> dict[str, Timing]:
    """Return only the timings of the work, without those of the microbenchmarks."""
    return {name: timing for name, timing in timings.items() if name not in (READ, MULTIPLY)}


def _cold_bytes() -> int:
    return 2 * Cpu.here().cold_bytes


@cache
def _cold_memory() -> torch.Tensor:
    """Return memory of `_cold_bytes()` bytes, which all cells of a run share."""
    return host_memory.hugepage_zeros(_cold_bytes() // 4, dtype=torch.float32).fill_(1.0)


class RooflineByThreads:
    """The roofline for each thread count of a run, measured at first use.

    device: "cpu", or a GPU, whose roofline does not depend on threads.
    """

    def __init__(self, device: str = "cpu") -> None:
        self._device = device
        self._rooflines: dict[int, Roofline] = {}

    def __call__(self, threads: int) -> Roofline:
        if threads not in self._rooflines:
            on_cpu = self._device == "cpu"
            roofline = _roofline(threads) if on_cpu else _gpu_roofline(self._device)
            self._rooflines[threads] = roofline
        return self._rooflines[threads]

    def as_meta(self) -> dict[str, Any]:
        """Return the measured figures of each thread count for the JSON file."""
        return {
            f"{count} threads": roofline.as_meta() for count, roofline in self._rooflines.items()
        }


def _roofline(threads: int) -> Roofline:
    if not is_compiled():
        return Roofline(_torch_peak, _torch_bandwidth)
    runtime = native.kernels().runtime
    return Roofline(
        lambda dtype, seconds: float(runtime.peak(dtype, seconds, threads)),
        lambda size, seconds: float(runtime.bandwidth(size, seconds, threads)),
    )


def _gpu_roofline(device: str) -> Roofline:
    limits = gpu_timing.measure_limits(torch.device(device), side=GPU_SIDE, copy_bytes=GPU_BYTES)
    return Roofline(lambda dtype, _: float(getattr(limits, dtype)), lambda *_: limits.copy)


def _torch_peak(dtype: str, seconds: float) -> float:
    side = 768
    a = torch.randn(side, side).to(DTYPES[dtype])
    return 2 * side**3 * _best_rate(lambda: torch.mm(a, a), seconds)


def _torch_bandwidth(size: int, seconds: float) -> float:
    values = torch.zeros(max(1, size // 4))
    return size * _best_rate(lambda: values.sum(), seconds)


def _best_rate(call: Callable[[], object], seconds: float) -> float:
    """Call a function repeatedly for `seconds`. Return 1 / (duration of the fastest call in
    seconds).
    """
    best = 0.0
    call()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        started = time.perf_counter()
        call()
        best = max(best, 1 / (time.perf_counter() - started))
    return best
