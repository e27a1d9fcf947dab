"""The `lmm_unary` model without Triton: answers a request with one response, by calling `lmm`.

Unary gRPC and ensembles cannot call `lmm`, a decoupled model with any number of responses.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from vlora.config import Limits
from vlora.errors import Internal, InvalidArgument, Unavailable
from vlora.live_requests import LiveRequest, RequestTable, State
from vlora.serving.arrivals import ARRIVAL_INPUT, ArrivalStamps
from vlora.serving.codec import freshness_of, read_sampling
from vlora.serving.service import ServedRequest, Service
from vlora.serving.tenant_pool import TenantPool
from vlora.serving.tensors import Array, Inputs, Tensors, bytes_of, flag, strings

# Calls `lmm` with inputs and an id, and returns its responses, or raises its VLoraError.
Ask = Callable[[Tensors, str], list[Tensors]]


class LmmUnaryService(Service):
    """Answers `lmm_unary` requests.

    pool: threads that call `ask`, which blocks.
    max_requests: maximum number of requests in this model; others are rejected uncopied.
    max_running: number of requests that the engine runs at the same time.
    """

    action = "relaying the request"
    watch_seconds = 0.2

    def __init__(
        self,
        ask: Ask,
        pool: TenantPool,
        limits: Limits,
        stamps: ArrivalStamps,
        table: RequestTable,
        max_requests: int,
        max_running: int,
    ) -> None:
        self._ask = ask
        self._pool = pool
        self._max_requests = max_requests
        self._max_running = max_running
        super().__init__(table, limits, stamps)

    def _start(
        self, request: ServedRequest, tensors: Tensors, parameters: Mapping[str, Any]
    ) -> None:
        self._check_open()
        if len(self.table) >= self._max_requests:
            waiting = len(self.table) - self._max_running
            raise Unavailable(f"the queue is full: {waiting} requests are waiting")
        self.table.add(request, bytes_of(tensors))
        arrival = self._stamps.read(tensors)
        sampling = read_sampling(Inputs(tensors), parameters, self._limits)
        freshness = freshness_of(sampling, arrival)
        self.table.share(request, freshness.cache_salt, self._max_requests - len(self.table) + 1)
        work = partial(self._relay, request, inner_request(tensors, sampling, self._limits))
        self._wait_for(self._pool, request, freshness, work)

    def _relay(self, request: ServedRequest, inner: dict[str, Array]) -> None:
        if not self.table.take(request):
            return
        request.moved_on = True
        inner[ARRIVAL_INPUT] = self._stamps.make(request.freshness.arrival)
        responses = [one for one in self._ask(inner, inner_id(request)) if one]
        if len(responses) != 1:
            raise Internal(f"'lmm' sent {len(responses)} responses instead of one")
        self.table.remove(request)
        (response,) = responses
        request.answer({**response, "answer": response["text_output"]})

    def _disconnected(self, request: ServedRequest) -> None:
        super()._disconnected(request)
        if request.state is State.TAKEN and not request.is_passed_on:
            # `lmm` has the request.
            self._ask({"cancel": flag(True)}, inner_id(request))
            request.is_passed_on = True


def inner_id(request: LiveRequest) -> str:
    return request.client_id if request.has_own_id else request.id


def inner_request(
    tensors: Tensors, sampling: Mapping[str, Any], limits: Limits
) -> dict[str, Array]:
    """Return the inputs for the call of `lmm`: not streaming, with `sampling` as a tensor.

    Raises InvalidArgument.
    """
    inputs = Inputs(tensors)
    if inputs.flag("stream"):
        raise InvalidArgument(
            "'stream' = true is not possible for 'lmm_unary', which sends one response; use 'lmm'"
        )
    if "image_layout" in tensors:
        # `task_head` puts the metadata into JSON, so they must be valid UTF-8.
        inputs.text("metadata", limits.max_metadata_bytes)
    inner = {name: np.array(tensor) for name, tensor in tensors.items()}
    inner["stream"] = flag(False)
    if "sampling_parameters" not in inner and sampling:
        inner["sampling_parameters"] = strings([json.dumps(sampling, allow_nan=False)])
    return inner
