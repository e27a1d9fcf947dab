"""Show a real server's answers to samples of all six tasks, with the base model and adapters.

The script sends questions and captions to the ensemble `visual_retrieval`, and all others to
`video_analytics`. It prints a table and draws every answer to `out/`. It uses the server at --url
if one answers there. Otherwise it starts a server of its own.
"""

import argparse
import json
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from tritonclient.utils import InferenceServerException

from clients.common import (
    DEFAULT_URL,
    ClientError,
    connect,
    explain,
    first_string,
    request_inputs,
    run_main,
    sampling_parameters,
    stream_responses,
)
from tools.demo.boxes import GRID, parse_boxes
from tools.demo.heldout import boxes_match
from tools.demo.pictures import INK, RIGHT, WRONG, draw_answer
from tools.demo.scenes import Pixels
from vlora.errors import ServerError
from vlora.launcher.server import TritonServer
from vlora.watch.camera import read_chunks
from vlora.watch.config import Camera
from vlora.watch.pixels import encoded

SAMPLES = Path(__file__).with_name("samples")
STREAMED = {"vqa", "caption"}
FRAMES = 6
BOX = re.compile(r"<box>(\(\d+,\d+\)),(\(\d+,\d+\))</box>")
TAGGED = re.compile(rf"<ref>([^<]*)</ref>((?:{BOX.pattern})+)")
"""A name with the boxes of its objects."""


@dataclass(frozen=True)
class Sample:
    """One request of `index.json` with its pixels: an image, or the frames of a clip."""

    name: str
    task: str
    adapter: str | None
    prompt: str
    expected: str
    choices: tuple[str, ...]
    frames: list[Pixels]
    files: list[bytes]
    is_video: bool


@dataclass(frozen=True)
class Answer:
    """Answer of the server, or its error.

    seconds: time from sending the request to the end of the answer.
    objects: boxes in the output `result`; empty for a streamed answer.
    score: probability of the most probable label if a vision task head answered.
    """

    text: str
    seconds: float
    objects: list[dict[str, Any]] = field(default_factory=list)
    score: float | None = None
    error: str | None = None

    @property
    def shown(self) -> str:
        if self.error:
            return self.error
        return self.text if self.score is None else f"{self.text} (head: {self.score:.2f})"


def load_samples() -> list[Sample]:
    return [_load(entry) for entry in json.loads((SAMPLES / "index.json").read_text())]


def _load(entry: dict[str, Any]) -> Sample:
    video = entry.pop("video", None)
    images = [SAMPLES / name for name in entry.pop("images", ())]
    if video is not None:
        camera = Camera(url=str(SAMPLES / video), frames=FRAMES)
        frames = next(read_chunks(camera, lambda pixels: pixels)).frames
        files = [encoded(frame, "PNG") for frame in frames]
    else:
        frames = [np.array(Image.open(path).convert("RGB"), np.uint8) for path in images]
        files = [path.read_bytes() for path in images]
    choices = tuple(entry.pop("choices", ()))
    return Sample(**entry, choices=choices, frames=frames, files=files, is_video=video is not None)


def ask(client: Any, sample: Sample) -> Answer:
    """Send a sample and return its answer. An error of the server counts as an answer."""
    inputs = request_inputs(
        sample.prompt,
        images=() if sample.is_video else sample.files,
        frames=sample.files if sample.is_video else (),
        task=sample.task,
        sampling=sampling_parameters(sample.adapter, choices=list(sample.choices) or None),
    )
    start = time.perf_counter()
    try:
        if sample.task in STREAMED:
            pieces = stream_responses(client, "visual_retrieval", inputs)
            text = "".join(first_string(piece, "text_output") for piece in pieces)
            return Answer(text.strip(), time.perf_counter() - start)
        answer = client.infer("video_analytics", inputs)
        seconds = time.perf_counter() - start
    except InferenceServerException as error:
        return Answer("", time.perf_counter() - start, error=explain(error))
    result = json.loads(first_string(answer, "result"))
    objects = [one for picture in result["images"] + result["frames"] for one in picture["objects"]]
    score = max(result["scores"].values(), default=None)
    return Answer(result["text"].strip(), seconds, objects, score)


