"""Tests of the `lmm` model without Triton: answers, errors and cancellation."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.support.fakes import TEMPLATE, FakeEngine, FakeResponder, RustPanic, adapter, features
from tests.support.polling import until
from vlora.config import Limits
from vlora.errors import Cancelled, Internal, InvalidArgument, NotFound, Unavailable
from vlora.live_requests import RequestTable
from vlora.request import ImageFeatures, Output, OutputSink, Request
from vlora.serving.arrivals import ARRIVAL_INPUT, ArrivalStamps
from vlora.serving.lmm import LONG_PROMPT, LmmService
from vlora.serving.tensors import Tensors, flag, strings
from vlora.vision.prompts import render

HELLO = {"text_input": strings(["hello"])}


class Setting:
    """A service with fakes of the engine, the encoder and the client."""

    def __init__(self, limits: Limits | None = None, *, routes: bool = False) -> None:
        limits = limits or Limits()
        self.engine = FakeEngine(
            adapter("a"),
            adapter("h", head=("raw",)),
            adapter("finder", ("refer",)),
            table=RequestTable(limits.max_in_flight_bytes),
        )
        self.pool = ThreadPoolExecutor(1)
        self.encoded: list[Tensors] = []
        self.encoded_ids: list[str] = []
        self.encode_error: Exception | None = None
        self.observed: list[Output] = []
        self.passed_on: list[str] = []
        self.gate = threading.Event()
        self.gate.set()
        self.stamps = ArrivalStamps(b"key")
        self.service = LmmService(
            self.engine,
            TEMPLATE,
            limits,
            self.encode,
            self.pool,
            self.stamps,
            observe=lambda: self.observed.append,
            cancel_elsewhere=self.passed_on.append,
            routes=routes,
            describe=lambda: '{"tasks": []}',
        )

    def encode(self, tensors: Tensors, request_id: str) -> ImageFeatures:
        self.encoded.append(tensors)
        self.encoded_ids.append(request_id)
        assert self.gate.wait(5)
        if self.encode_error is not None:
            raise self.encode_error
        created = features(2)
        return ImageFeatures(created["image_features"], created["image_layout"])

    def ask(self, client_id: str = "", **tensors: np.ndarray) -> FakeResponder:
        responder = FakeResponder()
        self.service.handle({**HELLO, **tensors}, {}, client_id, responder)
        return responder


@pytest.fixture
def setting() -> Iterator[Setting]:
    created = Setting()
    yield created
    created.gate.set()
    created.service.close()
    created.pool.shutdown()


def test_an_answer_streams_and_ends_with_the_final_flag(setting: Setting) -> None:
    responder = setting.ask(stream=flag(True))
    setting.engine.say("a")
    setting.engine.say("b", finish_reason="stop")
    assert responder.texts == ["a", "b"]
    assert [final for _, final in responder.sent] == [False, True]
    assert not setting.engine.table
    assert [output.text for output in setting.observed] == ["a", "b"]


def test_every_request_gets_a_new_id_in_addition_to_the_clients(setting: Setting) -> None:
    for _ in range(2):
        setting.ask(client_id="1")
    first, second = setting.engine.requests
    assert first.id != second.id
    assert [entry.client_id for entry in setting.engine.table] == ["1", "1"]


def test_typed_errors_of_the_engine_reach_the_client(setting: Setting) -> None:
    for error in (Unavailable("full"), NotFound("who"), InvalidArgument("long")):
        setting.engine.refuse = error
        assert setting.ask().failure is error
    assert not setting.engine.table


def test_an_unknown_adapter_is_not_found(setting: Setting) -> None:
    responder = setting.ask(sampling_parameters=strings(['{"lora_name": "unknown"}']))
    assert isinstance(responder.failure, NotFound)


ENSEMBLE = {"image_layout": np.zeros((0, 6), np.int32)}


def test_an_adapter_is_chosen_only_for_requests_of_the_ensemble_that_leave_it_open() -> None:
    setting = Setting(routes=True)
    question = {"text_input": strings(["a question"])}
    try:
        setting.ask(**question, **ENSEMBLE)
        setting.ask(**question)
        named = strings(['{"lora_name": null}'])
        setting.ask(**question, **ENSEMBLE, sampling_parameters=named)
        setting.ask(text_input=strings(["unknown question"]), **ENSEMBLE)
        adapters = [request.adapter for request in setting.engine.requests]
        assert adapters == ["a", None, None, None]
    finally:
        setting.service.close()
        setting.pool.shutdown()


def test_an_unexpected_exception_becomes_an_internal_error_without_details(
    setting: Setting,
) -> None:
    setting.encode_error = ZeroDivisionError("secret")
    responder = setting.ask(image=strings([b"png"]))
    assert responder.done.wait(5)
    assert isinstance(responder.failure, Internal)
    assert "secret" not in responder.failure.message


def test_an_error_of_the_engine_ends_the_request(setting: Setting) -> None:
    responder = setting.ask(stream=flag(True))
    setting.engine.say("a")
    setting.engine.fail(Cancelled("stopped"))
    assert isinstance(responder.failure, Cancelled)
    assert not setting.engine.table


def test_images_are_encoded_on_another_thread_before_the_request_is_submitted(
    setting: Setting,
) -> None:
    setting.ask(image=strings([b"png"]), task=strings(["vqa"]))
    until(lambda: setting.engine.requests)
    (request,) = setting.engine.requests
    assert set(setting.encoded[0]) == {"text_input", "image", ARRIVAL_INPUT}
    # The encoder and the engine count from the same arrival.
    assert setting.stamps.read(setting.encoded[0]) == request.arrival
    assert request.prompt.count("<image>") == 1
    assert request.images is not None


def test_a_long_prompt_is_prepared_on_another_thread(setting: Setting) -> None:
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
    long = setting.ask(text_input=strings(["x" * (LONG_PROMPT + 1)]), client_id="a-long-request-id")
    assert tokenizing.wait(5)
    setting.ask()
    assert len(setting.engine.requests) == 1
    setting.gate.set()
    until(lambda: len(setting.engine.requests) == 2)
    assert not setting.encoded
    setting.engine.say("done", finish_reason="stop")
    assert long.done.wait(5)
    assert long.texts[0].endswith("done")


def test_a_long_prompt_that_waits_is_cancelled(setting: Setting) -> None:
    setting.gate.clear()
    setting.ask(image=strings([b"png"]))
    until(lambda: setting.encoded)
    long = setting.ask("a-long-request-id", text_input=strings(["x" * (LONG_PROMPT + 1)]))
    setting.ask("a-long-request-id", cancel=flag(True))
    assert isinstance(long.failure, Cancelled)
    setting.gate.set()
    until(lambda: setting.engine.requests)
    assert len(setting.engine.requests) == 1


def test_an_error_of_the_encoder_fails_the_request(setting: Setting) -> None:
    setting.encode_error = InvalidArgument("image 0 is corrupt")
    responder = setting.ask(image=strings([b"png"]))
    assert responder.done.wait(5)
    assert responder.failure is setting.encode_error


def test_a_request_is_aborted_when_its_client_disconnects(setting: Setting) -> None:
    responder = setting.ask(stream=flag(True))
    responder.cancelled = True
    until(lambda: setting.engine.aborted)
    assert set(setting.engine.aborted) == {setting.engine.requests[0].id}
    assert isinstance(responder.failure, Cancelled)


def test_a_response_that_cannot_be_sent_aborts_its_request(setting: Setting) -> None:
    responder = setting.ask(stream=flag(True))
    responder.broken = True
    setting.engine.say("a")
    assert setting.engine.aborted == [setting.engine.requests[0].id]
    assert not setting.engine.table


def test_a_cancel_request_passes_the_client_id_and_gets_an_empty_final_response(
    setting: Setting,
) -> None:
    responder = FakeResponder()
    setting.service.handle({"cancel": flag(True)}, {}, "x" * 16, responder)
    assert setting.engine.stopped == ["x" * 16]
    assert responder.sent == [({}, True)]


def test_a_cancel_request_that_the_engine_rejects_gets_the_error(setting: Setting) -> None:
    setting.engine.refuse = InvalidArgument("too short")
    responder = FakeResponder()
    setting.service.handle({"cancel": flag(True)}, {}, "x" * 15, responder)
    assert responder.failure is setting.engine.refuse


def test_the_description_is_sent_even_if_the_queue_is_full(setting: Setting) -> None:
    setting.engine.max_admitted = 0
    responder = setting.ask(describe=flag(True))
    ((tensors, final),) = responder.sent
    assert final
    assert tensors["details"].tolist() == strings(['{"tasks": []}']).tolist()


def test_the_task_auto_is_the_one_that_an_ensemble_chooses(setting: Setting) -> None:
    for name in ("null", '"finder"'):
        sampling = strings([f'{{"lora_name": {name}}}'])
        setting.ask(task=strings(["auto"]), sampling_parameters=sampling)
    prompts = [request.prompt for request in setting.engine.requests]
    assert prompts == [render(task, "hello", 0, 0, TEMPLATE) for task in ("vqa", "refer")]


def test_a_closed_service_rejects_requests_as_unavailable(setting: Setting) -> None:
    setting.service.close()
    assert isinstance(setting.ask().failure, Unavailable)


def test_a_head_request_is_marked_for_the_engine(setting: Setting) -> None:
    responder = setting.ask(sampling_parameters=strings(['{"lora_name": "h"}']))
    assert setting.engine.requests[0].use_head
    setting.engine.answer_with_head(("cat", "dog"), (0.1, 0.9))
    assert responder.texts == ["hellodog"]


IMAGE = {"image": strings([b"png"])}


def test_a_full_queue_rejects_a_request_before_reading_it(setting: Setting) -> None:
    setting.engine.max_admitted = 0
    responder = setting.ask(stream=np.zeros(7), image_features=np.zeros((3, 3)))
    assert isinstance(responder.failure, Unavailable)
    assert "the queue is full" in responder.failure.message


def test_images_that_wait_for_the_encoder_count_as_waiting(setting: Setting) -> None:
    setting.gate.clear()
    setting.engine.max_admitted = 2
    waiting = [setting.ask(**IMAGE) for _ in range(2)]
    refused = setting.ask(**IMAGE)
    assert isinstance(refused.failure, Unavailable)
    assert refused.failure.message == "the queue is full: 2 requests are waiting"
    setting.gate.set()
    until(lambda: len(setting.engine.requests) == 2)
    assert not any(responder.done.is_set() for responder in waiting)
    assert isinstance(setting.ask(**IMAGE).failure, type(None))


def test_a_request_that_fails_early_leaves_the_queue(setting: Setting) -> None:
    assert setting.ask(task=strings(["fly"])).failure is not None
    assert setting.ask(sampling_parameters=strings(['{"lora_name": "unknown"}'])).failure
    setting.engine.refuse = InvalidArgument("the prompt is too long")
    assert setting.ask().failure is setting.engine.refuse
    assert not setting.engine.admitted


@pytest.mark.parametrize("index", [0, 1], ids=["being encoded", "waiting for the encoder"])
def test_a_request_with_the_encoder_ends_at_once_when_its_client_disconnects(
    setting: Setting, index: int
) -> None:
    setting.gate.clear()
    responders = [setting.ask(**IMAGE) for _ in range(2)]
    until(lambda: setting.encoded)
    responders[index].cancelled = True
    assert responders[index].done.wait(5)
    assert isinstance(responders[index].failure, Cancelled)
    assert setting.engine.admitted == 1
    setting.gate.set()
    until(lambda: setting.engine.requests)
    setting.pool.submit(lambda: None).result()
    assert len(setting.engine.requests) == 1
    assert len(setting.encoded) == 2 - index
    if index == 0:
        until(lambda: setting.passed_on == setting.encoded_ids[:1])


def test_a_request_with_the_encoder_ends_at_once_when_it_is_cancelled_by_its_id(
    setting: Setting,
) -> None:
    setting.gate.clear()
    responder = setting.ask(client_id="x" * 16, **IMAGE)
    setting.service.handle({"cancel": flag(True)}, {}, "x" * 16, FakeResponder())
    assert isinstance(responder.failure, Cancelled)
    assert setting.engine.stopped == [], "a later request of this id is another one"
    until(lambda: setting.passed_on == ["x" * 16, *setting.encoded_ids])


def test_a_cancellation_is_passed_on_to_the_other_models(setting: Setting) -> None:
    setting.service.handle({"cancel": flag(True)}, {}, "x" * 16, FakeResponder())
    until(lambda: setting.passed_on == ["x" * 16])


def test_a_request_that_is_late_or_superseded_before_the_encoder_ends_at_once(
    setting: Setting,
) -> None:
    def ask(**sampling: object) -> FakeResponder:
        return setting.ask(**IMAGE, sampling_parameters=strings([json.dumps(sampling)]))

    setting.gate.clear()
    setting.ask(**IMAGE)
    until(lambda: setting.encoded)
    late = ask(deadline_ms=20)
    older = ask(stream_id="s")
    newer = ask(stream_id="s", supersede=True)
    for ended in (late, older):
        assert ended.done.wait(5)
        assert isinstance(ended.failure, Cancelled)
    setting.gate.set()
    until(lambda: len(setting.engine.requests) == 2)
    assert newer.failure is None
    first, second = setting.encoded
    assert "sampling_parameters" not in first
    keys = json.loads(second["sampling_parameters"][0])
    assert keys == {"stream_id": "s", "supersede": True}, "the encoder can end it as well"


def test_closing_ends_requests_that_wait_for_the_encoder(setting: Setting) -> None:
    setting.gate.clear()
    responders = [setting.ask(**IMAGE) for _ in range(3)]
    setting.service.close()
    assert all(isinstance(responder.failure, Unavailable) for responder in responders)


def test_text_that_is_not_valid_utf8_is_rejected_with_and_without_an_image(
    setting: Setting,
) -> None:
    for image in ({}, IMAGE):
        for text in (r'{"lora_name": "\ud800"}', r'{"\ud800": 1}', r'{"choices": ["\ud800"]}'):
            responder = setting.ask(sampling_parameters=strings([text]), **image)
            assert responder.done.wait(5)
            assert isinstance(responder.failure, InvalidArgument), text


def test_the_bytes_of_requests_in_flight_are_limited() -> None:
    setting = Setting(Limits(max_in_flight_bytes=1200))
    setting.gate.clear()
    waiting = [setting.ask(image=strings([b"x" * 400])) for _ in range(2)]
    refused = setting.ask(image=strings([b"x" * 400]))
    assert isinstance(refused.failure, Unavailable)
    assert "1002 bytes" in refused.failure.message
    assert "this one has 501; the limit is 1200" in refused.failure.message
    too_large = setting.ask(image=strings([b"x" * 1200]))
    assert isinstance(too_large.failure, InvalidArgument)
    setting.service.close()
    assert all(isinstance(responder.failure, Unavailable) for responder in waiting)
    assert setting.engine.table.bytes == 0
    setting.gate.set()
    setting.pool.shutdown()


def test_too_many_images_are_refused_before_they_wait(setting: Setting) -> None:
    responder = setting.ask(image=strings([b""] * 64), frames=strings([b""]))
    assert isinstance(responder.failure, InvalidArgument)
    assert "65 images and frames; the limit is 64" in responder.failure.message
    assert setting.encoded == []


def test_a_request_that_has_ended_holds_no_bytes(setting: Setting) -> None:
    setting.ask(image=strings([b"x" * 400]))
    until(lambda: setting.engine.requests)
    assert setting.engine.table.bytes == features(2)["image_features"].nbytes
    setting.engine.say("a", finish_reason="stop")
    assert setting.engine.table.bytes == 0


@pytest.mark.parametrize("with_image", [False, True])
def test_a_panic_of_a_library_fails_its_request(setting: Setting, *, with_image: bool) -> None:
    """The request is submitted on Triton's thread, and with an image on a pool thread."""
    image = {"image": strings([b"png"])} if with_image else {}
    setting.engine.refuse = RustPanic("stride must be less than max_len")
    responder = setting.ask(**image)
    assert responder.done.wait(5)
    assert isinstance(responder.failure, Internal)
    until(lambda: not setting.engine.table)
    setting.engine.refuse = None
    setting.ask(**image)
    until(lambda: setting.engine.requests)
