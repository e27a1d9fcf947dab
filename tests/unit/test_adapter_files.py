"""Tests that supported adapter folders are read correctly, and all others are rejected by name."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.adapter_store import load_and_pack
from tests.support.device_tensors import DEVICE, separate_devices
from tests.support.memory import peak_growth
from tests.support.small_adapter import (
    HIDDEN,
    PREFIX,
    RANK,
    VOCABULARY,
    edit_config,
    edit_tensors,
    key,
    small_shape,
    write_small_adapter,
)
from vlora.adapters.catalog import find_folders
from vlora.adapters.errors import ErrorFactory
from vlora.adapters.files import describe_adapter, load_adapter
from vlora.adapters.model_shape import HEADS, LAYOUTS, LM_HEAD, ModelShape
from vlora.adapters.peft import TensorKey, UnknownKey, parse_key
from vlora.adapters.store import AdapterStore
from vlora.errors import InvalidArgument, NotFound
from vlora.ids import VISION
from vlora.model.checkpoint import StoredRows


@pytest.fixture
def model() -> ModelShape:
    return small_shape()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_small_adapter(tmp_path / "adapter")


def test_rslora_and_alpha_patterns_change_the_scale(folder: Path, model: ModelShape) -> None:
    edit_config(folder, use_rslora=True, alpha_pattern={r"layers\.1\.self_attn\.q_proj": 6})
    tensors = load_file(folder / "adapter_model.safetensors")
    pairs = load_adapter("x", folder, model).pairs
    for layer, alpha in ((0, 8), (1, 6)):
        scale = alpha / RANK**0.5
        torch.testing.assert_close(pairs[layer, "q_proj"].b, tensors[key(layer, "B")] * scale)


def test_mixed_types_and_different_scales_are_read_as_matrix_by_matrix(
    folder: Path, model: ModelShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    types = (torch.float16, torch.float64, torch.bfloat16, torch.float32)

    def cast(tensors: dict[str, torch.Tensor]) -> None:
        for index, name in enumerate(list(tensors)):
            tensors[name] = tensors[name].to(types[index % len(types)])

    edit_tensors(folder, cast)
    edit_config(folder, alpha_pattern={r"layers\.1\..*": 3, r"up_proj": 5})
    read = load_adapter("x", folder, model)
    stored = load_file(folder / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == set(types)
    for (layer, target), pair in read.pairs.items():
        block = "self_attn" if target == "q_proj" else "mlp"
        a, b = (
            stored[f"{PREFIX}.{layer}.{block}.{target}.lora_{which}.weight"].float()
            for which in "AB"
        )
        scale = (3 if layer == 1 else 5 if target == "up_proj" else 8) / RANK
        assert torch.equal(pair.a, a)
        assert torch.equal(pair.b, b * scale)
    preadv = os.preadv
    # A read may return fewer bytes than requested.
    monkeypatch.setattr(
        os, "preadv", lambda file, buffers, offset: preadv(file, [buffers[0][:7]], offset)
    )
    reread = load_adapter("x", folder, model)
    assert reread.info == read.info
    assert all(torch.equal(reread.pairs[p].b, pair.b) for p, pair in read.pairs.items())


def test_the_digest_depends_on_the_content_and_not_on_the_name(
    folder: Path, model: ModelShape
) -> None:
    digest = load_adapter("x", folder, model).info.digest
    edit_config(folder, lora_dropout=0.5, base_model_name_or_path="elsewhere")
    assert load_adapter("y", folder, model).info.digest == digest
    edit_config(folder, lora_alpha=9)
    assert load_adapter("x", folder, model).info.digest != digest


def test_weights_that_do_not_fit_are_reported_with_the_base_model_that_the_config_names(
    folder: Path, model: ModelShape
) -> None:
    edit_config(folder, base_model_name_or_path="org/other", r=RANK + 1)
    with pytest.raises(InvalidArgument, match=r"they must be .* names the base model 'org/other'"):
        load_adapter("x", folder, model)
    key = f"{PREFIX}.99.mlp.up_proj.lora_A.weight"
    edit_tensors(folder, lambda tensors: tensors.update({key: torch.ones(RANK, 8)}))
    with pytest.raises(InvalidArgument, match=r"its layers are .* names the base model"):
        load_adapter("x", folder, model)


def test_a_copy_of_the_lm_head_is_compared_with_the_one_of_a_gpu(
    folder: Path, model: ModelShape
) -> None:
    name = "base_model.model.lm_head.base_layer.weight"
    edit_tensors(folder, lambda t: t.update({name: model.lm_head()}))
    with separate_devices():
        on_gpu = model.lm_head().to(DEVICE)
        load_adapter("x", folder, replace(model, lm_head=lambda: on_gpu))
        on_gpu = on_gpu + 1
        with pytest.raises(InvalidArgument, match="differs from the base model's own lm_head"):
            load_adapter("x", folder, replace(model, lm_head=lambda: on_gpu))


@pytest.mark.parametrize("stored", [False, True], ids=["in-memory", "stored"])
@pytest.mark.parametrize("change", [0.0, 1.0, math.nan])
def test_a_copy_of_the_lm_head_is_compared_without_memory_for_it(
    folder: Path, model: ModelShape, change: float, stored: bool, tmp_path: Path
) -> None:
    head = torch.zeros(1 << 18, HIDDEN * 8, dtype=torch.bfloat16)
    save_file({"lm_head.weight": head}, tmp_path / "head.safetensors")
    rows = StoredRows(
        tmp_path / "head.safetensors", "lm_head.weight", (1 << 18, HIDDEN * 8), head.dtype
    )
    model = replace(
        model,
        vocabulary=head.shape[0],
        hidden=head.shape[1],
        lm_head=lambda: rows if stored else head,
    )
    name = "base_model.model.lm_head.base_layer.weight"
    head[-1, -1] = change
    edit_tensors(folder, lambda t: t.update({name: head}))
    head[-1, -1] = 0.0

    def load() -> None:
        if not change:
            assert load_adapter("x", folder, model).pairs
            return
        with pytest.raises(InvalidArgument, match="differs from the base model's own lm_head"):
            load_adapter("x", folder, model)

    load()  # Everything that is loaded once is loaded now.
    assert peak_growth(load) < head.nbytes / 2


@pytest.mark.parametrize("kind", [True, False, None, "gaussian", "eva", "orthogonal", "mica"])
def test_kinds_of_initialisation_that_keep_the_base_are_accepted(
    folder: Path, model: ModelShape, kind: Any
) -> None:
    edit_config(folder, init_lora_weights=kind, eva_config={"rho": 2.0})
    assert load_adapter("x", folder, model).pairs


def test_an_activated_adapter_has_its_invocation_in_its_digest(
    folder: Path, model: ModelShape
) -> None:
    digests = {load_adapter("x", folder, model).info.digest}
    for tokens in ([3], [3, 4], [29]):
        edit_config(folder, alora_invocation_tokens=tokens)
        info = load_adapter("x", folder, model).info
        assert info.invocation == tuple(tokens)
        digests.add(info.digest)
    assert len(digests) == 4


def test_a_broken_adapter_does_not_affect_others(
    folder: Path, model: ModelShape, tmp_path: Path
) -> None:
    shutil.copytree(folder, tmp_path / "root" / "good")
    shutil.copytree(folder, tmp_path / "root" / "bad")
    edit_config(tmp_path / "root" / "bad", use_dora=True)
    store = AdapterStore(model)
    load_and_pack(store, find_folders(tmp_path / "root", {}))
    assert store.names() == ("good",)
    q_pairs, k_pairs = store.slots.group([(0, "q_proj"), (0, "k_proj")]).pairs
    assert q_pairs[store.slot("good")] is not None
    assert k_pairs[store.slot("good")] is None
    with pytest.raises(InvalidArgument, match=r"adapter 'bad'.*DoRA"):
        store.info("bad")
    with pytest.raises(NotFound, match=r"unknown adapter 'god'; did you mean 'good'.*Known: good"):
        store.info("god")
    for unknown in ("zzz", "golf club"):
        with pytest.raises(NotFound, match=rf"^unknown adapter '{unknown}'\. Known: good$"):
            store.info(unknown)


def test_configured_names_win_over_folders(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("a", "b"):
        shutil.copytree(folder, tmp_path / "root" / name)
    folders = find_folders(tmp_path / "root", {"alias": "a", "a": "b"})
    assert {name: path.name for name, path in folders.items()} == {"a": "b", "b": "b", "alias": "a"}
    assert "'a'" in caplog.text


def test_a_head_counts_toward_the_size_of_an_adapter(folder: Path, model: ModelShape) -> None:
    lora = describe_adapter("x", folder, model).host_bytes
    labels = [f"label {i}" for i in range(100)]
    tensors = {"weight": torch.zeros(100, HIDDEN), "bias": torch.zeros(100)}
    with_head(folder, labels, ["classify"], **tensors)
    size = lora + 4 * 100 * (HIDDEN + 1)
    assert describe_adapter("x", folder, model, size).host_bytes == size
    with pytest.raises(InvalidArgument, match=rf"head\.safetensors declares .* {size} bytes"):
        describe_adapter("x", folder, model, size - 1)


def test_an_activated_adapter_has_no_task_head(folder: Path, model: ModelShape) -> None:
    with_head(folder, ["a", "b"], ["classify"], weight=torch.ones(2, HIDDEN), bias=torch.ones(2))
    edit_config(folder, alora_invocation_tokens=[1])
    with pytest.raises(InvalidArgument, match="cannot be used with a vision task head"):
        load_adapter("x", folder, model)


def with_head(folder: Path, labels: list[str], tasks: list[str], **tensors: torch.Tensor) -> None:
    head = {"labels": labels, "tasks": tasks}
    (folder / "vlora.json").write_text(json.dumps({"tasks": tasks, "head": head}))
    save_file(tensors, folder / "head.safetensors")


def test_a_head_is_read_with_its_labels(folder: Path, model: ModelShape) -> None:
    weight, bias = torch.randn(2, HIDDEN), torch.randn(2)
    with_head(folder, ["yes", "no"], ["classify"], weight=weight, bias=bias)
    adapter = load_adapter("x", folder, model)
    assert adapter.head is not None
    assert (adapter.info.head_labels, adapter.info.head_tasks) == (("yes", "no"), ("classify",))
    assert torch.equal(adapter.head.weight, weight)
    assert torch.equal(adapter.head.bias, bias)


@pytest.mark.parametrize(
    ("labels", "tensors", "reason"),
    [
        (["a"], {"weight": (2, HIDDEN), "bias": (2,)}, "must be"),
        (["a", "b"], {"weight": (2, HIDDEN)}, "'weight' and 'bias'"),
        (["a", "a"], {"weight": (2, HIDDEN), "bias": (2,)}, "different names"),
        ([], {"weight": (2, HIDDEN), "bias": (2,)}, "head.labels"),
    ],
)
def test_a_head_that_does_not_fit_is_rejected(
    folder: Path,
    model: ModelShape,
    labels: list[str],
    tensors: dict[str, tuple[int, ...]],
    reason: str,
) -> None:
    random = {name: torch.randn(shape) for name, shape in tensors.items()}
    with_head(folder, labels, ["classify"], **random)
    with pytest.raises(InvalidArgument, match="adapter 'x'") as caught:
        load_adapter("x", folder, model)
    assert reason in str(caught.value)


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
        ({"lora_alpha": float("inf")}, "has Infinity, which is not valid JSON"),
        ({"lora_alpha": float("nan")}, "has NaN, which is not valid JSON"),
        ({"lora_alpha": 10**399}, "lora_alpha = 1000"),
        ({"use_rslora": "no"}, "use_rslora = 'no'"),
        ({"alpha_pattern": {"q_proj": None}}, "alpha_pattern['q_proj'] = None"),
        ({"alpha_pattern": {"q_proj": [8]}}, "alpha_pattern['q_proj'] = [8]"),
        ({"alpha_pattern": {"q_proj": "8"}}, "alpha_pattern['q_proj'] = '8'"),
        ({"alpha_pattern": {"q_proj": 10**399}}, "alpha_pattern['q_proj'] = 1000"),
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
        ({"rank_pattern": {"q_proj": 10**399}}, "with rank 1000"),
        ({"target_modules": None}, "target_modules = None"),
        ({"target_modules": []}, "target_modules = []"),
        ({"target_modules": [["q_proj"]]}, "target_modules = [['q_proj']]"),
        ({"target_modules": 5}, "target_modules = 5"),
        ({"target_modules": ["wq", "layers.7.self_attn.q_proj"]}, "does not target"),
        ({"target_modules": r".*\.wq"}, "does not target"),
        ({"target_modules": "("}, "'(', which is not a regular expression"),
        ({"target_modules": "all-linear", "layers_to_transform": [0]}, "with a 'target_modules'"),
        ({"layers_pattern": "layers"}, "without 'layers_to_transform'"),
        ({"layers_to_transform": "0"}, "layers_to_transform = '0'"),
        ({"layers_to_transform": 1.5}, "layers_to_transform = 1.5"),
        ({"layers_to_transform": [0, None]}, "layers_to_transform = [0, None]"),
        ({"layers_to_transform": [0, 1], "layers_pattern": "("}, "is not a regular expression"),
        ({"exclude_modules": {"a": 1}}, "exclude_modules = {'a': 1}"),
        ({"lora_alpha": "8"}, "lora_alpha = '8'"),
        ({"r": 8}, "with rank 8"),
        ({"rank_pattern": {"q_proj": 2}}, "with rank 2"),
        ({"alora_invocation_tokens": []}, "must be a list of 1 to 256 token ids"),
        ({"alora_invocation_tokens": [1] * 257}, "must be a list of 1 to 256 token ids"),
        ({"alora_invocation_tokens": "check"}, "alora_invocation_tokens = 'check'"),
        ({"alora_invocation_tokens": [1, -1]}, "alora_invocation_tokens = [1, -1]"),
        ({"alora_invocation_tokens": [True]}, "alora_invocation_tokens = [True]"),
        ({"alora_invocation_tokens": [1.0]}, "alora_invocation_tokens = [1.0]"),
        ({"alora_invocation_tokens": [30]}, "has 30 in alora_invocation_tokens; ids run from 0"),
        ({"alora_invocation_tokens": [10**399]}, "in alora_invocation_tokens"),
    ],
)
def test_an_unsupported_config_is_rejected_by_name(
    folder: Path, model: ModelShape, change: dict[str, Any], reason: str
) -> None:
    edit_config(folder, **change)
    with pytest.raises(InvalidArgument, match="adapter 'x': adapter_") as caught:
        load_adapter("x", folder, model)
    assert reason in str(caught.value)


def fill(dtype: torch.dtype, value: float) -> Callable[[dict[str, torch.Tensor]], None]:
    full = torch.full((12, RANK), value, dtype=torch.float64).to(dtype)
    return lambda tensors: tensors.update({key(0, "B"): full})


def add(name: str, *shape: int) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.update({name: torch.randn(shape)})


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (lambda t: t[key(0, "A")][1, 2].fill_(math.nan), f"NaN or Inf in '{key(0, 'A')}'"),
        (lambda t: t[key(0, "B")][1, 2].fill_(math.inf), f"NaN or Inf in '{key(0, 'B')}'"),
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
            lambda t: t.update(
                {
                    "base_model.model.model.embed_tokens.base_layer.weight": torch.randn(30, 12),
                    "base_model.model.model.embed_tokens.lora_embedding_A": torch.randn(4, 30),
                }
            ),
            "train without the target 'embed_tokens'",
        ),
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


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("adapter_model.safetensors", b"", "is not a complete safetensors file"),
        ("adapter_model.safetensors", b"not a tensor file", "is not a complete safetensors file"),
        ("adapter_model.safetensors", b"\xff" * 64, "is not a complete safetensors file"),
        ("adapter_model.bin", b"", r"\.bin is a pickle.*vlora adapters convert"),
        ("non_lora_trainables.bin", b"", r"non_lora_trainables\.bin holds .* connector"),
    ],
)
def test_files_that_are_no_plain_lora_are_rejected(
    folder: Path, model: ModelShape, file: str, content: bytes, reason: str
) -> None:
    if file == "adapter_model.bin":
        (folder / "adapter_model.safetensors").unlink()
    (folder / file).write_bytes(content)
    with pytest.raises(InvalidArgument, match=reason):
        load_adapter("x", folder, model)


def test_an_unknown_key_of_vlora_json_is_rejected_with_the_nearest_known_one(
    folder: Path, model: ModelShape
) -> None:
    for name, hint in (("task", "; did you mean 'tasks'? "), ("zzz", ". ")):
        (folder / "vlora.json").write_text(json.dumps({name: ["vqa"]}))
        with pytest.raises(InvalidArgument, match="unknown key") as caught:
            load_adapter("x", folder, model)
        assert str(caught.value).endswith(
            f"'{name}'{hint}Known: tasks, default_task, accuracy, head, skills"
        )


MODEL = ModelShape(
    layers=12,
    hidden=4,
    vocabulary=5,
    shapes={"q_proj": (4, 4), "up_proj": (8, 4)},
    prefix="model.language_model.",
    lm_head=lambda: torch.zeros(5, 4),
    vision=lambda: {"visual.blocks.0.attn.qkv": (12, 4), "vision_tower.layers.0.fc1": (8, 4)},
)
ENDINGS = {
    "lora_A.weight": "A",
    "lora_B.default.weight": "B",
    "lora_magnitude_vector": "magnitude",
    "lora_magnitude_vector.default.weight": "magnitude",
    "weight": "weight",
    "base_layer.weight": "weight",
    "modules_to_save.default.weight": "weight",
}


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("wrapper", ["", "base_model.model."])
def test_all_layouts_of_a_key_mean_the_same_tensor(wrapper: str, ending: str) -> None:
    for prefix in LAYOUTS:
        path = f"{prefix}layers.11.self_attn.q_proj"
        expected = TensorKey(path, (11, "q_proj"), ENDINGS[ending])  # type: ignore[arg-type]
        assert parse_key(f"{wrapper}{path}.{ending}", MODEL) == expected
    for path in HEADS:
        assert parse_key(f"{wrapper}{path}.{ending}", MODEL).matrix == (-1, LM_HEAD)
    if ENDINGS[ending] == "weight":
        for prefix in LAYOUTS:
            path = f"{prefix}embed_tokens"
            assert parse_key(f"{wrapper}{path}.{ending}", MODEL) == TensorKey(path, None, "weight")


@pytest.mark.parametrize(
    ("path", "own"),
    [
        ("model.visual.blocks.0.attn.qkv", "visual.blocks.0.attn.qkv"),
        ("visual.blocks.0.attn.qkv", "visual.blocks.0.attn.qkv"),
        ("model.vision_tower.layers.0.fc1", "vision_tower.layers.0.fc1"),
        ("vision_tower.vision_model.layers.0.fc1", "vision_tower.layers.0.fc1"),
    ],
)
def test_all_layouts_of_a_key_of_the_vision_tower_mean_the_same_layer(path: str, own: str) -> None:
    parsed = parse_key(f"base_model.model.{path}.lora_A.weight", MODEL)
    assert parsed == TensorKey(path, (VISION, own), "A")


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        (
            "model.text.layers.0.self_attn.q_proj.lora_A.weight",
            "'model.text.', which is not a known",
        ),
        ("model.model.layers.0.mlp.up_proj.lora_B.weight", "'model.model.', which is not a known"),
        ("module.model.layers.0.mlp.up_proj.lora_B.weight", "known: 'model.language_model.layers'"),
        ("model.layers.12.mlp.up_proj.lora_A.weight", "its layers are 0 to 11"),
        ("model.layers.0.mlp.upproj.lora_A.weight", "did you mean 'up_proj'? targets are q_proj"),
        ("model.layers.0.mlp.w1.lora_A.weight", "; targets are q_proj, up_proj"),
        ("model.layers.00.mlp.up_proj.lora_A.weight", "not a LoRA weight"),
        ("model.layers.0.mlp.up_proj.lora_C.weight", "not a LoRA weight"),
        ("model.layers.0.mlp.up_proj.lora_A.other.weight", "not a LoRA weight"),
        ("model.layers.0.mlp.up_proj.lora_A.weight.weight", "not a LoRA weight"),
        ("model.layers.0.mlp.up_proj.bias", "not a LoRA weight"),
        ("model.norm.weight", "not a LoRA weight"),
        ("", "not a LoRA weight"),
        ("model.layers.0.mlp.up_proj.lora_A.weight\n", "not a LoRA weight"),
        ("model.embed_tokens.lora_embedding_A", "trained embeddings"),
        (
            "model.visual.blocks.1.attn.qkv.lora_A.weight",
            "not a linear layer of this model's vision",
        ),
        ("vision_tower.embeddings.patch_embedding.lora_A.weight", "not a linear layer"),
        ("model.multi_modal_projector.linear_1.weight", "connector"),
    ],
)
def test_an_unknown_key_is_rejected_with_its_reason(key: str, reason: str) -> None:
    for wrapper in ("", "base_model.model."):
        with pytest.raises(UnknownKey) as caught:
            parse_key(wrapper + key, MODEL)
        assert reason in str(caught.value)


def test_mutated_keys_mean_an_existing_matrix_or_are_rejected() -> None:
    rng = random.Random(4)
    parts = [*LAYOUTS, "base_model.model.", "layers.", "0", "11", ".", "self_attn", "mlp", "q_proj"]
    parts += ["up_proj", ".lora_A", ".lora_B", ".weight", ".default", "lm_head", "embed_tokens"]
    accepted = 0
    for _ in range(20_000):
        key = f"base_model.model.{rng.choice(LAYOUTS)}layers.3.mlp.up_proj.lora_A.weight"
        for _ in range(rng.randint(0, 2)):
            at = rng.randrange(len(key))
            key = key[:at] + rng.choice([*parts, "é", "\n", ""]) + key[at + rng.randint(0, 3) :]
        try:
            parsed = parse_key(key, MODEL)
        except UnknownKey:
            continue
        accepted += 1
        assert parsed.matrix is None or parsed.matrix in MODEL.matrices
        assert parsed.path in key
    assert 6_000 < accepted < 14_000


def test_a_key_of_megabytes_takes_no_time() -> None:
    started = time.process_time()
    for long in ("a" * 4_000_000, "layers." * 500_000, "model.layers.0.mlp." + ".lora_A" * 500_000):
        with pytest.raises(UnknownKey):
            parse_key(long, MODEL)
    assert time.process_time() - started < 10


def test_a_file_without_permission_is_reported_with_the_remedy() -> None:
    unreadable = ErrorFactory("cars", "adapter_model.safetensors").unreadable
    assert "chmod -R a+rX" in str(unreadable(PermissionError(13, "Permission denied")))
    assert "Input/output error" in str(unreadable(OSError(5, "Input/output error")))
