"""Tests of the layer between Triton and services: each request gets one final response."""

from __future__ import annotations

import gc
import importlib
import json
import logging
import sys
import weakref
from collections.abc import Iterator
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vlora.config import Limits, Options
from vlora.errors import BY_CODE, Internal, InvalidArgument, NotFound, VLoraError, from_message
from vlora.serving.metrics import ErrorCounts
from vlora.serving.model_process import options_of_instance, require_one_instance
from vlora.serving.responder import as_vlora_error, to_message

FINAL = 1
DEVICES = ("cpu", "auto", "cuda:3")
PACKAGE = "vlora.serving.triton"


class FakeError:
    """An error that requires a message in valid UTF-8, as Triton's error does."""

    def __init__(self, message: str, code: int) -> None:
        message.encode()
        self.message = message


class FakeSender:
    """A sender that stores what is sent. The first `faults` calls fail."""

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
    def __init__(self, sender: FakeSender, id: str = "", parameters: str = "{}") -> None:
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
        return self._id


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Yield a fake of `triton_python_backend_utils`, which the package under test imports."""
    fake = ModuleType("triton_python_backend_utils")
    codes = {"INVALID_ARG", "NOT_FOUND", "UNAVAILABLE", "CANCELLED", "UNSUPPORTED", "INTERNAL"}
    fake.TritonError = type("TritonError", (FakeError,), dict.fromkeys(codes, 0))
    fake.TritonModelException = type("TritonModelException", (Exception,), {})
    fake.InferenceResponse = lambda **fields: SimpleNamespace(**fields)
    fake.Tensor = lambda name, value: (name, value)
    fake.TRITONSERVER_RESPONSE_COMPLETE_FINAL = FINAL
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    forget_package()
    yield fake
    forget_package()


def forget_package() -> None:
    for name in [name for name in sys.modules if name.startswith(PACKAGE)]:
        del sys.modules[name]


@pytest.fixture
def requests(backend: ModuleType) -> ModuleType:
    return importlib.import_module(f"{PACKAGE}.requests")


@pytest.fixture
def process(backend: ModuleType) -> ModuleType:
    return importlib.import_module(f"{PACKAGE}.process")


def test_the_package_can_be_imported_before_triton_sets_the_attributes(
    monkeypatch: pytest.MonkeyPatch, backend: ModuleType
) -> None:
    """Triton imports a model's file first, and then sets the attributes of its module."""
    monkeypatch.setitem(sys.modules, backend.__name__, ModuleType(backend.__name__))
    assert importlib.import_module(f"{PACKAGE}.process").TritonProcess


@pytest.mark.parametrize(
    "text", ["half a pair \ud800", "nothing \x00 here", "\udcff" * 9, "ж" * 100_000, "‮txet"]
)
def test_an_error_with_any_text_can_be_sent(requests: ModuleType, text: str) -> None:
    sender = FakeSender()
    requests.TritonResponder(FakeRequest(sender), ErrorCounts()).fail(InvalidArgument(text))
    ((response, flags),) = sender.sent
    message = response.error.message
    assert flags == FINAL
    assert message.startswith("INVALID_ARG: ")
    assert all(character.isprintable() for character in message)
    trailer = sum(1 if c.isascii() else 3 * len(c.encode()) for c in message)
    assert trailer < 5000, "gRPC's trailers hold 8 KiB"


def test_a_request_whose_answer_or_error_cannot_be_sent_ends_once(requests: ModuleType) -> None:
    def responder() -> tuple[FakeSender, Any]:
        sender = FakeSender(faults=1)
        return sender, requests.TritonResponder(FakeRequest(sender), ErrorCounts())

    sender, one = responder()
    with pytest.raises(RuntimeError):
        one.send({"text_output": np.zeros(1)}, final=True)
    one.fail(InvalidArgument("too large"))
    assert sender.finals == 1
    sender, one = responder()
    one.fail(InvalidArgument("x"))
    one.fail(InvalidArgument("again"))
    assert sender.sent == [(None, FINAL)]


@pytest.mark.parametrize(
    "broken",
    [
        {"id": "x" * 1025},
        {"parameters": '{"a": NaN}'},
        {"parameters": '{"stop": "' + "x" * 70_000 + '"}'},
    ],
)
def test_a_request_that_cannot_be_read_is_rejected_and_the_other_one_is_handled(
    process: ModuleType, broken: dict[str, Any]
) -> None:
    bad, good = FakeSender(), FakeSender()
    handled: list[str] = []
    service = SimpleNamespace(handle=lambda tensors, keys, id, responder: handled.append(id))
    both = [FakeRequest(bad, **broken), FakeRequest(good, id="good")]
    settings = SimpleNamespace(_errors=ErrorCounts(), options=SimpleNamespace(limits=Limits()))
    process.TritonProcess.hand_over(settings, both, service)
    assert handled == ["good"]
    assert bad.finals == 1
    assert bad.sent[0][0].error.message.startswith("INVALID_ARG: ")


def test_frozen_objects_are_collected_only_when_a_model_is_released(process: ModuleType) -> None:
    cycle = ModuleType("cycle")
    cycle.itself = cycle  # type: ignore[attr-defined]
    found = weakref.ref(cycle)
    triton_process = process.TritonProcess
    ends = {"lifeline": SimpleNamespace(close=int), "close_metrics": int}
    given = SimpleNamespace(calls=set(), _registries=[], **ends)
    try:
        triton_process.freeze()
        del cycle
        gc.collect()
        assert found() is not None
        triton_process.release(given, SimpleNamespace())
        assert found() is None
    finally:
        gc.unfreeze()


