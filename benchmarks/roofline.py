"""The roofline of this machine, measured in the same run as the work that it is compared with.

The limit of a cell is the larger of two times: its flops divided by the peak, and its bytes divided
by the bandwidth. Our own microbenchmarks measure both rates. The peak is the speed of a loop on
registers, with the fastest multiplication that the instruction set in use has for the cell's type.
The bandwidth is the speed of reading a working set of the cell's size. For cold cells, the working
set should be larger than the caches (`Cpu.cold_bytes`).

Other programs share the memory and the cores, so these rates change by half from one second to the
next. Where the rounds of a cell include the microbenchmarks, the medians of these rounds count.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from vlora.atmm.cpu import Cpu

SECONDS = 0.06
"""Duration of one microbenchmark."""
INTERVAL_SECONDS = 1.0
"""Minimum time from one repetition of a microbenchmark to the next."""


@dataclass
class Roofline:
    """Peak in flop/s by type, and bandwidth in bytes/s by working set, for one thread count.

    Each rate is measured on first use, then again at intervals during the run. The best value
    counts, because a momentary disturbance must not lower the limit of a kernel.
    """

    measure_peak: Callable[[str, float], float]
    """Function that takes a type and a number of seconds, and returns flop/s."""
    measure_bandwidth: Callable[[int, float], float]
    """Function that takes the size of a working set in bytes and a number of seconds, and returns
    bytes/s.
    """
    cold_bytes: int = field(default_factory=lambda: Cpu.here().cold_bytes)
    """Size in bytes of the working set that is read to measure the bandwidth of memory."""
    _peaks: dict[str, float] = field(default_factory=dict)
    _bandwidths: dict[int, float] = field(default_factory=dict)
    _next: int = 0
    _last_time: float = 0.0

    def peak(self, dtype: str) -> float:
        """Return the best flop/s measured so far."""
        if dtype not in self._peaks:
            self._peaks[dtype] = self.measure_peak(dtype, SECONDS)
        return self._peaks[dtype]

    def bandwidth(self, size: int, *, cold: bool) -> float:
        """Return the best bytes/s measured so far for a working set of `size` bytes."""
        bucket = self.cold_bytes if cold else _rounded_up(size)
        if bucket not in self._bandwidths:
            self._bandwidths[bucket] = self.measure_bandwidth(bucket, SECONDS)
        return self._bandwidths[bucket]

    def remeasure_if_due(self) -> None:
        """Measure one rate again if INTERVAL_SECONDS have passed. The rates take turns."""
        if time.monotonic() - self._last_time < INTERVAL_SECONDS:
            return
        keys: list[str | int] = [*self._peaks, *self._bandwidths]
        if not keys:
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
        cold_rate: rate of memory in bytes/s, timed in the same rounds as the work.
        peak: rate of multiplying in flop/s, timed in the same rounds as the work.
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


def _rounded_up(size: int) -> int:
    """Return a size rounded up to one of four values per power of two, at least 16 KiB."""
    octave = 1 << max(14, size.bit_length() - 1)
    step = octave // 4
    return -(-size // step) * step if size > octave else octave
