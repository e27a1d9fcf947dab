"""Tests of the stages of `make gpu` that run a benchmark, with other programs in its place."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tools.gpu import benchmark_run, work
from tools.gpu.stages import Lacking


def replace_benchmarks(
    monkeypatch: pytest.MonkeyPatch, program: Callable[[], str]
) -> list[list[str]]:
    """Let benchmarks on a GPU be other programs. Return a list that will have their commands."""
    commands: list[list[str]] = []
    start = subprocess.Popen

    def run(command: list[str], **options: Any) -> subprocess.Popen[str]:
        commands.append(command)
        return start([sys.executable, "-c", program()], **options)

    monkeypatch.setattr(subprocess, "Popen", run)
    monkeypatch.setattr(work, "_torch", lambda: torch)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    return commands


def test_the_output_of_a_benchmark_reaches_the_log_while_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let the benchmark wait until its first line has been printed."""
    seen = tmp_path / "seen"
    program = f"""
import pathlib, time
print("first row", flush=True)
for _ in range(2000):
    if pathlib.Path({str(seen)!r}).exists():
        raise SystemExit
    time.sleep(0.01)
raise SystemExit(9)
"""

    def tell(line: str, **options: object) -> None:
        assert line == "first row\n"
        seen.touch()

    replace_benchmarks(monkeypatch, lambda: program)
    monkeypatch.setattr(benchmark_run, "print", tell, raising=False)
    (tmp_path / "bench_step.json").write_text('{"summary": {}}')
    work.bench_step(tmp_path)
    assert seen.exists()


def test_a_benchmark_that_lacks_a_package_says_which(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let the benchmark be a program that imports a missing package, then one that succeeds."""
    program = "import vlora_has_no_such_package"

    commands = replace_benchmarks(monkeypatch, lambda: program)
    with pytest.raises(Lacking, match="no vlora_has_no_such_package, which the benchmark 'step'"):
        work.bench_step(tmp_path)
    program = "raise SystemExit(7)"
    with pytest.raises(SystemExit, match="ended with status 7"):
        work.bench_engine(tmp_path)
    program = ""
    (tmp_path / "bench_step.json").write_text('{"summary": {"decode_bf16": 0.5, "python": null}}')
    assert work.bench_step(tmp_path) == "decode_bf16 0.5"
    assert commands[0][3:5] == ["step", "--quick"]
    assert commands[0][commands[0].index("--device") + 1] == "cuda:2"
    assert "--no-served" in commands[1]
