"""Build the wheel and the sdist into dist/, check their contents, and serve the demo with each.

Each distribution is installed into a fresh environment outside the source tree. A server started
from this environment must answer the demo's questions. This takes minutes, because the kernels are
compiled twice.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from clients.common import run_main
from tools.dist import trial
from tools.dist.contents import faults_of_sdist, faults_of_wheel, read_sdist, read_wheel
from tools.dist.trial import ROOT, WORK, TrialError, tools_of

DIST = ROOT / "dist"


def build(kind: str, tools: Path, log: Path) -> Path:
    """Build the wheel or the sdist of the source tree into dist/ and return its path."""
    pattern = {"wheel": "vlora-*.whl", "sdist": "vlora-*.tar.gz"}[kind]
    for old in DIST.glob(pattern):
        old.unlink()
    # setuptools keeps files there that were deleted from the source tree.
    for stale in (ROOT / "build").glob("lib*"):
        shutil.rmtree(stale)
    command = [tools / "python", "-m", "build", f"--{kind}", "--outdir", DIST, ROOT]
    trial.run(command, log, cwd=WORK)
    (made,) = DIST.glob(pattern)
    return made


def tracked() -> dict[str, bytes]:
    """Return the content of each file under version control in the source tree."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    names = [name for name in listed.stdout.split("\0") if name]
    return {name: (ROOT / name).read_bytes() for name in names if (ROOT / name).is_file()}


def check(made: Path, kind: str, tools: Path, log: Path) -> None:
    """Check a distribution's contents and metadata. Raise a TrialError that lists all faults."""
    tree = tracked()
    if kind == "wheel":
        faults = faults_of_wheel(read_wheel(made), tree)
    else:
        faults = faults_of_sdist(read_sdist(made), tree)
    if faults:
        raise TrialError(f"{made.name}: " + "\n".join(faults))
    trial.run([tools / "twine", "check", "--strict", made], log)


def try_out(made: Path, log: Path, console: Console) -> str:
    """Install and serve a distribution. Return a summary. Raise TrialError for wrong answers."""
    with tempfile.TemporaryDirectory(prefix="vlora-dist-") as folder:
        home = Path(folder) / "environment"
        started = time.monotonic()
        commands = trial.install(made, home, ROOT / "constraints.txt", log)
        trial.check_installed(home, log)
        installed = time.monotonic() - started
        with trial.serving([commands / "vlora"], home, log) as address:
            right, asked = trial.ask_all(address, console.print)
        if right != asked:
            raise TrialError(f"{right} of {asked} answers are right")
        return f"installed in {installed:.0f} s, answers {right} of {asked} right"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.dist", description=__doc__)
    parser.add_argument("--no-trial", action="store_true", help="do not install or serve")
    options = parser.parse_args(arguments)
    console = Console(highlight=False, soft_wrap=True)
    shutil.rmtree(WORK / "logs", ignore_errors=True)
    (WORK / "logs").mkdir(parents=True)
    DIST.mkdir(exist_ok=True)
    for kind in ("sdist", "wheel"):
        log = WORK / "logs" / f"{kind}.log"
        console.print(f"[bold]{kind}[/]: building (log: {log.relative_to(ROOT)})")
        tools = tools_of(WORK, log)
        made = build(kind, tools, log)
        console.print(f"  {made.relative_to(ROOT)}, {made.stat().st_size / 1e6:.1f} MB")
        check(made, kind, tools, log)
        console.print("  contents and metadata are correct")
        if not options.no_trial:
            console.print("  installing and serving it in a fresh environment; some minutes")
            console.print(f"  {try_out(made, log, console)}")
    return 0


if __name__ == "__main__":
    run_main(main)
