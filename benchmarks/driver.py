"""An engine driven step by step through a load, and what each request and step took.

On this thread, without a server or a client: what is measured is the engine, its loader thread and
the watch on the folders.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np

from vlora.engine.engine import Engine
from vlora.lora.weights_file import WeightsFile
from vlora.lora.weights_reader import Layout
from vlora.request import ImageFeatures, Request
from vlora.sampling import SamplingParams

WAIT_SECONDS = 0.05
"""A look at a loader that is late; it wakes this thread when it is done."""


@dataclass(frozen=True)
class Ask:
    """One request of a load."""

    prompt: str
    adapter: str | None
    output: int
    images: ImageFeatures | None = None


@dataclass
class Outcome:
    """Seconds from the common start: first token and end of each request; of each step; stalled,
    with nothing to compute but adapters to wait for. disk_steps: steps whose thread read a file of
    weights. beside: of the steps during which something was loaded or packed, alone: of the others;
    both only of steps that begin no answer, since loads come when requests
    begin. span: of the whole load. rows: computed. tokens: said."""

    first: list[float] = field(default_factory=list)
    end: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    stalled: float = 0.0
    disk_steps: int = 0
    beside: list[float] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)
    span: float = 0.0
    rows: int = 0
    tokens: int = 0
    failed: int = 0

    @property
    def throughput(self) -> float:
        """Tokens a second."""
        return self.tokens / self.span

    @property
    def token_latency(self) -> float:
        """Average token latency: all end-to-end times over all tokens."""
        return sum(self.end) / max(1, self.tokens)

    def as_row(self) -> dict[str, Any]:
        return {
            "tokens_per_s": round(self.throughput, 1),
            "token_latency_ms": round(self.token_latency * 1e3, 3),
            "p99_s": round(float(np.quantile(self.end, 0.99)), 3),
            "step_ms": round(statistics.median(self.steps) * 1e3, 3),
            "step_p99_ms": round(float(np.quantile(self.steps, 0.99)) * 1e3, 3),
            "step_beside_load_ms": round(statistics.median(self.beside) * 1e3, 3)
            if self.beside
            else None,
            "stalled_s": round(self.stalled, 3),
            "disk_steps": self.disk_steps,
            "failed": self.failed,
        }


class Driver:
    """One engine, and the ids of its requests."""

    def __init__(self, engine: Engine, look: Callable[[Engine], None] | None = None) -> None:
        """look: called after each step that computed; in the load's time, not in the step's."""
        self.engine = engine
        self._look = look
        self._count = 0
        self._news = threading.Event()
        engine.adapters.on_change = self._on_news

    def _on_news(self) -> None:
        self.engine.notify()
        self._news.set()

    def close(self) -> None:
        self.engine.adapters.close()

    def run(self, asks: Sequence[Ask], *, watch: bool = True) -> Outcome:
        """All at once, beside the watch on the folders."""
        if not watch:
            return self._run(asks)
        self.engine.watch.start(self.engine.adapters.stamps)
        try:
            return self._run(asks)
        finally:
            self.engine.watch.close()

    def _run(self, asks: Sequence[Ask]) -> Outcome:
        engine, outcome = self.engine, Outcome()
        states = []
        for ask in asks:
            self._count += 1
            params = SamplingParams(temperature=0.0, max_tokens=ask.output, ignore_eos=True)
            request = Request(
                f"drive-{self._count}", ask.prompt, params, adapter=ask.adapter, images=ask.images
            )
            states.append(engine.prepare(request))
        rows = engine.stats().rows
        mine = threading.get_ident()
        reads = 0

        def counting(done: Callable[..., Any]) -> Callable[..., Any]:
            def counted(*given: Any) -> Any:
                nonlocal reads
                reads += threading.get_ident() == mine
                return done(*given)

            return counted

        first: set[str] = set()
        with (
            patch.object(WeightsFile, "__init__", counting(WeightsFile.__init__)),
            patch.object(Layout, "read", counting(Layout.read)),
        ):
            began = time.perf_counter()
            for index, state in enumerate(states):
                engine.add(state, float(index))
            while not engine.idle:
                before, read, loading = time.perf_counter(), reads, engine.adapters.loading
                outputs = engine.step()
                now = time.perf_counter()
                if engine.stalled:
                    self._news.wait(WAIT_SECONDS)
                    self._news.clear()
                    outcome.stalled += time.perf_counter() - before
                else:
                    outcome.steps.append(now - before)
                    if first >= {output.request_id for output in outputs}:
                        among = outcome.beside if loading else outcome.alone
                        among.append(now - before)
                    outcome.disk_steps += reads > read
                    if self._look is not None:
                        self._look(engine)
                for output in outputs:
                    outcome.tokens += len(output.token_ids)
                    if output.request_id not in first:
                        first.add(output.request_id)
                        outcome.first.append(now - began)
                    if output.finished:
                        outcome.end.append(now - began)
                        outcome.failed += output.error is not None
        outcome.span = time.perf_counter() - began
        outcome.rows = engine.stats().rows - rows
        return outcome
