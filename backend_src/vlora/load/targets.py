"""Servers that a load is sent to: Triton models of the vLLM backend's contract, and OpenAI APIs."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import re
import struct
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import urlsplit

import grpc
import grpc.aio

from vlora.errors import (
    ServerError,
    from_message,
    in_one_line,
    is_coded,
    pause_before_repeat,
    shown,
)
from vlora.load.contents import Content
from vlora.net import (
    GRPC_ADDRESS,
    MAX_PORT,
    Tls,
    add_strings,
    aio_channel,
    load_grpc_stubs,
    outputs_of,
    port_hint,
    routing_headers,
)

service_pb2, service_pb2_grpc = load_grpc_stubs()
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
SETUP_SECONDS = 10.0
MAX_MESSAGE = 500  # Characters of a server's error that are kept.
CODE = re.compile(r"[\w.-]{1,64}", re.ASCII)  # Other codes of servers are replaced by ours.
# Maximum size of an answer's text, of a line of it, and of a message. A server may send anything.
MAX_ANSWER_BYTES = 16 * 1024 * 1024
MAX_TOKENS = 2**32  # Maximum number of tokens that a server may say, that of Triton's outputs.
# Errors of reading an answer that has another form than it should have.
BROKEN = (ValueError, LookupError, TypeError, AttributeError, RecursionError, struct.error)

# Inputs that ask for outputs, or for answers as they should be measured. Each is sent to a model
# that has it.
FLAGS = {
    "stream": True,
    "exclude_input_in_output": True,
    "return_finish_reason": True,
    "return_num_input_tokens": True,
    "return_num_output_tokens": True,
}
OUTPUTS = ("text_output", "result", "num_input_tokens", "num_output_tokens")


class RequestFailed(Exception):
    """Raised if a request has no answer. code: the server's word for it, or ours."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message[:MAX_MESSAGE])
        self.code = code


@dataclass
class Answer:
    """Part of an answer that has arrived. first: `time.perf_counter()` at its first token."""

    first: float | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    text: str = ""

    def arrive(self) -> None:
        self.first = self.first or time.perf_counter()

    def add(self, text: str) -> None:
        """Append to the text. Raises ValueError if it becomes too long."""
        self.text += text
        if len(self.text) > MAX_ANSWER_BYTES:
            raise ValueError(f"the answer has more than {MAX_ANSWER_BYTES} characters, the limit")


@dataclass(frozen=True)
class Question:
    """One request. adapter: name of the adapter; None for the base model. id: "" for none."""

    content: Content
    adapter: str | None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    task: str | None = None
    id: str = ""

    @property
    def headers(self) -> tuple[tuple[str, str], ...]:
        """Headers that tell a load balancer the adapter and the camera."""
        return routing_headers(self.adapter, self.sampling.get("stream_id"))


class Target(Protocol):
    """A server, in the event loop in which it is opened."""

    async def open(self) -> None:
        """Connect. Raises ServerError if the server cannot be used for a load."""

    async def ask(self, question: Question, answer: Answer) -> None:
        """Send a question and note in `answer` what arrives. Raises RequestFailed."""

    async def close(self) -> None: ...


