"""Model types of the checkpoints that are served.

This module imports little, so that the command line need not load torch.
"""

from __future__ import annotations

from typing import NamedTuple

from vlora.errors import shown


class Multimodal(NamedTuple):
    """A family with images.

    module: module of `vlora.vision.families` that has the vision family.
    like: text-only model type whose layers the decoder has, if the decoder has a model type of its
        own: that of the checkpoint with `_text`. "" if it has none.
    axes: how that decoder assigns axes to rotary frequencies, a key of `AXES` in
        `vlora.model.families.registry`; "" for positions with one axis.
    """

    module: str
    like: str = ""
    axes: str = ""


# Families by model type.
MULTIMODAL = {
    "llava": Multimodal("llava"),
    "llava_next": Multimodal("llava"),
    "llava_onevision": Multimodal("llava"),
    "qwen": Multimodal("qwen"),
    "qwen2_vl": Multimodal("qwen_vl", "qwen2", "sections"),
    "qwen2_5_vl": Multimodal("qwen_vl", "qwen2", "sections"),
    "qwen3_vl": Multimodal("qwen_vl", "qwen3", "interleaved"),
}
# Decoders of MULTIMODAL with a model type of their own, by that type.
OWN_DECODERS = {f"{name}_text": row for name, row in MULTIMODAL.items() if row.like}

# Model types whose boxes are in pixels of the resized picture, with the default edge of a patch.
# The boxes of all others are on a grid.
PIXEL_BOXES = {"qwen2_5_vl": 14}
# Model types of decoders, of which those of text-only checkpoints come first.
TEXT_ONLY = ("llama", "mistral", "qwen2", "qwen3")
DECODERS = (*TEXT_ONLY, "qwen", *OWN_DECODERS)


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
