"""The `lmm` model without Triton: requests to the engine, outputs to the client.

Life of a request here: `handle` reads it, has its images encoded on a pool thread if it brought
any, hands it to the engine, and leaves; the engine's response thread then calls the sink, which
sends. A watcher thread asks every live responder whether its client has gone.

Not known here: Triton, how an answer is computed.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from vlora.config import Limits
from vlora.errors import Unavailable
from vlora.request import ImageFeatures, Output, OutputSink, Request
from vlora.serving.answer_writer import AnswerWriter
from vlora.serving.codec import (
    Call,
    adapter_name,
    is_stop,
    prepare,
    read_call,
)
from vlora.serving.responder import Responder, as_vlora_error
from vlora.serving.tensors import Tensors, strings
from vlora.vision.prompts import ChatTemplate

if TYPE_CHECKING:
    from vlora.lora.adapter import AdapterInfo

log = logging.getLogger(__name__)

WATCH_SECONDS = 0.1
"""How often responders are asked for cancellation."""

Encode = Callable[[Tensors], ImageFeatures]
"""The vision encoder as this model reaches it: `text_input` and image inputs in, features out."""


class Adapters(Protocol):
    def info(self, name: str) -> AdapterInfo: ...


class Engine(Protocol):
    """What the service needs of `engine.loop.EngineLoop`."""

    @property
    def adapters(self) -> Adapters: ...
    def submit(self, request: Request, sink: OutputSink) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def stop_client(self, client_id: str) -> None: ...


class LmmService:
    """Answers `lmm` requests with an engine.

    Owns the responders of live requests: one is in `_live` from `handle` until its final
    response, and only then. `pool` runs the calls of `encode`, which block.
    `record` is told the last output of every request that was answered.
    """

    def __init__(
        self,
        engine: Engine,
        template: ChatTemplate,
        limits: Limits,
        encode: Encode,
        pool: Executor,
        record: Callable[[Output], None] = lambda output: None,
    ) -> None:
        self._record = record
        self._engine = engine
        self._template = template
        self._limits = limits
        self._encode = encode
        self._pool = pool
        self._live: dict[str, Responder] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="cancel-watch", daemon=True)
        self._watcher.start()

    @property
    def live(self) -> int:
        """Requests that have not had their final response."""
        return len(self._live)

    def handle(
        self, tensors: Tensors, parameters: Mapping[str, Any], client_id: str, responder: Responder
    ) -> None:
        """Answer one request; never raises. The tensors may be gone once this returns."""
        request_id = uuid.uuid4().hex
        try:
            if is_stop(tensors):
                self._engine.stop_client(client_id)
                responder.send({}, final=True)
                return
            if self._closed.is_set():
                raise Unavailable("the server is shutting down")
            call = read_call(tensors, parameters, client_id, self._limits)
            with self._lock:
                self._live[request_id] = responder
            if call.raw_images:
                kept = {name: np.array(value) for name, value in call.raw_images.items()}
                self._pool.submit(self._encode_then_submit, call, kept, request_id, responder)
            else:
                self._submit(call, request_id, responder)
        except Exception as error:
            self._fail(request_id, responder, error)

    def close(self) -> None:
        """Refuse what comes from now on; what runs is the engine's to drain."""
        self._closed.set()
        self._watcher.join()

    def _encode_then_submit(
        self, call: Call, images: Tensors, request_id: str, responder: Responder
    ) -> None:
        try:
            found = self._encode({"text_input": strings([call.text]), **images})
            self._submit(call.with_images(found), request_id, responder)
        except Exception as error:
            self._fail(request_id, responder, error)

    def _submit(self, call: Call, request_id: str, responder: Responder) -> None:
        name = adapter_name(call)
        info = None if name is None else self._engine.adapters.info(name)
        prepared = prepare(call, request_id, info, self._template)
        writer = AnswerWriter(call, prepared.task)
        self._engine.submit(
            prepared.request, lambda output: self._answer(output, request_id, writer, responder)
        )

    def _answer(
        self, output: Output, request_id: str, writer: AnswerWriter, responder: Responder
    ) -> None:
        """The sink: on the engine's response thread, in order, never raising."""
        try:
            if output.error is not None:
                raise output.error
            tensors = writer.write(output)
            if tensors is None:
                return
            if output.finished:
                self._forget(request_id)
                self._record(output)
            responder.send(tensors, final=output.finished)
        except Exception as error:
            if not output.finished:
                self._engine.abort(request_id)
            self._fail(request_id, responder, error)

    def _fail(self, request_id: str, responder: Responder, error: Exception) -> None:
        self._forget(request_id)
        try:
            responder.fail(as_vlora_error(error, "answering the request"))
        except Exception:
            log.exception("could not send a client its error")

    def _forget(self, request_id: str) -> None:
        with self._lock:
            self._live.pop(request_id, None)

    def _watch(self) -> None:
        while not self._closed.wait(WATCH_SECONDS):
            with self._lock:
                live = list(self._live.items())
            for request_id, responder in live:
                try:
                    if responder.is_cancelled():
                        self._engine.abort(request_id)
                except Exception:
                    log.exception("could not ask for cancellation")
