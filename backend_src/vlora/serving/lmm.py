"""The `lmm` model without Triton: passes requests to the engine and its outputs to the clients.

`handle` reads a request, submits it to the engine and returns. For a request with images, a long
prompt or a structure, a pool thread encodes the images and submits the request. The engine's
response thread passes each output to `_answer`, which sends the response. A watcher thread checks
whether the clients of live requests have disconnected.

This module does not depend on Triton or on how an answer is computed.
"""

from __future__ import annotations

import json
import logging
import threading
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from vlora.config import Limits
from vlora.errors import Cancelled, Unavailable
from vlora.request import ImageFeatures, Output, OutputSink, Request
from vlora.sampling import ADAPTER_KEY
from vlora.serving.answer_writer import AnswerWriter
from vlora.serving.arrivals import ARRIVAL_INPUT, ArrivalStamps
from vlora.serving.codec import (
    DEFAULT_TASK,
    Call,
    adapter_name,
    freshness_keys,
    is_cancel,
    is_describe,
    is_structured,
    names_no_adapter,
    prepare,
    read_call,
)
from vlora.serving.requests import HeldBytes, WaitingRequests, bytes_of
from vlora.serving.responder import Responder, as_vlora_error, fail
from vlora.serving.tensors import Tensors, strings
from vlora.vision.prompts import ChatTemplate

if TYPE_CHECKING:
    from vlora.adapters.files import AdapterInfo

log = logging.getLogger(__name__)

WATCH_SECONDS = 0.1
"""Interval at which responders are asked whether their client has disconnected."""

LONG_PROMPT = 8192
"""Number of characters above which a prompt is tokenized on a pool thread.

Triton hands over all requests on one thread. Tokenizing this many characters there takes a few
milliseconds.
"""

STRUCTURED_THREADS = 16
"""Number of threads for requests whose structure is compiled, which may take seconds.

Other requests do not use these threads, so no other request waits for a compilation.
"""

Encode = Callable[[Tensors, str], ImageFeatures]
"""Function that calls the vision encoder: it takes the encoder's inputs and an id, and returns
features.
"""

Observe = Callable[[Output], None]
"""Function that is called with every output of one request before it is sent. It never raises."""


class AdapterLookup(Protocol):
    """The methods of `lora.store.AdapterStore` that the service calls."""

    def info(self, name: str) -> AdapterInfo: ...
    def route(self, task: str, question: str) -> str | None: ...


class LmmEngine(Protocol):
    """The methods of `engine.loop.EngineLoop` that the service calls."""

    @property
    def adapters(self) -> AdapterLookup: ...
    def admit(self, request_id: str, client_id: str = "") -> None: ...
    def withdraw(self, request_id: str) -> None: ...
    def submit(self, request: Request, sink: OutputSink) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def stop_client(self, client_id: str) -> None: ...


@dataclass(frozen=True)
class _Encoding:
    """A request that continues on a pool thread.

    images: inputs of the request for the encoder; empty if it has no images to encode.
    """

    call: Call
    images: Tensors
    responder: Responder


