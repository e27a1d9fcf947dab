"""Sources of frames: streams and files by FFmpeg's libraries, folders of pictures, a synthetic
camera.

A source yields frames in the order of their Unix times. It ends when the stream ends, and raises
SourceError, whose message holds no password, if the stream cannot be read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
from PIL import Image, ImageDraw, ImageOps

from vlora.errors import ServerError
from vlora.watch.chunks import Frame
from vlora.watch.clock import unix_time
from vlora.watch.pixels import Pixels, View, of_array

PICTURES = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff"}
SYNTHETIC = "synthetic"


class SourceError(ServerError):
    """Raised if a source cannot be opened or read."""


class Source(Protocol):
    """A source that is open. Closing it twice does no harm."""

    def frames(self, wanted: Callable[[], float]) -> Iterator[Frame]:
        """Yield frames, of which those before the Unix time `wanted()` may be left out."""

    def close(self) -> None:
        """Close files and connections."""


class FrameFolder:
    """Pictures of a folder in the order of their names, `fps` per second."""

    def __init__(self, folder: Path, fps: float) -> None:
        self._fps = fps
        self._paths = sorted(p for p in folder.iterdir() if p.suffix.lower() in PICTURES)
        if not self._paths:
            raise SourceError(f"{folder} contains no pictures ({', '.join(sorted(PICTURES))})")

    def close(self) -> None:
        pass

    def frames(self, wanted: Callable[[], float]) -> Iterator[Frame]:
        start = unix_time()
        for index, path in enumerate(self._paths):
            if (at := start + index / self._fps) >= wanted():
                pixels = _read_picture(path)
                size = (pixels.shape[1], pixels.shape[0])
                yield Frame(at, size, partial(of_array, pixels))


def _read_picture(path: Path) -> Pixels:
    try:
        with Image.open(path) as image:
            return np.array(ImageOps.exif_transpose(image).convert("RGB"), np.uint8)
    except OSError as error:
        raise SourceError(f"cannot read the frame {path}: {error}") from None


class SyntheticCamera:
    """Synthetic video: each second a coloured shape moves in one direction or stands still.

    The `truth` of a frame names the motion. The same seed gives the same video.
    """

    MOTIONS = (
        ("moving left", (-1, 0)),
        ("moving right", (1, 0)),
        ("moving up", (0, -1)),
        ("moving down", (0, 1)),
        ("standing still", (0, 0)),
    )
    COLOURS = ((222, 38, 38), (36, 166, 52), (38, 72, 222), (240, 222, 40), (138, 40, 176))
    SURFACES = ((244, 244, 244), (18, 18, 18), (128, 128, 128), (140, 230, 236))
    SIDE = 64

    def __init__(self, fps: float, seed: int, height: int = 256, width: int = 256) -> None:
        self._fps = max(1, round(fps))
        self._size = (height, width)  # in pixels
        self._random = np.random.default_rng(seed)

    def close(self) -> None:
        pass

    def frames(self, wanted: Callable[[], float]) -> Iterator[Frame]:
        start, second = unix_time(), 0
        while True:
            truth, draw = self._next_second()
            for index in range(self._fps):
                at = start + second + index / self._fps
                if at >= wanted():
                    height, width = self._size
                    yield Frame(at, (width, height), partial(_drawn, draw, index), truth)
            second += 1

    def _next_second(self) -> tuple[str, Callable[[int], Pixels]]:
        """Return the motion of a second, and a function that draws each of its frames."""
        motion, (dx, dy) = self.MOTIONS[self._random.integers(len(self.MOTIONS))]
        colour = self.COLOURS[self._random.integers(len(self.COLOURS))]
        surface = self.SURFACES[self._random.integers(len(self.SURFACES))]
        is_round = bool(self._random.integers(2))
        side, travel = self._random.uniform(15, 21), self._random.uniform(22, 32)
        x, y = (self._start(side, step * travel) for step in (dx, dy))

        def draw(index: int) -> Pixels:
            moved = travel * index / max(1, self._fps - 1)
            corner = (x + dx * moved, y + dy * moved)
            return self._draw(corner, side, colour, surface, is_round)

        return motion, draw

    def _start(self, side: float, travel: float) -> float:
        low, high = 1 - min(0.0, travel), self.SIDE - 1 - side - max(0.0, travel)
        return float(self._random.uniform(low, high))

    def _draw(
        self,
        corner: tuple[float, float],
        side: float,
        colour: tuple[int, int, int],
        surface: tuple[int, int, int],
        is_round: bool,
    ) -> Pixels:
        height, width = self._size
        image = Image.new("RGB", (width, height), surface)
        left, top = corner[0] * width / self.SIDE, corner[1] * height / self.SIDE
        right, bottom = left + side * width / self.SIDE, top + side * height / self.SIDE
        draw = ImageDraw.Draw(image)
        shape = draw.ellipse if is_round else draw.rectangle
        shape((left, top, right, bottom), fill=colour)
        return np.array(image, np.uint8)


def _drawn(draw: Callable[[int], Pixels], index: int, view: View) -> Pixels:
    return of_array(draw(index), view)
