"""Tests of bounds on prompts before they are tokenized: none refuses a text that fits."""

from __future__ import annotations

import math
import sys
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from vlora.errors import InvalidArgument
from vlora.model.decoder_config import load_config
from vlora.model.inputs import PromptReader
from vlora.model.tokenizer import BYTE_ALPHABET, NFC_SHRINKAGE, TokenLength

BYTE_FALLBACK = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level(**parts: Any) -> Tokenizer:
    """Return a tokenizer over bytes with some merges, as Qwen2's and Llama 3's are."""
    vocab = {
        token: index for index, token in enumerate([*BYTE_ALPHABET, "ĠĠ", "ĠĠĠĠ", "th", "the"])
    }
    merges = [("Ġ", "Ġ"), ("ĠĠ", "ĠĠ"), ("t", "h"), ("th", "e")]
    return with_parts(models.BPE(vocab, merges), pre_tokenizers.ByteLevel(False), **parts)


def sentence_piece(**parts: Any) -> Tokenizer:
    """Return a tokenizer over characters with bytes for unknown ones, as Llama 2's is."""
    vocab = {
        token: index for index, token in enumerate([*BYTE_FALLBACK, "▁", "▁▁", "t", "h", "th"])
    }
    model = models.BPE(vocab, [("▁", "▁"), ("t", "h")], byte_fallback=True)
    steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    return with_parts(model, None, **{"normalizer": normalizers.Sequence(steps)} | parts)


def with_parts(model: Any, split: Any, **parts: Any) -> Tokenizer:
    tokenizer = Tokenizer(model)
    for name, part in {"pre_tokenizer": split, "decoder": decoders.ByteLevel(), **parts}.items():
        if name != "added":
            setattr(tokenizer, name, part)
    tokenizer.add_special_tokens([AddedToken("<image>", normalized=False), *parts.get("added", [])])
    return tokenizer


def length_of(tokenizer: Tokenizer) -> TokenLength:
    return TokenLength(PreTrainedTokenizerFast(tokenizer_object=tokenizer))


BOUNDED = {
    "byte level": byte_level(),
    "byte level of NFC": byte_level(normalizer=normalizers.NFC()),
    "sentence piece": sentence_piece(),
    "metaspace": sentence_piece(normalizer=None, pre_tokenizer=pre_tokenizers.Metaspace()),
}
LENGTHS = {kind: length_of(tokenizer) for kind, tokenizer in BOUNDED.items()}
texts = st.lists(
    st.one_of(
        st.text(max_size=20),
        st.text(alphabet="e\u0301\u212b\u1f82\u03b1\u0313\u0300\u0345\u0340\u0343", max_size=30),
        st.sampled_from([" " * 40, "the " * 9, "<image>" * 5, "▁" * 30, "th" * 30]),
    ),
    max_size=5,
).map("".join)


@pytest.mark.parametrize("kind", BOUNDED)
@settings(deadline=None, max_examples=200)
@given(text=texts)
def test_no_text_has_more_bytes_than_its_tokens_may_cover(kind: str, text: str) -> None:
    tokenizer, length = BOUNDED[kind], LENGTHS[kind]
    assert length.longest < 100
    tokens = len(tokenizer.encode(text, add_special_tokens=False).ids)
    assert len(text.encode()) <= length.max_bytes(text, tokens)


@pytest.mark.parametrize(
    "tokenizer",
    [
        byte_level(normalizer=normalizers.Strip()),
        byte_level(normalizer=normalizers.NFKC()),
        byte_level(normalizer=normalizers.Replace("  ", " ")),
        byte_level(pre_tokenizer=pre_tokenizers.Whitespace()),
        byte_level(pre_tokenizer=pre_tokenizers.Split(" ", "removed")),
        byte_level(added=[AddedToken("<x>", lstrip=True)]),
        sentence_piece(added=[AddedToken("<x>", rstrip=True)]),
        with_parts(models.BPE({"a": 0}, []), pre_tokenizers.ByteLevel(False)),
        with_parts(models.WordLevel({"a": 0, "?": 1}, "?"), None),
    ],
)
def test_a_tokenizer_whose_tokens_may_cover_any_text_has_no_bound(tokenizer: Tokenizer) -> None:
    assert length_of(tokenizer).longest == math.inf


def test_no_text_shrinks_by_more_than_the_bound_when_it_is_composed() -> None:
    """Compare each composed character with the longest text that composes to it."""
    characters = [chr(code) for code in range(sys.maxunicode + 1) if not 0xD800 <= code <= 0xDFFF]
    decomposed = {character: unicodedata.normalize("NFD", character) for character in characters}
    changed = {character: parts for character, parts in decomposed.items() if parts != character}
    longest: dict[str, int] = {}

    def size(part: str) -> int:
        return max(longest.get(part, 0), len(part.encode()))

    for character, parts in changed.items():
        if len(parts) == 1:
            longest[parts] = max(size(parts), len(character.encode()))
    for character, parts in changed.items():
        total = sum(map(size, parts))
        assert len(character.encode()) <= total
        if unicodedata.normalize("NFC", character) == character:
            assert total <= NFC_SHRINKAGE * len(character.encode())
    assert all(size <= NFC_SHRINKAGE * len(part.encode()) for part, size in longest.items())


@pytest.fixture(scope="module")
def reader(checkpoint: Path) -> PromptReader:
    return PromptReader(checkpoint, load_config(checkpoint))


def test_a_prompt_that_cannot_fit_is_refused_without_tokenizing_it(reader: PromptReader) -> None:
    for text in ("what is it? " * 90_000, "é" * 500_000, " " * 10**6):
        with pytest.raises(
            InvalidArgument,
            match=r"too long: it has \d+ bytes; the context of 1024 tokens holds a ",
        ):
            reader.check_length(text, 1024)
    reader.check_length("what is it? " * 400, 1024)
    reader.check_length("\ud800", 1024)


def test_threads_that_tokenize_at_once_get_the_tokenizers_own_ids(
    reader: PromptReader, tokenizer: PreTrainedTokenizerFast
) -> None:
    prompts = [
        "",
        "a",
        "<s>what?",
        "<s><image>é the box",
        "what is it? " * 300,
        "<box>(16,47)" * 50,
    ]
    expected = [tokenizer(p, add_special_tokens=not p.startswith("<s>")).input_ids for p in prompts]

    def tokenize(_: int) -> bool:
        return [reader._tokenize(prompt) for prompt in prompts] == expected

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(tokenize, range(160)))
