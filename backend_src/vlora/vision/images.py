"""The images of one request: the checks of their limits, and the decoded pixels.

Counts and sizes in bytes are checked before decoding, and the size of a large picture in pixels
after its header was read. A very long strip is refused, because an image processor that scales the
shorter edge to a fixed length would make a huge image.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from vlora.config import Limits
from vlora.errors import InvalidArgument
from vlora.request import FRAME_LIST
from vlora.sampling import AS_CHECKPOINT, MediaOptions
from vlora.vision.pictures import ByteArray, check_size


@dataclass(frozen=True, eq=False)
class DecodedImage:
    """One image, or frames of a clip that are encoded together.

    rgb: uint8 [height, width, 3], upright, contiguous. Several frames are stacked vertically.
    view: how a family encodes the image, if that depends on more than its pixels; else "".
    frames: number of frames in `rgb`. All of them have the same size.
    continues: whether the image continues the previous one's clip, in the same row of the layout.
    scaled: size (height, width) to which the image is scaled before it is encoded; None if the
        image processor chooses it.
    clip: number of the clip that a frame belongs to, among those of the request.
    """

    rgb: ByteArray
    is_video: bool = False
    view: str = ""
    frames: int = 1
    continues: bool = False
    scaled: tuple[int, int] | None = None
    clip: int = 0

    @property
    def height(self) -> int:
        """Height of one frame in pixels."""
        return int(self.rgb.shape[0]) // self.frames

    @property
    def width(self) -> int:
        return int(self.rgb.shape[1])


class PictureSize(NamedTuple):
    """Size of one picture in pixels, whether it is a frame, and the number of the frame's clip."""

    height: int
    width: int
    is_frame: bool
    clip: int = 0


def without_pixels(size: PictureSize) -> DecodedImage:
    """Return an image that has only a size, before its file is decoded."""
    return DecodedImage(
        np.broadcast_to(np.zeros(1, np.uint8), (size.height, size.width, 3)),
        size.is_frame,
        clip=size.clip,
    )


def stacked(pictures: Sequence[ByteArray], height: int, width: int) -> ByteArray:
    """Return pictures in one size, one below the other; without pixels if the first has none."""
    if not any(pictures[0].strides):
        return np.broadcast_to(pictures[0][:1, :1], (len(pictures) * height, width, 3))
    scaled = [
        rgb
        if rgb.shape[:2] == (height, width)
        else np.asarray(Image.fromarray(rgb).resize((width, height), Image.Resampling.BICUBIC))
        for rgb in pictures
    ]
    return np.concatenate(scaled) if len(scaled) > 1 else scaled[0]


class Element(NamedTuple):
    """One encoded element of a request: a file of an accepted format, or its base64.

    name: name of the element in error messages.
    is_frame: whether its pictures are frames of a clip.
    is_video: whether it is a video file.
    clip: number of the video file, or of the frame's clip, among the request's clips.
    """

    data: bytes
    name: str
    is_frame: bool
    is_video: bool = False
    clip: int = 0


@dataclass(frozen=True, eq=False)
class ImageRequest:
    """The checked images of one request.

    elements: encoded images, videos (files, or the frames of a list) and frames, in order.
    raw: uint8 [n, height, width, 3], decoded frames, which follow the elements; n may be 0.
    limits: limits that decoding must observe.
    options: how the images and videos are prepared.
    videos: number of videos.
    """

    elements: Sequence[Element]
    raw: ByteArray
    limits: Limits
    options: MediaOptions = AS_CHECKPOINT
    videos: int = 0

    def __len__(self) -> int:
        return len(self.elements) + len(self.raw)

    @property
    def has_files(self) -> bool:
        """Whether a video is a file."""
        return any(element.is_video for element in self.elements)

    @property
    def max_seconds(self) -> float:
        """Maximum processor time in seconds for decoding."""
        limits = self.limits
        return limits.max_video_seconds if self.has_files else limits.max_decode_seconds


