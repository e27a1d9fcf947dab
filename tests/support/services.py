"""The services of `lmm`, `lmm_unary` and `vision_encoder`, with fakes of all that they call."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.support.fakes import TEMPLATE, FakeEngine, FakeResponder, adapter, features
from tests.support.polling import until
from vlora.config import Limits
from vlora.live_requests import RequestTable
from vlora.request import Clip, ImageFeatures, Output
from vlora.serving.arrivals import ArrivalStamps
from vlora.serving.lmm import LmmService
from vlora.serving.lmm_unary import LmmUnaryService
from vlora.serving.service import Service
from vlora.serving.tenant_pool import TenantPool
from vlora.serving.tensors import Tensors, flag, strings
from vlora.serving.vision_encoder import VisionService
from vlora.vision.adapters import VisionPart
from vlora.vision.decoding import Begin, OnDone
from vlora.vision.features import EncodedImages
from vlora.vision.images import DecodedImage, ImageRequest

MAX_BYTES = 10_000
"""Limit of the bytes of a service's requests."""


PICTURE = b"\x89PNG\r\n\x1a\n"
"""An image of which only the length counts: no service here decodes it."""


class Setting:
    """A service and its clients. Its work on a request waits for `gate`.

    threads: number of requests on which it works at the same time.
    full: number of requests that wait, as its error says, when its queue is full.
    """

    service: Service
    table: RequestTable
    threads = 1
    full = 2

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.stamps = ArrivalStamps(b"key")

    @property
    def begun(self) -> int:
        """Number of requests on which the service has begun to work."""
        raise NotImplementedError

    def send(self, tensors: Tensors, client_id: str = "") -> FakeResponder:
        responder = FakeResponder()
        self.service.handle(tensors, {}, client_id, responder)
        return responder

    def ask(
        self, client_id: str = "", *, sampling: Any = None, **tensors: np.ndarray
    ) -> FakeResponder:
        """Send a request. sampling: the input `sampling_parameters`, as an object."""
        if sampling is not None:
            tensors["sampling_parameters"] = strings([json.dumps(sampling)])
        return self.send({"text_input": strings(["hello"]), **tensors}, client_id)

    def wait(self, client_id: str = "", size: int = 0, **sampling: Any) -> FakeResponder:
        """Send a request that waits for a thread, with an image that is `size` bytes longer."""
        image = strings([PICTURE + bytes(size)])
        return self.ask(client_id, sampling=sampling or None, image=image)

    def cancel(self, client_id: str) -> FakeResponder:
        return self.send({"cancel": flag(True)}, client_id)

    def occupy(self) -> list[FakeResponder]:
        """Give each thread a request to work on until the gate is opened."""
        self.gate.clear()
        before = self.begun
        working = [self.wait() for _ in range(self.threads)]
        until(lambda: self.begun == before + self.threads)
        return working

    def close(self) -> None:
        self.gate.set()
        self.service.close()


class LmmSetting(Setting):
    """`lmm` with an engine and an encoder, which the requests with images wait for."""

    full = 3

    def __init__(self, *, routes: bool = False) -> None:
        super().__init__()
        self.table = RequestTable(MAX_BYTES)
        self.engine = FakeEngine(adapter("a"), adapter("finder", ("refer",)), table=self.table)
        self.engine.max_admitted = self.full
        self.pool = TenantPool(self.threads, "encode")
        self.encoded: list[Tensors] = []
        self.encoded_ids: list[str] = []
        self.encode_error: Exception | None = None
        self.observed: list[Output] = []
        self.passed_on: list[str] = []
        self.service = LmmService(
            self.engine,
            TEMPLATE,
            Limits(),
            self._encode,
            self.pool,
            self.stamps,
            observe=lambda adapter: self.observed.append,
            cancel_elsewhere=self.passed_on.append,
            routes=routes,
            describe=lambda: '{"tasks": []}',
        )

    @property
    def begun(self) -> int:
        return len(self.encoded)

    def _encode(self, tensors: Tensors, request_id: str) -> ImageFeatures:
        self.encoded.append(tensors)
        self.encoded_ids.append(request_id)
        assert self.gate.wait(30)
        if self.encode_error is not None:
            raise self.encode_error
        created = features(2)
        return ImageFeatures(created["image_features"], created["image_layout"])

    def close(self) -> None:
        super().close()
        self.pool.shutdown()


