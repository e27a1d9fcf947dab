"""Tests of CUDA tiles: pruned by arithmetic, compiled where nvcc is available, used on a device."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from csrc.atmm.cuda import build as cuda_build
from csrc.atmm.cuda.build import BuildError
from csrc.atmm.cuda.tiles import KINDS, SHARED_BYTES, SIDES, CudaTile, tiles, why_not
from vlora.atmm.cuda.library import Library, LoadedTile

REGISTERS = 65536
"""Registers of a multiprocessor, for both sm_80 and sm_90; one thread may have 255."""
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024}
"""Maximum shared memory of one block in bytes."""
TOO_MANY_REGISTERS = "too many registers for this depth"
Sides = tuple[int, int, int]


@pytest.mark.parametrize("kind", KINDS)
def test_every_tile_is_made_of_powers_of_two_from_16_and_fits_sm_80(kind: str) -> None:
    assert tiles(kind)
    for tile in tiles(kind):
        assert set(tile.block + tile.warp) <= set(SIDES)
        assert tile.shared_bytes <= SHARED_BYTES
        assert tile.accumulators <= 128
        assert tile.threads <= 256


@pytest.mark.parametrize(
    ("block", "warp", "stages", "kind", "reason"),
    [
        ((16, 64, 64), (16, 16, 64), 3, "expand", "no valid epilogue"),  # Punica's
        # Tiles of depth 64 keep registers for their addresses.
        *(((64, 128, 64), (64, 64, 64), 3, kind, TOO_MANY_REGISTERS) for kind in KINDS),
        *(((64, 128, 64), (32, 64, 64), 3, kind, None) for kind in KINDS),
        *(((64, 128, 32), (64, 64, 32), 3, kind, None) for kind in KINDS),
        # Both configurations of the paper.
        ((64, 32, 32), (32, 32, 32), 3, "expand", None),
        ((64, 64, 64), (32, 64, 64), 2, "expand", None),
    ],
)
def test_tiles_are_pruned_for_a_reason(
    block: Sides, warp: Sides, stages: int, kind: str, reason: str | None
) -> None:
    assert why_not(CudaTile(block, warp, stages), kind) == reason


def test_a_build_of_few_instances_serves_both_kinds_and_both_types() -> None:
    instances = cuda_build.instances(10)
    assert len(instances) == 10
    assert {(tile.kind, tile.dtype) for tile in instances} == {
        (kind, dtype) for kind in KINDS for dtype in ("fp16", "bf16")
    }
    assert len({tile.name for tile in cuda_build.instances()}) == len(cuda_build.instances())
    text = cuda_build.registry(instances)
    listed = text[text.index("kTable[] =") :]
    positions = [listed.index(tile.name) for tile in instances]
    assert positions == sorted(positions)


def test_missing_headers_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLORA_CUTLASS", str(tmp_path))
    with pytest.raises(BuildError, match="CUTLASS headers are missing"):
        cuda_build.find_headers()


@pytest.fixture(scope="session")
def library() -> Library:
    """Return the library that `make cuda` built."""
    if not cuda_build.LIBRARY.exists():
        pytest.skip("ATMM for CUDA is not built here: `make cuda` (needs nvcc)")
    return Library(cuda_build.LIBRARY)


def test_the_library_loads_without_a_gpu_and_knows_its_tiles(library: Library) -> None:
    assert {tile.kind for tile in library.tiles} == set(KINDS)
    for tile in library.tiles:
        legal = CudaTile(tile.block, tile.warp, tile.stages)
        assert why_not(legal, tile.kind) is None
        assert tile.threads == legal.threads


def test_every_kernel_fits_the_registers_and_shared_memory_of_its_architecture(
    library: Library,
) -> None:
    by_unit = {f"{tile.kind}_{tile.dtype}_{tile.name}": tile for tile in library.tiles}
    kernels = json.loads((cuda_build.BUILD / cuda_build.RESOURCES).read_text())
    assert {kernel["unit"] for kernel in kernels} >= {*by_unit, "rows", "plan", "merge"}
    for kernel in kernels:
        tile: LoadedTile | None = by_unit.get(kernel["unit"])
        threads = 256 if tile is None else tile.threads
        shared = kernel["shared"] + (0 if tile is None else tile.shared_bytes)
        assert kernel["registers"] <= 255, kernel
        assert kernel["registers"] * threads <= REGISTERS, kernel
        assert shared <= SHARED_LIMIT[kernel["sm"]], kernel
        assert kernel["spill_stores"] == kernel["spill_loads"] == 0, kernel
        assert kernel["stack"] == 0, kernel


def test_ptxas_reports_are_read_kernel_by_kernel() -> None:
    said = """ptxas info    : 11 bytes gmem
ptxas info    : Compiling entry function '_Z4plan' for 'sm_80'
ptxas info    : Function properties for _Z4plan
    16 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 39 registers, used 1 barriers, 16 bytes cumulative stack size, 8192 bytes smem
ptxas info    : Compiling entry function '_Z4plan' for 'sm_90'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 0 barriers
"""
    first, second = cuda_build.resources("plan", said)
    assert (first["sm"], first["registers"], first["shared"]) == (80, 39, 8192)
    assert (first["stack"], first["spill_stores"], first["spill_loads"]) == (16, 8, 4)
    assert (second["sm"], second["registers"], second["shared"]) == (90, 40, 0)


def test_the_library_contains_ptx_of_the_newest_architecture() -> None:
    assert cuda_build.gencode((90, 80)) == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_90,code=[sm_90,compute_90]",
    ]
