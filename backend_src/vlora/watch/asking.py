"""Requests about chunks to `video_analytics` by gRPC."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grpc

from vlora.errors import (
    Cancelled,
    InvalidArgument,
    ServerError,
    Unavailable,
    from_message,
    is_coded,
    pause_before_repeat,
)
from vlora.net import (
    add_strings,
    aio_channel,
    load_grpc_stubs,
    outputs_of,
    port_hint,
    routing_headers,
)
from vlora.sampling import YES
from vlora.watch.answers import Answer
from vlora.watch.chunks import Chunk
from vlora.watch.clock import unix_time
from vlora.watch.config import Camera
from vlora.watch.pixels import Shot

MODEL = "video_analytics"
SETUP_SECONDS = 5.0
WORDS = "word_probabilities"  # Key of requests and of `result`.
EXTRA_SECONDS = 5.0  # Time for an answer beyond its deadline, which the server keeps.


class NoServer(ServerError):
    """Raised for a request that reached no server."""


class Analytics:
    """A connection that all cameras of a server share."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._messages, _ = load_grpc_stubs()
        # After a failure, gRPC would wait for up to two minutes before it connects again.
        self._channel = aio_channel(address, None, [("grpc.max_reconnect_backoff_ms", 5000)])
        service = "/inference.GRPCInferenceService"
        self._infer = self._channel.unary_unary(
            f"{service}/ModelInfer",
            request_serializer=self._messages.ModelInferRequest.SerializeToString,
            response_deserializer=self._messages.ModelInferResponse.FromString,
        )
        self._ready = self._channel.unary_unary(
            f"{service}/ModelReady",
            request_serializer=self._messages.ModelReadyRequest.SerializeToString,
            response_deserializer=self._messages.ModelReadyResponse.FromString,
        )

    async def __aenter__(self) -> Analytics:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    async def check(self) -> None:
        """Raise ServerError unless the server answers and has the model ready."""
        request = self._messages.ModelReadyRequest(name=MODEL)
        try:
            ready = (await self._ready(request, timeout=SETUP_SECONDS)).ready
        except grpc.aio.AioRpcError as error:
            raise self._no_server(error) from None
        if not ready:
            raise ServerError(f"the server at {self._address} has no model '{MODEL}' ready")

    async def ask(self, camera: Camera, stream_id: str, frames: Sequence[bytes]) -> dict[str, Any]:
        """Return the `result` for frames as JPEG files. Raises VLoraError, and NoServer."""
        request = self._request(camera, stream_id, frames)
        timeout = camera.deadline / 1e3 + EXTRA_SECONDS
        headers = routing_headers(camera.adapter, stream_id)
        try:
            response = await self._infer(request, timeout=timeout, metadata=headers)
        except grpc.aio.AioRpcError as error:
            details = error.details() or ""
            if is_coded(details):
                raise from_message(details) from None
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise Cancelled(f"no answer within {timeout:g} s") from None
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                raise self._no_server(error) from None
            raise InvalidArgument(f"{error.code().name}: {details}") from None
        result = json.loads(outputs_of(response)["result"][0])
        assert isinstance(result, dict)
        return result

    def _no_server(self, error: Any) -> NoServer:
        details = error.details() or error.code().name
        return NoServer(
            f"no server answers at {self._address}: {details}{port_hint(details)}; start one with"
            " `vlora serve`, or name its gRPC address with --grpc HOST:PORT"
        )

    def _request(self, camera: Camera, stream_id: str, frames: Sequence[bytes]) -> Any:
        keys = {**camera.sampling, "priority": camera.priority, "deadline_ms": camera.deadline}
        keys |= {"stream_id": stream_id, "supersede": True}
        if camera.adapter:
            keys["lora_name"] = camera.adapter
        words = keys.get(WORDS) or []
        is_asked = any(rule.when.yes_probability is not None for rule in camera.alerts)
        if is_asked and isinstance(words, list):  # The server refuses anything else.
            keys[WORDS] = words if YES in words else [*words, YES]
        strings: dict[str, Sequence[bytes]] = {
            "text_input": [camera.question.encode()],
            "sampling_parameters": [json.dumps(keys).encode()],
            "task": [camera.task.encode()] if camera.task else [],
            "frames": frames,
        }
        request = self._messages.ModelInferRequest(model_name=MODEL)
        add_strings(request, strings)
        request.outputs.add(name="result")
        return request


def is_full(error: Exception) -> bool:
    """Return whether the server refused a request since its queue is full."""
    return isinstance(error, Unavailable) and pause_before_repeat(str(error), 0) is None


def answer_of(
    name: str,
    chunk: Chunk[Shot],
    result: Mapping[str, Any],
    clip: Callable[[float, float], bytes | None],
) -> Answer:
    """Return the answer to a chunk from the server's `result`."""
    # Boxes belong to the last frame, unless the task says otherwise.
    found = [one["index"] for one in result["frames"] if one["objects"]]
    index = found[-1] if found else len(chunk.frames) // 2
    scores = {str(label): float(score) for label, score in result["scores"].items()}
    yes = {label.lower(): score for label, score in scores.items()} | result.get(WORDS, {})
    adapter = result["adapter"] or {}
    return Answer(
        camera=name,
        began=chunk.began,
        ended=chunk.ended,
        answered=unix_time(),
        text=result["text"],
        scores=scores,
        yes=yes.get(YES),
        objects=result["frames"][index]["objects"] if found else (),
        adapter=adapter.get("name", ""),
        digest=adapter.get("digest", ""),
        picture=chunk.frames[index].file,
        clip=clip,
    )
