"""LLaVA-1.5, LLaVA-NeXT and LLaVA-OneVision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from PIL import Image
from torch import nn
from transformers import AutoModel
from transformers.models.llava.modeling_llava import LlavaModel, LlavaMultiModalProjector
from transformers.models.llava_next.modeling_llava_next import (
    LlavaNextModel,
    LlavaNextMultiModalProjector,
)
from transformers.models.llava_onevision.modeling_llava_onevision import (
    LlavaOnevisionModel,
    LlavaOnevisionMultiModalProjector,
)

from vlora.model.folder_checks import processor_settings
from vlora.vision.families.base import FOR_RGB, Pixels, VisionFamily, without_decoder
from vlora.vision.images import DecodedImage


def _part(model: type[Any], connector: type[Any], *, newline: bool) -> type[Any]:
    """Return a model of transformers without its decoder. newline: whether rows of tiles end by a
    trained feature.
    """

    def build(part: Any, config: Any) -> None:
        part.vision_tower = AutoModel.from_config(config.vision_config)
        part.multi_modal_projector = connector(config)
        if newline:
            part.image_newline = nn.Parameter(torch.empty(config.text_config.hidden_size))

    return without_decoder(model, (r"language_model", r"lm_head"), build)


# LLaVA-1.5: all images are resized to one size and have the same number of tokens.


def patches_of_side(config: Any, processor: Any, image: DecodedImage) -> tuple[int, int]:
    """Return the (height, width) in patches of the one size to which all images are scaled."""
    side = config.vision_config.image_size // config.vision_config.patch_size
    return side, side


def _tokens_of_overview(config: Any, processor: Any, image: DecodedImage) -> int:
    height, width = patches_of_side(config, processor, image)
    # Tiles add to these. Only LLaVA-OneVision has views, and halves the sides of its frames.
    return height * width if image.view not in FRAMES else (height // 2) * (width // 2)


def _features(model: Any, images: Sequence[Pixels]) -> Sequence[torch.Tensor]:
    pixels = torch.cat([image["pixel_values"].float() for image in images])
    features: Sequence[torch.Tensor] = model.get_image_features(pixels).pooler_output
    return features


LLAVA = VisionFamily(
    "llava",
    image_text="<image>",
    part=_part(LlavaModel, LlavaMultiModalProjector, newline=False),
    config_keys=(
        "vision_config",
        "vision_feature_layer",
        "vision_feature_select_strategy",
        "projector_hidden_act",
        "multimodal_projector_bias",
    ),
    grid=patches_of_side,
    tokens=_tokens_of_overview,
    features=_features,
)


# LLaVA-NeXT (LLaVA-1.6): an image is split into an overview and tiles. The number of tiles depends
# on the image's size.


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
    part=_part(LlavaNextModel, LlavaNextMultiModalProjector, newline=True),
    config_keys=(*LLAVA.config_keys, "image_grid_pinpoints", "use_image_newline_parameter"),
    grid=patches_of_side,
    tokens=_tokens_of_overview,
    features=_next_features,
)


# LLaVA-OneVision: the encoding of an image depends on the other images of its request. A single
# image is encoded as an overview and tiles. If there are several images, each is encoded as an
# overview only. A frame of a clip is encoded as an overview with a quarter as many feature rows.
# The row that ends a clip (the image newline) belongs to the last frame.


# Views, which say how an image is encoded. A single image has no view.
SEVERAL, FRAME, LAST_FRAME = "several", "frame", "last frame"
FRAMES = (FRAME, LAST_FRAME)


def _with_views(clips: Mapping[str, Any], images: Sequence[DecodedImage]) -> Sequence[DecodedImage]:
    alone = sum(not image.is_video for image in images) == 1
    views = [FRAME if image.is_video else "" if alone else SEVERAL for image in images]
    last = {image.clip: i for i, image in enumerate(images) if image.is_video}
    for i in last.values():
        views[i] = LAST_FRAME
    return [replace(image, view=view) for image, view in zip(images, views, strict=True)]


def _preprocess(processor: Any, image: DecodedImage) -> Pixels:
    picture = Image.fromarray(image.rgb)
    if image.view == SEVERAL:
        # For a list of several images, the processor pads the images and makes no tiles. The second
        # image only makes the list long enough.
        pixels = processor(
            images=[[picture, Image.new("RGB", (1, 1))]], return_tensors="pt", **FOR_RGB
        )
        return {"several": pixels["pixel_values"][:1], "sizes": pixels["image_sizes"][:1]}
    if image.view in FRAMES:
        side = processor.size["height"]
        # With only this resolution, the processor makes a single small tile. The overview comes
        # first.
        pixels = processor(
            images=picture, image_grid_pinpoints=[[side, side]], return_tensors="pt", **FOR_RGB
        )
        return {image.view: pixels["pixel_values"][:, 0]}
    pixels = processor(images=picture, return_tensors="pt", **FOR_RGB)
    return {"pixel_values": pixels["pixel_values"], "image_sizes": pixels["image_sizes"]}


def _onevision_features(model: Any, images: Sequence[Pixels]) -> Sequence[torch.Tensor]:
    """Call the tower for each image with tiles, for all of the view SEVERAL, and for the clip."""
    features: dict[int, torch.Tensor] = {}
    several = [i for i, image in enumerate(images) if "several" in image]
    if several:
        output = model.get_image_features(
            torch.cat([images[i]["several"] for i in several]).float(),
            torch.cat([images[i]["sizes"] for i in several]),
            # A number above 1 means that the images have no tiles. It must also be above 1 if this
            # call has one image.
            batch_num_images=[len(several) + 1],
        )
        features |= zip(several, output.pooler_output, strict=True)
    frames = [i for i, image in enumerate(images) if image.keys() & {FRAME, LAST_FRAME}]
    if frames:
        pixels = torch.cat([next(iter(images[i].values())) for i in frames]).float()
        clip = model.get_video_features(pixels[None]).pooler_output[0]
        rows, newline = clip[:-1].chunk(len(frames)), clip[-1:]
        for i, own in zip(frames, rows, strict=True):
            features[i] = torch.cat([own, newline]) if LAST_FRAME in images[i] else own
    for i, image in enumerate(images):
        if i not in features:
            pixels = image["pixel_values"].float()
            (features[i],) = model.get_image_features(pixels, image["image_sizes"]).pooler_output
    return [features[i] for i in range(len(images))]


LLAVA_ONEVISION = VisionFamily(
    "llava_onevision",
    image_text=LLAVA.image_text,
    part=_part(LlavaOnevisionModel, LlavaOnevisionMultiModalProjector, newline=True),
    config_keys=(*LLAVA_NEXT.config_keys, "vision_aspect_ratio"),
    grid=patches_of_side,
    tokens=_tokens_of_overview,
    features=_onevision_features,
    with_views=_with_views,
    preprocess=_preprocess,
    clip_settings=lambda folder, processor: processor_settings(folder, "video"),
    clip_text=lambda frames, seconds: LLAVA.image_text * frames,
)

FAMILIES = {family.model_type: family for family in (LLAVA, LLAVA_NEXT, LLAVA_ONEVISION)}
