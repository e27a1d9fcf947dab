"""Between Triton's Python backend and the services: the only importer of `pb_utils`.

Everything here is a thin adaptation; what is decided is decided in the services.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import triton_python_backend_utils as pb_utils

from vlora.config import Options, load_adapter_names, load_options
from vlora.errors import InvalidArgument, VLoraError
from vlora.request import ImageFeatures
from vlora.serving.error_counts import ErrorCounts, ErrorExporter
from vlora.serving.lifeline import Lifeline
from vlora.serving.registry import Metric, Refresher
from vlora.serving.responder import Responder, as_vlora_error, from_message, is_coded, to_message
from vlora.serving.tensors import Array, Tensors, flag
from vlora.serving.vision_encoder import features_from
from vlora.strict_json import load_object

log = logging.getLogger(__name__)

E = TypeVar("E")

ENCODE_TRIES = 3
"""Triton 2.51 fails a whole batch where one request's strings have wrong length prefixes. What
comes from `lmm` has sound ones, so an error in Triton's own words is another request's."""

LMM = "lmm"
LMM_UNARY = "lmm_unary"
VISION_ENCODER = "vision_encoder"


def model_folder(args: Mapping[str, str], model: str | None = None) -> Path:
    """The folder of this model, or of another in the same repository."""
    own = Path(args["model_repository"])
    return own if model is None else own.parent / model


def options(args: Mapping[str, str]) -> Options:
    """The options of `lmm/1/model.json`, which all models of the repository share."""
    return load_options(model_folder(args, LMM) / "1" / "model.json")


def adapter_names(args: Mapping[str, str]) -> dict[str, str]:
    """The names of `lmm/1/multi_lora.json`."""
    return load_adapter_names(model_folder(args, LMM) / "1" / "multi_lora.json")


def inputs(request: Any) -> dict[str, Array]:
    """The request's tensors by name; views that are gone when the request is."""
    return {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}


def try_inputs(request: Any) -> Tensors | VLoraError:
    """The same, or what is wrong with them, for one request of a batch."""
    try:
        return inputs(request)
    except Exception as error:
        return as_vlora_error(error, "reading the request")


def parameters(request: Any) -> dict[str, Any]:
    text = _text(request.parameters, "a request parameter")
    return load_object(text or "{}", "the request's parameters")


def request_id(request: Any) -> str:
    return _text(request.request_id, "the request's id")


def _text(read: Callable[[], str], what: str) -> str:
    try:
        return read()
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{what} is not valid UTF-8") from error


def response(tensors: Tensors) -> Any:
    return pb_utils.InferenceResponse(output_tensors=_pb_tensors(tensors))


def _pb_tensors(tensors: Tensors) -> list[Any]:
    return [pb_utils.Tensor(name, value) for name, value in tensors.items()]


def error_response(error: VLoraError) -> Any:
    """`error` with its code, beside the message and in it; the client's last word, so it counts."""
    _errors.add(error)
    code = getattr(pb_utils.TritonError, error.code)
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(to_message(error), code))


