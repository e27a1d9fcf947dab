"""The `vision_encoder` model without Triton: a queue of requests with images to decode and encode.

Images are decoded in parallel. Requests are encoded in the order in which their pixels are ready,
so a corrupt or slow image delays only its own request. Requests that are ready at the same time are
split into parts, and each part is one batch of the vision tower. The requests of a part are
answered while the next part is encoded.

The queue is limited in requests and in bytes. A queued request ends at once if its deadline passes,
if a newer request of its stream supersedes it, or if it is cancelled.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from vlora.config import Limits
from vlora.errors import Cancelled, InvalidArgument, Unavailable, VLoraError
from vlora.request import ImageFeatures
from vlora.serving.arrivals import ARRIVAL_INPUT, ArrivalStamps
from vlora.serving.codec import (
    ADAPTER_VERSION,
    IMAGE_INPUTS,
    adapter_name,
    freshness_of,
    is_cancel,
    read_sampling,
)
from vlora.serving.requests import HeldBytes, WaitingRequests, bytes_of
from vlora.serving.responder import Responder, answer, as_vlora_error
from vlora.serving.tensors import Inputs, Tensors, strings
from vlora.vision.adapters import VisionPart
from vlora.vision.decoding import DecodedRequest, OnDone
from vlora.vision.features import EncodedImages
from vlora.vision.images import DecodedImage, ImageRequest, check_images

OUTPUTS = (
    "image_features",
    "image_layout",
    "image_size",
    "image_digest",
    ADAPTER_VERSION,
    ARRIVAL_INPUT,
)

COLLECT_SECONDS = 0.025
"""Seconds during which the encoder waits for more requests, to encode them together (decision 67).

