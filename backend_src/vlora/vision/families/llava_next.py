"""LLaVA-NeXT (LLaVA-1.6): an image is split into an overview and tiles. The number of tiles depends
on the image's size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import AutoModel, LlavaNextConfig
from transformers.models.llava_next.modeling_llava_next import (
    LlavaNextModel,
    LlavaNextMultiModalProjector,
    LlavaNextPreTrainedModel,
)

from vlora.vision.families.base import Pixels, VisionFamily
from vlora.vision.families.llava import LLAVA, patches_of_side


class _LlavaNextVision(LlavaNextModel):  # type: ignore[misc]
    """The LLaVA-NeXT model of transformers without its decoder."""

    _keys_to_ignore_on_load_unexpected = (r"language_model", r"lm_head")

    def __init__(self, config: LlavaNextConfig) -> None:
        LlavaNextPreTrainedModel.__init__(self, config)
        self.vision_tower = AutoModel.from_config(config.vision_config)
        self.multi_modal_projector = LlavaNextMultiModalProjector(config)
        self.image_newline = nn.Parameter(torch.empty(config.text_config.hidden_size))
        self.post_init()


def _next_features(model: Any, images: Sequence[Pixels]) -> Sequence[torch.Tensor]:
    """Return the features of each image. The tower is called once per image, with all its tiles."""
    return [
        model.get_image_features(image["pixel_values"].float(), image["image_sizes"]).pooler_output[
            0
        ]
        for image in images
    ]


LLAVA_NEXT = VisionFamily(
    "llava_next",
    image_text=LLAVA.image_text,
    part=_LlavaNextVision,
    config_keys=(*LLAVA.config_keys, "image_grid_pinpoints", "use_image_newline_parameter"),
    grid=patches_of_side,
    features=_next_features,
)
