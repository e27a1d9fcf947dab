"""Set up the virtual environment of the Makefile, and print a line for each part of the work.

The script runs on a bare Python 3, so it uses the standard library only. Everything that pip and
the compiler print goes into build/set-up.log. If the script is interrupted, it continues with the
packages that pip has in its cache and with the objects that are compiled.

usage: python3 tools/set_up.py .venv
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOG = ROOT / "build" / "set-up.log"
EXTRAS = "server,gateway,structured,train,video,dev"
LARGE_MB = 10.0
"""Minimum size of a file whose download is announced."""
PACKAGES_PER_MESSAGE = 20
LAST_LINES = 30
"""Number of lines of the log that are printed after an error."""


class SetUpError(Exception):
    """A command that failed."""


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
    """Run a command, append its output to the log, and yield the output's lines.

    Raise SetUpError if the command fails.
    """
    with (
        LOG.open("a", encoding="utf-8") as log,
        subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process,
    ):
        for line in process.stdout or ():
            log.write(line)
            log.flush()
            yield line
    if process.returncode:
        raise SetUpError(f"exit status {process.returncode}: {' '.join(command)}")


def set_up(venv: Path) -> None:
    """Create the environment if there is none, and install this package with its requirements."""
    python = venv / "bin" / "python"
    if not python.exists():
        print(f"creating {venv}", flush=True)
        list(run([sys.executable, "-m", "venv", str(venv)]))
    install = [str(python), "-m", "pip", "install", "--verbose", "--progress-bar", "off"]
    install += ["--constraint", "constraints.txt", "--editable", f".[{EXTRAS}]"]
    print("downloading the packages", flush=True)
    for message in progress(run(install)):
        print(message, flush=True)
    print("downloading perf_analyzer", flush=True)
    try:
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
