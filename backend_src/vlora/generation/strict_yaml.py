"""Strict parsing of YAML files that people write.

Besides invalid YAML, it rejects duplicate keys, of which YAML libraries use only the last, and
aliases that make a short file very large.
"""

from __future__ import annotations

from typing import Any

import yaml

from vlora.errors import InvalidArgument

MAX_VALUES = 100_000
"""Maximum number of values. The values behind an alias count each time that the alias is used."""


def load_yaml(content: bytes, what: str) -> Any:
    """Return the value in `content`. Raises InvalidArgument.

    what: name of the file in messages.
    """
    try:
        text = content.decode("utf-8-sig")
        loader = yaml.SafeLoader(text)
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
    """Return the problem and its position, without an excerpt of the file."""
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "unknown error"
    mark = getattr(error, "problem_mark", None)
    place = f" at line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
    return f"{problem}{place}"


def _count(node: yaml.Node, what: str, known: dict[int, int | None]) -> int:
    """Return the number of values in `node` after its aliases are replaced.

    known: number of values by the id of each node; None for nodes that are being counted.

    Raises InvalidArgument for a duplicate key and for a value that contains itself.
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
