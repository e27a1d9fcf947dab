"""Run of a benchmark in a stage of `make gpu`."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.gpu.report import read
from tools.gpu.stages import ROOT, Lacking


def run_benchmark(result: Path, name: str, options: Sequence[str]) -> str:
    """Run a part of a benchmark's grid, print its output as it comes, and return its summary.

    The benchmark generates a checkpoint and runs the engine, which need more packages than torch.

    result: JSON file to which the benchmark writes its rows so far.
    """
    command = [sys.executable, "-m", "benchmarks", name, "--quick", "--json", str(result), *options]
    missing: list[str] = []
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            missing += re.findall(r"ModuleNotFoundError: No module named '([\w.]+)'", line)
    if missing:
        raise Lacking(f"this Python has no {missing[0]}, which the benchmark '{name}' needs")
    if process.returncode:
        raise SystemExit(f"the benchmark ended with status {process.returncode}")
    summary = {key: value for key, value in read(result)["summary"].items() if value is not None}
    return ", ".join(f"{key} {value}" for key, value in summary.items())
