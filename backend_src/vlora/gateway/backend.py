"""The gateway's client of a V-LoRA server, which sends requests to the model `lmm` over gRPC.

Each request has its own gRPC stream, because Triton reports a cancellation to `lmm` only when the
stream of the request ends. All streams share one connection.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from vlora.errors import from_message, pause_before_repeat
from vlora.gateway.errors import ApiError, from_grpc, from_server
from vlora.net import (
    Tls,
    add_strings,
    aio_channel,
    load_grpc_stubs,
    outputs_of,
    routing_headers,
    string_parts,
)

service_pb2, _ = load_grpc_stubs()
METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"
MODEL = "lmm"
CONTROL_SECONDS = 5.0  # Time limit in seconds of a request for the server's description.
DESCRIPTION_SECONDS = 1.0  # Seconds for which a description is reused.
# Maximum number of bytes of all requests that are kept to be sent again.
MAX_KEPT_BYTES = 256 * 1024 * 1024

# Tag of a serialized `raw_input_contents`: its field number, and the type for bytes.
CONTENT_TAG = bytes(
    [service_pb2.ModelInferRequest.DESCRIPTOR.fields_by_name["raw_input_contents"].number << 3 | 2]
)

OUTPUTS = ("text_output", "finish_reason", "num_input_tokens", "num_output_tokens", "details")
HEAD_OUTPUTS = ("head_scores", "head_labels")
# Maximum number of seconds between two attempts to connect. gRPC's default is two minutes, so a
# server that starts after the gateway would be noticed late.
RECONNECT_SECONDS = 2.0
OPTIONS = (("grpc.max_reconnect_backoff_ms", int(1000 * RECONNECT_SECONDS)),)


Headers = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Question:
    """One request to `lmm`, with images and videos as encoded files and `sampling_parameters`.
    has_messages: whether the text is JSON of messages.
    """

    id: str
    text: str
    task: str | None = None
    images: Sequence[bytes] = ()
    videos: Sequence[bytes] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)
    stream: bool = False
    logprobs: bool = False
    has_messages: bool = False


@dataclass(frozen=True, slots=True)
class Piece:
    """One response to a question. The answer to a question that streams has several.

    finish_reason: `stop` or `length` in the last piece; None in the others.
    logprobs: alternatives by token id, for each token; the sampled token comes first.
    details: task, adapter, timings and number of cached tokens; {} before the last piece.
    scores: score of each label; {} unless a vision task head answered.
    """

    text: str = ""
    finish_reason: str | None = None
    num_input_tokens: int = 0
    num_output_tokens: int = 0
    logprobs: Sequence[Mapping[str, Mapping[str, Any]]] = ()
    details: Mapping[str, Any] = field(default_factory=dict)
    scores: Mapping[str, float] = field(default_factory=dict)


class TimedCall:
    """A gRPC call of one request whose operations have a time limit.

    One timer serves all, because a new one for each would be expensive. When it fires, it either
    detects a timeout or restarts itself for the current operation.
    """

    def __init__(self, call: Any, seconds: float) -> None:
        self._call = call
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._waiting_since: float | None = None
        self._late = False
        self._timer = self._loop.call_later(seconds, self._check)

    async def send(self, request: bytes) -> None:
        """Send the only request. Raise TimeoutError if the server does not take it in time."""
        await self._limited(_send(self._call, request))

    async def next(self) -> Any:
        """Return the next message, or EOF. Raise TimeoutError if none arrives in time."""
        return await self._limited(self._call.read())

    async def _limited(self, operation: Awaitable[Any]) -> Any:
        self._waiting_since = self._loop.time()
        try:
            return await operation
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._late and task is not None and not task.cancelling():
                raise TimeoutError from None
            raise
        finally:
            self._waiting_since = None

    def restart(self, call: Any) -> None:
        """Use another call, for the same request."""
        self._call.cancel()
        self._call = call

    def close(self) -> None:
        self._timer.cancel()
        self._call.cancel()

    def _check(self) -> None:
        now = self._loop.time()
        since = now if self._waiting_since is None else self._waiting_since
        if now >= since + self._seconds:
            self._late = True
            self._call.cancel()
        else:
            self._timer = self._loop.call_at(since + self._seconds, self._check)


class Backend:
    """Client of the V-LoRA server at `address`, host:port. It belongs to one event loop.

    answer_seconds: time limit of sending a request, and of each response.
    """

    def __init__(self, address: str, answer_seconds: float, tls: Tls | None = None) -> None:
        self._answer_seconds = answer_seconds
        self._channel = aio_channel(address, tls, OPTIONS)
        # Requests are sent as bytes, which `_request` serializes.
        self._stream = self._channel.stream_stream(
            METHOD, response_deserializer=service_pb2.ModelStreamInferResponse.FromString
        )
        self._kept_bytes = 0
        # Time and result of the last request for the server's description.
        self._described: tuple[float, dict[str, Any] | ApiError] | None = None
        self._describing = asyncio.Lock()
        self._parsed: tuple[bytes, dict[str, Any]] = b"", {}
        self._heard = -math.inf  # Time of the last response to a question.

    async def close(self) -> None:
        await self._channel.close()

    async def ask(
        self, question: Question, on_sent: Callable[[], None] = lambda: None
    ) -> AsyncGenerator[Piece, None]:
        """Yield the pieces of the answer. The last one has a finish reason. Raises ApiError. If the
        iterator is closed before its end, `lmm` notices the end of the stream and cancels.

        A question that a server which shuts down has not begun is sent again, since Envoy selects
        another server then. Envoy itself cannot: the error is a message in an open stream. A
        question whose adapter was changed meanwhile is sent again, too.

        on_sent: called when the question has been sent.
        """
        sampling = question.sampling
        route = routing_headers(sampling.get("lora_name"), sampling.get("stream_id"))
        unsent = [_request(question)]
        del question  # Free the encoded images.
        answers = TimedCall(self._stream(metadata=route), self._answer_seconds)
        ended = finished = False
        try:
            message = await self._begin(answers, unsent, route, on_sent)
            while not ended and message is not grpc.aio.EOF:
                if message.error_message:
                    raise from_server(from_message(message.error_message), sampling)
                self._heard = asyncio.get_running_loop().time()
                response = message.infer_response
                ended = response.parameters["triton_final_response"].bool_param
                if response.outputs:
                    piece = _piece(outputs_of(response))
                    finished = piece.finish_reason is not None
                    yield piece
                if not ended:
                    message = await answers.next()
            if not finished:
                raise ApiError("INTERNAL", "the V-LoRA server did not finish its answer")
        except TimeoutError:
            reason = f"the V-LoRA server sent nothing for {self._answer_seconds:g} s"
            raise ApiError("UNAVAILABLE", reason) from None
        except grpc.aio.AioRpcError as error:
            raise from_grpc(error) from None
        finally:
            answers.close()

    async def _begin(
        self, answers: TimedCall, unsent: list[bytes], route: Headers, on_sent: Callable[[], None]
    ) -> Any:
        """Send a request, which is removed from `unsent`; return the first message, or EOF."""
        request = unsent.pop()
        await answers.send(request)
        on_sent()
        size = len(request)
        if self._kept_bytes + size > MAX_KEPT_BYTES:
            del request
            return await answers.next()
        self._kept_bytes += size
        try:
            repeats = 0
            while True:
                message = await answers.next()
                if message is grpc.aio.EOF:
                    return message
                if (pause := pause_before_repeat(message.error_message, repeats)) is None:
                    return message
                await asyncio.sleep(pause)
                answers.restart(self._stream(metadata=route))
                await answers.send(request)
                repeats += 1
        finally:
            self._kept_bytes -= size

    async def check(self) -> None:
        """Raise ApiError if the server does not answer. It is not asked if it has just answered a
        question, because its answer would wait behind all requests that it is reading.
        """
        if asyncio.get_running_loop().time() > self._heard + DESCRIPTION_SECONDS:
            await self.describe()

    async def describe(self) -> dict[str, Any]:
        """Return the server's description, cached for `DESCRIPTION_SECONDS`; the same object until
        it changes. Calls at the same time share one request, and its error. Raises ApiError.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        async with self._describing:
            result = self._last_description(began)
            if result is None:
                try:
                    result = await self._ask_description()
                except ApiError as error:
                    result = error
                self._described = loop.time(), result
            if isinstance(result, ApiError):
                raise result
            return result

    def _last_description(self, began: float) -> dict[str, Any] | ApiError | None:
        if self._described is None:
            return None
        at, result = self._described
        oldest = began if isinstance(result, ApiError) else began - DESCRIPTION_SECONDS
        return result if at >= oldest else None

    async def _ask_description(self) -> dict[str, Any]:
        request = service_pb2.ModelInferRequest(model_name=MODEL)
        request.inputs.add(name="describe", datatype="BOOL", shape=[1])
        request.raw_input_contents.append(b"\x01")
        request.parameters["triton_enable_empty_final_response"].bool_param = True
        call = self._stream(timeout=CONTROL_SECONDS)
        try:
            await _send(call, request.SerializeToString())
            message = await call.read()
            if message is grpc.aio.EOF:
                raise ApiError("UNAVAILABLE", "the V-LoRA server sent no answer")
            if message.error_message:
                raise from_server(from_message(message.error_message), ())
            text = outputs_of(message.infer_response)["details"][0]
            if text != self._parsed[0]:  # Of many adapters, it has megabytes.
                self._parsed = text, dict(json.loads(text))
            return self._parsed[1]
        except grpc.aio.AioRpcError as error:
            raise from_grpc(error) from None
        finally:
            call.cancel()


