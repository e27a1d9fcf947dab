"""The machine that is measured on: its threads, timing in interleaved rounds, and its roofline.

The roofline of a piece of work is the larger of two times: its flops divided by the peak, and its
bytes divided by the bandwidth. Our own microbenchmarks measure both rates in the same run as the
work. The peak is the speed of a loop on registers, with the fastest multiplication that the
instruction set in use has for the type. The bandwidth is the speed of reading a working set of the
work's size. Other programs share the memory and the cores, so these rates change by half from one
second to the next; where the rounds of a cell include the microbenchmarks, their medians count.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks import gpu_device
from vlora import backends, native
from vlora.atmm import tiles
from vlora.atmm.cpu import Cpu
from vlora.atmm.search.timing import Timing, rotated
from vlora.config import Options
from vlora.cores import split_threads
from vlora.device import host_memory

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""Storage types by their names in grids and options."""
COLD_BYTES = Cpu.here().cold_bytes
"""Size in bytes of a working set that is larger than the caches."""
SECONDS, INTERVAL_SECONDS = 0.06, 1.0
"""Duration of one microbenchmark, and minimum time from one of its repetitions to the next."""
MIN_SAMPLE_SECONDS = 4e-4
"""Minimum duration of a sample. Shorter samples would mostly measure the clock and the loop."""
MIN_SAMPLES = 3
WARM_CALLS = 3
"""Number of calls before a warm sample. A last-level victim cache needs several passes to fill."""
LONG_SECONDS, VERY_LONG_SECONDS = 5e-3, 4e-2
"""Durations of a call. From LONG_SECONDS on, one warm call before a sample is enough. From
VERY_LONG_SECONDS on, none is needed: such calls move many times the size of the caches."""
READ, MULTIPLY = "read", "multiply"


def interleaved(
    candidates: Mapping[str, Callable[[], None]],
    *,
    rounds: int,
    warm: bool,
    budget: float,
    lead: bool = False,
) -> dict[str, Timing]:
    """Time all candidates, one sample of each per round, in an order that rotates.

    warm: whether untimed calls before each sample load the candidate's data into the caches again,
        since other candidates ran in between.
    lead: whether one call precedes each sample, unless a call takes LONG_SECONDS or more. This is
        for candidates that read new data at each call: the code is then in the caches and the
        threads are awake, but the data are not in the caches, as within a step.
    budget: seconds per candidate. A slow candidate gets fewer samples, at least MIN_SAMPLES,
        spread over all rounds.
    """
    calls, warm_calls, sample_counts = {}, {}, {}
    for name, call in candidates.items():
        estimate = _seconds(call, 1)
        if estimate < budget:  # Otherwise the first call's overhead is a small part of the time.
            estimate = _seconds(call, 1)
        calls[name] = max(1, round(MIN_SAMPLE_SECONDS / max(estimate, 1e-9)))
        warm_calls[name] = _warm_calls(estimate) if warm else int(lead and estimate < LONG_SECONDS)
        cost = (calls[name] + warm_calls[name]) * estimate
        sample_counts[name] = min(rounds, max(MIN_SAMPLES, int(budget / max(cost, 1e-9))))
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    for number in range(rounds):
        for name in rotated(list(candidates), number):
            if len(samples[name]) * rounds > number * sample_counts[name]:
                continue
            for _ in range(warm_calls[name]):
                candidates[name]()
            samples[name].append(_seconds(candidates[name], calls[name]))
    return {name: Timing(tuple(values)) for name, values in samples.items()}


def _warm_calls(seconds: float) -> int:
    if seconds < LONG_SECONDS:
        return WARM_CALLS
    return 1 if seconds < VERY_LONG_SECONDS else 0


def _seconds(call: Callable[[], None], count: int) -> float:
    """Return the seconds per call, over `count` calls in a row."""
    started = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - started) / count


def medians(timings: Mapping[str, Timing], unit: float) -> dict[str, float]:
    """Return the median of each timing, multiplied by `unit` (1e3 for ms)."""
    return {name: timing.median * unit for name, timing in timings.items()}


def noises(timings: Mapping[str, Timing]) -> dict[str, float]:
    return {name: timing.noise for name, timing in timings.items()}


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
    return is_compiled() and native.kernels().runtime.isa("bf16") in ("amx", "avx512_bf16")


def operator_meta() -> dict[str, Any]:
    """Return metadata: the measured implementation, and its number of tile configurations."""
    if not is_compiled():
        return {"atmm": "reference"}
    return {
        "atmm": "cpu",
        "isa": {dtype: tiles.current_isa(dtype) for dtype in DTYPES},
        "configs": {dtype: len(tiles.configs("apply", dtype)) for dtype in DTYPES},
    }


def cpu_meta() -> dict[str, str]:
    """Return vendor, family, model and name of the CPU. A virtual machine may hide the name."""
    keys = {"vendor_id", "cpu family", "model", "model name", "cache size"}
    pairs = (line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs if key.strip() in keys}


