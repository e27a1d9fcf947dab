"""The samples of `make demo`: pictures and two clips, larger than the model's input.

For each request, `index.json` holds the files (or one video), task, adapter, prompt and expected
answer. Boxes in answers are on the grid 0-999, as the model writes them.
"""

import json
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from tools.demo.boxes import box_text
from tools.demo.heldout import png
from tools.demo.motion import Clip, action_clip, base_clip
from tools.demo.questions import HOW_MANY, caption
from tools.demo.recipes import RECIPES
from tools.demo.scenes import SIDE, Pixels, Scene, Thing, draw

SEED = 9_000_001
SIZE = 256
FRAMES_PER_SECOND = 30

_STREET = Scene(
    "white",
    "plain",
    (
        Thing("circle", "red", "solid", (6, 8, 28, 30)),
        Thing("heart", "green", "dotted", (20, 36, 44, 60)),
        Thing("star", "blue", "striped", (36, 6, 60, 30)),
    ),
    0,
)
_TWINS = Scene(
    "gray",
    "tiled",
    (
        Thing("star", "yellow", "solid", (5, 20, 27, 42)),
        Thing("star", "purple", "checkered", (36, 34, 60, 58)),
        Thing("cross", "orange", "solid", (38, 5, 57, 24)),
    ),
    0,
)
_TRIO = Scene(
    "gray",
    "plain",
    (
        Thing("square", "red", "solid", (4, 6, 24, 26)),
        Thing("circle", "blue", "striped", (8, 38, 28, 58)),
        Thing("square", "green", "solid", (38, 22, 58, 42)),
    ),
    0,
)


def write_samples(folder: Path) -> Path:
    """Write all samples and their index. Return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    index = [
        _picture(folder, "vqa", _STREET, "vqa", "What color is the star?", "blue"),
        _picture(folder, "count", _TWINS, "vqa", "How many stars are there in the picture?", "2"),
        _picture(folder, "caption", _STREET, "caption", "", caption(_STREET)),
        _picture(
            folder,
            "refer",
            _STREET,
            "refer",
            "red circle",
            box_text("red circle", [_STREET.things[0].box], SIDE),
        ),
        _picture(
            folder,
            "detect",
            _TRIO,
            "detect",
            "circle",
            box_text("circle", [_TRIO.things[1].box], SIDE),
        ),
        _picture(folder, "classify", _TWINS, "classify", "", "tiled"),
        _clip(folder, "motion", base_clip(_rng(1), "moving right"), None),
        _clip(folder, "action", action_clip(_rng(2), "growing"), "actions"),
    ]
    domains = ("digits", "digits-text", "glyphs", "counting", "textures", "defects", "inspection")
    for number, domain in enumerate(domains, start=3):
        index.append(_adapter_picture(folder, domain, number))
    (folder / "index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return folder


def _rng(number: int) -> np.random.Generator:
    return np.random.default_rng([SEED, number])


def _picture(
    folder: Path,
    name: str,
    scene: Scene,
    task: str,
    prompt: str,
    expected: str,
    adapter: str | None = None,
    choices: tuple[str, ...] = (),
) -> dict[str, Any]:
    file = folder / f"{name}.png"
    file.write_bytes(png(draw(scene, SIZE).pixels))
    about = {"images": [file.name], "task": task, "adapter": adapter, "prompt": prompt}
    more = {"choices": list(choices)} if choices else {}
    return {"name": name, **about, **more, "expected": expected}


def _adapter_picture(folder: Path, domain: str, number: int) -> dict[str, Any]:
    recipe = next(recipe for recipe in RECIPES.values() if domain in recipe.domains)
    sampler: Callable[..., Any] = recipe.domains[domain]
    sample = sampler(_rng(number), True)
    asked = sample.question
    prompt = HOW_MANY if domain == "counting" else asked.text
    return _picture(
        folder, domain, sample.scene, asked.task, prompt, asked.answer, recipe.name, recipe.choices
    )


def _clip(folder: Path, name: str, clip: Clip, adapter: str | None) -> dict[str, Any]:
    """Write one second of video and return its entry of `index.json`."""
    times = [float(time) for time in np.linspace(0, 1, FRAMES_PER_SECOND)]
    file = folder / f"{name}.mp4"
    write_video(file, clip.frames(times, SIZE))
    about = {"video": file.name, "task": "video", "adapter": adapter, "prompt": ""}
    return {"name": name, **about, "expected": clip.action}


def write_video(file: Path, frames: list[Pixels]) -> None:
    """Encode frames [n, n, 3] uint8 as H.264, one thirtieth of a second each."""
    import av

    with av.open(str(file), "w") as container:
        stream = container.add_stream("libx264", rate=Fraction(FRAMES_PER_SECOND))
        stream.width = stream.height = frames[0].shape[0]
        stream.pix_fmt = "yuv420p"
        stream.options = {"crf": "18", "preset": "veryslow"}
        for pixels in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
