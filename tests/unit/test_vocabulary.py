"""Tests of the conversion of tokens to text: none is lost, split in a character or sent early."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from vlora.model.tokenizer import TextStream, Vocabulary


def stream_of(
    vocabulary: Vocabulary, tokens: list[int], stop: tuple[str, ...] = (), include: bool = False
) -> list[str]:
    stream = TextStream(vocabulary, stop, include)
    parts = []
    for token in tokens:
        text, stopped = stream.push(token)
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


def odd_tokenizer(**options: object) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer whose ids have a gap, and with tokens that are plain text."""
    letters = {chr(code): index for index, code in enumerate(range(97, 123))}
    ids = letters | {"Ġab": 40, "a b": 41, "▁x": 42, "日本": 43}
    backend = Tokenizer(models.BPE(vocab=ids, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("</s>", special=True)])
    backend.add_tokens(["<box>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", **options)


def test_tokens_of_an_odd_tokenizer_have_the_text_that_it_decodes() -> None:
    tokenizer = odd_tokenizer()
    vocabulary = Vocabulary(tokenizer)
    assert len(vocabulary.bytes_of) == max(tokenizer.get_vocab().values()) + 1 > len(tokenizer)
    for token in tokenizer.get_vocab().values():
        assert vocabulary.text(token) == tokenizer.decode([token], skip_special_tokens=True)
    assert vocabulary.text(30) == ""  # No token has this id.
    assert len(Vocabulary(tokenizer, 41).bytes_of) == 41


@settings(deadline=None)
@given(text=st.text(max_size=40))
def test_a_character_is_never_split(
    text: str, tokenizer: PreTrainedTokenizerFast, vocabulary: Vocabulary
) -> None:
    text = text.replace("<", "")
    parts = stream_of(vocabulary, tokenizer(text, add_special_tokens=False)["input_ids"])
    assert "".join(parts) == text
    assert all("�" not in part for part in parts) or "�" in text


@settings(deadline=None, max_examples=200)
@given(
    text=st.text(alphabet="abc ", min_size=1, max_size=30),
    stop=st.lists(st.text(alphabet="abc ", min_size=1, max_size=4), min_size=1, max_size=3),
    include=st.booleans(),
)
def test_the_answer_ends_at_the_first_stop_string(
    text: str,
    stop: list[str],
    include: bool,
    tokenizer: PreTrainedTokenizerFast,
    vocabulary: Vocabulary,
) -> None:
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    streamed = "".join(stream_of(vocabulary, tokens, tuple(stop), include))
    # The stream sees text token by token, so the first stop string that is complete counts.
    grown, expected = "", None
    for token in tokens:
        grown += vocabulary.text(token)
        matches = sorted((grown.find(word), word) for word in stop if word in grown)
        if matches:
            position, word = matches[0]
            expected = grown[: position + len(word) * include]
            break
    assert streamed == (text if expected is None else expected)


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
