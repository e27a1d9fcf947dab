"""Tests of sampling parameters: strict parsing, and errors that name the key and valid values."""

from __future__ import annotations

import math
import random
import re
import struct
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from vlora.errors import InvalidArgument, Unsupported, VLoraError
from vlora.sampling import (
    ACCEPTED_VALUES,
    AS_CHECKPOINT,
    KNOWN_KEYS,
    MAX_INTEGER,
    MIN_TEMPERATURE,
    RANGES,
    REFUSED,
    MediaOptions,
    SamplingParams,
)
from vlora.strict_json import Range
from vlora.structured.structure import STRUCTURE_KEYS, Structure

DOCUMENT = Path(__file__).parents[2] / "docs" / "api.md"


def test_an_unknown_key_is_refused_with_the_nearest_known_one() -> None:
    with pytest.raises(
        InvalidArgument, match=r"'temprature'; did you mean 'temperature'\? Known: "
    ):
        SamplingParams.parse({"temprature": 1})
    with pytest.raises(InvalidArgument, match=r"unknown sampling parameter 'zzz'\. Known: "):
        SamplingParams.parse({"zzz": 1})


def test_keys_about_images_and_videos_are_those_of_vllm() -> None:
    raw = {
        "media_io_kwargs": {"video": {"num_frames": "8", "fps": -1}},
        "mm_processor_kwargs": {"fps": 2, "do_sample_frames": "true", "max_pixels": 4096},
    }
    assert MediaOptions.parse(raw) == MediaOptions(8, 2.0, True, None, None, 4096)
    assert SamplingParams.parse(raw) == SamplingParams()
    assert MediaOptions.parse({"media_io_kwargs": None, "temperature": 1}) == AS_CHECKPOINT


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"media_io_kwargs": {"image": {}}}, "unknown key 'image' of 'media_io_kwargs'"),
        (
            {"media_io_kwargs": {"video": {"num_frame": 1}}},
            r"unknown key 'num_frame' of 'media_io_kwargs\.video'; did you mean 'num_frames'\?",
        ),
        ({"mm_processor_kwargs": {"size": 1}}, "Known: fps, do_sample_frames, max_frames"),
        ({"mm_processor_kwargs": [1]}, "must be an object with the keys fps"),
        ({"mm_processor_kwargs": {"fps": []}}, r"'fps' .* frames per second from 0\.001"),
        ({"media_io_kwargs": {"video": {"num_frames": 0}}}, "'num_frames'"),
        ({"mm_processor_kwargs": {"min_pixels": 9, "max_pixels": 4}}, "= 9 is above 'max_pixels'"),
        (
            {"media_io_kwargs": {"video": {"fps": 1}}, "mm_processor_kwargs": {"fps": 2}},
            r"'media_io_kwargs\.video\.fps' = 1 and 'mm_processor_kwargs\.fps' = 2 differ",
        ),
    ],
)
def test_a_wrong_key_about_videos_is_refused_by_name(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        SamplingParams.parse(raw)


@pytest.mark.parametrize("key", sorted(REFUSED))
def test_an_unsupported_key_of_vllm_is_refused_by_name(key: str) -> None:
    for value in ("useless", [3], {"a": 1}, 2):
        with pytest.raises(Unsupported, match=f"'{key}'.*{re.escape(REFUSED[key])}"):
            SamplingParams.parse({key: value})


@pytest.mark.parametrize("key", sorted(REFUSED))
def test_an_unsupported_key_is_accepted_at_the_value_that_changes_nothing(key: str) -> None:
    for value in (None, *ACCEPTED_VALUES.get(key, ())):
        assert SamplingParams.parse({key: value}) == SamplingParams()
        if isinstance(value, bool | int):
            assert SamplingParams.parse({key: str(value)}) == SamplingParams()


def test_an_accepted_value_of_another_type_is_refused() -> None:
    for wrong in ({"best_of": True}, {"use_beam_search": 0}, {"detokenize": 1}, {"n": "one"}):
        with pytest.raises(Unsupported):
            SamplingParams.parse(wrong)


@pytest.mark.parametrize(
    "raw",
    [
        {"structured_outputs": {"choice": ["a", "b"], "regex": None}},
        {"structured_outputs": '{"choice": ["a", "b"]}'},
        {"guided_decoding": {"choice": ["a", "b"], "json": None}},
        {"guided_choice": ["a", "b"]},
    ],
)
def test_choices_under_vllms_names_are_read(raw: dict[str, object]) -> None:
    assert SamplingParams.parse(raw) == SamplingParams.parse({"choices": ["a", "b"]})
    with pytest.raises(InvalidArgument, match="both restrict the answer"):
        SamplingParams.parse({"choices": ["a"], **raw})
    with pytest.raises(InvalidArgument, match="both restrict the answer"):
        SamplingParams.parse({**raw, "choices": ["a"]})


@pytest.mark.parametrize(
    ("raw", "structure"),
    [
        ({"structured_outputs": {"json": {"b": 1, "a": 2}}}, Structure("json", '{"b": 1, "a": 2}')),
        ({"structured_outputs": {"json": '{"a":  1}'}}, Structure("json", '{"a":  1}')),
        ({"structured_outputs": {"json": True}}, Structure("json", "{}")),
        ({"structured_outputs": '{"regex": "a+", "json": null}'}, Structure("regex", "a+")),
        ({"structured_outputs": {"json_object": True}}, Structure("json", '{"type": "object"}')),
        ({"guided_decoding": {"grammar": 'start: "a"'}}, Structure("grammar", 'start: "a"')),
        ({"guided_json": {"type": "null"}}, Structure("json", '{"type": "null"}')),
        ({"guided_json_object": "true"}, Structure("json", '{"type": "object"}')),
        ({"guided_regex": "é"}, Structure("regex", "é")),
        ({"guided_grammar": 'start: "b"', "guided_json": None}, Structure("grammar", 'start: "b"')),
    ],
)
def test_the_structure_of_an_answer_is_read_under_all_of_vllms_names(
    raw: dict[str, object], structure: Structure
) -> None:
    params = SamplingParams.parse(raw)
    assert params.structured_outputs == structure
    assert params.max_tokens is None
    assert SamplingParams.parse({"max_tokens": 7, **raw}).max_tokens == 7
    for other in ({"choices": ["a"]}, {"guided_choice": ["a"]}, {"guided_regex": "x"}):
        if not other.keys() & raw.keys():
            with pytest.raises(InvalidArgument, match="both restrict the answer; give one"):
                SamplingParams.parse({**raw, **other})
            with pytest.raises(InvalidArgument, match="both restrict the answer; give one"):
                SamplingParams.parse({**other, **raw})


@pytest.mark.parametrize(
    "other", [{"stop_token_ids": [3]}, {"min_tokens": 2}, {"ignore_eos": True}, {"stop": "a"}]
)
def test_choices_or_a_structure_decide_where_the_answer_may_end(other: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument, match="'choices' cannot be combined"):
        SamplingParams.parse({"choices": ["a", "b"], **other})
    if "stop" in other:
        assert SamplingParams.parse({"guided_regex": "a+", **other}).stop == ("a",)
        return
    with pytest.raises(InvalidArgument, match="'structured_outputs' cannot be combined with"):
        SamplingParams.parse({"guided_regex": "a+", **other})


@pytest.mark.parametrize(
    ("value", "kind", "message"),
    [
        ({"structural_tag": "x"}, Unsupported, "supports json, .*, choice, not 'structural_tag'"),
        ({"jason": {}}, Unsupported, r"not 'jason'; did you mean 'json'\?"),
        ({"choice": ["a"], "json": {}}, InvalidArgument, "exactly one .* it has choice, json"),
        ({}, InvalidArgument, "must have exactly one of the keys json, .* it has none"),
        ({"choice": "a"}, InvalidArgument, "must be a list of non-empty strings, not 'a'"),
        ({"json": [1]}, InvalidArgument, "'json' of 'structured_outputs' must be a JSON schema"),
        ({"json": "[1]"}, InvalidArgument, "must be a JSON object, not list"),
        ({"json": {"a": float("nan")}}, InvalidArgument, "has NaN, which is not valid JSON"),
        ({"json": {"a": "\ud800"}}, InvalidArgument, "has a lone surrogate"),
        ({"json_object": "maybe"}, InvalidArgument, "must be true, not 'maybe'"),
        ({"regex": ""}, InvalidArgument, "must be a regular expression in a non-empty string"),
        ({"grammar": 3}, InvalidArgument, "must be a grammar in a non-empty string, not 3"),
        ([], InvalidArgument, "must be an object"),
        ("{", InvalidArgument, "not valid JSON"),
    ],
)
def test_other_structured_outputs_are_refused_by_name(
    value: object, kind: type[VLoraError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        SamplingParams.parse({"structured_outputs": value})


def test_seed_minus_one_means_no_seed_and_tiny_temperatures_are_raised() -> None:
    assert SamplingParams.parse({"seed": -1}).seed is None
    assert SamplingParams.parse({"seed": "-1"}).seed is None
    assert SamplingParams.parse({"seed": -2}).seed == -2
    for tiny in (1e-300, 5e-324, 0.009):
        assert SamplingParams.parse({"temperature": tiny}).temperature == MIN_TEMPERATURE
    assert SamplingParams.parse({"temperature": 0.02}).temperature == 0.02
    assert SamplingParams.parse({"temperature": 0}).greedy


SCALARS: list[object] = [
    *(None, True, False, 0, 1, -1, 7, 2**63, 2**64, 10**400, 0.0, -0.0, 0.5, 1e308, 5e-324),
    *(math.inf, math.nan, "", "NaN", "-1", "1e999", "9" * 5000, "true", "\ud800", "x\udfff"),
    *("\0", "x" * 70_000, "{}", "[1", '{"choice": ["a"]}', "é", "0x10", "1_0", "٣"),
]
KEYS = [*KNOWN_KEYS, *REFUSED, *STRUCTURE_KEYS, "", "\ud800", "x" * 5000, "temprature"]


def hostile(rng: random.Random, depth: int = 0) -> object:
    """Return a random value, which may not be valid JSON."""
    kind = rng.random()
    if depth == 3 or kind < 0.6:
        return rng.choice(SCALARS)
    inner = [hostile(rng, depth + 1) for _ in range(rng.randrange(4))]
    if kind < 0.8:
        return inner
    return {rng.choice(["choice", "json", "regex", "\ud800", "a"]): value for value in inner}


def test_any_input_is_read_or_refused_with_a_message_that_can_be_sent() -> None:
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    read = 0
    for _ in range(4000):
        raw = {rng.choice(KEYS): hostile(rng) for _ in range(rng.randrange(1, 4))}
        message = refusal(raw)
        assert message is None or 0 < len(message) < 2000, seed
        read += message is None
    assert 20 < read < 3900


def refusal(raw: dict[str, object]) -> bytes | None:
    """Return the encoded error message, None if the parameters are valid and can be encoded."""
    try:
        params = SamplingParams.parse(raw)
    except VLoraError as error:
        return error.message.encode()
    assert all(text.encode() for text in (*params.choices, *params.stop))
    assert params.structured_outputs is None or params.structured_outputs.bytes > 0
    return None


@pytest.mark.parametrize("key", [*KNOWN_KEYS, "n", "best_of", "guided_json", "useless"])
def test_a_value_too_deep_or_too_long_to_show_is_refused_with_a_short_message(key: str) -> None:
    deep: list[object] = []
    for _ in range(5000):
        deep = [deep]
    for value in (deep, [deep], {"choice": deep}, 10**5000, [10**5000], "9" * 70_000):
        message = refusal({key: value})
        assert message is None or len(message) < 2000
        assert message or isinstance(value, int | str), key


def test_keys_for_real_time_streams_are_read_with_numbers_as_text() -> None:
    raw = {"priority": "-3", "deadline_ms": "250", "stream_id": "cam 1", "supersede": "true"}
    params = SamplingParams.parse(raw)
    assert (params.priority, params.deadline_ms) == (-3, 250.0)
    assert (params.stream_id, params.supersede) == ("cam 1", True)
    assert SamplingParams.parse({"deadline_ms": None, "stream_id": None}) == SamplingParams()


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"stream_id": ""}, "'stream_id' must be a string of 1 to 256"),
        ({"stream_id": "x" * 257}, "'stream_id' must be a string of 1 to 256"),
        ({"supersede": True}, "'supersede' needs 'stream_id'"),
    ],
)
def test_wrong_keys_for_real_time_streams_are_refused(raw: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        SamplingParams.parse(raw)


def test_every_numeric_key_has_a_range_that_the_documentation_states() -> None:
    hints = get_type_hints(SamplingParams)
    numeric = {key for key, hint in hints.items() if re.search("int|float", str(hint))}
    assert numeric == set(RANGES)
    documented = re.findall(r"^\| `(\w+)` \| (.*?) \|", DOCUMENT.read_text(), flags=re.MULTILINE)
    for key, valid in RANGES.items():
        texts = [text for name, text in documented if name == key]
        assert any(text.startswith(valid.expected) for text in texts), key


SMALLEST, LARGEST = math.nextafter(0.0, 1.0), math.nextafter(math.inf, 0.0)
NUMBERS: list[Any] = [
    *(sign * 2**power + more for power in (7, 15, 31, 32, 53, 63, 64) for more in (-1, 0, 1)
      for sign in (-1, 1)),
    *(0, 1, -1, -2, 10**19, 10**300, 10**400, -(10**400), math.inf, -math.inf, math.nan, True),
    *(0.0, -0.0, 0.5, SMALLEST, -SMALLEST, LARGEST, -LARGEST, 1e-9, 3.5e38, 1e20),
]  # fmt: skip


def is_in(valid: Range, sent: Any) -> bool:
    """Return whether a value or its text is a number of the range."""
    try:
        number = int(sent) if valid.whole else float(sent)
    except (ValueError, OverflowError):
        return False
    integral = not isinstance(sent, float) or number == sent
    return not isinstance(sent, bool) and integral and valid.low <= number <= valid.high


@pytest.mark.parametrize("key", sorted(RANGES))
def test_any_number_is_refused_with_the_range_or_read_into_it(key: str) -> None:
    """The result fits the type in which native code receives it: an int64 or a float."""
    valid = RANGES[key]
    values = [*NUMBERS, valid.low, valid.high]
    for sent in [*values, *map(str, values)]:
        raw = {"max_tokens": None, key: [sent] if key == "stop_token_ids" else sent}
        if not is_in(valid, sent):
            with pytest.raises(InvalidArgument, match=f"'{key}' must be {valid.expected}, not"):
                SamplingParams.parse(raw)
            continue
        number = getattr(SamplingParams.parse(raw), key)
        (number,) = number if key == "stop_token_ids" else (number,)
        if number is None:
            assert key == "seed"
            continue
        assert valid.low <= number <= valid.high
        assert number in values or key in ("top_k", "temperature")
        assert key != "top_k" or 0 <= number <= MAX_INTEGER
        assert type(number) is (int if valid.whole else float)
        if not valid.whole:
            assert math.isfinite(struct.unpack("f", struct.pack("f", number))[0])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", [1]),
        ("temperature", None),
        ("top_k", "many"),
        ("stop", ""),
        ("stop", [1]),
        ("stop", ["x"] * 17 + ["y"]),
        ("stop", {"a": 1}),
        ("stop_token_ids", "5"),
        ("ignore_eos", 1),
        ("ignore_eos", "maybe"),
        ("logprobs", 21),
        ("word_probabilities", ["no"] * 17),
        ("word_probabilities", ["no", *["yes"] * 17]),
        ("choices", []),
        ("choices", "red"),
        ("choices", ["a", ""]),
        ("choices", ["a", "\ud800"]),
        ("stop", "\udfff"),
        ("lora_name", 7),
    ],
)
def test_a_value_of_the_wrong_type_or_length_is_refused(key: str, value: object) -> None:
    with pytest.raises(InvalidArgument, match=f"'{key}' must be"):
        SamplingParams.parse({key: value})


