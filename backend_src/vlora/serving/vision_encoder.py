"""The `vision_encoder` model without Triton: a queue of requests with images to decode and encode.

Images are decoded in parallel, and encoded in the order in which their requests are ready. Requests
that are ready together are split into batches, and answered while the next batch is encoded
(decision 18). A request with more images than a batch waits for others after each batch.
"""

from __future__ import annotations

import itertools
import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from vlora.config import Limits
from vlora.errors import (
    AdapterChanging,
    Cancelled,
    InvalidArgument,
    Unavailable,
    Unsupported,
    VLoraError,
)
from vlora.live_requests import RequestTable, State
from vlora.request import Clip, FloatArray, ImageFeatures
from vlora.sampling import MediaOptions
from vlora.serving.arrivals import ARRIVAL_INPUT, ArrivalStamps
from vlora.serving.codec import (
    ADAPTER_VERSION,
    IMAGE_INPUTS,
    VIDEOS,
    adapter_name,
    describe_videos,
    freshness_of,
    read_sampling,
    read_videos,
)
from vlora.serving.responder import as_vlora_error
from vlora.serving.service import ServedRequest, Service
from vlora.serving.tensors import Inputs, Tensors, bytes_of, strings
from vlora.vision.decoding import ImageDecoder
from vlora.vision.features import EncodedImages, EncoderService, ReadyImage, RequestImages
from vlora.vision.images import ImageRequest, check_images

if TYPE_CHECKING:  # Processes that only call the encoder do without torch.
    from vlora.vision.adapters import VisionPart

log = logging.getLogger(__name__)

COLLECT_SECONDS = 0.025  # Wait, from a request's arrival, for more to encode with it.
# Maximum time from a request's arrival for which it waits for an adapter that is being changed. A
# change takes effect within 5 s if the machine is not busy.
CHANGE_SECONDS = 10.0


@dataclass(eq=False)
class _Decoded:
    """A request whose images and videos are decoded, and the features of images that are encoded
    already.
    """

    request: ServedRequest
    images: Sequence[ReadyImage]
    videos: Sequence[Clip]
    features: list[FloatArray] = field(default_factory=list)
    error: VLoraError | None = None
    is_taken: bool = False

    @property
    def images_left(self) -> int:
        return len(self.images) - len(self.features)


_Batch = list[tuple[_Decoded, Sequence[ReadyImage]]]  # Requests with images to encode together.