class LmmService:
    """Answers `lmm` requests with an engine.

    The service owns the responders of live requests. A responder is in `_live` from `handle` until
    its final response.

    Before a pool thread submits a request, it removes the request from `waiting`. Other threads may
    remove the request earlier, to end it. Only the thread that removed the request may submit or
    end it.

    encode: returns the features of a request's images. The call blocks.
    pool: threads that call `encode` and submit long prompts. Requests that wait for a thread have
        been admitted, so they count as part of the engine's queue.
    stamps: reads the arrival time of a request, and makes arrival stamps for the encoder.
    waiting: requests that wait for a pool thread, or whose images are being encoded.
    observe: returns a function that is called with every output of a new request.
    cancel_elsewhere: passes the id of a cancelled request to `lmm_unary` and `vision_encoder`, in
        which the request may still be queued. The call blocks, and may raise any error.
    routes: whether to choose an adapter for requests that name none.
    describe: returns the answer to a request with the input `describe`.
    """

    def __init__(
        self,
        engine: LmmEngine,
        template: ChatTemplate,
        limits: Limits,
        encode: Encode,
        pool: Executor,
        stamps: ArrivalStamps,
        waiting: WaitingRequests,
        observe: Callable[[], Observe] = lambda: lambda output: None,
        cancel_elsewhere: Callable[[str], None] = lambda client_id: None,
        routes: bool = False,
        describe: Callable[[], str] = lambda: "{}",
    ) -> None:
        self._routes = routes
        self._describe = describe
        self._observe = observe
        self._cancel_elsewhere = cancel_elsewhere
        self._engine = engine
        self._template = template
        self._limits = limits
        self._encode = encode
        self._pool = pool
        self._live: dict[str, Responder] = {}
        self._held = HeldBytes(limits.max_in_flight_bytes)
        self._encoding: dict[str, _Encoding] = {}
        self._stamps = stamps
        self._waiting = waiting
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._cancels = ThreadPoolExecutor(1, thread_name_prefix="cancel")
        self._structured = ThreadPoolExecutor(STRUCTURED_THREADS, thread_name_prefix="structured")
        self._watcher = threading.Thread(target=self._watch, name="cancel-watch", daemon=True)
        self._watcher.start()

    @property
    def live(self) -> int:
        """Number of requests without a final response."""
        return len(self._live)

    def handle(
        self, tensors: Tensors, parameters: Mapping[str, Any], client_id: str, responder: Responder
    ) -> None:
        """Answer one request; never raises. The tensors may become invalid after this returns."""
        request_id = uuid.uuid4().hex
        try:
            if is_cancel(tensors):
                self._cancel(client_id)
                responder.send({}, final=True)
                return
            if is_describe(tensors):
                responder.send({"details": strings([self._describe()])}, final=True)
                return
            if self._closed.is_set():
                raise Unavailable("the server is shutting down")
            self._engine.admit(request_id, client_id)
            self._held.hold(request_id, bytes_of(tensors))
            arrival = self._stamps.read(tensors)
            call = read_call(tensors, parameters, client_id, self._limits, arrival)
            with self._lock:
                self._live[request_id] = responder
            if call.raw_images or len(call.text) > LONG_PROMPT or is_structured(call):
                images = {name: np.array(value) for name, value in call.raw_images.items()}
                self._encoding[request_id] = _Encoding(call, images, responder)
                end = partial(self._fail, request_id, responder)
                self._waiting.add(request_id, call.freshness, end, client_id)
                pool = self._structured if is_structured(call) else self._pool
                pool.submit(self._encode_then_submit, request_id)
            else:
                self._submit(call, request_id, responder)
        except BaseException as error:  # A panic of a Rust library is not an Exception.
            if not self._waiting.end(request_id, error):
                self._fail(request_id, responder, error)

    def close(self) -> None:
        """Reject new requests and those that wait for the encoder. The engine drains all others."""
        self._closed.set()
        self._watcher.join()
        self._waiting.end_all(Unavailable("the server is shutting down"))
        self._cancels.shutdown()
        self._structured.shutdown(cancel_futures=True)

    def _cancel(self, client_id: str) -> None:
        """Cancel the request with this client id.

        If the request has not arrived yet, the cancellation is stored for a while.
        """
        reason = Cancelled(f"the request '{client_id}' was cancelled")
        ended = self._waiting.end_client(client_id, reason)
        if not ended:
            self._engine.stop_client(client_id)
        # `lmm` passes requests to the encoder under its own ids, so these are cancelled, too.
        for one in (client_id, *ended):
            self._pass_on(one)

    def _pass_on(self, request_id: str) -> None:
        """Cancel a request in the other models, on another thread."""
        if not self._closed.is_set():
            self._cancels.submit(self._call_elsewhere, request_id)

    def _call_elsewhere(self, request_id: str) -> None:
        try:
            self._cancel_elsewhere(request_id)
        except Exception:
            log.exception("could not pass on the cancellation of request %r", request_id)

    def _encode_then_submit(self, request_id: str) -> None:
        encoding = self._encoding.pop(request_id, None)
        if encoding is None:
            return  # The request ended while it waited for this thread.
        taken = False
        try:
            call, held = encoding.call, None
            if encoding.images:
                features = self._encode(self._encoder_inputs(encoding), request_id)
                held = features.features.nbytes
                call = call.with_images(features)
            taken = self._waiting.take(request_id)
            if taken:
                # This thread owns the request now, so no other thread releases its bytes.
                if held is not None:
                    self._held.hold(request_id, held)
                self._submit(call, request_id, encoding.responder)
        except BaseException as error:
            if taken:
                self._fail(request_id, encoding.responder, error)
            else:
                self._waiting.end(request_id, error)

    def _encoder_inputs(self, encoding: _Encoding) -> Tensors:
        call = encoding.call
        inputs = {"text_input": strings([call.text]), **encoding.images}
        keys = freshness_keys(call.sampling)
        if (name := adapter_name(call.sampling)) is not None:
            keys[ADAPTER_KEY] = name
        if keys:
            inputs["sampling_parameters"] = strings([json.dumps(keys)])
        inputs[ARRIVAL_INPUT] = self._stamps.make(call.freshness.arrival)
        return inputs

    def _submit(self, call: Call, request_id: str, responder: Responder) -> None:
        name = adapter_name(call.sampling)
        if self._routes and names_no_adapter(call):
            name = self._engine.adapters.route(call.task or DEFAULT_TASK, call.text)
        info = None if name is None else self._engine.adapters.info(name)
        prepared = prepare(call, request_id, info, self._template)
        interval = prepared.request.sampling.stream_interval_ms / 1e3
        writer = AnswerWriter(call, prepared.task, interval)
        observe = self._observe()
        self._engine.submit(
            prepared.request,
            lambda output: self._answer(output, request_id, writer, responder, observe),
        )

    def _answer(
        self,
        output: Output,
        request_id: str,
        writer: AnswerWriter,
        responder: Responder,
        observe: Observe,
    ) -> None:
        """Send one output. Called in order on the engine's response thread; never raises."""
        try:
            observe(output)
            if output.error is not None:
                raise output.error
            tensors = writer.write(output)
            if tensors is None:
                return
            if output.finished:
                self._forget(request_id)
            responder.send(tensors, final=output.finished)
        except Exception as error:
            if not output.finished:
                self._engine.abort(request_id)
            self._fail(request_id, responder, error)

    def _fail(self, request_id: str, responder: Responder, error: BaseException) -> None:
        self._forget(request_id)
        self._engine.withdraw(request_id)
        fail(responder, as_vlora_error(error, "answering the request"))

    def _forget(self, request_id: str) -> None:
        self._held.release(request_id)
        self._encoding.pop(request_id, None)
        with self._lock:
            self._live.pop(request_id, None)

    def _watch(self) -> None:
        while not self._closed.wait(WATCH_SECONDS):
            self._waiting.end_late()
            with self._lock:
                live = list(self._live.items())
            for request_id, responder in live:
                try:
                    if not responder.is_cancelled():
                        continue
                    if self._waiting.end(request_id, Cancelled("the client has disconnected")):
                        self._pass_on(request_id)
                    else:
                        self._engine.abort(request_id)
                except Exception:
                    log.exception("could not check a request for cancellation")
