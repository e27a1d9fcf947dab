"""Decoding of one encoded file to upright RGB pixels, in a decoder process.

- An element of a request's input is a file of an accepted format, recognized by its first bytes,
  or strict base64 of such a file, with white space and a `data:...;base64,` prefix allowed.
- EXIF orientation is applied. Transparent pixels are composed onto white. 16-bit samples are scaled
  to 8 bits. Palette, gray and CMYK become RGB. Color profiles are ignored, and so are texts of a
  PNG that are too long.
- An animated file is refused as an image. In `frames`, each picture of an animated file is a frame.
  Only the first picture of a multi-picture JPEG, which phones write, is used.
"""

from __future__ import annotations

import io
import re
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import Image, ImageFile, PngImagePlugin, UnidentifiedImageError

from vlora.base64_text import decode_base64
from vlora.errors import InvalidArgument

ByteArray = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")  # Accepted formats, by Pillow's names.
_OUT_OF_MEMORY = ImageFile.ERRORS[-9]
_DATA_URL = re.compile(rb"data:[^,]{0,256};base64,", re.IGNORECASE)
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


def open_pictures(data: bytes, name: str, as_frames: bool, limit: int) -> Iterator[Image.Image]:
    """Yield the pictures of one element. Their headers have been read, but not their pixels.

    as_frames: whether the element may be animated, so that it has several pictures.
    limit: maximum size of the encoded file in bytes.

    Raises InvalidArgument, and MemoryError if the process has no memory left.
    """
    check_size(data, name, limit)
    kinds = f"an encoded image ({', '.join(FORMATS)})"
    encoded = _without_bulk(unwrap(data, name, limit, _is_encoded, kinds))
    with _pillow_errors(name), Image.open(io.BytesIO(encoded), formats=FORMATS) as image:
        if _is_animated(image) and not as_frames:
            raise InvalidArgument(
                f"{name} is animated or has several pages; send it as 'frames', or one of its"
                " pictures as an image"
            )
        yield image
        index = 1
        while _is_animated(image) and _seek(image, index):
            yield image
            index += 1


def sizes_of(pictures: Iterator[Image.Image], name: str) -> Iterator[tuple[int, int]]:
    """Yield (width, height) of an element's pictures, before the orientation is applied. Of most
    animated files, only the number of pictures is read, because Pillow decodes one to reach the
    next.
    """
    for image in pictures:
        yield image.size
        if image.format != "TIFF":
            with _pillow_errors(name):
                count = getattr(image, "n_frames", 1) if _is_animated(image) else 1
            yield from (image.size for _ in range(count - 1))
            return


def open_file(path: Path) -> Image.Image:
    """Open a picture of the operator's own, of any of Pillow's formats. Raises Pillow's errors."""
    return Image.open(io.BytesIO(_without_bulk(path.read_bytes())))


def load_rgb(image: Image.Image, name: str) -> ByteArray:
    """Return the pixels of the current picture, uint8 [height, width, 3], upright and contiguous.

    Raises InvalidArgument, and MemoryError if the process has no memory left.
    """
    with _pillow_errors(name):
        image.load()
        return _to_rgb(image, name)


def check_size(data: bytes, name: str, limit: int) -> None:
    """Raise InvalidArgument if an element is empty, or longer than the base64 of `limit` bytes."""
    if not data:
        raise InvalidArgument(f"{name} is empty")
    if len(data) > limit * 4 // 3 + 1024 or (_is_encoded(data) and len(data) > limit):
        raise InvalidArgument(f"{name} has {len(data)} bytes; the limit is {limit}")


@contextmanager
def _pillow_errors(name: str) -> Iterator[None]:
    """Raise InvalidArgument for Pillow's errors, which may be of any type for a hostile file."""
    try:
        yield
    except (InvalidArgument, MemoryError):
        raise
    except Exception as error:
        if _OUT_OF_MEMORY in str(error):
            raise MemoryError(str(error)) from None
        raise _corrupt(name, error) from None


def _seek(image: Image.Image, index: int) -> bool:
    try:
        image.seek(index)
    except EOFError:
        return False
    return True


def _corrupt(name: str, error: Exception) -> InvalidArgument:
    accepted = ", ".join(FORMATS)
    if isinstance(error, UnidentifiedImageError):
        return InvalidArgument(f"{name} is corrupt or of an unknown format; accepted: {accepted}")
    return InvalidArgument(f"{name} is corrupt or truncated: {str(error) or type(error).__name__}")


def unwrap(
    data: bytes, name: str, limit: int, is_file: Callable[[bytes], bool], expected: str
) -> bytes:
    """Return the file in an element, which may be base64.

    is_file: whether bytes begin like a file of an accepted format.
    expected: what such a file is, for the message of the InvalidArgument.
    """
    encoded = data
    if not is_file(data):
        head = _DATA_URL.match(data)
        try:
            encoded = decode_base64(data[head.end() if head else 0 :])
        except ValueError:
            encoded = b""
        if not is_file(encoded):
            raise InvalidArgument(f"{name} is neither {expected} nor base64 of one")
    if len(encoded) > limit:
        raise InvalidArgument(f"{name} has {len(encoded)} bytes; the limit is {limit}")
    return encoded


