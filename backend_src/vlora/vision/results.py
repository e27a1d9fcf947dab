"""What the model said, as labels, boxes and counts: the JSON of output `result`. Pure values.

The schema is `result.schema.json`, beside this file. What is decided here:

- Boxes in text are the paper's syntax, `<ref>name</ref><box>(x1,y1),(x2,y2)</box>...`, on a grid
  of 0-999 (a coordinate is position * 1000 / edge, as in Qwen-VL). All boxes after a name are of
  that name; a box before any name has label null. Corners may come in either order.
- Text does not say which picture a box is on. With one image or frame it is on that; with several
  it is on the last (images come before frames), as Qwen-VL draws boxes on the latest picture.
- A score is null: text carries none.
- A malformed piece (an unclosed tag, a coordinate off the grid) is left out and told in
  `warnings`; text without tags is no fault.
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

SCHEMA_VERSION = "1"
SCHEMA_PATH = Path(__file__).with_name("result.schema.json")
GRID = 1000
"""Cells along an edge; coordinates in text are 0 to GRID - 1."""

_TAG = re.compile(r"<(/?)(ref|box)>")
_POINT = r"\(\s*([0-9]{1,4})\s*,\s*([0-9]{1,4})\s*\)"
_BOX = re.compile(rf"\s*{_POINT}\s*,?\s*{_POINT}\s*")


@dataclass(frozen=True)
class TextBox:
    """A box as text gives it: left, top, right, bottom on the grid; its name, if it has one."""

    label: str | None
    grid: tuple[int, int, int, int]

    def pixels(self, height: int, width: int) -> list[float]:
        """xyxy in pixels of an image of that size, to a hundredth."""
        left, top, right, bottom = self.grid
        scaled = (left * width, top * height, right * width, bottom * height)
        return [round(value / GRID, 2) for value in scaled]


def parse_boxes(text: str) -> tuple[list[TextBox], list[str]]:
    """The boxes in `text` in order, and one sentence for each piece that is malformed.

    Never fails, whatever the text; takes time linear in its length.
    """
    boxes: list[TextBox] = []
    warnings: list[str] = []
    label: str | None = None
    opened: re.Match[str] | None = None
    for tag in _TAG.finditer(text):
        closes, kind = bool(tag[1]), tag[2]
        if closes and (opened is None or opened[2] != kind):
            warnings.append(f"{tag[0]} at character {tag.start()} closes nothing")
            continue
        if not closes:
            if opened is not None:
                warnings.append(_unclosed(opened))
            opened = tag
            label = None if kind == "ref" else label
            continue
        assert opened is not None
        body = text[opened.end() : tag.start()]
        opened = None
        if kind == "ref":
            label = body.strip() or None
        elif (grid := _parse_grid(body)) is not None:
            boxes.append(TextBox(label, grid))
        else:
            warnings.append(f"not a box on the grid of 0-{GRID - 1}: '{body[:60]}'")
    if opened is not None:
        warnings.append(_unclosed(opened))
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
    """The JSON of one answer, valid after the schema.

    details: `task`, `adapter` ({name, digest} or None) and `timings` (seconds by name). layout:
    int32 [n, 6], of which is_video tells frames from images. size: int32 [n, 2] = height, width.
    labels, scores: of a vision task head, of equal length; empty without one. Raises
    InvalidArgument where these do not fit together.
    """
    _check(details, layout, size, labels, scores)
    boxes, warnings = parse_boxes(text)
    is_video = [bool(line[5]) for line in layout]
    if boxes and not is_video:
        warnings.append(f"the request has no image for {len(boxes)} boxes")
    objects: list[list[dict[str, Any]]] = [[] for _ in is_video]
    if is_video:
        height, width = (int(edge) for edge in size[-1])
        objects[-1] = [
            {"box": box.pixels(height, width), "label": box.label, "score": None} for box in boxes
        ]
    result = {
        "schema_version": SCHEMA_VERSION,
        "task": details["task"],
        "text": text,
        "adapter": details["adapter"],
        "timings": details["timings"],
        "metadata": metadata,
        "images": _indexed(objects, is_video, wanted=False),
        "frames": _indexed(objects, is_video, wanted=True),
        "counts": dict(Counter(box.label for box in boxes if box.label is not None)),
        "scores": {label: float(score) for label, score in zip(labels, scores, strict=True)},
        "warnings": warnings,
    }
    return json.dumps(result, allow_nan=False)


@cache
def result_schema() -> dict[str, Any]:
    """The committed JSON schema of `result`."""
    schema: dict[str, Any] = json.loads(SCHEMA_PATH.read_text(encoding="utf-8"))
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


def _indexed(
    objects: list[list[dict[str, Any]]], is_video: list[bool], wanted: bool
) -> list[dict[str, Any]]:
    """The pictures of one kind, counted from 0 within that kind."""
    chosen = [found for found, video in zip(objects, is_video, strict=True) if video is wanted]
    return [{"index": index, "objects": found} for index, found in enumerate(chosen)]


def _check(
    details: Mapping[str, Any],
    layout: IntArray,
    size: IntArray,
    labels: Sequence[str],
    scores: Sequence[float],
) -> None:
    for key in ("task", "adapter", "timings"):
        if key not in details:
            raise InvalidArgument(f"'details' lacks '{key}'; it must be what 'lmm' answered")
    if layout.ndim != 2 or size.ndim != 2 or layout.shape[1] != 6 or size.shape[1] != 2:
        raise InvalidArgument(
            "'image_layout' must be [n, 6] and 'image_size' [n, 2],"
            f" not {list(layout.shape)} and {list(size.shape)}"
        )
    if len(layout) != len(size):
        raise InvalidArgument(
            f"'image_layout' tells of {len(layout)} images, 'image_size' of {len(size)}"
        )
    if len(labels) != len(scores):
        raise InvalidArgument(f"{len(labels)} head labels come with {len(scores)} scores")
    if not all(math.isfinite(score) for score in scores):
        raise InvalidArgument("'head_scores' must be finite numbers")
