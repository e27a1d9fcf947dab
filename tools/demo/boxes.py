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
    """Return the bin (0..31) that contains a position along an edge of a picture.

    position: distance in pixels from the left or the upper edge.
    size: length of the edge in pixels.
    """
    return min(BINS - 1, max(0, int(position * BINS / size)))


def box_text(name: str, boxes: list[Box], size: int) -> str:
    """Return boxes as the text of an answer.

    boxes: in pixels of a square picture whose side has `size` pixels.
    """
    groups = []
    for x1, y1, x2, y2 in boxes:
        left, top = BIN_CENTRES[bin_of(x1, size)], BIN_CENTRES[bin_of(y1, size)]
        right, bottom = BIN_CENTRES[bin_of(x2 - 1e-3, size)], BIN_CENTRES[bin_of(y2 - 1e-3, size)]
        groups.append(f"<box>({left},{top}),({right},{bottom})</box>")
    return f"<ref>{name}</ref>{''.join(groups)}"


def parse_boxes(text: str, size: int) -> list[Box]:
    """Return all boxes of an answer, in pixels of a square picture whose side has `size` pixels."""
    found: list[Box] = []
    for match in _BOX_TEXT.finditer(text):
        x1, y1, x2, y2 = (int(value) * size / GRID for value in match.groups())
        found.append((x1, y1, x2, y2))
    return found
