"""Measure `vlora watch` with many cameras on a server of the demo, and print a table.

The cameras are real RTSP streams of 640 x 360 pixels and 10 frames a second in H.264, which was
encoded beforehand. They show an object that moves or stands still, another one every few seconds.
Facts, which an alert is to find, are stars for 6 to 20 s. The cameras run without and with the
gate. --search then looks for the largest number that the machine carries without it: with the 99th
percentile of the lag within the chunk's seconds and the median time of an answer, and at most 1 %
of the chunks dropped.

It needs GStreamer's RTSP server (see CONTRIBUTING.md), and takes twice --seconds, about a minute to
start, and --search-seconds and 15 s for each number that is tried.

usage: python -m tests.programs.cameras [--quick] [--search] --json figures.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import psutil
import yaml
from PIL import Image

from tests.support.cameras import RTSP_SERVER, SYSTEM_PYTHON
from tests.support.polling import until
from tests.support.triton_client import serving
from tests.support.watching import free_port, hook
from tools.demo import lexicon
from tools.demo.motion import base_clip
from vlora.launcher.repository import ServerOptions
from vlora.launcher.server import TritonServer
from vlora.net import get
from vlora.watch.pixels import Pixels

WIDTH, HEIGHT = 640, 360
CLIPS, CLIP_SECONDS, RATE = 2, 120, 10
SHIFT = 37  # frames by which a camera is ahead of the one before
DRAWN = 256  # Side in pixels of the square drawing that is stretched.
PART_SECONDS = (6, 20)  # Bounds of a fact's seconds, and of those between two facts.
BLOCK_SECONDS = (3, 7)  # Bounds of the seconds for which one object is shown.
STILL_SHARE = 0.5
QUESTION = "Is there a star in the picture?"
RULE = {"name": "star", "when": {"equals": "yes"}, "begin": "2 of 3", "end": "2 of 3"}
START_SECONDS = 60.0
RULE_SECONDS = 5.0  # A fact must have ended so long before the end of the run.
SETTLE_SECONDS = 3.0  # From the first answers to the begin of the measurement.
NEAR_SECONDS = 1.5  # An event may begin so long before or after its fact.
SEARCHED = (4, 8, 12, 16, 24, 32, 40, 48, 64, 96, 128)
MAX_DROPPED = 0.01
COUNTED = ("dropped_chunks_total", "chunks_total", "gaps_total", "damaged_frames_total")
SAMPLE = re.compile(r'vlora_watch_(\w+)\{camera="[^"]+"\} (\S+)')


class Fact(NamedTuple):
    """Seconds of a clip, or Unix times, between which a star is there."""

    begin: float
    end: float


class Clip(NamedTuple):
    path: Path
    facts: Sequence[Fact]


def block(rng: np.random.Generator, has_star: bool) -> list[Pixels]:
    """Return the frames of one second, [height, width, 3], of an object that moves or stands still:
    a star, or anything else."""
    clip = base_clip(rng, "standing still" if rng.random() < STILL_SHARE else None)
    shape = str(rng.choice([one for one in lexicon.SHAPES if one != "star"]))
    things = (replace(clip.scene.things[0], shape="star" if has_star else shape),)
    clip = replace(clip, scene=replace(clip.scene, things=things))
    is_still = clip.action == "standing still"
    frames = clip.frames([0.0] if is_still else np.linspace(0, 1, RATE).tolist(), DRAWN)
    size = (WIDTH, HEIGHT)
    shown = [np.asarray(Image.fromarray(one).resize(size), np.uint8) for one in frames]
    return shown * RATE if is_still else shown


def draw_clip(seed: int) -> tuple[list[Pixels], list[Fact]]:
    """Return the frames of a clip, and its facts, of which the end of the clip cuts none off."""
    rng = np.random.default_rng(seed)
    frames: list[Pixels] = []
    facts, is_fact, left = [], False, CLIP_SECONDS
    while left:
        seconds = min(left, int(rng.integers(*PART_SECONDS)))
        is_fact = not is_fact and seconds < left
        if is_fact:
            facts.append(Fact(CLIP_SECONDS - left, CLIP_SECONDS - left + seconds))
        left -= seconds
        while seconds:
            count = min(seconds, int(rng.integers(*BLOCK_SECONDS)))
            frames += block(rng, is_fact) * count
            seconds -= count
    return frames, facts


def write_clip(path: Path, seed: int) -> Clip:
    """Encode a clip: its access units, each behind its length in four bytes."""
    import av

    frames, facts = draw_clip(seed)
    encoder = av.CodecContext.create("libx264", "w")
    encoder.width, encoder.height, encoder.pix_fmt = WIDTH, HEIGHT, "yuv420p"
    encoder.framerate, encoder.time_base = RATE, Fraction(1, RATE)
    encoder.options = {"preset": "veryfast", "tune": "zerolatency", "g": str(RATE), "threads": "1"}
    with path.open("wb") as file:
        for frame in [*frames, None]:
            image = None if frame is None else av.VideoFrame.from_ndarray(frame, format="rgb24")
            for packet in encoder.encode(image):
                file.write(packet.size.to_bytes(4, "big") + bytes(packet))
    return Clip(path, facts)


def facts_of(clip: Clip, number: int, begin: float, end: float) -> Iterator[Fact]:
    """Yield the facts of camera `number` between two Unix times, without those that are cut off."""
    ahead = number * SHIFT / RATE
    first = int((begin + ahead) // CLIP_SECONDS)
    for loop in range(first, int((end + ahead) // CLIP_SECONDS) + 1):
        for fact in clip.facts:
            start = loop * CLIP_SECONDS - ahead
            if begin <= start + fact.begin and start + fact.end <= end:
                yield Fact(start + fact.begin, start + fact.end)


@contextmanager
def cameras_of(clips: Sequence[Clip], count: int) -> Iterator[str]:
    """Yield the URL in front of the numbers of the cameras."""
    files = [str(clip.path) for clip in clips]
    numbers = ("--count", str(count), "--rate", str(RATE), "--shift", str(SHIFT))
    command = [SYSTEM_PYTHON, str(RTSP_SERVER), "0", "--clips", *files, *numbers]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            yield f"rtsp://127.0.0.1:{process.stdout.readline().strip()}/"
        finally:
            process.kill()


class Usage:
    """Processor time, memory and open files of processes, from samples.

    growth: of memory in MiB and of open files, from the second tenth of the samples to the last.
    """

    def __init__(self, processes: Sequence[psutil.Process]) -> None:
        self._processes = processes
        self._began, self._cpu = time.time(), self._cpu_seconds()
        self.samples: list[tuple[float, int, int]] = []  # Unix time, bytes, open files

    def sample(self) -> None:
        size = sum(one.memory_info().rss for one in self._processes)
        files = sum(one.num_fds() for one in self._processes)
        self.samples.append((time.time(), size, files))

    def row(self, name: str) -> dict[str, Any]:
        cores = (self._cpu_seconds() - self._cpu) / (time.time() - self._began)
        tenth = max(1, len(self.samples) // 10)
        first, last = self.samples[tenth : 2 * tenth] or self.samples[:1], self.samples[-tenth:]
        size, files = (
            [median(one[field] for one in some) for some in (first, last)] for field in (1, 2)
        )
        return {
            f"{name}_cores": cores,
            f"{name}_mib": size[1] / 2**20,
            f"{name}_growth_mib": (size[1] - size[0]) / 2**20,
            f"{name}_files": files[1],
            f"{name}_growth_files": files[1] - files[0],
        }

    def _cpu_seconds(self) -> float:
        return sum(sum(one.cpu_times()[:2]) for one in self._processes)


def counts(port: int) -> dict[str, float]:
    """Return the sums over all cameras of the metrics of the page."""
    text = get(f"http://127.0.0.1:{port}/metrics", 10, direct=True).decode()
    total: dict[str, float] = defaultdict(float)
    for name, value in SAMPLE.findall(text):
        total[name] += float(value)
    return {name: total[name] for name in COUNTED}


class Run:
    """A run of `vlora watch` with `count` cameras."""

    def __init__(self, folder: Path, server: TritonServer, clips: Sequence[Clip]) -> None:
        self._folder, self._server, self._clips = folder, server, clips
        self._processes = psutil.Process().children(recursive=True)

    def measure(self, count: int, seconds: float, interval: float, gate: bool) -> dict[str, Any]:
        """Return the row of a table."""
        log, port = self._folder / "answers.jsonl", free_port()
        log.unlink(missing_ok=True)
        events: list[tuple[float, dict[str, Any]]] = []

        def take(body: bytes) -> int:
            events.append((time.time(), json.loads(body)))
            return 200

        with ExitStack() as stack:
            url = stack.enter_context(cameras_of(self._clips, count))
            receiver = stack.enter_context(hook(take))
            file = self._write(url, count, interval, gate, receiver.port)
            options = ("--jsonl", str(log), "--page", f"127.0.0.1:{port}")
            command = [sys.executable, "-m", "vlora.cli", "watch", str(file), *options]
            output = stack.enter_context((self._folder / "watch.log").open("w"))
            watch = stack.enter_context(subprocess.Popen(command, stdout=output, stderr=output))
            stack.callback(watch.kill)
            until(lambda: len(_answered(log)) == count or watch.poll() is not None, START_SECONDS)
            time.sleep(SETTLE_SECONDS)
            known, began = counts(port), time.time()
            usages = {
                "watch": Usage([psutil.Process(watch.pid)]),
                "server": Usage(self._processes),
            }
            while time.time() < began + seconds:
                time.sleep(1.0)
                for usage in usages.values():
                    usage.sample()
            ended = time.time()
            row = {name: value - known[name] for name, value in counts(port).items()}
            for name, usage in usages.items():
                row |= usage.row(name)
            watch.send_signal(signal.SIGINT)
            watch.wait(30)
        records = [
            one for one in _records(log) if began <= one["ended"] and one["answered"] <= ended
        ]
        row |= {"cameras": count, "interval": interval, "gate": gate, "seconds": ended - began}
        row |= lag_row(records, row["chunks_total"], row["dropped_chunks_total"], gate)
        return row | self._alert_row(events, count, began, ended)

    def _write(self, url: str, count: int, interval: float, gate: bool, port: int) -> Path:
        keys: dict[str, Any] = {
            "task": "vqa",
            "question": QUESTION,
            "interval": interval,
            "alerts": [RULE],
        }
        keys |= {"gate": {"every_seconds": 60.0}} if gate else {}
        content = {
            "server": self._server.grpc_url,
            "retention": {"folder": str(self._folder / "kept"), "megabytes": 100.0},
            "sinks": [{"name": "hook", "kind": "webhook", "url": f"http://127.0.0.1:{port}/"}],
            "defaults": keys,
            "cameras": {str(number): {"url": f"{url}{number}"} for number in range(count)},
        }
        path = self._folder / "cameras.yaml"
        path.write_text(yaml.safe_dump(content))
        return path

    def _alert_row(
        self, events: Sequence[tuple[float, dict[str, Any]]], count: int, began: float, ended: float
    ) -> dict[str, Any]:
        """Compare events with facts. Those of facts that the run cuts off do not count."""
        found = right = raised = 0
        delays: list[float] = []
        for number in range(count):
            clip = self._clips[number % len(self._clips)]
            facts = [*facts_of(clip, number, began, ended - RULE_SECONDS)]
            around = [*facts_of(clip, number, began - CLIP_SECONDS, ended + CLIP_SECONDS)]
            begins = [
                (at, one["begin"])
                for at, one in events
                if one["camera"] == str(number) and one["kind"] == "begin" and at >= began
            ]
            raised += len(begins)
            right += sum(any(_is_of(fact, begin) for fact in around) for _, begin in begins)
            for fact in facts:
                if times := [at for at, begin in begins if _is_of(fact, begin)]:
                    delays.append(min(times) - fact.begin)
            found += len(facts)
        return {
            "facts": found,
            "events": raised,
            "precision": right / raised if raised else None,
            "recall": len(delays) / found if found else None,
            "delay_p50_s": median(delays) if delays else None,
        }


def _is_of(fact: Fact, begin: float) -> bool:
    return fact.begin - NEAR_SECONDS <= begin <= fact.end + NEAR_SECONDS


def _records(log: Path) -> list[dict[str, Any]]:
    lines = log.read_text().splitlines() if log.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def _answered(log: Path) -> set[str]:
    return {one["camera"] for one in _records(log)}


def lag_row(
    records: Sequence[dict[str, Any]], chunks: float, dropped: float, gate: bool
) -> dict[str, Any]:
    lags = [one["answered"] - one["ended"] for one in records]
    times = [one["answered"] - one["asked"] for one in records]
    p50, p99 = np.quantile(lags, (0.5, 0.99)).tolist() if lags else (None, None)
    return {
        "answers": len(records),
        "skipped": max(0.0, 1 - (len(records) + dropped) / chunks) if chunks and gate else None,
        "dropped": dropped / chunks if chunks else None,
        "lag_p50_s": p50,
        "lag_p99_s": p99,
        "answer_p50_s": median(times) if times else None,
        "bound_s": 1.0 + median(times) if times else None,
    }


def is_carried(row: dict[str, Any]) -> bool:
    return bool(
        row["lag_p99_s"] is not None
        and row["lag_p99_s"] <= row["bound_s"]
        and row["dropped"] <= MAX_DROPPED
    )


COLUMNS = (
    ("cameras", "cameras", "{:d}"),
    ("interval s", "interval", "{:g}"),
    ("gate", "gate", "{}"),
    ("lag p50 s", "lag_p50_s", "{:.2f}"),
    ("lag p99 s", "lag_p99_s", "{:.2f}"),
    ("bound s", "bound_s", "{:.2f}"),
    ("answers", "answers", "{:d}"),
    ("skipped", "skipped", "{:.0%}"),
    ("dropped", "dropped", "{:.1%}"),
    ("gaps", "gaps_total", "{:.0f}"),
    ("watch cores", "watch_cores", "{:.2f}"),
    ("watch MiB", "watch_mib", "{:.0f}"),
    ("growth", "watch_growth_mib", "{:+.1f}"),
    ("files", "watch_files", "{:.0f}"),
    ("growth", "watch_growth_files", "{:+.0f}"),
    ("server cores", "server_cores", "{:.2f}"),
    ("growth MiB", "server_growth_mib", "{:+.1f}"),
    ("facts", "facts", "{:d}"),
    ("precision", "precision", "{:.2f}"),
    ("recall", "recall", "{:.2f}"),
    ("delay s", "delay_p50_s", "{:.1f}"),
)


def table_line(row: dict[str, Any]) -> str:
    """Return a row in Markdown."""
    shown = ["–" if row[key] is None else form.format(row[key]) for _, key, form in COLUMNS]
    return f"| {' | '.join(shown)} |"


def rows_of(run: Run, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    seconds = options.seconds
    for gate in (False, True):
        yield run.measure(options.cameras, seconds, options.interval, gate)
    if options.search:
        for count in (one for one in SEARCHED if one <= options.most):
            row = run.measure(count, options.search_seconds, options.interval, False)
            yield row
            if not is_carried(row):
                return


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cameras", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=600.0, help="of each of two runs")
    parser.add_argument("--interval", type=float, default=1.0, help="of the chunks of 1 s")
    parser.add_argument("--search", action="store_true", help="also look for the largest number")
    parser.add_argument("--search-seconds", type=float, default=60.0, help="of each number tried")
    parser.add_argument("--most", type=int, default=SEARCHED[-1], help="the last one to try")
    parser.add_argument("--quick", action="store_true", help="runs of 20 s")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    if options.quick:
        options.seconds = options.search_seconds = 20.0
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        clips = [write_clip(folder / f"{seed}.units", seed) for seed in range(CLIPS)]
        with serving(ServerOptions(log=folder / "server.log")) as server:
            run = Run(folder, server, clips)
            print("|", " | ".join(head for head, _, _ in COLUMNS), "|")
            print("|", " | ".join("---" for _ in COLUMNS), "|", flush=True)
            for row in rows_of(run, options):
                rows.append(row)
                print(table_line(row), flush=True)
    carried = max(
        (one["cameras"] for one in rows if not one["gate"] and is_carried(one)), default=0
    )
    print(f"\ncarried: {carried} cameras at an interval of {options.interval:g} s")
    if options.json:
        meta = {"machine": platform.platform(), "cpus": os.cpu_count(), "options": vars(options)}
        summary = {"carried": carried, "without_gate": rows[0], "with_gate": rows[1]}
        content = {"meta": meta, "rows": rows, "summary": summary}
        options.json.write_text(json.dumps(content, indent=1, default=str))


if __name__ == "__main__":
    main()
