"""The work of each stage of `make gpu`, and what the stages share.

A stage writes its results to a folder, and returns a line that describes them. It raises Lacking if
the machine lacks something, and any other exception, or SystemExit, if it fails.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tools.gpu.absent import replace_absent
from tools.gpu.benchmark_run import run_benchmark
from tools.gpu.pytest_run import run_tests
from tools.gpu.report import read, report, write
from tools.gpu.stages import ROOT, Lacking, seconds_given

RESERVE = 8.0
"""Seconds at the end of a stage's time limit that are kept for finishing and writing results."""
INSTANCES = 32
"""Maximum number of tiles to build. Each takes seven seconds of one core."""
COPY_BYTES, SIDE = 2 << 30, 8192
DEVICE_TESTS = (
    "tests/unit/test_cuda_operator.py",
    "tests/unit/test_cuda_choice.py",
    "tests/unit/test_cuda_tiles.py",
    "tests/unit/atmm",
)
ON_DEVICE = "cuda and not emulated"
PARITY_TESTS = tuple(
    f"tests/unit/gpu/test_{name}.py" for name in ("rows", "attention", "sampling", "real_device")
)
CHECKPOINTS = ROOT / "build" / "checkpoints"
SANITIZERS = ("memcheck", "racecheck")
"""Tools of compute-sanitizer."""


def machine(out: Path) -> str:
    """Describe the machine and measure its bandwidth and peak rates."""
    found: dict[str, Any] = {"python": platform.python_version(), "cores": os.cpu_count()}
    smi = shutil.which("nvidia-smi")
    query = "name,driver_version,clocks.sm,clocks.max.sm,power.limit,memory.total"
    if smi:
        said = _said([smi, f"--query-gpu={query}", "--format=csv,noheader"])
        found["nvidia_smi"] = dict(zip(query.split(","), said.split(", "), strict=False))
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    found["nvcc"] = _said([nvcc, "--version"]).splitlines()[-2:-1] if nvcc else None
    packages = ("torch", "pytest", "hypothesis", "peft", "transformers", "vllm", "sglang")
    found["packages"] = {name: _version(name) for name in packages}
    write(out / "machine.json", found)
    torch = _torch()
    from benchmarks.gpu_timing import measure_limits

    device = torch.device("cuda", torch.cuda.current_device())
    properties = torch.cuda.get_device_properties(device)
    found |= {
        "device": properties.name,
        "sm": properties.major * 10 + properties.minor,
        "multiprocessors": properties.multi_processor_count,
        "l2_mib": properties.L2_cache_size >> 20,
        "memory_gib": properties.total_memory >> 30,
        "cuda": torch.version.cuda,
    }
    write(out / "machine.json", found)
    size = min(COPY_BYTES, properties.total_memory // 8 // 4 * 4)
    limits = measure_limits(device, side=SIDE, copy_bytes=size)
    found["limits"] = {"copy": limits.copy, "bf16": limits.bf16, "fp32": limits.fp32}
    write(out / "machine.json", found)
    return (
        f"{properties.name}: copy {limits.copy / 1e12:.2f} TB/s, bf16 {limits.bf16 / 1e12:.0f},"
        f" fp32 {limits.fp32 / 1e12:.0f} TFLOP/s"
    )


def build(out: Path) -> str:
    """Build the pruned set of tiles for the GPU's architecture, or for all ARCHITECTURES without a
    GPU.
    """
    from tools.tile_search import cuda_build

    known = read(out / "machine.json")
    chosen = cuda_build.instances(INSTANCES)
    architectures = (known["sm"],) if "sm" in known else cuda_build.ARCHITECTURES
    try:
        library = cuda_build.build(chosen, architectures=architectures, fetch=False)
    except cuda_build.NoToolchain as error:
        raise Lacking(str(error)) from None
    used = json.loads((library.parent / cuda_build.RESOURCES).read_text())
    write(out / "resources.json", used)
    spilled = sum(one["spill_stores"] > 0 for one in used)
    return f"{len(chosen)} tiles for sm {architectures}; {spilled} of {len(used)} kernels spill"


def tests(out: Path) -> str:
    """Run the operator's device tests in one pytest process."""
    _operator()
    options = ["-k", ON_DEVICE]
    if importlib.util.find_spec("hypothesis") is None:
        print("hypothesis is not installed: tests of random problems are skipped")
        options.append("--ignore=tests/unit/atmm/test_apply.py")
    return run_tests(out / "tests", DEVICE_TESTS, options)


def parity(out: Path) -> str:
    """Compare the step's kernels with their reference implementations, and an engine on the GPU
    with one on the CPU.
    """
    _torch()
    for package in ("triton", "transformers", "safetensors", "peft"):
        if importlib.util.find_spec(package) is None:
            raise Lacking(f"this Python has no {package}, which the engine's tests need")
    # Compiling the kernels takes most of the time.
    parallel = ["-n", "8"] if importlib.util.find_spec("xdist") else []
    return run_tests(out / "parity", PARITY_TESTS, parallel, {"VLORA_GPU_TESTS": "1"})


def sanitize(out: Path) -> str:
    """Run `tools.gpu.exercise` once with each tool of SANITIZERS."""
    _operator()
    tool = shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path="/usr/local/cuda/bin"
    )
    if tool is None:
        raise Lacking("compute-sanitizer is missing (it is part of the CUDA toolkit)")
    found: dict[str, str] = {}
    box = (seconds_given() - RESERVE) / len(SANITIZERS)
    for name in SANITIZERS:
        command = [tool, "--tool", name, "--error-exitcode", "9", sys.executable, "-m"]
        try:
            done = subprocess.run(
                [*command, "tools.gpu.exercise"],
                cwd=ROOT, timeout=box, capture_output=True, text=True, check=False,
            )  # fmt: skip
            text = done.stdout + done.stderr
            print(text[-20000:])
            summary = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: .*", text)
            if "not supported" in text:
                found[name] = "refuses this device"
            else:
                found[name] = summary[-1] if summary else f"no summary (status {done.returncode})"
                if done.returncode:
                    found[name] += f", exercise ended with {done.returncode}"
        except subprocess.TimeoutExpired:
            found[name] = f"not finished after {box:.0f} s"
        write(out / "sanitize.json", found)
    said = "; ".join(f"{name}: {text}" for name, text in found.items())
    clean = all("SUMMARY: 0 " in text and "ended" not in text for text in found.values())
    if not clean:
        if any("refuses" in text for text in found.values()):
            raise Lacking(said)
        raise SystemExit(said)
    return said


