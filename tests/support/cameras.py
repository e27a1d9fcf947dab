"""Videos for tests of cameras."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest


def write_video(
    path: Path,
    rate: int,
    shades: Sequence[int],
    size: tuple[int, int] = (32, 32),
    codec: str = "mpeg4",
    **options: str,
) -> Path:
    """Write a video of grey frames (width, height), `rate` of them per second. Return its path."""
    av = pytest.importorskip("av", reason="the package `av` is not installed")
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=rate, options=options)
        stream.width, stream.height = size
        for shade in shades:
            pixels = np.full((size[1], size[0], 3), shade, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return path
