"""Build, test, tune and measure ATMM on a machine with a GPU, from the root of a source tree.

usage: `make gpu`, or `python3 -m tools.gpu [--out FOLDER] [--minutes 9]`

An interrupted stage keeps its results so far. After each stage, FOLDER/figures is written: a table,
the figures as JSON, and the tile table to commit.
`--archive FILE.tar.gz` also writes an archive of FOLDER, for a machine that returns few files.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import sys
from pathlib import Path

from tools.gpu.report import archive, write_figures
from tools.gpu.stages import ROOT, Runner, Stage, stage_main, table
from tools.gpu.work import STAGES

MINUTES = 9.0
SOURCES = (
    "csrc/atmm",
    "tools/gpu",
    "tools/tile_search",
    "backend_src/vlora",
    "benchmarks",
    "tests/support",
    "tests/unit/gpu",
)

BOXES = {
    "machine": 40.0,
    "build": 80.0,
    "parity": 65.0,
    "steps": 70.0,
    "tests": 50.0,
    "sanitize": 45.0,
    "search": 30.0,
    "kernels": 50.0,
    "switch": 25.0,
    "bench_step": 40.0,
    "bench_engine": 35.0,
    "report": 10.0,
}
"""Time limits of the stages in seconds. A stage may use time that later stages do not need."""


def environment() -> dict[str, str]:
    """Return environment variables with which Python finds the package and tests in the tree."""
    path = [str(ROOT / "backend_src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(p for p in path if p), "PYTHONUNBUFFERED": "1"}


def stamp() -> str:
    """Return a hash of the sources on which results depend."""
    digest = hashlib.sha256(platform.node().encode())
    for folder in SOURCES:
        for file in sorted((ROOT / folder).rglob("*")):
            if file.suffix in (".py", ".cu", ".cuh", ".h"):
                digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


ALWAYS = ("machine", "report")
"""Stages that always run again: they are cheap and describe only the current run."""


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python3 -m tools.gpu", description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=ROOT / "out" / "gpu",
        metavar="FOLDER",
        help="folder of the results",
    )
    parser.add_argument(
        "--archive", type=Path, metavar="FILE", help="also write all results to this tar.gz file"
    )
    parser.add_argument(
        "--minutes", type=float, default=MINUTES, metavar="MINUTES", help="time for all stages"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=list(STAGES),
        default=list(STAGES),
        metavar="STAGE",
        help=f"stages to run: {', '.join(STAGES)} (default: all)",
    )
    parser.add_argument("--stage", choices=list(STAGES), help=argparse.SUPPRESS)
    given = parser.parse_args()
    out = given.out.resolve()
    if given.stage:
        stage_main(lambda: STAGES[given.stage](out))
        return
    command = (sys.executable, "-m", "tools.gpu", "--out", str(out), "--stage")
    stages = [
        Stage(name, (*command, name), BOXES[name], always=name in ALWAYS)
        for name in STAGES
        if name in given.only
    ]

    def keep() -> None:
        """Write the results so far, so that they survive if this process is ended."""
        write_figures(out)
        if given.archive is not None:
            archive(out, given.archive.resolve())

    outcomes = Runner(out, stamp()).run(
        stages, given.minutes * 60, environment(), lambda text: print(text, flush=True), keep
    )
    print(table(outcomes))
    if any(one.ending != "done" for one in outcomes.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
