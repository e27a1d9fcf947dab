"""Model types of the checkpoints with images.

This module imports nothing, so that the command line need not load torch.
"""

from __future__ import annotations

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

# Model types whose boxes are in pixels of the resized picture, with the default edge of a patch.
# The boxes of all others are on a grid.
PIXEL_BOXES = {"qwen2_5_vl": 14}


def takes_images(model_type: object) -> bool:
    """Return whether a checkpoint of this `model_type` has a vision tower, or takes text only."""
    return model_type in MULTIMODAL
