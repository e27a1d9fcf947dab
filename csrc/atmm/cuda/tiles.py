"""CUDA tile configurations to compile, enumerated and pruned without a GPU.

The rules are hardware limits and constraints of CUTLASS. Nothing is compiled or measured here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

# Paper, §4.3.2: every dimension of a tile is a power of two and at least 16.
SIDES = (16, 32, 64, 128, 256)
WARP = 32
# Maximum number of warps of a block. A thread of a larger block has fewer than 255 registers.
MAX_WARPS = 8
# Shared memory in bytes that a block may use on sm_80; sm_90 has more (227 KiB).
SHARED_BYTES = 163 * 1024
# Maximum number of a thread's 255 registers that are accumulators. The others hold double-buffered
# fragments and addresses (appendix A).
ACCUMULATORS_PER_THREAD = 128
# Maximum number of accumulators of a tile of depth 64. Its loop over the depth is unrolled twice as
# far as that of depth 32. With 128 accumulators, nvcc 13.0 spilled up to 236 bytes per thread of an
# expand, and up to 32 bytes per thread of a shrink.
ACCUMULATORS_AT_DEPTH_64 = 64
ELEMENT_BYTES = 2
ACCESS_ELEMENTS = 8  # Number of elements that a thread moves with one cp.async, 16 bytes.
# Depths that CUTLASS's swizzled shared-memory layouts support for 16-bit operands.
DEPTHS = (32, 64)
# Minimum numbers of rows and columns of a warp tile. With 16 columns there is no valid 16-bit
# epilogue.
NARROWEST_WARP = (16, 32)
# Numbers of pipeline stages. Shrink runs over d_in (thousands), so deep pipelines are faster.
# Expand runs over the rank in one to four iterations, which more than three stages would never
# fill.
STAGES = {"shrink": (3, 4), "expand": (2, 3)}
# Maximum number of columns of a shrink tile. The columns are ranks; above 128, two tiles are used.
WIDEST_SHRINK = 128
# Maximum ratio of the sides of a block or warp tile. Beyond it, loads per multiply-add grow.
LARGEST_RATIO = 4
# Maximum side of a warp tile. A 64×64 tile uses each loaded element for 64 multiply-adds.
WIDEST_WARP = 64
KINDS = ("shrink", "expand")


@dataclass(frozen=True, order=True)
class CudaTile:
    """Tile sizes (rows, columns, depth) of thread block and warp, and pipeline stages."""

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
        """Return the template arguments for `vlora::Grouped`."""
        return ", ".join(map(str, (*self.block, *self.warp, self.stages)))


def why_not(tile: CudaTile, kind: str) -> str | None:
    """Return the first limit that the tile exceeds, or None if it is worth compiling."""
    rows, columns, depth = tile.block
    warp_rows, warp_columns, warp_depth = tile.warp
    if warp_rows > rows or warp_columns > columns:
        return "the warp tile is larger than the block tile"
    if warp_depth != depth:
        return "slicing depth across warps needs a reduction through shared memory"
    if depth not in DEPTHS:
        return "there is no shared-memory layout for this depth"
    if warp_rows < NARROWEST_WARP[0] or warp_columns < NARROWEST_WARP[1]:
        return "no valid epilogue"
    if tile.warps > MAX_WARPS:
        return "too many warps"
    if tile.accumulators > ACCUMULATORS_PER_THREAD:
        return "too many registers"
    if depth == 64 and tile.accumulators > ACCUMULATORS_AT_DEPTH_64:
        return "too many registers for this depth"
    if tile.shared_bytes > SHARED_BYTES:
        return "it needs too much shared memory"
    for side in (rows, columns):
        if side * depth // ACCESS_ELEMENTS % tile.threads:
            return "some threads would have nothing to load"
    if _ratio(rows, columns) > LARGEST_RATIO or _ratio(warp_rows, warp_columns) > LARGEST_RATIO:
        return "too narrow"
    if max(warp_rows, warp_columns) > WIDEST_WARP:
        return "a block of this size needs more warps"
    if kind == "shrink" and columns > WIDEST_SHRINK:
        return "it is wider than any rank"
    if tile.warps == 1 and rows * columns > 32 * 64:
        return "one warp cannot hide the loads of a block of this size"
    return None


def tiles(kind: str) -> list[CudaTile]:
    """Return the tiles to compile for "shrink" or "expand".

    Any prefix of the list covers small, medium and large blocks, so that a build of few instances
    is useful.
    """
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
    """Return one tile for each block shape: the tile whose warps load least from shared memory.

    If the warp shape is also equal, the tile with the most stages is returned for depth 32. For
    depth 64, it is the one with the fewest, each of which holds more of the depth.
    """
    best: dict[tuple[int, int, int], list[CudaTile]] = {}
    for tile in found:
        best.setdefault(tile.block, []).append(tile)
    return [
        min(
            group,
            key=lambda tile: (
                (1 / tile.warp[0] + 1 / tile.warp[1]) * (1.5 if tile.warps < 2 else 1.0),
                tile.warp,
                -tile.stages if tile.block[2] == DEPTHS[0] else tile.stages,
            ),
        )
        for group in best.values()
    ]


def _spread(ordered: list[CudaTile]) -> list[CudaTile]:
    """Return the list in another order: smallest, largest, middle, then the middles of the rest."""
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
