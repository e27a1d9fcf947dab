"""The JSON in the output `result`: labels, boxes and counts, parsed from the model's answer.

`result.schema.json` in this folder is its schema. The rules are:

- Boxes in text have the paper's syntax, `<ref>name</ref><box>(x1,y1),(x2,y2)</box>...`, on a grid
  of 0-999. A coordinate is 1000 * position / width (or height) of the picture, as in Qwen-VL. All
  boxes after a name have this name as label. A box before any name has the label null. Corners may
  be in either order.
- The text does not say in which picture a box is. A box is assigned to the last image or frame of
  the request, since Qwen-VL draws boxes on the latest picture. Frames come after images.
- The score of a box is null, because the text has no scores.
- A malformed box or name (an unclosed tag, a coordinate off the grid) is left out and reported in
  `warnings`. Text without tags is valid.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from vlora.errors import InvalidArgument
from vlora.request import IntArray
from vlora.vision.prompts import TASKS

SCHEMA_VERSION = "1"
SCHEMA_PATH = Path(__file__).with_name("result.schema.json")
MAX_PICTURES = 1 << 16  # Maximum number of images and frames of a result.
GRID = 1000  # Number of cells along an edge. Coordinates in text are from 0 to GRID - 1.
# Maximum number of malformed boxes and names that are described. Further ones are only counted.
MAX_WARNINGS = 100
_TAG = re.compile(r"<(/?)(ref|box)>")
_POINT = r"\(\s*([0-9]{1,4})\s*,\s*([0-9]{1,4})\s*\)"
_BOX = re.compile(rf"\s*{_POINT}\s*,?\s*{_POINT}\s*")


@dataclass(frozen=True)
class TextBox:
    """A box in the model's text.

    label: name before the box, or None.
    grid: left, top, right and bottom edge on the grid, each from 0 to GRID - 1.
    """

    label: str | None
    grid: tuple[int, int, int, int]

    def pixels(self, height: int, width: int) -> list[float]:
        """Return left, top, right, bottom in pixels of an image, rounded to 0.01."""
        left, top, right, bottom = self.grid
        scaled = (left * width, top * height, right * width, bottom * height)
        return [round(value / GRID, 2) for value in scaled]


def parse_boxes(text: str) -> tuple[list[TextBox], list[str]]:
    """Return the boxes in `text`, in order, and a sentence for each malformed box or name.

    Any text is accepted. The time is linear in its length.
    """
    boxes: list[TextBox] = []
    warnings: list[str] = []
    label: str | None = None
    open_tag: re.Match[str] | None = None
    for tag in _TAG.finditer(text):
        closes, kind = bool(tag[1]), tag[2]
        if closes and (open_tag is None or open_tag[2] != kind):
            warnings.append(f"{tag[0]} at character {tag.start()} closes nothing")
            continue
        if not closes:
            if open_tag is not None:
                warnings.append(_unclosed(open_tag))
            open_tag = tag
            label = None if kind == "ref" else label
            continue
        assert open_tag is not None
        body = text[open_tag.end() : tag.start()]
        open_tag = None
        if kind == "ref":
            label = body.strip() or None
        elif (grid := _parse_grid(body)) is not None:
            boxes.append(TextBox(label, grid))
        else:
            warnings.append(f"not a box on the grid of 0-{GRID - 1}: '{body[:60]}'")
    if open_tag is not None:
        warnings.append(_unclosed(open_tag))
    return boxes, warnings


def build_result(
    *,
    text: str,
    details: Mapping[str, Any],
    layout: IntArray,
    size: IntArray,
    labels: Sequence[str] = (),
    scores: Sequence[float] = (),
    metadata: str = "",
) -> str:
    """Return the JSON of one answer, which conforms to the schema.

    details: `task`, `adapter` ({name, digest} or None) and `timings` (seconds by name).
    layout: int32 [n, 6]; its last column, is_video, is the number of frames, 0 for an image.
    size: int32 [n, 2], height and width in pixels.
    labels, scores: outputs of a vision task head, of equal length; empty without a head.
    metadata: metadata of the request, which the result returns.

    Raises InvalidArgument if the arguments do not fit each other.
    """
    _check(details, layout, size, labels, scores)
    boxes, warnings = parse_boxes(text)
    is_video = [bool(line[5]) for line in layout for _ in range(max(1, line[5]))]
    if boxes and not is_video:
        warnings.append(f"the request has no image for {len(boxes)} boxes")
    objects: list[list[dict[str, Any]]] = [[] for _ in is_video]
    if is_video:
        height, width = (int(edge) for edge in size[-1])
        objects[-1] = [
            {"box": box.pixels(height, width), "label": box.label, "score": None} for box in boxes
        ]
    if (more := len(warnings) - MAX_WARNINGS) > 0:
        warnings[MAX_WARNINGS:] = [f"{more} more"]
    result = {
        "schema_version": SCHEMA_VERSION,
        "task": details["task"],
        "text": text,
        "adapter": details["adapter"],
        "timings": details["timings"],
        "metadata": metadata,
        "images": _pictures(objects, is_video, frames=False),
        "frames": _pictures(objects, is_video, frames=True),
        "counts": dict(Counter(box.label for box in boxes if box.label is not None)),
        "scores": {label: float(score) for label, score in zip(labels, scores, strict=True)},
        "warnings": warnings,
    }
    return json.dumps(result, allow_nan=False)


@cache
def result_schema() -> dict[str, Any]:
    """Return the JSON schema of a result, with the names of all tasks."""
    schema: dict[str, Any] = json.loads(SCHEMA_PATH.read_text(encoding="utf-8"))
    schema["properties"]["task"]["enum"] = list(TASKS)
    return schema


def _parse_grid(body: str) -> tuple[int, int, int, int] | None:
    match = _BOX.fullmatch(body)
    if match is None:
        return None
    x1, y1, x2, y2 = (int(digits) for digits in match.groups())
    if max(x1, y1, x2, y2) >= GRID:
        return None
    return min(x1, x2), min(y1, y2), max(x1, x2), max(y1, y2)


def _unclosed(tag: re.Match[str]) -> str:
    return f"{tag[0]} at character {tag.start()} is not closed"


def _pictures(
    objects: list[list[dict[str, Any]]], is_video: list[bool], frames: bool
) -> list[dict[str, Any]]:
    """Return the objects in each image, or in each frame, with indices from 0."""
    selected = [boxes for boxes, video in zip(objects, is_video, strict=True) if video is frames]
    return [{"index": index, "objects": boxes} for index, boxes in enumerate(selected)]


def _check(
    details: Mapping[str, Any],
    layout: IntArray,
    size: IntArray,
    labels: Sequence[str],
    scores: Sequence[float],
) -> None:
    for key in ("task", "adapter", "timings"):
        if key not in details:
            raise InvalidArgument(f"'details' lacks '{key}'; it must be the output of 'lmm'")
    if layout.ndim != 2 or size.ndim != 2 or layout.shape[1] != 6 or size.shape[1] != 2:
        raise InvalidArgument(
            "'image_layout' must be [n, 6] and 'image_size' [n, 2],"
            f" not {list(layout.shape)} and {list(size.shape)}"
        )
    if sum(max(1, line[5]) for line in layout.tolist()) > MAX_PICTURES:
        raise InvalidArgument(f"'image_layout' has more than {MAX_PICTURES} images and frames")
    if len(layout) != len(size):
        raise InvalidArgument(
            f"'image_layout' has {len(layout)} rows, 'image_size' has {len(size)};"
            " both must have one row per image"
        )
    if len(labels) != len(scores):
        raise InvalidArgument(
            f"the head has {len(labels)} labels and {len(scores)} scores; the numbers must be equal"
        )
    if not all(math.isfinite(score) for score in scores):
        raise InvalidArgument("'head_scores' must be finite numbers")
