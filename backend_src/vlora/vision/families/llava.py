"""LLaVA-1.5: all images are resized to one size and have the same number of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModel, LlavaConfig
from transformers.models.llava.modeling_llava import (
    LlavaModel,
    LlavaMultiModalProjector,
    LlavaPreTrainedModel,
)

from vlora.vision.families.base import Pixels, VisionFamily
from vlora.vision.images import DecodedImage


class _LlavaVision(LlavaModel):  # type: ignore[misc]
    """The LLaVA model of transformers without its decoder."""

    _keys_to_ignore_on_load_unexpected = (r"language_model", r"lm_head")

    def __init__(self, config: LlavaConfig) -> None:
        LlavaPreTrainedModel.__init__(self, config)
        self.vision_tower = AutoModel.from_config(config.vision_config)
        self.multi_modal_projector = LlavaMultiModalProjector(config)
        self.post_init()


def patches_of_side(config: Any, processor: Any, image: DecodedImage) -> tuple[int, int]:
    """Return the (height, width) of every image or tile in patches, since all are resized to the
    tower's input size.
    """
    side = config.vision_config.image_size // config.vision_config.patch_size
    return side, side


def _features(model: Any, images: Sequence[Pixels]) -> Sequence[torch.Tensor]:
    pixels = torch.cat([image["pixel_values"].float() for image in images])
    features: Sequence[torch.Tensor] = model.get_image_features(pixels).pooler_output
    return features


LLAVA = VisionFamily(
    "llava",
    image_text="<image>",
    part=_LlavaVision,
    config_keys=(
        "vision_config",
        "vision_feature_layer",
        "vision_feature_select_strategy",
        "projector_hidden_act",
        "multimodal_projector_bias",
    ),
    grid=patches_of_side,
    features=_features,
)
