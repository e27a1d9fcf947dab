"""The CUDA tiles: pruned by arithmetic here, compiled where nvcc is, run where a GPU is."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest
import torch

from tools.tile_search import cuda_build, cuda_library
from tools.tile_search.cuda_build import BuildError
from tools.tile_search.cuda_library import ROWS, CudaLibrary, Operator
from tools.tile_search.cuda_tiles import KINDS, SHARED_BYTES, SIDES, CudaTile, tiles, why_not

GPU_REASON = "no GPU here: ATMM for CUDA is compiled, not run"
PUNICA = CudaTile((16, 64, 64), (16, 16, 64), 3)


@pytest.mark.parametrize("kind", KINDS)
def test_every_tile_is_made_of_powers_of_two_from_16(kind: str) -> None:
    assert tiles(kind)
    for tile in tiles(kind):
        assert set(tile.block + tile.warp) <= set(SIDES)


@pytest.mark.parametrize("kind", KINDS)
def test_every_tile_fits_the_shared_memory_and_registers_of_sm_80(kind: str) -> None:
    for tile in tiles(kind):
        assert tile.shared_bytes <= SHARED_BYTES
        assert tile.accumulators <= 128
        assert tile.threads <= 256


def test_tiles_without_a_valid_epilogue_are_pruned() -> None:
    assert why_not(PUNICA, "expand") == "no valid epilogue"


def test_the_paper_s_two_configurations_are_legal() -> None:
    assert why_not(CudaTile((64, 32, 32), (32, 32, 32), 3), "expand") is None
    assert why_not(CudaTile((64, 64, 64), (32, 64, 64), 2), "expand") is None


def test_a_build_of_few_instances_serves_both_kinds_and_both_types() -> None:
    few = cuda_build.instances(10)
    assert len(few) == 10
    assert {(one.kind, one.dtype) for one in few} == {
        (kind, dtype) for kind in KINDS for dtype in ("fp16", "bf16")
    }
    assert len({one.name for one in cuda_build.instances()}) == len(cuda_build.instances())


def test_the_registry_lists_the_instances_in_order() -> None:
    few = cuda_build.instances(3)
    text = cuda_build.registry(few)
    listed = text[text.index("kTable[] =") :]
    places = [listed.index(one.name) for one in few]
    assert places == sorted(places)


def test_headers_that_are_not_there_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLORA_CUTLASS", str(tmp_path))
    with pytest.raises(BuildError, match="no CUTLASS headers"):
        cuda_build.find_headers()


@pytest.fixture(scope="session")
def library() -> CudaLibrary:
    """The library that `make cuda` built."""
    if not cuda_build.LIBRARY.exists():
        pytest.skip("ATMM for CUDA is not built here: `make cuda` (needs nvcc)")
    return CudaLibrary()


def test_the_library_loads_without_a_gpu_and_knows_its_tiles(library: CudaLibrary) -> None:
    found = library.tiles()
    assert {tile.kind for tile in found} == set(KINDS)
    for tile in found:
        legal = CudaTile(_three(tile.block), _three(tile.warp), tile.stages)
        assert why_not(legal, tile.kind) is None
        assert tile.threads == legal.threads
        # The pruning's arithmetic bounds what CUTLASS really takes (its scheduler adds a little).
        assert tile.shared_bytes <= SHARED_BYTES + 1024


def test_a_wrong_call_is_refused_before_a_device_is_touched(library: CudaLibrary) -> None:
    assert library.refusal(None) == "a null argument"
    assert "max_rank" in library.refusal(cuda_library._Call(rows=1, d_in=8))
    assert "projection_count 0" in library.refusal(
        cuda_library._Call(rows=1, d_in=8, max_rank=8, projection_count=0)
    )


def test_the_structures_have_the_size_that_c_gives_them() -> None:
    assert ctypes.sizeof(cuda_library._Adapter) == 24
    assert ctypes.sizeof(cuda_library._Projection) == 32
    assert ctypes.sizeof(cuda_library._Call) == 48 + 4 * 32 + 8 + 16
    assert ctypes.sizeof(cuda_library._Tile) == 11 * 4


# ---- on a GPU -------------------------------------------------------------------------------

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason=GPU_REASON)
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
TOLERANCE = {"float16": 4e-3, "bfloat16": 3e-2}
"""Of the largest true value: the intermediate and y are rounded to the storage type."""


@gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", [(1,) * 9, (1, 0, 17, 128, 3), (512,)])
def test_every_tile_equals_float64(
    library: CudaLibrary, dtype: str, lengths: tuple[int, ...]
) -> None:
    case = _Case(lengths, dtype, d_in=1032, widths=(520, 264))
    for shrink, expand, slices in _choices(library, dtype):
        case.run(library, shrink, expand, slices)
        case.check(TOLERANCE[dtype])


@gpu
def test_a_replayed_graph_serves_other_segments(library: CudaLibrary) -> None:
    case = _Case((5, 9, 2), "bfloat16", d_in=256, widths=(256,))
    shrink, expand, _ = next(iter(_choices(library, "bfloat16", rows=False)))
    operator = case.operator(library, 2)
    operator(shrink, expand)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        operator(shrink, expand)
    case.reset((1, 1, 14), order=(2, 0, 1))
    graph.replay()
    torch.cuda.synchronize()
    case.check(TOLERANCE["bfloat16"])


@gpu
@pytest.mark.parametrize("rows", [True, False])
def test_a_nan_in_one_adapter_stays_in_its_rows(library: CudaLibrary, rows: bool) -> None:
    case = _Case((3, 1, 30), "float16", d_in=256, widths=(256,))
    case.pairs[0][1][0][:] = float("nan")
    choice = next(c for c in _choices(library, "float16") if (c[0] == ROWS) is rows)
    case.run(library, *choice)
    bad = case.ys[0].isnan().any(dim=1)
    own = torch.zeros_like(bad)
    for start, length, slot, _ in case.segments.tolist():
        if slot == 1:
            own[start : start + length] = True
    assert torch.equal(bad, own)


@gpu
def test_unaligned_rows_are_refused_by_tiles_and_served_by_the_row_kernels(
    library: CudaLibrary,
) -> None:
    case = _Case((1, 1, 4), "float16", d_in=250, widths=(131,))
    shrink, expand, _ = next(iter(_choices(library, "float16", rows=False)))
    with pytest.raises(RuntimeError, match="not a multiple of 16 bytes"):
        case.run(library, shrink, expand, 1)
    case.run(library, ROWS, ROWS, 1)
    case.check(TOLERANCE["float16"])


@gpu
def test_heads_shrink_only_in_fp32(library: CudaLibrary) -> None:
    case = _Case((2, 7), "bfloat16", d_in=512, widths=(64,))
    shrink, _, _ = next(iter(_choices(library, "bfloat16", rows=False)))
    scores = torch.zeros(case.x.shape[0], 64, device="cuda")
    operator = Operator(
        library, case.x, case.segments, [(scores, case.pairs[0])], slices=2, shrink_only=True
    )
    operator(shrink, ROWS)
    for start, length, slot, sign in case.segments.tolist():
        pair = case.pairs[0][slot]
        rows = slice(start, start + length)
        want = sign * (case.x[rows].double() @ pair[0].double().T)
        torch.testing.assert_close(
            scores[rows, : want.shape[1]].double(), want, rtol=1e-4, atol=1e-3
        )


class _Case:
    """Fresh random data of mixed ranks and signs, and what float64 makes of it."""

    def __init__(
        self, lengths: tuple[int, ...], dtype: str, d_in: int, widths: tuple[int, ...]
    ) -> None:
        generator = torch.Generator().manual_seed(int.from_bytes(os.urandom(4), "big"))

        def draw(*shape: int) -> torch.Tensor:
            values = torch.randn(*shape, generator=generator)
            return (values / shape[-1] ** 0.5).to("cuda", DTYPES[dtype])

        ranks = (8, 64, 16, 128, 32)
        self.pairs = [[(draw(r, d_in), draw(w, r)) for r in ranks] for w in widths]
        rows = sum(lengths)
        self.x = draw(rows, d_in) * d_in**0.5
        self.before = [draw(rows, w) for w in widths]
        self.ys = [y.clone() for y in self.before]
        self.segments = torch.zeros(len(lengths), 4, dtype=torch.int32, device="cuda")
        self.reset(lengths)

    def reset(self, lengths: tuple[int, ...], order: tuple[int, ...] | None = None) -> None:
        start, rows = 0, []
        for i, length in enumerate(lengths):
            slot = order[i] if order else i % len(self.pairs[0])
            rows.append((start, length, slot, -1 if i % 3 == 1 else 1))
            start += length
        self.segments.copy_(torch.tensor(rows, dtype=torch.int32))
        for y, before in zip(self.ys, self.before, strict=True):
            y.copy_(before)

    def operator(self, library: CudaLibrary, slices: int) -> Operator:
        projections = list(zip(self.ys, self.pairs, strict=True))
        return Operator(library, self.x, self.segments, projections, slices=slices)

    def run(self, library: CudaLibrary, shrink: int, expand: int, slices: int) -> None:
        for y, before in zip(self.ys, self.before, strict=True):
            y.copy_(before)
        self.operator(library, slices)(shrink, expand)
        torch.cuda.synchronize()

    def check(self, tolerance: float) -> None:
        for y, before, pairs in zip(self.ys, self.before, self.pairs, strict=True):
            want = before.double()
            for start, length, slot, sign in self.segments.tolist():
                rows = slice(start, start + length)
                a, b = (part.double() for part in pairs[slot])
                want[rows] += sign * (self.x[rows].double() @ a.T) @ b.T
            error = (y.double() - want).abs().max() / want.abs().max()
            assert error < tolerance


def _choices(library: CudaLibrary, dtype: str, rows: bool = True) -> list[tuple[int, int, int]]:
    """(shrink, expand, slices): each tile of the type at least once."""
    found = [tile for tile in library.tiles() if tile.dtype == dtype]
    shrinks = [tile.index for tile in found if tile.kind == "shrink"]
    expands = [tile.index for tile in found if tile.kind == "expand"]
    count = max(len(shrinks), len(expands))
    chosen = [
        (shrinks[i % len(shrinks)], expands[i % len(expands)], (1, 2, 7)[i % 3])
        for i in range(count)
    ]
    return [(ROWS, ROWS, 1), *chosen] if rows else chosen


def _three(shape: tuple[int, ...]) -> tuple[int, int, int]:
    rows, columns, depth = shape
    return rows, columns, depth
