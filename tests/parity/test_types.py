"""bfloat16 as storage: logits are no further from fp32 than transformers' own in bfloat16."""

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
from vlora.model.decoder_config import dtype_of
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
    """A checkpoint and the side of its images."""
    return (DEMO, 64) if request.param == "demo" else (small.folder, SMALL.image)


def ours(
    folder: Path,
    dtype: str,
    prompts: Sequence[str],
    images: Sequence[Any],
    adapters: Path | None = None,
    names: Sequence[str | None] = (None,) * PROMPTS,
    live: str | None = None,
) -> torch.Tensor:
    """[prompts, V] logits after each prompt with its image, by our tower and our engine. live: the
    adapter in the weights."""
    encoder = VisionEncoder(folder, 1, TYPES[dtype])
    engine = Engine(Options(model=folder, adapters=adapters, dtype=dtype))
    slot = engine.adapters.slot(live)
    drive(engine, lambda _: slot)
    found: list[torch.Tensor] = []
    forward = Runner.forward

    def kept(self: Runner, *args: Any) -> StepResult:
        result = forward(self, *args)
        found.append(result.logits.clone())
        return result

    with patch.object(Runner, "forward", kept):
        for index, (text, image, name) in enumerate(zip(prompts, images, names, strict=True)):
            (features,) = encoder.encode([image])
            layout = np.array([[0, len(features), 1, *encoder.grid, 0]], dtype=np.int32)
            params = SamplingParams(temperature=0.0, max_tokens=1)
            given = ImageFeatures(features, layout)
            request = Request(f"types-{index}", text, params, adapter=name, images=given)
            engine.add(engine.prepare(request), 0.0)
            while not engine.idle:
                engine.step()
    return torch.cat(found)


@torch.inference_mode()
def stock(
    folder: Path,
    dtype: str,
    prompts: Sequence[str],
    images: Sequence[Any],
    adapter: Path | None = None,
    *,
    merged: bool = False,
) -> torch.Tensor:
    """The same by transformers and PEFT, everything in one type. merged: by merge_and_unload."""
    model = LlavaForConditionalGeneration.from_pretrained(folder, dtype=TYPES[dtype]).eval()
    if adapter is not None:
        peft = PeftModel.from_pretrained(model, adapter, autocast_adapter_dtype=False)
        peft = peft.to(TYPES[dtype]).eval()
        model = peft.merge_and_unload() if merged else peft.get_base_model()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    encoder = VisionEncoder(folder, 1)
    found = []
    for text, image in zip(prompts, images, strict=True):
        ids: list[int] = []
        for token in tokenizer(text)["input_ids"]:
            many = model.config.image_seq_length if token == model.config.image_token_id else 1
            ids.extend([token] * many)
        pixels = encoder.preprocess(image).to(TYPES[dtype])
        logits = model(input_ids=torch.tensor([ids]), pixel_values=pixels).logits
        found.append(logits[0, -1:].float())
    return torch.cat(found)


def test_logits_in_bfloat16_are_as_near_to_fp32_as_those_of_transformers(
    subject: tuple[Path, int],
) -> None:
    folder, side = subject
    rng = np.random.default_rng(5)
    prompts = [f"<image> {llava.prompt(8 + index, index, SMALL)}" for index in range(PROMPTS)]
    images = [DecodedImage(rng.integers(0, 256, (side, side, 3), dtype=np.uint8)) for _ in prompts]
    exact = stock(folder, "float32", prompts, images)
    assert torch.allclose(ours(folder, "float32", prompts, images), exact, atol=2e-4)
    theirs = (stock(folder, "bfloat16", prompts, images) - exact).square().mean().sqrt()
    error = (ours(folder, "bfloat16", prompts, images) - exact).square().mean().sqrt()
    assert 0 < error <= 1.5 * theirs, f"{error:.4g} against {theirs:.4g}"


def test_with_adapters_logits_in_bfloat16_are_as_near_to_fp32_as_those_of_peft(
    small: llava.Checkpoint,
) -> None:
    rng = np.random.default_rng(6)
    side, names = SMALL.image, small.adapter_names
    prompts = [f"<image> {llava.prompt(8 + index, index, SMALL)}" for index in range(PROMPTS)]
    images = [DecodedImage(rng.integers(0, 256, (side, side, 3), dtype=np.uint8)) for _ in prompts]
    asked = [names[index % len(names)] for index in range(PROMPTS)]

    def theirs(dtype: str) -> torch.Tensor:
        found = torch.empty(PROMPTS, SMALL.vocabulary)
        for number, name in enumerate(names):
            chosen = slice(number, None, len(names))
            found[chosen] = stock(
                small.folder, dtype, prompts[chosen], images[chosen], small.adapters / name
            )
        return found

    exact = theirs("float32")
    found = ours(small.folder, "float32", prompts, images, small.adapters, asked)
    assert torch.allclose(found, exact, atol=5e-4)
    allowed = 1.5 * (theirs("bfloat16") - exact).square().mean().sqrt()
    found = ours(small.folder, "bfloat16", prompts, images, small.adapters, asked)
    error = (found - exact).square().mean().sqrt()
    assert 0 < error <= allowed, f"{error:.4g} against {allowed:.4g}"


@pytest.mark.parametrize("rows", ["merged", "mixture"])
def test_merged_logits_in_bfloat16_are_as_near_to_fp32_as_those_of_merge_and_unload(
    small: llava.Checkpoint, rows: str
) -> None:
    """Of the live adapter's own rows, and of others' from which it is taken out again."""
    rng = np.random.default_rng(7)
    side, (live, other, *_) = SMALL.image, small.adapter_names
    asked = live if rows == "merged" else other
    folder = small.adapters / asked
    prompts = [f"<image> {llava.prompt(8 + index, index, SMALL)}" for index in range(PROMPTS)]
    images = [DecodedImage(rng.integers(0, 256, (side, side, 3), dtype=np.uint8)) for _ in prompts]
    exact = stock(small.folder, "float32", prompts, images, folder)
    theirs = stock(small.folder, "bfloat16", prompts, images, folder, merged=True)
    names = [asked] * PROMPTS
    given = (small.folder, "bfloat16", prompts, images, small.adapters, names, live)
    error = (ours(*given) - exact).square().mean().sqrt()
    allowed = 1.5 * (theirs - exact).square().mean().sqrt()
    assert 0 < error <= allowed, f"{error:.4g} against {allowed:.4g}"


def test_the_checkpoints_own_type_is_bfloat16_only_where_it_is_stored_so(
    small: llava.Checkpoint,
) -> None:
    assert dtype_of("auto", small.folder) == torch.bfloat16
    assert dtype_of("auto", DEMO) == torch.float32
    assert dtype_of("bfloat16", DEMO) == torch.bfloat16


def test_bfloat16_halves_the_matrices_and_leaves_the_norms(small: llava.Checkpoint) -> None:
    from vlora.model.decoder_config import load_config
    from vlora.model.loader import load_weights

    config = load_config(small.folder)
    whole, half = (load_weights(small.folder, config, dtype) for dtype in TYPES.values())
    assert half.slab.base.nbytes * 2 == whole.slab.base.nbytes
    assert half.lm_head.dtype == half.embedding.dtype == torch.bfloat16
    assert half.final_norm.dtype == torch.float32
    assert torch.equal(half.slab.base.float(), whole.slab.base), "it is stored in bfloat16"
    assert half.slab.digest() != whole.slab.digest()
