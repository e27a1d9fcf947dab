"""Tests of the messages of the first `make`, and of its errors."""

from __future__ import annotations

import io
import re
import sys
import threading
from pathlib import Path

import pytest

from tests.support.polling import until
from tools import set_up

OUTPUT = """\
  Collecting setuptools==84.2.1
  Downloading setuptools-84.2.1-py3-none-any.whl (1.1 MB)
  Installing collected packages: setuptools, pybind11
Collecting torch (from vlora==0.2.0)
  Downloading https://host/torch-2.13.0%2Bcpu-cp311-manylinux_2_28_x86_64.whl (190.1 MB)
  Downloading nvidia_cublas-13.0-manylinux.whl (1.2 GB)
  Running command Building editable for vlora (pyproject.toml)
  compiling 1 of 74: runtime_dispatch
  g++ -O3 -c runtime/dispatch.cpp
  compiling 2 of 74: runtime_machine
Installing collected packages: torch, numpy, vlora
"""


@pytest.fixture(autouse=True)
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    log = tmp_path / "build" / "set-up.log"
    monkeypatch.setattr(set_up, "LOG", log)
    return log


def test_the_output_of_pip_becomes_a_message_for_each_part_of_the_work() -> None:
    assert list(set_up.progress(OUTPUT.splitlines(keepends=True))) == [
        "  downloading torch-2.13.0%2Bcpu-cp311-manylinux_2_28_x86_64.whl (190.1 MB)",
        "  downloading nvidia_cublas-13.0-manylinux.whl (1.2 GB)",
        "compiling the kernels",
        "  compiling 1 of 74: runtime_dispatch",
        "  compiling 2 of 74: runtime_machine",
        "installing 3 packages",
    ]


def test_an_unreachable_index_is_reported_once() -> None:
    why = "after connection broken by 'NewConnectionError(\"host='index'\")'"
    lines = [
        f"WARNING: Retrying (Retry(total={left})) {why}: /whl/{package}/"
        for package in ("numpy", "torch")
        for left in (1, 0)
    ]
    messages = list(set_up.progress(lines))
    assert messages[0] == (
        "  warning: no connection to a package index for /whl/numpy/; pip tries again"
    )
    assert len(messages) == 2


def test_a_command_is_logged_while_it_runs(log: Path) -> None:
    log.parent.mkdir()
    assert list(set_up.run([sys.executable, "-c", "print('one\\ntwo')"])) == ["one\n", "two\n"]
    assert log.read_text() == "one\ntwo\n"


def test_an_error_shows_the_end_of_the_log_and_its_place(
    log: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        code = "print(*range(100), sep='\\n'); raise SystemExit(3)"
        list(set_up.run([sys.executable, "-c", code]))

    monkeypatch.setattr(set_up, "set_up", fail)
    monkeypatch.setattr(sys, "argv", ["set_up.py", ".venv"])
    assert set_up.main() == 1
    said = capsys.readouterr().err.splitlines()
    assert said[0] == str(100 - set_up.LAST_LINES)
    assert "error: exit status 3: " in said[-2]
    assert said[-1] == f"  the complete output is in {log}"


def test_an_interruption_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(set_up, "set_up", interrupt)
    monkeypatch.setattr(sys, "argv", ["set_up.py", ".venv"])
    assert set_up.main() == 130
    assert "the next make continues" in capsys.readouterr().err


def test_silent_work_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(set_up, "SILENT_SECONDS", 0.02)
    stream = io.StringIO()
    with set_up.reporter(stream) as say:
        say("installing 9 packages")
        until(lambda: "s\n" in stream.getvalue())
    first, *times = stream.getvalue().splitlines()
    assert first == "installing 9 packages"
    assert all(re.fullmatch(r"  \d+ s", line) for line in times)


def test_work_that_prints_often_is_not_reported_besides() -> None:
    stream = io.StringIO()
    with set_up.reporter(stream) as say:
        say("downloading the packages")
        say("installing 9 packages")
    assert stream.getvalue() == "downloading the packages\ninstalling 9 packages\n"


def test_an_interruption_ends_the_reports() -> None:
    before = set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt), set_up.reporter(io.StringIO()):
        raise KeyboardInterrupt
    assert set(threading.enumerate()) <= before