def status_bytes(name: str, pid: int | str = "self") -> int:
    """Return a field of a process's status, such as `VmRSS` (resident) or `VmHWM` (its peak)."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


@dataclass
class Roofline:
    """Peak in flop/s by type, and bandwidth in bytes/s by working set, for one thread count.

    Each rate is measured on first use, then again when it is used after INTERVAL_SECONDS. The best
    value counts, because a momentary disturbance must not lower the limit of a kernel.

    measure_peak: function that takes a type and a number of seconds, and returns flop/s.
    measure_bandwidth: function that takes the bytes of a working set and a number of seconds, and
        returns bytes/s.
    """

    measure_peak: Callable[[str, float], float]
    measure_bandwidth: Callable[[int, float], float]
    cold_bytes: int = COLD_BYTES
    _rates: dict[str | int, tuple[float, float]] = field(default_factory=dict)
    """Best rate so far and time of its last measurement, by type or size of a working set."""

    def peak(self, dtype: str) -> float:
        """Return the best flop/s measured so far."""
        return self._best(dtype, self.measure_peak)

    def fastest_type(self, dtype: str) -> str:
        """Return `dtype`, or fp32 if the machine multiplies fp32 faster."""
        return max(("fp32", dtype), key=self.peak)

    def bandwidth(self, size: int, *, cold: bool) -> float:
        """Return the best bytes/s measured so far for a working set of `size` bytes."""
        return self._best(self.cold_bytes if cold else _rounded_up(size), self.measure_bandwidth)

    def _best(self, key: Any, measure: Callable[[Any, float], float]) -> float:
        best, last = self._rates.get(key, (0.0, -math.inf))
        if time.monotonic() - last >= INTERVAL_SECONDS:
            best = max(best, measure(key, SECONDS))
            self._rates[key] = best, time.monotonic()
        return best

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
        peaks = {key: rate for key, (rate, _) in self._rates.items() if isinstance(key, str)}
        sizes = {key: rate for key, (rate, _) in self._rates.items() if isinstance(key, int)}
        return {
            "peak_gflops": {name: round(rate / 1e9, 1) for name, rate in peaks.items()},
            "read_gb_per_s": {
                f"{size >> 10} KiB": round(rate / 1e9, 1) for size, rate in sorted(sizes.items())
            },
        }


def roofline(threads: int, device: str = "cpu") -> Roofline:
    """Return the roofline of a number of threads, or of a GPU, where threads do not matter."""
    if device != "cpu":
        limits = gpu_device.measure_limits(torch.device(device))
        return Roofline(lambda dtype, _: float(getattr(limits, dtype)), lambda *_: limits.copy)
    runtime = native.kernels().runtime
    return Roofline(
        lambda dtype, seconds: float(runtime.peak(dtype, seconds, threads)),
        lambda size, seconds: float(runtime.bandwidth(size, seconds, threads)),
    )


@dataclass(frozen=True)
class Rates:
    """Rates of the machine in the rounds of a measurement, one sample per round.

    reads: bytes/s read from memory; empty if nothing was read.
    peaks: flop/s of multiplications.
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

    dtype: type of the multiplications; "int8" for products of bytes.
    multiply_rounds: iterations of the multiply loop per round.
    read_bytes: bytes read per round, from memory that should no longer be in the caches, at most
        COLD_BYTES. With 0, nothing is read.
    """
    runtime, threads = native.kernels().runtime, torch.get_num_threads()
    size = min(read_bytes, COLD_BYTES)
    multiply = partial(runtime.multiply, dtype, multiply_rounds, threads)
    if dtype == "int8":
        multiply = partial(native.kernels().quantized.multiply_bytes, multiply_rounds, threads)
    extra: dict[str, Callable[[], None]] = {MULTIPLY: lambda: gpu_device.discard(multiply())}
    if read_bytes:
        start = _cold_memory().data_ptr()
        addresses = itertools.cycle(range(start, start + 2 * COLD_BYTES - size + 1, size))
        extra[READ] = lambda: runtime.read(next(addresses), size, threads)
    timings = interleaved({**calls, **extra}, **options)
    flops = float(multiply())
    peaks = tuple(flops / seconds for seconds in timings.pop(MULTIPLY).samples)
    reads = tuple(size / s for s in timings.pop(READ).samples) if read_bytes else ()
    return timings, Rates(reads, peaks)


@cache
def _cold_memory() -> torch.Tensor:
    """Return memory of twice COLD_BYTES, which all cells of a run share."""
    return host_memory.hugepage_zeros(COLD_BYTES // 2, dtype=torch.float32).fill_(1.0)


def _rounded_up(size: int) -> int:
    """Return a size rounded up to one of four values per power of two, at least 16 KiB."""
    octave = 1 << max(14, size.bit_length() - 1)
    step = octave // 4
    return -(-size // step) * step if size > octave else octave
