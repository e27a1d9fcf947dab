"""Fakes of the interfaces that the services use: engine, adapters, responder, metrics."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from vlora.adapters.files import AdapterInfo
from vlora.errors import Cancelled, NotFound, Unavailable, VLoraError
from vlora.live_requests import LiveRequest, RequestTable, State
from vlora.request import Output, OutputSink, Request
from vlora.serving.tensors import Array, Tensors
from vlora.vision.chat_template import ChatTemplate

TEMPLATE = ChatTemplate(prefix="[USER] ", suffix=" [BOT]")


def adapter(name: str, tasks: tuple[str, ...] = ()) -> AdapterInfo:
    return AdapterInfo(
        name=name,
        digest=f"digest-of-{name}",
        ranks=(4,),
        targets=("q_proj",),
        tasks=tasks,
        accuracy={},
        head_labels=(),
        head_tasks=(),
    )


class RustPanic(BaseException):
    """A panic of a Rust library, such as tokenizers or safetensors. It is not an Exception."""


@dataclass
class Clock:
    now: float

    def __call__(self) -> float:
        return self.now


class FakeAdapters:
    def __init__(self, *infos: AdapterInfo) -> None:
        self._infos = {info.name: info for info in infos}

    def info(self, name: str) -> AdapterInfo:
        if name not in self._infos:
            raise NotFound(f"unknown adapter '{name}'")
        return self._infos[name]

    def route(self, task: str, question: str) -> str | None:
        """Return the adapter that the question's first word names, in place of a router."""
        word = question.split()[0]
        return word if word in self._infos else None


class FakeEngine:
    """An engine that records its calls.

    With `say` and `fail` the test sends outputs in place of the response thread.

    refuse: error that all calls raise. max_admitted: queue length at which requests are refused.
    """

    def __init__(self, *infos: AdapterInfo, table: RequestTable | None = None) -> None:
        self.adapters = FakeAdapters(*infos)
        self.table = RequestTable() if table is None else table
        self.max_model_len = 1024
        self.requests: list[Request] = []
        self.aborted: list[str] = []
        self.stopped: list[str] = []
        self.refuse: BaseException | None = None
        self.max_admitted: int | None = None
        self._sinks: dict[str, OutputSink] = {}

    @property
    def admitted(self) -> int:
        """Number of requests that were admitted and not submitted."""
        return sum(entry.state <= State.TAKEN for entry in self.table)

    def share(self, entry: LiveRequest, tenant: str | None) -> None:
        entry.tenant = tenant

    def admit(self, entry: LiveRequest, size: int = 0) -> None:
        """Admit a request. Raise Unavailable if the queue is full."""
        if self.max_admitted is not None and self.admitted >= self.max_admitted:
            raise Unavailable(f"the queue is full: {self.admitted} requests are waiting")
        self.table.admit(entry, size)

    def submit(self, request: Request, sink: OutputSink) -> None:
        if self.refuse is not None:
            raise self.refuse
        entry = self.table.get(request.id)
        assert entry is not None
        entry.state = State.IN_ENGINE
        self._sinks[request.id] = sink  # First: a test may answer as soon as it sees the request.
        self.requests.append(request)

    def abort(self, request_id: str, reason: VLoraError | None = None) -> bool:
        """End a request that waits. Otherwise record the call, and end the request."""
        reason = reason or Cancelled("the request was cancelled")
        entry = self.table.get(request_id)
        if entry is not None and self.table.cancel(entry, reason):
            return True
        self.aborted.append(request_id)
        self.fail(reason, request_id)
        return False

    def stop_client(self, client_id: str) -> list[str]:
        """End the requests that wait. If there are none, record the call."""
        if self.refuse is not None:
            raise self.refuse
        found = self.table.requests_to_cancel(client_id)
        if not found:
            self.stopped.append(client_id)
        return [entry.id for entry in found if self.abort(entry.id)]

    def say(self, text: str, finish_reason: str | None = None, **more: object) -> None:
        request = self.requests[-1]
        output = Output(
            request_id=request.id,
            text=text,
            token_ids=(1,),
            finish_reason=finish_reason,
            num_input_tokens=5,
            adapter=request.adapter,
            **more,  # type: ignore[arg-type]
        )
        self._send(output)

    def fail(self, error: VLoraError, request_id: str | None = None) -> None:
        """Send an error as the last output of a request, by default of the most recent one."""
        self._send(Output(request_id or self.requests[-1].id, error=error))

    def _send(self, output: Output) -> None:
        sink, entry = self._sinks.get(output.request_id), self.table.get(output.request_id)
        if sink is not None and entry is not None:
            if output.finished:
                self.table.remove(entry)
            sink(output)


