"""Tests of the `lmm` model without Triton: answers, errors and cancellation."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.support.fakes import TEMPLATE, RustPanic, features
from tests.support.polling import until
from tests.support.services import PICTURE, LmmSetting
from vlora.errors import (
    Cancelled,
    Internal,
    InvalidArgument,
    NotFound,
    VLoraError,
)
from vlora.request import OutputSink, Request
from vlora.serving.arrivals import ARRIVAL_INPUT
from vlora.serving.lmm import LONG_PROMPT
from vlora.serving.tensors import flag, strings
from vlora.vision.prompts import render

LONG = {"text_input": strings(["x" * (LONG_PROMPT + 1)])}


@pytest.fixture
def setting() -> Iterator[LmmSetting]:
    created = LmmSetting()
    yield created
    created.close()


def test_an_answer_streams_and_ends_with_the_final_flag(setting: LmmSetting) -> None:
    responder = setting.ask(stream=flag(True))
    setting.engine.say("a")
    setting.engine.say("b", finish_reason="stop")
    assert responder.texts == ["a", "b"]
    assert [final for _, final in responder.sent] == [False, True]
    assert not setting.table
    assert [output.text for output in setting.observed] == ["a", "b"]


def test_a_request_that_fails_early_leaves_the_queue(setting: LmmSetting) -> None:
    assert isinstance(setting.ask(sampling={"lora_name": "unknown"}).failure, NotFound)
    assert isinstance(setting.ask(task=strings(["fly"])).failure, InvalidArgument)
    too_many = setting.ask(image=strings([b""] * 64), frames=strings([b""])).error
    assert "65 images and frames; the limit is 64" in too_many.message
    assert setting.encoded == []
    assert not setting.table


def test_an_adapter_is_chosen_only_for_requests_of_the_ensemble_that_leave_it_open() -> None:
    setting = LmmSetting(routes=True)
    question = {"text_input": strings(["a question"])}
    ensemble = {"image_layout": np.zeros((0, 6), np.int32)}
    try:
        setting.ask(**question, **ensemble)
        setting.ask(**question)
        setting.ask(**question, **ensemble, sampling={"lora_name": None})
        setting.ask(text_input=strings(["unknown question"]), **ensemble)
        adapters = [request.adapter for request in setting.engine.requests]
        assert adapters == ["a", None, None, None]
    finally:
        setting.close()


@pytest.mark.parametrize(
    "error", [ZeroDivisionError("secret"), InvalidArgument("image 0 is corrupt")]
)
def test_an_error_of_the_encoder_fails_the_request_without_internal_details(
    setting: LmmSetting, error: Exception
) -> None:
    setting.encode_error = error
    failure = setting.wait().error
    if isinstance(error, VLoraError):
        assert failure is error
    else:
        assert isinstance(failure, Internal)
        assert "secret" not in failure.message


def test_an_error_of_the_engine_ends_the_request(setting: LmmSetting) -> None:
    responder = setting.ask(stream=flag(True))
    setting.engine.say("a")
    setting.engine.fail(Cancelled("stopped"))
    assert isinstance(responder.failure, Cancelled)
    assert not setting.table


def test_images_are_encoded_on_another_thread_before_the_request_is_submitted(
    setting: LmmSetting,
) -> None:
    setting.ask(image=strings([PICTURE]), task=strings(["vqa"]))
    stream = {"stream_id": "s", "supersede": True}
    setting.ask(image=strings([PICTURE]), sampling={"max_tokens": 3, **stream})
    until(lambda: len(setting.engine.requests) == 2)
    request = setting.engine.requests[0]
    plain, terms = setting.encoded
    assert set(plain) == {"text_input", "image", ARRIVAL_INPUT}
    # The encoder and the engine count from the same arrival.
    assert setting.stamps.read(plain) == request.arrival
    assert request.prompt.count("<image>") == 1
    assert request.images is not None
    assert json.loads(terms["sampling_parameters"][0]) == stream, "the encoder can end it as well"


def test_a_long_prompt_is_prepared_on_another_thread(setting: LmmSetting) -> None:
    """Triton hands all requests over on one thread, and tokenizing a long prompt takes long."""
    tokenizing = threading.Event()
    submit = setting.engine.submit

    def slow_for_long_prompts(request: Request, sink: OutputSink) -> None:
        if len(request.prompt) > LONG_PROMPT:
            tokenizing.set()
            assert setting.gate.wait(5)
        submit(request, sink)

    setting.engine.submit = slow_for_long_prompts  # type: ignore[method-assign]
    setting.gate.clear()
    long = setting.ask(**LONG)
    assert tokenizing.wait(5)
    setting.ask()
    assert len(setting.engine.requests) == 1
    setting.gate.set()
    until(lambda: len(setting.engine.requests) == 2)
    assert not setting.encoded
    setting.engine.say("done", finish_reason="stop")
    assert long.done.wait(5)
    assert long.texts[0].endswith("done")


def test_a_long_prompt_that_waits_is_cancelled(setting: LmmSetting) -> None:
    setting.occupy()
    long = setting.ask("a-long-request-id", **LONG)
    setting.cancel("a-long-request-id")
    assert isinstance(long.failure, Cancelled)
    setting.gate.set()
    until(lambda: setting.engine.requests)
    assert len(setting.engine.requests) == 1


def test_a_response_that_cannot_be_sent_aborts_its_request(setting: LmmSetting) -> None:
    responder = setting.ask(stream=flag(True))
    responder.broken = True
    setting.engine.say("a")
    assert setting.engine.aborted == [setting.engine.requests[0].id]
    assert not setting.table


def test_a_cancel_request_is_passed_on_and_gets_an_empty_final_response(
    setting: LmmSetting,
) -> None:
    assert setting.cancel("x" * 16).answer == {}
    assert setting.engine.stopped == ["x" * 16]
    until(lambda: setting.passed_on == ["x" * 16])
    setting.engine.refuse = InvalidArgument("too short")
    assert setting.cancel("x" * 15).failure is setting.engine.refuse


def test_the_description_is_sent_even_if_the_queue_is_full(setting: LmmSetting) -> None:
    setting.engine.max_admitted = 0
    answer = setting.ask(describe=flag(True)).answer
    assert answer["details"].tolist() == strings(['{"tasks": []}']).tolist()


def test_the_task_auto_is_the_one_that_an_ensemble_chooses(setting: LmmSetting) -> None:
    for name in (None, "finder"):
        setting.ask(task=strings(["auto"]), sampling={"lora_name": name})
    prompts = [request.prompt for request in setting.engine.requests]
    assert prompts == [render(task, "hello", 0, 0, TEMPLATE) for task in ("vqa", "refer")]


@pytest.mark.parametrize("by_its_id", [False, True])
def test_a_request_that_is_being_encoded_ends_at_once_and_the_encoder_is_notified(
    setting: LmmSetting, *, by_its_id: bool
) -> None:
    setting.gate.clear()
    responder = setting.wait("x" * 16)
    until(lambda: setting.encoded)
    if by_its_id:
        setting.cancel("x" * 16)
        assert setting.engine.stopped == [], "a later request of this id is another one"
    else:
        responder.cancelled = True
    assert isinstance(responder.error, Cancelled)
    until(lambda: setting.passed_on == ["x" * 16] * by_its_id + setting.encoded_ids)
    setting.gate.set()
    setting.pool.submit(lambda: None).result()
    assert setting.engine.requests == []


def test_a_request_that_has_ended_holds_no_bytes(setting: LmmSetting) -> None:
    setting.wait(size=400)
    until(lambda: setting.engine.requests)
    assert setting.table.bytes == features(2)["image_features"].nbytes
    setting.engine.say("a", finish_reason="stop")
    assert setting.table.bytes == 0


@pytest.mark.parametrize("ask", [LmmSetting.ask, LmmSetting.wait])
def test_a_panic_of_a_library_fails_its_request(setting: LmmSetting, ask: Any) -> None:
    """The request is submitted on Triton's thread, and with an image on a pool thread."""
    setting.engine.refuse = RustPanic("stride must be less than max_len")
    assert isinstance(ask(setting).error, Internal)
    until(lambda: not setting.table)
    setting.engine.refuse = None
    ask(setting)
    until(lambda: setting.engine.requests)
