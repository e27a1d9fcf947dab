"""The roofline of this machine, measured in the run that is judged by it.

A cell's limit is the larger of its flops over the peak and its bytes over the bandwidth, both by
microbenchmarks of our own: a register-only FMA loop of the best instruction set, and reads of a
working set as large as the cell's (cold: larger than the caches).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

COLD_BYTES = 256 << 20
"""A working set that no cache of a present CPU holds."""
SECONDS = 0.08
"""Of one microbenchmark."""


@dataclass
class Limits:
    """peak(dtype) in flop/s and bandwidth(bytes) in bytes/s, for the thread count of the run.

    Measured when first asked for, then kept; `again` takes the better of old and new, so that a
    moment's disturbance cannot lower the limit that a kernel is judged by.
    """

    measure_peak: Callable[[str, float], float]
    measure_bandwidth: Callable[[int, float], float]
    _peaks: dict[str, float] = field(default_factory=dict)
    _bandwidths: dict[int, float] = field(default_factory=dict)

    def peak(self, dtype: str) -> float:
        if dtype not in self._peaks:
            self._peaks[dtype] = self.measure_peak(dtype, SECONDS)
        return self._peaks[dtype]

    def bandwidth(self, size: int, *, cold: bool) -> float:
        bucket = COLD_BYTES if cold else 1 << max(14, (size - 1).bit_length())
        if bucket not in self._bandwidths:
            self._bandwidths[bucket] = self.measure_bandwidth(bucket, SECONDS)
        return self._bandwidths[bucket]

    def again(self) -> None:
        """Measure once more all that was asked for."""
        for dtype, value in self._peaks.items():
            self._peaks[dtype] = max(value, self.measure_peak(dtype, SECONDS))
        for size, value in self._bandwidths.items():
            self._bandwidths[size] = max(value, self.measure_bandwidth(size, SECONDS))

    def seconds(self, flops: float, parts: Iterable[tuple[int, bool]], dtype: str) -> float:
        """The limit for work of `flops` that moves parts of (bytes, cold).

        Warm parts share the caches: the bandwidth is that of a working set of all of them.
        """
        parts = list(parts)
        together = sum(size for size, cold in parts if not cold)
        moving = sum(
            size / self.bandwidth(size if cold else together, cold=cold) for size, cold in parts
        )
        return max(flops / self.peak(dtype), moving)

    def as_meta(self) -> dict[str, dict[str, float]]:
        return {
            "peak_gflops": {name: round(value / 1e9, 1) for name, value in self._peaks.items()},
            "read_gb_per_s": {
                f"{size >> 10} KiB": round(value / 1e9, 1)
                for size, value in sorted(self._bandwidths.items())
            },
        }
