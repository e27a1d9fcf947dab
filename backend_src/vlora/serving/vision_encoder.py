"""The `vision_encoder` model without Triton: a batch of requests in, features of each out.

Each request of a batch is decoded on its own, so a corrupt image is an error of its request and
of no other; the images of all sound ones go through the tower together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from vlora.config import Limits
from vlora.errors import InvalidArgument, VLoraError
from vlora.request import ImageFeatures
from vlora.serving.responder import as_vlora_error
from vlora.serving.tensors import Inputs, Tensors, strings
from vlora.vision.features import EncodedImages
from vlora.vision.images import DecodedImage, decode_request

OUTPUTS = ("image_features", "image_layout", "image_size", "image_digest")


class BatchEncoder(Protocol):
    """What is needed of `vision.features.EncoderService`."""

    def run(self, batch: Sequence[Sequence[DecodedImage]]) -> list[EncodedImages]: ...


def encode_batch(
    batch: Sequence[Tensors], encoder: BatchEncoder, limits: Limits
) -> list[Tensors | VLoraError]:
    """One answer per request, in order: tensors with the batch dimension 1 in front, or an error.

    The inputs have that dimension too, as Triton gives them: image and frames [1, n].
    """
    decoded: list[list[DecodedImage] | VLoraError] = []
    for tensors in batch:
        try:
            decoded.append(decode(tensors, limits))
        except Exception as error:
            decoded.append(as_vlora_error(error, "decoding an image"))
    sound = [images for images in decoded if not isinstance(images, VLoraError)]
    try:
        encoded = iter(encoder.run(sound))
    except Exception as error:
        failure = as_vlora_error(error, "encoding images")
        return [images if isinstance(images, VLoraError) else failure for images in decoded]
    return [
        images if isinstance(images, VLoraError) else to_tensors(next(encoded))
        for images in decoded
    ]


def decode(tensors: Tensors, limits: Limits) -> list[DecodedImage]:
    """The images of one request; InvalidArgument for what does not fit."""
    if any(tensor.shape[0] != 1 for tensor in tensors.values()):
        raise InvalidArgument("a request holds one prompt: send several requests, not a batch")
    inputs = Inputs(tensors)
    inputs.required_text("text_input")
    raw = tensors.get("frames_raw")
    return decode_request(
        inputs.strings("image"),
        inputs.strings("frames"),
        None if raw is None else raw[0],
        limits,
    )


def to_tensors(encoded: EncodedImages) -> Tensors:
    return {
        "image_features": encoded.features[None],
        "image_layout": encoded.layout[None],
        "image_size": encoded.size[None],
        "image_digest": strings(encoded.digests)[None],
    }


def features_from(tensors: Tensors) -> ImageFeatures:
    """What `to_tensors` made, as a caller of the model gets it."""
    return ImageFeatures(
        np.array(tensors["image_features"][0]), np.array(tensors["image_layout"][0])
    )
