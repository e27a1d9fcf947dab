"""Test of parallel regions in which an allocation fails. A C++ program injects the failures."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

RUNTIME = Path(__file__).resolve().parents[3] / "csrc" / "runtime"
FLAGS = ("-std=c++17", "-O1", "-g1", "-w", "-fsanitize=address,undefined")


@pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler here")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the core is for x86-64")
def test_a_failed_allocation_leaves_no_state_behind(tmp_path: Path) -> None:
    sources = (RUNTIME / name for name in ("test/failures.cpp", "threads.cpp", "kernel_scope.cpp"))
    program = tmp_path / "failures"
    command = ["g++", *FLAGS, f"-I{RUNTIME.parent}", *map(str, sources), "-o", str(program)]
    subprocess.run([*command, "-ldl", "-lpthread"], check=True)
    done = subprocess.run([program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
