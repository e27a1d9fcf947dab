"""Tests of image decoding: formats, conversion to upright RGB, limits and error messages."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from vlora.config import Limits
from vlora.errors import InvalidArgument
from vlora.vision.decoding import ImageDecoder
from vlora.vision.images import DecodedImage, check_images

LIMITS = Limits()
_decoders: list[ImageDecoder] = []


@pytest.fixture(scope="module", autouse=True)
def decoder() -> Iterator[None]:
    """Start the processes that decode the images of all tests here."""
    _decoders.append(ImageDecoder(LIMITS))
    yield
    _decoders.pop().close()


def decode_request(images, frames, frames_raw, limits: Limits) -> list[DecodedImage]:
    """Return the decoded images of one request."""
    decoded = _decoders[0].decode(check_images(images, frames, frames_raw, limits))
    decoded.release()
    return decoded.images


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


def decode_one(data: bytes, limits: Limits = LIMITS) -> DecodedImage:
    (image,) = decode_request([data], [], None, limits)
    return image


def png(width: int, height: int, bits: int = 8, rows: bytes = b"") -> bytes:
    """Return an RGB PNG of width x height, but with only the pixel data `rows`."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        checksum = struct.pack(">I", zlib.crc32(kind + body))
        return struct.pack(">I", len(body)) + kind + body + checksum

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, 2, 0, 0, 0))
    pixels = chunk(b"IDAT", zlib.compress(rows))
    return b"\x89PNG\r\n\x1a\n" + header + pixels + chunk(b"IEND", b"")


@pytest.mark.parametrize("format", ["PNG", "WEBP", "BMP", "TIFF", "GIF", "JPEG"])
@pytest.mark.parametrize("wrap", [bytes, base64.b64encode, base64.encodebytes])
def test_every_format_is_read_raw_and_as_base64(format, wrap):
    options = {"lossless": True} if format == "WEBP" else {}
    pixels = random_rgb(1)
    image = decode_one(wrap(encode(pixels, format, **options)))
    assert (image.height, image.width, image.is_video) == (20, 30, False)
    assert image.rgb.dtype == np.uint8
    assert image.rgb.flags.c_contiguous
    if format not in ("GIF", "JPEG"):
        np.testing.assert_array_equal(image.rgb, pixels)


def test_a_data_url_is_read():
    pixels = random_rgb(2)
    url = b"data:image/png;base64," + base64.b64encode(encode(pixels))
    np.testing.assert_array_equal(decode_one(url).rgb, pixels)


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


def test_half_transparent_black_becomes_mid_grey():
    data = encode(Image.new("RGBA", (4, 4), (0, 0, 0, 128)))
    assert (np.abs(decode_one(data).rgb.astype(int) - 127) <= 1).all()


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


def test_thirty_two_bit_samples_are_refused_by_name():
    data = encode(Image.fromarray(np.ones((4, 4), np.float32)), "TIFF")
    with pytest.raises(InvalidArgument, match="image 0 has 32-bit samples"):
        decode_one(data)


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG", "TIFF"])
def test_an_animated_file_is_refused_as_an_image_and_read_as_frames(format):
    data = animation(format)
    with pytest.raises(InvalidArgument, match=r"image 0 is animated.*'frames'"):
        decode_one(data)
    frames = decode_request([], [data, encode(random_rgb(9))], None, LIMITS)
    assert [frame.is_video for frame in frames] == [True] * 6
    if format in ("PNG", "TIFF"):
        for i in range(5):
            np.testing.assert_array_equal(frames[i].rgb, random_rgb(i, 8, 8))


def test_frames_of_an_animation_count_against_the_limit():
    limits = replace(LIMITS, max_images=4)
    with pytest.raises(InvalidArgument, match=r"with frame 0 \(its picture 4\) .* more than 4 "):
        decode_request([], [animation("GIF")], None, limits)


def test_a_multi_picture_jpeg_is_its_first_picture():
    pages = [Image.fromarray(np.full((16, 16, 3), v, np.uint8)) for v in (30, 200)]
    data = encode(pages[0], "MPO", save_all=True, append_images=pages[1:])
    assert np.abs(decode_one(data).rgb.astype(int) - 30).max() < 4


def test_images_come_before_the_clip():
    stills = [encode(random_rgb(i)) for i in (1, 2)]
    clip = np.stack([random_rgb(i, 6, 8) for i in (3, 4, 5)])
    decoded = decode_request(stills, [], clip, LIMITS)
    assert [image.is_video for image in decoded] == [False, False, True, True, True]
    for i, image in enumerate(decoded[2:]):
        np.testing.assert_array_equal(image.rgb, clip[i])
    assert decode_request([], [], None, LIMITS) == []
    assert decode_request([], [], np.zeros((0, 0, 0, 3), np.uint8), LIMITS) == []


def test_a_clip_in_both_inputs_is_refused():
    clip = np.zeros((2, 4, 4, 3), np.uint8)
    with pytest.raises(InvalidArgument, match="'frames' or as 'frames_raw'"):
        decode_request([], [encode(random_rgb(0))], clip, LIMITS)


