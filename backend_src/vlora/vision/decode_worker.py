"""`python -m vlora.vision.decode_worker`: the fork server of the decoders, and the decoders.

The operating system limits each decoder: a timer ends it by a signal when its processor time is
used up, and its address space is limited. So a file that keeps a codec busy forever ends one
process.
"""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import signal
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

from vlora import fork_server
from vlora.errors import InvalidArgument
from vlora.vision.pictures import ByteArray, load_rgb, open_pictures, sizes_of
from vlora.vision.video import VideoPlan, plan_video, read_frames

# Messages between the encoder's process and its decoder processes, over stream sockets. For each
# request, the encoder's process sends `BEGIN`, the elements and `END`. To an element that is only
# measured, the decoder replies with `SIZE` for each picture, from the headers. For each picture
# of any other, it sends the pixels as a sealed memory file. To a video file that is measured, it
# replies with `FILE`, and the encoder's process chooses the frames. Before decoding a large
# picture, it sends the picture's size and waits for `PROCEED`. After an element it sends `DONE`,
# or `REFUSED` with a message. A decoder that exceeds a limit ends: by `SIGPROF` for processor
# time, and with exit code `OUT_OF_MEMORY` for memory. Nothing that a decoder sends is trusted,
# because it reads files from strangers.

# Kinds of requests. An element is an `IMAGE`, a `FRAME` or a `VIDEO`, or one of these that is only
# measured.
BEGIN, IMAGE, FRAME, VIDEO, PROCEED, END = b"B", b"I", b"F", b"V", b"G", b"E"
MEASURED = {IMAGE: b"i", FRAME: b"f", VIDEO: b"v"}
SIZE, PIXELS, DONE, REFUSED, FILE = b"S", b"P", b"D", b"X", b"F"  # Kinds of replies.
# Header of a request: kind, number of bytes of the element's name, number of bytes of its data. The
# name and the data follow the header.
REQUEST = struct.Struct("<cHQ")
# Data of `BEGIN`: processor seconds, bytes of memory, of an encoded image, and of a video file.
LIMITS = struct.Struct("<dQQQ")
# Reply: kind and two numbers. For `SIZE` and `PIXELS`, the numbers are width and height. For
# `REFUSED`, they are the number of bytes of the message that follows, and 0. For `FILE`, they are
# width and height of a frame; the number of frames and their frequency follow.
REPLY = struct.Struct("<cII")
CONTENT = struct.Struct("<Qd")
# First data of `VIDEO`: width, height and number of the sampled frames. Their numbers follow, and
# then the file.
PLAN = struct.Struct("<III")
NUMBER = "<u4"
# Maximum number of pixels of a picture that is decoded without waiting for `PROCEED`. Waiting for
# it costs one more wake-up of each process.
SMALL_PIXELS = 4 * 1024**2
MAX_MESSAGE_BYTES = 4096  # Maximum size of a message in a reply.
# Seals of a memory file that keep its size and content from changing.
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
SEAL_TRIES = 20


def main() -> None:
    """Fork decoders until the encoder's process ends."""
    Image.init()
    # Pillow's own limit of pixels is not needed: the encoder's process checks the size of each
    # picture before it is decoded.
    Image.MAX_IMAGE_PIXELS = None
    # Each decoder would otherwise load it, if this package is installed.
    with suppress(ImportError):
        import av  # noqa: F401
    fork_server.serve(_run_decoder)


