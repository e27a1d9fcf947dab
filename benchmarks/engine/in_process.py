"""The load of `vlora bench engine` in one process, and the floor of the steps it took."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any
from unittest.mock import patch

import numpy as np

from benchmarks import work_model as work
from benchmarks.engine.load import OUTPUT, Ask, Run
from benchmarks.llava import Checkpoint
from benchmarks.synthetic_model import NAMES
from benchmarks.work_model import Rows, Work
from vlora import cores
from vlora.config import Options
from vlora.engine.loop import EngineLoop
from vlora.model.decoder_config import dtype_of
from vlora.model.runner import Runner, StepResult
from vlora.request import ImageFeatures, Output, Request
from vlora.sampling import SamplingParams
from vlora.vision.encoder import VisionEncoder
from vlora.vision.images import DecodedImage

DRAIN_SECONDS = 1.0


@dataclass(frozen=True)
class Steps:
    """The work of every step of a run, and after which step each request had its first token and
    its last."""

    works: Sequence[Work]
    begun: Sequence[int]
    ended: Sequence[int]
    tower: Work | None

    def floor(self, peak: float, rate: float) -> Run:
        """When each request would have begun and ended, had every step been at its limit; images
        are encoded before."""
        now = 0.0 if self.tower is None else self.tower.flops / peak
        after = [now := now + limit(todo, peak, rate) for todo in self.works]
        return Run([after[step] for step in self.begun], [after[step] for step in self.ended])

    def at_once(self, peak: float, rate: float) -> float:
        """Seconds of the whole work in one go."""
        parts = [*self.works, *([] if self.tower is None else [self.tower])]
        return limit(work.together(parts), peak, rate)


def limit(todo: Work, peak: float, rate: float) -> float:
    return max(todo.flops / peak, todo.moved / rate)


class Inside:
    """Engine loop and vision encoder in this process; use with `with`."""

    def __init__(self, checkpoint: Checkpoint, dtype: str, more: dict[str, Any]) -> None:
        options = Options(
            model=checkpoint.folder, adapters=checkpoint.adapters, dtype=NAMES[dtype], **more
        )
        self._checkpoint = checkpoint
        kept = dtype_of(options.dtype, options.model)
        self._itemsize = kept.itemsize
        # The engine's threads count: one process has one number, the larger of the two.
        self._encoder = VisionEncoder(checkpoint.folder, cores.split_threads(options).engine, kept)
        self._loop = EngineLoop.from_options(options)
        self._runs = 0

    def __enter__(self) -> Inside:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._loop.shutdown(DRAIN_SECONDS)

    def run(self, asks: Sequence[Ask]) -> tuple[Run, Steps]:
        """All asks at once; images are encoded one after another, each then submitted."""
        self._runs += 1
        ids = [f"inside-{self._runs}-{i}" for i in range(len(asks))]
        params = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True)
        first: dict[str, float] = {}
        end: dict[str, float] = {}
        done = threading.Semaphore(0)

        def sink(request_id: str, output: Output) -> None:
            now = time.perf_counter()
            first.setdefault(request_id, now)
            if output.finished:
                assert output.error is None, output.error
                end[request_id] = now
                done.release()

        recorder = _Recorder(self._checkpoint, self._itemsize)
        with patch.object(Runner, "forward", recorder.around(Runner.forward)):
            started = time.perf_counter()
            for request_id, ask in zip(ids, asks, strict=True):
                images = self._features(ask)
                text = ask.prompt if images is None else f"<image>{ask.prompt}"
                request = Request(request_id, text, params, adapter=ask.adapter, images=images)
                self._loop.submit(request, partial(sink, request_id))
            for _ in ids:
                done.acquire()
        images_given = sum(ask.image is not None for ask in asks)
        tower = work.of_tower(images_given, self._checkpoint.sizes) if images_given else None
        return (
            Run([first[i] - started for i in ids], [end[i] - started for i in ids]),
            Steps(
                recorder.works,
                [recorder.first[i] for i in ids],
                [recorder.last[i] for i in ids],
                tower,
            ),
        )

    def _features(self, ask: Ask) -> ImageFeatures | None:
        if ask.image is None:
            return None
        (features,) = self._encoder.encode([DecodedImage(ask.image)])
        layout = np.array([[0, len(features), 1, *self._encoder.grid, 0]], dtype=np.int32)
        return ImageFeatures(features, layout)


class _Recorder:
    """Notes what every step computes."""

    def __init__(self, checkpoint: Checkpoint, itemsize: int) -> None:
        self._sizes = checkpoint.sizes
        self._itemsize = itemsize
        self.works: list[Work] = []
        self.first: dict[str, int] = {}
        self.last: dict[str, int] = {}

    def around(self, forward: Callable[..., StepResult]) -> Callable[..., StepResult]:
        def noted(runner: Runner, chunks: Any, *more: Any) -> StepResult:
            for chunk in chunks:
                if chunk.completes:
                    self.first.setdefault(chunk.sequence_id, len(self.works))
                    self.last[chunk.sequence_id] = len(self.works)
            # Slots follow the names' order, as the adapters' numbers do.
            rows = [
                Rows(c.length, c.start, c.slot if c.slot >= 0 else None, c.completes)
                for c in chunks
            ]
            self.works.append(work.of_step(rows, self._sizes, self._itemsize))
            return forward(runner, chunks, *more)

        return noted
