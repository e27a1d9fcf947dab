"""What each token stands for as bytes; streaming text out of tokens is made of this."""

from __future__ import annotations

import codecs
import re
from functools import cached_property
from typing import Any

_BYTE_TOKEN = re.compile(r"^<0x([0-9A-Fa-f]{2})>$")


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable character for each byte, inverted."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    return alphabet | {chr(256 + index): byte for index, byte in enumerate(others)}


class Vocabulary:
    """Bytes of every token: b"" for special tokens, which never appear in text."""

    def __init__(self, tokenizer: Any) -> None:
        added = tokenizer.added_tokens_decoder
        # Byte-level tokenizers spell bytes as printable characters, SentencePiece-like ones mark
        # a space with "▁" and spell odd bytes as <0x..>. Both are told apart by their decoder.
        self._byte_level = "ByteLevel" in str(tokenizer.backend_tokenizer.decoder)
        self._alphabet = _byte_level_alphabet()
        special = set(tokenizer.all_special_ids)
        self.bytes_of: list[bytes] = [b""] * len(tokenizer)
        for text, token in tokenizer.get_vocab().items():
            if token in special or (token in added and added[token].special):
                continue
            self.bytes_of[token] = text.encode() if token in added else self._spell(text)

    def _spell(self, text: str) -> bytes:
        if self._byte_level:
            return bytes(self._alphabet[character] for character in text)
        if match := _BYTE_TOKEN.match(text):
            return bytes([int(match[1], 16)])
        return text.replace("▁", " ").encode()

    @cached_property
    def tokens_of(self) -> dict[bytes, list[int]]:
        """Tokens by their bytes (several may spell the same), without the silent ones."""
        index: dict[bytes, list[int]] = {}
        for token, spelled in enumerate(self.bytes_of):
            if spelled:
                index.setdefault(spelled, []).append(token)
        return index

    def lengths(self, beginning: bytes) -> tuple[int, ...]:
        """Lengths in bytes, ascending, of the tokens that begin with these two bytes, or with the
        first of them and end there."""
        return self._lengths.get(beginning, (1,))

    @cached_property
    def _lengths(self) -> dict[bytes, tuple[int, ...]]:
        found: dict[bytes, set[int]] = {}
        for spelled in self.tokens_of:
            if len(spelled) > 1:
                found.setdefault(spelled[:2], {1}).add(len(spelled))
        return {beginning: tuple(sorted(lengths)) for beginning, lengths in found.items()}

    def text(self, token: int) -> str:
        return self.bytes_of[token].decode(errors="replace") if token < len(self.bytes_of) else ""


class TextStream:
    """Turns tokens into text deltas, never splitting a character, and stops at stop strings.

    What could be the beginning of a stop string is held back until it is decided.
    Together they are `decode`'s text, half a character at the end included (as U+FFFD), which the
    `DecodeStream` of tokenizers never gives.
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
        """(text that may be sent now, whether a stop string ended the answer)."""
        bytes_of = self._vocabulary.bytes_of
        self._held += self._decoder.decode(bytes_of[token] if token < len(bytes_of) else b"")
        if not check_stop:
            return self._release(len(self._held)), False
        found = [(self._held.find(stop), stop) for stop in self._stop if stop in self._held]
        if found:
            at, stop = min(found)
            return self._release(at + len(stop) * self._include_stop), True
        return self._release(len(self._held) - self._undecided()), False

    def flush(self) -> str:
        """The rest, once the answer has ended for another reason."""
        self._held += self._decoder.decode(b"", final=True)
        return self._release(len(self._held))

    def _release(self, count: int) -> str:
        text, self._held = self._held[:count], self._held[count:]
        return text

    def _undecided(self) -> int:
        """Length of the longest end of what is held that begins a stop string."""
        longest = 0
        for stop in self._stop:
            for size in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:size]):
                    longest = size
                    break
        return longest
