"""Tests of the strict parsing of `model.json`, and of the keys of vLLM that it may contain."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

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


def test_errors_of_an_options_file_name_this_file(tmp_path: Path) -> None:
    file = tmp_path / "options.json"
    for keys, message in (
        ({"max_num_seq": 8}, "unknown key 'max_num_seq'; did you mean 'max_num_seqs'"),
        ({"model": 5}, "'model' must be a folder's path"),
        ({"limits": {"max_image": 3}}, "limits: unknown key 'max_image'"),
    ):
        file.write_text(json.dumps(keys))
        with pytest.raises(InvalidArgument, match=rf"options\.json: {re.escape(message)}"):
            load_replacing(file)


def test_a_setting_is_json_or_text_and_names_its_key_if_it_is_wrong(tmp_path: Path) -> None:
    given = ["max_num_seqs=8", "policy=credit", 'limits={"max_images": 2}', "max_model_len=null"]
    limits = {"max_images": 2}
    keys = {"max_num_seqs": 8, "policy": "credit", "limits": limits, "max_model_len": None}
    assert read_settings(given) == keys
    assert read_settings(["adapters=a"]) == {"adapters": str(Path.cwd() / "a")}
    for wrong, message in (
        ("max_num_seqs", "--set must have the form KEY=VALUE, not 'max_num_seqs'"),
        ("max_num_seq=8", "--set: unknown key 'max_num_seq'; did you mean 'max_num_seqs'"),
        ('max_num_seqs=8, "block_size": 2', "'max_num_seqs' must be a positive whole number"),
        ("theta_min=NaN", "'theta_min' must be a positive number"),
    ):
        with pytest.raises(InvalidArgument, match=re.escape(message)):
            read_settings([wrong])


def test_errors_of_combined_files_name_both(tmp_path: Path) -> None:
    file, replacing_from = tmp_path / "model.json", tmp_path / "options.json"
    file.write_text(json.dumps({"model": "m", "quantization": "int8"}))
    with pytest.raises(InvalidArgument, match=r"model\.json with .*options\.json: 'merging'"):
        load_options(file, {}, {"merging": "in_place"}, replacing_from)


def test_an_unknown_key_is_rejected_with_the_nearest_known_one() -> None:
    with pytest.raises(InvalidArgument, match=r"model.json: unknown key 'max_num_seq'.*'max_num_s"):
        parse(max_num_seq=3)
    with pytest.raises(InvalidArgument, match=r"limits: unknown key 'max_image'; .*'max_images'"):
        parse(limits={"max_image": 3})
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


def test_a_file_of_the_vllm_backends_tutorials_is_accepted() -> None:
    options = parse(
        disable_log_requests="true",
        gpu_memory_utilization=0.8,
        tensor_parallel_size=1,
        block_size=16,
        enforce_eager="true",
        enable_lora="true",
        max_lora_rank=16,
        max_loras=4,
    )
    assert len(options.notes) == 3


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
    ],
)
def test_an_invalid_value_is_rejected(key: str, value: Any) -> None:
    with pytest.raises(InvalidArgument, match=f"'{key}'"):
        parse(**{key: value})


def test_limits_are_read_and_checked() -> None:
    limits = parse(limits={"max_images": 3, "max_image_megapixels": 1}).limits
    assert limits == Limits(max_images=3, max_image_megapixels=1.0)
    with pytest.raises(InvalidArgument, match="'max_images' must be a positive whole number"):
        parse(limits={"max_images": 0})


def test_a_missing_model_is_rejected() -> None:
    with pytest.raises(InvalidArgument, match="'model' is missing"):
        parse_options({}, where="model.json", folder=Path("/"))


@pytest.mark.parametrize("content", ["{", "[]", "7"])
def test_a_file_without_a_json_object_is_rejected(tmp_path: Path, content: str) -> None:
    (tmp_path / "model.json").write_text(content)
    with pytest.raises(InvalidArgument, match=r"model\.json"):
        load_options(tmp_path / "model.json", {})


def test_dtype_and_threads_are_read() -> None:
    assert (Options().dtype, Options().engine_threads) == ("float32", "auto")
    options = parse(dtype="bfloat16", engine_threads=3, encoder_threads="auto")
    assert (options.dtype, options.engine_threads, options.encoder_threads) == (
        *("bfloat16", 3),
        "auto",
    )
    assert parse(dtype="auto").dtype == "auto"


def test_engine_and_encoder_share_a_gpus_memory() -> None:
    assert parse().engine_memory_share + parse().encoder_memory_share < 1
    assert parse(engine_memory_share=0.9, encoder_memory_share=0.1).engine_memory_share == 0.9
    with pytest.raises(InvalidArgument, match="the limit is 1"):
        parse(engine_memory_share=0.9, encoder_memory_share=0.2)


def test_quantization_is_read_and_rules_out_merging_in_place() -> None:
    assert Options().quantization is None
    options = parse(quantization="int4", quantization_group_size=64, merging="off")
    assert (options.quantization, options.quantization_group_size) == ("int4", 64)
    with pytest.raises(InvalidArgument, match="'merging' = 'in_place' changes the base weights"):
        parse(quantization="int8", merging="in_place")


@pytest.mark.parametrize("value", [8, "INT8", "none", "awq", ["int8"]])
def test_an_unknown_quantization_is_answered_with_the_valid_ones(value: Any) -> None:
    valid = 'it must be "int8" or "int4"; remove the key to serve the weights as they are stored'
    with pytest.raises(InvalidArgument, match=valid) as refused:
        parse(quantization=value)
    assert f"'quantization' = {json.dumps(value)} is unknown" in str(refused.value)


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_a_group_size_without_groups_is_rejected(quantization: str | None) -> None:
    with pytest.raises(InvalidArgument, match="'quantization_group_size' = 64 has an effect only"):
        parse(quantization=quantization, quantization_group_size=64)
    assert parse(quantization=quantization, quantization_group_size=32).quantization is quantization


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
