"""The engine benchmark: concurrent requests in process, over gRPC and on PEFT.

Each load runs in this process and on a real server alternately, with new prompts each time. The
floor of a run is the time that its steps would take if each ran at the limit of the roofline.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Annotated, Any, ClassVar
from unittest.mock import patch

import numpy as np
import torch
import typer
from rich.console import RenderableType

from benchmarks import frame
from benchmarks.frame import Benchmark, Row, mean_of
from benchmarks.llava import Checkpoint
from benchmarks.loads import OUTPUT, GrpcClient, Load, LoadRequest, LoadTimes
from benchmarks.machine import has_bf16_instructions, set_threads
from benchmarks.models import ENGINE_NAMES, ChunkWork, Work, step_work, tower_work
from vlora import cores
from vlora.config import Options
from vlora.engine import parts
from vlora.engine.loop import EngineLoop
from vlora.launcher.repository import ServerOptions
from vlora.launcher.server import TritonServer
from vlora.model.chunk import Chunk
from vlora.model.decoder_config import dtype_of
from vlora.model.runner import Runner, StepResult
from vlora.request import ImageFeatures, Output, Request
from vlora.sampling import SamplingParams
from vlora.vision.encoder import VisionEncoder
from vlora.vision.families.base import PROCESSOR_BACKEND
from vlora.vision.images import DecodedImage

KINDS, COUNTS = ("text", "image"), (0, 1, 4, 16)
"""Kinds of requests and numbers of adapters that the summary has keys for."""
RATE_SECONDS, READ_BYTES = 0.15, 256 << 20
"""Duration of a microbenchmark before and after every run in this process, and bytes it reads."""
DRAIN_SECONDS = 1.0
PEFT_BASE = "__base__"
"""PEFT's name for rows without an adapter."""


