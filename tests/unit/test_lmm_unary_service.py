"""Tests of the `lmm_unary` model without Triton: one inner request, and its answer or error."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import pytest

from tests.support.fakes import FakeResponder, first
from tests.support.services import UnarySetting
from vlora.errors import Internal, InvalidArgument
from vlora.serving.arrivals import ARRIVAL_INPUT
from vlora.serving.lmm_unary import inner_request
from vlora.serving.tensors import strings


@pytest.fixture
def setting() -> Iterator[UnarySetting]:
    created = UnarySetting()
    yield created
    created.close()


def test_the_response_of_lmm_is_relayed(setting: UnarySetting) -> None:
    setting.answers.append({})  # The empty final response is ignored.
    answer = setting.ask(**{ARRIVAL_INPUT: setting.stamps.make(42.5)}).answer
    assert (first(answer["text_output"]), first(answer["answer"])) == ("answer", "answer")
    assert setting.stamps.read(setting.calls[0][0]) == 42.5
    setting.answers.clear()
    assert isinstance(setting.ask().error, Internal), "`lmm` sent no response"


def test_the_inner_request_has_the_clients_id_if_that_is_long_enough(setting: UnarySetting) -> None:
    for client_id in ("0123456789abcdef", "7"):
        assert setting.ask(client_id).answer
    (_, long), (_, own) = setting.calls
    assert long == "0123456789abcdef"
    assert len(own) >= 16


def test_the_inner_request_is_cancelled_when_the_client_disconnects(setting: UnarySetting) -> None:
    setting.gate.clear()
    responder = FakeResponder(cancelled=True)
    setting.service.handle({"text_input": strings(["q"])}, {}, "", responder)
    assert responder.done.wait(5)
    (_, running), (cancel, cancelled) = setting.calls[:2]
    assert "cancel" in cancel
    assert cancelled == running


def test_an_id_that_others_may_have_cancels_nothing(setting: UnarySetting) -> None:
    setting.occupy()
    waiting = [setting.ask(client_id) for client_id in ("", "a" * 15)]
    for client_id in ("", "a" * 15):
        setting.cancel(client_id)
    assert not any(one.done.is_set() for one in waiting)


def test_the_inner_request_never_streams_and_has_the_clients_sampling_parameters() -> None:
    inner = inner_request({"text_input": strings(["q"])}, {"temperature": 0})
    assert not inner["stream"][0]
    assert json.loads(first(inner["sampling_parameters"])) == {"temperature": 0}
    given = {"text_input": strings(["q"]), "sampling_parameters": strings(["{}"])}
    assert first(inner_request(given, {"temperature": 0})["sampling_parameters"]) == "{}"


def test_metadata_of_an_ensemble_must_be_valid_utf8(setting: UnarySetting) -> None:
    layout = np.zeros((0, 6), np.int32)
    refused = setting.ask(metadata=strings([b"\xff"]), image_layout=layout)
    assert isinstance(refused.error, InvalidArgument)
    assert setting.calls == []