The time counts from the arrival of the first request.
"""

WATCH_SECONDS = 0.05
"""Interval at which deadlines are checked."""


class BatchEncoder(Protocol):
    """The part of `vision.features.EncoderService` that this module uses."""

    @property
    def images_per_batch(self) -> int:
        """Number of images that the tower should encode in one part."""

    def count_group(self, requests: int) -> None: ...
    def run(
        self, batch: Sequence[Sequence[DecodedImage]], parts: Sequence[VisionPart | None] = ()
    ) -> list[EncodedImages]: ...


class RequestDecoder(Protocol):
    """The part of `vision.decoder.ImageDecoder` that this module uses."""

    def submit(self, request: ImageRequest, on_done: OnDone, check: Callable[[], None]) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class _Queued:
    """A request in the queue.

    key: key by which this model knows the request.
    adapter: name of the request's adapter; None for the base model.
    """

    key: str
    adapter: str | None
    arrival: float
    responder: Responder


Decoded = list[tuple[_Queued, DecodedRequest]]


class VisionService:
    """Answers requests of `vision_encoder`. It owns the decoder and two threads.

    Requests without images are answered at once, all others from the queue.

    waiting: requests in the queue, until they are encoded.
    max_requests: maximum number of requests in the queue.
    before_answers: called before the answers of a part are sent.
    part_of: returns an adapter's changes to the vision tower and the connector, or None. It may
        raise a VLoraError.
    """

    def __init__(
        self,
        decoder: RequestDecoder,
        encoder: BatchEncoder,
        limits: Limits,
        stamps: ArrivalStamps,
        waiting: WaitingRequests,
        max_requests: int,
        before_answers: Callable[[], None] = lambda: None,
        part_of: Callable[[str | None], VisionPart | None] = lambda name: None,
    ) -> None:
        self._decoder = decoder
        self._encoder = encoder
        self._limits = limits
        self._stamps = stamps
        self._waiting = waiting
        self._max_requests = max_requests
        self._before_answers = before_answers
        self._part_of = part_of
        self._held = HeldBytes(limits.max_in_flight_bytes)
        """Bytes of the images in the queue. They are held until the decoder drops the images, even
        if the request has ended before.
        """
        self._decoded: queue.Queue[tuple[_Queued, DecodedRequest] | None] = queue.Queue()
        """Requests whose images are decoded; None to stop."""
        self._closed = threading.Event()
        self._answers = ThreadPoolExecutor(1, thread_name_prefix="answers")
        # This starts the thread, which may fail later, when the process has too many.
        self._answers.submit(lambda: None)
        self._threads = [
            threading.Thread(target=self._encode, name="encode", daemon=True),
            threading.Thread(target=self._watch, name="deadlines", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def handle(
        self,
        tensors: Tensors,
        parameters: Mapping[str, Any],
        client_id: str,
        make_responder: Callable[[], Responder],
    ) -> Tensors | VLoraError | None:
        """Return the answer to a request, or an error; None if the request was queued.

        Requests with images are queued, all others are answered at once.

        tensors: inputs with a batch dimension of 1 in front, as Triton passes them: image and
            frames are [1, n]. Answers have this dimension as well. The tensors may become invalid
            after this returns.
        client_id: id of the request. With the input `cancel`, the queued requests that have this id
            are cancelled, and the answer is empty.
        make_responder: called if the request is queued. The responder gets the answer later.
        """
        try:
            if is_cancel(tensors):
                reason = Cancelled(f"the request '{client_id}' was cancelled")
                self._waiting.end_client(client_id, reason)
                return {}
            if self._closed.is_set():
                raise Unavailable("the server is shutting down")
            arrival = self._stamps.read(tensors)
            images = {name: tensors[name] for name in IMAGE_INPUTS if name in tensors}
            if not any(tensor.size for tensor in images.values()):
                read_images(tensors, self._limits)
                (encoded,) = self._encoder.run([[]])
                return self._to_tensors(encoded, arrival)
            # Triton runs `execute` on one thread, so no request is added after this check.
            if len(self._held) >= self._max_requests:
                raise Unavailable(f"the queue is full: {len(self._held)} requests are waiting")
            key = uuid.uuid4().hex
            self._held.hold(key, bytes_of(images))
            try:
                sampling = read_sampling(Inputs(tensors), parameters, self._limits)
                freshness = freshness_of(sampling, arrival)
                request = read_images(tensors, self._limits)
                queued = _Queued(key, adapter_name(sampling), arrival, make_responder())
            except BaseException:
                self._held.release(key)
                raise
            self._waiting.add(key, freshness, partial(self._fail, queued), client_id)
            self._decode(queued, request)
        except Exception as error:
            return as_vlora_error(error, "reading the images")
        return None

    def close(self) -> None:
        """Stop the decoder and the threads. Requests in the queue are answered with Unavailable."""
        self._closed.set()
        self._waiting.end_all(Unavailable("the server is shutting down"))
        self._decoder.close()
        self._decoded.put(None)
        for thread in self._threads:
            thread.join()
        self._answers.shutdown()

    def _decode(self, queued: _Queued, request: ImageRequest) -> None:
        def check() -> None:
            if queued.key not in self._waiting:
                raise Cancelled("the request has ended")

        def done(result: DecodedRequest | Exception) -> None:
            if isinstance(result, DecodedRequest):
                self._decoded.put((queued, result))
            else:
                self._held.release(queued.key)
                self._waiting.end(queued.key, as_vlora_error(result, "decoding an image"))

        try:
            self._decoder.submit(request, done, check)
        except Exception as error:
            done(error)

    def _watch(self) -> None:
        while not self._closed.wait(WATCH_SECONDS):
            self._waiting.end_late()

    def _encode(self) -> None:
        while (first := self._decoded.get()) is not None:
            group = self._collect(first)
            self._encoder.count_group(len(group))
            while group:
                part, group = self._split(group)
                self._encode_part(part)

    def _collect(self, first: tuple[_Queued, DecodedRequest]) -> Decoded:
        """Return the requests to encode next, beginning with `first`.

        These are all requests whose images are decoded now, or become decoded within
        COLLECT_SECONDS after the arrival of `first`.
        """
        group = [first]
        until = first[0].arrival + COLLECT_SECONDS
        while True:
            try:
                following = self._decoded.get(timeout=max(until - time.monotonic(), 0.0))
            except queue.Empty:
                return group
            if following is None:
                self._decoded.put(None)
                return group
            group.append(following)

    def _split(self, group: Decoded) -> tuple[Decoded, Decoded]:
        """Return the first part of a group of requests, and the rest of the group.

        A part has the smallest number of requests that contain at least `images_per_batch` images.
        """
        images = itertools.accumulate(len(decoded.images) for _, decoded in group)
        size = 1 + sum(count < self._encoder.images_per_batch for count in images)
        return group[:size], group[size:]

    def _encode_part(self, part: Decoded) -> None:
        """Encode the requests of a part that have not ended, answer them, and free all pixels."""
        wanted: list[_Queued] = []
        images: list[Sequence[DecodedImage]] = []
        adapters: list[VisionPart | None] = []
        encoded: list[EncodedImages] | VLoraError = []
        try:
            for queued, decoded in part:
                if not self._waiting.take(queued.key):
                    continue
                try:
                    adapters.append(self._part_of(queued.adapter))
                except BaseException as error:  # A panic of a Rust library is not an Exception.
                    self._answers.submit(self._fail, queued, error)
                    continue
                wanted.append(queued)
                images.append(decoded.images)
            if wanted:
                encoded = self._encoder.run(images, adapters)
        except BaseException as error:
            encoded = as_vlora_error(error, "encoding images")
        finally:
            for queued, decoded in part:
                self._held.release(queued.key)
                decoded.release()
        if wanted:
            self._answers.submit(self._answer, wanted, encoded)

    def _answer(
        self, requests: Sequence[_Queued], encoded: Sequence[EncodedImages] | VLoraError
    ) -> None:
        self._before_answers()
        for index, queued in enumerate(requests):
            content: Tensors | VLoraError
            try:
                content = (
                    encoded
                    if isinstance(encoded, VLoraError)
                    else self._to_tensors(encoded[index], queued.arrival)
                )
            except Exception as error:
                content = as_vlora_error(error, "making the answer")
            answer(queued.responder, content)

    @staticmethod
    def _fail(queued: _Queued, error: BaseException) -> None:
        answer(queued.responder, as_vlora_error(error, "encoding images"))

    def _to_tensors(self, encoded: EncodedImages, arrival: float) -> Tensors:
        """Return the model's outputs for one request."""
        tensors = {
            "image_features": encoded.features,
            "image_layout": encoded.layout,
            "image_size": encoded.size,
            "image_digest": strings(encoded.digests),
            ADAPTER_VERSION: strings([encoded.adapter_version]),
            ARRIVAL_INPUT: self._stamps.make(arrival),
        }
        return {name: tensor[None] for name, tensor in tensors.items()}


def read_images(tensors: Tensors, limits: Limits) -> ImageRequest:
    """Return the encoded images of one request. Raises InvalidArgument."""
    if any(tensor.shape[0] != 1 for tensor in tensors.values()):
        raise InvalidArgument("the request has a batch of prompts; send one request per prompt")
    inputs = Inputs(tensors)
    inputs.required_text("text_input", limits.max_prompt_bytes)
    raw = tensors.get("frames_raw")
    # Triton's tensor becomes invalid while the request is in the queue.
    raw = None if raw is None else raw[0].copy()
    return check_images(inputs.strings("image"), inputs.strings("frames"), raw, limits)


def features_from(tensors: Tensors) -> ImageFeatures:
    """Return the features in the outputs of `vision_encoder` for one request."""
    (version,) = tensors[ADAPTER_VERSION][0]
    return ImageFeatures(tensors["image_features"][0], tensors["image_layout"][0], version.decode())
