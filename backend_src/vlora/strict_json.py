"""Strict parsing of JSON from clients and files.

Besides invalid JSON, it rejects duplicate keys, NaN and infinities (including 1e999), integers with
very many digits, lone surrogates (which UTF-8 cannot encode), and deep nesting. So accepted values
can be compared, printed and sent without further checks.
"""

from __future__ import annotations

import json
import math
from typing import Any

from vlora.errors import InvalidArgument

MAX_DEPTH = 16
"""Maximum nesting depth of lists and objects. Options and parameters need at most three."""

MAX_DIGITS = 400
"""Maximum number of digits of an integer: more than any double has, and still quick to parse."""


def load_object(text: str, what: str, max_depth: int = MAX_DEPTH) -> dict[str, Any]:
    """Return the JSON object in `text`. Raises InvalidArgument.

    what: name of the object in messages.
    max_depth: maximum nesting depth of lists and objects.
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
                raise InvalidArgument(f"{what} has the key '{key}' twice")
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
    """Raise InvalidArgument for a lone surrogate in a string and for too deep nesting."""
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
