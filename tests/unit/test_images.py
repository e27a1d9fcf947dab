"""Tests of image decoding: formats, conversion to upright RGB, limits and error messages."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from tests.support.decoding import decoded
from vlora.config import Limits
from vlora.errors import InvalidArgument
from vlora.vision.decoding import ImageDecoder
from vlora.vision.images import DecodedImage, check_images

_decoders: list[ImageDecoder] = []


@pytest.fixture(scope="module", autouse=True)
def decoder() -> Iterator[None]:
    """Start the processes that decode the images of all tests here."""
    _decoders.append(ImageDecoder(Limits()))
    yield
    _decoders.pop().close()


def decode_request(images=(), frames=(), frames_raw=None, **limits) -> list[DecodedImage]:
    """Return the decoded images of one request. limits: those that are not the default."""
    request = check_images(images, frames, frames_raw, Limits(**limits))
    return decoded(_decoders[0], request)


def random_rgb(seed: int, height: int = 20, width: int = 30) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def encode(pixels: np.ndarray | Image.Image, format: str = "PNG", **options: object) -> bytes:
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def animation(format: str, count: int = 5) -> bytes:
    pages = [Image.fromarray(random_rgb(i, 8, 8)) for i in range(count)]
    return encode(pages[0], format, save_all=True, append_images=pages[1:])


def decode_one(data: bytes, **limits) -> DecodedImage:
    (image,) = decode_request([data], **limits)
    return image


def png(width: int, height: int, bits: int = 8, rows: bytes = b"") -> bytes:
    """Return an RGB PNG of width x height, but with only the pixel data `rows`."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        checksum = struct.pack(">I", zlib.crc32(kind + body))
        return struct.pack(">I", len(body)) + kind + body + checksum

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, 2, 0, 0, 0))
    pixels = chunk(b"IDAT", zlib.compress(rows))
    return b"\x89PNG\r\n\x1a\n" + header + pixels + chunk(b"IEND", b"")


def data_url(data: bytes) -> bytes:
    return b"data:image/png;base64," + base64.b64encode(data)


@pytest.mark.parametrize("format", ["PNG", "WEBP", "BMP", "TIFF", "GIF", "JPEG"])
@pytest.mark.parametrize("wrap", [bytes, base64.b64encode, base64.encodebytes, data_url])
def test_every_format_is_read_raw_and_as_base64(format, wrap):
    options = {"lossless": True} if format == "WEBP" else {}
    pixels = random_rgb(1)
    image = decode_one(wrap(encode(pixels, format, **options)))
    assert (image.height, image.width, image.is_video) == (20, 30, False)
    assert image.rgb.dtype == np.uint8
    assert image.rgb.flags.c_contiguous
    if format not in ("GIF", "JPEG"):
        np.testing.assert_array_equal(image.rgb, pixels)


def texts(*chunks: tuple[bytes, bytes]) -> dict[str, PngInfo]:
    """Return the option of a PNG with these chunks: kind and content."""
    info = PngInfo()
    for kind, content in chunks:
        info.add(kind, content)
    return {"pnginfo": info}


LONG = b"workflow " * (1 << 18)  # 2.25 MiB
PLAIN = ((b"tEXt", b"a\0" + LONG), (b"iTXt", b"b\0\0\0\0\0" + LONG))
COMPRESSED = (
    (b"zTXt", b"c\0\0" + zlib.compress(LONG)),
    (b"iTXt", b"d\0\1\0\0\0" + zlib.compress(LONG)),
)
MANY = [(b"zTXt", b"e\0\0" + zlib.compress(bytes(1 << 20)))] * 70
BOMBS = [(b"zTXt", b"f\0\0" + zlib.compress(bytes(64 << 20)))] * 200
BULK = {
    "profile": ("PNG", {"icc_profile": np.random.default_rng(0).bytes(2 << 20)}),
    "profile that compresses well": ("PNG", {"icc_profile": bytes(32 << 20)}),
    "profile of a JPEG": ("JPEG", {"icc_profile": bytes(2 << 20)}),
    "profile of a WebP": ("WEBP", {"icc_profile": bytes(2 << 20), "lossless": True}),
    "profile of a TIFF": ("TIFF", {"icc_profile": bytes(2 << 20)}),
    "comment of a GIF": ("GIF", {"comment": LONG}),
    "texts": ("PNG", texts(*PLAIN, *COMPRESSED)),
    "many texts": ("PNG", texts(*MANY)),
    "bombs": ("PNG", texts(*BOMBS)),
    "texts without content": ("PNG", texts((b"zTXt", b""), (b"iTXt", b"a\0"), (b"tEXt", b""))),
}


@pytest.mark.parametrize("bulk", BULK)
def test_long_texts_and_profiles_are_ignored(bulk):
    """Image editors write them: histories, workflows of generators, profiles of printers."""
    pixels = random_rgb(1)
    format, options = BULK[bulk]
    image = decode_one(encode(pixels, format, **options), max_decode_bytes=256 << 20)
    if format not in ("GIF", "JPEG"):
        np.testing.assert_array_equal(image.rgb, pixels)