def test_a_minimum_above_the_maximum_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="'min_tokens' = 20 is above 'max_tokens' = 16"):
        SamplingParams.parse({"min_tokens": 20})


def test_zero_is_a_value_and_not_a_missing_one() -> None:
    keys = ("temperature", "seed", "logprobs", "priority", "min_tokens", "stream_interval_ms")
    params = SamplingParams.parse({**dict.fromkeys(keys, 0), "stop_token_ids": [0]})
    assert [getattr(params, key) for key in keys] == [0] * len(keys)
    assert params.stop_token_ids == (0,)
    defaults = SamplingParams(seed=5, logprobs=3, priority=2, temperature=0.5)
    assert SamplingParams.parse(dict.fromkeys(keys, 0), defaults) == SamplingParams(
        temperature=0.0, seed=0, logprobs=0
    )


def test_choices_remove_the_default_token_limit() -> None:
    assert SamplingParams.parse({"choices": ["a"]}).max_tokens is None
    assert SamplingParams.parse({"choices": ["a"], "max_tokens": 9}).max_tokens == 9


def test_defaults_equal_vllms_and_can_be_replaced() -> None:
    assert SamplingParams.parse({}) == SamplingParams(temperature=1.0, max_tokens=16)
    defaults = SamplingParams(temperature=0.0, max_tokens=48)
    assert SamplingParams.parse({"top_k": 3}, defaults).max_tokens == 48
