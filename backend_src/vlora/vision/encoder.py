"""Pixels to image features: the stock vision tower and connector, without the decoder.

Knows nothing of requests, caches and Triton. Computes in float32 on the CPU; the matrices may be
stored in bfloat16.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoConfig, AutoImageProcessor, AutoModel, LlavaConfig
from transformers.activations import QuickGELUActivation
from transformers.models.llava.modeling_llava import (
    LlavaModel,
    LlavaMultiModalProjector,
    LlavaPreTrainedModel,
)

from vlora import backends
from vlora.errors import InvalidArgument
from vlora.kernels import ops
from vlora.model.loader import check_files
from vlora.request import FloatArray
from vlora.vision.images import DecodedImage

PROCESSOR_BACKEND = "pil"
"""Of the two that transformers has: their pixels differ, and without a choice it would take
torchvision's wherever that happens to be installed."""


class _VisionPart(LlavaModel):  # type: ignore[misc]
    """A stock LLaVA model that never builds its decoder; `get_image_features` is the stock one."""

    _keys_to_ignore_on_load_unexpected = (r"language_model", r"lm_head")

    def __init__(self, config: LlavaConfig) -> None:
        LlavaPreTrainedModel.__init__(self, config)
        self.vision_tower = AutoModel.from_config(config.vision_config)
        self.multi_modal_projector = LlavaMultiModalProjector(config)
        self.post_init()


class _Stored(torch.nn.Linear):
    """A stock linear layer whose matrix is stored in bf16; input and sums are fp32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = ops.linear(x.flatten(0, -2), self.weight, self.bias)
        return y.view(*x.shape[:-1], -1)


class _QuickGelu(torch.nn.Module):
    """The stock x sigmoid(1.702 x), in the memory of x, which is a linear layer's own result: the
    fresh tensors of three operations cost several times what is computed."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(x.mul_(1.702), inplace=True).mul_(1 / 1.702)


class VisionEncoder:
    """The tower and connector of one checkpoint folder.

    hidden: width of a feature row. rows: feature rows of one image. grid: (h, w) of its patches.
    tower_digest: SHA-256 (hex) of all that features depend on besides the pixels: weights,
    architecture and preprocessing.
    """

    def __init__(self, checkpoint: Path, threads: int, dtype: torch.dtype = torch.float32) -> None:
        """Load from `checkpoint`; sets torch's thread count for this process. dtype: in which the
        matrices of linear layers are stored, float32 or bfloat16.

        Raises InvalidArgument where the folder holds no LLaVA tower with all its weights.
        """
        backends.backend_of("kernels")  # an unknown name fails here, not in each batch
        torch.set_num_threads(threads)
        if not (checkpoint / "config.json").is_file():
            raise InvalidArgument(f"{checkpoint} holds no checkpoint (config.json is missing)")
        try:
            config = AutoConfig.from_pretrained(checkpoint, local_files_only=True)
            self._processor: Any = AutoImageProcessor.from_pretrained(
                checkpoint, backend=PROCESSOR_BACKEND, local_files_only=True
            )
        except (OSError, ValueError) as error:
            raise InvalidArgument(f"{checkpoint} has no vision tower to read: {error}") from None
        if self._processor.backend != PROCESSOR_BACKEND:
            raise InvalidArgument(
                f"{checkpoint}: its image processor {type(self._processor).__name__} has no"
                f" '{PROCESSOR_BACKEND}' backend, the only one that is served"
            )
        if not isinstance(config, LlavaConfig):
            raise InvalidArgument(
                f"{checkpoint} is of type '{config.model_type}'; its vision tower must be LLaVA's"
            )
        check_files(checkpoint)
        model, report = _VisionPart.from_pretrained(
            checkpoint,
            dtype=torch.float32,
            output_loading_info=True,
            use_safetensors=True,
            local_files_only=True,
        )
        lacking = sorted(report["missing_keys"]) or sorted(map(str, report["mismatched_keys"]))
        if lacking:
            raise InvalidArgument(
                f"{checkpoint} lacks {len(lacking)} weights of the vision tower, or has them in"
                f" another shape; the first is {lacking[0]}"
            )
        self._model = _stored(_in_place(model.eval().requires_grad_(False)), dtype)
        side = config.vision_config.image_size // config.vision_config.patch_size
        self.hidden = int(config.text_config.hidden_size)
        self.grid = (side, side)
        self.rows = side * side + int(config.vision_feature_select_strategy == "full")
        self.tower_digest = _digest(config, self._processor, self._model)

    def encode(self, images: Sequence[DecodedImage]) -> list[FloatArray]:
        """Features of each image, float32 [rows, hidden], in one call of the tower.

        An image's features do not depend on the others beyond the rounding of sums (1e-5).
        """
        if not images:
            return []
        pixels = torch.cat([self.preprocess(image) for image in images])
        with torch.inference_mode():
            features = self._model.get_image_features(pixels).pooler_output
        return [one.numpy() for one in features]

    def preprocess(self, image: DecodedImage) -> torch.Tensor:
        """The stock image processor's pixel values of one image, float32 [1, 3, h, w]."""
        values = self._processor(images=Image.fromarray(image.rgb), return_tensors="pt")
        pixels: torch.Tensor = values["pixel_values"]
        return pixels.to(torch.float32)


def _in_place(model: torch.nn.Module) -> torch.nn.Module:
    """The model with activations that overwrite what they are given."""
    for module in model.modules():
        for name, child in module.named_children():
            if type(child) is QuickGELUActivation:
                setattr(module, name, _QuickGelu())
    return model


def _stored(model: torch.nn.Module, dtype: torch.dtype) -> Any:
    """The model with the matrices of its linear layers in `dtype`."""
    if dtype != torch.float32:
        for layer in [module for module in model.modules() if type(module) is torch.nn.Linear]:
            layer.weight = torch.nn.Parameter(layer.weight.to(dtype), requires_grad=False)
            layer.__class__ = _Stored
    return model


def _digest(config: LlavaConfig, processor: Any, model: torch.nn.Module) -> str:
    whole = config.to_dict()
    matters = {key: value for key, value in whole.items() if key in _CONFIG_KEYS}
    described = {"model": matters, "preprocessing": processor.to_dict()}
    digest = hashlib.sha256(json.dumps(described, sort_keys=True, default=str).encode())
    for name, weight in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        digest.update(weight.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


_CONFIG_KEYS = (
    "vision_config",
    "vision_feature_layer",
    "vision_feature_select_strategy",
    "projector_hidden_act",
    "multimodal_projector_bias",
)
