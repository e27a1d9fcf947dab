"""Small checkpoints of the vision families: random weights in the classes of transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForImageTextToText,
    AutoTokenizer,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaNextConfig,
    LlavaOnevisionConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2_5_VLConfig,
    Qwen2Config,
    Qwen2VLConfig,
    Qwen3VLConfig,
    SiglipVisionConfig,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import (
    LlavaNextImageProcessorPil,
)
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
    LlavaOnevisionImageProcessorPil,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
PATCH = 4
HIDDEN = 64
TILE = 16
CLIP_LIMITS = {"shortest_edge": 2 * 16 * 16, "longest_edge": 4 * 40 * 40}
"""Limits of the pixels of a whole clip in Qwen3-VL. Clips of the tests exceed both."""
PINPOINTS = [[TILE, 2 * TILE], [2 * TILE, TILE], [2 * TILE, 2 * TILE]]


def _text(vocabulary: int) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary,
        "hidden_size": HIDDEN,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "initializer_range": 0.2,
    }


MROPE = {"rope_type": "mrope", "mrope_section": [2, 3, 3], "rope_theta": 1e4}


def _qwen2_vl(text: dict[str, Any], ids: dict[str, int]) -> PreTrainedConfig:
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": HIDDEN, "num_heads": 2, "mlp_ratio": 2}
    text |= {"rope_parameters": MROPE}
    return Qwen2VLConfig(text_config=text, vision_config=vision | {"patch_size": PATCH}, **ids)


TOWER = {
    "depth": 3,
    "hidden_size": 32,
    "out_hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": PATCH,
}
"""Sizes of the vision towers of Qwen2.5-VL and later."""


def _qwen2_5_vl(text: dict[str, Any], ids: dict[str, int]) -> PreTrainedConfig:
    vision = {
        **TOWER,
        "spatial_patch_size": PATCH,
        "window_size": 4 * PATCH,
        "fullatt_block_indexes": [2],
    }
    text |= {"rope_parameters": MROPE}
    return Qwen2_5_VLConfig(text_config=text, vision_config=vision, **ids)


def _qwen3_vl(text: dict[str, Any], ids: dict[str, int]) -> PreTrainedConfig:
    vision = {**TOWER, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
    rope = {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    text |= {"rope_parameters": rope | {"rope_theta": 1e4}, "head_dim": HIDDEN // 4}
    return Qwen3VLConfig(text_config=text, vision_config=vision, **ids)


def _clip() -> CLIPVisionConfig:
    return CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=2,
        image_size=TILE,
        patch_size=PATCH,
    )


def _llava(text: dict[str, Any], ids: dict[str, int]) -> PreTrainedConfig:
    return LlavaConfig(
        vision_config=_clip(),
        text_config=LlamaConfig(**text),
        image_token_index=ids["image_token_id"],
    )


def _llava_next(text: dict[str, Any], ids: dict[str, int]) -> PreTrainedConfig:
    return LlavaNextConfig(
        vision_config=_clip(),
        text_config=MistralConfig(**text, sliding_window=None),
        image_grid_pinpoints=PINPOINTS,
        image_token_index=ids["image_token_id"],
    )


def _llava_onevision(text: dict[str, Any], ids: dict[str, int]) -> PreTrainedConfig:
    vision = SiglipVisionConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=TILE,
        patch_size=PATCH,
        vision_use_head=False,
    )
    return LlavaOnevisionConfig(
        vision_config=vision,
        text_config=Qwen2Config(**text),
        image_grid_pinpoints=[*PINPOINTS, [TILE, 6 * TILE]],
        vision_aspect_ratio="anyres_max_4",
        image_token_index=ids["image_token_id"],
        video_token_index=ids["video_token_id"],
    )


FAMILIES: dict[str, Callable[[dict[str, Any], dict[str, int]], PreTrainedConfig]] = {
    "llava": _llava,
    "llava_next": _llava_next,
    "llava_onevision": _llava_onevision,
    "qwen2_vl": _qwen2_vl,
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_vl": _qwen3_vl,
}


def make_checkpoint(family: str, tokenizer_of: Path, folder: Path) -> Path:
    """Write a checkpoint of a family with another checkpoint's tokenizer. Return its folder."""
    torch.manual_seed(5)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_of)
    if family == "llava":
        processor: Any = CLIPImageProcessorPil(size={"shortest_edge": TILE}, crop_size=TILE)
    elif family == "llava_next":
        processor = LlavaNextImageProcessorPil(
            size={"shortest_edge": TILE}, crop_size=TILE, image_grid_pinpoints=PINPOINTS
        )
    elif family == "llava_onevision":
        processor = LlavaOnevisionImageProcessorPil(
            size={"height": TILE, "width": TILE},
            image_grid_pinpoints=[*PINPOINTS, [TILE, 6 * TILE]],
        )
        tokenizer.add_special_tokens({"additional_special_tokens": ["<video>"]})
    else:
        sizes = {"shortest_edge": 16 * 16, "longest_edge": 64 * 64}
        processor = Qwen2VLImageProcessorPil(patch_size=PATCH, size=sizes)
        tokenizer.add_special_tokens({"additional_special_tokens": list(VISION_TOKENS)})
    tokens = list(VISION_TOKENS)
    if family.startswith("llava"):
        tokens = ["<image>", "<image>", "<image>", "<video>"]
    start, end, image, video = tokenizer.convert_tokens_to_ids(tokens)
    ids = {
        "vision_start_token_id": start,
        "vision_end_token_id": end,
        "image_token_id": image,
        "video_token_id": video,
    }
    text = _text(len(tokenizer)) | {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    model = AutoModelForImageTextToText.from_config(FAMILIES[family](text, ids))
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, mean=0.5 * ("bias" not in name), std=0.3)
    with torch.no_grad():  # An answer of image tokens could not be given to the stock model.
        for token in {image, video} - {None}:
            model.get_output_embeddings().weight[token] = 0.0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    processor.save_pretrained(folder)
    if family == "qwen3_vl":
        Qwen3VLVideoProcessor(patch_size=PATCH, size=CLIP_LIMITS).save_pretrained(folder)
    return folder
