"""The `lmm` model without Triton: passes requests to the engine, and its outputs to the client.

`handle` reads a request, submits it to the engine and returns. A request with images or a long
prompt continues on a pool thread, which has the images encoded before it submits the request. The
engine's response thread then calls the request's sink, which sends. A watcher thread checks every
live responder for a client that has disconnected.

Independent of Triton and of how an answer is computed.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from vlora.config import Limits
from vlora.errors import Cancelled, Unavailable, VLoraError
from vlora.request import MIN_STOPPABLE_ID, ImageFeatures, Output, OutputSink, Request
from vlora.serving.answer_writer import AnswerWriter
from vlora.serving.codec import Call, adapter_name, is_cancel, prepare, read_call
from vlora.serving.responder import Responder, as_vlora_error
from vlora.serving.tensors import Tensors, strings
from vlora.vision.prompts import ChatTemplate

if TYPE_CHECKING:
    from vlora.lora.adapter import AdapterInfo

log = logging.getLogger(__name__)

WATCH_SECONDS = 0.1
"""Interval at which responders are checked for cancellation."""

LONG_PROMPT = 8192
"""Number of characters above which a prompt is tokenized on a pool thread.

Triton hands all requests over on one thread, where this many take a few milliseconds.
"""

Encode = Callable[[Tensors], ImageFeatures]
"""Calls the vision encoder: `text_input` and image inputs in, features out."""

Observe = Callable[[Output], None]
"""Called with every output of one request, its error included, before it is sent; never raises."""


class Adapters(Protocol):
    def info(self, name: str) -> AdapterInfo: ...


class Engine(Protocol):
    """The part of `engine.loop.EngineLoop` that the service uses."""

    @property
    def adapters(self) -> Adapters: ...
    def admit(self, request_id: str, client_id: str = "") -> None: ...
    def withdraw(self, request_id: str) -> None: ...
    def submit(self, request: Request, sink: OutputSink) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def stop_client(self, client_id: str) -> None: ...


@dataclass(frozen=True)
class _Encoding:
    """A request that waits for a pool thread, or whose images are being encoded."""

    call: Call
    images: Tensors
    responder: Responder


class LmmService:
    """Answers `lmm` requests with an engine.

    The service owns the responders of live requests: a responder is in `_live` from `handle` until
    its final response, and at no other time. A request that is also in `_encoding` belongs to the
    thread that removes it from there: the pool thread that continues with it, or the thread that
    ends it first.

    pool: runs the calls of `encode`, which block, and submits long prompts. The engine has admitted
        the requests that wait there, so they count as part of its queue.
    observe: makes the observer of one request.
    cancel_elsewhere: passes the id of a cancelled request on to where it may still wait. It blocks,
        and may fail.
    """

    def __init__(
        self,
        engine: Engine,
        template: ChatTemplate,
        limits: Limits,
        encode: Encode,
        pool: Executor,
        observe: Callable[[], Observe] = lambda: lambda output: None,
        cancel_elsewhere: Callable[[str], None] = lambda client_id: None,
    ) -> None:
        self._observe = observe
        self._cancel_elsewhere = cancel_elsewhere
        self._engine = engine
        self._template = template
        self._limits = limits
        self._encode = encode
        self._pool = pool
        self._live: dict[str, Responder] = {}
        self._encoding: dict[str, _Encoding] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._cancels = ThreadPoolExecutor(1, thread_name_prefix="cancel")
        self._watcher = threading.Thread(target=self._watch, name="cancel-watch", daemon=True)
        self._watcher.start()

    @property
    def live(self) -> int:
        """Number of requests without a final response yet."""
        return len(self._live)

    def handle(
        self, tensors: Tensors, parameters: Mapping[str, Any], client_id: str, responder: Responder
    ) -> None:
        """Answer one request; never raises. The tensors may become invalid when this returns."""
        request_id = uuid.uuid4().hex
        try:
            if is_cancel(tensors):
                self._cancel(client_id)
                responder.send({}, final=True)
                return
            if self._closed.is_set():
                raise Unavailable("the server is shutting down")
            self._engine.admit(request_id, client_id)
            call = read_call(tensors, parameters, client_id, self._limits)
            with self._lock:
                self._live[request_id] = responder
            if call.raw_images or len(call.text) > LONG_PROMPT:
                images = {name: np.array(value) for name, value in call.raw_images.items()}
                with self._lock:
                    self._encoding[request_id] = _Encoding(call, images, responder)
                self._pool.submit(self._encode_then_submit, request_id)
            else:
                self._submit(call, request_id, responder)
        except Exception as error:
            self._fail(request_id, responder, error)

    def close(self) -> None:
        """Reject new requests and those that wait for the encoder; the engine drains the rest."""
        self._closed.set()
        self._watcher.join()
        for request_id in list(self._encoding):
            self._end_encoding(request_id, Unavailable("the server is shutting down"))
        self._cancels.shutdown()

    def _cancel(self, client_id: str) -> None:
        """End the requests with this client id.

        Raises InvalidArgument for an id that is too short.
        """
        stoppable = len(client_id) >= MIN_STOPPABLE_ID
        own = [
            key
            for key, encoding in list(self._encoding.items())
            if encoding.call.client_id == client_id
        ]
        reason = Cancelled(f"the request '{client_id}' was cancelled")
        ended = [self._end_encoding(key, reason) for key in own if stoppable]
        if not any(ended):
            self._engine.stop_client(client_id)
        if not self._closed.is_set():
            self._cancels.submit(self._pass_on, client_id)

    def _pass_on(self, client_id: str) -> None:
        try:
            self._cancel_elsewhere(client_id)
        except Exception:
            log.exception("could not pass on the cancellation of request '%s'", client_id)

    def _encode_then_submit(self, request_id: str) -> None:
        with self._lock:
            encoding = self._encoding.get(request_id)
        if encoding is None:
            return  # The request ended while it waited.
        try:
            call = encoding.call
            if encoding.images:
                text = strings([call.text])
                call = call.with_images(self._encode({"text_input": text, **encoding.images}))
            if self._take_encoding(request_id) is not None:
                self._submit(call, request_id, encoding.responder)
        except Exception as error:
            if request_id in self._live:
                self._fail(request_id, encoding.responder, error)

    def _take_encoding(self, request_id: str) -> _Encoding | None:
        with self._lock:
            return self._encoding.pop(request_id, None)

    def _end_encoding(self, request_id: str, reason: VLoraError) -> bool:
        """End a request whose images are not encoded yet; return whether there was one."""
        encoding = self._take_encoding(request_id)
        if encoding is not None:
            self._fail(request_id, encoding.responder, reason)
        return encoding is not None

    def _submit(self, call: Call, request_id: str, responder: Responder) -> None:
        name = adapter_name(call)
        info = None if name is None else self._engine.adapters.info(name)
        prepared = prepare(call, request_id, info, self._template)
        writer = AnswerWriter(call, prepared.task)
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

    def _fail(self, request_id: str, responder: Responder, error: Exception) -> None:
        self._take_encoding(request_id)
        self._forget(request_id)
        self._engine.withdraw(request_id)
        try:
            responder.fail(as_vlora_error(error, "answering the request"))
        except Exception:
            log.exception("could not send an error to its client")

    def _forget(self, request_id: str) -> None:
        with self._lock:
            self._live.pop(request_id, None)

    def _watch(self) -> None:
        while not self._closed.wait(WATCH_SECONDS):
            with self._lock:
                live = list(self._live.items())
            for request_id, responder in live:
                try:
                    if not responder.is_cancelled():
                        continue
                    if not self._end_encoding(request_id, Cancelled("the client has disconnected")):
                        self._engine.abort(request_id)
                except Exception:
                    log.exception("could not check a request for cancellation")
