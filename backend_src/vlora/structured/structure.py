"""The structure that an answer must have, and reading of the sampling keys that describe it.

This module handles no grammars or tokens. `worker.py` compiles the structure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from vlora.errors import InvalidArgument, Unsupported, nearest, shown
from vlora.strict_json import BOOLEANS, is_text, load_object, read_texts, wrong_value

# vLLM's keys, each with the kind of its value; None if the value, an object like {"regex": "a+"} or
# its text, names the kind.
STRUCTURE_KEYS: Mapping[str, str | None] = {
    "structured_outputs": None,
    "guided_decoding": None,
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_grammar": "grammar",
    "guided_choice": "choice",
    "guided_json_object": "json_object",
}

KINDS = ("json", "json_object", "regex", "grammar", "choice")
MAX_DEPTH = 64  # Maximum nesting depth of lists and objects in a JSON schema.
MAX_HINT_LENGTH = 64  # Maximum length of an unknown kind for which a similar one is named.
Kind = Literal["json", "regex", "grammar"]


@dataclass(frozen=True)
class Structure:
    """Description of the set of texts that an answer may be.

    text: a JSON schema, a regular expression (in the syntax of Rust's `regex`, without
        look-around), or a grammar in llguidance's dialect of Lark.
    """

    kind: Kind
    text: str

    @property
    def bytes(self) -> int:
        """Size of the text in bytes of UTF-8."""
        return len(self.text.encode())


def read_structure(key: str, value: Any) -> Structure | tuple[str, ...]:
    """Return the structure under one of STRUCTURE_KEYS. A list of choices is returned as a tuple.

    Raises InvalidArgument, and Unsupported for an unknown kind.
    """
    kind = STRUCTURE_KEYS[key]
    if kind is None:
        kind, value = _only_kind(key, value)
        key = f"{kind}' of '{key}"
    if kind == "choice":
        return read_texts(key, value, "a list of non-empty strings")
    if kind == "json":
        return Structure("json", _schema(key, value))
    if kind == "json_object":
        if value is not True and BOOLEANS.get(str(value).lower()) is not True:
            raise wrong_value(key, value, "true")
        return Structure("json", '{"type": "object"}')
    if not is_text(value) or not value:
        what = "regular expression" if kind == "regex" else "grammar"
        raise wrong_value(key, value, f"a {what} in a non-empty string")
    return Structure("regex" if kind == "regex" else "grammar", value)


def _only_kind(key: str, value: Any) -> tuple[str, Any]:
    """Return the key of an object like `{"regex": "a+"}`, or its text, and the key's value."""
    parsed = load_object(value, f"'{key}'", MAX_DEPTH) if isinstance(value, str) else value
    kinds = ", ".join(KINDS)
    if not isinstance(parsed, dict):
        raise wrong_value(key, value, f"an object with one of the keys {kinds}")
    given = {name: inner for name, inner in parsed.items() if inner not in (None, False)}
    for name in given:
        if name not in KINDS:
            hint = nearest(name, KINDS) if len(name) <= MAX_HINT_LENGTH else ""
            raise Unsupported(f"'{key}' supports {kinds}, not {shown(name)}{hint}")
    if len(given) != 1:
        found = ", ".join(given) or "none"
        raise InvalidArgument(f"'{key}' must have exactly one of the keys {kinds}; it has {found}")
    return next(iter(given.items()))


def _schema(key: str, value: Any) -> str:
    """Return the text of a JSON schema that is given as an object or as text."""
    expected = "a JSON schema: an object, or its text"
    if value is True:
        return "{}"
    if not isinstance(value, dict | str):
        raise wrong_value(key, value, expected)
    try:
        # Properties in the answer have the order of these keys.
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        raise wrong_value(key, value, expected) from None
    load_object(text, f"'{key}'", MAX_DEPTH)
    return text
