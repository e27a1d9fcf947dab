"""Tests of `make gpu` without a GPU: the stage runner, and benchmarks on emulated kernels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from functools import partial
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from benchmarks.gpu_timing import GpuLimits
from benchmarks.kernels.cells import KernelCell
from tests.support.atmm_problems import emulation
from tests.support.polling import until
from tools.gpu import exercise, kernels, switch
from tools.gpu.__main__ import BOXES, MINUTES, environment
from tools.gpu.report import archive, summary, write_figures
from tools.gpu.stages import ROOT, Runner, Stage
from tools.gpu.work import STAGES
from vlora.atmm.cuda.choice import KernelChoice, Shape, Table
from vlora.atmm.cuda.operator import Operator, using
from vlora.atmm.search import cuda_search
from vlora.atmm.search.cuda_search import CudaSearch, shapes, write_table
from vlora.cli import tile_search as command

LIMITS = GpuLimits(1e9, 1e11, 1e10)
SMALL = Shape("bf16", 16, 256, 256, 8, 2)


@pytest.fixture(scope="module")
def operator() -> Operator:
    return Operator(emulation(), torch.device("cpu"))


def python(text: str) -> tuple[str, ...]:
    return (sys.executable, "-c", text)


def test_a_stage_that_fails_or_hangs_does_not_stop_the_others(
    tmp_path: Path,
) -> None:
    stages = [
        Stage("fails", python("print('why'); raise SystemExit(2)"), 20),
        Stage("hangs", python("print('so far', flush=True); import time; time.sleep(600)"), 2),
        Stage("lacks", python("print('no driver'); raise SystemExit(3)"), 20),
        Stage("works", python("print('all well')"), 20),
    ]
    # Later stages reserve their time: the second stage has 3 s, however long the first took.
    found = Runner(tmp_path, "stamp").run(stages[:1], 60, {})
    found = Runner(tmp_path, "stamp").run(stages[1:2], 3, {})
    found = Runner(tmp_path, "stamp").run(stages[2:], 60, {})
    endings = {name: (one.ending, one.says) for name, one in found.items()}
    assert endings == {
        "fails": ("failed", "why (2)"),
        "hangs": ("out of time", "so far"),
        "lacks": ("lacking", "no driver"),
        "works": ("done", "all well"),
    }


def test_child_processes_of_a_hanging_stage_end_with_it(tmp_path: Path) -> None:
    child = """
