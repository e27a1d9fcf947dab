"""Structures for constrained answers in tests: hostile ones, and random JSON schemas."""

from __future__ import annotations

import json
import random
from typing import Any

from vlora.structured.structure import Structure


def _json(schema: Any) -> Structure:
    return Structure("json", schema if isinstance(schema, str) else json.dumps(schema))


def _regex(text: str) -> Structure:
    return Structure("regex", text)


def _lark(text: str) -> Structure:
    return Structure("grammar", text)


def _chain(count: int, value: Any, last: Any) -> dict[str, Any]:
    """Return definitions, each of which refers to the next. value: makes one from a reference."""
    inner = {f"a{i}": value({"$ref": f"#/$defs/a{i + 1}"}) for i in range(count)}
    return {"$ref": "#/$defs/a0", "$defs": inner | {f"a{count}": last}}


def _doubling(rule: str, count: int, last: str) -> str:
    rules = (f"{rule}{i}: {rule}{i + 1} {rule}{i + 1}" for i in range(count))
    return "\n".join((f"start: {rule}0", *rules, f"{rule}{count}: {last}"))


def _alternatives(kind: str, count: int) -> dict[str, Any]:
    def one(name: str) -> dict[str, Any]:
        return {"properties": {name: {"type": "integer"}}, "required": [name]}

    return {"allOf": [{kind: [one(f"p{i}{j}") for j in range(4)]} for i in range(count)]}


INTEGER = {"type": "integer"}

HOSTILE: dict[str, Structure] = {
    "nested arrays": _json('{"type":"array","items":' * 30 + "{}" + "}" * 30),
    "arrays beyond the depth": _json('{"items":' * 2000 + "{}" + "}" * 2000),
    "a chain of references": _json(_chain(1500, lambda ref: ref, {"type": "null"})),
    "a reference to itself": _json('{"$ref": "#"}'),
    "a circle of references": _json(_chain(1, lambda ref: ref, {"$ref": "#/$defs/a0"})),
    "itself with a sibling": _json('{"allOf": [{"$ref": "#"}, {"type": "object"}]}'),
    "a product of anyOf": _json(_alternatives("anyOf", 12)),
    "a product of oneOf": _json(_alternatives("oneOf", 12)),
    "a tree of references": _json(
        _chain(40, lambda ref: {"properties": {"x": ref, "y": ref}}, {"type": "null"})
    ),
    "an allOf that doubles": _json(_chain(40, lambda ref: {"allOf": [ref, ref]}, {"type": "null"})),
    "an anyOf that doubles": _json(_chain(30, lambda ref: {"anyOf": [ref, ref]}, {"type": "null"})),
    "a billion items": _json({"type": "array", "items": INTEGER, "minItems": 10**9}),
    "products of items": _json(
        {"type": "array", "minItems": 999, "items": {"type": "array", "minItems": 999}}
    ),
    "a long string": _json({"type": "string", "minLength": 10**6}),
    "a billion characters": _json({"type": "string", "maxLength": 10**9}),
    "a large enum": _json({"enum": [f"value {i}" for i in range(4000)]}),
    "an enum of a megabyte": _json({"enum": [f"value number {i}" for i in range(60000)]}),
    "many alternatives": _json({"anyOf": [{"const": f"v{i}"} for i in range(3000)]}),
    "many objects": _json(
        {"anyOf": [{"properties": {f"k{i}": INTEGER}, "required": [f"k{i}"]} for i in range(700)]}
    ),
    "many properties": _json({"properties": {f"k{i}": INTEGER for i in range(2000)}}),
    "overlapping names": _json(
        {"patternProperties": {f"^a{{{i}}}.*b{{{i}}}$": INTEGER for i in range(1, 200)}}
    ),
    "a large divisor": _json({"type": "integer", "multipleOf": 1234567891}),
    "a wide range": _json({"type": "number", "minimum": -1.2345e300, "maximum": 1e300}),
    "an empty range": _json({"type": "integer", "minimum": 2, "maximum": 1}),
    "unknown keywords": _json({"type": "object", "frobnicate": [1, {"x": None}]}),
    "unsupported keywords": _json({"not": {"type": "string"}, "uniqueItems": True}),
    "a pattern that backtracks": _json({"type": "string", "pattern": "^(a|a)*(a|aa)+(.*a){20}$"}),
    "a pattern of a gigabyte": _json({"type": "string", "pattern": "(a{1000}){1000000}"}),
    "a wrong type": _json({"type": "strin"}),
    "not a schema": _json('{"properties": 7, "required": {"a": 1}}'),
    "nested stars": _regex("((a*)*)*b"),
    "a far letter": _regex("(?s:.*a.{500})"),
    "cubed repeats": _regex("((a{1000}){1000}){1000}"),
    "optional repeats": _regex("((((a?b?){50}){50}){50}){50}"),
    "a repeat of billions": _regex("a{2000000000}"),
    "a long repeat": _regex("(?s:.{1,100000})"),
    "classes": _regex(r"(\p{L}\p{N}){1,1000}\p{Greek}*"),
    "far letters": _regex("|".join(f".*{chr(97 + i % 26)}{i}.{{{i % 50}}}" for i in range(1000))),
    "nested groups": _regex("(" * 9000 + "a" + ")" * 9000),
    "no text at all": _regex(r"[^\s\S]"),
    "a long literal": _regex("ab" * 30000),
    "many wildcards": _regex("(.*x)?" * 1000),
    "a rule of itself": _lark("start: start"),
    "a rule that is ambiguous": _lark('start: start start | "a" | '),
    "repeats of rules": _lark('start: (("a"{1,1000}){1,1000}){1,1000}'),
    "nested parentheses": _lark("start: " + "(" * 20000 + '"a"' + ")" * 20000),
    "rules that double": _lark(_doubling("a", 60, '"x"')),
    "terminals that double": _lark(_doubling("A", 16, "/(.*x)?/")),
    "intersections": _lark(
        "start: A\nA: " + " & ".join(f"/(?s:.*{chr(97 + i)}.{{{i + 5}}})/" for i in range(20))
    ),
    "complements": _lark("start: A\nA: ~(/(?s:.*a.{18})/) & ~(/(?s:.*b.{19})/)"),
    "a grammar in JSON": _lark(json.dumps({"grammars": [{"json_schema": {}}] * 2000})),
    "brackets of every depth": _lark('start: "(" start ")" | start start | "x"'),
}
"""Structures that are expensive, cannot be compiled, or allow no text."""


