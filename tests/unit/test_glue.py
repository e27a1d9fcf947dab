"""Between Triton and the services: whatever a request holds, it gets one final response."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vlora.errors import InvalidArgument, VLoraError

FINAL = 1


class FakeError:
    """As the real one: its message must be valid UTF-8."""

    def __init__(self, message: str, code: int) -> None:
        message.encode()
        self.message = message


class FakeSender:
    """Keeps what was sent; the first `faults` calls fail."""

    def __init__(self, faults: int = 0) -> None:
        self.faults = faults
        self.sent: list[tuple[Any, int]] = []

    def send(self, response: Any = None, flags: int = 0) -> None:
        if self.faults:
            self.faults -= 1
            raise RuntimeError("no shared memory is left")
        self.sent.append((response, flags))

    @property
    def finals(self) -> int:
        return sum(flags == FINAL for _, flags in self.sent)


class FakeRequest:
    def __init__(self, sender: FakeSender, id: str | bytes = "", parameters: str = "{}") -> None:
        self._sender, self._id, self._parameters = sender, id, parameters

    def get_response_sender(self) -> FakeSender:
        return self._sender

    def requested_output_names(self) -> list[str]:
        return ["text_output"]

    def inputs(self) -> list[Any]:
        return [SimpleNamespace(name=lambda: "x", as_numpy=lambda: np.zeros(1))]

    def parameters(self) -> str:
        return self._parameters

    def request_id(self) -> str:
        return self._id.decode() if isinstance(self._id, bytes) else self._id


@pytest.fixture
def glue(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    fake = ModuleType("triton_python_backend_utils")
    codes = {"INVALID_ARG", "NOT_FOUND", "UNAVAILABLE", "CANCELLED", "UNSUPPORTED", "INTERNAL"}
    fake.TritonError = type("TritonError", (FakeError,), dict.fromkeys(codes, 0))
    fake.InferenceResponse = lambda **given: SimpleNamespace(**given)
    fake.Tensor = lambda name, value: (name, value)
    fake.TRITONSERVER_RESPONSE_COMPLETE_FINAL = FINAL
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    monkeypatch.delitem(sys.modules, "vlora.serving.glue", raising=False)
    import vlora.serving.glue as made

    yield made
    del sys.modules["vlora.serving.glue"]


@pytest.mark.parametrize(
    "text", ["half a pair \ud800", "nothing \x00 here", "\udcff" * 9, "ж" * 100_000, "‮txet"]
)
def test_any_text_can_be_told(glue: ModuleType, text: str) -> None:
    sender = FakeSender()
    glue.TritonResponder(FakeRequest(sender)).fail(InvalidArgument(text))
    ((response, flags),) = sender.sent
    message = response.error.message
    assert flags == FINAL
    assert message.startswith("INVALID_ARG: ")
    assert all(character.isprintable() for character in message)
    trailer = sum(1 if c.isascii() else 3 * len(c.encode()) for c in message)
    assert trailer < 5000, "gRPC's trailers hold 8 KiB"


def test_an_answer_that_cannot_be_sent_may_still_be_an_error(glue: ModuleType) -> None:
    sender = FakeSender(faults=1)
    responder = glue.TritonResponder(FakeRequest(sender))
    with pytest.raises(RuntimeError):
        responder.send({"text_output": np.zeros(1)}, final=True)
    responder.fail(InvalidArgument("too large"))
    assert sender.finals == 1


def test_an_error_that_cannot_be_sent_still_ends_its_request(glue: ModuleType) -> None:
    sender = FakeSender(faults=1)
    responder = glue.TritonResponder(FakeRequest(sender))
    responder.fail(InvalidArgument("x"))
    responder.fail(InvalidArgument("again"))
    assert sender.sent == [(None, FINAL)]


@pytest.mark.parametrize(
    "broken", [{"id": b"\xff"}, {"parameters": '{"a": NaN}'}, {"parameters": r'{"a": "\ud800"}'}]
)
def test_a_request_that_cannot_be_read_is_refused_and_those_beside_it_go_on(
    glue: ModuleType, broken: dict[str, Any]
) -> None:
    bad, good = FakeSender(), FakeSender()
    handled: list[str] = []
    service = SimpleNamespace(handle=lambda tensors, keys, id, responder: handled.append(id))
    glue.hand_over([FakeRequest(bad, **broken), FakeRequest(good, id="good")], service)
    assert handled == ["good"]
    assert bad.finals == 1
    assert bad.sent[0][0].error.message.startswith("INVALID_ARG: ")


def test_inputs_that_cannot_be_read_are_their_own_requests_error(glue: ModuleType) -> None:
    class Broken(FakeRequest):
        def inputs(self) -> list[Any]:
            raise ValueError("incorrect length of a string")

    assert isinstance(glue.try_inputs(Broken(FakeSender())), VLoraError)


def test_another_requests_strings_in_the_encoders_batch_are_not_this_ones_error(
    glue: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton fails the whole batch, in its own words; a refusal of ours stands."""
    tensors = {"image_features": np.ones((1, 2, 3)), "image_layout": np.ones((1, 1, 6))}
    outputs = [
        SimpleNamespace(name=lambda n=n: n, as_numpy=lambda v=v: v) for n, v in tensors.items()
    ]
    others = "incomplete string data for inference input 'image', expecting string of length 9"

    left: list[str] = []

    def respond() -> Any:
        message = left.pop(0)
        error = SimpleNamespace(message=lambda: message)
        return SimpleNamespace(
            has_error=lambda: bool(message), error=lambda: error, output_tensors=lambda: outputs
        )

    made = SimpleNamespace(exec=respond)
    fake = sys.modules["triton_python_backend_utils"]
    monkeypatch.setattr(fake, "InferenceRequest", lambda **_: made, raising=False)

    left[:] = [others, others, ""]
    assert glue.encode_images({"text_input": np.zeros(1)}).features.shape == (2, 3)
    left[:] = ["INVALID_ARG: image 0 is corrupt", ""]
    with pytest.raises(InvalidArgument, match=r"^image 0 is corrupt$"):
        glue.encode_images({"text_input": np.zeros(1)})
    left[:] = [others] * 4
    with pytest.raises(VLoraError, match="incomplete string data"):
        glue.encode_images({"text_input": np.zeros(1)})
    assert len(left) == 1


def test_an_error_is_counted_by_the_model_that_found_it_and_by_no_other(
    glue: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = glue._errors
    glue.error_response(InvalidArgument("found here"))
    assert (counts["INVALID_ARG"], counts["INTERNAL"]) == (1, 0)
    for message in ("INVALID_ARG: found there", "Stub process is not healthy."):
        told = SimpleNamespace(message=lambda message=message: message)
        with pytest.raises(VLoraError) as raised:
            glue._unwrap(SimpleNamespace(has_error=lambda: True, error=lambda told=told: told))
        glue.error_response(raised.value)
    assert (counts["INVALID_ARG"], counts["INTERNAL"]) == (1, 1)
