"""Tensors in a checkpoint's files: reading, and checks of their types and shapes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from vlora.errors import InvalidArgument
from vlora.model.weight_files import open_weights
from vlora.weights.safetensors import (
    FLOATS,
    INTEGERS,
    Declared,
    declared_tensors,
    read_at,
    read_header,
    read_rows,
)

STORED_DTYPES = tuple(FLOATS.values())  # Types in which a checkpoint's weights may be stored.


@dataclass(frozen=True)
class StoredRows:
    """A matrix in a checkpoint's file. A slice of rows is read when it is requested.

    shape: shape that the matrix must have.
    dtype: type to which the rows are converted.

    Slicing raises InvalidArgument if the rows cannot be read or do not fit.
    """

    file: Path
    key: str
    shape: tuple[int, int]
    dtype: torch.dtype

    def __getitem__(self, rows: slice) -> torch.Tensor:
        try:
            with open_weights(self.file) as opened:
                stored = opened.get_slice(self.key)
                name, shape = str(stored.get_dtype()), tuple(stored.get_shape())
            check(self.shape, shape, FLOATS.get(name, name), f"{self.file} holds '{self.key}'")
            wanted = range(shape[0])[rows]
            with self.file.open("rb") as file:
                offset = declared_tensors(read_header(file))[self.key].offset
                return read_rows(file, offset, wanted, shape[1], name).to(self.dtype)
        except (SafetensorError, OSError, EOFError) as error:
            raise unreadable(self.file, self.key, error) from error


# Rows that are compared at once. The first ones of two different matrices usually differ.
COMPARED_ROWS = 1024


def stored_alike(first: tuple[Path, str], second: tuple[Path, str]) -> bool:
    """Return whether two stored tensors, each a file and a key, have the same shape and values.

    Tensors of unsupported types are not alike. Raises InvalidArgument for a file that cannot be
    read.
    """
    shapes, rows = [], []
    for file, key in (first, second):
        with open_weights(file) as opened:
            stored = opened.get_slice(key)
            shape, dtype = tuple(stored.get_shape()), str(stored.get_dtype())
        if len(shape) != 2 or dtype not in FLOATS:
            return False
        shapes.append(shape)
        rows.append(StoredRows(file, key, shape, FLOATS[dtype]))
    parts = (slice(n, n + COMPARED_ROWS) for n in range(0, shapes[0][0], COMPARED_ROWS))
    return shapes[0] == shapes[1] and all(
        bool((rows[0][part] == rows[1][part]).all()) for part in parts
    )


# Larger tensors, such as embeddings, get memory of their own, so that the peak is not larger.
REUSED_BYTES = 1 << 27


class ReusedMemory:
    """Memory for tensors that are read one after another. Each is valid until the next is read.

    New memory for each would take longer than reading, since the kernel clears it page by page.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def read(self, file: Path, key: str, declared: Declared) -> torch.Tensor:
        """Return a tensor that the file's header declares. Raise InvalidArgument as `read`."""
        dtype = (FLOATS | INTEGERS).get(declared.type)
        if dtype is None:
            return read(open_weights(file), file, key)
        size = math.prod(declared.shape) * dtype.itemsize
        memory = self._memory
        if size > len(memory):
            memory = torch.empty(size, dtype=torch.uint8)
            self._memory = memory if size <= REUSED_BYTES else self._memory
        try:
            with file.open("rb", buffering=0) as opened:
                read_at(opened.fileno(), declared.offset, [memory[:size].numpy().data])
        except (OSError, EOFError) as error:
            raise unreadable(file, key, error) from error
        return memory[:size].view(dtype).view(declared.shape)


def declared_weights(file: Path) -> dict[str, Declared]:
    """Return the tensors in a weights file, by key. Raise InvalidArgument as `open_weights`."""
    open_weights(file)
    with file.open("rb") as opened:
        return declared_tensors(read_header(opened))


def read(opened: Any, file: Path, key: str) -> torch.Tensor:
    """Return a tensor of an opened file. Raise InvalidArgument if it cannot be read."""
    try:
        tensor: torch.Tensor = opened.get_tensor(key)
    except (SafetensorError, OSError) as error:
        raise unreadable(file, key, error) from error
    return tensor


def check(
    expected: tuple[int, ...], shape: tuple[int, ...], dtype: torch.dtype | str, origin: str
) -> None:
    """Raise InvalidArgument if a stored tensor has another shape or an unsupported type.

    dtype: type of the tensor. An unknown type is the name of a type.
    origin: file and key of the tensor, for the error message.
    """
    if dtype not in STORED_DTYPES:
        supported = ", ".join(str(dtype).removeprefix("torch.") for dtype in STORED_DTYPES)
        raise InvalidArgument(f"model: {origin} as {dtype}; supported: {supported}")
    if shape != expected:
        raise InvalidArgument(
            f"model: {origin} of shape {tuple(shape)}; by config.json it must be {expected}"
        )


def unreadable(file: Path, key: str, error: Exception) -> InvalidArgument:
    return InvalidArgument(f"model: {file}: '{key}' cannot be read: {error}")
