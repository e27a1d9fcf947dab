"""Tests of the thread that watches the server: it must survive whatever fails."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.polling import until
from vlora import draining
from vlora.launcher.processes import is_alive
from vlora.server_run import RUN_VARIABLE
from vlora.serving.model_process import Lifeline


@pytest.fixture
def lifeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lifeline]:
    monkeypatch.setenv(RUN_VARIABLE, str(tmp_path))
    created = Lifeline("lmm")
    yield created
    created.close()


def _once(error: Exception, function: Any) -> tuple[Any, threading.Event]:
    """Return a function that raises an error at its first call, and an event that is set then."""
    failed = threading.Event()

    def call(*arguments: Any, **options: Any) -> Any:
        if not failed.is_set():
            failed.set()
            raise error
        return function(*arguments, **options)

    return call, failed


def test_a_look_that_fails_is_repeated(
    lifeline: Lifeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drained: list[float] = []
    lifeline.on_drain(drained.append)
    look, failed = _once(OSError(errno.EMFILE, "no file is left"), draining.seconds_left)
    monkeypatch.setattr(draining, "seconds_left", look)
    assert failed.wait(30)
    draining.begin(tmp_path, seconds=50)
    until(lambda: draining.unfinished(tmp_path) == [])
    assert len(drained) == 1


def test_a_drain_whose_thread_cannot_be_started_is_repeated(
    lifeline: Lifeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drained: list[float] = []
    lifeline.on_drain(drained.append)
    start, failed = _once(RuntimeError("can't start new thread"), threading.Thread)
    monkeypatch.setattr(threading, "Thread", start)
    draining.begin(tmp_path, seconds=50)
    assert failed.wait(30)
    until(lambda: draining.unfinished(tmp_path) == [])
    assert len(drained) == 1


def test_a_model_that_is_loaded_while_the_server_stops_drains_as_well(
    lifeline: Lifeline, tmp_path: Path
) -> None:
    draining.begin(tmp_path, seconds=50)
    until(lambda: lifeline.draining)
    drained: list[float] = []
    lifeline.on_drain(drained.append)
    until(lambda: draining.unfinished(tmp_path) == [])
    assert len(drained) == 1


SERVER = """
import subprocess, sys
model = subprocess.Popen([sys.executable, "-c", sys.argv[1]])
print(model.pid, flush=True)
model.wait()
"""
MODEL = """
import time
from vlora.serving import model_process
def fail(folder):
    raise PermissionError("the memory belongs to another user")
model_process.release_shared_memory = fail
model_process.Lifeline("lmm")
print("watching", flush=True)
time.sleep(60)
"""


def test_a_model_ends_with_its_server_even_if_the_shared_memory_cannot_be_released(
    tmp_path: Path,
) -> None:
    environment = {**os.environ, RUN_VARIABLE: str(tmp_path)}
    command = [sys.executable, "-c", SERVER, MODEL]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        model = psutil.Process(int(server.stdout.readline()))
        assert server.stdout.readline() == b"watching\n"
        server.kill()
        until(lambda: not is_alive(model), 30)
