"""The CUDA tile configurations worth compiling: enumerated, then pruned without a GPU.

Knows hardware limits and CUTLASS's constraints; nothing of compilers or measurements.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

# Of the paper (§4.3.2): every dimension of a tile is a power of two and at least 16.
SIDES = (16, 32, 64, 128, 256)

WARP = 32
MAX_WARPS = 8
"""Blocks above 256 threads leave under 255 registers a thread on sm_80 with two blocks an SM."""

SHARED_BYTES = 163 * 1024
"""Shared memory one block may use on sm_80; sm_90 has 227 KiB, so what fits here fits there."""

ACCUMULATORS_PER_THREAD = 128
"""Of 255 registers; double-buffered fragments and addresses take the rest (appendix A)."""

ELEMENT_BYTES = 2
ACCESS_ELEMENTS = 8
"""cp.async moves 16 bytes a thread."""

DEPTHS = (32, 64)
"""CUTLASS's shared-memory layouts for 16-bit operands swizzle 32 or 64 elements of depth."""

NARROWEST_WARP = (16, 32)
"""Rows and columns; a warp of 16 columns has no valid 16-bit epilogue (16×64×64 with 16×16×64)."""

STAGES = {"shrink": (3, 4), "expand": (2, 3)}
"""Shrink runs over d_in (thousands): deep pipelines pay. Expand's depth is the rank: one to four
steps, so more than three stages would never fill."""

WIDEST_SHRINK = 128
"""Shrink's columns are the rank; ranks above 128 take two tiles."""

LARGEST_RATIO = 4
"""Of a block's sides and of a warp's: beyond it, loads per multiply-add grow for nothing."""

WIDEST_WARP = 64
"""Of either side; 64×64 already reads each operand element for 64 multiply-adds."""

KINDS = ("shrink", "expand")


@dataclass(frozen=True, order=True)
class CudaTile:
    """(rows, columns, depth) of the thread block and of the warp, and the pipeline's stages."""

    block: tuple[int, int, int]
    warp: tuple[int, int, int]
    stages: int

    @property
    def warps(self) -> int:
        return (self.block[0] // self.warp[0]) * (self.block[1] // self.warp[1])

    @property
    def threads(self) -> int:
        return WARP * self.warps

    @property
    def shared_bytes(self) -> int:
        return (self.block[0] + self.block[1]) * self.block[2] * ELEMENT_BYTES * self.stages

    @property
    def accumulators(self) -> int:
        return self.warp[0] * self.warp[1] // WARP

    def arguments(self) -> str:
        """As template arguments of `vlora::Grouped`."""
        return ", ".join(map(str, (*self.block, *self.warp, self.stages)))


def why_not(tile: CudaTile, kind: str) -> str | None:
    """The first limit that the tile breaks, or None if it is worth compiling."""
    rows, columns, depth = tile.block
    warp_rows, warp_columns, warp_depth = tile.warp
    if warp_rows > rows or warp_columns > columns:
        return "the warp tile is larger than the block's"
    if warp_depth != depth:
        return "slicing depth across warps needs a reduction through shared memory"
    if depth not in DEPTHS:
        return "no shared-memory layout for this depth"
    if warp_rows < NARROWEST_WARP[0] or warp_columns < NARROWEST_WARP[1]:
        return "no valid epilogue"
    if tile.warps > MAX_WARPS:
        return "too many warps"
    if tile.accumulators > ACCUMULATORS_PER_THREAD:
        return "too many registers"
    if tile.shared_bytes > SHARED_BYTES:
        return "too much shared memory"
    for side in (rows, columns):
        if side * depth // ACCESS_ELEMENTS % tile.threads:
            return "some threads would have nothing to load"
    if _ratio(rows, columns) > LARGEST_RATIO or _ratio(warp_rows, warp_columns) > LARGEST_RATIO:
        return "too narrow"
    if max(warp_rows, warp_columns) > WIDEST_WARP:
        return "too few warps for a block this large"
    if kind == "shrink" and columns > WIDEST_SHRINK:
        return "wider than any rank"
    if tile.warps == 1 and rows * columns > 32 * 64:
        return "one warp cannot hide the loads of a block this large"
    return None


def tiles(kind: str) -> list[CudaTile]:
    """The tiles to compile for "shrink" or "expand", spread first: any prefix covers small,
    middle and large blocks, so that a build of few instances is still a choice."""
    kept = [tile for tile in _all(kind) if why_not(tile, kind) is None]
    kept = _one_warp_shape_per_block(kept)
    kept.sort(key=lambda tile: (tile.block[0] * tile.block[1], tile.block, tile.stages))
    return _spread(kept)


def _all(kind: str) -> Iterator[CudaTile]:
    for block in itertools.product(SIDES, SIDES, SIDES):
        for warp in itertools.product(SIDES, SIDES):
            for stages in STAGES[kind]:
                yield CudaTile(block, (*warp, block[2]), stages)


def _ratio(a: int, b: int) -> float:
    return max(a, b) / min(a, b)


def _one_warp_shape_per_block(found: list[CudaTile]) -> list[CudaTile]:
    """For each block the warp shape that loads least from shared memory, with the most stages
    that its depth allows in turn: 64 deep fills with one stage less than 32 deep."""
    best: dict[tuple[int, int, int], list[CudaTile]] = {}
    for tile in found:
        best.setdefault(tile.block, []).append(tile)
    return [
        min(
            group,
            key=lambda tile: (
                _operand_loads(tile),
                tile.warp,
                -tile.stages if tile.block[2] == DEPTHS[0] else tile.stages,
            ),
        )
        for group in best.values()
    ]


def _operand_loads(tile: CudaTile) -> float:
    """Elements read from shared memory per multiply-add, times the cost of too few warps."""
    loads = 1 / tile.warp[0] + 1 / tile.warp[1]
    return loads * (1.5 if tile.warps < 2 else 1.0)


def _spread(ordered: list[CudaTile]) -> list[CudaTile]:
    """Smallest, largest, middle, then the middles of what is left."""
    picked: list[int] = []
    spans = [(0, len(ordered) - 1)]
    if ordered:
        picked = [0] if len(ordered) == 1 else [0, len(ordered) - 1]
    while spans:
        first, last = spans.pop(0)
        if last - first < 2:
            continue
        middle = (first + last) // 2
        picked.append(middle)
        spans += [(first, middle), (middle, last)]
    return [ordered[i] for i in picked]
