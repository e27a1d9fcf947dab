"""Tests of the `vision_encoder` model without Triton: its queue, and one answer per request."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.support.fakes import FakeResponder, RustPanic
from tests.support.polling import until
from vlora.config import Limits
from vlora.errors import Cancelled, Internal, InvalidArgument, Unavailable, VLoraError
from vlora.live_requests import RequestTable
from vlora.serving.arrivals import ARRIVAL_INPUT, ArrivalStamps
from vlora.serving.tensors import Tensors, flag, strings
from vlora.serving.vision_encoder import VisionService, features_from
from vlora.vision.adapters import VisionPart
from vlora.vision.decoding import ImageDecoder, OnDone
from vlora.vision.features import EncodedImages
from vlora.vision.images import DecodedImage, ImageRequest


class FakeEncoder:
    """Encodes each image to two rows of width 3.

    gate: the encoder waits for it before it encodes images. parts: images of each request of each
    part.
    """

    def __init__(self) -> None:
        self.parts: list[list[int]] = []
        self.images_per_batch = 16
        self.error: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.groups: list[int] = []

    def count_group(self, requests: int) -> None:
        self.groups.append(requests)

    def run(
        self, batch: Sequence[Sequence[DecodedImage]], parts: Sequence[VisionPart | None] = ()
    ) -> list[EncodedImages]:
        if any(batch):
            self.parts.append([len(images) for images in batch])
            assert self.gate.wait(30)
        if self.error is not None:
            raise self.error
        return [self._one(images) for images in batch]

    def _one(self, images: Sequence[DecodedImage]) -> EncodedImages:
        count = len(images)
        layout = [(2 * i, 2, 1, 1, 2, 0) for i in range(count)]
        return EncodedImages(
            features=np.ones((2 * count, 3), np.float32),
            layout=np.array(layout, np.int32).reshape(-1, 6),
            size=np.array([(i.height, i.width) for i in images], np.int32).reshape(-1, 2),
            digests=("d",) * count,
        )


def png() -> bytes:
    content = io.BytesIO()
    Image.new("RGB", (6, 4)).save(content, "PNG")
    return content.getvalue()


def encoder_request(*images: bytes, **sampling: Any) -> Tensors:
    tensors = {"text_input": strings(["x"])[None]}
    if images:
        tensors["image"] = strings(images)[None]
    if sampling:
        tensors["sampling_parameters"] = strings([json.dumps(sampling)])[None]
    return tensors


@pytest.fixture(scope="module")
def decoder() -> Iterator[ImageDecoder]:
    decoder = ImageDecoder(Limits())
    yield decoder
    decoder.close()


class HeldDecoder:
    """Decodes at once, or holds requests until `release`. decoded: number of decoded requests."""

    def __init__(self, decoder: ImageDecoder) -> None:
        self._decoder = decoder
        self._held: list[Callable[[], None]] = []
        self.holds = False
        self.decoded = 0

    def submit(self, request: ImageRequest, on_done: OnDone, check: Callable[[], None]) -> None:
        def run() -> None:
            try:
                check()
                self.decoded += 1
                on_done(self._decoder.decode(request))
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


class Setting:
    """A service with fakes of the decoder, the encoder and the clients."""

    def __init__(
        self,
        decoder: ImageDecoder,
        part_of: Callable[[str | None], VisionPart | None] = lambda name: None,
        max_bytes: int = 1 << 20,
    ) -> None:
        self.decoder = HeldDecoder(decoder)
        self.encoder = FakeEncoder()
        self.stamps = ArrivalStamps(b"key")
        self.table = RequestTable(max_bytes)
        self.flushed = 0
        self.service = VisionService(
            self.decoder,
            self.encoder,
            Limits(),
            self.stamps,
            self.table,
            max_requests=4,
            before_answers=self._flush,
            part_of=part_of,
        )

    def _flush(self) -> None:
        self.flushed += 1

    def ask(self, tensors: Tensors, client_id: str = "") -> FakeResponder:
        responder = FakeResponder()
        self.service.handle(tensors, {}, client_id, responder)
        return responder

    def occupy(self) -> FakeResponder:
        """Make the encoder work on a request until its gate is opened."""
        self.encoder.gate.clear()
        responder = self.ask(encoder_request(png()))
        until(lambda: self.encoder.parts)
        self.encoder.parts.clear()
        return responder

    def close(self) -> None:
        self.encoder.gate.set()
        self.service.close()


@pytest.fixture
def setting(decoder: ImageDecoder) -> Iterator[Setting]:
    created = Setting(decoder)
    yield created
    created.close()


def answer_of(responder: FakeResponder) -> Tensors:
    assert responder.done.wait(30)
    assert responder.failure is None
    ((tensors, _),) = responder.sent
    return tensors


def failure_of(responder: FakeResponder) -> VLoraError:
    assert responder.done.wait(30)
    assert responder.failure is not None
    return responder.failure


def test_a_corrupt_image_fails_only_its_request(setting: Setting) -> None:
    one, bad, two = map(
        setting.ask, [encoder_request(*images) for images in ([png()], [b"junk"], [png(), png()])]
    )
    assert isinstance(failure_of(bad), InvalidArgument)
    assert features_from(answer_of(one)).features.shape == (2, 3)
    assert features_from(answer_of(two)).features.shape == (4, 3)
    assert answer_of(one)["image_size"].tolist() == [[[4, 6]]]
    assert setting.flushed


def test_requests_are_answered_before_the_images_after_them_are_encoded(setting: Setting) -> None:
    setting.encoder.images_per_batch = 2
    first = setting.occupy()
    rest = [setting.ask(encoder_request(*[png()] * count)) for count in (1, 3, 1)]
    setting.encoder.gate.set()
    answers = [answer_of(one) for one in (first, *rest)]
    assert [features_from(answer).count for answer in answers] == [1, 1, 3, 1]
    assert setting.encoder.parts == [[1, 3], [1]]


def test_requests_that_are_ready_together_share_a_part(setting: Setting) -> None:
    first = setting.occupy()
    requests = [setting.ask(encoder_request(png())) for _ in range(3)]
    setting.encoder.gate.set()
    for one in (first, *requests):
        answer_of(one)
    assert setting.encoder.parts == [[1, 1, 1]]
    assert setting.encoder.groups == [1, 3]


def test_a_request_without_images_is_answered_at_once(setting: Setting) -> None:
    """The encoder is busy meanwhile."""
    setting.occupy()
    answer = answer_of(setting.ask(encoder_request()))
    assert answer["image_features"].shape == (1, 0, 3)
    assert answer["image_layout"].shape == (1, 0, 6)
    assert answer["image_digest"].shape == (1, 0)
    assert setting.stamps.read({ARRIVAL_INPUT: answer[ARRIVAL_INPUT]}) > 0


def test_a_failing_tower_fails_the_requests_of_its_part(setting: Setting) -> None:
    setting.encoder.error = MemoryError("out of memory at 0x1234")
    failure = failure_of(setting.ask(encoder_request(png())))
    assert isinstance(failure, Internal)
    assert "0x1234" not in failure.message
    setting.encoder.error = None
    answer_of(setting.ask(encoder_request(png())))


def test_a_request_needs_a_prompt_and_must_not_be_a_batch(setting: Setting) -> None:
    missing = setting.ask({"image": strings([png()])[None]})
    batched = setting.ask({"text_input": strings(["a", "b"])[:, None]})
    assert "'text_input' is missing" in failure_of(missing).message
    assert isinstance(failure_of(batched), InvalidArgument)


def test_a_deadline_that_passes_in_the_queue_ends_the_request_at_once(setting: Setting) -> None:
    setting.occupy()
    decoded = setting.decoder.decoded
    ready = setting.ask(encoder_request(png(), deadline_ms=50))
    setting.decoder.holds = True
    not_decoded = setting.ask(encoder_request(png(), deadline_ms=50))
    for one in (ready, not_decoded):
        assert "past its deadline: 'deadline_ms' = 50" in failure_of(one).message
    setting.decoder.release()
    setting.encoder.gate.set()
    answer_of(setting.ask(encoder_request(png(), png())))
    assert setting.encoder.parts == [[2]]
    assert setting.decoder.decoded == decoded + 2
    assert setting.table.expired == 2
    assert setting.table.bytes == 0


def test_a_superseded_request_is_neither_decoded_nor_encoded(setting: Setting) -> None:
    setting.occupy()
    setting.decoder.holds = True
    stream = {"stream_id": "camera", "supersede": True}
    *older, newest = [setting.ask(encoder_request(png(), **stream)) for _ in range(3)]
    for one in older:
        assert isinstance(failure_of(one), Cancelled)
    assert setting.table.bytes == 4 * (48 + len(png())), "the decoder still has their bytes"
    setting.decoder.release()
    setting.encoder.gate.set()
    answer_of(newest)
    assert setting.encoder.parts == [[1]]
    assert setting.table.superseded == 2
    assert setting.table.bytes == 0


def test_a_cancelled_request_is_neither_decoded_nor_encoded(setting: Setting) -> None:
    setting.occupy()
    ready = setting.ask(encoder_request(png()), "x" * 16)
    setting.decoder.holds = True
    not_decoded = setting.ask(encoder_request(png()), "x" * 16)
    another = setting.ask(encoder_request(png(), png()), "y" * 16)
    decoded = setting.decoder.decoded
    cancel = setting.ask({"cancel": flag(True)[None]}, "x" * 16)
    assert cancel.sent == [({}, True)]
    for one in (ready, not_decoded):
        assert isinstance(failure_of(one), Cancelled)
    setting.decoder.release()
    setting.encoder.gate.set()
    answer_of(another)
    assert setting.encoder.parts == [[2]]
    assert setting.decoder.decoded == decoded + 1


def test_the_queue_is_bounded_in_requests_and_bytes(decoder: ImageDecoder) -> None:
    setting = Setting(decoder, max_bytes=3 * (48 + len(png())))
    setting.decoder.holds = True
    stream = {"stream_id": "camera", "supersede": True}
    for _ in range(3):
        setting.ask(encoder_request(png(), **stream))
    refused = failure_of(setting.ask(encoder_request(png())))
    assert isinstance(refused, Unavailable)
    assert "'max_in_flight_bytes'" in refused.message
    setting.decoder.release()
    setting.decoder.holds = True
    waiting = [setting.ask(encoder_request(b"x")) for _ in range(4)]
    refused = failure_of(setting.ask(encoder_request(b"x")))
    assert "the queue is full: 4 requests are waiting" in refused.message
    setting.service.close()
    assert all(isinstance(failure_of(one), Unavailable) for one in waiting)
    assert isinstance(failure_of(setting.ask(encoder_request(png()))), Unavailable)


def test_refused_requests_leave_nothing_in_the_queue(setting: Setting) -> None:
    for _ in range(9):
        responder = setting.ask(encoder_request(png(), lora_name=5))
        assert "'lora_name' must be a string" in failure_of(responder).message
    answer_of(setting.ask(encoder_request(png())))


def test_an_answer_that_cannot_be_made_fails_only_its_request(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = setting.occupy()
    second, third = (setting.ask(encoder_request(png())) for _ in range(2))
    until(lambda: setting.decoder.decoded == 3)
    make, left = setting.stamps.make, iter((True, False))

    def fail_once(arrival: float) -> Any:
        if next(left, True):
            return make(arrival)
        raise MemoryError

    monkeypatch.setattr(setting.stamps, "make", fail_once)
    setting.encoder.gate.set()
    answer_of(first)
    assert isinstance(failure_of(second), Internal)
    answer_of(third)


def test_a_panic_while_an_adapter_is_read_fails_only_its_request(decoder: ImageDecoder) -> None:
    def panic(name: str | None) -> VisionPart | None:
        if name is not None:
            raise RustPanic("index out of bounds")
        return None

    setting = Setting(decoder, part_of=panic)
    try:
        failed = setting.ask(encoder_request(png(), lora_name="a"))
        assert isinstance(failure_of(failed), Internal)
        answer_of(setting.ask(encoder_request(png())))
    finally:
        setting.close()


def test_requests_are_answered_while_no_thread_can_be_started(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    for _ in range(2):
        answer_of(setting.ask(encoder_request(png())))
