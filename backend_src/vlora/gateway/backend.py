"""The gateway's client of a V-LoRA server, which asks the model `lmm` over gRPC.

Each question has its own stream, because Triton tells `lmm` that a client is gone only when a
stream ends. All streams share one connection.
"""

from __future__ import annotations

import asyncio
import json
import logging
import struct
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from vlora.gateway.errors import ApiError, from_grpc, from_server
from vlora.launcher.direct import grpc_options
from vlora.launcher.grpc_stubs import load_grpc_stubs
from vlora.serving.responder import from_message

log = logging.getLogger(__name__)

service_pb2, service_pb2_grpc = load_grpc_stubs()

MODEL = "lmm"
CONTROL_SECONDS = 5.0
"""Time limit in seconds of a cancellation, and of a request for the server's description."""

DESCRIPTION_SECONDS = 1.0
"""Seconds for which a description is reused."""

UNLIMITED = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))
"""Options of the channel. Other code limits the sizes of requests and answers."""

OUTPUTS = ("text_output", "finish_reason", "num_input_tokens", "num_output_tokens", "details")
HEAD_OUTPUTS = ("head_scores", "head_labels")


@dataclass(frozen=True)
class Question:
    """One request to `lmm`.

    id: id by which it can be cancelled.
    text: text of the prompt.
    task: task for `lmm`; None sends none.
    images, frames: encoded files.
    sampling: content of `sampling_parameters`.
    stream: whether the answer comes in pieces.
    logprobs: whether to return log probabilities.
    """

    id: str
    text: str
    task: str | None = None
    images: Sequence[bytes] = ()
    frames: Sequence[bytes] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)
    stream: bool = False
    logprobs: bool = False


@dataclass(frozen=True)
class Piece:
    """One response to a question. outputs: decoded outputs by name."""

    outputs: Mapping[str, Any]

    @property
    def text(self) -> str:
        return str(self._first("text_output", ""))

    @property
    def finish_reason(self) -> str | None:
        """`stop` or `length` in the last piece; None in the others."""
        reason = str(self._first("finish_reason", "None"))
        return None if reason == "None" else reason

    @property
    def num_input_tokens(self) -> int:
        return int(self._first("num_input_tokens", 0))

    @property
    def num_output_tokens(self) -> int:
        return int(self._first("num_output_tokens", 0))

    @property
    def logprobs(self) -> list[dict[str, dict[str, Any]]]:
        """Alternatives by token id, for each token; the sampled token comes first."""
        return json.loads(self._first("logprobs", "null")) or []

    @property
    def details(self) -> dict[str, Any]:
        """Task, adapter, timings and cached tokens; {} before the last piece."""
        details: dict[str, Any] = json.loads(self._first("details", "{}"))
        return details

    @property
    def scores(self) -> dict[str, float]:
        """Score of each label; {} unless a vision task head answered."""
        labels = self.outputs.get("head_labels", ())
        return dict(zip(labels, self.outputs.get("head_scores", ()), strict=True))

    def _first(self, name: str, default: Any) -> Any:
        values = self.outputs.get(name)
        return values[0] if values else default