def _run_decoder(connection: socket.socket) -> None:
    max_image_bytes = max_video_bytes = 0
    try:
        while True:
            header = fork_server.receive(connection, REQUEST.size)
            kind, name_bytes, data_bytes = REQUEST.unpack(header)
            if kind == END:
                signal.setitimer(signal.ITIMER_PROF, 0)
                continue
            name = fork_server.receive(connection, name_bytes).decode()
            data = fork_server.receive(connection, data_bytes)
            if kind == BEGIN:
                seconds, memory, max_image_bytes, max_video_bytes = LIMITS.unpack(data)
                _limit_this_process(seconds, memory)
            elif kind == VIDEO:
                _answer(connection, partial(_decode_video, data, name))
            elif kind == MEASURED[VIDEO]:
                _answer(connection, partial(_measure_video, data, name, max_video_bytes))
            else:
                reply = _measure if kind in MEASURED.values() else _decode
                pictures = open_pictures(data, name, kind.upper() == FRAME, max_image_bytes)
                _answer(connection, partial(reply, pictures, name))
    except (EOFError, ConnectionError):
        os._exit(0)
    except MemoryError:
        os._exit(fork_server.OUT_OF_MEMORY)


def _limit_this_process(seconds: float, memory: int) -> None:
    signal.setitimer(signal.ITIMER_PROF, seconds)
    limit = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + memory
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))


def _answer(connection: socket.socket, reply: Callable[[socket.socket], None]) -> None:
    try:
        reply(connection)
    except InvalidArgument as error:
        message = error.message.encode(errors="replace")[:MAX_MESSAGE_BYTES]
        fork_server.send(connection, REPLY.pack(REFUSED, len(message), 0) + message)
    else:
        fork_server.send(connection, REPLY.pack(DONE, 0, 0))


def _measure(pictures: Iterator[Image.Image], name: str, connection: socket.socket) -> None:
    """Send the sizes of an element's pictures, of which only headers are read."""
    for size in sizes_of(pictures, name):
        fork_server.send(connection, REPLY.pack(SIZE, *size))


def _decode(pictures: Iterator[Image.Image], name: str, connection: socket.socket) -> None:
    """Send the pictures of one element, large ones only after their size was accepted."""
    for image in pictures:
        _announce(connection, *image.size)
        _send_pixels(connection, load_rgb(image, name))


def _announce(connection: socket.socket, width: int, height: int) -> None:
    if width * height > SMALL_PIXELS:
        fork_server.send(connection, REPLY.pack(SIZE, width, height))
        fork_server.receive(connection, len(PROCEED))


def _measure_video(data: bytes, name: str, limit: int, connection: socket.socket) -> None:
    """Send the size, number and frequency of a file's frames."""
    plan = plan_video(data, name, limit)
    reply = REPLY.pack(FILE, plan.width, plan.height) + CONTENT.pack(plan.total, plan.fps)
    fork_server.send(connection, reply)


def _decode_video(data: bytes, name: str, connection: socket.socket) -> None:
    """Send the sampled frames of a file, which were planned before."""
    width, height, count = PLAN.unpack_from(data)
    numbers = np.frombuffer(data, NUMBER, count, PLAN.size)
    plan = VideoPlan(width, height, tuple(numbers.tolist()), (), 1.0, 0, 0.0)
    for rgb in read_frames(data[PLAN.size + numbers.nbytes :], name, plan):
        _announce(connection, width, height)
        _send_pixels(connection, rgb)


def _send_pixels(connection: socket.socket, rgb: ByteArray) -> None:
    """Send uint8 [height, width, 3] as a memory file that cannot be changed any more.

    The file is written instead of mapped, so it does not count toward the limit of address space.
    """
    file = os.memfd_create("vlora-pixels", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        rest = memoryview(rgb.reshape(-1).data)
        while rest:
            rest = rest[os.write(file, rest) :]
        _seal(file)
        height, width, _ = rgb.shape
        socket.send_fds(connection, [REPLY.pack(PIXELS, width, height)], [file])
    finally:
        os.close(file)


def _seal(file: int) -> None:
    """Make a memory file unchangeable. Raises OSError if that is not possible.

    Linux refuses with EBUSY while it moves one of the pages, for example. It waits for 0.15 s
    before, which is too short on a busy machine.
    """
    for _ in range(SEAL_TRIES - 1):
        try:
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, SEALS)
            return
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, SEALS)


if __name__ == "__main__":
    main()
