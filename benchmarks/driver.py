"""Driver that runs requests step by step on an engine and times each request and step.

The engine runs in the calling thread, without a server or a client. The measured times include the
engine, its loader thread and the thread that watches the adapter folders.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np

from benchmarks.frame import Row
from vlora.adapters.tensors import WeightsFile
from vlora.engine.engine import Engine
from vlora.engine.requests import RequestState
from vlora.errors import Cancelled
from vlora.request import ImageFeatures, Output, Request
from vlora.sampling import SamplingParams
from vlora.weights.safetensors import ReadPlan

WAIT_SECONDS = 0.05
"""Maximum wait for the loader before the next step. A finished load ends the wait earlier."""


@dataclass(frozen=True)
class DriverRequest:
    """One request of a run.

    output: number of tokens of the answer.
    at: seconds from the start of the run to its arrival.
    limit: maximum number of answer tokens that the client asks for; None for `output`. The answer
        ends before, as if the model had generated end-of-text.
    deadline: seconds from its arrival after which the engine ends it.
    sampling: sampling parameters; by default the answer is greedy.
    """

    prompt: str
    adapter: str | None
    output: int
    images: ImageFeatures | None = None
    at: float = 0.0
    limit: int | None = None
    deadline: float = math.inf
    sampling: Mapping[str, Any] = field(default_factory=lambda: {"temperature": 0})


def random_image(seed: int | Sequence[int], rows: int, hidden: int) -> ImageFeatures:
    """Return random features of one image of `rows` tokens."""
    features = np.random.default_rng(seed).normal(size=(rows, hidden)).astype(np.float32)
    return ImageFeatures(features, np.array([[0, rows, 1, 1, rows, 0]], np.int32))


@dataclass
class Outcome:
    """Times of one run of a set of requests, in seconds.

    first, end: time of each request's first token and of its end, from its arrival.
    steps: duration of each step that computed rows.
    disk_steps: number of steps in which the engine's thread read a file of weights.
    span: duration of the run.
    rows, tokens: numbers of computed rows and of generated tokens.
    failed, late: numbers of failed requests, and of those that were ended at their deadlines.
    """

    first: list[float] = field(default_factory=list)
    end: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    disk_steps: int = 0
    span: float = 0.0
    rows: int = 0
    tokens: int = 0
    failed: int = 0
    late: int = 0

    @classmethod
    def joined(cls, outcomes: Sequence[Outcome]) -> Outcome:
        """Return one outcome for several runs."""
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
        return {
            "tokens_per_s": self.throughput,
            "token_latency_ms": self.token_latency * 1e3,
            "p99_s": float(np.quantile(self.end, 0.99)),
            "step_ms": median(self.steps) * 1e3,
            "disk_steps": self.disk_steps,
            "failed": self.failed,
        }


class Driver:
    """Runs sets of requests on one engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._count = 0
        self._news = threading.Event()
        engine.adapters.workers.on_post = self._news.set

    def close(self) -> None:
        self.engine.adapters.close()

    def run(self, requests: Sequence[DriverRequest], *, watch: bool = False) -> Outcome:
        """Run requests, sorted by arrival, to their end, and return their times.

        Requests are prepared before the clock starts. While the engine is idle, the clock jumps to
        the next arrival.

        watch: whether the adapter folders are watched meanwhile.
        """
        engine, outcome = self.engine, Outcome()
        waiting = deque((request, self._prepare(request)) for request in requests)
        arrivals: dict[str, float] = {}
        answered: set[str] = set()
        rows_before = engine.stats().rows
        if watch:
            engine.watch.start(engine.adapters.folders.stamps)
        with _counted_reads() as reads:
            started = time.monotonic()
            while waiting or not engine.idle:
                now = time.monotonic() - started
                while waiting and waiting[0][0].at <= now:
                    request, state = waiting.popleft()
                    arrivals[state.sequence.id] = request.at
                    engine.add(state, started + request.at)
                if engine.idle:
                    started -= max(0.0, waiting[0][0].at - now)
                    continue
                outputs, now = self._step(outcome, reads)
                for output in outputs:
                    seconds = now - started - arrivals[output.request_id]
                    outcome.tokens += len(output.token_ids)
                    if output.request_id not in answered:
                        answered.add(output.request_id)
                        outcome.first.append(seconds)
                    if output.finished:
                        outcome.end.append(seconds)
                        is_late = isinstance(output.error, Cancelled)
                        outcome.late += is_late
                        outcome.failed += output.error is not None and not is_late
        outcome.span = time.monotonic() - started
        if watch:
            engine.watch.close()
        outcome.rows = engine.stats().rows - rows_before
        return outcome

    def _prepare(self, request: DriverRequest) -> RequestState:
        self._count += 1
        keys = {**request.sampling, "max_tokens": request.limit or request.output}
        if request.deadline < math.inf:
            keys["deadline_ms"] = 1e3 * request.deadline
        params = replace(SamplingParams.parse(keys), ignore_eos=True)
        number, adapter, images = f"drive-{self._count}", request.adapter, request.images
        state = self.engine.prepare(
            Request(number, request.prompt, params, adapter=adapter, images=images)
        )
        state.sequence.max_tokens = request.output
        return state

    def _step(self, outcome: Outcome, reads: list[str]) -> tuple[list[Output], float]:
        """Run one step and record its time. Return its outputs and the time of its end."""
        started, reads_before = time.monotonic(), len(reads)
        outputs = self.engine.step()
        now = time.monotonic()
        if self.engine.stalled:
            self._news.wait(WAIT_SECONDS)
            self._news.clear()
            return outputs, now
        outcome.steps.append(now - started)
        outcome.disk_steps += len(reads) > reads_before
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
