"""Small video files of the kinds that exist in the world, and hostile ones."""

from __future__ import annotations

import io
import os
import struct
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from fractions import Fraction
from typing import Any

import av
import numpy as np
from av.stream import Disposition

WIDTH, HEIGHT, FPS, FRAMES = 64, 48, 25, 40
CODECS = {
    "h264": ("libx264", {"g": "12", "bf": "3"}),
    "h265": ("libx265", {"x265-params": "log-level=none:keyint=12:min-keyint=4"}),
    "vp9": ("libvpx-vp9", {"g": "12", "deadline": "realtime", "cpu-used": "8"}),
    "av1": ("libsvtav1", {"g": "12", "preset": "12"}),
    "mjpeg": ("mjpeg", {}),
    # A column of blocks at a time is refreshed instead of the whole picture.
    "h264 refresh": ("libx264", {"g": "12", "x264-params": "intra-refresh=1"}),
    "h264 interlaced": ("libx264", {"g": "12", "x264-params": "interlaced=1"}),
    "h264 open": ("libx264", {"g": "12", "x264-params": "open-gop=1:bframes=4:b-adapt=0"}),
}


def pictures(
    count: int = FRAMES, width: int = WIDTH, height: int = HEIGHT, seed: int = 0
) -> list[np.ndarray]:
    """Return frames of a moving random texture, each different, uint8 [height, width, 3]."""
    texture = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    coarse = texture[::8, ::8].repeat(8, axis=0).repeat(8, axis=1)[:height, :width]
    return [np.roll(coarse, (i, 3 * i), axis=(0, 1)) for i in range(count)]


def video(
    codec: str = "h264",
    container: str = "mp4",
    *,
    frames: Sequence[np.ndarray] | None = None,
    pixels: str = "",
    times: Sequence[int] | None = None,
    rotation: int = 0,
    mirrored: bool = False,
    options: dict[str, str] | None = None,
    with_audio: bool = False,
) -> bytes:
    """Return an encoded file.

    pixels: FFmpeg's name of the pixel format. times: time stamp of each frame, in 1/1000 s.
    rotation: degrees against the clock. with_audio: whether a sound stream comes first.
    """
    encoder, settings = CODECS[codec]
    frames = pictures() if frames is None else frames
    content = io.BytesIO()
    with av.open(content, "w", format=_FORMATS[container], options=options or {}) as file:
        sound = file.add_stream("aac", rate=8000) if with_audio else None
        stream = file.add_stream(encoder, rate=FPS, options=dict(settings))
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = pixels or ("yuvj420p" if codec == "mjpeg" else "yuv420p")
        if rotation or mirrored:
            stream.set_display_rotation(rotation, hflip=mirrored)
        if times is not None:
            stream.time_base = stream.codec_context.time_base = Fraction(1, 1000)
        if sound is not None:
            _mux_noise(file, sound)
        for i, rgb in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(rgb, format="rgb24")
            if times is not None:
                frame.pts, frame.time_base = times[i], Fraction(1, 1000)
            file.mux(stream.encode(frame))
        file.mux(stream.encode(None))
    if encoder == "libsvtav1":
        # It gives its caller a real-time priority, which all processes started later would inherit.
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    return content.getvalue()


_FORMATS = {"mp4": "mp4", "mov": "mov", "mkv": "matroska", "webm": "webm", "ts": "mpegts"}


def _mux_noise(file: Any, stream: Any) -> None:
    noise = np.random.default_rng(1).uniform(-1, 1, (1, 8000)).astype(np.float32)
    frame = av.AudioFrame.from_ndarray(noise, format="fltp", layout="mono")
    frame.sample_rate, frame.pts = 8000, 0
    file.mux(stream.encode(frame))
    file.mux(stream.encode(None))


def sound_only() -> bytes:
    content = io.BytesIO()
    with av.open(content, "w", format="mp4") as file:
        _mux_noise(file, file.add_stream("aac", rate=8000))
    return content.getvalue()


