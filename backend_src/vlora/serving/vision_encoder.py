"""The `vision_encoder` model without Triton: a batch of requests in, features of each out.

Each request of a batch is decoded on its own, so a corrupt image is an error of its request and
of no other. The images of sound ones go through the tower together, as many as it takes a moment
for, and are answered before the next, so that the LMM begins while a large tower is still at work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

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

    @property
    def images_per_batch(self) -> int: ...
    def run(self, batch: Sequence[Sequence[DecodedImage]]) -> list[EncodedImages]: ...


Answers = Mapping[int, Tensors | VLoraError]


def encode_batch(
    batch: Sequence[Tensors | VLoraError],
    encoder: BatchEncoder,
    limits: Limits,
    send: Callable[[Answers], None],
) -> Answers:
    """One answer per request, by its number. What is there before the tower has to work on is sent;
    what its last work brings is returned.

    An answer is tensors with the batch dimension 1 in front, or an error (the request's own, where
    it is one already). The inputs have that dimension too, as Triton gives them: image and frames
    [1, n]. The requests go through the tower in parts of `encoder.images_per_batch` images and at
    most `limits.max_batch_megapixels` where there is more than one request in it; those without
    images wait for nobody.
    """
    there: dict[int, Tensors | VLoraError] = {}
    part: dict[int, list[DecodedImage]] = {}
    pixels = images = 0

    def work() -> None:
        if there:
            send(there.copy())
            there.clear()
        there.update(_encode(part, encoder))
        part.clear()

    for index, tensors in enumerate(batch):
        try:
            if isinstance(tensors, VLoraError):
                raise tensors
            own = decode(tensors, limits)
        except Exception as error:
            there[index] = as_vlora_error(error, "decoding an image")
            continue
        if not own:
            there |= _encode({index: own}, encoder)
            continue
        size = sum(image.height * image.width for image in own)
        too_many = pixels + size > limits.max_batch_megapixels * 1e6
        if part and (too_many or images >= encoder.images_per_batch):
            work()
            pixels = images = 0
        part[index] = own
        pixels, images = pixels + size, images + len(own)
    if part:
        work()
    return there


def _encode(requests: Mapping[int, list[DecodedImage]], encoder: BatchEncoder) -> Answers:
    """The features of each request; where the tower fails, its error for each."""
    try:
        found: Sequence[Tensors | VLoraError] = [
            to_tensors(one) for one in encoder.run(list(requests.values()))
        ]
    except Exception as error:
        found = [as_vlora_error(error, "encoding images")] * len(requests)
    return dict(zip(requests, found, strict=True))


def decode(tensors: Tensors, limits: Limits) -> list[DecodedImage]:
    """The images of one request; InvalidArgument for what does not fit."""
    if any(tensor.shape[0] != 1 for tensor in tensors.values()):
        raise InvalidArgument("a request holds one prompt: send several requests, not a batch")
    inputs = Inputs(tensors)
    inputs.required_text("text_input", limits.max_prompt_bytes)
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
    return ImageFeatures(tensors["image_features"][0], tensors["image_layout"][0])
