"""Tests of constrained answers against a search that tries every token on every choice."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlora.errors import InvalidArgument
from vlora.model.choices import MAX_CACHED_STATES, ChoiceMatcher, choice_set
from vlora.model.tokenizer import Vocabulary

EOS = 0


class TinyVocabulary(Vocabulary):
    """Vocabulary of some tokens, in addition to an end-of-text token with id 0."""

    def __init__(self, *tokens: bytes) -> None:
        self.bytes_of = [b"", *tokens]


def min_tokens(vocabulary: Vocabulary, rest: bytes) -> float:
    """Return the minimum number of tokens that spell `rest`, infinity if none do."""
    if not rest:
        return 0
    return 1 + min(
        (
            min_tokens(vocabulary, rest[len(token) :])
            for token in set(vocabulary.bytes_of)
            if token and rest.startswith(token)
        ),
        default=float("inf"),
    )


def reference_allowed(
    vocabulary: Vocabulary, choices: list[str], answer: bytes, budget: int
) -> list[int]:
    """Return the tokens that may follow `answer`, found by trying all of them."""
    spellings = [space + choice.encode() for choice in choices for space in (b"", b" ")]
    allowed = [EOS] if answer in spellings else []
    for token, text in enumerate(vocabulary.bytes_of):
        after = answer + text
        rests = [s[len(after) :] for s in spellings if text and s.startswith(after)]
        if any(min_tokens(vocabulary, rest) < budget for rest in rests):
            allowed.append(token)
    return allowed


texts = st.text("abé ", min_size=1, max_size=5)
tokens = st.lists(st.sampled_from([b"ab", b"ba", b"aa", b" a", b" ab", b"b ", b"a" * 4, b"aba"]))


@settings(deadline=None, max_examples=200)
@given(
    choices=st.lists(texts, min_size=1, max_size=5, unique=True),
    longer_tokens=tokens,
    extra=st.integers(0, 4),
    data=st.data(),
)
def test_allowed_tokens_equal_those_of_a_full_search(
    choices: list[str], longer_tokens: list[bytes], extra: int, data: st.DataObject
) -> None:
    """Every sequence of allowed tokens ends with a choice, within its budget of tokens."""
    vocabulary = TinyVocabulary(*(bytes([byte]) for byte in "abé ".encode()), *longer_tokens)
    matcher = ChoiceMatcher(tuple(choices), vocabulary)
    budget, answer = matcher.required_tokens + extra, b""
    while matcher.finished is None:
        allowed = matcher.allowed([EOS], budget).tolist()
        assert allowed == reference_allowed(vocabulary, choices, answer, budget)
        token = data.draw(st.sampled_from(allowed))
        if token == EOS:
            break
        matcher.advance(token)
        answer += vocabulary.bytes_of[token]
        budget -= 1
    assert matcher.complete is not None
    assert matcher.complete in choices
    assert answer.decode() in (matcher.complete, " " + matcher.complete)
    assert budget >= 0


def test_an_exact_spelling_has_priority_over_a_leading_space(vocabulary: Vocabulary) -> None:
    matcher = ChoiceMatcher(("x", " x"), vocabulary)
    for byte in b" x":
        matcher.advance(vocabulary.tokens_of[bytes([byte])][0])
    assert matcher.finished == " x"


def test_a_choice_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="'abc' cannot be spelled"):
        ChoiceMatcher(("ab", "abc"), TinyVocabulary(b"a", b"b"))


def test_requests_with_the_same_choices_share_one_set(vocabulary: Vocabulary) -> None:
    choices = tuple(f"label number {index}" for index in range(256))
    first, second = ChoiceMatcher(choices, vocabulary), ChoiceMatcher(choices, vocabulary)
    allowed = first.allowed([EOS], 99)
    shared = choice_set(choices, vocabulary)
    assert shared.following(0, 512, 0) is shared.following(0, 512, 0)
    assert second.allowed([EOS], 99).tolist() == allowed.tolist()
    assert second._set is first._set is shared


def test_the_cache_of_a_set_is_bounded() -> None:
    word = "ab" * 100
    choices = tuple(word[:length] for length in range(1, 200))
    vocabulary = TinyVocabulary(b"a", b"b", b"ab", b"ba")
    choice = choice_set(choices, vocabulary)
    for low in range(60):
        for high in range(low + 1, 60):
            choice.following(low, high, 0)
            assert len(choice._cache) <= MAX_CACHED_STATES
