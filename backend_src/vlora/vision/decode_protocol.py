"""Messages between the encoder's process and its decoders, over stream sockets.

The encoder's process sends a begin, elements and an end. For each picture of an element the decoder
sends its pixels: a sealed memory file. Before it decodes a large picture, it sends the size and
waits for a permission. An element ends with `DONE`, or with `REFUSED` and a message. A decoder that
exceeds a limit ends: by `SIGPROF` for its processor time, with `OUT_OF_MEMORY` for its memory.

Nothing that a decoder sends is trusted: it reads files from strangers.
"""

from __future__ import annotations

import signal
import socket
import struct

BEGIN, IMAGE, FRAME, PROCEED, END = b"B", b"I", b"F", b"G", b"E"
"""Kinds of requests. An element is an `IMAGE` or a `FRAME`."""

SIZE, PIXELS, DONE, REFUSED = b"S", b"P", b"D", b"X"
"""Kinds of replies."""

REQUEST = struct.Struct("<cHQ")
"""Kind, bytes of the element's name and bytes of its data, which follow."""

LIMITS = struct.Struct("<dQQ")
"""Data of a begin: processor seconds, bytes of memory, bytes of an encoded file."""

REPLY = struct.Struct("<cII")
"""Kind, and two numbers: width and height, or the bytes of the message that follows and 0."""

FORK, STOP = b"F", b"K"
COMMAND = struct.Struct("<ci")
"""Kind and process id, from the encoder's process to the fork server; FORK carries a socket."""

ANSWER = struct.Struct("<i")
"""The fork server's answer: the new process's id, or an exit code as `subprocess` has them."""

OUT_OF_MEMORY = 3
"""Exit code of a decoder that needs more memory than its limit."""

OUT_OF_TIME = -signal.SIGPROF
"""Exit code of a decoder that needs more processor time than its limit."""

SMALL_PIXELS = 4 * 1024**2
"""Size up to which a picture is decoded without a permission: each question costs two wake-ups."""

MAX_MESSAGE_BYTES = 4096
"""Maximum size of a message in a reply."""


def receive(connection: socket.socket, count: int) -> bytes:
    """Return the next `count` bytes. Raises EOFError if the other side has closed."""
    data = connection.recv(count, socket.MSG_WAITALL) if count else b""
    # A signal may end a call early.
    while len(data) < count:
        more = connection.recv(count - len(data), socket.MSG_WAITALL)
        if not more:
            raise EOFError
        data += more
    return data


def send(connection: socket.socket, data: bytes) -> None:
    """Send all of `data`. Raises ConnectionError if the other side has closed."""
    connection.sendall(data, socket.MSG_NOSIGNAL)


def receive_with_file(connection: socket.socket, count: int) -> tuple[bytes, list[int]]:
    """Return the next `count` bytes and the file descriptors sent with them, at most one."""
    data, files, _, _ = socket.recv_fds(connection, count, 1)
    if not data:
        raise EOFError
    return data + receive(connection, count - len(data)), files
