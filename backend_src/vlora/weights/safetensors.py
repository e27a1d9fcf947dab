"""Reader of safetensors files, for checkpoints and adapters.

Files are not mapped: truncating a mapped file would end the process, and a mapped checkpoint would
take memory in addition to its slab. This module knows neither models nor adapters. Its callers
turn its exceptions into errors that name them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import safe_open

FLOATS = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F64": torch.float64,
}
"""Supported types of stored tensors. Types of 8 bits are not supported, since they need scales."""

MAX_BUFFERS = 1024
"""Maximum number of buffers per call of `preadv` (IOV_MAX)."""


def open_tensors(path: Path) -> Any:
    """Open a file. Raise SafetensorError or OSError if it cannot be read or is not complete."""
    return safe_open(path, framework="pt", backend="pread")


def read_header(file: BinaryIO) -> bytes:
    """Return the bytes before a file's first tensor."""
    start = file.read(8)
    return start + file.read(int.from_bytes(start, "little"))


def offset_of(header: bytes, key: str) -> int:
    """Return the position of a tensor in its file, in bytes.

    header: bytes before the file's first tensor.
    """
    offset: int = json.loads(header[8:])[key]["data_offsets"][0]
    return len(header) + offset


def read_rows(file: BinaryIO, offset: int, rows: range, width: int, type_: str) -> torch.Tensor:
    """Return rows of a stored matrix, [len(rows), width].

    Slices of `safe_open` would read the whole tensor, because the file is not mapped.

    offset: position of the matrix in the file.
    type_: type of the matrix, a key of FLOATS.

    Raises EOFError if the file ends early.
    """
    dtype = FLOATS[type_]
    row_bytes = width * dtype.itemsize
    file.seek(offset + rows.start * row_bytes)
    content = bytearray(file.read(len(rows) * row_bytes))
    if len(content) < len(rows) * row_bytes:
        raise EOFError("the file ends early")
    if not content:
        return torch.empty(0, width, dtype=dtype)
    return torch.frombuffer(content, dtype=dtype).view(len(rows), width)


@dataclass(frozen=True)
class Layout:
    """Tensors of a file, in their order in the file. There are no gaps between them.

    start: number of bytes in the file before the first tensor.
    header: Python's `hash` of these bytes, which shows whether the file has changed. The hash is
        valid in this process only.
    keys: key of each tensor.
    types: type of each tensor, a key of FLOATS.
    sizes: number of elements of each tensor.
    """

    start: int
    header: int
    keys: tuple[str, ...]
    types: tuple[str, ...]
    sizes: tuple[int, ...]

    def read(self, path: Path, plan: ReadPlan, invalid: Callable[[str], Exception]) -> torch.Tensor:
        """Return the wanted tensors of the plan, in its order, as one tensor [elements] fp32.

        Raises the error that `invalid` makes if the file cannot be read or has changed since its
        header was read.
        """
        size = plan.runs[-1][2]
        header, data = bytearray(self.start), torch.empty(size, dtype=torch.uint8)
        wanted = data.numpy().data
        parts = (wanted[a:b] if b <= size else b - a for a, b in plan.targets)
        try:
            _read_into(path, [memoryview(header), *parts])
        except (OSError, EOFError) as error:
            raise invalid(f"cannot be read: {error}") from error
        if hash(bytes(header)) != self.header:
            raise invalid("has changed since it was described")
        runs = []
        for dtype, start, end in plan.runs:
            run = data[start:end]
            if start % dtype.itemsize:
                run = run.clone()  # Smaller dtypes before the run leave it unaligned.
            runs.append(run.view(dtype).to(torch.float32))
        return runs[0] if len(runs) == 1 else torch.cat(runs)

    def read_plan(self, wanted: Sequence[int]) -> ReadPlan:
        """Return a plan that reads only the tensors with these indices, and puts them into memory
        in this order.
        """
        order = [*wanted, *sorted(set(range(len(self.keys))) - set(wanted))]
        dtypes = [FLOATS[self.types[index]] for index in order]
        sizes = (self.sizes[i] * dtype.itemsize for i, dtype in zip(order, dtypes, strict=True))
        ends = list(accumulate(sizes))
        ranges = zip([0, *ends[:-1]], ends, strict=True)
        targets = [target for _, target in sorted(zip(order, ranges, strict=True))]
        runs = []
        start = 0
        ends_by_dtype = zip(dtypes[: len(wanted)], ends[: len(wanted)], strict=True)
        for dtype, run in groupby(ends_by_dtype, key=itemgetter(0)):
            *_, (_, end) = run
            runs.append((dtype, start, end))
            start = end
        return ReadPlan(tuple(targets), tuple(runs))


@dataclass(frozen=True)
class ReadPlan:
    """Ranges of memory into which the tensors of a file are read.

    The ranges of the wanted tensors come first. All other tensors have ranges after these, but are
    not read.

    targets: range (start, end) of each tensor in memory, in bytes, in the order of the file.
    runs: (dtype, start, end) of contiguous wanted tensors with the same dtype, in bytes of memory.
    """

    targets: tuple[tuple[int, int], ...]
    runs: tuple[tuple[torch.dtype, int, int], ...]


def _read_into(path: Path, parts: Sequence[memoryview | int]) -> None:
    """Fill buffers from the start of the file. A number in `parts` is a number of bytes to skip."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        offset, contiguous = 0, list[memoryview]()
        for part in (*parts, 0):
            if isinstance(part, memoryview):
                contiguous.append(part)
            else:
                offset = _fill(descriptor, offset, contiguous) + part
                contiguous = []
    finally:
        os.close(descriptor)


def _fill(descriptor: int, offset: int, buffers: Sequence[memoryview]) -> int:
    """Fill buffers with the content of a file from `offset` on; return the offset after it."""
    left = [buffer for buffer in buffers if buffer.nbytes]
    while left:
        count = os.preadv(descriptor, left[:MAX_BUFFERS], offset)
        if count == 0:
            raise EOFError("it ends early")
        offset += count
        while left and count >= left[0].nbytes:
            count -= left.pop(0).nbytes
        if count:
            left[0] = left[0][count:]
    return offset
