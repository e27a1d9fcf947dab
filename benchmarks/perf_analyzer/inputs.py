"""Write input files for perf_analyzer: requests to each model with several adapters.

Every request has its own picture or clip as base64 text in STRING inputs. Every answer has the same
number of tokens, so that runs can be compared.

usage: python -m benchmarks.perf_analyzer.inputs out/perf --adapters glyphs actions --images 64
"""

from __future__ import annotations

import argparse
import base64
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from clients.common import run_main, sampling_parameters
from clients.frames import SyntheticCamera

BASE = "base"
"""Name of the base model in a list of adapters."""

SIDE = 64
QUESTIONS = (
    "What color is the star?",
    "How many circles are there?",
    "What is the background?",
    "Is there a red square?",
)
Entry = dict[str, Any]


def picture(seed: int) -> str:
    """Return a PNG of a shape on noise as base64, different for each seed."""
    random = np.random.default_rng(seed)
    chunk = next(SyntheticCamera(2, 1, seed, SIDE, SIDE).chunks())
    noise = random.integers(-20, 20, (SIDE, SIDE, 3))
    pixels = np.clip(chunk.frames[0].astype(int) + noise, 0, 255).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def clip(seed: int, frames: int = 6) -> list[str]:
    """Return the pictures of a clip."""
    return [picture(seed * 1000 + i) for i in range(frames)]


def entry(model: str, index: int, adapter: str | None, tokens: int) -> Entry:
    """Return one request, with the shapes of all inputs whose shape is not [1].

    model: name of a model; `lmm-text` is the model `lmm` without a picture.
    """
    forced: dict[str, Any] = {"max_tokens": tokens, "min_tokens": tokens, "ignore_eos": True}
    request: Entry = {"text_input": [QUESTIONS[index % len(QUESTIONS)]]}
    if model == "video_analytics":
        request["frames"] = {"content": clip(index), "shape": [6]}
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


MODELS = ("visual_retrieval", "video_analytics", "lmm", "lmm-text")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.perf_analyzer.inputs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "folder", type=Path, metavar="FOLDER", help="folder of the files, one for each model"
    )
    parser.add_argument(
        "--adapters",
        nargs="*",
        default=[BASE],
        metavar="NAME",
        help="adapters in rotation; `base` is the base model",
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
    options = parser.parse_args(arguments)
    for model in MODELS:
        path = options.folder / f"{model}.json"
        print(write_inputs(path, model, options.adapters, options.images, options.tokens))


if __name__ == "__main__":
    run_main(main)
