"""Closed answer sets, against a twin that tries every token on every choice."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from vlora.errors import InvalidArgument
from vlora.model.choices import KEPT_STATES, ChoiceMatcher, choice_set
from vlora.model.vocabulary import Vocabulary

EOS = 0


@pytest.fixture(scope="module")
def vocabulary(checkpoint: Path) -> Vocabulary:
    return Vocabulary(AutoTokenizer.from_pretrained(checkpoint))


class Made(Vocabulary):
    """Of these tokens alone; the first is the end of text."""

    def __init__(self, *tokens: bytes) -> None:
        self.bytes_of = [b"", *tokens]


def fewest(vocabulary: Vocabulary, rest: bytes) -> float:
    """Tokens that spell `rest`, at least."""
    if not rest:
        return 0
    return 1 + min(
        (
            fewest(vocabulary, rest[len(token) :])
            for token in set(vocabulary.bytes_of)
            if token and rest.startswith(token)
        ),
        default=float("inf"),
    )


def allowed_slowly(
    vocabulary: Vocabulary, choices: list[str], said: bytes, budget: int
) -> list[int]:
    spellings = [space + choice.encode() for choice in choices for space in (b"", b" ")]
    found = [EOS] if said in spellings else []
    for token, text in enumerate(vocabulary.bytes_of):
        after = said + text
        rests = [s[len(after) :] for s in spellings if text and s.startswith(after)]
        if any(fewest(vocabulary, rest) < budget for rest in rests):
            found.append(token)
    return found


texts = st.text("abé ", min_size=1, max_size=5)
tokens = st.lists(st.sampled_from([b"ab", b"ba", b"aa", b" a", b" ab", b"b ", b"a" * 4, b"aba"]))


@settings(deadline=None, max_examples=200)
@given(
    choices=st.lists(texts, min_size=1, max_size=5, unique=True),
    more=tokens,
    extra=st.integers(0, 4),
    data=st.data(),
)
def test_what_may_follow_is_what_a_search_finds(
    choices: list[str], more: list[bytes], extra: int, data: st.DataObject
) -> None:
    """Any walk ends with a choice, within the tokens that it was given."""
    vocabulary = Made(*(bytes([byte]) for byte in "abé ".encode()), *more)
    matcher = ChoiceMatcher(tuple(choices), vocabulary)
    budget, said = matcher.least_tokens + extra, b""
    while matcher.finished is None:
        allowed = matcher.allowed([EOS], budget).tolist()
        assert allowed == allowed_slowly(vocabulary, choices, said, budget)
        token = data.draw(st.sampled_from(allowed))
        if token == EOS:
            break
        matcher.advance(token)
        said += vocabulary.bytes_of[token]
        budget -= 1
    assert matcher.complete is not None
    assert matcher.complete in choices
    assert said.decode() in (matcher.complete, " " + matcher.complete)
    assert budget >= 0


def test_a_choice_that_continues_another_needs_an_end_of_text(vocabulary: Vocabulary) -> None:
    matcher = ChoiceMatcher(("no", "none"), vocabulary)
    for byte in b"no":
        (token,) = vocabulary.tokens_of[bytes([byte])]
        assert token in matcher.allowed([2], budget=9)
        matcher.advance(token)
    assert matcher.complete == "no"
    assert matcher.finished is None
    assert 2 in matcher.allowed([2], budget=9)


def test_a_choice_that_is_spelled_exactly_is_meant(vocabulary: Vocabulary) -> None:
    matcher = ChoiceMatcher(("x", " x"), vocabulary)
    for byte in b" x":
        matcher.advance(vocabulary.tokens_of[bytes([byte])][0])
    assert matcher.finished == " x"


def test_a_choice_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="'abc' cannot be spelled"):
        ChoiceMatcher(("ab", "abc"), Made(b"a", b"b"))


def test_requests_with_the_same_choices_share_the_work(vocabulary: Vocabulary) -> None:
    choices = tuple(f"label number {index}" for index in range(256))
    first, second = ChoiceMatcher(choices, vocabulary), ChoiceMatcher(choices, vocabulary)
    begun = first.allowed([EOS], 99)
    work = choice_set(choices, vocabulary)
    assert work.following(0, 512, 0) is work.following(0, 512, 0)
    assert second.allowed([EOS], 99).tolist() == begun.tolist()
    assert second._set is first._set is work


def test_what_is_remembered_of_a_set_is_bounded() -> None:
    word = "ab" * 100
    choices = tuple(word[:length] for length in range(1, 200))
    vocabulary = Made(b"a", b"b", b"ab", b"ba")
    work = choice_set(choices, vocabulary)
    for low in range(60):
        for high in range(low + 1, 60):
            work.following(low, high, 0)
            assert len(work._next) <= KEPT_STATES