def check_images(
    images: Sequence[bytes],
    frames: Sequence[bytes],
    frames_raw: np.ndarray[Any, Any] | None,
    limits: Limits,
    videos: Sequence[bytes] = (),
    options: MediaOptions = AS_CHECKPOINT,
) -> ImageRequest:
    """Check what can be checked before decoding, and return the images of a request.

    images, frames, videos: encoded files or their base64. A video may be a list of frames instead
        (FRAME_LIST).
    frames_raw: uint8 [n, height, width, 3], which the caller must not change. A request has one
        clip, as `frames` or as `frames_raw`.

    Raises InvalidArgument, which names the element and, for a limit, the value and the limit.
    """
    raw = _check_raw(frames_raw)
    if len(frames) and len(raw):
        raise InvalidArgument("send the clip as 'frames' or as 'frames_raw', not as both")
    head = FRAME_LIST.encode()
    # They are counted before they are split, because each comma would cost memory.
    listed = sum(data.count(b",") for data in videos if data.startswith(head))
    check_count(len(images) + len(frames) + len(raw) + listed, limits)
    elements = [Element(data, f"image {i}", False) for i, data in enumerate(images)]
    if len(videos) > limits.max_video_frames:
        raise InvalidArgument(
            f"the request has {len(videos)} videos; each has at least one frame, and the limit is"
            f" {limits.max_video_frames} frames of videos ('max_video_frames')"
        )
    for i, data in enumerate(videos):
        if data.startswith(head):
            elements += [
                Element(frame, f"video {i}, frame {j}", True, clip=i)
                for j, frame in enumerate(data[len(head) :].split(b","))
            ]
        else:
            elements.append(Element(data, f"video {i}", True, True, i))
    last = len(videos)
    elements += [Element(data, f"frame {i}", True, clip=last) for i, data in enumerate(frames)]
    for element in elements:
        limit = limits.max_video_bytes if element.is_video else limits.max_image_bytes
        check_size(element.data, element.name, limit)
    return ImageRequest(elements, raw, limits, options, len(videos))


def check_count(images: int, limits: Limits) -> None:
    """Raise InvalidArgument if a request has too many images and frames."""
    if images > limits.max_images:
        raise InvalidArgument(
            f"the request has {images} images and frames; the limit is {limits.max_images}"
        )


class PictureBudget:
    """Counts the pictures of one request and their pixels against the limits."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._pictures = 0
        self._pixels = 0
        self._video_frames = 0

    def add_video(self, name: str, width: int, height: int, frames: int) -> None:
        """Count a video file. Its frames are decoded one after another, for a limited time, so they
        do not count as images and pixels of the request.
        """
        self._check_picture(f"a frame of {name}", width, height)
        self._video_frames += frames
        if self._video_frames > (limit := self._limits.max_video_frames):
            raise InvalidArgument(
                f"with {name} the request has {self._video_frames} frames of videos; the limit is"
                f" {limit} ('max_video_frames'); sample fewer by 'fps' or 'num_frames'"
            )

    def _check_picture(self, name: str, width: int, height: int) -> None:
        limits = self._limits
        megapixels = width * height / 1e6
        if megapixels > limits.max_image_megapixels:
            raise InvalidArgument(
                f"{name} is {width}x{height} ="
                f" {_format_above(megapixels, limits.max_image_megapixels)}"
                f" megapixels; the limit is {limits.max_image_megapixels:g}"
            )
        if max(width, height) > limits.max_aspect_ratio * min(width, height):
            raise InvalidArgument(
                f"{name} is {width}x{height}; its longer edge may be at most"
                f" {limits.max_aspect_ratio:g} times the shorter"
            )

    def add(self, name: str, width: int, height: int) -> None:
        """Count a picture, before it is decoded. Raises InvalidArgument beyond a limit."""
        limits = self._limits
        self._check_picture(name, width, height)
        self._pictures += 1
        if self._pictures > limits.max_images:
            raise InvalidArgument(
                f"with {name} the request has more than {limits.max_images} images and frames,"
                " which is the limit; each picture of an animated file counts"
            )
        self._pixels += width * height
        if self._pixels > limits.max_request_megapixels * 1e6:
            raise InvalidArgument(
                f"with {name} the request has"
                f" {_format_above(self._pixels / 1e6, limits.max_request_megapixels)} megapixels;"
                f" the limit of a request is {limits.max_request_megapixels:g}"
            )


def _format_above(megapixels: float, limit: float) -> str:
    """Return `megapixels` with enough decimals to show that it is above `limit`."""
    digits = 1
    while float(f"{megapixels:.{digits}f}") <= limit and digits < 6:
        digits += 1
    return f"{megapixels:.{digits}f}"


def _check_raw(frames_raw: np.ndarray[Any, Any] | None) -> ByteArray:
    if frames_raw is None:
        return np.zeros((0, 1, 1, 3), np.uint8)
    if frames_raw.dtype != np.uint8 or frames_raw.ndim != 4 or frames_raw.shape[3] != 3:
        raise InvalidArgument(
            "'frames_raw' must be UINT8 [frames, height, width, 3],"
            f" not {frames_raw.dtype.name} {list(frames_raw.shape)}"
        )
    if len(frames_raw) and 0 in frames_raw.shape:
        raise InvalidArgument(f"'frames_raw' {list(frames_raw.shape)} has frames without pixels")
    return frames_raw
