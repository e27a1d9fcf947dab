"""Encoder of a text-only checkpoint, which has no vision tower: it refuses images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from vlora.errors import Unsupported
from vlora.memory.device import HOST, Device
from vlora.model.decoder_config import read_config
from vlora.model.multimodal import takes_images
from vlora.request import FloatArray
from vlora.vision.adapters import VisionPart
from vlora.vision.encoder import VisionEncoder
from vlora.vision.images import DecodedImage


class TextOnlyEncoder:
    """Encoder that returns the features of no image, and refuses requests with images.

    hidden, tower_digest, layers: as in `VisionEncoder`.
    """

    def __init__(self, model_type: str, hidden: int) -> None:
        self.hidden = hidden
        self.tower_digest = ""
        self.layers: Mapping[str, torch.nn.Linear] = {}
        self._model_type = model_type

    def grid(self, image: DecodedImage) -> tuple[int, int]:
        """Raise Unsupported."""
        raise self._refusal()

    def with_views(self, images: Sequence[DecodedImage]) -> Sequence[DecodedImage]:
        """Return the images of a request, which has none. Raise Unsupported for any other."""
        if images:
            raise self._refusal()
        return images

    def encode(
        self, images: Sequence[DecodedImage], part: VisionPart | None = None
    ) -> list[FloatArray]:
        """Return the features of no image. Raise Unsupported for any other number of images."""
        self.with_views(images)
        return []

    def _refusal(self) -> Unsupported:
        return Unsupported(
            f"the request has images, but the checkpoint's model type '{self._model_type}' takes"
            " text only"
        )


def open_encoder(
    checkpoint: Path, threads: int, dtype: torch.dtype = torch.float32, device: Device = HOST
) -> VisionEncoder | TextOnlyEncoder:
    """Return the encoder of a checkpoint folder. Arguments and errors are those of `VisionEncoder`.

    Whether the checkpoint is text-only depends on its model type (`takes_images`).
    """
    if (checkpoint / "config.json").is_file():
        config = read_config(checkpoint)
        if not takes_images(config.model_type):
            return TextOnlyEncoder(config.model_type, int(config.hidden_size))
    return VisionEncoder(checkpoint, threads, dtype, device)
