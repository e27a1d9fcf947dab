"""Reader of safetensors files, for checkpoints and adapters.

Files are not mapped: truncating a mapped file would end the process, and a mapped checkpoint would
take memory in addition to its slab. Callers turn exceptions into errors that name the model.
"""

from __future__ import annotations

import errno
import json
import math
import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from safetensors import safe_open

# Supported types of stored tensors. Types of 8 bits are not supported, since they need scales.
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
INTEGERS = {"I64": torch.int64, "I32": torch.int32, "I8": torch.int8, "U8": torch.uint8}

MAX_BUFFERS = 1024  # Maximum number of buffers per call of `preadv` (IOV_MAX).


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file. Raise OSError for a pipe or a device, whose reading might never end."""
    # Opening a device may have effects. After the first check, the path may become a pipe.
    if stat.S_ISREG(path.stat().st_mode):
        file = os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb")
        if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            return file
        file.close()
    raise OSError(errno.EINVAL, "not a regular file", str(path))


def open_tensors(file: BinaryIO) -> Any:
    """Open the tensors of an open file. Raise SafetensorError or OSError if it cannot be read or is
    not complete.
    """
    return safe_open(f"/proc/self/fd/{file.fileno()}", framework="pt", backend="pread")


def read_header(file: BinaryIO) -> bytes:
    """Return the bytes before a file's first tensor."""
    start = file.read(8)
    return start + file.read(int.from_bytes(start, "little"))


class Declared(NamedTuple):
    """A tensor as the header of its file declares it. `offset`: position in the file, in bytes."""

    type: str
    shape: tuple[int, ...]
    offset: int


def declared_tensors(header: bytes) -> dict[str, Declared]:
    """Return the tensors that a valid header declares, by key."""
    entries = json.loads(header[8:])
    entries.pop("__metadata__", None)
    return {
        key: Declared(one["dtype"], tuple(one["shape"]), len(header) + one["data_offsets"][0])
        for key, one in entries.items()
    }


def read_rows(file: BinaryIO, offset: int, rows: range, width: int, type_: str) -> torch.Tensor:
    """Return rows of a stored matrix at `offset` in the file, [len(rows), width]. Raises EOFError.
    `type_` is the type of the matrix, a key of FLOATS.
    """
    dtype = FLOATS[type_]
    row_bytes = width * dtype.itemsize
    # Slices of `safe_open` would read the whole tensor, because the file is not mapped.
    file.seek(offset + rows.start * row_bytes)
    content = bytearray(file.read(len(rows) * row_bytes))
    if len(content) < len(rows) * row_bytes:
        raise EOFError("the file ends early")
    if not content:
        return torch.empty(0, width, dtype=dtype)
    return torch.frombuffer(content, dtype=dtype).view(len(rows), width)


@dataclass(frozen=True)
class ReadPlan:
    """Plan to read some tensors of a file into one range of memory, by few calls.

    start: number of bytes in the file before the first tensor.
    header: Python's `hash` of these bytes, by which this process notices a change of the file.
    keys: keys of the wanted tensors, in their order in memory.
    targets: range of bytes (start, end) in memory of each tensor, listed in the order of the file.
        Unwanted tensors are not read. Their ranges begin where those of the wanted ones end.
    runs: (dtype, start, end) of contiguous wanted tensors with the same dtype, in bytes of memory.
    """

    start: int
    header: int
    keys: tuple[str, ...]
    targets: tuple[tuple[int, int], ...]
    runs: tuple[tuple[torch.dtype, int, int], ...]

    @classmethod
    def of(cls, header: bytes, wanted: Sequence[str]) -> ReadPlan:
        """Return a plan for the tensors with these keys. All types in the header must be floats."""
        declared = declared_tensors(header)
        order = [*wanted, *(declared.keys() - set(wanted))]
        dtypes = [FLOATS[declared[key].type] for key in order]
        sizes = (math.prod(declared[key].shape) for key in order)
        ends = list(accumulate(n * t.itemsize for n, t in zip(sizes, dtypes, strict=True)))
        target = dict(zip(order, zip([0, *ends[:-1]], ends, strict=True), strict=True))
        # A tensor without elements has the same offset as the next one.
        in_file = sorted(
            order, key=lambda key: (declared[key].offset, math.prod(declared[key].shape))
        )
        runs = []
        start = 0
        for dtype, run in groupby(zip(dtypes, ends[: len(wanted)], strict=False), itemgetter(0)):
            *_, (_, end) = run
            runs.append((dtype, start, end))
            start = end
        targets = tuple(target[key] for key in in_file)
        return cls(len(header), hash(header), tuple(wanted), targets, tuple(runs))

    def read(self, path: Path, invalid: Callable[[str], Exception]) -> torch.Tensor:
        """Return the wanted tensors, in the order of `keys`, as one tensor [elements] fp32.

        Raises the error that `invalid` makes if the file cannot be read or has changed since.
        """
        size = self.runs[-1][2]
        header, data = bytearray(self.start), torch.empty(size, dtype=torch.uint8)
        wanted = data.numpy().data
        parts = (wanted[a:b] if b <= size else b - a for a, b in self.targets)
        try:
            _read_into(path, [memoryview(header), *parts])
        except (OSError, EOFError) as error:
            raise invalid(f"cannot be read: {error}") from error
        if hash(bytes(header)) != self.header:
            raise invalid("has changed since it was described")
        runs = []
        for dtype, start, end in self.runs:
            run = data[start:end]
            if start % dtype.itemsize:
                run = run.clone()  # Smaller dtypes before the run leave it unaligned.
            runs.append(run.view(dtype).to(torch.float32))
        return runs[0] if len(runs) == 1 else torch.cat(runs)


def _read_into(path: Path, parts: Sequence[memoryview | int]) -> None:
    # A number in `parts` is a number of bytes to skip.
    with open_regular(path) as file:
        offset, contiguous = 0, list[memoryview]()
        for part in (*parts, 0):
            if isinstance(part, memoryview):
                contiguous.append(part)
            else:
                offset = read_at(file.fileno(), offset, contiguous) + part
                contiguous = []


def read_at(descriptor: int, offset: int, buffers: Sequence[memoryview]) -> int:
    """Fill buffers from an offset of a file on, and return where they end. Raise EOFError."""
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
