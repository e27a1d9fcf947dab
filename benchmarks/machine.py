"""The machine that is measured on: its types, threads and instruction set, and its roofline.

The roofline of a piece of work is the larger of two times: its flops divided by the peak, and its
bytes divided by the bandwidth. Our own microbenchmarks measure both rates in the same run as the
work. The peak is the speed of a loop on registers, with the fastest multiplication that the
instruction set in use has for the type. The bandwidth is the speed of reading a working set of the
work's size. Other programs share the memory and the cores, so these rates change by half from one
second to the next; where the rounds of a cell include the microbenchmarks, their medians count.

Without the compiled kernels, benchmarks measure the reference implementation, and torch measures
the roofline.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks import gpu_timing
from benchmarks.timing import interleaved
from vlora import backends, native
from vlora.atmm import tiles
from vlora.atmm.cpu import Cpu
from vlora.atmm.search.timing import Timing
from vlora.config import Options
from vlora.cores import split_threads
from vlora.device import host_memory

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""Storage types by their names in grids and options."""
COLD_BYTES = Cpu.here().cold_bytes
"""Size in bytes of a working set that is larger than the caches."""
SECONDS = 0.06
"""Duration of one microbenchmark."""
INTERVAL_SECONDS = 1.0
"""Minimum time from one repetition of a microbenchmark to the next."""
GPU_SIDE, GPU_BYTES = 8192, 1 << 30
"""Side of the products and size of the copy that measure the limits of a GPU."""
READ, MULTIPLY = "read", "multiply"


def is_compiled() -> bool:
    """Return whether the compiled kernels are available."""
    return backends.backend_of("atmm") == "cpu"


def set_threads(count: int) -> None:
    """Set torch's number of threads, which the kernels use as well."""
    torch.set_num_threads(count)


def server_threads() -> int:
    """Return the default number of threads of a server's engine."""
    return split_threads(Options()).engine


def has_bf16_instructions() -> bool:
    """Return whether the instruction set in use multiplies bf16."""
    if is_compiled():
        return native.kernels().runtime.isa("bf16") in ("amx", "avx512_bf16")
    return "avx512_bf16" in Path("/proc/cpuinfo").read_text().split()


def operator_meta() -> dict[str, Any]:
    """Return metadata: the measured implementation, and its number of tile configurations."""
    if not is_compiled():
        return {"atmm": "reference"}
    return {
        "atmm": "cpu",
        "isa": {dtype: tiles.current_isa(dtype) for dtype in DTYPES},
        "configs": {dtype: len(tiles.configs("apply", dtype)) for dtype in DTYPES},
    }


@dataclass
class Roofline:
    """Peak in flop/s by type, and bandwidth in bytes/s by working set, for one thread count.

    Each rate is measured on first use, then again at intervals during the run. The best value
    counts, because a momentary disturbance must not lower the limit of a kernel.

    measure_peak: function that takes a type and a number of seconds, and returns flop/s.
    measure_bandwidth: function that takes the bytes of a working set and a number of seconds, and
        returns bytes/s.
    """

    measure_peak: Callable[[str, float], float]
    measure_bandwidth: Callable[[int, float], float]
    cold_bytes: int = COLD_BYTES
    _peaks: dict[str, float] = field(default_factory=dict)
    _bandwidths: dict[int, float] = field(default_factory=dict)
    _next: int = 0
    _last_time: float = 0.0

    def peak(self, dtype: str) -> float:
        """Return the best flop/s measured so far."""
        if dtype not in self._peaks:
            self._peaks[dtype] = self.measure_peak(dtype, SECONDS)
        return self._peaks[dtype]

    def fastest_type(self, dtype: str) -> str:
        """Return `dtype`, or fp32 if the machine multiplies fp32 faster."""
        return max(("fp32", dtype), key=self.peak)

    def bandwidth(self, size: int, *, cold: bool) -> float:
        """Return the best bytes/s measured so far for a working set of `size` bytes."""
        bucket = self.cold_bytes if cold else _rounded_up(size)
        if bucket not in self._bandwidths:
            self._bandwidths[bucket] = self.measure_bandwidth(bucket, SECONDS)
        return self._bandwidths[bucket]

    def remeasure_if_due(self) -> None:
        """Measure one rate again if INTERVAL_SECONDS have passed. The rates take turns."""
        keys: list[str | int] = [*self._peaks, *self._bandwidths]
        if not keys or time.monotonic() - self._last_time < INTERVAL_SECONDS:
            return
        key = keys[self._next % len(keys)]
        self._next += 1
        if isinstance(key, str):
            self._peaks[key] = max(self._peaks[key], self.measure_peak(key, SECONDS))
        else:
            bandwidth = self.measure_bandwidth(key, SECONDS)
            self._bandwidths[key] = max(self._bandwidths[key], bandwidth)
        self._last_time = time.monotonic()

    def seconds(
        self,
        flops: float,
        parts: Iterable[tuple[int, bool]],
        dtype: str,
        cold_rate: float | None = None,
        peak: float | None = None,
    ) -> float:
        """Return the limit in seconds for work that takes `flops` and moves `parts`.

        parts: for each part, its number of bytes and whether it is cold. All parts that are not
            cold share the caches and form one working set.
        cold_rate, peak: rates of memory and of multiplying, timed in the same rounds as the work.
        """
        parts = list(parts)
        warm_bytes = sum(size for size, cold in parts if not cold)
        moving = sum(
            size / (cold_rate or self.bandwidth(size, cold=True))
            if cold
            else size / self.bandwidth(warm_bytes, cold=False)
            for size, cold in parts
        )
        return max(flops / (peak or self.peak(dtype)), moving)

    def as_meta(self) -> dict[str, dict[str, float]]:
        """Return the measured figures for the JSON file."""
        return {
            "peak_gflops": {name: round(value / 1e9, 1) for name, value in self._peaks.items()},
            "read_gb_per_s": {
                f"{size >> 10} KiB": round(value / 1e9, 1)
                for size, value in sorted(self._bandwidths.items())
            },
        }