def search(out: Path) -> str:
    """Search tiles until the time is up. A later run continues where this one stopped."""
    operator = _operator()
    from vlora.atmm.search.cuda_search import CudaSearch, shapes, write_table

    wanted, entries = shapes(), []
    lines = out / "search.jsonl"
    for entry in CudaSearch(operator).search(wanted, lines, seconds_given() - RESERVE):
        entries.append(entry)
        print(
            f"{entry['key']}: {entry['config']}  {entry['hot_us']} us hot, {entry['cold_us']} cold"
        )
    if not entries:
        raise SystemExit("no shape was finished in time")
    path = write_table(operator, entries, out)
    changed = sum(entry["config"] != entry["built_in"] for entry in entries)
    return f"{len(entries)} of {len(wanted)} shapes in {path.name}, {changed} not built in"


def kernels(out: Path) -> str:
    """Measure ATMM and other LoRA operators on the committed grid, until the time is up."""
    operator = _operator(out)
    from benchmarks.benchmark import GRIDS
    from benchmarks.kernels.cells import load_grid
    from tools.gpu.kernels import run, summarize
    from vlora.atmm.cuda.choice import built_in

    cells = load_grid(GRIDS / "kernels.json", ["bf16"], quick=True)
    more = load_grid(GRIDS / "kernels.json", ["bf16"], quick=False)
    cells = list(dict.fromkeys([*cells, *more]))
    from vlora.atmm.search.cuda_search import shapes

    prefill = [shape for shape in shapes(("bf16",)) if shape.rows >= 16]
    picks = [
        built_in(shape, operator.library, operator.multiprocessors, tensor_cores=True)
        for shape in prefill
    ]
    statics = {c.name: c for c in sorted(set(picks), key=picks.count, reverse=True)[:6]}
    rows = []
    for result in run(cells, operator, statics, _limits(out), seconds_given() - RESERVE):
        rows.append(result.as_row())
        print(json.dumps(rows[-1]))
        write(out / "kernels.json", {"rows": rows, "summary": summarize(rows)})
    if not rows:
        raise SystemExit("no cell was finished in time")
    return f"{len(rows)} of {len(cells)} cells"


