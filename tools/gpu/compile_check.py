"""Compile every GPU kernel (`vlora/kernels/gpu`) for sm_80 and sm_90, without a GPU.

A table shows what each kernel needs at the shapes of a 7B model. The check fails if a kernel spills
or needs more shared memory than a block may have.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

TARGETS = {80: 163 << 10, 90: 227 << 10}
"""Compute capabilities, and the bytes of shared memory that a block may have on each."""

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
MAX_REGISTERS = 255

# Shapes of Qwen2-VL-7B, with pages of 16 tokens.
HIDDEN, INNER, HEADS, KV_HEADS, DIM, VOCABULARY = 3584, 18944, 28, 4, 128, 152064
PAGE, ROWS, MAX_PAGES, SPLITS = 16, 64, 2048, 8


@dataclass(frozen=True)
class Compiled:
    """Resources of one kernel. Shared memory and spills (local memory and stack) are in bytes."""

    kernel: str
    target: int
    dtype: str
    warps: int
    registers: int
    spills: int
    shared: int

    @property
    def fault(self) -> str | None:
        """Sentence about the limit that the kernel exceeds, or None."""
        name = f"{self.kernel} in {self.dtype} for sm_{self.target}"
        if self.spills:
            return f"{name} spills {self.spills} bytes of registers; it must spill none"
        if self.shared > TARGETS[self.target]:
            return (
                f"{name} needs {self.shared} bytes of shared memory; a block may have"
                f" {TARGETS[self.target]}"
            )
        return None


class _Driver:
    """Driver of an absent GPU. It names the target for which kernels are compiled."""

    def __init__(self, capability: int) -> None:
        from triton.backends.compiler import GPUTarget

        self._capability = capability
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return self._capability  # Compiled kernels are stored by this number.

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def compiling_for(capability: int) -> Iterator[list[tuple[str, Any]]]:
    """Compile the kernels that are launched in this context. Yield a list that will have them.

    Afterwards this process cannot launch kernels on a GPU.
    """
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    launched: list[tuple[str, Any]] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        launched.append((self.__name__.removesuffix("_kernel"), kernel))
        return kernel

    driver.set_active(_Driver(capability))
    with patch.object(JITFunction, "run", compile_only):
        yield launched


def launch_all(dtype: torch.dtype) -> None:
    """Launch every kernel with tensors that have shapes but no memory."""
    from vlora.kernels.gpu import draws, launch

    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def numbers(*shape: int) -> torch.Tensor:
        return empty(*shape, dtype=torch.int32)

    fp32, fp64 = torch.float32, torch.float64
    rows, qkv = empty(ROWS, HIDDEN), empty(ROWS, (HEADS + 2 * KV_HEADS) * DIM)
    hidden, norm = empty(ROWS, HIDDEN, dtype=fp32), empty(HIDDEN, dtype=fp32)
    launch.add_norm(rows, hidden, rows, norm, 1e-6)
    head_weight = empty(DIM, dtype=fp32)
    launch.head_norm(qkv, head_weight, head_weight, HEADS, KV_HEADS, 1e-6)
    launch.gate(empty(ROWS, INNER), empty(ROWS, 2 * INNER))
    launch.embed(hidden, numbers(ROWS), empty(VOCABULARY, HIDDEN), numbers(ROWS), hidden)
    cache = empty(1000, 2, KV_HEADS, PAGE, DIM)
    keys, values = cache[:, 0], cache[:, 1]
    angles = empty(ROWS, DIM // 2, dtype=fp32)
    launch.rotate(qkv, keys, values, angles, angles, numbers(ROWS), HEADS, DIM)
    out, tables = empty(ROWS, HEADS * DIM), numbers(ROWS, MAX_PAGES)
    normed = launch.Rotation(angles, angles, (head_weight, head_weight, 1e-6))
    for splits in (1, SPLITS):
        counters = numbers(ROWS * KV_HEADS)
        contexts = launch.DecodeRows(numbers(ROWS), numbers(ROWS), tables, counters, splits)
        for rotation in (None, launch.Rotation(angles, angles), normed):
            launch.decode(out, qkv, keys, values, contexts, HEADS, DIM, rotation)
    launch.prefill(out, qkv, keys, values, numbers(ROWS, 4), tables, HEADS, DIM)
    logits = empty(ROWS, VOCABULARY, dtype=fp32)
    draws.argmax(logits)
    floats, doubles = empty(ROWS, dtype=fp32), empty(ROWS, dtype=fp64)
    parameters = draws.Draws(numbers(ROWS), numbers(ROWS), floats, floats, doubles, doubles)
    draws.draw(logits, parameters)


def compile_all(dtypes: list[str]) -> list[Compiled]:
    """Return the resources of the variant with the most registers of every kernel."""
    found: dict[tuple[str, int, str], Compiled] = {}
    for capability in TARGETS:
        for name in dtypes:
            with compiling_for(capability) as launched:
                launch_all(DTYPES[name])
            for kernel, binary in launched:
                resources = _resources(kernel, capability, name, binary)
                key = kernel, capability, name
                if key not in found or found[key].registers < resources.registers:
                    found[key] = resources
    return list(found.values())


def _resources(kernel: str, capability: int, dtype: str, binary: Any) -> Compiled:
    import triton

    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        command = [cuobjdump, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    spills, meta = usage["STACK"] + usage["LOCAL"], binary.metadata
    return Compiled(kernel, capability, dtype, meta.num_warps, usage["REG"], spills, meta.shared)


def table(compiled: list[Compiled]) -> str:
    """Return a table in Markdown: registers and shared memory (KiB) by target, and warps."""
    columns = "kernel | type | warps | registers sm_80 / sm_90 | shared KiB sm_80 / sm_90 | spills"
    lines = [f"| {columns} |", "|---" * 6 + "|"]
    by_key = {(c.kernel, c.dtype, c.target): c for c in compiled}
    for kernel, dtype in dict.fromkeys((c.kernel, c.dtype) for c in compiled):
        both = [by_key[kernel, dtype, target] for target in TARGETS]
        registers = " / ".join(str(c.registers) for c in both)
        shared = " / ".join(f"{c.shared / 1024:.1f}" for c in both)
        spills = max(c.spills for c in both)
        lines.append(
            f"| {kernel} | {dtype} | {both[0].warps} | {registers} | {shared} | {spills} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.gpu.compile_check", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="file of the figures")
    types = ",".join(DTYPES)
    parser.add_argument("--types", default=types, help="rows and weights (default: %(default)s)")
    options = parser.parse_args()
    os.environ |= {"TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1"}
    os.environ.setdefault("TRITON_CACHE_DIR", str(Path("build", "gpu-check").resolve()))
    try:
        import triton  # noqa: F401
    except ImportError:
        sys.exit("the package 'triton' is not installed; install the extra 'gpu-check'")
    compiled = compile_all(options.types.split(","))
    print(table(compiled))
    if options.json:
        options.json.write_text(json.dumps([asdict(c) for c in compiled], indent=1) + "\n")
    if faults := [c.fault for c in compiled if c.fault]:
        sys.exit("\n".join(faults))


if __name__ == "__main__":
    main()
