"""Tensors in a checkpoint's files: reading, and checks of their types and shapes."""

from __future__ import annotations

import json
import re
import shlex
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from vlora.errors import InvalidArgument
from vlora.weights.safetensors import FLOATS, declared_tensors, open_tensors, read_header, read_rows

INDEX = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")  # Names of files with pickled weights.
LFS_HEADER = b"version https://git-lfs"
LFS_HINT = "; it is a pointer of Git LFS: fetch the file itself with `git lfs pull`"
# Name of one of several weight files: prefix, number, `-of-`, number of files, suffix.
NUMBERED = re.compile(r"(.*-)(\d+)(-of-)(\d+)(\.safetensors)")


def check_files(folder: Path) -> None:
    """Raise InvalidArgument for the first weights file that is missing, truncated or corrupt."""
    for file in weight_files(folder):
        open_weights(file)


def weight_files(folder: Path) -> list[Path]:
    """Return the folder's weight files. Raises InvalidArgument as `indexed_weight_files`."""
    return indexed_weight_files(folder)[0]


def indexed_weight_files(folder: Path) -> tuple[list[Path], dict[str, Path]]:
    """Return the folder's weight files, and the index: key → file; {} without an index.

    The files are `model.safetensors`, else those of the index, else all safetensors files. Raises
    InvalidArgument if there are none or the index cannot be read.
    """
    index = folder / INDEX
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"], {}
    if not index.is_file():
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise InvalidArgument(
                f"model: {folder} holds no .safetensors file{_instead_of_pickles(folder)}"
            )
        _check_numbering(files)
        return files, {}
    try:
        listed = {
            str(key): folder / str(file)
            for key, file in json.loads(index.read_text())["weight_map"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidArgument(f"model: {index} cannot be read: {error!r}") from error
    return sorted(set(listed.values())), listed


def open_weights(file: Path) -> Any:
    """Open a safetensors file and return it. Raise InvalidArgument if it cannot be read."""
    try:
        return open_tensors(file)
    except (SafetensorError, OSError) as error:
        hint = ""
        with suppress(OSError), file.open("rb") as opened:
            hint = LFS_HINT * (opened.read(len(LFS_HEADER)) == LFS_HEADER)
        raise InvalidArgument(f"model: {file} cannot be read: {error}{hint}") from error


def _check_numbering(files: list[Path]) -> None:
    """Raise InvalidArgument if the names of files without an index show that one is missing."""
    present = {file.name for file in files}
    for file in files:
        if match := NUMBERED.fullmatch(file.name):
            prefix, number, of, count, suffix = match.groups()
            wanted = (f"{prefix}{n:0{len(number)}}" for n in range(1, min(int(count), 9999) + 1))
            for name in wanted:
                if f"{name}{of}{count}{suffix}" not in present:
                    raise InvalidArgument(
                        f"model: {file.parent} lacks {name}{of}{count}{suffix}, and {INDEX},"
                        " which lists its weights"
                    )


def _instead_of_pickles(folder: Path) -> str:
    pickles = sorted(file.name for kind in PICKLES for file in folder.glob(kind))
    if not pickles:
        return ""
    try:
        (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    except (OSError, ValueError, KeyError, TypeError):
        name = ""
    if not str(name).isidentifier():
        name = "AutoModelForImageTextToText"
    return (
        f", but {pickles[0]}. Pickled weights are not read, because they can run code."
        f" Convert them: python -c 'import sys; from transformers import {name} as M;"
        f" M.from_pretrained(sys.argv[1]).save_pretrained(sys.argv[1])' {shlex.quote(str(folder))}"
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
