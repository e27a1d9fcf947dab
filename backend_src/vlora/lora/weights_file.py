"""Safetensors files of an adapter's folder: their declared tensors, and reading of single small
tensors.

Sizes are checked before anything is read, because a file may declare more than the machine's
memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from vlora.lora.model_shape import Rows
from vlora.lora.peft_config import ErrorFactory, require_file
from vlora.lora.weights_reader import FLOATS, Layout

MAX_HEADER_BYTES = 16 * 1024 * 1024
"""Maximum size of a file's header. An adapter of 80 layers needs 0.2 MB."""

PIECE_BYTES = 1 << 20
"""Number of bytes that `WeightsFile.equals` reads and compares at a time."""


def _open(path: Path) -> Any:
    # The file is not mapped, because truncating a mapped file would end the process.
    try:
        return safe_open(path, framework="pt", backend="pread")
    except FileNotFoundError:
        # safe_open reports any failure to open a file as a missing file. This raises the real one.
        path.open("rb").close()
        raise


class WeightsFile:
    """An open safetensors file.

    shapes: shape of each declared tensor by its key.
    """

    def __init__(self, path: Path, invalid: ErrorFactory) -> None:
        """Open the file. Raise InvalidArgument if it is missing, not a regular file, or broken."""
        self._path = path
        self._invalid = invalid
        require_file(path, invalid)
        try:
            with path.open("rb") as opened:
                start = opened.read(8)
                header = int.from_bytes(start, "little")
                if header > MAX_HEADER_BYTES:
                    raise invalid(
                        f"is not a complete safetensors file: its header has {header} bytes;"
                        f" the limit is {MAX_HEADER_BYTES}"
                    )
                self._header = start + opened.read(header)
            self._opened = _open(path)
        except SafetensorError as error:
            raise invalid(f"is not a complete safetensors file: {error}") from error
        except OSError as error:
            raise invalid(f"cannot be read: {error}") from error
        slices = {key: self._opened.get_slice(key) for key in self._opened.keys()}  # noqa: SIM118
        self.shapes: dict[str, tuple[int, ...]] = {
            key: tuple(declared.get_shape()) for key, declared in slices.items()
        }
        self._types = {key: str(declared.get_dtype()) for key, declared in slices.items()}

    @property
    def layout(self) -> Layout:
        """Layout of the file, by which `WeightsReader` finds the weights in the file.

        Raises InvalidArgument if a tensor does not have a supported floating-point type.
        """
        keys = tuple(self._opened.offset_keys())
        for key in keys:
            self._require_float(key)
        return Layout(
            start=len(self._header),
            header=hash(self._header),
            keys=keys,
            types=tuple(self._types[key] for key in keys),
            sizes=tuple(math.prod(self.shapes[key]) for key in keys),
        )

    def _require_float(self, key: str) -> None:
        if self._types[key] not in FLOATS:
            raise self._invalid(
                f"holds '{key}' as {self._types[key]}; supported: {', '.join(FLOATS)}"
            )

    def stored(self, key: str) -> torch.Tensor:
        """Return the tensor as it is stored.

        Raises InvalidArgument if it is not floating-point or cannot be read.
        """
        self._require_float(key)
        try:
            tensor: torch.Tensor = self._opened.get_tensor(key)
        except (SafetensorError, OSError) as error:
            raise self._invalid(f"cannot be read: {error}") from error
        return tensor

    def read(self, key: str) -> torch.Tensor:
        """Return the tensor in fp32, contiguous.

        Raises InvalidArgument if it is not floating-point, cannot be read, or contains NaN or
        infinity.
        """
        tensor = self.stored(key).to(torch.float32).contiguous()
        if not bool(torch.isfinite(tensor).all()):
            raise self._invalid(f"has NaN or Inf in '{key}'")
        return tensor

    def equals(self, key: str, expected: Rows) -> bool:
        """Return whether a stored matrix, rounded to the dtype of `expected`, equals `expected`.

        Raises InvalidArgument if a tensor of the file is not floating-point, or if the file cannot
        be read.
        """
        if self.shapes[key] != tuple(expected.shape):
            return False
        offset, dtype = self.layout.offset(key), FLOATS[self._types[key]]
        count, width = expected.shape
        rows = max(1, PIECE_BYTES // (dtype.itemsize * max(1, width)))
        try:
            with self._path.open("rb") as file:
                file.seek(offset)
                for start in range(0, count, rows):
                    piece = expected[start : start + rows].flatten().cpu()
                    stored = bytearray(file.read(len(piece) * dtype.itemsize))
                    if len(stored) < len(piece) * dtype.itemsize:
                        raise self._invalid("cannot be read: it ends early")
                    same = torch.frombuffer(stored, dtype=dtype).float().to(piece.dtype)
                    if not torch.equal(same, piece):
                        return False
        except OSError as error:
            raise self._invalid(f"cannot be read: {error}") from error
        return True

    def require_fits(self, keys: Iterable[str], max_bytes: int, others: int = 0) -> int:
        """Return the size in bytes of these tensors in fp32 plus `others`.

        others: size in bytes of the adapter's weights in other files.

        Raises InvalidArgument if the sum is above `max_bytes`.
        """
        needed = others + sum(4 * math.prod(self.shapes[key]) for key in keys)
        if needed > max_bytes:
            raise self._invalid(
                f"declares weights of {needed} bytes; 'max_adapter_bytes' allows {max_bytes}"
            )
        return needed
