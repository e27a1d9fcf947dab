"""The `vision_encoder` model without Triton: a queue of requests with images to decode and encode.

Images are decoded in parallel, and encoded in the order in which their pixels are ready. Requests
that are ready together are split into parts, one batch each, and answered while the next part is
encoded (decision 18).
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from vlora.config import Limits
from vlora.errors import Cancelled, InvalidArgument, Unavailable, VLoraError
from vlora.live_requests import RequestTable, State
from vlora.request import ImageFeatures
from vlora.serving.arrivals import ARRIVAL_INPUT, ArrivalStamps
from vlora.serving.codec import (
    ADAPTER_VERSION,
    IMAGE_INPUTS,
    adapter_name,
    freshness_of,
    read_sampling,
)
from vlora.serving.responder import as_vlora_error
from vlora.serving.service import ServedRequest, Service
from vlora.serving.tensors import Inputs, Tensors, bytes_of, strings
from vlora.vision.adapters import VisionPart
from vlora.vision.decoding import DecodedRequest, ImageDecoder
from vlora.vision.features import EncodedImages, EncoderService
from vlora.vision.images import DecodedImage, ImageRequest, check_images

COLLECT_SECONDS = 0.025  # Wait, from a request's arrival, for more to encode with it.


class _Decoded(NamedTuple):
    """A request whose images are decoded, and the name of its adapter or None."""

    request: ServedRequest
    adapter: str | None
    content: DecodedRequest


class VisionService(Service):
    """Answers requests of `vision_encoder`. It owns the decoder and two more threads.

    Inputs and answers have a batch dimension of 1 in front: image and frames are [1, n].

    max_requests: maximum number of requests in the queue.
    before_answers: called before the answers of a part are sent.
    part_of: returns an adapter's part for the vision tower, or None. May raise a VLoraError.
    """

    action = "reading the images"
    watch_seconds = 0.05
    asks_clients = False

    def __init__(
        self,
        decoder: ImageDecoder,
        encoder: EncoderService,
        limits: Limits,
        stamps: ArrivalStamps,
        table: RequestTable,
        max_requests: int,
        before_answers: Callable[[], None] = lambda: None,
        part_of: Callable[[str | None], VisionPart | None] = lambda name: None,
    ) -> None:
        self._decoder = decoder
        self._encoder = encoder
        self._max_requests = max_requests
        self._before_answers = before_answers
        self._part_of = part_of
        # Requests whose images are decoded; None to stop.
        self._decoded: queue.Queue[_Decoded | None] = queue.Queue()
        self._answers = ThreadPoolExecutor(1, thread_name_prefix="answers")
        # This starts the thread, which may fail later, when the process has too many.
        self._answers.submit(lambda: None)
        super().__init__(table, limits, stamps)
        self._encoding = threading.Thread(target=self._encode, name="encode", daemon=True)
        self._encoding.start()

    def close(self) -> None:
        """Stop the decoder and the threads. Requests in the queue are answered with Unavailable."""
        super().close()
        self._decoder.close()
        self._decoded.put(None)
        self._encoding.join()
        self._answers.shutdown()

    def _start(
        self, request: ServedRequest, tensors: Tensors, parameters: Mapping[str, Any]
    ) -> None:
        self._check_open()
        arrival = self._stamps.read(tensors)
        images = {name: tensors[name] for name in IMAGE_INPUTS if name in tensors}
        if not any(tensor.size for tensor in images.values()):
            read_images(tensors, self._limits)
            (encoded,) = self._encoder.run([[]])
            request.answer(self._to_tensors(encoded, arrival))
            return
        if len(self.table) >= self._max_requests:
            raise Unavailable(f"the queue is full: {len(self.table)} requests are waiting")
        self.table.add(request, bytes_of(images))
        sampling = read_sampling(Inputs(tensors), parameters, self._limits)
        freshness = freshness_of(sampling, arrival)
        self.table.share(request, freshness.cache_salt, self._max_requests - len(self.table) + 1)
        images_to_decode = read_images(tensors, self._limits)
        adapter = adapter_name(sampling)
        # The decoder has the images until it drops them, even if the request ends before.
        self.table.wait(request, freshness, pinned=True)
        self._decode(request, adapter, images_to_decode)

    def _decode(self, request: ServedRequest, adapter: str | None, images: ImageRequest) -> None:
        def check() -> None:
            if request.state is not State.WAITING:
                raise Cancelled("the request has ended")

        def done(result: DecodedRequest | Exception) -> None:
            if isinstance(result, DecodedRequest):
                self._decoded.put(_Decoded(request, adapter, result))
            else:
                request.pinned = False
                self.table.end(request, as_vlora_error(result, "decoding an image"))

        try:
            self._decoder.submit(images, done, check)
        except Exception as error:
            done(error)

    def _encode(self) -> None:
        while (first := self._decoded.get()) is not None:
            group = self._collect(first)
            self._encoder.count_group(len(group))
            while group:
                part, group = self._split(group)
                self._encode_part(part)

    def _collect(self, first: _Decoded) -> list[_Decoded]:
        """Return `first` and the requests decoded until COLLECT_SECONDS after its arrival."""
        group = [first]
        until = first.request.freshness.arrival + COLLECT_SECONDS
        while True:
            try:
                following = self._decoded.get(timeout=max(until - time.monotonic(), 0.0))
            except queue.Empty:
                return group
            if following is None:
                self._decoded.put(None)
                return group
            group.append(following)

    def _split(self, group: list[_Decoded]) -> tuple[list[_Decoded], list[_Decoded]]:
        """Return the fewest requests that have `images_per_batch` images, and the others."""
        images = itertools.accumulate(len(one.content.images) for one in group)
        size = 1 + sum(count < self._encoder.images_per_batch for count in images)
        return group[:size], group[size:]

    def _encode_part(self, part: list[_Decoded]) -> None:
        wanted: list[ServedRequest] = []
        images: list[Sequence[DecodedImage]] = []
        adapters: list[VisionPart | None] = []
        encoded: list[EncodedImages] | VLoraError = []
        try:
            for request, adapter, content in part:
                if not self.table.take(request):
                    continue
                request.moved_on = True
                try:
                    adapters.append(self._part_of(adapter))
                except BaseException as error:  # A panic of a Rust library is not an Exception.
                    error = as_vlora_error(error, "encoding images")
                    self._answers.submit(request.fail, error)
                    continue
                wanted.append(request)
                images.append(content.images)
            if wanted:
                salts = [request.freshness.cache_salt for request in wanted]
                encoded = self._encoder.run(images, adapters, salts)
        except BaseException as error:
            encoded = as_vlora_error(error, "encoding images")
        finally:
            for request, _, content in part:
                self.table.remove(request)
                content.release()
        if wanted:
            self._answers.submit(self._answer, wanted, encoded)

    def _answer(
        self, requests: Sequence[ServedRequest], encoded: Sequence[EncodedImages] | VLoraError
    ) -> None:
        self._before_answers()
        for index, request in enumerate(requests):
            request.action = "making the answer"
            try:
                if isinstance(encoded, VLoraError):
                    raise encoded
                request.answer(self._to_tensors(encoded[index], request.freshness.arrival))
            except Exception as error:
                request.fail(error)

    def _to_tensors(self, encoded: EncodedImages, arrival: float) -> Tensors:
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
