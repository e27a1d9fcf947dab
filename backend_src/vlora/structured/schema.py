"""Preparation of a JSON schema for llguidance, so that each complete answer is valid.

Where llguidance would allow an invalid answer, or no token in the middle of one, the schema is
rewritten, or refused by a ValueError of one sentence.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
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
