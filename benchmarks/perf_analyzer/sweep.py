"""Sweep concurrency over the models of a running server with the real perf_analyzer, over gRPC.

For each model and concurrency it prints the throughput and the latency of the first and of the last
response. From the server's counters it adds the mean number of requests in a batch of the vision
encoder, and the mean number of rows in a decode step. Every request has its own picture or clip as
base64 text in STRING inputs. Every answer has the same number of tokens.

To measure the encoder, turn the feature cache off (`"feature_cache_bytes": 0` in `model.json`).
Otherwise the cache answers most requests of a long run, which repeats its 64 distinct pictures.

usage: python -m benchmarks.perf_analyzer.sweep --adapters base glyphs actions --json out/sweep.json
"""

from __future__ import annotations

import base64
import json
import re
import subprocess
import tempfile
import time
import urllib.request
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.frame import Row, rounded, table
from benchmarks.loads import png
from benchmarks.perf_analyzer.fetch import PerfAnalyzer, ensure
from clients.common import DEFAULT_URL, ClientError, connect, run_main, sampling_parameters
from vlora.watch.pixels import View
from vlora.watch.sources import SyntheticCamera

MODELS = ("visual_retrieval", "video_analytics", "lmm", "lmm-text")
BASE = "base"
"""Name of the base model in a list of adapters."""

SIDE, FRAMES = 64, 6
"""Side of a picture in pixels, and number of pictures of a clip."""
QUESTIONS = (
    "What color is the star?",
    "How many circles are there?",
    "What is the background?",
    "Is there a red square?",
)


def picture(seed: int) -> str:
    """Return a PNG of a shape on noise as base64, different for each seed."""
    random = np.random.default_rng(seed)
    frame = next(SyntheticCamera(2, seed, SIDE, SIDE).frames(lambda: 0.0))
    noise = random.integers(-20, 20, (SIDE, SIDE, 3))
    pixels = np.clip(frame.read(View()).astype(int) + noise, 0, 255).astype(np.uint8)
    return base64.b64encode(png(pixels)).decode()


def entry(model: str, index: int, adapter: str | None, tokens: int) -> Row:
    """Return one request, with the shapes of all inputs whose shape is not [1].

    model: name of a model; `lmm-text` is the model `lmm` without a picture.
    """
    forced: dict[str, Any] = {"max_tokens": tokens, "min_tokens": tokens, "ignore_eos": True}
    request: Row = {"text_input": [QUESTIONS[index % len(QUESTIONS)]]}
    if model == "video_analytics":
        request["frames"] = {
            "content": [picture(index * 1000 + i) for i in range(FRAMES)],
            "shape": [FRAMES],
        }
        request["task"] = ["video"]
    elif model != "lmm-text":
        request["image"] = {"content": [picture(index)], "shape": [1]}
        request["task"] = ["vqa"]
    if model.startswith("lmm"):
        request["task"] = ["vqa"]
        request["stream"] = [True]
        forced["temperature"] = 0
    request["sampling_parameters"] = [sampling_parameters(adapter, **forced)]
    return request


def write_inputs(
    path: Path, model: str, adapters: Sequence[str], images: int = 64, tokens: int = 32
) -> Path:
    """Write `images` requests that rotate over the adapters; `base` is the base model."""
    names = [None if name == BASE else name for name in adapters] or [None]
    data = [entry(model, i, names[i % len(names)], tokens) for i in range(images)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"data": data}))
    return path


STREAMING = {"visual_retrieval", "lmm"}
RUN_SECONDS, ROUNDS = 120.0, 8
"""Maximum duration of a run, and number of its requests divided by its concurrency."""
REFRESH_SECONDS = 1.5
"""Wait before reading the metrics, which the server updates every second."""

_TIMES = re.compile(
    rb'"timestamp":([0-9]+),.*?"response_timestamps":\[([0-9]+(?:,[0-9]+)*)\]', re.DOTALL
)


COUNTERS = ("encoder_requests", "encoder_groups", "decode_rows", "decode_steps")


