"""One load of the engine benchmark over gRPC, on a real server, with one stream per request."""

from __future__ import annotations

import json
import queue
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Any

import numpy as np

from benchmarks.dtypes import ENGINE_NAMES
from benchmarks.engine.load import LoadRequest, LoadTimes, sampling
from benchmarks.llava import Checkpoint
from vlora.launcher.repository import ServerOptions
from vlora.launcher.server import TritonServer

ENSEMBLE = "visual_retrieval"
RESPONSE_TIMEOUT_SECONDS = 180.0


class OverGrpc:
    """A server of the checkpoint, and one client per stream.

    Use as a context manager.
    """

    def __init__(
        self, checkpoint: Checkpoint, dtype: str, engine_options: dict[str, Any], streams: int
    ) -> None:
        self._options = ServerOptions(
            model=checkpoint.folder,
            adapters=checkpoint.adapters,
            model_json={"dtype": ENGINE_NAMES[dtype], **engine_options},
        )
        self._streams = streams
        self._stack = ExitStack()
        self._clients: list[Any] = []
        self._responses: queue.Queue[tuple[int, float, Any, Any]] = queue.Queue()

    def __enter__(self) -> OverGrpc:
        import tritonclient.grpc as grpcclient

        with ExitStack() as stack:
            server = stack.enter_context(TritonServer(self._options))
            for number in range(self._streams):
                client = grpcclient.InferenceServerClient(server.grpc_url)
                stack.callback(client.close)
                client.start_stream(callback=partial(self._on_response, number))
                stack.callback(client.stop_stream)
                self._clients.append(client)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()

    def run(self, requests: Sequence[LoadRequest]) -> LoadTimes:
        """Send all requests at once, one per stream, and return their times.

        If a request fails, its error is raised.
        """
        all_inputs = [_inputs(request) for request in requests]
        first: dict[int, float] = {}
        end: dict[int, float] = {}
        started = time.perf_counter()
        # There may be fewer requests than streams.
        for client, inputs in zip(self._clients, all_inputs, strict=False):
            client.async_stream_infer(ENSEMBLE, inputs, enable_empty_final_response=True)
        while len(end) < len(requests):
            number, now, result, error = self._responses.get(timeout=RESPONSE_TIMEOUT_SECONDS)
            if error is not None:
                raise error
            first.setdefault(number, now)
            if result.get_response().parameters["triton_final_response"].bool_param:
                end[number] = now
        order = range(len(requests))
        return LoadTimes([first[i] - started for i in order], [end[i] - started for i in order])

    def _on_response(self, number: int, result: Any, error: Any) -> None:
        self._responses.put((number, time.perf_counter(), result, error))


def _inputs(request: LoadRequest) -> list[Any]:
    values: dict[str, bytes] = {
        "text_input": request.prompt.encode(),
        "sampling_parameters": json.dumps(sampling(request.adapter)).encode(),
        "task": b"raw",
    }
    if (file := request.file()) is not None:
        values["image"] = file
    return [_bytes_tensor(name, value) for name, value in values.items()]


def _bytes_tensor(name: str, value: bytes) -> Any:
    import tritonclient.grpc as grpcclient

    tensor = grpcclient.InferInput(name, [1], "BYTES")
    tensor.set_data_from_numpy(np.array([value], dtype=np.object_))
    return tensor
