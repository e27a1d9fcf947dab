"""Boxes in the paper's syntax, `<ref>name</ref><box>(x1,y1),(x2,y2)</box>`, on a grid 0-999.

The checkpoint has one token for each of 32 bins, so a coordinate is always the centre of a bin.
Pixel boxes are (x1, y1, x2, y2), where x2 and y2 are exclusive.
"""

import re

from vlora.generation.metrics import Box

BINS = 32
GRID = 1000
BIN_CENTRES: tuple[int, ...] = tuple(round((i + 0.5) * GRID / BINS) for i in range(BINS))

_BOX_TEXT = re.compile(r"<box>\((\d+),(\d+)\),\((\d+),(\d+)\)</box>")


def bin_of(position: float, size: int) -> int:
    """Return the bin (0..31) of a position along an edge of a picture with `size` pixels."""
    return min(BINS - 1, max(0, int(position * BINS / size)))


def box_text(name: str, boxes: list[Box], size: int) -> str:
    """Return the text for boxes in pixels of a square picture whose side has `size` pixels."""
    text = f"<ref>{name}</ref>"
    for x1, y1, x2, y2 in boxes:
        edges = (BIN_CENTRES[bin_of(edge, size)] for edge in (x1, y1, x2 - 1e-3, y2 - 1e-3))
        text += "<box>({},{}),({},{})</box>".format(*edges)
    return text


def parse_boxes(text: str, size: int) -> list[Box]:
    """Return all boxes of an answer, in pixels of a square picture whose side has `size` pixels."""
    found: list[Box] = []
    for match in _BOX_TEXT.finditer(text):
        x1, y1, x2, y2 = (int(value) * size / GRID for value in match.groups())
        found.append((x1, y1, x2, y2))
    return found
