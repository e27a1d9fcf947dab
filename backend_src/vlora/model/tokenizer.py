"""Tokenizer of a checkpoint folder.

Qwen and Qwen-VL were published with `qwen.tiktoken`, a list of tokens by rank, and with code that
reads it. transformers' converter reads the list instead, and that code is never run.
"""

from __future__ import annotations

import base64
import binascii
import codecs
import json
import math
import re
import secrets
import threading
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, normalizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter

from vlora.errors import InvalidArgument, in_one_line, shown
from vlora.file_names import openable

_BYTE_TOKEN = re.compile(r"^<0x([0-9A-Fa-f]{2})>$")
# Special tokens that belong to an answer: marks of names and places, and single coordinates. All
# others (ends, roles, image markers, padding, reserved ones) control the model.
_CONTENT_TOKEN = re.compile(
    r"[<\[]\|?/?(?:(?:object_)?ref|det|grounding|box|quad|point|poly|polygon|loc|coord|bin|seg)"
    r"(?:_start|_end)?[_-]?[0-9]*\|?[>\]]|[0-9]+",
    re.IGNORECASE,
)


def _byte_level_alphabet() -> dict[str, int]:
    """Return the byte that each of GPT-2's printable characters stands for."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    return alphabet | {chr(256 + index): byte for index, byte in enumerate(others)}


# Byte of each character in the tokens of a byte-level tokenizer.
BYTE_ALPHABET = _byte_level_alphabet()


class Vocabulary:
    """Bytes of every token that the model can generate.

    size: number of tokens of the model, if the tokenizer may have more.
    bytes_of: bytes by token id, for choices and structures; b"" for special tokens, which these
        can never contain.
    """

    def __init__(self, tokenizer: Any, size: int | None = None) -> None:
        added = tokenizer.added_tokens_decoder
        # Byte-level tokenizers write bytes as printable characters. Tokenizers like SentencePiece
        # write a space as "▁" and single bytes as <0x..>. The tokenizer's decoder shows which kind
        # the tokenizer is.
        self._byte_level = "ByteLevel" in str(tokenizer.backend_tokenizer.decoder)
        special = special_tokens(tokenizer)
        vocabulary = tokenizer.get_vocab()
        # Ids may have gaps, so there may be fewer tokens than ids.
        ids = max(vocabulary.values(), default=-1) + 1
        size = ids if size is None else size
        self.bytes_of: list[bytes] = [b""] * min(ids, size)
        for text, token in vocabulary.items():
            if token < size and token not in special:
                self.bytes_of[token] = text.encode() if token in added else self._to_bytes(text)
        self._special = {token: text.encode() for token, text in special.items()}
        self._control = control_tokens(tokenizer)

    def _to_bytes(self, text: str) -> bytes:
        if self._byte_level:
            # As in the package tokenizers, other tokens are text.
            known = all(character in BYTE_ALPHABET for character in text)
            return bytes(map(BYTE_ALPHABET.__getitem__, text)) if known else text.encode()
        if match := _BYTE_TOKEN.match(text):
            return bytes([int(match[1], 16)])
        return text.replace("▁", " ").encode()

    @cached_property
    def tokens_of(self) -> dict[bytes, list[int]]:
        """Ids of all tokens with bytes, by their bytes."""
        index: dict[bytes, list[int]] = {}
        for token, token_bytes in enumerate(self.bytes_of):
            if token_bytes:
                index.setdefault(token_bytes, []).append(token)
        return index

    def tokens_of_word(self, word: str) -> list[int]:
        """Return the tokens that are a word alone: as it is written, in lower case, in upper case
        or capitalized, each with or without a space before it. Raises InvalidArgument for none.
        """
        forms = {form(word) for form in (str, str.lower, str.upper, str.capitalize)}
        texts = [text.encode() for form in forms for text in (form, f" {form}")]
        tokens = sorted(token for text in texts for token in self.tokens_of.get(text, ()))
        if not tokens:
            raise InvalidArgument(
                f"'word_probabilities' has {shown(word)}, which is no token of the model's"
                " vocabulary; give words that are one token"
            )
        return tokens

    def token_lengths(self, prefix: bytes) -> tuple[int, ...]:
        """Return the lengths in bytes that a token at the start of a text can have, ascending, with
        1.

        prefix: first two bytes of the text, or its only byte.
        """
        return self._lengths_by_prefix.get(prefix, (1,))

    @cached_property
    def _lengths_by_prefix(self) -> dict[bytes, tuple[int, ...]]:
        lengths: dict[bytes, set[int]] = {}
        for token_bytes in self.tokens_of:
            if len(token_bytes) > 1:
                lengths.setdefault(token_bytes[:2], {1}).add(len(token_bytes))
        return {prefix: tuple(sorted(values)) for prefix, values in lengths.items()}

    def shown(self, token: int, skip_special_tokens: bool = True) -> bytes:
        """Return a token's bytes in the text of an answer.

        skip_special_tokens: whether control tokens have none.
        """
        if token in self._special:
            hidden = skip_special_tokens and token in self._control
            return b"" if hidden else self._special[token]
        return self.bytes_of[token] if token < len(self.bytes_of) else b""

    def text(self, token: int, skip_special_tokens: bool = True) -> str:
        """Return `shown` as text on its own, with U+FFFD for incomplete characters."""
        return self.shown(token, skip_special_tokens).decode(errors="replace")


def special_tokens(tokenizer: Any) -> dict[int, str]:
    """Return the names of a tokenizer's special tokens by id."""
    special = {
        id: token.content for id, token in tokenizer.added_tokens_decoder.items() if token.special
    }
    ids = tokenizer.all_special_ids
    return special | dict(zip(ids, tokenizer.convert_ids_to_tokens(ids), strict=True))