def test_a_batch_that_another_requests_strings_have_failed_is_encoded_again(
    backend: ModuleType, requests: ModuleType
) -> None:
    """An error of Triton fails the whole batch, so the request is tried again; ours is final."""
    tensors = {
        "image_features": np.ones((1, 2, 3)),
        "image_layout": np.ones((1, 1, 6)),
        "image_adapter": np.array([[b"version"]], object),
        "image_videos": np.array([[b'{"videos": []}']], object),
    }
    outputs = [
        SimpleNamespace(name=lambda n=n: n, as_numpy=lambda v=v: v) for n, v in tensors.items()
    ]
    others = "incomplete string data for inference input 'image', expecting string of length 9"

    messages: list[str] = []

    def respond() -> Any:
        message = messages.pop(0)
        error = SimpleNamespace(message=lambda: message)
        return SimpleNamespace(
            has_error=lambda: bool(message), error=lambda: error, output_tensors=lambda: outputs
        )

    request = SimpleNamespace(exec=respond)
    backend.InferenceRequest = lambda **_: request
    calls = requests.ModelCalls()

    messages[:] = [others, others, ""]
    assert calls.encode_images({"text_input": np.zeros(1)}, "id").features.shape == (2, 3)
    messages[:] = ["INVALID_ARG: image 0 is corrupt", ""]
    with pytest.raises(InvalidArgument, match=r"^image 0 is corrupt$"):
        calls.encode_images({"text_input": np.zeros(1)}, "id")
    messages[:] = [others] * 4
    with pytest.raises(VLoraError, match="incomplete string data"):
        calls.encode_images({"text_input": np.zeros(1)}, "id")
    assert len(messages) == 1


def test_an_error_is_counted_only_by_the_model_that_raised_it_first(requests: ModuleType) -> None:
    counts = ErrorCounts()
    requests.make_error_response(InvalidArgument("raised here"), counts)
    assert (counts["INVALID_ARG"], counts["INTERNAL"]) == (1, 0)
    for message in ("INVALID_ARG: raised there", "Stub process is not healthy."):
        error = SimpleNamespace(message=lambda message=message: message)
        with pytest.raises(VLoraError) as raised:
            requests.unwrap(
                SimpleNamespace(has_error=lambda: True, error=lambda error=error: error)
            )
        requests.make_error_response(raised.value, counts)
    assert (counts["INVALID_ARG"], counts["INTERNAL"]) == (1, 1)


def test_logging_keeps_the_severity_and_never_raises(
    backend: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton's functions take only text in valid UTF-8, and fail without shared memory."""
    written: list[tuple[str, str]] = []

    def write(level: str, text: str) -> None:
        text.encode()
        if "unlucky" in text:
            raise RuntimeError("no shared memory is left")
        written.append((level, text))

    levels = ("info", "warn", "error")
    backend.Logger = SimpleNamespace(**{f"log_{name}": partial(write, name) for name in levels})
    monkeypatch.setattr(logging, "raiseExceptions", False)
    logger = logging.Logger("test")
    logger.addHandler(importlib.import_module(f"{PACKAGE}.process").TritonHandler())
    for level in (logging.INFO, logging.WARNING, logging.ERROR):
        logger.log(level, "adapter %s", "\udcff z\udcc3\udca4hlen")
        logger.log(level, "unlucky")
    assert written == [(name, "adapter \\udcff zählen") for name in levels]


@pytest.mark.parametrize("kind", BY_CODE.values())
def test_an_error_keeps_its_code_in_a_message(kind: type[VLoraError]) -> None:
    error = from_message(to_message(kind("what: is wrong")))
    assert (type(error), error.message) == (kind, "what: is wrong")
    assert type(from_message(f"in ensemble 'x', {to_message(kind('w'))}")) is kind


def test_a_message_without_a_code_is_an_internal_error() -> None:
    assert isinstance(from_message("Stub process is not healthy."), Internal)
    assert as_vlora_error(NotFound("x"), "asking").code == "NOT_FOUND"
    assert "KeyError" not in as_vlora_error(KeyError("x"), "asking").message


def _args(*groups: dict[str, Any], kind: str = "MODEL", gpu: int = 0) -> dict[str, str]:
    return {
        "model_name": "lmm",
        "model_config": json.dumps({"name": "lmm", "instance_group": groups}),
        "model_instance_kind": kind,
        "model_instance_device_id": str(gpu),
    }


@pytest.mark.parametrize(
    ("kind", "device", "expected"),
    [
        *((kind, device, device) for kind in ("MODEL", "CPU", "KIND_CPU") for device in DEVICES),
        *((kind, device, "cuda:1") for kind in ("GPU", "KIND_GPU") for device in ("auto", "cuda")),
        ("GPU", "cuda:1", "cuda:1"),
        ("GPU", "cpu", None),
        ("GPU", "cuda:0", None),
    ],
)
def test_a_group_on_a_gpu_or_else_the_option_chooses_the_device(
    kind: str, device: str, expected: str | None
) -> None:
    options, args = Options(device=device), _args(kind=kind, gpu=1)
    if expected is None:
        with pytest.raises(InvalidArgument, match=f"names 'cuda:1', but 'device' = '{device}'"):
            options_of_instance(options, args)
    else:
        assert options_of_instance(options, args).device == expected
    assert options_of_instance(options, {"model_name": "lmm"}) == options


def test_an_engine_has_one_instance() -> None:
    require_one_instance(_args())
    require_one_instance(_args({"count": 1, "kind": "KIND_MODEL"}))
    require_one_instance(_args({"count": 1, "gpus": [2]}))
    for groups in ([{"count": 2}], [{"gpus": [0, 1]}], [{"count": 1}, {"count": 1}]):
        with pytest.raises(InvalidArgument, match="have 2 instances; a server has one engine"):
            require_one_instance(_args(*groups))
