"""The JSON in the output `result`: labels, boxes and counts, parsed from the model's answer.

`result.schema.json` in this folder is its schema. The rules are:

- Boxes in text have one of three syntaxes. That of the paper and of Qwen-VL is
  `<ref>name</ref><box>(x1,y1),(x2,y2)</box>...`, on a grid of 0-999. Qwen2-VL writes
  `<|object_ref_start|>name<|object_ref_end|><|box_start|>(x1,y1),(x2,y2)<|box_end|>...`, later
  families JSON objects `{"bbox_2d": [x1, y1, x2, y2], "label": "name"}`, both on a grid of 0-1000.
- A coordinate is 1000 * position / width (or height) of the picture. Qwen2.5-VL alone counts pixels
  of the resized picture, except in the paper's syntax, which only adapters teach it.
  `image_layout` has the resized size in patches.
- All boxes after a name in tags have this name as label. A box before any name has the label null.
  Corners may be in either order.
- The text does not say in which picture a box is. A box is assigned to the last image or frame of
  the request, since Qwen-VL draws boxes on the latest picture. Video files come after images, and
  frames after these.
- The score of a box is null, because the text has no scores.
- A malformed box or name (an unclosed tag, a coordinate off the picture) is left out and reported
  in `warnings`. Text without boxes is valid.
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
from vlora.model.multimodal import PIXEL_BOXES
from vlora.request import Clip, IntArray
from vlora.strict_json import load_object
from vlora.tasks import TASKS

SCHEMA_VERSION = "2"
SCHEMA_PATH = Path(__file__).with_name("result.schema.json")
WORDS = "word_probabilities"
MAX_PICTURES = 1 << 16  # Maximum number of images and frames of a result.
GRID = 1000  # Number of cells along an edge.
# Maximum number of malformed boxes and names that are described. Further ones are only counted.
MAX_WARNINGS = 100
_NAME, _BOX = "name", "box"
# Kind, whether it closes, and whether it is of the paper's syntax, by tag.
_TAGS = {
    "<ref>": (_NAME, False, True),
    "</ref>": (_NAME, True, True),
    "<box>": (_BOX, False, True),
    "</box>": (_BOX, True, True),
    "<|object_ref_start|>": (_NAME, False, False),
    "<|object_ref_end|>": (_NAME, True, False),
    "<|box_start|>": (_BOX, False, False),
    "<|box_end|>": (_BOX, True, False),
}
_TAG = re.compile("|".join(map(re.escape, _TAGS)))
_POINT = r"\(\s*([0-9]{1,5})\s*,\s*([0-9]{1,5})\s*\)"
_CORNERS = re.compile(rf"\s*{_POINT}\s*,?\s*{_POINT}\s*")
_JSON_KEY = "bbox_2d"
_JSON_BOX = re.compile(r"\{[^{}]*+\}")
_JSON_DEPTH = 2  # An object with a list.

Size = tuple[int, int]  # Height and width.
Edges = tuple[float, float, float, float]  # Left, top, right and bottom.


@dataclass(frozen=True)
class TextBox:
    """A box in the model's text.

    label: name of the box, or None.
    grid: its edges on the grid, each from 0 to GRID.
    """

    label: str | None
    grid: Edges

    def pixels(self, height: int, width: int) -> list[float]:
        """Return left, top, right, bottom in pixels of an image, rounded to 0.01."""
        left, top, right, bottom = self.grid
        scaled = (left * width, top * height, right * width, bottom * height)
        return [round(value / GRID, 2) for value in scaled]


def parse_boxes(text: str, size: Size = (GRID, GRID)) -> tuple[list[TextBox], list[str]]:
    """Return the boxes in `text`, those in tags first, and a sentence for each malformed one.

    Any text is accepted. The time is linear in its length.

    size: height and width of the picture in the unit of coordinates. The paper's syntax always
        counts in cells of the grid.
    """
    boxes: list[TextBox] = []
    warnings: list[str] = []
    label: str | None = None
    open_tag: re.Match[str] | None = None
    for tag in _TAG.finditer(text):
        kind, closes, is_papers = _TAGS[tag[0]]
        if closes and (open_tag is None or _TAGS[open_tag[0]] != (kind, False, is_papers)):
            warnings.append(f"{tag[0]} at character {tag.start()} closes nothing")
            continue
        if not closes:
            if open_tag is not None:
                warnings.append(_unclosed(open_tag))
            open_tag = tag
            label = None if kind == _NAME else label
            continue
        assert open_tag is not None
        body = text[open_tag.end() : tag.start()]
        open_tag = None
        if kind == _NAME:
            label = body.strip() or None
            continue
        match = _CORNERS.fullmatch(body)
        corners = [] if match is None else [int(digits) for digits in match.groups()]
        unit, last = ((GRID, GRID), (GRID - 1, GRID - 1)) if is_papers else (size, size)
        if (grid := _on_grid(corners, unit, last)) is not None:
            boxes.append(TextBox(label, grid))
        else:
            warnings.append(_off_picture(body, last))
    if open_tag is not None:
        warnings.append(_unclosed(open_tag))
    in_json, more = _boxes_in_json(text, size)
    return boxes + in_json, warnings + more


def _boxes_in_json(text: str, size: Size) -> tuple[list[TextBox], list[str]]:
    boxes: list[TextBox] = []
    warnings: list[str] = []
    key = json.dumps(_JSON_KEY)
    # The objects are found one by one, because the list around them may be cut off.
    found = [part for part in _JSON_BOX.findall(text) if key in part] if key in text else []
    for part in found:
        try:
            content = load_object(part, "a box", _JSON_DEPTH)
        except InvalidArgument:
            content = {}
        if (grid := _on_grid(content.get(_JSON_KEY), size, size)) is None:
            warnings.append(_off_picture(part, size))
            continue
        # Texts that were read from a picture have the second key.
        labels = (content.get(name) for name in ("label", "text_content"))
        label = next((one.strip() for one in labels if isinstance(one, str) and one.strip()), None)
        boxes.append(TextBox(label, grid))
    if unread := text.count(key) - len(found):
        warnings.append(f"{unread} {key} outside of a complete JSON object")
    return boxes, warnings


def _on_grid(corners: Any, size: Size, last: Size) -> Edges | None:
    """Return the edges of the box between two corners; None for anything else.

    corners: list of x1, y1, x2 and y2, in the unit of `size`, the picture's height and width.
    last: largest valid y and x.
    """
    if not isinstance(corners, list) or len(corners) != 4:
        return None
    if not all(type(edge) in (int, float) and edge >= 0 for edge in corners):
        return None
    (left, right), (top, bottom) = sorted(corners[::2]), sorted(corners[1::2])
    if right > last[1] or bottom > last[0]:
        return None
    height, width = size
    return GRID * left / width, GRID * top / height, GRID * right / width, GRID * bottom / height


def _off_picture(text: str, last: Size) -> str:
    height, width = last
    is_grid = height == width and width in (GRID - 1, GRID)
    area = f"on the grid of 0-{width}" if is_grid else f"within {width} x {height} pixels"
    return f"not a box {area}: '{text[:60]}'"


def build_result(
    *,
    text: str,
    details: Mapping[str, Any],
    layout: IntArray,
    size: IntArray,
    labels: Sequence[str] = (),
    scores: Sequence[float] = (),
    metadata: str = "",
    pixels_per_patch: int = 0,
    videos: Sequence[Clip] = (),
) -> str:
    """Return the JSON of one answer, which conforms to the schema.

    details: `task`, `adapter` ({name, digest} or None) and `timings` (seconds by name), and
        `word_probabilities` if the request has asked for them.
    layout: int32 [n, 6]; its last column, is_video, is the number of frames, 0 for an image.
    size: int32 [n, 2], height and width in pixels.
    labels, scores: outputs of a vision task head, of equal length; empty without a head.
    metadata: metadata of the request, which the result returns.
    pixels_per_patch: result of `pixels_per_patch` for the checkpoint.
    videos: the video files, whose frames come before those of the clip.

    Raises InvalidArgument if the arguments do not fit each other.
    """
    _check(details, layout, size, labels, scores)
    boxes, warnings = parse_boxes(text, _box_size(layout, pixels_per_patch))
    is_video = [bool(line[5]) for line in layout for _ in range(max(1, line[5]))]
    if boxes and not is_video:
        warnings.append(f"the request has no image for {len(boxes)} boxes")
    objects = _objects(boxes, len(is_video), size)
    if (more := len(warnings) - MAX_WARNINGS) > 0:
        warnings[MAX_WARNINGS:] = [f"{more} more"]
    result = {
        "schema_version": SCHEMA_VERSION,
        "task": details["task"],
        "text": text,
        "adapter": details["adapter"],
        "timings": details["timings"],
        "metadata": metadata,
        "images": _pictures(objects, is_video, False),
        "videos": _videos(objects, is_video, videos),
        "frames": _pictures(objects, is_video, True, sum(video.frames for video in videos)),
        "counts": dict(Counter(box.label for box in boxes if box.label is not None)),
        "scores": {label: float(score) for label, score in zip(labels, scores, strict=True)},
        "warnings": warnings,
        **({WORDS: details[WORDS]} if WORDS in details else {}),
    }
    return json.dumps(result, allow_nan=False)


def _objects(boxes: Sequence[TextBox], pictures: int, size: IntArray) -> list[list[dict[str, Any]]]:
    """Return the objects of each image and frame: all boxes belong to the last one."""
    objects: list[list[dict[str, Any]]] = [[] for _ in range(pictures)]
    if pictures:
        height, width = (int(edge) for edge in size[-1])
        objects[-1] = [
            {"box": box.pixels(height, width), "label": box.label, "score": None} for box in boxes
        ]
    return objects


def pixels_per_patch(checkpoint: Path) -> int:
    """Return the edge of a patch in pixels if the checkpoint's boxes are in pixels, else 0.

    Raises InvalidArgument if its `config.json` cannot be read.
    """
    file = checkpoint / "config.json"
    try:
        config = json.loads(file.read_bytes())
        default = PIXEL_BOXES.get(config["model_type"], 0)
        return int(config.get("vision_config", {}).get("patch_size", default)) if default else 0
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidArgument(f"model: {file} cannot be read: {error!r}") from error


@cache
def result_schema() -> dict[str, Any]:
    """Return the JSON schema of a result, with the names of all tasks."""
    schema: dict[str, Any] = json.loads(SCHEMA_PATH.read_text(encoding="utf-8"))
    schema["properties"]["task"]["enum"] = list(TASKS)
    return schema


def _box_size(layout: IntArray, pixels_per_patch: int) -> Size:
    """Return height and width of the last picture in the unit of boxes."""
    if not pixels_per_patch or not len(layout):
        return GRID, GRID
    height, width = (int(edge) * pixels_per_patch for edge in layout[-1, 3:5])
    if min(height, width) < 1:
        raise InvalidArgument(
            f"'image_layout' has h, w = {layout[-1, 3]}, {layout[-1, 4]}; they must be positive"
        )
    return height, width


def _unclosed(tag: re.Match[str]) -> str:
    return f"{tag[0]} at character {tag.start()} is not closed"


def _pictures(
    objects: list[list[dict[str, Any]]], is_video: list[bool], frames: bool, first: int = 0
) -> list[dict[str, Any]]:
    """Return the objects in each image, or in each frame from `first` on, with indices from 0."""
    selected = [boxes for boxes, video in zip(objects, is_video, strict=True) if video is frames]
    selected = selected[first:]
    return [{"index": index, "objects": boxes} for index, boxes in enumerate(selected)]


def _videos(
    objects: list[list[dict[str, Any]]], is_video: list[bool], videos: Sequence[Clip]
) -> list[dict[str, Any]]:
    """Return the time and the objects of each frame of each video file."""
    if (count := sum(video.frames for video in videos)) > sum(is_video):
        raise InvalidArgument(
            f"'image_videos' has {count} frames, 'image_layout' has {sum(is_video)}"
        )
    frames = (boxes for boxes, video in zip(objects, is_video, strict=True) if video)
    return [
        {
            "index": index,
            "frames": [
                {"index": i, "seconds": round(seconds, 3), "objects": next(frames)}
                for i, seconds in enumerate(video.seconds)
            ],
        }
        for index, video in enumerate(videos)
    ]


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
