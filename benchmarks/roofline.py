"""The roofline of this machine, measured in the run that is judged by it.

A cell's limit is the larger of its flops over the peak and its bytes over the bandwidth, both by
microbenchmarks of our own: a register-only loop of the fastest way that the instruction set in use
has to multiply the cell's type (the peaks by which instruction sets are ordered), and reads of a
working set as large as the cell's (cold: larger than the caches). Memory and cores are shared with
whoever else is on the machine, and what they give changes by half from one second to the next:
where a cell's own rounds have timed them, the medians of those rounds count, as for the work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from vlora.atmm.device import Device

SECONDS = 0.06
"""Of one microbenchmark."""
EVERY = 1.0
"""Seconds between two repeats of microbenchmarks."""


@dataclass
class Limits:
    """peak(dtype) in flop/s and bandwidth(bytes) in bytes/s, for the thread count of the run.

    Measured when first asked for, then again at intervals through the run, the best kept: a
    moment's disturbance must not lower the limit that a kernel is judged by.
    """

    measure_peak: Callable[[str, float], float]
    measure_bandwidth: Callable[[int, float], float]
    cold_bytes: int = field(default_factory=lambda: Device.here().cold_bytes)
    """A working set that this machine's caches do not hold."""
    _peaks: dict[str, float] = field(default_factory=dict)
    _bandwidths: dict[int, float] = field(default_factory=dict)
    _turn: int = 0
    _last: float = 0.0

    def peak(self, dtype: str) -> float:
        if dtype not in self._peaks:
            self._peaks[dtype] = self.measure_peak(dtype, SECONDS)
        return self._peaks[dtype]

    def bandwidth(self, size: int, *, cold: bool) -> float:
        bucket = self.cold_bytes if cold else _rounded_up(size)
        if bucket not in self._bandwidths:
            self._bandwidths[bucket] = self.measure_bandwidth(bucket, SECONDS)
        return self._bandwidths[bucket]

    def again_if_due(self) -> None:
        """Measure the oldest figure once more, if EVERY seconds have passed since the last."""
        if time.monotonic() - self._last < EVERY:
            return
        known: list[str | int] = [*self._peaks, *self._bandwidths]
        if not known:
            return
        turn = known[self._turn % len(known)]
        self._turn += 1
        if isinstance(turn, str):
            self._peaks[turn] = max(self._peaks[turn], self.measure_peak(turn, SECONDS))
        else:
            found = self.measure_bandwidth(turn, SECONDS)
            self._bandwidths[turn] = max(self._bandwidths[turn], found)
        self._last = time.monotonic()

    def seconds(
        self,
        flops: float,
        parts: Iterable[tuple[int, bool]],
        dtype: str,
        cold_rate: float | None = None,
        peak: float | None = None,
    ) -> float:
        """The limit for work of `flops` that moves parts of (bytes, cold).

        Warm parts share the caches: the bandwidth is that of a working set of all of them.
        cold_rate: bytes/s from memory, and peak: flop/s, timed beside the work itself.
        """
        parts = list(parts)
        together = sum(size for size, cold in parts if not cold)
        moving = sum(
            size / (cold_rate or self.bandwidth(size, cold=True))
            if cold
            else size / self.bandwidth(together, cold=False)
            for size, cold in parts
        )
        return max(flops / (peak or self.peak(dtype)), moving)

    def as_meta(self) -> dict[str, dict[str, float]]:
        return {
            "peak_gflops": {name: round(value / 1e9, 1) for name, value in self._peaks.items()},
            "read_gb_per_s": {
                f"{size >> 10} KiB": round(value / 1e9, 1)
                for size, value in sorted(self._bandwidths.items())
            },
        }


def _rounded_up(size: int) -> int:
    """To a quarter of an octave, from 16 KiB on."""
    octave = 1 << max(14, size.bit_length() - 1)
    step = octave // 4
    return -(-size // step) * step if size > octave else octave
