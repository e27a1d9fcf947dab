"""Tests of the conversion of tokens to text: none is lost, split in a character or sent early."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from vlora.model.tokenizer import TextStream, Vocabulary


def stream_of(
    vocabulary: Vocabulary,
    tokens: list[int],
    stop: tuple[str, ...] = (),
    include: bool = False,
    min_tokens: int = 0,
) -> list[str]:
    stream = TextStream(vocabulary, stop, include)
    parts = []
    for length, token in enumerate(tokens, start=1):
        text, stopped = stream.push(token, check_stop=length > min_tokens)
        parts.append(text)
        if stopped:
            return parts
    return [*parts, stream.flush()]


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_the_streamed_text_equals_the_tokenizers(
    data: st.DataObject, tokenizer: PreTrainedTokenizerFast, vocabulary: Vocabulary
) -> None:
    tokens = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=30))
    expected = tokenizer.decode(tokens, skip_special_tokens=True)
    assert "".join(stream_of(vocabulary, tokens)) == expected


@settings(deadline=None)
@given(text=st.text(max_size=40))
def test_a_character_is_never_split(
    text: str, tokenizer: PreTrainedTokenizerFast, vocabulary: Vocabulary
) -> None:
    text = text.replace("<", "")
    parts = stream_of(vocabulary, tokenizer(text, add_special_tokens=False)["input_ids"])
    assert "".join(parts) == text
    assert all("�" not in part for part in parts) or "�" in text


@settings(deadline=None, max_examples=400)
@given(
    text=st.text(alphabet="abc ", min_size=1, max_size=30),
    stop=st.lists(st.text(alphabet="abc ", min_size=1, max_size=4), min_size=1, max_size=3),
    include=st.booleans(),
    min_tokens=st.sampled_from([0, 0, 1, 2, 5, 9, 40]),
)
@example(text="abc", stop=["ab"], include=False, min_tokens=1)
@example(text="abcabc", stop=["bc", "abca"], include=False, min_tokens=3)
@example(text="aaab", stop=["aa"], include=True, min_tokens=2)
def test_the_answer_ends_at_the_first_stop_string_that_ends_after_min_tokens(
    text: str,
    stop: list[str],
    include: bool,
    min_tokens: int,
    tokenizer: PreTrainedTokenizerFast,
    vocabulary: Vocabulary,
) -> None:
    """The rule of vLLM: the end of a stop string counts, wherever the string begins."""
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    streamed = "".join(stream_of(vocabulary, tokens, tuple(stop), include, min_tokens))
    # The stream sees text token by token, so the first stop string that is complete counts.
    grown, expected = "", text
    for length, token in enumerate(tokens, start=1):
        before, grown = len(grown), grown + vocabulary.text(token)
        places = [(grown.find(word, max(0, before + 1 - len(word))), word) for word in stop]
        matches = sorted(place for place in places if place[0] >= 0)
        if length > min_tokens and matches:
            position, word = matches[0]
            expected = grown[: position + len(word) * include]
            break
    assert streamed == expected


def test_text_that_may_begin_a_stop_string_is_held_back(
    tokenizer: PreTrainedTokenizerFast, vocabulary: Vocabulary
) -> None:
    stream = TextStream(vocabulary, ("\n\n",))
    (newline,) = tokenizer("\n", add_special_tokens=False)["input_ids"]
    (letter,) = tokenizer("x", add_special_tokens=False)["input_ids"]
    assert stream.push(newline) == ("", False)
    assert stream.push(letter) == ("\nx", False)
    assert stream.push(newline) == ("", False)
    assert stream.push(newline) == ("", True)


def test_special_tokens_never_appear_in_text(
    tokenizer: PreTrainedTokenizerFast, vocabulary: Vocabulary
) -> None:
    assert "".join(stream_of(vocabulary, list(tokenizer.all_special_ids))) == ""
