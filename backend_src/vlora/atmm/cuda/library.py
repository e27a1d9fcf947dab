"""The CUDA library through ctypes, with raw pointers and without torch.

The structures mirror csrc/atmm/cuda/atmm_cuda.h. Loading the library needs no GPU, launching a
kernel does, except in the emulation, a build whose kernels run on the host.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

VERSION = 3
ROWS = -1  # Tile index that stands for the row kernels.
TYPES = {"fp16": 0, "bf16": 1, "fp32": 2}
MAX_PROJECTIONS = 8
MAX_WAVES = 8
MAX_SLICES = 32
FUSED_SEGMENTS = 1024  # Maximum number of segments for which the row kernels need only one launch.
# Size of a workspace's header in bytes. The header contains a fault code and counters. The caller
# sets the header to zero.
HEADER_BYTES = 32 + 4 * FUSED_SEGMENTS
# Multiple to which ranks are padded with zero rows, since tensor cores read 16 bytes at a time.
RANK_STEP = 8
ALIGNMENT = 16
ROW_BLOCKS = (1, 4)
NAME = "libvlora_atmm_cuda.so"
EMULATED = "libvlora_atmm_emulated.so"
VARIABLE = "VLORA_ATMM_CUDA"  # Environment variable with the path of the library.


def padded_rank(rank: int) -> int:
    """Return the rank that the kernels read: `rank` rounded up to a multiple of RANK_STEP."""
    return -(-rank // RANK_STEP) * RANK_STEP


def _pointers(*names: str) -> tuple[tuple[str, Any], ...]:
    return tuple((name, ctypes.c_void_p) for name in names)


def _int64(*names: str) -> tuple[tuple[str, Any], ...]:
    return tuple((name, ctypes.c_int64) for name in names)


def _int32(*names: str) -> tuple[tuple[str, Any], ...]:
    return tuple((name, ctypes.c_int32) for name in names)


class SegmentStruct(ctypes.Structure):
    _fields_ = _int32("start", "length", "slot", "sign")


class AdapterStruct(ctypes.Structure):
    _fields_ = (*_pointers("a", "b"), *_int64("rank"))


class ProjectionStruct(ctypes.Structure):
    _fields_ = (*_pointers("adapters", "y"), *_int64("ldy", "d_out"))


class CallStruct(ctypes.Structure):
    _fields_ = (
        *_pointers("x"),
        *_int64("ldx"),
        *_pointers("segments", "workspace"),
        *_int64("workspace_bytes"),
        *_int32("rows", "d_in", "slots", "max_rank", "type", "heads"),
        *_int32("shortest", "longest", "waves"),
        ("wave_end", ctypes.c_int32 * MAX_WAVES),
        *_int32("projection_count"),
        ("projections", ProjectionStruct * MAX_PROJECTIONS),
    )


class TilesStruct(ctypes.Structure):
    _fields_ = _int32("shrink", "expand", "slices", "rows_up_to", "row_block", "row_slices")


class TileStruct(ctypes.Structure):
    _fields_ = (
        ("block", ctypes.c_int32 * 3),
        ("warp", ctypes.c_int32 * 3),
        *_int32("stages", "type", "expand", "threads", "shared_bytes"),
    )


class MergeStruct(ctypes.Structure):
    _fields_ = (*_int64("offset", "d_out", "d_in", "rank"), *_pointers("a", "b"), *_int64("first"))


class MergeCallStruct(ctypes.Structure):
    _fields_ = (
        *_pointers("out", "base", "merges"),
        *_int64("blocks"),
        *_int32("count", "type", "sign"),
    )


# Structures in the order in which the C function `vlora_cuda_size_of` numbers them.
STRUCTURES = (
    SegmentStruct, AdapterStruct, ProjectionStruct, CallStruct, TilesStruct, TileStruct,
    MergeStruct, MergeCallStruct,
)  # fmt: skip


@dataclass(frozen=True)
class LoadedTile:
    """A tile configuration that the loaded library contains.

    index: number of the tile in the C interface.
    kind: "shrink" or "expand".
    block, warp: (rows, columns, depth) of the tile of a block and of a warp.
    stages: number of stages of the pipeline that loads operands.
    threads, shared_bytes: threads and shared memory of a block.
    """

    index: int
    kind: str
    dtype: str
    block: tuple[int, int, int]
    warp: tuple[int, int, int]
    stages: int
    threads: int
    shared_bytes: int

    @property
    def name(self) -> str:
        block, warp = ("x".join(map(str, shape)) for shape in (self.block, self.warp))
        return f"{block}_{warp}_{self.stages}"


class CudaError(RuntimeError):
    """Raised for a rejected call and for a failure of CUDA, with the library's message."""


