"""The `lmm` model without Triton: life of a request, errors, cancellation."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from tests.fakes import TEMPLATE, FakeEngine, FakeResponder, adapter, features
from vlora.config import Limits
from vlora.errors import Cancelled, Internal, InvalidArgument, NotFound, Unavailable
from vlora.request import ImageFeatures, Output
from vlora.serving.lmm import LmmService
from vlora.serving.tensors import Tensors, flag, strings

HELLO = {"text_input": strings(["hello"])}


class Setting:
    """A service with a fake on each side."""

    def __init__(self) -> None:
        self.engine = FakeEngine(adapter("a"), adapter("h", head=("raw",)))
        self.pool = ThreadPoolExecutor(1)
        self.encoded: list[Tensors] = []
        self.encode_error: Exception | None = None
        self.recorded: list[Output] = []
        self.service = LmmService(
            self.engine, TEMPLATE, Limits(), self.encode, self.pool, self.recorded.append
        )

    def encode(self, tensors: Tensors) -> ImageFeatures:
        self.encoded.append(tensors)
        if self.encode_error is not None:
            raise self.encode_error
        made = features(2)
        return ImageFeatures(made["image_features"], made["image_layout"])

    def ask(self, client_id: str = "", **tensors: np.ndarray) -> FakeResponder:
        responder = FakeResponder()
        self.service.handle({**HELLO, **tensors}, {}, client_id, responder)
        return responder


@pytest.fixture
def setting() -> Iterator[Setting]:
    made = Setting()
    yield made
    made.service.close()
    made.pool.shutdown()


def eventually(holds: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 5
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_an_answer_streams_and_ends_with_the_final_flag(setting: Setting) -> None:
    responder = setting.ask(stream=flag(True))
    setting.engine.say("a")
    setting.engine.say("b", finish_reason="stop")
    assert responder.texts == ["a", "b"]
    assert [final for _, final in responder.sent] == [False, True]
    assert setting.service.live == 0
    assert len(setting.recorded) == 1


def test_every_request_has_an_id_of_its_own_beside_the_clients(setting: Setting) -> None:
    for _ in range(2):
        setting.ask(client_id="1")
    first, second = setting.engine.requests
    assert first.id != second.id
    assert first.client_id == second.client_id == "1"


def test_refusals_reach_the_client_typed(setting: Setting) -> None:
    for error in (Unavailable("full"), NotFound("who"), InvalidArgument("long")):
        setting.engine.refuse = error
        assert setting.ask().failure is error
    assert setting.service.live == 0


def test_an_unknown_adapter_is_not_found(setting: Setting) -> None:
    responder = setting.ask(sampling_parameters=strings(['{"lora_name": "nobody"}']))
    assert isinstance(responder.failure, NotFound)


def test_a_fault_of_ours_is_internal_and_tells_no_detail(setting: Setting) -> None:
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
    assert setting.service.live == 0


def test_images_go_to_the_encoder_on_another_thread_and_come_back_as_features(
    setting: Setting,
) -> None:
    setting.ask(image=strings([b"png"]), task=strings(["vqa"]))
    eventually(lambda: setting.engine.requests)
    (request,) = setting.engine.requests
    assert set(setting.encoded[0]) == {"text_input", "image"}
    assert request.prompt.count("<image>") == 1
    assert request.images is not None


def test_an_error_of_the_encoder_is_the_requests(setting: Setting) -> None:
    setting.encode_error = InvalidArgument("image 0 is corrupt")
    responder = setting.ask(image=strings([b"png"]))
    assert responder.done.wait(5)
    assert responder.failure is setting.encode_error


def test_a_client_that_goes_away_aborts_its_request(setting: Setting) -> None:
    responder = setting.ask(stream=flag(True))
    responder.cancelled = True
    eventually(lambda: setting.engine.aborted)
    assert set(setting.engine.aborted) == {setting.engine.requests[0].id}
    assert isinstance(responder.failure, Cancelled)


def test_a_response_that_cannot_be_sent_aborts_its_request(setting: Setting) -> None:
    responder = setting.ask(stream=flag(True))
    responder.broken = True
    setting.engine.say("a")
    assert setting.engine.aborted == [setting.engine.requests[0].id]
    assert setting.service.live == 0


def test_stop_names_the_client_and_gets_an_empty_final_response(setting: Setting) -> None:
    responder = FakeResponder()
    setting.service.handle({"stop": flag(True)}, {}, "x" * 16, responder)
    assert setting.engine.stopped == ["x" * 16]
    assert responder.sent == [({}, True)]


def test_a_stop_that_the_engine_refuses_is_told(setting: Setting) -> None:
    setting.engine.refuse = InvalidArgument("too short")
    responder = FakeResponder()
    setting.service.handle({"stop": flag(True)}, {}, "x" * 15, responder)
    assert responder.failure is setting.engine.refuse


def test_a_closed_service_is_unavailable(setting: Setting) -> None:
    setting.service.close()
    assert isinstance(setting.ask().failure, Unavailable)


def test_a_head_request_is_marked_for_the_engine(setting: Setting) -> None:
    responder = setting.ask(sampling_parameters=strings(['{"lora_name": "h"}']))
    assert setting.engine.requests[0].use_head
    setting.engine.answer_with_head(("cat", "dog"), (0.1, 0.9))
    assert responder.texts == ["hellodog"]
