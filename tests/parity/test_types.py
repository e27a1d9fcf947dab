"""Tests that logits with bfloat16 storage are as near to fp32 as those of transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import llava
from tests.support.logits import SMALL, TYPES, engine_logits, stock_logits
from vlora.model.decoder_config import dtype_of, load_config
from vlora.model.loader import load_weights
from vlora.vision.images import DecodedImage

DEMO = Path(__file__).parents[2] / "tools" / "demo" / "checkpoint"
PROMPTS = 12


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> llava.Checkpoint:
    return llava.make(SMALL, tmp_path_factory.mktemp("small"))


@pytest.fixture(params=["demo", "random"])
def subject(request: pytest.FixtureRequest, small: llava.Checkpoint) -> tuple[Path, int]:
    """Return a checkpoint and the edge length of its images."""
    return (DEMO, 64) if request.param == "demo" else (small.folder, SMALL.image)


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
