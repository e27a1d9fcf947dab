"""Tests of weight keys: every layout names the same matrix, and all other keys are rejected."""

from __future__ import annotations

import random
import time

import pytest
import torch

from vlora.adapters.model_shape import HEADS, LAYOUTS, LM_HEAD, ModelShape
from vlora.adapters.peft import TensorKey, UnknownKey, parse_key
from vlora.ids import VISION

MODEL = ModelShape(
    layers=12,
    hidden=4,
    vocabulary=5,
    shapes={"q_proj": (4, 4), "up_proj": (8, 4)},
    prefix="model.language_model.",
    lm_head=lambda: torch.zeros(5, 4),
    other_modules=tuple,
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
    for key in ("a" * 4_000_000, "layers." * 500_000, "model.layers.0.mlp." + ".lora_A" * 500_000):
        with pytest.raises(UnknownKey):
            parse_key(key, MODEL)
    assert time.process_time() - started < 10
