"""Tests of strict JSON parsing: accepted values can be printed and sent."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlora.errors import InvalidArgument
from vlora.strict_json import MAX_DEPTH, load_object


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1', "is not valid JSON: .* at character 7"),
        ("", "is not valid JSON"),
        ("[1, 2]", "must be a JSON object, not list"),
        ('"x"', "must be a JSON object, not str"),
        ("null", "must be a JSON object"),
        ('{"top_k": 1, "top_k": 2}', "has the key 'top_k' twice"),
        ('{"a": NaN}', "has NaN, which is not valid JSON"),
        ('{"a": [-Infinity]}', "has -Infinity"),
        ('{"a": 1e999}', "has the number 1e999"),
        ('{"a": ' + "7" * 5000 + "}", "a number with 5000 digits; the limit is 400"),
        (r'{"lora_name": "\ud800"}', r"a lone surrogate, '\\ud800'"),
        (r'{"\udfff": 1}', "a lone surrogate"),
        (r'{"choices": ["a", "b\ude00\ud83d"]}', "a lone surrogate"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a": ' * 13_000, "nested too deeply"),
        ('{"a": ' + "[" * MAX_DEPTH + "]" * MAX_DEPTH + "}", "nested too deeply"),
    ],
)
def test_json_that_cannot_be_printed_or_sent_is_rejected(text: str, message: str) -> None:
    with pytest.raises(InvalidArgument, match=f"^'input' .*{message}") as caught:
        load_object(text, "'input'")
    caught.value.message.encode()


def test_a_surrogate_pair_is_one_character() -> None:
    assert load_object(r'{"a": "\ud83d\ude00"}', "'input'") == {"a": "\U0001f600"}


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**300), 10**300) | st.text() | st.floats(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.text(), VALUES, max_size=4))
def test_an_object_is_parsed_as_written_or_rejected_with_an_error_that_can_be_sent(
    value: dict,
) -> None:
    try:
        parsed = load_object(json.dumps(value), "'input'")
    except InvalidArgument as error:
        error.message.encode()
    else:
        assert parsed == value
        json.dumps(parsed, allow_nan=False, ensure_ascii=False).encode()
