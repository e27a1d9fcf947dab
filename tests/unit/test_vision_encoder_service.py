"""The `vision_encoder` model without Triton: a batch of requests in, an answer to each out."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
from PIL import Image

from vlora.config import Limits
from vlora.errors import Internal, InvalidArgument, VLoraError
from vlora.serving.tensors import Tensors, strings
from vlora.serving.vision_encoder import Answers, encode_batch, features_from
from vlora.vision.features import EncodedImages
from vlora.vision.images import DecodedImage


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


def encoded(
    batch: Sequence[Tensors | VLoraError], encoder: FakeEncoder, limits: Limits | None = None
) -> list[Tensors | VLoraError]:
    """Return the answers in the order of the requests; check that each request has one."""
    answers: dict[int, Tensors | VLoraError] = {}

    def send(part: Answers) -> None:
        assert part
        assert not answers.keys() & part.keys()
        answers.update(part)

    last = encode_batch(batch, encoder, limits or Limits(), send)
    assert not answers.keys() & last.keys()
    answers |= last
    return [answers[index] for index in range(len(batch))]


def test_a_corrupt_image_fails_only_its_request() -> None:
    encoder = FakeEncoder()
    batch = [encoder_request(png()), encoder_request(b"junk"), encoder_request(png(), png())]
    one, bad, two = encoded(batch, encoder)
    assert isinstance(bad, InvalidArgument)
    assert encoder.batches == [2]
    assert not isinstance(one, VLoraError)
    assert not isinstance(two, VLoraError)
    assert features_from(one).features.shape == (2, 3)
    assert features_from(two).features.shape == (4, 3)
    assert one["image_size"].tolist() == [[[4, 6]]]


def test_a_batch_with_too_many_pixels_is_encoded_in_parts() -> None:
    encoder = FakeEncoder()
    limits = Limits(max_batch_megapixels=2 * 24e-6)  # two images
    batch = [encoder_request(*[png()] * count) for count in (1, 1, 0, 1, 3, 1)]
    batch.insert(1, encoder_request(b"junk"))
    answers = encoded(batch, encoder, limits)
    assert sorted(encoder.batches) == [
        1,
        1,
        1,
        1,
        2,
    ]  # one part is that of the request without images
    shapes = [None if isinstance(a, VLoraError) else a["image_features"].shape[1] for a in answers]
    assert shapes == [2, None, 2, 0, 2, 6, 2]


def test_requests_are_answered_before_the_images_after_them_are_encoded() -> None:
    encoder = FakeEncoder()
    encoder.images_per_batch = 2
    sent: list[tuple[set[int], int]] = []

    def run(batch: list[Tensors | VLoraError]) -> set[int]:
        encoder.batches.clear()
        sent.clear()
        last = encode_batch(
            batch,
            encoder,
            Limits(),
            lambda found: sent.append((set(found), sum(encoder.batches))),
        )
        return set(last)

    batch = [encoder_request(*[png()] * count) for count in (1, 1, 3, 1, 0)]
    # Requests without readable images are answered with the next part.
    assert run([*batch, encoder_request(b"junk")]) == {3}
    assert sent == [({0, 1}, 2), ({2, 4, 5}, 4)]
    assert run([encoder_request(), encoder_request(b"junk"), encoder_request()]) == {0, 1, 2}
    assert sent == []
    assert run([encoder_request(png()), encoder_request(png())]) == {0, 1}
    assert sent == []


def test_a_request_without_images_gets_zero_rows() -> None:
    (answer,) = encoded([encoder_request()], FakeEncoder())
    assert not isinstance(answer, VLoraError)
    assert answer["image_features"].shape == (1, 0, 3)
    assert answer["image_layout"].shape == (1, 0, 6)
    assert answer["image_digest"].shape == (1, 0)


def test_a_failing_tower_fails_the_valid_requests_of_the_batch() -> None:
    encoder = FakeEncoder()
    encoder.error = MemoryError("out of memory at 0x1234")
    sound, bad = encoded([encoder_request(png()), encoder_request(b"x")], encoder)
    assert isinstance(sound, Internal)
    assert "0x1234" not in sound.message
    assert isinstance(bad, InvalidArgument)


def test_a_request_needs_a_prompt_and_must_not_be_a_batch() -> None:
    missing, batched = encoded(
        [{"image": strings([png()])[None]}, {"text_input": strings(["a", "b"])[:, None]}],
        FakeEncoder(),
    )
    assert isinstance(missing, InvalidArgument)
    assert "'text_input' is missing" in missing.message
    assert isinstance(batched, InvalidArgument)
