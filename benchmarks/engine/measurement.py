"""`vlora bench engine`: requests at once, in process, over gRPC, and beside PEFT."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.engine.in_process import Inside, Steps
from benchmarks.engine.load import REQUESTS, Load, Run
from benchmarks.engine.over_grpc import Served
from benchmarks.engine.peft_mixed import PeftMixed
from benchmarks.llava import Checkpoint
from benchmarks.roofline import Limits
from benchmarks.step.measurement import READ_BYTES
from benchmarks.timing import geometric_mean

SECONDS = 0.15
"""Of each microbenchmark, before and after every run in process."""


@dataclass
class Result:
    """One load, all its repeats. inside: each with the floor of its own steps, and the limit of
    its whole work at once."""

    load: Load
    dtype: str
    inside: list[tuple[Run, Run, float]] = field(default_factory=list)
    served: list[Run] = field(default_factory=list)
    peers: list[Run] = field(default_factory=list)

    @property
    def over_floor(self) -> float:
        """Average token latency in process over the floor's."""
        return median(run.token_latency / floor.token_latency for run, floor, _ in self.inside)

    @property
    def latency(self) -> float:
        return median(run.token_latency for run, _, _ in self.inside)

    @property
    def served_over_engine(self) -> float | None:
        return _over(self.served, self.latency)

    @property
    def over_peers(self) -> float | None:
        over = _over(self.peers, self.latency)
        return None if over is None else 1 / over

    def as_row(self) -> dict[str, Any]:
        run, floor, at_once = sorted(self.inside, key=lambda one: one[0].token_latency)[
            len(self.inside) // 2
        ]
        return {
            "load": self.load.name,
            "dtype": self.dtype,
            "requests": self.load.requests,
            "inside": run.as_row(),
            "floor": floor.as_row(),
            "at_once_s": round(at_once, 3),
            "served": [one.as_row() for one in self.served],
            "peers": [one.as_row() for one in self.peers],
            "over_floor": round(self.over_floor, 3),
        }


def load_grid(path: Path, *, quick: bool) -> tuple[list[Load], int]:
    """(loads, repeats)."""
    given = json.loads(path.read_text())
    chosen = given | (given["quick"] if quick else {})
    requests = chosen.get("requests", REQUESTS)
    loads = [
        Load(kind, count, requests) for kind in chosen["kinds"] for count in chosen["adapters"]
    ]
    return loads, chosen["repeats"]


def run(
    loads: Sequence[Load],
    repeats: int,
    checkpoint: Checkpoint,
    dtype: str,
    limits: Limits,
    *,
    served: bool,
    options: Mapping[str, Any],
    told: Callable[[str], None] = lambda what: None,
) -> Iterator[Result]:
    """In process and over gRPC in turn. options: of both engines, beside model and type."""
    results = {load: Result(load, dtype) for load in loads}
    most = max(load.requests for load in loads)
    told("loading")
    with Inside(checkpoint, dtype, dict(options)) as inside:
        server = Served(checkpoint, dtype, dict(options), most) if served else None
        if server is not None:
            told("starting the server")
            server.__enter__()
        try:
            seed = 0
            inside.run(loads[0].asks(checkpoint, seed)[:2])
            for load in loads:
                for _ in range(repeats):
                    seed += 1
                    asks = load.asks(checkpoint, seed)
                    told(load.name)
                    before = _rates(limits, dtype)
                    done, steps = inside.run(asks)
                    after = _rates(limits, dtype)
                    results[load].inside.append((done, *_floor(steps, before, after)))
                    if server is not None:
                        told(f"{load.name}, served")
                        results[load].served.append(server.run(asks))
                yield results[load]
        finally:
            if server is not None:
                server.__exit__(None, None, None)


def run_peers(
    results: Sequence[Result],
    checkpoint: Checkpoint,
    peer: PeftMixed,
    told: Callable[[str], None] = lambda what: None,
) -> None:
    """The same loads, once each, after all of ours: both would not fit the caches together."""
    for seed, result in enumerate(results, start=1):
        told(f"{result.load.name}, PEFT")
        result.peers.append(peer.run(result.load.asks(checkpoint, seed)))


def summarize(results: Sequence[Result]) -> dict[str, Any]:
    """The keys of the issue; null for what was not run."""
    summary: dict[str, Any] = {}
    found = {(result.load.kind, result.load.adapters): result for result in results}
    for kind in ("text", "image"):
        for count in (0, 1, 4, 16):
            result = found.get((kind, count))
            summary[f"{kind}_{count}"] = None if result is None else round(result.over_floor, 3)
    summary["served_over_engine"] = _mean([r.served_over_engine for r in results])
    summary["vs_peft_mixed"] = _mean([r.over_peers for r in results if r.load.adapters])
    return summary


def _rates(limits: Limits, dtype: str) -> tuple[float, float]:
    """(flop/s, bytes/s) at this moment."""
    peak = max(limits.measure_peak(name, SECONDS) for name in {"fp32", dtype})
    return peak, limits.measure_bandwidth(READ_BYTES, SECONDS)


def _floor(
    steps: Steps, before: tuple[float, float], after: tuple[float, float]
) -> tuple[Run, float]:
    peak, rate = ((one + other) / 2 for one, other in zip(before, after, strict=True))
    return steps.floor(peak, rate), steps.at_once(peak, rate)


def _over(runs: Sequence[Run], latency: float) -> float | None:
    return median(run.token_latency for run in runs) / latency if runs else None


def _mean(values: Sequence[float | None]) -> float | None:
    mean = geometric_mean([value for value in values if value is not None])
    return None if mean is None else round(mean, 3)
