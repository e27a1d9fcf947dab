"""Reading named tensors, and making them: every access checked, every error a sentence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vlora.errors import InvalidArgument

Array = np.ndarray[Any, np.dtype[Any]]
Tensors = Mapping[str, Array]


class Inputs:
    """The input tensors of one request, read with checks; absent ones are None."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors

    def has_rows(self, name: str) -> bool:
        tensor = self._tensors.get(name)
        return tensor is not None and tensor.size > 0

    def required_text(self, name: str, limit: int) -> str:
        """The text of a STRING[1] that must be there, at most `limit` bytes of it."""
        content = self.blob(name, limit)
        if content is None:
            raise InvalidArgument(f"'{name}' is missing; it is STRING of shape [1]")
        return self.decode(name, content)

    def text(self, name: str) -> str | None:
        value = self._one(name, "STRING")
        return None if value is None else self.decode(name, as_bytes(value))

    def blob(self, name: str, limit: int) -> bytes | None:
        """The bytes of a STRING[1], at most `limit` of them."""
        value = self._one(name, "STRING")
        if value is None:
            return None
        content = as_bytes(value)
        if len(content) > limit:
            raise InvalidArgument(f"'{name}' has {len(content)} bytes; the limit is {limit}")
        return content

    def flag(self, name: str) -> bool | None:
        value = self._one(name, "BOOL")
        if value is None:
            return None
        if not isinstance(value, bool | np.bool_):
            raise InvalidArgument(f"'{name}' must be BOOL, not {type(value).__name__}")
        return bool(value)

    def strings(self, name: str) -> list[bytes]:
        """All elements of a STRING tensor, whatever its shape; empty when absent."""
        tensor = self._tensors.get(name)
        return [] if tensor is None else [as_bytes(item) for item in tensor.reshape(-1)]

    def array(
        self, name: str, dtype: type[np.generic], shape: tuple[int | None, ...]
    ) -> Array | None:
        """A copy that outlives the request; `shape` has None where any size fits."""
        tensor = self._tensors.get(name)
        if tensor is None:
            return None
        if tensor.dtype != dtype:
            raise InvalidArgument(
                f"'{name}' must be {np.dtype(dtype).name}, not {tensor.dtype.name}"
            )
        fits = len(tensor.shape) == len(shape) and all(
            want is None or size == want for size, want in zip(tensor.shape, shape, strict=True)
        )
        if not fits:
            wanted = ", ".join("any" if want is None else str(want) for want in shape)
            raise InvalidArgument(f"'{name}' has shape {list(tensor.shape)}; it must be [{wanted}]")
        return np.array(tensor)

    def decode(self, name: str, content: bytes) -> str:
        try:
            return content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise InvalidArgument(f"'{name}' is not valid UTF-8: byte {error.start}") from error

    def _one(self, name: str, kind: str) -> Any:
        tensor = self._tensors.get(name)
        if tensor is None:
            return None
        if tensor.size != 1:
            raise InvalidArgument(
                f"'{name}' has shape {list(tensor.shape)}; it must be {kind} of shape [1]"
            )
        return tensor.reshape(-1)[0]


def as_bytes(value: Any) -> bytes:
    return value.encode("utf-8") if isinstance(value, str) else bytes(value)


def strings(values: Sequence[str | bytes]) -> Array:
    """A STRING tensor [len(values)]."""
    tensor = np.empty(len(values), dtype=np.object_)
    tensor[:] = [as_bytes(value) for value in values]
    return tensor


def flag(value: bool) -> Array:
    """A BOOL tensor [1]."""
    return np.array([value], dtype=np.bool_)
