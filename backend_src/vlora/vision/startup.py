"""Encoding of a few pictures at the start, to refuse a checkpoint that would fail in requests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from vlora.errors import InvalidArgument, OutOfMemory, in_one_line
from vlora.model.decoder_config import DecoderConfig
from vlora.model.inputs import image_grids
from vlora.request import ImageFeatures
from vlora.vision.encoder import TextOnlyEncoder, VisionEncoder
from vlora.vision.features import EncoderService, FeatureCache
from vlora.vision.images import DecodedImage

# Height and width in pixels. Image processors scale, crop and divide them in different ways.
WIDE, NARROW = (48, 144), (144, 48)


def check_encoder(
    encoder: VisionEncoder | TextOnlyEncoder, config: DecoderConfig, folder: Path, threads: int = 1
) -> None:
    """Encode a wide picture, a narrow one, and a clip of two frames, unless the same work is done.

    threads: number of torch's threads meanwhile. The engine is not computing yet.

    Raises InvalidArgument, which names the folder, if one fails or has features that the decoder
    cannot take.
    """
    if isinstance(encoder, TextOnlyEncoder):
        return
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        _encode_pictures(encoder, config, folder)
    finally:
        torch.set_num_threads(before)


def _encode_pictures(encoder: VisionEncoder, config: DecoderConfig, folder: Path) -> None:
    service = EncoderService(encoder, FeatureCache(0))
    known: list[dict[str, object]] = []
    for name, images in (
        ("a wide picture", [_picture(WIDE)]),
        ("a narrow picture", [_picture(NARROW)]),
        ("a clip of two frames", [_picture(WIDE, is_frame=True)] * 2),
    ):
        try:
            # Many processors give all pictures one size, and a tower may take seconds for each.
            work = _work(encoder, images)
            if all(one in known for one in work):
                continue
            known += work
            (encoded,) = service.run([images])
            features = ImageFeatures(encoded.features, encoded.layout)
            features.check(config.feature_width)
            if config.rope_axes:
                image_grids(features, config.image_merge)
        except OutOfMemory:
            raise
        except Exception as error:  # transformers' modules raise errors of any type.
            raise InvalidArgument(
                f"model: {folder}: encoding {name} at the start failed, so that requests would"
                f" fail: {in_one_line(error)}"
            ) from error


def _work(encoder: VisionEncoder, images: Sequence[DecodedImage]) -> list[dict[str, object]]:
    """Return what the work of the tower depends on: shapes, and integers such as grids."""
    return [
        {
            name: values.shape if values.is_floating_point() else values.tolist()
            for name, values in encoder.preprocess(one.image).items()
        }
        for one in encoder.prepare(images)
    ]


def _picture(size: tuple[int, int], *, is_frame: bool = False) -> DecodedImage:
    rows, columns = np.indices(size, np.uint8)
    return DecodedImage(np.stack([rows, columns, rows + columns], axis=2), is_video=is_frame)
