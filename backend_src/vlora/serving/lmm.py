"""The `lmm` model without Triton: passes requests to the engine and its outputs to the clients.

A request with images, a long prompt or a structure waits for a pool thread; Triton's thread submits
all others. The engine's response thread sends the outputs.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from vlora.config import Limits
from vlora.errors import Cancelled
from vlora.request import ImageFeatures, Output
from vlora.sampling import ADAPTER_KEY, MEDIA_KEYS
from vlora.serving.answer_writer import AnswerWriter
from vlora.serving.arrivals import ARRIVAL_INPUT, ArrivalStamps
from vlora.serving.codec import (
    DEFAULT_TASK,
    Call,
    adapter_name,
    freshness_keys,
    is_describe,
    is_structured,
    names_no_adapter,
    prepare,
    read_call,
)
from vlora.serving.service import ServedRequest, Service
from vlora.serving.tenant_pool import TenantPool
from vlora.serving.tensors import Tensors, bytes_of, strings
from vlora.tasks import TASKS
from vlora.vision.chat_template import ChatTemplate

if TYPE_CHECKING:
    from vlora.adapters.catalog import NameTable
    from vlora.adapters.files import AdapterInfo
    from vlora.engine.loop import EngineLoop

log = logging.getLogger(__name__)

# Characters. Tokenizing more than this takes milliseconds, too long for Triton's thread.
LONG_PROMPT = 8192
# Maximum number of broken adapters in the server's description, which gateways ask for often.
MAX_BROKEN = 1000
# Threads that compile structures, which may take seconds. No other request waits for them.
STRUCTURED_THREADS = 16
# Calls the vision encoder with its inputs and an id.
Encode = Callable[[Tensors, str], ImageFeatures]
# Called with every output of a request before it is sent; never raises.
Observe = Callable[[Output], None]


class LmmService(Service):
    """Answers `lmm` requests with an engine, whose table has the live requests.

    encode: returns the features of a request's images. The call blocks.
    pool: threads that call `encode` and submit long prompts, for requests that are admitted.
    observe: returns a function that is called with every output of a new request of an adapter.
    cancel_elsewhere: passes a cancelled id to `lmm_unary` and `vision_encoder`; blocks, may raise.
    tell_peers: passes a cancelled id to other replicas; blocks, never raises.
    routes: whether to choose an adapter for requests that name none.
    describe: returns the answer to a request with the input `describe`.
    """

    def __init__(
        self,
        engine: EngineLoop,
        template: ChatTemplate,
        limits: Limits,
        encode: Encode,
        pool: TenantPool,
        stamps: ArrivalStamps,
        observe: Callable[[str | None], Observe] = lambda adapter: lambda output: None,
        cancel_elsewhere: Callable[[str], None] = lambda client_id: None,
        tell_peers: Callable[[str], None] = lambda client_id: None,
        routes: bool = False,
        describe: Callable[[], str] = lambda: "{}",
    ) -> None:
        self._engine = engine
        self._template = template
        self._encode = encode
        self._pool = pool
        self._observe = observe
        self._cancel_elsewhere = cancel_elsewhere
        self._tell_peers = tell_peers
        self._routes = routes
        self._describe = describe
        self._cancels = ThreadPoolExecutor(1, thread_name_prefix="cancel")
        self._structured = TenantPool(STRUCTURED_THREADS, "structured")
        self._rendering = threading.Lock()
        super().__init__(engine.table, limits, stamps)

    def close(self) -> None:
        """Refuse new requests and those that wait for a thread. The engine drains all others."""
        super().close()
        self._cancels.shutdown()
        self._structured.shutdown()

    def _start(
        self, request: ServedRequest, tensors: Tensors, parameters: Mapping[str, Any]
    ) -> None:
        if is_describe(tensors):
            request.answer({"details": strings([self._describe()])})
            return
        self._check_open()
        self._engine.admit(request, bytes_of(tensors))
        call = read_call(tensors, parameters, self._limits, self._stamps.read(tensors))
        self._engine.share(request, call.freshness.cache_salt)
        if call.raw_images or len(call.text) > LONG_PROMPT or is_structured(call):
            pool, work = self._pool, partial(self._encode_then_submit, request, call)
            if is_structured(call):
                pool = self._structured
            self._wait_for(pool, request, call.freshness, work)
        else:
            self._submit(request, call)

    def _encode_then_submit(self, request: ServedRequest, call: Call) -> None:
        size = request.size
        if call.raw_images:
            request.moved_on = True
            features = self._encode(self._encoder_inputs(call), request.id)
            request.moved_on = False
            size = features.features.nbytes
            call = replace(call, images=features, raw_images={})
        if self.table.take(request):
            self.table.resize(request, size)
            self._submit(request, call)

    def _encoder_inputs(self, call: Call) -> Tensors:
        inputs = {"text_input": strings([call.text]), **call.raw_images}
        keys = freshness_keys(call.sampling)
        keys |= {key: call.sampling[key] for key in MEDIA_KEYS if key in call.sampling}
        if (name := adapter_name(call.sampling)) is not None:
            keys[ADAPTER_KEY] = name
        if keys:
            inputs["sampling_parameters"] = strings([json.dumps(keys)])
        inputs[ARRIVAL_INPUT] = self._stamps.make(call.freshness.arrival)
        return inputs

    def _submit(self, request: ServedRequest, call: Call) -> None:
        name = adapter_name(call.sampling)
        if self._routes and names_no_adapter(call):
            name = self._engine.adapters.route(call.task or DEFAULT_TASK, call.text)
        info = None if name is None else self._engine.adapters.info(name)
        # Python reads the JSON of a chat and runs the template: several at a time would leave the
        # engine's thread a small share of the GIL.
        with self._rendering if len(call.text) > LONG_PROMPT else nullcontext():
            context = self._engine.max_model_len
            prepared, task = prepare(call, request.id, info, self._template, context)
        writer = AnswerWriter(call, task, prepared.sampling.stream_interval_ms / 1e3)
        self._engine.submit(prepared, partial(self._answer, request, writer, self._observe(name)))

    def _answer(
        self, request: ServedRequest, writer: AnswerWriter, observe: Observe, output: Output
    ) -> None:
        try:
            observe(output)
            if output.error is not None:
                raise output.error
            tensors = writer.write(output)
            if tensors is not None:
                request.responder.send(tensors, final=output.finished)
        except Exception as error:
            request.fail(error)
            if not output.finished:
                self._engine.abort(request.id)

    # -- cancellation ------------------------------------------------------------------------

    def _cancel(self, client_id: str) -> None:
        self.cancel_here(client_id)
        if not self._refuses:
            self._cancels.submit(self._tell_peers, client_id)

    def cancel_here(self, client_id: str) -> None:
        """Cancel a client's request if it is in this server. Raises InvalidArgument."""
        waiting = self._engine.stop_client(client_id)
        # `lmm` passes requests to the encoder under its own ids, so these are cancelled, too.
        for one in (client_id, *waiting):
            self._pass_on(one)

    def _disconnected(self, request: ServedRequest) -> None:
        if self._engine.abort(request.id, Cancelled("the client has disconnected")):
            self._pass_on(request.id)

    def _pass_on(self, request_id: str) -> None:
        if not self._refuses:
            self._cancels.submit(self._call_elsewhere, request_id)

    def _call_elsewhere(self, request_id: str) -> None:
        try:
            self._cancel_elsewhere(request_id)
        except Exception:
            log.exception("could not pass on the cancellation of request %r", request_id)


