"""Tests that supported adapter folders are read correctly and all others rejected by name."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.memory import peak_growth
from vlora.errors import InvalidArgument, NotFound
from vlora.lora.adapter import AdapterFiles, load_adapter
from vlora.lora.folders import find_folders
from vlora.lora.model_shape import ModelShape
from vlora.lora.store import AdapterStore

LAYERS, HIDDEN, MIDDLE, VOCABULARY, RANK = 2, 12, 20, 30, 4
SHAPES = {
    "q_proj": (12, 12),
    "k_proj": (6, 12),
    "v_proj": (6, 12),
    "o_proj": (12, 12),
    "gate_proj": (MIDDLE, HIDDEN),
    "up_proj": (MIDDLE, HIDDEN),
    "down_proj": (HIDDEN, MIDDLE),
}
TARGETED = ["q_proj", "up_proj"]
PREFIX = "base_model.model.model.language_model.layers"


@pytest.fixture
def model() -> ModelShape:
    lm_head = torch.randn(VOCABULARY, HIDDEN)
    return ModelShape(
        layers=LAYERS,
        hidden=HIDDEN,
        vocabulary=VOCABULARY,
        shapes=SHAPES,
        prefix="model.language_model.",
        lm_head=lambda: lm_head,
        other_modules=lambda: ["vision_tower.encoder.layers.0.mlp.fc1"],
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a small valid adapter on q and up of both layers."""
    tensors = {}
    for layer in range(LAYERS):
        for block, target in (("self_attn", "q_proj"), ("mlp", "up_proj")):
            d_out, d_in = SHAPES[target]
            where = f"{PREFIX}.{layer}.{block}.{target}"
            tensors[f"{where}.lora_A.weight"] = torch.randn(RANK, d_in)
            tensors[f"{where}.lora_B.weight"] = torch.randn(d_out, RANK)
    path = tmp_path / "adapter"
    path.mkdir()
    save_file(tensors, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "target_modules": TARGETED}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(folder: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "adapter_model.safetensors")


def key(layer: int, which: str) -> str:
    return f"{PREFIX}.{layer}.self_attn.q_proj.lora_{which}.weight"


def test_the_scale_is_folded_into_b(folder: Path, model: ModelShape) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    pair = load_adapter("x", folder, model).pairs[1, "q_proj"]
    torch.testing.assert_close(pair.a, tensors[key(1, "A")])
    torch.testing.assert_close(pair.b, tensors[key(1, "B")] * (8 / RANK))


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


@pytest.mark.parametrize(
    "prefix",
    [
        "base_model.model.model.language_model.layers",
        "base_model.model.language_model.model.layers",
        "base_model.model.model.layers",
        "base_model.model.layers",
        "model.layers",
    ],
)
def test_key_layouts_of_all_transformers_versions_are_read(
    folder: Path, model: ModelShape, prefix: str
) -> None:
    expected = load_adapter("x", folder, model)

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.replace(PREFIX, prefix)] = tensors.pop(name)

    edit_tensors(folder, rename)
    assert load_adapter("y", folder, model).info.digest == expected.info.digest


def test_the_digest_depends_on_the_content_and_not_on_the_name(
    folder: Path, model: ModelShape
) -> None:
    digest = load_adapter("x", folder, model).info.digest
    edit_config(folder, lora_dropout=0.5, base_model_name_or_path="elsewhere")
    assert load_adapter("y", folder, model).info.digest == digest
    edit_config(folder, lora_alpha=9)
    assert load_adapter("x", folder, model).info.digest != digest


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
        ({"alpha_pattern": {f"{'a' * 16000}({i})": 8 for i in range(9)}}, "65536 all together"),
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
        (add("model.layers.0.self_attn.q_proj.lora_A.weight", RANK, 12), "it also names"),
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


def test_a_copy_of_the_base_lm_head_is_accepted(folder: Path, model: ModelShape) -> None:
    """PEFT saves such a copy with an adapter of the lm_head."""
    edit_tensors(
        folder, lambda t: t.update({"base_model.model.lm_head.base_layer.weight": model.lm_head()})
    )
    load_adapter("x", folder, model)