async def _send(call: Any, request: bytes) -> None:
    """Send the only request of a call. Raises ApiError or AioRpcError if the call ends before."""
    try:
        await call.write(request)
        await call.done_writing()
    except (grpc.aio.InternalError, grpc.aio.AioRpcError) as error:
        # gRPC fails so if it has not yet noticed why the call has ended.
        if isinstance(error, grpc.aio.AioRpcError) and error.code() != grpc.StatusCode.INTERNAL:
            raise
        reason = "the V-LoRA server did not take the request; its connection or its time has ended"
        raise ApiError("UNAVAILABLE", reason) from None


def _request(question: Question) -> bytes:
    request = service_pb2.ModelInferRequest(model_name=MODEL, id=question.id)
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    strings = {
        "text_input": [question.text.encode()],
        "sampling_parameters": [json.dumps(question.sampling).encode()],
        "task": [] if question.task is None else [question.task.encode()],
    }
    add_strings(request, strings)
    flags = {
        "stream": question.stream,
        "exclude_input_in_output": True,
        "return_finish_reason": True,
        "return_num_input_tokens": True,
        "return_num_output_tokens": True,
        "return_logprobs": question.logprobs,
        "messages": question.has_messages,
    }
    for name, value in flags.items():
        request.inputs.add(name=name, datatype="BOOL", shape=[1])
        request.raw_input_contents.append(b"\x01" if value else b"\x00")
    for name in (*OUTPUTS, *HEAD_OUTPUTS, *(("logprobs",) if question.logprobs else ())):
        request.outputs.add(name=name)
    # In protobuf, concatenating two serialized messages merges their fields. The files are appended
    # in this way, because setting them as a field would copy them twice.
    contents: list[bytes] = []
    media = {"image": question.images, "video": question.videos}
    for name, files in media.items():
        if files:
            request.inputs.add(name=name, datatype="BYTES", shape=[len(files)])
            contents += _content(string_parts(files))
    return b"".join([request.SerializeToString(), *contents])


