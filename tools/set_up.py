"""Set up the virtual environment of the Makefile, and print a line for each part of the work.

While a part prints nothing, the script prints the time that has passed. The script runs on a bare
Python 3, so it uses the standard library only. Everything that pip and the compiler print goes into
build/set-up.log. If the script is interrupted, it continues with the packages that pip has in its
cache and with the objects that are compiled.

usage: python3 tools/set_up.py .venv
"""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).resolve().parents[1]
LOG = ROOT / "build" / "set-up.log"
EXTRAS = "server,gateway,structured,train,video,dev"
LARGE_MB = 10.0
"""Minimum size of a file whose download is announced."""
PACKAGES_PER_MESSAGE = 20
LAST_LINES = 30
"""Number of lines of the log that are printed after an error."""
TERMINAL_SECONDS = 1.0
PIPE_SECONDS = 15.0
"""Seconds between two lines about work that prints nothing, on a terminal and elsewhere. A terminal
shows them on one line, each in the place of the former."""
CLEAR_LINE = "\r\x1b[K"


class SetUpError(Exception):
    """A command that failed."""


class Reporter:
    """Prints messages, and while there is none, how long the current work has taken.

    detail: function that returns what is known of the current work, such as "5 packages installed".
    """

    def __init__(self, detail: Callable[[], str] = str, stream: TextIO | None = None) -> None:
        self._detail = detail
        self._stream = sys.stdout if stream is None else stream
        self._terminal = self._stream.isatty()
        self._seconds = TERMINAL_SECONDS if self._terminal else PIPE_SECONDS
        self._started = time.monotonic()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._report, daemon=True)

    def __enter__(self) -> Reporter:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        if self._terminal:
            self._write(CLEAR_LINE)

    def say(self, message: str) -> None:
        with self._lock:
            self._started = time.monotonic()
            self._write(f"{CLEAR_LINE if self._terminal else ''}{message}\n")

    def _report(self) -> None:
        while not self._ended.wait(self._seconds):
            with self._lock:
                passed = time.monotonic() - self._started
                if passed < self._seconds:
                    continue
                line = f"  {', '.join(filter(None, [self._detail(), f'{passed:.0f} s']))}"
                self._write(f"{CLEAR_LINE}{line}" if self._terminal else f"{line}\n")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def installed(venv: Path, since: float) -> str:
    """Return how many packages pip, which prints nothing meanwhile, has installed since a time."""
    count = 0
    for folder in venv.glob("lib/python*/site-packages/*.dist-info"):
        with suppress(OSError):  # pip removes the folders of old versions.
            count += folder.stat().st_mtime >= since
    return f"{count} package{'s' * (count > 1)} installed" if count else ""


def progress(lines: Iterable[str]) -> Iterator[str]:
    """Yield a message for each line of pip's output that says how far the installation is."""
    found = 0
    unreachable = False
    for line in map(str.strip, lines):
        if line.startswith("Collecting "):
            found += 1
            if found % PACKAGES_PER_MESSAGE == 0:
                yield f"  {found} packages found"
        elif match := re.match(r"Downloading (\S+) \(([\d.]+) (MB|GB)\)", line):
            name, size, unit = match.groups()
            if unit == "GB" or float(size) >= LARGE_MB:
                yield f"  downloading {name.rpartition('/')[2]} ({size} {unit})"
        elif re.match(r"compiling \d+ of \d+: ", line):
            yield f"  {line}"
        elif line.startswith("Running command Building editable"):
            yield "compiling the kernels"
        elif line.startswith("WARNING: Retrying ") and not unreachable:
            unreachable = True
            page = line.rpartition(": ")[2]
            yield f"  warning: no connection to a package index for {page}; pip tries again"
            yield "    (about 10 s for each package; build/set-up.log has the reason)"
        elif line.startswith("Installing collected packages:") and "vlora" in line:
            yield f"installing {line.count(',') + 1} packages"


def run(command: list[str]) -> Iterator[str]:
    """Run a command, append its output to the log, and yield its lines. Raise SetUpError."""
    text: dict[str, Any] = {"text": True, "errors": "replace", "stderr": subprocess.STDOUT}
    with (
        LOG.open("a", encoding="utf-8") as log,
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, **text) as process,
    ):
        for line in process.stdout or ():
            log.write(line)
            log.flush()
            yield line
    if process.returncode:
        raise SetUpError(f"exit status {process.returncode}: {' '.join(command)}")


def set_up(venv: Path) -> None:
    python = venv / "bin" / "python"
    if not python.exists():
        with Reporter() as reporter:
            reporter.say(f"creating {venv}")
            list(run([sys.executable, "-m", "venv", str(venv)]))
    install = [str(python), "-m", "pip", "install", "--verbose", "--progress-bar", "off"]
    install += ["--constraint", "constraints.txt", "--editable", f".[{EXTRAS}]"]
    with Reporter(partial(installed, venv, time.time())) as reporter:
        reporter.say("downloading the packages")
        for message in progress(run(install)):
            reporter.say(message)
    try:
        with Reporter() as reporter:
            reporter.say("downloading perf_analyzer")
            list(run([str(python), "-m", "benchmarks.perf_analyzer.fetch"]))
    except SetUpError:
        print("warning: no perf_analyzer; its tests will be skipped", file=sys.stderr)


def main() -> int:
    LOG.parent.mkdir(exist_ok=True)
    LOG.unlink(missing_ok=True)
    try:
        set_up(Path(sys.argv[1]))
    except SetUpError as error:
        lines = LOG.read_text(encoding="utf-8").splitlines()
        print("\n".join(lines[-LAST_LINES:]), file=sys.stderr)
        print(f"error: {error}\n  the complete output is in {LOG}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the next make continues the set-up", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
