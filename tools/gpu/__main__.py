"""Build, test, tune and measure on a machine with a GPU, from the root of a source tree.

It installs and downloads nothing. Each stage is a process with a time limit, and FOLDER/NAME.log is
its output. A stage that fails, hangs or lacks a package does not stop the others. FOLDER/summary.md
is written after each stage, so an interrupted run keeps its results.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MINUTES = 9.0
RESERVE = 8.0
"""Seconds at the end of a stage's time limit in which it can write its results."""
FEWEST_SECONDS = 2.0
"""Minimum time left to start another stage."""
TILES = 32
"""Number of tiles to build. Each takes seven seconds of one core."""


@dataclass(frozen=True)
class Stage:
    """A process to run.

    seconds: time limit of the process.
    command: "{seconds}" and "{minutes}" in it become the time limit less RESERVE.
    """

    name: str
    seconds: float
    command: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """Result of a stage.

    ending: "done", "failed", "out of time", "skipped" (all tests), or "not started".
    says: last line of its output, or the reason.
    """

    ending: str
    seconds: float
    says: str


def stages(out: Path) -> list[Stage]:
    """Return all stages, in the order in which they run."""
    python = (sys.executable, "-m")
    pytest = (*python, "pytest", "-q", "-p", "no:cacheprovider", "-o", "filterwarnings=default")
    on_device = ("-k", "cuda and not emulated")
    folder = str(out)
    grid = ("--quick", "--device", "cuda", "--dtypes", "bf16")
    grid += ("--root", str(ROOT / "build" / "checkpoints"))

    def measure(name: str, module: Sequence[str], *options: str) -> tuple[str, ...]:
        return (*python, *module, "--json", str(out / f"{name}.json"), *options)

    def sanitize(tool: str) -> tuple[str, ...]:
        command = ("compute-sanitizer", "--tool", tool, "--error-exitcode", "9", *pytest)
        return (*command, "tests/unit/test_cuda_exercise.py", *on_device)

    parity = [f"tests/unit/gpu/test_{name}.py" for name in ("rows", "attention", "sampling")]
    parity += ["tests/unit/gpu/test_real_device.py", *(["-n", "8"] if find_spec("xdist") else [])]
    device = [f"tests/unit/test_cuda_{name}.py" for name in ("operator", "choice", "tiles")]
    device += ["tests/unit/atmm", *on_device]
    if not find_spec("hypothesis"):
        device.append("--ignore=tests/unit/atmm/test_apply.py")
    build = ("csrc.atmm.cuda.build", "--limit", str(TILES), *_architecture())
    search = ("vlora.cli", "tile-search", "--cuda", "--dtypes", "bf16,fp16")
    search += ("--output", folder, "--state", folder, "--minutes", "{minutes}")
    kernels = ("--tables", folder, "--seconds", "{seconds}")
    steps = "tests/unit/gpu/test_decoding_steps.py"
    return [
        Stage("machine", 40, measure("machine", ["benchmarks.gpu_device"])),
        Stage("build", 80, (*python, *build)),
        Stage("parity", 65, (*pytest, *parity)),
        Stage("steps", 70, (*pytest, "-s", steps)),
        Stage("tests", 50, (*pytest, *device)),
        Stage("memcheck", 25, sanitize("memcheck")),
        Stage("racecheck", 20, sanitize("racecheck")),
        Stage("search", 30, (*python, *search)),
        Stage("kernels", 50, measure("kernels", ["benchmarks.gpu_kernels"], *kernels)),
        Stage("switch", 25, measure("switch", ["benchmarks.gpu_switch"])),
        Stage("step", 40, measure("step", ["benchmarks", "step"], *grid)),
        Stage("engine", 35, measure("engine", ["benchmarks", "engine"], *grid, "--no-served")),
    ]


def _architecture() -> list[str]:
    """Return the option of the build for the GPU's architecture; without a GPU, no option."""
    if not shutil.which("nvidia-smi"):
        return []
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    said = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()
    return ["--sm", said[0].replace(".", "")] if said else []


