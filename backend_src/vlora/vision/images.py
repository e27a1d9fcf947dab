"""Checked RGB pixels from the encoded images of a request.

This module does not see models or the names of tensors. Its rules:

- The first bytes of an element decide: a file of an accepted format is decoded as it is, anything
  else must be strict base64 of such a file (white space and a `data:...;base64,` head are allowed).
- EXIF orientation is applied, transparency is composed onto white, 16-bit samples are scaled to 8
  bits; palette, grey and CMYK become RGB. Colour profiles are ignored.
- An animated file is refused as an image. In `frames` it stands for its own frames, each of which
  counts towards the limit of a request. A multi-picture JPEG, as phones write it, is its first
  picture.
- Counts are checked before decoding, and sizes from the header before pixels are decoded. A very
  long strip is refused, since a processor that scales the shorter edge would enlarge it enormously.
"""

from __future__ import annotations

import base64
import binascii
import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError

from vlora.config import Limits
from vlora.errors import InvalidArgument

ByteArray = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Accepted formats, by Pillow's names."""

_PILLOW_MEGAPIXELS = 2e-6 * (Image.MAX_IMAGE_PIXELS or 0)
_BOMBS = (Image.DecompressionBombError, Image.DecompressionBombWarning)
_DATA_URL = re.compile(rb"data:[\w.+/;=-]*;base64,", re.IGNORECASE)
_WHITE_SPACE = b" \t\r\n"
_ORIENTATION_TAG = 0x0112
_TRANSPOSE = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


@dataclass(frozen=True, eq=False)
class DecodedImage:
    """One image, or one frame of a clip.

    rgb: uint8 [height, width, 3], upright, contiguous.
    """

    rgb: ByteArray
    is_video: bool = False

    @property
    def height(self) -> int:
        """Height in pixels."""
        return int(self.rgb.shape[0])

    @property
    def width(self) -> int:
        """Width in pixels."""
        return int(self.rgb.shape[1])


def decode_request(
    images: Sequence[bytes],
    frames: Sequence[bytes],
    frames_raw: np.ndarray[Any, Any] | None,
    limits: Limits,
) -> list[DecodedImage]:
    """Return the decoded images of one request: independent images first, then the clip.

    images, frames: encoded files or their base64.
    frames_raw: uint8 [n, height, width, 3], owned by the caller, which must not change it until the
        request ends; n = 0 means no clip.

    Raises InvalidArgument naming the element and, for a limit, the value and the limit.
    """
    raw = _check_raw(frames_raw)
    if len(frames) and len(raw):
        raise InvalidArgument("send the clip as 'frames' or as 'frames_raw', not as both")
    count = len(images) + len(frames) + len(raw)
    if count > limits.max_images:
        raise InvalidArgument(
            f"the request has {count} images and frames; the limit is {limits.max_images}"
        )
    budget = _Budget(limits)
    decoded = [_decode_image(data, f"image {i}", budget) for i, data in enumerate(images)]
    for i, data in enumerate(frames):
        for rgb in _decode_frames(data, f"frame {i}", budget):
            decoded.append(DecodedImage(rgb, is_video=True))
            if len(decoded) > limits.max_images:
                raise InvalidArgument(
                    f"with the animated frame {i} the request has more than"
                    f" {limits.max_images} images and frames, which is the limit"
                )
    for i, frame in enumerate(raw):
        budget.add_image(f"frame {i} of 'frames_raw'", frame.shape[1], frame.shape[0])
        decoded.append(DecodedImage(np.ascontiguousarray(frame), is_video=True))
    return decoded


class _Budget:
    """Image limits of one request and the pixels that it has used so far."""

    def __init__(self, limits: Limits) -> None:
        self.max_bytes = limits.max_image_bytes
        self._max_image = min(limits.max_image_megapixels, _PILLOW_MEGAPIXELS)
        self._max_request = limits.max_request_megapixels
        self._max_aspect_ratio = limits.max_aspect_ratio
        self._pixels = 0

    def add_image(self, name: str, width: int, height: int) -> None:
        """Count an image's pixels. Raises InvalidArgument if the image exceeds a limit."""
        megapixels = width * height / 1e6
        if megapixels > self._max_image:
            raise InvalidArgument(
                f"{name} is {width}x{height} = {_format_above(megapixels, self._max_image)}"
                f" megapixels; the limit is {self._max_image:g}"
            )
        if max(width, height) > self._max_aspect_ratio * min(width, height):
            raise InvalidArgument(
                f"{name} is {width}x{height}; its longer edge may be at most"
                f" {self._max_aspect_ratio:g} times the shorter"
            )
        self._pixels += width * height
        if self._pixels > self._max_request * 1e6:
            raise InvalidArgument(
                f"with {name} the request has"
                f" {_format_above(self._pixels / 1e6, self._max_request)} megapixels; the limit of"
                f" a request is {self._max_request:g}"
            )

    def bomb_error(self, name: str, error: BaseException) -> InvalidArgument:
        """Return the error for an image that Pillow takes for a decompression bomb."""
        pixels = re.search(r"\d+", str(error))
        megapixels = _format_above(int(pixels[0]) / 1e6, self._max_image) if pixels else "too many"
        return InvalidArgument(
            f"{name} has {megapixels} megapixels; the limit is {self._max_image:g}"
        )


def _format_above(megapixels: float, limit: float) -> str:
    """Format `megapixels` with one decimal, or as many as show that it is above `limit`."""
    digits = 1
    while float(f"{megapixels:.{digits}f}") <= limit and digits < 6:
        digits += 1
    return f"{megapixels:.{digits}f}"


