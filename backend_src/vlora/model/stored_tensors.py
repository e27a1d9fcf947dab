"""Tensors in a checkpoint's files: reading, and checks of their types and shapes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from vlora.errors import InvalidArgument
from vlora.lora.weights_reader import FLOATS
from vlora.model.weight_files import open_weights

STORED_DTYPES = tuple(FLOATS.values())
"""Types in which a checkpoint's weights may be stored."""


@dataclass(frozen=True)
class StoredRows:
    """A matrix in a checkpoint's file, whose rows are read when they are requested.

    file, key: file of the matrix, and its key there.
    shape: shape that the matrix must have.
    dtype: type to which the rows are converted.

    A slice of rows has the rows themselves, as a slice of a tensor has. It raises InvalidArgument
    if the rows cannot be read or do not fit.
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
            stored_dtype = FLOATS[name]
            first, last, _ = rows.indices(shape[0])
            count, row_bytes = max(0, last - first), shape[1] * stored_dtype.itemsize
            # Slices of safetensors would read the whole tensor, because the file is not mapped.
            with self.file.open("rb") as file:
                header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
                start, _ = header[self.key]["data_offsets"]
                file.seek(file.tell() + start + first * row_bytes)
                content = bytearray(file.read(count * row_bytes))
        except (SafetensorError, OSError) as error:
            raise unreadable(self.file, self.key, error) from error
        if len(content) < count * row_bytes:
            raise unreadable(self.file, self.key, EOFError("the file ends early"))
        if not content:
            return torch.empty(0, shape[1], dtype=self.dtype)
        return torch.frombuffer(content, dtype=stored_dtype).view(count, shape[1]).to(self.dtype)


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

    expected: shape that the tensor must have.
    shape, dtype: shape and type of the tensor. An unknown type is the name of a type.
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
    """Return the error which says that a stored tensor cannot be read, and why."""
    return InvalidArgument(f"model: {file}: '{key}' cannot be read: {error}")