def draw_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """Return a random JSON schema whose texts are bounded in length."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "pattern"]
    if depth < 3:
        kinds += ["object", "object", "array", "anyOf", "ref"] * 2
    kind = rng.choice(kinds)
    if kind == "object" or not depth:
        return _draw_object(rng, depth)
    if kind == "array":
        least = rng.randrange(3)
        items = draw_schema(rng, depth + 1)
        most = least + rng.randrange(1, 3)
        return {"type": "array", "items": items, "minItems": least, "maxItems": most}
    if kind == "anyOf":
        return {"anyOf": [draw_schema(rng, depth + 1) for _ in range(rng.randrange(2, 4))]}
    if kind == "string":
        least = rng.randrange(4)
        return {"type": "string", "minLength": least, "maxLength": least + rng.randrange(1, 9)}
    if kind == "integer":
        low = rng.randrange(-500, 500)
        return {"type": "integer", "minimum": low, "maximum": low + rng.randrange(1000)}
    if kind == "pattern":
        return {"type": "string", "pattern": rng.choice(PATTERNS)}
    if kind == "enum":
        return {"enum": rng.sample(VALUES, rng.randrange(1, 5))}
    if kind == "const":
        return {"const": rng.choice(VALUES)}
    if kind == "ref":
        return {"$ref": "#/$defs/point"}
    if kind == "number":
        return {"enum": [0.5, -2.25, 1e3]}
    return {"type": kind}


PATTERNS = ("^[A-Z]{2}-[0-9]{3}$", "^(yes|no)$", "^[a-z]{1,9}@[a-z]{2,5}\\.org$", "^a?b{2,4}c$")
TEXTS = ("red", "green", "blué", 'a "quoted"\nline', "")
VALUES: list[Any] = [*TEXTS, 7, -1, True, None, [1, 2], {"a": 1}]
NAMES = ("id", "name", "box", "n", "größe", "a b", "$x", "label")
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}, "y": {"type": "boolean"}},
    "required": ["x", "y"],
    "additionalProperties": False,
}


def _draw_object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(NAMES, rng.randrange(1, 5))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: draw_schema(rng, depth + 1) for name in names},
        "required": rng.sample(names, rng.randrange(len(names) + 1)),
        "additionalProperties": False,
    }
    if not depth:
        schema["$defs"] = {"point": POINT}
    return schema


def draw_object(rng: random.Random) -> dict[str, Any]:
    """Return a small schema of an object, with keywords that apply to the same names."""
    values: list[Any] = [INTEGER, {"minimum": 3}, {"enum": ["a", 1]}, {"const": 1}, True, False]
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: rng.choice(values) for name in rng.sample("ab1", 2)},
        "patternProperties": {rng.choice(("^a", "^[ab]$", "1$", "^ab?$")): rng.choice(values)},
        "additionalProperties": rng.choice((False, *values)),
        "required": rng.sample(("a", "b", "ab"), rng.randrange(3)),
        "minProperties": rng.randrange(4),
        "maxProperties": rng.randrange(1, 5),
    }
    kept = {key: value for key, value in schema.items() if key == "type" or rng.random() < 0.5}
    return kept if rng.random() < 0.7 else {"allOf": [kept, draw_object(rng)]}
