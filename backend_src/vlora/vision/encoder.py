"""Image encoder: the stock vision tower and connector, which turn pixels into image features.

Computes in float32 on the CPU; matrices may be stored in bfloat16. The checkpoint's decoder is not
loaded. This module does not handle requests, caches or Triton.
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
"""Backend of transformers' image processors.

The pixels of the two backends differ, and by default transformers uses torchvision's wherever it
happens to be installed.
"""

_CONFIG_KEYS = (
    "vision_config",
    "vision_feature_layer",
    "vision_feature_select_strategy",
    "projector_hidden_act",
    "multimodal_projector_bias",
)
"""Keys of a checkpoint's configuration that affect image features."""


class _VisionPart(LlavaModel):  # type: ignore[misc]
    """Stock LLaVA model without its decoder; `get_image_features` is the stock method."""

    _keys_to_ignore_on_load_unexpected = (r"language_model", r"lm_head")

    def __init__(self, config: LlavaConfig) -> None:
        LlavaPreTrainedModel.__init__(self, config)
        self.vision_tower = AutoModel.from_config(config.vision_config)
        self.multi_modal_projector = LlavaMultiModalProjector(config)
        self.post_init()


class _Bf16Linear(torch.nn.Linear):
    """Linear layer whose matrix is stored in bf16; its input, sums and output are fp32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x weightᵀ + bias, for x of any leading dimensions."""
        y = ops.linear(x.flatten(0, -2), self.weight, self.bias)
        return y.view(*x.shape[:-1], -1)


class _InPlaceQuickGelu(torch.nn.Module):
    """QuickGELU, x sigmoid(1.702 x), in place.

    x is the output of a linear layer and has no other reader. Allocating the results of three
    operations would cost several times the computation.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Overwrite x with its activation and return it."""
        return torch.nn.functional.silu(x.mul_(1.702), inplace=True).mul_(1 / 1.702)


class VisionEncoder:
    """Vision tower and connector of one checkpoint folder.

    hidden: width of a feature row.
    rows: number of feature rows of one image.
    grid: (height, width) of an image in patches.
    tower_digest: SHA-256 (hex) of everything that features depend on besides the pixels: weights,
        architecture and preprocessing.
    """

    def __init__(self, checkpoint: Path, threads: int, dtype: torch.dtype = torch.float32) -> None:
        """Load the tower from a checkpoint folder and set torch's thread count for this process.

        dtype: type in which the matrices of linear layers are stored, float32 or bfloat16.

        Raises InvalidArgument unless the folder holds a LLaVA tower with all its weights.
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
            raise InvalidArgument(f"{checkpoint} has no readable vision tower: {error}") from None
        if self._processor.backend != PROCESSOR_BACKEND:
            raise InvalidArgument(
                f"{checkpoint}: image processor {type(self._processor).__name__} has no"
                f" '{PROCESSOR_BACKEND}' backend, the only one that is supported"
            )
        if not isinstance(config, LlavaConfig):
            raise InvalidArgument(
                f"{checkpoint} has model type '{config.model_type}'; it must be a LLaVA model"
            )
        check_files(checkpoint)
        model, report = _VisionPart.from_pretrained(
            checkpoint,
            dtype=torch.float32,
            output_loading_info=True,
            use_safetensors=True,
            local_files_only=True,
        )
        missing = sorted(report["missing_keys"]) or sorted(map(str, report["mismatched_keys"]))
        if missing:
            raise InvalidArgument(
                f"{checkpoint} lacks {len(missing)} weights of the vision tower, or has them in"
                f" another shape; the first is {missing[0]}"
            )
        _use_in_place_activations(model.eval().requires_grad_(False))
        _store_matrices(model, dtype)
        self._model: Any = model
        side = config.vision_config.image_size // config.vision_config.patch_size
        self.hidden = int(config.text_config.hidden_size)
        self.grid = (side, side)
        self.rows = side * side + int(config.vision_feature_select_strategy == "full")
        self.tower_digest = _digest(config, self._processor, self._model)

    def encode(self, images: Sequence[DecodedImage]) -> list[FloatArray]:
        """Return the features of each image, float32 [rows, hidden], from one call of the tower.

        The other images of a call change an image's features only by the rounding of sums (1e-5).
        """
        if not images:
            return []
        pixels = torch.cat([self.preprocess(image) for image in images])
        with torch.inference_mode():
            features = self._model.get_image_features(pixels).pooler_output
        return [image_features.numpy() for image_features in features]

    def preprocess(self, image: DecodedImage) -> torch.Tensor:
        """Return the stock image processor's pixel values of one image, float32 [1, 3, h, w]."""
        values = self._processor(images=Image.fromarray(image.rgb), return_tensors="pt")
        pixels: torch.Tensor = values["pixel_values"]
        return pixels.to(torch.float32)


def _use_in_place_activations(model: torch.nn.Module) -> None:
    """Replace QuickGELU activations by the in-place version."""
    for module in model.modules():
        for name, child in module.named_children():
            if type(child) is QuickGELUActivation:
                setattr(module, name, _InPlaceQuickGelu())


def _store_matrices(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Convert the matrices of all linear layers to `dtype`."""
    if dtype != torch.float32:
        for layer in [module for module in model.modules() if type(module) is torch.nn.Linear]:
            layer.weight = torch.nn.Parameter(layer.weight.to(dtype), requires_grad=False)
            layer.__class__ = _Bf16Linear


def _digest(config: LlavaConfig, processor: Any, model: torch.nn.Module) -> str:
    relevant = {key: value for key, value in config.to_dict().items() if key in _CONFIG_KEYS}
    description = {"model": relevant, "preprocessing": processor.to_dict()}
    digest = hashlib.sha256(json.dumps(description, sort_keys=True, default=str).encode())
    for name, weight in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        digest.update(weight.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