import subprocess, sys, time
p = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE)
print(p.pid, flush=True)
time.sleep(600)
"""
    found = Runner(tmp_path, "stamp").run([Stage("hangs", python(child), 3)], 3, {})
    assert found["hangs"].ending == "out of time"
    status = Path(f"/proc/{found['hangs'].says}/status")
    until(lambda: not status.exists() or "State:\tZ" in status.read_text())


def test_a_completed_stage_runs_again_only_if_the_sources_changed(tmp_path: Path) -> None:
    count = tmp_path / "count"
    text = f"open({str(count)!r}, 'a').write('x'); print('done')"
    stages = [Stage("once", python(text), 20), Stage("always", python(text), 20, always=True)]
    for stamp in ("first", "first", "second"):
        Runner(tmp_path / "out", stamp).run(stages, 60, {})
    assert count.read_text() == "x" * (2 + 1 + 2)


def test_stages_without_time_left_are_reported(tmp_path: Path) -> None:
    found = Runner(tmp_path, "stamp").run([Stage("late", python("print(1)"), 20)], 1, {})
    assert found["late"].ending == "not started"


def test_results_of_earlier_stages_are_kept_after_each_stage(tmp_path: Path) -> None:
    """Write figures and an archive after each stage; an error in it does not end the run."""
    out, kept = tmp_path / "out", tmp_path / "kept" / "gpu.tar.gz"
    told: list[str] = []
    seen: list[str] = []

    def keep() -> None:
        write_figures(out)
        archive(out, kept)
        with tarfile.open(kept) as file:
            seen.append(file.extractfile("gpu/figures/summary.md").read().decode())  # type: ignore[union-attr]
        if len(seen) == 2:
            raise OSError("no space")

    stages = [Stage(name, python(f"print('{name} is fine')"), 20) for name in ("one", "two", "six")]
    found = Runner(out, "stamp").run(stages, 60, {}, told.append, keep)
    assert [one.ending for one in found.values()] == ["done"] * 3
    assert ["| two | done |" in text for text in seen] == [False, True, True]
    assert "the report after two failed: OSError: no space" in told
    with tarfile.open(kept) as file:
        names = set(file.getnames())
    assert {"gpu/one.log", "gpu/six.log", "gpu/stages.json"} <= names


def test_the_time_limits_of_all_stages_fit_the_total() -> None:
    assert set(BOXES) == set(STAGES)
    assert sum(BOXES.values()) <= MINUTES * 60


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_each_stage_reports_what_it_lacks(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tools.gpu", "--out", str(tmp_path), "--only"]
    given = ["machine", "search", "report"]
    done = subprocess.run([*command, *given], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    stages = json.loads((tmp_path / "stages.json").read_text())["stages"]
    for name in given[:-1]:
        assert stages[name]["ending"] == "lacking", stages[name]
        assert "torch finds no usable GPU (no driver" in stages[name]["says"]
    assert stages["report"]["ending"] == "done"
    assert "no GPU" in (tmp_path / "figures" / "summary.md").read_text()


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
import tools.gpu.kernels, tools.gpu.switch, tools.gpu.exercise, vlora.atmm.search.cuda_search
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


# ---- the stages' work, on the emulation ------------------------------------------------------


def test_the_sanitizer_exercise_calls_every_kernel(operator: Operator) -> None:
    assert exercise.exercise(operator, tiles=2) > 20


def test_a_benchmark_cell_is_compared_with_float64_and_timed(operator: Operator) -> None:
    static = {
        "one": KernelChoice(
            *(next(iter(operator.library.tiles_of(kind, "bf16"))) for kind in ("shrink", "expand"))
        )
    }
    rows = []
    for cell in (
        KernelCell("decode", 2, 1, 64, 8, "distinct", True, "bf16"),
        KernelCell("prefill", 3, 16, 64, "mixed", "zipf", False, "bf16"),
    ):
        rows.append(kernels.measure(cell, operator, static, LIMITS).as_row())
    for row in rows:
        assert {"atmm", "slice_loop", "einsum", "padded"} <= set(row["graph_us"])
        assert "peft_loop" in row["eager_us"]
        assert set(row["left_out"]) == {"vllm", "sglang"}
        assert "ModuleNotFoundError" in row["left_out"]["vllm"]
    found = kernels.summarize(rows)
    assert found["cells"] == 2
    assert found["decode_cold_vs_peft_loop_eager"] > 0
    assert found["best_static"] == "static: one"


def test_a_wrong_kernel_is_left_out_of_the_benchmark(
    operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wrong(kernels.LoraOperator):
        name = "wrong"

        def prepare(self, pairs, cell):  # type: ignore[no-untyped-def]
            return lambda y, x: None

    monkeypatch.setattr(kernels, "PEERS", (Wrong(),))
    cell = KernelCell("decode", 2, 1, 64, 8, "distinct", False, "bf16")
    found = kernels.measure(cell, operator, {}, LIMITS)
    assert "wrong: " in found.left_out["wrong"]


def test_the_switch_benchmark_compares_the_merge_with_float64(operator: Operator) -> None:
    model = switch.Model("tiny", 2, ((24, 40), (40, 24)), 5)
    row = switch.measure(model, operator, LIMITS)
    assert set(row["ms"]) == {"atmm", "atmm_in_place", "addmm", "copy"}


def test_a_search_is_resumed_and_its_table_is_read_by_the_operator(
    operator: Operator, tmp_path: Path
) -> None:
    search, lines = CudaSearch(operator, cold_bytes=1), tmp_path / "search.jsonl"
    first = list(search.search([SMALL], lines, 60))
    assert [entry["key"] for entry in first] == [SMALL.key]
    assert first[0]["hot_us"] > 0
    assert first[0]["tried"] > 3
    assert list(search.search([SMALL], lines, 60)) == first
    path = write_table(operator, first, tmp_path)
    found = Table.load(path, operator.library).find(SMALL)
    assert found == KernelChoice.parse(first[0]["config"])


def test_the_command_searches_gpu_tiles_and_reports_a_missing_gpu(
    operator: Operator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = typer.Typer()
    app.command()(command.tile_search)
    words = ["--cuda", "--dtypes", "bf16", "--output", str(tmp_path), "--state", str(tmp_path)]
    if not torch.cuda.is_available():
        refused = CliRunner().invoke(app, words)
        assert refused.exit_code == 1
        assert "needs a GPU" in refused.output
    monkeypatch.setattr(cuda_search, "CudaSearch", partial(CudaSearch, cold_bytes=1))
    monkeypatch.setattr(cuda_search, "shapes", lambda dtypes: [SMALL])
    with using(operator):
        done = CliRunner().invoke(app, words)
    assert "1 of 1 shapes" in done.output
    (path,) = tmp_path.glob("cuda-*.json")
    assert list(json.loads(path.read_text())["entries"]) == [SMALL.key]


def test_the_library_contains_every_candidate_of_the_search(operator: Operator) -> None:
    search = CudaSearch(operator)
    for shape in shapes():
        found = search.candidates(shape)
        assert found[0] == search.built_in(shape)
        assert len(found) <= 24
        for choice in found:
            choice.on(operator.library, shape.dtype)
            assert KernelChoice.parse(choice.name) == choice


def test_the_page_of_figures_is_made_from_the_stages_results(tmp_path: Path) -> None:
    (tmp_path / "machine.json").write_text(
        json.dumps(
            {
                "device": "Some GPU",
                "packages": {"torch": "2.0"},
                "limits": {"copy": 4e12, "bf16": 7e14, "fp32": 5e13},
            }
        )
    )
    rows = [
        {
            "model": "m",
            "rank": 8,
            "limit_ms": 1,
            "ms": dict.fromkeys(("atmm", "atmm_in_place", "addmm", "copy"), 2),
        }
    ]
    (tmp_path / "switch.json").write_text(json.dumps({"rows": rows}))
    text = summary(tmp_path)
    assert "# ATMM on Some GPU" in text
    assert "Copy 4.00 TB/s" in text
    assert "| m r8 | 1 | 2 | 2 | 2 | 2 |" in text


def test_decoding_steps_need_only_torch_and_numpy(tmp_path: Path) -> None:
    """Compute a step of a random model where all other packages cannot be found."""
    program = """
import sys
from importlib.machinery import PathFinder

KNOWN = {"torch", "torchgen", "numpy", "triton", "vlora", "tools", "typing_extensions"}
KNOWN |= {"sympy", "mpmath", "networkx", "jinja2", "markupsafe", "filelock", "fsspec"}
KNOWN |= sys.stdlib_module_names
find = PathFinder.find_spec

def known(cls, name, path=None, target=None):
    first = name.partition(".")[0]
    return find(name, path, target) if first in KNOWN or first.startswith("_") else None

PathFinder.find_spec = classmethod(known)

from tools.gpu.absent import UNUSED, replace_absent

assert replace_absent() == list(UNUSED)

import torch
from tools.gpu import step_costs
from tools.gpu.decoding import RandomModel, Sizes
from vlora.device.device import HOST

sizes = Sizes("tiny", step_costs.Model(1, 64, 128, 2, 1, 32, 64), 8, 2, (2,), 40)
model = RandomModel(sizes, HOST, torch.float32)
print(bool(model.eager.forward(model.chunks("adapters", 2)).logits.isfinite().all()))
"""
    done = subprocess.run(
        python(program), cwd=ROOT, env={**os.environ, **environment()},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.strip() == "True", done.stderr