class VisionService(Service):
    """Answers requests of `vision_encoder`. It owns the decoder and two more threads.

    Inputs and answers have a batch dimension of 1 in front: image and frames are [1, n].

    max_requests: maximum number of requests in the queue.
    before_answers: called before the answers of a batch are sent.
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
        self._part_lock = threading.Lock()
        # Requests whose images are decoded; None to stop.
        self._decoded: queue.Queue[_Decoded | None] = queue.Queue()
        # Calls that decode the images of a request whose adapter is being changed.
        self._postponed: deque[Callable[[], None]] = deque()
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
            read_images(tensors, {}, self._limits)
            encoded = self._encoder.assemble([], [])
            request.answer(self._to_tensors(encoded, arrival))
            return
        if len(self.table) >= self._max_requests:
            raise Unavailable(f"the queue is full: {len(self.table)} requests are waiting")
        self.table.add(request, bytes_of(images))
        sampling = read_sampling(Inputs(tensors), parameters, self._limits)
        freshness = freshness_of(sampling, arrival)
        self.table.share(request, freshness.cache_salt, self._max_requests - len(self.table) + 1)
        images_to_decode = read_images(tensors, sampling, self._limits)
        if images_to_decode.has_files:
            require_video_reader()
        adapter = adapter_name(sampling)
        # The decoder has the images until it drops them, even if the request ends before.
        self.table.wait(request, freshness, pinned=True)
        self._decode(request, adapter, images_to_decode)

    def _decode(self, request: ServedRequest, adapter: str | None, images: ImageRequest) -> None:
        found: list[RequestImages] = []
        last_try = request.freshness.arrival + CHANGE_SECONDS

        def begin() -> RequestImages:
            if request.state is not State.WAITING:
                raise Cancelled("the request has ended")
            if not found:
                with self._part_lock:
                    part = self._part_of(adapter)
                salt = request.freshness.cache_salt
                found.append(self._encoder.receive(part, hold, salt, images.options))
            return found[0]

        def hold(size: int) -> None:
            self.table.resize(request, request.size + size)

        def done(error: BaseException | None) -> None:
            if error is None:
                self._decoded.put(_Decoded(request, found[0].images, found[0].videos))
            elif isinstance(error, AdapterChanging) and time.monotonic() < last_try:
                self._postponed.append(partial(self._decode, request, adapter, images))
            else:
                request.pinned = False
                self.table.end(request, as_vlora_error(error, "decoding an image"))

        try:
            self._decoder.submit(images, begin, done)
        except Exception as error:
            done(error)

    def retry(self) -> None:
        for _ in range(len(self._postponed)):
            self._postponed.popleft()()

    def _encode(self) -> None:
        group: list[_Decoded] = []
        while (arrived := self._collect(wait=not group)) is not None:
            if arrived:
                self._encoder.count_group(len(arrived))
            group += arrived
            batch = self._next_batch(group)
            self._encode_batch(batch)
            # Those with further images go to the end, so that others need not wait for all of them.
            group += [one for one, _ in batch if one.images_left and one.error is None]

    def _take(self, decoded: _Decoded) -> bool:
        if decoded.is_taken or self.table.take(decoded.request):
            decoded.is_taken = decoded.request.moved_on = True
            return True
        self.table.remove(decoded.request)
        return False

    def _collect(self, wait: bool) -> list[_Decoded] | None:
        """Return requests whose images are decoded; None once the service is closed.

        wait: whether to wait for the first, and for others until COLLECT_SECONDS after its arrival.
        """
        group: list[_Decoded] = []
        until = math.inf if wait else 0.0
        while True:
            seconds = until - time.monotonic()
            try:
                following = self._decoded.get(
                    timeout=max(seconds, 0.0) if seconds < math.inf else None
                )
            except queue.Empty:
                return group
            if following is None:
                if group:
                    self._decoded.put(None)
                return group or None
            if wait and not group:
                until = following.request.freshness.arrival + COLLECT_SECONDS
            group.append(following)

    def _next_batch(self, group: list[_Decoded]) -> _Batch:
        """Remove the first requests. Return them with their next images, enough for one batch."""
        batch: _Batch = []
        free = self._encoder.images_per_batch
        while group and free:
            one = group.pop(0)
            if not self._take(one):
                continue
            images = one.images[len(one.features) :][:free]
            free -= len(images)
            batch.append((one, images))
        return batch

    def _encode_batch(self, batch: _Batch) -> None:
        """Encode a batch. Answer those of its requests that are complete or have failed."""
        try:
            encoded = iter(self._encoder.encode([image for _, images in batch for image in images]))
            for one, images in batch:
                one.features += itertools.islice(encoded, len(images))
        except BaseException as error:
            for one, _ in batch:
                one.error = as_vlora_error(error, "encoding images")
        done = [one for one, _ in batch if one.error is not None or not one.images_left]
        for one in done:
            self.table.remove(one.request)
        if done:
            self._answers.submit(self._answer, done)

    def _answer(self, requests: Sequence[_Decoded]) -> None:
        self._before_answers()
        for one in requests:
            one.request.action = "making the answer"
            try:
                if one.error is not None:
                    raise one.error
                encoded = self._encoder.assemble(one.images, one.features, one.videos)
                one.request.answer(self._to_tensors(encoded, one.request.freshness.arrival))
            except Exception as error:
                one.request.fail(error)

    def _to_tensors(self, encoded: EncodedImages, arrival: float) -> Tensors:
        tensors = {
            "image_features": encoded.features,
            "image_layout": encoded.layout,
            "image_size": encoded.size,
            "image_digest": strings(encoded.digests),
            ADAPTER_VERSION: strings([encoded.adapter_version]),
            VIDEOS: strings([describe_videos(encoded.videos)]),
            ARRIVAL_INPUT: self._stamps.make(arrival),
        }
        return {name: tensor[None] for name, tensor in tensors.items()}


@cache
def _has_video_reader() -> bool:
    if find_spec("av") is not None:
        return True
    log.warning("requests with video files are refused: package 'av' is missing (vlora[video])")
    return False


def require_video_reader() -> None:
    """Raise Unsupported if the package that reads video files is missing. The log says so once."""
    if not _has_video_reader():
        raise Unsupported(
            "this server cannot read video files, because package 'av' is missing; install"
            " vlora[video], or send 'frames'"
        )


def read_images(tensors: Tensors, sampling: Mapping[str, Any], limits: Limits) -> ImageRequest:
    """Return the encoded images of one request. Raises InvalidArgument."""
    if any(tensor.shape[0] != 1 for tensor in tensors.values()):
        raise InvalidArgument("the request has a batch of prompts; send one request per prompt")
    inputs = Inputs(tensors)
    inputs.required_text("text_input", limits.max_prompt_bytes)
    raw = tensors.get("frames_raw")
    # Triton's tensor becomes invalid while the request is in the queue.
    raw = None if raw is None else raw[0].copy()
    images, videos, frames = (inputs.strings(name) for name in IMAGE_INPUTS[:3])
    return check_images(images, frames, raw, limits, videos, MediaOptions.parse(sampling))


def features_from(tensors: Tensors) -> ImageFeatures:
    """Return the features in the outputs of `vision_encoder` for one request."""
    features, layout = tensors["image_features"][0], tensors["image_layout"][0]
    ((version,), (videos,)) = (tensors[name][0] for name in (ADAPTER_VERSION, VIDEOS))
    return ImageFeatures(features, layout, version.decode(), read_videos(videos.decode()))
