"""Model types of the checkpoints with images.

This module imports nothing, so that the command line need not load torch.
"""

from __future__ import annotations

# Model types of the checkpoints with images, the keys of `VISION_FAMILIES`.
MULTIMODAL = (
    "llava",
    "llava_next",
    "llava_onevision",
    "qwen",
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
)


def takes_images(model_type: object) -> bool:
    """Return whether a checkpoint of this `model_type` has a vision tower, or takes text only."""
    return model_type in MULTIMODAL
