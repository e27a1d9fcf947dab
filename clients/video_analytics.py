"""Analyse live video: several streams at once, one chunk per second and stream.

Every second each stream sends a few frames of that second to the ensemble `video_analytics`, and
the answer is printed. --jsonl also writes all answers to a file. This is `vlora watch` without a
file of cameras; docs/video.md explains when chunks are dropped.

sources:
  a video file, a folder of pictures in the order of their names, a URL as in a file of cameras, or
  `camera`: a synthetic camera that knows the true motion, so that answers can be checked

examples:
  python clients/video_analytics.py camera --streams 4 --seconds 10
  python clients/video_analytics.py clip.mp4 --adapter actions --jsonl answers.jsonl
  python clients/video_analytics.py frames/ --fps 25
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from textwrap import shorten
from typing import IO, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # to run as a file

from pydantic import ValidationError

from clients import common
from clients.common import ClientError
from vlora.cli.watch import check_installed, open_log, print_summary, watch_cameras
from vlora.errors import ServerError, VLoraError
from vlora.strict_yaml import describe
from vlora.watch.camera import read_chunks
from vlora.watch.config import Cameras


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    text = "a video file, a folder of pictures, a URL, or `camera`"
    parser.add_argument("source", metavar="SOURCE", help=text)
    text = "text, if the task needs one"
    parser.add_argument("prompt", nargs="?", default="", metavar="PROMPT", help=text)
    common.add_server_arguments(parser)
    parser.set_defaults(task="video")
    for name, word, default, text in (
        ("--streams", "N", 1, "number of streams (default: 1)"),
        ("--seconds", "SECONDS", 10, "seconds to run (default: 10)"),
        ("--fps", "N", 30, "frames per second of a folder or of the camera (default: 30)"),
        ("--frames", "N", 6, "frames sent of each second (default: 6)"),
    ):
        parser.add_argument(
            name, type=common.positive_number, default=default, metavar=word, help=text
        )
    text = "drop a chunk that has no answer after this time (default: 4000)"
    parser.add_argument("--deadline-ms", type=common.positive_number, metavar="MS", help=text)
    text = "also write every answer to this file"
    parser.add_argument("--jsonl", type=Path, metavar="FILE", help=text)
    return parser.parse_args(arguments)


def cameras_of(options: argparse.Namespace, folder: Path) -> Cameras:
    """Return the cameras of the options, which keep nothing but in `folder`. Raises ClientError."""
    keys: dict[str, Any] = {
        "adapter": options.adapter,
        "task": options.task,
        "question": options.prompt,
        "frames": options.frames,
        "fps": float(options.fps),
        "deadline_ms": options.deadline_ms,
        "repeat": True,
    }
    names = [f"stream {number}" for number in range(options.streams)]
    is_synthetic = options.source == "camera"
    cameras = {
        name: {"url": f"synthetic:{seed}" if is_synthetic else options.source, **keys}
        for seed, name in enumerate(names)
    }
    content = {"server": options.url, "retention": {"folder": folder}, "cameras": cameras}
    try:
        return Cameras.model_validate(content)
    except ValidationError as error:
        raise ClientError(describe(error)) from None


class Printer:
    """Prints each answer, writes it to a file, and counts the right ones.

    knows_truth: whether the truth of the synthetic camera is what the answers should be.
    """

    def __init__(self, knows_truth: bool, log: IO[str] | None) -> None:
        self._knows_truth, self._log = knows_truth, log
        self.known = self.right = 0

    def take(self, record: dict[str, Any]) -> None:
        text, truth = record["result"]["text"].strip(), record.pop("truth", None)
        if truth is not None and self._knows_truth:
            self.known += 1
            self.right += text == truth
            record["truth"] = truth
        if self._log is not None:
            self._log.write(json.dumps(record) + "\n")
            self._log.flush()
        print(describe_record(record), flush=True)


def describe_record(record: dict[str, Any]) -> str:
    """Return a line with the time, stream, answer, and the time from the last frame to it."""
    clock = time.strftime("%H:%M:%S", time.localtime(record["answered"]))
    answer = record["result"]["text"].strip()
    text = shorten(answer, 36, placeholder="…") or "(nothing)"
    if scores := record["result"]["scores"]:
        text += f" ({max(scores.values()):.2f})"
    if "truth" in record:
        text += " ✓" if record["truth"] == answer else f" ✗ ({record['truth']})"
    lag = (record["answered"] - record["ended"]) * 1e3
    return f"{clock}  {record['camera']:<10} {text:<36} {lag:7.0f} ms"


def analyse(options: argparse.Namespace) -> int:
    """Run all streams. Return 1 if any chunk had an error, otherwise 0. Raises ClientError."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        cameras = cameras_of(options, folder)
        # A source that cannot be played is told at once, instead of being tried again and again.
        next(read_chunks(cameras.cameras["stream 0"], lambda pixels: None), None)
        log = stack.enter_context(open_log(options.jsonl)) if options.jsonl else None
        printer = Printer(options.task == "video" and options.adapter is None, log)
        seconds = float(options.seconds)
        watched = asyncio.run(watch_cameras(None, cameras, printer.take, seconds))
    print_summary(watched)
    if printer.known:
        print(f"{printer.right} of {printer.known} answers are right")
    return int(any(one.counts.errors for one in watched))


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    common.connect(options.url, "video_analytics").close()
    try:
        check_installed()
        return analyse(options)
    except (ServerError, VLoraError) as error:
        raise ClientError(str(error)) from None


if __name__ == "__main__":
    common.run_main(main)
