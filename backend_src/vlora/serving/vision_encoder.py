"""The `vision_encoder` model without Triton: a batch of requests in, the features of each out.

Each request of a batch is decoded separately, so a corrupt image is an error of its request only.
The images of the other requests go through the tower in parts that take a short time each. The
requests of a part are answered before the next part is encoded, so that the LMM can start while the
tower is still working.
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
    """The part of `vision.features.EncoderService` that is used here."""

    @property
    def images_per_batch(self) -> int:
        """Number of images that the tower encodes in one part."""

    def run(self, batch: Sequence[Sequence[DecodedImage]]) -> list[EncodedImages]: ...


Answers = Mapping[int, Tensors | VLoraError]


def encode_batch(
    batch: Sequence[Tensors | VLoraError],
    encoder: BatchEncoder,
    limits: Limits,
    send: Callable[[Answers], None],
) -> Answers:
    """Encode a batch, and return the answers of its last part by the requests' indices.

    send: called with the answers of each earlier part. Every request gets one answer.

    An answer is tensors with a leading batch dimension of 1, or an error; a request of the batch
    that is an error already is its own answer. The inputs have that dimension too, as Triton passes
    them: image and frames are [1, n]. Each part has about `encoder.images_per_batch` images and, if
    it has more than one request, at most `limits.max_batch_megapixels`. Requests without images are
    answered with the next part.
    """
    answers: dict[int, Tensors | VLoraError] = {}
    part: dict[int, list[DecodedImage]] = {}
    pixels = images = 0

    def encode_part() -> None:
        if answers:
            send(answers.copy())
            answers.clear()
        answers.update(_encode(part, encoder))
        part.clear()

    for index, tensors in enumerate(batch):
        try:
            if isinstance(tensors, VLoraError):
                raise tensors
            request_images = decode(tensors, limits)
        except Exception as error:
            answers[index] = as_vlora_error(error, "decoding an image")
            continue
        if not request_images:
            answers |= _encode({index: request_images}, encoder)
            continue
        size = sum(image.height * image.width for image in request_images)
        too_many = pixels + size > limits.max_batch_megapixels * 1e6
        if part and (too_many or images >= encoder.images_per_batch):
            encode_part()
            pixels = images = 0
        part[index] = request_images
        pixels, images = pixels + size, images + len(request_images)
    if part:
        encode_part()
    return answers


def _encode(requests: Mapping[int, list[DecodedImage]], encoder: BatchEncoder) -> Answers:
    """Return the features of each request, or an error for each if the tower fails."""
    try:
        answers: Sequence[Tensors | VLoraError] = [
            to_tensors(encoded) for encoded in encoder.run(list(requests.values()))
        ]
    except Exception as error:
        answers = [as_vlora_error(error, "encoding images")] * len(requests)
    return dict(zip(requests, answers, strict=True))


def decode(tensors: Tensors, limits: Limits) -> list[DecodedImage]:
    """Return the images of one request. Raises InvalidArgument."""
    if any(tensor.shape[0] != 1 for tensor in tensors.values()):
        raise InvalidArgument("the request has a batch of prompts; send one request per prompt")
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
    """Return the model's outputs for one request."""
    return {
        "image_features": encoded.features[None],
        "image_layout": encoded.layout[None],
        "image_size": encoded.size[None],
        "image_digest": strings(encoded.digests)[None],
    }


def features_from(tensors: Tensors) -> ImageFeatures:
    """Return the features in the model's outputs for one request."""
    return ImageFeatures(tensors["image_features"][0], tensors["image_layout"][0])
