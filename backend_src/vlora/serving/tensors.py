"""Checked reading of a request's input tensors, and construction of output tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from vlora.errors import InvalidArgument

Array = np.ndarray[Any, np.dtype[Any]]
Tensors = Mapping[str, Array]

ELEMENT_BYTES = 48  # An element of a STRING tensor takes these in addition to its content.
MAX_ELEMENTS = 16384  # Maximum number of elements of a STRING tensor.
MAX_NAME_BYTES = 1024  # Maximum size of a text that names something.


class EncodedStrings:
    """Content of a STRING tensor in the protocol's form: each element follows its length.

    encoded: uint8 [bytes].
    """

    def __init__(self, encoded: Array) -> None:
        self._encoded = encoded

    def reshape(self, shape: Sequence[int]) -> Array:
        """Return the elements as bytes. If they cannot be read, every element is the reason, an
        InvalidArgument, so that a single request fails (`check_strings`).
        """
        count = math.prod(shape)
        if count > MAX_ELEMENTS:
            reason = f"has {count} elements; the limit is {MAX_ELEMENTS}"
        else:
            elements = self._elements(count)
            if elements is not None:
                tensor = np.empty(count, dtype=np.object_)
                tensor[:] = elements
                return tensor.reshape(shape)
            reason = f"does not hold {count} elements, each after its length as 4 bytes"
        one = np.empty((), dtype=np.object_)
        one[()] = InvalidArgument(reason)
        return np.broadcast_to(one, shape)

    def _elements(self, count: int) -> list[bytes] | None:
        content, at, elements = self._encoded.data, 0, list[bytes]()
        while at + 4 <= len(content) and len(elements) < count:
            end = at + 4 + int.from_bytes(content[at : at + 4], "little")
            elements.append(bytes(content[at + 4 : end]))
            at = end
        return elements if at == len(content) and len(elements) == count else None


def check_strings(tensors: Tensors) -> None:
    """Raise InvalidArgument if a tensor is one that `EncodedStrings` could not read."""
    for name, tensor in tensors.items():
        first = tensor.flat[0] if tensor.dtype == np.object_ and tensor.size else None
        if isinstance(first, InvalidArgument):
            raise InvalidArgument(f"'{name}' {first}")


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

    def text(self, name: str, limit: int = MAX_NAME_BYTES) -> str | None:
        """Return the text of a STRING[1], of at most `limit` bytes; None if it is missing."""
        content = self.blob(name, limit)
        return None if content is None else self.decode(name, content)

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