class TritonTarget:
    """A model of a Triton server that has the vLLM backend's inputs, at HOST:PORT of its gRPC.

    unary: whether to ask by unary calls, which a load balancer can repeat. `lmm` has only streams.
    """

    def __init__(
        self, address: str, model: str, tls: Tls | None = None, *, unary: bool = False
    ) -> None:
        parts = GRPC_ADDRESS.fullmatch(address)
        if parts is None or int(parts[1]) > MAX_PORT:
            raise ServerError(f"--grpc takes HOST:PORT, as in 127.0.0.1:8001, not '{address}'")
        self._address, self._model, self._tls, self._unary = address, model, tls, unary
        self._inputs: set[str] = set()
        self._outputs: list[str] = []

    async def open(self) -> None:
        sizes = [("grpc.max_receive_message_length", MAX_ANSWER_BYTES)]
        self._channel = aio_channel(self._address, self._tls, sizes)
        self._stream = self._channel.stream_stream(
            STREAM,
            request_serializer=service_pb2.ModelInferRequest.SerializeToString,
            response_deserializer=service_pb2.ModelStreamInferResponse.FromString,
        )
        self._stub = stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        try:
            wanted = service_pb2.ModelMetadataRequest(name=self._model)
            known = await stub.ModelMetadata(wanted, timeout=SETUP_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise ServerError(self._why(error)) from None
        self._inputs = {one.name for one in known.inputs}
        self._outputs = [one.name for one in known.outputs if one.name in OUTPUTS]
        if "text_input" not in self._inputs:
            have = ", ".join(sorted(self._inputs))[:MAX_MESSAGE]
            raise ServerError(
                f"model '{self._model}' has no input text_input, but {have}; name one of the vLLM"
                " backend's inputs with --model, such as lmm, visual_retrieval or vllm_model"
            )

    def _why(self, error: grpc.aio.AioRpcError) -> str:
        details = error.details() or error.code().name
        if error.code() in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT):
            return f"the server at {self._address} has no model to measure: {details}; see --model"
        return (
            f"no server answers at {self._address}: {details}{port_hint(details)}; start one with"
            " `vlora serve`, or name another gRPC address with --grpc HOST:PORT"
        )

    async def close(self) -> None:
        await self._channel.close()

    async def ask(self, question: Question, answer: Answer) -> None:
        request, metadata = self._request(question), question.headers
        try:
            if self._unary:
                response = await self._stub.ModelInfer(request, metadata=metadata)
                self._read(response, question, answer)
            else:
                await self._ask_retrying(request, metadata, question, answer)
        except grpc.aio.AioRpcError as error:
            text = error.details() or ""
            code = from_message(text).code if is_coded(text) else error.code().name
            raise RequestFailed(code, text) from None
        except BROKEN as error:
            raise _broken(self._address, error) from error

    async def _ask_retrying(
        self, request: Any, metadata: Any, question: Question, answer: Answer
    ) -> None:
        for repeats in itertools.count():
            try:
                await self._ask_stream(request, metadata, question, answer)
                return
            except RequestFailed as error:
                # Load balancers do not see errors within a stream, so clients repeat what a server
                # has not begun.
                pause = None if answer.first else pause_before_repeat(str(error), repeats)
                if pause is None:
                    raise
                await asyncio.sleep(pause)

    async def _ask_stream(
        self, request: Any, metadata: Any, question: Question, answer: Answer
    ) -> None:
        call = self._stream(metadata=metadata)
        try:
            await call.write(request)
            await call.done_writing()
            async for message in call:
                if text := message.error_message:
                    error = from_message(text)
                    raise RequestFailed(error.code if is_coded(text) else "ERROR", str(error))
                self._read(message.infer_response, question, answer)
        finally:
            call.cancel()

    def _read(self, response: Any, question: Question, answer: Answer) -> None:
        if question.id and response.id != question.id:
            raise RequestFailed("MIXED_UP", f"the answer is that of request '{response.id}'")
        outputs = outputs_of(response)
        if not outputs:  # Only the mark of the last response.
            return
        tokens = sum(outputs.get("num_output_tokens", ()))
        answer.add(text := "".join(outputs.get("text_output", ())))
        has_text = bool(text) or "result" in outputs
        if tokens or has_text:
            answer.arrive()
        # A model that does not count tokens sends one token in a response.
        answer.output_tokens += tokens if "num_output_tokens" in outputs else has_text
        answer.prompt_tokens = max(answer.prompt_tokens, *outputs.get("num_input_tokens", ()), 0)

    def _request(self, question: Question) -> Any:
        request = service_pb2.ModelInferRequest(model_name=self._model, id=question.id)
        content, adapter = question.content, question.adapter
        sampling = {**question.sampling, **({"lora_name": adapter} if adapter else {})}
        as_clip = "frames" in self._inputs
        strings = {
            "text_input": [content.text.encode()],
            "sampling_parameters": [json.dumps(sampling).encode()],
            "task": [question.task.encode()] if question.task else [],
            "image": [*content.images, *(() if as_clip else content.frames)],
            "frames": content.frames if as_clip else [],
        }
        add_strings(request, strings)
        flags = FLAGS.keys() & (self._inputs - {"stream"} if self._unary else self._inputs)
        for name in flags:
            request.inputs.add(name=name, datatype="BOOL", shape=[1])
            request.raw_input_contents.append(bytes([FLAGS[name]]))
        for name in self._outputs:
            request.outputs.add(name=name)
        return request