@pytest.mark.parametrize("change", [0.0, 1.0, math.nan])
def test_a_copy_of_the_lm_head_is_compared_without_memory_for_it(
    folder: Path, model: ModelShape, change: float
) -> None:
    head = torch.zeros(1 << 18, HIDDEN * 8, dtype=torch.bfloat16)
    model = replace(model, vocabulary=head.shape[0], hidden=head.shape[1], lm_head=lambda: head)
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


def test_a_head_counts_toward_the_size_of_an_adapter(folder: Path, model: ModelShape) -> None:
    lora = AdapterFiles("x", folder, model).description.host_bytes
    labels = [f"label {i}" for i in range(100)]
    declared = {"head": {"labels": labels, "tasks": ["classify"]}}
    (folder / "vlora.json").write_text(json.dumps(declared))
    tensors = {"weight": torch.zeros(100, HIDDEN), "bias": torch.zeros(100)}
    save_file(tensors, folder / "head.safetensors")
    size = lora + 4 * 100 * (HIDDEN + 1)
    assert AdapterFiles("x", folder, model, size).description.host_bytes == size
    with pytest.raises(InvalidArgument, match=rf"head\.safetensors declares .* {size} bytes"):
        AdapterFiles("x", folder, model, size - 1)


def test_pickled_weights_are_never_read(folder: Path, model: ModelShape) -> None:
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(InvalidArgument, match=r"\.bin is a pickle.*vlora adapters convert"):
        load_adapter("x", folder, model)


def test_weights_trained_beside_the_lora_are_not_ignored(folder: Path, model: ModelShape) -> None:
    (folder / "non_lora_trainables.bin").write_bytes(b"")
    with pytest.raises(InvalidArgument, match=r"non_lora_trainables\.bin holds .* connector"):
        load_adapter("x", folder, model)


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


def test_an_activated_adapter_has_no_task_head(folder: Path, model: ModelShape) -> None:
    with_head(folder, ["a", "b"], ["classify"], weight=torch.ones(2, HIDDEN), bias=torch.ones(2))
    edit_config(folder, alora_invocation_tokens=[1])
    with pytest.raises(InvalidArgument, match="cannot be used with a vision task head"):
        load_adapter("x", folder, model)


@pytest.mark.parametrize("content", [b"", b"not a tensor file", b"\xff" * 64])
def test_a_broken_weights_file_is_rejected(folder: Path, model: ModelShape, content: bytes) -> None:
    (folder / "adapter_model.safetensors").write_bytes(content)
    with pytest.raises(InvalidArgument, match="cannot be read"):
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
    assert torch.equal(adapter.head.linear.weight, weight)
    assert torch.equal(adapter.head.linear.bias, bias)


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


def test_an_unknown_key_of_vlora_json_is_rejected_with_the_nearest_known_one(
    folder: Path, model: ModelShape
) -> None:
    for key, hint in (("task", "; did you mean 'tasks'? "), ("zzz", ". ")):
        (folder / "vlora.json").write_text(json.dumps({key: ["vqa"]}))
        with pytest.raises(InvalidArgument, match="unknown key") as caught:
            load_adapter("x", folder, model)
        assert str(caught.value).endswith(f"'{key}'{hint}Known: tasks, accuracy, head, skills")


def test_a_broken_adapter_does_not_affect_others(
    folder: Path, model: ModelShape, tmp_path: Path
) -> None:
    shutil.copytree(folder, tmp_path / "root" / "good")
    shutil.copytree(folder, tmp_path / "root" / "bad")
    edit_config(tmp_path / "root" / "bad", use_dora=True)
    store = AdapterStore(model)
    store.load(find_folders(tmp_path / "root", {}))
    assert store.names() == ("good",)
    q_pairs, k_pairs = store.group([(0, "q_proj"), (0, "k_proj")]).pairs
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
