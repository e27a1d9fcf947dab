"""Preparation of a JSON schema for llguidance, so that each complete answer is valid.

Where llguidance would allow an invalid answer, or no token in the middle of one, the schema is
rewritten, or refused by a ValueError of one sentence.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from functools import cache
from typing import Any
from urllib.parse import unquote

import llguidance

from vlora.errors import shown

# What llguidance enforces. Other formats are annotations.
DATES = ("date-time", "time", "date", "duration")
FORMATS = (*DATES, "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
OPTIONS = {
    # A space, or a new line with its indentation. The length is bounded, because a model might
    # otherwise generate white space forever.
    "whitespace_pattern": r"( ?|\n[ \t]{0,32})",
    # Without `\u`, a name has one spelling. Otherwise "\u0061" would be another name than "a".
    "json_allowed_escapes": r"nrbtf\"",
}
ESCAPED = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")  # Characters that need `\u`.
MAPS_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
MERGING = ("allOf", "anyOf", "oneOf", "$ref")
SCHEMAS = (*MERGING, "items", "prefixItems", "additionalItems", "additionalProperties")
BYTES = llguidance.LLTokenizer("byte")
BOUNDS = {"minimum": 1, "exclusiveMinimum": 1, "maximum": -1, "exclusiveMaximum": -1}


def prepared(text: str) -> str:
    """Return the schema for llguidance, with its options. Raises ValueError and RecursionError."""
    root = json.loads(text)
    if not isinstance(root, dict):
        raise ValueError(f"a schema must be an object, not {shown(root)}")
    if "x-guidance" in root:
        raise ValueError("'x-guidance' would replace the server's options; leave it out")
    nodes = _reachable(root)
    _check_ends(root, nodes)
    merged = any(key in node for node in nodes for key in MERGING)
    every_name = {name for node in nodes for name in _names(node)} if merged else set()
    for node in nodes:
        if isinstance(name := node.get("format"), str) and name not in FORMATS:
            del node["format"]
        if "prefixItems" in node and not isinstance(node.get("items"), list):
            node.pop("additionalItems", None)  # It makes llguidance ignore 'prefixItems'.
        _narrow_bounds(node)
        _check_constant([node.get("const"), node.get("enum")])
        _check_count(node)
        _check_names(node, every_name or _names(node))
    root["x-guidance"] = OPTIONS
    return json.dumps(root, ensure_ascii=False)


def _reachable(root: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the schema and all in it that may apply to a value."""
    nodes: dict[int, dict[str, Any]] = {}
    waiting: list[Any] = [root]
    while waiting:
        node = waiting.pop()
        if not isinstance(node, dict) or id(node) in nodes:
            continue
        nodes[id(node)] = node
        for key in MAPS_OF_SCHEMAS:
            waiting += node[key].values() if isinstance(node.get(key), dict) else ()
        for key in SCHEMAS:
            waiting += node[key] if isinstance(node.get(key), list) else [node.get(key)]
        waiting.append(_target(root, node.get("$ref")))
    return list(nodes.values())


def _target(root: Any, reference: Any) -> Any:
    """Return what `#/a/b` refers to. Other references are to schemas in `$defs`, found anyway."""
    for key in unquote(reference).split("/")[1:] if isinstance(reference, str) else ():
        if isinstance(root, list):
            root = dict(enumerate(root)).get(int(key[:9]) if key.isdecimal() else -1)
        else:
            name = key.replace("~1", "/").replace("~0", "~")
            root = root.get(name) if isinstance(root, dict) else None
    return root


def _check_ends(root: Any, nodes: list[dict[str, Any]]) -> None:
    """Refuse a schema whose values all hold a value of it again: an answer would never end."""
    ending: set[int] = set()  # Ids of schemas with a value that ends.
    before = -1
    while before < len(ending):
        before = len(ending)
        for node in reversed(nodes):  # Inner schemas mostly come later.
            if id(node) not in ending and _ends(_merged(root, node), root, ending):
                ending.add(id(node))
    for node in nodes:
        if id(node) not in ending:
            raise ValueError(
                f"the schema {shown(node)} requires in each value another value of itself, so no"
                " answer would end; make a name in 'required' optional, or lower 'minItems'"
            )


