"""Upper bound of the bytes that one token covers, to refuse a long prompt without tokenizing it.

Tokenizing a megabyte takes seconds. If no token covers more than n bytes, a text of more than n
bytes per token of the context cannot fit. This module only reads the description of a tokenizer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from vlora.model.vocabulary import BYTE_ALPHABET

Spec = Mapping[str, Any]
"""Part of the content of a `tokenizer.json`."""

NFC_SHRINKAGE = 4
"""Maximum ratio of the bytes of a text to the bytes of its NFC form. ASCII text keeps its length.
"""

LOSSLESS_SPLITS = ("ByteLevel", "Metaspace", "Digits", "Split", "Punctuation")
"""Pre-tokenizers that drop no text, except `Split` and `Punctuation` with the behavior "Removed".
"""


class TokenLength:
    """Upper bound of the bytes of text that one token of a tokenizer covers.

    longest: number of bytes of the longest token. It is infinite if a token may cover text of any
        length, such as stripped white space or an unknown word.
    """

    def __init__(self, tokenizer: Any) -> None:
        spec = json.loads(tokenizer.backend_tokenizer.to_str())
        model, added = spec["model"], spec["added_tokens"]
        splits = _flat(spec["pre_tokenizer"], "pretokenizers")
        byte_level = any(split["type"] == "ByteLevel" for split in splits)
        self._shrinkage = _shrinkage(spec["normalizer"])
        self.longest = math.inf
        if (
            self._shrinkage < math.inf
            and _has_all_bytes(model, byte_level)
            and not any(map(_drops_text, splits))
            and not any(token["lstrip"] or token["rstrip"] for token in added)
        ):
            # A character of a byte-level token stands for one byte.
            sizes = (len(token) if byte_level else len(token.encode()) for token in model["vocab"])
            self.longest = max(*sizes, *(len(token["content"].encode()) for token in added))

    def max_bytes(self, text: str, tokens: int) -> float:
        """Return an upper bound of the bytes of a text that consists of this many tokens.

        text: the text itself; the bound is larger if it is not ASCII.
        """
        return tokens * self.longest * (1 if text.isascii() else self._shrinkage)


def _has_all_bytes(model: Spec, byte_level: bool) -> bool:
    """Return whether the model has a token for each byte, so that no text is unknown."""
    if model["type"] != "BPE":
        return False
    if byte_level:
        return all(character in model["vocab"] for character in BYTE_ALPHABET)
    fallbacks = (f"<0x{byte:02X}>" for byte in range(256))
    return bool(model["byte_fallback"]) and all(token in model["vocab"] for token in fallbacks)


def _drops_text(split: Spec) -> bool:
    """Return whether a pre-tokenizer may drop text, which no token then covers."""
    return split["type"] not in LOSSLESS_SPLITS or split.get("behavior") == "Removed"


def _shrinkage(normalizer: Spec | None) -> float:
    """Return an upper bound of the bytes of a text divided by those of its normalized form.

    The bound is infinite if the normalizer may shorten ASCII text, or is of an unknown type.
    """
    ratio = 1.0
    for step in _flat(normalizer, "normalizers"):
        if step["type"] == "NFC":
            ratio *= NFC_SHRINKAGE
        elif step["type"] == "Replace":
            replaced = step["pattern"].get("String")
            if replaced is None or len(step["content"].encode()) < len(replaced.encode()):
                return math.inf
        elif step["type"] != "Prepend":
            return math.inf
    return ratio


def _flat(part: Spec | None, key: str) -> list[Spec]:
    """Return the steps of a normalizer or pre-tokenizer.

    key: key of the list of steps in a part of type "Sequence".
    """
    if part is None:
        return []
    if part["type"] != "Sequence":
        return [part]
    return [step for inner in part[key] for step in _flat(inner, key)]