class TritonResponder:
    """Answers one request through its response sender.

    **Invariant:** the sender is never asked anything once the final response is on its way:
    Triton frees what `is_cancelled` looks at. The lock makes send and ask exclude each other.

    **Invariant:** only requested outputs are sent, and their tensors live until they are sent:
    `send` drops the others, and what they hold, without Python's lock (python_backend 390).
    """

    def __init__(self, request: Any) -> None:
        self._sender = request.get_response_sender()
        self._requested = frozenset(request.requested_output_names())
        self._lock = threading.Lock()
        self._closed = False

    def send(self, tensors: Tensors, final: bool) -> None:
        wanted = {name: value for name, value in tensors.items() if name in self._requested}
        alive = _pb_tensors(wanted)
        self._send(pb_utils.InferenceResponse(output_tensors=alive), final)

    def fail(self, error: VLoraError) -> None:
        try:
            self._send(error_response(error), final=True)
        except Exception:
            log.exception("an error could not be sent; its request ends without a word")
            self._end()

    def is_cancelled(self) -> bool:
        with self._lock:
            return not self._closed and bool(self._sender.is_cancelled())

    def _send(self, message: Any, final: bool) -> None:
        with self._lock:
            if self._closed:
                return
            flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0
            self._sender.send(message, flags=flags)
            self._closed = final

    def _end(self) -> None:
        """The final flag alone: the last resort, so that nobody waits for ever."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def returned(found: Tensors | VLoraError | None) -> Any:
    """What `execute` returns for a request: its one response, or None where that has been sent.
    What cannot be made is an error as well."""
    try:
        if isinstance(found, VLoraError):
            raise found
        return None if found is None else response(found)
    except Exception as error:
        return error_response(as_vlora_error(error, "making the answer"))


def answer(responder: TritonResponder, found: Tensors | VLoraError) -> None:
    """Sends the one response of a request. What cannot be sent is an error as well."""
    try:
        if isinstance(found, VLoraError):
            raise found
        responder.send(found, final=True)
    except Exception as error:
        responder.fail(as_vlora_error(error, "sending the answer"))


class Service(Protocol):
    """Answers requests of a decoupled model, each through its responder."""

    def handle(
        self, tensors: Tensors, parameters: Mapping[str, Any], client_id: str, responder: Responder
    ) -> None: ...


def hand_over(requests: Sequence[Any], service: Service) -> None:
    """All that `execute` of a decoupled model does: the service answers, now or later."""
    for request in requests:
        responder = TritonResponder(request)
        try:
            given = inputs(request), parameters(request), request_id(request)
        except Exception as error:
            responder.fail(as_vlora_error(error, "reading the request"))
        else:
            service.handle(*given, responder)


class _KeptAlive:
    """Keeps objects alive for some seconds after their use.

    The server's stub forgets a finished call of a decoupled model on a thread without Python's
    lock; were it the last owner of the responses, it would free their arrays there and corrupt
    reference counts (python_backend 390, fixed in 24.12). So they stay owned here until it has.
    """

    SECONDS = 5.0

    def __init__(self) -> None:
        self._kept: deque[tuple[float, Any]] = deque()
        self._lock = threading.Lock()

    def add(self, used: Any) -> None:
        now = time.monotonic()
        with self._lock:
            self._kept.append((now, used))
            while self._kept[0][0] < now - self.SECONDS:
                self._kept.popleft()

    def clear(self) -> None:
        with self._lock:
            self._kept.clear()


_kept_alive = _KeptAlive()


def ask_lmm(tensors: Tensors, request_id: str) -> list[Tensors]:
    """All responses of `lmm`; raises the error of one that failed. Blocks."""
    outputs = ["text_output", "details"]
    if "cancel" not in tensors:
        outputs += ["finish_reason", "num_input_tokens", "num_output_tokens", "logprobs"]
        outputs += ["cumulative_logprob", "head_scores", "head_labels", "metadata"]
    answers = list(_request(LMM, tensors, outputs, request_id).exec(decoupled=True))
    _kept_alive.add([(answer, answer.output_tensors()) for answer in answers])
    return [_unwrap(answer) for answer in answers]


def cancel_unary(client_id: str) -> None:
    """Tells `lmm_unary` to end what waits there under this id. Blocks."""
    _unwrap(_request(LMM_UNARY, {"cancel": flag(True)}, ["text_output"], client_id).exec())


def encode_images(tensors: Tensors) -> ImageFeatures:
    """Features from `vision_encoder`, whose batch dimension is put on and taken off. Blocks."""
    batched = {name: value[None] for name, value in tensors.items()}
    outputs = ("image_features", "image_layout")
    for _ in range(ENCODE_TRIES):
        answer = _request(VISION_ENCODER, batched, outputs, "").exec()
        if not answer.has_error() or is_coded(answer.error().message()):
            break
    return features_from(_unwrap(answer))


def _request(model: str, tensors: Tensors, outputs: Sequence[str], request_id: str) -> Any:
    return pb_utils.InferenceRequest(
        model_name=model,
        request_id=request_id,
        inputs=_pb_tensors(tensors),
        requested_output_names=list(outputs),
    )


def _unwrap(answer: Any) -> Tensors:
    if answer.has_error():
        message = answer.error().message()
        error = from_message(message)
        error.counted_elsewhere = is_coded(message)
        raise error
    return {tensor.name(): np.array(tensor.as_numpy()) for tensor in answer.output_tensors()}


_lifelines: list[Lifeline] = []
"""Of this process: one, made by `set_up`, until `release`."""

_errors = ErrorCounts()

_refreshers: list[Refresher] = []
"""Of this process: one, made by `export_errors`, until `release`."""

_registries: list[TritonRegistry] = []
"""Kept for good: a metric family that is dropped takes its metrics with it."""


class TritonRegistry:
    """Makes custom metrics, one family per name."""

    def __init__(self) -> None:
        self._families: dict[str, Any] = {}

    def gauge(self, name: str, help: str, labels: Mapping[str, str]) -> Metric:
        return self._metric(name, help, pb_utils.MetricFamily.GAUGE, labels)

    def counter(self, name: str, help: str, labels: Mapping[str, str]) -> Metric:
        return self._metric(name, help, pb_utils.MetricFamily.COUNTER, labels)

    def histogram(
        self, name: str, help: str, labels: Mapping[str, str], buckets: Sequence[float]
    ) -> Metric:
        kind = pb_utils.MetricFamily.HISTOGRAM
        return self._metric(name, help, kind, labels, buckets=list(buckets))

    def _metric(
        self, name: str, help: str, kind: Any, labels: Mapping[str, str], **more: Any
    ) -> Metric:
        if name not in self._families:
            family = pb_utils.MetricFamily(name=name, description=help, kind=kind)
            self._families[name] = family
        metric: Metric = self._families[name].Metric(labels=dict(labels), **more)
        return metric


def metric_labels(args: Mapping[str, str]) -> dict[str, str]:
    """The labels of the vLLM backend's metrics."""
    return {"model": args["model_name"], "version": args["model_version"]}


