"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: images keep their proportions, so their numbers of tokens
differ.

Four neighboring patches make one token. The processor cannot scale images whose longer edge exceeds
200 times the shorter edge. Requests with such images are refused (`max_aspect_ratio`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VisionTransformerPretrainedModel,
    Qwen2_5_VLModel,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize
from transformers.models.qwen2_vl.modeling_qwen2_vl import (
    Qwen2VisionTransformerPretrainedModel,
    Qwen2VLModel,
)
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel, Qwen3VLVisionModel

from vlora.model.folder_checks import processor_settings
from vlora.request import Clip
from vlora.vision.families.base import FOR_RGB, Pixels, VisionFamily, without_decoder
from vlora.vision.images import DecodedImage, stacked
from vlora.vision.video import VideoSampling

# Clips in Qwen2-VL, Qwen2.5-VL and Qwen3-VL: each two successive frames are encoded together.
# Frames have the size that the checkpoint's video processor gives them. Qwen2-VL and Qwen2.5-VL
# have one sequence of tokens for a whole clip. In Qwen3-VL, each pair of frames has its own
# sequence, after a text with its time.

FRAMES_PER_PAIR = 2
Settings = Mapping[str, Any]
# (settings, frames of the clip, height, width) → (height, width) to which each frame is scaled.
FrameSize = Callable[[Settings, int, int, int], tuple[int, int]]


def clip_settings(folder: Path, processor: Any) -> Settings:
    """Return the settings of a checkpoint's video processor, as transformers finds them.

    Missing ones are those of the image processor. transformers' video classes need torchvision.
    Raises InvalidArgument for a file that cannot be read.
    """
    own = processor_settings(folder, "video")
    stills = processor.to_dict()
    size = {**stills["size"], **(own.get("size") or {})}
    for edge, limit in (("shortest_edge", "min_pixels"), ("longest_edge", "max_pixels")):
        if own.get(limit) is not None:
            size[edge] = own[limit]
    return {**stills, **own, "size": size}


def frame_size_of_qwen2(clips: Settings, frames: int, height: int, width: int) -> tuple[int, int]:
    """Return the (height, width) of frames. The limits of pixels apply to each frame."""
    smallest, largest = clips["size"]["shortest_edge"], clips["size"]["longest_edge"]
    if clips.get("cap_pixels_per_frame"):
        tokens = clips.get("max_video_tokens", 128_000)
        share = int(tokens * _factor(clips) ** 2 * 0.9) * FRAMES_PER_PAIR // frames
        largest = max(min(largest, share), int(smallest * 1.05))
    size: tuple[int, int] = smart_resize(height, width, _factor(clips), smallest, largest)
    return size


def frame_size_of_qwen3(clips: Settings, frames: int, height: int, width: int) -> tuple[int, int]:
    """Return the (height, width) of frames. The limits of pixels apply to the sum of all frames."""
    smallest, largest = clips["size"]["shortest_edge"], clips["size"]["longest_edge"]
    factor = _factor(clips)
    frames = max(frames, FRAMES_PER_PAIR)
    if clips.get("cap_pixels_per_frame"):
        per_frame = min(clips.get("max_video_tokens", 768) * factor**2, largest // frames)
        largest = max(per_frame, int(smallest * 1.05)) * frames
    if min(height, width) < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    sides = [round(side / factor) * factor for side in (height, width)]
    pixels = round(frames / FRAMES_PER_PAIR) * FRAMES_PER_PAIR * sides[0] * sides[1]
    if pixels > largest:
        scale = math.sqrt(frames * height * width / largest)
        sides = [max(1, math.floor(side / scale / factor)) * factor for side in (height, width)]
    elif pixels < smallest:
        scale = math.sqrt(smallest / (frames * height * width))
        sides = [math.ceil(side * scale / factor) * factor for side in (height, width)]
    return sides[0], sides[1]


def sample_as_qwen2(
    clips: Settings, sampling: VideoSampling, total: int, fps: float
) -> Sequence[int]:
    """Sample like transformers' `Qwen2VLVideoProcessor`: whole pairs, of the frames there are."""
    asked = sampling.asked(clips)
    if asked in (None, (None, None)):
        return range(sampling.check_count(total, total))
    count, rate = asked
    pair = clips.get("temporal_patch_size", FRAMES_PER_PAIR)
    if rate is not None:
        largest = min(_most_frames(clips, sampling, count), total) // pair * pair
        count = min(max(total / fps * rate, clips.get("min_frames", 4)), largest) // pair * pair
    else:
        count = round(count / pair) * pair
    count = sampling.check_count(min(max(int(count), 1), total), total)
    # As the stock processor computes them, in float32: rounding decides between two neighboring
    # frames, and may add a number that the file does not have.
    indices: list[int] = torch.arange(0, total, total / count).int().tolist()
    return indices[:count]


def sample_as_qwen3(
    clips: Settings, sampling: VideoSampling, total: int, fps: float
) -> Sequence[int]:
    """Sample like transformers' `Qwen3VLVideoProcessor`, which repeats frames if they are few."""
    asked = sampling.asked({"do_sample_frames": True, "fps": 2} | dict(clips))
    if asked is None:
        return range(sampling.check_count(total, total))
    count, rate = asked
    fewest = clips.get("min_frames", 4)
    if rate is not None:
        largest = min(_most_frames(clips, sampling, count), total)
        count = min(max(int(total / fps * rate), fewest), largest)
    elif count is None:
        count = min(max(total, fewest), _most_frames(clips, sampling, None))
    sampling.check_count(count, total)
    return [int(index) for index in np.linspace(0, total - 1, count).round()]


def _most_frames(clips: Settings, sampling: VideoSampling, count: int | None) -> int:
    """Return the maximum number of frames if they are sampled by a rate."""
    most = sampling.max_frames or clips.get("max_frames", 768)
    return int(most if count is None else min(count, most))


def _factor(clips: Settings) -> int:
    """Return the length in pixels of each side of the square that one token covers."""
    return int(clips["patch_size"]) * int(clips["merge_size"])


def with_pairs(
    size: FrameSize, one_row: bool, clips: Settings, images: Sequence[DecodedImage]
) -> Sequence[DecodedImage]:
    """Return a request's images, with each two successive frames joined into one `DecodedImage`.

    Frames are resized to the size of the first one of their clip. A last frame without a partner is
    encoded like an image: the image processor repeats it to make a pair.

    one_row: whether the layout has one row for the clip instead of one row for each pair.
    clips: settings of the checkpoint's video processor.
    """
    stills = [image for image in images if not image.is_video]
    pairs = []
    for _, clip in groupby(images[len(stills) :], lambda image: image.clip):
        frames = list(clip)
        height, width = frames[0].height, frames[0].width
        scaled = size(clips, len(frames), height, width)
        for first in range(0, len(frames), FRAMES_PER_PAIR):
            pair = frames[first : first + FRAMES_PER_PAIR]
            pairs.append(
                replace(
                    pair[0],
                    rgb=stacked([one.rgb for one in pair], height, width),
                    frames=len(pair),
                    continues=one_row and first > 0,
                    view="pair" if len(pair) == FRAMES_PER_PAIR else "",
                    scaled=scaled,
                )
            )
    return [*stills, *pairs]


def preprocess(processor: Any, image: DecodedImage) -> Pixels:
    """Return the pixels of an image, or of two frames as the time steps of each patch."""
    frames = [Image.fromarray(rgb) for rgb in np.split(image.rgb, image.frames)]
    if image.scaled is not None:
        size = image.scaled[::-1]
        frames = [frame.resize(size, Image.Resampling(processor.resample)) for frame in frames]
    pixels: Pixels = processor(
        images=frames, do_resize=image.scaled is None, return_tensors="pt", **FOR_RGB
    )
    if image.frames == 1:
        return pixels
    # The processor repeats each image along the time axis: [frames, patches, colors, times,
    # pixels].
    halves = pixels["pixel_values"].view(2, -1, 3, 2, processor.patch_size**2)
    joined = torch.stack([halves[0, :, :, 0], halves[1, :, :, 0]], dim=2)
    return {"pixel_values": joined.flatten(1), "image_grid_thw": pixels["image_grid_thw"][:1]}


def timed_text(image_text: str, frames: int, seconds: Sequence[float]) -> str:
    """Return the text of a clip in Qwen3-VL: the time of each pair of frames, then its tokens.

    As in transformers' processor, the start and end tokens of an image are also around the whole
    clip. The time of a pair is the mean of its frames' times, in seconds.
    """
    start, _, end = image_text.partition("<|image_pad|>")
    times = seconds or Clip.of_list(frames).seconds
    pairs = ""
    for first in range(0, frames, FRAMES_PER_PAIR):
        last = min(first + FRAMES_PER_PAIR, frames) - 1
        pairs += f"<{(times[first] + times[last]) / 2:.1f} seconds>{image_text}"
    return f"{start}{pairs}{end}"


_IMAGE_TEXT = "<|vision_start|><|image_pad|><|vision_end|>"
_DECODER_KEYS = (r"language_model", r"lm_head", r"^model\.(layers|norm|embed_tokens)")


def _part(model: type[Any], tower: type[Any]) -> type[Any]:
    def build(part: Any, config: Any) -> None:
        part.visual = tower._from_config(config.vision_config)

    return without_decoder(model, _DECODER_KEYS, build)


def _scaled_size(processor: Any, limits: Mapping[str, int], image: DecodedImage) -> tuple[int, int]:
    size: tuple[int, int] = smart_resize(
        image.height,
        image.width,
        factor=processor.patch_size * processor.merge_size,
        min_pixels=limits.get("shortest_edge", processor.size["shortest_edge"]),
        max_pixels=limits.get("longest_edge", processor.size["longest_edge"]),
    )
    return size


def _grid(config: Any, processor: Any, image: DecodedImage) -> tuple[int, int]:
    patch: int = processor.patch_size
    height, width = image.scaled or _scaled_size(processor, {}, image)
    return height // patch, width // patch


def _tokens(config: Any, processor: Any, image: DecodedImage) -> int:
    height, width = _grid(config, processor, image)
    return int(height * width // processor.merge_size**2)


def _encode(model: Any, images: Sequence[Pixels]) -> Any:
    return model.get_image_features(
        torch.cat([image["pixel_values"].float() for image in images]),
        torch.cat([image["image_grid_thw"] for image in images]),
    )


def _features(model: Any, images: Sequence[Pixels]) -> Sequence[torch.Tensor]:
    features: Sequence[torch.Tensor] = _encode(model, images).pooler_output
    return features


def _features_by_level(model: Any, images: Sequence[Pixels]) -> Sequence[torch.Tensor]:
    """Return the columns for the embedding, then those for each of the first layers' outputs."""
    output = _encode(model, images)
    parts = zip(output.pooler_output, *output.deepstack_features, strict=True)
    return [torch.cat(part, dim=1) for part in parts]


QWEN2_VL = VisionFamily(
    "qwen2_vl",
    _IMAGE_TEXT,
    _part(Qwen2VLModel, Qwen2VisionTransformerPretrainedModel),
    ("vision_config",),
    _grid,
    _tokens,
    _features,
    with_views=partial(with_pairs, frame_size_of_qwen2, True),
    preprocess=preprocess,
    clip_settings=clip_settings,
    sample_frames=sample_as_qwen2,
    scaled_size=_scaled_size,
    clip_text=lambda frames, seconds: _IMAGE_TEXT,
)
QWEN2_5_VL = replace(
    QWEN2_VL,
    model_type="qwen2_5_vl",
    part=_part(Qwen2_5_VLModel, Qwen2_5_VisionTransformerPretrainedModel),
)
QWEN3_VL = replace(
    QWEN2_VL,
    model_type="qwen3_vl",
    part=_part(Qwen3VLModel, Qwen3VLVisionModel),
    features=_features_by_level,
    with_views=partial(with_pairs, frame_size_of_qwen3, False),
    sample_frames=sample_as_qwen3,
    clip_text=partial(timed_text, _IMAGE_TEXT),
)
FAMILIES = {family.model_type: family for family in (QWEN2_VL, QWEN2_5_VL, QWEN3_VL)}
