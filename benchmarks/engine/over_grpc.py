"""The load of `vlora bench engine` over gRPC: a real server, a stream for each request."""

from __future__ import annotations

import io
import json
import queue
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.engine.load import OUTPUT, Ask, Run
from benchmarks.llava import Checkpoint
from benchmarks.synthetic_model import NAMES
from vlora.launcher.server import ServerOptions, TritonServer

ENSEMBLE = "visual_retrieval"
ANSWER_SECONDS = 180.0


class Served:
    """A server of its own with the checkpoint, and a client for each stream; use with `with`."""

    def __init__(
        self, checkpoint: Checkpoint, dtype: str, more: dict[str, Any], streams: int
    ) -> None:
        self._options = ServerOptions(
            model=checkpoint.folder,
            adapters=checkpoint.adapters,
            model_json={"dtype": NAMES[dtype], **more},
        )
        self._streams = streams
        self._stack = ExitStack()
        self._clients: list[Any] = []
        self._news: queue.SimpleQueue[tuple[int, float, Any, Any]] = queue.SimpleQueue()

    def __enter__(self) -> Served:
        import tritonclient.grpc as grpcclient

        with ExitStack() as stack:
            server = stack.enter_context(TritonServer(self._options))
            for number in range(self._streams):
                client = grpcclient.InferenceServerClient(server.grpc_url)
                stack.callback(client.close)
                client.start_stream(callback=partial(self._heard, number))
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

    def run(self, asks: Sequence[Ask]) -> Run:
        inputs = [_inputs(ask) for ask in asks]
        first: dict[int, float] = {}
        end: dict[int, float] = {}
        started = time.perf_counter()
        for client, given in zip(self._clients, inputs, strict=False):  # fewer, maybe
            client.async_stream_infer(ENSEMBLE, given, enable_empty_final_response=True)
        while len(end) < len(asks):
            number, now, result, error = self._news.get(timeout=ANSWER_SECONDS)
            if error is not None:
                raise error
            first.setdefault(number, now)
            if result.get_response().parameters["triton_final_response"].bool_param:
                end[number] = now
        order = range(len(asks))
        return Run([first[i] - started for i in order], [end[i] - started for i in order])

    def _heard(self, number: int, result: Any, error: Any) -> None:
        self._news.put((number, time.perf_counter(), result, error))


def _inputs(ask: Ask) -> list[Any]:
    sampling: dict[str, Any] = {"temperature": 0, "max_tokens": OUTPUT, "ignore_eos": True}
    if ask.adapter is not None:
        sampling["lora_name"] = ask.adapter
    given: dict[str, bytes] = {
        "text_input": ask.prompt.encode(),
        "sampling_parameters": json.dumps(sampling).encode(),
        "task": b"raw",
    }
    if ask.image is not None:
        encoded = io.BytesIO()
        Image.fromarray(ask.image).save(encoded, "PNG")
        given["image"] = encoded.getvalue()
    return [_string(name, value) for name, value in given.items()]


def _string(name: str, value: bytes) -> Any:
    import tritonclient.grpc as grpcclient

    tensor = grpcclient.InferInput(name, [1], "BYTES")
    tensor.set_data_from_numpy(np.array([value], dtype=np.object_))
    return tensor
