"""Weight files of a checkpoint folder: which they are, and opening them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from vlora.errors import InvalidArgument

INDEX = "model.safetensors.index.json"


def check_files(folder: Path) -> None:
    """Raise InvalidArgument for the first weights file that is missing, truncated or corrupt."""
    for file in weight_files(folder):
        open_weights(file)


def weight_files(folder: Path) -> list[Path]:
    """Return the folder's weight files, chosen as transformers does.

    Raises InvalidArgument if there are none or their index cannot be read.
    """
    return indexed_weight_files(folder)[0]


def indexed_weight_files(folder: Path) -> tuple[list[Path], dict[str, Path]]:
    """Return the folder's weight files, chosen as transformers does, and the index: key → file."""
    index = folder / INDEX
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"], {}
    if not index.is_file():
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise InvalidArgument(f"model: {folder} holds no .safetensors file")
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
    # The file is not mapped. A mapped file would take memory in addition to the slab, and
    # truncating it would end the process.
    try:
        return safe_open(file, framework="pt", backend="pread")
    except (SafetensorError, OSError) as error:
        raise InvalidArgument(f"model: {file} cannot be read: {error}") from error
