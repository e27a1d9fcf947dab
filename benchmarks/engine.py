"""The engine benchmark: concurrent requests in process, over gRPC and on PEFT.

Each load runs in this process and on a real server alternately, with new prompts each time. The
floor of a run is the time that its steps would take if each ran at the limit of the roofline.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Annotated, Any, ClassVar
from unittest.mock import patch

import numpy as np
import torch
import typer
from rich.console import RenderableType

from benchmarks import frame, llava
from benchmarks.frame import Bar, Benchmark, Row, at_most
from benchmarks.llava import Checkpoint
from benchmarks.loads import OUTPUT, REQUESTS, Load, LoadRequest, LoadTimes, sampling
from benchmarks.machine import has_bf16_instructions, set_threads
from benchmarks.models import (
    ENGINE_NAMES,
    ChunkWork,
    Work,
    combined_work,
    step_work,
    tower_work,
)
from benchmarks.timing import rounded_mean
from vlora import cores
from vlora.config import Options
from vlora.engine import parts
from vlora.engine.loop import EngineLoop
from vlora.launcher.repository import ServerOptions
from vlora.launcher.server import TritonServer
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
RESPONSE_TIMEOUT_SECONDS = 180.0
ENSEMBLE = "visual_retrieval"
PEFT_BASE = "__base__"
"""PEFT's name for rows without an adapter."""


@dataclass(kw_only=True)
class EngineLoads(Benchmark):
    """Token latency of concurrent requests, compared with the roofline, gRPC and PEFT.

    A cell is a load and its storage type, or None for the run of all loads on PEFT.
    """

    name = "engine"
    title = "average token latency relative to the floor, to the engine in process, to PEFT"
    bars: ClassVar[Mapping[str, Bar]] = {
        **{f"{kind}_{adapters}": at_most(1.45) for kind in KINDS for adapters in COUNTS},
        "served_over_engine": at_most(1.1),
        "vs_peft_mixed": at_most(0.35),
    }

    dtypes: frame.Types = "bf16"
    peers: Annotated[bool, typer.Option("--peers", help="Measure PEFT's mixed batches too.")] = (
        False
    )
    served: Annotated[bool, typer.Option(help="Measure a real server over gRPC as well.")] = True
    threads: frame.Threads = None
    device: frame.Device = "cpu"
    root: frame.Root = None

    def prepare(self) -> None:
        super().prepare()
        self._types = frame.parse_types(self.dtypes)
        self._options: dict[str, Any] = {"device": self.device}
        if self.threads is not None:
            self._options |= {"engine_threads": self.threads, "encoder_threads": self.threads}
        self._split = cores.split_threads(Options(**self._options))
        set_threads(self._split.engine)
        requests = self.values.get("requests", REQUESTS)
        self._loads = [
            Load(kind, count, requests)
            for kind in self.values["kinds"]
            for count in self.values["adapters"]
        ]
        self._checkpoint = llava.make(llava.MODELS["whole"], self.root)
        self._roofline = self.roofline(self._split.engine)
        self._stack = ExitStack()
        self._running: tuple[str, InProcess, OverGrpc | None] | None = None
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
        if self._running is None or self._running[0] != dtype:
            self._start(dtype)
        assert self._running is not None
        _, engine, server = self._running
        runs: list[tuple[LoadTimes, LoadTimes, float]] = []
        served: list[LoadTimes] = []
        for _ in range(self.values["repeats"]):
            self._seed += 1
            requests = load.draw(self._checkpoint, self._seed)
            self.status(load.name)
            before = self._rates(dtype)
            times, trace = engine.run(requests)
            peak, rate = ((a + b) / 2 for a, b in zip(before, self._rates(dtype), strict=True))
            runs.append((times, trace.floor(peak, rate), trace.combined_seconds(peak, rate)))
            if server is not None:
                self.status(f"{load.name}, over gRPC")
                served.append(server.run(requests))
        yield row_of(load, dtype, runs, served)

    def _start(self, dtype: str) -> None:
        """Start an engine in this process, and a server, after those of another type ended."""
        self.close()
        self.status("loading")
        engine = self._stack.enter_context(InProcess(self._checkpoint, dtype, self._options))
        server = None
        if self.served:
            self.status("starting the server")
            streams = max(load.requests for load in self._loads)
            server = self._stack.enter_context(
                OverGrpc(self._checkpoint, dtype, self._options, streams)
            )
        engine.run(self._loads[0].draw(self._checkpoint, 0)[:2])  # Warm up.
        self._running = dtype, engine, server

    def _rates(self, dtype: str) -> tuple[float, float]:
        """Return the present rates of this machine in flop/s and bytes/s."""
        peak = max(self._roofline.measure_peak(name, RATE_SECONDS) for name in {"fp32", dtype})
        return peak, self._roofline.measure_bandwidth(READ_BYTES, RATE_SECONDS)

    def _run_peers(self) -> None:
        """Run each load once on PEFT, after our engines ended: they compete for the caches."""
        self.close()
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
            floor = f"its floor (all work at once: {row['at_once_s']:.2f} s)"
            runs = [
                ("in process", row["inside"] | {"over": row["over_floor"]}),
                (floor, row["floor"]),
            ]
            runs += [("over gRPC", times) for times in row["served"]]
            runs += [("PEFT, mixed batch", times) for times in row["peers"]]
            lines += [row | {"run": run} | times for run, times in runs]
        columns = {"load": "load", "type": "dtype", "run": "run", "over the floor": "over"}
        columns |= {"token latency ms": "token_latency_ms", "first token s": "first_token_s"}
        title = f"{self.rows[0]['requests']} concurrent requests, {OUTPUT} tokens each"
        yield frame.table(title, lines, columns | {"wall s": "wall_s"}, labels=3)

    def close(self) -> None:
        self._stack.close()
        self._running = None