def run_all(
    chosen: Sequence[Stage], seconds: float, folder: Path, environment: Mapping[str, str]
) -> dict[str, Outcome]:
    """Run the stages within `seconds`, and write the summary after each. Return the outcomes.

    A stage may run longer than its own limit, as long as the limits of all later stages still fit
    into the remaining time.
    """
    folder.mkdir(parents=True, exist_ok=True)
    outcomes: dict[str, Outcome] = {}
    end = time.monotonic() + seconds
    for number, stage in enumerate(chosen, start=1):
        left = end - time.monotonic()
        promised = sum(later.seconds for later in chosen[number:])
        limit = min(left, max(stage.seconds, left - promised))
        outcome = run_stage(stage, limit, folder / f"{stage.name}.log", environment)
        outcomes[stage.name] = outcome
        print(f"{stage.name}: {outcome.ending} after {outcome.seconds:.0f} s: {outcome.says}")
        write_summary(folder, outcomes)
    return outcomes


def run_stage(stage: Stage, limit: float, log: Path, environment: Mapping[str, str]) -> Outcome:
    """Run a stage for at most `limit` seconds. `log` gets its output."""
    if limit < FEWEST_SECONDS:
        return Outcome("not started", 0.0, "no time was left")
    if shutil.which(stage.command[0]) is None:
        return Outcome("not started", 0.0, f"this machine has no {stage.command[0]}")
    print(f"{stage.name}: at most {limit:.0f} s", flush=True)
    work = max(1.0, limit - RESERVE)
    times = {"{seconds}": f"{work:.1f}", "{minutes}": f"{work / 60:.2f}"}
    command = [times.get(part, part) for part in stage.command]
    started = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            cwd=ROOT,
            env={**os.environ, **environment},
            start_new_session=True,  # Its child processes end with it.
        )
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    seconds, says = time.monotonic() - started, _last_line(log)
    if status is None:
        return Outcome("out of time", seconds, says)
    if status == 0:
        # Tests skip what the machine lacks.
        nothing = " skipped" in says and " passed" not in says
        return Outcome("skipped" if nothing else "done", seconds, says)
    return Outcome("failed", seconds, f"{says} ({status})")


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip()[:300] if lines else "no output"


def write_summary(folder: Path, outcomes: Mapping[str, Outcome]) -> None:
    """Write the page of all outcomes, with the figures in the stages' JSON files."""
    lines = ["| stage | ended | s | result |", "|---|---|---|---|"]
    lines += [
        f"| {name} | {one.ending} | {one.seconds:.0f} | {one.says.replace('|', '/')} |"
        for name, one in outcomes.items()
    ]
    for name in outcomes:
        path = folder / f"{name}.json"
        summary = json.loads(path.read_text()).get("summary", {}) if path.exists() else {}
        lines += ["", f"| {name} | |", "|---|---|"] if summary else []
        lines += [f"| {key} | {value} |" for key, value in summary.items() if value is not None]
    (folder / "summary.md").write_text("\n".join(lines) + "\n")


def environment() -> dict[str, str]:
    """Return variables with which Python finds the package, and with which tests use the GPU."""
    path = [str(ROOT / "backend_src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "PYTHONUNBUFFERED": "1",
        "VLORA_GPU_TESTS": "1",
        "PIP_NO_INDEX": "1",  # The build does not download the CUTLASS headers if they are missing.
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python3 -m tools.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "gpu", metavar="FOLDER")
    parser.add_argument("--only", nargs="+", metavar="STAGE", help="stages to run (default: all)")
    given = parser.parse_args()
    out = given.out.resolve()
    os.environ["PATH"] += ":/usr/local/cuda/bin"
    every = stages(out)
    if unknown := set(given.only or ()) - {stage.name for stage in every}:
        parser.error(f"unknown stages {sorted(unknown)}; known: {[s.name for s in every]}")
    chosen = [stage for stage in every if not given.only or stage.name in given.only]
    outcomes = run_all(chosen, MINUTES * 60, out, environment())
    print((out / "summary.md").read_text())
    sys.exit(any(outcome.ending != "done" for outcome in outcomes.values()))


if __name__ == "__main__":
    main()
