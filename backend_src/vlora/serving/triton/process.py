"""The parts that every model's process has: its options, log, metrics and lifeline."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import triton_python_backend_utils as pb_utils

from vlora.config import load_adapter_names, load_options
from vlora.errors import VLoraError
from vlora.file_names import decoded, to_path
from vlora.serving.metrics import ErrorCounts, ErrorExporter, Exporter, Metric, Refresher, Registry
from vlora.serving.model_process import Lifeline
from vlora.serving.responder import as_vlora_error
from vlora.serving.service import Service
from vlora.serving.tensors import Tensors
from vlora.serving.triton.requests import (
    LMM,
    ModelCalls,
    TritonResponder,
    id_of,
    inputs_of,
    make_error_response,
    parameters_of,
    read_strings_by_request,
    to_triton,
)

log = logging.getLogger(__name__)


class TritonHandler(logging.Handler):
    """Writes log records to Triton's log with the same severity; never raises."""

    def emit(self, record: logging.LogRecord) -> None:
        logger = pb_utils.Logger
        try:
            # Triton takes only text that can be encoded.
            text = decoded(self.format(record)).encode(errors="backslashreplace").decode()
            if record.levelno >= logging.ERROR:
                logger.log_error(text)
            elif record.levelno >= logging.WARNING:
                logger.log_warn(text)
            else:
                logger.log_info(text)
        except Exception:
            self.handleError(record)


def log_to_triton(model: str) -> None:
    """Send the log of `vlora` to Triton's, with the model's name at the start of each line."""
    handler = TritonHandler()
    handler.setFormatter(logging.Formatter(f"[{model}] %(message)s"))
    logger = logging.getLogger("vlora")
    logger.handlers = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False


class TritonRegistry:
    """Makes Triton's custom metrics, with one family per name. It must live as long as they do."""

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

    def drop(self, name: str) -> None:
        # Triton keeps a metric until its family is deleted; deleting the metric alone does nothing.
        self._families.pop(name, None)

    def _metric(
        self, name: str, help: str, kind: Any, labels: Mapping[str, str], **options: Any
    ) -> Metric:
        if name not in self._families:
            self._families[name] = pb_utils.MetricFamily(name=name, description=help, kind=kind)
        metric: Metric = self._families[name].Metric(labels=dict(labels), **options)
        return metric


AnyExporter = TypeVar("AnyExporter", bound=Exporter)


class TritonProcess:
    """The process of a model, from the start of `initialize` to the end of `finalize`.

    args: the argument that Triton passes to `initialize`.
    options: the options in `lmm/1/model.json`, which all models share.
    labels: the labels of the vLLM backend's metrics.
    """

    def __init__(self, args: Mapping[str, str]) -> None:
        # The empty entry is the working folder, which `vlora serve` chooses, but others may not.
        sys.path[:] = filter(None, sys.path)
        log_to_triton(args["model_name"])
        read_strings_by_request()
        self.lifeline = Lifeline(args["model_name"])
        self._lmm_version = to_path(args["model_repository"]).parent / LMM / "1"
        self.options = load_options(self._lmm_version / "model.json")
        self.calls = ModelCalls()
        self.labels = {"model": args["model_name"], "version": args["model_version"]}
        self._errors = ErrorCounts()
        self._registries: list[TritonRegistry] = []
        self._refreshers: list[Refresher] = []
        self.export(lambda registry: ErrorExporter(registry, self.labels, self._errors))

    def adapter_names(self) -> dict[str, str]:
        """Return name → folder of the adapters in `lmm/1/multi_lora.json`."""
        return load_adapter_names(self._lmm_version / "multi_lora.json")

    def export(
        self,
        make: Callable[[Registry], AnyExporter],
        progress: Callable[[Registry], Exporter] | None = None,
    ) -> AnyExporter | None:
        """Start the exporter that `make` returns, and return it, or None if metrics are turned off.

        progress: makes the exporter that is started instead if the options turn metrics off.
        """
        if not self.options.disable_log_stats:
            return self._start(make)
        if progress is not None:
            self._start(progress)
        return None

    def _start(self, make: Callable[[Registry], AnyExporter]) -> AnyExporter | None:
        registry = TritonRegistry()
        self._registries.append(registry)
        try:
            exporter = make(registry)
        except pb_utils.TritonModelException as error:
            # The server was started without metrics.
            log.warning("no metrics: %s", error)
            return None
        self._refreshers.append(Refresher(exporter))
        return exporter

    def hand_over(self, requests: Sequence[Any], service: Service) -> None:
        """Pass requests to the service. Refuse those that cannot be read."""
        for request in requests:
            responder = TritonResponder(request, self._errors)
            try:
                responder.id = id_of(request)
                parameters = parameters_of(request, self.options.limits)
                arguments = inputs_of(request), parameters, responder.id
            except Exception as error:
                responder.fail(as_vlora_error(error, "reading the request"))
            else:
                service.handle(*arguments, responder)

    def response(self, answer: Tensors | VLoraError) -> Any:
        """Return the response that `execute` returns; an error response if it cannot be made."""
        try:
            if isinstance(answer, VLoraError):
                raise answer
            return pb_utils.InferenceResponse(output_tensors=to_triton(answer))
        except Exception as error:
            return make_error_response(as_vlora_error(error, "making the answer"), self._errors)

    @staticmethod
    def freeze() -> None:
        """Exclude all present objects from garbage collection. Call it at the end of `initialize`.

        Otherwise, a collection would look at 400,000 objects of libraries, and no thread of Python
        could run for 0.2 s.
        """
        gc.collect()
        gc.freeze()

    def close_metrics(self) -> None:
        while self._refreshers:
            self._refreshers.pop().close()

    def release(self, model: Any) -> None:
        """Release everything that belongs to the server. Call it at the end of `finalize`.

        The process crashes if shared memory of the server is still in use when the interpreter
        ends. So all attributes of `model` are deleted, and reference cycles are collected, because
        a stored error keeps the frames that it passed through.
        """
        self.lifeline.close()
        self.close_metrics()
        vars(model).clear()
        self.calls.clear()
        self._registries.clear()
        gc.unfreeze()
        gc.collect()
