"""Tests of the `vision_encoder` model without Triton: its queue, and one answer per request."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.fakes import RustPanic
from tests.support.polling import until
from tests.support.services import PICTURE, Setting, VisionSetting
from vlora.errors import Cancelled, Internal
from vlora.serving.arrivals import ARRIVAL_INPUT
from vlora.serving.tensors import strings
from vlora.serving.vision_encoder import features_from
from vlora.vision.adapters import VisionPart


@pytest.fixture
def setting() -> Iterator[VisionSetting]:
    created = VisionSetting()
    yield created
    created.close()


def test_requests_are_answered_before_the_images_after_them_are_encoded(
    setting: VisionSetting,
) -> None:
    setting.encoder.images_per_batch = 2
    first = setting.occupy()
    rest = [setting.encode(*[PICTURE] * count) for count in (1, 3, 1)]
    setting.gate.set()
    assert [features_from(one.answer).count for one in (*first, *rest)] == [1, 1, 3, 1]
    assert setting.encoder.parts == [[1], [1, 3], [1]]


def test_requests_that_are_ready_together_share_a_part(setting: VisionSetting) -> None:
    setting.occupy()
    requests = [setting.encode(PICTURE) for _ in range(3)]
    setting.gate.set()
    for one in requests:
        assert features_from(one.answer).features.shape == (2, 3)
        assert one.answer["image_size"].tolist() == [[[4, 6]]]
    assert setting.flushed
    assert setting.encoder.parts == [[1], [1, 1, 1]]
    assert setting.encoder.groups == [1, 3]


def test_a_request_without_images_is_answered_while_the_encoder_is_busy(
    setting: VisionSetting,
) -> None:
    setting.occupy()
    answer = setting.ask().answer
    assert answer["image_features"].shape == (1, 0, 3)
    assert answer["image_layout"].shape == (1, 0, 6)
    assert answer["image_digest"].shape == (1, 0)
    assert setting.stamps.read({ARRIVAL_INPUT: answer[ARRIVAL_INPUT]}) > 0


def test_a_failing_tower_fails_the_requests_of_its_part(setting: VisionSetting) -> None:
    setting.encoder.error = MemoryError("out of memory at 0x1234")
    failure = setting.encode(PICTURE).error
    assert isinstance(failure, Internal)
    assert "0x1234" not in failure.message
    setting.encoder.error = None
    assert setting.encode(PICTURE).answer


def test_a_refused_request_leaves_nothing_in_the_queue(setting: VisionSetting) -> None:
    missing = setting.send({"image": strings([PICTURE])}).error
    assert "'text_input' is missing" in missing.message
    batch = Setting.send(setting, {"text_input": strings(["a", "b"])[:, None]}).error
    assert "send one request per prompt" in batch.message
    for _ in range(setting.full + 1):
        refused = setting.encode(PICTURE, lora_name=5).error
        assert "'lora_name' must be a string" in refused.message
    assert setting.encode(PICTURE).answer


@pytest.mark.parametrize("ending", ["late", "superseded", "cancelled"])
def test_a_request_that_ends_in_the_queue_is_neither_decoded_nor_encoded(
    setting: VisionSetting, ending: str
) -> None:
    terms: dict[str, Any] = {"late": {"deadline_ms": 50}, "superseded": {"stream_id": "camera"}}
    setting.occupy()
    ready = setting.encode(PICTURE, client_id="x" * 16, **terms.get(ending, {}))
    decoded = setting.decoder.decoded
    setting.decoder.holds = True
    not_decoded = setting.encode(PICTURE, client_id="x" * 16, **terms.get(ending, {}))
    supersedes = {"supersede": True, **terms["superseded"]} if ending == "superseded" else {}
    newest = setting.encode(PICTURE, PICTURE, client_id="y" * 16, **supersedes)
    if ending == "cancelled":
        setting.cancel("x" * 16)
    assert isinstance(ready.error, Cancelled)
    assert isinstance(not_decoded.error, Cancelled)
    assert setting.table.bytes == 5 * (48 + len(PICTURE)), "the decoder still has their bytes"
    setting.decoder.release()
    setting.gate.set()
    assert newest.answer
    assert setting.encoder.parts == [[1], [2]]
    assert setting.decoder.decoded == setting.decoder.released == decoded + 1
    assert setting.table.bytes == 0


def test_an_answer_that_cannot_be_made_fails_only_its_request(
    setting: VisionSetting, monkeypatch: pytest.MonkeyPatch
) -> None:
    (first,) = setting.occupy()
    second, third = (setting.encode(PICTURE) for _ in range(2))
    until(lambda: setting.decoder.decoded == 3)
    make, left = setting.stamps.make, iter((True, False))

    def fail_once(arrival: float) -> Any:
        if next(left, True):
            return make(arrival)
        raise MemoryError

    monkeypatch.setattr(setting.stamps, "make", fail_once)
    setting.gate.set()
    assert first.answer
    assert isinstance(second.error, Internal)
    assert third.answer


def test_a_panic_while_an_adapter_is_read_fails_only_its_request() -> None:
    def panic(name: str | None) -> VisionPart | None:
        if name is not None:
            raise RustPanic("index out of bounds")
        return None

    setting = VisionSetting(part_of=panic)
    try:
        assert isinstance(setting.encode(PICTURE, lora_name="a").error, Internal)
        assert setting.encode(PICTURE).answer
    finally:
        setting.close()


def test_requests_are_answered_while_no_thread_can_be_started(
    setting: VisionSetting, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    for _ in range(2):
        assert setting.encode(PICTURE).answer
