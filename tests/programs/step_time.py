"""Measure the time of `Engine.step` without its forward pass.

The demo model has 64 running requests, which decode for ever, and 1,024 waiting ones. The forward
pass computes nothing. Half of the requests sample their tokens. The policies take turns, so that a
slow machine affects all alike.

usage: python -m tests.programs.step_time --steps 200
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from vlora.config import POLICIES, Options
from vlora.device.device import UploadedPart
from vlora.engine.engine import Engine
from vlora.model.chunk import Chunk
from vlora.model.runner import StepResult
from vlora.request import Request
from vlora.sampling import SamplingParams

DEMO = Path(__file__).parents[2] / "tools" / "demo"
RUNNING, WAITING, ADAPTERS = 64, 1024, 16


class NoForward:
    """A runner whose forward pass returns the same logits for every row."""

    def __init__(self, vocabulary: int) -> None:
        self._logits = torch.zeros(RUNNING, vocabulary)
        self._logits[:, 5] = 50.0
        self.seconds = 0.0
        """Duration of the last call."""

    def forward(self, chunks: Sequence[Chunk], *parts: UploadedPart) -> StepResult:
        started = time.perf_counter()
        result = StepResult(self._logits[: sum(c.completes for c in chunks)], ())
        self.seconds = time.perf_counter() - started
        return result


def busy_engine(policy: str) -> tuple[Engine, NoForward]:
    """Return an engine with RUNNING running and WAITING waiting requests, and its runner."""
    draw = random.Random(1)
    folders = sorted(path for path in (DEMO / "adapters").iterdir() if path.is_dir())
    names = {f"a{i}": str(folders[i % len(folders)]) for i in range(ADAPTERS)}
    options = Options(
        model=DEMO / "checkpoint",
        policy=policy,
        kv_cache_tokens=1 << 17,
    )
    engine = Engine(options, names)
    runner = NoForward(engine.config.vocabulary)
    engine._runner = runner  # type: ignore[assignment]
    for i in range(RUNNING + WAITING):
        sampling = SamplingParams(
            temperature=float(i % 2),
            max_tokens=900,
            ignore_eos=True,
            priority=draw.choice([-1, 0, 3]) if i >= RUNNING else -2,
        )
        adapter = draw.choice([None, *names])
        state = engine.prepare(Request(f"r{i}", "<s>what is this", sampling, adapter=adapter))
        engine.add(state, time.monotonic())
        if i == RUNNING - 1:
            for _ in range(20):
                engine.step()
    assert len(engine.scheduler.running) == RUNNING
    return engine, runner


def main() -> None:
    """Print the fastest and the median step of each policy, in milliseconds, as JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.programs.step_time",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=200, metavar="N", help="steps of each policy")
    parser.add_argument(
        "--policies",
        nargs="*",
        default=sorted(POLICIES),
        metavar="NAME",
        help="policies to measure (default: all)",
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    engines = {policy: busy_engine(policy) for policy in args.policies}
    seconds: dict[str, list[float]] = {policy: [] for policy in args.policies}
    for _ in range(args.steps):
        for policy, (engine, runner) in engines.items():
            started = time.perf_counter()
            engine.step()
            seconds[policy].append(time.perf_counter() - started - runner.seconds)
    figures = {
        policy: {
            "fastest": round(1e3 * min(times), 3),
            "median": round(1e3 * statistics.median(times), 3),
            "running": len(engines[policy][0].scheduler.running),
            "waiting": len(engines[policy][0].scheduler.waiting),
        }
        for policy, times in seconds.items()
    }
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
