"""Drawings of answers: the picture with its boxes, or the frames of a clip, and text below."""

import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from tools.demo.scenes import Pixels

SIDE = 384
"""Height in pixels to which pictures are enlarged."""
LINE_HEIGHT, LETTER_WIDTH = 22, 8
BOX_COLOURS = ("#ff2d55", "#00c2ff", "#ffcc00", "#34c759", "#af52de")
INK, PAPER, RIGHT, WRONG = "#1c1c1e", "#ffffff", "#178a3b", "#c4281c"


def draw_answer(
    frames: Sequence[Pixels], objects: Sequence[dict[str, Any]], texts: Sequence[tuple[str, str]]
) -> Image.Image:
    """Return a picture of an answer: the frames side by side, with boxes and text.

    objects: boxes in pixels of the first frame, and labels.
    texts: sentences below the picture, and their colours.
    """
    scale = max(1, SIDE // len(frames[0]))
    picture = Image.fromarray(np.concatenate(frames, axis=1))
    width, height = picture.width * scale, picture.height * scale
    wrapped = [(textwrap.wrap(text, width // LETTER_WIDTH), colour) for text, colour in texts]
    lines = [(line, colour) for parts, colour in wrapped for line in parts]
    whole = Image.new("RGB", (width, height + LINE_HEIGHT * len(lines) + 8), PAPER)
    whole.paste(picture.resize((width, height), Image.Resampling.NEAREST))
    draw, font = ImageDraw.Draw(whole), ImageFont.load_default(16)
    for number, found in enumerate(objects):
        box = [edge * scale for edge in found["box"]]
        colour = BOX_COLOURS[number % len(BOX_COLOURS)]
        draw.rectangle(box, outline=colour, width=4)
        draw.text((box[0] + 8, box[1] + 6), found["label"] or "?", INK, font)
    for number, (line, colour) in enumerate(lines):
        draw.text((4, height + 4 + number * LINE_HEIGHT), line, colour, font)
    return whole
