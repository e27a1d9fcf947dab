"""Tests that every GPU kernel compiles for sm_80 and sm_90 within the limits of a block."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tools.gpu.compile_check import DTYPES, MAX_REGISTERS, TARGETS, Compiled, table

ROOT = Path(__file__).parents[3]
KERNELS = {
    "add_norm",
    "head_norm",
    "gate",
    "embed",
    "rotate",
    "decode",
    "prefill",
    "chunk_max",
    "argmax",
    "chunk_mass",
    "compact",
    "pick",
}


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("triton"), reason="needs 'triton' (extra 'gpu-check')")
def test_every_kernel_spills_nothing_and_fits_shared_memory(tmp_path: Path) -> None:
    path = tmp_path / "resources.json"
    done = subprocess.run(
        [sys.executable, "-m", "tools.gpu.compile_check", "--types", "bf16", "--json", str(path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    compiled = [Compiled(**fields) for fields in json.loads(path.read_text())]
    assert {(c.kernel, c.target) for c in compiled} == {
        (kernel, target) for kernel in KERNELS for target in TARGETS
    }
    assert all(c.fault is None and c.registers <= MAX_REGISTERS for c in compiled)


def test_faults_name_the_kernel_and_the_limit() -> None:
    good = Compiled("gate", 80, "bf16", 4, 30, 0, 1024)
    assert good.fault is None
    spilling = Compiled("prefill", 80, "fp32", 8, 255, 96, 1024)
    assert spilling.fault == (
        "prefill in fp32 for sm_80 spills 96 bytes of registers; it must spill none"
    )
    large = Compiled("prefill", 90, "fp16", 8, 255, 0, 233_000)
    assert large.fault is not None
    assert "233000 bytes of shared memory; a block may have 232448" in large.fault
    assert set(DTYPES) == {"bf16", "fp16", "fp32"}
    both = table([good, Compiled("gate", 90, "bf16", 4, 32, 0, 2048)])
    assert both.splitlines()[-1] == "| gate | bf16 | 4 | 30 / 32 | 1.0 / 2.0 | 0 |"
