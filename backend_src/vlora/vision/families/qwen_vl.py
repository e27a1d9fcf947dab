"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: images keep their proportions, so their numbers of tokens
differ.

Four neighboring patches make one token. The processor cannot scale images whose longer edge exceeds
200 times the shorter edge. Requests with such images are refused (`max_aspect_ratio`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VisionTransformerPretrainedModel,
    Qwen2_5_VLModel,
    Qwen2_5_VLPreTrainedModel,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize
from transformers.models.qwen2_vl.modeling_qwen2_vl import (
    Qwen2VisionTransformerPretrainedModel,
    Qwen2VLModel,
    Qwen2VLPreTrainedModel,
)
from transformers.models.qwen3_vl.modeling_qwen3_vl import (
    Qwen3VLModel,
    Qwen3VLPreTrainedModel,
    Qwen3VLVisionModel,
)

from vlora.vision.families.base import Pixels, VisionFamily
from vlora.vision.families.qwen_clips import (
    clip_settings,
    frame_size_of_qwen2,
    frame_size_of_qwen3,
    preprocess,
    timed_text,
    with_pairs,
)
from vlora.vision.images import DecodedImage

_IMAGE_TEXT = "<|vision_start|><|image_pad|><|vision_end|>"
_DECODER_KEYS = (r"language_model", r"lm_head", r"^model\.(layers|norm|embed_tokens)")


class _Qwen2Vision(Qwen2VLModel):  # type: ignore[misc]
    """The Qwen2-VL model of transformers without its decoder."""

    _keys_to_ignore_on_load_unexpected = _DECODER_KEYS

    def __init__(self, config: Any) -> None:
        Qwen2VLPreTrainedModel.__init__(self, config)
        self.visual = Qwen2VisionTransformerPretrainedModel._from_config(config.vision_config)
        self.post_init()


class _Qwen25Vision(Qwen2_5_VLModel):  # type: ignore[misc]
    """The Qwen2.5-VL model of transformers without its decoder."""

    _keys_to_ignore_on_load_unexpected = _DECODER_KEYS

    def __init__(self, config: Any) -> None:
        Qwen2_5_VLPreTrainedModel.__init__(self, config)
        self.visual = Qwen2_5_VisionTransformerPretrainedModel._from_config(config.vision_config)
        self.post_init()


class _Qwen3Vision(Qwen3VLModel):  # type: ignore[misc]
    """The Qwen3-VL model of transformers without its decoder."""

    _keys_to_ignore_on_load_unexpected = _DECODER_KEYS

    def __init__(self, config: Any) -> None:
        Qwen3VLPreTrainedModel.__init__(self, config)
        self.visual = Qwen3VLVisionModel._from_config(config.vision_config)
        self.post_init()


def _grid(config: Any, processor: Any, image: DecodedImage) -> tuple[int, int]:
    patch: int = processor.patch_size
    height, width = image.scaled or smart_resize(
        image.height,
        image.width,
        factor=patch * processor.merge_size,
        min_pixels=processor.size["shortest_edge"],
        max_pixels=processor.size["longest_edge"],
    )
    return height // patch, width // patch


def _encode(model: Any, images: Sequence[Pixels]) -> Any:
    return model.get_image_features(
        torch.cat([image["pixel_values"].float() for image in images]),
        torch.cat([image["image_grid_thw"] for image in images]),
    )


def _features(model: Any, images: Sequence[Pixels]) -> Sequence[torch.Tensor]:
    features: Sequence[torch.Tensor] = _encode(model, images).pooler_output
    return features


def _features_by_level(model: Any, images: Sequence[Pixels]) -> Sequence[torch.Tensor]:
    """Return the features of each image.

    The columns for the input embeddings come first. They are followed by the columns for the output
    of the decoder's first layer, then those for the second layer, and so on.
    """
    output = _encode(model, images)
    parts = zip(output.pooler_output, *output.deepstack_features, strict=True)
    return [torch.cat(part, dim=1) for part in parts]


QWEN2_VL = VisionFamily(
    "qwen2_vl",
    _IMAGE_TEXT,
    _Qwen2Vision,
    ("vision_config",),
    _grid,
    _features,
    with_views=partial(with_pairs, frame_size_of_qwen2, True),
    preprocess=preprocess,
    clip_settings=clip_settings,
    clip_text=lambda frames: _IMAGE_TEXT,
)
QWEN2_5_VL = replace(QWEN2_VL, model_type="qwen2_5_vl", part=_Qwen25Vision)
QWEN3_VL = replace(
    QWEN2_VL,
    model_type="qwen3_vl",
    part=_Qwen3Vision,
    features=_features_by_level,
    with_views=partial(with_pairs, frame_size_of_qwen3, False),
    clip_text=partial(timed_text, _IMAGE_TEXT),
)