@pytest.mark.parametrize(
    "wrong",
    [
        np.zeros((2, 4, 4, 3), np.float32),
        np.zeros((4, 4, 3), np.uint8),
        np.zeros((2, 4, 4, 4), np.uint8),
        np.zeros((2, 0, 4, 3), np.uint8),
    ],
)
def test_raw_frames_of_another_type_or_shape_are_refused(wrong):
    with pytest.raises(InvalidArgument, match=r"'frames_raw' .*\["):
        decode_request([], [], wrong, LIMITS)


def test_too_many_images_are_refused_before_any_is_decoded():
    invalid = [b"not an image"] * 1000
    with pytest.raises(InvalidArgument, match=r"has 1000 .* the limit is 64"):
        decode_request([], invalid, None, LIMITS)
    with pytest.raises(InvalidArgument, match=r"has 65 .* the limit is 64"):
        decode_request([b"x"] * 33, [], np.zeros((32, 1, 1, 3), np.uint8), LIMITS)


@pytest.mark.parametrize("size", [(7000, 7000), (12000, 10000), (60000, 60000)])
def test_a_decompression_bomb_is_refused_from_its_header(size):
    megapixels = f"{size[0] * size[1] / 1e6:.1f}"
    with pytest.raises(InvalidArgument, match=f"{megapixels} megapixels; the limit is 40"):
        decode_one(png(*size))


def test_raw_frames_have_the_same_pixel_limit():
    limits = replace(LIMITS, max_image_megapixels=0.0001)
    with pytest.raises(InvalidArgument, match="frame 0 of 'frames_raw' is 20x20"):
        decode_request([], [], np.zeros((1, 20, 20, 3), np.uint8), limits)


def test_the_total_pixels_of_a_request_are_limited():
    limits = replace(LIMITS, max_request_megapixels=0.03)
    square = encode(random_rgb(0, 100, 100))
    assert len(decode_request([square] * 3, [], None, limits)) == 3
    with pytest.raises(InvalidArgument, match=r"with image 3 .* 0\.04 megapixels; .* 0\.03"):
        decode_request([square] * 4, [], None, limits)


@pytest.mark.parametrize(
    ("size", "shown"), [((8000, 5001), "40.01"), ((40_000_001, 1), "40.000001")]
)
def test_pixels_above_a_limit_are_shown_with_enough_decimals(size, shown):
    with pytest.raises(InvalidArgument, match=f"= {shown} megapixels; the limit is 40$"):
        decode_one(png(*size))


def test_a_long_strip_is_refused():
    with pytest.raises(InvalidArgument, match=r"image 0 is 4000x1; .* 200 times"):
        decode_one(encode(random_rgb(0, 1, 4000)))
    narrow = replace(LIMITS, max_aspect_ratio=3)
    with pytest.raises(InvalidArgument, match=r"image 0 is 40x10; .* 3 times"):
        decode_request([encode(random_rgb(0, 10, 40))], [], None, narrow)


def test_too_many_bytes_are_refused_with_value_and_limit():
    data = encode(random_rgb(1))
    limits = replace(LIMITS, max_image_bytes=len(data) - 1)
    for form in (data, base64.b64encode(data)):
        with pytest.raises(InvalidArgument, match=f"has {len(data)} bytes; .* {len(data) - 1}"):
            decode_one(form, limits)
    with pytest.raises(InvalidArgument, match="has 99999 bytes"):
        decode_one(b"x" * 99999, limits)


@pytest.mark.parametrize("data", [b"", b"hello", b"aGVsbG8=", b"%PDF-1.7", b"BMx", b"\x89PNG"])
def test_an_element_that_is_not_an_image_is_refused_with_its_index(data):
    with pytest.raises(InvalidArgument, match="image 1 is"):
        decode_request([encode(random_rgb(0)), data], [], None, LIMITS)
    with pytest.raises(InvalidArgument, match="frame 1 is"):
        decode_request([], [encode(random_rgb(0)), data], None, LIMITS)


def test_another_format_is_refused_with_the_accepted_ones():
    with pytest.raises(InvalidArgument, match="PNG, JPEG, WEBP, GIF, BMP, TIFF"):
        decode_one(encode(random_rgb(0), "PPM"))


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_a_truncated_file_is_refused(format):
    data = encode(random_rgb(1, 40, 40), format)
    with pytest.raises(InvalidArgument, match="image 0 is corrupt"):
        decode_one(data[: len(data) // 2])


def test_a_truncated_animation_is_refused_as_an_image():
    """Pillow reads past the end of this file, which raises one of Python's own errors."""
    data = animation("GIF", 2)
    cut = data[: data.index(b"\x21\xf9", data.index(b"\x2c")) + 1]
    with pytest.raises(InvalidArgument, match="image 0 is corrupt"):
        decode_one(cut)


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=150, deadline=None)
@given(data=st.data(), format=st.sampled_from(["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"]))
def test_hostile_bytes_give_pixels_or_a_typed_error(data, format):
    good = bytearray(animation(format, 2) if format in ("GIF", "TIFF") else encode(random_rgb(7)))
    for _ in range(data.draw(st.integers(1, 8))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    try:
        frames = decode_request([], [bytes(good)], None, LIMITS)
    except InvalidArgument as refusal:
        message = refusal.message
    else:
        message = "frame 0"
        assert {frame.rgb.dtype for frame in frames} == {np.dtype(np.uint8)}
    assert "frame 0" in message
    assert " at 0x" not in message
