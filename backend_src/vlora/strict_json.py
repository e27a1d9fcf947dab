"""JSON from outside, read strictly, so that whatever passes can be compared, told and sent on.

Refused beside what is no JSON: a key given twice, NaN and the infinities (also as 1e999), whole
numbers of thousands of digits, half a surrogate pair (it cannot be written as UTF-8), deep nesting.
"""

from __future__ import annotations

import json
import math
from typing import Any

from vlora.errors import InvalidArgument

MAX_DEPTH = 16
"""Levels of lists and objects; every key that is served needs three at most."""

MAX_DIGITS = 400
"""Of a whole number: more than any double has, and few enough to be read in no time."""


def load_object(text: str, what: str) -> dict[str, Any]:
    """The JSON object in `text`. InvalidArgument names `what` it is and what is wrong with it."""

    def whole(digits: str) -> int:
        if len(digits) > MAX_DIGITS:
            raise InvalidArgument(
                f"{what} holds a number of {len(digits)} digits; the limit is {MAX_DIGITS}"
            )
        return int(digits)

    def real(digits: str) -> float:
        if not math.isfinite(value := float(digits)):
            raise InvalidArgument(f"{what} holds {digits[:40]}, which is beyond any number here")
        return value

    def constant(name: str) -> None:
        raise InvalidArgument(f"{what} holds {name}, which is no JSON; give a finite number")

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for key, value in pairs:
            if key in seen:
                raise InvalidArgument(f"{what} gives '{key}' twice")
            seen[key] = value
        return seen

    try:
        value = json.loads(
            text,
            object_pairs_hook=once,
            parse_int=whole,
            parse_float=real,
            parse_constant=constant,
        )
    except json.JSONDecodeError as error:
        raise InvalidArgument(
            f"{what} is not valid JSON: {error.msg} at character {error.pos}"
        ) from error
    except RecursionError as error:
        raise _too_deep(what) from error
    if not isinstance(value, dict):
        raise InvalidArgument(f"{what} must be a JSON object, not {type(value).__name__}")
    _check(value, what)
    return value


def _check(value: Any, what: str, depth: int = 1) -> None:
    """Every text in `value` can be written as UTF-8, and nothing lies too deep."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise InvalidArgument(
                f"{what} holds half a surrogate pair, {value[error.start]!r}; give whole characters"
            ) from error
    elif isinstance(value, dict | list):
        if depth > MAX_DEPTH:
            raise _too_deep(what)
        for inner in value if isinstance(value, list) else (*value, *value.values()):
            _check(inner, what, depth + 1)


def _too_deep(what: str) -> InvalidArgument:
    return InvalidArgument(f"{what} is nested too deeply; the limit is {MAX_DEPTH} levels")
