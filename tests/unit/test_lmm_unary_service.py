"""Tests of the `lmm_unary` model without Triton: one inner request, and its answer or error."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.support.fakes import FakeResponder, first
from tests.support.polling import until
from vlora.config import Limits
from vlora.errors import Cancelled, Internal, InvalidArgument, NotFound, Unavailable
from vlora.live_requests import RequestTable
from vlora.serving.arrivals import ARRIVAL_INPUT, ArrivalStamps
from vlora.serving.lmm_unary import LmmUnaryService, inner_request
from vlora.serving.tensors import Tensors, flag, strings

STAMPS = ArrivalStamps(b"key")
ANSWER = {"text_output": strings(["answer"])}


class Inner:
    """Stands in for `lmm`."""

    def __init__(self) -> None:
        self.calls: list[tuple[Tensors, str]] = []
        self.answers: list[Tensors] = [ANSWER]
        self.error: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, tensors: Tensors, request_id: str) -> list[Tensors]:
        self.calls.append((tensors, request_id))
        if "cancel" in tensors:
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
        created = LmmUnaryService(
            inner,
            pool,
            Limits(),
            STAMPS,
            RequestTable(max_bytes=10_000),
            max_requests=4,
            max_running=2,
        )
        yield created
        inner.gate.set()
        created.close()


def ask(service: LmmUnaryService, client_id: str = "", **tensors: np.ndarray) -> FakeResponder:
    responder = FakeResponder()
    service.handle({"text_input": strings(["q"]), **tensors}, {}, client_id, responder)
    assert responder.done.wait(5)
    return responder


def test_the_response_of_lmm_is_relayed(service: LmmUnaryService, inner: Inner) -> None:
    inner.answers = [ANSWER, {}]  # The empty final response is ignored.
    ((tensors, final),) = ask(service).sent
    assert (first(tensors["text_output"]), first(tensors["answer"]), final) == (
        "answer",
        "answer",
        True,
    )


def test_an_error_of_lmm_is_relayed(service: LmmUnaryService, inner: Inner) -> None:
    inner.error = NotFound("unknown adapter")
    assert ask(service).failure is inner.error


def test_a_missing_response_of_lmm_is_an_internal_error(
    service: LmmUnaryService, inner: Inner
) -> None:
    inner.answers = []
    assert isinstance(ask(service).failure, Internal)


def test_the_inner_request_has_the_clients_id_if_that_is_long_enough(
    service: LmmUnaryService, inner: Inner
) -> None:
    ask(service, client_id="0123456789abcdef")
    ask(service, client_id="7")
    assert inner.calls[0][1] == "0123456789abcdef"
    assert len(inner.calls[1][1]) >= 16


def test_the_inner_request_is_cancelled_when_the_client_disconnects(
    service: LmmUnaryService, inner: Inner
) -> None:
    inner.gate.clear()
    responder = FakeResponder(cancelled=True)
    service.handle({"text_input": strings(["q"])}, {}, "", responder)
    assert responder.done.wait(5)
    (_, running), (cancel, cancelled) = inner.calls[:2]
    assert "cancel" in cancel
    assert cancelled == running


def test_the_inner_request_never_streams_and_carries_parameters_as_a_tensor() -> None:
    inner = inner_request({"text_input": strings(["q"])}, {"temperature": 0})
    assert not inner["stream"][0]
    assert json.loads(first(inner["sampling_parameters"])) == {"temperature": 0}


def test_sampling_parameters_of_the_client_pass_unchanged() -> None:
    original = {"text_input": strings(["q"]), "sampling_parameters": strings(["{}"])}
    inner = inner_request(original, {"temperature": 0})
    assert first(inner["sampling_parameters"]) == "{}"


def test_a_streaming_request_is_rejected(service: LmmUnaryService) -> None:
    assert isinstance(ask(service, stream=flag(True)).failure, InvalidArgument)


def start(service: LmmUnaryService, client_id: str = "", **tensors: np.ndarray) -> FakeResponder:
    responder = FakeResponder()
    service.handle({"text_input": strings(["q"]), **tensors}, {}, client_id, responder)
    return responder


def fill(service: LmmUnaryService, inner: Inner) -> list[FakeResponder]:
    """Start two requests that `lmm` works on and two that wait."""
    inner.gate.clear()
    running = [start(service) for _ in range(2)]
    until(lambda: len(inner.calls) == 2)
    return running + [start(service, client_id=name * 16) for name in "ab"]


def test_a_full_queue_rejects_a_request_with_its_length_before_copying_it(
    service: LmmUnaryService, inner: Inner
) -> None:
    responders = fill(service, inner)
    refused = FakeResponder()
    # Reading this request would fail as well, with another error.
    service.handle({"stream": np.zeros(7)}, {}, "", refused)
    assert isinstance(refused.failure, Unavailable)
    assert refused.failure.message == "the queue is full: 2 requests are waiting"
    inner.gate.set()
    assert all(responder.done.wait(5) for responder in responders)
    until(lambda: not service.table)


def test_a_waiting_request_ends_at_once_when_its_client_disconnects(
    service: LmmUnaryService, inner: Inner
) -> None:
    *_, last = fill(service, inner)
    last.cancelled = True
    assert last.done.wait(5)
    assert isinstance(last.failure, Cancelled)
    assert len(inner.calls) == 2, "`lmm` was not called for it"
    assert len(service.table) == 3


def test_a_waiting_request_ends_at_once_when_its_id_is_cancelled(
    service: LmmUnaryService, inner: Inner
) -> None:
    *_, first_waiting, second_waiting = fill(service, inner)
    cancel = FakeResponder()
    service.handle({"cancel": flag(True)}, {}, "a" * 16, cancel)
    assert cancel.sent == [({}, True)]
    assert isinstance(first_waiting.failure, Cancelled)
    assert not second_waiting.done.is_set()


def test_an_id_that_others_may_have_cancels_nothing(service: LmmUnaryService, inner: Inner) -> None:
    inner.gate.clear()
    *_, first, second = [start(service, client_id=one) for one in ("", "", "", "a" * 15)]
    for client_id in ("", "a" * 15):
        service.handle({"cancel": flag(True)}, {}, client_id, FakeResponder())
    assert not first.done.is_set()
    assert not second.done.is_set()


def test_the_arrival_is_passed_on(service: LmmUnaryService, inner: Inner) -> None:
    ask(service, **{ARRIVAL_INPUT: STAMPS.make(42.5)})
    assert STAMPS.read(inner.calls[0][0]) == 42.5


def test_a_waiting_request_that_is_late_or_superseded_ends_at_once(
    service: LmmUnaryService, inner: Inner
) -> None:
    def sampling(**keys: object) -> np.ndarray:
        return strings([json.dumps(keys)])

    inner.gate.clear()
    running = [start(service) for _ in range(2)]
    until(lambda: len(inner.calls) == 2)
    late = start(service, sampling_parameters=sampling(deadline_ms=20))
    assert late.done.wait(5)
    older = start(service, sampling_parameters=sampling(stream_id="s"))
    newer = start(service, sampling_parameters=sampling(stream_id="s", supersede=True))
    assert older.done.wait(5)
    assert all(isinstance(one.failure, Cancelled) for one in (late, older))
    inner.gate.set()
    assert all(one.done.wait(5) for one in (*running, newer))
    assert len(inner.calls) == 3, "`lmm` was not called for them"


def test_the_bytes_of_requests_are_limited(service: LmmUnaryService, inner: Inner) -> None:
    inner.gate.clear()
    one = start(service, image=strings([b"x" * 6000]))
    refused = start(service, image=strings([b"x" * 6000]))
    assert isinstance(refused.failure, Unavailable)
    assert "'max_in_flight_bytes'" in refused.failure.message
    inner.gate.set()
    assert one.done.wait(5)
    assert isinstance(ask(service, image=strings([b"x" * 6000])).sent, list)


def test_closing_ends_waiting_requests(service: LmmUnaryService, inner: Inner) -> None:
    *running, third, fourth = fill(service, inner)
    service.close()
    assert all(isinstance(one.failure, Unavailable) for one in (third, fourth))
    assert isinstance(start(service).failure, Unavailable)
    inner.gate.set()
    assert all(responder.done.wait(5) for responder in running)


def test_metadata_of_an_ensemble_must_be_valid_utf8(service: LmmUnaryService, inner: Inner) -> None:
    layout = np.zeros((0, 6), np.int32)
    responder = ask(service, metadata=strings([b"\xff"]), image_layout=layout)
    assert isinstance(responder.failure, InvalidArgument)
    assert inner.calls == []
