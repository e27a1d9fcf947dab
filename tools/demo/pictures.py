"""Drawings of answers: the picture with its boxes, or the frames of a clip, and text below."""

import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from tools.demo.scenes import Pixels

SIDE = 384
"""Side in pixels to which every picture is scaled."""
LINE_HEIGHT, LINE_CHARACTERS = 22, 46
BOX_COLOURS = ("#ff2d55", "#00c2ff", "#ffcc00", "#34c759", "#af52de")
INK, PAPER, RIGHT, WRONG = "#1c1c1e", "#ffffff", "#178a3b", "#c4281c"


def tile(
    frames: Sequence[Pixels], objects: Sequence[dict[str, Any]], texts: Sequence[tuple[str, str]]
) -> Any:
    """Return a picture of an answer.

    objects: boxes in pixels, and labels, which are drawn on a single frame.
    texts: sentences below the picture, and their colours.
    """
    picture = _strip(frames) if len(frames) > 1 else _draw_objects(frames[0], objects)
    lines = [
        (line, colour) for text, colour in texts for line in textwrap.wrap(text, LINE_CHARACTERS)
    ]
    whole = Image.new("RGB", (SIDE, picture.height + LINE_HEIGHT * len(lines) + 8), PAPER)
    whole.paste(picture, (0, 0))
    draw = ImageDraw.Draw(whole)
    for number, (line, colour) in enumerate(lines):
        place = (2, picture.height + 4 + number * LINE_HEIGHT)
        draw.text(place, line, colour, ImageFont.load_default(16))
    return whole


def _draw_objects(pixels: Pixels, objects: Sequence[dict[str, Any]]) -> Any:
    height, width = pixels.shape[:2]
    image = Image.fromarray(pixels).resize((SIDE, SIDE), Image.Resampling.NEAREST)
    draw = ImageDraw.Draw(image)
    for number, found in enumerate(objects):
        sizes = (width, height) * 2
        box = [edge * SIDE / size for edge, size in zip(found["box"], sizes, strict=True)]
        colour = BOX_COLOURS[number % len(BOX_COLOURS)]
        draw.rectangle(box, outline=colour, width=4)
        place = box[0] + 4, box[1] + (-20 if box[1] >= 20 else 4)
        text, font = f" {found['label'] or '?'} ", ImageFont.load_default(14)
        draw.rectangle(draw.textbbox(place, text, font), fill=colour)
        draw.text(place, text, INK, font)
    return image


def _strip(frames: Sequence[Pixels]) -> Any:
    """Return a picture of a clip: its frames in order, three per row."""
    side = SIDE // 3
    strip = Image.new("RGB", (SIDE, -(-len(frames) // 3) * side), PAPER)
    for number, frame in enumerate(frames):
        place = number % 3 * side, number // 3 * side
        strip.paste(Image.fromarray(np.asarray(frame)).resize((side - 2, side - 2)), place)
    return strip