class OpenAiTarget:
    """A server of OpenAI's chat completions at a URL such as http://127.0.0.1:8080/v1."""

    def __init__(self, url: str, model: str, key: str | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ServerError(f"--openai takes a URL, as in http://127.0.0.1:8080/v1, not '{url}'")
        self._url, self._model = url.rstrip("/"), model
        self._headers = [("content-type", "application/json"), ("accept", "text/event-stream")]
        self._headers += [("authorization", f"Bearer {key}")] if key else []

    async def open(self) -> None:
        # Imported here because it belongs to the extra `gateway`.
        import httpcore2

        self._faults = (httpcore2.NetworkError, httpcore2.ProtocolError, OSError)
        # An open loop must not wait for a free connection.
        self._pool = httpcore2.AsyncConnectionPool(max_connections=None, retries=0)

    async def close(self) -> None:
        await self._pool.aclose()

    async def ask(self, question: Question, answer: Answer) -> None:
        body = json.dumps(self._body(question)).encode()
        url = f"{self._url}/chat/completions"
        headers = [*self._headers, *question.headers]
        try:
            async with self._pool.stream("POST", url, headers=headers, content=body) as response:
                parts = response.aiter_stream()
                if response.status != 200:
                    raise _refusal(response.status, await _first_bytes(parts))
                async for line in _lines(parts):
                    data = line.removeprefix(b"data:").strip()
                    if line.startswith(b"data:") and data != b"[DONE]":
                        self._read(data, answer)
        except BROKEN as error:
            raise _broken(url, error) from error
        except self._faults as error:
            reason = f"no OpenAI API answers at {self._url}: {in_one_line(error)}"
            raise RequestFailed("CONNECTION", f"{reason}; name its URL with --openai") from None

    def _read(self, event: bytes, answer: Answer) -> None:
        found = json.loads(event)
        if "error" in found:
            raise _failure("ERROR", found["error"])
        for choice in found.get("choices") or ():
            delta = choice.get("delta") or {}
            if delta.get("content") or delta.get("reasoning_content"):
                answer.arrive()
                answer.add(delta.get("content") or "")
        if usage := found.get("usage"):
            answer.prompt_tokens = _count(usage["prompt_tokens"])
            answer.output_tokens = _count(usage["completion_tokens"])

    def _body(self, question: Question) -> dict[str, Any]:
        content = question.content
        urls = [f"data:image/jpeg;base64,{_base64(file)}" for file in content.images]
        parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        if content.frames:
            clip = "data:video/jpeg;base64," + ",".join(map(_base64, content.frames))
            parts.append({"type": "video_url", "video_url": {"url": clip}})
        said = [*parts, {"type": "text", "text": content.text}] if parts else content.text
        return {
            "model": question.adapter or self._model,
            "messages": [{"role": "user", "content": said}],
            "stream": True,
            "stream_options": {"include_usage": True},
            **question.sampling,
            **({"task": question.task} if question.task else {}),
        }


def _base64(file: bytes) -> str:
    return base64.b64encode(file).decode()


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < MAX_TOKENS:
        raise ValueError(f"{shown(value)} is no number of tokens")
    return value


async def _lines(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the lines of a stream. Raises ValueError for a line that is too long."""
    rest = bytearray()
    async for part in parts:
        end, *following = part.split(b"\n")
        rest += end
        if len(rest) > MAX_ANSWER_BYTES:
            raise ValueError(f"a line has more than {MAX_ANSWER_BYTES} bytes, the limit")
        for line in following:
            yield bytes(rest)
            rest = bytearray(line)


async def _first_bytes(parts: AsyncIterator[bytes]) -> bytes:
    """Return the bytes of a body until they are as long as a line may be."""
    body = bytearray()
    async for part in parts:
        body += part
        if len(body) > MAX_ANSWER_BYTES:
            break
    return bytes(body)


def _broken(address: str, error: Exception) -> RequestFailed:
    return RequestFailed("BAD_ANSWER", f"{address}: {in_one_line(error)}")


def _refusal(status: int, body: bytes) -> RequestFailed:
    """Return the error of an answer with this HTTP status."""
    try:
        return _failure(f"HTTP_{status}", json.loads(body)["error"])
    except BROKEN:
        return RequestFailed(f"HTTP_{status}", body[:MAX_MESSAGE].decode(errors="replace"))


def _failure(code: str, error: Any) -> RequestFailed:
    if isinstance(error, str):
        return RequestFailed(code, error)
    named = error.get("code")
    is_code = isinstance(named, str) and CODE.fullmatch(named)
    return RequestFailed(named if is_code else code, str(error.get("message")))
