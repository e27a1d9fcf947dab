"""Tests of the benchmarks of operators on a GPU, with emulated kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_kernels, gpu_switch
from benchmarks.gpu_device import GpuLimits
from benchmarks.lora_operators import KernelCell
from benchmarks.merges import MergeModel
from tests.support.atmm_problems import emulation
from tools.gpu.__main__ import environment
from vlora.atmm.cuda.operator import Operator

LIMITS = GpuLimits(1e9, 1e11, 1e10)


@pytest.fixture(scope="module")
def operator() -> Operator:
    return Operator(emulation(), torch.device("cpu"))


def test_a_benchmark_cell_is_compared_with_float64_and_timed(operator: Operator) -> None:
    cells = (
        KernelCell("decode", 2, 1, 64, 8, "distinct", True, "bf16"),
        KernelCell("prefill", 3, 16, 64, "mixed", "zipf", False, "bf16"),
    )
    rows = [gpu_kernels.measure(cell, operator, LIMITS) for cell in cells]
    for row in rows:
        assert {"atmm", "peft_loop", "slice_loop", "einsum", "padded"} == set(row["us"])
        assert not row["left_out"]
    found = gpu_kernels.summarize(rows)
    assert found["cells"] == 2
    assert found["decode_cold_vs_peft_loop"] == pytest.approx(
        rows[0]["us"]["peft_loop"] / rows[0]["us"]["atmm"], rel=0.01
    )


def test_a_wrong_kernel_is_left_out_of_the_benchmark(
    operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wrong(gpu_kernels.LoraOperator):
        name = "wrong"

        def prepare(self, pairs, cell):  # type: ignore[no-untyped-def]
            return lambda y, x: None

    monkeypatch.setattr(gpu_kernels, "BASELINES", (Wrong(),))
    cell = KernelCell("decode", 2, 1, 64, 8, "distinct", False, "bf16")
    found = gpu_kernels.measure(cell, operator, LIMITS)
    assert "wrong: " in found["left_out"]["wrong"]


def test_the_switch_benchmark_compares_the_merge_with_float64(operator: Operator) -> None:
    model = MergeModel("tiny", 2, ((24, 40), (40, 24)), 5, "bf16")
    row = gpu_switch.measure(model, operator, LIMITS)
    assert set(row["ms"]) == {"atmm", "addmm"}


def test_the_operator_imports_only_torch(tmp_path: Path) -> None:
    """Import the operator without the package's other dependencies and the compiled kernels."""
    text = """
import sys, importlib.abc
GONE = "typer rich jsonschema transformers peft safetensors PIL accelerate grpc tritonclient"
class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in GONE.split() or name == "vlora._kernels":
            raise ImportError(f"{name} is not here")
sys.meta_path.insert(0, Missing())
import torch
from vlora.atmm import op
import benchmarks.gpu_kernels, benchmarks.gpu_switch
import vlora.atmm.search.cuda_search
from vlora.atmm.groups import LoraGroup
from vlora.atmm.types import LoraPair, Segment
group = LoraGroup.of(8, [LoraPair(torch.ones(2, 8), torch.ones(4, 2))])
y = torch.zeros(3, 4)
op.apply(y, torch.ones(3, 8), [Segment(0, 3, 0)], group)
print(float(y.sum()))
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", text],
        cwd=tmp_path,
        env={**os.environ, **environment()},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == "192.0", done.stderr
