"""Description of a vision family: how to load its tower, and how to represent images in a prompt.

A family is a checkpoint architecture, identified by the `model_type` of its configuration. Each
module here lists its `FAMILIES` by model type, and `MULTIMODAL` names the modules. No other
module of the encoder names an architecture.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoImageProcessor

from vlora.errors import InvalidArgument, in_one_line
from vlora.model.folder_checks import warn_of_unread_settings
from vlora.model.multimodal import MULTIMODAL
from vlora.vision.images import DecodedImage
from vlora.vision.video import VideoSampling

Pixels = Mapping[str, torch.Tensor]  # Result of a checkpoint's image processor for one image.

# Backend of transformers' image processors. It is fixed because the backends return different
# pixels. By default, transformers uses the backend "torchvision" if that package is installed.
PROCESSOR_BACKEND = "pil"


# Arguments of processors for RGB images. They would copy a large image several times to convert it.
FOR_RGB = {"do_convert_rgb": False}


def _load_processor(checkpoint: Path, config: Any) -> Any:
    try:
        processor = AutoImageProcessor.from_pretrained(
            checkpoint, backend=PROCESSOR_BACKEND, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # Processors read their settings in many ways.
        raise InvalidArgument(
            f"model: {checkpoint} has no readable image processor: {in_one_line(error)}"
        ) from error
    if processor.backend != PROCESSOR_BACKEND:
        raise InvalidArgument(
            f"{checkpoint}: image processor {type(processor).__name__} has no"
            f" '{PROCESSOR_BACKEND}' backend, the only one that is supported"
        )
    warn_of_unread_settings(checkpoint)
    return processor


def _preprocess(processor: Any, image: DecodedImage) -> Pixels:
    pixels: Pixels = processor(images=Image.fromarray(image.rgb), return_tensors="pt", **FOR_RGB)
    return pixels


def _sample_evenly(
    settings: Mapping[str, Any], sampling: VideoSampling, total: int, fps: float
) -> Sequence[int]:
    """Sample like transformers' `BaseVideoProcessor`, but never more frames than there are."""
    asked = sampling.asked(settings)
    count, rate = asked or (None, None)
    if rate is not None:
        limits = (number for number in (count, sampling.max_frames) if number is not None)
        count = min(max(1, int(total / fps * rate)), *limits, total)
    count = sampling.check_count(total if count is None else min(count, total), total)
    return [i * total // count for i in range(count)]


@dataclass(frozen=True)
class VisionFamily:
    """One vision architecture.

    image_text: text that stands for one image in a prompt. It contains the image token once.
    part: class of the model without its decoder; `from_pretrained` loads its weights.
    config_keys: keys of the configuration that affect image features.

    The other attributes are functions of transformers' configuration and image processor.

    grid: (config, processor, image) → (height, width) of the image's features, in patches.
    tokens: (config, processor, image) → number of the image's tokens, or a lower bound of it.
    features: (model, pixels of each image) → features of each image, [rows, hidden] fp32.
    with_views: (clip settings, images of one request) → the images with `DecodedImage.view` set.
    preprocess: (processor, image) → pixels.
    clip_settings: (checkpoint, processor) → settings of the checkpoint's video processor. {} if
        frames of a clip are separate images.
    load_processor: (checkpoint, config) → processor. By default, the checkpoint's own.
    sample_frames: (clip settings, what a request asks, number of frames of a file, its frames per
        second) → numbers of the sampled frames, as transformers' video processor samples them.
    scaled_size: (processor, limits of pixels that replace those of the processor, image) → (height,
        width) to which an image is scaled; None if the processor has no such limits.
    clip_text: (number of frames, time of each in seconds; () if unknown) → text for a clip in a
        prompt, with the image token once for each row of the clip in `ImageFeatures.layout`; None
        if frames are separate images.
    """

    model_type: str
    image_text: str
    part: type[Any]
    config_keys: tuple[str, ...]
    grid: Callable[[Any, Any, DecodedImage], tuple[int, int]]
    tokens: Callable[[Any, Any, DecodedImage], int]
    features: Callable[[Any, Sequence[Pixels]], Sequence[torch.Tensor]]
    with_views: Callable[[Mapping[str, Any], Sequence[DecodedImage]], Sequence[DecodedImage]] = (
        lambda clips, images: images
    )
    preprocess: Callable[[Any, DecodedImage], Pixels] = _preprocess
    clip_settings: Callable[[Path, Any], Mapping[str, Any]] = lambda checkpoint, processor: {}
    load_processor: Callable[[Path, Any], Any] = _load_processor
    sample_frames: Callable[[Mapping[str, Any], VideoSampling, int, float], Sequence[int]] = (
        _sample_evenly
    )
    scaled_size: Callable[[Any, Mapping[str, int], DecodedImage], tuple[int, int]] | None = None
    clip_text: Callable[[int, Sequence[float]], str] | None = None


def vision_family(model_type: str) -> VisionFamily | None:
    """Return the family of a checkpoint's model type; None if its images are not supported."""
    if model_type not in MULTIMODAL:
        return None
    module = importlib.import_module(f"vlora.vision.families.{MULTIMODAL[model_type].module}")
    family: VisionFamily = module.FAMILIES[model_type]
    return family


def without_decoder(
    model: type[Any], decoder: Sequence[str], build: Callable[[Any, Any], object]
) -> type[Any]:
    """Return a model of transformers without its decoder.

    decoder: patterns of the keys of the decoder's weights, which are not loaded.
    build: (model, config) → sets the other parts of the model.
    """

    def init(self: Any, config: Any) -> None:
        super(model, self).__init__(config)  # The model's own constructor builds the decoder.
        build(self, config)
        self.post_init()

    members = {"__init__": init, "_keys_to_ignore_on_load_unexpected": tuple(decoder)}
    return type(f"{model.__name__}Vision", (model,), members)