def control_tokens(tokenizer: Any) -> frozenset[int]:
    """Return the ids of the special tokens that an answer's text does not show by default."""
    special = special_tokens(tokenizer).items()
    return frozenset(id for id, text in special if not _CONTENT_TOKEN.fullmatch(text))


class TextStream:
    """Converts tokens to text deltas without splitting characters, and stops at stop strings.

    Text that may be the start of a stop string is held back. All deltas together equal the text of
    the tokenizer's `decode`, with U+FFFD for an incomplete character at the end, which the
    `DecodeStream` of the package tokenizers would omit. Content tokens such as `<box>` are shown.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        self._vocabulary = vocabulary
        self._stop = stop
        self._include_stop = include_stop
        self._skip_special_tokens = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        # Number of leading characters of `_held` in which no stop string may end.
        self._exempt = 0

    def push(self, token: int, check_stop: bool = True) -> tuple[str, bool]:
        """Add a token; return the text to send now, and whether a stop string ended the answer.

        check_stop: if False, the text up to here contains no end of a stop string. One that begins
            here and ends in the text of a later token is found.
        """
        text = self._decoder.decode(self._vocabulary.shown(token, self._skip_special_tokens))
        if not self._stop:
            return text, False
        self._held += text
        if not check_stop:
            self._exempt = len(self._held)
        elif matches := list(self._matches()):
            position, stop = min(matches)
            return self._release(position + len(stop) * self._include_stop), True
        return self._release(len(self._held) - self._undecided_length()), False

    def _matches(self) -> Iterator[tuple[int, str]]:
        for stop in self._stop:
            position = self._held.find(stop, max(0, self._exempt - len(stop) + 1))
            if position >= 0:
                yield position, stop

    def flush(self) -> str:
        """Return the text that was held back, after an answer has ended without a stop string."""
        self._held += self._decoder.decode(b"", final=True)
        return self._release(len(self._held))

    def _release(self, count: int) -> str:
        text, self._held = self._held[:count], self._held[count:]
        self._exempt = max(0, self._exempt - count)
        return text

    def _undecided_length(self) -> int:
        longest = 0
        for stop in self._stop:
            for size in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:size]):
                    longest = size
                    break
        return longest


Spec = Mapping[str, Any]  # Part of the content of a `tokenizer.json`.
# Maximum ratio of the bytes of a text to the bytes of its NFC form. ASCII text keeps its length.
NFC_SHRINKAGE = 4
# Pre-tokenizers that drop no text, except `Split` and `Punctuation` with the behavior "Removed".
LOSSLESS_SPLITS = ("ByteLevel", "Metaspace", "Digits", "Split", "Punctuation")


class TokenLength:
    """Upper bound of the bytes of text that a token covers. Tokenizing takes seconds per MB.

    longest: bytes of the longest token; infinite if a token may cover text of any length, such as
        stripped white space or an unknown word.
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
            and all(split["type"] in LOSSLESS_SPLITS for split in splits)
            and not any(split.get("behavior") == "Removed" for split in splits)
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
    if model["type"] != "BPE":
        return False
    if byte_level:
        return all(character in model["vocab"] for character in BYTE_ALPHABET)
    fallbacks = (f"<0x{byte:02X}>" for byte in range(256))
    return bool(model["byte_fallback"]) and all(token in model["vocab"] for token in fallbacks)


def _shrinkage(normalizer: Spec | None) -> float:
    """Return the most bytes of text per byte of its normalized form; infinite if unknown."""
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
    """Return the steps of a normalizer or pre-tokenizer, which a "Sequence" lists under `key`."""
    if part is None:
        return []
    if part["type"] != "Sequence":
        return [part]
    return [step for inner in part[key] for step in _flat(inner, key)]