def remuxed(
    sources: Sequence[bytes],
    container: str,
    time: Callable[[int], int] = lambda time: time,
    dispositions: Sequence[Disposition] = (),
) -> bytes:
    """Return a file with the packets of others, in one stream after another.

    time: changes each time stamp. dispositions: if given, each file has a stream of its own.
    """
    content, offset, streams = io.BytesIO(), 0, []
    with av.open(content, "w", format=_FORMATS[container]) as out, ExitStack() as stack:
        inputs = [stack.enter_context(av.open(io.BytesIO(data))) for data in sources]
        for file in inputs[: len(dispositions) or 1]:
            streams.append(out.add_stream_from_template(file.streams.video[0]))
        for stream, disposition in zip(streams, dispositions, strict=False):
            stream.disposition = disposition
        for number, file in enumerate(inputs):
            packets = [packet for packet in file.demux(video=0) if packet.size]
            for packet in packets:
                packet.pts, packet.dts = time(packet.pts + offset), time(packet.dts + offset)
                packet.stream = streams[number if dispositions else 0]
                out.mux(packet)
            offset = 0 if dispositions else max(packet.pts for packet in packets) + 3600
    return content.getvalue()


def with_header_first(data: bytes) -> bytes:
    """Return an MP4 whose `moov` stands before the pictures, as in files for streaming."""
    at = data.index(b"moov") - 4
    size = struct.unpack_from(">I", data, at)[0]
    header, start = bytearray(data[at : at + size]), data.index(b"ftyp") - 4
    end = start + struct.unpack_from(">I", data, start)[0]
    table = header.index(b"stco") + 8
    (count,) = struct.unpack_from(">I", header, table)
    for entry in range(table + 4, table + 4 + 4 * count, 4):
        struct.pack_into(">I", header, entry, struct.unpack_from(">I", header, entry)[0] + size)
    return data[:end] + bytes(header) + data[end:at] + data[at + size :]


def with_number(data: bytes, box: bytes, offset: int, value: int) -> bytes:
    """Return an MP4 with another 32-bit number, `offset` bytes after the name of a box."""
    at = data.index(box) + 4 + offset
    return data[:at] + struct.pack(">I", value) + data[at + 4 :]


def without_first_time(data: bytes) -> bytes:
    """Return an MPEG-TS whose first frame has no time stamp."""
    at = data.index(b"\x00\x00\x01\xe0") + 7
    return data[:at] + bytes([data[at] & 0x3F]) + data[at + 1 :]


def box(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", 8 + len(content)) + kind + content


def with_box(data: bytes, path: Sequence[bytes], content: bytes) -> bytes:
    """Return an MP4 whose box at `path` has other content. The boxes around it are made longer."""
    if not path:
        return content
    at, out = 0, b""
    while at < len(data):
        size, kind = struct.unpack_from(">I4s", data, at)
        inner = data[at + 8 : at + size]
        out += box(kind, with_box(inner, path[1:], content) if kind == path[0] else inner)
        at += size
    return out


def mov_that_refers_to(path: str, data: bytes) -> bytes:
    """Return a QuickTime file whose pictures are in another file, `path`, by an alias record."""
    name = path.encode()
    alias = bytearray(150)
    alias[10 : 10 + 1 + 4] = b"\x04disk"
    extra = struct.pack(">HH", 2, len(name)) + name + b"\x00" * (len(name) % 2)
    extra += struct.pack(">HH", 18, len(name)) + name + b"\x00" * (len(name) % 2)
    record = box(b"alis", bytes(4) + bytes(alias) + extra + struct.pack(">HH", 0xFFFF, 0))
    content = bytes(4) + struct.pack(">I", 1) + record
    return with_box(data, (b"moov", b"trak", b"mdia", b"minf", b"dinf", b"dref"), content)


def mutated(data: bytes, draw: np.random.Generator) -> bytes:
    """Return a file with a few changes: bytes, numbers, and parts left out, repeated or moved."""
    out = bytearray(data)
    for _ in range(int(draw.integers(1, 5))):
        # Half of the changes are near the start or the end, where headers are.
        near = (len(out), min(len(out), 1200))[int(draw.integers(2))]
        at = int(draw.integers(near))
        at = len(out) - 1 - at if draw.integers(2) else at
        size = int(draw.integers(1, 60))
        match int(draw.integers(6)):
            case 0:
                out[at] = int(draw.integers(256))
            case 1:
                number = (0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 10**9)[int(draw.integers(6))]
                out[at : at + 4] = struct.pack(">I", number)
            case 2:
                out[at : at + size] = draw.bytes(size)
            case 3:
                del out[at : at + size]
            case 4:
                out[at:at] = out[at : at + size] * int(draw.integers(1, 4))
            case _:
                del out[max(at, 32) :]
    return bytes(out)
