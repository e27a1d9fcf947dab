"""Pictures of cameras: the part and the size that are sent, and their encoding."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

Pixels = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]


class Region(NamedTuple):
    """A rectangle of the picture, as shares of its width and height."""

    left: float
    top: float
    right: float
    bottom: float


WHOLE = Region(0.0, 0.0, 1.0, 1.0)


@dataclass(frozen=True)
class View:
    """What of a picture is sent: the part inside `bounds`, its longer side at most `size` pixels.

    size: None for all pixels.
    """

    bounds: Region = WHOLE
    size: int | None = None

    @classmethod
    def of(cls, regions: Sequence[Region], size: int) -> View:
        """Return the bounding box of the regions; the whole picture if there are none."""
        if not regions:
            return cls(WHOLE, size)
        lefts, tops, rights, bottoms = zip(*regions, strict=True)
        return cls(Region(min(lefts), min(tops), max(rights), max(bottoms)), size)

    def inside(self, region: Region) -> Region:
        """Return a region of the whole picture as shares of the part that is sent."""
        left, top, right, bottom = self.bounds
        width, height = right - left, bottom - top
        return Region(
            (region.left - left) / width,
            (region.top - top) / height,
            (region.right - left) / width,
            (region.bottom - top) / height,
        )

    def layout(self, width: int, height: int) -> tuple[tuple[int, int], tuple[int, int, int, int]]:
        """Return the size (width, height) to which the whole picture is scaled, and the edges
        (left, top, right, bottom) of the part in it."""
        left, top, right, bottom = self.bounds
        longer = max((right - left) * width, (bottom - top) * height)
        scale = 1.0 if self.size is None else min(1.0, self.size / longer)
        scaled = (max(1, round(width * scale)), max(1, round(height * scale)))
        x, y = math.floor(left * scaled[0]), math.floor(top * scaled[1])
        edges = (x, y, max(x + 1, round(right * scaled[0])), max(y + 1, round(bottom * scaled[1])))
        return scaled, edges


@dataclass(frozen=True)
class Shot:
    """A frame as a JPEG file, and as a small grey picture if there is a gate."""

    file: bytes
    grey: Pixels | None


def of_video(frame: Any, view: View) -> Pixels:
    """Return the part of a decoded video frame as RGB [height, width, 3]."""
    (width, height), (left, top, right, bottom) = view.layout(frame.width, frame.height)
    whole = frame.to_ndarray(format="rgb24", width=width, height=height, interpolation="AREA")
    return np.ascontiguousarray(whole[top:bottom, left:right])


def of_array(pixels: Pixels, view: View) -> Pixels:
    """Return the part of an RGB picture [height, width, 3]."""
    size, (left, top, right, bottom) = view.layout(pixels.shape[1], pixels.shape[0])
    if size != (pixels.shape[1], pixels.shape[0]):
        pixels = np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.BOX), np.uint8)
    return np.ascontiguousarray(pixels[top:bottom, left:right])


def encoded(pixels: Pixels, format: str = "JPEG") -> bytes:
    """Return a picture as a JPEG or PNG file."""
    buffer = io.BytesIO()
    options: dict[str, Any] = {"quality": 90} if format == "JPEG" else {"compress_level": 1}
    Image.fromarray(pixels).save(buffer, format, **options)
    return buffer.getvalue()
