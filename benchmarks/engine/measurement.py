"""Results of the engine benchmark, and the two engines that it measures for each storage type."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.benchmark import load_grid_values
from benchmarks.engine.in_process import InProcess, StepTrace
from benchmarks.engine.load import KINDS, REQUESTS, Load, LoadTimes
from benchmarks.engine.over_grpc import OverGrpc
from benchmarks.llava import Checkpoint
from benchmarks.roofline import Roofline
from benchmarks.timing import rounded_mean

SECONDS = 0.15
"""Duration of each microbenchmark before and after every run in this process."""
READ_BYTES = 256 << 20


@dataclass
class EngineResult:
    """Times of all repeats of one load.

    in_process: one tuple per repeat in this process: times of the run, floor of its steps, and
        roofline in seconds of all its work together.
    served: times of each repeat over gRPC.
    peers: times of the load on PEFT, if that was measured.
    """

    load: Load
    dtype: str
    in_process: list[tuple[LoadTimes, LoadTimes, float]] = field(default_factory=list)
    served: list[LoadTimes] = field(default_factory=list)
    peers: list[LoadTimes] = field(default_factory=list)

    @property
    def over_floor(self) -> float:
        """Average token latency in process, divided by the floor's; median over the repeats."""
        return median(
            times.token_latency / floor.token_latency for times, floor, _ in self.in_process
        )

    @property
    def latency(self) -> float:
        """Average token latency in process, in seconds: median over the repeats."""
        return median(times.token_latency for times, _, _ in self.in_process)

    @property
    def served_over_engine(self) -> float | None:
        """Average token latency over gRPC, divided by that in process; None without a server."""
        return _over(self.served, self.latency)

    @property
    def over_peers(self) -> float | None:
        """Average token latency in process, divided by that of PEFT; None if PEFT did not run."""
        over = _over(self.peers, self.latency)
        return None if over is None else 1 / over

    def as_row(self) -> dict[str, Any]:
        by_latency = sorted(self.in_process, key=lambda repeat: repeat[0].token_latency)
        times, floor, combined = by_latency[len(by_latency) // 2]
        return {
            "load": self.load.name,
            "dtype": self.dtype,
            "requests": self.load.requests,
            "inside": times.as_row(),
            "floor": floor.as_row(),
            "at_once_s": round(combined, 3),
            "served": [repeat.as_row() for repeat in self.served],
            "peers": [repeat.as_row() for repeat in self.peers],
            "over_floor": round(self.over_floor, 3),
        }


def load_grid(path: Path, *, quick: bool) -> tuple[list[Load], int]:
    """Return the loads of a grid file and the number of repeats."""
    grid = load_grid_values(path, quick=quick)
    requests = grid.get("requests", REQUESTS)
    loads = [Load(kind, count, requests) for kind in grid["kinds"] for count in grid["adapters"]]
    return loads, grid["repeats"]


class EnginePair:
    """An engine in this process and, if `served`, a server of the same checkpoint and type."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: str,
        roofline: Roofline,
        options: Mapping[str, Any],
        *,
        streams: int,
        served: bool,
        status: Callable[[str], None],
    ) -> None:
        """Start both engines.

        options: options of both, in addition to model and type.
        """
        self.dtype = dtype
        self._checkpoint = checkpoint
        self._roofline = roofline
        self._status = status
        self._seed = 0
        with ExitStack() as stack:
            status("loading")
            self._engine = stack.enter_context(InProcess(checkpoint, dtype, dict(options)))
            self._server: OverGrpc | None = None
            if served:
                status("starting the server")
                server = OverGrpc(checkpoint, dtype, dict(options), streams)
                self._server = stack.enter_context(server)
            self._stack = stack.pop_all()
        self._warm = False

    def run(self, load: Load, repeats: int) -> EngineResult:
        """Run a load in process and over gRPC alternately, and return all times. Each repeat uses
        different prompts.
        """
        if not self._warm:
            self._engine.run(load.draw(self._checkpoint, 0)[:2])
            self._warm = True
        result = EngineResult(load, self.dtype)
        for _ in range(repeats):
            self._seed += 1
            requests = load.draw(self._checkpoint, self._seed)
            self._status(load.name)
            before = self._rates()
            times, trace = self._engine.run(requests)
            result.in_process.append((times, *_floor(trace, before, self._rates())))
            if self._server is not None:
                self._status(f"{load.name}, over gRPC")
                result.served.append(self._server.run(requests))
        return result

    def close(self) -> None:
        self._stack.close()

    def _rates(self) -> tuple[float, float]:
        """Return the present rates of this machine in flop/s and bytes/s."""
        peak = max(self._roofline.measure_peak(name, SECONDS) for name in {"fp32", self.dtype})
        return peak, self._roofline.measure_bandwidth(READ_BYTES, SECONDS)


def summarize(results: Sequence[EngineResult]) -> dict[str, Any]:
    """Return the latency of each load divided by that of its floor, and two geometric means.

    `served_over_engine` is the latency over gRPC divided by that in process. `vs_peft_mixed` is the
    latency in process divided by that of PEFT, over the loads with adapters.
    """
    summary: dict[str, Any] = {}
    by_load = {(result.load.kind, result.load.adapters): result for result in results}
    for kind in KINDS:
        for count in (0, 1, 4, 16):
            result = by_load.get((kind, count))
            summary[f"{kind}_{count}"] = None if result is None else round(result.over_floor, 3)
    served = [ratio for r in results if (ratio := r.served_over_engine) is not None]
    summary["served_over_engine"] = rounded_mean(served)
    peers = [r.over_peers for r in results if r.load.adapters]
    summary["vs_peft_mixed"] = rounded_mean([ratio for ratio in peers if ratio is not None])
    return summary


def _floor(
    trace: StepTrace, before: tuple[float, float], after: tuple[float, float]
) -> tuple[LoadTimes, float]:
    peak, rate = ((a + b) / 2 for a, b in zip(before, after, strict=True))
    return trace.floor(peak, rate), trace.combined_seconds(peak, rate)


def _over(repeats: Sequence[LoadTimes], latency: float) -> float | None:
    return median(times.token_latency for times in repeats) / latency if repeats else None
