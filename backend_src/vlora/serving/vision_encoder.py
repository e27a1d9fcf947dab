"""The `vision_encoder` model without Triton: decodes the images of a batch, encodes them in parts.

Requests are decoded in parallel and encoded in the order in which their pixels are ready, so a
corrupt image is an error of its request only. What is ready goes through the tower in parts that
take a short time each, and the requests of a part are answered before the next part is encoded, so
that the LMM can start while the tower is still working. A batch does not wait for requests that
take long to decode: they are answered later, while the next batches are encoded.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from vlora.config import Limits
from vlora.errors import InvalidArgument, VLoraError
from vlora.request import ImageFeatures
from vlora.serving.responder import as_vlora_error
from vlora.serving.tensors import Inputs, Tensors, strings
from vlora.vision.decoder import DecodedRequest, OnDone, OnSlow
from vlora.vision.features import EncodedImages
from vlora.vision.images import DecodedImage, ImageRequest, check_images

OUTPUTS = ("image_features", "image_layout", "image_size", "image_digest")

MAX_LATE_BATCHES = 64
"""Maximum number of threads that wait for slow requests; the decoder allows far fewer requests."""


class BatchEncoder(Protocol):
    """The part of `vision.features.EncoderService` that is used here."""

    @property
    def images_per_batch(self) -> int:
        """Number of images that the tower encodes in one part."""

    def run(self, batch: Sequence[Sequence[DecodedImage]]) -> list[EncodedImages]: ...


class Decoder(Protocol):
    """The part of `vision.decoder.ImageDecoder` that is used here."""

    def submit(self, request: ImageRequest, on_slow: OnSlow, on_done: OnDone) -> None: ...
    def close(self) -> None: ...


Answers = Mapping[int, Tensors | VLoraError]
Send = Callable[[Answers], None]


class VisionService:
    """Answers batches of requests. Owns the decoder."""

    def __init__(self, decoder: Decoder, encoder: BatchEncoder, limits: Limits) -> None:
        self._decoder = decoder
        self._encoder = encoder
        self._limits = limits
        self._late = ThreadPoolExecutor(MAX_LATE_BATCHES, thread_name_prefix="late-images")

    def answer(self, batch: Sequence[Tensors | VLoraError], send: Send) -> Answers:
        """Answer a batch; return the answers of its last part by the requests' indices.

        send: called with the answers of each earlier part, and, possibly after this returns and on
            another thread, with those of slow requests. Every request gets one answer.

        An answer is tensors with a leading batch dimension of 1, or an error; a request of the
        batch that is an error already is its own answer. The inputs have that dimension too, as
        Triton passes them: image and frames are [1, n]. A part has about `images_per_batch` images.
        Requests without images are answered with the first part.
        """
        decoding = _Batch(self._decoder, self._encoder, self._limits)
        answers = decoding.start(batch)
        answers = decoding.encode(answers, send, wait_for_slow=False)
        if decoding.waiting:
            self._late.submit(lambda: send(decoding.encode({}, send, wait_for_slow=True)))
        return answers

    def close(self) -> None:
        """End the decoder; requests that are still decoded are answered with Unavailable."""
        self._decoder.close()
        self._late.shutdown()


class _Batch:
    """The requests of one batch that are being decoded."""

    def __init__(self, decoder: Decoder, encoder: BatchEncoder, limits: Limits) -> None:
        self._decoder = decoder
        self._encoder = encoder
        self._limits = limits
        self.waiting: set[int] = set()
        """Requests that are not decoded yet."""
        self._slow: set[int] = set()
        self._events: queue.SimpleQueue[tuple[int, DecodedRequest | Exception | None]] = (
            queue.SimpleQueue()
        )
        """Results of requests; None for a request that has become slow."""

    def start(self, batch: Sequence[Tensors | VLoraError]) -> Answers:
        """Start to decode; return the answers of requests that need no decoding."""
        answers: dict[int, Tensors | VLoraError] = {}
        for index, tensors in enumerate(batch):
            try:
                if isinstance(tensors, VLoraError):
                    raise tensors
                request = read_images(tensors, self._limits)
                if len(request):
                    self._submit(index, request)
                else:
                    answers |= self._encode_part({index: None})
            except Exception as error:
                answers[index] = as_vlora_error(error, "decoding an image")
        return answers

    def encode(self, answers: Answers, send: Send, wait_for_slow: bool) -> Answers:
        """Encode requests as they are decoded; return the answers of the last part.

        answers: answers that are sent with the first part.
        wait_for_slow: False to return when all requests that are not decoded yet are slow.
        """
        while self.waiting if wait_for_slow else self.waiting - self._slow:
            part: dict[int, DecodedRequest | None] = {}
            failed: dict[int, Tensors | VLoraError] = {}
            images = 0
            while not (part or failed) or (
                images < self._encoder.images_per_batch and not self._events.empty()
            ):
                index, result = self._events.get()
                if result is None:
                    self._slow.add(index)
                    if not wait_for_slow and not self.waiting - self._slow:
                        break
                    continue
                self.waiting.remove(index)
                if isinstance(result, DecodedRequest):
                    part[index] = result
                    images += len(result.images)
                else:
                    failed[index] = as_vlora_error(result, "decoding an image")
            if part and answers:
                send(answers)
                answers = {}
            answers = {**answers, **failed, **self._encode_part(part)}
        return answers

    def _submit(self, index: int, request: ImageRequest) -> None:
        self.waiting.add(index)
        try:
            self._decoder.submit(
                request,
                lambda: self._events.put((index, None)),
                lambda result: self._events.put((index, result)),
            )
        except BaseException:
            self.waiting.remove(index)
            raise

    def _encode_part(self, requests: Mapping[int, DecodedRequest | None]) -> Answers:
        """Return the features of each request, or an error for each if the tower fails."""
        if not requests:
            return {}
        try:
            images = [[] if found is None else found.images for found in requests.values()]
            answers: Sequence[Tensors | VLoraError] = [
                to_tensors(encoded) for encoded in self._encoder.run(images)
            ]
        except Exception as error:
            answers = [as_vlora_error(error, "encoding images")] * len(requests)
        finally:
            for found in requests.values():
                if found is not None:
                    found.release()
        return dict(zip(requests, answers, strict=True))


def read_images(tensors: Tensors, limits: Limits) -> ImageRequest:
    """Return the encoded images of one request. Raises InvalidArgument."""
    if any(tensor.shape[0] != 1 for tensor in tensors.values()):
        raise InvalidArgument("the request has a batch of prompts; send one request per prompt")
    inputs = Inputs(tensors)
    inputs.required_text("text_input", limits.max_prompt_bytes)
    images = inputs.strings("image")
    raw = tensors.get("frames_raw")
    if raw is not None:
        # A request that waits for its images may be answered when Triton's tensor is gone.
        raw = raw[0].copy() if images else raw[0]
    return check_images(images, inputs.strings("frames"), raw, limits)


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