def _content(parts: Sequence[bytes]) -> list[bytes]:
    """Return the parts of a serialized message with one value of `raw_input_contents`."""
    length, varint = sum(map(len, parts)), bytearray()
    while length > 0x7F:
        varint.append(length & 0x7F | 0x80)
        length >>= 7
    varint.append(length)
    return [CONTENT_TAG, bytes(varint), *parts]


def _piece(outputs: Mapping[str, Any]) -> Piece:
    def first(name: str, default: Any) -> Any:
        values = outputs.get(name)
        return values[0] if values else default

    reason = first("finish_reason", "None")
    labels, scores = outputs.get("head_labels", ()), outputs.get("head_scores", ())
    return Piece(
        first("text_output", ""),
        None if reason == "None" else reason,
        first("num_input_tokens", 0),
        first("num_output_tokens", 0),
        json.loads(outputs["logprobs"][0]) or () if outputs.get("logprobs") else (),
        json.loads(outputs["details"][0]) if outputs.get("details") else {},
        dict(zip(labels, scores, strict=True)),
    )


async def wait_for_first_answer(
    backend: Backend,
    address: str,
    say: Callable[[str], None],
    retry_seconds: float = RECONNECT_SECONDS,
) -> dict[str, Any]:
    """Return the server's description once it answers. If it does not at once, `say` so, and later
    that it does.
    """
    warned = False
    while True:
        try:
            description = await backend.describe()
        except ApiError as error:
            if not warned:
                say(
                    f"warning: no answer from the server at {address} yet: {error.message}\n"
                    "  Start it with `vlora serve`, or name the gRPC address of another one with"
                    " --grpc HOST:PORT.\n"
                    f"  The gateway tries again every {retry_seconds:g} s. Until the server"
                    " answers, requests get status 503."
                )
            warned = True
            await asyncio.sleep(retry_seconds)
        else:
            if warned:
                say(f"the server at {address} answers now")
            return description