class LiteralTokenizer:
    """Copy of a tokenizer whose special tokens have names that nobody can write. Thread-safe.

    Splitting the text instead, and tokenizing the parts, would give other tokens at the borders.
    The copy is made when it is first needed, because it takes as much memory as the original.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._backend = tokenizer.backend_tokenizer
        added = tokenizer.added_tokens_decoder.items()
        self._special_ids = {id: token.content for id, token in added if token.special}
        self._lock = threading.Lock()
        self._copy: Tokenizer | None = None
        self._mark = secrets.token_hex(8)
        self._names = {text: f"{self._mark}-{id}-" for id, text in self._special_ids.items()}
        # A pattern takes the first alternative that fits, the tokenizer the longest.
        words = map(re.escape, sorted(self._names, key=len, reverse=True))
        self._special = re.compile("|".join(words) or r"(?!)")

    def encode(
        self, text: str, literals: Iterable[tuple[int, int]], add_special_tokens: bool
    ) -> list[int]:
        """Return the tokens of a text. No special token begins in a literal.

        literals: spans (start, end) of the text, in ascending order.

        Raises InvalidArgument if the vocabulary cannot express a literal without a special token.
        """
        copy = self._renamed()
        parts: list[str] = []
        end = 0
        for start, stop in literals:
            parts += (self._rename(text[end:start]), text[start:stop])
            end = stop
        parts.append(self._rename(text[end:]))
        (encoded,) = copy.encode_batch_fast(["".join(parts)], add_special_tokens=False)
        for id in encoded.ids:
            if id in self._special_ids:
                raise InvalidArgument(
                    f"the text has {self._special_ids[id]!r}, which this model's tokenizer cannot"
                    " represent as text; leave it out"
                )
        if add_special_tokens:
            encoded = copy.post_process(encoded)
        return [self._ids.get(id, id) for id in encoded.ids]

    def spells_special(self, text: str, literals: Iterable[tuple[int, int]]) -> bool:
        """Return whether a literal would become a special token if it were tokenized as usual."""
        return any(self._special.search(text[start:stop]) for start, stop in literals)

    def _rename(self, text: str) -> str:
        return self._special.sub(lambda found: self._names[found[0]], text)

    def _renamed(self) -> Tokenizer:
        with self._lock:
            if self._copy is None:
                spec = json.loads(self._backend.to_str())
                for token in spec["added_tokens"]:
                    token["content"] = self._names.get(token["content"], token["content"])
                copy = Tokenizer.from_str(json.dumps(spec))
                copy.no_truncation()
                copy.no_padding()
                self._ids = {
                    copy.token_to_id(name): self._backend.token_to_id(content)
                    for content, name in self._names.items()
                }
                self._copy = copy
            return self._copy


RANKS = "qwen.tiktoken"
EXTRA_TOKENS = 205
# Special tokens of Qwen-VL, whose ids follow the ranks.
SPECIAL_TOKENS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *(f"<|extra_{number}|>" for number in range(EXTRA_TOKENS)),
    *("<ref>", "</ref>", "<box>", "</box>", "<quad>", "</quad>", "<img>", "</img>", "<imgpad>"),
)

_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CHAT = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are a helpful assistant."
    "<|im_end|>\n{% endif %}{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class _Converter(TikTokenConverter):  # type: ignore[misc]
    """transformers' converter of tiktoken files, changed to work without the package tiktoken."""

    @staticmethod
    def load_tiktoken_bpe(tiktoken_url: str) -> dict[bytes, int]:
        """Return the rank of each token in a file."""
        ranks = {}
        for line in Path(tiktoken_url).read_bytes().splitlines():
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        return ranks


def load_tokenizer(folder: Path) -> Any:
    """Return the tokenizer of a checkpoint folder. Code in the folder is never run.

    Raises InvalidArgument for a tokenizer that is missing, cannot be read or is not fast.
    """
    file = folder / RANKS
    if (folder / "tokenizer.json").is_file() or not file.is_file():
        try:
            # The Rust library takes only paths that are valid UTF-8.
            with openable(folder) as path:
                tokenizer = AutoTokenizer.from_pretrained(
                    path, local_files_only=True, trust_remote_code=False
                )
        except Exception as error:  # Readers of tokenizers raise many types of exceptions.
            raise InvalidArgument(
                f"model: {folder}: the tokenizer cannot be read: {in_one_line(error)}"
            ) from error
        if not tokenizer.is_fast:
            raise InvalidArgument(
                f"model: {folder}: {type(tokenizer).__name__} has no fast tokenizer; add a"
                " tokenizer.json"
            )
        return tokenizer
    try:
        converted = _Converter(str(file), _PATTERN).converted()
    except (OSError, ValueError, binascii.Error) as error:
        raise InvalidArgument(f"model: {file} cannot be read: {error}") from error
    converted.normalizer = normalizers.NFC()
    converted.add_special_tokens([AddedToken(t, normalized=False) for t in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=converted, eos_token=SPECIAL_TOKENS[0], chat_template=_CHAT
    )
