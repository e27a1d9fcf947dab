"""Readers: functions that check and convert a client's values, such as values from JSON.

A reader takes the key, for its error message, and the value. It raises InvalidArgument, which names
the key, what the value must be, and the value. Numbers and booleans may be given as text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vlora.errors import InvalidArgument, shown

Reader = Callable[[str, Any], Any]

BOOLEANS = {"true": True, "false": False}
"""Booleans by their text in lower case."""


def wrong_value(key: str, value: Any, expected: str) -> InvalidArgument:
    """Return the error for a value that is not what `expected` describes."""
    return InvalidArgument(f"'{key}' must be {expected}, not {shown(value)}")


@dataclass(frozen=True)
class Range:
    """Reader of a number within a range.

    low, high: smallest and largest valid value. Only limits of integers may be infinite.
    expected: description of valid values, for error messages and documents.
    whole: whether the number must be an integer. The result is then an int.
    """

    low: float
    high: float
    expected: str
    whole: bool = False

    def __call__(self, key: str, value: Any) -> Any:
        """Return the number. Raises InvalidArgument."""
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise wrong_value(key, value, self.expected)
        try:
            number = _whole(value) if self.whole else float(value)
        except (ValueError, OverflowError):
            raise wrong_value(key, value, self.expected) from None
        # NaN fails every comparison. An int is compared exactly, whatever its size.
        if not self.low <= number <= self.high:
            raise wrong_value(key, value, self.expected)
        return number


def _whole(value: float | str) -> int:
    number = int(value)
    if isinstance(value, float) and number != value:
        raise ValueError(value)
    return number


def optional(read: Reader) -> Reader:
    """Return a reader that returns None for None, and otherwise the result of `read`."""
    return lambda key, value: None if value is None else read(key, value)


def read_boolean(key: str, value: Any) -> bool:
    """Return the boolean that a value is or spells. Raises InvalidArgument for any other value."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in BOOLEANS:
        return BOOLEANS[value.lower()]
    raise wrong_value(key, value, "true or false")


def read_text(key: str, value: Any) -> str:
    """Return the value if it is a string that UTF-8 can encode, else raise InvalidArgument."""
    if not is_text(value):
        raise wrong_value(key, value, "a string")
    return str(value)


def is_text(value: Any) -> bool:
    """Return whether a value is a string that UTF-8 can encode, which has no lone surrogates."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def read_texts(key: str, value: Any, expected: str) -> tuple[str, ...]:
    """Return the strings of a list, without duplicates. The list must have at least one string, and
    none may be empty.

    expected: description of valid values, for the error.

    Raises InvalidArgument.
    """
    if not isinstance(value, list) or not value:
        raise wrong_value(key, value, expected)
    if not all(is_text(item) and item for item in value):
        raise wrong_value(key, value, expected)
    return tuple(dict.fromkeys(value))