@dataclass(kw_only=True)
class EngineLoads(Benchmark):
    """Token latency of concurrent requests, compared with the roofline, gRPC and PEFT.

    A cell is a load and its storage type, or None for the run of all loads on PEFT.
    """

    name = "engine"
    title = "average token latency relative to the floor, to the engine in process, to PEFT"
    bars: ClassVar = {
        **{f"{kind}_{adapters}": "≤ 1.45" for kind in KINDS for adapters in COUNTS},
        "served_over_engine": "≤ 1.1",
        "vs_peft_mixed": "≤ 0.35",
    }

    dtypes: frame.Types = "bf16"
    peers: Annotated[bool, typer.Option("--peers", help="Measure PEFT's mixed batches too.")] = (
        False
    )
    served: Annotated[bool, typer.Option(help="Measure a real server over gRPC as well.")] = True
    threads: Annotated[
        int | None, typer.Option("--threads", help="Number of threads; default: as in a server.")
    ] = None
    device: frame.Device = "cpu"

    def prepare(self) -> None:
        super().prepare()
        self._types = frame.parse_types(self.dtypes)
        self._options: dict[str, Any] = {"device": self.device}
        if self.threads is not None:
            self._options |= {"engine_threads": self.threads, "encoder_threads": self.threads}
        self._split = cores.split_threads(Options(**self._options))
        set_threads(self._split.engine)
        self._loads = [
            Load(kind, count, self.values["requests"])
            for kind in self.values["kinds"]
            for count in self.values["adapters"]
        ]
        self._checkpoint = self.generated()
        self._roofline = self.roofline(self._split.engine)
        self._runner = self.stack.enter_context(asyncio.Runner())
        self._engine: tuple[str, InProcess] | None = None
        self._client: GrpcClient | None = None
        self._running = self.stack.enter_context(ExitStack())
        self._seed = 0

    def settings(self) -> dict[str, Any]:
        peer = {"peft_mixed": str(_peer_type())}
        settings = {"threads": self._split._asdict(), "device": self.device}
        return settings | ({"peers": peer} if self.peers else {})

    def cells(self) -> Sequence[tuple[Load, str] | None]:
        loads = [(load, dtype) for dtype in self._types for load in self._loads]
        return [*loads, None] if self.peers else loads

    def measure(self, cell: tuple[Load, str] | None) -> Iterator[Row]:
        if cell is None:
            self._run_peers()
            return
        load, dtype = cell
        if self._engine is None or self._engine[0] != dtype:
            self._engine = dtype, self._start(dtype)
        engine = self._engine[1]
        runs: list[tuple[LoadTimes, LoadTimes]] = []
        served: list[LoadTimes] = []
        for _ in range(self.values["repeats"]):
            self._seed += 1
            requests = load.draw(self._checkpoint, self._seed)
            self.status(load.name)
            before = self._rates(dtype)
            times, trace = engine.run(requests)
            peak, rate = ((a + b) / 2 for a, b in zip(before, self._rates(dtype), strict=True))
            runs.append((times, trace.floor(peak, rate)))
            if self._client is not None:
                self.status(f"{load.name}, over gRPC")
                served.append(self._runner.run(self._client.run(requests)))
        yield row_of(load, dtype, runs, served)

    def _start(self, dtype: str) -> InProcess:
        """Start an engine in this process, and a server, after those of another type ended."""
        self._running.close()
        self.status("loading")
        engine = InProcess(self._checkpoint, dtype, self._options)
        self._running.callback(engine.close)
        if self.served:
            self.status("starting the server")
            made, model_json = self._checkpoint, {"dtype": ENGINE_NAMES[dtype], **self._options}
            options = ServerOptions(
                model=made.folder, adapters=made.adapters, model_json=model_json
            )
            server = self._running.enter_context(TritonServer(options))

            client = self._client = GrpcClient(server.grpc_url)
            self._runner.run(client.open())
            self._running.callback(lambda: self._runner.run(client.close()))
        engine.run(self._loads[0].draw(self._checkpoint, 0)[:2])  # Warm up.
        return engine

    def _rates(self, dtype: str) -> tuple[float, float]:
        """Return the present rates of this machine in flop/s and bytes/s."""
        peak = max(self._roofline.measure_peak(name, RATE_SECONDS) for name in {"fp32", dtype})
        return peak, self._roofline.measure_bandwidth(READ_BYTES, RATE_SECONDS)

    def _run_peers(self) -> None:
        """Run each load once on PEFT, after our engines ended: they compete for the caches."""
        self._running.close()
        self.status("loading PEFT")
        peer = PeftMixed(self._checkpoint, _peer_type())
        for seed, row in enumerate(self.rows, start=1):
            self.status(f"{row['load']}, PEFT")
            load = next(load for load in self._loads if load.name == row["load"])
            times = peer.run(load.draw(self._checkpoint, seed))
            row["peers"].append(times.as_row())

    def summarize(self) -> dict[str, Any]:
        return summarize(self.rows)

    def tables(self) -> Iterable[RenderableType]:
        lines: list[Row] = []
        for row in self.rows:
            inside = row["inside"] | {"over": row["over_floor"]}
            runs = [("in process", inside), ("its floor", row["floor"])]
            runs += [("over gRPC", times) for times in row["served"]]
            runs += [("PEFT, mixed batch", times) for times in row["peers"]]
            lines += [row | {"run": run} | times for run, times in runs]
        title = f"{self.rows[0]['requests']} concurrent requests, {OUTPUT} tokens each"
        keys = "load dtype run over token_latency_ms first_token_s wall_s"
        yield frame.table(title, lines, keys)


