"""Small files with harmless headers that cost their decoder much time or memory."""

from __future__ import annotations

import io
import struct
import zlib

from PIL import Image

START_OF_SCAN = b"\xff\xda"
END_OF_IMAGE = b"\xff\xd9"


def jpeg_with_scans(side: int, scans: int) -> bytes:
    """Return a progressive JPEG, side x side, whose last scan is repeated `scans` times.

    In each scan a decoder visits all blocks of the image, however few bytes the scan has.
    """
    content = io.BytesIO()
    Image.new("RGB", (side, side), (90, 120, 30)).save(content, "JPEG", progressive=True)
    head, _, last = content.getvalue().removesuffix(END_OF_IMAGE).rpartition(START_OF_SCAN)
    return head + (START_OF_SCAN + last) * scans + END_OF_IMAGE


def run_length_bmp(width: int, height: int) -> bytes:
    """Return a run-length encoded BMP with a run for each pixel."""
    pixels = (b"\x01\x07" * width + b"\x00\x00") * height + b"\x00\x01"
    palette = bytes(4 * 256)
    start = 14 + 40 + len(palette)
    header = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 8, 1, len(pixels), 0, 0, 256, 0)
    return (
        struct.pack("<2sIHHI", b"BM", start + len(pixels), 0, 0, start) + header + palette + pixels
    )


def tiff_with_tile(side: int, tile: int) -> bytes:
    """Return an RGB TIFF, side x side, whose only tile is compressed and has tile x tile pixels."""
    compressor = zlib.compressobj(1)
    row = bytes(3 * tile)
    data = b"".join(compressor.compress(row) for _ in range(tile)) + compressor.flush()
    tags = {
        256: (4, side),  # width
        257: (4, side),  # height
        258: (3, 8),  # bits per sample
        259: (3, 8),  # deflate
        262: (3, 2),  # RGB
        277: (3, 3),  # samples per pixel
        322: (4, tile),  # tile width
        323: (4, tile),  # tile height
        324: (4, 0),  # start of the tile's data, set below
        325: (4, len(data)),
    }
    bits = struct.pack("<HHH", 8, 8, 8)
    directory_bytes = 2 + 12 * len(tags) + 4
    bits_at = 8 + directory_bytes
    data_at = bits_at + len(bits)
    entries = b""
    for tag, (kind, value) in tags.items():
        if tag == 258:
            entries += struct.pack("<HHII", tag, kind, 3, bits_at)
        else:
            entries += struct.pack("<HHII", tag, kind, 1, data_at if tag == 324 else value)
    directory = struct.pack("<H", len(tags)) + entries + struct.pack("<I", 0)
    return b"II*\x00" + struct.pack("<I", 8) + directory + bits + data


def flat_png(width: int, height: int) -> bytes:
    """Return a PNG of one colour. Its size is a thousandth of that of its pixels."""
    content = io.BytesIO()
    Image.new("RGB", (width, height), (10, 20, 30)).save(content, "PNG")
    return content.getvalue()
