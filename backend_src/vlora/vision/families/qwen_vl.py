"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: an image keeps its proportions, so its number of tokens
varies.

Four neighboring patches make one token. Images whose longer edge is over 200 times the shorter one
do not fit, and no request may have them (`max_aspect_ratio`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from PIL import Image
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


def _grid(config: Any, processor: Any, height: int, width: int) -> tuple[int, int]:
    patch: int = processor.patch_size
    size = processor.size
    resized = smart_resize(
        height,
        width,
        factor=patch * processor.merge_size,
        min_pixels=size["shortest_edge"],
        max_pixels=size["longest_edge"],
    )
    return resized[0] // patch, resized[1] // patch


def _encode(model: Any, images: Sequence[Pixels]) -> Any:
    return model.get_image_features(
        torch.cat([image["pixel_values"].float() for image in images]),
        torch.cat([image["image_grid_thw"] for image in images]),
    )


def _features(model: Any, images: Sequence[Pixels]) -> Sequence[torch.Tensor]:
    features: Sequence[torch.Tensor] = _encode(model, images).pooler_output
    return features


def _features_by_level(model: Any, images: Sequence[Pixels]) -> Sequence[torch.Tensor]:
    """Return features whose columns are those for the embedding and then those for each level."""
    output = _encode(model, images)
    parts = zip(output.pooler_output, *output.deepstack_features, strict=True)
    return [torch.cat(part, dim=1) for part in parts]


def _with_pairs(images: Sequence[DecodedImage]) -> Sequence[DecodedImage]:
    """Return the images, with each two successive frames joined and resized to the first frame's
    size.

    If a last frame has no partner, it is encoded like an image, for which the tower repeats it.
    """
    stills = [image for image in images if not image.is_video]
    frames = [_resized(image, images[len(stills)]) for image in images[len(stills) :]]
    pairs = []
    for first in range(0, len(frames), 2):
        pair = frames[first : first + 2]
        rgb = np.concatenate([frame.rgb for frame in pair])
        pairs.append(
            replace(
                pair[0],
                rgb=rgb,
                frames=len(pair),
                continues=first > 0,
                view="pair" if len(pair) == 2 else "",
            )
        )
    return [*stills, *pairs]


def _resized(frame: DecodedImage, like: DecodedImage) -> DecodedImage:
    if frame.rgb.shape == like.rgb.shape:
        return frame
    size = (like.width, like.height)
    scaled = Image.fromarray(frame.rgb).resize(size, Image.Resampling.BICUBIC)
    return replace(frame, rgb=np.asarray(scaled))


def _preprocess(processor: Any, image: DecodedImage) -> Pixels:
    """Return the pixels of an image, or of two frames, which become the two time steps of each
    patch.
    """
    frames = [Image.fromarray(rgb) for rgb in np.split(image.rgb, image.frames)]
    pixels: Pixels = processor(images=frames, return_tensors="pt")
    if image.frames == 1:
        return pixels
    # The processor repeats each image in time: [frames, patches, colors, times, pixels].
    halves = pixels["pixel_values"].view(2, -1, 3, 2, processor.patch_size**2)
    joined = torch.stack([halves[0, :, :, 0], halves[1, :, :, 0]], dim=2)
    return {"pixel_values": joined.flatten(1), "image_grid_thw": pixels["image_grid_thw"][:1]}


QWEN2_VL = VisionFamily(
    "qwen2_vl",
    _IMAGE_TEXT,
    _Qwen2Vision,
    ("vision_config",),
    _grid,
    _features,
    with_views=_with_pairs,
    preprocess=_preprocess,
    joins_frames=True,
)
QWEN2_5_VL = replace(QWEN2_VL, model_type="qwen2_5_vl", part=_Qwen25Vision)
QWEN3_VL = VisionFamily(
    "qwen3_vl", _IMAGE_TEXT, _Qwen3Vision, ("vision_config",), _grid, _features_by_level
)
