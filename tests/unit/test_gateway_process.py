"""Tests of started processes that cannot be started: nothing waits for them forever."""

from __future__ import annotations

import errno
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any

import pytest

from tests.support.polling import until
from vlora.launcher import gateway_process
from vlora.launcher.gateway_process import GatewayProcess
from vlora.launcher.processes import start_tied


@pytest.mark.parametrize(
    ("program", "environment"), [("nul\0", {}), ("true", {"A": 1}), ("missing", {})]
)
def test_whatever_keeps_a_process_from_starting_is_raised(
    program: str, environment: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    raised: list[BaseException] = []

    def start() -> None:
        try:
            start_tied([program], environment, None)
        except BaseException as error:
            raised.append(error)

    if program == "missing":
        monkeypatch.setattr(sys, "executable", "/missing")
    thread = threading.Thread(target=start, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    assert isinstance(raised[0], OSError | TypeError | ValueError)


def test_a_gateway_that_cannot_be_started_for_the_moment_is_started_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[int] = []
    said: list[str] = []
    started = threading.Event()

    def start(*_: Any) -> subprocess.Popen[bytes]:
        calls.append(len(calls))
        if len(calls) == 2:
            raise BlockingIOError(errno.EAGAIN, "no process is left")
        seconds = 60 if len(calls) == 3 else 0
        process = subprocess.Popen(["sleep", str(seconds)])
        if seconds:
            started.set()
        return process

    monkeypatch.setattr(gateway_process, "start_tied", start)
    monkeypatch.setattr(gateway_process, "FIRST_WAIT_SECONDS", 0.01)
    with GatewayProcess("127.0.0.1", 0, None, said.append) as gateway:
        gateway.start("127.0.0.1:1", "http://127.0.0.1:2")
        assert started.wait(30)
        assert "the gateway cannot be started: no process is left" in said
        until(lambda: gateway._process is not None and gateway._process.poll() is None)
