"""Tests of tools/large_checkpoint.py with the sizes of the demo."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from transformers import LlavaConfig, LlavaForConditionalGeneration

from tools import large_checkpoint
from tools.demo.build import CHECKPOINT
from tools.large_checkpoint import CONTEXT, memory_mib, planned_mib


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint whose weights are divided into several shards."""
    folder = tmp_path_factory.mktemp("large") / "checkpoint"
    config = LlavaConfig.from_pretrained(CHECKPOINT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(large_checkpoint, "SHARD_LIMIT", "2MB")
        large_checkpoint.write_checkpoint(folder, config)
    return folder


def test_shards_have_all_weights_that_transformers_expects(folder: Path) -> None:
    assert len(list(folder.glob("*.safetensors"))) > 1
    model, info = LlavaForConditionalGeneration.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert model.dtype == torch.bfloat16
    assert all(bool(weight.any()) for weight in model.parameters() if weight.dim() > 1)


def test_the_plan_grows_with_the_cache(folder: Path) -> None:
    small, large = (
        planned_mib(folder, {"dtype": "bfloat16", "kv_cache_tokens": tokens})
        for tokens in (CONTEXT, 64 * CONTEXT)
    )
    # A token has keys and values of 64 numbers of 2 bytes in five layers.
    assert large - small == pytest.approx(63 * CONTEXT * 5 * 2 * 64 * 2 / 2**20, rel=0.2)


def test_the_peak_of_a_process_is_at_least_its_memory() -> None:
    memory = memory_mib(os.getpid())
    assert 0 < memory["resident"] <= memory["peak"]
