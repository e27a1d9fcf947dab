"""Tests of the conversion of tokens to text: none is lost, split in a character or sent early."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from vlora.model.tokenizer import SPECIAL_TOKENS, TextStream, Vocabulary, control_tokens

# Special tokens of published tokenizers, in the order of their ids.
QWEN = " ".join(SPECIAL_TOKENS)
QWEN2_VL = """<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|>
    <|box_start|> <|box_end|> <|quad_start|> <|quad_end|> <|vision_start|> <|vision_end|>
    <|vision_pad|> <|image_pad|> <|video_pad|>"""
LLAVA = "<unk> <s> </s> <image> <pad>"
LLAMA_3 = """<|begin_of_text|> <|end_of_text|> <|reserved_special_token_0|>
    <|finetune_right_pad_id|> <|start_header_id|> <|end_header_id|> <|eom_id|> <|eot_id|>
    <|python_tag|>"""
MISTRAL = """<unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS]
    [/TOOL_RESULTS] [TOOL_CALLS] [IMG] <pad> [IMG_BREAK] [IMG_END] [PREFIX] [MIDDLE] [SUFFIX]"""
COORDINATES = "<point> </point> <|det|> <|/det|> <loc_12> <loc0007> <bin_999> [BOX] 500"


def extended(tokenizer: PreTrainedTokenizerFast, names: str) -> PreTrainedTokenizerFast:
    """Return a copy of a tokenizer that has further special tokens."""
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.add_special_tokens([AddedToken(name, normalized=False) for name in names.split()])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def stream_of(
    vocabulary: Vocabulary,
    tokens: list[int],
    stop: tuple[str, ...] = (),
    include: bool = False,
    skip: bool = True,
    min_tokens: int = 0,
) -> list[str]:
    stream = TextStream(vocabulary, stop, include, skip)
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
    streamed = "".join(stream_of(vocabulary, tokens, tuple(stop), include, min_tokens=min_tokens))
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


@pytest.fixture(scope="module")
def grounding(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    return extended(tokenizer, f"{QWEN} {QWEN2_VL}")


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        (QWEN, "<ref> </ref> <box> </box> <quad> </quad>"),
        (QWEN2_VL, " ".join(QWEN2_VL.split()[3:9])),
        (LLAVA, ""),
        (LLAMA_3, ""),
        (MISTRAL, ""),
        (COORDINATES, COORDINATES),
    ],
)
def test_of_the_special_tokens_text_shows_marks_of_boxes_and_coordinates(
    names: str, shown: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    with_names = extended(tokenizer, names)
    ids = with_names.convert_tokens_to_ids(names.split())
    vocabulary = Vocabulary(with_names)
    assert stream_of(vocabulary, ids)[:-1] == [
        name if name in shown.split() else "" for name in names.split()
    ]
    assert stream_of(vocabulary, ids, skip=False)[:-1] == names.split()
    # Choices and structures cannot contain them.
    assert not any(vocabulary.bytes_of[id] for id in ids)


@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_text_equals_the_tokenizers_with_and_without_control_tokens(
    data: st.DataObject, grounding: PreTrainedTokenizerFast
) -> None:
    vocabulary = Vocabulary(grounding)
    special = grounding.convert_tokens_to_ids(f"{QWEN} {QWEN2_VL}".split())
    any_token = st.integers(0, len(grounding) - 1) | st.sampled_from(special)
    tokens = data.draw(st.lists(any_token, max_size=20))
    shown = [token for token in tokens if token not in control_tokens(grounding)]
    assert "".join(stream_of(vocabulary, tokens)) == grounding.decode(shown)
    assert "".join(stream_of(vocabulary, tokens, skip=False)) == grounding.decode(tokens)


def test_a_stop_string_may_be_a_tag(grounding: PreTrainedTokenizerFast) -> None:
    tokens = grounding("a<box>(1,2),(3,4)</box>b", add_special_tokens=False)["input_ids"]
    vocabulary = Vocabulary(grounding)
    assert "".join(stream_of(vocabulary, tokens, ("</box>",), True)) == "a<box>(1,2),(3,4)</box>"
    assert "".join(stream_of(vocabulary, tokens, ("<box>",))) == "a"


def test_control_tokens_never_appear_in_text(
    tokenizer: PreTrainedTokenizerFast, vocabulary: Vocabulary
) -> None:
    assert "".join(stream_of(vocabulary, list(tokenizer.all_special_ids))) == ""