def steps(out: Path) -> str:
    """Compare graphs of decoding steps with single launches, and time both."""
    _torch()
    if importlib.util.find_spec("triton") is None:
        raise Lacking("this Python has no triton, in which the decoder's kernels are written")
    if absent := replace_absent():
        print(f"not needed and not installed: {', '.join(absent)}")
    import torch

    from tools.gpu.decoding import DEMO, KINDS, SEVEN_B, RandomModel, measure
    from vlora.device.cuda import CudaDevice

    kinds = KINDS
    try:
        _operator(out)
    except Lacking as error:
        print(f"only steps of the base model: {error}")
        kinds = KINDS[:1]
    device, rows = CudaDevice(torch.cuda.current_device()), []
    for sizes in (DEMO, SEVEN_B):
        model = RandomModel(sizes, device, torch.bfloat16)
        for row in measure(model, sizes, torch.bfloat16, _limits(out).copy, kinds):
            rows.append(row)
            print(json.dumps(row))
            write(out / "steps.json", {"rows": rows})
        del model
    last = rows[-1]
    return (
        f"{len(rows)} kinds of steps, graphs equal single launches; {last['graphs']} graphs of the"
        f" {last['model']} model took {last['capture_s']} s and {last['graph_mib']} MiB"
    )


def bench_step(out: Path) -> str:
    """Run the benchmark `step` on the GPU, with the whole engine."""
    return _benchmark(out, "step", "--dtypes", "bf16")


def bench_engine(out: Path) -> str:
    """Run the benchmark `engine` on the GPU, without a server."""
    return _benchmark(out, "engine", "--dtypes", "bf16", "--no-served")


def _benchmark(out: Path, name: str, *options: str) -> str:
    """Run a part of a benchmark's grid on the current GPU."""
    device = f"cuda:{_torch().cuda.current_device()}"
    options = ("--device", device, "--root", str(CHECKPOINTS), *options)
    return run_benchmark(out / f"bench_{name}.json", name, options)


def switch(out: Path) -> str:
    """Measure merging all layers of a model."""
    operator = _operator()
    from tools.gpu.switch import MODELS, measure

    rows = []
    for model in MODELS:
        rows.append(measure(model, operator, _limits(out)))
        print(json.dumps(rows[-1]))
        write(out / "switch.json", {"rows": rows})
    return "; ".join(f"{r['model']} r{r['rank']}: {r['ms']['atmm']} ms" for r in rows)


STAGES: Mapping[str, Callable[[Path], str]] = {
    "machine": machine,
    "build": build,
    "parity": parity,
    "steps": steps,
    "tests": tests,
    "sanitize": sanitize,
    "search": search,
    "kernels": kernels,
    "switch": switch,
    "bench_step": bench_step,
    "bench_engine": bench_engine,
    "report": report,
}


# ---- shared helpers ---------------------------------------------------------------------------


def _torch() -> Any:
    if importlib.util.find_spec("torch") is None:
        raise Lacking("this Python has no torch: choose another one with PYTHON=…")
    import torch

    if not torch.cuda.is_available():
        driver = "no driver" if shutil.which("nvidia-smi") is None else "a driver"
        built = torch.version.cuda or "no CUDA"
        raise Lacking(f"torch finds no usable GPU ({driver}; torch was built with {built})")
    return torch


def _operator(out: Path | None = None) -> Any:
    """Return the operator on the device. With `out`, it uses the table that the search wrote."""
    _torch()
    from vlora.atmm.cuda.choice import Table
    from vlora.atmm.cuda.operator import current, table_path

    try:
        operator = current()
    except ImportError as error:
        raise Lacking(str(error)) from None
    if out is not None and (path := table_path(operator.name, out)).exists():
        operator.table = Table.load(path, operator.library)
    return operator


def _limits(out: Path) -> Any:
    from benchmarks.gpu_timing import GpuLimits, measure_limits

    known = read(out / "machine.json").get("limits")
    if known:
        return GpuLimits(**known)
    torch = _torch()
    return measure_limits(torch.device("cuda"), side=SIDE, copy_bytes=COPY_BYTES)


def _version(package: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _said(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    return (done.stdout or done.stderr).strip()
