"""The `vision_encoder` model without Triton: a batch of requests in, an answer to each out."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from PIL import Image

from vlora.config import Limits
from vlora.errors import Internal, InvalidArgument, VLoraError
from vlora.serving.tensors import Tensors, strings
from vlora.serving.vision_encoder import Answers, Decoder, VisionService, features_from
from vlora.vision.decoder import ImageDecoder, OnDone, OnSlow
from vlora.vision.features import EncodedImages
from vlora.vision.images import DecodedImage, ImageRequest


class FakeEncoder:
    """Encodes each image to two rows of width 3."""

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.images_per_batch = 16
        self.error: Exception | None = None

    def run(self, batch: Sequence[Sequence[DecodedImage]]) -> list[EncodedImages]:
        self.batches.append(len(batch))
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


def encoder_request(*images: bytes) -> Tensors:
    tensors = {"text_input": strings(["x"])[None]}
    return {**tensors, "image": strings(images)[None]} if images else tensors


@pytest.fixture(scope="module")
def decoder() -> Iterator[ImageDecoder]:
    decoder = ImageDecoder(Limits())
    yield decoder
    decoder.close()


class HeldDecoder:
    """Decodes on the caller's thread, but holds the requests in `held` until they are released.

    slow: whether the held requests are reported as slow.
    """

    def __init__(self, decoder: ImageDecoder, held: set[int], slow: bool = False) -> None:
        self._decoder = decoder
        self._held = held
        self._slow = slow
        self._count = 0
        self.release = threading.Event()

    def submit(self, request: ImageRequest, on_slow: OnSlow, on_done: OnDone) -> None:
        index, self._count = self._count, self._count + 1
        if index not in self._held:
            on_done(self._decoder.decode(request))
            return
        if self._slow:
            on_slow()

        def later() -> None:
            self.release.wait(30)
            on_done(self._decoder.decode(request))

        threading.Thread(target=later).start()

    def close(self) -> None:
        self.release.set()


def encoded(
    batch: Sequence[Tensors | VLoraError], encoder: FakeEncoder, decoder: Decoder
) -> list[Tensors | VLoraError]:
    """Return the answers in the order of the requests; check that each request has one."""
    answers: dict[int, Tensors | VLoraError] = {}

    def send(part: Answers) -> None:
        assert part
        assert not answers.keys() & part.keys()
        answers.update(part)

    last = VisionService(decoder, encoder, Limits()).answer(batch, send)
    assert not answers.keys() & last.keys()
    answers |= last
    return [answers[index] for index in range(len(batch))]


def test_a_corrupt_image_fails_only_its_request(decoder: ImageDecoder) -> None:
    encoder = FakeEncoder()
    batch = [encoder_request(png()), encoder_request(b"junk"), encoder_request(png(), png())]
    one, bad, two = encoded(batch, encoder, decoder)
    assert isinstance(bad, InvalidArgument)
    assert sum(encoder.batches) == 2
    assert not isinstance(one, VLoraError)
    assert not isinstance(two, VLoraError)
    assert features_from(one).features.shape == (2, 3)
    assert features_from(two).features.shape == (4, 3)
    assert one["image_size"].tolist() == [[[4, 6]]]


def test_requests_are_answered_before_the_images_after_them_are_encoded(
    decoder: ImageDecoder,
) -> None:
    encoder = FakeEncoder()
    encoder.images_per_batch = 2
    sent: list[tuple[set[int], int]] = []

    def run(batch: list[Tensors | VLoraError]) -> set[int]:
        encoder.batches.clear()
        sent.clear()
        service = VisionService(HeldDecoder(decoder, set()), encoder, Limits())
        return set(service.answer(batch, lambda a: sent.append((set(a), sum(encoder.batches)))))

    batch = [encoder_request(*[png()] * count) for count in (1, 1, 3, 1, 0)]
    assert run([*batch, encoder_request(b"junk")]) == {3}
    # Requests that need no decoding are answered first; the one without images is a batch here.
    assert sent == [({4, 5}, 1), ({0, 1}, 3), ({2}, 4)]
    assert run([encoder_request(), encoder_request(b"junk"), encoder_request()]) == {0, 1, 2}
    assert sent == []


def test_a_batch_does_not_wait_for_slow_requests(decoder: ImageDecoder) -> None:
    """Slow requests are answered later, on another thread, each once."""
    encoder = FakeEncoder()
    held = HeldDecoder(decoder, {0, 2}, slow=True)
    late: dict[int, Tensors | VLoraError] = {}
    answered = threading.Event()

    def send(answers: Answers) -> None:
        assert not late.keys() & answers.keys()
        late.update(answers)
        if {0, 2} <= late.keys():
            answered.set()

    service = VisionService(held, encoder, Limits())
    batch = [encoder_request(png()) for _ in range(4)]
    answers = {**service.answer(batch, send)}
    assert not held.release.is_set()
    assert set(answers) | set(late) == {1, 3}
    late.clear()
    held.release.set()
    assert answered.wait(30)
    assert set(late) == {0, 2}
    assert not any(isinstance(answer, VLoraError) for answer in late.values())
    service.close()


def test_a_batch_waits_for_requests_that_are_not_slow(decoder: ImageDecoder) -> None:
    held = HeldDecoder(decoder, {0})
    timer = threading.Timer(0.1, held.release.set)
    timer.start()
    answers = encoded([encoder_request(png()) for _ in range(2)], FakeEncoder(), held)
    assert len(answers) == 2
    timer.join()


def test_a_request_without_images_gets_zero_rows(decoder: ImageDecoder) -> None:
    (answer,) = encoded([encoder_request()], FakeEncoder(), decoder)
    assert not isinstance(answer, VLoraError)
    assert answer["image_features"].shape == (1, 0, 3)
    assert answer["image_layout"].shape == (1, 0, 6)
    assert answer["image_digest"].shape == (1, 0)


def test_a_failing_tower_fails_the_valid_requests_of_the_batch(decoder: ImageDecoder) -> None:
    encoder = FakeEncoder()
    encoder.error = MemoryError("out of memory at 0x1234")
    sound, bad = encoded([encoder_request(png()), encoder_request(b"x")], encoder, decoder)
    assert isinstance(sound, Internal)
    assert "0x1234" not in sound.message
    assert isinstance(bad, InvalidArgument)


def test_a_request_needs_a_prompt_and_must_not_be_a_batch(decoder: ImageDecoder) -> None:
    missing, batched = encoded(
        [{"image": strings([png()])[None]}, {"text_input": strings(["a", "b"])[:, None]}],
        FakeEncoder(),
        decoder,
    )
    assert isinstance(missing, InvalidArgument)
    assert "'text_input' is missing" in missing.message
    assert isinstance(batched, InvalidArgument)
