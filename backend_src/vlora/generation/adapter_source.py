"""Tensors of a PEFT folder that is to be converted, from safetensors or from a pickle.

A pickle is read by torch's restricted reader, which makes tensors and runs no code.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from vlora.lora.adapter import MAX_ADAPTER_BYTES, PICKLED, WEIGHTS
from vlora.lora.peft_config import ErrorFactory, require_file
from vlora.lora.weights_file import WeightsFile
from vlora.lora.weights_reader import FLOATS

_GLOBAL = re.compile(r"GLOBAL (\S+)")
"""Pattern that finds, in torch's error, the name of the code that a pickle would run."""


class Tensors(Protocol):
    """Tensors by key, from a safetensors file or a pickle.

    shapes: shape of each tensor, available without reading the tensor.
    """

    shapes: dict[str, tuple[int, ...]]

    def stored(self, key: str) -> torch.Tensor:
        """Return the tensor as it is stored. Raise InvalidArgument if it cannot be read."""


class PickledTensors:
    """Tensors of an `adapter_model.bin`, all in memory."""

    def __init__(self, path: Path, invalid: ErrorFactory) -> None:
        """Read the file.

        Raises InvalidArgument if it contains anything but dense float tensors, or if they are too
        large.
        """
        require_file(path, invalid)
        self._tensors = _unpickle(path, invalid)
        self.shapes = {key: tuple(tensor.shape) for key, tensor in self._tensors.items()}
        # With strides of 0, a small file can declare a large tensor.
        declared = sum(4 * tensor.numel() for tensor in self._tensors.values())
        if declared > max(MAX_ADAPTER_BYTES, 4 * path.stat().st_size):
            raise invalid(
                f"declares tensors of {declared} bytes in fp32; the limit is {MAX_ADAPTER_BYTES}"
            )

    def stored(self, key: str) -> torch.Tensor:
        return self._tensors[key]


def open_tensors(folder: Path, invalid: ErrorFactory) -> tuple[Tensors, str]:
    """Return the folder's tensors and the name of their file.

    The file is `adapter_model.safetensors` or, if that is missing, the pickled `adapter_model.bin`.
    Raises InvalidArgument if this file cannot be read, or if both are missing.
    """
    if not (folder / WEIGHTS).exists() and (folder / PICKLED).exists():
        return PickledTensors(folder / PICKLED, invalid.in_file(PICKLED)), PICKLED
    return WeightsFile(folder / WEIGHTS, invalid.in_file(WEIGHTS)), WEIGHTS


def _unpickle(path: Path, invalid: ErrorFactory) -> dict[str, torch.Tensor]:
    try:
        content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        found = _GLOBAL.search(str(error))
        what = f"the code '{found[1]}'" if found else "objects other than tensors"
        raise invalid(f"holds {what}, which is never run; only tensors are read") from None
    except Exception as error:
        # If the file is not a pickle, the reader may raise any type of exception.
        raise invalid(f"cannot be read as tensors: {type(error).__name__}: {error}") from error
    if not isinstance(content, Mapping):
        raise invalid(f"holds a {type(content).__name__}; it must hold tensors by key")
    for key, value in content.items():
        if not isinstance(key, str) or not isinstance(value, torch.Tensor):
            raise invalid(f"holds {key!r}, which is not a named tensor")
        if value.layout != torch.strided or value.dtype not in FLOATS.values():
            raise invalid(
                f"holds '{key}' as {value.dtype}, {value.layout}; it must be dense and one of"
                f" {', '.join(FLOATS)}"
            )
    return {key: value.detach() for key, value in content.items()}


def base_of(config: Mapping[str, Any]) -> str:
    """Return the name of the base model in an adapter's config; "" if the config has none."""
    name = config.get("base_model_name_or_path")
    return name if isinstance(name, str) else ""
