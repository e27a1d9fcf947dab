"""Set up the virtual environment of the Makefile, and print a line for each part of the work.

While a part prints nothing, the script prints the time that has passed. It runs on a bare
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
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).resolve().parents[1]
LOG = ROOT / "build" / "set-up.log"
EXTRAS = "server,gateway,scale,structured,train,video,watch,dev"
LARGE_MB = 10.0
"""Minimum size of a file whose download is announced."""
LAST_LINES = 30
"""Number of lines of the log that are printed after an error."""
SILENT_SECONDS = 15.0
"""Seconds between two lines about work that prints nothing."""


class SetUpError(Exception):
    """A command that failed."""


@contextmanager
def reporter(stream: TextIO | None = None) -> Iterator[Callable[[str], None]]:
    """Yield a function that prints a message. While there is none, print the time that passes."""
    stream = sys.stdout if stream is None else stream
    started = time.monotonic()
    ended = threading.Event()

    def say(message: str) -> None:
        nonlocal started
        started = time.monotonic()
        print(message, file=stream, flush=True)

    def report() -> None:
        while not ended.wait(SILENT_SECONDS):
            if (passed := time.monotonic() - started) >= SILENT_SECONDS:
                print(f"  {passed:.0f} s", file=stream, flush=True)

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield say
    finally:
        ended.set()
        thread.join()


def progress(lines: Iterable[str]) -> Iterator[str]:
    """Yield a message for each line of pip's output that says how far the installation is."""
    unreachable = False
    for line in map(str.strip, lines):
        if match := re.match(r"Downloading (\S+) \(([\d.]+) (MB|GB)\)", line):
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


def set_up(venv: Path, say: Callable[[str], None]) -> None:
    python = venv / "bin" / "python"
    if not python.exists():
        say(f"creating {venv}")
        list(run([sys.executable, "-m", "venv", str(venv)]))
    install = [str(python), "-m", "pip", "install", "--verbose", "--progress-bar", "off"]
    install += ["--constraint", "constraints.txt", "--editable", f".[{EXTRAS}]"]
    say("downloading the packages")
    for message in progress(run(install)):
        say(message)
    try:
        say("downloading perf_analyzer")
        list(run([str(python), "-m", "benchmarks.perf_analyzer.fetch"]))
    except SetUpError:
        print("warning: no perf_analyzer; its tests will be skipped", file=sys.stderr)


def main() -> int:
    LOG.parent.mkdir(exist_ok=True)
    LOG.unlink(missing_ok=True)
    try:
        with reporter() as say:
            set_up(Path(sys.argv[1]), say)
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
