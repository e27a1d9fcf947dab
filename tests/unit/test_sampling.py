"""Sampling parameters are parsed strictly; a wrong one is named, with what would be right."""

from __future__ import annotations

import pytest

from vlora.errors import InvalidArgument, Unsupported
from vlora.sampling import NOT_YET, REFUSED, SamplingParams


def test_numeric_strings_are_coerced_as_load_tools_send_them() -> None:
    params = SamplingParams.parse(
        {"max_tokens": "128", "min_tokens": "4", "temperature": "0.5", "ignore_eos": "true"}
    )
    assert (params.max_tokens, params.min_tokens) == (128, 4)
    assert params.temperature == 0.5
    assert params.ignore_eos is True


def test_an_unknown_key_is_refused_with_the_nearest_known_one() -> None:
    with pytest.raises(
        InvalidArgument, match=r"'temprature'; did you mean 'temperature'\? Known: "
    ):
        SamplingParams.parse({"temprature": 1})
    with pytest.raises(InvalidArgument, match=r"unknown sampling parameter 'zzz'\. Known: "):
        SamplingParams.parse({"zzz": 1})


@pytest.mark.parametrize("key", sorted(REFUSED))
def test_a_known_key_that_is_not_served_is_refused_by_name(key: str) -> None:
    with pytest.raises(Unsupported, match=f"'{key}'"):
        SamplingParams.parse({key: 1})


@pytest.mark.parametrize("key", NOT_YET)
def test_a_key_of_a_later_version_is_refused_as_not_yet_supported(key: str) -> None:
    with pytest.raises(Unsupported, match=f"'{key}' is not yet supported"):
        SamplingParams.parse({key: 1})


def test_several_answers_of_one_request_are_refused_by_name() -> None:
    assert SamplingParams.parse({"n": 1}) == SamplingParams()
    with pytest.raises(Unsupported, match="'n' = 2"):
        SamplingParams.parse({"n": 2})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", float("nan")),
        ("temperature", "NaN"),
        ("temperature", -0.1),
        ("temperature", True),
        ("temperature", [1]),
        ("temperature", None),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_p", float("inf")),
        ("top_k", -2),
        ("top_k", 1.5),
        ("top_k", "many"),
        ("min_p", -0.1),
        ("repetition_penalty", 0),
        ("presence_penalty", 2.1),
        ("max_tokens", 0),
        ("max_tokens", -5),
        ("max_tokens", 1e400),
        ("max_tokens", 2**31),
        ("min_tokens", -1),
        ("seed", 2**64),
        ("stop", ""),
        ("stop", [1]),
        ("stop", ["x"] * 17 + ["y"]),
        ("stop", {"a": 1}),
        ("stop_token_ids", "5"),
        ("ignore_eos", 1),
        ("ignore_eos", "maybe"),
        ("logprobs", 21),
        ("choices", []),
        ("choices", "red"),
        ("choices", ["a", ""]),
        ("choices", [str(i) for i in range(257)]),
        ("lora_name", 7),
    ],
)
def test_a_value_out_of_range_or_of_the_wrong_type_is_refused(key: str, value: object) -> None:
    with pytest.raises(InvalidArgument, match=f"'{key}' must be"):
        SamplingParams.parse({key: value})


def test_more_minimum_than_maximum_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="'min_tokens' = 20 is above 'max_tokens' = 16"):
        SamplingParams.parse({"min_tokens": 20})


@pytest.mark.parametrize(
    "other", [{"stop": "x"}, {"min_tokens": 1}, {"ignore_eos": True}, {"stop_token_ids": [1]}]
)
def test_choices_do_not_mix_with_other_ways_to_end(other: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument, match="'choices' cannot be combined"):
        SamplingParams.parse({"choices": ["a", "b"], **other})


def test_choices_set_their_own_token_limit() -> None:
    assert SamplingParams.parse({"choices": ["a"]}).max_tokens is None
    assert SamplingParams.parse({"choices": ["a"], "max_tokens": 9}).max_tokens == 9


def test_defaults_are_vllms_and_given_defaults_are_kept() -> None:
    assert SamplingParams.parse({}) == SamplingParams(temperature=1.0, max_tokens=16)
    defaults = SamplingParams(temperature=0.0, max_tokens=48)
    assert SamplingParams.parse({"top_k": 3}, defaults).max_tokens == 48
