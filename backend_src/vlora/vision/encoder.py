"""Image encoder: transformers' vision tower and connector, which turn pixels into image features.

The encoder computes in float32. Matrices may be stored in bfloat16. The checkpoint's decoder is not
loaded.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers.activations import QuickGELUActivation

from vlora import backends
from vlora.atmm.types import LoraPair
from vlora.device.device import HOST, Device, require_dtype, require_memory
from vlora.errors import InvalidArgument, Unsupported, in_one_line
from vlora.kernels import ops
from vlora.model.decoder_config import image_levels, read_config
from vlora.model.folder_checks import (
    check_weights,
    described_quantization,
    problem_of_processor,
)
from vlora.model.multimodal import MULTIMODAL, takes_images
from vlora.model.quantization_config import stored_quantization
from vlora.request import FloatArray
from vlora.sampling import AS_CHECKPOINT, MediaOptions
from vlora.vision.adapters import VisionPart, applied, linear_layers
from vlora.vision.families.base import Pixels, vision_family
from vlora.vision.images import DecodedImage
from vlora.vision.video import VideoSampling


class _Bf16Linear(torch.nn.Linear):
    """Linear layer whose matrix is stored in bf16. Its input, sums and output are fp32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x weightᵀ + bias. x may have any number of leading dimensions."""
        return ops.linear(x.flatten(0, -2), self.weight, self.bias).view(*x.shape[:-1], -1)


class _InPlaceQuickGelu(torch.nn.Module):
    """QuickGELU, x sigmoid(1.702 x), in place on the output of a linear layer.

    Allocating the results of three operations takes several times as long as computing them.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Overwrite x with its activation and return it."""
        return torch.nn.functional.silu(x.mul_(1.702), inplace=True).mul_(1 / 1.702)


class PreparedImage(NamedTuple):
    """An image with its view set (see `DecodedImage.view`), and its `VisionEncoder.grid`.

    tokens: number of the image's tokens, or a lower bound of it.
    """

    image: DecodedImage
    grid: tuple[int, int]
    tokens: int = 0


class VisionEncoder:
    """Vision tower and connector of one checkpoint folder.

    hidden: width of a feature row, with the columns of Qwen3-VL for the decoder's first layers.
    tower_digest: SHA-256 (hex) of the weights, the architecture and the preprocessing, which
        together with an image's pixels determine its features.
    layers: linear layers by `vision_path`, which adapters may change.
    """

    def __init__(
        self,
        checkpoint: Path,
        threads: int,
        dtype: torch.dtype = torch.float32,
        device: Device = HOST,
    ) -> None:
        """Load the tower from a checkpoint folder.

        threads: number of threads of torch, which is set for the whole process.
        dtype: type of the stored matrices of linear layers. For float16, which needs a GPU, they
            are stored in float32, because their values may exceed the range of float16.

        Raises InvalidArgument unless the folder has a tower of a supported family with all its
        weights, and OutOfMemory if it does not fit the device.
        """
        # An unknown name of a backend must fail at the start instead of in each batch.
        backends.backend_of("kernels")
        require_dtype(device, dtype)
        torch.set_num_threads(threads)
        if not (checkpoint / "config.json").is_file():
            raise InvalidArgument(f"{checkpoint} holds no checkpoint (config.json is missing)")
        config = read_config(checkpoint)
        family = vision_family(config.model_type)
        if family is None:
            raise InvalidArgument(
                f"{checkpoint} has model type '{config.model_type}', whose images are not"
                f" supported; supported: {', '.join(MULTIMODAL)}"
            )
        self._family = family
        self._processor: Any = self._family.load_processor(checkpoint, config)
        self._clips = self._family.clip_settings(checkpoint, self._processor)
        for kind, settings in (("image", self._processor.to_dict()), ("video", self._clips)):
            if problem := problem_of_processor(config.to_dict(), settings, kind):
                raise InvalidArgument(f"model: {checkpoint}: {problem}")
        model = _load_part(family.part, checkpoint, config)
        _use_in_place_activations(model.eval().requires_grad_(False))
        _store_matrices(model, torch.float32 if dtype == torch.float16 else dtype)
        self._model: Any = model
        self.layers = linear_layers(model)
        self._config = config
        self.hidden = int(config.get_text_config().hidden_size) * (1 + image_levels(config))
        self.tower_digest = _digest(config, self._family.config_keys, self._processor, self._model)
        self._device = device
        weights = sum(tensor.nbytes for tensor in model.state_dict().values())
        require_memory(device, {"the vision tower": weights}, "raise 'encoder_memory_share'")
        self._model.to(device.torch_device)

    def grid(self, image: DecodedImage) -> tuple[int, int]:
        """Return (height, width) of an image in patches of the tower."""
        return self._family.grid(self._config, self._processor, image)

    def sample_frames(self, sampling: VideoSampling, total: int, fps: float) -> Sequence[int]:
        """Return the numbers of the frames to use of a video file with `total` frames."""
        return self._family.sample_frames(self._clips, sampling, total, fps)

    def prepare(
        self, images: Sequence[DecodedImage], options: MediaOptions = AS_CHECKPOINT
    ) -> list[PreparedImage]:
        """Return the images of one request, with their views and grids. Raises InvalidArgument for
        options that the image processor does not have.
        """
        images, clips = self._limited(images, options)
        with_views = self._family.with_views(clips, images)
        return [
            PreparedImage(
                image, self.grid(image), self._family.tokens(self._config, self._processor, image)
            )
            for image in with_views
        ]

    def _limited(
        self, images: Sequence[DecodedImage], options: MediaOptions
    ) -> tuple[Sequence[DecodedImage], Mapping[str, Any]]:
        """Apply limits of pixels to images, and to the settings for frames."""
        given = {"shortest_edge": options.min_pixels, "longest_edge": options.max_pixels}
        limits = {edge: value for edge, value in given.items() if value is not None}
        size = self._family.scaled_size
        if not limits:
            return images, self._clips
        if size is None:
            raise InvalidArgument(
                "'mm_processor_kwargs' has 'min_pixels' or 'max_pixels', which the image processor"
                f" of model type '{self._family.model_type}' does not have; leave them out"
            )
        scaled = [
            one if one.is_video else replace(one, scaled=size(self._processor, limits, one))
            for one in images
        ]
        return scaled, {**self._clips, "size": {**self._clips["size"], **limits}}

    def encode(
        self, images: Sequence[DecodedImage | Pixels], part: VisionPart | None = None
    ) -> list[FloatArray]:
        """Return the features of each image, float32 [rows, hidden], from one call of the tower.

        images: images, or the results of `preprocess`.
        part: vision part of the images' adapter; None for the base model.

        An image's features depend on the other images only by the rounding of sums (about 1e-5).
        """
        if not images:
            return []
        # Requests are encoded on another thread than the one that has loaded the tower.
        self._device.make_current()
        where = self._device.torch_device
        pixels = [
            {name: values.to(where) for name, values in one.items()}
            for one in (
                self.preprocess(image) if isinstance(image, DecodedImage) else image
                for image in images
            )
        ]
        pairs = {
            path: LoraPair(pair.a.to(where), pair.b.to(where))
            for path, pair in ({} if part is None else part.pairs).items()
        }
        with torch.inference_mode(), applied(self.layers, pairs):
            features = self._family.features(self._model, pixels)
        return [image_features.cpu().numpy() for image_features in features]

    def preprocess(self, image: DecodedImage) -> Pixels:
        """Return the pixels of one image as the checkpoint's image processor prepares them."""
        return self._family.preprocess(self._processor, image)


