"""Tests that unsupported and broken adapter folders are rejected by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.small_adapter import (
    HIDDEN,
    PREFIX,
    RANK,
    TARGETED,
    VOCABULARY,
    edit_config,
    edit_tensors,
    key,
)
from vlora.adapters.files import load_adapter
from vlora.adapters.model_shape import ModelShape
from vlora.errors import InvalidArgument


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"use_dora": True}, "DoRA, which is not supported; make it a plain LoRA with `vlora adap"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"modules_to_save": ["lm_head"]}, "`vlora adapters convert FOLDER OUT --model CHECKPOINT"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"lora_bias": True}, "lora_bias"),
        ({"bias": "all"}, "bias 'all'"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"init_lora_weights": "pissa_niter_4"}, "pissa_niter_4"),
        ({"init_lora_weights": "PiSSA"}, "changes the base model"),
        ({"init_lora_weights": "olora"}, "make it a plain LoRA with `vlora adapters conv"),
        ({"init_lora_weights": "pissa"}, "make it a plain LoRA with `vlora adapters conv"),
        ({"init_lora_weights": "pissa_niter_4"}, "path_initial_model_for_weight_conversion"),
        ({"init_lora_weights": "corda"}, "path_initial_model_for_weight_conversion=INITIAL"),
        ({"init_lora_weights": "lora_ga"}, "path_initial_model_for_weight_conversion=INITIAL"),
        ({"init_lora_weights": "loftq"}, "PEFT cannot convert it"),
        ({"init_lora_weights": "other"}, "init_lora_weights = 'other'; known: true, false, gaus"),
        ({"init_lora_weights": ["eva"]}, "init_lora_weights = ['eva']; known: "),
        ({"something_new": {"x": 1}}, "something_new"),
        ({"peft_type": "IA3"}, "peft_type 'IA3'"),
        ({"r": 0}, "r = 0"),
        ({"r": 4.0}, "r = 4.0"),
        ({"r": True}, "r = True"),
        ({"lora_alpha": float("inf")}, "lora_alpha = inf"),
        ({"lora_alpha": float("nan")}, "lora_alpha = nan"),
        ({"lora_alpha": 10**400}, "lora_alpha = 1000"),
        ({"use_rslora": "no"}, "use_rslora = 'no'"),
        ({"alpha_pattern": {"q_proj": None}}, "alpha_pattern['q_proj'] = None"),
        ({"alpha_pattern": {"q_proj": [8]}}, "alpha_pattern['q_proj'] = [8]"),
        ({"alpha_pattern": {"q_proj": "8"}}, "alpha_pattern['q_proj'] = '8'"),
        ({"alpha_pattern": {"q_proj": 10**400}}, "alpha_pattern['q_proj'] = 1000"),
        ({"alpha_pattern": {"(": 8}}, "is not a regular expression"),
        ({"alpha_pattern": ["q_proj"]}, "alpha_pattern = ['q_proj']"),
        ({"alpha_pattern": {f"a{i}": 8 for i in range(2001)}}, "2001 patterns"),
        ({"alpha_pattern": {"(" * 20_000: 8}}, "more than 16384 characters"),
        ({"alpha_pattern": {f"{'a' * 16000}({i})": 8 for i in range(9)}}, "65536 in total"),
        ({"alpha_pattern": {"(" * 3000 + ")" * 3000: 8}}, "is not a regular expression"),
        ({"alpha_pattern": {"(?:(?:(?:x{1,99}){1,99}){1,99})": 8}}, "repeats more than 1000 times"),
        ({"alpha_pattern": {"x{99999999999}": 8}}, "repeats more than 1000 times"),
        ({"alpha_pattern": {r"(?:q_proj){e<=9}": 8}}, "not a repetition"),
        ({"rank_pattern": {"q_proj": 4.5}}, "rank_pattern['q_proj'] = 4.5"),
        ({"rank_pattern": {"q_proj": 10**400}}, "with rank 1000"),
        ({"target_modules": None}, "target_modules = None"),
        ({"target_modules": []}, "target_modules = []"),
        ({"target_modules": [["q_proj"]]}, "target_modules = [['q_proj']]"),
        ({"target_modules": 5}, "target_modules = 5"),
        ({"target_modules": [*TARGETED, "wq"]}, "'wq' in target_modules"),
        ({"target_modules": [*TARGETED, "layers.7.mlp.up_proj"]}, "'layers.7.mlp.up_proj'"),
        ({"target_modules": [*TARGETED, "roj"]}, "'roj' in target_modules"),
        ({"target_modules": "("}, "'(', which is not a regular expression"),
        ({"target_modules": "all-linear", "layers_to_transform": [0]}, "with a 'target_modules'"),
        ({"layers_pattern": "layers"}, "without 'layers_to_transform'"),
        ({"layers_to_transform": "0"}, "layers_to_transform = '0'"),
        ({"layers_to_transform": [0, None]}, "layers_to_transform = [0, None]"),
        ({"layers_to_transform": [0, 1], "layers_pattern": "("}, "is not a regular expression"),
        ({"exclude_modules": {"a": 1}}, "exclude_modules = {'a': 1}"),
        ({"lora_alpha": "8"}, "lora_alpha = '8'"),
        ({"r": 8}, "with rank 8"),
        ({"rank_pattern": {"q_proj": 2}}, "with rank 2"),
    ],
)
def test_an_unsupported_config_is_rejected_by_name(
    folder: Path, model: ModelShape, change: dict[str, Any], reason: str
) -> None:
    edit_config(folder, **change)
    with pytest.raises(InvalidArgument, match="adapter 'x': adapter_") as caught:
        load_adapter("x", folder, model)
    assert reason in str(caught.value)


def set_nan(tensors: dict[str, torch.Tensor]) -> None:
    tensors[key(0, "A")][1, 2] = torch.nan


def set_inf(tensors: dict[str, torch.Tensor]) -> None:
    tensors[key(0, "B")][1, 2] = torch.inf


def fill(dtype: torch.dtype, value: float) -> Callable[[dict[str, torch.Tensor]], None]:
    full = torch.full((12, RANK), value, dtype=torch.float64).to(dtype)
    return lambda tensors: tensors.update({key(0, "B"): full})


def add(name: str, *shape: int) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.update({name: torch.randn(shape)})


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (set_nan, f"NaN or Inf in '{key(0, 'A')}'"),
        (set_inf, f"NaN or Inf in '{key(0, 'B')}'"),
        (fill(torch.float64, 1e39), f"NaN or Inf in '{key(0, 'B')}'"),
        (fill(torch.float32, 3e38), f"'{key(0, 'B')}', which overflows torch.float32 once scaled"),
        (fill(torch.bfloat16, 3e38), f"'{key(0, 'B')}', which overflows torch.float32"),
        (fill(torch.float8_e4m3fn, 1), f"'{key(0, 'B')}' as F8_E4M3"),
        (lambda t: t.pop(key(0, "A")), "no lora_A"),
        (lambda t: t.pop(key(1, "B")), "no lora_B"),
        (lambda t: t.update({key(0, "A"): torch.randn(RANK, 13)}), "(4, 13)"),
        (lambda t: t.update({key(0, "B"): torch.zeros(12, RANK, dtype=torch.int8)}), "I8"),
        (add(key(7, "A"), RANK, HIDDEN), "does not have"),
        (add(f"{PREFIX}.0.self_attn.q_proj.lora_magnitude_vector", 12), "DoRA"),
        (add(f"{PREFIX}.0.self_attn.q_proj.weight", 12, 12), "a whole weight besides the LoRA"),
        (add("base_model.model.model.embed_tokens.weight", 30, 12), "adapters convert FOLDER OUT"),
        (add("model.layers.0.self_attn.q_proj.lora_A.weight", RANK, 12), "other keys name"),
        (add(key(0, "A").replace(".lora_A.", ".lora_A.default."), RANK, 12), "a second time"),
        (add("base_model.model.model.embed_tokens.lora_embedding_A", 4, 30), "embeddings"),
        (
            add("base_model.model.vision_tower.encoder.layers.0.self_attn.q_proj.lora_A.weight", 4),
            "vision tower",
        ),
        (add("base_model.model.multi_modal_projector.linear_1.lora_A.weight", 4, 4), "connector"),
        (add("base_model.model.classifier.weight", 3, 3), "'base_model.model.classifier.weight'"),
        (add("base_model.model.lm_head.base_layer.weight", VOCABULARY, HIDDEN), "differs"),
        (lambda t: t.clear(), "no LoRA weights"),
    ],
)
def test_weights_that_do_not_fit_are_rejected_by_name(
    folder: Path,
    model: ModelShape,
    edit: Callable[[dict[str, torch.Tensor]], None],
    reason: str,
) -> None:
    edit_tensors(folder, edit)
    with pytest.raises(InvalidArgument, match=r"adapter 'x': adapter_model.safetensors") as caught:
        load_adapter("x", folder, model)
    assert reason in str(caught.value)


def test_pickled_weights_are_never_read(folder: Path, model: ModelShape) -> None:
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(InvalidArgument, match=r"\.bin is a pickle.*vlora adapters convert"):
        load_adapter("x", folder, model)


def test_weights_trained_beside_the_lora_are_not_ignored(folder: Path, model: ModelShape) -> None:
    (folder / "non_lora_trainables.bin").write_bytes(b"")
    with pytest.raises(InvalidArgument, match=r"non_lora_trainables\.bin holds .* connector"):
        load_adapter("x", folder, model)


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [
        ([], "must be a list of 1 to 256 token ids"),
        ([1] * 257, "must be a list of 1 to 256 token ids"),
        ("check", "alora_invocation_tokens = 'check'"),
        ([1, -1], "alora_invocation_tokens = [1, -1]"),
        ([True], "alora_invocation_tokens = [True]"),
        ([1.0], "alora_invocation_tokens = [1.0]"),
        ([30], "has 30 in alora_invocation_tokens; ids run from 0 to 29"),
        ([10**400], "in alora_invocation_tokens"),
    ],
)
def test_a_wrong_invocation_is_rejected(
    folder: Path, model: ModelShape, tokens: Any, reason: str
) -> None:
    edit_config(folder, alora_invocation_tokens=tokens)
    with pytest.raises(InvalidArgument, match=r"adapter 'x': adapter_config\.json") as caught:
        load_adapter("x", folder, model)
    assert reason in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"not a tensor file", b"\xff" * 64])
def test_a_broken_weights_file_is_rejected(folder: Path, model: ModelShape, content: bytes) -> None:
    (folder / "adapter_model.safetensors").write_bytes(content)
    with pytest.raises(InvalidArgument, match="is not a complete safetensors file"):
        load_adapter("x", folder, model)


def test_an_unknown_key_of_vlora_json_is_rejected_with_the_nearest_known_one(
    folder: Path, model: ModelShape
) -> None:
    for name, hint in (("task", "; did you mean 'tasks'? "), ("zzz", ". ")):
        (folder / "vlora.json").write_text(json.dumps({name: ["vqa"]}))
        with pytest.raises(InvalidArgument, match="unknown key") as caught:
            load_adapter("x", folder, model)
        assert str(caught.value).endswith(f"'{name}'{hint}Known: tasks, accuracy, head, skills")