def row_of(
    load: Load,
    dtype: str,
    runs: Sequence[tuple[LoadTimes, LoadTimes]],
    served: Sequence[LoadTimes],
) -> Row:
    """Return the row of a load.

    runs: times of each repeat in this process, and the floor of its steps.
    served: times of each repeat over gRPC.
    """
    by_latency = sorted(runs, key=lambda run: run[0].token_latency)
    times, floor = by_latency[len(by_latency) // 2]
    return {
        "load": load.name,
        "dtype": dtype,
        "requests": load.requests,
        "adapters": load.adapters,
        "inside": times.as_row(),
        "floor": floor.as_row(),
        "served": [repeat.as_row() for repeat in served],
        "peers": [],
        "over_floor": median(run.token_latency / floor.token_latency for run, floor in runs),
    }


def summarize(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the latency of each load divided by that of its floor, and two geometric means.

    `served_over_engine` is the latency over gRPC divided by that in process. `vs_peft_mixed` is the
    latency in process divided by that of PEFT, over the loads with adapters.
    """

    def over(row: Row, others: str) -> float | None:
        latencies = [times["token_latency_ms"] for times in row[others]]
        return median(latencies) / row["inside"]["token_latency_ms"] if latencies else None

    by_load = {row["load"]: row["over_floor"] for row in rows}
    summary = {
        f"{kind}_{count}": by_load.get(f"{kind}_{count}") for kind in KINDS for count in COUNTS
    }
    summary["served_over_engine"] = mean_of(over(row, "served") for row in rows)
    peers = [ratio for row in rows if row["adapters"] and (ratio := over(row, "peers"))]
    summary["vs_peft_mixed"] = mean_of(1 / ratio for ratio in peers)
    return summary


@dataclass(frozen=True)
class StepTrace:
    """Work of every step of one run.

    first, last: for each request, index of the step that gave its first and its last token.
    tower: work of the vision tower for all images.
    """

    works: Sequence[Work]
    first: Sequence[int]
    last: Sequence[int]
    tower: Work

    def floor(self, peak: float, rate: float) -> LoadTimes:
        """Return the times of a run in which the tower and each step reach their roofline."""
        now = self.tower.flops / peak
        ends = [now := now + work.seconds(peak, rate) for work in self.works]
        return LoadTimes([ends[step] for step in self.first], [ends[step] for step in self.last])


class InProcess:
    """Engine loop and vision encoder in this process."""

    def __init__(
        self, checkpoint: Checkpoint, dtype: str, engine_options: Mapping[str, Any]
    ) -> None:
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
        threads, device = cores.split_threads(options).engine, parts.engine_device(options)
        self._encoder = VisionEncoder(checkpoint.folder, threads, storage, device)
        self._loop = EngineLoop.from_options(options)
        self._params = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True)
        self._runs = 0

    def close(self) -> None:
        self._loop.shutdown(DRAIN_SECONDS)

    def run(self, requests: Sequence[LoadRequest]) -> tuple[LoadTimes, StepTrace]:
        """Run all requests together, and return their times and the work of the steps.

        The requests are submitted one after another, each once its image is encoded.
        """
        self._runs += 1
        ids = [f"in-process-{self._runs}-{i}" for i in range(len(requests))]
        first: dict[str, float] = {}
        end: dict[str, float] = {}
        errors: list[Exception | None] = []
        finished = threading.Semaphore(0)

        def sink(request_id: str, output: Output) -> None:
            now = time.perf_counter()
            first.setdefault(request_id, now)
            if output.finished:
                errors.append(output.error)
                end[request_id] = now
                finished.release()

        works: list[Work] = []
        first_step: dict[str, int] = {}
        last_step: dict[str, int] = {}
        forward = Runner.forward

        def recorded(runner: Runner, chunks: Any, *arguments: Any) -> StepResult:
            """Record the work of the step, and each request's first and last step."""
            for chunk in chunks:
                if chunk.completes:
                    first_step.setdefault(chunk.sequence_id, len(works))
                    last_step[chunk.sequence_id] = len(works)
            parts = [_work_of(chunk) for chunk in chunks]
            works.append(step_work(parts, self._checkpoint.sizes, self._itemsize))
            return forward(runner, chunks, *arguments)

        with patch.object(Runner, "forward", recorded):
            started = time.perf_counter()
            for request_id, request in zip(ids, requests, strict=True):
                images, adapter = self._features(request), request.adapter
                text = request.prompt if images is None else f"<image>{request.prompt}"
                asked = Request(request_id, text, self._params, adapter=adapter, images=images)
                self._loop.submit(asked, partial(sink, request_id))
            for _ in ids:
                finished.acquire()
        if error := next(filter(None, errors), None):
            raise error
        pictures = sum(request.image is not None for request in requests)
        firsts, lasts = ([steps[i] for i in ids] for steps in (first_step, last_step))
        times = LoadTimes([first[i] - started for i in ids], [end[i] - started for i in ids])
        return times, StepTrace(works, firsts, lasts, tower_work(pictures, self._checkpoint.sizes))

    def _features(self, request: LoadRequest) -> ImageFeatures | None:
        if request.image is None:
            return None
        image = DecodedImage(request.image)
        (features,) = self._encoder.encode([image])
        grid = self._encoder.grid(image)
        layout = np.array([[0, len(features), 1, *grid, 0]], dtype=np.int32)
        return ImageFeatures(features, layout)


def _work_of(chunk: Chunk) -> ChunkWork:
    # The adapters' names are sorted, so slots and adapter indices have the same order.
    adapter = chunk.slot if chunk.slot >= 0 else None
    return ChunkWork(chunk.length, chunk.start, adapter, chunk.completes)


def _peer_type() -> torch.dtype:
    """Return the type in which torch is fastest on this CPU."""
    return torch.bfloat16 if has_bf16_instructions() else torch.float32


class PeftMixed:
    """The unchanged model with every adapter attached, as PEFT's mixed batches require.

    generated: tokens of the answers of the last run.
    """

    generated: Sequence[list[int]] = ()

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype) -> None:
        from peft import PeftModel
        from transformers import AutoImageProcessor, AutoTokenizer, LlavaForConditionalGeneration

        folder, first, *others = checkpoint.folder, *checkpoint.adapter_names
        self._dtype = dtype
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self._processor: Any = AutoImageProcessor.from_pretrained(folder, backend=PROCESSOR_BACKEND)
        self._base = LlavaForConditionalGeneration.from_pretrained(folder, dtype=dtype).eval()
        self._base.generation_config.eos_token_id = None
        options = {"autocast_adapter_dtype": False}
        path = checkpoint.adapters / first
        self._model = PeftModel.from_pretrained(self._base, path, adapter_name=first, **options)
        for name in others:
            self._model.load_adapter(checkpoint.adapters / name, adapter_name=name, **options)
        self._model.to(dtype).eval()

    @torch.inference_mode()
    def run(self, requests: Sequence[LoadRequest]) -> LoadTimes:
        """Generate all answers in one batch, and return the times of their tokens."""
        started = time.perf_counter()
        token_times: list[float] = []
        inputs: dict[str, Any] = {}
        placeholders = ""
        if requests[0].image is not None:
            images = [request.image for request in requests]
            pixels = self._processor(images=images, return_tensors="pt")
            inputs["pixel_values"] = pixels["pixel_values"].to(self._dtype)
            placeholders = "<image>" * self._base.config.image_seq_length
        texts = [placeholders + request.prompt for request in requests]
        ids = self._tokenizer(texts, return_tensors="pt")

        def record_time(tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            token_times.append(time.perf_counter() - started)
            return scores

        names = [request.adapter or PEFT_BASE for request in requests]
        without = all(name == PEFT_BASE for name in names)
        with self._model.disable_adapter() if without else nullcontext():
            generated = self._model.generate(
                input_ids=ids["input_ids"],
                attention_mask=ids["attention_mask"],
                **inputs,
                **({} if without else {"adapter_names": names}),
                do_sample=False,
                min_new_tokens=OUTPUT,
                max_new_tokens=OUTPUT,
                logits_processor=[record_time],
            )
        wall = time.perf_counter() - started
        self.generated = generated[:, ids["input_ids"].shape[1] :].tolist()
        return LoadTimes([token_times[0]] * len(requests), [wall] * len(requests))
