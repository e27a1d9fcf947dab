"""`python -m vlora.vision.decode_worker FD`: the fork server of the decoders, and the decoders.

The fork server imports Pillow once and forks a decoder for each command on the socket FD. A decoder
limits itself with the kernel's help: a timer of its processor time, which ends it by a signal, and
a limit of its address space. So a file that keeps a codec busy for ever costs a process that is
replaced.

**Invariant:** the fork server ends when the process that started it has ended, and the decoders end
with the fork server, whatever they are doing. Ctrl-C at a terminal ends none of them.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import os
import resource
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path

from PIL import Image

from vlora.errors import InvalidArgument
from vlora.vision import decode_protocol as protocol
from vlora.vision.pictures import ByteArray, load_rgb, open_pictures

PR_SET_PDEATHSIG = 1
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
"""Seals under which the reader of a memory file can rely on its size and content."""


def main() -> None:
    """Fork a decoder for each command, until the other side closes the socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(OSError):
        # If memory runs out, the kernel should end a decoder and not the engine.
        Path("/proc/self/oom_score_adj").write_text("1000")
    control = socket.socket(fileno=int(sys.argv[1]))
    kernel = ctypes.CDLL(None)
    server = os.getpid()
    Image.init()
    # The encoder's process checks the size of each picture before it is decoded.
    Image.MAX_IMAGE_PIXELS = None
    # Decoders share the memory of what exists now.
    gc.freeze()
    with suppress(EOFError, ConnectionError):
        while True:
            command, files = protocol.receive_with_file(control, protocol.COMMAND.size)
            kind, pid = protocol.COMMAND.unpack(command)
            if kind == protocol.STOP:
                os.kill(pid, signal.SIGKILL)
                _, status = os.waitpid(pid, 0)
                answer = os.waitstatus_to_exitcode(status)
            else:
                answer = os.fork()
                if not answer:
                    kernel.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
                    if os.getppid() == server:
                        control.close()
                        _run_decoder(socket.socket(fileno=files[0]))
                    os._exit(0)
                os.close(files[0])
            protocol.send(control, protocol.ANSWER.pack(answer))


def _run_decoder(connection: socket.socket) -> None:
    """Decode elements until the other side closes the connection."""
    max_image_bytes = 0
    try:
        while True:
            header = protocol.receive(connection, protocol.REQUEST.size)
            kind, name_bytes, data_bytes = protocol.REQUEST.unpack(header)
            if kind == protocol.END:
                signal.setitimer(signal.ITIMER_PROF, 0)
                continue
            name = protocol.receive(connection, name_bytes).decode()
            data = protocol.receive(connection, data_bytes)
            if kind == protocol.BEGIN:
                seconds, memory, max_image_bytes = protocol.LIMITS.unpack(data)
                _limit_this_process(seconds, memory)
            else:
                _decode(connection, data, name, kind == protocol.FRAME, max_image_bytes)
    except (EOFError, ConnectionError):
        os._exit(0)
    except MemoryError:
        os._exit(protocol.OUT_OF_MEMORY)


def _limit_this_process(seconds: float, memory: int) -> None:
    """Let this process use `seconds` of processor time and `memory` bytes more than it has now."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + memory
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))


def _decode(
    connection: socket.socket, data: bytes, name: str, as_frames: bool, max_image_bytes: int
) -> None:
    """Send the pictures of one element, large ones after their size was accepted."""
    try:
        for image in open_pictures(data, name, as_frames, max_image_bytes):
            if image.width * image.height > protocol.SMALL_PIXELS:
                protocol.send(connection, protocol.REPLY.pack(protocol.SIZE, *image.size))
                protocol.receive(connection, len(protocol.PROCEED))
            _send_pixels(connection, load_rgb(image, name))
    except InvalidArgument as error:
        message = error.message.encode(errors="replace")[: protocol.MAX_MESSAGE_BYTES]
        reply = protocol.REPLY.pack(protocol.REFUSED, len(message), 0)
        protocol.send(connection, reply + message)
    else:
        protocol.send(connection, protocol.REPLY.pack(protocol.DONE, 0, 0))


def _send_pixels(connection: socket.socket, rgb: ByteArray) -> None:
    """Send uint8 [height, width, 3] as a memory file that cannot be changed any more.

    The file is written and not mapped, so it does not count towards this process's address space.
    """
    file = os.memfd_create("vlora-pixels", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        rest = memoryview(rgb.reshape(-1).data)
        while rest:
            rest = rest[os.write(file, rest) :]
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, SEALS)
        height, width, _ = rgb.shape
        reply = protocol.REPLY.pack(protocol.PIXELS, width, height)
        socket.send_fds(connection, [reply], [file])
    finally:
        os.close(file)


if __name__ == "__main__":
    main()