def _merged(root: Any, node: Any) -> list[dict[str, Any]]:
    """Return a schema and those that `allOf` and `$ref` add to it."""
    parts: dict[int, dict[str, Any]] = {}
    waiting = [node]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict) and id(part) not in parts:
            parts[id(part)] = part
            waiting += part["allOf"] if isinstance(part.get("allOf"), list) else ()
            if part.get("$ref") == "#" or str(part.get("$ref")).startswith("#/"):
                waiting.append(_target(root, part["$ref"]))
    return list(parts.values())


def _ends(parts: list[dict[str, Any]], root: Any, ending: set[int]) -> bool:
    """Return whether a value of all these schemas needs only values of `ending`."""
    for options in (part.get(key) for part in parts for key in ("anyOf", "oneOf")):
        if isinstance(options, list) and not any(
            _may_end(one, ending) and _has_value([*parts, *_merged(root, one)], ending)
            for one in options
        ):
            return False
    return _has_value(parts, ending)


def _has_value(parts: list[dict[str, Any]], ending: set[int]) -> bool:
    given = [part["type"] for part in parts if "type" in part]
    types = [one if isinstance(one, list) else [one] for one in given]
    checks = {"object": _object_ends, "array": _array_ends}
    possible = [check for kind, check in checks.items() if all(kind in one for one in types)]
    return (
        all(any(kind not in [*checks] for kind in one) for one in types)
        or any("const" in part or "enum" in part for part in parts)
        or not possible  # llguidance refuses types that exclude each other.
        or any(check(parts, ending) for check in possible)
    )


def _object_ends(parts: list[dict[str, Any]], ending: set[int]) -> bool:
    required = {name for part in parts for name in _names({"required": part.get("required")})}
    for part in parts:
        named, patterns = (
            value if isinstance(value := part.get(key), dict) else {}
            for key in ("properties", "patternProperties")
        )
        others = part.get("additionalProperties")
        if not all(_name_ends(name, named, patterns, others, ending) for name in required):
            return False
        choices = [one for one in (*named.values(), *patterns.values(), others) if one is not False]
        some = part.get("minProperties") and choices and not required
        if some and not any(_may_end(one, ending) for one in choices):
            return False
    return True


def _name_ends(
    name: str, named: dict[str, Any], patterns: dict[str, Any], others: Any, ending: set[int]
) -> bool:
    """Return whether the value of a required name needs only values of `ending`."""
    if not _may_end(named.get(name), ending):
        return False
    if any(not _may_end(one, ending) and _matches(key, name) for key, one in patterns.items()):
        return False
    if name in named or _may_end(others, ending):
        return True
    return any(_matches(key, name) for key in patterns)


@cache
def _matches(pattern: str, name: str) -> bool:
    """Return whether a key of `patternProperties` applies to a name, as llguidance reads it."""
    only = {"type": "object", "patternProperties": {pattern: True}, "additionalProperties": False}
    text = json.dumps(only)
    grammar = llguidance.LLMatcher.grammar_from_json_schema(text, {"whitespace_flexible": False})
    matcher = llguidance.LLMatcher(BYTES, grammar, log_level=0)
    tokens = BYTES.tokenize_str("{" + json.dumps(name, ensure_ascii=False) + ":")
    # A pattern that is an error is reported when the whole schema is compiled.
    return not matcher.is_error() and matcher.validate_tokens(tokens) == len(tokens)