@dataclass
class FakeResponder:
    """A responder that records what a client would receive.

    broken: whether `send` fails. done: event that the final response or error sets.
    """

    sent: list[tuple[Tensors, bool]] = field(default_factory=list)
    failure: VLoraError | None = None
    cancelled: bool = False
    broken: bool = False
    done: threading.Event = field(default_factory=threading.Event)

    def send(self, tensors: Tensors, final: bool) -> None:
        if self.broken:
            raise OSError("the client's connection is gone")
        assert not self.done.is_set(), "sent after the final response"
        self.sent.append((tensors, final))
        if final:
            self.done.set()

    def fail(self, error: VLoraError) -> None:
        assert not self.done.is_set(), "failed after the final response"
        self.failure = error
        self.done.set()

    def is_cancelled(self) -> bool:
        return self.cancelled

    @property
    def answer(self) -> Tensors:
        """The only response, waited for."""
        assert self.done.wait(30)
        assert self.failure is None
        ((tensors, final),) = self.sent
        assert final
        return tensors

    @property
    def error(self) -> VLoraError:
        """The error, waited for."""
        assert self.done.wait(30)
        assert self.failure is not None
        return self.failure

    @property
    def texts(self) -> list[str]:
        return [first(tensors["text_output"]) for tensors, _ in self.sent]


def first(tensor: Array) -> str:
    return bytes(tensor.reshape(-1)[0]).decode()


def features(*rows: int, hidden: int = 4, video: Sequence[int] = ()) -> dict[str, Array]:
    """Return the feature inputs of images with these numbers of rows.

    video: indices of the images that are frames of a clip.
    """
    starts = np.cumsum([0, *rows])[:-1]
    layout = [
        (start, count, 1, 1, count, int(index in video))
        for index, (start, count) in enumerate(zip(starts, rows, strict=True))
    ]
    return {
        "image_features": np.ones((sum(rows), hidden), np.float32),
        "image_layout": np.array(layout, np.int32).reshape(-1, 6),
        "image_size": np.full((len(rows), 2), 10, np.int32),
    }


class FakeMetric:
    """A gauge, counter and histogram in one.

    error: error that later calls of `increment` raise.
    """

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.value = 0.0
        self.observed: list[float] = []

    def set(self, value: float) -> None:
        self.value = value

    def increment(self, value: float) -> None:
        if self.error is not None:
            raise self.error
        self.value += value

    def observe(self, value: float) -> None:
        self.observed.append(value)


class FakeRegistry:
    def __init__(self) -> None:
        self.metrics: dict[tuple[str, tuple[tuple[str, str], ...]], FakeMetric] = {}

    def gauge(self, name: str, help: str, labels: Mapping[str, str]) -> FakeMetric:
        return self.metrics.setdefault((name, tuple(sorted(labels.items()))), FakeMetric())

    counter = gauge

    def histogram(
        self, name: str, help: str, labels: Mapping[str, str], buckets: Sequence[float]
    ) -> FakeMetric:
        return self.gauge(name, help, labels)

    def drop(self, name: str) -> None:
        self.metrics = {key: value for key, value in self.metrics.items() if key[0] != name}

    def __getitem__(self, name: str) -> FakeMetric:
        (metric,) = (metric for (key, _), metric in self.metrics.items() if key == name)
        return metric