def _check_raw(frames_raw: np.ndarray[Any, Any] | None) -> ByteArray:
    """Return `frames_raw`, or an empty clip if it is None. Raises InvalidArgument."""
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


def _decode_image(data: bytes, name: str, budget: _Budget) -> DecodedImage:
    encoded = _unwrap(data, name, budget.max_bytes)
    with _pillow_errors(name, budget), _open(encoded) as image:
        if _is_animated(image):
            raise InvalidArgument(
                f"{name} is animated or has several pages; send it as 'frames', or one of its"
                " pictures as an image"
            )
        return DecodedImage(_load(image, name, budget))


def _decode_frames(data: bytes, name: str, budget: _Budget) -> Iterator[ByteArray]:
    """Yield the pictures of one element of `frames`: several if it is animated, else one."""
    encoded = _unwrap(data, name, budget.max_bytes)
    with _pillow_errors(name, budget), _open(encoded) as image:
        yield _load(image, name, budget)
        index = 1
        while _is_animated(image) and _seek(image, index):
            yield _load(image, f"{name} (its picture {index})", budget)
            index += 1


@contextmanager
def _pillow_errors(name: str, budget: _Budget) -> Iterator[None]:
    """Convert Pillow's errors to InvalidArgument; hostile bytes make it raise almost any type."""
    try:
        yield
    except InvalidArgument:
        raise
    except _BOMBS as error:
        raise budget.bomb_error(name, error) from None
    except Exception as error:
        raise _corrupt(name, error) from None


def _open(encoded: bytes) -> Image.Image:
    """Read the header of an encoded file."""
    return Image.open(io.BytesIO(encoded), formats=FORMATS)


def _seek(image: Image.Image, index: int) -> bool:
    """Make picture `index` the current one; return whether it exists."""
    try:
        image.seek(index)
    except EOFError:
        return False
    return True


def _load(image: Image.Image, name: str, budget: _Budget) -> ByteArray:
    budget.add_image(name, image.width, image.height)
    image.load()
    return _to_rgb(image, name)


def _corrupt(name: str, error: Exception) -> InvalidArgument:
    accepted = ", ".join(FORMATS)
    if isinstance(error, UnidentifiedImageError):
        return InvalidArgument(f"{name} is corrupt or of an unknown format; accepted: {accepted}")
    return InvalidArgument(f"{name} is corrupt or truncated: {str(error) or type(error).__name__}")


def _unwrap(data: bytes, name: str, limit: int) -> bytes:
    """Return the encoded file that `data` is, or holds as base64."""
    if not data:
        raise InvalidArgument(f"{name} is empty")
    if len(data) > limit * 4 // 3 + 1024 or (_is_encoded(data) and len(data) > limit):
        raise InvalidArgument(f"{name} has {len(data)} bytes; the limit is {limit}")
    if _is_encoded(data):
        return data
    head = _DATA_URL.match(data)
    text = data[head.end() if head else 0 :].translate(None, _WHITE_SPACE)
    try:
        encoded = base64.b64decode(text, validate=True)
    except binascii.Error:
        encoded = b""
    if not _is_encoded(encoded):
        raise InvalidArgument(
            f"{name} is neither an encoded image ({', '.join(FORMATS)}) nor base64 of one"
        )
    if len(encoded) > limit:
        raise InvalidArgument(f"{name} has {len(encoded)} bytes; the limit is {limit}")
    return encoded


def _is_encoded(data: bytes) -> bool:
    """Return whether `data` begins as a file of an accepted format; base64 never does."""
    bitmap = data[:2] == b"BM" and data[14:18] in _BITMAP_HEADERS
    webp = data[:4] == b"RIFF" and data[8:12] == b"WEBP"
    return bitmap or webp or data.startswith(_MAGIC)


_MAGIC = (
    b"\x89PNG\r\n\x1a\n",
    b"\xff\xd8\xff",
    b"GIF87a",
    b"GIF89a",
    b"II*\x00",
    b"MM\x00*",
    b"II+\x00",
    b"MM\x00+",
)
_BITMAP_HEADERS = {size.to_bytes(4, "little") for size in (12, 40, 52, 56, 64, 108, 124)}


def _is_animated(image: Image.Image) -> bool:
    return image.format != "MPO" and bool(getattr(image, "is_animated", False))


def _to_rgb(image: Image.Image, name: str) -> ByteArray:
    """Return upright RGB of a loaded image; Pillow has already rotated a TIFF when loading it."""
    try:
        orientation = image.getexif().get(_ORIENTATION_TAG)
    except Exception:  # a corrupt EXIF block does not make the pixels invalid
        orientation = None
    if image.mode.startswith("I;16"):
        upright = Image.fromarray(_scale(image))
    elif image.mode in ("I", "F"):
        raise InvalidArgument(f"{name} has 32-bit samples; send 8 or 16 bits per sample")
    elif image.has_transparency_data:
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        upright = Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")
    else:
        upright = image.convert("RGB")
    if orientation in _TRANSPOSE:
        upright = upright.transpose(_TRANSPOSE[orientation])
    return np.array(upright.convert("RGB"), np.uint8)


def _scale(image: Image.Image) -> ByteArray:
    """Scale 16-bit grey to uint8 [h, w]; the transparent value, if there is one, becomes white."""
    values = np.asarray(image).astype(np.uint32)
    grey = ((values * 255 + 32767) // 65535).astype(np.uint8)
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):
        grey[values == transparent] = 255
    return grey