class UnarySetting(Setting):
    """`lmm_unary` with an `lmm` that sends `answers`, or raises `error`."""

    threads = 2

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Tensors, str]] = []
        self.answers: list[Tensors] = [{"text_output": strings(["answer"])}]
        self.error: Exception | None = None
        self.pool = TenantPool(self.threads, "relay")
        self.table = RequestTable(MAX_BYTES)
        limits = self.threads + self.full, self.threads
        self.service = LmmUnaryService(
            self._lmm, self.pool, Limits(), self.stamps, self.table, *limits
        )

    @property
    def begun(self) -> int:
        return len(self.calls)

    def _lmm(self, tensors: Tensors, request_id: str) -> list[Tensors]:
        self.calls.append((tensors, request_id))
        if "cancel" in tensors:
            self.gate.set()
            return []
        assert self.gate.wait(30)
        if self.error is not None:
            raise self.error
        return self.answers

    def close(self) -> None:
        super().close()
        self.pool.shutdown()


class FakeEncoder:
    """Encodes each image to two rows of width 3.

    gate: the encoder waits for it before it encodes images. parts: images of each request of each
    part.
    """

    def __init__(self, gate: threading.Event) -> None:
        self.parts: list[list[int]] = []
        self.images_per_batch = 16
        self.error: Exception | None = None
        self.groups: list[int] = []
        self._gate = gate

    def count_group(self, requests: int) -> None:
        self.groups.append(requests)

    def receive(
        self,
        part: VisionPart | None,
        hold: Callable[[int], None],
        salt: str | None,
        options: object,
    ) -> Any:
        return SimpleNamespace(images=[], videos=())

    def encode(self, images: Sequence[DecodedImage]) -> list[str]:
        runs = groupby(images, key=lambda image: image.view)
        self.parts.append([len(list(own)) for _, own in runs])
        assert self._gate.wait(30)
        if self.error is not None:
            raise self.error
        return ["features"] * len(images)

    def assemble(
        self, images: Sequence[DecodedImage], features: Sequence[str], videos: Sequence[Clip] = ()
    ) -> EncodedImages:
        assert len(images) == len(features)
        count = len(images)
        layout = [(2 * i, 2, 1, 1, 2, 0) for i in range(count)]
        return EncodedImages(
            features=np.ones((2 * count, 3), np.float32),
            layout=np.array(layout, np.int32).reshape(-1, 6),
            size=np.array([(i.height, i.width) for i in images], np.int32).reshape(-1, 2),
            digests=("d",) * count,
        )


class HeldDecoder:
    """Decodes all images to 6 x 4 pixels at once, or holds requests until `release`.

    decoded: number of requests that were decoded. It is the view of their images.
    """

    def __init__(self) -> None:
        self._held: list[Callable[[], None]] = []
        self.holds = False
        self.decoded = 0

    def submit(self, request: ImageRequest, begin: Begin, on_done: OnDone) -> None:
        def run() -> None:
            try:
                pictures: Any = begin()
                self.decoded += 1
                image = DecodedImage(np.zeros((4, 6, 3), np.uint8), view=str(self.decoded))
                pictures.images += [image] * len(request)
                on_done(None)
            except Exception as error:
                on_done(error)

        if self.holds:
            self._held.append(run)
        else:
            run()

    def release(self) -> None:
        self.holds = False
        while self._held:
            self._held.pop(0)()

    def close(self) -> None:
        self.release()


class VisionSetting(Setting):
    """`vision_encoder` with a decoder and an encoder. Its inputs have a batch dimension."""

    full = 8

    def __init__(
        self, part_of: Callable[[str | None], VisionPart | None] = lambda name: None
    ) -> None:
        super().__init__()
        self.decoder = HeldDecoder()
        self.encoder = FakeEncoder(self.gate)
        self.table = RequestTable(MAX_BYTES)
        self.flushed = 0
        self.service = VisionService(
            self.decoder,
            self.encoder,
            Limits(),
            self.stamps,
            self.table,
            max_requests=self.full,
            before_answers=self._flush,
            part_of=part_of,
        )

    def _flush(self) -> None:
        self.flushed += 1

    @property
    def begun(self) -> int:
        return sum(map(len, self.encoder.parts))

    def send(self, tensors: Tensors, client_id: str = "") -> FakeResponder:
        return super().send({name: tensor[None] for name, tensor in tensors.items()}, client_id)

    def encode(self, *images: bytes, client_id: str = "", **sampling: Any) -> FakeResponder:
        """Send a request with these images."""
        return self.ask(client_id, sampling=sampling or None, image=strings(images))
