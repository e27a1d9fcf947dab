"""Sources of frames: a video file, a folder of pictures, or a synthetic camera.

A source yields chunks: one second of video, reduced to a few evenly spaced frames. Each frame is
RGB, uint8 [height, width, 3].
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageOps

from clients.common import ClientError

Pixels = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]

GRID = 4  # Frames that are kept of each second of a video, for each one that a chunk needs.
PICTURES = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff"}


@dataclass(frozen=True, eq=False)
class Chunk:
    """Selected frames of one second of a stream, and the motion that they show if it is known."""

    frames: list[Pixels]
    truth: str | None = None


def evenly_spaced(count: int, wanted: int) -> list[int]:
    """Return the indices of `wanted` evenly spaced frames out of `count`."""
    return [i * count // wanted for i in range(wanted)]


def open_source(
    name: str, fps: int, frames_per_chunk: int, stream: int
) -> SyntheticCamera | FrameFolder | VideoFile:
    """Return the source for `camera`, a folder or a video file. Raises ClientError otherwise."""
    if name == "camera":
        return SyntheticCamera(fps, frames_per_chunk, seed=stream)
    path = Path(name)
    if path.is_dir():
        return FrameFolder(path, fps, frames_per_chunk)
    if path.suffix.lower() in PICTURES and path.is_file():
        raise ClientError(f"{path} is a picture: use clients/visual_retrieval.py")
    if path.is_file():
        return VideoFile(path, frames_per_chunk)
    raise ClientError(
        f"the source '{name}' does not exist: give a video file, a folder of frames, or 'camera'"
        + " (URLs are not supported)" * ("://" in name)
    )


def encode_frame(frame: Pixels, format: str) -> bytes:
    """Return a frame as a PNG or JPEG file."""
    buffer = io.BytesIO()
    options: dict[str, Any] = {"quality": 90} if format == "JPEG" else {"compress_level": 1}
    Image.fromarray(frame).save(buffer, format, **options)
    return buffer.getvalue()


class FrameFolder:
    """Pictures of a folder in the order of their names, `fps` per second, in an endless loop."""

    def __init__(self, folder: Path, fps: int, frames_per_chunk: int) -> None:
        self._fps = fps
        self._frames_per_chunk = frames_per_chunk
        self._paths = sorted(p for p in folder.iterdir() if p.suffix.lower() in PICTURES)
        if not self._paths:
            raise ClientError(f"{folder} contains no pictures ({', '.join(sorted(PICTURES))})")

    def chunks(self) -> Iterator[Chunk]:
        start = 0
        while True:
            count = min(self._fps, len(self._paths))
            indices = evenly_spaced(count, self._frames_per_chunk)
            yield Chunk([self._read((start + i) % len(self._paths)) for i in indices])
            start = (start + self._fps) % len(self._paths)

    def _read(self, index: int) -> Pixels:
        path = self._paths[index]
        try:
            with Image.open(path) as image:
                return np.array(ImageOps.exif_transpose(image).convert("RGB"), np.uint8)
        except OSError as error:
            raise ClientError(f"cannot read the frame {path}: {error}") from None


class VideoFile:
    """A video file in chunks of one second of video time, in an endless loop."""

    def __init__(self, path: Path, frames_per_chunk: int) -> None:
        self._path = path
        self._frames_per_chunk = frames_per_chunk
        try:
            import av
        except ImportError:
            raise ClientError("reading video files needs the package av: pip install av") from None
        self._av = av

    def chunks(self) -> Iterator[Chunk]:
        while True:
            empty = True
            for chunk in self._play():
                empty = False
                yield chunk
            if empty:
                raise ClientError(f"{self._path} contains no video frames")

    def _play(self) -> Iterator[Chunk]:
        """Yield the chunks of one pass, of which a last one under 0.5 s is dropped."""
        try:
            with self._av.open(str(self._path)) as container:
                if not container.streams.video:
                    raise ClientError(f"{self._path} contains no video stream")
                video = container.streams.video[0]
                fps = max(1, round(float(video.average_rate or 30)))
                # A file may claim any rate, so only some frames are converted and kept. They are
                # more than a chunk needs, because the last chunk may be shorter than a second.
                grid = set(evenly_spaced(fps, GRID * self._frames_per_chunk))
                kept: dict[int, Pixels] = {}
                count = passed = 0
                for frame in container.decode(video):
                    if count in grid:
                        kept[count] = np.asarray(frame.to_ndarray(format="rgb24"), np.uint8)
                    count += 1
                    if count == fps:
                        yield self._chunk(kept, count)
                        kept, count, passed = {}, 0, passed + 1
                if count * 2 >= fps or (count and not passed):
                    yield self._chunk(kept, count)
        except self._av.error.FFmpegError as error:
            raise ClientError(
                f"cannot read {self._path} as a video: {error.strerror or error}"
            ) from None

    def _chunk(self, kept: Mapping[int, Pixels], count: int) -> Chunk:
        # For a position without a stored frame, the last stored one before it is used.
        positions = evenly_spaced(count, self._frames_per_chunk)
        return Chunk([kept[max(i for i in kept if i <= position)] for position in positions])


class SyntheticCamera:
    """Synthetic video: each second a coloured shape moves in one direction or stands still.

    The `truth` of a chunk names the motion. The same seed gives the same video.
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

    def __init__(
        self, fps: int, frames_per_chunk: int, seed: int, height: int = 256, width: int = 256
    ) -> None:
        self._fps = fps
        self._frames_per_chunk = frames_per_chunk
        self._size = (height, width)  # in pixels
        self._random = np.random.default_rng(seed)

    def chunks(self) -> Iterator[Chunk]:
        while True:
            motion, (dx, dy) = self.MOTIONS[self._random.integers(len(self.MOTIONS))]
            colour = self.COLOURS[self._random.integers(len(self.COLOURS))]
            surface = self.SURFACES[self._random.integers(len(self.SURFACES))]
            is_round = bool(self._random.integers(2))
            side, travel = self._random.uniform(15, 21), self._random.uniform(22, 32)
            x, y = (self._start(side, step * travel) for step in (dx, dy))
            frames = []
            for index in evenly_spaced(self._fps, self._frames_per_chunk):
                moved = travel * index / max(1, self._fps - 1)
                corner = (x + dx * moved, y + dy * moved)
                frames.append(self._draw(corner, side, colour, surface, is_round))
            yield Chunk(frames, truth=motion)

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
