"""The encoder's end of the decoder processes: starting them, and decoding one element.

See `decode_worker` for the processes and `decode_protocol` for the messages.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

import numpy as np

from vlora.config import Limits
from vlora.vision import decode_protocol as protocol
from vlora.vision import decode_worker
from vlora.vision.images import Element
from vlora.vision.pictures import ByteArray

SETTINGS = {
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    # Memory of an image is used again for the next one; fresh pages took as long as decoding.
    "MALLOC_MMAP_THRESHOLD_": str(32 * 1024**2),
    "MALLOC_TRIM_THRESHOLD_": str(64 * 1024**2),
}
"""Environment variables of the decoders."""

Accept = Callable[[str, int, int], None]
"""Called with a picture's name, width and height, for large ones before they are decoded."""

HasReply = Callable[[float], bool]
"""Waits for a number of seconds, and returns whether the decoder has replied."""


class PictureRefusedError(Exception):
    """The decoder could not read a file; the message says why."""


class Decoder:
    """One decoder process. Not thread-safe.

    process: its process id.
    """

    def __init__(self, process: int, connection: socket.socket) -> None:
        self.process = process
        self._connection = connection

    def begin(self, limits: Limits) -> None:
        """Begin a request: from now on the limits of its time and memory count."""
        data = protocol.LIMITS.pack(
            limits.max_decode_seconds, limits.max_decode_bytes, limits.max_image_bytes
        )
        self._send(protocol.BEGIN, b"", data)

    def end(self) -> None:
        """End a request: its processor time does not count any more."""
        self._send(protocol.END, b"", b"")

    def decode(
        self, element: Element, accept: Accept, wait: Callable[[HasReply], None]
    ) -> list[ByteArray]:
        """Return the pictures of one element, each uint8 [height, width, 3], not writable.

        accept: called for each picture; if it raises an error, the decoder has to be stopped.
        wait: called to wait for a reply of the decoder.

        Raises PictureRefusedError, or ConnectionError if the decoder has ended.
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
                protocol.send(self._connection, protocol.PROCEED)
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
                message = protocol.receive(self._connection, width)
                raise PictureRefusedError(message.decode(errors="replace"))
            else:
                raise ConnectionError("a decoder sent an unknown reply")

    def has_reply(self, seconds: float = 0.0) -> bool:
        """Wait for a reply, and return whether there is one, or the process has ended."""
        return bool(select.select([self._connection], [], [], seconds)[0])

    def close(self) -> None:
        """Close the connection to the process."""
        self._connection.close()

    def _send(self, kind: bytes, name: bytes, data: bytes) -> None:
        protocol.send(self._connection, protocol.REQUEST.pack(kind, len(name), len(data)) + name)
        protocol.send(self._connection, data)

    def _receive(self) -> tuple[bytes, int, int, list[int]]:
        try:
            reply, files = protocol.receive_with_file(self._connection, protocol.REPLY.size)
        except EOFError:
            raise ConnectionError("a decoder closed its connection") from None
        return *protocol.REPLY.unpack(reply), files


def _map_pixels(file: int, width: int, height: int) -> ByteArray:
    """Return the pixels in a memory file, which this function closes.

    The mapping ends with the last view of the array.
    """
    try:
        sealed = fcntl.fcntl(file, fcntl.F_GET_SEALS) == decode_worker.SEALS
        if not sealed or os.fstat(file).st_size != 3 * width * height:
            raise ConnectionError("a decoder sent pixels of a wrong size")
        # A shared mapping of a file that is sealed against writing is refused before Linux 6.7.
        flags = mmap.MAP_PRIVATE | mmap.MAP_POPULATE
        pixels = mmap.mmap(file, 3 * width * height, flags=flags, prot=mmap.PROT_READ)
    finally:
        os.close(file)
    return np.frombuffer(pixels, np.uint8).reshape(height, width, 3)


class ForkServer:
    """The process that forks decoders. It is started again if it has ended. Thread-safe."""

    def __init__(self) -> None:
        """Start the process, without waiting until it is ready."""
        self._lock = threading.Lock()
        self._closed = False
        self._start()

    def fork(self) -> Decoder:
        """Return a new decoder. Raises ConnectionError if this object is closed."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = self._ask(protocol.FORK, 0, [theirs.fileno()])
            except ConnectionError:
                with self._lock:
                    if self._closed:
                        ours.close()
                        raise
                    self._stop()
                    self._start()
                process = self._ask(protocol.FORK, 0, [theirs.fileno()])
        return Decoder(process, ours)

    def stop(self, decoder: Decoder) -> int | None:
        """End a decoder, and return how it ended: its exit code as `subprocess` has it.

        The code of a decoder that had ended already is its own; None if it is unknown.
        """
        decoder.close()
        try:
            return self._ask(protocol.STOP, decoder.process, [])
        except ConnectionError:
            return None

    def close(self) -> None:
        """End the process and all decoders."""
        with self._lock:
            self._closed = True
            self._stop()

    def _ask(self, kind: bytes, process: int, files: list[int]) -> int:
        with self._lock:
            if self._closed:
                raise ConnectionError("the fork server is closed")
            command = protocol.COMMAND.pack(kind, process)
            socket.send_fds(self._control, [command], files, socket.MSG_NOSIGNAL)
            try:
                answer = protocol.receive(self._control, protocol.ANSWER.size)
            except EOFError:
                raise ConnectionError("the fork server has ended") from None
        return int(protocol.ANSWER.unpack(answer)[0])

    def _start(self) -> None:
        self._control, theirs = socket.socketpair()
        with theirs:
            number = theirs.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-W", "ignore", "-m", decode_worker.__name__, str(number)],
                pass_fds=[number],
                stdin=subprocess.DEVNULL,
                # The decoders are to find the same packages as this process, however it was set up.
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                    **SETTINGS,
                },
            )

    def _stop(self) -> None:
        self._control.close()
        self._process.kill()
        with suppress(ChildProcessError):
            self._process.wait()
