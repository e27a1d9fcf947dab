"""The encoder's side of a decoder process.

The process itself runs `decode_worker`, and `decode_protocol` describes the messages.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import select
import socket
from collections.abc import Callable

import numpy as np

from vlora import fork_server
from vlora.config import Limits
from vlora.vision import decode_protocol as protocol
from vlora.vision import decode_worker
from vlora.vision.images import Element
from vlora.vision.pictures import ByteArray

SETTINGS = {
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    # With these values, malloc reuses the memory of one image for the next. Otherwise, page faults
    # would take as long as decoding.
    "MALLOC_MMAP_THRESHOLD_": str(32 * 1024**2),
    "MALLOC_TRIM_THRESHOLD_": str(64 * 1024**2),
}
"""Environment variables of the decoder processes."""

Accept = Callable[[str, int, int], None]
"""Function that is called with a picture's name, its width and its height in pixels.

For large pictures, it is called before they are decoded, so that it can refuse them.
"""

HasReply = Callable[[float], bool]
"""Function that waits at most the given number of seconds, and returns whether the decoder has
replied or ended.
"""


TRANSFER_SECONDS = 30.0
"""Maximum time for sending a file to a decoder. A decoder that does not read it was stopped."""


class PictureRefusedError(Exception):
    """Raised if the decoder cannot read a file. The message says why."""


class DecodeProcess:
    """One decoder process, as the encoder's process sees it. Not thread-safe.

    process: process id.
    """

    def __init__(self, process: int, connection: socket.socket) -> None:
        self.process = process
        self._connection = connection
        connection.settimeout(TRANSFER_SECONDS)

    def begin(self, limits: Limits) -> None:
        """Tell the process that a request begins.

        The limits of processor time and memory apply from now on.
        """
        data = protocol.LIMITS.pack(
            limits.max_decode_seconds, limits.max_decode_bytes, limits.max_image_bytes
        )
        self._send(protocol.BEGIN, b"", data)

    def end(self) -> None:
        """Tell the process that the request has no more elements.

        Its processor time is not counted until the next request begins.
        """
        self._send(protocol.END, b"", b"")

    def decode(
        self, element: Element, accept: Accept, wait: Callable[[HasReply], None]
    ) -> list[ByteArray]:
        """Return the pictures of one element, each uint8 [height, width, 3], read-only.

        accept: called for each picture. If it raises an error, the caller must stop the decoder.
        wait: called to wait for a reply of the decoder.

        Raises PictureRefusedError, ConnectionError if the decoder has ended, or TimeoutError if it
        does not take the data.
        """
        kind = protocol.FRAME if element.is_frame else protocol.IMAGE
        self._send(kind, element.name.encode(), element.data)
        pictures: list[ByteArray] = []
        accepted: int | None = None
        """Pixels of the picture that has been accepted and is being decoded."""
        while True:
            wait(self.has_reply)
            reply, width, height, files = self._receive()
            number = f" (its picture {len(pictures)})" if pictures else ""
            if reply == protocol.SIZE:
                accept(element.name + number, width, height)
                accepted = width * height
                fork_server.send(self._connection, protocol.PROCEED)
            elif reply == protocol.PIXELS and files:
                rgb = _map_pixels(files[0], width, height)
                if accepted is None:
                    accept(element.name + number, width, height)
                elif accepted != width * height:
                    raise ConnectionError("a decoder sent a picture of another size")
                accepted = None
                pictures.append(rgb)
            elif reply == protocol.DONE:
                return pictures
            elif reply == protocol.REFUSED and width <= protocol.MAX_MESSAGE_BYTES:
                message = fork_server.receive(self._connection, width)
                raise PictureRefusedError(message.decode(errors="replace"))
            else:
                raise ConnectionError("a decoder sent an unknown reply")

    def has_reply(self, seconds: float = 0.0) -> bool:
        """Wait at most `seconds`. Return whether there is a reply, or the process has ended."""
        return bool(select.select([self._connection], [], [], seconds)[0])

    def close(self) -> None:
        self._connection.close()

    def _send(self, kind: bytes, name: bytes, data: bytes) -> None:
        fork_server.send(self._connection, protocol.REQUEST.pack(kind, len(name), len(data)) + name)
        fork_server.send(self._connection, data)

    def _receive(self) -> tuple[bytes, int, int, list[int]]:
        try:
            reply, files = fork_server.receive_with_file(self._connection, protocol.REPLY.size)
        except EOFError:
            raise ConnectionError("a decoder closed its connection") from None
        return *protocol.REPLY.unpack(reply), files


def _map_pixels(file: int, width: int, height: int) -> ByteArray:
    """Return the pixels in a memory file, and close the file.

    The memory is unmapped when no view of the array is left.
    """
    try:
        sealed = fcntl.fcntl(file, fcntl.F_GET_SEALS) == decode_worker.SEALS
        if not sealed or os.fstat(file).st_size != 3 * width * height:
            raise ConnectionError("a decoder sent pixels of a wrong size")
        # Before Linux 6.7, mmap refuses a shared mapping of a file that is sealed against writing.
        flags = mmap.MAP_PRIVATE | mmap.MAP_POPULATE
        pixels = mmap.mmap(file, 3 * width * height, flags=flags, prot=mmap.PROT_READ)
    finally:
        os.close(file)
    return np.frombuffer(pixels, np.uint8).reshape(height, width, 3)