def exporter(options: Options, make: Callable[[TritonRegistry], E]) -> E | None:
    """What `make` exports to the server, or None where metrics are off, here or in the server."""
    if options.disable_log_stats:
        return None
    registry = TritonRegistry()
    _registries.append(registry)
    try:
        return make(registry)
    except pb_utils.TritonModelException as error:
        log.warning("no metrics: %s", error)
        return None


def export_errors(options: Options, args: Mapping[str, str]) -> None:
    """Export the errors that this process tells its clients, until `release`."""
    made = exporter(options, lambda registry: ErrorExporter(registry, metric_labels(args), _errors))
    if made is not None:
        _refreshers.append(Refresher(made))


def release(model: Any) -> None:
    """Let go of all that belongs to the server, as the last act of `finalize`.

    What still holds its shared memory when the interpreter ends would be a crash then, so the
    model forgets everything, and cycles (an error that is kept holds the frames it went through)
    are collected at once.
    """
    for running in (_lifelines, _refreshers):
        while running:
            running.pop().close()
    vars(model).clear()
    _kept_alive.clear()
    _registries.clear()
    gc.collect()


class _TritonHandler(logging.Handler):
    """Log records of ours as lines of Triton's log."""

    def emit(self, record: logging.LogRecord) -> None:
        logger = pb_utils.Logger
        text = self.format(record)
        if record.levelno >= logging.ERROR:
            logger.log_error(text)
        elif record.levelno >= logging.WARNING:
            logger.log_warn(text)
        else:
            logger.log_info(text)


def set_up(model: str) -> Lifeline:
    """The first act of `initialize`: tie this process to its server, and its log to Triton's."""
    _set_up_logging(model)
    _lifelines.append(Lifeline(model))
    return _lifelines[-1]


def _set_up_logging(model: str) -> None:
    """Send the log of `vlora` to Triton's, each line with the model's name."""
    handler = _TritonHandler()
    handler.setFormatter(logging.Formatter(f"[{model}] %(message)s"))
    logger = logging.getLogger("vlora")
    logger.handlers = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False
