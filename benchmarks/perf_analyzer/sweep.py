"""Sweep concurrency over the models of a running server with the real perf_analyzer, over gRPC.

For each model and concurrency it prints the throughput and the latency of the first and of the last
response. From the server's counters it adds the mean number of requests in a batch of the vision
encoder, and the mean number of rows in a decode step.

To measure the encoder, turn the feature cache off (`"feature_cache_bytes": 0` in `model.json`).
Otherwise the cache answers most requests of a long run, which repeats its 64 distinct pictures.

usage: python -m benchmarks.perf_analyzer.sweep --adapters base glyphs actions --json out/sweep.json
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.perf_analyzer.fetch import PerfAnalyzer, ensure
from benchmarks.perf_analyzer.inputs import BASE, MODELS, write_inputs
from clients.common import DEFAULT_URL, ClientError, connect, run_main
from clients.stream_log import quantile

STREAMING = {"visual_retrieval", "lmm"}
ENCODER_REQUESTS = "vlora:encoder_requests_total"
ENCODER_GROUPS = "vlora:encoder_groups_total"
DECODE_ROWS = "vlora:decode_rows_total"
DECODE_STEPS = "vlora:decode_steps_total"
REFRESH_SECONDS = 1.5
"""Wait before reading the metrics, which the server updates every second."""

_TIMES = re.compile(
    rb'"timestamp":([0-9]+),.*?"response_timestamps":\[([0-9]+(?:,[0-9]+)*)\]', re.DOTALL
)


@dataclass(frozen=True)
class Row:
    """Figures of one model at one concurrency. A mean is None if nothing was counted."""

    inputs: str
    concurrency: int
    requests: int
    requests_per_second: float
    first_p50_ms: float
    last_p50_ms: float
    last_p95_ms: float
    encoder_batch: float | None
    decode_rows: float | None


@dataclass(frozen=True)
class ServerCounters:
    """Counters of the server at one moment."""

    encoder_requests: float
    encoder_groups: float
    decode_rows: float
    decode_steps: float

    @classmethod
    def read(cls, metrics_url: str) -> ServerCounters:
        """Read the counters from the server's metrics."""
        time.sleep(REFRESH_SECONDS)
        metrics = read_metrics(metrics_url)
        return cls(
            encoder_requests=metrics.get(ENCODER_REQUESTS, 0.0),
            encoder_groups=metrics.get(ENCODER_GROUPS, 0.0),
            decode_rows=metrics.get(DECODE_ROWS, 0.0),
            decode_steps=metrics.get(DECODE_STEPS, 0.0),
        )


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


def ratio(numerator: float, denominator: float) -> float | None:
    """Return the ratio, or None if the denominator is 0."""
    return numerator / denominator if denominator else None


def measure(
    tool: PerfAnalyzer, url: str, inputs: Path, concurrency: int, requests: int, limit: float
) -> list[tuple[float, float, float]]:
    """Run perf_analyzer once and return (sent, first response, last response) of each request.

    Times are in seconds. Raise ClientError with perf_analyzer's output if a request failed or the
    run took longer than `limit` seconds.
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
                command, env=tool.environment, capture_output=True, text=True, timeout=limit
            )
        except subprocess.TimeoutExpired:
            message = f"{model} at concurrency {concurrency} took longer than {limit:.0f} s"
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


def summarize(
    inputs: str,
    concurrency: int,
    times: Sequence[tuple[float, float, float]],
    before: ServerCounters,
    after: ServerCounters,
) -> Row:
    """Return the row of a run from its requests' times and the server's counters around it."""
    first_ms = sorted((first - sent) * 1e3 for sent, first, _ in times)
    last_ms = sorted((last - sent) * 1e3 for sent, _, last in times)
    seconds = max(last for _, _, last in times) - min(sent for sent, _, _ in times)
    return Row(
        inputs=inputs,
        concurrency=concurrency,
        requests=len(times),
        requests_per_second=len(times) / seconds,
        first_p50_ms=quantile(first_ms, 0.5),
        last_p50_ms=quantile(last_ms, 0.5),
        last_p95_ms=quantile(last_ms, 0.95),
        encoder_batch=ratio(
            after.encoder_requests - before.encoder_requests,
            after.encoder_groups - before.encoder_groups,
        ),
        decode_rows=ratio(
            after.decode_rows - before.decode_rows, after.decode_steps - before.decode_steps
        ),
    )


HEADER = (
    "inputs            concurrency  requests  req/s  first p50 ms  last p50 ms  last p95 ms"
    "  encoder batch  decode rows"
)


def line_of(row: Row) -> str:
    """Return the row as a line of the table under HEADER."""
    batch, rows = (
        "-" if mean is None else f"{mean:.2f}" for mean in (row.encoder_batch, row.decode_rows)
    )
    return (
        f"{row.inputs:<18}{row.concurrency:10d}{row.requests:10d}{row.requests_per_second:8.1f}"
        f"{row.first_p50_ms:14.1f}{row.last_p50_ms:13.1f}{row.last_p95_ms:13.1f}"
        f"{batch:>15}{rows:>13}"
    )


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.perf_analyzer.sweep",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--url",
        default=DEFAULT_URL,
        metavar="HOST:PORT",
        help="gRPC address (default: %(default)s)",
    )
    parser.add_argument(
        "--metrics-url",
        default="http://127.0.0.1:8002/metrics",
        metavar="URL",
        help="address of the server's metrics (default: %(default)s)",
    )
    parser.add_argument(
        "--models",
        nargs="+",
        choices=MODELS,
        default=list(MODELS),
        metavar="MODEL",
        help=f"models to measure: {', '.join(MODELS)} (default: all)",
    )
    parser.add_argument(
        "--concurrency",
        nargs="+",
        type=int,
        default=[1, 2, 4, 8, 16],
        metavar="N",
        help="numbers of concurrent requests (default: 1 2 4 8 16)",
    )
    parser.add_argument(
        "--adapters",
        nargs="+",
        default=[BASE],
        metavar="NAME",
        help="adapters in rotation; `base` is the base model (default: base)",
    )
    parser.add_argument(
        "--images",
        type=int,
        default=64,
        metavar="N",
        help="number of distinct requests (default: 64)",
    )
    parser.add_argument(
        "--tokens",
        type=int,
        default=32,
        metavar="N",
        help="number of tokens of every answer (default: 32)",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=8,
        metavar="N",
        help="number of requests of a run, divided by its concurrency (default: 8)",
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=120,
        metavar="SECONDS",
        help="maximum seconds of one run (default: 120)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to this file")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_arguments(arguments)
    tool = ensure()
    client = connect(options.url, "lmm")
    rows: list[Row] = []
    print(HEADER)
    with tempfile.TemporaryDirectory() as folder:
        for model in options.models:
            path = Path(folder) / f"{model}.json"
            write_inputs(path, model, options.adapters, options.images, options.tokens)
            for concurrency in options.concurrency:
                requests = max(options.rounds * concurrency, 16)
                before = ServerCounters.read(options.metrics_url)
                times = measure(tool, options.url, path, concurrency, requests, options.limit)
                after = ServerCounters.read(options.metrics_url)
                rows.append(summarize(model, concurrency, times, before, after))
                print(line_of(rows[-1]), flush=True)
    client.close()
    if options.json:
        meta = {key: str(value) for key, value in vars(options).items()}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(
            json.dumps({"meta": meta, "rows": [asdict(row) for row in rows]}, indent=2) + "\n"
        )


if __name__ == "__main__":
    run_main(main)
