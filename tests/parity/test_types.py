"""Storage in bfloat16: logits are as near to fp32 as those of transformers in bfloat16."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoTokenizer, LlavaForConditionalGeneration

from benchmarks import llava
from tests.support.modes import drive
from vlora.config import Options
from vlora.engine.engine import Engine
from vlora.model.decoder_config import dtype_of, load_config
from vlora.model.loader import load_weights
from vlora.model.runner import Runner, StepResult
from vlora.request import ImageFeatures, Request
from vlora.sampling import SamplingParams
from vlora.vision.encoder import VisionEncoder
from vlora.vision.images import DecodedImage

DEMO = Path(__file__).parents[2] / "tools" / "demo" / "checkpoint"
SMALL = llava.Sizes(
    layers=4,
    hidden=256,
    heads=4,
    kv_heads=2,
    inner=704,
    vocabulary=2048,
    tower_layers=2,
    tower_hidden=64,
    tower_heads=2,
    tower_inner=128,
    image=56,
    adapters=3,
    ranks=(8, 64, 16),
)
PROMPTS = 12
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> llava.Checkpoint:
    return llava.make(SMALL, tmp_path_factory.mktemp("small"))


@pytest.fixture(params=["demo", "random"])
def subject(request: pytest.FixtureRequest, small: llava.Checkpoint) -> tuple[Path, int]:
    """Return a checkpoint and the edge length of its images."""
    return (DEMO, 64) if request.param == "demo" else (small.folder, SMALL.image)


def engine_logits(
    folder: Path,
    dtype: str,
    prompts: Sequence[str],
    images: Sequence[Any],
    adapters: Path | None = None,
    names: Sequence[str | None] = (None,) * PROMPTS,
    live: str | None = None,
) -> torch.Tensor:
    """Return the engine's logits after each prompt with its image, [prompts, V].

    names: adapter of each prompt. live: adapter merged into the weights.
    """
    encoder = VisionEncoder(folder, 1, TYPES[dtype])
    engine = Engine(Options(model=folder, adapters=adapters, dtype=dtype))
    slot = engine.adapters.slot(live)
    drive(engine, lambda _: slot)
    rows: list[torch.Tensor] = []
    forward = Runner.forward

    def recorded(self: Runner, *args: Any) -> StepResult:
        result = forward(self, *args)
        rows.append(result.logits.clone())
        return result

    with patch.object(Runner, "forward", recorded):
        for index, (text, image, name) in enumerate(zip(prompts, images, names, strict=True)):
            (features,) = encoder.encode([image])
            layout = np.array([[0, len(features), 1, *encoder.grid, 0]], dtype=np.int32)
            params = SamplingParams(temperature=0.0, max_tokens=1)
            encoded = ImageFeatures(features, layout)
            request = Request(f"types-{index}", text, params, adapter=name, images=encoded)
            engine.add(engine.prepare(request), 0.0)
            while not engine.idle:
                engine.step()
    return torch.cat(rows)


@torch.inference_mode()
def stock_logits(
    folder: Path,
    dtype: str,
    prompts: Sequence[str],
    images: Sequence[Any],
    adapter: Path | None = None,
    *,
    merged: bool = False,
) -> torch.Tensor:
    """Return the same logits from transformers and PEFT, computed in `dtype`.

    merged: whether the adapter is merged by merge_and_unload.
    """
    model = LlavaForConditionalGeneration.from_pretrained(folder, dtype=TYPES[dtype]).eval()
    if adapter is not None:
        peft = PeftModel.from_pretrained(model, adapter, autocast_adapter_dtype=False)
        peft = peft.to(TYPES[dtype]).eval()
        model = peft.merge_and_unload() if merged else peft.get_base_model()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    encoder = VisionEncoder(folder, 1)
    rows = []
    for text, image in zip(prompts, images, strict=True):
        ids: list[int] = []
        for token in tokenizer(text)["input_ids"]:
            is_image = token == model.config.image_token_id
            ids.extend([token] * (model.config.image_seq_length if is_image else 1))
        pixels = encoder.preprocess(image).to(TYPES[dtype])
        logits = model(input_ids=torch.tensor([ids]), pixel_values=pixels).logits
        rows.append(logits[0, -1:].float())
    return torch.cat(rows)


def test_logits_in_bfloat16_are_as_near_to_fp32_as_those_of_transformers(
    subject: tuple[Path, int],
) -> None:
    folder, side = subject
    rng = np.random.default_rng(5)
    prompts = [f"<image> {llava.prompt(8 + index, index, SMALL)}" for index in range(PROMPTS)]
    images = [DecodedImage(rng.integers(0, 256, (side, side, 3), dtype=np.uint8)) for _ in prompts]
    exact = stock_logits(folder, "float32", prompts, images)
    assert torch.allclose(engine_logits(folder, "float32", prompts, images), exact, atol=2e-4)
    theirs = (stock_logits(folder, "bfloat16", prompts, images) - exact).square().mean().sqrt()
    error = (engine_logits(folder, "bfloat16", prompts, images) - exact).square().mean().sqrt()
    assert 0 < error <= 1.5 * theirs, f"{error:.4g} against {theirs:.4g}"


def test_with_adapters_logits_in_bfloat16_are_as_near_to_fp32_as_those_of_peft(
    small: llava.Checkpoint,
) -> None:
    rng = np.random.default_rng(6)
    side, names = SMALL.image, small.adapter_names
    prompts = [f"<image> {llava.prompt(8 + index, index, SMALL)}" for index in range(PROMPTS)]
    images = [DecodedImage(rng.integers(0, 256, (side, side, 3), dtype=np.uint8)) for _ in prompts]
    prompt_adapters = [names[index % len(names)] for index in range(PROMPTS)]

    def peft_logits(dtype: str) -> torch.Tensor:
        logits = torch.empty(PROMPTS, SMALL.vocabulary)
        for number, name in enumerate(names):
            own = slice(number, None, len(names))
            logits[own] = stock_logits(
                small.folder, dtype, prompts[own], images[own], small.adapters / name
            )
        return logits

    exact = peft_logits("float32")
    logits = engine_logits(
        small.folder, "float32", prompts, images, small.adapters, prompt_adapters
    )
    assert torch.allclose(logits, exact, atol=5e-4)
    allowed = 1.5 * (peft_logits("bfloat16") - exact).square().mean().sqrt()
    logits = engine_logits(
        small.folder, "bfloat16", prompts, images, small.adapters, prompt_adapters
    )
    error = (logits - exact).square().mean().sqrt()
    assert 0 < error <= allowed, f"{error:.4g} against {allowed:.4g}"


@pytest.mark.parametrize("rows", ["merged", "mixture"])
def test_merged_logits_in_bfloat16_are_as_near_to_fp32_as_those_of_merge_and_unload(
    small: llava.Checkpoint, rows: str
) -> None:
    """Compare rows of the live adapter, and rows of others from which it is subtracted."""
    rng = np.random.default_rng(7)
    side, (live, other, *_) = SMALL.image, small.adapter_names
    adapter = live if rows == "merged" else other
    folder = small.adapters / adapter
    prompts = [f"<image> {llava.prompt(8 + index, index, SMALL)}" for index in range(PROMPTS)]
    images = [DecodedImage(rng.integers(0, 256, (side, side, 3), dtype=np.uint8)) for _ in prompts]
    exact = stock_logits(small.folder, "float32", prompts, images, folder)
    theirs = stock_logits(small.folder, "bfloat16", prompts, images, folder, merged=True)
    names = [adapter] * PROMPTS
    logits = engine_logits(small.folder, "bfloat16", prompts, images, small.adapters, names, live)
    error = (logits - exact).square().mean().sqrt()
    allowed = 1.5 * (theirs - exact).square().mean().sqrt()
    assert 0 < error <= allowed, f"{error:.4g} against {allowed:.4g}"


def test_dtype_auto_is_bfloat16_only_for_a_checkpoint_stored_in_it(
    small: llava.Checkpoint,
) -> None:
    assert dtype_of("auto", small.folder) == torch.bfloat16
    assert dtype_of("auto", DEMO) == torch.float32
    assert dtype_of("bfloat16", DEMO) == torch.bfloat16


def test_bfloat16_halves_the_matrices_and_not_the_norms(small: llava.Checkpoint) -> None:
    config = load_config(small.folder)
    full, half = (load_weights(small.folder, config, dtype) for dtype in TYPES.values())
    assert half.slab.base.nbytes * 2 == full.slab.base.nbytes
    assert half.lm_head.dtype == half.embedding.dtype == torch.bfloat16
    assert half.final_norm.dtype == torch.float32
    assert torch.equal(half.slab.base.float(), full.slab.base), "the file is in bfloat16"
    assert half.slab.digest() != full.slab.digest()