def _load_part(part: Any, checkpoint: Path, config: Any) -> Any:
    check_weights(checkpoint, stored_quantization(described_quantization(config.to_dict())))
    for settings in (config, config.get_text_config()):
        # The tower is not quantized. With this entry, transformers would require the
        # quantizer's package.
        if getattr(settings, "quantization_config", None) is not None:
            del settings.quantization_config
    try:
        model, report = part.from_pretrained(
            checkpoint,
            config=config,
            dtype=torch.float32,
            output_loading_info=True,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # Such weights are refused below, by name.
        )
    except MemoryError:
        raise
    except Exception as error:  # transformers raises many types, also for settings of the tower.
        raise InvalidArgument(
            f"model: {checkpoint} cannot be loaded: {in_one_line(error)}"
        ) from error
    _check_report(checkpoint, report["missing_keys"], report["mismatched_keys"])
    return model


def _check_report(
    checkpoint: Path,
    missing: Collection[str],
    mismatched: Collection[tuple[str, Sequence[int], Sequence[int]]],
) -> None:
    """Raise InvalidArgument for missing weights, and for (name, stored shape, expected shape)."""
    for name, stored, expected in sorted(mismatched):
        raise InvalidArgument(
            f"{checkpoint} holds '{name}' of shape {tuple(stored)}; config.json requires"
            f" {tuple(expected)}"
        )
    if missing:
        raise InvalidArgument(
            f"{checkpoint} lacks {len(missing)} weights of the vision tower; the first is"
            f" {min(missing)}"
        )