class Library:
    """The loaded library.

    Raises OSError if it cannot be loaded, and CudaError if its interface has another version.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.emulated = path.name == EMULATED
        self._lib = lib = ctypes.CDLL(str(path))
        lib.vlora_cuda_workspace.restype = ctypes.c_int64
        lib.vlora_cuda_merge_blocks.restype = ctypes.c_int64
        lib.vlora_cuda_last_error.restype = ctypes.c_char_p
        lib.vlora_cuda_fault.restype = ctypes.c_char_p
        lib.vlora_cuda_fault.argtypes = (ctypes.c_uint64,)
        if (version := lib.vlora_cuda_version()) != VERSION:
            raise CudaError(
                f"{path} has interface version {version}, not {VERSION}: run `make cuda`"
            )
        sizes = [lib.vlora_cuda_size_of(i) for i in range(len(STRUCTURES))]
        if sizes != [ctypes.sizeof(structure) for structure in STRUCTURES]:
            raise CudaError(f"{path} has structures of {sizes} bytes: run `make cuda`")

    @cached_property
    def tiles(self) -> tuple[LoadedTile, ...]:
        tiles = []
        for index in range(self._lib.vlora_cuda_tiles()):
            tile = TileStruct()
            self._check(self._lib.vlora_cuda_tile(index, ctypes.byref(tile)))
            kind = "expand" if tile.expand else "shrink"
            dtype = next(name for name, code in TYPES.items() if code == tile.type)
            block: Any = tuple(tile.block)
            warp: Any = tuple(tile.warp)
            sizes = tile.stages, tile.threads, tile.shared_bytes
            tiles.append(LoadedTile(index, kind, dtype, block, warp, *sizes))
        return tuple(tiles)

    def tiles_of(self, kind: str, dtype: str) -> dict[str, LoadedTile]:
        """Return the tiles of this kind and type by name."""
        return {t.name: t for t in self.tiles if (t.kind, t.dtype) == (kind, dtype)}

    def warm_up(self) -> None:
        """Load all kernels on the current device, once per device, before any capture."""
        self._check(self._lib.vlora_cuda_warm_up())

    def arrange(
        self, segments: Sequence[tuple[int, int, int, int]]
    ) -> tuple[ctypes.Array[SegmentStruct], list[int]]:
        """Arrange segments (start, length, slot, sign) in waves of segments that share no rows.

        Returns an array that begins with the segments that are not empty, wave by wave, and the
        index after the last segment of each wave. Raises ValueError for rejected segments.
        """
        count = len(segments)
        structs = (SegmentStruct * count)(*(SegmentStruct(*segment) for segment in segments))
        out, ends = (SegmentStruct * count)(), (ctypes.c_int32 * count)()
        waves = self._lib.vlora_cuda_arrange(structs, count, out, ends)
        if waves < 0:
            raise ValueError(self.last_error)
        return out, list(ends[:waves])

    def workspace_bytes(self, call: CallStruct, tiles: TilesStruct) -> int:
        """Return the bytes of workspace that a call needs. Raises CudaError as `apply` would."""
        size = int(self._lib.vlora_cuda_workspace(ctypes.byref(call), ctypes.byref(tiles)))
        if size == 0:
            raise CudaError(f"ATMM for CUDA: {self.last_error}")
        return size

    def apply(self, call: CallStruct | None, tiles: TilesStruct, stream: int) -> None:
        """Launch the operator's kernels on a stream. Raises CudaError for a rejected call."""
        reference = None if call is None else ctypes.byref(call)
        self._check(
            self._lib.vlora_cuda_apply(reference, ctypes.byref(tiles), ctypes.c_void_p(stream))
        )

    def merge_blocks(self, merges: ctypes.Array[MergeStruct]) -> int:
        """Write the index of its first thread block into each merge. Return the total of blocks."""
        return int(self._lib.vlora_cuda_merge_blocks(merges, len(merges)))

    def merge(self, call: MergeCallStruct, stream: int) -> None:
        """Launch a merge on a stream. Raises CudaError if the library rejects the call."""
        self._check(self._lib.vlora_cuda_merge(ctypes.byref(call), ctypes.c_void_p(stream)))

    def fault(self, word: int) -> str:
        """Return the description of the fault in a workspace's first word; "" without one."""
        return str(self._lib.vlora_cuda_fault(word & (1 << 64) - 1).decode())

    @property
    def last_error(self) -> str:
        return str(self._lib.vlora_cuda_last_error().decode())

    def _check(self, code: int) -> None:
        if code:
            raise CudaError(f"ATMM for CUDA: {self.last_error}")


def find_library() -> Path:
    """Return $VLORA_ATMM_CUDA, or the library in the package or the build folder (`make cuda`).

    Raises ImportError, which names the searched paths, if there is no such file.
    """
    package = Path(__file__).resolve().parents[1]
    paths = [package / NAME, package.parents[2] / "build" / "cuda" / NAME]
    if configured := os.environ.get(VARIABLE):
        paths = [Path(configured)]
    for path in paths:
        if path.is_file():
            return path
    raise ImportError(f"ATMM for CUDA is not built (`make cuda`): no {', '.join(map(str, paths))}")
