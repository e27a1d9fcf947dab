"""Model types of the checkpoints that are served.

This module imports little, so that the command line need not load torch.
"""

from __future__ import annotations

from vlora.errors import shown

# Model type → module of `vlora.vision.families` that has its family.
MULTIMODAL = {
    "llava": "llava",
    "llava_next": "llava",
    "llava_onevision": "llava",
    "qwen": "qwen",
    "qwen2_vl": "qwen_vl",
    "qwen2_5_vl": "qwen_vl",
    "qwen3_vl": "qwen_vl",
}

# Model types of decoders, of which those of text-only checkpoints come first.
TEXT_ONLY = ("llama", "mistral", "qwen2", "qwen3")
DECODERS = (*TEXT_ONLY, "qwen", "qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text")


def refusal(model_type: object) -> str | None:
    """Return why a checkpoint of this `model_type` is not served; None if it is."""
    if isinstance(model_type, str) and model_type in (*MULTIMODAL, *DECODERS):
        return None
    return (
        f"config.json has model type {shown(model_type)}, which is not supported; supported:"
        f" {', '.join(MULTIMODAL)}, and without images {', '.join(TEXT_ONLY)}"
    )


def takes_images(model_type: object) -> bool:
    """Return whether a checkpoint of this `model_type` has a vision tower, or takes text only."""
    return model_type in MULTIMODAL