def is_right(expected: str, text: str) -> bool:
    """Return whether an answer has the expected name and boxes that match, or the expected text."""
    wanted, found = parse_boxes(expected, GRID), parse_boxes(text, GRID)
    if not wanted:
        return text == expected
    return boxes_match(wanted, found) and text.split("<box>")[0] == expected.split("<box>")[0]


@contextmanager
def server_at(url: str, console: Console) -> Iterator[Any]:
    """Yield a client of the server at `url`, or of a new one until the context ends."""
    with ExitStack() as stack:
        try:
            client = connect(url, "video_analytics")
            console.print(f"using the server at {url}")
        except ClientError:
            console.print(f"no server at {url}: starting one, for about 10 seconds")
            try:
                address = stack.enter_context(TritonServer()).grpc_url
            except ServerError as error:
                raise ClientError(str(error)) from None
            client = connect(address, "video_analytics")
        stack.callback(client.close)
        yield client


def table_of(samples: Sequence[Sample], answers: Sequence[Answer]) -> Table:
    """Return a table of questions and answers, 80 columns wide."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in ("task", "adapter"):
        table.add_column(name, no_wrap=True)
    table.add_column("asked", overflow="fold")
    table.add_column("answer", overflow="fold", min_width=20)
    table.add_column("right", no_wrap=True)
    table.add_column("ms", justify="right", no_wrap=True)
    for sample, answer in zip(samples, answers, strict=True):
        right = is_right(sample.expected, answer.text)
        expected = "" if right else f"\n[red]expected:[/] {escape(in_words(sample.expected))}"
        table.add_row(
            sample.task,
            sample.adapter or "base",
            sample.prompt or f"({'a clip' if sample.is_video else 'a picture'})",
            escape(in_words(answer.shown)) + expected,
            "[green]yes" if right else "[red]no",
            f"{answer.seconds * 1e3:.0f}",
        )
    return table


def in_words(text: str) -> str:
    """Return an answer with words instead of tags: `circle in the box from (1,2) to (30,40)`.

    The coordinates are those of the answer, from 0 to 999. Text without boxes is unchanged.
    """

    def sentence(tagged: re.Match[str]) -> str:
        boxes = " and ".join(f"from {low} to {high}" for low, high in BOX.findall(tagged[2]))
        return f"{tagged[1]} in the box{'es' * (' and ' in boxes)} {boxes}"

    return TAGGED.sub(sentence, text)


def draw(samples: Sequence[Sample], answers: Sequence[Answer], out: Path) -> None:
    """Write a picture of each sample."""
    out.mkdir(parents=True, exist_ok=True)
    for sample, answer in zip(samples, answers, strict=True):
        asked = " · ".join(filter(None, (sample.task, sample.adapter or "base", sample.prompt)))
        right = is_right(sample.expected, answer.text)
        texts = [(asked, INK), (f"answer: {in_words(answer.shown)}", RIGHT if right else WRONG)]
        if not right:
            texts.append((f"expected: {in_words(sample.expected)}", WRONG))
        draw_answer(sample.frames, answer.objects, texts).save(out / f"{sample.name}.png")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.demo.show", description=__doc__)
    parser.add_argument("--url", default=DEFAULT_URL, help="gRPC address (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the pictures")
    options = parser.parse_args(arguments)
    console = Console()
    samples = load_samples()
    with server_at(options.url, console) as client:
        answers = [ask(client, sample) for sample in samples]
    console.print(table_of(samples, answers))
    pairs = zip(samples, answers, strict=True)
    right = sum(is_right(sample.expected, answer.text) for sample, answer in pairs)
    draw(samples, answers, options.out)
    console.print(
        f"{right} of {len(samples)} answers are right; pictures in {escape(str(options.out))}/"
    )
    return int(any(answer.error for answer in answers))


if __name__ == "__main__":
    run_main(main)
