"""Tests of the fork server: what it does when processes end, stop, or cannot be started."""

from __future__ import annotations

import errno
import itertools
import os
import resource
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.polling import until
from vlora.fork_server import ForkServer
from vlora.launcher.processes import is_alive
from vlora.vision import decode_worker


class Server(ForkServer):
    """A fork server that keeps the connections of its processes open."""

    def __init__(self, module: str) -> None:
        super().__init__(module)
        self._connections: list[socket.socket] = []

    def process(self) -> psutil.Process:
        """Return a new process, which waits for its first request."""
        process, connection = self.fork()
        self._connections.append(connection)
        return psutil.Process(process)

    @property
    def itself(self) -> psutil.Process:
        return psutil.Process(self._process.pid)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        super().close()
        for connection in self._connections:
            connection.close()


@pytest.fixture
def forks() -> Iterator[Server]:
    created = Server(decode_worker.__name__)
    yield created
    created.close()


def test_stopping_a_process_of_an_earlier_fork_server_ends_no_other(forks: Server) -> None:
    old = forks.process()
    forks.kill()
    new = forks.process()
    assert forks.stop(old.pid) == -signal.SIGKILL
    assert is_alive(new)
    assert forks.stop(new.pid) == -signal.SIGKILL
    with subprocess.Popen(["sleep", "60"]) as stranger:
        forks.stop(stranger.pid)
        assert stranger.poll() is None
        stranger.kill()


def test_a_fork_server_that_has_ended_is_replaced_once(
    forks: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two threads find that it has ended. The second one must not replace the new fork server."""
    forks.process()
    forks.kill()
    ask, found = forks._ask, threading.Barrier(2)

    def ask_then_wait(*arguments: Any) -> int:
        try:
            return ask(*arguments)
        except ConnectionError:
            with suppress(threading.BrokenBarrierError):
                found.wait(0.5)
            raise

    monkeypatch.setattr(forks, "_ask", ask_then_wait)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: forks.process(), range(2))
    assert is_alive(first)
    assert is_alive(second)


def test_a_fork_server_that_cannot_be_started_at_first_is_started_later(
    forks: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    forks.kill()
    pair, calls = socket.socketpair, []

    def no_second_pair(*arguments: Any) -> tuple[socket.socket, socket.socket]:
        calls.append(arguments)
        if len(calls) == 2:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return pair(*arguments)

    monkeypatch.setattr(socket, "socketpair", no_second_pair)
    with pytest.raises(ConnectionError, match="Too many open files"):
        forks.fork()
    assert forks.stop(1) is None
    assert is_alive(forks.process())


def test_a_fork_server_without_a_free_file_descriptor_keeps_its_processes(
    forks: Server,
) -> None:
    process = forks.process()
    helper = forks.itself
    before = helper.rlimit(resource.RLIMIT_NOFILE)
    used = {int(file.name) for file in Path(f"/proc/{helper.pid}/fd").iterdir()}
    free = next(number for number in itertools.count() if number not in used)
    helper.rlimit(resource.RLIMIT_NOFILE, (free, before[1]))
    with pytest.raises(ConnectionError, match="cannot start a process"):
        forks.fork()
    assert is_alive(process)
    helper.rlimit(resource.RLIMIT_NOFILE, before)
    assert is_alive(forks.process())


def test_a_fork_that_fails_ends_no_other_process() -> None:
    forks = Server("tests.support.failing_fork")
    try:
        for _ in range(2):
            with pytest.raises(ConnectionError, match="cannot start a process"):
                forks.fork()
        process = forks.process()
        assert is_alive(process)
        assert process.ppid() == forks.itself.pid
    finally:
        forks.close()


def test_a_stopped_fork_server_is_replaced(forks: Server) -> None:
    forks.process()
    stopped = forks.itself
    stopped.suspend()
    forks._control.settimeout(0.2)
    assert is_alive(forks.process())
    assert not is_alive(stopped)


def test_closing_ends_a_command_that_waits_for_its_answer(forks: Server) -> None:
    forks.process()
    forks.itself.suspend()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(forks.fork)
        until(forks._lock.locked)
        forks.close()
        with pytest.raises(ConnectionError):
            waiting.result(30)
