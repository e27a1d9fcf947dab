"""Checkpoint folders as others write them: each equals transformers, or is refused in a sentence.

The folders are tiny, and the tables here list what differs from a plain one.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.quantized_checkpoints import Layout, quantize_checkpoint
from tests.support.small_decoder import logits_gap, save_decoder

TOLERANCE = 3e-4

# Sizes of groups that do not divide both depths (64 and 320) or that the kernels split.
GROUP_SIZES = {
    "gptq-96": Layout("gptq", group=96),
    "gptq-160": Layout("gptq", group=160),
    "gptq-256": Layout("gptq", group=256),
    "gptq-256-reordered": Layout("gptq", group=256, reordered=True),
    "gptq-192-symmetric-8-bits": Layout("gptq", bits=8, group=192, symmetric=True),
    "awq-96": Layout("awq", group=96),
    "awq-128": Layout("awq", group=128),
    "packed-256": Layout("compressed-tensors", group=256),
    "packed-160-symmetric": Layout("compressed-tensors", group=160, symmetric=True),
    "int8-96": Layout("compressed-tensors", bits=8, group=96, symmetric=True),
}


@pytest.mark.parametrize("name", GROUP_SIZES)
def test_groups_of_any_size_equal_the_dequantized_model(
    name: str, checkpoint: Path, tmp_path: Path
) -> None:
    model = save_decoder(checkpoint, tmp_path, intermediate_size=320)
    model.load_state_dict(quantize_checkpoint(tmp_path, GROUP_SIZES[name]), strict=False)
    assert logits_gap(model, tmp_path) <= TOLERANCE
