"""Tests that logits with bfloat16 storage are as near to fp32 as those of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import llava
from tests.support.logits import SMALL, TYPES, engine_logits, questions, stock_logits
from vlora.model.decoder_config import dtype_of, load_config
from vlora.model.loader import load_weights

DEMO = Path(__file__).parents[2] / "tools" / "demo" / "checkpoint"
PROMPTS = 12


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> llava.Checkpoint:
    return llava.make(SMALL, tmp_path_factory.mktemp("small"))


@pytest.fixture(params=["demo", "random"])
def subject(request: pytest.FixtureRequest, small: llava.Checkpoint) -> tuple[Path, int]:
    """Return a checkpoint and the edge length of its images."""
    return (DEMO, 64) if request.param == "demo" else (small.folder, SMALL.image)


def check_rounding(served: torch.Tensor, theirs: torch.Tensor, exact: torch.Tensor) -> None:
    """Check that the error of `served` is at most 1.5 times that of `theirs`."""
    error, allowed = ((logits - exact).square().mean().sqrt() for logits in (served, theirs))
    assert 0 < error <= 1.5 * allowed, f"{error:.4g} against {allowed:.4g}"


def test_logits_in_bfloat16_are_as_near_to_fp32_as_those_of_transformers(
    subject: tuple[Path, int],
) -> None:
    folder, side = subject
    asked = questions(PROMPTS, 5, side)
    exact = stock_logits(folder, "float32", *asked)
    assert torch.allclose(engine_logits(folder, "float32", *asked), exact, atol=2e-4)
    theirs = stock_logits(folder, "bfloat16", *asked)
    check_rounding(engine_logits(folder, "bfloat16", *asked), theirs, exact)


def test_with_adapters_logits_in_bfloat16_are_as_near_to_fp32_as_those_of_peft(
    small: llava.Checkpoint,
) -> None:
    names = small.adapter_names
    prompts, images = questions(PROMPTS, 6)
    prompt_adapters = [names[index % len(names)] for index in range(PROMPTS)]
    adapters = small.adapters, prompt_adapters

    def peft_logits(dtype: str) -> torch.Tensor:
        logits = torch.empty(PROMPTS, SMALL.vocabulary)
        for number, name in enumerate(names):
            own = slice(number, None, len(names))
            logits[own] = stock_logits(
                small.folder, dtype, prompts[own], images[own], small.adapters / name
            )
        return logits

    exact = peft_logits("float32")
    logits = engine_logits(small.folder, "float32", prompts, images, *adapters)
    assert torch.allclose(logits, exact, atol=5e-4)
    logits = engine_logits(small.folder, "bfloat16", prompts, images, *adapters)
    check_rounding(logits, peft_logits("bfloat16"), exact)


@pytest.mark.parametrize("rows", ["merged", "mixture"])
def test_merged_logits_in_bfloat16_are_as_near_to_fp32_as_those_of_merge_and_unload(
    small: llava.Checkpoint, rows: str
) -> None:
    """Compare rows of the live adapter, and rows of others from which it is subtracted."""
    live, other, *_ = small.adapter_names
    adapter = live if rows == "merged" else other
    folder, asked = small.adapters / adapter, questions(PROMPTS, 7)
    exact = stock_logits(small.folder, "float32", *asked, folder)
    theirs = stock_logits(small.folder, "bfloat16", *asked, folder, merged=True)
    names = [adapter] * PROMPTS
    logits = engine_logits(small.folder, "bfloat16", *asked, small.adapters, names, live)
    check_rounding(logits, theirs, exact)


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
