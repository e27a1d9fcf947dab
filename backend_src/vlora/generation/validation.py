"""Base class of the specification's models, and error messages about invalid values."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from vlora.errors import nearest, shown

MAX_PROBLEMS = 5
"""Maximum number of problems that one error message lists."""

Int = Annotated[int, Field(strict=True)]
"""Integer. YAML's `true` and quoted numbers are not accepted."""
Float = Annotated[float, Field(strict=True, allow_inf_nan=False)]
"""Finite number. YAML's `true` and quoted numbers are not accepted."""


class StrictModel(BaseModel):
    """Frozen model that refuses unknown keys and names the nearest known key."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _has_known_keys(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            if isinstance(value, BaseModel):
                return value
            raise ValueError(f"needs keys and values, not {shown(value)}")
        for key in value:
            if key not in cls.model_fields:
                known = f"; the known keys are {', '.join(cls.model_fields)}"
                hint = nearest(str(key), cls.model_fields)
                raise ValueError(f"unknown key {shown(key)}{hint or known}")
        return value


def describe(error: ValidationError) -> str:
    """Return one line with the key, the value and the valid values of up to MAX_PROBLEMS
    problems.
    """
    problems = error.errors(include_url=False)
    places = [one["loc"] for one in problems]
    lines = []
    for one in problems:
        place = one["loc"]
        # A tuple whose items were all refused is also reported as too short.
        if one["type"] == "too_short" and any(
            other != place and other[: len(place)] == place for other in places
        ):
            continue
        lines.append(_line(".".join(map(str, place)), one["type"], one["msg"], one["input"]))
    more = len(lines) - MAX_PROBLEMS
    tail = f"; and {more} more problems" if more > 0 else ""
    return "; ".join(lines[:MAX_PROBLEMS]) + tail


def _line(place: str, kind: str, message: str, value: Any) -> str:
    if kind == "missing":
        return f"{place} is missing"
    if kind == "value_error":
        text = message.removeprefix("Value error, ")
        return f"{place}: {text}" if place else text
    _, _, rule = message.partition(" should ")
    rule = rule.replace("tuple", "list").removesuffix(" after validation, not 0")
    return f"{place} is {shown(value)}, but should {rule}" if rule else f"{place}: {message}"
