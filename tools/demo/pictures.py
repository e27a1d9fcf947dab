"""Drawings of answers on enlarged pictures: boxes on images, labels under frames."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from tools.demo.scenes import Pixels

SIDE = 384
"""Side in pixels to which every picture is scaled."""

COLUMNS = 4
MARGIN = 12
LINE_HEIGHT = 22
BOX_COLOURS = ("#ff2d55", "#00c2ff", "#ffcc00", "#34c759", "#af52de")
INK, PAPER, RIGHT, WRONG = "#1c1c1e", "#ffffff", "#178a3b", "#c4281c"


@dataclass(frozen=True)
class Caption:
    """Text below a picture; `label` is drawn on the frames of a clip."""

    asked: str
    label: str
    answer: str
    expected: str
    right: bool


def tile(frames: Sequence[Pixels], objects: Sequence[dict[str, Any]], caption: Caption) -> Any:
    """Return a picture of an answer: the image with its objects, or the frames, and the caption."""
    is_clip = len(frames) > 1
    picture = _strip(frames, caption.label) if is_clip else _draw_objects(frames[0], objects)
    words = [caption.asked, f"answer: {caption.answer}"]
    if not caption.right:
        words.append(f"expected: {caption.expected}")
    font = ImageFont.load_default(16)
    lines = [line for text in words for line in _wrapped(text, font)]
    whole = Image.new("RGB", (SIDE, picture.height + LINE_HEIGHT * len(lines) + 8), PAPER)
    whole.paste(picture, (0, 0))
    draw = ImageDraw.Draw(whole)
    asked = len(_wrapped(caption.asked, font))
    for number, line in enumerate(lines):
        colour = INK if number < asked else RIGHT if caption.right else WRONG
        draw.text((2, picture.height + 4 + number * LINE_HEIGHT), line, colour, font)
    return whole


def sheet(tiles: Sequence[Any]) -> Any:
    rows = [tiles[start : start + COLUMNS] for start in range(0, len(tiles), COLUMNS)]
    heights = [max(one.height for one in row) for row in rows]
    width = COLUMNS * (SIDE + MARGIN) + MARGIN
    page = Image.new("RGB", (width, sum(heights) + MARGIN * (len(rows) + 1)), "#e5e5ea")
    top = MARGIN
    for row, height in zip(rows, heights, strict=True):
        for column, one in enumerate(row):
            page.paste(one, (MARGIN + column * (SIDE + MARGIN), top))
        top += height + MARGIN
    return page


def _draw_objects(pixels: Pixels, objects: Sequence[dict[str, Any]]) -> Any:
    height, width = pixels.shape[:2]
    image = Image.fromarray(pixels).resize((SIDE, SIDE), Image.Resampling.NEAREST)
    draw = ImageDraw.Draw(image)
    for number, found in enumerate(objects):
        sizes = (width, height) * 2
        box = [edge * SIDE / size for edge, size in zip(found["box"], sizes, strict=True)]
        colour = BOX_COLOURS[number % len(BOX_COLOURS)]
        draw.rectangle(box, outline=colour, width=4)
        _label(
            draw, (box[0] + 4, box[1] + (-20 if box[1] >= 20 else 4)), found["label"] or "?", colour
        )
    return image


def _strip(frames: Sequence[Pixels], label: str) -> Any:
    """Return a picture of a clip: its frames, three per row, each with its number and the label."""
    side = SIDE // 3
    strip = Image.new("RGB", (SIDE, -(-len(frames) // 3) * side), PAPER)
    draw = ImageDraw.Draw(strip)
    for number, frame in enumerate(frames):
        left, top = number % 3 * side, number // 3 * side
        strip.paste(Image.fromarray(np.asarray(frame)).resize((side - 2, side - 2)), (left, top))
        _label(draw, (left + 3, top + 2), f"{number}", PAPER)
        _label(draw, (left + 3, top + side - 20), label[:14], PAPER)
    return strip


def _label(draw: Any, at: tuple[float, float], text: str, colour: str) -> None:
    font = ImageFont.load_default(14)
    draw.rectangle(draw.textbbox(at, f" {text} ", font), fill=colour)
    draw.text(at, f" {text} ", INK, font)


def _wrapped(text: str, font: Any) -> list[str]:
    """Return `text` as lines that fit below a picture. Long words are split."""
    lines: list[str] = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if font.getlength(longer) <= SIDE - 4:
            lines[-1] = longer
            continue
        while font.getlength(word) > SIDE - 4:
            kept = next(n for n in range(len(word), 0, -1) if font.getlength(word[:n]) <= SIDE - 4)
            lines.append(word[:kept])
            word = word[kept:]
        lines.append(word)
    return [line for line in lines if line]
