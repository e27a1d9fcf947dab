"""Strict reading of YAML files and of their values: unknown and repeated keys are errors."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from vlora.errors import InvalidArgument, nearest, shown

MAX_BYTES = 1 << 20
# Maximum number of values. The values behind an alias count each time that the alias is used.
MAX_VALUES = 100_000
MAX_PROBLEMS = 5  # Maximum number of problems that one error message lists.

VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")

# Numbers that are neither YAML's `true` nor quoted.
Int = Annotated[int, Field(strict=True)]
Float = Annotated[float, Field(strict=True, allow_inf_nan=False)]


def fill_variables(text: str, read: Callable[[str], str]) -> str:
    """Return a text with `read(NAME)` in place of each `${NAME}`."""
    return VARIABLE.sub(lambda found: read(found[1]), text)


def read_yaml(path: Path) -> Any:
    """Return the value in a YAML file. Raises InvalidArgument, also for a file above MAX_BYTES."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise InvalidArgument(f"{path} has more than {MAX_BYTES} bytes")
        content = path.read_bytes()
    except OSError as error:
        raise InvalidArgument(f"{path} cannot be read: {error.strerror}") from error
    return load_yaml(content, str(path))


def load_yaml(content: bytes, what: str) -> Any:
    """Return the value in the YAML file `what`. Raises InvalidArgument.

    Besides invalid YAML, it rejects duplicate keys, of which YAML libraries use only the last, and
    aliases that make a short file very large.
    """
    try:
        loader = yaml.SafeLoader(content.decode("utf-8-sig"))
        try:
            root = loader.get_single_node()
            if root is None:
                raise InvalidArgument(f"{what} is empty")
            if (values := _count(root, what, {})) > MAX_VALUES:
                raise InvalidArgument(
                    f"{what} has more than {MAX_VALUES} values if its aliases are replaced"
                    f" ({values:.1e} of them)"
                )
            return loader.construct_document(root)
        finally:
            loader.dispose()
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise InvalidArgument(
            f"{what} is not UTF-8: line {line} has the byte 0x{content[error.start]:02x}"
        ) from None
    except yaml.YAMLError as error:
        raise InvalidArgument(f"{what} is not valid YAML: {_one_line(error)}") from None
    except ValueError as error:  # Such as the date 2026-99-99.
        raise InvalidArgument(f"{what} has an invalid value: {error}") from None
    except RecursionError:
        raise InvalidArgument(f"{what} is nested too deeply") from None


def _one_line(error: yaml.YAMLError) -> str:
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "unknown error"
    mark = getattr(error, "problem_mark", None)
    place = f" at line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
    return f"{problem}{place}"


def _count(node: yaml.Node, what: str, known: dict[int, int | None]) -> int:
    """Return the number of values in `node`, with those of its aliases.

    known: number of values by the id of each node; None for nodes that are being counted.

    Raises InvalidArgument if a mapping has a key twice, or a value contains itself.
    """
    if id(node) in known:
        if (count := known[id(node)]) is None:
            line = node.start_mark.line + 1
            raise InvalidArgument(f"{what}: the value at line {line} contains itself")
        return count
    known[id(node)] = None
    children: list[yaml.Node] = []
    if isinstance(node, yaml.MappingNode):
        seen = set()
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    line = key.start_mark.line + 1
                    raise InvalidArgument(f"{what} has the key '{key.value}' twice, at line {line}")
                seen.add(key.value)
            children += [key, value]
    elif isinstance(node, yaml.SequenceNode):
        children = node.value
    known[id(node)] = total = 1 + sum(_count(child, what, known) for child in children)
    return total


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
    """Return one line with the keys, values and valid values of up to MAX_PROBLEMS problems."""
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
    return "; ".join(lines[:MAX_PROBLEMS]) + (f"; and {more} more problems" if more > 0 else "")


def _line(place: str, kind: str, message: str, value: Any) -> str:
    if kind == "missing":
        return f"{place} is missing"
    if kind == "value_error":
        text = message.removeprefix("Value error, ")
        return f"{place}: {text}" if place else text
    _, _, rule = message.partition(" should ")
    rule = rule.replace("tuple", "list").removesuffix(" after validation, not 0")
    return f"{place} is {shown(value)}, but should {rule}" if rule else f"{place}: {message}"
