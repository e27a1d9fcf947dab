"""Checked reading of a request's input tensors, and construction of output tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from vlora.errors import InvalidArgument

Array = np.ndarray[Any, np.dtype[Any]]
Tensors = Mapping[str, Array]

ELEMENT_BYTES = 48  # An element of a STRING tensor takes these in addition to its content.


class Inputs:
    """Input tensors of one request. The methods raise InvalidArgument for an invalid tensor."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors

    def has_rows(self, name: str) -> bool:
        tensor = self._tensors.get(name)
        return tensor is not None and tensor.size > 0

    def required_text(self, name: str, limit: int) -> str:
        """Return the text of a STRING[1] that must be present and have at most `limit` bytes."""
        content = self.blob(name, limit)
        if content is None:
            raise InvalidArgument(f"'{name}' is missing; send it as STRING of shape [1]")
        return self.decode(name, content)

    def text(self, name: str) -> str | None:
        """Return the text of a STRING[1]; None if it is missing."""
        value = self._one(name, "STRING")
        return None if value is None else self.decode(name, as_bytes(value))

    def blob(self, name: str, limit: int) -> bytes | None:
        """Return the bytes of a STRING[1], at most `limit`; None if it is missing."""
        value = self._one(name, "STRING")
        if value is None:
            return None
        content = as_bytes(value)
        if len(content) > limit:
            raise InvalidArgument(f"'{name}' has {len(content)} bytes; the limit is {limit}")
        return content

    def flag(self, name: str) -> bool | None:
        """Return the value of a BOOL[1]; None if it is missing."""
        value = self._one(name, "BOOL")
        if value is None:
            return None
        if not isinstance(value, bool | np.bool_):
            raise InvalidArgument(f"'{name}' must be BOOL, not {type(value).__name__}")
        return bool(value)

    def strings(self, name: str) -> list[bytes]:
        """Return all elements of a STRING tensor of any shape; [] if it is missing."""
        tensor = self._tensors.get(name)
        return [] if tensor is None else [as_bytes(item) for item in tensor.reshape(-1)]

    def array(
        self, name: str, dtype: type[np.generic], shape: tuple[int | None, ...]
    ) -> Array | None:
        """Return a copy of a tensor, of any size where `shape` is None; None if it is missing."""
        tensor = self._tensors.get(name)
        if tensor is None:
            return None
        if tensor.dtype != dtype:
            raise InvalidArgument(
                f"'{name}' must be {np.dtype(dtype).name}, not {tensor.dtype.name}"
            )
        fits = len(tensor.shape) == len(shape) and all(
            expected is None or size == expected
            for size, expected in zip(tensor.shape, shape, strict=True)
        )
        if not fits:
            expected_shape = ", ".join("any" if size is None else str(size) for size in shape)
            raise InvalidArgument(
                f"'{name}' has shape {list(tensor.shape)}; it must be [{expected_shape}]"
            )
        return np.array(tensor)

    def decode(self, name: str, content: bytes) -> str:
        try:
            return content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise InvalidArgument(f"'{name}' is not valid UTF-8 at byte {error.start}") from error

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
    """Return a STRING tensor of shape [len(values)]. Text is encoded as UTF-8."""
    tensor = np.empty(len(values), dtype=np.object_)
    tensor[:] = [as_bytes(value) for value in values]
    return tensor


def flag(value: bool) -> Array:
    return np.array([value], dtype=np.bool_)


def bytes_of(tensors: Tensors) -> int:
    return sum(map(_size, tensors.values()))


def _size(tensor: Array) -> int:
    if tensor.dtype != np.object_:
        return int(tensor.nbytes)
    items: Iterable[bytes | str] = tensor.reshape(-1)
    return sum(ELEMENT_BYTES + len(as_bytes(item)) for item in items)