def read_metrics(url: str) -> dict[str, float]:
    """Return each metric's value, summed over its labels, from the Prometheus text at `url`."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=10) as page:
            text = page.read().decode()
    except OSError as error:
        raise ClientError(
            f"no metrics at {url}: {error}; set their address with --metrics-url"
        ) from None
    totals: dict[str, float] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, value = line.split("{")[0].split(" ")[0], line.rsplit(" ", 1)[1]
            totals[name] = totals.get(name, 0.0) + float(value)
    return totals


def measure(
    tool: PerfAnalyzer, url: str, inputs: Path, concurrency: int, requests: int
) -> list[tuple[float, float, float]]:
    """Run perf_analyzer once and return (sent, first response, last response) of each request.

    Times are in seconds. Raise ClientError with perf_analyzer's output if a request failed or the
    run took longer than RUN_SECONDS.
    """
    model = inputs.stem.removesuffix("-text")
    with tempfile.TemporaryDirectory() as scratch:
        export = Path(scratch) / "profile.json"
        command = [str(tool.program), "-m", model, "-u", url, "-i", "grpc"]
        command += ["--streaming"] if model in STREAMING else ["--async"]
        command += ["--input-data", str(inputs), "--request-count", str(requests)]
        command += ["--concurrency-range", str(concurrency)]
        command += ["--profile-export-file", str(export)]
        try:
            process = subprocess.run(
                command, env=tool.environment, capture_output=True, text=True, timeout=RUN_SECONDS
            )
        except subprocess.TimeoutExpired:
            message = f"{model} at concurrency {concurrency} took longer than {RUN_SECONDS:.0f} s"
            raise ClientError(message) from None
        times = [] if process.returncode else read_times(export.read_bytes())
        if not times:
            output = (process.stdout + process.stderr).strip().splitlines()[-4:]
            raise ClientError(f"{model} at concurrency {concurrency}: {' '.join(output)}")
        return times


def read_times(profile: bytes) -> list[tuple[float, float, float]]:
    """Return (sent, first response, last response) in seconds of each request of a profile.

    A pattern finds the times: perf_analyzer writes raw answers into the profile, which therefore
    may not be valid JSON.
    """
    times = []
    for sent, responses in _TIMES.findall(profile):
        stamps = [int(stamp) / 1e9 for stamp in responses.split(b",")]
        times.append((int(sent) / 1e9, stamps[0], stamps[-1]))
    return times


def _nearest_rank(values: Sequence[float], share: float) -> float:
    return float(np.quantile(values, share, method="inverted_cdf"))


def summarize(
    times: Sequence[tuple[float, float, float]],
    before: Mapping[str, float],
    after: Mapping[str, float],
) -> Row:
    """Return the figures of a run from its requests' times and the server's metrics around it.

    The mean batch of the encoder and number of rows in a decode step are None if there was none.
    """
    first_ms = [(first - sent) * 1e3 for sent, first, _ in times]
    last_ms = [(last - sent) * 1e3 for sent, _, last in times]
    seconds = max(last for _, _, last in times) - min(sent for sent, _, _ in times)
    keys = [f"vlora:{name}_total" for name in COUNTERS]
    requests, groups, rows, steps = (after.get(key, 0) - before.get(key, 0) for key in keys)
    return {
        "requests": len(times),
        "requests_per_second": len(times) / seconds,
        "first_p50_ms": _nearest_rank(first_ms, 0.5),
        "last_p50_ms": _nearest_rank(last_ms, 0.5),
        "last_p95_ms": _nearest_rank(last_ms, 0.95),
        "encoder_batch": requests / groups if groups else None,
        "decode_rows": rows / steps if steps else None,
    }


def parse_arguments(arguments: Sequence[str] | None = None) -> Namespace:
    parser = ArgumentParser(
        prog="python -m benchmarks.perf_analyzer.sweep",
        description=__doc__,
        formatter_class=RawDescriptionHelpFormatter,
    )

    parser.add_argument("--url", metavar="HOST:PORT", help="gRPC address", default=DEFAULT_URL)
    parser.add_argument(
        "--metrics-url",
        metavar="URL",
        help="address of the metrics",
        default="http://127.0.0.1:8002/metrics",
    )
    parser.add_argument(
        "--concurrency",
        metavar="N",
        help="numbers of concurrent requests",
        nargs="+",
        type=int,
        default=[1, 2, 4, 8, 16],
    )
    names = "adapters in rotation; `base` is the base model (default: base)"
    parser.add_argument("--adapters", metavar="NAME", help=names, nargs="+", default=[BASE])
    parser.add_argument("--json", metavar="FILE", help="write the rows to this file", type=Path)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_arguments(arguments)
    tool = ensure()
    client = connect(options.url, "lmm")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for model in MODELS:
            path = write_inputs(Path(folder) / f"{model}.json", model, options.adapters)
            for concurrency in options.concurrency:
                before = read_metrics(options.metrics_url)
                requests = max(ROUNDS * concurrency, 16)
                times = measure(tool, options.url, path, concurrency, requests)
                time.sleep(REFRESH_SECONDS)
                figures = summarize(times, before, read_metrics(options.metrics_url))
                rows.append({"inputs": model, "concurrency": concurrency, **figures})
                print(json.dumps(rounded(rows[-1])), flush=True)
    client.close()
    title = "latencies of the first and the last response"
    Console(width=150).print(table(title, rows, " ".join(rows[0])))
    if options.json:
        meta = {key: str(value) for key, value in vars(options).items()}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"meta": meta, "rows": rounded(rows)}, indent=2) + "\n")


if __name__ == "__main__":
    run_main(main)
