"""Times work on a GPU: captured graphs, events around many replays, candidates interleaved.

On a machine without one (a dry run of the benches on the emulation) calls are timed by the host's
clock: their figures mean nothing and are marked so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from benchmarks.timing import Timing

Call = Callable[[], None]

SAMPLE_SECONDS = 2e-3
"""Of one sample: events tick in half microseconds, and a graph's start must not count."""
MOST_REPLAYS = 400
WARM_CALLS = 2


@dataclass(frozen=True)
class Timed(Timing):
    """graph: without the launches' cost on the host."""

    graph: bool


class Work:
    """A pass over `calls`, which differ in their data only, as one graph or call by call."""

    def __init__(self, calls: Sequence[Call], *, graph: bool) -> None:
        self._calls, self.graph = calls, graph and torch.cuda.is_available()
        for _ in range(WARM_CALLS):
            self._all()
        synchronize()
        if self.graph:
            captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(captured):
                self._all()
            self._pass: Call = captured.replay
        else:
            self._pass = self._all
        self._pass()
        synchronize()

    def _all(self) -> None:
        for call in self._calls:
            call()

    def sample(self, passes: int) -> float:
        """Seconds per call."""
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
        pass_seconds = max(self.sample(1) * len(self._calls), 1e-7)
        return max(1, min(MOST_REPLAYS, round(seconds / pass_seconds)))


def interleaved(work: Mapping[str, Work], rounds: int) -> dict[str, Timed]:
    """A sample of each candidate a round, in an order that rotates."""
    passes = {name: one.passes_for(SAMPLE_SECONDS) for name, one in work.items()}
    samples: dict[str, list[float]] = {name: [] for name in work}
    names = list(work)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            samples[name].append(work[name].sample(passes[name]))
    return {name: Timed(tuple(samples[name]), work[name].graph) for name in work}


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@dataclass(frozen=True)
class Limits:
    """What this device reaches now: bytes/s of a large copy (read and written), flop/s of a large
    product in bf16 and, without TF32, in fp32."""

    copy: float
    bf16: float
    fp32: float

    def seconds(self, moved_bytes: float, flops: float, dtype: str) -> float:
        """No version runs much faster."""
        return max(moved_bytes / self.copy, flops / (self.fp32 if dtype == "fp32" else self.bf16))


def measure_limits(device: torch.device, *, side: int, copy_bytes: int) -> Limits:
    """Random data: products of zeros run faster."""
    source = torch.empty(copy_bytes // 4, device=device).normal_()
    target = torch.empty_like(source)
    work = {"copy": Work([lambda: _none(target.copy_(source))], graph=True)}
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        out = torch.empty_like(a)
        work[name] = Work([lambda a=a, b=b, out=out: _none(torch.mm(a, b, out=out))], graph=True)  # type: ignore[misc]
    timed = interleaved(work, rounds=5)
    product = 2 * side**3
    return Limits(
        2 * copy_bytes / timed["copy"].median,
        product / timed["bf16"].median,
        product / timed["fp32"].median,
    )


def _none(_: object) -> None:
    """A call's result is not wanted."""
