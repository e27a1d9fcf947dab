"""One load of the engine benchmark in this process, and the floor of its steps.

The floor is the time that the steps would take if each ran at the limit of the roofline.
"""

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

from benchmarks.dtypes import ENGINE_NAMES
from benchmarks.engine.load import OUTPUT, LoadRequest, LoadTimes
from benchmarks.llava import Checkpoint
from benchmarks.work_model import ChunkWork, Work, combined_work, step_work, tower_work
from vlora import cores
from vlora.config import Options
from vlora.engine import parts
from vlora.engine.loop import EngineLoop
from vlora.model.decoder_config import dtype_of
from vlora.model.runner import Runner, StepResult
from vlora.request import ImageFeatures, Output, Request
from vlora.sampling import SamplingParams
from vlora.vision.encoder import VisionEncoder
from vlora.vision.images import DecodedImage

DRAIN_SECONDS = 1.0


@dataclass(frozen=True)
class StepTrace:
    """Work of every step of one run.

    first: for each request, index of the step that gave its first token.
    last: for each request, index of the step that gave its last token.
    tower: work of the vision tower for all images, or None.
    """

    works: Sequence[Work]
    first: Sequence[int]
    last: Sequence[int]
    tower: Work | None

    def floor(self, peak: float, rate: float) -> LoadTimes:
        """Return the times of a run in which the tower and each step reach their roofline."""
        now = 0.0 if self.tower is None else self.tower.flops / peak
        step_ends = [now := now + work.seconds(peak, rate) for work in self.works]
        return LoadTimes(
            [step_ends[step] for step in self.first], [step_ends[step] for step in self.last]
        )

    def combined_seconds(self, peak: float, rate: float) -> float:
        """Return the roofline in seconds of all work together, as `combined_work` counts it."""
        parts = [*self.works, *([] if self.tower is None else [self.tower])]
        return combined_work(parts).seconds(peak, rate)


class InProcess:
    """Engine loop and vision encoder in this process. Use as a context manager."""

    def __init__(self, checkpoint: Checkpoint, dtype: str, engine_options: dict[str, Any]) -> None:
        options = Options(
            model=checkpoint.folder,
            adapters=checkpoint.adapters,
            dtype=ENGINE_NAMES[dtype],
            **engine_options,
        )
        self._checkpoint = checkpoint
        storage = dtype_of(options.dtype, options.model)
        self._itemsize = storage.itemsize
        # Torch has one number of threads per process, so the encoder gets the engine's number,
        # which is the larger of the two.
        self._encoder = VisionEncoder(
            checkpoint.folder,
            cores.split_threads(options).engine,
            storage,
            parts.engine_device(options),
        )
        self._loop = EngineLoop.from_options(options)
        self._runs = 0

    def __enter__(self) -> InProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._loop.shutdown(DRAIN_SECONDS)

    def run(self, requests: Sequence[LoadRequest]) -> tuple[LoadTimes, StepTrace]:
        """Run all requests together, and return their times and the work of the steps.

        The requests are submitted one after another, each once its image is encoded.
        """
        self._runs += 1
        ids = [f"in-process-{self._runs}-{i}" for i in range(len(requests))]
        params = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True)
        first: dict[str, float] = {}
        end: dict[str, float] = {}
        errors: list[Exception] = []
        finished = threading.Semaphore(0)

        def sink(request_id: str, output: Output) -> None:
            now = time.perf_counter()
            first.setdefault(request_id, now)
            if output.finished:
                if output.error is not None:
                    errors.append(output.error)
                end[request_id] = now
                finished.release()

        recorder = _Recorder(self._checkpoint, self._itemsize)
        with patch.object(Runner, "forward", recorder.wrap(Runner.forward)):
            started = time.perf_counter()
            for request_id, request in zip(ids, requests, strict=True):
                images = self._features(request)
                text = request.prompt if images is None else f"<image>{request.prompt}"
                self._loop.submit(
                    Request(request_id, text, params, adapter=request.adapter, images=images),
                    partial(sink, request_id),
                )
            for _ in ids:
                finished.acquire()
        if errors:
            raise errors[0]
        images_count = sum(request.image is not None for request in requests)
        tower = tower_work(images_count, self._checkpoint.sizes) if images_count else None
        return (
            LoadTimes([first[i] - started for i in ids], [end[i] - started for i in ids]),
            StepTrace(
                recorder.works,
                [recorder.first[i] for i in ids],
                [recorder.last[i] for i in ids],
                tower,
            ),
        )

    def _features(self, request: LoadRequest) -> ImageFeatures | None:
        if request.image is None:
            return None
        image = DecodedImage(request.image)
        (features,) = self._encoder.encode([image])
        grid = self._encoder.grid(image)
        layout = np.array([[0, len(features), 1, *grid, 0]], dtype=np.int32)
        return ImageFeatures(features, layout)


class _Recorder:
    """Recorder of every step's work, and of each request's first and last step."""

    def __init__(self, checkpoint: Checkpoint, itemsize: int) -> None:
        self._sizes = checkpoint.sizes
        self._itemsize = itemsize
        self.works: list[Work] = []
        self.first: dict[str, int] = {}
        self.last: dict[str, int] = {}

    def wrap(self, forward: Callable[..., StepResult]) -> Callable[..., StepResult]:
        """Return a function that calls `forward` and records the work of the step."""

        def recorded(runner: Runner, chunks: Any, *arguments: Any) -> StepResult:
            for chunk in chunks:
                if chunk.completes:
                    self.first.setdefault(chunk.sequence_id, len(self.works))
                    self.last[chunk.sequence_id] = len(self.works)
            # The adapters' names are sorted, so slots and adapter indices have the same order.
            works = [
                ChunkWork(c.length, c.start, c.slot if c.slot >= 0 else None, c.completes)
                for c in chunks
            ]
            self.works.append(step_work(works, self._sizes, self._itemsize))
            return forward(runner, chunks, *arguments)

        return recorded