def roofline(threads: int, device: str = "cpu") -> Roofline:
    """Return the roofline of a number of threads, or of a GPU, where threads do not matter."""
    if device != "cpu":
        limits = gpu_timing.measure_limits(
            torch.device(device), side=GPU_SIDE, copy_bytes=GPU_BYTES
        )
        return Roofline(lambda dtype, _: float(getattr(limits, dtype)), lambda *_: limits.copy)
    if not is_compiled():
        return Roofline(_torch_peak, _torch_bandwidth)
    runtime = native.kernels().runtime
    return Roofline(
        lambda dtype, seconds: float(runtime.peak(dtype, seconds, threads)),
        lambda size, seconds: float(runtime.bandwidth(size, seconds, threads)),
    )


@dataclass(frozen=True)
class Rates:
    """Rates of the machine in the rounds of a measurement, one sample per round.

    reads: bytes/s read from memory.
    peaks: flop/s of multiplications.

    Both are empty if they were not measured.
    """

    reads: tuple[float, ...] = ()
    peaks: tuple[float, ...] = ()

    @property
    def read(self) -> float | None:
        return median(self.reads) if self.reads else None

    @property
    def peak(self) -> float | None:
        return median(self.peaks) if self.peaks else None


def timed_with_rates(
    calls: Mapping[str, Callable[[], None]],
    dtype: str,
    multiply_rounds: int,
    read_bytes: int,
    **options: Any,
) -> tuple[dict[str, Timing], Rates]:
    """Time calls as `interleaved` does, together with the microbenchmarks of memory and cores.

    Without the compiled kernels, no microbenchmark is available.

    dtype: type of the multiplications.
    multiply_rounds: iterations of the multiply loop per round.
    read_bytes: bytes read per round, from memory that should no longer be in the caches, at most
        COLD_BYTES. With 0, nothing is read.
    """
    if not is_compiled():
        return interleaved(calls, **options), Rates()
    runtime, threads = native.kernels().runtime, torch.get_num_threads()
    size = min(read_bytes, COLD_BYTES)
    extra: dict[str, Callable[[], None]] = {
        MULTIPLY: lambda: gpu_timing.discard(runtime.multiply(dtype, multiply_rounds, threads))
    }
    if read_bytes:
        start = _cold_memory().data_ptr()
        addresses = itertools.cycle(range(start, start + 2 * COLD_BYTES - size + 1, size))
        extra[READ] = lambda: runtime.read(next(addresses), size, threads)
    timings = interleaved({**calls, **extra}, **options)
    flops = float(runtime.multiply(dtype, multiply_rounds, threads))
    peaks = tuple(flops / seconds for seconds in timings.pop(MULTIPLY).samples)
    reads = tuple(size / s for s in timings.pop(READ).samples) if read_bytes else ()
    return timings, Rates(reads, peaks)


def status_bytes(name: str, pid: int | str = "self") -> int:
    """Return a field of a process's status, such as `VmRSS` (resident) or `VmHWM` (its peak)."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


@cache
def _cold_memory() -> torch.Tensor:
    """Return memory of twice COLD_BYTES, which all cells of a run share."""
    return host_memory.hugepage_zeros(COLD_BYTES // 2, dtype=torch.float32).fill_(1.0)


def _torch_peak(dtype: str, seconds: float) -> float:
    side = 768
    a = torch.randn(side, side).to(DTYPES[dtype])
    return 2 * side**3 * _best_rate(lambda: torch.mm(a, a), seconds)


def _torch_bandwidth(size: int, seconds: float) -> float:
    values = torch.zeros(max(1, size // 4))
    return size * _best_rate(lambda: values.sum(), seconds)


def _best_rate(call: Callable[[], object], seconds: float) -> float:
    """Call a function for `seconds`. Return 1 / (duration of the fastest call in seconds)."""
    best = 0.0
    call()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        started = time.perf_counter()
        call()
        best = max(best, 1 / (time.perf_counter() - started))
    return best


def _rounded_up(size: int) -> int:
    """Return a size rounded up to one of four values per power of two, at least 16 KiB."""
    octave = 1 << max(14, size.bit_length() - 1)
    step = octave // 4
    return -(-size // step) * step if size > octave else octave
