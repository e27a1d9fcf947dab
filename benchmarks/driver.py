"""Driver that runs requests step by step on an engine and times each request and step.

The engine runs in the calling thread, without a server or a client. The measured times include the
engine, its loader thread and the thread that watches the adapter folders.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np

from benchmarks.frame import Row
from vlora.adapters.tensors import WeightsFile
from vlora.engine.engine import Engine
from vlora.engine.requests import RequestState
from vlora.request import ImageFeatures, Output, Request
from vlora.sampling import SamplingParams
from vlora.weights.safetensors import ReadPlan

WORDS = tuple("what is the number of red things in this picture and where are they".split())  # noqa: SIM905
"""Words of the demo checkpoint's vocabulary. A word and the space before it are two tokens."""
WAIT_SECONDS = 0.05
"""Maximum wait for the loader before the next step. A finished load ends the wait earlier."""


@dataclass(frozen=True)
class DriverRequest:
    """One request of a run, whose answer has `output` tokens."""

    prompt: str
    adapter: str | None
    output: int
    images: ImageFeatures | None = None


def random_image(seed: int | Sequence[int], rows: int, hidden: int) -> ImageFeatures:
    """Return random features of one image of `rows` tokens."""
    features = np.random.default_rng(seed).normal(size=(rows, hidden)).astype(np.float32)
    return ImageFeatures(features, np.array([[0, rows, 1, 1, rows, 0]], np.int32))


@dataclass
class Outcome:
    """Times of one run of a set of requests, in seconds.

    first, end: time of each request's first token and of its end, from the start of the run.
    steps: duration of each step that computed rows.
    stalled: time spent waiting for adapters while there was nothing to compute.
    disk_steps: number of steps in which the engine's thread read a file of weights.
    loading_steps, quiet_steps: durations of the steps with and without an adapter that was loaded
        or packed meanwhile. Steps in which a request got its first token are in neither list,
        because most adapters are loaded during such steps.
    span: duration of the run.
    rows, tokens, failed: numbers of computed rows, of generated tokens and of failed requests.
    """

    first: list[float] = field(default_factory=list)
    end: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    stalled: float = 0.0
    disk_steps: int = 0
    loading_steps: list[float] = field(default_factory=list)
    quiet_steps: list[float] = field(default_factory=list)
    span: float = 0.0
    rows: int = 0
    tokens: int = 0
    failed: int = 0

    @classmethod
    def joined(cls, outcomes: Sequence[Outcome]) -> Outcome:
        """Return one outcome for several runs. Each time still counts from the start of its run."""
        total = cls()
        for outcome in outcomes:
            for f in fields(cls):
                setattr(total, f.name, getattr(total, f.name) + getattr(outcome, f.name))
        return total

    @property
    def throughput(self) -> float:
        """Generated tokens per second."""
        return self.tokens / self.span

    @property
    def token_latency(self) -> float:
        """Average token latency: the sum of end-to-end times divided by the number of tokens."""
        return sum(self.end) / max(1, self.tokens)

    def as_row(self) -> Row:
        loading, quiet = self.loading_steps, self.quiet_steps
        over = median(loading) / median(quiet) if loading and quiet else None
        return {
            "tokens_per_s": round(self.throughput, 1),
            "token_latency_ms": round(self.token_latency * 1e3, 3),
            "p99_s": round(float(np.quantile(self.end, 0.99)), 3),
            "step_ms": round(median(self.steps) * 1e3, 3),
            "step_p99_ms": round(float(np.quantile(self.steps, 0.99)) * 1e3, 3),
            "step_beside_load_ms": round(median(loading) * 1e3, 3) if loading else None,
            "step_beside_load_over_step": over and round(over, 3),
            "stalled_s": round(self.stalled, 3),
            "disk_steps": self.disk_steps,
            "failed": self.failed,
        }


class Driver:
    """Runs sets of requests on one engine.

    after_step: called after each step that computed rows. Its duration is part of the span of the
        run, but not of the step.
    """

    def __init__(self, engine: Engine, after_step: Callable[[Engine], None] | None = None) -> None:
        self.engine = engine
        self._after_step = after_step
        self._count = 0
        self._news = threading.Event()
        engine.adapters.workers.on_post = self._news.set

    def close(self) -> None:
        self.engine.adapters.close()

    def run(self, requests: Sequence[DriverRequest], *, watch: bool = True) -> Outcome:
        """Submit all requests at once, run them to their end, and return their times.

        watch: whether the adapter folders are watched meanwhile.
        """
        if not watch:
            return self._run(requests)
        self.engine.watch.start(self.engine.adapters.folders.stamps)
        try:
            return self._run(requests)
        finally:
            self.engine.watch.close()

    def _run(self, requests: Sequence[DriverRequest]) -> Outcome:
        engine, outcome = self.engine, Outcome()
        states = [self._prepare(request) for request in requests]
        rows_before = engine.stats().rows
        answered: set[str] = set()
        with _counted_reads() as reads:
            started = time.perf_counter()
            for index, state in enumerate(states):
                engine.add(state, float(index))
            while not engine.idle:
                outputs, now = self._step(outcome, answered, reads)
                for output in outputs:
                    outcome.tokens += len(output.token_ids)
                    if output.request_id not in answered:
                        answered.add(output.request_id)
                        outcome.first.append(now - started)
                    if output.finished:
                        outcome.end.append(now - started)
                        outcome.failed += output.error is not None
        outcome.span = time.perf_counter() - started
        outcome.rows = engine.stats().rows - rows_before
        return outcome

    def _prepare(self, request: DriverRequest) -> RequestState:
        self._count += 1
        params = SamplingParams(temperature=0.0, max_tokens=request.output, ignore_eos=True)
        number, adapter, images = f"drive-{self._count}", request.adapter, request.images
        return self.engine.prepare(
            Request(number, request.prompt, params, adapter=adapter, images=images)
        )

    def _step(
        self, outcome: Outcome, answered: set[str], reads: list[str]
    ) -> tuple[list[Output], float]:
        """Run one step and record its time. Return its outputs and the time of its end."""
        engine = self.engine
        started, reads_before = time.perf_counter(), len(reads)
        loading = engine.adapters.loading
        outputs = engine.step()
        now = time.perf_counter()
        if engine.stalled:
            self._news.wait(WAIT_SECONDS)
            self._news.clear()
            outcome.stalled += time.perf_counter() - started
            return outputs, now
        outcome.steps.append(now - started)
        if answered >= {output.request_id for output in outputs}:
            (outcome.loading_steps if loading else outcome.quiet_steps).append(now - started)
        outcome.disk_steps += len(reads) > reads_before
        if self._after_step is not None:
            self._after_step(engine)
        return outputs, now


@contextmanager
def _counted_reads() -> Iterator[list[str]]:
    """Yield a list that grows whenever the current thread opens or reads a file of weights."""
    reads: list[str] = []
    thread = threading.get_ident()

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if threading.get_ident() == thread:
                reads.append(function.__name__)
            return function(*arguments)

        return call

    with (
        patch.object(WeightsFile, "__init__", counted(WeightsFile.__init__)),
        patch.object(ReadPlan, "read", counted(ReadPlan.read)),
    ):
        yield reads