def _use_in_place_activations(model: torch.nn.Module) -> None:
    for module in model.modules():
        for name, child in module.named_children():
            if type(child) is QuickGELUActivation:
                setattr(module, name, _InPlaceQuickGelu())


def _store_matrices(model: torch.nn.Module, dtype: torch.dtype) -> None:
    if dtype != torch.float32:
        for layer in [module for module in model.modules() if type(module) is torch.nn.Linear]:
            layer.weight = torch.nn.Parameter(layer.weight.to(dtype), requires_grad=False)
            layer.__class__ = _Bf16Linear


def _digest(config: Any, config_keys: Sequence[str], processor: Any, model: torch.nn.Module) -> str:
    relevant = {key: value for key, value in config.to_dict().items() if key in config_keys}
    description = {"model": relevant, "preprocessing": processor.to_dict()}
    digest = hashlib.sha256(json.dumps(description, sort_keys=True, default=str).encode())
    for name, weight in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        digest.update(weight.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


class TextOnlyEncoder:
    """Encoder of a checkpoint without a vision tower. It raises Unsupported for any image.

    hidden, tower_digest, layers: as in `VisionEncoder`.
    """

    def __init__(self, model_type: str, hidden: int) -> None:
        self.hidden = hidden
        self.tower_digest = ""
        self.layers: Mapping[str, torch.nn.Linear] = {}
        self._model_type = model_type

    def sample_frames(self, sampling: VideoSampling, total: int, fps: float) -> Sequence[int]:
        raise self._refusal()

    def prepare(
        self, images: Sequence[DecodedImage], options: MediaOptions = AS_CHECKPOINT
    ) -> list[PreparedImage]:
        if images:
            raise self._refusal()
        return []

    def preprocess(self, image: DecodedImage) -> Pixels:
        raise self._refusal()

    def encode(
        self, images: Sequence[DecodedImage | Pixels], part: VisionPart | None = None
    ) -> list[FloatArray]:
        return []

    def _refusal(self) -> Unsupported:
        return Unsupported(
            f"the request has images, but the checkpoint's model type '{self._model_type}' takes"
            " text only"
        )


def open_encoder(
    checkpoint: Path, threads: int, dtype: torch.dtype = torch.float32, device: Device = HOST
) -> VisionEncoder | TextOnlyEncoder:
    """Return the encoder of a folder, by its model type. For arguments, see `VisionEncoder`."""
    if (checkpoint / "config.json").is_file():
        config = read_config(checkpoint)
        if not takes_images(config.model_type):
            return TextOnlyEncoder(config.model_type, int(config.hidden_size))
    return VisionEncoder(checkpoint, threads, dtype, device)
