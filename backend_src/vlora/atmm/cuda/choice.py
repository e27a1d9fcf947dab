"""Choice of the kernels for a shape, from a table or by a cost estimate. Does not import torch.

The table is the hash table of the paper's Algorithm 2 (§4.3.2) for CUDA. Its keys are strings,
because the numeric keys of the CPU's tables need the compiled CPU core, which may be missing.

Tile kernels use tensor cores on tiles of at least 16 rows, row kernels compute a few rows each.
Both compute x Aᵀ first ("shrink") and multiply it by Bᵀ afterwards ("expand"). Different
multiprocessors can compute slices of the shrink's depth.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from vlora.atmm.cuda.library import MAX_SLICES, ROWS, Library, LoadedTile, TilesStruct

TABLE_VERSION = 2
# Name of a `KernelChoice`: the tile kernels, if any, and the row kernels.
NAME = re.compile(r"(?:(\S+) (\S+) s(\d+); up to (\d+) )?rows b(\d+) s(\d+)")
# Maximum number of rows of a segment that the row kernels compute in a call that also uses tile
# kernels. With so few rows, at least half of a tile of 16 rows would be padding, and memory traffic
# decides the time.
FEW_ROWS = 8
# Maximum number of rows of the longest segment in a call for which `built_in` chooses only row
# kernels, even if tensor cores can be used. Row kernels need one launch, tile kernels four. For 32
# rows, the row kernels read B eight times. The additional reads from L2 take as long as the three
# launches that are saved (at rank 64, for gate and up of a 7B model).
ONE_LAUNCH_ROWS = 32
# Maximum number of rows per segment at which a block of the row kernels computes one row instead of
# four.
PAIR_OF_ROWS = 2
# Number of ranks per block in the shrink of the row kernels (kRanksPerBlock in csrc/atmm/cuda).
RANKS_PER_BLOCK = 16
# Minimum depth of a slice in elements. At this depth, each thread of a warp makes two loads of 16
# bytes. Thinner slices spend most of their time on starting and ending.
MIN_DEPTH = 512
BLOCKS_PER_SM = 2  # Number of blocks per multiprocessor that `by_rows` aims for.
SLICES = (1, 2, 4, 8, 16, 32)
# The cost estimate that ranks tiles uses the next two constants. They describe one multiprocessor
# of an A100 or H100.
# Number of 16-bit multiply-adds that take as long as reading one byte from memory or L2.
MULTIPLY_ADDS_PER_BYTE = 32.0
STEPS_TO_FILL = 3.0  # Time until a block's pipeline is full, in steps of its loop over the depth.


@dataclass(frozen=True)
class Shape:
    """Shape of a call.

    dtype: type of the rows and weights: "fp16", "bf16" or "fp32".
    rows: number of rows of the longest segment.
    d_in: width of the input.
    d_out: sum of the widths of all projections.
    rank: largest rank of an adapter.
    segments: number of segments.
    projections: number of projections.
    """

    dtype: str
    rows: int
    d_in: int
    d_out: int
    rank: int
    segments: int
    projections: int = 1

    @property
    def key(self) -> str:
        """Key of the bucket of shapes: its upper ends, which are powers of two as on the CPU."""
        rows, rank = _bucket(self.rows, 1, 8192), _bucket(self.rank, 8, 1024)
        segments = _bucket(self.segments, 1, 256)
        return f"{self.dtype} n{rows} i{self.d_in} o{self.d_out} r{rank} s{segments}"


@dataclass(frozen=True)
class KernelChoice:
    """Kernels of a call: tile kernels for long segments and row kernels for short ones.

    shrink, expand: names of the tiles of the two products; None to use only row kernels.
    slices, row_slices: depth slices of the shrink by tile kernels and by row kernels.
    rows_up_to: maximum number of rows of a segment for which row kernels are used.
    row_block: number of rows per block of the row kernels.
    """

    shrink: str | None = None
    expand: str | None = None
    slices: int = 1
    rows_up_to: int = FEW_ROWS
    row_block: int = 1
    row_slices: int = 1

    @property
    def name(self) -> str:
        rows = f"rows b{self.row_block} s{self.row_slices}"
        if self.shrink is None:
            return rows
        return f"{self.shrink} {self.expand} s{self.slices}; up to {self.rows_up_to} {rows}"

    @classmethod
    def parse(cls, name: str) -> KernelChoice:
        """Return the choice with this `name`. Raise ValueError if the name is not valid."""
        match = NAME.fullmatch(name)
        if match is None:
            raise ValueError(f"{name!r} is not a configuration of ATMM for CUDA")
        shrink, expand, *numbers, block, row_slices = match.groups()
        rows = cls(row_block=int(block), row_slices=int(row_slices))
        if shrink is None:
            return rows
        slices, up_to = map(int, numbers)
        return replace(rows, shrink=shrink, expand=expand, slices=slices, rows_up_to=up_to)

    def on(self, library: Library, dtype: str) -> TilesStruct:
        """Return this choice for the C interface. Raises ValueError if the library lacks a tile."""
        shrink = _index(library, "shrink", dtype, self.shrink)
        expand = _index(library, "expand", dtype, self.expand)
        rows = (self.rows_up_to, self.row_block, self.row_slices)
        return TilesStruct(shrink, expand, self.slices, *rows)


def _index(library: Library, kind: str, dtype: str, name: str | None) -> int:
    if name is None:
        return ROWS
    tile = library.tiles_of(kind, dtype).get(name)
    if tile is None:
        raise ValueError(f"{library.path.name} has no {kind} tile {name} for {dtype}")
    return tile.index


def by_rows(shape: Shape, multiprocessors: int) -> KernelChoice:
    """Return a choice of row kernels only, with enough depth slices for every multiprocessor."""
    blocks = shape.segments * shape.projections * -(-shape.rank // RANKS_PER_BLOCK)
    wanted = BLOCKS_PER_SM * multiprocessors / blocks
    max_slices = max(1, shape.d_in // MIN_DEPTH)
    slices = max(s for s in SLICES if s == 1 or s <= min(max_slices, max(1.0, wanted)))
    return KernelChoice(row_block=1 if shape.rows <= PAIR_OF_ROWS else 4, row_slices=slices)


def built_in(
    shape: Shape, library: Library, multiprocessors: int, *, tensor_cores: bool
) -> KernelChoice:
    """Return the choice for a shape that no table contains.

    tensor_cores: whether tensor cores can be used, which needs a 16-bit type and rows aligned to 16
        bytes.
    """
    rows = by_rows(shape, multiprocessors)
    if not tensor_cores or shape.rows <= ONE_LAUNCH_ROWS:
        return rows
    shrinks = library.tiles_of("shrink", shape.dtype).values()
    expands = library.tiles_of("expand", shape.dtype).values()
    if not shrinks or not expands:
        return rows
    _, slices, shrink = min(
        (shrink_cost(shape, tile, slices, multiprocessors), slices, tile.name)
        for tile in shrinks
        for slices in SLICES
        if slices == 1 or shape.d_in // slices >= MIN_DEPTH // 2
    )
    expand = min(expands, key=lambda tile: (expand_cost(shape, tile, multiprocessors), tile.name))
    return replace(rows, shrink=shrink, expand=expand.name, slices=min(slices, MAX_SLICES))


def shrink_cost(shape: Shape, tile: LoadedTile, slices: int, multiprocessors: int) -> float:
    """Return the cost of a shrink in multiply-adds of one multiprocessor's tensor cores."""
    depth = -(-shape.d_in // slices)
    blocks = _blocks(shape.rows, shape.rank, tile) * slices * shape.projections
    # The result of each slice is written to memory and read again, in fp32.
    reduced = slices * shape.rows * shape.rank * shape.segments * shape.projections * 8
    return (
        _waves(blocks * shape.segments, multiprocessors) * _block_cost(tile, depth)
        + reduced * MULTIPLY_ADDS_PER_BYTE / multiprocessors
    )


def expand_cost(shape: Shape, tile: LoadedTile, multiprocessors: int) -> float:
    """Return the estimated cost of an expand with this tile, in the unit of `shrink_cost`."""
    blocks = _blocks(shape.rows, shape.d_out, tile) * shape.segments
    written = tile.block[0] * tile.block[1] * 4 * MULTIPLY_ADDS_PER_BYTE
    return _waves(blocks, multiprocessors) * (_block_cost(tile, shape.rank) + written)


def _blocks(rows: int, columns: int, tile: LoadedTile) -> int:
    return -(-rows // tile.block[0]) * -(-columns // tile.block[1])


def _waves(blocks: int, multiprocessors: int) -> int:
    return -(-blocks // multiprocessors)


def _block_cost(tile: LoadedTile, depth: int) -> float:
    rows, columns, step = tile.block
    steps = -(-depth // step) + STEPS_TO_FILL
    bytes_cost = (rows + columns) * step * 2 * MULTIPLY_ADDS_PER_BYTE
    return steps * max(rows * columns * step, bytes_cost)


class Table:
    """Kernel choices for one device. The keys are those of the shapes (`Shape.key`)."""

    def __init__(self, entries: Mapping[str, KernelChoice]) -> None:
        self._entries = dict(entries)

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, shape: Shape) -> KernelChoice | None:
        return self._entries.get(shape.key)

    @classmethod
    def load(cls, path: Path, library: Library) -> Table:
        """Return the table in a JSON file, without entries whose tiles the library lacks.

        Raises ValueError for an unsupported version.
        """
        table = json.loads(path.read_text())
        if table.get("version") != TABLE_VERSION:
            raise ValueError(f"{path} has version {table.get('version')}, not {TABLE_VERSION}")
        choices: dict[str, KernelChoice] = {}
        for key, entry in table["entries"].items():
            choice, dtype = KernelChoice.parse(entry["config"]), key.split()[0]
            tiles = {None, *library.tiles_of("shrink", dtype), *library.tiles_of("expand", dtype)}
            if {choice.shrink, choice.expand} <= tiles:
                choices[key] = choice
        return cls(choices)


def _bucket(value: int, minimum: int, maximum: int) -> int:
    return min(maximum, max(minimum, 1 << (max(1, value) - 1).bit_length()))
