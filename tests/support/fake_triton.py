"""A gRPC server that behaves like Triton, for tests of the clients.

It answers `video_analytics` with `moving left` after `delay` seconds and streams words for
`visual_retrieval`. It stores all requests.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import deserialize_bytes_tensor, serialize_byte_tensor

from vlora.vision.results import build_result


class FakeTriton(service_pb2_grpc.GRPCInferenceServiceServicer):
    """`with FakeTriton() as server:` serves on a free port of 127.0.0.1, or on `port`."""

    def __init__(
        self,
        delay: float = 0.0,
        words: tuple[str, ...] = ("a ", "red ", "star"),
        port: int = 0,
    ) -> None:
        self._port = port
        self.delay = delay
        self.words = words
        self.requests: list[dict[str, object]] = []
        self.models = {"visual_retrieval", "video_analytics"}
        self.refusal: str | None = None
        self.refusals: list[str] = []  # Of the next streams, before their first answers.
        self.headers: list[dict[str, str]] = []
        self.cancelled = threading.Event()

    def __enter__(self) -> FakeTriton:
        self._server = grpc.server(ThreadPoolExecutor(32))
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(self, self._server)
        self.url = f"127.0.0.1:{self._server.add_insecure_port(f'127.0.0.1:{self._port}')}"
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(grace=None).wait()

    def ServerLive(self, request, context):  # noqa: N802
        return service_pb2.ServerLiveResponse(live=True)

    def ModelReady(self, request, context):  # noqa: N802
        return service_pb2.ModelReadyResponse(ready=request.name in self.models)

    def ModelInfer(self, request, context):  # noqa: N802
        values = self._read(request)
        self.headers.append(dict(context.invocation_metadata()))
        time.sleep(self.delay)
        if self.refusal:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, self.refusal)
        count = len(values.get("frames", ()))
        result = build_result(
            text="moving left",
            details={"task": _text(values, "task", "vqa"), "adapter": None, "timings": {}},
            layout=np.array([[0, 1, 1, 1, 1, 1]] * count, np.int32).reshape(-1, 6),
            size=np.ones((count, 2), np.int32),
            metadata=_text(values, "metadata", ""),
        )
        return _response("video_analytics", {"result": result})

    def ModelStreamInfer(self, requests, context):  # noqa: N802
        ended = threading.Event()
        context.add_callback(ended.set)
        context.add_callback(self.cancelled.set)
        self.headers.append(dict(context.invocation_metadata()))
        for request in requests:
            self._read(request)
            if self.refusals:
                refusal = self.refusals.pop(0)
                yield service_pb2.ModelStreamInferResponse(error_message=refusal)
                continue
            for word in self.words:
                ended.wait(self.delay)
                yield service_pb2.ModelStreamInferResponse(
                    infer_response=_response("visual_retrieval", {"text_output": word})
                )
            if self.refusal:
                yield service_pb2.ModelStreamInferResponse(error_message=self.refusal)
                continue
            last = _response("visual_retrieval", {})
            last.parameters["triton_final_response"].bool_param = True
            yield service_pb2.ModelStreamInferResponse(infer_response=last)

    def _read(self, request) -> dict[str, object]:
        raw = iter(request.raw_input_contents)
        values: dict[str, object] = {}
        for tensor in request.inputs:
            values[tensor.name] = list(deserialize_bytes_tensor(next(raw)))
        self.requests.append(values)
        return values


def _response(model: str, outputs: dict[str, str]) -> service_pb2.ModelInferResponse:
    answer = service_pb2.ModelInferResponse(model_name=model)
    for name, text in outputs.items():
        answer.outputs.add(name=name, datatype="BYTES", shape=[1])
        values = np.array([text.encode()], dtype=np.object_)
        answer.raw_output_contents.append(serialize_byte_tensor(values).item())
    return answer


def _text(values: dict[str, object], name: str, default: str) -> str:
    """Return the text of an input, or `default` if the request does not have it."""
    return values[name][0].decode() if name in values else default
