"""Test that every GPU kernel compiles for sm_80 and sm_90 within the limits of a block.

No GPU is needed. Run as a program, this file compiles the kernels and prints what each needs, with
the shapes of Qwen2-VL-7B.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

ROOT = Path(__file__).parents[3]
TARGETS = {80: 163 << 10, 90: 227 << 10}
"""Compute capabilities, and the bytes of shared memory that a block may have on each."""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
MAX_REGISTERS = 255
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

# Shapes of Qwen2-VL-7B, with pages of 16 tokens.
HIDDEN, INNER, HEADS, KV_HEADS, DIM, VOCABULARY = 3584, 18944, 28, 4, 128, 152064
PAGE, ROWS, MAX_PAGES, SPLITS = 16, 64, 2048, 8


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("triton"), reason="needs 'triton' (extra 'gpu-check')")
def test_every_kernel_spills_nothing_and_fits_shared_memory() -> None:
    settings = {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "TRITON_INTERPRET": "0",
        "TRITON_DEFAULT_FP_FUSION": "1",
        "TRITON_CACHE_DIR": str(ROOT / "build" / "gpu-check"),
    }
    done = subprocess.run(
        [sys.executable, __file__], env=os.environ | settings, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    compiled = [json.loads(line) for line in done.stdout.splitlines()]
    assert {(one["kernel"], one["target"], one["dtype"]) for one in compiled} == {
        (kernel, target, dtype) for kernel in KERNELS for target in TARGETS for dtype in DTYPES
    }
    for one in compiled:
        assert one["spills"] == 0, one
        assert one["registers"] <= MAX_REGISTERS, one
        assert one["shared"] <= TARGETS[one["target"]], one


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


def compiled_kernels(capability: int, dtype: torch.dtype) -> Iterator[tuple[str, Any]]:
    """Yield each variant of a kernel that is launched, by its name.

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
        launch_all(dtype)
    yield from launched


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


def resources(binary: Any) -> dict[str, int]:
    """Return the registers of a kernel, and its spills and shared memory in bytes."""
    import triton

    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        command = [cuobjdump, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    spills = usage["STACK"] + usage["LOCAL"]
    return {"registers": usage["REG"], "spills": spills, "shared": binary.metadata.shared}


if __name__ == "__main__":
    for capability in TARGETS:
        for name, dtype in DTYPES.items():
            for kernel, binary in compiled_kernels(capability, dtype):
                found = {"kernel": kernel, "target": capability, "dtype": name}
                print(json.dumps(found | resources(binary)))
