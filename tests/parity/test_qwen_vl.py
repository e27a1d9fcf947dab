"""Tests of Qwen-VL of the first generation, whose oracle is a slow reference, on random weights.

Its answers are compared in test_families.py and test_vision_adapters.py, with those of the others.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from tests.support.families import FirstQwenVL
from tests.support.qwen_vl import (
    RANKS,
    make_adapter,
    slow_tokens,
)
from vlora.adapters.files import load_adapter
from vlora.errors import InvalidArgument
from vlora.kernels.formats import Format
from vlora.kernels.quantized import QuantizedWeight, dequantize
from vlora.model.decoder_config import load_config
from vlora.model.loader import adapter_shape, load_weights
from vlora.model.tokenizer import load_tokenizer
from vlora.offline.base_weights import BaseWeights
from vlora.vision.chat_template import ChatTemplate
from vlora.vision.images import DecodedImage
from vlora.vision.prompts import render


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> FirstQwenVL:
    return FirstQwenVL(tmp_path_factory.mktemp("qwen-vl"))


@pytest.fixture(scope="module")
def model(family: FirstQwenVL) -> Path:
    return family.checkpoint


def test_features_equal_those_of_the_reference(family: FirstQwenVL) -> None:
    rng = np.random.default_rng(0)
    images = [DecodedImage(rng.integers(0, 256, (*s, 3), np.uint8)) for s in ((20, 90), (56, 56))]
    for found, image in zip(family.encoder.encode(images), images, strict=True):
        expected = family.reference.features(image.rgb)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        ("transformer.h.2.attn.c_attn", "its layers are 0 to 1"),
        ("model.layers.0.self_attn.q_proj", "which is not a known layout"),
    ],
)
def test_adapters_of_other_modules_are_refused(
    model: Path, tmp_path: Path, module: str, reason: str
) -> None:
    make_adapter(tmp_path / "bad", 0, ["attn.c_attn"])
    file = tmp_path / "bad" / "adapter_model.safetensors"
    renamed = {
        key.replace("transformer.h.0.attn.c_attn", module): value
        for key, value in load_file(file).items()
    }
    save_file(renamed, file)
    shape = adapter_shape(model, load_config(model))
    with pytest.raises(InvalidArgument, match=reason):
        load_adapter("bad", tmp_path / "bad", shape)


@pytest.mark.parametrize(
    "text", ["what is the answer?", "Größe: 12  34\n\n naïve i'll", "日本\n a"]
)
def test_tokens_are_those_of_the_published_list(model: Path, text: str) -> None:
    tokenizer = load_tokenizer(model)
    found = tokenizer(f"<|im_start|>{text}<|im_end|>")["input_ids"]
    assert found == [RANKS + 1, *slow_tokens(text), RANKS + 2]
    assert tokenizer.decode(found, skip_special_tokens=True) == text


def test_a_chat_ends_with_its_turn_and_the_context_with_the_trained_length(model: Path) -> None:
    config = load_config(model)
    assert set(config.eos_tokens) == {RANKS, RANKS + 2}
    assert config.context == 512
    assert config.image_token == RANKS + 216
    template = ChatTemplate.from_checkpoint(model)
    assert render("vqa", "x", 1, 0, template) == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
        "<img><imgpad></img>, x Answer:<|im_end|>\n<|im_start|>assistant\n"
    )


def test_quantized_checkpoints_are_refused(model: Path, tmp_path: Path) -> None:
    stored = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}
    config = json.loads((model / "config.json").read_text())
    config |= {"quantization_config": stored}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidArgument, match="quantized checkpoints of model type 'qwen'"):
        load_config(tmp_path)


def test_projections_that_are_stored_together_are_quantized_separately(model: Path) -> None:
    slab = load_weights(model, load_config(model), quantization=Format(8, None)).slab
    stored = load_file(model / "model.safetensors")["transformer.h.1.attn.c_attn.weight"]
    for target, rows in zip(("q_proj", "k_proj", "v_proj"), stored.chunk(3), strict=True):
        found = slab.target(1, target)
        assert isinstance(found, QuantizedWeight)
        error = (dequantize(found) - rows).abs().max()
        assert error <= rows.abs().max() / 127


def test_conversion_of_fused_weights_is_refused(model: Path) -> None:
    with pytest.raises(InvalidArgument, match="several matrices of a layer in one tensor"):
        BaseWeights(model, load_config(model))


def test_a_broken_token_list_is_refused(model: Path, tmp_path: Path) -> None:
    (tmp_path / "qwen.tiktoken").write_text("??? 1\n")
    with pytest.raises(InvalidArgument, match=r"qwen\.tiktoken cannot be read"):
        load_tokenizer(tmp_path)
