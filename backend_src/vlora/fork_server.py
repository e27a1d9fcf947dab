"""A fork server: a process that has done the slow imports and forks others within milliseconds.

**Invariant:** the fork server ends when the process that started it has ended, and the forked
processes end with the fork server, whatever they are doing. Ctrl-C in a terminal ends none of them.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from vlora.interpreters import python_command, python_environment

PR_SET_PDEATHSIG = 1
FORK, STOP = b"F", b"K"
# Command to the fork server: kind (FORK or STOP), and id of the process to stop. The socket of the
# new process is sent along with FORK.
COMMAND = struct.Struct("<ci")
# Answer of the fork server: an exit code as in `subprocess`, or the id of the new process, or
# NO_PROCESS if the system refuses to fork.
ANSWER = struct.Struct("<i")
NO_PROCESS = 0
# Maximum time of an answer, including the start of the fork server. Ordinary answers take
# milliseconds, and a start takes a second.
ANSWER_SECONDS = 60.0
OUT_OF_MEMORY = 3  # Exit code of a forked process that exceeds its limit of memory.
# Exit code of a forked process that exceeds its limit of processor time.
OUT_OF_TIME = -signal.SIGPROF


class ForkServer:
    """Starts a fork server, and starts it again if it has ended. Thread-safe."""

    def __init__(
        self,
        module: str,
        settings: Mapping[str, str] | None = None,
        data: bytes = b"",
        kind: int = socket.SOCK_STREAM,
    ) -> None:
        """Start the fork server, without waiting until it is ready.

        module: module that the fork server runs; it must call `serve`.
        settings: additional environment variables.
        data: bytes that `given_data` returns in the fork server.
        """
        self._module = module
        self._settings = dict(settings or {})
        self._kind = kind
        self._lock = threading.Lock()
        self._closed = False
        self._data: int | None = os.memfd_create("vlora-data")
        with os.fdopen(os.dup(self._data), "wb") as file:
            file.write(data)
        self._start()

    def fork(self) -> tuple[int, socket.socket]:
        """Return the id of a forked process, and the caller's end of its socket.

        Raises ConnectionError if this object is closed, or no process can be started at present.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, self._kind)
        try:
            with theirs, self._lock:
                return self._fork(theirs), ours
        except BaseException:
            ours.close()
            raise

    def stop(self, process: int) -> int | None:
        """End a process. Return the exit code with which it ended, if known, as in `subprocess`."""
        try:
            with self._lock:
                return self._ask(STOP, process, [])
        except ConnectionError:
            return None

    def close(self) -> None:
        self._closed = True
        # If another thread waits for an answer, this ends its wait.
        self._process.kill()
        with self._lock:
            if self._data is not None:
                os.close(self._data)
                self._data = None
                self._end()

    def _fork(self, theirs: socket.socket) -> int:
        """Fork a process, by a new fork server if this one has ended. The caller holds the lock."""
        files = [theirs.fileno()]
        try:
            process = self._ask(FORK, 0, files)
        except ConnectionError:
            if self._closed:
                raise
            try:
                self._start()
            except OSError as error:
                raise ConnectionError(f"the fork server cannot be started: {error}") from None
            process = self._ask(FORK, 0, files)
        if process == NO_PROCESS:
            raise ConnectionError("the fork server cannot start a process")
        return process

    def _ask(self, kind: bytes, process: int, files: list[int]) -> int:
        """Return the answer to a command, or end the fork server and raise ConnectionError."""
        if self._closed:
            raise ConnectionError("the fork server is closed")
        command = COMMAND.pack(kind, process)
        try:
            socket.send_fds(self._control, [command], files, socket.MSG_NOSIGNAL)
            answer = receive(self._control, ANSWER.size)
        except (EOFError, OSError) as error:
            # An answer that arrives late would be taken for that to the next command.
            self._end()
            raise ConnectionError(f"the fork server has ended: {error}") from None
        return int(ANSWER.unpack(answer)[0])

    def _start(self) -> None:
        self._control, theirs = socket.socketpair()
        self._control.settimeout(ANSWER_SECONDS)
        assert self._data is not None
        with theirs:
            files = (theirs.fileno(), self._data)
            self._process = subprocess.Popen(
                python_command(self._module, *map(str, files)),
                pass_fds=files,
                stdin=subprocess.DEVNULL,
                # The fork server must find the same packages as this process.
                env={
                    **python_environment(sys.path),
                    "PYTHONWARNINGS": "ignore",
                    **self._settings,
                },
            )

    def _end(self) -> None:
        self._control.close()
        self._process.kill()
        with suppress(ChildProcessError):
            self._process.wait()


def given_data() -> bytes:
    """Return the argument `data` of `ForkServer`. Only the fork server's process may call this."""
    file = int(sys.argv[2])
    # All fork servers share the file's offset, so read from an explicit offset.
    return os.pread(file, os.fstat(file).st_size, 0)


def serve(run: Callable[[socket.socket], object]) -> None:
    """Fork or stop a process for each command, until the other side closes the socket.

    run: called in each forked process with its socket.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(OSError):
        # If memory runs out, the kernel should end a forked process and not the engine.
        Path("/proc/self/oom_score_adj").write_text("1000")
    control = socket.socket(fileno=int(sys.argv[1]))
    kernel = ctypes.CDLL(None)
    server = os.getpid()
    children: set[int] = set()
    # Freezing keeps garbage collection from writing to memory that forked processes share.
    gc.freeze()
    with suppress(EOFError, ConnectionError):
        while True:
            command, files = receive_with_file(control, COMMAND.size)
            kind, pid = COMMAND.unpack(command)
            if kind == STOP:
                answer = _stop(pid, children)
            elif not files:  # This process had no free file descriptor for the socket.
                answer = NO_PROCESS
            else:
                try:
                    answer = os.fork()
                except OSError:
                    answer = NO_PROCESS
                else:
                    if not answer:
                        kernel.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
                        if os.getppid() == server:
                            control.close()
                            run(socket.socket(fileno=files[0]))
                        os._exit(0)
                    children.add(answer)
                os.close(files[0])
            send(control, ANSWER.pack(answer))


def _stop(process: int, children: set[int]) -> int:
    """End a child process, and return its exit code; any other id may be a stranger's now."""
    if process not in children:
        return -signal.SIGKILL
    children.remove(process)
    os.kill(process, signal.SIGKILL)
    _, status = os.waitpid(process, 0)
    return os.waitstatus_to_exitcode(status)


def processor_seconds(process: int) -> float:
    # This is the clock id of another process, as `clock_getcpuclockid` computes it.
    with suppress(OSError):
        return time.clock_gettime((~process << 3) | 2)
    return 0.0


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
    """Return `count` bytes and at most one file descriptor. Raises EOFError at the end."""
    data, files, _, _ = socket.recv_fds(connection, count, 1)
    if not data:
        raise EOFError
    return data + receive(connection, count - len(data)), files
