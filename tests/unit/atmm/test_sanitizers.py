"""Run of the compiled core under the address, leak and undefined-behaviour sanitizers."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler here")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the core is for x86-64")
def test_the_core_is_clean_under_sanitizers() -> None:
    script = ROOT / "csrc" / "atmm" / "test" / "sanitize.py"
    command = [sys.executable, str(script), "--rounds", "40", "--only", "memory"]
    command += ["--without-lines"]  # `make sanitize` reports the lines
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "scalar: 40 rounds on own threads" in done.stdout
    assert "scalar: 40 rounds on OpenMP's threads" in done.stdout