@pytest.mark.parametrize("length", [0, 3 << 20])
def test_an_orientation_in_a_text_is_applied(length):
    xmp = b'<x:xmpmeta><a tiff:Orientation="6"/>' + bytes(length).replace(b"\0", b" ")
    kept = (b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + xmp)
    image = decode_one(encode(random_rgb(1), "PNG", **texts(*COMPRESSED, kept)))
    assert (image.height, image.width) == (30, 20)


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_is_applied_before_the_size_is_read(format, orientation):
    """EXIF orientations 5 to 8 swap height and width."""
    marks = np.zeros((16, 48, 3), np.uint8)
    marks[:8, :16] = (255, 0, 0)
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"JPEG": {"quality": 98, "subsampling": 0}, "WEBP": {"lossless": True}}
    data = encode(marks, format, exif=exif, **options.get(format, {}))
    upright = {
        1: marks,
        2: marks[:, ::-1],
        3: marks[::-1, ::-1],
        4: marks[::-1],
        5: marks.transpose(1, 0, 2),
        6: np.rot90(marks, -1),
        7: np.rot90(marks, 2).transpose(1, 0, 2),
        8: np.rot90(marks, 1),
    }[orientation]
    image = decode_one(data)
    assert (image.height, image.width) == upright.shape[:2]
    assert np.abs(image.rgb.astype(int) - upright).max() < 12


def test_a_corrupt_exif_block_is_ignored():
    data = encode(random_rgb(3), "PNG", exif=b"Exif\x00\x00II*\x00\xff\xff\xff\x7f")
    assert decode_one(data).rgb.shape == (20, 30, 3)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "PA", "P"])
def test_transparent_pixels_become_white(mode):
    rgba = Image.fromarray(np.full((6, 6, 4), 10, np.uint8), "RGBA")
    rgba.putalpha(Image.fromarray(np.where(np.eye(6) > 0, 0, 255).astype(np.uint8)))
    if mode == "P":
        palette = Image.new("P", (6, 6), 1)
        palette.putpalette([255, 0, 255, 10, 10, 10])
        palette.paste(0, mask=Image.fromarray(np.eye(6, dtype=bool)))
        data = encode(palette, "PNG", transparency=0)
    elif mode == "PA":
        data = encode(rgba.quantize(8), "PNG")
    else:
        data = encode(rgba.convert(mode), "PNG")
    rgb = decode_one(data).rgb
    assert (rgb[np.eye(6) > 0] == 255).all()
    assert (np.abs(rgb[np.eye(6) == 0].astype(int) - 10) < 3).all()
    half_transparent_black = encode(Image.new("RGBA", (4, 4), (0, 0, 0, 128)))
    assert (np.abs(decode_one(half_transparent_black).rgb.astype(int) - 127) <= 1).all()


@pytest.mark.parametrize("format", ["PNG", "TIFF"])
def test_sixteen_bit_grey_is_scaled_and_not_clipped(format):
    values = np.random.default_rng(4).integers(0, 65536, (9, 7)).astype(np.uint16)
    rgb = decode_one(encode(values, format)).rgb
    np.testing.assert_array_equal(rgb[..., 0], np.rint(values / 257.0).astype(np.uint8))
    assert (rgb == rgb[..., :1]).all()


def test_sixteen_bit_rgb_is_scaled():
    values = np.random.default_rng(5).integers(0, 65536, (5, 6, 3)).astype(">u2")
    raw = b"".join(b"\x00" + row.tobytes() for row in values)
    rgb = decode_one(png(6, 5, 16, raw)).rgb
    assert np.abs(rgb - values / 257.0).max() <= 1.0


@pytest.mark.parametrize("mode", ["1", "L", "P", "CMYK", "YCbCr"])
def test_other_colour_spaces_become_rgb(mode):
    grey = Image.fromarray(random_rgb(6)).convert(mode)
    format = "JPEG" if mode in ("CMYK", "YCbCr") else "PNG"
    assert decode_one(encode(grey, format)).rgb.shape == (20, 30, 3)


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG", "TIFF"])
def test_an_animated_file_is_refused_as_an_image_and_read_as_frames(format):
    data = animation(format)
    with pytest.raises(InvalidArgument, match=r"image 0 is animated.*'frames'"):
        decode_one(data)
    frames = decode_request(frames=[data, encode(random_rgb(9))])
    assert [frame.is_video for frame in frames] == [True] * 6
    if format in ("PNG", "TIFF"):
        for i in range(5):
            np.testing.assert_array_equal(frames[i].rgb, random_rgb(i, 8, 8))


def test_a_multi_picture_jpeg_is_its_first_picture():
    pages = [Image.fromarray(np.full((16, 16, 3), v, np.uint8)) for v in (30, 200)]
    data = encode(pages[0], "MPO", save_all=True, append_images=pages[1:])
    assert np.abs(decode_one(data).rgb.astype(int) - 30).max() < 4