class ServerDescription:
    """Describes a server as JSON, which is made again only after the adapters have changed."""

    def __init__(self, names: Callable[[], NameTable], max_model_len: int) -> None:
        self._names = names
        self._max_model_len = max_model_len
        self._described: NameTable | None = None
        self._json = ""
        # Of each adapter what its entry was made of, and the entry. All entries of 100,000 adapters
        # take a second, in which no request is received. So they are made at the start.
        self._entries: dict[str, tuple[AdapterInfo, str]] = {}
        self.as_json()

    def as_json(self) -> str:
        """Return the object `{"max_model_len", "tasks", "task_labels", "adapters", "broken"}`.

        `task_labels` is for the playground. `adapters` lists the usable ones in order of name;
        `broken` maps the names of others, at most MAX_BROKEN, to their errors.
        """
        names = self._names()
        if names is not self._described:
            start = json.dumps(
                {
                    "max_model_len": self._max_model_len,
                    "tasks": list(TASKS),
                    "task_labels": {
                        name: {"name": spec.title, "label": spec.label, "hint": spec.hint}
                        for name, spec in TASKS.items()
                    },
                    "broken": {
                        name: str(names.broken[name]) for name in sorted(names.broken)[:MAX_BROKEN]
                    },
                }
            )
            self._entries = {name: self._entry_of(name, names) for name in names.names}
            adapters = ", ".join(entry for _, entry in self._entries.values())
            self._json = f'{start[:-1]}, "adapters": [{adapters}]}}'
            self._described = names
        return self._json

    def _entry_of(self, name: str, names: NameTable) -> tuple[AdapterInfo, str]:
        info, known = names.current[name].description.info, self._entries.get(name)
        if known is not None and known[0] is info:
            return known
        return info, json.dumps(_entry(name, info), allow_nan=False)


def _entry(name: str, info: AdapterInfo) -> dict[str, object]:
    return {
        "name": name,
        "tasks": list(info.tasks),
        "default_task": info.own_task,
        "accuracy": dict(info.accuracy),
        "ranks": list(info.ranks),
        "head_labels": list(info.head_labels),
        "head_tasks": list(info.head_tasks),
    }
