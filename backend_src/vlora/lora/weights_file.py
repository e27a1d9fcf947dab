"""The safetensors files of an adapter's folder: what they declare, and small ones tensor by tensor.

Nothing is read before it is known to fit: a file may declare more than the machine has.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from vlora.lora.peft_config import Refusal, require_file
from vlora.lora.weights_reader import FLOATS, Layout

MAX_HEADER_BYTES = 16 * 1024 * 1024
"""An adapter of 80 layers needs 0.2 MB."""


def _open(path: Path) -> Any:
    # Not mapped: a file cut short under a mapping ends the process.
    return safe_open(path, framework="pt", backend="pread")


class WeightsFile:
    """shapes: of every tensor that the file declares, by its key."""

    def __init__(self, path: Path, refuse: Refusal) -> None:
        """Raises InvalidArgument where the file is missing, no regular file, or broken."""
        self._refuse = refuse
        require_file(path, refuse)
        try:
            with path.open("rb") as opened:
                start = opened.read(8)
                header = int.from_bytes(start, "little")
                if header > MAX_HEADER_BYTES:
                    raise refuse(
                        f"cannot be read: a header of {header} bytes;"
                        f" the limit is {MAX_HEADER_BYTES}"
                    )
                self._header = start + opened.read(header)
            self._opened = _open(path)
        except (SafetensorError, OSError) as error:
            raise refuse(f"cannot be read: {error}") from error
        slices = {key: self._opened.get_slice(key) for key in self._opened.keys()}  # noqa: SIM118
        self.shapes: dict[str, tuple[int, ...]] = {
            key: tuple(declared.get_shape()) for key, declared in slices.items()
        }
        self._types = {key: str(declared.get_dtype()) for key, declared in slices.items()}

    @property
    def layout(self) -> Layout:
        """How all of the file is read at once. Refused where a tensor is no float."""
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
            raise self._refuse(f"holds '{key}' as {self._types[key]}; served: {', '.join(FLOATS)}")

    def read(self, key: str) -> torch.Tensor:
        """The tensor as fp32, contiguous; refused where it is no float, or is NaN or Inf there."""
        self._require_float(key)
        try:
            tensor: torch.Tensor = self._opened.get_tensor(key).to(torch.float32).contiguous()
        except (SafetensorError, OSError) as error:
            raise self._refuse(f"cannot be read: {error}") from error
        if not bool(torch.isfinite(tensor).all()):
            raise self._refuse(f"has NaN or Inf in '{key}'")
        return tensor

    def require_room(self, keys: list[str], most: int) -> int:
        """Bytes of these tensors in fp32; more than `most` are refused."""
        needed = sum(4 * math.prod(self.shapes[key]) for key in keys)
        if needed > most:
            raise self._refuse(
                f"declares weights of {needed} bytes; 'max_adapter_bytes' allows {most}"
            )
        return needed