def row_of(
    load: Load,
    dtype: str,
    runs: Sequence[tuple[LoadTimes, LoadTimes, float]],
    served: Sequence[LoadTimes],
) -> Row:
    """Return the row of a load.

    runs: one tuple per repeat in this process: times of the run, floor of its steps, and roofline
        in seconds of all its work together.
    served: times of each repeat over gRPC.
    """
    by_latency = sorted(runs, key=lambda run: run[0].token_latency)
    times, floor, combined = by_latency[len(by_latency) // 2]
    over = [times.token_latency / floor.token_latency for times, floor, _ in runs]
    return {
        "load": load.name,
        "dtype": dtype,
        "requests": load.requests,
        "adapters": load.adapters,
        "inside": times.as_row(),
        "floor": floor.as_row(),
        "at_once_s": round(combined, 3),
        "served": [repeat.as_row() for repeat in served],
        "peers": [],
        "over_floor": round(median(over), 3),
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
    summary["served_over_engine"] = rounded_mean(over(row, "served") for row in rows)
    peers = [ratio for row in rows if row["adapters"] and (ratio := over(row, "peers"))]
    summary["vs_peft_mixed"] = rounded_mean(1 / ratio for ratio in peers)
    return summary


@dataclass(frozen=True)
class StepTrace:
    """Work of every step of one run.

    first, last: for each request, index of the step that gave its first and its last token.
    tower: work of the vision tower for all images, or None.
    """

    works: Sequence[Work]
    first: Sequence[int]
    last: Sequence[int]
    tower: Work | None

    def floor(self, peak: float, rate: float) -> LoadTimes:
        """Return the times of a run in which the tower and each step reach their roofline."""
        now = 0.0 if self.tower is None else self.tower.flops / peak
        ends = [now := now + work.seconds(peak, rate) for work in self.works]
        return LoadTimes([ends[step] for step in self.first], [ends[step] for step in self.last])

    def combined_seconds(self, peak: float, rate: float) -> float:
        """Return the roofline in seconds of all work together, as `combined_work` counts it."""
        tower = [] if self.tower is None else [self.tower]
        return combined_work([*self.works, *tower]).seconds(peak, rate)


class InProcess:
    """Engine loop and vision encoder in this process. Use as a context manager."""

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
        self._runs = 0

    def __enter__(self) -> InProcess:
        return self

    def __exit__(self, *error: object) -> None:
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
                errors.extend([] if output.error is None else [output.error])
                end[request_id] = now
                finished.release()

        recorder = _Recorder(self._checkpoint, self._itemsize)
        with patch.object(Runner, "forward", recorder.wrap(Runner.forward)):
            started = time.perf_counter()
            for request_id, request in zip(ids, requests, strict=True):
                images = self._features(request)
                text = request.prompt if images is None else f"<image>{request.prompt}"
                asked = Request(request_id, text, params, adapter=request.adapter, images=images)
                self._loop.submit(asked, partial(sink, request_id))
            for _ in ids:
                finished.acquire()
        if errors:
            raise errors[0]
        pictures = sum(request.image is not None for request in requests)
        tower = tower_work(pictures, self._checkpoint.sizes) if pictures else None
        firsts, lasts = ([steps[i] for i in ids] for steps in (recorder.first, recorder.last))
        times = LoadTimes([first[i] - started for i in ids], [end[i] - started for i in ids])
        return times, StepTrace(recorder.works, firsts, lasts, tower)

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
        self._sizes, self._itemsize = checkpoint.sizes, itemsize
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


class OverGrpc:
    """A server of the checkpoint, and one client per stream. Use as a context manager."""

    def __init__(
        self, checkpoint: Checkpoint, dtype: str, engine_options: Mapping[str, Any], streams: int
    ) -> None:
        model_json = {"dtype": ENGINE_NAMES[dtype], **engine_options}
        self._options = ServerOptions(
            model=checkpoint.folder, adapters=checkpoint.adapters, model_json=model_json
        )
        self._streams = streams
        self._stack = ExitStack()
        self._clients: list[Any] = []
        self._responses: queue.Queue[tuple[int, float, Any, Any]] = queue.Queue()

    def __enter__(self) -> OverGrpc:
        import tritonclient.grpc as grpcclient

        with ExitStack() as stack:
            server = stack.enter_context(TritonServer(self._options))
            for number in range(self._streams):
                client = grpcclient.InferenceServerClient(server.grpc_url)
                stack.callback(client.close)
                client.start_stream(callback=partial(self._on_response, number))
                stack.callback(client.stop_stream)
                self._clients.append(client)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def run(self, requests: Sequence[LoadRequest]) -> LoadTimes:
        """Send all requests at once, one per stream, and return their times.

        If a request fails, its error is raised.
        """
        all_inputs = [_inputs(request) for request in requests]
        first: dict[int, float] = {}
        end: dict[int, float] = {}
        started = time.perf_counter()
        # There may be fewer requests than streams.
        for client, inputs in zip(self._clients, all_inputs, strict=False):
            client.async_stream_infer(ENSEMBLE, inputs, enable_empty_final_response=True)
        while len(end) < len(requests):
            number, now, result, error = self._responses.get(timeout=RESPONSE_TIMEOUT_SECONDS)
            if error is not None:
                raise error
            first.setdefault(number, now)
            if result.get_response().parameters["triton_final_response"].bool_param:
                end[number] = now
        order = range(len(requests))
        return LoadTimes([first[i] - started for i in order], [end[i] - started for i in order])

    def _on_response(self, number: int, result: Any, error: Any) -> None:
        self._responses.put((number, time.perf_counter(), result, error))


def _inputs(request: LoadRequest) -> list[Any]:
    import tritonclient.grpc as grpcclient

    keys = json.dumps(sampling(request.adapter)).encode()
    values = {"text_input": request.prompt.encode(), "sampling_parameters": keys, "task": b"raw"}
    if (file := request.file()) is not None:
        values["image"] = file
    tensors = []
    for name, value in values.items():
        tensors.append(grpcclient.InferInput(name, [1], "BYTES"))
        tensors[-1].set_data_from_numpy(np.array([value], dtype=np.object_))
    return tensors


def _peer_type() -> torch.dtype:
    """Return the type in which torch is fastest on this CPU."""
    return torch.bfloat16 if has_bf16_instructions() else torch.float32


class PeftMixed:
    """The unchanged model with every adapter attached, as PEFT's mixed batches require."""

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

        self._model.generate(
            input_ids=ids["input_ids"],
            attention_mask=ids["attention_mask"],
            **inputs,
            adapter_names=[request.adapter or PEFT_BASE for request in requests],
            do_sample=False,
            min_new_tokens=OUTPUT,
            max_new_tokens=OUTPUT,
            logits_processor=[record_time],
        )
        wall = time.perf_counter() - started
        return LoadTimes([token_times[0]] * len(requests), [wall] * len(requests))