def test_images_come_before_the_clip():
    stills = [encode(random_rgb(i)) for i in (1, 2)]
    clip = np.stack([random_rgb(i, 6, 8) for i in (3, 4, 5)])
    decoded = decode_request(stills, frames_raw=clip)
    assert [image.is_video for image in decoded] == [False, False, True, True, True]
    for i, image in enumerate(decoded[2:]):
        np.testing.assert_array_equal(image.rgb, clip[i])
    assert decode_request() == []
    assert decode_request(frames_raw=blank(0, 0, 0, 3)) == []


def blank(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.uint8)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"images": [encode(Image.new("F", (4, 4)), "TIFF")]}, "image 0 has 32-bit samples"),
        ({"images": [encode(random_rgb(0), "PPM")]}, "PNG, JPEG, WEBP, GIF, BMP, TIFF"),
        (
            {"frames": [encode(random_rgb(0))], "frames_raw": blank(2, 4, 4, 3)},
            "'frames' or as 'frames_raw'",
        ),
        ({"frames_raw": np.zeros((2, 4, 4, 3), np.float32)}, r"'frames_raw' .*\["),
        ({"frames_raw": blank(4, 4, 3)}, r"'frames_raw' .*\["),
        ({"frames_raw": blank(2, 4, 4, 4)}, r"'frames_raw' .*\["),
        ({"frames_raw": blank(2, 0, 4, 3)}, r"'frames_raw' .*\["),
        # Limits are checked before anything is decoded.
        ({"frames": [b"not an image"] * 1000}, r"has 1000 .* the limit is 64"),
        ({"images": [b"x"] * 33, "frames_raw": blank(32, 1, 1, 3)}, r"has 65 .* the limit is 64"),
        (
            {"frames": [animation("GIF")], "max_images": 4},
            r"with frame 0 \(its picture 4\) .* more than 4 ",
        ),
        ({"images": [png(7000, 7000)]}, "49.0 megapixels; the limit is 40"),
        ({"images": [png(60000, 60000)]}, "3600.0 megapixels; the limit is 40"),
        ({"images": [png(8000, 5001)]}, "= 40.01 megapixels; the limit is 40$"),
        ({"images": [png(40_000_001, 1)]}, r"= 40\.000001 megapixels; the limit is 40$"),
        (
            {"frames_raw": blank(1, 20, 20, 3), "max_image_megapixels": 0.0001},
            "frame 0 of 'frames_raw' is 20x20",
        ),
        ({"images": [encode(random_rgb(0, 1, 4000))]}, r"image 0 is 4000x1; .* 200 times"),
        (
            {"images": [encode(random_rgb(0, 10, 40))], "max_aspect_ratio": 3},
            r"image 0 is 40x10; .* 3 times",
        ),
        ({"images": [b"x" * 99999], "max_image_bytes": 9}, "has 99999 bytes"),
    ],
)
def test_what_is_not_accepted_is_refused_with_value_and_limit(inputs, message):
    with pytest.raises(InvalidArgument, match=message):
        decode_request(**inputs)


def test_the_total_pixels_of_a_request_are_limited():
    square = encode(random_rgb(0, 100, 100))
    assert len(decode_request([square] * 3, max_request_megapixels=0.03)) == 3
    with pytest.raises(InvalidArgument, match=r"with image 3 .* 0\.04 megapixels; .* 0\.03"):
        decode_request([square] * 4, max_request_megapixels=0.03)


def test_too_many_bytes_are_refused_with_value_and_limit():
    data = encode(random_rgb(1))
    for form in (data, base64.b64encode(data)):
        with pytest.raises(InvalidArgument, match=f"has {len(data)} bytes; .* {len(data) - 1}"):
            decode_one(form, max_image_bytes=len(data) - 1)


@pytest.mark.parametrize("data", [b"", b"hello", b"aGVsbG8=", b"%PDF-1.7", b"BMx", b"\x89PNG"])
def test_an_element_that_is_not_an_image_is_refused_with_its_index(data):
    with pytest.raises(InvalidArgument, match="image 1 is"):
        decode_request([encode(random_rgb(0)), data])
    with pytest.raises(InvalidArgument, match="frame 1 is"):
        decode_request(frames=[encode(random_rgb(0)), data])


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "animation"])
def test_a_truncated_file_is_refused(format):
    if format == "animation":
        # Pillow reads past the end of this file, which raises one of Python's own errors.
        data = animation("GIF", 2)
        data = data[: data.index(b"\x21\xf9", data.index(b"\x2c")) + 1]
    else:
        data = encode(random_rgb(1, 40, 40), format)
        data = data[: len(data) // 2]
    with pytest.raises(InvalidArgument, match="image 0 is corrupt"):
        decode_one(data)


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=150, deadline=None)
@given(data=st.data(), format=st.sampled_from(["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"]))
def test_hostile_bytes_give_pixels_or_a_typed_error(data, format):
    good = bytearray(animation(format, 2) if format in ("GIF", "TIFF") else encode(random_rgb(7)))
    for _ in range(data.draw(st.integers(1, 8))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    try:
        frames = decode_request(frames=[bytes(good)])
    except InvalidArgument as refusal:
        message = refusal.message
    else:
        message = "frame 0"
        assert {frame.rgb.dtype for frame in frames} == {np.dtype(np.uint8)}
    assert "frame 0" in message
    assert " at 0x" not in message
