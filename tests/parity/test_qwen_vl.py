"""Parity of Qwen-VL of the first generation with a slow reference, on random weights.

The tests use images of several sizes, several images in a prompt, clips, adapters with the usual
targets, merged, mixed and unmerged steps, preemption, and reuse of prefixes.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from tests.support.engine_client import run_questions
from tests.support.modes import drive
from tests.support.oracle import NEAR_TIE
from tests.support.qwen_vl import (
    CONNECTOR,
    RANKS,
    TOWER,
    Reference,
    make_adapter,
    make_qwen_vl,
    slow_tokens,
)
from vlora.adapters.catalog import FolderFinder
from vlora.adapters.files import load_adapter
from vlora.config import Options
from vlora.engine.engine import Engine
from vlora.errors import InvalidArgument
from vlora.ids import BASE
from vlora.kernels.formats import Format
from vlora.kernels.quantized import QuantizedWeight, dequantize
from vlora.model.decoder_config import load_config
from vlora.model.inputs import PromptReader
from vlora.model.loader import adapter_shape, load_weights
from vlora.model.tokenizer import load_tokenizer
from vlora.offline.base_weights import BaseWeights
from vlora.request import ImageFeatures
from vlora.vision.adapters import VisionAdapters
from vlora.vision.encoder import VisionEncoder
from vlora.vision.features import EncoderService, FeatureCache
from vlora.vision.images import DecodedImage
from vlora.vision.prompts import ChatTemplate, render

MAX_TOKENS = 16
ADAPTERS = {"fused": ("attn.c_attn", "mlp.w1"), "rest": ("attn.c_attn", "attn.c_proj", "mlp.w2")}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen-vl")
    make_qwen_vl(folder / "model")
    for seed, (name, targets) in enumerate(ADAPTERS.items()):
        make_adapter(folder / "adapters" / name, seed, targets)
    return folder


@pytest.fixture(scope="module")
def reference(root: Path) -> Reference:
    return Reference(root / "model", {name: root / "adapters" / name for name in ADAPTERS})


@pytest.fixture(scope="module")
def encoder(root: Path) -> VisionEncoder:
    return VisionEncoder(root / "model", 1)


def test_features_equal_those_of_the_reference(
    reference: Reference, encoder: VisionEncoder
) -> None:
    rng = np.random.default_rng(0)
    images = [DecodedImage(rng.integers(0, 256, (*s, 3), np.uint8)) for s in ((20, 90), (56, 56))]
    for found, image in zip(encoder.encode(images), images, strict=True):
        np.testing.assert_allclose(found, reference.features(image.rgb), rtol=1e-4, atol=1e-4)


def test_an_adapter_of_the_tower_equals_the_reference(
    root: Path, encoder: VisionEncoder, tmp_path: Path
) -> None:
    make_adapter(tmp_path / "tower", 7, [*TOWER, *CONNECTOR])
    reference = Reference(root / "model", {"tower": tmp_path / "tower"})
    shape = adapter_shape(root / "model", load_config(root / "model"))
    adapters = VisionAdapters(shape, FolderFinder(tmp_path, {}), 1 << 30, None, encoder.layers)
    assert shape.vision().keys() == encoder.layers.keys()
    image = DecodedImage(np.random.default_rng(4).integers(0, 256, (30, 70, 3), np.uint8))
    try:
        (found,) = encoder.encode([image], adapters.part("tower"))
    finally:
        adapters.close()
    np.testing.assert_allclose(found, reference.features(image.rgb, "tower"), rtol=1e-3, atol=1e-3)
    assert np.abs(found - reference.features(image.rgb).numpy()).max() > 0.1


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        ("transformer.h.2.attn.c_attn", "its layers are 0 to 1"),
        ("model.layers.0.self_attn.q_proj", "which is not a known layout"),
    ],
)
def test_adapters_of_other_modules_are_refused(
    root: Path, tmp_path: Path, module: str, reason: str
) -> None:
    make_adapter(tmp_path / "bad", 0, ["attn.c_attn"])
    file = tmp_path / "bad" / "adapter_model.safetensors"
    renamed = {
        key.replace("transformer.h.0.attn.c_attn", module): value
        for key, value in load_file(file).items()
    }
    save_file(renamed, file)
    shape = adapter_shape(root / "model", load_config(root / "model"))
    with pytest.raises(InvalidArgument, match=reason):
        load_adapter("bad", tmp_path / "bad", shape)


@pytest.mark.parametrize("mode", ["unmerged", "mixed", "preempted"])
def test_answers_equal_those_of_the_reference(
    root: Path, reference: Reference, encoder: VisionEncoder, mode: str
) -> None:
    folder = root / "model"
    rng = np.random.default_rng(3)
    template = ChatTemplate.from_checkpoint(folder)
    service = EncoderService(encoder, FeatureCache(1 << 24))
    reader = PromptReader(folder, load_config(folder))
    asked: list[tuple[str, list[DecodedImage], str | None]] = []
    for number in range(9):
        count, is_clip = 1 + number % 3, number in (2, 8)
        images = [
            DecodedImage(rng.integers(0, 256, (*size, 3), np.uint8), is_clip)
            for size in rng.integers(9, 90, (count, 2))
        ]
        if number >= 6:
            images[0] = asked[number - 6][1][0]
        stills, frames = (0, count) if is_clip else (count, 0)
        prompt = render("vqa", f"what is in {number}?", stills, frames, template)
        asked.append((prompt, images, (None, *ADAPTERS)[number % 3]))
    features = [
        ImageFeatures(encoded.features, encoded.layout)
        for encoded in service.run([images for _, images, _ in asked])
    ]
    prompts = [reader.read(prompt, own) for (prompt, *_), own in zip(asked, features, strict=True)]
    longest = max(len(prompt.ids) for prompt in prompts)
    tokens = longest + 4 * MAX_TOKENS if mode == "preempted" else 4096
    engine = Engine(
        Options(
            model=folder,
            adapters=root / "adapters",
            max_num_seqs=6,
            block_size=4,
            kv_cache_tokens=tokens,
        )
    )
    if mode != "unmerged":
        slots = (BASE, *range(len(ADAPTERS)))
        drive(engine, lambda i: s if (s := slots[i % 3]) in engine.adapters.resident else BASE)
    answers, cached = run_questions(engine, asked, features, MAX_TOKENS)
    if mode == "preempted":
        assert engine.stats().preemptions > 0
    else:
        assert min(cached["6"], cached["7"], cached["8"]) >= 16
    for number, (_, images, adapter) in enumerate(asked):
        answer = answers[str(number)]
        assert len(answer) == MAX_TOKENS
        ids = [*prompts[number].ids, *answer]
        logits = reference.logits(ids, [reference.features(i.rgb) for i in images], adapter)
        rows = logits[len(prompts[number].ids) - 1 : -1]
        gaps = [float(row.max() - row[token]) for row, token in zip(rows, answer, strict=True)]
        assert max(gaps) <= NEAR_TIE, number


@pytest.mark.parametrize(
    "text", ["what is the answer?", "Größe: 12  34\n\n naïve i'll", "日本\n a"]
)
def test_tokens_are_those_of_the_published_list(root: Path, text: str) -> None:
    tokenizer = load_tokenizer(root / "model")
    found = tokenizer(f"<|im_start|>{text}<|im_end|>")["input_ids"]
    assert found == [RANKS + 1, *slow_tokens(text), RANKS + 2]
    assert tokenizer.decode(found, skip_special_tokens=True) == text


def test_a_chat_ends_with_its_turn_and_the_context_with_the_trained_length(root: Path) -> None:
    config = load_config(root / "model")
    assert set(config.eos_tokens) == {RANKS, RANKS + 2}
    assert config.context == 512
    assert config.image_token == RANKS + 216
    template = ChatTemplate.from_checkpoint(root / "model")
    assert render("vqa", "x", 1, 0, template) == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
        "<img><imgpad></img>, x Answer:<|im_end|>\n<|im_start|>assistant\n"
    )


def test_quantized_checkpoints_are_refused(root: Path, tmp_path: Path) -> None:
    stored = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}
    config = json.loads((root / "model" / "config.json").read_text())
    config |= {"quantization_config": stored}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidArgument, match="quantized checkpoints of model type 'qwen'"):
        load_config(tmp_path)


def test_projections_that_are_stored_together_are_quantized_separately(root: Path) -> None:
    folder = root / "model"
    slab = load_weights(folder, load_config(folder), quantization=Format(8, None)).slab
    stored = load_file(folder / "model.safetensors")["transformer.h.1.attn.c_attn.weight"]
    for target, rows in zip(("q_proj", "k_proj", "v_proj"), stored.chunk(3), strict=True):
        found = slab.target(1, target)
        assert isinstance(found, QuantizedWeight)
        error = (dequantize(found) - rows).abs().max()
        assert error <= rows.abs().max() / 127


def test_conversion_of_fused_weights_is_refused(root: Path) -> None:
    with pytest.raises(InvalidArgument, match="several matrices of a layer in one tensor"):
        BaseWeights(root / "model", load_config(root / "model"))


def test_a_broken_token_list_is_refused(root: Path, tmp_path: Path) -> None:
    (tmp_path / "qwen.tiktoken").write_text("??? 1\n")
    with pytest.raises(InvalidArgument, match=r"qwen\.tiktoken cannot be read"):
        load_tokenizer(tmp_path)
