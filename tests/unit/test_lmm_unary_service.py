"""`lmm_unary` without Triton: one inner request, its answer or its error."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.fakes import FakeResponder, first
from vlora.errors import Internal, InvalidArgument, NotFound
from vlora.serving.lmm_unary import LmmUnaryService, inner_request
from vlora.serving.tensors import Tensors, flag, strings

ANSWER = {"text_output": strings(["answer"])}


class Inner:
    """Plays `lmm`."""

    def __init__(self) -> None:
        self.asked: list[tuple[Tensors, str]] = []
        self.answers: list[Tensors] = [ANSWER]
        self.error: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, tensors: Tensors, request_id: str) -> list[Tensors]:
        self.asked.append((tensors, request_id))
        if "stop" in tensors:
            self.gate.set()
            return []
        assert self.gate.wait(5)
        if self.error is not None:
            raise self.error
        return self.answers


@pytest.fixture
def inner() -> Inner:
    return Inner()


@pytest.fixture
def service(inner: Inner) -> Iterator[LmmUnaryService]:
    with ThreadPoolExecutor(2) as pool:
        made = LmmUnaryService(inner, pool)
        yield made
        made.close()


def ask(service: LmmUnaryService, client_id: str = "", **tensors: np.ndarray) -> FakeResponder:
    responder = FakeResponder()
    service.handle({"text_input": strings(["q"]), **tensors}, {}, client_id, responder)
    assert responder.done.wait(5)
    return responder


def test_it_relays_the_one_response(service: LmmUnaryService, inner: Inner) -> None:
    inner.answers = [ANSWER, {}]  # an empty final one does not count
    assert ask(service).sent == [(ANSWER, True)]


def test_it_raises_the_error_that_lmm_gave(service: LmmUnaryService, inner: Inner) -> None:
    inner.error = NotFound("unknown adapter")
    assert ask(service).failure is inner.error


def test_no_response_at_all_is_a_fault_of_ours(service: LmmUnaryService, inner: Inner) -> None:
    inner.answers = []
    assert isinstance(ask(service).failure, Internal)


def test_a_long_id_of_the_client_is_the_inner_requests_too(
    service: LmmUnaryService, inner: Inner
) -> None:
    ask(service, client_id="0123456789abcdef")
    ask(service, client_id="7")
    assert inner.asked[0][1] == "0123456789abcdef"
    assert len(inner.asked[1][1]) >= 16


def test_a_client_that_goes_away_stops_the_inner_request(
    service: LmmUnaryService, inner: Inner
) -> None:
    inner.gate.clear()
    responder = FakeResponder(cancelled=True)
    service.handle({"text_input": strings(["q"])}, {}, "", responder)
    assert responder.done.wait(5)
    (_, running), (stop, stopped) = inner.asked[:2]
    assert "stop" in stop
    assert stopped == running


def test_the_inner_request_never_streams_and_carries_parameters_as_a_tensor() -> None:
    inner = inner_request({"text_input": strings(["q"])}, {"temperature": 0, "timeout": 5})
    assert not inner["stream"][0]
    assert json.loads(first(inner["sampling_parameters"])) == {"temperature": 0}


def test_sampling_parameters_of_the_client_pass_unchanged() -> None:
    given = {"text_input": strings(["q"]), "sampling_parameters": strings(["{}"])}
    inner = inner_request(given, {"temperature": 0})
    assert first(inner["sampling_parameters"]) == "{}"


def test_asking_it_to_stream_is_refused(service: LmmUnaryService) -> None:
    assert isinstance(ask(service, stream=flag(True)).failure, InvalidArgument)
