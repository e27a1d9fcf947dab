"""Decoding of requests without a vision tower."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

from vlora.request import Clip
from vlora.vision.decoding import ImageDecoder
from vlora.vision.images import DecodedImage, ImageRequest, PictureSize
from vlora.vision.pictures import ByteArray
from vlora.vision.video import VideoSampling


class Kept:
    """Keeps the pictures of one request. together: number that are needed at the same time."""

    def __init__(self, together: int = 1) -> None:
        self._together = together
        self._parts: list[DecodedImage] = []
        self.sizes: list[PictureSize] = []
        self.videos: list[Clip] = []
        self.images: list[DecodedImage] = []

    @property
    def pictures(self) -> int:
        return len(self.images)

    def sample(self, sampling: VideoSampling, total: int, fps: float) -> Sequence[int]:
        return range(sampling.check_count(sampling.num_frames or total, total))

    def plan(self, sizes: Sequence[PictureSize], videos: Sequence[Clip] = ()) -> None:
        self.sizes, self.videos = list(sizes), list(videos)

    def number_of_next(self) -> int:
        return min(self._together, len(self.sizes) - len(self.images))

    def add(self, rgb: ByteArray) -> bool:
        index = len(self.images) + len(self._parts)
        self._parts.append(DecodedImage(rgb, self.sizes[index].is_frame))
        if len(self._parts) < self.number_of_next():
            return False
        self.images += self._parts
        self.drop()
        return True

    def drop(self) -> None:
        self._parts = []


def start(decoder: ImageDecoder, request: ImageRequest, kept: Kept) -> Future[list[DecodedImage]]:
    """Begin to decode a request, and return its images or its error later."""
    future: Future[list[DecodedImage]] = Future()

    def done(error: BaseException | None) -> None:
        if error is None:
            future.set_result(kept.images)
        else:
            future.set_exception(error)

    decoder.submit(request, lambda: kept, done)
    return future


def decoded(decoder: ImageDecoder, request: ImageRequest) -> list[DecodedImage]:
    return start(decoder, request, Kept()).result(60)
