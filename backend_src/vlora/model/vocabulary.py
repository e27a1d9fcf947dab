"""The bytes of each token, and the conversion of a stream of tokens to text."""

from __future__ import annotations

import codecs
import re
from functools import cached_property
from typing import Any

_BYTE_TOKEN = re.compile(r"^<0x([0-9A-Fa-f]{2})>$")


def _byte_level_alphabet() -> dict[str, int]:
    """Return the byte that each of GPT-2's printable characters stands for."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    return alphabet | {chr(256 + index): byte for index, byte in enumerate(others)}


BYTE_ALPHABET = _byte_level_alphabet()
"""Byte of each character in the tokens of a byte-level tokenizer."""


class Vocabulary:
    """Bytes of every token that the model can generate.

    bytes_of: bytes by token id; b"" for special tokens, which never appear in text.
    """

    def __init__(self, tokenizer: Any, size: int | None = None) -> None:
        """Read the tokens.

        size: number of tokens of the model, if the tokenizer may have more.
        """
        added = tokenizer.added_tokens_decoder
        # Byte-level tokenizers write bytes as printable characters. Tokenizers like SentencePiece
        # write a space as "▁" and single bytes as <0x..>. The tokenizer's decoder shows which kind
        # the tokenizer is.
        self._byte_level = "ByteLevel" in str(tokenizer.backend_tokenizer.decoder)
        special = set(tokenizer.all_special_ids)
        size = len(tokenizer) if size is None else size
        self.bytes_of: list[bytes] = [b""] * min(len(tokenizer), size)
        for text, token in tokenizer.get_vocab().items():
            if token >= size or token in special or (token in added and added[token].special):
                continue
            self.bytes_of[token] = text.encode() if token in added else self._to_bytes(text)

    def _to_bytes(self, text: str) -> bytes:
        """Return the bytes of a token from its text in the tokenizer's vocabulary."""
        if self._byte_level:
            return bytes(BYTE_ALPHABET[character] for character in text)
        if match := _BYTE_TOKEN.match(text):
            return bytes([int(match[1], 16)])
        return text.replace("▁", " ").encode()

    @cached_property
    def tokens_of(self) -> dict[bytes, list[int]]:
        """Token ids by their bytes.

        Several tokens may have the same bytes. Tokens without bytes are left out.
        """
        index: dict[bytes, list[int]] = {}
        for token, token_bytes in enumerate(self.bytes_of):
            if token_bytes:
                index.setdefault(token_bytes, []).append(token)
        return index

    def token_lengths(self, prefix: bytes) -> tuple[int, ...]:
        """Return the lengths in bytes that a token at the start of a text can have, in ascending
        order.

        prefix: first two bytes of the text, or its only byte. Length 1 is always included.
        """
        return self._lengths_by_prefix.get(prefix, (1,))

    @cached_property
    def _lengths_by_prefix(self) -> dict[bytes, tuple[int, ...]]:
        lengths: dict[bytes, set[int]] = {}
        for token_bytes in self.tokens_of:
            if len(token_bytes) > 1:
                lengths.setdefault(token_bytes[:2], {1}).add(len(token_bytes))
        return {prefix: tuple(sorted(values)) for prefix, values in lengths.items()}

    def text(self, token: int) -> str:
        """Return a token's text on its own, with U+FFFD for incomplete characters."""
        return self.bytes_of[token].decode(errors="replace") if token < len(self.bytes_of) else ""


class TextStream:
    """Converts tokens to text deltas without splitting characters, and stops at stop strings.

    Text that may be the start of a stop string is held back until later tokens show whether it
    is one. All deltas together equal the text of the tokenizer's `decode`, with U+FFFD for an
    incomplete character at the end. The `DecodeStream` of the package tokenizers would omit such a
    character.
    """

    def __init__(
        self, vocabulary: Vocabulary, stop: tuple[str, ...] = (), include_stop: bool = False
    ) -> None:
        self._vocabulary = vocabulary
        self._stop = stop
        self._include_stop = include_stop
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""

    def push(self, token: int, check_stop: bool = True) -> tuple[str, bool]:
        """Add a token; return the text to send now, and whether a stop string ended the answer.

        check_stop: if False, stop strings are ignored and nothing is held back.
        """
        bytes_of = self._vocabulary.bytes_of
        text = self._decoder.decode(bytes_of[token] if token < len(bytes_of) else b"")
        if not self._stop:
            return text, False
        self._held += text
        if not check_stop:
            return self._release(len(self._held)), False
        matches = [(self._held.find(stop), stop) for stop in self._stop if stop in self._held]
        if matches:
            position, stop = min(matches)
            return self._release(position + len(stop) * self._include_stop), True
        return self._release(len(self._held) - self._undecided_length()), False

    def flush(self) -> str:
        """Return the text that was held back, after an answer has ended without a stop string."""
        self._held += self._decoder.decode(b"", final=True)
        return self._release(len(self._held))

    def _release(self, count: int) -> str:
        text, self._held = self._held[:count], self._held[count:]
        return text

    def _undecided_length(self) -> int:
        """Return the length of the longest suffix of the held text that may begin a stop string."""
        longest = 0
        for stop in self._stop:
            for size in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:size]):
                    longest = size
                    break
        return longest