def _array_ends(parts: list[dict[str, Any]], ending: set[int]) -> bool:
    least = max([0, *(n for part in parts if isinstance(n := part.get("minItems"), int))])
    for part in parts:
        first, rest = part.get("prefixItems"), part.get("items")
        if isinstance(rest, list):
            first, rest = rest, part.get("additionalItems")
        first = first if isinstance(first, list) else []
        needed = [*first[:least], *([rest] if least > len(first) else [])]
        if not all(_may_end(one, ending) for one in needed):
            return False
    return True


def _may_end(schema: Any, ending: set[int]) -> bool:
    return not isinstance(schema, dict) or id(schema) in ending


def _names(node: dict[str, Any]) -> set[str]:
    properties, required = node.get("properties"), node.get("required")
    names: list[Any] = [*properties] if isinstance(properties, dict) else []
    names += required if isinstance(required, list) else []
    return {name for name in names if isinstance(name, str)}


def _narrow_bounds(node: dict[str, Any]) -> None:
    """Move the bounds of numbers that llguidance would widen."""
    for key, sign in BOUNDS.items():
        bound = node.get(key)
        if bound is True:  # Draft 4.
            bound = node.get(key.removeprefix("exclusive").lower())
        if isinstance(bound, bool) or not isinstance(bound, int | float) or abs(bound) >= 2**63:
            continue
        number = float(bound)
        if isinstance(bound, int) and (bound - int(number)) * sign > 0:
            number = math.nextafter(number, sign * math.inf)  # An integer of more than 53 bits.
        if key.startswith("exclusive") and number.is_integer():
            # llguidance would allow 0 for {"exclusiveMinimum": 0, "maximum": 0.5}.
            number += sign * max(1e-9, math.ulp(number))
        if number != node[key]:
            node[key] = number


def _check_constant(value: Any) -> None:
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            _check_constant(inner)
    elif isinstance(value, int) and (abs(value) >= 2**63 or float(value) != value):
        raise ValueError(
            f"the integer {shown(value)} cannot be enforced exactly, because it has more than 53"
            " bits; use a string"
        )
    elif isinstance(value, str) and (found := ESCAPED.search(value)):
        raise ValueError(f"the control character {found[0]!r} in a constant cannot be enforced")


def _check_count(node: dict[str, Any]) -> None:
    """Refuse a number of properties that an answer could reach by writing a name twice."""
    count, types = node.get("minProperties"), node.get("type", "object")
    listed = len(_names({"required": node.get("required")}))
    is_open = node.get("additionalProperties") is not False or node.get("patternProperties")
    is_object = "object" in (types if isinstance(types, list) else [types])
    if isinstance(count, int) and count > listed + 1 and is_open and is_object:
        raise ValueError(
            f"'minProperties' is {count}, but 'required' lists {listed} names, and it cannot be"
            " enforced that more than one other differs; list more names in 'required'"
        )


def _check_names(node: dict[str, Any], names: Iterable[str]) -> None:
    """Refuse patterns that allow no name but listed ones: no token would follow a comma."""
    patterns = node.get("patternProperties")
    if not patterns or not isinstance(patterns, dict):
        return
    probe = {
        "properties": dict.fromkeys(names, False),
        "patternProperties": {key: value is not False for key, value in patterns.items()},
        "additionalProperties": node.get("additionalProperties") is not False,
    }
    text = json.dumps({"type": "object", "minProperties": 1} | probe)
    grammar = llguidance.LLMatcher.grammar_from_json_schema(text, {"whitespace_flexible": False})
    matcher = llguidance.LLMatcher(BYTES, grammar, log_level=0)
    if matcher.is_error():
        return  # The schema itself is refused, or it allows no other names.
    matcher.consume_tokens(BYTES.tokenize_str("{"))
    matcher.compute_bitmask()
    if matcher.is_error():
        raise ValueError(
            f"the names that 'patternProperties' allows ({shown(', '.join(patterns))}) are all in"
            " 'properties' or 'required'; list their schemas in 'properties' only"
        )
