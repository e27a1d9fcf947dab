"""Tests of instruction sets: their order by measured peaks, choice by name, and AMX's twin."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import pytest

from tests.support.atmm_problems import compiled
from vlora import native
from vlora.atmm import tiles
from vlora.atmm.cpu import Cpu

pytestmark = compiled

MIN_GAIN = 1.1
"""Factor by which a peak must exceed another to be ordered before it: kRequiredSpeedup of
csrc/runtime/dispatch.cpp."""


@pytest.mark.parametrize("dtype", tiles.DTYPE_NAMES)
def test_instruction_sets_are_ordered_by_their_measured_peak(dtype: str) -> None:
    core, isas = native.kernels().runtime, tiles.isas(dtype)
    peaks = [core.core_peak(isa, dtype) for isa in isas]
    assert isas[-1] == "scalar"
    assert all(first * MIN_GAIN >= second > 0 for first, second in itertools.pairwise(peaks))
    assert core.core_peak(isas[0], dtype) == peaks[0], "measured once"
    with pytest.raises(ValueError, match="'none' does not run here"):
        core.core_peak("none", dtype)


def test_a_forced_instruction_set_serves_both_types_until_the_context_ends() -> None:
    before = [tiles.current_isa(dtype) for dtype in tiles.DTYPE_NAMES]
    with tiles.isa("twin"):
        with tiles.isa("scalar"):
            assert [tiles.current_isa(dtype) for dtype in tiles.DTYPE_NAMES] == ["scalar"] * 2
        assert tiles.current_isa("bf16") == "twin"
    assert [tiles.current_isa(dtype) for dtype in tiles.DTYPE_NAMES] == before
    with pytest.raises(ValueError, match="'sse' was not built"), tiles.isa("sse"):
        pass


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python code with these variables and without the caller's VLORA_ISA."""
    inherited = {name: value for name, value in os.environ.items() if name != "VLORA_ISA"}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=inherited | environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("name", "output"), [("scalar", "scalar scalar"), ("sse", "VLORA_ISA='sse'; on this CPU it")]
)
def test_the_environment_forces_an_instruction_set(name: str, output: str) -> None:
    code = (
        "from vlora import native; cpu = native.kernels().runtime;"
        "print(cpu.isa('fp32'), cpu.isa('bf16'))"
    )
    done = run(code, VLORA_ISA=name)
    assert output in done.stdout + done.stderr


LATER_CHANGE = """
import os, torch
from vlora import native
cpu = native.kernels().runtime
source = cpu.thread_source()
os.environ.update(VLORA_ISA="scalar", OMP_WAIT_POLICY="ACTIVE")
assert (cpu.requested_isa(), cpu.thread_source()) == ("auto", source) == ("auto", "own")
"""


def test_a_change_of_the_environment_has_no_effect_once_the_kernels_are_loaded() -> None:
    done = run(LATER_CHANGE, OMP_WAIT_POLICY="passive")
    assert done.returncode == 0, done.stderr


def test_the_core_and_the_names_of_tables_use_the_same_cache_sizes() -> None:
    machine, device = native.kernels().runtime.machine(), Cpu.here()
    sizes = tuple(machine[level] >> 10 for level in ("l1", "l2", "l3"))
    assert sizes == (device.l1, device.l2, device.l3)
    assert machine["memory"] > 0
