"""Readers that check one JSON-like value of a client and convert it.

A reader takes the key, for its error message, and the value. It raises InvalidArgument naming the
key, what the value must be, and the value. Numbers and booleans may be given as text.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from vlora.errors import InvalidArgument, shown

Reader = Callable[[str, Any], Any]

BOOLEANS = {"true": True, "false": False}
"""Booleans by their lower-case text."""


def wrong_value(key: str, value: Any, expected: str) -> InvalidArgument:
    """Return the error for a value that is not what `expected` says."""
    return InvalidArgument(f"'{key}' must be {expected}, not {shown(value)}")


def read_number(key: str, value: Any, low: float, high: float, expected: str) -> float:
    """Return a finite number in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise wrong_value(key, value, expected)
    try:
        number = float(value)
    except (ValueError, OverflowError):
        raise wrong_value(key, value, expected) from None
    if not math.isfinite(number) or not low <= number <= high:
        raise wrong_value(key, value, expected)
    return number


def read_integer(key: str, value: Any) -> int:
    """Return an integer of any size; a float must have an integral value."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise wrong_value(key, value, "a whole number")
    if isinstance(value, int):
        return value
    try:
        return int(value) if isinstance(value, str) else _integral(value)
    except (ValueError, OverflowError):
        raise wrong_value(key, value, "a whole number") from None


def _integral(value: float) -> int:
    if value != int(value):
        raise ValueError(value)
    return int(value)


def number_in(low: float, high: float, expected: str) -> Callable[[str, Any], float]:
    """Return a reader of finite numbers in [low, high]."""
    return lambda key, value: read_number(key, value, low, high, expected)


def integer_in(low: int, high: int, expected: str) -> Callable[[str, Any], int]:
    """Return a reader of integers in [low, high]."""

    def read(key: str, value: Any) -> int:
        number = read_integer(key, value)
        if not low <= number <= high:
            raise wrong_value(key, value, expected)
        return number

    return read


def optional(read: Reader) -> Reader:
    """Return a reader that accepts None and otherwise uses `read`."""
    return lambda key, value: None if value is None else read(key, value)


def read_boolean(key: str, value: Any) -> bool:
    """Return a boolean."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in BOOLEANS:
        return BOOLEANS[value.lower()]
    raise wrong_value(key, value, "true or false")


def read_text(key: str, value: Any) -> str:
    """Return a string."""
    if not is_text(value):
        raise wrong_value(key, value, "a string")
    return str(value)


def is_text(value: Any) -> bool:
    """Return whether a value is a string that UTF-8 can encode, which a lone surrogate is not."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def read_texts(key: str, value: Any, expected: str) -> tuple[str, ...]:
    """Return a list of at least one non-empty string, without duplicates."""
    if not isinstance(value, list) or not value:
        raise wrong_value(key, value, expected)
    if not all(is_text(item) and item for item in value):
        raise wrong_value(key, value, expected)
    return tuple(dict.fromkeys(value))
