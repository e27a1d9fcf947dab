"""Weight files of a checkpoint folder. This module does not need torch."""

from __future__ import annotations

import json
import os
import re
import shlex
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from vlora.errors import InvalidArgument
from vlora.file_names import to_path

INDEX = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")  # Names of files with pickled weights.
LFS_HEADER = b"version https://git-lfs"
LFS_HINT = "; it is a pointer of Git LFS: fetch the file itself with `git lfs pull`"
# Name of one of several weight files: prefix, number, `-of-`, number of files, suffix.
NUMBERED = re.compile(r"(.*-)(\d+)(-of-)(\d+)(\.safetensors)")

# Number of bytes that are read ahead by one call. `posix_fadvise` would fill the disk's queue, in
# which the programs and modules that are being loaded would wait.
READ_AT_ONCE = 1 << 20


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
            str(key): folder / to_path(str(file))
            for key, file in json.loads(index.read_bytes())["weight_map"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidArgument(f"model: {index} cannot be read: {error!r}") from error
    return sorted(set(listed.values())), listed


def read_ahead(folder: Path, limit: int) -> None:
    """Read the folder's first weight files, about `limit` bytes, into the kernel's page cache.

    This takes as long as the disk does. It ends at a file that cannot be read, without an error.
    """
    buffer = bytearray(READ_AT_ONCE)
    with suppress(InvalidArgument, OSError):
        for file in weight_files(folder):
            # Without O_NONBLOCK, opening a pipe could wait forever.
            descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                while limit > 0 and (count := os.readv(descriptor, [buffer])):
                    limit -= count
            finally:
                os.close(descriptor)


def open_weights(file: Path, framework: str = "pt") -> Any:
    """Open a safetensors file and return it. Raise InvalidArgument if it cannot be read.

    framework: library whose tensors are returned, "pt" (torch) or "np" (numpy).
    """
    if file.exists() and not file.is_file():  # The reading of a pipe might never end.
        raise InvalidArgument(f"model: {file} is not a regular file")
    try:
        return safe_open(file, framework=framework, backend="pread")
    except FileNotFoundError:
        raise InvalidArgument(f"model: {file} is missing") from None
    except (SafetensorError, OSError) as error:
        hint = "; is its download complete?" if isinstance(error, SafetensorError) else ""
        with suppress(OSError), file.open("rb") as opened:
            if opened.read(len(LFS_HEADER)) == LFS_HEADER:
                hint = LFS_HINT
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
        (name,) = json.loads((folder / "config.json").read_bytes())["architectures"]
    except (OSError, ValueError, KeyError, TypeError):
        name = ""
    if not str(name).isidentifier():
        name = "AutoModelForImageTextToText"
    return (
        f", but {pickles[0]}. Pickled weights are not read, because they can run code."
        f" Convert them: python -c 'import sys; from transformers import {name} as M;"
        f" M.from_pretrained(sys.argv[1]).save_pretrained(sys.argv[1])' {shlex.quote(str(folder))}"
    )
