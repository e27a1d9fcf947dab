"""The CUDA library through ctypes: raw pointers in, no torch needed to load it.

Mirrors csrc/atmm/cuda/atmm_cuda.h. Loading works on a machine without a GPU (the CUDA runtime is
linked in); calling anything that launches needs one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tools.tile_search.cuda_build import LIBRARY

if TYPE_CHECKING:
    import torch

VERSION = 1
ROWS = -1
"""As a tile index: the kernels for one row a segment."""
TYPES = {"float16": 0, "bfloat16": 1}
MAX_PROJECTIONS = 4
RANK_STEP = 8
"""Tensor cores read 16 bytes at a time; ranks are padded to this with zero rows."""


class _Adapter(ctypes.Structure):
    _fields_ = (("a", ctypes.c_void_p), ("b", ctypes.c_void_p), ("rank", ctypes.c_int64))


class _Projection(ctypes.Structure):
    _fields_ = (
        ("adapters", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("ldy", ctypes.c_int64),
        ("d_out", ctypes.c_int64),
    )


class _Call(ctypes.Structure):
    _fields_ = (
        ("x", ctypes.c_void_p),
        ("ldx", ctypes.c_int64),
        ("rows", ctypes.c_int32),
        ("d_in", ctypes.c_int32),
        ("slots", ctypes.c_int32),
        ("max_rank", ctypes.c_int32),
        ("segments", ctypes.c_void_p),
        ("capacity", ctypes.c_int32),
        ("projection_count", ctypes.c_int32),
        ("projections", _Projection * MAX_PROJECTIONS),
        ("type", ctypes.c_int32),
        ("shrink_only", ctypes.c_int32),
        ("workspace", ctypes.c_void_p),
        ("workspace_bytes", ctypes.c_int64),
    )


class _Tiles(ctypes.Structure):
    _fields_ = (
        ("shrink", ctypes.c_int32),
        ("expand", ctypes.c_int32),
        ("slices", ctypes.c_int32),
    )


class _Tile(ctypes.Structure):
    _fields_ = (
        ("block", ctypes.c_int32 * 3),
        ("warp", ctypes.c_int32 * 3),
        ("stages", ctypes.c_int32),
        ("type", ctypes.c_int32),
        ("expand", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("shared_bytes", ctypes.c_int32),
    )


@dataclass(frozen=True)
class LoadedTile:
    """One instance of the built library."""

    index: int
    kind: str
    dtype: str
    block: tuple[int, ...]
    warp: tuple[int, ...]
    stages: int
    threads: int
    shared_bytes: int


class CudaLibrary:
    """Raises OSError if the library cannot be loaded, RuntimeError if it is of another version."""

    def __init__(self, path: Path = LIBRARY) -> None:
        self._lib = ctypes.CDLL(str(path))
        self._lib.vlora_cuda_workspace.restype = ctypes.c_int64
        self._lib.vlora_cuda_last_error.restype = ctypes.c_char_p
        if (found := self._lib.vlora_cuda_version()) != VERSION:
            raise RuntimeError(f"{path} has interface {found}, not {VERSION}: run `make cuda`")

    def tiles(self) -> list[LoadedTile]:
        found = []
        for index in range(self._lib.vlora_cuda_tiles()):
            tile = _Tile()
            self._check(self._lib.vlora_cuda_tile(index, ctypes.byref(tile)))
            found.append(
                LoadedTile(
                    index,
                    "expand" if tile.expand else "shrink",
                    next(name for name, code in TYPES.items() if code == tile.type),
                    tuple(tile.block),
                    tuple(tile.warp),
                    tile.stages,
                    tile.threads,
                    tile.shared_bytes,
                )
            )
        return found

    def apply(self, call: _Call, shrink: int, expand: int, slices: int, stream: int) -> None:
        """Launch on the stream; raises RuntimeError with the library's own words."""
        tiles = _Tiles(shrink, expand, slices)
        self._check(
            self._lib.vlora_cuda_apply(
                ctypes.byref(call), ctypes.byref(tiles), ctypes.c_void_p(stream)
            )
        )

    def workspace_bytes(self, call: _Call, slices: int) -> int:
        return int(self._lib.vlora_cuda_workspace(ctypes.byref(call), slices))

    def refusal(self, call: _Call | None) -> str:
        """What the library says of a call it refuses before it touches a device."""
        tiles = _Tiles(ROWS, ROWS, 1)
        given = ctypes.byref(call) if call is not None else None
        code = self._lib.vlora_cuda_apply(given, ctypes.byref(tiles), None)
        return self._lib.vlora_cuda_last_error().decode() if code else ""

    def _check(self, code: int) -> None:
        if code:
            raise RuntimeError(f"ATMM for CUDA: {self._lib.vlora_cuda_last_error().decode()}")


class Operator:
    """A prepared call: device tables of adapters and segments, and the workspace.

    projections: for each, its y [rows, d_out] and its (a, b) by slot, ranks padded to RANK_STEP,
    None where an adapter does not target it. Keeps every tensor alive that the device reads.
    """

    def __init__(
        self,
        library: CudaLibrary,
        x: torch.Tensor,
        segments: torch.Tensor,
        projections: Sequence[
            tuple[torch.Tensor, Sequence[tuple[torch.Tensor, torch.Tensor] | None]]
        ],
        *,
        slices: int = 1,
        shrink_only: bool = False,
    ) -> None:
        import torch

        self._library, self._slices = library, slices
        pairs = [pair for _, slots in projections for pair in slots if pair is not None]
        self._keep: list[object] = [x, segments, projections]
        call = _Call(
            x=x.data_ptr(),
            ldx=x.stride(0),
            rows=x.shape[0],
            d_in=x.shape[1],
            slots=len(projections[0][1]),
            max_rank=max(a.shape[0] for a, _ in pairs),
            segments=segments.data_ptr(),
            capacity=segments.shape[0],
            projection_count=len(projections),
            type=TYPES[str(x.dtype).removeprefix("torch.")],
            shrink_only=int(shrink_only),
        )
        for at, (y, slots) in enumerate(projections):
            rows = [
                (p[0].data_ptr(), p[1].data_ptr(), p[0].shape[0]) if p else (0, 0, 0) for p in slots
            ]
            table = torch.tensor(rows, dtype=torch.int64, device=x.device)
            self._keep.append(table)
            call.projections[at] = _Projection(
                table.data_ptr(), y.data_ptr(), y.stride(0), y.shape[1]
            )
        size = library.workspace_bytes(call, slices)
        workspace = torch.empty(size, dtype=torch.uint8, device=x.device)
        self._keep.append(workspace)
        call.workspace, call.workspace_bytes = workspace.data_ptr(), size
        self._call = call

    def __call__(self, shrink: int = ROWS, expand: int = ROWS) -> None:
        """Launch on torch's current stream."""
        import torch

        stream = torch.cuda.current_stream().cuda_stream
        self._library.apply(self._call, shrink, expand, self._slices, stream)
