"""Kill a generation run at random moments, and compare its adapters with an undisturbed run's.

usage: python -m tools.generation.kills SPEC OUT [--times 10]

All runs use the specification SPEC. The first is undisturbed. Another run is killed by SIGKILL and
started again, until there were `--times` kills. Then it runs to its end. If it ends after fewer
kills, a further run is killed in the same way. The script exits with 1 unless all files of the
adapters are equal.
"""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from vlora.cli.common import run_command

COMMAND = (sys.executable, "-m", "vlora.cli", "adapters", "generate")


def start(spec: Path, out: Path) -> subprocess.Popen[bytes]:
    """Start or continue a run, and return its process. Its output is appended to `OUT.log`."""
    with out.with_suffix(".log").open("ab") as log:
        return subprocess.Popen([*COMMAND, str(spec), "--out", str(out)], stdout=log, stderr=log)


def contents(out: Path) -> dict[str, bytes]:
    """Return the files of the adapter folders by their paths."""
    return {
        str(path.relative_to(out)): path.read_bytes()
        for folder in sorted(out.iterdir())
        if folder.is_dir() and not folder.name.startswith(".")
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def kill(spec: Path, out: Path, times: int, longest: float, rng: random.Random) -> int:
    """Run to the end, and kill the run up to `times` times meanwhile. Return the number of kills.

    longest: maximum time in seconds from a start to the next kill.
    """
    done = 0
    while True:
        running = start(spec, out)
        try:
            wait = rng.uniform(0, longest) if done < times else None
            running.wait(wait)
            return done
        except subprocess.TimeoutExpired:
            done += 1
            typer.echo(f"killed after {wait:.1f} s")
        finally:
            running.kill()
            running.wait()


def main(
    spec: Annotated[Path, typer.Argument(help="Specification of a short run.")],
    out: Annotated[Path, typer.Argument(metavar="FOLDER", help="New folder for the runs.")],
    times: Annotated[int, typer.Option(help="Number of kills.", min=1)] = 10,
    seed: Annotated[int, typer.Option(help="Seed of the moments of the kills.")] = 0,
) -> None:
    """Compare the adapters of an undisturbed run with those of runs that are killed."""
    out.mkdir(parents=True)
    started = time.monotonic()
    start(spec, out / "straight").wait()
    # An accuracy below the required one is no failure here: such a run writes a report as well.
    if not (out / "straight" / "report.json").exists():
        typer.echo(f"the undisturbed run failed: see {out / 'straight.log'}", err=True)
        raise typer.Exit(1)
    seconds = time.monotonic() - started
    straight, rng = contents(out / "straight"), random.Random(seed)
    killed, different = 0, set[str]()
    # The kills of one run spread over about twice `seconds`. A run that is faster than expected
    # ends before it was killed often enough, and is then followed by another one.
    for number in itertools.count(1):
        folder = out / f"killed-{number}"
        killed += kill(spec, folder, times - killed, 4 * seconds / times, rng)
        resumed = contents(folder)
        different |= {
            name for name in straight | resumed if straight.get(name) != resumed.get(name)
        }
        if killed >= times:
            break
    typer.echo(
        f"{killed} kills of {number} runs, {len(straight)} files, {len(different)} of them"
        f" different: {sorted(different)}"
    )
    if different or not straight:
        raise typer.Exit(1)


if __name__ == "__main__":
    run_command(main)