def _is_encoded(data: bytes) -> bool:
    """Return whether `data` begins like a file of an accepted format. Base64 text never does."""
    bitmap = data[:2] == b"BM" and data[14:18] in _BITMAP_HEADERS
    webp = data[:4] == b"RIFF" and data[8:12] == b"WEBP"
    return bitmap or webp or data.startswith(_MAGIC)


_PNG = b"\x89PNG\r\n\x1a\n"
_CHUNK = struct.Struct(">I4s")  # Header of a PNG's chunk: bytes of its content, kind.
_CRC_BYTES = 4  # The checksum after the content.
_TEXTS = (b"tEXt", b"zTXt", b"iTXt")  # Kinds of chunks.
_MAGIC = (
    *(_PNG, b"\xff\xd8\xff", b"GIF87a", b"GIF89a"),
    *(b"II*\x00", b"MM\x00*", b"II+\x00", b"MM\x00+"),
)
_BITMAP_HEADERS = {size.to_bytes(4, "little") for size in (12, 40, 52, 56, 64, 108, 124)}


def _without_bulk(data: bytes) -> bytes:
    """Return a PNG without its color profile, and without texts that are too long for Pillow, which
    would refuse the whole file. Other texts are kept, because they may have the orientation.

    Files of other formats are returned unchanged.
    """
    kept = []
    start, available = 0, PngImagePlugin.MAX_TEXT_MEMORY
    for kind, position, end in _chunks_of_png(data):
        if kind in _TEXTS and available > 0:
            size, is_readable = _text_size(kind, data[position + _CHUNK.size : end - _CRC_BYTES])
            available -= size
            if is_readable and available >= 0:
                continue
        elif kind not in (b"iCCP", *_TEXTS):
            continue
        kept.append(data[start:position])
        start = end
    return b"".join([*kept, data[start:]]) if kept else data


def _chunks_of_png(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Yield kind, start and end of each complete chunk. Yield nothing for other formats."""
    position = len(_PNG) if data.startswith(_PNG) else len(data)
    while position + _CHUNK.size <= len(data):
        length, kind = _CHUNK.unpack_from(data, position)
        end = position + _CHUNK.size + length + _CRC_BYTES
        if end > len(data):
            return
        yield kind, position, end
        position = end


def _text_size(kind: bytes, content: bytes) -> tuple[int, bool]:
    """Return the size in bytes of a text in Pillow's memory, and whether Pillow would accept it."""
    _, _, rest = content.partition(b"\0")
    if kind == b"tEXt" or (kind == b"iTXt" and rest[:1] == b"\0"):
        return len(content), True
    # Before a compressed text stand its method and, if international, a flag and two words.
    compressed = rest[1:] if kind == b"zTXt" else rest[2:].split(b"\0", 2)[-1]
    stream = zlib.decompressobj()
    try:
        size = len(stream.decompress(compressed, PngImagePlugin.MAX_TEXT_CHUNK))
    except zlib.error:
        return len(content), True  # Pillow ignores such a text.
    return size, not stream.unconsumed_tail


def _is_animated(image: Image.Image) -> bool:
    return image.format != "MPO" and bool(getattr(image, "is_animated", False))


def _to_rgb(image: Image.Image, name: str) -> ByteArray:
    """Return upright RGB of a loaded image. Pillow itself applies the orientation of a TIFF."""
    try:
        orientation = image.getexif().get(_ORIENTATION_TAG)
    except Exception:  # A corrupt EXIF block does not make the pixels invalid.
        orientation = None
    if image.mode.startswith("I;16"):
        upright = Image.fromarray(_scale(image))
    elif image.mode in ("I", "F"):
        raise InvalidArgument(f"{name} has 32-bit samples; send 8 or 16 bits per sample")
    elif image.has_transparency_data:
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        upright = Image.alpha_composite(white, image.convert("RGBA"))
    else:
        upright = image
    # Without this check, converting RGB to RGB would copy the image.
    if upright.mode != "RGB":
        upright = upright.convert("RGB")
    if orientation in _TRANSPOSE:
        upright = upright.transpose(_TRANSPOSE[orientation])
    return np.asarray(upright, np.uint8)


def _scale(image: Image.Image) -> ByteArray:
    """Return a 16-bit gray picture as uint8 [h, w]. Its transparent value becomes white."""
    values = np.asarray(image).astype(np.uint32)
    grey = ((values * 255 + 32767) // 65535).astype(np.uint8)
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):
        grey[values == transparent] = 255
    return grey
