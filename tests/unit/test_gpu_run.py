"""Tests of the command `make gpu` without a GPU."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.support.polling import until
from tools.gpu.__main__ import MINUTES, ROOT, Outcome, Stage, run_all, stages


def stage(name: str, text: str, seconds: float = 20) -> Stage:
    """Return a stage that runs a Python program."""
    return Stage(name, seconds, (sys.executable, "-c", text))


def outcomes(folder: Path, *chosen: Stage, seconds: float = 60) -> dict[str, Outcome]:
    return run_all(chosen, seconds, folder, {})


def test_a_stage_that_fails_or_hangs_does_not_stop_the_others(tmp_path: Path) -> None:
    hangs = Stage("hangs", 2, ("sh", "-c", "echo so far; exec sleep 600"))
    # Later stages reserve their time: this one has 3 s.
    found = outcomes(tmp_path, hangs, seconds=3)
    found |= outcomes(
        tmp_path,
        stage("fails", "print('why'); raise SystemExit(2)"),
        Stage("lacks", 20, ("vlora_has_no_such_program",)),
        stage("skips", "print('2 skipped in 0.1s')"),
        stage("works", "print('all well')"),
    )
    assert {name: (one.ending, one.says) for name, one in found.items()} == {
        "hangs": ("out of time", "so far"),
        "fails": ("failed", "why (2)"),
        "lacks": ("not started", "this machine has no vlora_has_no_such_program"),
        "skips": ("skipped", "2 skipped in 0.1s"),
        "works": ("done", "all well"),
    }


def test_child_processes_of_a_hanging_stage_end_with_it(tmp_path: Path) -> None:
    child = Stage("hangs", 3, ("sh", "-c", "sleep 600 & echo $!; wait"))
    found = outcomes(tmp_path, child, seconds=3)
    assert found["hangs"].ending == "out of time"
    status = Path(f"/proc/{found['hangs'].says}/status")
    until(lambda: not status.exists() or "State:\tZ" in status.read_text())


def test_a_stage_knows_its_time_and_is_not_started_without(tmp_path: Path) -> None:
    told = Stage("told", 68, ("echo", "{seconds}", "{minutes}"))
    # The other one reserves what is beyond the limit, so the limit does not depend on the clock.
    others = stage("others", "print(1)", 1000)
    assert outcomes(tmp_path, told, others, seconds=1000)["told"].says == "60.0 1.00"
    late = outcomes(tmp_path, stage("late", "print(1)"), seconds=1)["late"]
    assert (late.ending, late.says) == ("not started", "no time was left")


def test_the_summary_is_written_after_each_stage(tmp_path: Path) -> None:
    figures = str(tmp_path / "one.json")
    one = f'open({figures!r}, \'w\').write(\'{{"summary": {{"speed": 2, "b": null}}}}\')'
    summary = str(tmp_path / "summary.md")
    seen = f"print('| one | done |' in open({summary!r}).read())"
    found = outcomes(tmp_path, stage("one", f"{one}; print('fine')"), stage("two", seen))
    assert [(each.ending, each.says) for each in found.values()] == [
        ("done", "fine"),
        ("done", "True"),
    ]
    text = Path(summary).read_text()
    assert "| two | done |" in text
    assert "| speed | 2 |" in text
    assert "| b |" not in text


def test_the_time_limits_of_all_stages_fit_the_total(tmp_path: Path) -> None:
    assert sum(one.seconds for one in stages(tmp_path)) <= MINUTES * 60


def test_all_files_and_modules_of_the_stages_exist(tmp_path: Path) -> None:
    words = [word for one in stages(tmp_path) for word in one.command]
    tests = [word for word in words if word.startswith("tests/")]
    modules = [word for word in words if word.startswith(("benchmarks.", "tools.", "vlora."))]
    assert len(tests) > 5
    assert len(modules) > 3
    assert all((ROOT / path).exists() for path in tests)
    assert all(find_spec(name) for name in modules)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_no_stage_is_reported_as_done(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tools.gpu", "--out", str(tmp_path), "--only"]
    given = ["machine", "kernels"]
    done = subprocess.run([*command, *given], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    lines = (tmp_path / "summary.md").read_text().splitlines()[2:]
    assert [line.split(" | ")[:2] for line in lines] == [[f"| {n}", "failed"] for n in given]
