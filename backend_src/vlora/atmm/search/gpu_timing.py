"""Interleaved timing on a GPU, with events around many replays of captured graphs.

Without a GPU, a dry run on the emulated kernels uses the host's clock. Its figures mean nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from vlora.atmm.search.timing import Timing, rotated

Call = Callable[[], None]
# Target duration of a sample. It is long compared with the 0.5 µs resolution of events and with the
# launch of a graph.
SAMPLE_SECONDS = 2e-3
MAX_REPLAYS = 400
WARM_CALLS = 2


@dataclass(frozen=True)
class GpuTiming(Timing):
    """Seconds per call.

    graph: whether the times exclude the launch cost on the host.
    """

    graph: bool


class GpuWork:
    """Work that can be timed. A pass makes all `calls`, the same work on different data.

    graph: whether a pass replays one captured graph instead of making separate calls.
    """

    def __init__(self, calls: Sequence[Call], *, graph: bool) -> None:
        self._calls, self.graph = calls, graph and torch.cuda.is_available()
        for _ in range(WARM_CALLS):
            self._call_all()
        synchronize()
        if self.graph:
            captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(captured):
                self._call_all()
            self._pass: Call = captured.replay
        else:
            self._pass = self._call_all
        self._pass()
        synchronize()

    def _call_all(self) -> None:
        for call in self._calls:
            call()

    def sample(self, passes: int) -> float:
        """Return the seconds per call, measured over this many passes."""
        if not torch.cuda.is_available():
            started = time.perf_counter()
            for _ in range(passes):
                self._pass()
            return (time.perf_counter() - started) / passes / len(self._calls)
        first, last = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        first.record()
        for _ in range(passes):
            self._pass()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) * 1e-3 / passes / len(self._calls)

    def passes_for(self, seconds: float) -> int:
        """Return the number of passes that take about `seconds`."""
        pass_seconds = max(self.sample(1) * len(self._calls), 1e-7)
        return max(1, min(MAX_REPLAYS, round(seconds / pass_seconds)))


def interleaved(candidates: Mapping[str, GpuWork], rounds: int) -> dict[str, GpuTiming]:
    """Time all candidates: each round takes one sample of each, in an order that rotates."""
    passes = {name: work.passes_for(SAMPLE_SECONDS) for name, work in candidates.items()}
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    for number in range(rounds):
        for name in rotated(list(candidates), number):
            samples[name].append(candidates[name].sample(passes[name]))
    return {name: GpuTiming(tuple(samples[name]), candidates[name].graph) for name in candidates}


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