class Backend:
    """Client of one V-LoRA server. It belongs to the event loop in which it is first used."""

    def __init__(self, address: str, answer_seconds: float) -> None:
        """Create the channel.

        address: host:port of the gRPC endpoint.
        answer_seconds: time limit of each response.
        """
        self._address = address
        self._answer_seconds = answer_seconds
        host = address.rpartition(":")[0]
        self._channel = grpc.aio.insecure_channel(address, [*UNLIMITED, *grpc_options(host)])
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._cancels: set[asyncio.Task[None]] = set()
        self._described: tuple[float, dict[str, Any]] | None = None
        self._describing = asyncio.Lock()

    async def close(self) -> None:
        """Finish the cancellations that are running, and close the connection."""
        if self._cancels:
            await asyncio.wait(self._cancels)
        await self._channel.close()

    async def ask(self, question: Question) -> AsyncIterator[Piece]:
        """Yield the pieces of the answer. The last one has a finish reason.

        If the iterator is closed before its end, the question is cancelled by its id. Raises
        ApiError.
        """
        call = self._stub.ModelStreamInfer()
        id, sampling = question.id, question.sampling
        ended = finished = False
        try:
            await call.write(_request(question))
            del question  # It holds the images.
            await call.done_writing()
            while not ended:
                async with asyncio.timeout(self._answer_seconds):
                    message = await call.read()
                if message is grpc.aio.EOF:
                    ended = True
                    break
                if message.error_message:
                    ended = True
                    raise from_server(from_message(message.error_message), sampling)
                response = message.infer_response
                ended = response.parameters["triton_final_response"].bool_param
                if response.outputs:
                    piece = Piece(_outputs(response))
                    finished = piece.finish_reason is not None
                    yield piece
            if not finished:
                raise ApiError("INTERNAL", "the V-LoRA server did not finish its answer")
        except TimeoutError:
            seconds = self._answer_seconds
            raise ApiError(
                "UNAVAILABLE", f"the V-LoRA server sent nothing for {seconds:g} s"
            ) from None
        except grpc.aio.AioRpcError as error:
            ended = True
            raise from_grpc(error) from None
        finally:
            if not ended:
                self._cancel(id)
            call.cancel()

    def _cancel(self, id: str) -> None:
        """Cancel a question by its id, in the background."""
        task = asyncio.get_running_loop().create_task(self._send_cancel(id))
        self._cancels.add(task)
        task.add_done_callback(self._cancels.discard)

    async def _send_cancel(self, id: str) -> None:
        try:
            await self._control("cancel", id)
        except ApiError as error:
            log.warning("could not cancel request %s: %s", id, error.message)

    async def describe(self) -> dict[str, Any]:
        """Return the server's description, at most `DESCRIPTION_SECONDS` old. Raises ApiError."""
        async with self._describing:
            now = asyncio.get_running_loop().time()
            if self._described is None or now - self._described[0] > DESCRIPTION_SECONDS:
                outputs = await self._control("describe")
                self._described = now, json.loads(outputs["details"][0])
            return self._described[1]

    async def _control(self, flag: str, id: str = "") -> dict[str, Any]:
        """Send a request whose only input is this BOOL; return the outputs of its response."""
        request = service_pb2.ModelInferRequest(model_name=MODEL, id=id)
        request.inputs.add(name=flag, datatype="BOOL", shape=[1])
        request.raw_input_contents.append(b"\x01")
        request.parameters["triton_enable_empty_final_response"].bool_param = True
        call = self._stub.ModelStreamInfer(timeout=CONTROL_SECONDS)
        try:
            await call.write(request)
            await call.done_writing()
            message = await call.read()
            if message is grpc.aio.EOF:
                raise ApiError("UNAVAILABLE", "the V-LoRA server sent no answer")
            if message.error_message:
                raise from_server(from_message(message.error_message), ())
            return _outputs(message.infer_response)
        except grpc.aio.AioRpcError as error:
            raise from_grpc(error) from None
        finally:
            call.cancel()


def _request(question: Question) -> Any:
    request = service_pb2.ModelInferRequest(model_name=MODEL, id=question.id)
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    strings: dict[str, Sequence[bytes]] = {
        "text_input": [question.text.encode()],
        "sampling_parameters": [json.dumps(question.sampling).encode()],
        "image": question.images,
        "frames": question.frames,
    }
    if question.task is not None:
        strings["task"] = [question.task.encode()]
    for name, values in strings.items():
        if values:
            request.inputs.add(name=name, datatype="BYTES", shape=[len(values)])
            packed = [part for value in values for part in (struct.pack("<I", len(value)), value)]
            request.raw_input_contents.append(b"".join(packed))
    flags = {
        "stream": question.stream,
        "exclude_input_in_output": True,
        "return_finish_reason": True,
        "return_num_input_tokens": True,
        "return_num_output_tokens": True,
        "return_logprobs": question.logprobs,
    }
    for name, value in flags.items():
        request.inputs.add(name=name, datatype="BOOL", shape=[1])
        request.raw_input_contents.append(b"\x01" if value else b"\x00")
    for name in (*OUTPUTS, *HEAD_OUTPUTS, *(("logprobs",) if question.logprobs else ())):
        request.outputs.add(name=name)
    return request


def _outputs(response: Any) -> dict[str, Any]:
    """Return the outputs of a response by name, each a list of strings or numbers."""
    raws = zip(response.outputs, response.raw_output_contents, strict=True)
    return {output.name: _values(output.datatype, raw) for output, raw in raws}


def _values(datatype: str, raw: bytes) -> list[Any]:
    if datatype == "BYTES":
        texts, start = [], 0
        while start < len(raw):
            end = start + 4 + int.from_bytes(raw[start : start + 4], "little")
            texts.append(raw[start + 4 : end].decode())
            start = end
        return texts
    kind = {"UINT32": "I", "FP32": "f"}[datatype]
    return list(struct.unpack(f"<{len(raw) // 4}{kind}", raw))
