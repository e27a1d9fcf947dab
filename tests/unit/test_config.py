"""Tests of strict JSON, of `model.json`, and of the keys of vLLM that it may contain."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlora.config import (
    ACCEPTED,
    NO_EFFECT,
    REFUSED,
    Limits,
    Options,
    load_adapter_names,
    load_options,
    load_replacing,
    parse_options,
    read_settings,
)
from vlora.errors import InvalidArgument
from vlora.strict_json import MAX_DEPTH, load_object


def parse(**keys: Any) -> Options:
    return parse_options({"model": "m"} | keys, where="model.json", folder=Path("/repository"))


def test_relative_folders_start_at_the_files_folder() -> None:
    options = parse(model="../weights", adapters="adapters")
    assert options.model == Path("/weights")
    assert options.adapters == Path("/repository/adapters")


def test_the_environment_overrides_folders(tmp_path: Path) -> None:
    file = tmp_path / "model.json"
    file.write_text(json.dumps({"model": "m", "adapters": "a", "max_num_seqs": 3}))
    options = load_options(file, {"VLORA_MODEL": "/other", "VLORA_ADAPTERS": "/adapters"})
    assert options.model == Path("/other")
    assert options.adapters == Path("/adapters")
    assert options.max_num_seqs == 3
    options = load_options(file, {"VLORA_MODEL": "", "VLORA_ADAPTERS": "/adapters"})
    assert (options.model, options.adapters) == (tmp_path / "m", Path("/adapters"))


@pytest.mark.parametrize(
    ("environment", "replacing"),
    [({"VLORA_MODEL": "/other"}, {}), ({}, {"model": "/other"})],
    ids=["environment", "options"],
)
def test_another_model_does_not_get_the_adapters_and_the_tokenizer_of_the_files_model(
    environment: dict[str, str], replacing: dict[str, str], tmp_path: Path
) -> None:
    file = tmp_path / "model.json"
    file.write_text(json.dumps({"model": "m", "tokenizer": "m", "adapters": "a"}))
    options = load_options(file, environment, replacing)
    assert (options.model, options.adapters) == (Path("/other"), None)
    named = load_options(file, environment, {**replacing, "adapters": "b"})
    assert named.adapters == tmp_path / "b"


def test_folders_of_an_options_file_start_at_its_folder(tmp_path: Path) -> None:
    file = tmp_path / "options.json"
    file.write_text(json.dumps({"model": "../m", "tokenizer": "../m", "adapters": "/a"}))
    model = str(tmp_path.parent / "m")
    assert load_replacing(file) == {"model": model, "tokenizer": model, "adapters": "/a"}
    file.write_text('{"tokenizer": "m", "block_size": 8}')
    model = str(tmp_path / "m")
    assert load_replacing(file) == {"tokenizer": model, "block_size": 8}


def test_a_setting_is_json_or_text_and_names_its_key_if_it_is_wrong(tmp_path: Path) -> None:
    given = ["max_num_seqs=8", "policy=paper", 'limits={"max_images": 2}', "max_model_len=null"]
    limits = {"max_images": 2}
    keys = {"max_num_seqs": 8, "policy": "paper", "limits": limits, "max_model_len": None}
    assert read_settings(given) == keys
    assert read_settings(["adapters=a"]) == {"adapters": str(Path.cwd() / "a")}
    for wrong, message in (
        ("max_num_seqs", "--set must have the form KEY=VALUE, not 'max_num_seqs'"),
        ("max_num_seq=8", "--set: unknown key 'max_num_seq'; did you mean 'max_num_seqs'"),
        ('max_num_seqs=8, "block_size": 2', "'max_num_seqs' must be a positive whole number"),
        ("theta_steps=NaN", "'theta_steps' must be a positive number"),
        ("pinned_adapters=a", "'pinned_adapters' must be a list of names, not \"a\""),
        ('pinned_adapters=["a", 1]', "'pinned_adapters' must be a list of names, not [\"a\", 1]"),
    ):
        with pytest.raises(InvalidArgument, match=re.escape(message)):
            read_settings([wrong])


def test_errors_of_a_file_of_options_name_it_and_those_of_combined_files_both(
    tmp_path: Path,
) -> None:
    file, replacing_from = tmp_path / "model.json", tmp_path / "options.json"
    file.write_text(json.dumps({"model": "m", "quantization": "int8"}))
    with pytest.raises(InvalidArgument, match=r"model\.json with .*options\.json: 'merging'"):
        load_options(file, {}, {"merging": "in_place"}, replacing_from)
    replacing_from.write_text(json.dumps({"policy": "papers"}))
    with pytest.raises(InvalidArgument, match=r"options\.json: 'policy' = 'papers' is unknown"):
        load_replacing(replacing_from)


def test_an_unknown_key_is_rejected_with_the_nearest_known_one() -> None:
    with pytest.raises(InvalidArgument, match=r"model.json: unknown key 'max_num_seq'.*'max_num_s"):
        parse(max_num_seq=3)
    with pytest.raises(
        InvalidArgument, match=r"unknown key 'zzz'; known keys: .*, kv_cache_tokens, "
    ):
        parse(zzz=3)


@pytest.mark.parametrize("key", sorted(REFUSED))
def test_a_vllm_key_without_an_equivalent_is_rejected_with_the_reason(key: str) -> None:
    with pytest.raises(InvalidArgument, match=f"'{key}' is not used here: {REFUSED[key][:12]}"):
        parse(**{key: 1})


@pytest.mark.parametrize("key", sorted(ACCEPTED))
def test_a_vllm_key_that_describes_what_the_server_does_is_accepted(key: str) -> None:
    assert parse(**{key: ACCEPTED[key][0]}) == parse()
    with pytest.raises(InvalidArgument, match=rf"'{key}' = 77 is not supported"):
        parse(**{key: 77})


@pytest.mark.parametrize("spelling", ["true", "True", True])
def test_booleans_may_be_strings(spelling: Any) -> None:
    assert parse(enable_lora=spelling, disable_log_requests=spelling) == parse()
    assert parse(disable_log_stats=spelling).disable_log_stats
    assert not parse(disable_log_stats="false").disable_log_stats
    with pytest.raises(InvalidArgument, match="'disable_log_stats' must be true or false"):
        parse(disable_log_stats="yes")


@pytest.mark.parametrize("key", sorted(NO_EFFECT))
def test_a_vllm_key_without_effect_is_accepted_with_a_note(key: str) -> None:
    (note,) = parse(**{key: 0.5}).notes
    assert note.startswith(f"model.json: '{key}' has no effect here: ")
    with pytest.raises(InvalidArgument, match="unknown key 'notes'"):
        parse(notes=["x"])


def test_vllms_key_tokenizer_must_equal_model() -> None:
    assert parse(tokenizer="m") == parse()
    with pytest.raises(InvalidArgument, match="'tokenizer' must equal 'model'"):
        parse(tokenizer="other")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("max_num_seqs", 0),
        ("max_num_seqs", "8"),
        ("max_num_seqs", True),
        ("block_size", 2.5),
        ("block_size", None),
        ("feature_cache_bytes", -1),
        ("adapters", 5),
        ("limits", [1]),
        ("model", ""),
        ("dtype", "float8"),
        ("quantization_group_size", 48),
        ("engine_threads", 0),
        ("encoder_threads", "all"),
        ("merging", "sideways"),
        ("merged_weights_bytes", -1),
        ("engine_memory_share", 0),
        ("encoder_memory_share", "all"),
        ("video_pruning_rate", 1.0),
        ("video_pruning_rate", -0.5),
    ],
)
def test_an_invalid_value_is_rejected(key: str, value: Any) -> None:
    with pytest.raises(InvalidArgument, match=f"'{key}'"):
        parse(**{key: value})


@pytest.mark.parametrize("content", ["{", "[]", "7", "{}"])
def test_a_file_without_a_json_object_or_a_model_is_rejected(tmp_path: Path, content: str) -> None:
    (tmp_path / "model.json").write_text(content)
    with pytest.raises(InvalidArgument, match=r"model\.json"):
        load_options(tmp_path / "model.json", {})


def test_limits_are_read_and_checked() -> None:
    limits = parse(limits={"max_images": 3, "max_image_megapixels": 1}).limits
    assert limits == Limits(max_images=3, max_image_megapixels=1.0)
    for wrong, message in (
        ({"max_images": 0}, "'max_images' must be a positive whole number"),
        ({"max_image": 3}, r"limits: unknown key 'max_image'; .*'max_images'"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            parse(limits=wrong)


def test_values_of_several_types_are_read() -> None:
    keys = {"dtype": "bfloat16", "engine_threads": 3, "encoder_threads": "auto", "block_size": 8}
    keys |= {"video_pruning_rate": 0.0}
    assert {key: getattr(parse(**keys), key) for key in keys} == keys
    assert parse(pinned_adapters=["a", "b"]).pinned_adapters == ("a", "b")


def test_engine_and_encoder_share_a_gpus_memory() -> None:
    assert parse().engine_memory_share + parse().encoder_memory_share < 1
    assert parse(engine_memory_share=0.9, encoder_memory_share=0.1).engine_memory_share == 0.9
    with pytest.raises(InvalidArgument, match="the limit is 1"):
        parse(engine_memory_share=0.9, encoder_memory_share=0.2)


def test_quantization_is_read_and_rules_out_merging_in_place() -> None:
    for value in (8, "INT8", "none", ["int8"]):
        unknown = f"'quantization' = {json.dumps(value)} is unknown; it must be "
        unknown += '"int8", "int8-dynamic", "int4" or "int4-dynamic"'
        with pytest.raises(InvalidArgument, match=re.escape(unknown)):
            parse(quantization=value)
    for quantization in (None, "int8", "int8-dynamic"):
        with pytest.raises(InvalidArgument, match="'quantization_group_size' = 64 has an effect"):
            parse(quantization=quantization, quantization_group_size=64)
    for quantization in ("int4", "int4-dynamic"):
        options = parse(quantization=quantization, quantization_group_size=64, merging="off")
        assert (options.quantization, options.quantization_group_size) == (quantization, 64)
    with pytest.raises(InvalidArgument, match="'merging' = 'in_place' changes the base weights"):
        parse(quantization="int8", merging="in_place")


def test_multi_lora_json_maps_names_to_folders(tmp_path: Path) -> None:
    path = tmp_path / "multi_lora.json"
    assert load_adapter_names(path) == {}
    path.write_text('{"a": "folder"}')
    assert load_adapter_names(path) == {"a": "folder"}
    path.write_text('{"a": 1}')
    with pytest.raises(InvalidArgument, match="adapter name → folder"):
        load_adapter_names(path)


# -- the table of all keys in docs/operations.md --------------------------------------------------

UNITS = {1024**3: "GiB", 1024**2: "MiB", 1024: "KiB"}


def table_value(key: str, value: Any) -> str:
    """Return a default as the table shows it; sizes in the largest unit that divides them."""
    if key.endswith(("bytes", "memory")) and isinstance(value, int):
        size = next(unit for unit in UNITS if value % unit == 0)
        return f"{value // size} {UNITS[size]}"
    return "–" if isinstance(value, Path) else f"`{json.dumps(value)}`"


def test_the_page_on_operations_has_each_key_with_its_default() -> None:
    defaults = {f.name: getattr(Options(), f.name) for f in fields(Options)}
    del defaults["notes"], defaults["limits"]
    limits = {f"limits.{f.name}": getattr(Limits(), f.name) for f in fields(Limits)}
    page = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    table = page.partition("## Keys of model.json")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `([\w.]+)` \| (.*?) \|", table, re.MULTILINE))
    assert rows == {key: table_value(key, value) for key, value in (defaults | limits).items()}


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
