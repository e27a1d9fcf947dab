"""A running `vlora serve --replicas`, with what it prints."""

from __future__ import annotations

import re
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.support.polling import until
from vlora.interpreters import python_command
from vlora.launcher.processes import children

START_SECONDS = 300.0


class Serving:
    """A running `vlora serve --replicas 2`, with what it has printed."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as output:
            for line in output:
                self.lines.append(line.rstrip())

    def wait_for(self, words: str, count: int = 1) -> None:
        def found() -> bool:
            assert self.process.poll() is None, "the launcher has ended"
            return sum(words in line for line in self.lines) >= count

        try:
            until(found, START_SECONDS, pause=0.1)
        except AssertionError as error:
            raise AssertionError("\n".join([f"{words}: {error}", *self.lines])) from None

    def address(self, name: str) -> str:
        (found,) = (one[1] for line in self.lines if (one := re.match(rf"{name} +(\S+)", line)))
        return found

    def servers(self) -> list[psutil.Process]:
        return [one for one in children(self.process.pid) if "tritonserver" in one.name()]


@contextmanager
def two_replicas(
    folder: Path, options: Sequence[str], before: Sequence[str] = ()
) -> Iterator[Serving]:
    """Serve with two replicas at free ports; at the end, stop them and check that they do.

    folder: working folder. before: words of the command line before the program's.
    """
    command = [*before, *python_command("vlora.cli", "serve", "--replicas", "2", "--grace", "60")]
    command += [*options, "--log", str(folder / "log")]
    for name in ("http", "grpc", "metrics"):
        command += [f"--{name}-port", "0"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        start_new_session=True,  # So that Ctrl-C in the terminal does not end it.
    )
    started = Serving(process)
    try:
        started.wait_for("Press Ctrl-C")
        yield started
    finally:
        process.terminate()
        try:
            status = process.wait(120)
        finally:
            process.kill()
            process.wait()
    assert status == 0
