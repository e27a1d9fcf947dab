"""Strict reading of JSON and of its values, from clients and files.

Accepted values can be compared, printed and sent without further checks.

A reader takes the key, for its message, and the value. It raises InvalidArgument, which names the
key, what the value must be, and the value. Numbers and booleans may be given as text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vlora.errors import InvalidArgument, shown

MAX_DEPTH = 16  # Options and parameters need at most three.
MAX_DIGITS = 400  # More than any double has, and still quick to parse.


def load_object(text: str, what: str, max_depth: int = MAX_DEPTH) -> dict[str, Any]:
    """Return the JSON object in `text`, which is called `what` in messages. Raises InvalidArgument.

    It has no duplicate keys, NaN, infinities, huge integers, lone surrogates or deep nesting.
    """

    def parse_int(digits: str) -> int:
        if len(digits) > MAX_DIGITS:
            raise InvalidArgument(
                f"{what} has a number with {len(digits)} digits; the limit is {MAX_DIGITS}"
            )
        return int(digits)

    def parse_float(digits: str) -> float:
        if not math.isfinite(value := float(digits)):
            raise InvalidArgument(
                f"{what} has the number {digits[:40]}; it must be a finite double"
            )
        return value

    def reject_constant(name: str) -> None:
        raise InvalidArgument(f"{what} has {name}, which is not valid JSON; use a finite number")

    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for key, value in pairs:
            if key in seen:
                raise InvalidArgument(f"{what} has the key {shown(key)} twice")
            seen[key] = value
        return seen

    try:
        value = json.loads(
            text,
            object_pairs_hook=without_duplicates,
            parse_int=parse_int,
            parse_float=parse_float,
            parse_constant=reject_constant,
        )
    except json.JSONDecodeError as error:
        raise InvalidArgument(
            f"{what} is not valid JSON: {error.msg} at character {error.pos}"
        ) from error
    except RecursionError as error:
        raise _too_deep(what, max_depth) from error
    if not isinstance(value, dict):
        raise InvalidArgument(f"{what} must be a JSON object, not {type(value).__name__}")
    _check(value, what, max_depth)
    return value


def _check(value: Any, what: str, max_depth: int, depth: int = 1) -> None:
    if isinstance(value, str):
        if value.isascii():
            return  # This only reads a flag, so a long base64 text is not copied.
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise InvalidArgument(
                f"{what} has a lone surrogate, {value[error.start]!r}; use complete characters"
            ) from error
    elif isinstance(value, dict | list):
        if depth > max_depth:
            raise _too_deep(what, max_depth)
        for inner in value if isinstance(value, list) else (*value, *value.values()):
            _check(inner, what, max_depth, depth + 1)


def _too_deep(what: str, max_depth: int) -> InvalidArgument:
    return InvalidArgument(f"{what} is nested too deeply; the limit is {max_depth} levels")


Reader = Callable[[str, Any], Any]

BOOLEANS = {"true": True, "false": False}


def wrong_value(key: str, value: Any, expected: str) -> InvalidArgument:
    return InvalidArgument(f"'{key}' must be {expected}, not {shown(value)}")


@dataclass(frozen=True)
class Range:
    """Reader of a number from `low` to `high`, an int if `whole` (only then may they be infinite).

    expected: description of valid values, for error messages and documents.
    """

    low: float
    high: float
    expected: str
    whole: bool = False

    def __call__(self, key: str, value: Any) -> Any:
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
    return lambda key, value: None if value is None else read(key, value)


def read_boolean(key: str, value: Any) -> bool:
    """Return the boolean that a value is or spells. Raises InvalidArgument for any other value."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in BOOLEANS:
        return BOOLEANS[value.lower()]
    raise wrong_value(key, value, "true or false")


def read_text(key: str, value: Any) -> str:
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
    """Return the non-empty strings of a non-empty list, without duplicates.

    Raises InvalidArgument with the description `expected`.
    """
    if not isinstance(value, list) or not value:
        raise wrong_value(key, value, expected)
    if not all(is_text(item) and item for item in value):
        raise wrong_value(key, value, expected)
    return tuple(dict.fromkeys(value))
